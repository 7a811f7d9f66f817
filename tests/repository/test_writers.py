"""What makes a file or a folder of a run does it by core/files.py, which closes it to other users of the machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.repository import SOURCE, modules

PACKAGES = {"core", "master", "slave", "worker", "trainer", "judge", "local", "cli"}

ELSEWHERE = {
    "core/files.py": {"folder.mkdir", "os.open"},
    "core/math/compiling.py": {"os.makedirs", "path.open"},  # compiled code, for all users if they share its folder
    "core/observe/failpoints.py": {"os.open"},  # of tests
    "local/followed_folder.py": {"self.folder.mkdir", "self._versions.mkdir"},  # likewise what follows a run
    "local/model_folder.py": {"folder.parent.mkdir", "new.mkdir"},  # an export is its user's
    "local/supervisor.py": {"Path(os.devnull).open"},
}
"""The modules that may make some themselves."""

MAKES = {"mkdir", "makedirs", "write_text", "write_bytes", "touch", "mknod", "copyfile", "copy", "copy2", "copytree"}


def makers(tree: ast.AST) -> Iterator[str]:
    """The calls that may make a file or a folder with the modes of the umask."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        receiver, _, last = name.rpartition(".")
        words = [ast.unparse(argument) for argument in call.args]
        if last in MAKES and (receiver.startswith(("os", "shutil")) if "cop" in last else receiver):
            yield name
        elif name == "os.open":
            if any("O_CREAT" in word or word == "flags" for word in words):
                yield name
        elif last == "open" and not any(keyword.arg == "opener" for keyword in call.keywords):
            mode = words[0 if receiver else 1 :][:1]
            if mode and mode[0][:1] in "\"'" and set(mode[0]) & set("wax+"):
                yield name


def test_files_of_a_run_are_made_in_one_place() -> None:
    found: dict[str, set[str]] = {}
    for path in modules():
        name = path.relative_to(SOURCE).as_posix()
        if name.partition("/")[0] in PACKAGES and (made := set(makers(ast.parse(path.read_text())))):
            found[name] = made
    assert found == ELSEWHERE
