"""The engine of comparisons: real machines, real numbers, virtual time; what it reports is what happened."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from support.number_learners import DATA, LAYOUT, BowlLearner, bowl_loss

from dips.core.errors import ConfigError
from dips.core.ids import Version
from dips.core.messages import DataRange
from dips.lab.compare.engine import HOPELESS_VOIDS, Course, ServersRun, SimulationError, plan_of, run_data_parallel
from dips.lab.compare.methods import METHODS, Injection
from dips.lab.compare.record import CurvePoint, PushFact, RunRecord, at_tokens
from dips.lab.compare.setup import ComparisonSetup, load_setup
from dips.lab.sim.arithmetic import F32
from dips.lab.sim.numbers import Numbers
from dips.worker.state.effects import Finished

TOKENS = 49_152
H = 4
STEP_TOKENS = 512


def setup_of(**changes: Any) -> ComparisonSetup:
    return load_setup("small").with_overrides(**{"tokens": TOKENS, "inner_steps": H, "evaluations": 3, **changes})


class Compared:
    """One run with numpy learners, and all that it let see."""

    def __init__(
        self, method: str, setup: ComparisonSetup | None = None, seed: int = 1, injection: Injection | None = None,
        fails_after: int | None = None,
    ) -> None:  # fmt: skip
        self.learners: dict[str, BowlLearner] = {}
        self.commits: list[tuple[Mapping[str, Any], F32]] = []
        self.progress: list[tuple[int, float]] = []
        self.evaluated: list[F32] = []
        self._fails_after = fails_after
        self.record = ServersRun(
            setup or setup_of(), METHODS[method], seed, self._learner, self._evaluate, injection,
            lambda tokens, at_s: self.progress.append((tokens, at_s)),
            lambda record, flat: self.commits.append((record, flat)),
        ).through()  # fmt: skip

    def _learner(self, name: str, index: int) -> BowlLearner:
        assert index == len(self.learners)
        return self.learners.setdefault(name, BowlLearner(fails_after=self._fails_after if index == 0 else None))

    def _evaluate(self, flat: F32) -> float:
        self.evaluated.append(flat)
        return bowl_loss(flat)

    def pushes(self) -> list[PushFact]:
        return [push for fact in self.record.judged for push in fact.pushes]

    def batches(self) -> list[tuple[DataRange, ...]]:
        return [batch for learner in self.learners.values() for batch in learner.batches]


@pytest.fixture(scope="module")
def dips() -> Compared:
    return Compared("dips")


@pytest.mark.parametrize("method", ["dips-bf16", "dips-int8", "dips-int4"])
def test_a_wire_type_learns_as_well_and_takes_less_time(method: str, dips: Compared) -> None:
    written = Compared(method)
    assert written.record.ended == "finished"
    assert written.record.loss == pytest.approx(dips.record.loss, rel=0.05)
    assert written.record.loss != dips.record.loss
    assert written.record.virtual_s < dips.record.virtual_s


class TestARun:
    def test_it_trains_all_tokens_and_learns(self, dips: Compared) -> None:
        record = dips.record
        assert (record.method, record.seed, record.inject, record.ended) == ("dips", 1, "", "finished")
        assert record.curve[0].tokens == 0
        assert record.curve[-1].tokens >= TOKENS > record.curve[-2].tokens
        assert record.loss is not None
        assert record.loss < 0.25 * bowl_loss(np.zeros(LAYOUT.n_elems, np.float32))
        assert sum(record.cluster_tokens.values()) == record.curve[-1].tokens

    def test_a_step_is_one_batch_of_rows_and_no_token_is_trained_twice(self, dips: Compared) -> None:
        seen: set[tuple[int, int, int]] = set()
        for batch in dips.batches():
            assert len(batch) == 4
            assert sum(row.tokens for row in batch) == STEP_TOKENS
            rows = {(row.pass_index, row.chunk, row.begin_tokens) for row in batch}
            assert not rows & seen
            seen |= rows

    def test_it_is_evaluated_where_it_was_said_to_be(self, dips: Compared) -> None:
        curve, whole = dips.record.curve, {str(Version(*r["version"])): flat for r, flat in dips.commits}
        known = [point for point in curve if point.loss is not None]
        for index in (1, 2):
            first = next(point for point in curve if point.tokens >= index * TOKENS / 3)
            assert first in known
        assert curve[-1] in known
        assert curve[-1].tokens == TOKENS or curve[-2] in known
        assert [bowl_loss(whole[point.version]) for point in known] == [point.loss for point in known]
        assert len(dips.evaluated) == len(known) <= 4

    def test_every_second_is_trained_or_waited(self, dips: Compared) -> None:
        record, step_s = dips.record, dict(zip("abcd", setup_of().step_s, strict=True))
        span_s = record.curve[-1].virtual_s
        for name, waited_s in record.waited_s.items():
            assert 0 <= waited_s < span_s
            trained_s = span_s - waited_s
            assert abs(trained_s - record.cluster_steps[name] * step_s[name]) <= step_s[name]

    def test_the_same_seed_is_the_same_run(self) -> None:
        setup = setup_of(tokens=16_384, jitter=0.1)
        first, again, other = (Compared("dips", setup, seed).record for seed in (1, 1, 2))
        assert first == again
        assert first.curve != other.curve


def test_rounds_of_one_step_with_rate_one_and_no_momentum_are_the_average_of_the_clusters_steps() -> None:
    steps: dict[str, list[tuple[F32, F32]]] = {}

    class Stepping(BowlLearner):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._steps = steps.setdefault(name, [])

        def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
            before = self.theta
            loss = super().step(ranges, progress_tokens)
            self._steps.append((before, self.theta))
            return loss

    versions: list[F32] = []
    n_rounds = 8
    setup = setup_of(inner_steps=1, tokens=n_rounds * 4 * STEP_TOKENS, master={"outer_lr": 1.0, "outer_momentum": 0.0})
    ServersRun(
        setup, METHODS["diloco"], 1, lambda name, index: Stepping(name), bowl_loss,
        versions=lambda record, flat: versions.append(flat),
    ).through()  # fmt: skip
    assert len(versions) == n_rounds + 1
    for number in range(n_rounds):
        begun, ended = zip(*(steps[name][number] for name in "abcd"), strict=True)
        assert all(np.array_equal(one, versions[number]) for one in begun)
        assert not np.array_equal(ended[0], ended[1])
        assert np.allclose(versions[number + 1], np.mean(ended, axis=0, dtype=np.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.kind == "servers"])
def test_every_method_ends_in_good_order(method: str) -> None:
    record = Compared(method, setup_of(tokens=16_384)).record
    assert record.ended == "finished"
    assert record.rounds > 0
    assert record.curve[-1].tokens >= 16_384


def test_one_cluster_that_is_averaged_with_nobody_is_data_parallel() -> None:
    """Text, schedule, tokens and evaluation are the same on both sides: without clip and momentum so is the model."""
    free = {"clip_norm": math.inf, "detector": "off"}
    setup = setup_of(gaps=(0.0,), tokens=H * 5 * STEP_TOKENS, master=free)
    alone, served = BowlLearner(), Compared("averaging", setup)
    record = run_data_parallel(setup, 1, alone, bowl_loss)
    n = alone.n_steps  # until it hears of the end, a served cluster makes a few more
    batches = [tuple(replace(row, lease_id=0) for row in batch) for batch in served.batches()]
    assert batches[:n] == alone.batches
    assert served.learners["a"].progress[:n] == alone.progress
    assert record.loss is not None
    assert served.record.loss == pytest.approx(record.loss, rel=1e-5)
    assert record.virtual_s < served.record.virtual_s < 1.02 * record.virtual_s + 1.0


def test_synchronous_methods_wait_for_everybody() -> None:
    record = Compared("diloco", setup_of(tokens=2 * 4 * H * STEP_TOKENS)).record
    assert [[push.cluster for push in fact.pushes] for fact in record.judged] == [list("abcd")] * 2
    assert all(fact.rho == fact.kappa == 1.0 for fact in record.judged)
    assert list(record.waited_s.values()) == sorted(record.waited_s.values(), reverse=True)


class TestBadClusters:
    BAD = Injection("nan", cluster=1, first_push=4, bad_run=2, good_run=2)

    def spoilt(self, kind: str) -> Compared:
        return Compared("dips", injection=replace(self.BAD, kind=kind))

    def test_nan_is_flagged_and_resets_the_inner_optimizer(self) -> None:
        run = self.spoilt("nan")
        of_b = [push for push in run.pushes() if push.cluster == "b"]
        assert [push.bad for push in of_b[:9]] == [self.BAD.is_bad(n) for n in range(1, len(of_b) + 1)][:9]
        assert {push.verdict for push in run.pushes() if push.bad} == {"EXCLUDED"}
        assert {push.verdict for push in run.pushes() if not push.bad} == {"APPLIED"}
        assert all(push.norm is None for push in run.pushes() if push.bad)
        assert run.learners["b"].resets >= sum(push.bad for push in of_b) - 1
        assert run.learners["a"].resets == 0
        assert run.record.inject == "nan"

    def test_a_push_that_is_thirty_times_too_long_is_flagged(self) -> None:
        run = self.spoilt("x30")
        assert {push.verdict for push in run.pushes() if push.bad} == {"EXCLUDED"}

    def test_a_flipped_push_is_merged_and_known_as_bad_here(self) -> None:
        bad = [push for push in self.spoilt("flip").pushes() if push.bad]
        assert len(bad) >= 2
        assert {push.cluster for push in bad} == {"b"}
        assert {push.verdict for push in bad} == {"APPLIED"}

    def test_a_void_has_no_factors(self) -> None:
        alone = setup_of(gaps=(0.0,), tokens=16_384)
        run = Compared("dips", alone, injection=Injection("nan", first_push=3, bad_run=1, good_run=50))
        (void,) = (fact for fact in run.record.judged if fact.pushes[0].bad)
        assert (void.kappa, void.rho, void.merged_norm) == (None, None, None)
        assert (run.record.voids, run.record.rounds) == (1, len(run.record.judged) - 1)


class TestBrokenRuns:
    def test_a_loss_that_is_not_finite_ends_it_as_diverged(self) -> None:
        record = Compared("async", fails_after=20).record
        assert (record.ended, record.loss) == ("diverged", None)
        assert 0 < record.curve[-1].tokens < TOKENS
        assert record.virtual_s >= record.curve[-1].virtual_s
        assert set(record.waited_s) == set("abcd")

    def test_nothing_but_void_rounds_end_it_as_diverged(self) -> None:
        class Lost(BowlLearner):
            def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
                super().step(ranges, progress_tokens)
                if self.n_steps > 2 * H:
                    self.theta = np.full_like(self.theta, np.nan)
                return 1.0

        record = ServersRun(setup_of(), METHODS["diloco"], 1, lambda name, index: Lost(), bowl_loss).through()
        assert (record.ended, record.loss) == ("diverged", None)
        assert record.voids == HOPELESS_VOIDS
        assert record.rounds >= 1

    def test_a_penalty_that_refuses_everybody_for_good_locks_the_run_out(self) -> None:
        """The detector as printed, after a loss of pushes: its threshold is negative, and no finite push is below."""
        run = Compared("paper-literal", setup_of(tokens=4 * TOKENS), injection=Injection("nan", cluster=1))
        assert (run.record.ended, run.record.loss) == ("locked out", None)
        last = run.record.judged[-HOPELESS_VOIDS:]
        assert {push.verdict for fact in last for push in fact.pushes} == {"EXCLUDED"}
        assert any(push.norm is not None for push in last[-1].pushes)

    def test_a_loss_on_the_way_that_is_not_finite_is_kept_as_none(self) -> None:
        losses = iter((math.inf, 0.5, 0.25, 0.125, 0.0625))
        record = ServersRun(
            setup_of(tokens=16_384), METHODS["dips"], 1, lambda name, index: BowlLearner(), lambda flat: next(losses)
        ).through()
        assert record.ended == "finished"
        assert math.inf not in [point.loss for point in record.curve]
        assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record

    def course(self) -> Course:
        plan = plan_of(setup_of(), METHODS["dips"], LAYOUT, DATA, Numbers(lambda name: BowlLearner()))
        return Course(1, plan)

    def test_a_run_that_does_not_end_is_an_error(self) -> None:
        with pytest.raises(SimulationError, match=r"does not end within 9 s.*TRAINING"):
            self.course().run_through(lambda: False, 9.0)

    def test_a_broken_promise_is_an_error(self) -> None:
        course = self.course()
        course.kernel.at(5.0, None, course.violated, "the sky fell")
        with pytest.raises(SimulationError, match="the sky fell"):
            course.run_through(lambda: False, 1e6)

    def test_a_cluster_that_fails_is_an_error(self) -> None:
        course = self.course()
        refused = Finished("it ends", ConfigError("there is no room"))
        course.kernel.at(5.0, None, course.cluster_ended, course.clusters["b"], refused)
        with pytest.raises(SimulationError, match="cluster b failed: there is no room"):
            course.run_through(lambda: False, 1e6)


class TestAtTokens:
    CURVE = (CurvePoint("1:0", 0, 0.0, None), CurvePoint("1:1", 10, 4.0, 3.0), CurvePoint("1:2", 20, 8.0, 1.0))

    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [(10, (3.0, 4.0)), (15, (2.0, 6.0)), (20, (1.0, 8.0)), (25, (1.0, 8.0)), (5, (None, 2.0)), (0, (None, 0.0))],
    )
    def test_it_is_linear_between_points(self, tokens: int, expected: tuple[float | None, float]) -> None:
        assert at_tokens(self.CURVE, tokens) == expected


Changed = tuple[ComparisonSetup, RunRecord, list[tuple[str, BowlLearner]]]
"""A set-up that changes in the run, its record, and the learners as they were made."""


@pytest.fixture(scope="module")
def changed() -> Changed:
    """d joins late, b is killed and started again, a leaves, and c becomes three times as fast."""
    rows = (
        {"at": 6.0, "cluster": "d", "presence": "comes"},
        {"at": 12.3, "cluster": "b", "presence": "killed"},
        {"at": 17.0, "cluster": "b", "presence": "comes"},
        {"at": 20.0, "cluster": "c", "step_factor": 1 / 3},
        {"at": 22.0, "cluster": "a", "presence": "leaves"},
    )
    setup = ComparisonSetup.model_validate({**setup_of().model_dump(), "changes": rows})
    learners: list[tuple[str, BowlLearner]] = []

    def learner_of(name: str, index: int) -> BowlLearner:
        assert setup.cluster_names[index] == name
        learners.append((name, BowlLearner()))
        return learners[-1][1]

    return setup, ServersRun(setup, METHODS["dips"], 1, learner_of, bowl_loss).through(), learners


class TestARunThatChanges:
    def test_a_new_process_has_a_new_learner(self, changed: Changed) -> None:
        _, record, learners = changed
        assert [name for name, _ in learners] == ["a", "b", "c", "d", "b"]
        b_steps = [learner.n_steps for name, learner in learners if name == "b"]
        assert all(b_steps)
        assert sum(b_steps) * STEP_TOKENS > record.cluster_tokens["b"], "what it had not pushed is lost"

    def test_clusters_push_while_they_are_there(self, changed: Changed) -> None:
        _, record, _ = changed
        pushed = [(fact.virtual_s, push.cluster) for fact in record.judged for push in fact.pushes]
        assert min(at_s for at_s, name in pushed if name == "d") > 6.0
        assert not [at_s for at_s, name in pushed if name == "b" and 14.0 < at_s < 17.0]
        assert max(at_s for at_s, name in pushed if name == "a") < 26.0

    def test_a_cluster_that_becomes_faster_makes_more_steps_for_each_push(self, changed: Changed) -> None:
        _, record, _ = changed
        facts = [(fact.virtual_s, push) for fact in record.judged for push in fact.pushes if push.cluster == "c"]
        before = [push.tokens for at_s, push in facts if 6.0 < at_s < 20.0]
        after = [push.tokens for at_s, push in facts if at_s > 26.0]
        assert fmean(after) > 1.3 * fmean(before)
