"""`dips export --fill`: what a version lacks comes from a file, if it is the very thing that was trained over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainer_models import snapshot_of
from transformers import LlamaConfig, LlamaForCausalLM

from dips.cli import model as command_model
from dips.core.errors import ConfigError
from dips.core.layout import MAX_DESCRIPTION_CHARS, PublishedModel
from dips.core.model_description import Lacking, ModelDescription, description_from_json
from dips.local import model_folder
from dips.local.model_folder import as_folder, write_folder
from dips.trainer.export import export_model, fill
from dips.worker.torch_model import TorchParameters, description_of, untrained_of


class Adapted(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(6, 5, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(4) + seed)


def fetched(model: torch.nn.Module, buffers: str = "own") -> PublishedModel:
    parameters = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1), buffers=buffers)
    untrained = untrained_of(model, parameters.ids)
    parameters.describe(description_of(model, parameters.ids, untrained))
    return snapshot_of(parameters)


def written(state: dict[str, torch.Tensor], form: str, folder: Path) -> Path:
    path = folder / ("base.safetensors" if form == "file" else "base/one.safetensors")
    path.parent.mkdir(exist_ok=True)
    save_file(state, path)
    return path if form == "file" else path.parent


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("buffers", ["own", "average"])
def test_a_filled_export_is_the_whole_model(form: str, buffers: str, tmp_path: Path) -> None:
    model = Adapted()
    model.norm(torch.randn(8, 3) + 4)
    source = written(model.state_dict(), form, tmp_path)
    found = fetched(model, buffers)
    filled = fill(found.layout, description_from_json(found.layout.description), source)
    expected = {"base.weight", "base.bias", "table"}
    assert filled.keys() == expected | ({"norm.running_mean", "norm.running_var"} if buffers == "own" else set())
    export_model(found, tmp_path / "model.safetensors", filled=filled)
    again, tensors = Adapted(seed=1), load_file(tmp_path / "model.safetensors")
    again.load_state_dict(tensors)
    for name, tensor in model.state_dict().items():
        if name != "norm.num_batches_tracked":
            assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"base.bias": None}, "has no tensor 'base.bias': give"),
        ({"base.bias": None, "table": None}, "has no tensor 'table' and 1 more"),
        ({"base.bias": torch.zeros(6, dtype=torch.bfloat16)}, r"'base.bias' of .* is BF16 of shape \[6\], the model's"),
        ({"base.bias": torch.zeros(5)}, r"is F32 of shape \[5\], the model's is BF16 of shape \[5\]"),
        ({"norm.running_var": torch.zeros(4)}, "'norm.running_var' of"),
        (Adapted(seed=1).state_dict(), "'table' of .* has other values than in the clusters' training"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    change: dict[str, torch.Tensor | None], sentence: str, tmp_path: Path
) -> None:
    found = fetched(Adapted())
    state = {name: tensor for name, tensor in {**Adapted().state_dict(), **change}.items() if tensor is not None}
    with pytest.raises(ConfigError, match=sentence):
        fill(found.layout, description_from_json(found.layout.description), written(state, "file", tmp_path))


def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path) -> None:
    found = fetched(Adapted())
    described = description_from_json(found.layout.description)
    file = tmp_path / "a.safetensors"
    for content in (b"no", b"\x08\0\0\0\0\0\0\0{}      ", b""):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be read|has no tensor"):
            fill(found.layout, described, file)
    torch.save({"epoch": 3}, tmp_path / "d.pt")
    with pytest.raises(ConfigError, match="no other kind is read"):
        fill(found.layout, described, tmp_path / "d.pt")
    with pytest.raises(ConfigError, match="there is no file"):
        fill(found.layout, described, tmp_path / "e.safetensors")
    with pytest.raises(ConfigError, match=r"a+ cannot be read: File name too long; give the file"):
        fill(found.layout, described, tmp_path / ("a" * 300))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.safetensors file"):
        fill(found.layout, described, tmp_path / "empty")
    whole = fetched(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="lacks nothing"):
        fill(whole.layout, description_from_json(whole.layout.description), tmp_path / "a.safetensors")


def test_more_tensors_than_a_description_holds_are_counted(tmp_path: Path) -> None:
    rows = tuple(Lacking(f"layers.{n}.experts.weight", (64, 64), "float32", n) for n in range(5000))
    text = ModelDescription({}, "", tuple(row.name for row in rows[:3]), len(rows), rows).to_json()
    assert len(text) < MAX_DESCRIPTION_CHARS
    described = description_from_json(text)
    assert described is not None
    assert (described.lacks, described.n_absent) == ((), 5000)
    state = {"w": torch.zeros(3), **{f"x{n}": torch.zeros(1) for n in range(4999)}}
    layout = fetched(torch.nn.Linear(2, 2)).layout
    with pytest.raises(ConfigError, match="the model has 5000"):
        fill(layout, described, written({**state, "y": torch.ones(1)}, "file", tmp_path))
    assert len(fill(layout, described, written(state, "file", tmp_path))) == 5000


CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip


def test_a_llama_trained_in_part_is_whole_again(tmp_path: Path) -> None:
    model = LlamaForCausalLM(CONFIG)
    model.model.embed_tokens.weight.requires_grad_(False)
    base = tmp_path / "base"
    model.save_pretrained(base)
    found = fetched(model)
    filled = fill(found.layout, description_from_json(found.layout.description), base)
    assert filled.keys() == {"model.embed_tokens.weight"}
    write_folder(as_folder(found, filled), tmp_path / "model")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(20).view(2, 10)
    with torch.inference_mode():
        assert torch.equal(model.eval()(tokens).logits, again.eval()(tokens).logits)


def test_the_command_says_what_an_export_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Adapted()
    found = fetched(model)
    monkeypatch.setattr(command_model, "_fetch", lambda *given: found)
    command_model.export("127.0.0.1:1", f"{tmp_path}/part.safetensors")
    said = capsys.readouterr().out
    assert "It lacks 5 tensors that the run does not train, such as 'table': load it over" in said
    state = written(model.state_dict(), "torch", tmp_path)
    command_model.export("127.0.0.1:1", f"{tmp_path}/whole.safetensors", fill_from=state, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["filled"], told["lacking"]) == (5, 0)
    assert len(load_file(tmp_path / "whole.safetensors")) == 5 + 4


def test_the_command_says_that_a_folder_was_not_compared_with_a_model_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fetched(LlamaForCausalLM(CONFIG))
    monkeypatch.setattr(command_model, "_fetch", lambda *given: found)
    command_model.export("127.0.0.1:1", f"{tmp_path}/checked")
    assert "Not checked" not in capsys.readouterr().out
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None)
    command_model.export("127.0.0.1:1", f"{tmp_path}/unchecked")
    assert "Not checked whether a new model of its config.json takes its tensors: torch" in capsys.readouterr().out
