"""A second process under a name that is another's: the one that beats goes on undisturbed, the other one ends."""

from __future__ import annotations

import pytest
from support.master_bench import Bench, BenchSlave, refused_with

from dips.core.errors import NAME_TAKEN_EXIT, RefusalCode, Refused
from dips.core.ids import Version
from dips.core.messages import Caller, HeartbeatRequest, Hello, SlaveHello, SlaveMessage, Welcome
from dips.master.state.effects import BeatsEnded, SlaveLinkDown, SlaveSaid
from dips.master.state.slave_links import DIALS_AGAIN_BEATS

NEWCOMER, HERE = b"newcomer", b"here"
LINK = 99


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for slave in bench.slaves:
        slave.directory_id = f"directory of {slave.name}".encode()
    bench.attach_all()
    bench.join("a", process_id=HERE, host="process 7 on here")
    bench.seed("a")
    bench.pull("a")
    return bench


def refusal_of_join(bench: Bench, process_id: bytes = NEWCOMER) -> Refused:
    """The refusal of a Join under the name of a, which must leave the living one alone."""
    here = bench.clusters["a"]
    with refused_with(RefusalCode.NAME_TAKEN) as caught:
        bench.join("a", process_id=process_id)
    assert bench.clusters["a"] is here
    error = caught.value
    assert isinstance(error, Refused)
    return error


def test_a_second_process_waits_for_an_eviction_in_vain_and_ends_while_the_first_trains_on(bench: Bench) -> None:
    incarnation = bench.clusters["a"].join.incarnation
    waited_s = 0.0
    while (refused := refusal_of_join(bench)).retry_after_s > 0:
        assert "may be alive" in refused.sentence
        bench.advance(refused.retry_after_s)
        waited_s += refused.retry_after_s
    assert waited_s == pytest.approx(bench.config.evict_after_s, abs=1.0)
    assert "incarnation 1.1, process 7 on here" in refused.sentence
    assert "a cluster id of its own" in refused.sentence
    assert refused.exit_code == NAME_TAKEN_EXIT
    bench.push("a")
    assert bench.status().published == Version(1, 1)
    assert bench.clusters["a"].join.incarnation == incarnation


@pytest.mark.parametrize("who", ["the process, killed", "the process, which dials again", "an older incarnation"])
def test_after_a_kill_its_successor_waits_for_a_beat_and_not_for_the_eviction(bench: Bench, who: str) -> None:
    first = bench.clusters["a"].join.incarnation
    if who == "an older incarnation":
        again = bench.join("a", process_id=HERE, previous=first)
        assert again.incarnation.n == 2, "a process that joins again is welcome at once"
    if who != "the process, which dials again":
        bench.silent.add("a")
    bench.event(BeatsEnded("a", first))
    bench.jump(60.0)  # the master itself stands still
    assert refusal_of_join(bench).retry_after_s > 0, "it may be dialling again"
    bench.advance(DIALS_AGAIN_BEATS * bench.config.settings.heartbeat_s - 0.25)
    refusal_of_join(bench)
    bench.advance(0.25)
    if who == "the process, killed":
        assert bench.join("a", process_id=NEWCOMER).incarnation.n == 2
    else:
        refusal_of_join(bench)


def test_a_process_that_hangs_is_evicted_and_its_successor_has_waited_so_long(bench: Bench) -> None:
    evict_after_s = bench.config.evict_after_s
    refusal_of_join(bench)
    bench.advance(10 * evict_after_s)
    assert refusal_of_join(bench).retry_after_s > 0, "who asks again much later waits from the start"
    bench.jump(2 * evict_after_s)
    assert refusal_of_join(bench).retry_after_s > 0, "a master that stood still gives every process time to beat"
    bench.silent.add("a")
    bench.advance(evict_after_s)
    assert refusal_of_join(bench).retry_after_s >= 0
    bench.advance(0.5)
    bench.join("a", process_id=NEWCOMER)
    del bench.clusters["a"]
    with refused_with(RefusalCode.NAME_TAKEN):  # and the one that hung is now the second
        bench.join("a", process_id=HERE)


