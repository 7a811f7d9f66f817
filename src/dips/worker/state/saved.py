"""A session as a value, and its JSON form: everything that a cluster needs to resume in another process.

A resumed session joins again, as if the process had only been away; the row FENCED of the verdict table
(docs/protocol.md) decides which of its work counts. This module decides nothing about that.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NewType, get_args, get_origin, get_type_hints

from dips.core.errors import ConfigError, DipsError, option
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.messages import DataRange, Verdict
from dips.worker.state.effects import PushRecord
from dips.worker.state.pulling import Pulling, PullPlan
from dips.worker.state.pushing import OpenPush, Pushing
from dips.worker.state.shared import SessionConfig, SharedState
from dips.worker.state.work import Work


class SavedStateError(DipsError):
    """The data read is not the state of a session."""


@dataclass(frozen=True)
class SavedSession:
    """One session at a step boundary: the fields of worker/state/shared.py and its parts."""

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
    lost: bool = False  # pending work used data that another cluster holds, and will be dropped
    push: PushRecord | None = None  # the undecided one
    pull: PullPlan | None = None
    last_verdict: Verdict | None = None
    residual: bool = False  # the rounding residual of earlier pushes is saved with the parameters

    def __post_init__(self) -> None:
        """Raises SavedStateError for fields that contradict each other."""
        push = self.push
        if push is not None and (push.id.cluster != self.cluster_id or push.id.seq > self.seq):
            raise SavedStateError(f"its open push {push.id} is not of this cluster, or newer than number {self.seq}")
        works = [self.pending] if push is None else [self.pending, push.work]
        for work in works:
            if work.ranges and not self.lost and sum(item.tokens for item in work.ranges) != work.tokens:
                raise SavedStateError(f"{work.tokens} tokens are counted that its ranges do not hold")
        ranges = sorted([*self.held, *(item for work in works for item in work.ranges)])
        for one, two in itertools.pairwise(ranges):
            same = (one.lease_id, one.pass_index, one.chunk) == (two.lease_id, two.pass_index, two.chunk)
            if same and two.begin_tokens < one.end_tokens:  # a token in two ranges would count twice (I12)
                raise SavedStateError(f"token {two.begin_tokens} of chunk {one.chunk} is in two ranges")

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = _to_json(self)
        return row

    @classmethod
    def from_json(cls, raw: object) -> SavedSession:
        """The inverse of to_json. Raises SavedStateError for anything else."""
        saved: SavedSession = _from_json(cls, raw, "the session")
        return saved


# ---- JSON ------------------------------------------------------------------------------------------------------------
#
# The form follows from the types: a value is an object of its fields, or a row of them; bytes are hex digits, a member
# of an enumeration is its name. So a field that is renamed is lost in files of earlier releases: _NAMES keeps its name.
#
# Reading checks everything that the session relies on, because the file may be old, of another release, or damaged in a
# way that its checksum does not show (written wrongly).


_ROWS = (Incarnation, Version, RoundId, PushId, DataRange)

_NAMES = {"reset_inner_optimizer": "reset_inner"}
"""The name in JSON of a field that has another one here."""

_LATER = ("residual",)
"""Fields that earlier releases did not write; their default is what such a file means."""


def push_to_json(push: PushRecord) -> dict[str, Any]:
    """The record of a push, as worker/checkpoint_files.py writes it before its first use."""
    row: dict[str, Any] = _to_json(push)
    return row


def push_from_json(raw: object) -> PushRecord:
    """The inverse of push_to_json. Raises SavedStateError for anything else."""
    push: PushRecord = _from_json(PushRecord, raw, "a push")
    return push


def _to_json(value: object) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if is_dataclass(value):
        row = {_NAMES.get(one.name, one.name): _to_json(getattr(value, one.name)) for one in fields(value)}
        return list(row.values()) if isinstance(value, _ROWS) else row
    return value


_types_of = cache(get_type_hints)


def _from_json(kind: Any, raw: Any, what: str) -> Any:
    """The value of a type that this JSON describes; `what` names it in the sentence of a SavedStateError."""
    if isinstance(kind, NewType):
        kind = kind.__supertype__
    if get_origin(kind) is types.UnionType:  # X | None
        return None if raw is None else _from_json(get_args(kind)[0], raw, what)
    if get_origin(kind) is tuple:
        _must(isinstance(raw, list), what, raw, "a list")
        return tuple(_from_json(get_args(kind)[0], item, what) for item in raw)
    if is_dataclass(kind):
        return _fields_from_json(kind, raw, what)
    if kind is bytes:
        try:
            return bytes.fromhex(raw)
        except (ValueError, TypeError):
            _must(False, what, raw, "a text of hex digits")
    if issubclass(kind, Enum):
        _must(isinstance(raw, str) and raw in kind.__members__, what, raw, f"one of {', '.join(kind.__members__)}")
        return kind[raw]
    if kind is float:
        _must(type(raw) in (int, float) and abs(raw) <= sys.float_info.max, what, raw, "a finite number")
        return float(raw)
    right = type(raw) is kind and (kind is not int or raw >= 0)
    _must(right, what, raw, {int: "a count", bool: "true or false", str: "a text"}[kind])
    return raw


def _fields_from_json(kind: Any, raw: Any, what: str) -> Any:
    kinds, given = _types_of(kind), raw
    if kind in _ROWS:
        _must(isinstance(raw, list) and len(raw) == len(kinds), what, raw, f"a row of {', '.join(kinds)}")
        given = dict(zip(kinds, raw, strict=True))
    _must(isinstance(given, Mapping), what, raw, "an object with fields")
    found = {}
    for one in fields(kind):
        name = _NAMES.get(one.name, one.name)
        if name in given:
            found[one.name] = _from_json(kinds[one.name], given[name], what if kind in _ROWS else name)
        elif name not in _LATER:
            raise SavedStateError(f"the field {name!r} of {what} is missing")
    value = kind(**found)
    if isinstance(value, DataRange) and value.tokens <= 0:
        raise SavedStateError(f"a range of {what} ends before it begins")
    return value


def _must(right: bool, what: str, raw: object, wanted: str) -> None:
    if not right:
        raise SavedStateError(f"{what} is {raw!r:.80}, not {wanted}")


# ---- resuming --------------------------------------------------------------------------------------------------------


def save(shared: SharedState, pushing: Pushing, pulling: Pulling, leases_asked: int) -> SavedSession | None:
    """The session as a value; None before its first version, before which another process can simply start."""
    incarnation, config = shared.terms.incarnation, shared.config
    if shared.base is None or incarnation is None:
        return None
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
        pull=pulling.plan,
        last_verdict=pushing.last_verdict,
        residual=shared.residual,
    )


def restore(
    saved: SavedSession, newest: PushRecord | None, shared: SharedState, pushing: Pushing, pulling: Pulling
) -> None:
    """Restore a saved session into the parts of one that has not begun. newest: the last push that was recorded.

    Raises ConfigError when the saved session is of another cluster, model or data.
    """
    if shared.config.former and saved.layout_hash == (was := shared.config.with_former_names()).layout.layout_hash:
        shared.config = was
    _check_identity(saved, shared.config)
    terms, work, push = shared.terms, shared.work, saved.push
    terms.run_id, terms.previous = saved.run_id, saved.incarnation
    terms.local_steps, terms.tokens = saved.local_steps, saved.tokens
    shared.base, shared.base_fence = saved.base, saved.base_fence
    shared.steps_since_snapshot, shared.steps_towards_push = saved.steps_since_snapshot, saved.steps_towards_push
    work.held, work.pending, work.lost = saved.held, saved.pending, saved.lost
    shared.residual = saved.residual and shared.config.wire.is_difference
    if saved.residual and not shared.residual:
        shared.log("residual", "the residual of earlier pushes is dropped: this process sends float32")
    work.in_push = push.work if push is not None and push.donates is None and push.base is not None else None
    pushing.seq, pushing.last_verdict = saved.seq, saved.last_verdict
    if push is not None:
        pushing.open = OpenPush(push.id, push.base, push.fence, push.work, shared.now_s, donates=push.donates)
    pulling.plan = saved.pull
    if newest is not None and newest.id.cluster == saved.cluster_id:
        pushing.newest = newest
        pushing.seq = max(pushing.seq, newest.id.seq)
        terms.previous = max(saved.incarnation, newest.id.incarnation)


def _check_identity(saved: SavedSession, config: SessionConfig) -> None:
    remedy = f"give another {option('checkpoint_dir')}, remove the checkpoint, or leave out {option('resume')}"
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
