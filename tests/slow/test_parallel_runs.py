"""Clusters of every parallelism in real runs: what they push and pull is, to the bit, what one-process clusters would.

Steps add to each element what a rule says of its place, its step and its cluster, so that nothing depends on the order
in which gradients are added up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.fork_server import ForkServer
from support.parallel_run import RankedCluster
from support.waiting import until
from support.whole_run import WholeRun

from dips.core.ids import SlaveId
from dips.core.layout import layout_from_json
from dips.core.placement import Placement
from dips.judge.records import read_run
from dips.judge.verify import verify_run

F32 = NDArray[np.float32]

STEPS, EVERY = 6, 2
PATIENT_S = 600.0
"""Rounds wait for both clusters, and clusters for their verdicts: so a run is the same each time."""


@dataclass
class Played:
    """What became of a run of clusters `a` and `b`."""

    trained: dict[str, list[F32]]
    synced: dict[str, list[F32]]
    news: dict[str, list[Mapping[str, object]]]
    directory: Path


def play(server: ForkServer, directory: Path, kind_of: Mapping[str, str]) -> Played:
    """A run with these clusters, each making STEPS steps, all from the first round on."""
    run = WholeRun(
        directory, server=server, sync_every=EVERY, grace_s=PATIENT_S, verdict_wait_s=4 * PATIENT_S,
        round_timeout_s=2 * PATIENT_S, chunk_bytes=4096, heartbeat_s=2.0,
        # what masters2 does not train is in 16 bits, as all of it
        frozen="any" if "masters2" in kind_of.values() else "same",
    )  # fmt: skip
    run.slave = {"record_pushes": True}
    with run:
        gate, clusters = directory / "gate", {}
        for number, (name, kind) in enumerate(kind_of.items()):
            environment = {"DIPS_MASTER": run.address, "DIPS_INSECURE": "1", "DIPS_CLUSTER": name}
            environment["DIPS_WORKER_TAPE"] = str(directory / f"{name}.jsonl")
            clusters[name] = RankedCluster.start(
                server, kind, directory / f"ranks-{name}", environment, gate=gate, number=number, steps=STEPS
            )
        for cluster in clusters.values():
            until(cluster.is_settled, f"{cluster.kind} enters", cluster.logs)
        gate.touch()
        return Played(
            {name: cluster.flats("trained") for name, cluster in clusters.items()},
            {name: cluster.flats("synced") for name, cluster in clusters.items()},
            {name: [record["news"] for record in cluster.records()] for name, cluster in clusters.items()},
            directory,
        )


def pushes(directory: Path) -> dict[str, F32]:
    """The flat vector of each push that the slaves recorded, by the push's name."""
    ledger = read_run(directory).ledger
    assert ledger is not None
    layout = layout_from_json(ledger["layout"])
    slaves = tuple(sorted(SlaveId(name) for name in ledger["slaves"]))
    placement = Placement(slaves, tuple(ledger["placement"]))
    found: dict[str, F32] = {}
    for path in directory.rglob("pushes/round-*.json"):
        record = json.loads(path.read_text())
        for item in record["accepted"]:
            flat = found.setdefault(item["push"], np.full(layout.n_elems, np.nan, np.float32))
            part, start = load_file(path.parent / item["file"])["push"], 0
            for block in placement.blocks_of(SlaveId(record["slave_id"]), layout):
                flat[block.start_elem : block.stop_elem] = part[start : start + block.n_elems]
                start += block.n_elems
    return found


@pytest.fixture(scope="module")
def reference(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Clusters of one process each."""
    return play(server, tmp_path_factory.mktemp("reference") / "run", {"a": "one", "b": "one"})


def check_same(played: Played, reference: Played) -> None:
    """To the bit: what each step made, what came after it, and what the slaves got and published."""
    for name in ("a", "b"):
        for what, ours, theirs in (
            ("trained", played.trained[name], reference.trained[name]),
            ("synced", played.synced[name], reference.synced[name]),
        ):
            same = [np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)]
            assert all(same), f"{what} of cluster {name}, step by step: {same}"
        first = played.news[name][0]
        assert all(said == first for said in played.news[name]), "all ranks know the same"
        assert first == reference.news[name][0], "steps, version, and each token counted once"
    made = pushes(played.directory)
    ends = [played.trained[name][step] for name in ("a", "b") for step in range(EVERY - 1, STEPS, EVERY)]
    for push, flat in made.items():
        assert any(np.array_equal(flat, end) for end in [*ends, played.synced["a"][0]]), f"push {push} is no step's end"
    report = verify_run(played.directory, replay=True)
    assert [str(violation) for violation in report.violations] == []


PAIRS = [
    ("fsdp1", "one"),
    ("ddp2", "fsdp4"),
    ("fsdp2", "hsdp4"),
    ("tp2", "fsdp-tp4"),
    ("pp2", "pp-dp4"),
    ("ep2", "fsdp-ep4"),
    ("interleaved2", "mapped2"),
    ("fsdp2-unsharded", "masters2"),
]


def test_one_process_clusters_move_and_push_what_they_trained(reference: Played) -> None:
    check_same(reference, reference)
    synced = reference.synced["a"]
    assert not np.array_equal(synced[EVERY], reference.trained["a"][EVERY - 1]), "a version was installed"
    assert np.array_equal(synced[EVERY], reference.synced["b"][EVERY])
    assert len(pushes(reference.directory)) == 1 + 2 * STEPS // EVERY


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda kind: kind)
def test_two_parallelisms_train_one(
    server: ForkServer, reference: Played, tmp_path: Path, one: str, other: str
) -> None:
    check_same(play(server, tmp_path / "run", {"a": one, "b": other}), reference)


def test_tied_heads_on_one_rank_and_on_two_stages(server: ForkServer, tmp_path: Path) -> None:
    reference = play(server, tmp_path / "tied", {"a": "one-tied", "b": "one-tied"})
    check_same(play(server, tmp_path / "run", {"a": "fsdp2-tied", "b": "pp2-tied"}), reference)
