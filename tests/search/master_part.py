"""The master in a search: the real MasterMachine and its journal, with time-outs as actions.

Time never moves: an action sets one deadline to now and ticks, so that any one may elapse before any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dips.core.ids import Incarnation, SlaveId
from dips.core.machine import MachineHistory
from dips.core.messages import Caller, DataPlan, Hello, JoinRequest, SlaveHello, SlaveMessage
from dips.master.state.effects import (
    BeginAgain,
    CallGone,
    CloseLink,
    ClusterCall,
    Effect,
    Event,
    Halt,
    JournalWritten,
    OperatorAction,
    OperatorCall,
    Record,
    Refuse,
    Reply,
    SlaveLinkDown,
    SlaveSaid,
    Tick,
    ToSlave,
    WriteJournal,
)
from dips.master.state.master import MasterMachine
from dips.master.state.records import Member, ReshardPhase, RoundPhase
from dips.master.state.replication import TAKE_OVER_EPOCHS
from search.bounds import LAYOUT, RUN, T0_S, Bounds
from search.copying import Out

SECOND_HELLO = Hello(1, 1, ())
SECOND_LINK = 9
"""The stream of a second process; slaves' own numbers are from 10 on."""

OPERATOR = 2
"""The token of an operator's call."""

FREE_TIMERS = ("round", "resend", "ticket", "finish", "ask", "donor", "reshard", "look")
"""Time-outs that need no budget when nothing else can happen: then time passes."""


