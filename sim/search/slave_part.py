"""A slave in a search: the real SlaveState, and in place of bytes what each version and
each push is made of.

The disk keeps what a real one keeps over a kill -9: the promise, and a file for each snapshot. A job is done within
the step that began it, so a kill falls before or after it, never into the middle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.messages import (
    BlockGram,
    CommitRecord,
    Configure,
    Prepare,
    Refusal,
    SlaveCommand,
    SlaveMessage,
    SnapshotInfo,
)
from dips.sim.search.arena import Out
from dips.sim.search.bounds import RUN, T0_S
from dips.sim.search.master_part import keep_no_story
from dips.slave.state import effects, events
from dips.slave.state.slave import SlaveState

Content = tuple[str, ...]
"""Which pieces of work a model is made of, in the order in which they were merged."""

NORM = 0.5
SNAPSHOTS_KEPT = 3


@dataclass(frozen=True)
class File:
    """A snapshot on disk. record: of the COMMIT, once there was one."""

    info: SnapshotInfo
    content: Content
    record: bytes = b""


@dataclass(frozen=True)
class Landed:
    """One slot of the data port: the push that it is open for, and its bytes once they are complete."""

    push: PushId
    attempt: int
    opening: int
    payload: Content | None = None


def digest_of(slave: str, content: Content) -> bytes:
    """The same content has the same digest, whichever round made it."""
    return hashlib.sha256(f"{slave}:{','.join(content)}".encode()).digest()[:8]


def is_bad(content: Content) -> bool:
    """Whether some of it is not finite."""
    return any(work.endswith("!") for work in content)


class SlavePart:
    """One life after another of a slave. link: its stream to the master, if it has one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.promised = 0
        self.disk: dict[tuple[Version, RoundId], File] = {}
        self.link: int | None = None
        self._new_life()

    def _new_life(self) -> None:
        self.memory: dict[Version, tuple[RoundId, Content]] = {}
        self.shadow: File | None = None
        self.slots: dict[int, Landed] = {}
        self.pins: tuple[Version, ...] = ()
        self.blocks: tuple[int, ...] = ()
        self.stopped = False
        self.state = SlaveState(RUN, self.name, f"tcp://{self.name}:1", 1 << 30, 1 << 20, self.promised, self._infos())
        keep_no_story(self.state.story)

    # ---- what can happen ----

    def dial(self, link: int) -> list[Out]:
        self.link = link
        return self._handle(events.Linked())

    def unlinked(self, fenced: bool) -> list[Out]:
        self.link = None
        outs = self._handle(events.Fenced()) if fenced else []
        return [*outs, *self._handle(events.Unlinked("it broke"))]

    def hear(self, command: SlaveCommand) -> list[Out]:
        return self._handle(events.Commanded(command))

    def land(self, push: PushId, attempt: int, payload: Content) -> list[Out]:
        """The last missing chunk of a push arrives."""
        slot, open_ = next((s, o) for s, o in self.slots.items() if o.push == push)
        self.slots[slot] = replace(open_, payload=payload)
        return self._handle(events.PushStaged(push, attempt, open_.opening, digest_of(self.name, payload)))

    def kill(self) -> list[Out]:
        """kill -9, and another process over the same directory."""
        self.link = None
        self._new_life()
        return []

    def lose_version(self) -> list[Out]:
        """The disk comes back as it was before the newest committed version."""
        newest = max(file.info.version for file in self.disk.values() if file.info.committed)
        self.disk = {key: file for key, file in self.disk.items() if key[0] < newest}
        return self.kill()

    @property
    def n_committed(self) -> int:
        return sum(file.info.committed for file in self.disk.values())

    def empty_disk(self) -> list[Out]:
        self.disk = {}
        return self.kill()

    # ---- what a search reads ----

    def wants(self, push: PushId, attempt: int) -> bool:
        """Whether the data port would take chunks of this attempt that are not here yet."""
        return any(o.push == push and o.attempt == attempt and o.payload is None for o in self.slots.values())

    def has(self, push: PushId) -> bool:
        return any(o.push == push and o.payload is not None for o in self.slots.values())

    def knows(self, push: PushId, attempt: int) -> bool:
        return any(o.push == push and o.attempt == attempt for o in self.slots.values())

    def readable(self, version: Version) -> tuple[RoundId, Content] | None:
        return self.memory.get(version)

    # ---- effects ----

    def _handle(self, event: events.Event) -> list[Out]:
        outs: list[Out] = []
        for effect in self.state.handle(event, T0_S):
            outs += self._carry_out(effect)
        return outs

    def _carry_out(self, effect: effects.Effect) -> list[Out]:
        match effect:
            case effects.SendUp(body):
                return [("up", self.link, SlaveMessage(self.state.caller(), body))] if self.link is not None else []
            case effects.Record(kind, cause, fields):
                return [("fact", kind, cause, dict(fields))]
            case effects.CloseLink():
                return [("hang up", self.link)]
            case effects.SavePromise(epoch):
                self.promised = max(self.promised, epoch)
                return self._handle(events.PromiseSaved(epoch))
            case effects.OpenSlot(push, attempt, slot, opening):
                return self._open(push, attempt, slot, opening)
            case effects.CloseSlot(push):
                self.slots = {slot: open_ for slot, open_ in self.slots.items() if open_.push != push}
            case effects.CloseAllSlots():
                self.slots = {}
            case effects.SetPins(versions):
                self.pins = versions
            case effects.DropShadow(shadow):
                self.shadow = None
                self.disk = {key: file for key, file in self.disk.items() if file.info != shadow}
            case effects.Stop() | effects.GiveUp():
                self.stopped = True
                return [("hang up", self.link)]
            case effects.Log() | effects.Serve():
                pass
            case _:
                return self._work(effect)
        return []

    def _work(self, effect: effects.Effect) -> list[Out]:
        match effect:
            case effects.RunLoad(job, configure, _, source):
                return self._load(job, configure, source)
            case effects.RunMeasure(job, _, slots):
                return self._handle(events.MeasureDone(job, self._measure(slots)))
            case effects.RunPrepare(job, prepare, slots, durable):
                return self._prepare(job, prepare, slots, durable)
            case effects.RunCommit(job, shadow, commit_hash, record, durable):
                info = self._commit(shadow, commit_hash, record, durable)
                return self._handle(events.CommitDone(job, info, self._infos()))
            case effects.ReadRecord(asked_by, version, round_id):
                return self._read_record(asked_by, version, round_id)
            case _:
                raise TypeError(f"the search carries out no {type(effect).__name__}")

    def _open(self, push: PushId, attempt: int, slot: int, opening: int) -> list[Out]:
        known = self.slots.get(slot)
        if known is None or (known.push, known.opening) != (push, opening):
            self.slots = {s: o for s, o in self.slots.items() if o.push != push and s != slot}
            self.slots[slot] = Landed(push, attempt, opening)
            return []
        self.slots[slot] = replace(known, attempt=attempt)
        return [] if known.payload is None else self.land(push, attempt, known.payload)

    def _infos(self) -> tuple[SnapshotInfo, ...]:
        return tuple(file.info for _, file in sorted(self.disk.items(), key=lambda item: item[0], reverse=True))

    def _load(self, job: int, configure: Configure, source: SnapshotInfo | None) -> list[Out]:
        self.memory, self.shadow, self.slots = {}, None, {}
        placement = configure.placement
        own = next(i for i, address in enumerate(placement.slaves) if address.slave_id == self.name)
        self.blocks = tuple(block for block, slave in enumerate(placement.slave_of_block) if slave == own)
        current = None
        if source is not None:
            file = self.disk[source.version, source.round]
            if digest_of(self.name, file.content) != configure.load_digest:
                wrong = Refusal(RefusalCode.DIGEST, "the snapshot is not what was committed")
                return self._handle(events.JobFailed(job, wrong))
            source = self._named(source, configure)
            current = self._commit(source, configure.commit_hash, configure.commit_record)
        return self._handle(events.LoadDone(job, current, self._infos()))

    def _named(self, source: SnapshotInfo, configure: Configure) -> SnapshotInfo:
        """After a rollback the origin gets a new name, and what came after it leaves."""
        assert configure.load is not None, "something is loaded"
        assert configure.load_round is not None, "a version has a round"
        if (source.version, source.round) == (configure.load, configure.load_round):
            return source
        file = self.disk.pop((source.version, source.round))
        named = replace(source, version=configure.load, round=configure.load_round)
        self.disk = {key: other for key, other in self.disk.items() if key[0] < source.version}
        self.disk[named.version, named.round] = replace(file, info=named)
        return named

    def _read_record(self, asked_by: Incarnation | None, version: Version, round_id: RoundId) -> list[Out]:
        file = self.disk.get((version, round_id))
        if file is None or not file.record:
            answer = CommitRecord(version, round_id, b"", Refusal(RefusalCode.VERSION_GONE, "it is not here"))
        else:
            answer = CommitRecord(version, round_id, file.record)
        return self._handle(events.RecordRead(asked_by, answer))

    def _measure(self, slots: tuple[int, ...]) -> tuple[BlockGram, ...]:
        payloads = [self.slots[slot].payload or () for slot in slots]
        pairs = [(i, j) for i in range(len(slots)) for j in range(i, len(slots))]
        gram = tuple(NORM * NORM * (1.0 if i == j else 0.9) for i, j in pairs)
        bad = tuple(4 if is_bad(payload) else 0 for payload in payloads)
        return tuple(BlockGram(block, gram, bad) for block in self.blocks)

    def _prepare(self, job: int, prepare: Prepare, slots: tuple[int, ...], durable: bool) -> list[Out]:
        base: Content = ()
        if prepare.from_version is not None:
            base = self.memory[prepare.from_version][1]
        content = (*base, *(work for slot in slots for work in self.slots[slot].payload or ()))
        made = self.state.shard.made
        assert made is not None
        digest = digest_of(self.name, content)
        info = SnapshotInfo(prepare.to_version, prepare.round, made.layout_hash, made.placement_hash, digest, False)
        self.shadow = File(info, content)
        self.disk = {key: file for key, file in self.disk.items() if file.info.committed}
        if durable:
            self.disk[info.version, info.round] = self.shadow
        return self._handle(events.PrepareDone(job, info, self._infos()))

    def _commit(self, shadow: SnapshotInfo, commit_hash: bytes, record: bytes, durable: bool = True) -> SnapshotInfo:
        """The manifest becomes durable, and memory flips."""
        info = replace(shadow, committed=True, commit_hash=commit_hash)
        file = self.disk.get((shadow.version, shadow.round)) or self.shadow
        assert file is not None, "a shadow stands on disk or in memory"
        if durable:
            self.disk[info.version, info.round] = File(info, file.content, record)
        newest = sorted({file.info.version for file in self.disk.values()}, reverse=True)[:SNAPSHOTS_KEPT]
        self.disk = {key: file for key, file in self.disk.items() if key[0] in newest}
        self.memory[info.version] = (info.round, file.content)
        kept = {*sorted(self.memory, reverse=True)[:2], *self.pins}
        self.memory = {version: held for version, held in self.memory.items() if version in kept}
        self.shadow = None
        return info


def canonical(part: SlavePart) -> None:
    """Numbers that are spent begin anew."""
    shard = part.state.shard
    if shard.job is None:
        shard._jobs = part.state._mute_job = 0
    if not len(part.state.slots):
        part.state.slots._openings = 0
