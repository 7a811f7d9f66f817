"""Simulates a standby's process: it follows the master's journal, and becomes a master when it is asked to.

Does what dips.master.standby does, on virtual time: one stream, one write at a time, and an acknowledgement after it.
"""

from __future__ import annotations

from collections import deque

from dips.core.messages import Refusal
from dips.lab.sim.disks import JournalDisk, StoredEntry
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.network import End, Stream
from dips.lab.sim.world import Host, World

DIAL_S = 0.5

Batch = tuple[int, frozenset[int], list[StoredEntry]]
"""The master's epoch, those that began with a take-over, and new entries."""


class StandbyHost(Host):
    """One standby; its directory outlives it."""

    def __init__(self, world: World, name: str, disk: JournalDisk) -> None:
        super().__init__(world, name)
        self.disk = disk
        self.disk.replica = True
        self._stream: tuple[Stream, End] | None = None
        self._waiting: deque[Batch] = deque()
        self._writing = False

    def boot(self) -> None:
        self.begin_process()
        self._stream, self._writing = None, False
        self._waiting.clear()
        self._dial()

    def kill(self) -> None:
        """kill -9: a batch that is being written is lost as a whole."""
        if self._stream is not None:
            (stream, end), self._stream = self._stream, None
            stream.close(end)
        self.end_process()

    def becomes_master(self) -> MasterHost:
        """End the standby; the master that its directory is for, not yet started."""
        self.kill()
        return MasterHost(self.world, self.name, self.disk, self.name)

    def _dial(self) -> None:
        master = self.world.masters[0]
        if self._stream is not None:
            return
        if not master.alive or self._writing or self.world.net.is_cut(self.name, master.at):
            self.kernel.after(self.kernel.jitter(DIAL_S), self, self._dial)
            return
        assert isinstance(master, MasterHost)
        mine = End(self.name, self, self._hear, self._hung_up)
        theirs = End(
            master.at,
            master,
            lambda number: master.acknowledged(stream, number),
            lambda _: master.unfollowed(stream),
        )
        stream = Stream(self.world.net, mine, theirs)
        self._stream = (stream, mine)
        self.kernel.after(0.0, master, master.followed, stream, theirs, list(self.disk.entries))

    def _hear(self, batch: Batch) -> None:
        self._waiting.append(batch)
        self._write()

    def _hung_up(self, refusal: Refusal | None) -> None:
        self._stream = None
        self._waiting.clear()
        if refusal is not None:  # of another history: the operator gives it an empty directory
            self.loses_disk()
        else:
            self.kernel.after(self.kernel.jitter(DIAL_S), self, self._dial)

    def loses_disk(self) -> None:
        """Begin again with an empty directory."""
        self.kill()
        self.disk.lose()
        self.disk.replica = True
        self.kernel.after(self.kernel.jitter(DIAL_S), None, self._begins_again, self.generation)

    def _begins_again(self, generation: int) -> None:
        if self.generation == generation:
            self.boot()

    def _write(self) -> None:
        if self._waiting and not self._writing:
            self._writing = True
            delay_s = self.kernel.jitter(self.world.plan.flush_s) * self.disk.flush_factor
            self.kernel.after(delay_s, self, self._wrote, self._waiting.popleft(), self._stream)

    def _wrote(self, batch: Batch, heard_on: tuple[Stream, End] | None) -> None:
        self._writing = False
        self.disk.epoch, self.disk.took_over, new = batch
        self.disk.entries += new
        if self._stream is not None and self._stream is heard_on:
            stream, end = self._stream
            stream.send(end, len(self.disk.entries))
        self._write()
