"""Runs one simulated run: its hosts, their restarts, its checks, and its course from start through faults to end.

The hosts boot; faults strike at times and places that the seed chooses; then everything is healed, and the run must
publish again within two rounds and end in order. Every fact goes to the judge (dips.judge.invariants) at once.
"""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dips.core.errors import Refused
from dips.core.ids import Version
from dips.core.messages import ClusterRequest, OperatorRequest, SnapshotInfo
from dips.core.observe.seen import Arrow, Seen
from dips.master.state.events import Resume, Stop
from dips.master.state.records import RecoveryPhase, RoundPhase
from dips.master.state.shared import RunConfig
from dips.sim import run_plan
from dips.sim.checks import Budgets, Checks, ContentChecks, NameChecks, VerdictWaits, version_of
from dips.sim.content import CLEAN
from dips.sim.counts import HEALED_ROUNDS, HEALED_S, NO_MASTER, RECOVERY, STARTING, RunCounts
from dips.sim.data_keys import key_of
from dips.sim.disks import JournalDisk
from dips.sim.faults import register
from dips.sim.hosts.calls import master_of
from dips.sim.hosts.cluster import ClusterHost
from dips.sim.hosts.master import MasterHost
from dips.sim.hosts.reader import ReaderHost
from dips.sim.hosts.slave import SlaveHost
from dips.sim.judging import Judge
from dips.sim.kernel import Kernel, SimulatedProcess
from dips.sim.network import LinkOccupancy, Network, Weather
from dips.sim.run_plan import SimulatedRunPlan, make_plan
from dips.worker.state.effects import Finished

HEALED_WITHIN_S = 150.0
"""Virtual time within which a healed run must publish: eight times the longest round time-out, with all retry
pauses."""

ENDS_WITHIN_S = 120.0
ROUNDS_TO_PUBLISH = 2
RESTART_S = 1.0
AWAY_S = (1.0, 8.0)
LOOKS_EVERY_S = 3.0
RESTORES_EVERY_S = 40.0
BUDGETS_EVERY = 64
"""Events of the master between two checks of what all processes keep in memory; also checked at each publish."""


@dataclass(frozen=True)
class SeedOutcome:
    """The result of one seed."""

    seed: int
    violations: tuple[str, ...]
    fired: Mapping[str, int]
    seen: Seen
    published: int
    rounds: int
    virtual_s: float
    events: int
    trace_hash: str
    facts: Mapping[str, int] = field(default_factory=dict)
    story: tuple[str, ...] = ()
    shape: str = ""
    counts: RunCounts = field(default_factory=RunCounts)

    @property
    def arrows(self) -> frozenset[Arrow]:
        """Transitions that were taken."""
        return frozenset(self.seen.arrows)


