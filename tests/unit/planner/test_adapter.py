"""The adapter: bandwidth traces, pieces of microbatches, the state machine, and iterations with and without it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.core.errors import ConfigError
from dips.planner.adapter.advise import advice_json, advise, draw, read_before, rules_of, traced, traced_json
from dips.planner.adapter.decide import WINDOW, AdapterState, Border, Rules, compare, with_adapter, without_adapter
from dips.planner.adapter.pieces import LinkMessage, Piece, Pipeline, Played, Sizes, play
from dips.planner.adapter.traces import WHOLE, Channel, channels_of, read_trace
from dips.planner.cluster import Profile, read_setup
from dips.planner.costs import NS, Costs, StageCost, Wire, uniform
from dips.planner.exchange import Exchange
from dips.planner.ir import Kind, Schedule, straight
from dips.planner.plan import make_plan, plan_json
from dips.planner.problem import Problem
from dips.planner.profile import LayerTime
from dips.planner.replan import MeasuredFile, Running, read_measured, read_running
from dips.planner.schedules import SCHEDULES
from dips.planner.simulate import simulate
from dips.planner.sweep import GridPoint
from dips.planner.validation.spantrain import setting

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "cross_ud/1", "cross_wave", "compact_zb")


# ---- links over time ----


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(0, 200),
    st.integers(0, 99),
)
def test_integration_agrees_with_counting_nanoseconds(steps: list[tuple[int, int]], start: int, work: int) -> None:
    times = (0, *itertools.accumulate(length for length, _ in steps))
    rates = (*(rate for _, rate in steps), 1)
    channel, left, now = Channel(times, tuple(rate * WHOLE for rate in rates)), work, start
    while left > 0:
        left -= channel.rate_at(now) // WHOLE
        now += 1
    assert channel.end_ns(start, work * WHOLE) == now


HEAD = '[trace]\nsource = "a test"\nduration_s = 9\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD, r"there is no table \[\[links\]\]"),
        ("[[links]]\ntime_s = [0]\npart_of_plan = [1]\n", r"the table \[trace\] is missing: add it"),
        (HEAD + "[[links]]\ntime_s = []\npart_of_plan = []\n", r"\[\[links\]\] 1: time_s is empty: give at least"),
        (HEAD + "[[links]]\ntime_s = [0, 5]\npart_of_plan = [1]\n", "part_of_plan has 1 values for 2 of time_s: give"),
        (HEAD + "[[links]]\ntime_s = [1]\npart_of_plan = [1]\n", "time_s begins at 1: let the first step begin at 0"),
        (HEAD + "[[links]]\ntime_s = [0, 5, 4]\npart_of_plan = [1, 1, 1]\n", "time_s has 4 after 5: give steps in the"),
        (HEAD + "[[links]]\ntime_s = [0, nan]\npart_of_plan = [1, 1]\n", "time_s"),
        (HEAD + "[[links]]\ntime_s = [0]\nbandwidth_gbps = [-2]\n", "bandwidth_gbps has -2: give rates of at least 0"),
        (HEAD + "[[links]]\ntime_s = [0]\nbandwidth_gbps = [nan]\n", "bandwidth_gbps"),
        (HEAD + "[[links]]\ntime_s = [0]\npart_of_plan = [0]\n", "part_of_plan ends with 0, so that messages never"),
        (HEAD + "[[links]]\ntime_s = [0]\n", "give either bandwidth_gbps or part_of_plan"),
        (HEAD + '[[links]]\nsender = "a"\ntime_s = [0]\npart_of_plan = [1]\n', "sender or receiver is missing: give"),
    ],
)
def test_a_trace_that_cannot_be(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "trace.toml"
    file.write_text(text)
    with pytest.raises(Exception, match=sentence) as caught:
        read_trace(file)
    assert str(file) in str(caught.value)


def test_a_trace_of_a_link_that_the_plan_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "trace.toml"
    rules = rules_of(running(), running().problem)
    links = {border.link: running().problem.setup.link(*border.link) for border in rules.borders}
    table = '[[links]]\nsender = "{}"\nreceiver = "{}"\ntime_s = [0]\nbandwidth_gbps = [0.671]\n'
    file.write_text(HEAD + table.format("group-1", "group-3"))
    with pytest.raises(
        ConfigError, match="1: the plan sends nothing from group-1 to group-3: choose from group-1 to gr"
    ):
        channels_of(read_trace(file), links)
    file.write_text(HEAD + 2 * table.format("group-1", "group-2"))
    with pytest.raises(ConfigError, match=r"\[\[links\]\] 2: from group-1 to group-2 was given before: remove one"):
        channels_of(read_trace(file), links)
    file.write_text(HEAD + table.format("group-1", "group-2") + "[[links]]\ntime_s = [0]\npart_of_plan = [0.25]\n")
    found = channels_of(read_trace(file), links)
    assert found["group-1", "group-2"].rates == (WHOLE // 2,), "a named link goes before every link"
    assert found["group-3", "group-2"].rates == (WHOLE // 4,)


# ---- pieces ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sites", [1, 2, 4])
def test_whole_microbatches_take_what_simulate_says(name: str, sites: int) -> None:
    """To the nanosecond: every order, with overheads, links that are shared by several senders included."""
    for latency, busy, microbatches in itertools.product((0, 0.5, 3), (0, 0.25, 2), (4, 8)):
        case = GridPoint(4, microbatches, sites, latency, busy, 1.5)
        schedule, bare = case.schedule(name)
        held = {pair: wire._replace(hold_ns=round(latency * NS / 2)) for pair, wire in bare.wires.items()}
        blocking = replace(bare, wires=held) if microbatches == 4 else bare
        costs = blocking.with_overheads(7_000_001, 3_000_000, schedule.device_of_stage)
        pipeline = Pipeline(schedule, costs, 32)
        channels = {wire.resource: Channel() for wire in costs.wires.values()}
        wanted = simulate(schedule, costs).makespan_ns
        assert play(pipeline, pipeline.whole).span_ns == wanted
        assert play(pipeline, pipeline.whole, channels, begin_ns=12345).span_ns == wanted


def test_the_compact_order_by_readiness_takes_what_its_schedule_takes() -> None:
    for latency, busy, memory in itertools.product((0, 0.5, 3), (0, 0.25, 2), (0.5, 1, 1.5)):
        case = GridPoint(4, 8, 4, latency, busy, memory)
        schedule, costs = case.schedule("compact_zb")
        pipeline = Pipeline(schedule, costs, 32, limits=tuple(case.limits()))
        assert play(pipeline, pipeline.whole).span_ns == simulate(schedule, costs).makespan_ns


@pytest.mark.parametrize("overlapped", [True, False])
def test_exchanges_of_replicas_count(overlapped: bool) -> None:
    exchanges = (Exchange(0, NS, NS), Exchange(1, 50 * NS, NS, buckets=3))
    late = replace(uniform(2, 1), exchanges=exchanges, overlapped=overlapped)
    pipeline = Pipeline(SCHEDULES["1f1b"].make(2, 2, late, []), late, 1)
    assert play(pipeline, pipeline.whole, begin_ns=99).span_ns == simulate(pipeline.schedule, late).makespan_ns


def test_a_short_first_piece_needs_its_weights_sooner_than_a_whole_microbatch() -> None:
    """Two buckets of weights, half of which are needed in the middle of the first piece; stage 1 gets other sizes."""
    exchanges = tuple(Exchange(stage, ns, 0, buckets=2) for stage, ns in enumerate((800, 9000)))
    costs = Costs((StageCost(800, 800, 0, 1, 1),) * 2, {(0, 1): Wire(0, 0, 30)}, exchanges)
    pipeline, done = Pipeline(SCHEDULES["1f1b"].make(2, 1, costs, []), costs, 8), list[Piece]()
    play(pipeline, (Sizes(1, 8, 8), Sizes(8, 8, 8)), watch=lambda message: [Sizes(2, 8, 8)] * 2, pieces=done)
    assert [next(p.start_ns for p in done if p.stage == stage) for stage in (0, 1)] == [800 - 50, 9000 - 100]


def test_a_piece_costs_its_overhead_and_its_part_of_the_time() -> None:
    """Two stages, one microbatch of 4: F in halves, the message of the first half while the second is computed."""
    costs = Costs((StageCost(400, 400, 0, 1, 1),) * 2, {(0, 1): Wire(0, 200, 30), (1, 0): Wire(1, 200, 30)})
    costs = costs.with_overheads(10, 0, straight(2))
    pipeline = Pipeline(SCHEDULES["1f1b"].make(2, 1, costs, []), costs, 4)
    done: list[Piece] = []
    play(pipeline, (Sizes(2, 2, 2), Sizes(4, 4, 4)), pieces=done)
    assert [(str(p.kind), p.stage, p.sequences, p.start_ns, p.end_ns) for p in done] == [
        ("F", 0, 2, 0, 210),
        ("F", 0, 2, 210, 420),
        ("F", 1, 4, 550, 960),  # aggregated: the second half arrives at 420 + 100 + 30
        ("B", 1, 4, 960, 1370),
        ("B", 0, 2, 1600, 1810),  # split again
        ("B", 0, 2, 1810, 2020),
    ]


def test_sizes_are_for_filling_running_and_draining() -> None:
    """One device and two microbatches of 4: F in halves until the first B has begun, whole ones while an F is left,
    single sequences afterwards; 10 for each operation."""
    costs = Costs((StageCost(40, 60, 20, 1, 1),)).with_overheads(10, 0, straight(1))
    pipeline, done = Pipeline(SCHEDULES["1f1b"].make(1, 2, costs, []), costs, 4), list[Piece]()
    played = play(pipeline, (Sizes(2, 4, 1),), begin_ns=1000, pieces=done)
    assert [(str(p.kind), p.microbatch, p.first, p.sequences, p.start_ns - 1000, p.end_ns - 1000) for p in done] == [
        ("F", 0, 0, 2, 0, 30),
        ("F", 0, 2, 2, 30, 60),
        ("B", 0, 0, 4, 60, 150),
        ("F", 1, 0, 4, 150, 200),
        *(("B", 1, n, 1, 200 + 30 * n, 230 + 30 * n) for n in range(4)),
    ]
    assert played == Played(1000, 1320, (320,), 8, (0,))


def test_smaller_sizes_count_at_once_on_every_device() -> None:
    """Three stages of 150, 100 and 100 a sequence; stage 2 waits for all four. While stage 1 gets its second half, at
    630, stage 2 may take halves, and takes the one that is there."""
    costs = Costs(
        (StageCost(600, 600, 0, 1, 1), *(StageCost(400, 400, 0, 1, 1),) * 2),
        {pair: Wire(number, 0, ns) for number, (pair, ns) in enumerate({(0, 1): 30, (1, 2): 10}.items())},
    )
    pipeline, done = Pipeline(SCHEDULES["1f1b"].make(3, 1, costs, []), costs, 4), list[Piece]()

    def watch(message: LinkMessage) -> list[Sizes] | None:
        assert message == (message.sender, message.sender + 1, 2, *(message.arrives_ns - (30, 10)[message.sender],) * 2,
                           message.arrives_ns)  # fmt: skip
        return [Sizes(2, 2, 2)] * 3 if message.arrives_ns == 630 else None

    play(pipeline, (Sizes(2, 2, 2), Sizes(2, 2, 2), Sizes(4, 4, 4)), watch=watch, pieces=done)
    forth = [(p.stage, p.first, p.start_ns, p.end_ns) for p in done if p.kind is Kind.F]
    first = [(0, 0, 0, 300), (0, 2, 300, 600), (1, 0, 330, 530)]
    assert forth == [*first, (1, 2, 630, 830), (2, 0, 630, 830), (2, 2, 840, 1040)]


def test_devices_that_wait_for_each_other_are_named() -> None:
    costs, orders = Costs((StageCost(4, 4, 0, 1, 1),) * 2), "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
    pipeline = Pipeline(Schedule.from_csv(orders), costs, 4)
    with pytest.raises(ConfigError, match="cannot end: stage 0 waits for a piece that no stage can send"):
        play(pipeline, pipeline.whole)


def test_what_cannot_be_cut() -> None:
    case = GridPoint(4, 8, 2, 0.5, 0.5, 1)
    schedule, costs = case.schedule("cross_ud/2")
    with pytest.raises(
        ConfigError, match="cuts its blocks into 2 parts, so pieces of microbatches have no place in it"
    ):
        Pipeline(schedule, costs, 4)
    schedule, costs = case.schedule("zb_v")
    with pytest.raises(ConfigError, match="one stage on each device"):
        Pipeline(schedule, costs, 4, limits=(1,) * 4)


# ---- state machine ----


def rules(nominal: float = 0.7, operation_ms: float = 1.0) -> Rules:
    return setting("1f1b", nominal, operation_ms).rules()


def messages(of: Rules, state: AdapterState, rate: float, count: int, border: int = 0) -> AdapterState:
    one = of.borders[border]
    took = round(one.busy_ns / rate)
    for _ in range(count):
        state = of.observe(state, LinkMessage(one.sender, one.receiver, 32, 0, took, took))
    return state


def test_thresholds_and_levels() -> None:
    """T_F 100 ms, 1 ms an operation, 5 ms latency, 70 ms for a message at 1 Gbit/s."""
    border = rules().borders[0]
    assert (border.hide_ns, border.piece_ns) == (101_000_000, 1_000_000)
    assert border.late_below_gbps == pytest.approx(70 / (102 - 5))
    assert border.on_time_from_gbps == pytest.approx(70 / (101 - 5))
    backward = next(one for one in rules().borders if one.receiver < one.sender)
    assert backward.hide_ns == 201_000_000, "1F1B computes both gradients in one operation"
    far = replace(border, latency_ns=300_000_000)
    assert far.late_below_gbps == float("inf")
    assert far.level(10**6 * WHOLE, 0) > 0
    border = Border(0, 1, 0, ("a", "b"), 1.0, 100, 0, 100, 10)
    rate = {n: WHOLE / n for n in (1, 1.05, 1.09, 1.11, 1.99, 2.01, 4.5)}
    assert [border.level(rate[n], 0) for n in rate] == [0, 0, 0, 1, 1, 2, 3]
    assert [border.level(rate[n], 1) for n in rate] == [0, 1, 1, 1, 1, 2, 3], "between the thresholds it stays late"


def test_sizes_shrink_after_one_late_message_and_grow_after_a_window() -> None:
    of = rules()
    state = messages(of, of.start, 1.0, 100)
    assert state.sizes == of.pipeline.whole
    late = messages(of, state, 0.5, 1)
    assert late.levels[0] == 1
    assert late.changes == 1
    assert min(one.fill for one in late.sizes) < 32
    assert state.sizes == of.pipeline.whole, "a state never changes"
    almost = messages(of, late, 1.0, WINDOW - 1)
    assert almost.sizes == late.sizes
    assert messages(of, almost, 1.0, 1).sizes == of.pipeline.whole
    mixed = messages(of, messages(of, almost, 0.5, 1), 1.0, WINDOW - 1)
    assert mixed.levels[0] == 1, "the window with a late message ended, and the next one has not"
    assert messages(of, mixed, 1.0, WINDOW).sizes == of.pipeline.whole


def test_rates_that_were_measured_before_choose_the_sizes_and_count_as_a_change_where_these_are_others() -> None:
    of = rules()
    links = {border.link for border in of.borders}
    fast = of.measured(of.start, dict.fromkeys(links, WHOLE))
    slow = of.measured(fast, dict.fromkeys(links, WHOLE // 2))
    assert (fast.sizes, fast.changes, any(fast.levels)) == (of.pipeline.whole, 0, False)
    assert (slow.sizes != fast.sizes, slow.changes, any(slow.levels)) == (True, 1, True)
    assert of.measured(slow, {}) == slow, "what is not measured stays"


def test_where_nothing_changes() -> None:
    of = rules()
    border = of.borders[0]
    between = border.busy_ns / (border.hide_ns + border.piece_ns // 2 - border.latency_ns)
    assert messages(of, of.start, between, 100).levels[0] == 0
    late = messages(of, of.start, 0.5, 1)
    assert messages(of, late, between, 100).levels[0] == 1
    of = rules(operation_ms=500.0)
    state = messages(of, of.start, 0.05, 3)
    assert state.levels[0] > 0
    assert state.sizes == of.pipeline.whole


def test_a_delay_that_has_lasted_counts_alone() -> None:
    """At first the planned bandwidth counts too: pieces that only pay while the delay lasts come after a window."""
    of = setting("compact_zb", 1.5, 25.0).rules()
    first = of.choose((WHOLE // 5,) * 6, (3,) * 6, lasts=False)
    lasting = of.choose((WHOLE // 5,) * 6, (3,) * 6, lasts=True)
    now, planned = (WHOLE // 5,) * 6, (WHOLE,) * 6
    assert of.forecast(lasting, now).span_ns < of.forecast(first, now).span_ns
    assert of.forecast(first, planned).span_ns < of.forecast(lasting, planned).span_ns
    state = messages(of, of.start, 0.2, 1)
    assert not state.lasts[0]
    assert messages(of, state, 0.2, WINDOW).lasts[0]


def test_sizes_divide_and_a_trace_may_be_too_long() -> None:
    pipeline = rules().pipeline
    assert Rules(pipeline, ()).smaller == (16, 8, 4)
    assert Rules(replace(pipeline, sequences=6), ()).smaller == (3, 2, 1)
    assert Rules(replace(pipeline, sequences=1), ()).smaller == ()
    profiled = ((8, pipeline.costs.stages),)
    assert Rules(replace(pipeline, profiled=profiled), ()).smaller == (16, 8)
    of = rules()
    with pytest.raises(ConfigError, match=r"more than 6250 iterations start within 1e\+06 s: give the trace a shorter"):
        without_adapter(of.pipeline, {}, 10**6 * NS)
    assert compare(of, {}, 1).speedup < 1


# ---- with and without ----


def test_the_stated_cost_is_what_devices_compute_longer() -> None:
    found = setting("1f1b", 0.7).under(0.4, 8)
    longer = [a - b for a, b in zip(found.adapted.busy_ns, found.without.busy_ns, strict=True)]
    extra = found.adapted.operations - found.without.operations
    assert sum(longer) == extra * 1_000_000, "1 ms for each operation that is there more"
    assert found.cost_ns == found.monitored_ns + max(longer)


def test_iterations_without_are_those_of_play() -> None:
    """Iterations that are alike are played once; the result is that of playing each."""
    of = rules()
    channels = {border.resource: Channel((0, 20 * NS, 31 * NS), (WHOLE, WHOLE // 3, WHOLE)) for border in of.borders}
    found, end_ns = without_adapter(of.pipeline, channels, 60 * NS), 0
    for ends_ns in found.ends_ns:
        end_ns = play(of.pipeline, of.pipeline.whole, channels, end_ns).end_ns
        assert ends_ns == end_ns
    never = Rules(of.pipeline, ())
    assert with_adapter(never, channels, len(found.ends_ns))[0].ends_ns == found.ends_ns


# ---- plans ----


def running(name: str = "spantrain-adapter", **options: object) -> Running:
    problem = Problem(read_setup(name)).with_options(**options)
    return read_running(json.dumps(plan_json(make_plan(problem, sensitivity=False))), "plan.json")


def measured(folder: Path, gbps: float) -> MeasuredFile:
    file = folder / "measured.toml"
    file.write_text(
        '[measured]\nsource = "a test"\n'
        + "".join(
            f'[[links]]\nsender = "group-{n}"\nreceiver = "group-{n + 1}"\nbandwidth_gbps = {gbps}\nlatency_ms = 5\n'
            for n in (1, 2, 3)
        )
    )
    return read_measured(file)


def test_advice_follows_the_measured_links(tmp_path: Path) -> None:
    one = running()
    fast = advise(one, measured(tmp_path, 2.0))
    assert not fast.advised
    assert fast.why.startswith("no message is late: a message from stage 0 to 1 takes 0.85 of the compute that hides")
    slow = advise(one, measured(tmp_path, 0.5))
    assert slow.advised
    assert slow.with_ns < slow.without_ns
    assert "smaller pieces save" in slow.why
    late = advise(one, measured(tmp_path, 1.3))
    assert late.advised
    between = advise(one, measured(tmp_path, 1.5), late.state)
    assert not between.advised, "on time by the first threshold, and not by the second one"
    assert not advise(one, measured(tmp_path, 1.5)).state.levels[0]
    assert advise(one, measured(tmp_path, 2.0), slow.state).state.sizes == slow.rules.pipeline.whole


def test_a_border_of_an_answer_by_hand(tmp_path: Path) -> None:
    """25.17 MB at 0.5 Gbit/s take 402.7 ms, and 5 ms on their way; 100 ms of compute and 25 ms overhead hide a part.
    Late: later than one piece more, on time: within the compute alone."""
    slow = advise(running(), measured(tmp_path, 0.5))
    found, bits = advice_json(slow), 32 * 512 * 768 * 2 * 8
    assert found["borders"][0] == {
        "sender_stage": 0, "receiver_stage": 1, "sender": "group-1", "receiver": "group-2", "measured_gbps": 0.5,
        "late_below_gbps": pytest.approx(bits / 0.145 / 1e9), "on_time_from_gbps": pytest.approx(bits / 0.12 / 1e9),
        "compute_s": 0.125, "level": 2, "transfer_s": pytest.approx(bits / 0.5e9 + 0.005),
    }  # fmt: skip
    assert found["stages"][0] == {"stage": 0, "site": "group-1", **slow.state.sizes[0]._asdict()}
    assert (found["iteration_s"], found["without_s"]) == (slow.with_ns / NS, slow.without_ns / NS)
    before = read_before(json.dumps(found), "answer.json")
    assert (before.sizes, before.levels, set(before.lasts)) == (slow.state.sizes, slow.state.levels, {True})
    found["stages"][0] |= {"fill": 1, "run": 2, "drain": 4}
    found["borders"][1]["level"] = 0
    before = read_before(json.dumps(found), "answer.json")
    assert (before.sizes[0], before.lasts[:3]) == (Sizes(1, 2, 4), (True, False, True))


def test_plans_that_cannot_be_adapted(tmp_path: Path) -> None:
    one = running()
    with pytest.raises(ConfigError, match="replicas take turns on a link, which the adapter does not play: make the"):
        rules_of(replace(one, sharing="coordinated"), one.problem)
    with pytest.raises(ConfigError, match="has a whole pipeline at each site, so no microbatch crosses a link"):
        rules_of(replace(one, groups=4), one.problem)
    with pytest.raises(ConfigError, match="answer is not an answer of dips plan adapt"):
        read_before("{}", "answer")
    other = AdapterState((Sizes(1, 1, 1),), (), (), (), ())
    with pytest.raises(ConfigError, match="--before is an answer for another plan: give one for this plan"):
        advise(one, measured(tmp_path, 1.0), other)
    alone = replace(one, problem=one.problem.with_training(microbatch_sequences=1))
    advice = advise(alone, measured(tmp_path, 0.01))
    assert not advice.advised
    assert advice.why.endswith("a microbatch of one sequence cannot be split")


def test_a_plan_under_a_trace_and_what_is_drawn_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 s on one link has a third of the plan's bandwidth, the others a half. An iteration is 256 sequences."""
    trace, half = tmp_path / "trace.toml", "[[links]]\ntime_s = [0, 2, 99]\npart_of_plan = [1, 0.5, 1]\n"
    one = running()
    links = {(link.sender, link.receiver): link for link in one.problem.setup.links}
    planned = links["group-2", "group-3"].bandwidth_gbps
    rates = f"bandwidth_gbps = [{planned}, {planned / 3}]\n"
    named = f'[[links]]\nsender = "group-2"\nreceiver = "group-3"\nboth_ways = false\ntime_s = [0, 2]\n{rates}'
    trace.write_text(HEAD + half + named)
    rules, found = traced(one, read_trace(trace))
    slow = next(border.resource for border in rules.borders if border.link == ("group-2", "group-3"))
    halved = Channel((0, 2 * NS, 99 * NS), (WHOLE, WHOLE // 2, WHOLE))
    channels = {border.resource: halved for border in rules.borders}
    channels[slow] = Channel((0, 2 * NS), (WHOLE, round(WHOLE / 3)))
    assert (found.late, found) == (True, compare(rules, channels, 9 * NS))
    told = traced_json(found)
    for row, of in ((told["without"], found.without), (told["with"], found.adapted)):
        assert [(each["ends_s"] * NS, each["sizes"]) for each in row] == [
            (pytest.approx(end), [list(size) for size in sizes])
            for end, sizes in zip(of.ends_ns, of.sizes, strict=True)
        ]
    assert told["speedup"] == pytest.approx(told["without_s"] / told["with_s"])
    assert (told["stated_cost_s"], told["monitored_s"]) == (found.cost_ns / NS, found.monitored_ns / NS)
    assert (told["iterations"], told["changes"]) == (len(found.without.ends_ns), found.adapted.changes)
    drawn: list[Any] = []
    monkeypatch.setattr("dips.planner.adapter.advise.save", lambda figure, files: drawn.append(figure))
    draw(one, read_trace(trace), found, [])
    upper, lower = drawn[0].axes
    speeds = []
    for patch, of in zip(upper.patches, (found.adapted, found.without), strict=True):
        ends_s = [end / NS for end in (0, *of.ends_ns)]
        speeds.append([256 / (end - begin) for begin, end in itertools.pairwise(ends_s)])
        assert list(patch.get_data().edges) == ends_s
        assert list(patch.get_data().values) == pytest.approx(speeds[-1])
    assert upper.get_ylim() == pytest.approx((0, 1.08 * max(max(row) for row in speeds)))
    steps = [(patch.get_label(), *map(list, patch.get_data()[:2])) for patch in lower.patches]
    assert sorted(steps) == [
        ("5 links", pytest.approx([planned, planned / 2]), [0, 2, 9]),
        ("group-2 to group-3", pytest.approx([planned, planned / 3]), [0, 2, 9]),
    ]
    assert lower.get_ylim() == pytest.approx((0, 1.08 * planned))


def test_measured_times_of_stages_count(tmp_path: Path) -> None:
    """Stages twice as slow as planned hide messages that would be late."""
    one, file = running(), measured(tmp_path, 1.0)
    assert advise(one, file).advised
    row = "[[stages]]\nstage = {}\nforward_ms = 200\ninput_gradient_ms = 200\nweight_gradient_ms = 200\n"
    path = tmp_path / "stages.toml"
    path.write_text(Path(file.file).read_text() + "".join(row.format(stage) for stage in range(4)))
    advice = advise(one, read_measured(path))
    assert not advice.advised
    assert {border.hide_ns for border in advice.rules.borders} == {225_000_000}


def test_layers_profiled_with_several_sizes_give_the_times_of_pieces() -> None:
    """32, 16 and 8 sequences were measured, so 4 are no candidate, and a piece of 8 takes the time of 8."""
    one = running()
    layers = tuple(
        LayerTime(count=12, microbatch_sequences=n, forward_ms=ms, input_gradient_ms=ms, weight_gradient_ms=ms)
        for n, ms in ((8, 20.0), (16, 24.0), (32, 40.0))
    )
    setup = one.problem.setup
    profile = Profile(layers=layers, memory_microbatches=8, source="a test")
    profiled = replace(one, problem=replace(one.problem, setup=replace(setup, profile=profile)))
    of = rules_of(profiled, profiled.problem)
    assert of.smaller == (16, 8)
    assert [of.pipeline.compute_ns(1, Kind.F, n) / 1e6 for n in (4, 8, 12, 16, 24, 32)] == [30, 60, 66, 72, 96, 120]
    assert of.borders[0].piece_ns == 2 * 72 * 10**6 - 120 * 10**6


@pytest.mark.parametrize("blocking", [False, True])
def test_replicas_and_blocking_senders_as_planned(blocking: bool) -> None:
    """Fair shares of a link, and senders that wait for acknowledgements, take what the plan says."""
    problem = Problem(read_setup("jeeves")).with_training(microbatches=8)
    problem = problem.with_options(schedules=["1f1b"], replicas="fair", division="uniform", blocking=blocking)
    one = read_running(json.dumps(plan_json(make_plan(problem, sensitivity=False))), "plan.json")
    assert one.problem.replicas > 1
    pipeline = rules_of(one, one.problem).pipeline
    assert play(pipeline, pipeline.whole).span_ns == round(one.iteration_s(one.problem) * NS)
