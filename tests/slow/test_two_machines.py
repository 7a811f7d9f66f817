"""docs/start.md, "Two machines", is true: its blocks, typed in two network namespaces that only a cable joins, with a
program of one's own, and then the exported model in that program."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dips_command import ended, environment, started
from support.documents import SHELL, START, blocks_below, shell_lines
from support.repository import ROOT
from support.waiting import until

FIRST, SECOND = "10.0.0.1", "10.0.0.2"
HOME_OF_FIRST = "first"
"""Folder of the first machine; the second one reaches it by scp alone."""

MINE = """
import logging
from pathlib import Path

import torch
from torch import nn

import dips

BATCH, LENGTH, WIDTH = 16, 64, 128
TEXT = torch.tensor(list(Path(logging.__file__).read_bytes()))
TRAINING, HELD_OUT = TEXT[:-5000], TEXT[-5000:]


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.layers(self.token(text) + self.place.weight[: text.shape[1]], mask, is_causal=True))


def loss_of(model, rows):
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dips.DiLoCo(model, optimizer, tokens_per_step=BATCH * LENGTH, steps=10_000) as sync:
        while not sync.done:
            starts = torch.randint(len(TRAINING) - LENGTH, (BATCH, 1))
            loss = loss_of(model, TRAINING[starts + torch.arange(LENGTH + 1)])
            loss.backward()
            sync.report(loss)
            optimizer.step()
            optimizer.zero_grad()
    print("left after", sync.steps, "steps with version", sync.version)


if __name__ == "__main__":
    main()
"""

MEASURE = """
import safetensors.torch
import torch
from mine import HELD_OUT, LENGTH, MyModel, loss_of

rows = HELD_OUT[: len(HELD_OUT) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
model = MyModel().eval()
with torch.no_grad():
    before = loss_of(model, rows)
    safetensors.torch.load_model(model, "model.safetensors", strict=True)
    print(before.item(), loss_of(model, rows).item())
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed (apt-get install iproute2)"),
]


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a loopback of their own, joined by one cable."""
    names = (f"dips-first-{os.getpid()}", f"dips-second-{os.getpid()}")
    made = ip("netns", "add", names[0], check=False)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            for words in ("addr add {}/24 dev cable", "link set lo up", "link set cable up"):
                ip("netns", "exec", name, "ip", *words.format(address).split())
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def on(machine: str, line: str) -> list[str]:
    """A line of the page as a command of that machine: `dips`, `python` and the examples are the checkout's; cp stands
    for scp, since both machines share one disk here."""
    words = shlex.split(line.replace("examples/", f"{ROOT}/examples/"))
    if words[0] == "scp":
        words = ["cp", *(word.replace(f"{FIRST}:", f"../{HOME_OF_FIRST}/") for word in words[1:])]
    variables = [word for word in words if "=" in word.split("/")[0] and not word.startswith("-")]
    command = [word for word in words if word not in variables]
    programs = {"dips": [sys.executable, "-m", "dips.cli"], "python": [sys.executable]}
    command = [*programs.get(command[0], [command[0]]), *command[1:]]
    return ["ip", "netns", "exec", machine, "env", *variables, *command]


def typed(machine: str, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(on(machine, line), capture_output=True, text=True, cwd=folder, env=environment(), check=False)


def lines_of_the_page() -> tuple[str, list[str]]:
    """The settings file, and the commands in their order; the program is `mine.py` instead of the example."""
    found = blocks_below(START, "Two machines")
    [settings] = [block.text for block in found if block.language == "toml"]
    lines = [line for block in found if block.language in SHELL for line in shell_lines(block)]
    return settings, [line.replace("examples/own_loop.py", "mine.py") for line in lines]


def both_train(status: str) -> bool:
    return all(re.search(rf"^ *{name} +(?:TRAINING|AWAITING|PULLING|PUSHING)", status, re.MULTILINE) for name in "ab")


def test_the_page_is_typed_on_two_machines_with_a_model_of_ones_own(machines: tuple[str, str], tmp_path: Path) -> None:
    first, second = machines
    settings, (look, up, train_a, fetch, join, train_b, status, bring, verify, export) = lines_of_the_page()
    here, there = tmp_path / HOME_OF_FIRST, tmp_path / "second"
    for home in (here, there):
        home.mkdir()
        (home / "mine.py").write_text(MINE)
    (here / "two.toml").write_text(settings)
    looked = typed(first, look, here)
    assert looked.returncode == 0, looked.stdout
    assert f"slave s0: {FIRST}:0 is {FIRST}" in looked.stdout
    run_log, a_log, b_log = (tmp_path / name for name in ("up.log", "a.log", "b.log"))
    with started(*on(first, up), log=run_log, cwd=here) as run:
        until(lambda: f"scp -rp {FIRST}:" in run_log.read_text(), "the run's words for other machines", run_log)
        with started(*on(first, train_a), log=a_log, cwd=here) as a:
            until(lambda: "version 1:0" in typed(first, status, here).stdout, "version 0", a_log)
            assert typed(second, fetch, there).returncode == 0
            joined = typed(second, join, there)
            assert joined.returncode == 0, joined.stdout
            assert f"the data port of slave s0 at tcp://{FIRST}:29500 accepts these keys" in joined.stdout
            with started(*on(second, train_b), log=b_log, cwd=there) as b:
                until(lambda: both_train(typed(first, status, here).stdout), "both in the status", b_log)
                assert [ended(a, a_log), ended(b, b_log)] == [0, 0]
        assert ended(run, run_log) == 0
    assert "run two ended at version" in run_log.read_text()
    for machine, line, home in ((second, bring, there), (first, verify, here), (first, export, here)):
        done = typed(machine, line, home)
        assert done.returncode == 0, done.stdout + done.stderr
    (here / "measure.py").write_text(MEASURE)
    measured = typed(first, "python measure.py", here)
    assert measured.returncode == 0, measured.stderr
    before, after = map(float, measured.stdout.split())
    assert after < before - 1
