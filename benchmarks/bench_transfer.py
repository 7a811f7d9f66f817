"""How close a push and a pull come to raw TCP, measured against a floor from the same run.

A real data port of a slave in one process and the real carriers of a cluster in another move one float32 vector over
loopback: staging only, no master, no round. The floor is raw TCP, one stream, received straight into the target's own
memory: tcp_pinned, with a processor for each of the two processes, where the machine has two; else tcp. (Where the
system places the two itself, TCP's own rate moves by a third from one minute to the next. Ratios to both are given.)
Next to it: gRPC (bytes, and protobuf messages that are landed) and pickle over ZeroMQ, which is what one writes first.

    python benchmarks/bench_transfer.py [--mib N] [--repeats R] [--rows push,pull,...] [--gate S] [--quick] [--json]

Rows (--rows takes some of them; the floors are always measured):

{rows}

Rates count the vector's bytes once; they are medians over the repeats. Everything alternates within each repeat, so
that a slow spell of the machine hits all. Other work on the machine spoils a sample: each waits up to --gate seconds
for a moment with less than --foreign processors of other work, and samples with more than that meanwhile are left out,
unless a row would keep less than half of its samples: then all samples of all rows count, and "counted" says so. quiet:
how many had little other work. paired: median over the repeats of the floor's time in the same repeat over the row's.
spread: (slowest - fastest) / median of the times.

CPU seconds are of the whole process, kernel included; on loopback the sender also pays for most of the receiver's
protocol work. A push includes checksums, the sums of squares that MEASURE needs, the slave's acknowledgements and the
digest. compute_kept_beside_push: how much of the slave's outer step (one thread) is left while pushes bring it 10
Gbit/s, or what the machine can do with it; the same with the Python loop, and with raw TCP, which is the floor, since
the sender wants a part of this machine too. push_kept_while_scraped: pushes one after the other while the slave's
metrics are scraped each second, over those while no one asks, in turns; scrape_cpu_s: processor time of the slave for
one scrape.

"tuned" in the first line names every setting that is not as a run has it by default, and where it was set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq
from flows.ends import WAYS, SlaveEnd, WorkerEnd, layout_of
from flows.peer import Peer
from flows.watched import Scraper, scrape
from quiet import Foreign, Gate, processor_s

from dips.core.messages import Settings
from dips.core.threads import usable_processor_numbers

TEN_GBIT_BYTES_PER_S = 1.25e9
SCRAPE_EVERY_S = 1.0
SCRAPES = 50
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class Row:
    """What is transferred, and how. way: of flows.ends.WAYS, for pushes and pulls. source: where a transfer's bytes are
    when the clock starts: in the vector that is sent, in a model ("copied" to the vector first, or sent from there,
    "live"). pinned: a processor for each process.
    """

    what: str
    way: str = ""
    source: str = "vector"
    pinned: bool = False


ROWS: Mapping[str, Row] = {
    "tcp": Row("raw TCP, landed; the system places the threads"),
    "tcp_pinned": Row("raw TCP, landed; one processor for each process", pinned=True),
    "tcp_copy": Row("a plain copy out of a model into the vector, then raw TCP", source="copied"),
    "tcp_copy_pinned": Row("the same, one processor for each process", source="copied", pinned=True),
    "grpc_bytes": Row("gRPC, one client stream of 1 MiB, dropped unread"),
    "grpc_protobuf": Row("gRPC, protobuf messages, landed"),
    "pickle": Row("recv_pyobj over ZeroMQ, landed"),
    "push": Row("a push", "plain"),
    "push_copy": Row("a worker's snapshot of a torch model, then its push", "plain", "copied"),
    "push_live": Row("a worker's push from a torch model's own memory, as while its loop waits", "plain", "live"),
    "push_python": Row("a push with the Python loop at both ends", "python"),
    "push_placed": Row("a push to a slave with data_cpu = own", "placed"),
    "push_copy_placed": Row("snapshot and push, to a slave with data_cpu = own", "placed", "copied"),
    "push_without_checksum": Row("a push without checksums at both ends", "without_checksum"),
    "push_curve": Row("a push with keys: CURVE, each frame XSalsa20-Poly1305, on libzmq's own threads", "curve"),
    "push_curve_python": Row("the same with the Python loop at both ends", "curve_python"),
    "pull": Row("a pull", "plain"),
    "pull_python": Row("a pull with the Python loop at both ends", "python"),
    "pull_placed": Row("a pull from a slave with data_cpu = own", "placed"),
    "pull_without_checksum": Row("a pull without checksums at both ends", "without_checksum"),
    "pull_curve": Row("a pull with keys", "curve"),
    "pull_curve_python": Row("the same with the Python loop at both ends", "curve_python"),
}
FLOORS = ("tcp", "tcp_pinned")
BASELINES = ("tcp", "grpc_bytes", "grpc_protobuf", "pickle")


@dataclass(frozen=True)
class Sample:
    """One transfer. The CPU seconds are those of the receiving and the sending process; foreign: processors that other
    work kept busy meanwhile.
    """

    wall_s: float
    receiver_cpu_s: float
    sender_cpu_s: float
    foreign: float


@dataclass(frozen=True)
class Result:
    """Medians over the samples that count. Ratios: of rates to tcp and tcp_pinned (for copied rows: to the same with a
    copy; None: not measured), and of CPU seconds to the floor's.
    """

    name: str
    samples: int
    quiet: int
    gbytes_per_s: float
    best_gbytes_per_s: float
    spread: float
    receiver_cpu_s_per_gb: float
    sender_cpu_s_per_gb: float
    of_tcp: float
    of_tcp_pinned: float | None
    paired: float | None
    receiver_cpu_of_floor: float
    sender_cpu_of_floor: float


class Bench:
    """Both processes, and one transfer after the other between them. names: of ROWS."""

    def __init__(self, options: argparse.Namespace, names: Collection[str]) -> None:
        self.layout = layout_of(options.mib << 18, options.tensors)
        self.cpus = pair_of_cpus()
        self._chunk_bytes = options.chunk_kib << 10
        self._gate = Gate(options.gate, options.foreign)
        ways = [way for way in WAYS if way == "plain" or any(ROWS[name].way == way for name in names)]
        self._slave = Peer(SlaveEnd, self.layout, self._chunk_bytes, options.data_threads, tuple(ways), options.loop)
        self._worker = Peer(WorkerEnd, self.layout, self._chunk_bytes, options.window_chunks, options.loop)
        self.slave_is_compiled: bool = self._slave.call("is_compiled", "plain").value
        self._pushes = 0
        self._ports = {name: self._slave.call("port", name).value for name in BASELINES}
        self._endpoints = {way: self._slave.call("endpoint", way).value for way in ways}
        self._digests = {way: self._slave.call("digest", way).value for way in ways}
        if any(WAYS[way].curve for way in ways):
            self._worker.call("trust", self._slave.call("allow", self._worker.call("key").value).value)

    def sample(self, name: str) -> Sample:
        """One whole vector, once the machine is quiet."""
        self._gate.wait(self._own_s)
        with_cpus = ROWS[name].pinned
        if with_cpus:
            self._pin(self.cpus)
        before, foreign = self._cpu_s(), Foreign(self._own_s)
        wall_s = self._carry(name)
        slave_s, worker_s = (after - earlier for after, earlier in zip(self._cpu_s(), before, strict=True))
        cores = foreign.cores()
        if with_cpus:
            self._pin(((), ()))
        return Sample(wall_s, *((worker_s, slave_s) if name.startswith("pull") else (slave_s, worker_s)), cores)

    def compute_kept(self, spell_s: float, spells: int, names: Sequence[str]) -> dict[str, float]:
        """Steps of the outer optimizer in the slave while it receives 10 Gbit/s, over those while nothing comes: spells
        of each, in turns. By row.
        """
        alone, beside = 0.0, dict.fromkeys(names, 0.0)
        for _ in range(spells):
            alone += self._steps_per_s(spell_s)
            for name in names:
                beside[name] += self._steps_per_s(spell_s, name)
        return {name: steps / alone for name, steps in beside.items()}

    def kept_while_scraped(self, spell_s: float, spells: int) -> float:
        """Pushes while metrics are scraped over pushes while they are not: spells of each, in turns."""
        url = self._metrics_url()
        scraped = alone = 0.0
        for _ in range(spells):
            alone += self._pushes_per_s(spell_s)
            with Scraper(url, SCRAPE_EVERY_S):
                scraped += self._pushes_per_s(spell_s)
        return scraped / alone

    def scrape_cpu_s(self) -> float:
        """The slave's processor time for one scrape, kernel included; nothing else goes on."""
        url = self._metrics_url()
        before_s = processor_s(self._slave.pid)
        for _ in range(SCRAPES):
            scrape(url)
        return (processor_s(self._slave.pid) - before_s) / SCRAPES

    def close(self) -> None:
        self._slave.close()
        self._worker.close()

    def _carry(self, name: str) -> float:
        """Seconds that it took."""
        row = ROWS[name]
        if name.startswith("push"):
            return self._push(row.way, row.source)
        if name.startswith("pull"):
            wall_s: float = self._worker.call("pull", self._endpoints[row.way], self._digests[row.way], row.way).value
            return wall_s
        baseline = "tcp" if name.startswith("tcp") else name
        self._slave.begin("receive", baseline)
        wall_s = self._worker.call("send", baseline, self._ports[baseline], row.source).value
        self._slave.finish()
        return wall_s

    def _push(self, way: str, source: str = "vector") -> float:
        self._pushes += 1
        self._slave.call("open", self._pushes, way)
        self._slave.begin("wait_staged")
        wall_s: float = self._worker.call("push", self._pushes, self._endpoints[way], way, source).value
        self._slave.finish()
        return wall_s

    def _metrics_url(self) -> str:
        return str(self._slave.call("metrics_url", self._chunk_bytes).value)

    def _pushes_per_s(self, seconds_s: float) -> float:
        began_s, pushes = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds_s:
            self._push("plain")
            pushes += 1
        return pushes / (time.perf_counter() - began_s)

    def _steps_per_s(self, seconds_s: float, name: str = "") -> float:
        """While `name` is transferred, if anything is. Transfers begin at even intervals, so that 10 Gbit/s come on
        average if the machine can; each is sent as fast as it goes.
        """
        self._slave.call("compute")
        began_s = now_s = time.perf_counter()
        transfers = 0
        while now_s - began_s < seconds_s:
            next_s = began_s + seconds_s
            if name:
                self._carry(name)
                transfers += 1
                next_s = began_s + transfers * self.layout.n_bytes / TEN_GBIT_BYTES_PER_S
            time.sleep(max(0.0, next_s - time.perf_counter()))
            now_s = time.perf_counter()
        steps: float = self._slave.call("computed").value
        return steps

    def _pin(self, cpus: Sequence[Sequence[int]]) -> None:
        self._slave.call("pin", tuple(cpus[0]))
        self._worker.call("pin", tuple(cpus[1]))

    def _own_s(self) -> float:
        return sum(self._cpu_s()) + time.process_time()

    def _cpu_s(self) -> tuple[float, float]:
        return processor_s(self._slave.pid), processor_s(self._worker.pid)


