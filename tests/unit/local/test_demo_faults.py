"""Faults happen once, at their time, to someone who is there; and are over when the victim is at work again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from support.run_status import cluster_status, run_status, slave_status

from dips.core.ids import Incarnation, Version
from dips.local.demo import HOLD_S, Hold, must_wait
from dips.local.local_run import LocalRun
from dips.local.report import CLUSTER, SLAVE, Fault, FaultPlan, Moment, PlannedFault
from dips.local.view import Progress

KILL_B = PlannedFault(CLUSTER, "b", 0.35)
KILL_S1 = PlannedFault(SLAVE, "s1", 0.60)


def plan_after_both() -> tuple[FaultPlan, list[Fault]]:
    plan = FaultPlan([KILL_B, KILL_S1])
    status = run_status(tokens=650_000)
    return plan, [plan.was_done(KILL_B, 71, status, 40.0), plan.was_done(KILL_S1, 72, status, 41.0)]


@pytest.mark.parametrize(
    ("tokens", "due"), [(0, []), (349_999, []), (350_000, [KILL_B]), (599_999, [KILL_B]), (600_000, [KILL_B, KILL_S1])]
)
def test_a_fault_is_due_at_its_share_of_the_tokens(tokens: int, due: list[PlannedFault]) -> None:
    assert FaultPlan([KILL_B, KILL_S1]).due(run_status(tokens=tokens)) == due


@pytest.mark.parametrize(
    "changes",
    [
        {"tk_max_tokens": 0},
        {"stopping": True},
        {"stopped": True},
        {"clusters": (cluster_status("b", alive=False),), "slaves": (slave_status("s1", alive=False),)},
        {"clusters": (), "slaves": ()},
    ],
)
def test_nobody_is_killed_who_is_not_there_or_when_the_run_ends(changes: dict[str, object]) -> None:
    plan = FaultPlan([KILL_B, KILL_S1])
    assert plan.due(run_status(tokens=900_000, **changes)) == []
    assert plan.never_happened == [KILL_B, KILL_S1]


def test_a_fault_happens_once_and_is_over_when_the_cluster_has_joined_as_a_new_incarnation() -> None:
    plan, faults = plan_after_both()
    assert plan.due(run_status(tokens=999_999)) == plan.never_happened == []
    assert plan.happened == faults
    assert (faults[0].pid, faults[0].incarnation) == (71, "1.4")
    assert faults[0].when == Moment(40.0, 650_000, 12)
    assert faults[0].what == "cluster b killed with SIGKILL"
    assert plan.observe(run_status(), 42.0) == [], "the master still thinks that the old one is alive"
    away = run_status(clusters=(cluster_status("b", incarnation=Incarnation(1, 5), alive=False),))
    assert plan.observe(away, 43.0) == []
    again = run_status(clusters=(cluster_status("b", incarnation=Incarnation(1, 5)),), tokens=700_000)
    assert plan.observe(again, 47.5) == [faults[0]]
    assert (faults[0].back, faults[0].back_as) == (Moment(47.5, 700_000, 12), "1.5")
    assert plan.observe(again, 48.0) == []
    early = FaultPlan([KILL_B]).was_done(KILL_B, 1, run_status(published=None), 1.0)
    assert early.when.version is None


def test_a_slave_is_back_only_with_the_published_version() -> None:
    plan, faults = plan_after_both()
    loading = slave_status("s1", incarnation=Incarnation(1, 6), version=Version(1, 11))
    assert plan.observe(run_status(slaves=(loading,)), 44.0) == []
    ready = slave_status("s1", incarnation=Incarnation(1, 6), version=Version(1, 12))
    assert plan.observe(run_status(slaves=(ready,)), 45.0) == [faults[1]]


NEAR_THE_END = {"tokens": 940_000, "rounds_committed": 47}
"""A round has 20 thousand tokens: three more may begin."""


def test_a_run_waits_near_its_end_for_who_is_not_back_and_for_a_fault_that_is_due() -> None:
    plan, faults = plan_after_both()
    near, early = run_status(**NEAR_THE_END), run_status(tokens=900_000, rounds_committed=45)
    assert [must_wait(status, plan) for status in (early, near)] == [False, True]
    for fault in faults:
        fault.back = Moment(50.0, 700_000, 14)
    assert not must_wait(near, plan)
    assert [must_wait(near, FaultPlan(planned)) for planned in ([], [KILL_B])] == [False, True]
    assert not must_wait(run_status(tokens=300_000, rounds_committed=1), FaultPlan([KILL_B])), "its time has not come"


class Master:
    """Counts what it is asked, and may be away."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = True

    def answer(self, request: Callable[[Any], object]) -> object:
        return request(self)

    def pause(self, reason: str) -> str | None:
        self.asked.append("pause")
        return "yes" if self.answers else None

    def resume(self, reason: str) -> str | None:
        self.asked.append("resume")
        return "yes" if self.answers else None


class Said:
    """What a person reads."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def held() -> tuple[Hold, FaultPlan, Master, Said]:
    plan, _ = plan_after_both()
    master, said = Master(), Said()
    return Hold(cast(LocalRun, master), plan, cast(Progress, said)), plan, master, said


def test_the_pause_ends_when_everything_is_back() -> None:
    hold, plan, master, said = held()
    master.answers = False
    hold.look(run_status(**NEAR_THE_END), 60.0)
    master.answers = True
    for now_s in (60.5, 61.0, 61.5):
        hold.look(run_status(**NEAR_THE_END), now_s)
    assert master.asked == ["pause", "pause"], "asked again while the master was away"
    for fault in plan.happened:
        fault.back = Moment(70.0, 940_000, 48)
    for now_s in (70.0, 70.5):
        hold.look(run_status(**NEAR_THE_END), now_s)
    assert master.asked == ["pause", "pause", "resume"]
    assert said.sentences == [
        "the run is almost at its end: paused until what was killed or cut off is back",
        "everything is back: the run goes on",
    ]


def test_a_run_does_not_wait_for_ever() -> None:
    hold, _, master, said = held()
    for now_s in (60.0, 60.0 + HOLD_S - 0.5, 60.0 + HOLD_S, 61.0 + HOLD_S):
        hold.look(run_status(**NEAR_THE_END), now_s)
    assert master.asked == ["pause", "resume"]
    assert said.sentences[-1] == "waited 10 min in vain: the run goes on"
