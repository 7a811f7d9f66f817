"""Every failpoint is reached by one run that dies at none of them. (test_fault_matrix.py harms a process at each.)"""

from __future__ import annotations

from pathlib import Path

from support.fault_plan import ELSEWHERE, OF_METHOD, Fault, tried
from support.fault_run import CLUSTERS, NAMES, SLAVES, FaultRun
from support.fork_server import ForkServer

from dips.core.observe.failpoint_names import all_names
from dips.core.observe.failpoints import role_of


def notes(role: str) -> str:
    return "; ".join(f"{name}=1*note" for name in all_names() if role_of(name) == role and name not in ELSEWHERE)


def test_one_run_reaches_every_failpoint(fork_server: ForkServer, tmp_path: Path) -> None:
    roles = {"master": "master", **dict.fromkeys(SLAVES, "slave"), **dict.fromkeys(CLUSTERS, "worker")}
    births = {name: [notes(role)] for name, role in roles.items()}
    with FaultRun(tmp_path / "run", fork_server, births=births) as run:
        run.began()
        for method, trigger in OF_METHOD.items():
            fault = Fault("b", method, "note")
            run.may_die.add("b")
            run.until(lambda trigger=trigger, fault=fault: tried(lambda: trigger(run, fault)), method)  # type: ignore[misc]
            run.until(lambda: tried(lambda: OF_METHOD["Resume"](run, fault)), "it is not paused")  # noqa: B023
            run.until(lambda: run.everyone_is_back({}), f"every process is back after {method}")
            run.healed("b")
        run.stop()
    reached = {line.split()[0] for name in NAMES for line in run.fired(name)}
    missing = set(all_names()) - reached - set(ELSEWHERE)
    assert not missing, f"no failpoint that nothing reaches: {sorted(missing)}"
