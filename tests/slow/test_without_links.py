"""A checkout without the links at the top works: some systems and archives cannot hold links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

LINKS = ("master", "slave", "worker", "protos")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkout")
    for name in ("src", "tests", "docs", "examples", "deploy", "benchmarks", "tools", ".ci"):
        shutil.copytree(ROOT / name, made / name, ignore=LEFT_OUT)
    for path in ROOT.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy(path, made)
    assert not any((made / name).exists() for name in LINKS)
    return made


def done(checkout: Path, *command: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_package_and_its_tests_work_there(checkout: Path) -> None:
    where = done(checkout, sys.executable, "-c", "import dips; print(dips.__file__)")
    assert Path(where.strip()) == checkout / "src" / "dips" / "__init__.py"
    assert "Usage: dips up" in done(checkout, sys.executable, "-m", "dips.cli", "up", "--help")
    said = done(checkout, Path(sys.executable).with_name("lint-imports"), "--no-cache")
    assert "0 broken" in said
    files = ("tests/repository/test_layers.py", "tests/repository/test_sources.py", "tests/repository/test_protos.py")
    assert " passed" in done(checkout, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
