"""The slave's state machine: takes one event and the time, returns effects.

It combines the link to the master (link), the parameters (shard) and the open stagings (slots), and keeps the
commands that must wait for the job under way, in their order. It must never obey a command of an older epoch,
of another incarnation or of another run (I8 of docs/architecture.md).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from enum import Enum

from dips.core.errors import LocalProtocolError, Refused
from dips.core.ids import Incarnation
from dips.core.machine import MachineHistory, Phase, TransitionTable
from dips.core.messages import (
    AbortRound,
    Allow,
    Caller,
    CloseStaging,
    Commit,
    Configure,
    ListShard,
    Measure,
    MoveBlocks,
    OpenStaging,
    Prepare,
    Promised,
    Refusal,
    Retain,
    SendCommitRecord,
    Settings,
    SlaveCommand,
    SlaveHello,
    SnapshotInfo,
    StopSlave,
    Welcome,
)
from dips.core.protocol import OWN_HELLO, agree
from dips.slave.state import effects, tape
from dips.slave.state.admission import owner_of, what_is_wrong
from dips.slave.state.effects import Effect
from dips.slave.state.shard import ShardPhase, ShardState
from dips.slave.state.staging import Slots

# ---- link ------------------------------------------------------------------------------------------------------------
#
# The slave's link to the master: its promised epoch, its incarnation, and which commands it may obey.
#
# A promise is durable before it is sent, and epochs below it are refused for ever (docs/protocol.md, fencing). This
# module must never lower the promised epoch.


class LinkPhase(Enum):
    DETACHED = "DETACHED"
    GREETING = "GREETING"
    PROMISING = "PROMISING"
    ATTACHED = "ATTACHED"


_P = LinkPhase

LINK_TABLE: TransitionTable[LinkPhase] = TransitionTable(
    "slave link",
    _P.DETACHED,
    {
        (_P.DETACHED, "linked"): {_P.GREETING},
        (_P.GREETING, "welcome"): {_P.PROMISING},
        (_P.ATTACHED, "welcome"): {_P.PROMISING},
        (_P.PROMISING, "welcome"): {_P.PROMISING},
        (_P.PROMISING, "promise_saved"): {_P.ATTACHED},
        (_P.DETACHED, "unlinked"): {_P.DETACHED},
        (_P.GREETING, "unlinked"): {_P.DETACHED},
        (_P.PROMISING, "unlinked"): {_P.DETACHED},
        (_P.ATTACHED, "unlinked"): {_P.DETACHED},
    },
)
"""Every Welcome passes through PROMISING, also for an epoch that is promised already: one way, one order."""


class LinkState:
    """State of the link. promised_epoch: as read from disk at start, 0 for a new directory."""

    def __init__(self, run_id: str, promised_epoch: int, story: MachineHistory) -> None:
        self.run_id = run_id
        self.promised_epoch = promised_epoch
        self.incarnation: Incarnation | None = None
        self.welcome: Welcome | None = None
        self.phase: Phase[LinkPhase] = Phase(LINK_TABLE, story)
        self._promising_epoch = 0

    @property
    def attached(self) -> bool:
        return self.phase.now is LinkPhase.ATTACHED

    @property
    def promising(self) -> bool:
        return self.phase.now is LinkPhase.PROMISING

    def welcomed(self, command: SlaveCommand, welcome: Welcome, now_s: float) -> bool:
        """Take a Welcome whose epoch was accepted. Returns whether it began a new incarnation of this slave."""
        self.phase.move("welcome", LinkPhase.PROMISING, now_s, command.cause_id)
        renewed = command.incarnation != self.incarnation
        self.incarnation = command.incarnation
        self.welcome = welcome
        self._promising_epoch = command.epoch
        return renewed

    def promise_saved(self, epoch: int, now_s: float) -> bool:
        """Note a durable promise. Returns whether the link is attached by it; a later Welcome may have overtaken it."""
        self.promised_epoch = max(self.promised_epoch, epoch)
        if not self.promising or epoch != self._promising_epoch:
            return False
        self.phase.move("promise_saved", LinkPhase.ATTACHED, now_s)
        return True

    def why_not(self, command: SlaveCommand) -> str:
        """Why this command must not be obeyed; empty when it may (I8 of docs/architecture.md)."""
        if command.run_id != self.run_id:
            return f"it names run {command.run_id!r}, this slave serves {self.run_id!r}"
        # A promise that is being saved holds already: it may become durable after the link has closed.
        floor = max(self.promised_epoch, self._promising_epoch)
        if command.epoch < floor:
            return f"its epoch {command.epoch} is older than {floor}, which this slave promised"
        if isinstance(command.body, Welcome):
            return "" if command.incarnation is not None else "its Welcome names no incarnation"
        if self.phase.now in (LinkPhase.GREETING, LinkPhase.DETACHED):
            return "no Welcome came before it"
        if command.incarnation != self.incarnation:
            return f"it is for incarnation {command.incarnation}, this slave is {self.incarnation}"
        if command.epoch != floor:
            return f"its epoch {command.epoch} was never promised"
        return ""


# ---- slave -----------------------------------------------------------------------------------------------------------


MAX_WAITING = 1024
"""Commands that may wait for one job. A master that sends more is broken, and the stream is closed."""


class SlaveMachine:
    """State machine of one slave process. memory_bytes, max_chunk_bytes and snapshots_kept are this slave's own limits.

    curve_key: its data port's public key; empty when it uses none. directory_id: drawn once for its directory.
    """

    def __init__(
        self,
        run_id: str,
        slave_id: str,
        data_endpoint: str,
        memory_bytes: int,
        max_chunk_bytes: int,
        promised_epoch: int,
        snapshots: Sequence[SnapshotInfo],
        curve_key: bytes = b"",
        directory_id: bytes = b"",
        snapshots_kept: int = 3,
    ) -> None:
        self.story = MachineHistory()
        self.link = LinkState(run_id, promised_epoch, self.story)
        self.slots = Slots()
        self.shard = ShardState(
            slave_id, memory_bytes, max_chunk_bytes, snapshots, self.slots, self.story, snapshots_kept
        )
        self._slave_id = slave_id
        self._data_endpoint = data_endpoint
        self._memory_bytes = memory_bytes
        self._curve_key = curve_key
        self._directory_id = directory_id
        self._waiting: deque[SlaveCommand] = deque()
        self._mute_job = 0
        self._hello_waits = False

    @property
    def n_waiting(self) -> int:
        """Commands that wait for the job under way."""
        return len(self._waiting)

    @property
    def between_rounds(self) -> bool:
        """Whether its stream may end without a loss: nothing of a push or a round is in memory alone."""
        shard = self.shard
        return not (len(self.slots) or self._waiting or shard.busy or shard.shadow or shard.saving.behind)

    def caller(self, cause_id: str = "") -> Caller:
        """The caller fields of every message of this slave."""
        link = self.link
        return Caller(link.run_id, link.promised_epoch, self._slave_id, link.incarnation, cause_id)

    def handle(self, event: effects.Event, now_s: float) -> list[Effect]:
        """Take one event; returns what to do, in order."""
        out = self._take(event, now_s)
        while self._waiting and self._may_run(self._waiting[0]):
            out += self._obey(self._waiting.popleft(), now_s)
        return out

    def _take(self, event: effects.Event, now_s: float) -> list[Effect]:
        match event:
            case effects.Linked():
                self.link.phase.move("linked", LinkPhase.GREETING, now_s)
                # A master of another journal must not miss the version that an older one has just had committed.
                self._hello_waits = self.shard.phase.now is ShardPhase.COMMITTING
                return [] if self._hello_waits else [self._hello()]
            case effects.Unlinked(why):
                self.link.phase.move("unlinked", LinkPhase.DETACHED, now_s, why=why)
                self._waiting.clear()
                self._hello_waits = False
                return []
            case effects.Fenced():
                self.link.incarnation = None
                return []
            case SlaveCommand():
                return self._commanded(event, now_s)
            case effects.PromiseSaved(epoch):
                attached = self.link.promise_saved(epoch, now_s)
                out: list[Effect] = [
                    effects.Serve(self.link.promised_epoch),
                    tape.EpochPromised("", epoch=epoch),
                ]
                if attached:
                    out.append(effects.SendUp(Promised(epoch)))
                    out += [effects.SendUp(staged) for staged in self.slots.all_staged()]
                return out
            case effects.PushStaged(slot, digest):
                staged = self.slots.staged(slot, digest)
                if staged is None:
                    return []
                about = tape.StagingComplete("", push=slot.push, attempt=slot.attempt, digest=digest)
                return [about, effects.SendUp(staged)] if self.link.attached else [about]
            case effects.RecordRead(asked_by, answer):
                is_current = self.link.attached and asked_by == self.link.incarnation
                return [effects.SendUp(answer)] if is_current else []
            case effects.Saved() | effects.SaveFailed() | effects.SaveAgain():
                return self.shard.save_event(event, now_s)
            case effects.Done() | effects.Failed():
                return self._ended(event, now_s)

    # ---- the link ----

    def _hello(self) -> Effect:
        return effects.SendUp(
            SlaveHello(
                OWN_HELLO,
                self._data_endpoint,
                self._memory_bytes,
                self.link.promised_epoch,
                self.shard.offers(),
                self._curve_key,
                self._directory_id,
            )
        )

    def _commanded(self, command: SlaveCommand, now_s: float) -> list[Effect]:
        why_not = self.link.why_not(command)
        name = type(command.body).__name__
        if why_not:
            sentence = f"{name} refused: {why_not}"
            out = _refused(logging.WARNING, "command", sentence, command.cause_id, why_not, name)
            return [*out, effects.CloseLink(sentence)] if isinstance(command.body, Welcome) else out
        if isinstance(command.body, Welcome):
            return self._welcomed(command, command.body, now_s)
        if isinstance(command.body, StopSlave):
            return [command.body]
        if isinstance(command.body, Allow):
            return self._allowed(command.body, command.cause_id)
        if len(self._waiting) >= MAX_WAITING:
            return [effects.CloseLink(f"{MAX_WAITING} commands wait for one job")]
        self._waiting.append(command)
        return self.shard.cancel_move(command.body.round) if isinstance(command.body, AbortRound) else []

    def _allowed(self, allow: Allow, cause: str) -> list[Effect]:
        """Waits for no job: a key that left the list must not be served while a round is computed."""
        why_not = what_is_wrong(allow) if self._curve_key else "this slave's data port uses no keys"
        if why_not:
            sentence = f"the master's list of data keys is refused: {why_not}"
            return _refused(logging.ERROR, "keys", sentence, cause, why_not, "Allow")
        owners = dict.fromkeys(owner_of(allowed.role, allowed.owner) for allowed in allow.keys)
        return [allow, tape.KeysAllowed(cause, owners=list(owners))]

    def _welcomed(self, command: SlaveCommand, welcome: Welcome, now_s: float) -> list[Effect]:
        hello = welcome.hello
        try:
            agree(hello.protocol_min, hello.protocol_max, hello.capabilities, "the master")
        except Refused as refused:
            return [effects.GiveUp(Refusal(refused.code, refused.sentence))]
        self._waiting.clear()
        out: list[Effect] = []
        if self.link.welcomed(command, welcome, now_s):
            self.slots.clear()
            self._mute_job = self.shard.job.number if self.shard.job else 0
            out += self.shard.cancel_move()
            out.append(effects.HoldSlots(()))
            out.append(tape.IncarnationBegun(command.cause_id, incarnation=command.incarnation))
        return [*out, effects.SavePromise(command.epoch)]

    # ---- commands that wait for their turn ----

    def _may_run(self, command: SlaveCommand) -> bool:
        """Whether the command can run now; the first that cannot holds back all behind it."""
        if self.link.promising:
            return False
        if isinstance(command.body, SendCommitRecord):
            return True
        if not self.shard.busy:
            body = command.body
            return not (isinstance(body, Configure) and self.shard.must_save_first(body, self._settings()))
        job = self.shard.job
        if job is None or isinstance(job.command, Configure):
            return False
        read = [slot.number for slot in job.slots]
        if isinstance(command.body, OpenStaging):
            return command.body.slot not in read and self.slots.number_of(command.body.push) not in read
        return isinstance(command.body, CloseStaging) and self.slots.number_of(command.body.push) not in read

    def _settings(self) -> Settings:
        assert self.link.welcome is not None, "commands are obeyed only after a Welcome"
        return self.link.welcome.settings

    def _obey(self, command: SlaveCommand, now_s: float) -> list[Effect]:
        cause = command.cause_id
        match command.body:
            case Configure() as body:
                return self.shard.configure(body, self._settings(), cause, now_s)
            case Measure() | Prepare() | Commit() | ListShard() | MoveBlocks() as body:
                return self.shard.begin(body, self._settings(), cause, now_s)
            case AbortRound() as body:
                return self.shard.abort(body, cause, now_s)
            case OpenStaging() as body:
                return self._open(body, cause)
            case CloseStaging(push):
                self.slots.close(push)
                return [effects.HoldSlots(self.slots.all())]
            case SendCommitRecord():
                return [command]
            case Retain() as body:
                return [body]
            case other:
                raise LocalProtocolError(f"{type(other).__name__} does not wait for its turn")

    def _open(self, body: OpenStaging, cause: str) -> list[Effect]:
        n_slots = self.shard.made.staging_slots if self.shard.made else 0
        if not 0 <= body.slot < n_slots:
            sentence = f"OpenStaging of push {body.push} names slot {body.slot}, this slave has {n_slots}"
            return _refused(logging.ERROR, "open", sentence, cause, sentence)
        slot = self.slots.open(body)
        if slot is None:
            sentence = f"push {body.push}: attempt {body.attempt} is older than the open one"
            return [effects.Log(logging.WARNING, "open", sentence, cause)]
        return [effects.HoldSlots(self.slots.all())]

    def _ended(self, event: effects.Done | effects.Failed, now_s: float) -> list[Effect]:
        muted = event.number == self._mute_job
        out = self.shard.ended(event, now_s)
        if muted and self.shard.job is not None:
            self._mute_job = self.shard.job.number  # the same work once more, under another number
        if self.link.attached and not muted:
            return out
        # There is no stream for the answer, or an earlier incarnation was asked: a command that comes again is
        # answered again.
        out = [effect for effect in out if not isinstance(effect, effects.SendUp)]
        waited, self._hello_waits = self._hello_waits, False
        return [*out, self._hello()] if waited else out


def _refused(level: int, key: str, sentence: str, cause: str, reason: str, command: str = "") -> list[Effect]:
    """A command is not obeyed: for people, and for the tape."""
    return [effects.Log(level, key, sentence, cause), tape.CommandRefused(cause, command=command, reason=reason)]
