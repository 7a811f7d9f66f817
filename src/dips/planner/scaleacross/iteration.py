"""Rebuilds the time of an iteration from the times of its kernels (the paper's Algorithm 1), for many divisions of the
layers into chunks at once.

A kernel starts when the kernels that it depends on have ended. These are, for a chunk's pass: the message with its
input, the weights of its chunk, and the kernel before on its device; for a collective: its chunk's last pass, and the
collective before of its stage. As printed, messages wait for nothing else: any number of them share a way at its full
rate each, so the algorithm undercounts where many do. With `links` a way carries one message at a time, in the order
in which they are ready, as everywhere in this planner, and a stage's all-gathers and reduce-scatters share theirs.
Messages and collectives do not share: they use different ways, except inside a building of a DP-out pipeline.

Arrays have a column for each division: (chunks, divisions). Times are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import ConfigError
from dips.planner.cluster import Training, in_proportion
from dips.planner.costs import NS
from dips.planner.ir import Kind, Schedule
from dips.planner.model import Model
from dips.planner.problem import RELEASED_BY_INPUT_GRADIENT
from dips.planner.scaleacross.topology import Ints, Topology, Way
from dips.planner.schedules.fixed import one_f_one_b
from dips.planner.schedules.scaleacross import OPERATION, dora_pp, interleaved_zb_v
from dips.planner.units import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    layer_activation_bytes,
    layer_work,
    output_work,
)

Floats = NDArray[np.float64]
Bytes = TypeVar("Bytes", float, Floats)
"""One size, or many."""

BYTES = 2.0
"""Of a number that is sent: activations, weights and gradients in 16 bits, as in the paper's formula."""

# ---- traffic ---------------------------------------------------------------------------------------------------------
#
# The formulas of the paper's section 3.1, for one accelerator. H is the model's width, F that of the MLP, F_e that of
# an expert, E the number of experts, S the tokens of a sequence, m the sequences of a microbatch.


def exchanged_elements(model: Model, layer: int, tensor: int, expert: int) -> float:
    """Weights of one layer that replicas exchange, once: (4 H^2 + 3 H F) / TP, or (4 H^2 + 3 H F_e E / EP) / TP with
    experts. The formula counts all experts of a device, also where no other replica has them."""
    hidden = model.hidden
    if model.is_dense(layer):
        return (4 * hidden**2 + 3 * hidden * model.mlp_width) / tensor
    return (4 * hidden**2 + 3 * hidden * model.expert_width * model.experts / expert) / tensor


def ring_s(n_bytes: Bytes, members: int, bytes_per_s: float, latency_s: float) -> Bytes:
    """An all-gather or a reduce-scatter of so many bytes in a ring: members - 1 steps of a part, each as long as the
    slowest pair takes (section 3.2: with 1,024 members latency dominates)."""
    return (members - 1) * (n_bytes / members / bytes_per_s + latency_s)


# ---- cases ----


class Outermost(StrEnum):
    """What crosses the buildings."""

    DP = "DP-out"  # weights and gradients: whole pipelines in each building
    PP = "PP-out"  # activations: stages in each building


class Sharding(StrEnum):
    """How replicas share weights and optimizer state."""

    FSDP = "FSDP"  # all replicas, in one ring
    HSDP = "HSDP"  # those of a building; gradients go between the leaders of the buildings


class Pipelining(StrEnum):
    """The schedule."""

    DORA = "DoraPP"
    ZBV = "interleaved ZBV"
    PLAIN = "1F1B"  # one chunk on each stage: what the paper's Sailor has; not searched


class Split(NamedTuple):
    """Degrees of parallelism, and the size of a microbatch."""

    tensor: int
    context: int
    expert: int
    pipeline: int
    data: int
    microbatch_sequences: int

    def __str__(self) -> str:
        return "-".join(map(str, self[:5]))

    def microbatches(self, topology: Topology) -> int:
        return topology.batch.sequences // (self.data * self.microbatch_sequences)

    def message_bytes(self, topology: Topology) -> float:
        """One message between two chunks, one way: 2 (H / TP) (S / CP) m bytes."""
        width, tokens = topology.model.hidden / self.tensor, topology.batch.sequence_tokens / self.context
        return BYTES * width * tokens * self.microbatch_sequences


