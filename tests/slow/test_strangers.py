"""Twenty thousand connections of strangers at each port of a run with keys, again and again: the process keeps its
memory, versions are published, and a cluster with keys joins meanwhile."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import n_files
from support.ports import own_port
from support.strangers import Strangers
from support.waiting import until
from support.whole_run import NumpyCluster, WholeRun

from dips.core.observe.metrics_server import MOST_CONNECTIONS
from dips.local.authority import ensure_keys
from dips.master.page.access import read_page_url
from dips.master.page.history import MAX_NEWCOMERS
from dips.master.rpc import most_connections
from dips.slave.connections import NEWCOMERS

N = 20_000
CASES = [
    *(("control", kind) for kind in ("bare", "byte", "tls")),
    *(("page", kind) for kind in ("bare", "byte", "tls")),
    *(("data", kind) for kind in ("bare", "byte", "curve")),
    *((port, kind) for port in ("metrics", "slave's metrics") for kind in ("bare", "byte")),
]
MAX_CLUSTERS = 16
BURSTS = 3
CLUSTERS = ["a", "b", *(f"late{number}" for number in range(len(CASES)))]

KIB, MIB = 1 << 10, 1 << 20
QUEUE = 4_096
"""So many may wait to be accepted by libzmq (net.core.somaxconn) when the guard's filter is on."""


class Port:
    """One port of a run: where it is, whose it is, and what its connections may cost."""

    def __init__(self, run: WholeRun, name: str) -> None:
        self.process = "s0" if name in ("data", "slave's metrics") else "master"
        self.pid = run.processes[self.process].pid
        # (address, most connections, their bytes): docs/capacity.md
        self.address, self.most, self.budget_bytes = {
            "control": lambda: (run.address, most_connections(MAX_CLUSTERS + 1), 64 * KIB),
            "page": lambda: (page_of(run), MAX_NEWCOMERS, 640 * KIB),
            "data": lambda: (seen(run, "s0", r"data port tcp://(\S+),"), NEWCOMERS + QUEUE, 48 * KIB),
            "metrics": lambda: (seen(run, "master", r"http://(\S+)/metrics"), MOST_CONNECTIONS, 512 * KIB),
            "slave's metrics": lambda: (seen(run, "s0", r"http://(\S+)/metrics"), MOST_CONNECTIONS, 512 * KIB),
        }[name]()
        self.budget_bytes *= self.most

    def resident_bytes(self, what: str = "VmRSS") -> int:
        """what: VmHWM, the most since forget_peak()."""
        found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * KIB

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def page_of(run: WholeRun) -> str:
    url = read_page_url(run.directory / "master")
    assert url is not None
    return url.partition("//")[2].partition("/")[0]


def seen(run: WholeRun, process: str, pattern: str) -> str:
    found = re.search(pattern, (run.directory / f"{process}.log").read_text())
    assert found is not None, run.log(process)
    return found[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    folder = tmp_path_factory.mktemp("strangers")
    ensure_keys(folder / "keys", CLUSTERS, ["s0"])
    listening: dict[str, Any] = {
        "page_listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "max_clusters": MAX_CLUSTERS,
    }
    whole = WholeRun(folder / "run", n_slaves=1, keys=folder / "keys", **listening)
    whole.slave = {"metrics_listen": f"127.0.0.1:{own_port()}"}
    with whole:
        clusters = [whole.cluster(name, seed, step_s=0.05) for seed, name in enumerate("ab", 1)]
        whole.wait_for_version(1)
        with Strangers(whole.address, "bare", N) as first:
            first.burst()  # what the first ones cost once is no connection's
        yield whole
        whole.stop(*clusters)


def leave(cluster: NumpyCluster) -> None:
    cluster.driver.request_stop()
    cluster.join()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_strangers_at_a_port_cost_what_it_may_cost_and_the_run_goes_on(run: WholeRun, name: str, kind: str) -> None:
    port = Port(run, name)
    port.forget_peak()
    before_bytes, before, files_before = port.resident_bytes(), run.version(), n_files(port.pid)
    with contextlib.ExitStack() as stack:
        strangers = stack.enter_context(Strangers(port.address, kind, N))
        strangers.burst()
        joined = run.cluster(f"late{CASES.index((name, kind))}", 3, step_s=0.05)
        stack.callback(leave, joined)
        run.wait_for_version(before + 2)
        until(lambda: joined.verdicts, "a push of the cluster that joined", lambda: joined.driver.phase)
        most_files = n_files(port.pid)
        for _ in range(BURSTS - 1):
            strangers.burst()
            most_files = max(most_files, n_files(port.pid))
        before = run.version()
    run.wait_for_version(before + 2)
    grown = port.resident_bytes("VmHWM") - before_bytes
    print(f"{name} {kind}: {strangers.taken} taken, {most_files - files_before} open, {grown / MIB:.1f} MiB more")
    assert most_files - files_before <= port.most + 64  # and connections of the run itself
    assert grown <= port.budget_bytes
