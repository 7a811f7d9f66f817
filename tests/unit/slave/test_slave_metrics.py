"""The slave's collector: every metric of the list from a state under a hand-turned clock, and what the port counted."""

from __future__ import annotations

import pytest
from support.manual_clock import ManualClock
from support.metric_samples import Samples, samples
from support.slave_bench import SlaveBench
from support.slave_values import R1, V0, snapshot

from dips.core.errors import RefusalCode, Refused
from dips.core.layout import Layout, Parameter
from dips.core.messages import SlaveBeat
from dips.slave.data_port import Figures
from dips.slave.memory import ShardMemory
from dips.slave.metrics import METRICS, PREFIX, Counts, completed, families_at

FIGURES = Figures(SlaveBeat(100, 200, 3, 0, 1, refused_connections=4), {"BUSY": 3}, {"a": 60, "b": 40})
GAUGES = {"memory_limit_bytes": 1 << 20, "resident_bytes": 1000, "budget_bytes": 5000, "disk_free_bytes": None}


def scraped(bench: SlaveBench, counts: Counts, memory: ShardMemory | None = None) -> Samples:
    families = completed(families_at(counts, "s0", bench.state, memory), counts, FIGURES, GAUGES, 1e9)
    return samples(families, PREFIX, METRICS)


@pytest.fixture
def bench() -> SlaveBench:
    return SlaveBench()


@pytest.fixture
def counts() -> Counts:
    return Counts(ManualClock())


def test_a_slave_without_memory_says_so(bench: SlaveBench, counts: Counts) -> None:
    found = scraped(bench, counts)
    assert found["shard_phase", "empty"] == 1
    assert found["readable_versions",] == 0
    assert ("version",) not in found
    assert ("memory_bytes", "theta") not in found
    assert ("snapshot_age_seconds",) not in found


def test_a_slave_that_serves_a_version(bench: SlaveBench, counts: Counts) -> None:
    bench.ready(snapshot(V0, R1))
    blocks = Layout((Parameter("w", (8, 8), "float32", "w"),)).blocks
    found = scraped(bench, counts, ShardMemory(blocks, 64, 2, 1 << 20))
    assert found["version",] == found["durable_version",] == V0.v
    assert (found["memory_bytes", "theta"], found["memory_bytes", "momentum"]) == (3 * 256, 2 * 256)
    assert found["memory_bytes", "staging"] == 2 * 256


def test_what_the_data_port_counted_and_sizes(bench: SlaveBench, counts: Counts) -> None:
    found = scraped(bench, counts)
    assert (found["staged_bytes_total",], found["served_bytes_total",]) == (100, 200)
    assert (found["staging_open",], found["refused_connections_total",]) == (1, 4)
    assert found["refused_messages_total", "BUSY"] == 3
    assert found["refused_messages_total", "CHUNK"] == 0, "there before the first one, else its rise is not seen"
    assert (found["cluster_staged_bytes_total", "a"], found["cluster_staged_bytes_total", "b"]) == (60, 40)
    assert (found["resident_bytes",], found["budget_bytes",], found["memory_limit_bytes",]) == (1000, 5000, 1 << 20)
    assert ("disk_free_bytes",) not in found, "the disk does not answer"


def test_jobs_snapshots_and_updates_take_the_clocks_time(bench: SlaveBench, counts: Counts) -> None:
    clock = counts.clock
    assert isinstance(clock, ManualClock)
    with counts.job("prepare"):
        with counts.update(n_elems=1_000_000, pushes=2):
            clock.advance(0.5)
        with counts.snapshot():
            clock.advance(2.0)
    clock.advance(10.0)
    with pytest.raises(Refused), counts.job("commit"):
        raise Refused(RefusalCode.DISK, "the disk is full")
    found = scraped(bench, counts)
    assert found["update_seconds",] == 0.5
    assert found["update_floor_seconds",] == pytest.approx(6 * 4_000_000 / 1e9)
    assert found["snapshot_age_seconds",] == 10.0
    sums = [sample for sample in counts.collect()["job_seconds"].samples if sample.name.endswith("_sum")]
    assert [(sample.labels["kind"], sample.value) for sample in sums] == [("prepare", 2.5)]
    assert found["job_seconds", "prepare"] == 1
    assert found["job_failures_total", "commit"] == 1
    assert found["job_failures_total", "prepare"] == 0
    assert ("job_seconds", "commit") not in found


def test_lines_of_the_tape_are_counted(bench: SlaveBench, counts: Counts) -> None:
    for kind in ("staged", "staged", "unlinked", "refused_command"):
        counts.count_kind(kind)
    found = scraped(bench, counts)
    assert (found["link_losses_total",], found["staged_pushes_total",]) == (1, 2)
