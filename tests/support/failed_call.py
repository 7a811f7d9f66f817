"""A call of gRPC that failed, as its caller gets it."""

from __future__ import annotations

import grpc

from dips.core.messages import Refusal
from dips.core.net.codec_protobuf import encode
from dips.core.net.grpc_calls import REFUSAL_KEY

Metadata = tuple[tuple[str, str | bytes], ...]


class FailedCall(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, details: str | None = "", metadata: Metadata | None = ()) -> None:
        super().__init__(status.name)
        self._answers = (status, details, metadata)

    @classmethod
    def refused(cls, status: grpc.StatusCode, refusal: Refusal) -> FailedCall:
        return cls(status, refusal.sentence, ((REFUSAL_KEY, encode(refusal)),))

    def code(self) -> grpc.StatusCode:
        return self._answers[0]

    def details(self) -> str | None:
        return self._answers[1]

    def trailing_metadata(self) -> Metadata | None:  # type: ignore[override]  # grpc says None where there is none
        return self._answers[2]
