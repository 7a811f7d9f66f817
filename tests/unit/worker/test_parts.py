"""The small parts: retries, speed, vectors, the table of refusals, settings."""

from __future__ import annotations

import math

import pytest
from support.cluster_bench import session_config

from dips.core.config import load
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.messages import Caller, LeaveRequest, Settings
from dips.worker.config import ClientConfig, check
from dips.worker.pace import StepTimer
from dips.worker.state.shared import Remedy, remedy_for
from dips.worker.state.waiting import RepeatedCall, times_of

DEFAULT_TIMES = times_of(session_config(), Settings())


def leave() -> LeaveRequest:
    return LeaveRequest(Caller("run", 1, "a"), "x")


def test_a_lane_asks_once_until_it_is_answered() -> None:
    lane = RepeatedCall(lambda: DEFAULT_TIMES)
    lane.ask(leave, 1.0)
    assert lane.take(1, 0.9) is None
    assert lane.take(2, 1.0) == leave()
    assert lane.take(3, 5.0) is None
    assert lane.job == 2
    lane.answered()
    assert lane.idle


def test_a_lane_pauses_longer_after_each_failure_and_forgets_that_once_put_off() -> None:
    lane = RepeatedCall(lambda: DEFAULT_TIMES)
    lane.ask(leave, 0.0)
    for pause_s in (0.2, 0.4, 0.8, 1.0, 1.0):
        lane.failed(0.0)
        assert lane.due_s == pytest.approx(pause_s)
    lane.put_off(0.0, 0.0)
    assert lane.due_s == pytest.approx(0.05)
    lane.put_off(0.0, 5.0)
    assert lane.due_s == 5.0, "who is busy says itself when to come again"
    lane.put_off(0.0, 99.0)
    assert lane.due_s == DEFAULT_TIMES.put_off_max_s
    lane.failed(0.0)
    assert lane.due_s == pytest.approx(0.2)


def test_the_pace_leaves_out_the_first_step_pauses_and_gaps_between_step_and_resume() -> None:
    pace = StepTimer()
    pace.resume(0.0)
    pace.stepped(100, 9.0, 50.0)  # compilation
    assert (pace.tokens_per_s, pace.steps_per_s) == (0.0, 0.0)
    assert math.isnan(pace.loss)
    pace.resume(100.0)  # the exchange took 50 s
    pace.pause(1.0)  # data took 1 s
    pace.stepped(100, 2.0, 103.0)
    pace.resume(103.0)
    pace.stepped(300, math.nan, 105.0)
    assert pace.tokens_per_s == pytest.approx(100.0)
    assert pace.steps_per_s == pytest.approx(0.5)
    assert pace.loss == 2.0


def test_the_pace_follows_a_change_of_speed_within_a_window() -> None:
    pace = StepTimer()
    for i in range(40):
        pace.resume(10.0 * i)
        pace.stepped(10, 1.0, 10.0 * i + 1.0)
    for i in range(32):
        pace.resume(1000.0 * i)
        pace.stepped(10, 1.0, 1000.0 * i + 5.0)
    assert pace.tokens_per_s == pytest.approx(2.0)


def test_every_refusal_has_a_remedy_and_push_remedies_only_count_in_a_push() -> None:
    for code in RefusalCode:
        for joining in (False, True):
            for pushing in (False, True):
                remedy = remedy_for(Refused(code, "x"), joining=joining, pushing=pushing)
                assert isinstance(remedy, Remedy)
                if not pushing:
                    assert remedy in (Remedy.JOIN_AGAIN, Remedy.WAIT, Remedy.GIVE_UP)
                if joining:
                    assert remedy is not Remedy.JOIN_AGAIN, "two processes of one name would fence each other for ever"


@pytest.mark.parametrize("code", list(RefusalCode))
def test_whatever_names_a_time_to_retry_is_retried(code: RefusalCode) -> None:
    assert remedy_for(Refused(code, "x", 1.0), joining=True, pushing=False) is Remedy.WAIT


@pytest.mark.parametrize("field", ["call_deadline_s", "data_silence_s", "sync_every", "outer_lr"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load(ClientConfig, "worker", environment={}, overrides={field: 0})


def test_a_name_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_id"):
        check(ClientConfig(master="127.0.0.1:1", cluster_id="a", run_id="No Name"))
