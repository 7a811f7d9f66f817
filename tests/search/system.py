"""The transition system of a search: every action that is possible in a state, and the state that it leads to.

Actions that touch one machine only and commute with all others are taken first and alone (SILENT); faults may come
before any of them. It must never decide what a machine does: it carries messages, and injects faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from typing import Any

from dips.core.errors import RefusalCode
from dips.core.ids import RoundId
from dips.core.messages import (
    AbortRound,
    CloseStaging,
    FinishPullRequest,
    HeartbeatRequest,
    ListShard,
    Measure,
    OpenStaging,
    PullGrant,
    Retain,
    SlaveCommand,
    StopSlave,
    Welcome,
)
from search.bounds import FAULTS
from search.cluster_part import ClusterPart
from search.copying import Out
from search.faults import WHO, Faults, Next
from search.master_part import FREE_TIMERS, MasterPart
from search.ranks_part import OpenTransfer, Pull, Ranks
from search.reference_model import ReferenceModel
from search.slave_part import PieceNames, SlavePart, blocks_of, digest_of
from search.state import (
    ANSWER,
    BROKEN,
    CLOSING,
    NEWEST,
    NO_MASTER,
    OLD,
    REQUEST,
    WHOLE,
    Draft,
    SearchState,
    SlaveStream,
)
from search.wiring import brief

SILENT = (OpenStaging, CloseStaging, Retain, Measure, ListShard, AbortRound, Welcome, StopSlave)
"""Commands that a slave may take as soon as they are its oldest: their effects show only in its messages."""

WAKES = "asks again: cluster"


class System(Faults):
    """Every action that may come next, and the checks of a state."""

    # ---- the first state ----

    def initial(self) -> SearchState:
        bounds = self.bounds
        spent = [dict(bounds.faults).get(name, 0) for name in FAULTS]
        state = SearchState(
            self.masters.enter(MasterPart(bounds)),
            tuple(
                self.slaves.enter(SlavePart(name, bounds.chunk_bytes, started=name not in bounds.add))
                for name in bounds.slave_names
            ),
            tuple(self.clusters.enter(ClusterPart(name, bounds)) for name in bounds.cluster_names),
            (),
            (),
            (),
            (),
            (*spent, bounds.total_faults),
            self.references.number(ReferenceModel()),
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

    def _run_quietly(self, state: SearchState) -> SearchState:
        """Run one path without faults until all processes have the seed."""
        for _ in range(2000):
            found = next(self._ordinary(state), None)
            if found is None:
                return state
            label, state = found
            self.beginning.append(label)
        raise RuntimeError("the search's beginning does not come to rest: the protocol is broken without any fault")

    # ---- next actions ----

    def successors(self, state: SearchState) -> list[Next]:
        """Every next state with the action that leads there. Raises Violation."""
        return list(self.steps(state))

    def steps(self, state: SearchState) -> Iterator[Next]:
        """The same, one after another: facts that on_fact gets in between belong to the next one."""
        if not self.references[state.reference].halted:
            yield from self._ordinary(state)
            yield from self._faults(state)

    def _ordinary(self, state: SearchState) -> Iterator[Next]:
        if silent := next(self._silent(state), None):
            yield from silent
            return
        only_wakes = True
        for action in self._visible(state):
            only_wakes = only_wakes and action[0][0] == WAKES
            yield action
        yield from self._whenever(state)
        if only_wakes:
            yield from self._time_passes(state)

    def is_settled(self, state: SearchState) -> bool:
        """Whether nothing is left to do."""
        if self.references[state.reference].halted:
            return True
        clusters = all(self.clusters[number].settled for number in state.clusters)
        return clusters and (self.masters[state.master].settled)

    def _silent(self, state: SearchState) -> Iterator[list[Next]]:
        """Actions of one machine that may come at once, because they commute with all others; several if it has a
        choice."""
        for link in state.links:
            if link.condition == WHOLE and link.down and self._is_silent(link.down[0]):
                yield [self._hear(state, link)]
            elif link.condition == CLOSING:
                yield [self._hear_of_the_end(state, link)]
        for index, number in enumerate(state.slaves):
            if self.slaves[number].link is None and not self.slaves[number].stopped:
                yield [self._dial(state, index, at) for at in self._masters_of(state)]
        for index, number in enumerate(state.clusters):
            ranks = self.clusters[number].ranks
            for rank, transfer in ranks.sends():
                for slave in range(len(state.slaves)):
                    if self._can_land(state, ranks, rank, transfer, slave):
                        yield [self._land(state, index, rank, transfer, slave)]
        for call in state.calls:
            message = self.messages.all[call.message]
            answered = call.stage == ANSWER and not self.bounds.late_answers
            if answered or isinstance(message, FinishPullRequest):
                yield [self._carry(state, call)]

    def _masters_of(self, state: SearchState) -> tuple[int, ...]:
        """The masters that answer at the master's address."""
        return (NEWEST,) if state.old == NO_MASTER else (NEWEST, OLD)

    def _is_silent(self, message: int) -> bool:
        command = self.messages.all[message]
        return isinstance(command.body, SILENT)

    def _visible(self, state: SearchState) -> Iterator[Next]:
        for call in state.calls:
            if call.stage == REQUEST:
                yield self._carry(state, call)
                if self._may_reach_older(state, call):
                    yield self._carry(state, call, OLD)
            elif call.stage == ANSWER:
                yield self._carry(state, call)
        for link in state.links:
            if link.condition != CLOSING and link.up:
                yield self._speak(state, link)
            elif link.condition == BROKEN:
                yield self._notice(state, link)
            if link.condition == WHOLE and link.down:
                yield self._hear(state, link)
        for slave, number in enumerate(state.slaves):
            if self.slaves[number].move is not None:
                yield self._move(state, slave)
        for index, number in enumerate(state.clusters):
            part = self.clusters[number]
            for rank, pull in part.ranks.fetches():
                yield (
                    self._pull(state, index, pull)
                    if self.bounds.ranks == 1
                    else self._pull_part(state, index, rank, pull)
                )
            if part.sleeps:
                yield self._wake(state, index)
            yield from self._ranks_meet(state, index)
        for at in self._masters_of(state):
            master = self.masters[state.old if at == OLD else state.master]
            if master.pending:
                yield self._write(state, at)
            for name, _ in master.timers():
                if name not in FREE_TIMERS:
                    yield self._fire(state, name, at)

    def _whenever(self, state: SearchState) -> Iterator[Next]:
        """Actions that may come now or much later: no process waits for them, so time may pass before them."""
        for link_number, message in state.strays:
            yield self._stray(state, link_number, message)
        for slave, message in state.chunks:
            yield self._late_chunk(state, slave, message)
        if state.old != NO_MASTER:
            yield self._old_ends(state)
        for index, number in enumerate(state.clusters):
            orphan = self.clusters[number].orphan
            if orphan is not None:
                yield from self._orphan_goes_on(state, index, *orphan)

    def _time_passes(self, state: SearchState) -> Iterator[Next]:
        """Nothing else can happen: let the time-outs elapse."""
        for name in sorted({name for name, _ in self.masters[state.master].timers()}):
            yield self._fire(state, name)
        sends_beat = False
        for index, number in enumerate(state.clusters):
            ranks = self.clusters[number].ranks
            for rank, transfer in ranks.sends():
                if self._cannot_land(state, ranks, rank, transfer):
                    yield self._give_up_transfer(state, index, rank)
            if not self.clusters[number].left and self._beat_would_tell(state, index):
                sends_beat = True
                yield self._beat(state, index)
        for index, number in enumerate(state.slaves):
            if self.slaves[number].stopped and self.masters[state.master].recovers:
                yield self._start_again(state, index)
        for index, number in enumerate(state.clusters):
            if self.clusters[number].may_step_on and not sends_beat:  # beats come more often than pushes
                yield self._step_on(state, index)

    # ---- messages ----

    def _hear(self, state: SearchState, link: SlaveStream) -> Next:
        draft = Draft(state)
        draft.links[link.number] = link._replace(down=link.down[1:])
        command = self.messages.all[link.down[0]]
        self._slave(draft, link.slave, ("hear", link.down[0]), lambda part: part.hear(command))
        return (f"slave {self.names[link.slave]} obeys", brief(command.body)), draft.done()

    def _hear_of_the_end(self, state: SearchState, link: SlaveStream) -> Next:
        """The slave notices that the master closed the stream; commands on their way are lost with it."""
        draft = Draft(state)
        refusal = self.messages.all[link.down[-1]]
        del draft.links[link.number]
        fenced = refusal.code is RefusalCode.FENCED
        if refusal.code is RefusalCode.UNKNOWN_NAME:
            self._slave(draft, link.slave, "not wanted", lambda part: part.is_not_wanted())
        self._slave(draft, link.slave, ("unlinked", fenced), lambda part: part.unlinked(fenced))
        return (f"slave {self.names[link.slave]} learns that its stream ended", refusal.code.name), draft.done()

    def _speak(self, state: SearchState, link: SlaveStream) -> Next:
        draft = Draft(state)
        draft.links[link.number] = link._replace(up=link.up[1:])
        message = self.messages.all[link.up[0]]
        self._master(draft, ("said", link.number, link.up[0]), lambda part: part.said(link.number, message), link.at)
        return (f"{WHO[link.at]} receives from slave {self.names[link.slave]}", brief(message.body)), draft.done()

    def _stray(self, state: SearchState, link: int, number: int) -> Next:
        draft = Draft(state)
        draft.strays.remove((link, number))
        message = self.messages.all[number]
        at = draft.links[link].at if link in draft.links else NEWEST
        self._master(draft, ("said", link, number), lambda part: part.said(link, message), at)
        return (f"{WHO[at]} receives from slave {message.caller.name} once more", brief(message.body)), draft.done()

    def _notice(self, state: SearchState, link: SlaveStream) -> Next:
        draft = Draft(state)
        del draft.links[link.number]
        self._master(draft, ("link down", link.number), lambda part: part.link_down(link.number), link.at)
        return (f"{WHO[link.at]} notices that a stream broke:", self.names[link.slave]), draft.done()

    def _dial(self, state: SearchState, slave: int, at: int) -> Next:
        draft = Draft(state)
        number = draft.free_link(slave)
        draft.links[number] = SlaveStream(number, slave, (), (), WHOLE, at)
        self._slave(draft, slave, ("dial", number), lambda part: part.dial(number))
        return (f"dials {WHO[at]}: slave", self.names[slave]), draft.done()

    def _old_ends(self, state: SearchState) -> Next:
        draft = Draft(state)
        self._end_old(draft)
        return ("is stopped by an operator:", WHO[OLD]), draft.done()

    # ---- data ----

    def _can_land(self, state: SearchState, ranks: Ranks, rank: int, transfer: OpenTransfer, slave: int) -> bool:
        part = self.slaves[state.slaves[slave]]
        ready = part.knows(transfer.push, transfer.ticket.attempt) and transfer.epoch >= part.served
        return ready and bool(ranks.lacks(rank, transfer, part.name))

    def _cannot_land(self, state: SearchState, ranks: Ranks, rank: int, transfer: OpenTransfer) -> bool:
        """Whether a slave has no slot for the push, and no command to open one is on its way."""
        coming = {
            link.slave
            for link in state.links
            for message in link.down
            if _opens(self.messages.all[message], transfer.push, transfer.ticket.attempt)
        }
        lacking = [i for i, name in enumerate(self.names) if ranks.lacks(rank, transfer, name)]
        cannot = all(not self._can_land(state, ranks, rank, transfer, i) for i in lacking)
        return cannot and any(i not in coming for i in lacking)

    def _land(self, state: SearchState, cluster: int, rank: int, transfer: OpenTransfer, slave: int) -> Next:
        """The next chunk arrives, or all of a rank's where transfers are whole."""
        draft = Draft(state)
        ranks, name = self.clusters[state.clusters[cluster]].ranks, self.names[slave]
        lacking = ranks.lacks(rank, transfer, name)
        chunks = lacking[:1] if self.bounds.chunks > 1 else lacking
        self._put(draft, transfer, slave, chunks)
        self._cluster(draft, cluster, ("landed", rank, name, chunks), methodcaller("landed", rank, name, chunks))
        of_rank = f"rank {rank}'s part of " if self.bounds.ranks > 1 else ""
        n_chunks = len(ranks.chunks_on(rank, transfer, name))
        first = n_chunks - len(lacking) + 1
        which = f"chunk {first} of {n_chunks} of" if self.bounds.chunks > 1 else "all of"
        return (f"{which} {of_rank}push {transfer.push} lands on", name), draft.done()

    def _put(self, draft: Draft, transfer: OpenTransfer, slave: int, chunks: tuple[int, ...]) -> None:
        headers = [self._header(transfer, self.names[slave], chunk) for chunk in chunks]
        key = ("put", str(transfer.push), transfer.ticket.attempt, transfer.epoch, chunks, transfer.payload)
        self._slave(draft, slave, key, lambda part: part.put(headers, transfer.payload))

    def _late_chunk(self, state: SearchState, slave: int, number: int) -> Next:
        draft = Draft(state)
        draft.chunks.remove((slave, number))
        chunk = self.messages.all[number]
        self._slave(draft, slave, ("late chunk", number), lambda part: part.put([chunk.header], chunk.content))
        return (f"a late chunk of push {chunk.header.push} arrives at", self.names[slave]), draft.done()

    def _give_up_transfer(self, state: SearchState, cluster: int, rank: int) -> Next:
        draft = Draft(state)
        self._cluster(draft, cluster, ("transfer failed", rank), methodcaller("transfer_failed", rank))
        return ("cannot send its push:", self._who(self.bounds.cluster_names[cluster], rank)), draft.done()

    def _move(self, state: SearchState, slave: int) -> Next:
        """All blocks that a slave needs from others arrive, or one of them is not available."""
        draft = Draft(state)
        part = self.slaves[state.slaves[slave]]
        assert part.move is not None
        move = part.move[1]
        wanted = set(blocks_of(move.placement, part.name))
        sources = [i for i, name in enumerate(self.names) if wanted & set(blocks_of(move.sources, name))]
        held = [self.slaves[state.slaves[i]].readable(move.from_version) for i in sources]
        contents = {found[1] if found else None for found in held}
        content = contents.pop() if len(contents) == 1 else None
        self._slave(draft, slave, ("moved", content), lambda s: s.moved(content))
        return (f"slave {part.name} moves its blocks of", str(move.to_version) if content else "in vain"), draft.done()

    def _pull(self, state: SearchState, cluster: int, pull: Pull) -> Next:
        """The next slave's share of a version arrives, or all of it where transfers are whole."""
        draft = Draft(state)
        name, holders = self.bounds.cluster_names[cluster], self._holders(pull.grant)
        n_slaves = len(holders)
        whole = self.bounds.chunks == 1
        wanted = range(n_slaves) if whole else range(len(pull.read), len(pull.read) + 1)
        found = [self._share(state, holders[i], pull.grant) for i in wanted]
        if None in found:
            self._cluster(draft, cluster, "pull failed", lambda part: part.pull_failed())
            return (f"cluster {name} pulls", "in vain"), draft.done()
        read = (*pull.read, *(held for held in found if held is not None))
        if len(read) == n_slaves:
            version = str(pull.grant.version)
            fact = ("fact", "_content", version, {"by": name, "version": version, "read": list(read)})
            self._facts(draft, "cluster", name, (fact,))
        for held in read[len(pull.read) :]:
            self._cluster(draft, cluster, ("read", held), methodcaller("read", held, n_slaves))
        words = f"{pull.grant.version}" if whole else f"{pull.grant.version} from {self.names[holders[wanted[0]]]}"
        return (f"cluster {name} pulls", words), draft.done()

    def _pull_part(self, state: SearchState, cluster: int, rank: int, pull: Pull) -> Next:
        """All that a rank owns of a version arrives, or a slave no longer has it. Whether it is what was promised is
        seen only when all ranks have theirs.
        """
        draft = Draft(state)
        name = self.bounds.cluster_names[cluster]
        found = [(i, self.slaves[state.slaves[i]].readable(pull.grant.version)) for i in self._holders(pull.grant)]
        read = tuple((self.names[i], *held) for i, held in found if held is not None)
        taken = read if len(read) == len(found) else None
        self._cluster(draft, cluster, ("read part", rank, taken), methodcaller("read_part", rank, taken))
        words = f"{pull.grant.version}" if taken is not None else "in vain"
        return (f"{self._who(name, rank)} pulls its part of", words), draft.done()

    # ---- several ranks ----

    def _ranks_meet(self, state: SearchState, cluster: int) -> Iterator[Next]:
        """A follower hears what is ordered, or the leader how a part has ended, or that a rank is gone."""
        name, ranks = self.bounds.cluster_names[cluster], self.clusters[state.clusters[cluster]].ranks
        for rank in ranks.followers:
            if ranks.orders[rank]:
                draft = Draft(state)
                self._cluster(draft, cluster, ("hear", rank), methodcaller("hear", rank))
                order = ranks.orders[rank][0]
                yield (
                    (f"{self._who(name, rank)} hears:", "give up" if order is None else f"job {order.id}"),
                    draft.done(),
                )
        if ranks.said:
            draft = Draft(state)
            self._cluster(draft, cluster, "hear end", methodcaller("hear_end"))
            yield (f"cluster {name} hears of the end of a part:", f"rank {ranks.said[0].rank}"), draft.done()
        if ranks.dead:
            draft = Draft(state)
            self._orphan(draft, cluster, frozenset())
            self._cluster(draft, cluster, "kill", methodcaller("kill"))
            yield ("ends with a rank that is gone, and is started again: cluster", name), draft.done()

    def _orphan_goes_on(self, state: SearchState, cluster: int, rank: int, transfer: OpenTransfer) -> Iterator[Next]:
        """A rank of a cluster that was killed sends the rest of its part, or notices that it is alone."""
        name, ranks = self.bounds.cluster_names[cluster], self.clusters[state.clusters[cluster]].ranks
        for slave, slave_name in enumerate(self.names):
            chunks = ranks.lacks(rank, transfer, slave_name)
            if chunks:
                draft = Draft(state)
                self._put(draft, transfer, slave, chunks)
                self._cluster(
                    draft, cluster, ("orphan sent", slave_name), methodcaller("orphan_sent", slave_name, chunks)
                )
                yield (f"a rank of an earlier life of {name} sends push {transfer.push} to", slave_name), draft.done()
        draft = Draft(state)
        self._cluster(draft, cluster, "orphan ends", methodcaller("orphan_ends"))
        yield ("notices that it is alone: a rank of an earlier life of cluster", name), draft.done()

    def _holders(self, grant: PullGrant) -> list[int]:
        """The slaves that together hold the version."""
        named = dict(grant.digest_of_slave)
        return [slave for slave, name in enumerate(self.names) if name in named]

    def _share(self, state: SearchState, slave: int, grant: PullGrant) -> tuple[RoundId, PieceNames] | None:
        """One slave's share of the version; None if it is not there, or not what was promised."""
        part = self.slaves[state.slaves[slave]]
        held = part.readable(grant.version)
        promised = dict(grant.digest_of_slave)[part.name]
        if held is None or digest_of(part.blocks, part.chunk_bytes, held[1]) != promised:
            return None
        return held

    # ---- time ----

    def _write(self, state: SearchState, at: int) -> Next:
        draft = Draft(state)
        kind = self.masters[state.old if at == OLD else state.master].pending[0].kind
        self._master(draft, "write", lambda part: part.write(), at)
        return (f"the disk takes for {WHO[at]}", kind), draft.done()

    def _fire(self, state: SearchState, timer: str, at: int = NEWEST) -> Next:
        draft = Draft(state)
        self._master(draft, ("fire", timer), lambda part: part.fire(timer), at)
        return (f"time passes at {WHO[at]}:", timer), draft.done()

    def _wake(self, state: SearchState, cluster: int) -> Next:
        draft = Draft(state)
        self._cluster(draft, cluster, "wake", lambda part: part.wake())
        return (WAKES, self.bounds.cluster_names[cluster]), draft.done()

    def _step_on(self, state: SearchState, cluster: int) -> Next:
        draft = Draft(state)
        self._cluster(draft, cluster, "step on", lambda part: part.step_on())
        return ("trains on: cluster", self.bounds.cluster_names[cluster]), draft.done()

    def _start_again(self, state: SearchState, slave: int) -> Next:
        """The operator starts removed slaves again that the master still waits for."""
        draft = Draft(state)
        self._slave(draft, slave, "start", lambda part: part.start())
        return ("is started again on its old directory: slave", self.names[slave]), draft.done()

    def _beat_reply(self, state: SearchState, cluster: int) -> tuple[int, tuple[Out, ...]] | None:
        core = self.clusters[state.clusters[cluster]].session.shared
        if core.terms.incarnation is None:
            return None
        request = HeartbeatRequest(core.terms.caller("beat"), base=core.base)
        number = self.messages.number(request)
        return self.masters.step(state.master, ("beat", number), lambda part: part.call(1, request))

    def _beat_would_tell(self, state: SearchState, cluster: int) -> bool:
        return self._beaten(state, cluster) != state

    def _beat(self, state: SearchState, cluster: int) -> Next:
        return ("beats: cluster", self.bounds.cluster_names[cluster]), self._beaten(state, cluster)

    def _beaten(self, state: SearchState, cluster: int) -> SearchState:
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

    def check(self, state: SearchState) -> None:
        """Check the invariants of every state. Raises Violation."""
        self.references[state.reference].check([self.slaves[number] for number in state.slaves], self.bounds)


def _opens(command: Any, push: Any, attempt: int) -> bool:
    body = command.body if isinstance(command, SlaveCommand) else None
    return isinstance(body, OpenStaging) and body.push == push and body.attempt == attempt
