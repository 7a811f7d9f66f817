"""Every failpoint is reached, and a process that dies, stops, waits or fails at one is survived.

One run reaches them all without dying, always. With --faults a process dies at each of them, five processes of a run at
a time, and does another harm at it in a second run; FAULT_MATRIX=1 plays every harm at each.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.kill_run import CLUSTERS, SLAVES, KillRun, Order, judge, verified

from dips.core.failpoint_names import all_names
from dips.core.failpoint_spec import role_of
from dips.core.failpoints import armed, hits

HARMS = ("crash", "error", "sleep(1)", "stop")
WHOLE_MATRIX = os.environ.get("FAULT_MATRIX") == "1"

ELSEWHERE: Mapping[str, str] = {
    "master.archive.before_prune": "tests/unit/master/test_archive.py",
    "master.rpc.before_Watch": "tests/integration/test_master_server.py",
    "master.rpc.after_Watch": "tests/integration/test_master_server.py",
    "worker.export.before_rename": "tests/unit/worker/trainer/test_trainer_export.py",
    "worker.export.before_directory_fsync": "tests/unit/worker/trainer/test_trainer_export.py",
    "worker.status.before_call": "tests/unit/worker/trainer/test_trainer_follower.py",
    "worker.status.after_call": "tests/unit/worker/trainer/test_trainer_follower.py",
}
"""Not reached by clusters without torch, or only with megabytes of journal: the test that runs through it."""

ORDERS: Mapping[str, Order] = {
    "Status": lambda client: client.status(),
    "Pause": lambda client: client.pause("a test"),
    "Resume": lambda client: client.resume("a test"),
    "Evict": lambda client: client.evict("b", "a test"),
    "Drain": lambda client: client.drain("a", "a test"),
    "Stop": lambda client: client.stop("a test"),
}


def of_role(role: str) -> list[str]:
    return sorted(name for name in all_names() if role_of(name) == role and name not in ELSEWHERE)


def all_roles(spec_of: Mapping[str, str]) -> dict[str, str]:
    """The same failpoints in every process of a role."""
    slaves, clusters = dict.fromkeys(SLAVES, spec_of["slave"]), dict.fromkeys(CLUSTERS, spec_of["worker"])
    return {"master": spec_of["master"], **slaves, **clusters}


def reached(run: KillRun) -> set[str]:
    logs = (run.fired_log(name) for name in run.lives)
    return {line.split()[0] for log in logs if log.exists() for line in log.read_text().splitlines()}


@pytest.mark.timeout(600)
def test_one_run_reaches_every_failpoint(tmp_path: Path) -> None:
    spec = {role: "; ".join(f"{name}=1*note" for name in of_role(role)) for role in ("master", "slave", "worker")}
    orders = [(n, ORDERS[name]) for n, name in ((2, "Pause"), (2, "Resume"), (3, "Evict"), (5, "Drain"), (6, "Stop"))]
    with KillRun(tmp_path / "run", actions=all_roles(spec)) as run:
        run.play([(1, ORDERS["Status"]), *orders])
    missing = set(all_names()) - reached(run) - set(ELSEWHERE)
    assert not missing, f"no failpoint that nothing reaches: {sorted(missing)}"
    assert not run.deaths, "nothing dies in this run"


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_is_reached_elsewhere_exists(name: str) -> None:
    assert name in all_names()
    assert (Path(__file__).parents[2] / ELSEWHERE[name]).is_file()


def batches() -> Iterator[dict[str, str]]:
    """One failpoint for each process, until all names of all roles are used."""
    slave, worker = of_role("slave"), of_role("worker")
    columns = (of_role("master"), slave[::2], slave[1::2], worker[::2], worker[1::2])
    for row in itertools.zip_longest(*columns):
        yield {process: name for process, name in zip(("master", *SLAVES, *CLUSTERS), row, strict=True) if name}


BATCHES = list(batches())
DEATHS = [(batch, "kill") for batch in BATCHES]
OTHER_HARMS = [
    (batch, harm) for n, batch in enumerate(BATCHES) for harm in (HARMS if WHOLE_MATRIX else (HARMS[n % len(HARMS)],))
]


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("batch", "harm"), DEATHS + OTHER_HARMS)
def test_a_process_harmed_at_a_failpoint_is_survived(batch: dict[str, str], harm: str, tmp_path: Path) -> None:
    method = batch.get("master", "").partition("_")[2]
    orders = [(2, ORDERS[method])] if method in ORDERS and batch["master"].startswith("master.rpc") else []
    orders += [(3, ORDERS["Resume"])] if method == "Pause" else []
    with KillRun(tmp_path / "run", actions={name: f"{point}=1*{harm}" for name, point in batch.items()}) as run:
        run.play(orders)
    assert set(batch.values()) <= reached(run)
    if method not in ("Stop", "Drain"):
        judge(run, verified)
    verified(run.directory)


def test_an_armed_failpoint_counts_its_hits() -> None:
    with armed("master.journal.before_commit=1*note"):
        assert hits() == {"master.journal.before_commit": 0}
    assert hits() == {}
