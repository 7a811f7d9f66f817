"""What the leader of a cluster's ranks knows of a transfer: which rank is late, and what each has moved."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.manual_clock import ManualClock

from dips.core.ids import ClusterId, Incarnation, PushId
from dips.core.layout import Chunk, Layout, Parameter
from dips.core.messages import Caller, PlacementSpec, Settings, SlaveAddress, Ticket
from dips.core.observe.tape import Tape
from dips.core.wire import Codec
from dips.worker.commands import AskEnds, KeepPush, Send, ShareOut, from_bytes
from dips.worker.data import LinkCounts, window_of_rank
from dips.worker.parallel.meetings import PartEnd, RankReport, TransferStage
from dips.worker.parallel.rank_part import LeadingPart, RankPart
from dips.worker.state.effects import Cancel, Done, Event, Failed
from dips.worker.state.waiting import GivenTimes, times_of

LAYOUT = Layout((Parameter("w", (4, 4), "float32", "w"),), block_elems=8)
CHUNKS = (Chunk(0, 0, 32), Chunk(1, 0, 32))
TICKET = Ticket(1, PlacementSpec((SlaveAddress("s0", "tcp://127.0.0.1:1"),), (0, 0), b"hash"), (0, 1), Codec.BF16)
PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
CALLER = Caller("run", 1, ClusterId("a"), Incarnation(1, 1), "a/1.1#1")
SEND = Send(7, PUSH, TICKET, CALLER, Settings(), times_of(GivenTimes(), Settings()))


class TwoRanks:
    """The ranks and the part of this process: each owns one chunk. ended: seconds of each rank's part, once it has."""

    n_ranks, layout = 2, LAYOUT

    push_is_live = True

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}
        self.failed: set[int] = set()
        self.done: list[object] = []
        """What both ranks were told, and did."""

    @property
    def agreed(self) -> TwoRanks:
        return self

    def say(self, order: bytes) -> None:
        self.done.append(from_bytes(order))

    def do(self, command: object) -> Any:
        assert self.done[-1] == command
        return self.ends(command.job) if isinstance(command, AskEnds) else None

    def record(self, tape: Tape, links: LinkCounts | None) -> None: ...

    def reports(self) -> list[RankReport]:
        moved = [TransferStage.MOVED if rank in self.ended else TransferStage.UNDER_WAY for rank in range(2)]
        stages = [TransferStage.FAILED if rank in self.failed else stage for rank, stage in enumerate(moved)]
        return [RankReport(job=7, stage=stage) for stage in stages]

    def ends(self, job: int) -> list[PartEnd]:
        failed = [PartEnd(job, rank, failure="slave s0 is gone") for rank in self.failed]
        return [PartEnd(job, rank, checksums={CHUNKS[rank]: 5}, seconds=s) for rank, s in self.ended.items()] + failed


def test_the_leader_names_the_late_rank_until_all_have_moved_theirs() -> None:
    clock, ranks, events = ManualClock(), TwoRanks(), list[Event]()
    leading = LeadingPart(cast(Any, ranks), cast(Any, ranks), clock)
    leading.begin(events.append, Tape(None, "worker", ""), None)
    leading.do(ShareOut(4096))
    assert leading.late_ranks == ()
    leading.do(SEND)

    def after(seconds: float) -> tuple[int, ...]:
        clock.advance(seconds)
        leading.heard(ranks.reports())
        leading.look()
        return leading.late_ranks

    assert after(4.0) == ()
    ranks.ended[1] = 4.0
    assert after(1.0) == ()
    assert after(5.0) == (0,)
    assert (events, AskEnds(7) in ranks.done) == ([], False)
    ranks.ended[0] = 12.0
    assert after(3.0) == ()
    assert after(3.0) == ()
    assert [type(event) for event in events] == [Done]
    assert ranks.done.count(AskEnds(7)) == 1
    leading.do(SEND)
    leading.do(Cancel(SEND.job))
    assert after(3.0) == ()
    assert len(events) == 1, "no one waits for it"
    leading.do(SEND)
    assert after(3.0) == (), "the ranks have ended an earlier transfer, which says nothing of this one"
    assert [type(event) for event in events] == [Done, Done]


def test_a_rank_reports_its_transfer_until_that_one_is_cancelled() -> None:
    nothing: Any = None
    part = RankPart(nothing, nothing, nothing, [], ManualClock(), None, None, lambda: False)
    part.do(SEND)
    part.do(Cancel(SEND.job - 1))
    assert part.report() == RankReport(job=SEND.job, stage=TransferStage.UNDER_WAY)
    for end, stage in (
        (PartEnd(SEND.job - 1, 0), TransferStage.UNDER_WAY),
        (PartEnd(SEND.job, 0), TransferStage.MOVED),
        (PartEnd(SEND.job, 0, "slave s0 is gone"), TransferStage.FAILED),
    ):
        part._ended.put(end)
        assert part.report() == RankReport(job=SEND.job, stage=stage)
    part.do(Cancel(SEND.job))
    assert part.report() == RankReport()


def test_a_part_that_failed_ends_the_parts_of_all_ranks_at_once() -> None:
    ranks, events = TwoRanks(), list[Event]()
    leading = LeadingPart(cast(Any, ranks), cast(Any, ranks), ManualClock())
    leading.begin(events.append, Tape(None, "worker", ""), LinkCounts())
    leading.do(ShareOut(4096))
    leading.do(SEND)
    ranks.failed.add(1)
    leading.heard(ranks.reports())
    leading.look()
    (failed,) = events
    assert isinstance(failed, Failed)
    assert (failed.job, "slave s0 is gone" in failed.sentence) == (SEND.job, True)
    assert ranks.done[-1] == Cancel(SEND.job), "the other rank would go on"


def test_all_ranks_keep_the_push_before_training_goes_on_and_none_does_when_they_no_longer_follow() -> None:
    ranks = TwoRanks()
    leading = LeadingPart(cast(Any, ranks), cast(Any, ranks), ManualClock())
    assert leading.push_is_live
    leading.do(KeepPush(needed=True))
    assert ranks.done == [KeepPush(needed=True)]
    leading.alone = True
    assert not leading.push_is_live, "nothing can be collected"


@pytest.mark.parametrize(("window_chunks", "n_ranks", "of_each"), [(64, 1, 64), (64, 16, 4), (64, 100, 1), (3, 2, 1)])
def test_ranks_divide_the_window(window_chunks: int, n_ranks: int, of_each: int) -> None:
    assert window_of_rank(window_chunks, n_ranks) == of_each
