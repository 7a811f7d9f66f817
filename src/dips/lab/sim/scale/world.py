"""A run at scale: the real machines of master, slaves and clusters in the simulator's hosts, at a scenario's rates.

Nothing is trained and no parameters are held: steps, transfers, copies, a slave's jobs and its disk take as long as the
formulas of rates.py say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dips.core.errors import LocalProtocolError, Refused
from dips.core.ids import ClusterId
from dips.core.layout import FLOAT32_BYTES, Layout
from dips.core.messages import Configure, DataMode, DataPlan, DataRange, Measure, Prepare
from dips.core.net.flow import START_CHUNKS
from dips.core.net.steps import MAX_SILENCE_S
from dips.lab.sim.disks import JournalDisk
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.kernel import Kernel, SimulatedProcess
from dips.lab.sim.network import LinkPlan, Network, ProcessRates, SharedLinks, Weather
from dips.lab.sim.run_plan import SimulatedRunPlan
from dips.lab.sim.scale import rates, tally
from dips.lab.sim.scale.arithmetic import ScaleArithmetic
from dips.lab.sim.scale.scenario import Scenario
from dips.lab.sim.world import Host, MasterProcess, SlaveProcess, World
from dips.slave.state.checks import MIN_CHUNK_BYTES, own_blocks
from dips.slave.state.effects import Run
from dips.worker.state.effects import Finished
from dips.worker.state.shared import SessionConfig, SessionPhase
from dips.worker.state.waiting import times_of

QUEUE_SHARE = 2 / 3
"""The most that all chunks in flight may take, as a share of the silence after which a transfer gives up a slave."""


@dataclass(frozen=True)
class ScalePlan(SimulatedRunPlan):
    """A run's settings, with steps of its own for each cluster."""

    tokens_of_step: Mapping[str, int] = field(default_factory=dict)

    def step_tokens(self, name: str) -> int:
        return self.tokens_of_step[name]

    def least_held_tokens(self, name: str) -> int:
        return self.tokens_of_step[name]

    def lease_tokens(self, name: str, local_steps: int) -> int:
        return local_steps * self.tokens_of_step[name]

    def batch_of(self, name: str, held: Sequence[DataRange], n_steps: int = 1) -> tuple[DataRange, ...]:
        wanted, batch = n_steps * self.tokens_of_step[name], list[DataRange]()
        for item in held:
            batch.append(replace(item, end_tokens=min(item.end_tokens, item.begin_tokens + wanted)))
            wanted -= batch[-1].tokens
            if not wanted:
                break
        return tuple(batch)


def plan_of(scenario: Scenario, layout: Layout, arithmetic: ScaleArithmetic) -> ScalePlan:
    """The plan: chunks as large as the transfers' limits of silence allow, so that a transfer is few events."""
    slaves, clusters, data = scenario.slaves, scenario.clusters, scenario.data
    # An answer may wait for all chunks in flight, which share one link; the flow control allows START_CHUNKS of them.
    in_flight = max(START_CHUNKS, slaves.count)
    slowest_bytes_per_s = min(min(table.up, table.down) for table in clusters) / 8
    most_bytes = QUEUE_SHARE * MAX_SILENCE_S * slowest_bytes_per_s / in_flight
    block = layout.blocks[0]
    chunk_elems = math.ceil(block.n_elems / math.ceil(block.n_bytes / most_bytes))
    chunk_bytes = max(MIN_CHUNK_BYTES, FLOAT32_BYTES * chunk_elems)
    config = replace(scenario.master, settings=replace(scenario.master.settings, chunk_bytes=chunk_bytes))
    plan_data = DataPlan(DataMode.LEASED, b"simulated", data.total_tokens, data.chunk_tokens)
    times = times_of(SessionConfig(ClusterId(clusters[0].id), layout, plan_data), config.settings)
    silence_s = max(times.data_silence_s, in_flight * chunk_bytes / slowest_bytes_per_s / QUEUE_SHARE)
    width = len(str(slaves.count - 1))
    return ScalePlan(
        tuple(table.id for table in clusters),
        tuple(f"s{index:0{width}d}" for index in range(slaves.count)),
        layout,
        plan_data,
        config,
        tuple(table.tokens_per_step / table.tokens_per_s for table in clusters),
        tokens_per_step=0,
        delay_s=slaves.round_trip / 2,
        flush_s=slaves.journal,
        work_s=0.0,
        call_deadline_s=times.call_deadline_s,
        leave_wait_s=times.leave_wait_s,
        data_silence_s=silence_s,
        data_stall_s=max(times.data_stall_s, 2 * silence_s),
        faults_for_s=0.0,
        n_faults=0,
        checkpoints=False,
        snapshots_kept=3,
        arithmetic=arithmetic,
        step_jitter=0.0,
        retry_max_s=times.retry_max_s,
        slave_memory_bytes=slaves.memory,
        max_chunk_bytes=chunk_bytes,
        longest_wait_s=config.settings.heartbeat_s,
        steps_at_once=1_000_000,
        measured_pace=False,
        tokens_of_step={table.id: table.tokens_per_step for table in clusters},
    )


