"""What holds after every step of a random walk, whatever happened: from the journal, the disks and what was told."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dips.core.ids import Incarnation, PushId, Version
from dips.core.messages import HeartbeatReply, JoinReply, PullGrant, Verdict, VerdictKind
from dips.master.state.leases import TokenState
from dips.master.state.pulls import MAX_READERS
from dips.master.state.tables import PushPhase, RoundPhase

if TYPE_CHECKING:
    from support.walk import Walk

Token = tuple[int, int]


@dataclass(frozen=True)
class State:
    """What a version is made of: the pushes merged, and every token decided, up to its record."""

    tokens: int = 0
    applied: frozenset[PushId] = frozenset()
    taken: dict[TokenState, frozenset[Token]] = field(
        default_factory=lambda: {TokenState.APPLIED: frozenset(), TokenState.EXCLUDED: frozenset()}
    )


@dataclass
class Sums:
    """What a journal says, entry after entry. now: what the ledger must say; states: by version."""

    kinds: dict[PushId, VerdictKind] = field(default_factory=dict)
    versions: dict[PushId, Version | None] = field(default_factory=dict)
    donations: dict[PushId, Version] = field(default_factory=dict)
    records: list[Version] = field(default_factory=list)
    fences: dict[str, int] = field(default_factory=dict)
    joined: set[str] = field(default_factory=set)
    now: State = field(default_factory=State)
    states: dict[Version, State] = field(default_factory=dict)

    def add(self, record: dict[str, Any], s_max: int, chunk_tokens: int) -> None:
        """One JOIN, COMMIT, VOID or ROLLBACK."""
        if record["kind"] == "JOIN":
            self.joined.add(record["cluster"])
        elif record["kind"] == "ROLLBACK":
            self._go_back(record)
        else:
            self._decide(record, s_max, chunk_tokens)

    def _decide(self, record: dict[str, Any], s_max: int, chunk_tokens: int) -> None:
        void = record["kind"] == "VOID"
        current = self.records[-1] if self.records else None
        version = None if void else Version(*record["version"])
        if version is not None:
            assert current is None or version == current.next(), "versions follow each other"
            assert record["from_version"] == (None if current is None else [current.timeline, current.v])
            self.records.append(version)
        for item in record["participants"]:
            self._participant(item, version, current, s_max, chunk_tokens)
        if version is not None:
            self.states[version] = self.now
            assert record["tokens"] == self.now.tokens

    def _go_back(self, record: dict[str, Any]) -> None:
        version, origin = Version(*record["version"]), Version(*record["origin"])
        assert version.v == origin.v
        assert all(version.timeline > old.timeline for old in self.records), "a timeline of its own"
        assert record["lost_tokens"] == self.now.tokens - self.states[origin].tokens
        taken_back = self.now.applied - self.states[origin].applied
        assert {_push_id(item) for item in record["rolled_back"]} == taken_back
        for push in taken_back:
            self.kinds[push], self.versions[push] = VerdictKind.ROLLED_BACK, version
        for item in record["participants"]:
            self.donations[_push_id(item["push"])] = version
            assert (item["tokens"], item["ranges"], item["base"]) == (0, [], None)
        self.now = self.states[version] = self.states[origin]
        self.records.append(version)
        self.fences = {name: self.fences.get(name, 0) + 1 for name in self.joined}
        assert record["tokens"] == self.now.tokens

    def _participant(
        self, item: dict[str, Any], version: Version | None, current: Version | None, s_max: int, chunk_tokens: int
    ) -> None:
        push, cluster = _push_id(item["push"]), item["push"][0]
        kind = VerdictKind[item["verdict"]]
        assert push not in self.kinds, f"{push} is decided twice"
        assert item["base"] is not None or version is None or version.v == 0, "a seed over a version"
        if item["base"] is not None:
            assert current is not None
            assert current.timeline == item["base"][0], "trained on this very timeline"
            assert 0 <= current.v - item["base"][1] <= s_max, "staleness is bounded"
        assert item["base"] is None or item["fence"] == self.fences.get(cluster, 0), "the fence of its base"
        self.kinds[push], self.versions[push] = kind, version
        self.fences[cluster] = self.fences.get(cluster, 0) + 1
        self._count(push, kind, item, chunk_tokens)

    def _count(self, push: PushId, kind: VerdictKind, item: dict[str, Any], chunk_tokens: int) -> None:
        state = TokenState.APPLIED if kind is VerdictKind.APPLIED else TokenState.EXCLUDED
        tokens: set[Token] = set()
        for _, pass_index, chunk, begin, end in item["ranges"]:
            tokens |= {(pass_index, chunk * chunk_tokens + at) for at in range(begin, end)}
        known = self.now.taken[TokenState.APPLIED] | self.now.taken[TokenState.EXCLUDED]
        assert not tokens & known, "counted twice in the history that is kept"
        taken = {**self.now.taken, state: self.now.taken[state] | tokens}
        applied = self.now.applied | {push} if kind is VerdictKind.APPLIED else self.now.applied
        more = item["tokens"] if kind is VerdictKind.APPLIED else 0
        self.now = State(self.now.tokens + more, applied, taken)


def _push_id(item: list[Any]) -> PushId:
    cluster, epoch, n, seq = item
    return PushId(cluster, Incarnation(epoch, n), seq)


class Checks:
    """verdicts: every one that anybody was ever told. newest: the newest version that anybody was told of."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.verdicts: dict[PushId, Verdict] = {}
        self.hashes: dict[Version, bytes] = {}
        self.newest: Version | None = None
        self._sums = Sums()
        self._seen = 0

    def forget(self, keep: int) -> None:
        """The master restarted with so many entries."""
        self._sums = self._sums_of(keep)
        self._seen = keep

    def _sums_of(self, n: int) -> Sums:
        sums = Sums()
        for entry in self.walk.bench.journal[:n]:
            self._add(sums, entry)
        return sums

    def _add(self, sums: Sums, entry: Any) -> None:
        if entry.kind in ("JOIN", "COMMIT", "VOID", "ROLLBACK"):
            settings = self.walk.bench.config.settings
            sums.add(json.loads(entry.record_json), settings.max_staleness_versions, self.walk.bench.plan.chunk_tokens)

    # ---- what was told ----

    def told(self, body: Any) -> None:
        match body:
            case Verdict():
                self._verdict(body)
            case JoinReply():
                if isinstance(body.last_push, Verdict):
                    self._verdict(body.last_push)
                self._version(body.published)
            case HeartbeatReply():
                self._version(body.published)
            case PullGrant():
                self._version(body.version)
                durable = self._sums_of(self.walk.durable)
                assert body.version in durable.records

    def _verdict(self, verdict: Verdict) -> None:
        before = self.verdicts.get(verdict.push, verdict)
        taken_back = (before.kind, verdict.kind) == (VerdictKind.APPLIED, VerdictKind.ROLLED_BACK)
        same = (before.kind, before.version) == (verdict.kind, verdict.version)
        assert same or taken_back, "a push has one verdict"
        self.verdicts[verdict.push] = verdict
        durable = self._sums_of(self.walk.durable)
        if verdict.push in self.walk.bench.donations:
            assert (verdict.kind is VerdictKind.APPLIED) == (verdict.push in durable.donations)
        elif verdict.kind is not VerdictKind.ABORTED:
            assert durable.kinds.get(verdict.push) is verdict.kind, "told before it is durable"
            assert durable.versions[verdict.push] in (None, verdict.version)

    def _version(self, version: Version | None) -> None:
        """Told in the order of time: answers leave in the order of their events."""
        if version is None:
            return
        assert self.newest is None or version >= self.newest, "a version is taken back"
        self.newest = version
        for slave in self.walk.slaves:
            held = version in slave.snapshots and slave.snapshots[version].committed
            assert held or version in slave.lost, "published, but not on every disk"

    # ---- what holds ----

    def all(self) -> None:
        journal = self.walk.bench.journal
        for entry in journal[self._seen :]:
            self._add(self._sums, entry)
        self._seen = len(journal)
        self._ledger()
        self._aborted()
        self._disks()
        self._machines()
        self._calls()

    def _ledger(self) -> None:
        ledger, sums = self.walk.bench.state.world.ledger, self._sums
        assert ledger.tokens == sums.now.tokens
        assert {name: e.fence for name, e in ledger.clusters.items() if e.fence} == sums.fences
        assert ledger.version == (sums.records[-1] if sums.records else None)
        if ledger.leases is not None:
            totals = ledger.leases.totals()
            assert sum(totals.values()) % self.walk.bench.plan.total_tokens == 0
            for state, tokens in sums.now.taken.items():
                assert totals[state] == len(tokens)

    def _aborted(self) -> None:
        for push, verdict in self.verdicts.items():
            assert verdict.kind is not VerdictKind.ABORTED or push not in self._sums.kinds, "told ABORTED, then counted"

    def _disks(self) -> None:
        """A version's content is the same for ever, and what is merged is what the journal says."""
        for slave in self.walk.slaves:
            for version, info in slave.snapshots.items():
                if info.committed:
                    assert self.hashes.setdefault(version, info.commit_hash) == info.commit_hash, "a fork"
                    assert frozenset(slave.content[version]) == self._sums.states[version].applied

    def _machines(self) -> None:
        world = self.walk.bench.state.world
        state = world.round
        idle = state.phase.now in (RoundPhase.IDLE, RoundPhase.WINDOW)
        assert bool(state.participants) != idle
        assert all(push.sealed for push in state.participants)
        slots = {m.cluster: m.slot for m in world.members.values()} | {p.cluster: p.slot for p in state.participants}
        assert len(set(slots.values())) == len(slots), "two clusters share a slot"
        for push in world.pushes():
            assert push.phase.now is not PushPhase.DECIDED
            assert push.sealed == (push in state.participants)
            assert push.sealed or set(push.digest_of_slave) <= {s.id for s in world.ready_slaves()}
        assert state.phase.now is RoundPhase.IDLE or state.id is not None
        assert len(world.pins) <= len(world.members) + MAX_READERS
        assert len(world.kept) <= 2 + world.config.pinned_versions

    def _calls(self) -> None:
        """A call is answered, held by something that will answer it, or waits for the journal."""
        bench, world = self.walk.bench, self.walk.bench.state.world
        held = {token for waiting in world.waiters.values() for token, _ in waiting}
        held |= {m.leave_token for m in world.members.values() if m.leave_token is not None}
        held |= {p.finish_token for p in world.pushes() if p.finish_token is not None}
        if not self.walk.pending():
            assert set(self.walk.open) <= held, "a call is forgotten"
        deadline_s = bench.state.next_deadline_s()
        assert deadline_s is None or math.isfinite(deadline_s)
        if deadline_s is not None and self.walk.ticked_at_s == bench.now_s and bench.halted is None:
            assert deadline_s > bench.now_s, "a deadline that no tick ends"
