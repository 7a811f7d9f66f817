"""What the ranks of a cluster hold and do not train: its digests for the Join, and its description for exports.

Both equal those of a one-process cluster of the same model. A tensor that some rank holds completely is read there. Of
one that is cut (a frozen base under FSDP2) the parts go to rank 0 in logical order, since a digest is taken from all
bytes one after the other: each frozen byte crosses the cluster's network once, at the start.

Memory: one bucket of at most BUCKET_BYTES on rank 0, and on the rank that sends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dips.core.errors import ConfigError
from dips.core.messages import TensorDigest
from dips.core.model_description import MAX_TOLD, Adapter, Lacking, ModelDescription, Untrained, description_from_json
from dips.worker.parallel.agreement import Agreed, Gathering, cells_of
from dips.worker.parallel.held import Box, UntrainedPart, part_of, pieces_of
from dips.worker.parallel.replicas import Copy
from dips.worker.torch_model import begun_digest, description_of, digest_of, local

BUCKET_BYTES = 16 << 20

_FIRST = 0

_Key = tuple[bool, str]
"""Whether it is a buffer, and its name in the full model."""


def _key(part: UntrainedPart) -> _Key:
    return part.what.is_buffer, part.name


class _Row(NamedTuple):
    """What a rank says of one tensor that it does not train."""

    is_buffer: bool
    name: str
    dtype: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    can_be_sent: bool


def untrained_of_ranks(ranks: Gathering, copy: Copy, agreed: Agreed) -> tuple[Untrained, str]:
    """The digests of what no rank trains, and the description for the layout. All ranks call it together.

    Where two ranks hold a tensor of one name completely, the lowest one's counts, as what is not trained is not pushed.

    Raises ConfigError on every rank for a frozen parameter that is two tensors, or of which no rank holds a part.
    """
    parts: dict[_Key, UntrainedPart] = {}
    for part in agreed.mine.untrained:
        parts.setdefault(_key(part), part)  # of two modules of this rank, the first one's counts
    said = _said(ranks, parts)
    holders = _holders(said)
    digests: dict[_Key, int] = {}
    for key, of_ranks in holders.items():
        whole = next((rank for rank, row in of_ranks.items() if row.sizes == row.shape), None)
        if whole == ranks.rank:
            digests[key] = digest_of(key[1], parts[key].what)
        elif whole is None:
            digest = _digest_of_parts(ranks.rank, copy, of_ranks, parts.get(key))
            if ranks.rank == _FIRST:
                digests[key] = digest
    mine = json.dumps([[is_buffer, name, digest] for (is_buffer, name), digest in digests.items()])
    for text in ranks.gather(mine.encode()):
        digests.update({(bool(is_buffer), str(name)): int(digest) for is_buffer, name, digest in json.loads(text)})
    untrained = Untrained(
        *(tuple(TensorDigest(k[1], digests[k]) for k in holders if k[0] is is_buffer) for is_buffer in (False, True))
    )
    return untrained, _description(ranks, agreed, digests)


def _said(ranks: Gathering, parts: Mapping[_Key, UntrainedPart]) -> list[list[_Row]]:
    """What each rank holds."""
    rows = []
    for (is_buffer, name), part in parts.items():
        tensor = local(part.what.tensor)
        plain = not hasattr(tensor, "__tensor_flatten__") and tensor.layout is torch.strided and not tensor.is_meta
        dtype = str(part.what.tensor.dtype)
        rows.append(_Row(is_buffer, name, dtype, part.shape, *part.box, plain and part.what.has_contents))
    texts = ranks.gather(json.dumps(rows, separators=(",", ":")).encode())
    return [
        [_Row(b, n, d, tuple(shape), tuple(at), tuple(sizes), s) for b, n, d, shape, at, sizes, s in json.loads(text)]
        for text in texts
    ]


def _holders(said: Sequence[Sequence[_Row]]) -> dict[_Key, dict[int, _Row]]:
    """The rows of each tensor, by rank. Raises ConfigError for a frozen parameter that is two tensors."""
    holders: dict[_Key, dict[int, _Row]] = {}
    for rank, rows in enumerate(said):
        for row in rows:
            of_ranks = holders.setdefault((row.is_buffer, row.name), {})
            first, known = next(iter(of_ranks.items()), (rank, row))
            if (row.dtype, row.shape) == (known.dtype, known.shape):
                of_ranks[rank] = row
            elif not row.is_buffer:
                raise ConfigError(
                    f"frozen parameter {row.name!r} is {row.dtype.removeprefix('torch.')} of shape {list(row.shape)} "
                    f"on rank {rank}, and {known.dtype.removeprefix('torch.')} of shape {list(known.shape)} on rank "
                    f"{first}: one name is one tensor in the whole cluster; say with dips.Parallel(shards=...) where "
                    "ranks hold parts of it (docs/integrations.md)"
                )
    return holders


def _digest_of_parts(rank: int, copy: Copy, of_ranks: Mapping[int, _Row], mine: UntrainedPart | None) -> int:
    """The digest of a tensor that no rank holds completely; of use on rank 0 only."""
    row = next(iter(of_ranks.values()))
    boxes: dict[Box, list[int]] = {}
    for holder, each in of_ranks.items():
        if math.prod(each.sizes):
            boxes.setdefault(Box(each.starts, each.sizes), []).append(holder)
    cells = cells_of(boxes)
    if (missing := math.prod(row.shape) - sum(cell.n_elems for cell in cells)) > 0:
        raise ConfigError(
            f"no rank holds {missing} of the {math.prod(row.shape)} elements of {row.name!r}, which is not trained: "
            "all ranks of the cluster together must hold all of it, each its part (docs/integrations.md)"
        )
    dtype: torch.dtype = getattr(torch, row.dtype.removeprefix("torch."))
    digest = begun_digest(dtype, row.shape)
    if not all(each.can_be_sent for each in of_ranks.values()):
        return int(digest.intdigest())
    for window in pieces_of(Box.whole(row.shape), BUCKET_BYTES // dtype.itemsize):
        bucket = torch.empty(window.sizes if rank == _FIRST else 0, dtype=dtype)
        for cell, holders in cells.items():
            # What is in both boxes; without elements where they do not meet.
            starts = tuple(map(max, window.starts, cell.starts))
            stops = tuple(
                min(a + n, b + m)
                for a, n, b, m in zip(window.starts, window.sizes, cell.starts, cell.sizes, strict=True)
            )
            box = Box(starts, tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True)))
            if not box.n_elems:
                continue
            source = holders[0]
            values = torch.empty(0, dtype=dtype)
            if rank == source:
                assert mine is not None, "this rank has said that it holds a part"
                values = part_of(local(mine.what.tensor), mine.box, box).cpu().contiguous()
            elif rank == _FIRST:
                values = torch.empty(box.sizes, dtype=dtype)
            if source != _FIRST and rank in (source, _FIRST):
                copy(values, (source, _FIRST))
            if rank == _FIRST:
                part_of(bucket, window, box).copy_(values)
        if rank == _FIRST:
            digest.update(bucket.reshape(-1).view(torch.uint8).numpy().data)
    return int(digest.intdigest())


# ---- description -----------------------------------------------------------------------------------------------------


def _description(ranks: Gathering, agreed: Agreed, digests: Mapping[_Key, int]) -> str:
    """As description_of() says, of all ranks' modules together."""
    texts = []
    for number, model in enumerate(agreed.mine.models):
        parts = {part.local_name: part for part in agreed.mine.untrained if part.number == number}
        of_model = Untrained(buffers=tuple(TensorDigest(n, digests[_key(part)]) for n, part in parts.items()))
        described = description_from_json(description_of(model, agreed.mine.ids, of_model))
        if described is not None:
            texts.append(_with_global_names(described, parts).to_json())
    said = ranks.gather(json.dumps(texts).encode())
    return merged_description([text for each in said for text in json.loads(each)])


