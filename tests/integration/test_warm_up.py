"""`dips warm-up`: after it no process compiles anything."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dips
from dips.cli.warm_up import MODULES, Warmed, warmed
from dips.core.errors import ConfigError
from dips.core.math import compiling
from dips.core.net import zmq_numba

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


def test_without_libzmqs_functions_their_loops_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_numba, "_WHY_NOT", "zmq_send is not there")
    said = [one for one in warmed(lambda sentence: None) if one.skipped]
    assert [one.module for one in said] == ["dips.core.net.carry_numba", "dips.slave.serve_numba"]
    assert str(said[0]) == "dips.core.net.carry_numba: skipped: zmq_send is not there"


def test_where_nothing_can_be_kept_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "folder", lambda: None)
    with pytest.raises(ConfigError, match="set NUMBA_CACHE_DIR"):
        next(warmed(lambda sentence: None))


def test_a_line_says_what_was_done() -> None:
    assert str(Warmed("m", 3, 1.25)) == "m: compiled 3 kernels, 1.25 s"
    assert str(Warmed("m", 0, 0.031)) == "m: all there, 0.03 s"
