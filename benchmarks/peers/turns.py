"""A worker's side of the benchmark: it takes turns as it is told, on standard input, and answers on standard output.

Whatever libraries print goes to standard error. Times are of CLOCK_MONOTONIC, which all processes of a machine share,
so that all clusters of a round end their inner loops at the same moment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from work import SAMPLED, move, shapes


@dataclass(frozen=True)
class Exchange:
    """sync: called when the inner loop has ended; returns when the new parameters are in place. prepare: what may be
    done while the inner loop still runs. stages: of the last sync(), each with the time (CLOCK_MONOTONIC) of its end,
    where the worker itself can tell them.
    """

    sync: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    stages: Callable[[], Sequence[tuple[str, float]]] = tuple


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Model(torch.nn.Module):
    """Parameters, and an inner optimizer as every training loop has one: torch imports more of itself for the first,
    which no system's exchange is to blame for. Nothing here is computed with them.
    """

    def __init__(self, n_params: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = (torch.empty(shape).normal_(0, 0.02, generator=generator) for shape in shapes(n_params))
        self.tensors = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in made])
        self.inner = torch.optim.SGD(self.parameters(), lr=1e-3)


def arguments(description: str | None, *more: str) -> argparse.Namespace:
    """--cluster, --clusters, --params, --threads, and the named options, all text."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cluster", type=int, required=True)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    for name in more:
        parser.add_argument(name, default="")
    return parser.parse_args()


def serve(options: argparse.Namespace, connect: Callable[[Model], AbstractContextManager[Exchange]]) -> None:
    """Make the model, connect, and take turns until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(options.threads)
    model = Model(options.params)
    model_bytes = resident_bytes()
    forget_peak()
    with connect(model) as exchange:
        _say(answers, ready=True, model_bytes=model_bytes, sample=_sample(model))
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "move":
                _move(model, options.cluster, order["turn"])
                exchange.prepare()
                _say(answers, moved=True)
            elif order["do"] == "sync":
                timed = _timed(exchange.sync, order["at_s"])
                _say(answers, **timed, stages=exchange.stages(), sample=_sample(model), peak_bytes=peak_bytes())
            else:
                break


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def peak_bytes() -> int:
    """The most that was resident since forget_peak()."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _timed(sync: Callable[[], None], at_s: float) -> dict[str, float]:
    time.sleep(max(0.0, at_s - time.monotonic()))
    began_s = time.monotonic()
    sync()
    ended_s = time.monotonic()
    return {"took_s": ended_s - began_s, "began_s": began_s, "ended_s": ended_s}


def _move(model: Model, cluster: int, turn: int) -> None:
    with torch.no_grad():
        for i, tensor in enumerate(model.tensors):
            tensor.add_(move(cluster, turn, i))


def _sample(model: Model) -> list[list[float]]:
    with torch.no_grad():
        return [tensor.reshape(-1)[:SAMPLED].tolist() for tensor in model.tensors]


def _say(answers: TextIO, **what: object) -> None:
    print(json.dumps(what), file=answers)
