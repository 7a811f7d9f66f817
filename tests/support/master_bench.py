"""The real master state with scripted slaves and clusters around it, all in memory and under a hand-turned clock.

A slave answers every command at once unless the test holds that kind back; the journal is durable at once unless
held. Clusters are driven call by call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest

from dips.core import messages as m
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.master.state import effects
from dips.master.state.effects import Halt, Log, Record
from dips.master.state.master import MasterMachine
from dips.master.state.shared import RunConfig
from dips.master.state.status import RunView, look

WALL_OFFSET_S = 1e6
TAPE_HEAD = {"wall_s", "monotonic_s", "role", "name", "kind", "cause"}
HELLO = m.Hello(1, 1, ("codec-f32",))
LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (4, 4), "float32", f"layers.{i}") for i in range(4)))
OWN = m.DataPlan(m.DataMode.OWN)
LEASED = m.DataPlan(m.DataMode.LEASED, b"corpus", 1000, 100)


class Unanswered(AssertionError):
    """A call got neither reply nor refusal."""


@dataclass
class BenchSlave:
    """A slave that does as it is told. What is in `snapshots` and `records` is on its disk.

    reattaches: it comes back by itself when the master ends its stream. digests: what it makes of a version, where
    that is not what it should be.
    """

    bench: Bench
    name: str
    link: int = 0
    incarnation: Incarnation | None = None
    promised: int = 0
    configure: m.Configure | None = None
    staging: dict[PushId, m.OpenStaging] = field(default_factory=dict)
    snapshots: dict[Version, m.SnapshotInfo] = field(default_factory=dict)
    records: dict[Version, bytes] = field(default_factory=dict)
    prepared: dict[Any, m.Prepare] = field(default_factory=dict)
    staged: dict[PushId, bytes] = field(default_factory=dict)
    digests: dict[Version, bytes] = field(default_factory=dict)
    reattaches: bool = True
    hello: m.Hello = HELLO
    commands: list[Any] = field(default_factory=list)
    hold: set[type] = field(default_factory=set)
    refuse: dict[str, m.Refusal] = field(default_factory=dict)
    alive: bool = False
    directory_id: bytes = b""

    def say(self, body: Any) -> None:
        caller = m.Caller(self.bench.run_id, self.bench.epoch, self.name, self.incarnation, f"{self.name}")
        self.bench.event(effects.SlaveSaid(self.link, m.SlaveMessage(caller, body)))

    def attach(self) -> None:
        self.link = self.bench.new_link()
        self.bench.by_link[self.link] = self
        self.alive = True
        self.staging.clear()
        snapshots = tuple(self.snapshots.values())
        endpoint, key = f"tcp://127.0.0.1:{5000 + self.link}", self.bench.key_of(self.name)
        self.say(m.SlaveHello(self.hello, endpoint, 1 << 30, self.promised, snapshots, key, self.directory_id))

    def die(self) -> None:
        self.alive = False
        self.bench.event(effects.SlaveLinkDown(self.link))

    def lose(self, *versions: Version) -> None:
        for version in versions or list(self.snapshots):
            self.snapshots.pop(version, None)
            self.records.pop(version, None)

    def come_back_without(self, *versions: Version) -> None:
        self.die()
        self.lose(*versions)
        self.attach()

    def say_refused(self, code: RefusalCode, retry_after_s: float) -> None:
        """It cannot load what Configure names."""
        self.say(m.ConfigureRefused(m.Refusal(code, "the file is not what it was", retry_after_s)))

    def refuse_commit(self, refusal: m.Refusal) -> None:
        commit = [c for c in self.commands if isinstance(c, m.Commit)][-1]
        self.hold.discard(m.Commit)
        self.say(m.RoundRefused(commit.round, "commit", refusal))

    def on(self, command: m.SlaveCommand) -> None:
        self.incarnation = command.incarnation
        self.commands.append(command.body)
        if type(command.body) not in self.hold:
            self.obey(command.body)

    def obey(self, body: Any) -> None:
        handler: Callable[[Any], None] | None = getattr(self, f"_{type(body).__name__.lower()}", None)
        if handler is not None:
            handler(body)

    def release(self, kind: type) -> None:
        self.hold.discard(kind)
        self.obey([c for c in self.commands if isinstance(c, kind)][-1])

    def digest(self, what: object) -> bytes:
        return f"{self.name}:{what}".encode()

    def _welcome(self, body: m.Welcome) -> None:
        self.promised = self.bench.epoch
        self.say(m.Promised(self.bench.epoch))

    def _configure(self, body: m.Configure) -> None:
        if "configure" in self.refuse:
            self.say(m.ConfigureRefused(self.refuse["configure"]))
            return
        self.configure = body
        if body.load is not None:
            found = self.snapshots.get(body.load) or self._renamed(body)
            self._hold(replace(found, committed=True, commit_hash=body.commit_hash), body.commit_record)
        self.say(m.Ready(body.load, body.load_digest))

    def _renamed(self, body: m.Configure) -> m.SnapshotInfo:
        """After a ROLLBACK its origin becomes the version that is asked for."""
        assert body.origin is not None, f"{self.name} has no {body.load}"
        assert body.load is not None
        assert body.load_round is not None
        found = self.snapshots[body.origin]
        assert (found.round, found.digest) == (body.origin_round, body.load_digest)
        return replace(found, version=body.load, round=body.load_round)

    def _hold(self, info: m.SnapshotInfo, record: bytes) -> None:
        self.snapshots[info.version], self.records[info.version] = info, record
        self.bench.contents[self.name, info.version] = info.digest

    def _sendcommitrecord(self, body: m.SendCommitRecord) -> None:
        if "record" in self.refuse:
            self.say(m.CommitRecord(body.version, body.round, b"", self.refuse["record"]))
        else:
            self.say(m.CommitRecord(body.version, body.round, self.records[body.version]))

    def _openstaging(self, body: m.OpenStaging) -> None:
        self.staging[body.push] = body

    def _closestaging(self, body: m.CloseStaging) -> None:
        self.staging.pop(body.push, None)

    def stage(self, push: PushId, digest: bytes | None = None) -> None:
        opened = self.staging[push]
        self.staged[push] = digest if digest is not None else self.digest(push)
        self.say(m.Staged(push, opened.attempt, self.staged[push]))

    def _measure(self, body: m.Measure) -> None:
        if "measure" in self.refuse:
            self.say(m.RoundRefused(body.round, "measure", self.refuse["measure"]))
            return
        assert self.configure is not None
        own = [b for b, s in enumerate(self.configure.placement.slave_of_block) if self._is_mine(s)]
        blocks = len(self.configure.placement.slave_of_block)
        names = [p.push.cluster for p in body.participants]
        gram = self.bench.gram(names)
        grams = tuple(self._block(b, gram, blocks, names) for b in own)
        self.say(m.Measured(body.round, grams, self._directions(names)))

    def _directions(self, names: Sequence[str]) -> tuple[float, ...]:
        """Every cluster's base is the current version; each slave holds an equal part."""
        ways = self.bench.ways
        if not ways:
            return ()
        still = [0.0] * len(next(iter(ways.values())))
        vectors = [*(ways[name] for name in names), *(still for _ in names)]
        pairs = ((i, j) for i in range(len(vectors)) for j in range(i, len(vectors)))
        products = (sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)) for i, j in pairs)
        return tuple(product / len(self.bench.slaves) for product in products)

    def _is_mine(self, index: int) -> bool:
        assert self.configure is not None
        return self.configure.placement.slaves[index].slave_id == self.name

    def _block(self, block: int, gram: Sequence[float], blocks: int, names: Sequence[str]) -> m.BlockGram:
        bad = tuple(self.bench.nonfinite.get(name, 0) if block == 0 else 0 for name in names)
        return m.BlockGram(block, tuple(value / blocks for value in gram), bad)

    def _prepare(self, body: m.Prepare) -> None:
        if "prepare" in self.refuse:
            self.say(m.RoundRefused(body.round, "prepare", self.refuse["prepare"]))
            return
        assert self.configure is not None
        self.prepared[body.round] = body
        digest = self.staged[body.accepted[0].push] if self.configure.empty else self.digest(body.to_version)
        digest = self.digests.get(body.to_version, digest)
        hashes = (self.configure.layout_hash, self.configure.placement.placement_hash)
        info = m.SnapshotInfo(body.to_version, body.round, *hashes, digest, False)
        self.snapshots[body.to_version] = info
        self.say(m.Prepared(body.round, digest))

    def _abortround(self, body: m.AbortRound) -> None:
        shadow = self.prepared.pop(body.round, None)
        if shadow is not None:
            self.snapshots.pop(shadow.to_version, None)

    def _commit(self, body: m.Commit) -> None:
        found = self.snapshots[body.version]
        self._hold(replace(found, committed=True, commit_hash=body.commit_hash), body.commit_record)
        assert self.configure is not None
        self.configure = replace(self.configure, empty=False)
        self.say(m.Flipped(body.round, body.version))


