"""One simulated run with faults: its hosts, what has happened to them, and how they start again.

Faults (dips.lab.sim.faults) and checks (dips.lab.sim.checks) read this state; the course of a run is
dips.lab.sim.seed_run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

from dips.core.errors import Refused
from dips.core.ids import PushId, Version, parse_version
from dips.core.layout import Chunk
from dips.core.messages import ClusterRequest, SnapshotInfo
from dips.lab.sim import run_plan
from dips.lab.sim.counts import NO_MASTER, RECOVERY, STARTING, RunCounts
from dips.lab.sim.disks import JournalDisk
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.hosts.standby import StandbyHost
from dips.lab.sim.hosts.transfer import ReaderHost
from dips.lab.sim.kernel import Kernel, SimulatedProcess
from dips.lab.sim.network import LinkOccupancy, Network, Weather
from dips.lab.sim.run_plan import SimulatedRunPlan, make_plan
from dips.lab.sim.world import Host, MasterProcess, SlaveProcess, World
from dips.master.state.records import RecoveryPhase, RoundPhase
from dips.worker.state.effects import Finished

RESTART_S = 1.0
AWAY_S = (1.0, 8.0)
LOOKS_EVERY_S = 3.0

OLD_ATTEMPT, OLD_LIFE = "chunks_of_an_old_attempt", "chunks_of_an_old_incarnation"
"""What faults of single ranks bring with them: chunks of what the rank's cluster has given up."""


Watcher = Callable[[str, SimulatedProcess, str, Mapping[str, Any]], None]


