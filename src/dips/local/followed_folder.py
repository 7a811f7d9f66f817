"""Keeps a folder at the newest version of a run: what `dips follow` does.

    DIR/newest               a link to the newest version's folder; it changes from one moment to the next
    DIR/versions/1-7         version 1:7, as `dips export` writes it; the newest few stay
    DIR/dips_follow.json     the run, and how its parameters are cut: what a later follow needs to go on from DIR
    DIR/dips_follow.lock     held by the process that follows

A version's folder gets its name when it is whole and durable, then the link is renamed over the old one. So a reader
that resolves `newest` first has one whole version, also while the next ones come. One that opens several files through
the link, and meets a change, finds a name that is not there, and never files of two versions: where a model has several
files, their names contain the version.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np

from dips.core.errors import ConfigError, FatalError, RefusalCode, Refused, of_disk
from dips.core.files import TEMPORARY, FolderLock, by_umask, replace_file, sync_folder
from dips.core.ids import Version, parse_version
from dips.core.layout import Layout, PublishedModel, layout_from_json
from dips.core.net.security import Security
from dips.core.observe.logs import ChangeLogger, configure_logging
from dips.core.units import format_count
from dips.local.model_folder import CONFIG, AdapterFolder, ModelFolder, TensorsFolder, write_folder
from dips.trainer.export import ABOUT, read_state
from dips.trainer.progress import StopSignals
from dips.worker.reader import POLL_S, follow_run, name_of

NEWEST, VERSIONS, STATE, LOCK = "newest", "versions", "dips_follow.json", "dips_follow.lock"

DISK_AGAIN_S = 5.0
"""How long after a write failed, as on a full disk, it is tried again."""

_AGAIN = "-again"
"""Ends the name of a version that was here already, and of no use: readers may have that folder open."""

_NAME = re.compile(rf"\d+-\d+({_AGAIN})?")

_logger = logging.getLogger("dips.follow")

Content = ModelFolder | AdapterFolder | TensorsFolder


class FollowedFolder:
    """One run's newest version in a folder, for one process at a time."""

    def __init__(self, folder: Path, content: Callable[[PublishedModel], Content], keep: int) -> None:
        """Take the folder. content: what is written of a version. keep: how many versions stay.

        Raises ConfigError for a folder that holds something else, that another process follows a run in, or that cannot
        be used.
        """
        self.folder = folder.absolute()
        self.newest = self.folder / NEWEST
        self._versions = self.folder / VERSIONS
        self._content = content
        self._keep = keep
        self._here: Version | None = None  # what `newest` has, once this process has written one
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise ConfigError(f"{folder} is a file: give a folder")
            if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / LOCK).exists():
                raise ConfigError(
                    f"{folder} holds something else, and is left as it is: give a folder that is empty or new, or one "
                    "that an earlier `dips follow` made"
                )
            self.folder.mkdir(parents=True, exist_ok=True)  # by the umask, as what is exported
        except OSError as error:
            raise self._unusable(error) from error
        self._lock = FolderLock(
            self.folder,
            LOCK,
            unusable=f"the folder {folder} cannot be used: {{why}}",
            held=f"process {{holder}} follows a run in {folder} already: end it, or give another folder",
            opener=by_umask,
        )
        try:
            self._state = self._read_state()
            self._versions.mkdir(exist_ok=True)
            for rest in [*self.folder.glob(f"{TEMPORARY}*"), *self._versions.glob(f"{TEMPORARY}*")]:
                self._remove(rest)
        except OSError as error:
            raise self._unusable(error) from error

    def __enter__(self) -> FollowedFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @property
    def run_id(self) -> str:
        """The run whose versions are here; empty: none yet."""
        return self._state[0] if self._state is not None else ""

    def held(self) -> PublishedModel | None:
        """The version that is here, with its parameters. None: there is none, or its files do not give them back, as
        those of a merged adapter do not."""
        if self._state is None:
            return None
        run_id, layout = self._state
        try:
            about = json.loads((self.newest / ABOUT).read_bytes())
            flat = np.zeros(layout.n_elems, np.float32)
            here = PublishedModel(run_id, parse_version(about["version"]), int(about["tokens"]), layout, flat)
            stored, n_elems, content = read_state(self.newest.resolve()), 0, self._content(here)
            if isinstance(content, ModelFolder) and not (self.newest / CONFIG).exists():
                raise ValueError(f"it has no {CONFIG}")
            for name, tensor in content.tensors.items():
                if isinstance(tensor, np.ndarray) and np.may_share_memory(tensor, flat):
                    if stored[name].dtype != "F32":
                        raise ValueError(f"tensor {name!r} is {stored[name].dtype}")
                    tensor[...] = stored[name].data.view("<f4").reshape(tensor.shape)
                    n_elems += tensor.size
            if n_elems != layout.n_elems:
                raise ValueError("its files are not the parameters themselves")
        except (OSError, ValueError, KeyError, TypeError, Refused, ConfigError) as error:
            _logger.info("the next version is fetched whole, since %s is of no use for differences: %s", NEWEST, error)
            return None
        return here

    def put(self, fetched: PublishedModel) -> None:
        """Write a version, and let `newest` lead to it. Raises ConfigError for one of another run, or that cannot be
        written as a folder; FatalError for a disk that is full or fails: `newest` then is what it was.
        """
        if self.run_id and fetched.run_id != self.run_id:
            raise ConfigError(
                f"{self.folder} holds versions of run {self.run_id}, this is run {fetched.run_id}: give another folder"
            )
        content = self._content(fetched)
        version = fetched.version
        try:
            if self._state is None or self._state[1] != fetched.layout:
                state = json.dumps({"run_id": fetched.run_id, "layout": fetched.layout.to_json()})
                replace_file(self.folder / STATE, [state.encode()], opener=by_umask)
                self._state = fetched.run_id, fetched.layout
            if self._here != version:
                place = self._versions / f"{version.timeline}-{version.v}"
                if place.name == self._current():
                    place = place.with_name(place.name + _AGAIN)
                if place.exists():  # from before a crash, or of a run that had this one's name
                    self._remove(place)
                write_folder(
                    replace(content, tag=f"-{place.name}") if isinstance(content, ModelFolder) else content, place
                )
                link = self.folder / f"{TEMPORARY}{NEWEST}.{secrets.token_hex(4)}"
                try:
                    os.symlink(os.path.join(VERSIONS, place.name), link)
                    os.replace(link, self.newest)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        link.unlink()
                sync_folder(self.folder)
                self._here = version
            # Remove the versions that were written first, never the one that `newest` leads to. Numbers say less: a run
            # that took over another one's name begins with small ones.
            current = self._current()
            others = [path for path in self._versions.iterdir() if _NAME.fullmatch(path.name) and path.name != current]
            others.sort(key=lambda path: path.lstat().st_mtime_ns, reverse=True)
            for path in others[self._keep - 1 :]:
                self._remove(path)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):
                raise of_disk(error.__cause__, str(error)) from error
            raise
        except OSError as error:
            raise self._unusable(error) from error
        tokens = format_count(fetched.tokens)
        _logger.info("%s: version %s of run %s, %s tokens", self.newest, version, fetched.run_id, tokens)

    def _current(self) -> str:
        """The name of the folder that `newest` leads to; empty: there is none."""
        try:
            return os.path.basename(os.readlink(self.newest))
        except FileNotFoundError:
            return ""

    def _remove(self, path: Path) -> None:
        """A version's folder goes at once, not file by file."""
        gone = path
        if not path.name.startswith(TEMPORARY):
            gone = path.with_name(f"{TEMPORARY}{path.name}.{secrets.token_hex(4)}")
            path.rename(gone)
        if gone.is_dir() and not gone.is_symlink():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink(missing_ok=True)

    def _read_state(self) -> tuple[str, Layout] | None:
        path = self.folder / STATE
        try:
            state = json.loads(path.read_bytes())
            return str(state["run_id"]), layout_from_json(state["layout"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, Refused) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}): remove {self.folder}, or give another folder"
            ) from error

    def _unusable(self, error: OSError) -> Exception:
        return of_disk(error, f"the folder {self.folder} cannot be used: {error.strerror or error}")


