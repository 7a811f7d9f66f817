"""Converts a session to a value at a step boundary, and restores it from one.

A resumed session joins again, as if the process had only been away; the row FENCED of the verdict table
(docs/protocol.md) decides which of its work counts. This module decides nothing about that.
"""

from __future__ import annotations

from dips.core.errors import ConfigError
from dips.core.wire import DIFFERENCES
from dips.worker.state.pulling import Pulling, PullPlan
from dips.worker.state.push_record import PushRecord
from dips.worker.state.pushing import OpenPush, Pushing
from dips.worker.state.saved import SavedPull, SavedSession
from dips.worker.state.shared import SharedState
from dips.worker.state.terms import SessionConfig


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
