"""A cluster without torch as a process: python -m support.cluster_process NAME MASTER [options].

It trains support.whole_run's numpy model until the run has ended. With `--checkpoints` it goes on from its newest
checkpoint, so that it may be killed at any time. SIGTERM: it leaves the run in order. It ends with 0 when its part has
ended, else with the exit code of the error. The environment arms failpoints and names keys, as for every command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.whole_run import LAYOUT, LEASED, NumpyModel, option_words

from dips.core.errors import DipsError
from dips.core.layout import Layout, Parameter
from dips.core.messages import DataMode, DataPlan
from dips.core.net.security import KEYS_VARIABLE
from dips.core.observe.failpoints import install
from dips.core.observe.logs import configure_logging
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell

STEP_TOKENS = 10


def command(name: str, master: str, **options: object) -> list[str]:
    """The command line that starts one; options: those below, by their names; True: a switch."""
    return [sys.executable, "-m", "support.cluster_process", name, master, *option_words(options)]


def layout_of(n_elems: int) -> Layout:
    rows = max(1, n_elems // (6 * 8))
    layers = tuple(Parameter(f"layers.{i}.w", (rows, 5 + i), "float32", f"layers.{i}") for i in range(6))
    return Layout(layers, block_elems=max(50, n_elems // 8))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("master")
    parser.add_argument("--tape", type=Path)
    parser.add_argument("--checkpoints", type=Path, help="its own directory; without: it keeps none")
    parser.add_argument("--checkpoint-every-s", type=float, default=0.1)
    parser.add_argument("--elems", type=int, help="about so many parameters; without: support.whole_run's LAYOUT")
    parser.add_argument("--step-s", type=float, default=0.0, help="a pause in each step")
    parser.add_argument("--own-data", action="store_true", help="without: it trains on leased data")
    parser.add_argument(
        "--astray", type=Path, help="each step goes where all with this option go, or back while there is this file"
    )
    told = parser.parse_args(arguments)
    configure_logging("worker", told.name)
    try:
        install("worker")
        print(f"left: {_train(told)}", flush=True)
    except DipsError as error:
        print(f"cluster: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _config(told: argparse.Namespace) -> ClientConfig:
    keys = os.environ.get(KEYS_VARIABLE)
    knobs: dict[str, Any] = {"keys": Path(keys)} if keys else {"insecure": True}
    if told.checkpoints is not None:
        knobs |= {"checkpoint_dir": told.checkpoints, "checkpoint_every_s": told.checkpoint_every_s, "resume": True}
    return ClientConfig(cluster_id=told.name, master=told.master, tape=told.tape, **knobs)


def _train(told: argparse.Namespace) -> str:
    layout = LAYOUT if told.elems is None else layout_of(told.elems)
    model = NumpyModel(sum(told.name.encode()), layout)
    ahead = np.float32(0.05) * (NumpyModel(1, layout).target + np.float32(0.25) * model.target)
    driver = ClusterShell(_config(told), model, layout, DataPlan(DataMode.OWN) if told.own_data else LEASED)
    signal.signal(signal.SIGTERM, lambda *_: driver.request_stop("SIGTERM"))
    with driver:
        while not driver.done:
            driver.checkpoint_if_due()
            if told.astray is not None:
                model.target = model.theta - ahead if told.astray.exists() else model.theta + ahead
            time.sleep(told.step_s)
            if told.own_data:
                driver.step(STEP_TOKENS, loss=model.step())
            elif ranges := driver.lease(STEP_TOKENS):
                driver.step(sum(item.tokens for item in ranges), ranges, model.step())
            model.pushed.clear()
            model.installed.clear()
    return str(driver.exit_reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
