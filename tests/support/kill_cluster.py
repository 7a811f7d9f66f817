"""A cluster without torch as a process of its own: python -m support.kill_cluster NAME MASTER RUN_DIRECTORY.

It keeps checkpoints and goes on from the newest one, so that it may be killed at any time. It ends with 0 when the run
has ended, and with the exit code of the error that ended its part otherwise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from support.whole_run import LAYOUT, LEASED, NumpyModel

from dips.core.errors import DipsError
from dips.core.failpoints import install
from dips.core.telemetry import configure_logging
from dips.worker.config import ClientConfig
from dips.worker.driver import Driver

STEP_S = 0.005
CHECKPOINT_EVERY_S = 0.1


def main(name: str, master: str, run: Path) -> int:
    """Train until the run has ended."""
    configure_logging("worker", name)
    install("worker")
    config = ClientConfig(
        cluster_id=name,
        master=master,
        tape=run / "tapes" / f"{name}.tape.jsonl",
        checkpoint_dir=run / "checkpoints" / name,
        checkpoint_every_s=CHECKPOINT_EVERY_S,
        resume=True,
        insecure=True,
    )
    model = NumpyModel(seed=sum(name.encode()))
    with Driver(config, model, LAYOUT, LEASED) as driver:
        while not driver.done:
            driver.checkpoint_if_due()
            time.sleep(STEP_S)
            ranges = driver.lease(10)
            if ranges:
                driver.step(sum(item.tokens for item in ranges), ranges, model.step())
    print(f"left: {driver.exit_reason}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    except DipsError as error:
        print(f"cluster: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
