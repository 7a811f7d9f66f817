"""`dips train --parallel`: every kind and mix has the losses of one process, after a kill as other ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.byte_model_ranks import NO_MERGE, ROUNDING, check_resumption, losses, losses_of_one, start_alone
from support.trainer_run import Processes

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as children:
        yield children


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of_one(tmp_path_factory.mktemp("one"))


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master(*NO_MERGE)


@pytest.mark.parametrize(
    "kind",
    [
        "fsdp=2",
        "tensor=2",
        "fsdp=4",
        "data=4",
        "tensor=4",
        "data=2,fsdp=2",
        "data=2,tensor=2",
        "pipeline=2,data=2",
        "pipeline=2,fsdp=2",
        "pipeline=2,tensor=2",
        "pipeline=2,fsdp=2,tensor=2",
    ],
)
def test_each_other_kind_has_the_losses_of_one_process(processes: Processes, expected: list[float], kind: str) -> None:
    assert losses(processes, start_alone(processes, kind)) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tensor=2", "fsdp=4"),
        ("pipeline=2", ""),
        ("data=2", "pipeline=2,data=2"),
        ("fsdp=2,tensor=2", "pipeline=2"),
    ],
)
def test_other_ranks_make_the_same_steps_after_a_kill(
    processes: Processes, address: str, tmp_path: Path, before: str, after: str
) -> None:
    check_resumption(processes, address, tmp_path, before, after)
