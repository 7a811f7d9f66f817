"""What a run trains, and the record that it leaves: plain data for the tables, the pictures, compare.json and tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from dips.lab.sim.arithmetic import F32

Progress = Callable[[int, float], None]
"""Called by a run with its tokens and its virtual seconds so far."""

Evaluate = Callable[[F32], float]
"""The held-out loss, in nats per byte, of a model given as a flat vector (n_elems of the layout)."""


@dataclass(frozen=True)
class CurvePoint:
    """A point of the loss curve: a published version."""

    version: str
    tokens: int
    virtual_s: float  # since the first version
    loss: float | None  # held-out, nats per byte; None: not evaluated, or not finite


def at_tokens(curve: Sequence[CurvePoint], tokens: int) -> tuple[float | None, float]:
    """(loss, virtual_s) at exactly `tokens`: linear between the last point below and the first at or above it.

    A curve that ends before gives its last point; loss None: one of the two was not evaluated. Raises ValueError for
    an empty curve.
    """
    above = next((i for i, point in enumerate(curve) if point.tokens >= tokens), len(curve) - 1)
    if above < 0:
        raise ValueError("a curve without points has no loss")
    last = curve[above]
    if last.tokens <= tokens or above == 0:
        return last.loss, last.virtual_s
    before = curve[above - 1]
    share = (tokens - before.tokens) / (last.tokens - before.tokens)
    virtual_s = before.virtual_s + share * (last.virtual_s - before.virtual_s)
    if before.loss is None or last.loss is None:
        return None, virtual_s
    return before.loss + share * (last.loss - before.loss), virtual_s


@dataclass(frozen=True)
class PushFact:
    """One judged push."""

    cluster: str
    push: str
    verdict: str
    reason: str
    tokens: int
    staleness: int
    # norm, score, cosine: None where undefined
    norm: float | None
    score: float | None
    cosine: float | None
    bad: bool  # an injected one


@dataclass(frozen=True)
class RoundFact:
    """One committed or void round. kappa, rho, merged_norm: None in a VOID."""

    version: str
    virtual_s: float  # since the first version
    kappa: float | None
    rho: float | None
    merged_norm: float | None
    pushes: tuple[PushFact, ...]


@dataclass(frozen=True)
class RunRecord:
    """The record of one run: a (method, seed, injection). loss, virtual_s: at exactly `tokens`, by linear interpolation
    between the last version below and the first at or above it; loss None: not finite, or nothing was trained. ended:
    "finished", "diverged", or "locked out": the penalty refused every push from some time on, finite ones too."""

    method: str
    seed: int
    inject: str
    tokens: int
    # "finished", "diverged", or "locked out": the penalty refused every push from some time on, finite ones too
    ended: str
    # At exactly `tokens`, by linear interpolation between the last version below and the first at or above it:
    loss: float | None  # None: not finite, or nothing was trained
    virtual_s: float
    rounds: int
    voids: int
    curve: tuple[CurvePoint, ...] = ()
    judged: tuple[RoundFact, ...] = ()
    alarms: tuple[tuple[float, str, str], ...] = ()  # (virtual second, what it is about, sentence)
    cluster_tokens: dict[str, int] = field(default_factory=dict)  # applied. timing-only runs have no losses
    cluster_steps: dict[str, int] = field(default_factory=dict)
    # Virtual seconds in which a cluster did not train, from the first version to the end.
    waited_s: dict[str, float] = field(default_factory=dict)
    # Of all clusters, by direction ("push", "pull"): the bytes that left for the slaves, and for the clusters, for a
    # model of the size that is trained.
    moved_bytes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and None; a number that is not finite is None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of to_json. Raises KeyError or TypeError for anything else."""
        rounds = [{**row, "pushes": tuple(PushFact(**push) for push in row["pushes"])} for row in plain["judged"]]
        return cls(
            **{
                **plain,
                "curve": tuple(CurvePoint(**point) for point in plain["curve"]),
                "judged": tuple(RoundFact(**row) for row in rounds),
                "alarms": tuple((at_s, about, sentence) for at_s, about, sentence in plain["alarms"]),
            }
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
