"""A person's own loop as two clusters of a run that `dips up` starts, on real processes, until an operator stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.dips_command import ROOT, dips, ended, pid_of
from support.up_run import UpRun, endless
from support.waiting import until


def test_own_loop_as_two_clusters_while_master_and_slave_get_sigterm(tmp_path: Path) -> None:
    own_loop = endless(ROOT / "examples" / "own_loop.py", tmp_path, "steps=200")
    with UpRun(tmp_path, dict.fromkeys("ab", (sys.executable, own_loop))) as run:
        run.until_version(1)
        for name in ("s0", "master"):  # not sent by their supervisor: it starts them again
            os.kill(pid_of(run.directory, name), signal.SIGTERM)
        until(lambda: run.log.read_text().count("was ended by SIGTERM (exit code 143), is started again") == 2, "both")
        run.until_version(4)
        run.stop()
    assert all("version 1:" in run.logs[name].read_text() for name in "ab")
    assert "DIPS_CLUSTER=a DIPS_KEYS=" in run.log.read_text()
    told = dips("export", run.directory, "--to", tmp_path / "m.safetensors", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["tokens"] >= 4 * 2 * 8 * 16 * 64, "rounds of two clusters, 8 steps, batches of 16"
    assert load_file(tmp_path / "m.safetensors")["embedding.weight"].shape == (256, 64)


@pytest.mark.parametrize(("early", "late"), ["ab", "ba"])
def test_two_clusters_as_the_page_starts_them_and_the_second_one_late(tmp_path: Path, early: str, late: str) -> None:
    """The page's own program, unchanged: the first cluster waits, and both merge until each has made its steps."""
    program = (sys.executable, ROOT / "examples" / "own_loop.py")
    with UpRun(tmp_path, {}) as run:
        first = run.begin(early, program)
        log = run.logs[early]
        until(lambda: "waiting for the run's first merge" in log.read_text(), "it waits", log)
        assert "step 40:" not in log.read_text(), "two rounds of 8 steps, and a step that is under way"
        second = run.begin(late, program)
        assert [ended(process, run.log) for process in (first, second)] == [0, 0]
        told = json.loads(dips("status", run.directory, "--json").stdout)
        assert dips("stop", run.directory).returncode == 0
    assert all("step 200:" in run.logs[name].read_text() for name in "ab")
    assert told["tokens"] == 2 * 200 * 16 * 64, "all steps of both, and none of them lost"
    assert dips("verify", run.directory).returncode == 0


def test_the_steps_of_a_loop_that_ends_before_another_cluster_comes_are_merged(tmp_path: Path) -> None:
    """Fewer steps than a push is due after: the first cluster waits at its end, and both are counted."""
    short = tmp_path / "short.py"
    short.write_text((ROOT / "examples" / "own_loop.py").read_text().replace("steps=200", "steps=5"))
    with UpRun(tmp_path, {}) as run:
        first = run.begin("b", (sys.executable, short))
        until(lambda: "the training loop ended 1 min ago" in run.logs["b"].read_text(), "it waits", run.logs["b"])
        second = run.begin("a", (sys.executable, short))
        assert [ended(process, run.log) for process in (first, second)] == [0, 0]
        told = json.loads(dips("status", run.directory, "--json").stdout)
        assert dips("stop", run.directory).returncode == 0
    assert told["tokens"] == 2 * 5 * 16 * 64
    for name in "ab":
        last = run.logs[name].read_text().splitlines()[-1]
        assert "left the run with version" in last
        assert "5 steps with 5120 tokens were counted" in last
    verified = dips("verify", run.directory, "--replay")
    assert verified.returncode == 0, "the published model is what both pushed, merged"


WITHOUT_POSIX = """
import sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
import torch, dips
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
with dips.DiLoCo(model, optimizer, tokens_per_step=1, steps=2) as sync:
    while not sync.done:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
print("steps:", sync.steps)
"""

FORKS = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
import dips.worker, grpc
class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: (called.set(), ended.wait(), b"")[2])
called, ended = threading.Event(), threading.Event()
server = grpc.server(ThreadPoolExecutor(2), (Handler(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
call = threading.Thread(target=lambda: channel.unary_unary("/a/b")(b""))
call.start()
called.wait()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
ended.set()
call.join()
print("steps: 2")
"""


@pytest.mark.parametrize("program", [WITHOUT_POSIX, FORKS], ids=["without POSIX modules", "forks during a call"])
def test_an_ordinary_program_runs_without_a_word_of_ours(program: str) -> None:
    """Without a master also on Windows; and gRPC prints no line for each fork, as of a data loader's workers."""
    there = {name: value for name, value in os.environ.items() if not name.startswith(("DIPS_", "GRPC_"))}
    ended = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False, env=there)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "steps: 2\n", "")
