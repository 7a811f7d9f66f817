"""The exchange between the ranks of one cluster: what moves, and what that takes, against memory and gloo alone.

For each parallelism, collect (before a push) and spread (after a pull) of a transformer's parameters, on the ranks of
this machine, float32 in host memory, one thread for each rank. The floor is a copy of the rank's share in memory, and
gloo's all_to_all of as many bytes as the exchange sends, one after the other; all in turn, the fastest of the repeats.
The second table is what a meeting of the ranks between two steps costs each of them where nothing is to be exchanged:
their reports to the leader, and its answer that training goes on; next to it, gloo's collectives alone. The last table
has no ranks: it is the time of the plan of an exchange for large clusters, on one rank of these. Nothing here judges a
number.

    python benchmarks/bench_exchange.py [--ranks N] [--width W] [--layers L] [--repeats R] [--quick] [--json]

sent: bytes that leave this rank, as a part of its share. of_floor = time of the exchange / time of the floor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.queues import Queue

import numpy as np
import torch
import torch.distributed as dist

from dips.core.layout import FLOAT32_BYTES, Layout, Parameter
from dips.worker.commands import GoOn, from_bytes, to_bytes
from dips.worker.parallel.exchange import Exchange
from dips.worker.parallel.meetings import RankReport, tally
from dips.worker.parallel.ownership import Piece, copies_to_holders, copies_to_owners, shares_of_ranks
from dips.worker.parallel.ranks import PATIENCE, SHORT_BYTES, Ranks, ranks_here

UNIT_BYTES = 1 << 20

BATCHES, MEETINGS = 15, 200

KINDS = ("ddp", "fsdp", "tp")
COLUMNS = ("o", "down")
"""Layers whose ranks under tensor parallelism have columns; the others have rows."""

PLANS = (("fsdp", 32, 1), ("fsdp", 256, 1), ("tp", 8, 4))
"""Kind, ranks that cut each tensor, and replicas of these."""


@dataclass(frozen=True)
class Row:
    """One direction of one parallelism, of the rank that took longest."""

    kind: str
    way: str
    n_elems: int
    sent: float
    exchange_s: float
    copy_s: float
    all_to_all_s: float
    of_floor: float


@dataclass(frozen=True)
class Plan:
    """largest: share of the rank that owns most, of the mean. sent: by all ranks, as a part of the model."""

    kind: str
    n_ranks: int
    n_elems: int
    shares_s: float
    copies_s: float
    n_copies: int
    largest: float
    sent_before_push: float
    sent_after_pull: float


@dataclass(frozen=True)
class Meeting:
    """Of one rank; medians over batches of meetings. processor_s: of all of its threads, gloo's too. gloo_processor_s:
    of a gather and a broadcast of as many bytes alone.
    """

    rank: int
    took_s: float
    processor_s: float
    gloo_processor_s: float


Found = tuple[list[Row], list[Meeting]]


def transformer(width: int, n_layers: int) -> Layout:
    """An embedding, and layers of six matrices and two norms."""
    rows = [Parameter("embed.weight", (8 * width, width), "float32", "embed")]
    for i in range(n_layers):
        shapes = {name: (width, width) for name in ("q", "k", "v", "o")}
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
        rows += [Parameter(f"layers.{i}.{name}", shape, "float32", f"layers.{i}") for name, shape in shapes.items()]
        rows += [Parameter(f"layers.{i}.norm{n}", (width,), "float32", f"layers.{i}") for n in range(2)]
    return Layout(tuple(rows))


def held_by(kind: str, layout: Layout, n_parts: int, n_replicas: int = 1) -> list[list[Piece]]:
    """The pieces of each rank."""
    held: list[list[Piece]] = [[] for _ in range(n_parts)]
    for number, span in enumerate(layout.spans):
        name, shape = span.parameter.name.rsplit(".", 1)[-1], span.parameter.shape
        dim = int(name in COLUMNS) if kind == "tp" else 0
        is_whole = kind == "ddp" or (kind == "tp" and len(shape) == 1)
        size = -(-shape[dim] // n_parts)
        for rank, pieces in enumerate(held):
            starts, sizes = [0] * len(shape), list(shape)
            if not is_whole:
                starts[dim] = min(rank * size, shape[dim])
                sizes[dim] = min(size, shape[dim] - starts[dim])
            pieces.append(Piece(number, tuple(starts), tuple(sizes)))
    return [pieces for _ in range(n_replicas) for pieces in held]


def fastest_s(work: Callable[[], object], repeats: int, group: dist.ProcessGroup) -> float:
    """Of the slowest rank."""
    times_s: list[float] = []
    for _ in range(repeats):
        dist.barrier(group)
        began_s = time.perf_counter()
        work()
        took = torch.tensor([time.perf_counter() - began_s])
        dist.all_reduce(took, dist.ReduceOp.MAX, group)
        times_s.append(float(took))
    return min(times_s)


def all_to_all(n_bytes: int, n_ranks: int, rank: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """As many bytes to the other ranks together; each sends as many as the one that sends most."""
    most = torch.tensor([n_bytes])
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    each = int(most) // FLOAT32_BYTES // max(1, n_ranks - 1)
    splits = [0 if other == rank else each for other in range(n_ranks)]
    sent, received = torch.zeros(sum(splits)), torch.empty(sum(splits))
    return lambda: dist.all_to_all_single(received, sent, splits, splits, group)


def measured(rank: int, n_ranks: int, store: str, layout: Layout, repeats: int, out: Queue[Found]) -> None:
    """One rank's process. The first one tells what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    rows = [
        row for kind in KINDS for row in exchanged(kind, rank, held_by(kind, layout, n_ranks), layout, repeats, group)
    ]
    meetings: list[Meeting] = []
    ranks = ranks_here()
    if ranks is not None:
        mine = meeting(ranks, group)
        meetings = [mine] * n_ranks
        dist.all_gather_object(meetings, mine, group)
    if rank == 0:
        out.put((rows, meetings))
    dist.barrier(group)
    dist.destroy_process_group()


