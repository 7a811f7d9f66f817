"""Every fuzzed place, with a few inputs: the same in every run. `make fuzz` takes new ones for minutes."""

from __future__ import annotations

import random

import pytest
from fuzz import runner
from fuzz.catalog import targets

NAMES = [target.name for target in targets()]

DRAWN, SHAKEN = 25, 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_fuzzed_place_refuses_with_a_sentence_or_takes_and_never_breaks(name: str) -> None:
    target = next(target for target in targets() if target.name == name)
    runner.feed(target, DRAWN, seed=None)
    runner.shake(target, seconds=60.0, rng=random.Random(name), most_inputs=SHAKEN)
    assert target.n_inputs >= SHAKEN
    assert target.outcomes, "nothing was counted"
