"""What the processes of one simulated run share: time, network, the run's plan, and each other's addresses.

Hosts (dips.lab.sim.hosts) know only this module. A run of its own kind is a subclass: it makes the hosts, and overrides
the methods that report what they do. In this class these methods do nothing, so that a run pays only for what it
watches.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dips.core.errors import Refused
from dips.core.ids import Incarnation, PushId, Version
from dips.core.layout import Chunk
from dips.core.messages import ClusterRequest, Refusal, SlaveMessage, SnapshotInfo
from dips.core.net.data_header import DataHeader
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import Key, ModelVector, Value
from dips.lab.sim.kernel import Kernel, SimulatedProcess
from dips.lab.sim.network import End, Network, Stream
from dips.lab.sim.run_plan import SimulatedRunPlan
from dips.master.state.master import MasterMachine
from dips.master.state.shared import RunConfig
from dips.slave.state.effects import Run
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Effect, Finished

MAX_VIOLATIONS = 5

NOT_LISTENING_S = 0.05
"""Seconds until a caller learns that no process listens at the address."""

Away = Callable[[str], None]
"""Called with the reason why no connection was made."""


class Host(SimulatedProcess, ABC):
    """A process of a run, with a real state machine inside."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.kernel, name)
        self.world = world

    @abstractmethod
    def boot(self) -> None:
        """Start the process."""

    def kill(self) -> None:
        """kill -9."""
        self.end_process()

    def struck_dead(self, fault: str) -> None:
        """A fault that waited for its moment kills the process."""
        self.world.fired(fault)
        self.kill()
        self.world.died(self)


class MasterProcess(Host):
    """What the other processes see of a master."""

    state: MasterMachine | None
    epoch: int
    at = "master"
    """Where it is, for the network."""

    @abstractmethod
    def called(self, call: Call) -> None:
        """Take a cluster's or reader's call."""

    @abstractmethod
    def hung_up(self, token: int) -> None:
        """The caller no longer waits for the answer of this call."""

    @abstractmethod
    def beats_ended(self, cluster: str, incarnation: Incarnation | None) -> None:
        """The connection of a cluster's heartbeats ended."""

    @abstractmethod
    def attached(self, number: int, stream: Stream, end: End) -> None:
        """A slave's stream is open at this side."""

    @abstractmethod
    def slave_said(self, number: int, message: SlaveMessage) -> None:
        """Take a message from a slave's stream."""

    @abstractmethod
    def link_down(self, number: int) -> None:
        """A slave's stream ended."""


class SlaveProcess(Host):
    """What the other processes see of a slave."""

    @abstractmethod
    def end(self) -> None:
        """The process has ended, for any reason."""

    @abstractmethod
    def asked(
        self,
        header: DataHeader,
        value: Value,
        answer: Callable[[DataHeader, Value], None],
        key: bytes = b"",
        away: Away = lambda why: None,
    ) -> None:
        """Take one message of a peer with this key; `answer` sends ours back, `away` is called when the peer is not
        admitted."""


