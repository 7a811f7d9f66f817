"""Small problems for SpanTrain's planner, and the best plan of each by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from typing import Any, NamedTuple

from dips.core.config import SettingsFile
from dips.planner.cluster import ClusterFile, divisors, setup_of
from dips.planner.grouping import Group, group, measured_of
from dips.planner.spantrain.inside import DEFAULT_RULES, SecondLevelRules
from dips.planner.spantrain.search import Chain, FirstLevelChoice, Level, least_s, simulated
from dips.planner.spantrain.work import work_of

WAN_GBPS, LAN_GBPS = (0.02, 0.05, 0.1, 0.2), (0.5, 1, 4, 10)
"""Below and above the threshold of groups."""

Row = dict[str, Any]


def problem(
    sites: Sequence[Row], links: Sequence[Row], layers: int = 8, batch: int = 8, **training: Any
) -> ClusterFile:
    tables = {
        "model": {
            "name": "small", "layers": layers, "hidden": 768, "heads": 12, "mlp_width": 3072, "gated_mlp": False,
            "vocabulary": 50257, "tied_embeddings": True, "source": "a test",
        },
        "sites": [{"source": "a test", "devices": 1, "memory_gib": 24, "stages": 0} | row for row in sites],
        "links": [{"source": "a test", "latency_ms": 1} | row for row in links],
        "training": {
            "pipeline": 1, "microbatches": batch, "microbatch_sequences": 1, "sequence_tokens": 512, "source": "a test",
        } | training,
    }  # fmt: skip
    return setup_of(SettingsFile("problem.toml", tables))


def all_links(names: Sequence[str], rate: Any) -> list[Row]:
    return [{"sender": a, "receiver": b, "bandwidth_gbps": rate(a, b)} for a, b in combinations(names, 2)]


def drawn(seed: int) -> ClusterFile:
    """A random problem: up to 6 devices in up to 4 regions, up to 12 layers; devices up to 10 times apart in speed;
    memory of 0.5 GiB (2 layers without embedding need 0.3, the first one 0.8) up to 4 GiB (all); links between regions
    up to 10 times apart."""
    dice = random.Random(seed)
    regions = dice.choice((2, 2, 3, 3, 3, 4))
    layers = dice.randint(regions + 2, 8 if regions == 4 else 12)
    sites: list[Row] = []
    for number in range(dice.randint(regions, 6)):
        region = number if number < regions else dice.randrange(regions)
        sites.append(
            {
                "name": f"r{region}-{number}",
                "sustained_tflops": dice.choice((0.5, 0.8, 1, 2, 3, 5)),
                "memory_gib": dice.choice((0.5, 0.8, 1, 1.3, 1.8, 4)),
            }
        )
    if len(sites) < 6 and dice.random() < 0.5:
        sites[0] |= {"devices": 2, "network_gbps": 100}
    rates: dict[tuple[str, str], float] = {}
    for a, b in combinations(sites, 2):
        ends = a["name"], b["name"]
        rates[ends] = dice.choice(LAN_GBPS if ends[0][:2] == ends[1][:2] else WAN_GBPS)
    links = all_links([site["name"] for site in sites], lambda a, b: rates[a, b])
    return problem(sites, links, layers, dice.choice((4, 6, 8, 12)))


def grouped(setup: ClusterFile) -> tuple[Group, ...]:
    return group(measured_of(setup)).groups


def candidates(level: Level) -> Iterator[FirstLevelChoice]:
    n, units = len(level.groups), level.work.units
    for order in permutations(range(n)):
        for cuts in combinations(range(1, units), n - 1):
            bounds = (0, *cuts, units)
            yield FirstLevelChoice(order, tuple(b - a for a, b in pairwise(bounds)))


class Best(NamedTuple):
    equation_s: dict[int, float]  # the least of Equation 1 for each microbatch size
    iteration_s: float | None  # the least simulated one; None: nothing fits


def brute_force(setup: ClusterFile, rules: SecondLevelRules = DEFAULT_RULES) -> Best:
    """The best of all orders, divisions and microbatch sizes, each simulated unless its lower bound is too long."""
    groups, equation_s = grouped(setup), {}
    batch = setup.training.microbatches * setup.training.microbatch_sequences
    bounded: list[tuple[float, int, Chain, Level]] = []
    for size in divisors(batch):
        level = Level(work_of(setup, size), groups, batch, rules)
        chains = [chain for chain in map(level.chain, candidates(level)) if chain is not None]
        if chains:
            equation_s[size] = min(chain.equation_s for chain in chains)
        bounded += [(least_s(level.work, chain), size, chain, level) for chain in chains]
    best: float | None = None
    for least, _, chain, level in sorted(bounded, key=lambda row: row[:2]):
        if best is not None and least >= best:
            break
        one = simulated(level.work, chain).iteration_s
        best = one if best is None else min(best, one)
    return Best(equation_s, best)
