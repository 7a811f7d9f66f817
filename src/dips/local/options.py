"""Makes the command line of a role from its settings: one option for each field, so that none can be forgotten.

Values stay text here (units such as "2 s" are read by the configuration itself); precedence and errors are
those of dips.core.config. It must never give a default: an option that is not given is not there.
"""

from __future__ import annotations

import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from dips.core.config import Knobs, Loaded, groups_of, load
from dips.core.errors import ConfigError
from dips.core.net.security import VARIABLES
from dips.core.observe.logs import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE, LogFormat


def with_knobs(
    *kinds: type[Knobs], without: Iterable[str] = ()
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Decorate a command that takes `**knobs`: it gets an option for every field of the kinds.

    A field that several kinds have is one option for all of them. Fields named in `without` get none.
    """
    hidden = frozenset(without)

    def decorate(command: Callable[..., int | None]) -> Callable[..., int | None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        knobs: dict[str, inspect.Parameter] = {}
        for kind in kinds:
            for title, names in groups_of(kind).items():
                for name in names:
                    knobs.setdefault(name, _parameter(name, kind.model_fields[name], title))
        return _with_signature(command, [*own, *(knobs[name] for name in knobs if name not in hidden)])

    return decorate


def overrides_for(kind: type[Knobs], given: Mapping[str, object]) -> dict[str, object]:
    """Of the values given on the command line, those that are fields of this kind; not-given ones left out."""
    return {name: given[name] for name in kind.model_fields if given.get(name) is not None}


def command_line(config: Knobs, without: Iterable[str] = ()) -> list[str]:
    """The options that make these knobs, as a command line: the inverse of with_knobs.

    Fields that have their default are left out.
    """
    arguments: list[str] = []
    for name, value in _given(config, without):
        option = option_name(name)
        if isinstance(value, bool):
            arguments.append(option if value else f"--no-{option[2:]}")
        else:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                arguments += [option, _text(item)]
    return arguments


def as_text(config: Knobs, without: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """The same fields with their values as a variable of the environment has them; paths are made absolute, because a
    program may change its directory before it reads them."""
    for name, value in _given(config, without):
        if isinstance(value, (tuple, list)):
            yield name, json.dumps([_text(item) for item in value])
        else:
            yield name, _text(value.resolve() if isinstance(value, Path) else value)


def _given(config: Knobs, without: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The fields that have another value than their default."""
    hidden = frozenset(without)
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if name not in hidden and value is not None and value != info.get_default(call_default_factory=True):
            yield name, value


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _text(value: object) -> str:
    if isinstance(value, float):
        return repr(value)
    return str(value.value if isinstance(value, Enum) else value)


def _parameter(name: str, info: FieldInfo, group: str) -> inspect.Parameter:
    outer, several = _shape(info.annotation)
    text, panel = escape(_help(info, several)), group or None
    if outer is bool:
        names = f"{option_name(name)}/--no-{option_name(name)[2:]}"
        option = typer.Option(names, help=text, show_default=False, rich_help_panel=panel)
        annotation: Any = Annotated[bool | None, option]
    else:
        metavar = {int: "COUNT", float: "NUMBER", Path: "PATH"}.get(outer, "TEXT")
        if typing.get_origin(outer) is typing.Literal:
            metavar = "|".join(str(choice) for choice in typing.get_args(outer))
        option = typer.Option(option_name(name), help=text, metavar=metavar, show_default=False, rich_help_panel=panel)
        annotation = Annotated[list[str] | None if several else str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shape(annotation: Any) -> tuple[Any, bool]:
    """The plain type of a field, and whether it holds several values."""
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        rest = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _shape(rest[0]) if len(rest) == 1 else (str, False)
    if typing.get_origin(annotation) in (tuple, list):
        return _shape(typing.get_args(annotation)[0])[0], True
    return annotation, False


def _help(info: FieldInfo, several: bool) -> str:
    text = info.description or ""
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if several:
        text += " (may be given several times)"
    if default not in (None, "", (), []):
        text += f" [default: {_text(default)}]"
    return text


def _with_signature(
    command: Callable[..., int | None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., int | None]:
    def run(**given: Any) -> int | None:
        return command(**given)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in keyword_only}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


# ---- settings --------------------------------------------------------------------------------------------------------
#
# Reads a role's settings for its command: all sources, and the short variables such as DIPS_MASTER.


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file; the options below win over its table of this role."),
]

_VARIABLES = {**VARIABLES, "log_format": LOG_FORMAT_VARIABLE, "log_level": LOG_LEVEL_VARIABLE}
"""Variables that say where and who a process is, and how it logs, whatever its role."""

LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help=f"Form of all processes' log lines; else {LOG_FORMAT_VARIABLE}, or human."),
]

MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Every process serves Prometheus metrics; metrics/*.json say where.")
]

K = TypeVar("K", bound=Knobs)


def log_format_asked(option: LogFormat | None) -> LogFormat | None:
    """The form of log lines that the option, else the environment says; None: neither. Raises ConfigError."""
    form = option or os.environ.get(LOG_FORMAT_VARIABLE, "")
    match form:
        case "human" | "json":
            return form
        case "":
            return None
        case _:
            raise ConfigError(f"{LOG_FORMAT_VARIABLE} is {form!r}: write human or json")


def role_settings(kind: type[K], section: str, file: Path | None, given: Mapping[str, object]) -> Loaded[K]:
    """The settings of a role. `given`: what the command line says, not-given options None. Raises
    ConfigError."""
    return load(kind, section, file=file, variables=_VARIABLES, overrides=overrides_for(kind, given))
