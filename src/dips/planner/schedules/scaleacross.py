"""DoraPP and interleaved ZBV: pipelines with many chunks on each device (ScaleAcross Explorer, section 2).

The paper draws both and prints neither, so these are built from its words. Both are list schedules: operations are
played with equal times, a device begins what its rule prefers as soon as the input is there, and the order that comes
out is the schedule. An order that was played can always end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dips.core.errors import ConfigError
from dips.planner.ir import Kind, Op, Schedule, loop

OPERATION = 4
"""Time of one operation while an order is played; a delay of 1 is a quarter of it."""


def zigzag(n_devices: int, chunks: int) -> tuple[int, ...]:
    """device_of_stage when chunks go to the last device, back to the first, and so on."""
    forth = tuple(range(n_devices))
    return tuple(device for chunk in range(chunks) for device in (forth if chunk % 2 == 0 else forth[::-1]))


def dora_pp(n_devices: int, n_microbatches: int, chunks: int, together: int) -> Schedule:
    """Chunks are dealt round-robin. A device runs a chunk for `together` microbatches one after another, then the
    next chunk. W follows its D at once: the message of D travels meanwhile.

    A device runs ahead by as many forward passes as interleaved 1F1B with groups of `together` microbatches.
    """
    together = _checked(n_devices, n_microbatches, chunks, together)
    return _played(
        "dora_pp",
        loop(n_devices, chunks),
        n_devices,
        n_microbatches,
        _Dora(n_devices, chunks, n_microbatches, together),
    )


def interleaved_zb_v(n_devices: int, n_microbatches: int, chunks: int, in_flight: int, delay: int = 0) -> Schedule:
    """Chunks go to the last device and back, so that no message goes from the last device to the first. D goes first,
    then F of the deepest chunk; W fills what would be idle, or frees memory for an F.

    in_flight: microbatches on their way at once. delay: of a message between devices, in quarters of an operation;
    the order is made for it, as zero-bubble schedules are.
    """
    in_flight = _checked(n_devices, n_microbatches, chunks, in_flight)
    rule = _ZbV(chunks * in_flight, in_flight)
    return _played("interleaved_zb_v", zigzag(n_devices, chunks), n_devices, n_microbatches, rule, delay)


def _checked(n_devices: int, n_microbatches: int, chunks: int, group: int) -> int:
    if min(n_devices, n_microbatches, chunks, group) < 1:
        raise ConfigError(
            f"{n_devices} devices, {n_microbatches} microbatches, {chunks} chunks, {group} at once: give 1 or more each"
        )
    return min(group, n_microbatches)


@dataclass
class _Ready:
    """What one device can begin: heaps of (stage, microbatch) in the order that its rule prefers."""

    number: int
    f: list[tuple[int, ...]] = field(default_factory=list)
    d: list[tuple[int, ...]] = field(default_factory=list)
    w: list[tuple[int, ...]] = field(default_factory=list)
    begun_f: int = 0
    ended_f: int = 0  # F whose memory is free again: their W has begun
    begun_d: int = 0
    busy: bool = False


class _Dora:
    """DoraPP's rule."""

    def __init__(self, n_devices: int, chunks: int, n_microbatches: int, together: int) -> None:
        self._together = together
        self._ahead = [(chunks - 1) * together + 2 * (n_devices - 1 - d) + 1 for d in range(n_devices)]
        # Forward passes of a device: groups of microbatches, each through all chunks.
        self._turns = [
            (chunk * n_devices, m)
            for first in range(0, n_microbatches, together)
            for chunk in range(chunks)
            for m in range(first, min(first + together, n_microbatches))
        ]

    def key(self, kind: Kind, stage: int, microbatch: int) -> tuple[int, ...]:
        return (microbatch // self._together, stage if kind is Kind.F else -stage, microbatch)

    def choose(self, device: _Ready, admitted: int) -> Kind | None:
        if device.w:
            return Kind.W
        if device.begun_f < len(self._turns) and device.begun_f - device.begun_d < self._ahead[device.number]:
            chunk, microbatch = self._turns[device.begun_f]
            if device.f and device.f[0][-2:] == (chunk + device.number, microbatch):
                return Kind.F
        return Kind.D if device.d else None


class _ZbV:
    """Interleaved ZBV's rule."""

    def __init__(self, most_held: int, in_flight: int) -> None:
        self._most_held, self._in_flight = most_held, in_flight

    def key(self, kind: Kind, stage: int, microbatch: int) -> tuple[int, ...]:
        return (-stage if kind is Kind.F else microbatch,)

    def choose(self, device: _Ready, admitted: int) -> Kind | None:
        if device.d:
            return Kind.D
        # Only a microbatch's first F can be held back: those further on would block others.
        if device.f and (device.f[0][-2] or admitted < self._in_flight):
            full = device.begun_f - device.ended_f >= self._most_held
            return Kind.W if full and device.w else Kind.F
        return Kind.W if device.w else None


def _played(
    name: str,
    places: Sequence[int],
    n_devices: int,
    n_microbatches: int,
    rule: _Dora | _ZbV,
    delay: int = 0,
) -> Schedule:
    last, admitted = len(places) - 1, 0
    devices = [_Ready(number) for number in range(n_devices)]
    orders: list[list[Op]] = [[] for _ in devices]
    heap: list[tuple[int, int, int, int]] = []  # (time, device << 2 | what, stage, microbatch)
    arrives_f, arrives_d, ends = 0, 1, 2

    def send(kind: int, stage: int, microbatch: int, at: int, source: int) -> None:
        lasts = delay if places[stage] != source else 0
        heappush(heap, (at + lasts, places[stage] << 2 | kind, stage, microbatch))

    for microbatch in range(n_microbatches):
        heappush(heap, (0, places[0] << 2 | arrives_f, 0, microbatch))
    while heap:
        now, touched = heap[0][0], set[int]()
        while heap and heap[0][0] == now:
            _, code, stage, microbatch = heappop(heap)
            device = devices[code >> 2]
            touched.add(device.number)
            if code & 3 == ends:
                device.busy = False
            else:
                kind = Kind.D if code & 3 == arrives_d else Kind.F
                ready = device.d if kind is Kind.D else device.f
                heappush(ready, (*rule.key(kind, stage, microbatch), stage, microbatch))
        if admitted < n_microbatches:
            touched.add(places[0])
        for number in sorted(touched):
            device = devices[number]
            chosen = None if device.busy else rule.choose(device, admitted)
            if chosen is None:
                continue
            ready = {Kind.F: device.f, Kind.D: device.d, Kind.W: device.w}[chosen]
            stage, microbatch = heappop(ready)[-2:]
            orders[number].append(Op(chosen, stage, microbatch))
            device.busy = True
            done = now + OPERATION
            heappush(heap, (done, number << 2 | ends, stage, microbatch))
            if chosen is Kind.F:
                device.begun_f += 1
                admitted += stage == 0
                if stage == last:
                    send(arrives_d, stage, microbatch, done, number)
                else:
                    send(arrives_f, stage + 1, microbatch, done, number)
            elif chosen is Kind.D:
                device.begun_d += 1
                heappush(device.w, (*rule.key(chosen, stage, microbatch), stage, microbatch))
                if stage:
                    send(arrives_d, stage - 1, microbatch, done, number)
                else:
                    admitted -= 1
            else:
                device.ended_f += 1
    return Schedule(name, tuple(places), n_microbatches, tuple(map(tuple, orders)))
