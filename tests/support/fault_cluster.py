"""A cluster without torch that trains until it is told to end, keeps checkpoints, and may be killed at any time.

SIGTERM: leave the run in order and end with 0. Other ends: the exit code of the error that ended its part.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from support.whole_run import LEASED, NumpyModel

from dips.core.errors import DipsError
from dips.core.failpoints import install
from dips.core.layout import Layout, Parameter
from dips.core.security import KEYS_VARIABLE
from dips.core.telemetry import configure_logging
from dips.worker.config import ClientConfig
from dips.worker.driver import Driver

CHECKPOINT_EVERY_S = 0.2


def layout_of(n_elems: int) -> Layout:
    """Six layers of together about n_elems parameters, in blocks of an eighth."""
    rows = max(1, n_elems // (6 * 8))
    layers = tuple(Parameter(f"layers.{i}.w", (rows, 5 + i), "float32", f"layers.{i}") for i in range(6))
    return Layout(layers, block_elems=max(50, n_elems // 8))


def _security() -> dict[str, Any]:
    """Of the environment, as every command reads it."""
    keys = os.environ.get(KEYS_VARIABLE)
    return {"keys": Path(keys)} if keys else {"insecure": True}


def main(name: str, master: str, run: str, n_elems: str, step_s: str, checkpoints: str) -> int:
    """Train; `run`: where the tape goes; `checkpoints`: this cluster's own directory."""
    configure_logging("worker", name)
    try:
        install("worker")
        config = ClientConfig(
            cluster_id=name,
            master=master,
            tape=Path(run) / "tapes" / f"{name}.tape.jsonl",
            checkpoint_dir=Path(checkpoints),
            checkpoint_every_s=CHECKPOINT_EVERY_S,
            resume=True,
            **_security(),
        )
        layout = layout_of(int(n_elems))
        model = NumpyModel(seed=sum(name.encode()), layout=layout)
        driver = Driver(config, model, layout, LEASED)
        signal.signal(signal.SIGTERM, lambda *_: driver.request_stop("told to end"))
        with driver:
            while not driver.done:
                driver.checkpoint_if_due()
                time.sleep(float(step_s))
                ranges = driver.lease(10)
                if ranges:
                    driver.step(sum(item.tokens for item in ranges), ranges, model.step())
                model.pushed.clear()
                model.installed.clear()
    except DipsError as error:
        print(f"cluster: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    print(f"left: {driver.exit_reason}", flush=True)
    return 0
