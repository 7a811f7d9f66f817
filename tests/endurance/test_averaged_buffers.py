"""A CNN with batch norm, trained by three clusters: with averaged buffers its exported model is good in eval mode."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.whole_run import WholeRun

import dips
from dips.judge.records import read_run
from dips.judge.replay import replay_run

CLASSES, PIXELS, BATCH = 4, 12, 64
LAST_STEPS = 32
"""Of each cluster: what the accuracy while training is taken over."""


def network() -> torch.nn.Sequential:
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 9, CLASSES),
    )


def images(rng: np.random.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes of four directions in noise, bright and of high contrast: nothing like mean 0 and variance 1."""
    y, x = np.mgrid[:PIXELS, :PIXELS]
    ways = np.stack([x, y, x + y, x - y])
    kind = rng.integers(0, CLASSES, n)
    stripes = np.sin(1.3 * ways[kind] + rng.uniform(0, 2 * np.pi, (n, 1, 1)))
    pixels = 40 + 12 * (stripes + 1.45 * rng.standard_normal(stripes.shape))
    return torch.from_numpy(pixels[:, None]).float(), torch.from_numpy(kind)


def accuracy(model: torch.nn.Module, pixels: torch.Tensor, kind: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(pixels).argmax(1) == kind).float().mean())


class Cluster(threading.Thread):
    """Trains until the run ends; `accuracies`: of each batch, in training mode."""

    def __init__(self, run: WholeRun, number: int, buffers: str) -> None:
        super().__init__(daemon=True)
        self.model = network()
        self.accuracies: list[float] = []
        self._rng = np.random.default_rng(number)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self._sync = dips.DiLoCo(
            self.model, self._optimizer, tokens_per_step=BATCH, master=run.address, cluster_id=f"c{number}",
            insecure=True, buffers=buffers,
        )  # fmt: skip

    def run(self) -> None:
        with self._sync as sync:
            while not sync.done:
                pixels, kind = images(self._rng, BATCH)
                self._optimizer.zero_grad()
                logits = self.model(pixels)
                loss = torch.nn.functional.cross_entropy(logits, kind)
                loss.backward()
                self.accuracies.append(float((logits.argmax(1) == kind).float().mean()))
                sync.report(loss)
                self._optimizer.step()


@pytest.mark.parametrize(("buffers", "is_usable"), [("average", True), ("own", False)])
def test_an_exported_model_in_eval_mode_is_as_good_as_in_training(
    tmp_path: Path, buffers: str, is_usable: bool
) -> None:
    torch.set_num_threads(1)
    run = WholeRun(tmp_path, sync_every=16, min_clusters=3)
    run.slave = {"record_pushes": True}
    with run:
        clusters = [Cluster(run, number, buffers) for number in range(3)]
        for cluster in clusters:
            cluster.start()
        run.wait_for_version(20)
        run.stop()
        for cluster in clusters:
            cluster.join()
        command = ["export", run.address, "--to", "model.safetensors", "--insecure", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "dips.cli", *command], cwd=tmp_path, check=True, capture_output=True, text=True
        )
    told = json.loads(done.stdout)
    replayed = replay_run(tmp_path, read_run(tmp_path))
    assert replayed.versions > 15
    assert replayed.wrong == replayed.skipped == []
    assert told["lacking"] == (0 if is_usable else 4)
    model = network()
    tensors = load_file(tmp_path / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=is_usable)
    model.eval()
    assert not unexpected
    training = float(np.mean([a for cluster in clusters for a in cluster.accuracies[-LAST_STEPS:]]))
    held_out = accuracy(model, *images(np.random.default_rng(99), 5000))
    print(f"{buffers}: {training:.4f} while training, {held_out:.4f} exported and in eval mode, {told}, {missing}")
    assert training > 0.95
    if is_usable:
        assert abs(held_out - training) <= 0.01
    else:
        assert held_out < training - 0.2
