"""`dips compare` as it is, in a short form: real training by the real state machines, methods side by side.

The model is barely trained here, so what is asserted about losses is coarse; docs/convergence.md has the long form.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import children, dips, dips_started, ended, is_running
from support.waiting import until

SHORT = """
[run]
about = "a short comparison"
tokens = 26_624
inner_steps = 4
evaluations = 3
heldout_bytes = 8_192

[inner]
batch_size = 2
sequence_tokens = 64
lr = 2e-3
warmup_tokens = 5_000

[links]
up = "10 Gbps"
down = "10 Gbps"
"""
KNOWS_NOTHING = 5.55
"""ln 256: the loss, in nats per byte, of who guesses."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compare")
    (made / "short.toml").write_text(SHORT)
    return made


def compared(folder: Path, methods: str, *more: str) -> dict[str, Any]:
    wish = ["--setup", folder / "short.toml", "--run-dir", folder / "run", "--jobs", 2, "--json"]
    told = dips("compare", "--methods", methods, *wish, *more)
    assert told.returncode == 0, told.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(told.stdout)
    assert loaded == json.loads((folder / "run" / "compare.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def clean(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = compared(folder, "dp,diloco-clip,async,dips")["methods"]
    return found


@pytest.fixture(scope="module")
def spoilt(folder: Path, clean: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compared(folder, "dips", "--inject", "nan")["methods"]["dips"]
    return found


def test_every_method_trains_on_as_many_tokens(clean: dict[str, Any]) -> None:
    assert list(clean) == ["dp", "diloco-clip", "async", "dips"]
    for method in clean.values():
        assert method["seeds"]["1"]["tokens"] == 26_624
        assert method["seeds"]["1"]["virtual_s"] > 0
    for name in ("dp", "diloco-clip", "dips"):
        assert clean[name]["seeds"]["1"]["ended"] == "finished"
        assert clean[name]["loss_mean"] < KNOWS_NOTHING - 1
        assert clean[name]["seeds"]["1"]["curve"][-1][0] >= 26_624


def test_asynchronous_training_costs_little_with_the_penalty_and_much_without(clean: dict[str, Any]) -> None:
    assert abs(clean["dips"]["minus"]["diloco-clip"]) < 0.5
    naive = clean["async"]["loss_mean"]
    assert naive is None or naive > clean["dips"]["loss_mean"] + 0.5


def test_nobody_waits_for_the_slowest(clean: dict[str, Any]) -> None:
    if clean["async"]["seeds"]["1"]["ended"] == "finished":  # another processor's rounding may lose it on the way
        assert clean["async"]["virtual_s"] < clean["diloco-clip"]["virtual_s"]
    assert clean["dips"]["virtual_s"] < clean["diloco-clip"]["virtual_s"]
    assert clean["diloco-clip"]["share_of_ideal"] == pytest.approx(1 / 1.23, abs=0.03)


def test_rounds_are_what_the_method_says(clean: dict[str, Any]) -> None:
    synchronous, naive, ours = (clean[name]["seeds"]["1"] for name in ("diloco-clip", "async", "dips"))
    assert (synchronous["merged_per_round"], synchronous["staleness_max"]) == (4.0, 0)
    assert naive["merged_per_round"] == 1.0
    assert 1.0 < ours["merged_per_round"] < 4.0
    assert naive["staleness_mean"] > ours["staleness_mean"] > 0
    assert (naive["clipped"], ours["flags"]["false"]) == (0.0, 0)


def test_spoilt_pushes_are_kept_out_and_no_others(spoilt: dict[str, Any], clean: dict[str, Any]) -> None:
    seed = spoilt["seeds"]["1"]
    assert seed["flags"]["true"] >= 5
    assert (seed["flags"]["false"], seed["flags"]["missed"]) == (0, 0)
    assert seed["ended"] == "finished"
    assert spoilt["minus_clean"] == pytest.approx(spoilt["loss_mean"] - clean["dips"]["loss_mean"])
    assert abs(spoilt["minus_clean"]) < 0.3
    assert any(about.startswith("quarantine") for _, about, _ in seed["alarms"])


def test_files_are_left(spoilt: dict[str, Any], folder: Path) -> None:
    names = {path.name for path in (folder / "run" / "runs").iterdir()}
    assert names == {"dp-1.json", "diloco-clip-1.json", "async-1.json", "dips-1.json", "dips-nan-1.json"}
    for name in ("loss-tokens", "loss-time", "norms", "cosines"):
        assert (folder / "run" / f"{name}.png").stat().st_size > 5_000


def test_what_is_kept_is_shown_again_at_once(clean: dict[str, Any], folder: Path) -> None:
    wish = ["--setup", folder / "short.toml", "--run-dir", folder / "run", "--methods", "dips,dp"]
    told = dips("compare", *wish)
    assert told.returncode == 0, told.stderr[-4000:]
    assert "to do" not in told.stderr
    assert f"{clean['dips']['loss_mean']:.3f}" in told.stdout
    assert "held-out loss after 26.62k tokens" in told.stdout


def test_ctrl_c_ends_everything(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    wish = ["--setup", folder / "short.toml", "--run-dir", tmp_path / "run", "--methods", "dips", "--tokens", "50M"]
    with dips_started("compare", *wish, log=log) as process:
        until(lambda: "1 to do" in log.read_text() and len(children(process.pid)) >= 2, "a run on its way", log)
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert ended(process, log) == 130
    until(lambda: not any(is_running(pid) for pid in started), "the end of its processes", log)
    said = log.read_text()
    assert "interrupted: the run had not ended" in said
    assert "Traceback" not in said
