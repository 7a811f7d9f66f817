"""When a dead process is started again, when it is given up, and how the end of all is waited for."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.manual_clock import ManualClock

from dips.core.errors import KEYS_REFUSED_EXIT, NAME_TAKEN_EXIT, ConfigError, FatalError, Refused
from dips.local.supervisor import (
    ChildEvent,
    ChildSpec,
    FailureCount,
    ProcessSupervisor,
    RestartPolicy,
    StopStage,
    how_it_ended,
    log_tail,
)

POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=3.0, quick_s=20.0, quick_failures_max=5)


@pytest.mark.parametrize(
    ("lives_s", "delays_s"),
    [
        ([1.0] * 5, [0.5, 1.0, 2.0, 3.0, None]),
        ([1.0] * 4 + [20.0, 19.9], [0.5, 1.0, 2.0, 3.0, 0.0, 1.0]),  # a life that lasted is forgiven
        ([60.0] * 50, [0.0] * 50),
    ],
)
def test_delays_double_and_the_fifth_quick_failure_gives_up(lives_s: list[float], delays_s: list[float | None]) -> None:
    failures = FailureCount(POLICY)
    assert [failures.failed(life_s) for life_s in lives_s] == delays_s
    assert POLICY.longest_s() == 5 * 23.0


def test_a_process_that_has_lasted_is_never_given_up_but_started_more_and_more_rarely() -> None:
    failures = FailureCount(RestartPolicy(first_delay_s=0.5, later_delay_s=60.0))
    failures.failed(0.0)
    failures.failed(86_400.0)
    delays = [failures.failed(1.0) for _ in range(5000)]
    assert delays[:3] == [1.0, 2.0, 4.0]
    assert set(delays[6:]) == {60.0}
    assert all(now >= before for before, now in itertools.pairwise(delay or 0.0 for delay in delays))


class Played:
    """A process as Popen gives it: ends some time after its start with a code, or when it is asked to."""

    clock: ManualClock
    lives: dict[str, list[tuple[float, int]]]
    """(seconds, exit code) of each start, by the process's name; the last one again and again."""

    leaves_s: dict[str, float]
    """How long a process takes to end upon SIGTERM; without it, at once."""

    signals: list[tuple[str, str, float]]
    started: int

    def __init__(self, command: list[str], **_: object) -> None:
        type(self).started += 1
        self.name, self.pid, self.returncode = command[-1], 100 + self.started, 0
        lives = self.lives.get(self.name, [])
        life_s, self.code = lives.pop(0) if len(lives) > 1 else lives[0] if lives else (1e9, 0)
        self.ends_s = self.clock.monotonic_s() + life_s

    def send_signal(self, number: signal.Signals) -> None:
        now_s = self.clock.monotonic_s()
        self.signals.append((self.name, number.name, now_s))
        wait_s = self.leaves_s.get(self.name, 0.0) if number is signal.SIGTERM else 0.0
        self.ends_s, self.code = now_s + wait_s, 0 if number is signal.SIGTERM else -9

    def poll(self) -> int | None:
        self.returncode = self.code
        return self.code if self.clock.monotonic_s() >= self.ends_s else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(100.0)
    Played.clock, Played.lives, Played.leaves_s, Played.signals, Played.started = clock, {}, {}, [], 0
    monkeypatch.setattr(subprocess, "Popen", Played)
    monkeypatch.setattr("dips.local.supervisor.time.sleep", clock.advance)
    return clock


def spec(folder: Path, name: str, stage: StopStage = StopStage.FIRST, stop_s: float = 15.0) -> ChildSpec:
    return ChildSpec(name, (name,), folder / f"{name}.log", stage=stage, stop_s=stop_s)


