"""Compares the elements that several ranks hold: replicas must be equal to the bit, at the start and before each push.

Plain tensors that are parts of a larger one look like replicas, and would be overwritten with another rank's part; the
comparison finds them (docs/decisions/0028). Elements that one rank alone holds cost nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash

from dips.core.errors import ConfigError
from dips.worker.parallel.agreement import Agreed, Cell, Gathering
from dips.worker.parallel.held import Box, part_of
from dips.worker.torch_model import GROUP_ELEMS

SAMPLE_STRIDE = 64
"""A sample takes every 64th element of each cell, with another offset at each push: any 64 adjacent elements (a row of
an embedding, say) are sampled at every push, and each element within 64 pushes."""

WHOLE_ELEMS = 1 << 12
"""Cells up to this size are compared completely: norms and biases cost nothing."""

_logger = logging.getLogger("dips")


Copy = Callable[[torch.Tensor, Sequence[int]], None]
"""Overwrites the tensor of all these ranks with the first one's; called on each of them, in the same order."""


class Replicas:
    """The cells of trained parameters that several ranks hold. Every method is called on all ranks together."""

    def __init__(self, ranks: Gathering, agreed: Agreed) -> None:
        self._ranks = ranks
        self._agreed = agreed
        spans = agreed.layout.spans
        self._cells = [cell for cell in agreed.shared if not spans[cell.parameter].parameter.averaged]
        self._sets = sorted({cell.holders for cell in self._cells})
        self._compared = 0

    def agree(self, *, replicas: bool) -> bool:
        """Compare all values as the ranks enter. replicas: other values are no error, if every rank says so. Returns
        whether some differ, and the lowest holder's are to be given to the others.

        Raises ConfigError on every rank for other values.
        """
        other = self._first_other(0, 1)
        if other is None:
            return False
        where = f"{self._name(other[0])} has other values on rank {other[1]} than on rank {other[0].holders[0]}"
        if not (replicas and self._agreed.are_replicas):
            raise ConfigError(
                f"{where}: one name is one tensor in the whole cluster; where ranks hold parts of it in plain tensors, "
                "or stages count their layers from 0, say so with dips.Parallel(shards=...) (docs/integrations.md), "
                "and for replicas that are not equal yet give dips.Parallel(replicas=True), which gives rank 0's to all"
            )
        if self._ranks.rank == 0:
            _logger.warning("%s: these ranks are replicas, and get rank %d's parameters", where, other[0].holders[0])
        return True

    def compare(self) -> None:
        """Check that the ranks are still equal, which must be so before each push: all values the first time, then a
        sample. Raises ConfigError on every rank, with the first tensor that differs.
        """
        turn, self._compared = self._compared, self._compared + 1
        other = self._first_other(*((turn % SAMPLE_STRIDE, SAMPLE_STRIDE) if turn else (0, 1)))
        if other is not None:
            cell, rank = other
            raise ConfigError(
                f"{self._name(cell)} of rank {rank} is no longer equal to rank {cell.holders[0]}'s, and is not pushed: "
                "ranks that hold the same elements must make equal steps, with gradients that are averaged over all of "
                "them; where they hold parts of one tensor, say so with dips.Parallel(shards=...) "
                "(docs/integrations.md)"
            )

    def give(self, copy: Copy) -> None:
        """Overwrite all copies of an element with the lowest holder's."""
        agreed, rank = self._agreed, self._ranks.rank
        tensors, working_copies = agreed.tensors(), agreed.working_copies()
        here = {piece.parameter: (piece, t) for piece, t in zip(agreed.held[rank], tensors, strict=True)}
        for cell in self._cells:
            if rank in cell.holders:
                piece, tensor = here[cell.parameter]
                for part in _groups(part_of(tensor, Box(piece.starts, piece.sizes), cell.box)):
                    copy(part, cell.holders)
        for tensor, working_copy in zip(tensors, working_copies, strict=True):
            if working_copy is not None:
                working_copy.copy_(tensor)

    def _name(self, cell: Cell) -> str:
        return f"parameter {self._agreed.layout.spans[cell.parameter].parameter.name!r}"

    def _first_other(self, start: int, stride: int) -> tuple[Cell, int] | None:
        """The first cell whose holders differ, and the first of them that differs from its lowest holder."""
        if not self._cells:
            return None
        try:
            mine = self._digests(start, stride)
        except Exception as error:
            self._ranks.gather(json.dumps({"error": str(error)}).encode())
            raise
        sums: dict[str, str] = {}
        for number, holders in enumerate(self._sets):
            if self._ranks.rank in holders:
                of_set = b"".join(d for cell, d in zip(self._cells, mine, strict=True) if cell.holders == holders)
                sums[str(number)] = xxhash.xxh3_128_hexdigest(of_set)
        said = [json.loads(text) for text in self._ranks.gather(json.dumps(sums).encode())]
        for rank, each in enumerate(said):
            if "error" in each:
                raise ConfigError(f"rank {rank} of this cluster cannot take part: {each['error']}")
        if all(len({said[rank][str(i)] for rank in holders}) == 1 for i, holders in enumerate(self._sets)):
            return None
        all_digests = self._ranks.gather(b"".join(mine))
        places = [0] * self._ranks.n_ranks
        found: list[tuple[Cell, int]] = []
        for cell in self._cells:
            digests = {}
            for rank in cell.holders:
                digests[rank] = all_digests[rank][places[rank] : places[rank] + 16]
                places[rank] += 16
            found += [(cell, rank) for rank in cell.holders if digests[rank] != digests[cell.holders[0]]]
        return found[0]

    def _digests(self, start: int, stride: int) -> list[bytes]:
        """Of each cell, in order; empty for one that this rank does not hold."""
        agreed, rank = self._agreed, self._ranks.rank
        here = {piece.parameter: (piece, t) for piece, t in zip(agreed.held[rank], agreed.tensors(), strict=True)}
        digests: list[bytes] = []
        for cell in self._cells:
            if rank not in cell.holders:
                digests.append(b"")
                continue
            piece, tensor = here[cell.parameter]
            part = part_of(tensor, Box(piece.starts, piece.sizes), cell.box)
            whole = part.numel() <= WHOLE_ELEMS
            digests.append(_digest(part, 0 if whole else start, 1 if whole else stride))
        return digests


def _digest(tensor: torch.Tensor, start: int, stride: int) -> bytes:
    """Of the bits of every stride-th element in logical order."""
    digest, past = xxhash.xxh3_128(), 0
    for piece in _groups(tensor):  # so that the host never holds a whole tensor of a device
        flat = piece.reshape(-1)
        taken = flat[(start - past) % stride :: stride]
        past += flat.numel()
        digest.update(taken.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _groups(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of at most GROUP_ELEMS elements, in logical order; of equal shapes the same, whatever their memory."""
    if tensor.numel() <= GROUP_ELEMS:
        yield tensor
        return
    rows = GROUP_ELEMS * tensor.shape[0] // tensor.numel()
    for part in tensor.split(max(1, rows)):
        yield from _groups(part if rows else part[0])