class Case(NamedTuple):
    """A configuration apart from the layers of its chunks."""

    split: Split
    outermost: Outermost
    sharding: Sharding
    pipelining: Pipelining
    chunks: int  # of each stage
    together: int  # microbatches that DoraPP runs together, or that interleaved ZBV has in flight

    @property
    def kind(self) -> tuple[Outermost, Sharding, Pipelining]:
        return self.outermost, self.sharding, self.pipelining

    @property
    def n_chunks(self) -> int:
        return self.chunks * self.split.pipeline


# ---- what one layer costs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """For one microbatch and one accelerator: an entry for each layer; the first and the last one have the embedding
    and the output layer."""

    forward_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats
    activation_bytes: Floats
    exchanged_bytes: Floats  # weights, or gradients, as replicas exchange them
    dense_parameters: Floats  # held
    expert_parameters: Floats

    @property
    def total_s(self) -> Floats:
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


@lru_cache(maxsize=256)
def layer_costs(topology: Topology, split: Split) -> LayerCosts:
    """Computation, and what tensor, context and expert groups send meanwhile, none of it hidden."""
    model, batch, given = topology.model, topology.batch, topology.accelerators
    tensor, context, expert, m = split.tensor, split.context, split.expert, split.microbatch_sequences
    tokens, own = m * batch.sequence_tokens, m * batch.sequence_tokens / context
    speed = given.sustained_tflops * 1e12 * own / (own + given.half_speed_tokens) * tensor * context
    training = Training(
        pipeline=split.pipeline, data=split.data, tensor=tensor, context=context, expert=expert,
        microbatches=split.microbatches(topology), microbatch_sequences=m, sequence_tokens=batch.sequence_tokens,
        recompute=batch.recompute, source="explored",
    )  # fmt: skip
    server, network = topology.way(0, 0), None
    if topology.n_accelerators > given.per_server:  # what two servers of one zone have
        network = Way(given.network_gbps * 1e9 / 8, given.network_latency_us / 1e6)
    # Two all-gathers and two reduce-scatters of the activations in each direction (sequence parallel).
    sent = 4 * (tensor - 1) / tensor * own * model.hidden * BYTES
    if tensor <= given.per_server or network is None:
        sent_s = sent / server.bytes_per_s
    else:  # a ring over several servers, with the network's latency in each of its steps
        sent_s = sent / network.bytes_per_s + 4 * (tensor - 1) * network.latency_s
    # Keys and values go round the context group.
    way = server if tensor * context <= given.per_server else network or server
    keys_values = model.n_kv_heads * (model.qk_width + model.v_width) / tensor
    sent_s += (context - 1) * way.message_s(own * keys_values * BYTES)
    # Tokens go to their experts, and back.
    each = own / tensor * (model.experts_per_token * model.hidden) * BYTES / expert
    inside = min(expert, given.per_server)
    to_experts_s = 2 * (inside - 1) * each / server.bytes_per_s
    if network is not None and expert > inside:
        to_experts_s += 2 * network.message_s((expert - inside) * each)
    columns: list[tuple[float, ...]] = []
    for layer in range(model.layers):
        work = layer_work(model, layer, tokens, batch.sequence_tokens)
        work = work.recomputed() if batch.recompute == "full" else work
        dense = model.is_dense(layer)
        experts = 0.0 if dense else float(model.experts * model.expert_parameters())
        sends_s = sent_s + (0.0 if dense else to_experts_s)
        columns.append(
            (
                work.forward / speed + sends_s, work.input_gradient / speed + sends_s, work.weight_gradient / speed,
                layer_activation_bytes(model, layer, training),
                BYTES * exchanged_elements(model, layer, tensor, expert),
                (model.layer_parameters(layer) - experts) / tensor,
                experts / (expert if expert > 1 else tensor),
            )
        )  # fmt: skip
    table = np.array(columns).T
    output = output_work(model, tokens)
    table[:3, -1] += np.array(output) / speed
    for layer, parameters in ((0, model.embedding_parameters()), (-1, model.output_parameters())):
        table[4, layer] += BYTES * parameters / tensor
        table[5, layer] += parameters / tensor
    return LayerCosts(*table)


# ---- what lies between accelerators ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelWays:
    """The ways that the kernels of a case use."""

    hops: tuple[Way, ...]  # from each stage to the next one, and last from the last one to the first
    ring: Way  # of all replicas; of a building's with HSDP
    leaders: Way | None  # between the buildings, with HSDP


@lru_cache(maxsize=4096)
def shares_of(topology: Topology, outermost: Outermost, split: Split) -> tuple[int, ...]:
    """How many replicas (DP-out) or stages (PP-out) each building has: in proportion to those for which it has whole
    groups of tensor x context. Raises ConfigError where that are too few."""
    dp = outermost is Outermost.DP
    outer, inner = (split.data, split.pipeline) if dp else (split.pipeline, split.data)
    rooms = [len(groups) // inner for groups in _groups(topology, split.tensor * split.context)]
    if sum(rooms) < outer:
        what = "replicas" if dp else "stages"
        raise ConfigError(
            f"{outermost}: the buildings have room for {' + '.join(map(str, rooms))} {what} of {inner} groups of "
            f"{split.tensor * split.context} accelerators, {outer} are wanted: such groups stay in a zone"
        )
    return tuple(in_proportion(rooms, outer))


@lru_cache(maxsize=256)
def _groups(topology: Topology, accelerators: int) -> list[Ints]:
    return topology.groups(accelerators)


def places_of(topology: Topology, outermost: Outermost, split: Split) -> Ints:
    """The number of the first accelerator of each stage and replica: (stages, replicas). Raises ConfigError."""
    p, d = split.pipeline, split.data
    found, first = np.empty((p, d), np.int64), 0
    groups = _groups(topology, split.tensor * split.context)
    for share, starts in zip(shares_of(topology, outermost, split), groups, strict=True):
        if outermost is Outermost.DP:
            found[:, first : first + share] = starts[: p * share].reshape(p, share)
        else:
            found[first : first + share] = starts[: share * d].reshape(share, d)
        first += share
    return found


def check_places(topology: Topology, case: Case) -> None:
    """Check that a case fits the buildings and zones. Raises ConfigError."""
    split = case.split
    shares = [share for share in shares_of(topology, case.outermost, split) if share]
    if case.sharding is Sharding.HSDP and len(shares) < 2:
        raise ConfigError("HSDP needs replicas in two buildings")
    group = split.tensor * split.context
    replicas = shares if case.outermost is Outermost.DP else [split.data]
    if any(zone.accelerators % split.expert for zone in topology.zones) or any(
        group * each % split.expert for each in replicas
    ):
        raise ConfigError(
            f"expert = {split.expert} does not divide the accelerators of each zone and those of a stage in each "
            "building: expert groups stay in a zone"
        )


@lru_cache(maxsize=4096)
def ways_of(topology: Topology, outermost: Outermost, sharding: Sharding, split: Split) -> KernelWays:
    p, d = split.pipeline, split.data
    group = split.tensor * split.context
    at = places_of(topology, outermost, split)
    # Over a way with a bandwidth of its own: all replicas of one stage, or a replica of each stage in its ring.
    senders = group * (p if outermost is Outermost.DP else d)
    hops = tuple(topology.slowest(at[a], at[b], senders) for a, b in pairwise([*range(p), 0]) if a != b)
    hierarchical = sharding is Sharding.HSDP
    shares = [each for each in shares_of(topology, outermost, split) if each] if hierarchical else [d]
    firsts = np.cumsum([0, *shares[:-1]])
    after = np.arange(1, d + 1)
    after[firsts + np.array(shares) - 1] = firsts  # each ring closes
    there = at[:, after]
    if d == 1 or (hierarchical and max(shares) == 1):  # the ring of a context group
        there = at + split.tensor * (split.context - 1)
    leaders = None
    if hierarchical:
        leaders = topology.slowest(at[:, firsts].ravel(), at[:, np.roll(firsts, -1)].ravel(), senders)
    return KernelWays(hops, topology.slowest(at.ravel(), there.ravel(), senders), leaders)


# ---- programs --------------------------------------------------------------------------------------------------------


class SchedulePass(NamedTuple):
    """One pass, in an order in which each comes after those that it needs."""

    kind: Kind
    chunk: int
    microbatch: int
    device: int
    first: bool  # of its chunk: waits for weights
    last: bool  # of its chunk: gradients leave


@dataclass(frozen=True, eq=False)
class PlayedSchedule:
    """A schedule, made ready to be played."""

    schedule: Schedule
    steps: tuple[SchedulePass, ...]
    # for each device, its chunks and, for each F, the parts of their activations that are held then
    held: tuple[tuple[tuple[int, ...], Floats], ...]


def program_of(schedule: Schedule) -> PlayedSchedule:
    """Raises ConfigError for a schedule whose devices wait for each other."""
    n_chunks, n, place = schedule.n_stages, schedule.n_microbatches, schedule.device_of_stage
    at = [0] * schedule.n_devices
    done_f, done_b = (bytearray(n_chunks * n) for _ in range(2))
    seen = [False] * n_chunks
    left = [0] * n_chunks
    for order in schedule.orders:
        for op in order:
            left[op.stage] += 1
    steps: list[SchedulePass] = []
    waiting = set(range(schedule.n_devices))
    kind_f, kind_w, new = Kind.F, Kind.W, tuple.__new__
    while waiting:
        device = waiting.pop()
        order = schedule.orders[device]
        index = at[device]
        for index in range(index, len(order)):  # noqa: B020  the loop goes on where the device stood
            kind, chunk, m, _ = order[index]
            if kind is kind_f:
                if chunk and not done_f[(chunk - 1) * n + m]:
                    break
                done_f[chunk * n + m] = 1
                if chunk + 1 < n_chunks:
                    waiting.add(place[chunk + 1])
            elif kind is not kind_w:
                if chunk + 1 < n_chunks and not done_b[(chunk + 1) * n + m]:
                    break
                done_b[chunk * n + m] = 1
                if chunk:
                    waiting.add(place[chunk - 1])
            left[chunk] -= 1
            steps.append(new(SchedulePass, (kind, chunk, m, device, not seen[chunk], not left[chunk])))
            seen[chunk] = True
        else:
            index = len(order)
        at[device] = index
    if len(steps) < schedule.n_ops:
        raise ConfigError(f"{schedule.name}: its devices wait for each other")
    return PlayedSchedule(schedule, tuple(steps), tuple(_held(schedule, d) for d in range(schedule.n_devices)))


def _held(schedule: Schedule, device: int) -> tuple[tuple[int, ...], Floats]:
    chunks = schedule.stages_of(device)
    column = {chunk: number for number, chunk in enumerate(chunks)}
    now, rows = [0.0] * len(chunks), dict[tuple[float, ...], None]()
    released = {Kind.D: RELEASED_BY_INPUT_GRADIENT, Kind.W: 1 - RELEASED_BY_INPUT_GRADIENT, Kind.B: 1.0}
    for op in schedule.orders[device]:
        number = column[op.stage]
        if op.kind is Kind.F:
            now[number] += 1.0
            rows[tuple(round(value, 9) for value in now)] = None
        else:
            now[number] -= released[op.kind]
    return chunks, np.array(list(rows))


@lru_cache(maxsize=512)
def _program(pipelining: Pipelining, n_stages: int, n: int, chunks: int, together: int, delay: int) -> PlayedSchedule:
    if pipelining is Pipelining.PLAIN:
        return program_of(one_f_one_b(n_stages, n))
    if pipelining is Pipelining.DORA:
        return program_of(dora_pp(n_stages, n, chunks, together))
    return program_of(interleaved_zb_v(n_stages, n, chunks, together, delay))


# ---- Algorithm 1 -----------------------------------------------------------------------------------------------------


class KernelTimes(NamedTuple):
    """The times of all kernels, in nanoseconds."""

    forward: Ints
    input_gradient: Ints
    weight_gradient: Ints
    gather: Ints
    reduce: Ints
    messages: Mapping[tuple[int, int], tuple[int, int]]  # by (from, to): time on the way, and latency


def ends_of(program: PlayedSchedule, kernels: KernelTimes, links: bool) -> Ints:
    """When everything has ended, for each division. links: a way carries one message at a time."""
    schedule, n = program.schedule, kernels.forward.shape[1]
    n_chunks, place = schedule.n_stages, schedule.device_of_stage
    free = [np.zeros(n, np.int64) for _ in range(schedule.n_devices)]  # of each device
    collected = [np.zeros(n, np.int64) for _ in free]  # when its stage's last collective has ended
    way_free = {pair: np.zeros(n, np.int64) for pair in kernels.messages} if links else {}
    arrived: dict[tuple[bool, int, int], Ints] = {}
    both = kernels.input_gradient + kernels.weight_gradient
    lasts = {Kind.F: kernels.forward, Kind.D: kernels.input_gradient, Kind.W: kernels.weight_gradient, Kind.B: both}
    gates = {}
    for device in range(schedule.n_devices):  # all-gathers begin at once, in the order of the chunks
        for chunk in schedule.stages_of(device):
            collected[device] = collected[device] + kernels.gather[chunk]
            gates[chunk] = collected[device]
    for kind, chunk, m, device, first, last in program.steps:
        now = free[device]
        if kind is not Kind.W:
            there = arrived.pop((kind is Kind.F, chunk, m), None)
            if there is not None:
                np.maximum(now, there, out=now)
            if first:
                np.maximum(now, gates[chunk], out=now)
        np.add(now, lasts[kind][chunk], out=now)
        if kind is not Kind.W:
            after = chunk + 1 if kind is Kind.F else chunk - 1
            if 0 <= after < n_chunks:
                pair = (device, place[after])
                message = kernels.messages.get(pair)
                if message is not None:
                    busy, latency = message
                    if links:
                        wire = way_free[pair]
                        np.maximum(wire, now, out=wire)
                        np.add(wire, busy, out=wire)
                        arrived[kind is Kind.F, after, m] = wire + latency
                    else:
                        arrived[kind is Kind.F, after, m] = now + (busy + latency)
        if last:
            collected[device] = np.maximum(collected[device], now) + kernels.reduce[chunk]
    found: Ints = np.max([*free, *collected], axis=0)
    return found


# ---- cases -----------------------------------------------------------------------------------------------------------


class Rebuilt(NamedTuple):
    """Results for each division."""

    seconds: Floats
    fits: NDArray[np.bool_]  # in memory
    used_bytes: Floats  # of the fullest accelerator


MOST_PASSES = 1 << 17
"""Chunks x microbatches of a case at most: an order of so many passes takes seconds to make."""


def sums_of(values: Floats, divisions: Ints) -> Floats:
    """Of each chunk: (chunks, divisions). divisions: (divisions, chunks), the layers of each chunk."""
    prefix = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.cumsum(divisions, axis=1)
    return np.asarray((prefix[ends] - prefix[ends - divisions]).T)


def kernels_of(topology: Topology, case: Case, divisions: Ints) -> KernelTimes:
    split, layers = case.split, layer_costs(topology, case.split)
    ways = ways_of(topology, case.outermost, case.sharding, split)
    slower = 1 + topology.accelerators.zbv_overhead if case.pipelining is Pipelining.ZBV else 1.0

    def ns(seconds: Floats) -> Ints:
        return np.rint(seconds * NS).astype(np.int64)

    sizes = sums_of(layers.exchanged_bytes, divisions)
    gather_s, reduce_s = collective_s(topology, case, ways, sizes)
    return KernelTimes(
        ns(sums_of(layers.forward_s, divisions) * slower),
        ns(sums_of(layers.input_gradient_s, divisions) * slower),
        ns(sums_of(layers.weight_gradient_s, divisions) * slower),
        ns(gather_s),
        ns(reduce_s),
        _messages(topology, case, ways),
    )


def collective_s(topology: Topology, case: Case, ways: KernelWays, sizes: Floats) -> tuple[Floats, Floats]:
    """Times of an all-gather and of a reduce-scatter of so many bytes."""
    split = case.split

    def ring(among: int, way: Way) -> Floats:
        return np.asarray(ring_s(sizes, among, way.bytes_per_s, way.latency_s))

    if ways.leaders is None:
        each = ring(split.data * split.context, ways.ring)
        return each, each
    shares = [share for share in shares_of(topology, case.outermost, split) if share]
    inside = ring(max(shares) * split.context, ways.ring)
    # Gradients are summed in the building and come together at its leader; the leaders add theirs, each the whole of
    # them, in a ring; and what belongs to the others goes back to them.
    return inside, 3 * inside + 2 * ring(len(shares), ways.leaders)


def _messages(topology: Topology, case: Case, ways: KernelWays) -> dict[tuple[int, int], tuple[int, int]]:
    size = case.split.message_bytes(topology)
    found, p = {}, case.split.pipeline
    for stage, way in enumerate(ways.hops):
        cost = round(size / way.bytes_per_s * NS), round(way.latency_s * NS)
        found[stage, (stage + 1) % p] = found[(stage + 1) % p, stage] = cost
    return found


def memory_of(topology: Topology, case: Case, program: PlayedSchedule, divisions: Ints) -> Floats:
    """Bytes on the fullest accelerator, for each division: weights and gradients whole, the optimizer's state shared
    among the replicas that shard it, and activations. With HSDP a leader has its gradients a second time."""
    split, layers = case.split, layer_costs(topology, case.split)
    hierarchical = case.sharding is Sharding.HSDP
    replicas = split.data
    if hierarchical:
        replicas = min(share for share in shares_of(topology, case.outermost, split) if share)
    shards = replicas * split.context
    experts_shards = max(1.0, shards * split.tensor / (split.expert if split.expert > 1 else split.tensor))
    each = WEIGHT_BYTES + GRADIENT_BYTES * (2 if hierarchical else 1)
    state = layers.dense_parameters * (each + OPTIMIZER_BYTES / shards)
    state = state + layers.expert_parameters * (each + OPTIMIZER_BYTES / experts_shards)
    states, activations = sums_of(state, divisions), sums_of(layers.activation_bytes, divisions)
    found = np.zeros(len(divisions))
    for chunks, held in program.held:
        rows = list(chunks)
        found = np.maximum(found, states[rows].sum(axis=0) + (held @ activations[rows]).max(axis=0))
    return found


def program_for(topology: Topology, case: Case) -> PlayedSchedule:
    """The program of a case. Interleaved ZBV's order is made for the time of its longest message, rounded up to a power
    of two quarters of a pass."""
    split, n, delay = case.split, case.split.microbatches(topology), 0
    if case.n_chunks * n > MOST_PASSES:
        raise ConfigError(f"{case.n_chunks} chunks x {n} microbatches are more than {MOST_PASSES}: use larger chunks")
    if case.pipelining is Pipelining.ZBV and split.pipeline > 1:
        ways = ways_of(topology, case.outermost, case.sharding, split)
        longest_ns = max(sum(cost) for cost in _messages(topology, case, replace(ways, hops=ways.hops[:-1])).values())
        each_ns = layer_costs(topology, split).total_s.sum() / 3 / case.n_chunks * NS
        delay = 1 << max(0, int(np.ceil(np.log2(max(1.0, OPERATION * longest_ns / each_ns)))))
        delay = min(delay, 64) if OPERATION * longest_ns / each_ns > 0.25 else 0
    return _program(case.pipelining, split.pipeline, n, case.chunks, case.together, delay)


def rebuild(topology: Topology, case: Case, divisions: Ints, links: bool) -> Rebuilt:
    """The time and memory of a case for each division: a row of layers for each chunk, in the order of the model."""
    program = program_for(topology, case)
    used = memory_of(topology, case, program, divisions)
    fits = used <= topology.accelerators.memory_gib * 2**30
    seconds = np.full(len(divisions), np.inf)
    if fits.any():
        seconds[fits] = ends_of(program, kernels_of(topology, case, divisions[fits]), links) / NS
    return Rebuilt(seconds, fits, used)