class FaultWorld(World):
    """The processes of one run. plan: what the seed would choose, unless given. pushers, later_pushers: as the plan's,
    if any. takes_over: there is a standby, which takes over once at least."""

    FIRST_FAULT_S = 0.6

    masters: list[MasterHost]
    slaves: dict[str, SlaveHost]

    def __init__(
        self,
        seed: int,
        tell: bool = False,
        plan: SimulatedRunPlan | None = None,
        pushers: tuple[int, ...] = (),
        later_pushers: tuple[int, ...] = (),
        takes_over: bool = False,
    ) -> None:
        self.seed = seed
        kernel = Kernel(seed, tell)
        self.shape = run_plan.of_seed(seed) if plan is None else run_plan.GIVEN
        if plan is None:
            plan = run_plan.with_minimum(seed, make_plan(kernel.rng, shape=self.shape))
            plan = run_plan.with_standby(seed, plan, takes_over)
        plan = replace(plan, pushers=pushers) if pushers else plan
        plan = replace(plan, later_pushers=later_pushers) if later_pushers else plan
        links = LinkOccupancy(kernel, plan.links) if plan.links is not None else None
        super().__init__(kernel, plan, Network(kernel, self.fired, Weather(plan.delay_s), links=links))
        self.counts = RunCounts()
        self._phase = STARTING
        self._said: dict[tuple[str, str], str] = {}
        self.watchers: list[Watcher] = []
        """Called for each line of a tape."""

        self.requests: deque[ClusterRequest] = deque(maxlen=60)
        self.rounds = 0
        self.voids = 0
        self.rounds_at_publish = 0
        self.publishes = 0
        self.published: Version | None = None
        self.committed_somewhere: set[Version] = set()

        self.churning = self.rolling = False
        """Whether clusters keep joining and leaving, and whether a rolling restart is under way."""
        self.suspended_until_s = 0.0
        """Until when all processes are suspended."""

        self.faults_until_s = self.plan.faults_for_s
        self.may_roll_back = self.plan.durability == "async"
        self.state_lost = False
        self.lost_now: set[str] = set()
        """Names whose disks were lost since the last publish; if all are lost, nothing is left to recover from."""
        self._lost_before_round: set[str] = set()

        self.attic: dict[str, dict[str, bytes]] = {}
        """The content of slaves' disks before they were lost or damaged, for an operator who restores them."""

        self.healed = self._ends = False
        self.ended = ""
        self.disk = JournalDisk()
        self.in_office = self.disk
        """The journal that is judged: the older one, until the slaves have promised the epoch of a take-over."""
        self.masters = [MasterHost(self, "master", self.disk)]
        self.takes_over = takes_over and bool(plan.standby)
        self.standby = StandbyHost(self, "standby", JournalDisk()) if plan.standby else None
        self.slaves = {name: SlaveHost(self, name) for name in self.plan.slaves}
        names = (*self.plan.clusters, *self.plan.spares)
        self.clusters = {name: ClusterHost(self, name, self.plan.step_s_of(name)) for name in names}
        self.reader = ReaderHost(self)
        self.twins: list[ClusterHost | SlaveHost] = []
        """Second processes under a name that another process has."""
        self.struck: SimulatedProcess | None = None

    def newest_master(self) -> MasterHost | None:
        """The newest live master, for the run's operator."""
        alive = [master for master in self.masters if master.alive]
        return max(alive, key=lambda master: master.epoch, default=None)

    def operate_until_answered(self, action: Callable[[], Any], token: int = 0, *, last: bool = False) -> None:
        """Repeat a request until a master answers it, as `dips stop` does: when a master died, the next one is asked.

        last: the final stop, after which the operator makes no other planned request."""
        master = self.newest_master()
        self._ends |= last
        if self.ended or (self._ends and not last) or any(token in host.answered for host in self.masters):
            return
        if master is not None and not master.paused:
            token = master.operate(action())
        self.kernel.after(LOOKS_EVERY_S, None, partial(self.operate_until_answered, last=last), action, token)

    # ---- restarts ----

    def boot_if_dead(self, host: Host) -> None:
        if not host.alive and not self.ended and (host is self.standby or not isinstance(host, StandbyHost)):
            host.boot()

    def restart(self, host: Host, after_s: float) -> None:
        """Start a dead process again, as the launchers do. They too stand still while everything is suspended: else a
        run whose faults end only later would go on for hours."""
        suspended_s = max(0.0, self.suspended_until_s - self.kernel.now_s)
        self.kernel.after(suspended_s + after_s, None, self.boot_if_dead, host)

    def master_ended(self, master: MasterProcess, code: int, sentence: str) -> None:
        if code == 0:
            self.ended = sentence
        elif master is self.masters[0]:
            self.restart(master, RESTART_S)

    def begin_standby(self, at: str) -> None:
        """Start a standby with an empty directory, in the place of a master that was taken over from."""
        if not self.ended and self.standby is None:
            self.standby = StandbyHost(self, at, JournalDisk())
            self.standby.boot()

    def taken_over(self, master: MasterHost) -> None:
        """A standby has become the run's master, and is started next; the one before it may live on."""

    def _has_its_name(self, host: Host) -> bool:
        """Whether it is the first process of its name, and no twin, second master, or one that was taken over from."""
        return host is self.masters[0] or host is self.slaves.get(host.name) or host is self.clusters.get(host.name)

    def died(self, host: Host) -> None:
        """The process was killed by a fault that waited for its moment; a twin stays dead."""
        if self._has_its_name(host):
            is_master = host is self.masters[0]
            self.restart(host, self.kernel.jitter(RESTART_S) if is_master else RESTART_S)

    def slave_stopped(self, slave: SlaveProcess) -> None:
        """The slave stopped because the master asked it to."""
        if not self.ended and not any(m.exit and m.exit[0] == 0 for m in self.masters):
            self.restart(slave, RESTART_S)

    def gave_up(self, slave: SlaveProcess, why: Refused) -> None:
        """The process ended after a permanent refusal; its launcher tries again."""
        self.kernel.note(slave.name, f"gives up: {why.sentence}")
        slave.end()
        if self._has_its_name(slave):
            self.restart(slave, 2 * RESTART_S)

    def name_taken(self, slave: SlaveProcess) -> None:
        self.fired("second_slave_took_over")
        self.lost_state(slave.name, "a second process took over its name, with an empty directory")

    def cluster_ended(self, cluster: Host, finished: Finished) -> None:
        """A cluster ended. A failed one is started again; one that was asked to leave stays away until everything is
        healed, or comes back earlier in a long run."""
        if not self._has_its_name(cluster):
            return
        if finished.error is not None or self.healed:
            self.restart(cluster, RESTART_S)
        elif self.plan.sabotaged or self.plan.fault_every_s:
            self.restart(cluster, self.kernel.rng.uniform(*AWAY_S))

    def may_lose(self, names: Sequence[str]) -> bool:
        """Whether a copy of the run's state remains somewhere when these disks are lost too.

        While two masters are alive no slave's disk may be lost: its promise not to obey the older one is on it. Nothing
        may be lost from a take-over until its master holds the run and the older one has ended.
        """
        if self.in_office is not self.disk or (self.plan.standby and len(self.masters) > 1):
            return False
        if len(self.masters) > 1 and set(self.slaves) & set(names):
            return False
        lost = self.lost_now | set(names)
        return "master" not in lost or not set(self.slaves) & lost

    def lost_state(self, name: str, why: str) -> None:
        """Note that committed state may be lost from now on: the run may go back to an older version."""
        self.kernel.note("world", f"{name}: {why}")
        self.lost_now.add(name)
        if name == "master":
            self.journal_lost()
        self.may_roll_back = self.state_lost = True

    def journal_lost(self) -> None:
        """The master's disk is lost, or restored from a copy."""

    # ---- events ----

    @property
    def phase(self) -> str:
        """The phase of the round that a master's tape recorded last; the master may already be further within a
        step."""
        return self._phase if any(master.alive for master in self.masters) else NO_MASTER

    def fired(self, kind: str) -> None:
        self.counts.struck(kind, self.phase)

    def killed(self, role: str) -> None:
        """Note that a process of this role is killed now."""
        if not self.healed:
            self.counts.kills[role, self.phase] += 1

    def log(self, name: str, key: str, sentence: str) -> None:
        """Note a log line when the sentence of its key changes."""
        if self.kernel.telling and self._said.get((name, key)) != sentence:
            self._said[name, key] = sentence
            if sentence:
                self.kernel.aside(name, f"[{key}] {sentence}")

    def chunk_sent(self, push: PushId, attempt: int, rank: int, chunk: Chunk) -> None:
        """Count what a rank sends of what its cluster has given up."""
        cluster = self.clusters[push.cluster]
        incarnation = cluster.session.shared.terms.incarnation if cluster.session is not None else None
        if incarnation != push.incarnation:
            self.fired(OLD_LIFE)
        elif cluster.ranks is None or not cluster.ranks.sends(push, attempt):
            self.fired(OLD_ATTEMPT)

    def once(
        self, role: str, kind: str, phase: str, act: Callable[[SimulatedProcess, Mapping[str, Any]], None]
    ) -> Watcher:
        """Call once, at the next such line of a tape. phase: empty for any."""

        def watch(said_by: str, process: SimulatedProcess, said: str, fields: Mapping[str, Any]) -> None:
            if (said_by, said) == (role, kind) and phase in ("", fields.get("phase")):
                self.watchers.remove(watch)
                act(process, fields)

        self.watchers.append(watch)
        return watch

    def requested(self, request: ClusterRequest) -> None:
        self.requests.append(request)

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        self.kernel.note(process.name, f"{kind} {text}")
        if role == "master":
            self._master_said(kind, fields)
        elif role == "slave" and kind == "committed":
            self.committed_somewhere.add(parse_version(fields["version"]))
        for watcher in list(self.watchers):
            watcher(role, process, kind, fields)

    def _master_said(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "publish":
            self.publishes += 1
            self.lost_now -= self._lost_before_round  # a disk that was lost later has nothing of this version
            self.published = parse_version(fields["version"])
            self.rounds_at_publish = self.rounds - self.voids
        elif kind == "round":
            self._phase = str(fields["phase"])
            if fields["phase"] == RoundPhase.SEALED.value:
                self._lost_before_round = set(self.lost_now)
            self.rounds += fields["input"] == "window closed"
            self.voids += fields["input"] == "void"  # a bad push is rightly not published
        elif kind == "recovery":
            self._phase = RECOVERY if fields["phase"] != RecoveryPhase.NONE.value else RoundPhase.IDLE.value

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        self.kernel.note(master.name, f"journal {record['kind']} {record.get('version', '')}")

    def manifest(self, slave: SlaveProcess, info: SnapshotInfo, record: bytes) -> None:
        self.kernel.note(slave.name, f"manifest {info.version} {info.round}")
        self.committed_somewhere.add(info.version)


# ---- tables of faults ------------------------------------------------------------------------------------------------


Begin = Callable[[FaultWorld], bool]
"""Strikes now; returns False when there is nothing to strike at yet."""

Target = TypeVar("Target")


class Faults(dict[str, Begin]):
    """A table of faults by name, into which its decorators enter functions. armed: those that are only armed when they
    begin, and counted when they really strike."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: set[str] = set()

    def add(self, *, armed: bool = False) -> Callable[[Begin], Begin]:
        """Enter a fault that finds itself what to strike at."""

        def enter(begin: Begin) -> Begin:
            self[begin.__name__] = begin
            self.armed |= {begin.__name__} if armed else set()
            return begin

        return enter

    def of(
        self, target: Callable[[FaultWorld], Target | None], *, armed: bool = False
    ) -> Callable[[Callable[[FaultWorld, Target], bool | None]], Begin]:
        """Enter a fault of what `target` chooses; it returns False when it cannot strike at that yet."""

        def enter(strike: Callable[[FaultWorld, Target], bool | None]) -> Begin:
            @wraps(strike)
            def begin(world: FaultWorld) -> bool:
                chosen = target(world)
                return chosen is not None and strike(world, chosen) is not False

            return self.add(armed=armed)(begin)

        return enter
