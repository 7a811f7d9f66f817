"""Decides the kind of run of a seed: most are small, some wide, some with one bad cluster, a few of thousands of
rounds. The seed alone decides, with a separate generator, so that all other choices of a small run stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Shape:
    """A kind of run. clusters, slaves: possible numbers, each entry equally likely. spares: more clusters that may join
    and leave.

    rounds: the faults last until so many rounds have begun; none: for the plan's time. sabotage: all faults are of one
    cluster, and the others' waits are judged (I15). lean: small models and short rounds, so that many fit. share: of
    all seeds.
    """

    name: str
    clusters: tuple[int, ...]
    slaves: tuple[int, ...]
    share: float
    spares: int = 0
    rounds: tuple[int, ...] = ()
    sabotage: bool = False
    lean: bool = False


SMALL = Shape("small", (2, 2, 3, 3, 4, 5), (1, 2, 2, 3, 3, 4), 0.798)
WIDE = Shape("wide", tuple(range(2, 17)), tuple(range(1, 9)), 0.1, spares=3)
SABOTAGE = Shape("sabotage", (3, 3, 4, 5), (1, 2, 3), 0.1, sabotage=True)
LONG = Shape("long", (2, 3, 3), (1, 2), 0.002, spares=1, rounds=(1000, 2000, 3000), lean=True)
SHAPES = (LONG, WIDE, SABOTAGE, SMALL)

GIVEN = Shape("given", (), (), 0.0)
"""The shape of a run whose plan was given."""


def of_seed(seed: int) -> Shape:
    """The seed's shape."""
    chance = Random(f"shape of {seed}").random()
    for shape in SHAPES:
        chance -= shape.share
        if chance < 0:
            return shape
    return SMALL


def named(name: str) -> Shape:
    """The shape with this name. Raises KeyError for an unknown one."""
    return {shape.name: shape for shape in SHAPES}[name]
