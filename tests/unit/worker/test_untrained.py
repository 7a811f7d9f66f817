"""What torch models hold besides their trained parameters: which contents count; ranks have digests and descriptions of
one process."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from support.rank_table import RankTable, Seat

from dips.core.messages import TensorDigest
from dips.core.model_description import Lacking, ModelDescription, Untrained, difference
from dips.worker.parallel import untrained
from dips.worker.parallel.agreement import agree
from dips.worker.parallel.held import Held, ShardOf, held_here
from dips.worker.parallel.untrained import merged_description, untrained_of_ranks
from dips.worker.torch_model import description_of, untrained_of


class Adapted(torch.nn.Module):
    def __init__(self, seed: int = 0, table: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(40, 30, dtype=dtype).requires_grad_(False)
        self.adapter = torch.nn.Linear(30, 2)
        self.norm = torch.nn.BatchNorm1d(30)
        self.head = torch.nn.Linear(40, 30, bias=False)
        self.head.weight = self.base.weight
        self.register_buffer("angles", torch.full((5,), table), persistent=False)


def listed(model: torch.nn.Module) -> Untrained:
    return untrained_of(model, {id(p) for p in model.parameters() if p.requires_grad})


def test_frozen_parameters_and_buffers_are_listed_once_by_name() -> None:
    found = listed(Adapted())
    assert [item.name for item in found.frozen] == ["base.weight", "base.bias"]
    assert [item.name for item in found.buffers] == [
        "angles", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    assert listed(Adapted()) == found
    assert listed(torch.nn.Linear(3, 3)) == Untrained()


def test_another_base_differs_in_every_frozen_parameter_and_one_bit_counts() -> None:
    found = difference("weights", listed(Adapted()).frozen, listed(Adapted(seed=1)).frozen)
    assert found == "weights 'base.weight', 'base.bias' differ"
    other = Adapted(dtype=torch.bfloat16)
    assert difference("weights", listed(Adapted()).frozen, listed(other).frozen) == found
    one, other = Adapted(), Adapted()
    other.base.weight.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    assert difference("weights", listed(one).frozen, listed(other).frozen) == "weights 'base.weight' differ"


def test_constant_buffers_count_and_running_statistics_do_not() -> None:
    one, trained = Adapted(), Adapted()
    trained.norm(torch.randn(8, 30))
    assert trained.norm.running_mean is not None
    assert trained.norm.running_mean.any()
    assert listed(one) == listed(trained)
    assert difference("buffers", listed(one).buffers, listed(Adapted(table=2.0)).buffers) == "buffers 'angles' differ"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.complex64, torch.float16])
def test_every_dtype_and_shape_is_read(dtype: torch.dtype) -> None:
    class Held(torch.nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            self.register_buffer("scalar", torch.tensor(value).to(dtype))
            self.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
            self.register_buffer("strided", torch.arange(12).reshape(3, 4).to(dtype).t()[::2])

    assert listed(Held(1)) == listed(Held(1))
    assert difference("buffers", listed(Held(0)).buffers, listed(Held(1)).buffers) == "buffers 'scalar' differ"


def test_what_cannot_be_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False).to("meta")
    with caplog.at_level(logging.WARNING):
        found = listed(model)
    assert [item.name for item in found.frozen] == ["weight", "bias"]
    assert "the values of 'weight' cannot be read and are not compared" in caplog.text


class Adapter(torch.nn.Module):
    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        self.adapter = torch.nn.Parameter(torch.ones(3))
        self.base = torch.nn.Parameter(base.clone(), requires_grad=False)
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("angles", torch.ones(2), persistent=False)


BASE = torch.arange(7 * 6, dtype=torch.bfloat16).view(7, 6)


def held(base: torch.Tensor, starts: tuple[int, int] | None = None) -> Held:
    model = Adapter(base)
    shards = None if starts is None else {"base": ShardOf("base", (7, 6), starts)}
    return held_here([model], [torch.optim.SGD([model.adapter], lr=0.1)], shards=shards)


def together(*ranks: Held) -> list[tuple[Untrained, str] | str]:
    table = RankTable(len(ranks))

    def one(seat: Seat) -> tuple[Untrained, str]:
        mine = agree(seat, ranks[seat.rank], {})
        assert mine is not None
        return untrained_of_ranks(seat, seat.copy, mine)

    return table.together(one)


@pytest.mark.parametrize("bucket_bytes", [8, 24, 1 << 20])
def test_a_tensor_that_is_cut_has_the_digest_of_the_whole_one(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrained, "BUCKET_BYTES", bucket_bytes)
    whole = Adapter(BASE)
    expected = untrained_of(whole, {id(whole.adapter)})
    described = description_of(whole, {id(whole.adapter)}, expected)
    rows = together(held(BASE[:4], (0, 0)), held(BASE[4:], (4, 0)))
    columns = together(held(BASE[:, :2], (0, 0)), held(BASE[:, 2:], (0, 2)), held(BASE[:, 2:], (0, 2)))
    assert rows == [(expected, described)] * 2
    assert columns == [(expected, described)] * 3
    assert together(held(BASE), held(BASE)) == [(expected, described)] * 2


def test_a_frozen_tensor_that_is_two_or_incomplete_is_refused_on_all_ranks() -> None:
    said = together(held(BASE), held(BASE[:4]))
    assert said[0] == said[1]
    assert str(said[0]).startswith("frozen parameter 'base' is bfloat16 of shape [4, 6] on rank 1, and bfloat16 of")
    said = together(held(BASE[:4], (0, 0)), held(BASE[5:], (5, 0)))
    assert said[0] == said[1]
    assert str(said[0]).startswith("no rank holds 6 of the 42 elements of 'base', which is not trained: ")


def test_descriptions_of_stages_are_one() -> None:
    def lacks(*names: str) -> tuple[Lacking, ...]:
        return tuple(Lacking(name, (1,), "float32", 7) for name in names)

    first = ModelDescription({}, "", ("a",), 2, lacks("a", "shared"))
    second = ModelDescription({"model_type": "x"}, "", ("shared",), 2, lacks("shared", "b"))
    said = json.loads(merged_description([first.to_json(), second.to_json()]))
    assert [row[0] for row in said["lacks"]] == ["a", "shared", "b"]
    assert (said["n_absent"], said["config"]) == (3, {"model_type": "x"})
    assert merged_description([]) == ""
    too_many = ModelDescription({}, "", ("a",), 900)
    assert json.loads(merged_description([first.to_json(), too_many.to_json()]))["n_absent"] == 900


def test_a_stage_that_names_its_tensors_otherwise_has_the_names_of_the_full_model() -> None:
    stage = Adapter(BASE)
    optimizer = torch.optim.SGD([stage.adapter], lr=0.1)
    names = {name: ShardOf(f"layers.3.{name}") for name in ("adapter", "base", "table", "angles")}
    (said,) = together(held_here([stage], [optimizer], shards=names))
    assert isinstance(said, tuple), said
    found, described = said
    assert [item.name for item in found.frozen] == ["layers.3.base"]
    expected = untrained_of(stage, {id(stage.adapter)})
    assert found.buffers == tuple(TensorDigest(f"layers.3.{b.name}", b.digest) for b in expected.buffers)
    assert [row[0] for row in json.loads(described)["lacks"]] == ["layers.3.base", "layers.3.table"]
