"""Slaves that know more than the master's journal: the master takes over what they hold, or says what it needs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.master_bench import LEASED, Bench, BenchSlave, refused_with

from dips.core import messages as m
from dips.core.errors import ConfigError, RefusalCode
from dips.core.ids import Version
from dips.master.state.effects import Pause, Resume, Stop
from dips.master.state.slaves import NEWER_EPOCH_EXIT

V1, V2 = Version(1, 1), Version(1, 2)


def old_journal(*names: str, **config: object) -> tuple[Bench, str]:
    """A run at version 1:2, and the snapshot that its journal had at version 1:1."""
    bench = Bench(**config).running(*names)  # type: ignore[arg-type]
    kept = ""
    for _ in range(2):
        kept = bench.snapshot or ""
        for name in names:
            bench.push(name, 100, bench.lease(name, 100) if bench.plan is LEASED else ())
        bench.pulls(*names)
    return bench, kept


def asked(bench: Bench) -> list[tuple[str, Version]]:
    return [(s.name, c.version) for s in bench.slaves for c in s.commands if isinstance(c, m.SendCommitRecord)]


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_asynchronous_disks_hold_is_adopted_on_a_new_timeline(in_memory: bool) -> None:
    """Versions after it may have been published, pulled and lost, and only the lost journal would know. What stands in
    the memory of one slave alone was flipped by that same process: no version followed it."""
    bench, kept = old_journal("a", settings=m.Settings(durability="async"))
    if in_memory:
        bench.slaves[0].snapshots[V2] = replace(bench.slaves[0].snapshots[V2], committed=False)
    bench.restart(kept)
    status = bench.status()
    published = V2 if in_memory else Version(2, 2)
    assert (status.published, status.tokens, status.recovery) == (published, 200, "")
    assert [entry.kind for entry in bench.journal[-2:]] == (["COMMIT", "ADOPT"] if in_memory else ["ADOPT", "ROLLBACK"])
    codes = [alarm["code"] for alarm in bench.recorded("alarm")]
    assert codes == (["adopted"] if in_memory else ["adopted", "new_timeline"])
    if not in_memory:
        (back,) = bench.recorded("rolled_back")
        assert (back["version"], back["origin"], back["lost_tokens"]) == ("2:2", "1:2", 0)
        adopted = next(entry for entry in bench.journal if entry.kind == "ADOPT")
        bench, kept = old_journal("a", settings=m.Settings(durability="async"))
        bench.restart(adopted.snapshot_json)  # the master died between the two entries
        assert bench.status().published == Version(2, 2)


@pytest.mark.parametrize(
    ("takes_over", "in_memory", "published"),
    [(False, False, V2), (True, False, Version(2, 2)), (True, True, V2)],
)
def test_standby_goes_on_on_a_new_timeline_where_asynchronous_disks_may_have_lost_versions(
    takes_over: bool, in_memory: bool, published: Version
) -> None:
    """It may lack the newest decisions, whose versions were only in the slaves' memory."""
    bench, _ = old_journal("a", settings=m.Settings(durability="async"))
    if in_memory:
        bench.slaves[0].snapshots[V2] = replace(bench.slaves[0].snapshots[V2], committed=False)
    bench.config = replace(bench.config, takes_over=takes_over)
    bench.restart(bench.snapshot)
    assert bench.status().published == published
    slave, other = bench.slaves
    for one in bench.slaves:
        one.die()
    slave.hold.add(m.Configure)
    slave.attach()
    slave.hold.clear()
    slave.say_refused(RefusalCode.DISK, 0.0)
    slave.die()
    slave.attach()
    other.attach()
    assert bench.status().published == published, "what it has decided since is in its journal"


