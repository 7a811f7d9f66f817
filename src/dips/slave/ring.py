"""Keeps the ring of snapshot files: made once at full size, overwritten in place, so a full disk shows before a round.

Every step is in an order that a crash can follow anywhere (docs/storage.md): the manifest of the version that leaves
goes first, durably; then the file is written, header last, and synced; then its own manifest comes, and with it the
commit. Never overwrites a file that a manifest of a kept version or an open round names, and never trusts a file that
it has not read back in full since the process began, or written itself. One caller at a time: the thread "dips-disk".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import xxhash

from dips.core.errors import RefusalCode, Refused
from dips.core.files import TEMPORARY, FolderLock
from dips.core.ids import RoundId, Version
from dips.core.layout import FLOAT32_BYTES
from dips.core.messages import SnapshotInfo
from dips.core.observe.failpoints import failpoint
from dips.slave.disk import IO_BYTES, Disk, LocalDisk, Promise, claim, listed, replace_durably
from dips.slave.memory import DISK_RETRY_S, F32, U8, bytes_of
from dips.slave.snapshot_files import (
    HEADER_BYTES,
    NO_RESIDUAL,
    SlotContent,
    SnapshotError,
    SnapshotManifest,
    build_header,
    encode,
    file_bytes,
    manifest_name,
    read_manifest,
    read_snapshot,
    ring_name,
    take_stock,
    tensors_of,
)

Key = tuple[Version, RoundId]

SPARE_FILES = 1
"""Files in addition to the kept ones: the file of the shadow, while a round is open."""


class SnapshotWriter:
    """Writes a snapshot file from its beginning to its end: theta's bytes, then the momentum's, then the residual's."""

    def __init__(self, disk: Disk, name: str, n_elems: int, residual_bytes: int) -> None:
        self._disk = disk
        self.name = name
        self.n_elems = n_elems
        self.residual_bytes = residual_bytes
        self._tensor_bytes = n_elems * FLOAT32_BYTES
        self._written_bytes = 0
        self._sums = [xxhash.xxh3_128() for _ in tensors_of(residual_bytes)]

    def write(self, data: memoryview, straight: bool = False) -> None:
        """Write the next bytes, of one of the tensors. straight: as Disk.overwrite() has it. Raises Refused(DISK)."""
        which = min(2, self._written_bytes // self._tensor_bytes) if self._tensor_bytes else 0
        at = HEADER_BYTES + self._written_bytes
        try:
            self._disk.overwrite(self.name, at, data, self._sums[which].update, straight)
        except OSError as error:
            raise disk_refusal(self._disk.where(self.name), error) from error
        self._written_bytes += len(data)

    def write_no_residual(self) -> None:
        """Write a residual of zeros, after the other tensors. Raises Refused(DISK)."""
        for start in range(0, self.residual_bytes, IO_BYTES):
            self.write(memoryview(bytes(min(IO_BYTES, self.residual_bytes - start))))

    def sums(self) -> tuple[str, ...]:
        """xxh3-128 of each tensor, once all bytes are written."""
        whole = 2 * self._tensor_bytes + self.residual_bytes
        assert self._written_bytes == whole, "a header seals whole files only"
        return tuple(found.hexdigest() for found in self._sums)


class Ring:
    """The ring. snapshots_kept: committed snapshots that are never overwritten. Call scan() first."""

    def __init__(self, disk: Disk, run_id: str, slave_id: str, snapshots_kept: int) -> None:
        self._disk = disk
        self._owner = (run_id, slave_id)
        self._snapshots_kept = snapshots_kept
        self._slots: dict[int, SlotContent | None] = {}
        self._known: tuple[SnapshotInfo, ...] = ()
        self._current: Key | None = None
        self._open: Key | None = None
        self._streaming: int | None = None

    @property
    def n_files(self) -> int:
        return self._snapshots_kept + SPARE_FILES

    # ---- snapshots on disk ----

    def scan(self) -> list[str]:
        """Verify every file. Returns one sentence for each that cannot be used; it is free space from now on."""
        self._slots, problems = take_stock(self._disk, *self._owner)
        self._note()
        return problems

    def infos(self) -> tuple[SnapshotInfo, ...]:
        """Verified snapshots, newest first. May be called from any thread, and never waits for the disk."""
        return self._known

    def holds(self, info: SnapshotInfo) -> bool:
        """Whether a file with this version, round and digest is here, committed or not."""
        slot = self._slot_of(_key(info))
        return slot is not None and self._content(slot).info.digest == info.digest

    # ---- the files ----

    def make(self, n_elems: int, residual_bytes: int = 0) -> None:
        """Make all missing files, for a shard of this size. Raises Refused(DISK) with the bytes needed and those free.

        A file that holds a verified snapshot is left unchanged, also with another size.
        """
        size = file_bytes(n_elems, residual_bytes)
        free_slots = [slot for slot in range(self.n_files) if self._slots.get(slot) is None]
        lacking = {slot: self._disk.missing_bytes(ring_name(slot), size) for slot in free_slots}
        wanted = [slot for slot, n_bytes in lacking.items() if n_bytes]
        made: list[int] = []
        try:
            for slot in wanted:
                made.append(slot)
                self._disk.allocate(ring_name(slot), size)
            if wanted:
                self._disk.sync_names()
        except OSError as error:
            try:
                free = str(self._disk.free_bytes())
            except OSError:
                free = "an unknown number"
            for slot in made:  # the operator is asked to free space; best effort, as the disk fails already
                with contextlib.suppress(OSError):
                    self._disk.remove(ring_name(slot))
            raise Refused(
                RefusalCode.DISK,
                f"{self._disk.where(ring_name(0))} and the other {self.n_files - 1} snapshot files of {size} bytes "
                f"cannot be made: {error.strerror}; {sum(lacking.values())} bytes are needed and {free} are free: free "
                "space on the slave's disk, lower its snapshots_kept, or give it another directory",
                DISK_RETRY_S,
            ) from error
        for slot in range(self.n_files):
            self._slots.setdefault(slot, None)

    # ---- writing snapshots ----

    def write_shadow(
        self,
        info: SnapshotInfo,
        theta: F32,
        momentum: F32,
        residual: U8 = NO_RESIDUAL,
        written: Callable[[], object] = lambda: None,
        straight: bool = False,
    ) -> None:
        """Write a shadow; durable when this returns. theta, momentum: (n,) float32 of this slave's blocks; residual:
        empty where the run publishes float32. None is read after written().

        straight: it is not urgent, and leaves the processors to others. Raises Refused(DISK); then the file is free.
        """
        if self._open == _key(info):
            self._open = None  # written again: the earlier file is no longer the round's
        slot = self._choose(_key(info))
        writer = SnapshotWriter(self._disk, ring_name(slot), theta.size, residual.size)
        try:
            self._clear(slot, writer)
            for data in (bytes_of(theta), bytes_of(momentum), *([residual.data] if residual.size else [])):
                writer.write(data, straight)
            written()
            self._seal(slot, info, writer)
        except OSError as error:
            raise disk_refusal(self._disk.where(writer.name), error) from error

    def _clear(self, slot: int, writer: SnapshotWriter) -> None:
        """Make a slot's file writable: no manifest names it, and it has its full size. Raises OSError."""
        self._vacate(slot)
        size = file_bytes(writer.n_elems, writer.residual_bytes)
        if self._disk.missing_bytes(ring_name(slot), size):
            self._disk.allocate(ring_name(slot), size)
            self._disk.sync_names()

    def _seal(self, slot: int, info: SnapshotInfo, writer: SnapshotWriter) -> None:
        """All tensors are written: make the file a durable shadow. Raises OSError.

        The header with the checksums comes last, so that none fits the mixed bytes of two versions.
        """
        raw, head = build_header(info, writer.n_elems, writer.sums(), *self._owner, writer.residual_bytes)
        self._disk.overwrite(ring_name(slot), 0, memoryview(raw))
        self._disk.sync(ring_name(slot))
        self._put(slot, SlotContent(head.info, head))
        self._open = _key(info)

    # ---- a shadow that comes piece by piece, of another placement ----

    def begin_stream(self, info: SnapshotInfo, n_elems: int, residual_bytes: int = 0) -> SnapshotWriter:
        """Begin a file for a shard of this size that is not in memory. It is reserved until seal_stream() or
        drop_stream(). Raises Refused(DISK), also when a whole ring of such files would not fit on the disk.
        """
        self.drop_stream()
        # Files grow in place: the bytes that they lack of this size must be free, or rounds would fail later.
        size, slot = file_bytes(n_elems, residual_bytes), 0
        try:
            lacking = sum(self._disk.missing_bytes(ring_name(slot), size) for slot in range(self.n_files))
            free = self._disk.free_bytes()
            if lacking > free:
                raise Refused(
                    RefusalCode.DISK,
                    f"{self.n_files} snapshot files of {size} bytes need {lacking} bytes more, and {free} are free: "
                    "free space on the slave's disk, or lower its snapshots_kept",
                    DISK_RETRY_S,
                )
            slot = self._choose(_key(info))
            writer = SnapshotWriter(self._disk, ring_name(slot), n_elems, residual_bytes)
            self._clear(slot, writer)
        except OSError as error:
            raise disk_refusal(self._disk.where(ring_name(slot)), error) from error
        self._streaming = slot
        return writer

    def seal_stream(self, stream: SnapshotWriter, info: SnapshotInfo) -> None:
        """Seal a fully written stream: durable when this returns, and a shadow like any other. Raises Refused(DISK)."""
        slot = self._streaming
        assert slot is not None, "a stream that was begun is sealed once"
        try:
            self._seal(slot, info, stream)
        except OSError as error:
            raise disk_refusal(self._disk.where(stream.name), error) from error
        self._streaming = None

    def drop_stream(self) -> None:
        """Give up a stream: its file is free space."""
        self._streaming = None

    def close_round(self) -> None:
        """No round is open: no shadow needs protection. For a slave that is configured again."""
        self._open = None

    def drop_shadow(self, info: SnapshotInfo) -> None:
        """Free the file of this shadow; a committed snapshot is left unchanged."""
        slot = self._slot_of(_key(info))
        if slot is not None and not self._content(slot).info.committed:
            self._put(slot, None)
        if self._open == _key(info):
            self._open = None

    def write_committed(
        self,
        info: SnapshotInfo,
        theta: F32,
        momentum: F32,
        record: bytes,
        residual: U8 = NO_RESIDUAL,
        written: Callable[[], object] = lambda: None,
    ) -> None:
        """Write the file of a committed version, unless it is there, then its manifest. Raises Refused(DISK).

        info: with its commit_hash. The file of an earlier write that failed becomes free space.
        """
        if not self.holds(info):
            self.close_round()
            self.write_shadow(info, theta, momentum, residual, written, straight=True)
        self.commit(info, info.commit_hash, record)

    def adopt(
        self, source: SnapshotInfo, named: SnapshotInfo, origin: Version | None, commit_hash: bytes, record: bytes
    ) -> tuple[SnapshotInfo, list[str]]:
        """`source` was loaded as the master's version `named`: give it that name and COMMIT, unless it has both.

        Versions lost by a rollback to `origin` are removed only after that. Can be repeated after any crash. Returns
        the committed snapshot, and a sentence for each file that could not be removed. Raises Refused(DISK).
        """
        here = source
        if _key(source) != _key(named) or not source.committed:
            here = self.commit(named, commit_hash, record, source)
        problems = self.forget_lost(origin, here.version) if origin is not None else []
        return here, problems + self.tidy(here)

    def commit(
        self, info: SnapshotInfo, commit_hash: bytes, record: bytes, origin: SnapshotInfo | None = None
    ) -> SnapshotInfo:
        """Make a shadow a committed snapshot: its manifest is durable when this returns. Raises Refused(DISK).

        origin: the snapshot's name so far, where it gets another one after a rollback; its manifest is replaced.
        """
        key, info = _key(origin or info), replace(info, committed=True, commit_hash=commit_hash)
        slot = self._slot_of(key)
        if slot is None:
            raise Refused(RefusalCode.DISK, f"the snapshot of {key[0]} ({key[1]}) is gone: it cannot be committed")
        content = self._content(slot)
        name, said = manifest_name(slot), content.head.info
        try:
            text = record.decode()
        except UnicodeDecodeError as error:
            raise Refused(RefusalCode.MALFORMED, f"the COMMIT record of {info.round} is not text: {error}") from error
        manifest = SnapshotManifest(
            info, *self._owner, ring_name(slot), content.head.stamp, said.version, said.round, text
        )
        try:
            replace_durably(self._disk, name, encode(manifest))
        except OSError as error:
            raise disk_refusal(self._disk.where(name), error) from error
        self._put(slot, SlotContent(info, content.head))
        self._current = _key(info)
        if self._open == key:
            self._open = None
        return info

    def load(self, info: SnapshotInfo, theta: F32, momentum: F32, residual: U8 = NO_RESIDUAL) -> None:
        """Read a snapshot into memory. residual: zeros where the file has none; empty: it is not wanted.

        Raises Refused(DISK) when it changed since it was verified; then it is free.
        """
        slot = self._slot_of(_key(info))
        if slot is None:
            raise Refused(RefusalCode.DISK, f"the snapshot of version {info.version} ({info.round}) is gone")
        where = self._disk.where(ring_name(slot))
        try:
            with self._disk.open(ring_name(slot)) as file:
                head = read_snapshot(file, where, (theta, momentum, residual))
            if head != self._content(slot).head:
                raise SnapshotError(f"{where} changed since it was verified")
        except (OSError, SnapshotError) as error:
            self._put(slot, None)
            sentence = f"the snapshot of version {info.version} cannot be loaded: {error}"
            raise Refused(RefusalCode.DISK, sentence) from error
        self._current = _key(info)

    def record(self, version: Version, round_id: RoundId) -> tuple[bytes, bytes]:
        """The COMMIT record in a manifest, read again, and its hash as committed.

        Raises Refused(VERSION_GONE or DISK).
        """
        slot = self._slot_of((version, round_id))
        if slot is None or not self._content(slot).info.committed:
            raise Refused(RefusalCode.VERSION_GONE, f"no committed snapshot of {version} ({round_id}) is here")
        try:
            found = read_manifest(self._disk, slot, self._content(slot).head)
        except (OSError, SnapshotError) as error:
            raise Refused(RefusalCode.DISK, f"the COMMIT record of {version} cannot be read: {error}") from error
        return found.record.encode(), found.info.commit_hash

    # ---- removing snapshots ----

    def forget_lost(self, origin: Version, now: Version) -> list[str]:
        """After a rollback to `origin`, named `now`: remove later snapshots of earlier timelines.

        Returns a sentence for each that could not be removed.
        """
        lost = [
            slot
            for slot, content in self._slots.items()
            if content is not None and content.info.version.timeline < now.timeline and content.info.version > origin
        ]
        return self._each(lost, self._vacate)

    def tidy(self, current: SnapshotInfo) -> list[str]:
        """`current` is in memory: free other shadows, and remove files beyond the ring that hold no kept version.

        Returns a sentence for each file that could not be removed: a failing disk must not undo a durable COMMIT.
        """
        self._current = _key(current)
        for slot, content in list(self._slots.items()):
            if content is not None and not content.info.committed and _key(content.info) != self._open:
                self._put(slot, None)
        kept = self._protected()
        surplus = [slot for slot in self._slots if slot >= self.n_files and slot not in kept]
        return self._each(surplus, self._remove)

    def _vacate(self, slot: int) -> None:
        """Clear a slot: its manifest is removed first, durably, so that none ever names other bytes."""
        failpoint("slave.manifest.before_remove")
        self._disk.remove(manifest_name(slot))
        self._put(slot, None)
        failpoint("slave.manifest.after_remove")
        self._disk.sync_names()

    def _remove(self, slot: int) -> None:
        self._vacate(slot)
        self._disk.remove(ring_name(slot))
        del self._slots[slot]

    def _each(self, slots: list[int], act: Callable[[int], None]) -> list[str]:
        problems: list[str] = []
        for slot in slots:
            try:
                act(slot)
            except OSError as error:
                problems.append(f"{self._disk.where(ring_name(slot))} cannot be removed: {error.strerror}")
        return problems

    # ---- choosing a file ----

    def _choose(self, key: Key) -> int:
        """The slot to overwrite: an empty one, else a stale shadow, else the oldest that is not kept.

        Raises Refused(DISK) when every file is named by a kept version or an open round.
        """
        kept = self._protected()
        free = [slot for slot in range(self.n_files) if slot not in kept]
        same = self._slot_of(key)
        if not free:
            raise Refused(
                RefusalCode.DISK,
                f"all {self.n_files} snapshot files hold versions that are kept or the shadow of an open round: this "
                "ends with the round; raise snapshots_kept if it lasts",
                DISK_RETRY_S,
            )
        if same in free and same is not None:
            return same

        def rank(slot: int) -> tuple[int, Key, int]:
            content = self._slots.get(slot)
            return (0, _ZERO, slot) if content is None else (1 + content.info.committed, _key(content.info), slot)

        return min(free, key=rank)

    def _protected(self) -> set[int]:
        """Slots of the current version, of the newest other committed ones, and of the open round's shadow."""
        committed = [
            (_key(content.info) == self._current, _key(content.info), slot)
            for slot, content in self._slots.items()
            if content is not None and content.info.committed
        ]
        kept = {slot for _, _, slot in sorted(committed, reverse=True)[: self._snapshots_kept]}
        opened = self._slot_of(self._open) if self._open is not None else None
        return kept | {slot for slot in (opened, self._streaming) if slot is not None}

    def _put(self, slot: int, content: SlotContent | None) -> None:
        self._slots[slot] = content
        self._note()

    def _note(self) -> None:
        found = (content.info for content in self._slots.values() if content is not None)
        self._known = tuple(sorted(found, key=_key, reverse=True))

    def _slot_of(self, key: Key) -> int | None:
        return next((slot for slot, c in self._slots.items() if c is not None and _key(c.info) == key), None)

    def _content(self, slot: int) -> SlotContent:
        content = self._slots[slot]
        assert content is not None
        return content


_ZERO: Key = (Version(0, 0), RoundId(0, 0))


def disk_refusal(where: str, error: OSError) -> Refused:
    """The refusal that a peer gets when this slave's disk is full or fails."""
    return Refused(
        RefusalCode.DISK, f"{where} cannot be written: {error.strerror}: free space on the slave's disk", DISK_RETRY_S
    )


def _key(info: SnapshotInfo) -> Key:
    return (info.version, info.round)


# ---- snapshots -------------------------------------------------------------------------------------------------------
#
# Opens a slave's directory with its lock, its promise and its ring of snapshots (docs/storage.md).


class SnapshotStore:
    """One slave's directory, locked while this object is open.

    Raises ConfigError when the directory cannot be used, belongs to another run or slave, or is in use.
    """

    def __init__(self, directory: Path, run_id: str, slave_id: str, snapshots_kept: int) -> None:
        self.directory = directory
        unusable = f"the slave's directory {directory} cannot be used: {{why}}"
        held = f"another slave uses {directory} (process {{holder}}): stop it, or give this one its own directory"
        self._lock = FolderLock(directory, "lock", unusable=unusable, held=held)
        try:
            self._disk = LocalDisk(directory)
            self.directory_id = claim(self._disk, run_id, slave_id)
            self.promise = Promise(self._disk)
            self.ring = Ring(self._disk, run_id, slave_id, snapshots_kept)
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def scan(self) -> list[str]:
        """Verify every snapshot. Returns one sentence for each that cannot be used. Raises ConfigError."""
        for name in listed(self._disk):
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    self._disk.remove(name)
        return self.ring.scan()
