"""Measures a device for `dips profile device`: forward pass, gradient of the input and gradient of the weights of each
layer, at several sizes of a microbatch (SpanTrain, section 3.2.1, by layers instead of by benchmarks).

A layer is measured alone: its input is what the layer before puts out, and the gradient of its output is one of the
same shape. The gradient of the weights is the whole backward pass without that of the input: this is what a schedule
with split backward passes has to share out, and both together are exactly a pass that is not split.
"""

from __future__ import annotations

import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dips.core.errors import ConfigError
from dips.planner.model import Model
from dips.planner.profile import LayerTime

NS_OF_MS = 1e6
Example = Callable[[int], Tensor]
"""The input of the first layer for so many sequences."""


@dataclass(frozen=True)
class MeasuredPart:
    """A part of a model that is measured. part, layer, count: as in a profile's [[layers]]."""

    part: str
    layer: int
    count: int
    module: nn.Module


@dataclass(frozen=True)
class MeasuringRounds:
    """How often a layer is measured: rounds that count, after others that do not."""

    counted: int
    warm_up: int = 2


def measure(
    parts: Sequence[MeasuredPart],
    example: Example,
    sizes: Sequence[int],
    rounds: MeasuringRounds,
    device: str,
    now_ns: Callable[[], int] = time.perf_counter_ns,
) -> Iterator[LayerTime]:
    """The times of each part with each size, in the order of the model.

    device: the kind's name in the profile. Raises ConfigError for a module that does not take what the one before puts
    out, or whose output has no gradient.
    """
    for size in sizes:
        x = example(size)
        for one in parts:
            name = f"{one.part} {one.layer}"
            try:
                found, x = _measured(one.module, x, rounds, now_ns)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                why = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{name} cannot be measured with {size} sequences in a microbatch: {type(error).__name__}: {why}: "
                    "give modules of which each takes the output of the one before, or a smaller --microbatch"
                ) from error
            yield LayerTime(
                part=one.part, layer=one.layer, count=one.count, device=device, microbatch_sequences=size, **found
            )


def _measured(
    module: nn.Module, x: Tensor, rounds: MeasuringRounds, now_ns: Callable[[], int]
) -> tuple[dict[str, float], Tensor]:
    """The fields of LayerTime, and the module's output."""
    # A processor has done its work when it returns.
    settle: Callable[[], None] = torch.cuda.synchronize if x.is_cuda else lambda: None
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    given = x.detach().requires_grad_(x.is_floating_point())
    inputs = [given] if given.requires_grad else []
    times: list[tuple[int, int, int]] = []
    for _ in range(rounds.warm_up + rounds.counted):
        settle()
        begin = now_ns()
        out = module(given)
        settle()
        forward_end = now_ns()
        gradient = torch.ones_like(out)
        settle()
        input_begin = now_ns()
        if inputs:
            torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        settle()
        input_end = now_ns()
        torch.autograd.grad(out, [*inputs, *weights], gradient, allow_unused=True)
        settle()
        times.append((forward_end - begin, input_end - input_begin if inputs else 0, now_ns() - input_end))
    counted = times[rounds.warm_up :]
    f, d, whole = (statistics.median(column) for column in zip(*counted, strict=True))
    found = {"forward_ms": f, "input_gradient_ms": d, "weight_gradient_ms": max(0.0, whole - d) if weights else 0.0}
    spread = _spread([f + whole for f, _, whole in counted])
    return {name: value / NS_OF_MS for name, value in found.items()} | {"spread": spread}, out.detach()


def _spread(values: Sequence[float]) -> float:
    """The width of the middle half of the values / their median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return min(10.0, (high - low) / middle) if middle else 0.0


# ---- device ----------------------------------------------------------------------------------------------------------


def torch_device(name: str) -> torch.device:
    """The device cpu, cuda or cuda:N. Raises ConfigError where this machine has none."""
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f"--on {name} is not a device that is measured: give cpu, cuda or cuda:N")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--on {name}: this machine has {torch.cuda.device_count()} GPUs that torch sees: give cpu")
    return found


def name_of(device: torch.device) -> str:
    """The product's name where the system tells it, for the source of the numbers."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.machine()


# ---- modules ---------------------------------------------------------------------------------------------------------


