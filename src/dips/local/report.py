"""The report of a finished run: report.json, and the checks that decide the exit code of `dips demo`.

Everything in it was measured or recorded: counts come from the master's last status, losses from the
tapes, faults from the launcher that made them. Tokens are counts, `seconds`, `when` and `back_when` are
seconds since the run began, losses are nats per byte, `measured_speed` is tokens a second of computing
alone. `last_norm`, `last_z` and `last_cosine` are those of a cluster's last judged push, `cosine_usual` is the median
of its last ones, `cosine_rounds` how many were known (docs/algorithm.md); null where not known. `parallel` is how a
cluster's ranks shared the model, empty for one process.
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
from dips.core.files import closed, replace_file
from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.core.release import software_versions
from dips.local.log_files import LossPoint
from dips.master.page.history import HeldoutPoint

# ---- demo faults -----------------------------------------------------------------------------------------------------
#
# The faults that a demonstration makes on purpose: which process is killed when, and when it was back.
#
# Decides and remembers; the owner of the processes kills. Times are seconds since the run began. A planned
# fault that never happened is reported as such: a demonstration must not claim what it did not do.


CLUSTER = "cluster"
SLAVE = "slave"
LINK = "link"


@dataclass(frozen=True)
class PlannedFault:
    """Kill `target`, or cut its link, once the run has applied this share of its tokens."""

    kind: str  # cluster, slave, or link: that of a cluster
    target: str
    at_share: float
    lasts_s: float = 0.0  # of a link: how long it is cut

    @property
    def victim(self) -> str:
        return f"{SLAVE if self.kind == SLAVE else CLUSTER} {self.target}"


@dataclass(frozen=True)
class Moment:
    """A point of the run: in seconds since it began, in applied tokens, and in published versions (None: none yet)."""

    seconds: float
    tokens: int
    version: int | None


@dataclass
class Fault:
    """A fault that happened. `incarnation`: the one that was killed; `back`: None until the next one is
    at work."""

    planned: PlannedFault
    pid: int
    incarnation: str
    when: Moment
    back: Moment | None = None
    back_as: str = ""

    @property
    def what(self) -> str:
        if self.planned.kind == LINK:
            return f"link of {self.planned.victim} cut for {self.planned.lasts_s:g} s"
        return f"{self.planned.victim} killed with SIGKILL"


class FaultPlan:
    """The planned faults: those still to be done, and those that were done."""

    def __init__(self, planned: Sequence[PlannedFault]) -> None:
        self._to_do = list(planned)
        self.happened: list[Fault] = []

    @property
    def never_happened(self) -> list[PlannedFault]:
        return list(self._to_do)

    def unfinished(self, status: StatusReply) -> bool:
        """Whether a fault whose time has come is still to be made, or its victim is not back."""
        due = any(status.tokens >= fault.at_share * status.tk_max_tokens for fault in self._to_do)
        return due or any(fault.back is None for fault in self.happened)

    def due(self, status: StatusReply) -> list[PlannedFault]:
        """The faults whose time has come and whose target is there to be killed."""
        if not status.tk_max_tokens or status.stopping or status.stopped:
            return []
        share = status.tokens / status.tk_max_tokens
        return [fault for fault in self._to_do if share >= fault.at_share and _find(status, fault).alive]

    def was_done(self, fault: PlannedFault, pid: int, status: StatusReply, now_s: float) -> Fault:
        """Remember that the process `pid` was killed for this planned fault."""
        self._to_do.remove(fault)
        done = Fault(fault, pid, str(_find(status, fault).incarnation), moment(status, now_s))
        self.happened.append(done)
        return done

    def observe(self, status: StatusReply, now_s: float) -> list[Fault]:
        """The faults whose victim is now seen to be back for the first time."""
        back = []
        for fault in self.happened:
            found = _find(status, fault.planned)
            if fault.back is not None or not found.alive or str(found.incarnation) == fault.incarnation:
                continue
            # A cluster is back when it has joined again; a slave when it holds the published version again.
            if isinstance(found, ClusterStatus) or found.version == status.published:
                fault.back, fault.back_as = moment(status, now_s), str(found.incarnation)
                back.append(fault)
        return back


def moment(status: StatusReply, now_s: float) -> Moment:
    return Moment(now_s, status.tokens, status.published.v if status.published else None)


def _find(status: StatusReply, fault: PlannedFault) -> ClusterStatus | SlaveStatus:
    """The target's status; one that is not alive when the master does not know it."""
    if fault.kind != SLAVE:
        clusters = (cluster for cluster in status.clusters if cluster.cluster_id == fault.target)
        return next(clusters, ClusterStatus(fault.target))
    slaves = (slave for slave in status.slaves if slave.slave_id == fault.target)
    return next(slaves, SlaveStatus(fault.target))


