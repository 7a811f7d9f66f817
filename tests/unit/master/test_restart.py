"""A master that dies and starts again from its journal: nothing acknowledged is lost, nothing is counted twice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.master_bench import LEASED, Bench

from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.messages import Measure, Settings, Ticket, VerdictKind
from dips.master.config import MasterConfig
from dips.master.state.ledger import Ledger, canonical
from dips.master.state.penalty_types import DEFAULT_PRESET, EARLIER_DEFAULT_PRESET
from dips.master.state.shared import RunConfig


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


def test_commit_that_is_not_durable_never_happened(bench: Bench) -> None:
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


def test_round_under_way_is_forgotten_and_the_next_has_another_id_once_every_slave_is_back(bench: Bench) -> None:
    bench.slaves[0].hold.add(Measure)
    bench.push("a")
    before = bench.status().round
    assert before is not None
    bench.slaves[0].hold.clear()
    bench.begin_anew()
    bench.slaves[0].attach()
    status = bench.status()
    assert (status.published, status.epoch, status.waiting_for) == (None, 2, "slave s1 is away")
    bench.slaves[1].attach()
    bench.back("a")
    bench.push("a")
    after = bench.status().recent_rounds[-1].round
    assert after > before


def test_other_chunks_than_those_of_the_runs_versions_are_refused_at_the_start(bench: Bench) -> None:
    """A slave checks a snapshot by chunks of this size: each would seem damaged, and the run would go back and back."""
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
    bench = Bench().attach_all()
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


def test_a_cluster_has_made_the_steps_that_its_processes_made_whatever_became_of_its_incarnations(bench: Bench) -> None:

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


def test_a_cluster_that_left_before_its_next_beat_has_made_the_steps_that_are_in_the_model(bench: Bench) -> None:
    bench.push("a", steps=20)
    bench.leave("a")
    [cluster] = bench.status().clusters
    assert (cluster.pushes_applied, cluster.steps_total) == (1, 20)


def test_settings_that_changed_with_a_restart_hold_for_the_next_round(bench: Bench) -> None:
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


STEP = {"dynamic": (0.7, 0.8), "safe": (0.7, 0.8), "steady": (0.9, 0.6)}


def with_preset(name: str | None) -> RunConfig:
    """The settings of a file that names this preset, or none."""
    named = {} if name is None else {"preset": name}
    return MasterConfig(run_id="test", directory=Path("x"), slaves=2, **named).to_run_config()


def begun_with(name: str | None) -> Bench:
    config = with_preset(name)
    return Bench(settings=config.settings, penalty=config.penalty, presets=config.presets).running("a")


def without_preset(record: str) -> str:
    """A COMMIT's record as an older release writes it."""
    fields = json.loads(record)
    del fields["ledger"]["preset"]
    return canonical(fields)


def of_an_older_release(bench: Bench) -> None:
    """Neither the journal nor the slaves' records name a preset."""
    assert bench.snapshot is not None
    ledger = json.loads(bench.snapshot)
    del ledger["preset"]
    ledger["commit"]["record"] = without_preset(ledger["commit"]["record"])
    bench.snapshot = json.dumps(ledger)
    for slave in bench.slaves:
        for version, record in slave.records.items():
            slave.records[version] = without_preset(record.decode()).encode()
            digest = hashlib.sha256(slave.records[version]).digest()
            slave.snapshots[version] = replace(slave.snapshots[version], commit_hash=digest)


