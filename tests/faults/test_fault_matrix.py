"""Every failpoint with every harm, in runs of one master, two slaves and three clusters, one harm after the other.

After each harm every process is back, and a version is published in the first or second round from then. After some of
them, and at the end, `dips verify --replay` of the run has nothing to say: every promise holds, every version is made
again bit for bit from the seed and the pushes that the journal says were applied, and tokens add up. A planned harm
that never happens fails.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import fault_plan as plan
from support.dips_command import assert_verified
from support.fault_run import FaultRun
from support.fork_server import ForkServer
from support.judged_run import replayed
from support.waiting import given_up

from dips.core.observe.failpoints import all_names

RUN_FAULTS = 24
"""Faults of one run at most: a longer one takes ever longer to judge."""


@dataclass(frozen=True)
class Segment:
    """One run. harm: of its births and of its end, which belong to the first runs of each harm."""

    name: str
    faults: tuple[plan.Fault, ...]
    births: str = ""
    last: plan.Fault | None = None


def segments(harm: str) -> Iterator[Segment]:
    points = plan.in_a_run() + (list(plan.ARROWS) if harm in plan.ARROW_HARMS else [])
    faults = list(plan.planned(points, harm))
    cut = [tuple(faults[at : at + RUN_FAULTS]) for at in range(0, len(faults), RUN_FAULTS)]
    for n, (part, last) in enumerate(itertools.zip_longest(cut, plan.ENDS_THE_RUN)):
        end = plan.Fault("master", last, harm) if last else None
        yield Segment(f"{harm}-{n}", part, births=harm if n == 0 else "", last=end)


SEGMENTS = {harm: list(segments(harm)) for harm in plan.HARMS}
AT_A_TIME = 3
"""Runs: each waits more than it works."""

LANES = [tuple(of[at : at + AT_A_TIME]) for of in SEGMENTS.values() for at in range(0, len(of), AT_A_TIME)]

JUDGED_EVERY = 3
"""Faults: a judgement makes all versions of the run again."""


def test_every_name_of_the_registry_is_planned_with_every_harm() -> None:
    wanted = {(name, harm) for name in all_names() if name not in plan.ELSEWHERE for harm in plan.HARMS}
    every = list(itertools.chain(*SEGMENTS.values()))
    faults = [fault for segment in every for fault in (*segment.faults, segment.last) if fault]
    of_births = list(itertools.chain(*plan.AT_BIRTH.values()))
    begun = {(point, segment.births) for segment in every if segment.births for point in of_births}
    assert wanted == {(fault.point, fault.harm) for fault in faults if fault.point in all_names()} | begun


@pytest.mark.parametrize("name", sorted(plan.ELSEWHERE))
def test_what_is_reached_elsewhere_exists(name: str) -> None:
    assert name in all_names()
    assert (Path(__file__).parents[2] / plan.ELSEWHERE[name]).is_file()


@pytest.mark.long
@pytest.mark.parametrize("lanes", LANES, ids=lambda lanes: "+".join(segment.name for segment in lanes))
def test_every_harm_at_every_failpoint(lanes: tuple[Segment, ...], fork_server: ForkServer, tmp_path: Path) -> None:
    given_up.clear()
    with ThreadPoolExecutor(len(lanes)) as pool:
        runs = [pool.submit(play, tmp_path / segment.name, fork_server, segment) for segment in lanes]
        try:
            wait(runs)
        except BaseException:  # pytest's limit: what waits in the lanes ends, too
            given_up.set()
            raise
    errors = [error for error in (run.exception() for run in runs) if error is not None]
    for error in errors[1:]:
        print(error)
    if errors:
        raise errors[0]


def play(directory: Path, fork_server: ForkServer, segment: Segment) -> None:
    with FaultRun(directory, fork_server, births=plan.births(segment.births) if segment.births else None) as run:
        if segment.births:
            be_born(run, segment.births)
        run.began()
        for number, fault in enumerate(segment.faults, 1):
            plan.endured(run, fault)
            if number % JUDGED_EVERY == 0:
                replayed(run.directory)
        end(run, segment.last)
    assert_verified(directory)
    shutil.rmtree(directory)


def be_born(run: FaultRun, harm: str) -> None:
    """First lives that fail: journal, address, identity, promise and ring are made all the same."""
    run.may_die.update(plan.AT_BIRTH)
    run.until(lambda: not missing_births(run, harm), f"a harm at birth never happened: {harm}")
    run.began()
    run.may_die.clear()


def missing_births(run: FaultRun, harm: str) -> set[str]:
    fired = {" ".join(line.split()[:2]) for name in plan.AT_BIRTH for line in run.fired(name)}
    return {f"{point} {harm}" for points in plan.AT_BIRTH.values() for point in points} - fired


def end(run: FaultRun, last: plan.Fault | None) -> None:
    """An operator ends the run; with a fault, the master is harmed as it hears of it."""
    if last is not None:
        run.may_die.add(last.process)
        run.mark(last.process)
        run.arm(last.process, last.spec)
    run.stop()
    if last is not None:
        begins = f"{last.point} {last.harm} "
        assert any(line.startswith(begins) for line in run.fired(last.process)), f"{last} never fired"
