"""The data of the curves: tokens, rate and losses over time, in bounded memory for runs of any length.

When the rows are full, every second one is dropped and samples are taken half as often. It must never fill a gap: a
loss that was not reported is null.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dips.core.messages import ClusterStatus
from dips.master.page.bounds import CHARTED_CLUSTERS, MAX_HELDOUT, MAX_ROWS

RATE_OVER_S = 30.0
"""Tokens a second are measured over this time, and over at least RATE_ROUNDS rounds: tokens come once a round."""

RATE_ROUNDS = 4


@dataclass(frozen=True)
class ProgressRow:
    """One sample. seq: of the sample, growing; losses by cluster, where there is one."""

    seq: int
    wall_s: float
    tokens: int
    rate_tokens_per_s: float
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heldout:
    """The held-out loss of one version, in nats per token of the evaluator (per byte, in the demo)."""

    seq: int
    wall_s: float
    version: str
    tokens: int
    loss: float


class RecentTokenRate:
    """Tokens a second, over the last rounds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, wall_s: float, tokens: int, publish_interval_s: float) -> float:
        """The rate with this sample; 0 while nothing is known."""
        if self._seen and (tokens < self._seen[-1][1] or wall_s < self._seen[-1][0]):
            self._seen.clear()  # after a rollback, or a clock that was set back
        self._seen.append((wall_s, tokens))
        over_s = max(RATE_OVER_S, RATE_ROUNDS * publish_interval_s)
        while len(self._seen) > 2 and self._seen[1][0] < wall_s - over_s:
            self._seen.popleft()
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class ProgressHistory:
    """Rows and held-out losses. Not thread-safe: it belongs to the page's thread."""

    def __init__(self, max_rows: int = MAX_ROWS, max_heldout: int = MAX_HELDOUT) -> None:
        self.rows: list[ProgressRow] = []
        self.heldout: list[Heldout] = []
        self.every = 1
        """One of this many samples becomes a row."""
        self.generation = 0
        """Changes when rows were dropped: a page with the old ones then needs all rows again."""
        self._max_rows, self._max_heldout = max_rows, max_heldout
        self._samples = 0
        self._names: list[str] = []
        self._rate = RecentTokenRate()
        self.rate_tokens_per_s = 0.0

    def add(self, wall_s: float, tokens: int, publish_interval_s: float, clusters: Sequence[ClusterStatus]) -> None:
        """Adds one sample."""
        self._samples += 1
        self.rate_tokens_per_s = self._rate.add(wall_s, tokens, publish_interval_s)
        if (self._samples - 1) % self.every:
            return
        self._chart(clusters)
        losses = {
            cluster.cluster_id: round(cluster.loss, 5)
            for cluster in clusters
            if cluster.alive and math.isfinite(cluster.loss) and cluster.cluster_id in self._names
        }
        self.rows.append(ProgressRow(self._samples, wall_s, tokens, self.rate_tokens_per_s, losses))
        if len(self.rows) > self._max_rows:
            self.rows = self.rows[::2]
            self.every *= 2
            self.generation += 1

    def add_heldout(self, wall_s: float, version: str, tokens: int, loss: float) -> None:
        """Adds a held-out loss; a version that was evaluated again replaces its old loss."""
        self.heldout = [point for point in self.heldout if point.version != version]
        self.heldout.append(Heldout(self._samples, wall_s, version, tokens, loss))
        if len(self.heldout) > self._max_heldout:
            self.heldout = [*self.heldout[:-1:2], self.heldout[-1]]
            self.generation += 1

    def full(self) -> dict[str, Any]:
        """All rows and losses, column by column."""
        return self._columns(self.rows, self.heldout)

    def since(self, seq: int) -> dict[str, Any]:
        """The rows and losses after the sample with this number."""
        rows = [row for row in self.rows[-16:] if row.seq > seq]
        return self._columns(rows, [point for point in self.heldout[-16:] if point.seq > seq])

    @property
    def seq(self) -> int:
        return self._samples

    @property
    def charted(self) -> list[str]:
        """Clusters whose losses are kept, in the order in which they were first seen."""
        return list(self._names)

    def _chart(self, clusters: Sequence[ClusterStatus]) -> None:
        for cluster in clusters:
            if cluster.cluster_id not in self._names and len(self._names) < CHARTED_CLUSTERS:
                self._names.append(cluster.cluster_id)

    def _columns(self, rows: Sequence[ProgressRow], heldout: Sequence[Heldout]) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "at": [round(row.wall_s, 1) for row in rows],
            "tokens": [row.tokens for row in rows],
            "rate": [round(row.rate_tokens_per_s, 1) for row in rows],
            "loss": {name: [row.losses.get(name) for row in rows] for name in self._names},
            "heldout": [
                {"at": round(p.wall_s, 1), "version": p.version, "tokens": p.tokens, "loss": round(p.loss, 5)}
                for p in heldout
            ],
        }
