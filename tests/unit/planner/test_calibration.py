"""Overheads that are fitted to measured runs: those that the measurements were made with, and what a file may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import blocks
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.planner.calibration import (
    ALIKE,
    NO_MESSAGES,
    SPANS_ONLY,
    MeasuredIteration,
    calibration_text,
    fit_overheads,
    interval_of,
    interval_text,
    measured_json,
    read_measured_run,
)
from dips.planner.costs import Costs
from dips.planner.ir import Schedule
from dips.planner.schedules import SCHEDULES
from dips.planner.simulate import Timeline, simulate
from dips.planner.sweep import GridPoint

NS_OF_US = 1000
OF_MS = 80_000_000 / 1e9
"""Of a second of the sweep's unit: a forward pass of 80 ms."""


def pipeline(name: str, n_pp: int = 4, n_mb: int = 8, latency: float = 0.5, bandwidth: float = 0.25) -> Any:
    """A schedule and its costs, with forward passes of 80 ms on a device."""
    schedule, costs = GridPoint(n_pp, n_mb, 2, latency, bandwidth, float(n_mb)).schedule(name)
    stages = tuple(replace(s, **{key: round(getattr(s, key) * OF_MS) for key in TIMES}) for s in costs.stages)
    wires = {
        pair: wire._replace(busy_ns=round(wire.busy_ns * OF_MS), latency_ns=round(wire.latency_ns * OF_MS))
        for pair, wire in costs.wires.items()
    }
    return schedule, Costs(stages, wires)


TIMES = ("f_ns", "d_ns", "w_ns")


def measured(schedule: Schedule, costs: Costs, operation_us: float, send_us: float, n: int = 5) -> list[Timeline]:
    """Iterations with these overheads."""
    overheads = round(operation_us * NS_OF_US), round(send_us * NS_OF_US)
    return [simulate(schedule, costs.with_overheads(*overheads, schedule.device_of_stage))] * n


def of(timeline: Timeline, late_ns: Callable[[int], int] = lambda ns: ns) -> MeasuredIteration:
    return MeasuredIteration(
        late_ns(timeline.makespan_ns), tuple(tuple(late_ns(ns) for ns in row) for row in timeline.ends)
    )


@settings(max_examples=60)
@given(
    st.sampled_from(("1f1b", "gpipe", "zb_h1", "zb_v", "cross_ud/1", "interleaved_1f1b")),
    st.sampled_from((2, 4)),
    st.sampled_from((4, 8, 16)),
    st.sampled_from((0.0, 0.25, 2.0)),
    st.floats(0, 5000),
    st.floats(0, 5000),
)
def test_overheads_are_found_again(
    name: str, n_pp: int, n_mb: int, latency: float, operation_us: float, send_us: float
) -> None:
    schedule, costs = pipeline(name, n_pp, n_mb, latency)
    fit = fit_overheads(schedule, costs, [of(one) for one in measured(schedule, costs, operation_us, send_us)])
    assert not fit.joined
    assert fit.overhead_per_op_s * 1e6 == pytest.approx(operation_us, abs=20)
    assert fit.overhead_per_message_s * 1e6 == pytest.approx(send_us, abs=60)
    assert fit.error < 1e-4


