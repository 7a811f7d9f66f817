"""Lightning's Trainer as one cluster of a run: only the callback is added.

As two clusters:  python examples/lightning_loop.py
                  (starts a master, two slaves and itself twice, then opens the model that `dips export` writes)
Alone:            python examples/lightning_loop.py --alone
By hand:          start servers and keys as in examples/own_loop.py, and this file with DIPS_MASTER, DIPS_CLUSTER and
                  DIPS_KEYS set
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

import dips

LENGTH, BATCH = 64, 8
LIBRARY = Path(textwrap.__file__).parent  # real text without a download: Python's own standard library
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def text_of(*modules: str) -> torch.Tensor:
    """The bytes of some modules, cut into sequences."""
    text = b"".join((LIBRARY / f"{name}.py").read_bytes() for name in modules)
    return torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)


class Batches:
    """Batches of text in the cluster's own order, which resume where a checkpoint was taken."""

    def __init__(self, cluster: str) -> None:
        self.rows = text_of("argparse", "inspect", "tarfile", "typing")
        self.seed, self.taken = zlib.crc32(cluster.encode()), 0

    def __len__(self) -> int:
        return 1000  # Lightning fetches ahead from a loader without a length, which then saves a position too far

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            chosen = torch.Generator().manual_seed(self.seed + self.taken)
            self.taken += 1
            rows = self.rows[torch.randint(len(self.rows), (BATCH,), generator=chosen)]
            yield {"input_ids": rows, "labels": rows}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Language(lightning.LightningModule):
    """A tiny Llama that guesses the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(CONFIG)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@torch.inference_mode()
def heldout(model: LlamaForCausalLM) -> float:
    rows = text_of("textwrap")
    return float(model.eval()(input_ids=rows, labels=rows).loss)


def train() -> None:
    """Ordinary training with Lightning; with DIPS_MASTER it is one cluster of that run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    cluster = os.environ.get("DIPS_CLUSTER", "alone")
    folder = Path(os.environ.get("OUTPUT_DIR", "runs/lightning-loop")) / cluster
    torch.manual_seed(0)
    module = Language()
    trainer = lightning.Trainer(
        max_steps=400, accumulate_grad_batches=2, accelerator="cpu", default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            dips.LightningCallback(),
            ModelCheckpoint(folder, every_n_train_steps=25, save_last=True, enable_version_counter=False),
        ],
    )  # fmt: skip
    # A restarted process resumes from Lightning's last checkpoint, and from what the callback saved with it.
    last = folder / "last.ckpt"
    trainer.fit(module, Batches(cluster), ckpt_path=str(last) if last.exists() else None)
    print("RESULT", json.dumps({"losses": module.losses[::20], "heldout": heldout(module.model)}), flush=True)


def two_clusters() -> None:
    """A master, two slaves and two clusters on this machine; then the run's model as a folder, opened and measured."""
    run = Path("runs") / f"lightning-loop-{int(time.time())}"
    command = [sys.executable, str(Path(__file__).resolve())]
    run_file = f"""
        [run]
        id = "lightning-loop"
        directory = "{run}"
        slaves = 2
        [master]
        sync_every = 8       # inner steps between two pushes
        min_clusters = 2
        tk_max = "120k"      # the run ends here, for both clusters
        [[clusters]]
        id = "a"
        command = {json.dumps(command)}
        [[clusters]]
        id = "b"
        command = {json.dumps(command)}
        """
    dips_command = [sys.executable, "-m", "dips.cli"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(textwrap.dedent(run_file))
        file.flush()
        output = {**os.environ, "OUTPUT_DIR": str(run / "trainers")}
        subprocess.run([*dips_command, "up", file.name], env=output, check=True)
    subprocess.run([*dips_command, "export", str(run), "--to", str(run / "model")], check=True)
    told = [show(run / "logs" / f"{name}.log", name) for name in "ab"]

    opened = heldout(LlamaForCausalLM.from_pretrained(run / "model"))
    print(f"held-out loss: {told[0]:.6f} in cluster a, {told[1]:.6f} in b, {opened:.6f} in {run / 'model'}")
    if max(abs(opened - loss) for loss in told) > 1e-5:
        sys.exit("the exported model is not the one that the clusters ended with")


def show(log: Path, name: str) -> float:
    """Print a cluster's losses, check that they fell, and return its held-out loss at the end."""
    result = next(line for line in reversed(log.read_text().splitlines()) if line.startswith("RESULT "))
    told = json.loads(result.removeprefix("RESULT "))
    print(f"cluster {name}: loss", " ".join(f"{loss:.2f}" for loss in told["losses"]))
    if not told["losses"][-1] < told["losses"][0] - 0.5:
        sys.exit(f"the loss of cluster {name} did not fall: see {log}")
    return float(told["heldout"])


if __name__ == "__main__":
    if "DIPS_MASTER" in os.environ or "--alone" in sys.argv:
        train()
    else:
        two_clusters()
