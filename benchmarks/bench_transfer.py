"""How close a push and a pull come to raw TCP, measured against a floor from the same run.

A real data port of a slave in one process and the real carriers of a cluster in another move one float32 vector over
loopback: staging only, no master, no round. The floor is raw TCP, one stream, received straight into the target's own
memory. Beside it: gRPC (bytes, and protobuf messages that are landed) and pickle over ZeroMQ, which is what one writes
first. Everything alternates within each repeat, so that a slow spell of the machine hits all; rows state their spread.

    python benchmarks/bench_transfer.py [--mib N] [--chunk-kib N] [--repeats R] [--tensors T] [--data-threads D]
                                        [--quick] [--json]

Rates count the vector's bytes once. CPU seconds are of the whole process, kernel included: on loopback the sender also
pays for most of the receiver's protocol work. A push includes checksums, the sums of squares that MEASURE needs, the
slave's acknowledgements and the digest; rows without checksum leave out the checksums on both sides, rows with curve
encrypt as a run with keys does (CURVE: each frame XSalsa20-Poly1305, on libzmq's own threads). compute_kept: how
much of the slave's outer step (one thread) is left while pushes bring it 10 Gbit/s, or what the machine can beside it;
compute_kept_beside_tcp: the same with raw TCP, which is the floor, since the sender wants a part of this machine too.
push_kept_while_scraped: pushes one after the other while the slave's metrics are scraped each second, over those while
nobody asks, in turns; scrape_cpu_s: processor time of the slave for one scrape.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import zmq
from flows.ends import WAYS, SlaveEnd, WorkerEnd, layout_of
from flows.peer import Peer
from flows.watched import Scraper, scrape

BASELINES = ("tcp", "grpc_bytes", "grpc_protobuf", "pickle")
OURS = ("push", "push_without_checksum", "push_curve", "pull", "pull_without_checksum", "pull_curve")
TEN_GBIT_BYTES_PER_S = 1.25e9
SCRAPE_EVERY_S = 1.0
SCRAPES = 50


@dataclass(frozen=True)
class Sample:
    """One transfer. The CPU seconds are those of the receiving and the sending process."""

    wall_s: float
    receiver_cpu_s: float
    sender_cpu_s: float


@dataclass(frozen=True)
class Result:
    """Medians over the repeats; spread: (slowest - fastest) / median of the times."""

    name: str
    gbytes_per_s: float
    best_gbytes_per_s: float
    spread: float
    receiver_cpu_s_per_gb: float
    sender_cpu_s_per_gb: float


class Bench:
    """Both processes, and one transfer after the other between them."""

    def __init__(self, mib: int, tensors: int, chunk_bytes: int, window_chunks: int, data_threads: int) -> None:
        self.layout = layout_of(mib << 18, tensors)
        self._chunk_bytes = chunk_bytes
        self._slave = Peer(SlaveEnd, self.layout, chunk_bytes, data_threads)
        self._worker = Peer(WorkerEnd, self.layout, chunk_bytes, window_chunks)
        self._pushes = 0
        self._ports = {name: self._slave.call("port", name).value for name in BASELINES}
        self._endpoints = {way: self._slave.call("endpoint", way).value for way in WAYS}
        self._digests = {way: self._slave.call("digest", way).value for way in WAYS}
        self._worker.call("trust", self._slave.call("allow", self._worker.call("key").value).value)

    def transfer(self, name: str) -> Sample:
        """One whole vector. The slave receives, but for a pull."""
        before = self._cpu_s()
        wall_s = self._carry(name)
        slave_s, worker_s = (after - earlier for after, earlier in zip(self._cpu_s(), before, strict=True))
        return Sample(wall_s, *((worker_s, slave_s) if name.startswith("pull") else (slave_s, worker_s)))

    def compute_kept(self, spell_s: float, spells: int) -> dict[str, float]:
        """Steps of the outer optimizer in the slave while it receives 10 Gbit/s, over those while nothing comes: spells
        of each, in turns.
        """
        alone = beside_push = beside_tcp = 0.0
        for _ in range(spells):
            alone += self._steps_per_s(spell_s)
            beside_push += self._steps_per_s(spell_s, "push")
            beside_tcp += self._steps_per_s(spell_s, "tcp")
        return {"compute_kept": beside_push / alone, "compute_kept_beside_tcp": beside_tcp / alone}

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
        before_s = self._slave.call("cpu_s").value
        for _ in range(SCRAPES):
            scrape(url)
        taken_s: float = self._slave.call("cpu_s").value - before_s
        return taken_s / SCRAPES

    def close(self) -> None:
        self._slave.close()
        self._worker.close()

    def _carry(self, name: str) -> float:
        """Seconds that it took."""
        if name.startswith("push"):
            return self._push(_way_of(name))
        if name.startswith("pull"):
            way = _way_of(name)
            wall_s: float = self._worker.call("pull", self._endpoints[way], self._digests[way], way).value
            return wall_s
        self._slave.begin("receive", name)
        wall_s = self._worker.call("send", name, self._ports[name]).value
        self._slave.finish()
        return wall_s

    def _push(self, way: str) -> float:
        self._pushes += 1
        self._slave.call("open", self._pushes, way)
        self._slave.begin("wait_staged")
        wall_s: float = self._worker.call("push", self._pushes, self._endpoints[way], way).value
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

    def _cpu_s(self) -> tuple[float, float]:
        return self._slave.call("cpu_s").value, self._worker.call("cpu_s").value


def _way_of(name: str) -> str:
    return name.partition("_")[2] or "plain"


def measure(bench: Bench, repeats: int) -> dict[str, list[Sample]]:
    """Everything once in each repeat; one more repeat to warm up."""
    samples: dict[str, list[Sample]] = {name: [] for name in (*BASELINES, *OURS)}
    for repeat in range(repeats + 1):
        for name, found in samples.items():
            sample = bench.transfer(name)
            if repeat > 0:
                found.append(sample)
    return samples


def summary(name: str, samples: list[Sample], n_bytes: int) -> Result:
    times_s, gbytes = [sample.wall_s for sample in samples], n_bytes / 1e9
    return Result(
        name=name,
        gbytes_per_s=gbytes / statistics.median(times_s),
        best_gbytes_per_s=gbytes / min(times_s),
        spread=(max(times_s) - min(times_s)) / statistics.median(times_s),
        receiver_cpu_s_per_gb=statistics.median(sample.receiver_cpu_s for sample in samples) / gbytes,
        sender_cpu_s_per_gb=statistics.median(sample.sender_cpu_s for sample in samples) / gbytes,
    )


def ratios(results: dict[str, Result]) -> dict[str, float]:
    """Of the medians' rates, and of the receiver's CPU seconds for each byte."""

    def rate(name: str, floor: str) -> float:
        return results[name].gbytes_per_s / results[floor].gbytes_per_s

    def cpu(name: str) -> float:
        return results[name].receiver_cpu_s_per_gb / results["tcp"].receiver_cpu_s_per_gb

    return {
        "push_ratio_to_tcp": rate("push", "tcp"),
        "push_ratio_to_tcp_without_checksum": rate("push_without_checksum", "tcp"),
        "pull_ratio_to_tcp": rate("pull", "tcp"),
        "pull_ratio_to_tcp_without_checksum": rate("pull_without_checksum", "tcp"),
        "push_curve_ratio_to_push": rate("push_curve", "push"),
        "pull_curve_ratio_to_pull": rate("pull_curve", "pull"),
        "ratio_to_grpc_bytes_without_checksum": rate("push_without_checksum", "grpc_bytes"),
        "ratio_to_grpc_bytes": rate("push", "grpc_bytes"),
        "ratio_to_grpc_protobuf": rate("push", "grpc_protobuf"),
        "ratio_to_pickle": rate("push", "pickle"),
        "receiver_cpu_ratio_to_tcp": cpu("push"),
        "receiver_cpu_ratio_to_tcp_without_checksum": cpu("push_without_checksum"),
    }


def _table(results: dict[str, Result], found: dict[str, float]) -> str:
    lines = [f"{'transfer':<24}{'GB/s':>7}{'best':>7}{'spread':>8}{'receiver CPU s/GB':>20}{'sender CPU s/GB':>18}"]
    lines += [
        f"{r.name:<24}{r.gbytes_per_s:>7.2f}{r.best_gbytes_per_s:>7.2f}{r.spread:>8.0%}"
        f"{r.receiver_cpu_s_per_gb:>20.3f}{r.sender_cpu_s_per_gb:>18.3f}"
        for r in results.values()
    ]
    return "\n".join([*lines, "", *(f"{name:<46}{value:>6.2f}" for name, value in found.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, help="size of the vector (default 256, quick 64)")
    parser.add_argument("--tensors", type=int, default=25, help="tensors that it is cut into (default 25)")
    parser.add_argument("--chunk-kib", type=int, default=1024, help="size of a chunk (default 1024)")
    parser.add_argument("--window-chunks", type=int, default=64, help="most chunks under way (default 64)")
    parser.add_argument("--data-threads", type=int, default=1, help="threads of the slave's data port (default 1)")
    parser.add_argument("--repeats", type=int, help="measurements of each (default 7, quick 3)")
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    mib, repeats = (64, 3) if arguments.quick else (256, 7)
    arguments.mib = mib if arguments.mib is None else arguments.mib
    arguments.repeats = repeats if arguments.repeats is None else arguments.repeats
    if min(arguments.mib, arguments.tensors, arguments.chunk_kib, arguments.data_threads, arguments.repeats) < 1:
        parser.error("sizes, threads and repeats must be at least 1")
    bench = Bench(
        arguments.mib, arguments.tensors, arguments.chunk_kib << 10, arguments.window_chunks, arguments.data_threads
    )
    samples = measure(bench, arguments.repeats)
    kept = bench.compute_kept(*((1.0, 1) if arguments.quick else (2.0, 5)))
    kept_while_scraped = bench.kept_while_scraped(*((1.0, 1) if arguments.quick else (3.0, 3)))
    scrape_cpu_s = bench.scrape_cpu_s()
    bench.close()
    results = {name: summary(name, found, bench.layout.n_bytes) for name, found in samples.items()}
    found = {**ratios(results), **kept, "push_kept_while_scraped": kept_while_scraped}
    setting = {
        **{key: value for key, value in vars(arguments).items() if key not in ("json", "quick")},
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "machine": platform.machine(),
        "zmq": zmq.zmq_version(),
    }
    if arguments.json:
        rows = [asdict(result) for result in results.values()]
        told = {"setting": setting, "results": rows, "ratios": found, "scrape_cpu_s": scrape_cpu_s}
        print(json.dumps(told, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_table(results, found))
        print(f"{'scrape_cpu_s':<46}{scrape_cpu_s:>6.4f}")


if __name__ == "__main__":
    main()
