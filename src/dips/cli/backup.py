"""`dips backup` and `dips restore`: copies of slaves' snapshots in an object store, and the way back."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.core.errors import ConfigError, RetryLater
from dips.core.ids import parse_version
from dips.core.net.object_store import open_store
from dips.core.observe.logs import configure_logging
from dips.local.options import ConfigFile, LogFormatOption, log_format_asked, role_settings, with_knobs
from dips.slave.config import BackupConfig

NICENESS = 19
NO_RUN = "none"
"""A prefix that is asked for to see whether the store answers; it may be a run's."""


@with_knobs(BackupConfig)
def backup(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIRECTORY", help="A slave's directory, or that of a run; several are fine.")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Send the newest version that all these directories hold, and end.")
    ] = False,
    config: ConfigFile = None,
    log_format: LogFormatOption = None,
    **given: Any,
) -> int:
    """Copy each n-th version of slaves' snapshots to an object store, in the background of a run.

    Start one on each slave's host, with the same --to and --every. It reads what the slave has committed; neither slave
    nor master knows of it. A version can be restored once the copies of all slaves are complete.

    Settings: the options below, else the environment (DIPS_BACKUP_<NAME>), else table [backup] of --config.
    """
    loaded = role_settings(BackupConfig, "backup", config, given)
    objects = open_store(loaded.value.to)
    from dips.slave.backup import Copier  # numpy

    configure_logging("backup", "backup", "INFO", log_format_asked(log_format) or "human")
    copier = Copier(objects, loaded.value)
    if once:
        version = copier.send_newest(directories)
        print(f"version {version} is in {objects.url}")
        return 0
    with contextlib.suppress(RetryLater):  # a wrong bucket or credential is said at once
        objects.sizes(NO_RUN)
    os.nice(max(0, NICENESS - os.nice(0)))
    for number in (signal.SIGTERM, signal.SIGINT):  # at once, also while the library waits for the server
        signal.signal(number, signal.SIG_DFL)
    copier.look_for_ever(directories)
    return 0


def restore(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Of a run of `dips up`; or, with --slave, of that slave.")
    ],
    url: Annotated[str, typer.Option("--from", metavar="URL", help="The object store, as --to of `dips backup`.")],
    slave: Annotated[
        str | None, typer.Option("--slave", metavar="NAME", help="Only this slave, into DIRECTORY itself.")
    ] = None,
    run: Annotated[
        str, typer.Option("--run", metavar="ID", help="The run, where the store holds several.", show_default=False)
    ] = "",
    version: Annotated[
        str | None, typer.Option("--version", metavar="T:V", help="An older version; else the newest complete one.")
    ] = None,
) -> int:
    """Make slaves' directories again from an object store, while these slaves do not run.

    Restore the same version for all slaves of the run, then start them. Where no newer version is on all slaves, the
    master goes back to it: a ROLLBACK in its journal, on a new timeline, with an alarm that names what is lost. Nothing
    in a directory is overwritten. A version that not all slaves have sent whole is never restored.
    """
    wanted = parse_version(version) if version else None
    objects = open_store(url)
    from dips.slave.backup import find_restorable, restore_slave  # numpy

    if slave is None and not (directory / "run.json").is_file():
        raise ConfigError(f"{directory} is no directory of a run: give --slave NAME with the directory of that slave")
    found = find_restorable(objects, run, wanted)
    for sentence in found.passed_over:
        print(f"passed over {sentence}")
    for name in [slave] if slave else sorted(found.shards):
        target = directory if slave else directory / "slaves" / name
        fresh = restore_slave(objects, found, name, target)
        print(f"{target}: version {found.version} of slave {name} {'is restored' if fresh else 'was there already'}")
    others = sorted(found.shards.keys() - {slave}) if slave else []
    if others:
        print(f"on the hosts of {', '.join(others)} the same is needed: --slave NAME --version {found.version}")
    print(
        f"when all slaves of run {found.run_id} are started, the master goes back to version {found.version} on a new "
        "timeline, unless all hold a newer one; `dips status` says what it waits for"
    )
    return 0
