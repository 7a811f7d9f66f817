"""`dips export --to` of a run that trains an adapter: a folder that peft itself opens, or the merged model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_model
from support.trainer_models import logits, snapshot_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from dips.cli import model as command_model
from dips.core.errors import ConfigError
from dips.core.layout import PublishedModel
from dips.core.model_description import description_from_json
from dips.local.model_folder import as_folder, write_folder
from dips.trainer.export import fill
from dips.worker.parallel.untrained import merged_description
from dips.worker.torch_model import TorchParameters, description_of, untrained_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),  # what peft asks of transformers
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_bias=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype)


def gpt2() -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    )


def lora(**given: Any) -> Any:
    return peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ATTENTION} | given))


KINDS: dict[str, tuple[Callable[[], Any], Any, bool]] = {
    "LoRA": (llama, lora(), True),
    "with all that it may have": (
        llama,
        lora(
            target_modules=[*ATTENTION, "embed_tokens"], modules_to_save=["lm_head"], bias="all",
            rank_pattern={"layers.0.self_attn.q_proj": 2}, task_type="CAUSAL_LM",
        ),
        True,
    ),
    "rank-stabilised": (llama, lora(use_rslora=True, bias="lora_only"), True),
    "of a base in bfloat16": (lambda: llama(torch.bfloat16), lora(), True),
    "turned matrices": (gpt2, lora(target_modules=["c_attn"], fan_in_fan_out=True), True),
    "DoRA": (llama, lora(use_dora=True), False),
    "IA3": (llama, peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), False),
}  # fmt: skip


def trained(model: torch.nn.Module) -> PublishedModel:
    """What a run publishes of the model, whose adapter has learned something."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    parameters = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parameters.describe(description_of(model, parameters.ids, untrained_of(model, parameters.ids)))
    return snapshot_of(parameters)


@pytest.mark.parametrize(("base", "config", "merges"), KINDS.values(), ids=KINDS)
def test_peft_opens_what_was_trained(tmp_path: Path, base: Callable[[], Any], config: Any, merges: bool) -> None:
    base().save_pretrained(tmp_path / "base")
    adapted: Any = peft.get_peft_model(base(), copy.deepcopy(config))
    found = trained(adapted)
    write_folder(as_folder(found), tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor.float()) for name, tensor in expected.items())
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))
    described = description_from_json(found.layout.description)
    filled = fill(found.layout, described, tmp_path / "base")
    if not merges:
        with pytest.raises(ConfigError, match=r"is no plain LoRA .* is not merged here: leave out --fill"):
            as_folder(found, filled)
        return
    save_model(adapted, str(tmp_path / "state.safetensors"))
    assert fill(found.layout, described, tmp_path / "state.safetensors").keys() == filled.keys()
    write_folder(as_folder(found, filled), tmp_path / "merged")
    merged = type(base()).from_pretrained(tmp_path / "merged")
    for name, tensor in adapted.float().merge_and_unload().state_dict().items():
        assert torch.allclose(tensor, merged.state_dict()[name].float(), atol=1e-6), name


