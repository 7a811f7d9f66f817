"""What a failed call means; the table of statuses is whole. Real calls: tests/integration/test_master_server.py."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.failed_call import FailedCall

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.net.codec_protobuf import encode
from dips.core.net.grpc_calls import MAX_SENTENCE_BYTES, REFUSAL_KEY, STATUS_OF_CODE, refused_from, to_refusal

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def test_no_refusal_looks_like_an_answer_or_a_peer_that_is_away() -> None:
    others = {grpc.StatusCode.OK, *AWAY}
    assert not others & {STATUS_OF_CODE[code] for code in RefusalCode}


@given(code=st.sampled_from(RefusalCode), sentence=st.text(max_size=300), retry_after_s=st.floats(0, 1e6))
def test_the_caller_gets_back_what_the_callee_raised(code: RefusalCode, sentence: str, retry_after_s: float) -> None:
    sent = to_refusal(Refused(code, sentence, retry_after_s))
    error = FailedCall(STATUS_OF_CODE[code], sentence, (("other", "x"), (REFUSAL_KEY, encode(sent))))
    got = refused_from(error)
    assert isinstance(got, Refused)
    assert (got.code, got.sentence, got.retry_after_s) == (code, sentence, retry_after_s)


@given(st.text(min_size=900, max_size=2000))
def test_a_long_sentence_is_cut_between_characters(sentence: str) -> None:
    cut = to_refusal(Refused(RefusalCode.LAYOUT, sentence)).sentence
    assert sentence.startswith(cut)
    assert len(cut.encode()) <= MAX_SENTENCE_BYTES
    assert cut == sentence or len(cut.encode()) > MAX_SENTENCE_BYTES - 4


@pytest.mark.parametrize("status", [*AWAY, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL])
def test_a_peer_that_is_away_or_fails_has_refused_nothing_and_is_tried_again(status: grpc.StatusCode) -> None:
    """A master whose disk failed in the middle of a Join must not end the cluster."""
    got = refused_from(FailedCall(status, "details", None))
    assert isinstance(got, RetryLater)
    assert got.retry_after_s > 0
    assert f"({status.name}: details" in str(got)
    assert ("failed while it served the call" in str(got)) is (status not in AWAY)


@pytest.mark.parametrize(("status", "code"), [
    (grpc.StatusCode.UNIMPLEMENTED, RefusalCode.PROTOCOL_VERSION),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, RefusalCode.MALFORMED),
    (grpc.StatusCode.PERMISSION_DENIED, RefusalCode.UNSPECIFIED),
])  # fmt: skip
def test_what_grpc_itself_refuses_is_not_tried_again(status: grpc.StatusCode, code: RefusalCode) -> None:
    got = refused_from(FailedCall(status, None, None))
    assert isinstance(got, Refused)
    assert (got.code, got.retry_after_s) == (code, 0)
    assert isinstance(refused_from(grpc.RpcError()), RetryLater), "it knows nothing"
    assert got.sentence == f"the peer ended the call with {status.name}: no details"


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x08\xe7\x07"])
def test_metadata_that_cannot_be_read_is_a_refusal_still(garbage: bytes) -> None:
    got = refused_from(FailedCall(grpc.StatusCode.ABORTED, "x", ((REFUSAL_KEY, garbage),)))
    assert isinstance(got, Refused)
    assert got.code is RefusalCode.MALFORMED
    assert got.sentence.startswith("the peer's refusal cannot be read: ")
