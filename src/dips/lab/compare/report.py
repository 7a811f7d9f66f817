"""Reports the result of a comparison: two tables with explanations, and compare.json.

Losses are nats per byte at equal tokens; times are virtual seconds. What was not measured is shown as "-", what is no
finite number as "not finite": neither is left out.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from rich import box
from rich.table import Table

from dips.core.release import software_versions
from dips.core.units import format_count, format_seconds
from dips.lab.compare.methods import find_method
from dips.lab.compare.record import PushFact, RunRecord
from dips.lab.compare.setup import ComparisonSetup

# ---- summary ---------------------------------------------------------------------------------------------------------
#
# Summarises the runs of one method: means over seeds, and the counts of rounds and pushes.
#
# Losses are nats per byte, times are virtual seconds. A run that did not end with a finite loss counts as such: it is
# never silently left out of a mean.


APPLIED, EXCLUDED = "APPLIED", "EXCLUDED"
FINISHED, LOCKED_OUT = "finished", "locked out"
"""How a run ended that reached all its tokens, and one whose penalty refused every push from some time on."""

T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
)  # fmt: skip
"""The 95 % point of Student's t for 1, 2, ... degrees of freedom. The last is used for more: a little wide."""

KNOWS_NOTHING = math.log(256)
"""Nats per byte of a model that guesses: a run that ends above it has lost its model, finite or not."""


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run. Counts of pushes are None for a method that has none (data parallel)."""

    loss: float | None
    virtual_s: float
    tokens: int
    ended: str
    # its tokens / what the clusters that are there would make alone in that time; None when it did not finish
    share_of_ideal: float | None
    rounds: int
    voids: int
    merged_per_round: float | None  # accepted pushes of a committed round
    staleness_mean: float | None
    staleness_max: int | None
    clipped: float | None  # share of the committed rounds whose merge was shortened
    flagged_bad: int | None  # injected pushes that were excluded
    flagged_good: int | None  # good ones that were excluded
    missed: int | None  # injected ones that were applied
    alarms: tuple[tuple[float, str, str], ...]

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["alarms"] = [list(alarm) for alarm in self.alarms]
        return plain


Ideal = Callable[[float], float]
"""Tokens that the clusters of a set-up would train up to a time, in virtual seconds, if none of them ever waited."""


def summarise(record: RunRecord, ideal_tokens: Ideal) -> RunSummary:
    """Summarise a record by counting; it judges nothing again."""
    pushes = [push for row in record.judged for push in row.pushes]
    committed = [row for row in record.judged if row.kappa is not None]
    timed = record.ended == FINISHED and record.virtual_s > 0
    return RunSummary(
        loss=finite(record.loss),
        virtual_s=record.virtual_s,
        tokens=record.tokens,
        ended=record.ended,
        share_of_ideal=record.tokens / ideal_tokens(record.virtual_s) if timed else None,
        rounds=record.rounds,
        voids=record.voids,
        merged_per_round=_mean([sum(push.verdict == APPLIED for push in row.pushes) for row in committed]),
        staleness_mean=_mean([push.staleness for push in pushes]),
        staleness_max=max((push.staleness for push in pushes), default=None),
        clipped=_mean([float(row.kappa is not None and row.kappa < 1) for row in committed]),
        flagged_bad=_count(pushes, bad=True, excluded=True),
        flagged_good=_count(pushes, bad=False, excluded=True),
        missed=_count(pushes, bad=True, excluded=False),
        alarms=record.alarms,
    )


@dataclass(frozen=True)
class Difference:
    """How much higher a loss is than another, over the seeds that both have."""

    mean: float
    # half of the 90 % interval of the mean, from the differences at each seed (Student's t); None with one seed
    half_90: float | None


@dataclass(frozen=True)
class MethodSummary:
    """All seeds of one method, or of one line of a figure."""

    runs: Mapping[int, RunSummary]  # by seed

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
        """The mean; None when one of them has no finite loss."""
        return None if self.not_finite else _mean(self.losses)

    @property
    def virtual_s(self) -> float | None:
        """The time of all tokens; None when one of the runs did not reach them: its time would not be comparable."""
        return self.mean("virtual_s") if all(run.ended == FINISHED for run in self.runs.values()) else None

    @property
    def sd(self) -> float | None:
        """The standard deviation of a sample; None for one seed."""
        return stdev(self.losses) if len(self.losses) > 1 and not self.not_finite else None

    def mean(self, name: str) -> float | None:
        mean: float | None = self.over(name, fmean)
        return mean

    def over(self, name: str, together: Callable[[list[Any]], Any]) -> Any:
        """A field of RunSummary over all seeds; None when it is None in one."""
        values = [getattr(run, name) for run in self.runs.values()]
        return None if None in values else together(values)

    @property
    def alarms(self) -> int:
        return sum(len(run.alarms) for run in self.runs.values())

    def minus(self, other: MethodSummary | None) -> Difference | None:
        """How much higher this method's loss is; None when a run of either has none, or they share no seed."""
        if other is None:
            return None
        both = [(run.loss, other.runs[seed].loss) for seed, run in self.runs.items() if seed in other.runs]
        apart = [ours - theirs for ours, theirs in both if ours is not None and theirs is not None]
        if not apart or len(apart) < len(both):
            return None
        n = len(apart)
        return Difference(fmean(apart), T_95[min(n - 1, len(T_95)) - 1] * stdev(apart) / n**0.5 if n > 1 else None)


