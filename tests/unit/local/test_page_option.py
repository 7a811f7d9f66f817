"""Where a run on this machine has its status page, and how it is said."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from dips.local.demo import DemoOptions, make_plan, train_settings
from dips.local.log_files import HELDOUT_TAPE, tape_path
from dips.local.processes import LISTEN, WITHOUT, RunPlan, what_is_served, with_page
from dips.local.run_directory import UP, Mark, claim
from dips.local.run_file import read_run_file


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    wish = DemoOptions(run_dir=tmp_path)
    return make_plan(wish, train_settings(wish), 1000)


def of_run(plan: RunPlan, **settings: bool) -> RunPlan:
    return dataclasses.replace(plan, run=plan.run.model_copy(update=settings))


def test_a_run_gets_a_page_on_loopback_that_draws_what_its_evaluator_measures(plan: RunPlan, tmp_path: Path) -> None:
    assert plan.master.page_listen is None
    master = with_page(plan).master
    assert (master.page_listen, master.page_heldout) == (LISTEN, tape_path(tmp_path, HELDOUT_TAPE))
    assert LISTEN == "127.0.0.1:0"
    assert with_page(dataclasses.replace(plan, evaluate=None)).master.page_heldout is None
    asked = {"page_listen": "127.0.0.1:8080", "page_heldout": Path("elsewhere")}
    said = dataclasses.replace(plan, master=plan.master.model_copy(update=asked))
    master = with_page(said).master
    assert (master.page_listen, master.page_heldout) == ("127.0.0.1:8080", Path("elsewhere"))
    assert with_page(of_run(said, page=False)).master.page_listen is None


def test_without_it_a_base_installation_says_so(plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert with_page(plan) == plan
    with claim(tmp_path / "run", Mark("r", UP, "test")) as directory:
        assert [what_is_served(of_run(plan, page=page), directory, None) for page in (True, False)] == [[WITHOUT], []]
        assert ["https://x/?link=y" in line for line in what_is_served(plan, directory, "https://x/?link=y")] == [True]
        served = what_is_served(of_run(plan, metrics=True, page=False), directory, None)
        assert "/metrics/*.json" in served[0]


def test_a_run_file_says_whether_there_is_one(tmp_path: Path) -> None:
    for said, wanted in (("", True), ("page = false\n", False)):
        file = tmp_path / "run.toml"
        file.write_text(f'[run]\nid = "x"\ndirectory = "{tmp_path}"\n{said}[slave]\nmemory_bytes = "64 MiB"\n')
        assert read_run_file(file).run.page is wanted
