"""Handles push tickets: TICKETED -> STAGED -> ADMITTED, one undecided push for each cluster.

From ADMITTED on the round moves it (rounds.py); verdicts.py ends it. A push stays in every slave's staging until it
is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import PushId, RoundId, SlaveId
from dips.core.machine import Phase
from dips.core.messages import (
    Admitted,
    BeginPushReply,
    BeginPushRequest,
    Busy,
    FinishPushReply,
    FinishPushRequest,
    OpenStaging,
    SlaveBeat,
    Staged,
    Ticket,
    Verdict,
    VerdictKind,
)
from dips.core.protocol import FINISH_HOLD_S
from dips.core.wire import Codec
from dips.master.state import bases, pacing
from dips.master.state.callers import check_member
from dips.master.state.push_checks import check, recheck, stale
from dips.master.state.reasons import moving_words, recovery_words, slaves_away
from dips.master.state.records import Member, Push, Slave
from dips.master.state.schedule import Way
from dips.master.state.shared import SharedState
from dips.master.state.tables import PUSH_TABLE, PushPhase, RoundPhase
from dips.master.state.verdicts import Verdicts

AWAY_RETRY_S = 0.25
"""After this time a cluster asks again whose push waits for a slave that is away: so long it may wait after the
slave's return."""


class Pushes:
    """Issues tickets, follows the staging, and admits pushes to the window."""

    def __init__(self, shared: SharedState, verdicts: Verdicts) -> None:
        self._shared = shared
        self._verdicts = verdicts

    # ---- BeginPush ----

    def begin(self, token: int, request: BeginPushRequest) -> None:
        shared = self._shared
        member = check_member(shared, request.caller)
        push_id = PushId(member.cluster, member.incarnation, request.seq)  # type: ignore[arg-type]
        answer = self._known(member, push_id, request.wire) or stale(shared, request)
        if answer is not None:
            shared.reply(token, BeginPushReply(answer))
            return
        if self._must_donate_first(member, request):
            member.last_seq = max(member.last_seq, request.seq)
            reason = "the slaves lost the model: give back this cluster's copy first; nothing of this push is lost"
            shared.reply(token, BeginPushReply(Verdict(push_id, VerdictKind.ABORTED, None, reason)))
            return
        check(shared, member, request)
        if (busy := self._busy(request.donates is not None)) is not None:
            shared.reply(token, BeginPushReply(busy))
            return
        self._end_pull(member)
        push = self._ticket(member, push_id, request)
        shared.reply(token, BeginPushReply(self._ticket_for(push)))

    def _must_donate_first(self, member: Member, request: BeginPushRequest) -> bool:
        """Whether the donor must donate before this push. Waiting with the push would keep it from donating, and there
        may be no other donor."""
        state = self._shared.recovery
        donor = state.donor if state.donating else None
        asked = donor is not None and (donor.cluster, donor.incarnation) == (member.cluster, member.incarnation)
        return asked and request.donates is None

    def _known(self, member: Member, push_id: PushId, wanted_wire: Codec) -> Ticket | Busy | PushId | Verdict | None:
        """The answer when this cluster has an undecided push, or this very push is decided."""
        current = member.push
        if current is not None and current.id == push_id and current.phase.allows("new attempt"):
            # A slave that is away may return with another address: no ticket names it until then.
            return self._busy(current.is_donation) or self._new_attempt(current, wanted_wire)
        if current is not None:
            return current.id
        return self._verdicts.decided(push_id)

    def _busy(self, donation: bool = False) -> Busy | None:
        words = "" if donation else recovery_words(self._shared)
        words = words or slaves_away(self._shared) or moving_words(self._shared)
        return Busy(AWAY_RETRY_S, words) if words else None

    def _end_pull(self, member: Member) -> None:
        """Ends the cluster's pull: a cluster that pushes no longer reads."""
        shared = self._shared
        shared.pins = {pin_id: pin for pin_id, pin in shared.pins.items() if pin.owner != member.cluster}

    def _ticket(self, member: Member, push_id: PushId, request: BeginPushRequest) -> Push:
        shared = self._shared
        phase = Phase(PUSH_TABLE, shared.story, f"push {push_id}")
        phase.since_s = shared.now_s
        push = Push(push_id, request, 1, member.slot, phase, shared.now_s, shared.now_s)
        push.wire = bases.granted(shared, request.wire, request.base)
        member.push, member.wanted_wire = push, request.wire
        member.last_seq = request.seq
        self._record_ticket(push)
        for slave in shared.ready_slaves():
            self.open_staging(push, slave)
        return push

    def _record_ticket(self, push: Push) -> None:
        request = push.request
        self._shared.record(
            "ticket",
            request.caller.cause_id,
            push=str(push.id),
            base=str(request.base),
            fence=request.fence,
            tokens=request.tokens,
            attempt=push.attempt,
            donates=str(request.donates) if request.donates else None,
            wire=push.wire.name,
        )

    def _new_attempt(self, push: Push, wanted_wire: Codec) -> Ticket:
        """A new ticket for what is missing: slaves keep the chunks that they verified, unless the codec changes."""
        shared = self._shared
        self._release(push, Refused(RefusalCode.UNKNOWN_PUSH, f"a new attempt of push {push.id} has begun"))
        push.phase.move("new attempt", PushPhase.TICKETED, shared.now_s, push.request.caller.cause_id)
        push.attempt += 1
        wire = bases.granted(shared, wanted_wire, push.request.base)
        if wire is not push.wire:
            push.landed_bytes.clear()
        push.wire = wire
        self._record_ticket(push)
        push.renewed_s = shared.now_s
        push.digest_of_slave.clear()
        for slave in shared.ready_slaves():
            self.open_staging(push, slave)
        return self._ticket_for(push)

    def _ticket_for(self, push: Push) -> Ticket:
        shared = self._shared
        order = pacing.transfer_order(shared, push.cluster, push.slot, Way.PUSH)
        return Ticket(push.attempt, shared.placement_spec(), order, push.wire)

    def open_staging(self, push: Push, slave: Slave) -> None:
        """Tells a slave to expect the push's chunks; also after the slave's restart."""
        request = push.request
        push.digest_of_slave.pop(slave.id, None)
        opened = OpenStaging(
            push.id, push.attempt, push.slot, request.base, request.fence, request.tokens, request.ranges, push.wire
        )
        self._shared.command(slave, opened, request.caller.cause_id)

    # ---- staging and FinishPush ----

    def staged(self, slave: Slave, body: Staged) -> None:
        push = self._verdicts.find(body.push)
        if push is None or push.attempt != body.attempt or push.phase.now is not PushPhase.TICKETED:
            return  # from an attempt that is over: it must not change the state
        push.digest_of_slave[slave.id] = body.digest
        push.renewed_s = self._shared.now_s
        self._measure_link(push, slave)
        if len(push.digest_of_slave) == self._n_slaves():
            push.phase.move("all slaves staged it", PushPhase.STAGED, self._shared.now_s, push.request.caller.cause_id)
            self._shared.schedule.end(push.cluster)
            if push.finish_token is not None:
                self._admit(push)

    def _measure_link(self, push: Push, slave: Slave) -> None:
        """Measures the link, in first attempts only: a later one sends only what is missing."""
        shared, layout, placement = self._shared, self._shared.ledger.layout, self._shared.ledger.placement
        if push.attempt == 1 and layout is not None and placement is not None:
            part_bytes = shared.link_rates.part_bytes(slave.id, layout, placement, push.wire)
            shared.link_rates.staged(push.cluster, slave.id, part_bytes, shared.now_s - push.began_s, shared.now_s)

    def progress(self, slave: Slave, beat: SlaveBeat) -> None:
        """Extends a ticket as long as bytes arrive; the schedule uses their rate."""
        landed_bytes = 0
        for item in beat.progress:
            push = self._verdicts.find(item.push)
            if push is None or item.attempt != push.attempt:
                continue
            if item.landed_bytes > push.landed_bytes.get(slave.id, 0):
                landed_bytes += item.landed_bytes - push.landed_bytes.get(slave.id, 0)
                push.landed_bytes[slave.id] = item.landed_bytes
                push.renewed_s = self._shared.now_s
        self._shared.schedule.beat(slave.id, landed_bytes, beat.served_bytes, self._shared.now_s)

    def finish(self, token: int, request: FinishPushRequest) -> None:
        shared = self._shared
        member = check_member(shared, request.caller)
        push_id = PushId(member.cluster, member.incarnation, request.seq)  # type: ignore[arg-type]
        push = member.push
        if push is None or push.id != push_id:
            shared.reply(token, FinishPushReply(self._verdicts.verdict_of(push_id)))
        elif push.phase.now in (PushPhase.ADMITTED, PushPhase.SEALED):
            shared.reply(token, FinishPushReply(self._admitted(push)))
        elif push.attempt != request.attempt:
            raise Refused(
                RefusalCode.UNKNOWN_PUSH,
                f"attempt {request.attempt} of push {push_id} is over, attempt {push.attempt} is open",
            )
        else:
            self._release(push, FinishPushReply(Busy(0.2, f"FinishPush of push {push_id} was called again")))
            push.finish_token, push.claimed = token, dict(request.digest_of_slave)
            push.finish_until_s = shared.now_s + FINISH_HOLD_S
            if push.phase.now is PushPhase.STAGED:
                self._admit(push)

    def _admit(self, push: Push) -> None:
        """Admits a push that all slaves hold: compares digests, checks again, and puts it into the window."""
        shared = self._shared
        token, push.finish_token = push.finish_token, None
        assert token is not None, "admitted only by FinishPush"
        if push.is_donation and (sentence := self._wrong_copy(push)):
            shared.reply(token, FinishPushReply(self._verdicts.abort(push, sentence)))
            return
        wrong = sorted(s for s, digest in push.digest_of_slave.items() if push.claimed.get(s) != digest)
        if wrong:
            sentence = f"what slave {wrong[0]} holds of push {push.id} is not what was sent (digests differ)"
            self._verdicts.abort(push, sentence)
            shared.refuse(token, Refused(RefusalCode.DIGEST, f"{sentence}: the push is aborted, push again"))
            return
        if (reason := recheck(shared, push)) is not None:
            verdict = self._verdicts.abort(push, reason)
            shared.reply(token, FinishPushReply(verdict))
            return
        push.phase.move("finish push", PushPhase.ADMITTED, shared.now_s, push.request.caller.cause_id)
        pacing.arrived(shared)
        self._measure_pace(push)
        cause, tokens = push.request.caller.cause_id, push.request.tokens
        shared.record("admitted", cause, push=str(push.id), attempt=push.attempt, tokens=tokens)
        shared.reply(token, FinishPushReply(self._admitted(push)))

    def _wrong_copy(self, push: Push) -> str:
        """A sentence when the donated copy is not, on every slave, what was committed."""
        state = self._shared.recovery
        if state.donor is None or state.donor.cluster != push.cluster:
            return "this cluster is no longer asked for a donation"
        expected = dict(state.donor.commit.digest_of_slave)
        wrong = sorted(s for s, digest in push.digest_of_slave.items() if digest != expected.get(SlaveId(s)))
        if not wrong:
            return ""
        version = state.donor.commit.version
        state.wrong.add((push.cluster, push.id.incarnation, version))
        return f"what cluster {push.cluster} donated to slave {wrong[0]} is not version {version} (digests differ)"

    def _admitted(self, push: Push) -> Admitted:
        """The answer with the round that it is in, or the one that opens next."""
        shared, state = self._shared, self._shared.round
        if state.id is not None and (push.sealed or state.phase.now is RoundPhase.WINDOW):
            return Admitted(state.id, max(0.0, state.window_closes_s - shared.now_s))
        return Admitted(RoundId(shared.epoch, shared.ledger.round_n + 1), pacing.grace_s(shared))

    def _measure_pace(self, push: Push) -> None:
        """Measures tokens a second between two admissions of the same incarnation (used in T_round)."""
        shared = self._shared
        member = shared.members.get(push.cluster)
        if member is None or push.is_seed:
            return
        entry = shared.ledger.entry(push.cluster)
        if member.last_admitted_s is not None and shared.now_s > member.last_admitted_s:
            interval_s = shared.now_s - member.last_admitted_s
            entry.push_interval_s = _smooth(entry.push_interval_s, interval_s)
            entry.tokens_per_s = _smooth(entry.tokens_per_s, push.request.tokens / interval_s)
        member.last_admitted_s = shared.now_s

    # ---- time ----

    def tick(self) -> None:
        shared = self._shared
        for push in list(shared.pushes()):
            if push.finish_token is not None and shared.now_s >= push.finish_until_s:
                self._not_staged(push)
            stale_ticket = shared.now_s - push.renewed_s > shared.config.ticket_ttl_s
            if stale_ticket and push.phase.now in (PushPhase.TICKETED, PushPhase.STAGED):
                self._verdicts.abort(push, f"nothing arrived for {shared.config.ticket_ttl_s:g} s, the ticket ran out")
        self._verdicts.tick()

    def rearm(self, gap_s: float) -> None:
        """Extends all deadlines of tickets and held calls by gap_s, a pause of the master itself."""
        for push in self._shared.pushes():
            push.renewed_s += gap_s
            push.finish_until_s += gap_s
        self._verdicts.rearm(gap_s)

    def deadlines(self) -> Sequence[float]:
        holds = [push.finish_until_s for push in self._shared.pushes() if push.finish_token is not None]
        return [*self._verdicts.deadlines(), *holds]

    def gone(self, token: int) -> None:
        """Forgets a call whose caller hung up."""
        for push in self._shared.pushes():
            if push.finish_token == token:
                push.finish_token = None
        self._verdicts.gone(token)

    def _not_staged(self, push: Push) -> None:
        missing = sorted(s for s in self._slave_ids() if s not in push.digest_of_slave)
        sentence = f"slave {', '.join(missing)} has not all of push {push.id} yet: send what is missing"
        self._release(push, FinishPushReply(Busy(0.2, sentence)))

    def _release(self, push: Push, answer: FinishPushReply | Refused) -> None:
        """Answers a held FinishPush, if there is one."""
        token, push.finish_token = push.finish_token, None
        if token is not None and isinstance(answer, Refused):
            self._shared.refuse(token, answer)
        elif token is not None and isinstance(answer, FinishPushReply):
            self._shared.reply(token, answer)

    def _slave_ids(self) -> Sequence[str]:
        placement = self._shared.ledger.placement
        return placement.slaves if placement else ()

    def _n_slaves(self) -> int:
        return len(self._slave_ids())


def _smooth(old: float, new: float) -> float:
    """Exponential average with weight 0.3 for the new value; the first value is taken as it is."""
    return new if old <= 0 else 0.7 * old + 0.3 * new
