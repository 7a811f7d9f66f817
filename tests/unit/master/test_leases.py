"""Data leases: every token of every pass is in exactly one state (I12), whatever happens."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.master_bench import LEASED, OWN, Bench, refused_with

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import DataMode, DataPlan, DataRange, LeaseDataRequest, Measure, ReturnDataRequest
from dips.core.protocol import MAX_LEASED_CHUNKS
from dips.master.state.leases import MAX_RANGES_IN_A_MESSAGE, SETTLED, IntervalMap, LeaseTable, TokenState

FOUR_CHUNKS = DataPlan(DataMode.LEASED, b"x", 400, 100)


@given(st.lists(st.tuples(st.integers(0, 59), st.integers(1, 20), st.integers(0, 3)), max_size=40))
def test_interval_map_equals_a_plain_list(puts: list[tuple[int, int, int]]) -> None:
    line, plain = IntervalMap(60, 0), [0] * 60
    for begin, length, value in puts:
        end = min(60, begin + length)
        line.put(begin, end, value)
        plain[begin:end] = [value] * (end - begin)
    assert [value for begin, end, value in line for _ in range(begin, end)] == plain
    assert all(left[2] != right[2] for left, right in itertools.pairwise(line)), "equal neighbours are one"
    assert [v for b, e, v in line.over(10, 50) for _ in range(b, e)] == plain[10:50]


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (-1, 3), (0, 61), (9, 4)])
def test_interval_map_refuses_empty_or_outside(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="empty or outside"):
        IntervalMap(60, 0).put(begin, end, 1)


# ---- what the table forgets: which tokens of a pass were applied, and passes that are over ----


class PlainTable:
    """Forgets nothing: the state, cluster and lease of each token by itself."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self.passes: list[list[tuple[TokenState, str, int]]] = []

    def tokens(self, item: DataRange) -> range:
        origin = item.chunk * self.plan.chunk_tokens
        return range(origin + item.begin_tokens, origin + item.end_tokens)

    def lease(self, cluster: str, lease_id: int, want_tokens: int) -> list[DataRange]:
        granted: list[DataRange] = []
        while sum(item.tokens for item in granted) < want_tokens:
            free = ((p, t) for p, line in enumerate(self.passes) for t, held in enumerate(line) if held == PLAIN_FREE)
            first = next(free, None)
            if first is None:
                self.passes.append([PLAIN_FREE] * self.plan.total_tokens)
                continue
            pass_index, begin = first
            line, end = self.passes[pass_index], begin
            while end < len(line) and line[end] == PLAIN_FREE and end // self.plan.chunk_tokens == self.chunk(begin):
                end += 1
            origin = self.chunk(begin) * self.plan.chunk_tokens
            item = DataRange(lease_id + len(granted), pass_index, self.chunk(begin), begin - origin, end - origin)
            granted.append(item)
            self.put(item, (TokenState.LEASED, cluster, item.lease_id))
        return granted

    def chunk(self, token: int) -> int:
        return token // self.plan.chunk_tokens

    def put(self, item: DataRange, held: tuple[TokenState, str, int]) -> None:
        for token in self.tokens(item):
            self.passes[item.pass_index][token] = held

    def accepts(self, cluster: str, item: DataRange) -> bool:
        wanted = (TokenState.LEASED, cluster, item.lease_id)
        return all(self.passes[item.pass_index][token] == wanted for token in self.tokens(item))

    def free_all_but(self, cluster: str, kept: list[DataRange]) -> int:
        keep = {(item.pass_index, token) for item in kept for token in self.tokens(item)}
        freed = 0
        for pass_index, line in enumerate(self.passes):
            for token, (_, holder, _) in enumerate(line):
                if holder == cluster and (pass_index, token) not in keep:
                    line[token] = PLAIN_FREE
                    freed += 1
        return freed

    def totals(self) -> dict[TokenState, int]:
        counted = Counter(state for line in self.passes for state, _, _ in line)
        return {state: counted[state] for state in TokenState}


PLAIN_FREE = (TokenState.FREE, "", 0)


