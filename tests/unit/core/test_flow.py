"""How much of a transfer is under way: windows, the budget, credits, and what they make of simulated links."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dips.core.net.flow import (
    BUDGET_BYTES,
    LEAST_CHUNKS,
    MOST_REQUESTS,
    NONE,
    START_CHUNKS,
    Flow,
    WindowRule,
    budget_left,
    flow_of,
    note_answered,
    note_done,
    note_lost,
    note_sent,
    slot_of,
    window_left,
)

CHUNK = 1 << 20
CAP = 64


arrays = False
"""Whether the columns of flows are arrays."""


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["lists", "arrays"])
def _columns(request: pytest.FixtureRequest) -> None:
    global arrays
    arrays = request.param


class FlowControl:
    """The columns of one transfer's flow control, with slaves and requests by the names that a test gives them."""

    def __init__(self, slaves: Iterable[str], cap: int = CAP) -> None:
        self._lane = {slave: lane for lane, slave in enumerate(slaves)}
        self.columns: Flow = flow_of(len(self._lane), CHUNK, cap, MOST_REQUESTS * len(self._lane), arrays=arrays)
        self._number: dict[tuple[str, int], int] = {}

    def may_send(self, slave: str) -> bool:
        return budget_left(self.columns) and window_left(self.columns, self._lane[slave])

    def sent(self, slave: str, request: int, n_bytes: int, now_s: float) -> None:
        slot = note_sent(self.columns, self._lane[slave], 0, n_bytes, now_s)
        self._number[slave, request] = self.columns.requests.request[slot]
        assert slot_of(self.columns, self._lane[slave], self._number[slave, request]) == slot

    def answered(self, slave: str, request: int, now_s: float, credit: int = 0) -> None:
        slot = slot_of(self.columns, self._lane[slave], self._number.get((slave, request), 999_999))
        if slot >= 0:
            note_answered(self.columns, slot, now_s, credit)

    def lost(self, slave: str) -> None:
        note_lost(self.columns, self._lane[slave])

    def done(self, slave: str) -> None:
        note_done(self.columns, self._lane[slave])

    def window_bytes(self, slave: str) -> float:
        return self.columns.windows.window_bytes[self._lane[slave]]

    @property
    def budget_bytes(self) -> float:
        return self.columns.rates[BUDGET_BYTES]


def control_of(*slaves: str, cap: int = CAP) -> FlowControl:
    return FlowControl(slaves, cap)


def fill(flow: FlowControl, slave: str, now_s: float = 0.0, first: int = 1, n_bytes: int = CHUNK) -> list[int]:
    requests: list[int] = []
    while flow.may_send(slave):
        requests.append(first + len(requests))
        flow.sent(slave, requests[-1], n_bytes, now_s)
    return requests


def test_before_anything_is_known_no_slave_gets_more_than_half_of_what_is_sent() -> None:
    flow = control_of("a", "b", "c")
    assert len(fill(flow, "a")) == START_CHUNKS / 2
    assert len(fill(flow, "b")) == START_CHUNKS / 2
    assert not flow.may_send("c")


def test_what_one_slave_does_not_take_is_for_another() -> None:
    flow = control_of("a", "b", "c")
    (first, *_), _ = fill(flow, "a"), fill(flow, "b", 0.0, 50)
    flow.answered("a", first, 0.1, credit=2)
    assert not flow.may_send("a")
    assert fill(flow, "c", 0.1, 100) == [100]


def test_a_cap_and_a_credit_bound_a_window() -> None:
    assert len(fill(control_of("a", cap=3), "a")) == 3
    flow = control_of("a")
    flow.sent("a", 0, 0, 0.0)
    flow.answered("a", 0, 0.0, credit=5)
    assert len(fill(flow, "a")) == 5
    flow.answered("a", 5, 0.1)
    assert flow.window_bytes("a") == 5 * CHUNK, "silence about credit takes nothing back"


def test_small_chunks_are_bounded_by_their_number() -> None:
    assert len(fill(control_of("a"), "a", n_bytes=100)) == MOST_REQUESTS


