"""What `dips plan explore` reports: the search's result, the reasons for it, and the recommendations."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dips.core.units import format_seconds
from dips.planner.scaleacross.iteration import Outermost, shares_of
from dips.planner.scaleacross.network import NetworkAdvice, recommend
from dips.planner.scaleacross.search import Choice, Explored, Parts, catches_up, explore, parts_of
from dips.planner.scaleacross.topology import Topology


@dataclass(frozen=True, eq=False)
class ScaleAcrossReport:
    explored: Explored
    parts: Parts  # of the best
    advice: tuple[NetworkAdvice, ...]
    why: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Times in seconds; null where a configuration does not fit."""
        found = self.explored
        return {
            "topology": Path(found.topology.file).name,
            "model": found.topology.model.name,
            "searched_with_links": found.links,
            "cases": found.n_cases,
            "cases_played": found.n_played,
            "divisions_played": found.n_divisions,
            "best_of_each_kind": [_choice_json(choice) for choice in found.best],
            "present": None if found.present is None else _choice_json(found.present),
            "parts": self.parts._asdict(),
            "why": list(self.why),
            "network": [asdict(one) for one in self.advice],
        }


def _choice_json(choice: Choice) -> dict[str, Any]:
    case = choice.case
    return {
        **case.split._asdict(),
        "outermost": case.outermost.value,
        "sharding": case.sharding.value,
        "schedule": case.pipelining.value,
        "chunks_of_a_stage": case.chunks,
        "microbatches_together": case.together,
        "layers": list(choice.division),
        "algorithm_1_s": choice.printed_s if math.isfinite(choice.printed_s) else None,
        "links_s": choice.links_s if math.isfinite(choice.links_s) else None,
        "memory_bytes": choice.used_bytes,
    }


def report_of(topology: Topology, links: bool = False) -> ScaleAcrossReport:
    """Explore a topology. Raises PlanError where nothing fits."""
    found = explore(topology, links)
    parts = parts_of(topology, found.best[0], links)
    return ScaleAcrossReport(found, parts, tuple(recommend(topology, found.best[0])), tuple(_why(found, parts)))


def name_of(choice: Choice) -> str:
    return f"{choice.case.outermost}, {choice.case.sharding}, {choice.case.pipelining}"


def _why(found: Explored, parts: Parts) -> list[str]:
    links, best = found.links, found.best[0]
    whole = best.seconds(links)
    shares = (
        ("computing on the busiest accelerator", parts.computing_s),
        ("bubble", parts.bubble_s),
        ("messages between stages that nothing hides", parts.messages_s),
        ("weights and gradients that nothing hides", parts.collectives_s),
    )
    listed = ", ".join(f"{what} {format_seconds(seconds)} ({seconds / whole:.1%})" for what, seconds in shares)
    sentences = [*found.topology.notes, f"best: {name_of(best)}: {format_seconds(whole)}: {listed}"]
    split = best.case.split
    used, there = split.tensor * split.context * split.pipeline * split.data, found.topology.n_accelerators
    if used < there:
        given = shares_of(found.topology, best.case.outermost, split)
        what = "replicas" if best.case.outermost is Outermost.DP else "stages"
        named = zip(found.topology.buildings, given, strict=True)
        listed = ", ".join(f"{share} {what} in {building.name}" for building, share in named)
        sentences.append(f"it uses {used} of {there} accelerators: {listed}")
    if len(found.best) > 1:
        sentences.append(_next(found, best, found.best[1]))
    if found.present is not None and math.isfinite(found.present.seconds(links)):
        sentences.append(f"the present configuration takes {found.present.seconds(links) / whole - 1:.1%} longer")
    return sentences


def _next(found: Explored, best: Choice, other: Choice) -> str:
    spent = parts_of(found.topology, other, found.links)
    slower = f"next: {name_of(other)}: {other.seconds(found.links) / best.seconds(found.links) - 1:.1%} slower"
    where = (
        f"its messages and collectives that nothing hides take {format_seconds(spent.messages_s + spent.collectives_s)}"
    )
    if len(found.topology.buildings) == 1:
        return f"{slower}; {where}"
    change = catches_up(found.topology, best, other, found.links)
    if change is None:
        need = "no bandwidth between buildings up to 64 times more or less makes it as fast"
    else:
        factor, more = change
        need = (
            f"it would be as fast with {factor:.3g} times the bandwidth between buildings"
            if more
            else f"it would be as fast with the bandwidth between buildings divided by {factor:.3g}"
        )
    return f"{slower}; {where}; {need}"
