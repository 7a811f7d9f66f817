"""How long a cluster waits for others: derived from two settings of the master, and in an order that makes sense."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.cluster_bench import SETTINGS, ClusterBench, session_config

from dips.core.assumptions import violations
from dips.core.messages import Settings, VerdictKind
from dips.core.protocol import FINISH_HOLD_S
from dips.master.config import MasterConfig
from dips.worker.state.effects import Failed, Install
from dips.worker.state.waiting import HEADROOM, PASSED_OVER, REMEMBERED, ExchangeStage, WaitPolicy, times_of

MEASURED = replace(SETTINGS, verdict_wait_measured=True)
"""verdict_wait_s stays the most."""


@pytest.mark.parametrize("heartbeat_s", [0.1, 0.5, 1.0, 2.0])
def test_a_call_that_the_master_holds_on_purpose_is_waited_for(heartbeat_s: float) -> None:
    """Else a cluster whose slave lost the word STAGED never hears what to send again."""
    times = times_of(session_config(), Settings(heartbeat_s=heartbeat_s))
    assert times.call_deadline_s > FINISH_HOLD_S


@given(heartbeat_s=st.floats(0.01, 600.0), beats=st.integers(3, 1000), rounds=st.floats(2.0, 1000.0))
def test_whatever_is_derived_is_in_order(heartbeat_s: float, beats: int, rounds: float) -> None:
    round_timeout_s = max(rounds * heartbeat_s, 1.1)
    settings = Settings(heartbeat_s=heartbeat_s, evict_after_beats=beats, round_timeout_s=round_timeout_s)
    assert not violations("worker", asdict(times_of(session_config(), settings)))
    knobs = {"heartbeat_s": heartbeat_s, "evict_after_beats": beats, "round_timeout_s": round_timeout_s}
    MasterConfig(run_id="r", directory="d", lease_ttl_s=1e9, **knobs)


NAMES = ("call_deadline_s", "retry_max_s", "leave_wait_s", "data_silence_s", "data_stall_s")


SOME = st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 1000.0))


@given(SOME, st.floats(0.1, 60.0), st.floats(2.0, 100.0))
def test_what_was_set_stands_and_others_follow_it(knobs: dict[str, float], heartbeat_s: float, beats: float) -> None:
    """Of settings that contradict each other the cluster never hears: ClientConfig refuses them."""
    assume(not violations("worker", {**dict.fromkeys(NAMES, "auto"), **knobs}))
    settings = Settings(heartbeat_s=heartbeat_s, round_timeout_s=beats * heartbeat_s)
    times = asdict(times_of(session_config(**knobs), settings))
    assert times | knobs == times
    assert not violations("worker", times)


def wait_of(patience: WaitPolicy, began_s: float, took_s: float) -> None:
    patience.enter(ExchangeStage.BEGIN, MEASURED, began_s)
    patience.over(began_s + took_s)
    patience.train_on(began_s + took_s)


def test_the_bound_is_what_exchanges_took_and_some_headroom() -> None:
    patience = WaitPolicy(answers_in_steps=False)
    for n in range(REMEMBERED):
        wait_of(patience, 100.0 * n, 1.0 + n / 100)
    usual_s = 1.0 + (REMEMBERED - 1 - (REMEMBERED - 1) // PASSED_OVER) / 100
    assert patience.bound_s(MEASURED) == pytest.approx(HEADROOM * usual_s)
    assert patience.bound_s(replace(MEASURED, verdict_wait_s=0.5)) == 0.5, "never longer than the setting"
    assert patience.bound_s(SETTINGS) == SETTINGS.verdict_wait_s, "a number that was set is meant"


def test_a_few_long_waits_do_not_count_and_many_are_believed() -> None:
    patience = WaitPolicy(answers_in_steps=False)
    for n in range(REMEMBERED):
        wait_of(patience, 100.0 * n, 1.0)
    for n in range((REMEMBERED - 1) // PASSED_OVER):
        wait_of(patience, 1e6 + 100.0 * n, 9.0)
        assert patience.bound_s(MEASURED) == pytest.approx(HEADROOM)
    wait_of(patience, 2e6, 9.0)
    assert patience.bound_s(MEASURED) == pytest.approx(HEADROOM * 9.0)


def test_push_and_pull_are_one_wait() -> None:
    patience = WaitPolicy(answers_in_steps=False)
    wait_of(patience, 0.0, 1.0)
    patience.enter(ExchangeStage.BEGIN, MEASURED, 100.0)
    patience.enter(ExchangeStage.PULL, MEASURED, 100.9)
    assert patience.until_s == pytest.approx(100.0 + HEADROOM)
    patience.enter(ExchangeStage.PULL, MEASURED, 120.0)
    assert patience.until_s == pytest.approx(120.0 + HEADROOM), "a pull after steps on old parameters has its own"
    patience.over(120.5)
    assert max(patience._waits_s) == pytest.approx(20.5)


def exchange(life: ClusterBench, takes_s: float) -> None:
    life.train(4)
    life.goes_on("await")
    life.pass_s(takes_s)
    life.decide(VerdictKind.APPLIED)
    assert isinstance(life.pulled(), Install)


def test_a_cluster_waits_for_a_dead_run_no_longer_than_it_waited_for_a_live_one() -> None:
    life = ClusterBench(settings=MEASURED)
    life.begin()
    for _ in range(3):
        exchange(life, 2.0)
    life.train(4)
    life.goes_on("await")
    assert life.waits
    life.pass_s(2.0)
    assert life.waits
    life.pass_s(2.0 * (HEADROOM - 1) + 0.01)
    assert not life.waits, "nothing came: train on"
    life.train(3)
    life.pass_s(5.0)
    life.decide(VerdictKind.APPLIED)
    life.pulled()
    assert life.session.shared.work.pending.steps == 3, "what was made meanwhile is kept"


def test_a_push_that_fails_ends_the_wait_and_is_not_taken_for_the_usual_time() -> None:
    life = ClusterBench(settings=MEASURED)
    life.begin()
    exchange(life, 1.0)
    life.train(4)
    life.say(Failed(life.ticket()[0], "the slave is away"))
    assert not life.waits
    life.pass_s(60.0)
    life.merged()
    life.pulled()
    assert life.session.shared.patience.bound_s(MEASURED) < 2.0
    assert not math.isinf(life.session.shared.patience.until_s)
