"""Random processes of a run stand still for random times (SIGSTOP, SIGCONT), over and over: to find races on purpose.

Some stops are shorter than every time-out, some longer than it takes to be evicted; often two fall together. No
process may end, versions go on being published, and `dips verify --replay` finds nothing. STOP_SEED repeats the stops.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.dips_command import dips, published
from support.fault_run import EVICT_AFTER_BEATS, HEARTBEAT_S, NAMES, FaultRun
from support.fork_server import ForkServer

VERSIONS = int(os.environ.get("STOP_VERSIONS", "40"))
EVICTED_S = HEARTBEAT_S * EVICT_AFTER_BEATS
STOPS_S = ((0.001, 0.02), (0.02, 0.3), (0.3, EVICTED_S), (EVICTED_S, 2.5 * EVICTED_S))
PAUSE_S = 0.6
TWO_SHARE = 0.3


@pytest.mark.long
@pytest.mark.parametrize("number", range(int(os.environ.get("STOP_RUNS", "2"))))
def test_a_run_survives_random_stops(number: int, fork_server: ForkServer, tmp_path: Path) -> None:
    seed = int(os.environ.get("STOP_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"STOP_SEED={seed}", flush=True)
    rng, directory = random.Random(seed), tmp_path / "run"
    with FaultRun(directory, fork_server) as run:
        run.began()
        wanted = published(directory) + VERSIONS
        while published(directory) < wanted:
            names = rng.sample(NAMES, 2 if rng.random() < TWO_SHARE else 1)
            stop(run, names, rng.uniform(*rng.choice(STOPS_S)))
            run.wait(rng.uniform(0.0, PAUSE_S))
        run.until(lambda: run.everyone_is_back({}), "every process is back")
        run.until_versions(2)
        run.stop()
    done = dips("verify", "--replay", directory)
    assert done.returncode == 0, done.stdout + done.stderr


def stop(run: FaultRun, names: list[str], for_s: float) -> None:
    """Returns once all of them go on."""
    print(f"{' and '.join(names)} for {for_s:.3f} s in {run.phase_now()}", flush=True)
    woken = {name: run.woken[name] for name in names}
    run.stopped_s = for_s
    for name in names:
        run.children[name].send_signal(signal.SIGSTOP)
    if for_s < STOPS_S[0][1]:
        time.sleep(for_s)  # shorter than the looks of the run, which wakes all others
        for name in names:
            run.children[name].send_signal(signal.SIGCONT)
    else:
        run.until(lambda: all(run.woken[name] > before for name, before in woken.items()), f"{names} go on")
