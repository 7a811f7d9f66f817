"""What a transformer computes, stores and sends: of a layer, and of the units that are divided into stages.

A model is a row of units: its layers, and the embedding and the output layer as units of their own if extra_layers
says so (each then costs as much as a layer, as in Llama 3's stages); else they belong to the first and the last unit.

Counts are for one microbatch, or for one iteration where noted; a multiplication and an addition are two operations.
Causal attention computes half of the scores. Sources: Narayanan et al. (arXiv:2104.04473) for operations, Korthikanti
et al. (arXiv:2205.05198) for activations, Rajbhandari et al. (arXiv:1910.02054) for the optimizer's state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile, StageTimes, Training, layer_times_ms
from dips.planner.model import Model

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
"""Bytes of a parameter in mixed precision with Adam: 16-bit weight and gradient; 32-bit weight and two moments."""


class MicrobatchCost(NamedTuple):
    """Operations of one microbatch: forward, gradient of the input, gradient of the weights."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def recomputed(self) -> MicrobatchCost:
        """The operations when the backward pass runs the forward pass again."""
        return self._replace(input_gradient=self.input_gradient + self.forward)


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


# ---- memory ----


def layer_activation_bytes(model: Model, layer: int, training: Training) -> float:
    """Bytes that one device keeps of one layer and microbatch for the backward pass, in 16-bit numbers.

    Everything is divided among the devices of a tensor group (sequence parallel) and of a context group.
    """
    tokens = training.microbatch_sequences * training.sequence_tokens
    shared = training.tensor * training.context
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
    ring, experts_ring = (n - 1) / n, (among_experts - 1) / among_experts  # what each device sends of all it shares
    sent = (parameters - experts) * ring + experts / training.expert * experts_ring
    return WEIGHT_BYTES * training.context * sent


def pipeline_message_bytes(model: Model, training: Training) -> float:
    """Bytes of one microbatch between two stages of one replica, all devices of the stage together, one way."""
    tokens = training.microbatch_sequences * training.sequence_tokens
    return tokens * model.hidden * training.activation_bytes


# ---- units ----

Division = tuple[int, ...]
"""Units of each stage, in the order of the model."""


class Unit(NamedTuple):
    """One layer on one device. Times in seconds are those of the first site."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    activation_bytes: float
    state_bytes: float  # does not grow with microbatches
    weight_bytes: float = 0.0  # of its weights (or gradients) as they are sent, all devices of a stage together
    # what all devices of a replica send inside their site when replicas share weights or gradients
    inside_bytes: float = 0.0
    whole_bytes: float = 0.0  # its weights on one device that computes with them, none of them sharded

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


def units_of(setup: ClusterFile, groups: int = 1) -> tuple[Unit, ...]:
    """The units of a model. groups: of sites, each with a part of the replicas, between which inside_bytes are sent.
    Raises ConfigError when neither a profile nor a speed is given."""
    model, training = setup.model, setup.training
    layers = [_layer(setup, layer, groups) for layer in range(model.layers)]
    embedding = _weights(training, model.embedding_parameters(), groups)
    output = _weights(training, model.output_parameters(), groups)
    if training.extra_layers:
        extra = _with_weights_of(layers[0], embedding), _with_weights_of(layers[0], output)
        units = (extra[0], *layers, *extra[1 : training.extra_layers])
        profile = setup.profile
        return units if profile is None or not profile.layers else with_layer_times(setup, 0, units)
    layers[0] = _plus(layers[0], embedding)
    layers[-1] = _plus(layers[-1], output)
    if setup.profile is not None and setup.profile.layers:
        return with_layer_times(setup, 0, layers)
    if setup.profile is None or setup.profile.times_of_stage_ms is None:
        tokens = training.microbatch_sequences * training.sequence_tokens
        layers[-1] = _plus(layers[-1], _timed(setup, output_work(model, tokens)))
    return tuple(layers)


def with_layer_times(setup: ClusterFile, site: int, units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The same units with the times of each layer that a profile has for a site. Raises ConfigError."""
    again = setup.training.recompute == "full"

    def timed(unit: Unit, times_ms: StageTimes) -> Unit:
        f, d, w = (time_ms / 1e3 for time_ms in times_ms)
        return unit._replace(forward_s=f, input_gradient_s=d + again * f, weight_gradient_s=w)

    return tuple(timed(*each) for each in zip(units, layer_times_ms(setup, site), strict=True))


