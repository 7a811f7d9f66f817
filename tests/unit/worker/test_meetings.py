"""What follows from what the ranks of a cluster tell the leader, and the orders that they get."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dips.core.errors import ConfigError, DipsError, FatalError, RefusalCode, Refused, RemoteProtocolError, RetryLater
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Chunk, shard_digest
from dips.core.messages import Caller, DataRange, PlacementSpec, PullGrant, Settings, SlaveAddress, Ticket
from dips.core.wire import Codec
from dips.worker import commands
from dips.worker.parallel.meetings import (
    MOST_STEPS,
    PartEnd,
    RankReport,
    TransferStage,
    combined,
    late_ranks,
    next_meeting_steps,
    same_batches,
    tally,
)
from dips.worker.state.effects import Cancel, ClearResidual, CopyBase, Done, Failed, Install, InstallMode, KeepResidual
from dips.worker.state.waiting import GivenTimes, times_of

TIMES = times_of(GivenTimes(), Settings())
PLACEMENT = PlacementSpec((SlaveAddress("s0", "tcp://127.0.0.1:1"),), (0, 0), b"hash")
PUSH = PushId(ClusterId("a"), Incarnation(1, 2), 3)
CALLER = Caller("run", 1, ClusterId("a"), Incarnation(1, 2), "a/1.2#3")
GRANT = PullGrant(Version(1, 4), 2, 5, PLACEMENT, (0, 1), (("s0", b"digest"),), 100, 30, None, 4096, 1, "run")
ORDERS: list[commands.Order] = [
    commands.ShareOut(4096), commands.Snapshot(may_stay_live=False, whole=True), CopyBase(),
    commands.Send(7, PUSH, Ticket(1, PLACEMENT, (1, 0)), CALLER, Settings(), TIMES),
    commands.Fetch(8, GRANT, "cause", TIMES, True, False), Cancel(7), KeepResidual(Codec.BF16), ClearResidual(),
    Install(InstallMode.REBASE_FROM_PUSH, reset_inner=True), commands.Ask(), commands.AskEnds(7),
    commands.GoOn(True, False, True, 1, 4, 10**12, 30, True, 8, 10**12, 2, True, True),
    commands.Ranges((DataRange(1, 0, 7, 0, 1024), DataRange(2, 1, 8, 512, 1024)), are_all=True),
    commands.Ranges((), are_all=False), commands.GiveUp("ConfigError", "a sentence", 0),
    commands.BeginCheckpoint(3, "{}"), commands.CommitCheckpoint(), commands.FindCheckpoint(3), commands.PutBack(True),
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_given(order: commands.Order) -> None:
    assert commands.from_bytes(commands.to_bytes(order)) == order


@pytest.mark.parametrize("data", [
    b"", b"[]", b"\xff", b'{"order": "exec"}', b'{"order": "Cancel"}', b'{"order": "Cancel", "job": "7"}',
    b'{"order": "Cancel", "job": 7, "also": 1}', b'{"order": "KeepResidual", "wire": "F17"}',
    b'{"order": "GoOn", "done": true}', b'{"order": "Ranges", "ranges": [[1, 0, 7, 0, "1024"]], "are_all": true}',
    b'{"order": "Ranges", "ranges": [[1, 0, 7]], "are_all": true}',
    b'{"order": "Ranges", "ranges": 3, "are_all": true}', commands.to_bytes(commands.GoOn())[:-1],
    commands.to_bytes(commands.GoOn()) + b"\0", commands.to_bytes(ORDERS[3]).replace(b'"push":"', b'"push":"!'),
    commands.to_bytes(ORDERS[4]).replace(b'"retry_max_s"', b'"retry"'),
])  # fmt: skip
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="sent an order that cannot be read"):
        commands.from_bytes(data)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("wrong: do this"), ConfigError("wrong: do this")),
        (Refused(RefusalCode.LAYOUT, "another model"), Refused(RefusalCode.LAYOUT, "another model")),
        (RetryLater("no master"), RetryLater("no master")),
        (ValueError("a bug"), FatalError("rank 0 of this cluster has failed: its own error says why")),
    ],
)
def test_the_leaders_error_ends_the_others_with_the_same_sentence_and_exit_code(
    error: Exception, expected: DipsError
) -> None:
    order = commands.from_bytes(commands.to_bytes(commands.GiveUp.of(error)))
    assert isinstance(order, commands.GiveUp)
    raised = order.error()
    assert (type(raised), str(raised), raised.exit_code) == (type(expected), str(expected), expected.exit_code)


TWO = [RankReport(3, 30, 60.0, 30), RankReport(3, 10, 40.0, 10)]


def test_a_report_travels_as_numbers() -> None:
    report = RankReport(3, 2**52 + 1, 1.5, 7, True, False, 12, TransferStage.MOVED, True, 2, 40, 2**48 - 1)
    assert RankReport.of_numbers(report.numbers()) == report


def test_tokens_losses_and_a_wish_to_leave_are_added_up_over_ranks() -> None:
    total = tally(TWO, (0, 1))
    assert (total.steps, total.tokens, total.loss, total.leaves) == (3, 40, 2.5, False)
    total = tally([TWO[0], replace(TWO[0], loss_sum=0.0, loss_tokens=0), TWO[1], TWO[1]], (0, 0, 1, 1))
    assert (total.tokens, total.loss) == (40, 2.5), "the loss is known on one stage of a pipeline only"
    assert math.isnan(tally([RankReport(1, 5), RankReport(1, 5)], (0, 1)).loss)
    assert tally([TWO[0], replace(TWO[1], wants_to_leave=True)], (0, 1)).wants_to_leave


@pytest.mark.parametrize(
    ("empty", "steps", "tokens"),
    [
        ([(0, 0), (0, 0), (3, 10)], 3, 40),  # a stage that is frozen
        ([(1, 10), (1, 10), (3, 10)], 2, 27),
        ([(3, 30), (3, 30), (3, 10)], 0, 0),
    ],
)
def test_a_step_before_which_no_rank_had_a_gradient_is_not_counted(
    empty: list[tuple[int, int]], steps: int, tokens: int
) -> None:
    made = [TWO[0], TWO[0], TWO[1]]
    reports = [replace(one, empty_steps=n, empty_tokens=of) for one, (n, of) in zip(made, empty, strict=True)]
    total = tally(reports, (0, 0, 1))
    assert (total.steps, total.tokens, total.empty_steps) == (steps, tokens, 3 - steps)


@pytest.mark.parametrize(
    ("batches", "coordinates", "same"),
    [
        ([7, 7, 8, 0], (0, 1, 2, 3), None),  # one of them has made too few steps
        ([7, 8, 9, 6], (0, 1, 2, 3), ()),
        ([7, 7, 8, 8], (0, 0, 1, 1), ()),  # tensor-parallel ranks are given the same
        ([7, 9, 8, 6], (0, 0, 1, 1), ()),  # stages of a pipeline are not
        ([7, 7, 7, 7], (0, 0, 1, 1), (0, 2)),
        ([6, 8, 7, 8], (0, 1, 2, 3), (1, 3)),
    ],
)
def test_ranks_that_began_with_the_same_batches_of_data_that_should_differ_are_found(
    batches: list[int], coordinates: tuple[int, ...], same: tuple[int, ...] | None
) -> None:
    assert same_batches([RankReport(first_batches=each) for each in batches], coordinates) == same


@pytest.mark.parametrize(
    ("reports", "coordinates", "sentence"),
    [
        ([TWO[0], replace(TWO[1], leaves=True)], (0, 1), "1 of the 2 ranks of this cluster left the training loop"),
        ([TWO[0], replace(TWO[1], steps=2)], (0, 1), "rank 1 of this cluster made 2 steps while rank 0 made 3"),
        (TWO, (0, 0), "ranks 0 and 1 of this cluster train on the same data, and count 30 and 10 tokens for it"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(
    reports: list[RankReport], coordinates: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tally(reports, coordinates)


@pytest.mark.parametrize(
    ("to_push", "steps_per_s", "expected"),
    [(1, 100.0, 1), (30, 100.0, 30), (500, 100.0, 100), (500, 0.1, 1), (10**6, 1e6, MOST_STEPS), (5, 0.0, 1)],
)
def test_ranks_meet_when_a_push_is_due_and_else_about_once_a_second(
    to_push: int, steps_per_s: float, expected: int
) -> None:
    assert next_meeting_steps(to_push, steps_per_s) == expected


@pytest.mark.parametrize(
    ("moved_s", "taken_s", "late"),
    [
        ({}, 100.0, ()),  # no rank is done: none is late
        ({0: 10.0}, 100.0, ()),  # most are not done
        ({0: 10.0, 1: 12.0}, 13.0, ()),
        ({0: 10.0, 1: 12.0}, 17.0, (2, 3)),
        ({0: 10.0, 1: 12.0, 3: 11.0}, 17.0, (2,)),
        ({0: 0.1, 1: 0.1, 3: 0.1}, 0.9, ()),  # a second is not worth a word
        ({0: 0.1, 1: 0.1, 3: 0.1}, 1.2, (2,)),
        ({0: 10.0, 1: 12.0, 2: 11.0, 3: 90.0}, 90.0, ()),
    ],
)
def test_a_rank_is_late_when_the_others_have_long_been_done(
    moved_s: dict[int, float], taken_s: float, late: tuple[int, ...]
) -> None:
    assert late_ranks(moved_s, 4, taken_s) == late


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
