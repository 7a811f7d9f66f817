"""A file of `dips plan explore`: two buildings in two regions, 64 accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dips.planner.scaleacross.iteration import rebuild
from dips.planner.scaleacross.search import cases_of, lower_bound_s, splits
from dips.planner.scaleacross.topology import Ints, Topology, read_topology

FILE = """
[model]
name = "llama3-8b"

[accelerators]
memory_gib = 80
sustained_tflops = 400
per_server = 8
server_gbps = 3600
network_gbps = 400
network_latency_us = 5
source = "here"

[[zones]]
name = "a1"
building = "A"
accelerators = 16
source = "here"

[[zones]]
name = "b1"
building = "B"
accelerators = 16
source = "here"

[[zones]]
name = "a2"
building = "A"
accelerators = 16
source = "here"

[[zones]]
name = "b2"
building = "B"
accelerators = 16
source = "here"

[[buildings]]
name = "A"
region = "north"
oversubscription = 2
distance_km = 1
source = "here"

[[buildings]]
name = "B"
region = "south"
oversubscription = 2
distance_km = 1
source = "here"

[[routes]]
ends = ["north", "south"]
oversubscription = 8
distance_km = 200
source = "here"

[batch]
sequences = 64
sequence_tokens = 8192
source = "here"

[network]
queue_pairs = 4
loss_rate = 0.0002
usual_oversubscription = 3
source = "here"
"""


def read(folder: Path, text: str = FILE) -> Topology:
    file = folder / "topology.toml"
    file.write_text(text)
    return read_topology(file)


def small(
    folder: Path, layers: int = 9, oversubscription: float = 8, memory_gib: float = 80, km: float = 200
) -> Topology:
    """16 accelerators in two buildings of one zone each, so few layers that all divisions can be enumerated."""
    topology = read(folder, FILE.replace("sequences = 64", "sequences = 16"))
    given = topology.accelerators.model_copy(
        update={"per_server": 4, "memory_gib": memory_gib, "sustained_tflops": 100.0}
    )
    topology = replace(
        topology,
        model=topology.model.model_copy(update={"layers": layers}),
        accelerators=given,
        zones=tuple(
            zone.model_copy(update={"accelerators": 8}) for zone in topology.zones if zone.name in ("a1", "b1")
        ),
    )
    return topology.with_routes(oversubscription, km)


def compositions(total: int, parts: int, ratio: float) -> Ints:
    """All divisions of so many layers into chunks, the largest of which has at most so many times the smallest's."""

    def rows(left: int, n: int) -> Iterator[tuple[int, ...]]:
        if n == 1:
            yield (left,)
            return
        for first in range(1, left - n + 2):
            for rest in rows(left - first, n - 1):
                yield (first, *rest)

    return np.array([row for row in rows(total, parts) if max(row) <= ratio * min(row)], np.int64)


def best_of_all(topology: Topology, links: bool) -> float:
    """The shortest iteration of all cases and divisions; none is below the lower bound of its case."""
    best, layers = float("inf"), topology.model.layers
    for split in splits(topology):
        for case in cases_of(topology, split):
            rows = compositions(layers, case.n_chunks, topology.search.chunk_ratio)
            if len(rows):
                fastest = float(rebuild(topology, case, rows, links).seconds.min())
                # Kernels are rounded to whole nanoseconds, the bound is not.
                assert lower_bound_s(topology, case) <= fastest * (1 + 1e-7)
                best = min(best, fastest)
    return best
