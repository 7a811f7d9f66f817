"""Tests send ctrl-C to what they start, also when a shell runs them in the background, where SIGINT is ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

IGNORING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"

HEARS = """
import os, signal, sys
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""

TEST_OF_A_CHILD = f"""
from pathlib import Path
from support.master_process import MasterProcess

def test_child(tmp_path: Path) -> None:
    (tmp_path / "hears.py").write_text({HEARS!r})
    child = MasterProcess(tmp_path / "run", module="hears", variables={{"PYTHONPATH": str(tmp_path)}})
    assert child.popen.wait(60) == 0
    assert child.log == "True\\n"
"""


@pytest.mark.parametrize("before", [[], ["-c", IGNORING, sys.executable]], ids=["plain", "ignored"])
def test_a_child_of_the_tests_helper_hears_ctrl_c(tmp_path: Path, before: list[str]) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_x.py").write_text(TEST_OF_A_CHILD)
    options = ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT / 'tests'}", "--rootdir", str(tmp_path)]
    command = [sys.executable, *before, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_without_the_remedy_such_a_child_is_deaf() -> None:
    command = [sys.executable, "-c", IGNORING, sys.executable, "-c", HEARS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "False\n", done.stderr
