"""`dips compare` as it is, in a short form: real training by the real state machines, methods side by side.

The model is barely trained here, so what is asserted about losses is coarse; docs/convergence.md has the long form.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compare")
    (made / "short.toml").write_text(SHORT)
    return made


def test_asynchronous_training_costs_little_with_the_penalty_and_much_without(folder: Path) -> None:
    wish = ["--setup", folder / "short.toml", "--run-dir", folder / "run", "--jobs", 2, "--json"]
    told = dips("compare", "--methods", "dp,diloco-clip,async,dips", *wish)
    assert told.returncode == 0, told.stderr[-4000:]
    loaded = json.loads(told.stdout)
    assert loaded == json.loads((folder / "run" / "compare.json").read_text())
    clean = loaded["methods"]
    assert abs(clean["dips"]["minus"]["diloco-clip"]) < 0.5
    naive = clean["async"]["loss_mean"]
    assert naive is None or naive > clean["dips"]["loss_mean"] + 0.5


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
