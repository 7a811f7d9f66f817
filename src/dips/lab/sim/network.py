"""Simulates the network: delays, loss, doubles, late and reordered messages, streams that break, partitions.

Three kinds of traffic, as in the real system: calls (a request, a reply, a deadline), streams (in order, whole, until
they break) and datagrams (anything may happen to each). It does not interpret messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dips.lab.sim.kernel import Action, Kernel, SimulatedProcess

# ---- links -----------------------------------------------------------------------------------------------------------
#
# Models links with rates: how long a datagram of some size takes, and which ones wait.
#
# Each named process may have an up and a down rate. A datagram leaves its sender's up link and enters its receiver's
# down link; each link carries one datagram at a time, first come, first served. Cut-through: the receiving link begins
# with the first bit that arrives, so one datagram alone takes its size over the slower of the two rates, plus the
# delay. A fast receiver is not kept busy by a slow sender: it is occupied only for the size over its own rate.
#
# It uses no randomness and does not interpret messages.


@dataclass(frozen=True)
class ProcessRates:
    """Rates of one process, in bits/s; infinite: no limit."""

    up_bits_per_s: float = math.inf
    down_bits_per_s: float = math.inf


NO_LIMIT = ProcessRates()


@dataclass(frozen=True)
class LinkPlan:
    """The rates of a run, by the name of the process."""

    rates: Mapping[str, ProcessRates]
    wire_factor: float = 1.0  # what a datagram's size is multiplied with, when a small model represents a large one


class LinkOccupancy:
    """Until when each link is occupied."""

    def __init__(self, kernel: Kernel, plan: LinkPlan) -> None:
        self._kernel = kernel
        self._rates = dict(plan.rates)
        self._wire_factor = plan.wire_factor
        self._up_free_s: dict[str, float] = {}
        self._down_free_s: dict[str, float] = {}
        self._broken: dict[str, int] = {}
        self.sent_bytes: dict[tuple[str, str], int] = {}
        """By (source, target), what has left the source or waits for its link."""

    def lose(self, name: str) -> None:
        """Lose what is on this process's links now."""
        self._broken[name] = self._broken.get(name, 0) + 1
        self._up_free_s[name] = self._down_free_s[name] = self._kernel.now_s

    def change(self, name: str, rates: ProcessRates) -> None:
        """Set a process's rates from now on; datagrams already on its links keep their times."""
        self._rates[name] = rates

    def carry(
        self, source: str, target: str, size_bytes: int, delay_s: float, process: SimulatedProcess | None, action:
        Action, *args: Any,
    ) -> None:  # fmt: skip
        """Do `action` in this incarnation of `process` when the last bit has arrived. delay_s: the link's delay."""
        now_s, bits = self._kernel.now_s, 8.0 * size_bytes * self._wire_factor
        begins_s = max(now_s, self._up_free_s.get(source, 0.0))
        sent_s = begins_s + bits / self._rates.get(source, NO_LIMIT).up_bits_per_s
        self._up_free_s[source] = sent_s
        self.sent_bytes[source, target] = self.sent_bytes.get((source, target), 0) + size_bytes
        arrival = (source, target, self._breaks(source, target), bits, sent_s + delay_s, process, action, args)
        self._kernel.after(begins_s - now_s + delay_s, process, self._arrives, *arrival)

    def _arrives(
        self, source: str, target: str, breaks: int, bits: float, last_bit_s: float, process: SimulatedProcess | None,
        action: Action, args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """The first bit has reached the receiver."""
        if breaks != self._breaks(source, target):
            return
        begins_s = max(self._kernel.now_s, self._down_free_s.get(target, 0.0))
        ends_s = begins_s + bits / self._rates.get(target, NO_LIMIT).down_bits_per_s
        self._down_free_s[target] = ends_s
        self._kernel.at(max(ends_s, last_bit_s), process, self._arrived, source, target, breaks, action, args)

    def _arrived(self, source: str, target: str, breaks: int, action: Action, args: tuple[Any, ...]) -> None:
        """The last bit has reached the receiver."""
        if breaks == self._breaks(source, target):
            action(*args)

    def _breaks(self, source: str, target: str) -> int:
        return self._broken.get(source, 0) + self._broken.get(target, 0)


@dataclass(frozen=True)
class _Datagram:
    """One that waits for its sender's link."""

    target: str
    breaks: int
    bits: float
    delay_s: float
    process: SimulatedProcess | None
    action: Action
    args: tuple[Any, ...]


class SharedLinks(LinkOccupancy):
    """Receivers take turns on their sender's link, a datagram each, as TCP's connections share one about equally."""

    def __init__(self, kernel: Kernel, plan: LinkPlan) -> None:
        super().__init__(kernel, plan)
        self._queues: dict[str, deque[deque[_Datagram]]] = {}
        """By sender: what waits for its link, for each receiver, in the order of their turns."""

    def lose(self, name: str) -> None:
        super().lose(name)
        self._queues.pop(name, None)

    def carry(
        self, source: str, target: str, size_bytes: int, delay_s: float, process: SimulatedProcess | None, action:
        Action, *args: Any,
    ) -> None:  # fmt: skip
        bits = 8.0 * size_bytes * self._wire_factor
        self.sent_bytes[source, target] = self.sent_bytes.get((source, target), 0) + size_bytes
        datagram = _Datagram(target, self._breaks(source, target), bits, delay_s, process, action, args)
        queues = self._queues.setdefault(source, deque())
        mine = next((queue for queue in queues if queue[0].target == target), None)
        if mine is not None:
            mine.append(datagram)
            return
        queues.append(deque([datagram]))
        if len(queues) == 1:
            self._next(source, queues)

    def _next(self, source: str, queues: deque[deque[_Datagram]]) -> None:
        """Begin to send the first datagram of the receiver whose turn it is."""
        if not queues or self._queues.get(source) is not queues:
            return  # the link was lost meanwhile
        datagram, now_s = queues[0][0], self._kernel.now_s
        begins_s = max(now_s, self._up_free_s.get(source, 0.0))
        sent_s = begins_s + datagram.bits / self._rates.get(source, NO_LIMIT).up_bits_per_s
        self._up_free_s[source] = sent_s
        arrival = (
            source, datagram.target, datagram.breaks, datagram.bits, sent_s + datagram.delay_s, datagram.process,
            datagram.action, datagram.args,
        )  # fmt: skip
        self._kernel.at(begins_s + datagram.delay_s, datagram.process, self._arrives, *arrival)
        self._kernel.at(sent_s, None, self._sent, source, queues)

    def _sent(self, source: str, queues: deque[deque[_Datagram]]) -> None:
        """The last bit has left: the next receiver's turn."""
        if self._queues.get(source) is not queues:
            return
        mine = queues.popleft()
        mine.popleft()
        if mine:
            queues.append(mine)
        self._next(source, queues)


def all_reduce_s(
    n_bytes: float, up_bits_per_s: Sequence[float], down_bits_per_s: Sequence[float], latency_s: float
) -> float:
    """Seconds of a ring all-reduce of `n_bytes` among K clusters without servers; 0 for one cluster.

    Each of the ring's 2 (K-1) steps moves n_bytes / K from every cluster to the next one, so every link carries
    2 (K-1) / K n_bytes, and the slowest one sets the pace (Patarasu and Yuan 2009; the Di-PS paper, section 3.1: "The
    communication performance of AllReduce is bottlenecked by the slowest network link"). Rates: cluster by cluster; 0
    means no limit.
    """
    k = len(up_bits_per_s)
    if k < 2:
        return 0.0
    slowest = min((rate for rate in (*up_bits_per_s, *down_bits_per_s) if rate > 0), default=math.inf)
    return 2 * (k - 1) * (8.0 * n_bytes / k / slowest + latency_s)


# ---- network ---------------------------------------------------------------------------------------------------------


KEEPALIVE_S = 20.0
"""How long a stream may be silent one way before both ends give it up (core/net/grpc_calls.py: ten seconds to ask,
ten to answer)."""


@dataclass
class Weather:
    """Probabilities and times on every link; faults change them for a while. Times in seconds."""

    delay_s: float = 0.004
    loss: float = 0.0
    """Probability that a datagram is lost."""

    doubled: float = 0.0
    late: float = 0.0
    """Probability that a datagram comes up to `late_s` later, so after others that were sent after it."""

    late_s: float = 1.0
    damaged: float = 0.0
    request_lost: float = 0.0
    reply_lost: float = 0.0
    reply_late: float = 0.0


@dataclass
class Network:
    """The network of a run."""

    kernel: Kernel
    fired: Callable[[str], None]  # counts of faults that really happened
    weather: Weather = field(default_factory=Weather)
    links: LinkOccupancy | None = None  # limits datagrams with a size; None: no limit
    cut: set[tuple[str, str]] = field(default_factory=set)
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)

    # ---- links ----

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut

    def cut_off(self, pairs: list[tuple[str, str]]) -> None:
        self.cut.update(pairs)
        for stream in list(self.streams):
            stream.check()

    def mend(self, pairs: list[tuple[str, str]]) -> None:
        self.cut.difference_update(pairs)
        for stream in list(self.streams):
            stream.check()

    def mend_all(self) -> None:
        self.weather = Weather(self.weather.delay_s)
        self.slow.clear()
        self.mend(sorted(self.cut))

    def delay_s(self, source: str, target: str) -> float:
        return self.kernel.jitter(self.weather.delay_s) * self.slow.get((source, target), 1.0)

    # ---- datagrams ----

    def datagram(
        self,
        source: str,
        target: str,
        process: SimulatedProcess | None,
        action: Action,
        *args: Any,
        size_bytes: int = 0,
    ) -> None:
        """Deliver a datagram: do `action` at the other side, perhaps not, perhaps twice; `process` limits it to one
        incarnation.

        size_bytes: its size for the links' rates; 0 for one that is too small to matter.
        """
        if self.is_cut(source, target):
            return
        rng, weather = self.kernel.rng, self.weather
        if weather.loss and rng.random() < weather.loss:
            self.fired("lost_chunks")
            return
        copies = 1
        if weather.doubled and rng.random() < weather.doubled:
            self.fired("doubled_chunks")
            copies = 2
        for _ in range(copies):
            delay_s = self.delay_s(source, target)
            if weather.late and rng.random() < weather.late:
                self.fired("reordered_chunks")
                delay_s += rng.random() * weather.late_s
            if self.links is not None and size_bytes:
                self.links.carry(source, target, size_bytes, delay_s, process, action, *args)
            else:
                self.kernel.after(delay_s, process, action, *args)

    def damages(self) -> bool:
        """Whether the present chunk arrives with a flipped bit."""
        if self.weather.damaged and self.kernel.rng.random() < self.weather.damaged:
            self.fired("damaged_chunks")
            return True
        return False

    # ---- halves of calls ----

    def request(self, source: str, target: str, process: SimulatedProcess, action: Action, *args: Any) -> None:
        weather = self.weather
        if self.is_cut(source, target):
            return
        if weather.request_lost and self.kernel.rng.random() < weather.request_lost:
            self.fired("lost_requests")
            return
        self.kernel.after(self.delay_s(source, target), process, action, *args)

    def reply(self, source: str, target: str, process: SimulatedProcess, action: Action, *args: Any) -> None:
        rng, weather = self.kernel.rng, self.weather
        if self.is_cut(source, target):
            return
        if weather.reply_lost and rng.random() < weather.reply_lost:
            self.fired("lost_replies")
            return
        delay_s = self.delay_s(source, target)
        if weather.reply_late and rng.random() < weather.reply_late:
            self.fired("late_replies")
            delay_s += rng.random() * 8.0
        self.kernel.after(delay_s, process, action, *args)


