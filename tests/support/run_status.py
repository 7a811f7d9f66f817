"""Made-up states of a run, for tests of what is shown and reported of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dips.core.ids import Incarnation, RoundId, Version
from dips.core.messages import ClusterStatus, RoundSummary, SlaveStatus, StatusReply


def cluster_status(name: str = "a", **changes: Any) -> ClusterStatus:
    usual = ClusterStatus(
        name,
        incarnation=Incarnation(1, 3),
        alive=True,
        phase="TRAINING",
        steps=480,
        tokens_per_s=5200.0,
        steps_per_s=2.5,
        loss=2.31,
        base=Version(1, 11),
        tokens_applied=400_000,
        pushes_applied=12,
        incarnations=1,
        last_verdict="APPLIED",
        steps_total=480,
    )
    return replace(usual, **changes)


def slave_status(name: str = "s0", **changes: Any) -> SlaveStatus:
    usual = SlaveStatus(
        name,
        incarnation=Incarnation(1, 1),
        alive=True,
        phase="READY",
        data_endpoint="tcp://127.0.0.1:4000",
        version=Version(1, 12),
        resident_bytes=3 << 20,
        incarnations=1,
    )
    return replace(usual, **changes)


def run_status(**changes: Any) -> StatusReply:
    last = RoundSummary(RoundId(1, 12), "commit", "", Version(1, 12), ("a", "b"), (), 0.8, 1.0, 1.2, 32768)
    usual = StatusReply(
        run_id="demo",
        epoch=1,
        published=Version(1, 12),
        tokens=400_000,
        tk_max_tokens=1_000_000,
        phase="WINDOW",
        round=RoundId(1, 13),
        phase_age_s=0.4,
        window_closes_in_s=0.6,
        waiting_for="",
        rounds_committed=13,
        rounds_merged=9,
        clusters=(cluster_status("a"), cluster_status("b", incarnation=Incarnation(1, 4))),
        slaves=(slave_status("s0"), slave_status("s1", incarnation=Incarnation(1, 2))),
        recent_rounds=(last,),
    )
    return replace(usual, **changes)