def _with_global_names(described: ModelDescription, parts: Mapping[str, UntrainedPart]) -> ModelDescription:
    lacks = []
    for one in described.lacks:
        part = parts.get(described.prefix + one.name)
        if part is not None:
            one = Lacking(part.name.removeprefix(described.prefix), part.shape, one.dtype, one.digest)
        lacks.append(one)
    return _with(described, lacks)


def merged_description(texts: Sequence[str]) -> str:
    """One description from those of all modules: each tensor once, and the configuration of whichever has one."""
    known = [described for described in map(description_from_json, texts) if described is not None]
    if not known:
        return ""
    first = next((described for described in known if described.config), known[0])
    same = [described for described in known if described.prefix == first.prefix]
    lacks = {one.name: one for described in reversed(same) for one in reversed(described.lacks)}
    if any(described.n_absent and not described.lacks for described in same):
        n_absent = max(described.n_absent for described in same)
        return replace(first, n_absent=n_absent, lacks=(), adapter=_merged_adapter(known)).to_json()  # too many to list
    return replace(_with(first, list(reversed(lacks.values()))), adapter=_merged_adapter(known)).to_json()


def _merged_adapter(known: Sequence[ModelDescription]) -> Adapter | None:
    """The adapter of all modules together: each stage of a pipeline adapts its own."""
    adapters = [described.adapter for described in known if described.adapter is not None]
    if not adapters:
        return None
    first = next((adapter for adapter in adapters if adapter.why_not), adapters[0])
    scaling: dict[str, float] = {}
    if all(adapter.scaling for adapter in adapters):
        for adapter in adapters:
            scaling |= {name: factor for name, factor in adapter.scaling.items() if name}
            scaling.setdefault("", adapter.scaling[""])
        if len({adapter.scaling[""] for adapter in adapters}) > 1:
            scaling = {}
    return replace(first, names={k: v for adapter in adapters for k, v in adapter.names.items()}, scaling=scaling)


def _with(described: ModelDescription, lacks: Sequence[Lacking]) -> ModelDescription:
    absent = tuple(one.name for one in lacks[:MAX_TOLD])
    if not lacks:
        absent, n_absent = described.absent, described.n_absent
        return replace(described, absent=absent, n_absent=n_absent, lacks=())
    return replace(described, absent=absent, n_absent=len(lacks), lacks=tuple(lacks))
