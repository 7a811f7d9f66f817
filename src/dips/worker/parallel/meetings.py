"""What the ranks of a cluster tell the leader when they meet between two steps, and what follows from it.

Pure; the simulator uses it, too.

Ranks meet where something can be decided: at the step that makes a push due, at every step while a push or a pull is
under way, and else so often that news of the run are heard within NEWS_S. Between two meetings no message is sent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from dips.core.errors import ConfigError
from dips.core.layout import Chunk, shard_digest
from dips.worker.state.effects import Done, Failed

NEWS_S = 1.0
"""About how long a rank trains without hearing of the run: that it ends, that it drains this cluster, a SIGTERM."""

LATE_SHARE, LATE_S = 1.5, 1.0
"""A rank is late when its part of a transfer has taken so many times as long as the median of those that are done, and
at least so much longer."""

MOST_STEPS = 1000
"""Most steps between two meetings, whatever the measured speed."""


class TransferStage(IntEnum):
    """How a rank's part of the running job stands."""

    UNDER_WAY = 0
    MOVED = 1
    FAILED = 2


@dataclass(frozen=True)
class RankReport:
    """One rank's part of a meeting; of the steps since the last one."""

    steps: int = 0
    tokens: int = 0
    loss_sum: float = 0.0  # nats: each reported loss times its tokens
    loss_tokens: int = 0
    wants_to_leave: bool = False  # it got a SIGTERM
    leaves: bool = False  # its loop has ended
    job: int = -1
    stage: int = TransferStage.UNDER_WAY
    writes_checkpoint: bool = False  # its part of one is on its way to the disk
    empty_steps: int = 0  # before which its optimizers had no gradient
    empty_tokens: int = 0
    first_batches: int = 0  # a digest of them; 0: not known yet

    def numbers(self) -> list[float]:
        """As they travel; all counts are exact in float64."""
        return [float(value) for value in vars(self).values()]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> RankReport:
        steps, tokens, loss_sum, loss_tokens, wants, leaves, job, stage, writes, *rest = numbers
        counted = int(steps), int(tokens), loss_sum, int(loss_tokens)
        return cls(*counted, bool(wants), bool(leaves), int(job), int(stage), bool(writes), *map(int, rest))


@dataclass(frozen=True)
class Tally:
    """The cluster's steps since the last meeting. tokens: of all of them; loss: nats per token, NaN: none is known.
    empty_steps: further ones, before which no rank had a gradient.
    """

    steps: int
    tokens: int
    loss: float
    wants_to_leave: bool
    leaves: bool
    empty_steps: int = 0


def tally(reports: Sequence[RankReport], coordinates: Sequence[int]) -> Tally:
    """Add the ranks' reports up. coordinates: of each rank; those with the same one train on the same data, so that
    their tokens and loss count once. A loss is known on some of them only, as on the last stage of a pipeline.

    Raises ConfigError where ranks made other numbers of steps, or count other tokens for the same data.
    """
    leaving = sum(report.leaves for report in reports)
    if leaving not in (0, len(reports)):
        raise ConfigError(
            f"{leaving} of the {len(reports)} ranks of this cluster left the training loop while the others make a "
            "step: all ranks must make the same number of steps"
        )
    for rank, report in enumerate(reports):
        if report.steps != reports[0].steps:
            raise ConfigError(
                f"rank {rank} of this cluster made {report.steps} steps while rank 0 made {reports[0].steps}: all "
                "ranks must make the same number of steps"
            )
    # Some ranks may never have a gradient, as a frozen stage: those of the rank with the fewest are empty on all.
    empty_steps = min(report.empty_steps for report in reports)
    tokens, loss_sum, loss_tokens = 0, 0.0, 0
    for coordinate in sorted(set(coordinates)):
        ranks = [rank for rank, own in enumerate(coordinates) if own == coordinate]
        for rank in ranks[1:]:
            if reports[rank].tokens != reports[ranks[0]].tokens:
                raise ConfigError(
                    f"ranks {ranks[0]} and {rank} of this cluster train on the same data, and count "
                    f"{reports[ranks[0]].tokens} and {reports[rank].tokens} tokens for it: give them the same count, "
                    "or dips.Parallel(data_mesh=...) if their data differ"
                )
        first = reports[ranks[0]]
        tokens += first.tokens
        if empty_steps:
            tokens -= first.empty_tokens * empty_steps // first.empty_steps
        known = [reports[rank] for rank in ranks if reports[rank].loss_tokens]
        if known:
            # The mean of what they say, with the weight of their data.
            weight = reports[ranks[0]].tokens or known[0].loss_tokens
            loss_sum += weight * math.fsum(each.loss_sum / each.loss_tokens for each in known) / len(known)
            loss_tokens += weight
    loss = loss_sum / loss_tokens if loss_tokens else math.nan
    wants = any(report.wants_to_leave for report in reports)
    return Tally(reports[0].steps - empty_steps, tokens, loss, wants, leaving > 0, empty_steps)


