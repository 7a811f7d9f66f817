"""Hugging Face's Trainer as one cluster of a run: only the callback is added.

As two clusters:  python examples/hf_trainer.py
                  (starts a master, two slaves and itself twice, then opens the model that `dips export` writes)
Alone:            python examples/hf_trainer.py --alone
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
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dips

LENGTH, BATCH = 64, 8
LIBRARY = Path(textwrap.__file__).parent  # real text without a download: Python's own standard library
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class Bytes(torch.utils.data.Dataset):
    """The bytes of some modules, cut into sequences."""

    def __init__(self, *modules: str) -> None:
        text = b"".join((LIBRARY / f"{name}.py").read_bytes() for name in modules)
        self.rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train() -> None:
    """Ordinary training with the Trainer; with DIPS_MASTER it is one cluster of that run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    cluster = os.environ.get("DIPS_CLUSTER", "alone")
    folder = Path(os.environ.get("OUTPUT_DIR", "runs/hf-trainer")) / cluster
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, max_steps=400,
        learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=10, save_steps=25, save_total_limit=2,
        data_seed=zlib.crc32(cluster.encode()),  # each cluster reads the text in its own order
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(
        LlamaForCausalLM(CONFIG), arguments, train_dataset=Bytes("argparse", "inspect", "tarfile", "typing"),
        eval_dataset=Bytes("textwrap"), callbacks=[dips.HuggingFaceCallback()],
    )  # fmt: skip
    # A restarted process resumes from the Trainer's last complete checkpoint, and from what the callback saved with it.
    saved = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)  # what the Trainer writes last
    trainer.train(resume_from_checkpoint=str(saved[-1].parent) if saved else None)
    result = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "heldout": trainer.evaluate()["eval_loss"],
    }
    print("RESULT", json.dumps(result), flush=True)


def two_clusters() -> None:
    """A master, two slaves and two clusters on this machine; then the run's model as a folder, opened and measured."""
    run = Path("runs") / f"hf-trainer-{int(time.time())}"
    command = [sys.executable, str(Path(__file__).resolve())]
    run_file = f"""
        [run]
        id = "hf-trainer"
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

    model = LlamaForCausalLM.from_pretrained(run / "model")
    arguments = TrainingArguments(output_dir=str(run / "opened"), use_cpu=True, report_to=[], disable_tqdm=True)
    opened = Trainer(model, arguments, eval_dataset=Bytes("textwrap")).evaluate()["eval_loss"]
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
