"""What the master's schedule makes of slow links, in virtual time: the table of docs/performance.md.

    python benchmarks/bench_schedule.py [--quick] [--json]

Each cell is time / time alone with the schedule: mean and worst of the clusters with fast links.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice

from flows.simulated import Race, TransferMethod, run

from dips.lab.sim.network import ProcessRates
from dips.master.state.schedule import Way

_GBIT = ProcessRates(1e9, 1e9)
_FAST = dict.fromkeys(("a", "b", "c"), _GBIT)
_FOUR = {**_FAST, "slow": ProcessRates(1e8, 1e8)}
_SLAVES = {f"s{i:02d}": _GBIT for i in range(16)}


def _first(n: int) -> dict[str, ProcessRates]:
    return dict(list(_SLAVES.items())[:n])


def races(way: Way, delay_s: float) -> dict[str, Race]:
    """The races of the table; 1 Gbit/s unless noted."""
    eight = {f"c{i}": _GBIT for i in range(8)}
    two, wide = dict.fromkeys(("a", "b"), _GBIT), {name: ProcessRates(2e9, 2e9) for name in _first(4)}
    late = {"slow": 0.0, "a": 1.0, "b": 1.4, "c": 1.9}
    cast: dict[str, tuple[dict[str, ProcessRates], dict[str, ProcessRates], dict[str, float]]] = {
        "4 clusters, one at 0.1, 4 slaves": (_FOUR, _first(4), {}),
        "the same, begun one after the other": (_FOUR, _first(4), late),
        "the same at once, one slave at 0.3": (_FOUR, {**_first(4), "s00": ProcessRates(3e8, 3e8)}, {}),
        "4 clusters, one at 0.1, 1 slave": (_FOUR, _first(1), {}),
        "8 clusters, 2 slaves": (eight, _first(2), {}),
        "8 clusters, 4 slaves": (eight, _first(4), {}),
        "8 clusters, 16 slaves": (eight, _first(16), {}),
    }
    of_ranks = {
        "2 clusters of 4 ranks, 4 slaves": _first(4),
        "the same, slaves at 2": wide,
    }
    return {
        name: Race(clusters, slaves, delay_s, way=way, begins_s=begins)
        for name, (clusters, slaves, begins) in cast.items()
    } | {name: Race(two, slaves, delay_s, way=way, ranks=dict.fromkeys(two, 4)) for name, slaves in of_ranks.items()}


def slowdowns(race: Race, method: TransferMethod) -> dict[str, float]:
    """Each cluster's time / its time alone, with the schedule."""
    return {
        name: took_s / run(race.alone(name), TransferMethod.SCHEDULED)[name]
        for name, took_s in run(race, method).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two races of each kind: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(f"{'':45}" + "".join(f"{method.value:>15}" for method in TransferMethod))
    for way in Way:
        for delay_s in (0.0002, 0.025):
            for name, race in islice(races(way, delay_s).items(), 2 if options.quick else None):
                row: dict[str, object] = {"way": way.value, "delay_s": delay_s, "race": name}
                cells = []
                for method in TransferMethod:
                    fast = [x for cluster, x in slowdowns(race, method).items() if cluster != "slow"]
                    row[method.value] = {"mean": sum(fast) / len(fast), "worst": max(fast)}
                    cells.append(f"{sum(fast) / len(fast):8.2f}  {max(fast):.2f}")
                rows.append(row)
                if not options.json:
                    print(f"{way.value} {1e3 * delay_s:4g} ms  {name:35}" + "".join(f"{cell:>15}" for cell in cells))
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