def tflops_of(setup: ClusterFile, site: int) -> float:
    """10^12 operations a second of one device. Raises ConfigError when not given."""
    given = setup.sites[site].sustained_tflops
    if given is None:
        raise ConfigError(
            f"{setup.file} [[sites]] {site + 1}: sustained_tflops is not given, and no [profile] has "
            "the times of a stage: add one of them"
        )
    return given


def _layer(setup: ClusterFile, layer: int, groups: int) -> Unit:
    model, training, profile = setup.model, setup.training, setup.profile
    recomputes = training.recompute == "full"
    whole = model.layer_parameters(layer)
    experts = 0 if model.is_dense(layer) else model.experts * model.expert_parameters()
    known = Unit(
        0.0, 0.0, 0.0, layer_activation_bytes(model, layer, training), layer_state_bytes(model, layer, training),
        whole * WEIGHT_BYTES, inside_exchange_bytes(whole, experts, training, groups),
        (whole - experts + experts / training.expert) / training.tensor * WEIGHT_BYTES,
    )  # fmt: skip
    if profile is not None and profile.layers:
        return known
    if profile is not None and profile.times_of_stage_ms is not None:
        share = training.pipeline / (model.layers + training.extra_layers) / 1e3
        forward_ms, input_gradient_ms, weight_gradient_ms = profile.times_of_stage_ms
        again = forward_ms if recomputes else 0.0
        f, d, w = (time_ms * share for time_ms in (forward_ms, input_gradient_ms + again, weight_gradient_ms))
        return known._replace(forward_s=f, input_gradient_s=d, weight_gradient_s=w)
    tokens = training.microbatch_sequences * training.sequence_tokens
    work = layer_work(model, layer, tokens, training.sequence_tokens)
    return _plus(known, _timed(setup, work.recomputed() if recomputes else work))


def _weights(training: Training, parameters: float, groups: int) -> Unit:
    """A unit of so many parameters without computation."""
    inside = inside_exchange_bytes(parameters, 0, training, groups)
    state = state_bytes(parameters / training.tensor, training)
    return Unit(
        0.0, 0.0, 0.0, 0.0, state, parameters * WEIGHT_BYTES, inside, parameters / training.tensor * WEIGHT_BYTES
    )


def _timed(setup: ClusterFile, work: MicrobatchCost) -> Unit:
    """A unit that only computes."""
    speed = tflops_of(setup, 0) * 1e12 * setup.training.tensor * setup.training.context
    return Unit(work.forward / speed, work.input_gradient / speed, work.weight_gradient / speed, 0.0, 0.0)


def _plus(a: Unit, b: Unit) -> Unit:
    return Unit(*map(operator.add, a, b))


def _with_weights_of(unit: Unit, weights: Unit) -> Unit:
    """A unit that computes as one and has the weights of the other."""
    return unit._replace(
        state_bytes=weights.state_bytes,
        weight_bytes=weights.weight_bytes,
        inside_bytes=weights.inside_bytes,
        whole_bytes=weights.whole_bytes,
    )


def even_division(times: Sequence[float], slowness: Sequence[float]) -> Division:
    """Divide units in their order, at least one on each stage, so that stage times are as equal as possible: the sum of
    their squares, each weighted by its device's speed, is least. (Without the weights a device that is twice as fast
    would get four times the units.)"""
    n, sums = len(times), [0.0, *accumulate(times)]
    best = [0.0] + [math.inf] * n  # least sum for the first k units on the stages so far
    cuts: list[list[int]] = []
    for stage, slow in enumerate(slowness):
        cut, after = [0] * (n + 1), [math.inf] * (n + 1)
        for end in range(stage + 1, n + 1):
            after[end], cut[end] = min((best[k] + (sums[end] - sums[k]) ** 2 * slow, k) for k in range(stage, end))
        best = after
        cuts.append(cut)
    found, end = [], n
    for cut in reversed(cuts):
        found.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(found))
