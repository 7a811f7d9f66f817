"""Pushes as differences: when they are granted, and how long the version that they stand on stays readable."""

from __future__ import annotations

from typing import Any

import pytest
from support.master_bench import HELLO, Bench

from dips.core import messages as m
from dips.core.ids import Version
from dips.core.protocol import CAPABILITIES
from dips.core.wire import Codec

ALL = m.Hello(1, 1, tuple(sorted(CAPABILITIES)))


def bench_of(*names: str, **config: Any) -> Bench:
    """A run whose slaves read every codec."""
    bench = Bench(**config)
    for slave in bench.slaves:
        slave.hello = ALL
    return bench.running(*names)


def begin(bench: Bench, name: str, wire: Codec = Codec.INT8, **changes: Any) -> m.Ticket:
    answer = bench.begin_push(name, wire=wire, **changes)
    assert isinstance(answer, m.Ticket), answer
    return answer


def again(bench: Bench, name: str, wire: Codec) -> m.Ticket:
    """BeginPush of the open push once more."""
    cluster = bench.clusters[name]
    request = m.BeginPushRequest(bench.caller(name), cluster.seq, cluster.base, cluster.fence, (), 100, 16, wire=wire)
    answer = bench.ask(request).answer
    assert isinstance(answer, m.Ticket), answer
    return answer


def retained(bench: Bench) -> tuple[Version, ...]:
    """What the last commit told the slaves to keep readable, besides the two newest."""
    return [c for c in bench.slaves[0].commands if isinstance(c, m.Retain)][-1].versions


def opened(bench: Bench) -> m.OpenStaging:
    return [c for c in bench.slaves[0].commands if isinstance(c, m.OpenStaging)][-1]


@pytest.mark.parametrize("wire", list(Codec))
def test_a_push_on_the_current_version_is_written_as_its_cluster_wishes(wire: Codec) -> None:
    bench = bench_of("a")
    granted = wire if wire.is_difference else Codec.F32
    assert begin(bench, "a", wire).wire is granted
    assert (opened(bench).wire, opened(bench).base) == (granted, Version(1, 0))
    assert bench.recorded("ticket")[-1]["wire"] == granted.name
    bench.slaves[0].die()
    bench.slaves[0].attach()
    assert (opened(bench).wire, opened(bench).base) == (granted, Version(1, 0)), "told again after a restart"
    assert again(bench, "a", wire).wire is granted
    bench.stage("a")
    bench.finish_push("a", attempt=2)
    assert bench.verdict("a").kind is m.VerdictKind.APPLIED


def test_a_seed_an_older_base_that_nobody_kept_and_one_that_a_slave_cannot_read_are_float32() -> None:
    bench = Bench()
    bench.slaves[0].hello = ALL
    assert set(HELLO.capabilities) < set(ALL.capabilities)
    bench.attach_all()
    bench.join("a")
    assert begin(bench, "a", base=None, tokens=0).wire is Codec.F32
    bench.stage("a")
    bench.finish_push("a")
    bench.pull("a")
    assert begin(bench, "a").wire is Codec.F32
    for behind, wire in ((1, Codec.INT8), (2, Codec.F32)):
        bench = bench_of("a", "b")
        bench.rounds(behind, "a", wait_s=1.5)
        assert begin(bench, "b").wire is wire


def test_after_a_slave_came_back_only_the_newest_version_is_everywhere() -> None:
    bench = bench_of("a", "b")
    bench.rounds(1, "a", wait_s=1.5)
    bench.slaves[0].die()
    bench.slaves[0].attach()
    assert begin(bench, "b").wire is Codec.F32
    assert begin(bench, "a").wire is Codec.INT8


def test_after_the_masters_restart_the_newest_version_will_do() -> None:
    bench = bench_of("a")
    bench.rounds(1, "a", wait_s=1.5)
    base, fence = bench.clusters["a"].base, bench.clusters["a"].fence
    bench.restart()
    bench.join("a")
    assert begin(bench, "a", base=base, fence=fence).wire is Codec.INT8


def test_a_base_that_is_gone_is_followed_by_float32() -> None:
    bench = bench_of("a")
    begin(bench, "a")
    ticket = again(bench, "a", Codec.F32)
    assert (ticket.attempt, ticket.wire) == (2, Codec.F32)
    assert (opened(bench).attempt, opened(bench).wire) == (2, Codec.F32)
    bench.stage("a")
    bench.finish_push("a", attempt=2)
    bench.advance(2.0)
    assert bench.verdict("a").kind is m.VerdictKind.APPLIED


