"""`dips export --to`: a version as a folder that transformers opens, whole or not at all, and never over something."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.dips_command import ROOT
from support.trainer_models import logits, published, snapshot_of
from transformers import LlamaConfig, LlamaForCausalLM

from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.layout import Layout, Parameter, PublishedModel
from dips.local import model_folder
from dips.local.model_folder import AdapterFolder, ModelFolder, as_folder, check_target, write_folder
from dips.local.operator_client import NamedRun
from dips.trainer.model import ByteModel
from dips.trainer.sizes import SIZES
from dips.worker.torch_model import TorchParameters, description_of

CONFIG = LlamaConfig(  # type: ignore[call-arg]  # rope_theta, which its signature keeps quiet about
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, rope_theta=500.0, rms_norm_eps=1e-3, attention_bias=True,
)  # fmt: skip


def fetched(model: torch.nn.Module) -> PublishedModel:
    """What a run of this model publishes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return snapshot_of(TorchParameters(model, optimizer, description=description_of(model)))


def opened(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder).eval()
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_comes_back_as_it_was(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    model = LlamaForCausalLM(config)
    write_folder(as_folder(fetched(model)), tmp_path / "new" / "model")
    again = opened(tmp_path / "new" / "model")
    assert torch.equal(logits(model), logits(again))
    assert (again.config.rms_norm_eps, again.config.attention_bias) == (1e-3, True)
    about = json.loads((tmp_path / "new" / "model" / "dips_version.json").read_text())
    assert (about["run_id"], about["version"], about["tokens"]) == ("mine", "1:7", 12345)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"], "nothing is left beside it"


def test_the_byte_model_is_a_llama(tmp_path: Path) -> None:
    model = ByteModel(SIZES["tiny"], seed=3)
    write_folder(as_folder(fetched(model)), tmp_path / "model")
    again, tokens = opened(tmp_path / "model"), torch.randint(256, (2, 100))
    with torch.inference_mode():
        assert torch.allclose(model(tokens), again(tokens).logits, atol=1e-5)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        assert float(again(input_ids=tokens, labels=tokens).loss) == pytest.approx(float(loss), abs=1e-6)


def in_files_of(n_bytes: int, folder: ModelFolder | AdapterFolder) -> ModelFolder:
    assert isinstance(folder, ModelFolder)
    return replace(folder, shard_bytes=n_bytes)


def test_a_large_model_is_written_in_several_files(tmp_path: Path) -> None:
    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    model = LlamaForCausalLM(CONFIG)  # within another module it comes back under its own names
    write_folder(in_files_of(20_000, as_folder(fetched(Around()))), tmp_path / "model")
    names = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert torch.equal(logits(model), logits(opened(tmp_path / "model")))


def test_another_model_or_a_part_of_one_is_refused_with_the_way_out() -> None:
    model = LlamaForCausalLM(CONFIG)
    model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"1 tensors, such as 'model.embed_tokens.weight', are not in it"):
        as_folder(fetched(model))
    with pytest.raises(ConfigError, match="--format safetensors"):
        as_folder(fetched(torch.nn.Linear(3, 4)))


