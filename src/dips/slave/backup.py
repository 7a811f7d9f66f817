"""Copies each n-th version of slaves' snapshots to an object store, and makes a slave's directory again from there.

A process of its own reads what slaves have committed; no slave knows of it. Names of objects:

    RUN/TIMELINE.V-COMMIT/SLAVE-FILE.00000, .00001, ...   the snapshot file, in parts of PART_BYTES
    RUN/TIMELINE.V-COMMIT/SLAVE.json                      which parts there are, and the slave's manifest; written last

COMMIT and FILE begin the hash of the COMMIT record and the checksum of the file's header. So two contents never have
the same name, whatever a restored run calls its versions, and an upload that was killed goes on where it ended. A
version is complete when the objects SLAVE.json of all slaves in its COMMIT record are there; nothing else is restored.
The ring overwrites its files, so a file is copied and checked on the disk first, and the copy is sent.
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
from typing import TypeVar

import xxhash

from dips.core.errors import ConfigError, RetryLater
from dips.core.files import closed, make_folder, replace_file
from dips.core.ids import Version
from dips.core.net.object_store import Objects
from dips.core.observe.logs import ChangeLogger
from dips.core.units import format_bytes
from dips.slave.config import BackupConfig
from dips.slave.disk import begin_writing
from dips.slave.ring import SnapshotStore
from dips.slave.snapshot_files import (
    HEADER_BYTES,
    FileHead,
    SnapshotError,
    SnapshotManifest,
    decode,
    manifest_name,
    parse_head,
    read_head,
    read_tensors,
)

FORMAT = "dips-backup-1"
PART_BYTES = 16 << 20
"""Of an object: a server takes it whole or not at all, and a short request is cheap to repeat."""

COPY_BYTES = 8 << 20
ROOM_BYTES = 256 << 20
"""What a copy leaves free on a slave's disk, for all that the slave itself writes."""

LOOK_S = 2.0
LONGEST_WAIT_S = 60.0
IN_FLIGHT = 4
"""Parts that a restore reads at a time."""

FOLDER = "backup"
"""Of a slave's directory: the copy of the file that is being sent."""

KEPT_FILES = 3

T = TypeVar("T")
log = logging.getLogger("dips.backup")

# ---- names and what a listing shows ----------------------------------------------------------------------------------

_OBJECT = re.compile(r"(?P<folder>(?P<run>[^/]+)/(?P<timeline>\d{1,18})\.(?P<v>\d{1,18})-[0-9a-f]{16})/(?P<file>[^/]+)")
_MANIFEST = ".json"


@dataclass(frozen=True)
class StoredVersion:
    """The objects of one version of a run, as far as they are there."""

    run_id: str
    version: Version
    folder: str
    objects: Mapping[str, int]  # name -> bytes

    def manifest_of(self, slave_id: str) -> str:
        return f"{self.folder}/{slave_id}{_MANIFEST}"

    @property
    def slaves(self) -> frozenset[str]:
        """Those whose part is whole."""
        start = len(self.folder) + 1
        return frozenset(name[start : -len(_MANIFEST)] for name in self.objects if name.endswith(_MANIFEST))


def stored_versions(sizes: Mapping[str, int]) -> list[StoredVersion]:
    """The versions in a listing, oldest first. Objects with other names are not ours, and are left alone."""
    found: dict[str, tuple[str, Version, dict[str, int]]] = {}
    for name, n_bytes in sizes.items():
        if match := _OBJECT.fullmatch(name):
            version = Version(int(match["timeline"]), int(match["v"]))
            found.setdefault(match["folder"], (match["run"], version, {}))[2][name] = n_bytes
    versions = (StoredVersion(run, version, folder, objects) for folder, (run, version, objects) in found.items())
    return sorted(versions, key=lambda one: (one.version, one.folder))


