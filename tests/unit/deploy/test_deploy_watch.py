"""Which slave's pod is ended, and when nothing is: the supervisor's decisions, look by look."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dips.core.errors import RetryLater
from dips.core.messages import SlaveStatus, StatusReply
from dips.deploy.supervise import Ending, Pod, SlaveSupervisor, WatchLimits, WatchMemory, look, pod_of

STATUS = StatusReply(
    "run",
    1,
    None,
    0,
    0,
    "IDLE",
    None,
    0.0,
    0.0,
    "",
    slaves=(SlaveStatus("s0", alive=True), SlaveStatus("s1", alive=True)),
)
WELL = {name: Pod(f"run-slave-{name[1]}", f"uid-{name}", True, 900.0) for name in ("s0", "s1")}
AWAY = replace(STATUS, slaves=(SlaveStatus("s0", alive=True), SlaveStatus("s1", alive=False)))
PATIENCE = WatchLimits(gone_s=120.0, stuck_s=600.0)


class Watch:
    """Looks one after the other."""

    def __init__(self) -> None:
        self.memory = WatchMemory()

    def look(self, status: StatusReply, now_s: float, pods: dict[str, Pod | None] | None = None) -> Ending | None:
        self.memory, ending = look(self.memory, status, pods or dict(WELL), now_s, PATIENCE)
        return ending


def looks(status: StatusReply, end_s: int, pods: dict[str, Pod | None] | None = None) -> list[tuple[int, Ending]]:
    """The endings of looks every 10 s at the same status, each with its time."""
    watch = Watch()
    found = [(now_s, watch.look(status, float(now_s), dict(pods or WELL))) for now_s in range(0, end_s, 10)]
    return [(now_s, ending) for now_s, ending in found if ending]


STARTING = replace(WELL["s1"], ready=False)
STUCK = replace(STATUS, phase="COMMIT", waiting_code="commit", waiting_slaves=("s1",), rounds_committed=4)


@pytest.mark.parametrize(
    ("status", "pods"),
    [
        (STATUS, WELL),
        (AWAY, {**WELL, "s1": STARTING}),  # its StatefulSet starts it
        (AWAY, {**WELL, "s1": None}),
        (AWAY, {**WELL, "s1": replace(WELL["s1"], ready_for_s=5.0)}),
        (replace(AWAY, stopping=True), WELL),
        (replace(AWAY, stopped=True), WELL),
        (replace(STUCK, waiting_code="prepare", waiting_slaves=("s0", "s1")), WELL),  # several are waited for
    ],
)
def test_nothing_is_ended(status: StatusReply, pods: dict[str, Pod | None]) -> None:
    assert not looks(status, 2000, pods)


def test_slaves_that_are_missed_or_waited_for_are_ended() -> None:
    endings = looks(AWAY, 3000)
    assert {(ending.slave, ending.pod.name) for _, ending in endings} == {("s1", "run-slave-1")}
    assert "the master has missed it for 120 s" in endings[0][1].reason
    # 120 s of patience after each; then the pauses of 120, 240, 480, ... s are longer than it.
    assert [now_s for now_s, _ in endings] == [120, 250, 490, 970, 1930]
    now_s, ending = looks(STUCK, 700)[0]
    assert (now_s, ending.slave) == (600, "s1")
    assert "rounds have waited for it alone for 600 s" in ending.reason


BOTH_AWAY = replace(STATUS, slaves=())
ABORTED = replace(STATUS, phase="WINDOW", waiting_code="aborted_round", rounds_committed=4)
COMMITTED = replace(ABORTED, rounds_committed=5)
S0, S1 = (replace(STUCK, waiting_code="measure", waiting_slaves=(f"s{n}",)) for n in (0, 1))


@pytest.mark.parametrize(
    ("seen", "ended_s"),
    [
        # One that comes back begins again, as do all after the master's restart.
        ([(0, AWAY), (100, STATUS), (130, AWAY), (240, AWAY), (250, AWAY)], [250]),
        ([(0, AWAY), (200, replace(AWAY, epoch=2)), (330, replace(AWAY, epoch=2))], [330]),
        # Aborted rounds between do not make it innocent, and a committed one does.
        ([(0, STUCK), (300, ABORTED), (610, STUCK)], [610]),
        ([(0, STUCK), (300, COMMITTED), (610, replace(STUCK, rounds_committed=5))], []),
        ([(at_s, (S0, S1)[at_s // 10 % 2]) for at_s in range(0, 2000, 10)], []),
    ],
)
def test_what_was_seen_before_counts(seen: list[tuple[int, StatusReply]], ended_s: list[int]) -> None:
    watch = Watch()
    assert [at_s for at_s, status in seen if watch.look(status, float(at_s))] == ended_s


def test_no_second_slave_is_ended_while_one_starts() -> None:
    watch = Watch()
    assert [watch.look(BOTH_AWAY, at_s) is not None for at_s in (0.0, 130.0)] == [False, True]
    starting = {**WELL, "s0": replace(WELL["s0"], ready=False)}
    assert watch.look(BOTH_AWAY, 140.0, dict(starting)) is None


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def api_pod(ready: str = "True", **metadata: object) -> dict[str, object]:
    since = (NOW - timedelta(seconds=300)).isoformat().replace("+00:00", "Z")
    return {
        "kind": "Pod",
        "metadata": {"name": "run-slave-1", "uid": "u1", **metadata},
        "status": {"conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}]},
    }


def test_a_pod_is_ready_since_its_condition_says_so() -> None:
    assert pod_of(api_pod(), NOW) == Pod("run-slave-1", "u1", True, 300.0)
    assert pod_of(None, NOW) is None
    for other in (api_pod("False"), api_pod(deletionTimestamp="2026-01-01T00:00:00Z"), {**api_pod(), "status": {}}):
        found = pod_of(other, NOW)
        assert found is not None
        assert not found.ready


class Pods:
    """An API server with two pods. ended: what was deleted, and which one of its name."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []

    def get(self, kind: str, name: str) -> dict[str, object] | None:
        return {**api_pod(), "metadata": {"name": name, "uid": f"uid of {name}"}}

    def delete(self, kind: str, name: str, uid: str = "") -> bool:
        self.ended.append((name, uid))
        return True


def test_the_very_pod_that_was_looked_at_is_ended() -> None:
    pods, clock = Pods(), iter(range(0, 1000, 60))
    supervisor = SlaveSupervisor("run", 2, lambda: AWAY, pods, PATIENCE, lambda: float(next(clock)), lambda: NOW)
    assert [bool(supervisor.tick()) for _ in range(4)] == [False, False, True, False]
    assert pods.ended == [("run-slave-1", "uid of run-slave-1")]


def test_a_master_that_does_not_answer_means_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def silent() -> StatusReply:
        raise RetryLater("the master does not answer")

    pods, clock = Pods(), iter(range(0, 10_000, 60))
    supervisor = SlaveSupervisor("run", 2, silent, pods, PATIENCE, lambda: float(next(clock)), lambda: NOW)
    assert not any(supervisor.tick() for _ in range(50))
    assert not pods.ended
    assert [record.getMessage() for record in caplog.records] == ["the master does not answer"], "said once"
