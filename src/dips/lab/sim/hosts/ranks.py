"""Simulates the ranks of a cluster, one or several: each carries its share of every transfer, as dips.worker.parallel
does.

The leader (rank 0) is the cluster's process, with the session; a cluster of one process has no other. A follower is a
process on a host of its own: it hears the leader's commands in their order, up to a step later, and may be late, die
alone, or outlive the leader. Its name on the network is "cluster.rank". Steps are the leader's: training inside a
cluster is not simulated. Where a run's arithmetic remembers (symbols), each rank has vectors of its own, which only
commands change, and what it sends comes from them: after each command they must be the leader's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dips.core.errors import DipsError
from dips.core.ids import PushId
from dips.core.layout import Chunk, Layout, Share
from dips.core.messages import PullGrant, Ticket
from dips.core.net.transfer import Transfer, TransferSettings, chunks_by_slave
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import ClusterModel, Key, ModelVector, Value
from dips.lab.sim.content import PulledModel, SimulatedModel, key_of
from dips.lab.sim.hosts.transfer import CarriedShare, Carrier, Ended, PullCarrier, PushCarrier
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.world import World
from dips.worker.commands import Snapshot, from_bytes, to_bytes
from dips.worker.parallel.meetings import PartEnd, combined
from dips.worker.parallel.ownership import Piece, shares_of_ranks
from dips.worker.state.effects import ClearResidual, CopyBase, Done, Failed, Install, KeepResidual

BEHIND_S = 5.0
"""How long a rank that fell behind still hears nothing after it woke up."""

PartDone = Callable[[Done | Failed, Mapping[Key, Value]], None]
"""Called with the end of a job; of a pull that is done, with all values."""

Begin = Callable[["Rank", Ended], Carrier]
"""Makes one rank's carrier of a job."""

ModelCommand = Snapshot | CopyBase | Install | KeepResidual | ClearResidual
"""What changes a rank's vectors."""


def same_vectors(mine: SimulatedModel, others: SimulatedModel) -> bool:
    """Whether two ranks push from the same base and residual, and the same push."""
    return (mine.base, mine.push, mine.residual) == (others.base, others.push, others.residual)


def shares_of_replicas(layout: Layout, n_ranks: int, chunk_bytes: int) -> list[Share]:
    """What each of the ranks owns of a model that all of them hold."""
    pieces = [
        Piece(index, (0,) * len(span.parameter.shape), span.parameter.shape) for index, span in enumerate(layout.spans)
    ]
    return shares_of_ranks(layout, [pieces] * n_ranks, chunk_bytes)


class Follower(SimulatedProcess):
    """The process of a rank that is not the leader, of one life of its cluster."""

    def __init__(self, world: World, name: str, generation: int) -> None:
        super().__init__(world.kernel, name)
        self.generation = generation
        self.begin_process()
        self.deaf_until_s = 0.0
        """It hears no command before."""

        self.falls_behind_s = 0.0
        """It stops for so long when it begins its part of the next push, and the leader's part fails meanwhile; 0: it
        does not."""


@dataclass
class Rank:
    """One rank: its process, what it owns, and what it carries: one of several has one transfer at most."""

    process: SimulatedProcess
    part: CarriedShare | None  # None: the whole model, since it is the only rank
    model: SimulatedModel | None = None
    """A follower's vectors; of each only the chunks of its share are used. None: the leader's, or they are numbers."""

    fetched: Mapping[Key, Value] = field(default_factory=dict)
    """What it owns of the version that it fetched last."""

    carriers: dict[int, Carrier] = field(default_factory=dict)  # by job
    heard_s: float = 0.0
    """Until when it has heard the leader's commands."""

    orders: deque[Callable[[], None]] = field(default_factory=deque)
    """Those that it has not heard, oldest first."""

    def begin(self, job: int, carrier: Carrier) -> None:
        """Carry this; what one of several ranks carried before is no longer wanted."""
        if self.part is not None:
            self.stop()
        self.carriers[job] = carrier
        carrier.pump()

    def cancel(self, job: int) -> None:
        if job in self.carriers:
            self.carriers.pop(job).stop()

    def stop(self) -> None:
        for carrier in self.carriers.values():
            carrier.stop()
        self.carriers.clear()


