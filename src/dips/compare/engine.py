"""Runs one method on the simulated servers, with clusters that train or, to get only times, with symbols.

Training and merging are real; the times come from the set-up. A run is evaluated at exactly the set-up's
tokens, so that methods of unequal rounds can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dips.compare.learner import Evaluate, Learner
from dips.compare.methods import Injection, Injector, Method
from dips.compare.plans import plan_of, timing_data, timing_layout, wire_bytes
from dips.compare.record import Course, CurvePoint, RunRecord, RunTally, at_tokens
from dips.compare.setup import ComparisonSetup
from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import DataPlan, DataRange
from dips.sim.arithmetic import F32, Arithmetic
from dips.sim.checks import version_of
from dips.sim.content import SYMBOLS
from dips.sim.kernel import SimulatedProcess
from dips.sim.numbers import Numbers

LIMIT_FACTOR = 30.0
"""A run may take so many times the ideal time plus that of its transfers before it counts as stuck."""

LIMIT_EXTRA_S = 3600.0

HOPELESS_VOIDS = 32
"""After so many void rounds in a row nothing more will be published: updates overflow, or the penalty refuses all."""

StepProgress = Callable[[int, float], None]
"""Called for each version, with the tokens applied and the virtual second."""

Versions = Callable[[Mapping[str, Any], F32], None]
"""Called for each published version, with its COMMIT record and the parameters as one flat vector."""


def run_on_servers(
    setup: ComparisonSetup,
    method: Method,
    seed: int,
    learner_of: Callable[[str, int], Learner],
    evaluate: Evaluate,
    injection: Injection | None = None,
    progress: StepProgress | None = None,
    versions: Versions | None = None,
) -> RunRecord:
    """Train setup.run.tokens tokens with `method`; learner_of(cluster, its index) makes what each cluster trains.

    Held-out losses: of the first version at or after each of setup.run.evaluations equally spaced token marks, and of
    the last version below the end. The record's loss and time at exactly setup.run.tokens are linear interpolations
    between the last version below and the first at or above it. A training loss that is not finite, or HOPELESS_VOIDS
    void rounds in a row, end the run as "diverged", with loss None; as "locked out" when the last of those rounds
    refused pushes that are finite. Raises SimulationError when the simulated run breaks a promise or does not end,
    ConfigError for settings that the master refuses, and for a method without servers.
    """
    learners = {name: _Watched(learner_of(name, index)) for index, name in enumerate(setup.cluster_names)}
    first, spoiler = learners[setup.cluster_names[0]], _Spoiler(setup, injection, seed)
    parts = _Parts(
        first.layout(), first.data_plan(), Numbers(learners.__getitem__, spoiler.corrupt), tuple(learners.values()),
        spoiler, evaluate, versions,
    )  # fmt: skip
    record = _Run(setup, method, seed, parts, progress).through()
    return replace(record, inject=injection.kind if injection is not None else "")


def timing_only(setup: ComparisonSetup, method: Method, seed: int, progress: StepProgress | None = None) -> RunRecord:
    """Run the method without training: times, rounds and staleness; no losses, and no bad pushes. Same errors."""
    return _Run(setup, method, seed, _Parts(timing_layout(setup), timing_data(setup), SYMBOLS), progress).through()


class _Watched:
    """A learner, and whether its loss was ever not finite."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.diverged = False
        self.layout = learner.layout
        self.data_plan = learner.data_plan
        self.snapshot = learner.snapshot
        self.install = learner.install
        self.reset_inner_optimizer = learner.reset_inner_optimizer

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        loss = self._learner.step(ranges, progress_tokens)
        self.diverged |= not math.isfinite(loss)
        return loss


class _Spoiler:
    """Applies the injection to the pushes of its cluster, which are counted from 1 without the seed's."""

    def __init__(self, setup: ComparisonSetup, injection: Injection | None, seed: int) -> None:
        self._injector = Injector(injection, seed) if injection is not None else None
        self._cluster = setup.cluster_names[injection.cluster] if injection is not None else ""
        self._pushes = 0
        self._spoilt = False

    def corrupt(self, cluster: str, push: F32, base: F32) -> bool:
        if self._injector is None or cluster != self._cluster:
            return False
        self._pushes += 1
        self._spoilt = self._injector.corrupt(self._pushes, push, base)
        return self._spoilt

    def has_spoilt(self, cluster: str) -> bool:
        """Whether the push that this cluster just began is a bad one."""
        return cluster == self._cluster and self._spoilt


@dataclass(frozen=True)
class _Parts:
    """The parts of a simulation. Without training there are no learners, no injection and no evaluation."""

    layout: Layout
    data: DataPlan
    arithmetic: Arithmetic
    learners: tuple[_Watched, ...] = ()
    spoiler: _Spoiler | None = None
    evaluate: Evaluate | None = None
    versions: Versions | None = None


