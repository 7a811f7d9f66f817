"""`dips plan run` with links that change: what ranks measured becomes a profile, a plan, and the jobs that follow.

Real ranks: tests/slow/test_plan_run.py. Here they are played, on clocks that only
waiting moves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paced_play import play
from support.plan_command import example, printed, refused

from dips.core.errors import ConfigError
from dips.planner.api import make
from dips.planner.commands import plan_swap
from dips.planner.commands.plan_run import CASE, source_of, stretched
from dips.planner.costs import NS
from dips.planner.replan import read_running
from dips.planner.run.links import RankReport, job_file, read_job, write_job, write_report
from dips.planner.schedules import SCHEDULES
from dips.planner.simulate import simulate
from dips.planner.sweep import GridPoint

NOTHING_GIVEN: dict[str, float | None] = dict.fromkeys(CASE)
NEAR: dict[str, float | None] = {**NOTHING_GIVEN, "latency": 0.0, "bandwidth": 0.0}


def reports_of_play(folder: Path, run: plan_swap.SwapRun, number: int, late_ns: int = 0) -> None:
    """The ranks do job `number` twice."""
    source, stretch = run.sources[number], 0.08
    timed = replace(source, costs=stretched(source.costs, stretch))
    (folder / "play").mkdir(exist_ok=True)
    twice = zip(*(play(folder / "play", timed, late_ns) for _ in range(2)), strict=True)
    for rank, pair in enumerate(twice):
        write_report(folder, rank, RankReport(pair, 6, 1e-15, 256, skipped=3, taken_ns=-rank), number)


def played(folder: Path, change: plan_swap.Change, late_ns: int = 0) -> tuple[plan_swap.SwapRun, plan_swap.SwapOutcome]:
    run = plan_swap.SwapRun(folder, change, 80.0, 2, 2, "gloo")
    for number, job in enumerate(run.jobs):
        write_job(folder, job, number)
    for number in (plan_swap.BEFORE, plan_swap.OLD):
        run()
        assert run.verdict is None, "the old plan was not yet measured on the changed links"
        reports_of_play(folder, run, number, late_ns)
    run()
    assert run.verdict is not None
    for number in (plan_swap.NEW, plan_swap.BEST) if run.verdict.advised else ():
        reports_of_play(folder, run, number, late_ns)
    return run, plan_swap.SwapOutcome(change, "gloo", 80.0, run.profile, run.verdict, run.parts(), run.layers, 0.05)


def test_a_pipeline_that_a_slow_link_hurts_gets_the_plan_for_that_link(tmp_path: Path) -> None:
    """ZB-V, best without delay, has two stages on each device; the new plan has one, so most layers move."""
    _, outcome = played(tmp_path, plan_swap.change_of_name("zb_v", NEAR, 2.0, 1.0))
    before, old, new, best = outcome.parts
    assert [round(part.median_s / 0.08, 2) for part in (before, old, best)] == [25.5, 52.0, 39.0]
    assert new.median_s == best.median_s
    assert outcome.recovered == 1
    assert outcome.layers == 6
    assert outcome.good
    jobs = [read_job(tmp_path, number) for number in range(4)]
    assert [job.last for job in jobs] == [False, False, False, True]
    assert jobs[plan_swap.BEFORE].csv == jobs[plan_swap.OLD].csv
    assert jobs[plan_swap.BEFORE].links == ()
    assert {(link.busy_ns, link.latency_ns) for link in jobs[plan_swap.OLD].links} == {(80_000_000, 160_000_000)}
    assert {sum(job.layers) for job in jobs} == {32}
    found = plan_swap.change_json(outcome)
    assert json.loads(json.dumps(found)) == found
    assert (found["recovered"], found["iterations_while_planning"], found["verdict"]["advised"]) == (1, 3, True)
    assert "6 of 8 layers moved" in printed(plan_swap.tell_change(outcome))
    assert "recovered: 100.0% of what a plan for these links saves, at least 80%" in printed(
        plan_swap.tell_change(outcome)
    )


@pytest.mark.parametrize("late_ns", [0, 800_000])
def test_what_is_measured_is_what_the_ranks_saw(tmp_path: Path, late_ns: int) -> None:
    """The link's numbers come out of the times of messages; a clock that is late makes it later by that."""
    run, outcome = played(tmp_path, plan_swap.change_of_name("1f1b", NEAR, 2.0, 0.5), late_ns)
    links, stages = run.profile["links"], run.profile["stages"]
    assert [(link["sender"], link["receiver"]) for link in links] == [("site 0", "site 1"), ("site 1", "site 0")]
    late_ms = late_ns / 0.08 / 1e6
    for link in links:
        assert link["bandwidth_gbps"] == pytest.approx(8e-3 / 0.5)
        assert link["latency_ms"] == pytest.approx(2000 + late_ms, rel=1e-9)
    for stage in stages:
        assert stage["forward_ms"] == pytest.approx(1000 + late_ms)
        assert stage["input_gradient_ms"] == stage["weight_gradient_ms"]  # B, shared as planned
    assert outcome.verdict.advised


