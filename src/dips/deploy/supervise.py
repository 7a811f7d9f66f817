"""Watches the master's status and the slaves' pods, and ends the pod that slave_watch names.

It has the right to see and to delete the pods of the slaves, by their names, and no other; the master knows it by keys
that may ask for the status. A master or an API server that does not answer means: do nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from dips.core.errors import DipsError
from dips.core.messages import StatusReply
from dips.deploy.objects import Object
from dips.local.supervisor import RestartPolicy
from dips.master.state.reasons import WaitingCode

# ---- slave watch -----------------------------------------------------------------------------------------------------
#
# Decides which slave's pod has to end, so that its StatefulSet starts it again. Pure: observations in, names out.
#
# A StatefulSet sees that a container ended or that its probes fail. It cannot see that a slave's process runs and its
# pod is ready while the master does not hear from it, or that a round waits for this one slave for ever. It must never
# end two slaves at once, nor anything while the master's status is not known.


LATER = RestartPolicy(first_delay_s=120.0, max_delay_s=1800.0)
"""Between two times that the same slave is ended."""

_STEPS = (WaitingCode.MEASURE, WaitingCode.PREPARE, WaitingCode.COMMIT)
"""The open round waits for slaves."""


@dataclass(frozen=True)
class Pod:
    """A slave's pod."""

    name: str
    uid: str  # this one and no later one of its name
    ready: bool  # its StatefulSet has no reason to act
    ready_for_s: float = 0.0


@dataclass(frozen=True)
class WatchLimits:
    """Time limits."""

    gone_s: float = 120.0  # how long the master may miss a slave whose pod is ready
    stuck_s: float = 600.0  # how long a round may wait for one


@dataclass(frozen=True)
class WatchMemory:
    """The state that is kept between two looks. away, blamed: since when, by slave; ended: when last and how often."""

    away_s: Mapping[str, float] = field(default_factory=dict)
    blamed_s: Mapping[str, float] = field(default_factory=dict)
    ended_s: Mapping[str, float] = field(default_factory=dict)
    endings: Mapping[str, int] = field(default_factory=dict)
    committed: int = -1
    epoch: int = -1


@dataclass(frozen=True)
class Ending:
    """A pod that has to end, and why."""

    slave: str
    pod: Pod
    reason: str


def look(
    memory: WatchMemory, status: StatusReply, pods: Mapping[str, Pod | None], now_s: float, patience: WatchLimits
) -> tuple[WatchMemory, Ending | None]:
    """One look: the state to keep, and the pod to end, if there is one. pods: by slave; None: not there."""
    # Since when each slave is away or blamed; a restart of the master, or a new version, begins the count again.
    slaves = tuple(pods)
    alive = {slave.slave_id for slave in status.slaves if slave.alive}
    fresh = status.epoch != memory.epoch
    away = {} if fresh else memory.away_s
    committed = status.rounds_committed + (status.published is not None)
    moved = fresh or committed != memory.committed
    blamed = {} if moved else memory.blamed_s
    # A round that waits for several slaves, or for something else, is no slave's fault.
    waited_for = status.waiting_slaves if status.waiting_code in _STEPS else ()
    guilty = waited_for[0] if len(waited_for) == 1 else ""
    memory = replace(
        memory,
        away_s={slave: away.get(slave, now_s) for slave in slaves if slave not in alive},
        blamed_s={slave: blamed.get(slave, now_s) for slave in slaves if slave == guilty or slave in blamed},
        committed=committed,
        epoch=status.epoch,
    )
    ready = {slave: pod for slave, pod in pods.items() if pod is not None and pod.ready}
    if status.stopping or status.stopped or len(ready) < len(pods):
        return memory, None  # the run ends, or one slave is being started already
    for slave, pod in ready.items():
        why = _why(memory, slave, pod, now_s, patience)
        # What one restart did not heal, another one soon will not: longer pauses after each time.
        pause_s = min(LATER.first_delay_s * 2.0 ** (memory.endings.get(slave, 0) - 1), LATER.max_delay_s)
        if why and now_s - memory.ended_s.get(slave, -math.inf) >= pause_s:
            endings = {**memory.endings, slave: memory.endings.get(slave, 0) + 1}
            return replace(
                memory,
                away_s={name: since for name, since in memory.away_s.items() if name != slave},
                blamed_s={},
                ended_s={**memory.ended_s, slave: now_s},
                endings=endings,
            ), Ending(slave, pod, why)
    return memory, None


def _why(memory: WatchMemory, slave: str, pod: Pod, now_s: float, patience: WatchLimits) -> str:
    gone_s = now_s - memory.away_s.get(slave, now_s)
    if min(gone_s, pod.ready_for_s) >= patience.gone_s:
        return f"its pod has been ready for {pod.ready_for_s:.0f} s, and the master has missed it for {gone_s:.0f} s"
    stuck_s = now_s - memory.blamed_s.get(slave, now_s)
    if len(memory.blamed_s) == 1 and stuck_s >= patience.stuck_s:
        return f"rounds have waited for it alone for {stuck_s:.0f} s, and none was committed meanwhile"
    return ""


# ---- supervise -------------------------------------------------------------------------------------------------------


log = logging.getLogger("dips.supervisor")


class Pods(Protocol):
    """The requests to the API server."""

    def get(self, kind: str, name: str) -> Object | None: ...
    def delete(self, kind: str, name: str, uid: str = "") -> bool: ...


class SlaveSupervisor:
    """Looks at the slaves at each tick(). status: asks the master, raising DipsError when it cannot."""

    def __init__(
        self,
        run_id: str,
        slaves: int,
        status: Callable[[], StatusReply],
        pods: Pods,
        patience: WatchLimits,
        now_s: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._pod_of = {f"s{index}": f"{run_id}-slave-{index}" for index in range(slaves)}
        self._status, self._pods, self._patience = status, pods, patience
        self._now_s, self._wall = now_s, wall
        self._memory = WatchMemory()
        self._trouble = ""

    def tick(self) -> Ending | None:
        """Look once, and end a pod if one has to. Never raises for what others do."""
        try:
            status = self._status()
            pods = {slave: pod_of(self._pods.get("Pod", name), self._wall()) for slave, name in self._pod_of.items()}
            self._memory, ending = look(self._memory, status, pods, self._now_s(), self._patience)
            if ending is not None and self._pods.delete("Pod", ending.pod.name, ending.pod.uid):
                log.warning("slave %s: pod %s is ended: %s", ending.slave, ending.pod.name, ending.reason)
            self._tell("")
            return ending
        except DipsError as error:
            self._tell(str(error))
            return None

    def _tell(self, trouble: str) -> None:
        """Log when the reason changes, not each time."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s", trouble) if trouble else log.info("master and API server answer again")


def pod_of(live: Mapping[str, object] | None, wall: datetime) -> Pod | None:
    """A pod, from what the API gave; None when it is not there."""
    if live is None:
        return None
    found: Object = dict(live)
    metadata, status = found["metadata"], found.get("status", {})
    ready_since = (
        datetime.fromisoformat(str(condition.get("lastTransitionTime")))
        for condition in status.get("conditions") or []
        if condition.get("type") == "Ready" and condition.get("status") == "True"
    )
    since = next(ready_since, None)
    ready = since is not None and "deletionTimestamp" not in metadata
    return Pod(metadata["name"], metadata.get("uid", ""), ready, (wall - since).total_seconds() if since else 0.0)
