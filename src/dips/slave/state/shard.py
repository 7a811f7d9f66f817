"""Takes this slave's part of the model through rounds: load, measure, prepare, commit or abort.

One job at a time works on memory; commands that come meanwhile wait (state/slave.py keeps them in order), so
there are no races here. Commands may be sent again at any time: a repeated one is answered again, never done
twice. A shadow leaves only by COMMIT, ABORT, a later round or the load of another version, so that a logged
COMMIT can always be completed (I5 of docs/architecture.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dips.core import messages
from dips.core.errors import LocalProtocolError, RefusalCode, Refused
from dips.core.ids import RoundId, Version
from dips.core.machine import MachineHistory, Phase, TransitionTable
from dips.slave.state import effects, tape
from dips.slave.state.checks import (
    check_load,
    check_memory,
    check_move,
    check_prepare,
    check_settings,
    find_load,
    is_load,
    own_blocks,
)
from dips.slave.state.effects import Effect, JobCommand, Run
from dips.slave.state.staging import Slots

# ---- saving ----------------------------------------------------------------------------------------------------------
#
# Durability "async": writes committed versions to disk afterwards, one at a time, always the newest next.
#
# A version is skipped when a newer one is there, a disk that fails is tried again, and no version is called durable
# before its manifest is. With durability "sync" this machine never leaves IDLE, because versions are durable before
# they are committed (docs/storage.md). Pure.


RETRY_S = 1.0
"""Wait after a failure that names no time of its own."""


class SavePhase(Enum):
    IDLE = "IDLE"
    SAVING = "SAVING"
    WAITING = "WAITING"


SAVE_TABLE: TransitionTable[SavePhase] = TransitionTable(
    "slave save",
    SavePhase.IDLE,
    {
        (SavePhase.IDLE, "behind"): {SavePhase.SAVING},
        (SavePhase.SAVING, "saved"): {SavePhase.IDLE},
        (SavePhase.SAVING, "failed"): {SavePhase.WAITING},
        (SavePhase.WAITING, "retry"): {SavePhase.IDLE},
    },
)


class Saving:
    """State of the saves. durable: the newest version of the present history that is on disk with its COMMIT."""

    def __init__(self, story: MachineHistory) -> None:
        self.phase: Phase[SavePhase] = Phase(SAVE_TABLE, story)
        self.durable: Version | None = None
        self._newest: messages.SnapshotInfo | None = None
        self._record = b""
        self._saves = 0
        self._valid_from = 1

    @property
    def behind(self) -> bool:
        """Whether the newest version that was committed is not on disk yet."""
        return self._newest is not None and self._newest.version != self.durable

    def committed(self, info: messages.SnapshotInfo, record: bytes, durable: bool) -> None:
        """A version was committed in memory, or also on disk."""
        self._newest, self._record = info, record
        if durable:
            self.durable = info.version

    def loaded(self, info: messages.SnapshotInfo | None) -> None:
        """Memory holds what the disk holds; a save that still runs belongs to the earlier state."""
        self._newest, self._record = info, b""
        self.durable = info.version if info is not None else None

    def dropped(self) -> None:
        """Memory is given up: nothing is to be saved, and a save that still runs does not count for later versions."""
        self.loaded(None)
        self._valid_from = self._saves + 1

    def begin(self, now_s: float) -> list[Effect]:
        """Save the newest version if it is not on disk. Call only while memory does not change."""
        if self._newest is None or not self.behind or self.phase.now is not SavePhase.IDLE:
            return []
        self.phase.move("behind", SavePhase.SAVING, now_s, str(self._newest.round))
        self._saves += 1
        return [effects.SaveVersion(self._saves, self._newest, self._record)]

    def saved(self, number: int, info: messages.SnapshotInfo, now_s: float) -> list[Effect]:
        """A save succeeded; a later begin() saves what was committed meanwhile."""
        self.phase.move("saved", SavePhase.IDLE, now_s, str(info.round))
        if number >= self._valid_from:
            self.durable = info.version
        return [tape.VersionSaved(str(info.round), version=info.version, round=info.round, digest=info.digest)]

    def failed(self, refusal: messages.Refusal, now_s: float) -> list[Effect]:
        """A save failed: wait, then try again with the version that is newest then."""
        self.phase.move("failed", SavePhase.WAITING, now_s, "-", refusal.sentence)
        return [warn("save", refusal.sentence), effects.SaveLater(refusal.retry_after_s or RETRY_S)]

    def again(self, now_s: float) -> None:
        self.phase.move("retry", SavePhase.IDLE, now_s)


# ---- shard -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """The parameters that memory was allocated for; for equal ones it need not be allocated again."""

    layout_hash: bytes
    placement_hash: bytes
    staging_slots: int
    pinned_versions: int
    chunk_bytes: int
    memory_files: str
    pull_wire: str


class ShardPhase(Enum):
    EMPTY = "EMPTY"
    LOADING = "LOADING"
    READY = "READY"
    MEASURING = "MEASURING"
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    COMMITTING = "COMMITTING"
    LISTING = "LISTING"
    MOVING = "MOVING"


BUSY = frozenset(
    {
        ShardPhase.LOADING,
        ShardPhase.MEASURING,
        ShardPhase.PREPARING,
        ShardPhase.COMMITTING,
        ShardPhase.LISTING,
        ShardPhase.MOVING,
    }
)

SHARD_TABLE: TransitionTable[ShardPhase] = TransitionTable(
    "slave shard",
    ShardPhase.EMPTY,
    {
        (ShardPhase.EMPTY, "configure"): {ShardPhase.LOADING},
        (ShardPhase.READY, "configure"): {ShardPhase.LOADING},
        (ShardPhase.PREPARED, "configure"): {ShardPhase.LOADING, ShardPhase.COMMITTING},
        (ShardPhase.LOADING, "done"): {ShardPhase.READY},
        (ShardPhase.LOADING, "failed"): {ShardPhase.EMPTY},
        (ShardPhase.LOADING, "retry"): {ShardPhase.LOADING},
        (ShardPhase.READY, "measure"): {ShardPhase.MEASURING},
        (ShardPhase.MEASURING, "done"): {ShardPhase.READY},
        (ShardPhase.MEASURING, "failed"): {ShardPhase.READY},
        (ShardPhase.READY, "prepare"): {ShardPhase.PREPARING},
        (ShardPhase.PREPARING, "done"): {ShardPhase.PREPARED},
        (ShardPhase.PREPARING, "failed"): {ShardPhase.READY},
        (ShardPhase.PREPARED, "drop"): {ShardPhase.READY},
        (ShardPhase.PREPARED, "commit"): {ShardPhase.COMMITTING},
        (ShardPhase.COMMITTING, "done"): {ShardPhase.READY},
        (ShardPhase.COMMITTING, "failed"): {ShardPhase.PREPARED},
        (ShardPhase.COMMITTING, "retry"): {ShardPhase.COMMITTING},
        (ShardPhase.READY, "list"): {ShardPhase.LISTING},
        (ShardPhase.LISTING, "done"): {ShardPhase.READY},
        (ShardPhase.LISTING, "failed"): {ShardPhase.READY},
        (ShardPhase.EMPTY, "move"): {ShardPhase.MOVING},
        (ShardPhase.READY, "move"): {ShardPhase.MOVING},
        (ShardPhase.MOVING, "done"): {ShardPhase.EMPTY, ShardPhase.READY},
        (ShardPhase.MOVING, "failed"): {ShardPhase.EMPTY, ShardPhase.READY},
    },
)


class ShardState:
    """State of the shard. memory_bytes: most that parameters may use here. snapshots: verified ones found at start.
    snapshots_kept: the ring's."""

    def __init__(
        self,
        slave_id: str,
        memory_bytes: int,
        max_chunk_bytes: int,
        snapshots: Sequence[messages.SnapshotInfo],
        slots: Slots,
        story: MachineHistory,
        snapshots_kept: int,
    ) -> None:
        self._slave_id = slave_id
        self._memory_bytes = memory_bytes
        self._max_chunk_bytes = max_chunk_bytes
        self._snapshots_kept = snapshots_kept
        self._slots = slots
        self.phase: Phase[ShardPhase] = Phase(SHARD_TABLE, story)
        self.snapshots = tuple(snapshots)
        self.current: messages.SnapshotInfo | None = None
        self.shadow: messages.SnapshotInfo | None = None
        self.made: Made | None = None
        self.job: Run | None = None
        """The job under way, as it was sent to the shell."""
        self._jobs = 0
        self._measured: messages.Measured | None = None
        self._newest_round = RoundId(0, 0)
        self._prepared: messages.Prepare | None = None
        self.moved: tuple[messages.MoveBlocks, messages.SnapshotInfo] | None = None
        """The shard that a RESHARD asked for and that is on disk, until it is loaded or given up."""
        self.saving = Saving(story)

    @property
    def busy(self) -> bool:
        return self.phase.now in BUSY

    def offers(self) -> tuple[messages.SnapshotInfo, ...]:
        """Versions that a master may ask to load, newest first: those on disk, and the one that only memory holds."""
        found = {(info.version, info.round): info for info in self.snapshots}
        for info in (self.shadow, self.current):
            if info is not None:
                found[(info.version, info.round)] = info
        return tuple(info for _, info in sorted(found.items(), reverse=True))

    def must_save_first(self, body: messages.Configure, settings: messages.Settings) -> bool:
        """Whether only memory holds the version asked for and it must be written to disk first.

        Either memory must be made again, or a master that came back with durability "sync" relies on Ready for that.
        """
        disk_first = settings.durability != "async" or self.made != _made(body, settings)
        return self.saving.behind and is_load(self.current, body) and disk_first

    # ---- commands; only called while not busy ----

    def configure(
        self, body: messages.Configure, settings: messages.Settings, cause: str, now_s: float
    ) -> list[Effect]:
        """Make memory and load the version asked for; Ready at once when both are there already."""
        out: list[Effect] = []
        if self.moved is not None and not is_load(self.moved[1], body):
            out = self._drop_shadow(now_s)
        try:
            check_settings(settings, self._max_chunk_bytes, self._snapshots_kept)
            check_memory(own_blocks(self._slave_id, body), body, settings, self._memory_bytes)
            check_load(body, self.current, self.snapshots)
            made = _made(body, settings)
            if made == self.made:
                if self.current is None if body.load is None else is_load(self.current, body):
                    return [*out, effects.SendUp(self._ready())]
                if self.shadow is not None and is_load(self.shadow, body):
                    job = Run(body, cause, now_s, settings, shadow=self.shadow)
                    return [*out, self._begin("configure", ShardPhase.COMMITTING, job, now_s)]
            source = find_load(body, self.snapshots)
        except Refused as refused:
            answer = effects.SendUp(_refusal_of(body, to_refusal(refused)))
            return [*out, answer, warn("configure", refused.sentence, cause)]
        self.made, self.current, self.shadow, self._measured = made, None, None, None
        self.moved = None
        self._slots.clear()
        self.saving.dropped()
        return [
            *out,
            self._begin("configure", ShardPhase.LOADING, Run(body, cause, now_s, settings, source=source), now_s),
        ]

    def begin(
        self,
        body: messages.Measure | messages.Prepare | messages.Commit | messages.ListShard | messages.MoveBlocks,
        settings: messages.Settings,
        cause: str,
        now_s: float,
    ) -> list[Effect]:
        """Begin the job of a round, or answer again. A Prepare that differs in anything is computed again."""
        again = self._answered(body)
        if again is not None:
            return [effects.SendUp(again)]
        out: list[Effect] = []
        try:
            match body:
                case messages.Measure():
                    out = self._enter_round(body.round, now_s)
                    self._demand_current(body, "measures")
                    if not body.participants:
                        raise Refused(RefusalCode.MALFORMED, f"round {body.round} has no participants to measure")
                    slots = self._slots.complete(body.participants)
                    begun = self._begin(
                        "measure", ShardPhase.MEASURING, Run(body, cause, now_s, settings, slots), now_s
                    )
                case messages.Prepare():
                    out = self._enter_round(body.round, now_s)
                    check_prepare(body, self.current, self.snapshots)
                    slots = self._slots.complete(body.accepted)
                    job = Run(body, cause, now_s, settings, slots)
                    begun = self._begin("prepare", ShardPhase.PREPARING, job, now_s)
                case messages.Commit():
                    if self.shadow is None or (self.shadow.round, self.shadow.version) != (body.round, body.version):
                        raise Refused(
                            RefusalCode.VERSION_GONE,
                            f"no shadow of round {body.round} is in memory: send Configure with that version to load",
                        )
                    job = Run(body, cause, now_s, settings, shadow=self.shadow)
                    begun = self._begin("commit", ShardPhase.COMMITTING, job, now_s)
                case messages.ListShard():  # a RESHARD begins: send the checksums of all chunks of the version
                    out = self._enter_round(body.round, now_s)
                    self._demand_current(body, "moves")
                    begun = self._begin("list", ShardPhase.LISTING, Run(body, cause, now_s, settings), now_s)
                case messages.MoveBlocks():  # the shadow of another placement; a slave without blocks begins with it
                    out = self._enter_round(body.round, now_s, made=False)
                    check_settings(settings, self._max_chunk_bytes, self._snapshots_kept)
                    check_memory(own_blocks(self._slave_id, body), body, settings, self._memory_bytes)
                    check_move(self._slave_id, body, self.current)
                    begun = self._begin("move", ShardPhase.MOVING, Run(body, cause, now_s, settings), now_s)
        except Refused as refused:
            return [*out, effects.SendUp(_refusal_of(body, to_refusal(refused)))]
        return [*out, begun]

    def _answered(self, body: JobCommand) -> messages.SlaveBody | None:
        """The answer to a command that was done before; None: it is new, or cannot be answered from memory."""
        match body:
            case messages.Measure() if self._measured is not None and self._measured.round == body.round:
                return self._measured
            case messages.Prepare() if self.shadow is not None and self._prepared == body:
                return messages.Prepared(body.round, self.shadow.digest)
            case messages.MoveBlocks() if self.moved is not None and self.moved[0] == body:
                return messages.Prepared(body.round, self.moved[1].digest)
            case messages.Commit(round_id, version) if self.current is not None:
                here = (self.current.round, self.current.version)
                return messages.Flipped(round_id, version) if here == (round_id, version) else None
        return None

    def _demand_current(self, body: messages.Measure | messages.ListShard, does: str) -> None:
        here = self.current.version if self.current else None
        if here != body.version:
            sentence = f"round {body.round} {does} {body.version}, here is {here}"
            raise Refused(RefusalCode.VERSION_GONE, sentence)

    def cancel_move(self, round_id: RoundId | None = None) -> list[Effect]:
        """End a move that is under way, any one or that of a round, because its result is no longer needed."""
        job = self.job
        if job is None or not isinstance(job.command, messages.MoveBlocks) or round_id not in (None, job.command.round):
            return []
        return [effects.CancelMove(job.number)]

    def abort(self, body: messages.AbortRound, cause: str, now_s: float) -> list[Effect]:
        """Drop the shadow of the round, if there is one; rounds up to this one never begin again."""
        self._newest_round = max(self._newest_round, body.round)
        self._measured = None
        out: list[Effect] = [tape.RoundAborted(cause, round=body.round, reason=body.reason)]
        if self.shadow is not None and self.shadow.round == body.round:
            out += self._drop_shadow(now_s)
        if self.moved is not None and self.moved[0].round == body.round:
            out += self._drop_shadow(now_s) + self._save(now_s)
        return out

    # ---- ends of jobs ----

    def ended(self, event: effects.Done | effects.Failed, now_s: float) -> list[Effect]:
        """Take the end of the job under way. Ends of other jobs cannot come: there is only ever one."""
        job = self.job
        if job is None or event.number != job.number:
            return [warn("job", f"the end of job {event.number} came twice")]
        self.job = None
        if event.snapshots is not None:
            self.snapshots = event.snapshots
        out = (
            self._failed(job, event.refusal, now_s)
            if isinstance(event, effects.Failed)
            else self._done(job, event.result, now_s)
        )
        return out + self._save(now_s)

    def _done(
        self, job: Run, result: messages.SnapshotInfo | messages.Measured | messages.ShardList | None, now_s: float
    ) -> list[Effect]:
        """The tape is written before the answer that it proves: a kill between the two must leave the evidence."""
        to = ShardPhase.READY
        about: dict[str, Any] = {"took_s": round(now_s - job.began_s, 6)}
        if isinstance(result, messages.SnapshotInfo):
            about |= {"version": result.version, "round": result.round, "digest": result.digest}
        answer: messages.SlaveBody
        records: list[Effect] = []
        match job.command, result:
            case (messages.Configure() | messages.Commit()) as command, messages.SnapshotInfo() if (
                job.shadow is not None
            ):
                self.current, self.shadow, self._measured = result, None, None
                self.saving.committed(result, command.commit_record, job.durable)
                committed_as = result.commit_hash
                records = [tape.VersionCommitted(job.cause, **about, commit_hash=committed_as, durable=job.durable)]
                is_commit = isinstance(command, messages.Commit)
                answer = messages.Flipped(result.round, result.version) if is_commit else self._ready()
            case messages.Configure(origin=origin), messages.SnapshotInfo() | None:
                self.current = result
                self.saving.loaded(result)
                if result is not None and origin is not None:
                    records = [tape.OriginLoaded(job.cause, **about, origin=origin)]
                records.append(tape.ShardLoaded(job.cause, **about))
                answer = self._ready()
            case messages.Measure(version=version) as command, messages.Measured():
                self._measured = answer = result
                gram, bad = _sums(result.blocks)
                about |= {"round": command.round, "version": version, "gram": gram, "nonfinite_elems": bad}
                zero = list(result.all_zero) if any(result.all_zero) else None
                records = [tape.ShardMeasured(job.cause, **about, all_zero=zero)]
            case messages.ListShard(version=version) as command, messages.ShardList():
                records = [tape.ShardListed(job.cause, **about, round=command.round, version=version)]
                answer = result
            case (messages.Prepare() | messages.MoveBlocks()) as command, messages.SnapshotInfo():
                if isinstance(command, messages.Prepare):
                    to, self.shadow, self._prepared = ShardPhase.PREPARED, result, command
                else:
                    to, self.moved = self._still(), (command, result)
                records = [tape.ShadowPrepared(job.cause, **about, durable=job.durable, finite=True)]
                answer = messages.Prepared(result.round, result.digest)
            case command, _:
                raise LocalProtocolError(f"{type(command).__name__} ended with {type(result).__name__}")
        self.phase.move("done", to, now_s, job.cause)
        return [*records, effects.SendUp(answer)]

    def _failed(self, job: Run, refusal: messages.Refusal, now_s: float) -> list[Effect]:
        command, loading = job.command, self.phase.now is ShardPhase.LOADING
        about = "" if isinstance(command, messages.Configure) else f"round {command.round}: "
        out: list[Effect] = [
            effects.SendUp(_refusal_of(command, refusal)),
            warn(type(command).__name__.lower(), about + refusal.sentence, job.cause),
        ]
        if refusal.retry_after_s > 0 and self.phase.now in (ShardPhase.LOADING, ShardPhase.COMMITTING):
            # After its commit point a round cannot be aborted: try until the disk accepts it, and log the cause.
            again = replace(job, delay_s=refusal.retry_after_s)
            return [*out, self._begin("retry", self.phase.now, again, now_s, refusal.sentence)]
        back = {
            ShardPhase.LOADING: ShardPhase.EMPTY,
            ShardPhase.COMMITTING: ShardPhase.PREPARED,
            ShardPhase.MOVING: self._still(),
        }.get(self.phase.now, ShardPhase.READY)
        self.phase.move("failed", back, now_s, job.cause, refusal.sentence)
        if loading:
            self.made = None
            if job.source is not None and job.source not in self.snapshots:
                broke = f"the snapshot of version {job.source.version} broke since it was offered"
                out.append(effects.CloseLink(f"{broke}: report the snapshots again"))
        return out

    def save_event(self, event: effects.SaveEvent, now_s: float) -> list[Effect]:
        """Take the result of a save; the next one begins when there is more to save."""
        out: list[Effect] = []
        match event:
            case effects.Saved(number, info, snapshots):
                self.snapshots = snapshots
                out = self.saving.saved(number, info, now_s)
            case effects.SaveFailed(_, refusal):
                out = self.saving.failed(refusal, now_s)
            case effects.SaveAgain():
                self.saving.again(now_s)
        return out + self._save(now_s)

    def _save(self, now_s: float) -> list[Effect]:
        """Begin a save, but not while memory flips or is made again, nor while a RESHARD has a file: it is called again
        at its end."""
        flips = self.phase.now in (ShardPhase.LOADING, ShardPhase.COMMITTING, ShardPhase.MOVING)
        return [] if flips or self.moved is not None else self.saving.begin(now_s)

    # ---- helpers ----

    def _begin(self, input_name: str, to: ShardPhase, job: Run, now_s: float, why: str = "") -> Run:
        """Give a job its number."""
        self.phase.move(input_name, to, now_s, job.cause, why)
        self._jobs += 1
        self.job = replace(job, number=self._jobs)
        return self.job

    def _still(self) -> ShardPhase:
        """The phase after a move, which changes nothing in memory."""
        return ShardPhase.EMPTY if self.made is None else ShardPhase.READY

    def _enter_round(self, round_id: RoundId, now_s: float, made: bool = True) -> list[Effect]:
        """Refuse a round that is over; drop the shadow of an earlier one. made: it needs the shard in memory."""
        if made and self.made is None:
            raise Refused(RefusalCode.BUSY, "this slave is not configured: send Configure first", 0.5)
        if round_id < self._newest_round:
            raise Refused(RefusalCode.STALE_EPOCH, f"round {round_id} is over, {self._newest_round} is known here")
        self._newest_round = round_id
        if self._measured is not None and self._measured.round != round_id:
            self._measured = None
        return self._drop_shadow(now_s)

    def _drop_shadow(self, now_s: float) -> list[Effect]:
        """Give up the shadow, in memory or moved to disk: a round has one of the two, or none."""
        if self.shadow is not None:
            self.phase.move("drop", ShardPhase.READY, now_s)
        shadow = self.shadow or (self.moved[1] if self.moved is not None else None)
        if shadow is None:
            return []
        self.shadow = self.moved = None
        self.snapshots = tuple(info for info in self.snapshots if info != shadow)
        return [effects.DropShadow(shadow)]

    def _ready(self) -> messages.Ready:
        return messages.Ready(self.current.version, self.current.digest) if self.current else messages.Ready(None)


