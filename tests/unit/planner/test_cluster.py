"""Sites, links and models from files: what is read, and what a mistake is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.plan_command import example

from dips.core.errors import ConfigError
from dips.planner.cluster import in_proportion, read_setup, stages_of_sites
from dips.planner.costs import Wire
from dips.planner.ir import loop
from dips.planner.model import shipped
from dips.planner.problem import Problem

SMALLER = (
    *(("devices = 32", "devices = 16"), ("network_gbps = 400\nnetwork_latency_us = 10\n", "")) * 2,
    ('name = "stockholm"\ndevices = 16\nmemory_gib = 80\nsustained_tflops = 400',
     'name = "stockholm"\ndevices = 16\nmemory_gib = 80\nsustained_tflops = 200'),
    ("bandwidth_gbps = 25\nlatency_ms = 12", "bandwidth_gbps = 80\nlatency_ms = 5"),
    ("pipeline = 8\ndata = 4\ntensor = 2\nmicrobatches = 16", "pipeline = 4\ndata = 2\ntensor = 4\nmicrobatches = 8"),
    ("8192", "4096"),
)  # fmt: skip
GOOD = re.sub(r'source = ".*"', 'source = "a test"', example(*SMALLER))
GOOD = GOOD.replace("amsterdam", "here").replace("stockholm", "there")


def problem(tmp_path: Path, *changes: tuple[str, str]) -> Problem:
    text = GOOD
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file = tmp_path / "plan.toml"
    file.write_text(text)
    return Problem(read_setup(file))


def test_every_shipped_setup_is_a_problem_that_can_be_posed() -> None:
    assert {name.partition("-")[0] for name in shipped("setups")} == {"jeeves", "crosspipe", "spantrain", "cloud"}
    assert len(shipped("setups")) >= 20
    for name in shipped("setups"):
        posed = Problem(read_setup(name))
        costs, limits = posed.costs(posed.uniform()), posed.limits(posed.uniform())
        assert all(stage.activation <= limit for stage, limit in zip(costs.stages, limits, strict=True)), name
        assert costs.wires, name


def test_stages_links_and_memory(tmp_path: Path) -> None:
    found = problem(tmp_path)
    assert found.site_of == (0, 0, 1, 1)
    costs = found.costs(found.uniform())
    # 4096 tokens x 4096 x 2 bytes of each of two replicas over 10 GB/s, and back over the same bandwidth.
    assert costs.wires == {(1, 2): Wire(1, 6_710_886, 5_000_000), (2, 1): Wire(2, 6_710_886, 5_000_000)}
    assert costs.stages[2].f_ns == pytest.approx(2 * costs.stages[1].f_ns, abs=2)
    assert costs.stages[3].f_ns > costs.stages[2].f_ns  # the output layer stands there
    left = found.limits(found.uniform())
    states = found.state_bytes(found.uniform())
    assert [limit + state for limit, state in zip(left, states, strict=True)] == [80 * 2**30] * 4
    assert states[0] > states[1]  # the embedding


def test_the_largest_problems_that_are_planned(tmp_path: Path) -> None:
    """65,536 stages x microbatches, and four replicas of them."""
    changes = (("data = 2\ntensor = 4", "data = 4\ntensor = 2"), ("microbatches = 8", "microbatches = 16384"))
    assert problem(tmp_path, *changes).n_microbatches == 16384


def test_links_of_sites(tmp_path: Path) -> None:
    wires = problem(tmp_path).costs((4,) * 8, loop(4, 2)).wires
    assert wires[3, 0].resource == wires[2, 1].resource
    one_way = problem(tmp_path, ("latency_ms = 5", "latency_ms = 5\nboth_ways = false"))
    with pytest.raises(ConfigError, match=r"plan\.toml: no link from there to here, .* add a table \[\[links\]\]"):
        one_way.costs(one_way.uniform())
    change = ('name = "here"', 'name = "here"\nnetwork_gbps = 100\nnetwork_latency_us = 3')
    found = problem(tmp_path, change)
    wire, busy_ns = found.costs(found.uniform()).wires[0, 1], round(found.message_bytes / 4 * 8 / 100)  # tensor = 4
    assert (wire.busy_ns, wire.latency_ns, wire.shared) == (busy_ns, 3000, False)
    assert (2, 3) not in found.costs(found.uniform()).wires
    change = ("bandwidth_gbps = 80", "bandwidth_gbps = 160\noversubscription = 2")
    assert problem(tmp_path, change).costs((8,) * 4).wires == problem(tmp_path).costs((8,) * 4).wires


def test_stages_are_placed_by_hand_or_divided(tmp_path: Path) -> None:
    changes = (('name = "here"\ndevices = 16', 'name = "here"\ndevices = 24\nstages = 3'),)
    by_hand = (*changes, ('name = "there"', 'name = "there"\nstages = 1'))
    assert problem(tmp_path, *by_hand).site_of == (0, 0, 0, 1)
    assert problem(tmp_path).uniform(5) == (6, 6, 6, 7, 7)
    assert in_proportion([1, 2, 5], 8) == [1, 2, 5]
    assert in_proportion([1, 1, 1], 8) == [3, 3, 2]


def test_a_profile_replaces_the_cost_model(tmp_path: Path) -> None:
    text = '[profile]\nforward_ms = 10\ninput_gradient_ms = 12\nweight_gradient_ms = 8\nmessage_mb = 5\nsource = "x"\n'
    file = tmp_path / "plan.toml"
    file.write_text(GOOD + text)
    found = Problem(read_setup(file))
    stage = found.costs(found.uniform()).stages[0]
    assert (stage.f_ns, stage.d_ns, stage.w_ns) == (10_000_000, 12_000_000, 8_000_000)
    assert found.units[0].total_s == pytest.approx(30e-3 * 4 / 32)
    assert found.message_bytes == 5e6
    anew = found.with_training(recompute="full")
    assert anew.costs(anew.uniform()).stages[0].d_ns == 22_000_000


def pose(tmp_path: Path, before: str, after: str) -> None:
    found = problem(tmp_path, (before, after))
    found.costs(found.uniform())
    found.limits(found.uniform())


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("bandwidth_gbps = 80", "bandwidth = 80", r"\[\[links\]\] 1: 'bandwidth' is not a setting; did you mean 'band"),
        ("latency_ms = 5\n", "", r"\[\[links\]\] 1: latency_ms is not given .*: add it to the table"),
        ('latency_ms = 5\nsource = "a test"', 'latency_ms = 5\nsource = { latency_ms = "x" }', "does not name band"),
        ("pipeline = 4", "pipeline = 33", r"\[training\]: pipeline = 33 is more stages than layers \(32\): give at"),
        ("memory_gib = 80", "memory_gib = 5", "memory_gib = 5 of here holds less than .* stage 0: use more stages"),
        ("memory_gib = 80\n", "", r"\[\[sites\]\] 1: memory_gib is not given, and no \[profile\]"),
        ("sustained_tflops = 400\n", "", r"\[\[sites\]\] 1: sustained_tflops is not given, and no \[profile\]"),
        ('receiver = "there"', 'receiver = "nowhere"', "'nowhere' is not a site: choose one of here, there"),
        ('receiver = "there"', 'receiver = "here"', "goes from here to itself: name two sites"),
        ('name = "there"', 'name = "here"', r"\[\[sites\]\] are .*: give at least one, each with a name of its own"),
        ("data = 2", "data = 200", r"here has devices = 16, its 2 stages need 1600 \(tensor x context x data = 800 "),
        ("tensor = 4", "tensor = 3", "tensor = 3 does not divide the 32 attention heads: choose a divisor"),
        ("tensor = 4", "tensor = 4\nexpert = 2", "expert = 2, but llama3-8b has no experts: remove it"),
        ('"llama3-8b"', '"llama9"', r"\[model\]: model 'llama9' is unknown: choose one of .*llama3-8b.*, or give its"),
        ("devices = 16", "devices = 16\nstages = 3", r"have \[3, 3\] stages, .* pipeline = 4: give stages for"),
        ('name = "here"', 'name = "here"\nstages = 4', r"have \[4, 0\] stages"),
        ("bandwidth_gbps = 80", "bandwidth_gbps = 1e-300", "should be greater than or equal to 0.000001"),
        ("latency_ms = 5", "latency_ms = 1e9", "latency_ms = 1000000000.0: Input should be less than or"),
        ("microbatches = 8", "microbatches = 16385", "pipeline = 4 x microbatches = 16385 are 65540, at most 65536"),
        ("data = 2\ntensor = 4\nmicrobatches = 8", "data = 5\nmicrobatches = 16384", "x data = 327680, at most 262144"),
        ('name = "there"', 'name = "the\\nre"', r"\[\[sites\]\] 2: name = .*: a name is one line of printable"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_key_and_remedy(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        pose(tmp_path, before, after)
    assert "plan.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_told_what_is() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml is not a file .*crosspipe-m8.*jeeves"):
        read_setup("nowhere.toml")


def test_sites_share_stages_by_their_devices(tmp_path: Path) -> None:
    changes = (('name = "here"\ndevices = 16', 'name = "here"\ndevices = 48'), ("pipeline = 4", "pipeline = 8"))
    assert stages_of_sites(problem(tmp_path, *changes).setup) == [6, 2]
