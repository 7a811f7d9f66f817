"""The script for Slurm on a real Slurm: what follows each way in which a job can end.

The trainer is a stand-in, which says what it is told and pushes for as long as it is asked to; in the last tests it is
torchrun, and `dips train` in a real run.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import live
from support.deploy_files import SMALL, with_keys, written
from support.dips_command import ROOT, dips
from support.ports import own_port
from support.slurm import KILL_WAIT_S, WHY_NOT, Slurm, is_installed
from support.up_run import endless
from support.waiting import until
from support.whole_run import WholeRun

from dips.deploy import clusters, render
from dips.deploy.deploy_file import NODE_PORTS, read_deploy_file

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHY_NOT)

STAND_IN = """\
leave() {
  echo "node $SLURM_NODEID: TERM"
  sleep "$(echo "$PUSH_S" | cut -d+ -f$((SLURM_NODEID + 1)))"
  echo "node $SLURM_NODEID: pushed"
  exit 143
}
trap leave TERM
echo "node $SLURM_NODEID: attempt ${SLURM_RESTART_COUNT:-0}, process $$"
while [ -z "${CODE-}" ]; do sleep 0.1; done
exit "$CODE"
"""
LEFT = "SIGTERM: this cluster has left the run, and this process ends with exit code 143"
BEGAN = tuple(f"node {node}: attempt 0" for node in (0, 1))
PUSHED = tuple(f"node {node}: pushed" for node in (0, 1))
SHORT_S = 5
"""Stands for the time of a last push: USR1 is sent so long before the time limit, or half a minute more."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as found:
        yield found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "end_s", lambda deployment: SHORT_S)


def rendered(slurm: Slurm, folder: Path, *, nodes: int = 2, table: str = "", servers: str = "") -> Path:
    """The script of a cluster as `dips deploy render` writes it; its command is the stand-in's, or of `table`.

    servers: more of the table `deploy`.
    """
    table = table or f'command = ["bash", "{slurm.jobs}/stand-in.sh"]'
    site = '[[sites]]\nname = "there"\n\n[[clusters]]\nid = "a"\nsite = "there"\nstarts = "slurm"\n'
    more = f"{site}nodes = {nodes}\ncpus = 2\nmemory = '1 GiB'\n{table}\n"
    changes = {"192.0.2.7": "127.0.0.1", '"small"': '"test"', "slaves = 2": f"slaves = 2\n{servers}"}
    text = SMALL.partition("[[clusters]]")[0] + more
    deployment = read_deploy_file(written(folder, text, changes))
    (slurm.jobs / "stand-in.sh").write_text(STAND_IN)
    name, text = render.script(deployment, deployment.clusters[0])
    file = slurm.jobs / name
    file.write_text(text)
    return file


def test_before_the_time_limit_all_nodes_push_and_the_job_is_queued_again(
    slurm: Slurm, short: None, tmp_path: Path
) -> None:
    file = rendered(slurm, tmp_path)
    # The nodes of the first end at different times. The second's push takes longer than its time, and the third is
    # cancelled during its push.
    one, slow, cancelled = (slurm.submit(file, "--time=1", PUSH_S=push_s) for push_s in ("3+0", "600+600", "600+600"))
    cancelled.until_said("node 0: TERM", "node 1: TERM")
    cancelled.cancel()
    one.until_it_runs_again()
    assert all(line in one.log for line in (*BEGAN, *PUSHED))
    assert cancelled.end()["Restarts"] == "0"
    slow.until_it_runs_again()
    assert "pushed" not in slow.log
    for job in (one, slow):
        job.cancel()
        job.end()


def test_a_cluster_that_is_cancelled_has_time_to_push(slurm: Slurm, short: None, tmp_path: Path) -> None:
    """Plain scancel: until KillWait. With --batch and TERM, until the time limit."""
    file = rendered(slurm, tmp_path)
    long_s = KILL_WAIT_S + 2
    plain, batch = slurm.submit(file, PUSH_S="2+0"), slurm.submit(file, PUSH_S=f"{long_s}+{long_s}")
    for job in (plain, batch):
        job.until_said(*BEGAN)
    plain.cancel()
    batch.cancel("--batch", "--signal=TERM")
    for job, state in ((plain, "CANCELLED"), (batch, "FAILED")):
        facts = job.end()
        assert (facts["JobState"], facts["Restarts"]) == (state, "0")
        assert all(line in job.log for line in PUSHED), job.log


