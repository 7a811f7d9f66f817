"""ScaleAcross Explorer where zones and buildings differ, and where an ordinary problem's file is what it searches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.plan_command import example
from support.scaleacross import FILE, read

from dips.core.errors import ConfigError
from dips.planner.cluster import ClusterFile, read_setup
from dips.planner.problem import Problem
from dips.planner.scaleacross.iteration import (
    Case,
    Outermost,
    Pipelining,
    Sharding,
    Split,
    check_places,
    collective_s,
    memory_of,
    places_of,
    program_for,
    shares_of,
    ways_of,
)
from dips.planner.scaleacross.search import splits
from dips.planner.scaleacross.topology import FREE_GBPS, Topology, of_problem


def uneven(folder: Path, numbers: tuple[int, ...] = (16, 32, 16, 24), **changes: str) -> Topology:
    """Zones a1, b1, a2, b2 with so many accelerators. changes: replaced in the file's text, old by new."""
    text = FILE
    for name, number in zip(("a1", "b1", "a2", "b2"), numbers, strict=True):
        text = text.replace(
            f'name = "{name}"\nbuilding = "{name[0].upper()}"\naccelerators = 16',
            f'name = "{name}"\nbuilding = "{name[0].upper()}"\naccelerators = {number}',
        )
    for old, new in changes.items():
        text = text.replace(old, new, 1)
    return read(folder, text)


def test_replicas_and_stages_go_to_buildings_in_proportion(tmp_path: Path) -> None:
    """32 and 56 accelerators, in groups of 8: 4 and 7 groups."""
    topology = uneven(tmp_path)
    assert not topology.even
    assert [len(groups) for groups in topology.groups(8)] == [4, 7]
    assert shares_of(topology, Outermost.DP, Split(8, 1, 1, 1, 11, 1)) == (4, 7)
    assert shares_of(topology, Outermost.DP, Split(8, 1, 1, 2, 5, 1)) == (2, 3)
    assert shares_of(topology, Outermost.PP, Split(8, 1, 1, 5, 2, 1)) == (2, 3)
    assert shares_of(topology, Outermost.DP, Split(8, 1, 1, 4, 2, 1)) == (1, 1)
    with pytest.raises(ConfigError, match=r"DP-out: the buildings have room for 2 \+ 3 replicas of 2 groups of 8"):
        shares_of(topology, Outermost.DP, Split(8, 1, 1, 2, 6, 1))


def test_no_group_leaves_its_zone_and_none_is_there_twice(tmp_path: Path) -> None:
    """Groups of 16: zone b2 has 24, so one of its groups of 8 is left over."""
    topology = uneven(tmp_path)
    assert [list(groups) for groups in topology.groups(16)] == [[0, 16], [32, 48, 64]]
    for outermost, split in ((Outermost.DP, Split(8, 2, 1, 1, 5, 1)), (Outermost.PP, Split(8, 2, 1, 5, 1, 1))):
        at = places_of(topology, outermost, split)
        assert sorted(at.ravel().tolist()) == [0, 16, 32, 48, 64]
        assert {topology.zone_of(int(first)) == topology.zone_of(int(first) + 15) for first in at.ravel()} == {True}
    at = places_of(topology, Outermost.DP, Split(8, 1, 1, 2, 5, 1))
    buildings = [[topology.building_of_zone[topology.zone_of(int(one))] for one in row] for row in at]
    assert buildings == [[0, 0, 1, 1, 1]] * 2
    at = places_of(topology, Outermost.PP, Split(8, 1, 1, 5, 2, 1))
    assert [topology.building_of_zone[topology.zone_of(int(row[0]))] for row in at] == [0, 0, 1, 1, 1]


