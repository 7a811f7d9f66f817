"""The exit code of a node of several ranks."""

from __future__ import annotations

import signal
from argparse import Namespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from dips.core.errors import FatalError
from dips.worker.torchrun import exit_code, main


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([-9, 6], 137),  # a killed rank; the other noticed
        ([6, -9], 6),
        ([6, 2], 2),  # a wrong setting: a person must act, whatever else was said first
        ([-15, 8], 8),
        ([143, 143], 143),  # all of them were told to end
        ([0, 1], 1),
        ([], 0),
    ],
)
def test_the_first_failure_counts_unless_a_person_must_act(ends: list[int], code: int) -> None:
    assert exit_code(ends) == code


@pytest.mark.parametrize(("arguments", "code"), [(["x.py"], 2), (["--for-srun", "x.py"], 202)])
def test_for_srun_a_code_that_stops_a_job_is_higher_than_those_of_other_nodes(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    def fails(parsed: Namespace) -> None:
        assert parsed.training_script == "x.py"
        failed = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file="")
        raise ChildFailedError("x.py", {0: failed})

    monkeypatch.setattr("torch.distributed.run.run", fails)
    assert main(arguments) == code


@pytest.mark.parametrize(
    ("ended_by", "code"),
    [
        (None, 0),
        (SignalException("told to end", signal.SIGTERM), 143),
        (RendezvousError("the other nodes are gone"), FatalError.exit_code),
    ],
)
def test_a_node_that_is_told_to_end_or_loses_the_others_says_so_with_its_code(
    monkeypatch: pytest.MonkeyPatch, ended_by: Exception | None, code: int
) -> None:
    def run(parsed: Namespace) -> None:
        if ended_by is not None:
            raise ended_by

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert main(["x.py"]) == code
