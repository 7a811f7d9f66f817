"""The examples for FSDP2 and for a pipeline: started with torchrun, two clusters of two ranks each train one model."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.dips_command import ROOT, dips, ended
from support.up_run import TORCHRUN, UpRun, endless
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

EXAMPLES = {"a": ROOT / "examples" / "fsdp_loop.py", "b": ROOT / "examples" / "pipeline_loop.py"}

# Clusters that wait for each exchange.
MASTER = 'preset = "safe"\noverlap = "none"\nverdict_wait_s = "30 s"'
VERSIONS = 8
"""After so many both have learned."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_fsdp_ranks_and_pipeline_stages_train_one_model(tmp_path: Path) -> None:
    # The second example takes the number of its steps from the first one, which lies in the same folder.
    second = shutil.copy(EXAMPLES["b"], tmp_path)
    programs = {"a": (*TORCHRUN, endless(EXAMPLES["a"], tmp_path, "STEPS = 8, 32, 200")), "b": (*TORCHRUN, second)}
    with UpRun(tmp_path, programs, slaves=2, master=MASTER) as run:
        run.until_version(VERSIONS)
        run.stop()
    run_dir = run.directory
    assert all("version 1:" in log.read_text() for log in run.logs.values())
    told = dips("export", run_dir, "--to", tmp_path / "m.safetensors", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["tokens"] > 0
    told = dips("export", run_dir, "--to", tmp_path / "m", "--format", "dcp", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["format"] == "dcp"
    loss = _loss(tmp_path / "m.safetensors")
    assert loss < 0.6 * math.log(256)
    assert _loss(tmp_path / "m") == loss


LOADER = """
        class Batches(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    yield batch()

        batches = iter(torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1))
        while not sync.done:
            text = next(batches)
"""


def test_torchruns_sigterm_reaches_no_loader_of_a_rank(tmp_path: Path) -> None:
    """torchrun signals the whole group of each rank: workers that it ended failed a rank, and its steps were lost."""
    program = endless(EXAMPLES["a"], tmp_path, "STEPS = 8, 32, 200")
    lines = "        while not sync.done:\n            text = batch()\n"
    assert lines in program.read_text()
    program.write_text(program.read_text().replace(lines, LOADER.lstrip("\n")))
    with UpRun(tmp_path, {}, clusters=1) as run:
        ranks = run.begin("a", (*TORCHRUN, program))
        run.until_version(2)
        ranks.send_signal(signal.SIGTERM)
        ended(ranks, run.logs["a"])
        said = run.logs["a"].read_text()
    assert "left the run with version" in said, said
    assert "without" not in said.partition("leaving")[2], said


def _loss(exported: Path) -> float:
    """Of the published model, in one process, in nats per byte; log(256) before training."""
    example = runpy.run_path(str(EXAMPLES["a"]))
    model: nn.Module = example["NextByte"]().eval()
    if exported.is_dir():
        load(dict(model.named_parameters()), checkpoint_id=exported)
    else:
        model.load_state_dict(load_file(exported))
    torch.manual_seed(2)
    text = torch.cat([example["batch"]() for _ in range(16)])
    with torch.no_grad():
        return nn.functional.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten()).item()
