"""One whole outer round, from "inner loop finished" to "new parameters in place": Di-PS and what people use today.

Real processes on this machine: a master, slaves and clusters that run the README's loop around a torch model. The
clusters end their inner loops at the same moment; the time of a cluster is that of its optimizer.step(), which pushes,
waits for the verdict, pulls and installs. The same work by others, in the same run and turn by turn (every cycle starts
each system again, and its first rounds are not counted):

    tcp        the floor: the same bytes over raw TCP in both directions, landed, one copy out of the model and one in
    torchft    DiLoCo over gloo with one fragment, synchronous quorum
    hivemind   the same algorithm around hivemind's averager, float32, the group found before the inner loop ends
    plain      a straightforward parameter server: torch.save over ZeroMQ, torch's SGD (benchmarks/peers)

All begin with the same parameters, make the same inner moves, and take the same outer step; a few elements of every
tensor are compared after each round with what it must give, so that no one is fast by leaving work out (but for tcp,
which computes nothing). Between two rounds all rest for --pause seconds, where clusters would compute: what a system
does then (Di-PS writes its snapshot) is not in the time. Nothing here judges a number.

    python benchmarks/bench_sync.py [--params N] [--clusters K] [--slaves S] [--rounds R] [--cycles C] [--peers all]

cpu: processor seconds of all processes of a system in a round. worker: the most that a cluster's process held beyond
its model (parameters, inner optimizer, torch, Python) at any moment. torchft and hivemind are installed into
environments of their own under --venvs (gigabytes, once); a system that cannot be installed is left out and named.

The second table says where a round's time goes. It follows the slowest cluster of each round from step to step, as the
tapes of the run's processes tell them (tcp tells its own steps; of the others only the whole is known), so its stages
add up to the round. wall: mean milliseconds of the stage over the counted rounds. cpu: mean milliseconds of processor
time that all processes of a kind used meanwhile, also for clusters that were in another stage. A stage with "call" in
its name is the way of a request to the master and back, with what both do for it.

Other work on the machine lengthens a round: each waits up to --gate seconds for a moment with less than --foreign
processors of other work. Rounds with more than that meanwhile are left out where a system has quiet ones; "quiet" says
how many there were, and with none all are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peers.environments import NotInstallable
from peers.party import WHOLE, Failed, Party, Turn, end_in_order
from peers.stages import NotOnTape, Stage, mean
from peers.systems import Dips, Hivemind, Plain, Tcp, Torchft
from peers.work import TOLERANCE, expected
from quiet import Gate

OURS = "dips"
PEERS = ("tcp", "torchft", "hivemind", "plain")
WARM_UP = 2
"""Rounds at the start of a cycle that are not counted: first allocations."""


class Wrong(Exception):
    """A system did not do the work."""


@dataclass(frozen=True)
class Result:
    """Times in seconds: medians over all counted rounds of the slowest and the fastest cluster of each.

    rounds: those that count; quiet: those with little other work, of measured ones. spread: (slowest - fastest) /
    median over the rounds. ratio: slowest_s / that of Di-PS with durability async. stages: means over the rounds.
    """

    name: str
    rounds: int
    quiet: int
    measured: int
    slowest_s: float
    fastest_s: float
    best_s: float
    spread: float
    cpu_s: float
    worker_beyond_model_bytes: int
    resident_bytes: dict[str, int]
    stages: Sequence[Stage]
    ratio: float = 0.0


class Series:
    """What was measured of one system, over all cycles."""

    def __init__(self, name: str, make: Callable[[Path], Party]) -> None:
        self.name = name
        self._make = make
        self._turns: list[tuple[Turn, list[Stage]]] = []
        self._beyond: list[int] = []
        self._resident: dict[str, int] = {}

    @property
    def measured(self) -> bool:
        return bool(self._turns)

    def cycle(self, directory: Path, rounds: int, pause_s: float, gate: Gate) -> None:
        """Counts whole or not at all. Raises Failed, Wrong or peers.stages.NotOnTape."""
        turns, beyond = list[tuple[Turn, list[Stage]]](), list[int]()
        with self._make(directory) as party:
            for number in range(WARM_UP + rounds):
                turn = party.turn(number, pause_s, gate)
                _check(party, turn, number + 1)
                if number >= WARM_UP:
                    turns.append((turn, party.stages(turn)))
                    beyond += [peak - own for peak, own in zip(turn.peak_bytes, party.model_bytes, strict=True)]
            self._resident = party.resident_bytes()
        self._turns += turns
        self._beyond += beyond

    def result(self, gate: Gate) -> Result:
        quiet = gate.quiet(self._turns, lambda measured: measured[0].foreign)
        counted = quiet or self._turns
        slowest = [max(turn.took_s) for turn, _ in counted]
        return Result(
            self.name,
            len(counted),
            len(quiet),
            len(self._turns),
            statistics.median(slowest),
            statistics.median(min(turn.took_s) for turn, _ in counted),
            min(slowest),
            (max(slowest) - min(slowest)) / statistics.median(slowest),
            statistics.median(turn.cpu_s for turn, _ in counted),
            max(self._beyond),
            self._resident,
            mean([stages for _, stages in counted]),
        )


def _check(party: Party, turn: Turn, turns: int) -> None:
    """Every cluster holds what the rounds so far must have given. Raises Wrong."""
    if isinstance(party, Tcp) or (isinstance(party, Dips) and party.wire_dtype != "float32"):
        return
    wanted = expected(party.first, party.tensor_of, party.clusters, turns)
    for cluster, sample in enumerate(turn.samples):
        off = max(abs(a - b) for a, b in zip(sample, wanted, strict=True))
        if off > TOLERANCE:
            raise Wrong(f"{party.name}: after round {turns}, cluster {cluster} is off by {off:.2g} from the outer step")


def systems(options: argparse.Namespace) -> list[Series]:
    """What is to be measured, in the order of each cycle."""
    one = {"threads": options.threads}
    sharded = {"slaves": options.slaves}
    own = {**one, "environments": options.venvs}
    kinds: dict[str, tuple[type[Party], dict[str, Any]]] = {
        OURS: (Dips, {**one, **sharded}),
        f"{OURS}, sync": (Dips, {**one, **sharded, "durability": "sync"}),
        **{f"{OURS}, {wire}": (Dips, {**one, **sharded, "wire_dtype": wire}) for wire in options.wire},
        "tcp": (Tcp, sharded),
        "torchft": (Torchft, {**own, "bucket_mb": options.torchft_bucket_mb}),
        "hivemind": (Hivemind, {**own, "part_bytes": options.hivemind_part_bytes}),
        "plain": (Plain, {**one, **sharded}),
    }
    wanted = set(_listed(options.peers))
    if not options.only_peers:
        wanted |= {name for name in kinds if name.startswith(OURS)}
    if options.only_async:
        wanted.discard(f"{OURS}, sync")
    return [Series(name, _maker(*kind, name, options)) for name, kind in kinds.items() if name in wanted]


def _maker(kind: type[Party], more: dict[str, Any], name: str, options: argparse.Namespace) -> Callable[[Path], Party]:
    return lambda directory: kind(name, directory, options.clusters, options.params, **more)


def measure(options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """The results, and a sentence for each system, or cycle of it, that was left out. Raises Failed or Wrong when that
    is ours; another system that does not do the work costs its own cycle, not everybody's hours.
    """
    series, left_out, gate = systems(options), list[str](), Gate(options.gate, options.foreign)
    for cycle in range(options.cycles):
        for one in list(series):
            print(f"cycle {cycle + 1} of {options.cycles}: {one.name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=options.directory) as folder:
                try:
                    one.cycle(Path(folder) / "run", options.rounds, options.pause, gate)
                except NotInstallable as why:
                    series.remove(one)
                    left_out.append(str(why))
                except (Failed, Wrong) as why:
                    if one.name.startswith(OURS):
                        raise
                    left_out.append(f"cycle {cycle + 1} of {one.name}: {why}")
    results = [one.result(gate) for one in series if one.measured]
    ours = next((result.slowest_s for result in results if result.name == OURS), None)
    if ours is None:
        return results, left_out
    return [replace(result, ratio=result.slowest_s / ours) for result in results], left_out


def _table(results: Sequence[Result]) -> str:
    head = f"{'system':<18}{'rounds':>7}{'quiet':>8}{'slowest s':>11}{'fastest s':>11}{'best s':>9}{'spread':>8}"
    lines = [f"{head}{'x dips':>8}{'cpu s':>8}{'worker GB':>11}   all processes now, GB"]
    for r in results:
        times = (
            f"{r.slowest_s:>11.3f}{r.fastest_s:>11.3f}{r.best_s:>9.3f}{r.spread:>8.0%}{r.ratio:>8.2f}{r.cpu_s:>8.2f}"
        )
        held = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in r.resident_bytes.items())
        quiet = f"{r.quiet}/{r.measured}"
        lines.append(f"{r.name:<18}{r.rounds:>7}{quiet:>8}{times}{r.worker_beyond_model_bytes / 1e9:>11.2f}   {held}")
    return "\n".join(lines)


def _stage_tables(results: Sequence[Result]) -> str:
    """Of each system that tells its stages; then the whole of all, against the two that ours is compared with."""
    lines = []
    for r in results:
        if len(r.stages) == 1:
            continue
        kinds = list(r.stages[0].cpu_s)
        whole_s, whole_cpu_s = sum(s.wall_s for s in r.stages), sum(sum(s.cpu_s.values()) for s in r.stages)
        lines += [
            "",
            f"{r.name + ': stage':<34}{'wall ms':>9}{'share':>7}{'cpu ms':>9}" + "".join(f"{k:>10}" for k in kinds),
        ]
        lines += [
            f"{s.name:<34}{1e3 * s.wall_s:>9.1f}{s.wall_s / whole_s:>7.0%}{1e3 * sum(s.cpu_s.values()):>9.1f}"
            + "".join(f"{1e3 * s.cpu_s[kind]:>10.1f}" for kind in kinds)
            for s in r.stages
        ]
        lines.append(f"{WHOLE:<34}{1e3 * whole_s:>9.1f}{1:>7.0%}{1e3 * whole_cpu_s:>9.1f}")
    return "\n".join(lines)


def against(results: Sequence[Result]) -> dict[str, float]:
    """Medians of our rows over those of torchft and of the floor, where they were measured: time and processor time."""
    of = {result.name: result for result in results}
    return {
        f"{ours}: {what} of {other}'s": getattr(of[ours], key) / getattr(of[other], key)
        for other in ("torchft", "tcp")
        for ours in of
        if ours.startswith(OURS) and other in of
        for what, key in (("time", "slowest_s"), ("cpu", "cpu_s"))
    }


def _listed(peers: str) -> Sequence[str]:
    return {"all": PEERS, "none": ()}.get(peers, tuple(peers.split(",")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=100_000_000, help="parameters of the model, float32")
    parser.add_argument("--clusters", type=int, default=2)
    parser.add_argument("--slaves", type=int, default=2, help="slaves, and shares of the plain server and of tcp")
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds in a cycle")
    parser.add_argument("--cycles", type=int, default=3, help="times that each system takes its turn")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between two rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in each cluster")
    parser.add_argument("--peers", default="all", help=f"all, none, or some of {','.join(PEERS)}")
    parser.add_argument("--wire", nargs="*", default=[], help="rows of Di-PS with these wire types, such as bfloat16")
    parser.add_argument("--only-async", action="store_true", help="no row with durability sync")
    parser.add_argument("--only-peers", action="store_true", help="no row of Di-PS: to try settings of the others")
    parser.add_argument("--torchft-bucket-mb", default="", help="torchft's use_bucketization with this cap")
    parser.add_argument("--hivemind-part-bytes", default="", help="hivemind's part_size_bytes")
    parser.add_argument("--venvs", type=Path, default=Path("runs/bench-venvs"), help="environments of the peers")
    parser.add_argument("--directory", type=Path, help="where servers keep their files; default: a temporary folder")
    parser.add_argument("--gate", type=float, default=5.0, help="longest wait for a quiet machine before a round, s")
    parser.add_argument("--foreign", type=float, default=0.3, help="processors of other work in a quiet round, at most")
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds: does everything run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.params, options.rounds, options.cycles, options.pause = 1_000_000, 2, 1, 0.1
        options.gate = 0.0
    unknown = set(_listed(options.peers)) - set(PEERS)
    if unknown or min(options.params, options.clusters, options.slaves, options.rounds, options.cycles) < 1:
        parser.error(f"--peers takes all, none, or some of {','.join(PEERS)}; every count must be at least 1")
    return options


def main() -> int:
    end_in_order()
    options = _arguments()
    results, left_out = measure(options)
    setting = {
        "params": options.params, "clusters": options.clusters, "slaves": options.slaves, "pause_s": options.pause,
        "threads": options.threads, "cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2),
        "machine": platform.machine(), "gate_s": options.gate, "foreign": options.foreign,
    }  # fmt: skip
    if options.json:
        found = {"setting": setting, "left_out": left_out, "results": [asdict(r) for r in results]}
        print(json.dumps({**found, "ratios": against(results)}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_table(results))
        print(_stage_tables(results))
        print("".join(f"\n{name:<34}{value:>6.2f}" for name, value in against(results).items()))
        for sentence in left_out:
            print(f"left out: {sentence}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failed, Wrong, NotOnTape) as failed:
        sys.exit(str(failed))
