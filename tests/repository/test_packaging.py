"""What a fresh machine needs: pinned versions, and a Makefile that explains itself."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.repository import ROOT, texts

import dips
from dips.core.release import DISTRIBUTION, VERSION, how_to_install

# What a make that runs these tests hands down; a make that is tested must not see it.
FROM_OUTSIDE = {
    *("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEFILES", "VENV", "PYTHON", "TORCH_INDEX", "ARGS", "SEEDS", "MINUTES"),
}


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if name not in FROM_OUTSIDE}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={**outside, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def pinned() -> dict[str, Version]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    versions: dict[str, Version] = {}
    for requirement in requirements:
        [specifier] = requirement.specifier
        assert specifier.operator == "==", requirement
        versions[canonicalize_name(requirement.name)] = Version(specifier.version)
    return versions


def closure(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Names of all distributions that `name[extras]` needs here, without itself."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    found: set[str] = set()
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            needed = canonicalize_name(requirement.name)
            found |= {needed} | closure(needed, frozenset(requirement.extras), seen)
    return found


def test_everything_that_is_installed_for_development_is_pinned_at_the_version_that_is_tested() -> None:
    needed = closure(DISTRIBUTION, frozenset({"dev"}), set()) - {DISTRIBUTION}
    pins = pinned()
    # PyTorch pins its own CUDA packages.
    unpinned = {name for name in needed - pins.keys() if not re.match(r"nvidia-|cuda-|triton", name)}
    assert not unpinned
    for name in needed & pins.keys():
        assert Version(importlib.metadata.version(name)).public == str(pins[name]), name


def test_the_distribution_is_none_that_the_index_takes_for_somebody_elses() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    # The index compares names without case, and without hyphens, dots and underscores where it looks for likeness.
    assert re.sub(r"[-_.]", "", DISTRIBUTION.lower()) != "dips"
    assert how_to_install("worker") == "pip install '.[worker]' in the checkout of Di-PS"


def test_nothing_advises_to_install_what_is_not_ours() -> None:
    extras = "|".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    wrong = re.compile(rf"pip install\s+(?:-\S+\s+)*['\"]?(?:dips|di-ps)(?![\w-])|\bdips\[(?:\w+,)*(?:{extras})[],]")
    said = {
        ROOT / "src" / "dips" / "core" / "release.py",
        ROOT / "CHANGELOG.md",
        ROOT / "tests" / "BUGS.md",
        Path(__file__),
    }  # where it is told why not
    found = [path for path in texts() if path not in said and wrong.search(path.read_text(errors="replace"))]
    assert found == []


def test_the_version_is_known_at_once_and_is_the_one_that_is_installed() -> None:
    assert dips.__version__ == VERSION == importlib.metadata.version(DISTRIBUTION)
    command = [sys.executable, "-c", "import dips, sys; dips.__version__; print('importlib.metadata' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "False\n"


def test_pins_keep_the_bounds_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(t for extra in project["optional-dependencies"].values() for t in extra)]
    pins = pinned()
    for requirement in map(Requirement, texts):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is None or pin in requirement.specifier, requirement


def test_a_slave_and_a_master_do_not_ask_for_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for needs in (project["dependencies"], extras["master"], extras["slave"]):
        assert "torch" not in {Requirement(text).name for text in needs}


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench", "docs", "protos"])
def test_a_machine_without_python_is_told_what_to_install(tmp_path: Path, target: str) -> None:
    done = make(target, f"VENV={tmp_path / 'venv'}", "PYTHON=/nowhere/python3")
    assert done.returncode != 0
    assert "make: dips needs Python 3.11 or newer, and /nowhere/python3 is not there: install it" in done.stderr
    assert not (tmp_path / "venv").exists()


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def test_a_machine_with_an_old_python_is_told_which_is_needed(tmp_path: Path) -> None:
    old = script(tmp_path / "python3", '[ "$1" = --version ] && echo Python 3.10.4 && exit 0', "exit 1")
    done = make("check", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
    assert done.returncode != 0
    assert f"dips needs Python 3.11 or newer, and {old} is Python 3.10.4: install it" in done.stderr


def test_a_python_without_venv_is_told_the_package(tmp_path: Path) -> None:
    # New enough, but cannot import ensurepip: what Debian ships. Nobody is root here, so nothing is installed.
    bare = script(
        tmp_path / "python3",
        'case "$2" in *version_info\\ *) exit 0;; *ensurepip*) exit 1;; *print*) echo 3.11;; esac',
    )
    script(tmp_path / "id", "echo 1000")
    done = make(
        "check", f"VENV={tmp_path / 'venv'}", f"PYTHON={bare}", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    )
    assert done.returncode != 0
    assert "cannot make virtual environments: apt-get install python3.11-venv (as root)" in done.stderr


def test_torch_alone_comes_from_its_own_index(tmp_path: Path) -> None:
    done = make("--dry-run", "demo", f"VENV={tmp_path / 'venv'}", "TORCH_INDEX=file:///index")
    installs = [line for line in done.stdout.splitlines() if " -m pip --" in line]
    assert len(installs) == 2
    assert installs[0].endswith("--no-deps --index-url file:///index torch")
    assert "index" not in installs[1]
    assert all("--constraint constraints.txt" in line for line in installs)
    plain = make("--dry-run", "demo", f"VENV={tmp_path / 'venv'}")
    assert len([line for line in plain.stdout.splitlines() if " -m pip --" in line]) == 1