def links_of(scenario: Scenario, slaves: Sequence[str]) -> LinkPlan:
    """The rates of all links."""
    cards = ProcessRates(scenario.slaves.network, scenario.slaves.network)
    rates_of = {table.id: ProcessRates(table.up, table.down) for table in scenario.clusters}
    return LinkPlan(rates_of | dict.fromkeys(slaves, cards))


@dataclass
class ScaleNetwork(Network):
    """Delays are constant: those of the weather to and from a cluster, near_s between master and slaves."""

    clusters: frozenset[str] = frozenset()
    near_s: float = 0.0

    def delay_s(self, source: str, target: str) -> float:
        return self.weather.delay_s if {source, target} & self.clusters else self.near_s


_STATE_OF_PHASE = {
    SessionPhase.JOINING: tally.JOIN,
    SessionPhase.TRAINING: tally.PULL,  # it waits for a lease
    SessionPhase.BEGINNING_PUSH: tally.PUSH,
    SessionPhase.TRANSFERRING: tally.PUSH,
    SessionPhase.FINISHING_PUSH: tally.VERDICT,
    SessionPhase.AWAITING: tally.VERDICT,
    SessionPhase.PULLING: tally.PULL,
    SessionPhase.LEAVING: tally.AWAY,
    SessionPhase.LEFT: tally.AWAY,
}
"""What a cluster that neither trains nor copies waits for."""


