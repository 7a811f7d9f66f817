"""Copies each n-th version of slaves' snapshots to an object store, and makes a slave's directory again from there.

A process of its own reads what slaves have committed; no slave knows of it. Names of objects:

    RUN/TIMELINE.V-COMMIT/SLAVE-FILE.00000, .00001, ...   the snapshot file, in parts of PART_BYTES
    RUN/TIMELINE.V-COMMIT/SLAVE.json                      which parts there are, and the slave's manifest; written last

COMMIT and FILE begin the hash of the COMMIT record and the checksum of the file's header. So two contents never have
the same name, whatever a restored run calls its versions, and an upload that was killed goes on where it ended. A
version is complete when the objects SLAVE.json of all slaves in its COMMIT record are there; nothing else is restored.
The ring overwrites its files, so a file is copied and checked on the disk first, and the copy is sent. What comes from
the store is measured before it is read, and checked before it is used; objects with other names are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dips.core.errors import ConfigError, DipsError, RetryLater
from dips.core.files import FolderLock, closed
from dips.core.ids import Version
from dips.core.net.object_store import Objects
from dips.core.observe.logs import ChangeLogger
from dips.core.units import format_bytes
from dips.slave.config import BackupConfig
from dips.slave.disk import json_sum, write_all
from dips.slave.ring import SnapshotStore
from dips.slave.snapshot_files import (
    HEADER_BYTES,
    FileHead,
    SnapshotError,
    SnapshotManifest,
    SnapshotStamp,
    decode,
    encode,
    manifest_name,
    parse_head,
    read_snapshot,
)

FORMAT = "dips-backup-1"
PART_BYTES = 16 << 20
"""Of an object: a server takes it whole or not at all, and a short request is cheap to repeat."""

MOST_MANIFEST_BYTES = 64 << 20
"""Of an object SLAVE.json, which holds a COMMIT record: some hundred KiB for large models."""

COPY_BYTES = 8 << 20
ROOM_BYTES = 256 << 20
"""What a copy leaves free on a slave's disk, for all that the slave itself writes."""

LOOK_S = 2.0
LONGEST_WAIT_S = 60.0
IN_FLIGHT = 4
"""Parts that a restore reads at a time."""

FOLDER, COPY = "backup", "copy.safetensors"
"""In a slave's directory: the copy of the file that is being sent, with its manifest."""

KEPT_FILES = 3

Part = tuple[str, int, str]
"""An object's name, bytes and xxh3-128."""

log = logging.getLogger("dips.backup")

# ---- names and what a listing shows ----------------------------------------------------------------------------------

_NAME = "[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_OBJECT = re.compile(
    rf"(?P<folder>(?P<run>{_NAME})/(?P<timeline>\d{{1,9}})\.(?P<v>\d{{1,18}})-[0-9a-f]{{16}})/"
    rf"{_NAME}(-[0-9a-f]{{16}}\.\d{{5,9}}|\.json)",
    re.ASCII,
)
MAX_TIMELINE, MAX_V = 10**9 - 1, 10**18 - 1
_MANIFEST = ".json"


@dataclass(frozen=True)
class StoredVersion:
    """The objects of one version of a run, as far as they are there."""

    run_id: str
    version: Version
    folder: str
    objects: dict[str, int]  # name -> bytes

    @property
    def slaves(self) -> frozenset[str]:
        """Those whose part is whole."""
        start = len(self.folder) + 1
        return frozenset(name[start : -len(_MANIFEST)] for name in self.objects if name.endswith(_MANIFEST))


def stored_versions(sizes: Mapping[str, int]) -> list[StoredVersion]:
    """The versions in a listing, oldest first. Objects with other names are not ours, and are left alone."""
    found: dict[str, StoredVersion] = {}
    for name, n_bytes in sizes.items():
        if match := _OBJECT.fullmatch(name):
            version = Version(int(match["timeline"]), int(match["v"]))
            one = StoredVersion(match["run"], version, match["folder"], {})
            found.setdefault(one.folder, one).objects[name] = n_bytes
    return sorted(found.values(), key=lambda one: (one.version, one.folder))


