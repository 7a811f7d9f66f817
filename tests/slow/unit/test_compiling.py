"""core/math/compiling.py: code is kept on disk, and one process at a time compiles; the rest is a unit test."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from dips.core.math.compiling import LOCK_NAME

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


def test_the_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    first = said(started(tmp_path))
    assert first[0] == "compiles avalanche"
    assert said(started(tmp_path)) == first[1:]


def test_an_import_compiles_nothing_and_so_waits_for_no_other_process(tmp_path: Path) -> None:
    assert said(started(tmp_path, "import dips.slave.process, dips.core.net.carry_numba")) == []
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


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
