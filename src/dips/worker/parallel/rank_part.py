"""The parts of a cluster's ranks: all carry out the same commands, each on its share of the model.

The leader's shell gives commands to a LeadingPart, which tells all followers, and does its own part like each of them;
a follower does what it is told (follow()). Transfers run on each rank's data thread. How they end is asked for by the
leader, on the training thread as everything else here: when the ranks meet, and while its loop waits.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dips.core.clock import Clock
from dips.core.errors import ConfigError, FatalError, RemoteProtocolError
from dips.core.layout import Chunk, Share
from dips.core.messages import PlacementSpec
from dips.core.net.transfer import chunks_by_slave
from dips.core.net.zmq_sockets import CurvePair
from dips.core.observe.tape import Tape
from dips.worker.commands import (
    Ask,
    AskEnds,
    BeginCheckpoint,
    Command,
    CommitCheckpoint,
    Fetch,
    FindCheckpoint,
    GiveUp,
    GoOn,
    Order,
    PutBack,
    Ranges,
    Send,
    ShareOut,
    Snapshot,
    from_bytes,
    to_bytes,
)
from dips.worker.data import LinkCounts, RankShare
from dips.worker.model_part import ModelPart
from dips.worker.parallel.agreement import Agreed
from dips.worker.parallel.exchange import ShardParameters
from dips.worker.parallel.meetings import PartEnd, RankReport, TransferStage, combined, late_ranks
from dips.worker.parallel.ownership import shares_of_ranks
from dips.worker.parallel.rank_checkpoints import RankCheckpoints
from dips.worker.parallel.ranks import PATIENCE, SILENCE, Ranks
from dips.worker.parallel.replicas import Replicas
from dips.worker.state.effects import Cancel, Done, Event, Failed, StopWanted
from dips.worker.torch_model import clear_moments

T = TypeVar("T")

LOOK_FIRST_S, LOOK_MOST_S, LOOK_SHARE = 0.002, 0.05, 0.01
"""While the loop waits for a transfer, its ends are asked for so often: after a hundredth of the time that it has
taken, so that the answer adds no more than that."""

ALIVE_S = 0.5
"""While the loop waits for anything else, the others are asked so often, so that a dead one is noticed, also the leader
(ranks.SILENCE)."""

_TEXT_BYTES = 2048
"""Room for a part end's text; a longer sentence is cut."""