def pair_of_cpus() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A processor for the slave and one for the worker: the first two that are not halves of one core, if there are
    such. Empty: the machine has only one, or places no threads.
    """
    usable = usable_processor_numbers()
    if len(usable) < 2:
        return (), ()
    worker, others = usable[0], usable[1:]
    same_core = _siblings(worker)
    return (next((cpu for cpu in others if cpu not in same_core), others[0]),), (worker,)


def _siblings(cpu: int) -> set[int]:
    """The processors of the same core, itself included; empty where the system does not say."""
    try:
        text = Path(SIBLINGS.format(cpu)).read_text()
    except OSError:
        return set()
    ranges = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return {number for ends in ranges for number in range(ends[0], ends[-1] + 1)}


def measure(bench: Bench, names: Sequence[str], repeats: int, seconds: float) -> dict[str, list[Sample]]:
    """Everything once in each repeat; one more repeat to warm up. After so many seconds no further repeat begins, but
    one is always made.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    began_s = time.monotonic()
    for repeat in range(repeats + 1):
        past_s = time.monotonic() - began_s
        if repeat > 1 and past_s > seconds:
            break
        what = f"repeat {repeat} of {repeats}" if repeat else "warming up"
        print(f"{what}, {len(names)} rows, {past_s:.0f} s", file=sys.stderr, flush=True)
        for name, found in samples.items():
            sample = bench.sample(name)
            if repeat > 0:
                found.append(sample)
    return samples


