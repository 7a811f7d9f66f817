"""Set-ups: those that are shipped load, and a mistake is told with its place and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scale_setup import write_setup

from dips.core.errors import ConfigError
from dips.lab.sim.scale.scenario import find, load_scenario
from dips.master.config import MasterConfig


def test_the_paper_s_set_up_is_that_of_table_1() -> None:
    paper = load_scenario(find("paper-33-days"))
    assert len(paper.clusters) == 9
    assert sum(cluster.npus for cluster in paper.clusters) == 10_112
    assert (paper.slaves.count, paper.model.layers, paper.model.parameters) == (16, 96, 10**11)
    days = {c.id: sum(end - begin for begin, end in paper.windows_s(c)) / 86_400 for c in paper.clusters}
    expected = {"c": 4, "d": 2, "e": 31, "b": 1}  # failures of Table 1
    for cluster in paper.clusters:
        if cluster.id in expected:
            assert days[cluster.id] / cluster.mtbf_days == pytest.approx(expected[cluster.id], rel=0.01)


def test_the_paper_s_run_with_the_defaults_differs_only_in_its_settings() -> None:
    """Which are the defaults, but for those that make the simulation coarse."""
    paper, ours = load_scenario(find("paper-33-days")), load_scenario(find("defaults-33-days"))
    same = ("model", "data", "slaves", "clusters", "faults")
    assert [getattr(ours, name) for name in same] == [getattr(paper, name) for name in same]
    assert (ours.run.hours, ours.run.seed) == (paper.run.hours, paper.run.seed)
    settings, defaults = ours.master.settings, MasterConfig(run_id="r", directory=Path("d")).to_run_config().settings
    shapes = ("dynamic_local_steps", "overlap", "overlap_share", "verdict_wait_measured", "max_staleness_versions")
    assert [getattr(settings, name) for name in shapes] == [getattr(defaults, name) for name in shapes]
    assert ours.master.grace_s is None
    assert ours.master.penalty == MasterConfig(run_id="r", directory=Path("d")).to_run_config().penalty


def test_ideal_tokens_count_the_time_that_a_cluster_may_run(tmp_path: Path) -> None:
    scenario = load_scenario(write_setup(tmp_path, npus="present_days = [[0, 0.125]]"))
    assert scenario.ideal_tokens() == 100_000 * 3 * 3600 + 60_000 * 6 * 3600
    scenario = load_scenario(write_setup(tmp_path), hours=0.07)
    assert [scenario.windows_s(cluster) for cluster in scenario.clusters] == [[(0.0, scenario.duration_s)]] * 2


@pytest.mark.parametrize(("lines", "place"), [
    ({"hours": "hours = 0"}, "[run]"), ({"parameters": "parametres = 1"}, "[model]"),
    ({"count": "count = 9"}, "[model]"), ({"network": 'network = "25 furlongs"'}, "[slaves]"),
    ({"sync_every": "sync_evry = 16"}, "[master]"), ({"sync_every": 'listen = "127.0.0.1:1"'}, "[master]"),
    ({"round_timeout_s": 'round_timeout_s = "1 s"'}, "[master]"), ({"id": 'id = "b"'}, "[[clusters]]"),
    ({"id": 'id = "A b"'}, "[[clusters]] 1"), ({"npus": "present_days = [[3, 2]]"}, "[[clusters]] 1"),
])  # fmt: skip
def test_a_mistake_is_told_with_its_place(tmp_path: Path, lines: dict[str, str], place: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_scenario(write_setup(tmp_path, **lines))
    assert place in str(error.value)


def test_one_absent_cluster_is_no_mistake_and_none_at_all_is(tmp_path: Path) -> None:
    path = write_setup(tmp_path, hours="hours = 6", npus="present_days = [[2, 3]]")
    assert load_scenario(path).windows_s(load_scenario(path).clusters[0]) == []
    path.write_text(path.read_text().partition("[[clusters]]")[0])
    with pytest.raises(ConfigError, match=r"there is no table \[\[clusters\]\]"):
        load_scenario(path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'paper'.*paper-33-days, two-sites"):
        find("paper")
