"""What the documents tell to type works: shell blocks in their order, the table of mistakes, and the README's loop."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from support.dips_command import dips_started, ended, master_file, started
from support.document_walk import Walk
from support.documents import EXAMPLES, START, loop_of_the_readme, mistakes, walked, walks
from support.repository import ROOT
from support.waiting import until

from dips.cli import main


@pytest.mark.parametrize("file", walks(), ids=lambda file: file.name)
def test_a_documents_shell_blocks_run_in_their_order(file: Path, tmp_path: Path) -> None:
    with Walk(tmp_path) as walk:
        for block in walked(file):
            walk.type(block)
        walk.wait_for_background()
    if file == START:
        assert_start_shows_what_it_tells(walk)


def assert_start_shows_what_it_tells(walk: Walk) -> None:
    said = "\n".join(walk.said.values())
    assert "paused by the operator: a look at the slave" in said
    assert "embedding.weight" in said
    assert re.search(r"held-out loss \d\.\d+ nats per byte: version \S+ of run mine", said)
    for name in ("a", "b"):
        (loop,) = [out for text, out in walk.said.items() if f"DIPS_CLUSTER={name} " in text]
        assert re.search(r"version 1:\d", loop)
    run = walk.folder / "runs" / "own-loop"
    assert (run / "logs" / "s0.log").is_file()
    assert (run / "tapes" / "s0.tape.jsonl").is_file()
    assert (run / "master" / "master.tape.jsonl").is_file()
    assert (run / "slaves" / "s0").is_dir()


@pytest.mark.parametrize("row", mistakes(), ids=lambda row: row[0].strip("`"))
def test_a_mistake_is_answered_as_the_document_says(
    row: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, code, says, remedy = row
    (tmp_path / "examples").mkdir()
    for example in EXAMPLES:
        (tmp_path / "examples" / example.name).write_bytes(example.read_bytes())
    monkeypatch.chdir(tmp_path)
    for name in ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER", "DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    words = shlex.split(command.strip("`"))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert main.run(words[1:]) == int(code)
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert remedy


SUBSTITUTES = """
import itertools, logging
import torch

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.set_num_threads(1)
torch.manual_seed({seed})
batch_size, sequence_length = 16, 64


class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 16)
        self.logits = torch.nn.Linear(16, 8)

    def forward(self, tokens):
        return self.logits(self.embedding(tokens))


tokens = torch.arange(8).repeat(batch_size, sequence_length // 8)
batches = ((tokens, (tokens + 1) % 8) for _ in itertools.count())
"""

AFTERWARDS = """
import hashlib
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(parameters).hexdigest()
print("loss", loss.item(), "steps", sync.steps, "version", sync.version, "model", digest)
"""


def written_loop(folder: Path, name: str, seed: int) -> Path:
    file = folder / f"loop_{name}.py"
    file.write_text(SUBSTITUTES.format(seed=seed) + loop_of_the_readme() + AFTERWARDS)
    return file


def last_words(log: Path) -> dict[str, str]:
    words = log.read_text().splitlines()[-1].split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_readmes_loop_without_a_master_is_ordinary_training(tmp_path: Path) -> None:
    log = tmp_path / "loop.log"
    with started(sys.executable, written_loop(tmp_path, "alone", 0), log=log, cwd=tmp_path) as loop:
        assert ended(loop, log) == 0, log.read_text()
    told = last_words(log)
    assert (told["steps"], told["version"]) == ("10000", "None")
    assert float(told["loss"]) < 0.1


def test_the_readmes_loop_as_two_clusters_of_the_readmes_servers(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("up", "a", "b")}
    file, run_dir = tmp_path / "server.toml", tmp_path / "run"
    text = (ROOT / "examples" / "server.toml").read_text()
    file.write_text(text.replace('"runs/own-loop"', f'"{run_dir}"'))
    with dips_started("up", file, log=logs["up"], DIPS_MASTER_LISTEN="127.0.0.1:0") as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", logs["up"])
        there = {"DIPS_MASTER": master_file(run_dir)["address"]}
        loops = {name: written_loop(tmp_path, name, seed) for seed, name in enumerate("ab")}
        of = {name: {**there, "DIPS_CLUSTER": name, "DIPS_KEYS": str(run_dir / "keys" / name)} for name in "ab"}
        with (
            started(sys.executable, loops["a"], log=logs["a"], cwd=tmp_path, **of["a"]) as a,
            started(sys.executable, loops["b"], log=logs["b"], cwd=tmp_path, **of["b"]) as b,
        ):
            assert ended(a, logs["a"]) == 0, logs["a"].read_text()
            assert ended(b, logs["b"]) == 0, logs["b"].read_text()
        assert ended(up, logs["up"]) == 0, logs["up"].read_text()
    told = [last_words(logs[name]) for name in "ab"]
    assert told[0]["version"] == told[1]["version"] != "None"
    assert told[0]["model"] == told[1]["model"]  # both hold the run's last version
    assert int(told[0]["steps"]) + int(told[1]["steps"]) >= 200_000 / (16 * 64)