@dataclass
class BenchCluster:
    name: str
    join: m.JoinReply
    base: Version | None = None
    fence: int = 0
    seq: int = 0

    @property
    def push_id(self) -> PushId:
        return PushId(self.name, self.join.incarnation, self.seq)  # type: ignore[arg-type]


class Bench:
    def __init__(
        self, n_slaves: int = 2, plan: m.DataPlan = OWN, settings: m.Settings | None = None, **config: Any
    ) -> None:
        self.run_id = "test"
        self.plan = plan
        told = {name: config.pop(name) for name in [*config] if name in m.Settings.__dataclass_fields__}
        settings = replace(settings or m.Settings(), **{"async_lag_versions": 2, **told})
        self.config = RunConfig(self.run_id, n_slaves, settings, **config)
        self.now_s = 1000.0
        self.epoch = 0
        self.snapshot: str | None = None
        self.journal: list[effects.WriteJournal] = []
        self.hold_journal = False
        self.replies: dict[int, Any] = {}
        self.refusals: dict[int, m.Refusal] = {}
        self.records: list[Record] = []
        self.logs: list[Log] = []
        self.halted: Halt | None = None
        self.closed: dict[int, m.Refusal] = {}
        self.by_link: dict[int, BenchSlave] = {}
        self.contents: dict[tuple[str, Version], bytes] = {}
        self.began_again: effects.BeginAgain | None = None
        self.norms: dict[str, float] = {}
        self.nonfinite: dict[str, int] = {}
        self.ways: dict[str, Sequence[float]] = {}
        self.silent: set[str] = set()
        self.clusters: dict[str, BenchCluster] = {}
        self.slaves = [BenchSlave(self, f"s{i}") for i in range(n_slaves)]
        self._token = 0
        self._link = 0
        self._queue: list[effects.Event] = []
        self.start_master()

    def start_master(self) -> None:
        """A (new) life of the master, from its newest durable snapshot."""
        self.epoch += 1
        self.by_link.clear()
        self.state = MasterMachine(self.config, self.epoch, self.snapshot, WALL_OFFSET_S)
        self._carry_out(self.state.start(self.now_s))

    def event(self, event: effects.Event) -> None:
        self._queue.append(event)
        if len(self._queue) > 1:
            return  # taken up, in order, by the outermost call
        while self._queue:
            self._carry_out(self.state.handle(self._queue[0], self.now_s))
            self._queue.pop(0)

    def _carry_out(self, wanted: Sequence[effects.Effect]) -> None:
        for effect in wanted:
            match effect:
                case effects.Reply(token, body):
                    self.replies[token] = body
                case effects.Refuse(token, refusal):
                    self.refusals[token] = refusal
                case effects.ToSlave(link, command):
                    slave = self.by_link.get(link)
                    if slave is not None and slave.alive and slave.link == link:
                        slave.on(command)
                case effects.CloseLink(link, refusal):
                    self.closed[link] = refusal
                    self._hung_up(link, refusal)
                case effects.WriteJournal():
                    self.journal.append(effect)
                    if not self.hold_journal:
                        self.write_journal(effect)
                case effects.Record():
                    assert not TAPE_HEAD & set(effect.fields), "a field would overwrite the head of the tape's line"
                    self.records.append(effect)
                case effects.Log():
                    self.logs.append(effect)
                case effects.Halt():
                    self.halted = effect
                case effects.BeginAgain():
                    self.began_again = effect

    def _hung_up(self, link: int, refusal: m.Refusal) -> None:
        slave = self.by_link.get(link)
        comes_back = refusal.code is RefusalCode.FENCED
        if comes_back and slave is not None and slave.link == link and slave.alive and slave.reattaches:
            slave.attach()

    def write_journal(self, entry: effects.WriteJournal) -> None:
        self.snapshot = entry.snapshot_json
        self.event(effects.JournalWritten(entry.entry_id))

    def new_link(self) -> int:
        self._link += 1
        return self._link

    def advance(self, seconds: float) -> None:
        step_s = self.config.settings.heartbeat_s / 4
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + step_s)
            for slave in self.slaves:
                if slave.alive:
                    slave.say(m.SlaveBeat())
            for name in list(self.clusters):
                if name not in self.silent:
                    self.beat(name)
            self.event(effects.Tick())

    def jump(self, seconds: float) -> None:
        self.now_s += seconds
        self.event(effects.Tick())

    # ---- calls ----

    def call(self, request: Any) -> int:
        self._token += 1
        self.event(effects.ClusterCall(self._token, request))
        return self._token

    def ask(self, request: Any) -> Any:
        return self.result(self.call(request))

    def result(self, token: int) -> Any:
        if token in self.refusals:
            refusal = self.refusals[token]
            raise Refused(refusal.code, refusal.sentence, refusal.retry_after_s)
        if token not in self.replies:
            raise Unanswered(f"call {token} is held")
        return self.replies[token]

    def is_open(self, token: int) -> bool:
        """The call has no answer yet."""
        return token not in self.refusals and token not in self.replies

    def operate(self, action: Any) -> Any:
        self._token += 1
        self.event(effects.OperatorCall(self._token, action))
        return self.result(self._token)

    def status(self) -> m.StatusReply:
        reply = self.operate(m.StatusRequest(""))
        assert isinstance(reply, m.StatusReply)
        return reply

    def look(self, late_s: float = 0.0) -> RunView:
        """late_s: after the last event."""
        return look(self.state.shared, self.state.shared.now_s + late_s)

    def caller(self, name: str) -> m.Caller:
        return m.Caller(self.run_id, self.epoch, name, self.clusters[name].join.incarnation, f"c-{name}")

    def key_of(self, name: str) -> bytes:
        """The data key of each process, where the run uses them."""
        return name.encode().ljust(32, b".") if self.config.encrypted else b""

    def attach_all(self) -> Self:
        for slave in self.slaves:
            slave.attach()
        return self

    def join(
        self, name: str, *, previous: Incarnation | None = None, held: tuple[m.DataRange, ...] = (), **changes: Any
    ) -> m.JoinReply:
        fields: dict[str, Any] = {
            "caller": m.Caller(self.run_id, 0, name, previous, f"join-{name}"),
            "hello": HELLO,
            "layout": LAYOUT,
            "layout_hash": LAYOUT.layout_hash,
            "data_plan": self.plan,
            "held_ranges": held,
            "curve_key": self.key_of(name),
        }
        reply = self.ask(m.JoinRequest(**(fields | changes)))
        assert isinstance(reply, m.JoinReply)
        self.clusters[name] = BenchCluster(name, reply, fence=reply.fence)
        return reply

    def beat(self, name: str, **fields: Any) -> Any:
        told = {"base": self.clusters[name].base} | fields
        return self.result(self.call(m.HeartbeatRequest(self.caller(name), **told))) if self.alive(name) else None

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(entry.record_json) for entry in self.journal if entry.kind == kind]

    def recorded(self, kind: str) -> list[dict[str, Any]]:
        return [dict(record.fields) for record in self.records if record.kind == kind]

    @property
    def wall_s(self) -> float:
        return self.now_s + WALL_OFFSET_S

    def alive(self, name: str) -> bool:
        member = self.state.shared.members.get(name)
        return member is not None and member.incarnation == self.clusters[name].join.incarnation

    def lease(self, name: str, tokens: int) -> tuple[m.DataRange, ...]:
        ranges: tuple[m.DataRange, ...] = self.ask(m.LeaseDataRequest(self.caller(name), tokens)).ranges
        return ranges

    def begin_push(self, name: str, tokens: int = 100, ranges: tuple[m.DataRange, ...] = (), **changes: Any) -> Any:
        """The answer to BeginPush for the cluster's next seq."""
        cluster = self.clusters[name]
        cluster.seq += 1
        fields = {"base": cluster.base, "fence": cluster.fence, "ranges": ranges, "tokens": tokens, "steps": 16}
        request = m.BeginPushRequest(self.caller(name), cluster.seq, **(fields | changes))
        return self.ask(request).answer

    def ticket(self, name: str, *given: Any, **changes: Any) -> m.Ticket:
        answer = self.begin_push(name, *given, **changes)
        assert isinstance(answer, m.Ticket)
        return answer

    def stage(self, name: str) -> None:
        for slave in self.slaves:
            if slave.alive:
                slave.stage(self.clusters[name].push_id)

    def finish_push(self, name: str, attempt: int = 1, digests: dict[str, bytes] | None = None) -> int:
        push = self.clusters[name].push_id
        sent = digests or {slave.name: slave.digest(push) for slave in self.slaves}
        request = m.FinishPushRequest(self.caller(name), self.clusters[name].seq, attempt, tuple(sorted(sent.items())))
        return self.call(request)

    def push(self, name: str, tokens: int = 100, ranges: tuple[m.DataRange, ...] = (), **changes: Any) -> PushId:
        """Ticket, transfer and admission."""
        self.begin_push(name, tokens, ranges, **changes)
        self.stage(name)
        answer = self.result(self.finish_push(name)).answer
        assert isinstance(answer, m.Admitted), answer
        return self.clusters[name].push_id

    def await_verdict(self, name: str, push: PushId | None = None, wait_s: float = 30.0) -> int:
        return self.call(m.AwaitVerdictRequest(self.caller(name), push or self.clusters[name].push_id, wait_s))

    def verdict(self, name: str, push: PushId | None = None) -> m.Verdict:
        answer = self.result(self.await_verdict(name, push)).answer
        assert isinstance(answer, m.Verdict), answer
        return answer

    def pull(self, name: str) -> m.PullGrant:
        grant = self.ask(m.BeginPullRequest(self.caller(name))).answer
        assert isinstance(grant, m.PullGrant), grant
        self.ask(m.FinishPullRequest(self.caller(name), grant.pin_id))
        self.clusters[name].base, self.clusters[name].fence = grant.version, grant.fence
        return grant

    def pushes(self, *names: str) -> None:
        for name in names:
            self.push(name)

    def pulls(self, *names: str) -> None:
        for name in names:
            self.pull(name)

    def rounds(self, n: int, *names: str, wait_s: float = 0.0) -> None:
        """So many rounds of all of them. wait_s: until a round closes without others."""
        for _ in range(n):
            self.pushes(*names)
            self.advance(wait_s)
            self.pulls(*names)

    def back(self, name: str, **changes: Any) -> None:
        """The cluster joins again, and pulls."""
        self.join(name, **changes)
        self.pull(name)

    def leave(self, name: str) -> int:
        return self.call(m.LeaveRequest(self.caller(name), "done"))

    def seed(self, name: str) -> None:
        self.begin_push(name, 0, base=None)
        self.stage(name)
        self.finish_push(name)

    def running(self, *names: str) -> Bench:
        """Slaves attached, clusters joined, version 0 published and pulled by all."""
        self.attach_all()
        for name in names:
            self.join(name)
        self.seed(names[0])
        self.pulls(*names)
        return self

    def donate(self, name: str, version: Version, digests: dict[str, bytes] | None = None) -> PushId:
        self.begin_push(name, 0, base=None, donates=version, steps=0)
        push = self.clusters[name].push_id
        copy = {slave.name: self.contents[slave.name, version] for slave in self.slaves} | (digests or {})
        for slave in self.slaves:
            slave.stage(push, copy[slave.name])
        self.finish_push(name, digests=copy)
        return push

    def all_hold(self, *kinds: type) -> None:
        """Every slave keeps commands of these kinds back, and no others."""
        for slave in self.slaves:
            slave.hold = set(kinds)

    def begin_anew(self, snapshot: str | None = None) -> None:
        """A new life of the master, from its newest or an older snapshot, to which no slave has come yet."""
        for slave in self.slaves:
            slave.alive = False
        self.snapshot = self.snapshot if snapshot is None else snapshot
        self.start_master()

    def restart(self, snapshot: str | None = None, look: bool = True) -> Bench:
        """The same, and slaves attach again, clusters may join. look: a rebuild has looked for slaves as long as it
        does."""
        self.begin_anew(snapshot)
        self.attach_all()
        if self.config.rebuild and look:
            self.advance(self.config.evict_after_s)
        return self

    def rebuild(self) -> None:
        """A master without a journal, which takes the run from the slaves."""
        self.config = replace(self.config, rebuild=True)
        self.restart("")

    def gram(self, names: Sequence[str]) -> list[float]:
        """Upper triangle by rows: norms as set (0.5 unless set), cosine 0.9 between any two."""
        norms = [math.nan if self.nonfinite.get(name) else self.norms.get(name, 0.5) for name in names]
        pairs = ((i, j) for i in range(len(names)) for j in range(i, len(names)))
        return [norms[i] * norms[j] * (1.0 if i == j else 0.9) for i, j in pairs]


def refused_with(code: RefusalCode, words: str = "") -> Any:
    return pytest.raises(Refused, check=lambda error: error.code is code and words in error.sentence)
