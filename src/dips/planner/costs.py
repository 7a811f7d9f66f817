"""What a pipeline's operations, messages and links cost: the numbers that a schedule is made for and simulated with.

Times are integer nanoseconds, so that sums are exact and two equal times compare equal. Memory is counted in units
that the caller chooses (bytes, or activations of one microbatch on one device), as integers too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dips.planner.cluster import Training
from dips.planner.errors import PlanError
from dips.planner.exchange import Exchange
from dips.planner.ir import Kind
from dips.planner.model import Model

# ---- cost ------------------------------------------------------------------------------------------------------------
#
# Computes the costs of training a transformer: operations, memory, and the bytes that each way of splitting sends.
#
# Counts are for one microbatch, or for one iteration where noted; a multiplication and an addition are two
# operations. Causal attention computes half of the scores. Sources: Narayanan et al. (arXiv:2104.04473) for operations,
# Korthikanti et al. (arXiv:2205.05198) for activations, Rajbhandari et al. (arXiv:1910.02054) for the optimizer's
# state.


WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
"""Bytes of a parameter in mixed precision with Adam: 16-bit weight and gradient; 32-bit weight and two moments."""


@dataclass(frozen=True)
class MicrobatchCost:
    """Operations of one microbatch: forward, gradient of the input, gradient of the weights."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient

    def __add__(self, other: MicrobatchCost) -> MicrobatchCost:
        return MicrobatchCost(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )

    def recomputed(self) -> MicrobatchCost:
        """The operations when the backward pass runs the forward pass again."""
        return MicrobatchCost(self.forward, self.input_gradient + self.forward, self.weight_gradient)


def layer_work(model: Model, layer: int, tokens: int, sequence_tokens: int, causal: bool = True) -> MicrobatchCost:
    """Operations of one layer and `tokens` tokens in sequences. Gradients of weights need no attention scores;
    gradients of inputs need them twice."""
    matrices = 2.0 * tokens * model.layer_matrices(layer, active=True)
    scores = 2.0 * tokens * sequence_tokens * model.heads * (model.qk_width + model.v_width) / (2 if causal else 1)
    return MicrobatchCost(matrices + scores, matrices + 2 * scores, matrices)


def output_work(model: Model, tokens: int) -> MicrobatchCost:
    """Operations of the output layer; looking up an embedding costs almost nothing."""
    matrix = 2.0 * tokens * model.vocabulary * model.hidden
    return MicrobatchCost(matrix, matrix, matrix)


def model_work(model: Model, tokens: int, sequence_tokens: int, causal: bool = True) -> MicrobatchCost:
    found = output_work(model, tokens)
    for layer in range(model.layers):
        found += layer_work(model, layer, tokens, sequence_tokens, causal)
    return found


# ---- memory ----


def layer_activation_bytes(model: Model, layer: int, training: Training, tensor: int | None = None) -> float:
    """Bytes that one device keeps of one layer and microbatch for the backward pass, in 16-bit numbers.

    Everything is divided among the devices of a tensor group (sequence parallel) and of a context group.
    """
    tokens = training.microbatch_sequences * training.sequence_tokens
    shared = (training.tensor if tensor is None else tensor) * training.context
    hidden, mask = model.hidden, 1 if model.dropout else 0
    if training.recompute == "full":
        return 2.0 * hidden * tokens / shared
    queries, outputs = model.heads * model.qk_width, model.heads * model.v_width
    keys_values = model.n_kv_heads * (model.qk_width + model.v_width)
    norms = 4.0 * hidden
    attention = 2.0 * (hidden + queries + keys_values + outputs) + mask * hidden
    if training.flash_attention:
        attention += 4.0 * model.heads  # the logarithm of each row's sum
    else:
        attention += (2.0 + 3 * mask) * model.heads * training.sequence_tokens
    inner = 3 if model.gated_mlp else 2
    if model.is_dense(layer):
        mlp = 2.0 * (hidden + inner * model.mlp_width) + mask * hidden
    else:
        active = model.experts_per_token + model.shared_experts
        mlp = 2.0 * active * (hidden + inner * model.expert_width) + 4.0 * model.experts + mask * hidden
    return (norms + attention + mlp) * tokens / shared