@pytest.mark.parametrize("n_restored", [1, 2])
@pytest.mark.parametrize("old", [False, True])
def test_slaves_that_all_come_from_an_object_store_go_on_on_a_timeline_that_was_never_used(
    n_restored: int, old: bool
) -> None:
    """One slave with its own disk shows that nothing newer was published; without it, only a lost disk would know."""
    bench, kept = old_journal("a")
    for slave in bench.slaves[:n_restored]:
        slave.snapshots = {V2: replace(slave.snapshots[V2], restored_timeline=5)}
    bench.restart(kept if old else bench.snapshot)
    back = n_restored == 2
    assert bench.status().published == (Version(6, 2) if back else V2)
    assert [entry.kind for entry in bench.journal[-2:]].count("ROLLBACK") == back
    assert ("new_timeline" in [alarm["code"] for alarm in bench.recorded("alarm")]) == back


def test_cluster_goes_on_with_its_work_after_an_adoption_and_learns_the_verdict_that_the_journal_forgot() -> None:
    bench, kept = old_journal("a")
    cluster = bench.clusters["a"]
    bench.restart(kept)
    reply = bench.join("a", previous=cluster.join.incarnation)
    assert isinstance(reply.last_push, m.Verdict)
    assert (reply.last_push.push, reply.last_push.kind, reply.last_push.version) == (
        *(cluster.push_id, m.VerdictKind.APPLIED, V2),
    )
    assert reply.fence == cluster.fence
    bench.clusters["a"].base = cluster.base
    assert isinstance(bench.begin_push("a"), m.Ticket)
    assert bench.state.shared.ledger.round_n >= 3, "round numbers never go down"


def test_clusters_that_joined_the_old_state_join_again() -> None:
    bench, kept = old_journal("a")
    bench.begin_anew(kept)
    bench.join("a")
    bench.attach_all()
    with refused_with(RefusalCode.FENCED):
        bench.pull("a")
    assert not bench.state.shared.ledger.clusters["a"].member
    bench.back("a")
    bench.push("a")
    assert bench.status().published == Version(1, 3)


def test_commit_that_only_some_flipped_is_adopted_when_the_others_hold_its_shadow() -> None:
    bench, _ = old_journal("a")
    kept = bench.snapshot
    bench.slaves[1].hold.add(m.Commit)
    bench.push("a")
    assert not bench.slaves[1].snapshots[Version(1, 3)].committed
    bench.slaves[1].hold.clear()
    bench.restart(kept)
    assert bench.status().published == Version(1, 3)
    assert bench.slaves[1].snapshots[Version(1, 3)].committed


def test_old_journal_and_a_lost_disk_go_back_to_what_is_everywhere() -> None:
    bench, kept = old_journal("a")
    bench.push("a")
    bench.slaves[0].lose(Version(1, 3))
    bench.restart(kept)
    status = bench.status()
    assert (status.published, status.tokens) == (Version(2, 2), 200)
    assert bench.entries("ROLLBACK")[0]["origin"] == [1, 2]


@pytest.mark.parametrize("how", ["refused", "wrong bytes", "not JSON", "of another run"])
def test_record_that_cannot_be_had_from_one_slave_comes_from_another(how: str) -> None:
    bench, kept = old_journal("a")
    slave = bench.slaves[0]
    if how == "refused":
        slave.refuse["record"] = m.Refusal(RefusalCode.DISK, "the manifest cannot be read")
    elif how == "wrong bytes":
        slave.records[V2] = b"{}"
    else:
        bad = b"\xff" if how == "not JSON" else slave.records[V2].replace(b'"run_id":"test"', b'"run_id":"other"')
        slave.records[V2] = bad
    bench.restart(kept)
    assert bench.status().published == V2
    assert asked(bench) == [("s0", V2), ("s1", V2)]


def damaged(record: bytes, path: tuple[str, ...], value: object) -> bytes:
    """The record with one value of another shape; the last of `path` names it."""
    raw = json.loads(record)
    where = raw
    for name in path[:-1]:
        where = where[name]
    where[path[-1]] = value
    return json.dumps(raw).encode()


def odd(*path: str, value: object) -> Callable[[bytes], bytes]:
    return lambda record: damaged(record, path, value)


