"""The faults of a search, each one an action. They act only outside of the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import methodcaller
from typing import Any

from dips.core.messages import JoinRequest, Refusal, ReshardRequest
from dips.core.net.data_header import DataHeader
from search.bounds import FAULTS, RUN
from search.copying import Out
from search.master_part import MasterPart
from search.ranks_part import OpenTransfer
from search.slave_part import PieceNames, SlavePart, blocks_of, put_chunk
from search.state import (
    ANSWER,
    BROKEN,
    HELD,
    NEWEST,
    NO_MASTER,
    OLD,
    REQUEST,
    WHOLE,
    Draft,
    SearchCall,
    SearchState,
    SearchViolation,
)
from search.wiring import StepLabel, Wiring, brief

Next = tuple[StepLabel, SearchState]

WHO = ("the master", "the old master")

_FAULT = {name: index for index, name in enumerate(FAULTS)}


@dataclass(frozen=True)
class ChunkOnItsWay:
    """A chunk of a push on its way."""

    header: DataHeader
    content: PieceNames


class Faults(Wiring):
    """The faults: one method for each name in Bounds."""

    def _faults(self, state: SearchState) -> Iterator[Next]:
        if state.budget[-1] <= 0:
            return
        for name, index in _FAULT.items():
            if state.budget[index] > 0:
                for label, draft in getattr(self, f"_do_{name}")(state):
                    draft.spend(index)
                    yield (f"FAULT {name}:", label), draft.done()

    def _do_lose_call(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for call in state.calls:
            if call.call_id:
                draft = Draft(state)
                draft.calls.remove(call)
                if call.stage == HELD:
                    self._master(draft, ("hung up", call.token), methodcaller("hung_up", call.token), call.at)
                self._cluster(
                    draft, call.cluster, ("unanswered", call.call_id), methodcaller("unanswered", call.call_id)
                )
                words = ("the request", "the connection of", "the answer")[call.stage]
                yield f"{words} {brief(self.messages.all[call.message])}", draft

    def _do_late_call(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for call in state.calls:
            if call.call_id and call.stage == REQUEST:
                draft = Draft(state)
                draft.calls.remove(call)
                draft.calls.append(call._replace(call_id=0))
                self._cluster(
                    draft, call.cluster, ("unanswered", call.call_id), methodcaller("unanswered", call.call_id)
                )
                yield f"{brief(self.messages.all[call.message])} is given up, and arrives later", draft

    def _do_repeat_word(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for link in state.links:
            if link.up and link.condition == WHOLE:
                draft = Draft(state)
                draft.strays.append((link.number, link.up[0]))
                yield f"{brief(self.messages.all[link.up[0]].body)} of {self.names[link.slave]}", draft

    def _do_break_link(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for slave, name in enumerate(self.names):
            link = Draft(state).link_of(slave)
            if link is not None and link.condition == WHOLE:
                for up in {link.up, ()}:
                    draft = Draft(state)
                    draft.links[link.number] = link._replace(down=(), up=up, condition=BROKEN)
                    self._slave(draft, slave, ("unlinked", False), lambda part: part.unlinked(False))
                    yield f"{name}, with {len(link.up) - len(up)} words lost", draft

    def _killed(self, state: SearchState, slave: int, how: str, act: Callable[[SlavePart], list[Out]]) -> Draft:
        draft = Draft(state)
        link = draft.link_of(slave)
        if link is not None and link.condition == WHOLE:
            draft.links[link.number] = link._replace(down=(), condition=BROKEN)
        elif link is not None:
            del draft.links[link.number]
        self._slave(draft, slave, how, act)
        return draft

    def _do_kill_slave(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for slave, name in enumerate(self.names):
            if not self.slaves[state.slaves[slave]].stopped:
                yield name, self._killed(state, slave, "kill", lambda part: part.kill())

    def _do_lose_version(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        """Lose the newest version: slaves are equal, so only the first one's disk fails."""
        if self.slaves[state.slaves[0]].n_committed < 2:
            return
        draft = self._killed(state, 0, "lose version", lambda part: part.lose_version())
        self._excuse(draft)
        yield self.names[0], draft

    def _do_empty_disk(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        """Empty the disk, also of the first slave only."""
        draft = self._killed(state, 0, "empty disk", lambda part: part.empty_disk())
        self._excuse(draft)
        yield self.names[0], draft

    def _excuse(self, draft: Draft) -> None:
        """Note a lost disk, which breaks no promise of the protocol (I5 is about disks that keep what they wrote)."""
        draft.reference = self.references.number(self.references[draft.reference].disk_lost())

    def _do_kill_cluster(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            draft = Draft(state)
            self._orphan(draft, index, frozenset())
            self._cluster(draft, index, "kill", lambda part: part.kill())
            yield name, draft

    def _do_evict_cluster(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for name in self.bounds.cluster_names:
            if self.masters[state.master].member(name) is not None:
                draft = Draft(state)
                self._master(draft, ("evict", name), methodcaller("evict", name))
                yield name, draft

    def _do_time_out(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for name in sorted({name for name, _ in self.masters[state.master].timers()} & {"round", "ticket"}):
            draft = Draft(state)
            self._master(draft, ("fire", name), methodcaller("fire", name))
            yield name, draft

    def _do_kill_master(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for written in range(len(self.masters[state.master].pending) + 1):
            draft = Draft(state)
            self._restart(draft, written, 0)
            yield f"{written} entries of its journal were written meanwhile", draft

    def _do_old_backup(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            if self.clusters[state.clusters[index]].has_old_backup:
                draft = Draft(state)
                self._cluster(draft, index, "old backup", lambda part: part.old_backup())
                yield name, draft

    def _do_lose_journal(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        draft = Draft(state)
        self._excuse(draft)
        slaves = [self.slaves[number] for number in state.slaves]
        promised, rebuild = max(slave.promised for slave in slaves), any(slave.n_committed for slave in slaves)
        self._begin_restart(draft, ("lose journal", promised, rebuild), methodcaller("lose_journal", promised, rebuild))
        yield "the master comes back with an empty disk", draft

    def _do_second_master(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        """Start a second master; some slaves' streams and all calls of the old master stay with it."""
        if state.old != NO_MASTER:
            return
        for written in range(len(self.masters[state.master].pending) + 1):
            for draft, left in self._with_older(state):
                draft.old, _ = self.masters.step(
                    draft.master, ("overtaken", written), methodcaller("be_overtaken", written)
                )
                self._begins(draft, left, ("restart", written, 0), methodcaller("restart", written, 0))
                yield f"{written} entries of the journal were written before{self._left_by(left)}", draft

    def _do_take_over(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        """A standby becomes the master; as with a second one, but the old one goes on with a journal of its own."""
        if state.old != NO_MASTER:
            return
        for draft, left in self._with_older(state):
            draft.old = draft.master
            draft.reference = self.references.number(self.references[draft.reference].forked())
            self._begins(draft, left, "take over", methodcaller("take_over"))
            yield f"a standby takes over{self._left_by(left)}", draft

    def _with_older(self, state: SearchState) -> Iterator[tuple[Draft, list[int]]]:
        """What is connected stays with the older master, but some slaves."""
        for stay in product((True, False), repeat=len(self.names)):
            draft = Draft(state)
            draft.calls = [call if call.stage == REQUEST else call._replace(at=OLD) for call in draft.calls]
            draft.links = {number: link._replace(at=OLD) for number, link in draft.links.items()}
            yield draft, [slave for slave, stays in enumerate(stay) if not stays]

    def _begins(self, draft: Draft, left: list[int], key: Any, act: Callable[[MasterPart], list[Out]]) -> None:
        self._master(draft, key, act)
        for slave in left:
            self._break(draft, slave)

    def _left_by(self, left: list[int]) -> str:
        return f", the old one is left by {', '.join(self.names[slave] for slave in left)}" if left else ""

    def _break(self, draft: Draft, slave: int) -> None:
        link = draft.link_of(slave)
        if link is not None and link.condition == WHOLE:
            draft.links[link.number] = link._replace(down=(), condition=BROKEN)
            self._slave(draft, slave, ("unlinked", False), lambda part: part.unlinked(False))

    def _do_late_verdict(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            if self.clusters[state.clusters[index]].waits_in_vain:
                draft = Draft(state)
                self._cluster(draft, index, "lose patience", lambda part: part.lose_patience())
                yield f"cluster {name} waits no longer, and trains on", draft

    def _do_late_chunk(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            part = self.clusters[state.clusters[index]]
            for rank, transfer in part.ranks.sends():
                for slave, slave_name in enumerate(self.names):
                    chunks = part.ranks.chunks_on(rank, transfer, slave_name)
                    if chunks:
                        draft = Draft(state)
                        header = self._header(transfer, slave_name, chunks[0])
                        draft.chunks.append((slave, self.messages.number(ChunkOnItsWay(header, transfer.payload))))
                        yield f"a copy of what {self._who(name, rank)} sends to {slave_name}", draft

    def _do_drop_transfer(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            for rank, _ in self.clusters[state.clusters[index]].ranks.sends():
                draft = Draft(state)
                self._cluster(draft, index, ("transfer failed", rank), methodcaller("transfer_failed", rank))
                yield f"{self._who(name, rank)} gives its transfer up half sent", draft

    def _do_kill_rank(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            ranks = self.clusters[state.clusters[index]].ranks
            for rank in ranks.followers:
                if not ranks.dead:
                    draft = Draft(state)
                    self._cluster(draft, index, ("lose rank", rank), methodcaller("lose_rank", rank))
                    yield self._who(name, rank), draft

    def _do_orphan_rank(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for index, name in enumerate(self.bounds.cluster_names):
            ranks = self.clusters[state.clusters[index]].ranks
            for rank in ranks.followers:
                if ranks.left_behind(rank) is not None:
                    draft = Draft(state)
                    self._orphan(draft, index, frozenset())
                    self._cluster(draft, index, ("leave behind", rank), methodcaller("leave_behind", rank))
                    yield f"{self._who(name, rank)} goes on alone", draft

    def _who(self, cluster: str, rank: int) -> str:
        return f"rank {rank} of cluster {cluster}" if self.bounds.ranks > 1 else f"cluster {cluster}"

    def _do_lease_ttl(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for name in self.bounds.cluster_names:
            if self.masters[state.master].lends_to_absent(name):
                draft = Draft(state)
                self._master(draft, ("lease ttl", name), methodcaller("expire_leases", name))
                yield f"what {name} leased", draft

    def _header(self, transfer: OpenTransfer, slave: str, chunk: int) -> DataHeader:
        """The header of a chunk of a push that is being sent."""
        blocks, attempt = blocks_of(transfer.placement, slave), transfer.ticket.attempt
        return put_chunk(
            blocks, self.bounds.chunk_bytes, chunk, transfer.push, attempt, transfer.epoch, transfer.payload
        )

    # ---- operators ----

    def _do_reshard(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        if self.masters[state.master].state.shared.ledger.reshard is None:
            draft = Draft(state)
            request = ReshardRequest(RUN, self.bounds.add, self.bounds.remove)
            self._master(draft, ("operator", request), lambda part: part.operator(request))
            for slave, name in enumerate(self.names):
                if name in self.bounds.add and self.slaves[draft.slaves[slave]].stopped:
                    self._slave(draft, slave, "start", lambda part: part.start())
            yield f"add {', '.join(self.bounds.add) or 'none'}, remove {', '.join(self.bounds.remove) or 'none'}", draft

    def _do_cancel_reshard(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        if self.masters[state.master].state.shared.ledger.reshard is not None:
            draft = Draft(state)
            request = ReshardRequest(RUN, cancel=True)
            self._master(draft, ("operator", request), lambda part: part.operator(request))
            yield "the operator takes the RESHARD back", draft

    # ---- second processes ----

    def _do_second_cluster(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for name in self.bounds.cluster_names:
            before = self.masters[state.master].incarnation(name)
            if before is not None:
                draft = Draft(state)
                plan = self.bounds.plan
                self._master(draft, ("second cluster", name), methodcaller("second_joins", name, plan))
                if self.masters[draft.master].incarnation(name) != before:
                    raise SearchViolation(
                        "names", f"a second process took over cluster {name} from the one that is here"
                    )
                yield f"another process asks to be cluster {name}", draft

    def _do_second_slave(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        for name in self.names:
            before = self.masters[state.master].slave_incarnation(name)
            if before is not None:
                draft = Draft(state)
                self._master(draft, ("second slave", name), methodcaller("second_greets", name))
                if self.masters[draft.master].slave_incarnation(name) != before:
                    raise SearchViolation("names", f"a second process took over slave {name} from the one that is here")
                yield f"another directory comes under the name of {name}", draft

    # ---- calls that may reach the wrong master ----

    def _carry(self, state: SearchState, call: SearchCall, at: int = NEWEST) -> Next:
        """A request reaches a master, or an answer its caller."""
        draft = Draft(state)
        draft.calls.remove(call)
        name, message = self.bounds.cluster_names[call.cluster], self.messages.all[call.message]
        if call.stage == ANSWER:
            self._answer(draft, call, message)
            return (f"cluster {name} receives", brief(message)), draft.done()
        token = draft.free_token(call.cluster)
        epoch = self.masters[state.old if at == OLD else state.master].epoch
        past = self.references[state.reference].is_past(message, epoch)
        draft.calls.append(call._replace(stage=HELD, token=token, past=int(past), at=at))
        self._master(draft, ("call", token, call.message), lambda part: part.call(token, message), at)
        late = "" if call.call_id else " (late)"
        return (f"{WHO[at]} takes {name}'s", brief(message) + late), draft.done()

    def _answer(self, draft: Draft, call: SearchCall, message: Any) -> None:
        key = ("answer", call.call_id, call.message)
        if isinstance(message, Refusal):
            self._cluster(draft, call.cluster, key, lambda part: part.refused(call.call_id, message))
        else:
            self._cluster(draft, call.cluster, key, lambda part: part.answered(call.call_id, message))

    def _is_newer(self, state: SearchState, call: SearchCall) -> bool:
        """Whether the newer of two masters already knows the caller: its calls then go to that master."""
        caller = self.messages.all[call.message].caller
        epoch = max(caller.epoch, caller.incarnation.epoch if caller.incarnation is not None else 0)
        return bool(epoch > self.masters[state.old].epoch)

    def _may_reach_older(self, state: SearchState, call: SearchCall) -> bool:
        """Whether a call may go to the older of two masters. A cluster joins that one again once: it could go to and
        fro between them for ever, each time as a new incarnation."""
        if state.old == NO_MASTER or self._is_newer(state, call):
            return False
        name = self.bounds.cluster_names[call.cluster]
        member = self.masters[state.old].state.shared.members.get(name)
        joins = isinstance(self.messages.all[call.message], JoinRequest)
        return not joins or member is None or member.incarnation.n == 1

    def _do_misroute(self, state: SearchState) -> Iterator[tuple[str, Draft]]:
        if state.old == NO_MASTER:
            return
        for call in state.calls:
            if call.stage == REQUEST and self._is_newer(state, call):
                (_, words), after = self._carry(state, call, OLD)
                yield f"the old master takes {words}", Draft(after)
