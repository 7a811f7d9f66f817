"""A model as a row of units, which are divided into stages: with what each computes, stores, and sends to other
replicas.

Its layers, and the embedding and the output layer as units of their own if extra_layers says so (each then costs as
much as a layer, as in Llama 3's stages); else they belong to the first and the last unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dips.planner.cluster import ClusterFile
from dips.planner.costs import (
    WEIGHT_BYTES,
    MicrobatchCost,
    inside_exchange_bytes,
    layer_activation_bytes,
    layer_state_bytes,
    layer_work,
    output_work,
    state_bytes,
)
from dips.planner.errors import PlanError

Division = tuple[int, ...]
"""Units of each stage, in the order of the model."""


@dataclass(frozen=True)
class Unit:
    """One layer on one device. times in seconds at the first site's speed; state_bytes does not grow with
    microbatches. weight_bytes: of its weights (or gradients) as they are sent, all devices of a stage together.
    inside_bytes: what all devices of a replica send inside their site when replicas share weights or gradients."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    activation_bytes: float
    state_bytes: float
    weight_bytes: float = 0.0
    inside_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


def units_of(setup: ClusterFile, groups: int = 1) -> tuple[Unit, ...]:
    """The units of a model. groups: of sites, each with a part of the replicas, between which inside_bytes are sent.
    Raises PlanError when neither a profile nor a speed is given."""
    return tuple(_Units(setup, groups).all())


def tflops_of(setup: ClusterFile, site: int) -> float:
    """10^12 operations a second of one device. Raises PlanError when not given."""
    given = setup.sites[site].sustained_tflops
    if given is None:
        raise PlanError(
            f"{setup.file} [[sites]] {site + 1}: sustained_tflops is not given, and no [profile] has "
            "the times of a stage: add one of them"
        )
    return given


class _Units:
    def __init__(self, setup: ClusterFile, groups: int) -> None:
        self._setup, self._groups = setup, groups

    def all(self) -> list[Unit]:
        model, training = self._setup.model, self._setup.training
        layers = [self._layer(layer) for layer in range(model.layers)]
        embedding = self._weights(model.embedding_parameters())
        output = self._weights(model.output_parameters())
        if training.extra_layers == 0:
            layers[0] = _plus(layers[0], embedding)
            last = _plus(layers[-1], output)
            layers[-1] = last if self._setup.profile else _plus(last, self._output())
            return layers
        found = [_with_weights(layers[0], embedding), *layers]
        return [*found, _with_weights(layers[0], output)] if training.extra_layers == 2 else found

    def _layer(self, layer: int) -> Unit:
        model, training, profile = self._setup.model, self._setup.training, self._setup.profile
        held = layer_activation_bytes(model, layer, training)
        whole = model.layer_parameters(layer)
        experts = 0 if model.is_dense(layer) else model.experts * model.expert_parameters()
        known = Unit(
            0.0, 0.0, 0.0, held, layer_state_bytes(model, layer, training), whole * WEIGHT_BYTES,
            inside_exchange_bytes(whole, experts, training, self._groups),
        )  # fmt: skip
        if profile is not None:
            share = training.pipeline / (model.layers + training.extra_layers) / 1e3
            again = profile.forward_ms if training.recompute == "full" else 0.0
            times_ms = (profile.forward_ms, profile.input_gradient_ms + again, profile.weight_gradient_ms)
            f, d, w = (time_ms * share for time_ms in times_ms)
            return replace(known, forward_s=f, input_gradient_s=d, weight_gradient_s=w)
        work = layer_work(
            model, layer, training.microbatch_sequences * training.sequence_tokens, training.sequence_tokens
        )
        return _plus(known, self._timed(work.recomputed() if training.recompute == "full" else work))

    def _weights(self, parameters: float) -> Unit:
        """A unit of so many parameters without computation."""
        training = self._setup.training
        inside = inside_exchange_bytes(parameters, 0, training, self._groups)
        state = state_bytes(parameters / training.tensor, training)
        return Unit(0.0, 0.0, 0.0, 0.0, state, parameters * WEIGHT_BYTES, inside)

    def _output(self) -> Unit:
        training = self._setup.training
        return self._timed(output_work(self._setup.model, training.microbatch_sequences * training.sequence_tokens))

    def _timed(self, work: MicrobatchCost) -> Unit:
        training = self._setup.training
        speed = tflops_of(self._setup, 0) * 1e12 * training.tensor * training.context
        return Unit(work.forward / speed, work.input_gradient / speed, work.weight_gradient / speed, 0.0, 0.0)


def _plus(a: Unit, b: Unit) -> Unit:
    return Unit(
        a.forward_s + b.forward_s,
        a.input_gradient_s + b.input_gradient_s,
        a.weight_gradient_s + b.weight_gradient_s,
        a.activation_bytes + b.activation_bytes,
        a.state_bytes + b.state_bytes,
        a.weight_bytes + b.weight_bytes,
        a.inside_bytes + b.inside_bytes,
    )


def _with_weights(unit: Unit, weights: Unit) -> Unit:
    """A unit with the computation of one and the weights of both."""
    return replace(
        unit,
        state_bytes=weights.state_bytes,
        weight_bytes=weights.weight_bytes,
        inside_bytes=weights.inside_bytes,
    )


def even_division(times: Sequence[float], slowness: Sequence[float]) -> Division:
    """Divide units in their order, at least one on each stage, so that the sum of the squared stage times is least."""
    n, sums = len(times), [0.0, *accumulate(times)]
    best = [0.0] + [math.inf] * n  # least sum for the first k units on the stages so far
    cuts: list[list[int]] = []
    for stage, slow in enumerate(slowness):
        cut, after = [0] * (n + 1), [math.inf] * (n + 1)
        for end in range(stage + 1, n + 1):
            after[end], cut[end] = min((best[k] + ((sums[end] - sums[k]) * slow) ** 2, k) for k in range(stage, end))
        best = after
        cuts.append(cut)
    found, end = [], n
    for cut in reversed(cuts):
        found.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(found))
