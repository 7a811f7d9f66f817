"""Runs searches in parallel, one process for each core, the largest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from dips.core.observe.seen import note
from dips.sim.search.explore import Result, Search
from dips.sim.search.searches import Named


def run(named: Named, max_states: int | None = None) -> Result:
    """Run one search, to its own limits or to max_states."""
    note()
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