def counts_quiet(samples: Mapping[str, Sequence[Sample]], gate: Gate) -> bool:
    """Whether samples with much other work can be left out of every row: at least half of each stay."""
    return all(2 * len(gate.quiet(found, _foreign)) >= len(found) for found in samples.values())


def summaries(samples: Mapping[str, Sequence[Sample]], n_bytes: int, gate: Gate) -> dict[str, Result]:
    """Of every row. samples: of the same repeats for each row, tcp's among them."""
    only = gate if counts_quiet(samples, gate) else Gate(0.0, math.inf)
    counted = {name: only.quiet(found, _foreign) for name, found in samples.items()}
    medians = {name: statistics.median(one.wall_s for one in found) for name, found in counted.items()}
    gbytes = n_bytes / 1e9
    cpu = {
        name: (
            statistics.median(one.receiver_cpu_s for one in found) / gbytes,
            statistics.median(one.sender_cpu_s for one in found) / gbytes,
        )
        for name, found in counted.items()
    }

    def result(name: str) -> Result:
        times_s = [one.wall_s for one in counted[name]]
        copy = "_copy" if ROWS[name].source == "copied" else ""
        free, pinned = f"tcp{copy}", f"tcp{copy}_pinned"
        floor = pinned if pinned in samples else free
        pairs = [
            (of_floor, own)
            for of_floor, own in zip(samples[floor], samples[name], strict=True)
            if only.passes(of_floor.foreign) and only.passes(own.foreign)
        ]
        return Result(
            name=name,
            samples=len(samples[name]),
            quiet=len(gate.quiet(samples[name], _foreign)),
            gbytes_per_s=gbytes / medians[name],
            best_gbytes_per_s=gbytes / min(times_s),
            spread=(max(times_s) - min(times_s)) / medians[name],
            receiver_cpu_s_per_gb=cpu[name][0],
            sender_cpu_s_per_gb=cpu[name][1],
            of_tcp=medians[free] / medians[name],
            of_tcp_pinned=medians[pinned] / medians[name] if pinned in samples else None,
            paired=statistics.median(of_floor.wall_s / own.wall_s for of_floor, own in pairs) if pairs else None,
            receiver_cpu_of_floor=cpu[name][0] / cpu[floor][0],
            sender_cpu_of_floor=cpu[name][1] / cpu[floor][1],
        )

    return {name: result(name) for name in samples}