def test_a_ticket_lives_while_bytes_arrive_of_a_push_that_is_written_anew() -> None:
    """Slaves drop the differences that had landed: what arrives in float32 is news though it is less."""
    bench = bench_of("a", ticket_ttl_s=10.0)
    begin(bench, "a")
    push = bench.clusters["a"].push_id
    bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 1, 1000),)))
    again(bench, "a", Codec.F32)
    bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 1, 2000),)))  # it was under way
    for landed in range(1, 5):
        bench.advance(8.0)
        bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 2, landed),)))
    assert bench.state.shared.members["a"].push is not None


def test_a_ticket_that_is_asked_for_again_does_not_live_on_what_had_landed_before() -> None:
    bench = bench_of("a", ticket_ttl_s=10.0)
    begin(bench, "a")
    push = bench.clusters["a"].push_id
    bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 1, 1000),)))
    again(bench, "a", Codec.INT8)
    bench.advance(8.0)
    bench.slaves[0].say(m.SlaveBeat(progress=(m.StagingProgress(push, 2, 1000),)))
    bench.advance(3.0)
    assert bench.state.shared.members["a"].push is None


def test_the_base_of_an_open_push_stays_readable_until_its_verdict() -> None:
    bench = bench_of("a", "b")
    begin(bench, "b")
    bench.rounds(3, "a", wait_s=1.5)
    assert retained(bench) == (Version(1, 0),)
    assert again(bench, "b", Codec.INT8).wire is Codec.INT8, "it is granted as long as it is kept"
    bench.stage("b")
    assert bench.result(bench.finish_push("b", attempt=2)) is not None
    bench.advance(3.0)
    assert bench.verdict("b").kind is m.VerdictKind.APPLIED
    assert retained(bench) == (), "what is sealed is read no more"


@pytest.mark.parametrize("then", ["trains on", "pulls", "leaves", "sent float32"])
def test_a_version_stays_while_a_cluster_that_sends_differences_trains_on_it(then: str) -> None:
    bench = bench_of("a", "b")
    bench.push("b", wire=Codec.F32 if then == "sent float32" else Codec.INT8)
    bench.advance(3.0)
    base = bench.pull("b").version
    bench.pull("a")
    bench.rounds(2, "a", wait_s=1.5)
    if then == "pulls":
        bench.pull("b")
    if then == "leaves":
        bench.leave("b")
    bench.rounds(1, "a", wait_s=1.5)
    assert retained(bench) == ((base,) if then == "trains on" else ())
    if then == "trains on":
        assert begin(bench, "b").wire is Codec.INT8


def test_bases_and_pulls_share_what_may_be_kept_and_the_oldest_gives_way() -> None:
    bench = bench_of("a", "b", pinned_versions=1)
    begin(bench, "b")
    bench.rounds(1, "a", wait_s=1.5)
    bench.ask(m.BeginPullRequest(m.Caller("", 0, "reader"), reader=True))
    bench.rounds(3, "a", wait_s=1.5)
    assert retained(bench) == (Version(1, 1),)
    assert again(bench, "b", Codec.INT8).wire is Codec.F32


def test_a_base_that_is_only_trained_on_gives_way_to_what_is_being_read() -> None:
    """Without it the next push is longer; without what is read, a slow reader begins again and again."""
    bench = bench_of("a", "b", pinned_versions=1)
    bench.ask(m.BeginPullRequest(m.Caller("", 0, "reader"), reader=True))
    bench.push("b", wire=Codec.INT8)
    bench.advance(3.0)
    assert bench.pull("b").version == Version(1, 1)
    bench.pull("a")
    bench.rounds(3, "a", wait_s=1.5)
    assert retained(bench) == (Version(1, 0),)
    assert begin(bench, "b").wire is Codec.F32


def test_a_rollback_keeps_no_base_of_the_old_timeline() -> None:
    bench = bench_of("a", "b")
    bench.rounds(1, "a", wait_s=1.5)
    begin(bench, "b")
    for slave in bench.slaves:
        slave.come_back_without(Version(1, 1))
    bench.advance(3.0)
    assert bench.state.shared.ledger.version is not None
    assert bench.state.shared.ledger.version.timeline > 1
    assert set(bench.state.shared.kept) <= {bench.state.shared.ledger.version}
