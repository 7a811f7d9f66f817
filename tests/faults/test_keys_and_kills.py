"""Killed processes come back with other data keys than they had, and the run goes on, all of it encrypted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import until
from support.whole_run import WholeRun

from dips.local.authority import ensure_keys


@pytest.mark.long
def test_keys_of_the_data_flow_last_as_long_as_their_process(tmp_path: Path) -> None:
    """They stand on no disk: a slave's next life has another one, and a restarted master hears all of them anew."""
    keys = tmp_path / "keys"
    ensure_keys(keys, ["a", "b"], ["s0", "s1"])
    with WholeRun(tmp_path, keys=keys) as run:
        clusters = [run.cluster("a", 1, step_s=0.005), run.cluster("b", 2, step_s=0.008)]
        run.wait_for_version(2)
        starts: dict[str, Callable[[], None]] = {"s1": lambda: run.start_slave("s1"), "master": run.start_master}
        for victim, start in starts.items():
            run.kill(victim)
            start()
            until(lambda: run.version() > 0, "nothing is published again")
            run.wait_for_version(run.version() + 2)
        for cluster in clusters:
            cluster.driver.request_stop()
            cluster.join()
            assert cluster.error is None
