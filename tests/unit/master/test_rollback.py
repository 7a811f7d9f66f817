"""Committed state that slaves lost: the run goes back to what all of them hold, on a new timeline, and says so."""

from __future__ import annotations

import pytest
from support.master_bench import LEASED, Bench

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.master.state.ledger import Ledger, push_from_json

V0, V1, V2 = Version(1, 0), Version(1, 1), Version(1, 2)


def at(v: int, *names: str, **config: object) -> Bench:
    """A run whose newest version is 1:v, pulled by all; each version merged one push of each cluster."""
    bench = Bench(**config).running(*names)  # type: ignore[arg-type]
    for _ in range(v):
        for name in names:
            bench.push(name, 100, bench.lease(name, 100) if bench.plan is LEASED else ())
        bench.pulls(*names)
    assert bench.status().published == Version(1, v)
    return bench


def test_what_the_lost_versions_merged_is_rolled_back_and_training_goes_on_from_there() -> None:
    bench = at(2, "a", "b")
    last = bench.clusters["a"].push_id
    bench.slaves[0].come_back_without(V2, V1)
    verdict = bench.verdict("a", last)
    assert (verdict.kind, verdict.version) == (m.VerdictKind.ROLLED_BACK, Version(2, 0))
    (record,) = bench.entries("ROLLBACK")
    assert (len(record["rolled_back"]), record["wall_s"]) == (4, bench.wall_s), "two pushes of each cluster"
    answer = bench.begin_push("a")
    assert isinstance(answer, m.Stale)
    assert answer.kind is m.StaleKind.TIMELINE
    before = bench.clusters["a"].fence
    grant = bench.pull("a")
    assert (grant.version, grant.fence) == (Version(2, 0), before + 1)
    bench.pull("b")
    bench.pushes("a", "b")
    assert (bench.status().published, bench.status().tokens) == (Version(2, 1), 200)
    assert bench.state.shared.ledger.origin is None


def test_a_cluster_whose_last_push_is_in_the_version_gone_back_to_keeps_it() -> None:
    bench = at(1, "a", "b")
    kept = bench.clusters["b"].push_id
    bench.leave("b")
    lost = bench.push("a")
    bench.slaves[0].come_back_without(V2)
    (record,) = bench.entries("ROLLBACK")
    assert [push_from_json(push) for push in record["rolled_back"]] == [lost]
    known = bench.state.shared.ledger.clusters["b"].last_verdict
    assert known is not None
    assert (known.push, known.kind) == (kept, m.VerdictKind.APPLIED)


def test_what_was_lent_is_free_again_and_undecided_pushes_are_aborted_with_the_reason() -> None:
    bench = at(2, "a", "b", plan=LEASED)
    asked = m.LeaseDataRequest(bench.caller("a"), 100, 7)
    (lent,) = bench.ask(asked).ranges
    bench.begin_push("b", 100, bench.lease("b", 100))
    push = bench.clusters["b"].push_id
    bench.slaves[1].hold.add(m.Configure)
    bench.slaves[0].come_back_without(V2)
    verdict = bench.verdict("b", push)
    assert (verdict.kind, "goes back to version 1:1" in verdict.reason) == (m.VerdictKind.ABORTED, True)
    leases = bench.state.shared.ledger.leases
    assert leases is not None
    totals = {state.value: tokens for state, tokens in leases.totals().items()}
    assert totals == {"free": 800, "leased": 0, "applied": 200, "excluded": 0}
    assert "go back to version 1:1" in bench.status().recovery
    with pytest.raises(AssertionError):
        bench.pull("a")
    bench.slaves[1].release(m.Configure)
    assert bench.status().tokens == 200
    (fresh,) = bench.lease("b", 100)
    assert fresh.lease_id >= bench.epoch << 32, "no number that was ever given out means another lease"
    (again_lent,) = bench.ask(asked).ranges
    assert again_lent.lease_id > lent.lease_id, "a request repeated over the ROLLBACK does not get what is free now"
    ledger = bench.state.shared.ledger
    again = Ledger.from_json(ledger.to_json())
    assert again.to_json() == ledger.to_json()
    assert (again.origin, again.is_given_up(V2), again.is_given_up(V1)) == (ledger.origin, True, False)


