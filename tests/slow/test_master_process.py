"""A master as a process: what it confirmed survives a kill, one master for each directory, clean stops."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from support.master_process import MasterProcess
from support.scripted_master_state import AGAIN, ScriptedMachine, caller, leave
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import TERMINATED, ConfigError, FatalError, Refused, RetryLater
from dips.core.messages import HeartbeatRequest
from dips.core.net.codec_protobuf import to_message
from dips.core.net.grpc_calls import channel_options, refused_from
from dips.core.observe.failpoints import CRASH_EXIT_CODE, armed, read_log
from dips.core.observe.tape import read_tape
from dips.master.archive import FILE_NAME, segments
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME, MasterAddress, read_address
from dips.master.journal import Journal, read_records
from dips.master.process import serve
from dips.master.state.effects import BeginAgain, Halt, WriteJournal
from dips.master.state.shared import RunConfig
from dips.protos import clusters_pb2_grpc

Start = Callable[..., MasterProcess]
ENABLED = {"DIPS_FAILPOINTS_ENABLED": "1"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[MasterProcess] = []

    def start_one(
        *knobs: str, directory: Path = tmp_path / "run", variables: Mapping[str, str] | None = None
    ) -> MasterProcess:
        processes.append(MasterProcess(directory, "state=leaves", *knobs, variables=variables))
        return processes[-1]

    yield start_one
    for process in processes:
        process.popen.kill()
        process.popen.wait()


@contextlib.contextmanager
def leaving(address: str) -> Iterator[Callable[[str], None]]:
    """Calls Leave with a reason; the master answers once the reason is durable."""
    with grpc.insecure_channel(address, options=channel_options(1 << 20)) as channel:
        stub = clusters_pb2_grpc.ClustersStub(channel)
        yield lambda reason: stub.Leave(to_message(leave(reason)), timeout=NO_LIMIT_S)


def test_what_was_confirmed_before_a_kill_is_there_after_it(start: Start, tmp_path: Path) -> None:
    master = start()
    confirmed: list[str] = []
    with leaving(master.started().address) as leave_for:
        for number in range(25):
            leave_for(f"reason {number}")
            confirmed.append(f"reason {number}")
        master.signal(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            leave_for("too late")
    assert isinstance(refused_from(caught.value), RetryLater)
    again = start()
    assert again.started().epoch == 2
    with leaving(again.started().address) as leave_for:
        leave_for("after the restart")
    assert again.signal(signal.SIGTERM) == TERMINATED
    reasons = [json.loads(record.record_json) for record in read_records(tmp_path / "run", "LEAVE")]
    assert reasons == [*confirmed, "after the restart"]
    with contextlib.closing(Journal.open(tmp_path / "run", "demo")) as journal:
        assert json.loads(journal.latest_snapshot() or "[]") == reasons


def test_an_append_that_returned_survives_a_kill_in_the_next_instant(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from dips.master.journal import Journal
journal = Journal.open(Path(sys.argv[1]), "demo")
epoch = journal.begin_epoch()
for n in range(1, 101):
    journal.append(epoch, n, "COMMIT", str(n), str(n))
    os.write(1, f"{n}\\n".encode())
    if n == 40:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    confirmed = [int(line) for line in done.stdout.split()]
    assert confirmed == list(range(1, 41))
    with contextlib.closing(Journal.open(tmp_path, "demo")) as journal:
        assert [record.entry_id for record in journal.records("COMMIT")] == confirmed
        assert journal.latest_snapshot() == "40"
        assert journal.begin_epoch() == 2


def test_a_restart_serves_at_the_same_port_in_the_next_epoch(start: Start) -> None:
    first = start()
    before = first.started()
    first.signal(signal.SIGKILL)
    after = start().started()
    assert after.address == before.address, "clusters and slaves that know the address find it again"
    assert (before.epoch, after.epoch) == (1, 2)


def test_a_restart_takes_another_port_when_its_own_is_taken(start: Start) -> None:
    first = start()
    before = first.started()
    first.signal(signal.SIGTERM)
    host, port = before.address.split(":")
    with contextlib.closing(socket.socket()) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, int(port)))
        holder.listen()
        second = start()
        assert second.started().address != before.address
    assert f"port {port} of the last start is taken" in second.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_master_cleanly(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    master = start()
    here = master.started()
    assert master.signal(number) == 128 + number
    assert read_address(tmp_path / "run") is None, "no process is sent to a master that is gone"
    kinds = [(line["kind"], line.get("exit_code")) for line in read_tape(tmp_path / "run" / TAPE_NAME)]
    assert kinds == [("journaled", None), ("master-started", None), ("master-ended", 128 + number)]
    assert number.name in master.log
    assert "Traceback" not in master.log
    assert here.run_id == "demo"


def test_a_held_call_is_told_why_it_ends_when_the_master_is_stopped(start: Start) -> None:
    master = start()
    with grpc.insecure_channel(master.started().address, options=channel_options(1 << 20)) as channel:
        beat = to_message(HeartbeatRequest(caller()))
        replies = clusters_pb2_grpc.ClustersStub(channel).Heartbeat(iter([beat]), timeout=NO_LIMIT_S)
        with leaving(master.started().address) as leave_for:
            leave_for("now the beat, which is not answered, has arrived too")
        assert master.signal(signal.SIGTERM) == TERMINATED
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    error = refused_from(caught.value)
    assert isinstance(error, Refused | RetryLater)
    assert error.retry_after_s > 0, "the caller is invited to come again"


def test_the_start_says_where_it_serves_and_that_only_loopback_is_served(start: Start) -> None:
    master = start()
    here = master.started()
    master.signal(signal.SIGTERM)
    assert re.search(
        rf"serving run demo at {here.address} \(epoch 1, directory .*\); INSECURE, as configured: .*loopback only",
        master.log,
    )


def test_a_second_master_on_the_directory_exits_with_a_sentence(start: Start) -> None:
    first = start()
    here = first.started()
    second = start()
    assert second.popen.wait() == ConfigError.exit_code
    assert f"another master (process {here.pid}) runs in" in second.log
    with leaving(here.address) as leave_for:
        leave_for("the first one goes on")


def test_a_port_in_use_ends_the_start_without_using_up_an_epoch(start: Start, tmp_path: Path) -> None:
    first = start()
    here = first.started()
    other = tmp_path / "other"
    second = start(f"listen={here.address}", directory=other)
    assert second.popen.wait() == ConfigError.exit_code
    assert f"port {here.address.split(':')[1]} is in use" in second.log
    assert "Traceback" not in second.log
    with contextlib.closing(Journal.open(other, "demo")) as journal:
        assert journal.begin_epoch() == 1


def test_a_reachable_address_is_refused_before_anything_is_made(start: Start, tmp_path: Path) -> None:
    master = start("listen=0.0.0.0:0")
    assert master.popen.wait() == ConfigError.exit_code
    assert "not a loopback address" in master.log
    assert not (tmp_path / "run").exists()


def test_the_directory_of_another_run_is_refused(start: Start, tmp_path: Path) -> None:
    Journal.open(tmp_path / "run", "yesterday").close()
    master = start()
    assert master.popen.wait() == ConfigError.exit_code
    assert "belongs to run 'yesterday'" in master.log


def test_a_damaged_journal_ends_the_start_with_the_remedy(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE_NAME).write_bytes(b"\x00garbage" * 1000)
    master = start()
    assert master.popen.wait() == FatalError.exit_code
    assert "is damaged" in master.log
    assert "Traceback" not in master.log


def begin_again(address: str, at_least: int) -> Refused | RetryLater:
    """Make the master begin a later epoch; the error of the call that did it."""
    with leaving(address) as leave_for, pytest.raises(grpc.RpcError) as caught:
        leave_for(f"{AGAIN}{at_least}")
    return refused_from(caught.value)


def until_epoch(master: MasterProcess, at_least: int) -> MasterAddress:
    """Wait until the process serves an epoch that is at least this one."""
    until(lambda: master.started().epoch >= at_least, f"epoch {at_least}", master.log_path)
    return master.started()


def test_a_later_epoch_begins_in_the_same_process_at_the_same_port(start: Start, tmp_path: Path) -> None:
    master = start()
    before = master.started()
    with leaving(before.address) as leave_for:
        leave_for("in epoch 1")
    error = begin_again(before.address, 40)
    assert error.retry_after_s > 0, "everyone is told to come again"
    here = until_epoch(master, 40)
    assert (here.address, here.pid, here.epoch) == (before.address, before.pid, 40)
    with leaving(here.address) as leave_for:
        leave_for("in epoch 40")
    begin_again(here.address, 7)
    assert until_epoch(master, 41).epoch == 41, "an epoch never goes back"
    assert master.signal(signal.SIGTERM) == TERMINATED
    assert "Traceback" not in master.log
    assert read_address(tmp_path / "run") is None
    records = [(record.epoch, record.kind) for record in read_records(tmp_path / "run")]
    assert records == [(1, "EPOCH"), (1, "LEAVE"), (40, "EPOCH"), (40, "LEAVE"), (41, "EPOCH")]
    with contextlib.closing(Journal.open(tmp_path / "run", "demo")) as journal:
        assert journal.latest_snapshot() == '["in epoch 1", "in epoch 40"]'


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_was_confirmed_survives_a_crash_at_the_commit(start: Start, tmp_path: Path, place: str) -> None:
    log = tmp_path / "fired"
    # The port and the epoch are two transactions of their own.
    point = f"master.journal.{place}_commit"
    variables = {**ENABLED, "DIPS_FAILPOINTS": f"{point}=6*off->crash", "DIPS_FAILPOINT_LOG": str(log)}
    master = start(variables=variables)
    confirmed = []
    with leaving(master.started().address) as leave_for:
        for number in range(4):
            leave_for(f"reason {number}")
            confirmed.append(f"reason {number}")
        with pytest.raises(grpc.RpcError):
            leave_for("reason 4")
    assert master.popen.wait() == CRASH_EXIT_CODE
    assert [(line.name, line.action) for line in read_log(log.read_text())] == [(point, "crash")]
    assert f"failpoints are armed, this process will misbehave on purpose: {point}" in master.log
    reasons = [json.loads(record.record_json) for record in read_records(tmp_path / "run", "LEAVE")]
    assert reasons == confirmed + ["reason 4"] * (place == "after")
    again = start()
    assert again.started().epoch == 2


def test_an_answer_that_is_lost_was_decided_all_the_same(start: Start, tmp_path: Path) -> None:
    master = start(variables={**ENABLED, "DIPS_FAILPOINTS": "master.rpc.after_Leave=1*drop"})
    with leaving(master.started().address) as leave_for:
        with pytest.raises(grpc.RpcError) as caught:
            leave_for("the lost one")
        assert isinstance(refused_from(caught.value), RetryLater)
        leave_for("the next one")
    assert master.signal(signal.SIGTERM) == TERMINATED
    reasons = [json.loads(record.record_json) for record in read_records(tmp_path / "run", "LEAVE")]
    assert reasons == ["the lost one", "the next one"]


def test_an_unknown_failpoint_ends_the_start_with_those_that_are_close(start: Start) -> None:
    master = start(variables={**ENABLED, "DIPS_FAILPOINTS": "master.journal.before_comit=crash"})
    assert master.popen.wait() == ConfigError.exit_code
    assert "did you mean master.journal.before_commit" in master.log
    assert "Traceback" not in master.log


def test_a_long_run_moves_its_old_decisions_to_the_archive(start: Start, tmp_path: Path) -> None:
    master = start("journal_records=16")
    with leaving(master.started().address) as leave_for:
        for number in range(60):
            leave_for(f"reason {number}")
    assert master.signal(signal.SIGTERM) == TERMINATED
    again = start("journal_records=16")
    again.started()
    assert again.signal(signal.SIGTERM) == TERMINATED
    reasons = [json.loads(record.record_json) for record in read_records(tmp_path / "run", "LEAVE")]
    assert reasons == [f"reason {number}" for number in range(60)]
    assert segments(tmp_path / "run")


def config_in(directory: Path, **knobs: object) -> MasterConfig:
    return MasterConfig.model_validate({"run_id": "demo", "directory": directory, "insecure": True, **knobs})


async def test_each_epoch_has_its_own_state_machine_with_the_same_settings(tmp_path: Path) -> None:
    made: list[tuple[bool, int, str | None]] = []
    served: list[MasterAddress] = []

    def make(run: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> ScriptedMachine:
        made.append((run.rebuild, epoch, snapshot_json))
        machine = ScriptedMachine()
        write = WriteJournal(1, "LEAVE", "{}", f'"of epoch {epoch}"')
        machine.first = [write, Halt(0, "enough") if epoch >= 9 else BeginAgain(9, "a slave promised epoch 8")]
        return machine

    outcome = await serve(config_in(tmp_path, rebuild=True), make, started=lambda here, _: served.append(here))
    assert outcome == Halt(0, "enough")
    assert made == [(True, 1, None), (True, 9, '"of epoch 1"')], "what was decided before is there"
    assert [here.epoch for here in served] == [1, 9]
    assert len({here.address for here in served}) == 1
    assert read_address(tmp_path) is None


async def test_a_signal_between_two_epochs_is_not_lost(tmp_path: Path) -> None:
    def make(run: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> ScriptedMachine:
        machine = ScriptedMachine()
        machine.first = [BeginAgain(epoch + 1, "and again")]
        return machine

    def started(here: MasterAddress, _: object) -> None:
        if here.epoch == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    assert await serve(config_in(tmp_path), make, started=started) == Halt(TERMINATED, "stopped by SIGTERM")
    assert read_address(tmp_path) is None


async def test_an_epoch_that_cannot_begin_ends_the_master_with_the_remedy(tmp_path: Path) -> None:
    def make(run: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> ScriptedMachine:
        machine = ScriptedMachine()
        machine.first = [BeginAgain(9, "a slave promised epoch 8")]
        return machine

    # The first two transactions are the port's and the first epoch's.
    with armed("master.journal.before_commit=2*off->error(no space left)"):
        with pytest.raises(FatalError, match=r"no space left.*check that the disk has room"):
            await serve(config_in(tmp_path), make)
    assert read_address(tmp_path) is None
    with contextlib.closing(Journal.open(tmp_path, "demo")) as journal:
        assert journal.begin_epoch() == 2


async def test_an_address_that_cannot_be_removed_is_a_warning_and_the_end_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a disk error, upon which the system mounts the disk for reading only."""

    def make(run: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> ScriptedMachine:
        machine = ScriptedMachine()
        machine.first = [Halt(6, "the journal cannot be written")]
        return machine

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        outcome = await serve(config_in(tmp_path, page_listen="127.0.0.1:0"), make)
    assert outcome == Halt(6, "the journal cannot be written")
    for name in ("master.json", "page.json"):
        sentence = f"{tmp_path / name} cannot be removed (Read-only file system)"
        assert [record.levelname for record in caplog.records if sentence in record.message] == ["WARNING"]
