"""Which slave's pod is ended, and when nothing is: the supervisor's decisions, look by look."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta

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
        self.memory = WatchMemory.nothing()

    def look(self, status: StatusReply, now_s: float, pods: dict[str, Pod | None] | None = None) -> Ending | None:
        self.memory, ending = look(self.memory, status, pods or dict(WELL), now_s, PATIENCE)
        return ending


def test_nothing_happens_while_all_are_here() -> None:
    watch = Watch()
    assert not any(watch.look(STATUS, now_s) for now_s in range(0, 10_000, 10))


def test_a_slave_that_the_master_misses_while_its_pod_is_ready_is_ended_once() -> None:
    watch = Watch()
    endings = [watch.look(AWAY, float(now_s)) for now_s in range(0, 200, 10)]
    (ending,) = [one for one in endings if one]
    assert endings.index(ending) == 12
    assert (ending.slave, ending.pod.name) == ("s1", "run-slave-1")
    assert "the master has missed it for 120 s" in ending.reason


def test_a_slave_that_comes_back_begins_anew() -> None:
    watch = Watch()
    watch.look(AWAY, 0.0)
    watch.look(STATUS, 100.0)
    assert watch.look(AWAY, 130.0) is None
    assert watch.look(AWAY, 240.0) is None
    assert watch.look(AWAY, 250.0) is not None


def test_a_pod_that_its_statefulset_is_starting_is_left_alone() -> None:
    starting = {**WELL, "s1": replace(WELL["s1"], ready=False)}
    missing = {**WELL, "s1": None}
    for pods in (starting, missing):
        watch = Watch()
        assert not any(watch.look(AWAY, float(now_s), dict(pods)) for now_s in range(0, 2000, 10))


def test_a_pod_that_became_ready_just_now_gets_its_time() -> None:
    watch = Watch()
    young = {**WELL, "s1": replace(WELL["s1"], ready_for_s=5.0)}
    assert watch.look(AWAY, 0.0, dict(young)) is None
    assert watch.look(AWAY, 500.0, dict(young)) is None


def test_no_second_slave_is_ended_while_one_starts() -> None:
    watch = Watch()
    both = replace(STATUS, slaves=())
    watch.look(both, 0.0)
    assert watch.look(both, 130.0) is not None
    starting = {**WELL, "s0": replace(WELL["s0"], ready=False)}
    assert watch.look(both, 140.0, dict(starting)) is None


def test_a_masters_new_life_is_given_time() -> None:
    watch = Watch()
    watch.look(AWAY, 0.0)
    assert watch.look(replace(AWAY, epoch=2), 200.0) is None
    assert watch.look(replace(AWAY, epoch=2), 330.0) is not None


def test_a_run_that_ends_is_left_alone() -> None:
    for ending in (replace(AWAY, stopping=True), replace(AWAY, stopped=True)):
        watch = Watch()
        assert not any(watch.look(ending, float(now_s)) for now_s in range(0, 1000, 10))


def test_pauses_grow_when_a_new_life_does_not_help() -> None:
    watch = Watch()
    ended = [now_s for now_s in range(0, 3000, 10) if watch.look(AWAY, float(now_s))]
    # 120 s of patience after each; then the pauses of 120, 240, 480, ... s are longer than it.
    assert [later - earlier for earlier, later in itertools.pairwise(ended)] == [130, 240, 480, 960]


STUCK = replace(STATUS, phase="COMMIT", waiting_code="commit", waiting_slaves=("s1",), rounds_committed=4)


def test_a_slave_that_a_round_waits_for_alone_is_ended() -> None:
    watch = Watch()
    endings = [watch.look(STUCK, float(now_s)) for now_s in range(0, 700, 10)]
    (ending,) = [one for one in endings if one]
    assert (ending.slave, endings.index(ending)) == ("s1", 60)
    assert "rounds have waited for it alone for 600 s" in ending.reason


def test_aborted_rounds_between_do_not_make_it_innocent_and_a_committed_one_does() -> None:
    between = replace(STATUS, phase="WINDOW", waiting_code="aborted_round")
    watch = Watch()
    watch.look(STUCK, 0.0)
    watch.look(replace(between, rounds_committed=4), 300.0)
    assert watch.look(STUCK, 610.0) is not None
    watch = Watch()
    watch.look(STUCK, 0.0)
    watch.look(replace(between, rounds_committed=5), 300.0)
    assert watch.look(replace(STUCK, rounds_committed=5), 610.0) is None


def test_nobody_is_blamed_when_several_are_waited_for() -> None:
    several = replace(STUCK, waiting_code="prepare", waiting_slaves=("s0", "s1"))
    watch = Watch()
    assert not any(watch.look(several, float(now_s)) for now_s in range(0, 2000, 10))
    in_turn = [replace(STUCK, waiting_code="measure", waiting_slaves=(f"s{n}",)) for n in (0, 1)]
    watch = Watch()
    assert not any(watch.look(in_turn[now_s // 10 % 2], float(now_s)) for now_s in range(0, 2000, 10))


# ---- the pods as the API gives them ----

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


def test_a_master_that_does_not_answer_means_do_nothing() -> None:
    def silent() -> StatusReply:
        raise RetryLater("the master does not answer")

    pods, clock = Pods(), iter(range(0, 10_000, 60))
    supervisor = SlaveSupervisor("run", 2, silent, pods, PATIENCE, lambda: float(next(clock)), lambda: NOW)
    assert not any(supervisor.tick() for _ in range(50))
    assert not pods.ended
