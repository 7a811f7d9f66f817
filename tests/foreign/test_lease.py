"""A standby that takes over by itself, with a lease in a real etcd: links cut in turn, processes killed and stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest
from support import live
from support.fault_proxy import Harm, NetFault, Proxies
from support.ports import own_port, release
from support.standby_run import WithStandby
from support.waiting import until

from dips.core.errors import RetryLater
from dips.core.net.addresses import parse_address
from dips.master.lease import Etcd
from dips.master.state.replication import TAKE_OVER_EPOCHS
from dips.master.state.slaves import NEWER_EPOCH_EXIT

LEASE_S = 2.0
WRONG_SETTINGS = 2
GONE = NetFault(Harm.SILENCE)
TO_ETCD = {"master": "master to etcd", "standby": "standby to etcd"}
STREAM = "standby to master"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[int]:
    """Its port."""
    with live.run(live.HEAVY):  # once for all that a test starts
        port, peers = own_port(), own_port()
        here, there = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
        command = [
            str(Path(sys.executable).parent / "etcd"), "--data-dir", str(tmp_path / "etcd"),
            "--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", there,
            "--initial-advertise-peer-urls", there, "--initial-cluster", f"default={there}",
        ]  # fmt: skip
        log = tmp_path / "etcd.log"
        with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
            until(lambda: answers(port) or process.poll() is not None, "etcd", log)
            yield port
            process.kill()
        release(port)
        release(peers)


def store(port: int) -> Etcd:
    return Etcd(f"http://127.0.0.1:{port}", "test", 30.0)


def answers(port: int) -> bool:
    try:
        return store(port).read() is None
    except RetryLater:
        return False


class Leased(WithStandby):
    """Each process reaches etcd by a relay of its own, and the standby its master by another one."""

    def __init__(self, directory: Path, etcd: int, proxies: Proxies) -> None:
        self.store, self.proxies = store(etcd), proxies
        endpoints = {name: proxies.add(link, ("127.0.0.1", etcd)).address for name, link in TO_ETCD.items()}
        leases = {name: {"lease": f"etcd:http://{address}"} for name, address in endpoints.items()}
        super().__init__(directory, lease_s=LEASE_S, **leases["master"])
        self.of_standby |= leases["standby"]

    def start_master(self) -> None:
        super().start_master()
        self.of_standby["standby"] = self.proxies.add(STREAM, parse_address(self.first)).address

    def follow(self) -> None:
        self.start_standby()
        self.until_followed()

    def until_followed(self) -> None:
        until(self.is_followed, "a standby that has all decisions", lambda: self.log("standby"))
        until(lambda: self.says_last("watches"), "a standby that watches the lease", lambda: self.log("standby"))

    def says_last(self, words: str) -> bool:
        """Whether the standby's newest line about the lease has these words."""
        said = (self.directory / "standby.log").read_text().splitlines()
        lines = [line for line in said if "etcd at" in line or "by itself" in line]
        return bool(lines) and words in lines[-1]

    def renewals(self, n: int) -> None:
        first = self.store.read()
        assert first is not None
        until(lambda: int((self.store.read() or first).mark) >= int(first.mark) + n, f"{n} renewals of the lease")

    def until_taken(self) -> None:
        def has() -> bool:
            held = self.store.read()
            return held is not None and str(self.directory / "standby") in held.holder

        until(has, "the standby has the lease", lambda: self.log("standby"))

    def until_taken_over(self) -> None:
        self.until_taken()
        self.wait_for_version(self.version() + 3)
        assert self.status().epoch == 1 + TAKE_OVER_EPOCHS


@pytest.fixture
def run(tmp_path: Path, etcd: int) -> Iterator[Leased]:
    with Proxies() as proxies, Leased(tmp_path / "run", etcd, proxies) as run:
        yield run


def test_standby_takes_over_after_the_loss_of_the_master_which_is_not_started_again(run: Leased) -> None:
    clusters = [run.cluster(name, seed, step_s=0.02) for seed, name in enumerate("ab", 1)]
    run.follow()
    run.wait_for_version(run.version() + 3)
    run.kill("master")
    run.until_taken_over()
    run.spawn_master()
    assert run.processes["master"].wait() == WRONG_SETTINGS, run.log("master")
    run.finish(*clusters)


def test_master_that_was_stopped_ends_after_a_take_over(run: Leased) -> None:
    cluster = run.cluster("a", seed=1, step_s=0.02)
    run.follow()
    run.wait_for_version(run.version() + 2)
    run.processes["master"].send_signal(SIGSTOP)
    run.until_taken_over()
    run.processes["master"].send_signal(SIGCONT)
    assert run.processes["master"].wait() == NEWER_EPOCH_EXIT, run.log("master")
    run.wait_for_version(run.version() + 2)
    run.finish(cluster)


def test_slaves_and_clusters_leave_a_master_that_they_alone_reach_for_the_one_that_took_over(run: Leased) -> None:
    """Two masters live, and one of them publishes: the one whose epoch the slaves have promised last."""
    cluster = run.cluster("a", seed=1, step_s=0.02)
    run.follow()
    run.wait_for_version(run.version() + 2)
    links = (TO_ETCD["master"], STREAM)
    for link in links:
        run.proxies.harm(link, GONE)
    run.until_taken()
    run.wait_for_version(run.version() + 3)
    assert run.status().epoch == 1 + TAKE_OVER_EPOCHS
    assert run.processes["master"].poll() is None, "it answers first, and does not know of the other one"
    for link in links:
        run.proxies.heal(link)
    assert run.processes["master"].wait() == NEWER_EPOCH_EXIT, run.log("master")
    run.wait_for_version(run.version() + 2)
    run.finish(cluster, may_skip=True)  # what the first one decided alone stands in its own journal


def test_one_link_that_is_cut_makes_no_standby_take_over(run: Leased) -> None:
    cluster = run.cluster("a", seed=1, step_s=0.02)
    run.follow()
    run.proxies.harm(STREAM, NetFault(Harm.CUT))
    run.renewals(20)
    until(lambda: run.says_last("a person must"), "a standby that is behind", lambda: run.log("standby"))
    run.proxies.heal(STREAM)
    run.until_followed()
    run.proxies.harm(TO_ETCD["master"], GONE)
    until(lambda: run.status().alarms, "the alarm", lambda: run.log("master"))
    run.wait_for_version(run.version() + 8)
    run.proxies.heal(TO_ETCD["master"])
    run.until_followed()
    run.proxies.harm(TO_ETCD["standby"], GONE)
    until(lambda: run.says_last("cannot"), "a standby without its lease", lambda: run.log("standby"))
    run.kill("master")
    until(lambda: "does not follow" in run.log("standby").splitlines()[-1], "a standby that has lost its master")
    assert run.processes["standby"].poll() is None
    run.proxies.heal(TO_ETCD["standby"])
    run.until_taken_over()
    run.finish(cluster)


def test_standby_of_a_run_that_has_ended_ends_too(run: Leased) -> None:
    cluster = run.cluster("a", seed=1, step_s=0.02)
    run.follow()
    run.wait_for_version(run.version() + 2)
    run.stop(cluster)
    assert run.processes["master"].wait() == 0
    assert run.processes["standby"].wait() == 0, run.log("standby")
    run.judge()