class RankPart:
    """One rank's part. Every method but close() is called on all ranks, in the same order."""

    def __init__(
        self,
        ranks: Ranks,
        agreed: Agreed,
        replicas: Replicas,
        optimizers: Sequence[torch.optim.Optimizer],
        clock: Clock,
        curve: CurvePair | None,
        checkpoints: RankCheckpoints | None,
        wants_to_leave: Callable[[], bool],
    ) -> None:
        """curve: this rank's own keys of the data flow, if any. checkpoints: None: it keeps none. wants_to_leave:
        whether this rank got a SIGTERM.
        """
        self._ranks = ranks
        self._agreed = agreed
        self._replicas = replicas
        self._optimizers = optimizers
        self._clock = clock
        self._curve = curve
        self._checkpoints = checkpoints
        self._wants_to_leave = wants_to_leave
        self._share: Share | None = None
        self._store: ShardParameters | None = None
        self._tape = Tape(None, "worker", "")
        self._links: LinkCounts | None = None
        self._part: ModelPart | None = None
        self._chunk_bytes = 0
        self._chunks: list[list[Chunk]] = []
        self._ended: queue.SimpleQueue[PartEnd] = queue.SimpleQueue()
        self._job = -1
        self._end: PartEnd | None = None
        self._with_residual = False

    @property
    def agreed(self) -> Agreed:
        return self._agreed

    def record(self, tape: Tape, links: LinkCounts | None) -> None:
        """Before all commands: the event record for what takes long here, and what counts this rank's traffic."""
        self._tape, self._links = tape, links

    def do(self, command: Order) -> Any:
        """Carry out a command. Returns what it asks for: of AskEnds the ranks' ends, of CommitCheckpoint what all have
        written, of FindCheckpoint each rank's sentence. Raises ConfigError where it cannot be, FatalError where another
        rank is gone.
        """
        match command:
            case ShareOut(chunk_bytes):
                return self._share_out(chunk_bytes)
            case AskEnds(job):
                return self.ends(job)
            case BeginCheckpoint(number, session):
                return self._kept.begin(*self._owned, number, session)
            case CommitCheckpoint():
                return self._kept.commit()
            case FindCheckpoint(number):
                return self._kept.find(number)
            case PutBack(with_residual):
                self._with_residual = with_residual
                return self._kept.put_back(*self._owned, with_residual=with_residual)
            case Snapshot():
                self._replicas.compare()
            case Send(job=job) | Fetch(job=job):
                self._job, self._end = job, None
            case Cancel(job):
                if job == self._job:
                    self._job, self._end = -1, None
        if self._part is not None and isinstance(command, Command):
            self._part.do(command)
        return None

    @property
    def push_is_live(self) -> bool:
        return self._part is not None and self._part.push_is_live

    def report(self) -> RankReport:
        """How this rank's part of the running job stands, and whether it wants to leave."""
        while not self._ended.empty():
            end = self._ended.get()
            if end.job == self._job:
                self._end = end
        stage = TransferStage.UNDER_WAY
        if self._end is not None:
            stage = TransferStage.FAILED if self._end.failure else TransferStage.MOVED
        writes = self._checkpoints is not None and self._checkpoints.is_writing
        return RankReport(wants_to_leave=self._wants_to_leave(), job=self._job, stage=stage, writes_checkpoint=writes)

    def ends(self, job: int) -> list[PartEnd]:
        """All ranks' ends of this job, as far as they have ended; only on the leader."""
        mine = self._end if self._end is not None and self._end.job == job else None
        room = _TEXT_BYTES + 8 * max(map(len, self._chunks), default=0)
        packed = b"" if mine is None else _packed(mine, self._chunks[self._ranks.rank])
        ends = []
        for rank, data in enumerate(self._ranks.report_bytes(packed, room)):
            end = _unpacked(data, rank, job, self._chunks[rank])
            if end is not None:
                ends.append(end)
        return ends

    def forget_found(self) -> None:
        """The checkpoint that was found is used, or will not be."""
        if self._checkpoints is not None:
            self._checkpoints.found = None

    @property
    def _kept(self) -> RankCheckpoints:
        assert self._checkpoints is not None, "asked for only with a directory"
        return self._checkpoints

    @property
    def _owned(self) -> tuple[ModelPart, Share, int]:
        assert self._part is not None, "the ranks know their shares"
        assert self._share is not None, "likewise"
        return self._part, self._share, self._agreed.layout.n_elems

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
        if self._store is not None:
            self._store.close()
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _share_out(self, chunk_bytes: int) -> None:
        if self._part is not None and chunk_bytes == self._chunk_bytes:
            return  # as in the checkpoint that they go on from
        is_again = self._part is not None
        if is_again and (self._checkpoints is None or self._checkpoints.found is None):
            raise ConfigError(
                f"the master's chunk_bytes was {self._chunk_bytes} and is {chunk_bytes} now, by which the ranks of "
                "this cluster have shared the model out: start this cluster again"
            )
        if self._part is not None and self._store is not None:
            self._part.close()
            self._store.close()
        agreed, exchange = self._agreed, self._ranks.exchange
        assert exchange is not None, "the ranks are together"
        self._chunk_bytes = chunk_bytes
        shares = shares_of_ranks(agreed.layout, agreed.held, chunk_bytes)
        self._chunks = [share.chunks(agreed.layout, chunk_bytes) for share in shares]
        self._share = shares[self._ranks.rank]
        store = self._store = ShardParameters(agreed, shares, exchange, lambda: clear_moments(self._optimizers))
        of_rank = RankShare(self._ranks.rank, shares[self._ranks.rank], self._ended.put, self._ranks.n_ranks)
        self._part = ModelPart(
            store, agreed.layout, _no_event, self._clock, self._tape, self._curve, self._links, of_rank
        )
        self._part.do(ShareOut(chunk_bytes))
        if is_again:
            self._kept.put_back(*self._owned, with_residual=self._with_residual, again=True)


