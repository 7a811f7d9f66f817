"""The lease table: every token of every pass is in exactly one of FREE, LEASED, APPLIED, EXCLUDED (I12).

The tokens of a pass are numbered in one line; a lease is a range of it that never crosses a chunk's border. A cluster
gets as much as it asks for, so faster clusters lease more. EXCLUDED tokens are not trained again.

APPLIED and EXCLUDED tokens are settled: they never change again, and no decision depends on which of the two a token
is. So the table only counts them, and forgets a pass once all of it is settled. Its size depends on what is free or
leased now, not on how long the run is, which matters because every journal entry holds the whole table. (A ROLLBACK
changes no settled token either: it continues with the table that an older COMMIT's record holds.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import DataPlan, DataRange
from dips.core.protocol import MAX_LEASED_CHUNKS

# ---- intervals -------------------------------------------------------------------------------------------------------
#
# A map from token positions [0, total) to values, kept as intervals; neighbours of equal value are one interval.
#
# Memory is proportional to the number of boundaries, not of tokens.


V = TypeVar("V")


class IntervalMap(Generic[V]):
    """Every position in [0, total) has exactly one value."""

    def __init__(self, total: int, value: V) -> None:
        self.total = total
        self._starts: list[int] = [0]
        self._values: list[V] = [value]

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        """(begin, end, value), in order."""
        ends = [*self._starts[1:], self.total]
        return iter(list(zip(self._starts, ends, self._values, strict=True)))

    def is_all(self, value: V) -> bool:
        """Whether every position has this value."""
        return self._values == [value]

    def over(self, begin: int, end: int) -> list[tuple[int, int, V]]:
        """The intervals within [begin, end), cut to it, with their values."""
        pieces: list[tuple[int, int, V]] = []
        index = bisect_right(self._starts, begin) - 1
        while index < len(self._starts) and self._starts[index] < end:
            stop = self._starts[index + 1] if index + 1 < len(self._starts) else self.total
            pieces.append((max(begin, self._starts[index]), min(end, stop), self._values[index]))
            index += 1
        return pieces

    def put(self, begin: int, end: int, value: V) -> None:
        """Sets the value of [begin, end)."""
        if not 0 <= begin < end <= self.total:
            raise ValueError(f"[{begin}, {end}) is empty or outside [0, {self.total})")
        first = self._cut(begin)
        last = self._cut(end) if end < self.total else len(self._starts)
        self._starts[first:last] = [begin]
        self._values[first:last] = [value]
        self._merge(first + 1)
        self._merge(first)

    def _cut(self, at: int) -> int:
        """Makes `at` a boundary and returns its index."""
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] == at:
            return index
        self._starts.insert(index + 1, at)
        self._values.insert(index + 1, self._values[index])
        return index + 1

    def _merge(self, index: int) -> None:
        if 0 < index < len(self._starts) and self._values[index - 1] == self._values[index]:
            del self._starts[index]
            del self._values[index]


# ---- leases ----------------------------------------------------------------------------------------------------------


MAX_RANGES_IN_A_MESSAGE = 65_536
"""This is also the most pieces that one cluster may hold: it must be able to name them all when it joins again."""


class TokenState(Enum):
    FREE = "free"
    LEASED = "leased"
    APPLIED = "applied"
    EXCLUDED = "excluded"


class PieceState(Enum):
    """What the table knows of a piece of a pass. SETTLED: its tokens are APPLIED or EXCLUDED."""

    FREE = "free"
    LEASED = "leased"
    SETTLED = "settled"


@dataclass(frozen=True)
class Holding:
    """The state of a piece of a pass; cluster and lease_id are set only when LEASED."""

    state: PieceState
    cluster: str = ""
    lease_id: int = 0


FREE = Holding(PieceState.FREE)
SETTLED = Holding(PieceState.SETTLED)


class LeaseTable:
    """The state of every token of every pass that was begun."""

    def __init__(self, plan: DataPlan) -> None:
        self._plan = plan
        self._n_begun = 0  # passes
        self._open: dict[int, IntervalMap[Holding]] = {}  # the passes that are not wholly settled, the oldest first
        self._settled = {TokenState.APPLIED: 0, TokenState.EXCLUDED: 0}  # tokens of all passes
        self._next_lease_id = 1

    def lease(self, cluster: str, want_tokens: int) -> tuple[DataRange, ...]:
        """Leases whole free pieces of chunks, oldest pass first, up to want_tokens or the most pieces in one message.

        A new pass begins when nothing is free. Raises Refused(RANGES) when the cluster holds too many pieces already.
        """
        held = sum(holding.cluster == cluster for _, _, _, holding in self.holdings())
        if held + MAX_LEASED_CHUNKS > MAX_RANGES_IN_A_MESSAGE:
            raise Refused(
                RefusalCode.RANGES,
                f"cluster {cluster} holds {held} pieces of data and cannot have more: train on them, or return some",
            )
        granted: list[DataRange] = []
        tokens = 0
        free = self._free_pieces()
        while tokens < want_tokens and len(granted) < MAX_LEASED_CHUNKS:
            pass_index, begin, end = next(free)
            lease_id = self._next_lease_id
            self._next_lease_id += 1
            self._open[pass_index].put(begin, end, Holding(PieceState.LEASED, cluster, lease_id))
            chunk = begin // self._plan.chunk_tokens
            origin = chunk * self._plan.chunk_tokens
            granted.append(DataRange(lease_id, pass_index, chunk, begin - origin, end - origin))
            tokens += end - begin
        return tuple(granted)

    def check(self, cluster: str, ranges: Sequence[DataRange]) -> None:
        """Raises Refused(RANGES) unless all ranges are leased to the cluster under their lease ids and none overlap."""
        if len(ranges) > MAX_RANGES_IN_A_MESSAGE:
            raise Refused(RefusalCode.RANGES, f"{len(ranges)} ranges at once: at most {MAX_RANGES_IN_A_MESSAGE}")
        seen: dict[int, int] = {}
        for item in sorted(ranges, key=lambda r: (r.pass_index, r.chunk, r.begin_tokens)):
            begin, end = self._line(item)
            if seen.get(item.pass_index, 0) > begin:
                raise Refused(RefusalCode.RANGES, f"range {describe(item)} overlaps another of the same message")
            seen[item.pass_index] = end
            wanted = Holding(PieceState.LEASED, cluster, item.lease_id)
            line = self._open.get(item.pass_index)
            for _, _, holding in [(begin, end, SETTLED)] if line is None else line.over(begin, end):
                if holding != wanted:
                    now = "applied or excluded already" if holding == SETTLED else "free"
                    if holding.cluster:
                        now = f"leased to {holding.cluster} (lease {holding.lease_id})"
                    raise Refused(
                        RefusalCode.RANGES,
                        f"range {describe(item)} is not leased to {cluster}: it is {now}; join again to learn what you "
                        "hold",
                    )

    def settle(self, ranges: Iterable[DataRange], state: TokenState) -> None:
        """Moves ranges that check() accepted to FREE, APPLIED or EXCLUDED."""
        for item in ranges:
            begin, end = self._line(item)
            line = self._open[item.pass_index]
            if state is TokenState.FREE:
                line.put(begin, end, FREE)
                continue
            line.put(begin, end, SETTLED)
            self._settled[state] += end - begin
            if line.is_all(SETTLED):
                del self._open[item.pass_index]

    def free_all_but(self, cluster: str, kept: Iterable[DataRange]) -> int:
        """Frees what the cluster leases, except `kept`; returns the number of tokens freed."""
        keep, freed = _by_chunk(kept), 0
        for pass_index, line in self._open.items():
            for begin, end, holding in line:
                if holding.state is PieceState.LEASED and holding.cluster == cluster:
                    for low, high in self._without(pass_index, begin, end, keep):
                        line.put(low, high, FREE)
                        freed += high - low
        return freed

    def free(self, cluster: str, ranges: Iterable[DataRange], kept: Iterable[DataRange]) -> None:
        """Frees what the cluster still leases of `ranges`, except `kept`."""
        keep = _by_chunk(kept)
        for item in ranges:
            line, mine = self._open.get(item.pass_index), Holding(PieceState.LEASED, cluster, item.lease_id)
            if line is None:
                continue
            for low, high in self._without(item.pass_index, *self._line(item), keep):
                for begin, end, holding in line.over(low, high):
                    if holding == mine:
                        line.put(begin, end, FREE)

    def free_all(self) -> None:
        """Frees everything that is leased."""
        for line in self._open.values():
            for begin, end, holding in line:
                if holding.state is PieceState.LEASED:
                    line.put(begin, end, FREE)

    @property
    def next_lease_id(self) -> int:
        return self._next_lease_id

    def number_from(self, lease_id: int) -> None:
        """Sets the lowest number for new leases, so that no number that was ever given out is used again."""
        self._next_lease_id = max(self._next_lease_id, lease_id)

    def totals(self) -> dict[TokenState, int]:
        """Tokens by state over all passes that were begun."""
        totals = {TokenState.FREE: 0, TokenState.LEASED: 0, **self._settled}
        for _, begin, end, holding in self.holdings():
            if holding != SETTLED:
                totals[TokenState(holding.state.value)] += end - begin
        return totals

    def leased_tokens(self) -> Counter[str]:
        """Leased tokens by cluster."""
        tokens: Counter[str] = Counter()
        for _, begin, end, holding in self.holdings():
            if holding.state is PieceState.LEASED:
                tokens[holding.cluster] += end - begin
        return tokens

    def holdings(self) -> Iterator[tuple[int, int, int, Holding]]:
        """(pass, begin, end, holding) for every piece of the passes that are not wholly settled."""
        for pass_index, line in self._open.items():
            for begin, end, holding in line:
                yield pass_index, begin, end, holding

    def to_json(self) -> dict[str, Any]:
        """As from_json reads it. Older releases wrote "passes" and no counts; without that name they refuse this table,
        whose passes without rows they would lease again."""
        rows = [[p, b, e, h.state.value, h.cluster, h.lease_id] for p, b, e, h in self.holdings()]
        settled = {state.value: tokens for state, tokens in self._settled.items()}
        return {"begun": self._n_begun, "next_lease_id": self._next_lease_id, "holdings": rows, "settled": settled}

    @staticmethod
    def from_json(plan: DataPlan, raw: Mapping[str, Any]) -> LeaseTable:
        """Raises ValueError when the tokens do not add up.

        A table of an older release has "passes" and no counts: it has rows for all passes, also applied and excluded.
        """
        table, counts = LeaseTable(plan), raw.get("settled", {})
        table._n_begun = int(raw["begun"] if "begun" in raw else raw["passes"])
        table._next_lease_id = int(raw["next_lease_id"])
        table._settled = {state: int(counts.get(state.value, 0)) for state in table._settled}
        lines: dict[int, IntervalMap[Holding]] = {}
        for pass_index, begin, end, state, cluster, lease_id in raw["holdings"]:
            line = lines.setdefault(pass_index, IntervalMap(plan.total_tokens, SETTLED))
            if state in (TokenState.APPLIED.value, TokenState.EXCLUDED.value):
                line.put(begin, end, SETTLED)
                table._settled[TokenState(state)] += end - begin
            else:
                line.put(begin, end, Holding(PieceState(state), cluster, lease_id))
        table._open = {index: line for index, line in sorted(lines.items()) if not line.is_all(SETTLED)}
        n_tokens, known = sum(table.totals().values()), all(0 <= index < table._n_begun for index in lines)
        if not known or n_tokens != table._n_begun * plan.total_tokens or min(table._settled.values()) < 0:
            raise ValueError(f"the lease table does not add up: {n_tokens} tokens in {table._n_begun} passes")
        return table

    def _free_pieces(self) -> Iterator[tuple[int, int, int]]:
        """(pass, begin, end) of the free pieces of chunks, the oldest pass first; then new passes begin, without end.

        A piece that was yielded may be leased before the next one is asked for.
        """
        for pass_index, line in self._open.items():
            for begin, end, holding in line:
                if holding == FREE:
                    yield from self._chunks_of(pass_index, begin, end)
        while True:
            pass_index = self._n_begun
            self._n_begun += 1
            self._open[pass_index] = IntervalMap(self._plan.total_tokens, FREE)
            yield from self._chunks_of(pass_index, 0, self._plan.total_tokens)

    def _chunks_of(self, pass_index: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """[begin, end) cut at the borders of chunks."""
        while begin < end:
            stop = min(end, (begin // self._plan.chunk_tokens + 1) * self._plan.chunk_tokens)
            yield pass_index, begin, stop
            begin = stop

    def _line(self, item: DataRange) -> tuple[int, int]:
        """The range's place on its pass's line; raises Refused(RANGES) when it has none."""
        origin = item.chunk * self._plan.chunk_tokens
        begin, end = origin + item.begin_tokens, origin + item.end_tokens
        inside = 0 <= item.begin_tokens < item.end_tokens <= self._plan.chunk_tokens and item.chunk >= 0
        if not (inside and 0 <= item.pass_index < self._n_begun and end <= self._plan.total_tokens):
            raise Refused(RefusalCode.RANGES, f"range {describe(item)} is outside the run's data")
        return begin, end

    def _without(
        self, pass_index: int, begin: int, end: int, keep: Mapping[tuple[int, int], Sequence[DataRange]]
    ) -> list[tuple[int, int]]:
        """[begin, end) less the kept ranges; the interval lies within one chunk, as every lease does."""
        pieces: list[tuple[int, int]] = []
        chunks = range(begin // self._plan.chunk_tokens, (end - 1) // self._plan.chunk_tokens + 1)
        at = begin
        for item in sorted((r for c in chunks for r in keep.get((pass_index, c), ())), key=lambda r: self._line(r)):
            low, high = self._line(item)
            if low > at:
                pieces.append((at, min(low, end)))
            at = max(at, high)
        if at < end:
            pieces.append((at, end))
        return [(low, high) for low, high in pieces if low < high]


def overlapping(ranges: Iterable[DataRange], others: Iterable[DataRange]) -> list[DataRange]:
    """Those of `ranges` that share a token with one of `others`."""
    taken = _by_chunk(others)
    return [
        item
        for item in ranges
        for other in taken.get((item.pass_index, item.chunk), ())
        if item.begin_tokens < other.end_tokens and other.begin_tokens < item.end_tokens
    ]


def _by_chunk(ranges: Iterable[DataRange]) -> dict[tuple[int, int], list[DataRange]]:
    found: dict[tuple[int, int], list[DataRange]] = {}
    for item in ranges:
        found.setdefault((item.pass_index, item.chunk), []).append(item)
    return found


def describe(item: DataRange) -> str:
    """A range in words, for people."""
    return f"{item.begin_tokens}-{item.end_tokens} of chunk {item.chunk}, pass {item.pass_index}, lease {item.lease_id}"
