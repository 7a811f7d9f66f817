"""What may go wrong in a state, each fault as an action of its own. It breaks things outside the machines only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import methodcaller

from dips.sim.search.arena import Out
from dips.sim.search.bounds import FAULTS
from dips.sim.search.slave_part import SlavePart
from dips.sim.search.state import BROKEN, HELD, REQUEST, WHOLE, Draft, State
from dips.sim.search.wiring import Label, Wiring, brief

Next = tuple[Label, State]
_FAULT = {name: index for index, name in enumerate(FAULTS)}


class Faults(Wiring):
    """One method for each fault that bounds may name."""

    def _faults(self, state: State) -> Iterator[Next]:
        if state.budget[-1] <= 0:
            return
        for name, index in _FAULT.items():
            if state.budget[index] > 0:
                for label, draft in getattr(self, f"_do_{name}")(state):
                    draft.spend(index)
                    yield (f"FAULT {name}:", label), draft.done()

    def _do_lose_call(self, state: State) -> Iterator[tuple[str, Draft]]:
        for call in state.calls:
            if call.call_id:
                draft = Draft(state)
                draft.calls.remove(call)
                if call.stage == HELD:
                    self._master(draft, ("hung up", call.token), methodcaller("hung_up", call.token))
                self._cluster(
                    draft, call.cluster, ("unanswered", call.call_id), methodcaller("unanswered", call.call_id)
                )
                words = ("the request", "the connection of", "the answer")[call.stage]
                yield f"{words} {brief(self.messages.all[call.message])}", draft

    def _do_late_call(self, state: State) -> Iterator[tuple[str, Draft]]:
        for call in state.calls:
            if call.call_id and call.stage == REQUEST:
                draft = Draft(state)
                draft.calls.remove(call)
                draft.calls.append(call._replace(call_id=0))
                self._cluster(
                    draft, call.cluster, ("unanswered", call.call_id), methodcaller("unanswered", call.call_id)
                )
                yield f"{brief(self.messages.all[call.message])} is given up, and arrives later", draft

    def _do_repeat_word(self, state: State) -> Iterator[tuple[str, Draft]]:
        for link in state.links:
            if link.up and link.condition == WHOLE:
                draft = Draft(state)
                draft.strays.append((link.number, link.up[0]))
                yield f"{brief(self.messages.all[link.up[0]].body)} of {self.names[link.slave]}", draft

    def _do_break_link(self, state: State) -> Iterator[tuple[str, Draft]]:
        for slave, name in enumerate(self.names):
            link = Draft(state).link_of(slave)
            if link is not None and link.condition == WHOLE:
                for up in {link.up, ()}:
                    draft = Draft(state)
                    draft.links[link.number] = link._replace(down=(), up=up, condition=BROKEN)
                    self._slave(draft, slave, ("unlinked", False), lambda part: part.unlinked(False))
                    yield f"{name}, with {len(link.up) - len(up)} words lost", draft

    def _killed(self, state: State, slave: int, how: str, act: Callable[[SlavePart], list[Out]]) -> Draft:
        draft = Draft(state)
        link = draft.link_of(slave)
        if link is not None and link.condition == WHOLE:
            draft.links[link.number] = link._replace(down=(), condition=BROKEN)
        elif link is not None:
            del draft.links[link.number]
        self._slave(draft, slave, how, act)
        return draft

    def _do_kill_slave(self, state: State) -> Iterator[tuple[str, Draft]]:
        for slave, name in enumerate(self.names):
            yield name, self._killed(state, slave, "kill", lambda part: part.kill())

    def _do_lose_version(self, state: State) -> Iterator[tuple[str, Draft]]:
        if self.slaves[state.slaves[0]].n_committed < 2:
            return
        draft = self._killed(state, 0, "lose version", lambda part: part.lose_version())
        self._excuse(draft)
        yield self.names[0], draft

    def _do_empty_disk(self, state: State) -> Iterator[tuple[str, Draft]]:
        draft = self._killed(state, 0, "empty disk", lambda part: part.empty_disk())
        self._excuse(draft)
        yield self.names[0], draft

    def _excuse(self, draft: Draft) -> None:
        """A disk that was lost breaks no promise of the protocol (I5 speaks of disks that keep what they took)."""
        draft.ghost = self.ghosts.number(self.ghosts[draft.ghost].disk_lost())

    def _do_kill_cluster(self, state: State) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            draft = Draft(state)
            self._orphan(draft, index, frozenset())
            self._cluster(draft, index, "kill", lambda part: part.kill())
            yield name, draft

    def _do_evict_cluster(self, state: State) -> Iterator[tuple[str, Draft]]:
        for name in self.bounds.cluster_names:
            if self.masters[state.master].member(name) is not None:
                draft = Draft(state)
                self._master(draft, ("evict", name), methodcaller("evict", name))
                yield name, draft

    def _do_time_out(self, state: State) -> Iterator[tuple[str, Draft]]:
        for name in sorted({name for name, _ in self.masters[state.master].timers()} & {"round", "ticket"}):
            draft = Draft(state)
            self._master(draft, ("fire", name), methodcaller("fire", name))
            yield name, draft

    def _do_kill_master(self, state: State) -> Iterator[tuple[str, Draft]]:
        for written in range(len(self.masters[state.master].pending) + 1):
            draft = Draft(state)
            self._restart(draft, written, 0)
            yield f"{written} entries of its journal were written meanwhile", draft

    def _do_old_backup(self, state: State) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            if self.clusters[state.clusters[index]].has_old_backup:
                draft = Draft(state)
                self._cluster(draft, index, "old backup", lambda part: part.old_backup())
                yield name, draft

    def _do_lose_journal(self, state: State) -> Iterator[tuple[str, Draft]]:
        draft = Draft(state)
        self._excuse(draft)
        self._begin_life(draft, "lose journal", lambda part: part.lose_journal())
        yield "the master comes back with an empty disk", draft
