"""What a person has before torchtitan starts: a tokenizer, text, and a file of settings, for a small Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.byte_tokenizer import END, WORDS, byte_tokenizer
from support.dips_command import ROOT

BATCH, LENGTH = 4, 32
ACCUMULATED, RANKS = 2, 2
"""Batches in a step of a rank."""

_SETTINGS = """
[job]
dump_folder = "{folder}/outputs"
[model]
name = "llama3"
flavor = "small"
hf_assets_path = "{folder}/assets"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 10
[training]
dataset = "c4_test"
dataset_path = "{folder}/text"
local_batch_size = {batch}
global_batch_size = {of_step}
seq_len = {length}
steps = 100_000
"""


def model_arguments(made_by: Callable[..., Any]) -> Any:
    """What torchtitan's TransformerModelArgs is given."""
    return made_by(
        dim=32, n_layers=2, n_heads=4, vocab_size=len(WORDS), multiple_of=16, rope_theta=500_000, max_seq_len=LENGTH
    )


def texts() -> list[str]:
    return [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]


def prepare(folder: Path) -> None:
    """Write FOLDER/settings.toml and what it names."""
    for made in ("assets", "text"):
        (folder / made).mkdir(parents=True)
    byte_tokenizer().save(str(folder / "assets" / "tokenizer.json"))
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "text" / "pages.jsonl").write_text("\n".join(json.dumps({"text": page}) for page in texts()))
    settings = {"batch": BATCH, "of_step": BATCH * RANKS * ACCUMULATED, "length": LENGTH}
    (folder / "settings.toml").write_text(_SETTINGS.format(folder=folder, **settings))