def is_given_up(one: StoredVersion, shards: Mapping[str, StoredShard]) -> bool:
    """Whether a ROLLBACK that the record of one of these knows took the version out of the run's history."""
    return any(old < one.version < new for shard in shards.values() for old, new in shard.given_up)


def due(versions: Iterable[Version], sent: Version | None, stride: int) -> Version | None:
    """The version to send next, newer than what was sent: the newest whose number is a multiple of the stride, or that
    is of a new timeline, since a restore must know which timelines were used."""
    newer = [v for v in versions if sent is None or v > sent]
    return max((v for v in newer if v.v % stride == 0 or (sent and v.timeline > sent.timeline)), default=None)


def next_stride(every: int, passed: int) -> int:
    """The stride after an upload during which the run made `passed` versions: `every`, doubled until it fits. Multiples
    of a larger one are multiples of the smaller ones, so all slaves send what the slowest sends."""
    stride = every
    while stride < passed:
        stride *= 2
    return stride


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredShard:
    """One slave's part of a version in the store, and what matters here of its COMMIT record."""

    manifest: SnapshotManifest
    parts: tuple[Part, ...]
    digests: Mapping[str, str]  # slave -> digest
    given_up: tuple[tuple[Version, Version], ...]


def encode_shard(manifest: SnapshotManifest, parts: Sequence[Part]) -> bytes:
    """The object SLAVE.json."""
    body = {"format": FORMAT, "manifest": encode(manifest).decode(), "parts": [list(part) for part in parts]}
    return json.dumps({"body": body, "xxh3_128": json_sum(body)}).encode()


