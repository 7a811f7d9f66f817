"""The report of a finished run: report.json, and the checks that decide the exit code of `dips demo`.

Everything in it was measured or recorded: counts come from the master's last status, losses from the
tapes, faults from the launcher that made them. Tokens are counts, `seconds`, `when` and `back_when` are
seconds since the run began, losses are nats per byte, `measured_speed` is tokens a second of computing
alone. `last_norm`, `last_z` and `last_cosine` are those of a cluster's last judged push, `cosine_usual` is the median
of its last ones, `cosine_rounds` how many were known (docs/algorithm.md); null where not known.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dips.core.errors import TERMINATED
from dips.core.messages import ClusterStatus, StatusReply
from dips.core.release import software_versions
from dips.local.demo_faults import Fault, PlannedFault
from dips.local.tapes import HeldoutPoint


@dataclass(frozen=True)
class LocalRunOutcome:
    """The launcher's knowledge of a run that has ended.

    speeds: cluster id -> last measured tokens a second. exit_codes: process name -> its last exit code. verify: what
    `dips verify` says of the run's records, "ok" when they prove every promise. verified: invariant -> records judged.
    """

    status: StatusReply
    seconds: float
    command: str
    speeds: Mapping[str, float] = field(default_factory=dict)
    gaps: Mapping[str, float] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    faults_never_made: Sequence[PlannedFault] = ()
    exit_codes: Mapping[str, int | None] = field(default_factory=dict)
    heldout: Sequence[HeldoutPoint] = ()
    verify: str = "not checked"
    verified: Mapping[str, int] = field(default_factory=dict)


def build_report(outcome: LocalRunOutcome) -> dict[str, Any]:
    """The content of report.json; docs of the keys are in the module's docstring."""
    status = outcome.status
    return {
        "run_id": status.run_id,
        "timeline": status.published.timeline if status.published else None,
        "version": status.published.v if status.published else None,
        "rounds": status.rounds_committed,
        "merged_rounds": status.rounds_merged,
        "void_rounds": status.rounds_void,
        "aborted_rounds": status.rounds_aborted,
        "tokens": status.tokens,
        "tk_max_tokens": status.tk_max_tokens,
        "heldout_loss": [[point.tokens, point.loss] for point in outcome.heldout],
        "heldout_versions": [_heldout(point) for point in outcome.heldout],
        "clusters": {cluster.cluster_id: _cluster(cluster, outcome) for cluster in status.clusters},
        "slaves": {slave.slave_id: {"incarnations": slave.incarnations} for slave in status.slaves},
        "faults": [_fault(fault) for fault in outcome.faults],
        "seconds": outcome.seconds,
        "verify": outcome.verify,
        "verified": dict(outcome.verified),
        "checks": checks(outcome),
        "command": outcome.command,
        "software": software_versions(),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
    }


def checks(outcome: LocalRunOutcome) -> dict[str, bool]:
    """The checks at the end of a run, by name; a run whose checks hold ends with exit code 0."""
    status = outcome.status
    published = status.published
    # SIGTERM is how the launcher ends what waited too long for the others; whom others ended it started again.
    return {
        "run_stopped": status.stopped,
        "final_version_published": published is not None and status.tokens >= status.tk_max_tokens > 0,
        "every_cluster_left": bool(status.clusters) and not any(cluster.alive for cluster in status.clusters),
        "every_process_ended_well": all(code in (0, TERMINATED) for code in outcome.exit_codes.values()),
        "final_version_evaluated": bool(outcome.heldout) and outcome.heldout[-1].version == published,
        "every_fault_made": not outcome.faults_never_made,
        "everything_killed_came_back": all(fault.back is not None for fault in outcome.faults),
        "records_prove_the_promises": outcome.verify == "ok" and bool(outcome.verified),
    }


def failed_checks(report: Mapping[str, Any]) -> list[str]:
    return [name for name, held in report["checks"].items() if not held]


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write the report whole or not at all."""
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


def _heldout(point: HeldoutPoint) -> dict[str, Any]:
    return {
        "timeline": point.version.timeline,
        "version": point.version.v,
        "tokens": point.tokens,
        "loss": point.loss,
    }


def _cluster(cluster: ClusterStatus, outcome: LocalRunOutcome) -> dict[str, Any]:
    return {
        "pushes_applied": cluster.pushes_applied,
        "pushes_excluded": cluster.pushes_excluded,
        "pushes_aborted": cluster.pushes_aborted,
        "incarnations": cluster.incarnations,
        "tokens": cluster.tokens_applied,
        "steps": cluster.steps_total,
        "measured_speed": outcome.speeds.get(cluster.cluster_id, 0.0),
        "speed_gap": outcome.gaps.get(cluster.cluster_id, 0.0),
        "last_norm": _known(cluster.last_norm),
        "last_z": _known(cluster.last_z),
        "last_cosine": _known(cluster.last_cosine),
        "cosine_usual": _known(cluster.cosine_usual),
        "cosine_rounds": cluster.cosine_rounds,
        "direction_alarm": cluster.direction_alarm,
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _fault(fault: Fault) -> dict[str, Any]:
    back = fault.back
    return {
        "what": fault.what,
        "kind": fault.planned.kind,
        "target": fault.planned.target,
        "pid": fault.pid,
        "incarnation": fault.incarnation,
        "when": fault.when.seconds,
        "when_tokens": fault.when.tokens,
        "when_version": fault.when.version,
        "back_when": back.seconds if back else None,
        "back_tokens": back.tokens if back else None,
        "back_version": back.version if back else None,
        "back_as": fault.back_as or None,
    }
