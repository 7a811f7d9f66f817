"""The agreement of a cluster's ranks: what all hold together, before anything is sent, pulled or overwritten.

Each rank says what it holds and with which settings; from all of that every rank decides alike, without a further
message: the one layout, equal to that of a one-process cluster of the same model, who holds which piece of it, and
which ranks train on the same data. What cannot be one model is refused with one sentence, the same on every rank.

Values of elements that several ranks hold are compared in parallel/replicas.py.
"""

from __future__ import annotations

import itertools
import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from dips.core.errors import ConfigError
from dips.core.layout import Layout, Parameter
from dips.worker.parallel.held import Box, DataPlace, Held, Row
from dips.worker.parallel.ownership import Piece

_logger = logging.getLogger("dips")

_SEE = "docs/integrations.md says what ranks can hold"


class Gathering(Protocol):
    """All ranks of a cluster; each calls the same methods in the same order."""

    rank: int
    n_ranks: int

    def gather(self, mine: bytes) -> list[bytes]:
        """The bytes of each rank, in the order of ranks."""
        ...


class Alone:
    """The only rank of a cluster."""

    rank, n_ranks = 0, 1

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class Cell(NamedTuple):
    """A box of one tensor that several ranks hold, and of which none holds only a part. parameter: as in Piece."""

    parameter: int
    box: Box
    holders: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Agreed:
    """What all ranks hold. held: the pieces of each rank, ascending by parameter, none empty. coordinates: of each
    rank; ranks with the same one train on the same data, and their tokens and loss count once.
    """

    rank: int
    layout: Layout
    held: tuple[tuple[Piece, ...], ...]
    coordinates: tuple[int, ...]
    shared: tuple[Cell, ...]
    are_replicas: bool  # every rank says that all hold the whole model
    mine: Held
    places: tuple[int, ...]  # of each of this rank's pieces: its row in mine
    former: Mapping[str, str] = field(default_factory=dict)  # of all ranks, as Held.former

    def tensors(self) -> list[torch.Tensor]:
        """The memory of each of this rank's pieces now, in the piece's shape. As Held.tensors()."""
        tensors = self.mine.tensors()
        return [tensors[place] for place in self.places]

    def working_copies(self) -> list[torch.Tensor | None]:
        """Of each of this rank's pieces the parameter in fewer bits that is written with it; None: there is none."""
        copies = self.mine.working_copies()
        return [copies[place] for place in self.places]


def agree(
    ranks: Gathering,
    held: Held | Exception | None,
    settings: Mapping[str, object],
    *,
    order: Sequence[str] | None = None,
    replicas: bool = False,
) -> Agreed | None:
    """Make sure that all ranks can enter, and what they are together. Returns None when no rank has a master.

    held: what this rank holds; why it cannot take part; None: it has no master, and trains alone. settings: must be
    equal on all ranks. order: the names of the full model in its order, where it does not follow from the ranks'.
    replicas: every rank holds the whole model.

    Raises ConfigError on every rank (on one that cannot take part its own error), Refused(LAYOUT) for a layout that no
    run can have.
    """
    facts = _Facts.of(held, {**settings, "order": order}, replicas)
    meshes: dict[tuple[int, ...], tuple[int, ...]] = {}
    said = [_Facts.from_json(text, meshes) for text in ranks.gather(facts.to_json())]
    if isinstance(held, Exception):
        raise held
    if all(each.has_no_master for each in said):
        return None
    for rank, facts in enumerate(said):
        if facts.error:
            raise ConfigError(f"rank {rank} of this cluster cannot take part: {facts.error}")
    without = [rank for rank, facts in enumerate(said) if facts.has_no_master]
    if without:
        others = next(rank for rank, facts in enumerate(said) if not facts.has_no_master)
        raise ConfigError(
            f"rank {without[0]} of this cluster has no master, and rank {others} has one: set DIPS_MASTER on every "
            "rank (torchrun passes on the variables of its own process), or on none"
        )
    first = said[0].settings or {}
    for rank, facts in enumerate(said):
        theirs = facts.settings or {}
        for key in {**first, **theirs}:
            ours, other = first.get(key), theirs.get(key)
            if ours == other:
                continue
            if key == "order":
                raise ConfigError(
                    f"rank {rank} gives another dips.Parallel(order=...) than rank 0: give all ranks of a cluster the "
                    "same"
                )
            raise ConfigError(
                f"rank {rank} has {key}={other!r} and rank 0 has {key}={ours!r}: give all ranks of a cluster the same"
            )
    rows = [each.rows for each in said]
    _check_rows(rows)
    if any(each.is_replica for each in said):
        for rank, each in enumerate(rows):
            for ours, other in itertools.zip_longest(rows[0], each):
                if ours is not None and other is not None and ours.parameter.name == other.parameter.name:
                    continue
                what = (
                    f"rank {rank} has parameter {other.parameter.name!r} where rank 0 has {ours.parameter.name!r}"
                    if ours is not None and other is not None
                    else f"only rank {0 if other is None else rank} has parameter {(ours or other).parameter.name!r}"
                )
                raise ConfigError(
                    f"{what}: under DistributedDataParallel over all ranks, or with dips.Parallel(replicas=True), "
                    "every rank holds the whole model"
                )
    former = {name: was for each in reversed(said) for name, was in each.former.items()}
    plain = {was: name for name, was in former.items()}
    layout = Layout(tuple(_in_order(rows, order and [plain.get(name, name) for name in order])))
    indices = {span.parameter.name: index for index, span in enumerate(layout.spans)}
    shared = _shared(layout, rows, indices)
    are_replicas = all(each.is_replica for each in said)
    if not are_replicas:
        # Parts of a tensor that are not said to be parts may be equal at the start.
        marked = {row.parameter.name for each in rows for row in each if row.is_marked}
        for cell in shared:
            name = layout.spans[cell.parameter].parameter.name
            if name in marked:
                raise ConfigError(
                    f"parameter {name!r} is marked as tensor_model_parallel, and ranks {_few(cell.holders)} hold it as "
                    "a plain tensor: say with dips.Parallel(shards=...) which part of the full tensor each has, or "
                    f"that they are whole with dips.Parallel(replicas=True) ({_SEE})"
                )
    coordinates = _coordinates(said)
    assert held is not None, "a rank without a master has been refused above"
    pieces = [_pieces(each, indices) for each in rows]
    own = sorted(
        (i for i, row in enumerate(rows[ranks.rank]) if row.box.n_elems), key=lambda i: _index(held, i, indices)
    )
    if ranks.rank == 0 and held.data is None and max(coordinates) + 1 < ranks.n_ranks:
        _logger.info(
            "tokens and loss count for %d of the %d ranks: the others train on the same data (tensor and pipeline "
            "parallelism); if that is wrong, give dips.Parallel(data_mesh=...)", max(coordinates) + 1, ranks.n_ranks,
        )  # fmt: skip
    return Agreed(ranks.rank, layout, tuple(pieces), coordinates, shared, are_replicas, held, tuple(own), former)


