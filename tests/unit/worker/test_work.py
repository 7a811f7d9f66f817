"""Ranges and tokens: nothing is lost, nothing is counted twice (I12), however events fall."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core import messages
from dips.core.errors import LocalProtocolError
from dips.worker.state.work import Work, WorkBook, joined


def piece(begin: int, end: int, lease: int = 1) -> messages.DataRange:
    return messages.DataRange(lease, 0, lease, begin, end)


def tokens_of(ranges: Iterable[messages.DataRange]) -> list[tuple[int, int]]:
    """Every single token, as (lease, position)."""
    return sorted((r.lease_id, at) for r in ranges for at in range(r.begin_tokens, r.end_tokens))


def test_steps_split_what_is_held_and_neighbours_join() -> None:
    book = WorkBook()
    book.leased([piece(0, 100)])
    book.stepped(10, [piece(40, 50)], 3.0)
    book.stepped(10, [piece(50, 60)], float("nan"))
    assert book.held == (piece(0, 40), piece(60, 100))
    assert book.pending == Work((piece(40, 60),), 20, 2, 3.0, 1)
    assert book.pending.mean_loss == 3.0


def test_a_range_cannot_be_trained_twice() -> None:
    book = WorkBook()
    book.leased([piece(0, 10)])
    book.stepped(5, [piece(0, 5)], 1.0)
    with pytest.raises(LocalProtocolError, match="counted before"):
        book.stepped(5, [piece(4, 9)], 1.0)
    assert book.held == (piece(5, 10),)
    assert book.tokens == 5


def test_freeze_thaw_decide_and_drop() -> None:
    book = WorkBook()
    book.leased([piece(0, 30)])
    book.stepped(10, [piece(0, 10)], 1.0)
    assert book.freeze().tokens == 10
    with pytest.raises(LocalProtocolError, match="open already"):
        book.freeze()
    book.stepped(10, [piece(10, 20)], 2.0)
    assert book.tokens == 20
    book.thaw()
    assert book.pending == Work((piece(0, 20),), 20, 2, 3.0, 2)
    book.freeze()
    book.stepped(10, [piece(20, 30)], 2.0)
    assert book.drop() == (piece(0, 30),)
    assert book.tokens == 0
    assert book.all_ranges() == ()


def test_work_without_losses_has_no_mean() -> None:
    assert Work().mean_loss != Work().mean_loss


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(1, 5)), max_size=12))
def test_joined_keeps_every_token(items: list[tuple[int, int, int]]) -> None:
    ranges = [piece(begin, begin + n, lease) for lease, begin, n in items]
    once = [r for i, r in enumerate(ranges) if not set(tokens_of([r])) & set(tokens_of(ranges[:i]))]
    result = joined(once)
    assert tokens_of(result) == tokens_of(once)
    assert len(result) <= len(once)
