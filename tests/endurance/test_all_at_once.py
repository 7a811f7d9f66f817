"""Eight clusters and four slaves at once: every round has every cluster, and no chunk is waited for in vain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.diloco import diloco, trained
from support.waiting import NO_LIMIT_S
from support.whole_run import WholeRun

from dips.core.layout import Layout, Parameter
from dips.core.messages import VerdictKind
from dips.core.net.slave_sockets import SlaveSockets

CLUSTERS, SLAVES = 8, 4
LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (40_000 + i,), "float32", f"layers.{i}") for i in range(8)), 30_000)
CHUNK_BYTES = 64 << 10
EVERY = 4
TOKENS = 10 * EVERY  # of one push: sync_every steps of 10 tokens


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.long)])
def test_eight_clusters_and_four_slaves_together(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connects: list[str] = []
    opened: list[int] = []
    connect, open_all = SlaveSockets.reconnect, SlaveSockets.open

    def reconnect(links: SlaveSockets, slave: str) -> None:
        connects.append(slave)
        connect(links, slave)

    def open_slaves(links: SlaveSockets, slaves: Sequence[str]) -> None:
        opened.append(len(slaves))
        open_all(links, slaves)

    monkeypatch.setattr(SlaveSockets, "reconnect", reconnect)
    monkeypatch.setattr(SlaveSockets, "open", open_slaves)
    patient = dict.fromkeys(("verdict_wait_s", "round_timeout_s"), NO_LIMIT_S)
    knobs: dict[str, Any] = {"min_clusters": CLUSTERS, "clip_norm": 1e6, "chunk_bytes": CHUNK_BYTES, **patient}
    with WholeRun(tmp_path, SLAVES, **knobs) as run:
        run.client = {"data_silence_s": NO_LIMIT_S}  # what is lost is never missed: the test would not end
        clusters = [run.cluster(f"c{n}", n + 1, layout=LAYOUT, steps=rounds * EVERY) for n in range(CLUSTERS)]
        for cluster in clusters:
            cluster.join()
        status = run.status()
    assert (status.rounds_merged, status.tokens) == (rounds, rounds * CLUSTERS * TOKENS)
    assert {verdict.kind for cluster in clusters for verdict in cluster.verdicts} == {VerdictKind.APPLIED}
    assert len(connects) == sum(opened), "a transfer connects once to each slave, unless it misses something"
    pushed = [trained(cluster)[:rounds] for cluster in clusters]
    theta, momentum = clusters[0].model.installed[0], np.zeros(LAYOUT.n_elems, np.float32)
    for n in range(rounds):
        theta, momentum = diloco(theta, momentum, [of_cluster[n] for of_cluster in pushed])
        for cluster in clusters:
            assert np.array_equal(theta, cluster.model.installed[n + 1]), f"{cluster.name}, round {n + 1}"
