"""Stages against replicas, and pipelines against gradients on the long link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.core.errors import ConfigError
from dips.planner.cluster import read_setup
from dips.planner.plan import make_plan, pipelines_of
from dips.planner.problem import Problem, regrouped
from dips.planner.tradeoff import DeviceSplit, divided_so, splits, tradeoff

QUICK = ["1f1b", "zb_h1", "zb_v", "cross_ud/1"]


def test_every_way_is_told_once() -> None:
    """CrossPipe's Figure 12(a) from its first point: 4 stages x 4 replicas of M70."""
    found = tradeoff(Problem(read_setup("crosspipe-tradeoff-pp4")).with_options(schedules=QUICK))
    ways = [choice.split for choice in found.choices] + [split for split, _ in found.impossible]
    assert sorted((s.pipeline, s.data, s.groups) for s in ways) == [
        (p, 16 // p, g) for p in (1, 2, 4, 8, 16) for g in (1, 2)
    ]
    assert {split.microbatches * split.data for split in ways} == {64}
    spans = [choice.best.iteration_s for choice in found.choices]
    assert spans == sorted(spans)
    for choice in found.choices:
        states, held, limits = choice.best.state_bytes, choice.best.activation_bytes, choice.best.limit_bytes
        room = [(state + limit) * choice.memory_used for state, limit in zip(states, limits, strict=True)]
        assert all(state + more <= most * 1.0001 for state, more, most in zip(states, held, room, strict=True))
        assert 0 < choice.memory_used <= 1
    assert all(why for _, why in found.impossible)


def test_times_of_a_stage_follow_its_layers() -> None:
    """Figure 12's own numbers for 8 stages: half of the times of 4."""
    four, eight = (Problem(read_setup(f"crosspipe-tradeoff-pp{p}")) for p in (4, 8))
    split = divided_so(four, DeviceSplit(8, 2, 32, 1, 2))
    assert split.setup.training == four.setup.training.model_copy(update={"pipeline": 8, "data": 2, "microbatches": 32})
    mine, theirs = (one.costs(one.uniform()).stages for one in (split, eight))
    assert [(s.f_ns, s.d_ns, s.w_ns) for s in mine] == [(s.f_ns, s.d_ns, s.w_ns) for s in theirs]
    assert min(split.limits(split.uniform())) > min(four.limits(four.uniform()))


def test_a_deeper_pipeline_has_the_room_that_its_weights_leave() -> None:
    four = Problem(read_setup("crosspipe-tradeoff-pp4"))
    split = divided_so(four, DeviceSplit(8, 2, 32, 1, 2))
    whole = [max(one.state_bytes(one.uniform())) + min(one.limits(one.uniform())) for one in (four, split)]
    assert whole[0] == pytest.approx(whole[1], rel=1e-6)
    with pytest.raises(ConfigError, match=r"a stage has room for .* microbatches next to its weights and optimizer"):
        divided_so(four, DeviceSplit(1, 16, 4, 2, 2))


def test_a_batch_that_does_not_divide() -> None:
    problem = Problem(read_setup("crosspipe-figure-8"))
    odd = problem.with_training(microbatches=7)
    with pytest.raises(ConfigError, match="7 microbatches do not divide among 2 replicas"):
        divided_so(odd, DeviceSplit(2, 2, 3, 1, 2))
    assert {(s.pipeline, s.data) for s in splits(odd)} == {(1, 4), (2, 2), (4, 1)}


def four_sites(across: bool = True) -> Problem:
    """CrossPipe's four data centres in a ring; across: with links to the opposite ones, too."""
    setup = read_setup("crosspipe-m70-4dc")
    ends = [("dc1", "dc3"), ("dc2", "dc4")] if across else []
    more = [setup.links[0].model_copy(update={"sender": a, "receiver": b}) for a, b in ends]
    wider = replace(setup, links=(*setup.links, *more))
    return Problem(wider).with_training(data=2, pipeline=4, microbatches=8)


def test_groups_of_sites_carry_both() -> None:
    """Four sites in two groups: each pipeline crosses two sites, gradients go between the groups."""
    problem = regrouped(four_sites(), 2)
    names = [site.name for site in problem.setup.sites]
    assert names == ["dc1 / dc3", "dc2 / dc4"]
    assert [ring.members for ring in problem.rings] == [(0, 2), (1, 3)]
    assert problem.replicas == 1
    chosen = make_plan(pipelines_of(problem.with_options(schedules=["1f1b"])), sensitivity=False).chosen
    weights = sum(unit.weight_bytes for unit in problem.units)
    sent = chosen.link_bytes
    assert sent[0, 1] == sent[2, 3] == sent[1, 0] == 8 * problem.message_bytes
    assert sent[0, 2] + sent[1, 3] == pytest.approx(weights)
    assert sent[0, 2] == sent[2, 0]
    assert chosen.site_of == (0, 0, 1, 1)
    resources = [one.resource for one in problem.costs(problem.uniform()).exchanges]
    assert resources == [4, 4, 5, 5]


def test_sites_of_one_position_count_as_their_slowest() -> None:
    """Of dc1 and dc3: the fewest devices for each, the least memory, rate and networks; of links the narrowest with the
    longest latency; the ring goes over both directions of the link between them."""
    problem = four_sites()
    keys = ("devices", "memory_gib", "sustained_tflops", "network_gbps", "network_latency_us")
    given = (
        (8, 80.0, 400.0, 100.0, 3.0),
        (9, 70.0, 300.0, None, 9.0),
        (7, 90.0, 350.0, 50.0, 7.0),
        (10, 60.0, 500.0, 40.0, 1.0),
    )
    sites = tuple(
        site.model_copy(update=dict(zip(keys, row, strict=True)))
        for site, row in zip(problem.setup.sites, given, strict=True)
    )
    rates = {("dc1", "dc2"): (10.0, 5.0), ("dc3", "dc4"): (20.0, 6.0), ("dc1", "dc3"): (30.0, 7.0)}
    links = tuple(
        link.model_copy(update={"bandwidth_gbps": gbps, "latency_ms": ms})
        for link in problem.setup.links
        for gbps, ms in (rates.get((link.sender, link.receiver), (40.0, 1.0)),)
    )
    found = regrouped(replace(problem, setup=replace(problem.setup, sites=sites, links=links)), 2)
    assert [tuple(getattr(site, key) for key in keys) for site in found.setup.sites] == [
        (14, 80.0, 350.0, 50.0, 7.0),
        (18, 60.0, 300.0, 40.0, 9.0),
    ]
    here, there = (site.name for site in found.setup.sites)
    link = found.setup.link(here, there)
    assert (link.bandwidth_gbps, link.latency_ms) == (10.0, 6.0)
    per_s = 1e9 / 8 / link.oversubscription
    assert [(ring.members, ring.bytes_per_s, ring.latency_s) for ring in found.rings] == [
        ((0, 2), 30 * per_s, 0.007),
        ((1, 3), 40 * per_s, 0.001),
    ]


def test_groups_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no link from dc1 to dc3"):
        regrouped(four_sites(across=False), 2)
    with pytest.raises(ConfigError, match="data = 1 does not divide among 2 groups of sites: each takes as many"):
        regrouped(four_sites().with_training(data=1), 2)
    with pytest.raises(ConfigError, match="dc1 has 8 devices, an equal share of the replicas needs 16"):
        regrouped(four_sites().with_training(data=4, pipeline=4), 4)
    problem = Problem(read_setup("crosspipe-figure-8")).with_memory(0.01).with_options(schedules=["1f1b"])
    with pytest.raises(ConfigError, match="no way to split is possible: 1 x 4: "):
        tradeoff(problem)
