"""A directory of checkpoints: whole or not there, whatever dies, tears or flips."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoints import newest_of

from dips.core import files
from dips.core.errors import ConfigError
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.worker import checkpoint_files
from dips.worker.checkpoint import PushRecorder
from dips.worker.state.effects import Delayed, Done, Event, Failed, PushRecord
from dips.worker.state.work import Work


def tensors(value: int) -> dict[str, checkpoint_files.RawTensor]:
    theta = np.full(1000, value, np.float32)
    return {
        "theta": checkpoint_files.RawTensor("F32", (10, 100), theta.view(np.uint8)),
        "state.mask": checkpoint_files.RawTensor("BOOL", (3,), np.array([1, 0, 1], np.uint8)),
        "state.none": checkpoint_files.RawTensor("I64", (0,), np.empty(0, np.uint8)),
    }


def record(seq: int) -> PushRecord:
    return PushRecord(PushId(ClusterId("a"), Incarnation(1, 1), seq), Version(1, seq), seq, Work(tokens=seq))


def write(store: checkpoint_files.CheckpointStore, value: int) -> None:
    store.write({"value": value}, tensors(value))


def value_of(store: checkpoint_files.CheckpointStore) -> int | None:
    found, _ = newest_of(store)
    if found is None:
        return None
    value = int(found.content["value"])
    assert found.tensors["theta"].data.tobytes() == tensors(value)["theta"].data.tobytes()
    assert {name: (raw.dtype, raw.shape) for name, raw in found.tensors.items()} == {
        "theta": ("F32", (10, 100)), "mask": ("BOOL", (3,)), "none": ("I64", (0,)),
    }  # fmt: skip
    return value


@pytest.fixture(autouse=True)
def _flushes_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are for is shown by DyingSystem, which tears what was not flushed."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[checkpoint_files.CheckpointStore]:
    with checkpoint_files.CheckpointStore(tmp_path / "a", kept=2) as made:
        yield made


def test_the_newest_is_found_and_only_so_many_stay(store: checkpoint_files.CheckpointStore) -> None:
    assert newest_of(store) == (None, [])
    for value in range(1, 5):
        write(store, value)
        assert value_of(store) == value
    assert store.numbers() == [3, 4]
    assert sorted(path.suffix for path in store.directory.glob("checkpoint-*")) == [".json"] * 2 + [".safetensors"] * 2


def test_any_safetensors_reader_opens_the_tensors(store: checkpoint_files.CheckpointStore) -> None:
    write(store, 7)
    (path,) = store.directory.glob("*.safetensors")
    loaded = load_file(path)
    assert np.array_equal(loaded["theta"], np.full((10, 100), 7, np.float32))
    assert loaded["state.mask"].tolist() == [True, False, True]


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_a_single_bit_that_changed_is_found(store: checkpoint_files.CheckpointStore, kind: str) -> None:
    write(store, 1)
    path, rng = store.directory / f"checkpoint-00000001.{kind}", random.Random(kind)
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        found, sentences = newest_of(store)
        assert found is None, (at, bit)
        assert "cannot be used" in sentences[0]


def _tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize(
    "damage", [_tear, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(bytes(path.stat().st_size))]
)
def test_a_damaged_one_falls_back_to_the_one_before_and_says_so(
    store: checkpoint_files.CheckpointStore, kind: str, damage: Callable[[Path], None]
) -> None:
    write(store, 1)
    write(store, 2)
    damage(store.directory / f"checkpoint-00000002.{kind}")
    found, sentences = newest_of(store)
    assert found is not None
    assert found.content == {"value": 1}
    assert len(sentences) == 1
    assert sentences[0].startswith(f"checkpoint 2 in {store.directory} cannot be used: ")
    damage(store.directory / f"checkpoint-00000001.{kind}")
    assert newest_of(store)[0] is None
    assert len(newest_of(store)[1]) == 2


def test_missing_tensors_are_noticed(store: checkpoint_files.CheckpointStore) -> None:
    write(store, 1)
    (store.directory / "checkpoint-00000001.safetensors").unlink()
    found, sentences = newest_of(store)
    assert found is None
    assert "cannot be read" in sentences[0]


def test_another_format_is_not_guessed_at(store: checkpoint_files.CheckpointStore) -> None:
    body = {"format": "dips-checkpoint-9", "content": {}}
    checkpoint_files.write_record(store.directory / "checkpoint-00000001.json", body)
    assert "'dips-checkpoint-9'" in newest_of(store)[1][0]


def test_a_header_that_speaks_of_too_much_allocates_nothing(tmp_path: Path) -> None:
    stamp = checkpoint_files.write_tensors(tmp_path / "x", tensors(1))
    content = (tmp_path / "x").read_bytes()
    huge = content.replace(b"[10,100]", b"[10,999]")
    (tmp_path / "x").write_bytes(huge)
    with pytest.raises(checkpoint_files.CheckpointError, match="its header says"):
        checkpoint_files.places_of(tmp_path / "x", stamp.n_bytes)


@pytest.mark.parametrize("says", [0, 1, 1 << 20, 1 << 62])
def test_a_length_of_a_header_that_cannot_be_is_found_before_it_is_read(tmp_path: Path, says: int) -> None:
    (tmp_path / "x").write_bytes(says.to_bytes(8, "little") + b"{}")
    with pytest.raises(checkpoint_files.CheckpointError, match="does not begin as a file of tensors does"):
        checkpoint_files.places_of(tmp_path / "x", 10)


@pytest.mark.parametrize("header", ["[" * 4000, '{"theta":{"dtype":"F32","shape":[Infinity]}}'])
def test_a_header_of_any_bytes_is_a_damaged_checkpoint_and_no_other_error(tmp_path: Path, header: str) -> None:
    """Found by reading: these two ended the new process, where the checkpoint before was whole."""
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(checkpoint_files.CheckpointError, match="its header cannot be read"):
        checkpoint_files.places_of(tmp_path / "x", 8 + len(header))


def test_a_damaged_push_record_is_said_and_not_used(store: checkpoint_files.CheckpointStore) -> None:
    store.record_push(record(1))
    content = bytearray((store.directory / "push.json").read_bytes())
    content[len(content) // 2] ^= 4
    (store.directory / "push.json").write_bytes(content)
    found, sentence = store.newest_push()
    assert found is None
    assert "cannot be used" in sentence


class Dead(BaseException):
    """The process is gone: nothing after this happens."""


class DyingSystem:
    """Stands for the module `os` in core/files.py; dies at the given step. A step may be done half before that.

    `power`: the machine loses power, not only the process: what was written and not flushed is torn.
    """

    def __init__(self, steps_left: int, power: bool) -> None:
        self.steps_left = steps_left
        self.power = power
        self.steps = 0
        self._unflushed: dict[int, Path] = {}

    def _step(self) -> None:
        if self.steps == self.steps_left:
            if self.power:
                for path in self._unflushed.values():
                    _tear(path)
            raise Dead
        self.steps += 1

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        self._step()
        handle = os.open(path, flags, mode)
        if flags & os.O_WRONLY:
            self._unflushed[handle] = Path(path)
        return handle

    def write(self, handle: int, piece: memoryview) -> int:
        self._step()
        return os.write(handle, piece[: max(1, 9 * len(piece) // 10)])

    def fsync(self, handle: int) -> None:
        self._step()
        os.fsync(handle)
        self._unflushed.pop(handle, None)

    def replace(self, one: Path, two: Path) -> None:
        self._step()
        assert one not in self._unflushed.values(), "renamed before it is durable"
        os.replace(one, two)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


Act = Callable[[checkpoint_files.CheckpointStore], None]


def deaths(folder: Path, monkeypatch: pytest.MonkeyPatch, act: Act, power: bool) -> Iterator[Path]:
    """The folder of a store that held 1 and 2 after `act` died after no step, one, two and so on, and after all."""
    with checkpoint_files.CheckpointStore(folder / "template", kept=2) as made:
        write(made, 1)
        write(made, 2)
        made.record_push(record(1))
    for steps in range(1000):
        shutil.copytree(folder / "template", folder / str(steps))
        died = False
        with checkpoint_files.CheckpointStore(folder / str(steps), kept=2) as before, monkeypatch.context() as patch:
            patch.setattr(files, "os", DyingSystem(steps, power))
            try:
                act(before)
            except Dead:
                died = True
        yield folder / str(steps)
        if not died:
            break


@pytest.mark.parametrize("power", [False, True])
def test_death_between_any_two_steps_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool
) -> None:
    seen: list[int | None] = []
    for folder in deaths(tmp_path, monkeypatch, lambda store: write(store, 3), power):
        with checkpoint_files.CheckpointStore(folder, kept=2) as after:
            seen.append(value_of(after))
            assert not list(folder.glob(".tmp-*")), "what was half written is cleaned away"
            assert len(list(folder.glob("*.safetensors"))) == len(after.numbers()), "and tensors without a manifest"
            write(after, 4)
            assert value_of(after) == 4
    assert len(seen) > 10
    assert set(seen) == {2, 3}


def write_as_ranks(store: checkpoint_files.CheckpointStore) -> None:
    number = store.begin_folder()
    folder = checkpoint_files.folder_of_ranks(store.directory, number)
    stamps = [checkpoint_files.write_tensors(folder / f"__{rank}_0.distcp", tensors(rank)) for rank in range(2)]
    store.commit_folder(number, {"value": number}, [stamp.n_bytes for stamp in stamps])


@pytest.mark.parametrize("power", [False, True])
def test_death_between_any_two_steps_of_several_ranks_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool
) -> None:
    seen: list[int] = []
    for folder in deaths(tmp_path, monkeypatch, write_as_ranks, power):
        with checkpoint_files.CheckpointStore(folder, kept=2) as after:
            newest = next(iter(after.manifests()))
            assert isinstance(newest, checkpoint_files.Manifest)
            folders = [checkpoint_files.folder_of_ranks(folder, 3)] if newest.number == 3 else []
            assert list(folder.glob("*.ranks")) == folders, "a folder without a manifest is cleaned away"
            assert all(len(list(each.glob("__*.distcp"))) == 2 for each in folders)
            if newest.number == 2:
                assert value_of(after) == 2
            write_as_ranks(after)
            write_as_ranks(after)
            assert [
                each.number for each in after.manifests() if isinstance(each, checkpoint_files.Manifest)
            ] == after.numbers()[::-1]
            assert len(list(folder.glob("*.ranks"))) == 2, "no more than are kept"
        seen.append(newest.number)
    assert len(seen) > 10
    assert set(seen) == {2, 3}


@pytest.mark.parametrize("power", [False, True])
def test_death_while_a_push_is_written_down_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool
) -> None:
    for folder in deaths(tmp_path, monkeypatch, lambda store: store.record_push(record(2)), power):
        with checkpoint_files.CheckpointStore(folder, kept=2) as after:
            found, sentence = after.newest_push()
        assert sentence == ""
        assert found in (record(1), record(2))
    assert found == record(2)


@pytest.mark.parametrize(
    ("failing", "after"), [("open", 0), ("write", 0), ("replace", 0), *(("fsync", done) for done in range(4))]
)
def test_a_disk_that_fails_leaves_the_old_ones_and_no_rest(
    store: checkpoint_files.CheckpointStore, monkeypatch: pytest.MonkeyPatch, failing: str, after: int
) -> None:
    """Found by reading: tensors whose manifest found no room stayed until the next process, at full size each."""
    write(store, 1)
    before = sorted(path.name for path in store.directory.iterdir())
    system, done = DyingSystem(-1, power=False), list[object]()
    works = getattr(system, failing)

    def fail(*arguments: Any) -> Any:
        if len(done) == after:
            raise OSError(28, "No space left on device")
        done.append(arguments)
        return works(*arguments)

    setattr(system, failing, fail)
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", system)
        with pytest.raises(OSError, match="No space left"):
            write(store, 2)
    assert sorted(path.name for path in store.directory.iterdir()) == before
    assert value_of(store) == 1
    write(store, 3)
    assert value_of(store) == 3


def test_who_is_refused_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(file: int, how: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "lockf", taken)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="another process"):
        checkpoint_files.CheckpointStore(tmp_path, 2)
    assert os.listdir("/proc/self/fd") == before


def test_a_program_that_fails_ends_also_while_the_disk_refuses_a_pushs_record(tmp_path: Path) -> None:
    """As under a trainer that reports no exception to callbacks: nothing closes the recorder."""
    code = (
        "import shutil, sys, threading\nfrom pathlib import Path\n"
        "from dips.core.ids import ClusterId, Incarnation, PushId\n"
        "from dips.worker.checkpoint import PushRecorder\nfrom dips.worker.checkpoint_files import CheckpointStore\n"
        "from dips.worker.state.effects import PushRecord\nfrom dips.worker.state.work import Work\n"
        "store, refused = CheckpointStore(Path(sys.argv[1]), 2), threading.Event()\n"
        "recorder = PushRecorder(store, lambda event: refused.set())\nshutil.rmtree(store.directory)\n"
        "recorder.record(1, PushRecord(PushId(ClusterId('a'), Incarnation(1, 1), 1), None, 0, Work()))\n"
        "refused.wait()\nraise SystemExit('the trainer failed')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kept")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "the trainer failed\n")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_push_that_cannot_be_recorded_is_given_up_only_where_waiting_does_not_help(
    store: checkpoint_files.CheckpointStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heals = number in (errno.ENOSPC, errno.EIO, errno.EDQUOT)
    for name, value in (("FIRST_PAUSE_S", 1e-3), ("MAX_PAUSE_S", 1e-3), ("GIVE_UP_RECORD_S", 9.5e-3)):
        monkeypatch.setattr(f"dips.worker.checkpoint.{name}", value)
    tries = iter(range(30))

    def refuses(record: PushRecord) -> None:
        if next(tries, None) is not None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store, "record_push", refuses)
    said: SimpleQueue[Event] = SimpleQueue()
    recorder = PushRecorder(store, said.put)
    recorder.record(1, PushRecord(PushId(ClusterId("a"), Incarnation(1, 1), 1), None, 0, Work()))
    events = [said.get()]
    while isinstance(events[-1], Delayed):
        events.append(said.get())
    recorder.close()
    assert [type(event) for event in events[-2:]] == [Delayed, Done if heals else Failed]
    assert len(events) == (31 if heals else 10)
