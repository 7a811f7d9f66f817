"""Takes this slave's part of the model through rounds: load, measure, prepare, commit or abort.

One job at a time works on memory; commands that come meanwhile wait (state/slave.py keeps them in order), so
there are no races here. Commands may be sent again at any time: a repeated one is answered again, never done
twice. A shadow leaves only by COMMIT, ABORT, a later round or the load of another version, so that a logged
COMMIT can always be completed (I5 of docs/architecture.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import RoundId, SlaveId
from dips.core.layout import Block
from dips.core.machine import MachineHistory, Phase, TransitionTable
from dips.core.messages import (
    AbortRound,
    BlockGram,
    Commit,
    Configure,
    ConfigureRefused,
    Flipped,
    ListShard,
    Measure,
    Measured,
    MoveBlocks,
    PlacementSpec,
    Prepare,
    Prepared,
    Ready,
    Refusal,
    Settings,
    ShardList,
    SnapshotInfo,
    StagedPush,
)
from dips.core.placement import Placement, shard_bytes_needed
from dips.slave.state import effects, events
from dips.slave.state.effects import Effect
from dips.slave.state.jobs import Job, JobBody, Made, Saving, is_load, round_refused, say_failed, to_refusal, warn
from dips.slave.state.staging import Slots

# ---- checks ----------------------------------------------------------------------------------------------------------
#
# Checks Configure, Prepare, MoveBlocks and the run's settings before a slave acts on them. Pure; raises Refused.


MAX_WINDOW_CHUNKS = 64
"""Longest window: the data port's queues hold this many messages for each peer; more could overflow them silently."""

MIN_CHUNK_BYTES = 1024
"""Smallest chunk size: smaller ones would spend more on headers than on parameters."""


def own_blocks(slave_id: str, configure: Configure | MoveBlocks) -> list[Block]:
    """The blocks that the placement gives this slave, in block-id order. Raises Refused(CONFIG or LAYOUT)."""
    layout, spec = configure.layout, configure.placement
    if layout.layout_hash != configure.layout_hash:
        raise Refused(
            RefusalCode.LAYOUT,
            "the layout's hash does not fit the layout: master and slave differ in release",
        )
    placement = placement_of(spec, len(layout.blocks))
    if slave_id not in placement.slaves:
        names = ", ".join(placement.slaves)
        raise Refused(RefusalCode.CONFIG, f"the placement does not name slave {slave_id!r}: it has {names}")
    return placement.blocks_of(SlaveId(slave_id), layout)


def placement_of(spec: PlacementSpec, n_blocks: int) -> Placement:
    """The placement that a message carries. Raises Refused(CONFIG) unless it covers the layout and has its hash."""
    names = tuple(SlaveId(address.slave_id) for address in spec.slaves)
    if len(spec.slave_of_block) != n_blocks or any(not 0 <= i < len(names) for i in spec.slave_of_block):
        raise Refused(RefusalCode.CONFIG, f"the placement does not cover the layout's {n_blocks} blocks")
    placement = Placement(names, spec.slave_of_block)
    if placement.placement_hash != spec.placement_hash:
        raise Refused(RefusalCode.CONFIG, "the placement's hash does not fit it: master and slave differ in release")
    return placement


def check_move(slave_id: str, move: MoveBlocks, current: SnapshotInfo | None) -> None:
    """Check that blocks can be moved. Raises Refused when this slave does not hold the version, or a source has no
    address."""
    sources = placement_of(move.sources, len(move.layout.blocks))
    here = current.version if current else None
    if slave_id in sources.slaves and here != move.from_version:
        raise Refused(
            RefusalCode.VERSION_GONE, f"round {move.round} moves blocks of {move.from_version}, here is {here}"
        )
    if move.to_version <= move.from_version:
        raise Refused(RefusalCode.MALFORMED, f"round {move.round} goes from {move.from_version} to {move.to_version}")
    wanted = {sources.slave_of_block[block.block_id] for block in own_blocks(slave_id, move)}
    for index in sorted(wanted):
        address = move.sources.slaves[index]
        if address.slave_id != slave_id and not address.data_endpoint:
            raise Refused(RefusalCode.BUSY, f"slave {address.slave_id} has no address: it is away", 1.0)


