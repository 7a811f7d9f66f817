"""The trainer in a whole run on loopback: real master, slaves and clusters, each a process of its own.

Shows what people are promised: the model learns, the held-out loss of each version is on the tape, the last version
is among them, and an exported version has the very loss that was reported for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trainer_run import TRAIN, Processes, records
from support.waiting import NO_LIMIT_S

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import parse_version
from dips.core.net.security import INSECURE
from dips.trainer.evaluate import Evaluator, evaluate_live
from dips.trainer.export import export_model, read_export
from dips.worker.reader import fetch_version


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as children:
        yield children


@pytest.fixture
def address(processes: Processes) -> str:
    return processes.start_master("slaves=2", "min_clusters=2", "sync_every=8")


def test_a_run_from_the_seed_to_an_exported_model(processes: Processes, address: str, tmp_path: Path) -> None:
    processes.start_slaves(address, ("s0", "s1"))
    for cluster, gap in (("a", 0.0), ("b", 0.4)):
        processes.start_cluster(address, cluster, TRAIN.model_copy(update={"emulate_gap": gap}))
    words = ["--max-bytes", str(TRAIN.max_bytes), "--heldout-max-bytes", str(TRAIN.heldout_max_bytes)]
    tape = processes.tape("heldout")
    processes.start("heldout", ["eval", address, "--follow", "--insecure", "--tape", str(tape), *words])

    def has_learned() -> bool:
        losses = [record["loss"] for record in processes.records("heldout", "heldout")]
        return len(losses) > 2 and losses[-1] < min(4.2, losses[0])

    processes.until("heldout", has_learned, "a held-out loss that falls")
    processes.stop_run("a", "b", "heldout")

    heldout = records(tape, "heldout")
    assert parse_version(heldout[0]["version"]) < parse_version(heldout[-1]["version"])
    assert heldout[-1]["loss"] < min(heldout[0]["loss"], 4.4)
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
        fetch_version(address, "demo", "test", INSECURE, version=parse_version("1:0"), deadline_s=NO_LIMIT_S)
    assert gone.value.code is RefusalCode.VERSION_GONE
