"""What goes into judging a round and what comes out: values only, no rule.

Legend: k participants in cluster-id order; G_j norm of a pseudo-gradient, Gn_j the same for an average number
of tokens, z_j its score, T_j tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.master.state.penalty_statistics import DetectorState


@dataclass(frozen=True)
class Participant:
    """One sealed push. tokens: T_j; nonfinite_elems: over all slaves; local_steps: H_j of this push (0:
    unknown)."""

    cluster: str
    tokens: float
    nonfinite_elems: int
    local_steps: int


@dataclass(frozen=True)
class Rejection:
    """One push that is not merged; non_finite asks the cluster to reset its inner optimizer too."""

    cluster: str
    reason: str
    non_finite: bool


@dataclass(frozen=True)
class Measure:
    """What was measured of one participant; NaN where undefined. cosine: of its way with that of the others
    (master/state/penalty_direction.py)."""

    cluster: str
    norm: float
    scaled_norm: float
    score: float
    cosine: float


@dataclass(frozen=True)
class Judgement:
    """The verdict on a round. `accepted` empty means VOID. Tuples are in cluster-id order.

    weights: one for each accepted cluster, adding up to 1. scale: what the mean is multiplied with.
    pair_cosines: (cluster, cluster, cosine) of each pair. alarms: sentences for a person if the round goes as
    judged (COMMIT when something is accepted, else VOID); alarms_if_void: those to use when PREPARE turns it
    into a VOID. quarantined: after the round goes as judged. threshold: tau of this round.
    """

    accepted: tuple[str, ...]
    rejected: tuple[Rejection, ...]
    weights: tuple[float, ...]
    kappa: float
    rho: float
    merged_norm: float
    clip_norm: float
    threshold: float
    measures: tuple[Measure, ...]
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