def exchanged(
    kind: str, rank: int, held: list[list[Piece]], layout: Layout, repeats: int, group: dist.ProcessGroup
) -> list[Row]:
    shares = shares_of_ranks(layout, held, UNIT_BYTES)
    exchange = Exchange(layout, held, shares, group)
    tensors = [torch.full(piece.sizes, float(rank)) for piece in held[rank]]
    share, copy = np.ones(shares[rank].n_elems, np.float32), np.ones(shares[rank].n_elems, np.float32)
    copy_s = fastest_s(partial(np.copyto, copy, share), repeats, group)
    ways = (
        ("collect", partial(exchange.collect, tensors, share)),
        ("spread", partial(exchange.spread, share, tensors)),
    )
    rows: list[Row] = []
    for (way, work), n_bytes in zip(ways, exchange.bytes_sent, strict=True):
        exchange_s = fastest_s(work, repeats, group)
        gloo_s = fastest_s(all_to_all(n_bytes, len(held), rank, group), repeats, group)
        floor_s = copy_s + (gloo_s if n_bytes else 0.0)
        rows.append(
            Row(kind, way, layout.n_elems, n_bytes / share.nbytes, exchange_s, copy_s, gloo_s, exchange_s / floor_s)
        )
    return rows


def meeting(ranks: Ranks, group: dist.ProcessGroup) -> Meeting:
    """What one costs this rank; call it on all of them."""
    report, order = RankReport(steps=1, tokens=4096, loss_sum=4096.0, loss_tokens=4096).numbers(), to_bytes(GoOn())
    rows = [torch.zeros(len(report), dtype=torch.float64) for _ in range(ranks.n_ranks)]
    word = torch.zeros(SHORT_BYTES, dtype=torch.uint8)

    def meet() -> None:
        said = ranks.report(report)
        if ranks.is_leader:
            tally([RankReport.of_numbers(numbers) for numbers in said], range(ranks.n_ranks))
            ranks.say(order)
        else:
            from_bytes(ranks.hear(PATIENCE))

    def gloo() -> None:
        dist.gather(rows[0], rows if ranks.is_leader else None, 0, group)
        dist.broadcast(word, 0, group)

    took: dict[Callable[[], None], list[tuple[float, float]]] = {meet: [], gloo: []}
    for _ in range(BATCHES):
        for work, times in took.items():
            dist.barrier(group)
            began_s, used_s = time.perf_counter(), time.process_time()
            for _ in range(MEETINGS):
                work()
            times.append(((time.perf_counter() - began_s) / MEETINGS, (time.process_time() - used_s) / MEETINGS))
    ranks.close()
    took_s, processor_s = map(statistics.median, zip(*took[meet], strict=True))
    _, gloo_s = map(statistics.median, zip(*took[gloo], strict=True))
    return Meeting(ranks.rank, took_s, processor_s, gloo_s)