class _Run:
    """One run and its results."""

    def __init__(
        self, setup: ComparisonSetup, method: Method, seed: int, parts: _Parts, progress: StepProgress | None
    ) -> None:
        """Prepare the run. Raises ConfigError for a method without servers, which has no settings."""
        if method.kind != "servers":
            raise ConfigError(f"method {method.name} has no servers to run on: use run_data_parallel for it")
        self._setup, self._method, self._seed, self._parts = setup, method, seed, parts
        self._progress = progress
        plan = plan_of(setup, method, parts.layout, parts.data, parts.arithmetic)
        self._tally = RunTally()
        self._course = Course(seed, plan, self._published, self._journalled)
        self._course.watchers.append(self._watch)
        self._commits: dict[Version, Mapping[str, Any]] = {}
        self._curve: list[CurvePoint] = []
        self._before: F32 | None = None
        """The newest version that is not evaluated yet."""

        self._at_begin: dict[str, tuple[int, float]] = {}
        self._at_end: dict[str, tuple[int, float]] = {}
        self._ends_s = 0.0

    def through(self) -> RunRecord:
        setup = self._setup
        rounds_s = setup.run.tokens / setup.ideal_tokens_per_s + _transfers_s(setup)
        self._course.run_through(self._hopeless, LIMIT_EXTRA_S + LIMIT_FACTOR * rounds_s)
        return self._record()

    def _hopeless(self) -> bool:
        """Whether the run will never reach its tokens."""
        lost = any(learner.diverged for learner in self._parts.learners) or self._tally.voids_in_a_row >= HOPELESS_VOIDS
        return lost and not self._done

    @property
    def _done(self) -> bool:
        """All tokens are applied and published."""
        return bool(self._curve) and self._curve[-1].tokens >= self._setup.run.tokens

    # ---- events of the run ----

    def _watch(self, role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        spoiler = self._parts.spoiler
        if role == "master":
            self._tally.watch(process, kind, fields)
        elif kind == "push_begun" and spoiler is not None and spoiler.has_spoilt(process.name):
            self._tally.bad.add(fields["push"])

    def _journalled(self, record: Mapping[str, Any]) -> None:
        self._tally.journal(record, self._now_s)
        if record["kind"] == "COMMIT" and self._parts.versions is not None:
            version = version_of(record["version"])
            assert version is not None, "a COMMIT names its version"
            self._commits[version] = record

    @property
    def _now_s(self) -> float:
        return self._course.kernel.now_s

    def _published(self, version: Version) -> None:
        if not self._curve:
            self._tally.began_s = self._now_s
            self._at_begin = self._made()
        tokens, at_s, done = self._tally.tokens[version], self._now_s - self._tally.began_s, self._done
        if self._parts.versions is not None:
            self._parts.versions(self._commits.pop(version), self._course.parameters(version))
        self._add(version, tokens, at_s)
        if self._done and not done:
            self._ends_s, self._at_end = at_s, self._made()
        if self._progress is not None:
            self._progress(tokens, at_s)

    def _made(self) -> dict[str, tuple[int, float]]:
        """The steps of each cluster, and the time that it spent on them."""
        return {name: (host.steps, host.trained_until_now_s) for name, host in self._course.clusters.items()}

    # ---- the curve ----

    def _add(self, version: Version, tokens: int, at_s: float) -> None:
        before_tokens = self._curve[-1].tokens if self._curve else 0
        self._curve.append(CurvePoint(str(version), tokens, at_s, None))
        total, marks = self._setup.run.tokens, self._setup.run.evaluations
        if self._parts.evaluate is None or before_tokens >= total:
            return
        if before_tokens < total < tokens and self._before is not None:
            self._measure(-2, self._before)
        theta = self._course.parameters(version)
        due = tokens * marks // total > before_tokens * marks // total
        self._before = None if due else theta
        if due:
            self._measure(-1, theta)

    def _measure(self, index: int, theta: F32) -> None:
        assert self._parts.evaluate is not None, "called only with training"
        loss = self._parts.evaluate(theta)
        self._curve[index] = replace(self._curve[index], loss=loss if math.isfinite(loss) else None)

    # ---- the end ----

    def _ended(self, loss: float | None) -> str:
        if not self._done and self._tally.voids_in_a_row >= HOPELESS_VOIDS and self._tally.locked_out:
            return "locked out"
        untrained = self._done and self._parts.evaluate is None
        return "finished" if untrained or loss is not None else "diverged"

    def _record(self) -> RunRecord:
        setup, tally, hopeless = self._setup, self._tally, self._hopeless()
        if hopeless:
            self._ends_s, self._at_end = self._now_s - tally.began_s, self._made()
        loss, virtual_s = (None, self._ends_s) if hopeless else at_tokens(self._curve, setup.run.tokens)
        assert hopeless or self._done, "the master ends a run at its tokens"
        begun = self._at_begin
        return RunRecord(
            self._method.name, self._seed, "", setup.run.tokens, self._ended(loss), loss, virtual_s,
            tally.rounds, tally.voids,
            curve=tuple(self._curve),
            judged=tuple(tally.facts),
            alarms=tuple(tally.alarms),
            cluster_tokens=dict(tally.cluster_tokens),
            cluster_steps={name: steps - begun[name][0] for name, (steps, _) in self._at_end.items()},
            waited_s={name: self._ends_s - trained_s + begun[name][1] for name, (_, trained_s) in self._at_end.items()},
        )  # fmt: skip


def _transfers_s(setup: ComparisonSetup) -> float:
    """Seconds of all pushes and pulls of a run, if the slowest link carries each cluster's share."""
    rates = (*setup.up_bits_per_s, *setup.down_bits_per_s, setup.links.slave_card)
    slowest = min((rate for rate in rates if rate > 0), default=math.inf)
    rounds = setup.run.tokens / (setup.n_clusters * setup.run.inner_steps * setup.tokens_per_step)
    return 2 * rounds * 8 * wire_bytes(setup) / slowest