def test_questions_take_no_room_but_tell_the_round_trip() -> None:
    flow = control_of("a")
    flow.sent("a", 1, 0, 0.0)
    flow.answered("a", 1, 0.05)
    assert len(fill(flow, "a", 1.0)) == START_CHUNKS


def test_windows_follow_rate_times_round_trip() -> None:
    """One chunk is answered each 10 ms, 100 ms after it was sent: 10 are on their way."""
    flow = control_of("a")
    for request in range(1, 200):
        flow.sent("a", request, CHUNK, 0.01 * request)
        if request > 10:
            flow.answered("a", request - 10, 0.01 * request)
    assert flow.window_bytes("a") == pytest.approx(44 * CHUNK), "11 came in the time of one of them, there and back"
    assert flow.budget_bytes == pytest.approx(22 * CHUNK)


def test_a_slave_without_delay_keeps_the_least() -> None:
    flow = control_of(*"abcdefgh")
    for request in range(1, 50):
        flow.sent("a", request, CHUNK, 0.001 * request)
        flow.answered("a", request, 0.001 * request + 0.0005)
    assert flow.window_bytes("a") == LEAST_CHUNKS * CHUNK
    assert flow.budget_bytes == START_CHUNKS * CHUNK


def test_the_last_slave_gets_what_the_others_need_no_more() -> None:
    flow = control_of("a", "b", "c", "d")
    for number in range(1, 2 * LEAST_CHUNKS):
        for slave in "abcd":
            flow.sent(slave, number, CHUNK, 0.01 * number)
            flow.answered(slave, number, 0.01 * number + 0.001)
    assert flow.window_bytes("d") == START_CHUNKS / 4 * CHUNK
    for slave in "abc":
        flow.done(slave)
    assert flow.window_bytes("d") == START_CHUNKS * CHUNK


def test_what_is_lost_counts_no_more_and_its_late_answer_neither() -> None:
    flow = control_of("a", "b", "c")
    requests = fill(flow, "a")
    fill(flow, "b", 0.0, 50)
    flow.lost("a")
    assert flow.may_send("c")
    flow.answered("a", requests[0], 5.0)
    assert len(fill(flow, "a", 5.0, 1000)) == START_CHUNKS / 2


def test_a_number_whose_slot_is_still_taken_is_never_sent() -> None:
    flow = flow_of(2, CHUNK, CAP, 2, arrays=arrays)
    n_slots = len(flow.requests.request)
    old, numbers = note_sent(flow, 0, 7, CHUNK, 0.0), []
    for _ in range(3 * n_slots):
        slot = note_sent(flow, 1, 8, CHUNK, 0.0)
        numbers.append(int(flow.requests.request[slot]))
        assert slot_of(flow, 1, numbers[-1]) == slot != old
        assert slot_of(flow, 0, numbers[-1]) == NONE, "it was sent to another slave"
        note_answered(flow, slot, 0.1, 0)
        assert slot_of(flow, 1, numbers[-1]) == NONE, "it is answered"
    assert numbers == sorted(set(numbers))
    assert {number % n_slots for number in numbers} == set(range(n_slots)) - {1 % n_slots}
    assert slot_of(flow, 0, 1) == old
    for never in (0, -1, 1 + n_slots, 2**63 - 1, -(2**63)):
        assert slot_of(flow, 0, never) == NONE


def test_the_rules_that_comparisons_use() -> None:
    equal, one_by_one = (
        flow_of(2, CHUNK, 40, 100, rule=rule, arrays=arrays) for rule in (WindowRule.EQUAL, WindowRule.ONE_BY_ONE)
    )
    for _ in range(40):
        for lane in (0, 1):
            assert budget_left(equal)
            assert window_left(equal, lane)
            note_sent(equal, lane, 0, CHUNK, 0.0)
    assert not window_left(equal, 0)
    assert window_left(one_by_one, 0)
    assert not window_left(one_by_one, 1)
    note_done(one_by_one, 0)
    assert window_left(one_by_one, 1)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["send", "answer", "lost", "done"]))))
