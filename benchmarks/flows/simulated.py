"""Simulates only transfers over links: compares the master's schedule with two methods without one.

The real machines: dips.core.net.transfer and dips.core.net.flow on one side, dips.slave.state.admission on the other,
orders by dips.master.state.schedule. Links are first come, first served, with a rate for each process and direction
and one delay for all ways (dips.lab.sim.network). Nothing is lost and no process dies: the simulation of whole runs
(dips.lab.sim.seed_run) covers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dips.core.ids import SlaveId
from dips.core.layout import FLOAT32_BYTES, Chunk, Layout, Parameter, Share, shard_digest
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net.data_header import MAX_MISSING, MissingChunk
from dips.core.net.flow import WindowRule
from dips.core.net.transfer import PullTransfer, PushTransfer, SlaveRequest, Transfer, TransferSettings, chunks_by_slave
from dips.core.placement import Placement
from dips.lab.sim.kernel import Kernel
from dips.lab.sim.network import LinkOccupancy, LinkPlan, ProcessRates
from dips.master.state.schedule import TransferRequest, TransferScheduler, Way
from dips.slave.state.admission import Credits
from dips.worker.data import window_of_rank

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


def settings_of(
    method: TransferMethod, chunk_bytes: int, silence_s: float, stall_s: float, n_ranks: int = 1
) -> TransferSettings:
    """The settings of each transfer with this method, or of a rank's part of one."""
    rule, window_chunks = {
        TransferMethod.SCHEDULED: (WindowRule.MEASURED, CAP_CHUNKS),
        TransferMethod.FREE: (WindowRule.EQUAL, FREE_CHUNKS),
        TransferMethod.NAIVE: (WindowRule.ONE_BY_ONE, CAP_CHUNKS),
    }[method]
    return TransferSettings(chunk_bytes, window_of_rank(window_chunks, n_ranks), silence_s, stall_s, rule)


@dataclass(frozen=True)
class Race:
    """A set of concurrent transfers. Rates of clusters and slaves by name; delay_s: one way.

    model_bytes: of one transfer, in equal shares. begins_s: when a cluster begins, 0 unless named. changes: at a time,
    another rate of a process. told_s: the time of a whole transfer for each cluster, as reported to the master.
    has_left: the part of a push that its slaves still lack; all of it unless named. ranks: of a cluster, 1 unless
    named; each has a link of its own with the cluster's rates, and an equal part of every block.
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
    ranks: Mapping[str, int] = field(default_factory=dict)

    def links_of(self, cluster: str) -> list[str]:
        """The names of its ranks' links."""
        n_ranks = self.ranks.get(cluster, 1)
        return [cluster] if n_ranks == 1 else [f"{cluster} rank {rank}" for rank in range(n_ranks)]

    def alone(self, cluster: str) -> Race:
        """The same race with only this cluster."""
        return Race(
            {cluster: self.clusters[cluster]}, self.slaves, self.delay_s, self.model_bytes, self.chunk_bytes, self.way,
            changes=self.changes, ranks=self.ranks,
        )  # fmt: skip


def run(race: Race, method: TransferMethod) -> dict[str, float]:
    """Seconds that each cluster's transfer takes."""
    return _Course(race, method).run()


class _Course:
    def __init__(self, race: Race, method: TransferMethod) -> None:
        self.race, self.method = race, method
        self.kernel = Kernel(1)
        ranks = {link: rates for name, rates in race.clusters.items() for link in race.links_of(name)}
        self.links = LinkOccupancy(self.kernel, LinkPlan({**ranks, **race.slaves}))
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
                name, self.race.way, slot, told_s.get(name, 0.0), min(told_s.values(), default=0.0),
                self.race.ranks.get(name, 1),
            )  # fmt: skip
            order = self.scheduler.begin(request, self.placement)
        _Cluster(self, name, order)

    def _beat(self) -> None:
        for name, n_bytes in self._moved_bytes.items():
            self.scheduler.beat(name, n_bytes if self.race.way is Way.PUSH else 0, n_bytes, self.kernel.now_s)
        if self.race.way is Way.PUSH:
            self._moved_bytes = dict.fromkeys(self._moved_bytes, 0)
        self.kernel.after(BEAT_S, None, self._beat)


