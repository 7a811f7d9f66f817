"""A master that dies and starts again from its journal: nothing acknowledged is lost, nothing is counted twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.master_bench import LEASED, Bench

from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.messages import Measure, Settings, Ticket, VerdictKind
from dips.master.state.ledger import Ledger


def with_chunks(bench: Bench, chunk_bytes: int) -> None:
    """The settings of the bench's next master."""
    bench.config = replace(bench.config, settings=replace(bench.config.settings, chunk_bytes=chunk_bytes))


def test_admitted_push_is_presumed_aborted_and_its_ranges_go_with_the_next_one() -> None:
    bench = Bench(plan=LEASED, grace_s=60.0).running("a", "b")
    ranges = bench.lease("a", 100)
    push = bench.push("a", 100, ranges)
    cluster = bench.clusters["a"]
    bench.restart()
    bench.join("a", previous=cluster.join.incarnation, held=ranges)
    verdict = bench.verdict("a", push)
    assert verdict.kind is VerdictKind.ABORTED
    bench.clusters["a"].base = cluster.base
    assert isinstance(bench.begin_push("a", 100, ranges), Ticket)


def test_commit_that_is_not_durable_never_happened() -> None:
    bench = Bench().running("a")
    bench.hold_journal = True
    push = bench.push("a")
    assert bench.journal[-1].kind == "COMMIT"
    bench.hold_journal = False
    previous = bench.clusters["a"].join.incarnation
    bench.restart()
    assert bench.status().published == Version(1, 0)
    assert bench.status().tokens == 0
    bench.join("a", previous=previous)
    assert bench.verdict("a", push).kind is VerdictKind.ABORTED


def test_round_under_way_is_forgotten_and_the_next_has_another_id_once_every_slave_is_back() -> None:
    bench = Bench().running("a")
    bench.slaves[0].hold.add(Measure)
    bench.push("a")
    before = bench.status().round
    assert before is not None
    bench.slaves[0].hold.clear()
    for slave in bench.slaves:
        slave.alive = False
    bench.start_master()
    bench.slaves[0].attach()
    status = bench.status()
    assert (status.published, status.epoch, status.waiting_for) == (None, 2, "slave s1 is away")
    bench.slaves[1].attach()
    bench.join("a")
    bench.pull("a")
    bench.push("a")
    after = bench.status().recent_rounds[-1].round
    assert after > before


def test_other_chunks_than_those_of_the_runs_versions_are_refused_at_the_start() -> None:
    """A slave checks a snapshot by chunks of this size: each would seem damaged, and the run would go back and back."""
    bench = Bench().running("a")
    with_chunks(bench, 1 << 19)
    with pytest.raises(
        ConfigError, match=r"chunk_bytes is 524288.* with 1048576.*: start .*chunk_bytes = 1048576, or "
    ):
        bench.restart()
    assert not bench.entries("ROLLBACK")
    with_chunks(bench, 1 << 20)
    bench.restart()
    assert bench.status().published == Version(1, 0)


def test_chunks_may_change_until_there_is_a_version() -> None:
    bench = Bench()
    bench.attach_all()
    bench.join("a")
    assert bench.entries("PLACE")
    with_chunks(bench, 1 << 19)
    bench.restart()
    assert bench.state.shared.ledger.chunk_bytes == 1 << 19


def test_chunks_of_a_journal_that_does_not_name_them_are_those_of_the_settings() -> None:
    """An older release wrote it. The next entry names them."""
    bench = Bench(settings=Settings(chunk_bytes=1 << 19)).running("a")
    assert bench.snapshot is not None
    ledger = json.loads(bench.snapshot)
    del ledger["chunk_bytes"]
    bench.snapshot = json.dumps(ledger)
    bench.restart()
    bench.join("a")
    assert Ledger.from_json(bench.snapshot).chunk_bytes == 1 << 19


def test_a_cluster_has_made_the_steps_that_its_processes_made_whatever_became_of_its_incarnations() -> None:
    bench = Bench().running("a")

    def steps() -> int:
        return bench.status().clusters[0].steps_total

    def joins(process: bytes) -> None:
        bench.join("a", previous=bench.clusters["a"].join.incarnation, process_id=process)

    joins(b"one")
    bench.pull("a")
    bench.beat("a", steps=143)
    bench.push("a")  # what the journal has then survives the master
    bench.restart()
    assert steps() == 143
    joins(b"one")
    assert steps() == 143
    bench.beat("a", steps=360)  # it trained on, as in a cut of its link
    assert steps() == 360
    joins(b"one")
    assert steps() == 360
    bench.silent.add("a")
    bench.advance(bench.config.evict_after_s + 1.0)
    joins(b"two")
    bench.beat("a", steps=5)
    assert steps() == 365


def test_a_cluster_that_left_before_its_next_beat_has_made_the_steps_that_are_in_the_model() -> None:
    bench = Bench().running("a")
    bench.push("a", steps=20)
    bench.leave("a")
    [cluster] = bench.status().clusters
    assert (cluster.pushes_applied, cluster.steps_total) == (1, 20)


def test_settings_that_changed_with_a_restart_hold_for_the_next_round() -> None:
    bench = Bench().running("a")
    bench.config = replace(
        bench.config, settings=replace(bench.config.settings, sync_every_steps=7, outer_lr=0.25, outer_momentum=0.5)
    )
    bench.restart()
    reply = bench.join("a", previous=bench.clusters["a"].join.incarnation)
    assert (reply.settings.sync_every_steps, reply.settings.outer_lr) == (7, 0.25)
    bench.pull("a")
    bench.push("a")
    prepare = list(bench.slaves[0].prepared.values())[-1]
    assert (prepare.outer_lr, bench.status().published) == (0.25, Version(1, 1))
