"""How far the times of `dips simulate` are from real ones: the same runs, played and with real processes.

    python benchmarks/bench_simulation.py [--cases equal-waiting,slow-defaults] [--rounds R] [--repeats N]
                                          [--setups DIR] [--quick] [--json]

The real run: a master, two slaves and --clusters clusters, each in a network namespace behind a link of its own (--mbit
each way, --delay-ms one way), with inner steps of a set length; each slave's link carries as much as all clusters'. The
simulated one: a set-up file that this program writes, played by the simulation's own code. In both, all clusters begin
their first step at the same moment.

cases    equal   all clusters and links equal        waiting   preset safe, overlap none, grace_s 5: clusters wait
         gaps    steps 0 to 50 % longer                        for exchanges and for each other
         slow    one link ten times slower           defaults  the defaults of `dips master`
         narrow  as equal; the slaves' links together carry just what all clusters' do

inputs   measured before, without Di-PS: what one TCP stream carries through a cluster's link, its round trip, and
         numpy's copy of the model. Set: all links' rates, of which TCP carries the same part, step times, the model's
         size, all settings. From the records of the real runs' slaves: how long MEASURE and PREPARE take, as
         memory_rate and disk_rate.
compared tokens a second of all clusters, their share of ideal (every cluster computes all the time), seconds of an
         exchange's push, verdict wait and pull, clusters merged in a round, staleness in versions. Both ways they are
         computed by the same code, from the same records of the clusters' tapes.

From the moment at which the last cluster begins its exchange number 2 (after joins and first allocations) until the
last one has begun --rounds more. `real` is the median of --repeats runs, `spread` their largest less their smallest,
`error` the simulated value less the median, in percent of it. "other" is other work on the machine, in processors: with
much of it the real run is slower than its rates. Nothing here judges a number. Needs root, for the namespaces; without,
it says so and exits with code 2.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flows.shaped_ends import ClusterSite, TcpSite
from goodput.cell import Usage
from goodput.conditions import CONDITIONS, Condition, Setting
from goodput.systems import BUFFERS, SLAVES, Dips, DipsWaiting
from peers.party import Failed, end_in_order
from peers.work import OUTER_LR, OUTER_MOMENTUM
from shaped import Cable, NotPossible, ShapedNet, require_root

from dips.core.layout import FLOAT32_BYTES
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.kernel import SimulatedProcess
from dips.lab.sim.scale.rates import measure_s, outer_step_s
from dips.lab.sim.scale.run import Failures, layout_of
from dips.lab.sim.scale.scenario import Scenario, load_scenario
from dips.lab.sim.scale.world import ScaleWorld
from dips.master.directory import TAPE_NAME

WARM_UP = 2
"""Exchanges of each cluster that are not counted: first allocations, a speed that is learnt."""

LEAD_S, LOOK_S = 1.0, 0.5
JOINED_S = 300.0
"""Virtual seconds after which the simulated clusters begin; all have joined by then."""

CHUNK_PARAMS = 1 << 18
"""Of the default chunk_bytes: the simulated layers are as large as real chunks."""

Record = Mapping[str, Any]


# ---- what is compared ----


@dataclass(frozen=True)
class Exchange:
    """One push, its verdict and the pull that follows, as a cluster's tape has them. Times on one clock, in seconds."""

    begun_s: float
    sent_s: float
    decided_s: float
    installed_s: float
    tokens: int
    applied: bool
    base: int
    version: int


def exchanges_of(lines: Iterable[Record]) -> list[Exchange]:
    """The complete ones, in their order; the seed is none."""
    found: list[Exchange] = []
    begun: Record | None = None
    times: dict[str, Record] = {}
    for line in lines:
        if line["kind"] == "push_begun":
            begun, times = (line if line["tokens"] else None), {}
        elif begun is not None and line["kind"] in ("push_sent", "verdict", "installed"):
            times[line["kind"]] = line
            if line["kind"] == "installed" and len(times) == len(("push_sent", "verdict", "installed")):
                sent, verdict = times["push_sent"], times["verdict"]
                found.append(
                    Exchange(
                        begun["monotonic_s"], sent["monotonic_s"], verdict["monotonic_s"], line["monotonic_s"],
                        begun["tokens"], verdict["verdict"] == "APPLIED", _number(begun["base"]),
                        _number(verdict["version"]),
                    )
                )  # fmt: skip
                begun = None
    return found


def _number(version: object) -> int:
    """Of "timeline:number"."""
    return int(str(version).rpartition(":")[2])