def accepts(table: LeaseTable, cluster: str, item: DataRange) -> bool:
    try:
        table.check(cluster, [item])
    except Refused:
        return False
    return True


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lease", "lease", "apply", "apply", "exclude", "return", "rejoin", "abort", "json"]),
            st.sampled_from("ab"),
            st.integers(1, 40),
        ),
        max_size=60,
    )
)
def test_table_answers_like_one_that_forgets_nothing(steps: list[tuple[str, str, int]]) -> None:
    plan = DataPlan(DataMode.LEASED, b"x", 19, 5)
    table, plain = LeaseTable(plan), PlainTable(plan)
    granted: list[tuple[str, DataRange]] = []
    for action, name, size in steps:
        held = [item for cluster, item in granted if cluster == name and plain.accepts(name, item)]
        if action == "lease":
            items = plain.lease(name, table.next_lease_id, size)
            assert table.lease(name, size) == tuple(items)
            granted += [(name, item) for item in items]
        elif action == "rejoin":
            kept = held[: size % (len(held) + 1)]
            assert table.free_all_but(name, kept) == plain.free_all_but(name, kept)
        elif action == "abort":
            mine = [item for cluster, item in granted if cluster == name]
            kept = held[: size % (len(held) + 1)]
            table.free(name, mine, kept)  # of ranges from any time, also of those that are applied since
            plain.free_all_but(name, kept)
        elif action == "json":
            table = LeaseTable.from_json(plan, json.loads(json.dumps(table.to_json())))
        elif held:
            item = held[size % len(held)]
            part = replace(item, end_tokens=item.begin_tokens + 1 + size % item.tokens)
            to = {"apply": TokenState.APPLIED, "exclude": TokenState.EXCLUDED, "return": TokenState.FREE}[action]
            table.settle([part], to)
            plain.put(part, (to, "", 0))
            if part.tokens < item.tokens:
                granted.append((name, replace(item, begin_tokens=part.end_tokens)))
        assert table.totals() == plain.totals()
        for cluster in "ab":
            assert table.leased_tokens()[cluster] == sum(who == cluster for line in plain.passes for _, who, _ in line)
    for cluster, item in granted:
        for asks in "ab":
            assert accepts(table, asks, item) == plain.accepts(asks, item), (cluster, item)
    live = sum(piece.state is not SETTLED.state for *_, piece in table.holdings())
    assert len(table.to_json()["holdings"]) <= 3 * live


def test_ranges_of_another_cluster_or_of_no_pass_are_not_freed() -> None:
    table = LeaseTable(FOUR_CHUNKS)
    (lease,) = table.lease("a", 100)
    table.free("b", [lease], [])
    table.free("a", [replace(lease, pass_index=9)], [])
    assert table.leased_tokens()["a"] == 100


def test_table_does_not_grow_with_passes_of_which_every_second_chunk_is_excluded() -> None:
    table = LeaseTable(FOUR_CHUNKS)
    outcomes = (TokenState.APPLIED, TokenState.EXCLUDED)
    for number in range(2000 * 4):
        (item,) = table.lease("a", 1)
        table.settle([item], outcomes[number % 2])
        assert len(json.dumps(table.to_json())) < 300
    assert table.to_json()["begun"] == 2000
    assert table.totals() == dict.fromkeys(TokenState, 0) | dict.fromkeys(outcomes, 2000 * 200)


def test_rollback_over_the_end_of_a_pass_makes_its_data_free_again() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", LEASED.total_tokens)
    bench.push("a", sum(item.tokens for item in ranges[:-1]), ranges[:-1])
    bench.pull("a")
    bench.push("a", ranges[-1].tokens, ranges[-1:])
    assert applied(bench) == LEASED.total_tokens
    after = bench.status().published
    assert after is not None
    bench.slaves[0].come_back_without(after)
    assert applied(bench) == LEASED.total_tokens - ranges[-1].tokens
    bench.pull("a")
    (again,) = bench.lease("a", 1)
    assert (again.pass_index, again.chunk) == (0, ranges[-1].chunk)


# ---- tables that earlier releases wrote: a row for each state of each pass ----


OLD: dict[str, Any] = {
    "passes": 3,
    "next_lease_id": 9,
    "holdings": [
        [0, 0, 400, "applied", "", 0], [1, 0, 100, "applied", "", 0], [1, 100, 150, "excluded", "", 0],
        [1, 150, 400, "applied", "", 0], [2, 0, 100, "applied", "", 0], [2, 100, 200, "leased", "a", 8],
        [2, 200, 400, "free", "", 0],
    ],
}  # fmt: skip


