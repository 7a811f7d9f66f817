"""Transfers over a network that loses, doubles, reorders and delays, under virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.errors import RefusalCode
from dips.core.layout import Chunk, Layout, Parameter, shard_digest
from dips.core.messages import PlacementSpec, Refusal, SlaveAddress
from dips.core.net.data_header import MAX_MISSING, MissingChunk
from dips.core.net.transfer import (
    TURNED_AWAY_S,
    PullTransfer,
    PushTransfer,
    Reconnect,
    SlaveRequest,
    Transfer,
    TransferSettings,
    chunks_by_slave,
)

CHUNK = 16
LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (10,), "float32", f"layers.{i}") for i in range(5)))
PLACEMENT = PlacementSpec(
    (SlaveAddress("s0", "a"), SlaveAddress("s1", "b"), SlaveAddress("idle", "c")), (0, 1, 0, 1, 0), b""
)
SETTINGS = TransferSettings(CHUNK, 3, silence_s=2.0, stall_s=60.0)
ORDER = (4, 3, 2, 1, 0)
RTT_S = 0.1


def shares() -> dict[str, list[Chunk]]:
    return chunks_by_slave(LAYOUT, PLACEMENT, ORDER, CHUNK)


def sum_of(chunk: Chunk) -> int:
    return hash((chunk.block_id, chunk.offset_bytes)) & 0xFFFF


def promised() -> dict[str, bytes]:
    return {slave: shard_digest([sum_of(c) for c in sorted(chunks)]) for slave, chunks in shares().items()}


@dataclass
class Network:
    """Slaves behind a bad network. A message is lost or doubled by chance, and arrives after RTT_S or later."""

    transfer: Transfer
    seed: int = 0
    loss: float = 0.0
    doubling: float = 0.0
    jitter_s: float = 0.0
    now_s: float = 0.0
    held: dict[str, set[Chunk]] = field(default_factory=dict)
    asks: list[SlaveRequest] = field(default_factory=list)
    most_in_flight: int = 0
    refuse: Callable[[SlaveRequest, float], Refusal | None] = lambda ask, now_s: None
    lost: Callable[[SlaveRequest, float], bool] = lambda ask, now_s: False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0

    def run(self, until_s: float = 1000.0) -> None:
        while not (self.transfer.done or self.transfer.failure) and self.now_s < until_s:
            for action in self.transfer.actions(self.now_s):
                if isinstance(action, SlaveRequest):
                    self.send(action)
            in_flight = self.transfer.columns.flow.windows.bytes_in_flight
            self.most_in_flight = max(self.most_in_flight, *in_flight)
            self.advance()

    def advance(self) -> None:
        wake_s = self.transfer.next_deadline_s()
        if self.queue and self.queue[0][0] <= wake_s:
            at_s, _, deliver = heapq.heappop(self.queue)
            self.now_s = max(self.now_s, at_s)
            deliver()
        else:
            self.now_s = max(self.now_s, wake_s)

    def send(self, ask: SlaveRequest) -> None:
        self.asks.append(ask)
        for _ in range(2 if self.random.random() < self.doubling else 1):
            if self.random.random() >= self.loss and not self.lost(ask, self.now_s):
                self.post(lambda: self.arrive(ask))

    def post(self, deliver: Callable[[], None]) -> None:
        delay_s = RTT_S / 2 + self.random.random() * self.jitter_s
        self.count += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.count, deliver))

    def answer(self, deliver: Callable[[], None]) -> None:
        if self.random.random() >= self.loss:
            self.post(deliver)

    def arrive(self, ask: SlaveRequest) -> None:
        refusal = self.refuse(ask, self.now_s)
        transfer = self.transfer
        if refusal is not None:
            self.answer(lambda: transfer.refused(ask.slave, ask.request, refusal, self.now_s))
        elif isinstance(transfer, PushTransfer):
            self.put(transfer, ask)
        elif isinstance(transfer, PullTransfer):
            chunk = ask.chunk
            assert chunk is not None
            self.answer(lambda: transfer.landed(ask.slave, ask.request, sum_of(chunk), self.now_s))

    def put(self, transfer: PushTransfer, ask: SlaveRequest) -> None:
        held = self.held.setdefault(ask.slave, set())
        every = set(shares()[ask.slave])
        if ask.chunk is not None:
            held.add(ask.chunk)
            complete = held == every
            self.answer(lambda: transfer.acked(ask.slave, ask.request, complete, self.now_s))
            return
        missing = [MissingChunk(c.block_id, c.offset_bytes) for c in sorted(every - held)][:MAX_MISSING]
        self.answer(lambda: transfer.missing(ask.slave, ask.request, missing, not missing, self.now_s))


arrays = False
"""Whether the columns of transfers are arrays."""


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["lists", "arrays"])
def _columns(request: pytest.FixtureRequest) -> None:
    global arrays
    arrays = request.param


def push(settings: TransferSettings = SETTINGS) -> PushTransfer:
    return PushTransfer(shares(), settings, 0.0, arrays=arrays)


def pull(
    of: dict[str, list[Chunk]] | None = None, digests: dict[str, bytes] | None = None, settings: TransferSettings =
    SETTINGS,
) -> PullTransfer:  # fmt: skip
    return PullTransfer(
        shares() if of is None else of, promised() if digests is None else digests, settings, 0.0, arrays=arrays
    )


def test_a_transfer_begins_with_the_slave_that_its_schedule_names_first() -> None:
    """Else all clusters would begin with the same one, whatever their tickets say."""
    for order, first in (((0, 1, 2, 3, 4), "s0"), ((1, 0, 3, 2, 4), "s1")):
        transfer = pull(chunks_by_slave(LAYOUT, PLACEMENT, order, CHUNK))
        asks = [action for action in transfer.actions(0.0) if isinstance(action, SlaveRequest)]
        assert asks[0].slave == first
        assert asks[1].slave != first, "then the next one"


def test_the_slave_that_has_the_least_part_of_its_share_comes_first() -> None:
    """s0 has 9 chunks to give and s1 6; once both gave two, s0 lags behind, and the chunk for which there is room is
    asked of it, though s1 comes first in the order."""
    transfer = pull(chunks_by_slave(LAYOUT, PLACEMENT, (1, 0, 3, 2, 4), CHUNK))
    asks = [action for action in transfer.actions(0.0) if isinstance(action, SlaveRequest)]
    assert [ask.slave for ask in asks] == ["s1", "s0"] * 4
    for ask in asks[:4]:
        assert ask.chunk is not None
        transfer.landed(ask.slave, ask.request, sum_of(ask.chunk), 0.1)
    following = [action.slave for action in transfer.actions(0.1) if isinstance(action, SlaveRequest)]
    assert following[0] == "s0"


def test_a_clean_push_asks_first_and_then_sends_each_chunk_once() -> None:
    network = Network(push())
    network.run()
    transfer = network.transfer
    assert transfer.done
    assert [a.chunk for a in network.asks[:2]] == [None, None]
    sent = [a.chunk for a in network.asks if a.chunk is not None]
    assert len(sent) == len(set(sent)) == 15
    of_s0 = [c for c in sent if c in shares()["s0"]]
    assert [c.block_id for c in of_s0] == [4, 4, 4, 2, 2, 2, 0, 0, 0], "in the order of the schedule"
    assert 0 < network.most_in_flight < (SETTINGS.window_chunks + 1) * CHUNK
    assert all(transfer.columns.chunks.moved)
    assert transfer.reconnects == 0


def test_a_slave_that_names_only_some_missing_chunks_is_asked_again() -> None:
    transfer = push()
    first = next(a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest) and a.slave == "s1")
    some = [MissingChunk(c.block_id, c.offset_bytes) for c in shares()["s1"][:2]]
    transfer.missing("s1", first.request, some, False, 0.1)
    asks = [a for a in transfer.actions(0.1) if isinstance(a, SlaveRequest)]
    assert [a.chunk for a in asks] == shares()["s1"][:2]
    for ask in asks:
        transfer.acked("s1", ask.request, False, 0.2)
    assert [a.chunk for a in transfer.actions(0.2) if isinstance(a, SlaveRequest) and a.slave == "s1"] == [None]


@pytest.mark.parametrize("place", [(1, 0), (4, 7), (9, 0)])
def test_missing_chunks_of_another_layout_fail_the_push(place: tuple[int, int]) -> None:
    transfer = push()
    first = next(a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest) and a.slave == "s0")
    transfer.missing("s0", first.request, [MissingChunk(4, 0), MissingChunk(*place)], False, 0.1)
    assert "another layout" in transfer.failure


@settings(max_examples=60)
@given(st.booleans(), st.integers(0, 2**32), st.floats(0, 0.3), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_bad_network_only_delays(pushing: bool, seed: int, loss: float, doubling: float, jitter_s: float) -> None:
    """One attempt may give up (two silences in a row); the attempts together get there and lose nothing."""
    held: dict[str, set[Chunk]] = {}
    for attempt in range(60):
        network = Network(push() if pushing else pull(), seed + attempt, loss, doubling, jitter_s, held=held)
        network.run()
        assert network.transfer.done or "answered nothing" in network.transfer.failure
        if network.transfer.done:
            break
    assert network.transfer.done
    if pushing:
        assert all(held.get(slave, set()) == set(chunks) for slave, chunks in shares().items())


def test_silence_reconnects_and_resumes() -> None:
    transfer = push()
    network = Network(transfer)
    network.lost = lambda ask, now_s: ask.slave == "s1" and 0.05 < now_s < 1.5
    network.run()
    assert transfer.done
    assert transfer.reconnects == 1
    queries = [a for a in network.asks if a.slave == "s1" and a.chunk is None]
    assert len(queries) == 2, "after the silence, what is missing is asked before anything is sent"
    resent = [a.chunk for a in network.asks if a.slave == "s1" and a.chunk is not None]
    assert 0 < len(resent) - len(set(resent)) <= SETTINGS.window_chunks + 1, "only what was in flight is sent again"


def test_a_slave_that_stays_silent_is_given_up_with_its_name() -> None:
    network = Network(push())
    network.lost = lambda ask, now_s: ask.slave == "s1"
    network.run()
    assert "slave s1 answered nothing" in network.transfer.failure
    assert network.now_s == pytest.approx(6.0)  # 2 s, then twice as long
    assert network.transfer.actions(network.now_s) == []
    assert not network.transfer.done


def test_a_slow_link_earns_patience() -> None:
    transfer = pull({"s0": shares()["s0"]})
    now_s, pending, gap_s = 0.0, [], 1.5
    while not transfer.done:
        pending += [a for a in transfer.actions(now_s) if isinstance(a, SlaveRequest)]
        now_s += gap_s  # each answer takes longer than the one before, far beyond the first 2 s
        gap_s *= 1.3
        ask = pending.pop(0)
        assert ask.chunk is not None
        transfer.landed("s0", ask.request, sum_of(ask.chunk), now_s)
    assert gap_s > 10
    assert transfer.reconnects == 0


def test_the_first_chunk_of_a_slow_link_is_waited_for() -> None:
    """1 MiB takes 8.4 s over 1 Mbit/s, and gives no sign of life before it is there."""
    mib = 1 << 20
    layout = Layout((Parameter("w", (3 * mib // 4,), "float32", "w"),))
    placement = PlacementSpec((SlaveAddress("s0", "a"),), (0,), b"")
    settings = TransferSettings(mib, 3, silence_s=2.0, stall_s=60.0)
    transfer = pull(chunks_by_slave(layout, placement, (0,), mib), {"s0": b""}, settings)
    first = [a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest)]
    assert len(first) == 3
    assert transfer.actions(8.4) == []
    transfer.landed("s0", first[0].request, 1, 8.4)
    assert transfer.actions(16.8) == []
    assert transfer.reconnects == 0


@pytest.mark.parametrize("opens_at_s", [0.7, 1e9])
def test_a_push_that_is_not_open_yet_is_waited_for_but_not_for_ever(opens_at_s: float) -> None:
    network = Network(push())
    unknown = Refusal(RefusalCode.UNKNOWN_PUSH, "no staging is open", 0.2)
    network.refuse = lambda ask, now_s: unknown if now_s < opens_at_s else None
    network.run()
    if opens_at_s < 1:
        assert network.transfer.done
        assert sum(a.chunk is not None for a in network.asks) == 15
    else:
        assert "no staging is open" in network.transfer.failure
        assert 5 < network.now_s < 8


@pytest.mark.parametrize(
    "code",
    [RefusalCode.VERSION_GONE, RefusalCode.STALE_EPOCH, RefusalCode.RUN_ID, RefusalCode.KEY, RefusalCode.BASE_GONE],
)
def test_what_only_the_master_can_settle_fails_at_once(code: RefusalCode) -> None:
    transfer = push()
    network = Network(transfer if code is RefusalCode.BASE_GONE else pull())
    network.refuse = lambda ask, now_s: Refusal(code, "not here")
    network.run()
    assert "not here" in network.transfer.failure
    assert network.transfer.refusal is code
    assert transfer.base_gone == (code is RefusalCode.BASE_GONE)
    assert network.now_s < 1


def test_a_chunk_that_a_pull_was_refused_is_asked_for_again() -> None:
    """Found by reading: it was forgotten, and the pull stood still until its stall ended it."""
    network = Network(pull())
    refused: list[Chunk] = []

    def refuse(ask: SlaveRequest, now_s: float) -> Refusal | None:
        if ask.chunk is not None and len(refused) < 2:
            refused.append(ask.chunk)
            return Refusal(RefusalCode.BUSY, "not now", 0.1)
        return None

    network.refuse = refuse
    network.run()
    assert network.transfer.done
    assert network.now_s < 5.0


def test_a_share_with_another_digest_is_fetched_again_and_then_refused() -> None:
    transfer = pull(digests={**promised(), "s1": b"x" * 16})
    network = Network(transfer)
    network.run()
    assert transfer.corrupt
    assert not transfer.done
    assert "slave s1" in transfer.failure
    assert sum(a.slave == "s1" for a in network.asks) == 3 * len(shares()["s1"])
    assert sum(a.slave == "s0" for a in network.asks) == len(shares()["s0"])


def test_late_and_unasked_answers_change_nothing() -> None:
    transfer = push()
    asks = [a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest)]
    transfer.acked("s0", 999, True, 0.1)
    transfer.acked("nobody", asks[0].request, True, 0.1)
    assert not transfer.done
    transfer.missing("s0", asks[0].request, (), True, 0.1)
    transfer.missing("s0", asks[0].request, (), True, 0.1)
    moved = [c for c, moved in zip(transfer.chunks, transfer.columns.chunks.moved, strict=True) if moved]
    assert moved == sorted(shares()["s0"])


def test_only_wanted_chunks_may_land() -> None:
    transfer = pull()
    ask = next(a for a in transfer.actions(0.0) if isinstance(a, SlaveRequest))
    assert transfer.wants(ask.slave, ask.request) == ask.chunk
    assert transfer.wants(ask.slave, 999) is None
    assert transfer.wants("nobody", ask.request) is None


def test_no_progress_ends_a_transfer_with_the_last_reason() -> None:
    transfer = push(TransferSettings(CHUNK, 3, 2.0, 5.0))
    network = Network(transfer)
    network.refuse = lambda ask, now_s: Refusal(RefusalCode.MEMORY, "no room")
    network.run()
    assert transfer.failure == "no progress for 5 s: slave s0 refuses: no room" or "s1" in transfer.failure
    assert 5.0 <= network.now_s < 6.0


WHY = "slave s0 does not know this key"


@pytest.fixture(params=[push, pull])
def transfer(request: pytest.FixtureRequest) -> Transfer:
    made: Transfer = request.param()
    return made


def asked(transfer: Transfer, now_s: float) -> tuple[list[str], list[str]]:
    actions = transfer.actions(now_s)
    again = [action.slave for action in actions if isinstance(action, Reconnect)]
    return again, sorted({action.slave for action in actions if isinstance(action, SlaveRequest)})


def test_what_was_asked_is_asked_again_over_a_new_connection_and_other_slaves_go_on(transfer: Transfer) -> None:
    assert asked(transfer, 0.0) == ([], ["s0", "s1"])
    n_in_flight = transfer.columns.flow.windows.n_in_flight
    of_s1 = n_in_flight[1]
    transfer.turned_away("s0", WHY, 0.1)
    assert (n_in_flight[0], n_in_flight[1]) == (0, of_s1)
    assert of_s1
    pause_s = transfer.next_deadline_s() - 0.1
    assert 0 < pause_s < 0.1
    again, asks = asked(transfer, 0.1)
    assert (again, "s0" in asks) == ([], False)
    again, asks = asked(transfer, 0.1 + pause_s)
    assert (again, "s0" in asks) == (["s0"], True)
    assert asked(transfer, 0.1 + pause_s)[0] == [], "once for each time"


def test_pauses_grow_and_after_a_second_the_master_is_asked(transfer: Transfer) -> None:
    now_s, times = 0.0, []
    while not transfer.failure:
        transfer.actions(now_s)
        transfer.turned_away("s0", WHY, now_s)
        times.append(now_s)
        assert now_s <= 3 * TURNED_AWAY_S
        now_s = max(transfer.next_deadline_s(), transfer.columns.lanes.resume_at_s[0])
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert TURNED_AWAY_S <= times[-1] <= 3 * TURNED_AWAY_S
    assert transfer.failure == WHY


def test_an_answer_ends_the_count(transfer: Transfer) -> None:
    asked(transfer, 0.0)
    transfer.turned_away("s0", WHY, 0.1)
    again_s = transfer.next_deadline_s()
    request = next(a.request for a in transfer.actions(again_s) if isinstance(a, SlaveRequest) and a.slave == "s0")
    transfer.refused("s0", request, Refusal(RefusalCode.BUSY, "starting", 0.1), again_s)
    transfer.turned_away("s0", WHY, again_s + 2 * TURNED_AWAY_S)
    assert not transfer.failure