def by_method(records: Sequence[RunRecord], ideal_tokens: Ideal) -> dict[str, MethodSummary]:
    """Method -> its summary, in the order in which the methods come first; seeds in their order."""
    return by_label([(record.method, record, ideal_tokens) for record in records])


def by_label(labelled: Iterable[tuple[str, RunRecord, Ideal]]) -> dict[str, MethodSummary]:
    """The same for (label, record, ideal tokens of its set-up): label -> the summary of its seeds."""
    found: dict[str, dict[int, RunSummary]] = {}
    for label, record, ideal_tokens in labelled:
        found.setdefault(label, {})[record.seed] = summarise(record, ideal_tokens)
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


def _count(pushes: Sequence[PushFact], *, bad: bool, excluded: bool) -> int | None:
    if not pushes:
        return None
    return sum(push.bad == bad and (push.verdict == EXCLUDED) == excluded for push in pushes)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


# ---- report ----------------------------------------------------------------------------------------------------------


SCHEMA = "dips-compare/1"
REFERENCES = ("diloco-clip", "dp")
"""The methods that the others are compared with, unless a comparison names others."""

USUAL_NOISE = 0.02
"""The spread between seeds of `small`, in nats (docs/convergence.md), which is given when only one seed was run."""

NOTHING = "-"


@dataclass(frozen=True)
class Comparison:
    """The results to report."""

    setup: ComparisonSetup
    seeds: tuple[int, ...]
    inject: str
    command: str
    summaries: Mapping[str, MethodSummary]
    records: Sequence[RunRecord]
    # the same methods and seeds without the injection, as far as they were run before
    clean: Mapping[str, MethodSummary]
    references: tuple[str, ...] = REFERENCES


def to_json(found: Comparison) -> dict[str, Any]:
    """The content of compare.json: method -> seeds -> loss, virtual time, rounds, staleness, clip fraction, flags."""
    return {
        "schema": SCHEMA,
        "command": found.command,
        "inject": found.inject,
        "seeds": list(found.seeds),
        "setup": found.setup.to_json(),
        "setup_digest": found.setup.digest(),
        "ideal_tokens_per_s": found.setup.ideal_tokens_per_s,
        "ideal_ratio": found.setup.ideal_ratio,
        "seed_noise": seed_noise(found.summaries),
        "methods": {name: _method_json(name, found) for name in found.summaries},
        "software": software_versions(),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
    }


