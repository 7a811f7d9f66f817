"""Wrong set-ups of a cluster of several ranks: one sentence on every rank, exit code 2, and nothing sent or touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.parallel_run import RankedCluster
from support.whole_run import WholeRun

from dips.core.errors import ConfigError, FatalError

WHOLE = {"DIPS_INSECURE": "1", "DIPS_CLUSTER": "a"}


@pytest.fixture(scope="module")
def run(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    with WholeRun(tmp_path_factory.mktemp("mistakes") / "run", server=server) as run:
        yield run


@pytest.mark.parametrize(
    ("kind", "mistake", "alone", "said"),
    [
        ("ddp2", "shape", {}, "'norm.weight'"),
        ("ep2", "values", {}, "'embed.weight'"),
        ("mapped2", "unmapped", {}, "'embed.weight'"),
        ("pp2", "clash", {}, "'blocks.0."),
        ("fsdp2", "", {"DIPS_WORKER_WIRE_DTYPE": "int8"}, "wire_dtype"),
        ("fsdp2", "", {"DIPS_MASTER": ""}, "DIPS_MASTER"),
        ("fsdp2", "rounded buffers", {}, "wire_dtype"),
    ],
    ids=[
        "a tensor of another shape",
        "other values",
        "shards without a mapping",
        "clash of stages",
        "setting",
        "master",
        "what the leader alone finds",
    ],
)
def test_every_rank_says_one_sentence_and_ends(
    server: ForkServer, run: WholeRun, tmp_path: Path, kind: str, mistake: str, alone: dict[str, str], said: str
) -> None:
    given = {"DIPS_MASTER": run.address, **WHOLE}
    options = {"mistake": mistake} if mistake else {}
    cluster = RankedCluster.start(server, kind, tmp_path / "ranks", given, of_rank={1: alone}, steps=2, **options)
    assert cluster.codes() == [ConfigError.exit_code] * 2, cluster.logs()
    lines = [cluster.log(rank).splitlines() for rank in range(2)]
    sentences = [line for line in lines[0] if line.startswith("ConfigError: ")]
    assert [sentences, sentences] == [[line for line in of if line.startswith("ConfigError: ")] for of in lines]
    assert len(sentences) == 1, cluster.logs()
    assert said in sentences[0], sentences
    assert all("its parameters are as they were" in of for of in lines)
    assert not any("Traceback" in line for of in lines for line in of)
    assert run.status().published is None, "nothing was sent"
    assert not run.status().clusters, "no cluster joined"


def test_a_rank_whose_data_ends_earlier_names_the_others_and_ends_the_cluster(
    server: ForkServer, run: WholeRun, tmp_path: Path
) -> None:
    """The other one waits in a collective of the training, which gloo ends with the process, and a launcher would."""
    given = {"DIPS_MASTER": run.address, **WHOLE, "DIPS_WORKER_RANKS_WAIT_S": "2"}
    cluster = RankedCluster.start(server, "fsdp2", tmp_path / "ranks", given, computes=True, steps=6, short=3)
    codes = cluster.codes()
    assert codes[1] == FatalError.exit_code, cluster.logs()
    assert codes[0] != 0, cluster.logs()
    assert "rank 0 of this cluster did not leave the loop with rank 1, and made no step for 2 s" in cluster.log(1)
