"""Data leases: every token of every pass is in exactly one state (I12), whatever happens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.master_bench import LEASED, OWN, Bench, refused_with

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import DataMode, DataPlan, LeaseDataRequest, Measure, ReturnDataRequest
from dips.core.protocol import MAX_LEASED_CHUNKS
from dips.master.state.leases import FREE, MAX_RANGES_IN_A_MESSAGE, IntervalMap, LeaseTable, TokenState

PLAN = DataPlan(DataMode.LEASED, b"x", 950, 100)


@given(st.lists(st.tuples(st.integers(0, 59), st.integers(1, 20), st.integers(0, 3)), max_size=40))
def test_interval_map_equals_a_plain_list(puts: list[tuple[int, int, int]]) -> None:
    line = IntervalMap(60, 0)
    plain = [0] * 60
    for begin, length, value in puts:
        end = min(60, begin + length)
        line.put(begin, end, value)
        plain[begin:end] = [value] * (end - begin)
    assert [value for begin, end, value in line for _ in range(begin, end)] == plain
    values = [value for _, _, value in line]
    assert all(left != right for left, right in itertools.pairwise(values)), "equal neighbours are one"
    assert [v for b, e, v in line.over(10, 50) for _ in range(b, e)] == plain[10:50]


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (-1, 3), (0, 61), (9, 4)])
def test_interval_map_refuses_empty_or_outside(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="empty or outside"):
        IntervalMap(60, 0).put(begin, end, 1)


def test_leases_are_whole_pieces_of_chunks_and_never_cross_a_border() -> None:
    table = LeaseTable(PLAN)
    first = table.lease("a", 150)
    assert [(r.chunk, r.begin_tokens, r.end_tokens) for r in first] == [(0, 0, 100), (1, 0, 100)]
    rest = table.lease("b", 750)
    assert (rest[-1].chunk, rest[-1].end_tokens) == (9, 50), "the last chunk is shorter"
    assert table.lease("a", 1)[0].pass_index == 1
    assert len({r.lease_id for r in (*first, *rest)}) == 10


def test_returned_part_of_a_chunk_is_lent_again_before_a_new_pass() -> None:
    table = LeaseTable(PLAN)
    (lease,) = table.lease("a", 100)
    table.settle([lease], TokenState.APPLIED)
    (other,) = table.lease("a", 100)
    half = type(other)(other.lease_id, 0, other.chunk, 40, 100)
    table.check("a", [half])
    table.settle([half], TokenState.FREE)
    again = table.lease("b", 10)
    assert [(r.chunk, r.begin_tokens, r.end_tokens) for r in again] == [(1, 40, 100)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lease", "apply", "exclude", "free", "restart", "json"]),
            st.sampled_from("abc"),
            st.integers(1, 260),
        ),
        max_size=50,
    )
)
def test_every_token_is_in_exactly_one_state_and_applied_at_most_once(steps: list[tuple[str, str, int]]) -> None:
    table = LeaseTable(PLAN)
    held: dict[str, list[object]] = {name: [] for name in "abc"}
    settled = {TokenState.APPLIED: 0, TokenState.EXCLUDED: 0}
    for action, name, size in steps:
        if action == "lease":
            held[name].extend(table.lease(name, size))
        elif action == "restart":
            kept = held[name][: size % (len(held[name]) + 1)]
            table.free_all_but(name, kept)  # type: ignore[arg-type]
            held[name] = kept
        elif action == "json":
            table = LeaseTable.from_json(PLAN, table.to_json())
        elif held[name]:
            item = held[name].pop()
            to = {"apply": TokenState.APPLIED, "exclude": TokenState.EXCLUDED, "free": TokenState.FREE}[action]
            table.check(name, [item])  # type: ignore[list-item]
            table.settle([item], to)  # type: ignore[list-item]
            if to in settled:
                settled[to] += item.tokens  # type: ignore[attr-defined]
                with pytest.raises(Refused):
                    table.check(name, [item])  # type: ignore[list-item]
    totals = table.totals()
    passes = {p for p, *_ in table.holdings()}
    assert sum(totals.values()) == PLAN.total_tokens * len(passes)
    assert totals[TokenState.LEASED] == sum(r.tokens for rows in held.values() for r in rows)  # type: ignore[attr-defined]
    assert {state: totals[state] for state in settled} == settled
    for p in passes:
        edges = [(b, e) for q, b, e, _ in table.holdings() if q == p]
        assert edges[0][0] == 0
        assert edges[-1][1] == PLAN.total_tokens
        assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))


def test_free_means_free() -> None:
    table = LeaseTable(PLAN)
    table.lease("a", 100)
    assert table.free_all_but("a", []) == 100
    assert all(holding == FREE for _, _, _, holding in table.holdings())


def test_lease_and_return_calls() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    ranges = bench.lease("a", 250)
    assert sum(r.tokens for r in ranges) == 300
    bench.ask(ReturnDataRequest(bench.caller("a"), ranges[1:]))
    assert bench.status().leased_tokens == 100
    with refused_with(RefusalCode.RANGES):
        bench.ask(ReturnDataRequest(bench.caller("b"), ranges[:1]))
    with refused_with(RefusalCode.RANGES):
        bench.ask(ReturnDataRequest(bench.caller("a"), ranges[1:]))


def test_request_repeated_after_a_lost_answer_gets_the_same_ranges() -> None:
    bench = Bench(plan=LEASED).running("a")
    first = bench.ask(LeaseDataRequest(bench.caller("a"), 100, 1))
    assert bench.ask(LeaseDataRequest(bench.caller("a"), 100, 1)) == first
    assert bench.status().leased_tokens == 100
    second = bench.ask(LeaseDataRequest(bench.caller("a"), 100, 2))
    assert not set(first.ranges) & set(second.ranges)


def test_ranges_in_an_undecided_push_cannot_be_returned() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", 100)
    bench.begin_push("a", 100, ranges)
    with refused_with(RefusalCode.RANGES):
        bench.ask(ReturnDataRequest(bench.caller("a"), ranges))


@pytest.mark.parametrize("tokens", [0, -5, 1 << 40])
def test_absurd_lease_is_refused(tokens: int) -> None:
    bench = Bench(plan=LEASED).running("a")
    with refused_with(RefusalCode.TOKENS):
        bench.lease("a", tokens)


def test_no_leases_where_clusters_bring_their_own_data() -> None:
    bench = Bench(plan=OWN).running("a")
    with refused_with(RefusalCode.DATA_PLAN):
        bench.ask(LeaseDataRequest(bench.caller("a"), 10))


def test_faster_cluster_leases_more() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    bench.lease("a", 300)
    bench.lease("b", 100)
    leased = {c.cluster_id: c.leased_tokens for c in bench.status().clusters}
    assert leased == {"a": 300, "b": 100}


def test_part_of_a_range_in_an_undecided_push_cannot_be_returned() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    (lease,) = bench.lease("a", 100)
    bench.slaves[0].hold.add(Measure)
    bench.push("a", 100, (lease,))
    bench.advance(1.5)
    half = replace(lease, begin_tokens=50)
    with refused_with(RefusalCode.RANGES):
        bench.ask(ReturnDataRequest(bench.caller("a"), (half,)))
    assert bench.lease("b", 50)[0].chunk == 1
    bench.slaves[0].release(Measure)
    assert bench.status().tokens == 100
    assert applied(bench) == 100


def applied(bench: Bench) -> int:
    leases = bench.state.shared.ledger.leases
    assert leases is not None
    return leases.totals()[TokenState.APPLIED]


def test_ranges_of_an_aborted_push_are_free_when_the_process_that_held_them_is_gone() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", 200)
    bench.slaves[0].hold.add(Measure)
    bench.push("a", 200, ranges)
    bench.join("a", held=(replace(ranges[0], end_tokens=30),))
    other = bench.lease("a", 100)
    bench.slaves[0].die()
    assert bench.status().leased_tokens == 130, "what the new process said it holds, and its own lease"
    leases = bench.state.shared.ledger.leases
    assert leases is not None
    leases.check("a", (replace(ranges[0], end_tokens=30), *other))


def test_ranges_of_an_aborted_push_stay_with_the_process_that_made_it() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", 200)
    bench.slaves[0].hold.add(Measure)
    bench.push("a", 200, ranges)
    bench.slaves[0].die()
    assert bench.status().leased_tokens == 200


def test_no_cluster_holds_more_pieces_than_it_can_name() -> None:
    table = LeaseTable(DataPlan(DataMode.LEASED, b"x", 1 << 40, 1))
    for _ in range(MAX_RANGES_IN_A_MESSAGE // MAX_LEASED_CHUNKS):
        assert len(table.lease("a", 1 << 30)) == MAX_LEASED_CHUNKS
        if len(list(table.holdings())) > 2000:
            break
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dips.master.state.leases.MAX_RANGES_IN_A_MESSAGE", 2000)
        with pytest.raises(Refused, match="return some"):
            table.lease("a", 1)
        assert table.lease("b", 1)


def test_lease_request_that_was_overtaken_lends_nothing() -> None:
    bench = Bench(plan=LEASED).running("a")
    bench.ask(LeaseDataRequest(bench.caller("a"), 100, 2))
    with refused_with(RefusalCode.SEQ):
        bench.ask(LeaseDataRequest(bench.caller("a"), 100, 1))
    assert bench.status().leased_tokens == 100
