"""Which way to use several sites: all, some or one of them, together or as clusters; in tokens a day."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from bench_outer_gain import PLANNER, kept, planner_text
from rich.table import Table
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.planner.api import pose
from dips.planner.candidates import RefusedCandidate
from dips.planner.cluster import Asynchronous
from dips.planner.commands import plan_ways
from dips.planner.commands.plan_best import System, SystemAnswer, best, bound
from dips.planner.commands.plan_clusters import (
    NEAR_SHARE,
    MeasuredLosses,
    asynchronous_clusters,
    inner_step,
    inner_steps,
    measured_losses,
    more_tokens,
)
from dips.planner.commands.plan_systems import decide, decision_json
from dips.planner.commands.plan_text import decision_text
from dips.planner.problem import Problem

ASKED = (System.CROSSPIPE, System.DIPS)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The example with few layers, small batches, and schedules that are planned at once."""
    found = pose(ROOT / "examples" / "04-plan-a-schedule" / "sites.toml").with_options(
        schedules=["zb_h1"], replicas="fair", division="uniform"
    )
    setup = replace(found.setup, model=found.setup.model.model_copy(update={"layers": 8}))
    return replace(found, setup=setup).with_training(pipeline=4, data=2, tensor=8, microbatches=4)


def assuming(problem: Problem, **changes: object) -> Problem:
    assumed = problem.setup.asynchronous.model_copy(update=changes)
    return replace(problem, setup=replace(problem.setup, asynchronous=assumed))


def with_third(problem: Problem, gbps: float, devices: int = 16) -> Problem:
    """A third site, behind links of so many Gbit/s."""
    first, second = problem.setup.sites
    (link,) = problem.setup.links
    third = second.model_copy(update={"name": "milan", "devices": devices})
    links = tuple(
        link.model_copy(update={"sender": name, "receiver": "milan", "bandwidth_gbps": gbps})
        for name in (first.name, second.name)
    )
    setup = replace(problem.setup, sites=(first, second, third), links=(link, *links))
    return replace(problem, setup=setup)


def test_a_days_tokens_are_those_of_a_batch_over_the_iteration(problem: Problem) -> None:
    found = decide(problem, ASKED, sensitivity=False)
    assert found.ways is not None
    (pipeline,) = (answer for answer in found.answers if answer.synchronous)
    ways = {way.name: way for way in found.ways.found}
    way, clusters = ways[plan_ways.PIPELINE], ways[plan_ways.CLUSTERS]
    assert pipeline.iteration_s is not None
    assert way.tokens_per_day >= 8 * 8192 / pipeline.iteration_s * plan_ways.DAY_S
    assert way.tokens_per_s == max(pipeline.tokens_per_s, best(problem, [0, 1], 8, ASKED).tokens_per_s)
    assert clusters.tokens_per_day == pytest.approx(
        asynchronous_clusters(problem, steps=steps(problem)).tokens_per_s * 86_400
    )


def steps(problem: Problem) -> dict[int, SystemAnswer]:
    return inner_steps(problem, ASKED)


def test_clusters_train_what_their_sites_do_alone_but_for_the_waits(problem: Problem) -> None:
    found = asynchronous_clusters(assuming(problem, overlap="none"), steps=steps(problem))
    ideal = sum(cluster.step.tokens_per_s for cluster in found.clusters)
    assert 0 < found.share_of_ideal < 1
    assert found.tokens_per_s == pytest.approx(found.share_of_ideal * ideal)
    shares = [cluster.compute_s / cluster.round_s for cluster in found.clusters]
    assert min(shares) <= found.share_of_ideal <= max(shares)


def test_the_way_with_most_tokens_for_the_same_loss_is_taken(problem: Problem) -> None:
    slow = assuming(problem.with_links(bandwidth=0.2), sync_every=5000)
    few, many = (decide(assuming(slow, more_tokens=more), ASKED, sensitivity=False) for more in (1.0, 100.0))
    assert few.ways is not None
    assert many.ways is not None
    assert (few.ways.take.name, few.use.system) == (plan_ways.CLUSTERS, System.DIPS)
    assert many.ways.take.synchronous
    assert many.use.system is System.CROSSPIPE


def judged(problem: Problem, clock: Iterator[float] | None = None) -> plan_ways.SiteWays:
    ticks = itertools.repeat(0.0) if clock is None else clock
    found = plan_ways.compare_ways(problem, None, steps(problem), (), ASKED, clock=lambda: next(ticks))
    assert found is not None
    return found