def test_every_slave_is_waited_for() -> None:
    bench = at(1, "a")
    bench.slaves[1].die()
    bench.slaves[0].come_back_without(V1)
    assert bench.entries("ROLLBACK") == []
    assert "lacks version 1:1" in bench.status().recovery
    bench.advance(75.0)
    bench.slaves[0].come_back_without(V1)
    assert bench.status().recovery.endswith("; waiting for slave s1, for 1 min 15 s")
    assert bench.status().waiting_for == bench.status().recovery
    assert isinstance(bench.begin_push("a"), m.Busy)
    bench.slaves[1].attach()
    assert bench.status().published == Version(2, 0)


def test_slave_that_finds_its_snapshot_again_ends_the_recovery_without_loss() -> None:
    bench = at(1, "a")
    lost, record = bench.slaves[0].snapshots[V1], bench.slaves[0].records[V1]
    bench.slaves[1].die()
    bench.slaves[0].come_back_without(V1)
    bench.slaves[0].die()
    bench.slaves[0].snapshots[V1], bench.slaves[0].records[V1] = lost, record
    bench.slaves[0].attach()
    bench.slaves[1].attach()
    status = bench.status()
    assert (status.published, status.tokens, status.recovery) == (V1, 100, "")
    assert bench.entries("ROLLBACK") == []
    bench.push("a")
    assert bench.status().published == V2


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_master_that_dies_in_a_rollback_drives_it_forward(renamed: int) -> None:
    """renamed: slaves that carried the rollback out before the master died."""
    bench = at(2, "a")
    for slave in bench.slaves[renamed:]:
        slave.hold.add(m.Configure)
    bench.slaves[0].come_back_without(V2)
    assert len(bench.entries("ROLLBACK")) == 1
    bench.all_hold()
    bench.restart()
    status = bench.status()
    assert (status.published, status.tokens) == (Version(2, 1), 100)
    assert len(bench.entries("ROLLBACK")) == 1
    assert all(slave.snapshots[Version(2, 1)].committed for slave in bench.slaves)


def test_rollback_that_is_not_durable_never_happened() -> None:
    bench = at(2, "a")
    bench.hold_journal = True
    bench.slaves[0].come_back_without(V2)
    assert bench.journal[-1].kind == "ROLLBACK"
    told = [one.origin for one in bench.slaves[0].commands if isinstance(one, m.Configure)]
    assert {*told} <= {None}, "no slave was informed"
    bench.hold_journal = False
    bench.restart()
    assert bench.status().published == Version(2, 1)
    assert bench.entries("ROLLBACK")[-1]["epoch"] == 2


def test_commit_that_a_slave_lost_before_it_flipped_is_given_up_and_told_once_that_is_durable() -> None:
    bench = at(1, "a", "b")
    bench.slaves[0].hold.add(m.Commit)
    push = bench.push("a")
    bench.push("b")
    token = bench.await_verdict("a", push)
    assert bench.status().phase == "COMMIT"
    bench.slaves[0].hold.clear()
    bench.hold_journal = True
    bench.slaves[0].come_back_without(V2)
    assert bench.is_open(token)
    bench.hold_journal = False
    bench.write_journal(bench.journal[-1])
    answer = bench.result(token).answer
    assert (answer.kind, answer.version) == (m.VerdictKind.ROLLED_BACK, Version(2, 1))
    assert (bench.status().published, bench.status().phase) == (Version(2, 1), "IDLE")
    assert bench.status().recent_rounds[-1].outcome == "given up"


