"""A small real run whose every process serves metrics, and on which everything that is watched for happens: real
training on two clusters and a wayward third, a held-out loss, kills, a cut and a slow link, spoilt and excluded pushes.

All with keys, as a run outside of tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support import live
from support.diverging_trainer import VARIABLE
from support.fault_proxy import Harm, NetFault, Proxies
from support.ports import own_port
from support.repository import ROOT
from support.waiting import until

from dips.core.errors import KEYS_REFUSED_EXIT, DipsError
from dips.core.messages import ClusterStatus, StatusReply
from dips.core.net.keys import load_identity
from dips.local.operator_client import OperatorClient

RUN = "watched"
SLAVES, CLUSTERS, WAYWARD = ("s0", "s1"), ("a", "b"), "c"
HEARTBEAT_S = 0.5
SLOW_BYTES_PER_S = 300_000.0
AWAY_S = 3.0
"""How long what is away stays so: a few scrapes."""
EXCLUSIONS = 5
EXCLUDED_SHARE = 0.3
"""Of the wayward cluster's judged pushes; an alarm looks at this share."""
TRAIN = (
    *("--max-bytes", "1500000", "--heldout-max-bytes", "8192", "--warmup-tokens", "4000", "--log-every-steps", "4"),
    *("--batch-size", "8", "--sequence-tokens", "64"),
)


class WatchedRun:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: own_port() for name in ("master", *SLAVES)}
        self.metrics = {name: f"127.0.0.1:{own_port()}" for name in ("master", *SLAVES, *CLUSTERS, WAYWARD, "heldout")}
        self._proxies = Proxies()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._way = folder / "way"

    def __enter__(self) -> WatchedRun:
        self.folder.mkdir(parents=True)
        self._live = live.run(live.HEAVY)
        self._live.__enter__()
        self._proxies.__enter__()
        self._proxies.add("control", ("127.0.0.1", self.ports["master"]))
        self._proxies.add("data", ("127.0.0.1", self.ports["s1"]))
        names = [word for name in SLAVES for word in ("--slave", name)]
        names += [word for name in (*CLUSTERS, WAYWARD) for word in ("--cluster", name)]
        names += ["--operator", "me", "--operator", "prometheus"]
        made = _dips("keys", "init", self.folder / "keys", *names)
        subprocess.run(made, check=True, capture_output=True)
        try:
            for name in ("master", *SLAVES, *CLUSTERS, WAYWARD, "heldout"):
                self.start(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait(30)
        self._proxies.__exit__(*error)
        self._live.__exit__(*error)

    def start(self, name: str) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        path = os.pathsep.join((str(ROOT / "tests"), kept.get("PYTHONPATH", "")))
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, VARIABLE: str(self._way)}
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(self._command(name), stdout=log, stderr=log, env={**kept, **more})

    def _command(self, name: str) -> list[str]:
        # All addresses of the machine are more than loopback: slaves serve metrics in TLS, the others in the clear.
        port = self.metrics[name].rpartition(":")[2]
        metrics = ("--metrics-listen", f"0.0.0.0:{port}" if name in SLAVES else self.metrics[name])
        keys = ("--keys", str(self.folder / "keys" / ("me" if name == "heldout" else name)))
        master = f"127.0.0.1:{self.ports['master']}"
        if name == "master":
            return [
                *_dips("master", "--run-id", RUN, "--directory", self.folder / "master", "--slaves", len(SLAVES)),
                *("--listen", master, "--sync-every", "8", "--heartbeat-s", str(HEARTBEAT_S), "--grace-s", "0.3"),
                # A limit that no run reaches, since the dashboards show how far away it is.
                *("--min-clusters", "3", "--round-timeout-s", "10", "--tk-max", "500M", *metrics, *keys),
            ]
        if name in SLAVES:
            data_port = self.ports[name]
            advertised = self._proxies["data"].address if name == "s1" else f"127.0.0.1:{data_port}"
            return [
                *_dips("slave", "--run-id", RUN, "--slave-id", name, "--directory", self.folder / "slaves" / name),
                *("--master", master, "--data-port", str(data_port), "--advertise", advertised, *metrics, *keys),
            ]
        if name == "heldout":
            tape = str(self.folder / "heldout.tape.jsonl")
            return [*_dips("eval", master, "--follow", "--tape", tape), *_heldout_words(), *metrics, *keys]
        checkpoints = str(self.folder / "checkpoints" / name)
        own = ["--cluster-id", name, "--checkpoint-dir", checkpoints, "--checkpoint-every-s", "5", "--resume"]
        words = [*TRAIN, *own, *metrics, *keys]
        if name == WAYWARD:
            address = self._proxies["control"].address
            return [sys.executable, "-m", "support.diverging_trainer", *words, "--master", address]
        return [*_dips("train", *words), "--master", master]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def status(self) -> StatusReply | None:
        address, identity = f"127.0.0.1:{self.ports['master']}", load_identity(self.folder / "keys" / "me")
        with contextlib.suppress(DipsError), OperatorClient(address, call_s=2.0, security=identity) as client:
            return client.status()
        return None

    def until(self, happened: Callable[[StatusReply], bool], what: str) -> StatusReply:
        found: list[StatusReply] = []

        def look() -> bool:
            dead = [name for name, process in self._running.items() if process.poll() is not None]
            assert not dead, f"{dead} ended while waiting for: {what}\n{self._said(dead)}"
            status = self.status()
            if status is not None and happened(status):
                found.append(status)
            return bool(found)

        until(look, what, lambda: f"{self.status()}\n{self._said(self._running)}")
        return found[0]

    def _said(self, names: Iterable[str]) -> str:
        return "\n".join(f"--- {name}\n{self._log(name).read_text(errors='replace')[-1500:]}" for name in names)

    def versions(self, count: int) -> None:
        begun = self.until(lambda status: status.published is not None, "a first version")
        target = begun.rounds_committed + count
        self.until(lambda status: status.rounds_committed >= target, f"{count} more versions")

    def kill(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGKILL)
        self._running.pop(name).wait(30)

    def lose_master(self) -> None:
        self.kill("master")
        time.sleep(AWAY_S)
        self.start("master")
        self.everyone()

    def lose_slave(self) -> None:
        """SIGKILL, and its newest snapshot is spoilt before it comes back: the run goes back to an older version."""
        before = self.until(lambda status: status.published is not None, "a version").published
        self.kill("s0")
        self.until(lambda status: not all(slave.alive for slave in status.slaves), "the loss of a slave")
        time.sleep(AWAY_S)
        _spoil_newest_snapshot(self.folder / "slaves" / "s0")
        self.start("s0")
        self.everyone()
        self.until(
            lambda status: (
                before is not None and status.published is not None and status.published.timeline > before.timeline
            ),
            "a rollback",
        )

    def lose_cluster(self) -> None:
        """SIGKILL, until the master has evicted it; then it comes back."""
        self.kill("b")
        self.until(lambda status: not _of(status, "b").alive, "the eviction of cluster b")
        time.sleep(AWAY_S)
        self.start("b")
        self.everyone()

    def everyone(self) -> None:
        self.until(
            lambda status: (
                [slave.alive and slave.phase == "READY" for slave in status.slaves] == [True] * len(SLAVES)
                and {item.cluster_id for item in status.clusters if item.alive} == {*CLUSTERS, WAYWARD}
            ),
            "the return of every process",
        )

    def stray(self, way: str) -> None:
        """What the wayward cluster does from now on; "" ends it."""
        aside = self._way.with_suffix(".new")
        aside.write_text(way)
        if way:
            aside.rename(self._way)
        else:
            self._way.unlink(missing_ok=True)

    def exclude(self) -> None:
        """Pushes of the wayward cluster are excluded, until it is in quarantine; some scrapes later it goes straight
        again."""
        self.stray("far")
        self.until(lambda status: _of(status, WAYWARD).quarantined, "the quarantine of the wayward cluster")
        time.sleep(AWAY_S)
        self.until(lambda status: _is_excluded_often(_of(status, WAYWARD)), "more exclusions")
        self.stray("")
        self.until(lambda status: not _of(status, WAYWARD).quarantined, "the end of the quarantine")

    def turn(self) -> None:
        """The direction alarm of the wayward cluster stands for some scrapes."""
        self.stray("back")
        self.until(lambda status: _of(status, WAYWARD).direction_alarm, "the direction alarm")
        time.sleep(AWAY_S)
        self.stray("")

    def pause(self) -> None:
        address = f"127.0.0.1:{self.ports['master']}"
        for keys, code in (("a", KEYS_REFUSED_EXIT), ("me", 0)):
            asked = _dips("pause", address, "--keys", self.folder / "keys" / keys, "--reason", "a look")
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            assert done.returncode == code, done.stderr
        time.sleep(AWAY_S)
        resumed = _dips("resume", address, "--keys", self.folder / "keys" / "me")
        subprocess.run(resumed, check=True, capture_output=True)

    def slow_link(self, begin: bool) -> None:
        if begin:
            self._proxies.harm("data", NetFault(Harm.THROTTLE, bytes_per_s=SLOW_BYTES_PER_S))
        else:
            self._proxies.heal("data")

    def cut(self, for_s: float) -> None:
        for relay in ("control", "data"):
            self._proxies.harm(relay, NetFault(Harm.CUT))
        time.sleep(for_s)
        for relay in ("control", "data"):
            assert self._proxies[relay].bites, f"the cut of the {relay} flow touched nothing"
            self._proxies.heal(relay)