def test_table_of_an_earlier_release_loads() -> None:
    table = LeaseTable.from_json(FOUR_CHUNKS, OLD)
    assert table.totals() == {
        TokenState.FREE: 200,
        TokenState.LEASED: 100,
        TokenState.APPLIED: 850,
        TokenState.EXCLUDED: 50,
    }
    assert {p for p, *_ in table.holdings()} == {2}
    table.check("a", [DataRange(8, 2, 1, 0, 100)])
    assert not accepts(table, "a", DataRange(8, 0, 1, 0, 100))
    assert table.lease("b", 1) == (DataRange(9, 2, 2, 0, 100),)
    assert LeaseTable.from_json(FOUR_CHUNKS, table.to_json()).to_json() == table.to_json()
    assert "passes" not in table.to_json(), "the earlier release must refuse it: to it a pass without rows is free"


@pytest.mark.parametrize("change", [
    lambda raw: raw.update(passes=1 << 40), lambda raw: raw.update(passes=2), lambda raw: raw["holdings"].pop(),
    lambda raw: raw["holdings"].append([2, 0, 100, "applied", "", 0]),
    lambda raw: raw["holdings"].append([3, 0, 400, "free", "", 0]),
    lambda raw: raw.update(settled={"applied": 100, "excluded": 0}),
    lambda raw: raw.update(settled={"applied": 400, "excluded": -400}),
], ids=["many passes", "few passes", "a gap", "twice", "a pass more", "counted twice", "less than none"])  # fmt: skip
def test_table_that_does_not_add_up_is_not_read(change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(json.dumps(OLD))
    change(raw)
    with pytest.raises(ValueError, match="lease table"):
        LeaseTable.from_json(FOUR_CHUNKS, raw)


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


def test_request_repeated_after_a_lost_answer_gets_the_same_ranges_and_one_that_was_overtaken_none() -> None:
    bench = Bench(plan=LEASED).running("a")
    first = bench.ask(LeaseDataRequest(bench.caller("a"), 100, 1))
    assert bench.ask(LeaseDataRequest(bench.caller("a"), 100, 1)) == first
    assert bench.status().leased_tokens == 100
    second = bench.ask(LeaseDataRequest(bench.caller("a"), 100, 2))
    assert not set(first.ranges) & set(second.ranges)
    with refused_with(RefusalCode.SEQ):
        bench.ask(LeaseDataRequest(bench.caller("a"), 100, 1))
    assert bench.status().leased_tokens == 200


@pytest.mark.parametrize(("plan", "tokens", "code"), [
    (LEASED, 0, RefusalCode.TOKENS), (LEASED, -5, RefusalCode.TOKENS),
    (LEASED, MAX_LEASED_CHUNKS * LEASED.chunk_tokens + 1, RefusalCode.TOKENS), (OWN, 10, RefusalCode.DATA_PLAN),
])  # fmt: skip
def test_lease_that_cannot_be_is_refused(plan: DataPlan, tokens: int, code: RefusalCode) -> None:
    bench = Bench(plan=plan).running("a")
    with refused_with(code):
        bench.lease("a", tokens)


def test_part_of_a_range_in_an_undecided_push_cannot_be_returned() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    (lease,) = bench.lease("a", 100)
    bench.slaves[0].hold.add(Measure)
    bench.push("a", 100, (lease,))
    bench.advance(1.5)
    for part in (lease, replace(lease, begin_tokens=50)):
        with refused_with(RefusalCode.RANGES):
            bench.ask(ReturnDataRequest(bench.caller("a"), (part,)))
    assert bench.lease("b", 50)[0].chunk == 1
    bench.slaves[0].release(Measure)
    assert bench.status().tokens == 100
    assert applied(bench) == 100


def applied(bench: Bench) -> int:
    leases = bench.state.shared.ledger.leases
    assert leases is not None
    return leases.totals()[TokenState.APPLIED]


def test_ranges_of_an_aborted_push_stay_with_its_process_and_are_free_when_that_is_gone() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", 200)
    bench.slaves[0].hold.add(Measure)
    bench.push("a", 200, ranges)
    bench.slaves[0].die()
    assert bench.status().leased_tokens == 200
    bench.slaves[0].attach()
    bench.push("a", 200, ranges)
    bench.join("a", held=(replace(ranges[0], end_tokens=30),))
    other = bench.lease("a", 100)
    bench.slaves[0].die()
    assert bench.status().leased_tokens == 130, "what the new process said it holds, and its own lease"
    leases = bench.state.shared.ledger.leases
    assert leases is not None
    leases.check("a", (replace(ranges[0], end_tokens=30), *other))


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
