"""Snapshots on disk: what is whole is used, what is not is skipped and said, and nothing is lost by a full disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave import disk as durable
from dips.slave.ring import SnapshotStore
from dips.slave.snapshot_files import HEADER_BYTES, SnapshotManifest, build_header, decode, encode, file_bytes

N = 3000
RECORD = json.dumps({"tokens": 12, "unit": "ö"}, ensure_ascii=False).encode()


def info(v: int, timeline: int = 1) -> SnapshotInfo:
    return SnapshotInfo(Version(timeline, v), RoundId(timeline, v + 1), b"l", b"p", b"d%d" % v, committed=False)


def arrays(v: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(v)
    return rng.standard_normal(N).astype(np.float32), rng.standard_normal(N).astype(np.float32)


def write(store: SnapshotStore, v: int, commit: bool = True, timeline: int = 1) -> SnapshotInfo:
    what = info(v, timeline)
    store.ring.write_shadow(what, *arrays(v))
    return store.ring.commit(what, b"hash%d" % v, RECORD) if commit else what


def open_store(directory: Path, run: str = "run", slave: str = "s0", kept: int = 3) -> SnapshotStore:
    store = SnapshotStore(directory, run, slave, kept)
    store.scan()
    return store


def made_store(directory: Path, slave: str = "s0", kept: int = 3) -> SnapshotStore:
    store = open_store(directory, slave=slave, kept=kept)
    store.ring.make(N)
    return store


def reopened(directory: Path) -> tuple[tuple[SnapshotInfo, ...], list[str]]:
    with closing(SnapshotStore(directory, "run", "s0", 3)) as store:
        problems = store.scan()
        return store.ring.infos(), problems


def ring_file(directory: Path, slot: int) -> Path:
    return directory / f"ring-{slot}.safetensors"


def manifest_file(directory: Path, slot: int) -> Path:
    return directory / f"manifest-{slot}.json"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with versions 0 and 1."""
    with closing(made_store(tmp_path)) as store:
        for v in (0, 1):
            write(store, v)
    return tmp_path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotStore]:
    with closing(made_store(tmp_path)) as store:
        yield store


def test_a_directory_keeps_the_number_that_was_drawn_for_it_and_another_one_has_another(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "s0")) as store:
        drawn = store.directory_id
    with closing(open_store(tmp_path / "elsewhere")) as store:
        assert store.directory_id != drawn
    with closing(open_store(tmp_path / "s0")) as store:
        assert store.directory_id == drawn
    older = {"run_id": "run", "slave_id": "s0"}
    (tmp_path / "s0" / "identity.json").write_text(json.dumps(older))
    with closing(open_store(tmp_path / "s0")) as store:
        assert len(store.directory_id) == 16, "one that an older release made gets its number now"
        drawn = store.directory_id
    with closing(open_store(tmp_path / "s0")) as store:
        assert store.directory_id == drawn


def test_the_file_is_ordinary_safetensors_and_the_manifest_ordinary_json(store: SnapshotStore) -> None:
    write(store, 4)
    path = ring_file(store.directory, 0)
    tensors = load_file(path)
    assert set(tensors) == {"theta", "momentum"}
    np.testing.assert_array_equal(tensors["theta"], arrays(4)[0])
    body = json.loads(manifest_file(store.directory, 0).read_text())["body"]
    assert body["commit_record"] == RECORD.decode()
    assert (body["version"], body["round"], body["run_id"], body["slave_id"]) == ("1:4", "r1.5", "run", "s0")
    assert (body["file"], body["file_bytes"]) == (path.name, path.stat().st_size)


TEXT_END = 1000
"""Within the header's blanks: its text is shorter than this."""

REGIONS = {
    "length": range(8), "text": range(8, TEXT_END, 37), "blanks": range(TEXT_END, HEADER_BYTES, 500),
    "theta": (HEADER_BYTES, HEADER_BYTES + 4 * N - 1), "momentum": (HEADER_BYTES + 4 * N, HEADER_BYTES + 8 * N - 1),
}  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_anywhere_skips_the_snapshot_and_the_older_one_stands(two: Path, region: str, bit: int) -> None:
    path = ring_file(two, 1)
    whole = path.read_bytes()
    for where in REGIONS[region]:
        data = bytearray(whole)
        data[where] ^= 1 << bit
        path.write_bytes(data)
        infos, (problem,) = reopened(two)
        assert [found.version.v for found in infos] == [0], where
        assert str(path) in problem
    path.write_bytes(whole)
    assert reopened(two)[1] == []


