"""What a gigabyte costs when several clusters move it to and from several slaves, against one pair in the same run.

Real data ports and carriers over loopback, each slave and each cluster in a process of its own; no master: its
scheduler orders the transfers. All clusters push, then pull, a model each, at the same moment. For each number of
slaves and clusters, a push and a pull of one cluster with one slave alternate with those of all; the ratio compares the
medians of the processor seconds, of all processes together and kernel included, for each gigabyte.

    python benchmarks/bench_ends.py [--slaves 1 2 4 8] [--clusters 1 2 3 4] [--mib N] [--repeats R] [--quick] [--json]

What the ratio contains besides the bytes: each transfer costs 1 to 2 ms for each slave (connection, question, digest),
so small models compare worse; slaves also take the products between the pushes of several clusters, which MEASURE would
take later; and on one machine all ends share its caches.

cpu s/GB and of one pair: of the processor, which is what a run with machines of its own for each role pays. GB/s: of
all clusters together, until the slowest has ended; on one machine all ends share its processors, so this says only how
many they are. Other work on the machine makes a transfer dearer: each waits up to --gate seconds for a moment with less
than --foreign processors of it. Nothing here judges a number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flows.cast import Cast, Loopback
from flows.simulated import TransferMethod
from quiet import Gate

from dips.master.state.schedule import Way

MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """Medians over the repeats. of_one_pair: ratio of cpu_s_per_gb; spread: of that, (most - least) / median."""

    way: str
    slaves: int
    clusters: int
    gbytes_per_s: float
    cpu_s_per_gb: float
    spread: float
    of_one_pair: float


def rows_of(pair: Cast, slaves: int, clusters: int, options: argparse.Namespace) -> list[Row]:
    """A row for each way."""
    gate, n_bytes = Gate(options.gate, options.foreign), options.mib * MIB
    names = [f"c{i}" for i in range(clusters)]
    cast = Cast(Loopback(), names, [f"s{i}" for i in range(slaves)], n_bytes)
    wall: dict[Way, list[float]] = {way: [] for way in Way}
    cpu: dict[Way, list[float]] = {way: [] for way in Way}
    cpu_of_pair: dict[Way, list[float]] = {way: [] for way in Way}
    try:
        for repeat in range(options.repeats + 1):
            for way in Way:
                alone = _race(pair, way, gate)
                together = _race(cast, way, gate)
                if repeat:  # the first one warms up
                    cpu_of_pair[way].append(alone[1])
                    wall[way].append(together[0])
                    cpu[way].append(together[1] / clusters)
    finally:
        cast.close()
    gbytes = n_bytes / 1e9
    return [
        Row(
            way.value, slaves, clusters, clusters * gbytes / statistics.median(wall[way]),
            statistics.median(cpu[way]) / gbytes, (max(cpu[way]) - min(cpu[way])) / statistics.median(cpu[way]),
            statistics.median(cpu[way]) / statistics.median(cpu_of_pair[way]),
        )
        for way in Way
    ]  # fmt: skip


def _race(cast: Cast, way: Way, gate: Gate) -> tuple[float, float]:
    """The time until all clusters have ended, and the processor seconds of all processes."""
    gate.wait(lambda: cast.cpu_s() + time.process_time())
    before_s = cast.cpu_s()
    took_s = max(cast.race(cast.clusters, way, TransferMethod.SCHEDULED).values())
    return took_s, cast.cpu_s() - before_s


def _table(rows: Sequence[Row]) -> str:
    lines = [f"{'way':<6}{'slaves':>7}{'clusters':>10}{'GB/s':>8}{'cpu s/GB':>10}{'spread':>8}{'of one pair':>13}"]
    lines += [
        f"{r.way:<6}{r.slaves:>7}{r.clusters:>10}{r.gbytes_per_s:>8.2f}{r.cpu_s_per_gb:>10.3f}{r.spread:>8.0%}"
        f"{r.of_one_pair:>13.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slaves", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clusters", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--mib", type=int, default=512, help="model of each cluster")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gate", type=float, default=3.0, help="longest wait for a quiet machine before a transfer, s")
    parser.add_argument(
        "--foreign", type=float, default=0.3, help="processors of other work in a quiet moment, at most"
    )
    parser.add_argument("--quick", action="store_true", help="small models, once: does everything run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.slaves, options.clusters, options.mib, options.repeats, options.gate = [2], [2], 8, 1, 0.0
    if min(*options.slaves, *options.clusters, options.mib, options.repeats) < 1:
        parser.error("every count must be at least 1")
    rows = []
    pair = Cast(Loopback(), ["c0"], ["s0"], options.mib * MIB)
    try:
        for slaves in options.slaves:
            for clusters in options.clusters:
                print(f"slaves {slaves}, clusters {clusters}", file=sys.stderr, flush=True)
                rows += rows_of(pair, slaves, clusters, options)
    finally:
        pair.close()
    setting = {
        "mib": options.mib, "repeats": options.repeats, "gate_s": options.gate, "foreign": options.foreign,
        "cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2), "machine": platform.machine(),
    }  # fmt: skip
    if options.json:
        print(json.dumps({"setting": setting, "results": [asdict(row) for row in rows]}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
