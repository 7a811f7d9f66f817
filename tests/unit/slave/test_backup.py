"""Copies of snapshots in an object store: whole or not at all, the newest few, and the way back bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from dips.cli import main
from dips.core.errors import ConfigError, RetryLater
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.core.net import object_store
from dips.slave import backup
from dips.slave.backup import Copier, committed, find_restorable, next_stride, restore_slave
from dips.slave.config import BackupConfig
from dips.slave.ring import SnapshotStore
from dips.slave.snapshot_files import decode, encode

N = 3000
SLAVES = ("s0", "s1")


class KilledError(BaseException):
    """The process is dead: nothing may catch it and go on."""


class MemoryObjects:
    """before_put: is called before each put, and may raise."""

    url = "s3://bucket/prefix"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.before_put: Callable[[str], None] = lambda name: None

    def put(self, name: str, data: bytes | Path) -> None:
        assert isinstance(data, bytes)
        self.before_put(name)
        self.puts.append(name)
        self.held[name] = data

    def get(self, name: str, n_bytes: int) -> bytes:
        if len(self.held[name]) != n_bytes:
            raise KeyError(name)
        return self.held[name]

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {name: len(data) for name, data in self.held.items() if name.startswith(f"{prefix}/" if prefix else "")}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.held.pop(name, None)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    monkeypatch.setattr(backup, "PART_BYTES", 8192)
    monkeypatch.setattr(backup, "MOST_MANIFEST_BYTES", 1 << 16)
    return MemoryObjects()


def copier(objects: MemoryObjects, every: int = 2, kept: int = 2) -> Copier:
    return Copier(objects, BackupConfig(to="s3://bucket/prefix", every=every, kept=kept), wait=lambda seconds: None)


def arrays(slave: str, v: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng((v, SLAVES.index(slave)))
    theta, momentum = rng.standard_normal((2, N)).astype(np.float32)
    return theta, momentum, rng.integers(0, 256, 777, np.uint8)


def write(run_dir: Path, v: int, slaves: Iterable[str] = SLAVES, timeline: int = 1, **ledger: object) -> None:
    """Commit a version of both slaves on the disks of some."""
    digests = {slave: f"{v:04x}{i:02x}" for i, slave in enumerate(SLAVES)}
    raw = {"run_id": "mine", "slaves": dict.fromkeys(SLAVES, 1), **ledger}
    record = json.dumps({"digests": digests, "ledger": raw}).encode()
    for slave in slaves:
        digest = bytes.fromhex(digests[slave])
        info = SnapshotInfo(Version(timeline, v), RoundId(1, v + 1), b"l", b"p", digest, committed=False)
        with closing(SnapshotStore(run_dir / "slaves" / slave, "mine", slave, 3)) as store:
            store.scan()
            store.ring.write_shadow(info, *arrays(slave, v))
            store.ring.commit(info, hashlib.sha256(record).digest(), record)


def copied(run_dir: Path, objects: MemoryObjects, versions: Iterable[int], **kept: int) -> None:
    sends = copier(objects, **kept)
    for v in versions:
        write(run_dir, v)
        for slave in SLAVES:
            sends.look(run_dir / "slaves" / slave)


def in_store(objects: MemoryObjects) -> list[int]:
    return [one.version.v for one in backup.stored_versions(objects.sizes()) if one.slaves == {*SLAVES}]


def restored(objects: MemoryObjects, to: Path, version: Version | None = None) -> Version:
    found = find_restorable(objects, "", version)
    assert all(restore_slave(objects, found, slave, to / slave) for slave in SLAVES)
    return found.version


def assert_holds(directory: Path, slave: str, v: int) -> SnapshotInfo:
    theta, momentum, residual = np.empty(N, np.float32), np.empty(N, np.float32), np.empty(777, np.uint8)
    with closing(SnapshotStore(directory, "mine", slave, 3)) as store:
        assert store.scan() == []
        (info,) = [one for one in store.ring.infos() if one.version.v == v]
        assert info.committed
        store.ring.load(info, theta, momentum, residual)
        record, commit_hash = store.ring.record(info.version, info.round)
    assert hashlib.sha256(record).digest() == commit_hash == info.commit_hash
    for found, expected in zip((theta, momentum, residual), arrays(slave, v), strict=True):
        np.testing.assert_array_equal(found, expected)
    return info


def test_each_nth_version_is_copied_the_newest_stay_and_one_is_restored_to_the_bit(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    copied(tmp_path, objects, range(4), every=3)
    (folder,) = {name.rpartition("/")[0] for name in objects.held if "/1.3-" in name}
    own = ["mine/notes.txt", f"{folder}/notes.txt", f"{folder}/...json", "mine/9999999999.1-0123456789abcdef/s0.json"]
    objects.held.update(dict.fromkeys(own, b"a person's own"))
    copied(tmp_path, objects, range(4, 10), every=3)
    assert in_store(objects) == [6, 9]
    assert {*own} <= {*objects.held}, "what has other names is not ours"
    assert not list(tmp_path.glob("slaves/*/backup/*.*"))
    for asked, v in ((None, 9), (Version(1, 6), 6)):
        assert restored(objects, tmp_path / f"to-{v}", asked) == Version(1, v)
        for slave in SLAVES:
            assert assert_holds(tmp_path / f"to-{v}" / slave, slave, v).restored_timeline == 1
    with pytest.raises(ConfigError, match=r"no version to restore .* parts of 1:6, 1:9"):
        find_restorable(objects, "", Version(1, 7))


def test_an_upload_that_was_killed_is_nothing_until_another_process_has_finished_it(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    copied(tmp_path, objects, range(3))
    write(tmp_path, 4)
    copier(objects).look(tmp_path / "slaves" / "s1")
    before = len(objects.puts)

    def dies(name: str) -> None:
        if len(objects.puts) == before + 2:
            raise KilledError

    objects.before_put = dies
    with pytest.raises(KilledError):
        copier(objects).look(tmp_path / "slaves" / "s0")
    assert find_restorable(objects, "", None).version == Version(1, 2)
    objects.before_put = lambda name: None
    for v in range(5, 9):  # it leaves the ring
        write(tmp_path, v)
    sends = copier(objects)
    assert [sends.look(tmp_path / "slaves" / "s0") for _ in range(2)] == [Version(1, 4), Version(1, 8)]
    assert in_store(objects) == [2, 4]
    assert len(set(objects.puts[before:])) == len(objects.puts[before:]), "a part was sent twice"
    assert restored(objects, tmp_path / "to") == Version(1, 4)
    assert_holds(tmp_path / "to" / "s0", "s0", 4)


def first_part(objects: MemoryObjects, slave: str = "s1") -> str:
    return min(name for name in objects.held if "/1.4-" in name and f"/{slave}-" in name)


def manifest(objects: MemoryObjects, slave: str = "s1") -> str:
    return next(name for name in objects.held if "/1.4-" in name and name.endswith(f"/{slave}.json"))


def alter(objects: MemoryObjects, name: str) -> None:
    data = bytearray(objects.held[name])
    data[-5] ^= 1
    objects.held[name] = bytes(data)


def forge(objects: MemoryObjects, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest of s1 says, checksum and all."""
    body = json.loads(objects.held[manifest(objects)])["body"]
    edit(body)
    objects.held[manifest(objects)] = backup.encode_shard(decode(body["manifest"].encode(), ""), body["parts"])


