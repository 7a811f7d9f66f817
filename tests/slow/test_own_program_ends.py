"""A person's own loop that cannot take part ends with one sentence and its code, whatever the reason."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.dips_command import environment

from dips.core.net.security import Role
from dips.local.authority import Authority

LOOP = """
import atexit, torch, dips
atexit.register(print, "atexit")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dips.DiLoCo(model, optimizer, tokens_per_step=1) as sync:
    pass
"""


def ended(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(LOOP)
    return subprocess.run(
        [sys.executable, "mine.py"],
        cwd=folder,
        env=environment({"DIPS_CLUSTER": "a", "DIPS_MASTER": "127.0.0.1:1", **variables}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Made by a machine whose clock is a day ahead of this one's: as if this one's were a day behind."""
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    Authority.create(tmp_path / "keys", tomorrow)
    with Authority(tmp_path / "keys", tomorrow).locked() as authority:
        return authority.add(Role.CLUSTER, "a")


def test_a_clock_a_day_behind_is_one_sentence(tmp_path: Path, keys: Path) -> None:
    done = ended(tmp_path, DIPS_KEYS=str(keys))
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert "tls.crt does not hold before" in sentence
    assert f"and this machine's clock says {today}" in sentence
    assert "UTC: set the clock that is wrong" in sentence
    assert sentence.endswith("(mine.py, line 6)")
    assert done.stdout == "atexit\n"


def test_a_clock_a_day_ahead_changes_nothing(tmp_path: Path) -> None:
    """Keys hold from the time when they were made: they are accepted, and only the master is missing."""
    yesterday = datetime.now(UTC) - timedelta(days=1)
    Authority.create(tmp_path / "keys", yesterday)
    with Authority(tmp_path / "keys", yesterday).locked() as authority:
        keys = authority.add(Role.CLUSTER, "a")
    done = ended(tmp_path, DIPS_KEYS=str(keys), DIPS_WORKER_CONNECT_WAIT_S="0.5")
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].startswith("dips: no master could be joined within")


def test_a_master_that_does_not_answer_has_the_code_that_invites_another_try(tmp_path: Path) -> None:
    done = ended(tmp_path, DIPS_INSECURE="1", DIPS_WORKER_CONNECT_WAIT_S="0.5")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    trying, last = done.stderr.splitlines()
    assert trying.endswith("; trying again"), "no training goes on yet"
    assert last.startswith("dips: no master could be joined within 0.5 s at 127.0.0.1:1: start it, or correct its ")