def _foreign(sample: Sample) -> float:
    return sample.foreign


COMPARED = (
    *((f"{way}{curve}", f"{way}{curve}_python") for way in ("push", "pull") for curve in ("", "_curve")),
    *(("push_curve", "push"), ("pull_curve", "pull")),
    *((ours, other) for other in ("grpc_bytes", "grpc_protobuf", "pickle") for ours in ("push", "pull")),
)
"""Pairs of rows of which the ratio of rates is given; those to the floors stand in the rows themselves."""


def ratios(results: Mapping[str, Result]) -> dict[str, float]:
    """Of the medians' rates, of rows that were measured."""
    return {
        f"{ours}_ratio_to_{other}": results[ours].gbytes_per_s / results[other].gbytes_per_s
        for ours, other in COMPARED
        if ours in results and other in results
    }


def _table(results: Mapping[str, Result], found: Mapping[str, float]) -> str:
    head = f"{'transfer':<23}{'GB/s':>7}{'best':>7}{'spread':>8}{'quiet':>8}{'of tcp':>8}{'of pinned':>11}{'paired':>8}"
    lines = [f"{head}{'receiver CPU s/GB':>19}{'of floor':>10}{'sender CPU s/GB':>17}{'of floor':>10}"]
    lines += [
        f"{r.name:<23}{r.gbytes_per_s:>7.2f}{r.best_gbytes_per_s:>7.2f}{r.spread:>8.0%}{f'{r.quiet}/{r.samples}':>8}"
        f"{r.of_tcp:>8.2f}{_known(r.of_tcp_pinned):>11}{_known(r.paired):>8}{r.receiver_cpu_s_per_gb:>19.3f}"
        f"{r.receiver_cpu_of_floor:>10.2f}{r.sender_cpu_s_per_gb:>17.3f}{r.sender_cpu_of_floor:>10.2f}"
        for r in results.values()
    ]
    return "\n".join([*lines, "", *(f"{name:<46}{value:>6.2f}" for name, value in found.items())])


