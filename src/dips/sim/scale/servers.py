"""The master and the slaves of a simulation at scale.

The master is the real MasterMachine, driven as master/process.py drives it: its effects go out with a delay, its
journal is durable after a virtual write, and a death leaves only what the journal held. The slaves hold no
parameters: they answer each command after the time that rates.py gives, with a digest in place of the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.messages import (
    AbortRound,
    BlockGram,
    Caller,
    CloseStaging,
    Commit,
    CommitRecord,
    Configure,
    ConfigureRefused,
    Flipped,
    Hello,
    Measure,
    Measured,
    OpenStaging,
    Prepare,
    Prepared,
    Promised,
    Ready,
    Refusal,
    SendCommitRecord,
    SlaveBeat,
    SlaveBody,
    SlaveCommand,
    SlaveHello,
    SlaveMessage,
    SnapshotInfo,
    Staged,
    StagedPush,
    StagingProgress,
    Welcome,
)
from dips.core.protocol import CAPABILITIES, PROTOCOL_MIN, PROTOCOL_VERSION
from dips.master.state.effects import CloseLink, Effect, Halt, Record, Refuse, Reply, ToSlave, WriteJournal
from dips.master.state.events import ClusterCall, Event, JournalWritten, SlaveLinkDown, SlaveSaid, Tick
from dips.master.state.master import MasterMachine
from dips.sim.scale import rates
from dips.sim.scale.kernel import Future, Timer, VirtualClock
from dips.sim.scale.links import SharedDirection
from dips.sim.scale.scenario import Scenario
from dips.sim.scale.tally import ScaleTally

TICK_SHARE = 0.4
"""The interval of ticks in heartbeats; a gap of more than half a heartbeat would count as a pause of the master."""

REATTACH_S = 1.0
SNAPSHOTS_KEPT = 3
BAD_NORM = 30.0
NORM = 2.0
NORM_SPREAD = 0.05
COSINE = 0.3
"""Plausible pseudo-gradients: norms of about 2 with 5 % spread, and some agreement between clusters. Assumed."""

HELLO = Hello(PROTOCOL_MIN, PROTOCOL_VERSION, tuple(sorted(CAPABILITIES)), "simulated")


class Servers:
    """The master and the slaves, and the calls to them."""

    def __init__(self, scenario: Scenario, clock: VirtualClock, up: SharedDirection, tally: ScaleTally) -> None:
        self.scenario, self.clock, self.up, self.tally = scenario, clock, up, tally
        self.norm_of: dict[str, float] = {}
        self.halted = ""
        self.epoch = 0
        self.master: MasterMachine | None = None
        self.on_slave_lost: list[Callable[[str], None]] = []
        self._snapshot: str | None = None
        self._outcomes: dict[int, Future] = {}
        self._token = 0
        self._link = 0
        self._deadline: Timer | None = None
        self._events: list[Event] = []
        self.slaves = {name: LightSlave(self, name) for name in slave_names(scenario)}
        self._by_link: dict[int, LightSlave] = {}
        self.start_master()

    # ---- the master's process ----

    def start_master(self) -> None:
        """Start the master from the journal's newest entry; the slaves attach."""
        self.epoch += 1
        self._by_link.clear()
        self.master = MasterMachine(self.scenario.master, self.epoch, self._snapshot, 0.0)
        self._carry_out(self.master.start(self.clock.now_s))
        self._tick_on(self.epoch)
        for slave in self.slaves.values():
            if slave.alive:
                self.clock.after(self.latency_s, slave.attach)

    def kill_master(self) -> None:
        """kill -9: every waiting call is lost, and entries that were not yet in the journal."""
        self.master = None
        self._events.clear()
        outcomes, self._outcomes = self._outcomes, {}
        for outcome in outcomes.values():
            outcome.set(None)
        self.clock.after(self.scenario.slaves.restart, self.start_master)

    @property
    def latency_s(self) -> float:
        return self.scenario.slaves.round_trip / 2.0

    def _tick_on(self, epoch: int) -> None:
        if self.master is None or self.epoch != epoch:
            return
        self.event(Tick())
        beat_s = self.scenario.master.settings.heartbeat_s
        self.clock.after(TICK_SHARE * beat_s, lambda: self._tick_on(epoch))

    def event(self, event: Event) -> None:
        """Give the master an event, in order; it is dropped while the master is dead."""
        if self.master is None:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events and self.master is not None:
            self._carry_out(self.master.handle(self._events[0], self.clock.now_s))
            if self._events:
                self._events.pop(0)
        if self.master is None:
            self._events.clear()
        self._arm()

    def _arm(self) -> None:
        """Schedule a tick at the next deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        due_s = self.master.next_deadline_s() if self.master is not None else None
        if due_s is not None:
            self._deadline = self.clock.at(due_s, lambda: self.event(Tick()))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(token, body):
                    self._answer(token, body)
                case Refuse(token, refusal):
                    self._answer(token, refusal)
                case ToSlave(link, command):
                    self._command(link, command)
                case WriteJournal():
                    self._write(effect, self.epoch)
                case Record(kind, _, fields):
                    self.tally.record(kind, dict(fields))
                case CloseLink(link):
                    self._closed(link)
                case Halt(_, sentence):
                    self.halted, self.master = sentence, None
                case _:
                    pass  # log lines are not used here

    def _answer(self, token: int, body: object) -> None:
        outcome = self._outcomes.pop(token, None)
        if outcome is not None:
            self.clock.after(self.latency_s, lambda: outcome.set(body))

    def _command(self, link: int, command: SlaveCommand) -> None:
        slave = self._by_link.get(link)
        if slave is not None:
            self.clock.after(self.latency_s, lambda: slave.obey(link, command))

    def _closed(self, link: int) -> None:
        """The master broke the stream: the slave attaches again."""
        slave = self._by_link.pop(link, None)
        if slave is not None:
            self.clock.after(REATTACH_S, slave.attach)

    def _write(self, entry: WriteJournal, epoch: int) -> None:
        """Entries become durable in order, since each takes as long as the others."""

        def written() -> None:
            if self.master is not None and self.epoch == epoch:
                self._snapshot = entry.snapshot_json
                self.tally.journal(entry.kind, entry.record_json)
                self.event(JournalWritten(entry.entry_id))

        self.clock.after(self.scenario.slaves.journal, written)

    # ---- calls to the master ----

    def call(self, request: Any) -> Future:
        """Make a cluster's call: the reply, a Refusal, or None when the master is unreachable."""
        outcome = Future(self.clock)
        self._token += 1
        token = self._token

        def arrive() -> None:
            if self.master is None:
                outcome.set(None)
                return
            self._outcomes[token] = outcome
            self.event(ClusterCall(token, request))

        self.clock.after(self.latency_s, arrive)
        return outcome

    def attach(self, slave: LightSlave) -> int:
        self._link += 1
        self._by_link[self._link] = slave
        return self._link

    def detach(self, link: int) -> None:
        if self._by_link.pop(link, None) is not None:
            self.event(SlaveLinkDown(link))

    # ---- slaves ----

    def kill_slave(self, name: str) -> None:
        """kill -9: its stagings are lost; it comes back with its durable state."""
        slave = self.slaves[name]
        if not slave.alive:
            return
        slave.die()
        for tell in self.on_slave_lost:
            tell(name)
        self.clock.after(self.scenario.slaves.restart + self._load_s(slave), slave.revive)

    def _load_s(self, slave: LightSlave) -> float:
        return rates.load_s(slave.n_elems, self.scenario.slaves.disk_rate) if slave.snapshots else 0.0

    def staged(self, push: PushId) -> None:
        """All bytes of a push are on the slaves."""
        for slave in self.slaves.values():
            slave.stage(push)

    def gram(self, pushes: tuple[StagedPush, ...]) -> tuple[float, ...]:
        """The Gram matrix of the whole model: upper triangle by rows."""
        norms = [self.norm_of.get(item.push.cluster, NORM) for item in pushes]
        count = range(len(pushes))
        return tuple(norms[i] * norms[j] * (1.0 if i == j else COSINE) for i in count for j in count if j >= i)


