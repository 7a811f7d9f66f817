"""Which system a problem is planned with, and what asynchronous clusters would do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.planner.api import pose
from dips.planner.commands.plan_best import System
from dips.planner.commands.plan_clusters import NEAR_SHARE, asynchronous_clusters
from dips.planner.commands.plan_systems import SystemChoice, decide, decision_json
from dips.planner.commands.plan_ways import reasons
from dips.planner.plan import make_plan
from dips.planner.problem import Problem
from dips.planner.scaleacross.report import ScaleAcrossReport

EXAMPLE = ROOT / "examples" / "04-plan-a-schedule" / "sites.toml"
QUICK = ["1f1b", "zb_h1", "cross_ud/1", "jeeves"]
PIPELINES = (System.JEEVES, System.CROSSPIPE, System.DIPS)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The example, without a network inside of its sites."""
    found = pose(EXAMPLE).with_options(schedules=QUICK)
    sites = tuple(
        site.model_copy(update={"network_gbps": None, "network_latency_us": 0.0}) for site in found.setup.sites
    )
    return replace(found, setup=replace(found.setup, sites=sites))


def assuming(problem: Problem, **changes: object) -> Problem:
    assumed = problem.setup.asynchronous.model_copy(update=changes)
    return replace(problem, setup=replace(problem.setup, asynchronous=assumed))


def decided(problem: Problem) -> SystemChoice:
    return decide(problem, PIPELINES, sensitivity=False)


def test_the_shortest_synchronous_iteration_is_used_with_the_reason(problem: Problem) -> None:
    found = decided(assuming(problem, more_tokens=50.0))
    spans = {answer.system: answer.iteration_s for answer in found.answers}
    plan = make_plan(problem, sensitivity=False)
    assert spans[System.CROSSPIPE] == plan.chosen.iteration_s
    assert spans[System.JEEVES] == min(c.iteration_s for c in plan.candidates if c.name == "jeeves")
    assert found.use.system is System.CROSSPIPE
    assert "jeeves takes 6.4% longer" in found.why[0]
    assert found.ways is not None
    assert "50 times as many as a pipeline, by the file" in next(reasons(found.ways))


def test_the_answers_of_all_systems_are_for_the_same_batch(problem: Problem) -> None:
    found = decided(problem)
    training = problem.setup.training
    tokens = training.data * training.microbatches * training.sequence_tokens
    for answer in found.answers:
        if answer.iteration_s is not None:
            assert answer.tokens_per_s * answer.iteration_s == pytest.approx(tokens)
    (apart,) = (row["found"] for row in decision_json(found)["systems"] if row["system"] == "dips")
    assert sum(cluster["step_tokens"] for cluster in apart["clusters"]) == pytest.approx(tokens, rel=NEAR_SHARE)


def test_a_system_without_an_answer_says_why(problem: Problem) -> None:
    only = problem.with_options(schedules=["1f1b"])
    found = decided(only)
    assert [(no.name, no.why) for no in found.refused] == [
        (
            System.JEEVES,
            f"{EXAMPLE} [options]: schedules has none of its schedules: add one, or remove the key",
        )
    ]
    alone = replace(only, setup=replace(only.setup, sites=only.setup.sites[:1]))
    with pytest.raises(ConfigError, match="at least two"):
        asynchronous_clusters(alone)


def test_no_answer_at_all_is_the_mistake_of_the_file(problem: Problem) -> None:
    sites = tuple(site.model_copy(update={"memory_gib": 0.5}) for site in problem.setup.sites)
    with pytest.raises(ConfigError, match=r"memory_gib = 0\.5 of amsterdam holds less") as told:
        decided(replace(problem, setup=replace(problem.setup, sites=sites)))
    assert "no answer either from dips" in str(told.value)
    with pytest.raises(ConfigError, match="'none_such', which is unknown"):
        decided(problem.with_options(schedules=["none_such", "1f1b"]))


def test_scaleacross_explorer_reads_the_same_file(problem: Problem) -> None:
    small = problem.with_training(pipeline=2, data=2, microbatches=4, tensor=8)
    found = decide(small, (System.SCALEACROSS,), sensitivity=False)
    (answer,) = found.answers
    assert isinstance(answer.found, ScaleAcrossReport)
    best = answer.found.explored.best[0]
    assert found.plan is None
    assert answer.iteration_s == best.links_s >= best.printed_s
    assert answer.found.explored.topology.batch.sequences == 8
    assert best.case.split.tensor == 8


