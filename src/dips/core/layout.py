"""Describes the model's parameters and how they are cut: parameters -> layers -> blocks -> chunks.

A layer is the unit of scheduling, a block the unit of placement. Every cluster of a run must have the same
layout_hash. The cut depends on the layout alone, never on the number of slaves, so that sums taken block by
block have the same bits on one slave and on four.

A parameter is trained, or averaged: a buffer (a running statistic) that a round moves to the clusters' mean. Averaged
ones come after all others, in layers of their own: so a block is of one kind, and a slave's memory ends with them.

Digest of a shard: xxh3-128 over the little-endian xxh3-64 checksums of its chunks in (block id, offset) order. Sender
and receiver compute it from checksums that they have anyway, in any order of arrival.

Shapes: a model is one flat float32 vector of n_elems; layers follow each other in it in the order in
which their first parameter appears, and parameters within a layer in their own order. A share's own vector has its
runs one after the other; a run begins and ends at the edges of chunks, so that a chunk has one owner.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version

DEFAULT_BLOCK_ELEMS = 4 * 1024 * 1024
"""16 MiB of float32: small enough to balance over slaves, large enough that a block's overhead vanishes."""

MAX_PARAMETERS = 1_000_000
MAX_ELEMS = 1 << 44
MAX_BLOCKS = 1 << 21
"""Twice MAX_PARAMETERS; blocks are listed one by one, so a tiny block_elems must not fill the memory."""

MAX_NAME_CHARS = 512
MAX_DESCRIPTION_CHARS = 256 * 1024
AVERAGED_LAYER = "(averaged buffers)"
"""Of all of them; no module of torch has such a name."""

DTYPES = frozenset({"float32", "bfloat16", "float16"})
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Parameter:
    """One named tensor. dtype is the cluster's; wire and slaves use float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: str
    averaged: bool = False  # a buffer, not trained

    @property
    def n_elems(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParameterSpan:
    """The position of a parameter in the flat vector."""

    parameter: Parameter
    start_elem: int

    @property
    def stop_elem(self) -> int:
        return self.start_elem + self.parameter.n_elems


@dataclass(frozen=True)
class Block:
    """A contiguous range of one layer; block_id counts blocks over the whole flat vector."""

    block_id: int
    layer: str
    start_elem: int
    n_elems: int
    averaged: bool = False

    @property
    def stop_elem(self) -> int:
        return self.start_elem + self.n_elems

    @property
    def n_bytes(self) -> int:
        return self.n_elems * FLOAT32_BYTES


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of the parameters, cut into layers and blocks."""

    parameters: tuple[Parameter, ...]
    block_elems: int = DEFAULT_BLOCK_ELEMS
    # what an export needs and the shapes do not say (core/model_description.py); empty: nothing. Layouts that differ in
    # it alone are the same: it counts neither for equality nor for the hash.
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(parameter.layer for parameter in self.parameters))

    @cached_property
    def spans(self) -> tuple[ParameterSpan, ...]:
        """Every parameter's place in the flat vector, in flat order."""
        by_layer: dict[str, list[Parameter]] = {layer: [] for layer in self.layers}
        for parameter in self.parameters:
            by_layer[parameter.layer].append(parameter)
        spans: list[ParameterSpan] = []
        start = 0
        for layer in self.layers:
            for parameter in by_layer[layer]:
                spans.append(ParameterSpan(parameter, start))
                start += parameter.n_elems
        return tuple(spans)

    @cached_property
    def n_elems(self) -> int:
        return sum(parameter.n_elems for parameter in self.parameters)

    @cached_property
    def n_trained(self) -> int:
        """Elements [0, n_trained) are trained, the rest is averaged."""
        return sum(parameter.n_elems for parameter in self.parameters if not parameter.averaged)

    @property
    def n_bytes(self) -> int:
        return self.n_elems * FLOAT32_BYTES

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        sizes = dict.fromkeys(self.layers, 0)
        for parameter in self.parameters:
            sizes[parameter.layer] += parameter.n_elems
        blocks: list[Block] = []
        start = 0
        for layer, size in sizes.items():
            for offset in range(0, size, self.block_elems):
                n_elems = min(self.block_elems, size - offset)
                blocks.append(Block(len(blocks), layer, start + offset, n_elems, start >= self.n_trained))
            start += size
        return tuple(blocks)

    @cached_property
    def layout_hash(self) -> bytes:
        """SHA-256 over the canonical JSON of names, shapes, dtypes, layers and the cut."""
        return hashlib.sha256(self.canonical_json().encode()).digest()

    def canonical_json(self) -> str:
        return json.dumps(self._raw(), separators=(",", ":"))

    def to_json(self) -> str:
        """With the description, if there is one."""
        described = {"description": self.description} if self.description else {}
        return json.dumps({**self._raw(), **described}, separators=(",", ":"))

    def _raw(self) -> dict[str, object]:
        rows = [
            [p.name, list(p.shape), p.dtype, p.layer, *([_AVERAGED] if p.averaged else [])] for p in self.parameters
        ]
        return {"block_elems": self.block_elems, "parameters": rows}