class LightSlave:
    """Executes commands like a slave, but holds only names and digests."""

    def __init__(self, servers: Servers, name: str) -> None:
        self._servers = servers
        self.name = name
        self.alive = True
        self.n_elems = 0
        self.snapshots: dict[Version, SnapshotInfo] = {}
        self._records: dict[Version, bytes] = {}
        self._link: int | None = None
        self._generation = 0
        self._incarnation: Incarnation | None = None
        self._promised = 0
        self._configure: Configure | None = None
        self._staging: dict[PushId, OpenStaging] = {}
        self._round: RoundId | None = None
        self._beats_s = servers.scenario.master.settings.heartbeat_s

    # ---- its process ----

    def attach(self) -> None:
        if not self.alive or self._servers.master is None:
            return
        self._generation += 1
        self._incarnation = None
        self._staging.clear()
        self._link = self._servers.attach(self)
        snapshots = tuple(self.snapshots.values())
        memory_bytes = self._servers.scenario.slaves.memory
        hello = SlaveHello(HELLO, f"tcp://{self.name}:1", memory_bytes, self._promised, snapshots)
        self._say(hello, self._generation)
        self._beat(self._generation)

    def die(self) -> None:
        self.alive = False
        self._generation += 1
        self._staging.clear()
        self._round = None
        if self._link is not None:
            self._servers.detach(self._link)
            self._link = None

    def revive(self) -> None:
        self.alive = True
        self.attach()

    def _beat(self, generation: int) -> None:
        if not self.alive or generation != self._generation:
            return
        if self._incarnation is not None:
            self._say(SlaveBeat(progress=self._progress()), generation)
        self._servers.clock.after(self._beats_s, lambda: self._beat(generation))

    def _progress(self) -> tuple[StagingProgress, ...]:
        up = self._servers.up
        up.settle()
        found: list[StagingProgress] = []
        for push, opened in self._staging.items():
            flow = up.of(push.cluster)
            if flow is not None and self.name in flow.parts:
                landed = self.share_bytes - flow.left_of(self.name)
                found.append(StagingProgress(push, opened.attempt, int(landed)))
        return tuple(found)

    @property
    def share_bytes(self) -> float:
        """This slave's part of a model."""
        return float(rates.FLOAT32_BYTES * self.n_elems)

    def _say(self, body: SlaveBody, generation: int) -> None:
        link, epoch = self._link, self._servers.epoch
        if not self.alive or generation != self._generation or link is None:
            return
        caller = Caller("simulated", epoch, self.name, self._incarnation, self.name)
        message = SlaveMessage(caller, body)
        self._servers.clock.after(self._servers.latency_s, lambda: self._servers.event(SlaveSaid(link, message)))

    def _later(self, seconds: float, body: SlaveBody, round_id: RoundId | None) -> None:
        """Send it after so long, unless the slave died, attached again, or the round was given up meanwhile."""
        generation = self._generation

        def ready() -> None:
            if generation == self._generation and round_id == self._round:
                self._say(body, generation)

        self._servers.clock.after(seconds, ready)

    # ---- commands ----

    def obey(self, link: int, command: SlaveCommand) -> None:
        if not self.alive or link != self._link:
            return
        self._incarnation = command.incarnation
        match command.body:
            case Welcome():
                self._promised = command.epoch
                self._say(Promised(command.epoch), self._generation)
            case Configure() as body:
                self._take_configuration(body)
            case OpenStaging() as body:
                self._staging[body.push] = body
            case CloseStaging(push):
                self._staging.pop(push, None)
            case Measure() as body:
                self._measure(body)
            case Prepare() as body:
                self._prepare(body)
            case AbortRound(round_id):
                self._drop_shadow(round_id)
            case Commit() as body:
                self._commit(body)
            case SendCommitRecord() as body:
                self._send_record(body)
            case _:
                pass

    def _take_configuration(self, body: Configure) -> None:
        self._configure = body
        own = [block for block, slave in enumerate(body.placement.slave_of_block) if self._is_mine(slave)]
        self.n_elems = sum(body.layout.blocks[block].n_elems for block in own)
        if body.load is None:
            self._say(Ready(None), self._generation)
            return
        found = self.snapshots.get(body.origin or body.load)
        if found is None or found.digest != body.load_digest:
            refusal = Refusal(RefusalCode.VERSION_GONE, f"slave {self.name} does not hold {body.origin or body.load}")
            self._say(ConfigureRefused(refusal), self._generation)
            return
        self.snapshots[body.load] = replace(found, version=body.load, round=body.load_round or found.round)
        self._mark_committed(body.load, body.commit_hash, body.commit_record)
        self._say(Ready(body.load, body.load_digest), self._generation)

    def _send_record(self, body: SendCommitRecord) -> None:
        record = self._records.get(body.version)
        missing = Refusal(RefusalCode.VERSION_GONE, f"slave {self.name} has no record of {body.version}")
        self._say(CommitRecord(body.version, body.round, record or b"", None if record else missing), self._generation)

    def _is_mine(self, index: int) -> bool:
        assert self._configure is not None, "configured"
        return self._configure.placement.slaves[index].slave_id == self.name

    def stage(self, push: PushId) -> None:
        opened = self._staging.get(push)
        if self.alive and opened is not None:
            self._say(Staged(push, opened.attempt, push_digest(push, self.name)), self._generation)

    def _measure(self, body: Measure) -> None:
        assert self._configure is not None, "only a slave that is ready measures"
        self._round = body.round
        owners = self._configure.placement.slave_of_block
        whole = self._servers.gram(body.participants)
        gram = tuple(value / len(owners) for value in whole)
        clean = (0,) * len(body.participants)
        blocks = tuple(BlockGram(block, gram, clean) for block, owner in enumerate(owners) if self._is_mine(owner))
        took_s = rates.measure_s(self.n_elems, len(body.participants), self._servers.scenario.slaves.memory_rate)
        self._later(took_s, Measured(body.round, blocks), body.round)

    def _prepare(self, body: Prepare) -> None:
        assert self._configure is not None, "only a slave that is ready prepares"
        self._round = body.round
        digest = hashlib.sha256(f"{self.name}/{body.round}/{body.to_version}".encode()).digest()
        layout_hash, placement_hash = self._configure.layout_hash, self._configure.placement.placement_hash
        shadow = SnapshotInfo(body.to_version, body.round, layout_hash, placement_hash, digest, False)
        table, generation = self._servers.scenario.slaves, self._generation
        took_s = rates.prepare_s(self.n_elems, len(body.accepted), table.memory_rate, table.disk_rate)

        def durable() -> None:
            if generation == self._generation and body.round == self._round:
                self.snapshots[body.to_version] = shadow
                self._say(Prepared(body.round, digest), generation)

        self._servers.clock.after(took_s, durable)

    def _drop_shadow(self, round_id: RoundId) -> None:
        self._round = None
        for version, info in list(self.snapshots.items()):
            if info.round == round_id and not info.committed:
                del self.snapshots[version]

    def _commit(self, body: Commit) -> None:
        self._round = None
        if body.version not in self.snapshots:
            return
        self._mark_committed(body.version, body.commit_hash, body.commit_record)
        self._say(Flipped(body.round, body.version), self._generation)

    def _mark_committed(self, version: Version, commit_hash: bytes, record: bytes) -> None:
        self.snapshots[version] = replace(self.snapshots[version], committed=True, commit_hash=commit_hash)
        self._records[version] = record
        for old in sorted(self.snapshots)[:-SNAPSHOTS_KEPT]:
            del self.snapshots[old]
            self._records.pop(old, None)


def push_digest(push: PushId, slave: str) -> bytes:
    """The stand-in for the digest of the bytes that this slave holds of the push."""
    return hashlib.sha256(f"{push}/{slave}".encode()).digest()


def slave_names(scenario: Scenario) -> list[str]:
    width = len(str(scenario.slaves.count - 1))
    return [f"s{index:0{width}d}" for index in range(scenario.slaves.count)]
