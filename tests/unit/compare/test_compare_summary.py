"""What is counted of a run, and what becomes of runs that were lost."""

from __future__ import annotations

import json
import math

import pytest
from support.compare_records import committed, push, record, void

from dips.lab.compare.record import RunRecord
from dips.lab.compare.report import Difference, by_method, seed_noise, summarise


def at_150(until_s: float) -> float:
    """The clusters would train 150 tokens a second."""
    return 150.0 * until_s


def test_flags_are_right_wrong_or_missing() -> None:
    rounds = (
        committed(1, push("a", 1), push("b", 1, excluded=True, bad=True)),
        committed(2, push("a", 2, excluded=True), push("b", 2, bad=True)),
        void(3, push("b", 3, excluded=True, bad=True)),
    )
    found = summarise(record(judged=rounds), at_150)
    assert (found.flagged_bad, found.flagged_good, found.missed) == (2, 1, 1)
    assert found.merged_per_round == 1.0, "a void round merges nothing, and is no round of one"
    assert found.clipped == 0.0


@pytest.mark.parametrize("loss", [None, math.inf, math.nan])
def test_a_lost_run_has_no_loss_and_its_method_no_mean(loss: float | None) -> None:
    summary = by_method([record(seed=1), record(seed=2, loss=loss, ended="diverged")], at_150)["dips"]
    assert (summary.loss, summary.sd, summary.not_finite) == (None, None, 1)
    assert summary.runs[2].loss is None
    assert summary.mean("share_of_ideal") is None
    assert summary.minus(summary) is None


def test_means_spreads_and_differences_over_seeds() -> None:
    records = [record(seed=3, loss=2.0), record(seed=1, loss=2.2), record("dp", 1, 2.1), record("dp", 3, 2.0)]
    found = by_method(records, at_150)
    assert list(found) == ["dips", "dp"]
    assert list(found["dips"].runs) == [1, 3]
    assert found["dips"].loss == pytest.approx(2.1)
    assert found["dips"].sd == pytest.approx(0.2 / math.sqrt(2))
    difference = found["dips"].minus(found["dp"])
    assert difference is not None
    assert difference.mean == pytest.approx(0.05)
    assert difference.half_90 == pytest.approx(6.314 * 0.05, rel=1e-3), "of 0.1 and 0.0: two seeds say little"
    assert found["dips"].minus(None) is None
    assert seed_noise(found) == pytest.approx(math.sqrt((0.02 + 0.005) / 2))


def test_a_method_that_lost_its_model_does_not_blur_the_others() -> None:
    """How far a run goes off is chance; pooled, it would make every difference look like nothing."""
    sound = [record("dips", seed, 2.0 + 0.01 * seed) for seed in (1, 2)]
    lost = [record("async", 1, 6.0), record("async", 2, 52.0)]
    shaken = [record("paper", 1, 2.2), record("paper", 2, 4.2)]
    steady = [record("dp", seed, 1.8 + 0.01 * seed) for seed in (1, 2)]
    assert seed_noise(by_method([*sound, *lost], at_150)) == pytest.approx(0.01 / math.sqrt(2))
    assert seed_noise(by_method([*sound, *steady, *shaken], at_150)) == pytest.approx(0.01 / math.sqrt(2))
    assert seed_noise(by_method(lost, at_150)) is None


def test_differences_are_of_the_seeds_that_both_have() -> None:
    found = by_method([record(seed=1, loss=2.5), record(seed=2, loss=9.0), record("dp", 1, 2.0)], at_150)
    assert found["dips"].minus(found["dp"]) == Difference(0.5, None)
    assert seed_noise({"dp": found["dp"]}) is None


def test_a_record_with_numbers_that_are_none_is_still_json() -> None:
    lost = record(loss=math.inf, judged=(committed(1, push("a", 1, norm=math.nan)),))
    plain = json.dumps(lost.to_json(), allow_nan=False)
    again = RunRecord.from_json(json.loads(plain))
    assert again.loss is None
    assert again.judged[0].pushes[0].norm is None