def next_round(bench: Bench) -> tuple[str, tuple[float, float]]:
    """The preset that a cluster is told as it joins, and rate and momentum of the next round."""
    reply = bench.join("a", previous=bench.clusters["a"].join.incarnation)
    bench.pull("a")
    bench.push("a")
    prepare = list(bench.slaves[0].prepared.values())[-1]
    return reply.settings.preset, (prepare.outer_lr, prepare.momentum_decay)


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize(("begun", "now", "then"), [
    ("dynamic", None, "dynamic"), ("safe", None, "safe"), (None, None, DEFAULT_PRESET), ("dynamic", "steady", "steady"),
])  # fmt: skip
def test_a_run_keeps_the_preset_that_it_was_begun_with_unless_one_is_named(
    begun: str | None, now: str | None, then: str, rebuilt: bool
) -> None:
    """rebuilt: the master's disk was lost, and the preset is what the slaves' records say."""
    bench = begun_with(begun)
    bench.config = replace(with_preset(now), rebuild=rebuilt)
    if rebuilt:
        bench.snapshot = None
    bench.restart()
    assert next_round(bench) == (then, STEP[then])
    assert bench.snapshot is not None
    assert Ledger.from_json(bench.snapshot).preset == then


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_run_of_an_older_release_keeps_the_default_of_its_time(rebuilt: bool) -> None:
    bench = begun_with(EARLIER_DEFAULT_PRESET)
    of_an_older_release(bench)
    bench.config = replace(with_preset(None), rebuild=rebuilt)
    assert bench.config.settings.preset == DEFAULT_PRESET
    if rebuilt:
        bench.snapshot = None
    bench.logs.clear()
    bench.restart()
    assert next_round(bench) == ("dynamic", STEP["dynamic"])
    assert any("preset dynamic, outer rate 0.7 and momentum 0.8" in log.sentence for log in bench.logs)
    bench.restart()
    assert next_round(bench) == ("dynamic", STEP["dynamic"])


def test_a_journal_that_is_an_old_copy_takes_the_preset_of_the_newer_history() -> None:
    """Its own is taken first: what the first one decided is decided again, also where the second is the default."""
    bench = begun_with("dynamic")
    old_copy = bench.snapshot
    bench.config = with_preset("steady")
    bench.restart()
    assert next_round(bench) == ("steady", STEP["steady"])
    bench.config = with_preset(None)
    bench.restart(old_copy)
    assert bench.entries("ADOPT")
    assert next_round(bench) == ("steady", STEP["steady"])


def test_a_named_rate_holds_whatever_preset_the_run_has() -> None:
    bench = begun_with("dynamic")
    named = MasterConfig(run_id="test", directory=Path("x"), slaves=2, outer_lr=0.5, outer_momentum=0.3)
    bench.config = named.to_run_config()
    bench.restart()
    assert next_round(bench) == ("dynamic", (0.5, 0.3))


@pytest.mark.parametrize("older", [False, True])
def test_a_rollback_does_not_bring_an_earlier_preset_back(older: bool) -> None:
    """older: the version that it goes back to is of a release whose records name no preset."""
    bench = begun_with("dynamic")
    if older:
        of_an_older_release(bench)
    bench.config = with_preset("steady")
    bench.restart()
    assert next_round(bench) == ("steady", STEP["steady"])
    bench.config = with_preset(None)
    bench.slaves[0].come_back_without(Version(1, 1))
    assert bench.entries("ROLLBACK")
    assert next_round(bench) == ("steady", STEP["steady"])
    bench.restart()
    assert next_round(bench) == ("steady", STEP["steady"])


@pytest.mark.parametrize("lost", [False, True])
def test_slaves_that_are_restored_from_an_object_store_bring_their_versions_preset(lost: bool) -> None:
    """lost: the master's disk is lost, too; else its journal is from before `safe` was named."""
    bench = begun_with(None)
    before = bench.snapshot
    bench.config = with_preset("safe")
    bench.restart()
    assert next_round(bench) == ("safe", STEP["safe"])
    for slave in bench.slaves:
        slave.snapshots = {Version(1, 1): replace(slave.snapshots[Version(1, 1)], restored_timeline=5)}
    bench.snapshot = None if lost else before
    bench.config = replace(with_preset(None), rebuild=lost)
    bench.restart()
    assert bench.status().published == Version(6, 1)
    assert next_round(bench) == ("safe", STEP["safe"])


def test_a_preset_that_this_release_does_not_have_is_not_replaced() -> None:
    bench = begun_with("steady")
    assert bench.snapshot is not None
    bench.snapshot = json.dumps({**json.loads(bench.snapshot), "preset": "calm"})
    bench.config = with_preset(None)
    with pytest.raises(ConfigError, match="begun with preset 'calm', which this release does not have"):
        bench.restart()
