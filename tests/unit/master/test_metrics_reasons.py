"""Reasons as label values: each reason that the state gives has its code, and the set of codes is fixed."""

from __future__ import annotations

import math

import pytest
from support.master_bench import Bench

from dips.core.errors import RefusalCode
from dips.core.messages import Commit, Measure, OperatorRequest, Prepare, Refusal, VerdictKind
from dips.master.metrics import REASONS
from dips.master.state.events import Pause
from dips.master.state.penalty import judge
from dips.master.state.penalty_types import PRESETS, ClusterStatistics, DetectorState, Participant
from dips.master.state.reasons import VerdictCode, WaitingCode
from dips.master.state.waits import waiting_for

KNOWN = ClusterStatistics(accepted=20, mean=1.0, variance=0.01, mean_tokens=100.0, steps=4)
STATE = DetectorState((("a", KNOWN),), norms=(1.0,) * 10, scores=(1.0,) * 10)


@pytest.mark.parametrize(
    ("pushed", "code"),
    [
        ({"bad": 3}, "not_finite"),
        ({"squared": math.inf}, "not_finite"),
        ({"squared": 400.0}, "norm"),
        ({"squared": 16.0}, "score"),
        ({"tokens": -1.0}, "tokens"),
        ({"squared": 0.0}, "zero"),
    ],
)
def test_the_detectors_reasons_have_codes(pushed: dict[str, float], code: str) -> None:
    given = {"tokens": 100.0, "bad": 0, "squared": 1.0, **pushed}
    participant = Participant("a", given["tokens"], int(given["bad"]), 4)
    judgement = judge(STATE, PRESETS["safe"], [participant], [[given["squared"]]], frozenset({"a"}), 100.0)
    assert judgement.rejected["a"].code == code
    assert code in REASONS["excluded"]


def aborted(bench: Bench) -> list[str]:
    """The codes of the verdicts ABORTED so far."""
    lines = [line for line in bench.recorded("verdict") if line["verdict"] == "ABORTED"]
    assert all(line["code"] in REASONS["aborted"] for line in lines)
    return [line["code"] for line in lines]


def test_an_upload_that_stands_still_is_a_ticket_that_ran_out() -> None:
    bench = Bench(ticket_ttl_s=30.0).running("a", "b")
    bench.begin_push("a")
    bench.advance(40.0)
    assert aborted(bench) == ["ticket"]


def test_a_push_of_a_cluster_that_went_or_joined_anew() -> None:
    bench = Bench().running("a", "b")
    bench.begin_push("a")
    bench.join("a")
    bench.begin_push("b")
    bench.leave("b")
    assert aborted(bench) == ["rejoined", "gone"]


def test_a_push_whose_slave_was_lost() -> None:
    bench = Bench().running("a", "b")
    bench.push("a")
    bench.slaves[0].die()
    assert aborted(bench) == ["slave_lost"]


def test_a_push_that_arrived_as_something_else() -> None:
    bench = Bench().running("a", "b")
    bench.begin_push("a")
    bench.stage("a")
    bench.finish_push("a", digests={"s0": b"another", "s1": b"another"})
    assert aborted(bench) == ["digest"]


def test_a_round_that_a_slave_refuses_for_good() -> None:
    bench = Bench().running("a", "b")
    bench.slaves[0].refuse["measure"] = Refusal(RefusalCode.UNKNOWN_PUSH, "no such push")
    bench.push("a")
    bench.push("b")
    assert aborted(bench) == ["refused", "refused"]


def test_every_code_is_a_reason_of_some_verdict() -> None:
    assert set(REASONS) == {kind.name.lower() for kind in VerdictKind}
    assert all(VerdictCode.OTHER in codes and len(set(codes)) == len(codes) for codes in REASONS.values())
    assert {code for codes in REASONS.values() for code in codes} == set(VerdictCode)


# ---- what the run waits for ----


def word_of(bench: Bench) -> str:
    """The code of what the run waits for; there is a sentence where there is a code."""
    waiting = waiting_for(bench.state.shared)
    assert (waiting.code is WaitingCode.NONE) == (waiting.sentence == ""), waiting
    return waiting.code.value


def test_a_run_begins_with_slaves_clusters_and_the_first_push() -> None:
    bench = Bench()
    assert word_of(bench) == "slaves"
    bench.attach_all()
    bench.join("a")
    assert word_of(bench) in ("slaves", "first_push")  # the slaves make their memory meanwhile
    bench.seed("a")
    assert word_of(bench) == "none"


def test_a_slave_that_is_away_a_pause_and_no_cluster() -> None:
    bench = Bench().running("a")
    bench.slaves[1].die()
    assert word_of(bench) == "slaves"
    bench.slaves[1].attach()
    bench.operate(Pause(OperatorRequest("test", "lunch")))
    assert word_of(bench) == "paused"
    other = Bench().running("a")
    other.leave("a")
    assert word_of(other) == "no_clusters"


@pytest.mark.parametrize(("step", "word"), [(Measure, "measure"), (Prepare, "prepare"), (Commit, "commit")])
def test_a_slave_that_works_on_a_step_of_the_round(step: type, word: str) -> None:
    bench = Bench().running("a", "b")
    bench.slaves[0].hold.add(step)
    bench.push("a")
    bench.push("b")
    assert word_of(bench) == word
    assert waiting_for(bench.state.shared).slaves == ("s0",)
    assert bench.status().waiting_slaves == ("s0",)
    assert bench.status().waiting_for.startswith("slave s0 has yet to ")
    bench.slaves[0].release(step)
    assert word_of(bench) == "none"


def test_several_slaves_have_yet_to_do_a_step() -> None:
    bench = Bench().running("a", "b")
    for slave in bench.slaves:
        slave.hold.add(Commit)
    bench.push("a")
    bench.push("b")
    assert bench.status().waiting_for == "slaves s0, s1 have yet to flip to the new version"
