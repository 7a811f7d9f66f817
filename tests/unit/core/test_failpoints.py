"""Failpoints do what their terms say, as often as these say, and nothing when they are not armed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.core.machine import MachineHistory, Phase
from dips.core.observe import failpoints
from dips.core.observe.failpoints import (
    CRASH_EXIT_CODE,
    FailpointAction,
    FailpointKind,
    Term,
    armed,
    copies,
    failpoint,
    install,
    parse,
)
from dips.master.state.records import ROUND_TABLE, RoundPhase

PLACE = "master.journal.before_commit"
OTHER = "master.journal.after_commit"
LOSING = "master.slave_stream.before_send"
SLEEP = FailpointKind.SLEEP.value
ENABLED = {"DIPS_FAILPOINTS_ENABLED": "1"}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.clear()
    yield
    failpoints.clear()


OFF, NOTE = FailpointAction(FailpointKind.OFF), FailpointAction(FailpointKind.NOTE)


def crash(exit_code: int) -> FailpointAction:
    return FailpointAction(FailpointKind.CRASH, exit_code=exit_code)


@pytest.mark.parametrize(("text", "terms"), [
    ("off", [Term(OFF)]), ("crash", [Term(crash(CRASH_EXIT_CODE))]), ("crash(9)", [Term(crash(9))]),
    (f"{SLEEP}(0.5)", [Term(FailpointAction(FailpointKind.SLEEP, delay_s=0.5))]),
    ("error", [Term(FailpointAction(FailpointKind.ERROR))]),
    ("error(no room)", [Term(FailpointAction(FailpointKind.ERROR, message="no room"))]),
    ("12.5%kill", [Term(FailpointAction(FailpointKind.KILL), chance=0.125)]),
    ("3*stop", [Term(FailpointAction(FailpointKind.STOP), turns=3)]),
    ("2*off -> 50%1*crash(1)->note", [Term(OFF, turns=2), Term(crash(1), chance=0.5, turns=1), Term(NOTE)]),
])  # fmt: skip
def test_a_term_is_chance_turns_action_and_argument(text: str, terms: list[Term]) -> None:
    assert parse(f"{PLACE}={text}") == {PLACE: tuple(terms)}


def test_entries_are_divided_by_semicolons_and_blanks_do_not_matter() -> None:
    assert set(parse(f" {PLACE} = off ;; {OTHER}=off; ")) == {PLACE, OTHER}
    assert parse("") == {}


@pytest.mark.parametrize(("text", "remedy"), [
    ("master.journal.before_comit=off", PLACE), ("nonsense=off", "core/observe/failpoints.py"),
    ("rounds.IDLE.abort=off", "round"), ("round.IDLE.push_admitted=error", "crash"), (f"{PLACE}=explode", "crash"),
    (f"{LOSING}=corrupt", "drop, dup"), (f"{PLACE}=drop", PLACE), (f"{PLACE}=off;{PLACE}=off", "->"),
    *((f"{PLACE}{wrong}", "") for wrong in (
        "", "=", "=off->", "=crash)9(", "=101%off", "=0%off", "=0*off", "=sleep", f"={SLEEP}(-1)", f"={SLEEP}(nan)",
        "=crash(256)", "=kill(9)")),
])  # fmt: skip
def test_a_mistake_is_refused_with_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="DIPS_FAILPOINTS") as caught:
        parse(text)
    assert remedy in str(caught.value)


def test_error_raises_and_hits_are_counted() -> None:
    with armed(f"{PLACE}=2*off->1*error(no room)->off"):
        assert failpoint(PLACE) is None
        assert failpoint(PLACE) is None
        with pytest.raises(OSError, match="no room"):
            failpoint(PLACE)
        assert failpoint(PLACE) is None
        assert failpoint(OTHER) is None, "another name is not armed"
        assert failpoints.hits() == {PLACE: 4}
        assert failpoints.fired() == {PLACE: {"error": 1}}
    assert failpoints.hits() == {}


def test_sleep_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with armed(f"{PLACE}={SLEEP}(2.5)"):
        assert failpoint(PLACE) is None
    assert slept == [2.5]


def test_an_error_without_words_names_its_failpoint_and_drop_and_dup_are_the_callers() -> None:
    with armed(f"{PLACE}=error"), pytest.raises(OSError, match=f"failpoint {PLACE}"):
        failpoint(PLACE)
    with armed(f"{LOSING}=1*drop->1*dup"):
        assert [copies(failpoint(LOSING)) for _ in range(3)] == [0, 2, 1]


def test_chances_come_from_a_seed_and_from_the_name_alone() -> None:
    def run(seed: int, others: str = "") -> list[bool]:
        with armed(f"{LOSING}=30%drop{others}", seed=seed):
            return [failpoint(LOSING) is not None or failpoint(PLACE) is not None for _ in range(200)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1) == run(1, f";{PLACE}=50%note"), "one failpoint's chances do not disturb another's"
    assert 30 < sum(run(1)) < 90


def test_a_chance_that_fails_goes_on_to_the_next_term() -> None:
    with armed(f"{LOSING}=1%drop->dup"):
        assert sum(copies(failpoint(LOSING)) for _ in range(200)) > 300


def test_an_arrow_of_a_table_is_hit_and_no_other() -> None:
    phase = Phase(ROUND_TABLE, MachineHistory())
    with armed("round.IDLE.push_admitted=note"):
        phase.move("push admitted", RoundPhase.WINDOW, 1.0)
        phase.move("no push is left", RoundPhase.IDLE, 2.0)
        assert failpoints.fired() == {"round.IDLE.push_admitted": {"note": 1}}


def test_a_process_arms_only_its_own_names_and_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    log = tmp_path / "fired"
    environment = {
        **ENABLED,
        "DIPS_FAILPOINTS": f"{PLACE}=1*note;session.JOINING.joined=crash",
        "DIPS_FAILPOINT_LOG": str(log),
    }
    with caplog.at_level(logging.WARNING):
        install("master", environment)
    assert f"failpoints are armed, this process will misbehave on purpose: {PLACE}" in caplog.text
    assert set(failpoints.hits()) == {PLACE}
    failpoint(PLACE)
    failpoint(PLACE)
    assert log.read_text().split()[:2] == [PLACE, "note"]


@pytest.mark.parametrize("environment", [{}, {"DIPS_FAILPOINTS_ENABLED": "0"}])
def test_the_variable_alone_arms_nothing_and_is_a_refusal_to_start(environment: dict[str, str]) -> None:
    armed_by_accident = {**environment, "DIPS_FAILPOINTS": f"{PLACE}=1*crash"}
    with pytest.raises(ConfigError, match=r"give --failpoints \(or DIPS_FAILPOINTS_ENABLED=1\)"):
        install("master", armed_by_accident)
    assert failpoints.hits() == {}
    install("master", armed_by_accident, enabled=True)
    assert failpoints.hits() == {PLACE: 0}


def test_installing_twice_does_not_give_turns_back() -> None:
    environment = {**ENABLED, "DIPS_FAILPOINTS": f"{PLACE}=1*error"}
    install("master", environment)
    with pytest.raises(OSError, match=PLACE):
        failpoint(PLACE)
    install("master", environment)
    assert failpoint(PLACE) is None
    failpoints.clear()
    install("master", environment)
    assert failpoints.hits() == {PLACE: 0}


@pytest.mark.parametrize(("terms", "seed", "words"), [
    ("slave.nothing=off", "1", "slave.nothing"), (f"{PLACE}=off", "one", "DIPS_FAILPOINTS_SEED is 'one'"),
])  # fmt: skip
def test_a_wrong_environment_is_refused(terms: str, seed: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        install("master", {**ENABLED, "DIPS_FAILPOINTS": terms, "DIPS_FAILPOINTS_SEED": seed})
