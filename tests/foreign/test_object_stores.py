"""A run is copied to a real S3 server and to files, loses its slaves, and is made again from the copy.

rclone serves S3; the slaves, the copier and `dips restore` are the real processes. Google's and Azure's servers are not
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import live
from support.dips_command import dips, dips_started, end_at_a_limit, ended, pid_of, published
from support.documents import blocks_below
from support.ports import own_port
from support.repository import ROOT
from support.waiting import until

from dips.local.log_files import records
from dips.master.directory import TAPE_NAME

KEY, SECRET = "AKIATESTTESTTEST0000", "a-secret-that-no-text-may-show-0"
RUN = """
[run]
id = "mine"
directory = "{directory}"
slaves = 2
[slave]
memory_bytes = "64 MiB"
[master]
sync_every = 4
[train]
data = ["{text}"]
max_bytes = "1 MB"
[backup]
to = "{url}"
every = 2
kept = 2
{backup}
[[clusters]]
id = "a"
"""


class S3Server:
    """rclone's, over a folder; what is below `root` are the objects. It can be away, and come back."""

    def __init__(self, root: Path) -> None:
        self.root, self._port = root, own_port()
        (root / "bucket").mkdir(parents=True)
        self.there = {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }  # fmt: skip

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        program = str(Path(sys.executable).parent / "rclone")
        keys = f"{KEY},{SECRET}"
        command = [program, "serve", "s3", "--auth-key", keys, "--addr", f"127.0.0.1:{self._port}", str(self.root)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield
            finally:
                process.kill()

    def manifests(self) -> dict[str, set[str]]:
        """Version -> slaves whose copy is whole."""
        found: dict[str, set[str]] = {}
        for path in self.root.glob("bucket/runs/mine/*/*.json"):
            found.setdefault(path.parent.name.partition("-")[0], set()).add(path.stem)
        return found

    def complete(self) -> list[int]:
        return sorted(int(v.split(".")[1]) for v, slaves in self.manifests().items() if slaves == {"s0", "s1"})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with live.run(live.HEAVY):  # once for all that a test starts
        yield S3Server(tmp_path / "s3")


def run_file(folder: Path, url: str, backup: str = "") -> Path:
    file = folder / "run.toml"
    text = RUN.format(directory=folder / "run", text=Path(asyncio.__file__).parent, url=url, backup=backup)
    file.write_text(text)
    return file


def test_a_run_survives_its_store_and_its_store_survives_the_loss_of_all_slaves(
    tmp_path: Path, server: S3Server
) -> None:
    file, directory, log = run_file(tmp_path, "s3://bucket/runs"), tmp_path / "run", tmp_path / "up.log"
    with dips_started("up", file, log=log, **server.there) as up:  # the server is away when the run begins
        until(lambda: published(directory) >= 3, "versions without a store", log)
        with server.serving():
            until(server.complete, "a copy", log)
            os.kill(pid_of(directory, "backup"), signal.SIGKILL)
            before = max(server.complete())
        gone = published(directory)
        until(lambda: published(directory) > gone + 2, "versions while the server is away", log)
        with server.serving():
            until(lambda: max(server.complete()) > before, "a copy by a new process", log)
            up.terminate()
            assert ended(up, log) == 143
    last, kept = published(directory), server.complete()
    shutil.rmtree(directory / "slaves")
    with server.serving():
        restored = dips("restore", directory, "--from", "s3://bucket/runs", **server.there)
        assert restored.returncode == 0, restored.stderr
        assert f"version 1:{kept[-1]} of slave s1 is restored" in restored.stdout
        with dips_started("up", file, log=log, **server.there) as up:
            tape = directory / "master" / TAPE_NAME
            until(lambda: [line for line in records(tape) if line["kind"] == "rolled_back"], "the rollback", log)
            (back,) = [line for line in records(tape) if line["kind"] == "rolled_back"]
            assert (back["origin"], back["version"]) == (f"1:{kept[-1]}", f"2:{kept[-1]}")
            assert (back["lost_tokens"] > 0) == (last > kept[-1])
            until(lambda: any(v.startswith("2.") for v in server.manifests()), "a copy of the new timeline", log)
            end_at_a_limit(directory)
            assert ended(up, log) == 0, log.read_text()
    verified = dips("verify", directory)
    assert verified.returncode == 0, verified.stdout
    written = [path for path in (*directory.rglob("*"), log) if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in restored.stdout + verified.stdout


def test_a_copier_killed_in_the_middle_leaves_no_version_and_goes_on_there(tmp_path: Path, server: S3Server) -> None:
    file = run_file(tmp_path, "s3://bucket/runs", 'rate = "1 Mbit/s"')
    directory, log = tmp_path / "run", tmp_path / "log"
    with server.serving(), dips_started("up", file, log=log, **server.there) as up:
        objects = server.root / "bucket" / "runs" / "mine"
        until(lambda: list(objects.glob("*/*.00000")), "the first part", log)
        up.send_signal(signal.SIGSTOP)  # starts no other process meanwhile
        try:
            os.kill(pid_of(directory, "backup"), signal.SIGKILL)
            assert server.manifests() == {}
            (part,) = objects.glob("*/*.00000")
            written_ns = part.stat().st_mtime_ns
            refused = dips("restore", directory, "--from", "s3://bucket/runs", "--slave", "s0", **server.there)
            assert (refused.returncode, "no slave's copy is whole" in refused.stderr) == (2, True)
        finally:
            up.send_signal(signal.SIGCONT)
        until(lambda: server.manifests(), "its manifest, by the next process", log)
        assert part.stat().st_mtime_ns == written_ns


def test_mistakes_are_said_before_the_run_begins_and_an_altered_object_is_refused(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also types the lines of the document, with a directory for the store."""
    file, directory, log = run_file(tmp_path, "s3://bucket/runs"), tmp_path / "run", tmp_path / "up.log"
    with server.serving():
        assert dips("up", file, "--check", **server.there).returncode == 0
        wrong = dips("up", file, **{**server.there, "AWS_SECRET_ACCESS_KEY": SECRET[::-1]})
        assert (wrong.returncode, "refuses the credentials" in wrong.stderr) == (2, True)
        assert SECRET[::-1] not in wrong.stderr
        lost = dips("up", run_file(tmp_path, "s3://nothing/runs"), "--check", **server.there)
        assert (lost.returncode, "no such bucket" in lost.stderr) == (2, True)
    assert not directory.exists()
    store = tmp_path / "copies"
    with dips_started("up", run_file(tmp_path, f"file://{tmp_path}/unused"), log=log):
        until(lambda: published(directory) >= 2, "versions", log)
        end_at_a_limit(directory)
        until(lambda: "ended at version" in log.read_text(), "the end", log)
    monkeypatch.chdir(ROOT)
    (block,) = [
        b for b in blocks_below(ROOT / "docs" / "storage.md", "Copies in an object store") if "--once" in b.text
    ]
    copy, restore = [
        line.replace("runs/mine", str(directory)).replace("file:///backup/runs", f"file://{store}").split()[1:]
        for line in block.text.splitlines()
    ]
    copied = dips(*copy)
    assert copied.returncode == 0, copied.stderr
    shutil.rmtree(directory / "slaves")
    (part,) = store.glob("mine/*/s1-*.00000")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    altered = dips(*restore)
    assert (altered.returncode, bool(re.search(r"s1-\S+ .* was altered", altered.stderr))) == (2, True)
    assert not list(directory.glob("slaves/s1/manifest-*"))
    part.write_bytes(whole)
    assert dips(*restore).returncode == 0
    exported = dips("export", directory, "--to", f"file://{store}/model")
    assert exported.returncode == 0, exported.stderr
    assert {path.name for path in (store / "model").iterdir()} > {"config.json", "model.safetensors"}