def headed(whole: bytes, n_elems: Any, residual_bytes: int) -> bytes:
    """The length fits, and the checksum of the header."""
    raw, _ = build_header(info(1), n_elems, ("0", "0", "0")[: 3 if residual_bytes else 2], "run", "s0", residual_bytes)
    return bytes(raw) + whole[len(raw) :]


@pytest.mark.parametrize(("damage", "says"), [
    *((lambda whole, n=n: whole[:n], "") for n in (1, 5, 99, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4 * N, -1)),
    *((lambda _, n=n: bytes(n), "") for n in (0, 3, file_bytes(N))),
    # Found by reading: it ended the start of the slave with a stack trace.
    (lambda whole: whole[:8] + b"[" * (HEADER_BYTES - 8) + whole[HEADER_BYTES:], "its header cannot be read"),
    (lambda whole: headed(whole, float(N), 0), "tensors that cannot be"),
    (lambda whole: headed(whole, 2 * N, -8 * N), "tensors that cannot be"),
])  # fmt: skip
def test_a_file_that_is_torn_emptied_or_odd_is_skipped_and_told(
    two: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    path = ring_file(two, 1)
    path.write_bytes(damage(path.read_bytes()))
    infos, (problem,) = reopened(two)
    assert [found.version.v for found in infos] == [0]
    assert says in problem


Change = Callable[[bytes], bytes]


def said_otherwise(change: Callable[[SnapshotManifest], SnapshotManifest]) -> Change:
    return lambda data: encode(change(decode(data, "here")))


def of_info(**changes: Any) -> Change:
    return said_otherwise(lambda said: replace(said, info=replace(said.info, **changes)))


def in_text(change: Callable[[str], str]) -> Change:
    return lambda data: change(data.decode()).encode()


@pytest.mark.parametrize(("damage", "says"), [
    *((in_text(change), "manifest-1.json") for change in (
        lambda text: text.replace('tokens\\": 12', 'tokens\\": 13'), lambda text: "{", lambda text: "",
        lambda text: "[]", lambda text: text[:-40], lambda text: text.replace("dips-manifest-2", "dips-manifest-9"),
        lambda text: "[" * 4000,
    )),
    *((of_info(restored_timeline=timeline), "is no timeline") for timeline in (-1, 1 << 64, float("inf"), "1")),
    *((said_otherwise(change), "names another file") for change in (
        lambda said: replace(said, run_id="another"), lambda said: replace(said, slave_id="s1"),
        lambda said: replace(said, file="ring-2.safetensors"),
        lambda said: replace(said, stamp=replace(said.stamp, n_bytes=said.stamp.n_bytes + 8)),
        lambda said: replace(said, stamp=replace(said.stamp, header_xxh3_128=32 * "0")),
        lambda said: replace(said, file_version=Version(2, 1)),
        lambda said: replace(said, file_round=RoundId(1, 9)),
    )),
    *((of_info(**{name: b"other"}), "names another file") for name in ("layout_hash", "placement_hash", "digest")),
])  # fmt: skip
def test_a_damaged_manifest_or_one_of_another_file_leaves_a_shadow_and_a_sentence(
    two: Path, damage: Change, says: str
) -> None:
    path = manifest_file(two, 1)
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    infos, (problem,) = reopened(two)
    assert [(found.version.v, found.committed) for found in infos] == [(1, False), (0, True)]
    assert says in problem


def test_a_copy_of_a_snapshot_counts_once(two: Path) -> None:
    ring_file(two, 2).write_bytes(ring_file(two, 0).read_bytes())
    infos, problems = reopened(two)
    assert [(found.version.v, found.committed) for found in infos] == [(1, True), (0, True)]
    assert "the same version" in problems[0]


def test_a_manifest_without_a_file_is_said(two: Path) -> None:
    ring_file(two, 1).unlink()
    infos, problems = reopened(two)
    assert [found.version.v for found in infos] == [0]
    assert "not there" in problems[0]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-manifest-1.json").write_bytes(b"half")
    assert reopened(tmp_path) == ((), [])
    assert not list(tmp_path.glob(".tmp-*"))


def test_files_of_another_slave_in_the_directory_are_skipped_and_their_room_used(tmp_path: Path) -> None:
    with closing(made_store(tmp_path / "a", slave="s1")) as other:
        write(other, 0)
    made_store(tmp_path / "b").close()
    for path in (ring_file(tmp_path / "a", 0), manifest_file(tmp_path / "a", 0)):
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    infos, problems = reopened(tmp_path / "b")
    assert infos == ()
    assert "belongs to slave 's1'" in problems[0]
    with closing(made_store(tmp_path / "b")) as store:
        mine = write(store, 7)
    assert reopened(tmp_path / "b") == ((mine,), [])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".json"))


