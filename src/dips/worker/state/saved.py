"""A session as a value, and its JSON form: everything that a cluster needs to resume in another process.

Reading checks everything that the session relies on, because the file may be old, of another release, or damaged in
a way that its checksum does not show (written wrongly). Raises only SavedStateError, with a sentence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dips.core.errors import ConfigError, DipsError
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.messages import DataRange, Verdict, VerdictKind
from dips.core.wire import DIFFERENCES
from dips.worker.state.effects import InstallMode, PushRecord
from dips.worker.state.pulling import Pulling, PullPlan
from dips.worker.state.pushing import OpenPush, Pushing
from dips.worker.state.shared import SharedState
from dips.worker.state.terms import SessionConfig
from dips.worker.state.work import Work

T = TypeVar("T")
Json = Mapping[str, Any]


class SavedStateError(DipsError):
    """The data read is not the state of a session."""


@dataclass(frozen=True)
class SavedPull:
    """The open pull: its purpose, and what happens to the parameters."""

    mode: InstallMode
    at_least: Version | None
    reset_inner: bool = False
    drops: bool = False


@dataclass(frozen=True)
class SavedSession:
    """One session at a step boundary: the fields of worker/state/shared.py and its parts.

    push: the undecided one. lost: pending work used data that another cluster holds, and will be dropped. residual:
    the rounding residual of earlier pushes is saved with the parameters.
    """

    run_id: str
    cluster_id: str
    layout_hash: bytes
    data_digest: bytes
    incarnation: Incarnation
    seq: int
    base: Version
    base_fence: int
    local_steps: int = 0
    tokens: int = 0
    steps_since_snapshot: int = 0
    steps_towards_push: int = 0
    leases_asked: int = 0
    held: tuple[DataRange, ...] = ()
    pending: Work = field(default_factory=Work)
    lost: bool = False
    push: PushRecord | None = None
    pull: SavedPull | None = None
    last_verdict: Verdict | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "cluster_id": self.cluster_id,
            "layout_hash": self.layout_hash.hex(),
            "data_digest": self.data_digest.hex(),
            "incarnation": _of_incarnation(self.incarnation),
            "seq": self.seq,
            "base": _of_version(self.base),
            "base_fence": self.base_fence,
            "local_steps": self.local_steps,
            "tokens": self.tokens,
            "steps_since_snapshot": self.steps_since_snapshot,
            "steps_towards_push": self.steps_towards_push,
            "leases_asked": self.leases_asked,
            "held": [_of_range(item) for item in self.held],
            "pending": _of_work(self.pending),
            "lost": self.lost,
            "push": None if self.push is None else push_to_json(self.push),
            "pull": None if self.pull is None else _of_pull(self.pull),
            "last_verdict": None if self.last_verdict is None else _of_verdict(self.last_verdict),
            "residual": self.residual,
        }

    @classmethod
    def from_json(cls, raw: object) -> SavedSession:
        """The inverse of to_json. Raises SavedStateError for anything else."""
        row = _mapping(raw, "the session")
        return cls(
            _text(row, "run_id"),
            _text(row, "cluster_id"),
            _bytes(row, "layout_hash"),
            _bytes(row, "data_digest"),
            _incarnation(_get(row, "incarnation")),
            _count(row, "seq"),
            _version(_get(row, "base")),
            _count(row, "base_fence"),
            _count(row, "local_steps"),
            _count(row, "tokens"),
            _count(row, "steps_since_snapshot"),
            _count(row, "steps_towards_push"),
            _count(row, "leases_asked"),
            _ranges(_get(row, "held")),
            _work(_get(row, "pending")),
            _flag(row, "lost"),
            _maybe(_get(row, "push"), push_from_json),
            _maybe(_get(row, "pull"), _pull),
            _maybe(_get(row, "last_verdict"), _verdict),
            # Written by this release and later: an older one knew no difference codecs.
            _flag(row, "residual") if "residual" in row else False,
        )


def push_to_json(push: PushRecord) -> dict[str, Any]:
    """The record of a push, as worker/checkpoint_files.py writes it before its first use."""
    return {
        "id": _of_push_id(push.id),
        "base": _of_maybe_version(push.base),
        "fence": push.fence,
        "work": _of_work(push.work),
        "donates": _of_maybe_version(push.donates),
    }


def push_from_json(raw: object) -> PushRecord:
    """The inverse of push_to_json. Raises SavedStateError for anything else."""
    row = _mapping(raw, "a push")
    return PushRecord(
        _push_id(_get(row, "id")),
        _maybe(_get(row, "base"), _version),
        _count(row, "fence"),
        _work(_get(row, "work")),
        _maybe(_get(row, "donates"), _version),
    )


# ---- writing ----


def _of_incarnation(value: Incarnation) -> list[int]:
    return [value.epoch, value.n]


def _of_version(value: Version) -> list[int]:
    return [value.timeline, value.v]


def _of_maybe_version(value: Version | None) -> list[int] | None:
    return None if value is None else _of_version(value)


def _of_push_id(value: PushId) -> list[Any]:
    return [value.cluster, _of_incarnation(value.incarnation), value.seq]


def _of_range(item: DataRange) -> list[int]:
    return [item.lease_id, item.pass_index, item.chunk, item.begin_tokens, item.end_tokens]


def _of_work(work: Work) -> dict[str, Any]:
    return {
        "ranges": [_of_range(item) for item in work.ranges],
        "tokens": work.tokens,
        "steps": work.steps,
        "loss_sum": work.loss_sum,
        "n_losses": work.n_losses,
    }


def _of_pull(pull: SavedPull) -> dict[str, Any]:
    return {
        "mode": pull.mode.name,
        "at_least": _of_maybe_version(pull.at_least),
        "reset_inner": pull.reset_inner,
        "drops": pull.drops,
    }


def _of_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "push": _of_push_id(verdict.push),
        "kind": verdict.kind.name,
        "version": _of_maybe_version(verdict.version),
        "reason": verdict.reason,
        "reset_inner": verdict.reset_inner_optimizer,
        "round": None if verdict.round is None else [verdict.round.epoch, verdict.round.n],
    }


# ---- reading ----


def _maybe(raw: object, read: Callable[[object], T]) -> T | None:
    return None if raw is None else read(raw)


def _mapping(raw: object, what: str) -> Json:
    if not isinstance(raw, Mapping):
        raise SavedStateError(f"{what} is {type(raw).__name__}, not an object with fields")
    return raw


def _get(row: Json, name: str) -> object:
    if name not in row:
        raise SavedStateError(f"the field {name!r} is missing")
    return row[name]


def _text(row: Json, name: str) -> str:
    value = _get(row, name)
    if not isinstance(value, str):
        raise SavedStateError(f"{name} is {value!r}, not a text")
    return value


def _flag(row: Json, name: str) -> bool:
    value = _get(row, name)
    if not isinstance(value, bool):
        raise SavedStateError(f"{name} is {value!r}, not true or false")
    return value


def _bytes(row: Json, name: str) -> bytes:
    try:
        return bytes.fromhex(_text(row, name))
    except ValueError as error:
        raise SavedStateError(f"{name} is not a row of hex digits") from error


def _count(row: Json, name: str) -> int:
    return _number(_get(row, name), name)


def _number(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SavedStateError(f"{name} is {value!r}, not a count")
    return value


def _row(raw: object, length: int, what: str) -> Sequence[Any]:
    if not isinstance(raw, list) or len(raw) != length:
        raise SavedStateError(f"{what} is {raw!r}, not a row of {length}")
    return raw


def _numbers(raw: object, length: int, what: str) -> list[int]:
    return [_number(value, what) for value in _row(raw, length, what)]


def _incarnation(raw: object) -> Incarnation:
    return Incarnation(*_numbers(raw, 2, "an incarnation"))


def _version(raw: object) -> Version:
    return Version(*_numbers(raw, 2, "a version"))


def _push_id(raw: object) -> PushId:
    cluster, incarnation, seq = _row(raw, 3, "a push id")
    if not isinstance(cluster, str):
        raise SavedStateError(f"the push is of cluster {cluster!r}, which is no name")
    return PushId(ClusterId(cluster), _incarnation(incarnation), _number(seq, "a push's number"))


def _ranges(raw: object) -> tuple[DataRange, ...]:
    if not isinstance(raw, list):
        raise SavedStateError(f"ranges are {type(raw).__name__}, not a list")
    ranges = tuple(DataRange(*_numbers(item, 5, "a range")) for item in raw)
    if any(item.tokens <= 0 for item in ranges):
        raise SavedStateError("a range ends before it begins")
    return ranges


def _work(raw: object) -> Work:
    row = _mapping(raw, "work")
    loss_sum = _get(row, "loss_sum")
    if isinstance(loss_sum, bool) or not isinstance(loss_sum, (int, float)) or not math.isfinite(loss_sum):
        raise SavedStateError(f"loss_sum is {loss_sum!r}, not a finite number")
    return Work(
        _ranges(_get(row, "ranges")), _count(row, "tokens"), _count(row, "steps"), float(loss_sum),
        _count(row, "n_losses"),
    )  # fmt: skip


def _pull(raw: object) -> SavedPull:
    row = _mapping(raw, "a pull")
    at_least = _maybe(_get(row, "at_least"), _version)
    return SavedPull(_named(InstallMode, row, "mode"), at_least, _flag(row, "reset_inner"), _flag(row, "drops"))


def _verdict(raw: object) -> Verdict:
    row = _mapping(raw, "a verdict")
    decided = _maybe(_get(row, "round"), lambda value: RoundId(*_numbers(value, 2, "a round")))
    return Verdict(
        _push_id(_get(row, "push")), _named(VerdictKind, row, "kind"), _maybe(_get(row, "version"), _version),
        _text(row, "reason"), _flag(row, "reset_inner"), decided,
    )  # fmt: skip


def _named(kind: Any, row: Json, name: str) -> Any:
    """The member of an enumeration that a field names."""
    value = _text(row, name)
    if value not in kind.__members__:
        raise SavedStateError(f"{name} is {value!r}, not one of {', '.join(kind.__members__)}")
    return kind[value]


# ---- consistency checks ----


def _check(saved: SavedSession) -> None:
    push = saved.push
    if push is not None and (push.id.cluster != saved.cluster_id or push.id.seq > saved.seq):
        raise SavedStateError(f"its open push {push.id} is not of this cluster, or newer than number {saved.seq}")
    works = [saved.pending] if push is None else [saved.pending, push.work]
    for work in works:
        if work.ranges and not saved.lost and sum(item.tokens for item in work.ranges) != work.tokens:
            raise SavedStateError(f"{work.tokens} tokens are counted that its ranges do not hold")
    _check_disjoint([*saved.held, *(item for work in works for item in work.ranges)])


def _check_disjoint(ranges: list[DataRange]) -> None:
    """Raises SavedStateError when a token is in two of the ranges (I12)."""
    for one, two in itertools.pairwise(sorted(ranges)):
        same = (one.lease_id, one.pass_index, one.chunk) == (two.lease_id, two.pass_index, two.chunk)
        if same and two.begin_tokens < one.end_tokens:
            raise SavedStateError(f"token {two.begin_tokens} of chunk {one.chunk} is in two ranges")


# ---- resuming --------------------------------------------------------------------------------------------------------
#
# Converts a session to a value at a step boundary, and restores it from one.
#
# A resumed session joins again, as if the process had only been away; the row FENCED of the verdict table
# (docs/protocol.md) decides which of its work counts. This module decides nothing about that.


def save(shared: SharedState, pushing: Pushing, pulling: Pulling, leases_asked: int) -> SavedSession | None:
    """The session as a value; None before its first version, before which another process can simply start."""
    incarnation, config = shared.terms.incarnation, shared.config
    if shared.base is None or incarnation is None:
        return None
    plan = pulling.plan
    return SavedSession(
        run_id=shared.terms.run_id,
        cluster_id=config.cluster_id,
        layout_hash=config.layout.layout_hash,
        data_digest=config.data_plan.corpus_digest,
        incarnation=incarnation,
        seq=pushing.seq,
        base=shared.base,
        base_fence=shared.base_fence,
        local_steps=shared.terms.local_steps,
        tokens=shared.terms.tokens,
        steps_since_snapshot=shared.steps_since_snapshot,
        steps_towards_push=shared.steps_towards_push,
        leases_asked=leases_asked,
        held=shared.work.held,
        pending=shared.work.pending,
        lost=shared.work.lost,
        push=pushing.open.record if pushing.open is not None else None,
        pull=SavedPull(plan.mode, plan.at_least, plan.reset_inner, plan.drops) if plan is not None else None,
        last_verdict=pushing.last_verdict,
        residual=shared.residual,
    )


def restore(
    saved: SavedSession, newest: PushRecord | None, shared: SharedState, pushing: Pushing, pulling: Pulling
) -> None:
    """Restore a saved session into the parts of one that has not begun. newest: the last push that was recorded.

    Raises ConfigError when the saved session is of another cluster, model or data.
    """
    _check_identity(saved, shared.config)
    terms, work, push, pull = shared.terms, shared.work, saved.push, saved.pull
    terms.run_id, terms.previous = saved.run_id, saved.incarnation
    terms.local_steps, terms.tokens = saved.local_steps, saved.tokens
    shared.base, shared.base_fence = saved.base, saved.base_fence
    shared.steps_since_snapshot, shared.steps_towards_push = saved.steps_since_snapshot, saved.steps_towards_push
    work.held, work.pending, work.lost = saved.held, saved.pending, saved.lost
    shared.residual = saved.residual and shared.config.wire in DIFFERENCES
    if saved.residual and not shared.residual:
        shared.log("residual", "the residual of earlier pushes is dropped: this process sends float32")
    work.in_push = push.work if push is not None and push.donates is None and push.base is not None else None
    pushing.seq, pushing.last_verdict = saved.seq, saved.last_verdict
    if push is not None:
        pushing.open = OpenPush(push.id, push.base, push.fence, push.work, shared.now_s, donates=push.donates)
    if pull is not None:
        pulling.plan = PullPlan(pull.mode, pull.at_least, pull.reset_inner, pull.drops)
    if newest is not None and newest.id.cluster == saved.cluster_id:
        pushing.newest = newest
        pushing.seq = max(pushing.seq, newest.id.seq)
        terms.previous = max(saved.incarnation, newest.id.incarnation)


def _check_identity(saved: SavedSession, config: SessionConfig) -> None:
    remedy = "give another --checkpoint-dir, remove the checkpoint, or leave out --resume"
    if saved.cluster_id != config.cluster_id:
        raise ConfigError(
            f"the checkpoint is of cluster {saved.cluster_id}, this is cluster {config.cluster_id}: each cluster needs "
            f"a directory of its own; {remedy}"
        )
    if config.run_id and saved.run_id != config.run_id:
        raise ConfigError(f"the checkpoint is of run {saved.run_id}, this is run {config.run_id}: {remedy}")
    if saved.layout_hash != config.layout.layout_hash:
        raise ConfigError(
            f"the checkpoint is of another model than this one of {len(config.layout.parameters)} parameters and "
            f"{config.layout.n_elems} elements: give the same model, or {remedy}"
        )
    if saved.data_digest != config.data_plan.corpus_digest:
        raise ConfigError(f"the checkpoint is of a cluster with other data: give the same data, or {remedy}")
