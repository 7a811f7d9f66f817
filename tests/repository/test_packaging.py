"""What a fresh machine needs: pinned versions, a Makefile that explains itself, a CI script that can run."""

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
from support.repository import ROOT

TARGETS = (
    *("demo", "test", "check", "sim", "model-check", "faults", "fuzz"),
    *("soak", "dashboards-test", "page-test", "endurance", "protos", "bench", "docs", "clean", "help"),
    *("manifests", "manifests-test", "e2e-kubernetes", "compose", "compose-test"),
)


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
    needed = closure("dips", frozenset({"dev"}), set()) - {"dips"}
    pins = pinned()
    # PyTorch pins its own CUDA packages.
    unpinned = {name for name in needed - pins.keys() if not re.match(r"nvidia-|cuda-|triton", name)}
    assert not unpinned
    for name in needed & pins.keys():
        assert Version(importlib.metadata.version(name)).public == str(pins[name]), name


def test_pins_have_no_local_part() -> None:
    # "torch==2.13.0" takes 2.13.0+cpu as well; "==2.13.0+cpu" would refuse every other build.
    assert not [name for name, version in pinned().items() if version.local]


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
    for texts in (project["dependencies"], extras["master"], extras["slave"]):
        assert "torch" not in {Requirement(text).name for text in texts}


def test_plain_make_explains_every_target() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    explained = re.findall(r"^  make ([\w-]+)\s+\S", done.stdout, re.MULTILINE)
    assert sorted(explained) == sorted(TARGETS)


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
    installs = [line for line in done.stdout.splitlines() if " pip " in line]
    assert len(installs) == 2
    assert installs[0].endswith("--no-deps --index-url file:///index torch")
    assert "index" not in installs[1]
    assert all("--constraint constraints.txt" in line for line in installs)
    plain = make("--dry-run", "demo", f"VENV={tmp_path / 'venv'}")
    assert len([line for line in plain.stdout.splitlines() if " pip " in line]) == 1


def test_the_script_for_ci_can_run() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_run_in_which_no_test_passed_is_no_success(tmp_path: Path) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_x.py").write_text("import pytest\n\n@pytest.mark.skip\ndef test_a(): ...\n")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), "--rootdir", str(tmp_path)]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    assert run().returncode == 0
    refused = run("--require-passed")
    assert refused.returncode == 5
    assert "no test passed" in refused.stdout
    (tmp_path / "test_x.py").write_text("def test_a(): ...\n")
    assert run("--require-passed").returncode == 0