class World:
    """One run.

    plan: what the seed would choose, unless given. planned: names of faults to use in place of the seed's choice."""

    FIRST_FAULT_S = 0.6

    def __init__(
        self,
        seed: int,
        tell: bool = False,
        plan: SimulatedRunPlan | None = None,
        planned: tuple[str, ...] | None = None,
    ) -> None:
        self.seed = seed
        self.kernel = Kernel(seed, tell)
        self.shape = run_plan.of_seed(seed) if plan is None else run_plan.GIVEN
        self.plan = plan or make_plan(self.kernel.rng, shape=self.shape)
        self.run_id = self.plan.config.run_id
        self.counts = RunCounts()
        self._phase = STARTING
        self.seen = Seen()
        links = LinkOccupancy(self.kernel, self.plan.links) if self.plan.links is not None else None
        self.net = Network(self.kernel, self.fired, Weather(self.plan.delay_s), links=links)
        self.checks = ContentChecks(self) if self.plan.arithmetic.remembers else Checks(self)
        self.judge = Judge(self)
        self.budgets = Budgets(self)
        self.waits = VerdictWaits(self)
        self.names = NameChecks(self)
        self.churning = self.rolling = False
        """Whether clusters keep joining and leaving, and whether a rolling restart is under way."""
        self.suspended_until_s = 0.0
        """Until when all processes are suspended."""

        self.faults_until_s = self.plan.faults_for_s
        self.wall_offset_s = 1_700_000_000.0
        self.may_roll_back = self.plan.durability == "async"
        self.rebuild = False
        self.state_lost = False
        self.committed_somewhere: set[Version] = set()
        self.lost_now: set[str] = set()
        """Names whose disks were lost since the last publish; if all are lost, nothing is left to recover from."""

        self._published_since_heal = False
        self.healed = self._ends = False
        self.ended = ""
        self.requests: deque[ClusterRequest] = deque(maxlen=60)
        self.rounds = 0
        self.voids = 0
        self.rounds_at_publish = 0
        self.publishes = 0
        self.watchers: list[Callable[[str, SimulatedProcess, str, Mapping[str, Any]], None]] = []
        self._handled = 0
        self._tokens = 0
        self._said: dict[tuple[str, str], str] = {}
        self.attic: dict[str, dict[str, bytes]] = {}
        """The content of slaves' disks before they were lost or damaged, for an operator who restores them."""

        self.disk = JournalDisk()
        self.masters = [MasterHost(self, "master", self.disk)]
        self.slaves = {name: SlaveHost(self, name) for name in self.plan.slaves}
        names = (*self.plan.clusters, *self.plan.spares)
        self.clusters = {name: ClusterHost(self, name, self.plan.step_s_of(name)) for name in names}
        self.reader = ReaderHost(self)
        self.twins: list[ClusterHost | SlaveHost] = []
        """Second processes under a name that another process has."""
        self._drawn = 0
        self.struck: SimulatedProcess | None = None
        self._planned = planned
        self.waits.judging = bool(self.plan.sabotaged) and set(planned or ()) <= set(register.OF_ONE_CLUSTER)

    # ---- the course of a run ----

    def run(self) -> SeedOutcome:
        """Run the whole simulation; never raises for what the simulated processes do."""
        with self.seen.watching():
            self._boot()
            register.plan_faults(self, self._planned)
            self._suffer()
            if not self.ended:
                self._heal_and_publish()
            if not self.ended:
                self._stop()
            self.judge.finish()
            self.counts.close(register.COUNTED_ELSEWHERE)
        return self._outcome()

    def _boot(self) -> None:
        rng = self.kernel.rng
        self.kernel.after(0.0, None, self.masters[0].boot)
        boots = [host.boot for host in self.slaves.values()] + [self.clusters[name].boot for name in self.plan.clusters]
        for boot in (*boots, self.reader.boot):
            self.kernel.after(rng.random() * 0.5, None, boot)
        if self.plan.fault_every_s:
            self.kernel.after(RESTORES_EVERY_S, None, self._operator_restores, -1, False)

    def _suffer(self) -> None:
        """Run the part with faults; a fault that suspends all processes makes it longer."""
        kernel, rounds = self.kernel, self.plan.rounds or math.inf
        self._until(lambda: bool(self.ended) or self.rounds >= rounds or kernel.next_s >= self.faults_until_s, math.inf)

    def _until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Run events until `done` or for `limit_s`; returns whether it was done."""
        until_s = self.kernel.now_s + limit_s
        while not done() and not self.checks.violations and self.kernel.next_s < until_s:
            if self.kernel.handled > self.plan.max_events:
                self.checks.violated(f"more than {self.plan.max_events} events: the run seems to be in an endless loop")
                break
            self.kernel.step()
        return done()

    def _heal_and_publish(self) -> None:
        """I15: a healed system publishes again within two rounds."""
        self.heal()
        if not self._publishes_again() and self._says_what_is_lost():
            self._bring_disks_back()
            if not self._publishes_again() and self._says_what_is_lost():
                self.fired("stopped_and_said_so")
                self.ended = "what was lost is nowhere any more, and the master says so"
                return
        if not self.ended and not self.checks.violations and not self._publishes_again(0.0):
            self.checks.violated(f"a healed run does not publish: {self.waiting_for()} (I15)")

    def _publishes_again(self, limit_s: float = HEALED_WITHIN_S) -> bool:
        """Whether a version is published in time, and within two rounds after all processes are back."""
        if limit_s == 0.0:
            return self._published_since_heal
        until_s = self.kernel.now_s + limit_s
        if not self._until(lambda: bool(self.ended) or self._all_here(), limit_s):
            return False
        rounds, publishes, here_s = self.rounds - self.voids, self.publishes, self.kernel.now_s
        done = self._until(lambda: bool(self.ended) or self.publishes > publishes, until_s - self.kernel.now_s)
        self._published_since_heal = done
        if done and not self.ended:
            self.counts.took(HEALED_ROUNDS, self.rounds_at_publish - rounds)
            self.counts.took(HEALED_S, self.kernel.now_s - here_s)
            if self.rounds_at_publish - rounds > ROUNDS_TO_PUBLISH:
                self.checks.violated(f"a healed run took {self.rounds_at_publish - rounds} rounds to publish (I15)")
        return done

    def _says_what_is_lost(self) -> bool:
        """Whether committed state was destroyed, and the master reports what is missing instead of guessing."""
        master = master_of(self)
        lost = self.state_lost or self.plan.durability == "async"
        if master is None or master.state is None or not lost or self.checks.violations or self.ended:
            return False
        recovery = master.state.shared.recovery
        return recovery.phase.now is RecoveryPhase.GATHERING and bool(recovery.words or recovery.reason)

    def _operator_restores(self, publishes: int, restored: bool) -> None:
        """In a long run: when the master reports missing state and nothing has changed since the last check, restore
        the disks; if that does not help either, end the faults."""
        if self.healed or self.ended:
            return
        stuck = self.publishes == publishes and self._says_what_is_lost()
        if stuck and restored:
            self.faults_until_s = self.kernel.now_s
        elif stuck:
            self._bring_disks_back()
        self.kernel.after(RESTORES_EVERY_S, None, self._operator_restores, self.publishes, stuck)

    def _bring_disks_back(self) -> None:
        """Restore the slaves' directories, as the master's sentence asks the operator."""
        self.kernel.note("world", "the operator restores what was lost: " + ", ".join(sorted(self.attic)))
        for name, copy in sorted(self.attic.items()):
            slave = self.slaves[name]
            if slave.alive:
                slave.kill()
            slave.disk.put_back(copy)
            self.restart(slave, RESTART_S)

    def _all_here(self) -> bool:
        """Whether all slaves are ready and a live cluster is a member, so that a round is possible."""
        master = master_of(self)
        if master is None or master.state is None:
            return False
        world = master.state.shared
        return world.all_slaves_ready() and bool(world.members) and world.ledger.version is not None

    def heal(self) -> None:
        """End every fault, start dead processes again and end the pause of the run."""
        self.kernel.note("world", "healed")
        self.healed = True
        register.heal(self)
        self.net.mend_all()
        self.disk.full, self.disk.flush_factor = False, 1.0
        for master in self.masters[1:]:
            if master.alive:
                master.kill()
        del self.masters[1:]
        for twin in self.twins:
            twin.kill()
        for slave in self.slaves.values():
            slave.disk.mend()
            slave.overflow = False
        self.masters[0].dies_in_flush = False
        for cluster in self.clusters.values():
            cluster.next_push_kind = CLEAN
        for host in (*self.masters[:1], *self.slaves.values(), *self.clusters.values()):
            host.resume()
            if not host.alive:
                self.kernel.after(self.kernel.jitter(0.2), None, self._boot_if_dead, host)
        self._operator_watches()

    def _operator_watches(self) -> None:
        """Resume the run whenever it is paused: a pause may come back with an older ledger."""
        master = master_of(self)
        if self.ended:
            return
        if master is not None and not master.paused and master.state is not None and master.state.shared.ledger.paused:
            master.operate(Resume(OperatorRequest("", "well again")))
        self.kernel.after(LOOKS_EVERY_S, None, self._operator_watches)

    def operate_until_answered(self, action: Callable[[], Any], token: int = 0, *, last: bool = False) -> None:
        """Repeat a request until a master answers it, as `dips stop` does: when a master died, the next one is asked.

        last: the final stop, after which the operator makes no other planned request."""
        master = master_of(self)
        self._ends |= last
        if self.ended or (self._ends and not last) or any(token in host.answered for host in self.masters):
            return
        if master is not None and not master.paused:
            token = master.operate(action())
        self.kernel.after(LOOKS_EVERY_S, None, partial(self.operate_until_answered, last=last), action, token)

    def _stop(self) -> None:
        """Stop the run: all clusters pull the last version and leave, the master ends with exit code 0."""
        self.kernel.note("world", "the operator stops the run")
        self.operate_until_answered(lambda: Stop(OperatorRequest("", "enough")), last=True)
        ended = self._until(lambda: bool(self.ended), ENDS_WITHIN_S)
        if not ended and self._says_what_is_lost():
            self._bring_disks_back()
            ended = self._until(lambda: bool(self.ended), ENDS_WITHIN_S)
        if not ended and self._says_what_is_lost():
            self.fired("stopped_and_said_so")
        elif not ended and not self.checks.violations:
            self.checks.violated(f"the run does not end: {self.waiting_for()}")

    def _outcome(self) -> SeedOutcome:
        return SeedOutcome(
            self.seed,
            tuple(self.checks.violations),
            dict(sorted(self.counts.fired.items())),
            self.seen,
            self.publishes,
            self.rounds,
            self.kernel.now_s,
            self.kernel.handled,
            self.kernel.trace_hash,
            self.judge.counts(),
            tuple(self.kernel.story),
            self.shape.name,
            self.counts,
        )

    # ---- restarts ----

    def _boot_if_dead(self, host: MasterHost | SlaveHost | ClusterHost) -> None:
        if not host.alive and not self.ended:
            host.boot()

    def restart(self, host: MasterHost | SlaveHost | ClusterHost, after_s: float) -> None:
        """Start a dead process again, as the launchers do."""
        self.kernel.after(after_s, None, self._boot_if_dead, host)

    def master_ended(self, master: MasterHost, code: int, sentence: str) -> None:
        if code == 0:
            self.ended = sentence
        elif master is self.masters[0]:
            self.restart(master, RESTART_S)

    def master_died(self, master: MasterHost) -> None:
        """The master was killed by a fault that waited for its moment."""
        if master is self.masters[0]:
            self.restart(master, self.kernel.jitter(RESTART_S))

    def slave_stopped(self, slave: SlaveHost) -> None:
        """The slave stopped because the master asked it to."""
        if not self.ended and not any(m.exit and m.exit[0] == 0 for m in self.masters):
            self.restart(slave, RESTART_S)

    def slave_died(self, slave: SlaveHost) -> None:
        if self.slaves[slave.name] is slave:
            self.restart(slave, RESTART_S)

    def cluster_died(self, cluster: ClusterHost) -> None:
        """The cluster was killed by a fault that waited for its moment; a twin stays dead."""
        if self.clusters[cluster.name] is cluster:
            self.restart(cluster, RESTART_S)

    def gave_up(self, slave: SlaveHost, why: Refused) -> None:
        """The process ended after a permanent refusal; its launcher tries again."""
        self.kernel.note(slave.name, f"gives up: {why.sentence}")
        slave.end()
        if self.slaves[slave.name] is slave:
            self.restart(slave, 2 * RESTART_S)

    def cluster_ended(self, cluster: ClusterHost, finished: Finished) -> None:
        """A cluster ended. A failed one is started again; one that was asked to leave stays away until everything is
        healed, or comes back earlier in a long run."""
        if self.clusters[cluster.name] is not cluster:
            return
        if finished.error is not None or self.healed:
            self.restart(cluster, RESTART_S)
        elif self.plan.sabotaged or self.plan.fault_every_s:
            self.restart(cluster, self.kernel.rng.uniform(*AWAY_S))

    def may_lose(self, names: Sequence[str]) -> bool:
        """Whether a copy of the run's state remains somewhere when these disks are lost too.

        While two masters are alive no slave's disk may be lost: its promise not to obey the older one is on it.
        """
        if len(self.masters) > 1 and set(self.slaves) & set(names):
            return False
        lost = self.lost_now | set(names)
        return "master" not in lost or not set(self.slaves) & lost

    def lost_state(self, name: str, why: str) -> None:
        """Note that committed state may be lost from now on: the run may go back to an older version."""
        self.kernel.note("world", f"{name}: {why}")
        self.lost_now.add(name)
        if name == "master":
            self.judge.lost_journal(self.disk.records())
            self.checks.journal_lost()
        self.may_roll_back = self.state_lost = True

    # ---- services for the hosts ----

    def next_token(self) -> int:
        self._tokens += 1
        return self._tokens

    def draw(self) -> bytes:
        """A unique identity; not random, so that seeds keep their other choices."""
        self._drawn += 1
        return self._drawn.to_bytes(16)

    def some_master(self) -> MasterHost | None:
        """The master that answers at the master's address; of two, either one."""
        alive = [master for master in self.masters if master.alive]
        return self.kernel.rng.choice(alive) if len(alive) > 1 else (alive[0] if alive else None)

    def slave_at(self, endpoint: str) -> SlaveHost | None:
        """The slave that listens at a data endpoint; each incarnation of a slave has its own."""
        name, _, generation = endpoint.removeprefix("tcp://").partition(":")
        slave = self.slaves.get(name)
        return slave if slave is not None and slave.alive and str(slave.generation) == generation else None

    def key_of(self, process: SimulatedProcess) -> bytes:
        """The data key of this incarnation of a process; empty when the run uses none."""
        return key_of(process) if self.plan.config.encrypted else b""

    def run_config(self, rebuild: bool) -> RunConfig:
        return replace(self.plan.config, rebuild=rebuild or self.rebuild)

    def remember_request(self, request: ClusterRequest) -> None:
        self.requests.append(request)

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

    def bug(self, name: str, error: Exception) -> None:
        """Report an exception that a state machine must never raise."""
        first = str(error).splitlines()[0] if str(error) else ""
        self.checks.violated(f"a bug in {name}: {type(error).__name__}: {first}")
        if self.kernel.telling:
            self.kernel.story.extend(_traceback(error))

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        """Take one line of a process's tape."""
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        self.kernel.note(process.name, f"{kind} {text}")
        if role == "master":
            self.names.said(kind, fields)
            self._master_said(kind, fields)
        elif role == "slave" and kind == "committed":
            committed = version_of(fields["version"])
            assert committed is not None, "what is committed is a version"
            self.committed_somewhere.add(committed)
        elif role == "worker":
            self.waits.said(process.name, kind)
            if kind == "verdict":
                self.checks.told(process.name, fields)
        for watcher in list(self.watchers):
            watcher(role, process, kind, fields)
        self.judge.tape(role, process.name, kind, fields)

    def _master_said(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "publish":
            self.publishes += 1
            self.lost_now.clear()
            version = version_of(fields["version"])
            assert version is not None, "what is published is a version"
            self.checks.publish(version)
            self.budgets.check()
            self.rounds_at_publish = self.rounds - self.voids
        elif kind == "round":
            self._phase = str(fields["phase"])
            self.rounds += fields["input"] == "window closed"
            self.voids += fields["input"] == "void"  # a bad push is rightly not published
        elif kind == "recovery":
            self._phase = RECOVERY if fields["phase"] != RecoveryPhase.NONE.value else RoundPhase.IDLE.value

    def journalled(self, master: MasterHost, record: Mapping[str, Any]) -> None:
        """Take an entry of the journal that is now durable."""
        self.kernel.note(master.name, f"journal {record['kind']} {record.get('version', '')}")
        self.checks.journalled(record, self._placed_by(master))
        self.judge.journal(record)

    def manifest(self, slave: SlaveHost, info: SnapshotInfo, record: bytes) -> None:
        """Take a slave's manifest that is now durable."""
        self.kernel.note(slave.name, f"manifest {info.version} {info.round}")
        self.committed_somewhere.add(info.version)
        self.judge.manifest(slave.name, info, record)

    def handled(self, master: MasterHost) -> None:
        """Check after the master has processed an event."""
        self._handled += 1
        if not self._handled % BUDGETS_EVERY:
            self.budgets.check()

    def _placed_by(self, master: MasterHost) -> Mapping[int, str]:
        """Which slave holds which block, according to the master that wrote the entry."""
        placement = master.state.shared.ledger.placement if master.state is not None else None
        if placement is None:
            return {}
        return {block: placement.slaves[index] for block, index in enumerate(placement.slave_of_block)}

    def waiting_for(self) -> str:
        """Why the run makes no progress, for the line of a failing seed."""
        master = master_of(self)
        if master is None or master.state is None:
            return "no master is alive"
        world = master.state.shared
        phases = {name: c.session.phase.value if c.session else "-" for name, c in self.clusters.items()}
        slaves = {str(name): slave.phase.now.value for name, slave in world.slaves.items()}
        troubles = [slave.trouble for slave in world.slaves.values() if slave.trouble]
        return f"round {world.round.phase.now.value}, slaves {slaves} {troubles}, clusters {phases}"


def _traceback(error: Exception) -> list[str]:
    return "".join(traceback.format_exception(error)).splitlines()
