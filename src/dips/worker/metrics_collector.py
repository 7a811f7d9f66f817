"""Collects a cluster process's metrics at a scrape, from the latest views of the training and the data thread.

Must be called only by a scrape, and never wait for a thread of the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dips.core.ids import Version
from dips.core.messages import StaleKind, VerdictKind
from dips.core.net.data_header import REFUSED_DATA
from dips.core.net.keys import certificate_left_s
from dips.core.net.security import INSECURE, Security
from dips.core.observe.metrics import CERTIFICATE, Families, flag
from dips.core.release import VERSION
from dips.worker.link_counts import SlaveLinkCounts, TransferDirection
from dips.worker.metrics import HELDOUT, METRICS, PREFIX
from dips.worker.metrics_counts import CheckpointCounts, Counts, View
from dips.worker.state.phases import SessionPhase

PHASES = tuple(phase.value.lower() for phase in SessionPhase)
VERDICTS = tuple(kind.name.lower() for kind in VerdictKind)
STALE = tuple(kind.name.lower() for kind in StaleKind)
DIRECTIONS = tuple(direction.value for direction in TransferDirection)

_UNREFUSED = {code.name: 0 for code in REFUSED_DATA}
"""Labels that are counted from 0: a counter that first appears with 1 would show no increase."""


@dataclass(frozen=True)
class Collector:
    """Makes the metric families of each scrape of a cluster."""

    cluster_id: str
    security: Security = INSECURE

    def families(
        self,
        view: View,
        counts: Counts,
        links: Mapping[str, SlaveLinkCounts],
        checkpoints: CheckpointCounts | None,
        answered_s: float | None,
        now_s: float,
    ) -> Families:
        """counts: only its transfers are read. answered_s: when the master last answered a beat, of the same clock."""
        families = Families(PREFIX, METRICS)
        families.set("info", 1, view.run_id, self.cluster_id, VERSION)
        families.set(CERTIFICATE.name, certificate_left_s(self.security))
        families.set("beat_age_seconds", now_s - answered_s if answered_s is not None else None)
        _session(families, view, now_s)
        _training(families, view)
        for direction in DIRECTIONS:
            for result in ("done", "failed"):
                families.set("transfers_total", view.events.get((direction, result), 0), direction, result)
            families.observed("transfer_seconds", counts.transfers[direction].observed(), direction)
        _links(families, links)
        if checkpoints is not None:
            families.observed("checkpoint_seconds", checkpoints.durations)
            families.set("checkpoint_age_seconds", now_s - checkpoints.written_s)
        return families


def _session(families: Families, view: View, now_s: float) -> None:
    families.one_of("phase", view.phase, PHASES)
    families.set("waiting", flag(view.waiting))
    for what, seconds in view.waited_s.items():
        families.set(
            "waited_seconds_total", seconds + (now_s - view.waiting_since_s if what == view.waiting else 0), what
        )
    families.set("joins_total", view.events.get(("joined", ""), 0))
    families.each(
        "calls_total", {result: view.events.get(("call", result), 0) for result in ("done", "refused", "failed")}
    )
    families.each("refused_calls_total", _of("refused", view))
    families.each("verdicts_total", {**dict.fromkeys(VERDICTS, 0), **_of("verdict", view)})
    families.each("stale_pushes_total", {**dict.fromkeys(STALE, 0), **_of("stale", view)})
    families.set("push_retries_total", view.events.get(("attempt", "again"), 0))


def _of(kind: str, view: View) -> dict[str, int]:
    return {what: count for (of, what), count in sorted(view.events.items()) if of == kind}


def _training(families: Families, view: View) -> None:
    families.set("steps_total", view.steps)
    families.set("tokens_total", view.tokens)
    families.set("tokens_per_second", view.tokens_per_s)
    families.set("steps_per_second", view.steps_per_s)
    families.set("loss", view.loss if math.isfinite(view.loss) else None)
    families.set("local_steps", view.local_steps)
    families.set("pending_tokens", view.pending_tokens)
    base, published = view.base, view.published
    families.set("base_version", base.v if base else None)
    families.set("base_timeline", base.timeline if base else None)
    if base is not None and published is not None and base.timeline == published.timeline:
        families.set("staleness_versions", max(0, published.v - base.v))


def _links(families: Families, links: Mapping[str, SlaveLinkCounts]) -> None:
    for slave, link in sorted(links.items()):
        for direction in TransferDirection:
            families.set("link_bytes_total", link.n_bytes.get(direction, 0), slave, direction.value)
            families.set("link_bytes_per_second", link.bytes_per_s.get(direction), slave, direction.value)
        families.set("link_resumed_bytes_total", link.resumed_bytes, slave)
        families.set("link_round_trip_seconds", link.round_trip_s, slave)
        families.set("link_reconnects_total", link.reconnects, slave)
        for code, count in sorted({**_UNREFUSED, **link.refusals}.items()):
            families.set("link_refusals_total", count, slave, code)


# ---- the evaluator ----


@dataclass(frozen=True)
class Evaluated:
    """The newest evaluation, and the number of evaluations. at_s: of the process's clock."""

    version: Version
    tokens: int
    loss: float
    at_s: float
    count: int


def heldout_families(evaluated: Evaluated | None, security: Security, now_s: float) -> Families:
    """The metric families of `dips eval --follow`."""
    families = Families(PREFIX, HELDOUT)
    families.set(CERTIFICATE.name, certificate_left_s(security))
    families.set("heldout_evaluations_total", evaluated.count if evaluated else 0)
    if evaluated is not None:
        families.set("heldout_loss", evaluated.loss)
        families.set("heldout_version", evaluated.version.v)
        families.set("heldout_tokens", evaluated.tokens)
        families.set("heldout_age_seconds", now_s - evaluated.at_s)
    return families
