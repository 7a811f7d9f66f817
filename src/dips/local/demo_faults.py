"""The faults that a demonstration makes on purpose: which process is killed when, and when it was back.

Decides and remembers; the owner of the processes kills. Times are seconds since the run began. A planned
fault that never happened is reported as such: a demonstration must not claim what it did not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply

CLUSTER = "cluster"
SLAVE = "slave"


@dataclass(frozen=True)
class PlannedFault:
    """Kill `target` once the run has applied this share of its tokens. kind: cluster or slave."""

    kind: str
    target: str
    at_share: float


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
        return f"{self.planned.kind} {self.planned.target} killed with SIGKILL"


class FaultPlan:
    """The planned faults: those still to be done, and those that were done."""

    def __init__(self, planned: Sequence[PlannedFault]) -> None:
        self._to_do = list(planned)
        self.happened: list[Fault] = []

    @property
    def never_happened(self) -> list[PlannedFault]:
        return list(self._to_do)

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
        back = [fault for fault in self.happened if fault.back is None and _is_back(status, fault)]
        for fault in back:
            fault.back = moment(status, now_s)
            fault.back_as = str(_find(status, fault.planned).incarnation)
        return back


def moment(status: StatusReply, now_s: float) -> Moment:
    return Moment(now_s, status.tokens, status.published.v if status.published else None)


def _find(status: StatusReply, fault: PlannedFault) -> ClusterStatus | SlaveStatus:
    """The target's status; one that is not alive when the master does not know it."""
    if fault.kind == CLUSTER:
        clusters = (cluster for cluster in status.clusters if cluster.cluster_id == fault.target)
        return next(clusters, ClusterStatus(fault.target))
    slaves = (slave for slave in status.slaves if slave.slave_id == fault.target)
    return next(slaves, SlaveStatus(fault.target))


def _is_back(status: StatusReply, fault: Fault) -> bool:
    """A cluster is back when it has joined again; a slave when it holds the published version again."""
    found = _find(status, fault.planned)
    if not found.alive or str(found.incarnation) == fault.incarnation:
        return False
    return isinstance(found, ClusterStatus) or found.version == status.published
