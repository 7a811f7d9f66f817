"""What becomes of a cluster's residual, against the last column of the table of verdicts (docs/protocol.md).

Judged from outside the session: from what it told its tape in one step, how it sent the push, and what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dips.core.messages import VerdictKind
from dips.core.wire import DIFFERENCES, Codec
from dips.worker.state import effects
from dips.worker.state.cluster import ClusterMachine


def residual_fault(
    before: int, after: int, told: Sequence[effects.Effect], sent_as: Mapping[str, Codec], session: ClusterMachine
) -> str:
    """A sentence when one step of a session did something else to the residual than the table says; "" when not.

    before, after: ClusterModel.residual_mark. told: the effects of the step. sent_as: how each push of this life was
    sent last.
    """
    if session.shared.residual != (after != 0):
        return f"the session {'knows' if session.shared.residual else 'denies'} a residual, the parameters have {after}"
    plan = session.pulling.plan
    replaced = plan is not None and plan.drops
    if replaced:
        return f"residual {after} outlives the steps that it comes from" if after else ""
    for push in _applied(told):
        if push not in sent_as:
            return f"residual {after} outlives push {push}, and how that was written nobody knows" if after else ""
        if sent_as[push] in DIFFERENCES:
            kept = after not in (0, before)
            return "" if kept else f"push {push} was applied as differences, and residual {before} did not advance"
    moved = before != after and not (after == 0 and (_anew(told) or _dropped_and_donating(told)))
    return f"residual {before} became {after} for no reason that the table knows" if moved else ""


def _applied(told: Sequence[effects.Effect]) -> list[str]:
    """Pushes whose APPLIED was heard now."""
    verdicts = [item.fields for item in told if isinstance(item, effects.Record) and item.kind == "verdict"]
    return [str(row["push"]) for row in verdicts if row["verdict"] == VerdictKind.APPLIED.name]


def _dropped_and_donating(told: Sequence[effects.Effect]) -> bool:
    """Whether the steps were dropped and, in the same breath, their pull gave way to giving a lost version back."""
    lines = [item for item in told if isinstance(item, effects.Record)]
    dropped = any(
        item.kind == "stale" or item.fields.get("verdict") in (VerdictKind.EXCLUDED.name, VerdictKind.ROLLED_BACK.name)
        for item in lines
    )
    return dropped and any(item.kind == "donated" for item in lines)


def _anew(told: Sequence[effects.Effect]) -> bool:
    """Whether a version was installed for which steps were dropped, or this life seeds the run."""
    return any(
        isinstance(item, effects.Install)
        or (isinstance(item, effects.Record) and item.kind == "push_begun" and item.fields["base"] == "None")
        for item in told
    )
