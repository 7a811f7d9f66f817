"""What `make dist` builds: a wheel and a source archive with everything that a user needs and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.repository import ROOT

from dips.core.release import VERSION

NAME = f"dips_training-{VERSION}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of what git knows, copied elsewhere: nothing that lies around here can get in."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout
    names = listed.decode().split("\0")[:-1] if listed else []
    if not names:
        pytest.skip("this is no checkout: what belongs to the project is not known")
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    assert not (source / "master").exists(), "links are left out: some systems and archives cannot hold them"
    build = ["-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    made = subprocess.run([sys.executable, *build], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    yield folder / "dist"
    shutil.rmtree(folder, ignore_errors=True)


def packaged() -> set[str]:
    """Files of the package in the repository, below src."""
    kept = (path for path in (ROOT / "src" / "dips").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT / "src")) for path in kept}


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    info = f"{NAME}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == packaged()
    assert {f"{info}METADATA", f"{info}entry_points.txt", f"{info}licenses/LICENSE"} <= names


def test_the_source_archive_builds_the_same_wheel_and_has_no_tests(built: Path, tmp_path: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert {f"src/{name}" for name in packaged()} | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks", "tools", "runs", ".ci"))]
    again = tmp_path / "again"
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(again), str(tmp_path / NAME)]
    subprocess.run([sys.executable, *build], capture_output=True, check=True)
    wheels = [folder / f"{NAME}-py3-none-any.whl" for folder in (built, again)]
    contents = []
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            contents.append({name: wheel.read(name) for name in wheel.namelist()})
    assert contents[0] == contents[1]
