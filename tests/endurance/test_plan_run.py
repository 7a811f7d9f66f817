"""Plans run on the clock, with four ranks and emulated links: an iteration takes as long as was planned, or longer.

Never shorter, as it would be if an operation or a message did not wait. How much longer is the machine's affair:
`dips plan run` itself says so, with exit code 1 above 5 % (docs/planner.md has figures of a quiet machine);
here half as long again passes. Each takes about half a minute, of which most is the start of four processes with torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.dips_command import ROOT, dips, ended, started

EXAMPLE = ROOT / "examples" / "04-plan-a-schedule"
DELAYS = ("--latency", "0.5", "--bandwidth", "0.25", "--sites", "2")

TOLERANT = ("--tolerance", 50)
"""Percent."""

pytestmark = [pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("zb_v", 2),
        ("cross_ud/2", 2),
    ],
)
def test_an_iteration_takes_as_long_as_planned(name: str, cuts: int, tmp_path: Path) -> None:
    """Also with links that several ranks share (interleaved) and parts of blocks (cross_ud/2). cuts: stages or parts of
    blocks on a rank; an operation takes 80 ms everywhere."""
    times = ("--operation-ms", 80 * cuts, "--repeats", 3)
    done = dips("plan", "run", name, *DELAYS, *times, *TOLERANT, "--ranks", "4", "--out", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert -0.01 <= found["error"] <= 0.5
    assert found["gradients"]["equal"]
    assert (tmp_path / "trace.json").is_file()


def test_the_example_trains_in_the_order_of_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text("0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0I1,0W0,0W1\n1F0,1F1,2F0,2F1,2B0,1B0,2B1,1B1\n")
    log = tmp_path / "log"
    command = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        EXAMPLE / "train_planned.py",
        plan,
    )
    with started(*command, log=log) as example:
        assert ended(example, log) == 0, log.read_text()[-3000:]
    losses = [float(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("step ")]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.02
