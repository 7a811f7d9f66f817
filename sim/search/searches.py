"""The searches by name: small enough to be exhausted (quick), or as far as their limits go (docs/search.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dips.sim.search.bounds import FAULTS, Bounds


@dataclass(frozen=True)
class Named:
    """One search. quick: exhausted within a few seconds, and so part of --quick."""

    name: str
    words: str
    bounds: Bounds
    quick: bool = True
    max_states: int = 10**9
    max_seconds: float = 1e9


def _once(*faults: str) -> tuple[tuple[str, int], ...]:
    return tuple((fault, 1) for fault in faults)


def _quick() -> list[Named]:
    found = [
        Named("start", "the seed, from an empty run on", Bounds(clusters=1, from_start=True)),
        Named("two-rounds", "one cluster pushes twice", Bounds(clusters=1, pushes=2, twice=True)),
        Named("pair", "two clusters push once, no fault", Bounds()),
        Named("leased", "two clusters push leased data", Bounds(slaves=1, leased=True)),
        Named(
            "stale",
            "one of two clusters pushes twice meanwhile",
            Bounds(slaves=1, eager=("a",), s_max=1),
        ),
        Named("bad-push", "one of two pushes is not finite", Bounds(slaves=1, bad_pushes=("a",), twice=True)),
        Named(
            "one-lost-seed",
            "the seed, with one call lost",
            _one("lose_call", from_start=True),
        ),
    ]
    for fault in FAULTS[:9]:
        slow = fault == "kill_master"
        words = f"one cluster pushes once, {fault} once"
        found.append(Named(fault.replace("_", "-"), words, _one(fault, slow_journal=slow)))
    found += [
        Named(
            "lose-version",
            "a slave's disk comes back without the newest version",
            _one("lose_version"),
        ),
        Named("old-backup", "a cluster pushes the same work again", _one("old_backup")),
        Named("empty-disk", "a slave's disk comes back empty", _one("empty_disk")),
        Named("lose-journal", "the master's disk is empty", _one("lose_journal")),
        *_overlapped(),
    ]
    return found


def _overlapped() -> list[Named]:
    """Each second piece of work is made while the push of the first is on its way."""
    alone = Bounds(clusters=1, pushes=2, overlap="full")
    found = [
        Named("overlap-push", "one cluster trains through its pushes", replace(alone, overlap="push", twice=True)),
        Named("overlap", "one cluster trains through everything", replace(alone, twice=True)),
        Named(
            "overlap-bad-push", "the same, and its pushes are not finite", replace(alone, slaves=1, bad_pushes=("a",))
        ),
        Named(
            "overlap-leased",
            "the same on leased data, evict_cluster once",
            replace(alone, slaves=1, leased=True, faults=_once("evict_cluster")),
        ),
    ]
    for fault in ("kill_cluster", "kill_slave", "time_out", "lose_version"):
        words = f"one cluster trains through everything, {fault} once"
        found.append(Named(f"overlap-{fault.replace('_', '-')}", words, replace(alone, faults=_once(fault))))
    return found


def _one(*faults: str, from_start: bool = False, slow_journal: bool = False) -> Bounds:
    """One cluster, two slaves, each of these faults once."""
    return Bounds(clusters=1, faults=_once(*faults), from_start=from_start, slow_journal=slow_journal)


def _full() -> list[Named]:
    twice = Bounds(slaves=1, pushes=2, s_max=1)
    found = [
        _long("pair-twice", "two clusters push twice", twice),
        _long("pair-overlap", "two clusters push twice, and train through everything", replace(twice, overlap="full")),
    ]
    for fault in FAULTS[:9]:
        bounds = Bounds(faults=_once(fault), slow_journal=fault == "kill_master")
        found.append(_long(f"pair-{fault.replace('_', '-')}", f"two clusters push once, {fault} once", bounds))
    both = Bounds(clusters=1, faults=_once(*FAULTS[:9]), total_faults=2)
    found.append(_long("two-faults", "one cluster pushes once, any two faults", both))
    whole = Bounds(
        pushes=2,
        faults=_once("lose_call", "late_call", "repeat_word", "kill_master", "kill_slave", "kill_cluster"),
    )
    found.append(_long("whole", "two clusters push twice: loss, doubles and a crash of each kind, all together", whole))
    leased = Bounds(slaves=1, leased=True, faults=_once("kill_cluster", "evict_cluster", "lose_call"), total_faults=1)
    found.append(_long("leased-faults", "two clusters push leased data, one fault of theirs", leased))
    return found


def _long(name: str, words: str, bounds: Bounds) -> Named:
    return Named(name, words, bounds, quick=False, max_states=200_000, max_seconds=600.0)


SEARCHES: tuple[Named, ...] = (*_quick(), *_full())


def by_name(name: str) -> Named:
    """Raises KeyError with the names that there are."""
    for found in SEARCHES:
        if found.name == name:
            return found
    raise KeyError(f"no search is called {name!r}: there are {', '.join(s.name for s in SEARCHES)}")
