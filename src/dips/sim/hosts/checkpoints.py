"""A simulated cluster's checkpoints: what dips.worker.checkpoint writes, as the saved session's own JSON form and
the model's content. A write takes time and is atomic; a push's number is used only after its record is
durable.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dips.core.errors import ConfigError
from dips.sim.arithmetic import ClusterModel
from dips.sim.content import SimulatedModel
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import PushRecord
from dips.worker.state.events import PushNotRecorded, PushRecorded
from dips.worker.state.saved import SavedSession, push_from_json, push_to_json

if TYPE_CHECKING:
    from dips.sim.hosts.cluster import ClusterHost

SYMBOLS_ONLY = "a plan with checkpoints has symbols (Plan)"
EVERY_S = 3.0
RETRY_S = 0.5


@dataclass
class CheckpointDisk:
    """The checkpoints on disk, which outlive the process. errors: so many of the next records of pushes cannot be
    written."""

    session_json: str = ""
    model: SimulatedModel | None = None
    push_json: str = ""
    errors: int = 0

    def lose(self) -> None:
        self.session_json, self.model, self.push_json = "", None, ""


class Checkpoints:
    """One process's use of its cluster's directory; does nothing where the plan has no checkpoints."""

    def __init__(self, cluster: ClusterHost) -> None:
        self._cluster = cluster
        self._writing = False
        self._due_s = 0.0

    def begin_process(self) -> None:
        self._writing = False
        self._due_s = self._cluster.kernel.now_s + EVERY_S

    def resume(self, session: ClusterMachine, model: ClusterModel) -> None:
        """Restore the saved state into a session that has not begun."""
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        if not cluster.world.plan.checkpoints or disk.model is None:
            return
        assert isinstance(model, SimulatedModel), SYMBOLS_ONLY
        saved = SavedSession.from_json(json.loads(disk.session_json))
        newest = push_from_json(json.loads(disk.push_json)) if disk.push_json else None
        try:
            session.resume(saved, newest)
        except ConfigError as error:
            cluster.world.bug(cluster.name, error)
            return
        for name in ("live", "base", "push", "pulled", "changes", "residual"):
            setattr(model, name, getattr(disk.model, name))
        model.changes += 1000 * cluster.generation  # what this incarnation trains is its own
        push = str(saved.push.id) if saved.push is not None else None
        fields = {"seq": saved.seq, "base": str(saved.base), "fence": saved.base_fence, "push": push}
        cluster.world.tape("worker", cluster, "resumed", "-", fields | {"incarnation": str(saved.incarnation)})

    def take_if_due(self, session: ClusterMachine, model: ClusterModel) -> None:
        """Write a checkpoint if it is due; called between two steps."""
        cluster = self._cluster
        if not cluster.world.plan.checkpoints or self._writing or cluster.kernel.now_s < self._due_s:
            return
        saved = session.saved()
        if saved is None:
            return
        assert isinstance(model, SimulatedModel), SYMBOLS_ONLY
        self._writing, self._due_s = True, cluster.kernel.now_s + EVERY_S
        text = json.dumps(saved.to_json())
        cluster.kernel.after(self._write_s(), cluster, self._written, text, replace(model), saved)

    def record_push(self, record: PushRecord) -> None:
        cluster = self._cluster
        cluster.kernel.after(self._write_s(), cluster, self._push_written, record)

    def _write_s(self) -> float:
        return self._cluster.kernel.jitter(self._cluster.world.plan.flush_s)

    def _written(self, text: str, model: SimulatedModel, saved: SavedSession) -> None:
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        self._writing = False
        disk.session_json, disk.model = text, model
        cluster.world.tape("worker", cluster, "checkpoint", "-", {"seq": saved.seq, "base": str(saved.base)})

    def _push_written(self, record: PushRecord) -> None:
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        if disk.errors:
            disk.errors -= 1
            cluster.world.fired("cluster_disk_error")
            cluster.deliver(PushNotRecorded(record.id, "no space left on device"))
            cluster.kernel.after(RETRY_S, cluster, self._push_written, record)
            return
        disk.push_json = json.dumps(push_to_json(record))
        cluster.deliver(PushRecorded(record.id))
