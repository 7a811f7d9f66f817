"""Two clusters of several ranks in a run that goes on for a while: they train through exchanges, a slave dies, one
pushes NaN and is excluded, one is drained; what is left is what `dips verify --replay` proves, and on every rank.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fork_server import ForkServer
from support.judged_run import JudgedRun
from support.parallel_process import TOKENS
from support.parallel_run import RankedCluster
from support.waiting import until

from dips.core.net.security import INSECURE
from dips.core.observe.tape import read_tape
from dips.local.log_files import tape_path
from dips.local.operator_client import OperatorClient
from dips.worker.reader import fetch_version

LONG = 1_000_000
"""Steps of a loop that the run ends."""

WIRES = {"float32": "F32", "bfloat16": "BF16", "int8": "INT8", "int4": "INT4"}


def start(server: ForkServer, run: JudgedRun, name: str, kind: str, wire: str, **options: object) -> RankedCluster:
    given = {
        "DIPS_MASTER": run.address, "DIPS_RUN": "test", "DIPS_CLUSTER": name, "DIPS_INSECURE": "1",
        "DIPS_WORKER_WIRE_DTYPE": wire, "DIPS_WORKER_TAPE": str(tape_path(run.directory, name)),
    }  # fmt: skip
    more: dict[str, Any] = {"steps": LONG, "step_s": 0.004, "unrecorded": True, **options}
    return RankedCluster.start(server, kind, run.directory / f"ranks-{name}", given, **more)


@pytest.mark.parametrize(
    ("overlap", "drained", "stays", "wires"),
    [
        ("none", "fsdp-tp4", "fsdp2", ("int8", "float32")),
        ("push", "tp2", "pp2", ("bfloat16", "int4")),
        ("full", "fsdp2", "interleaved2", ("float32", "int8")),
    ],
    ids=["none", "push", "full"],
)
def test_a_run_of_ranks(
    server: ForkServer, tmp_path: Path, overlap: str, drained: str, stays: str, wires: tuple[str, str]
) -> None:
    # NaN alone is excluded: on a busy machine one push has 4 steps and the next 100, and their norms tell nothing.
    pull_wire = "int8" if overlap == "push" else "float32"
    settings: dict[str, Any] = {
        "overlap": overlap, "chunk_bytes": 4096, "grace_s": 0.2, "detector": "off", "pull_wire": pull_wire,
    }  # fmt: skip
    with JudgedRun(tmp_path / "run", server=server, **settings) as run:
        a = start(server, run, "a", drained, wires[0], number=0)
        b = start(server, run, "b", stays, wires[1], number=1, spoil=41)
        run.wait_for_version(4)
        run.kill("s1")
        until(lambda: "s1" in run.status().waiting_slaves, "the master notices it")
        run.start_slave("s1")
        until(lambda: "EXCLUDED" in verdicts(run, "b"), f"NaN went unnoticed: {b.logs()}")
        run.wait_for_version(run.version() + 3)
        with OperatorClient(run.address, security=INSECURE) as operator:
            operator.drain("a", "other work")
            left = [record["news"] for record in a.records()]
            run.wait_for_version(run.version() + 3)
            operator.stop("the test is over")
        stopped = [record["news"] for record in b.records()]
        (theta,) = b.flats("last")
        final = fetch_version(run.address, None, "check", INSECURE)
        assert np.array_equal(final.flat, theta), "every rank has the last version"
        for news in (left, stopped):
            assert all(said == news[0] for said in news), "all ranks of a cluster know the same"
            assert news[0]["ended"]
        assert stopped[0]["version"] == str(final.version)
        run.judge()
        (lost,) = [event["lost_tokens"] for event in tape(run, "a") if event["kind"] == "leaving"]
        assert run.applied_tokens("a") == TOKENS * left[0]["steps"] - lost, (
            "each step counts once, or is said to be lost"
        )
        assert not lost or overlap != "none", "steps during the last exchange alone are lost"
        assert stopped[0]["resets"] >= 1, "the inner optimizers' state was of the parameters that were dropped"
        installed = [event for name in "ab" for event in tape(run, name) if event["kind"] == "installed"]
        modes = Counter(event["mode"] for event in installed)
        assert WIRES[pull_wire] in {event["wire"] for event in installed}
        assert overlap == "none" or modes["REBASE_FROM_PUSH"], f"no cluster trained through an exchange: {modes}"
        for name, wire in zip("ab", wires, strict=True):
            pushes = [event for event in tape(run, name) if event["kind"] == "push_sent" and event["base"] != "None"]
            assert pushes[-1]["wire"] == WIRES[wire]
            assert {event["wire"] for event in pushes} <= {WIRES[wire], "F32"}, "whole, after a slave has lost the base"


def tape(run: JudgedRun, name: str) -> list[dict[str, Any]]:
    return list(read_tape(tape_path(run.directory, name)))


def verdicts(run: JudgedRun, name: str) -> set[object]:
    return {event["verdict"] for event in tape(run, name) if event["kind"] == "verdict"}
