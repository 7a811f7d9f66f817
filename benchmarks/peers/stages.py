"""Cuts a round of Di-PS into stages, with the wall time and the processor time of each.

The cuts are the steps of the round's slowest cluster, as the run's own tapes tell them, so the stages of a round add up
to its whole time. Processor time is that of all processes between two cuts: while the slowest cluster waits for the
others, they may still send. Times are of CLOCK_MONOTONIC, in seconds.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SAMPLE_S = 0.004
"""Between two readings of the processes' clocks; one takes some 20 microseconds."""

Event = Mapping[str, Any]
Cut = tuple[str, float]
"""A stage, and when it ended."""

COPY_OUT, BEGIN_PUSH, SEND, FINISH_PUSH = "copy out of the model", "begin push (call)", "send", "finish push (call)"
OTHERS, MEASURE, JUDGE = "wait for the other clusters", "measure", "measure (calls), judge"
OUTER_STEP, PREPARED = "outer step", "outer step (calls)"
COMMIT, VERDICT = "commit and publish (calls)", "verdict (call)"
BEGIN_PULL, FETCH, INSTALL, REST = "begin pull (call)", "fetch", "install into the model", "back in the loop"
NAMES = (
    COPY_OUT, BEGIN_PUSH, SEND, FINISH_PUSH, OTHERS, MEASURE, JUDGE, OUTER_STEP, PREPARED, COMMIT, VERDICT, BEGIN_PULL,
    FETCH, INSTALL, REST,
)  # fmt: skip


class NotOnTape(Exception):
    """A step of the round has no line; says which."""


@dataclass(frozen=True)
class Stage:
    """cpu_s: of the processes of each kind, meanwhile."""

    name: str
    wall_s: float
    cpu_s: Mapping[str, float]


def cuts_of(cluster: str, began_s: float, ended_s: float, events: Iterable[Event]) -> list[Cut]:
    """The steps of one cluster's round between these times, from the tapes of all processes. Raises NotOnTape."""
    inside = [event for event in events if began_s <= event["monotonic_s"] <= ended_s]

    def line(kind: str, role: str, **fields: str) -> Event:
        who = {"role": role, "kind": kind} | ({"name": cluster} if role == "worker" else {}) | fields
        for event in inside:
            if all(event[key] == value for key, value in who.items()):
                return event
        raise NotOnTape(f"no {role} wrote {who} between {began_s:.3f} and {ended_s:.3f}")

    def longest_s(kind: str) -> float:
        """Of a job that the slaves do at the same time; 0 where it was not needed."""
        lines = (event for event in inside if (event["role"], event["kind"]) == ("slave", kind))
        return max((event["took_s"] for event in lines), default=0.0)

    begun, sent = line("push_begun", "worker"), line("push_sent", "worker")
    verdict, installed = line("verdict", "worker"), line("installed", "worker")
    measure_s = line("round", "master", phase="MEASURE")["monotonic_s"]
    prepare_s = line("round", "master", phase="PREPARE")["monotonic_s"]
    fetched_s = verdict["monotonic_s"] + installed["pull_s"]
    ends: dict[str, float] = {
        COPY_OUT: begun["monotonic_s"],
        BEGIN_PUSH: sent["monotonic_s"] - sent["transfer_s"],
        SEND: sent["monotonic_s"],
        FINISH_PUSH: line("admitted", "master", push=sent["push"])["monotonic_s"],
        OTHERS: measure_s,
        MEASURE: measure_s + longest_s("measured"),
        JUDGE: prepare_s,
        OUTER_STEP: prepare_s + longest_s("prepared"),
        PREPARED: line("round", "master", input="all prepared")["monotonic_s"],
        COMMIT: line("publish", "master")["monotonic_s"],
        VERDICT: verdict["monotonic_s"],
        BEGIN_PULL: fetched_s - installed["transfer_s"],
        FETCH: fetched_s,
        INSTALL: installed["monotonic_s"],
        REST: ended_s,
    }
    return [(name, ends[name]) for name in NAMES]


def stages_of(began_s: float, cuts: Sequence[Cut], clocks: Shares) -> list[Stage]:
    """What lies between the cuts. A cut before the one before it (two processes' lines) makes an empty stage."""
    stages = []
    for name, ended_s in cuts:
        ended_s = max(began_s, ended_s)
        stages.append(Stage(name, ended_s - began_s, clocks.between(began_s, ended_s)))
        began_s = ended_s
    return stages


def mean(rounds: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Stage by stage over several rounds, which have the same ones."""
    return [
        Stage(
            together[0].name,
            sum(stage.wall_s for stage in together) / len(together),
            {kind: sum(stage.cpu_s[kind] for stage in together) / len(together) for kind in together[0].cpu_s},
        )
        for together in zip(*rounds, strict=True)
    ]


class Shares(Protocol):
    """Says how processor time was spent."""

    def between(self, began_s: float, ended_s: float) -> Mapping[str, float]: ...


class Clocks:
    """Reads processor clocks of kinds of processes at short intervals, on a thread, while the block runs.

    read: processor seconds so far, by kind; the same kinds at each call.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read
        self.times_s: list[float] = []
        """When the clocks were read."""
        self._readings: list[Mapping[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-clocks")

    def __enter__(self) -> Clocks:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    def between(self, began_s: float, ended_s: float) -> dict[str, float]:
        """Processor seconds by kind between two times, which the block spans."""
        began, ended = self._at(began_s), self._at(ended_s)
        return {kind: ended[kind] - began[kind] for kind in ended}

    def total(self) -> dict[str, float]:
        """Processor seconds by kind of the whole block, which has ended."""
        return self.between(self.times_s[0], self.times_s[-1])

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._take()

    def _take(self) -> None:
        self.times_s.append(time.monotonic())
        self._readings.append(self._read())

    def _at(self, when_s: float) -> Mapping[str, float]:
        """Between two readings the clocks are taken to run evenly."""
        after = min(max(1, bisect.bisect_left(self.times_s, when_s)), len(self.times_s) - 1)
        early_s, late_s = self.times_s[after - 1], self.times_s[after]
        share = min(1.0, max(0.0, (when_s - early_s) / (late_s - early_s)))
        early, late = self._readings[after - 1], self._readings[after]
        return {kind: early[kind] + share * (late[kind] - early[kind]) for kind in late}
