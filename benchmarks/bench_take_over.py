"""How long a run publishes nothing when its master's host is cut off for good, and a standby takes over.

    python benchmarks/bench_take_over.py [--ways command,lease] [--times N] [--lease-s T] [--delay-ms D]
                                         [--quick] [--json]

Master, standby, slaves, etcd and four clusters are real processes, each host a network namespace, with --delay-ms from
one host to another. The run trains 4 million parameters with the preset safe, in rounds of about a second. At a random
moment of a round the cable of the master's host is cut: nothing gets through, and no connection is closed.

command    `dips master --take-over` is typed on the standby's host at the same moment
lease      no one types anything: both masters share a lease of --lease-s seconds in etcd

taken_over_s, published_s   from the cut until the standby is the master, and until the next version is published
round_s                     usual seconds from one version to the next, before the cut

Each run goes on for five versions, and is stopped. `dips verify RUN --replay` then judges both journals and what every
process recorded, and makes each version again; where it finds anything, this ends with exit code 1. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery.run import CLUSTER_PROGRAM, Tail
from shaped import Cable, NotPossible, ShapedNet

from dips.judge.verify import verify_run
from dips.local.log_files import tape_path
from dips.master.directory import TAPE_NAME

BITS_PER_S, PORT, N_ELEMS, WAIT_S = 1e9, 29400, 4_000_000, 120.0
SLAVES, STEPS_S = ("s0", "s1"), {"a": 0.020, "b": 0.023, "c": 0.025, "d": 0.027}
SYNC_EVERY, VERSIONS_BEFORE, VERSIONS_AFTER = 32, 8, 5
MASTERS, WAYS = ("master", "standby"), ("command", "lease")
DIPS = (sys.executable, "-m", "dips.cli")


class Lost(Exception):
    """The take-over did not keep a promise; says which."""


class Run:
    """One run on hosts of its own. Use as a context manager: leaving it ends every process."""

    def __init__(self, folder: Path, way: str, options: argparse.Namespace) -> None:
        cable = Cable(BITS_PER_S, BITS_PER_S, options.delay_ms / 2)
        hosts = ("master", "standby", "store", *SLAVES, *STEPS_S)
        self.folder, self.net = folder, ShapedNet(dict.fromkeys(hosts, cable), f"dips{os.getpid()}")
        self._way, self._lease_s = way, options.lease_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tapes = {name: Tail(folder / name / TAPE_NAME) for name in MASTERS}

    def __enter__(self) -> Run:
        for made in ("slaves", "tapes"):
            (self.folder / made).mkdir(parents=True)
        self.net.__enter__()
        places = {name: f"{self.net.address(name)}:{PORT}" for name in MASTERS}
        knobs = ["--run-id", "bench", "--insecure", "--journal-replicas", 1, "--slaves", len(SLAVES)]
        knobs += ["--preset", "safe", "--overlap", "none", "--sync-every", SYNC_EVERY, "--linger-s", 2]
        if self._way == "lease":
            store = f"http://{self.net.address('store')}:{PORT}"
            urls = ("--listen-client-urls", store, "--advertise-client-urls", store)
            self.start("store", Path(sys.executable).parent / "etcd", "--data-dir", self.folder / "etcd", *urls)
            knobs += ["--lease", f"etcd:{store}", "--lease-s", self._lease_s]
        options = {name: [*knobs, "--directory", self.folder / name, "--listen", places[name]] for name in MASTERS}
        self.of_standby = options["standby"]
        self.start("master", *DIPS, "master", *options["master"])
        both = ",".join(places.values())
        for name in SLAVES:
            where = ("--data-host", self.net.address(name), "--directory", self.folder / "slaves" / name)
            taped = ("--tape", tape_path(self.folder, name), "--record-pushes")
            whose = ("--run-id", "bench", "--insecure", "--slave-id", name, "--master", both)
            self.start(name, *DIPS, "slave", *whose, *where, *taped)
        for name, step_s in STEPS_S.items():
            os.environ |= {"DIPS_MASTER": both, "DIPS_CLUSTER": name, "DIPS_INSECURE": "true"}
            steps = self.folder / "tapes" / f"{name}.steps"
            self.start(name, sys.executable, CLUSTER_PROGRAM, steps, N_ELEMS, step_s, "own")
        self.start("standby", *DIPS, "master", *self.of_standby, "--standby", places["master"])
        self.operator = (places["standby"], "--insecure")
        return self

    def __exit__(self, *of_error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.net.__exit__(None, None, None)

    def start(self, host: str, *words: object) -> None:
        with (self.folder / f"{host}.log").open("wb") as log:
            self._processes[host] = subprocess.Popen(self._there(host, *words), stdout=log, stderr=log)

    def call(self, host: str, *words: object) -> None:
        """Type a command of dips on a host, and wait for its end."""
        subprocess.run(self._there(host, *DIPS, *words), check=True, capture_output=True)

    def _there(self, host: str, *words: object) -> list[str]:
        return ["ip", "netns", "exec", self.net.namespace(host), *map(str, words)]

    def published(self, master: str) -> dict[int, float]:
        """When each version was published, by its number."""
        return {int(r["version"].partition(":")[2]): r["monotonic_s"] for r in self.tapes[master].of("publish")}

    def ready(self) -> bool:
        """Whether the run is well, and a standby follows that could take over as asked. Raises Lost where it ends."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise Lost(f"{name} has ended: {(self.folder / f'{name}.log').read_text()[-500:]}")
        said = (self.folder / "standby.log").read_text()
        watches = self._way != "lease" or "watches" in said
        return "follows the master" in said and watches and len(self.published("master")) > VERSIONS_BEFORE

    def ended(self) -> bool:
        return self._processes["standby"].poll() is not None


