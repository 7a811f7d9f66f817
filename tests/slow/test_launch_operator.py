"""`dips up` without clusters: nothing to export, and no process that outlives it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.dips_command import children, dips_started, ended, is_running
from support.waiting import until


def run_file(folder: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(
        f'[run]\nid = "served"\ndirectory = "{folder / "run"}"\nslaves = 2\n[slave]\nmemory_bytes = "8 MiB"\n'
    )
    return file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "up.log"
    with dips_started("up", run_file(tmp_path), log=log) as process:
        until(lambda: len(children(process.pid)) == 3, "three processes", log)
        mine = children(process.pid)
        process.send_signal(number)
        assert ended(process, log) == (130 if number == signal.SIGINT else -number)
    until(lambda: not any(map(is_running, mine)), "the end of its children")
    assert "Traceback" not in log.read_text()
