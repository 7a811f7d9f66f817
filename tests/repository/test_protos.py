"""The generated stubs are those of the .proto files, and the wire is only ever added to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT, SOURCE

PROTOS = sorted((SOURCE / "protos").glob("*.proto"))
each_proto = pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stubs that protoc makes of the .proto files now."""
    out = tmp_path_factory.mktemp("stubs")
    options = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    names = [f"dips/protos/{path.name}" for path in PROTOS]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *options, *names]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return out / "dips" / "protos"


@each_proto
@pytest.mark.parametrize("ending", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_stubs_are_current(regenerated: Path, path: Path, ending: str) -> None:
    name = path.stem + ending
    assert (SOURCE / "protos" / name).read_bytes() == (regenerated / name).read_bytes(), "run `make protos`"


def test_no_stub_is_left_of_a_proto_that_is_gone() -> None:
    stems = {path.stem for path in PROTOS}
    assert {path.name.partition("_pb2")[0] for path in (SOURCE / "protos").glob("*_pb2*")} == stems


@each_proto
def test_every_enum_leaves_zero_for_what_was_not_said(path: Path) -> None:
    for body in re.findall(r"\benum \w+ \{([^}]*)\}", path.read_text()):
        assert re.search(r"\w+_UNSPECIFIED = 0;", body)


@each_proto
def test_no_field_is_a_float_of_half_the_width(path: Path) -> None:
    # A duration or a norm that lost bits on the wire would differ between master and slave.
    assert not re.search(r"^\s*(?:repeated )?float ", path.read_text(), re.MULTILINE)
