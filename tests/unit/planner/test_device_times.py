"""Measuring layers: which parts are timed, the numbers from a clock that counts, and modules that do not fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dips.core.errors import ConfigError
from dips.planner.model import Model, read_model
from dips.planner.run.device_times import (
    DecoderLayer,
    MeasuredPart,
    MeasuringRounds,
    measure,
    own_parts,
    parts_of,
    shipped_parts,
    torch_device,
)

CPU = torch.device("cpu")
MODEL = Model(
    name="m", layers=3, hidden=16, heads=4, kv_heads=2, mlp_width=32, vocabulary=50, source="a test"
)  # fmt: skip


def ticks(*lengths: int) -> Iterator[int]:
    """A clock whose time between two looks is each of these in turn, again and again."""
    now = 0
    for number in count():
        yield now
        now += lengths[number % len(lengths)]


def test_the_times_are_medians_and_weights_take_what_the_whole_pass_takes_more() -> None:
    """Of a round the clock is looked at 5 times: forward 3 ms, a pause, input 2 ms, both gradients 7 ms, a pause."""
    clock = ticks(3_000_000, 10_000_000, 2_000_000, 7_000_000, 50_000_000)
    part = MeasuredPart("layer", 0, 3, nn.Linear(4, 4))
    (found,) = measure([part], lambda n: torch.zeros(n, 4), [2], MeasuringRounds(3), "k", lambda: next(clock))
    assert found.times_ms == (3.0, 2.0, 5.0)
    assert (found.device, found.microbatch_sequences, found.count, found.spread) == ("k", 2, 3, 0.0)


def test_a_part_without_weights_and_one_without_gradient_of_its_input() -> None:
    clock = ticks(1_000_000)
    parts = [MeasuredPart("embedding", 0, 1, nn.Embedding(5, 4)), MeasuredPart("layer", 0, 1, nn.ReLU())]
    example = torch.ones(1, 3, dtype=torch.long)
    first, second = measure(parts, lambda n: example, [1], MeasuringRounds(3), "k", lambda: next(clock))
    assert first.times_ms == (1.0, 0.0, 1.0)
    assert second.times_ms == (1.0, 1.0, 0.0)


def test_described_models_are_measured_as_planned() -> None:
    parts, example = shipped_parts(MODEL, 7, CPU, torch.float32)
    found = list(measure(parts, example, [1, 2], MeasuringRounds(3), "k"))
    assert [(row.part, row.count, row.microbatch_sequences) for row in found] == [
        (part, n, size) for size in (1, 2) for part, n in (("embedding", 1), ("layer", 3), ("output", 1))
    ]
    assert all(row.forward_ms > 0 and row.input_gradient_ms > 0 for row in found if row.part == "layer")
    layer = DecoderLayer(MODEL, torch.float32)
    assert sum(p.numel() for p in layer.parameters()) == MODEL.layer_parameters(0)
    assert layer(torch.zeros(2, 5, 16)).shape == (2, 5, 16)


def test_parts_of_users_and_of_described_models() -> None:
    with pytest.raises(ConfigError, match=r"mixtral-8x7b has experts, which .*: give your own with --module"):
        shipped_parts(read_model("mixtral-8x7b"), 8, CPU, torch.float32)
    parts = parts_of([nn.Linear(4, 4), nn.Linear(3, 3)], 2, "m:f")
    with pytest.raises(ConfigError, match="layer 1 cannot be measured with 1 sequences in a microbatch: RuntimeError"):
        list(measure(parts, lambda n: torch.zeros(n, 4), [1], MeasuringRounds(3), "k"))


def test_modules_are_named_by_their_number() -> None:
    layers = [nn.Linear(4, 4) for _ in range(5)]
    assert [(one.part, one.layer) for one in parts_of(layers, 5, "m:f")] == [("layer", n) for n in range(5)]
    named = [(one.part, one.layer) for one in parts_of(layers, 3, "m:f")]
    assert named == [("embedding", 0), ("layer", 0), ("layer", 1), ("layer", 2), ("output", 0)]
    with pytest.raises(ConfigError, match="m:f returns 5 modules, the model has 4 layers: return one for each, or"):
        parts_of(layers, 4, "m:f")
    with pytest.raises(ConfigError, match=r"modules that are not torch.nn.Module"):
        parts_of([1, 2], 2, "m:f")


OWN = """
import torch
def make():
    return [torch.nn.Linear(4, 4) for _ in range(2)], lambda n: torch.zeros(n, 4)
def wrong():
    return 1
"""


def test_a_users_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_layers_of_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    parts, example = own_parts("own_layers_of_a_test:make", 2, CPU)
    whole: Tensor = example(3)
    assert (len(parts), whole.shape) == (2, (3, 4))
    for spec, sentence in (
        ("own_layers_of_a_test:wrong", r"returns int: return \(modules, example\)"),
        ("own_layers_of_a_test:none", "cannot be imported: .*has no attribute"),
        ("no_such_module_at_all:f", "cannot be imported: No module named"),
        ("f", "is not MODULE:FUNCTION: give both"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            own_parts(spec, 2, CPU)


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--on {name}"):
        torch_device(name)
