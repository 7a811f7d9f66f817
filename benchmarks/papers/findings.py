"""What a command says about a place of a paper, with what the paper says there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Value = float | str | tuple[float, float]
"""A number, a statement, or a range from its lowest to its highest."""

Told = Any
"""What a command printed, read from JSON."""


class Kind(StrEnum):
    """How a number was made, from the nearest to the paper's own way to the farthest."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    COMPUTED = "computed"
    FITTED = "fitted"


KINDS: Mapping[Kind, str] = {
    Kind.MEASURED: "with real processes on this machine",
    Kind.SIMULATED: "with the real state machines of master, slaves and clusters under a virtual clock",
    Kind.COMPUTED: "by a formula, or by the planner's model of devices and links",
    Kind.FITTED: "computed or simulated, where an input was chosen so that a number of the paper comes out",
}


@dataclass(frozen=True)
class Finding:
    """published: None where the paper shows it without a number. spread: (slowest - fastest) / median of what was
    measured. assumption: what was taken where the paper leaves an input out. kind: where it is not that of its
    command's other numbers.
    """

    place: str
    what: str
    published: Value | None
    ours: Value
    unit: str = ""
    spread: float | None = None
    assumption: str = ""
    kind: Kind | None = None

    @property
    def ratio(self) -> str:
        """Ours over the paper's. Of two ranges: that of their lowest and that of their highest numbers; of a range and
        a number: the lowest and the highest. Empty where one of them is no number."""
        theirs, here = _ends(self.published), _ends(self.ours)
        if 0 in theirs:
            return ""
        if len(theirs) == len(here):
            ratios = [ours / published for published, ours in zip(theirs, here, strict=True)]
        else:
            ratios = sorted(ours / published for published in theirs for ours in here)
        return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in ratios))


def shown(value: Value | None, unit: str) -> str:
    """As text, with its unit."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    texts = dict.fromkeys(_number(end, unit) for end in _ends(value))
    return " to ".join(texts) + (f" {unit}" if unit else "")


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 10 and value % 1 else f"{value:,.4g}"


def _ends(value: Value | None) -> tuple[float, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, float | int) else ()
