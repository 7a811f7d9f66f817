"""Checks what happens to a cluster's residual, by the last column of the table of verdicts (docs/protocol.md).

Judged from outside the session: from its tape lines of one step, how it sent the push, and what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dips.core.messages import VerdictKind
from dips.core.wire import DIFFERENCES, Codec
from dips.worker.state import effects
from dips.worker.state.cluster import ClusterMachine


def residual_fault(
    before: int, after: int, outputs: Sequence[effects.Effect], sent_as: Mapping[str, Codec], session: ClusterMachine
) -> str:
    """A sentence when one step of a session did something else to the residual than the table says; "" when not.

    before, after: ClusterModel.residual_mark. outputs: the effects of the step. sent_as: how each push of this
    incarnation was sent last.
    """
    if session.shared.residual != (after != 0):
        return f"the session {'knows' if session.shared.residual else 'denies'} a residual, the parameters have {after}"
    plan = session.pulling.plan
    replaced = plan is not None and plan.drops
    if replaced:
        return f"residual {after} outlives the steps that it comes from" if after else ""
    for push in _applied(outputs):
        if push not in sent_as:
            return f"residual {after} outlives push {push}, and the form of that push is not known" if after else ""
        if sent_as[push] in DIFFERENCES:
            kept = after not in (0, before)
            return "" if kept else f"push {push} was applied as differences, and residual {before} did not advance"
    moved = before != after and not (after == 0 and (_reinstalled(outputs) or _dropped_and_donating(outputs)))
    return f"residual {before} became {after}, which the table does not allow" if moved else ""


def _applied(outputs: Sequence[effects.Effect]) -> list[str]:
    """Pushes whose APPLIED was received now."""
    verdicts = [item.fields for item in outputs if isinstance(item, effects.Record) and item.kind == "verdict"]
    return [str(row["push"]) for row in verdicts if row["verdict"] == VerdictKind.APPLIED.name]


def _dropped_and_donating(outputs: Sequence[effects.Effect]) -> bool:
    """Whether the steps were dropped and, in the same step, their pull was replaced by donating a lost version."""
    lines = [item for item in outputs if isinstance(item, effects.Record)]
    dropped = any(
        item.kind == "stale" or item.fields.get("verdict") in (VerdictKind.EXCLUDED.name, VerdictKind.ROLLED_BACK.name)
        for item in lines
    )
    return dropped and any(item.kind == "donated" for item in lines)


def _reinstalled(outputs: Sequence[effects.Effect]) -> bool:
    """Whether a version was installed for which steps were dropped, or this incarnation seeds the run."""
    return any(
        isinstance(item, effects.Install)
        or (isinstance(item, effects.Record) and item.kind == "push_begun" and item.fields["base"] == "None")
        for item in outputs
    )
