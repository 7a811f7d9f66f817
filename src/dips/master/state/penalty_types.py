"""The inputs and outputs of judging a round: values only, no rule.

Legend: k participants in cluster-id order; G_j norm of a pseudo-gradient, Gn_j the same for an average number
of tokens, z_j its score, T_j tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dips.master.state.penalty_config import PenaltyConfig
from dips.master.state.penalty_statistics import DetectorState

INPUTS_FORMAT = 1
"""The format of a record's judgement inputs (docs/algorithm.md, what the record of a round says)."""


@dataclass(frozen=True)
class Participant:
    """One sealed push. tokens: T_j; nonfinite_elems: over all slaves; local_steps: H_j, the steps that it was asked to
    make, and made_steps those that it made, as many or more (0: unknown)."""

    cluster: str
    tokens: float
    nonfinite_elems: int
    local_steps: int
    made_steps: int = 0

    @property
    def tokens_for_local_steps(self) -> float:
        """The tokens that it would have counted for H_j steps; the cluster's usual number while no mean is known."""
        more = 0 < self.local_steps < self.made_steps
        return self.tokens * self.local_steps / self.made_steps if more else self.tokens


@dataclass(frozen=True)
class Rejection:
    """One push that is not merged; non_finite asks the cluster to reset its inner optimizer too."""

    cluster: str
    reason: str
    non_finite: bool


@dataclass(frozen=True)
class ParticipantMeasure:
    """The measurements of one participant; NaN where undefined. cosine: of its update with that of the others
    (master/state/penalty_direction.py)."""

    cluster: str
    norm: float
    scaled_norm: float
    score: float
    cosine: float


@dataclass(frozen=True)
class Judgement:
    """The verdict on a round. `accepted` empty means VOID. Tuples are in cluster-id order.

    weights: one for each accepted cluster, adding up to 1. scale: the factor of the mean.
    pair_cosines: (cluster, cluster, cosine) of each pair. alarms: sentences for a person if the round ends as
    judged (COMMIT when something is accepted, else VOID); alarms_if_void: those to use when PREPARE turns it
    into a VOID. quarantined: after the round ends as judged. threshold: tau of this round.
    """

    accepted: tuple[str, ...]
    rejected: tuple[Rejection, ...]
    weights: tuple[float, ...]
    kappa: float
    rho: float
    merged_norm: float
    clip_norm: float
    threshold: float
    measures: tuple[ParticipantMeasure, ...]
    pair_cosines: tuple[tuple[str, str, float], ...]
    next_state_if_committed: DetectorState
    next_state_if_void: DetectorState
    alarms: tuple[str, ...]
    alarms_if_void: tuple[str, ...]
    quarantined: frozenset[str]

    @property
    def scale(self) -> float:
        """rho kappa: the clip comes first, on the unscaled merge."""
        return self.rho * self.kappa


@dataclass(frozen=True)
class JudgeInputs:
    """The inputs of a judgement, in addition to the pushes' tokens: the record of the round carries them, so that the
    judgement can be computed again.

    outer_lr: of the step. live: the live clusters that are not drained, those in quarantine too. rates_tokens_per_s,
    push_intervals_s: the inputs of round_tokens, T_round. detector: the state before, where it does not follow
    from the records before: in a master's first judgement, and after another history was taken over.
    """

    config: PenaltyConfig
    outer_lr: float
    participants: tuple[Participant, ...]
    gram: tuple[tuple[float, ...], ...]
    live: tuple[str, ...]
    rates_tokens_per_s: tuple[tuple[str, float], ...]
    push_intervals_s: tuple[tuple[str, float], ...]
    round_tokens: float
    detector: DetectorState | None

    def to_json(self) -> dict[str, object]:
        """Floats as repr text, like all floats of a record; the Gram matrix as its upper triangle, row by row."""
        k = len(self.participants)
        settings = {name: _text(value) for name, value in dataclasses.asdict(self.config).items()}
        return {
            "format": INPUTS_FORMAT,
            "settings": settings | {"outer_lr": repr(self.outer_lr)},
            "gram": [repr(self.gram[row][column]) for row in range(k) for column in range(row, k)],
            "nonfinite_elems": [item.nonfinite_elems for item in self.participants],
            "local_steps": [item.local_steps for item in self.participants],
            "live": list(self.live),
            "rates_tokens_per_s": {name: repr(rate) for name, rate in self.rates_tokens_per_s},
            "push_intervals_s": {name: repr(interval_s) for name, interval_s in self.push_intervals_s},
            "round_tokens": repr(self.round_tokens),
            "detector": None if self.detector is None else self.detector.to_json(),
        }


def _text(value: object) -> object:
    return repr(value) if isinstance(value, float) else value
