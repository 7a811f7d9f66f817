"""One slave reads chunks from another: windows, silence, refusals, damaged chunks. Pure, under a hand-turned clock."""

from __future__ import annotations

from random import Random

import pytest

from dips.core.chunks import Chunk
from dips.core.errors import RefusalCode
from dips.core.messages import Refusal
from dips.slave.state.fetching import SILENCE_S, STALL_S, WINDOW_CHUNKS, ChunkRequest, Fetch, Reconnect

CHUNKS = [Chunk(0, 1024 * i, 1024) for i in range(40)]
BUSY = Refusal(RefusalCode.BUSY, "it is starting", 0.5)
GONE = Refusal(RefusalCode.VERSION_GONE, "version 1:3 is not kept here")


def asks(fetch: Fetch, now_s: float) -> list[ChunkRequest]:
    return [action for action in fetch.actions(now_s) if isinstance(action, ChunkRequest)]


def test_never_more_than_a_window_is_under_way_and_every_chunk_comes_once() -> None:
    fetch, got, open_asks = Fetch("s0", CHUNKS, 0.0), [], []
    while not fetch.done:
        open_asks += asks(fetch, 0.0)
        assert len(open_asks) <= WINDOW_CHUNKS
        ask = open_asks.pop(0)
        assert fetch.wanted(ask.request) == ask.chunk
        got.append(ask.chunk)
        fetch.landed(ask.request, 0.0)
        assert fetch.wanted(ask.request) is None
    assert got == CHUNKS
    assert fetch.actions(0.0) == []


def test_silence_asks_again_on_a_new_connection_and_late_answers_are_nobodys() -> None:
    fetch = Fetch("s0", CHUNKS[:2], 0.0)
    first = asks(fetch, 0.0)
    assert fetch.next_deadline_s() == SILENCE_S
    reconnect, *second = fetch.actions(SILENCE_S)
    assert isinstance(reconnect, Reconnect)
    assert [ask.chunk for ask in second if isinstance(ask, ChunkRequest)] == [ask.chunk for ask in first]
    assert all(fetch.wanted(ask.request) is None for ask in first)


def test_a_slave_that_gives_nothing_for_long_is_given_up() -> None:
    fetch, now_s = Fetch("s0", CHUNKS, 0.0), 0.0
    while fetch.failure is None:
        for ask in asks(fetch, now_s):
            fetch.refused(ask.request, BUSY, now_s)
        now_s = max(now_s + 0.01, fetch.next_deadline_s())
    assert fetch.failure.code is RefusalCode.BUSY
    assert f"gave no chunk for {STALL_S:g} s: it refuses: it is starting" in fetch.failure.sentence
    assert now_s <= 2 * STALL_S


def test_a_version_that_is_gone_ends_it_at_once() -> None:
    fetch = Fetch("s0", CHUNKS, 0.0)
    fetch.refused(asks(fetch, 0.0)[0].request, GONE, 0.1)
    assert fetch.failure is not None
    assert fetch.failure.code is RefusalCode.VERSION_GONE
    assert not fetch.done
    assert fetch.actions(0.2) == []


def test_a_refusal_pauses_and_what_was_under_way_is_asked_for_again() -> None:
    fetch = Fetch("s0", CHUNKS[:3], 0.0)
    first = asks(fetch, 0.0)
    fetch.refused(first[1].request, BUSY, 0.0)
    assert asks(fetch, 0.0) == []
    again = asks(fetch, fetch.next_deadline_s())
    assert sorted(ask.chunk for ask in again) == CHUNKS[:3]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_gets_lost_doubled_or_damaged_every_chunk_arrives(seed: int) -> None:
    rng, now_s, got = Random(seed), 0.0, set()
    fetch = Fetch("s0", CHUNKS, now_s)
    open_asks: list[ChunkRequest] = []
    while not fetch.done:
        assert fetch.failure is None
        open_asks += asks(fetch, now_s)
        now_s = now_s + 0.01 if open_asks else max(now_s + 0.01, fetch.next_deadline_s())
        rng.shuffle(open_asks)
        for ask in open_asks[:4]:
            if fetch.wanted(ask.request) is None or rng.random() < 0.2:
                continue
            if rng.random() < 0.2:
                fetch.damaged(ask.request, "bad", now_s)
            else:
                got.add(ask.chunk)
                fetch.landed(ask.request, now_s)
        del open_asks[:4]
    assert got == set(CHUNKS)
