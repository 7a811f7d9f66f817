"""Every failpoint is reached by one run that dies at none of them. (test_fault_matrix.py harms a process at each.)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.kill_run import CLUSTERS, SLAVES, KillRun, Order

from dips.core.observe.failpoint_names import all_names
from dips.core.observe.failpoints import armed, hits, role_of
from dips.local.operator_client import OperatorClient

ELSEWHERE: Mapping[str, str] = {
    "master.archive.before_prune": "tests/unit/master/test_archive.py",
    "master.rpc.before_Watch": "tests/integration/test_master_server.py",
    "master.rpc.after_Watch": "tests/integration/test_master_server.py",
    "worker.export.before_rename": "tests/unit/trainer/test_trainer_export.py",
    "worker.export.before_directory_fsync": "tests/unit/trainer/test_trainer_export.py",
    "worker.status.before_call": "tests/unit/trainer/test_trainer_follower.py",
    "worker.status.after_call": "tests/unit/trainer/test_trainer_follower.py",
}
"""Not reached by clusters without torch, or only with megabytes of journal: the test that runs through it."""


def ask_for_a_slave(client: OperatorClient) -> None:
    """One that never comes, so that nothing moves."""
    client.reshard(["s9"], [], "a test")
    client.take_back_reshard()


ORDERS: Mapping[str, Order] = {
    "Status": lambda client: client.status(),
    "Pause": lambda client: client.pause("a test"),
    "Resume": lambda client: client.resume("a test"),
    "Evict": lambda client: client.evict("b", "a test"),
    "Extend": lambda client: client.extend(0, True, "a test"),
    "Drain": lambda client: client.drain("a", "a test"),
    "Reshard": ask_for_a_slave,
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
    turns = ((2, "Pause"), (2, "Resume"), (3, "Reshard"), (3, "Evict"), (5, "Drain"), (5, "Extend"), (6, "Stop"))
    orders = [(n, ORDERS[name]) for n, name in turns]
    with KillRun(tmp_path / "run", actions=all_roles(spec)) as run:
        run.play([(1, ORDERS["Status"]), *orders])
    missing = set(all_names()) - reached(run) - set(ELSEWHERE)
    assert not missing, f"no failpoint that nothing reaches: {sorted(missing)}"
    assert not run.deaths, "nothing dies in this run"


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_is_reached_elsewhere_exists(name: str) -> None:
    assert name in all_names()
    assert (Path(__file__).parents[2] / ELSEWHERE[name]).is_file()


def test_an_armed_failpoint_counts_its_hits() -> None:
    with armed("master.journal.before_commit=1*note"):
        assert hits() == {"master.journal.before_commit": 0}
    assert hits() == {}