@pytest.mark.parametrize("damage", [
    lambda record: b"[]", lambda record: b"[" * 100_000, lambda record: record.decode().encode("utf-16"),
    odd("version", value=[1, 7]), odd("ledger", "given_up", value=[[["x", 1], [2, 3]]]),
    odd("ledger", "applied_in", value=[[[1, 1 << 64], []]]), odd("ledger", "tokens", value=math.inf),
    odd("ledger", "tokens", value=-5), odd("ledger", "stopping", value=7), odd("ledger", "rounds", value=[1, 2, "x"]),
    odd("ledger", "leases", "begun", value=1 << 40), odd("ledger", "layout", value='{"a":1}'),
    *(odd("ledger", "clusters", "a", name, value=value) for name, value in (
        ("fence", "x"), ("fence", 1 << 80), ("incarnation", ["x", "y"]), ("tokens_per_s", "x"),
    )),
])  # fmt: skip
def test_record_of_another_shape_is_as_good_as_none(damage: Callable[[bytes], bytes]) -> None:
    """Its hash is right: a slave wrote these very bytes."""
    bench, kept = old_journal("a", plan=LEASED)
    for slave in bench.slaves:
        record = damage(slave.records[V2])
        slave.records[V2] = record
        slave.snapshots[V2] = replace(slave.snapshots[V2], commit_hash=hashlib.sha256(record).digest())
    bench.restart(kept)
    assert (bench.status().published, bench.status().tokens, bench.halted) == (Version(2, 1), 100, None)
    assert bench.entries("ROLLBACK")[0]["from_version"] == [1, 1], "as far as the journal knows"
    assert asked(bench) == [("s0", V2), ("s1", V2)]


def test_rebuild_does_not_go_back_to_what_a_rollback_gave_up() -> None:
    """Version 1:2 was undone by the ROLLBACK to 1:1, now 2:1; its data is trained again since."""
    bench, _ = old_journal("a")
    first, second = bench.slaves
    given_up, record = first.snapshots[V2], first.records[V2]
    first.come_back_without(V2)
    assert bench.status().published == Version(2, 1)
    first.snapshots[V2], first.records[V2] = given_up, record
    second.lose(V1, Version(2, 1))
    bench.rebuild()
    (rollback,) = bench.entries("ROLLBACK")[1:]
    assert (rollback["origin"], bench.status().tokens) == ([1, 0], 0)


def test_rebuild_with_too_few_slaves_waits_for_those_that_the_record_names() -> None:
    bench, _ = old_journal("a", n_slaves=3)
    third = bench.slaves.pop()
    bench.config = replace(bench.config, rebuild=True, n_slaves=2)
    bench.restart("")
    assert bench.status().published is None
    assert f"slave {third.name}, which is not here: start it" in bench.status().recovery
    assert not bench.entries("ADOPT") + bench.entries("ROLLBACK")
    bench.slaves.append(third)
    third.attach()
    assert bench.status().published == V2


def test_rebuild_never_uses_a_timeline_again_that_a_disk_knows() -> None:
    """Two rollbacks in one epoch made timeline 3 in epoch 1; the journal that says so is lost, and the newest too."""
    bench, _ = old_journal("a")
    newer = Version(3, 2)
    lone = bench.slaves[0]
    lone.snapshots[newer] = replace(lone.snapshots[V2], version=newer, commit_hash=b"other")
    lone.refuse["record"] = m.Refusal(RefusalCode.DISK, "the manifest cannot be read")
    bench.rebuild()
    assert (bench.epoch, bench.status().published) == (2, Version(4, 2))


def test_slave_that_is_asked_and_goes_away_is_asked_when_it_is_back() -> None:
    bench, kept = old_journal("a")
    bench.slaves[0].hold.add(m.SendCommitRecord)
    bench.restart(kept)
    assert "slave s0 is asked for the record of version 1:2" in bench.status().recovery
    asked_before = len(asked(bench))
    bench.advance(6.0)
    assert len(asked(bench)) == asked_before + 1, "asked again when no answer comes"
    bench.slaves[0].die()
    assert "waiting for slave s0" in bench.status().recovery
    bench.slaves[0].hold.clear()
    bench.slaves[0].attach()
    assert bench.status().published == V2