@pytest.mark.parametrize(("gbps", "more_tokens"), [(0.1, 100.0), (0.1, 1.0), (25.0, 1.5), (400.0, 100.0)])
def test_no_set_of_sites_is_better_than_what_is_taken(problem: Problem, gbps: float, more_tokens: float) -> None:
    three = assuming(with_third(problem, gbps), more_tokens=more_tokens)
    take, batch = judged(three).take, 8
    counted = take.tokens_per_s / (1.0 if take.synchronous else more_tokens)
    for size in (1, 2, 3):
        for sites in itertools.combinations(range(3), size):
            together = best(three, sites, batch, ASKED).tokens_per_s
            assert together <= counted
            assert together <= bound(three, sites, batch)
            if size > 1:
                assert asynchronous_clusters(three, sites, steps(three)).tokens_per_s / more_tokens <= counted


def test_sites_compute_together_as_fast_as_each_does_and_exchange_what_they_must(problem: Problem) -> None:
    fast = problem.with_links(bandwidth=1e6)
    alone = bound(fast, [0], 8)
    assert bound(fast, [0, 1], 8) == pytest.approx(2 * alone)
    slow = problem.with_links(bandwidth=1e-4)
    assert bound(slow, [0, 1], 8) < alone == bound(slow, [0], 8)


def behind_a_slow_link(problem: Problem, between: float) -> Problem:
    """Milan's links are slow; those between the others so many times as fast as in the file."""
    three = with_third(problem.with_links(bandwidth=between), gbps=0.1).with_training(microbatches=32)
    return assuming(three, more_tokens=100.0)


def test_sites_that_cost_more_than_they_bring_are_named(problem: Problem) -> None:
    found = judged(behind_a_slow_link(problem, between=20))
    assert found.take.name == "one pipeline over amsterdam and stockholm"
    assert "milan costs more than it brings: remove its [[sites]] and [[links]] from the file" in plan_ways.reasons(
        found
    )
    alone = judged(behind_a_slow_link(problem, between=1e-3))
    assert alone.take.name == "amsterdam alone"
    assert any(line.startswith("stockholm and milan cost more than they") for line in plan_ways.reasons(alone))


def test_a_search_that_ends_says_how_many_sets_it_did_not_judge(problem: Problem) -> None:
    three = assuming(with_third(problem, gbps=100), more_tokens=100.0)
    late = judged(three, itertools.chain([0.0], itertools.repeat(plan_ways.SEARCH_S + 1)))
    assert late.unjudged > 0
    assert {way.sites for way in late.judged} == {(0,), (0, 1, 2)}
    assert any(f"{late.unjudged} sets of sites were not judged" in line for line in plan_ways.reasons(late))
    assert judged(three).unjudged == 0


