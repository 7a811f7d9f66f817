"""What the machines compute together is DiLoCo: the versions of a simulated run against plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plain_diloco import Step, plain_diloco

from dips.core.messages import DataRange
from dips.lab.compare.engine import run_on_servers
from dips.lab.compare.methods import find_method
from dips.lab.compare.setup import ComparisonSetup, load_setup
from dips.lab.sim.arithmetic import F32
from dips.trainer.config import TrainConfig
from dips.trainer.learner import ByteLearner, SharedText, read_text
from dips.trainer.model import ByteModel
from dips.trainer.sizes import SIZES
from dips.worker.state.work import joined

H, ROUNDS = 2, 4
BATCH, SEQUENCE = 2, 32
LR, WARMUP_TOKENS = 3e-3, 200
OUTER_LR, OUTER_MOMENTUM, CLIP_NORM = 0.7, 0.8, 1.0

CASES = [("safe", 1), ("safe", 3), ("diloco-clip", 3)]
"""(method, clusters)"""


class Recording(ByteLearner):
    """Remembers which rows each step was given."""

    def __init__(self, train: TrainConfig, text: SharedText, total_tokens: int) -> None:
        super().__init__(train, text, total_tokens)
        self.steps: list[Step] = []

    def step(self, ranges: Sequence[DataRange], progress_tokens: int) -> float:
        self.steps.append(tuple(ranges))
        return super().step(ranges, progress_tokens)


@dataclass(frozen=True)
class Ran:
    """What a simulated run published, and what it was made from. rounds[round][cluster][step]; commits: of rounds."""

    versions: list[F32]
    commits: list[Mapping[str, Any]]
    rounds: list[list[list[Step]]]
    train: TrainConfig
    text: SharedText
    total_tokens: int

    def plain(self, kappas: Sequence[float] | None = None) -> list[F32]:
        """The versions as plain torch has them."""
        model = ByteModel(SIZES[self.train.model_size], self.train.seed)
        versions = plain_diloco(
            model, self.text.training, self.train, self.total_tokens, self.rounds,
            OUTER_LR, OUTER_MOMENTUM, CLIP_NORM, kappas,
        )  # fmt: skip
        return [version.numpy() for version in versions]

    @property
    def kappas(self) -> list[float]:
        return [float(commit["judgement"]["kappa"]) for commit in self.commits]


def setup_of(n_clusters: int) -> ComparisonSetup:
    setup = load_setup("small")
    inner = {"batch_size": BATCH, "sequence_tokens": SEQUENCE, "lr": LR, "warmup_tokens": WARMUP_TOKENS}
    return setup.model_copy(update={"inner": setup.inner.model_copy(update=inner)}).with_overrides(
        gaps=(0.0,) * n_clusters,
        inner_steps=H,
        tokens=n_clusters * ROUNDS * H * BATCH * SEQUENCE,
        jitter=0.0,
        master={"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM},
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer; {i * i}\n" for i in range(500)))
    return path


@lru_cache(maxsize=len(CASES))
def ran(method: str, n_clusters: int, data: Path) -> Ran:
    setup = setup_of(n_clusters)
    train = TrainConfig(
        data=(data,), chunk_tokens=128, heldout_fraction=0.1, seed=7, device="cpu", **setup.inner.model_dump()
    )
    text, total = read_text(train), setup.run.tokens
    learners = {name: Recording(train, text, total) for name in setup.cluster_names}
    versions: list[F32] = []
    commits: list[Mapping[str, Any]] = []

    def published(commit: Mapping[str, Any], theta: F32) -> None:
        commits.append(commit)
        versions.append(theta)

    run_on_servers(
        setup, find_method(method), 1, lambda name, _: learners[name], lambda _: 0.0, versions=published
    )  # fmt: skip
    rounds = [[learners[name].steps[r * H : (r + 1) * H] for name in setup.cluster_names] for r in range(ROUNDS)]
    return Ran(versions, commits[1:], rounds, train, text, total)


@pytest.mark.parametrize(("method", "n_clusters"), CASES)
def test_every_version_is_plain_dilocos_of_what_the_journal_names(method: str, n_clusters: int, data: Path) -> None:
    run = ran(method, n_clusters, data)
    plain = run.plain(run.kappas)
    assert len(run.versions) == len(plain) == ROUNDS + 1
    assert [np.array_equal(ours, theirs) for ours, theirs in zip(run.versions, plain, strict=True)] == [True] * (
        ROUNDS + 1
    )
    for ours, theirs in zip(run.versions, run.plain(), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    clusters = setup_of(n_clusters).cluster_names
    for commit, rows_of in zip(run.commits, run.rounds, strict=True):
        assert commit["judgement"]["accepted"] == list(clusters)
        assert float(commit["judgement"]["rho"]) == 1.0
        for participant, steps in zip(commit["participants"], rows_of, strict=True):
            assert participant["base"] == commit["from_version"]
            named = tuple(DataRange(*numbers) for numbers in participant["ranges"])
            assert named == joined(row for rows in steps for row in rows)
    kappas = ran(method, n_clusters, data).kappas
    assert min(kappas) < 0.9 < max(kappas) == 1.0