def keep_newest(folder: FollowedFolder, master: str, security: Security, patience_s: float, *, once: bool) -> int:
    """Keep the folder at the newest version until the run has stopped, or, with `once`, until it is there.

    Returns the process's exit code: 0, or 143 after SIGTERM and 130 after ctrl-C. A full disk is waited for. Raises
    ConfigError for a folder of another run, RetryLater as Follower.run, with this patience, and Refused.
    """
    name = name_of(security)
    configure_logging("worker", name)
    cancelled = threading.Event()
    disk = ChangeLogger(_logger)
    with StopSignals() as signals, ThreadPoolExecutor(1, "dips-follow") as writing:
        signals.when_received(cancelled.set)

        def use(fetched: PublishedModel, now_and_then: Callable[[], None]) -> None:
            while not signals.wait(0.0):
                put = writing.submit(folder.put, fetched)
                try:
                    while not put.done():
                        wait([put], POLL_S)
                        now_and_then()  # the servers of a run that ends may be gone when this version is written
                    put.result()
                    disk.report("disk", "")
                    return
                except FatalError as error:
                    if once:
                        raise
                    disk.report("disk", f"{error}; trying again, {NEWEST} is as it was", logging.WARNING)
                signals.wait(DISK_AGAIN_S)

        try:
            follow_run(
                master, folder.run_id, name, security, use, signals.wait, patience_s=patience_s, held=folder.held(),
                newest_only=True, once=once, cancelled=cancelled,
            )  # fmt: skip
        except Refused as refused:
            if refused.code is RefusalCode.RUN_ID and folder.run_id:
                raise ConfigError(
                    f"{folder.folder} holds versions of run {folder.run_id}, and the master at {master} serves another "
                    "run: give another folder"
                ) from refused
            raise
        return signals.exit_code
