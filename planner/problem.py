"""From sites, a model and a way of splitting to what a schedule is made for: costs of stages, wires, memory limits.

A model is a row of units, which are divided into stages: its layers, and the embedding and the output layer as units of
their own if extra_layers says so (they then cost as much as a layer, as Llama 3's stages are made); else they belong to
the first and the last stage. Replicas are equal; one is planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from dips.planner.cluster import Setup, Site, stages_of_sites
from dips.planner.cost import (
    Work,
    layer_activation_bytes,
    layer_state_bytes,
    layer_work,
    output_work,
    pipeline_message_bytes,
    state_bytes,
)
from dips.planner.costs import NS, Costs, StageCost, Wire
from dips.planner.errors import PlanError
from dips.planner.ir import straight

RELEASED_BY_INPUT_GRADIENT = 2 / 34
"""Of an activation, when D ends; the rest when W ends: with flash attention a layer holds 34 s b h bytes, and W
needs 32 of them (Zero Bubble, arXiv:2401.10241, Table 1)."""

Division = tuple[int, ...]
"""Units of each stage, in the order of the model."""


@dataclass(frozen=True)
class Unit:
    """One layer on one device. times in seconds at the first site's speed; state_bytes does not grow with
    microbatches."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    activation_bytes: float
    state_bytes: float


