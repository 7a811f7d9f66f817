"""What a run can decide of a cluster's pushes, on clusters of several ranks, with pushes of every wire type.

A scripted master, which decides each push in turn; every rank's parameters are compared after each step, and every push
with its rounding, with those of a one-process cluster under the same script, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.fork_server import ForkServer
from support.parallel_models import full_model
from support.parallel_process import TOKENS
from support.parallel_run import RankedCluster
from support.run_for_workers import CHUNK_BYTES, RunForWorkers

from dips.core.ids import PushId, Version
from dips.core.messages import Settings, VerdictKind
from dips.core.observe.tape import read_tape
from dips.worker.torch_model import TorchParameters

F32 = NDArray[np.float32]

EVERY = 2

SCRIPT = ("seed", "applied", "excluded", "aborted", "applied", "rolled back", "lost", "donation", "applied")
"""What becomes of each push. A lost version is asked for while a push waits for its verdict, which is lost, too."""

STEPS = EVERY * (len(SCRIPT) - 3)
"""The seed and the donation hold no steps, and an aborted push is sent again at once."""


class ScriptedRun(RunForWorkers):
    """Decides pushes by SCRIPT."""

    def __init__(self) -> None:
        model = full_model()
        layout = TorchParameters(model, torch.optim.SGD(model.parameters())).layout()
        settings = Settings(
            sync_every_steps=EVERY, heartbeat_s=0.02, verdict_wait_s=1000.0, chunk_bytes=CHUNK_BYTES, window_chunks=4
        )
        super().__init__(settings, layout=layout)
        self.decide = self._by_script
        self.contents: list[F32] = []
        """Of each push, in their order, as the slaves make it of what they got."""
        self._lost: Version | None = None

    def _by_script(self, push: PushId) -> VerdictKind | None:
        turn = [self._id(request, request.seq) for request in self.pushes].index(push)
        if turn == len(self.contents):
            self.contents.append(self.theta_of(push))
        match SCRIPT[turn]:
            case "excluded":
                return VerdictKind.EXCLUDED
            case "aborted":
                return VerdictKind.ABORTED
            case "rolled back":
                self._new_timeline()
                self.publish(self.contents[0])
                return VerdictKind.ROLLED_BACK
            case "lost":
                self.donate = self.version
                return None
            case "donation":
                self.donate = None
                self._new_timeline()
        return VerdictKind.APPLIED

    def _new_timeline(self) -> None:
        """The next version that is published begins one."""
        assert self.version is not None, "there was a seed"
        self.version = Version(self.version.timeline + 1, -1)


class Played:
    """What a cluster did under the script."""

    def __init__(self, server: ForkServer, folder: Path, kind: str, wire: str) -> None:
        run, tape = ScriptedRun(), folder / "tape.jsonl"
        given = {
            "DIPS_MASTER": run.address, "DIPS_RUN": "run", "DIPS_CLUSTER": "a", "DIPS_INSECURE": "1",
            "DIPS_WORKER_WIRE_DTYPE": wire, "DIPS_WORKER_TAPE": str(tape),
        }  # fmt: skip
        try:
            cluster = RankedCluster.start(server, kind, folder / "ranks", given, steps=STEPS)
            self.trained, self.synced = cluster.flats("trained"), cluster.flats("synced")
            self.news: list[Mapping[str, object]] = [record["news"] for record in cluster.records()]
            self.pushes = [
                (each.steps, each.tokens, each.base, each.fence, each.wire, each.donates, each.seq)
                for each in run.pushes
            ]
            self.contents = run.contents
            self.left = run.leaves
        finally:
            run.close()
        events = list(read_tape(tape))
        self.verdicts = [(event["verdict"], event["version"]) for event in events if event["kind"] == "verdict"]
        self.installs = [(event["version"], event["mode"]) for event in events if event["kind"] == "installed"]


@pytest.fixture(scope="module")
def reference(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    """A one-process cluster with pushes of this wire type."""

    @functools.cache
    def play(wire: str) -> Played:
        return Played(server, tmp_path_factory.mktemp(wire), "one", wire)

    return play


def test_a_one_process_cluster_does_what_the_script_says(reference: Callable[[str], Played]) -> None:
    """So that equal is equal to something."""
    alone = reference("float32")
    kinds = [kind for kind, _ in alone.verdicts]
    assert kinds == ["APPLIED", "APPLIED", "EXCLUDED", "ABORTED", "APPLIED", "ROLLED_BACK", "APPLIED", "APPLIED"]
    trained, synced, seed = alone.trained, alone.synced, alone.synced[0]
    ends = [trained[step - 1] for step in range(EVERY, STEPS + 1, EVERY)]
    applied, excluded, aborted, rolled_back, lost, last = ends
    donated = synced[8]
    for content, made in zip(
        alone.contents, [seed, applied, excluded, aborted, aborted, rolled_back, lost, donated, last], strict=True
    ):
        assert np.array_equal(content, made)
    assert np.array_equal(synced[4], applied), "what was excluded is dropped"
    assert np.array_equal(synced[8], seed), "the version that the run went back to"
    assert np.array_equal(synced[10], donated), "as it was given back, without the steps of the push that was lost"
    assert alone.news[0]["resets"] == 1
    assert alone.news[0]["progress"] == 3 * EVERY * TOKENS, "tokens of what was applied"


@pytest.mark.parametrize(
    ("kind", "wire"),
    [("tp2", "float32"), ("fsdp2", "int8"), ("pp2", "bfloat16"), ("fsdp-ep4", "int4"), ("interleaved2", "int8")],
)
def test_ranks_do_what_one_process_does(
    server: ForkServer, reference: Callable[[str], Played], tmp_path: Path, kind: str, wire: str
) -> None:
    played, alone = Played(server, tmp_path, kind, wire), reference(wire)
    assert played.pushes == alone.pushes
    assert played.verdicts == alone.verdicts
    assert played.installs == alone.installs
    same = [np.array_equal(one, other) for one, other in zip(played.contents, alone.contents, strict=True)]
    assert all(same), f"pushes as the slaves have them: {same}"
    assert np.array_equal(alone.contents[1], alone.trained[EVERY - 1]) is (wire == "float32"), "differences are rounded"
    for what, ours, theirs in (
        ("trained", played.trained, alone.trained), ("synced", played.synced, alone.synced),
    ):  # fmt: skip
        same = [np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)]
        assert all(same), f"{what}, step by step: {same}"
    assert all(said == alone.news[0] for said in played.news), "every rank knows it"
    assert [leave.reason for leave in played.left] == [leave.reason for leave in alone.left]
