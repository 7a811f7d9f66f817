"""Training on CUDA devices: what is copied from and to them is right to the bit, for one process and for ranks, and
whole runs learn, go on after a kill, and can be computed again. Skipped where PyTorch finds no CUDA device.

NCCL wants a device for each rank. Where there is one device, ranks share it over gloo, which has few of the collectives
that torch's own parallelisms need: those kinds are skipped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model_ranks import NO_MERGE, ROUNDING, check_resumption, losses, losses_of_one, start_alone
from support.dips_command import assert_verified
from support.rank_script import PATHS, run_ranks
from support.trainer_run import TRAIN, Processes

N_DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(not N_DEVICES, reason="needs a CUDA device"),
]

ON_DEVICE = TRAIN.model_copy(update={"device": "cuda"})
NEEDS_TWO = pytest.mark.skipif(N_DEVICES < 2, reason="needs two CUDA devices")


def under_nccl(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=NEEDS_TWO) for kind in kinds]


COPIED = ["fsdp2", "fsdp2-unsharded", "tp2", "pp2", "interleaved2", "ep2", "masters2", "narrow"]


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master("slaves=2", "min_clusters=2", "sync_every=8")


def test_every_bit_is_collected_and_spread_between_ranks(tmp_path: Path) -> None:
    kinds = ["hsdp", "dpxtp", "ppxtp", "ppxtp:16", "irregular", "fsdp", "idle"]
    for code, lines in run_ranks("exchange_process", 4, tmp_path, *kinds, device="cuda"):
        assert code == 0, lines
        assert [json.loads(line)["owned"] > 0 for line in lines if line.startswith("{")] == [True] * len(kinds)


@pytest.mark.parametrize("kind", ["ddp2", "mapped2", *under_nccl(*COPIED)])
def test_shares_of_ranks_are_copied_and_installed_to_the_bit(kind: str, tmp_path: Path) -> None:
    for code, lines in run_ranks("shard_process", 2, tmp_path, kind, device="cuda"):
        assert code == 0, lines
        assert [json.loads(line) for line in lines if line.startswith("{")] == [{kind: []}]


@pytest.mark.parametrize("kind", ["ddp2", *under_nccl("fsdp2", "tp2", "masters2")])
def test_checkpoints_of_ranks_are_read_again(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    tasks = [f"save:{kind}", f"load:{kind}:{kind}"]
    for code, lines in run_ranks("checkpoint_process", 2, folder, *tasks, device="cuda"):
        assert code == 0, lines
        assert [json.loads(line) for line in lines if line.startswith("{")] == [{tasks[1]: []}]


def test_a_run_learns_and_is_computed_again(processes: Processes, address: str, tmp_path: Path) -> None:
    processes.start_slaves(address, ("s0", "s1"), "--record-pushes")
    for cluster, gap in (("a", 0.0), ("b", 0.4)):
        processes.start_cluster(address, cluster, ON_DEVICE.model_copy(update={"emulate_gap": gap}))
    processes.until_version(12)
    processes.stop_run("a", "b")
    for cluster in "ab":
        found = [record["loss"] for record in processes.records(cluster, "step")]
        assert found[-1] < found[0] - 1.0
        assert processes.records(cluster, "verdict"), processes.log(cluster)[-3000:]
    assert_verified(tmp_path)


def test_a_device_has_the_losses_of_the_processor(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    expected = losses_of_one(folder, device="cpu")
    assert losses(processes, start_alone(processes, device="cuda")) == pytest.approx(expected, rel=1e-3)


def test_a_killed_trainer_makes_the_same_steps_again(processes: Processes, tmp_path: Path) -> None:
    check_resumption(processes, processes.start_master(*NO_MERGE), tmp_path, "", "", device="cuda")


def test_loops_of_ranks_under_nccl_train_in_a_run(processes: Processes, address: str, tmp_path: Path) -> None:
    """Two clusters share the devices, one after the other of each; each has a rank on every device."""
    processes.start_slaves(address, ("s0", "s1"), "--record-pushes")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(N_DEVICES)]
    for cluster in "ab":
        processes.start_python(
            cluster, [*torchrun, "-m", "support.device_loop", address, cluster],
            {"PYTHONPATH": PATHS, "DIPS_WORKER_TAPE": str(processes.tape(cluster))},
        )  # fmt: skip
    processes.until_version(12)
    processes.stop_run("a", "b")
    for cluster in "ab":
        first, last = re.findall(r"steps: ([\d.]+) to ([\d.]+)", processes.log(cluster))[0]
        assert float(last) < float(first), processes.log(cluster)[-3000:]
        assert processes.records(cluster, "verdict"), processes.log(cluster)[-3000:]
    assert_verified(tmp_path)


@NEEDS_TWO
@pytest.mark.parametrize("kind", ["data=2", "fsdp=2", "tensor=2", "pipeline=2"])
def test_each_kind_has_the_losses_of_one_process_under_nccl(processes: Processes, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    expected = losses_of_one(folder, device="cuda")
    assert losses(processes, start_alone(processes, kind, device="cuda")) == pytest.approx(expected, rel=ROUNDING)
