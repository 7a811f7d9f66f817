"""Adds up what the slaves measured, block by block in block-id order, so that the bits do not depend on placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dips.core.messages import BlockGram
from dips.core.placement import Placement


class GramError(Exception):
    """A slave's measurement has the wrong blocks or sizes."""


def add_blocks(
    measured: Mapping[str, Sequence[BlockGram]], placement: Placement, k: int
) -> tuple[list[list[float]], list[int]]:
    """The symmetric k x k Gram matrix over all blocks, and the non-finite elements of each participant.

    Raises GramError when a slave measured other blocks than its own, or matrices of another size.
    """
    by_block: dict[int, BlockGram] = {}
    for index, slave in enumerate(placement.slaves):
        own = {block for block, owner in enumerate(placement.slave_of_block) if owner == index}
        given = {item.block: item for item in measured.get(slave, ())}
        if set(given) != own or len(measured.get(slave, ())) != len(own):
            raise GramError(f"slave {slave} measured {len(given)} blocks, not the {len(own)} that it holds")
        by_block |= given
    upper = [0.0] * (k * (k + 1) // 2)
    nonfinite = [0] * k
    for block in range(len(placement.slave_of_block)):
        item = by_block[block]
        if len(item.gram) != len(upper) or len(item.nonfinite_elems) != k:
            raise GramError(f"block {block} was measured for another number of pushes than {k}")
        upper = [total + value for total, value in zip(upper, item.gram, strict=True)]
        nonfinite = [total + value for total, value in zip(nonfinite, item.nonfinite_elems, strict=True)]
    return _square(upper, k), nonfinite


def add_directions(measured: Mapping[str, Sequence[float]], k: int) -> list[list[float]] | None:
    """The symmetric 2k x 2k matrix of directions over all slaves, in slave order; None when a slave measured none.

    Raises GramError for a matrix of another size.
    """
    n_entries = k * (2 * k + 1)
    if not measured or not all(measured.values()):
        return None
    if any(len(entries) != n_entries for entries in measured.values()):
        sizes = {slave: len(entries) for slave, entries in sorted(measured.items())}
        raise GramError(f"directions of {k} pushes have {n_entries} entries, the slaves sent {sizes}")
    rows = zip(*(measured[slave] for slave in sorted(measured)), strict=True)
    return _square([sum(entries) for entries in rows], 2 * k)


def _square(upper: Sequence[float], k: int) -> list[list[float]]:
    """From the upper triangle by rows; the diagonal is clamped to >= 0 (NaN stays NaN)."""
    matrix = [[0.0] * k for _ in range(k)]
    values = iter(upper)
    for row in range(k):
        for column in range(row, k):
            value = next(values)
            matrix[row][column] = matrix[column][row] = 0.0 if row == column and value < 0 else value
    return matrix
