"""The simulator's own parts: time, processes, links, streams, disks. If these lie, every seed lies."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from dips.lab.sim.disks import LOST_DATA, LOST_NAMES, TORN_DATA, PowerLossError, SlaveDisk
from dips.lab.sim.kernel import Kernel, SimulatedProcess
from dips.lab.sim.network import KEEPALIVE_S, End, Network, Stream


def run(kernel: Kernel, until_s: float = 1e9) -> None:
    while kernel.next_s < until_s:
        kernel.step()


class TestTime:
    def test_a_killed_process_does_nothing_more(self) -> None:
        kernel = Kernel(0)
        seen: list[str] = []
        process = SimulatedProcess(kernel, "p")
        process.begin_process()
        kernel.at(1.0, process, seen.append, "of the first life")
        process.end_process()
        process.begin_process()
        kernel.at(2.0, process, seen.append, "of the second")
        run(kernel)
        assert seen == ["of the second"]

    def test_a_stopped_process_does_it_when_it_goes_on_in_the_same_order(self) -> None:
        kernel = Kernel(0)
        seen: list[tuple[str, float]] = []
        process = SimulatedProcess(kernel, "p")
        process.begin_process()
        for what in ("first", "second"):
            kernel.at(1.0, process, lambda what=what: seen.append((what, round(kernel.now_s, 3))))
        process.pause()
        kernel.at(5.0, None, process.resume)
        run(kernel)
        assert seen == [("first", 5.0), ("second", 5.0)]


class Pair:
    """Two processes and a stream between them; what each heard."""

    def __init__(self) -> None:
        self.kernel = Kernel(1)
        self.net = Network(self.kernel, lambda kind: None)
        self.heard: dict[str, list[Any]] = {"a": [], "b": []}
        self.down: list[str] = []
        self.a, self.b = self._end("a"), self._end("b")
        self.stream = Stream(self.net, self.a, self.b)

    def _end(self, name: str) -> End:
        process = SimulatedProcess(self.kernel, name)
        process.begin_process()
        return End(name, process, self.heard[name].append, lambda _: self.down.append(name))


class TestStreams:
    def test_what_is_sent_while_the_link_is_cut_arrives_after_it(self) -> None:
        pair = Pair()
        pair.net.cut_off([("a", "b")])
        pair.stream.send(pair.a, "late")
        pair.stream.send(pair.b, "the other way")
        run(pair.kernel, 1.0)
        assert pair.heard == {"a": ["the other way"], "b": []}
        pair.net.mend([("a", "b")])
        run(pair.kernel)
        assert pair.heard["b"] == ["late"]
        assert pair.down == []

    def test_a_cut_that_lasts_breaks_it_at_both_ends(self) -> None:
        pair = Pair()
        pair.net.cut_off([("a", "b")])
        pair.stream.send(pair.a, "lost")
        run(pair.kernel)
        assert pair.kernel.now_s >= KEEPALIVE_S
        assert sorted(pair.down) == ["a", "b"]
        assert pair.heard["b"] == []


class TestSlaveDisk:
    def test_what_was_synced_survives_a_crash_and_the_rest_may_not(self) -> None:
        survivors: set[tuple[bool | str, ...]] = set()
        for seed in range(40):
            disk = SlaveDisk("s")
            disk.create("kept", b"kept")
            disk.sync("kept")
            disk.sync_names()
            disk.create("new", b"new")
            assert disk.dirty
            lost = disk.crash(Random(seed))
            assert disk.open("kept").read() == b"kept"
            assert not disk.dirty
            survivors.add(("new" in disk.names(), *lost))
        assert survivors == {(True,), (True, LOST_DATA), (True, TORN_DATA), (False, LOST_NAMES)}

    def test_power_fails_only_when_something_is_not_synced_if_told_so(self) -> None:
        disk = SlaveDisk("s")
        disk.dies_dirty = 1
        disk.sync_names()
        disk.create("f", b"x")
        with pytest.raises(PowerLossError, match="power_loss_with_unsynced"):
            disk.sync("f")

    def test_an_unsynced_overwrite_may_be_torn(self) -> None:
        found = set()
        for seed in range(60):
            disk = SlaveDisk("s")
            disk.allocate("f", 8)
            disk.sync_names()
            disk.overwrite("f", 0, memoryview(b"AAAABBBB"))
            disk.crash(Random(seed))
            found.add(disk.open("f").read())
        assert {b"\0" * 8, b"AAAABBBB"} < found