def _no_event(event: Event) -> None:
    raise AssertionError("a rank's transfer ends as a part")


@dataclass(frozen=True)
class _Job:
    """The running transfer. chunks_of_slave, promised: as combined() takes them."""

    job: int
    began_s: float
    chunks_of_slave: Mapping[str, Sequence[Chunk]]
    promised: Mapping[str, bytes] | None


class LeadingPart:
    """The leader's part, as its shell sees it (instead of a ModelPart): what it does, all ranks do."""

    def __init__(self, ranks: Ranks, part: RankPart, clock: Clock) -> None:
        self._ranks = ranks
        self._part = part
        self._clock = clock
        self._deliver: Callable[[Event], None] | None = None
        self.chunk_bytes = 0
        """By which the ranks have shared the model out."""
        self._job: _Job | None = None
        self._moved_s: dict[int, float] = {}  # of the running job, seconds of each rank's part that is done
        self._reports: Sequence[RankReport] = ()
        self._asked_s = -float("inf")
        self._stops = False
        self.push_is_zero = self.push_is_base = False
        """A rank's share may be; of the whole push the slaves say it."""
        self.alone = False
        """Whether the others no longer follow: then nothing can be done with the model."""
        self.checkpoint_is_written = False
        """Whether all ranks had written their parts of the checkpoint under way when they met last."""

    def begin(self, deliver: Callable[[Event], None], tape: Tape, links: LinkCounts | None) -> None:
        """Before anything else: where events go, the event record, and what counts the leader's own traffic."""
        self._deliver = deliver
        self._part.record(tape, links)

    def do(self, command: Order) -> Any:
        if self.alone:
            if isinstance(command, Cancel):
                return self._part.do(command)
            raise FatalError("the other ranks of this cluster no longer follow rank 0")
        match command:
            case ShareOut(chunk_bytes):
                self.chunk_bytes = chunk_bytes
            case Send(job=job, ticket=ticket):
                self._begin(job, ticket.placement, ticket.block_order, None)
            case Fetch(job=job, grant=grant):
                self._begin(job, grant.placement, grant.block_order, dict(grant.digest_of_slave))
            case Cancel(job):
                if self._job is not None and self._job.job == job:
                    self._job = None
            case BeginCheckpoint():
                self.checkpoint_is_written = False
        self.say(command)
        # A rank that fails here may leave the others in the middle of an exchange, where they cannot be told.
        return self._together(lambda: self._part.do(command))

    def say(self, order: Order) -> None:
        """Tell the others: a command, ranges of the corpus for them, or that they may train on."""
        self._together(lambda: self._ranks.say(to_bytes(order)))

    def heard(self, reports: Sequence[RankReport]) -> None:
        """The ranks have reported: look() need not ask them. A SIGTERM of any rank is one of the cluster."""
        self._reports, self._asked_s = reports, self._clock.monotonic_s()
        self.checkpoint_is_written = not any(report.writes_checkpoint for report in reports)
        if not self._stops and any(each.wants_to_leave for each in reports):
            self._stops = True
            assert self._deliver is not None, "ranks report after begin()"
            self._deliver(StopWanted("SIGTERM"))

    def look(self) -> None:
        """Ask the ranks for the ends of their parts, and whether they want to leave; also says whether they are there.
        Raises FatalError if not.
        """
        now_s = self._clock.monotonic_s()
        if self.alone or (not self._reports and now_s - self._asked_s < 0.9 * self.look_every_s):
            return
        if not self._reports:
            self.say(Ask())
            numbers = self._together(lambda: self._ranks.report(self._part.report().numbers()))
            self.heard([RankReport.of_numbers(each) for each in numbers])
        reports, self._reports, job = self._reports, (), self._job
        if job is None:
            return
        for rank, each in enumerate(reports):
            if each.job == job.job and each.stage is TransferStage.MOVED:
                self._moved_s.setdefault(rank, now_s - job.began_s)
        stages = [each.stage for each in reports if each.job == job.job]
        if TransferStage.FAILED not in stages and (
            len(stages) < self._ranks.n_ranks or TransferStage.UNDER_WAY in stages
        ):
            return
        ends: list[PartEnd] = self.do(AskEnds(job.job))
        end = combined(ends, self._ranks.n_ranks, job.chunks_of_slave, job.promised)
        match end:
            case Failed():
                self.do(Cancel(job.job))
            case Done():
                self._job = None
            case None:
                return
        assert self._deliver is not None, "a job runs after begin()"
        self._deliver(end)

    @property
    def late_ranks(self) -> tuple[int, ...]:
        """Ranks that the running transfer waits for, and that are late (meetings.late_ranks)."""
        if self._job is None:
            return ()
        return late_ranks(self._moved_s, self._ranks.n_ranks, self._clock.monotonic_s() - self._job.began_s)

    @property
    def look_every_s(self) -> float:
        """How often look() must be called while the training loop waits."""
        if self._job is None:
            return ALIVE_S
        return min(LOOK_MOST_S, max(LOOK_FIRST_S, LOOK_SHARE * (self._clock.monotonic_s() - self._job.began_s)))

    def give_up(self, error: BaseException) -> None:
        """The others must end, too. Does nothing where they do not listen any longer."""
        if not self.alone:
            with contextlib.suppress(FatalError):  # they have noticed by themselves
                self._ranks.say(to_bytes(GiveUp.of(error)))
        self.alone = True

    @property
    def push_is_live(self) -> bool:
        """Equal on all ranks, as all carry out the same commands; False when the others no longer follow."""
        return not self.alone and self._part.push_is_live

    def close(self) -> None:
        self._part.close()

    def _begin(
        self,
        job: int,
        placement: PlacementSpec,
        block_order: Sequence[int],
        promised: Mapping[str, bytes] | None,
    ) -> None:
        layout = self._part.agreed.layout
        shards = chunks_by_slave(layout, placement, block_order, self.chunk_bytes)
        self._job = _Job(job, self._clock.monotonic_s(), shards, promised)
        self._reports, self._moved_s = (), {}

    def _together(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException:
            self.alone = True
            raise


def follow(ranks: Ranks, part: RankPart, given: Callable[[Ranges], None]) -> GoOn:
    """Do what the leader says until training goes on; returns the news. Raises what the leader has failed with. given:
    takes the ranges of the corpus.
    """
    patience = PATIENCE  # until the leader is there, too
    while True:
        order = from_bytes(ranks.hear(patience))
        patience = SILENCE
        match order:
            case GoOn():
                return order
            case GiveUp():
                raise order.error()
            case Ask():
                ranks.report(part.report().numbers())
            case Ranges():
                given(order)
            case _:
                part.do(order)


# ---- part ends -------------------------------------------------------------------------------------------------------
#
# A part end travels as a line of JSON, then the checksums of the rank's chunks, 8 bytes each, in (block, offset) order.


def _packed(end: PartEnd, chunks: Sequence[Chunk]) -> bytes:
    text = json.dumps([end.job, end.failure[:1000], end.base_gone, end.corrupt, end.seconds]).encode()
    if len(text) > _TEXT_BYTES:
        text = json.dumps([end.job, end.failure[:200], end.base_gone, end.corrupt, end.seconds]).encode()
    sums = [] if end.failure else [end.checksums[chunk] for chunk in chunks]
    return text.ljust(_TEXT_BYTES) + np.array(sums, "<u8").tobytes()


def _unpacked(data: bytes, rank: int, job: int, chunks: Sequence[Chunk]) -> PartEnd | None:
    """None: the rank's part has not ended. Raises RemoteProtocolError for what cannot be read."""
    text = data[:_TEXT_BYTES].strip(b"\0 ")
    if not text:
        return None
    try:
        of_job, failure, base_gone, corrupt, seconds = json.loads(text)
        end = PartEnd(int(of_job), rank, str(failure), bool(base_gone), bool(corrupt), {}, float(seconds))
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(
            f"the end of rank {rank}'s transfer cannot be read ({error}): install the same release of dips on all ranks"
        ) from error
    if end.job != job:
        return None
    if not end.failure:
        sums = np.frombuffer(data, "<u8", len(chunks), _TEXT_BYTES).tolist()
        end = replace(end, checksums=dict(zip(chunks, sums, strict=True)))
    return end
