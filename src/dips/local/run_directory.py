"""Locks and marks a run's directory: it belongs to one launcher at a time, and to one run for ever.

A directory that `dips demo` made may be replaced by the next demo; nothing else is ever deleted. Names of
what a run keeps in its directory are here.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dips.core.errors import ConfigError
from dips.core.files import FolderLock, is_locked, replace_file

_MARK = "run.json"
_LOCK = "launch.lock"
KEYS = "keys"
METRICS = "metrics"
_OURS = ("master", "slaves", "tapes", "logs", "checkpoints", METRICS, KEYS, "report.json", "loss.png", _MARK)
DEMO = "dips demo"
UP = "dips up"


@dataclass(frozen=True)
class Mark:
    """The content of run.json: which run a directory belongs to."""

    run_id: str
    made_by: str
    command: str


class RunDirectory:
    """A directory that this process holds until it closes it (or dies)."""

    def __init__(self, path: Path, lock: FolderLock, replaced: bool, resumed: bool) -> None:
        self.path = path
        self.replaced = replaced
        self.resumed = resumed
        self._lock = lock

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @property
    def master(self) -> Path:
        return self.path / "master"

    @property
    def keys(self) -> Path:
        """Made at the run's start as `dips keys init` makes it, unless the run is insecure."""
        return self.path / KEYS

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @property
    def metrics(self) -> Path:
        """Where each process says at which address its metrics are, if they are served; for Prometheus' file_sd."""
        return self.path / METRICS

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"


def claim(path: Path, mark: Mark) -> RunDirectory:
    """Take a directory for a run, making it if needed.

    A demo replaces what an earlier demo left; `dips up` goes on with its own run. Raises ConfigError when
    another launcher holds the directory, when it belongs to another run, or when it holds something else.
    """
    earlier = read_mark(path)
    if earlier is None and path.exists():
        if not path.is_dir():
            raise ConfigError(f"{path} is a file: a run needs a directory; choose another path")
        if any(entry.name != _LOCK for entry in path.iterdir()):
            raise ConfigError(f"{path} is not empty and holds no run of dips: choose another directory")
    if earlier is not None and (earlier.made_by, earlier.run_id) != (mark.made_by, mark.run_id):
        raise ConfigError(
            f"{path} belongs to run {earlier.run_id!r} of `{earlier.made_by}`, not to run {mark.run_id!r} of "
            f"`{mark.made_by}`: choose another directory, or remove that one"
        )
    unusable = f"{path} cannot be made: {{why}}; choose another directory"
    held = f"another dips process runs in {path} (process {{holder}}): end it first, or choose another directory"
    lock = FolderLock(path, _LOCK, unusable=unusable, held=held)
    if earlier is not None and mark.made_by != DEMO:
        return RunDirectory(path, lock, replaced=False, resumed=True)
    # What a run keeps goes, and only that: a person's own files in the directory stay.
    for name in _OURS:
        entry = path / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    text = json.dumps({**asdict(mark), "wall_s": time.time()}, indent=2)
    replace_file(path / _MARK, [f"{text}\n".encode()])
    return RunDirectory(path, lock, replaced=earlier is not None, resumed=False)


def is_held(path: Path) -> bool:
    """Whether a launcher runs in this directory now. Changes nothing."""
    return is_locked(path, _LOCK)


def read_mark(path: Path) -> Mark | None:
    """Which run a directory belongs to; None when it has no mark. Raises ConfigError when the mark is
    damaged."""
    file = path / _MARK
    if not file.is_file():
        return None
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
        return Mark(str(raw["run_id"]), str(raw["made_by"]), str(raw["command"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error!r}): choose another directory, or remove this one") from error
