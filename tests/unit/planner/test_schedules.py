"""Schedules against the numbers that their papers give, and against what every schedule must keep."""

from __future__ import annotations

import pytest
from support.planner_grid import STATIC, WITHOUT_DELAY

from dips.core.errors import ConfigError
from dips.planner.costs import NS, Wire, equal_sites, site_wires, uniform
from dips.planner.ir import Kind, Op, Schedule, straight
from dips.planner.schedules import SCHEDULES
from dips.planner.schedules.fixed import gpipe, one_f_one_b, zb_h1, zb_v
from dips.planner.schedules.greedy import cross_ud
from dips.planner.simulate import peaks, simulate, validate
from dips.planner.sweep import GridPoint

UNIT = 1 << 20


@pytest.mark.parametrize(("t_f", "t_d", "t_w"), [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.5, 0.5)])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_bubbles_closed_forms(devices: int, t_f: float, t_d: float, t_w: float) -> None:
    """Zero Bubble, Table 2: 1F1B (p-1)(T_F + T_D + T_W), ZB-H1 (p-1)(T_F + T_D - T_W)."""
    n = 2 * devices
    work = n * (t_f + t_d + t_w)
    costs = uniform(devices, 1, (t_f, t_d, t_w))
    assert simulate(one_f_one_b(devices, n), costs).makespan_ns / NS == work + (devices - 1) * (t_f + t_d + t_w)
    assert simulate(zb_h1(devices, n), costs).makespan_ns / NS == work + (devices - 1) * (t_f + t_d - t_w)


@pytest.mark.parametrize("name", STATIC)
def test_closed_forms_of_equal_times_without_delay(name: str) -> None:
    make, chunks = STATIC[name]
    for devices, n in ((2, 4), (4, 8), (8, 16)):
        timeline = validate(make(devices, n), uniform(devices * chunks, chunks))
        assert timeline.makespan_ns == WITHOUT_DELAY[name](devices, n) * NS


def test_memory_of_the_static_schedules() -> None:
    """1F1B holds n - d microbatches on device d; ZB-H1 and ZB-V no more than its first device does; GPipe all."""

    def held(schedule: Schedule, chunks: int) -> list[float]:
        return [peak / UNIT for peak in peaks(schedule, uniform(schedule.n_stages, chunks, activation=UNIT))]

    assert held(one_f_one_b(4, 8), 1) == [4, 3, 2, 1]
    assert held(gpipe(4, 8), 1) == [8] * 4
    assert max(held(zb_h1(4, 8), 1)) == 4
    assert held(zb_v(4, 8), 2) == [4] * 4


@pytest.mark.parametrize(
    ("devices", "microbatches", "makespan"),
    [(8, 8, 27.5), (8, 12, 39.5), (4, 4, 13.5), (4, 2, 9.5), (2, 1, 4.5), (16, 8, 39.5)],
)
def test_zb_v_of_few_microbatches(devices: int, microbatches: int, makespan: float) -> None:
    """Its pattern alone takes 30.5 with eight devices and eight microbatches: W comes before what others wait for."""
    case = GridPoint(devices, microbatches, 1, 0, 0, 1)
    schedule, costs = case.schedule("zb_v")
    timeline = validate(schedule, costs, case.limits())
    assert schedule.name == "zb_v"
    assert timeline.makespan_ns == makespan * NS
    between = validate(zb_v(devices, microbatches, w_between=True), costs, case.limits())
    assert between.makespan_ns == makespan * NS < validate(zb_v(devices, microbatches), costs).makespan_ns


def test_zb_v_of_few_microbatches_is_the_shortest_order_that_fits() -> None:
    """The shorter orders hold more on the first devices."""
    costs = uniform(16, 2, activation=UNIT)
    pattern = zb_v(8, 8)
    tight = peaks(pattern, costs)
    assert tight[0] == 4.5 * UNIT
    assert SCHEDULES["zb_v"].make(8, 8, costs, tight) == pattern
    wide = SCHEDULES["zb_v"].make(8, 8, costs, [8 * UNIT] * 8)
    assert peaks(wide, costs)[0] == 6.25 * UNIT
    assert SCHEDULES["zb_v"].make(8, 8, costs, [UNIT] * 8) == wide, "none fits: then what it needs is said of this one"


def test_zb_v_of_many_microbatches_is_its_pattern_whatever_the_delays() -> None:
    for case in (GridPoint(4, 8, 2, 0, 0, 1), GridPoint(4, 8, 2, 2, 2, 2), GridPoint(4, 6, 4, 1, 0.5, 1)):
        assert case.schedule("zb_v")[0] == zb_v(4, case.n_mb)