def read_stored(objects: Objects, of: StoredVersion, slave_id: str) -> StoredShard:
    """Read an object SLAVE.json of this version. Raises SnapshotError where it is torn, altered or another's, or where
    one of its parts is not there; else as Objects do."""
    where = f"{of.folder}/{slave_id}{_MANIFEST}"
    if of.objects[where] > MOST_MANIFEST_BYTES:
        raise SnapshotError(f"{where} has {format_bytes(of.objects[where])}: no manifest is that large")
    try:
        outer = json.loads(_get(objects, where, of.objects[where]))
        body = outer["body"]
        if outer["xxh3_128"] != json_sum(body) or body["format"] != FORMAT:
            raise SnapshotError(f"{where} was altered, or is of another release")
        manifest = decode(body["manifest"].encode(), where)
        parts = tuple((str(name), int(n_bytes), str(xxh3)) for name, n_bytes, xxh3 in body["parts"])
        record = json.loads(manifest.record)
        digests = {str(slave): str(digest) for slave, digest in record["digests"].items()}
        given_up = tuple((Version(*old), Version(*new)) for old, new in record["ledger"].get("given_up", ()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise SnapshotError(f"{where} cannot be read: {error!r}") from error
    info, hashed = manifest.info, hashlib.sha256(manifest.record.encode()).digest()
    if (manifest.run_id, manifest.slave_id, _folder(manifest)) != (of.run_id, slave_id, of.folder):
        raise SnapshotError(f"{where} is of version {info.version} of slave {manifest.slave_id!r}: it is not its own")
    if hashed != info.commit_hash or digests.get(slave_id) != info.digest.hex():
        raise SnapshotError(f"{where} is not what its COMMIT record says")
    if not (0 <= info.round.epoch <= MAX_TIMELINE and 0 <= info.round.n <= MAX_V):
        raise SnapshotError(f"{where} is of round {info.round}, which no master began")
    lacking = [name for name, n_bytes, _ in parts if of.objects.get(name) != n_bytes or n_bytes > PART_BYTES]
    if lacking:
        raise SnapshotError(f"{lacking[0]} is not there as it was written: the copy is torn")
    if sum(n_bytes for _, n_bytes, _ in parts) != manifest.stamp.n_bytes or not parts or parts[0][1] < HEADER_BYTES:
        raise SnapshotError(f"{where} does not name the whole file")
    return StoredShard(manifest, parts, digests, given_up)


def _folder(manifest: SnapshotManifest) -> str:
    info = manifest.info
    return f"{manifest.run_id}/{info.version.timeline}.{info.version.v}-{info.commit_hash.hex()[:16]}"


# ---- copying to the store --------------------------------------------------------------------------------------------


class Copier:
    """Sends what is due of slaves' directories, one file at a time, no faster than the settings allow. wait: sleeps."""

    def __init__(self, objects: Objects, config: BackupConfig, wait: Callable[[float], None] = time.sleep) -> None:
        self._objects = objects
        self._config = config
        self._wait = wait
        self._changes = ChangeLogger(log)
        self._strides: dict[Path, int] = {}
        self._sent: dict[Path, Version | None] = {}
        self._known: dict[str, StoredShard] = {}  # of each folder the part of one slave
        self._checked: tuple[SnapshotStamp, int, int] | None = None  # and which file it was

    def look_for_ever(self, paths: Sequence[Path]) -> None:
        """Send what is due, until the process is ended. What fails is tried again, for no run needs it."""
        wait_s = LOOK_S
        while True:
            failed = False
            for directory in slave_directories(paths):
                try:
                    self.look(directory)
                except (DipsError, OSError) as error:
                    failed = True
                    sentence = f"{directory} is not copied: {error}; it is tried again, and the run goes on meanwhile"
                    self._changes.report(str(directory), sentence, "WARNING")
                else:
                    self._changes.report(str(directory), "")
            wait_s = min(2 * wait_s, LONGEST_WAIT_S) if failed else LOOK_S
            self._wait(wait_s)

    def look(self, directory: Path) -> Version | None:
        """Send the version of a slave's directory that is due, or the one that an earlier call began to send; returns
        which. The next call goes on after any error: DipsError of the store or for lack of room, OSError of the disk.
        """
        ring, begun = committed(directory), committed(directory / FOLDER)
        stride = self._strides.get(directory, self._config.every)
        known = directory in self._sent
        if not ring or (known and not begun and due(ring, self._sent[directory], stride) is None):
            return None
        with _locked(directory):
            if begun:
                _need_room(directory / FOLDER, ROOM_BYTES)
            newest = max(ring)
            stored, sent = self._stored(ring[newest])
            self._sent[directory] = sent
            if sent is not None and sent > newest:
                # Of an earlier run of this name; or the slave was restored, and its run goes on on a newer timeline.
                self._sent[directory] = Version(sent.timeline, MAX_V)
                _empty(directory / FOLDER)
                log.warning("%s", self._is_newer(sent, newest, directory))
                return None
            version = max((v for v in begun if sent is None or v > sent), default=None) or due(ring, sent, stride)
            if version is None:
                _empty(directory / FOLDER)
                return None
            manifest = begun.get(version) or ring[version]
            if version not in begun:
                self._begin(directory, manifest)
            self._send(directory, manifest, stored)
            passed = (
                max((v.v for v in committed(directory) if v.timeline == newest.timeline), default=newest.v) - newest.v
            )
            self._strides[directory] = next_stride(self._config.every, passed)
            self._remove_old(manifest.run_id)
            return version

    def send_newest(self, paths: Sequence[Path]) -> Version:
        """Send the newest version that all the directories hold. Raises ConfigError where there is none, or the store
        has a newer one; RetryLater, OSError."""
        directories = slave_directories(paths)
        rings = {directory: committed(directory) for directory in directories}
        version = max(set.intersection(*map(set, rings.values())) if rings else set(), default=None)
        if version is None:
            raise ConfigError(f"no version is on all slaves of {', '.join(map(str, paths))}: see `dips status`")
        with contextlib.ExitStack() as locks:
            for directory in directories:  # all are copied before one is sent: the rings go on meanwhile
                locks.enter_context(_locked(directory))
                if version not in committed(directory / FOLDER):
                    self._begin(directory, rings[directory][version])
            for directory in directories:
                stored, sent = self._stored(rings[directory][version])
                if sent is not None and sent > version:
                    raise ConfigError(self._is_newer(sent, version, directory))
                self._send(directory, rings[directory][version], stored)
        self._remove_old(rings[directories[0]][version].run_id)
        return version

    def _stored(self, manifest: SnapshotManifest) -> tuple[list[StoredVersion], Version | None]:
        """What the store has of the run, and the newest version of this slave in it."""
        stored = stored_versions(self._objects.sizes(manifest.run_id))
        return stored, max((one.version for one in stored if manifest.slave_id in one.slaves), default=None)

    def _is_newer(self, sent: Version, newest: Version, directory: Path) -> str:
        return (
            f"nothing is copied of {directory} before it has a newer timeline: {self._objects.url} holds {sent} of "
            f"this slave, newer than its {newest}; if that is of an earlier run of this name, give another URL"
        )

    def _begin(self, directory: Path, manifest: SnapshotManifest) -> None:
        """Copy the snapshot file, since rounds overwrite it. The manifest goes to the copy, so that the next process
        goes on with it if this one is killed. Raises RetryLater where there is no room, or the file left the ring."""
        folder, version = directory / FOLDER, manifest.info.version
        _empty(folder)
        _need_room(folder, manifest.stamp.n_bytes + ROOM_BYTES)
        try:
            _copy(directory / manifest.file, folder / COPY)
        except OSError:
            _empty(folder)
            raise
        self._check(folder, manifest, f"version {version} left the ring meanwhile, a newer one follows")
        with open(folder / manifest_name(0), "wb", opener=closed) as file:
            file.write(encode(manifest))

    def _check(self, folder: Path, manifest: SnapshotManifest, trouble: str) -> None:
        try:
            with (folder / COPY).open("rb") as file:
                status = os.fstat(file.fileno())
                which = (manifest.stamp, status.st_ino, status.st_mtime_ns)
                if self._checked == which:
                    return
                read_snapshot(file, str(folder / COPY), named_by=manifest)
        except (FileNotFoundError, SnapshotError) as error:
            _empty(folder)
            raise RetryLater(trouble) from error
        self._checked = which

    def _send(self, directory: Path, manifest: SnapshotManifest, stored: Sequence[StoredVersion]) -> None:
        """Send the copy, as far as it is not there, then its manifest; the copy is removed then."""
        folder, parts = directory / FOLDER, list[Part]()
        self._check(folder, manifest, f"{folder / COPY} is not what was written, and is made again")
        place, there = _folder(manifest), {name: size for one in stored for name, size in one.objects.items()}
        with (folder / COPY).open("rb") as file:
            while piece := file.read(PART_BYTES):
                name = f"{place}/{manifest.slave_id}-{manifest.stamp.header_xxh3_128[:16]}.{len(parts):05d}"
                parts.append((name, len(piece), xxhash.xxh3_128_hexdigest(piece)))
                if there.get(name) == len(piece):
                    continue  # of an upload that was killed
                _need_room(folder, ROOM_BYTES)
                began_s = time.monotonic()
                self._objects.put(name, piece)
                self._wait(max(0.0, len(piece) * 8 / self._config.rate - (time.monotonic() - began_s)))
        self._objects.put(f"{place}/{manifest.slave_id}{_MANIFEST}", encode_shard(manifest, parts))
        _empty(folder)
        self._sent[directory] = manifest.info.version
        log.info("version %s of slave %s is in %s", manifest.info.version, manifest.slave_id, self._objects.url)

    def _remove_old(self, run_id: str) -> None:
        """Manifests go first, so that what is left of a version is never taken for one."""
        stored = stored_versions(self._objects.sizes(run_id))
        for one in stored:
            if one.folder not in self._known and one.slaves:
                with contextlib.suppress(SnapshotError):
                    self._known[one.folder] = read_stored(self._objects, one, min(one.slaves))
        # The newest complete versions stay, and what is newer than these. An older one that is incomplete stays so:
        # each slave sends its versions in their order.
        known = self._known
        complete = [
            one
            for one in stored
            if one.folder in known and known[one.folder].digests.keys() <= one.slaves and not is_given_up(one, known)
        ]
        keep = {one.folder for one in complete[-self._config.kept :]}
        for old in stored:
            if not complete or old.version >= complete[-1].version or old.folder in keep:
                continue
            self._known.pop(old.folder, None)
            self._objects.delete(sorted(old.objects, key=lambda name: not name.endswith(_MANIFEST)))
            log.info("version %s is removed from %s", old.version, self._objects.url)


def committed(directory: Path) -> dict[Version, SnapshotManifest]:
    """The committed versions of a directory, as they are at this moment."""
    found: list[SnapshotManifest] = []
    for path in directory.glob("manifest-*.json"):
        with contextlib.suppress(OSError, SnapshotError):  # it leaves the ring just now, or the slave itself reports it
            found.append(decode(path.read_bytes(), str(path)))
    return {manifest.info.version: manifest for manifest in found}


def slave_directories(paths: Iterable[Path]) -> list[Path]:
    """Slaves' directories: those that are named, and all of a run's directory."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("slaves/*")) if (path / "slaves").is_dir() else [path]
    return [path for path in found if path.is_dir()]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time copies a directory. Raises ConfigError."""
    unusable, held = f"{directory / FOLDER} cannot be used: {{why}}", f"process {{holder}} copies {directory} just now"
    lock = FolderLock(directory / FOLDER, "lock", unusable=unusable, held=held)
    try:
        yield
    finally:
        lock.release()


def _copy(source: Path, copy: Path) -> None:
    """Copy a file's bytes; dirty pages do not pile up, and leave the page cache. Neither a link nor shared extents: the
    ring writes in place, into room that it has reserved."""
    copy.unlink(missing_ok=True)
    with source.open("rb") as file:
        into = closed(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            at = 0
            while piece := memoryview(file.read(COPY_BYTES)):
                write_all(into, at, piece)
                for handle, start in ((into, max(0, at - COPY_BYTES)), (file.fileno(), at)):
                    os.posix_fadvise(handle, start, COPY_BYTES, os.POSIX_FADV_DONTNEED)
                at += COPY_BYTES
        finally:
            os.close(into)


def _need_room(folder: Path, n_bytes: int) -> None:
    """Raises RetryLater, and removes the copy there, unless so much is free: the disk is the slave's."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < n_bytes:
        _empty(folder)
        raise RetryLater(
            f"that needs {format_bytes(n_bytes)} free, and {format_bytes(free)} are: free space on the disk"
        )


def _empty(folder: Path) -> None:
    for name in (manifest_name(0), COPY):
        (folder / name).unlink(missing_ok=True)


# ---- from the store --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restorable:
    """A version of which the store has all slaves' parts."""

    run_id: str
    version: Version
    shards: Mapping[str, StoredShard]
    newest_timeline: int  # of any version of the run in the store
    passed_over: tuple[str, ...]  # a sentence for each newer version that is not restored


def find_restorable(objects: Objects, run_id: str, version: Version | None) -> Restorable:
    """The newest version that is complete and part of the run's history, or the one that is named; run_id may be empty
    where the store has one run. Raises ConfigError where there is none, with what is torn or missing."""
    stored = stored_versions(objects.sizes(run_id))
    runs = sorted({one.run_id for one in stored})
    if len(runs) != 1:
        which = f"holds runs {', '.join(runs)}: name one with --run" if runs else "holds no copy of a run's version"
        raise ConfigError(f"{objects.url} {which}{f' {run_id}' if run_id and not runs else ''}")
    newer: dict[str, StoredShard] = {}
    problems: list[str] = []
    for one in reversed(stored):
        shards: dict[str, StoredShard] = {}
        try:
            for slave_id in sorted(one.slaves):
                shards[slave_id] = read_stored(objects, one, slave_id)
            if not shards:
                raise SnapshotError("no slave's copy is whole")
            first = shards[min(shards)]
            if lacking := first.digests.keys() - shards.keys():
                raise SnapshotError(f"the copy of slave {', '.join(sorted(lacking))} is not there, or not whole")
            if version is None and is_given_up(one, newer):
                raise SnapshotError("the run has given it up: a rollback went back to an older one")
        except SnapshotError as error:
            problems.append(f"version {one.version}: {error}")
        else:
            if version in (None, one.version):
                newest = max(each.version.timeline for each in stored)
                mine = {slave_id: shards[slave_id] for slave_id in first.digests}
                return Restorable(runs[0], one.version, mine, newest, tuple(problems))
        newer.update((one.folder, shard) for shard in shards.values())
    said = "; ".join(p for p in problems if version is None or p.startswith(f"version {version}:"))
    here = ", ".join(sorted({str(one.version) for one in stored}))
    raise ConfigError(f"no version to restore is in {objects.url} (it holds parts of {here})" + (said and f": {said}"))


def restore_slave(objects: Objects, found: Restorable, slave_id: str, directory: Path) -> bool:
    """Put a version into a slave's directory, which is made if it is not there; what is in it stays. Returns False
    where it was there. After a kill it can be called again.

    Raises ConfigError for a directory of another slave, or one in use, and for an object that is not what was written;
    Refused where the disk has no room.
    """
    if slave_id not in found.shards:
        raise ConfigError(f"version {found.version} has no slave {slave_id!r}, only {', '.join(sorted(found.shards))}")
    shard = found.shards[slave_id]
    # With one file more than there are, none that holds a version is overwritten.
    n_files = max(KEPT_FILES, len(list(directory.glob("ring-*.safetensors"))))
    store = SnapshotStore(directory, found.run_id, slave_id, n_files)
    try:
        store.scan()
        info = replace(shard.manifest.info, restored_timeline=found.newest_timeline)
        held = [one for one in store.ring.infos() if one.committed and one.commit_hash == info.commit_hash]
        if held:
            return False
        pieces = _fetched(objects, shard.parts)
        first = next(pieces)
        head = parse_head(first[:HEADER_BYTES], shard.parts[0][0])
        if not shard.manifest.fits(head):
            raise SnapshotError(f"{shard.parts[0][0]} is not the file that its manifest names")
        writer = store.ring.begin_stream(info, head.n_elems, head.residual_bytes)
        for piece in _within_tensors(head, first[HEADER_BYTES:], pieces):
            writer.write(piece)
        if writer.sums() != head.sums:
            raise SnapshotError(f"the parts of slave {slave_id} are not those of one file")
        store.ring.seal_stream(writer, info)
        store.ring.commit(info, info.commit_hash, shard.manifest.record.encode())
    except SnapshotError as error:
        raise ConfigError(
            f"version {found.version} of {objects.url} is refused: {error}; nothing of it is used: give --version with "
            "an older one for all slaves"
        ) from error
    finally:
        store.close()
    return True


def _fetched(objects: Objects, parts: Sequence[Part]) -> Iterator[bytes]:
    """The parts in their order, some of them on their way. Raises SnapshotError for one with other bytes."""
    pool, waiting = ThreadPoolExecutor(IN_FLIGHT, "dips-restore"), deque[Future[bytes]]()
    try:
        for index, (name, _, xxh3) in enumerate(parts):
            while len(waiting) < IN_FLIGHT and index + len(waiting) < len(parts):
                waiting.append(pool.submit(_get, objects, *parts[index + len(waiting)][:2]))
            data = waiting.popleft().result()
            if xxhash.xxh3_128_hexdigest(data) != xxh3:
                raise SnapshotError(f"{name} does not hold the bytes that were written: it was altered")
            yield data
    finally:
        pool.shutdown(cancel_futures=True)


def _within_tensors(head: FileHead, first: bytes, rest: Iterable[bytes]) -> Iterator[memoryview]:
    """The bytes after the header, in pieces of which none has two tensors' bytes."""
    ends = [4 * head.n_elems, 8 * head.n_elems, 8 * head.n_elems + head.residual_bytes]
    at = 0
    for piece in itertools.chain((first,), rest):
        view = memoryview(piece)
        while view:
            end = next((end for end in ends if end > at), 0)
            if not end:
                raise SnapshotError("the parts have more bytes than the file")
            yield view[: end - at]
            taken = min(len(view), end - at)
            at, view = at + taken, view[taken:]
    if at != ends[-1]:
        raise SnapshotError("the parts have fewer bytes than the file")


def _get(objects: Objects, name: str, n_bytes: int) -> bytes:
    try:
        return objects.get(name, n_bytes)
    except KeyError:
        raise SnapshotError(f"{name} is not there, or not as long as it was") from None
