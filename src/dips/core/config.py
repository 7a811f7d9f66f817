"""Reads settings from their sources, and reports wrong ones with their place and the remedy.

A table of settings is declared once, as a class derived from Knobs next to the code that uses it: name, type with unit
and range, default, meaning. Everything else is made from that class: the command line's options (local/options.py), the
environment's variables, the tables of all settings files, and the page of docs/ that lists them. The sources are, from
strongest to weakest: the command line, the environment (DIPS_<SECTION>_<FIELD>), the table [section] of a TOML file,
the default. A setting that is unknown is refused: a misspelled key would silently be a default.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

from dips.core.errors import ConfigError
from dips.core.ids import check_name
from dips.core.units import format_bytes, validating

_KUBERNETES = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP)(_.+)?)?)\Z")
"""What Kubernetes puts into every container for a service, here one that is called dips-<section>."""

MAX_TOML_BYTES = 1 << 20
MAX_TOML_LINE_CHARS = 4096
"""Of a settings file: ten times what a run of 1,024 clusters needs."""


class Knobs(BaseModel):
    """Base of all settings: frozen, no unknown fields, and a description for each field."""

    GROUPS: ClassVar[Mapping[str, str]] = {}
    """For people who look for one: the first field of each group of fields, and the group's title."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a field without a description: help texts and documents are made of them."""
        super().__pydantic_init_subclass__(**kwargs)
        bare = [name for name, field in cls.model_fields.items() if not field.description]
        if bare:
            raise TypeError(f"{cls.__name__}.{bare[0]} needs Field(description=...)")


M = TypeVar("M", bound=Knobs)


def groups_of(kind: type[Knobs]) -> dict[str, list[str]]:
    """The fields by the title of their group: those of the class itself first, then those that it inherits."""
    titles = {field: title for base in reversed(kind.__mro__) for field, title in vars(base).get("GROUPS", {}).items()}
    found: dict[str, list[str]] = {}
    title = ""
    for name in kind.model_fields:
        title = titles.get(name, title)
        found.setdefault(title, []).append(name)
    own = vars(kind).get("GROUPS", {}).values()
    return {title: found[title] for title in sorted(found, key=lambda one: one not in own)}


def _check_name(value: str, info: ValidationInfo) -> str:
    return check_name(value, info.field_name or "the name")


Name = Annotated[str, AfterValidator(validating(_check_name))]
"""A setting that names a run or a process: it can be used in paths, logs and Kubernetes labels."""


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """Settings with the place where each value came from."""

    value: M
    provenance: dict[str, str]

    def describe(self) -> str:
        """One line a field: name, value, where from; printed at the start of every process."""
        names = list(type(self.value).model_fields)
        width = max((len(name) for name in names), default=0)
        rows = ((name, _shown(name, getattr(self.value, name)), self.provenance[name]) for name in names)
        return "\n".join(f"{name:<{width}} = {value}  ({where})" for name, value, where in rows)


@dataclass(frozen=True)
class _Given:
    """A value as it was written, and where."""

    value: object
    where: str


def load(
    kind: type[M],
    section: str,
    *,
    file: Path | SettingsFile | None = None,
    environment: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    given_to: str = "command line",
) -> Loaded[M]:
    """Read the settings `kind` from all sources.

    overrides: the values of given_to, by field name; None means "not given". environment: os.environ when
    None; an empty variable means "not given"; a list is written as JSON or with commas. variables: further variables
    for some fields, by field name; they are stronger than DIPS_<SECTION>_<FIELD>. Raises ConfigError, which names every
    wrong setting with its place and what to write instead.
    """
    tables = SettingsFile.read(file) if isinstance(file, Path) else file
    environment = os.environ if environment is None else environment
    where = f"settings of {section}" if tables is None else tables.where(section)
    sources = (
        {key: _Given(value, where) for key, value in (tables.table(section) if tables is not None else {}).items()},
        _from_environment(kind, section, environment),
        {
            field: _Given(environment[name], f"environment {name}")
            for field, name in (variables or {}).items()
            if field in kind.model_fields and environment.get(name)
        },
        {k: _Given(v, given_to) for k, v in (overrides or {}).items() if v is not None},
    )
    given: dict[str, _Given] = {}
    for source in sources:
        check_known(source, kind.model_fields, {key: value.where for key, value in source.items()})
        given.update(source)
    return _build(kind, section, given, where)


