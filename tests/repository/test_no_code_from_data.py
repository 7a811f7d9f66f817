"""What comes over a socket or from a file is data: nothing in the package turns bytes into code or commands."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.repository import PACKAGES, ROOT, SOURCE

MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "jsonpickle", "joblib"})
CALLS = frozenset({"eval", "exec", "compile", "__import__"})
METHODS = frozenset(
    {"os.system", "os.popen", "torch.load", "torch.save", "numpy.load", "np.load", "subprocess.getoutput"}
    | {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"}
    | {"marshal.load", "marshal.loads"}  # to write with it, for a fingerprint, is harmless
)


WRITTEN = frozenset({("worker/parallel/shard_files.py", "torch.save")})
"""File and call that write what torch's own tools read; nothing in the package reads it."""


def harms(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that could run what somebody else wrote."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, name) for name in names if name.partition(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS | METHODS:
                yield node.lineno, called
            shell = [word for word in node.keywords if word.arg in ("shell", "allow_pickle")]
            yield from ((node.lineno, ast.unparse(word)) for word in shell if ast.unparse(word.value) != "False")


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_module_runs_what_it_reads(package: str) -> None:
    files = [file for file in (SOURCE / package).rglob("*.py") if "__pycache__" not in file.parts]
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in files
        for line, what in harms(ast.parse(file.read_text(encoding="utf-8")))
        if (file.relative_to(SOURCE).as_posix(), what) not in WRITTEN
    ]
    assert found == []
