"""A run without clusters: what an operator can ask and wish, and what is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.dips_command import children, dips, dips_started, ended, is_running, master_file
from support.waiting import until


@dataclass(frozen=True)
class Served:
    """A running `dips up` with a master and two slaves."""

    pid: int
    file: Path
    run_dir: Path
    address: str

    @property
    def keys(self) -> Path:
        return self.run_dir / "keys" / "operator"


def run_file(folder: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(
        f'[run]\nid = "served"\ndirectory = "{folder / "run"}"\nslaves = 2\n[slave]\nmemory_bytes = "8 MiB"\n'
    )
    return file


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    file, log = run_file(folder), folder / "up.log"
    with dips_started("up", file, log=log) as process:
        until(lambda: "address" in master_file(folder / "run"), "the master's address", log)
        address = master_file(folder / "run")["address"]

        def slaves_there() -> bool:
            told = dips("status", folder / "run", "--json")
            return told.returncode == 0 and sum(slave["alive"] for slave in json.loads(told.stdout)["slaves"]) == 2

        until(slaves_there, "two slaves", log)
        yield Served(process.pid, file, folder / "run", address)


def test_status_says_why_nothing_moves(served: Served) -> None:
    text = dips("status", served.run_dir)
    assert text.returncode == 0
    assert "run served" in text.stdout
    assert "slaves s0, s1 wait for the model's layout" in text.stdout


def test_status_as_json_by_the_environment(served: Served) -> None:
    told = dips("status", "--json", DIPS_MASTER=served.address, DIPS_KEYS=str(served.keys))
    status = json.loads(told.stdout)
    assert (status["run_id"], status["epoch"], status["published"]) == ("served", 1, None)
    assert [slave["slave_id"] for slave in status["slaves"]] == ["s0", "s1"]


def test_status_can_be_watched_by_a_script(served: Served, tmp_path: Path) -> None:
    log = tmp_path / "watch.log"
    with dips_started(
        "status", served.address, "--keys", served.keys, "--watch", "--json", "--interval", "0.1", log=log
    ) as process:
        until(lambda: len(log.read_text().splitlines()) >= 3, "three looks", log)
        process.send_signal(signal.SIGINT)
        assert ended(process, log) == 130
    assert json.loads(log.read_text().splitlines()[0])["run_id"] == "served"
    assert "Traceback" not in log.read_text()


def test_there_is_nothing_to_export_yet(served: Served) -> None:
    told = dips("export", served.run_dir, "--to", served.run_dir / "m.safetensors", "--wait", "0.5")
    assert told.returncode == 4
    assert "slaves s0, s1 wait for the model's layout" in told.stderr or "no version" in told.stderr
    assert not (served.run_dir / "m.safetensors").exists()


def test_a_launcher_that_is_told_to_end_ends_everything(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with dips_started("up", run_file(tmp_path), log=log) as process:
        until(lambda: len(children(process.pid)) == 3, "three processes", log)
        mine = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert ended(process, log) == 130
    assert not [pid for pid in mine if is_running(pid)]
    assert "Traceback" not in log.read_text()


def test_a_launcher_that_is_killed_leaves_no_orphans(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with dips_started("up", run_file(tmp_path), log=log) as process:
        until(lambda: len(children(process.pid)) == 3, "three processes", log)
        mine = children(process.pid)
        process.kill()
        until(lambda: not [pid for pid in mine if is_running(pid)], "the end of its children")
