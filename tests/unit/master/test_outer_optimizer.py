"""The outer optimizers of docs/algorithm.md: as coefficients of the one step that slaves make, they are what their
sources write down."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.master_bench import Bench
from support.numerics import F32

from dips.core.ids import Version
from dips.core.math import outer_numpy
from dips.core.messages import Prepare
from dips.master.state.penalty_types import PenaltyConfig
from dips.master.state.records import OuterStep, momentum_coefficients, outer_step_of, seed_step

SAFE = PenaltyConfig()
TOKENS = PenaltyConfig(momentum_scaling="tokens")
N_ELEMS = 64


def step_of(
    optimizer: str, v: int = 0, scale: float = 1.0, lr: float = 0.7, rho: float = 1.0, **knobs: object
) -> OuterStep:
    config = PenaltyConfig.of("safe", outer_optimizer=optimizer, **knobs)
    return outer_step_of(config, lr, scale, rho, Version(1, v))


def gradients(rounds: int) -> list[F32]:
    """What the rounds' merges are, whatever the parameters: the same for every optimizer."""
    rng = np.random.default_rng(5)
    return [0.1 * rng.standard_normal(N_ELEMS, np.float32) for _ in range(rounds)]


@dataclass
class Slave:
    """Makes the steps that it is told of, with the shipped reference; theta and momentum begin at zero."""

    theta: F32 = field(default_factory=lambda: np.zeros(N_ELEMS, np.float32))
    momentum: F32 = field(default_factory=lambda: np.zeros(N_ELEMS, np.float32))

    def make(self, step: OuterStep, gradient: F32) -> None:
        staging = (self.theta - gradient).reshape(1, -1)
        outer_numpy.outer_step(
            *(self.theta, self.momentum, staging, np.zeros(1, np.int64), np.ones(1, np.float32)),
            *(*astuple(step), self.theta, self.momentum, 0, N_ELEMS),
        )


def close(actual: F32, expected: object) -> None:
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=1e-5, atol=1e-6)


def test_averaging_with_its_learning_rate_is_the_mean_of_what_was_pushed() -> None:
    rng = np.random.default_rng(6)
    theta, momentum = rng.standard_normal(N_ELEMS, np.float32), np.full(N_ELEMS, 9.0, np.float32)
    pushed = rng.standard_normal((3, N_ELEMS), np.float32)
    weights = np.array([0.5, 0.25, 0.25], np.float32)
    step = step_of("averaging", lr=1.0)
    outer_numpy.outer_step(
        *(theta, momentum, pushed, np.arange(3), weights, *astuple(step), theta, momentum, 0, N_ELEMS)
    )
    close(theta, 0.5 * pushed[0] + 0.25 * pushed[1] + 0.25 * pushed[2])


@dataclass
class DelayedNesterov:
    """Async Local-SGD (arXiv 2401.09135), delayed Nesterov with c = 0, as its algorithm is printed: a buffer of
    gradients, a momentum that every N-th arrival renews, and the parameters."""

    n: int
    lr: float
    beta: float
    theta: np.ndarray = field(default_factory=lambda: np.zeros(N_ELEMS))
    m: np.ndarray = field(default_factory=lambda: np.zeros(N_ELEMS))
    buffer: np.ndarray = field(default_factory=lambda: np.zeros(N_ELEMS))
    arrivals: int = 0

    def arrive(self, gradient: np.ndarray) -> None:
        self.buffer = self.buffer + gradient
        self.arrivals += 1
        if self.arrivals % self.n == 0:
            self.m = self.beta * self.m + self.buffer / self.n
            self.theta = self.theta - self.lr * (self.beta * self.m + gradient / self.n)
            self.buffer = np.zeros(N_ELEMS)
        else:
            self.theta = self.theta - self.lr * gradient / self.n


