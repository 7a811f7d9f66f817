"""Every fuzzed place, with a few inputs: the same in every run. `make fuzz` takes new ones for minutes."""

from __future__ import annotations

import importlib
import random

import pytest
from fuzz import runner
from fuzz.catalog import targets
from fuzz.coverage_guided import TRACED
from fuzz.target import Broken, Target
from hypothesis import strategies as st

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


def test_names_differ() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", TRACED)
def test_a_module_that_coverage_guides_by_exists(name: str) -> None:
    # The tracer takes prefixes of names, and says nothing of one that no module has.
    assert importlib.import_module(name).__name__ == name


def test_another_error_than_the_promised_ones_is_found_with_its_input() -> None:
    def feed(data: bytes) -> str:
        if b"\x07" in data:
            raise ZeroDivisionError("seven")
        return "taken"

    target = Target("seven", st.binary(max_size=40), feed, (ValueError,))
    (found,) = runner.feed_for([target], seconds=0.0, seed=3)
    assert "seven: ZeroDivisionError" in found
    assert "input (1 bytes): 07" in found


def test_a_refusal_without_a_sentence_and_an_endless_input_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes) -> str:
        raise ValueError

    with pytest.raises(Broken, match="without a sentence"):
        Target("silent", st.binary(), refuse, (ValueError,)).take(b"x")
    ticks = iter((0.0, 100.0))
    monkeypatch.setattr("fuzz.target.time.process_time", lambda: next(ticks))
    with pytest.raises(Broken, match="took 100"):
        Target("slow", st.binary(), lambda data: "taken").take(b"x")