def test_overheads_are_never_negative_and_one_slow_iteration_does_not_count() -> None:
    schedule, costs = pipeline("1f1b")
    shorter = fit_overheads(schedule, costs, [of(simulate(schedule, costs), lambda ns: ns * 9 // 10)])
    assert (shorter.overhead_per_op_s, shorter.overhead_per_message_s) == (0, 0)
    assert shorter.error == pytest.approx(0.1, rel=0.01)
    iterations = [of(one) for one in measured(schedule, costs, 500, 300, n=19)]
    slow = of(simulate(schedule, costs), lambda ns: ns * 2)
    fit = fit_overheads(schedule, costs, [*iterations, slow])
    assert fit.overhead_per_op_s * 1e6 == pytest.approx(500, abs=5)
    assert fit.error < 1e-4


def test_what_cannot_be_told_apart_is_said() -> None:
    schedule, costs = pipeline("1f1b")
    iterations = [of(one) for one in measured(schedule, costs, 500, 300)]
    spans = fit_overheads(schedule, costs, [replace(one, ends_ns=()) for one in iterations])
    assert (spans.joined, spans.overhead_per_message_s) == (SPANS_ONLY, 0)
    assert spans.fitted_s == pytest.approx(spans.measured_s, rel=1e-5)
    assert fit_overheads(schedule, costs, [iterations[0], replace(iterations[1], ends_ns=())]).joined == SPANS_ONLY
    costs_alone = GridPoint(1, 8, 1, 0, 0, 8).costs()
    alone = SCHEDULES["1f1b"].make(1, 8, costs_alone, [1 << 40])
    one = fit_overheads(alone, costs_alone, [of(x) for x in measured(alone, costs_alone, 500, 300)])
    assert one.joined == NO_MESSAGES
    assert one.overhead_per_op_s * 1e6 == pytest.approx(500, abs=1)
    chain, costs_of_chain = pipeline("1f1b", 64, 1)
    assert fit_overheads(chain, costs_of_chain, [of(simulate(chain, costs_of_chain))]).joined == ALIKE


def test_intervals_and_overheads_that_costs_have() -> None:
    schedule, costs = pipeline("zb_v")
    iterations = [of(one) for one in measured(schedule, costs, 500, 300)]
    again = costs.with_overheads(123_000, 45_000, schedule.device_of_stage)
    assert fit_overheads(schedule, again, iterations) == fit_overheads(schedule, costs, iterations)
    assert interval_of(2.0, 0.1) == (1.8, 2.2)
    assert interval_of(2.0, 1.5) == (0.0, 5.0)
    assert interval_of(2.0, None) is None
    assert interval_text(2.0, 0.1) == "1.8 s to 2.2 s"
    assert interval_text(2.0, None) == "uncalibrated"
    assert calibration_text(0.0123).endswith("+- 1.23%")


def file_of(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(
        json.dumps(measured_json("a test", 80.0, measured(schedule, costs, 500, 300, n=2)))
    )
    return plain


def test_what_is_written_and_the_documents_example_are_read() -> None:
    schedule, costs = pipeline("zb_v")
    run = read_measured_run(json.dumps(file_of(schedule, costs)), "measured.json", schedule)
    assert (run.source, run.forward_ms) == ("a test", 80.0)
    assert run.iterations == tuple(of(one) for one in measured(schedule, costs, 500, 300, n=2))
    (text,) = [one.text for one in blocks(ROOT / "docs" / "planner.md") if '"forward_ms": null' in one.text]
    schedule = Schedule.from_csv("\n".join(json.loads(text)["orders"]))
    run = read_measured_run(text, "docs/planner.md", schedule)
    assert [one.span_ns for one in run.iterations] == [62_000_000, 63_000_000]


def test_an_iteration_counts_from_its_first_start_and_may_have_a_span_alone() -> None:
    schedule, costs = pipeline("1f1b", 2, 4)
    found = file_of(schedule, costs)
    for key in ("starts_s", "ends_s"):
        found["iterations"][0][key] = [[s + 100 for s in row] for row in found["iterations"][0][key]]
    found["iterations"][1] = {"span_s": 1.5}
    found["forward_ms"] = None
    run = read_measured_run(json.dumps(found), "measured.json", schedule)
    assert run.iterations[0].span_ns == pytest.approx(measured(schedule, costs, 500, 300)[0].makespan_ns, abs=2)
    assert run.iterations[1] == MeasuredIteration(1_500_000_000)
    assert run.forward_ms is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f.update(format=2), r"format is 2, not 1: make it with dips plan run"),
        (lambda f: f.pop("iterations"), r"no iterations in it: make it with"),
        (lambda f: f.update(iterations=[]), r"iterations are none: make it with"),
        (lambda f: f.update(orders=["0F0"]), r"orders are not those of the plan: name the plan that ran"),
        (lambda f: f.update(source=" "), r"source is empty: say which engine"),
        (lambda f: f.update(forward_ms=-1), r"forward_ms has -1: give numbers of 0 to 1e\+06"),
        (lambda f: f.update(forward_ms=0), r"forward_ms is 0: give a time"),
        (lambda f: f["iterations"][1]["ends_s"][0].__setitem__(0, -1.0), r"iterations 2: ends_s has -1.0: give"),
        (lambda f: f["iterations"][1]["ends_s"][0].__setitem__(0, float("nan")), r"2: ends_s has nan: give numbers of"),
        (lambda f: f["iterations"][0]["ends_s"][0].__setitem__(0, True), r"iterations 1: ends_s has True: give"),
        (lambda f: f["iterations"][0]["ends_s"][1].__setitem__(3, 0.0), r"1: times of device 1 go back: give starts_s"),
        (lambda f: f["iterations"][0]["ends_s"][1].pop(), r"ends_s has \[8, 7\] times, the plan has \[8, 8\]"),
        (lambda f: f["iterations"][0].pop("ends_s"), r"is not the measured.json of a run \(KeyError: 'ends_s'\): make"),
        (lambda f: f.update(iterations=[{"span_s": 0}]), r"iterations 1: span_s is 0: remove the iteration"),
        (lambda f: f.update(iterations=[3]), r"is not the measured.json of a run"),
    ],
)
def test_a_bad_file_is_one_sentence(change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    schedule, costs = pipeline("1f1b", 2, 4)
    found = file_of(schedule, costs)
    change(found)
    with pytest.raises(ConfigError, match=rf"^runs/measured.json.*{sentence}") as raised:
        read_measured_run(json.dumps(found), "runs/measured.json", schedule)
    assert "\n" not in str(raised.value)


def test_what_is_no_json_is_one_sentence() -> None:
    schedule, _ = pipeline("1f1b", 2, 4)
    for text in ("{", "[]", "3", "[" * 100_000):
        with pytest.raises(ConfigError, match=r"^m.json.*make it with dips plan run PLAN --out FOLDER$"):
            read_measured_run(text, "m.json", schedule)