def test_free_networks_inside_of_sites_make_no_advice(problem: Problem) -> None:
    """SpanTrain then cuts each layer in 32 parts; with a network, that costs more than it saves."""
    systems = (System.CROSSPIPE, System.SPANTRAIN)
    free = decide(problem, systems, sensitivity=False)
    assert [answer.system for answer in free.answers] == [System.SPANTRAIN, System.CROSSPIPE]
    assert free.use.system is System.CROSSPIPE
    assert "inside of amsterdam, stockholm cost nothing, and are not advised: give network_gbps there" in free.why[1]
    known = decide(pose(EXAMPLE), systems, sensitivity=False)
    assert [answer.system for answer in known.answers] == [System.CROSSPIPE, System.SPANTRAIN]
    assert len(known.why) == 1
    alone = decide(problem, (System.SPANTRAIN,), sensitivity=False)
    assert alone.use.system is System.SPANTRAIN
    assert alone.why[1].endswith("cost nothing: give network_gbps there")


def test_slower_and_fewer_devices_of_a_cluster(problem: Problem) -> None:
    first, second = problem.setup.sites
    slow = second.model_copy(update={"sustained_tflops": 200.0})
    a, b = asynchronous_clusters(replace(problem, setup=replace(problem.setup, sites=(first, slow)))).clusters
    assert a.step.iteration_s is not None
    assert b.step.iteration_s == pytest.approx(2 * a.step.iteration_s, rel=1e-6)
    assert a.step.tokens == b.step.tokens
    small = second.model_copy(update={"devices": 16})
    setup = replace(problem.setup, sites=(first.model_copy(update={"devices": 48}), small))
    a, b = asynchronous_clusters(replace(problem, setup=setup)).clusters
    assert a.step.tokens == 3 * b.step.tokens


def test_a_site_that_cannot_train_alone_says_why_of_its_deepest_pipeline(problem: Problem) -> None:
    """32 devices make 16 stages with tensor = 2: the weights of one in 16 are too much for each."""
    sites = tuple(site.model_copy(update={"memory_gib": 0.5}) for site in problem.setup.sites)
    with pytest.raises(ConfigError, match=r"amsterdam alone cannot train the model: .*weights and optimizer") as told:
        asynchronous_clusters(replace(problem, setup=replace(problem.setup, sites=sites)))
    (size_gib,) = re.findall(r"holds less than the ([0-9.]+) GiB", str(told.value))
    whole_gib = problem.setup.model.parameters() * 16 / 2 / 2**30  # of one stage
    assert float(size_gib) < whole_gib / 8


def test_devices_that_make_no_equal_stages_and_replicas(problem: Problem) -> None:
    """31 places: a pipeline of 31 stages, or 31 replicas; the first is too deep for 16 layers, the others have no
    microbatch each."""
    first, second = problem.setup.sites
    sites = (first.model_copy(update={"devices": 62}), second)
    model = problem.setup.model.model_copy(update={"layers": 16})
    with pytest.raises(ConfigError, match="its 31 groups of tensor x context devices do not divide into at most 16"):
        asynchronous_clusters(replace(problem, setup=replace(problem.setup, sites=sites, model=model)))


def test_times_of_a_stage_are_of_the_first_site_and_scaled_to_others() -> None:
    measured = pose("jeeves").with_options(schedules=["1f1b"])
    first, second = measured.setup.sites
    assert (first.sustained_tflops is None) == (second.sustained_tflops is None)
    rates = [site.model_copy(update={"sustained_tflops": rate}) for site, rate in ((first, 300.0), (second, 100.0))]
    a, b = asynchronous_clusters(
        replace(measured, setup=replace(measured.setup, sites=tuple(rates))).with_training(data=4, microbatches=4)
    ).clusters
    assert a.step.iteration_s is not None
    assert b.step.iteration_s == pytest.approx(3 * a.step.iteration_s, rel=1e-6)


def test_servers_are_where_the_links_are_and_every_pair_needs_one(problem: Problem) -> None:
    first, second = problem.setup.sites
    third = second.model_copy(update={"name": "milan", "devices": 8})
    (link,) = problem.setup.links
    fast = link.model_copy(update={"sender": "stockholm", "receiver": "milan", "bandwidth_gbps": 100.0})
    slow = link.model_copy(update={"sender": "amsterdam", "receiver": "milan", "bandwidth_gbps": 1.0})
    setup = replace(problem.setup, sites=(first, second, third), links=(link, fast, slow))
    assert asynchronous_clusters(replace(problem, setup=setup)).servers_at == "stockholm"
    first, second = problem.setup.sites
    third = second.model_copy(update={"name": "milan"})
    setup = replace(problem.setup, sites=(first, second, third))
    with pytest.raises(ConfigError, match="no link from amsterdam to milan, over which clusters would push"):
        asynchronous_clusters(replace(problem, setup=setup))
