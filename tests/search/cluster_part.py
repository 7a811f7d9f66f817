"""The cluster in a search: the real ClusterMachine; its parameters are the pieces of work that they contain.

It makes a step as soon as the session trains and a push is wanted, so that there is nothing to interleave; only work
that an ABORTED push left waits for time to pass before it is pushed again. A piece of work has a name of its own, "a1":
whether one is counted twice is then seen in what versions are made of.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dips.core.errors import Refused
from dips.core.ids import ClusterId, RoundId, Version
from dips.core.messages import DataMode, DataRange, PullGrant, Refusal
from dips.worker.state import effects
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.shared import SessionConfig, SessionPhase
from dips.worker.state.work import Work
from search.bounds import LAYOUT, T0_S, Bounds
from search.copying import Out
from search.master_part import keep_no_story
from search.ranks_part import JobEnd, OpenTransfer, Pull, RankEnd, Ranks
from search.slave_part import PieceNames

_EXCHANGES = (
    SessionPhase.BEGINNING_PUSH,
    SessionPhase.TRANSFERRING,
    SessionPhase.FINISHING_PUSH,
    SessionPhase.AWAITING,
    SessionPhase.PULLING,
)


class ClusterPart:
    """A cluster through all its processes. pushes_left: pushes that it has yet to begin."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self.name = name
        self.bounds = bounds
        self.bad = "!" if name in bounds.bad_pushes else ""
        self.pushes_left = 0
        self.n_work = 0
        self.orphan: tuple[int, OpenTransfer] | None = None
        """A follower of the life before, and what it goes on sending."""

        self._restart()

    def _restart(self) -> None:
        # All processes of a name have one identity: a process that comes back has waited for as long as it must.
        drawn = self.name.encode()
        config = SessionConfig(
            ClusterId(self.name), LAYOUT, self.bounds.plan, connect_wait_s=math.inf, process_id=drawn
        )
        self.session = ClusterMachine(config)
        keep_no_story(self.session.shared.story)
        self.base: PieceNames = ()
        self.live: PieceNames = ()
        self.sent: PieceNames = ()
        self.buffer: PieceNames = ()
        self.ranks = Ranks(self.bounds)
        self.left = False
        self.backup: tuple[Version, int, PieceNames, PieceNames] | None = None

    # ---- actions ----

    def start(self) -> list[Out]:
        return self._handle(effects.Started())

    def allow(self, pushes: int) -> list[Out]:
        """Allow so many more pushes."""
        self.pushes_left += pushes
        return self._go_on([])

    def answered(self, job: int, reply: Any) -> list[Out]:
        return self._handle(effects.Done(job, reply))

    def refused(self, job: int, refusal: Refusal) -> list[Out]:
        refused = Refused(refusal.code, refusal.sentence, refusal.retry_after_s)
        return self._handle(effects.Done(job, refused))

    def unanswered(self, job: int) -> list[Out]:
        return self._handle(effects.Failed(job, "no answer came"))

    def landed(self, rank: int, slave: str, numbers: tuple[int, ...]) -> list[Out]:
        """These of a rank's chunks are on this slave."""
        return self._ended(self.ranks.landed(rank, slave, numbers))

    def transfer_failed(self, rank: int) -> list[Out]:
        """A rank's part of what it carries is given up."""
        job = self.ranks.carries[rank]
        assert job is not None, "it carries one"
        return self._ended(self.ranks.ended(RankEnd(job.id, rank, failure="a slave does not take it")))

    def read(self, held: tuple[RoundId, PieceNames], n_slaves: int) -> list[Out]:
        """One process: one slave's share of the version arrived."""
        pull = self.ranks.job
        assert isinstance(pull, Pull), "it fetches one"
        pull = replace(pull, read=(*pull.read, held))
        self.ranks.job = self.ranks.carries[0] = pull
        return self._pulled(pull, held[1]) if len(pull.read) == n_slaves else []

    def pull_failed(self) -> list[Out]:
        """One process: a slave no longer has the version, or it is not what was promised."""
        pull = self.ranks.job
        assert isinstance(pull, Pull), "it fetches one"
        return self._pulled(pull, None)

    def _pulled(self, pull: Pull, content: PieceNames | None) -> list[Out]:
        self.ranks.cancel()
        if content is None:
            return self._handle(effects.Failed(pull.id, "the version is no longer kept"))
        self.buffer = content
        return self._handle(effects.Done(pull.id, None, 1.0))

    # ---- actions of several ranks ----

    def hear(self, rank: int) -> list[Out]:
        """A follower hears the leader's next order."""
        self.ranks.hear(rank)
        return []

    def hear_end(self) -> list[Out]:
        """The leader hears of the end of a follower's part."""
        return self._ended(self.ranks.hear_end())

    def read_part(self, rank: int, read: tuple[tuple[str, RoundId, PieceNames], ...] | None) -> list[Out]:
        """What a rank owns of the version has arrived, from these slaves; None: one of them no longer has it."""
        job = self.ranks.carries[rank]
        assert job is not None, "it fetches"
        end = (
            RankEnd(job.id, rank, failure="the version is no longer kept")
            if read is None
            else RankEnd(job.id, rank, read)
        )
        return self._ended(self.ranks.ended(end))

    def _ended(self, end: JobEnd | None) -> list[Out]:
        """A transfer of all ranks has ended, or not yet."""
        if end is None:
            return []
        outs: list[Out] = []
        if isinstance(end.job, Pull) and isinstance(end.how, effects.Done):
            read = [(made_by, content) for part in end.parts for _, made_by, content in part.moved]
            self.buffer = read[0][1]
            version = str(end.job.grant.version)
            outs.append(("fact", "_content", version, {"by": self.name, "version": version, "read": read}))
        return outs + self._handle(end.how)

    def lose_rank(self, rank: int) -> list[Out]:
        """kill -9 of one follower."""
        self.ranks.die(rank)
        return []

    def leave_behind(self, rank: int) -> list[Out]:
        """All ranks but this one are killed; it goes on with what it sends."""
        left = self.ranks.left_behind(rank)
        assert left is not None, "it sends something"
        self.orphan = (rank, left)
        return self.kill()

    def orphan_sent(self, slave: str, numbers: tuple[int, ...]) -> list[Out]:
        """The rank of the life before has sent these chunks, whether they were taken or not."""
        assert self.orphan is not None, "there is one"
        rank, transfer = self.orphan
        transfer = replace(transfer, landed=transfer.landed | {(slave, number) for number in numbers})
        names = [address.slave_id for address in transfer.placement.slaves]
        self.orphan = (rank, transfer) if any(self.ranks.lacks(rank, transfer, name) for name in names) else None
        return []

    def orphan_ends(self) -> list[Out]:
        self.orphan = None
        return []

    def wake(self) -> list[Out]:
        """The next delayed call is due."""
        core = self.session.shared
        due = min((core.exchange, core.data, core.side), key=lambda lane: lane.due_s)
        due.due_s = T0_S
        return self._handle(effects.Tick())

    def step_on(self) -> list[Out]:
        """Make one more step, so that pending work is pushed."""
        session = self.session
        if self.bounds.plan.mode is not DataMode.LEASED:
            return self._make_step(())
        session.take_leased()
        held = session.shared.work.held
        if held:
            return self._make_step(held[:1])
        return self._carry_out(session.handle(effects.LeaseWanted(1), T0_S)) if session.shared.data.idle else []

    def lose_patience(self) -> list[Out]:
        """verdict_wait_s is over: it trains on."""
        self.session.shared.patience.until_s = T0_S
        return self._go_on(self._carry_out(self.session.handle(effects.Tick(), T0_S)))

    def beat(self, reply: Any) -> list[Out]:
        incarnation = self.session.shared.terms.incarnation
        return [] if incarnation is None else self._handle(effects.Beat(incarnation, reply))

    def kill(self) -> list[Out]:
        """kill -9, and another process under the same name that knows nothing."""
        self.pushes_left += 1 if self.session.shared.work.tokens else 0
        self._restart()
        return self.start()

    def old_backup(self) -> list[Out]:
        """Base, fence and work are those from before the last push."""
        core = self.session.shared
        assert self.backup is not None
        core.base, core.base_fence, self.live, self.base = self.backup
        core.work.pending = Work((), len(self.live), len(self.live), 1.0, 1)
        return self._go_on([])

    # ---- queries of the search ----

    @property
    def has_old_backup(self) -> bool:
        return self.settled and not self.left and self.backup is not None and self.backup[0] != self.session.shared.base

    @property
    def waits_in_vain(self) -> bool:
        """Whether it holds its training loop for an exchange, and has something to train for."""
        patient = self.session.shared.patience.until_s > T0_S
        return patient and self.session.must_wait(T0_S) and self.pushes_left > 0 and self.session.phase in _EXCHANGES

    @property
    def waiting_calls(self) -> frozenset[int]:
        core = self.session.shared
        lanes = (core.exchange, core.data, core.side)
        return frozenset(lane.job for lane in lanes if lane.job is not None)

    @property
    def may_step_on(self) -> bool:
        core = self.session.shared
        waits = self.bounds.plan.mode is DataMode.LEASED and not core.work.held and not core.data.idle
        trains = self.session.phase is SessionPhase.TRAINING and core.base is not None and not core.terms.stop
        return trains and core.work.pending.tokens > 0 and not waits

    @property
    def sleeps(self) -> bool:
        """Whether a call was delayed."""
        return not self.left and T0_S < self.session.shared.wake_s() < math.inf

    @property
    def settled(self) -> bool:
        """Whether it trains and has nothing open."""
        return self.left or (
            self.session.phase is SessionPhase.TRAINING and not self.pushes_left and not self.session.shared.work.tokens
        )

    # ---- effects ----

    def _handle(self, event: effects.Event) -> list[Out]:
        return self._go_on(self._carry_out(self.session.handle(event, T0_S)))

    def _go_on(self, outs: list[Out]) -> list[Out]:
        """Train, if there is something to train for."""
        session = self.session
        work = session.shared.work
        while self._trains():
            if work.pending.tokens or not self.pushes_left:
                break
            ranges: tuple[DataRange, ...] = ()
            if self.bounds.plan.mode is DataMode.LEASED:
                session.take_leased()
                if not work.held:
                    if session.shared.data.idle:
                        outs += self._carry_out(session.handle(effects.LeaseWanted(1), T0_S))
                    break
                ranges = work.held[:1]
            self.pushes_left -= 1
            outs += self._make_step(ranges)
        return outs

    def _trains(self) -> bool:
        """Whether it makes steps now: between exchanges, and during them if they overlap."""
        core, phase = self.session.shared, self.session.phase
        if phase is SessionPhase.TRAINING:
            return core.base is not None and not core.terms.stop
        trains_on = self.bounds.overlap != "none" or self.bounds.may("late_verdict")
        return trains_on and phase in _EXCHANGES and not self.session.must_wait(T0_S)

    def _make_step(self, ranges: tuple[DataRange, ...]) -> list[Out]:
        self.n_work += 1
        self.live = (*self.live, f"{self.name}{self.n_work}{self.bad}")
        return self._carry_out(self.session.handle(effects.Stepped(1, ranges, 1.0), T0_S))

    def _carry_out(self, wanted: list[effects.Effect]) -> list[Out]:
        outs: list[Out] = []
        for effect in wanted:
            match effect:
                case effects.Run(job, effects.SendPush(push, ticket)):
                    self.ranks.begin(OpenTransfer(job, push, ticket, self.session.shared.terms.epoch, self.sent))
                    outs.append(("fact", "_sent", str(push), {"push": str(push), "payload": self.sent}))
                case effects.Run(job, PullGrant() as grant):
                    self.ranks.begin(Pull(job, grant))
                case effects.Run(job, request):
                    outs.append(("call", job, request))
                case effects.CopyParameters():
                    self.sent, core = self._pushed(), self.session.shared
                    if core.base is not None:
                        self.backup = (core.base, core.base_fence, self.live, self.base)
                case effects.CopyBase():
                    self.sent = self.base
                case effects.Cancel():
                    self.ranks.cancel()
                case effects.Install(mode):
                    outs += self._install(mode)
                case effects.Finished():
                    self.left = True
                    outs.append(("fact", "_left", self.name, {}))
                case effects.Record():
                    outs.append(("fact", effect.kind, effect.cause, effect.fields))
                case effects.Log():
                    pass
        return outs

    def _pushed(self) -> PieceNames:
        """The pieces of work in the parameters that are not in the base; all of them for a seed."""
        return self.live if self.session.shared.base is not None else ("seed",)

    def _install(self, mode: effects.InstallMode) -> list[Out]:
        self.base = self.buffer
        if mode is effects.InstallMode.REPLACE:
            self.live = ()
        elif mode is effects.InstallMode.REBASE_FROM_PUSH:
            self.live = self.live[len(self.sent) :]
        return []


def canonical(part: ClusterPart) -> None:
    """Restart used-up numbers; how long a pause lasts makes no difference here."""
    core = part.session.shared
    in_use = set(part.waiting_calls)
    in_use |= part.ranks.job_ids()
    if part.session.pulling.job is not None:
        in_use.add(part.session.pulling.job)
    core._last_job = max(in_use, default=0)
    for lane in (core.exchange, core.data, core.side):
        lane.failures = 0
        if T0_S < lane.due_s < math.inf:
            lane.due_s = T0_S + 1.0
    if part.session.pushing.open is not None:
        part.session.pushing.open.failures = 0
