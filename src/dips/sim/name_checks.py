"""Checks who owns each name: a process that sends beats is never displaced by another one under its name.

A slave is known by its directory, a cluster by its process, as the master's tape names them. The
simulator knows what no master does: whether the previous process was alive and could reach the master.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dips.core.messages import ClusterRequest, HeartbeatRequest
from dips.master.state.name_claims import DIALS_AGAIN_BEATS
from dips.sim.kernel import SimulatedProcess

if TYPE_CHECKING:
    from dips.sim.world import World


@dataclass
class _Owner:
    """The owner of a name. heard_s: time of its last beat at the master; of a slave, when its stream was last open."""

    drawn: str
    incarnation: str
    last_seen_s: float
    here: bool = False
    """Whether it is a slave with a stream."""


class NameChecks:
    """Takes from the world: starts of processes, beats that reach a master, and the master's tape."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._processes: dict[str, tuple[SimulatedProcess, int]] = {}
        self._owners: dict[tuple[str, str], _Owner] = {}

    def began(self, process: SimulatedProcess, drawn: bytes) -> None:
        """Note the identity of this incarnation of a process."""
        self._processes[drawn.hex()] = (process, process.generation)

    def called(self, request: ClusterRequest) -> None:
        owner = self._owners.get(("cluster", request.caller.name))
        if isinstance(request, HeartbeatRequest) and owner is not None:
            if owner.incarnation == str(request.caller.incarnation):
                owner.last_seen_s = self._world.kernel.now_s

    def said(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Check a line of a master's tape."""
        if len(self._world.masters) > 1 or self._world.state_lost:
            self._owners.clear()  # each of two masters knows only its own clients; one that lost its journal knows none
        match kind:
            case "join":
                self._takes(("cluster", fields["cluster"]), fields["process"], fields["incarnation"])
            case "slave_attached":
                self._takes(("slave", fields["slave"]), fields["directory"], fields["incarnation"])
            case "leave" | "evict" if "cluster" in fields:
                self._owners.pop(("cluster", fields["cluster"]), None)
            case "slave_lost":
                if owner := self._owners.get(("slave", fields["slave"])):
                    owner.last_seen_s, owner.here = self._world.kernel.now_s, False
            case "slave_dismissed":
                self._owners.pop(("slave", fields["slave"]), None)
            case "epoch" if fields["version"] == "None":
                self._owners.clear()

    def _takes(self, whose: tuple[str, str], drawn: str, incarnation: str) -> None:
        world, owner = self._world, self._owners.get(whose)
        if owner is not None and owner.drawn != drawn and self._is_alive(whose, owner):
            world.checks.violated(
                f"{whose[0]} {whose[1]} was taken over, as incarnation {incarnation}, from a process that sends beats"
            )
        self._owners[whose] = _Owner(drawn, incarnation, world.kernel.now_s, whose[0] == "slave")

    def _is_alive(self, whose: tuple[str, str], owner: _Owner) -> bool:
        """Whether the owner is alive, and can reach the master."""
        world = self._world
        process, generation = self._processes[owner.drawn]
        if not process.running or process.generation != generation or world.net.is_cut(process.name, "master"):
            return False
        dials_s = DIALS_AGAIN_BEATS * world.plan.config.settings.heartbeat_s
        return owner.here or world.kernel.now_s - owner.last_seen_s < dials_s
