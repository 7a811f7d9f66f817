"""`dips verify --replay` computes the versions of a run with another outer optimizer again; real processes."""

from __future__ import annotations

import json
from pathlib import Path

from support.whole_run import WholeRun

from dips.judge.records import read_run
from dips.judge.replay import replay_run


def test_a_run_with_another_outer_optimizer_is_computed_again_too(tmp_path: Path) -> None:
    """Every round says its own coefficients, so replaying asks nothing of the optimizer."""
    run = WholeRun(tmp_path / "run", outer_optimizer="delayed-nesterov", delay_rounds=2, outer_momentum=0.5)
    run.slave = {"record_pushes": True}
    with run:
        cluster = run.cluster("a", 1, step_s=0.01)
        run.wait_for_version(4)
        run.stop(cluster)
    replayed = replay_run(run.directory, read_run(run.directory))
    assert (replayed.wrong, replayed.skipped) == ([], [])
    assert replayed.versions >= 5
    rounds = [json.loads(path.read_text()) for path in (run.directory / "s0" / "pushes").glob("round-*.json")]
    told = {r["from_version"]: (r["momentum_decay"], r["momentum_lookahead"]) for r in rounds if r["from_version"]}
    assert {name: told[name] for name in ("1:0", "1:1", "1:2", "1:3")} == {
        "1:0": (0.5, 0.0),
        "1:1": (1.0, 0.5),
        "1:2": (0.5, 0.0),
        "1:3": (1.0, 0.5),
    }
