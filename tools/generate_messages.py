"""Writes all that follows from the .proto files: protoc's stubs, the frozen messages, and the codec between the two.

`make protos` runs it. The messages are dataclasses that know nothing of protobuf, so that state machines and the
simulator use them without it. What a class says and proto3 cannot, such as a default, is an option of options.proto.
Comments of the .proto files become docstrings and comments; ruff breaks the lines.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MessageOptions,
)

SOURCE = Path(__file__).resolve().parents[1] / "src"
ENUMS, MESSAGES, CODEC = "dips.protos.enums", "dips.core.messages", "dips.core.net.messages_pb2"
WIDTH = 120

SCALARS = {
    FieldDescriptorProto.TYPE_DOUBLE: "float",
    FieldDescriptorProto.TYPE_UINT32: "int",
    FieldDescriptorProto.TYPE_UINT64: "int",
    FieldDescriptorProto.TYPE_INT64: "int",
    FieldDescriptorProto.TYPE_FIXED64: "int",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
}
ZEROS = {"float": "0.0", "int": "0", "bool": "False", "str": '""', "bytes": 'b""'}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@dataclass
class ProtoEnum:
    name: str
    comment: str
    members: list[tuple[str, int, str]]  # name, number, comment
    zero: str  # the member 0; empty: there is none
    properties: dict[str, list[str]]  # the members of which each is true


@dataclass
class ProtoField:
    """One field of a class: a field of the message, or a oneof with its alternatives."""

    name: str
    comment: str
    wire: FieldDescriptorProto | None  # None: a oneof
    kind: str  # type of one element, in Python
    is_message: bool = False
    is_enum: bool = False
    repeated: bool = False
    map_of: tuple[str, str] | None = None
    optional: bool = False
    python_type: str = ""
    default: str | None = None
    alternatives: list[ProtoField] = field(default_factory=list)
    union: str = ""

    @property
    def annotation(self) -> str:
        if self.map_of:
            return f"tuple[tuple[{self.map_of[0]}, {self.map_of[1]}], ...]"
        if self.repeated:
            return f"tuple[{self.kind}, ...]"
        return f"{self.kind} | None" if self.optional else self.kind


@dataclass
class ProtoMessage:
    name: str
    comment: str
    stub: str  # "common_pb2"
    fields: list[ProtoField]
    python_class: str
    ordered: bool


@dataclass
class ProtoFile:
    """What one .proto file declares, in its order."""

    name: str
    comment: str
    enums: list[ProtoEnum]
    messages: list[ProtoMessage]
    unions: list[tuple[str, list[str]]]


class DescriptorReader:
    """Reads descriptors, with their comments and options, into the classes above."""

    def __init__(self, descriptors: FileDescriptorSet, options: Any) -> None:
        self._options = options
        self._protos = [
            one for one in descriptors.file if one.name.startswith("dips/") and not one.name.endswith("options.proto")
        ]
        self._messages = {f".{one.package}.{m.name}": m.name for one in self._protos for m in one.message_type}
        self._enums = {f".{one.package}.{e.name}": self._enum(one, e) for one in self._protos for e in one.enum_type}

    def files(self) -> Iterator[ProtoFile]:
        return map(self._file, self._protos)

    def _file(self, proto: FileDescriptorProto) -> ProtoFile:
        comments = _comments(proto)
        said = self._options
        messages = [
            self._message(proto, comments, number, message)
            for number, message in enumerate(proto.message_type)
            if not message.options.Extensions[said.own_codec]
        ]
        unions = [(one.union, [a.kind for a in one.alternatives]) for m in messages for one in m.fields if one.union]
        for service in proto.service:
            if name := service.options.Extensions[said.service_union]:
                for what in ("Request", "Reply"):
                    types = [m.input_type if what == "Request" else m.output_type for m in service.method]
                    unions.append((name + what, [self._messages[one] for one in types]))
        enums = [self._enums[f".{proto.package}.{one.name}"] for one in proto.enum_type]
        return ProtoFile(Path(proto.name).name, comments.get((12,), ""), enums, messages, unions)

    def _enum(self, proto: FileDescriptorProto, enum: EnumDescriptorProto) -> ProtoEnum:
        """Members lose the prefix that protobuf's scopes need: what precedes UNSPECIFIED in the name of 0."""
        comments = _comments(proto)
        at = (5, list(proto.enum_type).index(enum))
        zero = enum.options.Extensions[self._options.zero]
        prefix = enum.value[0].name.removesuffix("UNSPECIFIED")
        members = [
            (value.name.removeprefix(prefix) if value.number else zero, value.number, comments.get((*at, 2, n), ""))
            for n, value in enumerate(enum.value)
            if value.number or zero
        ]
        properties: dict[str, list[str]] = {}
        for value in enum.value:
            if name := value.options.Extensions[self._options.property]:
                properties.setdefault(name, []).append(value.name.removeprefix(prefix))
        return ProtoEnum(enum.name, comments.get(at, ""), members, zero, properties)

    def _message(
        self, proto: FileDescriptorProto, comments: dict[tuple[int, ...], str], number: int, message: DescriptorProto
    ) -> ProtoMessage:
        said: MessageOptions = message.options
        fields: list[ProtoField] = []
        oneofs: dict[int, ProtoField] = {}
        omitted = False
        for n, wire in enumerate(message.field):
            one = self._field(message, wire, comments.get((4, number, 2, n), ""))
            if wire.HasField("oneof_index") and not wire.proto3_optional:
                if wire.oneof_index not in oneofs:
                    oneofs[wire.oneof_index] = self._oneof(message, wire.oneof_index)
                    fields.append(oneofs[wire.oneof_index])
                oneofs[wire.oneof_index].alternatives.append(one)
                continue
            default = wire.options.Extensions[self._options.default_value]
            omitted = omitted or bool(default) or wire.options.Extensions[self._options.may_omit]
            one.default = self._default(one, default) if omitted else None
            fields.append(one)
        for oneof in oneofs.values():
            oneof.kind = oneof.union or " | ".join(one.kind for one in oneof.alternatives)
        return ProtoMessage(
            message.name,
            comments.get((4, number), ""),
            Path(proto.name).stem + "_pb2",
            fields,
            said.Extensions[self._options.python_class],
            said.Extensions[self._options.ordered],
        )

    def _oneof(self, message: DescriptorProto, index: int) -> ProtoField:
        said = message.oneof_decl[index].options.Extensions
        optional = said[self._options.may_be_absent]
        return ProtoField(
            message.oneof_decl[index].name, "", None, "", optional=optional, union=said[self._options.oneof_union]
        )

    def _field(self, message: DescriptorProto, wire: FieldDescriptorProto, comment: str) -> ProtoField:
        one = ProtoField(wire.name, comment, wire, SCALARS.get(wire.type, ""))
        one.repeated = wire.label == FieldDescriptorProto.LABEL_REPEATED
        one.optional = wire.proto3_optional
        one.python_type = wire.options.Extensions[self._options.python_type]
        entry = next((n for n in message.nested_type if wire.type_name.endswith(f".{message.name}.{n.name}")), None)
        if entry is not None:
            one.map_of = (SCALARS[entry.field[0].type], SCALARS[entry.field[1].type])
        elif wire.type_name in self._enums:
            one.kind, one.is_enum = self._enums[wire.type_name].name, True
        elif wire.type_name:
            one.kind, one.is_message = self._messages[wire.type_name], True
        if (one.optional and not one.is_message) or (one.repeated and one.is_enum) or not (one.kind or one.map_of):
            raise SystemExit(f"{message.name}.{wire.name}: fields of this form are not written yet")
        return one

    def _default(self, one: ProtoField, said: str) -> str:
        """A Python expression. Raises SystemExit for a field that has no zero."""
        if one.is_enum and not said:
            said = self._enums[one.wire.type_name].zero if one.wire is not None else ""
            if not said:
                raise SystemExit(f"{one.name}: {one.kind} has no member 0 to be the default")
        if said:
            texts = {"str": repr(said), "float": "NAN" if said == "nan" else said, "bool": said.title()}
            return f"{one.kind}.{said}" if one.is_enum else texts.get(one.kind, said)
        if one.repeated or one.map_of:
            return "()"
        return "None" if one.optional else f"{one.kind}()" if one.is_message else ZEROS[one.kind]