def to_remove(
    versions: Sequence[StoredVersion], slaves_of: Callable[[StoredVersion], frozenset[str]], kept: int, record: Commit
) -> list[StoredVersion]:
    """What is neither one of the `kept` newest complete versions nor newer than these. An older one that is incomplete
    stays so: each slave sends its versions in their order. record: a new one, which knows what was given up.
    """
    complete = [one for one in versions if slaves_of(one) <= one.slaves and not record.gave_up(one.version)]
    if not complete:
        return []
    keep = {one.folder for one in complete[-kept:]}
    return [one for one in versions if one.version < complete[-1].version and one.folder not in keep]


def due(versions: Iterable[Version], newest_sent: Version | None, stride: int) -> Version | None:
    """The version to send next: the newest whose number is a multiple of the stride, unless it was sent already."""
    wanted = [v for v in versions if v.v % stride == 0 and (newest_sent is None or v > newest_sent)]
    return max(wanted, default=None)


def next_stride(every: int, passed: int) -> int:
    """The stride after an upload during which the run made `passed` versions: `every`, doubled until it fits. Multiples
    of a larger one are multiples of the smaller ones, so all slaves send what the slowest sends."""
    stride = every
    while stride < passed:
        stride *= 2
    return stride


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """What matters here of a COMMIT record."""

    digests: Mapping[str, str]  # slave -> digest
    given_up: tuple[tuple[Version, Version], ...]

    @staticmethod
    def read(record: str) -> Commit:
        """Raises SnapshotError."""
        try:
            raw = json.loads(record)
            ledger = raw["ledger"]
            digests = {str(slave): str(raw["digests"][slave]) for slave in ledger["slaves"]}
            given_up = tuple((Version(*old), Version(*new)) for old, new in ledger.get("given_up", ()))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SnapshotError(f"its COMMIT record cannot be read ({error!r})") from error
        return Commit(digests, given_up)

    def gave_up(self, version: Version) -> bool:
        """Whether a ROLLBACK took the version out of the run's history."""
        return any(old < version < new for old, new in self.given_up)


@dataclass(frozen=True)
class StoredShard:
    """One slave's part of a version in the store."""

    manifest: SnapshotManifest
    commit: Commit
    parts: tuple[tuple[str, int, str], ...]  # name, bytes, xxh3-128


def encode_shard(manifest: bytes, parts: Sequence[tuple[str, int, str]]) -> bytes:
    """The object SLAVE.json. manifest: the bytes of the slave's own."""
    body = {"format": FORMAT, "manifest": manifest.decode(), "parts": [list(part) for part in parts]}
    return json.dumps({"body": body, "xxh3_128": _sum(body)}).encode()


