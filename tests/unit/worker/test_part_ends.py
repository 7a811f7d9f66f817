"""The one end of a transfer, of the ends of several ranks' parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.core.layout import Chunk, shard_digest
from dips.worker.parallel.meetings import PartEnd, combined
from dips.worker.state.effects import Done, Failed

JOB = 7
A0, A1, B0 = Chunk(0, 0, 8), Chunk(0, 8, 8), Chunk(1, 0, 8)
SLAVES = {"b": [B0], "a": [A1, A0], "idle": []}
"""In the order of a schedule: its slaves and their chunks are in no order of their own."""

ENDS = [PartEnd(JOB, 0, checksums={A1: 11}, seconds=2.0), PartEnd(JOB, 1, checksums={A0: 10, B0: 20}, seconds=3.0)]
DIGESTS = (("b", shard_digest([20])), ("a", shard_digest([10, 11])), ("idle", shard_digest([])))


def test_a_push_is_sent_when_every_rank_has_sent_its_part_and_its_digests_cover_all_of_them() -> None:
    for some in ([], ENDS[:1], ENDS[1:]):
        assert combined(some, 2, SLAVES) is None
    assert combined(ENDS, 2, SLAVES) == combined(ENDS[::-1], 2, SLAVES) == Done(JOB, DIGESTS, 3.0)


def test_a_rank_that_owns_nothing_must_have_ended_too() -> None:
    assert combined(ENDS, 3, SLAVES) is None
    assert combined([*ENDS, PartEnd(JOB, 2, seconds=4.0)], 3, SLAVES) == Done(JOB, DIGESTS, 4.0)


def test_a_version_is_fetched_when_all_of_it_has_the_digests_that_were_promised() -> None:
    promised = dict(DIGESTS[:2])
    assert combined(ENDS, 2, SLAVES, promised) == Done(JOB, None, 3.0), "an idle slave has no digest to compare"
    end = combined(ENDS, 2, SLAVES, promised | {"a": shard_digest([11, 10])})
    assert isinstance(end, Failed)
    assert (end.corrupt, end.sentence) == (
        True,
        "the share of slave a does not have the digest that its COMMIT record names",
    )
    missing = combined(ENDS, 2, SLAVES, {"a": promised["a"]})
    assert isinstance(missing, Failed)
    assert missing.corrupt


def test_it_fails_as_soon_as_one_part_has() -> None:
    failed = replace(ENDS[1], failure="slave a is away", checksums={})
    assert combined([failed], 2, SLAVES) == Failed(JOB, "rank 1: slave a is away")
    assert combined([failed, ENDS[0]], 2, SLAVES) == Failed(JOB, "rank 1: slave a is away")


@pytest.mark.parametrize(
    ("telling", "expected"),
    [
        (PartEnd(JOB, 2, "no base", base_gone=True), Failed(JOB, "rank 2: no base", base_gone=True)),
        (PartEnd(JOB, 2, "bad bytes", corrupt=True), Failed(JOB, "rank 2: bad bytes", corrupt=True)),
        (PartEnd(JOB, 2, "away as well"), Failed(JOB, "rank 0: away")),
    ],
)
def test_the_most_telling_failure_is_given(telling: PartEnd, expected: Failed) -> None:
    assert combined([PartEnd(JOB, 0, "away"), PartEnd(JOB, 1, "away, too"), telling], 3, SLAVES) == expected


def test_a_chunk_that_two_ranks_moved_or_none_is_a_failure() -> None:
    twice = combined([*ENDS, PartEnd(JOB, 2, checksums={B0: 20})], 3, SLAVES)
    assert twice == Failed(JOB, f"rank 2 and another one have both moved {B0}, which one rank owns")
    lacking = combined([ENDS[0], replace(ENDS[1], checksums={A0: 10})], 2, SLAVES)
    assert lacking == Failed(JOB, f"no rank of this cluster has moved {B0}, of slave b")
