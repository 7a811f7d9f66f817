"""The mistakes of a first hour with a loop of one's own, on real processes: what each prints, and its exit code."""

from __future__ import annotations

import http.server
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dips_command import ended, environment, started
from support.waiting import until
from support.whole_run import WholeRun

from dips.core.errors import RefusalCode, Refused, RetryLater

LOOP = """
import atexit, time, torch, dips
atexit.register(print, "atexit")
torch.manual_seed(SEED)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with dips.DiLoCo(model, optimizer, tokens_per_step=8, steps=40) as sync:
    while not sync.done:
        loss = (model(torch.randn(8, 4)) - torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        sync.report(loss)
        optimizer.step()
        print("step", sync.steps, flush=True)
"""
STEP = "        optimizer.step()\n"


def written(folder: Path, *changes: tuple[str, str], seed: int = 0) -> Path:
    """The loop with these replacements."""
    text = LOOP.replace("SEED", str(seed))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "mine.py"
    file.write_text(text)
    return file


def run_to_its_end(file: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, file.name],
        cwd=file.parent,
        env=environment({"DIPS_CLUSTER": "a", **variables}),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The last line of a loop that ends with this code: it names a line of the program, and no option of a command."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dips: ")
    assert "(mine.py, line " in last
    assert "--" not in last
    return last


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    """A run whose version 0 is that of LOOP."""
    folder = tmp_path_factory.mktemp("run")
    with WholeRun(folder / "run", n_slaves=1, preset="steady", overlap="full", sync_every=8) as whole:
        assert run_to_its_end(written(folder), **there(whole, "first")).returncode == 0
        yield whole


def there(run: WholeRun, cluster: str) -> dict[str, str]:
    return {"DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": cluster}


@pytest.fixture
def web_server() -> Iterator[str]:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_address_at_which_another_service_answers(tmp_path: Path, web_server: str) -> None:
    done = run_to_its_end(
        written(tmp_path), DIPS_MASTER=web_server, DIPS_INSECURE="1", DIPS_WORKER_CONNECT_WAIT_S="0.5"
    )
    said = one_sentence(done, RetryLater.exit_code)
    assert (
        f"no master could be joined within 0.5 s at {web_server}: start it, or correct its address (master=, or "
        "DIPS_MASTER); the last try: the peer does not answer (UNAVAILABLE: "
    ) in said


def test_another_model(tmp_path: Path, run: WholeRun) -> None:
    file = written(tmp_path, ("Linear(4, 4)", "Linear(4, 5)"), ("- torch.randn(8, 4)", "- torch.randn(8, 5)"))
    said = one_sentence(run_to_its_end(file, **there(run, "b")), Refused(RefusalCode.LAYOUT, "").exit_code)
    assert "dips: the model of cluster 'b' is not this run's: parameter 'weight' has shape [5, 4]" in said


def test_an_error_of_the_loop_itself_keeps_its_trace_and_says_what_is_lost(tmp_path: Path, run: WholeRun) -> None:
    file = written(tmp_path, (STEP, STEP + "        1 / (12 - sync.steps)\n"))
    done = run_to_its_end(file, **there(run, "b"))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    trace = lines[lines.index("Traceback (most recent call last):") :]
    lost = next(line for line in lines if " without " in line)
    assert lost.startswith("dips: leaving (ZeroDivisionError) without ")
    assert "they were made since the last push, and the parameters may be in the middle of a step" in lost
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "ZeroDivisionError: division by zero"
    assert not any("dips" in line for line in trace), "the trace is of the person's program alone"


@pytest.mark.parametrize("joined", [True, False])
def test_ctrl_c_is_one_sentence(tmp_path: Path, run: WholeRun, joined: bool) -> None:
    written(tmp_path, ("steps=40", "steps=100_000"), (STEP, STEP + "        time.sleep(0.2)\n"))
    log, where = tmp_path / "log", there(run, "b") if joined else {**there(run, "b"), "DIPS_MASTER": "127.0.0.1:1"}
    with started(sys.executable, "mine.py", log=log, cwd=tmp_path, **where) as process:
        until(lambda: ("step 5" if joined else "trying again") in log.read_text(), "the loop", log)
        process.send_signal(signal.SIGINT)
        assert ended(process, log) == -signal.SIGINT  # a shell says 130
    said = [line for line in log.read_text().splitlines() if not line.startswith(("step ", "atexit"))]
    if joined:
        said = said[said.index("dips: ctrl-C: this cluster leaves the run; a second one ends the process at once") :]
        what = "and has left the run; started again, it goes on from the newest version"
    else:
        what = "before it had joined the run"
    assert said[-1].startswith(f"dips: cluster b was ended by ctrl-C {what} (mine.py, line ")
    if joined:
        lost = [line for line in said[1:-1] if " without " in line]
        assert all(line.startswith("dips: leaving (KeyboardInterrupt) without ") for line in lost), "inside a step"
