"""The slave's decisions in a round: measure, prepare, commit, abort; what is repeated and what must wait."""

from __future__ import annotations

from typing import Any

import pytest
from support.slave_bench import (
    BASE,
    FULL,
    FULL_NOW,
    NEXT,
    R1,
    R2,
    R3,
    SHADOW,
    V0,
    V1,
    V2,
    A,
    B,
    SlaveBench,
    commit,
    configure,
    measure,
    only,
    prepare,
    runs,
    said,
    snapshot,
)
from support.slave_wire import open_staging

from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.core.messages import (
    AbortRound,
    BlockGram,
    Commit,
    Configure,
    ConfigureRefused,
    Flipped,
    Measure,
    Measured,
    Prepare,
    Prepared,
    Ready,
    RoundRefused,
)
from dips.slave.state import effects, events
from dips.slave.state.shard import ShardPhase
from dips.slave.state.slave import MAX_WAITING

# ---- rounds ----


def test_a_measure_knows_the_bases_of_its_pushes_and_says_their_directions(bench: SlaveBench) -> None:
    (opened,) = only(bench.command(open_staging(B, 1, base=V0)), effects.OpenSlot)
    bench.give(events.PushStaged(opened.slot, b"digest"))
    (run,) = runs(bench.command(measure(R2, V0, A, B)), Measure)
    assert [(slot.number, slot.base) for slot in run.slots] == [(0, None), (1, V0)]
    measured = Measured(R2, (BlockGram(0, (1.0, 0.5, 1.0), (0, 0)),), (1.0, 2.0, 3.0))
    assert said(bench.give(events.Done(bench.job(), measured))) == [measured]


def test_every_command_of_a_round_is_answered_again_and_not_done_again(bench: SlaveBench) -> None:
    bench.command(measure())
    first = said(bench.measured())
    again = bench.command(measure())
    assert said(again) == first
    bench.prepare()
    first = said(bench.prepared(SHADOW))
    out = bench.prepare()
    assert said(out) == first
    assert not runs(out, Prepare)
    bench.command(commit())
    first = said(bench.committed(NEXT))
    out = bench.command(commit())
    assert said(out) == first
    assert not runs(out, Commit)


def test_commands_wait_for_the_job_and_keep_their_order(bench: SlaveBench) -> None:
    bench.command(measure())
    assert bench.prepare() == []
    assert bench.command(AbortRound(R2, "late")) == []
    out = bench.measured()
    assert isinstance(said(out)[0], Measured)
    assert runs(out, Prepare)
    out = bench.prepared(SHADOW)
    assert said(out) == [Prepared(R2, SHADOW.digest)]
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    assert bench.phase is ShardPhase.READY


def test_abort_drops_the_shadow_and_the_round_never_comes_back(prepared_bench: SlaveBench) -> None:
    out = prepared_bench.command(AbortRound(R2, "a slave was lost"))
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    assert SHADOW not in prepared_bench.state.shard.snapshots
    (refused,) = said(prepared_bench.command(commit()))
    assert isinstance(refused, RoundRefused)
    assert (refused.command, refused.refusal.code) == ("commit", RefusalCode.VERSION_GONE)


def test_abort_of_another_round_keeps_the_shadow(prepared_bench: SlaveBench) -> None:
    assert not only(prepared_bench.command(AbortRound(R1, "old news")), effects.DropShadow)
    assert prepared_bench.phase is ShardPhase.PREPARED


@pytest.mark.parametrize("body", [measure(R3), prepare(R3)])
def test_a_later_round_drops_a_shadow_whose_abort_was_lost(prepared_bench: SlaveBench, body: Any) -> None:
    out = prepared_bench.command(body)
    assert only(out, effects.DropShadow) == [effects.DropShadow(SHADOW)]
    measuring, preparing = runs(out, Measure), runs(out, Prepare)
    assert measuring or preparing


