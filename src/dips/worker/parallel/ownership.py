"""Who owns what in a cluster of several ranks, and which copies between them that takes.

A rank holds pieces: boxes of the layout's tensors, as its parallelism cuts them. It owns a share: whole chunks of the
flat vector, which it alone pushes and pulls. Everything here follows from the layout and all ranks' pieces alone, so
that each rank computes the same without a message.

Shapes: a table has a row for each copy, and a column for each dimension of the layout's tensors: those that a tensor
lacks come last, with start 0 and size 1. Elements, never bytes, except where a name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dips.core.layout import FLOAT32_BYTES, Layout, Share

I64 = NDArray[np.int64]


class Piece(NamedTuple):
    """A box of one tensor, held by a rank: elements starts[d] <= index[d] < starts[d] + sizes[d]. May be empty."""

    parameter: int  # index in layout.spans
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


# ---- shares ----------------------------------------------------------------------------------------------------------

MOST = (11, 10)
"""No share is above this many times the mean, and one unit."""

NEARLY = (3, 4)
"""A rank that holds this part of what the largest holder of a unit has is as good an owner."""


def shares_of_ranks(layout: Layout, held: Sequence[Sequence[Piece]], unit_bytes: int) -> list[Share]:
    """Each rank's share, from what each rank holds; units of unit_bytes are the data flow's chunks, which stay whole.

    A unit goes to the rank that holds most of it, so that little has to be copied. Where several hold as much
    (replicas, columns of one matrix), those with the smallest shares so far get it, and what none of its holders has
    room for goes to the smallest shares of all.
    """
    # Where the units begin in the flat vector, and where the last one ends; as chunks_of() cuts them.
    unit_elems = unit_bytes // FLOAT32_BYTES
    starts = np.array([block.start_elem for block in layout.blocks], np.int64)
    sizes = np.array([block.n_elems for block in layout.blocks], np.int64)
    n_units = -(-sizes // unit_elems)
    within = np.arange(n_units.sum()) - np.repeat(np.cumsum(n_units) - n_units, n_units)
    edges = np.append(np.repeat(starts, n_units) + unit_elems * within, layout.n_elems)
    loads = np.zeros(len(held), np.int64)
    limit = max(layout.n_elems * MOST[0] // (MOST[1] * len(held)), layout.n_elems // len(held) + 1)
    owner = np.full(edges.size - 1, -1, np.int64)
    for candidates, first, last in _runs_of_candidates(layout, held, edges):
        _deal(owner, edges, first, last, candidates, loads, limit)
    everyone = np.arange(len(held))
    for first, last in _runs(owner == -1):
        _deal(owner, edges, first, last, everyone, loads, limit)
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    lasts = np.append(firsts[1:], owner.size)
    owners = owner[firsts]
    return [Share(edges[firsts[owners == rank]], edges[lasts[owners == rank]]) for rank in range(len(held))]


def _runs_of_candidates(layout: Layout, held: Sequence[Sequence[Piece]], edges: I64) -> list[tuple[I64, int, int]]:
    """(candidates, first, last): units [first, last) are held best by the same ranks; those with fewest first, so that
    who has a choice can make up for who has none. Units that no one holds are in no run.
    """
    alike: dict[tuple[Piece, ...], list[int]] = {}  # replicas are counted once
    for rank, pieces in enumerate(held):
        alike.setdefault(tuple(pieces), []).append(rank)
    n_kinds = len(alike)
    keys, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for kind, pieces in enumerate(alike):
        for piece in pieces:
            units, n_held = _held_of_units(layout, piece, edges)
            keys.append(units * n_kinds + kind)
            counts.append(n_held)
    key, places = np.unique(np.concatenate(keys), return_inverse=True)
    count = np.zeros(key.size, np.int64)
    np.add.at(count, places, np.concatenate(counts))
    key, count = key[count > 0], count[count > 0]
    if not key.size:
        return []
    unit = key // n_kinds
    begins = np.flatnonzero(np.diff(unit, prepend=-1))
    most = np.repeat(np.maximum.reduceat(count, begins), np.diff(begins, append=unit.size))
    is_good = count * NEARLY[1] >= most * NEARLY[0]
    unit, kind_of = unit[is_good], key[is_good] % n_kinds
    begins = np.flatnonzero(np.diff(unit, prepend=-1))
    sizes = np.diff(begins, append=unit.size)
    # Compares each unit's kinds with those of the unit before: as many, and each the same.
    same = np.zeros(begins.size, np.bool_)
    same[1:] = (sizes[1:] == sizes[:-1]) & (np.diff(unit[begins]) == 1)
    shifted = np.arange(unit.size) - np.repeat(np.append(0, sizes[:-1]), sizes)
    equal = kind_of == kind_of[np.maximum(shifted, 0)]
    same &= np.logical_and.reduceat(equal, begins)
    members = [np.array(ranks, np.int64) for ranks in alike.values()]
    runs: list[tuple[I64, int, int]] = []
    firsts = np.flatnonzero(~same)
    for first, last in zip(firsts.tolist(), [*firsts[1:].tolist(), begins.size], strict=True):
        kinds = kind_of[begins[first] : begins[first] + sizes[first]].tolist()
        candidates = members[kinds[0]] if len(kinds) == 1 else np.sort(np.concatenate([members[k] for k in kinds]))
        runs.append((candidates, int(unit[begins[first]]), int(unit[begins[last - 1]]) + 1))
    runs.sort(key=lambda run: run[0].size)
    return runs


def _held_of_units(layout: Layout, piece: Piece, edges: I64) -> tuple[I64, I64]:
    """The units that the piece reaches into, and how many of their elements are in it (0 for some in between)."""
    span = layout.spans[piece.parameter]
    shape, starts, sizes = span.parameter.shape or (1,), piece.starts or (0,), piece.sizes or (1,)
    if not math.prod(sizes):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = last = 0
    for width, start, size in zip(shape, starts, sizes, strict=True):
        first, last = first * width + start, last * width + start + size - 1
    begin = int(np.searchsorted(edges, span.start_elem + first, "right")) - 1
    end = int(np.searchsorted(edges, span.start_elem + last, "right"))
    at = np.minimum(np.maximum(edges[begin : end + 1] - span.start_elem, first), last + 1)
    if last + 1 - first > math.prod(sizes):  # with gaps between its rows
        # How many elements of the box come before each of these elements of the flat tensor.
        total, rest, inside = np.zeros_like(at), at, np.ones(at.shape, np.bool_)
        for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            index, rest = np.divmod(rest, math.prod(shape[d + 1 :]))
            total += np.where(inside, np.clip(index - start, 0, size) * math.prod(sizes[d + 1 :]), 0)
            inside &= (start <= index) & (index < start + size)
        at = total
    return np.arange(begin, end), at[1:] - at[:-1]


def _deal(owner: I64, edges: I64, first: int, last: int, candidates: I64, loads: I64, limit: int) -> None:
    """Give units [first, last) to the candidates, to each a run of them, so that those with the smallest loads are
    filled up to one level, which is `limit` at most; those that no candidate has room for stay without an owner.
    """
    total = int(edges[last] - edges[first])
    if candidates.size == 1 and int(loads[candidates[0]]) + total <= limit:
        owner[first:last] = candidates[0]
        loads[candidates[0]] += total
        return
    ascending = np.sort(loads[candidates])
    levels = -(-(total + np.cumsum(ascending)) // np.arange(1, candidates.size + 1))
    level = min(int(levels[np.argmax(np.append(levels[:-1] <= ascending[1:], True))]), limit)
    takers = candidates[loads[candidates] < level]
    ends = edges[first] + np.cumsum(level - loads[takers])
    here = edges[first : last + 1]
    after = np.clip(np.searchsorted(here, ends), 1, last - first)
    cuts = first + after - (ends - here[after - 1] < here[after] - ends)
    begin = first
    for rank, end in zip(takers.tolist(), cuts.tolist(), strict=True):
        owner[begin:end] = rank
        loads[rank] += edges[end] - edges[begin]
        begin = end


def _runs(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[first, last) of each run of chosen ones."""
    turns = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
    return zip(turns[::2], turns[1::2], strict=True)


