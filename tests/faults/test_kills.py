"""kill -9 of random processes at random moments, often of two at once: the run goes on, and nothing counts twice.

One seed runs always; the long tier plays KILL_SEEDS seeds, 8 unless set. Kills at a known failpoint:
test_fault_matrix.py.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.dips_command import assert_verified
from support.fault_run import CLUSTERS, NAMES, SLAVES, FaultRun
from support.fork_server import ForkServer

from dips.local.authority import ensure_keys

SEEDS = int(os.environ.get("KILL_SEEDS", "8"))
MOMENT_S = 0.8
"""Longer than a round."""

TWO_SHARE = 0.3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, SEEDS))])
def test_a_run_survives_its_kills(seed: int, fork_server: ForkServer, tmp_path: Path) -> None:
    """With keys at odd seeds: those of the data flow last as long as their process, and the next one has others."""
    rng, directory, keys = random.Random(seed), tmp_path / "run", tmp_path / "keys" if seed % 2 else None
    if keys:
        ensure_keys(keys, CLUSTERS, SLAVES)
    order = rng.sample(NAMES, len(NAMES))
    with FaultRun(directory, fork_server, keys=keys) as run:
        run.began()
        for name in order:  # every process dies
            victims = {name, rng.choice(NAMES)} if rng.random() < TWO_SHARE else {name}
            run.wait(rng.uniform(0.0, MOMENT_S))
            before = run.incarnations()
            for victim in victims:
                run.will_end(victim)
                run.children[victim].kill()
            away = {victim: before.get(victim) for victim in victims if victim in CLUSTERS}
            run.recovered(away)
            run.healed()
        run.stop()
    assert_verified(directory)