def test_other_history_of_the_newest_version_wins_over_the_journal(bench: Bench) -> None:
    """The journal decided 1:2 in a round that no slave carried out; under an older copy of it they made another 1:2."""
    bench.rounds(1, "a")
    kept = bench.snapshot
    bench.all_hold(m.Commit)
    bench.back("b")
    of_b = bench.push("b")
    lost = bench.push("a")
    forked = bench.snapshot
    bench.all_hold()
    bench.restart(kept)
    bench.back("a")
    bench.push("a")
    fence = bench.state.shared.ledger.clusters["a"].fence
    bench.restart(forked)
    assert bench.status().published == V2
    entry = bench.state.shared.ledger.clusters["a"]
    assert entry.last_verdict is not None
    assert entry.last_verdict.push != lost
    assert entry.fence == fence + 1
    told = bench.state.shared.ledger.clusters["b"].last_verdict
    assert told is not None
    assert (told.push, told.kind) == (of_b, m.VerdictKind.ROLLED_BACK), "the history that won has no cluster b"
    assert [record["version"] for record in bench.entries("ADOPT")] == [[1, 2]]


def test_master_without_a_journal_takes_the_run_from_the_slaves() -> None:
    bench, _ = old_journal("a", "b", plan=LEASED)
    before = bench.state.shared.ledger
    bench.rebuild()
    status = bench.status()
    assert (status.published, status.tokens) == (V2, 400)
    ledger = bench.state.shared.ledger
    assert ledger.layout == before.layout
    assert ledger.placement == before.placement
    assert ledger.data_plan == before.data_plan
    assert ledger.detector == before.detector
    assert bench.entries("ADOPT")[0]["from_version"] is None
    bench.back("a")
    ranges = bench.lease("a", 100)
    assert ranges[0].lease_id >= bench.epoch << 32
    bench.push("a", 100, ranges)
    assert bench.status().tokens == 500


def test_rebuild_that_has_published_ends_for_a_master_that_came_later() -> None:
    bench, _ = old_journal("a")
    bench.rebuild()
    assert bench.status().published == V2
    bench.slaves[0].die()
    bench.slaves[0].promised = bench.epoch + 1000
    bench.slaves[0].attach()
    assert bench.halted is not None
    assert (bench.halted.exit_code, bench.began_again) == (NEWER_EPOCH_EXIT, None)


@pytest.mark.parametrize("rebuild", [False, True])
def test_master_without_a_journal_guesses_nothing_unless_told_to_and_then_waits_for_all_slaves(rebuild: bool) -> None:
    bench, _ = old_journal("a")
    bench.slaves[1].lose(V2)
    bench.config = replace(bench.config, rebuild=rebuild)
    with_an_old_copy(bench, "")
    assert "--rebuild" in bench.status().recovery
    with refused_with(RefusalCode.BUSY):
        bench.join("a")
    bench.slaves[1].attach()
    bench.advance(bench.config.evict_after_s)
    assert bench.status().published == (Version(2, 1) if rebuild else None), "the newest is not everywhere"


@pytest.mark.parametrize("n_versions", [0, 1])
def test_rebuild_takes_the_newest_version_though_a_removed_slave_is_here_first(n_versions: int) -> None:
    """Slave s9 was removed by a RESHARD; its process is started again and again, with an empty disk or an old one."""
    before = Bench(n_slaves=1)
    before.slaves[0].name = "s9"
    before.running("a")
    bench, _ = old_journal("a", n_slaves=1)
    (holder,), (removed,) = bench.slaves, before.slaves
    removed.lose(*list(removed.snapshots)[n_versions:])
    removed.bench, removed.configure = bench, None
    bench.slaves[:] = [removed]
    bench.config = replace(bench.config, rebuild=True)
    bench.restart("", look=False)
    stranger = BenchSlave(bench, "s8")
    stranger.promised = bench.epoch + 9
    stranger.attach()
    assert bench.closed[stranger.link].code is RefusalCode.UNKNOWN_NAME
    assert f"promised epoch {stranger.promised}" in bench.closed[stranger.link].sentence
    bench.slaves.append(holder)
    holder.attach()
    with refused_with(RefusalCode.BUSY):
        bench.join("a")
    bench.advance(bench.config.evict_after_s)
    assert (bench.status().published, bench.status().recovery) == (V2, "")
    assert type(removed.commands[-1]) is m.StopSlave