def read_shard(data: bytes, of: StoredVersion, slave_id: str) -> StoredShard:
    """Read an object SLAVE.json of this version. Raises SnapshotError where it is torn, altered or another's, or where
    one of its parts is not there."""
    where = of.manifest_of(slave_id)
    try:
        outer = json.loads(data)
        body = outer["body"]
        if outer["xxh3_128"] != _sum(body) or body["format"] != FORMAT:
            raise SnapshotError(f"{where} was altered, or is of another release")
        manifest = decode(body["manifest"].encode(), where)
        parts = tuple((str(name), int(n_bytes), str(xxh3)) for name, n_bytes, xxh3 in body["parts"])
        commit = Commit.read(manifest.record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{where} cannot be read: {error!r}") from error
    info, hashed = manifest.info, hashlib.sha256(manifest.record.encode()).digest()
    if (manifest.run_id, manifest.slave_id, _folder(manifest)) != (of.run_id, slave_id, of.folder):
        raise SnapshotError(f"{where} is of version {info.version} of slave {manifest.slave_id!r}: it is not its own")
    if hashed != info.commit_hash or commit.digests.get(slave_id) != info.digest.hex():
        raise SnapshotError(f"{where} is not what its COMMIT record says")
    if lacking := [name for name, n_bytes, _ in parts if of.objects.get(name) != n_bytes]:
        raise SnapshotError(f"{lacking[0]} is not there as it was written: the copy is torn")
    if sum(n_bytes for _, n_bytes, _ in parts) != manifest.stamp.n_bytes or not parts or parts[0][1] < HEADER_BYTES:
        raise SnapshotError(f"{where} does not name the whole file")
    return StoredShard(manifest, commit, parts)


def _folder(manifest: SnapshotManifest) -> str:
    info = manifest.info
    return f"{manifest.run_id}/{info.version.timeline}.{info.version.v}-{info.commit_hash.hex()[:16]}"


def _sum(body: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


# ---- copying to the store --------------------------------------------------------------------------------------------


class Copier:
    """Sends what is due of slaves' directories, one file at a time, no faster than the settings allow.

    wait: sleeps. A store that does not answer, or refuses, is asked again for ever, unless `gives_up`: no run needs it.
    """

    def __init__(
        self,
        objects: Objects,
        config: BackupConfig,
        gives_up: bool = False,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._objects = objects
        self._config = config
        self._gives_up = gives_up
        self._wait = wait
        self._changes = ChangeLogger(log)
        self._strides: dict[str, int] = {}
        self._sent: dict[str, Version | None] = {}
        self._slaves_of: dict[str, frozenset[str]] = {}

    def look(self, directory: Path, version: Version | None = None) -> Version | None:
        """Send the version of a slave's directory that is due, or the one that is named; returns what was sent.

        A directory without committed snapshots is a young one. Raises OSError where the disk fails.
        """
        manifests = committed(directory)
        if not manifests:
            return None
        newest = max(manifests)
        run_id, slave_id = manifests[newest][1].run_id, manifests[newest][1].slave_id
        stride = self._strides.get(slave_id, self._config.every)
        begun = committed(directory / FOLDER)
        if version is None and not begun and due(manifests, self._sent.get(slave_id), stride) is None:
            return None
        stored = stored_versions(self._again(lambda: self._objects.sizes(run_id)))
        sent = self._sent[slave_id] = max((one.version for one in stored if slave_id in one.slaves), default=None)
        if sent is not None and sent > newest:
            self._changes.report(
                f"history {slave_id}",
                f"nothing is copied of slave {slave_id}: {self._objects.url} holds version {sent} of it, newer than "
                f"{newest} in {directory}; if that is of an earlier run of this name, give another URL",
                "WARNING",
            )
            return None
        if sent is None or max(begun, default=sent) > sent:
            version = version or max(begun, default=None)
        version = version or due(manifests, sent, stride)
        if version is None or (sent is not None and version <= sent):
            return None
        name, manifest, raw = {**begun, **manifests}[version]
        with self._copied(directory, name, manifest, raw) as copy:
            if copy is None:
                return None
            self._send(copy, manifest, raw, {n: size for one in stored for n, size in one.objects.items()})
        passed = max((v.v for v in committed(directory) if v.timeline == version.timeline), default=version.v)
        self._strides[slave_id] = next_stride(self._config.every, passed - version.v)
        self._sent[slave_id] = version
        log.info("version %s of slave %s is in %s", version, slave_id, self._objects.url)
        self._remove_old(run_id, Commit.read(manifest.record))
        return version

    @contextlib.contextmanager
    def _copied(self, directory: Path, name: str, manifest: SnapshotManifest, raw: bytes) -> Iterator[Path | None]:
        """A copy of the snapshot file that no round overwrites; None where there is none (any more), or no room.

        If this process is killed, the copy and its manifest stay, and the next one goes on with them.
        """
        folder = directory / FOLDER
        copy, beside = folder / f"{manifest.stamp.header_xxh3_128}.safetensors", folder / manifest_name(0)
        make_folder(folder)
        for old in folder.iterdir():
            if old != copy and not (old == beside and old.read_bytes() == raw):
                old.unlink()
        trouble = "" if _is_whole(copy, manifest) else self._make_copy(directory / name, copy, manifest)
        if trouble:
            beside.unlink(missing_ok=True)
            self._changes.report(f"copy {directory}", f"{directory} is not copied: {trouble}", "WARNING")
            yield None
            return
        self._changes.report(f"copy {directory}", "")
        replace_file(beside, [raw])
        yield copy
        for path in (beside, copy):
            path.unlink(missing_ok=True)

    def _make_copy(self, source: Path, copy: Path, manifest: SnapshotManifest) -> str:
        """Returns why there is none; empty: it is whole."""
        n_bytes, disk = manifest.stamp.n_bytes + ROOM_BYTES, os.statvfs(copy.parent)
        free = disk.f_bavail * disk.f_frsize
        if free < n_bytes:
            return f"that needs {format_bytes(n_bytes)} free, and {format_bytes(free)} are: free space on the disk"
        _copy(source, copy)
        if _is_whole(copy, manifest):
            return ""
        copy.unlink(missing_ok=True)
        return f"version {manifest.info.version} left the ring meanwhile; a newer one follows"

    def _send(self, copy: Path, manifest: SnapshotManifest, raw: bytes, there: Mapping[str, int]) -> None:
        parts: list[tuple[str, int, str]] = []
        prefix = f"{_folder(manifest)}/{manifest.slave_id}-{manifest.stamp.header_xxh3_128[:16]}"
        with copy.open("rb") as file:
            while piece := file.read(PART_BYTES):
                name = f"{prefix}.{len(parts):05d}"
                parts.append((name, len(piece), xxhash.xxh3_128_hexdigest(piece)))
                if there.get(name) == len(piece):
                    continue  # of an upload that was killed
                began_s = time.monotonic()
                self._again(lambda name=name, piece=piece: self._objects.put(name, piece))  # type: ignore[misc]
                self._wait(max(0.0, len(piece) * 8 / self._config.rate - (time.monotonic() - began_s)))
        last = f"{_folder(manifest)}/{manifest.slave_id}{_MANIFEST}"
        self._again(lambda: self._objects.put(last, encode_shard(raw, parts)))

    def _remove_old(self, run_id: str, record: Commit) -> None:
        """Manifests go first, so that what is left of a version is never taken for one."""
        stored = stored_versions(self._again(lambda: self._objects.sizes(run_id)))
        for old in to_remove(stored, self._named_slaves, self._config.kept, record):
            names = sorted(old.objects, key=lambda name: not name.endswith(_MANIFEST))
            self._again(lambda names=names: self._objects.delete(names))  # type: ignore[misc]
            log.info("version %s is removed from %s", old.version, self._objects.url)

    def _named_slaves(self, one: StoredVersion) -> frozenset[str]:
        """The slaves of a version's COMMIT record; one that cannot be, where no object can say."""
        if one.folder not in self._slaves_of and one.slaves:
            slave_id = min(one.slaves)
            try:
                shard = read_shard(self._again(lambda: self._objects.get(one.manifest_of(slave_id))), one, slave_id)
            except (SnapshotError, KeyError):
                return frozenset({""})
            self._slaves_of[one.folder] = frozenset(shard.commit.digests)
        return self._slaves_of.get(one.folder, frozenset({""}))

    def _again(self, call: Callable[[], T]) -> T:
        wait_s = 1.0
        while True:
            try:
                found = call()
            except (RetryLater, ConfigError) as error:
                if self._gives_up:
                    raise
                self._changes.report("store", f"{error}; it is tried again, and the run goes on meanwhile", "WARNING")
                self._wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self._changes.report("store", "", "INFO")
                return found

    def look_for_ever(self, paths: Sequence[Path]) -> None:
        """Send what is due, until the process is ended. A disk that fails is looked at again."""
        while True:
            for directory in slave_directories(paths):
                try:
                    self.look(directory)
                except OSError as error:
                    self._changes.report(f"disk {directory}", f"{directory} is not copied: {error}", "WARNING")
            self._wait(LOOK_S)

    def send_newest(self, paths: Sequence[Path]) -> Version:
        """Send the newest version that all the directories hold. Raises ConfigError where there is none."""
        directories = slave_directories(paths)
        common = set.intersection(*({*committed(directory)} for directory in directories)) if directories else set()
        if not common:
            raise ConfigError(f"no version is on all slaves of {', '.join(map(str, paths))}: see `dips status`")
        for directory in directories:
            self.look(directory, max(common))
        if any(sent != max(common) for sent in self._sent.values()):
            raise ConfigError(f"version {max(common)} could not be copied to {self._objects.url}: the log says why")
        return max(common)


def committed(directory: Path) -> dict[Version, tuple[str, SnapshotManifest, bytes]]:
    """Version -> name of the file, manifest, the manifest's bytes, as they are at this moment."""
    found: dict[Version, tuple[str, SnapshotManifest, bytes]] = {}
    for path in directory.glob("manifest-*.json"):
        try:
            raw = path.read_bytes()
            manifest = decode(raw, str(path))
        except (OSError, SnapshotError):
            continue  # it leaves the ring at this moment, or the slave itself reports it
        found[manifest.info.version] = (manifest.file, manifest, raw)
    return found


def slave_directories(paths: Iterable[Path]) -> list[Path]:
    """Slaves' directories: those that are named, and all of a run's directory."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("slaves/*")) if (path / "slaves").is_dir() else [path]
    return [path for path in found if path.is_dir()]


def _copy(source: Path, copy: Path) -> None:
    """Copy a file's bytes; dirty pages do not pile up, and leave the page cache. Neither a link nor shared extents: the
    ring writes in place, into room that it has reserved."""
    copy.unlink(missing_ok=True)
    with source.open("rb") as file:
        into = closed(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            at = 0
            while piece := memoryview(file.read(COPY_BYTES)):
                while piece:
                    piece = piece[os.write(into, piece) :]
                begin_writing(into, at, COPY_BYTES)
                for handle, start in ((into, max(0, at - COPY_BYTES)), (file.fileno(), at)):
                    os.posix_fadvise(handle, start, COPY_BYTES, os.POSIX_FADV_DONTNEED)
                at += COPY_BYTES
        finally:
            os.close(into)


def _is_whole(copy: Path, manifest: SnapshotManifest) -> bool:
    try:
        with copy.open("rb") as file:
            head = read_head(file, str(copy))
            if head is None or not manifest.fits(head):
                return False
            read_tensors(file, str(copy), head)
    except (OSError, SnapshotError):
        return False
    return True


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
    commits: list[Commit] = []
    problems: list[str] = []
    for one in reversed(stored):
        shards: dict[str, StoredShard] = {}
        try:
            for slave_id in sorted(one.slaves):
                shards[slave_id] = read_shard(_get(objects, one.manifest_of(slave_id)), one, slave_id)
            if not shards:
                raise SnapshotError("no slave's copy is whole")
            first = shards[min(shards)].commit
            if lacking := first.digests.keys() - shards.keys():
                raise SnapshotError(f"the copy of slave {', '.join(sorted(lacking))} is not there, or not whole")
            if version is None and any(commit.gave_up(one.version) for commit in commits):
                raise SnapshotError("the run has given it up: a rollback went back to an older one")
        except SnapshotError as error:
            problems.append(f"version {one.version}: {error}")
        else:
            if version in (None, one.version):
                newest = max(each.version.timeline for each in stored)
                mine = {slave_id: shards[slave_id] for slave_id in first.digests}
                return Restorable(runs[0], one.version, mine, newest, tuple(problems))
        commits += [shard.commit for shard in list(shards.values())[:1]]
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


def _fetched(objects: Objects, parts: Sequence[tuple[str, int, str]]) -> Iterator[bytes]:
    """The parts in their order, some of them on their way. Raises SnapshotError for one with other bytes."""
    pool, waiting = ThreadPoolExecutor(IN_FLIGHT, "dips-restore"), deque[Future[bytes]]()
    try:
        for index, (name, n_bytes, xxh3) in enumerate(parts):
            while len(waiting) < IN_FLIGHT and index + len(waiting) < len(parts):
                waiting.append(pool.submit(_get, objects, parts[index + len(waiting)][0]))
            data = waiting.popleft().result()
            if len(data) != n_bytes or xxhash.xxh3_128_hexdigest(data) != xxh3:
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


def _get(objects: Objects, name: str) -> bytes:
    try:
        return objects.get(name)
    except KeyError:
        raise SnapshotError(f"{name} is not there") from None