def _index(held: Held, row: int, indices: Mapping[str, int]) -> int:
    return indices[held.rows[row].parameter.name]


def _pieces(rows: Sequence[Row], indices: Mapping[str, int]) -> tuple[Piece, ...]:
    return tuple(sorted(Piece(indices[row.parameter.name], *row.box) for row in rows if row.box.n_elems))


# ---- what a rank says ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """What one rank says of itself."""

    error: str = ""
    has_no_master: bool = False
    is_replica: bool = False
    settings: Mapping[str, Any] | None = None
    rows: Sequence[Row] = ()
    data: DataPlace | None = None
    fsdp: DataPlace | None = None
    former: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(held: Held | Exception | None, settings: Mapping[str, object], replicas: bool) -> _Facts:
        if isinstance(held, Exception):
            return _Facts(error=str(held) or type(held).__name__)
        if held is None:
            return _Facts(has_no_master=True)
        plain = json.loads(json.dumps({"buffers": held.buffers, "replicas": replicas, **settings}, default=str))
        is_replica = replicas or held.is_replica
        return _Facts("", False, is_replica, plain, held.rows, held.data, held.fsdp, held.former)

    def to_json(self) -> bytes:
        meshes = list(dict.fromkeys(row.mesh for row in self.rows))
        numbers = {mesh: number for number, mesh in enumerate(meshes)}
        raw = {
            "error": self.error,
            "has_no_master": self.has_no_master,
            "is_replica": self.is_replica,
            "settings": self.settings,
            "meshes": meshes,
            "rows": [
                [p.name, p.shape, p.dtype, p.layer, p.averaged, *box, numbers[mesh], is_marked]
                for p, box, mesh, is_marked in ((r.parameter, r.box, r.mesh, r.is_marked) for r in self.rows)
            ],
            "data": _raw(self.data),
            "fsdp": _raw(self.fsdp),
            "former": dict(self.former),
        }
        return json.dumps(raw, separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes, known: dict[tuple[int, ...], tuple[int, ...]]) -> _Facts:
        """known: the meshes that ranks named before, so that equal ones are one object."""
        raw = json.loads(text)
        meshes = [known.setdefault(mesh, mesh) for mesh in map(tuple, raw["meshes"])]
        rows = [
            Row(
                Parameter(name, tuple(shape), dtype, layer, averaged),
                Box(tuple(starts), tuple(sizes)),
                meshes[mesh],
                is_marked,
            )
            for name, shape, dtype, layer, averaged, starts, sizes, mesh, is_marked in raw["rows"]
        ]
        data, fsdp = (None if raw[key] is None else DataPlace(*raw[key]) for key in ("data", "fsdp"))
        first = raw["error"], raw["has_no_master"], raw["is_replica"], raw["settings"]
        return _Facts(*first, rows, data, fsdp, raw["former"])