def test_a_round_that_is_over_is_refused(bench: SlaveBench) -> None:
    bench.command(AbortRound(R3, "late"))
    for body in (measure(), prepare()):
        (refused,) = said(bench.command(body))
        assert isinstance(refused, RoundRefused)
        assert refused.refusal.code is RefusalCode.STALE_EPOCH


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (measure(R2, V1), RefusalCode.VERSION_GONE),
        (measure(R2, V0, B), RefusalCode.UNKNOWN_PUSH),
        (measure(R2, V0, A, B), RefusalCode.UNKNOWN_PUSH),
        (prepare(from_version=V1, to=V2), RefusalCode.VERSION_GONE),
        (prepare(from_version=None), RefusalCode.SEED_EXISTS),
        (prepare(to=V0), RefusalCode.MALFORMED),
        (prepare(to=Version(0, 9)), RefusalCode.MALFORMED),
        (prepare(weights=(0.5, 0.5)), RefusalCode.MALFORMED),
        (prepare(weights=(float("nan"),)), RefusalCode.NONFINITE),
        (prepare(scale=float("inf")), RefusalCode.NONFINITE),
        (prepare(gradient_weight=float("nan")), RefusalCode.NONFINITE),
    ],
)
def test_an_impossible_round_is_refused_and_changes_nothing(bench: SlaveBench, body: Any, code: RefusalCode) -> None:
    out = bench.command(body)
    (refused,) = said(out)
    assert isinstance(refused, RoundRefused)
    assert refused.refusal.code is code
    assert refused.command == type(body).__name__.lower()
    assert bench.phase is ShardPhase.READY


def test_the_seed_takes_exactly_one_push() -> None:
    bench = SlaveBench()
    bench.ready()
    bench.stage(A, 0)
    (refused,) = said(bench.command(prepare(R1, V0, None, accepted=prepare().accepted * 2, weights=(0.5, 0.5))))
    assert isinstance(refused, RoundRefused)
    (run,) = runs(bench.command(prepare(R1, V0, None)), Prepare)
    assert run.command == prepare(R1, V0, None)
    bench.prepared(snapshot(V0, R1, committed=False))
    bench.command(commit(R1, V0))
    assert said(bench.committed(BASE)) == [Flipped(R1, V0)]


def test_a_commit_goes_only_forward_until_the_disk_takes_it(prepared_bench: SlaveBench) -> None:
    (first,) = runs(prepared_bench.command(commit()), Commit)
    for _ in range(3):
        out = prepared_bench.failed(FULL_NOW)
        assert said(out) == [RoundRefused(R2, "commit", FULL_NOW)]
        (again,) = runs(out, Commit)
        assert (again.shadow, again.command, again.delay_s) == (SHADOW, first.command, 1.5)
        assert prepared_bench.phase is ShardPhase.COMMITTING
    assert said(prepared_bench.committed(NEXT)) == [Flipped(R2, V1)]


def test_a_promotion_goes_only_forward_too() -> None:
    bench = SlaveBench((SHADOW, BASE))
    bench.attach()
    bench.command(configure(SHADOW))
    out = bench.failed(FULL_NOW)
    assert said(out) == [ConfigureRefused(FULL_NOW)]
    (again,) = runs(out, Configure)
    assert (again.source, again.delay_s) == (SHADOW, 1.5)
    assert said(bench.loaded(NEXT)) == [Ready(V1, NEXT.digest)]


def test_a_failed_commit_keeps_the_shadow_and_can_be_sent_again(prepared_bench: SlaveBench) -> None:
    prepared_bench.command(commit())
    assert said(prepared_bench.failed(FULL)) == [RoundRefused(R2, "commit", FULL)]
    assert runs(prepared_bench.command(commit()), Commit)


def test_a_commit_of_another_round_is_refused(prepared_bench: SlaveBench) -> None:
    for body in (commit(R3, V1), commit(R2, V2)):
        (refused,) = said(prepared_bench.command(body))
        assert isinstance(refused, RoundRefused)
        assert "send Configure" in refused.refusal.sentence


def test_a_commit_that_ends_without_a_stream_still_flips(prepared_bench: SlaveBench) -> None:
    prepared_bench.command(commit())
    prepared_bench.give(events.Unlinked("reset"))
    assert said(prepared_bench.committed(NEXT)) == []
    assert prepared_bench.state.shard.current == NEXT
    prepared_bench.attach(2)
    assert said(prepared_bench.command(configure(NEXT))) == [Ready(V1, NEXT.digest)]


def test_the_end_of_a_job_that_is_over_changes_nothing(bench: SlaveBench) -> None:
    bench.command(measure())
    job = bench.job()
    bench.measured()
    out = bench.give(events.Failed(job, FULL))
    assert said(out) == []
    assert bench.phase is ShardPhase.READY


def test_too_many_waiting_commands_close_the_stream(bench: SlaveBench) -> None:
    bench.command(measure())
    for _ in range(MAX_WAITING):
        assert bench.command(measure()) == []
    assert only(bench.command(measure()), effects.CloseLink)