def test_a_message_occupies_its_link_and_then_takes_its_latency() -> None:
    """Two devices: F of microbatch m leaves at m + 1, and the link is busy for 2 with each."""
    costs = uniform(2, 1, wires={(0, 1): Wire(0, 2 * NS, 5 * NS)})
    timeline = simulate(gpipe(2, 3), costs)
    first = [message for message in timeline.messages if message.op.kind is Kind.F]
    assert [message.start_ns // NS for message in first] == [1, 3, 5]
    assert [message.arrives_ns // NS for message in first] == [8, 10, 12]
    assert [start // NS for start in timeline.starts[1][:3]] == [8, 10, 12]


def test_the_way_round_takes_the_link_in_the_middle() -> None:
    wires = site_wires(equal_sites(4, 2), 1, 0, wraps=True)
    assert wires[3, 0].resource == wires[2, 1].resource
    assert wires[0, 3].resource == wires[1, 2].resource
    assert (0, 1) not in wires
    uneven = site_wires([0, 0, 1], 1, 0, wraps=True)
    assert uneven[2, 0].resource == uneven[2, 1].resource


@pytest.mark.parametrize(("name", "crossings"), [("interleaved_1f1b", 6), ("zb_v", 4), ("1f1b", 2), ("zb_h1", 2)])
def test_crossings_of_each_microbatch_with_two_sites(name: str, crossings: int) -> None:
    make, chunks = STATIC[name]
    costs = GridPoint(4, 8, 2, 0, 1, 1).costs(chunks, wraps=name == "interleaved_1f1b")
    assert len(simulate(make(4, 8), costs).messages) == 8 * crossings


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_without_delay_the_greedy_is_as_good_as_zb_h1(parts: int) -> None:
    case = GridPoint(4, 8, 2, 0, 0, 1)
    schedule = cross_ud(4, 8, case.costs(), case.limits(), parts)
    assert validate(schedule, case.costs(), case.limits()).makespan_ns == 27 * NS


def test_memory_for_less_than_a_microbatch() -> None:
    with pytest.raises(ConfigError, match="stage 0 holds 1048576 for one microbatch, its memory allows 5: make"):
        cross_ud(2, 2, uniform(2, 1), [5, 5])


def test_parts_are_printed() -> None:
    case = GridPoint(2, 2, 2, 0.5, 0, 1)
    schedule = cross_ud(2, 2, case.costs(), case.limits(), 2)
    assert "0F0,0F0.1" in schedule.to_csv()
    assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule


def broken(*orders: str) -> Schedule:
    rows = tuple(tuple(Op.parse(cell) for cell in row.split()) for row in orders)
    return Schedule("broken", straight(len(rows)), 1, rows)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (broken("0F0 0B0 0F0"), r"device 0, cell 3 \(0F0\) is there a second time"),
        (broken("0F0"), "stage 0 has 1 F, 0 I, 0 W and 0 B of microbatch 0: it needs 1 F, and either 1 I and 1 W or"),
        (broken("0F0 0I0"), "stage 0 has 1 F, 1 I, 0 W and 0 B"),
        (broken("0F0 0B0 0W0"), "stage 0 has 1 F, 0 I, 1 W and 1 B"),
        (broken("0F0 0B1"), r"device 0, cell 2 \(0B1\) is outside of 1 stages, 1 microbatches"),
        (broken("0F0 0B0", "0F0 1B0"), r"device 1, cell 1 \(0F0\) belongs to device 0"),
        (broken("0B0 0F0"), "device 0, cell 1: 0B0 comes before 0F0, which it needs"),
        (broken("0F0 0W0 0I0"), "device 0, cell 2: 0W0 comes before 0I0"),
    ],
)
def test_the_validator_names_the_cell(schedule: Schedule, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        validate(schedule, uniform(schedule.n_stages, 1))


def test_the_validator_holds_memory_and_costs_fit() -> None:
    with pytest.raises(ConfigError, match=r"1f1b: device 0 holds 4194304 .* its memory allows 3145728"):
        validate(one_f_one_b(4, 8), uniform(4, 1, activation=UNIT), [3 * UNIT] * 4)
    with pytest.raises(ConfigError, match="costs of 3 stages for a schedule of 4"):
        simulate(one_f_one_b(4, 8), uniform(3, 1))