class ScaleWorld(World):
    """The processes of one run, and what is counted of them."""

    masters: list[MasterHost]
    slaves: dict[str, SlaveHost]

    def __init__(self, scenario: Scenario, layout: Layout) -> None:
        self.scenario = scenario
        self.tables = {table.id: table for table in scenario.clusters}
        self.tally = tally.ScaleTally(self.tables)
        bad_push = {name: table.bad_push for name, table in self.tables.items()}
        arithmetic = ScaleArithmetic(scenario.run.seed, bad_push, layout.n_elems, self._bad_push)
        plan, kernel = plan_of(scenario, layout, arithmetic), Kernel(scenario.run.seed)
        self.links = SharedLinks(kernel, links_of(scenario, plan.slaves))
        near_s = scenario.slaves.near_round_trip / 2
        net = ScaleNetwork(
            kernel, self.fired, Weather(plan.delay_s), self.links, clusters=frozenset(self.tables), near_s=near_s
        )
        super().__init__(kernel, plan, net)
        self.halted = ""
        self._speeds = {name: random.Random(f"{scenario.run.seed} {name}") for name in self.tables}
        self._failed: set[str] = set()
        """Clusters that have not pulled since they failed."""

        self._disk = JournalDisk()
        self.masters = [MasterHost(self, "master", self._disk)]
        self.slaves = {name: SlaveHost(self, name) for name in plan.slaves}
        self.clusters = {name: ClusterHost(self, name, plan.step_s_of(name)) for name in self.tables}
        for host in (*self.masters, *self.slaves.values()):
            kernel.after(0.0, None, host.boot)

    def violated(self, sentence: str) -> None:
        raise LocalProtocolError(sentence)

    def gave_up(self, slave: SlaveProcess, why: Refused) -> None:
        raise why

    def _bad_push(self) -> None:
        self.tally.faults["bad push"] += 1

    # ---- durations ----

    def job_s(self, slave: SlaveProcess, run: Run) -> float:
        table = self.scenario.slaves
        match run.command:
            case Measure():
                return rates.measure_s(self._share_elems(slave.name), len(run.slots), table.memory_rate)
            case Prepare():
                return rates.outer_step_s(self._share_elems(slave.name), len(run.slots), table.memory_rate)
            case Configure() as command if run.source is not None:
                blocks = own_blocks(slave.name, command)
                return rates.snapshot_s(sum(block.n_elems for block in blocks), table.disk_rate)
            case _:
                return 0.0

    def write_s(self, slave: SlaveProcess, *, snapshot: bool) -> float:
        table = self.scenario.slaves
        return rates.snapshot_s(self._share_elems(slave.name), table.disk_rate) if snapshot else table.journal

    def slave_restart_s(self, slave: SlaveHost) -> float:
        """From a slave's death until it attaches again: it reads back every snapshot on its disk."""
        table, kept = self.scenario.slaves, len(slave.ring.infos())
        return table.restart + kept * rates.snapshot_s(self._share_elems(slave.name), table.disk_rate)

    def _share_elems(self, slave: str) -> int:
        memory = self.slaves[slave].port.memory
        return sum(block.n_elems for block in memory.blocks) if memory is not None else 0

    def copy_s(self, cluster: str) -> float:
        return rates.copy_s(self.plan.layout.n_elems, self.tables[cluster].copy_rate)

    def connect_s(self, source: str, target: str) -> float:
        return rates.connect_s(2 * self.net.delay_s(source, target), self.plan.config.encrypted)

    def ramp_s(self, source: str, target: str) -> float:
        """A cluster has connections to all slaves at once, which share its link."""
        bits_per_s = self.scenario.slaves.network
        for name, of_link in ((source, "up"), (target, "down")):
            if name in self.tables:
                bits_per_s = min(bits_per_s, getattr(self.tables[name], of_link) / len(self.slaves))
        return rates.ramp_s(bits_per_s, 2 * self.net.delay_s(source, target))

    # ---- what the processes do ----

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        if role == "master":
            self.tally.record(kind, fields)
        elif role == "worker" and kind == "push_begun":
            # The speed of a cluster's next round
            cluster = self.clusters[process.name]
            table = self.tables[cluster.name]
            factor = max(0.5, self._speeds[cluster.name].gauss(1.0, table.jitter)) if table.jitter else 1.0
            cluster.step_s = table.tokens_per_step / (table.tokens_per_s * factor)
        elif role == "worker" and kind == "installed":
            self._failed.discard(process.name)

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        self.tally.journal(record)
        del self._disk.entries[:-1]  # a month of them does not fit into memory, and only the newest is read again

    def settled(self, cluster: Host) -> None:
        self.tally.clusters[cluster.name].enter(self._state_of(self.clusters[cluster.name]), self.kernel.now_s)

    def _state_of(self, cluster: ClusterHost) -> str:
        """The state of a live cluster in the account of its time."""
        session = cluster.session
        if session is None:
            return tally.AWAY
        if session.shared.base is None:
            joining = session.phase is SessionPhase.JOINING
            return tally.REJOIN_PULL if cluster.name in self._failed and not joining else tally.JOIN
        if cluster.training:
            return tally.TRAIN
        return tally.COPIES if cluster.copying else _STATE_OF_PHASE[session.phase]

    def cluster_fails(self, cluster: ClusterHost) -> None:
        """kill -9 of a cluster's process: what was not pushed is lost."""
        account = self.tally.clusters[cluster.name]
        account.failures += 1
        account.lost_in_steps_s += cluster.trained_until_now_s - cluster.trained_s
        cluster.kill()
        self.links.lose(cluster.name)
        self._failed.add(cluster.name)
        account.enter(tally.RESTART, self.kernel.now_s)

    def cluster_ended(self, cluster: Host, finished: Finished) -> None:
        if finished.error is not None:
            raise finished.error
        self.tally.clusters[cluster.name].enter(tally.AWAY, self.kernel.now_s)

    def master_ended(self, master: MasterProcess, code: int, sentence: str) -> None:
        self.halted = sentence

    def close(self) -> None:
        """End the accounts: what was trained, and is neither in a version nor in a push that may come into one, is
        lost."""
        for name, cluster in self.clusters.items():
            account, session = self.tally.clusters[name], cluster.session
            account.enter(account.state, self.kernel.now_s)
            kept = account.tokens_applied
            if session is not None:
                kept += session.shared.work.pending.tokens
                push = session.pushing.open
                kept += push.work.tokens if push is not None and push.id != account.last_applied else 0
            trained = cluster.steps * self.tables[name].tokens_per_step
            if trained > 0:
                account.lose(account.lost_in_steps_s + cluster.trained_s * (trained - kept) / trained)