def own_parts(spec: str, n_layers: int, device: torch.device) -> tuple[list[MeasuredPart], Example]:
    """The modules of a user's function MODULE:FUNCTION, which returns (modules, example). modules: each layer of the
    model in its order, or the same with the embedding before and the output layer after. example(n): the first one's
    input for n sequences.

    Raises ConfigError where there is no such function or it returns something else.
    """
    where, colon, name = spec.partition(":")
    if not colon or not where or not name:
        raise ConfigError(f"--module {spec} is not MODULE:FUNCTION: give both, as in mymodel.layers:make")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--module {spec} cannot be imported: {error}: give a module of this folder") from error
    returned = function()
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[1]):
        raise ConfigError(f"--module {spec} returns {type(returned).__name__}: return (modules, example)")
    modules, example = returned
    parts = parts_of(modules, n_layers, spec)
    for part in parts:
        part.module.to(device)
    return parts, lambda sequences: example(sequences).to(device)


def parts_of(modules: Iterable[Any], n_layers: int, spec: str) -> list[MeasuredPart]:
    """Name the modules of a user. Raises ConfigError when they are not as many as the model's layers."""
    found = list(modules)
    if not all(isinstance(module, nn.Module) for module in found):
        raise ConfigError(f"--module {spec} returns modules that are not torch.nn.Module: return one for each layer")
    if len(found) == n_layers:
        return [MeasuredPart("layer", number, 1, module) for number, module in enumerate(found)]
    if len(found) != n_layers + 2:
        raise ConfigError(
            f"--module {spec} returns {len(found)} modules, the model has {n_layers} layers: return one for each, or "
            "these with the embedding before and the output layer after them"
        )
    layers = [MeasuredPart("layer", number, 1, module) for number, module in enumerate(found[1:-1])]
    return [MeasuredPart("embedding", 0, 1, found[0]), *layers, MeasuredPart("output", 0, 1, found[-1])]


def shipped_parts(
    model: Model, sequence_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[MeasuredPart], Example]:
    """Embedding, one layer for all (they are equal), and output layer of a dense model of which only numbers are known.

    Raises ConfigError for experts and latent attention, whose modules are the user's own.
    """
    if model.experts or model.latent_q:
        what = "experts" if model.experts else "latent attention"
        raise ConfigError(f"{model.name} has {what}, which dips profile has no module for: give your own with --module")
    with torch.device(device):
        embedding = nn.Embedding(model.vocabulary, model.hidden, dtype=dtype)
        layer = DecoderLayer(model, dtype)
        output = nn.Sequential(
            nn.RMSNorm(model.hidden, dtype=dtype), nn.Linear(model.hidden, model.vocabulary, bias=False, dtype=dtype)
        )
    found = [("embedding", 1, embedding), ("layer", model.layers, layer), ("output", 1, output)]
    parts = [MeasuredPart(part, 0, count, module) for part, count, module in found]

    def example(sequences: int) -> Tensor:
        """Tokens, (sequences, sequence_tokens)."""
        return torch.randint(model.vocabulary, (sequences, sequence_tokens), device=device)

    return parts, example


class DecoderLayer(nn.Module):
    """A dense decoder layer with a model's sizes, without positions, which cost almost nothing. (B, T, hidden) in and
    out."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=model.biases, dtype=dtype)

        hidden, width = model.hidden, model.qk_width
        self._heads, self._kv_heads, self._width = model.heads, model.n_kv_heads, width
        self.attention_norm = nn.RMSNorm(hidden, dtype=dtype)
        self.queries = linear(hidden, model.heads * width)
        self.keys, self.values = (linear(hidden, model.n_kv_heads * width) for _ in range(2))
        self.mixed = linear(model.heads * width, hidden)
        self.mlp_norm = nn.RMSNorm(hidden, dtype=dtype)
        self.gate = linear(hidden, model.mlp_width) if model.gated_mlp else None
        self.up, self.down = linear(hidden, model.mlp_width), linear(model.mlp_width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        shape = (*x.shape[:2], -1, self._width)
        q, k, v = (one(normed).view(shape).transpose(1, 2) for one in (self.queries, self.keys, self.values))
        grouped = self._heads != self._kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.mixed(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        out: Tensor = x + self.down(inner)
        return out
