"""SpanTrain's answer: what it holds, and what it says that SpanTrain does not see."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT
from support.spantrain import Row, all_links, grouped, problem

from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile, read_setup
from dips.planner.ir import Schedule
from dips.planner.spantrain.inside import DEFAULT_RULES
from dips.planner.spantrain.report import SpanTrainReport, report_of, slowest_stage, unseen, write_report
from dips.planner.spantrain.search import FirstLevelChoice, Found, Level, simulated
from dips.planner.spantrain.work import work_of


def two_regions(**training: object) -> ClusterFile:
    """A fast pair in one region, a slow device and a fast one in another."""
    sites: list[Row] = [
        {"name": "a-1", "devices": 2, "network_gbps": 10, "sustained_tflops": 4},
        {"name": "b-1", "sustained_tflops": 2},
        {"name": "b-2", "sustained_tflops": 4},
    ]
    links = all_links([site["name"] for site in sites], lambda a, b: 1 if a[0] == b[0] else 0.05)
    return problem(sites, links, 8, 12, **training)


@pytest.fixture(scope="module")
def found() -> SpanTrainReport:
    return report_of(two_regions(data=1))


def test_devices_layers_and_memory(found: SpanTrainReport) -> None:
    rows = found.devices()
    assert sum(row.devices for row in rows) == 4
    layers = {row.stage: (row.first_layer, row.layers) for row in rows}
    reached = 0
    for first, count in layers.values():
        assert first == reached
        reached += count
    assert reached == 8
    for stage in layers:
        shares = [row for row in rows if row.stage == stage]
        tensor = {row.tensor for row in shares}
        if tensor == {"1"}:
            assert sum(row.sequences * row.devices for row in shares) == found.best.chain.sequences
    for row in found.devices():
        assert 0 < row.activation_bytes
        assert row.state_bytes + row.activation_bytes <= row.memory_bytes


def test_json(found: SpanTrainReport) -> None:
    told = json.loads(json.dumps(found.to_json()))
    assert told["iteration_s"] == found.iteration_s == found.best.iteration_s
    assert told["samples_per_s"] == pytest.approx(12 / found.iteration_s)
    assert told["microbatches"] * told["microbatch_sequences"] == told["batch"] == 12
    assert told["equals_synchronous_training"] is True
    assert told["staleness"] is None
    assert sum(group["layers"] for group in told["groups"]) == 8
    terms = told["groups"][0]["equation_1"]
    parts = [terms[key] for key in ("fill_s", "run_s", "wait_s", "collective_s")]
    assert terms["total_s"] == pytest.approx(sum(parts))
    assert told["equation_1_s"] == max(group["equation_1"]["total_s"] for group in told["groups"])
    assert all(one["samples_per_s"] <= told["samples_per_s"] for one in told["runners_up"])
    number, slowest = slowest_stage(found)
    assert slowest.total_s == told["equation_1_s"]
    assert number in (1, 2)


def test_what_the_file_says_of_parallelism_is_not_used_but_for_the_batch() -> None:
    split = report_of(two_regions(data=2, microbatches=6, zero_stage=1))
    assert split.best.chain.batch == 12
    assert any("[training] has data = 2: not used but for the batch" in one for one in split.unseen)


def test_idle_devices_and_groups_that_are_left_out() -> None:
    """Setting 1: the cloud alone is faster than all groups, over 100 Mbit/s."""
    found = report_of(read_setup("spantrain-setting-1"))
    assert any("where some may be idle an iteration takes" in one for one in found.unseen)
    assert any("SpanTrain uses all groups: with group 1 alone an iteration takes" in one for one in found.unseen)
    assert any(one.startswith("Equation 1 says ") for one in found.unseen)
    quiet = report_of(read_setup("spantrain-setting-1"), alternatives=False)
    assert not any("SpanTrain uses all" in one for one in quiet.unseen)
    assert quiet.iteration_s == found.iteration_s


def test_another_threshold_is_named_where_it_is_faster() -> None:
    """25 Gbit/s and 12 ms are above the paper's threshold; two groups are faster than collectives over that link."""
    setup = read_setup(ROOT / "examples" / "04-plan-a-schedule" / "sites.toml")
    found = report_of(setup)
    assert len(found.grouping.groups) == 1
    (said,) = (one for one in found.unseen if one.startswith("groups depend on the threshold: with "))
    limit = float(said.split()[6])
    assert said.split()[7:11] == ["Gbit/s", "there", "are", "2,"]
    assert report_of(setup, threshold_gbps=limit, alternatives=False).iteration_s < found.iteration_s / 2


