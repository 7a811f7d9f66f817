"""`dips size`: its formulas are those that the code enforces, and nonsense is refused in a sentence."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.vectors_held import vectors_held

from dips.cli import main
from dips.core.assumptions import names_of, value_of
from dips.core.errors import ConfigError, Refused
from dips.core.ids import SlaveId
from dips.core.layout import DEFAULT_BLOCK_ELEMS, Layout, Parameter
from dips.core.observe.metrics_server import MOST_CONNECTIONS
from dips.core.placement import (
    MEMORY_FILES,
    difference_bytes_needed,
    file_bytes_needed,
    memory_bytes_needed,
    place,
    shard_bytes_needed,
    table_bytes_needed,
)
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.wire import RESIDUAL_CODEC, SCALE_BLOCK_ELEMS, WIRE_DTYPES, encoded_bytes
from dips.lab.sim.scale import rates
from dips.local.sizing import SizeKnobs, SizeTable
from dips.master.page.history import MAX_CONNECTIONS
from dips.master.rpc import most_connections
from dips.slave.connections import ROOM_BYTES
from dips.slave.ring import SPARE_FILES
from dips.slave.snapshot_files import file_bytes
from dips.worker.data import PULL_WINDOW_CHUNKS, window_of_rank
from dips.worker.parallel.exchange import BUCKET_BYTES
from dips.worker.parallel.ownership import MOST, Piece, shares_of_ranks
from dips.worker.state.effects import InstallMode
from dips.worker.vectors import Vectors

PAPER = {"params": "100e9", "clusters": 9, "slaves": 16, "link": "10gbps"}


def sizes(**given: Any) -> SizeTable:
    return SizeTable(SizeKnobs(**{**PAPER, **given}))


# ---- the formulas are the code's ----


@pytest.mark.parametrize("files", MEMORY_FILES)
@pytest.mark.parametrize(("slots", "pins"), [(1, 0), (2, 2), (9, 2), (40, 5)])
def test_memory_of_a_slave_is_what_placing_counts(slots: int, pins: int, files: str) -> None:
    found = sizes(clusters=slots, pinned_versions=pins, memory_files=files)
    shard = found.whole("shard_params")
    tables = table_bytes_needed(math.ceil(shard / 16384), math.ceil(4 * shard / (1 << 20)), slots, pins)
    assert found["tables_bytes"].value == tables
    needed = memory_bytes_needed(shard, slots, pins, files) + tables
    assert found["slave_memory_bytes"].value == pytest.approx(1.01 * needed + (1 << 20))
    in_files = found["slave_file_bytes"].value if files != "none" else 0
    assert in_files == file_bytes_needed(shard, slots, pins, files)
    assert found["slave_volume_bytes"].value > (found["slave_ring_bytes"].value + in_files) / 0.95


@pytest.mark.parametrize("pins", [0, 2])
@pytest.mark.parametrize("pull_wire", sorted(WIRE_DTYPES))
def test_what_pull_wire_costs_and_saves_is_what_the_code_does(pull_wire: str, pins: int) -> None:
    plain, found = (sizes(pinned_versions=pins, slave_ram="4TB", pull_wire=way) for way in ("float32", pull_wire))
    shard = found.whole("shard_params") // SCALE_BLOCK_ELEMS * SCALE_BLOCK_ELEMS
    more = difference_bytes_needed(shard, 1 << 20, pins, pull_wire)
    for key in ("slave_memory_bytes", "slave_process_bytes"):
        assert found[key].value - plain[key].value == pytest.approx(1.01 * more, rel=1e-6)
    ring = 4 * file_bytes(shard, 0 if pull_wire == "float32" else encoded_bytes(RESIDUAL_CODEC, shard))
    assert found["slave_ring_bytes"].value == pytest.approx(ring, rel=1e-6)
    assert found["pull_bytes"].value == pytest.approx(encoded_bytes(WIRE_DTYPES[pull_wire], 10**11))
    assert found.whole("slots_held") <= plain.whole("slots_held")
    assert found.whole("slaves_none") >= plain.whole("slaves_none")


@pytest.mark.parametrize("ram", ["125GB", "512GB", "2TB"])
def test_what_a_host_holds_fits_it_and_one_more_does_not(ram: str) -> None:
    asked = sizes(slave_ram=ram)
    n_bytes = asked.input("slave_ram")
    for key, pins in (("slots_held", 2), ("slots_held_no_pins", 0)):
        held = asked.whole(key)
        # The records of pieces and chunks, under 1 %, are those of as many slots as were given.
        if held:
            assert sizes(clusters=held, pinned_versions=pins)["slave_process_bytes"].value < 1.002 * n_bytes
        assert sizes(clusters=held + 1, pinned_versions=pins)["slave_process_bytes"].value > 0.998 * n_bytes
    for files in MEMORY_FILES:
        slaves = asked.whole(f"slaves_{files}")
        found = sizes(slaves=slaves, memory_files=files)
        hot = 4.04 * found["shard_params"].value if files == "versions" else 0
        assert found["slave_process_bytes"].value + hot < 1.002 * n_bytes


@pytest.mark.parametrize(
    ("n_slaves", "layer_elems", "n_layers"), [(1, 1000, 3), (2, 5_000_001, 24), (7, 40_000_003, 12)]
)
def test_a_model_fits_slaves_of_this_size_and_of_no_less(n_slaves: int, layer_elems: int, n_layers: int) -> None:
    layout = Layout(tuple(Parameter(f"l.{n}.w", (layer_elems,), "float32", f"l.{n}") for n in range(n_layers)))
    found = sizes(params=layout.n_elems, slaves=n_slaves, clusters=3)
    stated = found.whole("slave_memory_bytes")
    slaves = [SlaveId(f"s{n}") for n in range(n_slaves)]
    placement = place(layout, [(slave, stated) for slave in slaves], 3, 2, 1 << 20)
    heaviest = max(sum(block.n_elems for block in placement.blocks_of(slave, layout)) for slave in slaves)
    assert heaviest <= found["shard_params"].value
    blocks = [block.n_elems for block in layout.blocks]
    fair_bytes = shard_bytes_needed(blocks, 1 << 20, 3, 2) / n_slaves
    with pytest.raises(Refused):
        place(layout, [(slave, int(0.9 * fair_bytes)) for slave in slaves], 3, 2, 1 << 20)


def test_the_rest_of_a_slave_is_the_budgets_and_the_rings() -> None:
    found = sizes(snapshots_kept=5, chunk_bytes=1 << 19)
    beside = found["slave_process_bytes"].value - found["slave_memory_bytes"].value
    assert beside == (90 << 20) + 2 * 9 * MAX_WINDOW_CHUNKS * (1 << 19) + ROOM_BYTES
    ring = (5 + SPARE_FILES) * file_bytes(found.whole("shard_params"))
    assert found.whole("slave_ring_bytes") == ring
    assert found["slave_volume_bytes"].value > ring / 0.95


@pytest.mark.parametrize(("clusters", "slaves"), [(1, 1), (9, 16), (100, 40)])
def test_the_master_has_memory_for_all_connections_that_its_ports_take(clusters: int, slaves: int) -> None:
    found = sizes(clusters=clusters, slaves=slaves)["master_connections_bytes"].value
    control = most_connections(clusters + slaves) * (80 << 10)
    assert found == control + MAX_CONNECTIONS * (640 << 10) + MOST_CONNECTIONS * (512 << 10)


@pytest.mark.parametrize("wire", sorted(WIRE_DTYPES))
def test_a_push_has_the_codecs_bytes_and_a_pull_float32(wire: str) -> None:
    found = sizes(params=64 << 20, wire=wire)
    assert found["push_bytes"].value == encoded_bytes(WIRE_DTYPES[wire], 64 << 20)
    assert found["pull_bytes"].value == 4 * (64 << 20)
    extra = 0 if wire == "float32" else 8 * (64 << 20)
    plain = sizes(params=64 << 20)["cluster_memory_bytes"].value
    assert found["cluster_memory_bytes"].value == plain + extra


def test_times_of_an_update_are_those_of_the_simulation() -> None:
    found = sizes(memory_rate="3 GB/s", disk_rate="1 GB/s")
    n = found.whole("shard_params")
    for key, k in (("update_s", 1), ("update_together_s", 9)):
        durations = (rates.measure_s(n, k, 3e9), rates.outer_step_s(n, k, 3e9), rates.snapshot_s(n, 1e9))
        assert found[key].value == pytest.approx(sum(durations))


# ---- clusters of several ranks ----


@pytest.mark.parametrize("ranks", [2, 7, 32])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_share_is_at_most_what_is_stated(ranks: int, uneven: bool) -> None:
    layout = Layout((Parameter("w", (40_000, 1024), "float32", "w"),))
    chunk_bytes = 1 << 16
    found = sizes(params=layout.n_elems, slaves=2, ranks=ranks, chunk_bytes=chunk_bytes)
    first = 30_000 if uneven else 40_000 // ranks
    cuts = [0, *(first + (40_000 - first) * n // (ranks - 1) for n in range(ranks))]
    held = [[Piece(0, (a, 0), (b - a, 1024))] for a, b in pairwise(cuts)]
    shares = [share.n_elems for share in shares_of_ranks(layout, held, chunk_bytes)]
    assert sum(shares) == layout.n_elems
    assert max(shares) <= found["share_most_params" if uneven else "share_params"].value
    assert found["share_most_params"].value <= MOST[0] / MOST[1] * layout.n_elems / ranks + chunk_bytes // 4


@pytest.mark.parametrize("overlap", ["none", "push", "full"])
def test_a_rank_keeps_vectors_of_its_share_as_one_process_does_of_the_model(overlap: str) -> None:
    store = CopiedParameters()
    vectors = Vectors(4, store)
    vectors.landing()
    vectors.install(store, InstallMode.REPLACE)
    vectors.snapshot(store, may_stay_live=True)
    vectors.landing(push_is_live=overlap == "none", push_is_needed=True)  # the parameters are still theta_at_push
    found = sizes(ranks=32, overlap=overlap)
    share = found["share_params"].value
    moving = min(16 * window_of_rank(PULL_WINDOW_CHUNKS, 32) * (1 << 20), 4 * share)
    assert found["rank_memory_bytes"].value == pytest.approx(
        4 * vectors_held(vectors) * share + 4 * BUCKET_BYTES + 16 * 32 + moving + (80 << 20)
    )
    assert (
        sizes(ranks=32, overlap=overlap, wire="int8")["rank_memory_bytes"].value
        == found["rank_memory_bytes"].value + 4 * share
    )


class CopiedParameters:
    """A ParameterStore whose parameters cannot be sent from where they are, as those of a share."""

    def layout(self) -> Layout:
        return Layout((Parameter("w", (4,), "float32", "w"),))

    def snapshot(self, into: NDArray[np.float32]) -> None:
        into[:] = 1

    def install(self, flat: NDArray[np.float32]) -> None:
        assert flat.size == 4

    def reset_inner_optimizer(self) -> None:
        raise AssertionError("this is not asked for")


def test_the_page_has_what_the_command_prints_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["size", "--params", "100e9", "--clusters", "9", "--slaves", "16", "--link", "10gbps", "--ranks", "32"]
    assert main.run(words) == 0
    told = capsys.readouterr().out
    of_rank = told[told.index("Rank, each of 32") : told.index("Cluster, each of 9")].strip()
    assert of_rank in (Path(__file__).parents[3] / "docs" / "capacity.md").read_text()


# ---- what limits a transfer ----


def test_narrow_places_and_overlap() -> None:
    alone = sizes(keys=False)["alone_rate"].value
    assert alone == pytest.approx(0.93 * 10e9)
    assert sizes(link="100gbps")["alone_rate"].value == pytest.approx(8 * 1.2e9), "one process's encryption"
    assert sizes(link="100gbps", keys=False, slave_link="1gbps")["alone_rate"].value == pytest.approx(16 * 0.93e9)
    together = sizes(slaves=2, keys=False)["together_rate"].value
    assert together == pytest.approx(2 * 0.93 * 10e9 / 9)
    none, push, full = (sizes(overlap=how, sync_every=353) for how in ("none", "push", "full"))
    assert none["stall_s"].value == none["exchange_s"].value
    assert push["stall_s"].value == pytest.approx(none["exchange_s"].value - none["push_s"].value)
    assert full["stall_s"].value == full["copies_s"].value
    short = sizes(overlap="full", sync_every=1)
    assert short["stall_s"].value == pytest.approx(short["exchange_s"].value - short["compute_s"].value)
    assert 0 < full["overhead"].value < push["overhead"].value < none["overhead"].value < 1


# ---- what is told ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "write max_clusters = 9 in [master]"),
        ({"clusters": 600, "slaves": 1}, "raise it in [master], or give more slaves"),
        ({"overlap": "none"}, "--pull-wire, --overlap full, or a faster link"),
        ({"sync_every": 1}, "raise sync_every, or choose a smaller --wire"),
        ({"slaves": 1}, "the slaves are the bottleneck"),
        ({"sync_every": 100}, "begin at outdated parameters"),
    ],
)
def test_what_nobody_may_overlook_is_said(given: dict[str, Any], said: str) -> None:
    assert any(said in remark for remark in sizes(**given).remarks)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"params": 0}, "greater than or equal to 1"),
        ({"params": 10, "slaves": 16}, "cannot be divided among 16 slaves"),
        ({"params": 10, "slaves": 1, "ranks": 11}, "cannot be divided among 11 ranks"),
        ({"params": "many"}, "is not a count"),
        ({"link": 0}, "greater than 0"),
        ({"link": "10GBps"}, "is not a rate"),
        ({"wire": "bf8"}, "none of float32"),
        ({"max_clusters": 3}, "raise it, or leave it out"),
        ({"chunk_bytes": 4097}, "multiple of 4"),
        ({"disk_rate": "fast"}, "write it like"),
        ({"link": 1e-300, "params": 1 << 44}, "no finite number"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        sizes(**given)


def test_the_command_prints_each_number_with_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["size", "--params", "100e9", "--clusters", "9", "--slaves", "16", "--link", "10gbps"]
    assert main.run(words) == 0
    told = capsys.readouterr().out
    for row in sizes().rows.values():
        assert f"{row.key} = {row.formula}" in told
    assert "update with one cluster's push: 1 min 50 s" in told
    first = told[: told.index("\n\n")]
    for what in ("memory on the hosts of one cluster", "memory of a slave's process", "time of a push, all at once"):
        assert f"  {what}" in first
    assert "--disk-rate 2.74e+09: " in told
    assert "measured: docs/performance.md" in told
    assert main.run([*words, "--ranks", "32"]) == 0
    assert "Rank, each of 32 of a cluster" in capsys.readouterr().out
    assert main.run([*words, "--wire", "bf16", "--disk-rate", "1 GB/s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["given"]["wire"] == "bfloat16"
    assert answer["quantities"]["push_bytes"]["value"] == 200e9
    assert answer["quantities"]["update_s"]["numbers"]["disk_rate"] == 1e9


# ---- formulas ----


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a.b", "a[0]", "lambda: 1", "1 if a else 2", "a ** 99", "'x' * 9", "max(a", "True", "min(*a)"],
)
def test_a_formula_is_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        value_of(text, {"a": 2.0})


def test_a_formula_reads_as_arithmetic() -> None:
    assert value_of("ceil((a + 1) / 2) * MiB - min(a, 3)", {"a": 4.0}) == 3 * (1 << 20) - 3
    assert names_of("max(b, a) + ceil(b) * KiB") == ["b", "a"]
    assert DEFAULT_BLOCK_ELEMS == sizes().input("block_params")