@pytest.mark.parametrize(
    ("owner", "name", "other", "said"),
    [
        ("model", "extra", torch.nn.Parameter(torch.zeros(3)), r"\(has 'model.extra'\)"),
        ("model", "norm", torch.nn.Identity(), r"\(it lacks 'model.norm.weight'\)"),
        ("", "lm_head", torch.nn.Linear(32, 70, bias=False), r"\(has another shape of 'lm_head.weight'\)"),
    ],
)
def test_tensors_that_a_model_of_the_configuration_would_not_take_are_refused(
    owner: str, name: str, other: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would open with random weights."""
    model = LlamaForCausalLM(CONFIG)
    setattr(model.get_submodule(owner), name, other)
    found = fetched(model)
    with pytest.raises(
        ConfigError, match=f"a LlamaForCausalLM of .* would not take its tensors {said}: export one file"
    ):
        as_folder(found)
    told = json.loads(found.layout.description)
    told["config"]["architectures"] = ["OfAProgram"]  # which this process does not have
    assert "here has no OfAProgram" in not_checked(
        replace(found, layout=replace(found.layout, description=json.dumps(told)))
    )
    told["config"] |= {"architectures": ["LlamaForCausalLM"], "hidden_size": "many"}
    assert "here makes no LlamaForCausalLM of it" in not_checked(
        replace(found, layout=replace(found.layout, description=json.dumps(told)))
    )
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None if name == "transformers" else name)
    assert not_checked(found) == "transformers is not installed here"


def not_checked(found: PublishedModel) -> str:
    folder = as_folder(found)
    assert isinstance(folder, ModelFolder)
    return folder.not_checked


@pytest.mark.parametrize(
    "adapter",
    [
        *("{", "[]", '{"format":"huggingface-1"}', '{"format":"other"}'),  # not even a description
        7, {"other": 1}, {"config": {}}, {"config": {"peft_type": 3}}, {"names": {"w": 3}}, {"names": []},
        {"scaling": {"": "2"}}, {"scaling": {"": math.inf}}, {"prefix": 1}, {"name": None}, {"why_not": []},
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused(adapter: Any) -> None:
    whole = {"config": {"peft_type": "LORA"}, **adapter} if isinstance(adapter, dict) else adapter
    raw = {"format": "torch-1", "config": {}, "prefix": "", "absent": ["b"], "n_absent": 1, "adapter": whole}
    text = adapter if isinstance(adapter, str) else json.dumps(raw)
    layout = Layout((Parameter("w", (3,), "float32", "w"),), description=text)
    with pytest.raises(ConfigError, match="description of its model cannot be read"):
        as_folder(published(layout, np.zeros(3, np.float32)))


def test_program_files_that_are_not_there_are_not_named(tmp_path: Path) -> None:
    good = fetched(LlamaForCausalLM(CONFIG))
    told = json.loads(good.layout.description)
    told["config"]["auto_map"] = {"AutoModel": "somewhere--code.Model"}
    folder = as_folder(replace(good, layout=replace(good.layout, description=json.dumps(told))))
    assert "auto_map" not in folder.config
    assert folder.config["architectures"] == ["LlamaForCausalLM"]


def test_what_stands_there_is_not_overwritten_unless_somebody_says_so(tmp_path: Path) -> None:
    first, second = LlamaForCausalLM(CONFIG), LlamaForCausalLM(CONFIG)
    folder = tmp_path / "model"
    folder.mkdir()  # an empty one is as good as none
    write_folder(in_files_of(20_000, as_folder(fetched(first))), folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty: give another folder, or --force"):
        write_folder(as_folder(fetched(second)), folder)
    assert torch.equal(logits(first), logits(opened(folder)))
    write_folder(as_folder(fetched(second)), folder, force=True)
    assert torch.equal(logits(second), logits(opened(folder)))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "dips_version.json", "model.safetensors", "notes.txt",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="is a file"):
        check_target(folder / "notes.txt", force=True)


@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    folder, model = tmp_path / "model", as_folder(fetched(LlamaForCausalLM(CONFIG)))
    if exists:
        write_folder(model, folder)
    before = sorted(tmp_path.rglob("*"))

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_folder, "_put_in_place", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_folder(model, folder, force=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["examples"], "nothing says what to write: give --to FILE.safetensors, or --to DIR"),
        (["examples", "--to", "examples"], "examples is not empty"),
        (["examples", "--to", "examples", "--format", "dcp"], "examples is not empty"),
        (["examples", "--to", "m.safetensors"], "examples has no snapshots"),
        (["examples", "--to", "m", "--format", "dcp"], "examples has no snapshots"),
    ],
)
def test_a_wrong_command_is_told_so(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPS_MASTER", raising=False)
    monkeypatch.chdir(ROOT)
    assert main.run(["export", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_run_is_a_directory_or_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples"
    assert NamedRun.of(str(folder)) == NamedRun(folder, None)
    assert NamedRun.of("10.0.0.1:29400") == NamedRun(None, "10.0.0.1:29400")
    monkeypatch.setenv("DIPS_MASTER", "10.0.0.2:29400")
    assert NamedRun.of(None).master() == "10.0.0.2:29400"
    assert NamedRun.of("10.0.0.1:29400").master() == "10.0.0.1:29400"