class _Cluster:
    """One cluster's transfer: its ranks, and what each slave lacks of its push."""

    def __init__(self, course: _Course, name: str, order: Iterable[int]) -> None:
        self.course, self.name = course, name
        race = course.race
        self.began_s = course.kernel.now_s
        spec = PlacementSpec(
            tuple(SlaveAddress(slave, "") for slave in course.placement.slaves), course.placement.slave_of_block, b""
        )
        left = race.has_left.get(name, 1.0)
        self.lacking: dict[str, set[tuple[int, int]]] = {slave: set() for slave in race.slaves}
        self.to_fetch = dict.fromkeys(race.slaves, 0)
        self._ranks: list[_Rank] = []
        links = race.links_of(name)
        for rank, link in enumerate(links):
            share = _share(course.layout, rank, len(links)) if len(links) > 1 else None
            turned = rank if course.method is TransferMethod.SCHEDULED else 0
            chunks = chunks_by_slave(course.layout, spec, order, race.chunk_bytes, share, turned)
            for slave, own in chunks.items():
                self.lacking[slave] |= {chunk[:2] for chunk in own[: round(left * len(own))]}
                self.to_fetch[slave] += len(own)
            self._ranks.append(_Rank(self, link, chunks, is_share=share is not None))
        if race.way is Way.PUSH:
            for slave, lacking in self.lacking.items():
                course.credits[slave].note_open(name, len(lacking) * race.chunk_bytes, self.began_s)
        for one in self._ranks:
            one.pump()

    def rank_done(self) -> None:
        """A rank has moved its share; the transfer is over when all have."""
        if all(rank.transfer.done for rank in self._ranks):
            self.course.done(self.name, self.course.kernel.now_s - self.began_s)


class _Rank:
    """One rank's part of its cluster's transfer."""

    def __init__(self, cluster: _Cluster, link: str, chunks: Mapping[str, Sequence[Chunk]], *, is_share: bool) -> None:
        self._cluster, self._course, self._link = cluster, cluster.course, link
        course, began_s = cluster.course, cluster.began_s
        n_ranks = len(course.race.links_of(cluster.name)) if course.race.way is Way.PUSH else 1  # as worker/data.py
        limits = settings_of(course.method, course.race.chunk_bytes, silence_s=1e6, stall_s=1e7, n_ranks=n_ranks)
        self._pushes = course.race.way is Way.PUSH
        self.transfer: Transfer
        if self._pushes:
            self.transfer = self._push = PushTransfer(chunks, limits, began_s, is_share=is_share)
        else:
            digests = {slave: shard_digest([0] * len(own)) for slave, own in chunks.items()}
            self.transfer = self._pull = PullTransfer(chunks, None if is_share else digests, limits, began_s)

    def pump(self) -> None:
        for action in self.transfer.actions(self._course.kernel.now_s):
            assert isinstance(action, SlaveRequest), "all processes answer here"
            there = action.chunk.length_bytes if action.chunk and self._pushes else 0
            start = (0, 0) if action.chunk or not self._pushes else self._push.query_from(action.slave)
            self._carry(self._link, action.slave, there, self._asked, action, start)

    def _carry(self, source: str, target: str, n_bytes: int, action: Callable[..., None], *args: object) -> None:
        self._course.links.carry(source, target, n_bytes, self._course.race.delay_s, None, action, *args)

    def _asked(self, ask: SlaveRequest, start: tuple[int, int]) -> None:
        """A message arrives at the slave. start: the place that a query asks from."""
        course, now_s, lacking = self._course, self._course.kernel.now_s, self._cluster.lacking[ask.slave]
        stream = self._cluster.name
        pace, back = course.credits[ask.slave], 0
        missing: tuple[MissingChunk, ...] = ()
        if ask.chunk is None:
            missing = tuple(MissingChunk(*place) for place in sorted(p for p in lacking if p >= start)[:MAX_MISSING])
        else:
            course.moved(ask.slave, ask.chunk.length_bytes)
            pace.note_landed(stream, ask.chunk.length_bytes, now_s)
            if self._pushes:
                lacking.remove(ask.chunk[:2])
            else:
                self._cluster.to_fetch[ask.slave] -= 1
                back = ask.chunk.length_bytes
        credit = pace.credit(stream, now_s)
        complete = not (lacking if self._pushes else self._cluster.to_fetch[ask.slave])
        if complete:
            pace.note_closed(stream, now_s)
        self._carry(ask.slave, self._link, back, self._answered, ask, missing, complete, credit)

    def _answered(self, ask: SlaveRequest, missing: tuple[MissingChunk, ...], complete: bool, credit: int) -> None:
        """An answer arrives at the rank."""
        now_s = self._course.kernel.now_s
        if not self._pushes:
            self._pull.landed(ask.slave, ask.request, 0, now_s, credit=credit)
        elif ask.chunk is None:
            self._push.missing(ask.slave, ask.request, missing, complete, now_s, credit=credit)
        else:
            self._push.acked(ask.slave, ask.request, complete, now_s, credit=credit)
        assert not self.transfer.failure, self.transfer.failure
        if self.transfer.done:
            self._cluster.rank_done()
        else:
            self.pump()


def _share(layout: Layout, rank: int, n_ranks: int) -> Share:
    """This rank's part of every block, as of a model that is cut along its tensors' first dimension."""
    parts = ((block.start_elem, block.n_elems // n_ranks) for block in layout.blocks)
    return Share.of_runs((start + rank * n, start + (rank + 1) * n) for start, n in parts)


def _layout(race: Race) -> Layout:
    """One block for each slave."""
    n_elems = race.model_bytes // len(race.slaves) // FLOAT32_BYTES
    layers = tuple(Parameter(f"w{i}", (n_elems,), "float32", f"layer{i}") for i in range(len(race.slaves)))
    return Layout(layers, block_elems=n_elems)