def same_batches(reports: Sequence[RankReport], coordinates: Sequence[int]) -> tuple[int, ...] | None:
    """Ranks that should train on different data, and began with the same batches: the first of each coordinate; none
    where all differ, None while a rank does not know its first batches yet. (Ranks with one coordinate share their
    data; stages of a pipeline and parts of a sequence need not be called with the same tensors for it.)
    """
    if not all(report.first_batches for report in reports):
        return None
    seen: dict[int, dict[int, int]] = {}
    for rank, (report, coordinate) in enumerate(zip(reports, coordinates, strict=True)):
        seen.setdefault(report.first_batches, {}).setdefault(coordinate, rank)
    return max((tuple(ranks.values()) for ranks in seen.values() if len(ranks) > 1), key=len, default=())


def next_meeting_steps(steps_to_push: int, steps_per_s: float) -> int:
    """Steps until the next meeting. steps_to_push: until a push is due; 1: something is under way already."""
    heard = max(1, int(NEWS_S * steps_per_s))
    return max(1, min(steps_to_push, heard, MOST_STEPS))


def late_ranks(moved_s: Mapping[int, float], n_ranks: int, taken_s: float) -> tuple[int, ...]:
    """The ranks that a transfer waits for, once half of them or more are done and the others are late. moved_s: seconds
    that the parts which are done took, by rank; taken_s: seconds since the transfer began.
    """
    if not 0 < n_ranks <= 2 * len(moved_s):
        return ()
    usual_s = statistics.median(moved_s.values())
    if taken_s < max(LATE_SHARE * usual_s, usual_s + LATE_S):
        return ()
    return tuple(rank for rank in range(n_ranks) if rank not in moved_s)


@dataclass(frozen=True)
class PartEnd:
    """How one rank's part of a job ended. failure: why, as a sentence; empty: it is all sent, or fetched."""

    job: int
    rank: int
    failure: str = ""
    base_gone: bool = False  # as in Failed
    corrupt: bool = False  # as in Failed
    checksums: Mapping[Chunk, int] = field(default_factory=dict)  # of the chunks that this rank owns, once all is done
    seconds: float = 0.0


def combined(
    ends: Sequence[PartEnd],
    n_ranks: int,
    chunks_of_slave: Mapping[str, Sequence[Chunk]],
    promised: Mapping[str, bytes] | None = None,
) -> Done | Failed | None:
    """The one end that a cluster's session knows, of these ends of all ranks' parts of one transfer, at most one of
    each rank; None: it has not ended. A push is sent when all of its bytes are, whoever sent them, and its digests
    cover all of them; a version is fetched when all of it is, and its bytes have the digests that the master gave.

    It fails as soon as one part has, for the most telling reason. chunks_of_slave: all chunks of the transfer, each
    slave's in any order. promised: the digests that a pull must have; None: it is a push, whose digests are the result.
    """
    failed = [end for end in ends if end.failure]
    if failed:
        worst = min(failed, key=lambda end: (not end.base_gone, not end.corrupt, end.rank))
        sentence = f"rank {worst.rank}: {worst.failure}"
        return Failed(worst.job, sentence, base_gone=worst.base_gone, corrupt=worst.corrupt)
    if len({end.rank for end in ends}) < n_ranks:
        return None
    job, seconds = ends[0].job, max(end.seconds for end in ends)
    checksums: dict[Chunk, int] = {}
    for end in ends:
        for chunk in end.checksums.keys() & checksums.keys():
            return Failed(job, f"rank {end.rank} and another one have both moved {chunk}, which one rank owns")
        checksums.update(end.checksums)
    digests: list[tuple[str, bytes]] = []
    for slave, chunks in chunks_of_slave.items():
        for chunk in chunks:
            if chunk not in checksums:
                return Failed(job, f"no rank of this cluster has moved {chunk}, of slave {slave}")
        digests.append((slave, shard_digest([checksums[chunk] for chunk in sorted(chunks)])))
    if promised is None:
        return Done(job, tuple(digests), seconds)
    for slave, digest in digests:
        if chunks_of_slave[slave] and promised.get(slave) != digest:
            sentence = f"the share of slave {slave} does not have the digest that its COMMIT record names"
            return Failed(job, sentence, corrupt=True)
    return Done(job, None, seconds)
