"""Mistakes of a cluster of several ranks that only real processes show. Wrong set-ups: tests/unit/worker."""

from __future__ import annotations

from pathlib import Path

from support.fork_server import ForkServer
from support.parallel_run import RankedCluster
from support.whole_run import WholeRun

from dips.core.errors import FatalError


def test_a_rank_whose_data_ends_earlier_names_the_others_and_ends_the_cluster(
    server: ForkServer, tmp_path: Path
) -> None:
    """The other one waits in a collective of the training, which gloo ends with the process, and a launcher would."""
    with WholeRun(tmp_path / "run", server=server) as run:
        given = {
            "DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": "a", "DIPS_WORKER_RANKS_WAIT_S": "2",
        }  # fmt: skip
        cluster = RankedCluster.start(server, "fsdp2", tmp_path / "ranks", given, computes=True, steps=6, short=3)
        codes = cluster.codes()
    assert codes[1] == FatalError.exit_code, cluster.logs()
    assert codes[0] != 0, cluster.logs()
    assert "rank 0 of this cluster did not leave the loop with rank 1, and made no step for 2 s" in cluster.log(1)