def on_ranks(n_ranks: int, layout: Layout, repeats: int) -> Found:
    spawned = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        out: Queue[Found] = spawned.Queue()
        store = os.path.join(folder, "store")
        processes = [
            spawned.Process(target=measured, args=(rank, n_ranks, store, layout, repeats, out), daemon=True)
            for rank in range(n_ranks)
        ]
        for process in processes:
            process.start()
        found = out.get()
        for process in processes:
            process.join()
    return found


def planned(layout: Layout, plans: Sequence[tuple[str, int, int]]) -> list[Plan]:
    found: list[Plan] = []
    for kind, n_parts, n_replicas in plans:
        held = held_by(kind, layout, n_parts, n_replicas)
        began_s = time.perf_counter()
        shares = shares_of_ranks(layout, held, UNIT_BYTES)
        shared_s = time.perf_counter()
        tables = copies_to_owners(layout, held, shares), copies_to_holders(layout, held, shares)
        ended_s = time.perf_counter()
        sent = [int(table.n_elems[table.sources != table.targets].sum()) / layout.n_elems for table in tables]
        largest = max(share.n_elems for share in shares) * len(held) / layout.n_elems
        name = kind if n_replicas == 1 else f"{kind} x ddp {n_replicas}"
        spent = shared_s - began_s, ended_s - shared_s
        found.append(Plan(name, len(held), layout.n_elems, *spent, sum(map(len, tables)), largest, *sent))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a width of 256, 2 layers, 2 repeats, a small plan")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    width, n_layers, repeats = arguments.width, arguments.layers, arguments.repeats
    large = transformer(10240, 80)
    if arguments.quick:
        width, n_layers, repeats, large = 256, 2, 2, transformer(1024, 4)
    layout = transformer(width, n_layers)
    rows, meetings = on_ranks(arguments.ranks, layout, repeats)
    plans = planned(large, PLANS)
    setting = {
        "ranks": arguments.ranks, "elems": layout.n_elems, "repeats": repeats, "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }  # fmt: skip
    if arguments.json:
        found = {
            "results": [asdict(r) for r in rows],
            "meetings": [asdict(m) for m in meetings],
            "plans": [asdict(p) for p in plans],
        }
        print(json.dumps({"setting": setting, **found}, indent=2))
        return 0
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(f"{'exchange':<16}{'sent':>8}{'ms':>8}{'copy ms':>10}{'gloo ms':>10}{'of_floor':>10}")
    for r in rows:
        times = f"{1e3 * r.exchange_s:>8.1f}{1e3 * r.copy_s:>10.1f}{1e3 * r.all_to_all_s:>10.1f}"
        print(f"{r.kind + ' ' + r.way:<16}{r.sent:>8.3f}{times}{r.of_floor:>10.2f}")
    print(f"{'meeting':<16}{'ms':>8}{'processor ms':>14}{'gloo alone':>12}")
    for m in meetings:
        times = f"{1e3 * m.took_s:>8.3f}{1e3 * m.processor_s:>14.3f}{1e3 * m.gloo_processor_s:>12.3f}"
        print(f"{f'rank {m.rank}':<16}{times}")
    print(
        f"{'plan':<16}{'ranks':>8}{'elems':>10}{'shares s':>10}{'copies s':>10}{'copies':>10}{'largest':>9}{'sent':>16}"
    )
    for p in plans:
        size = f"{p.n_ranks:>8}{p.n_elems / 1e9:>9.1f}G{p.shares_s:>10.2f}{p.copies_s:>10.2f}{p.n_copies:>10}"
        sent = f"{p.sent_before_push:.3f} / {p.sent_after_pull:.3f}"
        print(f"{p.kind:<16}{size}{p.largest:>9.3f}{sent:>16}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
