from dips.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaMessage(_message.Message):
    __slots__ = ("hello", "run_id", "epoch", "process_id", "number", "digest")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    run_id: str
    epoch: int
    process_id: bytes
    number: int
    digest: str
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., process_id: _Optional[bytes] = ..., number: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class JournalBatch(_message.Message):
    __slots__ = ("after", "after_digest", "records", "is_whole", "snapshot_json", "snapshot_digest", "revoked")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_JSON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    after: int
    after_digest: str
    records: _containers.RepeatedScalarFieldContainer[bytes]
    is_whole: bool
    snapshot_json: str
    snapshot_digest: str
    revoked: bytes
    def __init__(self, after: _Optional[int] = ..., after_digest: _Optional[str] = ..., records: _Optional[_Iterable[bytes]] = ..., is_whole: _Optional[bool] = ..., snapshot_json: _Optional[str] = ..., snapshot_digest: _Optional[str] = ..., revoked: _Optional[bytes] = ...) -> None: ...
