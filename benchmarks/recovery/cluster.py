"""A cluster without torch whose steps take a set time: python cluster.py STEPS_FILE ELEMS STEP_S DATA.

It finds the run in its environment, as every loop does. The end of each step is written to STEPS_FILE as a float64 of
the machine's monotonic clock, straight to the system, so that a SIGKILL loses none. DATA: own, or leased.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import DipsError
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan
from dips.core.observe.logs import configure_logging
from dips.local.options import role_settings
from dips.worker.config import SECTION, ClientConfig
from dips.worker.shell import ClusterShell

F32 = NDArray[np.float32]
TOKENS_PER_STEP = 1000
LAYERS = 8
MOVED_ELEMS = 4096
LEASED = DataPlan(DataMode.LEASED, b"numbers", 1 << 40, TOKENS_PER_STEP)


class Walk:
    """Parameters of which each step moves a few."""

    def __init__(self, n_elems: int) -> None:
        size = max(1, n_elems // LAYERS)
        parameters = tuple(Parameter(f"layers.{i}.w", (size,), "float32", f"layers.{i}") for i in range(LAYERS))
        self._layout = Layout(parameters, block_elems=max(1, size // 4))
        self.theta: F32 = np.ones(self._layout.n_elems, np.float32)

    def layout(self) -> Layout:
        return self._layout

    def snapshot(self, into: F32) -> None:
        into[:] = self.theta

    def install(self, flat: F32) -> None:
        self.theta[:] = flat

    def reset_inner_optimizer(self) -> None:
        """There is none."""

    def step(self) -> float:
        self.theta[:MOVED_ELEMS] *= np.float32(0.9999)
        return float(self.theta[0])


def main(steps_file: Path, n_elems: int, step_s: float, data: str) -> int:
    """Train until the run has ended."""
    config = role_settings(ClientConfig, SECTION, None, {"tape": steps_file.with_suffix(".tape.jsonl")}).value
    configure_logging("worker", config.cluster_id)
    model = Walk(n_elems)
    ended = os.open(steps_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with ClusterShell(config, model, model.layout(), LEASED if data == "leased" else DataPlan(DataMode.OWN)) as driver:
        while not driver.done:
            ranges = driver.lease(TOKENS_PER_STEP) if data == "leased" else []
            if data == "leased" and not ranges:
                break
            time.sleep(step_s)
            loss = model.step()
            os.write(ended, np.float64(time.monotonic()).tobytes())
            driver.step(sum(item.tokens for item in ranges) or TOKENS_PER_STEP, ranges, loss)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
    except DipsError as error:
        print(f"cluster: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
