"""Describes the model's parameters and how they are cut: parameters -> layers -> blocks -> chunks.

A layer is the unit of scheduling, a block the unit of placement. Every cluster of a run must have the same
layout_hash. The cut depends on the layout alone, never on the number of slaves, so that sums taken block by
block have the same bits on one slave and on four.

A parameter is trained, or averaged: a buffer (a running statistic) that a round moves to the clusters' mean. Averaged
ones come after all others, in layers of their own: so a block is of one kind, and a slave's memory ends with them.

Shapes: a model is one flat float32 vector of n_elems; layers follow each other in it in the order in
which their first parameter appears, and parameters within a layer in their own order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass, field
from functools import cached_property

from dips.core.errors import RefusalCode, Refused

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
