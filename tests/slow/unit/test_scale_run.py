"""Short runs of the simulation at scale: the same seed gives the same run, and what is reported adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from papers.findings import Kind
from support.papers import SOURCES_OF_DI_PS
from support.scale_setup import write_setup

from dips.lab.sim.scale import tally
from dips.lab.sim.scale.run import ScaleReport, simulate
from dips.lab.sim.scale.scenario import find, load_scenario


def run(folder: Path, *, hours: float | None = None, seed: int | None = None, **lines: str) -> ScaleReport:
    return simulate(load_scenario(write_setup(folder, **lines), hours=hours, seed=seed))


def failing(folder: Path, seed: int, hours: float = 6) -> ScaleReport:
    """Clusters, links, slaves and the master fail every hour or so."""
    path = write_setup(folder, npus="mtbf_days = 0.05\nlink_mtbf_days = 0.05")
    path.write_text(path.read_text() + "\n[faults]\nslave_mtbf_days = 0.05\nmaster_mtbf_days = 0.08\n")
    return simulate(load_scenario(path, hours=hours, seed=seed))


def test_without_failures_nothing_is_lost(tmp_path: Path) -> None:
    report = run(tmp_path)
    assert report.rounds == {"committed": report.rounds["committed"], "void": 0, "aborted": 0}
    assert report.rounds["committed"] > 50
    assert report.failures == {}
    assert report.downtime_s[tally.LOST] == report.downtime_s[tally.RESTART] == 0
    assert all(cluster.pushes["excluded"] == 0 for cluster in report.clusters)
    assert 0.8 < report.share_of_ideal < 1


def test_the_same_seed_gives_the_same_report_and_another_one_another(tmp_path: Path) -> None:
    first, again, other = failing(tmp_path, 3, 4), failing(tmp_path, 3, 4), failing(tmp_path, 4, 4)
    assert first.to_json() == again.to_json()
    assert first.to_json() != other.to_json()


def test_with_failures_of_everything_the_run_goes_on_and_adds_up(tmp_path: Path) -> None:
    report = failing(tmp_path, 1)
    assert set(report.failures) == {"cluster", "link", "slave", "master"}
    assert report.epochs == 1 + report.failures["master"]
    assert report.rounds["committed"] > 10
    assert report.downtime_s[tally.RESTART] > 0
    assert report.downtime_s[tally.LOST] > 0
    applied = sum(cluster.tokens_applied for cluster in report.clusters)
    assert report.tokens <= applied <= report.tokens + 2 * 16 * 1_048_576, "published, or in the open round"
    check_seconds(report)


def check_seconds(report: ScaleReport) -> None:
    """A cluster's states fill the run's time, and none is negative."""
    for cluster in report.clusters:
        assert sum(cluster.seconds.values()) == pytest.approx(report.hours * 3600)
        assert all(seconds > -1e-6 for seconds in cluster.seconds.values()), cluster.seconds
        times = [at_s for at_s, _ in cluster.presence]
        assert times == sorted(times)


def test_merged_clusters_and_staleness_count_every_applied_push(tmp_path: Path) -> None:
    report = run(tmp_path)
    applied = sum(count * rounds for count, rounds in report.merged.items())
    assert sum(report.staleness.values()) == applied
    seeds = 1
    assert sum(cluster.pushes["applied"] for cluster in report.clusters) == applied + seeds
    assert report.merged_mean == pytest.approx(applied / sum(report.merged.values()))


def test_a_push_with_an_absurd_norm_is_excluded(tmp_path: Path) -> None:
    report = run(tmp_path, npus="bad_push = 0.2")
    bad = report.failures["bad push"]
    excluded = report.clusters[0].pushes["excluded"]
    assert 0 < excluded <= bad, "bad ones are told apart once three norms are known, and no good one is"
    assert report.clusters[1].pushes["excluded"] == 0
    assert report.downtime_s[tally.LOST] > 0


def test_the_paper_s_numbers_are_found_in_the_report_as_json(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(run(tmp_path, hours=1).to_json()))
    month = list(SOURCES_OF_DI_PS["paper-33-days"].findings(raw))
    assert {finding.place for finding in month} == {"Table 1", "Table 2", "Section 5.4", "Figure 16", "Figure 17"}
    assert [finding.what for finding in month if finding.kind is not Kind.FITTED] == [
        "push, update and pull, of the time that clusters took part"
    ]


def test_a_day_of_the_paper_s_run_has_the_paper_s_overhead() -> None:
    report = simulate(load_scenario(find("paper-33-days"), hours=24))
    assert 0.05 < report.overhead_total < 0.09
    assert report.rounds["committed"] > 40
    tokens_a_day = 2.3e12 / 33
    assert 0.5 * tokens_a_day < report.tokens < 1.1 * tokens_a_day, "three of nine clusters come later"


def test_with_the_defaults_clusters_meet_and_hardly_wait() -> None:
    """The paper's overhead is 6 %, and its clusters are nearly always alone in a round."""
    report = simulate(load_scenario(find("defaults-33-days"), hours=24))
    assert report.overhead_total < 0.03
    assert report.merged_mean > 5, "of six that are there on the first day"
    assert sum(versions * pushes for versions, pushes in report.staleness.items()) < 0.5 * sum(
        report.staleness.values()
    )


def test_a_run_that_reaches_its_tokens_ends(tmp_path: Path) -> None:
    report = run(tmp_path, sync_every='sync_every = 16\ntk_max = "100M"')
    assert report.halted
    assert 100_000_000 <= report.tokens < 150_000_000