def test_the_ring_is_made_at_once_at_full_size_and_never_grows(store: SnapshotStore) -> None:
    sizes = {path: path.stat() for path in store.directory.glob("ring-*")}
    assert len(sizes) == 4
    assert {status.st_size for status in sizes.values()} == {file_bytes(N)}
    assert all(status.st_blocks * 512 >= file_bytes(N) for status in sizes.values())
    for v in range(9):
        store.ring.tidy(write(store, v))
    assert {path: path.stat().st_ino for path in store.directory.glob("ring-*")} == {
        path: status.st_ino for path, status in sizes.items()
    }
    assert [found.version.v for found in store.ring.infos()] == [8, 7, 6, 5]


def test_the_current_one_stays_even_if_it_is_not_the_newest(tmp_path: Path) -> None:
    with closing(made_store(tmp_path, kept=2)) as store:
        for v in (7, 8, 9):
            write(store, v)
        older = next(found for found in store.ring.infos() if found.version.v == 7)
        store.ring.load(older, np.empty(N, np.float32), np.empty(N, np.float32))
        for v in (10, 11):
            write(store, v, commit=False)
            store.ring.drop_shadow(info(v))
        assert [found.version.v for found in store.ring.infos()] == [9, 7]
        for v in (12, 13):
            assert store.ring.tidy(write(store, v)) == []
        assert [found.version.v for found in store.ring.infos()] == [13, 12, 9]


def test_a_file_of_an_open_round_is_not_overwritten(tmp_path: Path) -> None:
    """A late save of durability async must not take the shadow's file; it waits for the round to end."""
    with closing(made_store(tmp_path, kept=2)) as store:
        for v in (0, 1):
            write(store, v)
        shadow = write(store, 2, commit=False)
        with pytest.raises(Refused, match="shadow of an open round") as caught:
            store.ring.write_shadow(info(9), *arrays(9))
        assert caught.value.retry_after_s > 0
        assert shadow in store.ring.infos()
        store.ring.drop_shadow(shadow)
        store.ring.write_shadow(info(9), *arrays(9))


def test_a_shadow_that_is_written_again_takes_its_own_file(store: SnapshotStore) -> None:
    committed = write(store, 0)
    for _ in range(2):
        shadow = write(store, 1, commit=False)
        store.ring.close_round()
        assert store.ring.infos() == (shadow, committed)


def test_fewer_snapshots_kept_give_the_room_back_when_nothing_kept_stands_there(tmp_path: Path) -> None:
    with closing(made_store(tmp_path, kept=4)) as store:
        for v in range(5):
            write(store, v)
    with closing(made_store(tmp_path, kept=2)) as store:
        newest = store.ring.infos()[0]
        assert len(store.ring.infos()) == 5
        assert store.ring.tidy(newest) == []
        assert [found.version.v for found in store.ring.infos()] == [4, 3, 2, 1, 0]
        for v in (5, 6):
            store.ring.tidy(write(store, v))
    assert [name for name in names(tmp_path) if name.startswith("ring")] == [
        f"ring-{slot}.safetensors" for slot in range(3)
    ]


def test_dropping_a_shadow_frees_its_file_and_never_a_committed_one(store: SnapshotStore) -> None:
    committed = write(store, 0)
    shadow = write(store, 1, commit=False)
    store.ring.drop_shadow(shadow)
    store.ring.drop_shadow(shadow)
    store.ring.drop_shadow(committed)
    assert store.ring.infos() == (committed,)


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_shows_when_the_ring_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_store(tmp_path)) as store:
        real, calls = os.posix_fallocate, []

        def full_at_the_third(handle: int, offset: int, n_bytes: int) -> None:
            calls.append(n_bytes)
            if len(calls) == 3:
                no_space()
            real(handle, offset, n_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full_at_the_third)
            with pytest.raises(Refused) as caught:
                store.ring.make(N)
        sentence = caught.value.sentence
        assert caught.value.code is RefusalCode.DISK
        assert f"{4 * file_bytes(N)} bytes are needed" in sentence
        assert str(ring_file(tmp_path, 0)) in sentence
        assert "are free: free space on the slave's disk, lower its snapshots_kept" in sentence
        assert not list(tmp_path.glob("ring-*")), "half a ring would hold what the operator is asked to free"
        store.ring.make(N)
        write(store, 0)