class Around(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.net = inner


@pytest.mark.parametrize("made", ["inside of another, with wrapped blocks", "by transformers", "another name"])
def test_however_the_adapter_was_made(tmp_path: Path, made: str) -> None:
    model, config = llama(), lora(modules_to_save=["lm_head"])
    if made == "by transformers":
        model.add_adapter(config)
        adapted: Any = model
    else:
        adapted = peft.get_peft_model(model, config, adapter_name="mine" if made == "another name" else "default")
    expected = logits(adapted)
    whole = adapted
    if made.startswith("inside"):
        layers = adapted.base_model.model.model.layers
        layers[0] = checkpoint_wrapper(layers[0])
        whole = Around(adapted)
    found = trained(whole)
    assert not torch.equal(expected, logits(adapted))
    write_folder(as_folder(found), tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(adapted))
    llama().save_pretrained(tmp_path / "base")
    filled = fill(found.layout, description_from_json(found.layout.description), tmp_path / "base")
    write_folder(as_folder(found, filled), tmp_path / "merged")
    assert torch.allclose(logits(LlamaForCausalLM.from_pretrained(tmp_path / "merged")), logits(adapted), atol=1e-5)


def test_a_model_of_ones_own_is_adapted_too(tmp_path: Path) -> None:
    def own() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    adapted = peft.get_peft_model(own(), lora(target_modules=["0", "2"]))
    write_folder(as_folder(trained(adapted)), tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(own(), tmp_path / "adapter")
    x = torch.randn(3, 4)
    assert torch.equal(again.eval()(x), adapted.eval()(x))


def two_adapters() -> Any:
    adapted = peft.get_peft_model(llama(), lora())
    adapted.add_adapter("second", lora())
    adapted.base_model.set_adapter(["default", "second"])
    return adapted


def and_a_norm() -> Any:
    adapted = peft.get_peft_model(llama(), lora())
    adapted.base_model.model.model.norm.weight.requires_grad_(True)
    return adapted


def of_very_many_ranks() -> Any:
    adapted = peft.get_peft_model(llama(), lora())
    adapted.peft_config["default"].rank_pattern = {f"layers.{n}.mlp.experts": 4 for n in range(20_000)}
    return adapted


def a_part_of_it() -> Any:
    adapted = peft.get_peft_model(llama(), lora())
    next(p for p in adapted.parameters() if p.requires_grad).requires_grad_(False)
    return adapted


def prompt() -> Any:
    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (two_adapters, r"folder of peft: it trains 2 adapters, such as 'default' and 'second'; export one file"),
        (and_a_norm, r"the run trains 'base_model.model.model.norm.weight', which is not part of its adapter: export"),
        (of_very_many_ranks, r"folder of peft: its configuration and names are too long for the run's layout; export"),
        (prompt, r"folder of peft: it is made of prompts, which peft computes as it saves them; export one file"),
        (a_part_of_it, r"the run does not train 1 of its tensors, such as 'base_model.*q_proj.lora_A.weight'; export"),
    ],
)
def test_what_is_no_folder_of_peft_is_refused(made: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        as_folder(trained(made()))


def test_a_description_of_an_earlier_release_is_refused_in_place_of_random_weights(tmp_path: Path) -> None:
    """It does not know of the adapter, and its base's names have peft's parts."""
    adapted = peft.get_peft_model(llama(), lora())
    found = trained(adapted)
    told = json.loads(found.layout.description)
    del told["adapter"]
    earlier = replace(found, layout=replace(found.layout, description=json.dumps(told)))
    save_model(adapted, str(tmp_path / "state.safetensors"))
    filled = fill(found.layout, description_from_json(earlier.layout.description), tmp_path / "state.safetensors")
    with pytest.raises(ConfigError, match=r"a LlamaForCausalLM of the folder's config.json would not take its tensors"):
        as_folder(earlier, filled)


def test_the_command_says_how_an_adapter_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(peft.get_peft_model(llama(), lora()))
    monkeypatch.setattr(command_model, "_fetch", lambda *given: found)
    command_model.export("127.0.0.1:1", f"{tmp_path}/adapter")
    said = capsys.readouterr().out
    assert f"load it with peft, PeftModel.from_pretrained(base, '{tmp_path / 'adapter'}')" in said
    assert "It lacks" not in said
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "dips_version.json"}
    command_model.export("127.0.0.1:1", f"{tmp_path}/adapter", force=True)


def test_stages_have_one_adapter_together() -> None:
    query = "layers.{}.self_attn.q_proj"
    texts = [description_of(peft.get_peft_model(llama(), lora(rank_pattern={query.format(n): 2}))) for n in (0, 1)]
    merged = description_from_json(merged_description(texts))
    assert merged is not None
    assert merged.adapter is not None
    names = [f"base_model.model.model.{query.format(n)}" for n in (0, 1)]
    assert merged.adapter.scaling == {"": 2.0, names[0]: 4.0, names[1]: 4.0}
