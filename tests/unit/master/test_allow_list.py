"""Data keys at the master: who is on the list, when slaves hear of it, and which keys are refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.master_bench import Bench, BenchSlave, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import SlaveId
from dips.core.protocol import MAX_ALLOWED_KEYS, MAX_RANKS, RANKS
from dips.master.state.effects import Revoked
from dips.master.state.shared import KEPT_FOR_SLAVES

KEY, OTHER = b"k" * 32, b"o" * 32


def bench() -> Bench:
    return Bench(encrypted=True)


def told(slave: BenchSlave) -> list[str]:
    """Owners on the list that the slave heard last, as "role name"."""
    last = [command for command in slave.commands if isinstance(command, m.Allow)][-1]
    return [f"{allowed.role.name.lower()} {allowed.owner}" for allowed in last.keys]


def pull(master: Bench, name: str, key: bytes = KEY) -> m.BeginPullRequest:
    return m.BeginPullRequest(m.Caller("", 0, name), True, curve_key=key)


def test_every_slave_hears_of_every_process_and_one_that_comes_back_right_after_its_welcome() -> None:
    master = bench().running("a", "b")
    for slave in master.slaves:
        assert told(slave) == ["cluster a", "cluster b", "slave s0", "slave s1"]
    grant = master.pull("a")
    assert [address.curve_key for address in grant.placement.slaves] == [master.key_of("s0"), master.key_of("s1")]
    lists = sum(isinstance(command, m.Allow) for command in slave.commands)
    master.join("a")
    assert sum(isinstance(command, m.Allow) for command in slave.commands) == lists, (
        "the same key again changes nothing"
    )
    slave.die()
    assert "slave s1" not in told(master.slaves[0])
    slave.commands.clear()
    slave.attach()
    assert [type(command).__name__ for command in slave.commands[:2]] == ["Welcome", "Allow"]
    for slave in master.slaves:
        assert told(slave) == ["cluster a", "cluster b", "slave s0", "slave s1"]


@pytest.mark.parametrize("how", ["evict", "leave", "silence"])
def test_a_cluster_that_is_gone_leaves_the_list(how: str) -> None:
    master = bench().running("a", "b")
    if how == "evict":
        master.operate(m.EvictRequest("", "b"))
    elif how == "leave":
        master.leave("b")
    else:
        master.silent.add("b")
        master.advance(master.config.evict_after_s + 1)
    for slave in master.slaves:
        assert told(slave) == ["cluster a", "slave s0", "slave s1"]


RANK_1, RANK_2 = b"1" * 32, b"2" * 32


def keys_of(slave: BenchSlave, cluster: str) -> list[bytes]:
    """The cluster's keys on the list that the slave heard last."""
    last = [command for command in slave.commands if isinstance(command, m.Allow)][-1]
    return [allowed.curve_key for allowed in last.keys if allowed.owner == cluster]


def bench_of_ranks(**config: Any) -> Bench:
    """A run with keys, whose slaves know clusters of several ranks."""
    master = Bench(encrypted=True, **config)
    for slave in master.slaves:
        slave.hello = m.Hello(1, 1, (RANKS,))
    return master.running("a")


def test_every_rank_of_a_cluster_is_on_the_list_until_the_cluster_is_gone() -> None:
    master = bench_of_ranks()
    master.join("b", rank_keys=(RANK_2, RANK_1), pushers=3)
    for slave in master.slaves:
        assert keys_of(slave, "b") == [master.key_of("b"), RANK_1, RANK_2]
        assert keys_of(slave, "a") == [master.key_of("a")]
    a, s0 = master.key_of("a"), master.key_of("s0")
    for key, owner in ((RANK_1, "cluster 'b'"), (a, "cluster 'a'"), (s0, "slave 's0'")):
        with refused_with(RefusalCode.KEY, f"the data key of {owner}"):
            master.join("c", curve_key=key)
        with refused_with(RefusalCode.KEY):
            master.ask(pull(master, "c", key))
    master.join("b", curve_key=KEY, rank_keys=(OTHER,), pushers=2)
    assert keys_of(master.slaves[0], "b") == [KEY, OTHER], "its processes are others now"
    master.leave("b")
    assert keys_of(master.slaves[0], "b") == []


