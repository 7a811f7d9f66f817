"""The documents are true: what they tell to type works, and what they name exists."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.dips_command import dips_started, ended, master_file, started, until
from support.document_walk import NOTES, WRITTEN_ADDRESS, Walk
from support.documents import (
    EXAMPLES,
    SHELL,
    Block,
    anchors,
    blocks,
    documents,
    header_commands,
    links,
    shell_lines,
    spans,
    table,
    without_environment,
)
from support.repository import PACKAGES, ROOT, texts

from dips.core import errors
from dips.core.config import load
from dips.core.errors import DipsError, RefusalCode
from dips.launch import cli
from dips.launch.demo_plan import DemoWish, planned_faults, speed_gaps
from dips.launch.faults import CLUSTER, SLAVE
from dips.launch.run_file import read_run_file
from dips.master.config import MasterConfig

DOCUMENTS = documents()
BLOCKS = [block for file in DOCUMENTS for block in blocks(file)]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL]
RUNNING = ROOT / "docs" / "running.md"
MISTAKES = table(RUNNING, "When a command says no")

each_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))


# ---- what is told to be typed ----


def walks() -> list[Path]:
    """The documents with shell blocks that run."""
    return sorted({block.file for block in SHELL_BLOCKS if not block.not_run})


def test_there_is_something_to_check() -> None:
    assert len(SHELL_BLOCKS) >= 15
    assert {block.language for block in BLOCKS} <= {*SHELL, "python", "yaml", "toml", "ini", "mermaid", ""}
    assert RUNNING in walks()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in (*SHELL, "python")], ids=str)
def test_a_block_runs_or_says_why_not(block: Block) -> None:
    assert NOTES.fullmatch(block.note) or block.note.startswith("generated:"), block.note
    if block.language == "python":
        compile(block.text, str(block), "exec")
        assert block.not_run or block.text == loop_of_the_readme()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_toml_can_be_read(block: Block) -> None:
    assert tomllib.loads(block.text)


@each_document
def test_reasons_name_tests_that_exist(file: Path) -> None:
    for block in blocks(file):
        for name in re.findall(r"tests/[\w/]+\.py|\.ci/\w+", block.not_run):
            assert (ROOT / name).is_file(), f"{block}: {name}"


@pytest.mark.parametrize("file", walks(), ids=lambda file: file.name)
def test_a_documents_shell_blocks_run_in_their_order(file: Path, tmp_path: Path) -> None:
    with Walk(tmp_path) as walk:
        for block in blocks(file):
            if block.language in SHELL and not block.not_run:
                walk.type(block)
        walk.wait_for_background()
    if file == RUNNING:
        assert_running_shows_what_it_tells(walk)


def assert_running_shows_what_it_tells(walk: Walk) -> None:
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


def test_the_examples_address_is_that_of_the_documents() -> None:
    _, plan = read_run_file(ROOT / "examples" / "server.toml")
    assert plan.master.listen == WRITTEN_ADDRESS
    assert (plan.master.min_clusters, len(plan.clusters)) == (2, 0)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_header_tells_only_what_the_documents_tell_too(example: Path) -> None:
    commands = header_commands(example)
    assert commands
    told = {" ".join(without_environment(line)) for block in SHELL_BLOCKS for line in shell_lines(block)}
    assert {" ".join(without_environment(command)) for command in commands} <= told


# ---- commands ----


def commands_of(file: Path) -> set[str]:
    lines = {line for block in blocks(file) if block.language in SHELL for line in shell_lines(block)}
    lines |= {span for span in spans(file) if not any(span == row[0].strip("`") for row in MISTAKES)}
    return {line for line in lines if without_quotes_error(line)[:1] in (["dips"], ["make"])}


def without_quotes_error(line: str) -> list[str]:
    """The words of a code span; none when it is no command line at all."""
    try:
        return without_environment(line)
    except ValueError:
        return []


@functools.cache
def command_named(name: str) -> Any:
    return typer.main.get_command(cli.build_app(name)).commands[name]  # type: ignore[attr-defined]


def parse(command: str) -> None:
    """Raises what the command line would: an unknown command, option or value. Runs nothing."""
    words = [word for word in without_environment(command)[1:] if word != "--help"]
    if not words or words == ["--version"]:
        return
    names = {known.name for known in cli.COMMANDS}
    assert words[0] in names, f"{command!r} is not one of {sorted(names)}"
    if len(words) > 1:
        command_named(words[0]).make_context(words[0], words[1:])


def test_an_unknown_option_would_be_found() -> None:
    parse("dips status --run-dir runs/x --watch")
    with pytest.raises(Exception, match="nonsense"):
        parse("dips status --nonsense")
    with pytest.raises(AssertionError, match="'begin'"):
        parse("dips begin")


@each_document
def test_every_command_exists_with_these_options(file: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in sorted(commands_of(file)):
        if command.startswith("make"):
            wanted = [word for word in shlex.split(command)[1:] if "=" not in word]
            assert targets.issuperset(wanted), command
        else:
            parse(command)


@pytest.mark.parametrize("example", [e for c in cli.COMMANDS for e in c.examples])
def test_the_examples_of_help_exist_with_these_options(example: str) -> None:
    parse(example.partition("  (")[0])


def test_the_documents_name_every_command() -> None:
    told = {words[1] for file in DOCUMENTS for c in commands_of(file) if len(words := shlex.split(c)) > 1}
    changes = (ROOT / "CHANGELOG.md").read_text()
    for command in cli.COMMANDS:
        assert command.name in told or f"dips {command.name}" in RUNNING.read_text(), command.name
        assert f"`{command.name}`" in changes or f"`dips {command.name}`" in changes, command.name


# ---- mistakes, exit codes, refusals ----


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row[0].strip("`"))
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
    assert cli.run(words[1:]) == int(code)
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert remedy


def kinds(base: type[DipsError] = DipsError) -> list[type[DipsError]]:
    return [base, *(kind for below in base.__subclasses__() for kind in kinds(below))]


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = [(int(code), name.strip("`")) for code, name, _ in table(RUNNING, "Exit codes")]
    named = {(code, name) for code, name in rows if name}
    assert named == {(kind.exit_code, kind.__name__) for kind in kinds() if kind.__module__ == "dips.core.errors"}
    others = {0, errors.NAME_TAKEN_EXIT, errors.INTERRUPTED, errors.TERMINATED}
    assert {code for code, name in rows if not name} == others


def test_every_refusal_is_explained() -> None:
    text = RUNNING.read_text().partition("## When another process says no\n")[2]
    told = set(re.findall(r"`([A-Z_]{3,})`", text)) & {code.name for code in RefusalCode}
    assert told == {code.name for code in RefusalCode} - {"UNSPECIFIED"}
    assert all(all(row) for row in table(RUNNING, "When another process says no"))


# ---- what is named ----


@each_document
def test_links_lead_somewhere(file: Path) -> None:
    for link in links(file):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_document() -> None:
    readme = ROOT / "README.md"
    reached = {(ROOT / link).resolve() for link in links(readme) if "://" not in link}
    for file in DOCUMENTS:
        assert file == readme or file in reached or file.parent in reached, file


@each_document
def test_files_that_are_named_exist(file: Path) -> None:
    names = {path.name for path in texts()}
    for span in spans(file):
        if not re.fullmatch(r"[\w./*-]+", span) or span == ".proto":  # a kind of file, not a file
            continue
        folders = (*PACKAGES, "tests", "docs", "examples", "benchmarks", "deploy", "src", ".ci")
        if span.split("/")[0] in folders and "/" in span:
            assert list(ROOT.glob(span.rstrip("/"))), f"{file.name} names {span}"
        elif span.endswith((".py", ".proto", ".txt")):
            assert any(Path(name).match(span) for name in names), f"{file.name} names {span}"


@each_document
def test_python_names_exist(file: Path) -> None:
    for span in spans(file):
        if re.fullmatch(r"dips(\.\w+)+", span):
            importable(span)


def importable(name: str) -> None:
    """Raises when no module, or nothing in a module, has this name."""
    module, _, last = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        getattr(importlib.import_module(module), last)


# ---- the README's own words ----


def test_defaults_that_the_readme_tells() -> None:
    told = re.search(
        r"defaults are H (\d+), learning rate ([\d.]+), Nesterov momentum ([\d.]+), clip (\d+)\.",
        " ".join((ROOT / "README.md").read_text().split()),
    )
    assert told
    knobs = {"run_id": "x", "directory": "x"}
    run = load(MasterConfig, "master", environment={}, overrides=knobs).value.to_run_config()
    have = (run.settings.sync_every_steps, run.settings.outer_lr, run.penalty.outer_momentum, run.penalty.clip_norm)
    assert have == tuple(float(number) for number in told.groups())


def test_the_demo_that_the_readme_tells() -> None:
    readme, wish = " ".join((ROOT / "README.md").read_text().split()), DemoWish()
    *most, last = (f"{gap:.0%}".rstrip("%") for gap in speed_gaps(wish.clusters))
    assert f"clusters that are {', '.join(most)} and {last} % slower" in readme
    assert (wish.minutes, wish.slaves, wish.clusters) == (3, 2, 4)
    assert "about three minutes: one master, two slaves, and four clusters" in readme
    assert f"`{wish.run_dir}/loss.png` and `{wish.run_dir}/report.json`" in readme
    assert {fault.kind for fault in planned_faults(wish)} == {CLUSTER, SLAVE}


def loop_of_the_readme() -> str:
    (block,) = [block for block in blocks(ROOT / "README.md") if block.language == "python" and not block.not_run]
    return block.text


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
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, batch):
        return (self.layer(batch) - 3.0) ** 2


batches = (torch.ones(16, 4) for _ in itertools.count())
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
        assert ended(loop, 60, log) == 0, log.read_text()
    told = last_words(log)
    assert (told["steps"], told["version"]) == ("10000", "None")
    assert float(told["loss"]) < 0.1


def test_the_readmes_loop_as_two_clusters_of_the_readmes_servers(tmp_path: Path) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("up", "a", "b")}
    file, run_dir = tmp_path / "server.toml", tmp_path / "run"
    text = (ROOT / "examples" / "server.toml").read_text()
    file.write_text(text.replace('"runs/own-loop"', f'"{run_dir}"'))
    with dips_started("up", file, log=logs["up"], DIPS_MASTER_LISTEN="127.0.0.1:0") as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log=logs["up"])
        there = {"DIPS_MASTER": master_file(run_dir)["address"]}
        loops = {name: written_loop(tmp_path, name, seed) for seed, name in enumerate("ab")}
        of = {name: {**there, "DIPS_CLUSTER": name, "DIPS_KEYS": str(run_dir / "keys" / name)} for name in "ab"}
        with (
            started(sys.executable, loops["a"], log=logs["a"], cwd=tmp_path, **of["a"]) as a,
            started(sys.executable, loops["b"], log=logs["b"], cwd=tmp_path, **of["b"]) as b,
        ):
            assert ended(a, 60, logs["a"]) == 0, logs["a"].read_text()
            assert ended(b, 60, logs["b"]) == 0, logs["b"].read_text()
        assert ended(up, 30, logs["up"]) == 0, logs["up"].read_text()
    told = [last_words(logs[name]) for name in "ab"]
    assert told[0]["version"] == told[1]["version"] != "None"
    assert told[0]["model"] == told[1]["model"]  # both hold the run's last version
    assert int(told[0]["steps"]) + int(told[1]["steps"]) >= 200_000 / (16 * 64)
