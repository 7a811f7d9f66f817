"""The files of a plan open where they are said to: trace.json is Chrome's trace format, plan.csv loads in torch's
pipeline runtime, and timeline.svg and .png are drawings of every kind of schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import image
from matplotlib.colors import to_hex
from support.planner_grid import STATIC
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime, _simulate_comms_compute

from dips.planner.costs import Costs, StageCost, Wire
from dips.planner.exchange import Exchange, Exchanged
from dips.planner.ir import Kind, Schedule, straight
from dips.planner.schedules.fixed import one_f_one_b
from dips.planner.schedules.greedy import jeeves
from dips.planner.schedules.optimal import optimal
from dips.planner.simulate import SimulatedMessage, simulate, simulate_fleet
from dips.planner.sweep import GridPoint
from dips.planner.trace import (
    COLOURS,
    EXCHANGE_COLOUR,
    LINK_COLOUR,
    MOST_LANES,
    OTHER_LINK_COLOUR,
    draw,
    drawing,
    lanes_of,
    trace_events,
)

SHARDING = {_ComputationType.UNSHARD, _ComputationType.RESHARD, _ComputationType.REDUCE_GRAD}
"""What torch adds for stages whose weights are sharded; its player does not know it."""

CASE = GridPoint(4, 8, 2, 0.5, 0.25, 1)


KINDS = [*STATIC, "cross_ud/1", "cross_ud/2", "cross_ud/4", "cross_wave", "compact_zb", "jeeves", "optimal"]
EACH = pytest.mark.parametrize("kind", KINDS)


@cache
def made(kind: str) -> tuple[Schedule, Costs]:
    """A schedule, with what it was made for."""
    costs, limits = CASE.costs(), CASE.limits()
    if kind == "jeeves":
        return jeeves(8, costs, limits)[0], costs
    if kind == "optimal":
        hint = CASE.schedule("cross_ud/1")[0]
        return optimal("optimal", straight(4), 8, costs, limits, hint, time_limit_s=0.5).schedule, costs
    return CASE.schedule(kind)


@EACH
def test_torch_loads_the_order_and_its_messages_find_each_other(kind: str, tmp_path: Path) -> None:
    """torch adds sending and receiving to the order, and plays it: it raises where one would wait for ever."""
    schedule = made(kind)[0].with_parts_as_stages()
    file = tmp_path / "plan.csv"
    file.write_text(schedule.to_csv())
    stage = SimpleNamespace(num_stages=schedule.n_stages, group_size=4, group_rank=0)
    runtime = _PipelineScheduleRuntime([stage], schedule.n_microbatches)
    runtime._load_csv(str(file), format="compute_only")
    read = [[str(action) for action in runtime.pipeline_order[device]] for device in range(4)]
    assert read == [[str(op) for op in order] for order in schedule.orders]
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.device_of_stage))
    sent = {
        device: [action for action in order if action.computation_type not in SHARDING]
        for device, order in runtime.pipeline_order_with_comms.items()
    }
    _simulate_comms_compute(sent, lambda stage: schedule.device_of_stage[stage], schedule.n_stages)
    crossing = sum(a != b for a, b in itertools.pairwise(schedule.device_of_stage))
    words = [str(action) for order in sent.values() for action in order]
    assert sum("SEND" in word for word in words) == sum("RECV" in word for word in words) == 2 * 8 * crossing


def two_stages() -> Costs:
    """F of 10 us, messages of 2 us that arrive 3 us later, B of 10 us; gradients take 4.5 us, of stage 1 one."""
    wires = {(0, 1): Wire(1, 2000, 3000), (1, 0): Wire(2, 2000, 3000)}
    exchanges = (Exchange(7, 0, 4000, 0, 500), Exchange(8, 0, 1000))
    return Costs((StageCost(10_000, 6000, 4000, 1, 1),) * 2, wires, exchanges)


def test_a_trace_by_hand() -> None:
    """Two devices and one microbatch: F, a message, F and B, back, B; then gradients. Times are in microseconds."""
    timeline = simulate(one_f_one_b(2, 1), two_stages())

    def span(name: str, cat: str, pid: int, tid: int, ts: float, dur: float, **args: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}

    events = trace_events(timeline, ["a", "b"])["traceEvents"]
    assert [one for one in events if one["ph"] == "X"] == [
        span("F0 s0", "F", 0, 0, 0, 10, stage=0, microbatch=0),
        span("B0 s0", "B", 0, 0, 40, 10, stage=0, microbatch=0),
        span("F0 s1", "F", 1, 0, 15, 10, stage=1, microbatch=0),
        span("B0 s1", "B", 1, 0, 25, 10, stage=1, microbatch=0),
        span("F0 s0", "message", 2, 0, 10, 2, waited_us=0, arrives_us=15),
        span("B0 s1", "message", 2, 1, 35, 2, waited_us=0, arrives_us=40),
        span("gradients s1", "exchange", 2, 3, 35, 1, arrives_us=36),
        span("gradients s0", "exchange", 2, 2, 50, 4, arrives_us=54.5),
    ]
    assert [(one["name"], one["pid"], one.get("tid"), one["args"]["name"]) for one in events if one["ph"] == "M"] == [
        ("process_name", 0, None, "a"),
        ("process_name", 1, None, "b"),
        ("process_name", 2, None, "links"),
        ("thread_name", 2, 0, "0 to 1"),
        ("thread_name", 2, 1, "1 to 0"),
        ("thread_name", 2, 2, "between replicas 0"),
        ("thread_name", 2, 3, "between replicas 1"),
    ]
    late = trace_events(simulate_fleet([one_f_one_b(2, 1)] * 2, two_stages()).timelines[1])["traceEvents"]
    assert [one["args"]["waited_us"] for one in late if one.get("cat") == "message"] == [2, 0]


def test_drawings_open_whatever_sites_are_called(tmp_path: Path) -> None:
    """A name with dollar signs is no formula."""
    files = [tmp_path / "timeline.svg", tmp_path / "timeline.png"]
    names = ["$x_$ 0", "[red]b[/] 1", "<c> & 2", "d^$ 3"]
    draw([simulate(*made("cross_ud/1"))], files, "a $model_$: 3 s", names)
    assert ElementTree.parse(files[0]).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    height, width, _ = image.imread(files[1]).shape
    assert width > 1000
    assert height > 200


@pytest.mark.parametrize("begin_ns", [0, 1_000_000])
def test_a_drawing_by_hand(begin_ns: int) -> None:
    """Four replicas take turns on both links, 2 us later each; a row of a device has a lane for each of them."""
    later = [
        replace(
            one,
            starts=tuple(tuple(at + begin_ns for at in row) for row in one.starts),
            ends=tuple(tuple(at + begin_ns for at in row) for row in one.ends),
            messages=tuple(SimulatedMessage(*m[:3], *(at + begin_ns for at in m[3:])) for m in one.messages),
            exchanges=tuple(Exchanged(*each[:3], *(at + begin_ns for at in each[3:])) for each in one.exchanges),
        )
        for one in simulate_fleet([one_f_one_b(2, 1)] * 4, two_stages()).timelines
    ]
    figure: Any = drawing(later, "title", ["a", "b"], {(0, 1): "there", (5, 6): "unused"}, "note")
    (axes,) = figure.axes
    bars = sorted(
        (round(box.x0 * 1e6, 3), round(box.x1 * 1e6, 3), round((box.y0 + box.y1) / 2, 3), round(box.height, 3),
         to_hex(each.get_facecolor()[0]).upper(), float(each.get_linewidth()[0]))
        for each in axes.collections
        for box in (path.get_extents() for path in each.get_paths())
    )  # fmt: skip
    high, lane = 4 * 0.35, 0.84 * 4 * 0.35 / 4
    wanted = [
        (first, last, 2 * high + row, 0.6, EXCHANGE_COLOUR, 0.4)
        for first, last, row in ((56.0, 60.0, 2.5), (41.0, 42.0, 3.5))
    ]
    for n in range(4):
        first, second = (high * (device + 0.5) + (n - 1.5) * lane for device in range(2))
        tall, colour = 0.92 * lane, OTHER_LINK_COLOUR if n else LINK_COLOUR
        wanted += [
            (0.0, 10.0, first, tall, COLOURS[Kind.F], 0.4),
            *(
                (start + 2.0 * n, end + 2.0 * n, middle, wide, of, 0.4)
                for start, end, middle, wide, of in (
                    (40, 50, first, tall, COLOURS[Kind.B]),
                    (15, 25, second, tall, COLOURS[Kind.F]),
                    (25, 35, second, tall, COLOURS[Kind.B]),
                    (10, 12, 2 * high + 0.5, 0.6, colour),
                    (35, 37, 2 * high + 1.5, 0.6, colour),
                )
            ),
        ]
    assert [row[4:] for row in bars] == [row[4:] for row in sorted(wanted)]
    assert [row[:4] for row in bars] == [pytest.approx(row[:4], abs=1e-3) for row in sorted(wanted)]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "a",
        "b",
        "there",
        "link 1 to 0",
        "replicas of a",
        "replicas of b",
    ]
    assert axes.get_yticks() == pytest.approx([high / 2, high * 3 / 2, *(2 * high + row + 0.5 for row in range(4))])
    assert axes.get_xlim() == pytest.approx((0, 60.5e-6))
    assert (axes.get_title(), axes.get_ylabel()) == ("title", "note")
    assert axes.yaxis.label.get_position()[1] == pytest.approx((high + 4) / (2 * high + 4))
    assert figure.get_figheight() == pytest.approx(1.4 + 0.34 * (2 * high + 4))
    said = [to_hex(patch.get_facecolor()).upper() for patch in figure.legends[0].get_patches()]
    assert said == [COLOURS[Kind.F], COLOURS[Kind.B], LINK_COLOUR, OTHER_LINK_COLOUR, EXCHANGE_COLOUR]
    alone = simulate_fleet([one_f_one_b(2, 1)] * 4, replace(two_stages(), exchanges=())).timelines
    assert drawing(alone, "", [], {}, "").axes[0].get_xlim() == pytest.approx((0, 56e-6))
    assert axes.get_ylim() == pytest.approx((2 * high + 4.1, -0.1))
    assert {(round(text.get_position()[0] * 1e6), text.get_text()) for text in axes.texts} == {
        (middle + 2 * n * moved, "0") for n in range(4) for middle, moved in ((5, 0), (20, 1), (30, 1), (45, 1))
    }  # fmt: skip


def test_bars_that_are_too_narrow_have_no_edge_and_no_number_and_messages_are_seen() -> None:
    """Of 8,054.5 us, most for gradients: 10 us are less than a digit, and a message is drawn as a part of 2000."""
    exchanges = (Exchange(7, 0, 8_004_000, 0, 500), Exchange(8, 0, 0))
    timeline = simulate(one_f_one_b(2, 1), replace(two_stages(), exchanges=exchanges))
    axes: Any = drawing([timeline], "title", [], {}, "").axes[0]
    widths = {
        (round(path.get_extents().width * 1e9), float(each.get_linewidth()[0]))
        for each in axes.collections
        for path in each.get_paths()
    }
    assert widths == {(10_000, 0.0), (4_027, 0.0), (8_004_000, 0.4)}
    assert list(axes.texts) == []
    assert [text.get_text() for text in axes.get_yticklabels()][::4] == ["device 0", "replicas of device 0"]


def test_of_many_replicas_the_first_and_the_last_to_end_are_drawn() -> None:
    schedule, costs = made("1f1b")
    timelines = simulate_fleet([schedule] * 12, costs).timelines
    lanes = lanes_of(timelines)
    ends = [max(row[-1] for row in one.ends) for one in timelines]
    assert lanes[:-1] == list(range(MOST_LANES - 1))
    assert ends[lanes[-1]] == max(ends)
