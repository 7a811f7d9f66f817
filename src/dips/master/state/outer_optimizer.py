"""The outer optimizers: the step that slaves make with a round's merge, as coefficients of one linear step.

    g    = scale d
    buf' = momentum_decay buf + g
    θ'   = θ - outer_lr (gradient_weight g + momentum_lookahead buf')

A slave knows this step only (core/math/outer_numpy.py). The coefficients, which PREPARE and the COMMIT record carry,
make it Nesterov's, Polyak's or a delayed step (docs/algorithm.md, further outer optimizers). This module must never
hold state: all follows from the settings, the judgement and the number of the version that the step starts from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dips.core.ids import Version
from dips.master.state.penalty_config import PenaltyConfig


@dataclass(frozen=True)
class OuterStep:
    """The coefficients of one round's step; the names are those of PREPARE."""

    scale: float
    outer_lr: float
    momentum_decay: float
    momentum_lookahead: float
    gradient_weight: float

    def to_json(self) -> dict[str, str]:
        """The coefficients as repr text, like all floats of a record."""
        return {name: repr(value) for name, value in dataclasses.asdict(self).items()}


def seed_step(outer_lr: float) -> OuterStep:
    """The step of a round that takes one push as it is: slaves make no step and keep no momentum."""
    return OuterStep(1.0, outer_lr, momentum_decay=0.0, momentum_lookahead=0.0, gradient_weight=1.0)


def outer_step_of(config: PenaltyConfig, outer_lr: float, scale: float, rho: float, before: Version) -> OuterStep:
    """The step of the round that starts from version `before`; scale: rho kappa, of its judgement.

    `nesterov`: docs/algorithm.md, PREPARE. `heavy-ball` (Polyak 1964): θ' = θ - lr buf'. `averaging`: no momentum;
    with lr 1 the new model is the clipped and scaled mean of the pushed ones. `delayed-nesterov`: delayed_step.
    """
    mu = config.outer_momentum
    if config.outer_optimizer == "heavy-ball":
        return OuterStep(scale, outer_lr, mu, momentum_lookahead=1.0, gradient_weight=0.0)
    if config.outer_optimizer == "averaging":
        return OuterStep(scale, outer_lr, momentum_decay=0.0, momentum_lookahead=0.0, gradient_weight=1.0)
    if config.outer_optimizer == "delayed-nesterov":
        return delayed_step(scale, outer_lr, mu, config.delay_rounds, before)
    decay, lookahead = momentum_coefficients(config, rho)
    return OuterStep(scale, outer_lr, decay, lookahead, gradient_weight=1.0)


def delayed_step(scale: float, outer_lr: float, beta: float, n: int, before: Version) -> OuterStep:
    """Delayed Nesterov of Async Local-SGD (arXiv 2401.09135, with c = 0): momentum moves the model every n-th round.

    Each round makes θ - lr g/n; the last of a cycle of n also m ← β m + (sum of the cycle's g)/n, θ ← θ - lr β m. The
    buffer collects that sum itself: it decays by β in the first round of a cycle, and by nothing in the others.
    `before` counts the rounds since the run began, so that neither a restart nor a ROLLBACK loses the place.
    """
    place = before.v % n
    decay = beta if place == 0 else 1.0
    lookahead = beta if place == n - 1 else 0.0
    return OuterStep(scale / n, outer_lr, decay, lookahead, gradient_weight=1.0)


def momentum_coefficients(config: PenaltyConfig, rho: float) -> tuple[float, float]:
    """Nesterov's (decay, lookahead) for a round with the share rho of a full round.

    Normally both are mu_o. With momentum_scaling = "tokens": decay m = mu_o^rho, so that rounds whose rho add
    up to one decay the momentum as much as one full round; lookahead = mu_o (1 - m) / (1 - mu_o), which keeps
    the momentum's part of the step in proportion. Both are mu_o exactly when rho = 1.
    """
    mu = config.outer_momentum
    if config.momentum_scaling == "off" or rho == 1.0:
        return mu, mu
    decay = mu**rho
    return decay, mu * (1.0 - decay) / (1.0 - mu)