def test_a_job_that_is_cancelled_as_its_cluster_dies_stays_cancelled(slurm: Slurm, short: None, tmp_path: Path) -> None:
    """Whichever the script hears of first."""
    file = rendered(slurm, tmp_path, table='command = ["bash", "-c", "scancel $SLURM_JOB_ID; exit 1"]')
    jobs = [slurm.submit(file) for _ in range(8)]
    assert {(job.end()["JobState"], job.facts["Restarts"]) for job in jobs} == {("CANCELLED", "0")}


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (2, "FAILED"), (8, "FAILED")])
def test_a_cluster_that_is_done_or_needs_a_person_is_not_queued_again(
    slurm: Slurm, short: None, tmp_path: Path, code: int, state: str
) -> None:
    facts = slurm.submit(rendered(slurm, tmp_path, nodes=1), CODE=str(code)).end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == (state, f"{code}:0", "0")


def test_a_killed_task_brings_the_job_back(slurm: Slurm, short: None, tmp_path: Path) -> None:
    job = slurm.submit(rendered(slurm, tmp_path), PUSH_S="0+0")
    job.until_said(*BEGAN)
    pid = re.search(r"node 1: attempt 0, process (\d+)", job.log)
    assert pid is not None
    os.kill(int(pid[1]), signal.SIGKILL)
    job.until_it_runs_again()
    job.cancel()
    job.end()


@pytest.mark.parametrize("partition", ["requeued", "requeued-later", "cancelled", "cancelled-later"])
def test_a_job_that_is_preempted_pushes_and_comes_back(
    slurm: Slurm, short: None, tmp_path: Path, partition: str
) -> None:
    preempted(slurm, rendered(slurm, tmp_path), partition)


def preempted(slurm: Slurm, file: Path, partition: str) -> None:
    job = slurm.submit(file, f"--partition={partition}", PUSH_S="1+1")
    job.until_said(*BEGAN)
    other = slurm.submit(file, "--partition=urgent", "--exclusive", PUSH_S="0+0")
    other.until_said(*BEGAN)
    assert all(line in job.log for line in PUSHED), job.log
    other.cancel()
    job.until_it_runs_again()
    job.cancel()
    assert job.end()["Restarts"] == "1"
    other.end()


def test_a_site_may_send_the_signal_at_a_preemption_too(short: None, tmp_path: Path) -> None:
    with Slurm(more="SlurmctldParameters=preempt_send_user_signal") as slurm:
        for partition in ("requeued-later", "cancelled-later"):
            preempted(slurm, rendered(slurm, tmp_path), partition)


WRONG_ON_ONE_NODE = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while os.environ["RANK"] == "1":
    time.sleep(0.1)
sys.exit(2)
"""


def test_a_wrong_setting_of_one_node_under_torchrun_ends_the_job(short: None, tmp_path: Path) -> None:
    """The other node knows nothing of it, and is killed when its time is over: srun itself would end with 137."""
    (tmp_path / "wrong.py").write_text(WRONG_ON_ONE_NODE)
    table = f'torchrun = true\nrestarts = 0\ncommand = ["python", "{tmp_path}/wrong.py"]'
    with live.run(live.HEAVY), Slurm(user=0) as slurm:
        job = slurm.submit(rendered(slurm, tmp_path, table=table))
        facts = job.end()
        assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), job.log


def test_the_trainers_last_push_before_the_time_limit_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of two nodes, each with torchrun and one rank of examples/fsdp_loop.py, in a run of real servers."""
    monkeypatch.setattr(clusters, "RENDEZVOUS_PORT", own_port())
    port = own_port(NODE_PORTS)
    program = endless(ROOT / "examples" / "fsdp_loop.py", tmp_path, "STEPS = 8, 32, 200")
    table = f'torchrun = true\nrestarts = 0\ncommand = ["python", "{program}"]'
    ports = f"master_port = {port}\ndata_port = {port + 1 if port < 32000 else 30000}"
    keys = tmp_path / "keys"
    with Slurm(user=0) as slurm:
        file = rendered(slurm, tmp_path, table=table, servers=ports)
        with_keys(tmp_path / "run.toml")
        with WholeRun(tmp_path / "run", keys=keys, listen=f"127.0.0.1:{port}", sync_every=8) as whole:
            tape = tmp_path / "run" / "a.jsonl"
            job = slurm.submit(file, DIPS_KEYS=str(keys / "a"), DIPS_WORKER_TAPE=str(tape))
            until(lambda: whole.version() >= 2, "a few versions", job.story)
            # USR1 comes 120 s before, or half a minute earlier.
            minutes = int(job.facts["RunTime"].split(":")[1]) + 3
            slurm.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")
            job.until_said(LEFT)
            until(lambda: job.facts["JobState"] == "PENDING", "it is queued again", job.story)
            slurm.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=UNLIMITED")
            (left,) = whole.status().clusters
            assert (left.last_verdict, left.pushes_excluded, left.pushes_aborted) == ("APPLIED", 0, 0)
            job.until_it_runs_again()
            assert "without" not in job.log, "a step that is not pushed is named"
            again = whole.version() + 2
            until(lambda: whole.version() >= again, "more versions", job.story)
            whole.stop()
            facts = job.end()
            assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    done = dips("verify", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