def _method_json(name: str, found: Comparison) -> dict[str, Any]:
    summary, method = found.summaries[name], find_method(name)
    records = {record.seed: record for record in found.records if record.method == name}
    apart_from = {other: summary.minus(found.summaries.get(other)) for other in found.references}
    clean = summary.minus(found.clean.get(name))
    return {
        "title": method.title,
        "about": method.about,
        "flags_of_master": list(method.flags()),
        "flags_of_clusters": list(method.flags_of_clusters()),
        "loss_mean": summary.loss,
        "loss_sd": summary.sd,
        "not_finite": summary.not_finite,
        "minus": {other: None if apart is None else apart.mean for other, apart in apart_from.items()},
        "minus_half_90": {other: None if apart is None else apart.half_90 for other, apart in apart_from.items()},
        "minus_clean": None if clean is None else clean.mean,
        "virtual_s": summary.virtual_s,
        "share_of_ideal": summary.mean("share_of_ideal"),
        "seeds": {str(seed): _seed_json(summary, records[seed]) for seed in summary.runs},
    }


def _seed_json(summary: MethodSummary, record: RunRecord) -> dict[str, Any]:
    plain = summary.runs[record.seed].to_json()
    flags = {"true": plain.pop("flagged_bad"), "false": plain.pop("flagged_good"), "missed": plain.pop("missed")}
    curve = [[point.tokens, point.virtual_s, point.loss] for point in record.curve if point.loss is not None]
    return {**plain, "flags": flags, "curve": curve, "cluster_tokens": record.cluster_tokens}


def loss_table(found: Comparison) -> Table:
    """The table of what each method reached, and in which time."""
    title = f"held-out loss after {format_count(found.setup.run.tokens)} tokens"
    others = [name for name in found.references if name in found.summaries]
    extra = ["clean"] if found.clean else []
    columns = ["method", "loss", *(f"minus\n{name}" for name in others + extra), "virtual\ntime", "of\nideal"]
    if _timed(found):
        columns.append("speed")
    table = table_of(title, columns)
    for name, summary in found.summaries.items():
        differences = [summary.minus(found.summaries[other]) for other in others]
        if extra:
            differences.append(summary.minus(found.clean.get(name)))
        row = [name, loss_text(summary), *map(difference_text, differences)]
        row += [time_text(summary), show(summary.mean("share_of_ideal"), ".1%")]
        if _timed(found):
            ours, theirs = summary.virtual_s, found.summaries["diloco-clip"].virtual_s
            row.append(show(theirs / ours if ours and theirs else None, ".2f", "x"))
        table.add_row(*row)
    return table


def course_table(found: Comparison) -> Table:
    """The table of each method's course: rounds, staleness, clip, flags, alarms.

    Flags of spoilt pushes have a column only where pushes were spoilt, void rounds only where there were any.
    """
    columns: list[tuple[str, Callable[[MethodSummary], str]]] = [
        ("rounds", lambda summary: show(summary.mean("rounds"), ".0f")),
        ("merged", lambda summary: show(summary.mean("merged_per_round"), ".2f")),
        ("stale", lambda summary: show(summary.mean("staleness_mean"), ".2f")),
        ("most", lambda summary: show(summary.over("staleness_max", max), "d")),
        ("clip", lambda summary: show(summary.mean("clipped"), ".0%")),
        ("good\nout", lambda summary: show(summary.over("flagged_good", sum), "d")),
        ("alarms", lambda summary: str(summary.alarms)),
    ]
    if any(summary.mean("voids") for summary in found.summaries.values()):
        columns.insert(1, ("void", lambda summary: show(summary.mean("voids"), ".0f")))
    if found.inject:
        columns.insert(-2, ("bad\nout", lambda summary: show(summary.over("flagged_bad", sum), "d")))
        columns.insert(-1, ("bad\nin", lambda summary: show(summary.over("missed", sum), "d")))
    table = table_of("rounds and pushes", ["method", *(heading for heading, _ in columns)])
    for name, summary in found.summaries.items():
        if find_method(name).kind == "servers":
            table.add_row(name, *(value(summary) for _, value in columns))
    return table


def readings(found: Comparison) -> list[str]:
    """Sentences below the tables: what the numbers mean, and how far they can be trusted."""
    said = [
        "loss: nats per byte of held-out text, the same for all, lower is better. Virtual time: on the set-up's clock, "
        "from the first version; of ideal: tokens a second, relative to clusters that train all the time and never wait"
        + ("; speed: how many times faster than diloco-clip it trained on the same tokens." if _timed(found) else "."),
        _noise_sentence(found),
        *(reading(found) for reading in (_lost_sentence, _flag_sentence, _alarm_sentence)),
    ]
    return [sentence for sentence in said if sentence]


