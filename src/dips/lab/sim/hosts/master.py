"""Simulates the master's process around the real MasterMachine: events in, effects out, a journal with delayed writes.

Does what dips.master.shell and dips.master.journal do, on virtual time. It decides nothing; whatever the
state machine raises is reported as a bug.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dips.core.errors import LocalProtocolError, RefusalCode
from dips.core.ids import Incarnation
from dips.core.messages import ClusterRequest, Refusal, SlaveCommand, SlaveMessage, Welcome
from dips.lab.sim.disks import JournalDisk, StoredEntry
from dips.lab.sim.network import End, Stream
from dips.lab.sim.world import Call, MasterProcess, World
from dips.master.state.effects import (
    BeatsEnded,
    BeginAgain,
    CallGone,
    CloseLink,
    ClusterCall,
    Effect,
    Event,
    Halt,
    JournalWritten,
    Log,
    OperatorAction,
    OperatorCall,
    Record,
    Refuse,
    ReplicaNews,
    Reply,
    SlaveLinkDown,
    SlaveSaid,
    Tick,
    ToSlave,
    WriteJournal,
)
from dips.master.state.master import MasterMachine
from dips.master.state.replication import REPLACED_PAUSE_S, TAKE_OVER_EPOCHS, Replication
from dips.master.state.slaves import NEWER_EPOCH_EXIT

TICKS_PER_HEARTBEAT = 4
MIN_TIMER_S = 0.001
FATAL_EXIT = 6

WAITS = "waits"
"""As SimulatedRunPlan.standby has it."""

OTHER_HISTORY = Refusal(RefusalCode.CONFIG, "the standby has records that this master does not have")

ENDING = Refusal(RefusalCode.BUSY, "the master is ending: connect again", 1.0)


class MasterHost(MasterProcess):
    """One master process; its directory outlives it."""

    def __init__(self, world: World, name: str, disk: JournalDisk, at: str = MasterProcess.at) -> None:
        super().__init__(world, name)
        self.disk, self.at = disk, at
        self.state: MasterMachine | None = None
        self.epoch = 0
        self.exit: tuple[int, str] | None = None
        self._on_its_way: list[StoredEntry] = []
        """Entries that were given to the disk and are not yet confirmed."""

        self._flushing = False
        self._uncounted: tuple[list[StoredEntry], float] | None = None
        """A batch that is durable here, and until when it waits for the standby."""
        self._replication: Replication | None = None
        self._follower: tuple[Stream, End] | None = None
        self._sent = 0
        self._trouble = ""
        self.dies_in_flush = False
        self.comes_back = False
        """Whether a dead process that was taken over from will be started again on its directory."""
        self._last_tick_s = 0.0
        self._timer_due_s = -1.0
        self._links: dict[int, tuple[Stream, End]] = {}
        self._calls: dict[int, Call] = {}
        self._welcomes: dict[int, SlaveCommand] = {}
        self.answered: set[int] = set()
        """Tokens of answers that went to no simulated caller: answers to operators."""

    @property
    def tick_s(self) -> float:
        return self.world.plan.config.settings.heartbeat_s / TICKS_PER_HEARTBEAT

    # ---- start and end ----

    def boot(self) -> None:
        """Begin an epoch, durably, and serve."""
        self.begin_process()
        self.exit = None
        self._begin_epoch(0)

    def _begin_epoch(self, at_least: int) -> None:
        self._on_its_way.clear()
        self._flushing = False
        self._links.clear()
        self._calls.clear()
        config = replace(self.world.run_config(), takes_over=self.disk.replica)
        step = TAKE_OVER_EPOCHS if self.disk.replica else 1
        self.epoch = self.disk.epoch = max(self.disk.epoch + step, at_least)
        if self.disk.replica:
            self.disk.replica, self.disk.took_over = False, self.disk.took_over | {self.epoch}
        self.world.journalled(self, {"kind": "EPOCH", "epoch": self.epoch})
        try:
            self.state = MasterMachine(config, self.epoch, self.disk.snapshot_json, self.world.wall_offset_s)
            self._last_tick_s = self.kernel.now_s
            self._perform_all(self.state.start(self.kernel.now_s))
        except Exception as error:
            self.world.bug(self.name, error)
            return
        self._arm_timer()
        if self.world.plan.standby:
            self._replicates()

    def kill(self) -> None:
        """kill -9: the disk keeps the confirmed entries, and perhaps the batch that it was writing."""
        if self.alive:
            self.world.killed("master")
        if self._flushing and self._on_its_way and self._uncounted is None:
            # The batch is one transaction of the journal: all of it or none.
            if self.kernel.rng.random() < 0.5:
                self._durable(self._on_its_way)
            else:
                self.world.fired("lost_journal_entries")
        self._on_its_way.clear()
        self._end()

    def _end(self) -> None:
        self.end_process()
        self.state = None
        if self._follower is not None:
            (stream, end), self._follower = self._follower, None
            stream.close(end)
        links, self._links = self._links, {}
        for stream, end in links.values():
            stream.close(end)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.server_died()

    def stop(self, code: int, sentence: str) -> None:
        """End the process in order; decided entries are written first, as at a clean exit."""
        if not self.alive:
            return
        self.kernel.note(self.name, f"ends with exit code {code}: {sentence}")
        if not self.disk.full and code != FATAL_EXIT:
            self._durable(self._on_its_way)
        self._on_its_way.clear()
        self.exit = (code, sentence)
        if code == FATAL_EXIT and self.disk.full:
            self.world.fired("master_disk_full")
        for call in list(self._calls.values()):
            call.answered(ENDING)
        self._end()
        self.world.master_ended(self, code, sentence)

    # ---- events ----

    def dispatch(self, event: Event) -> None:
        """The executor's rule: after a pause of the process, a Tick comes before everything else."""
        now_s = self.kernel.now_s
        if self.state is None:
            return
        try:
            if isinstance(event, Tick) or now_s - self._last_tick_s > 2 * self.tick_s:
                self._last_tick_s = now_s
                self._perform_all(self.state.handle(Tick(), now_s))
            if not isinstance(event, Tick) and self.state is not None:
                self._perform_all(self.state.handle(event, now_s))
        except (LocalProtocolError, AssertionError, LookupError, ValueError, TypeError, ArithmeticError) as error:
            self.world.bug(self.name, error)
            self.stop(70, "a bug")
            return
        self._arm_timer()
        self.world.handled(self)

    def _arm_timer(self) -> None:
        if self.state is None:
            return
        due_s = self._last_tick_s + self.tick_s
        deadline_s = self.state.next_deadline_s()
        if deadline_s is not None:
            due_s = min(due_s, deadline_s)
        due_s = max(due_s, self.kernel.now_s + MIN_TIMER_S)
        if due_s < self._timer_due_s or self._timer_due_s <= self.kernel.now_s:
            self._timer_due_s = due_s
            self.kernel.at(due_s, self, self._timer_rang, due_s)

    def _timer_rang(self, due_s: float) -> None:
        if due_s == self._timer_due_s:
            self._timer_due_s = -1.0
            self.dispatch(Tick())

    # ---- inputs ----

    def called(self, call: Call) -> None:
        self._calls[call.token] = call
        self.world.called(call.request)
        self.dispatch(ClusterCall(call.token, call.request))

    def called_blindly(self, request: ClusterRequest) -> None:
        """Take a call whose sender ignores the answer: late, repeated or hostile."""
        self.dispatch(ClusterCall(self.world.next_token(), request))

    def beats_ended(self, cluster: str, incarnation: Incarnation | None) -> None:
        self.dispatch(BeatsEnded(cluster, incarnation))

    def hung_up(self, token: int) -> None:
        if self._calls.pop(token, None) is not None:
            self.dispatch(CallGone(token))

    def operate(self, action: OperatorAction) -> int:
        """Send an operator's request; the token is in `answered` after the answer, which a master that dies never
        gives."""
        token = self.world.next_token()
        self.dispatch(OperatorCall(token, action))
        return token

    def attached(self, number: int, stream: Stream, end: End) -> None:
        self._links[number] = (stream, end)

    def slave_said(self, number: int, message: SlaveMessage) -> None:
        if number in self._links:
            self.dispatch(SlaveSaid(number, message))

    def welcome_again(self) -> bool:
        """Send the newest slave its Welcome once more on the same stream."""
        links = [link for link in self._welcomes if link in self._links]
        if links:
            stream, end = self._links[links[-1]]
            stream.send(end, self._welcomes[links[-1]])
        return bool(links)

    def hello_of_stranger(self, message: SlaveMessage) -> None:
        """Take a hello on a stream whose answers are ignored."""
        number = self.world.next_token()
        self.dispatch(SlaveSaid(number, message))
        self.dispatch(SlaveLinkDown(number))

    def link_down(self, number: int) -> None:
        if self._links.pop(number, None) is not None:
            self.dispatch(SlaveLinkDown(number))

    # ---- effects ----

    def _perform_all(self, effects: list[Effect]) -> None:
        for number, effect in enumerate(effects):
            if number and self.dies_after and self.dies_here():
                # Die between two effects of one step: some were executed, the others never are
                self.struck_dead("crash_master_in_step")
                return
            self._perform(effect)
        for effect in effects:
            if isinstance(effect, Halt) and self.alive:
                self.stop(effect.exit_code, effect.sentence)
            elif isinstance(effect, BeginAgain) and self.alive:
                self.kernel.note(self.name, f"begins again at epoch >= {effect.at_least}: {effect.sentence}")
                for stream, end in list(self._links.values()):
                    stream.close(end, ENDING)
                for call in list(self._calls.values()):
                    call.answered(ENDING)
                self._durable(self._on_its_way)
                self.generation += 1  # nothing that was scheduled for the old epoch may reach the new one
                self._timer_due_s = -1.0
                self._begin_epoch(effect.at_least)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(token, body):
                self._answer(token, body)
            case Refuse(token, refusal):
                self._answer(token, refusal)
            case ToSlave(link, command):
                if link in self._links:
                    stream, end = self._links[link]
                    stream.send(end, command)
                    if isinstance(command.body, Welcome):
                        self._welcomes[link] = command
            case CloseLink(link, refusal):
                if link in self._links:
                    stream, end = self._links[link]
                    stream.close(end, refusal)
                    self.kernel.after(0.0, self, self.link_down, link)
            case WriteJournal(entry_id, kind, record_json, snapshot_json):
                self._on_its_way.append(StoredEntry(self.epoch, entry_id, kind, record_json, snapshot_json))
                self._flush()
            case Record():
                self.world.tape("master", self, effect.kind, effect.cause, effect.fields)
            case Log(_, key, sentence):
                self.world.log(self.name, key, sentence)

    def _answer(self, token: int, body: Any) -> None:
        call = self._calls.pop(token, None)
        if call is not None:
            call.answered(body)
        else:
            self.answered.add(token)

    # ---- the journal ----

    def _flush(self) -> None:
        if self._flushing:
            return
        if self.disk.full:
            self.kernel.after(0.0, self, self.stop, FATAL_EXIT, "the journal's disk is full")
            return
        self._flushing = True
        delay_s = self.kernel.jitter(self.world.plan.flush_s) * self.disk.flush_factor
        self.kernel.after(delay_s, self, self._flushed, list(self._on_its_way))
        if self.dies_in_flush:
            self.kernel.after(delay_s / 2, self, self._die_in_flush)

    def _die_in_flush(self) -> None:
        self.dies_in_flush = False
        self.struck_dead("crash_master_while_writing")

    def _flushed(self, batch: list[StoredEntry]) -> None:
        """The disk has written the batch. A newer epoch in the same journal ends this process before it can write."""
        self._flushing = False
        if self.disk.epoch != self.epoch:
            self.stop(FATAL_EXIT, f"a newer master runs: the journal is at epoch {self.disk.epoch}")
            return
        if self.disk.full:
            self.stop(FATAL_EXIT, "the journal's disk is full")
            return
        del self._on_its_way[: len(batch)]
        self._durable(batch)
        if self._replication is not None:
            self._count(batch, self._replication.wrote(len(self.disk.entries), self.kernel.now_s))
            self._offer()
            return
        self._counts(batch)

    def _counts(self, batch: list[StoredEntry]) -> None:
        """What was decided in the batch holds from now on."""
        for entry in batch:
            if self.alive:
                self.dispatch(JournalWritten(entry.entry_id))
        if self.alive and self._on_its_way:
            self._flush()

    def _durable(self, batch: list[StoredEntry]) -> None:
        if self.disk.epoch != self.epoch:
            return
        for entry in batch:
            self.disk.entries.append(entry)
            self.world.journalled(self, json.loads(entry.record_json))

    # ---- the standby ----

    def _replicates(self) -> None:
        """Begin to wait for a standby, and tell a master that this one took over from."""
        plan = self.world.plan
        n = len(self.disk.entries)
        self._replication = Replication(n, wanted=plan.standby == WAITS, limit_s=plan.config.evict_after_s)
        self._uncounted, self._trouble = None, ""
        if self._follower is not None:
            (stream, end), self._follower = self._follower, None
            stream.close(end)
        self._say_trouble()
        if self.disk.took_over:
            self._tell_replaced()

    def _count(self, batch: list[StoredEntry], until_s: float) -> None:
        """Let the batch count once the standby has it, or is not waited for. The journal's thread waits as well."""
        assert self._replication is not None
        number = len(self.disk.entries)
        left_s = self._replication.left_s(number, until_s, self.kernel.now_s)
        if left_s:
            self._flushing, self._uncounted = True, (batch, until_s)
            self.kernel.after(left_s, self, self._count_again)
            return
        self._flushing, self._uncounted = False, None
        if self._replication.in_step and self.world.plan.standby == WAITS:
            self.disk.agreed = number
        self._say_trouble()
        self._counts(batch)

    def _count_again(self) -> None:
        if self._uncounted is not None:
            self._count(*self._uncounted)

    def _offer(self) -> None:
        """Send the standby what it does not have."""
        if self._follower is not None and self._replication is not None:
            stream, end = self._follower
            batch = self.disk.entries[self._sent :]
            self._sent = len(self.disk.entries)
            self._replication.sent(self._sent, is_whole=True)
            stream.send(end, (self.epoch, self.disk.took_over, batch))

    def followed(self, stream: Stream, end: End, entries: list[StoredEntry]) -> None:
        """A standby's stream is open; it has these entries."""
        if self._replication is None or entries != self.disk.entries[: len(entries)]:
            stream.close(end, OTHER_HISTORY)
            return
        self._follower, self._sent = (stream, end), len(entries)
        self._replication.follows(len(entries))
        self._say_trouble()
        self._offer()

    def acknowledged(self, stream: Stream, number: int) -> None:
        """The standby has the entries up to this one on its disk."""
        if self._follower is not None and self._follower[0] is stream and self._replication is not None:
            self._replication.heard(number)
            self._say_trouble()
            self._count_again()

    def unfollowed(self, stream: Stream) -> None:
        if self._follower is not None and self._follower[0] is stream and self._replication is not None:
            self._follower = None
            self._replication.lost()
            self._say_trouble()
            self._count_again()

    def _say_trouble(self) -> None:
        if self._replication is not None and self._replication.trouble != self._trouble:
            self._trouble = self._replication.trouble
            self.dispatch(ReplicaNews(self._trouble))

    def _tell_replaced(self) -> None:
        """Tell every other master that it was taken over from, for as long as this one lives."""
        for other in self.world.masters:
            if other is not self and isinstance(other, MasterHost) and not self.world.net.is_cut(self.at, other.at):
                self.kernel.after(self.world.net.delay_s(self.at, other.at), other, other.overtaken, self)
        self.kernel.after(REPLACED_PAUSE_S, self, self._tell_replaced)

    def overtaken(self, by: MasterHost) -> None:
        """A master says that it took over from this one."""
        if max(by.disk.took_over) in self.disk.took_over or by.epoch < self.epoch:
            by.stop(NEWER_EPOCH_EXIT, "the master that it took over from has taken over since")
            return
        self.stop(NEWER_EPOCH_EXIT, f"a standby has taken over in epoch {by.epoch}")
