"""Snapshots on disk: what is whole is used, what is not is skipped and said, and nothing is lost by a full disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.messages import SnapshotInfo
from dips.slave.snapshots import SnapshotStore

N = 3000
RECORD = json.dumps({"tokens": 12, "unit": "ö"}, ensure_ascii=False).encode()


def info(v: int, timeline: int = 1) -> SnapshotInfo:
    return SnapshotInfo(Version(timeline, v), RoundId(timeline, v + 1), b"l", b"p", b"d%d" % v, committed=False)


def arrays(v: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(v)
    return rng.standard_normal(N).astype(np.float32), rng.standard_normal(N).astype(np.float32)


def write(store: SnapshotStore, v: int, commit: bool = True, timeline: int = 1) -> SnapshotInfo:
    what = info(v, timeline)
    store.write_shadow(what, *arrays(v))
    return store.commit(what, b"hash%d" % v, RECORD) if commit else what


def open_store(directory: Path, run: str = "run", slave: str = "s0", kept: int = 3) -> SnapshotStore:
    return SnapshotStore(directory, run, slave, kept)


def reopened(directory: Path) -> tuple[tuple[SnapshotInfo, ...], list[str]]:
    """What a start finds, and what it complains of."""
    with closing(open_store(directory)) as store:
        problems = store.scan()
        return store.infos(), problems


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotStore]:
    with closing(open_store(tmp_path)) as store:
        yield store


def test_a_committed_snapshot_comes_back_to_the_bit(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        committed = write(store, 0)
        assert committed == replace(info(0), committed=True, commit_hash=b"hash0")
    with closing(open_store(tmp_path)) as store:
        assert store.scan() == []
        assert store.infos() == (committed,)
        theta, momentum = np.empty(N, np.float32), np.empty(N, np.float32)
        store.load(committed, theta, momentum)
        np.testing.assert_array_equal(theta, arrays(0)[0])
        np.testing.assert_array_equal(momentum, arrays(0)[1])


def test_the_file_is_ordinary_safetensors_and_the_manifest_ordinary_json(store: SnapshotStore) -> None:
    write(store, 4)
    (path,) = store.directory.glob("*.safetensors")
    tensors = load_file(path)
    assert set(tensors) == {"theta", "momentum"}
    np.testing.assert_array_equal(tensors["theta"], arrays(4)[0])
    body = json.loads(path.with_suffix(".json").read_text())["body"]
    assert body["commit_record"] == RECORD.decode()
    assert (body["version"], body["round"], body["run_id"], body["slave_id"]) == ("1:4", "r1.5", "run", "s0")
    assert body["file_bytes"] == path.stat().st_size


def test_an_empty_shard_is_a_snapshot_too(store: SnapshotStore) -> None:
    nothing = np.empty(0, np.float32)
    store.write_shadow(info(0), nothing, nothing)
    committed = store.commit(info(0), b"h", b"{}")
    assert store.scan() == []
    store.load(committed, nothing, nothing)


def test_a_shadow_comes_back_as_a_shadow(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        write(store, 0)
        write(store, 1, commit=False)
    infos, problems = reopened(tmp_path)
    assert [(found.version.v, found.committed) for found in infos] == [(1, False), (0, True)]
    assert problems == []


def test_a_snapshot_without_its_manifest_is_only_a_shadow(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        write(store, 0)
    (manifest,) = tmp_path.glob("v*.json")
    manifest.unlink()
    infos, _ = reopened(tmp_path)
    assert [found.committed for found in infos] == [False]


@pytest.mark.parametrize("where", [3, 200, 5000, -1])
def test_a_flipped_bit_anywhere_skips_the_snapshot_and_the_older_one_stands(tmp_path: Path, where: int) -> None:
    with closing(open_store(tmp_path)) as store:
        for v in (0, 1):
            write(store, v)
    path = max(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    infos, problems = reopened(tmp_path)
    assert [found.version.v for found in infos] == [0]
    assert len(problems) == 1
    assert str(path) in problems[0]


@pytest.mark.parametrize("length", [0, 5, 100, 4000, -1])
def test_a_torn_file_is_skipped(tmp_path: Path, length: int) -> None:
    with closing(open_store(tmp_path)) as store:
        for v in (0, 1):
            write(store, v)
    path = max(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:length])
    infos, problems = reopened(tmp_path)
    assert [found.version.v for found in infos] == [0]
    assert "snapshot skipped" in problems[0]


def test_a_header_that_claims_a_huge_length_is_refused_without_allocating(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        write(store, 0)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    assert reopened(tmp_path)[0] == ()


def test_an_altered_or_unreadable_manifest_skips_the_snapshot(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        for v in (0, 1, 2):
            write(store, v)
    oldest, middle, newest = sorted(tmp_path.glob("v*.json"))
    newest.write_text(newest.read_text().replace('tokens\\": 12', 'tokens\\": 13'))
    middle.write_text("{")
    infos, problems = reopened(tmp_path)
    assert [found.version.v for found in infos] == [0]
    assert len(problems) == 2
    assert oldest.exists()


def test_a_manifest_of_another_file_is_not_believed(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        for v in (0, 1):
            write(store, v)
    older, newer = sorted(tmp_path.glob("v*.json"))
    newer.write_bytes(older.read_bytes())
    infos, problems = reopened(tmp_path)
    assert [found.version.v for found in infos] == [0]
    assert "names another file" in problems[0]


def test_a_renamed_snapshot_is_not_believed(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        write(store, 0)
    for path in tmp_path.glob("v*"):
        path.rename(path.with_name(path.name.replace("0000000000", "0000000009", 1)))
    infos, problems = reopened(tmp_path)
    assert infos == ()
    assert "its name was changed" in problems[0]


def test_a_manifest_without_a_file_is_said(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        write(store, 0)
    (path,) = tmp_path.glob("*.safetensors")
    path.unlink()
    infos, problems = reopened(tmp_path)
    assert infos == ()
    assert "not there" in problems[0]


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-v1.safetensors").write_bytes(b"half")
    assert reopened(tmp_path) == ((), [])
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_newest_committed_ones_stay_and_orphan_shadows_go(store: SnapshotStore) -> None:
    for v in range(5):
        current = write(store, v)
        write(store, 90 + v, commit=False)
        assert store.tidy(current) == []
    assert [found.version.v for found in store.infos()] == [4, 3, 2]
    names = {path.suffix: 0 for path in store.directory.glob("v*")}
    for path in store.directory.glob("v*"):
        names[path.suffix] += 1
    assert names == {".safetensors": 3, ".json": 3}


def test_the_current_one_stays_even_if_it_is_not_the_newest(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, kept=1)) as store:
        write(store, 9)
        current = write(store, 2)
        store.tidy(current)
        assert store.infos() == (current,)


def test_a_delete_that_fails_is_said_and_undoes_nothing(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for v in range(4):
        current = write(store, v)

    def fail(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "unlink", fail)
    assert "cannot be deleted: Input/output error" in store.tidy(current)[0]
    assert len(store.infos()) == 4


def test_dropping_a_shadow_deletes_it_and_never_a_committed_one(store: SnapshotStore) -> None:
    committed = write(store, 0)
    shadow = write(store, 1, commit=False)
    store.drop_shadow(shadow)
    store.drop_shadow(shadow)
    store.drop_shadow(committed)
    assert store.infos() == (committed,)
    assert len(list(store.directory.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failing_disk_is_a_refusal_with_path_and_reason_and_leaves_no_file(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first = write(store, 0)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(Refused, match=r"safetensors.*No space left on device.*free space") as caught:
            store.write_shadow(info(1), *arrays(1))
    assert caught.value.code is RefusalCode.DISK
    assert caught.value.retry_after_s > 0
    assert store.infos() == (first,)
    assert len(list(store.directory.glob("*.safetensors"))) == 1
    assert not list(store.directory.glob(".tmp-*"))
    write(store, 1)


def test_a_failing_disk_at_commit_leaves_the_shadow(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = write(store, 0, commit=False)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Refused, match="Input/output error"):
            store.commit(shadow, b"h", b"{}")
    assert store.infos() == (shadow,)
    assert store.commit(shadow, b"h", b"{}").committed


def test_a_real_file_size_limit_is_survived(tmp_path: Path) -> None:
    """The kernel itself says no: EFBIG in the middle of the file."""
    program = (
        "import resource, signal, sys, numpy as np; from pathlib import Path\n"
        "from dips.core.errors import Refused; from dips.core.ids import RoundId, Version\n"
        "from dips.core.messages import SnapshotInfo; from dips.slave.snapshots import SnapshotStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = SnapshotStore(Path(sys.argv[1]), 'run', 's0', 3)\n"
        "info = SnapshotInfo(Version(1, 0), RoundId(1, 1), b'l', b'p', b'd', False)\n"
        "big = np.zeros(100_000, np.float32)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "try: store.write_shadow(info, big, big)\n"
        "except Refused as refused: print(refused.code.name, refused.sentence)\n"
        "small = np.zeros(100, np.float32); store.write_shadow(info, small, small); print(len(store.infos()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("DISK ")
    assert "File too large" in first
    assert second == "1"


def test_a_snapshot_that_changed_after_it_was_verified_is_not_loaded(store: SnapshotStore) -> None:
    committed = write(store, 0)
    (path,) = store.directory.glob("*.safetensors")
    other = path.read_bytes()
    store.write_shadow(replace(info(0), digest=b"x"), *arrays(7))
    committed = store.commit(info(0), b"h", b"{}")
    path.write_bytes(other)
    with pytest.raises(Refused, match="changed since it was verified") as caught:
        store.load(committed, np.empty(N, np.float32), np.empty(N, np.float32))
    assert caught.value.code is RefusalCode.DISK
    assert store.infos() == ()


def test_a_snapshot_of_other_blocks_does_not_fit(store: SnapshotStore) -> None:
    committed = write(store, 0)
    with pytest.raises(Refused, match="this slave's blocks have"):
        store.load(committed, np.empty(N + 1, np.float32), np.empty(N + 1, np.float32))


def test_a_record_that_is_not_text_is_refused(store: SnapshotStore) -> None:
    shadow = write(store, 0, commit=False)
    with pytest.raises(Refused, match="not text") as caught:
        store.commit(shadow, b"h", b"\xff")
    assert caught.value.code is RefusalCode.MALFORMED


def test_a_promise_is_durable_and_never_sinks(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        assert store.promised_epoch == 0
        store.save_promise(5)
        store.save_promise(4)
    with closing(open_store(tmp_path)) as store:
        assert store.promised_epoch == 5


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"promised_epoch": "5"}', '{"promised_epoch": -1}'])
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


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(tmp_path / "file" / "below")


def test_files_of_another_slave_in_the_directory_are_skipped(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "a", slave="s1")) as store:
        write(store, 0)
    open_store(tmp_path / "b").close()
    for path in (tmp_path / "a").glob("v*"):
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    infos, problems = reopened(tmp_path / "b")
    assert infos == ()
    assert "belongs to slave 's1'" in problems[0]