def test_rings_of_unequal_buildings(tmp_path: Path) -> None:
    topology = uneven(tmp_path)
    split = Split(8, 1, 1, 2, 5, 1)
    case = Case(split, Outermost.DP, Sharding.HSDP, Pipelining.DORA, 2, 2)
    check_places(topology, case)
    inside = ways_of(topology, Outermost.DP, Sharding.HSDP, split)
    assert inside.leaders == topology.way(0, 32)
    assert inside.ring == topology.way(32, 64)  # the building with three replicas has two zones
    assert ways_of(topology, Outermost.DP, Sharding.FSDP, split).ring == topology.way(0, 32)
    one_and_two = ways_of(topology, Outermost.DP, Sharding.HSDP, Split(8, 1, 1, 2, 3, 1))
    assert one_and_two.ring == topology.way(32, 40)
    # In the larger building three replicas of two groups gather a part each, in five steps.
    wide = case._replace(split=Split(8, 2, 1, 1, 5, 1))
    ways = ways_of(topology, Outermost.DP, Sharding.HSDP, wide.split)
    weights = collective_s(topology, wide, ways, np.array([6e9]))[0]
    assert weights[0] == pytest.approx(5 * (1e9 / ways.ring.bytes_per_s + ways.ring.latency_s))
    # Two replicas share the optimizer's state in the smaller building, five with FSDP.
    rows = np.array([[8] * 4], np.int64)
    program = program_for(topology, case)
    hsdp, fsdp = (
        memory_of(topology, case._replace(sharding=sharding), program, rows)[0]
        for sharding in (Sharding.HSDP, Sharding.FSDP)
    )
    assert hsdp > fsdp
    with pytest.raises(ConfigError, match="HSDP needs replicas in two buildings"):
        check_places(uneven(tmp_path, (16, 8, 16, 8)), case._replace(split=Split(8, 1, 1, 4, 1, 1)))


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    case = Case(Split(8, 1, 16, 1, 11, 1), Outermost.DP, Sharding.FSDP, Pipelining.DORA, 2, 2)
    with pytest.raises(ConfigError, match="expert = 16 does not divide the accelerators of each zone"):
        check_places(uneven(tmp_path), case)
    # Groups of 4: of four replicas the smaller building has one; each of three stages has all four.
    case = case._replace(split=Split(4, 1, 8, 1, 4, 1))
    with pytest.raises(ConfigError, match="expert = 8 does not divide"):
        check_places(uneven(tmp_path), case)
    check_places(uneven(tmp_path), case._replace(split=Split(4, 1, 8, 3, 4, 1), outermost=Outermost.PP))


def test_uneven_buildings_are_split_as_far_as_there_is_room(tmp_path: Path) -> None:
    """Groups of 8: 3 and 5; of 16, in one zone: 1 and 3. Of 8 sequences as many replicas as fit with all stages in a
    building (DP-out), and as many as fit with the stages shared by the buildings (PP-out)."""
    topology = uneven(tmp_path, (8, 24, 16, 16))
    search = topology.search.model_copy(update={"microbatches": (1, 2, 3)})
    batch = topology.batch.model_copy(update={"sequences": 8, "sequence_tokens": 4096})
    model = topology.model.model_copy(update={"layers": 3})
    replicas: dict[int, dict[int, list[int]]] = {1: {1: [4, 8], 2: [2], 3: [2]}, 2: {1: [2], 2: [1], 3: [1]}}
    assert list(splits(replace(topology, search=search, batch=batch, model=model))) == [
        Split(8, context, 1, pipeline, data, m)
        for context, of_stages in replicas.items()
        for pipeline, some in of_stages.items()
        for data in some
        for m in ((1, 2) if data < 8 else (1,))
    ]


def test_the_slowest_zone_counts_and_that_is_said(tmp_path: Path) -> None:
    slow = {'name = "b2"': 'name = "b2"\nsustained_tflops = 300\nmemory_gib = 96'}
    topology = uneven(tmp_path, (16, 16, 16, 16), **slow)
    assert topology.accelerators.sustained_tflops == 300
    assert topology.accelerators.memory_gib == 80
    assert topology.notes == (
        "all accelerators count with the least sustained_tflops, 300 TFLOP/s of zone b2",
        "all accelerators count with the least memory_gib, 80 GiB of zone a1",
    )


def two_sites(folder: Path, **changes: str) -> ClusterFile:
    """The example with these numbers; changes: replaced in its text, old by new."""
    numbers = (
        *(("devices = 32", f"devices = {n}") for n in (8, 16)),
        *(("network_gbps = 400\nnetwork_latency_us = 10\n", f"network_gbps = {n}\n") for n in (1600, 3200)),
        ("bandwidth_gbps = 25", "bandwidth_gbps = 100\noversubscription = 2"),
        *(("pipeline = 8", "pipeline = 3"), ("microbatches = 16", "microbatches = 8")),
        ("sequence_tokens = 8192", "microbatch_sequences = 2\nsequence_tokens = 4096"),
    )
    file = folder / "sites.toml"
    file.write_text(example(*numbers, *changes.items()))
    return read_setup(file)


def test_sites_are_buildings(tmp_path: Path) -> None:
    topology = of_problem(two_sites(tmp_path))
    assert [(b.name, b.region) for b in topology.buildings] == [
        ("amsterdam", "region of amsterdam"), ("stockholm", "region of stockholm")
    ]  # fmt: skip
    assert [zone.accelerators for zone in topology.zones] == [8, 16]
    assert topology.batch.sequences == 4 * 8 * 2
    assert topology.search.tensor == (2,)
    assert topology.routes[0].distance_km == 2400
    assert topology.network is None
    assert topology.present is None
    assert topology.accelerators.network_gbps == 1600  # of one device; the slower site's