@dataclass
class End:
    """One end of a stream: its process, and its callbacks."""

    name: str
    process: SimulatedProcess
    hear: Callable[[Any], None]
    down: Callable[[Any], None]
    """Called once, with the refusal of the other end, or None."""

    arrives_s: float = 0.0
    waiting: list[Any] = field(default_factory=list)
    open: bool = True


class Stream:
    """A TCP stream between two processes. What is sent while a direction is cut waits; a cut that lasts breaks it."""

    def __init__(self, network: Network, a: End, b: End) -> None:
        self._network = network
        self._ends = (a, b)
        self._cut_since_s: float | None = None
        network.streams.append(self)
        self.check()

    def send(self, source: End, message: Any) -> None:
        target = self._other(source)
        if not source.open:
            return
        if target.waiting or self._network.is_cut(source.name, target.name):
            target.waiting.append(message)
            return
        self._deliver(source, target, target.hear, message)

    def close(self, source: End, refusal: Any = None) -> None:
        """Close this end, as the system does where its process has ended; the other one learns it, if it can be
        reached."""
        if not source.open:
            return
        source.open = False
        target = self._other(source)
        if target.open and not self._network.is_cut(source.name, target.name):
            self._deliver(source, target, lambda why: self._hung_up(target, why), refusal)
        self._forget_if_over()

    def break_now(self) -> None:
        """Reset the stream: both ends learn it; messages under way are lost."""
        for end in self._ends:
            self._network.kernel.after(0.001, end.process, self._hung_up, end, None)

    def check(self) -> None:
        """The links changed: waiting messages go on, or the stream begins to break."""
        a, b = self._ends
        stopped = self._network.is_cut(a.name, b.name) or self._network.is_cut(b.name, a.name)
        if not stopped:
            self._cut_since_s = None
            for source, target in ((a, b), (b, a)):
                waiting, target.waiting = target.waiting, []
                for message in waiting:
                    self._deliver(source, target, target.hear, message)
                if not source.open and target.open:
                    self._deliver(source, target, partial(self._hung_up, target), None)
        elif self._cut_since_s is None:
            self._cut_since_s = self._network.kernel.now_s
            self._network.kernel.after(KEEPALIVE_S, None, self._give_up, self._cut_since_s)

    def _give_up(self, since_s: float) -> None:
        if self._cut_since_s == since_s:
            for end in self._ends:
                end.waiting.clear()
                self._network.kernel.after(0.0, end.process, self._hung_up, end, None)

    def _deliver(self, source: End, target: End, action: Callable[[Any], None], message: Any) -> None:
        kernel = self._network.kernel
        arrives_s = kernel.now_s + self._network.delay_s(source.name, target.name)
        target.arrives_s = max(arrives_s, target.arrives_s + 1e-6)
        kernel.at(target.arrives_s, target.process, self._arrived, target, action, message)

    def _arrived(self, target: End, action: Callable[[Any], None], message: Any) -> None:
        if target.open:
            action(message)

    def _hung_up(self, end: End, refusal: Any) -> None:
        if end.open:
            end.open = False
            end.down(refusal)
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if not any(end.open and end.process.alive for end in self._ends) and self in self._network.streams:
            self._network.streams.remove(self)

    def _other(self, end: End) -> End:
        a, b = self._ends
        return b if end is a else a
