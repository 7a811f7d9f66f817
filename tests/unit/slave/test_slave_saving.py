"""Durability "async": versions go to disk behind the rounds, and durable is only what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slave_bench import (
    BASE,
    FULL,
    FULL_NOW,
    A,
    SlaveBench,
    commit,
    configure,
    only,
    prepare,
    runs,
    said,
    snapshot,
)

from dips.core.errors import RefusalCode
from dips.core.ids import RoundId, Version
from dips.core.messages import (
    Commit,
    Configure,
    ConfigureRefused,
    Flipped,
    Prepare,
    Prepared,
    Ready,
    Settings,
    SlaveHello,
    SnapshotInfo,
)
from dips.slave.state import effects, events
from dips.slave.state.effects import Effect

ASYNC = Settings(durability="async")


@pytest.fixture
def late() -> SlaveBench:
    """At version 0, loaded from disk, with push A staged, durability async."""
    bench = SlaveBench(settings=ASYNC)
    bench.ready(BASE)
    bench.stage(A, 0)
    return bench


def version(v: int, committed: bool = True) -> SnapshotInfo:
    return snapshot(Version(1, v), RoundId(1, v + 1), committed)


def one_round(bench: SlaveBench, v: int) -> list[Effect]:
    """Version v is prepared and committed, in memory only."""
    round_id = RoundId(1, v + 1)
    bench.command(prepare(round_id, Version(1, v), Version(1, v - 1)))
    bench.give(events.Done(bench.job(), version(v, committed=False), bench.disk))
    bench.command(commit(round_id, Version(1, v)))
    return bench.flipped(version(v))


def saved(bench: SlaveBench, number: int, v: int) -> list[Effect]:
    bench.disk = (version(v), *bench.disk)
    return bench.give(events.Saved(number, version(v), bench.disk))


def durable(bench: SlaveBench) -> int | None:
    found = bench.state.shard.saving.durable
    return found.v if found is not None else None


@pytest.mark.parametrize("durability", ["sync", "async"])
@pytest.mark.parametrize("lag", [2, 3])
def test_a_ring_that_would_overwrite_what_the_run_goes_back_to_is_refused(durability: str, lag: int) -> None:
    """Three snapshots kept: of a disk that is three versions behind, this slave would overwrite the newest."""
    bench = SlaveBench(settings=Settings(durability=durability, async_lag_versions=lag), snapshots_kept=3)
    bench.attach()
    refused = [answer.refusal for answer in said(bench.command(configure())) if isinstance(answer, ConfigureRefused)]
    if (durability, lag) == ("async", 3):
        assert [refusal.code for refusal in refused] == [RefusalCode.CONFIG]
        assert "raise its snapshots_kept to 4, or lower the master's async_lag_versions to 2" in refused[0].sentence
    else:
        assert refused == []


def test_a_round_answers_without_the_disk_and_the_save_begins_with_the_commit(late: SlaveBench) -> None:
    (run,) = runs(late.command(prepare()), Prepare)
    assert not run.durable
    out = late.give(events.Done(late.job(), version(1, committed=False), late.disk))
    assert said(out) == [Prepared(RoundId(1, 2), version(1).digest)]
    assert only(out, effects.Record)[0].fields["durable"] is False
    (run_commit,) = runs(late.command(commit()), Commit)
    assert not run_commit.durable
    out = late.flipped(version(1))
    assert said(out) == [Flipped(RoundId(1, 2), Version(1, 1))]
    assert only(out, effects.SaveVersion) == [effects.SaveVersion(1, version(1), b"{}")]
    record, answer, _ = out
    assert isinstance(record, effects.Record), "the tape comes before the answer that it proves"
    assert isinstance(answer, effects.SendUp)
    assert durable(late) == 0


def test_versions_that_were_overtaken_are_skipped(late: SlaveBench) -> None:
    assert only(one_round(late, 1), effects.SaveVersion)
    for v in (2, 3, 4):
        assert not only(one_round(late, v), effects.SaveVersion)
    (save,) = only(saved(late, 1, 1), effects.SaveVersion)
    assert (save.number, save.info) == (2, version(4))
    assert durable(late) == 1
    assert not only(saved(late, 2, 4), effects.SaveVersion)
    assert durable(late) == 4


def test_no_save_begins_while_memory_flips(late: SlaveBench) -> None:
    one_round(late, 1)
    late.command(prepare(RoundId(1, 3), Version(1, 2), Version(1, 1)))
    late.give(events.Done(late.job(), version(2, committed=False), late.disk))
    late.command(commit(RoundId(1, 3), Version(1, 2)))
    assert not only(saved(late, 1, 1), effects.SaveVersion)
    (save,) = only(late.flipped(version(2)), effects.SaveVersion)
    assert save.info == version(2)


def test_a_disk_that_fails_is_tried_again_with_what_is_newest_then(late: SlaveBench) -> None:
    one_round(late, 1)
    out = late.give(events.SaveFailed(1, FULL_NOW))
    assert only(out, effects.SaveLater) == [effects.SaveLater(1.5)]
    assert only(out, effects.Log)
    assert not only(one_round(late, 2), effects.SaveVersion)
    (save,) = only(late.give(events.SaveAgain()), effects.SaveVersion)
    assert save.info == version(2)
    assert only(late.give(events.SaveFailed(2, FULL)), effects.SaveLater)
    assert durable(late) == 0


def test_hello_offers_what_only_memory_holds_beside_what_is_on_disk(late: SlaveBench) -> None:
    one_round(late, 1)
    late.command(prepare(RoundId(1, 3), Version(1, 2), Version(1, 1)))
    late.give(events.Done(late.job(), version(2, committed=False), late.disk))
    late.give(events.Unlinked("reset"))
    (hello,) = said(late.link())
    assert isinstance(hello, SlaveHello)
    assert hello.snapshots == (version(2, committed=False), version(1), BASE)
    late.welcome(2, 1)
    assert said(late.command(configure(version(1)))) == [Ready(Version(1, 1), version(1).digest)]


def test_memory_is_made_anew_only_after_its_version_is_on_disk(late: SlaveBench) -> None:
    one_round(late, 1)
    assert not runs(late.command(configure(version(1), slots=2)), Configure)
    (load,) = runs(saved(late, 1, 1), Configure)
    assert load.source == version(1)
    late.loaded(version(1))
    assert durable(late) == 1


def test_a_master_that_comes_back_with_sync_hears_ready_once_the_version_is_on_disk(late: SlaveBench) -> None:
    """Found by reading: to a master with "sync" Ready means durable, and this version stood in memory alone."""
    one_round(late, 1)
    late.welcome(2, 1, Settings(durability="sync"))
    assert not said(late.command(configure(version(1))))
    assert said(saved(late, 1, 1)) == [Ready(Version(1, 1), version(1).digest)]
    assert durable(late) == 1


def test_a_save_of_a_history_that_was_given_up_says_nothing_of_the_new_one(late: SlaveBench) -> None:
    one_round(late, 1)
    late.command(configure(BASE))
    assert durable(late) is None
    assert not only(saved(late, 1, 1), effects.SaveVersion)
    assert durable(late) is None
    late.loaded(BASE)
    assert durable(late) == 0


@given(st.lists(st.sampled_from(["round", "saved", "failed", "again"]), max_size=40))
def test_whatever_happens_durable_is_on_disk_and_never_ahead_and_one_save_runs(script: list[str]) -> None:
    bench = SlaveBench(settings=ASYNC)
    bench.ready(BASE)
    bench.stage(A, 0)
    v, running, waiting = 0, None, False
    for what in script:
        out: list[Effect] = []
        if what == "round":
            v += 1
            out = one_round(bench, v)
        elif what == "saved" and running is not None:
            done, running = running, None
            out = saved(bench, done.number, done.info.version.v)
        elif what == "failed" and running is not None:
            running, waiting = None, True
            out = bench.give(events.SaveFailed(0, FULL_NOW))
        elif what == "again" and waiting:
            waiting = False
            out = bench.give(events.SaveAgain())
        for save in only(out, effects.SaveVersion):
            assert running is None
            assert not waiting
            assert save.info == version(v)
            running = save
        on_disk = max(info.version.v for info in bench.disk)
        assert durable(bench) == on_disk
        assert running is not None or waiting or on_disk == v
