"""Simulated clusters tell what real ones measure: how fast their last steps were, and how long transfers took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dips.lab.compare.engine import Course, plan_of, timing_data, timing_layout
from dips.lab.compare.methods import METHODS
from dips.lab.compare.setup import load_setup
from dips.lab.sim.kernel import SimulatedProcess
from dips.worker.pace import WINDOW_STEPS


def course_of(name: str) -> Course:
    setup = load_setup(name)
    plan = plan_of(setup, METHODS["dips"], timing_layout(setup), timing_data(setup))
    return Course(1, plan)


def told_steps_per_s(course: Course, cluster: str) -> float:
    state = course.masters[0].state
    assert state is not None
    beat = state.shared.members[cluster].beat
    assert beat is not None
    return beat.steps_per_s


def test_a_transfer_takes_as_long_as_its_link_lets_it() -> None:
    course, took_s = course_of("slow-link"), list[tuple[str, float]]()

    def watch(role: str, process: SimulatedProcess, kind: str, fields: Mapping[str, Any]) -> None:
        if role == "worker" and kind in ("push_sent", "installed"):
            took_s.append((process.name, fields["transfer_s"]))

    course.watchers.append(watch)
    course._boot()
    course.kernel.run(80.0)
    assert {name for name, _ in took_s} == set("abcd")
    of_a = [seconds for name, seconds in took_s if name == "a"]
    assert of_a == pytest.approx([7.0] * len(of_a), rel=0.02)
    assert max(seconds for name, seconds in took_s if name != "a") < 0.1


def test_beats_tell_the_speed_of_the_last_steps() -> None:
    course = course_of("small")
    course._boot()
    course.kernel.run(60.0)
    assert told_steps_per_s(course, "a") == pytest.approx(1.0)
    course.set_conditions("a", replace(load_setup("small").conditions(0.0)[0], step_s=2.0))
    course.kernel.run(60.0 + WINDOW_STEPS)
    assert 0.5 < told_steps_per_s(course, "a") < 1.0
    course.kernel.run(70.0 + 2.0 * (WINDOW_STEPS + 1))
    assert told_steps_per_s(course, "a") == pytest.approx(0.5)
