"""Zones, buildings, regions, and the traffic formulas of ScaleAcross Explorer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.scaleacross import FILE, read

from dips.core.errors import ConfigError
from dips.planner.model import shipped
from dips.planner.scaleacross.iteration import ring_s
from dips.planner.scaleacross.report import retransmission_s
from dips.planner.scaleacross.topology import Way, read_topology


def test_ways_follow_servers_zones_buildings_and_regions(tmp_path: Path) -> None:
    topology = read(tmp_path)
    assert [zone.name for zone in topology.zones] == ["a1", "a2", "b1", "b2"]
    assert topology.way(0, 7) == Way(450e9, 0.0)
    assert topology.way(0, 8) == Way(50e9, 5e-6)
    assert topology.way(0, 16) == pytest.approx(Way(25e9, 10e-6))
    assert topology.way(0, 32) == pytest.approx(Way(6.25e9, 1005e-6))
    assert topology.even
    assert topology.slowest(np.array([0, 0, 0]), np.array([7, 8, 16])) == topology.way(0, 16)
    near, far = topology.with_routes(distance_km=0), topology.with_routes(distance_km=10)
    assert far.way(0, 32).latency_s - near.way(0, 32).latency_s == pytest.approx(50e-6)


def test_a_route_of_two_buildings_precedes_that_of_their_regions(tmp_path: Path) -> None:
    more = '\n[[routes]]\nends = ["B", "A"]\noversubscription = 4\ndistance_km = 3\nsource = "here"\n'
    topology = read(tmp_path, FILE + more)
    assert topology.route(0, 1).oversubscription == 4
    longest = topology.longest()
    assert longest is not None
    assert longest.distance_km == 3
    text, third = FILE.split("[batch]"), '[[buildings]]\nname = "C"\nregion = "west"\nsource = "here"\n'
    third += '[[zones]]\nname = "c"\nbuilding = "C"\naccelerators = 8\nsource = "here"\n'
    for end, ratio, km in (("north", 5, 200), ("south", 9, 100)):
        third += (
            f'[[routes]]\nends = ["{end}", "west"]\noversubscription = {ratio}\ndistance_km = {km}\nsource = "here"\n'
        )
    longest = read(tmp_path, f"{text[0]}{third}[batch]{text[1]}").longest()
    assert longest is not None
    assert longest.ends == ("north", "south"), "of two of 200 km that with 1:8, not 1:5"


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('ends = ["north", "south"]', 'ends = ["north", "B"]', r"\[\[routes\]\] 1: ends = .* are neither"),
        ('building = "B"', 'building = "C"', r"\[\[zones\]\] 2: building = 'C' is none: choose one of A, B"),
        ('name = "A"\nregion', 'name = "C"\nregion = "north"\nsource = "here"\n[[buildings]]\nname = "A"\nregion',
         r"\[\[buildings\]\]: C has no zones: add one"),
        ('name = "b1"', 'name = "a1"', r"\[\[zones\]\]: name = 'a1' is there twice"),
        ("per_server = 8", "per_server = 12", r"accelerators = 16 are no whole servers of 12"),
        ('region = "south"', 'region = "A"', "'A' is a building and a region"),
        ('ends = ["north", "south"]', 'ends = ["north", "north"]', r"no \[\[routes\]\] from A to B: add one"),
        ("distance_km = 200", "distance_km = -1", "distance_km"),
        ("[batch]",
         '[[routes]]\nends = ["south", "north"]\noversubscription = 1\ndistance_km = 1\nsource = "x"\n[batch]',
         r"\[\[routes\]\] 2: ends = .* have a route already"),
        (FILE[FILE.index("[batch]") : FILE.index("[network]")], "", r"\[batch\]: sequences is not given"),
        (FILE[FILE.index("[[zones]]") : FILE.index("[[buildings]]")], "", r"there is no table \[\[zones\]\]"),
        ("loss_rate = 0.0002", "loss_rate = 2", "loss_rate"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, before: str, after: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, FILE.replace(before, after, 1))


def test_the_shipped_topologies_can_be_read() -> None:
    found = {name: read_topology(name) for name in shipped("topologies")}
    assert {name: topology.n_accelerators for name, topology in found.items()} == {
        "scaleacross-100k-dense": 98304,
        "scaleacross-17b-dense": 64,
        "scaleacross-40b-moe": 128,
    }
    assert found.pop("scaleacross-100k-dense").model.parameters() / 1e9 == pytest.approx(412, rel=0.01)
    for topology in found.values():
        assert topology.model.parameters() / 1e9 == pytest.approx(float(topology.model.name.split("B")[0]), rel=0.03)


def test_what_latency_and_loss_cost() -> None:
    assert ring_s(8e6, 1, 1e9, 1.0) == 0
    assert ring_s(8e6, 4, 1e9, 0.0) == pytest.approx(6e-3)
    assert ring_s(8e6, 1024, 1e12, 1e-3) == pytest.approx(1.023, rel=1e-3)
    assert retransmission_s(10, 4096, 0.5, 4096, 2e-3) == pytest.approx(10 * 0.5 * 2e-3)
    assert retransmission_s(10, 4097, 0.5, 4096, 2e-3) == pytest.approx(10 * 0.75 * 2e-3)
    assert retransmission_s(10, 1e6, 0.0, 4096, 2e-3) == 0