def layout_from_json(text: str) -> Layout:
    """Inverse of canonical_json and to_json; raises Refused(LAYOUT) on anything else."""
    try:
        raw = json.loads(text)
        rows = [
            Parameter(str(name), tuple(int(size) for size in shape), str(dtype), str(layer), _averaged(*kind))
            for name, shape, dtype, layer, *kind in raw["parameters"]
        ]
        return Layout(tuple(rows), int(raw["block_elems"]), str(raw.get("description", "")))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(RefusalCode.LAYOUT, f"the layout cannot be read: {error}") from error


_AVERAGED = "averaged"
"""A fifth entry in the row of such a parameter; the others have four, as every layout had before there were any."""


def _averaged(*kind: object) -> bool:
    if kind not in ((), (_AVERAGED,)):
        raise ValueError(f"{kind!r:.80} behind a parameter's layer")
    return bool(kind)


def layer_of(name: str) -> str:
    """The layer of a parameter by its dotted name: up to the first number, else its first part.

    'model.layers.3.mlp.up.weight' -> 'model.layers.3'; 'embedding.weight' -> 'embedding'.
    """
    match = re.match(r"(.*?\.\d+)(?:\.|$)", name)
    return match.group(1) if match else name.split(".", 1)[0]


def first_difference(ours: Layout, theirs: Layout) -> str:
    """One sentence that says where two layouts differ, for the refusal."""
    mine, other = ({p.name: p for p in layout.parameters} for layout in (ours, theirs))
    for name, parameter in mine.items():
        if name not in other and parameter.averaged:
            return f'it leaves out buffer {name!r}, which this run averages: enter the loop with buffers="average"'
        if name not in other:
            return f"it lacks parameter {name!r} of shape {list(parameter.shape)}"
        their = other[name]
        if their.shape != parameter.shape:
            return f"parameter {name!r} has shape {list(their.shape)}, the run's has {list(parameter.shape)}"
        if their.dtype != parameter.dtype:
            return f"parameter {name!r} is {their.dtype}, the run's is {parameter.dtype}"
        if their != parameter:
            return f"parameter {name!r} is in layer {their.layer!r}, the run's is in layer {parameter.layer!r}"
    extra = [name for name in other if name not in mine]
    if extra and other[extra[0]].averaged:
        return f"it averages buffer {extra[0]!r}, which this run does not: enter the loop without buffers="
    if extra:
        return f"it has parameter {extra[0]!r}, which the run's model lacks"
    if ours.block_elems != theirs.block_elems:
        return f"its blocks are {theirs.block_elems} elements long, the run's are {ours.block_elems}"
    at = next(i for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1])
    return (
        f"its parameters are in another order: it has {list(other)[at]!r} where the run's model has {list(mine)[at]!r} "
        "(ranks that hold parts of the model give order=[name for name, _ in model.named_parameters()], of the whole)"
    )


