"""Which faults are drawn, and which files of tests may execute them."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from mutants import record
from mutants.faults import Fault


def one_of_each_line(faults: Iterable[Fault], seed: str) -> list[Fault]:
    """In an order that the seed gives."""
    chosen = random.Random(seed)
    return [chosen.choice(line) for line in _groups(faults, lambda fault: (fault.path, fault.line), chosen)]


def evenly(faults: Iterable[Fault], seed: int) -> list[Fault]:
    """One fault of each function, in an order that the seed gives, then a second one of each, and so on."""
    chosen = random.Random(seed)
    functions = _groups(faults, lambda fault: (fault.path, fault.function), chosen)
    turns = zip_longest(*(chosen.sample(function, len(function)) for function in functions))
    return [fault for turn in turns for fault in turn if fault is not None]


def _groups(faults: Iterable[Fault], key: Callable[[Fault], Any], chosen: random.Random) -> list[list[Fault]]:
    groups: dict[Any, list[Fault]] = defaultdict(list)
    for fault in faults:
        groups[key(fault)].append(fault)
    order = sorted(groups)
    chosen.shuffle(order)
    return [groups[name] for name in order]


def files_for(faults: Iterable[Fault]) -> list[str]:
    """Of the same package, or importing the module itself; those that come first matter most."""
    wanted = {(fault.area, record.module_of(fault.path)) for fault in faults}
    areas, names = {area for area, _ in wanted}, {name for _, name in wanted}

    def rank(file: str) -> int:
        own = any(record.belongs(file, area) for area in areas)
        direct = any(record.reaches(file, name) for name in names)
        return 0 if own and direct else 1 if direct else 2 if own else 3

    ranked = sorted(((rank(file), file) for file in record.test_files()), key=lambda pair: pair)
    return [file for place, file in ranked if place < 3]


@functools.cache
def _files_of_module(path: str) -> tuple[str, ...]:
    return tuple(files_for([Fault(path, 0, 0, "", 0, "", 0, 0, False)]))


def files_of(fault: Fault) -> tuple[str, ...]:
    """Those of files_for() of one fault."""
    return _files_of_module(fault.path)


def that_fit(
    faults: Sequence[Fault],
    most: float,
    room_s: float,
    seconds_of: Callable[[str], float],
    files_of: Callable[[Fault], Sequence[str]] = files_of,
) -> tuple[list[Fault], list[str]]:
    """The first `most` faults whose files of tests take room_s together, and all of these files, in the order of the
    faults. Whatever needs more files than there is room for is passed over, but for the first one."""
    drawn: list[Fault] = []
    files: dict[str, None] = {}
    left_s = room_s
    for fault in faults:
        more = [file for file in files_of(fault) if file not in files]
        more_s = sum(map(seconds_of, more))
        if len(drawn) < most and (not more or more_s <= left_s or not drawn):
            drawn.append(fault)
            files.update(dict.fromkeys(more))
            left_s -= more_s
    return drawn, list(files)


Recording = tuple[str, bool]
"""A file of tests, and whether its kernels are recorded as Python."""


class Recordings:
    """Which files of tests are recorded, and which faults wait until all of theirs are."""

    def __init__(
        self, there: Iterable[Recording], files_of: Callable[[Fault], Sequence[str]] = files_of
    ) -> None:  # fmt: skip
        self._there, self._begun = set(there), set[Recording]()
        self._waiting: list[tuple[set[Recording], Fault]] = []
        self._files_of = files_of

    def pop(self, queue: list[Fault]) -> Fault:
        """Takes the first of the faults that lack least: what is recorded is used before more is."""
        lacks = {(fault.path, fault.compiled): 0 for fault in queue}
        for fault in {(fault.path, fault.compiled): fault for fault in queue}.values():
            lacks[fault.path, fault.compiled] = len(self._lacking(fault))
        return queue.pop(min(range(len(queue)), key=lambda at: lacks[queue[at].path, queue[at].compiled]))

    def wait_for(self, fault: Fault) -> list[Recording]:
        """What must be begun for the fault, which done() returns when it is there; none: it can be tried at once."""
        lacking = self._lacking(fault)
        if lacking:
            self._waiting.append((lacking, fault))
        new = sorted(lacking - self._begun)
        self._begun.update(new)
        return new

    def is_ready(self, fault: Fault) -> bool:
        return not self._lacking(fault)

    def done(self, recording: Recording) -> list[Fault]:
        """The faults that lack nothing more now."""
        file, _ = recording
        self._there |= {recording, (file, False)}
        ready = [fault for lacking, fault in self._waiting if lacking <= self._there]
        self._waiting = [(lacking, fault) for lacking, fault in self._waiting if not lacking <= self._there]
        return ready

    def _lacking(self, fault: Fault) -> set[Recording]:
        return {(file, fault.compiled) for file in self._files_of(fault)} - self._there
