"""The generated files are those of the .proto files, and the wire is only ever added to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from generate_messages import MODULES, generate
from support.repository import ROOT, SOURCE

PROTOS = sorted((SOURCE / "protos").glob("*.proto"))
each_proto = pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)


def test_what_make_protos_writes_is_current(tmp_path: Path) -> None:
    generate(tmp_path)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    kept = {path.relative_to(ROOT / "src") for path in (SOURCE / "protos").glob("*_pb2*")}
    assert made == kept | {Path(*module.split(".")).with_suffix(".py") for module in MODULES}
    stale = [str(path) for path in made if (tmp_path / path).read_bytes() != (ROOT / "src" / path).read_bytes()]
    assert not stale, "run `make protos`"


@each_proto
def test_zeros_of_enums_and_widths_of_fields(path: Path) -> None:
    for body in re.findall(r"\benum \w+ \{([^}]*)\}", path.read_text()):
        assert re.search(r"\w+_UNSPECIFIED = 0;", body)
    # A duration or a norm that lost bits on the wire would differ between master and slave.
    assert not re.search(r"^\s*(?:repeated )?float ", path.read_text(), re.MULTILINE)
