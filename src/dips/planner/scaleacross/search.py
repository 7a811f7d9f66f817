"""Looks for the configuration with the shortest iteration (the paper's section 6.2).

All ways to split, placements, schedules and numbers of chunks are enumerated; for each, divisions of the layers into
chunks are sampled (exploration), and the fastest ones are varied (exploitation). What makes the enumeration small: a
case whose lower bound is not below the best of its kind is not played, and, with PP-out, more stages are not tried
once they make it slower. Random choices follow from the seed and the case alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

import numpy as np

from dips.core.errors import ConfigError
from dips.planner.cluster import divisors
from dips.planner.costs import NS
from dips.planner.scaleacross.iteration import (
    MOST_PASSES,
    Case,
    Floats,
    Outermost,
    Pipelining,
    Sharding,
    Split,
    check_places,
    collective_s,
    ends_of,
    kernels_of,
    layer_costs,
    program_for,
    rebuild,
    ways_of,
)
from dips.planner.scaleacross.topology import Ints, Topology

ROWS_AT_ONCE = 4096
"""Divisions that are played together: more would not fit in a processor's cache."""

ALL_COUNTS = 8
"""Up to so many layers on a stage, each number of chunks is tried; beyond, those of chunks with whole layers."""


class Choice(NamedTuple):
    """One configuration."""

    case: Case
    division: tuple[int, ...]  # layers of each chunk, in the order of the model
    printed_s: float  # Algorithm 1 as printed
    links_s: float  # with one message at a time on each way
    used_bytes: float

    def seconds(self, links: bool) -> float:
        return self.links_s if links else self.printed_s


@dataclass(frozen=True, eq=False)
class Explored:
    """The result of a search."""

    topology: Topology
    links: bool  # what it went by
    best: tuple[Choice, ...]  # of each kind, the fastest first
    present: Choice | None
    n_cases: int
    n_played: int  # cases of them
    n_divisions: int  # played in all


# ---- enumeration -----------------------------------------------------------------------------------------------------


