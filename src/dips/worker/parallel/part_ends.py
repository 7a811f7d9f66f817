"""Combines the ends of all ranks' parts of one transfer to the one end that a cluster's session knows.

A push is sent when all of its bytes are, whoever sent them, and its digests cover all of them; a version is fetched
when all of it is, and its bytes have the digests that the master gave. Pure; the simulator uses it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dips.core.layout import Chunk, shard_digest
from dips.worker.state.effects import Done, Failed


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
    """The end of the job of these ends, at most one of each rank; None: it has not ended.

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
