from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
PYTHON_CLASS_FIELD_NUMBER: _ClassVar[int]
python_class: _descriptor.FieldDescriptor
ORDERED_FIELD_NUMBER: _ClassVar[int]
ordered: _descriptor.FieldDescriptor
OWN_CODEC_FIELD_NUMBER: _ClassVar[int]
own_codec: _descriptor.FieldDescriptor
MAY_OMIT_FIELD_NUMBER: _ClassVar[int]
may_omit: _descriptor.FieldDescriptor
DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
default_value: _descriptor.FieldDescriptor
PYTHON_TYPE_FIELD_NUMBER: _ClassVar[int]
python_type: _descriptor.FieldDescriptor
MAY_BE_ABSENT_FIELD_NUMBER: _ClassVar[int]
may_be_absent: _descriptor.FieldDescriptor
ONEOF_UNION_FIELD_NUMBER: _ClassVar[int]
oneof_union: _descriptor.FieldDescriptor
ZERO_FIELD_NUMBER: _ClassVar[int]
zero: _descriptor.FieldDescriptor
PROPERTY_FIELD_NUMBER: _ClassVar[int]
property: _descriptor.FieldDescriptor
SERVICE_UNION_FIELD_NUMBER: _ClassVar[int]
service_union: _descriptor.FieldDescriptor