def enough(runs: Mapping[str, Sequence[Exchange]], rounds: int) -> bool:
    """Whether every cluster has as many exchanges as score() needs."""
    return all(len(exchanges) > WARM_UP + rounds for exchanges in runs.values())


@dataclass(frozen=True)
class Score:
    """Of one run. tokens_per_s: of all clusters together. push_s, wait_s, pull_s: means of an exchange. merged: mean
    of clusters in a version; staleness: mean of versions between a push's base and the one before its own."""

    tokens_per_s: float
    share_of_ideal: float
    push_s: float
    wait_s: float
    pull_s: float
    merged: float
    staleness: float


def score(runs: Mapping[str, Sequence[Exchange]], steps_s: Mapping[str, float], rounds: int) -> Score:
    """By cluster. A step has one token; those between two pushes are in the second one, also when it was made during
    an exchange."""
    begin_s = max(exchanges[WARM_UP].begun_s for exchanges in runs.values())
    end_s = max(exchanges[WARM_UP + rounds].begun_s for exchanges in runs.values())
    tokens_per_s, merged, every = 0.0, defaultdict[int, int](int), list[Exchange]()
    for exchanges in runs.values():
        first, *counted = [each for each in exchanges if begin_s <= each.begun_s <= end_s]
        tokens = sum(each.tokens for each in counted if each.applied)
        tokens_per_s += tokens / (counted[-1].begun_s - first.begun_s)
        every += counted
    for each in every:
        if each.applied:
            merged[each.version] += 1
    # The first and the last version of this time may have pushes outside it.
    whole = [merged[version] for version in sorted(merged)][1:-1] or list(merged.values())
    return Score(
        tokens_per_s,
        tokens_per_s / sum(1 / step_s for step_s in steps_s.values()),
        statistics.mean(each.sent_s - each.begun_s for each in every),
        statistics.mean(each.decided_s - each.sent_s for each in every),
        statistics.mean(each.installed_s - each.decided_s for each in every),
        statistics.mean(whole),
        statistics.mean(each.version - 1 - each.base for each in every if each.applied),
    )


# ---- the real run ----


class Taped(Dips):
    """With the slaves' tapes, and with slaves whose links carry more than all clusters send. slave_part: of the rate of
    all clusters' links, what each slave's has."""

    slave_part: ClassVar[float] = 1.0

    @classmethod
    def sites(cls, setting: Setting, condition: Condition) -> dict[str, Cable]:
        bits_per_s = cls.slave_part * setting.clusters * setting.bits_per_s
        return super().sites(setting, condition) | dict.fromkeys(cls.servers[1:], Cable(bits_per_s, bits_per_s))

    def _role(self, name: str, role: str, knobs: Mapping[str, object]) -> None:
        tape = {"tape": self.directory / f"{name}.tape.jsonl"} if role == "slave" else {}
        super()._role(name, role, {**knobs, **tape})

    def exchanges(self) -> dict[str, list[Exchange]]:
        return {f"c{number}": exchanges_of(self.tail(self._tape(number)).read()) for number in range(self.clusters)}

    def update_rates(self) -> tuple[float, float]:
        """memory_rate and disk_rate in bytes/s, from the slaves' times of MEASURE and PREPARE: medians of all rounds.

        A slave holds half of the model; a round's verdicts tell how many pushes it read.
        """
        merged = defaultdict[str, int](int)
        for line in self.tail(self.directory / "master" / TAPE_NAME).of("verdict"):
            merged[line["round"]] += 1
        n_elems = self.params // SLAVES
        memory, disk = [], []
        for name in self.servers[1:]:
            tape = self.tail(self.directory / f"{name}.tape.jsonl")
            measured = {line["round"]: line["took_s"] for line in tape.of("measured")}
            for line in tape.of("prepared"):
                k, took_s = merged[line["round"]], measured.get(line["round"])
                if k and took_s is not None:
                    memory.append(measure_s(n_elems, k, 1.0) / took_s)
                    write_s = line["took_s"] - outer_step_s(n_elems, k, memory[-1])
                    disk.append(2 * FLOAT32_BYTES * n_elems / max(write_s, 1e-4))
        return statistics.median(memory), statistics.median(disk)


class TapedWaiting(Taped):
    """With a long grace window: else one push that is a second late, on a busy machine, would part the clusters for
    good."""

    rules: Mapping[str, object] = {**DipsWaiting.rules, "grace-s": 5.0}


class TapedNarrow(Taped):
    """With slaves whose links together carry just what all clusters send."""

    slave_part = 1 / SLAVES


