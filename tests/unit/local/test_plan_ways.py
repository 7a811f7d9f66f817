"""Which way to use several sites: one pipeline, separate clusters, or without a site; in tokens a day."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.repository import ROOT

from dips.planner.api import pose
from dips.planner.commands import plan_ways
from dips.planner.commands.plan_clusters import asynchronous_clusters
from dips.planner.commands.plan_systems import System, decide, decision_json
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
    tokens = 8 * 8192
    assert pipeline.iteration_s is not None
    assert way.tokens_per_day >= tokens / pipeline.iteration_s * plan_ways.DAY_S
    assert way.tokens_per_s == max(pipeline.tokens_per_s, plan_ways.pipeline_over(problem, [0, 1]).tokens_per_s)
    assert clusters.tokens_per_day == pytest.approx(asynchronous_clusters(problem).tokens_per_s * 86_400)


def test_clusters_train_what_their_sites_do_alone_but_for_the_waits(problem: Problem) -> None:
    found = asynchronous_clusters(assuming(problem, overlap="none"))
    ideal = sum(cluster.tokens / cluster.step_s for cluster in found.clusters)
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
    assert [way.tokens_per_s for way in few.ways.left_out] == [way.tokens_per_s for way in many.ways.left_out]


def test_a_site_behind_a_slow_link_costs_a_pipeline_more_than_it_brings(problem: Problem) -> None:
    three = assuming(with_third(problem, gbps=0.1), more_tokens=100.0).with_training(pipeline=5)
    found = plan_ways.compare_ways(three, None, None, ())
    assert found is not None
    assert found.take.without == "milan"
    assert found.take.tokens_per_s == plan_ways.pipeline_over(problem, [0, 1]).tokens_per_s
    assert "milan costs more than it brings: remove its [[sites]] and [[links]] from the file" in list(
        plan_ways.reasons(found)
    )
    assert len(found.left_out) == 3


def test_clusters_that_stay_have_the_steps_that_they_had(problem: Problem) -> None:
    three = with_third(problem, gbps=25)
    whole, rest = asynchronous_clusters(three), asynchronous_clusters(three, [0, 1])
    assert [one.step_s for one in rest.clusters] == [one.step_s for one in whole.clusters[:2]]
    assert [one.site for one in rest.clusters] == ["amsterdam", "stockholm"]
    assert rest.clusters[0].exchange_s <= whole.clusters[0].exchange_s
    known = {site: cluster.plan for site, cluster in enumerate(whole.clusters)}
    way = plan_ways.best_without(assuming(three, more_tokens=1.0), 2, known)
    assert not way.synchronous
    assert way.tokens_per_s == rest.tokens_per_s


def test_what_cannot_be_has_a_reason(problem: Problem) -> None:
    three = with_third(problem, gbps=25)
    apart = replace(three, setup=replace(three.setup, links=three.setup.links[:2]))  # none from stockholm to milan
    ways = plan_ways.compare_ways(apart, None, None, [plan_ways.NoWay(plan_ways.PIPELINE, "no link")])
    assert ways is not None
    reasons_of = {no.name: no.why for no in ways.impossible}
    assert reasons_of[plan_ways.PIPELINE] == "no link"
    assert "no link from stockholm to milan" in reasons_of["without amsterdam"]
    assert {way.without for way in ways.left_out} == {"stockholm", "milan"}
    assert decide(problem, (System.CROSSPIPE,), sensitivity=False).ways is None
    alone = replace(problem, setup=replace(problem.setup, sites=problem.setup.sites[:1], links=()))
    found = decide(alone.with_training(pipeline=2), ASKED, sensitivity=False)
    assert found.ways is None
    assert decision_json(found)["ways"] is None


def way(tokens_per_day: float, synchronous: bool, **more: object) -> plan_ways.SiteWay:
    return plan_ways.SiteWay("how", tokens_per_day / plan_ways.DAY_S, synchronous, **more)  # type: ignore[arg-type]


def told(problem: Problem, *found: plan_ways.SiteWay) -> plan_ways.SiteWays:
    return plan_ways.SiteWays(problem, found, tuple(one for one in found if one.without), ())


def test_the_first_line_says_what_to_take_and_what_others_give(problem: Problem) -> None:
    clusters, pipeline = way(3e9, False), way(1.1e9, True)
    ways = told(problem, clusters, pipeline, way(1e9, True, without="B"))
    assert plan_ways.take_text(ways) == (
        "take: separate clusters under Di-PS, 3 billion tokens a day (worth 2 billion); "
        "one pipeline over the sites gives 1.1 billion, without B 1 billion"
    )
    assert plan_ways.take_text(told(problem, pipeline)) == "take: one pipeline over the sites, 1.1 billion tokens a day"
    assert plan_ways.take_text(told(problem, pipeline, clusters)).endswith(
        "; separate clusters under Di-PS give 3 billion (worth 2 billion)"
    )


def test_the_reasons_say_that_tokens_differ_and_what_is_near(problem: Problem) -> None:
    near = list(plan_ways.reasons(told(problem, way(3e9, False), way(1.9e9, True))))
    assert "1.5 times as many ([asynchronous] more_tokens), which is assumed" in near[0]
    assert near[1].startswith(
        "separate clusters under Di-PS and one pipeline over the sites differ by 5.3%, less than such numbers are sure"
    )
    assert near[2].startswith("clusters: sync_every 64, overlap full, wire float32, 8 slaves")
    alike = list(plan_ways.reasons(told(problem, way(3e9, True, split=(8, 1, 8)), way(1e9, True, without="B"))))
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
    said = decision_json(found)["ways"]
    assert said["take"] == said["found"][0]
    assert {row["way"] for row in said["found"]} >= {plan_ways.PIPELINE, plan_ways.CLUSTERS}
    assert [row["without"] for row in said["left_out"]] == ["amsterdam", "stockholm"]
    assert said["take"]["tokens_per_day"] == found.ways.take.tokens_per_s * 86_400
    assert plan_ways.clusters_way(asynchronous_clusters(problem)).how.startswith(
        "2 clusters, H 64, servers at amsterdam, "
    )
