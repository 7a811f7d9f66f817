"""Simulates disks: what is durable, what is not yet synced, and what a crash leaves of it.

The slave's real ring of snapshots (dips.slave.ring) works on SlaveDisk; power may fail between any two of its steps.
What is not synced is lost, or torn, in a crash. A copy of a disk may be put back later, as an operator with a backup
does. Nothing here decides what is written.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from random import Random
from typing import Any, BinaryIO, NoReturn

from dips.slave.disk import IDENTITY, OnWritten

LOST_NAMES, LOST_DATA, TORN_DATA = "lost_unsynced_names", "lost_unsynced_data", "torn_unsynced_data"
"""What a crash can do to unsynced data."""


class PowerLossError(Exception):
    """The process died within a step of its disk; its argument names the fault."""


@dataclass(frozen=True)
class StoredEntry:
    """One entry of the master's journal, with the state after it."""

    epoch: int
    entry_id: int
    kind: str
    record_json: str
    snapshot_json: str


@dataclass
class JournalDisk:
    """The directory of a master, or of a standby: its durable entries."""

    epoch: int = 0
    entries: list[StoredEntry] = field(default_factory=list)
    full: bool = False
    flush_factor: float = 1.0
    replica: bool = False
    """Whether it is a standby's: the next start of a master takes over."""

    took_over: frozenset[int] = frozenset()
    """The epochs that began with a take-over."""

    agreed: int = 0
    """So many entries count, and are in the standby's directory too."""

    @property
    def snapshot_json(self) -> str | None:
        return self.entries[-1].snapshot_json if self.entries else None

    def records(self) -> list[dict[str, Any]]:
        """All records of the journal, as `dips verify` reads them."""
        return [json.loads(entry.record_json) for entry in self.entries]

    def tail(self, other: JournalDisk) -> list[StoredEntry]:
        """Its entries that the other one does not have."""
        same = 0
        for mine, others in zip(self.entries, other.entries, strict=False):
            if mine != others:
                break
            same += 1
        return self.entries[same:]

    def copy(self) -> JournalDisk:
        return JournalDisk(self.epoch, list(self.entries), took_over=self.took_over)

    def put_back(self, copy: JournalDisk) -> None:
        self.epoch, self.entries, self.took_over, self.agreed = copy.epoch, list(copy.entries), copy.took_over, 0

    def lose(self) -> None:
        self.put_back(JournalDisk())


@dataclass
class _File:
    """One inode: what the process sees, and what the disk has."""

    data: bytes
    durable: bytes = b""


