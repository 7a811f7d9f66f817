"""Whatever the umask, what a run keeps can be opened by its owner alone, or by the group of files_group, too."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.history import usual_run, write_run
from support.journals import append
from support.slave_bench import prepare
from support.slave_values import snapshot

from dips import DiLoCo
from dips.core import files
from dips.core.clock import SystemClock
from dips.core.errors import ConfigError
from dips.core.files import closed, make_folder, open_to_others, replace_file, share_with
from dips.core.ids import RoundId, Version
from dips.core.net.security import INSECURE, ProcessKnobs
from dips.core.observe.metrics_server import serve_metrics
from dips.core.observe.tape import Tape
from dips.doctor.findings import Grade
from dips.doctor.host import check_closed
from dips.local.authority import ensure_keys
from dips.local.report import draw_losses, write_report
from dips.local.run_directory import UP, Mark, claim
from dips.local.supervisor import ChildSpec, ProcessSupervisor
from dips.master import process as master
from dips.master.config import MasterConfig
from dips.master.directory import MasterAddress, write_address
from dips.master.journal import Journal, Retention, connect_to_read
from dips.master.page.access import Secret, save_secret, write_page_address
from dips.slave import process as slave
from dips.slave.config import SlaveConfig
from dips.slave.push_evidence import PushEvidence
from dips.slave.ring import SnapshotStore
from dips.trainer import evaluate, train
from dips.trainer.config import TrainConfig
from dips.trainer.export import write_whole
from dips.worker.checkpoint_files import CheckpointStore, RawTensor, folder_of_ranks, write_tensors
from dips.worker.config import ClientConfig

TEAM, OURS, THEIRS = 54321, 54322, 54323
"""A group and two users that this machine need not know."""

Writer = Callable[[Path], "dict[str, str] | None"]
"""Returns the modes of what is there only while it runs, too; None: nothing is."""


def modes(folder: Path) -> dict[str, str]:
    found = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in found}


def of_a_master(folder: Path) -> dict[str, str]:
    journal = Journal.open(folder, "demo", Retention(records=8))
    epoch = journal.begin_epoch()
    for number in range(1, 33):
        append(journal, epoch, number, "LEASE", "{}", "{}")
    assert journal.tidy(), "some go to the archive"
    write_address(folder, MasterAddress("127.0.0.1:1", "demo", 1, 1))
    save_secret(folder, Secret("x" * 43, 1))
    write_page_address(folder, "https://127.0.0.1/", 1)
    Tape(folder / "master.tape.jsonl", "master", "demo").close()
    knobs = ProcessKnobs(insecure=True, metrics_listen="127.0.0.1:0")
    server = serve_metrics(knobs, INSECURE, tuple, role="master", name="m", run="demo", file=folder / "metrics.json")
    assert server is not None
    server.stop()
    written = {path.name for path in folder.iterdir()}
    assert written >= {"journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm", "archive", "page.secret.json"}
    found = modes(folder)
    journal.close()
    return found


def of_a_slave(folder: Path) -> None:
    store = SnapshotStore(folder, "demo", "s0", 1)
    store.promise.save(3)
    store.ring.make(8)
    info = snapshot(Version(1, 6), RoundId(1, 7), committed=False)
    zeros = np.zeros(8, np.float32)
    store.ring.write_shadow(info, zeros, zeros)
    store.ring.commit(info, info.commit_hash or b"h" * 16, b"{}")
    PushEvidence(folder, "demo", "s0").write(prepare(RoundId(1, 7), info.version, None), info, [zeros], 1024)
    store.close()


def of_a_cluster(folder: Path) -> None:
    tensors = {"theta": RawTensor("F32", (2,), np.zeros(8, np.uint8))}
    with CheckpointStore(folder, kept=2) as store:
        store.write({"value": 1}, tensors)
        number = store.begin_folder()
        write_tensors(folder_of_ranks(folder, number) / "__0_0.distcp", tensors)
        store.commit_folder(number, {}, [])


def of_a_launcher(folder: Path) -> None:
    with claim(folder, Mark("demo", UP, "dips up")) as directory:
        ensure_keys(directory.keys, ["a"], ["s0"])
        write_report({"loss": 1.0}, directory.report)
        draw_losses(directory.picture, {}, [], [], "nothing")
        child = ChildSpec("a", (sys.executable, "-c", ""), directory.log("a"))
        supervisor = ProcessSupervisor(SystemClock(), lambda event: None)
        supervisor.start(child)
        supervisor.stop(lambda sentence: None)


def of_a_judged_run(folder: Path) -> None:
    write_run(folder, usual_run())


WRITERS = [of_a_master, of_a_slave, of_a_cluster, of_a_launcher, of_a_judged_run]


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    share_with("")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users reach: pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="dips-closed-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def expected(folder: Path, names: Iterable[str], of_file: int, of_folder: int) -> dict[str, str]:
    return {name: oct(of_folder if (folder / name).is_dir() else of_file) for name in names}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277], indirect=True, ids=oct)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.usefixtures("umask")
def test_what_a_role_keeps_is_closed_from_its_first_moment_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Writer
) -> None:
    """Found by reading: every user of a machine could read the model of every run on it."""
    opened, made = os.open, os.mkdir

    def open_(path: str | Path, flags: int, mode: int = 0o777) -> int:
        handle = opened(path, flags, mode)
        status = os.fstat(handle)
        if flags & os.O_CREAT and tmp_path in Path(path).parents:
            assert not status.st_mode & 0o077, path
        return handle

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        made(path, mode)
        assert tmp_path not in Path(path).parents or not os.stat(path).st_mode & 0o077, path

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "mkdir", mkdir)
    run = tmp_path / "not there yet" / "run"
    found = write(run) or modes(run)
    monkeypatch.undo()
    assert len(found) > 4
    assert found == expected(run, found, 0o600, 0o700)
    assert modes(run.parent)["."] == "0o700"


@pytest.mark.parametrize("umask", [0o000, 0o022], indirect=True, ids=oct)
@pytest.mark.usefixtures("umask")
def test_files_of_an_earlier_release_are_closed_when_they_are_written_again(tmp_path: Path) -> None:
    for write in (of_a_master, of_a_slave):
        folder = tmp_path / write.__name__
        write(folder)
    for path in tmp_path.rglob("*"):
        if "secret" not in path.name:
            path.chmod(0o755 if path.is_dir() else 0o644)
    journal = Journal.open(tmp_path / "of_a_master", "demo")
    Tape(tmp_path / "of_a_master" / "master.tape.jsonl", "master", "demo").close()
    store = SnapshotStore(tmp_path / "of_a_slave", "demo", "s0", 1)
    store.scan()
    zeros = np.zeros(8, np.float32)
    info = snapshot(Version(1, 7), RoundId(1, 8), committed=False)
    store.ring.write_shadow(info, zeros, zeros)
    store.promise.save(4)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    store.close()
    journal.close()
    names = ["journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm", "master.lock", "master.tape.jsonl"]
    assert {found[name] for name in [*names, "lock", "promise.json"]} == {0o600}
    assert 0o600 in [mode for name, mode in found.items() if name.startswith("ring")], "the file that was written"
    assert found["of_a_master"] == 0o755, "a folder that is there is its maker's"


def test_what_a_user_asks_for_has_the_modes_that_the_user_has_set(tmp_path: Path) -> None:
    before = os.umask(0o027)
    write_whole(tmp_path / "model.safetensors", [memoryview(b"x")])
    os.umask(before)
    assert modes(tmp_path)["model.safetensors"] == "0o640"


def test_a_device_is_no_file_to_be_closed() -> None:
    mode = os.stat("/dev/null").st_mode
    os.close(closed("/dev/null", os.O_WRONLY | os.O_CREAT))
    assert os.stat("/dev/null").st_mode == mode


def test_a_file_system_without_modes_ends_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = os.umask(0o277)
    monkeypatch.setattr(os, "chmod", refuses)
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            replace_file(tmp_path / name, [b"x"])
    os.umask(before)
    assert [record.getMessage() for record in caplog.records] == [
        f"files in {tmp_path} cannot be closed to other users: Operation not permitted"
    ]


def test_the_doctor_names_what_is_open_and_how_to_close_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    of_a_judged_run(run)
    folders = (run, run / "slaves", run / "slaves" / "s0")
    (found,) = check_closed([run, run / "slaves", run / "not there"], "")
    assert (found.grade, found.sentence) == (Grade.OK, f"{run} is closed to other users")
    (run / "slaves" / "s0" / "identity.json").touch()
    (run / "slaves" / "s0" / "identity.json").chmod(0o644)
    assert list(open_to_others(run)) == [], "no one gets so far"
    for folder in folders:
        folder.chmod(0o755)
    (found,) = check_closed([run / "slaves", run], "")
    assert found.grade is Grade.WARN
    assert found.sentence.startswith(
        f"{run}: other users of this machine can open 4 of its files and folders, such as "
    )
    assert found.remedy == f"chmod -R go= {run}"
    (found,) = check_closed([run], str(os.getgid() + 1))
    assert found.remedy.startswith("chgrp -R")
    for folder in folders:
        folder.chmod(0o2750)
    (run / "slaves" / "s0" / "identity.json").chmod(0o640)
    (found,) = check_closed([run], str(os.getgid()))
    assert found.grade is Grade.OK


# ---- a group ----


def as_user(user: int, groups: list[int], act: Callable[[], object]) -> str:
    """What a child of this process that is such a user ends with: nothing, or the words of an error."""
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        words = ""
        try:
            os.setgroups(groups)
            os.setgid(user)
            os.setuid(user)
            act()
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(end, words.encode())
        os._exit(0)
    os.close(end)
    with open(begin, "rb") as told:
        words = told.read().decode()
    os.waitpid(child, 0)
    return words


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def read_all(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.read_bytes()


@root_only
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], indirect=True, ids=oct)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.usefixtures("umask")
def test_a_group_reads_what_a_role_keeps_but_no_keys(place: Path, write: Writer) -> None:
    share_with(str(TEAM))
    run = place / "run"
    found = write(run) or modes(run)
    secrets = {name: found.pop(name) for name in list(found) if name.startswith(("keys", "page"))}
    assert found == expected(run, found, 0o640, 0o2750)
    assert secrets == expected(run, secrets, 0o600, 0o700)
    assert {path.stat().st_gid for path in run.rglob("*") if path.name in found} <= {TEAM}
    shutil.rmtree(run / "keys", ignore_errors=True)
    for path in run.glob("page*"):
        path.unlink()
    assert as_user(THEIRS, [TEAM], lambda: read_all(run)) == ""
    assert as_user(THEIRS, [], lambda: list(run.iterdir())).startswith("PermissionError")


@root_only
def test_a_pod_of_another_user_reads_by_the_group_of_its_volume(place: Path) -> None:
    """As with Kubernetes' fsGroup: the volume is root's, and its group may write."""
    os.chown(place, 0, TEAM)
    place.chmod(0o2775)
    kept = []

    def run(group: str) -> Callable[[], None]:
        def act() -> None:
            share_with(group)
            for name, write in (("master", of_a_master), ("slave", of_a_slave), ("cluster", of_a_cluster)):
                write(place / name)
            journal = Journal.open(place / "master", "demo")
            append(journal, journal.begin_epoch(), 2, "COMMIT", "{}", "{}")
            kept.append(journal)  # as a master that was killed leaves it: with its log

        return act

    def read() -> None:
        with (place / "cluster" / "checkpoint-00000001.json").open() as file:
            file.read()
        with (place / "slave" / "identity.json").open() as file:
            file.read()
        connect_to_read(place / "master" / "journal.sqlite3").close()

    assert as_user(OURS, [TEAM], run("")) == ""
    assert as_user(THEIRS, [TEAM], read).startswith("PermissionError")
    for name in ("master", "slave", "cluster"):
        shutil.rmtree(place / name)
    assert as_user(OURS, [TEAM], run(str(TEAM))) == ""
    assert as_user(THEIRS, [TEAM], read) == ""
    assert as_user(THEIRS, [], read).startswith("PermissionError")

    def go_on() -> None:
        share_with(str(TEAM))
        Journal.open(place / "master", "demo").close()

    assert as_user(OURS, [TEAM], go_on) == ""
    assert not (place / "master" / "journal.sqlite3-wal").exists()
    assert as_user(THEIRS, [TEAM], read) == "", "also at rest, without a right to write there"


@root_only
def test_a_master_in_a_folder_of_its_owners_group_gives_the_group_all_of_the_journal(place: Path) -> None:
    """SQLite's files have its owner's group where the folder has no group of its own for new ones."""
    folder = place / "master"
    folder.mkdir(0o755)
    os.chown(folder, OURS, OURS)

    def act() -> None:
        share_with(str(TEAM))
        Journal.open(folder, "demo")

    assert as_user(OURS, [TEAM], act) == ""
    names = ["journal.sqlite3", "journal.sqlite3-wal", "journal.sqlite3-shm"]
    found = {name: (oct((folder / name).stat().st_mode & 0o777), (folder / name).stat().st_gid) for name in names}
    assert found == dict.fromkeys(names, ("0o640", TEAM))


def test_a_group_that_is_not_there_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="files_group is 'no such', and this machine has no group"):
        share_with("no such")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [7])
    with pytest.raises(ConfigError, match="this user is not in that group"):
        share_with("54321")
    share_with("7")
    assert files._group == 7


def start_own_loop(folder: Path) -> None:
    model = torch.nn.Linear(2, 1)
    sgd, at = torch.optim.SGD(model.parameters(), lr=0.1), "127.0.0.1:9"
    with DiLoCo(model, sgd, tokens_per_step=1, master=at, cluster_id="a", insecure=True, checkpoint_dir=folder):
        pass


NO_SUCH: dict[str, Any] = {"insecure": True, "files_group": "no such"}
STARTS: list[Callable[[Path], object]] = [
    lambda folder: master.run(MasterConfig(run_id="r", directory=folder, **NO_SUCH)),
    lambda folder: train.run(TrainConfig(), ClientConfig(checkpoint_dir=folder, **NO_SUCH)),
    lambda folder: evaluate.follow(TrainConfig(), ClientConfig(tape=folder / "tape", **NO_SUCH)),
    start_own_loop,
]


@pytest.fixture
def _kept_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("master.process", "slave.process", "trainer.train", "trainer.evaluate"):
        monkeypatch.setattr(f"dips.{module}.configure_logging", lambda *_: None)
    monkeypatch.setattr("dips.slave.process.keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)


@pytest.mark.parametrize("start", STARTS, ids=["master", "trainer", "evaluator", "own loop"])
@pytest.mark.usefixtures("_kept_process")
def test_each_role_takes_the_group_of_its_settings_before_it_makes_anything(
    start: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPS_FILES_GROUP", "no such")
    with pytest.raises(ConfigError, match="files_group is 'no such'"):
        start(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_kept_process")
def test_a_slave_takes_the_group_of_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slave.run(SlaveConfig(run_id="r", slave_id="s0", directory=tmp_path / "s0", **NO_SUCH)) == 2
    assert "files_group is 'no such'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_or_is_there_is_as_with_mkdir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "a" / "b")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OSError, match="link"):
        make_folder(tmp_path / "link" / "a")
    tmp_path.chmod(0o755)
    make_folder(tmp_path)
    assert modes(tmp_path)["."] == "0o755"
    with pytest.raises(FileNotFoundError):
        closed(tmp_path / "no" / "file", os.O_WRONLY | os.O_CREAT)
