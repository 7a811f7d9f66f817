"""How close the outer step, sums on receipt and codecs come to the memory's speed, against floors of the same run.

The update reads theta, the momentum and k stagings and writes theta' and momentum': nothing but memory bounds it. The
floors are an in-place scale of a large array (reads and writes each line once), a sum (reads only) and numpy's copy,
with as many threads, each on its own part, as the kernels get. Nothing here judges a number; times depend on the
machine and on who else uses it, so every result states its spread, and measurements of floors and kernels alternate.

    python benchmarks/bench_update.py [--elems N] [--threads T] [--repeats R] [--quick] [--json]

ratio_to_memory_bandwidth = bytes that must move / time / floor_scale. Bytes count each stream once. Memory that reads
and writes at the same time gives the scale, which reads once for each write, twice the rate of floor_sum, and the step,
which reads k + 2 times for 2 writes, can come no nearer to the scale than (k + 4) / (k + 2) x floor_sum / floor_scale.
So ratio_to_floor = the longer of (bytes / floor_scale, bytes read / floor_sum) / time.
ratio_to_copy = float32 bytes / time, over the same of the copy: for the codecs, in chunks of 1 MiB whose payload stays
in the cache, and for what a slave does with a chunk on receipt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from dips.core import allocator
from dips.core.layout import checksum
from dips.core.math import landing_numba, outer_numba, wire_numba
from dips.core.math.outer_numpy import n_pieces
from dips.core.math.simd_numba import compiled, load, splat, store
from dips.core.threads import usable_processors
from dips.core.wire import Codec, encoded_bytes

CLUSTERS = (1, 2, 4, 8)
F32 = NDArray[np.float32]
Part = tuple[int, int]
Work = Callable[[Part], Any]
Works = dict[tuple[str, int], tuple[int, Work]]
READ_STREAMS = {"outer_step": 2, "gram": 1}
"""Streams that a kernel reads besides the stagings of its k clusters."""

CHUNK_ELEMS = 1 << 18


@dataclass(frozen=True)
class Result:
    """One measurement. spread: (slowest - fastest) / median of the repeats' times.

    The rates are those of the medians; best_ratio compares the fastest times, which a busy machine hurts least.
    """

    name: str
    clusters: int
    bytes_moved: int
    median_s: float
    best_s: float
    spread: float
    gbytes_per_s: float
    ratio_to_memory_bandwidth: float
    best_ratio: float
    ratio_to_floor: float | None
    ratio_to_copy: float


@numba.njit(nogil=True)
def _scale(values: F32, factor: np.float32) -> None:
    for i in range(len(values)):
        values[i] = values[i] * factor


@compiled
def _sum(values: F32) -> float:
    zero = splat(np.float32(0))
    a, b, c, d = zero, zero, zero, zero
    for i in range(0, len(values) // 64 * 64, 64):
        a, b = a + load(values, i), b + load(values, i + 16)
        c, d = c + load(values, i + 32), d + load(values, i + 48)
    lanes = np.empty(16, np.float32)
    store(lanes, 0, (a + b) + (c + d))
    return float(lanes.sum())


class Bench:
    """The arrays of one slave, allocated as it does, and what runs on them."""

    def __init__(self, n_elems: int, threads: int) -> None:
        rng = np.random.default_rng(0)
        self.theta, self.momentum = _filled(rng, n_elems), _filled(rng, n_elems)
        self.staging = _filled(rng, max(CLUSTERS), n_elems)
        self.outputs = allocator.zeros(n_elems), allocator.zeros(n_elems)
        edges = np.linspace(0, n_elems // 16, threads + 1).astype(int) * 16
        self.parts: list[Part] = list(itertools.pairwise(edges.tolist()))
        self.pool = ThreadPoolExecutor(threads)
        self.n_elems = self.parts[-1][1]

    def time_s(self, work: Work) -> float:
        """Wall time of the work on all parts, one thread each."""
        start = time.perf_counter()
        if len(self.parts) == 1:
            work(self.parts[0])
        else:
            list(self.pool.map(work, self.parts))
        return time.perf_counter() - start

    def works(self) -> Works:
        """(name, k): (bytes that must move, the work on one part)."""
        size, out, theta = 4 * self.n_elems, self.outputs[0], self.theta
        works: Works = {
            ("floor_scale", 0): (2 * size, lambda p: _scale(out[p[0] : p[1]], np.float32(1))),
            ("floor_sum", 0): (size, lambda p: _sum(theta[p[0] : p[1]])),
            ("floor_copy", 0): (2 * size, lambda p: np.copyto(out[p[0] : p[1]], theta[p[0] : p[1]])),
            ("seed_step", 1): (
                3 * size,
                lambda p: outer_numba.seed_step(self.staging, 0, *self.outputs, p[0], p[1]),
            ),
            ("checksum", 1): (size, lambda p: [checksum(theta[a:b]) for a, b in _chunks(p)]),
        }
        for k in CLUSTERS:
            works["outer_step", k] = ((4 + k) * size, self._step(k))
            works["gram", k] = ((1 + k) * size, self._gram(k))
        return works | self._receipt(size) | self._codecs(size)

    def _step(self, k: int) -> Work:
        slots, weights = np.arange(k), np.full(k, 1 / k, np.float32)
        theta, momentum, staging = self.theta, self.momentum, self.staging
        out_theta, out_momentum = self.outputs
        return lambda part: outer_numba.outer_step(
            theta, momentum, staging, slots, weights, 0.5, 0.7, 0.8, 0.8, 1.0, out_theta, out_momentum, part[0], part[1]
        )

    def _gram(self, k: int) -> Work:
        slots = np.arange(k)
        return lambda part: outer_numba.gram(self.theta, self.staging, slots, *part)

    def _receipt(self, size: int) -> Works:
        """What is done with a chunk that stands in the cache; theta and the staging row are in memory."""
        frame, out, theta = self.staging[0, :CHUNK_ELEMS].copy(), self.outputs[0], self.theta
        other = self.staging[1]

        def each(land: Callable[[F32, slice, NDArray[np.float64]], Any]) -> Work:
            def work(part: Part) -> None:
                sums = np.zeros(n_pieces(CHUNK_ELEMS))
                for start, stop in _chunks(part):
                    land(frame[: stop - start], slice(start, stop), sums[: n_pieces(stop - start)])

            return work

        return {
            ("copy_chunk", 1): (size, each(lambda x, at, _: landing_numba.copy_chunk(out[at], x))),
            ("land", 1): (size, each(lambda x, at, _: landing_numba.land_chunk(Codec.F32, out[at], x))),
            ("land_measured", 1): (
                2 * size,
                each(lambda x, at, sums: landing_numba.land_chunk(Codec.F32, out[at], x, None, theta[at], sums)),
            ),
            ("products", 2): (
                2 * size,
                each(lambda x, at, sums: outer_numba.products(theta[at], x, other[at], sums)),
            ),
        }

    def _codecs(self, size: int) -> Works:
        works: Works = {}
        for codec in filter(lambda codec: codec.is_difference, Codec):
            for name in ("encode", "decode", "residual"):
                works[f"{name} {codec.name.lower()}", 1] = (
                    size * (2 if name == "encode" else 3),
                    self._codec(name, codec),
                )
        return works

    def _codec(self, name: str, codec: Codec) -> Work:
        now, base, out = self.theta, self.staging[0], self.outputs[1]

        def work(part: Part) -> None:
            buffer = np.zeros(encoded_bytes(codec, CHUNK_ELEMS), np.uint8)
            for start, stop in _chunks(part):
                at, payload = slice(start, stop), buffer[: encoded_bytes(codec, stop - start)]
                if name == "encode":
                    wire_numba.encode(codec, now[at], base[at], None, payload)
                elif name == "decode":
                    wire_numba.decode(codec, base[at], payload, out[at])
                else:
                    wire_numba.keep_residual(codec, now[at], base[at], out[at])

        return work


def _filled(rng: np.random.Generator, *shape: int) -> F32:
    array = allocator.zeros(*shape)
    rng.standard_normal(array.shape, np.float32, out=array)
    return array


def _chunks(part: Part) -> list[Part]:
    return [(start, min(start + CHUNK_ELEMS, part[1])) for start in range(part[0], part[1], CHUNK_ELEMS)]


def measure(n_elems: int, threads: int, repeats: int) -> list[Result]:
    """Every work once in each repeat, so that a slow spell of the machine hits all of them; one more to warm
    up."""
    outer_numba.warm_up()
    wire_numba.warm_up()
    landing_numba.warm_up()
    bench = Bench(n_elems, threads)
    works = bench.works()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, (_, work) in works.items():
            elapsed_s = bench.time_s(work)
            if repeat > 0:
                times[key].append(elapsed_s)
    floor = (works["floor_scale", 0][0], times["floor_scale", 0])
    copy_s = statistics.median(times["floor_copy", 0])
    read_s = statistics.median(times["floor_sum", 0])  # of one stream
    return [_result(*key, works[key][0], times[key], floor, copy_s, read_s) for key in works]


def _result(
    name: str,
    clusters: int,
    bytes_moved: int,
    times_s: list[float],
    floor: tuple[int, list[float]],
    copy_s: float,
    read_s: float,
) -> Result:
    median_s, (floor_bytes, floor_times_s) = statistics.median(times_s), floor
    floor_s = bytes_moved * statistics.median(floor_times_s) / floor_bytes
    reads = READ_STREAMS.get(name)
    return Result(
        name=name,
        clusters=clusters,
        bytes_moved=bytes_moved,
        median_s=median_s,
        best_s=min(times_s),
        spread=(max(times_s) - min(times_s)) / median_s,
        gbytes_per_s=bytes_moved / median_s / 1e9,
        ratio_to_memory_bandwidth=bytes_moved / median_s / (floor_bytes / statistics.median(floor_times_s)),
        best_ratio=bytes_moved / min(times_s) / (floor_bytes / min(floor_times_s)),
        ratio_to_floor=None if reads is None else max(floor_s, (reads + clusters) * read_s) / median_s,
        ratio_to_copy=copy_s / median_s,
    )


def _table(results: list[Result]) -> str:
    head = f"{'work':<15}{'k':>3}{'GB/s':>8}{'median ms':>12}{'best ms':>10}{'spread':>9}"
    lines = [f"{head}{'ratio_to_memory_bandwidth':>28}{'best_ratio':>12}{'ratio_to_floor':>16}{'ratio_to_copy':>15}"]
    lines += [
        f"{r.name:<15}{r.clusters or '':>3}{r.gbytes_per_s:>8.1f}{r.median_s * 1e3:>12.2f}{r.best_s * 1e3:>10.2f}"
        f"{r.spread:>9.0%}{r.ratio_to_memory_bandwidth:>28.2f}{r.best_ratio:>12.2f}"
        f"{'' if r.ratio_to_floor is None else format(r.ratio_to_floor, '.2f'):>16}{r.ratio_to_copy:>15.2f}"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elems", type=int, default=24_000_000, help="elements of a slave (default 24 million)")
    parser.add_argument("--threads", type=int, default=1, help="threads, each on its own part (default 1)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each (default 9)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.elems, arguments.repeats = 1_000_000, 3
    if min(arguments.elems, arguments.threads, arguments.repeats) < 1:
        parser.error("--elems, --threads and --repeats must be at least 1")
    results = measure(arguments.elems, arguments.threads, arguments.repeats)
    setting = {
        "elems": arguments.elems,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "cpus": usable_processors(),
        "load_1min": os.getloadavg()[0],
        "machine": platform.machine(),
        "numba": numba.__version__,
        "numpy": np.__version__,
    }
    if arguments.json:
        print(json.dumps({"setting": setting, "results": [asdict(result) for result in results]}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in setting.items()))
        print(_table(results))


if __name__ == "__main__":
    main()