@pytest.mark.parametrize("beta", [0.8, 0.0])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_delayed_nesterov_is_the_printed_algorithm(n: int, beta: float) -> None:
    """Three cycles and a part of a fourth: parameters after every round, the momentum at the end of each cycle."""
    slave, printed = Slave(), DelayedNesterov(n, 0.7, beta)
    for v, gradient in enumerate(gradients(3 * n + n // 2 + 1)):
        slave.make(step_of("delayed-nesterov", v, scale=0.5, outer_momentum=beta, delay_rounds=n), gradient)
        printed.arrive(0.5 * gradient.astype(np.float64))
        close(slave.theta, printed.theta)
        if (v + 1) % n == 0:
            close(slave.momentum, printed.m)


def test_delayed_nesterov_after_every_round_is_nesterov_to_the_bit() -> None:
    for v in range(5):
        assert step_of("delayed-nesterov", v, scale=0.37, delay_rounds=1) == step_of("nesterov", v, scale=0.37)


def test_the_default_is_nesterov_and_its_momentum_decays_with_the_share_only_where_that_is_asked_for() -> None:
    assert outer_step_of(SAFE, 0.7, 0.25, 0.25, Version(3, 5)) == OuterStep(0.25, 0.7, 0.8, 0.8, 1.0)
    assert outer_step_of(TOKENS, 0.7, 0.25, 1.0, Version(3, 5)) == OuterStep(0.25, 0.7, 0.8, 0.8, 1.0)
    assert seed_step(0.7) == OuterStep(1.0, 0.7, 0.0, 0.0, 1.0)
    decay, lookahead = momentum_coefficients(TOKENS, 0.25)
    assert decay == pytest.approx(0.8**0.25)
    assert lookahead == pytest.approx(0.8 * (1 - 0.8**0.25) / 0.2)
    assert momentum_coefficients(PenaltyConfig(momentum_scaling="tokens", outer_momentum=0.0), 0.5) == (0.0, 0.0)


@given(parts=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), mu=st.floats(0.0, 0.99))
def test_partial_rounds_decay_together_as_one_full_round(parts: list[float], mu: float) -> None:
    """rho that add up to 1 forget as much momentum as one full round, and the coefficients stay in range."""
    config = PenaltyConfig(momentum_scaling="tokens", outer_momentum=mu)
    product = 1.0
    for part in parts:
        decay, lookahead = momentum_coefficients(config, part / sum(parts))
        assert 0.0 <= decay <= 1.0
        assert 0.0 <= lookahead <= mu or lookahead == pytest.approx(mu)
        product *= decay
    assert product == pytest.approx(mu)


def prepared(bench: Bench) -> list[Prepare]:
    """All rounds' but the seed's, as the first slave was told."""
    told = [command for command in bench.slaves[0].commands if isinstance(command, Prepare)]
    return [prepare for prepare in told if prepare.from_version is not None]


def coefficients(prepare: Prepare) -> OuterStep:
    return OuterStep(
        *(prepare.scale, prepare.outer_lr, prepare.momentum_decay, prepare.momentum_lookahead), prepare.gradient_weight
    )


def delayed(*names: str) -> Bench:
    penalty = PenaltyConfig.of("safe", outer_optimizer="delayed-nesterov", delay_rounds=3)
    return Bench(penalty=penalty).running(*names)


def test_prepare_and_the_commit_record_carry_the_same_step() -> None:
    bench = delayed("a", "b")
    bench.rounds(4, "a", "b")
    steps = [coefficients(prepare) for prepare in prepared(bench)]
    assert [(step.momentum_decay, step.momentum_lookahead) for step in steps] == [
        (0.8, 0.0),
        (1.0, 0.0),
        (1.0, 0.8),
        (0.8, 0.0),
    ]
    assert {step.scale for step in steps} == {1.0 / 3.0}
    seed, *records = bench.entries("COMMIT")
    assert seed["judgement"] is None
    said = [record["judgement"]["outer_step"] for record in records]
    assert said == [step.to_json() for step in steps]
    assert [OuterStep(**{name: float(text) for name, text in item.items()}) for item in said] == steps


def test_a_void_round_does_not_take_a_place_in_the_cycle() -> None:
    bench = delayed("a")
    bench.rounds(1, "a")
    bench.nonfinite["a"] = 1
    bench.rounds(1, "a")
    bench.nonfinite.clear()
    bench.rounds(1, "a")
    (void,) = bench.entries("VOID")
    assert void["judgement"]["outer_step"] is None
    assert [prepare.momentum_decay for prepare in prepared(bench)] == [0.8, 1.0]


def test_the_cycle_outlives_the_master_and_goes_back_with_a_rollback() -> None:
    bench = delayed("a")
    bench.rounds(2, "a")
    bench.restart()
    bench.back("a")
    bench.rounds(1, "a")
    assert [prepare.momentum_lookahead for prepare in prepared(bench)] == [0.0, 0.0, 0.8]
    bench.slaves[1].come_back_without(Version(1, 3))
    assert bench.status().published == Version(2, 2)
    bench.pull("a")
    bench.rounds(1, "a")
    assert bench.status().published == Version(2, 3)
    last = coefficients(prepared(bench)[-1])
    assert (last.momentum_decay, last.momentum_lookahead) == (1.0, 0.8), "the third of the cycle, once more"