class MasterPart:
    """A master through all its incarnations. written: the newest durable snapshot of the ledger.

    learns: None for the master that the journal belongs to; else a newer epoch was begun in it, and only so many of the
    pending entries were written before.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.config = bounds.run_config()
        self.rebuild = False
        self.slow = bounds.slow_journal
        self.epoch = 0
        self.written: str | None = None
        self.pending: list[WriteJournal] = []
        self.learns: int | None = None
        self.state = self._restart(1)

    def _restart(self, at_least: int) -> MasterMachine:
        self.epoch = max(self.epoch + 1, at_least)
        config = replace(self.config, rebuild=self.rebuild)
        state = MasterMachine(config, self.epoch, self.written, 0.0)
        keep_no_story(state.shared.story)
        return state

    # ---- actions ----

    def start(self) -> list[Out]:
        return self._carry_out(self.state.start(T0_S))

    def call(self, token: int, request: Any) -> list[Out]:
        self.state._pulls._next_pin = token // 100  # one pin for each cluster: equal states have equal numbers
        return self._handle(ClusterCall(token, request))

    def second_joins(self, cluster: str, plan: DataPlan) -> list[Out]:
        """A second process asks to join as this cluster; the answer is dropped."""
        caller = Caller(RUN, 0, cluster, None, "second")
        request = JoinRequest(caller, SECOND_HELLO, LAYOUT, LAYOUT.layout_hash, plan, process_id=b"second")
        return self._handle(ClusterCall(OPERATOR, request))

    def second_greets(self, slave: str) -> list[Out]:
        """A process with another directory sends a hello under the name of a present slave."""
        hello = SlaveHello(SECOND_HELLO, "tcp://elsewhere:1", 1 << 30, 0, directory_id=b"second")
        message = SlaveMessage(Caller(RUN, 0, slave, None, "second"), hello)
        return [*self._handle(SlaveSaid(SECOND_LINK, message)), *self._handle(SlaveLinkDown(SECOND_LINK))]

    def hung_up(self, token: int) -> list[Out]:
        return self._handle(CallGone(token))

    def said(self, link: int, message: Any) -> list[Out]:
        return self._handle(SlaveSaid(link, message))

    def link_down(self, link: int) -> list[Out]:
        return self._handle(SlaveLinkDown(link))

    def write(self) -> list[Out]:
        """The disk writes the oldest entry, or wrote it before a newer epoch was begun."""
        entry = self.pending.pop(0)
        if self.learns is not None:
            if self.learns == 0:
                return [("fenced off", entry.kind)]
            self.learns -= 1
            return self._handle(JournalWritten(entry.entry_id))
        return [*self._durable(entry), *self._handle(JournalWritten(entry.entry_id))]

    def restart(self, written: int, at_least: int = 0) -> list[Out]:
        """Restart; the first `written` pending entries are durable, although no process learnt it."""
        outs: list[Out] = []
        for entry in self.pending[:written]:
            outs += self._durable(entry)
        self.pending = []
        self.state = self._restart(at_least)
        return [*outs, *self.start()]

    def take_over(self) -> list[Out]:
        """A standby that has each durable entry becomes the master, with a journal of its own."""
        self.pending = []
        self.state = self._restart(self.epoch + TAKE_OVER_EPOCHS)
        return self.start()

    def be_overtaken(self, written: int) -> list[Out]:
        """Another master begins a newer epoch in the same journal; this one learns of it when it writes."""
        self.learns = written
        return []

    def lose_journal(self, promised: int, rebuild: bool) -> list[Out]:
        """The master's disk is lost; it is started with an empty one. promised: the newest epoch of any slave, which a
        rebuild finds; where there is no version to take, the operator then starts the master without it."""
        self.pending, self.written, self.rebuild = [], None, rebuild
        self.epoch = 0 if rebuild else promised
        self.state = self._restart(1)
        return self.start()

    def fire(self, timer: str) -> list[Out]:
        """One deadline is reached."""
        for name, fire in self.timers():
            if name == timer:
                fire()
                return self._handle(Tick())
        raise KeyError(timer)

    def evict(self, cluster: str) -> list[Out]:
        """No beat of the cluster arrived for too long."""
        self.state.shared.members[cluster].beat_s = T0_S - 1e6
        return self._handle(Tick())

    def operator(self, action: OperatorAction) -> list[Out]:
        """An operator's request; the answer is dropped."""
        return self._handle(OperatorCall(OPERATOR, action))

    def expire_leases(self, cluster: str) -> list[Out]:
        """Expire the leases of an absent cluster."""
        away = self.state._members._away_since_s
        away[cluster] = T0_S - 1e9
        outs = self._handle(Tick())
        away[cluster] = T0_S
        return outs

    def timers(self) -> list[tuple[str, Callable[[], None]]]:
        """The present deadlines, with the action that reaches each."""
        world, state = self.state.shared, self.state.shared.round
        found: list[tuple[str, Callable[[], None]]] = []
        if state.phase.now is RoundPhase.WINDOW and (state.window_closes_s > T0_S or state.not_before_s > T0_S):
            found.append(("window", lambda: self._set(state, "window_closes_s", "not_before_s")))
        if state.phase.now is RoundPhase.WINDOW and state.awaited:
            found.append(("minimum", lambda: self._set(state, "few_until_s")))
        if state.deadline_s is not None:
            found.append(("round", lambda: self._set(state, "deadline_s")))
        if getattr(state, "resend_s", None) is not None:
            found.append(("resend", lambda: self._set(state, "resend_s")))
        recovery = getattr(world, "recovery", None)
        if recovery is not None and recovery.active and recovery.look_until_s > T0_S:
            found.append(("look", lambda: self._set(recovery, "look_until_s")))
        if recovery is not None and recovery.asked is not None:
            found.append(("ask", lambda: self._set(recovery, "ask_again_s")))
        if world.reshard.phase.now is ReshardPhase.WAITING and world.reshard.not_before_s > T0_S:
            found.append(("reshard", lambda: self._set(world.reshard, "not_before_s")))
        for push in world.pushes():
            if push.finish_token is not None:
                found.append(("finish", partial(self._set, push, "finish_until_s")))
            if push.phase.allows("new attempt"):
                found.append(("ticket", partial(setattr, push, "renewed_s", T0_S - 1e6)))
        return found

    def _set(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, T0_S)

    # ---- effects ----

    def _handle(self, event: Event) -> list[Out]:
        return self._carry_out(self.state.handle(event, T0_S))

    def _carry_out(self, effects: list[Effect]) -> list[Out]:
        outs: list[Out] = []
        for effect in effects:
            match effect:
                case Reply(token, body):
                    outs.append(("reply", token, body))
                case Refuse(token, refusal):
                    outs.append(("refuse", token, refusal))
                case ToSlave(link, command):
                    outs.append(("down", link, command))
                case CloseLink(link, refusal):
                    outs.append(("close", link, refusal))
                case Record():
                    outs.append(("fact", effect.kind, effect.cause, effect.fields))
                case Halt(code, sentence):
                    outs.append(("halt", code, sentence))
                case BeginAgain(at_least):
                    outs.append(("again", at_least))
                case WriteJournal() if self.slow:
                    self.pending.append(effect)
                case WriteJournal() if self.learns is not None:
                    return [*outs, ("fenced off", effect.kind)]
                case WriteJournal():
                    outs += self._durable(effect)
                    outs += self._handle(JournalWritten(effect.entry_id))
        return outs

    def _durable(self, entry: WriteJournal) -> list[Out]:
        self.written = entry.snapshot_json
        return [("journal", json.loads(entry.record_json), json.loads(entry.snapshot_json))]

    # ---- queries of the search ----

    def lends_to_absent(self, cluster: str) -> bool:
        """Whether the cluster is absent and still has leases."""
        ledger = self.state.shared.ledger
        leased = ledger.leases is not None and ledger.leases.leased_tokens()[cluster] > 0
        return leased and self.member(cluster) is None

    @property
    def recovers(self) -> bool:
        """Whether it waits for what the slaves hold."""
        return self.state.shared.recovery.active

    @property
    def settled(self) -> bool:
        """Whether nothing is under way."""
        world = self.state.shared
        idle = world.round.phase.now is RoundPhase.IDLE and world.ledger.reshard is None
        return idle and not any(world.pushes()) and world.everything_out

    def member(self, cluster: str) -> Member | None:
        return self.state.shared.members.get(cluster)

    def slave_incarnation(self, slave: str) -> Incarnation | None:
        """The incarnation of a slave with an open stream."""
        found = self.state.shared.slaves.get(SlaveId(slave))
        return found.incarnation if found is not None and found.link is not None else None

    def incarnation(self, cluster: str) -> Incarnation | None:
        member = self.member(cluster)
        return member.incarnation if member else None


class _NoStory(MachineHistory):
    """An event history that keeps nothing."""

    def add(self, at_s: float, machine: str, cause: str, text: str) -> None:
        pass


def keep_no_story(story: MachineHistory) -> None:
    """Switch off the master's event history: the search keeps its own paths, and the memory would be too large."""
    story.__class__ = _NoStory


def canonical(part: MasterPart) -> None:
    """Restart used-up numbers, so that equal states are equal whatever the path to them."""
    part.state._pulls._next_pin = 1
    part.state._members._claims.rearm()  # a second process's wait makes no difference without time
    part.state._slaves._claims.rearm()
    for member in part.state.shared.members.values():
        member.ahead = None  # no speed is measured here, so nothing is expected of it
    part.state.shared.reshard.pause_s = 0.0
    if part.state.shared.reshard.not_before_s > T0_S:
        part.state.shared.reshard.not_before_s = T0_S + 1.0
    if not part.pending:
        part.state.shared.out._next_entry = 1
