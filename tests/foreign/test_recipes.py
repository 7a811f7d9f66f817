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
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.byte_tokenizer import END, PAD, byte_tokenizer
from support.dips_command import ROOT, assert_verified, dips, end_at_a_limit, operator_of
from support.three_facts import PATIENT, TRAINED, assert_three_facts
from support.titan_files import prepare, texts
from support.up_run import TORCHRUN, UpRun
from support.waiting import until
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dips.local.followed_folder import NEWEST

SEED = "seed += zlib.crc32(cluster.encode())"
LORA = 'peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),'
PLUGIN = ", fsdp_plugin=plugin"
SUPPORT, RECIPES = ROOT / "tests" / "support", ROOT / "examples" / "recipes"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging_face"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def program(
    folder: Path, recipe: str | Path, *arguments: object, first: tuple[object, ...] = (sys.executable,)
) -> tuple[object, ...]:
    return (*first, SUPPORT / "recipe.py", folder, RECIPES / recipe, *arguments)


def without(recipe: str, line: str, folder: Path) -> Path:
    """A copy of the recipe that lacks one part."""
    text = (RECIPES / recipe).read_text()
    assert text.count(line) == 1
    copy = folder / recipe
    copy.write_text(text.replace(line, ""))
    return copy


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


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # what peft asks of transformers
@pytest.mark.parametrize("lora", [True, False])
def test_trl_with_a_lora_and_the_whole_model(tmp_path: Path, lora: bool) -> None:
    """With trl's own defaults: mixed precision, checkpointed activations, batches padded to their longest row."""
    recipe = RECIPES / "trl_lora.py"
    if not lora:
        recipe = without(recipe.name, LORA, tmp_path)
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
    programs = {name: program(folder, recipe, model, rows) for name, folder in folders.items()}
    with UpRun(tmp_path, programs, master=PATIENT + 'tk_max = "60k"') as run:
        run.until_end()
    assert_three_facts(run, folders)
    if lora:
        exported = dips("export", run.directory, "--to", tmp_path / "adapter")
        assert exported.returncode == 0, exported.stderr
        adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), tmp_path / "adapter")
        there, trained = adapted.state_dict(), load_file(folders["a"] / TRAINED)
        assert all(torch.equal(tensor, there[name]) for name, tensor in trained.items())


@pytest.mark.parametrize("recipe", ["hugging_face.py", "lightning_module.py", "accelerate_fsdp2.py"])
def test_trainers(tmp_path: Path, recipe: str) -> None:
    """Long enough for their own evaluations and checkpoints. Under Accelerate one cluster is two ranks of FSDP2, the
    other a plain process."""
    folders = folders_of(tmp_path)
    programs = {name: program(folder, recipe) for name, folder in folders.items()}
    if recipe == "accelerate_fsdp2.py":
        programs["a"] = program(folders["a"], recipe, first=TORCHRUN)
        programs["b"] = program(folders["b"], without(recipe, PLUGIN, tmp_path))
    with UpRun(tmp_path, programs, master=PATIENT) as run:
        run.until_version(15)
        if own := {"hugging_face.py": "checkpoint-*", "lightning_module.py": "last.ckpt"}.get(recipe):
            out = [tmp_path / "out" / name for name in folders]
            until(lambda: all(any(folder.glob(own)) for folder in out), "each trainer's own checkpoint", run.log)
        run.stop()
    assert_three_facts(run, folders)
    opened = opened_as_folder(run.directory, "export", tmp_path / "model")
    trained = load_file(folders["a"] / TRAINED)
    prefix = "model." if recipe == "lightning_module.py" else ""
    assert {prefix + name for name, _ in opened.named_parameters()} == trained.keys()
    assert all(torch.equal(tensor, trained[prefix + name]) for name, tensor in opened.named_parameters())
    text = torch.tensor(list(Path(json.__file__).read_bytes()[:4096])).view(-1, 64)
    with torch.no_grad():
        assert opened(input_ids=text, labels=text).loss < 3.5, "a model that has learned nothing has 5.5"


def opened_as_folder(run: Path, command: str, to: Path) -> LlamaForCausalLM:
    told = dips(command, run, "--to", to)
    assert told.returncode == 0, told.stderr
    opened: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(to / NEWEST if command == "follow" else to)
    return opened


def test_a_killed_cluster_of_the_trainer_goes_on_from_its_own_checkpoint_and_ours(tmp_path: Path) -> None:
    programs = {name: program(folder, "hugging_face.py") for name, folder in folders_of(tmp_path).items()}
    with UpRun(tmp_path, {"b": programs["b"]}) as run:
        first = run.begin("a", programs["a"])
        saved = tmp_path / "out" / "a"
        until(lambda: list(saved.glob("checkpoint-*/trainer_state.json")), "a checkpoint", run.logs["a"])
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        live = dips("export", run.directory, "--to", tmp_path / "live", "--json")
        assert live.returncode == 0, live.stderr
        run.begin("a", programs["a"])
        until(lambda: "resumed from checkpoint" in run.logs["a"].read_text(), "it goes on", run.logs["a"])
        run.until_version(json.loads(live.stdout)["version"] + 2)
        run.stop()
    assert_verified(run.directory)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "live").config.vocab_size == 256
    last = LlamaForCausalLM.from_pretrained(saved / "model").state_dict()
    followed = opened_as_folder(run.directory, "follow", tmp_path / "served").state_dict()
    assert followed.keys() == last.keys()
    assert all(torch.equal(followed[name], last[name]) for name in last), "of a run that has ended"


@pytest.mark.parametrize("forgets", [False, True])
def test_a_plain_script_with_the_seed_that_people_forget(tmp_path: Path, forgets: bool) -> None:
    """Without that line both clusters train on the same data, which `dips status` says."""
    folders, recipe = folders_of(tmp_path), RECIPES / "nano_gpt.py"
    if forgets:
        recipe = without(recipe.name, SEED, tmp_path)
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
