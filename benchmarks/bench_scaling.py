"""How much of the ideal throughput is left as clusters are added: 1 to 16 of them, with timed stand-ins for compute.

Real processes on this machine (a master, slaves, k clusters), torch-free: an inner step sleeps, so that two cores carry
16 clusters, and everything else is the real thing. A cluster alone, without any exchange, would make one step every
--step-ms: that is the ideal. share_of_ideal = steps x step time / elapsed, of all clusters together, from the first
step to each cluster's last exchange. Rows: even clusters, and uneven ones, the slowest half as fast as the fastest
(steps of 1 to 2 times --step-ms), with and without --dynamic, which fits each cluster's steps to its speed.

What the exchange costs here is this machine's: all k clusters share its cores with the slaves, so k clusters that
exchange at once wait k times as long. With --step-ms and --sync-every the inner loop can be made as long as wished; the
paper's takes an hour or two and leaves 98.2 to 98.6 %.

    python benchmarks/bench_scaling.py [--clusters K ...] [--seconds S] [--sync-every H] [--step-ms T] [--params N]

applied: share of the pushes that were merged. Nothing here judges a number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from peers.party import Failed, end_in_order
from peers.systems import TimedDips

KINDS = ("even", "uneven", "uneven, dynamic")
SLOWEST = 2.0
"""Times of the slowest cluster's step to the fastest's, where they are uneven."""


@dataclass(frozen=True)
class Result:
    """share_of_ideal: median of the repeats; rounds: fewest exchanges of a cluster; gap_s: mean, of an exchange."""

    kind: str
    clusters: int
    share_of_ideal: float
    spread: float
    steps_per_s: float
    ideal_steps_per_s: float
    rounds: int
    gap_s: float
    applied: float


def measure(kind: str, clusters: int, options: argparse.Namespace) -> Result:
    """One row. Raises peers.party.Failed when a process ends."""
    steps_ms = [options.step_ms] * clusters
    if kind != "even" and clusters > 1:
        steps_ms = [options.step_ms * (1 + (SLOWEST - 1) * i / (clusters - 1)) for i in range(clusters)]
    master = {"sync-every": options.sync_every, "heartbeat-s": 2.0}
    if kind.endswith("dynamic"):
        master |= {"preset": "dynamic"}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        directory = Path(folder) / "run"
        party = TimedDips(
            kind, directory, clusters, options.params, slaves=options.slaves, master=master, step_ms=steps_ms
        )
        with party:
            party.run(options.seconds / 3)  # speeds are learnt, first allocations made
            runs = [party.run(options.seconds) for _ in range(options.repeats)]
    return _result(kind, steps_ms, runs)


def _result(kind: str, steps_ms: list[float], runs: list[list[dict[str, float]]]) -> Result:
    if not all(done["rounds"] for run in runs for done in run):
        raise SystemExit(f"{len(steps_ms)} clusters, {kind}: one made no exchange: give more --seconds")
    ideal = sum(1e3 / ms for ms in steps_ms)
    shares = [sum(done["steps"] / done["took_s"] for done in run) / ideal for run in runs]
    gaps = [
        (done["took_s"] - done["steps"] * ms / 1e3) / done["rounds"]
        for run in runs
        for done, ms in zip(run, steps_ms, strict=True)
    ]
    every = [done for run in runs for done in run]
    share = statistics.median(shares)
    return Result(
        kind, len(steps_ms), share, (max(shares) - min(shares)) / share, share * ideal, ideal,
        int(min(done["rounds"] for done in every)), statistics.mean(gaps),
        sum(done["applied"] for done in every) / max(1, sum(done["pushes"] for done in every)),
    )  # fmt: skip


def _table(results: list[Result]) -> str:
    head = f"{'clusters':<18}{'k':>3}{'share_of_ideal':>16}{'spread':>8}{'steps/s':>10}{'ideal':>8}"
    lines = [f"{head}{'rounds':>8}{'gap s':>8}{'applied':>9}"]
    lines += [
        f"{r.kind:<18}{r.clusters:>3}{r.share_of_ideal:>16.3f}{r.spread:>8.1%}{r.steps_per_s:>10.1f}"
        f"{r.ideal_steps_per_s:>8.1f}{r.rounds:>8}{r.gap_s:>8.3f}{r.applied:>9.0%}"
        for r in results
    ]
    return "\n".join(lines)


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--slaves", type=int, default=2)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--sync-every", type=int, default=64, help="H: inner steps between two exchanges")
    parser.add_argument("--step-ms", type=float, default=125.0, help="an inner step of the fastest cluster")
    parser.add_argument("--seconds", type=float, default=34.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where servers keep their files; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="a few seconds: does everything run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.clusters, options.sync_every, options.repeats = [2], 20, 1
        options.seconds, options.step_ms = 3.0, 10.0
    if min(*options.clusters, options.slaves, options.params, options.sync_every, options.repeats) < 1:
        parser.error("every count must be at least 1")
    results = []
    for kind in options.kinds:
        for clusters in options.clusters:
            if clusters == 1 and kind != KINDS[0]:
                continue
            print(f"{clusters} clusters, {kind}", file=sys.stderr, flush=True)
            results.append(measure(kind, clusters, options))
    setting = {
        "params": options.params, "slaves": options.slaves, "sync_every": options.sync_every,
        "step_ms": options.step_ms, "seconds": options.seconds, "repeats": options.repeats, "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2), "machine": platform.machine(),
    }  # fmt: skip
    if options.json:
        print(json.dumps({"setting": setting, "results": [asdict(result) for result in results]}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_table(results))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