def _of(status: StatusReply, name: str) -> ClusterStatus:
    return next((item for item in status.clusters if item.cluster_id == name), ClusterStatus(name))


def _is_excluded_often(cluster: ClusterStatus) -> bool:
    judged = cluster.pushes_applied + cluster.pushes_excluded
    return cluster.pushes_excluded >= max(EXCLUSIONS, EXCLUDED_SHARE * judged)


def _dips(*words: object) -> list[str]:
    return [sys.executable, "-m", "dips.cli", *map(str, words)]


def _heldout_words() -> list[str]:
    """The evaluator must read the text that the clusters train on."""
    return ["--max-bytes", "1500000", "--heldout-max-bytes", "8192", "--sequence-tokens", "64"]


def _spoil_newest_snapshot(slave: Path) -> None:
    """The newest committed one, and what has no manifest: it might be a version that was committed just before."""
    newest, *older = sorted(slave.glob("manifest-*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    kept = {path.stem.removeprefix("manifest-") for path in older}
    assert kept, f"{slave} holds no version but {newest.name}"
    for ring in slave.glob("ring-*.safetensors"):
        if ring.stem.removeprefix("ring-") not in kept:
            with ring.open("r+b") as file:
                file.seek(ring.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 0x10]))


def targets_of(run: WatchedRun) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    roles = {"master": "master", "heldout": "evaluator", **dict.fromkeys(SLAVES, "slave")}
    found: list[dict[str, Any]] = [
        {"targets": [address], "labels": {"run": RUN, "role": roles.get(name, "cluster"), "name": name}}
        for name, address in run.metrics.items()
    ]
    tls = [one for one in found if one["labels"]["role"] == "slave"]
    return [one for one in found if one not in tls], tls
