"""What is recommended for long links, at the thresholds of the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.scaleacross import read

from dips.planner.scaleacross.iteration import Case, Outermost, Pipelining, Sharding, Split
from dips.planner.scaleacross.report import crossing, recommend
from dips.planner.scaleacross.search import choice_of, even
from dips.planner.scaleacross.topology import Topology

PP = Case(Split(8, 1, 1, 2, 4, 2), Outermost.PP, Sharding.FSDP, Pipelining.DORA, 4, 4)


def used(topology: Topology, oversubscription: float, km: float, queue_pairs: int = 4, case: Case = PP) -> list[str]:
    assert topology.network is not None
    network = topology.network.model_copy(update={"queue_pairs": queue_pairs})
    changed = replace(topology, network=network).with_routes(oversubscription, km)
    advice = recommend(changed, choice_of(changed, case, even(32, case.n_chunks)))
    assert all(one.rule and one.source and one.why for one in advice)
    return [one.use for one in advice]


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return read(tmp_path)


@pytest.mark.parametrize(
    ("km", "oversubscription", "queue_pairs", "use"),
    [(9, 1, 1, "packet spraying"), (40, 1, 4, "ECMP"), (40, 4, 2, "packet spraying"), (200, 16, 4, "ECMP"),
     (200, 16, 5, "packet spraying"), (200, 1, 8, "ECMP")],
)  # fmt: skip
def test_load_balancing(topology: Topology, km: float, oversubscription: float, queue_pairs: int, use: str) -> None:
    assert used(topology, oversubscription, km, queue_pairs)[0] == use


@pytest.mark.parametrize(("km", "oversubscription", "off"), [(20, 24, True), (8, 24, False), (200, 12, False)])
def test_congestion_control(topology: Topology, km: float, oversubscription: float, off: bool) -> None:
    assert (used(topology, oversubscription, km)[1] == "none") == off


def test_redundancy_beyond_20_km(topology: Topology) -> None:
    assert used(topology, 3, 18)[2].startswith("retransmission")
    assert used(topology, 3, 30)[2].startswith("redundancy")


def test_what_a_loss_can_stop(topology: Topology) -> None:
    """PP-out waits for each message, DP-out for the first chunk's collectives."""
    choice = choice_of(topology, PP, even(32, 8))
    n = PP.split.microbatches(topology)
    assert crossing(topology, choice) == (n * 7, 2 * (4096 / 8) * 8192 * 2)
    zbv = choice._replace(case=PP._replace(pipelining=Pipelining.ZBV))
    assert crossing(topology, zbv)[0] == n * 4
    dp = choice._replace(case=PP._replace(outermost=Outermost.DP))
    assert crossing(topology, dp)[0] == 2 * 3
    hsdp = choice._replace(case=PP._replace(outermost=Outermost.DP, sharding=Sharding.HSDP))
    assert crossing(topology, hsdp)[0] == 2


def test_one_building_needs_no_advice(topology: Topology) -> None:
    alone = replace(topology, buildings=topology.buildings[:1], zones=topology.zones[:2], routes=())
    case = PP._replace(split=Split(8, 1, 1, 2, 2, 2), outermost=Outermost.DP)
    assert recommend(alone, choice_of(alone, case, even(32, 8))) == []
