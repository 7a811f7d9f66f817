"""benchmarks/peers/stages.py: a round is cut at the lines of the tapes, and its stages add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from peers.stages import NAMES, Stage, cuts_of, mean, stages_of

WIDTH_S = 0.1
"""Of the round that the tapes below tell, which begins at 10."""


def line(after_s: float, role: str, name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"monotonic_s": 10 + after_s, "role": role, "name": name, "kind": kind, **fields}


def a_round() -> list[dict[str, Any]]:
    return [
        line(0.001, "worker", "c0", "push_begun", push="p0"),
        line(0.002, "worker", "c1", "push_begun", push="p1"),
        line(0.020, "worker", "c0", "push_sent", push="p0", transfer_s=0.015),
        line(0.030, "worker", "c1", "push_sent", push="p1", transfer_s=0.020),
        line(0.021, "master", "run", "admitted", push="p0"),
        line(0.032, "master", "run", "admitted", push="p1"),
        line(0.033, "master", "run", "round", phase="MEASURE", input="checks passed"),
        line(0.037, "slave", "s0", "measured", took_s=0.003),
        line(0.035, "slave", "s1", "measured", took_s=0.001),
        line(0.040, "master", "run", "round", phase="PREPARE", input="accepted"),
        line(0.051, "slave", "s0", "prepared", took_s=0.010),
        line(0.053, "master", "run", "round", phase="COMMIT", input="all prepared"),
        line(0.060, "master", "run", "publish", version="1:2"),
        line(0.061, "worker", "c0", "verdict", push="p0"),
        line(0.062, "worker", "c1", "verdict", push="p1"),
        line(0.090, "worker", "c1", "installed", pull_s=0.023, transfer_s=0.020),
        line(0.080, "worker", "c0", "installed", pull_s=0.013, transfer_s=0.010),
    ]


class Even:
    """Clocks of one kind of process that always works."""

    def between(self, began_s: float, ended_s: float) -> Mapping[str, float]:
        return {"slaves": ended_s - began_s}


def stages(events: list[dict[str, Any]]) -> list[Stage]:
    return stages_of(10.0, cuts_of("c1", 10.0, 10 + WIDTH_S, events), Even())


def test_each_stage_ends_with_its_line() -> None:
    ms = {stage.name: round(1e3 * stage.wall_s) for stage in stages(a_round())}
    assert ms == {
        "copy out of the model": 2, "begin push (call)": 8, "send": 20, "finish push (call)": 2,
        "wait for the other clusters": 1, "measure": 3, "measure (calls), judge": 4, "outer step": 10,
        "outer step (calls)": 3, "commit and publish (calls)": 7, "verdict (call)": 2, "begin pull (call)": 3,
        "fetch": 20, "install into the model": 5, "back in the loop": 10,
    }  # fmt: skip
    assert tuple(ms) == NAMES


def test_the_stages_add_up_to_the_round_and_to_its_processor_time() -> None:
    found = stages(a_round())
    assert sum(stage.wall_s for stage in found) == pytest.approx(WIDTH_S)
    assert sum(stage.cpu_s["slaves"] for stage in found) == pytest.approx(WIDTH_S)


def test_lines_of_the_rounds_before_and_after_are_not_taken() -> None:
    around = [{**event, "monotonic_s": event["monotonic_s"] + shift} for shift in (-1, 1) for event in a_round()]
    assert stages(around[: len(around) // 2] + a_round() + around[len(around) // 2 :]) == stages(a_round())


def test_the_mean_of_rounds_is_taken_stage_by_stage() -> None:
    rounds = [[Stage("send", wall_s, {"slaves": 2 * wall_s})] for wall_s in (1.0, 3.0)]
    assert mean(rounds) == [Stage("send", 2.0, {"slaves": 4.0})]