def test_after_the_masters_restart_the_one_that_still_calls_keeps_its_name(bench: Bench) -> None:
    caller = bench.caller("a")
    bench.start_master()
    bench.attach_all()
    assert refusal_of_join(bench).retry_after_s > 0
    with refused_with(RefusalCode.STALE_EPOCH):
        bench.ask(HeartbeatRequest(caller))
    bench.silent.add("a")
    bench.advance(2 * bench.config.settings.heartbeat_s)
    assert refusal_of_join(bench).retry_after_s > 0
    assert bench.join("a", process_id=HERE, previous=caller.incarnation).incarnation.epoch == 2


def test_after_the_masters_restart_who_does_not_call_loses_it_after_a_beat(bench: Bench) -> None:
    bench.silent.add("a")
    bench.start_master()
    bench.attach_all()
    assert refusal_of_join(bench).retry_after_s > 0
    bench.advance(bench.config.settings.heartbeat_s)
    bench.join("a", process_id=NEWCOMER)


def greets(bench: Bench, name: str, directory_id: bytes, link: int = LINK) -> Refused | None:
    """A hello of a process with this directory; why it is refused, None if it is not."""
    bench.closed.pop(link, None)
    body = SlaveHello(Hello(1, 1, ()), "tcp://127.0.0.1:1", 1 << 30, 0, directory_id=directory_id)
    bench.event(SlaveSaid(link, SlaveMessage(Caller(bench.run_id, 0, name), body)))
    refusal = bench.closed.get(link)
    return Refused(refusal.code, refusal.sentence, refusal.retry_after_s) if refusal is not None else None


def attachments(slave: BenchSlave) -> int:
    return sum(isinstance(body, Welcome) for body in slave.commands)


def test_another_directory_under_a_slaves_name_is_refused_and_nothing_is_recovered(bench: Bench) -> None:
    before = attachments(bench.slaves[0])
    assert greets(bench, "s0", NEWCOMER) is not None
    bench.jump(2 * bench.config.evict_after_s)  # the master itself stood still: the wait begins again
    waited_s = 0.0
    while (refused := greets(bench, "s0", NEWCOMER)) is not None and refused.retry_after_s > 0:
        bench.advance(refused.retry_after_s)
        waited_s += refused.retry_after_s
    assert refused is not None
    assert refused.code is RefusalCode.NAME_TAKEN
    assert refused.exit_code == NAME_TAKEN_EXIT
    assert waited_s == pytest.approx(bench.config.evict_after_s, abs=1.0)
    assert bench.slaves[0].directory_id.hex()[:12] in refused.sentence
    assert "tcp://127.0.0.1:" in refused.sentence
    assert attachments(bench.slaves[0]) == before
    assert not bench.recorded("recovery")
    assert not bench.recorded("slave_lost")
    bench.push("a")
    assert bench.status().published == Version(1, 1)


def test_the_same_directory_takes_over_at_once(bench: Bench) -> None:
    slave = bench.slaves[0]
    slave.reattaches = False
    slave.attach()
    assert attachments(slave) == 2
    assert slave.link not in bench.closed


def test_a_replaced_disk_is_taken_once_the_process_before_is_gone(bench: Bench) -> None:
    bench.slaves[0].die()
    refused = greets(bench, "s0", NEWCOMER)
    assert refused is not None
    assert refused.retry_after_s > 0, "it may be dialling again"
    bench.advance(bench.config.settings.heartbeat_s)
    assert greets(bench, "s0", NEWCOMER, LINK + 1) is None
    bench.event(SlaveLinkDown(LINK + 1))


@pytest.mark.parametrize("comes", [True, False])
def test_after_a_restart_the_known_directory_comes_first_until_it_is_given_up(bench: Bench, comes: bool) -> None:
    bench.begin_anew()
    refused = greets(bench, "s0", NEWCOMER)
    assert refused is not None
    assert refused.code is RefusalCode.NAME_TAKEN
    if comes:
        bench.attach_all()
    bench.advance(bench.config.evict_after_s - 0.5)
    assert greets(bench, "s0", NEWCOMER) is not None
    bench.advance(0.5)
    assert (greets(bench, "s0", NEWCOMER) is not None) is comes
    assert bench.status().published == (Version(1, 0) if comes else None)