def check_memory(
    blocks: Sequence[Block], configure: Configure | MoveBlocks, chunk_bytes: int, memory_bytes: int
) -> None:
    """Check, before anything is allocated, that the blocks fit this slave's memory. Raises Refused(MEMORY)."""
    n_elems = sum(block.n_elems for block in blocks)
    slots, pins = configure.staging_slots, configure.pinned_versions
    needed = shard_bytes_needed((block.n_elems for block in blocks), chunk_bytes, slots, pins)
    if needed > memory_bytes:
        raise Refused(
            RefusalCode.MEMORY,
            f"{n_elems} elements with {slots} staging slots and {pins} pinned versions need {needed} bytes, "
            f"this slave may use {memory_bytes}: raise its memory_bytes, start more slaves, or serve fewer clusters",
        )


def check_settings(settings: Settings, max_chunk_bytes: int) -> None:
    """Check that the run's frames fit the limits that the data port was bound with. Raises Refused(CONFIG)."""
    size = settings.chunk_bytes
    if not MIN_CHUNK_BYTES <= size <= max_chunk_bytes or size % 4:
        raise Refused(
            RefusalCode.CONFIG,
            f"the run's chunk_bytes is {size}; this slave takes multiples of 4 from {MIN_CHUNK_BYTES} to "
            f"{max_chunk_bytes}: raise the slave's max_chunk_bytes or lower the master's chunk_bytes",
        )
    if not 1 <= settings.window_chunks <= MAX_WINDOW_CHUNKS:
        raise Refused(
            RefusalCode.CONFIG,
            f"the run's window_chunks is {settings.window_chunks}, slaves take 1 to {MAX_WINDOW_CHUNKS}: lower it "
            "on the master",
        )


def check_load(configure: Configure, current: SnapshotInfo | None, snapshots: Sequence[SnapshotInfo]) -> None:
    """Raises Refused(SEED_EXISTS) when the master knows no version and this slave holds committed ones.

    `empty` says that the master knows of them: none is common to all slaves, and a cluster brings the parameters.
    """
    held = [info for info in (*snapshots, *([current] if current else [])) if info.committed]
    if configure.load is None and held and not configure.empty:
        raise Refused(
            RefusalCode.SEED_EXISTS,
            f"this slave holds version {max(info.version for info in held)} of the run and the master knows none: "
            "restore the master's journal, or give the slave an empty directory to begin again",
        )


def find_load(configure: Configure, candidates: Sequence[SnapshotInfo]) -> SnapshotInfo | None:
    """The snapshot that Configure asks for, committed ones before shadows, else the one that it has as its origin.

    Raises Refused(VERSION_GONE).
    """
    if configure.load is None:
        return None
    names = [(configure.load, configure.load_round)]
    if configure.origin is not None:
        names.append((configure.origin, configure.origin_round))
    for name in names:
        fits = [info for info in candidates if (info.version, info.round) == name and _fits(info, configure)]
        if fits:
            return max(fits, key=lambda info: info.committed)
    held = ", ".join(f"{info.version} ({info.round})" for info in candidates) or "none"
    raise Refused(
        RefusalCode.VERSION_GONE,
        f"no verified snapshot of version {configure.load} ({configure.load_round}) with the digest of its COMMIT "
        f"is here (here: {held})",
    )


def _fits(info: SnapshotInfo, configure: Configure) -> bool:
    return (
        info.digest == configure.load_digest
        and info.layout_hash == configure.layout_hash
        and info.placement_hash == configure.placement.placement_hash
    )


