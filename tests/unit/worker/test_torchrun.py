"""The exit code of a node of several ranks."""

from __future__ import annotations

import signal
from argparse import Namespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from dips.core.errors import FatalError
from dips.worker import torchrun


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
    assert torchrun.exit_code(ends) == code


def failed(*codes: int) -> ChildFailedError:
    """Of one rank after the other, of which the last one failed first."""
    failures = {rank: ProcessFailure(rank, pid=1, exitcode=code, error_file="") for rank, code in enumerate(codes)}
    for rank, failure in failures.items():
        failure.timestamp = -rank
    return ChildFailedError("x.py", failures)


@pytest.mark.parametrize(
    ("for_srun", "ended_by", "code"),
    [
        ([], None, 0),
        ([], failed(6, 9), 9),
        ([], failed(2, 7), 2),
        (["--for-srun"], failed(2), 202),  # higher than those of other nodes
        ([], SignalException("told to end", signal.SIGTERM), 143),
        ([], RendezvousError("the other nodes are gone"), FatalError.exit_code),
    ],
)
def test_a_node_ends_with_the_code_of_what_ended_it(
    for_srun: list[str],
    ended_by: Exception | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(parsed: Namespace) -> None:
        assert (parsed.nproc_per_node, parsed.training_script) == ("3", "x.py")
        assert parsed.training_script_args == ["--steps", "5"]
        if ended_by is not None:
            raise ended_by

    said: list[list[str]] = []
    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("subprocess.run", lambda command, check: said.append(command))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert torchrun.main([*for_srun, "--nproc-per-node", "3", "x.py", "--steps", "5"]) == code
    assert said == [["scancel", "--batch", "--signal=36", "7"]] * (code == 202)
    assert bool(capsys.readouterr().err) == isinstance(ended_by, ChildFailedError | RendezvousError)