def test_rebuild_begins_no_second_history_on_empty_slaves() -> None:
    bench, _ = old_journal("a", n_slaves=1)
    (holder,) = bench.slaves
    bench.slaves[:] = [BenchSlave(bench, "s9")]
    bench.rebuild()
    assert "no slave that is here holds a version" in bench.status().recovery
    with refused_with(RefusalCode.BUSY):
        bench.join("a")
    bench.slaves.append(holder)
    holder.attach()
    assert bench.status().published == V2


def test_run_that_had_no_version_yet_begins_without_rebuild_in_the_epoch_that_the_rebuild_found() -> None:
    bench = Bench(rebuild=True)
    for slave in bench.slaves:
        slave.promised = 7
    bench.attach_all()
    assert bench.began_again is not None
    bench.epoch = bench.began_again.at_least - 1
    bench.restart("")
    assert "start the master again without --rebuild" in bench.status().recovery
    bench.config = replace(bench.config, rebuild=False)
    bench.restart(bench.snapshot)
    bench.join("a")
    bench.seed("a")
    assert bench.status().published == Version(bench.epoch, 0)


def test_run_whose_slaves_are_chosen_and_have_no_version_yet_begins_after_a_restart() -> None:
    bench = Bench().attach_all()
    bench.join("a")
    bench.restart(bench.snapshot)
    bench.join("b")
    bench.seed("b")
    assert bench.status().published == Version(bench.epoch, 0)


def test_rebuild_with_other_chunks_than_the_slaves_versions_have_is_refused() -> None:
    bench, _ = old_journal("a")
    settings = replace(bench.config.settings, chunk_bytes=1 << 19)
    bench.config = replace(bench.config, rebuild=True, settings=settings)
    with pytest.raises(ConfigError, match=r"chunk_bytes is 524288.*: start .*chunk_bytes = 1048576, or "):
        bench.restart("")
    assert not bench.entries("ADOPT") + bench.entries("ROLLBACK")


def test_adoption_that_is_not_durable_is_made_again() -> None:
    bench, kept = old_journal("a")
    bench.hold_journal = True
    bench.restart(kept)
    assert bench.journal[-1].kind == "ADOPT"
    assert not any(isinstance(c, m.Configure) and c.load == V2 for s in bench.slaves for c in s.commands)
    bench.hold_journal = False
    bench.restart(kept)
    assert bench.status().published == V2


def test_push_of_a_commit_that_another_history_overtook_is_aborted() -> None:
    """The slaves' disks come back with another 1:2, in which a newer incarnation of the cluster pushed."""
    bench, other = (Bench().running("a") for _ in range(2))
    for run in (bench, other):
        run.rounds(1, "a")
    other.restart(other.snapshot)
    other.back("a")
    other.push("a")
    bench.all_hold(m.Commit)
    lost = bench.push("a")
    assert bench.state.shared.round.phase.now.value == "COMMIT"
    for slave, there in zip(bench.slaves, other.slaves, strict=True):
        slave.die()
        slave.hold.clear()
        slave.snapshots, slave.records = dict(there.snapshots), dict(there.records)
    bench.attach_all()
    assert bench.status().published == V2
    (said,) = [verdict for verdict in bench.recorded("verdict") if verdict["push"] == str(lost)]
    assert (said["verdict"], said["reason"]) == ("ABORTED", "its round is not in the history that the slaves hold")


# ---- what the operator asked for ----


def one_more(bench: Bench, *names: str) -> str:
    """One more version of these clusters; the journal before it."""
    kept = bench.snapshot or ""
    bench.rounds(1, *names)
    return kept


def with_an_old_copy(bench: Bench, kept: str) -> None:
    """A master over an old copy of the journal, while not all slaves are here."""
    bench.begin_anew(kept)
    bench.slaves[0].attach()
    assert bench.status().published is None