def check_prepare(prepare: Prepare, current: SnapshotInfo | None, snapshots: Sequence[SnapshotInfo]) -> None:
    """Raises Refused when the round does not start from the version in memory, or the command is not consistent.

    snapshots: those on disk; parameters that a cluster donates must be on a newer timeline than any of them.
    """
    here = current.version if current else None
    newest = max((info.version for info in snapshots if info.committed), default=None)
    if here is None and prepare.from_version is None and newest and prepare.to_version.timeline <= newest.timeline:
        raise Refused(RefusalCode.SEED_EXISTS, f"round {prepare.round} would seed over version {newest} on disk")
    if prepare.from_version is None and here is not None:
        raise Refused(RefusalCode.SEED_EXISTS, f"round {prepare.round} would seed over version {here}")
    if prepare.from_version != here:
        raise Refused(
            RefusalCode.VERSION_GONE,
            f"round {prepare.round} starts from {prepare.from_version}, this slave is at {here}",
        )
    if here is not None and prepare.to_version <= here:
        raise Refused(RefusalCode.MALFORMED, f"round {prepare.round} goes from {here} back to {prepare.to_version}")
    n_accepted = len(prepare.accepted)
    if not n_accepted or len(prepare.weights) != n_accepted or (here is None and n_accepted != 1):
        raise Refused(
            RefusalCode.MALFORMED,
            f"round {prepare.round} has {n_accepted} pushes and {len(prepare.weights)} weights",
        )
    scalars = (
        *prepare.weights,
        prepare.scale,
        prepare.outer_lr,
        prepare.momentum_decay,
        prepare.momentum_lookahead,
        prepare.gradient_weight,
        prepare.averaged_share,
    )
    if not all(math.isfinite(value) for value in scalars):
        raise Refused(RefusalCode.NONFINITE, f"round {prepare.round} has a weight, scale or rate that is not finite")


# ---- shard -----------------------------------------------------------------------------------------------------------


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


_P = ShardPhase
BUSY = frozenset({_P.LOADING, _P.MEASURING, _P.PREPARING, _P.COMMITTING, _P.LISTING, _P.MOVING})

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
        (_P.READY, "list"): {_P.LISTING},
        (_P.LISTING, "done"): {_P.READY},
        (_P.LISTING, "failed"): {_P.READY},
        (_P.EMPTY, "move"): {_P.MOVING},
        (_P.READY, "move"): {_P.MOVING},
        (_P.MOVING, "done"): {_P.EMPTY, _P.READY},
        (_P.MOVING, "failed"): {_P.EMPTY, _P.READY},
    },
)


