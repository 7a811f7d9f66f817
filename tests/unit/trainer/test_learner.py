"""A cluster of a comparison, stepped from outside: the same step as the trainer's, and nothing spoilt."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dips.core.errors import ConfigError
from dips.core.messages import DataRange
from dips.trainer.config import TrainConfig
from dips.trainer.corpus import all_ranges, take_rows
from dips.trainer.data import LeasedBatches, make_batch
from dips.trainer.evaluate import heldout_loss, windows_of
from dips.trainer.train import F32, ByteLearner, InnerTrainer, SharedText, evaluator, inner_step, read_text, schedule_of

TOTAL = 4096


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer; {i * i}\n" for i in range(400)))
    return TrainConfig(
        data=(text,), chunk_tokens=64, heldout_fraction=0.1, heldout_max_bytes=1024, batch_size=2, sequence_tokens=32,
        warmup_tokens=256, seed=3, data_seed=5, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def text(config: TrainConfig) -> SharedText:
    return read_text(config)


def batches(text: SharedText, n: int) -> list[tuple[DataRange, ...]]:
    source, held = all_ranges(text.training.plan), []
    for _ in range(n):
        held.append(next(source))
    return [take_rows(held, 2, 32) for _ in range(n)]


def vector(learner: ByteLearner) -> F32:
    flat = np.empty(learner.layout().n_elems, np.float32)
    learner.snapshot(flat)
    return flat


def test_it_steps_as_the_trainer_does_to_the_bit(config: TrainConfig, text: SharedText) -> None:
    inner, learner = InnerTrainer(config), ByteLearner(config, text, TOTAL)
    leased, schedule = LeasedBatches(inner.text, 2, 32), schedule_of(config, TOTAL)
    leased.add(part for part, _ in zip(all_ranges(inner.text.plan), range(8), strict=False))
    for n in range(4):
        batch = leased.next()
        assert learner.step(batch.ranges, n * 64) == inner.step(batch, schedule.at(n * 64))
    theirs = torch.cat([p.detach().reshape(-1) for p in inner.model.parameters()]).numpy()
    assert np.array_equal(vector(learner), theirs)


def test_a_loss_that_is_not_finite_changes_nothing_and_is_returned(config: TrainConfig, text: SharedText) -> None:
    learner = ByteLearner(config, text, TOTAL)
    first, second = batches(text, 2)
    learner.step(first, 0)
    ruined = vector(learner)
    ruined[7] = math.nan
    learner.install(ruined)
    state = {key: value.clone() for key, value in _moments(learner).items()}
    assert math.isnan(learner.step(second, 64))
    assert np.array_equal(vector(learner), ruined, equal_nan=True)
    assert all(torch.equal(value, state[key]) for key, value in _moments(learner).items())


def _moments(learner: ByteLearner) -> dict[int, torch.Tensor]:
    return {i: state["exp_avg"] for i, state in enumerate(learner._optimizers[0].state.values())}


def test_installing_keeps_the_moments_and_a_reset_forgets_them(config: TrainConfig, text: SharedText) -> None:
    learner = ByteLearner(config, text, TOTAL)
    start = vector(learner)
    first, second = batches(text, 2)
    learner.step(first, 0)
    results = []
    for reset in (False, True):
        learner.install(start)
        if reset:
            learner.reset_inner_optimizer()
        learner.step(second, 64)
        results.append(vector(learner))
    fresh = ByteLearner(config, text, TOTAL)
    fresh.step(second, 64)
    assert not np.array_equal(results[0], results[1])
    assert np.array_equal(results[1], vector(fresh))


def test_the_evaluation_is_the_trainers(config: TrainConfig, text: SharedText) -> None:
    inner, evaluate = InnerTrainer(config), evaluator(config, text)
    learner = ByteLearner(config, text, TOTAL)
    assert evaluate(vector(learner)) == heldout_loss(inner.model, windows_of(inner.heldout, config.sequence_tokens))
    rows = batches(text, 1)[0]
    learner.step(rows, TOTAL)
    rate = schedule_of(config, TOTAL).at(TOTAL)
    inner_step(inner.model, inner.optimizers, make_batch(text.training, rows), rate, 1.0)
    assert evaluate(vector(learner)) == heldout_loss(inner.model, windows_of(inner.heldout, config.sequence_tokens))


def test_a_vector_of_another_length_is_refused(config: TrainConfig, text: SharedText) -> None:
    with pytest.raises(ConfigError, match="the vector has shape"):
        evaluator(config, text)(np.zeros(3, np.float32))
