"""What the documents name exists: files, links, commands with their options, exit codes, refusals, defaults."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from generate_docs import main as stale_pages
from papers.papers import ONLY_HERE
from support.document_walk import NOTES, WRITTEN_ADDRESS
from support.documents import (
    EXAMPLES,
    SHELL,
    START,
    Block,
    anchors,
    blocks,
    documents,
    header_commands,
    links,
    loop_of_the_readme,
    mistakes,
    shell_lines,
    spans,
    table,
    walks,
    without_environment,
)
from support.repository import PACKAGES, ROOT, SOURCE, texts

from dips.cli import main as cli
from dips.core import errors
from dips.core.config import load
from dips.core.errors import DipsError, RefusalCode
from dips.judge.verify import EXIT_BROKEN
from dips.local.demo import DemoOptions, planned_faults, speed_gaps
from dips.local.report import CLUSTER, SLAVE
from dips.local.run_file import read_run_file
from dips.master.config import MasterConfig

DOCUMENTS = documents()
BLOCKS = [block for file in DOCUMENTS for block in blocks(file)]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL]
MISTAKES = mistakes()

each_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))


def test_there_is_something_to_check() -> None:
    assert len(SHELL_BLOCKS) >= 15
    assert {block.language for block in BLOCKS} <= {*SHELL, "python", "yaml", "toml", "ini", "mermaid", ""}
    assert START in walks()


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
def test_reasons_links_and_python_names_are_right(file: Path) -> None:
    for block in blocks(file):
        for name in re.findall(r"tests/[\w/]+\.py|\.ci/\w+", block.not_run):
            assert (ROOT / name).is_file(), f"{block}: {name}"
    for span in spans(file):
        if re.fullmatch(r"dips(\.\w+)+", span):
            importable(span)


def test_the_examples_address_is_that_of_the_documents() -> None:
    plan = read_run_file(ROOT / "examples" / "server.toml")
    assert plan.master.listen == WRITTEN_ADDRESS
    assert (plan.master.min_clusters, len(plan.clusters)) == (2, 0)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_examples_header_tells_only_what_the_documents_tell_too(example: Path) -> None:
    commands = header_commands(example)
    assert commands
    told = {" ".join(without_environment(line)) for block in SHELL_BLOCKS for line in shell_lines(block)}
    assert {" ".join(without_environment(command)) for command in commands} <= told


def commands_of(file: Path) -> set[str]:
    lines = {line for block in blocks(file) if block.language in SHELL for line in shell_lines(block)}
    lines |= {span for span in spans(file) if not any(span == row[0].strip("`") for row in MISTAKES)}
    return {line for line in lines if without_quotes_error(line)[:1] in (["dips"], ["make"])}


def without_quotes_error(line: str) -> list[str]:
    """The words of a code span; none when it is no command line of ours at all."""
    if "dips" not in line and "make" not in line:
        return []
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
    if not words or words[0] in ("--version", "--install-completion", "--show-completion"):
        return
    names = {known.name for known in cli.commands_for("")}
    assert words[0] in names, f"{command!r} is not one of {sorted(names)}"
    if len(words) > 1:
        command_named(words[0]).make_context(words[0], words[1:])


@each_document
def test_every_command_exists_with_these_options(file: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in sorted(commands_of(file)):
        if command.startswith("make"):
            wanted = [word for word in shlex.split(command)[1:] if "=" not in word]
            assert targets.issuperset(wanted), command
        else:
            parse(command)


@pytest.mark.parametrize(
    "example", [*(e for c in cli.commands_for("") for e in c.examples), *(command for _, command in ONLY_HERE)]
)
def test_the_examples_of_help_and_of_the_report_exist_with_these_options(example: str) -> None:
    parse(example.partition("  (")[0])


def test_the_documents_name_every_command() -> None:
    told = {words[1] for file in DOCUMENTS for c in commands_of(file) if len(words := shlex.split(c)) > 1}
    changes = (ROOT / "CHANGELOG.md").read_text()
    for command in cli.commands_for(""):
        assert command.name in told or f"dips {command.name}" in START.read_text(), command.name
        assert f"`{command.name}`" in changes or f"`dips {command.name}`" in changes, command.name


def kinds(base: type[DipsError] = DipsError) -> list[type[DipsError]]:
    return [base, *(kind for below in base.__subclasses__() for kind in kinds(below))]


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = [(int(code), name.strip("`")) for code, name, _ in table(START, "Exit codes")]
    named = {(code, name) for code, name in rows if name}
    assert named == {(kind.exit_code, kind.__name__) for kind in kinds() if kind.__module__ == "dips.core.errors"}
    others = {0, EXIT_BROKEN, errors.NAME_TAKEN_EXIT, errors.KEYS_REFUSED_EXIT, errors.INTERRUPTED}
    others |= {errors.NOT_READ, errors.TERMINATED}
    assert {code for code, name in rows if not name} == others


def test_every_refusal_is_explained() -> None:
    text = START.read_text().partition("## When another process says no\n")[2]
    told = set(re.findall(r"`([A-Z_]{3,})`", text)) & {code.name for code in RefusalCode}
    assert told == {code.name for code in RefusalCode} - {"UNSPECIFIED"}
    assert all(all(row) for row in table(START, "When another process says no"))


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


@functools.cache
def names_of_texts() -> frozenset[str]:
    return frozenset(path.name for path in texts())


@each_document
def test_files_that_are_named_exist(file: Path) -> None:
    names = names_of_texts()
    for span in spans(file):
        if not re.fullmatch(r"[\w./*-]+", span) or span == ".proto":  # a kind of file, not a file
            continue
        folders = (*PACKAGES, "tests", "docs", "examples", "benchmarks", "tools", "deploy", "src", ".ci")
        if span.split("/")[0] in folders and "/" in span:
            found = [*ROOT.glob(span.rstrip("/")), *SOURCE.glob(span.rstrip("/"))]  # code is named without src/dips/
            assert found, f"{file.name} names {span}"
        elif span.endswith((".py", ".proto", ".txt")):
            assert "/" not in span, f"{file.name} names {span}"
            assert fnmatch.filter(names, span), f"{file.name} names {span}"


def test_every_step_of_the_ten_flows_is_a_function_in_its_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Ten flows")[1].split("\n## ")[0]
    steps = 0
    for files, functions in re.findall(r"^\| (`[^|]+`) \| ([^|]*) \| [^|]+ \|$", text, re.MULTILINE):
        groups = functions.split("; ") if functions else []
        for name, group in zip(re.findall(r"`([^`]+)`", files), groups, strict=bool(functions)):
            there = defined_in(next(path for path in (SOURCE / name, ROOT / name) if path.exists()))
            for function in re.findall(r"`([^`]+)`", group):
                assert function in there, f"{name} has no {function}"
                steps += 1
    assert steps >= 100


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    """Functions, classes and methods, the latter with their class."""

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{node.name}.")

    return frozenset(names(ast.parse(path.read_text()).body))


def importable(name: str) -> None:
    """Raises when no module, or nothing in a module, has this name."""
    module, _, last = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        getattr(importlib.import_module(module), last)


def test_defaults_that_the_readme_tells() -> None:
    told = re.search(
        r"defaults are H (\d+), learning rate ([\d.]+), Nesterov momentum ([\d.]+), and a clip at the usual norm\.",
        " ".join((ROOT / "README.md").read_text().split()),
    )
    assert told
    knobs = {"run_id": "x", "directory": "x"}
    run = load(MasterConfig, "master", environment={}, overrides=knobs).value.to_run_config()
    have = (run.settings.sync_every_steps, run.settings.outer_lr, run.penalty.outer_momentum)
    assert have == tuple(float(number) for number in told.groups())
    assert run.penalty.clip_scope == "auto"


def test_the_demo_that_the_readme_tells() -> None:
    readme, wish = " ".join((ROOT / "README.md").read_text().split()), DemoOptions()
    *most, last = (f"{gap:.0%}".rstrip("%") for gap in speed_gaps(wish.clusters))
    assert f"clusters that are {', '.join(most)} and {last} % slower" in readme
    assert (wish.minutes, wish.slaves, wish.clusters) == (3, 2, 4)
    assert "about three minutes: one master, two slaves, and four clusters" in readme
    assert f"`{wish.run_dir}/loss.png` and `{wish.run_dir}/report.json`" in readme
    assert {fault.kind for fault in planned_faults(wish)} == {CLUSTER, SLAVE}


def test_the_pages_that_a_program_writes_are_current() -> None:
    assert stale_pages([str(ROOT / "docs")]) == 0