def test_the_out_of_order_variant_is_asked_for_and_says_what_it_is() -> None:
    plain, out = (report_of(two_regions(), out_of_order=asked, alternatives=False) for asked in (False, True))
    assert plain.flowing is None
    assert out.iteration_s <= plain.iteration_s
    told = out.to_json()
    assert told["equals_synchronous_training"] is False
    assert len(told["staleness"]) == len(out.best.chain.stages)
    assert any("not equal to synchronous training" in one for one in out.unseen)
    assert not any("not equal to synchronous training" in one for one in plain.unseen)


def test_a_link_that_several_messages_share_is_named() -> None:
    """Devices of two sites in turn: the messages behind the first and the third go the same way."""
    sites: list[Row] = [{"name": name, "devices": 2, "network_gbps": 0.01, "sustained_tflops": 1} for name in "ab"]
    setup = problem(sites, all_links(["a", "b"], lambda a, b: 0.2), 8, 8)
    work = work_of(setup, 2)
    level = Level(work, grouped(setup), 8, DEFAULT_RULES)
    for order, shared in (((0, 2, 1, 3), True), ((0, 1, 2, 3), False)):
        chain = level.chain(FirstLevelChoice(order, (2, 2, 2, 2)))
        assert chain is not None
        said = [
            one for one in unseen(setup, Found([simulated(work, chain)], works={2: work})) if "share the link" in one
        ]
        wanted = ["messages behind stages 0 and 2 share the link from a to b: simulated, but not in Equation 1"]
        assert said == (wanted if shared else [])


def test_files(found: SpanTrainReport, tmp_path: Path) -> None:
    """They are written into a new folder; plan.csv holds the schedule, trace.json its operations."""
    files = write_report(found, tmp_path / "new" / "plan")
    names = [file.name for file in files]
    assert names == ["spantrain.json", "plan.csv", "trace.json", "timeline.svg", "timeline.png"]
    assert json.loads(files[0].read_text()) == json.loads(json.dumps(found.to_json()))
    schedule = found.best.timeline.schedule
    assert Schedule.from_csv(files[1].read_text()).orders == schedule.orders
    assert "SpanTrain: small" in files[3].read_text()
    assert files[4].read_bytes().startswith(b"\x89PNG")


def test_the_lines_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/planner.md, and what it says of setting 1."""
    page = (ROOT / "docs" / "planner.md").read_text()
    (lines,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "report_of(" in text]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    kept: dict[str, Any] = {}
    exec(compile(lines, "planner.md", "exec"), kept)
    assert (tmp_path / "runs" / "spantrain" / "timeline.png").is_file()
    assert [one["layers"] for one in kept["report"].to_json()["groups"]] == [19, 13]
    setting = report_of(read_setup("spantrain-setting-1"), out_of_order=True)
    for seconds in (setting.best.iteration_s, setting.iteration_s):
        assert f"{seconds:.2f} s" in page
    assert "with group 1 alone an iteration takes 2.957 s" in " ".join(setting.unseen)


def test_a_missing_network_is_named_and_mistakes_are_one_sentence() -> None:
    setup = problem([{"name": "a", "devices": 2, "sustained_tflops": 1}], [], 4, 4)
    said = report_of(setup, alternatives=False).unseen
    assert "network_gbps of a is not given: collectives and messages inside take no time" in said
    lonely = problem([{"name": "a", "sustained_tflops": 1}, {"name": "b", "sustained_tflops": 1}], [])
    with pytest.raises(ConfigError, match="no link from a to b, which groups need of every pair of sites"):
        report_of(lonely)
    with pytest.raises(ConfigError, match="cannot each have a sequence of a microbatch"):
        report_of(problem([{"name": "a", "devices": 5, "network_gbps": 1, "sustained_tflops": 1}], [], batch=4))
