"""A scripted slave for random walks: commands and answers wait in queues until they are let through, and it refuses
what a real slave refuses. What it committed is on its disk; everything else dies with its stream.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from support.master_bench import HELLO, Bench, BenchSlave

from dips.core.errors import RefusalCode
from dips.core.ids import PushId, Version
from dips.core.messages import (
    AbortRound,
    Caller,
    Commit,
    Configure,
    Flipped,
    Measure,
    OpenStaging,
    Prepare,
    Prepared,
    Ready,
    Refusal,
    RoundRefused,
    SlaveCommand,
    SlaveHello,
    SlaveMessage,
    SnapshotInfo,
    Staged,
    StagedPush,
    Welcome,
)
from dips.master.state.events import SlaveLinkDown, SlaveSaid

Content = tuple[PushId, ...]

SNAPSHOTS_KEPT = 3


class WalkBench(Bench):
    """merged: what each version that was ever committed is made of. donations: which version a push is a copy of, and
    whether the copy is intact."""

    def __init__(self, *args: Any, **config: Any) -> None:
        self.merged: dict[Version, Content] = {}
        self.donations: dict[PushId, tuple[Version, bool]] = {}
        super().__init__(*args, **config)


class WalkSlave(BenchSlave):
    """content: what each version that it ever held is made of; committed ones must never be written again.

    archive: a copy of every snapshot that was ever committed here, for an operator who restores it. lost: versions that
    its disk lost.
    """

    bench: WalkBench

    def __init__(self, bench: WalkBench, name: str) -> None:
        super().__init__(bench, name)
        self.reattaches = False
        self.inbox: list[SlaveCommand] = []
        self.outbox: list[SlaveSaid] = []
        self.said: list[SlaveSaid] = []
        self.content: dict[Version, Content] = {}
        self.complete: dict[PushId, int] = {}
        self.current: Version | None = None
        self.archive: dict[Version, tuple[SnapshotInfo, bytes]] = {}
        self.lost: set[Version] = set()

    # ---- the disk ----

    def lose_disk(self, keep: int) -> None:
        """Only the oldest `keep` of its snapshots are there when it comes back."""
        for version in sorted(self.snapshots)[keep:]:
            self.lost.add(version)
            self.lose(version)

    def restore(self) -> None:
        """An operator brings every snapshot back that was ever committed here."""
        for version, (info, record) in self.archive.items():
            self.snapshots[version], self.records[version] = info, record
        self.lost.clear()

    def _hold(self, info: SnapshotInfo, record: bytes) -> None:
        self.snapshots[info.version], self.records[info.version] = info, record
        self.archive[info.version] = (info, record)
        self.lost.discard(info.version)
        committed = sorted(version for version, held in self.snapshots.items() if held.committed)
        for version in committed[:-SNAPSHOTS_KEPT]:
            self.lose(version)

    def digest_of(self, content: Content) -> bytes:
        return hashlib.sha256(f"{self.name}{content}".encode()).digest()

    # ---- the stream ----

    def attach(self) -> None:
        if self.alive:
            self.die()
        self.link = self.bench.new_link()
        self.bench.by_link[self.link] = self
        self.alive, self.incarnation = True, None
        self.inbox, self.outbox = [], []
        self.staging.clear()
        self.complete.clear()
        snapshots = tuple(self.snapshots.values())
        self.say(SlaveHello(HELLO, f"tcp://127.0.0.1:{5000 + self.link}", 1 << 30, self.promised, snapshots))

    def die(self) -> None:
        self.alive = False
        self.bench.event(SlaveLinkDown(self.link))

    def say(self, body: Any) -> None:
        caller = Caller(self.bench.run_id, self.bench.epoch, self.name, self.incarnation, self.name)
        self.outbox.append(SlaveSaid(self.link, SlaveMessage(caller, body)))

    def on(self, command: SlaveCommand) -> None:
        self.inbox.append(command)

    def hear(self) -> None:
        """Obey the oldest command."""
        command = self.inbox.pop(0)
        self.incarnation = command.incarnation
        self.obey(command.body)

    def speak(self) -> None:
        """Let the oldest answer through."""
        message = self.outbox.pop(0)
        self.said = [*self.said[-15:], message]
        self.bench.event(message)

    def settle(self) -> bool:
        """Let everything through; whether there was anything."""
        busy = False
        while self.alive and (self.inbox or self.outbox):
            busy = True
            if self.inbox:
                self.hear()
            else:
                self.speak()
        return busy

    def land(self, push: PushId) -> None:
        """All chunks of the push have arrived here, if it is expected."""
        opened = self.staging.get(push)
        if self.alive and opened is not None:
            self.complete[push] = opened.attempt
            self.say(Staged(push, opened.attempt, self.digest_of_push(push)))

    def digest_of_push(self, push: PushId) -> bytes:
        """Of a donation: that of the copy, which is the version's own unless the donor's memory is not what it was."""
        copied = self.bench.donations.get(push)
        if copied is None:
            return self.digest(push)
        version, intact = copied
        return self.digest_of(self.bench.merged[version]) if intact else b"another copy"

    # ---- what it does ----

    def _welcome(self, body: Welcome) -> None:
        self.promised = self.bench.epoch
        super()._welcome(body)

    def _openstaging(self, body: OpenStaging) -> None:
        for push in [p for p, opened in self.staging.items() if opened.slot == body.slot and p != body.push]:
            del self.staging[push]
            self.complete.pop(push, None)
        self.staging[body.push] = body
        if body.push in self.complete:
            self.land(body.push)

    def _closestaging(self, body: Any) -> None:
        self.staging.pop(body.push, None)
        self.complete.pop(body.push, None)

    def _configure(self, body: Configure) -> None:
        self.configure, self.current = body, body.load
        if body.load is None:
            self.say(Ready(None))
            return
        found = self.snapshots.get(body.load)
        if found is None or (found.round, found.digest) != (body.load_round, body.load_digest):
            found = self._renamed(body)
            assert body.origin is not None
            self.content[body.load] = self.content[body.origin]
        self.bench.merged[body.load] = self.content[body.load]
        self._hold(replace(found, committed=True, commit_hash=body.commit_hash), body.commit_record)
        self.say(Ready(body.load, body.load_digest))

    def _lacks(self, pushes: tuple[StagedPush, ...]) -> bool:
        return any(self.complete.get(item.push) != item.attempt for item in pushes)

    def _measure(self, body: Measure) -> None:
        if self._lacks(body.participants) or body.version != self.current:
            self.say(RoundRefused(body.round, "measure", Refusal(RefusalCode.UNKNOWN_PUSH, "it is not here")))
        else:
            super()._measure(body)

    def _prepare(self, body: Prepare) -> None:
        if self._lacks(body.accepted) or body.from_version != self.current:
            self.say(RoundRefused(body.round, "prepare", Refusal(RefusalCode.UNKNOWN_PUSH, "it is not here")))
        elif "prepare" in self.refuse:
            self.say(RoundRefused(body.round, "prepare", self.refuse["prepare"]))
        else:
            self._write_shadow(body)

    def _write_shadow(self, body: Prepare) -> None:
        old = self.snapshots.get(body.to_version)
        assert old is None or not old.committed, f"{self.name} would write {body.to_version} over itself"
        assert len(body.weights) == len(body.accepted)
        content = self._content(body)
        digest = self.digest_of(content)
        self.content[body.to_version] = content
        self.prepared = {body.round: body}
        assert self.configure is not None
        hashes = (self.configure.layout_hash, self.configure.placement.placement_hash)
        self.snapshots[body.to_version] = SnapshotInfo(body.to_version, body.round, *hashes, digest, False)
        self.say(Prepared(body.round, digest))

    def _content(self, body: Prepare) -> Content:
        if body.from_version is None and (copied := self.bench.donations.get(body.accepted[0].push)) is not None:
            return self.bench.merged[copied[0]]
        before = self.content[body.from_version] if body.from_version else ()
        return (*before, *(item.push for item in body.accepted))

    def _abortround(self, body: AbortRound) -> None:
        shadow = self.prepared.pop(body.round, None)
        held = self.snapshots.get(shadow.to_version) if shadow is not None else None
        if shadow is not None and held is not None and not held.committed:
            del self.snapshots[shadow.to_version]

    def _commit(self, body: Commit) -> None:
        if body.version == self.current:
            self.say(Flipped(body.round, body.version))
            return
        found = self.snapshots[body.version]
        assert found.round == body.round, "COMMIT of a shadow that is not here"
        self._hold(replace(found, committed=True, commit_hash=body.commit_hash), body.commit_record)
        self.current = body.version
        self.bench.merged[body.version] = self.content[body.version]
        self.say(Flipped(body.round, body.version))
