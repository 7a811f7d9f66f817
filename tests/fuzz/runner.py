"""Feeds targets in turns until the time is over, and says what became of the inputs."""

from __future__ import annotations

import gc
import random
import resource
import time
import traceback
from collections.abc import Sequence

import hypothesis

from fuzz.mutate import shaken
from fuzz.target import Broken, Target

SLICE_INPUTS = 200
"""Inputs of one target before the next has its turn."""

SHAKE_S = 1.5
"""Of fast mutation after each of them."""

MOST_GROWTH_BYTES = 256 << 20
"""Of this process's peak memory over one slice: no input of 1 MiB may cost more."""


def feed(target: Target, n_inputs: int, seed: int | None) -> None:
    """Draw and feed about n_inputs. Raises Broken with the smallest input that shows it."""

    @hypothesis.settings(
        max_examples=n_inputs,
        database=None,
        deadline=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(target.inputs)
    def one(data: bytes) -> None:
        target.keep(data)
        _take(target, data)

    (one if seed is None else hypothesis.seed(seed)(one))()


def shake(target: Target, seconds: float, rng: random.Random, most_inputs: int) -> None:
    """Feed random changes of what was drawn. Raises Broken."""
    end_s = time.monotonic() + seconds
    for number in range(most_inputs):
        if number % 16 == 0 and time.monotonic() >= end_s:
            return
        data = shaken(rng, target.corpus)
        if target.finish is not None and rng.random() < 0.7:
            data = target.finish(data)
        _take(target, data)


def _take(target: Target, data: bytes) -> None:
    try:
        target.take(data)
    except Broken as broken:
        raise Broken(f"{broken}\n  input ({len(data)} bytes): {data[:400].hex()}") from broken


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def feed_for(targets: Sequence[Target], seconds: float, seed: int) -> list[str]:
    """Slices of all targets, again and again. Returns a sentence for each violation; a target that had one rests."""
    end_s = time.monotonic() + seconds
    resting: set[str] = set()
    found: list[str] = []
    turn = 0
    while turn == 0 or time.monotonic() < end_s:
        for target in targets:
            if target.name in resting or (turn and time.monotonic() >= end_s):
                continue
            trouble = _slice(target, seed + turn)
            if trouble:
                resting.add(target.name)
                found.append(trouble)
        turn += 1
        if len(resting) == len(targets):
            break
    return found


def _slice(target: Target, seed: int) -> str:
    gc.collect()
    before = peak_bytes()
    try:
        feed(target, SLICE_INPUTS, seed)
        shake(target, SHAKE_S, random.Random(seed), 1 << 30)
    except Broken as broken:
        cause = broken.__cause__.__cause__ if broken.__cause__ is not None else None
        return f"{broken}\n{''.join(traceback.format_exception(cause)[-4:])[-2000:] if cause else ''}"
    grown = peak_bytes() - before
    return f"{target.name}: {grown >> 20} MiB more memory at the peak" if grown > MOST_GROWTH_BYTES else ""


def table(targets: Sequence[Target]) -> str:
    """How many inputs each target had, and the most frequent outcomes."""
    width = max(len(target.name) for target in targets)
    lines = [f"{'target':<{width}}  {'inputs':>9}  outcomes"]
    for target in targets:
        most = ", ".join(f"{what} {n}" for what, n in target.outcomes.most_common(6))
        lines.append(f"{target.name:<{width}}  {target.n_inputs:>9}  {most}")
    total = sum(target.n_inputs for target in targets)
    return "\n".join([*lines, f"{'all':<{width}}  {total:>9}"])
