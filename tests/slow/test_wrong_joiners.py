"""Who joins a real run under a name that is taken is refused; the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.whole_run import WholeRun

from dips.core.errors import NAME_TAKEN_EXIT, Refused


def test_second_processes_of_a_slave_and_a_cluster_end_while_the_first_ones_go_on(tmp_path: Path) -> None:
    with WholeRun(tmp_path) as run:
        first = run.cluster("a", 1, step_s=0.01)
        run.wait_for_version(1)
        before, slave = run.status(), run.processes["s0"]
        run.start_slave("s0", directory=tmp_path / "elsewhere")
        second_slave, run.processes["s0"] = run.processes["s0"], slave
        second = run.cluster("a", 2, step_s=0.01)
        with pytest.raises(Refused, match="another process is cluster 'a' and beats") as refused:
            second.join()
        assert refused.value.exit_code == NAME_TAKEN_EXIT
        assert second_slave.wait() == NAME_TAKEN_EXIT, run.log("s0")
        assert "another process is slave 's0' and beats" in run.log("s0")
        run.wait_for_version(run.version() + 2)
        after = run.status()
        assert slave.poll() is None
        assert first.error is None
        assert [c.incarnation for c in after.clusters] == [c.incarnation for c in before.clusters]
        assert [s.incarnation for s in after.slaves] == [s.incarnation for s in before.slaves]
        assert after.rounds_aborted == before.rounds_aborted
        first.driver.request_stop()
        first.join()
