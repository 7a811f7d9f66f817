"""A random walk of the real master on the simulator's hosts: faults and operators all the time, and checks after every
event of the master beside those of the simulator.

Deterministic for a seed. The simulator's judge checks what was recorded, told and read; here the master's own memory is
compared with its journal, and every open call must be one that something will answer.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from dips.core.ids import PushId, Version
from dips.core.messages import ClusterRequest, JoinRequest, Refusal, SnapshotInfo, Verdict, VerdictKind
from dips.lab.sim import run_plan
from dips.lab.sim.checks import push_of
from dips.lab.sim.disks import JournalDisk, StoredEntry
from dips.lab.sim.faults import register, reshard
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.run_plan import make_plan
from dips.lab.sim.seed_run import SeedRun
from dips.lab.sim.world import MasterProcess, SlaveProcess
from dips.master.state.events import ClusterCall
from dips.master.state.leases import TokenState
from dips.master.state.pulls import MAX_READERS
from dips.master.state.records import PushPhase, RoundPhase

SHAPE = replace(run_plan.SMALL, clusters=(3,), slaves=(2,))
FAULT_EVERY_S = 0.7
"""On the mean."""

TRAINS_S = 10.0
"""A new walk is left in peace for so long, so that there are versions to lose."""

NEVER = frozenset(
    {
        *("lost_master_disk", "old_master_disk", "asked_slave_fails", "all_slave_disks_lost"),
        *("operator_stops_early", "operator_takes_an_end_back"),
    }
)
"""With another journal under it the master's memory is rightly another; a version may be gone for good
without any disk; a run that is stopped walks no further."""

RARE = frozenset({*register.GROUPS["lost state"], "suspend_all", "power_failure", "isolate_master", "two_masters"})
RARE_WEIGHT = 0.2
REPEATED = frozenset({"replayed_request", "replayed_word_of_slave", "old_incarnation", "late_replies", "lost_replies"})
REPEATED_WEIGHT = 6.0
EARLIER = "call_of_an_earlier_process"
CALLS_KEPT = 400
KINDS = {EARLIER: REPEATED_WEIGHT} | {
    name: RARE_WEIGHT if name in RARE else REPEATED_WEIGHT if name in REPEATED else 1.0
    for name in sorted(register.FAULTS)
    if name not in NEVER and name not in reshard.FAULTS and name not in register.OF_RANKS
}


class Walk(SeedRun):
    """Three clusters, two slaves and one master. Use walk(), or fall_at_entry(); then publishes_again() and ends()."""

    def __init__(self, seed: int) -> None:
        plan = make_plan(Random(seed), shape=SHAPE)
        if seed % 4 == 3:
            config = replace(plan.config, min_clusters_per_round=3, round_deadline_s=4.0)
            plan = replace(plan, config=config)
        super().__init__(seed, plan=plan)
        self.masters = [WalkMaster(self, "master", self.disk)]
        self.n_events = 0
        """Of the master's, up to now."""
        self._memory = _Memory()
        self._durable = _Memory()
        self._asked: deque[Any] = deque(maxlen=CALLS_KEPT)
        self._backups: dict[str, dict[str, bytes]] = {}
        """Of each slave's disk after its last durable manifest, for an operator whom the master asks to restore it."""

    @property
    def master(self) -> WalkMaster:
        master = self.masters[0]
        assert isinstance(master, WalkMaster)
        return master

    def walk(self, n_events: int) -> None:
        self._boot()
        self.kernel.after(TRAINS_S, None, self._strike)
        self._until(lambda: bool(self.ended) or self.n_events >= n_events, math.inf)

    def fall_at_entry(self, entry: int, written: int) -> None:
        """Boot without faults; the master dies when it writes this entry of its journal and some seconds have passed.
        written: entries that are durable although it did not live to learn it."""
        self.master.stops_writing_at = entry
        self._boot()
        assert self._until(lambda: self.master.stuck, 60.0), f"the journal has no entry {entry}"
        self._until(lambda: False, 3.0)
        self.master.die_with(written)
        self.restart(self.master, 1.0)

    def publishes_again(self) -> None:
        """I15: heal; a version is published within two rounds, or checks.violations says why not."""
        self._heal_and_publish()

    def ends(self) -> None:
        self._stop()
        self.judge.finish()

    def _strike(self) -> None:
        if self.healed or self.ended:
            return
        kind = self.kernel.rng.choices(list(KINDS), list(KINDS.values()))[0]
        strike = register.FAULTS.get(kind)
        if self._call_of_an_earlier_process() if strike is None else strike(self):
            self.kernel.note("world", f"fault {kind}")
        self.kernel.after(self.kernel.rng.expovariate(1 / FAULT_EVERY_S), None, self._strike)

    def _call_of_an_earlier_process(self) -> bool:
        """Any call of a cluster's earlier incarnation arrives late, or once more, also its Leave."""
        master = self.master
        if not master.running or master.state is None:
            return False
        members = master.state.shared.members
        newest = {name: member.incarnation for name, member in members.items()}
        late = [r for r in self._asked if r.caller.incarnation and r.caller.incarnation != newest.get(r.caller.name)]
        if not late:
            return False
        request, token = self.kernel.rng.choice(late), self.next_token()
        if not isinstance(request, JoinRequest) and not getattr(request, "reader", False):
            master.must_refuse[token] = type(request).__name__
        master.dispatch(ClusterCall(token, request))
        return True

    def requested(self, request: ClusterRequest) -> None:
        super().requested(request)
        self._asked.append(request)

    def manifest(self, slave: SlaveProcess, info: SnapshotInfo, record: bytes) -> None:
        super().manifest(slave, info, record)
        known = self.slaves[slave.name]
        if known is slave:
            self._backups[slave.name] = known.disk.copy()

    def _bring_disks_back(self) -> None:
        self.attic.update(self._backups)
        super()._bring_disks_back()

    def handled(self, master: MasterProcess) -> None:
        super().handled(master)
        self.n_events += 1
        if master is self.masters[0] and master.state is not None and master.epoch == self.disk.epoch:
            assert isinstance(master, WalkMaster)
            self._check(master)

    def told(self, verdict: Verdict) -> None:
        self._durable.follow(self.disk.entries)
        known = self._durable.verdicts.get(verdict.push)
        if known != verdict.kind and (known is not None or verdict.kind is not VerdictKind.ABORTED):
            self.violated(f"{verdict.kind.name} of push {verdict.push} is told, the journal says {known}")

    def _check(self, master: WalkMaster) -> None:
        self._memory.follow([*self.disk.entries, *master.pending])
        for holds, sentence in (*self._ledger(master), *_machines(master), *_calls(master)):
            if not holds:
                self.violated(sentence)

    def _ledger(self, master: WalkMaster) -> list[tuple[bool, str]]:
        assert master.state is not None
        ledger, said = master.state.shared.ledger, self._memory
        found = [
            (ledger.tokens == said.now.tokens, "the ledger's tokens are not the journal's"),
            (ledger.version == said.version, "the ledger's version is not the journal's"),
            (
                {name: entry.fence for name, entry in ledger.clusters.items() if entry.fence} == said.fences,
                "the ledger's fences are not the journal's",
            ),
        ]
        if ledger.leases is not None:
            totals = ledger.leases.totals()
            found.append((sum(totals.values()) % self.plan.data.total_tokens == 0, "the corpus has lost tokens"))
            found += [
                (totals[state] == n, f"{totals[state]} tokens are {state.name}, {n} by the journal")
                for state, n in said.now.taken.items()
            ]
        return found


