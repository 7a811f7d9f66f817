"""Measures tokens per second of a method in a set-up, relative to the ideal and to synchronous DiLoCo.

Our own methods are run, without training, on the simulated servers with links (engine.timing_only). The paper's
baselines have no servers: their times follow from the set-up and the time of a ring all-reduce
(links.all_reduce_s). Synchronous DiLoCo is both computed and run; every gain is relative to the faster of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dips.compare.engine import timing_only
from dips.compare.methods import METHODS, Method
from dips.compare.plans import wire_bytes
from dips.compare.record import RunRecord
from dips.compare.setup import ComparisonSetup
from dips.core.errors import ConfigError
from dips.sim.network import all_reduce_s

WARM_UP_SHARE = 0.25
"""The part of a run's tokens that is not measured: the clusters' phases still change."""

ROUNDS = 16
"""About how often each cluster pushes in a run that measures throughput."""


@dataclass(frozen=True)
class Throughput:
    """A throughput. tokens_per_s: applied, of all clusters together. Numbers of rounds are 0 when it was only
    computed."""

    method: str
    tokens_per_s: float
    ideal_tokens_per_s: float
    rounds: int = 0
    merged_per_round: float = 0.0
    staleness_mean: float = 0.0

    @property
    def share_of_ideal(self) -> float:
        """The part of what the clusters would train if transfers took no time and no cluster waited."""
        return self.tokens_per_s / self.ideal_tokens_per_s

    def gain_over(self, other: Throughput) -> float:
        return self.tokens_per_s / other.tokens_per_s


@dataclass(frozen=True)
class ThroughputComparison:
    """The throughputs in one set-up. baselines: data parallel, synchronous and asynchronous DiLoCo without servers, and
    synchronous DiLoCo over our servers; measured: the chosen methods."""

    setup: ComparisonSetup
    synchronous: Throughput
    baselines: tuple[Throughput, ...]
    measured: tuple[Throughput, ...]

    def gain(self, method: str) -> float:
        """Speed of a measured method relative to synchronous DiLoCo, the faster of its two forms."""
        return self.of(method).gain_over(self.synchronous)

    def of(self, method: str) -> Throughput:
        return next(item for item in (*self.measured, *self.baselines) if item.method == method)


def compare(
    setup: ComparisonSetup, methods: Sequence[Method], seed: int = 1, rounds: int = ROUNDS
) -> ThroughputComparison:
    """Compare all baselines and `methods` in one set-up. Raises ConfigError for a method without servers."""
    synchronous = (ring_diloco(setup), measure(setup, METHODS["diloco"], seed, rounds))
    baselines = (data_parallel(setup), *synchronous, ring_async(setup))
    measured = tuple(measure(setup, method, seed, rounds) for method in methods)
    return ThroughputComparison(setup, max(synchronous, key=lambda item: item.tokens_per_s), baselines, measured)


def measure(setup: ComparisonSetup, method: Method, seed: int = 1, rounds: int = ROUNDS) -> Throughput:
    """Run `method` for so many rounds of each cluster; the rate is that of the steady part.

    rounds: of H steps, of a cluster of mean speed. Raises ConfigError for a method without servers, and for fewer than
    6 rounds, which have too short a steady part.
    """
    if method.kind != "servers":
        raise ConfigError(f"method {method.name} has no servers to run on: use data_parallel() for it")
    if rounds < 6:
        raise ConfigError(f"{rounds} rounds are too few to measure a throughput: give at least 6")
    tokens = rounds * setup.n_clusters * setup.run.inner_steps * setup.tokens_per_step
    record = timing_only(setup.with_overrides(tokens=tokens), method, seed)
    judged = [push for fact in record.judged for push in fact.pushes]
    return Throughput(
        method.name,
        steady_tokens_per_s(record),
        setup.ideal_tokens_per_s,
        len(record.judged),
        len(judged) / len(record.judged),
        sum(push.staleness for push in judged) / len(judged),
    )


def steady_tokens_per_s(record: RunRecord) -> float:
    """The sum of the clusters' rates after the warm-up.

    Of each: the tokens of its merged pushes after the first one, over the time from the first to the last. Incomplete
    rounds at either end do not distort it, as they would distort a total.
    """
    begins = WARM_UP_SHARE * record.virtual_s
    merged: dict[str, list[tuple[float, int]]] = {}
    for fact in record.judged:
        for push in fact.pushes:
            if push.verdict == "APPLIED" and fact.virtual_s >= begins:
                merged.setdefault(push.cluster, []).append((fact.virtual_s, push.tokens))
    return sum(_rate(pushes) for pushes in merged.values() if len(pushes) > 1)


def _rate(pushes: Sequence[tuple[float, int]]) -> float:
    span_s = pushes[-1][0] - pushes[0][0]
    return sum(tokens for _, tokens in pushes[1:]) / span_s


# ---- the paper's baselines, without servers ----


def data_parallel(setup: ComparisonSetup) -> Throughput:
    """Data parallel: every step waits for the slowest cluster and for an all-reduce of the gradients, in float32 (paper
    5.1, i)."""
    return _computed(setup, "dp", max(setup.step_s) + exchange_s(setup), 1)


def ring_diloco(setup: ComparisonSetup) -> Throughput:
    """Synchronous DiLoCo without servers: every round of H steps waits for the slowest cluster and for an all-reduce of
    the parameters (paper 5.1, ii)."""
    h = setup.run.inner_steps
    return _computed(setup, "ring-diloco", h * max(setup.step_s) + exchange_s(setup), h)


def ring_async(setup: ComparisonSetup) -> Throughput:
    """Asynchronous DiLoCo without servers: each cluster has rounds of its own, but an exchange takes equally long for
    all, since the ring goes through all links (paper 5.1, iii, and 3.1: "uniformly high communication overhead").

    That exchanges slow each other down is not counted, so this is an upper bound.
    """
    h, exchange = setup.run.inner_steps, exchange_s(setup)
    rate = sum(h * setup.tokens_per_step / (h * step_s + exchange) for step_s in setup.step_s)
    return Throughput("ring-async", rate, setup.ideal_tokens_per_s)


def exchange_s(setup: ComparisonSetup) -> float:
    """Seconds of one ring all-reduce of the model as it is sent."""
    return all_reduce_s(wire_bytes(setup), setup.up_bits_per_s, setup.down_bits_per_s, setup.links.latency)


def _computed(setup: ComparisonSetup, name: str, round_s: float, steps: int) -> Throughput:
    tokens = steps * setup.n_clusters * setup.tokens_per_step
    return Throughput(name, tokens / round_s, setup.ideal_tokens_per_s)


# ---- the paper's figures ----


def with_last_link(setup: ComparisonSetup, bits_per_s: float) -> ComparisonSetup:
    """The set-up with this rate, both ways, for its last cluster (paper 5.1: the remaining cluster's 1 to 10 Gbps)."""
    up, down = setup.up_bits_per_s[:-1], setup.down_bits_per_s[:-1]
    return setup.with_overrides(up=(*up, bits_per_s), down=(*down, bits_per_s))


def first_clusters(setup: ComparisonSetup, n: int) -> ComparisonSetup:
    """The set-up with its first n clusters only (paper 5.2: added one after another). Raises ConfigError."""
    if not 1 <= n <= setup.n_clusters:
        raise ConfigError(f"set-up {setup.name} has {setup.n_clusters} clusters: {n} of them cannot be used")
    return setup.with_overrides(
        gaps=setup.clusters.gaps[:n], up=setup.up_bits_per_s[:n], down=setup.down_bits_per_s[:n]
    )