# ---- copies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Copies:
    """A table of copies, each of a box of one tensor, in about the order of the flat vector.

    Every box is in one run of its owner's share, so that it is a strided view there, and in one piece of its holder.
    """

    sources: I64  # ranks, (n,)
    targets: I64
    pieces: I64  # index in held[holder], (n,)
    parameters: I64  # index in layout.spans, (n,)
    starts: I64  # of the box in the whole tensor, (n, n_dims)
    sizes: I64

    @cached_property
    def n_elems(self) -> I64:
        """Elements of each copy, (n,)."""
        products: I64 = self.sizes.prod(axis=1)
        return products

    def __len__(self) -> int:
        return self.sources.size

    def where(self, chosen: NDArray[np.bool_] | I64) -> Copies:
        """These rows of the table."""
        return Copies(*(getattr(self, column.name)[chosen] for column in fields(self)))


def copies_to_owners(layout: Layout, held: Sequence[Sequence[Piece]], shares: Sequence[Share]) -> Copies:
    """Every owned element once, from a rank that holds it: the owner itself, or else the one of its holders that sends
    least so far. Averaged buffers are the lowest holder's, as replicas' may differ.

    Raises ValueError with the name of a tensor of which no rank holds an element.
    """
    tables: list[Copies] = []
    sent = [0] * len(held)
    for here in _tensors(layout, held, shares):
        boxes, cells, starts, sizes = here.owned(here.geometry.cell_starts, here.geometry.cell_stops)
        owners, entry_of = here.owners[boxes], here.geometry.entry_of
        entries = here.geometry.first_entry[cells]
        if not layout.spans[here.parameter].parameter.averaged:
            own = entry_of[cells, owners]
            entries = np.where(own >= 0, own, entries)
            with_choice = np.flatnonzero((own < 0) & (here.geometry.n_holders[cells] > 1))
            n_elems = sizes[with_choice].prod(axis=1).tolist()
            for row, n in zip(with_choice.tolist(), n_elems, strict=True):
                holders: list[int] = np.flatnonzero(entry_of[cells[row]] >= 0).tolist()
                rank = min(holders, key=sent.__getitem__)
                entries[row] = entry_of[cells[row], rank]
                sent[rank] += n
        sources = here.geometry.rank_of[entries]
        tables.append(here.table(sources, owners, entries, starts, sizes))
    return _joined(layout, tables)


