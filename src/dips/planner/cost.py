"""Computes the costs of training a transformer: operations, memory, and the bytes that each way of splitting sends.

Counts are for one microbatch, or for one iteration where noted; a multiplication and an addition are two
operations. Causal attention computes half of the scores. Sources: Narayanan et al. (arXiv:2104.04473) for operations,
Korthikanti et al. (arXiv:2205.05198) for activations, Rajbhandari et al. (arXiv:1910.02054) for the optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.planner.cluster import Training
from dips.planner.model import Model

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