def _raw(place: DataPlace | None) -> list[int] | None:
    return None if place is None else [place.coordinate, place.n_coordinates]


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_rows(rows: Sequence[Sequence[Row]]) -> None:
    """Raises ConfigError where one name is two tensors, or a mesh has ranks that do not know of its tensor."""
    first: dict[str, tuple[int, Parameter]] = {}
    by_name = [{row.parameter.name: row for row in each} for each in rows]
    seen: set[tuple[str, int]] = set()
    for rank, each in enumerate(rows):
        for row in each:
            known, parameter = first.setdefault(row.parameter.name, (rank, row.parameter))
            if parameter != row.parameter:
                raise ConfigError(
                    f"parameter {parameter.name!r} is {_what(row.parameter)} on rank {rank}, and {_what(parameter)} on "
                    f"rank {known}: one name is one tensor in the whole cluster; where ranks hold parts of it in plain "
                    f"tensors, or stages count their layers from 0, say so with dips.Parallel(shards=...) ({_SEE})"
                )
            if (parameter.name, id(row.mesh)) in seen:
                continue  # the same mesh, as a rank before this one has it
            seen.add((parameter.name, id(row.mesh)))
            for other in row.mesh:
                theirs = by_name[other].get(parameter.name) if other < len(rows) else None
                if theirs is None or theirs.mesh is not row.mesh:
                    raise ConfigError(
                        f"parameter {parameter.name!r} is cut over ranks {_few(row.mesh)} on rank {rank}, and rank "
                        f"{other} {_instead(theirs, other, len(rows))}: cut it over the same mesh on all ranks of "
                        f"that mesh ({_SEE})"
                    )


def _instead(row: Row | None, rank: int, n_ranks: int) -> str:
    if rank >= n_ranks:
        return f"is none of this cluster's {n_ranks}"
    if row is None:
        return "does not have it"
    return f"has it cut over ranks {_few(row.mesh)}" if row.mesh else "has it as a plain tensor"


