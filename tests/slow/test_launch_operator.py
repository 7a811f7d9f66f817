"""`dips up` without clusters: nothing to export, and no process that outlives it."""

from __future__ import annotations

import signal
from pathlib import Path

from support.dips_command import children, dips_started, ended, is_running
from support.waiting import until


def run_file(folder: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(
        f'[run]\nid = "served"\ndirectory = "{folder / "run"}"\nslaves = 2\n[slave]\nmemory_bytes = "8 MiB"\n'
    )
    return file


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
