"""Simulates only transfers over links: compares the master's schedule with two methods without one.

The real machines: dips.core.net.transfer and dips.core.net.flow on one side, dips.slave.state.credits on the other,
orders by dips.master.state.schedule. Links are first come, first served, with a rate for each process and direction
and one delay for all ways (dips.sim.network). Nothing is lost and no process dies: the simulation of whole runs
(dips.sim.seed_run) covers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dips.core.chunks import shard_digest
from dips.core.ids import SlaveId
from dips.core.layout import FLOAT32_BYTES, Layout, Parameter
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net.data_header import MAX_MISSING, MissingChunk
from dips.core.net.flow import WindowRule
from dips.core.net.transfer import PullTransfer, PushTransfer, SlaveRequest, Transfer, TransferSettings, shares_of
from dips.core.placement import Placement
from dips.master.state.schedule import TransferRequest, TransferScheduler, Way
from dips.sim.kernel import Kernel
from dips.sim.network import LinkOccupancy, LinkPlan, ProcessRates
from dips.slave.state.credits import Credits

MIB = 1 << 20
CAP_CHUNKS = 64
FREE_CHUNKS = 16
"""Chunks in flight to each slave with the method FREE."""

BEAT_S = 2.0


class TransferMethod(Enum):
    """How transfers are ordered. SCHEDULED: by the master. FREE: all clusters to all slaves at once. NAIVE: all
    clusters to one slave after another, in the same order."""

    SCHEDULED = "scheduled"
    FREE = "free-for-all"
    NAIVE = "naive order"


def settings_of(method: TransferMethod, chunk_bytes: int, silence_s: float, stall_s: float) -> TransferSettings:
    """The settings of each transfer with this method."""
    rule, window_chunks = {
        TransferMethod.SCHEDULED: (WindowRule.MEASURED, CAP_CHUNKS),
        TransferMethod.FREE: (WindowRule.EQUAL, FREE_CHUNKS),
        TransferMethod.NAIVE: (WindowRule.ONE_BY_ONE, CAP_CHUNKS),
    }[method]
    return TransferSettings(chunk_bytes, window_chunks, silence_s, stall_s, rule)


@dataclass(frozen=True)
class Race:
    """A set of concurrent transfers. Rates of clusters and slaves by name; delay_s: one way.

    model_bytes: of one transfer, in equal shares. begins_s: when a cluster begins, 0 unless named. changes: at a time,
    another rate of a process. told_s: the time of a whole transfer for each cluster, as reported to the master.
    has_left: the part of a push that its slaves still lack; all of it unless named.
    """

    clusters: Mapping[str, ProcessRates]
    slaves: Mapping[str, ProcessRates]
    delay_s: float
    model_bytes: int = 256 * MIB
    chunk_bytes: int = MIB
    way: Way = Way.PUSH
    begins_s: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[tuple[float, str, ProcessRates], ...] = ()
    told_s: Mapping[str, float] = field(default_factory=dict)
    has_left: Mapping[str, float] = field(default_factory=dict)

    def alone(self, cluster: str) -> Race:
        """The same race with only this cluster."""
        return Race(
            {cluster: self.clusters[cluster]}, self.slaves, self.delay_s, self.model_bytes, self.chunk_bytes, self.way,
            changes=self.changes,
        )  # fmt: skip


def run(race: Race, method: TransferMethod) -> dict[str, float]:
    """Seconds that each cluster's transfer takes."""
    return _Course(race, method).run()


class _Course:
    def __init__(self, race: Race, method: TransferMethod) -> None:
        self.race, self.method = race, method
        self.kernel = Kernel(1)
        self.links = LinkOccupancy(self.kernel, LinkPlan({**race.clusters, **race.slaves}))
        self.scheduler = TransferScheduler()
        self.layout = _layout(race)
        names = tuple(SlaveId(name) for name in race.slaves)
        self.placement = Placement(names, tuple(b.block_id % len(names) for b in self.layout.blocks))
        self.credits = {name: Credits[str](CAP_CHUNKS) for name in race.slaves}
        self.took_s: dict[str, float] = {}
        self._moved_bytes = dict.fromkeys(race.slaves, 0)

    def run(self) -> dict[str, float]:
        for slot, name in enumerate(self.race.clusters):
            self.kernel.at(self.race.begins_s.get(name, 0.0), None, self._begin, name, slot)
        for at_s, name, rates in self.race.changes:
            self.kernel.at(at_s, None, self.links.change, name, rates)
        self.kernel.after(BEAT_S, None, self._beat)
        while len(self.took_s) < len(self.race.clusters) and self.kernel.step():
            pass
        return {name: self.took_s[name] for name in self.race.clusters}

    def moved(self, slave: str, n_bytes: int) -> None:
        self._moved_bytes[slave] += n_bytes

    def done(self, cluster: str, seconds: float) -> None:
        self.took_s[cluster] = seconds
        self.scheduler.end(cluster)

    def _begin(self, name: str, slot: int) -> None:
        order: Iterable[int] = range(len(self.layout.blocks))
        if self.method is TransferMethod.SCHEDULED:
            told_s = self.race.told_s
            request = TransferRequest(
                name, self.race.way, slot, told_s.get(name, 0.0), min(told_s.values(), default=0.0)
            )
            order = self.scheduler.begin(request, self.placement)
        _Cluster(self, name, order).pump()

    def _beat(self) -> None:
        for name, n_bytes in self._moved_bytes.items():
            self.scheduler.beat(name, n_bytes if self.race.way is Way.PUSH else 0, n_bytes, self.kernel.now_s)
        if self.race.way is Way.PUSH:
            self._moved_bytes = dict.fromkeys(self._moved_bytes, 0)
        self.kernel.after(BEAT_S, None, self._beat)


