"""Links between real processes that cut, stall, delay, throttle, break off in mid-message, spoil, double and replay.

A relay stands before the master for each slave and cluster, and before each slave's data port. Each harm has to touch
bytes; when it is over, a version is published in the first or second round, and `dips verify --replay` of the run so
far has nothing to say.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.dips_command import assert_verified
from support.fault_plan import Fault, endured
from support.fault_proxy import Harm, NetFault, Proxies, Way
from support.fault_run import CLUSTERS, SLAVES, FaultRun
from support.fork_server import ForkServer
from support.judged_run import replayed

from dips.local.authority import ensure_keys

N_ELEMS = 60_000
CHUNK_BYTES = 16 << 10
"""A push is 240 KB in 16 chunks, so that there is a middle of a message and of a transfer."""

LASTS_S: Mapping[Harm, float] = {Harm.CUT: 1.0, Harm.SILENCE: 3.0, Harm.DELAY: 1.5, Harm.THROTTLE: 2.0}
"""How long a harm that is no single event lasts. Silence: longer than it takes to be evicted."""


@dataclass(frozen=True)
class Case:
    """One harm on the links of a path: control or data."""

    links: tuple[str, ...]
    fault: NetFault

    def __str__(self) -> str:
        ways = " and ".join(sorted(way.value for way in self.fault.ways))
        return f"{self.fault.harm.value} {ways} on {', '.join(self.links)}"


CONTROL = tuple(f"{name}.control" for name in (*SLAVES, *CLUSTERS))
DATA = tuple(f"{name}.data" for name in SLAVES)

ON_DATA: tuple[Case, ...] = (
    Case(("s0.data",), NetFault(Harm.CUT)),
    Case(DATA, NetFault(Harm.CUT)),
    Case(("s1.data",), NetFault(Harm.SILENCE)),
    Case(("s0.data",), NetFault(Harm.SILENCE, frozenset({Way.UP}))),
    Case(("s0.data",), NetFault(Harm.SILENCE, frozenset({Way.DOWN}))),
    Case(DATA, NetFault(Harm.DELAY, delay_s=0.3)),
    Case(("s1.data",), NetFault(Harm.THROTTLE, bytes_per_s=200_000.0)),
    Case(("s0.data",), NetFault(Harm.RESET, frozenset({Way.UP}), least_bytes=4096)),
    Case(("s1.data",), NetFault(Harm.RESET, frozenset({Way.DOWN}), least_bytes=4096)),
    Case(("s0.data",), NetFault(Harm.TRUNCATE, frozenset({Way.UP}), least_bytes=4096)),
    Case(("s1.data",), NetFault(Harm.TRUNCATE, frozenset({Way.DOWN}), least_bytes=4096)),
    Case(("s0.data",), NetFault(Harm.FLIP, frozenset({Way.UP}), least_bytes=1024, times=10)),
    Case(("s1.data",), NetFault(Harm.FLIP, frozenset({Way.DOWN}), least_bytes=1024, times=10)),
    Case(DATA, NetFault(Harm.FLIP, least_bytes=1, times=40)),
    Case(DATA, NetFault(Harm.DUPLICATE)),
    Case(DATA, NetFault(Harm.REPLAY)),
)

ON_CONTROL: tuple[Case, ...] = (
    Case(("a.control",), NetFault(Harm.CUT)),
    Case(("s0.control",), NetFault(Harm.CUT)),
    Case(CONTROL, NetFault(Harm.CUT)),
    Case(("b.control",), NetFault(Harm.SILENCE)),
    Case(("s1.control",), NetFault(Harm.SILENCE)),
    Case(("c.control",), NetFault(Harm.SILENCE, frozenset({Way.DOWN}))),
    Case(("s0.control",), NetFault(Harm.SILENCE, frozenset({Way.UP}))),
    Case(CONTROL, NetFault(Harm.DELAY, delay_s=0.2)),
    Case(("a.control",), NetFault(Harm.THROTTLE, bytes_per_s=5_000.0)),
    Case(("s1.control",), NetFault(Harm.THROTTLE, bytes_per_s=20_000.0)),
    Case(("b.control",), NetFault(Harm.RESET, least_bytes=64)),
    Case(("s0.control",), NetFault(Harm.RESET, least_bytes=64)),
    Case(("c.control",), NetFault(Harm.TRUNCATE, least_bytes=64)),
    Case(("s1.control",), NetFault(Harm.TRUNCATE, least_bytes=64)),
    Case(("a.control",), NetFault(Harm.DUPLICATE)),
    Case(("s0.control",), NetFault(Harm.DUPLICATE)),
    Case(("b.control",), NetFault(Harm.REPLAY)),
    Case(("s1.control",), NetFault(Harm.REPLAY)),
)

FLIPS_ON_CONTROL: tuple[Case, ...] = (
    Case(("a.control",), NetFault(Harm.FLIP, frozenset({Way.UP}), least_bytes=32, times=5)),
    Case(("s0.control",), NetFault(Harm.FLIP, frozenset({Way.DOWN}), least_bytes=32, times=5)),
    Case(CONTROL, NetFault(Harm.FLIP, least_bytes=1, times=5)),
)


def touched(run: FaultRun, proxies: Proxies, case: Case) -> None:
    """Harm, wait until every link was touched and the harm is over, and until the run has healed."""
    for link in case.links:
        proxies.harm(link, case.fault)
    bites = [proxies[link].bites for link in case.links]
    run.until(lambda: all(bites), f"{case} touched nothing")
    over_s = max(mine[0] for mine in bites) + LASTS_S.get(case.fault.harm, 1.0)
    run.until(lambda: time.time() >= over_s, "time stands still")
    for link in case.links:
        proxies.heal(link)
    run.recovered()
    replayed(run.directory)


def fault_run(directory: Path, fork_server: ForkServer, proxies: Proxies, keys: Path | None = None) -> FaultRun:
    return FaultRun(
        directory, fork_server, n_elems=N_ELEMS, step_s=0.1, proxies=proxies, chunk_bytes=CHUNK_BYTES, keys=keys
    )


def play(directory: Path, fork_server: ForkServer, cases: Sequence[Case], keys: Path | None = None) -> None:
    with Proxies() as proxies, fault_run(directory, fork_server, proxies, keys) as run:
        run.began()
        for case in cases:
            touched(run, proxies, case)
        run.stop()
    assert_verified(directory)
    shutil.rmtree(directory)


@pytest.fixture(params=["in the clear", "with keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if request.param == "in the clear":
        return None
    ensure_keys(tmp_path / "keys", CLUSTERS, SLAVES)
    return tmp_path / "keys"


@pytest.mark.long
def test_a_run_survives_every_harm_on_the_data_path(keys: Path | None, fork_server: ForkServer, tmp_path: Path) -> None:
    play(tmp_path / "run", fork_server, ON_DATA, keys)


@pytest.mark.long
def test_every_harm_on_the_control_path(keys: Path | None, fork_server: ForkServer, tmp_path: Path) -> None:
    """Flipped bits need keys: without them TCP's checksum is all there is (docs/security.md)."""
    play(tmp_path / "run", fork_server, ON_CONTROL + (FLIPS_ON_CONTROL if keys else ()), keys)


def test_a_short_run_survives_one_harm_of_each_kind(fork_server: ForkServer, tmp_path: Path) -> None:
    """What always runs; the long tier plays all of them."""
    cases = (
        Case(("s0.data",), NetFault(Harm.RESET, frozenset({Way.UP}), least_bytes=4096)),
        Case(DATA, NetFault(Harm.FLIP, least_bytes=1, times=10)),
        Case(CONTROL, NetFault(Harm.CUT)),
    )
    faults = (
        Fault("s1", "slave.ring.before_fsync", "error"),
        Fault("a", "worker.push.after_last_chunk", "crash"),
        Fault("master", "master.journal.before_commit", "crash"),
        Fault("s0", "slave.link.after_receive", "stop"),
    )
    with Proxies() as proxies, fault_run(tmp_path / "run", fork_server, proxies) as run:
        run.began()
        for case in cases:
            touched(run, proxies, case)
        for fault in faults:
            endured(run, fault)
            replayed(run.directory)
        run.stop()
