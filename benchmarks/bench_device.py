"""What an exchange costs a cluster on a CUDA device: its copies against one plain copy, and what training loses.

The floor is one copy between a tensor on the device and pinned memory, of as many bytes as the parameters have in
float32; for a checkpoint's capture, of as many as the inner optimizer's state has. The copies are made turn by turn
with the floors. `host` is how long the training thread is held.

The second table times inner steps (AdamW) without exchanges, with a snapshot after each round of --inner-steps steps,
and with a snapshot and an install: what an exchange costs is the difference of a round's time.
Nothing here judges a number. Without a CUDA device it says so and exits with code 2.

    python benchmarks/bench_device.py [--params N] [--repeats R] [--inner-steps H] [--quick] [--json]

ratio_to_floor = time of the floor / time of the copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from dips.worker.parallel.rank_state import TorchState
from dips.worker.torch_model import TorchParameters

WIDTH = 2048
BATCH = 512
WARM_UP = 2


@dataclass(frozen=True)
class Copied:
    """Medians over the repeats. spread: (slowest - fastest) / median."""

    dtype: str
    name: str
    n_bytes: int
    host_ms: float
    total_ms: float
    spread: float
    gbytes_per_s: float
    ratio_to_floor: float


@dataclass(frozen=True)
class Trained:
    """Of one round of inner steps."""

    dtype: str
    name: str
    round_ms: float
    spread: float
    lost_ms: float


class Cluster:
    """A model on the device with an inner optimizer that has made steps."""

    def __init__(self, n_params: int, dtype: torch.dtype) -> None:
        n_layers = max(1, n_params // WIDTH**2)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers)]
        self.model = torch.nn.Sequential(*layers).to("cuda", dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.parameters = TorchParameters(self.model, self.optimizer)
        self.state = TorchState(self.model, self.optimizer)
        self.n_elems = self.parameters.layout().n_elems
        self.flat = self.parameters.empty(self.n_elems)
        self.x = torch.randn(BATCH, WIDTH, device="cuda", dtype=dtype)
        self.step()
        self.state_bytes = sum(
            tensor.nbytes for state in self.optimizer.state.values() for tensor in state.values() if tensor.is_cuda
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def snapshot(self) -> float:
        """Returns when the training thread goes on."""
        ready = self.parameters.begin_snapshot(self.flat)
        at_s = time.perf_counter()
        assert ready is not None
        ready.wait(0, self.n_elems)
        return at_s

    def install(self) -> float:
        self.parameters.install(self.flat)
        return time.perf_counter()

    def capture(self) -> float:
        self.state.capture()
        return time.perf_counter()


class Floor:
    """One plain copy of n_bytes, each way."""

    def __init__(self, n_bytes: int) -> None:
        self._device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
        self._host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def to_host(self) -> float:
        self._host.copy_(self._device, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter()

    def to_device(self) -> float:
        self._device.copy_(self._host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter()


def copied(dtype: str, cluster: Cluster, repeats: int) -> list[Copied]:
    n_bytes, floor, floor_of_state = cluster.n_elems * 4, Floor(cluster.n_elems * 4), Floor(cluster.state_bytes)
    works: list[tuple[str, int, str, Callable[[], float]]] = [
        ("floor to host", n_bytes, "floor to host", floor.to_host),
        ("snapshot", n_bytes, "floor to host", cluster.snapshot),
        ("floor to device", n_bytes, "floor to device", floor.to_device),
        ("install", n_bytes, "floor to device", cluster.install),
        ("floor of the state", cluster.state_bytes, "floor of the state", floor_of_state.to_host),
        ("capture", cluster.state_bytes, "floor of the state", cluster.capture),
    ]
    host_s: dict[str, list[float]] = {name: [] for name, *_ in works}
    total_s: dict[str, list[float]] = {name: [] for name, *_ in works}
    for n in range(repeats + WARM_UP):
        for name, _, _, work in works:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            freed = work()
            end = time.perf_counter()
            if n >= WARM_UP:
                host_s[name].append(freed - begin)
                total_s[name].append(end - begin)
    median = {name: statistics.median(times) for name, times in total_s.items()}
    return [
        Copied(
            dtype, name, size, statistics.median(host_s[name]) * 1e3, median[name] * 1e3,
            (max(total_s[name]) - min(total_s[name])) / median[name], size / median[name] / 1e9,
            median[against] / median[name],
        )
        for name, size, against, _ in works
    ]  # fmt: skip


def trained(dtype: str, cluster: Cluster, repeats: int, inner_steps: int) -> list[Trained]:
    def a_round(*after: Callable[[], object]) -> None:
        for _ in range(inner_steps):
            cluster.step()
        for each in after:
            each()

    begin_snapshot = partial(cluster.parameters.begin_snapshot, cluster.flat)
    works: dict[str, Callable[[], None]] = {
        "steps alone": a_round,
        "with a snapshot": partial(a_round, begin_snapshot),
        "with a snapshot and an install": partial(a_round, begin_snapshot, cluster.install),
    }
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for n in range(repeats + WARM_UP):
        for name, work in works.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            if n >= WARM_UP:
                times_s[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(times) for name, times in times_s.items()}
    return [
        Trained(
            dtype, name, median[name] * 1e3, (max(times_s[name]) - min(times_s[name])) / median[name],
            (median[name] - median["steps alone"]) * 1e3,
        )
        for name in works
    ]  # fmt: skip


def table(rows: list[Copied] | list[Trained]) -> str:
    cells = [list(asdict(row).items()) for row in rows]
    lines = ["| " + " | ".join(name for name, _ in cells[0]) + " |", "|" + "---|" * len(cells[0])]
    for row in cells:
        lines.append(
            "| " + " | ".join(f"{value:.3g}" if type(value) is float else str(value) for _, value in row) + " |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=350_000_000, help="parameters of the model")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--inner-steps", type=int, default=32, help="H: steps of a round")
    parser.add_argument("--quick", action="store_true", help="a small model, three repeats")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_device cannot run here: PyTorch finds no CUDA device", file=sys.stderr)
        return 2
    n_params, repeats = (20_000_000, 3) if options.quick else (options.params, options.repeats)
    copies: list[Copied] = []
    rounds: list[Trained] = []
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        cluster = Cluster(n_params, dtype)
        copies += copied(name, cluster, repeats)
        rounds += trained(name, cluster, repeats, options.inner_steps)
    device = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps({"device": device, "copies": [*map(asdict, copies)], "rounds": [*map(asdict, rounds)]}))
        return 0
    print(f"{device}, PyTorch {torch.__version__}, {n_params / 1e6:.0f}M parameters, {repeats} repeats")
    print(table(copies))
    print()
    print(table(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
