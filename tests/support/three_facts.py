"""What a run of foreign programs is held to when it has ended: its model, its tokens, and its own records.

Each cluster's program calls `note` at its end; the test compares what was noted with what Di-PS has of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.dips_command import dips
from support.judged_run import commits_of

PATIENT = 'preset = "safe"\noverlap = "none"\ngrace_s = "1 h"\nverdict_wait_s = "2 h"'
"""Of [master]: each round waits for all clusters, and each cluster for its verdict. So every step is pushed."""

_MODEL, _STEPS = "trained.safetensors", "steps.json"


def note(folder: Path, trained: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> None:
    """Write what a cluster's program holds at its end.

    Args:
        folder: Of this cluster alone.
        trained: What the run trains, by its name in the full model.
        tokens: Of each step, as the program itself counted them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in trained.items()}, folder / _MODEL)
    (folder / _STEPS).write_text(json.dumps(list(tokens)))


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_three_facts(run: Path, folders: Mapping[str, Path], *, to_the_last_step: bool = False) -> None:
    """Assert that the exported model is the trained one, that counted tokens are trained tokens, and that the run's
    records prove its promises.

    Args:
        run: The directory of a run that has ended at its limit of tokens.
        folders: Of each cluster, as given to `note`.
        to_the_last_step: Every step was pushed, as with PATIENT. Else a cluster may have made more steps after its last
            push, which the run does not count.
    """
    counted = exported_is_trained(run, folders)
    tokens = {name: json.loads((folder / _STEPS).read_text()) for name, folder in folders.items()}
    applied = [part for commit in commits_of(run) for part in commit["participants"] if part["verdict"] == "APPLIED"]
    for name, of_steps in tokens.items():
        mine = [part for part in applied if part["push"][0] == name]
        n_steps = sum(part["steps"] for part in mine)
        assert 0 < n_steps <= len(of_steps), f"cluster {name} made {len(of_steps)} steps, {n_steps} are counted"
        assert n_steps == len(of_steps) or not to_the_last_step, f"cluster {name}: {n_steps} of {len(of_steps)} steps"
        assert sum(part["tokens"] for part in mine) == sum(of_steps[:n_steps]), f"tokens of cluster {name}"
    assert counted == sum(part["tokens"] for part in applied)
    assert_verified(run)


def exported_is_trained(run: Path, folders: Mapping[str, Path]) -> int:
    """Assert that `dips export` gives what each cluster holds, to the bit. Returns the tokens of that version."""
    file = run.parent / "exported.safetensors"
    told = dips("export", run, "--to", file, "--json")
    assert told.returncode == 0, told.stderr
    exported = load_file(file)
    for name, folder in folders.items():
        trained = load_file(folder / _MODEL)
        assert exported.keys() == trained.keys(), f"names in cluster {name}"
        other = [what for what in exported if not _same_bits(exported[what], trained[what])]
        assert other == [], f"not equal to the bit in cluster {name}: {other[:5]} and more, {len(other)} in all"
    return int(json.loads(told.stdout)["tokens"])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_verified(run: Path) -> None:
    """Assert that the records prove every promise, and that every version comes out again from recorded pushes."""
    told = dips("verify", run, "--replay")
    assert told.returncode == 0, told.stdout + told.stderr
