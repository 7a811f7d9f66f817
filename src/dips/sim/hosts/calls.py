"""Simulates a call to the master, from request to answer or deadline, over a network that may lose either one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dips.core.errors import Refused
from dips.core.messages import ClusterRequest, Refusal
from dips.sim.hosts.master import MasterHost
from dips.sim.kernel import SimulatedProcess

if TYPE_CHECKING:
    from dips.sim.world import World

NOBODY_S = 0.05
"""Seconds until a caller learns that no process listens at the address."""


class Asked:
    """A call under way. `done` is called once: with a reply, a Refused, or a sentence (str) when no answer came in
    time."""

    def __init__(
        self,
        world: World,
        caller: SimulatedProcess,
        request: ClusterRequest,
        deadline_s: float,
        done: Callable[[Any], None],
    ) -> None:
        self.token = world.next_token()
        self.request = request
        self._world = world
        self._caller = caller
        self._generation = caller.generation
        self._done = done
        self._over = False
        self._master = world.some_master()
        if self._master is None:
            self._fail_soon("connection refused")
            return
        world.remember_request(request)
        world.net.request(caller.name, "master", self._master, self._arrive)
        world.kernel.after(deadline_s, caller, self._ran_out)

    def _arrive(self) -> None:
        assert self._master is not None, "a request arrives at the master that it was sent to"
        self._master.called(self)

    def answered(self, body: Any) -> None:
        """The master answers; the network may lose the answer."""
        result = Refused(body.code, body.sentence, body.retry_after_s) if isinstance(body, Refusal) else body
        self._world.net.reply("master", self._caller.name, self._caller, self._end, result)

    def server_died(self) -> None:
        """The master's system resets the connection."""
        if not self._world.net.is_cut("master", self._caller.name):
            self._world.kernel.after(0.001, self._caller, self._end, "connection reset")

    def _ran_out(self) -> None:
        if self._over:
            return
        master = self._master
        if master is not None and master.alive and not self._world.net.is_cut(self._caller.name, "master"):
            self._world.kernel.after(
                self._world.net.delay_s(self._caller.name, "master"), master, master.hung_up, self.token
            )
        self._end("deadline exceeded")

    def _fail_soon(self, why: str) -> None:
        self._world.kernel.after(self._world.kernel.jitter(NOBODY_S), self._caller, self._end, why)

    def _end(self, result: Any) -> None:
        """End the call. A caller that died meanwhile gets nothing, nor does its next incarnation, with another
        connection."""
        if not self._over and self._caller.generation == self._generation:
            self._over = True
            self._done(result)


def master_of(world: World) -> MasterHost | None:
    """The newest live master, for the run's operator."""
    alive = [master for master in world.masters if master.alive]
    return max(alive, key=lambda master: master.epoch, default=None)
