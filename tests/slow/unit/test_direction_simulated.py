"""The direction alarm through real machines: masters, slaves and clusters of the simulator, with numpy learners."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.number_learners import BowlLearner, bowl_loss

from dips.core.messages import DataRange
from dips.lab.compare.engine import ServersRun
from dips.lab.compare.methods import METHODS, Injection
from dips.lab.compare.record import PushFact, RunRecord
from dips.lab.compare.setup import load_setup

BAD = 3
"""The slowest cluster: with static steps it is nearly always alone, or late."""


def run_of(name: str, kind: str = "") -> RunRecord:
    """About 22 pushes of each cluster, far from the bowl's bottom, so that all agree on a way.

    A bowl's norms hardly differ, so that scores would tell even the model's way in a stale push: they are off.
    """
    setup = load_setup("small").with_overrides(tokens=180_224, inner_steps=4, evaluations=1)
    method = replace(METHODS[name], master={**METHODS[name].master, "detector": "off"})
    injection = Injection(kind, BAD) if kind else None
    return ServersRun(
        setup, method, 1, lambda cluster, index: BowlLearner(lr=3e-4, noise=1.0), bowl_loss, injection
    ).through()


def pushes_of(record: RunRecord) -> list[PushFact]:
    return [push for fact in record.judged for push in fact.pushes]


def direction_alarms(record: RunRecord) -> list[str]:
    return [about for _, about, _ in record.alarms if about.startswith("direction")]


def same_data_alarms(record: RunRecord) -> list[str]:
    return [about for _, about, _ in record.alarms if about.startswith("same data")]


@pytest.mark.parametrize("kind", ["noise", "flip"])
@pytest.mark.parametrize("method", ["dips", "dynamic", "diloco-clip"])
def test_a_bad_direction_raises_the_alarm_and_names_the_cluster(method: str, kind: str) -> None:
    record = run_of(method, kind)
    bad = [push for push in pushes_of(record) if push.bad]
    assert len(bad) >= 5
    assert {push.cluster for push in bad} == {"abcd"[BAD]}
    assert {push.verdict for push in bad} == {"APPLIED"}, "norms do not see it"
    measured = [push.cosine for push in bad if push.cosine is not None]
    assert len(measured) >= 5
    assert max(measured) < 0.15
    alarms = direction_alarms(record)
    assert alarms
    assert set(alarms) == {"direction of d"}


@pytest.mark.parametrize("method", ["dips", "dynamic", "safe", "diloco-clip"])
def test_clean_clusters_raise_none(method: str) -> None:
    record = run_of(method)
    measured = [push.cosine for push in pushes_of(record) if push.cosine is not None]
    assert len(measured) > 60
    assert statistics.median(measured) > 0.2
    assert direction_alarms(record) == []
    assert not same_data_alarms(record)


class _SameData(BowlLearner):
    """Draws its batches by the number of the step alone, as a loop does with the same seed on each cluster."""

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        return super().step([DataRange(1, 1, self.n_steps, 0, 1)], progress_tokens)


@pytest.mark.parametrize("method", ["dips", "diloco-clip"])
def test_two_clusters_with_the_same_data_are_named_both(method: str) -> None:
    """Of equal speed, or they would seldom meet."""
    setup = load_setup("small").with_overrides(tokens=90_112, inner_steps=4, evaluations=1, gaps=(0.0, 0.0, 0.2, 0.3))
    kinds = (_SameData, _SameData, BowlLearner, BowlLearner)
    record = ServersRun(
        setup, METHODS[method], 1, lambda cluster, index: kinds[index](lr=3e-4, noise=1.0), bowl_loss
    ).through()
    alarms = same_data_alarms(record)
    assert alarms
    assert set(alarms) == {"same data of a and b"}
