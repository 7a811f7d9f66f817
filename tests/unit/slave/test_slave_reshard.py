"""A slave's part in a RESHARD: listing, putting a new shard together, giving it up, loading it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.slave_bench import SlaveBench, answer, configure, measure, only, runs, said
from support.slave_values import ASYNC, BASE, FULL, PLACEMENT, R1, R2, R3, V0, V1, V2, WELCOME
from support.slave_wire import LAYOUT, configure_for, placement_over

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.placement import Placement
from dips.slave.state import effects
from dips.slave.state.shard import ShardPhase

WIDER = placement_over("s0", "s1")
ELSEWHERE = placement_over("s1")
MOVED = messages.SnapshotInfo(V1, R2, LAYOUT.layout_hash, WIDER.placement_hash, b"theta", False)


def spec(placement: Placement, endpoint: str = "tcp://127.0.0.1:1") -> messages.PlacementSpec:
    addresses = tuple(messages.SlaveAddress(slave, endpoint) for slave in placement.slaves)
    return messages.PlacementSpec(addresses, placement.slave_of_block, placement.placement_hash)


def move(**changes: object) -> messages.MoveBlocks:
    hashes, specs = (LAYOUT.layout_hash,), (spec(WIDER), spec(PLACEMENT))
    body = messages.MoveBlocks(R2, V0, V1, LAYOUT, *hashes, *specs, 4, 2, b"theta", b"momentum")
    return replace(body, **changes)  # type: ignore[arg-type]


def phase_of(bench: SlaveBench) -> ShardPhase:
    """Read again: a type checker holds a property for what it was found to be before."""
    return bench.phase


@pytest.fixture
def ready() -> SlaveBench:
    bench = SlaveBench().ready(BASE)
    return bench


def test_checksums_are_listed_of_the_current_version_alone(ready: SlaveBench) -> None:
    (work,) = runs(ready.command(messages.ListShard(R2, V0)), messages.ListShard)
    assert phase_of(ready) is ShardPhase.LISTING
    out = ready.give(effects.Done(work.number, messages.ShardList(R2, (1, 2), (3, 4))))
    assert said(out) == [messages.ShardList(R2, (1, 2), (3, 4))]
    assert phase_of(ready) is ShardPhase.READY
    refused = answer(ready.command(messages.ListShard(R2, V1)), messages.RoundRefused)
    assert (refused.command, refused.refusal.code) == ("listshard", RefusalCode.VERSION_GONE)


def test_the_same_command_again_is_answered_again(ready: SlaveBench) -> None:
    ready.command(move())
    ready.prepared(MOVED)
    assert said(ready.command(move())) == [messages.Prepared(R2, b"theta")]


def test_a_slave_without_blocks_whose_move_fails_has_none_still() -> None:
    bench = SlaveBench().attach()
    bench.command(move(sources=spec(ELSEWHERE)))
    refused = answer(bench.failed(FULL), messages.RoundRefused)
    assert (refused.round, refused.command, bench.phase) == (R2, "moveblocks", ShardPhase.EMPTY)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"from_version": V1, "to_version": V2}, RefusalCode.VERSION_GONE),
        ({"to_version": V0}, RefusalCode.MALFORMED),
        ({"placement": spec(ELSEWHERE)}, RefusalCode.CONFIG),
        ({"placement": replace(spec(WIDER), placement_hash=b"other")}, RefusalCode.CONFIG),
        ({"sources": replace(spec(PLACEMENT), slave_of_block=(0,))}, RefusalCode.CONFIG),
        ({"sources": spec(ELSEWHERE, endpoint="")}, RefusalCode.BUSY),
        ({"staging_slots": 1 << 20}, RefusalCode.MEMORY),
        ({"layout_hash": b"other"}, RefusalCode.LAYOUT),
    ],
)
def test_a_move_that_cannot_be_is_refused_before_anything_is_done(
    ready: SlaveBench, changes: dict[str, object], code: RefusalCode
) -> None:
    out = ready.command(move(**changes))
    refused = answer(out, messages.RoundRefused)
    assert (refused.command, refused.refusal.code) == ("moveblocks", code)
    assert not runs(out, messages.MoveBlocks)
    assert ready.phase is ShardPhase.READY


def test_a_move_in_chunks_that_the_data_port_cannot_serve_is_refused() -> None:
    bench = SlaveBench(settings=messages.Settings(chunk_bytes=1022)).attach()
    assert bench.refused(move(sources=spec(ELSEWHERE))).code is RefusalCode.CONFIG


def test_an_abort_ends_a_move_under_way_and_frees_its_file(ready: SlaveBench) -> None:
    ready.command(move())
    out = ready.command(messages.AbortRound(R2, "the operator took it back"))
    assert only(out, effects.CancelMove) == [effects.CancelMove(ready.job())]
    ready.prepared(MOVED)  # it was done already when the word came
    assert ready.state.shard.moved is None
    assert MOVED not in ready.state.shard.offers()


def test_a_new_master_ends_a_move_under_way(ready: SlaveBench) -> None:
    ready.command(move())
    ready.give(effects.Unlinked("the master died"))
    ready.link()
    out = ready.welcome(epoch=2)
    assert only(out, effects.CancelMove) == [effects.CancelMove(ready.job())]
    assert said(ready.failed(FULL)) == [], "no receiver asked for it"


def test_a_later_round_and_another_configure_free_the_file(ready: SlaveBench) -> None:
    ready.command(move())
    ready.prepared(MOVED)
    assert only(ready.command(measure(R3)), effects.DropShadow)
    ready.command(move(round=R3))
    ready.give(effects.Failed(ready.job(), FULL))
    ready.command(move(round=R3))
    again = replace(MOVED, round=R3)
    ready.done(again)
    out = ready.command(configure(BASE))
    assert only(out, effects.DropShadow) == [effects.DropShadow(again)]
    assert said(out) == [messages.Ready(V0, BASE.digest)]


def test_after_a_restart_the_file_is_offered_and_loaded(ready: SlaveBench) -> None:
    bench = SlaveBench((MOVED, BASE))
    hello = answer(bench.link(), messages.SlaveHello)
    assert MOVED in hello.snapshots
    bench.welcome(epoch=2)
    out = bench.command(configure_for(WIDER, load=V1, load_round=R2, load_digest=b"theta", commit_hash=b"hash"))
    assert runs(out, messages.Configure)[0].source == MOVED


def test_with_durability_async_nothing_is_saved_while_a_moved_shard_stands() -> None:
    bench = SlaveBench(settings=ASYNC).ready(BASE)
    bench.state.shard.saving.committed(replace(BASE, version=V0, round=R1, digest=b"newer"), b"{}", durable=False)
    bench.state.shard.saving.durable = None
    bench.command(move())
    assert not only(bench.prepared(MOVED), effects.SaveVersion)
    out = bench.command(messages.AbortRound(R2, "x"))
    assert only(out, effects.SaveVersion), "it goes on once the file is free"


def test_the_new_master_is_heard_although_a_move_runs(ready: SlaveBench) -> None:
    ready.command(move())
    out = ready.command(WELCOME, epoch=2)
    assert only(out, effects.SavePromise) == [effects.SavePromise(2)]