# ---- picture ---------------------------------------------------------------------------------------------------------
#
# Draws the losses of a run: each cluster's training loss and the held-out loss over the run's tokens.
#
# Colours are those of Okabe and Ito, which colour-blind people can distinguish; line styles differ as well. It
# must draw only what the tapes hold: nothing is invented between or beyond the points, beyond a running mean
# that it names.


_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_STYLES = ("-", "--", "-.", ":")
_MEAN_OF = 9
_INCHES = (9.0, 5.6)
_DPI = 130
_LEGEND_COLUMNS = 3


def draw_losses(
    path: Path,
    training: Mapping[str, Sequence[LossPoint]],
    heldout: Sequence[HeldoutPoint],
    faults: Sequence[Fault] = (),
    title: str = "",
) -> None:
    """Write the picture as PNG. training: cluster id -> its points; all losses in nats per byte."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(sorted(training.items())):
        axes.plot(
            [point.tokens for point in points],
            running_mean(points),
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_STYLES[index % len(_STYLES)],
            linewidth=1.1,
            alpha=0.85,
            label=f"cluster {name}, training (mean of {_MEAN_OF})",
        )
    tokens, losses = [p.tokens for p in heldout], [p.loss for p in heldout]
    label = "held-out text, published versions"
    if heldout:
        label += f" (last {losses[-1]:.3f})"
    axes.plot(tokens, losses, color="black", linewidth=2.2, marker="o", markersize=3, label=label)
    for fault in faults:
        back = fault.back.tokens if fault.back else None
        axes.axvline(fault.when.tokens, color="#D55E00", linewidth=1.0, linestyle=(0, (4, 3)))
        if back is not None:
            axes.axvspan(fault.when.tokens, back, color="#D55E00", alpha=0.12, linewidth=0)
        until = f", back at {fault.back.seconds:.0f} s" if fault.back else ", not back"
        axes.annotate(
            f"{fault.what} at {fault.when.seconds:.0f} s{until}",
            xy=(fault.when.tokens, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            fontsize="x-small",
            color="#A04000",
            va="top",
        )
    axes.set_xlabel("tokens (bytes of text) applied by the whole run")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize="small", frameon=False)
    with open(path, "wb", opener=closed) as file:
        figure.savefig(file, format="png")


def running_mean(points: Sequence[LossPoint]) -> list[float]:
    """The mean of each point's loss and of those before it, up to _MEAN_OF in all."""
    losses = [point.loss for point in points]
    windows = (losses[max(0, i + 1 - _MEAN_OF) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


# ---- report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalRunOutcome:
    """The launcher's knowledge of a run that has ended."""

    status: StatusReply
    seconds: float
    command: str
    speeds: Mapping[str, float] = field(default_factory=dict)  # cluster id -> last measured tokens a second
    gaps: Mapping[str, float] = field(default_factory=dict)
    parallelisms: Mapping[str, str] = field(default_factory=dict)  # cluster id -> TrainConfig.parallel
    faults: Sequence[Fault] = ()
    faults_never_made: Sequence[PlannedFault] = ()
    exit_codes: Mapping[str, int | None] = field(default_factory=dict)  # process name -> its last exit code
    heldout: Sequence[HeldoutPoint] = ()
    verify: str = "not checked"  # what `dips verify` says of the run's records, "ok" when they prove every promise
    verified: Mapping[str, int] = field(default_factory=dict)  # invariant -> records judged


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
        "heldout_versions": [
            {
                "timeline": point.version.timeline,
                "version": point.version.v,
                "tokens": point.tokens,
                "loss": point.loss,
            }
            for point in outcome.heldout
        ],
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
    replace_file(path, [f"{json.dumps(report, indent=2, allow_nan=False)}\n".encode()])


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
        "parallel": outcome.parallelisms.get(cluster.cluster_id, ""),
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
