"""A SlaveMachine with nothing around it: a test says what happens and reads what it wants done."""

from __future__ import annotations

from typing import Any, TypeVar

from support.slave_values import BASE, PLACEMENT, R2, V0, V1, A
from support.slave_wire import RUN, configure_for, open_staging, prepare_of

from dips.core import messages
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.slave.state import effects
from dips.slave.state.effects import Effect, JobCommand
from dips.slave.state.shard import ShardPhase
from dips.slave.state.slave import SlaveMachine
from dips.slave.state.staging import Slot

E = TypeVar("E")


def configure(info: messages.SnapshotInfo | None = None, **changes: Any) -> messages.Configure:
    if info is not None:
        changes |= {"load": info.version, "load_round": info.round, "load_digest": info.digest, "commit_hash": b"hash"}
    return configure_for(PLACEMENT, **changes)


def slot_of(out: list[Effect], push: PushId) -> Slot:
    """The slot in which these effects hold a push."""
    (held,) = only(out, effects.HoldSlots)
    (slot,) = [slot for slot in held.slots if slot.push == push]
    return slot


class SlaveBench:
    """Time stands at now_s; every event is followed by the checks that hold always."""

    def __init__(
        self,
        snapshots: tuple[messages.SnapshotInfo, ...] = (),
        promised: int = 0,
        memory_bytes: int = 1 << 20,
        settings: messages.Settings | None = None,
        curve_key: bytes = b"",
        snapshots_kept: int = 3,
    ) -> None:
        self.settings = settings or messages.Settings()
        self.state = SlaveMachine(
            RUN, "s0", "tcp://127.0.0.1:1", memory_bytes, 1 << 20, promised, snapshots, curve_key,
            snapshots_kept=snapshots_kept,
        )  # fmt: skip
        self.now_s = 0.0
        self.epoch, self.incarnation = 1, Incarnation(1, 1)
        self.disk: tuple[messages.SnapshotInfo, ...] = snapshots

    @property
    def phase(self) -> ShardPhase:
        return self.state.shard.phase.now

    def give(self, event: effects.Event) -> list[Effect]:
        self.now_s += 1
        out = self.state.handle(event, self.now_s)
        shard = self.state.shard
        assert (shard.job is not None) == shard.busy
        assert len(only(out, effects.SaveVersion)) <= 1
        assert (shard.shadow is not None) == (shard.phase.now in (ShardPhase.PREPARED, ShardPhase.COMMITTING))
        assert len(only(out, effects.Run)) <= 1
        return out

    def command(self, body: messages.CommandBody, **changes: Any) -> list[Effect]:
        fields: dict[str, Any] = {"run_id": RUN, "epoch": self.epoch, "incarnation": self.incarnation}
        return self.give(messages.SlaveCommand(**(fields | changes), cause_id="cause", body=body))

    def refused(self, body: messages.CommandBody) -> messages.Refusal:
        """Why the only answer to this command is that it cannot be."""
        if isinstance(body, messages.Configure):
            return answer(self.command(body), messages.ConfigureRefused).refusal
        return answer(self.command(body), messages.RoundRefused).refusal

    def link(self) -> list[Effect]:
        return self.give(effects.Linked())

    def welcome(self, epoch: int = 1, n: int = 1, settings: messages.Settings | None = None) -> list[Effect]:
        self.epoch, self.incarnation = epoch, Incarnation(epoch, n)
        hello = messages.Hello(PROTOCOL_MIN, PROTOCOL_VERSION)
        out = self.command(messages.Welcome(hello, settings or self.settings))
        return out + self.give(effects.PromiseSaved(epoch))

    def attach(self, epoch: int = 1, n: int = 1) -> SlaveBench:
        self.link()
        self.welcome(epoch, n)
        return self

    def job(self) -> int:
        assert self.state.shard.job is not None
        return self.state.shard.job.number

    def done(self, info: messages.SnapshotInfo | None = None) -> list[Effect]:
        return self.give(effects.Done(self.job(), info, self.disk))

    def measured(self) -> list[Effect]:
        job = self.state.shard.job
        assert job is not None
        assert isinstance(job.command, messages.Measure)
        return self.give(
            effects.Done(job.number, messages.Measured(job.command.round, (messages.BlockGram(0, (1.0,), (0,)),)))
        )

    def prepared(self, info: messages.SnapshotInfo) -> list[Effect]:
        self.disk = (info, *self.disk)
        return self.done(info)

    def committed(self, info: messages.SnapshotInfo) -> list[Effect]:
        self.disk = (info, *(other for other in self.disk if other.version != info.version))
        return self.done(info)

    def failed(self, refusal: messages.Refusal) -> list[Effect]:
        return self.give(effects.Failed(self.job(), refusal))

    def ready(self, info: messages.SnapshotInfo | None = None) -> SlaveBench:
        self.attach()
        if info is not None:
            self.disk = self.state.shard.snapshots = (info,)
        self.command(configure(info))
        self.done(info)
        return self

    def at_v0(self) -> SlaveBench:
        """At version 0, with push A staged in slot 0."""
        self.ready(BASE).stage(A, 0)
        return self

    def stage(self, push: PushId, slot: int, attempt: int = 1) -> list[Effect]:
        opened = slot_of(self.command(open_staging(push, slot, attempt)), push)
        return self.give(effects.PushStaged(opened, b"digest"))

    def prepare(self, round_id: RoundId = R2, to: Version = V1, from_version: Version | None = V0) -> list[Effect]:
        return self.command(prepare(round_id, to, from_version))


def prepare(
    round_id: RoundId = R2, to: Version = V1, from_version: Version | None = V0, **changes: Any
) -> messages.Prepare:
    return prepare_of(round_id, to, [A], from_version, **changes)


def measure(round_id: RoundId = R2, version: Version = V0, *pushes: PushId) -> messages.Measure:
    return messages.Measure(round_id, version, tuple(messages.StagedPush(push, 1) for push in pushes or (A,)))


def commit(round_id: RoundId = R2, version: Version = V1) -> messages.Commit:
    return messages.Commit(round_id, version, b"hash", b"{}")


def only(out: list[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in out if isinstance(effect, kind)]


def runs(out: list[Effect], kind: type[JobCommand]) -> list[effects.Run]:
    return [run for run in only(out, effects.Run) if isinstance(run.command, kind)]


def said(out: list[Effect]) -> list[messages.SlaveBody]:
    return [effect.body for effect in only(out, effects.SendUp)]


def answer(out: list[Effect], kind: type[E]) -> E:
    (body,) = said(out)
    assert isinstance(body, kind)
    return body
