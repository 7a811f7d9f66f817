"""Reasons as label values: each reason that the state gives has its code, and the set of codes is fixed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.master_bench import Bench

from dips.core.errors import RefusalCode
from dips.core.messages import Commit, Measure, OperatorRequest, Prepare, Refusal
from dips.master.metrics import REASONS
from dips.master.state.effects import Pause
from dips.master.state.reasons import WaitingCode
from dips.master.state.status import waiting_for


def lost(bench: Bench) -> None:
    bench.push("a")
    bench.slaves[0].die()


def left(bench: Bench) -> None:
    bench.begin_push("a")
    bench.join("a")
    bench.begin_push("b")
    bench.leave("b")


def stood_still(bench: Bench) -> None:
    bench.begin_push("a")
    bench.advance(40.0)


def arrived_otherwise(bench: Bench) -> None:
    bench.begin_push("a")
    bench.stage("a")
    bench.finish_push("a", digests={"s0": b"another", "s1": b"another"})


def refused(bench: Bench) -> None:
    bench.slaves[0].refuse["measure"] = Refusal(RefusalCode.UNKNOWN_PUSH, "no such push")
    bench.pushes("a", "b")


@pytest.mark.parametrize(("happens", "codes"), [
    (stood_still, ["ticket"]), (left, ["rejoined", "gone"]), (lost, ["slave_lost"]), (arrived_otherwise, ["digest"]),
    (refused, ["refused", "refused"]),
])  # fmt: skip
def test_an_aborted_push_has_the_code_of_its_reason(happens: Callable[[Bench], None], codes: list[str]) -> None:
    bench = Bench(ticket_ttl_s=30.0).running("a", "b")
    happens(bench)
    lines = [line for line in bench.recorded("verdict") if line["verdict"] == "ABORTED"]
    assert [line["code"] for line in lines] == codes
    assert set(codes) <= set(REASONS["aborted"])


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


def test_a_slave_that_is_away_a_pause_and_no_cluster(bench: Bench) -> None:
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
    bench.pushes("a", "b")
    assert word_of(bench) == word
    assert waiting_for(bench.state.shared).slaves == ("s0",)
    assert bench.status().waiting_slaves == ("s0",)
    assert bench.status().waiting_for.startswith("slave s0 has yet to ")
    bench.slaves[0].release(step)
    assert word_of(bench) == "none"


def test_several_slaves_have_yet_to_do_a_step() -> None:
    bench = Bench().running("a", "b")
    bench.all_hold(Commit)
    bench.pushes("a", "b")
    assert bench.status().waiting_for == "slaves s0, s1 have yet to flip to the new version"
