"""Ranks of a cluster that are threads of one process: what they gather, they put on a table."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from dips.core.errors import DipsError

T = TypeVar("T")


class _Table:
    def __init__(self, n_ranks: int) -> None:
        self.parts: list[bytes] = [b""] * n_ranks
        self.all_are_here = threading.Barrier(n_ranks, timeout=20)
        self.n_gathers = 0
        self.wires: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (source, target): queue.Queue() for source in range(n_ranks) for target in range(n_ranks)
        }


class Seat:
    def __init__(self, rank: int, n_ranks: int, table: _Table) -> None:
        self.rank, self.n_ranks, self._table = rank, n_ranks, table

    def gather(self, mine: bytes) -> list[bytes]:
        self._table.parts[self.rank] = mine
        if self._table.all_are_here.wait() == 0:
            self._table.n_gathers += 1
        parts = list(self._table.parts)
        self._table.all_are_here.wait()
        return parts

    def copy(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        for target in ranks[1:]:
            if self.rank == ranks[0]:
                self._table.wires[ranks[0], target].put(tensor.clone())
            elif self.rank == target:
                tensor.copy_(self._table.wires[ranks[0], target].get(timeout=20))


class RankTable:
    def __init__(self, n_ranks: int) -> None:
        self._table = _Table(n_ranks)
        self.seats = [Seat(rank, n_ranks, self._table) for rank in range(n_ranks)]

    @property
    def n_gathers(self) -> int:
        return self._table.n_gathers

    def together(self, what: Callable[[Seat], T]) -> list[T | str]:
        def one(seat: Seat) -> T | str:
            try:
                return what(seat)
            except (DipsError, ValueError) as error:
                return str(error)

        with ThreadPoolExecutor(len(self.seats)) as pool:
            return list(pool.map(one, self.seats))