def test_a_message_takes_as_long_as_on_the_link_of_a_plan(tmp_path: Path) -> None:
    """Four replicas of two devices share 50 Gbit/s (100, oversubscribed 2): 6.25 each."""
    setup = two_sites(tmp_path)
    topology, problem = of_problem(setup), Problem(setup)
    split = Split(2, 1, 1, 3, 4, 2)
    at = places_of(topology, Outermost.PP, split)
    assert [topology.building_of_zone[topology.zone_of(int(row[0]))] for row in at] == [0, 1, 1]
    hop = ways_of(topology, Outermost.PP, Sharding.FSDP, split).hops[0]
    wire = problem.costs(problem.uniform()).wires[0, 1]
    busy_s = split.message_bytes(topology) / hop.bytes_per_s
    assert busy_s * 1e9 == pytest.approx(wire.busy_ns, rel=1e-6)
    assert hop.latency_s * 1e9 == pytest.approx(wire.latency_ns, rel=1e-6)
    inside = ways_of(topology, Outermost.PP, Sharding.FSDP, split).hops[1]
    wire = problem.costs(problem.uniform()).wires[1, 2]
    assert split.message_bytes(topology) / inside.bytes_per_s * 1e9 == pytest.approx(
        2 * wire.busy_ns, rel=1e-6  # 3200 Gbit/s there; the slower site's counts everywhere
    )  # fmt: skip


def test_gradients_and_free_networks(tmp_path: Path) -> None:
    """DP-out: a replica of each stage sends on at the building's edge, three stages of two devices."""
    topology = of_problem(two_sites(tmp_path))
    ring = ways_of(topology, Outermost.DP, Sharding.FSDP, Split(2, 1, 1, 3, 3, 1)).ring
    assert ring.bytes_per_s == pytest.approx(50e9 / 8 / 6)
    shared = ways_of(topology, Outermost.DP, Sharding.FSDP, Split(2, 2, 1, 1, 3, 1)).ring
    assert shared.bytes_per_s == pytest.approx(50e9 / 8 / 4)
    assert topology.way(0, 8) == topology.slowest(np.array([0]), np.array([8]))
    assert tuple(topology.way(0, 8)) == pytest.approx((50e9 / 8, 0.012))
    wide = topology.with_bandwidth(1e4)
    assert wide.way(0, 8, 6).bytes_per_s == 1600e9 / 8
    setup = two_sites(tmp_path, **{"network_gbps = 1600\n": "", "network_gbps = 3200\n": ""})
    assert of_problem(setup).accelerators.network_gbps == FREE_GBPS


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("sustained_tflops = 400\n", "", r"\[\[sites\]\] 1: sustained_tflops of amsterdam is not given"),
        ("memory_gib = 80\n", "", r"\[\[sites\]\] 1: memory_gib of amsterdam is not given"),
        ("microbatches = 8", "activation_bytes = 1\nmicrobatches = 8", r"activation_bytes cannot be counted"),
        ("[training]", '[options]\noverlap = false\n[training]', r"\[options\]: overlap cannot be counted"),
        ("latency_ms = 12", "latency_ms = 1200", r"latency_ms = 1200 from amsterdam to stockholm"),
        ("[training]", "[profile]\nerror = 0.1\nsource = 'x'\n[training]", r"\[profile\] cannot be counted"),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        of_problem(two_sites(tmp_path, **{old: new}))


def test_sites_without_a_link_and_devices_without_a_group(tmp_path: Path) -> None:
    setup = two_sites(tmp_path)
    with pytest.raises(ConfigError, match="no link from amsterdam to stockholm, which ScaleAcross Explorer needs"):
        of_problem(replace(setup, links=()))
    few = replace(setup, sites=(setup.sites[0].model_copy(update={"devices": 1}), setup.sites[1]))
    with pytest.raises(ConfigError, match="amsterdam has devices = 1, a group of tensor = 2 does not fit there"):
        of_problem(few)
    setup = two_sites(tmp_path, **{"devices = 8": "devices = 9", "memory_gib = 80": "memory_gib = 40"})
    assert of_problem(setup).notes == (
        "1 devices of amsterdam are not used: no whole group of 2",
        "all accelerators count with the least memory_gib, 40 GiB of zone amsterdam",
    )