def _comments(proto: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Path of a declaration, as descriptor.proto numbers it -> the comment before or behind it."""
    found = {}
    for place in proto.source_code_info.location:
        text = place.leading_comments or place.trailing_comments
        if text:
            found[tuple(place.path)] = textwrap.dedent(text).strip()
    return found


# ---- text ------------------------------------------------------------------------------------------------------------


def enums_module(files: Sequence[ProtoFile]) -> str:
    lines = [_header("The enums of the .proto files, without the prefixes that protobuf needs.")]
    lines.append("from enum import IntEnum\n")
    for enum in (enum for one in files for enum in one.enums):
        lines += ["", f"class {enum.name}(IntEnum):", *_docstring(enum.comment)]
        for name, number, comment in enum.members:
            lines += _with_comment(f"{name} = {number}", comment)
        for name, members in enum.properties.items():
            true = ", ".join(f"{enum.name}.{member}" for member in members)
            lines += ["", "    @property", f"    def {name}(self) -> bool:", f"        return self in ({true})"]
    return "\n".join(lines)


def messages_module(files: Sequence[ProtoFile]) -> str:
    """Annotations are not evaluated, so classes keep the order of the files; unions follow what they are made of."""
    about = (
        "The messages between the roles, as frozen values that the state machines take and return.\n\n"
        "`X | None` is a message that may be absent; a oneof is one field whose type says which it is. Classes with\n"
        "behaviour are written by hand in other modules; they and the enums can be imported from here as well."
    )
    lines = [_header(about), "import math", "from dataclasses import dataclass"]
    lines += _imports_of_values(files)
    lines += ["", "NAN = math.nan", '"""Unknown, in a field that holds a measurement."""', ""]
    for one in files:
        lines += ["", f"# ---- {one.name} ----", "#", *textwrap.indent(one.comment, "# ").splitlines(), ""]
        for message in one.messages:
            if not message.python_class:
                lines += ["", *_class(message)]
        for name, kinds in one.unions:
            lines += ["", f"{name} = {' | '.join(dict.fromkeys(kinds))}"]
    return "\n".join(lines)


def _class(message: ProtoMessage) -> Iterator[str]:
    yield f"@dataclass(frozen=True{', order=True' if message.ordered else ''})"
    yield f"class {message.name}:"
    yield from _docstring(message.comment)
    for one in message.fields:
        default = "" if one.default is None else f" = {one.default}"
        yield from _with_comment(f"{one.name}: {one.annotation}{default}", one.comment)
    if not message.fields and not message.comment:
        yield "    pass"


def codec_module(files: Sequence[ProtoFile]) -> str:
    about = (
        "Copies each message into its protobuf message and back; core/net/grpc_calls.py uses it.\n\n"
        "Reading checks presence and enums and refuses with MALFORMED; protobuf has checked the types."
    )
    messages = [message for one in files for message in one.messages]
    enums = sorted({f.kind for m in messages for f in m.fields if f.is_enum})
    stubs = sorted({m.stub for m in messages})
    lines = [_header(about), "from collections.abc import Callable, Mapping", "from enum import IntEnum"]
    lines += ["from typing import Any, TypeVar, assert_never", "from google.protobuf.message import Message"]
    lines += ["from dips.core import messages as m", "from dips.core.errors import RefusalCode, Refused"]
    lines += [f"from dips.protos import {', '.join(stubs)}"]
    types = sorted({f.python_type for message in messages for f in message.fields if f.python_type})
    lines += [f"from {name.rpartition('.')[0]} import {name.rpartition('.')[2]}" for name in types]
    lines += [CODEC_HELPERS]
    lines += [f"_{_snake(name).upper()} = {{int(member): member for member in m.{name}}}" for name in enums]
    for message in messages:
        lines += ["", *_write(message), "", *_read(message)]
    lines += ["", "CODECS: Mapping[type[Any], tuple[type[Message], Write, Read]] = {"]
    for message in messages:
        snake = _snake(message.name)
        lines.append(f"m.{message.name}: ({message.stub}.{message.name}, write_{snake}, read_{snake}),")
    lines += ["}", '"""For each class: its protobuf message, and how to fill and to read one."""']
    return "\n".join(lines)


CODEC_HELPERS = """
E = TypeVar("E", bound=IntEnum)
Write = Callable[[Any, Any], None]
Read = Callable[[Any], Any]


def _malformed(field: str, why: str) -> Refused:
    return Refused(RefusalCode.MALFORMED, f"{field}: {why}")


def _member(members: Mapping[int, E], number: int, field: str) -> E:
    found = members.get(number)
    if found is None:
        raise _malformed(field, f"{number} is not a known {type(next(iter(members.values()))).__name__}")
    return found

"""


def _write(message: ProtoMessage) -> Iterator[str]:
    yield f"def write_{_snake(message.name)}(value: m.{message.name}, message: {message.stub}.{message.name}) -> None:"
    # Makes it present in the message that it is a part of, even when each of its fields is zero.
    yield "    message.SetInParent()"
    for one in message.fields:
        ours, theirs = f"value.{one.name}", f"message.{one.name}"
        if one.alternatives:
            yield f"    {one.name} = {ours}"
            for n, alternative in enumerate(one.alternatives):
                yield f"    {'elif' if n else 'if'} isinstance({one.name}, m.{alternative.kind}):"
                yield f"        write_{_snake(alternative.kind)}({one.name}, message.{alternative.name})"
            yield f"    elif {one.name} is not None:" if one.optional else "    else:"
            yield f"        assert_never({one.name})"
        elif one.map_of:
            yield f"    {theirs}.update({ours})"
        elif one.repeated and one.is_message:
            yield f"    for {_snake(one.kind)} in {ours}:"
            yield f"        write_{_snake(one.kind)}({_snake(one.kind)}, {theirs}.add())"
        elif one.repeated:
            yield f"    {theirs}.extend({ours})"
        elif one.is_message and one.optional:
            yield f"    if {ours} is not None:"
            yield f"        write_{_snake(one.kind)}({ours}, {theirs})"
        elif one.is_message:
            yield f"    write_{_snake(one.kind)}({ours}, {theirs})"
        else:
            yield f"    {theirs} = {ours}" + ("  # type: ignore[assignment]" if one.is_enum else "")


def _read(message: ProtoMessage) -> Iterator[str]:
    yield f"def read_{_snake(message.name)}(message: {message.stub}.{message.name}) -> m.{message.name}:"
    for one in message.fields:
        if one.alternatives:
            union = one.union and f"m.{one.union}"
            kinds = union or " | ".join(f"m.{alternative.kind}" for alternative in one.alternatives)
            yield f"    {one.name}: {kinds}{' | None' if one.optional else ''}"
            yield f'    match message.WhichOneof("{one.name}"):'
            for alternative in one.alternatives:
                yield f'        case "{alternative.name}":'
                yield f"            {one.name} = read_{_snake(alternative.kind)}(message.{alternative.name})"
            yield "        case _:"
            missing = f'raise _malformed("{message.name}.{one.name}", "none of its alternatives is set")'
            yield f"            {f'{one.name} = None' if one.optional else missing}"
        elif one.is_message and not one.optional and not one.repeated:
            yield f'    if not message.HasField("{one.name}"):'
            yield f'        raise _malformed("{message.name}.{one.name}", "it is missing")'
    arguments = ", ".join(f"{one.name}={_read_field(message, one)}" for one in message.fields)
    yield f"    return m.{message.name}({arguments})"


def _read_field(message: ProtoMessage, one: ProtoField) -> str:
    theirs, read = f"message.{one.name}", f"read_{_snake(one.kind)}"
    if one.alternatives:
        return one.name
    if one.map_of:
        return f"tuple(sorted({theirs}.items()))"
    if one.repeated:
        return f"tuple(map({read}, {theirs}))" if one.is_message else f"tuple({theirs})"
    if one.is_message:
        return f'{read}({theirs}) if message.HasField("{one.name}") else None' if one.optional else f"{read}({theirs})"
    if one.is_enum:
        return f'_member(_{_snake(one.kind).upper()}, {theirs}, "{message.name}.{one.name}")'
    return f"{one.python_type.rpartition('.')[2]}({theirs})" if one.python_type else theirs


def _header(about: str) -> str:
    generated = "Generated by `make protos`: change protos/*.proto."
    return f'"""{about}\n\n{generated}\n"""\n\nfrom __future__ import annotations\n'


def _imports_of_values(files: Sequence[ProtoFile]) -> Iterator[str]:
    """Imports `as` the same name are exported again, for type checkers."""
    for message in (message for one in files for message in one.messages if message.python_class):
        module, _, name = message.python_class.rpartition(".")
        yield f"from {module} import {name} as {name}"
    used = {f.kind for one in files for m in one.messages for f in m.fields if f.is_enum}
    for name in sorted(used):
        yield f"from {ENUMS} import {name} as {name}"


def _docstring(comment: str) -> Iterator[str]:
    if comment:
        lines = textwrap.wrap(f'"""{comment}', WIDTH - 7)
        yield textwrap.indent("\n".join(lines) + ('\n"""\n' if len(lines) > 1 else '"""\n'), "    ")


def _with_comment(line: str, comment: str) -> Iterator[str]:
    """The comment behind the line, or before it where it is too long."""
    comment = " ".join(comment.split())
    if not comment:
        yield f"    {line}"
    elif len(line) + len(comment) + 8 <= WIDTH:
        yield f"    {line}  # {comment}"
    else:
        yield from (f"    # {part}" for part in textwrap.wrap(comment, WIDTH - 6))
        yield f"    {line}"


# ---- command line ----------------------------------------------------------------------------------------------------

MODULES: dict[str, Callable[[Sequence[ProtoFile]], str]] = {
    ENUMS: enums_module,
    MESSAGES: messages_module,
    CODEC: codec_module,
}


def generate(out: Path) -> None:
    """Write the stubs and the modules under the folder `out`, which stands for src/."""
    protos = sorted(path.relative_to(SOURCE) for path in (SOURCE / "dips" / "protos").glob("*.proto"))
    with_service = [path for path in protos if re.search(r"^service ", (SOURCE / path).read_text(), re.MULTILINE)]
    with tempfile.NamedTemporaryFile() as descriptors:
        # Retained are options that protoc would leave out of descriptors, as it leaves them out of the stubs.
        wanted = ["--include_source_info", "--include_imports", "--retain_options"]
        _protoc([f"--descriptor_set_out={descriptors.name}", *wanted], protos)
        _protoc([f"--python_out={out}", f"--pyi_out={out}"], protos)
        _protoc([f"--grpc_python_out={out}"], with_service)
        # Not before: protobuf reads an option only if it knows the extension, and that file may just have changed.
        options = importlib.import_module("dips.protos.options_pb2")
        files = list(
            DescriptorReader(FileDescriptorSet.FromString(Path(descriptors.name).read_bytes()), options).files()
        )
    for module, text in MODULES.items():
        path = Path(*module.split(".")).with_suffix(".py")
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(_formatted(text(files), SOURCE / path))


def _protoc(options: Sequence[str], protos: Sequence[Path]) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *options, *map(str, protos)]
    subprocess.run(command, cwd=SOURCE, check=True, timeout=60)


def _formatted(text: str, path: Path) -> str:
    """As ruff sorts imports and breaks lines in the file `path`."""
    for arguments in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(path), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60).stdout
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/generate_messages.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=SOURCE, help="the folder that stands for src/")
    generate(parser.parse_args().out.resolve())


if __name__ == "__main__":
    main()
