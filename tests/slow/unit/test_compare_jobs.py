"""Which runs a comparison is made of, and when a kept result is that of the same run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.compare_records import record
from support.repository import ROOT

from dips.core.errors import ConfigError
from dips.lab.compare import jobs as compare_jobs
from dips.lab.compare.jobs import ComparisonJob, Results, jobs_of, program_digest
from dips.lab.compare.setup import load_setup

SETUP = load_setup("small")
JOB = ComparisonJob("dips", 1, SETUP, text="t")


def test_jobs_of_methods_and_seeds() -> None:
    text = ROOT / "src" / "dips" / "cli"
    jobs = jobs_of(["dp", "dips"], [1, 2], SETUP, [text])
    assert [(job.method, job.seed) for job in jobs] == [("dp", 1), ("dips", 1), ("dp", 2), ("dips", 2)]
    assert len({job.text for job in jobs}) == 1
    dp, dips = jobs_of(["dp", "dips"], [1], SETUP, [text], "nan")
    assert (dp.inject, dips.inject) == ("", "nan")
    assert (dp.name, dips.name) == ("dp-1", "dips-nan-1")
    assert dips.title == "dips nan, seed 1"
    setup = SETUP.with_overrides(master={"momentum_scaling": "tokens"})
    assert jobs_of(["dips"], [1], setup, [text])
    with pytest.raises(ConfigError, match="set-up small, method averaging"):
        jobs_of(["dips", "averaging"], [1], setup, [text])


def test_a_kept_result_is_found_again_by_the_same_run_alone(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert results.load(JOB) is None
    results.keep(JOB, record())
    assert results.load(JOB) == record()
    assert json.loads((tmp_path / "runs" / "dips-1.json").read_text())["schema"] == "dips-compare-run/1"
    results.keep(JOB, record())
    assert results.load(replace(JOB, setup=SETUP.with_overrides(inner_steps=8))) is None
    assert results.load(replace(JOB, text="other")) is None
    assert results.load(replace(JOB, seed=2)) is None
    assert results.load(replace(JOB, inject="nan")) is None


def test_a_changed_program_repeats_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path)
    results.keep(JOB, record())
    monkeypatch.setattr(compare_jobs, "program_digest", lambda: "changed")
    assert results.load(JOB) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "other/1"}', "{"])
def test_a_file_that_is_no_result_is_not_used(tmp_path: Path, content: str) -> None:
    results = Results(tmp_path)
    results.folder.mkdir()
    results.path(JOB).write_text(content)
    assert results.load(JOB) is None


def test_a_set_ups_name_and_words_are_not_its_content() -> None:
    assert replace(JOB, setup=SETUP.model_copy(update={"name": "mine"})).digest() == JOB.digest()
    assert replace(JOB, variant="gaps-40").digest() == JOB.digest()
    assert replace(JOB, method="dynamic").digest() != JOB.digest()


def test_what_computes_a_run_is_in_its_digest_and_what_only_shows_it_is_not() -> None:
    modules = compare_jobs.computing_modules()
    computing = {
        "dips.lab.compare.engine", "dips.lab.compare.setup", "dips.trainer.train",
        "dips.lab.sim.seed_run", "dips.master.state.penalty", "dips.slave.calculation", "dips.core.net.payloads",
    }  # fmt: skip
    assert computing <= set(modules)
    assert any(name.startswith("dips.judge.") for name in modules), "the judge can end a run"
    assert not {f"dips.lab.compare.{name}" for name in ("report", "pictures", "figures", "speed", "pool")} & set(
        modules
    )
    assert not any(name.startswith(("dips.cli", "dips.planner")) for name in modules)
    assert len(program_digest()) == 32


def test_other_source_of_a_module_that_computes_is_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = program_digest.__wrapped__()
    changed = tmp_path / "engine.py"
    changed.write_text("# another engine\n")
    modules = {**compare_jobs.computing_modules(), "dips.lab.compare.engine": changed}
    monkeypatch.setattr(compare_jobs, "computing_modules", lambda: modules)
    assert program_digest.__wrapped__() != before
