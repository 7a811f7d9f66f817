"""What the ranks of a cluster compare before rank 0's parameters go anywhere, with threads in place of processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dips.core.errors import ConfigError
from dips.worker.parallel.ranks import SAMPLE_STRIDE, Ranks
from dips.worker.torch_model import TorchParameters

LARGE = 100 * SAMPLE_STRIDE


class Table:
    """Stands in for the collective: every rank puts down its part, and takes what all have put."""

    def __init__(self, n_ranks: int) -> None:
        self._parts: list[bytes] = [b""] * n_ranks
        self._all_are_here = threading.Barrier(n_ranks, timeout=20)
        self.n_gathers = 0

    def gather(self, rank: int, mine: bytes) -> list[bytes]:
        self._parts[rank] = mine
        if self._all_are_here.wait() == 0:
            self.n_gathers += 1
        parts = list(self._parts)
        self._all_are_here.wait()
        return parts


class Seat(Ranks):
    """A rank at a table."""

    def __init__(self, rank: int, table: Table) -> None:
        self.rank, self._table, self._compared = rank, table, 0

    def gather(self, mine: bytes) -> list[bytes]:
        return self._table.gather(self.rank, mine)


def model(
    seed: int = 0, names: Sequence[str] = ("first", "norm", "last"), dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    torch.manual_seed(seed)
    module = torch.nn.Module()
    for name in names:
        values = torch.randn(8) if name == "norm" else torch.randn(LARGE // 10, 10)
        module.register_parameter(name, torch.nn.Parameter(values.to(dtype)))
    return module


def of(module: torch.nn.Module) -> TorchParameters:
    return TorchParameters(module, torch.optim.SGD(module.parameters(), lr=0.1))


class Cluster:
    """Ranks with a model each."""

    def __init__(self, *models: torch.nn.Module | Exception) -> None:
        self.parameters = [m if isinstance(m, Exception) else of(m) for m in models]
        self.table = Table(len(models))
        self.seats = [Seat(rank, self.table) for rank in range(len(models))]

    def together(self, what: Callable[[Seat], None]) -> list[str]:
        """What is raised on each rank; empty: nothing."""

        def one(seat: Seat) -> str:
            try:
                what(seat)
            except (ConfigError, ValueError) as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(self.seats)) as pool:
            return list(pool.map(one, self.seats))

    def agree(self, *replicas: bool) -> list[str]:
        said = replicas or (False,) * len(self.seats)
        return self.together(lambda seat: seat.agree(self.parameters[seat.rank], replicas=said[seat.rank]))

    def compare(self) -> list[str]:
        def one(seat: Seat) -> None:
            parameters = self.parameters[seat.rank]
            assert isinstance(parameters, TorchParameters)
            seat.compare(parameters)

        return self.together(one)


def change(module: torch.nn.Module, name: str, start: int, stop: int) -> None:
    """As a step that the other ranks have not made."""
    with torch.no_grad():
        module.get_parameter(name).view(-1)[start:stop] += 1.0


def test_equal_ranks_enter_after_one_exchange_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(model(), model(), model())
    assert cluster.agree() == ["", "", ""]
    assert cluster.compare() == ["", "", ""]
    assert cluster.table.n_gathers == 2
    assert not caplog.records


def other_shape() -> torch.nn.Module:
    module = model()
    module.last = torch.nn.Parameter(torch.zeros(10, LARGE // 10))
    return module


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            other_shape(),
            f"parameter 'last' is float32 of shape [10, {LARGE // 10}] on cpu on rank 1, and float32 of shape "
            f"[{LARGE // 10}, 10] on cpu on rank 0: ",
        ),
        (model(dtype=torch.bfloat16), "parameter 'first' is bfloat16 of shape"),
        (model(names=("first", "bias")), "rank 1 has parameter 'bias' where rank 0 has 'norm': "),
        (model(names=("first", "norm")), "only rank 0 has parameter 'last': "),
        (model(names=("first", "norm", "last", "head")), "only rank 1 has parameter 'head': "),
    ],
)
def test_another_layout_is_refused_on_every_rank_by_name(other: torch.nn.Module, sentence: str) -> None:
    said = Cluster(model(), other).agree(True, True)
    assert said[0] == said[1]
    assert said[0].startswith(sentence)
    assert "does not gather shards" in said[0]


def test_other_values_are_refused_on_every_rank_by_name() -> None:
    other = model()
    change(other, "last", 5, 6)
    said = Cluster(model(), model(), other).agree()
    assert len(set(said)) == 1
    assert said[0].startswith("parameter 'last' has other values on rank 2 than on rank 0: ")
    assert "replicas=True" in said[0]


def test_other_values_of_replicas_are_taken_from_rank_0_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert Cluster(model(1), model(2)).agree(True, True) == ["", ""]
    line = "parameter 'first' has other values on rank 1 than on rank 0: these ranks are replicas"
    assert [line in record.getMessage() for record in caplog.records] == [True, True]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_ranks_are_replicas_only_if_every_rank_says_so() -> None:
    said = Cluster(model(1), model(2)).agree(True, False)
    assert "has other values on rank 1" in said[0]
    assert said[0] == said[1]


def test_a_rank_that_cannot_take_part_ends_all_of_them_with_its_reason() -> None:
    assert Cluster(model(), ValueError("it is sparse")).agree() == [
        "rank 1 of this cluster cannot take part: it is sparse", "it is sparse",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_comparison_finds_one_element(dtype: torch.dtype) -> None:
    mine, other = model(dtype=dtype), model(dtype=dtype)
    cluster = Cluster(mine, other)
    cluster.agree()
    change(other, "last", LARGE - 1, LARGE)
    said = cluster.compare()
    assert said[0] == said[1]
    assert said[0].startswith("parameter 'last' of rank 1 is no longer equal to rank 0's")


def test_each_later_comparison_finds_a_row_and_a_small_tensor() -> None:
    mine, other = model(), model()
    cluster = Cluster(mine, other)
    for start in range(0, 7 * SAMPLE_STRIDE, 37):
        assert cluster.compare() == ["", ""]
        change(other, "last", start, start + SAMPLE_STRIDE)
        assert cluster.compare()[0].startswith("parameter 'last' of rank 1")
        change(mine, "last", start, start + SAMPLE_STRIDE)
    assert cluster.compare() == ["", ""]
    change(other, "norm", 7, 8)
    assert cluster.compare()[1].startswith("parameter 'norm' of rank 1")


def test_one_element_is_found_within_as_many_pushes_as_the_sample_is_thin() -> None:
    other = model()
    cluster = Cluster(model(), other)
    assert cluster.compare() == ["", ""]
    change(other, "last", 1000, 1001)
    found = [bool(cluster.compare()[0]) for _ in range(SAMPLE_STRIDE)]
    assert found.count(True) == 1


def test_parameters_that_are_not_contiguous_are_compared_in_their_logical_order() -> None:
    """One rank may hold a transposed one that another does not: the values are what counts."""
    mine, other = model(), model()
    other.last = torch.nn.Parameter(other.get_parameter("last").detach().t().contiguous().t())
    cluster = Cluster(mine, other)
    assert cluster.agree() == ["", ""]
    assert cluster.compare() == ["", ""]
    assert cluster.compare() == ["", ""]
