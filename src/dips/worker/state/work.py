"""Keeps the work that is trained and not decided yet: steps, tokens, and the leased ranges that they came from.

Every leased range is in exactly one of held (not trained yet), pending (trained, not pushed), in the push, or no longer
kept here (decided, or to be returned to the master). Never loses one, never counts one twice (I12).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dips.core.errors import LocalProtocolError
from dips.core.messages import DataRange


@dataclass(frozen=True)
class Work:
    """Some inner steps. loss_sum adds the finite losses of n_losses of them, nats per token."""

    ranges: tuple[DataRange, ...] = ()
    tokens: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    n_losses: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            joined(self.ranges + other.ranges),
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.loss_sum + other.loss_sum,
            self.n_losses + other.n_losses,
        )

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.n_losses if self.n_losses else math.nan

    def __str__(self) -> str:
        return f"{self.steps} {'step' if self.steps == 1 else 'steps'} with {self.tokens} tokens"


class WorkBook:
    """Held ranges, and the work that is pending and in the push."""

    def __init__(self) -> None:
        self.held: tuple[DataRange, ...] = ()
        self.pending = Work()
        self.in_push: Work | None = None
        self.lost = False
        """Some pending work used data that is no longer this cluster's: it can only be dropped."""
        self.times_forgotten = 0
        """How often held ranges were taken back by the master."""
        self.counted = self.dropped = Work()
        """All work that was done here and that the run has counted, and that which does not count."""

    @property
    def uncounted(self) -> Work:
        """All work that was done here and that the run has not counted, as far as known."""
        return self.dropped + replace((self.in_push or Work()) + self.pending, ranges=())

    @property
    def tokens(self) -> int:
        """Tokens trained here and not decided yet."""
        return self.pending.tokens + (self.in_push.tokens if self.in_push else 0)

    def leased(self, ranges: Sequence[DataRange]) -> None:
        self.held = joined(self.held + tuple(ranges))

    def stepped(self, tokens: int, ranges: Sequence[DataRange], loss: float, steps: int = 1) -> None:
        """Count steps, usually one. Raises LocalProtocolError, nothing changed, when a range is not held."""
        self.held = without(self.held, ranges)
        known = steps if math.isfinite(loss) else 0
        self.pending += Work(joined(ranges), tokens, steps, loss * known if known else 0.0, known)

    def freeze(self) -> Work:
        """All pending work goes into the push."""
        if self.in_push is not None:
            raise LocalProtocolError("a push is open already: its work must be decided before the next one")
        self.in_push, self.pending = self.pending, Work()
        return self.in_push

    def thaw(self) -> None:
        """The push does not count: its work is pending again, before later work."""
        self.pending = (self.in_push or Work()) + self.pending
        self.in_push = None

    def decided(self, *, counts: bool) -> None:
        """The push is APPLIED (it counts) or EXCLUDED; its ranges are no longer kept here."""
        work = replace(self.in_push or Work(), ranges=())
        if counts:
            self.counted += work
        else:
            self.dropped += work
        self.in_push = None

    def drop(self) -> tuple[DataRange, ...]:
        """Forget all work; the ranges it came from, to be given back FREE."""
        self.thaw()
        self.dropped += replace(self.pending, ranges=())
        ranges, self.pending, self.lost = self.pending.ranges, Work(), False
        return ranges

    def keep(self, kept: Sequence[DataRange]) -> None:
        """Only `kept` is still leased to this cluster: forget other held ranges, and mark pending work on them as lost.

        Does not touch the push: its verdict decides about its ranges.
        """
        kept = joined(kept)  # ranges that were separate when Join named them may have been joined since
        held = tuple(item for item in self.held if is_within(item, kept))
        if held != self.held:
            self.held, self.times_forgotten = held, self.times_forgotten + 1
        still = tuple(item for item in self.pending.ranges if is_within(item, kept))
        if still != self.pending.ranges:
            self.pending, self.lost = replace(self.pending, ranges=still), True

    def decided_elsewhere(self, ranges: Sequence[DataRange]) -> tuple[DataRange, ...]:
        """A push of an earlier incarnation, of these ranges, was counted: never train on a range that shares a token.

        Pending work must be dropped after this. Returns the rest of the held ranges that go, to be returned.
        """
        gone = tuple(item for item in self.held if less([item], ranges) != (item,))
        if gone:
            self.held = tuple(item for item in self.held if item not in gone)
            self.times_forgotten += 1
        self.pending = replace(self.pending, ranges=less(self.pending.ranges, ranges))
        return less(gone, ranges)

    def all_ranges(self) -> tuple[DataRange, ...]:
        """The ranges named in Join. Held, pending and pushed ranges stay separate, since each may end differently."""
        in_push = self.in_push.ranges if self.in_push else ()
        return tuple(sorted(self.held + self.pending.ranges + in_push))


def joined(ranges: Iterable[DataRange]) -> tuple[DataRange, ...]:
    """The same tokens in order, with adjacent ranges of one lease joined."""
    merged: list[DataRange] = []
    for item in sorted(ranges):
        last = merged[-1] if merged else None
        if last is not None and _place(last) == _place(item) and last.end_tokens == item.begin_tokens:
            merged[-1] = _cut(last, last.begin_tokens, item.end_tokens)
        else:
            merged.append(item)
    return tuple(merged)


def is_within(item: DataRange, ranges: Iterable[DataRange]) -> bool:
    """Whether one of the ranges holds all of this one."""
    return any(
        _place(home) == _place(item) and home.begin_tokens <= item.begin_tokens < item.end_tokens <= home.end_tokens
        for home in ranges
    )


def _place(item: DataRange) -> tuple[int, int, int]:
    return item.lease_id, item.pass_index, item.chunk


def _cut(item: DataRange, begin_tokens: int, end_tokens: int) -> DataRange:
    return DataRange(item.lease_id, item.pass_index, item.chunk, begin_tokens, end_tokens)


def without(held: Sequence[DataRange], taken: Iterable[DataRange]) -> tuple[DataRange, ...]:
    """`held` without `taken`. Raises LocalProtocolError when something is taken that is not there."""
    rest = tuple(sorted(held))
    for item in taken:
        if not is_within(item, rest):
            raise LocalProtocolError(
                f"a step claims tokens {item.begin_tokens}-{item.end_tokens} of chunk {item.chunk} (pass "
                f"{item.pass_index}, lease {item.lease_id}), which this cluster does not hold or has counted before"
            )
        rest = less(rest, [item])
    return rest


def less(ranges: Iterable[DataRange], taken: Iterable[DataRange]) -> tuple[DataRange, ...]:
    """`ranges` without the tokens of `taken`, which need not all be there."""
    rest = list(ranges)
    for other in taken:
        pieces: list[DataRange] = []
        for item in rest:
            apart = other.end_tokens <= item.begin_tokens or item.end_tokens <= other.begin_tokens
            if apart or _place(item) != _place(other):
                pieces.append(item)
                continue
            ends = (item.begin_tokens, other.begin_tokens), (other.end_tokens, item.end_tokens)
            pieces += [_cut(item, begin, end) for begin, end in ends if begin < end]
        rest = pieces
    return tuple(sorted(rest))