def test_every_rollback_has_a_timeline_of_its_own() -> None:
    bench = at(2, "a")
    bench.slaves[0].come_back_without(V2)
    bench.pull("a")
    bench.push("a")
    assert bench.status().published == Version(2, 2)
    bench.slaves[1].come_back_without(Version(2, 2))
    assert bench.status().published == Version(3, 1)
    bench.restart()
    bench.back("a")
    bench.push("a")
    assert bench.status().published == Version(3, 2)
    bench.slaves[0].come_back_without(Version(3, 2), Version(3, 1))
    assert bench.status().published == Version(4, 1), "from 2:1, whose snapshot is still everywhere"


def test_version_that_was_given_up_is_never_taken_again() -> None:
    bench = at(2, "a")
    lost, record = bench.slaves[0].snapshots[V2], bench.slaves[0].records[V2]
    bench.slaves[0].come_back_without(V2)
    bench.slaves[0].snapshots[V2], bench.slaves[0].records[V2] = lost, record
    bench.slaves[1].come_back_without(Version(2, 1))
    assert bench.entries("ROLLBACK")[-1]["origin"] == [1, 1]


@pytest.mark.parametrize(
    ("code", "retry_after_s"),
    [
        *((code, 0.0) for code in (RefusalCode.DISK, RefusalCode.VERSION_GONE, RefusalCode.DIGEST)),
        (RefusalCode.DISK, 1.0),
        (None, 0.0),
    ],
)
def test_snapshot_that_cannot_be_loaded_is_lost(code: RefusalCode | None, retry_after_s: float) -> None:
    bench = at(1, "a")
    slave = bench.slaves[0]
    slave.die()
    slave.hold.add(m.Configure)
    slave.attach()
    if code is None:
        slave.hold.clear()
        slave.say(m.Ready(V1, b"other"))
        assert "another digest" in str(bench.recorded("recovery")[-3:])
    elif retry_after_s:
        slave.say_refused(code, retry_after_s)
        assert bench.status().recovery == ""
        slave.release(m.Configure)
    else:
        slave.hold.clear()
        slave.say_refused(code, 0.0)
    assert bench.status().published == (V1 if retry_after_s else Version(2, 0))


def test_what_a_slave_could_not_load_counts_no_more_once_it_was_away() -> None:
    """It may have another disk."""
    bench = at(1, "a")
    slave, other = bench.slaves
    for one in bench.slaves:
        one.die()
    slave.hold.add(m.Configure)
    slave.attach()
    slave.hold.clear()
    slave.say_refused(RefusalCode.DISK, 0.0)
    assert "not what it was" in bench.status().recovery
    slave.die()
    slave.attach()
    other.attach()
    assert (bench.status().published, bench.entries("ROLLBACK")) == (V1, [])


def test_run_that_had_reached_its_tokens_goes_on_when_they_are_lost() -> None:
    bench = Bench(settings=m.Settings(tk_max_tokens=200)).running("a")
    bench.rounds(1, "a")
    bench.push("a")
    assert bench.status().stopping
    bench.slaves[0].come_back_without(V2)
    assert not bench.status().stopping
    bench.pull("a")
    bench.push("a")
    assert bench.status().stopping


def test_cluster_that_joined_since_stays_and_one_that_is_gone_is_remembered() -> None:
    bench = at(1, "a")
    bench.back("c")
    bench.pushes("a", "c")
    bench.advance(2.0)
    bench.slaves[0].come_back_without(V2)
    entry = bench.state.shared.ledger.clusters["c"]
    assert (entry.tokens_applied, entry.pushes_applied, entry.member) == (0, 0, True)
    assert entry.fence == 2
    bench.pulls("c", "a")
    bench.pushes("c", "a")
    assert bench.status().published == Version(2, 2)


def test_slave_that_says_no_to_a_commit_tells_anew_what_its_disk_holds() -> None:
    bench = at(1, "a")
    slave = bench.slaves[0]
    slave.hold.add(m.Commit)
    bench.push("a")
    slave.refuse_commit(m.Refusal(RefusalCode.VERSION_GONE, "no shadow in memory"))
    assert bench.status().published == V2
    assert slave.snapshots[V2].committed
