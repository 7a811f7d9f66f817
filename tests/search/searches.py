"""Lists the searches by name, with their bounds and sizes (docs/simulation.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing import get_context

from search.bounds import MESSAGES_AND_CRASHES, Bounds
from search.explore import Result, Search


class Size(Enum):
    """The size of a search. SHORT: seconds, part of the tests. MIDDLE: with the short ones within two minutes. LONG: on
    demand."""

    SHORT = "short"
    MIDDLE = "middle"
    LONG = "long"


@dataclass(frozen=True)
class Named:
    """One search."""

    name: str
    words: str
    bounds: Bounds
    size: Size = Size.SHORT
    states: int = 1000  # about how many it has, so that the largest begin first
    max_states: int = 10**9
    max_seconds: float = 1e9


_ALONE = Bounds(clusters=1)
"""One cluster and two slaves."""

_SMALL = Bounds(clusters=1, slaves=1)


def _with(bounds: Bounds, *faults: str, **changes: object) -> Bounds:
    """The same bounds with each of these faults once."""
    return replace(bounds, faults=tuple((fault, 1) for fault in faults), **changes)  # type: ignore[arg-type]


def _middle(name: str, words: str, bounds: Bounds, states: int) -> Named:
    return Named(name, words, bounds, Size.MIDDLE, states)


def _long(name: str, words: str, bounds: Bounds) -> Named:
    return Named(name, words, bounds, Size.LONG, 10**6, max_states=2_000_000, max_seconds=1200.0)


def _plain() -> list[Named]:
    """Searches without faults, or with one fault of messages or crashes at one cluster."""
    found = [
        Named("start", "the seed, from an empty run on", replace(_ALONE, from_start=True)),
        Named("two-rounds", "one cluster pushes twice", replace(_ALONE, pushes=2, twice=True)),
        Named("pair", "two clusters push once, no fault", Bounds(), states=5_000),
        Named("pair-sliding", "the same, and the window starts again", Bounds(slaves=1, sliding=True), states=3_000),
        Named("minimum", "two clusters push, a round waits for both", Bounds(slaves=1, minimum=2), states=3_000),
        _middle("leased", "two clusters push leased data", Bounds(slaves=1, leased=True), 4_500),
        _long(
            "minimum-evicted",
            "a round waits for both, one is evicted",
            _with(Bounds(slaves=1, minimum=2), "evict_cluster"),
        ),
        _middle("stale", "one of two clusters pushes twice meanwhile", Bounds(slaves=1, eager=("a",), s_max=1), 6_500),
        Named("bad-push", "one of two pushes is not finite", Bounds(slaves=1, bad_pushes=("a",), twice=True)),
        _middle("one-lost-seed", "the seed, with one call lost", _with(_ALONE, "lose_call", from_start=True), 6_000),
    ]
    second = _with(_ALONE, "second_cluster", "second_slave")
    found.append(Named("second-processes", "second processes under names that are taken", second, states=4_000))
    for fault in MESSAGES_AND_CRASHES:
        bounds = _with(_ALONE, fault, slow_journal=fault == "kill_master")
        found.append(Named(_name(fault), f"one cluster pushes once, {fault} once", bounds, states=5_000))
    return found


def _disks() -> list[Named]:
    """Searches with lost committed state: rollback on a new timeline, adoption, donation."""
    twice = replace(_ALONE, pushes=2)
    return [
        Named("lose-version", "a slave's disk comes back without the newest version", _with(_ALONE, "lose_version")),
        Named("old-backup", "a cluster pushes the same work again", _with(_ALONE, "old_backup")),
        Named("empty-disk", "a slave's disk comes back empty", _with(_ALONE, "empty_disk"), states=3_000),
        Named("lose-journal", "the master's disk is empty", _with(_ALONE, "lose_journal"), states=5_000),
        _middle(
            "rollback-twice",
            "one cluster pushes twice, two rollbacks",
            replace(twice, faults=(("lose_version", 2),)),
            22_000,
        ),
        _long(
            "rollback-kill-master",
            "a rollback, and the master is killed",
            _with(_ALONE, "lose_version", "kill_master", slow_journal=True),
        ),
        _middle(
            "rollback-late-verdict",
            "one cluster pushes twice, a rollback, and it trains on",
            _with(twice, "lose_version", "late_verdict"),
            10_000,
        ),
        _middle(
            "rollback-old-backup",
            "one cluster pushes twice, a rollback, and an older push again",
            _with(twice, "lose_version", "old_backup"),
            10_000,
        ),
    ]


def _masters() -> list[Named]:
    """Searches with two masters on one journal."""
    return [
        Named("two-masters", "a second master begins, one slave", _with(_SMALL, "second_master"), states=14_000),
        _middle(
            "two-masters-slow",
            "the same, and the journal's disk takes its time",
            _with(_SMALL, "second_master", slow_journal=True),
            18_000,
        ),
        _middle(
            "two-masters-misroute",
            "the same, and one call goes back to the old one",
            _with(_SMALL, "second_master", "misroute"),
            29_000,
        ),
        _middle("take-over", "a standby takes over, the older master writes on", _with(_SMALL, "take_over"), 86_000),
        _long("take-over-two-slaves", "the same, two slaves", _with(_ALONE, "take_over")),
        _long("two-masters-two-slaves", "a second master begins, two slaves", _with(_ALONE, "second_master")),
    ]


def _reshards() -> list[Named]:
    """Searches in which slaves are added and removed while a cluster pushes."""
    add = replace(_SMALL, add=("s1",))
    remove = replace(_ALONE, remove=("s1",))
    change = replace(add, remove=("s0",))
    return [
        Named("reshard-add", "one slave, another is added", _with(add, "reshard"), states=2_000),
        Named("reshard-remove", "two slaves, one is removed", _with(remove, "reshard"), states=1_000),
        Named("reshard-change", "one slave, another takes its place", _with(change, "reshard"), states=1_000),
        _middle("reshard-cancel", "one is added, or it is taken back", _with(add, "reshard", "cancel_reshard"), 5_000),
        _middle(
            "reshard-lose-version",
            "a slave is removed, the other's disk forgets the newest version",
            _with(remove, "reshard", "lose_version"),
            26_000,
        ),
        _middle(
            "reshard-drop-transfer",
            "chunk by chunk, pushes twice, one given up half sent, a slave is added",
            _with(add, "reshard", "drop_transfer", chunks=2, pushes=2),
            30_000,
        ),
        _long("reshard-kill-slave", "a slave is added, one is killed", _with(add, "reshard", "kill_slave")),
        _long("reshard-kill-master", "the same, the master is killed", _with(add, "reshard", "kill_master")),
        _long("reshard-two-masters", "the same, a second master begins", _with(add, "reshard", "second_master")),
    ]


def _transfers() -> list[Named]:
    """Searches with pushes chunk by chunk, pulls slave by slave, and late answers and verdicts."""
    parts = replace(_ALONE, chunks=2)
    return [
        Named("chunks", "pushes chunk by chunk, pulls slave by slave", replace(parts, twice=True)),
        Named("late-chunk", "the same, a copy of a chunk arrives late", _with(parts, "late_chunk", pushes=2)),
        Named("drop-transfer", "the same, a push is given up half sent", _with(parts, "drop_transfer")),
        Named("late-answers", "answers arrive late, two pushes", replace(_ALONE, pushes=2, late_answers=True)),
        Named("late-verdict", "one cluster trains on before its verdict", _with(_ALONE, "late_verdict", pushes=2)),
        _middle(
            "chunks-two-faults",
            "chunk by chunk, two of: late chunk, given up, slave killed",
            _with(parts, "late_chunk", "drop_transfer", "kill_slave", total_faults=2),
            41_000,
        ),
        _middle(
            "chunks-kill-cluster",
            "chunk by chunk, pushes twice, a late chunk and a kill",
            _with(parts, "late_chunk", "kill_cluster", pushes=2),
            27_000,
        ),
    ]


def _leases() -> list[Named]:
    """Searches with leased data, evictions and expired leases."""
    leased = replace(_SMALL, leased=True, corpus=2)
    return [
        Named("lease-ttl", "leased data, evicted, its leases run out", _with(leased, "evict_cluster", "lease_ttl")),
        _middle(
            "lease-ttl-overlap",
            "the same, it pushes twice and trains through everything",
            _with(leased, "evict_cluster", "lease_ttl", pushes=2, overlap="full"),
            12_000,
        ),
        _long(
            "lease-ttl-pair",
            "the same with two clusters that push once",
            _with(replace(leased, clusters=2), "evict_cluster", "lease_ttl"),
        ),
    ]


def _overlapped() -> list[Named]:
    """Searches in which the next piece of work is made while the previous push is on its way."""
    alone = replace(_ALONE, pushes=2, overlap="full")
    small = replace(alone, slaves=1)
    found = [
        Named("overlap-push", "one cluster trains through its pushes", replace(alone, overlap="push", twice=True)),
        Named("overlap", "one cluster trains through everything", replace(alone, twice=True)),
        Named("overlap-bad-push", "the same, and its pushes are not finite", replace(small, bad_pushes=("a",))),
        _middle(
            "overlap-leased",
            "the same on leased data, evict_cluster once",
            _with(small, "evict_cluster", leased=True),
            8_000,
        ),
    ]
    for fault in ("kill_cluster", "kill_slave", "time_out", "lose_version"):
        words = f"one cluster trains through everything, {fault} once"
        found.append(_middle(f"overlap-{_name(fault)}", words, _with(alone, fault), 5_000))
    return found


def _ranks() -> list[Named]:
    """Searches whose clusters have two or three ranks, each with its share of every transfer."""
    one = replace(_SMALL, ranks=2)
    parts = replace(_ALONE, ranks=2, chunks=2)
    three = replace(parts, ranks=3)
    return [
        Named("ranks", "two ranks push twice, chunk by chunk", replace(parts, pushes=2, twice=True)),
        Named("ranks-late", "the same on one slave, a round's time runs out", _with(one, "time_out", pushes=2)),
        Named("ranks-drop-transfer", "two ranks push once, a part is given up", _with(parts, "drop_transfer")),
        Named("ranks-kill-rank", "the same, one rank is killed", _with(parts, "kill_rank"), states=2_000),
        Named("ranks-orphan-rank", "the same, the cluster is killed, one rank goes on", _with(parts, "orphan_rank")),
        Named("ranks-kill-slave", "one slave, which is killed", _with(one, "kill_slave")),
        Named("ranks-lose-version", "one slave, whose disk forgets the version", _with(one, "lose_version")),
        Named(
            "ranks-evict-overlap",
            "one slave, two pushes, trains through everything, evicted",
            _with(one, "evict_cluster", pushes=2, overlap="full"),
            states=2_000,
        ),
        Named(
            "ranks-late-verdict",
            "one slave, two pushes, one given up, trains on before its verdict",
            _with(one, "late_verdict", "drop_transfer", pushes=2),
        ),
        Named("three-ranks", "three ranks push twice, chunk by chunk", replace(three, pushes=2, twice=True)),
        Named("three-ranks-drop-transfer", "three ranks push once, a part is given up", _with(three, "drop_transfer")),
        Named("three-ranks-orphan-rank", "the same, the cluster is killed, one goes on", _with(three, "orphan_rank")),
        _middle("three-ranks-kill-rank", "the same, one rank is killed", _with(three, "kill_rank"), 4_000),
        _middle("ranks-pair", "two clusters of two ranks push once, one slave", replace(one, clusters=2), 4_000),
        _middle(
            "ranks-two-faults",
            "one slave, two of: given up, late chunk, one rank killed, one goes on",
            _with(one, "drop_transfer", "late_chunk", "kill_rank", "orphan_rank", total_faults=2),
            17_000,
        ),
    ]


def _pairs() -> list[Named]:
    """Searches with two clusters: rounds of two, and pushes of two windows."""
    twice = Bounds(slaves=1, pushes=2, s_max=1)
    found = [
        _middle("pair-twice", "two clusters push twice: pushes of two windows", twice, 32_000),
        _middle("pair-overlap", "the same, and train through everything", replace(twice, overlap="full"), 29_000),
    ]
    for fault in MESSAGES_AND_CRASHES:
        bounds = _with(Bounds(), fault, slow_journal=fault == "kill_master")
        found.append(_long(f"pair-{_name(fault)}", f"two clusters push once, {fault} once", bounds))
    return found


def _large() -> list[Named]:
    """Searches that take long or never end."""
    return [
        _long(
            "two-faults",
            "one cluster pushes once, any two faults",
            _with(_ALONE, *MESSAGES_AND_CRASHES, total_faults=2),
        ),
        _long(
            "whole",
            "two clusters push twice: loss, doubles and a crash of each kind, all together",
            _with(
                Bounds(pushes=2),
                *("lose_call", "late_call", "repeat_word", "kill_master", "kill_slave", "kill_cluster"),
            ),
        ),
        _long(
            "leased-faults",
            "two clusters push leased data, one fault of theirs",
            _with(Bounds(slaves=1, leased=True), "kill_cluster", "evict_cluster", "lose_call", total_faults=1),
        ),
    ]


def _name(fault: str) -> str:
    return fault.replace("_", "-")


SEARCHES: tuple[Named, ...] = (
    *_plain(),
    *_disks(),
    *_masters(),
    *_reshards(),
    *_transfers(),
    *_leases(),
    *_overlapped(),
    *_ranks(),
    *_pairs(),
    *_large(),
)


def by_name(name: str) -> Named:
    """The search with this name. Raises KeyError with all names."""
    for found in SEARCHES:
        if found.name == name:
            return found
    raise KeyError(f"no search is called {name!r}: there are {', '.join(s.name for s in SEARCHES)}")


# ---- running ---------------------------------------------------------------------------------------------------------
#
# Runs searches in parallel, one process for each core, the largest first.


def run(named: Named, max_states: int | None = None) -> Result:
    """Run one search, to its own limits or to max_states."""
    return Search(named.bounds, max_states or named.max_states, named.max_seconds).run()


def run_all(chosen: Sequence[Named], max_states: int | None, jobs: int) -> Iterator[tuple[Named, Result]]:
    """Run searches and yield each result when it ends."""
    if min(jobs, len(chosen)) <= 1:
        for named in chosen:
            yield named, run(named, max_states)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        largest_first = sorted(chosen, key=lambda named: -named.states)
        running = {pool.submit(run, named, max_states): named for named in largest_first}
        for done in as_completed(running):
            yield running[done], done.result()