def resealed(body: dict[str, Any], edit: Callable[[SnapshotInfo], SnapshotInfo]) -> None:
    found = decode(body["manifest"].encode(), "")
    body["manifest"] = encode(replace(found, info=edit(found.info))).decode()


def one_large_part(objects: MemoryObjects) -> Callable[[dict[str, Any]], None]:
    """A part that no copier wrote: a restore reads some at a time into memory."""
    name = first_part(objects)
    first, second = objects.held[name], objects.held[name[:-1] + "1"]
    objects.held[name] = first + second

    def edit(body: dict[str, Any]) -> None:
        body["parts"][:2] = [[name, len(first + second), xxhash.xxh3_128_hexdigest(first + second)]]

    return edit


def begun_by_none(body: dict[str, Any]) -> None:
    resealed(body, lambda info: replace(info, round=RoundId(1, -1)))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda objects: objects.held.pop(first_part(objects)), "is not there as it was written"),
        (lambda objects: objects.held.update({first_part(objects): b"short"}), "is not there as it was written"),
        (lambda objects: objects.held.pop(manifest(objects)), "the copy of slave s1 is not there"),
        (lambda objects: alter(objects, manifest(objects)), r"altered|cannot be read"),
        (lambda objects: objects.held.update({manifest(objects): b"{"}), "cannot be read"),
        (lambda objects: objects.held.update({manifest(objects): b"[" * (1 << 16)}), "cannot be read"),
        (lambda objects: objects.held.update({manifest(objects): b" " * (1 << 17)}), "no manifest is that large"),
        (
            lambda objects: objects.held.update({manifest(objects): objects.held[manifest(objects, "s0")]}),
            "not its own",
        ),
        (lambda objects: forge(objects, lambda body: body["parts"][0].__setitem__(1, float("inf"))), "cannot be read"),
        (lambda objects: forge(objects, begun_by_none), "which no master began"),
        (lambda objects: forge(objects, one_large_part(objects)), "is not there as it was written"),
    ],
)
def test_a_torn_or_foreign_copy_is_passed_over_with_a_sentence_and_refused_where_it_is_asked_for(
    damage: Callable[[MemoryObjects], object], says: str, tmp_path: Path, objects: MemoryObjects
) -> None:
    copied(tmp_path, objects, range(5))
    damage(objects)
    found = find_restorable(objects, "mine", None)
    assert found.version == Version(1, 2)
    with pytest.raises(ConfigError, match=says):
        find_restorable(objects, "mine", Version(1, 4))
    assert len(found.passed_over) == 1