@pytest.mark.parametrize(
    ("rank_keys", "pushers", "why"),
    [
        ((), 2, "2 ranks and brings 0 data keys"),
        ((RANK_1,), 0, "1 ranks and brings 1 data keys"),
        ((RANK_1, RANK_2), 2, "2 ranks and brings 2 data keys"),
        ((RANK_1, b"short"), 3, "a data key of 5 bytes"),
        ((RANK_1, RANK_1), 3, "one data key for two ranks"),
        ((b"b".ljust(32, b"."),), 2, "one data key for two ranks"),
        ((RANK_1, b"a".ljust(32, b".")), 3, "the data key of cluster 'a'"),
        ((RANK_1, b"s0".ljust(32, b".")), 3, "the data key of slave 's0'"),
    ],
)
def test_keys_of_ranks_that_cannot_be_are_refused(rank_keys: tuple[bytes, ...], pushers: int, why: str) -> None:
    master = bench_of_ranks()
    with refused_with(RefusalCode.KEY, why):
        master.join("b", rank_keys=rank_keys, pushers=pushers)
    assert "b" not in master.state.shared.members
    assert told(master.slaves[0]) == ["cluster a", "slave s0", "slave s1"]


def test_the_number_of_ranks_and_of_keys_in_the_list_is_bounded() -> None:
    master = bench_of_ranks(max_clusters=32)
    with refused_with(RefusalCode.CONFIG):
        master.join("b", rank_keys=ranks_of("b", MAX_RANKS + 1), pushers=MAX_RANKS + 1)
    for number in range(MAX_ALLOWED_KEYS // MAX_RANKS - 1):
        master.join(f"c{number}", rank_keys=ranks_of(f"c{number}", MAX_RANKS), pushers=MAX_RANKS)
    with refused_with(RefusalCode.BUSY, f"at most {MAX_ALLOWED_KEYS - KEPT_FOR_SLAVES}"):
        master.join("b", rank_keys=ranks_of("b", MAX_RANKS), pushers=MAX_RANKS)
    assert len(master.state.shared.allowed.keys()) <= MAX_ALLOWED_KEYS
    assert master.join("b").epoch == 1


def test_several_ranks_are_refused_where_a_slave_is_of_an_earlier_release() -> None:
    """Also at the first Join, before any slave is ready."""
    master = Bench(encrypted=True)
    master.slaves[0].hello = m.Hello(1, 1, (RANKS,))
    master.slaves[1].hello = m.Hello(1, 1, ())
    master.attach_all()
    with refused_with(RefusalCode.CONFIG, "slave s1 runs a release that does not know such clusters"):
        master.join("a", rank_keys=(RANK_1,), pushers=2)


def test_a_slave_of_an_earlier_release_is_refused_while_a_cluster_of_several_ranks_is_here() -> None:
    master = bench_of_ranks()
    master.join("b", rank_keys=(RANK_1,), pushers=2)
    slave = master.slaves[1]
    slave.die()
    slave.hello, slave.reattaches = m.Hello(1, 1, ()), False
    slave.attach()
    refusal = master.closed[slave.link]
    assert refusal.code is RefusalCode.CONFIG
    assert "cluster 'b' has 2" in refusal.sentence
    assert master.state.shared.slaves[SlaveId("s1")].link is None
    master.leave("b")
    slave.attach()
    assert master.state.shared.slaves[SlaveId("s1")].link is not None, "clusters of one process do without"


def ranks_of(cluster: str, ranks: int) -> tuple[bytes, ...]:
    """Keys of all ranks but the first."""
    return tuple(f"{cluster} {rank}".encode().ljust(32, b".") for rank in range(1, ranks))


def test_ranks_without_keys_bring_none() -> None:
    master = Bench()
    for slave in master.slaves:
        slave.hello = m.Hello(1, 1, (RANKS,))
    master.running("a")
    with refused_with(RefusalCode.KEY):
        master.join("b", rank_keys=(RANK_1,), pushers=2)
    master.join("b", pushers=2)
    assert master.state.shared.members["b"].pushers == 2
    assert master.state.shared.members["a"].pushers == 1


def test_a_restarted_master_lets_nobody_in_before_they_said_their_keys_anew() -> None:
    master = bench().running("a")
    master.start_master()
    master.attach_all()
    assert told(master.slaves[0]) == ["slave s0", "slave s1"]
    master.join("a")
    assert "cluster a" in told(master.slaves[0])


@pytest.mark.parametrize("ends", ["finish", "silence"])
def test_a_reader_is_on_the_list_while_it_holds_a_pin(ends: str) -> None:
    master = bench().running("a")
    grant = master.ask(pull(master, "export")).answer
    assert "reader export" in told(master.slaves[0])
    if ends == "finish":
        master.ask(m.FinishPullRequest(m.Caller("", 0, "export"), grant.pin_id, True))
    else:
        master.advance(master.config.settings.ticket_ttl_s + 1)
    assert "reader export" not in told(master.slaves[0])


def test_whoever_was_revoked_leaves_the_list_at_once() -> None:
    master = bench().running("a", "b")
    master.ask(pull(master, "export"))
    master.ask(pull(master, "b", OTHER))
    master.event(Revoked("cluster", "z", "stolen"))
    assert told(master.slaves[0]) == ["cluster a", "cluster b", "reader b", "reader export", "slave s0", "slave s1"]
    master.event(Revoked("cluster", "b", "stolen"))
    assert told(master.slaves[0]) == ["cluster a", "reader export", "slave s0", "slave s1"]
    assert len(master.state.shared.pins) == 1
    master.event(Revoked("operator", "ops", "stolen"))
    assert told(master.slaves[0]) == ["cluster a", "slave s0", "slave s1"]
    assert not master.state.shared.pins


@pytest.mark.parametrize("key", [b"", b"short", b"k" * 33])
def test_a_key_of_another_length_is_refused(key: bytes) -> None:
    master = bench().running("a")
    with refused_with(RefusalCode.KEY):
        master.join("b", curve_key=key)
    with refused_with(RefusalCode.KEY):
        master.ask(pull(master, "export", key))
    assert "b" not in master.state.shared.members
    assert told(master.slaves[0]) == ["cluster a", "slave s0", "slave s1"]


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_readers_name_is_bounded(name: str) -> None:
    master = bench().running("a")
    with refused_with(RefusalCode.MALFORMED):
        master.ask(pull(master, name))


def test_without_keys_nobody_is_told_and_nobody_may_bring_one() -> None:
    master = Bench().running("a")
    assert not any(isinstance(command, m.Allow) for slave in master.slaves for command in slave.commands)
    with refused_with(RefusalCode.KEY, "not encrypted"):
        master.join("b", curve_key=KEY)


def test_whom_a_slave_turned_away_stands_in_the_masters_log() -> None:
    master = bench().running("a")
    slave = master.slaves[0]
    slave.say(m.SlaveBeat(refused_connections=3, refused_connection="key 12345678 is not on the list"))
    slave.say(m.SlaveBeat(refused_connections=3, refused_connection="key 12345678 is not on the list"))
    lines = [log.sentence for log in master.logs if "refused 3 connections" in log.sentence]
    assert len(lines) == 1
    assert "slave s0" in lines[0]
    assert "key 12345678 is not on the list" in lines[0]
    (record,) = master.recorded("refused_connections")
    assert (record["slave"], record["count"]) == ("s0", 3)
    slave.say(m.SlaveBeat(refused_connections=1, refused_connection="x" * 10_000))
    assert master.recorded("refused_connections")[-1]["count"] == 1, "its next process counts from 0"
    assert len(master.recorded("refused_connections")[-1]["last_reason"]) < 1000
