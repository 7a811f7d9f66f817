from dips.protos import common_pb2 as _common_pb2
from dips.protos import options_pb2 as _options_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_OP_UNSPECIFIED: _ClassVar[DataOp]
    PUT_CHUNK: _ClassVar[DataOp]
    QUERY_MISSING: _ClassVar[DataOp]
    GET_CHUNK: _ClassVar[DataOp]
    ACK: _ClassVar[DataOp]
    MISSING: _ClassVar[DataOp]
    CHUNK: _ClassVar[DataOp]
    REFUSED: _ClassVar[DataOp]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_F32: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
DATA_OP_UNSPECIFIED: DataOp
PUT_CHUNK: DataOp
QUERY_MISSING: DataOp
GET_CHUNK: DataOp
ACK: DataOp
MISSING: DataOp
CHUNK: DataOp
REFUSED: DataOp
CODEC_UNSPECIFIED: Codec
CODEC_F32: Codec
CODEC_BF16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec

class DataHeader(_message.Message):
    __slots__ = ("protocol", "run_id", "epoch", "op", "push", "attempt", "version", "block", "offset_bytes", "length_bytes", "codec", "checksum", "request", "cause_id", "refusal", "missing", "complete", "credit", "momentum", "base", "header_checksum")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    HEADER_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    epoch: int
    op: DataOp
    push: _common_pb2.PushId
    attempt: int
    version: _common_pb2.Version
    block: int
    offset_bytes: int
    length_bytes: int
    codec: Codec
    checksum: int
    request: int
    cause_id: str
    refusal: _common_pb2.Refusal
    missing: _containers.RepeatedCompositeFieldContainer[MissingChunk]
    complete: bool
    credit: int
    momentum: bool
    base: _common_pb2.Version
    header_checksum: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., epoch: _Optional[int] = ..., op: _Optional[_Union[DataOp, str]] = ..., push: _Optional[_Union[_common_pb2.PushId, _Mapping]] = ..., attempt: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., block: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., checksum: _Optional[int] = ..., request: _Optional[int] = ..., cause_id: _Optional[str] = ..., refusal: _Optional[_Union[_common_pb2.Refusal, _Mapping]] = ..., missing: _Optional[_Iterable[_Union[MissingChunk, _Mapping]]] = ..., complete: _Optional[bool] = ..., credit: _Optional[int] = ..., momentum: _Optional[bool] = ..., base: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., header_checksum: _Optional[int] = ...) -> None: ...

class MissingChunk(_message.Message):
    __slots__ = ("block", "offset_bytes")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset_bytes: int
    def __init__(self, block: _Optional[int] = ..., offset_bytes: _Optional[int] = ...) -> None: ...
