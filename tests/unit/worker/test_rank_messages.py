"""Messages between the ranks of a cluster over real connections, here of two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from dips.core.errors import FatalError
from dips.worker.parallel.meetings import Report
from dips.worker.parallel.orders import Ask, GoOn, Order, to_bytes
from dips.worker.parallel.rank_part import follow
from dips.worker.parallel.ranks import PATIENCE, SILENCE, Ranks


def as_ranks(monkeypatch: pytest.MonkeyPatch, *calls: Callable[[Ranks], None]) -> None:
    """Each call is made on a rank of its own; returns when all have ended."""
    here, store = threading.local(), dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)

    def run(rank: int) -> None:
        here.rank = rank
        ranks = Ranks(range(len(calls)), store)
        try:
            calls[rank](ranks)
        finally:
            ranks.close()

    with ThreadPoolExecutor(len(calls)) as threads:
        list(threads.map(run, range(len(calls))))


def test_a_follower_of_which_the_leader_is_gone_without_a_word_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the leader's host loses its power: the connection stays open."""
    ended = threading.Event()

    def lead(ranks: Ranks) -> None:
        ranks.say(to_bytes(Ask()))
        ended.wait()

    def hear(ranks: Ranks) -> None:
        try:
            assert ranks.hear(PATIENCE) == to_bytes(Ask())
            with pytest.raises(FatalError, match=r"rank 1 of this cluster has lost another rank, .* cannot be reached"):
                ranks.hear(timedelta(seconds=0.1))
        finally:
            ended.set()

    as_ranks(monkeypatch, lead, hear)


def test_orders_of_any_length_and_copies_reach_every_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [b"", b"short", bytes(range(256)) * 256]
    copies: dict[int, torch.Tensor] = {rank: torch.full((2, 3), float(rank)) for rank in range(3)}

    def lead(ranks: Ranks) -> None:
        for order in orders:
            ranks.say(order)
        ranks.copy(copies[0], (0, 1, 2))

    def follows(ranks: Ranks) -> None:
        assert [ranks.hear(PATIENCE) for _ in orders] == orders
        ranks.copy(copies[ranks.rank], (0, 1, 2))

    as_ranks(monkeypatch, lead, follows, follows)
    assert not any(copy.any() for copy in copies.values())


class Leader:
    """What a follower hears, and how long it would have waited for each order."""

    def __init__(self, *orders: Order) -> None:
        self._orders = iter(orders)
        self.waits: list[timedelta] = []

    def hear(self, patience: timedelta) -> bytes:
        self.waits.append(patience)
        return to_bytes(next(self._orders))

    def report(self, numbers: object) -> None: ...


class Part:
    def report(self) -> Report:
        return Report()


def test_silence_is_bounded_only_within_a_meeting() -> None:
    """Before it the leader may evaluate the model for hours while the others wait."""
    leader = Leader(Ask(), Ask(), GoOn())
    assert follow(cast(Any, leader), cast(Any, Part()), lambda ranges: None) == GoOn()
    assert leader.waits == [PATIENCE, SILENCE, SILENCE]
