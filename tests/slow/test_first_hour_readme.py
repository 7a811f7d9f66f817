"""README.md from top to bottom, typed in a clone of this repository: what git knows is all that a newcomer has.

`make demo` runs the Makefile's own steps, with what is installed here in place of downloads; .ci/run installs all of it
in a fresh environment. The README's loop is run by test_documents.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.dips_command import environment
from support.documents import SHELL, blocks, links
from support.repository import ROOT

README = ROOT / "README.md"
MINUTES = "0.3"


def typed(text: str, folder: Path, **added: str) -> str:
    """What a shell says to these lines."""
    here = environment({"PYTHON": sys.executable, "ARGS": f"--minutes {MINUTES} --clusters 2 --no-faults", **added})
    for name in ("PYTHONPATH", "VENV"):  # would lead back to this checkout, and to its environment
        here.pop(name, None)
    done = subprocess.run(["bash", "-euc", text], cwd=folder, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def lend_what_is_installed(clone: Path) -> None:
    """For the environment that make will find there: libraries, and compiled kernels, which fit equal sources only."""
    own = clone / ".venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    own.mkdir(parents=True)
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for kernel in (ROOT / "src").rglob("*.nb[ic]"):
        there = clone / kernel.relative_to(ROOT)
        there.parent.mkdir(exist_ok=True)
        shutil.copy(kernel, there)


def test_the_readme_is_typed_in_a_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout: there is nothing to clone")
    shell = [block for block in blocks(README) if block.language in SHELL]
    [install] = [block for block in shell if block.text.startswith("git clone ADDRESS")]
    clone_it, demo, tests = install.text.replace("ADDRESS", str(ROOT)).splitlines()
    assert tests == "make test", "which .ci/run calls"
    typed(clone_it, tmp_path)
    clone = tmp_path / "di-ps"
    lend_what_is_installed(clone)
    typed(demo, clone, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0")
    report = json.loads((clone / "runs" / "demo" / "report.json").read_text())
    assert set(report["checks"].values()) == {True}
    assert (clone / "runs" / "demo" / "loss.png").is_file()
    for block in shell:
        if not block.not_run:
            typed(block.text, clone)
    where = typed(". .venv/bin/activate\npython -c 'import dips; print(dips.__file__)'", clone)
    assert where.strip() == str(clone / "src" / "dips" / "__init__.py")
    lost = [link for link in links(README) if "://" not in link and not (clone / link.partition("#")[0]).exists()]
    assert not lost
    assert typed("git status --porcelain", clone) == "", "what it made is ignored"
    assert os.readlink(clone / "master") == "src/dips/master"