def _known(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def tuned(options: argparse.Namespace, names: Collection[str]) -> str:
    """Settings that are not a run's defaults, and where they were set."""
    run = Settings()
    usual = {
        "chunk_kib": run.chunk_bytes >> 10, "window_chunks": run.window_chunks, "data_threads": 1, "loop": "auto",
    }  # fmt: skip
    found = [
        f"--{key.replace('_', '-')} {getattr(options, key)} (usually {value}) on the command line"
        for key, value in usual.items()
        if getattr(options, key) != value
    ]
    placed = [name for name in names if ROWS[name].way == "placed"]
    if placed:
        found.append(
            f"the slave's data_cpu = own (processor {usable_processor_numbers()[-1]}) in {' and '.join(placed)}"
        )
    return "; ".join(found) or "nothing"


def _rows_of(text: str) -> list[str]:
    """The rows that are measured, in the order of the table."""
    wanted = set(text.split(",")) if text else set(ROWS)
    unknown = wanted - set(ROWS)
    if unknown:
        raise SystemExit(f"--rows: there is no {sorted(unknown)[0]!r}; there are {', '.join(ROWS)}")
    wanted |= set(FLOORS)
    if any(ROWS[name].source == "copied" for name in wanted):
        wanted |= {"tcp_copy", "tcp_copy_pinned"}
    if not pair_of_cpus()[0]:
        wanted -= {name for name in wanted if ROWS[name].pinned}
    if not usable_processor_numbers():
        wanted -= {name for name in wanted if ROWS[name].way == "placed"}
    return [name for name in ROWS if name in wanted]


def _arguments() -> argparse.Namespace:
    rows = "\n".join(f"    {name:<23}{row.what}" for name, row in ROWS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("{rows}", rows), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = Settings()
    parser.add_argument("--mib", type=int, help="size of the vector (default 256, quick 64)")
    parser.add_argument("--tensors", type=int, default=25, help="tensors that it is cut into (default 25)")
    parser.add_argument("--chunk-kib", type=int, default=run.chunk_bytes >> 10, help="size of a chunk (default 1024)")
    parser.add_argument(
        "--window-chunks", type=int, default=run.window_chunks, help="most chunks under way (default 64)"
    )
    parser.add_argument("--data-threads", type=int, default=1, help="threads of the slave's data port (default 1)")
    parser.add_argument("--repeats", type=int, help="measurements of each (default 7, quick 3)")
    parser.add_argument(
        "--loop",
        choices=("auto", "compiled", "python"),
        default="auto",
        help="of pushes and pulls, but ..._python; models are sent as a worker does",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further repeat after so long")
    parser.add_argument("--rows", default="", help="some of the rows above, with commas between; default: all")
    parser.add_argument("--gate", type=float, help="longest wait for a quiet machine, s (default 3, quick 0)")
    parser.add_argument(
        "--foreign", type=float, default=0.3, help="processors of other work in a quiet sample, at most"
    )
    parser.add_argument("--without-spells", action="store_true", help="no compute_kept, and no scrapes")
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    options = parser.parse_args()
    usual = {"mib": 64, "repeats": 3, "gate": 0.0} if options.quick else {"mib": 256, "repeats": 7, "gate": 3.0}
    for key, value in usual.items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    if min(options.mib, options.tensors, options.chunk_kib, options.data_threads, options.repeats) < 1:
        parser.error("sizes, threads and repeats must be at least 1")
    options.rows = _rows_of(options.rows)
    return options


def main() -> None:
    options = _arguments()
    bench = Bench(options, options.rows)
    samples = measure(bench, options.rows, options.repeats, options.seconds)
    kept: dict[str, float] = {}
    if not options.without_spells:
        print("compute_kept and scrapes", file=sys.stderr, flush=True)
        beside = [name for name in ("push", "push_python", "tcp") if name in options.rows]
        steps = bench.compute_kept(*((1.0, 1) if options.quick else (2.0, 5)), beside)
        kept = {f"compute_kept_beside_{name}": share for name, share in steps.items()}
        kept["push_kept_while_scraped"] = bench.kept_while_scraped(*((1.0, 1) if options.quick else (3.0, 3)))
        kept["scrape_cpu_s"] = bench.scrape_cpu_s()
    bench.close()
    gate = Gate(options.gate, options.foreign)
    results = summaries(samples, bench.layout.n_bytes, gate)
    found = {**ratios(results), **kept}
    setting = {
        **{key: value for key, value in vars(options).items() if key not in ("json", "quick", "rows", "seconds")},
        "counted": "quiet samples" if counts_quiet(samples, gate) else "all samples, too few were quiet",
        "floor": FLOORS[-1] if FLOORS[-1] in results else FLOORS[0],
        "pinned_to": "slave {}, worker {}".format(*(cpus[0] for cpus in bench.cpus)) if bench.cpus[0] else "-",
        "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "machine": platform.machine(),
        "zmq": zmq.zmq_version(),
        "slave_serves": "compiled" if bench.slave_is_compiled else "in Python",
        "tuned": tuned(options, results),
    }
    if options.json:
        rows = [
            {**asdict(result), "each": [asdict(sample) for sample in samples[name]]} for name, result in results.items()
        ]
        print(json.dumps({"setting": setting, "results": rows, "ratios": found}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_table(results, found))


if __name__ == "__main__":
    main()