def test_an_altered_part_is_refused_and_nothing_of_it_is_a_version(tmp_path: Path, objects: MemoryObjects) -> None:
    copied(tmp_path, objects, range(5))
    alter(objects, first_part(objects))
    found = find_restorable(objects, "", None)
    with pytest.raises(ConfigError, match=r"altered; nothing of it is used: give --version"):
        restore_slave(objects, found, "s1", tmp_path / "to")
    assert committed(tmp_path / "to") == {}
    assert restored(objects, tmp_path / "older", Version(1, 2)) == Version(1, 2)


def test_only_what_all_slaves_sent_and_no_rollback_gave_up_is_restored(tmp_path: Path, objects: MemoryObjects) -> None:
    copied(tmp_path, objects, range(5))
    # A rollback to 1:2 made 2:2. Its copy is of one slave only, and says all the same that 1:4 is given up.
    write(tmp_path, 2, timeline=2, given_up=[[[1, 2], [2, 2]]])
    copier(objects).look(tmp_path / "slaves" / "s0")
    found = find_restorable(objects, "", None)
    assert found.version == Version(1, 2)
    assert [("s1" in said, "given it up" in said) for said in found.passed_over] == [(True, False), (False, True)]
    assert found.newest_timeline == 2, "the restored version's new timeline must be one that was never used"
    assert find_restorable(objects, "", Version(1, 4)).version == Version(1, 4)