@dataclass(frozen=True, eq=False)
class Problem:
    """devices are the pipeline's: each stands for all of one replica's that share a stage. released: the part of an
    activation that the gradient of the input gives back, from 0 to 1."""

    setup: Setup
    released: float = RELEASED_BY_INPUT_GRADIENT

    @cached_property
    def n_devices(self) -> int:
        return self.setup.training.pipeline

    @cached_property
    def n_microbatches(self) -> int:
        return self.setup.training.microbatches

    @cached_property
    def replicas(self) -> int:
        return self.setup.training.data

    @cached_property
    def site_of(self) -> tuple[int, ...]:
        """The site of each device."""
        return tuple(site for site, n in enumerate(stages_of_sites(self.setup)) for _ in range(n))

    @cached_property
    def message_bytes(self) -> float:
        """Of one microbatch of one replica between two stages."""
        profile = self.setup.profile
        if profile is not None and profile.message_mb is not None:
            return profile.message_mb * 1e6
        return pipeline_message_bytes(self.setup.model, self.setup.training)

    # ---- units ----

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        model, training = self.setup.model, self.setup.training
        layers = [self._unit(layer) for layer in range(model.layers)]
        embedding = state_bytes(model.embedding_parameters() / training.tensor, training)
        output = state_bytes(model.output_parameters() / training.tensor, training)
        if training.extra_layers == 0:
            first, last = layers[0], layers[-1]
            layers[0] = replace(first, state_bytes=first.state_bytes + embedding)
            last = replace(layers[-1], state_bytes=layers[-1].state_bytes + output)
            layers[-1] = last if self.setup.profile else self._with_output(last)
            return tuple(layers)
        found = [replace(layers[0], state_bytes=embedding), *layers]
        return (*found, replace(layers[0], state_bytes=output)) if training.extra_layers == 2 else tuple(found)

    def _unit(self, layer: int) -> Unit:
        model, training = self.setup.model, self.setup.training
        held = layer_activation_bytes(model, layer, training)
        state = layer_state_bytes(model, layer, training)
        profile = self.setup.profile
        if profile is not None:
            share = self.n_devices / (model.layers + training.extra_layers) / 1e3
            again = profile.forward_ms if training.recompute == "full" else 0.0
            d_ms = profile.input_gradient_ms + again
            return Unit(profile.forward_ms * share, d_ms * share, profile.weight_gradient_ms * share, held, state)
        tokens = training.microbatch_sequences * training.sequence_tokens
        work = layer_work(model, layer, tokens, training.sequence_tokens)
        return self._timed(work.recomputed() if training.recompute == "full" else work, held, state)

    def _timed(self, work: Work, held: float, state: float) -> Unit:
        training = self.setup.training
        speed = self._tflops(0) * 1e12 * training.tensor * training.context
        return Unit(work.forward / speed, work.input_gradient / speed, work.weight_gradient / speed, held, state)

    def _with_output(self, unit: Unit) -> Unit:
        training = self.setup.training
        more = self._timed(
            output_work(self.setup.model, training.microbatch_sequences * training.sequence_tokens), 0.0, 0.0
        )
        return replace(
            unit,
            forward_s=unit.forward_s + more.forward_s,
            input_gradient_s=unit.input_gradient_s + more.input_gradient_s,
            weight_gradient_s=unit.weight_gradient_s + more.weight_gradient_s,
        )

    def _tflops(self, site: int) -> float:
        given = self.setup.sites[site].sustained_tflops
        if given is None:
            raise PlanError(
                f"{self.setup.file} [[sites]] {site + 1}: sustained_tflops is not given, and no [profile] says "
                "how long a "
                "stage takes: add one of them"
            )
        return given

    def _slowness(self, device: int) -> float:
        """Time on this device over time on the first site's."""
        site = self.site_of[device]
        sites = self.setup.sites
        if site == 0 or (sites[0].sustained_tflops is None and sites[site].sustained_tflops is None):
            return 1.0
        return self._tflops(0) / self._tflops(site)

    # ---- stages ----

    def uniform(self, n_stages: int | None = None) -> Division:
        """As even as can be; what does not divide goes to later stages, which hold fewer microbatches. Raises
        PlanError where there are more stages than units."""
        n = self.n_devices if n_stages is None else n_stages
        whole, rest = divmod(len(self.units), n)
        if not whole:
            raise PlanError(f"{self.setup.file}: {n} stages are more than {len(self.units)} layers: use fewer stages")
        return tuple(whole + (stage >= n - rest) for stage in range(n))

    def balanced(self, places: Sequence[int]) -> Division:
        """Stages of times as equal as can be (least squares), where units or sites differ; places[s]: device of stage
        s."""
        times = [u.forward_s + u.input_gradient_s + u.weight_gradient_s for u in self.units]
        return _even(times, [self._slowness(device) for device in places])

    def costs(self, division: Division, places: Sequence[int] | None = None, together: float | None = None) -> Costs:
        """places[s]: device of stage s; straight if not given. together: replicas whose messages one wire carries as
        one (a fair share of the link for each); all of them if not given."""
        placed = straight(self.n_devices) if places is None else tuple(places)
        starts = [0, *accumulate(division)]
        stages = tuple(
            self._stage(self.units[starts[s] : starts[s + 1]], self._slowness(placed[s])) for s in range(len(division))
        )
        return Costs(stages, self.wires(placed, self.replicas if together is None else together))

    def _stage(self, units: Sequence[Unit], slowness: float) -> StageCost:
        f_ns, d_ns, w_ns = (
            round(sum(times) * slowness * NS)
            for times in zip(*((u.forward_s, u.input_gradient_s, u.weight_gradient_s) for u in units), strict=True)
        )
        held = round(sum(unit.activation_bytes for unit in units))
        return StageCost(f_ns, d_ns, w_ns, held, round(held * self.released))

    def wires(self, placed: Sequence[int], together: float) -> dict[tuple[int, int], Wire]:
        """Between the devices that are neighbours in the model. All messages of a link share it, in each direction."""
        n, n_sites, found = self.n_devices, len(self.setup.sites), {}
        for a, b in {
            pair for s in range(1, len(placed)) for pair in (placed[s - 1 : s + 1], placed[s - 1 : s + 1][::-1])
        }:
            if a == b:
                continue
            here, there = self.site_of[a], self.site_of[b]
            if here != there:
                found[a, b] = self._between(here, there, together)
            elif (wire := self._inside(self.setup.sites[here], n_sites**2 + n * a + b)) is not None:
                found[a, b] = wire
        return found

    def _between(self, here: int, there: int, together: float) -> Wire:
        sites = self.setup.sites
        link = self.setup.link(sites[here].name, sites[there].name)
        busy_ns = round(self.message_bytes * together / link.bytes_per_s * NS)
        latency_ns = round(link.latency_ms * 1e6)
        hold_ns = 2 * latency_ns if self.setup.options.blocking else 0
        return Wire(here * len(sites) + there, busy_ns, latency_ns, hold_ns)

    def _inside(self, site: Site, resource: int) -> Wire | None:
        """Each pair of devices of one replica has a link of its own there."""
        latency_ns = round(site.network_latency_us * 1e3)
        if site.network_gbps is None:
            return Wire(resource, 0, latency_ns, shared=False) if latency_ns else None
        return Wire(resource, round(self.message_bytes * 8 / site.network_gbps), latency_ns, shared=False)

    # ---- memory ----

    def state_bytes(self, division: Division, places: Sequence[int] | None = None) -> list[int]:
        """Weights, gradients and optimizer state on each device."""
        placed = straight(self.n_devices) if places is None else places
        starts, found = [0, *accumulate(division)], [0.0] * self.n_devices
        for stage, device in enumerate(placed):
            found[device] += sum(unit.state_bytes for unit in self.units[starts[stage] : starts[stage + 1]])
        return [round(value) for value in found]

    def limits(self, division: Division, places: Sequence[int] | None = None) -> list[int]:
        """Bytes of activations that each device may hold. Raises PlanError where nothing is left for them."""
        profile = self.setup.profile
        if profile is not None and profile.memory_microbatches is not None:
            share = len(self.units) / self.n_devices
            held = max(unit.activation_bytes for unit in self.units)
            return [round(profile.memory_microbatches * share * held)] * self.n_devices
        found = []
        for device, state in enumerate(self.state_bytes(division, places)):
            site = self.setup.sites[self.site_of[device]]
            if site.memory_gib is None:
                raise PlanError(
                    f"{self.setup.file} [[sites]] {self.site_of[device] + 1}: memory_gib is not given, and no "
                    "[profile] has "
                    "memory_microbatches: add one of them"
                )
            left = round(site.memory_gib * 2**30) - state
            if left <= 0:
                raise PlanError(
                    f"{self.setup.file}: memory_gib = {site.memory_gib:g} of {site.name} holds less than the "
                    f"{state / 2**30:.1f} "
                    f"GiB of weights and optimizer state of stage {device}: use more stages, a larger tensor or "
                    "zero_stage"
                )
            found.append(left)
        return found

    # ---- other problems ----

    def with_links(self, bandwidth: float = 1.0, latency: float = 1.0) -> Problem:
        """The same with all links between sites that much wider and later."""
        links = tuple(
            link.model_copy(
                update={"bandwidth_gbps": link.bandwidth_gbps * bandwidth, "latency_ms": link.latency_ms * latency}
            )
            for link in self.setup.links
        )
        return replace(self, setup=replace(self.setup, links=links))

    def with_memory(self, factor: float) -> Problem:
        profile, sites = self.setup.profile, self.setup.sites
        if profile is not None and profile.memory_microbatches is not None:
            profile = profile.model_copy(update={"memory_microbatches": profile.memory_microbatches * factor})
        sites = tuple(
            site if site.memory_gib is None else site.model_copy(update={"memory_gib": site.memory_gib * factor})
            for site in sites
        )
        return replace(self, setup=replace(self.setup, profile=profile, sites=sites))

    def with_training(self, **changes: object) -> Problem:
        return replace(self, setup=replace(self.setup, training=self.setup.training.model_copy(update=changes)))

    def with_options(self, **changes: object) -> Problem:
        return replace(self, setup=replace(self.setup, options=self.setup.options.model_copy(update=changes)))

    def with_delays(self, latency_s: float, busy_s: float) -> Problem:
        """All links between sites such that a message of all replicas takes so long; 0 busy_s: no time at all."""
        gbps = self.message_bytes * self.replicas * 8 / busy_s / 1e9 if busy_s else 1e15
        links = tuple(
            link.model_copy(update={"bandwidth_gbps": gbps, "latency_ms": latency_s * 1e3, "oversubscription": 1.0})
            for link in self.setup.links
        )
        return replace(self, setup=replace(self.setup, links=links))


def _even(times: Sequence[float], slowness: Sequence[float]) -> Division:
    """Units in their order, at least one on each stage, so that the squares of the stages' times have the least sum."""
    n, sums = len(times), [0.0, *accumulate(times)]
    best = [0.0] + [math.inf] * n  # of the first k units on the stages so far
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
