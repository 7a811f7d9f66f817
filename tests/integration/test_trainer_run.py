"""The trainer in a whole run on loopback: real master, slaves and clusters, each a process of its own.

Shows what people are promised: the model learns, the held-out loss of each version is on the tape, the last version
is among them, and an exported version has the very loss that was reported for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.master_process import START_S, MasterProcess
from support.trainer_run import TRAIN, Processes, records

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import parse_version
from dips.core.net.security import INSECURE
from dips.trainer import evaluate as evaluation
from dips.trainer.evaluate import Evaluator, evaluate_live, follow
from dips.trainer.export import export_model, read_export
from dips.worker.config import ClientConfig
from dips.worker.reader import fetch_version

TOKENS = 40_000


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    children = Processes(tmp_path)
    yield children
    children.kill_all()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    knobs = ("slaves=2", "min_clusters=2", "sync_every=8", f"tk_max={TOKENS}", "grace_s=0.2", "linger_s=600")
    master = MasterProcess(tmp_path / "run", *knobs)
    yield master.started().address
    master.popen.kill()
    master.popen.wait(START_S)


@pytest.fixture(autouse=True)
def _keep_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(evaluation, "configure_logging", lambda *args: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_run_from_the_seed_to_an_exported_model(processes: Processes, address: str, tmp_path: Path) -> None:
    processes.start_slaves(address, ("s0", "s1"))
    for cluster, gap in (("a", 0.0), ("b", 0.4)):
        processes.start_cluster(address, cluster, TRAIN.model_copy(update={"emulate_gap": gap}))
    tape = tmp_path / "heldout.tape"
    # The evaluator is this process; it ends because the run does.
    client = ClientConfig(master=address, tape=tape, connect_wait_s=60.0, insecure=True)
    assert follow(TRAIN, client) == 0
    for cluster in ("a", "b"):
        assert processes.exit_code(cluster) == 0, processes.log(cluster)

    heldout = records(tape, "heldout")
    # On a busy machine the first versions may be over before the evaluator has read its text.
    assert parse_version(heldout[0]["version"]) < parse_version(heldout[-1]["version"])
    assert 4.0 < heldout[0]["loss"] < 5.6
    assert heldout[-1]["loss"] < min(heldout[0]["loss"], 4.3)
    assert heldout[-1]["tokens"] >= TOKENS
    for cluster in ("a", "b"):
        losses = [record["loss"] for record in processes.records(cluster, "step")]
        assert losses[-1] < losses[0] - 1.0

    reported, last = heldout[-1]["loss"], parse_version(heldout[-1]["version"])
    assert evaluate_live(address, "demo", TRAIN, INSECURE).loss == pytest.approx(reported, abs=1e-6)
    fetched = fetch_version(address, "demo", "test", INSECURE)
    assert fetched.version == last
    export_model(fetched, tmp_path / "model.safetensors")
    evaluated = Evaluator(TRAIN.model_copy(update={"threads": 2}))(read_export(tmp_path / "model.safetensors"))
    assert evaluated.loss == pytest.approx(reported, abs=1e-6)
    assert (evaluated.version, evaluated.tokens) == (last, heldout[-1]["tokens"])

    with pytest.raises(Refused) as gone:
        fetch_version(address, "demo", "test", INSECURE, version=parse_version("1:0"), deadline_s=10.0)
    assert gone.value.code is RefusalCode.VERSION_GONE