def test_many_sites_are_searched_step_by_step(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    three = behind_a_slow_link(problem, between=20)
    monkeypatch.setattr(plan_ways, "MOST_JUDGED", 2)
    found = judged(three)
    assert found.take.sites == (0, 1)
    assert any("not every set is judged" in line for line in plan_ways.reasons(found))


def test_a_cluster_takes_the_microbatches_that_suit_its_replicas(problem: Problem) -> None:
    """Its share is 21, which no two replicas have in equal parts."""
    uneven = with_third(problem, gbps=25, devices=48).with_training(microbatches=37)
    step, share = inner_step(uneven, 0, ASKED), 21
    microbatches = step.tokens / 8192
    assert abs(microbatches - share) <= NEAR_SHARE * share
    exact = best(uneven, [0], share, ASKED)
    assert step.tokens_per_s > exact.tokens_per_s


@pytest.mark.parametrize("asked", [(System.DIPS,), (System.DIPS, System.SCALEACROSS), (System.SPANTRAIN, System.DIPS)])
def test_clusters_have_pipelines_whatever_else_is_asked(problem: Problem, asked: tuple[System, ...]) -> None:
    found = decide(problem, asked, sensitivity=False)
    assert System.DIPS in [answer.system for answer in found.answers]


def test_clusters_that_stay_have_the_steps_that_they_had(problem: Problem) -> None:
    three = with_third(problem, gbps=25)
    whole, rest = (asynchronous_clusters(three, sites, steps(three)) for sites in (None, [0, 1]))
    assert [one.step.iteration_s for one in rest.clusters] == [one.step.iteration_s for one in whole.clusters[:2]]
    assert [one.site for one in rest.clusters] == ["amsterdam", "stockholm"]
    assert rest.clusters[0].exchange_s <= whole.clusters[0].exchange_s


def test_what_cannot_be_has_a_reason(problem: Problem) -> None:
    three = with_third(problem, gbps=25)
    apart = replace(three, setup=replace(three.setup, links=three.setup.links[:2]))  # none from stockholm to milan
    refused = [RefusedCandidate(plan_ways.CLUSTERS, "no link")]
    ways = plan_ways.compare_ways(apart, None, {}, refused, ASKED)
    assert ways is not None
    assert [(no.name, no.why) for no in ways.impossible] == [(plan_ways.CLUSTERS, "no link")]
    assert all((1, 2) != way.sites for way in ways.judged)
    assert decide(problem, (System.CROSSPIPE,), sensitivity=False).ways is None
    alone = replace(problem, setup=replace(problem.setup, sites=problem.setup.sites[:1], links=()))
    found = decide(alone.with_training(pipeline=2), ASKED, sensitivity=False)
    assert found.ways is None
    assert decision_json(found)["ways"] is None


def way(tokens_per_day: float, synchronous: bool, *sites: int, **more: object) -> plan_ways.SiteWay:
    name = "B alone" if sites else plan_ways.PIPELINE if synchronous else plan_ways.CLUSTERS
    return plan_ways.SiteWay(name, sites or (0, 1), "how", tokens_per_day / plan_ways.DAY_S, synchronous, **more)  # type: ignore[arg-type]


def told(problem: Problem, *found: plan_ways.SiteWay) -> plan_ways.SiteWays:
    return plan_ways.SiteWays(problem, found, (), more_tokens(problem.setup.asynchronous))


def test_the_first_line_says_what_to_take_and_what_others_give(problem: Problem) -> None:
    clusters, pipeline = way(3e9, False), way(1.1e9, True)
    own = assuming(problem, more_tokens=1.5)
    ways = told(own, clusters, pipeline, way(1e9, True, 1))
    assert plan_ways.take_text(ways) == (
        "take: separate clusters under Di-PS, 3 billion tokens a day (worth 2 billion); one pipeline over the sites "
        "gives 1.1 billion, B alone 1 billion; worth: by more_tokens of the file"
    )
    assert plan_ways.take_text(told(own, pipeline)) == "take: one pipeline over the sites, 1.1 billion tokens a day"
    assert "; separate clusters under Di-PS give 3 billion (worth 2 billion)" in plan_ways.take_text(
        told(own, pipeline, clusters)
    )


def test_the_reasons_say_that_tokens_differ_and_what_is_near(problem: Problem) -> None:
    near = list(plan_ways.reasons(told(assuming(problem, more_tokens=1.5), way(3e9, False), way(1.9e9, True))))
    assert "1.5 times as many as a pipeline, by the file ([asynchronous] more_tokens)" in near[0]
    assert near[1].endswith("up to 1.58 times as many")
    assert near[2].startswith(
        "separate clusters under Di-PS and one pipeline over the sites differ by 5.3%, less than such numbers are sure"
    )
    assert near[3].startswith("clusters: sync_every 64, overlap full, wire float32, 8 slaves")
    alike = list(plan_ways.reasons(told(problem, way(3e9, True, split=(8, 1, 8)), way(1e9, True, 1))))
    assert alike == [
        "in [training] give pipeline = 8, data = 1, microbatches = 8 (the file has 4, 2, 4), and plan again"
    ]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(12.0, "12"), (999_400, "999,400"), (999_600, "1 million"), (35_014_377_600, "35 billion"),
     (999.7e9, "1 trillion"), (123.4e9, "123 billion"), (2.5e15, "2,500 trillion")],
)  # fmt: skip
def test_tokens_in_three_digits(tokens: float, text: str) -> None:
    assert plan_ways.tokens_text(tokens) == text


def test_text_and_json_put_it_first(problem: Problem) -> None:
    found = decide(problem, ASKED, sensitivity=False)
    assert found.ways is not None
    first, *others = decision_text(found)
    assert first == plan_ways.take_text(found.ways)
    assert any(str(line).startswith("where all sites train, use ") for line in others)
    ways = next(line for line in others if isinstance(line, Table))
    assert [*ways.columns[0].cells] == [way.name for way in found.ways.judged]
    said = decision_json(found)["ways"]
    assert said["take"] == said["judged"][0]
    assert ["amsterdam", "stockholm"] in [row["sites"] for row in said["judged"]]
    assert said["take"]["tokens_per_day"] == found.ways.take.tokens_per_s * 86_400


# ---- what a token of clusters is worth -------------------------------------------------------------------------------


def test_the_measured_losses_are_those_of_the_kept_runs() -> None:
    assert PLANNER.read_text() == planner_text(kept())


