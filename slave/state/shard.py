"""This slave's part of the model through its rounds: load, measure, prepare, commit or abort.

One job at a time works on memory; commands that come meanwhile wait (state/slave.py keeps them in order), so
nothing here ever races. Commands may be sent again at any time: a repeated one is answered again, never done
twice. A shadow leaves only by COMMIT, ABORT, a later round or the load of another version, so that a logged
COMMIT can always be completed (I5 of docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId
from dips.core.machine import Phase, Story, TransitionTable
from dips.core.messages import (
    AbortRound,
    Commit,
    Configure,
    ConfigureRefused,
    Flipped,
    Measure,
    Measured,
    Prepare,
    Prepared,
    Ready,
    Refusal,
    RoundRefused,
    Settings,
    SnapshotInfo,
    StagedPush,
)
from dips.slave.state import checks, effects, events
from dips.slave.state.effects import Effect
from dips.slave.state.slots import Slots


class ShardPhase(Enum):
    EMPTY = "EMPTY"
    LOADING = "LOADING"
    READY = "READY"
    MEASURING = "MEASURING"
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    COMMITTING = "COMMITTING"


_P = ShardPhase
BUSY = frozenset({_P.LOADING, _P.MEASURING, _P.PREPARING, _P.COMMITTING})

SHARD_TABLE: TransitionTable[ShardPhase] = TransitionTable(
    "slave shard",
    _P.EMPTY,
    {
        (_P.EMPTY, "configure"): {_P.LOADING},
        (_P.READY, "configure"): {_P.LOADING},
        (_P.PREPARED, "configure"): {_P.LOADING, _P.COMMITTING},
        (_P.LOADING, "done"): {_P.READY},
        (_P.LOADING, "failed"): {_P.EMPTY},
        (_P.LOADING, "retry"): {_P.LOADING},
        (_P.READY, "measure"): {_P.MEASURING},
        (_P.MEASURING, "done"): {_P.READY},
        (_P.MEASURING, "failed"): {_P.READY},
        (_P.READY, "prepare"): {_P.PREPARING},
        (_P.PREPARING, "done"): {_P.PREPARED},
        (_P.PREPARING, "failed"): {_P.READY},
        (_P.PREPARED, "drop"): {_P.READY},
        (_P.PREPARED, "commit"): {_P.COMMITTING},
        (_P.COMMITTING, "done"): {_P.READY},
        (_P.COMMITTING, "failed"): {_P.PREPARED},
        (_P.COMMITTING, "retry"): {_P.COMMITTING},
    },
)


@dataclass(frozen=True)
class Made:
    """What memory was made for; an equal one need not be made again."""

    layout_hash: bytes
    placement_hash: bytes
    staging_slots: int
    pinned_versions: int
    chunk_bytes: int


@dataclass(frozen=True)
class Job:
    """The one piece of work under way. slots: rows of staging memory that it reads."""

    number: int
    body: Configure | Measure | Prepare | Commit
    cause: str
    began_s: float
    slots: tuple[int, ...] = ()


class ShardState:
    """memory_bytes: what parameters may use here. snapshots: what a start found on disk, verified."""

    def __init__(
        self,
        slave_id: str,
        memory_bytes: int,
        max_chunk_bytes: int,
        snapshots: Sequence[SnapshotInfo],
        slots: Slots,
        story: Story,
    ) -> None:
        self._slave_id = slave_id
        self._memory_bytes = memory_bytes
        self._max_chunk_bytes = max_chunk_bytes
        self._slots = slots
        self.phase: Phase[ShardPhase] = Phase(SHARD_TABLE, story)
        self.snapshots = tuple(snapshots)
        self.current: SnapshotInfo | None = None
        self.shadow: SnapshotInfo | None = None
        self.made: Made | None = None
        self.job: Job | None = None
        self._jobs = 0
        self._durable_work: effects.RunLoad | effects.RunCommit | None = None
        self._measured: Measured | None = None
        self._newest_round = RoundId(0, 0)

    @property
    def busy(self) -> bool:
        return self.phase.now in BUSY

    # ---- commands; only called while not busy ----

    def configure(self, body: Configure, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        """Make memory and hold the version asked for; at once Ready when both stand already."""
        try:
            return self._configure(body, settings, cause, now_s)
        except Refused as refused:
            return [effects.SendUp(ConfigureRefused(_refusal(refused))), _log("configure", refused.sentence)]

    def _configure(self, body: Configure, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        checks.check_settings(settings, self._max_chunk_bytes)
        blocks = checks.own_blocks(self._slave_id, body)
        checks.check_memory(blocks, body, self._memory_bytes)
        checks.check_load(body, self.current, self.snapshots)
        made = Made(
            body.layout_hash,
            body.placement.placement_hash,
            body.staging_slots,
            body.pinned_versions,
            settings.chunk_bytes,
        )
        if made == self.made:
            if self.current is None if body.load is None else _is(self.current, body):
                return [effects.SendUp(self._ready())]
            if self.shadow is not None and _is(self.shadow, body):
                return self._begin_commit("configure", body, body.commit_hash, body.commit_record, cause, now_s)
        source = checks.find_load(body, self.snapshots)
        self.made, self.current, self.shadow, self._measured = made, None, None, None
        self._slots.clear()
        job = self._begin("configure", ShardPhase.LOADING, body, cause, now_s)
        return [self._run(effects.RunLoad(job, body, settings.chunk_bytes, source))]

    def measure(self, body: Measure, cause: str, now_s: float) -> list[Effect]:
        """Begin, or answer again, the Gram matrices of a round."""
        if self._measured is not None and self._measured.round == body.round:
            return [effects.SendUp(self._measured)]
        try:
            out = self._enter_round(body.round, now_s)
            if self.current is None or self.current.version != body.version:
                here = self.current.version if self.current else None
                raise Refused(RefusalCode.VERSION_GONE, f"round {body.round} measures {body.version}, here is {here}")
            if not body.participants:
                raise Refused(RefusalCode.MALFORMED, f"round {body.round} has no participants to measure")
            rows = self._rows(body.participants)
        except Refused as refused:
            return [_round_refused(body.round, "measure", refused)]
        job = self._begin("measure", ShardPhase.MEASURING, body, cause, now_s, rows)
        return [*out, effects.RunMeasure(job, body.round, rows)]

    def prepare(self, body: Prepare, cause: str, now_s: float) -> list[Effect]:
        """Begin, or answer again, the shadow of a round."""
        if self.shadow is not None and self.shadow.round == body.round:
            return [effects.SendUp(Prepared(body.round, self.shadow.digest))]
        try:
            out = self._enter_round(body.round, now_s)
            checks.check_prepare(body, self.current)
            rows = self._rows(body.accepted)
        except Refused as refused:
            return [_round_refused(body.round, "prepare", refused)]
        job = self._begin("prepare", ShardPhase.PREPARING, body, cause, now_s, rows)
        return [*out, effects.RunPrepare(job, body, rows)]

    def commit(self, body: Commit, cause: str, now_s: float) -> list[Effect]:
        """Make the shadow the current version, or say again that it is."""
        if self.current is not None and (self.current.round, self.current.version) == (
            body.round,
            body.version,
        ):
            return [effects.SendUp(Flipped(body.round, body.version))]
        if self.shadow is None or (self.shadow.round, self.shadow.version) != (body.round, body.version):
            gone = Refused(
                RefusalCode.VERSION_GONE,
                f"no shadow of round {body.round} stands in memory: send Configure with that version to load",
            )
            return [_round_refused(body.round, "commit", gone)]
        return self._begin_commit("commit", body, body.commit_hash, body.commit_record, cause, now_s)

    def abort(self, body: AbortRound, cause: str, now_s: float) -> list[Effect]:
        """Drop the shadow of the round, if it stands; rounds up to this one never begin again."""
        self._newest_round = max(self._newest_round, body.round)
        self._measured = None
        out: list[Effect] = [effects.Record("aborted", cause, {"round": str(body.round), "reason": body.reason})]
        if self.shadow is not None and self.shadow.round == body.round:
            out += self._drop_shadow(now_s)
        return out

    # ---- completions ----

    def completed(self, event: events.JobEvent, now_s: float) -> list[Effect]:
        """Take the end of the job under way. Ends of other jobs cannot come: there is only ever one."""
        job = self.job
        if job is None or event.job != job.number:
            return [_log("job", f"the end of job {event.job} came twice")]
        self.job = None
        if isinstance(event, events.JobFailed):
            return self._failed(job, event.refusal, now_s)
        return self._succeeded(job, event, now_s)

    def _succeeded(self, job: Job, event: events.JobEvent, now_s: float) -> list[Effect]:
        if isinstance(event, events.LoadDone):
            self.phase.move("done", ShardPhase.READY, now_s, job.cause)
            self.current, self.snapshots = event.current, event.snapshots
            return [effects.SendUp(self._ready()), self._record("configured", job, now_s)]
        if isinstance(event, events.MeasureDone) and isinstance(job.body, Measure):
            self.phase.move("done", ShardPhase.READY, now_s, job.cause)
            self._measured = Measured(job.body.round, event.blocks)
            return [effects.SendUp(self._measured), self._record("measured", job, now_s)]
        if isinstance(event, events.PrepareDone):
            self.phase.move("done", ShardPhase.PREPARED, now_s, job.cause)
            self.shadow, self.snapshots = event.shadow, event.snapshots
            return [
                effects.SendUp(Prepared(event.shadow.round, event.shadow.digest)),
                self._record("prepared", job, now_s, event.shadow),
            ]
        if isinstance(event, events.CommitDone):
            return self._flipped(job, event, now_s)
        return [_log("job", f"job {event.job} ended as {type(event).__name__}, which it cannot")]

    def _flipped(self, job: Job, event: events.CommitDone, now_s: float) -> list[Effect]:
        self.phase.move("done", ShardPhase.READY, now_s, job.cause)
        self.current, self.shadow, self.snapshots = event.current, None, event.snapshots
        self._measured = None
        answer = (
            self._ready() if isinstance(job.body, Configure) else Flipped(event.current.round, event.current.version)
        )
        return [effects.SendUp(answer), self._record("committed", job, now_s)]

    def _failed(self, job: Job, refusal: Refusal, now_s: float) -> list[Effect]:
        if refusal.retry_after_s > 0 and self.phase.now in (ShardPhase.LOADING, ShardPhase.COMMITTING):
            return self._again(job, refusal, now_s)
        back = {
            ShardPhase.LOADING: ShardPhase.EMPTY,
            ShardPhase.COMMITTING: ShardPhase.PREPARED,
        }.get(self.phase.now, ShardPhase.READY)
        self.phase.move("failed", back, now_s, job.cause, refusal.sentence)
        if back is ShardPhase.EMPTY:
            self.made = None
        return _say_failed(job, refusal)

    def _again(self, job: Job, refusal: Refusal, now_s: float) -> list[Effect]:
        """After the commit point there is only forward: try until the disk takes it, and say what it waits for."""
        assert self._durable_work is not None
        self.phase.move("retry", self.phase.now, now_s, job.cause, refusal.sentence)
        self._jobs += 1
        self.job = replace(job, number=self._jobs)
        work = replace(self._durable_work, job=self._jobs, delay_s=refusal.retry_after_s)
        return [*_say_failed(job, refusal), work]

    # ---- helpers ----

    def _begin(
        self,
        input_name: str,
        to: ShardPhase,
        body: Configure | Measure | Prepare | Commit,
        cause: str,
        now_s: float,
        rows: tuple[int, ...] = (),
    ) -> int:
        self.phase.move(input_name, to, now_s, cause)
        self._jobs += 1
        self.job = Job(self._jobs, body, cause, now_s, rows)
        return self._jobs

    def _begin_commit(
        self,
        input_name: str,
        body: Configure | Commit,
        commit_hash: bytes,
        record: bytes,
        cause: str,
        now_s: float,
    ) -> list[Effect]:
        assert self.shadow is not None
        job = self._begin(input_name, ShardPhase.COMMITTING, body, cause, now_s)
        return [self._run(effects.RunCommit(job, self.shadow, commit_hash, record))]

    def _run(self, work: effects.RunLoad | effects.RunCommit) -> Effect:
        """Remember the work, because a disk that fails now may take it later."""
        self._durable_work = work
        return work

    def _enter_round(self, round_id: RoundId, now_s: float) -> list[Effect]:
        """Refuse a round that is over; drop what an earlier one left behind."""
        if self.made is None:
            raise Refused(RefusalCode.BUSY, "this slave is not configured: send Configure first", 0.5)
        if round_id < self._newest_round:
            raise Refused(RefusalCode.STALE_EPOCH, f"round {round_id} is over, {self._newest_round} is known here")
        self._newest_round = round_id
        if self._measured is not None and self._measured.round != round_id:
            self._measured = None
        return self._drop_shadow(now_s) if self.shadow is not None else []

    def _drop_shadow(self, now_s: float) -> list[Effect]:
        assert self.shadow is not None
        self.phase.move("drop", ShardPhase.READY, now_s)
        shadow, self.shadow = self.shadow, None
        self.snapshots = tuple(info for info in self.snapshots if info != shadow)
        return [effects.DropShadow(shadow)]

    def _rows(self, pushes: Sequence[StagedPush]) -> tuple[int, ...]:
        """Rows of staging memory of complete pushes, in the order given. Raises Refused(UNKNOWN_PUSH)."""
        return tuple(self._slots.complete_row(push.push, push.attempt) for push in pushes)

    def _ready(self) -> Ready:
        return Ready(self.current.version, self.current.digest) if self.current else Ready(None)

    def _record(self, kind: str, job: Job, now_s: float, info: SnapshotInfo | None = None) -> effects.Record:
        about = info or self.current
        fields: dict[str, object] = {"took_s": round(now_s - job.began_s, 6)}
        if not isinstance(job.body, Configure):
            fields["round"] = str(job.body.round)
        if about is not None:
            fields |= {"version": str(about.version), "digest": about.digest.hex()}
        return effects.Record(kind, job.cause, fields)


def _is(info: SnapshotInfo | None, body: Configure) -> bool:
    return info is not None and (info.version, info.round, info.digest) == (
        body.load,
        body.load_round,
        body.load_digest,
    )


def _refusal(refused: Refused) -> Refusal:
    return Refusal(refused.code, refused.sentence, refused.retry_after_s)


def _round_refused(round_id: RoundId, command: str, refused: Refused) -> Effect:
    return effects.SendUp(RoundRefused(round_id, command, _refusal(refused)))


def _say_failed(job: Job, refusal: Refusal) -> list[Effect]:
    if isinstance(job.body, Configure):
        return [effects.SendUp(ConfigureRefused(refusal)), _log("configure", refusal.sentence)]
    command = type(job.body).__name__.lower()
    return [
        effects.SendUp(RoundRefused(job.body.round, command, refusal)),
        _log(command, f"round {job.body.round}: {refusal.sentence}"),
    ]


def _log(key: str, sentence: str) -> Effect:
    return effects.Log("WARNING", key, sentence)
