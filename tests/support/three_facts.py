"""What a run of foreign programs is held to when it has ended: its model, its tokens, and its own records.

Each cluster's program calls `note` at its end; the test compares what was noted with what Di-PS has of the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.dips_command import assert_verified, dips
from support.judged_run import commits_of
from support.up_run import UpRun

PATIENT = 'preset = "safe"\noverlap = "none"\ngrace_s = "1 h"\nround_timeout_s = "2 h"\nverdict_wait_s = "4 h"\n'
"""Of [master]: each round waits for all clusters, and each cluster for its verdict. So no push is old, and none is
excluded, however slow a cluster is."""

TRAINED, _STEPS = "trained.safetensors", "steps.json"
_LEFT = re.compile(r"leaving \(the run has ended\) without (\d+) steps? with (\d+) tokens")
"""What a cluster says of its steps after its last push, when the run has ended meanwhile: they count nowhere."""


def note(folder: Path, trained: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> None:
    """Write what a cluster's program holds at its end.

    Args:
        folder: Of this cluster alone.
        trained: What the run trains, by its name in the full model.
        tokens: Of each step, as the program itself counted them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in trained.items()}, folder / TRAINED)
    (folder / _STEPS).write_text(json.dumps(list(tokens)))


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_three_facts(run: UpRun, folders: Mapping[str, Path]) -> None:
    """Assert that the exported model is the trained one, that counted tokens are trained tokens, and that the run's
    records prove its promises.

    Args:
        run: A PATIENT one that has ended at its limit of tokens: clusters hold the version that they pulled last.
        folders: Of clusters, as given to `note`.
    """
    counted = exported_is_trained(run.directory, folders)
    decided = [part for commit in commits_of(run.directory) for part in commit["participants"]]
    assert counted == sum(part["tokens"] for part in decided if part["verdict"] == "APPLIED")
    for name, folder in folders.items():
        of_steps = json.loads((folder / _STEPS).read_text())
        pushed = [part for part in decided if part["push"][0] == name]
        told = _LEFT.findall(run.logs[name].read_text())
        steps, tokens = map(int, told[-1]) if told else (0, 0)
        assert len(of_steps) == sum(part["steps"] for part in pushed) + steps, f"steps of cluster {name}: {told}"
        assert sum(of_steps) == sum(part["tokens"] for part in pushed) + tokens, f"tokens of cluster {name}: {told}"
    assert_verified(run.directory)


def exported_is_trained(run: Path, folders: Mapping[str, Path]) -> int:
    """Assert that `dips export` gives what each cluster holds, to the bit. Returns the tokens of that version."""
    file = run.parent / "exported.safetensors"
    told = dips("export", run, "--to", file, "--json")
    assert told.returncode == 0, told.stderr
    exported = load_file(file)
    for name, folder in folders.items():
        trained = load_file(folder / TRAINED)
        assert exported.keys() == trained.keys(), f"names in cluster {name}"
        other = [what for what in exported if not _same_bits(exported[what], trained[what])]
        assert other == [], f"not equal to the bit in cluster {name}: {other[:5]} and more, {len(other)} in all"
    return int(json.loads(told.stdout)["tokens"])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
