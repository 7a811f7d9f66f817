"""`torchrun -m dips train --parallel ...`: ranks train the model that one process does, alone and in a run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from support.byte_model_ranks import NO_MERGE, ROUNDING, WIDE, check_resumption, losses, losses_of_one, start_alone
from support.dips_command import assert_verified, dips_started
from support.ports import own_port
from support.trainer_run import Processes
from support.waiting import until


@pytest.fixture
def run(processes: Processes) -> str:
    """The address of a master whose rounds wait for two clusters."""
    return processes.start_master("slaves=2", "min_clusters=2", "sync_every=8")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of_one(tmp_path_factory.mktemp("one"))


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master(*NO_MERGE)


def long(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


MORE_KINDS = (
    *("fsdp=2", "tensor=2", "fsdp=4", "data=4", "tensor=4", "data=2,fsdp=2", "data=2,tensor=2"),
    *("pipeline=2,data=2", "pipeline=2,fsdp=2", "pipeline=2,tensor=2", "pipeline=2,fsdp=2,tensor=2"),
)


@pytest.mark.parametrize("kind", ["data=2", "pipeline=2", "fsdp=2,tensor=2", *map(long, MORE_KINDS)])
def test_each_kind_has_the_losses_of_one_process(processes: Processes, expected: list[float], kind: str) -> None:
    assert losses(processes, start_alone(processes, kind)) == pytest.approx(expected, rel=ROUNDING)


def test_ranks_and_one_process_train_one_model_in_a_run(processes: Processes, run: str, tmp_path: Path) -> None:
    processes.start_slaves(run, ("s0", "s1"), "--record-pushes")
    kinds = {"a": "fsdp=2", "b": ""}
    for name, kind in kinds.items():
        processes.start_cluster(run, name, WIDE.model_copy(update={"parallel": kind, "emulate_gap": 0.2}))
    processes.until_version(3)
    processes.stop_run(*kinds)
    for name in kinds:
        assert processes.records(name, "verdict"), processes.log(name)[-3000:]
    assert_verified(tmp_path)


def test_a_signal_to_one_rank_ends_all_in_order(processes: Processes, run: str) -> None:
    processes.start_slaves(run, ("s0", "s1"))
    for name, kind in (("a", "tensor=2"), ("b", "data=2")):
        processes.start_cluster(run, name, WIDE.model_copy(update={"parallel": kind}))
    for name in "ab":
        processes.until(name, lambda name=name: bool(processes.records(name, "step")))  # type: ignore[misc]
        os.kill(processes.ranks(name)[1], signal.SIGTERM)
    for name in "ab":
        assert processes.exit_code(name) == 1, "torchrun's own, for a rank that ends with 143"
        (left,) = processes.records(name, "left")
        assert left["reason"] == "SIGTERM"
        assert "exitcode  : 143" in processes.log(name)


def test_ranks_without_their_fellow_end_with_one_sentence(processes: Processes) -> None:
    train = WIDE.model_copy(update={"parallel": "fsdp=2", "steps": 1_000_000})
    processes.start_train("a", train)
    processes.until("a", lambda: bool(processes.records("a", "step")))
    os.kill(processes.ranks("a")[1], signal.SIGKILL)
    assert processes.exit_code("a") == 1
    log = processes.log("a")
    assert "dips: rank 0 of this cluster has lost another rank, which ended: its own error says why" in log


def rank_of_two(rank: int, port: int, log: Path, **added: str) -> contextlib.AbstractContextManager[Any]:
    """As torchrun starts it, but nothing ends it when the other one ends."""
    place = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(port)
    return dips_started("train", "--steps", 1, "--parallel", "data=2", "--device", "cpu", log=log, **place, **added)


def test_a_signal_ends_a_rank_that_waits_for_one_that_never_comes(tmp_path: Path) -> None:
    port = own_port()
    with rank_of_two(0, port, tmp_path / "log") as process:
        until(lambda: _listens(port), "the ranks' store", tmp_path / "log")
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_ranks_that_have_read_different_texts_are_refused(tmp_path: Path) -> None:
    port, texts = own_port(), [tmp_path / "0", tmp_path / "1"]
    for number, text in enumerate(texts):
        text.mkdir()
        for part in range(4):
            (text / f"{part}.txt").write_text(f"{number} and {part}\n" * 5000)
    with contextlib.ExitStack() as stack:
        logs = [tmp_path / f"log-{rank}" for rank in (0, 1)]
        ranks = [
            stack.enter_context(rank_of_two(rank, port, log, DIPS_TRAIN_DATA=str(texts[rank])))
            for rank, log in enumerate(logs)
        ]
        assert [rank.wait() for rank in ranks] == [2, 2]
        for log in logs:
            assert "dips: the ranks of this cluster have read different texts" in log.read_text()
            assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("fsdp=2", "tensor=4"),
        long("tensor=2", "fsdp=4"),
        long("pipeline=2", ""),
        long("data=2", "pipeline=2,data=2"),
        long("fsdp=2,tensor=2", "pipeline=2"),
    ],
)
def test_other_ranks_make_the_same_steps_after_a_kill(
    processes: Processes, address: str, tmp_path: Path, before: str, after: str
) -> None:
    rounding = ROUNDING if before or after else 0.0
    check_resumption(processes, address, tmp_path, before, after, rounding=rounding)


MUON: dict[str, Any] = {"inner_optimizer": "muon"}
BFLOAT16_ROUNDING = 1e-3
"""Of a loss after some steps, whose products in bfloat16 are summed in the order of the processor at hand."""


@pytest.mark.parametrize("kind", [long("pipeline=2"), "fsdp=2,tensor=2"])
def test_ranks_that_cut_the_matrices_of_muon_have_one_processs_losses(
    processes: Processes, tmp_path: Path, kind: str
) -> None:
    """Muon needs whole matrices."""
    expected = losses_of_one(tmp_path, **MUON)
    cut = losses(processes, start_alone(processes, kind, **MUON))
    assert cut == pytest.approx(expected, rel=BFLOAT16_ROUNDING)


@pytest.mark.parametrize(("before", "after", "rounding"), [("", "", 0.0), ("fsdp=2", "tensor=2", BFLOAT16_ROUNDING)])
def test_other_ranks_go_on_from_the_state_of_muon(
    processes: Processes, address: str, tmp_path: Path, before: str, after: str, rounding: float
) -> None:
    check_resumption(processes, address, tmp_path, before, after, rounding=rounding, **MUON)
