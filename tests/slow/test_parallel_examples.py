"""The examples for FSDP2 and for a pipeline: started with torchrun, two clusters of two ranks each train one model."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.dips_command import ROOT, dips, dips_started, ended, master_file, started, until
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

EXAMPLES = {"a": ROOT / "examples" / "fsdp_loop.py", "b": ROOT / "examples" / "pipeline_loop.py"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)

# Clusters that wait for each exchange: however long one takes, none makes all of its own steps before the run ends.
RUN = """
[run]
id = "mine"
directory = "{directory}"
slaves = 2
evaluate = false
keys_for = ["a", "b"]

[slave]
memory_bytes = "64 MiB"

[master]
sync_every = 8
preset = "safe"
overlap = "none"
verdict_wait_s = "30 s"
min_clusters = 2
tk_max = "60k"
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_fsdp_ranks_and_pipeline_stages_train_one_model(tmp_path: Path) -> None:
    file, run_dir, log = tmp_path / "run.toml", tmp_path / "run", tmp_path / "up.log"
    file.write_text(RUN.format(directory=run_dir))
    logs = {name: tmp_path / f"{name}.log" for name in EXAMPLES}
    with dips_started("up", file, log=log) as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log=log)
        there = {"DIPS_MASTER": master_file(run_dir)["address"]}
        of = {name: {**there, "DIPS_CLUSTER": name, "DIPS_KEYS": str(run_dir / "keys" / name)} for name in EXAMPLES}
        with (
            started(*TORCHRUN, EXAMPLES["a"], log=logs["a"], cwd=tmp_path, **of["a"]) as a,
            started(*TORCHRUN, EXAMPLES["b"], log=logs["b"], cwd=tmp_path, **of["b"]) as b,
        ):
            assert ended(a, 100, logs["a"]) == 0, logs["a"].read_text()
            assert ended(b, 100, logs["b"]) == 0, logs["b"].read_text()
        assert ended(up, 60, log) == 0, log.read_text()
    for name in EXAMPLES:
        assert "version 1:" in logs[name].read_text()
        assert "the run has ended" in logs[name].read_text()
    told = dips("export", run_dir, "--to", tmp_path / "m.safetensors", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["tokens"] >= 60_000
    told = dips("export", run_dir, "--to", tmp_path / "m", "--format", "dcp", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["format"] == "dcp"
    loss = _loss(tmp_path / "m.safetensors")
    assert loss < 0.6 * math.log(256)
    assert _loss(tmp_path / "m") == loss


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