def copies_to_holders(layout: Layout, held: Sequence[Sequence[Piece]], shares: Sequence[Share]) -> Copies:
    """Every element of every piece once, from its owner."""
    tables: list[Copies] = []
    for here in _tensors(layout, held, shares):
        boxes, cut, starts, sizes = here.owned(here.geometry.box_starts, here.geometry.box_stops)
        n_each = here.geometry.n_entries[cut]
        rows = np.repeat(np.arange(cut.size), n_each)
        turn = np.arange(rows.size) - np.repeat(np.cumsum(n_each) - n_each, n_each)
        entries = here.geometry.entries[here.geometry.first_of_box[cut[rows]] + turn]
        targets = here.geometry.rank_of[entries]
        tables.append(here.table(here.owners[boxes[rows]], targets, entries, starts[rows], sizes[rows]))
    return _joined(layout, tables)


class _Geometry:
    """How the ranks hold one tensor; the same for all tensors that are cut alike.

    An entry is a rank with one of its pieces; a box is a piece that may be held by several; a cell is a part of the
    tensor that no edge of a box cuts, so that all of it has the same holders.
    """

    def __init__(self, shape: tuple[int, ...], held: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]], n: int):
        """held: rank, starts and sizes of each entry, in the order of ranks; n: ranks."""
        self.rank_of = np.array([rank for rank, _, _ in held], np.int64)
        by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for entry, (_, starts, sizes) in enumerate(held):
            by_box.setdefault((starts, sizes), []).append(entry)
        self.box_starts = np.array([starts for starts, _ in by_box], np.int64).reshape(-1, len(shape))
        self.box_stops = self.box_starts + np.array([sizes for _, sizes in by_box], np.int64).reshape(-1, len(shape))
        self.entries = np.array([entry for entries in by_box.values() for entry in entries], np.int64)
        self.n_entries = np.array([len(entries) for entries in by_box.values()], np.int64)
        self.first_of_box = np.cumsum(self.n_entries) - self.n_entries
        ends = [
            np.unique(np.concatenate([[0, size], self.box_starts[:, d], self.box_stops[:, d]]))
            for d, size in enumerate(shape)
        ]
        self.cell_starts = _grid([each[:-1] for each in ends])
        self.cell_stops = _grid([each[1:] for each in ends])
        covers = np.ones((len(self.cell_starts), len(self.box_starts)), np.bool_)
        for d in range(len(shape)):
            covers &= self.cell_starts[:, d, None] >= self.box_starts[None, :, d]
            covers &= self.cell_stops[:, d, None] <= self.box_stops[None, :, d]
        self.entry_of = np.full((len(self.cell_starts), n), -1, np.int64)  # (cells, ranks); -1: not held there
        for box, entries in reversed(list(enumerate(by_box.values()))):
            self.entry_of[np.ix_(np.flatnonzero(covers[:, box]), self.rank_of[entries])] = entries
        self.n_holders = (self.entry_of >= 0).sum(axis=1)
        self.first_entry = self.entry_of[np.arange(len(self.entry_of)), (self.entry_of >= 0).argmax(axis=1)]


