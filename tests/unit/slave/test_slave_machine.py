"""The slave's decisions: the bond with the master, rounds, idempotence, and what must wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.slave_bench import SlaveBench, answer, commit, configure, measure, only, runs, said, slot_of
from support.slave_values import BASE, FULL, NEXT, R1, R2, R3, SHADOW, V0, V1, V2, WELCOME, A, B, snapshot
from support.slave_wire import LAYOUT, configure_for, open_staging, placement_over

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, RoundId, Version
from dips.core.layout import Layout, Parameter
from dips.core.placement import shard_bytes_needed
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import Codec
from dips.slave.state import effects
from dips.slave.state.checks import find_load
from dips.slave.state.shard import ShardPhase


def test_hello_says_promise_and_snapshots() -> None:
    bench = SlaveBench((BASE,), promised=4)
    hello = answer(bench.link(), messages.SlaveHello)
    assert (hello.promised_epoch, hello.snapshots, hello.memory_bytes) == (4, (BASE,), 1 << 20)
    caller = bench.state.caller()
    assert (caller.epoch, caller.incarnation, caller.name) == (4, None, "s0")


def test_a_promise_is_said_only_when_it_is_durable() -> None:
    bench = SlaveBench()
    bench.link()
    bench.epoch, bench.incarnation = 7, Incarnation(7, 1)
    out = bench.command(WELCOME)
    assert only(out, effects.SavePromise) == [effects.SavePromise(7)]
    assert said(out) == []
    assert bench.state.caller().epoch == 0
    assert not runs(bench.command(configure()), messages.Configure), "a command of a master that has no promise yet"
    out = bench.give(effects.PromiseSaved(7))
    assert said(out) == [messages.Promised(7)]
    assert runs(out, messages.Configure)
    assert effects.Serve(7) in out
    assert bench.state.caller().epoch == 7


def test_a_welcome_that_is_overtaken_is_not_promised_aloud() -> None:
    bench = SlaveBench()
    bench.link()
    bench.command(WELCOME, epoch=1)
    bench.command(WELCOME, epoch=2)
    assert said(bench.give(effects.PromiseSaved(1))) == []
    assert said(bench.give(effects.PromiseSaved(2))) == [messages.Promised(2)]


def test_a_promise_saved_after_the_stream_ended_counts_but_is_not_said() -> None:
    bench = SlaveBench()
    bench.link()
    bench.command(WELCOME)
    bench.give(effects.Unlinked("lost"))
    assert said(bench.give(effects.PromiseSaved(1))) == []
    assert bench.state.link.promised_epoch == 1


def test_a_promise_that_is_still_being_saved_refuses_an_older_master_over_the_next_stream() -> None:
    bench = SlaveBench()
    bench.link()
    bench.command(WELCOME, epoch=3)
    bench.give(effects.Unlinked("lost"))
    bench.link()
    out = bench.command(WELCOME, epoch=2)
    assert only(out, effects.SavePromise) == []
    (closed,) = only(out, effects.CloseLink)
    assert "epoch 2 is older than 3" in closed.sentence


@pytest.mark.parametrize(("changes", "why"), [
    ({"epoch": 0}, "older than 1"), ({"epoch": 2}, "never promised"),
    ({"incarnation": Incarnation(1, 2)}, "is for incarnation 1.2"), ({"incarnation": None}, "is for incarnation None"),
    ({"run_id": "other"}, "names run 'other'"),
])  # fmt: skip
def test_nothing_from_elsewhere_changes_state(bench: SlaveBench, changes: dict[str, Any], why: str) -> None:
    out = bench.command(measure(), **changes)
    assert not runs(out, messages.Measure)
    assert bench.phase is ShardPhase.READY
    (record,) = only(out, effects.Record)
    assert why in str(record.fields["reason"])


def test_without_a_right_welcome_nothing_is_obeyed() -> None:
    bench = SlaveBench()
    bench.link()
    assert not runs(bench.command(configure()), messages.Configure)
    assert only(bench.command(WELCOME, incarnation=None), effects.CloseLink)
    (given_up,) = only(bench.command(replace(WELCOME, hello=messages.Hello(7, 9))), effects.GiveUp)
    assert given_up.refusal.code is RefusalCode.PROTOCOL_VERSION


def test_the_same_incarnation_keeps_stagings_and_says_them_again(bench: SlaveBench) -> None:
    bench.give(effects.Unlinked("reset"))
    bench.link()
    assert bench.state.caller().incarnation == bench.incarnation
    out = bench.welcome(1, 1)
    assert said(out) == [messages.Promised(1), messages.Staged(A, 1, b"digest")]
    assert not only(out, effects.HoldSlots)


def test_a_new_incarnation_has_no_stagings_and_a_fenced_slave_asks_for_one(bench: SlaveBench) -> None:
    bench.give(effects.Unlinked("reset"))
    bench.link()
    out = bench.welcome(2, 1)
    assert only(out, effects.HoldSlots) == [effects.HoldSlots(())]
    assert said(out) == [messages.Promised(2)]
    assert bench.refused(measure(RoundId(2, 1))).code is RefusalCode.UNKNOWN_PUSH
    bench.give(effects.Fenced())
    assert bench.state.caller().incarnation is None


def test_stop_is_obeyed_at_once_also_during_a_job(bench: SlaveBench) -> None:
    bench.command(measure())
    assert bench.command(messages.StopSlave("the run ended")) == [messages.StopSlave("the run ended")]


def test_a_command_that_waits_for_a_job_ends_with_its_stream(bench: SlaveBench) -> None:
    bench.command(measure())
    assert bench.command(measure(RoundId(1, 9))) == []
    assert bench.state.n_waiting == 1
    bench.give(effects.Unlinked("reset"))
    assert not only(bench.measured(), effects.Run)


def test_configure_promotes_a_shadow_in_memory(prepared_bench: SlaveBench) -> None:
    prepared_bench.give(effects.Unlinked("reset"))
    prepared_bench.attach(2)
    (run,) = runs(prepared_bench.command(configure(SHADOW)), messages.Configure)
    assert run.shadow == SHADOW
    assert said(prepared_bench.committed(NEXT)) == [messages.Ready(V1, NEXT.digest)]


def test_configure_with_the_current_version_keeps_the_shadow(prepared_bench: SlaveBench) -> None:
    assert said(prepared_bench.command(configure(BASE))) == [messages.Ready(V0, BASE.digest)]
    assert runs(prepared_bench.command(commit()), messages.Commit)


def test_configure_to_an_older_version_loads_it_again(bench: SlaveBench) -> None:
    older = snapshot(V0, RoundId(1, 7), digest=b"other bytes")
    bench.state.shard.snapshots = (BASE, older)
    (load,) = runs(bench.command(configure(older)), messages.Configure)
    assert load.source == older


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (configure(snapshot(V2, R3)), RefusalCode.VERSION_GONE, "no verified snapshot of version 1:2"),
        (configure(snapshot(V0, R3)), RefusalCode.VERSION_GONE, r"no verified snapshot of version 1:0 (r1.3)"),
        (configure(snapshot(V0, R1, digest=b"x")), RefusalCode.VERSION_GONE, "with the digest of its COMMIT"),
        (configure(), RefusalCode.SEED_EXISTS, "the master knows none"),
        (configure_for(placement_over("s1", "s2")), RefusalCode.CONFIG, "does not name slave 's0'"),
    ],
)
def test_an_impossible_configure_is_refused(body: Any, code: RefusalCode, words: str) -> None:
    bench = SlaveBench((BASE,)).attach()
    out = bench.command(body)
    refused = answer(out, messages.ConfigureRefused)
    assert refused.refusal.code is code
    assert words in refused.refusal.sentence
    assert words in only(out, effects.Log)[0].sentence
    assert bench.phase is ShardPhase.EMPTY


def test_a_model_too_big_for_the_stated_memory_is_refused_before_anything_is_made() -> None:
    needed = shard_bytes_needed([block.n_elems for block in LAYOUT.blocks], messages.Settings().chunk_bytes, 4, 2)
    for memory_bytes in (needed, needed - 1):
        bench = SlaveBench(memory_bytes=memory_bytes).attach()
        if memory_bytes < needed:
            assert bench.refused(configure(pinned_versions=2)).code is RefusalCode.MEMORY
        else:
            assert runs(bench.command(configure(pinned_versions=2)), messages.Configure)


def test_another_layout_than_its_hash_is_refused() -> None:
    bench = SlaveBench().attach()
    other = Layout((Parameter("w", (8,), "float32", "w"),))
    assert bench.refused(configure(layout_hash=other.layout_hash)).code is RefusalCode.LAYOUT


@pytest.mark.parametrize(("settings", "right"), [
    (messages.Settings(chunk_bytes=1 << 20), True), (messages.Settings(chunk_bytes=(1 << 20) + 4), False),
    (messages.Settings(chunk_bytes=1024), True), (messages.Settings(chunk_bytes=1020), False),
    (messages.Settings(chunk_bytes=1026), False), (messages.Settings(window_chunks=MAX_WINDOW_CHUNKS + 1), False),
    (messages.Settings(memory_files="tape"), False), (messages.Settings(pull_wire="tape"), False),
])  # fmt: skip
def test_settings_that_the_data_port_cannot_serve_are_refused(settings: messages.Settings, right: bool) -> None:
    bench = SlaveBench(settings=settings).attach()
    if right:
        assert runs(bench.command(configure()), messages.Configure)
    else:
        assert bench.refused(configure()).code is RefusalCode.CONFIG


def test_a_load_that_fails_leaves_an_empty_slave_that_can_be_configured_again() -> None:
    bench = SlaveBench((BASE,)).attach()
    bench.command(configure(BASE))
    assert said(bench.failed(FULL)) == [messages.ConfigureRefused(FULL)]
    assert bench.phase is ShardPhase.EMPTY
    assert runs(bench.command(configure(BASE)), messages.Configure)


def test_staged_is_said_once_and_with_the_newest_attempt(bench: SlaveBench) -> None:
    opened = slot_of(bench.command(open_staging(B, 1)), B)
    adopted = slot_of(bench.command(open_staging(B, 1, attempt=2)), B)
    assert adopted.opening == opened.opening
    assert said(bench.give(effects.PushStaged(opened, b"d"))) == []
    assert said(bench.give(effects.PushStaged(adopted, b"d"))) == [messages.Staged(B, 2, b"d")]


def test_news_of_an_earlier_opening_is_dropped(bench: SlaveBench) -> None:
    first = slot_of(bench.command(open_staging(B, 1)), B)
    bench.command(messages.CloseStaging(B))
    second = slot_of(bench.command(open_staging(B, 1)), B)
    assert second.opening != first.opening
    assert said(bench.give(effects.PushStaged(first, b"d"))) == []
    assert "not complete" in bench.refused(measure(R2, V0, B)).sentence


@pytest.mark.parametrize("other", [{"wire": Codec.F32}, {"base": V1}], ids=["codec", "base"])
def test_a_push_that_is_written_in_another_way_begins_with_nothing(bench: SlaveBench, other: dict[str, Any]) -> None:
    """What landed as differences from one version is no part of a float32 push, nor of one from another version."""
    differences = replace(open_staging(B, 1, base=V0), wire=Codec.INT8)
    first = slot_of(bench.command(differences), B)
    assert (first.wire, first.base) == (Codec.INT8, V0)
    adopted = slot_of(bench.command(replace(differences, attempt=2)), B)
    assert adopted == replace(first, attempt=2)
    again = slot_of(bench.command(replace(differences, attempt=3, **other)), B)
    assert again == replace(adopted, attempt=3, opening=first.opening + 1, **other)
    late = replace(first, attempt=3)
    assert said(bench.give(effects.PushStaged(late, b"d"))) == [], "it was complete as it was written before"
    assert said(bench.give(effects.PushStaged(again, b"d"))) == [messages.Staged(B, 3, b"d")]
    assert not only(bench.command(differences), effects.HoldSlots), "an older attempt, however it is written"


def test_a_new_push_takes_the_slot_of_the_old_one_and_what_is_older_or_wrong_opens_none(bench: SlaveBench) -> None:
    bench.command(open_staging(B, 1, attempt=3))
    for slot, attempt, words in ((1, 2, "older than the open one"), (4, 1, "names slot 4"), (-1, 1, "names slot -1")):
        out = bench.command(open_staging(B, slot, attempt=attempt))
        assert not only(out, effects.HoldSlots)
        assert words in only(out, effects.Log)[0].sentence
    bench.stage(B, 0)
    assert "it is not here" in bench.refused(measure()).sentence
    assert runs(bench.command(measure(R2, V0, B)), messages.Measure)


def test_slots_that_a_job_reads_are_not_reopened_until_it_ends_and_others_are(bench: SlaveBench) -> None:
    bench.command(measure())
    assert only(bench.command(open_staging(B, 1)), effects.HoldSlots)
    (held,) = only(bench.command(messages.CloseStaging(B)), effects.HoldSlots)
    assert [slot.push for slot in held.slots] == [A]
    assert not only(bench.command(messages.CloseStaging(A)), effects.HoldSlots)
    assert not only(bench.command(open_staging(B, 0)), effects.HoldSlots)
    out = bench.measured()
    assert only(out, effects.HoldSlots)[0].slots == ()
    assert [slot.push for slot in only(out, effects.HoldSlots)[-1].slots] == [B]


@pytest.mark.parametrize("order", [1, -1])
def test_a_committed_snapshot_is_loaded_before_a_shadow_and_the_origin_only_without_either(order: int) -> None:
    mine = snapshot(Version(2, 5), RoundId(2, 6), digest=b"d")
    asked = replace(configure(mine), origin=Version(1, 5), origin_round=RoundId(1, 6))
    shadow, origin = replace(mine, committed=False), replace(mine, version=Version(1, 5), round=RoundId(1, 6))
    others = [replace(mine, digest=b"other"), replace(mine, layout_hash=b""), replace(mine, placement_hash=b"")]
    assert find_load(asked, [mine, shadow, origin][::order]) == mine
    assert find_load(asked, [shadow, origin, *others][::order]) == shadow
    assert find_load(asked, [origin, *others][::order]) == origin
    with pytest.raises(Refused) as refused:
        find_load(asked, others[::order])
    assert refused.value.code is RefusalCode.VERSION_GONE
    assert find_load(replace(asked, load=None), [mine]) is None
