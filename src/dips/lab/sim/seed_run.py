"""Runs one seed: the course of a simulated run from its start through faults to its end, and all its checks.

The hosts boot; faults strike at times and places that the seed chooses; then everything is healed, and the run must
publish again within two rounds and end in order. Every fact goes to the judge (dips.judge.invariants) at once.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dips.core.ids import PushId, Version, parse_version
from dips.core.layout import Chunk
from dips.core.messages import ClusterRequest, OperatorRequest, SnapshotInfo
from dips.core.wire import Codec
from dips.judge.facts import DECISIONS, Fact, decision_of, journaled
from dips.judge.invariants import Checker, Violation
from dips.lab.sim.arithmetic import Key, ModelVector, Value
from dips.lab.sim.checks import Budgets, Checks, ContentChecks, NameChecks, VerdictWaits, residual_fault
from dips.lab.sim.content import CLEAN
from dips.lab.sim.counts import HEALED_ROUNDS, HEALED_S, Arrow, RunCounts, Seen
from dips.lab.sim.faults import register
from dips.lab.sim.faults.standby import LEFT_BEHIND
from dips.lab.sim.faults.world import LOOKS_EVERY_S, RESTART_S, FaultWorld
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.run_plan import SimulatedRunPlan
from dips.lab.sim.world import MasterProcess, SlaveProcess
from dips.master.state.effects import Resume, Stop
from dips.master.state.records import RecoveryPhase
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Effect

HEALED_WITHIN_S = 150.0
"""Virtual time within which a healed run must publish: eight times the longest round time-out, with all retry
pauses."""

ENDS_WITHIN_S = 120.0
ROUNDS_TO_PUBLISH = 2
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


class SeedRun(FaultWorld):
    """One run from its start through faults to its end.

    plan: what the seed would choose, unless given. planned: names of faults to use in place of the seed's choice.
    pushers, later_pushers: the ranks of each cluster, in place of the plan's; none: as the plan says. takes_over: there
    is a standby, which takes over once at least."""

    def __init__(
        self,
        seed: int,
        tell: bool = False,
        plan: SimulatedRunPlan | None = None,
        planned: tuple[str, ...] | None = None,
        pushers: tuple[int, ...] = (),
        later_pushers: tuple[int, ...] = (),
        takes_over: bool = False,
    ) -> None:
        super().__init__(seed, tell, plan, pushers, later_pushers, takes_over)
        self._planned = planned
        self.seen = Seen()
        self.checks = ContentChecks(self) if self.plan.arithmetic.remembers else Checks(self)
        self.checker = Checker(durability=self.plan.durability)
        self.budgets = Budgets(self)
        self.waits = VerdictWaits(self)
        self.waits.judging = bool(self.plan.sabotaged) and set(planned or ()) <= {
            *register.OF_ONE_CLUSTER,
            *register.OF_RANKS,
        }
        self.names = NameChecks(self)
        self._handled = 0
        self._published_since_heal = False
        self._of_the_heir: list[Callable[[], None]] = []
        """What the master of a take-over and its journal said before it was in office."""

    # ---- the course of a run ----

    def run(self) -> SeedOutcome:
        """Run the whole simulation; never raises for what the simulated processes do."""
        with self.seen.watching():
            self._boot()
            register.plan_faults(self, self._planned)
            # Run the part with faults; a fault that suspends all processes makes it longer.
            kernel, rounds = self.kernel, self.plan.rounds or math.inf
            self._until(
                lambda: bool(self.ended) or self.rounds >= rounds or kernel.next_s >= self.faults_until_s, math.inf
            )
            if not self.ended:
                self._heal_and_publish()
            if not self.ended:
                self._stop()
            self.finish_checks()
            self.counts.close(register.COUNTED_ELSEWHERE)
        return self._outcome()

    def _boot(self) -> None:
        rng = self.kernel.rng
        self.kernel.after(0.0, None, self.masters[0].boot)
        boots = [host.boot for host in self.slaves.values()] + [self.clusters[name].boot for name in self.plan.clusters]
        for boot in (*boots, self.reader.boot):
            self.kernel.after(rng.random() * 0.5, None, boot)
        if self.standby is not None:
            self.kernel.after(0.2, None, self.standby.boot)
        if self.plan.fault_every_s:
            self.kernel.after(RESTORES_EVERY_S, None, self._operator_restores, -1, False)

    def _until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Run events until `done` or for `limit_s`; returns whether it was done."""
        until_s = self.kernel.now_s + limit_s
        while not done() and not self.violations and self.kernel.next_s < until_s:
            if self.kernel.handled > self.plan.max_events:
                self.violated(f"more than {self.plan.max_events} events: the run seems to be in an endless loop")
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
                self.ended = "what was lost no longer exists anywhere, and the master says so"
                return
        if not self.ended and not self.violations and not self._publishes_again(0.0):
            self.violated(f"a healed run does not publish: {self.waiting_for()} (I15)")

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
                self.violated(f"a healed run took {self.rounds_at_publish - rounds} rounds to publish (I15)")
        return done

    def _says_what_is_lost(self) -> bool:
        """Whether committed state was destroyed, and the master reports what is missing instead of guessing."""
        master = self.newest_master()
        lost = self.state_lost or self.plan.durability == "async"
        if master is None or master.state is None or not lost or self.violations or self.ended:
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
        """Restore the slaves' directories, as the master's sentence asks the operator. A slave that lost its directory
        before the last publish has a newer one since then."""
        lost = sorted(self.lost_now & self.attic.keys())
        self.kernel.note("world", "the operator restores what was lost: " + ", ".join(lost))
        for name, copy in ((name, self.attic[name]) for name in lost):
            slave = self.slaves[name]
            if slave.alive:
                slave.kill()
            slave.disk.put_back(copy)
            self.restart(slave, RESTART_S)

    def _all_here(self) -> bool:
        """Whether all slaves are ready and a live cluster is a member, so that a round is possible."""
        master = self.newest_master()
        if master is None or master.state is None:
            return False
        world = master.state.shared
        return world.all_slaves_ready() and bool(world.members) and world.ledger.version is not None

    def heal(self) -> None:
        """End every fault, start dead processes again and end the pause of the run."""
        self.kernel.note("world", "healed")
        self.healed = True
        self.watchers.clear()
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
            if cluster.ranks is not None:
                cluster.ranks.heal()
        standby = [] if self.standby is None else [self.standby]
        for host in (*self.masters[:1], *standby, *self.slaves.values(), *self.clusters.values()):
            host.resume()
            if not host.alive:
                self.kernel.after(self.kernel.jitter(0.2), None, self.boot_if_dead, host)
        self._operator_watches()

    def _operator_watches(self) -> None:
        """Resume the run whenever it is paused: a pause may come back with an older ledger."""
        master = self.newest_master()
        if self.ended:
            return
        if master is not None and not master.paused and master.state is not None and master.state.shared.ledger.paused:
            master.operate(Resume(OperatorRequest("", "well again")))
        self.kernel.after(LOOKS_EVERY_S, None, self._operator_watches)

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
        elif not ended and not self.violations:
            self.violated(f"the run does not end: {self.waiting_for()}")

    def waiting_for(self) -> str:
        """Why the run makes no progress, for the line of a failing seed."""
        master = self.newest_master()
        if master is None or master.state is None:
            return "no master is alive"
        world = master.state.shared
        phases = {name: c.session.phase.value if c.session else "-" for name, c in self.clusters.items()}
        slaves = {str(name): slave.phase.now.value for name, slave in world.slaves.items()}
        troubles = [slave.trouble for slave in world.slaves.values() if slave.trouble]
        return f"round {world.round.phase.now.value}, slaves {slaves} {troubles}, clusters {phases}"

    def _outcome(self) -> SeedOutcome:
        return SeedOutcome(
            self.seed,
            tuple(self.violations),
            dict(sorted(self.counts.fired.items())),
            self.seen,
            self.publishes,
            self.rounds,
            self.kernel.now_s,
            self.kernel.handled,
            self.kernel.trace_hash,
            dict(self.checker.counts),
            tuple(self.kernel.story),
            self.shape.name,
            self.counts,
        )

    # ---- facts ----

    def finish_checks(self) -> None:
        """The run is over: judge what was still waiting for a proof."""
        before = len(self.checker.violations)
        self._report(self.checker.finish()[before:])

    def _report(self, violations: Sequence[Violation]) -> None:
        for violation in violations:
            self.violated(str(violation))

    def bug(self, name: str, error: Exception) -> None:
        super().bug(name, error)
        if self.kernel.telling:
            self.kernel.story.extend("".join(traceback.format_exception(error)).splitlines())

    def began(self, process: SimulatedProcess, drawn: bytes) -> None:
        self.names.began(process, drawn)

    def called(self, request: ClusterRequest) -> None:
        self.names.called(request)

    def pushing(self, push: PushId, wire: Codec, vector: ModelVector) -> None:
        self.checks.pushing(push, wire, vector)

    def part_sent(self, push: PushId, life: int, rank: int, chunks: Sequence[Chunk]) -> None:
        self.checks.part_sent(push, life, rank, chunks)

    def staged(self, slave: str, push: PushId, wire: Codec, values: Mapping[Key, Value | None]) -> None:
        self.checks.staged(slave, push, wire, values)

    def pulled(self, name: str, version: Version, values: Mapping[Key, Value]) -> None:
        self.checks.pulled(name, version, values)

    def cluster_handled(
        self,
        name: str,
        machine: ClusterMachine,
        outputs: Sequence[Effect],
        residuals: tuple[int, int],
        sent_as: Mapping[str, Codec],
    ) -> None:
        if fault := residual_fault(*residuals, outputs, sent_as, machine):
            self.violated(f"{name}: {fault}")

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        super().tape(role, process, kind, cause, fields)
        judge = partial(self._judge_tape, Fact(role, process.name, kind, fields, self.kernel.now_s))
        if isinstance(process, MasterHost):
            self.names.said(kind, fields)
            if (kind, fields.get("phase")) == ("recovery", RecoveryPhase.NONE.value) and process.disk is self.disk:
                self._takes_office()
            self._judge_of(process, judge)
            if kind == "publish" and process.disk is not self.in_office:
                self._published_by_another(parse_version(fields["version"]))
        else:
            judge()

    def _judge_tape(self, line: Fact) -> None:
        if line.source == "master":
            if line.kind == "publish":
                self.checks.publish(parse_version(line.fields["version"]))
                self.budgets.check()
        elif line.source == "worker":
            self.waits.said(line.who, line.kind)
            if line.kind == "verdict":
                self.checks.told(line.who, line.fields)
        self._report(self.checker.feed(line))

    def journalled(self, master: MasterProcess, record: Mapping[str, Any]) -> None:
        super().journalled(master, record)
        placement = master.state.shared.ledger.placement if master.state is not None else None
        slave_of_block = (
            {block: placement.slaves[index] for block, index in enumerate(placement.slave_of_block)}
            if placement is not None
            else {}
        )
        if record["kind"] in DECISIONS and isinstance(master, MasterHost) and master.disk is self.disk:
            self._takes_office()
        self._judge_of(master, partial(self._judge_record, record, slave_of_block))

    def _judge_record(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        self.checks.journalled(record, slave_of_block)
        self._report(self.checker.feed(journaled(record)))

    # ---- two journals ----

    def _judge_of(self, master: MasterProcess, judge: Callable[[], None]) -> None:
        """Judge what a master says, or its journal: now, or once it holds the run; never what an older one says after
        that."""
        assert isinstance(master, MasterHost)
        if master.disk is self.in_office:
            judge()
        elif master.disk is self.disk:
            self._of_the_heir.append(judge)

    def taken_over(self, master: MasterHost) -> None:
        lost = self.in_office.agreed - len(master.disk.entries)
        if lost > 0:
            self.violated(f"{lost} decisions that counted are not in the standby's directory")

    def _takes_office(self) -> None:
        """All slaves have promised the epoch of the take-over: what the older master decides from now on is nothing."""
        if self.in_office is self.disk:
            return
        tail = self.in_office.tail(self.disk)
        self.kernel.note("world", f"{self.masters[0].name} holds the run; {len(tail)} decisions are left behind")
        if tail:
            self.fired(LEFT_BEHIND)
            self.lost_now.add("master")
            self.journal_lost()
        self.in_office = self.disk
        waiting, self._of_the_heir = self._of_the_heir, []
        for judge in waiting:
            judge()

    def _published_by_another(self, version: Version) -> None:
        if (version.timeline, version.v) not in self.checker.history.commits:
            self.violated(f"a master that was taken over from publishes version {version}, which the run does not have")

    def journal_lost(self) -> None:
        left = (decision_of(record).version for record in self.disk.records())
        self.checker.lost_journal({version for version in left if version is not None})
        self.checks.journal_lost()

    def manifest(self, slave: SlaveProcess, info: SnapshotInfo, record: bytes) -> None:
        super().manifest(slave, info, record)
        said = {
            "version": str(info.version),
            "round": str(info.round),
            "digest": info.digest.hex(),
            "commit_hash": info.commit_hash.hex(),
            "commit_record": record.decode(),
        }
        self._report(self.checker.feed(Fact("manifest", slave.name, "manifest", said)))

    def handled(self, master: MasterProcess) -> None:
        self._handled += 1
        if not self._handled % BUDGETS_EVERY:
            self.budgets.check()
