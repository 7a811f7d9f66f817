"""docs/operations.md, "Upgrade": a run of the release in tests/frozen/upgrade_from.txt becomes one of this tree, one
process at a time while it trains, partly back again, and loses nothing.

The file names a commit of this history that the page's rule lets work with this tree: both speak one version of the
protocol, and this tree reads each file of that one. When a change ends that, name the commit that made it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support import live
from support.documents import OPERATIONS, blocks_below
from support.fault_run import CLUSTERS, SLAVES, FaultRun
from support.fork_server import ForkedProcess, ForkServer
from support.judged_run import replayed
from support.repository import ROOT
from support.watched_run import TRAIN
from support.whole_run import option_words

from dips.core.errors import TERMINATED
from dips.local.authority import ensure_keys
from dips.local.log_files import tape_path

COMMIT = (ROOT / "tests" / "frozen" / "upgrade_from.txt").read_text().strip()
SERVERS = (*SLAVES, "master")
OLD, NEW = "/opt/dips/", "/opt/dips-new/"  # the page's; here a unit's path says which tree its process runs


class Process(ForkedProcess):
    """One that was started from nothing."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(popen.pid)
        self._popen = popen

    def poll(self) -> int | None:
        self.returncode = self._popen.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self.returncode = self._popen.wait(timeout)
        return self.returncode


class Releases(ForkServer):
    """Starts each process with the release that its unit names, as `dips` of an environment of its own."""

    def __init__(self, old: Path, units: Path) -> None:
        super().__init__()
        self.units, self.trees = units, {OLD: old, NEW: ROOT}
        for name in (*SERVERS, *CLUSTERS):
            self.unit(name).write_text(OLD)

    def unit(self, name: str) -> Path:
        return self.units / f"dips-{name}.service"

    def start(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedProcess:
        with log.open("ab") as out:
            command = [sys.executable, "-m", "dips.cli", *arguments]
            env = {**environment_of(self.trees[self.unit(name).read_text()]), **environment}
            return Process(subprocess.Popen(command, stdout=out, stderr=out, env=env))


def environment_of(tree: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
    return {**kept, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def old_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sources from git, and its kernels compiled, as step 2 of the page says."""
    tree = tmp_path_factory.mktemp("old")
    packed = subprocess.run(["git", "archive", "--output", tree / "old.tar", COMMIT, "src"], cwd=ROOT, check=False)
    assert packed.returncode == 0, f"this checkout has no commit {COMMIT}: git fetch --unshallow"
    with tarfile.open(tree / "old.tar") as tar:
        tar.extractall(tree, filter="data")
    for root in (tree, ROOT):
        subprocess.run([sys.executable, "-m", "dips.cli", "warm-up"], env=environment_of(root), check=True)
    return tree


class UpgradedRun(FaultRun):
    """Its clusters are `dips train`."""

    weight = live.HEAVY

    def __init__(self, directory: Path, releases: Releases, keys: Path) -> None:
        super().__init__(directory, releases, keys=keys)
        self.releases = releases

    def _arguments(self, name: str) -> list[str]:
        if name not in CLUSTERS:
            return super()._arguments(name)
        own = {
            "cluster_id": name, "master": self.address, "tape": tape_path(self.directory, name),
            "checkpoint_dir": self.place(name), "checkpoint_every_s": 1, "resume": True,
        }  # fmt: skip
        return ["train", *TRAIN, *option_words(own)]

    def change(self, name: str, release: str) -> None:
        """As the page prints it for slave s1; then everyone is back and a version is published."""
        before, child = self.incarnations(), self.children[name]
        self.will_end(name)
        [block] = [block.text for block in blocks_below(OPERATIONS, "Upgrade")]
        typed = block.replace("dips-s1", f"dips-{name}").replace("/etc/systemd/system", str(self.releases.units))
        if release == OLD:
            typed = typed.replace(f"{OLD},{NEW}", f"{NEW},{OLD}")
        systemctl = f"systemctl() {{ [ $1 != stop ] || kill {child.pid}; }}\n"  # whoever watches here starts it again
        subprocess.run(["bash", "-euc", systemctl + typed], check=True)
        self.until(lambda: child.poll() is not None, f"{name} does not end")
        assert child.poll() in (0, TERMINATED), self.log(name)
        self.recovered({name: before.get(name)} if name in CLUSTERS else {})
        self.healed()


def test_a_run_is_upgraded_one_process_after_the_other_and_back(old_release: Path, tmp_path: Path) -> None:
    ensure_keys(tmp_path / "keys", CLUSTERS, SLAVES)
    with UpgradedRun(tmp_path / "run", Releases(old_release, tmp_path), tmp_path / "keys") as run:
        run.began()
        for name in (*SERVERS, "a"):
            run.change(name, NEW)
        for name in SERVERS:  # the page's way back, with cluster a ahead
            run.change(name, OLD)
        assert_a_checkpoint_of_the_new_form_is_refused(run, "a")
        for name in (*SERVERS, *CLUSTERS[1:]):
            run.change(name, NEW)
        run.until_versions(2)
        run.stop()
        assert replayed(run.directory) > 0


def assert_a_checkpoint_of_the_new_form_is_refused(run: UpgradedRun, name: str) -> None:
    """The old release ends with a sentence and leaves the files alone; the new one goes on from them."""
    before, log = run.incarnations(), run.log_path("old-release")
    run.hold(name)
    files = checkpoints(run.place(name))
    run.releases.unit(name).write_text(OLD)
    process = run.releases.start(name, run._arguments(name), log, run._security_of(name))
    try:
        run.until(lambda: process.poll() is not None, "the old release refuses the checkpoint", log.read_text)
    finally:
        process.kill()
    said = log.read_text()
    assert process.poll() == 2, said
    assert "it is not one of this release" in said
    assert "Traceback" not in said
    assert checkpoints(run.place(name)) == files
    run.releases.unit(name).write_text(NEW)
    run.release(name)
    run.recovered({name: before.get(name)})
    run.healed()


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("checkpoint-*") if file.is_file()}