def splits(topology: Topology) -> Iterator[Split]:
    """All ways to split accelerators and batch, fewest stages first. Experts are divided by powers of what divides
    them; TP is that of the file, CP leaves each part of a sequence enough tokens."""
    model, batch, search = topology.model, topology.batch, topology.search
    if not topology.even:
        yield from _uneven_splits(topology)
        return
    for tensor in search.tensor or (topology.accelerators.per_server,):
        if topology.n_accelerators % tensor or model.heads % tensor:
            continue
        for context in divisors(topology.n_accelerators // tensor):
            if batch.sequence_tokens % context or batch.sequence_tokens // context < search.least_context_tokens:
                continue
            for pipeline in divisors(topology.n_accelerators // tensor // context):
                data = topology.n_accelerators // tensor // context // pipeline
                if pipeline > model.layers or batch.sequences % data:
                    continue
                for m in search.microbatches or (1, 2, 4, 8):
                    if batch.sequences // data % m == 0:
                        for expert in divisors(model.experts) if model.experts else [1]:
                            yield Split(tensor, context, expert, pipeline, data, m)


def _uneven_splits(topology: Topology) -> Iterator[Split]:
    """Ways to split where zones or buildings differ: for each number of stages the most replicas for which there is
    room, with DP-out and with PP-out, so that accelerators can be left over."""
    model, batch, search = topology.model, topology.batch, topology.search
    replicas = divisors(batch.sequences)[::-1]
    for tensor in search.tensor or (topology.accelerators.per_server,):
        contexts = divisors(batch.sequence_tokens) if model.heads % tensor == 0 else []
        for context in contexts:
            if batch.sequence_tokens // context < search.least_context_tokens:
                break
            rooms = [len(groups) for groups in topology.groups(tensor * context)]
            for pipeline in range(1, min(model.layers, sum(rooms)) + 1):
                whole = sum(room // pipeline for room in rooms)
                most = {
                    next((d for d in replicas if d <= whole), 0),
                    next((d for d in replicas if sum(room // d for room in rooms) >= pipeline), 0),
                } - {0}
                for data in sorted(most):
                    for m in search.microbatches or (1, 2, 4, 8):
                        if batch.sequences // data % m == 0:
                            for expert in divisors(model.experts) if model.experts else [1]:
                                yield Split(tensor, context, expert, pipeline, data, m)


def counts_of_chunks(layers: int, stages: int) -> list[int]:
    """Chunks of a stage: as few as each size of a chunk, in layers, allows."""
    most = layers // stages
    if most <= ALL_COUNTS:
        return list(range(1, most + 1))
    return sorted({min(most, -(-layers // (stages * size))) for size in range(1, most + 1)})


def kinds(topology: Topology) -> list[tuple[Outermost, Sharding, Pipelining]]:
    """What is compared. With one building nothing is outermost; its network is called DP-out's."""
    places = [(Outermost.DP, Sharding.FSDP)]
    if len(topology.buildings) > 1:
        places += [(Outermost.DP, Sharding.HSDP), (Outermost.PP, Sharding.FSDP)]
    return [(*place, pipelining) for place in places for pipelining in (Pipelining.DORA, Pipelining.ZBV)]


def togethers(stages: int, microbatches: int) -> list[int]:
    return sorted({min(microbatches, k) for k in (stages, 2 * stages, microbatches)})


def cases_of(topology: Topology, split: Split) -> Iterator[Case]:
    """All cases of a split that fit in the buildings and zones."""
    n = split.microbatches(topology)
    for outermost, sharding, pipelining in kinds(topology):
        try:
            check_places(topology, Case(split, outermost, sharding, pipelining, 1, 1))
        except ConfigError:
            continue
        for chunks in counts_of_chunks(topology.model.layers, split.pipeline):
            if chunks * split.pipeline * n <= MOST_PASSES:
                for together in togethers(split.pipeline, n):
                    yield Case(split, outermost, sharding, pipelining, chunks, together)


def lower_bound_s(topology: Topology, case: Case) -> float:
    """No division of this case takes less time, with or without waiting on the ways: the greatest of several bounds.
    Those of the average device hold for the slowest one."""
    split, layers = case.split, layer_costs(topology, case.split)
    n, p = split.microbatches(topology), split.pipeline
    ways = ways_of(topology, case.outermost, case.sharding, split)
    zbv = case.pipelining is Pipelining.ZBV
    slower = 1 + topology.accelerators.zbv_overhead if zbv else 1.0
    forward_s, backward_s = (
        float(times.sum()) * slower for times in (layers.forward_s, layers.input_gradient_s + layers.weight_gradient_s)
    )
    messages_s = [way.message_s(split.message_bytes(topology)) for way in ways.hops]
    gather_s, reduce_s = collective_s(topology, case, ways, layers.exchanged_bytes)
    first_s, last_s = float(gather_s.min()), float(reduce_s.min())  # of one layer: before and after anything else
    # The smallest chunk has this many layers at least, since no chunk has more than chunk_ratio times as many.
    least = max(1, int(np.ceil(topology.model.layers / case.n_chunks / topology.search.chunk_ratio)))
    fill_s = sum(
        (p - 1 - stage) * (least * float(layers.forward_s.min()) * slower + message_s)
        for stage, message_s in enumerate(messages_s[:-1])
    )
    bounds = [n * (forward_s + backward_s) / p + fill_s / p + last_s]
    # The device with the longest layer (usually the last one, with the output layer) has others as well.
    others_s = (case.chunks * least - 1) * float(layers.total_s.min())
    bounds.append(n * slower * (float(layers.total_s.max()) + others_s))
    # One microbatch goes forward and back through all chunks; interleaved ZBV has so many on their way at most.
    turns = case.chunks * sum(messages_s[:-1]) + (0.0 if zbv else (case.chunks - 1) * sum(messages_s[-1:]))
    path_s = forward_s + float(layers.input_gradient_s.sum()) * slower + 2 * turns
    bounds.append(path_s * (n / min(n, case.together) if zbv else 1.0))
    # The reduce-scatters of the average stage, one after another. With DoraPP the first of them waits for all but the
    # last group.
    whole = layer_costs(topology, case.split).exchanged_bytes.sum() / case.split.pipeline
    none_s, all_s = collective_s(topology, case, ways, np.array([0.0, whole]))[1]
    reducing_s = float(all_s - none_s + case.chunks * none_s)
    group = (n - 1) % case.together + 1
    bounds.append(reducing_s + (0.0 if zbv else (n * forward_s + (n - group) * backward_s) / p))
    return first_s + max(bounds)


# ---- divisions -------------------------------------------------------------------------------------------------------


def even(layers: int, chunks: int) -> list[int]:
    """As even as possible; the remainder goes to chunks in the middle, since the first and the last have the embedding
    and the output layer as well."""
    whole, rest = divmod(layers, chunks)
    first = (chunks - rest) // 2
    return [whole + (first <= chunk < first + rest) for chunk in range(chunks)]


def valid(divisions: Ints, ratio: float) -> Ints:
    """The divisions without doubles whose largest chunk is not more than `ratio` times the smallest."""
    keep = (divisions.min(axis=1) >= 1) & (divisions.max(axis=1) <= ratio * divisions.min(axis=1))
    return np.unique(divisions[keep], axis=0)


def sampled(layers: int, chunks: int, ratio: float, samples: int, rng: np.random.Generator) -> Ints:
    """The even division, ones whose last or first chunk is smaller, and random ones."""
    base = even(layers, chunks)
    rows = [base]
    if chunks > 1:
        light = even(layers - max(1, base[-1] - 1), chunks - 1)
        rows += [[*light, layers - sum(light)], [layers - sum(light), *light]]
    weights = rng.uniform(1.0, ratio, (samples, chunks))
    exact = weights / weights.sum(axis=1, keepdims=True) * layers
    sizes = np.maximum(1, np.floor(exact).astype(np.int64))
    # The largest remainders get what is left.
    order = np.argsort(np.argsort(sizes - exact, axis=1), axis=1)
    sizes += order < (layers - sizes.sum(axis=1, keepdims=True))
    good = sizes[sizes.sum(axis=1) == layers]
    found = valid(np.concatenate((np.array(rows, np.int64), good)), ratio)
    if len(found) <= samples:
        return found
    keep = rng.permutation(len(found))[:samples]
    return np.unique(np.concatenate((valid(np.array(rows, np.int64), ratio), found[keep])), axis=0)


def varied(divisions: Ints, ratio: float, variations: int, rng: np.random.Generator) -> Ints:
    """Each division with one to three layers moved from a chunk to another one, in so many ways."""
    if divisions.shape[1] == 1 or not variations:
        return divisions[:0]
    rows = np.repeat(divisions, variations, axis=0)
    moves, at = rng.integers(1, 4, len(rows)), np.arange(len(rows))
    for move in range(3):
        source, target = rng.integers(0, rows.shape[1], (2, len(rows)))
        moved = (moves > move).astype(np.int64)
        rows[at, source] -= moved
        rows[at, target] += moved
    return valid(rows, ratio)


# ---- search ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Found:
    """What was played of one case."""

    case: Case
    divisions: Ints
    seconds: Floats


def _play(topology: Topology, case: Case, divisions: Ints, links: bool) -> _Found:
    parts = [
        rebuild(topology, case, divisions[first : first + ROWS_AT_ONCE], links).seconds
        for first in range(0, len(divisions), ROWS_AT_ONCE)
    ]
    return _Found(case, divisions, np.concatenate(parts) if parts else np.empty(0))


def _rng(topology: Topology, case: Case, phase: int) -> np.random.Generator:
    return np.random.default_rng([topology.search.seed, phase, crc32(repr(case).encode())])


def explore(topology: Topology, links: bool = False) -> Explored:
    """Search. links: go by the times with one message at a time on each way, not by Algorithm 1 as printed.

    Raises ConfigError where nothing fits.
    """
    search, layers = topology.search, topology.model.layers
    bounded = sorted(
        ((lower_bound_s(topology, case), case) for split in splits(topology) for case in cases_of(topology, split)),
        key=lambda row: (_group(row[1]), row[1].split.pipeline, row[0]),
    )
    groups = [list(rows) for _, rows in groupby(bounded, key=lambda row: _group(row[1]))]
    groups.sort(key=lambda rows: min(bound for bound, _ in rows))
    best: dict[tuple[Outermost, Sharding, Pipelining], float] = {}
    found: list[_Found] = []
    for rows in groups:
        before = np.inf  # the best with fewer stages
        for _, same in groupby(rows, key=lambda row: row[1].split.pipeline):
            now = np.inf
            for bound, case in same:
                if bound >= best.get(case.kind, np.inf):
                    now = min(now, bound)
                    continue
                divisions = sampled(layers, case.n_chunks, search.chunk_ratio, search.samples, _rng(topology, case, 0))
                played = _play(topology, case, divisions, links)
                found.append(played)
                fastest = float(played.seconds.min(initial=np.inf))
                now = min(now, fastest)
                best[case.kind] = min(best.get(case.kind, np.inf), fastest)
            if rows[0][1].outermost is Outermost.PP and np.isfinite(before) and now >= before:
                break
            before = min(before, now)
    if not any(np.isfinite(one.seconds).any() for one in found):
        raise ConfigError(
            f"{topology.file}: no configuration of {len(bounded)} fits in memory_gib = "
            f'{topology.accelerators.memory_gib:g} and in the buildings: use recompute = "full" in [batch], '
            "smaller microbatches or another tensor in [search]"
        )
    n_explored = sum(len(one.divisions) for one in found)
    varied_ = _exploited(topology, found, links)
    chosen = _best_of_each(topology, [*found, *varied_])
    chosen.sort(key=lambda choice: (choice.seconds(links), choice.case.n_chunks))
    present = None if topology.present is None else fastest_of(topology, *present_case(topology), links)
    return Explored(
        topology, links, tuple(chosen), present, len(bounded), len(found),
        n_explored + sum(len(one.divisions) for one in varied_),
    )  # fmt: skip


def _group(case: Case) -> tuple[object, ...]:
    """What is played together: with PP-out, cases that differ only by stages and how these are used; else one case."""
    split = case.split
    if case.outermost is Outermost.PP:
        return (*case.kind, split.tensor, split.context, split.expert, split.microbatch_sequences)
    return (*case.kind, *split, case.chunks, case.together)


def _exploited(topology: Topology, found: Sequence[_Found], links: bool) -> list[_Found]:
    """Variations of the fastest configurations, and of the fastest one of each kind."""
    search = topology.search
    seconds = np.concatenate([one.seconds for one in found])
    limit = np.partition(seconds, min(search.top, len(seconds)) - 1)[min(search.top, len(seconds)) - 1]
    fastest: dict[tuple[Outermost, Sharding, Pipelining], float] = {}
    for one in found:
        fastest[one.case.kind] = min(fastest.get(one.case.kind, np.inf), float(one.seconds.min(initial=np.inf)))
    results = []
    for one in found:
        chosen = (one.seconds <= limit) | (one.seconds == fastest[one.case.kind])
        chosen &= np.isfinite(one.seconds)
        rows = varied(one.divisions[chosen], search.chunk_ratio, search.variations, _rng(topology, one.case, 1))
        if len(rows):
            results.append(_play(topology, one.case, rows, links))
    return results


def _best_of_each(topology: Topology, found: Sequence[_Found]) -> list[Choice]:
    best: dict[tuple[Outermost, Sharding, Pipelining], tuple[float, Case, tuple[int, ...]]] = {}
    for one in found:
        if not len(one.seconds):
            continue
        at = int(one.seconds.argmin())
        row = (float(one.seconds[at]), one.case, tuple(int(n) for n in one.divisions[at]))
        if np.isfinite(row[0]) and (one.case.kind not in best or row < best[one.case.kind]):
            best[one.case.kind] = row
    return [choice_of(topology, case, division) for _, case, division in best.values()]


def choice_of(topology: Topology, case: Case, division: Sequence[int]) -> Choice:
    """One configuration with both of its times; infinite where it does not fit."""
    rows = np.array([division], np.int64)
    printed, shared = (rebuild(topology, case, rows, links) for links in (False, True))
    return Choice(
        case, tuple(division), float(printed.seconds[0]), float(shared.seconds[0]), float(printed.used_bytes[0])
    )


def fastest_of(topology: Topology, case: Case, division: Sequence[int], links: bool) -> Choice:
    """The fastest of a case with each number of microbatches together; the one with least memory where none fits."""
    n = case.split.microbatches(topology)
    choices = [
        choice_of(topology, case._replace(together=together), division)
        for together in togethers(case.split.pipeline, n)
    ]
    return min(choices, key=lambda choice: (choice.seconds(links), choice.used_bytes))


def present_case(topology: Topology) -> tuple[Case, list[int]]:
    """The file's [present]: DP-out, FSDP and DoraPP, as production has it. Raises ConfigError where it does not fit."""
    present, layers = topology.present, topology.model.layers
    assert present is not None
    where = f"{topology.file} [present]"
    split = Split(
        present.tensor, present.context, present.expert, present.pipeline, present.data, present.microbatch_sequences
    )
    used = split.tensor * split.context * split.pipeline * split.data
    if used != topology.n_accelerators and (topology.even or used > topology.n_accelerators):
        raise ConfigError(
            f"{where}: tensor x context x pipeline x data = {used}, there are {topology.n_accelerators} accelerators: "
            "correct it"
        )
    if topology.batch.sequences % (split.data * split.microbatch_sequences):
        raise ConfigError(
            f"{where}: {topology.batch.sequences} sequences are no whole microbatches of {split.microbatch_sequences} "
            f"for each of {split.data} replicas: correct it"
        )
    chunks = -(-layers // (split.pipeline * present.chunk_layers))
    if chunks * split.pipeline > layers:
        raise ConfigError(
            f"{where}: {chunks * split.pipeline} chunks for {layers} layers: give larger chunks or fewer stages"
        )
    case = Case(split, Outermost.DP, Sharding.FSDP, Pipelining.DORA, chunks, 1)
    try:
        check_places(topology, case)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return case, even(layers, case.n_chunks)


# ---- why -------------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What an iteration consists of, in seconds: each is what it would be shorter without it."""

    computing_s: float  # of the busiest accelerator
    bubble_s: float
    messages_s: float
    collectives_s: float


def parts_of(topology: Topology, choice: Choice, links: bool) -> Parts:
    rows = np.array([choice.division], np.int64)
    program, kernels = program_for(topology, choice.case), kernels_of(topology, choice.case, rows)
    whole = int(ends_of(program, kernels, links)[0])
    quiet = kernels._replace(gather=kernels.gather * 0, reduce=kernels.reduce * 0)
    alone = int(ends_of(program, quiet, links)[0])
    free = int(ends_of(program, quiet._replace(messages={}), links)[0])
    passes = kernels.forward + kernels.input_gradient + kernels.weight_gradient
    n = choice.case.split.microbatches(topology)
    busy = max(n * int(passes[list(chunks)].sum()) for chunks, _ in program.held)
    return Parts(busy / NS, (free - busy) / NS, (alone - free) / NS, (whole - alone) / NS)


FACTORS = tuple(2.0 ** (k / 4) for k in range(1, 25))
"""Of the bandwidth between buildings, one way or the other, until another configuration is the faster one."""


def catches_up(topology: Topology, best: Choice, other: Choice, links: bool) -> tuple[float, bool] | None:
    """The smallest change of the bandwidth between buildings, as a factor, with which `other` is as fast as `best`, and
    whether it is more bandwidth; None for none up to 64 times more or less. Both stay as they are."""
    for factor in FACTORS:
        for more in (True, False):
            changed = topology.with_bandwidth(factor if more else 1 / factor)
            a, b = (choice_of(changed, one.case, one.division).seconds(links) for one in (best, other))
            if b <= a:
                return factor, more
    return None
