"""`dips size`: its formulas are those that the code enforces, and nonsense is refused in a sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dips.cli import main
from dips.core.errors import ConfigError, Refused
from dips.core.ids import SlaveId
from dips.core.layout import DEFAULT_BLOCK_ELEMS, Layout, Parameter
from dips.core.placement import memory_bytes_needed, place, shard_bytes_needed, table_bytes_needed
from dips.core.wire import WIRE_DTYPES, encoded_bytes
from dips.local.sizing import SizeKnobs, SizeTable, names_of, size, value_of
from dips.sim.scale import rates
from dips.slave.connections import ROOM_BYTES
from dips.slave.ring import SPARE_FILES
from dips.slave.snapshot_files import file_bytes
from dips.slave.state.checks import MAX_WINDOW_CHUNKS

PAPER = {"params": "100e9", "clusters": 9, "slaves": 16, "link": "10gbps"}


def sizes(**given: Any) -> SizeTable:
    return size(SizeKnobs(**{**PAPER, **given}))


# ---- the formulas are the code's ----


@pytest.mark.parametrize(("slots", "pins"), [(1, 0), (2, 2), (9, 2), (40, 5)])
def test_memory_of_a_slave_is_what_placing_counts(slots: int, pins: int) -> None:
    found = sizes(clusters=slots, pinned_versions=pins)
    shard = found.whole("shard_params")
    tables = table_bytes_needed(math.ceil(shard / 16384), math.ceil(4 * shard / (1 << 20)), slots, pins)
    assert found["tables_bytes"].value == tables
    needed = memory_bytes_needed(shard, slots, pins) + tables
    assert found["slave_memory_bytes"].value == pytest.approx(1.01 * needed + (1 << 20))


@pytest.mark.parametrize(
    ("n_slaves", "layer_elems", "n_layers"), [(1, 1000, 3), (2, 5_000_001, 24), (7, 40_000_003, 12)]
)
def test_a_model_fits_slaves_of_this_size_and_not_of_a_tenth_less(
    n_slaves: int, layer_elems: int, n_layers: int
) -> None:
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


def test_the_papers_run_has_the_papers_update_time() -> None:
    assert sizes()["update_s"].value == pytest.approx(110, rel=0.01)


def test_a_checkpoint_of_adamw_is_twenty_bytes_a_parameter() -> None:
    found = sizes(params=10**9)
    assert found["cluster_disk_bytes"].value == 3 * 20 * 10**9
    assert sizes(params=10**9, optimizer_bytes=0)["cluster_disk_bytes"].value == 3 * 12 * 10**9


# ---- what limits a transfer ----


def test_a_transfer_takes_the_narrowest_place() -> None:
    alone = sizes(keys=False)["alone_rate"].value
    assert alone == pytest.approx(0.93 * 10e9)
    assert sizes(link="100gbps")["alone_rate"].value == pytest.approx(8 * 1.2e9), "one process's encryption"
    assert sizes(link="100gbps", keys=False, slave_link="1gbps")["alone_rate"].value == pytest.approx(16 * 0.93e9)
    together = sizes(slaves=2, keys=False)["together_rate"].value
    assert together == pytest.approx(2 * 0.93 * 10e9 / 9)


def test_overlap_hides_what_fits_beside_the_inner_steps() -> None:
    none, push, full = (sizes(overlap=how, sync_every=353) for how in ("none", "push", "full"))
    assert none["stall_s"].value == none["exchange_s"].value
    assert push["stall_s"].value == pytest.approx(none["exchange_s"].value - none["push_s"].value)
    assert full["stall_s"].value == full["copies_s"].value
    short = sizes(overlap="full", sync_every=1)
    assert short["stall_s"].value == pytest.approx(short["exchange_s"].value - short["compute_s"].value)
    assert 0 < full["overhead"].value < push["overhead"].value < none["overhead"].value < 1


def test_the_steps_for_five_percent_give_five_percent() -> None:
    steps = sizes().whole("sync_every_5_percent")
    assert sizes(sync_every=steps)["overhead"].value <= 0.05 < sizes(sync_every=steps - 1)["overhead"].value


def test_speed_is_the_papers_in_proportion_unless_it_is_given() -> None:
    assert sizes().input("tokens_per_s") == 112_912
    assert sizes(params="10e9").input("tokens_per_s") == 1_129_120
    assert sizes(tokens_per_s=2_097_152)["step_s"].value == 1


# ---- what is told ----


def test_a_value_is_its_formula_with_the_numbers_that_are_shown() -> None:
    for row in sizes().rows.values():
        assert list(row.numbers) == names_of(row.formula)
        assert value_of(row.formula, row.numbers) == row.value
        assert math.isfinite(row.value)
        assert row.value > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "write max_clusters = 9 in [master]"),
        ({"clusters": 600, "slaves": 1}, "raise it in [master], or give more slaves"),
        ({}, "raise sync_every"),
        ({"slaves": 1}, "the slaves are the bottleneck"),
    ],
)
def test_what_nobody_may_overlook_is_said(given: dict[str, Any], said: str) -> None:
    assert any(said in remark for remark in sizes(**given).remarks)


def test_nothing_is_said_where_nothing_is_to_be_minded() -> None:
    assert sizes(clusters=8, sync_every=2000).remarks == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"params": 0}, "greater than or equal to 1"),
        ({"params": 10, "slaves": 16}, "cannot be divided among 16 slaves"),
        ({"params": "many"}, "is not a count"),
        ({"link": 0}, "greater than 0"),
        ({"link": "10GBps"}, "is not a rate"),
        ({"wire": "bf8"}, "none of float32"),
        ({"max_clusters": 3}, "raise it, or leave it out"),
        ({"chunk_bytes": 4097}, "multiple of 4"),
        ({"disk_rate": "fast"}, "write it like"),
        ({"clusters": -1}, "greater than or equal to 1"),
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
    assert "--disk-rate 2.74e+09: " in told
    assert "measured: docs/performance.md" in told
    assert main.run([*words, "--wire", "bf16", "--disk-rate", "1 GB/s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["given"]["wire"] == "bfloat16"
    assert answer["quantities"]["push_bytes"]["value"] == 200e9
    assert answer["quantities"]["update_s"]["numbers"]["disk_rate"] == 1e9


@pytest.mark.parametrize("words", [["--params", "1B"], ["--params", "1B", "--clusters", "x"], ["--link", "-1"]])
def test_the_command_refuses_in_sentences(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["size", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("dips: ")
    assert "Traceback" not in told.err


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
