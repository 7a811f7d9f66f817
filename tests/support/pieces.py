"""What the ranks of a cluster hold of a model, in the forms that each kind of parallelism gives it."""

from __future__ import annotations

from hypothesis import strategies as st

from dips.core.layout import Layout, Parameter
from dips.worker.parallel.ownership import Piece

Held = list[list[Piece]]
"""The pieces of each rank."""


def whole(layout: Layout, parameter: int) -> Piece:
    shape = layout.spans[parameter].parameter.shape
    return Piece(parameter, (0,) * len(shape), shape)


def cut(layout: Layout, parameter: int, dim: int, n: int, each: int | None = None) -> list[Piece]:
    shape = layout.spans[parameter].parameter.shape
    size = -(-shape[dim] // n) if each is None else each
    pieces = []
    for i in range(n):
        start = min(i * size, shape[dim])
        stop = shape[dim] if i == n - 1 else min(start + size, shape[dim])
        starts, sizes = [0] * len(shape), list(shape)
        starts[dim], sizes[dim] = start, stop - start
        pieces.append(Piece(parameter, tuple(starts), tuple(sizes)))
    return pieces


def layout_of(*shapes: tuple[int, ...], averaged: int = 0, block_elems: int = 16) -> Layout:
    """A layout of tensors of these shapes, three in a layer; the last `averaged` ones are buffers."""
    rows = [Parameter(f"layers.{i // 3}.w{i}", shape, "float32", f"layers.{i // 3}") for i, shape in enumerate(shapes)]
    for i in range(len(rows) - averaged, len(rows)):
        rows[i] = Parameter(rows[i].name, rows[i].shape, "float32", "averaged", averaged=True)
    return Layout(tuple(rows), block_elems)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Layout, Held]:
    """Tensors of 0 to 3 dimensions, each whole on some ranks, or in pieces on groups of them, or both."""
    n_ranks = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6))
    layout = layout_of(*shapes, averaged=draw(st.integers(0, len(shapes) - 1)), block_elems=draw(st.integers(1, 40)))
    held: Held = [[] for _ in range(n_ranks)]
    for parameter, span in enumerate(layout.spans):
        n_dims = len(span.parameter.shape)
        kind = draw(st.sampled_from(["whole", "cut", "both"])) if n_dims else "whole"
        if kind != "cut":
            for rank in draw(st.sets(st.integers(0, n_ranks - 1), min_size=1)):
                held[rank].append(whole(layout, parameter))
        if kind != "whole":
            n_pieces = draw(st.integers(1, n_ranks))
            dim = draw(st.integers(0, n_dims - 1))
            size = draw(st.one_of(st.none(), st.integers(0, 3)))
            pieces = cut(layout, parameter, dim, n_pieces, size)
            for rank in range(n_ranks // n_pieces * n_pieces):
                held[rank].append(pieces[rank % n_pieces])
    return layout, held


def transformer(width: int = 64, n_layers: int = 12) -> Layout:
    rows = [Parameter("embed.weight", (16 * width, width), "float32", "embed")]
    for i in range(n_layers):
        shapes = {
            "norm": (width,), "q": (width, width), "o": (width, width), "up": (4 * width, width),
            "down": (width, 4 * width),
        }  # fmt: skip
        rows += [Parameter(f"layers.{i}.{name}", shape, "float32", f"layers.{i}") for name, shape in shapes.items()]
    return Layout(tuple(rows), 4096)


def ddp(layout: Layout, n: int) -> Held:
    return [[whole(layout, i) for i in range(len(layout.spans))] for _ in range(n)]


def fsdp(layout: Layout, n: int) -> Held:
    return [list(pieces) for pieces in zip(*(cut(layout, i, 0, n) for i in range(len(layout.spans))), strict=True)]


def tensor_parallel(layout: Layout, n: int) -> Held:
    """Columns of o and down, rows of the other matrices, norms whole."""
    dims = {"o": 1, "down": 1, "norm": None}
    held: Held = [[] for _ in range(n)]
    for i, span in enumerate(layout.spans):
        dim = dims.get(span.parameter.name.rsplit(".", 1)[1], 0)
        pieces = [whole(layout, i)] * n if dim is None else cut(layout, i, dim, n)
        for rank, piece in enumerate(pieces):
            held[rank].append(piece)
    return held


def pipeline(layout: Layout, n: int, within: Held) -> Held:
    """n stages of as many layers each, the ranks of a stage as in `within`; rank = stage * ranks of a stage + place."""
    layers = list(dict.fromkeys(span.parameter.layer for span in layout.spans))
    stage = {layer: i * n // len(layers) for i, layer in enumerate(layers)}
    return [
        [piece for piece in pieces if stage[layout.spans[piece.parameter].parameter.layer] == s]
        for s in range(n)
        for pieces in within
    ]


def twice(held: Held) -> Held:
    return [list(pieces) for _ in range(2) for pieces in held]
