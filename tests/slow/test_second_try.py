"""Tests of real processes that fail get one more try, alone; others get none; the log's end names what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import run_all as script
from support.repository import ROOT

FAILS_ONCE = """
from pathlib import Path
def test_it() -> None:
    mark = Path(__file__).with_suffix(".seen")
    seen = mark.exists()
    mark.touch()
    assert seen
"""


SECOND = "PASSED ONLY AT THE SECOND TRY, alone: find out why, a second try hides it"

ALONE = "-n0"
"""Where it does not matter that files run side by side: each worker of xdist takes seconds to start."""


@pytest.fixture(autouse=True)
def _notes_nothing_for_the_run_that_this_is_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(script.NOTED, raising=False)


def run_all(directory: Path, where: str, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The script on a small project with one test file."""
    (directory / "tests" / where).mkdir(parents=True)
    (directory / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (directory / "tests" / where / "test_x.py").write_text(test)
    command = [sys.executable, str(ROOT / "tests" / "run_all.py"), "-q", "-p", "no:cacheprovider", *options, "tests"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=100)


def test_what_passes_alone_is_said_loudly_and_noted_for_the_whole_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "second-tries"
    monkeypatch.setenv("DIPS_SECOND_TRIES", str(noted))
    done = run_all(tmp_path, "integration", FAILS_ONCE, ALONE)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"{SECOND}: 1\n  tests/integration/test_x.py::test_it\n")
    assert noted.read_text() == "tests/integration/test_x.py::test_it\n"


def test_many_second_tries_without_a_listed_reason_fail_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted, known = tmp_path / "noted", tmp_path / "known"
    known.write_text("# words\ntests/a.py::test_a  # two clocks\n")
    assert script.judge_second_tries(noted, known) == 0, "nothing needed one"
    noted.write_text("tests/a.py::test_a\n")
    assert script.judge_second_tries(noted, known) == 0
    assert "tests/a.py::test_a: two clocks" in capsys.readouterr().out
    others = ["make page-test", *(f"tests/b.py::test_{number}" for number in range(script.BY_CHANCE))]
    noted.write_text("\n".join(["tests/a.py::test_a", *others[1:]]))
    assert script.judge_second_tries(noted, known) == 0
    assert "tests/b.py::test_0" in capsys.readouterr().out
    noted.write_text("\n".join(["tests/a.py::test_a", *others]))
    assert script.judge_second_tries(noted, known) == 1
    assert capsys.readouterr().out.endswith("find out why: 4\n" + "".join(f"  {name}\n" for name in others))
    known.write_text("tests/a.py::test_a\n")
    with pytest.raises(ValueError, match="the reason"):
        script.listed(known)


def test_tests_that_need_an_option_get_it_again(tmp_path: Path) -> None:
    marked = FAILS_ONCE.replace("def test_it", "import pytest\n@pytest.mark.faults\ndef test_it")
    done = run_all(tmp_path, "faults", marked, "--faults")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith(f"{SECOND}: 1\n  tests/faults/test_x.py::test_it\n")


def test_without_the_option_they_are_left_out(tmp_path: Path) -> None:
    marked = "import pytest\n@pytest.mark.faults\ndef test_it() -> None:\n    assert False\n"
    done = run_all(tmp_path, "faults", marked + "def test_other() -> None:\n    assert True\n", ALONE)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 deselected" in done.stdout


def test_what_fails_twice_is_a_failure(tmp_path: Path) -> None:
    done = run_all(tmp_path, "integration", "def test_it() -> None:\n    assert False\n", ALONE)
    assert done.returncode == 1
    assert done.stdout.endswith("failed, and failed again alone: 1\n  tests/integration/test_x.py::test_it\n")


@pytest.mark.parametrize("folder", ["unit", "slow/unit"])
def test_a_unit_test_gets_no_second_try(tmp_path: Path, folder: str) -> None:
    done = run_all(tmp_path, folder, FAILS_ONCE, ALONE)
    assert done.returncode == 1
    assert done.stdout.endswith(f"failed: 1\n  tests/{folder}/test_x.py::test_it\n")


def test_the_longest_files_come_first_and_are_told(tmp_path: Path) -> None:
    """The order is conftest.py's, and xdist keeps to it; the list is that of tests/longest_first.txt."""
    quick = "def test_it() -> None:\n    assert True\n"
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (tmp_path / "tests" / "unit" / f"test_{name}.py").write_text(quick)
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "tests" / "longest_first.txt").write_text("tests/unit/test_c.py\ntests/unit/test_b.py\n")
    command = [sys.executable, str(ROOT / "tests" / "run_all.py"), "-v", "-p", "no:cacheprovider", ALONE, "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout
    ran = [line.partition("::")[0] for line in done.stdout.splitlines() if "PASSED" in line]
    assert ran == [f"tests/unit/test_{name}.py" for name in ("c", "b", "a")]
    told = done.stdout.partition("longest files, in seconds")[2]
    assert all(f"tests/unit/test_{name}.py" in told for name in ("a", "b", "c"))


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