def test_a_link_for_whose_messages_no_one_waited_is_left_as_planned(tmp_path: Path) -> None:
    change = plan_swap.change_of_name("1f1b", NEAR, 2.0, 0.5)
    run = plan_swap.SwapRun(tmp_path, change, 80.0, 1, 1, "gloo")
    timed = replace(run.sources[plan_swap.OLD], costs=stretched(run.sources[plan_swap.OLD].costs, 0.08))
    rows = play(tmp_path, timed)
    early = tuple(one._replace(arrives_ns=-1) for one in rows[2].sent)  # to rank 1, which has something to do before
    rows[2] = replace(rows[2], sent=early)
    found = plan_swap.measured_profile(change.running, timed, [RankReport((row,), 6, 0.0, 0) for row in rows], 0.08)
    assert [(link["sender"], link["receiver"]) for link in found["links"]] == [("site 0", "site 1")]


def test_a_link_that_becomes_free_is_noticed(tmp_path: Path) -> None:
    """No message waits for its link any longer, and receivers begin as soon as senders have ended."""
    run, outcome = played(
        tmp_path, plan_swap.change_of_name("cross_ud/1", {**NEAR, "latency": 2.0, "bandwidth": 1.0}, 0.0, 0.0)
    )
    assert {link["latency_ms"] for link in run.profile["links"]} == {0}
    assert outcome.verdict.advised
    assert outcome.verdict.new.name == "zb_v"
    assert outcome.recovered == 1


def test_a_change_that_no_plan_answers_is_no_swap(tmp_path: Path) -> None:
    _, outcome = played(
        tmp_path, plan_swap.change_of_name("cross_ud/1", {**NEAR, "latency": 2.0, "bandwidth": 2.0}, 2.1, 2.0)
    )
    assert not outcome.verdict.advised
    assert len(outcome.parts) == 2
    assert outcome.recovered is None
    assert outcome.good
    last = read_job(tmp_path, plan_swap.NEW)
    assert (last.repeats, last.last) == (0, True)
    assert not job_file(tmp_path, plan_swap.BEST).exists()
    assert "no swap: " in printed(plan_swap.tell_change(outcome))
    assert plan_swap.change_json(outcome)["pause_s"] is None


def test_a_swap_that_recovers_too_little_or_other_gradients_are_no_success(tmp_path: Path) -> None:
    _, outcome = played(tmp_path, plan_swap.change_of_name("1f1b", NEAR, 2.0, 0.5))
    before, old, new, best = outcome.parts
    slow = replace(outcome, parts=(before, old, replace(old, source=new.source), best))
    assert slow.recovered == 0
    assert not slow.good
    assert "recovered: 0.0% of what a plan for these links saves, LESS THAN 80%" in printed(plan_swap.tell_change(slow))
    same = replace(outcome, parts=(before, old, old, old))
    assert same.recovered is None
    assert not same.good
    assert "recovered: NOTHING" in printed(plan_swap.tell_change(same))
    wrong = replace(outcome, parts=(before, old, replace(new, gradient_error=1e-3), best))
    assert not wrong.good
    assert "gradients: DIFFER from those of one process" in printed(plan_swap.tell_change(wrong))


def test_the_files_of_a_run(tmp_path: Path) -> None:
    _, outcome = played(tmp_path, plan_swap.change_of_name("1f1b", NEAR, 2.0, 0.5))
    files = plan_swap.write_change(outcome, tmp_path)
    assert [file.name for file in files][:4] == ["run.json", "profile.json", "plan.json", "plan.csv"]
    again = read_running((tmp_path / "plan" / "plan.json").read_text(), "plan.json")
    assert again.name == outcome.verdict.new.name


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sites", [2, 4])
def test_a_name_with_sites_is_the_case_of_the_sweep(name: str, sites: int) -> None:
    case = GridPoint(4, 8, sites, 0.5, 0.25, 1)
    schedule, costs = case.schedule(name)
    problem = plan_swap.problem_of(case, 2)
    division = problem.uniform(schedule.n_stages)
    ours = problem.costs(division, schedule.device_of_stage)
    assert simulate(schedule, ours).makespan_ns == simulate(schedule, costs).makespan_ns
    options: dict[str, float | None] = {**NOTHING_GIVEN, "sites": sites}
    running = plan_swap.change_of_name(name, options, 1.0, None).running
    assert running.iteration_s(running.problem) == simulate(schedule, costs).makespan_ns / NS


