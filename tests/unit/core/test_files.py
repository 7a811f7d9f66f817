"""Files are replaced whole and durably, and a folder has one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dips.core import files
from dips.core.errors import ConfigError, FatalError
from dips.core.files import FolderLock, is_locked, replace_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_bytes_are_flushed_then_the_name_is_given_then_the_folder_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flush(handle: int) -> None:
        is_folder = Path(f"/proc/self/fd/{handle}").is_dir()
        steps.append("flush the folder" if is_folder else f"flush {os.fstat(handle).st_size} bytes")
        fsync(handle)

    def name(old: Path, new: Path) -> None:
        steps.append(f"name {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", name)
    monkeypatch.setattr(files, "WRITE_BYTES", 3)
    replace_file(tmp_path / "a", [b"one", memoryview(bytearray(b"and two")), b""])
    assert steps == ["flush 10 bytes", "name a", "flush the folder"]
    assert (tmp_path / "a").read_bytes() == b"oneand two"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("failing", ["open", "write", "fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    (tmp_path / "a").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space left"):
            replace_file(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_two_that_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    def slowly() -> list[bytes]:
        replace_file(tmp_path / "a", [b"theirs"])
        return [b"ours"]

    replace_file(tmp_path / "a", (part for part in slowly()))
    assert (tmp_path / "a").read_bytes() == b"ours"
    assert names(tmp_path) == ["a"]


def lock(folder: Path, of_process: bool = False) -> FolderLock:
    unusable, held = "no use of {x} ({why})", "{x} is {holder}'s"
    return FolderLock(folder, "lock", unusable=unusable, held=held, of_process=of_process)


def test_a_folder_is_one_process_own_and_the_other_is_told_whose(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "one"
    with lock(folder) as held:
        assert is_locked(folder, "lock")
        with pytest.raises(ConfigError, match=rf"\{{x\}} is {os.getpid()}'s"):
            lock(folder)
    assert not is_locked(folder, "lock")
    held.release()
    lock(folder).release()


def test_a_folder_that_cannot_be_used_is_told_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"no use of \{x\} \(Not a directory\)"):
        lock(tmp_path / "file" / "folder")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(FatalError, match=r"\(No space left"):
            lock(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with lock(tmp_path):
        assert is_locked(tmp_path, "lock"), "a full disk takes no number, and the lock needs none"


def test_a_system_without_file_locks_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows, where a program without a master runs."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ConfigError, match="no file locks"):
        lock(tmp_path)
    with pytest.raises(ConfigError, match="no file locks"):
        is_locked(tmp_path, "lock")


ANOTHER = """
import sys
from pathlib import Path
from dips.core.files import FolderLock
FolderLock(Path(sys.argv[1]), "lock", unusable="{why}", held="held by {holder}", of_process=True)
"""


def test_a_lock_of_the_process_is_not_kept_by_a_forked_child(tmp_path: Path) -> None:
    held = lock(tmp_path, of_process=True)
    command = [sys.executable, "-c", ANOTHER, str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"held by {os.getpid()}" in refused.stderr
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(begin, 1)  # until our side is closed
        os._exit(0)
    os.close(begin)
    held.release()
    assert subprocess.run(command, check=False).returncode == 0
    os.close(end)
    os.waitpid(child, 0)
