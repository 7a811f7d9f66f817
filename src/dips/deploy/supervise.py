"""Watches the master's status and the slaves' pods, and ends the pod that slave_watch names.

It has the right to see and to delete the pods of the slaves, by their names, and no other; the master knows it by keys
that may ask for the status. A master or an API server that does not answer means: do nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from dips.core.errors import DipsError
from dips.core.messages import StatusReply
from dips.deploy.objects import Object
from dips.deploy.slave_watch import Ending, Pod, WatchLimits, WatchMemory, look

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
        self._memory = WatchMemory.nothing()
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
    since = _ready_since(status.get("conditions") or [])
    ready = since is not None and "deletionTimestamp" not in metadata
    return Pod(metadata["name"], metadata.get("uid", ""), ready, (wall - since).total_seconds() if since else 0.0)


def _ready_since(conditions: Sequence[Object]) -> datetime | None:
    for condition in conditions:
        if condition.get("type") == "Ready" and condition.get("status") == "True":
            return datetime.fromisoformat(str(condition.get("lastTransitionTime")).replace("Z", "+00:00"))
    return None
