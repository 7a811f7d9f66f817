"""A first hour with a Hugging Face model of one's own: two clusters that a person starts, kills and starts again, and
the folder that the run gives, opened by a program that knows nothing of Di-PS."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from support.dips_command import dips, dips_started, ended, environment, master_file, operator_of, started
from support.waiting import until

from dips.core.messages import ClusterStatus

SERVERS = """
[run]
id = "mine"
directory = "{directory}"
slaves = 2
keys_for = ["a", "b"]

[master]
listen = "127.0.0.1:0"
sync_every = 8
min_clusters = 2

[slave]
memory_bytes = "256 MiB"
"""

DATA = """
import textwrap
from pathlib import Path

import torch

LENGTH = 32
LIBRARY = Path(textwrap.__file__).parent


class Bytes(torch.utils.data.Dataset):
    def __init__(self, module):
        text = (LIBRARY / f"{module}.py").read_bytes()
        self.rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
"""

TRAIN = """
import logging
import os
import zlib
from pathlib import Path

import torch
from data import LENGTH, Bytes
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import dips

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
cluster = os.environ["DIPS_CLUSTER"]
config = GPT2Config(
    vocab_size=256, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
arguments = TrainingArguments(
    output_dir=f"trained/{cluster}", per_device_train_batch_size=8, max_steps=100_000, learning_rate=3e-3,
    lr_scheduler_type="constant", logging_steps=50, save_steps=20, save_total_limit=2,
    data_seed=zlib.crc32(cluster.encode()), use_cpu=True, report_to=[], disable_tqdm=True,
)
trainer = Trainer(
    GPT2LMHeadModel(config), arguments, train_dataset=Bytes("argparse"), eval_dataset=Bytes("textwrap"),
    callbacks=[dips.HuggingFaceCallback()],
)
print("held-out loss at the start:", trainer.evaluate()["eval_loss"], flush=True)
complete = sorted(Path(arguments.output_dir).glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
trainer.train(resume_from_checkpoint=str(complete[-1].parent) if complete else None)
print("held-out loss at the end:", trainer.evaluate()["eval_loss"], flush=True)
"""

OPEN = """
import sys

from data import Bytes
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="opened", use_cpu=True, report_to=[], disable_tqdm=True)
opened = AutoModelForCausalLM.from_pretrained("model")
print("held-out loss:", Trainer(opened, arguments, eval_dataset=Bytes("textwrap")).evaluate()["eval_loss"])
assert "dips" not in sys.modules
"""


def the_loss(said: str, which: str) -> float:
    found = re.findall(rf"^held-out loss{which}: (\S+)$", said, re.MULTILINE)
    assert found, said[-3000:]
    return float(found[-1])


def test_two_clusters_one_of_which_is_killed_and_started_again_give_the_folder_of_their_model(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    for name, text in (("mine.toml", SERVERS.format(directory=run)), ("data.py", DATA), ("train.py", TRAIN)):
        (tmp_path / name).write_text(text)
    logs = {name: tmp_path / f"{name}.log" for name in ("up", "a", "b", "a-again")}

    def cluster(name: str) -> dict[str, str]:
        return {
            "DIPS_MASTER": master_file(run)["address"],
            "DIPS_CLUSTER": name,
            "DIPS_KEYS": str(run / "keys" / name),
            "DIPS_WORKER_TAPE": str(run / "tapes" / f"{name}.tape.jsonl"),
        }

    def shown(name: str) -> ClusterStatus:
        with operator_of(run) as operator:
            return next(row for row in operator.status().clusters if row.cluster_id == name)

    train = (sys.executable, "train.py")
    with dips_started("up", tmp_path / "mine.toml", log=logs["up"]) as up:
        until(lambda: "address" in master_file(run), "the master's address", logs["up"])
        with started(*train, log=logs["b"], cwd=tmp_path, **cluster("b")) as b:
            with started(*train, log=logs["a"], cwd=tmp_path, **cluster("a")) as a:
                saved = tmp_path / "trained" / "a"
                until(lambda: any(saved.glob("checkpoint-*/trainer_state.json")), "a checkpoint", logs["a"])
                until(lambda: shown("a").pushes_applied >= 3, "pushes", logs["a"])
                a.kill()
                assert a.wait() == -signal.SIGKILL
            with started(*train, log=logs["a-again"], cwd=tmp_path, **cluster("a")) as again:
                until(lambda: shown("a").incarnations == 2, "a is back", logs["a-again"])
                before = shown("a").pushes_applied
                until(lambda: shown("a").pushes_applied > before, "pushes of a again", logs["a-again"])
                stopped = dips("stop", run, "--reason", "seen enough")
                assert stopped.returncode == 0, stopped.stderr
                assert [ended(again, logs["a-again"]), ended(b, logs["b"])] == [0, 0]
        assert ended(up, logs["up"]) == 0, logs["up"].read_text()[-3000:]

    said = {name: log.read_text() for name, log in logs.items()}
    assert "resumed from checkpoint" in said["a-again"]
    losses = [the_loss(said[name], " at the end") for name in ("a-again", "b")]
    assert losses[0] < the_loss(said["a"], " at the start") - 1
    for words in (("verify", run), ("export", run, "--to", tmp_path / "model")):
        done = dips(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    last = re.search(r"run mine ended at version (\S+),", said["up"])
    assert last, said["up"][-3000:]
    assert json.loads((tmp_path / "model" / "dips_version.json").read_text())["version"] == last[1]
    opened = subprocess.run(
        [sys.executable, "-c", OPEN], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert opened.returncode == 0, opened.stderr
    assert max(abs(the_loss(opened.stdout, "") - loss) for loss in losses) < 1e-5