@dataclass(frozen=True, eq=False)
class _Tensor:
    """One tensor: how it is held, and by whom each box of it is owned."""

    parameter: int
    geometry: _Geometry
    piece_of: I64  # of each entry
    owners: I64  # of each owned box, (n_boxes,)
    starts: I64  # (n_boxes, tensor's dimensions)
    stops: I64

    def owned(self, starts: I64, stops: I64) -> tuple[I64, I64, I64, I64]:
        """The parts of the owned boxes in these other ones: number of the owned box, of the other one, start, size."""
        meets = np.ones((len(self.starts), len(starts)), np.bool_)
        for d in range(starts.shape[1]):
            meets &= self.starts[:, d, None] < stops[None, :, d]
            meets &= starts[None, :, d] < self.stops[:, d, None]
        mine, other = np.nonzero(meets)
        begins = np.maximum(self.starts[mine], starts[other])
        return mine, other, begins, np.minimum(self.stops[mine], stops[other]) - begins

    def table(self, sources: I64, targets: I64, entries: I64, starts: I64, sizes: I64) -> Copies:
        parameters = np.full(sources.size, self.parameter)
        return Copies(sources, targets, self.piece_of[entries], parameters, starts, sizes)


def _tensors(layout: Layout, held: Sequence[Sequence[Piece]], shares: Sequence[Share]) -> Iterator[_Tensor]:
    """Each tensor of the layout in flat order. Raises ValueError for one of which no rank holds an element."""
    owners = np.repeat(np.arange(len(shares)), [share.starts.size for share in shares])
    starts = np.concatenate([share.starts for share in shares])
    order = np.argsort(starts)
    owners, starts, stops = owners[order], starts[order], np.concatenate([share.stops for share in shares])[order]
    entries_of: list[list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = [[] for _ in layout.spans]
    pieces_of: list[list[int]] = [[] for _ in layout.spans]
    for rank, pieces in enumerate(held):
        for i, piece in enumerate(pieces):
            if math.prod(piece.sizes):
                entries_of[piece.parameter].append((rank, piece.starts or (0,), piece.sizes or (1,)))
                pieces_of[piece.parameter].append(i)
    known: dict[object, _Geometry] = {}
    for parameter, span in enumerate(layout.spans):
        shape = span.parameter.shape or (1,)
        key = (shape, tuple(entries_of[parameter]))
        if key not in known:
            known[key] = _Geometry(shape, entries_of[parameter], len(held))
        if not known[key].n_holders.all():
            raise ValueError(f"no rank holds all of tensor {span.parameter.name!r}, alone or with others")
        first = int(np.searchsorted(stops, span.start_elem, "right"))
        last = int(np.searchsorted(starts, span.stop_elem))
        begins = np.maximum(starts[first:last], span.start_elem) - span.start_elem
        ends = np.minimum(stops[first:last], span.stop_elem) - span.start_elem
        runs, box_starts, box_stops = _boxes_of_runs(begins, ends, shape)
        own = np.array(pieces_of[parameter], np.int64)
        yield _Tensor(parameter, known[key], own, owners[first:last][runs], box_starts, box_stops)


def _boxes_of_runs(begins: I64, ends: I64, shape: tuple[int, ...]) -> tuple[I64, I64, I64]:
    """Runs [begins, ends) of a flat tensor as boxes, in flat order: number of the run, starts and stops of the box.

    A run of a matrix is the end of a row, then whole rows, then the begin of one.
    """
    widths = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    found: list[tuple[I64, I64, I64, int]] = []  # runs, begins, ends, and the dimension in which they are long
    for d in range(len(shape) - 1, 0, -1):
        whole = widths[d - 1]
        head_ends = np.minimum(ends, -(-begins // whole) * whole)
        tail_begins = np.maximum(head_ends, ends // whole * whole)
        for these_begin, these_end in ((begins, head_ends), (tail_begins, ends)):
            some = np.flatnonzero(these_begin < these_end)
            found.append((some, these_begin[some], these_end[some], d))
        begins, ends = head_ends, tail_begins
    some = np.flatnonzero(begins < ends)
    found.append((some, begins[some], ends[some], 0))
    runs = np.concatenate([numbers for numbers, _, _, _ in found])
    flat = np.concatenate([first for _, first, _, _ in found])
    starts = np.stack(np.unravel_index(flat, shape), axis=1).astype(np.int64)
    sizes = np.ones_like(starts)
    row = 0
    for numbers, first, end, d in found:
        here = slice(row, row + numbers.size)
        sizes[here, d] = (end - first) // widths[d]
        sizes[here, d + 1 :] = shape[d + 1 :]
        row += numbers.size
    order = np.argsort(flat)
    return runs[order], starts[order], (starts + sizes)[order]


def _grid(values: Sequence[I64]) -> I64:
    """Every combination of one value for each dimension, in flat order, (n, n_dims)."""
    return np.stack([each.ravel() for each in np.meshgrid(*values, indexing="ij")], axis=1)


def _joined(layout: Layout, tables: Sequence[Copies]) -> Copies:
    """One table of these, each with the dimensions of its tensor."""
    n_dims = max(1, max(len(parameter.shape) for parameter in layout.parameters))

    def widened(columns: Sequence[I64], fill: int) -> I64:
        return np.concatenate(
            [np.pad(each, ((0, 0), (0, n_dims - each.shape[1])), constant_values=fill) for each in columns]
        )

    return Copies(
        np.concatenate([table.sources for table in tables]),
        np.concatenate([table.targets for table in tables]),
        np.concatenate([table.pieces for table in tables]),
        np.concatenate([table.parameters for table in tables]),
        widened([table.starts for table in tables], 0),
        widened([table.sizes for table in tables], 1),
    )