def _check(layout: Layout) -> None:
    def refuse(sentence: str) -> Refused:
        return Refused(RefusalCode.LAYOUT, sentence)

    if not layout.parameters:
        raise refuse("the model has no parameters to train: at least one must require gradients")
    if len(layout.parameters) > MAX_PARAMETERS:
        raise refuse(f"the model has {len(layout.parameters)} parameters, at most {MAX_PARAMETERS} can be")
    if not 1 <= layout.block_elems <= 1 << 32:
        raise refuse(f"block_elems is {layout.block_elems}, it must be between 1 and 2**32")
    if len(layout.description) > MAX_DESCRIPTION_CHARS:
        raise refuse(f"the model's description has more than {MAX_DESCRIPTION_CHARS} characters")
    for parameter in layout.parameters:
        _check_parameter(parameter)
    if layout.parameters[0].averaged:
        raise refuse("the model begins with an averaged buffer: something must be trained, and come before them")
    for before, parameter in itertools.pairwise(layout.parameters):
        if before.averaged and not parameter.averaged:
            raise refuse(f"parameter {parameter.name[:80]!r} comes after averaged buffers: they must be the last")
    mixed = {p.layer for p in layout.parameters if p.averaged} & {p.layer for p in layout.parameters if not p.averaged}
    if mixed:
        raise refuse(f"layer {min(mixed)[:80]!r} has trained parameters and averaged buffers: a layer is of one kind")
    if len({p.name for p in layout.parameters}) != len(layout.parameters):
        raise refuse("two parameters of the model have the same name")
    if layout.n_elems > MAX_ELEMS:
        raise refuse(f"the model has {layout.n_elems} elements, at most {MAX_ELEMS} are served")
    if layout.n_elems // layout.block_elems > MAX_BLOCKS - MAX_PARAMETERS:
        raise refuse(f"blocks of {layout.block_elems} elements would be more than {MAX_BLOCKS}: make them larger")