@dataclass(frozen=True)
class Case:
    kind: type[Taped]
    condition: Condition


CASES = {
    f"{name}-{rules}": Case(kind, CONDITIONS[letter])
    for name, letter in (("equal", "a"), ("gaps", "b"), ("slow", "c"))
    for rules, kind in (("waiting", TapedWaiting), ("defaults", Taped))
} | {"narrow-defaults": Case(TapedNarrow, CONDITIONS["a"])}


@dataclass(frozen=True)
class Inputs:
    """What the simulation is told of this machine. efficiency: what TCP carries of a link's rate."""

    efficiency: float
    round_trip_s: float
    copy_bytes_per_s: float
    memory_bytes_per_s: float
    disk_bytes_per_s: float


def link_of(net: ShapedNet, setting: Setting) -> tuple[float, float]:
    """What TCP carries of the link's rate of a cluster, and its round trip: streams to a slave's site, no Di-PS."""
    sink = net.start("s0", TcpSite, net.address("s0"))
    source = net.start("c0", ClusterSite, "c0", CHUNK_PARAMS, (("s0", "tcp://127.0.0.1:1"),), (b"",))

    def stream_s(n_bytes: int) -> float:
        sink.begin("receive")
        seconds: float = source.call("send_tcp", net.address("s0"), n_bytes).value
        sink.finish()
        return seconds

    try:
        # Other work on the machine only adds time: so the shortest of each says what the link does.
        round_trip_s = min(stream_s(1) for _ in range(5))
        short, long = (int(setting.bits_per_s / 8 * seconds) for seconds in (1.0, 2.0))
        took_s = min(stream_s(long) for _ in range(3)) - min(stream_s(short) for _ in range(3))
        return 8 * (long - short) / took_s / setting.bits_per_s, round_trip_s
    finally:
        source.close()
        sink.close()


def copy_rate_of(n_params: int) -> float:
    """Bytes/s of a copy of the model."""
    source, target, took_s = np.ones(n_params, np.float32), np.zeros(n_params, np.float32), []
    for _ in range(5):
        began_s = time.perf_counter()
        np.copyto(target, source)
        took_s.append(time.perf_counter() - began_s)
    return source.nbytes / statistics.median(took_s)


@dataclass(frozen=True)
class RealRun:
    score: Score
    inputs: Inputs
    took_s: float
    foreign: float
    niced: float


def real(case: Case, setting: Setting, directory: Path) -> RealRun:
    """Raises NotPossible and Failed."""
    kind, condition = case.kind, case.condition
    with ShapedNet(kind.sites(setting, condition), f"dips{os.getpid()}") as net:
        efficiency, round_trip_s = link_of(net, setting)
        make = functools.partial(
            kind, "dips", directory, setting.clusters, setting.params,
            net=net, setting=setting, condition=condition, environments=directory,
        )  # fmt: skip
        with make() as party:
            party.tell(at_s=time.monotonic() + LEAD_S)
            usage, began_s = Usage(party), time.monotonic()
            usage.begin()
            _watch(party, setting, condition)
            took_s = time.monotonic() - began_s
            _, _, (foreign, niced) = usage.end()
            exchanges, rates = party.exchanges(), party.update_rates()
    inputs = Inputs(efficiency, round_trip_s, copy_rate_of(setting.params), *rates)
    return RealRun(score(exchanges, _steps_s(setting, condition), setting.rounds), inputs, took_s, foreign, niced)


def _watch(party: Taped, setting: Setting, condition: Condition) -> None:
    """Until there are enough exchanges. Raises Failed when a process ends, or when it takes far too long."""
    slowest = min(cable.up_bits_per_s for cable in setting.cables(condition))
    round_s = setting.round_s(condition) + 4 * 8 * setting.model_bytes / slowest
    end_s = time.monotonic() + 60.0 + 3 * (WARM_UP + setting.rounds + 1) * round_s
    while not enough(party.exchanges(), setting.rounds):
        for name, process in party.processes.items():
            if process.poll() is not None:
                raise Failed(f"{name} has ended; its log ends:\n{party.log(name)}")
        if time.monotonic() > end_s:
            counts = {name: len(exchanges) for name, exchanges in party.exchanges().items()}
            raise Failed(f"too few exchanges in time, by cluster: {counts}")
        time.sleep(LOOK_S)


def _steps_s(setting: Setting, condition: Condition) -> dict[str, float]:
    return {f"c{number}": step_s for number, step_s in enumerate(setting.steps_s(condition))}


