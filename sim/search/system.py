"""The run as a search sees it: every action that may come next in a state, and the state that it leads to.

Actions that touch one machine only and commute with all others are taken first and alone (SILENT); faults may come
before any of them. It must never decide what a machine does: it carries messages, and breaks things.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from typing import Any

from dips.core.errors import RefusalCode
from dips.core.messages import (
    AbortRound,
    CloseStaging,
    FinishPullRequest,
    HeartbeatRequest,
    Measure,
    OpenStaging,
    PullGrant,
    Refusal,
    Retain,
    SlaveCommand,
    StopSlave,
    Welcome,
)
from dips.sim.search.arena import Out
from dips.sim.search.bounds import FAULTS
from dips.sim.search.cluster_part import ClusterPart
from dips.sim.search.faults import Faults, Next
from dips.sim.search.ghost import Ghost
from dips.sim.search.master_part import FREE_TIMERS, MasterPart
from dips.sim.search.slave_part import Content, SlavePart, digest_of
from dips.sim.search.state import ANSWER, BROKEN, CLOSING, HELD, REQUEST, WHOLE, Call, Draft, Link, State
from dips.sim.search.wiring import brief

SILENT = (OpenStaging, CloseStaging, Retain, Measure, AbortRound, Welcome, StopSlave)
"""Commands that a slave may take as soon as they are its oldest: what it does then shows only in words on their way."""

WAKES = "asks again: cluster"


class System(Faults):
    """Every action that may come next, and the checks of a state."""

    # ---- the first state ----

    def initial(self) -> State:
        bounds = self.bounds
        spent = [dict(bounds.faults).get(name, 0) for name in FAULTS]
        state = State(
            self.masters.enter(MasterPart(bounds)),
            tuple(self.slaves.enter(SlavePart(name)) for name in bounds.slave_names),
            tuple(self.clusters.enter(ClusterPart(name, bounds)) for name in bounds.cluster_names),
            (),
            (),
            (),
            (*spent, bounds.total_faults),
            self.ghosts.number(Ghost()),
        )
        draft = Draft(state)
        self._master(draft, "start", lambda part: part.start())
        for index in range(bounds.clusters):
            self._cluster(draft, index, "start", lambda part: part.start())
        state = draft.done()
        if not bounds.from_start:
            state = self._run_quietly(state)
        draft = Draft(state)
        for index, name in enumerate(bounds.cluster_names):
            pushes = bounds.pushes + (name in bounds.eager)
            self._cluster(draft, index, ("allow", pushes), methodcaller("allow", pushes))
        return draft.done()

    def _run_quietly(self, state: State) -> State:
        """One way without a fault, until everybody is at the seed."""
        for _ in range(2000):
            found = next(self._ordinary(state), None)
            if found is None:
                return state
            label, state = found
            self.beginning.append(label)
        raise RuntimeError("the search's beginning does not come to rest: the protocol is broken without any fault")

    # ---- what may come next ----

    def successors(self, state: State) -> list[Next]:
        """Every next state with the action that leads there. Raises Violation."""
        return list(self.steps(state))

    def steps(self, state: State) -> Iterator[Next]:
        """The same, one after the other: what happens in between to on_fact belongs to the one that comes next."""
        if not self.ghosts[state.ghost].halted:
            yield from self._ordinary(state)
            yield from self._faults(state)

    def _ordinary(self, state: State) -> Iterator[Next]:
        for action in self._silent(state):
            yield action
            return
        only_wakes = True
        for action in self._visible(state):
            only_wakes = only_wakes and action[0][0] == WAKES
            yield action
        if only_wakes:
            yield from self._time_passes(state)

    def is_settled(self, state: State) -> bool:
        """Whether nothing is left to do."""
        if self.ghosts[state.ghost].halted:
            return True
        clusters = all(self.clusters[number].settled for number in state.clusters)
        return clusters and (self.masters[state.master].settled)

    def _silent(self, state: State) -> Iterator[Next]:
        for link in state.links:
            if link.condition == WHOLE and link.down and self._is_silent(link.down[0]):
                yield self._hear(state, link)
            elif link.condition == CLOSING:
                yield self._hear_of_the_end(state, link)
        for index, number in enumerate(state.slaves):
            if self.slaves[number].link is None and not self.slaves[number].stopped:
                yield self._dial(state, index)
        for index, number in enumerate(state.clusters):
            transfer = self.clusters[number].transfer
            if transfer is not None:
                for slave in range(len(state.slaves)):
                    if self._can_land(state, index, slave):
                        yield self._land(state, index, slave)
        for call in state.calls:
            message = self.messages.all[call.message]
            if call.stage == ANSWER or isinstance(message, FinishPullRequest):
                yield self._carry(state, call)

    def _is_silent(self, message: int) -> bool:
        command = self.messages.all[message]
        return isinstance(command.body, SILENT)

    def _visible(self, state: State) -> Iterator[Next]:
        for call in state.calls:
            if call.stage == REQUEST:
                yield self._carry(state, call)
        for link in state.links:
            if link.condition != CLOSING and link.up:
                yield self._speak(state, link)
            elif link.condition == BROKEN:
                yield self._notice(state, link)
            if link.condition == WHOLE and link.down:
                yield self._hear(state, link)
        for link_number, message in state.strays:
            yield self._stray(state, link_number, message)
        for index, number in enumerate(state.clusters):
            part = self.clusters[number]
            if part.pull is not None:
                yield self._pull(state, index)
            if part.sleeps:
                yield self._wake(state, index)
        master = self.masters[state.master]
        if master.pending:
            yield self._write(state)
        for name, _ in master.timers():
            if name not in FREE_TIMERS:
                yield self._fire(state, name)

    def _time_passes(self, state: State) -> Iterator[Next]:
        """Nothing else can happen: whatever waits for time gets it."""
        for name in sorted({name for name, _ in self.masters[state.master].timers()}):
            yield self._fire(state, name)
        told = False
        for index, number in enumerate(state.clusters):
            if self.clusters[number].transfer is not None and self._cannot_land(state, index):
                yield self._give_up_transfer(state, index)
            if not self.clusters[number].left and self._beat_would_tell(state, index):
                told = True
                yield self._beat(state, index)
        for index, number in enumerate(state.clusters):
            if self.clusters[number].may_step_on and not told:  # beats come more often than pushes
                yield self._step_on(state, index)

    # ---- messages ----

    def _carry(self, state: State, call: Call) -> Next:
        """A request reaches the master, or an answer its caller."""
        draft = Draft(state)
        draft.calls.remove(call)
        name, message = self.bounds.cluster_names[call.cluster], self.messages.all[call.message]
        if call.stage == ANSWER:
            self._answer(draft, call, message)
            return (f"cluster {name} hears", brief(message)), draft.done()
        token = draft.free_token(call.cluster)
        past = self.ghosts[state.ghost].is_past(message)
        draft.calls.append(call._replace(stage=HELD, token=token, past=int(past)))
        self._master(draft, ("call", token, call.message), lambda part: part.call(token, message))
        late = "" if call.call_id else " (late)"
        return (f"master takes {name}'s", brief(message) + late), draft.done()

    def _answer(self, draft: Draft, call: Call, message: Any) -> None:
        key = ("answer", call.call_id, call.message)
        if isinstance(message, Refusal):
            self._cluster(draft, call.cluster, key, lambda part: part.refused(call.call_id, message))
        else:
            self._cluster(draft, call.cluster, key, lambda part: part.answered(call.call_id, message))

    def _hear(self, state: State, link: Link) -> Next:
        draft = Draft(state)
        draft.links[link.number] = link._replace(down=link.down[1:])
        command = self.messages.all[link.down[0]]
        self._slave(draft, link.slave, ("hear", link.down[0]), lambda part: part.hear(command))
        return (f"slave {self.names[link.slave]} obeys", brief(command.body)), draft.done()

    def _hear_of_the_end(self, state: State, link: Link) -> Next:
        """The master closed the stream; what was on its way down is lost with it."""
        draft = Draft(state)
        refusal = self.messages.all[link.down[-1]]
        del draft.links[link.number]
        fenced = refusal.code is RefusalCode.FENCED
        self._slave(draft, link.slave, ("unlinked", fenced), lambda part: part.unlinked(fenced))
        return (f"slave {self.names[link.slave]} is told that its stream ended", refusal.code.name), draft.done()

    def _speak(self, state: State, link: Link) -> Next:
        draft = Draft(state)
        draft.links[link.number] = link._replace(up=link.up[1:])
        message = self.messages.all[link.up[0]]
        self._master(draft, ("said", link.number, link.up[0]), lambda part: part.said(link.number, message))
        return (f"master hears slave {self.names[link.slave]}", brief(message.body)), draft.done()

    def _stray(self, state: State, link: int, number: int) -> Next:
        draft = Draft(state)
        draft.strays.remove((link, number))
        message = self.messages.all[number]
        self._master(draft, ("said", link, number), lambda part: part.said(link, message))
        return (f"master hears slave {message.caller.name} once more", brief(message.body)), draft.done()

    def _notice(self, state: State, link: Link) -> Next:
        draft = Draft(state)
        del draft.links[link.number]
        self._master(draft, ("link down", link.number), lambda part: part.link_down(link.number))
        return ("master notices that a stream broke:", self.names[link.slave]), draft.done()

    def _dial(self, state: State, slave: int) -> Next:
        draft = Draft(state)
        number = draft.free_link(slave)
        draft.links[number] = Link(number, slave, (), (), WHOLE)
        self._slave(draft, slave, ("dial", number), lambda part: part.dial(number))
        return ("dials the master: slave", self.names[slave]), draft.done()

    # ---- data ----

    def _can_land(self, state: State, cluster: int, slave: int) -> bool:
        transfer = self.clusters[state.clusters[cluster]].transfer
        assert transfer is not None
        part = self.slaves[state.slaves[slave]]
        return part.name not in transfer.landed and part.knows(transfer.push, transfer.ticket.attempt)

    def _cannot_land(self, state: State, cluster: int) -> bool:
        """A slave holds no slot for it, and no command to open one is on its way."""
        transfer = self.clusters[state.clusters[cluster]].transfer
        assert transfer is not None
        coming = {
            link.slave
            for link in state.links
            for message in link.down
            if _opens(self.messages.all[message], transfer.push, transfer.ticket.attempt)
        }
        lacking = [i for i, name in enumerate(self.names) if name not in transfer.landed]
        return all(not self._can_land(state, cluster, i) for i in lacking) and any(i not in coming for i in lacking)

    def _land(self, state: State, cluster: int, slave: int) -> Next:
        draft = Draft(state)
        part = self.clusters[state.clusters[cluster]]
        transfer, payload, name = part.transfer, part.sent, self.names[slave]
        assert transfer is not None
        attempt = transfer.ticket.attempt
        if not self.slaves[state.slaves[slave]].has(transfer.push):
            key = ("land", str(transfer.push), attempt, payload)
            self._slave(draft, slave, key, lambda s: s.land(transfer.push, attempt, payload))
        self._cluster(draft, cluster, ("landed", name), lambda c: c.landed(name, self.names))
        return (f"push {transfer.push} lands on", name), draft.done()

    def _give_up_transfer(self, state: State, cluster: int) -> Next:
        draft = Draft(state)
        self._cluster(draft, cluster, "transfer failed", lambda part: part.transfer_failed())
        return ("cannot send its push: cluster", self.bounds.cluster_names[cluster]), draft.done()

    def _pull(self, state: State, cluster: int) -> Next:
        draft = Draft(state)
        part = self.clusters[state.clusters[cluster]]
        assert part.pull is not None
        grant = part.pull[1]
        found = self._read(state, grant)
        content = found[0][1] if found else None
        self._cluster(draft, cluster, ("pulled", content), lambda c: c.pulled(content))
        name = self.bounds.cluster_names[cluster]
        if found:
            fact = ("fact", "_content", str(grant.version), {"by": name, "version": str(grant.version), "read": found})
            self._facts(draft, "cluster", name, (fact,))
        return (f"cluster {name} pulls", f"{grant.version}" if found else "in vain"), draft.done()

    def _read(self, state: State, grant: PullGrant) -> list[tuple[Any, Content]] | None:
        promised = dict(grant.digest_of_slave)
        found = []
        for number in state.slaves:
            part = self.slaves[number]
            held = part.readable(grant.version)
            if held is None or digest_of(part.name, held[1]) != promised[part.name]:
                return None
            found.append(held)
        return found

    # ---- time ----

    def _write(self, state: State) -> Next:
        draft = Draft(state)
        kind = self.masters[state.master].pending[0].kind
        self._master(draft, "write", lambda part: part.write())
        return ("master's disk takes", kind), draft.done()

    def _fire(self, state: State, timer: str) -> Next:
        draft = Draft(state)
        self._master(draft, ("fire", timer), lambda part: part.fire(timer))
        return ("time passes at the master:", timer), draft.done()

    def _wake(self, state: State, cluster: int) -> Next:
        draft = Draft(state)
        self._cluster(draft, cluster, "wake", lambda part: part.wake())
        return (WAKES, self.bounds.cluster_names[cluster]), draft.done()

    def _step_on(self, state: State, cluster: int) -> Next:
        draft = Draft(state)
        self._cluster(draft, cluster, "step on", lambda part: part.step_on())
        return ("trains on: cluster", self.bounds.cluster_names[cluster]), draft.done()

    def _beat_reply(self, state: State, cluster: int) -> tuple[int, tuple[Out, ...]] | None:
        core = self.clusters[state.clusters[cluster]].session.core
        if core.terms.incarnation is None:
            return None
        request = HeartbeatRequest(core.terms.caller("beat"), base=core.base)
        number = self.messages.number(request)
        return self.masters.step(state.master, ("beat", number), lambda part: part.call(1, request))

    def _beat_would_tell(self, state: State, cluster: int) -> bool:
        return self._beaten(state, cluster) != state

    def _beat(self, state: State, cluster: int) -> Next:
        return ("beats: cluster", self.bounds.cluster_names[cluster]), self._beaten(state, cluster)

    def _beaten(self, state: State, cluster: int) -> State:
        """A heartbeat and its answer, at once."""
        found = self._beat_reply(state, cluster)
        draft = Draft(state)
        if found is None:
            return state
        draft.master, outs = found
        reply = next((out[2] for out in outs if out[0] == "reply" and out[1] == 1), None)
        self._outs_of_master(draft, tuple(out for out in outs if out[1] != 1))
        if reply is not None:
            key = ("beat", self.messages.number(reply))
            self._cluster(draft, cluster, key, lambda part: part.beat(reply))
        return draft.done()

    # ---- checks of a state ----

    def check(self, state: State) -> None:
        """What must hold in every state. Raises Violation."""
        self.ghosts[state.ghost].check([self.slaves[number] for number in state.slaves], self.bounds)


def _opens(command: Any, push: Any, attempt: int) -> bool:
    body = command.body if isinstance(command, SlaveCommand) else None
    return isinstance(body, OpenStaging) and body.push == push and body.attempt == attempt