def _check_parameter(parameter: Parameter) -> None:
    def fail(sentence: str) -> Refused:
        return Refused(RefusalCode.LAYOUT, f"parameter {parameter.name[:80]!r}: {sentence}")

    if not 0 < len(parameter.name) <= MAX_NAME_CHARS or not 0 < len(parameter.layer) <= MAX_NAME_CHARS:
        raise fail(f"its name or layer is empty or longer than {MAX_NAME_CHARS} characters")
    if parameter.dtype not in DTYPES:
        raise fail(f"dtype {parameter.dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    if any(size < 1 for size in parameter.shape) or len(parameter.shape) > 16:
        raise fail(f"shape {list(parameter.shape)} is empty, negative or has more than 16 dimensions")


Buffer = bytes | bytearray | memoryview | NDArray[np.generic]


class Chunk(NamedTuple):
    """Bytes [offset_bytes, offset_bytes + length_bytes) of a block: one data-flow frame.

    A tuple, so that a model of many thousand tiny tensors is sorted and looked up fast.
    """

    block_id: int
    offset_bytes: int
    length_bytes: int


def chunks_of(blocks: Iterable[Block], chunk_bytes: int) -> list[Chunk]:
    """The chunks of the blocks, block by block; only a block's last chunk may be shorter than chunk_bytes."""
    return [
        Chunk(block.block_id, offset, min(chunk_bytes, block.n_bytes - offset))
        for block in blocks
        for offset in range(0, block.n_bytes, chunk_bytes)
    ]


def checksum(payload: Buffer) -> int:
    """xxh3-64 of the payload; releases the interpreter lock."""
    # numpy arrays are buffers at run time; numpy's annotations say so only from Python 3.12 on.
    return xxhash.xxh3_64_intdigest(cast(bytes, payload))


def shard_digest(checksums: Sequence[int] | NDArray[np.uint64]) -> bytes:
    """The digest of a shard, 16 bytes; checksums in (block id, offset) order."""
    return xxhash.xxh3_128_digest(np.asarray(checksums, dtype="<u8").tobytes())


def digest_of_array(values: NDArray[np.float32], blocks: Sequence[Block], chunk_bytes: int) -> bytes:
    """Digest of a shard that is in memory: `values` holds the blocks one after the other."""
    data = np.ascontiguousarray(values).view(np.uint8)
    checksums: list[int] = []
    start = 0
    for block in blocks:
        for chunk in chunks_of([block], chunk_bytes):
            begin = start + chunk.offset_bytes
            checksums.append(checksum(data[begin : begin + chunk.length_bytes]))
        start += block.n_bytes
    return shard_digest(checksums)


I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PublishedModel:
    """A version in memory, as it was published."""

    run_id: str
    version: Version
    tokens: int  # applied up to this version
    layout: Layout
    flat: NDArray[np.float32]  # (layout.n_elems,)
    sequence_tokens: int | None = None  # as the model was trained, where an export says so


@dataclass(frozen=True, eq=False)
class Share:
    """Runs of elements [starts[i], stops[i]) of the whole vector, ascending, none empty, no two adjacent.

    starts, stops: int64, (n_runs,); no run at all: a rank that owns nothing.
    """

    starts: I64
    stops: I64

    @classmethod
    def whole(cls, layout: Layout) -> Share:
        """The only share of a cluster of one rank."""
        return cls(np.array([0], np.int64), np.array([layout.n_elems], np.int64))

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> Share:
        """The share of these [start, stop) runs, ascending; adjacent ones are joined. Raises ValueError where two
        overlap, or one is empty.
        """
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if start >= stop or (joined and start < joined[-1][1]):
                raise ValueError(f"the run [{start}, {stop}) is empty, or overlaps the one before it")
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        table = np.array(joined, np.int64).reshape(-1, 2)
        return cls(table[:, 0].copy(), table[:, 1].copy())

    @cached_property
    def n_elems(self) -> int:
        """Elements of the share's own vector."""
        return int((self.stops - self.starts).sum())

    @cached_property
    def places(self) -> I64:
        """Where each run begins in the share's own vector, (n_runs,)."""
        lengths = self.stops - self.starts
        places: I64 = np.cumsum(lengths) - lengths
        return places

    def runs(self) -> list[tuple[int, int]]:
        """The runs, as [start, stop) of the whole vector."""
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))

    def n_elems_before(self, elem: int) -> int:
        """How many of its elements are before this one of the whole vector; they come first in its own."""
        return int(np.clip(elem - self.starts, 0, self.stops - self.starts).sum())

    def owns(self, start_elem: int, stop_elem: int) -> bool:
        """Whether all of [start_elem, stop_elem) is in one run."""
        run = int(np.searchsorted(self.starts, start_elem, "right")) - 1
        return run >= 0 and stop_elem <= int(self.stops[run])

    def place_of(self, elem: int) -> int:
        """Where this element of the whole vector is in the share's own one. Raises ValueError where it is not owned."""
        run = int(np.searchsorted(self.starts, elem, "right")) - 1
        if run < 0 or elem >= int(self.stops[run]):
            raise ValueError(f"element {elem} is not in this share")
        return int(self.places[run]) + elem - int(self.starts[run])

    def places_of(self, elems: I64) -> I64:
        """place_of() for each of these elements, of any shape. Raises ValueError where one is not owned."""
        run = np.searchsorted(self.starts, elems, "right") - 1
        if elems.size and (run.min() < 0 or bool((elems >= self.stops[run]).any())):
            raise ValueError("some of these elements are not in this share")
        places: I64 = self.places[run] + elems - self.starts[run] if elems.size else elems.copy()
        return places

    def chunks(self, layout: Layout, chunk_bytes: int) -> list[Chunk]:
        """The share's chunks, in (block, offset) order. Raises ValueError where a chunk is in it only in part."""
        chosen: list[Chunk] = []
        blocks = layout.blocks
        for chunk in chunks_of(blocks, chunk_bytes):
            start = blocks[chunk.block_id].start_elem + chunk.offset_bytes // FLOAT32_BYTES
            if self.owns(start, start + chunk.length_bytes // FLOAT32_BYTES):
                chosen.append(chunk)
        if sum(chunk.length_bytes for chunk in chosen) != FLOAT32_BYTES * self.n_elems:
            raise ValueError(f"the share does not consist of whole chunks of {chunk_bytes} bytes")
        return chosen