# ---- the simulated run ----


def setup_of(name: str, case: Case, setting: Setting, inputs: Inputs, hours: float) -> str:
    """The set-up file of a case."""
    kind, condition = case.kind, case.condition
    sites, told = kind.sites(setting, condition), _told(inputs.efficiency)
    master = {
        "sync_every": setting.inner_steps, "min_clusters": setting.clusters, "outer_lr": OUTER_LR,
        "outer_momentum": OUTER_MOMENTUM, **kind.rules,
    }  # fmt: skip
    memory = setting.model_bytes // SLAVES * (BUFFERS + 2 * setting.clusters) + (256 << 20)
    lines = [
        "# Written by benchmarks/bench_simulation.py", "[run]", f'about = "{name}: {condition.title}"',
        f"hours = {hours:.4f}", "", "[model]", f"parameters = {setting.params}",
        f"layers = {max(SLAVES, round(setting.params / CHUNK_PARAMS))}", "", "[data]", "total_tokens = 1_000_000_000",
        "chunk_tokens = 1_000_000", "", "[slaves]", f"count = {SLAVES}",
        f'network = "{told(sites["s0"].up_bits_per_s)}"', f"memory = {memory}",
        f"memory_rate = {inputs.memory_bytes_per_s:.0f}",
        f"disk_rate = {inputs.disk_bytes_per_s:.0f}", f"round_trip = {inputs.round_trip_s:.5f}", "", "[master]",
        *(f"{knob.replace('-', '_')} = {json.dumps(value)}" for knob, value in master.items()),
    ]  # fmt: skip
    for number, step_s in enumerate(setting.steps_s(condition)):
        cable = sites[f"c{number}"]
        lines += [
            "", "[[clusters]]", f'id = "c{number}"', f"tokens_per_s = {1 / step_s:.6f}", "tokens_per_step = 1",
            f'up = "{told(cable.up_bits_per_s)}"', f'down = "{told(cable.down_bits_per_s)}"',
            f"copy_rate = {inputs.copy_bytes_per_s:.0f}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _told(efficiency: float) -> Callable[[float], str]:
    return lambda bits_per_s: f"{efficiency * bits_per_s / 1e6:.3f} Mbps"


class HeldCluster(ClusterHost):
    """Makes no step before JOINED_S, as the real ones wait for the order to begin, and until then tells no speed."""

    def _step(self) -> None:
        if self.kernel.now_s < JOINED_S:
            self._wake(JOINED_S)
        else:
            super()._step()

    def _told_pace(self) -> tuple[float, float]:
        return super()._told_pace() if self.steps else (0.0, 0.0)


class WatchedWorld(ScaleWorld):
    """Keeps the lines of the clusters' tapes."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, layout_of(scenario))
        self.clusters = {name: HeldCluster(self, name, self.plan.step_s_of(name)) for name in self.clusters}
        self._lines: dict[str, list[Record]] = {name: [] for name in self.clusters}

    def tape(self, role: str, process: SimulatedProcess, kind: str, cause: str, fields: Mapping[str, Any]) -> None:
        super().tape(role, process, kind, cause, fields)
        if role == "worker":
            self._lines[process.name].append({"kind": kind, "monotonic_s": self.kernel.now_s, **fields})

    def exchanges(self) -> dict[str, list[Exchange]]:
        return {name: exchanges_of(lines) for name, lines in self._lines.items()}


def simulated(path: Path, steps_s: Mapping[str, float], rounds: int) -> Score:
    """Raises Failed when it takes several times as long as the real run."""
    scenario = load_scenario(path)
    world = WatchedWorld(scenario)
    Failures(world)
    while not enough(world.exchanges(), rounds):
        if world.kernel.now_s > JOINED_S + 3 * scenario.duration_s:
            raise Failed(f"{path}: too few exchanges in {world.kernel.now_s:.0f} simulated seconds")
        world.kernel.run(world.kernel.now_s + 10.0)
    return score(world.exchanges(), steps_s, rounds)


# ---- the command ----


@dataclass(frozen=True)
class Row:
    """One measure of one case."""

    measure: str
    real: float
    spread: float
    simulated: float
    error: float


def rows_of(runs: Sequence[Score], played: Score) -> list[Row]:
    rows = []
    for name in (field.name for field in fields(Score)):
        values, value = [getattr(run, name) for run in runs], getattr(played, name)
        median = statistics.median(values)
        error = (value - median) / median if median else (0.0 if value == median else math.inf)
        rows.append(Row(name, median, max(values) - min(values), value, error))
    return rows


def compare(name: str, setting: Setting, options: argparse.Namespace, setups: Path) -> dict[str, Any]:
    """Raises NotPossible and Failed."""
    case, runs = CASES[name], list[RealRun]()
    for number in range(options.repeats):
        print(f"{name}, run {number + 1} of {options.repeats}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            runs.append(real(case, setting, Path(folder) / "run"))
        print(f"  {runs[-1].score}", file=sys.stderr, flush=True)
    inputs = Inputs(*(statistics.median(getattr(run.inputs, field.name) for run in runs) for field in fields(Inputs)))
    path = setups / f"{name}.toml"
    path.write_text(setup_of(name, case, setting, inputs, statistics.median(run.took_s for run in runs) / 3600))
    played = simulated(path, _steps_s(setting, case.condition), setting.rounds)
    rows = rows_of([run.score for run in runs], played)
    return {
        "case": name, "inputs": asdict(inputs), "rows": [asdict(row) for row in rows],
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for cell in cells:
        runs = cell["runs"]
        other = "; ".join(f"{run['foreign']:.2f} + {run['niced']:.2f} low" for run in runs)
        head = f"{'':<16}{'real':>9}{'spread':>9}{'simulated':>11}{'error':>8}"
        lines += ["", f"{cell['case']}    other: {other}", head]
        lines += [
            f"{row['measure']:<16}{row['real']:>9.3f}{row['spread']:>9.3f}{row['simulated']:>11.3f}{row['error']:>+8.1%}"
            for row in cell["rows"]
        ]
        inputs = cell["inputs"]
        lines.append(
            f"inputs: TCP carries {inputs['efficiency']:.1%} of a link, "
            f"round trip {1e3 * inputs['round_trip_s']:.1f} ms, copy {inputs['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
            f"memory {inputs['memory_bytes_per_s'] / 1e9:.1f} GB/s, disk {inputs['disk_bytes_per_s'] / 1e9:.2f} GB/s"
        )
    return "\n".join(lines)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="which, with commas (default: all)")
    parser.add_argument("--clusters", type=int, default=4)
    parser.add_argument("--params", type=int, default=3_125_000, help="parameters of the model, float32")
    parser.add_argument("--inner-steps", type=int, default=64, help="H: inner steps between two exchanges")
    parser.add_argument("--step-s", type=float, default=0.125, help="seconds of an inner step of the fastest cluster")
    parser.add_argument("--rounds", type=int, default=6, help="exchanges of the slowest cluster that are compared")
    parser.add_argument("--repeats", type=int, default=2, help="real runs of each case")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of a cluster's link, each way")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="of a cluster's link, one way")
    parser.add_argument("--setups", type=Path, help="where the set-up files are kept; default: nowhere")
    parser.add_argument("--directory", type=Path, help="where servers keep their files; default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="one case, two clusters, a tiny model: does it run?")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    given.cases = given.cases or ("equal-waiting" if given.quick else ",".join(CASES))
    if given.quick:
        given.clusters, given.params, given.inner_steps, given.step_s = 2, 1_000_000, 8, 0.1
        given.rounds, given.repeats, given.delay_ms = 3, 1, 5.0
    if unknown := set(given.cases.split(",")) - set(CASES):
        parser.error(f"--cases: {', '.join(sorted(unknown))} is unknown: choose from {', '.join(CASES)}")
    if given.clusters < 2 or min(given.params, given.rounds, given.inner_steps, given.repeats) < 1:
        parser.error("give 2 clusters or more, and counts of at least 1")
    if min(given.step_s, given.mbit) <= 0 or given.delay_ms < 0:
        parser.error("--step-s and --mbit must be more than 0, --delay-ms 0 or more")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    end_in_order()
    setting = Setting(
        options.clusters, options.params, options.inner_steps, options.step_s, options.rounds, 1e6 * options.mbit,
        options.delay_ms,
    )  # fmt: skip
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        setups = options.setups or Path(folder)
        setups.mkdir(parents=True, exist_ok=True)
        try:
            require_root()
            cells = [compare(name, setting, options, setups) for name in options.cases.split(",")]
        except NotPossible as why:
            print(f"bench_simulation cannot run here: {why}", file=sys.stderr)
            return 2
    if options.json:
        print(json.dumps({"setting": asdict(setting), "cells": cells}, indent=2))
    else:
        print(", ".join(f"{key} {value:g}" for key, value in asdict(setting).items()))
        print(_table(cells))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failed:
        sys.exit(str(failed))