def test_what_was_asked_for_in_an_old_journal_does_not_come_back() -> None:
    """The documented backup: pause, copy, resume."""
    bench = Bench(settings=m.Settings(tk_max_tokens=150)).running("a", "b")
    bench.operate(m.ExtendRequest("", 250))
    bench.operate(m.DrainRequest("", "b"))
    bench.push("a", 160)
    bench.pull("a")
    bench.operate(Stop(m.OperatorRequest("", "by mistake")))
    bench.operate(Pause(m.OperatorRequest("", "backup")))
    kept = bench.snapshot
    bench.operate(Resume(m.OperatorRequest("")))
    bench.operate(m.ExtendRequest("", 500, reason="it was one"))
    bench.result(bench.leave("b"))
    bench.back("b")
    one_more(bench, "a", "b")
    bench.restart(kept)
    status = bench.status()
    assert (status.published, status.paused, status.stopping, status.tk_max_tokens) == (V2, False, False, 500)
    for name in ("a", "b"):
        bench.back(name)
        assert not bench.beat(name).stop


def test_run_that_had_reached_its_tokens_goes_on_with_more_of_them_when_the_journal_is_lost() -> None:
    bench = Bench(settings=m.Settings(tk_max_tokens=100)).running("a")
    bench.join("b", process_id=b"b's")
    bench.rounds(1, "a", wait_s=2.0)
    bench.rebuild()
    assert bench.status().stopping
    with refused_with(RefusalCode.STOPPING):
        bench.join("c")
    bench.join("b", process_id=b"b's")
    assert bench.pull("b").version == V1, "the last one"
    bench.config = replace(bench.config, rebuild=True, settings=m.Settings(tk_max_tokens=200))
    bench.restart("")
    assert (bench.status().published, bench.status().stopping) == (V1, False)
    bench.back("a")
    one_more(bench, "a")
    assert bench.status().stopping


def test_what_was_asked_of_this_master_holds_over_an_adoption() -> None:
    bench = Bench().running("a", "b")
    kept = one_more(bench, "a", "b")
    with_an_old_copy(bench, kept)
    bench.join("a")
    bench.operate(m.DrainRequest("", "a", "disk swap"))
    bench.operate(Pause(m.OperatorRequest("", "look first")))
    bench.slaves[1].attach()
    assert (bench.status().published, bench.status().paused) == (V1, True)
    bench.back("a")
    assert bench.beat("a").stop


def test_what_was_taken_back_from_this_master_does_not_come_with_an_adoption(bench: Bench) -> None:
    """The record of version 1:1 says that the run is paused and a is drained."""
    kept = bench.snapshot or ""
    bench.all_hold(m.Measure)
    bench.push("a")
    bench.operate(Pause(m.OperatorRequest("", "maintenance")))
    bench.operate(m.DrainRequest("", "a"))
    for slave in bench.slaves:
        slave.release(m.Measure)
    assert bench.status().published == V1
    with_an_old_copy(bench, kept)
    bench.join("a")
    bench.operate(Resume(m.OperatorRequest("")))
    bench.operate(m.EvictRequest("", "a"))
    bench.slaves[1].attach()
    assert (bench.status().published, bench.status().paused) == (V1, False)
    bench.back("a")
    assert not bench.beat("a").stop


@pytest.mark.parametrize("asked", [Stop(m.OperatorRequest("", "enough")), m.ExtendRequest("", 1000)])
def test_end_that_was_asked_of_this_master_or_taken_back_stays_so(asked: Stop | m.ExtendRequest) -> None:
    tk_max = 100 if isinstance(asked, m.ExtendRequest) else 0
    bench = Bench(settings=m.Settings(tk_max_tokens=tk_max)).running("a")
    kept = one_more(bench, "a")
    with_an_old_copy(bench, kept)
    bench.operate(asked)
    bench.slaves[1].attach()
    assert (bench.status().published, bench.status().stopping) == (V1, isinstance(asked, Stop))