def load_table(kind: type[M], table: Mapping[str, object], where: str) -> M:
    """Read the settings `kind` from one table, which is at `where`, such as "run.toml [[clusters]] 2".

    For tables that only a file can hold; raises ConfigError as `load` does.
    """
    check_known(table, kind.model_fields, where)
    return _build(kind, None, {key: _Given(value, where) for key, value in table.items()}, where).value


@dataclass(frozen=True)
class SettingsFile:
    """The tables of one settings file, as they are written."""

    name: str  # its path, or what it is, for errors
    tables: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def read(cls, file: Path, known: Iterable[str] | None = None) -> SettingsFile:
        """Read a TOML file.

        Raises ConfigError if it cannot be read, or has a top-level name that is not in `known` (None: any goes).
        """
        tables = read_toml(file)
        names = list(tables if known is None else known)
        for name in tables:
            if name not in names:
                raise ConfigError(f"{file}: {name!r} is unknown; {nearest(name, names)}")
        return cls(str(file), tables)

    def where(self, name: str, row: int = 0) -> str:
        """The place of a table in errors; row: of a list of tables, from 1 on."""
        return f"{self.name} [[{name}]] {row}" if row else f"{self.name} [{name}]"

    def table(self, name: str) -> dict[str, Any]:
        """One table, empty when it is not there. Raises ConfigError when it is something else."""
        table = self.tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{self.name}: {name!r} is not a table: write its settings below a line [{name}]")
        return dict(table)

    def settings(self, kind: type[M], name: str, more: Mapping[str, object] | None = None) -> M:
        """The settings of one table. more: values that go before those of the file. Raises ConfigError."""
        return load_table(kind, {**self.table(name), **(more or {})}, self.where(name))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The tables of a list, none when it is not there. Raises ConfigError when it is something else."""
        found = self.tables.get(name, [])
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ConfigError(f"{self.name}: {name!r} is not a list of tables: write each below a line [[{name}]]")
        return found

    def settings_of_rows(self, kind: type[M], name: str, required: bool = False) -> tuple[M, ...]:
        """The settings of each table of a list. Raises ConfigError, also for none if one is required."""
        found = self.rows(name)
        if required and not found:
            raise ConfigError(f"{self.name}: there is no table [[{name}]]: write one for each of the {name}")
        return tuple(load_table(kind, row, self.where(name, number)) for number, row in enumerate(found, 1))


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises ConfigError if it cannot be read, is not TOML, or is of a size that costs the parser minutes: the time for a
    key of many dotted parts grows with their square.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_TOML_BYTES + 1).decode("utf-8")
        if len(text) > MAX_TOML_BYTES:
            raise ConfigError(f"settings file {file} has more than {MAX_TOML_BYTES} bytes: it is no settings file")
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MAX_TOML_LINE_CHARS:
                raise ConfigError(
                    f"settings file {file}: line {number} has {len(line)} characters, at most {MAX_TOML_LINE_CHARS} "
                    "can be read: write a list over several lines"
                )
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"settings file {file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what the library lets through
        raise ConfigError(f"settings file {file} is not TOML: {error}") from error


def environment_name(section: str, field: str) -> str:
    """The environment variable of a field: ("slave", "memory_bytes") -> DIPS_SLAVE_MEMORY_BYTES."""
    return "_".join(("DIPS", re.sub(r"[^A-Za-z0-9]", "_", section).upper(), field.upper()))


def _from_environment(kind: type[Knobs], section: str, environment: Mapping[str, str]) -> dict[str, _Given]:
    prefix = environment_name(section, "")
    given: dict[str, _Given] = {}
    for name, value in environment.items():
        suffix = name.removeprefix(prefix)
        key = suffix.lower()
        foreign = key not in kind.model_fields and _KUBERNETES.match(suffix)
        if name.startswith(prefix) and value and not foreign:
            given[key] = _Given(value, f"environment {name}")
    return given


def check_known(keys: Iterable[str], known: Iterable[str], where: str | Mapping[str, str]) -> None:
    """Raise ConfigError for keys that are no settings. where: the place of all, or of each."""
    names = sorted(known)
    wrong = [
        f"{where if isinstance(where, str) else where[key]}: {key!r} is not a setting; {nearest(key, names)}"
        for key in keys
        if key not in names
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def check_unique(names: Iterable[str], key: str, where: str) -> None:
    """Raise ConfigError when two tables of a list have the same name, which is their setting `key`."""
    counted = Counter(names)
    if doubles := sorted(name for name in counted if counted[name] > 1):
        raise ConfigError(f"{where}: two have the {key} {doubles[0]!r}: give each its own")


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not known: the one that was surely meant, or all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(names)}"


def _build(kind: type[M], section: str | None, given: Mapping[str, _Given], place: str) -> Loaded[M]:
    """section: None for a table that only a file can hold. place: of a setting that is not given."""
    try:
        value = kind.model_validate({key: _value(kind, key, item) for key, item in given.items()})
    except ValidationError as error:
        # A field that may be of several types has an error for each.
        by_key: dict[object, list[ErrorDetails]] = {}
        for details in error.errors():
            by_key.setdefault(details["loc"][:1], []).append(details)
        lines = [_sentence(kind, section, same_key, given, place) for same_key in by_key.values()]
        raise ConfigError("\n".join(lines)) from None
    default = _Given(None, "default")
    return Loaded(value, {name: given.get(name, default).where for name in kind.model_fields})


def _value(kind: type[Knobs], key: str, given: _Given) -> object:
    """The value for pydantic: a list where it was written as text. Raises ConfigError for a yes or no elsewhere."""
    alternatives = _alternatives(kind.model_fields[key].annotation)
    text = given.value
    if isinstance(text, bool) and bool not in alternatives:
        # pydantic would take it for 1 or 0.
        raise ConfigError(f"{given.where}: {key} = {str(text).lower()} cannot be: it is not a yes-or-no setting")
    if not isinstance(text, str) or not any((typing.get_origin(one) or one) in (tuple, list) for one in alternatives):
        return text
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return list(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"{given.where}: {key} = {text!r} is not a JSON list: {error}") from error


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a hint, without Annotated and Optional around them."""
    if typing.get_origin(hint) is typing.Annotated:
        return _alternatives(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(kind for arg in typing.get_args(hint) for kind in _alternatives(arg))
    return (hint,)


def _sentence(
    kind: type[Knobs],
    section: str | None,
    same_key: list[ErrorDetails],
    given: Mapping[str, _Given],
    place: str,
) -> str:
    first = same_key[0]
    why = ", or: ".join(map(_words, same_key))
    if not first["loc"]:
        return f"{place}: {why}"
    key = str(first["loc"][0])
    if first["type"] == "missing":
        how = "add it to the table"
        if section is not None:
            option, variable = f"--{key.replace('_', '-')}", environment_name(section, key)
            how = f"give {option}, set {variable}, or add it to [{section}] of the settings file"
            if place.endswith(f"[{section}]"):  # a file was read, and not every command has options for its settings
                how = f"add it there, or set {variable}"
        return f"{place}: {key} is not given ({kind.model_fields[key].description}): {how}"
    source = given.get(key, _Given(first["input"], place))
    return f"{source.where}: {key} = {source.value!r}: {why}"


def _words(details: ErrorDetails) -> str:
    """pydantic's sentence; of a list also which entry is wrong."""
    words = details["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    entry = ".".join(str(index + 1) for index in details["loc"][1:] if isinstance(index, int))
    return f"{words} (entry {entry})" if entry else words


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("_bytes") and value >= 1024:
        return f"{value} = {format_bytes(value)}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value) if value is not None and value != "" else "(none)"
