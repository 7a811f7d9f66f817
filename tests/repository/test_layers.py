"""What a role brings into memory with it, and under which name it is imported. (Who may import whom: import-linter.)"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.repository import ROOT, SOURCE

from dips.cli.main import commands_for

_LIST_IMPORTS = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.rpartition(".")[2].startswith("__main__") and module.name not in sys.argv[2:]:
        importlib.import_module(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""

OTHERS = ("dips.worker.integrations.hugging_face", "dips.worker.integrations.lightning")
"""They import a framework, which takes seconds; import-linter sees what they import of ours."""


def imported_by(package: str) -> set[str]:
    """Top-level modules that stand in memory once every module of the package was imported, but those of OTHERS."""
    command = [sys.executable, "-c", _LIST_IMPORTS, package, *OTHERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("dips.slave", {"torch"}),
        ("dips.master", {"torch", "numba"}),
        ("dips.worker", {"numba"}),
    ],
)
def test_a_role_does_not_bring_what_it_does_not_need(package: str, heavy: set[str]) -> None:
    names = imported_by(package)
    assert "dips" in names
    assert not names & heavy


def test_commands_answer_help_without_heavy_libraries() -> None:
    """Half of the time of `dips compare` to its first sentence was numba's."""
    names = sorted({command.module for command in commands_for("")})
    listed = ", ".join(names)
    code = f"import json, sys, {listed}; print(json.dumps(sorted({{n.partition('.')[0] for n in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert {name.rpartition(".")[0] for name in names} == {"dips.cli", "dips.lab.commands", "dips.planner.commands"}
    assert not {"torch", "numba", "ortools", "matplotlib", "kubernetes", "aiohttp"} & set(json.loads(done.stdout))


with_links = pytest.mark.skipif(
    not (ROOT / "master").is_symlink(), reason="a checkout without links: nothing depends on them"
)


@with_links
@pytest.mark.parametrize("name", ["master", "slave", "worker", "protos"])
def test_what_stands_at_the_top_for_people_leads_into_the_package(name: str) -> None:
    assert (ROOT / name).readlink() == (SOURCE / name).relative_to(ROOT)
    assert (ROOT / name / "__init__.py").is_file()


@with_links
@pytest.mark.parametrize("role", ["master", "slave", "worker"])
def test_a_role_cannot_be_imported_under_a_second_name(role: str) -> None:
    command = [sys.executable, "-c", f"import {role}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"ImportError: import dips.{role}, not {role}" in done.stderr