class WalkMaster(MasterHost):
    """Writes its journal entry by entry. stops_writing_at: with so many entries its disk takes no more."""

    stops_writing_at: int | None = None

    def __init__(self, world: SeedRun, name: str, disk: JournalDisk) -> None:
        super().__init__(world, name, disk)
        self.must_refuse: dict[int, str] = {}
        """Calls that must not succeed: what each is, by its token."""

    @property
    def pending(self) -> list[StoredEntry]:
        return self._on_its_way

    @property
    def stuck(self) -> bool:
        return len(self.disk.entries) == self.stops_writing_at and bool(self.pending)

    def die_with(self, written: int) -> None:
        self.stops_writing_at = None
        self._durable(self._on_its_way[:written])
        self._on_its_way.clear()
        self.kill()

    @property
    def ticked_now(self) -> bool:
        return self._last_tick_s == self.kernel.now_s

    @property
    def waiting(self) -> set[int]:
        return set(self._calls)

    def _answer(self, token: int, body: Any) -> None:
        verdict = getattr(body, "last_push", getattr(body, "answer", None))
        if isinstance(verdict, Verdict) and self.epoch == self.disk.epoch and isinstance(self.world, Walk):
            self.world.told(verdict)
        if token in self.must_refuse and not isinstance(body, Refusal):
            self.world.violated(f"a {self.must_refuse[token]} of an earlier incarnation is taken (I8)")
        super()._answer(token, body)

    def _flush(self) -> None:
        if len(self.disk.entries) != self.stops_writing_at:
            super()._flush()

    def _flushed(self, batch: list[StoredEntry]) -> None:
        super()._flushed(batch[:1])


@dataclass(frozen=True)
class _State:
    """What a version is made of: the tokens of the merged pushes, and how many of the corpus were decided."""

    tokens: int = 0
    taken: Mapping[TokenState, int] = field(
        default_factory=lambda: {TokenState.APPLIED: 0, TokenState.EXCLUDED: 0},
    )


