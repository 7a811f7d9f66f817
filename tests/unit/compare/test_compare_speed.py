"""The figures of throughput: what each is made of, and what it says beside the paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from papers.findings import Kind
from support.compare_records import SHARES, speed_comparison
from support.papers import SOURCES_OF_DI_PS

from dips.lab.compare import speed
from dips.lab.compare.setup import ComparisonSetup, load_setup

EMULATED, WEAK = load_setup("emulated"), load_setup("weak-scaling")


def result(setup: ComparisonSetup, *columns: str) -> speed.SpeedResult:
    return speed.SpeedResult(setup, [(column, speed_comparison(setup)) for column in columns])


def test_what_figures_9_and_10_vary() -> None:
    figure = speed.SPEED_FIGURES["9"]
    jobs = speed.speed_jobs(figure, [load_setup(name) for name in figure.setups], 1, 8)
    assert [job.title for job in jobs[:2]] == ["emulated, 1 Gbit/s", "emulated, 2 Gbit/s"]
    assert [job.setup.name for job in jobs] == ["emulated"] * 4 + ["real"] * 4
    assert [job.setup.up_bits_per_s[-1] for job in jobs[:4]] == [1e9, 2e9, 5e9, 10e9]
    assert {job.setup.down_bits_per_s[0] for job in jobs} == {10e9}
    assert {job.rounds for job in jobs} == {8}
    jobs = speed.speed_jobs(speed.SPEED_FIGURES["10"], [WEAK], 1)
    assert [(job.column, job.setup.n_clusters) for job in jobs] == [(str(n), n) for n in range(1, 8)]
    assert jobs[-1].setup.clusters.gaps == WEAK.clusters.gaps


def test_shares_and_gains() -> None:
    found = result(EMULATED, "1 Gbit/s", "10 Gbit/s")
    assert found.shares("safe") == [0.88, 0.88]
    assert found.gains("safe") == pytest.approx([1.1, 1.1])
    assert found.gains("dips", "ring-async") == pytest.approx([0.99 / 0.96] * 2)
    assert found.ideal_gains() == pytest.approx([1.25, 1.25])
    assert speed.share_table(speed.SPEED_FIGURES["9"], found).row_count == len(SHARES)
    assert speed.gain_table(found).row_count == len(SHARES) + 1, "and the ideal"
    alone = speed.SpeedResult(WEAK, [("1", speed_comparison(WEAK))])
    assert "one cluster" in speed.SPEED_FIGURES["10"].reading(alone)
    columns = [("1", speed_comparison(WEAK, dict.fromkeys(SHARES, 1.0))), *[(n, speed_comparison(WEAK)) for n in "23"]]
    told = speed.SPEED_FIGURES["10"].reading(speed.SpeedResult(WEAK, columns))
    assert "from 2 to 3 clusters, of ideal: safe 88.0%;" in told
    assert "dips over synchronous DiLoCo 1.24x" in told


def test_files(tmp_path: Path) -> None:
    figure, found = speed.SPEED_FIGURES["9"], [result(EMULATED, "1 Gbit/s", "10 Gbit/s")]
    plain, picture = speed.write_speed(figure, found, tmp_path)
    assert picture.name == "figure-9-emulated.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads(plain.read_text())
    assert kept == json.loads(json.dumps(speed.speed_json(figure, found), allow_nan=False))
    assert kept["setups"]["emulated"]["columns"] == ["1 Gbit/s", "10 Gbit/s"]
    assert kept["setups"]["emulated"]["methods"]["dynamic"]["share_of_ideal"] == [0.95, 0.95]


def test_the_papers_report_reads_both_figures() -> None:
    nine = [result(EMULATED, "1 Gbit/s"), result(load_setup("real"), "1 Gbit/s")]
    told = json.loads(json.dumps(speed.speed_json(speed.SPEED_FIGURES["9"], nine)))
    findings = list(SOURCES_OF_DI_PS["speeds-9"].findings(told))
    assert [finding.published for finding in findings[:3]] == [(1.23, 1.38), (1.23, 1.38), (2.03, 10.35)]
    assert all(finding.kind is Kind.FITTED for finding in findings)
    columns = [(str(n), speed_comparison(WEAK)) for n in (1, 2)]
    told = json.loads(json.dumps(speed.speed_json(speed.SPEED_FIGURES["10"], [speed.SpeedResult(WEAK, columns)])))
    safe, dips, last = SOURCES_OF_DI_PS["speeds-10"].findings(told)
    assert (safe.ours, dips.ours, last.published) == ((0.88, 0.88), (0.99, 0.99), 5.74)
