"""A cluster of two pods from a deployment file: objects by `dips deploy apply`, a real master and slaves, real ranks.

The API server is a stand-in, and support.pods plays the Job's pods as processes: they have the command, the variables
and the keys of the objects, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api_stand_in import StandIn, write_kubeconfig
from support.deploy_files import SMALL, with_keys, written
from support.dips_command import ROOT, dips
from support.pods import PodPlayer
from support.ports import own_port
from support.up_run import endless
from support.waiting import until
from support.whole_run import WholeRun

from dips.cli.main import run
from dips.deploy.deploy_file import NODE_PORTS

RANKS = (
    'id = "a"\nnodes = 2\ntorchrun = true\nrestarts = 1\nimage = "mine:1"\ncommand = ["python", "/app/fsdp_loop.py"]'
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StandIn, Path, int]]:
    """A stand-in with the objects of a deployment, its file, and the port at which its master is to be."""
    port = own_port(NODE_PORTS)
    changes = {
        '"small"': '"test"',  # the run's name
        "192.0.2.7": "127.0.0.1",
        "slaves = 2": f"slaves = 2\nmaster_port = {port}\ndata_port = {port + 1 if port < 32000 else 30000}",
        'id = "a"': RANKS,
    }
    file = written(tmp_path, SMALL, changes)
    with_keys(file)
    with StandIn() as stand_in:
        write_kubeconfig(tmp_path / "kubeconfig", {"here": stand_in.url})
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        assert run(["deploy", "apply", str(file), "--yes", "--no-reach"]) == 0
        yield stand_in, file, port


def test_a_cluster_of_two_pods_comes_back_after_one_was_killed(here: tuple[StandIn, Path, int], tmp_path: Path) -> None:
    stand_in, _, port = here
    keys, directory = tmp_path / "keys", tmp_path / "run"
    program = {"/app/fsdp_loop.py": [str(endless(ROOT / "examples" / "fsdp_loop.py", tmp_path, "STEPS = 8, 32, 200"))]}
    with (
        WholeRun(directory, keys=keys, listen=f"127.0.0.1:{port}", sync_every=8) as whole,
        PodPlayer(stand_in, "test-cluster-a", tmp_path, program, DIPS_WORKER_TAPE=str(directory / "a.jsonl")) as job,
    ):

        def comes_to(version: int) -> bool:
            job.tick()
            assert not job.failed, f"{job.failed}\n{job.logs()}"
            return whole.version() >= version

        until(lambda: comes_to(1), "a version of two pods", job.pods[0].log)
        (before,) = whole.status().clusters
        assert before.ranks == 2
        job.live[1].kill()
        again = whole.version() + 1
        until(lambda: comes_to(again), "a version after the kill", job.pods[0].log)
        whole.stop()
        until(lambda: comes_to(again) and job.complete, "the end of the run", job.pods[0].log)
        assert [pod.replaces >= 1 for pod in job.live if pod.index == 1] == [True]
        (after,) = whole.status().clusters
        assert after.incarnations > before.incarnations
    done = dips("verify", directory)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_setting_fails_the_job_and_starts_no_pod_again(here: tuple[StandIn, Path, int], tmp_path: Path) -> None:
    stand_in, _, _ = here
    stand_in.one("Secret", "test-keys-a")["data"].popitem()
    with PodPlayer(
        stand_in, "test-cluster-a", tmp_path, {"/app/fsdp_loop.py": [str(ROOT / "examples" / "fsdp_loop.py")]}
    ) as job:

        def fails() -> bool:
            job.tick()
            return bool(job.failed)

        until(fails, "the end of the Job", job.pods[0].log)
        assert job.failed.endswith("ended with 2"), job.logs()
        live = job.live
        # One that loses the other before it has looked at its own keys ends with 6, and is started again.
        assert {pod.process.wait() for pod in job.pods if pod not in live} <= {6}