def wait(until: Callable[[], bool], what: str) -> None:
    """Raises Lost after WAIT_S."""
    end_s = time.monotonic() + WAIT_S
    while not until():
        if time.monotonic() > end_s:
            raise Lost(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.01)


def measure(way: str, options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, Run(Path(made) / "run", way, options) as run:
        wait(run.ready, "a run that is followed")
        before = run.published("master")
        round_s = statistics.median(b - a for a, b in itertools.pairwise(sorted(before.values())))
        time.sleep(rng.uniform(0.0, round_s))
        run.net.cut("master")
        cut_s = time.monotonic()
        if way == "command":
            run.call("standby", "master", "--take-over", *run.of_standby)
        first = run.tapes["standby"]
        wait(lambda: any(first.of("master-started")), "the standby is the master")
        newest = max(run.published("master"))
        wait(lambda: max(run.published("standby"), default=0) >= newest + VERSIONS_AFTER, "the run goes on")
        run.call("standby", "stop", *run.operator)
        wait(run.ended, "the run ends")
        after = {n: at_s for n, at_s in run.published("standby").items() if n > newest}
        taken_s = next(first.of("master-started"))["monotonic_s"]
        judge(run)
        next_s = min(after.values()) - cut_s
        return {"way": way, "taken_over_s": taken_s - cut_s, "published_s": next_s, "round_s": round_s}


def judge(run: Run) -> None:
    """Raises Lost where a promise was not kept."""
    report = verify_run(run.folder, replay=True)
    if not report.ok or report.replayed is None or report.replayed.skipped:
        raise Lost(f"dips verify: {report.verdict} {[str(each) for each in report.violations]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help="which, with commas (default: both)")
    parser.add_argument("--times", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("--lease-s", type=float, default=2.0, help="default 2")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, between two hosts (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="each way once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, rows = random.Random(options.seed), list[dict[str, Any]]()
    try:
        for n, way in itertools.product(range(1 if options.quick else options.times), options.ways.split(",")):
            rows.append(measure(way, options, rng))
            print(f"{n + 1}. {rows[-1]}", file=sys.stderr)
    except NotPossible as why:
        print(f"bench_take_over cannot run here: {why}", file=sys.stderr)
        return 2
    except Lost as lost:
        print(f"bench_take_over: {lost}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"results": rows}, indent=2))
        return 0
    for way in options.ways.split(","):
        mine = [row for row in rows if row["way"] == way]
        for what in ("taken_over_s", "published_s", "round_s"):
            least, *_ = found = sorted(row[what] for row in mine)
            print(
                f"{way:<8} {what:<13} least {least:6.2f}, median {statistics.median(found):6.2f}, most {found[-1]:6.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
