"""The options of the commands that connect to a run: which run, and with which identity.

Where a run is named by its directory, the keys that `dips up` and `dips demo` made for the operator are found in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dips.core.errors import ConfigError
from dips.core.net.security import INSECURE_VARIABLE, KEYS_VARIABLE, Security, both_given
from dips.local.run_directory import KEYS

RUN = "The run's directory, such as runs/mine, or its master's HOST:PORT"
Run = Annotated[str | None, typer.Argument(metavar="RUN", help=f"{RUN}; else DIPS_MASTER.")]
RequiredRun = Annotated[str, typer.Argument(metavar="RUN", help=f"{RUN}.")]
Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help=f"Directory of your identity; else {KEYS_VARIABLE}, or the run's own."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help=f"The run has no keys; else {INSECURE_VARIABLE}=1. Loopback only.")
]

_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


def asked_security(keys: Path | None, insecure: bool, run_dir: Path | None = None) -> Security:
    """The security that the options, else the environment, else the run's directory ask for.

    Raises ConfigError when neither or both are given, or the keys cannot be used.
    """
    if keys is None and not insecure:
        keys, insecure = _in_environment()
    if keys is not None and insecure:
        raise ConfigError(both_given())
    if keys is None and not insecure:
        keys = keys_of_run(run_dir)
    from dips.core.net.keys import security_from  # the library of certificates: not for --help

    return security_from(keys, insecure, "this command")


def keys_of_run(run_dir: Path | None) -> Path | None:
    """The operator's identity in a run's directory, if there is one that this user can open."""
    if run_dir is None:
        return None
    from dips.local.authority import OPERATOR

    found = run_dir / KEYS / OPERATOR
    return found if os.access(found, os.X_OK) else None


def insecure_asked(flag: bool) -> bool:
    """Whether a launcher should make no keys, as its option or the environment says. Raises ConfigError."""
    return flag or _in_environment()[1]


def _in_environment() -> tuple[Path | None, bool]:
    keys, insecure = os.environ.get(KEYS_VARIABLE, ""), os.environ.get(INSECURE_VARIABLE, "").lower()
    if insecure not in _YES | _NO:
        raise ConfigError(f"{INSECURE_VARIABLE} is {insecure!r}: set it to 1, or leave it out")
    return Path(keys) if keys else None, insecure in _YES
