"""core/math/compiling.py: code is kept, is stale when any source of it changes, and one process at a time compiles."""

from __future__ import annotations

import dis
import fcntl
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import pytest
from numba.core.dispatcher import Dispatcher

import dips
from dips.core.math import compiling
from dips.core.math.compiling import LOCK_NAME, compiled, sources_of, stamp_of

ROOT = Path(dips.__file__).parent

PROGRAM = """
import logging, sys
import numpy as np
from dips.core.math import compiling, xxh3_numba
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with compiling.watched(lambda name, *_: print("compiles", name, flush=True), xxh3_numba):
    print(hex(xxh3_numba._avalanche(np.uint64(7))), flush=True)
"""


def started(folder: Path, program: str = PROGRAM, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out.splitlines()


def lock_of(folder: Path) -> Path:
    [found] = folder.glob(f"*/{LOCK_NAME}")
    return found


# ---- what is kept ----


def test_the_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    first = said(started(tmp_path))
    assert first[0] == "compiles avalanche"
    assert said(started(tmp_path)) == first[1:]


def test_another_processor_compiles_for_itself_and_spoils_nothing(tmp_path: Path) -> None:
    mine = said(started(tmp_path))
    assert said(started(tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")) == mine
    assert said(started(tmp_path)) == mine[1:]


NUMBAS = pickle.dumps(numba.__version__)


@pytest.mark.parametrize(
    ("files", "content", "error"),
    [
        ("*.nbc", b"", "EOFError"),
        ("*.nbi", NUMBAS, "EOFError"),
        ("*.nbi", NUMBAS + b"cdips\nGone\n.", "AttributeError"),
    ],
    ids=["code", "list of what is kept", "a type that this release does not have"],
)
def test_what_cannot_be_read_is_compiled_again(tmp_path: Path, files: str, content: bytes, error: str) -> None:
    """As a machine that lost its power leaves it, or an earlier release."""
    mine = said(started(tmp_path))
    for kept in tmp_path.glob(f"*/{files}"):
        kept.write_bytes(content)
    again = said(started(tmp_path))
    assert f"is compiled again: {error}" in again[0]
    assert again[1:] == mine
    assert said(started(tmp_path)) == mine[1:]


def test_code_of_an_earlier_release_is_not_run_though_the_disk_was_full_after_an_upgrade(tmp_path: Path) -> None:
    """Numba has then written in its list that the code is of the new release, and the code is still the old one."""
    run = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import release; print(release.kernel(1))"
    full = (
        "from numba.core.caching import IndexDataCacheFile\n"
        "def no_space(*_): raise OSError(28, 'No space left on device')\n"
        "IndexDataCacheFile._save_data = no_space\n"
    )
    text = "from dips.core.math.compiling import compiled\n@compiled\ndef kernel(x):\n    return x + {}\n"
    (tmp_path / "release.py").write_text(text.format(1))
    assert said(started(tmp_path, run)) == ["2"]
    (tmp_path / "release.py").write_text(text.format(20))
    warning, result = said(started(tmp_path, full + run))
    assert ("cannot be kept" in warning, result) == (True, "21")
    assert said(started(tmp_path, run)) == ["21"]


def test_without_a_folder_for_the_code_it_compiles_all_the_same_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A function without a file is what numba finds no folder for, as in a read-only image without a home."""
    namespace: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x\ndef thrice(x):\n    return 3 * x", namespace)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(namespace["twice"])
    compiling._say_once.cache_clear()
    assert compiled(namespace["twice"])(21) == 42
    assert compiled(namespace["thrice"])(14) == 42
    assert [record.message for record in caplog.records if "set NUMBA_CACHE_DIR" in record.message] == [
        "kernels: no folder for compiled code can be written, so every start compiles it again: set NUMBA_CACHE_DIR"
    ]


# ---- one process at a time ----


def test_who_comes_second_waits_says_so_and_loads(tmp_path: Path) -> None:
    mine = said(started(tmp_path))
    for code in tmp_path.glob("*/*.nb?"):
        code.rename(code.with_suffix(code.suffix + ".away"))
    with lock_of(tmp_path).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = started(tmp_path)
        assert process.stdout is not None
        assert "another process on this machine compiles them; waiting" in process.stdout.readline()
        assert process.stdout.readline() == "compiles by another process, waiting\n"
        for code in tmp_path.glob("*/*.away"):
            code.rename(code.with_suffix(""))
    assert said(process) == mine[1:]


def test_a_killed_process_holds_nobody_up(tmp_path: Path) -> None:
    holds = PROGRAM + "compiling._turn.take(); print('held', flush=True); sys.stdin.read()"
    process = started(tmp_path, holds)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "held":
        assert process.poll() is None
    for code in tmp_path.glob("*/*.nb?"):
        code.unlink()
    process.kill()
    process.wait()
    process.stdout.close()
    assert said(started(tmp_path))[0] == "compiles avalanche"


def test_a_kernel_that_cannot_be_compiled_gives_the_turn_back() -> None:
    def wrong(x: Any) -> Any:
        return x.no_such_thing

    with pytest.raises(numba.TypingError):
        compiled(wrong)(1)
    assert compiling._turn._file is None


# ---- when it is stale ----


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package named dips in a folder, whose files may be changed."""
    caches = (compiling._imports_of, compiling._text_of, stamp_of)
    monkeypatch.setattr(compiling, "_ROOT", tmp_path / "dips")
    for name, text in {
        "a.py": "from dips.b import (\n    one,  # a comment\n    two as deux,\n)\nimport dips.part.c\n",
        "b.py": "from dips.part import c, d as e\nif True:\n    from dips.late import f\n",
        "part/__init__.py": "",
        "part/c.py": "import dips.a\nfrom os import path\n",
        "part/d.py": "N = 1\n",
        "late.py": "",
        "other.py": "",
    }.items():
        file = tmp_path / "dips" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "dips"
    for cached in caches:
        cached.cache_clear()


def test_sources_are_what_is_imported_at_the_top_of_files_directly_or_not(package: Path) -> None:
    names = [str(file.relative_to(package)) for file in sources_of(package / "a.py")]
    assert names == ["a.py", "b.py", "part/__init__.py", "part/c.py", "part/d.py"]


@pytest.mark.parametrize(("name", "stale"), [("a.py", True), ("part/d.py", True), ("other.py", False)])
def test_a_change_of_any_source_makes_code_stale(package: Path, name: str, stale: bool) -> None:
    before = stamp_of(package / "a.py")
    (package / name).write_text((package / name).read_text() + "# changed\n")
    for cached in (compiling._text_of, stamp_of):
        cached.cache_clear()
    assert (stamp_of(package / "a.py") != before) == stale


def kernel_modules() -> list[ModuleType]:
    names = [".".join(("dips", *file.relative_to(ROOT).with_suffix("").parts)) for file in ROOT.rglob("*_numba.py")]
    return [importlib.import_module(name) for name in sorted(names)]


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda module: module.__name__)
def test_all_functions_that_are_compiled_in_are_in_a_source(module: ModuleType) -> None:
    """Also the plain functions of rules that compiled loops call."""
    sources = {str(file) for file in sources_of(Path(str(module.__file__)))}
    kernels = [one for one in vars(module).values() if isinstance(one, Dispatcher)]
    seen: set[FunctionType] = set()
    todo = [kernel.py_func for kernel in kernels if kernel.py_func.__module__ == module.__name__]
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            todo += called_by(function)
    assert {function.__code__.co_filename for function in seen} <= sources


def called_by(function: FunctionType) -> list[FunctionType]:
    """Functions of dips that its code names, by a global name or as an attribute of a module."""
    found: list[FunctionType] = []
    held: Any = None
    for step in dis.get_instructions(function.__code__):
        if step.opname == "LOAD_GLOBAL":
            held = function.__globals__.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(held, ModuleType):
            held = getattr(held, step.argval, None)
        else:
            continue
        one = held.py_func if isinstance(held, Dispatcher) else held
        if isinstance(one, FunctionType) and isinstance(one.__code__, CodeType) and one.__module__.startswith("dips."):
            found.append(one)
    return found