class World:
    """One run, as its processes see it."""

    masters: Sequence[MasterProcess]
    slaves: Mapping[str, SlaveProcess]

    def __init__(self, kernel: Kernel, plan: SimulatedRunPlan, net: Network) -> None:
        self.kernel, self.plan, self.net = kernel, plan, net
        self.run_id = plan.config.run_id
        self.wall_offset_s = 1_700_000_000.0
        self.violations: list[str] = []
        """Broken promises of this run, the first ones."""

        self.rebuild = False
        """Whether a master that starts now rebuilds its journal from the slaves."""

        self._tokens = 0
        self._drawn = 0

    # ---- services ----

    def next_token(self) -> int:
        self._tokens += 1
        return self._tokens

    def draw(self) -> bytes:
        """A unique identity; not random, so that seeds keep their other choices."""
        self._drawn += 1
        return self._drawn.to_bytes(16)

    def some_master(self) -> MasterProcess | None:
        """The master that answers at the master's address; of two, either one."""
        alive = [master for master in self.masters if master.alive]
        return self.kernel.rng.choice(alive) if len(alive) > 1 else (alive[0] if alive else None)

    def slave_at(self, endpoint: str) -> SlaveProcess | None:
        """The slave that listens at a data endpoint; each incarnation of a slave has its own."""
        name, _, generation = endpoint.removeprefix("tcp://").partition(":")
        slave = self.slaves.get(name)
        return slave if slave is not None and slave.alive and str(slave.generation) == generation else None

    def key_of(self, process: SimulatedProcess) -> bytes:
        """The data key of this incarnation of a process, a name in place of cryptography; empty when the run uses
        none."""
        if not self.plan.config.encrypted:
            return b""
        return hashlib.sha256(f"{process.name} {process.generation}".encode()).digest()

    def run_config(self) -> RunConfig:
        """The settings of a master that starts now."""
        return replace(self.plan.config, rebuild=self.rebuild)

    # ---- durations ----

    def job_s(self, slave: SlaveProcess, run: Run) -> float:
        """How long this job of a slave takes."""
        return self.kernel.jitter(self.plan.work_s)

    def write_s(self, slave: SlaveProcess, *, snapshot: bool) -> float:
        """How long a durable write of a slave takes: of a whole snapshot, or of a few bytes."""
        return self.kernel.jitter(self.plan.flush_s)

    def copy_s(self, cluster: str) -> float:
        """How long a cluster copies its parameters to or from the transfer buffer."""
        return 0.0

    def connect_s(self, source: str, target: str) -> float:
        """How long it takes to make a connection of the data flow."""
        return 0.0

    def ramp_s(self, source: str, target: str) -> float:
        """How much later than at full rate a new connection's payload arrives."""
        return 0.0

    # ---- broken promises ----

    def violated(self, sentence: str) -> None:
        """Note a broken promise; the run goes on, and has failed."""
        self.kernel.note("check", f"VIOLATED {sentence}")
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(sentence)

    def bug(self, name: str, error: Exception) -> None:
        """Report an exception that a state machine must never raise."""
        first = str(error).splitlines()[0] if str(error) else ""
        self.violated(f"a bug in {name}: {type(error).__name__}: {first}")

    # ---- what the processes do ----

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        """A process wrote a line to its tape."""

    def log(self, name: str, key: str, sentence: str) -> None:
        """A process logged a line."""

    def fired(self, kind: str) -> None:
        """A fault of this kind struck."""

    def killed(self, role: str) -> None:
        """A process of this role is killed now."""

    def began(self, process: SimulatedProcess, drawn: bytes) -> None:
        """A slave or cluster began a process, with this identity."""

    def requested(self, request: ClusterRequest) -> None:
        """A request is on its way to a master."""

    def called(self, request: ClusterRequest) -> None:
        """A request has reached a master."""

    def handled(self, master: MasterProcess) -> None:
        """The master has handled an event."""

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        """An entry of the journal is durable."""

    def manifest(self, slave: SlaveProcess, info: SnapshotInfo, record: bytes) -> None:
        """A slave's manifest is durable."""

    def pushing(self, push: PushId, wire: Codec, vector: ModelVector) -> None:
        """A cluster begins to send this push, written so."""

    def chunk_sent(self, push: PushId, attempt: int, rank: int, chunk: Chunk) -> None:
        """A rank of a cluster of several sends this chunk in this attempt of a push."""

    def part_sent(self, push: PushId, life: int, rank: int, chunks: Sequence[Chunk]) -> None:
        """A rank of a cluster of several has sent these chunks of a push: all of its part. life: of the cluster."""

    def staged(self, slave: str, push: PushId, wire: Codec, values: Mapping[Key, Value | None]) -> None:
        """A slave has all of its part of this push, written so. values: what it has of each of its chunks; None:
        nothing."""

    def pulled(self, name: str, version: Version, values: Mapping[Key, Value]) -> None:
        """A process has pulled a whole version."""

    def cluster_handled(
        self,
        name: str,
        machine: ClusterMachine,
        outputs: Sequence[Effect],
        residuals: tuple[int, int],
        sent_as: Mapping[str, Codec],
    ) -> None:
        """A cluster's machine has handled an event with these effects. residuals: ClusterModel.residual_mark before and
        after. sent_as: how each push of this process was sent last."""

    def settled(self, cluster: Host) -> None:
        """A cluster has handled what has arrived, and now trains, copies or waits."""

    # ---- ends of processes ----

    def master_ended(self, master: MasterProcess, code: int, sentence: str) -> None:
        """The master's process ended by itself."""

    def died(self, host: Host) -> None:
        """The process was killed by a fault that waited for its moment, or by an error of its disk."""

    def slave_stopped(self, slave: SlaveProcess) -> None:
        """The slave stopped because the master asked it to."""

    def gave_up(self, slave: SlaveProcess, why: Refused) -> None:
        """The slave has a permanent refusal and can only end."""

    def name_taken(self, slave: SlaveProcess) -> None:
        """A second process under a slave's name, which was free for long enough, is attached in its place and ends."""

    def cluster_ended(self, cluster: Host, finished: Finished) -> None:
        """The cluster's process ended by itself."""


class Call:
    """A call to the master under way, over a network that may lose the request or the answer.

    `done` is called once: with a reply, a Refused, or a sentence (str) when no answer came in time.
    """

    def __init__(
        self,
        world: World,
        caller: SimulatedProcess,
        request: ClusterRequest,
        deadline_s: float,
        done: Callable[[Any], None],
    ) -> None:
        self.token = world.next_token()
        self.request = request
        self._world = world
        self._caller = caller
        self._generation = caller.generation
        self._done = done
        self._over = False
        self._at = ""
        self._master = world.some_master()
        if self._master is None:
            world.kernel.after(world.kernel.jitter(NOT_LISTENING_S), caller, self._end, "connection refused")
            return
        world.requested(request)
        self._at = self._master.at
        world.net.request(caller.name, self._at, self._master, self._master.called, self)
        world.kernel.after(deadline_s, caller, self._ran_out)

    def answered(self, body: Any) -> None:
        """The master answers; the network may lose the answer."""
        result = Refused(body.code, body.sentence, body.retry_after_s) if isinstance(body, Refusal) else body
        self._world.net.reply(self._at, self._caller.name, self._caller, self._end, result)

    def server_died(self) -> None:
        """The master's system resets the connection."""
        if not self._world.net.is_cut(self._at, self._caller.name):
            self._world.kernel.after(0.001, self._caller, self._end, "connection reset")

    def _ran_out(self) -> None:
        if self._over:
            return
        master, net, name = self._master, self._world.net, self._caller.name
        if master is not None and master.alive and not net.is_cut(name, self._at):
            self._world.kernel.after(net.delay_s(name, self._at), master, master.hung_up, self.token)
        self._end("deadline exceeded")

    def _end(self, result: Any) -> None:
        """End the call. A caller that died meanwhile gets nothing, nor does its next incarnation, with another
        connection."""
        if not self._over and self._caller.generation == self._generation:
            self._over = True
            self._done(result)