SITES = example(
    *[("devices = 32", "devices = 2")] * 2,
    *[("network_gbps = 400\nnetwork_latency_us = 10\n", "")] * 2,
    *(("bandwidth_gbps = 25", "bandwidth_gbps = 1000"), ("latency_ms = 12", "latency_ms = 0.1")),
    *(("pipeline = 8", "pipeline = 4"), ("data = 4\ntensor = 2\nmicrobatches = 16", "microbatches = 8")),
)
LINKS = """
[measured]
source = "assumed"
[[links]]
sender = "amsterdam"
receiver = "stockholm"
bandwidth_gbps = 2
latency_ms = 400
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plan/plan.json of a near link, and links.toml of a far one."""
    found = tmp_path_factory.mktemp("files")
    (found / "sites.toml").write_text(SITES)
    make(found / "sites.toml", out=found / "plan", sensitivity=False)
    (found / "links.toml").write_text(LINKS)
    return found


def test_a_plan_json_and_its_links(tmp_path: Path, folder: Path) -> None:
    change = plan_swap.change_of_file(str(folder / "plan" / "plan.json"), folder / "links.toml", NOTHING_GIVEN)
    run = plan_swap.SwapRun(tmp_path, change, 80.0, 2, 3, "gloo")
    assert [job.repeats for job in run.jobs] == [2, 3]
    assert sum(run.jobs[plan_swap.BEFORE].layers) == 4 * 32
    bits = change.running.problem.message_bytes * 8
    forward_ns = sum(stage.f_ns for stage in run.sources[plan_swap.OLD].costs.stages)
    stretch = 4 * 80e6 / forward_ns
    busy_ns = max(link.busy_ns for link in run.jobs[plan_swap.OLD].links)
    assert busy_ns == pytest.approx(bits / 2 * stretch, rel=1e-6)
    assert {sum(row) for row in run.jobs[plan_swap.OLD].lasts_ns} == {
        sum(row) for row in run.jobs[plan_swap.BEFORE].lasts_ns
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["PLAN", "--links", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["1f1b", "--links", "LINKS"], "1f1b cannot be read as a plan.json: No such file"),
        (["CSV", "--links", "LINKS"], "--links goes with a plan.json, which has sites and links, and "),
        (["PLAN", "--links", "OTHER"], "the plan has no link from amsterdam to milan"),
        (["PLAN", "--links", "STAGES"], "[[stages]] do not go with --links, which changes links alone: remove them"),
        (["PLAN", "--links", "LINKS", "--then-latency", "1"], "give one of both"),
        (["PLAN", "--links", "LINKS", "--latency", "1"], "--latency does not go with a plan.json"),
        (["PLAN", "--links", "LINKS", "--ranks", "3"], "--ranks 3, but "),
        (["REPLICAS", "--links", "LINKS"], "has data x context = 2 replicas, of which one runs here"),
        (["PLAN", "--then-latency", "1"], "go with a schedule's name, and "),
        (["1f1b", "--sites", "1", "--then-latency", "1"], "change links between sites: give --sites 2 or more"),
        (["1f1b", "--then-latency", "-1"], "-1 is no delay of a link: give T_F, at least 0"),
        (["1f1b", "--then-bandwidth", "nan"], "nan is no delay of a link"),
        (["1f1b", "--then-latency", "1", "--links-after", "0"], "--links-after 0 is no number of iterations"),
        (["1f1b", "--then-latency", "1", "--check-gradients"], "--check-gradients times nothing, so links cannot"),
        (["1f1b", "--links-after", "3"], "--links-after says when links change"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    plan = json.loads((folder / "plan" / "plan.json").read_text())
    tables: dict[str, Any] = plan["problem"]["tables"]
    two = {**plan, "problem": {**plan["problem"], "tables": {**tables, "training": {**tables["training"], "data": 2}}}}
    two["problem"]["tables"]["sites"] = [{**site, "devices": 4} for site in tables["sites"]]
    stage = "[[stages]]\nstage = 0\nforward_ms = 1\ninput_gradient_ms = 1\nweight_gradient_ms = 1\n"
    texts = {
        "PLAN": json.dumps(plan),
        "CSV": "0F0,0B0\n1F0,1B0\n",
        "LINKS": LINKS,
        "OTHER": LINKS.replace("stockholm", "milan"),
        "STAGES": LINKS + stage,
        "REPLICAS": json.dumps(two),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)
    words = [str(tmp_path / f"{word}.toml") if word in texts else word for word in arguments]
    assert sentence in refused(capsys, "run", *words)


def test_a_schedule_that_is_only_run_has_no_plan_to_swap() -> None:
    assert source_of("dora_pp", NOTHING_GIVEN).schedule.n_stages == 16
    with pytest.raises(ConfigError, match="go with a schedule's name, and dora_pp is none: choose one of gpipe"):
        plan_swap.change_of_name("dora_pp", NOTHING_GIVEN, 1.0, None)
