"""Real processes: what dies is started again, what cannot live is given up, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.dips_command import is_running
from support.waiting import until

from dips.core.clock import SystemClock
from dips.local.child import WHOEVER_STARTS_IT, wrapped
from dips.local.supervisor import (
    ChildEvent,
    ChildSpec,
    ProcessSupervisor,
    RestartPolicy,
    StopStage,
    log_tail,
)

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, quick_s=10.0, quick_failures_max=3)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def spec(name: str, code: str, folder: Path, stage: StopStage = StopStage.FIRST, restart: bool = True) -> ChildSpec:
    return ChildSpec(name, python(code), folder / f"{name}.log", stage=stage, restart=restart)


@pytest.fixture
def events() -> list[ChildEvent]:
    return []


@pytest.fixture
def supervisor(events: list[ChildEvent]) -> Iterator[ProcessSupervisor]:
    with ProcessSupervisor(SystemClock(), events.append, QUICK) as made:
        yield made


def polled(supervisor: ProcessSupervisor, true: Callable[[], bool]) -> Callable[[], bool]:
    def poll_then_ask() -> bool:
        supervisor.poll()
        return true()

    return poll_then_ask


def test_a_command_that_does_not_exist_is_told(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    supervisor.start(ChildSpec("a", ("/nowhere/at/all",), tmp_path / "a.log", restart=False))
    until(polled(supervisor, lambda: supervisor.ended(["a"])), "the end")
    assert supervisor.exit_code("a") == 127
    assert "/nowhere/at/all cannot be started" in log_tail(tmp_path / "a.log")


def test_stop_ends_stages_in_order_and_kills_who_does_not_listen(
    supervisor: ProcessSupervisor, events: list[ChildEvent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dips.local.supervisor._STOP_TERMINATE_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    pids = {
        "master": supervisor.start(spec("master", SLEEP, tmp_path, StopStage.LAST)),
        "slave": supervisor.start(spec("slave", deaf, tmp_path, StopStage.SECOND)),
        "cluster": supervisor.start(spec("cluster", SLEEP, tmp_path)),
    }
    until(lambda: all(log_tail(tmp_path / f"{name}.log").endswith("up") for name in pids), "all are up")
    supervisor.stop()
    stopped = [event for event in events if event.kind == "stopped"]
    assert [event.name for event in stopped] == ["cluster", "slave", "master"]
    assert [event.exit_code for event in stopped] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
    assert not any(is_running(pid) for pid in pids.values())
    supervisor.stop()
    assert len([event for event in events if event.kind == "stopped"]) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
def test_a_process_that_another_one_starts_ends_with_that_one() -> None:
    command = wrapped([sys.executable, "-c", SLEEP], parent_pid=WHOEVER_STARTS_IT)
    code = f"import subprocess; child = subprocess.Popen({command!r}); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as between:
        assert between.stdout is not None
        pid = int(between.stdout.readline())
        assert between.stdout.readline() == "up\n"
        between.kill()
    until(lambda: not is_running(pid), "its end")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
def test_a_child_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    command = wrapped(python(f"open({str(trace)!r}, 'w')"))
    command[3] = str(os.getpid() + 1_000_000)  # a parent that this process is not
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not trace.exists()


def test_a_nice_child_steps_back(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    log = tmp_path / "nice.log"
    supervisor.start(ChildSpec("nice", python("import os; print(os.nice(0))"), log, niceness=10))
    until(polled(supervisor, lambda: supervisor.ended(["nice"])), "the end")
    assert log_tail(log, lines=1) == f"  {min(19, os.nice(0) + 10)}"