class _Memory:
    """What a master must remember by its journal, whose entries came one after the other."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._entries: list[StoredEntry] = []
        self._joined: set[str] = set()
        self._states: dict[Version, _State] = {}
        self.now = _State()
        self.version: Version | None = None
        self.fences: dict[str, int] = {}
        self.verdicts: dict[PushId, VerdictKind] = {}

    def follow(self, entries: list[StoredEntry]) -> None:
        """The whole journal, as it is now; a master that died has left less of it."""
        known = len(self._entries)
        if known > len(entries) or (known and self._entries[-1] is not entries[known - 1]):
            self._begin()
        for entry in entries[len(self._entries) :]:
            self._add(json.loads(entry.record_json))
        self._entries = list(entries)

    def _add(self, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "JOIN":
                self._joined.add(record["cluster"])
            case "ROLLBACK":
                self.now = self._states[Version(*record["origin"])]
                self.fences = {name: self.fences.get(name, 0) + 1 for name in self._joined}
                self.verdicts |= {push_of(push): VerdictKind.ROLLED_BACK for push in record["rolled_back"]}
                self.verdicts |= {push_of(push["push"]): VerdictKind.APPLIED for push in record["participants"]}
            case "COMMIT" | "VOID":
                for push in record["participants"]:
                    self._decided(push)
            case _:
                return
        if "version" in record:
            self.version = Version(*record["version"])
            self._states[self.version] = self.now

    def _decided(self, push: Mapping[str, Any]) -> None:
        cluster = push["push"][0]
        self.fences[cluster] = self.fences.get(cluster, 0) + 1
        kind = self.verdicts[push_of(push["push"])] = VerdictKind[push["verdict"]]
        applied = kind is VerdictKind.APPLIED
        state = TokenState.APPLIED if applied else TokenState.EXCLUDED
        n = sum(end - begin for *_, begin, end in push["ranges"])
        taken = {**self.now.taken, state: self.now.taken[state] + n}
        self.now = _State(self.now.tokens + (push["tokens"] if applied else 0), taken)


def _machines(master: WalkMaster) -> list[tuple[bool, str]]:
    """Of rounds, pushes, slots, pins and what is kept: what holds between any two events."""
    assert master.state is not None
    world = master.state.shared
    state = world.round
    idle = state.phase.now in (RoundPhase.IDLE, RoundPhase.WINDOW)
    slots = {m.cluster: m.slot for m in world.members.values()} | {p.cluster: p.slot for p in state.participants}
    ready = {slave.id for slave in world.ready_slaves()}
    pushes = list(world.pushes())
    return [
        (bool(state.participants) != idle, "participants without a round, or a round without participants"),
        (all(push.sealed for push in state.participants), "a participant's push is not sealed"),
        (len(set(slots.values())) == len(slots), "two clusters share a slot"),
        (all(push.phase.now is not PushPhase.DECIDED for push in pushes), "a decided push is still open"),
        (all(push.sealed == (push in state.participants) for push in pushes), "a sealed push is in no round"),
        (all(push.sealed or set(push.digest_of_slave) <= ready for push in pushes), "a push stands on a lost slave"),
        (state.phase.now is RoundPhase.IDLE or state.id is not None, "a round without a number"),
        (len(world.pins) <= len(world.members) + MAX_READERS, "too many pins"),
        (len(world.kept) <= 2 + world.config.pinned_versions, "too many versions are kept"),
    ]


def _calls(master: WalkMaster) -> list[tuple[bool, str]]:
    """A call is answered, held by something that will answer it, or waits for the journal."""
    assert master.state is not None
    world = master.state.shared
    held = {token for waiting in world.waiters.values() for token, _ in waiting}
    held |= {m.leave_token for m in world.members.values() if m.leave_token is not None}
    held |= {p.finish_token for p in world.pushes() if p.finish_token is not None}
    deadline_s, now_s = master.state.next_deadline_s(), master.kernel.now_s
    found = [
        (bool(master.pending) or master.waiting <= held, "a call is forgotten"),
        (deadline_s is None or math.isfinite(deadline_s), "a deadline that never comes"),
    ]
    if deadline_s is not None and master.ticked_now and master.exit is None:
        found.append((deadline_s > now_s, "a deadline that no tick ends"))
    return found


def walk_to_the_end(seed: int, events: int) -> None:
    """A walk of so many events that breaks nothing; healed, the run publishes again, and ends."""
    walk = Walk(seed)
    walk.walk(events)
    assert walk.violations == []
    walk.publishes_again()
    assert walk.violations == []
    walk.ends()
    assert walk.violations == []
    assert walk.n_events >= events
    assert walk.ended == "the run has ended: enough"