def test_what_dies_is_started_again_and_what_ended_well_is_not(clock: ManualClock, tmp_path: Path) -> None:
    events: list[ChildEvent] = []
    Played.lives["a"] = [(1.0, -9), (1e9, 0), (30.0, 1), (3.0, 0)]
    supervisor = ProcessSupervisor(clock, events.append, POLICY)
    assert supervisor.start(spec(tmp_path, "a")) == supervisor.pid("a") == 101

    def later(seconds: float) -> int | None:
        clock.advance(seconds)
        supervisor.poll()
        return supervisor.pid("a")

    assert [later(s) for s in (0.9, 0.1, 0.4, 0.1)] == [101, None, None, 102]
    assert supervisor.kill("a", 2.0) == 102
    assert [later(s) for s in (0.0, 1.9, 0.1)] == [None, None, 103]
    assert [later(s) for s in (29.9, 0.1, 0.0)] == [103, None, 104], "it lasted: at once"
    assert later(3.0) is None
    assert (supervisor.exit_code("a"), supervisor.starts("a"), supervisor.ended(["a"])) == (0, 4, True)
    assert supervisor.kill("a") is None
    supervisor.terminate("a")
    assert [(event.kind, event.start, event.pid, event.exit_code) for event in events] == [
        ("started", 1, 101, None),
        ("failed", 1, 101, -9),
        ("started", 2, 102, None),
        ("killed", 2, 102, -9),
        ("started", 3, 103, None),
        ("failed", 3, 103, 1),
        ("started", 4, 104, None),
        ("ended", 4, 104, 0),
    ]
    assert events[1].sentence == "was ended by SIGKILL, is started again in 0.5 s"
    assert Played.signals == [("a", "SIGKILL", 101.5)]
    assert (tmp_path / "a.log").read_text().count("a, start ") == 4


