"""Rounds for the tests of the penalty: pseudo-gradients as short vectors, judged one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dips.master.state.penalty import judge
from dips.master.state.penalty_types import DetectorState, Judgement, Participant, PenaltyConfig

Vector = Sequence[float]


def gram_of(vectors: Sequence[Vector]) -> list[list[float]]:
    return [[sum(a * b for a, b in zip(left, right, strict=True)) for right in vectors] for left in vectors]


def along(norm: float, axis: int = 0, size: int = 8) -> Vector:
    """A vector of that norm; vectors along different axes have cosine 0."""
    return [norm if i == axis else 0.0 for i in range(size)]


@dataclass
class Push:
    vector: Vector
    tokens: float = 1000.0
    nonfinite_elems: int = 0
    local_steps: int = 64
    made_steps: int = 0
    all_zero: bool = False
    since_base: Vector = ()

    @property
    def moved(self) -> Vector:
        return self.since_base or [0.0] * len(self.vector)

    @property
    def way(self) -> Vector:
        return [a + b for a, b in zip(self.vector, self.moved, strict=True)]


@dataclass
class Master:
    config: PenaltyConfig = field(default_factory=PenaltyConfig)
    live: frozenset[str] = frozenset("abcd")
    round_tokens: float = 4000.0
    state: DetectorState = field(default_factory=DetectorState.empty)

    def judge(self, pushes: Mapping[str, Push]) -> Judgement:
        names = sorted(pushes)
        participants = [
            Participant(name, push.tokens, push.nonfinite_elems, push.local_steps, push.made_steps, push.all_zero)
            for name, push in sorted(pushes.items())
        ]
        gram = gram_of([pushes[name].vector for name in names])
        directions = gram_of([*(pushes[name].way for name in names), *(pushes[name].moved for name in names)])
        live = self.live - self.state.quarantined
        return judge(self.state, self.config, participants, gram, live, self.round_tokens, directions)

    def round(self, pushes: Mapping[str, Push]) -> Judgement:
        judgement = self.judge(pushes)
        self.state = judgement.next_state_if_committed if judgement.accepted else judgement.next_state_if_void
        return judgement

    def norms(self, **norms: float) -> Judgement:
        """A round in which each named cluster pushes a vector of that norm, along an axis of its own."""
        return self.round({name: Push(along(norm, "abcdefgh".index(name))) for name, norm in norms.items()})

    def warmed_up(self, rounds: int = 12) -> Master:
        """After rounds of all live clusters with norms near 1 that wobble by 5 %."""
        for i in range(rounds):
            self.norms(**{name: 1.0 + 0.05 * ((i + j) % 3 - 1) for j, name in enumerate(sorted(self.live))})
        return self
