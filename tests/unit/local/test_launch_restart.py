"""When a dead process is started again, when it is given up, and how the end of all is waited for."""

from __future__ import annotations

import itertools
import signal
import subprocess
from pathlib import Path

import pytest

from dips.core.clock import ManualClock
from dips.local.supervisor import ChildSpec, FailureCount, ProcessSupervisor, RestartPolicy

POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=3.0, quick_s=20.0, quick_failures_max=5)


@pytest.mark.parametrize(
    ("lives_s", "delays_s"),
    [
        ([1.0] * 5, [0.5, 1.0, 2.0, 3.0, None]),
        ([1.0] * 4 + [20.0, 19.9], [0.5, 1.0, 2.0, 3.0, 0.0, 1.0]),  # a life that lasted is forgiven
        ([60.0] * 50, [0.0] * 50),
    ],
)
def test_delays_double_up_to_a_bound_and_the_fifth_quick_failure_gives_up(
    lives_s: list[float], delays_s: list[float | None]
) -> None:
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


class Slow:
    """A process that ends 25 s after SIGTERM."""

    pid, returncode = 7, 0
    clock: ManualClock
    asked_s: float | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what Popen takes."""

    def send_signal(self, number: signal.Signals) -> None:
        assert number is signal.SIGTERM, "it may take its time"
        self.asked_s = self.clock.monotonic_s()

    def poll(self) -> int | None:
        assert self.asked_s is not None
        return 0 if self.clock.monotonic_s() >= self.asked_s + 25.0 else None


def test_whoever_waits_for_a_slow_end_is_told_for_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, said = ManualClock(100.0), list[str]()
    monkeypatch.setattr(Slow, "clock", clock, raising=False)
    monkeypatch.setattr(subprocess, "Popen", Slow)
    monkeypatch.setattr("dips.local.supervisor.time.sleep", clock.advance)
    supervisor = ProcessSupervisor(clock, lambda event: None)
    supervisor.start(ChildSpec("a", ("train",), tmp_path / "a.log", stop_s=636.0))
    supervisor.stop(said.append)
    waiting = "still waiting for the end of a ({} s, 10 min 36 s at most; a second ctrl-C ends all now)"
    assert said == [waiting.format(seconds) for seconds in (10, 20)]
    assert supervisor.exit_code("a") == 0
