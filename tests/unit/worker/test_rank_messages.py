"""Messages between the ranks of a cluster over real connections, here of two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.exchange_process import UNIT_BYTES, check, cluster

from dips.core.errors import ConfigError, FatalError, LocalProtocolError
from dips.worker.commands import Ask, GoOn, Order, to_bytes
from dips.worker.parallel.exchange import Exchange
from dips.worker.parallel.meetings import RankReport
from dips.worker.parallel.ownership import shares_of_ranks
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


@pytest.mark.parametrize(("kind", "n", "bits"), [("irregular", 3, 32), ("idle", 3, 32), ("tp", 2, 16)])
def test_what_ranks_hold_and_own_is_exchanged_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, kind: str, n: int, bits: int
) -> None:
    def exchange(ranks: Ranks) -> None:
        assert ranks.exchange is not None
        check(kind, n, ranks.exchange, bits=bits)

    as_ranks(monkeypatch, *[exchange] * n)


def test_an_exchange_that_cannot_be_right_is_refused_and_a_lost_rank_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, held = cluster("tp", 2)
    closed = threading.Event()

    def exchange(ranks: Ranks) -> None:
        group, rank = ranks.exchange, ranks.rank
        assert group is not None
        with pytest.raises(ConfigError, match=r"rank 1 of this cluster shares the model out .* in another way"):
            Exchange(layout, held, shares_of_ranks(layout, held, UNIT_BYTES * (1 + rank)), group)
        shares = shares_of_ranks(layout, held, UNIT_BYTES)
        both: Any = Exchange(layout, held, shares, group)
        memory, flat = [torch.zeros(piece.sizes) for piece in held[rank]], np.zeros(shares[rank].n_elems, np.float32)
        for vector in (flat[1:], flat.astype(np.float64), np.repeat(flat, 2)[::2]):
            with pytest.raises(LocalProtocolError, match="a share's vector has"):
                both.collect(memory, vector)
        with pytest.raises(LocalProtocolError, match=r"'embed.weight' has shape \[1\], and had"):
            both.spread(flat, [torch.zeros(1), *memory[1:]])
        if rank == 1:
            both.close()
            with pytest.raises(FatalError, match="closed its connections"):
                both.spread(flat, memory)
            del group
            ranks.close()
            closed.set()
        else:
            closed.wait()
            with pytest.raises(FatalError, match="has lost another rank of its cluster"):
                both.spread(flat, memory)

    as_ranks(monkeypatch, exchange, exchange)


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
    def report(self) -> RankReport:
        return RankReport()


def test_silence_is_bounded_only_within_a_meeting() -> None:
    """Before it the leader may evaluate the model for hours while the others wait."""
    leader = Leader(Ask(), Ask(), GoOn())
    assert follow(cast(Any, leader), cast(Any, Part()), lambda ranges: None) == GoOn()
    assert leader.waits == [PATIENCE, SILENCE, SILENCE]