def _few(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{list(ranks[:8])} and {len(ranks) - 8} more"


def _what(parameter: Parameter) -> str:
    kind = "an averaged buffer, " if parameter.averaged else ""
    return f"{kind}{parameter.dtype} of shape {list(parameter.shape)}"


# ---- order -----------------------------------------------------------------------------------------------------------


def _in_order(rows: Sequence[Sequence[Row]], order: Sequence[str] | None) -> Iterator[Parameter]:
    """All parameters once, as the full model has them: trained ones, then averaged buffers."""
    parameters = {row.parameter.name: row.parameter for each in rows for row in each}
    for averaged in (False, True):
        lists = [[r.parameter.name for r in each if r.parameter.averaged is averaged] for each in rows]
        names = merged(lists) if order is None else _ordered({n for each in lists for n in each}, order)
        yield from (parameters[name] for name in names)


def _ordered(names: set[str], order: Sequence[str]) -> list[str]:
    missing = names.difference(order)
    if missing:
        raise ConfigError(
            f"dips.Parallel(order=...) lacks {min(missing)!r}: give all names of the full model, as its state_dict() "
            "has them"
        )
    return [name for name in dict.fromkeys(order) if name in names]


def merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """One list of the names of all ranks, in an order that agrees with each rank's.

    Where that leaves a choice, the next name continues the numbered family of the last one (layers.4 after layers.3, on
    whatever rank), and else comes from the lowest rank, but a smaller number of the same family first. So the stages of
    a pipeline come out in the full model's order, also interleaved ones. A tensor that is all that two stages share is
    tied, as an embedding and the head: it stands where the lower rank has it.

    Raises ConfigError where two ranks have two names in opposite orders.
    """
    distinct = _without_ties(list(dict.fromkeys(tuple(names) for names in lists if names)))
    waiting = Counter(name for names in distinct for name in names)
    at = [0] * len(distinct)
    result: list[str] = []
    while any(place < len(names) for place, names in zip(at, distinct, strict=True)):
        heads = [names[place] for place, names in zip(at, distinct, strict=True) if place < len(names)]
        ready = list(dict.fromkeys(head for head, n in Counter(heads).items() if waiting[head] == n))
        if not ready:
            raise ConfigError(
                f"the ranks have parameter {heads[0]!r} and parameter {heads[1]!r} in opposite orders: give all ranks "
                "dips.Parallel(order=...), the names of the full model in its order"
            )
        chosen = _next(ready, result[-1] if result else "")
        result.append(chosen)
        for i, names in enumerate(distinct):
            at[i] += at[i] < len(names) and names[at[i]] == chosen
    return result


def _without_ties(lists: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lists, without a name that is the only one of an earlier list in this one."""
    sets = [set(names) for names in lists]
    first: dict[str, int] = {}
    found: list[list[str]] = []
    for here, names in enumerate(lists):
        places = {first.setdefault(name, here) for name in names} - {here}
        stages = {place for place in places if len(sets[place] & sets[here]) == 1}
        found.append([name for name in names if first[name] not in stages])
    return found


def _next(ready: Sequence[str], last: str) -> str:
    """Of the names that may come next, in the order of ranks, the one that should."""
    chosen = next((name for name in ready if _numbers(last, name) is not None), ready[0])
    for name in ready:
        numbers = _numbers(chosen, name)
        if numbers is not None and numbers[1] < numbers[0]:
            chosen = name
    return chosen


def _numbers(one: str, other: str) -> tuple[int, int] | None:
    """The numbers where two names of one family first differ: 3 and 4 of layers.3.w and layers.4.w."""
    for ours, theirs in zip(one.split("."), other.split("."), strict=False):
        if ours != theirs:
            return (int(ours), int(theirs)) if ours.isdecimal() and theirs.isdecimal() else None
    return None


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _shared(layout: Layout, rows: Sequence[Sequence[Row]], indices: Mapping[str, int]) -> tuple[Cell, ...]:
    """The cells that several ranks hold. Raises ConfigError where no rank holds an element."""
    holders: list[dict[Box, list[int]]] = [{} for _ in layout.spans]
    for rank, each in enumerate(rows):
        for row in each:
            if row.box.n_elems:
                holders[indices[row.parameter.name]].setdefault(row.box, []).append(rank)
    shared: list[Cell] = []
    for index, (span, boxes) in enumerate(zip(layout.spans, holders, strict=True)):
        cells = cells_of(boxes)
        n_missing = span.parameter.n_elems - sum(box.n_elems for box in cells)
        if n_missing:
            raise ConfigError(
                f"no rank holds {n_missing} of the {span.parameter.n_elems} elements of parameter "
                f"{span.parameter.name!r} of shape {list(span.parameter.shape)}: all ranks of the cluster together "
                f"must hold all of it, each its part ({_SEE})"
            )
        shared += [Cell(index, box, tuple(ranks)) for box, ranks in cells.items() if len(ranks) > 1]
    return tuple(shared)


def cells_of(boxes: Mapping[Box, Sequence[int]]) -> dict[Box, list[int]]:
    """The boxes of one tensor with their holders, cut where another box begins or ends; no two cells overlap."""
    if len(boxes) == 1:
        return {box: list(ranks) for box, ranks in boxes.items()}
    edges = (
        [
            sorted({edge for box in boxes for edge in (box.starts[dim], box.starts[dim] + box.sizes[dim])})
            for dim in range(len(next(iter(boxes)).starts))
        ]
        if boxes
        else []
    )
    cells: dict[Box, list[int]] = {}
    for box, ranks in boxes.items():
        runs = []
        for dim, (start, size) in enumerate(zip(*box, strict=True)):
            first, last = bisect_left(edges[dim], start), bisect_left(edges[dim], start + size)
            runs.append(list(itertools.pairwise(edges[dim][first : last + 1])))
        for run in itertools.product(*runs):
            cell = Box(tuple(start for start, _ in run), tuple(stop - start for start, stop in run))
            cells.setdefault(cell, []).extend(ranks)
    return {cell: sorted(ranks) for cell, ranks in cells.items()}


# ---- data coordinates ------------------------------------------------------------------------------------------------


def _coordinates(said: Sequence[_Facts]) -> tuple[int, ...]:
    """The data coordinate of each rank: as the user says, else as FSDP2's mesh does, else ranks with equal pieces are
    replicas that train on different data, and all others share their data. Raises ConfigError where ranks disagree.
    """
    for places in ([each.data for each in said], [each.fsdp for each in said]):
        if not any(places):
            continue
        sizes = [0 if place is None else place.n_coordinates for place in places]
        other = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
        if other is not None:
            raise ConfigError(
                f"rank {other} trains on data {_of_ranks(sizes[other])}, and rank 0 on data {_of_ranks(sizes[0])}: "
                "give all ranks dips.Parallel(data_mesh=...), the DeviceMesh or process group of the ranks that train "
                "on different data"
            )
        return tuple(place.coordinate for place in places if place is not None)
    seen: Counter[frozenset[Any]] = Counter()
    coordinates: list[int] = []
    for each in said:
        pieces = frozenset((row.parameter.name, row.box) for row in each.rows if row.box.n_elems)
        coordinates.append(seen[pieces])
        seen[pieces] += 1
    return tuple(coordinates)


def _of_ranks(n: int) -> str:
    return f"dealt to {n} ranks" if n else "of no mesh"
