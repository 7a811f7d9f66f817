"""Links with rates: what a datagram takes, who waits for whom, and that without rates nothing changes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.lab.sim.kernel import MIN_STEP_S, Kernel, SimulatedProcess
from dips.lab.sim.network import LinkOccupancy, LinkPlan, Network, ProcessRates, SharedLinks, all_reduce_s

MBIT = 1e6
KB = 1000
"""8000 bits: 8 ms at 1 Mbit/s."""


class Wire:
    """A network under test and when each datagram arrived, by its name."""

    def __init__(
        self, rates: dict[str, ProcessRates] | None, wire_factor: float = 1.0, kind: type[LinkOccupancy] = LinkOccupancy
    ) -> None:
        self.kernel = Kernel(1)
        self.links = kind(self.kernel, LinkPlan(rates, wire_factor)) if rates is not None else None
        self.net = Network(self.kernel, lambda kind: None, links=self.links)
        self.net.weather.delay_s = 0.0
        self.arrived_s: dict[str, float] = {}
        self.process = SimulatedProcess(self.kernel, "anyone")
        self.process.begin_process()

    def send(self, name: str, source: str, target: str, size_bytes: int = KB) -> None:
        self.net.datagram(source, target, self.process, self._arrive, name, size_bytes=size_bytes)

    def _arrive(self, name: str) -> None:
        self.arrived_s[name] = self.kernel.now_s

    def run(self) -> dict[str, float]:
        while self.kernel.step():
            pass
        return self.arrived_s


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=20 * MIN_STEP_S)


@pytest.mark.parametrize(("up", "down"), [(1.0, 8.0), (8.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.inf, 1.0)])
def test_one_datagram_takes_its_size_over_the_slower_of_two_links(up: float, down: float) -> None:
    wire = Wire({"a": ProcessRates(up_bits_per_s=up * MBIT), "s": ProcessRates(down_bits_per_s=down * MBIT)})
    wire.send("one", "a", "s")
    assert wire.run() == {"one": near(0.008)}


def test_one_after_the_other_over_a_link_and_into_a_receiver() -> None:
    wire = Wire({"a": ProcessRates(up_bits_per_s=MBIT)})
    wire.send("first", "a", "s")
    wire.send("second", "a", "t", 2 * KB)
    assert wire.run() == {"first": near(0.008), "second": near(0.024)}
    wire = Wire({"s": ProcessRates(down_bits_per_s=MBIT)})
    for name in ("a", "b", "c"):
        wire.send(name, name, "s")
    assert sorted(wire.run().values()) == [near(0.008), near(0.016), near(0.024)]
    wire = Wire({"a": ProcessRates(up_bits_per_s=MBIT)}, wire_factor=1000.0)
    wire.send("large", "a", "s")
    assert wire.run() == {"large": near(8.0)}


def test_receivers_take_turns_on_a_shared_link() -> None:
    wire = Wire({"s": ProcessRates(up_bits_per_s=MBIT)}, kind=SharedLinks)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        wire.send(name, "s", name[0])
    assert wire.run() == {name: near(0.008 * turn) for turn, name in enumerate(("a1", "b1", "a2", "b2", "a3"), start=1)}
    wire.send("later", "s", "b")
    assert wire.run()["later"] == near(0.048), "the link was free"


def test_what_waits_for_a_shared_link_is_lost_with_it_and_a_new_link_is_free() -> None:
    wire = Wire({"s": ProcessRates(up_bits_per_s=MBIT)}, kind=SharedLinks)
    for name in ("first", "second"):
        wire.send(name, "s", "a")
    assert wire.links is not None
    wire.links.lose("s")
    wire.send("new", "s", "a")
    assert wire.run() == {"new": near(0.008)}


def test_what_is_lost_or_on_its_way() -> None:
    wire = Wire({"a": ProcessRates(up_bits_per_s=MBIT)})
    wire.net.weather.loss = 1.0
    wire.send("lost", "a", "s")
    wire.net.weather.loss = 0.0
    wire.send("kept", "a", "s")
    assert wire.run() == {"kept": near(0.008)}
    wire = Wire({"a": ProcessRates(up_bits_per_s=MBIT)})
    wire.send("chunk", "a", "s")
    wire.process.end_process()
    wire.process.begin_process()
    assert wire.run() == {}


def test_a_cut_loses_what_is_on_the_links_of_a_process_and_frees_them() -> None:
    wire = Wire({"a": ProcessRates(up_bits_per_s=MBIT), "b": ProcessRates(up_bits_per_s=MBIT)})
    for name in ("first", "second"):
        wire.send(name, "a", "s")
    wire.send("another's", "b", "s")
    assert wire.links is not None
    wire.kernel.after(0.01, None, wire.links.lose, "a")
    wire.kernel.after(0.011, None, wire.send, "later", "a", "s")
    assert wire.run() == {"first": near(0.008), "another's": near(0.008), "later": near(0.019)}
    assert wire.links.sent_bytes == {("a", "s"): 3 * KB, ("b", "s"): KB}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_transfer_in_pieces_takes_as_long_as_its_slower_link(kilobytes: list[int], up: float, down: float) -> None:
    """Nothing is lost to the cutting but the last piece's second link."""
    wire = Wire({"a": ProcessRates(up_bits_per_s=up * MBIT), "s": ProcessRates(down_bits_per_s=down * MBIT)})
    for n, size in enumerate(kilobytes):
        wire.send(str(n), "a", "s", size * KB)
    ended_s, total = max(wire.run().values()), sum(kilobytes) * 0.008
    slower, faster = min(up, down), max(up, down)
    assert total / slower - 1e-4 <= ended_s <= total / slower + max(kilobytes) * 0.008 / faster + 1e-3


def test_a_ring_carries_twice_all_but_one_part_at_its_slowest_links_pace() -> None:
    """4 clusters: 2 x 3 steps of a quarter of the bytes each."""
    assert all_reduce_s(1e9, (8e9,) * 4, (8e9,) * 4, 0.0) == pytest.approx(1.5)
    assert all_reduce_s(1e9, (8e9, 8e8), (8e9, 8e9), 0.0) == pytest.approx(10.0)
    assert all_reduce_s(1e9, (8e9, 8e9), (8e9, 8e8), 0.0) == pytest.approx(10.0)