class SlaveDisk:
    """One slave's directory, with the interface of dips.slave.disk.Disk.

    write_errors, manifest_errors: so many of the next writes of snapshots, or of manifests, fail. sync_errors: of
    syncs. dies_in: so many steps from now the power fails, dies_dirty: so many of those before which something was not
    synced; 0: not planned.
    """

    def __init__(self, name: str, capacity_bytes: int = 1 << 30) -> None:
        self._name = name
        self._capacity_bytes = capacity_bytes
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._history: list[dict[str, _File]] = []
        self.write_errors = 0
        self.manifest_errors = 0
        self.sync_errors = 0
        self.errors_seen = 0
        self.dies_in = 0
        self.dies_dirty = 0
        self.fsync_factor = 1.0

    # ---- the Disk protocol ----

    def where(self, name: str) -> str:
        return f"{self._name}:{name}"

    def names(self) -> list[str]:
        return sorted(self._names)

    def open(self, name: str) -> BinaryIO:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return BytesIO(self._names[name].data)

    def missing_bytes(self, name: str, n_bytes: int) -> int:
        file = self._names.get(name)
        return 0 if file is not None and len(file.data) == n_bytes else n_bytes

    def free_bytes(self) -> int:
        return self._capacity_bytes

    def allocate(self, name: str, n_bytes: int) -> None:
        self._step()
        self._may_fail_to_write()
        file = self._names.get(name)
        if file is None:
            file = _File(b"")
            self._put(name, file)
        file.data = file.durable = file.data[:n_bytes].ljust(n_bytes, b"\0")

    def overwrite(
        self, name: str, at: int, data: memoryview, seen: OnWritten | None = None, straight: bool = False
    ) -> None:
        self._step()
        self._may_fail_to_write()
        if seen is not None:
            seen(data)
        file = self._names[name]
        file.data = file.data[:at] + bytes(data) + file.data[at + len(data) :]

    def create(self, name: str, data: bytes) -> None:
        self._step()
        if self.manifest_errors and "manifest" in name:
            self.manifest_errors -= 1
            self._fail(errno.EIO, "input/output error")
        self._put(name, _File(bytes(data)))

    def sync(self, name: str) -> None:
        self._step()
        if self.sync_errors:
            self.sync_errors -= 1
            self._fail(errno.EIO, "input/output error")
        file = self._names[name]
        file.durable = file.data

    def rename(self, old: str, new: str) -> None:
        self._step()
        names = dict(self._names)
        names[new] = names.pop(old)
        self._history.append(names)
        self._names = names

    def remove(self, name: str) -> None:
        self._step()
        if name in self._names:
            names = dict(self._names)
            del names[name]
            self._history.append(names)
            self._names = names

    def sync_names(self) -> None:
        self._step()
        self._durable_names = dict(self._names)
        self._history.clear()

    # ---- faults of the disk ----

    @property
    def dirty(self) -> bool:
        """Whether a crash now could lose anything."""
        return bool(self._history) or any(file.data is not file.durable for file in self._names.values())

    def crash(self, rng: Random) -> list[str]:
        """Crash: unsynced data is gone, torn, or there nevertheless. Returns what was really lost, one word for
        each."""
        # Names become durable in their order, and perhaps some of them did.
        states = [self._durable_names, *self._history]
        chosen = rng.randrange(len(states))
        names = states[chosen]
        lost = [LOST_NAMES] if chosen < len(states) - 1 else []
        for name in sorted(names):
            file = names[name]
            if file.data != file.durable:
                old, new = file.durable, file.data
                file.durable = _mixture(rng, old, new)
                lost += [] if file.durable == new else [LOST_DATA if file.durable == old else TORN_DATA]
            file.data = file.durable
        self._names, self._durable_names = dict(names), dict(names)
        self._history.clear()
        self.dies_in = self.dies_dirty = 0
        return lost

    def copy(self) -> dict[str, bytes]:
        """A copy of the disk for a backup."""
        return {name: file.durable for name, file in self._durable_names.items()}

    def put_back(self, copy: dict[str, bytes]) -> None:
        """Replace the content by the backup, for the next process."""
        self._names = {name: _File(data, data) for name, data in copy.items()}
        self._durable_names = dict(self._names)
        self._history.clear()

    def lose(self) -> None:
        self.put_back({})

    def identity(self, draw: Callable[[], bytes]) -> bytes:
        """As dips.slave.disk.claim: drawn once for this directory, and part of a copy of it."""
        if IDENTITY not in self._names:
            drawn = draw()
            for names in (self._names, self._durable_names):
                names[IDENTITY] = _File(drawn, drawn)
        return self._names[IDENTITY].data

    def flip_a_bit(self, rng: Random, prefix: str) -> bool:
        """Flip a bit of a stored file; returns whether there was one."""
        names = [name for name in self.names() if name.startswith(prefix) and any(self._names[name].data)]
        if not names:
            return False
        file = self._names[rng.choice(names)]
        at = rng.randrange(len(file.data))
        file.data = file.data[:at] + bytes([file.data[at] ^ (1 << rng.randrange(8))]) + file.data[at + 1 :]
        file.durable = file.data
        return True

    def mend(self) -> None:
        self.write_errors = self.manifest_errors = self.sync_errors = self.dies_in = self.dies_dirty = 0
        self.fsync_factor = 1.0

    # ---- parts ----

    def _put(self, name: str, file: _File) -> None:
        names = dict(self._names)
        names[name] = file
        self._history.append(names)
        self._names = names

    def _step(self) -> None:
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                raise PowerLossError("power_loss_in_disk_step")
        if self.dies_dirty and self.dirty:
            self.dies_dirty -= 1
            if not self.dies_dirty:
                raise PowerLossError("power_loss_with_unsynced")

    def _may_fail_to_write(self) -> None:
        if self.write_errors:
            self.write_errors -= 1
            self._fail(errno.ENOSPC, "no space left on device")

    def _fail(self, number: int, words: str) -> NoReturn:
        self.errors_seen += 1
        raise OSError(number, words)


def _mixture(rng: Random, old: bytes, new: bytes) -> bytes:
    """The possible content after a crash of bytes that were written and not synced: old ones, new ones, or both."""
    kind = rng.randrange(3)
    if kind == 0 or not new:
        return old
    if kind == 1:
        return new
    at = rng.randrange(len(new))
    return new[:at] + old[at:].ljust(len(new) - at, b"\0")[: len(new) - at]
