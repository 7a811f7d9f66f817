"""Interleaved 1F1B: every device holds several stages, which go round the devices (Narayanan et al.,
arXiv:2104.04473)."""

from __future__ import annotations

from dips.planner.errors import PlanError
from dips.planner.ir import Kind, Op, Schedule, loop


def interleaved_1f1b(n_devices: int, n_microbatches: int, chunks: int = 2) -> Schedule:
    """Microbatches go in groups of n_devices, each through all chunks before the next group.

    Raises PlanError when the microbatches do not divide into such groups.
    """
    if n_microbatches % n_devices:
        raise PlanError(
            f"interleaved 1F1B needs a multiple of {n_devices} microbatches for {n_devices} devices, "
            f"not {n_microbatches}: choose one"
        )
    total = n_microbatches * chunks
    orders = []
    for device in range(n_devices):
        ahead = min(2 * (n_devices - device - 1) + (chunks - 1) * n_devices, total)
        order = [_forward(turn, device, n_devices, chunks) for turn in range(ahead)]
        for turn in range(total):
            if turn + ahead < total:
                order.append(_forward(turn + ahead, device, n_devices, chunks))
            order.append(_backward(turn, device, n_devices, chunks))
        orders.append(tuple(order))
    return Schedule("interleaved_1f1b", loop(n_devices, chunks), n_microbatches, tuple(orders))


def _place(turn: int, n_devices: int, chunks: int) -> tuple[int, int]:
    """(chunk, microbatch) of a turn, counted in the order of forward passes."""
    group, within = divmod(turn, n_devices * chunks)
    chunk, position = divmod(within, n_devices)
    return chunk, group * n_devices + position


def _forward(turn: int, device: int, n_devices: int, chunks: int) -> Op:
    chunk, microbatch = _place(turn, n_devices, chunks)
    return Op(Kind.F, chunk * n_devices + device, microbatch)


def _backward(turn: int, device: int, n_devices: int, chunks: int) -> Op:
    chunk, microbatch = _place(turn, n_devices, chunks)
    return Op(Kind.B, (chunks - 1 - chunk) * n_devices + device, microbatch)
