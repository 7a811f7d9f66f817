"""Reads a role's settings for its command: all sources, and the short variables such as DIPS_MASTER."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dips.core.config import Knobs, Loaded, load
from dips.core.errors import ConfigError
from dips.core.net.security import INSECURE_VARIABLE, KEYS_VARIABLE
from dips.core.observe.log_lines import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE, LogFormat
from dips.local.options import overrides_for

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file; the options below win over its table of this role."),
]

_SHORT_NAMES = {
    "master": "DIPS_MASTER",
    "cluster_id": "DIPS_CLUSTER",
    "run_id": "DIPS_RUN",
    "keys": KEYS_VARIABLE,
    "insecure": INSECURE_VARIABLE,
    "log_format": LOG_FORMAT_VARIABLE,
    "log_level": LOG_LEVEL_VARIABLE,
}
"""Variables that say where and who a process is, and how it logs, whatever its role; a person's own loop reads those of
the first kind as well."""

LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option("--log-format", help=f"Form of all processes' log lines; else {LOG_FORMAT_VARIABLE}, or human."),
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
    overrides = overrides_for(kind, given)
    for name, variable in _SHORT_NAMES.items():
        if name in kind.model_fields and os.environ.get(variable):
            overrides.setdefault(name, os.environ[variable])
    return load(kind, section, file=file, overrides=overrides)
