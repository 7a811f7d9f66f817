"""`dips logs` and `dips doctor` beside a real run, and what `dips up` refuses before anything is made."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dips_command import ROOT, dips, dips_started, end_at_a_limit, ended, environment, master_file, published
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
def told_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run to its end with logs for machines: its directory, what --follow said, and the doctor's words meanwhile."""
    folder = tmp_path_factory.mktemp("told")
    file, log, run_dir = write(folder), folder / "up.log", folder / "run"
    with dips_started("up", file, "--log-format", "json", log=log) as up:
        until(lambda: "address" in master_file(run_dir), "the master's address", log)
        follower = subprocess.Popen(
            [sys.executable, "-m", "dips.cli", "logs", str(run_dir), "--follow", "--role", "master"],
            stdout=subprocess.PIPE, env=environment(), cwd=ROOT,
        )  # fmt: skip
        doctored = dips("doctor", file, "--json")
        until(lambda: published(run_dir) >= 1, "a version", log)
        end_at_a_limit(run_dir)
        assert ended(up, log) == 0, log.read_text()
    follower.send_signal(signal.SIGINT)
    followed = follower.communicate()[0].decode()
    assert follower.returncode == 130
    return run_dir, followed, doctored.stdout


def test_every_line_of_every_process_is_json(told_run: tuple[Path, str, str]) -> None:
    files = find_logs(told_run[0])
    assert {file.source for file in files} == {"master", "s0", "a"}
    for file in files:
        lines = file.path.read_text().splitlines()
        assert all(parse(line) is not None and line.startswith("{") for line in lines), file.path


def test_all_processes_are_told_in_the_order_of_time(told_run: tuple[Path, str, str]) -> None:
    told = json_lines(told_run[0])
    times = [line["wall_s"] for line in told]
    assert times == sorted(times)
    assert {(line["role"], line["name"]) for line in told} >= {
        ("launch", "master"), ("master", "told"), ("launch", "s0"), ("slave", "s0"), ("worker", "a"),
    }  # fmt: skip
    assert told[0]["sentence"].startswith("master, start 1: ")


def test_a_cause_tells_the_story_over_all_processes(told_run: tuple[Path, str, str]) -> None:
    run_dir, _, _ = told_run
    merged = [line for line in json_lines(run_dir) if line["sentence"].startswith("version 1:1:")]
    (cause,) = {line["cause"] for line in merged if line["role"] == "master"}
    assert re.fullmatch(r"r1\.\d+", cause)
    story = json_lines(run_dir, "--cause", cause)
    assert {line["role"] for line in story} == {"master", "slave"}
    assert {line["cause"] for line in story} == {cause}
    assert any(line["sentence"].startswith("prepared ") for line in story)


def test_following_says_what_comes(told_run: tuple[Path, str, str]) -> None:
    assert "master told" in told_run[1]
    assert ": version 1:1: " in told_run[1]
    assert "the run has ended" in told_run[1]
    assert "Z I slave s0" not in told_run[1]


def test_no_key_and_no_text_is_in_a_log(told_run: tuple[Path, str, str]) -> None:
    run_dir, _, _ = told_run
    said = "".join(file.path.read_text() for file in find_logs(run_dir))
    for key in (run_dir / "keys").rglob("*.key"):
        secret = key.read_text().splitlines()[1]
        assert secret not in said
    assert "PRIVATE KEY" not in said


def test_the_doctor_knows_a_run_that_is_under_way(told_run: tuple[Path, str, str]) -> None:
    found = json.loads(told_run[2])["findings"]
    (directory,) = [one for one in found if one["check"] == "directory" and one["grade"] == "WARN"]
    assert "a launcher runs in" in directory["sentence"]
    assert not [one for one in found if one["check"] in ("ports", "keys") and one["grade"] == "FAIL"]


# ---- what is refused, with nothing made ----


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