class ShardState:
    """State of the shard. memory_bytes: most that parameters may use here. snapshots: verified ones found at start."""

    def __init__(
        self,
        slave_id: str,
        memory_bytes: int,
        max_chunk_bytes: int,
        snapshots: Sequence[SnapshotInfo],
        slots: Slots,
        story: MachineHistory,
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
        self._prepared: Prepare | None = None
        self.moved: tuple[MoveBlocks, SnapshotInfo] | None = None
        """The shard that a RESHARD asked for and that is on disk, until it is loaded or given up."""
        self.saving = Saving(story)

    @property
    def busy(self) -> bool:
        return self.phase.now in BUSY

    def offers(self) -> tuple[SnapshotInfo, ...]:
        """Versions that a master may ask to load, newest first: those on disk, and the one that only memory holds."""
        found = {(info.version, info.round): info for info in self.snapshots}
        for info in (self.shadow, self.current):
            if info is not None:
                found[(info.version, info.round)] = info
        return tuple(info for _, info in sorted(found.items(), reverse=True))

    def must_save_first(self, body: Configure, settings: Settings) -> bool:
        """Whether only memory holds the version asked for and it must be written to disk first.

        Either memory must be made again, or a master that came back with durability "sync" relies on Ready for that.
        """
        disk_first = is_durable(settings) or self.made != _made(body, settings)
        return self.saving.behind and is_load(self.current, body) and disk_first

    # ---- commands; only called while not busy ----

    def configure(self, body: Configure, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        """Make memory and load the version asked for; Ready at once when both are there already."""
        out: list[Effect] = []
        if self.moved is not None and not is_load(self.moved[1], body):
            out = self._drop_moved()
        try:
            return out + self._configure(body, settings, cause, now_s)
        except Refused as refused:
            warning = warn("configure", refused.sentence, cause)
            return [*out, effects.SendUp(ConfigureRefused(to_refusal(refused))), warning]

    def _configure(self, body: Configure, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        check_settings(settings, self._max_chunk_bytes)
        blocks = own_blocks(self._slave_id, body)
        check_memory(blocks, body, settings.chunk_bytes, self._memory_bytes)
        check_load(body, self.current, self.snapshots)
        made, durable = _made(body, settings), is_durable(settings)
        if made == self.made:
            if self.current is None if body.load is None else is_load(self.current, body):
                return [effects.SendUp(self._ready())]
            if self.shadow is not None and is_load(self.shadow, body):
                return self._begin_commit("configure", body, durable, cause, now_s)
        source = find_load(body, self.snapshots)
        self.made, self.current, self.shadow, self._measured = made, None, None, None
        self.moved = None
        self._slots.clear()
        self.saving.dropped()
        job = self._begin("configure", ShardPhase.LOADING, body, cause, now_s)
        return [self._run(effects.RunLoad(job, body, settings.chunk_bytes, source))]

    def measure(self, body: Measure, cause: str, now_s: float) -> list[Effect]:
        """Begin, or answer again, the Gram matrices of a round."""
        if self._measured is not None and self._measured.round == body.round:
            return [effects.SendUp(self._measured)]
        out: list[Effect] = []
        try:
            out = self._enter_round(body.round, now_s)
            if self.current is None or self.current.version != body.version:
                here = self.current.version if self.current else None
                raise Refused(RefusalCode.VERSION_GONE, f"round {body.round} measures {body.version}, here is {here}")
            if not body.participants:
                raise Refused(RefusalCode.MALFORMED, f"round {body.round} has no participants to measure")
            rows = self._rows(body.participants)
        except Refused as refused:
            return [*out, round_refused(body.round, "measure", refused)]
        job = self._begin("measure", ShardPhase.MEASURING, body, cause, now_s, rows)
        bases = tuple(self._slots.base_of(push.push) for push in body.participants)
        return [*out, effects.RunMeasure(job, body.round, rows, bases)]

    def prepare(self, body: Prepare, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        """Begin, or answer again, the shadow of a round. A command that differs in anything is computed again."""
        if self.shadow is not None and self._prepared == body:
            return [effects.SendUp(Prepared(body.round, self.shadow.digest))]
        out: list[Effect] = []
        try:
            out = self._enter_round(body.round, now_s)
            check_prepare(body, self.current, self.snapshots)
            rows = self._rows(body.accepted)
        except Refused as refused:
            return [*out, round_refused(body.round, "prepare", refused)]
        durable = is_durable(settings)
        job = self._begin("prepare", ShardPhase.PREPARING, body, cause, now_s, rows, durable)
        return [*out, effects.RunPrepare(job, body, rows, durable)]

    def list_shard(self, body: ListShard, cause: str, now_s: float) -> list[Effect]:
        """A RESHARD begins: send the checksums of all chunks of the version."""
        out: list[Effect] = []
        try:
            out = self._enter_round(body.round, now_s)
            if self.current is None or self.current.version != body.version:
                here = self.current.version if self.current else None
                raise Refused(RefusalCode.VERSION_GONE, f"round {body.round} moves {body.version}, here is {here}")
        except Refused as refused:
            return [*out, round_refused(body.round, "listshard", refused)]
        return [*out, effects.RunList(self._begin("list", ShardPhase.LISTING, body, cause, now_s))]

    def move(self, body: MoveBlocks, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        """Begin, or answer again, the shadow of another placement. A slave without blocks begins with it."""
        if self.moved is not None and self.moved[0] == body:
            return [effects.SendUp(Prepared(body.round, self.moved[1].digest))]
        out: list[Effect] = []
        try:
            out = self._enter_round(body.round, now_s, made=False)
            check_settings(settings, self._max_chunk_bytes)
            blocks = own_blocks(self._slave_id, body)
            check_memory(blocks, body, settings.chunk_bytes, self._memory_bytes)
            check_move(self._slave_id, body, self.current)
        except Refused as refused:
            return [*out, round_refused(body.round, "moveblocks", refused)]
        job = self._begin("move", ShardPhase.MOVING, body, cause, now_s)
        return [*out, effects.RunMove(job, body, settings.chunk_bytes)]

    def cancel_move(self, round_id: RoundId | None = None) -> list[Effect]:
        """End a move that is under way, any one or that of a round, because its result is no longer needed."""
        job = self.job
        if job is None or not isinstance(job.body, MoveBlocks) or round_id not in (None, job.body.round):
            return []
        return [effects.CancelMove(job.number)]

    def commit(self, body: Commit, settings: Settings, cause: str, now_s: float) -> list[Effect]:
        """Make the shadow the current version, or answer again that it is."""
        if self.current is not None and (self.current.round, self.current.version) == (
            body.round,
            body.version,
        ):
            return [effects.SendUp(Flipped(body.round, body.version))]
        if self.shadow is None or (self.shadow.round, self.shadow.version) != (body.round, body.version):
            gone = Refused(
                RefusalCode.VERSION_GONE,
                f"no shadow of round {body.round} is in memory: send Configure with that version to load",
            )
            return [round_refused(body.round, "commit", gone)]
        return self._begin_commit("commit", body, is_durable(settings), cause, now_s)

    def abort(self, body: AbortRound, cause: str, now_s: float) -> list[Effect]:
        """Drop the shadow of the round, if there is one; rounds up to this one never begin again."""
        self._newest_round = max(self._newest_round, body.round)
        self._measured = None
        out: list[Effect] = [effects.Record("aborted", cause, {"round": str(body.round), "reason": body.reason})]
        if self.shadow is not None and self.shadow.round == body.round:
            out += self._drop_shadow(now_s)
        if self.moved is not None and self.moved[0].round == body.round:
            out += self._drop_moved() + self._save(now_s)
        return out

    # ---- completions ----

    def completed(self, event: events.JobEvent, now_s: float) -> list[Effect]:
        """Take the end of the job under way. Ends of other jobs cannot come: there is only ever one."""
        job = self.job
        if job is None or event.job != job.number:
            return [warn("job", f"the end of job {event.job} came twice")]
        self.job = None
        if isinstance(event, events.JobFailed):
            out = self._failed(job, event, now_s)
        else:
            out = self._succeeded(job, event, now_s)
        return out + self._save(now_s)

    def save_event(self, event: events.SaveEvent, now_s: float) -> list[Effect]:
        """Take the result of a save; the next one begins when there is more to save."""
        out: list[Effect] = []
        match event:
            case events.Saved(number, info, snapshots):
                self.snapshots = snapshots
                out = self.saving.saved(number, info, now_s)
            case events.SaveFailed(_, refusal):
                out = self.saving.failed(refusal, now_s)
            case events.SaveAgain():
                self.saving.again(now_s)
        return out + self._save(now_s)

    def _save(self, now_s: float) -> list[Effect]:
        """Begin a save, but not while memory flips or is made again, nor while a RESHARD has a file: it is called again
        at its end."""
        waits = self.phase.now in (_P.LOADING, _P.COMMITTING, _P.MOVING) or self.moved is not None
        return [] if waits else self.saving.begin(now_s)

    def _succeeded(self, job: Job, event: events.JobEvent, now_s: float) -> list[Effect]:
        """The tape is written before the answer that it proves: a kill between the two must leave the evidence."""
        if isinstance(event, events.LoadDone):
            return self._loaded(job, event, now_s)
        if isinstance(event, events.MeasureDone) and isinstance(job.body, Measure):
            self.phase.move("done", ShardPhase.READY, now_s, job.cause)
            self._measured = Measured(job.body.round, event.blocks, event.directions)
            about = _record("measured", job, now_s, None, version=str(job.body.version), **_sums(event.blocks))
            return [about, effects.SendUp(self._measured)]
        if isinstance(event, events.PrepareDone):
            self.phase.move("done", ShardPhase.PREPARED, now_s, job.cause)
            self.shadow, self.snapshots = event.shadow, event.snapshots
            self._prepared = job.body if isinstance(job.body, Prepare) else None
            return [
                _record("prepared", job, now_s, event.shadow, durable=job.durable, finite=True),
                effects.SendUp(Prepared(event.shadow.round, event.shadow.digest)),
            ]
        if isinstance(event, events.CommitDone):
            return self._flipped(job, event, now_s)
        if isinstance(event, events.ListDone) and isinstance(job.body, ListShard):
            self.phase.move("done", ShardPhase.READY, now_s, job.cause)
            return [
                _record("listed", job, now_s, None, version=str(job.body.version)),
                effects.SendUp(ShardList(job.body.round, event.theta, event.momentum)),
            ]
        if isinstance(event, events.MoveDone) and isinstance(job.body, MoveBlocks):
            self.phase.move("done", self._still(), now_s, job.cause)
            self.moved, self.snapshots = (job.body, event.shadow), event.snapshots
            return [
                _record("prepared", job, now_s, event.shadow, durable=True, finite=True),
                effects.SendUp(Prepared(event.shadow.round, event.shadow.digest)),
            ]
        return [warn("job", f"job {event.job} ended as {type(event).__name__}, which it cannot")]

    def _loaded(self, job: Job, event: events.LoadDone, now_s: float) -> list[Effect]:
        self.phase.move("done", ShardPhase.READY, now_s, job.cause)
        self.current, self.snapshots = event.current, event.snapshots
        self.saving.loaded(event.current)
        out: list[Effect] = []
        if isinstance(job.body, Configure) and job.body.origin is not None and event.current is not None:
            out.append(_record("rolled_back", job, now_s, event.current, origin=str(job.body.origin)))
        return [*out, _record("configured", job, now_s, event.current), effects.SendUp(self._ready())]

    def _flipped(self, job: Job, event: events.CommitDone, now_s: float) -> list[Effect]:
        self.phase.move("done", ShardPhase.READY, now_s, job.cause)
        self.current, self.shadow, self.snapshots = event.current, None, event.snapshots
        self._measured = None
        assert isinstance(job.body, Configure | Commit)
        self.saving.committed(event.current, job.body.commit_record, job.durable)
        answer = (
            self._ready() if isinstance(job.body, Configure) else Flipped(event.current.round, event.current.version)
        )
        commit_hash = event.current.commit_hash.hex()
        about = _record("committed", job, now_s, event.current, commit_hash=commit_hash, durable=job.durable)
        return [about, effects.SendUp(answer)]

    def _failed(self, job: Job, event: events.JobFailed, now_s: float) -> list[Effect]:
        refusal = event.refusal
        if event.snapshots is not None:
            self.snapshots = event.snapshots
        if refusal.retry_after_s > 0 and self.phase.now in (ShardPhase.LOADING, ShardPhase.COMMITTING):
            return self._again(job, refusal, now_s)
        back = {
            ShardPhase.LOADING: ShardPhase.EMPTY,
            ShardPhase.COMMITTING: ShardPhase.PREPARED,
            ShardPhase.MOVING: self._still(),
        }.get(self.phase.now, ShardPhase.READY)
        loading = self.phase.now is ShardPhase.LOADING
        self.phase.move("failed", back, now_s, job.cause, refusal.sentence)
        if not loading:
            return say_failed(job, refusal)
        self.made = None
        source = self._durable_work.source if isinstance(self._durable_work, effects.RunLoad) else None
        if source is None or source in self.snapshots:
            return say_failed(job, refusal)
        gone = f"the snapshot of version {source.version} broke since it was offered: report the snapshots again"
        return [*say_failed(job, refusal), effects.CloseLink(gone)]

    def _again(self, job: Job, refusal: Refusal, now_s: float) -> list[Effect]:
        """After its commit point a round cannot be aborted: try until the disk accepts it, and log the cause."""
        assert self._durable_work is not None
        self.phase.move("retry", self.phase.now, now_s, job.cause, refusal.sentence)
        self._jobs += 1
        self.job = replace(job, number=self._jobs)
        work = replace(self._durable_work, job=self._jobs, delay_s=refusal.retry_after_s)
        return [*say_failed(job, refusal), work]

    # ---- helpers ----

    def _begin(
        self,
        input_name: str,
        to: ShardPhase,
        body: JobBody,
        cause: str,
        now_s: float,
        rows: tuple[int, ...] = (),
        durable: bool = True,
    ) -> int:
        self.phase.move(input_name, to, now_s, cause)
        self._jobs += 1
        self.job = Job(self._jobs, body, cause, now_s, rows, durable)
        return self._jobs

    def _begin_commit(
        self, input_name: str, body: Configure | Commit, durable: bool, cause: str, now_s: float
    ) -> list[Effect]:
        assert self.shadow is not None
        job = self._begin(input_name, ShardPhase.COMMITTING, body, cause, now_s, durable=durable)
        return [self._run(effects.RunCommit(job, self.shadow, body.commit_hash, body.commit_record, durable))]

    def _run(self, work: effects.RunLoad | effects.RunCommit) -> Effect:
        """Remember the work, because a disk that fails now may take it later."""
        self._durable_work = work
        return work

    def _still(self) -> ShardPhase:
        """The phase after a move, which changes nothing in memory."""
        return ShardPhase.EMPTY if self.made is None else ShardPhase.READY

    def _drop_moved(self) -> list[Effect]:
        assert self.moved is not None
        shadow, self.moved = self.moved[1], None
        self.snapshots = tuple(info for info in self.snapshots if info != shadow)
        return [effects.DropMoved(shadow)]

    def _enter_round(self, round_id: RoundId, now_s: float, made: bool = True) -> list[Effect]:
        """Refuse a round that is over; drop the shadow of an earlier one. made: it needs the shard in memory."""
        if made and self.made is None:
            raise Refused(RefusalCode.BUSY, "this slave is not configured: send Configure first", 0.5)
        if round_id < self._newest_round:
            raise Refused(RefusalCode.STALE_EPOCH, f"round {round_id} is over, {self._newest_round} is known here")
        self._newest_round = round_id
        if self._measured is not None and self._measured.round != round_id:
            self._measured = None
        out = self._drop_moved() if self.moved is not None else []
        return out + (self._drop_shadow(now_s) if self.shadow is not None else [])

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


def _made(body: Configure, settings: Settings) -> Made:
    placement_hash = body.placement.placement_hash
    return Made(body.layout_hash, placement_hash, body.staging_slots, body.pinned_versions, settings.chunk_bytes)


def is_durable(settings: Settings) -> bool:
    """Whether versions must be on disk before they are PREPARED."""
    return settings.durability != "async"


def _record(kind: str, job: Job, now_s: float, about: SnapshotInfo | None, **more: object) -> effects.Record:
    fields: dict[str, object] = {"took_s": round(now_s - job.began_s, 6)}
    if about is not None:
        fields |= {"version": str(about.version), "round": str(about.round), "digest": about.digest.hex()}
    elif not isinstance(job.body, Configure):
        fields["round"] = str(job.body.round)
    return effects.Record(kind, job.cause, fields | more)


MAX_SUMS = 528
"""Most entries of a Gram matrix in a line of the tape, those of 32 pushes: the line stays below 20 KB."""


def _sums(blocks: Sequence[BlockGram]) -> dict[str, object]:
    """Sums of the measurements over the blocks, for the tape: its reader can add them up to the judgement's matrix."""
    if not blocks or len(blocks[0].gram) > MAX_SUMS:
        return {}
    gram = [repr(sum(entries)) for entries in zip(*(block.gram for block in blocks), strict=True)]
    counts = [sum(entries) for entries in zip(*(block.nonfinite_elems for block in blocks), strict=True)]
    return {"gram": gram, "nonfinite_elems": counts}