def test_a_manifest_that_cannot_be_removed_is_said_and_undoes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(made_store(tmp_path)) as store:
        for v in range(3):
            write(store, v)
        newest = store.ring.infos()[0]

        def stuck(self: durable.LocalDisk, name: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(durable.LocalDisk, "remove", stuck)
        (problem, _) = store.ring.forget_lost(Version(1, 0), Version(2, 0))
        assert "cannot be removed: Input/output error" in problem
        assert store.ring.infos()[0] == newest


def test_a_snapshot_that_changed_after_it_was_verified_is_not_loaded(store: SnapshotStore) -> None:
    committed = write(store, 0)
    other = ring_file(store.directory, 0).read_bytes()
    store.ring.drop_shadow(committed)
    second = write(store, 1)
    ring_file(store.directory, 1).write_bytes(other)
    with pytest.raises(Refused, match="changed since it was verified") as caught:
        store.ring.load(second, np.empty(N, np.float32), np.empty(N, np.float32))
    assert caught.value.code is RefusalCode.DISK
    assert store.ring.infos() == (committed,)


def test_a_snapshot_of_other_blocks_does_not_fit(store: SnapshotStore) -> None:
    committed = write(store, 0)
    with pytest.raises(Refused, match="this slave's blocks have"):
        store.ring.load(committed, np.empty(N + 1, np.float32), np.empty(N + 1, np.float32))


def test_a_record_that_is_not_text_is_refused(store: SnapshotStore) -> None:
    shadow = write(store, 0, commit=False)
    with pytest.raises(Refused, match="not text") as caught:
        store.ring.commit(shadow, b"h", b"\xff")
    assert caught.value.code is RefusalCode.MALFORMED


def test_a_promise_is_durable_and_never_sinks(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        assert store.promise.epoch == 0
        store.promise.save(5)
        store.promise.save(4)
    with closing(open_store(tmp_path)) as store:
        assert store.promise.epoch == 5
    file = tmp_path / "promise.json"
    file.write_text(file.read_text().replace("5", "6", 1))
    with pytest.raises(ConfigError, match="not written by a slave"):
        open_store(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[" * 4000, '{"promised_epoch": "5"}', '{"promised_epoch": -1}'])
def test_a_damaged_promise_is_never_guessed(tmp_path: Path, text: str) -> None:
    open_store(tmp_path).close()
    (tmp_path / "promise.json").write_text(text)
    with pytest.raises(ConfigError, match="empty directory"):
        open_store(tmp_path)


@pytest.mark.parametrize(("run", "slave"), [("other", "s0"), ("run", "s1")])
def test_the_directory_of_another_run_or_slave_is_refused(tmp_path: Path, run: str, slave: str) -> None:
    open_store(tmp_path).close()
    with pytest.raises(ConfigError, match=r"belongs to slave 's0' of run 'run'.*another directory"):
        open_store(tmp_path, run, slave)


def test_two_slaves_never_share_a_directory(store: SnapshotStore) -> None:
    with pytest.raises(ConfigError, match="another slave uses"):
        open_store(store.directory)


def test_the_directory_of_an_older_release_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "v000001-0000000003-r000001-0000000004.safetensors").write_bytes(b"old")
    with pytest.raises(ConfigError, match=r"snapshot of an older release.*another directory"):
        open_store(tmp_path)


@pytest.mark.parametrize("opened", [False, True], ids=["at the start", "later"])
def test_a_directory_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    def unreadable(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with ExitStack() as stack:
        store = stack.enter_context(closing(SnapshotStore(tmp_path, "run", "s0", 3))) if opened else None
        monkeypatch.setattr(os, "listdir", unreadable)
        with pytest.raises(ConfigError, match=r"cannot be read: Permission denied; make it readable"):
            open_store(tmp_path) if store is None else store.scan()
