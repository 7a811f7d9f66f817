"""`dips logs` and `dips doctor` beside a real run, and what `dips up` refuses before anything is made."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import ROOT, dips, dips_started, end_at_a_limit, ended, master_file, published
from support.ports import own_port
from support.waiting import until

from dips.core.observe.logs import parse
from dips.local.log_files import find_logs

RUN = """
[run]
id = "told"
directory = "{directory}"
{more}
[master]
listen = "127.0.0.1:{port}"
sync_every = 8
[slave]
memory_bytes = "64 MiB"
[train]
data = ["{text}"]
[[clusters]]
id = "a"
"""
TEXT = ROOT / "src" / "dips" / "cli"


def write(folder: Path, port: int = 0, more: str = "") -> Path:
    file = folder / "run.toml"
    file.write_text(RUN.format(directory=folder / "run", port=port, text=TEXT, more=more))
    return file


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", own_port())) as server:
        yield server.getsockname()[1]


def json_lines(*words: object) -> list[dict[str, Any]]:
    told = dips("logs", *words, "--json")
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


@pytest.fixture(scope="module")
def told_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended, with logs for machines."""
    folder = tmp_path_factory.mktemp("told")
    log, run_dir = folder / "up.log", folder / "run"
    with dips_started("up", write(folder), "--log-format", "json", log=log) as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log)
        until(lambda: published(run_dir) >= 1, "a version", log)
        end_at_a_limit(run_dir)
        assert ended(up, log) == 0, log.read_text()
    return run_dir


def test_every_line_of_every_process_is_json(told_run: Path) -> None:
    files = find_logs(told_run)
    assert {file.source for file in files} == {"master", "s0", "a"}
    for file in files:
        lines = file.path.read_text().splitlines()
        assert all(parse(line) is not None and line.startswith("{") for line in lines), file.path


def test_a_cause_tells_the_story_over_all_processes(told_run: Path) -> None:
    merged = [line for line in json_lines(told_run) if line["sentence"].startswith("version 1:1:")]
    (cause,) = {line["cause"] for line in merged if line["role"] == "master"}
    assert re.fullmatch(r"r1\.\d+", cause)
    story = json_lines(told_run, "--cause", cause)
    assert {line["role"] for line in story} == {"master", "slave"}
    assert {line["cause"] for line in story} == {cause}
    assert any(line["sentence"].startswith("prepared ") for line in story)


def test_no_key_and_no_text_is_in_a_log(told_run: Path) -> None:
    said = "".join(file.path.read_text() for file in find_logs(told_run))
    for key in (told_run / "keys").rglob("*.key"):
        secret = key.read_text().splitlines()[1]
        assert secret not in said
    assert "PRIVATE KEY" not in said


def test_a_taken_port_is_one_sentence_and_nothing_is_made(tmp_path: Path) -> None:
    with taken_port() as port:
        file = write(tmp_path, port)
        told = dips("up", file)
        doctored = dips("doctor", file)
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert f"the master cannot listen at 127.0.0.1:{port}: Address already in use: end what listens there" in line
    assert not (tmp_path / "run").exists()
    assert doctored.returncode == 1
    assert f"FAIL  ports: the master cannot listen at 127.0.0.1:{port}" in doctored.stdout
