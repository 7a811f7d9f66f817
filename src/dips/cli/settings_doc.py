"""Writes docs/settings.md from the declared tables of settings; a test checks that the page is current."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from dips.cli.generated_page import keep_current
from dips.core.config import Knobs, Name, environment_name
from dips.core.net.security import Address, AddressOrEmpty
from dips.core.units import BitsPerSecond, Bytes, Count, Seconds, format_bytes, format_seconds
from dips.deploy.deploy_file import DeployedClusterKnobs, DeployKnobs, ModelKnobs, SiteKnobs
from dips.local.run_file import ClusterKnobs, RunKnobs
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.trainer.config import TrainConfig
from dips.worker.config import ClientConfig

_INTRODUCTION = """\
# Settings

Written by `make docs` from the classes that declare them; there are no others.

A setting of a role has four sources. From strongest to weakest: the command line (`--memory-bytes`), the environment
(`DIPS_SLAVE_MEMORY_BYTES`), the role's table in a TOML file (`memory_bytes` in `[slave]`), the default. Each process
prints at its start what it uses, and where each value came from. A setting that is unknown, wrong or missing ends the
command with exit code 2 and a sentence with its place, the value and the remedy.

Sizes, times, rates and counts are numbers in the base unit (bytes, seconds, bits/s, one) or texts with a unit:
`"64 MB"`, `"1 MiB"`, `"1 h 30 min"`, `"10 Gbit/s"`, `"1.5M"`. In a variable, a list is written with commas or as JSON.
Where a table says `(required)` a value must be given; `dips up` and `dips deploy` give some of a role's settings
themselves."""

_ROLES: tuple[tuple[str, type[Knobs], str], ...] = (
    ("master", MasterConfig, "`dips master`"),
    ("slave", SlaveConfig, "`dips slave`"),
    ("worker", ClientConfig, "`dips train` with a master, and a loop of your own"),
    ("train", TrainConfig, "`dips train`"),
)
_FILES: tuple[tuple[str, tuple[tuple[str, type[Knobs]], ...]], ...] = (
    ("The file of `dips up`", (("[run]", RunKnobs), ("[[clusters]]", ClusterKnobs))),
    (
        "The file of `dips deploy`",
        (
            ("[deploy]", DeployKnobs),
            ("[model]", ModelKnobs),
            ("[[sites]]", SiteKnobs),
            ("[[clusters]]", DeployedClusterKnobs),
        ),
    ),
)

_CHECKED = {
    typing.get_args(kind)[1]: word
    for kind, word in (
        *((Bytes, "size"), (Seconds, "time"), (Count, "count"), (BitsPerSecond, "rate")),
        *((Name, "name"), (Address, "HOST:PORT"), (AddressOrEmpty, "HOST:PORT")),
    )
}
"""The words for types that have a check of their own, by that check."""

_FORMS: dict[str, Callable[[Any], str]] = {"size": format_bytes, "time": format_seconds}
_WORDS = {bool: "yes or no", int: "whole number", float: "number", str: "text", Path: "path"}
_BOUNDS = {Ge: "at least {}", Gt: "more than {}", Le: "at most {}", Lt: "less than {}"}


def page() -> str:
    """The text of docs/settings.md."""
    parts = [_INTRODUCTION]
    for section, kind, of in _ROLES:
        variable = environment_name(section, "...")
        parts += [f"## `[{section}]`: {of}", f"Variables: `{variable}`.", _table(kind)]
    for title, tables in _FILES:
        parts += [f"## {title}", "It also has the tables of the roles, above."]
        for name, kind in tables:
            parts += [f"### `{name}`", _table(kind)]
    return "\n\n".join(parts) + "\n"


def _table(kind: type[Knobs]) -> str:
    lines = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    for name, info in kind.model_fields.items():
        values, default = _values(info.annotation, info.metadata), info.get_default(call_default_factory=True)
        shown = "(required)" if info.is_required() else ""
        if not info.is_required() and default not in ("", (), None):
            shown = f"`{_amount(default, values)}`"
        cells = (f"`{name}`", values, shown, info.description or "")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _amount(value: Any, of: str) -> str:
    """A value as a person writes it; of: the words for its type."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and value >= 1:
        form = next((form for word, form in _FORMS.items() if word in of), str)
        return form(value)
    return str(value)


def _values(hint: Any, metadata: Iterable[Any] = ()) -> str:
    """What may be written for a setting of this type, with its bounds."""
    of, arguments = typing.get_origin(hint), typing.get_args(hint)
    if of is typing.Annotated:
        return _values(arguments[0], [*arguments[1:], *metadata])
    if of in (types.UnionType, typing.Union):
        return " or ".join(_values(one, metadata) for one in arguments if one is not types.NoneType)
    if of is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if of in (tuple, list):
        return f"list: {_values(arguments[0])}"
    # A FieldInfo inside of Annotated has metadata of its own.
    flat = [inner for one in metadata for inner in (one, *getattr(one, "metadata", ()))]
    word = next((_CHECKED[one] for one in flat if one in _CHECKED), _WORDS.get(hint, "text"))
    bounds = [
        text.format(_amount(getattr(one, kind.__name__.lower()), word))
        for one in flat
        for kind, text in _BOUNDS.items()
        if isinstance(one, kind)
    ]
    return ", ".join([word, *bounds])


def main() -> int:
    return keep_current(__doc__, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
