"""Muon as the inner optimizer: of ranks that cut the matrices, and over a kill and a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.byte_model_ranks import NO_MERGE, check_resumption, losses, losses_of_one, start_alone
from support.trainer_run import Processes

MUON: dict[str, Any] = {"inner_optimizer": "muon"}
BFLOAT16_ROUNDING = 1e-3
"""Of a loss after some steps, whose products in bfloat16 are summed in the order of the processor at hand."""


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master(*NO_MERGE)


@pytest.mark.parametrize("kind", [pytest.param("pipeline=2", marks=pytest.mark.long), "fsdp=2,tensor=2"])
def test_ranks_that_cut_the_matrices_have_one_processs_losses(processes: Processes, tmp_path: Path, kind: str) -> None:
    """Muon needs whole matrices. Its products are in bfloat16, and are summed in another order: not to the bit."""
    expected = losses_of_one(tmp_path, **MUON)
    cut = losses(processes, start_alone(processes, kind, **MUON))
    assert cut == pytest.approx(expected, rel=BFLOAT16_ROUNDING)


def test_a_killed_cluster_makes_the_same_steps_again(processes: Processes, address: str, tmp_path: Path) -> None:
    check_resumption(processes, address, tmp_path, "", "", rounding=0.0, **MUON)


def test_ranks_go_on_from_the_state_of_others(processes: Processes, address: str, tmp_path: Path) -> None:
    check_resumption(processes, address, tmp_path, "fsdp=2", "tensor=2", rounding=BFLOAT16_ROUNDING, **MUON)