def test_a_full_disk_keeps_no_process_from_being_started(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes the file and no line, another not even the file."""
    events: list[ChildEvent] = []
    supervisor = ProcessSupervisor(clock, events.append, POLICY)
    assert supervisor.start(replace(spec(tmp_path, "a"), log_path=Path("/dev/full"))) == 101
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), PermissionError(errno.EACCES, "denied")]

    def refuses(*_: Any) -> int:
        raise errors.pop(0)

    monkeypatch.setattr("dips.local.supervisor.closed", refuses)
    assert supervisor.start(spec(tmp_path, "b")) == 102
    with pytest.raises(ConfigError, match=r"c\.log cannot be written: denied"):
        supervisor.start(spec(tmp_path, "c"))


@pytest.mark.parametrize(
    ("code", "log", "kind", "words", "starts"),
    [
        (1, "the disk is on fire", FatalError, "ended with exit code 1, 5 times in a row", 5),
        (2, "dips: no such path", ConfigError, "refused its configuration: no such path (its log is", 1),
        (2, "some words", ConfigError, "refused its configuration; the end of", 1),
        (NAME_TAKEN_EXIT, "dips: another a is here", Refused, "a: another a is here (its log is", 1),
    ],
)
def test_what_cannot_live_is_given_up(
    clock: ManualClock, tmp_path: Path, code: int, log: str, kind: type[Exception], words: str, starts: int
) -> None:
    Played.lives["a"] = [(1.0, code)]
    supervisor = ProcessSupervisor(clock, lambda event: None, POLICY)
    supervisor.start(spec(tmp_path, "a"))

    def go_on() -> None:
        for _ in range(100):
            with (tmp_path / "a.log").open("a") as file:
                file.write(f"{log}\n")
            clock.advance(1.0)
            supervisor.poll()

    with pytest.raises(kind) as told:
        go_on()
    assert words in str(told.value)
    assert log in str(told.value) or log.removeprefix("dips: ") in str(told.value)
    assert (supervisor.starts("a"), supervisor.exit_code("a")) == (starts, code)


@pytest.mark.parametrize("code", [1, 2, NAME_TAKEN_EXIT])
def test_one_that_the_run_does_not_need_is_tried_again_for_ever(
    clock: ManualClock, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copier whose object store refuses it must not end the run, nor one for which there is no process."""

    class NoProcess(Played):
        def __init__(self, *_: object, **__: object) -> None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    Played.lives["a"] = [(1.0, code)]
    supervisor = ProcessSupervisor(clock, lambda event: None, POLICY)
    supervisor.start(replace(spec(tmp_path, "a"), needed=False))
    (tmp_path / "a.log").write_text("dips: it refuses the credentials\n")
    for kind in (Played, NoProcess, Played):
        monkeypatch.setattr(subprocess, "Popen", kind)
        starts = supervisor.starts("a")
        for _ in range(1000):
            clock.advance(1.0)
            supervisor.poll()
        assert (supervisor.starts("a") > starts + 10) == (kind is Played)
    assert supervisor.exit_code("a") is None


def test_one_whose_keys_are_refused_ends_alone(clock: ManualClock, tmp_path: Path) -> None:
    """A cluster that was revoked on purpose came back again and again, and all others' run with it."""
    Played.lives["a"] = [(1000.0, KEYS_REFUSED_EXIT)]
    events: list[ChildEvent] = []
    supervisor = ProcessSupervisor(clock, events.append, POLICY)
    for name in ("a", "b"):
        supervisor.start(spec(tmp_path, name))
    (tmp_path / "a.log").write_text("dips: the certificate of cluster a was revoked (stolen)\n")
    for _ in range(200):
        clock.advance(10.0)
        supervisor.poll()
    assert (supervisor.starts("a"), supervisor.exit_code("a")) == (1, KEYS_REFUSED_EXIT)
    assert supervisor.exit_code("b") is None
    assert [event.kind for event in events if event.name == "a"] == ["started", "ended"]
    assert "is not started again: the certificate of cluster a was revoked (stolen) (its log is" in events[-1].sentence


def test_all_end_stage_by_stage_and_what_does_not_is_killed(clock: ManualClock, tmp_path: Path) -> None:
    Played.leaves_s = {"a": 1e9, "s0": 3.0}
    events: list[ChildEvent] = []
    with ProcessSupervisor(clock, events.append) as supervisor:
        for name, stage in (("m", StopStage.LAST), ("s0", StopStage.SECOND), ("a", StopStage.FIRST)):
            supervisor.start(spec(tmp_path, name, stage, stop_s=10.0))
    assert [(name, how) for name, how, _ in Played.signals] == [
        ("a", "SIGTERM"), ("a", "SIGKILL"), ("s0", "SIGTERM"), ("m", "SIGTERM"),
    ]  # fmt: skip
    assert [round(at_s - 100.0) for *_, at_s in Played.signals] == [0, 10, 10, 13]
    assert [event.name for event in events if event.kind == "stopped"] == ["a", "s0", "m"]
    assert [supervisor.exit_code(name) for name in ("a", "s0", "m")] == [-9, 0, 0]
    supervisor.stop()
    assert len(Played.signals) == 4, "it is safe to repeat"


def test_nothing_is_started_again_once_the_run_is_over(clock: ManualClock, tmp_path: Path) -> None:
    Played.lives = {"a": [(1.0, 5)], "b": [(8.0, 6)]}
    events: list[ChildEvent] = []
    supervisor = ProcessSupervisor(clock, events.append, POLICY)
    for name in ("a", "b"):
        supervisor.start(spec(tmp_path, name))
    clock.advance(1.0)
    supervisor.poll()
    supervisor.restart_no_more()
    assert (supervisor.exit_code("a"), supervisor.exit_code("b")) == (5, None)
    clock.advance(7.0)
    supervisor.poll()
    clock.advance(60.0)
    supervisor.poll()
    assert (supervisor.exit_code("b"), supervisor.starts("a"), supervisor.starts("b")) == (6, 1, 1)
    assert [(event.name, event.kind, event.pid) for event in events[2:]] == [
        ("a", "failed", 101), ("a", "ended", 101), ("b", "ended", 102),
    ]  # fmt: skip


def test_what_waits_for_its_next_start_is_not_started_after_a_stop(clock: ManualClock, tmp_path: Path) -> None:
    Played.lives = {"a": [(1.0, -15)], "once": [(1.0, 9)]}
    supervisor = ProcessSupervisor(clock, lambda event: None, POLICY)
    supervisor.start(spec(tmp_path, "a"))
    supervisor.start(replace(spec(tmp_path, "once"), restart=False))
    clock.advance(1.0)
    supervisor.poll()
    assert [supervisor.exit_code(name) for name in ("a", "once")] == [None, 9]
    supervisor.stop()
    clock.advance(60.0)
    supervisor.poll()
    assert (supervisor.starts("a"), supervisor.starts("once")) == (1, 1)
    supervisor.terminate("unknown")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (70, "ended with exit code 70"),
        (-9, "was ended by SIGKILL"),
        (143, "was ended by SIGTERM (exit code 143)"),
        (130, "was ended by SIGINT (exit code 130)"),
    ],
)
def test_how_a_process_ended_in_words(tmp_path: Path, code: int, words: str) -> None:
    assert how_it_ended(code) == words
    log = tmp_path / "long.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert log_tail(log, lines=2) == "  line 9998\n  line 9999"
    assert len(log_tail(log).splitlines()) == 12
    assert "no log" in log_tail(tmp_path / "none.log")


def test_whoever_waits_for_a_slow_end_is_told_for_what(clock: ManualClock, tmp_path: Path) -> None:
    said = list[str]()
    Played.leaves_s["a"] = 25.0
    supervisor = ProcessSupervisor(clock, lambda event: None)
    supervisor.start(spec(tmp_path, "a", stop_s=636.0))
    supervisor.stop(said.append)
    waiting = "still waiting for the end of a ({} s, 10 min 36 s at most; a second ctrl-C ends all now)"
    assert said == [waiting.format(seconds) for seconds in (10, 20)]
    assert supervisor.exit_code("a") == 0
