"""The files of examples/recipes as two clusters of a run each: what is exported, counted and recorded is what was
trained.

Each is run as it is. support/recipe.py puts in place what only a machine without an accelerator needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from support.byte_tokenizer import END, PAD, byte_tokenizer
from support.dips_command import ROOT, dips, end_at_a_limit, operator_of
from support.three_facts import PATIENT, assert_three_facts, assert_verified
from support.titan_files import prepare, texts
from support.up_run import TORCHRUN, UpRun
from support.waiting import until
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUPPORT, RECIPES = ROOT / "tests" / "support", ROOT / "examples" / "recipes"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging_face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def program(
    folder: Path, recipe: str | Path, *arguments: object, first: tuple[object, ...] = (sys.executable,)
) -> tuple[object, ...]:
    return (*first, SUPPORT / "recipe.py", folder, RECIPES / recipe, *arguments)


def folders_of(tmp_path: Path) -> dict[str, Path]:
    return {name: tmp_path / name for name in ("a", "b")}


def test_torchtitan_on_two_ranks_and_a_plain_process(tmp_path: Path) -> None:
    """Both end with the version that they pulled last, so models are equal to the bit; so in all of these."""
    folders = folders_of(tmp_path)
    prepare(folders["a"])
    settings = folders["a"] / "settings.toml"
    programs = {
        "a": program(folders["a"], "torchtitan_train.py", "--job.config_file", settings, first=TORCHRUN),
        "b": (sys.executable, SUPPORT / "titan_plain.py", folders["b"]),
    }
    with UpRun(tmp_path, programs, slaves=2, master=PATIENT + 'tk_max = "30k"') as run:
        run.until_end()
    assert_three_facts(run, folders)


def test_trl_with_a_lora(tmp_path: Path) -> None:
    """With trl's own defaults: mixed precision, checkpointed activations, batches padded to their longest row."""
    folders, model, rows = folders_of(tmp_path), tmp_path / "model", tmp_path / "texts.jsonl"
    text = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END, pad_token=PAD)
    text.save_pretrained(model)
    config = LlamaConfig(
        vocab_size=len(text), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=text.eos_token_id, bos_token_id=None,
        pad_token_id=text.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    parts = [part for page in texts() for part in page.split("\n\n")]
    rows.write_text("\n".join(json.dumps({"text": part}) for part in parts))
    programs = {name: program(folder, "trl_lora.py", model, rows) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "60k"') as run:
        run.until_end()
    assert_three_facts(run, folders)


@pytest.mark.parametrize(
    ("recipe", "first"),
    [
        ("hugging_face.py", (sys.executable,)),
        ("lightning_module.py", (sys.executable,)),
        ("accelerate_fsdp2.py", TORCHRUN),
    ],
)
def test_trainers(tmp_path: Path, recipe: str, first: tuple[object, ...]) -> None:
    """Under Accelerate each cluster is two ranks of FSDP2."""
    folders = folders_of(tmp_path)
    programs = {name: program(folder, recipe, first=first) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "40k"') as run:
        run.until_end()
    assert_three_facts(run, folders)


def test_a_killed_cluster_of_the_trainer_goes_on_from_its_own_checkpoint_and_ours(tmp_path: Path) -> None:
    command = program(tmp_path / "a", "hugging_face.py")
    with UpRun(tmp_path, {}, master="min_clusters = 1") as run:
        first = run.begin("a", command)
        saved = tmp_path / "out" / "a"
        until(lambda: list(saved.glob("checkpoint-*/trainer_state.json")), "a checkpoint", run.logs["a"])
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        live = dips("export", run.directory, "--to", tmp_path / "live", "--json")
        assert live.returncode == 0, live.stderr
        run.begin("a", command)
        until(lambda: "resumed from checkpoint" in run.logs["a"].read_text(), "it goes on", run.logs["a"])
        run.until_version(json.loads(live.stdout)["version"] + 2)
        run.stop()
    assert_verified(run.directory)
    assert (saved / "model" / "model.safetensors").exists()
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "live")
    assert opened.config.vocab_size == 256


SEED = "seed += zlib.crc32(cluster.encode())"


@pytest.mark.parametrize("forgets", [False, True])
def test_a_plain_script_with_the_seed_that_people_forget(tmp_path: Path, forgets: bool) -> None:
    """Without that line both clusters train on the same data, which `dips status` says."""
    folders, recipe = folders_of(tmp_path), RECIPES / "nano_gpt.py"
    if forgets:
        text = recipe.read_text()
        assert SEED in text
        recipe = tmp_path / "nano_gpt.py"
        recipe.write_text(text.replace(SEED, ""))
    programs = {name: program(folder, recipe) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT) as run:
        if forgets:
            with operator_of(run.directory) as master:
                until(lambda: any(alarm.kind == "same_data" for alarm in master.status().alarms), "the alarm", run.log)
        else:
            run.until_version(2)
        told = dips("status", run.directory)
        assert told.returncode == 0, told.stderr
        assert ("they train on the same data" in " ".join(told.stdout.split()).lower()) == forgets
        end_at_a_limit(run.directory)
        run.until_end()
    assert_three_facts(run, folders)
    assert all((tmp_path / "out" / name / "model.pt").exists() for name in folders)