def state_bytes(parameters: float, training: Training, replicas: float | None = None) -> float:
    """Weights, gradients and optimizer state of so many parameters on one device, sharded as zero_stage says."""
    among = float(training.data * training.context if replicas is None else replicas)
    stage = training.zero_stage
    weights = WEIGHT_BYTES / (among if stage >= 3 else 1)
    gradients = GRADIENT_BYTES / (among if stage >= 2 else 1)
    return parameters * (weights + gradients + OPTIMIZER_BYTES / (among if stage >= 1 else 1))


def layer_state_bytes(model: Model, layer: int, training: Training) -> float:
    """Bytes of weights, gradients and optimizer state of one layer on one device. Experts are spread over an expert
    group, which takes its devices from the replicas."""
    if model.is_dense(layer) or training.expert == 1:
        return state_bytes(model.layer_parameters(layer) / training.tensor, training)
    experts = model.experts * model.expert_parameters()
    others = (model.layer_parameters(layer) - experts) / training.tensor
    among = training.data * training.context / training.expert
    return state_bytes(others, training) + state_bytes(experts / training.tensor / training.expert, training, among)


# ---- messages ----


def inside_exchange_bytes(parameters: float, experts: float, training: Training, groups: int = 1) -> float:
    """Bytes that all devices of one replica and stage send when the replicas of one group exchange so many parameters
    once (an all-gather or a reduce-scatter in a ring). experts: how many of these are in experts. groups: that replicas
    are split into; exchanges between groups are not counted."""
    n = training.data // groups * training.context
    among_experts = max(1, n // training.expert)
    sent = (parameters - experts) * _ring(n) + experts / training.expert * _ring(among_experts)
    return WEIGHT_BYTES * training.context * sent


def pipeline_message_bytes(model: Model, training: Training) -> float:
    """Bytes of one microbatch between two stages of one replica, all devices of the stage together, one way."""
    tokens = training.microbatch_sequences * training.sequence_tokens
    return tokens * model.hidden * training.activation_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in one iteration, by purpose. pipeline: of a stage in the middle."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float


def traffic(model: Model, training: Training) -> Traffic:
    """The traffic of a device with an equal share of the layers. Rings: n devices send (n - 1) / n of what they share.

    tensor: four all-gathers and four reduce-scatters a layer (forward and backward, attention and MLP), as sequence
    parallelism has them. context: keys and values go round, and their gradients. expert: each token goes to its
    experts and back, forward and backward. data: a reduce-scatter of gradients and an all-gather of weights.
    """
    local = training.microbatch_sequences * training.sequence_tokens / training.context
    size, layers = training.activation_bytes, model.layers / training.pipeline
    wave = local * model.hidden * size
    moe_layers = sum(not model.is_dense(layer) for layer in range(model.layers)) / training.pipeline
    keys_values = model.n_kv_heads * (model.qk_width + model.v_width) * local * size / training.tensor
    sent = local / training.tensor * model.experts_per_token * model.hidden * size
    n, replicas = training.microbatches, training.data * training.context
    tensor, context, expert = (_ring(among) for among in (training.tensor, training.context, training.expert))
    experts = moe_layers * model.experts * model.expert_parameters() / training.tensor
    others = (
        sum(model.layer_parameters(layer) for layer in range(model.layers)) / training.pipeline / training.tensor
        - experts
    )
    gradients = others * _ring(replicas) + experts / training.expert * _ring(replicas // training.expert)
    return Traffic(
        tensor=n * layers * 8 * wave * tensor,
        context=n * layers * 3 * keys_values * training.context * context,
        expert=n * moe_layers * 4 * sent * expert,
        pipeline=n * 2 * wave / training.tensor if training.pipeline > 1 else 0.0,
        data=2 * gradients * WEIGHT_BYTES,
    )


def _ring(n: int) -> float:
    return (n - 1) / n


# ---- costs -----------------------------------------------------------------------------------------------------------


NS = 1_000_000_000
"""Nanoseconds in a second; also what one unit of time is where times are ratios."""


@dataclass(frozen=True)
class StageCost:
    """Costs of one stage of the model for one microbatch.

    activation: charged when F starts; of it, D releases `d_release` at its end and W (or B) the rest.
    """

    f_ns: int
    d_ns: int
    w_ns: int
    activation: int
    d_release: int

    def __post_init__(self) -> None:
        if min(self.f_ns, self.d_ns, self.w_ns, self.activation, self.d_release) < 0:
            raise PlanError(f"{self} has a negative cost: times and sizes are at least 0")
        if self.d_release > self.activation:
            raise PlanError(f"D releases {self.d_release}, more than the activation of {self.activation}")

    def compute_ns(self, kind: Kind) -> int:
        """Time of the whole operation."""
        if kind is Kind.F:
            return self.f_ns
        if kind is Kind.D:
            return self.d_ns
        return self.w_ns if kind is Kind.W else self.d_ns + self.w_ns

    def released(self, kind: Kind) -> int:
        """Memory that is free again at its end."""
        if kind is Kind.F:
            return 0
        if kind is Kind.D:
            return self.d_release
        return self.activation - self.d_release if kind is Kind.W else self.activation


REPLICAS_APART = 1 << 40
"""The distance between the resource numbers of two replicas that do not share a link."""


class Wire(NamedTuple):
    """The cost of one message between two devices. busy_ns: time on the link; latency_ns: does not occupy the link.

    resource: messages with the same resource share a link; every link serves one message at a time. hold_ns: how much
    longer the next message waits than for the link (for the acknowledgement of this one, where senders block). shared:
    with the other replicas of a pipeline; else each has a link of its own there.
    """

    resource: int
    busy_ns: int
    latency_ns: int
    hold_ns: int = 0
    shared: bool = True

    def of(self, replica: int) -> Wire:
        """The wire as a replica has it."""
        return self if self.shared or not replica else self._replace(resource=self.resource + replica * REPLICAS_APART)

    def take(self, link_free: dict[int, int], ready_ns: int) -> int:
        """Take the link for a message that is ready at ready_ns; returns when it starts. link_free: since when the
        link of each resource is free."""
        if not (self.busy_ns or self.hold_ns):
            return ready_ns
        start_ns = max(ready_ns, link_free.get(self.resource, 0))
        link_free[self.resource] = start_ns + self.busy_ns + self.hold_ns
        return start_ns


@dataclass(frozen=True)
class Costs:
    """All costs of a pipeline. stages[s]: of the model; wires[(from, to)]: between devices, none where messages take no
    time.

    exchanges[s]: what replicas send each other of stage s; empty: they cost nothing. overlapped: they do so while
    the pipeline computes; else before all of it and after all of it.
    """

    stages: tuple[StageCost, ...]
    wires: Mapping[tuple[int, int], Wire] = field(default_factory=dict)
    exchanges: tuple[Exchange, ...] = ()
    overlapped: bool = True

    def __post_init__(self) -> None:
        if len(self.exchanges) not in (0, len(self.stages)):
            raise PlanError(f"exchanges of {len(self.exchanges)} stages for {len(self.stages)} stages: give one each")

    def compute_ns(self, stage: int, kind: Kind, part: int = 0, parts: int = 1) -> int:
        """Time of one part of an operation; the first parts get the nanoseconds that do not divide."""
        whole, rest = divmod(self.stages[stage].compute_ns(kind), parts)
        return whole + (part < rest)


def uniform(
    n_stages: int,
    chunks: int,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    release_of_d: float = 0.5,
    wires: Mapping[tuple[int, int], Wire] | None = None,
    activation: int = 1 << 20,
) -> Costs:
    """Costs of equal devices. times: (T_F, T_D, T_W) in seconds for one microbatch on one device, shared by its
    `chunks` stages, as is the activation of one microbatch on one device."""
    f_ns, d_ns, w_ns = (round(t * NS / chunks) for t in times)
    whole = activation // chunks
    stage = StageCost(f_ns, d_ns, w_ns, whole, round(whole * release_of_d))
    return Costs((stage,) * n_stages, wires or {})


def site_wires(
    sites: Sequence[int], busy_s: float, latency_s: float, wraps: bool = False
) -> dict[tuple[int, int], Wire]:
    """Wires between all devices of different sites; sites[d]: of device d, in the order of the pipeline.

    Each ordered pair of neighbouring devices is a link of its own. wraps: with exactly two sites, the message from
    the last device to the first (and back) crosses the same link as those of the boundary in the middle (CrossPipe's
    convention for loop placements).
    """
    if busy_s < 0 or latency_s < 0:
        raise PlanError(f"a link has bandwidth time {busy_s:g} s and latency {latency_s:g} s: neither is negative")
    n, wires = len(sites), {}
    busy_ns, latency_ns = round(busy_s * NS), round(latency_s * NS)
    boundaries = [d for d in range(n - 1) if sites[d] != sites[d + 1]]
    for a in range(n):
        for b in range(n):
            if sites[a] == sites[b]:
                continue
            pair = (a, b)
            if wraps and len(boundaries) == 1 and {a, b} == {0, n - 1} and n > 2:
                middle = boundaries[0]
                pair = (middle + 1, middle) if a == n - 1 else (middle, middle + 1)
            wires[a, b] = Wire(pair[0] * n + pair[1], busy_ns, latency_ns)
    return wires


def equal_sites(n_devices: int, n_sites: int) -> tuple[int, ...]:
    """The site of each device when neighbours share one and all sites are alike. Raises PlanError if they cannot be."""
    if n_sites < 1 or n_devices % n_sites:
        raise PlanError(f"{n_devices} devices do not divide into {n_sites} equal sites: choose numbers that do")
    return tuple(d * n_sites // n_devices for d in range(n_devices))


# ---- costs file ------------------------------------------------------------------------------------------------------
#
# Writes and reads costs as JSON, with the schedule that was made for them: a plan can be simulated and run again.


def costs_json(costs: Costs) -> dict[str, Any]:
    """Costs as JSON: times in nanoseconds, activations in bytes (or the units of the costs). What replicas exchange is
    not written, only whether they do: replicas_exchange."""
    return {
        "stages": [
            {"f_ns": s.f_ns, "d_ns": s.d_ns, "w_ns": s.w_ns, "activation": s.activation, "d_release": s.d_release}
            for s in costs.stages
        ],
        "wires": [
            {
                "sender": sender,
                "receiver": receiver,
                "resource": wire.resource,
                "busy_ns": wire.busy_ns,
                "latency_ns": wire.latency_ns,
                "hold_ns": wire.hold_ns,
            }
            for (sender, receiver), wire in sorted(costs.wires.items())
        ],
        "replicas_exchange": bool(costs.exchanges),
    }


def read_costs(found: Any) -> Costs:
    """Inverse of costs_json(), without exchanges. Raises KeyError, TypeError or ValueError for anything else, and
    PlanError for a negative cost."""
    stages = tuple(
        StageCost(*(int(one[key]) for key in ("f_ns", "d_ns", "w_ns", "activation", "d_release")))
        for one in found["stages"]
    )
    wires = {
        (int(one["sender"]), int(one["receiver"])): Wire(
            int(one["resource"]), int(one["busy_ns"]), int(one["latency_ns"]), int(one["hold_ns"])
        )
        for one in found["wires"]
    }
    return Costs(stages, wires)