def _noise_sentence(found: Comparison) -> str:
    noise = seed_noise(found.summaries)
    if noise is None:
        return (
            f"{'One seed' if len(found.seeds) == 1 else 'No spread'}: in the set-up small, seeds differ by about "
            f"{USUAL_NOISE} by themselves, so a difference below {3 * USUAL_NOISE:.2f} says nothing; --seeds 1,2,3 "
            "says more."
        )
    clear = 2 * noise * (2 / len(found.seeds)) ** 0.5
    return (
        f"loss ±: the standard deviation over {len(found.seeds)} seeds, {noise:.3f} in the usual method: a difference "
        f"of two means below {clear:.3f} says nothing. minus ±: half of the 90 % interval of the mean difference, "
        "paired by seed (Student's t)."
    )


def _lost_sentence(found: Comparison) -> str:
    lost = [name for name, summary in found.summaries.items() if summary.not_finite and not summary.locked_out]
    shut = [name for name, summary in found.summaries.items() if summary.locked_out]
    said = f"Not finite: {', '.join(lost)}: the model was lost during the run. " if lost else ""
    if shut:
        said += f"Locked out: {', '.join(shut)}: the penalty refused every push from some time on, good ones too."
    return said.strip()


def _flag_sentence(found: Comparison) -> str:
    bad = sum((s.over("flagged_bad", sum) or 0) + (s.over("missed", sum) or 0) for s in found.summaries.values())
    wrongly = sum(s.over("flagged_good", sum) or 0 for s in found.summaries.values())
    if not bad and not wrongly:
        return ""
    if not found.inject:
        return "good out: pushes that were excluded, although none was spoilt."
    return "bad out: excluded spoilt pushes; good out: excluded good ones; bad in: spoilt ones that were not excluded."


def _alarm_sentence(found: Comparison) -> str:
    """A sentence about the master's alarms, with the second of each method's first one; compare.json has their full
    text."""
    about: dict[str, dict[str, float]] = {}
    for name, summary in found.summaries.items():
        for at_s, what, _ in (alarm for run in summary.runs.values() for alarm in run.alarms):
            firsts = about.setdefault(what, {})
            firsts[name] = min(at_s, firsts.get(name, at_s))
    parts = [f"{what} ({', '.join(f'{m} at {s:.0f} s' for m, s in firsts.items())})" for what, firsts in about.items()]
    return f"Alarms: {'; '.join(parts)}." if parts else ""


def loss_text(summary: MethodSummary) -> str:
    """A mean loss with its spread, or how many seeds have none."""
    if summary.loss is not None:
        spread = f" ± {summary.sd:.3f}" if summary.sd is not None else ""
        return f"{summary.loss:.3f}{spread}"
    of = f" ({summary.not_finite} of {len(summary.runs)})" if len(summary.runs) > 1 else ""
    return f"{'locked out' if summary.locked_out else 'not finite'}{of}"


def difference_text(apart: Difference | None) -> str:
    """A mean difference with half of its interval; NOTHING for None."""
    if apart is None:
        return NOTHING
    return f"{apart.mean:+.3f}" + ("" if apart.half_90 is None else f" ± {apart.half_90:.3f}")


def time_text(summary: MethodSummary) -> str:
    """The time of all tokens; NOTHING when they were not reached."""
    return NOTHING if summary.virtual_s is None else format_seconds(round(summary.virtual_s))


def _timed(found: Comparison) -> bool:
    """Whether times are shown: not with spoilt pushes, where they are not compared."""
    return "diloco-clip" in found.summaries and not found.inject


def show(value: float | None, form: str, unit: str = "") -> str:
    """Format a number; NOTHING for None."""
    return NOTHING if value is None else f"{value:{form}}{unit}"


def table_of(title: str, columns: Sequence[str]) -> Table:
    """An empty table with these headings; all columns except the first are right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