def _made(body: messages.Configure, settings: messages.Settings) -> Made:
    placement_hash = body.placement.placement_hash
    return Made(
        body.layout_hash, placement_hash, body.staging_slots, body.pinned_versions, settings.chunk_bytes,
        settings.memory_files, settings.pull_wire,
    )  # fmt: skip


def to_refusal(refused: Refused) -> messages.Refusal:
    return messages.Refusal(refused.code, refused.sentence, refused.retry_after_s)


def _refusal_of(command: JobCommand, refusal: messages.Refusal) -> messages.SlaveBody:
    if isinstance(command, messages.Configure):
        return messages.ConfigureRefused(refusal)
    return messages.RoundRefused(command.round, type(command).__name__.lower(), refusal)


def warn(key: str, sentence: str, cause: str = "") -> Effect:
    return effects.Log(logging.WARNING, key, sentence, cause)


MAX_SUMS = 528
"""Most entries of a Gram matrix in a line of the tape, those of 32 pushes: the line stays below 20 KB."""


def _sums(blocks: Sequence[messages.BlockGram]) -> tuple[list[str] | None, list[int] | None]:
    """Sums of the measurements over the blocks, for the tape: its reader can add them up to the judgement's matrix."""
    if not blocks or len(blocks[0].gram) > MAX_SUMS:
        return None, None
    gram = [repr(sum(entries)) for entries in zip(*(block.gram for block in blocks), strict=True)]
    counts = [sum(entries) for entries in zip(*(block.nonfinite_elems for block in blocks), strict=True)]
    return gram, counts