def test_a_store_that_is_away_is_asked_again_and_the_rate_is_kept(
    tmp_path: Path, objects: MemoryObjects, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    away = [RetryLater("away")] * 4 + [ConfigError("expired")]

    def fails(name: str) -> None:
        if away:
            write(tmp_path, 2 * (8 - len(away)), ["s0"])  # the run goes on, and the ring with it
            raise away.pop()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if "1:14 of slave s0" in caplog.text or len(waits) > 100:
            raise KilledError

    objects.before_put = fails
    caplog.set_level("INFO")
    write(tmp_path, 4, ["s0"])
    sends = Copier(objects, BackupConfig(to="s3://b", every=2, kept=9, rate="1 Mbit/s"), wait)
    with pytest.raises(KilledError):
        sends.look_for_ever([tmp_path])
    assert waits[:5] == [4.0, 8.0, 16.0, 32.0, 60.0]
    assert [word in caplog.text for word in ("expired", "away", "1:4 of slave s0")] == [True] * 3
    n_bytes = sum(len(data) for name, data in objects.held.items() if not name.endswith(".json"))
    assert sum(waits[5:]) - 2 * backup.LOOK_S == pytest.approx(n_bytes * 8 / 1e6, rel=0.2)


def test_a_copy_that_cannot_be_sent_makes_room_for_the_slave(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(name: str) -> None:
        raise RetryLater("away")

    directory, objects.before_put = tmp_path / "slaves" / "s0", away
    write(tmp_path, 4)
    sends = copier(objects)
    with pytest.raises(RetryLater, match="away"):
        sends.look(directory)
    assert {*committed(directory / "backup")} == {Version(1, 4)}
    monkeypatch.setattr(objects, "sizes", away)
    monkeypatch.setattr(backup, "ROOM_BYTES", 1 << 60)
    with pytest.raises(RetryLater, match="free space on the disk"):
        sends.look(directory)
    assert not list(directory.glob("backup/*.*"))
    monkeypatch.setattr(objects, "sizes", lambda prefix: {})
    with pytest.raises(RetryLater, match="free space on the disk"):
        sends.look(directory)
    assert not list(directory.glob("backup/*.*"))


def test_the_newest_version_of_all_is_sent_also_when_rounds_go_on_meanwhile(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    def goes_on(name: str) -> None:
        objects.before_put = lambda name: None
        for v in range(5, 9):
            write(tmp_path, v)
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} copies \S+s0 just now"):
            copier(objects).look(tmp_path / "slaves" / "s0")

    write(tmp_path, 3)
    objects.before_put = goes_on
    assert copier(objects).send_newest([tmp_path]) == Version(1, 3)
    assert restored(objects, tmp_path / "to") == Version(1, 3)


def test_a_version_that_was_given_up_never_pushes_out_one_that_can_be_restored(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    copied(tmp_path, objects, range(3), kept=1)
    write(tmp_path, 4)
    copier(objects, kept=1).look(tmp_path / "slaves" / "s0")
    write(tmp_path / "back", 3, timeline=2, given_up=[[[1, 3], [2, 3]]])
    # Of a new timeline: at once, since a restore must not use it again.
    assert copier(objects, kept=1).look(tmp_path / "back" / "slaves" / "s0") == Version(2, 3)
    copier(objects, kept=1).look(tmp_path / "slaves" / "s1")  # 1:4 is whole, and of no use
    assert find_restorable(objects, "", None).version == Version(1, 2)


def test_a_version_that_leaves_the_ring_while_it_is_copied_is_not_sent(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, write_one = backup._copy, write

    def overwritten(source: Path, copy: Path) -> None:
        for v in range(5, 9):
            write_one(tmp_path, v, ["s0"])
        whole(source, copy)

    write(tmp_path, 4)
    monkeypatch.setattr(backup, "_copy", overwritten)
    with pytest.raises(RetryLater, match="left the ring"):
        copier(objects).look(tmp_path / "slaves" / "s0")
    assert objects.held == {}
    monkeypatch.undo()
    assert copier(objects).look(tmp_path / "slaves" / "s0") == Version(1, 8)


def test_an_earlier_run_of_the_same_name_is_neither_mixed_with_nor_continued(
    tmp_path: Path, objects: MemoryObjects, caplog: pytest.LogCaptureFixture
) -> None:
    copied(tmp_path / "earlier", objects, range(5))
    names = set(objects.held)
    copied(tmp_path / "later", objects, range(9))
    assert set(objects.held) == names
    assert "holds 1:4 of this slave, newer than its 1:0" in caplog.text


def test_a_directory_keeps_what_it_holds_when_an_older_version_is_restored_into_it(
    tmp_path: Path, objects: MemoryObjects
) -> None:
    copied(tmp_path, objects, range(3))
    for v in range(5, 9):
        write(tmp_path, v)
    directory = tmp_path / "slaves" / "s0"
    held = {*committed(directory)}
    found = find_restorable(objects, "", None)
    assert restore_slave(objects, found, "s0", directory)
    assert {*committed(directory)} == held | {Version(1, 2)}
    assert not restore_slave(objects, found, "s0", directory), "a second time there is nothing to do"
    with pytest.raises(ConfigError, match="belongs to slave 's0'"):
        restore_slave(objects, found, "s1", directory)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_what_a_slow_slave_sends_a_fast_one_sends_too(every: int) -> None:
    """So that some versions become complete, however different the slaves' links are."""
    strides = {next_stride(every, passed) for passed in range(200)}
    assert min(strides) == every
    assert all(slow % fast == 0 for slow in strides for fast in strides if slow >= fast)
    assert all(next_stride(every, passed) >= passed for passed in range(200))


@pytest.mark.parametrize(("url", "says"), [
    ("s3://bucket/x", r"needs obstore: pip install '\.\[store\]'"), ("s3:///x", "names no bucket"),
    ("s3://bucket/x?key=secret", "credentials belong into the environment"), ("file://host/x", "three slashes"),
    ("bucket/x", "no scheme"),
])  # fmt: skip
def test_a_place_that_cannot_be_a_store_is_one_sentence(url: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=says) as told:
        object_store.open_store(url)
    assert "secret" not in str(told.value)


# ---- the commands ----

URL = MemoryObjects.url


def test_the_commands_send_what_all_hold_and_put_it_where_it_belongs(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dips.cli.backup.open_store", lambda url: objects)
    for v in (1, 2):
        write(tmp_path / "run", v)
    assert main.run(["backup", str(tmp_path / "run"), "--to", URL, "--once"]) == 0
    assert "version 1:2 is in" in capsys.readouterr().out
    to, alone = tmp_path / "to", tmp_path / "alone"
    assert main.run(["restore", str(to), "--from", URL]) == 2, "the directory of no run"
    to.mkdir()
    (to / "run.json").write_text("{}")
    for said in ("is restored", "was there already"):
        assert main.run(["restore", str(to), "--from", URL]) == 0
        assert capsys.readouterr().out.count(said) == len(SLAVES)
    for slave in SLAVES:
        assert_holds(to / "slaves" / slave, slave, 2)
    of_one = ["restore", str(alone), "--from", URL, "--slave", "s1", "--run", "mine", "--version", "1:2"]
    assert main.run(of_one) == 0
    assert "on the hosts of s0 the same is needed: --slave NAME --version 1:2" in capsys.readouterr().out
    assert_holds(alone, "s1", 2)
    for other in (["--run", "other"], ["--version", "1:1"], ["--slave", "s7"]):
        assert main.run([*of_one, *other]) == 2
    torn = next(name for name in objects.held if name.endswith("s0.json"))
    del objects.held[torn]
    assert main.run(["restore", str(to), "--from", URL]) == 2


@pytest.mark.parametrize(("answer", "code"), [(None, 0), (RetryLater("away"), 0), (ConfigError("no such bucket"), 2)])
def test_a_copier_begins_in_the_background_of_the_run_unless_its_store_says_that_it_is_wrong(
    tmp_path: Path, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch, answer: Exception | None, code: int
) -> None:
    def sizes(prefix: str) -> dict[str, int]:
        if answer is not None:
            raise answer
        return {}

    def be_nice(more: int) -> int:
        nice.append(nice[-1] + more)
        return nice[-1]

    looks: list[list[Path]] = []
    nice = [5]
    monkeypatch.setattr(objects, "sizes", sizes)
    monkeypatch.setattr("dips.cli.backup.open_store", lambda url: objects)
    monkeypatch.setattr("os.nice", be_nice)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(Copier, "look_for_ever", lambda self, directories: looks.append(directories))
    assert main.run(["backup", str(tmp_path), "--to", URL]) == code
    assert (looks, nice[-1]) == (([[tmp_path]], 19) if code == 0 else ([], 5))
