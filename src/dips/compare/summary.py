"""Summarises the runs of one method: means over seeds, and the counts of rounds and pushes.

Losses are nats per byte, times are virtual seconds. A run that did not end with a finite loss counts as such: it is
never silently left out of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from dips.compare.record import PushFact, RoundFact, RunRecord

APPLIED, EXCLUDED = "APPLIED", "EXCLUDED"
FINISHED, LOCKED_OUT = "finished", "locked out"
"""How a run ended that reached all its tokens, and one whose penalty refused every push from some time on."""

KNOWS_NOTHING = math.log(256)
"""Nats per byte of a model that guesses: a run that ends above it has lost its model, finite or not."""


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run. Counts of pushes are None for a method that has none (data parallel).

    share_of_ideal: its tokens a second / the sum of what the clusters make alone; None when it did not finish.
    merged_per_round: accepted pushes of a committed round. clipped: share of the committed rounds whose merge was
    shortened. flagged_bad: injected pushes that were excluded; flagged_good: good ones that were excluded; missed:
    injected ones that were applied.
    """

    loss: float | None
    virtual_s: float
    tokens: int
    ended: str
    share_of_ideal: float | None
    rounds: int
    voids: int
    merged_per_round: float | None
    staleness_mean: float | None
    staleness_max: int | None
    clipped: float | None
    flagged_bad: int | None
    flagged_good: int | None
    missed: int | None
    alarms: tuple[tuple[float, str], ...]

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["alarms"] = [list(alarm) for alarm in self.alarms]
        return plain


def summarise(record: RunRecord, ideal_tokens_per_s: float) -> RunSummary:
    """Summarise a record by counting; it judges nothing again."""
    pushes = [push for row in record.judged for push in row.pushes]
    committed = [row for row in record.judged if row.kappa is not None]
    return RunSummary(
        loss=finite(record.loss),
        virtual_s=record.virtual_s,
        tokens=record.tokens,
        ended=record.ended,
        share_of_ideal=_share(record, ideal_tokens_per_s),
        rounds=record.rounds,
        voids=record.voids,
        merged_per_round=_mean([_merged(row) for row in committed]),
        staleness_mean=_mean([push.staleness for push in pushes]),
        staleness_max=max((push.staleness for push in pushes), default=None),
        clipped=_mean([float(row.kappa is not None and row.kappa < 1) for row in committed]),
        flagged_bad=_count(pushes, bad=True, excluded=True),
        flagged_good=_count(pushes, bad=False, excluded=True),
        missed=_count(pushes, bad=True, excluded=False),
        alarms=record.alarms,
    )


@dataclass(frozen=True)
class MethodSummary:
    """All seeds of one method, or of one line of a figure.

    loss: the mean; None when one of them has no finite loss. sd: of a sample; None for one seed.
    """

    runs: Mapping[int, RunSummary]

    @property
    def losses(self) -> list[float]:
        """The losses of the seeds that ended with a finite one."""
        return [run.loss for run in self.runs.values() if run.loss is not None]

    @property
    def not_finite(self) -> int:
        return len(self.runs) - len(self.losses)

    @property
    def locked_out(self) -> bool:
        """Whether the runs without a loss have none because the penalty refused every push from some time on."""
        lost = [run.ended for run in self.runs.values() if run.loss is None]
        return bool(lost) and set(lost) == {LOCKED_OUT}

    @property
    def loss(self) -> float | None:
        return None if self.not_finite else _mean(self.losses)

    @property
    def virtual_s(self) -> float | None:
        """The time of all tokens; None when one of the runs did not reach them: its time would not be comparable."""
        return self.mean("virtual_s") if all(run.ended == FINISHED for run in self.runs.values()) else None

    @property
    def sd(self) -> float | None:
        return stdev(self.losses) if len(self.losses) > 1 and not self.not_finite else None

    def mean(self, name: str) -> float | None:
        """The mean over the seeds of a field of RunSummary; None when it is None."""
        values = [getattr(run, name) for run in self.runs.values()]
        return None if None in values else _mean(values)

    def largest(self, name: str) -> int | None:
        values = [getattr(run, name) for run in self.runs.values()]
        return None if None in values else max(values, default=None)

    def total(self, name: str) -> int | None:
        values = [getattr(run, name) for run in self.runs.values()]
        return None if None in values else sum(values)

    @property
    def alarms(self) -> int:
        return sum(len(run.alarms) for run in self.runs.values())

    def minus(self, other: MethodSummary | None) -> float | None:
        """How much higher this method's loss is, over the seeds that both have; None when there is none."""
        if other is None:
            return None
        both = [(run.loss, other.runs[seed].loss) for seed, run in self.runs.items() if seed in other.runs]
        pairs = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
        return fmean(ours - theirs for ours, theirs in pairs) if pairs and len(pairs) == len(both) else None


def by_method(records: Sequence[RunRecord], ideal_tokens_per_s: float) -> dict[str, MethodSummary]:
    """Method -> its summary, in the order in which the methods come first; seeds in their order."""
    return by_label([(record.method, record, ideal_tokens_per_s) for record in records])


def by_label(labelled: Iterable[tuple[str, RunRecord, float]]) -> dict[str, MethodSummary]:
    """The same for (label, record, ideal tokens a second of its set-up): label -> the summary of its seeds."""
    found: dict[str, dict[int, RunSummary]] = {}
    for label, record, ideal_tokens_per_s in labelled:
        found.setdefault(label, {})[record.seed] = summarise(record, ideal_tokens_per_s)
    return {label: MethodSummary(dict(sorted(runs.items()))) for label, runs in found.items()}


def seed_noise(summaries: Mapping[str, MethodSummary]) -> float | None:
    """The spread of a loss over seeds, the median of the methods' variances; None when no method has two seeds.

    A method that lost its model in any seed is not used: its losses are random.
    """
    sound = [summary for summary in summaries.values() if all(loss < KNOWS_NOTHING for loss in summary.losses)]
    variances = [summary.sd**2 for summary in sound if summary.sd is not None]
    return math.sqrt(median(variances)) if variances else None


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _share(record: RunRecord, ideal_tokens_per_s: float) -> float | None:
    if record.ended != FINISHED or record.virtual_s <= 0:
        return None
    return record.tokens / record.virtual_s / ideal_tokens_per_s


def _merged(row: RoundFact) -> int:
    return sum(push.verdict == APPLIED for push in row.pushes)


def _count(pushes: Sequence[PushFact], *, bad: bool, excluded: bool) -> int | None:
    if not pushes:
        return None
    return sum(push.bad == bad and (push.verdict == EXCLUDED) == excluded for push in pushes)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
