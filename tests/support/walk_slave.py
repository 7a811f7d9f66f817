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


class WalkSlave(BenchSlave):
    """content: what each version on its disk is made of; committed ones must never be written again."""

    def __init__(self, bench: Bench, name: str) -> None:
        super().__init__(bench, name)
        self.inbox: list[SlaveCommand] = []
        self.outbox: list[SlaveSaid] = []
        self.said: list[SlaveSaid] = []
        self.content: dict[Version, Content] = {}
        self.complete: dict[PushId, int] = {}
        self.current: Version | None = None

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
            self.say(Staged(push, opened.attempt, self.digest(push)))

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
        if body.load is not None:
            found = self.snapshots[body.load]
            assert found.digest == body.load_digest
            self.snapshots[body.load] = replace(found, committed=True, commit_hash=body.commit_hash)
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
        before = self.content[body.from_version] if body.from_version else ()
        content = (*before, *(item.push for item in body.accepted))
        digest = hashlib.sha256(f"{self.name}{content}".encode()).digest()
        self.content[body.to_version] = content
        self.prepared = {body.round: body}
        self.snapshots[body.to_version] = SnapshotInfo(body.to_version, body.round, b"", b"", digest, False)
        self.say(Prepared(body.round, digest))

    def _abortround(self, body: AbortRound) -> None:
        shadow = self.prepared.pop(body.round, None)
        if shadow is not None and not self.snapshots[shadow.to_version].committed:
            del self.snapshots[shadow.to_version]

    def _commit(self, body: Commit) -> None:
        found = self.snapshots[body.version]
        assert found.round == body.round, "COMMIT of a shadow that is not here"
        self.snapshots[body.version] = replace(found, committed=True, commit_hash=body.commit_hash)
        self.current = body.version
        self.say(Flipped(body.round, body.version))