def test_whatever_happens_counts_stay_true(steps: list[tuple[str, str]]) -> None:
    """Once all is answered, lost or done, both slaves may be sent to again."""
    flow, open_requests, number = control_of("a", "b"), {"a": list[int](), "b": list[int]()}, 0
    for at, (slave, step) in enumerate(steps):
        mine = open_requests[slave]
        if step == "send" and flow.may_send(slave):
            number += 1
            flow.sent(slave, number, CHUNK, float(at))
            mine.append(number)
        elif step == "answer" and mine:
            flow.answered(slave, mine.pop(), at + 0.5)
        elif step in ("lost", "done"):
            (flow.lost if step == "lost" else flow.done)(slave)
            mine.clear()
    for slave, mine in open_requests.items():
        for request in mine:
            flow.answered(slave, request, 1e6)
    assert flow.may_send("a")
    assert flow.may_send("b")
    assert len(fill(flow, "a", 1e6, 10_000)) + len(fill(flow, "b", 1e6, 20_000)) >= START_CHUNKS


@dataclass
class Road:
    """This side's uplink and each slave's link, first come first served, with a delay each way; times in seconds."""

    uplink_bits_per_s: float
    slave_bits_per_s: dict[str, float]
    delay_s: float
    free_s: dict[str, float] = field(default_factory=dict)

    def carry(self, slave: str, n_bytes: int, now_s: float) -> float:
        left_s = self._pass("up", n_bytes, now_s, self.uplink_bits_per_s)
        there_s = self._pass(slave, n_bytes, left_s + self.delay_s, self.slave_bits_per_s[slave])
        return there_s + self.delay_s

    def _pass(self, link: str, n_bytes: int, from_s: float, bits_per_s: float) -> float:
        self.free_s[link] = max(from_s, self.free_s.get(link, 0.0)) + 8 * n_bytes / bits_per_s
        return self.free_s[link]


def transfer_s(road: Road, chunks_of: dict[str, int], cap: int = CAP) -> tuple[float, dict[str, float]]:
    """Seconds for so many chunks of each slave, and when each slave had its own."""
    flow = FlowControl(chunks_of, cap)
    left, now_s, number = dict(chunks_of), 0.0, 0
    under_way: list[tuple[float, str, int]] = []
    done_s: dict[str, float] = {}
    waiting = dict.fromkeys(chunks_of, 0)
    while len(done_s) < len(chunks_of):
        for slave in chunks_of:
            while left[slave] and flow.may_send(slave):
                number += 1
                left[slave] -= 1
                waiting[slave] += 1
                flow.sent(slave, number, CHUNK, now_s)
                heapq.heappush(under_way, (road.carry(slave, CHUNK, now_s), slave, number))
        now_s, slave, request = heapq.heappop(under_way)
        flow.answered(slave, request, now_s)
        waiting[slave] -= 1
        if not left[slave] and not waiting[slave]:
            flow.done(slave)
            done_s[slave] = now_s
    return now_s, done_s


@pytest.mark.parametrize(
    ("gbit_per_s", "delay_ms", "chunks"), [(1, 25, 500), (0.1, 25, 100), (1, 0.1, 500), (4, 25, 2000)]
)
@pytest.mark.parametrize("n_slaves", [1, 4])
def test_one_push_fills_its_link(gbit_per_s: float, delay_ms: float, chunks: int, n_slaves: int) -> None:
    slaves = {f"s{i}": 10e9 for i in range(n_slaves)}
    road = Road(gbit_per_s * 1e9, slaves, delay_ms / 1e3)
    took_s, _ = transfer_s(road, dict.fromkeys(slaves, chunks // n_slaves))
    assert chunks * CHUNK * 8 / (gbit_per_s * 1e9) / took_s >= 0.9


def test_a_slow_slave_does_not_hold_up_the_others() -> None:
    """A tenth of the rate at the first slave: the three others are done in the time that they take without it."""
    road = Road(1e9, {"slow": 1e8, "a": 1e9, "b": 1e9, "c": 1e9}, 0.025)
    _, done_s = transfer_s(road, dict.fromkeys(road.slave_bits_per_s, 100))
    alone_s = 300 * CHUNK * 8 / 1e9
    assert max(done_s[slave] for slave in "abc") <= 1.2 * alone_s
    assert done_s["slow"] <= 1.1 * 100 * CHUNK * 8 / 1e8
