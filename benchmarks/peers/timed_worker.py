"""One cluster whose inner steps are timed stand-ins: each sleeps for --step-ms and moves the parameters a little.

Needs no torch. DIPS_MASTER says where the master is. Told to run until a moment, it answers with how many steps it had
made when it last had new parameters, how long that took since it began, and what became of its pushes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dips.core.config import load
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan, VerdictKind
from dips.worker.config import SECTION, ClientConfig
from dips.worker.shell import ClusterShell

F32 = NDArray[np.float32]
LAYERS = 16


class Numbers:
    """Parameters without a model: a ParameterStore of numpy."""

    def __init__(self, n_params: int) -> None:
        sizes = [n_params // LAYERS] * (LAYERS - 1)
        sizes.append(n_params - sum(sizes))
        self._layout = Layout(
            tuple(Parameter(f"layers.{i}", (n,), "float32", f"layers.{i}") for i, n in enumerate(sizes))
        )
        self.theta: F32 = np.zeros(n_params, np.float32)

    def layout(self) -> Layout:
        return self._layout

    def snapshot(self, into: F32) -> None:
        np.copyto(into, self.theta)

    def install(self, flat: F32) -> None:
        np.copyto(self.theta, flat)

    def reset_inner_optimizer(self) -> None:
        """There is none."""


class Worker:
    """Steps through inner loops and keeps count; times of CLOCK_MONOTONIC."""

    def __init__(self, driver: ClusterShell, numbers: Numbers, step_s: float) -> None:
        self._driver = driver
        self._numbers = numbers
        self._step_s = step_s

    def run(self, until_s: float) -> dict[str, float]:
        """What was done from now to the last exchange that ended before until_s."""
        driver, began_s = self._driver, time.monotonic()
        version, steps, last = driver.version, 0, None
        pushes: dict[object, bool] = {}
        done: dict[str, float] = {"steps": 0, "took_s": 0.0, "rounds": 0}
        while time.monotonic() < until_s:
            time.sleep(self._step_s)
            self._numbers.theta += np.float32(1e-7)
            steps += 1
            driver.step(1)
            if driver.last_verdict is not None and driver.last_verdict is not last:
                last = driver.last_verdict
                pushes[last.push] = last.kind is VerdictKind.APPLIED
            if driver.version != version:
                version = driver.version
                done = {"steps": steps, "took_s": time.monotonic() - began_s, "rounds": done["rounds"] + 1}
        return {**done, "pushes": len(pushes), "applied": sum(pushes.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--tape", type=Path, default=None)
    options = parser.parse_args()
    numbers = Numbers(options.params)
    config = load(ClientConfig, SECTION, overrides={
        "master": os.environ["DIPS_MASTER"], "cluster_id": f"c{options.cluster}", "tape": options.tape,
        "insecure": True,
    }).value  # fmt: skip
    with ClusterShell(config, numbers, numbers.layout(), DataPlan(DataMode.OWN)) as driver:
        print(json.dumps({"ready": True, "model_bytes": 0, "sample": []}), flush=True)
        worker = Worker(driver, numbers, options.step_ms / 1e3)
        for line in sys.stdin:
            order = json.loads(line)
            time.sleep(max(0.0, order["at_s"] - time.monotonic()))
            print(json.dumps(worker.run(order["until_s"])), flush=True)


if __name__ == "__main__":
    main()
