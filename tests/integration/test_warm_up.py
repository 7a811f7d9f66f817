"""`dips warm-up`: after it no process compiles anything."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import dips
from dips.cli.warm_up import MODULES
from dips.core.math import compiling

ROOT = Path(dips.__file__).parent

LOADS = f"""
from numba.core import event
import importlib
modules = [importlib.import_module(name) for name in {MODULES!r}]
with event.install_recorder("numba:compile") as compiled:
    for module in modules:
        module.warm_up()
print([each.data["dispatcher"].py_func.__qualname__ for _, each in compiled.buffer])
"""


def test_a_new_process_compiles_nothing_after_it() -> None:
    arguments = [sys.executable, "-m", "dips.cli", "warm-up", "--json"]
    said = json.loads(subprocess.run(arguments, check=True, stdout=subprocess.PIPE).stdout)
    assert [one["module"] for one in said["modules"]] == list(MODULES)
    assert said["kept_in"] == str(compiling.folder())
    assert all(one["skipped"] == "" for one in said["modules"])
    again = subprocess.run([sys.executable, "-c", LOADS], check=True, stdout=subprocess.PIPE, text=True)
    assert again.stdout.strip() == "[]"


def test_every_module_with_kernels_that_has_a_warm_up_is_in_the_list() -> None:
    names = [".".join(("dips", *file.relative_to(ROOT).with_suffix("").parts)) for file in ROOT.rglob("*_numba.py")]
    assert {name for name in names if hasattr(importlib.import_module(name), "warm_up")} == set(MODULES)