@dataclass
class _Job:
    """A transfer of all ranks. chunks_of_slave, promised: as combined() takes them."""

    chunks_of_slave: Mapping[str, Sequence[Chunk]]
    promised: Mapping[str, bytes] | None
    done: PartDone
    sends: tuple[PushId, int] | None = None  # the push, and its attempt
    ends: list[PartEnd] = field(default_factory=list)
    values: dict[Key, Value] = field(default_factory=dict)


class Ranks:
    """All ranks of one life of a cluster. step_s: of its inner steps; commands and ends wait for the end of one."""

    def __init__(
        self, world: World, leader: SimulatedProcess, model: ClusterModel, n_ranks: int, step_s: float
    ) -> None:
        """model: the leader's, as it begins."""
        plan = world.plan
        self._world = world
        self._leader = leader
        self._step_s = step_s
        self._chunk_bytes = plan.config.settings.chunk_bytes
        self._jobs: dict[int, _Job] = {}
        self.all = [Rank(leader, None)]
        if n_ranks > 1:
            self.all = [
                Rank(
                    Follower(world, f"{leader.name}.{rank}", leader.generation) if rank else leader,
                    CarriedShare(share, rank),
                    replace(model) if rank and isinstance(model, SimulatedModel) else None,
                )
                for rank, share in enumerate(shares_of_replicas(plan.layout, n_ranks, self._chunk_bytes))
            ]

    @property
    def followers(self) -> list[Follower]:
        """The processes of all ranks but the leader."""
        return [rank.process for rank in self.all if isinstance(rank.process, Follower)]

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The data keys of the followers; none when the run uses none."""
        keys = [self._world.key_of(follower) for follower in self.followers]
        return tuple(key for key in keys if key)

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    @property
    def pushing(self) -> bool:
        """Whether a push is under way."""
        return any(job.sends for job in self._jobs.values())

    def sends(self, push: PushId, attempt: int) -> bool:
        """Whether this attempt is under way."""
        return any(job.sends == (push, attempt) for job in self._jobs.values())

    # ---- what the leader does, all ranks do ----

    def push(
        self, job: int, push: PushId, ticket: Ticket, vector: ModelVector, limits: TransferSettings, run_id: str,
        epoch: int, done: PartDone,
    ) -> None:  # fmt: skip
        """Send the vector; each rank its share."""
        world, layout = self._world, self._world.plan.layout

        def begin(rank: Rank, ended: Ended) -> Carrier:
            own = self._vector_of(rank, push, ticket.wire, vector)
            return PushCarrier(world, rank.process, layout, limits, push, ticket, own, run_id, epoch, ended, rank.part)

        shards = chunks_by_slave(layout, ticket.placement, ticket.block_order, self._chunk_bytes)
        self._begin(job, _Job(shards, None, done, (push, ticket.attempt)), begin)

    def pull(self, job: int, grant: PullGrant, limits: TransferSettings, done: PartDone, leaders: ClusterModel) -> None:
        """Fetch the version of the grant; each rank its share. leaders: rank 0's model."""
        world, layout = self._world, self._world.plan.layout

        def begin(rank: Rank, ended: Ended) -> Carrier:
            installed = leaders.installed if rank.model is None else rank.model.installed
            return PullCarrier.of_grant(world, rank.process, layout, limits, grant, ended, installed, rank.part)

        shards = chunks_by_slave(layout, grant.placement, grant.block_order, self._chunk_bytes)
        self._begin(job, _Job(shards, dict(grant.digest_of_slave), done), begin)

    def cancel(self, job: int) -> None:
        if self._jobs.pop(job, None) is not None:
            for rank in self.all:
                self._tell(rank, partial(rank.cancel, job))

    def do(self, command: ModelCommand, model: ClusterModel) -> None:
        """The leader has done this to its model: the followers do it to theirs."""
        if isinstance(model, SimulatedModel):
            data, after = to_bytes(command), replace(model)
            for rank in self.all:
                if rank.model is not None:
                    self._tell(rank, partial(self._follow, rank, rank.model, data, after))

    def _follow(self, rank: Rank, model: SimulatedModel, data: bytes, leader: SimulatedModel) -> None:
        """leader: its vectors after the same command. Steps are the leader's, so what is pushed comes from there."""
        name, command = rank.process.name, from_bytes(data)
        match command:
            case Snapshot():
                model.push, model.written = leader.push, None
            case CopyBase():
                model.copy_base()
            case Install():
                assert isinstance(leader.base, PulledModel), "a pulled version is installed"
                model.base = PulledModel({**leader.base.values, **rank.fetched})
            case KeepResidual(wire):
                model.keep_residual(wire)
            case ClearResidual():
                model.clear_residual()
        if not same_vectors(model, leader):
            self._world.violated(f"{name} has other vectors than rank 0 after {type(command).__name__}")

    def _vector_of(self, rank: Rank, push: PushId, wire: Codec, leaders: ModelVector) -> ModelVector:
        """What this rank sends. leaders: what rank 0 does."""
        if rank.model is None:
            return leaders
        own = rank.model.sent(wire)
        if own != leaders:
            self._world.violated(f"{rank.process.name} sends another push {push} than rank 0")
        return own

    # ---- checkpoints ----

    def take_checkpoint(self, write_s: Callable[[], float], done: Callable[[list[SimulatedModel]], None]) -> None:
        """All followers write theirs, each in write_s(). done: called with them when the leader has heard of all; where
        there are none, when it has written its own."""
        if not self.followers:
            self._world.kernel.after(write_s(), self._leader, done, [])
        written: list[SimulatedModel] = []

        def heard(model: SimulatedModel) -> None:
            written.append(model)
            if len(written) == len(self.followers):
                done(written)

        def take(rank: Rank, model: SimulatedModel) -> None:
            part, kernel = replace(model), self._world.kernel
            kernel.after(write_s(), rank.process, report, part)

        def report(part: SimulatedModel) -> None:
            self._world.kernel.after(self._until_they_meet_s(), self._leader, heard, part)

        for rank in self.all:
            if rank.model is not None:
                self._tell(rank, partial(take, rank, rank.model))

    def _begin(self, number: int, job: _Job, begin: Begin) -> None:
        self._jobs[number] = job
        for rank in self.all:
            self._tell(rank, partial(self._begin_part, number, rank, begin))

    def _begin_part(self, job: int, rank: Rank, begin: Begin) -> None:
        process = rank.process
        if isinstance(process, Follower) and process.falls_behind_s and self._fails_first(job):
            kernel, asleep_s = self._world.kernel, process.falls_behind_s
            process.falls_behind_s, process.deaf_until_s = 0.0, kernel.now_s + asleep_s + BEHIND_S
            process.pause()
            kernel.after(asleep_s, None, process.resume)
            rank.orders.appendleft(partial(self._begin_part, job, rank, begin))
            kernel.after(0.0, process, self._hear, rank)
            return
        rank.begin(job, begin(rank, lambda result: self._part_ended(job, rank, result)))

    def _fails_first(self, number: int) -> bool:
        """The leader's part of a push fails, unless it is over."""
        job = self._jobs.get(number)
        if job is None or job.sends is None or not all(end.rank for end in job.ends):
            return False
        self._world.fired("deaf_rank")
        end = PartEnd(number, 0, "no buffer space available")
        self._world.kernel.after(0.0, self._leader, self._take_end, end, {})
        return True

    def _tell(self, rank: Rank, order: Callable[[], None]) -> None:
        """The leader does it at once, a follower when it hears of it, in the order of the commands."""
        process, kernel = rank.process, self._world.kernel
        if not isinstance(process, Follower):
            order()
            return
        if not process.alive:
            return
        rank.orders.append(order)
        rank.heard_s = max(rank.heard_s, kernel.now_s + self._until_they_meet_s(), process.deaf_until_s)
        kernel.at(rank.heard_s, process, self._hear, rank)

    def _hear(self, rank: Rank) -> None:
        try:
            rank.orders.popleft()()
        except (DipsError, AssertionError) as error:
            self._world.bug(rank.process.name, error)

    def _until_they_meet_s(self) -> float:
        return self._world.kernel.rng.random() * self._step_s

    # ---- ends ----

    def _part_ended(self, job: int, rank: Rank, result: Any) -> None:
        """One rank's part is over: the leader hears of it when they meet. That of the only rank is the whole, and its
        carrier has compared the digests."""
        carrier = rank.carriers.pop(job)
        took_s = self._world.kernel.now_s - carrier.began_s
        values: Mapping[Key, Value] = {}
        if rank.part is None:
            whole, pulls = self._jobs.pop(job), isinstance(carrier, PullCarrier)
            if isinstance(result, Transfer):
                whole.done(Failed(job, result.failure, base_gone=result.base_gone, corrupt=result.corrupt), values)
            elif pulls:
                whole.done(Done(job, None, took_s), result)
            else:
                whole.done(Done(job, result, took_s), values)
            return
        number, checksum = rank.part.rank, self._world.plan.arithmetic.checksum
        if isinstance(result, Transfer):
            end = PartEnd(job, number, result.failure, base_gone=result.base_gone, corrupt=result.corrupt)
        elif isinstance(carrier, PullCarrier):
            values = result
            chunks = rank.part.share.chunks(self._world.plan.layout, self._chunk_bytes)
            sums = {chunk: checksum(values[key_of(chunk)]) for chunk in chunks}
            end = PartEnd(job, number, checksums=sums, seconds=took_s)
            rank.fetched = values
        else:
            end = PartEnd(job, number, checksums=result, seconds=took_s)
        self._world.kernel.after(self._until_they_meet_s(), self._leader, self._take_end, end, values)

    def _take_end(self, end: PartEnd, values: Mapping[Key, Value]) -> None:
        job = self._jobs.get(end.job)
        if job is None:
            return  # it was cancelled
        job.ends.append(end)
        if job.sends is not None:
            self._world.part_sent(job.sends[0], self._leader.generation, end.rank, list(end.checksums))
        job.values.update(values)
        together = combined(job.ends, len(self.all), job.chunks_of_slave, job.promised)
        if isinstance(together, Failed):
            self.cancel(end.job)
        if together is not None:
            self._jobs.pop(end.job, None)
            job.done(together, job.values)

    # ---- the end of processes ----

    def leader_ended(self, survive_s: float = 0.0) -> None:
        """The leader's process has ended. The followers notice when they next meet, or after so long; what an only rank
        carries ends when the next process starts (stop)."""
        if len(self.all) == 1:
            return
        self._jobs.clear()
        for rank in self.all:
            if isinstance(rank.process, Follower):
                noticed_s = max(survive_s, self._until_they_meet_s())
                self._world.kernel.after(noticed_s, rank.process, self._end, rank)
            else:
                rank.stop()

    def stop(self) -> None:
        """The next process starts: no connection of the leader's is open."""
        self.all[0].stop()

    def kill(self, follower: Follower, noticed: Callable[[], None]) -> None:
        """kill -9 of one rank. noticed: called in the leader's process, when the ranks next meet."""
        self._end(next(rank for rank in self.all if rank.process is follower))
        self._world.kernel.after(self._until_they_meet_s(), self._leader, noticed)

    def heal(self) -> None:
        """End what faults do to the followers."""
        for follower in self.followers:
            follower.resume()
            follower.deaf_until_s = follower.falls_behind_s = 0.0

    @staticmethod
    def _end(rank: Rank) -> None:
        rank.process.end_process()
        rank.stop()
