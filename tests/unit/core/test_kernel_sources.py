"""When kept code of kernels is stale, and what happens where none can be kept; in this process."""

from __future__ import annotations

import dis
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numba
import pytest
from numba.core.dispatcher import Dispatcher

import dips
from dips.core.math import compiling
from dips.core.math.compiling import compiled, sources_of, stamp_of

ROOT = Path(dips.__file__).parent


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


def test_what_another_process_compiled_while_its_end_was_waited_for_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubling.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    twice = importlib.import_module("doubling").twice
    late: Any = compiled(twice)
    other, turn = compiled(twice), compiling._turn

    class Waited:
        def take(self) -> bool:
            monkeypatch.setattr(compiling, "_turn", turn)
            assert other(21) == 42
            return True

    monkeypatch.setattr(compiling, "_turn", Waited())
    assert late(21) == 42
    assert sum(late.stats.cache_hits.values()) == 1
    monkeypatch.setattr(turn, "take", lambda: pytest.fail("what is there is loaded without a turn"))
    assert compiled(twice)(21) == 42


def test_a_kernel_that_cannot_be_compiled_gives_the_turn_back() -> None:
    def wrong(x: Any) -> Any:
        return x.no_such_thing

    with pytest.raises(numba.TypingError):
        compiled(wrong)(1)
    assert compiling._turn._file is None


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


FILES = sorted(ROOT.rglob("*_numba.py"))
KERNELS = [importlib.import_module(".".join(("dips", *file.relative_to(ROOT).with_suffix("").parts))) for file in FILES]


@pytest.mark.parametrize("module", KERNELS, ids=lambda module: module.__name__)
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
