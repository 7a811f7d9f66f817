"""Real processes under a supervisor: what cannot be started is told, and nothing is left behind."""

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
from dips.local.supervisor import ChildSpec, ProcessSupervisor, log_tail

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def supervisor() -> Iterator[ProcessSupervisor]:
    with ProcessSupervisor(SystemClock(), lambda event: None) as made:
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