class _Cluster:
    """One cluster's transfer, and what each slave holds of it."""

    def __init__(self, course: _Course, name: str, order: Iterable[int]) -> None:
        self.course, self.name = course, name
        self.began_s = course.kernel.now_s
        spec = PlacementSpec(
            tuple(SlaveAddress(slave, "") for slave in course.placement.slaves), course.placement.slave_of_block, b""
        )
        shares = shares_of(course.layout, spec, order, course.race.chunk_bytes)
        limits = settings_of(course.method, course.race.chunk_bytes, silence_s=1e6, stall_s=1e7)
        left = course.race.has_left.get(name, 1.0)
        self.lacking = {
            slave: {(c.block_id, c.offset_bytes) for c in chunks[: round(left * len(chunks))]}
            for slave, chunks in shares.items()
        }
        self.transfer: Transfer
        if course.race.way is Way.PUSH:
            self.transfer = self.push = PushTransfer(shares, limits, self.began_s)
            for slave, lacking in self.lacking.items():
                course.credits[slave].note_open(name, len(lacking) * course.race.chunk_bytes, self.began_s)
        else:
            digests = {slave: shard_digest([0] * len(chunks)) for slave, chunks in shares.items()}
            self.transfer = self.pull = PullTransfer(shares, digests, limits, self.began_s)

    def pump(self) -> None:
        for action in self.transfer.actions(self.course.kernel.now_s):
            assert isinstance(action, SlaveRequest), "all processes answer here"
            there = action.chunk.length_bytes if action.chunk and self.course.race.way is Way.PUSH else 0
            self._carry(self.name, action.slave, there, self._asked, action)

    def _carry(self, source: str, target: str, n_bytes: int, action: Callable[..., None], *args: object) -> None:
        self.course.links.carry(source, target, n_bytes, self.course.race.delay_s, None, action, *args)

    def _asked(self, ask: SlaveRequest) -> None:
        """A message arrives at the slave."""
        course, now_s, lacking = self.course, self.course.kernel.now_s, self.lacking[ask.slave]
        pace, back = course.credits[ask.slave], 0
        missing = tuple(MissingChunk(*place) for place in sorted(lacking)[:MAX_MISSING]) if ask.chunk is None else ()
        if ask.chunk is not None:
            lacking.remove((ask.chunk.block_id, ask.chunk.offset_bytes))
            course.moved(ask.slave, ask.chunk.length_bytes)
            pace.note_landed(self.name, ask.chunk.length_bytes, now_s)
            back = ask.chunk.length_bytes if course.race.way is Way.PULL else 0
        credit = pace.credit(self.name, now_s)
        if not lacking:
            pace.note_closed(self.name, now_s)
        self._carry(ask.slave, self.name, back, self._answered, ask, missing, not lacking, credit)

    def _answered(self, ask: SlaveRequest, missing: tuple[MissingChunk, ...], complete: bool, credit: int) -> None:
        """An answer arrives at the cluster."""
        now_s = self.course.kernel.now_s
        if self.course.race.way is Way.PULL:
            self.pull.landed(ask.slave, ask.request, 0, now_s, credit=credit)
        elif ask.chunk is None:
            self.push.missing(ask.slave, ask.request, missing, complete, now_s, credit=credit)
        else:
            self.push.acked(ask.slave, ask.request, complete, now_s, credit=credit)
        assert not self.transfer.failure, self.transfer.failure
        if self.transfer.done:
            self.course.done(self.name, now_s - self.began_s)
        else:
            self.pump()


def _layout(race: Race) -> Layout:
    """One block for each slave."""
    n_elems = race.model_bytes // len(race.slaves) // FLOAT32_BYTES
    layers = tuple(Parameter(f"w{i}", (n_elems,), "float32", f"layer{i}") for i in range(len(race.slaves)))
    return Layout(layers, block_elems=n_elems)