def times(sync_every: int) -> float:
    return more_tokens(Asynchronous(sync_every=sync_every)).times


def test_more_tokens_are_those_after_which_data_parallel_ends_at_the_same_loss() -> None:
    whole_runs = {100: {"1": 3.0, "2": 4.0}, 200: {"1": 2.0, "2": 3.0}, 400: {"1": 1.0, "2": 2.0}}
    was = MeasuredLosses("", "", 1, 4, 1, 400, 14, whole_runs, {}, {})
    assert was.more_tokens({"1": 2.0, "2": 2.0}) == pytest.approx({"1": 2.0, "2": 1.0})
    assert was.more_tokens({"1": 1.5}) == pytest.approx({"1": 2**0.5})
    for beyond in (3.1, 0.9):
        with pytest.raises(ConfigError, match="around a loss of"):
            was.more_tokens({"1": beyond})


def test_a_measured_h_has_the_seeds_of_its_own_runs() -> None:
    was = measured_losses()
    for sync_every, losses in was.local_steps.items():
        seeds, found = was.more_tokens(losses).values(), more_tokens(Asynchronous(sync_every=sync_every))
        assert (found.low, found.high, found.seeds) == pytest.approx((min(seeds), max(seeds), len(losses)))
        assert found.times == pytest.approx(sum(seeds) / len(seeds))
        assert 1 < found.low < found.times < found.high < 2


def test_between_two_measured_h_it_goes_evenly_from_one_to_the_other() -> None:
    for below, above in itertools.pairwise(sorted(measured_losses().local_steps)):
        between = [times(steps) for steps in range(below, above + 1)]
        assert between in (sorted(between), sorted(between, reverse=True))
    assert times(32) == pytest.approx((times(16) + times(64)) / 2)


@pytest.mark.parametrize("sync_every", [1, 3, 65, 5000])
def test_clusters_of_an_h_that_was_not_measured_are_not_compared_unless_the_file_says(
    problem: Problem, sync_every: int
) -> None:
    unknown = assuming(problem, sync_every=sync_every)
    found = judged(unknown)
    assert all(way.synchronous for way in found.judged)
    (no,) = found.impossible
    assert no.name == plan_ways.CLUSTERS
    assert f"sync_every = {sync_every}: how many more tokens clusters need was measured for 4 to 64 only" in no.why
    assert "not compared" in plan_ways.take_text(found)
    assert "more_tokens" not in found.to_json()
    own = judged(assuming(unknown, more_tokens=3.0))
    clusters = next(way for way in own.judged if not way.synchronous)
    assert own.counted(clusters) == pytest.approx(clusters.tokens_per_day / 3)
    assert own.to_json()["more_tokens_from"] == "[asynchronous] more_tokens"


def test_the_advice_says_what_was_measured_and_when_it_would_be_another(problem: Problem) -> None:
    seen = more_tokens(problem.setup.asynchronous)
    ways = told(problem, way(3e9, False), way(3e9 / seen.high * 1.001, True))
    first, why = plan_ways.take_text(ways), list(plan_ways.reasons(ways))
    assert "measured at 0.36 million parameters, H 4 to 64; not at your" in first
    assert (
        f"{seen.times:.2f} times as many as a pipeline at H 64 ({seen.low:.2f} to {seen.high:.2f} over 3 seeds)"
        in why[0]
    )
    assert "disagree about what to take" in why[2]
    sure = list(plan_ways.reasons(told(problem, way(3e9, False), way(1e9, True))))
    assert "up to 3.00 times as many: measure it" in sure[2]
    assert not any("train through exchanges" in line for line in sure)
    slow = list(plan_ways.reasons(told(problem, way(3e9, False, trained_through=0.6), way(1e9, True))))
    assert any("train through exchanges for 60% of a round" in line for line in slow)
    said = ways.to_json()
    assert said["clusters_pay_up_to"] == pytest.approx(seen.high / 1.001)
    assert said["more_tokens_low"] < said["more_tokens"] < said["more_tokens_high"]
    assert (said["more_tokens_from"]["parameters"], said["more_tokens_from"]["sync_every"]) == (357_024, [4, 64])


def test_clusters_that_wait_for_exchanges_train_through_none(problem: Problem) -> None:
    slow = problem.with_links(bandwidth=0.05)
    parts = {
        overlap: plan_ways.clusters_way(asynchronous_clusters(assuming(slow, overlap=overlap)), (0, 1)).trained_through
        for overlap in ("none", "full")
    }
    assert parts["none"] == 0
    assert 0 < parts["full"] <= 1
