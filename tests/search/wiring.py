"""Applies the outputs of one machine's step to the others: messages, facts, and the ends of streams and calls.

It must never choose what happens next: that is system.py's, and faults.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from dips.core.messages import Refusal
from search import cluster_part, master_part, slave_part
from search.bounds import Bounds
from search.cluster_part import ClusterPart
from search.copying import Arena, Out
from search.master_part import MasterPart
from search.reference_model import OLDER, ReferenceModels
from search.slave_part import SlavePart
from search.state import (
    ANSWER,
    BROKEN,
    CLOSING,
    HELD,
    NEWEST,
    NO_MASTER,
    OLD,
    REQUEST,
    WHOLE,
    Draft,
    Messages,
    SearchCall,
    SearchState,
    SearchViolation,
)

StepLabel = tuple[Any, ...]


class Wiring:
    """The data of a search. on_fact: called with every fact, for a replay. beginning: steps before the first state."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.names = bounds.slave_names
        self.masters = Arena[MasterPart](master_part.canonical, bounds.twice)
        self.slaves = Arena[SlavePart](slave_part.canonical, bounds.twice)
        self.clusters = Arena[ClusterPart](cluster_part.canonical, bounds.twice)
        self.messages = Messages()
        self.references = ReferenceModels()
        self.on_fact: Callable[[str, str, Out], None] | None = None
        self.beginning: list[StepLabel] = []

    def key(self, state: SearchState) -> bytes:
        """The key of a state, equal for equal states."""
        return state.key()

    # ---- steps of one machine, and their effects on the others ----

    def _master(self, draft: Draft, key: Any, act: Callable[[MasterPart], list[Out]], at: int = NEWEST) -> None:
        """A step of one of the masters, and its effects on the others."""
        if at == OLD:
            draft.old, outs = self.masters.step(draft.old, key, act)
        else:
            draft.master, outs = self.masters.step(draft.master, key, act)
        self._outs_of_master(draft, outs, at)

    def _outs_of_master(self, draft: Draft, outs: tuple[Out, ...], at: int = NEWEST) -> None:
        again = None
        ends = False
        for out in outs:
            match out[0]:
                case "reply" | "refuse":
                    self._replied(draft, out)
                case "down":
                    link = draft.links.get(out[1])
                    if link is not None and link.condition == WHOLE:
                        draft.links[out[1]] = link._replace(down=(*link.down, self.messages.number(out[2])))
                case "close":
                    self._closed(draft, out[1], out[2])
                case "again":
                    again = out[1]
                case "fenced off" | "halt" if at == OLD:
                    ends = True
                case _:
                    self._facts(draft, "master", "master" if at == NEWEST else OLDER, (out,))
        if ends:
            self._end_old(draft)
        if again is not None:
            self._restart(draft, len(self.masters[draft.master].pending), again)

    def _end_old(self, draft: Draft) -> None:
        """End the process of the older epoch; connected processes notice."""
        draft.old = NO_MASTER
        self._disconnect(draft, OLD)

    def _replied(self, draft: Draft, out: Out) -> None:
        held = next((call for call in draft.calls if call.stage == HELD and call.token == out[1]), None)
        if held is None:
            return
        draft.calls.remove(held)
        body = out[2]
        request = self.messages.all[held.message]
        if out[0] == "reply":
            if held.past:
                raise SearchViolation(
                    "I8", f"{brief(request)} of {request.caller.name} is not refused: its incarnation was over"
                )
            self._facts(draft, "master", "master", (("told", request, body),))
        if held.call_id:
            draft.calls.append(held._replace(stage=ANSWER, message=self.messages.number(body), token=0, past=0))

    def _closed(self, draft: Draft, number: int, refusal: Refusal) -> None:
        link = draft.links.get(number)
        if link is None:
            return
        if link.condition == WHOLE:
            draft.links[number] = link._replace(down=(self.messages.number(refusal),), up=(), condition=CLOSING)
        else:
            del draft.links[number]

    def _slave(self, draft: Draft, index: int, key: Any, act: Callable[[SlavePart], list[Out]]) -> None:
        draft.slaves[index], outs = self.slaves.step(draft.slaves[index], key, act)
        for out in outs:
            if out[0] == "up":
                link = draft.links.get(out[1])
                if link is not None and link.condition == WHOLE:
                    draft.links[out[1]] = link._replace(up=(*link.up, self.messages.number(out[2])))
            elif out[0] == "hang up":
                self._hang_up(draft, index, out[1])
            else:
                self._facts(draft, "slave", self.names[index], (out,))

    def _hang_up(self, draft: Draft, index: int, number: int | None) -> None:
        link = draft.links.get(number) if number is not None else None
        if link is not None:
            draft.links[link.number] = link._replace(down=(), condition=BROKEN)
            self._slave(draft, index, ("unlinked", False), lambda part: part.unlinked(False))

    def _cluster(self, draft: Draft, index: int, key: Any, act: Callable[[ClusterPart], list[Out]]) -> None:
        draft.clusters[index], outs = self.clusters.step(draft.clusters[index], key, act)
        self._orphan(draft, index, self.clusters[draft.clusters[index]].waiting_calls)
        for out in outs:
            if out[0] == "call":
                if out[1] in self.clusters[draft.clusters[index]].waiting_calls:
                    draft.calls.append(SearchCall(index, out[1], REQUEST, self.messages.number(out[2]), 0))
            else:
                self._facts(draft, "cluster", self.bounds.cluster_names[index], (out,))

    def _orphan(self, draft: Draft, index: int, waiting: frozenset[int]) -> None:
        """Mark calls that no process waits for; requests on their way to the master still arrive."""
        kept = []
        for call in draft.calls:
            if call.cluster != index or not call.call_id or call.call_id in waiting:
                kept.append(call)
            elif call.stage != ANSWER:
                kept.append(call._replace(call_id=0))
        draft.calls = kept

    def _facts(self, draft: Draft, role: str, name: str, outs: tuple[Out, ...]) -> None:
        for out in outs:
            if self.on_fact is not None:
                self.on_fact(role, name, out)
            reference = self.references[draft.reference]
            after = reference.received(role, name, out, self._look(draft))
            if after is not reference:
                draft.reference = self.references.number(after)

    def _look(self, draft: Draft) -> Any:
        """What checks may read: slaves and the bounds."""
        return _Look(self, draft)

    def _restart(self, draft: Draft, written: int, at_least: int) -> None:
        self._begin_restart(draft, ("restart", written, at_least), lambda part: part.restart(written, at_least))

    def _begin_restart(self, draft: Draft, key: Any, act: Callable[[MasterPart], list[Out]]) -> None:
        """Restart the newest master; all its connections end."""
        lost = self._cut(draft, NEWEST)
        self._master(draft, key, act)
        self._tell_cut(draft, lost)

    def _disconnect(self, draft: Draft, at: int) -> None:
        self._tell_cut(draft, self._cut(draft, at))

    def _cut(self, draft: Draft, at: int) -> list[SearchCall]:
        """Cut all connections of this master; returns calls whose callers have not noticed yet.

        A request that is on its way is lost unless its caller gave it up already, or another master may take it.
        """
        two = draft.old != NO_MASTER or at == OLD
        lost = [call for call in draft.calls if (call.at == at if call.stage != REQUEST else not two and call.call_id)]
        draft.calls = [call for call in draft.calls if call not in lost]
        draft.strays = [s for s in draft.strays if s[0] in draft.links and draft.links[s[0]].at != at]
        for number in [number for number, link in draft.links.items() if link.at == at]:
            del draft.links[number]
        return lost

    def _tell_cut(self, draft: Draft, lost: list[SearchCall]) -> None:
        linked = {(link.slave, link.number) for link in draft.links.values()}
        for slave in range(len(self.names)):
            number = self.slaves[draft.slaves[slave]].link
            if number is not None and (slave, number) not in linked:
                self._slave(draft, slave, ("unlinked", False), lambda part: part.unlinked(False))
        for call in sorted(lost):
            if call.call_id in self.clusters[draft.clusters[call.cluster]].waiting_calls:
                key = ("unanswered", call.call_id)
                self._cluster(draft, call.cluster, key, methodcaller("unanswered", call.call_id))


class _Look:
    """What a check of one fact may read."""

    def __init__(self, system: Wiring, draft: Draft) -> None:
        self._system, self._draft = system, draft
        self.bounds = system.bounds

    @property
    def slaves(self) -> list[SlavePart]:
        return [self._system.slaves[number] for number in self._draft.slaves]

    @property
    def master(self) -> MasterPart:
        return self._system.masters[self._draft.master]


def brief(message: Any) -> str:
    """A message in a few words."""
    name = type(message).__name__.removesuffix("Request").removesuffix("Reply")
    answer = getattr(message, "answer", None)
    if answer is not None:
        return f"{name}: {brief(answer)}"
    words = [name]
    for field in ("kind", "push", "seq", "attempt", "version", "round", "base", "fence", "code", "load"):
        value = getattr(message, field, None)
        if value is not None:
            words.append(f"{field}={getattr(value, 'name', value)}")
    return " ".join(words)
