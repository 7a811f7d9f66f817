"""Which slave each transfer goes to first: the paper's Figure 5 with equal links, and what unequal ones make of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.master_bench import Bench

from dips.core.ids import SlaveId
from dips.core.messages import Hello, SlaveBeat, StagingProgress, Ticket
from dips.core.placement import Placement
from dips.core.protocol import RANKS
from dips.master.state.schedule import TransferRequest, TransferScheduler, Way

ROUND_S = 0.5
"""A whole transfer of the fastest cluster."""


def placement_of(*blocks_of_slave: int) -> Placement:
    """So many blocks for each slave, dealt one after the other."""
    slaves = tuple(SlaveId(f"s{i}") for i in range(len(blocks_of_slave)))
    owners = [i for turn in range(max(blocks_of_slave)) for i, n in enumerate(blocks_of_slave) if turn < n]
    return Placement(slaves, tuple(owners))


def visits(order: tuple[int, ...], placement: Placement) -> list[int]:
    """The slaves in the order in which a transfer comes to them."""
    return list(dict.fromkeys(placement.slave_of_block[block] for block in order))


def request(number: int, way: Way = Way.PUSH, slowness: float = 1.0) -> TransferRequest:
    return TransferRequest(f"c{number}", way, number, slowness * ROUND_S, ROUND_S)


@pytest.mark.parametrize(("n_slaves", "clusters"), [(1, 3), (2, 4), (4, 4), (3, 8), (4, 2)])
def test_in_each_step_clusters_are_spread_evenly_over_slaves(n_slaves: int, clusters: int) -> None:
    placement = placement_of(*[4] * n_slaves)
    scheduler = TransferScheduler()
    orders = [scheduler.begin(request(c), placement) for c in range(clusters)]
    for order in orders:
        assert sorted(order) == list(range(4 * n_slaves))
    for step in range(4 * n_slaves):
        busy = [placement.slave_of_block[order[step]] for order in orders]
        assert max(map(busy.count, busy)) == math.ceil(clusters / n_slaves)


def test_a_transfer_begins_where_no_other_began() -> None:
    """Slots 0 and 4 would meet at slave 0; those that are over disturb no other."""
    placement = placement_of(1, 1, 1, 1)
    scheduler = TransferScheduler()
    starts = [visits(scheduler.begin(request(c), placement), placement)[0] for c in (0, 0, 4, 8)]
    assert starts == [0, 0, 1, 2], "one that begins again is not in its own way"
    assert visits(scheduler.begin(request(16, Way.PULL), placement), placement)[0] == 0, "pulls do not meet pushes"
    scheduler.end("c0")
    scheduler.end("nobody")
    assert visits(scheduler.begin(request(12), placement), placement)[0] == 0


def of_ranks(number: int, pushers: int, slowness: float = 1.0) -> TransferRequest:
    return TransferRequest(f"c{number}", Way.PUSH, number, slowness * ROUND_S, ROUND_S, pushers)


def begins_of(order: tuple[int, ...], placement: Placement, pushers: int) -> list[int]:
    """Where each rank begins, each with the order rotated by its number."""
    slaves = visits(order, placement)
    return [slaves[rank % len(slaves)] for rank in range(pushers)]


@pytest.mark.parametrize(("pushers", "clusters"), [(2, 2), (2, 4), (4, 2), (3, 4), (6, 2)])
def test_ranks_of_all_clusters_are_spread_evenly_over_slaves(pushers: int, clusters: int) -> None:
    placement = placement_of(3, 3, 3, 3)
    scheduler = TransferScheduler()
    starts: list[int] = []
    for number in range(clusters):
        starts += begins_of(scheduler.begin(of_ranks(number, pushers), placement), placement, pushers)
    assert [starts.count(slave) for slave in range(4)] == [pushers * clusters // 4] * 4


def test_one_rank_begins_where_the_fewest_of_other_clusters_began() -> None:
    placement = placement_of(1, 1, 1, 1)
    scheduler = TransferScheduler()
    scheduler.begin(of_ranks(0, 3), placement)
    assert begins_of(scheduler.begin(of_ranks(4, 1), placement), placement, 1) == [3]
    assert begins_of(scheduler.begin(of_ranks(1, 2), placement), placement, 2) == [1, 2], "the third at slave 3 alone"
    scheduler.end("c0")
    assert begins_of(scheduler.begin(of_ranks(8, 1), placement), placement, 1) == [0]
    two = placement_of(1, 1)
    many = TransferScheduler()
    many.begin(of_ranks(0, 2), two)
    many.begin(of_ranks(1, 1), two)
    assert begins_of(many.begin(of_ranks(3, 1), two), two, 1) == [0], "many ranks share the rate of their one cluster"


def test_a_slow_cluster_counts_for_what_it_sends() -> None:
    """Two slaves, one with a cluster ten times slower: that is where the third begins."""
    placement = placement_of(1, 1)
    scheduler = TransferScheduler()
    scheduler.begin(request(0, slowness=10.0), placement)
    scheduler.begin(request(1), placement)
    assert visits(scheduler.begin(request(3), placement), placement)[0] == 0


def test_a_slave_that_beats_show_to_be_slow_comes_first_in_every_round() -> None:
    placement = placement_of(2, 2, 2)
    scheduler = TransferScheduler()
    for beat in range(4):
        for slave, n_bytes in (("s2", 100), ("s1", 1000), ("s0", 900)):
            scheduler.beat(slave, n_bytes, 10 * n_bytes * beat, 2.0 * beat)
    assert scheduler.speed("s2", Way.PUSH) == pytest.approx(0.1)
    assert scheduler.speed("s2", Way.PULL) == pytest.approx(0.1)
    assert (scheduler.speed("s0", Way.PUSH), scheduler.speed("s1", Way.PUSH)) == (1.0, 1.0)
    assert visits(scheduler.begin(request(0), placement), placement) == [2, 0, 1]


def test_a_slave_that_slows_down_is_believed_bit_by_bit_and_one_that_recovers_at_once() -> None:
    scheduler = TransferScheduler()
    speeds = []
    for beat in range(40):
        scheduler.beat("s0", 1000 if beat < 5 or beat > 35 else 100, 0, 2.0 * beat)
        scheduler.beat("s1", 1000, 0, 2.0 * beat)
        speeds.append(scheduler.speed("s0", Way.PUSH))
    assert speeds[4] == speeds[6] == 1.0
    assert speeds[30] == pytest.approx(0.1)
    assert speeds[36] == 1.0


def test_a_beat_without_traffic_and_a_restarted_slave_measure_nothing() -> None:
    scheduler = TransferScheduler()
    for beat, served in enumerate((0, 5000, 5000, 0, 100)):
        scheduler.beat("s0", 0, served, 2.0 * beat)
        scheduler.beat("s1", 0, 2500 * beat, 2.0 * beat)
    assert scheduler.speed("s0", Way.PUSH) == 1.0
    assert scheduler.speed("s0", Way.PULL) == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(Way), st.floats(0, 50), st.integers(1, 9)), max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.floats(0.0, 100.0),
)
def test_every_order_names_every_block_once(
    begun: list[tuple[int, Way, float, int]], blocks: list[int], fastest_s: float
) -> None:
    placement = placement_of(*blocks)
    scheduler = TransferScheduler()
    for number, way, slowness, pushers in begun:
        request = TransferRequest(f"c{number}", way, number, slowness * 10, fastest_s, pushers)
        order = scheduler.begin(request, placement)
        assert sorted(order) == list(range(sum(blocks)))
        for slave in range(len(blocks)):
            mine = [block for block in order if placement.slave_of_block[block] == slave]
            assert mine == sorted(mine)


@pytest.mark.parametrize(("pushers", "third"), [(1, 0), (2, 1)])
def test_tickets_stagger_the_clusters_and_their_ranks_and_beats_are_measured(pushers: int, third: int) -> None:
    bench = Bench(2)
    for slave in bench.slaves:
        slave.hello = Hello(1, 1, (RANKS,))
    bench.running("a", "b", "c")
    bench.join("b", pushers=pushers)
    bench.pulls("a", "b", "c")
    world = bench.state.shared
    placement = world.ledger.placement
    assert placement is not None
    assert world.schedule.begin(request(0, Way.PULL), placement_of(1, 1)) == (0, 1), "all pulls are over"
    tickets = [bench.begin_push(name) for name in ("a", "b", "c")]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    assert [visits(ticket.block_order, placement)[0] for ticket in tickets] == [0, 1, third]
    for number, slave in enumerate(bench.slaves):
        for landed in (1, 2):
            progress = StagingProgress(bench.clusters["a"].push_id, 1, landed * 1000 * (1 + 9 * number))
            bench.now_s += 1.0
            slave.say(SlaveBeat(progress=(progress,)))
    assert world.schedule.speed(bench.slaves[0].name, Way.PUSH) == pytest.approx(0.1)


def test_a_cluster_that_is_gone_in_the_middle_of_a_push_is_in_nobodys_way() -> None:
    bench = Bench(2).running("a", "b")
    assert isinstance(bench.begin_push("a"), Ticket)
    assert bench.state.shared.schedule.n_under_way == 1
    bench.advance(1.0)
    assert bench.state.shared.schedule.n_under_way == 1, "it is under way"
    bench.silent.add("a")
    bench.advance(100.0)
    assert "a" not in bench.state.shared.members
    assert bench.state.shared.schedule.n_under_way == 0
