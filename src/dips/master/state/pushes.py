"""Handles pushes: TICKETED -> STAGED -> ADMITTED -> SEALED -> DECIDED, one undecided push for each cluster.

From ADMITTED to its verdict the round moves it (rounds.py). A push stays in every slave's staging until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, PushId, RoundId, SlaveId, Version
from dips.core.machine import Phase
from dips.core.protocol import FINISH_HOLD_S, codec_capability
from dips.core.wire import Codec
from dips.master.state import pacing, tape
from dips.master.state.alarms import check_token_count
from dips.master.state.reasons import Reason, VerdictCode
from dips.master.state.records import PUSH_TABLE, Member, Push, PushPhase, RoundPhase, Slave
from dips.master.state.schedule import Way
from dips.master.state.shared import SharedState
from dips.master.state.status import moving_words, recovery_words, slaves_away, waiting_for

# ---- bases -----------------------------------------------------------------------------------------------------------
#
# Base versions of difference-coded pushes: which cluster may send differences, and which bases stay readable for it.
#
# A slave decodes a difference with the parameters of its base. So a push may be coded in this way as long as every
# slave holds its base. The base is kept until the push is sealed, and also while a cluster that sends differences
# trains on it. Both count against `pinned_versions`, together with the versions that are being pulled. When a base is
# dropped, its cluster only has to send the push in float32 (BASE_GONE); a base that is only trained on is dropped
# first.


def granted(shared: SharedState, wanted_wire: Codec, base: Version | None) -> Codec:
    """The codec for a push on this base: the one that its cluster asks for, or float32."""
    if not wanted_wire.is_difference or base not in shared.kept:
        return Codec.F32
    offered = all(codec_capability(wanted_wire) in slave.capabilities for slave in shared.ready_slaves())
    return wanted_wire if offered else Codec.F32


def in_use(shared: SharedState) -> set[Version]:
    """The readable bases of the open pushes."""
    return _readable(shared, {push.request.base for push in shared.pushes() if push.needs_base})


def trained_on(shared: SharedState) -> set[Version]:
    """The readable bases that clusters train on for their next pushes."""
    return _readable(shared, {member.base for member in shared.live()})


def _readable(shared: SharedState, versions: set[Version | None]) -> set[Version]:
    return {version for version in versions if version is not None and version in shared.kept}


# ---- push checks -----------------------------------------------------------------------------------------------------
#
# Checks a push: at BeginPush, and again at FinishPush and when the window is sealed.
#
# A function here decides nothing and changes nothing: it refuses, answers STALE, or accepts.


MAX_TOKENS = 1 << 50
"""More tokens than any cluster could train on between two pushes; a larger number is a mistake."""

MAX_STEPS = 1 << 32
"""The same limit for steps; sums of them must stay within 64 bits."""

OWN_DATA_SLACK = 2.0
"""A cluster with its own data may count at most its declared rate x the elapsed time x this."""

OWN_DATA_START_S = 60.0
"""Elapsed time granted to a first push, whose clock starts at Join and not at its first step."""


def stale(shared: SharedState, request: messages.BeginPushRequest) -> messages.Stale | None:
    """Whether the base can no longer be pushed against; None for a seed."""
    version, base = shared.ledger.version, request.base
    if base is None or version is None:
        return None
    if base.timeline != version.timeline:
        return messages.Stale(
            messages.StaleKind.TIMELINE, f"base {base} is on another timeline than version {version}: pull"
        )
    fence = shared.ledger.entry(request.caller.name).fence
    if request.fence != fence:
        return messages.Stale(
            messages.StaleKind.FENCE, f"base {base} carries fence {request.fence}, the fence is {fence}: pull"
        )
    if version.v - base.v > shared.s_max():
        return messages.Stale(
            messages.StaleKind.VERSIONS,
            f"base {base} is more than {shared.s_max()} versions behind {version}: pull",
        )
    return None


def check_push(shared: SharedState, member: Member, request: messages.BeginPushRequest) -> None:
    """Refuses a push that can never be accepted."""
    if shared.ledger.stopping and request.donates is None:
        raise Refused(
            RefusalCode.STOPPING, f"no more pushes: {shared.ledger.stopping}; pull the last version and leave"
        )
    if request.seq <= member.last_seq:
        raise Refused(
            RefusalCode.SEQ,
            f"push {request.seq} of cluster {member.cluster!r} comes after push {member.last_seq}: a number is "
            "used once; raise it by one for each push",
        )
    if request.steps > MAX_STEPS:
        raise Refused(RefusalCode.MALFORMED, f"{request.steps} steps in one push: at most {MAX_STEPS} can be counted")
    if request.donates is not None:
        if request.base is not None or request.tokens or request.ranges:
            raise Refused(RefusalCode.MALFORMED, "a donation carries no training: send no base, 0 tokens and no ranges")
        _check_may_donate(shared, member.cluster, request.donates)
    elif request.base is None:
        _check_may_seed(shared, member.cluster)
        if request.tokens or request.ranges:
            raise Refused(RefusalCode.TOKENS, "a seed carries no training: send 0 tokens and no ranges")
    else:
        _check_counts(shared, member, request)


def _check_may_donate(shared: SharedState, cluster: str, version: Version | None) -> None:
    donor = shared.recovery.donor if shared.recovery.donating else None
    if donor is None or (donor.cluster, donor.base) != (cluster, version):
        raise Refused(
            RefusalCode.VERSION_GONE,
            f"cluster {cluster!r} is no longer asked for its copy of version {version}: train on",
        )


def _check_may_seed(shared: SharedState, cluster: str) -> None:
    """Also part of every later check: another seed may be published or asked for during the transfer of this one."""
    if shared.ledger.version is not None:
        raise Refused(
            RefusalCode.SEED_EXISTS,
            f"version {shared.ledger.version} exists, so no cluster may seed: pull it, or start a new run",
        )
    if shared.seeder() != cluster:
        raise Refused(
            RefusalCode.SEED_EXISTS,
            f"cluster {shared.seed_cluster!r} seeds this run: wait for its version and pull",
        )


def _check_counts(shared: SharedState, member: Member, request: messages.BeginPushRequest) -> None:
    version, base, plan = shared.ledger.version, request.base, shared.ledger.data_plan
    assert base is not None, "a seed is checked elsewhere"
    assert plan is not None, "a joined cluster has sent its data plan"
    if version is None or base.v > version.v:
        raise Refused(RefusalCode.MALFORMED, f"base {base} does not exist (newest: {version}): pull first")
    if not 0 < request.tokens <= MAX_TOKENS:
        raise Refused(
            RefusalCode.TOKENS,
            f"{request.tokens} tokens: a push counts the tokens trained since the last one, 1 to {MAX_TOKENS}",
        )
    if plan.mode is messages.DataMode.OWN:
        if request.ranges:
            raise Refused(RefusalCode.RANGES, "this run's clusters bring their own data: send no ranges")
        entry, since_s = shared.ledger.entry(member.cluster), shared.counted_since_s.get(member.cluster)
        if since_s is not None:  # else it was counted last before the master's restart: how long ago is not known
            bound = entry.declared_tokens_per_s * (shared.now_s - since_s) * OWN_DATA_SLACK
            if entry.declared_tokens_per_s > 0 and request.tokens > bound:
                raise Refused(
                    RefusalCode.TOKENS,
                    f"{request.tokens} tokens since the last push are more than twice the declared "
                    f"{entry.declared_tokens_per_s:g} tokens/s allow ({bound:.0f}): correct the count, or declare more",
                )
        check_token_count(shared, member.cluster, request)
    else:
        leases = shared.ledger.leases
        assert leases is not None, "a leased data plan has a lease table"
        leases.check(member.cluster, request.ranges)
        total = sum(item.tokens for item in request.ranges)
        if total != request.tokens:
            raise Refused(
                RefusalCode.TOKENS,
                f"{request.tokens} tokens are counted, but the ranges hold {total}: they must agree",
            )


REFUSED_AS = {RefusalCode.TOKENS: VerdictCode.TOKENS, RefusalCode.RANGES: VerdictCode.RANGES}


def recheck(shared: SharedState, push: Push) -> Reason | None:
    """Repeats the checks of BeginPush against the present state; a reason when one fails."""
    too_old = stale(shared, push.request)
    if too_old is not None:
        return Reason(VerdictCode.STALE, too_old.sentence)
    try:
        if push.is_donation:
            _check_may_donate(shared, push.cluster, push.request.donates)
        elif push.is_seed:
            _check_may_seed(shared, push.cluster)
        elif shared.ledger.leases is not None:
            shared.ledger.leases.check(push.cluster, push.request.ranges)
        else:
            check_token_count(shared, push.cluster, push.request)  # the counts of other clusters may be known by now
    except Refused as refused:
        return Reason(REFUSED_AS.get(refused.code, VerdictCode.OTHER), refused.sentence)
    return None


# ---- pushes ----------------------------------------------------------------------------------------------------------


_INPUTS = {
    messages.VerdictKind.APPLIED: "applied",
    messages.VerdictKind.EXCLUDED: "excluded",
    messages.VerdictKind.ABORTED: "aborted",
    messages.VerdictKind.ROLLED_BACK: "rolled back",
}

AWAY_RETRY_S = 0.25
"""After this time a cluster asks again whose push waits for a slave that is away: so long it may wait after the
slave's return."""


class Pushes:
    """Issues tickets, follows the staging, admits pushes to the window, and gives their verdicts.

    A push has at most one verdict (I6). ABORTED is presumed for a push that the master does not know.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    # ---- BeginPush ----

    def begin(self, token: int, request: messages.BeginPushRequest) -> None:
        shared = self._shared
        member = shared.member_of(request.caller)
        pacing.push_begins(member)
        push_id = PushId(member.cluster, member.incarnation, request.seq)  # type: ignore[arg-type]
        answer = self._known(member, push_id, request.wire) or stale(shared, request)
        if answer is not None:
            shared.reply(token, messages.BeginPushReply(answer))
            return
        if shared.recovery.asks(member) is not None and request.donates is None:
            # Waiting with this push would keep the donor from donating, and there may be no other.
            member.last_seq = max(member.last_seq, request.seq)
            reason = "the slaves lost the model: give back this cluster's copy first; nothing of this push is lost"
            shared.reply(
                token, messages.BeginPushReply(messages.Verdict(push_id, messages.VerdictKind.ABORTED, None, reason))
            )
            return
        check_push(shared, member, request)
        if (busy := self._busy(request.donates is not None)) is not None:
            shared.reply(token, messages.BeginPushReply(busy))
            return
        shared.end_pulls(member.cluster)  # a cluster that pushes no longer reads
        phase = Phase(PUSH_TABLE, shared.story, f"push {push_id}")
        phase.since_s = shared.now_s
        push = Push(push_id, request, 1, member.slot, phase, shared.now_s, shared.now_s)
        push.wire = granted(shared, request.wire, request.base)
        member.push, member.wanted_wire = push, request.wire
        member.last_seq = request.seq
        self._record_ticket(push)
        for slave in shared.ready_slaves():
            self.open_staging(push, slave)
        shared.reply(token, messages.BeginPushReply(self._ticket_for(push)))

    def _known(
        self, member: Member, push_id: PushId, wanted_wire: Codec
    ) -> messages.Ticket | messages.Busy | PushId | messages.Verdict | None:
        """The answer when this cluster has an undecided push, or this very push is decided."""
        current = member.push
        if current is not None and current.id == push_id and current.phase.allows("new attempt"):
            # A slave that is away may return with another address: no ticket names it until then.
            return self._busy(current.is_donation) or self._new_attempt(current, wanted_wire)
        if current is not None:
            return current.id
        return self.decided(push_id)

    def _busy(self, donation: bool = False) -> messages.Busy | None:
        words = "" if donation else recovery_words(self._shared)
        words = words or slaves_away(self._shared) or moving_words(self._shared)
        return messages.Busy(AWAY_RETRY_S, words) if words else None

    def _record_ticket(self, push: Push) -> None:
        request = push.request
        self._shared.record(
            tape.TicketIssued(
                request.caller.cause_id,
                push=push.id,
                base=request.base,
                fence=request.fence,
                tokens=request.tokens,
                attempt=push.attempt,
                donates=str(request.donates) if request.donates else None,
                wire=push.wire.name,
            )
        )

    def _new_attempt(self, push: Push, wanted_wire: Codec) -> messages.Ticket:
        """A new ticket for what is missing: slaves keep the chunks that they verified, unless the codec changes."""
        shared = self._shared
        self._release(push, Refused(RefusalCode.UNKNOWN_PUSH, f"a new attempt of push {push.id} has begun"))
        push.phase.move("new attempt", PushPhase.TICKETED, shared.now_s, push.request.caller.cause_id)
        push.attempt += 1
        wire = granted(shared, wanted_wire, push.request.base)
        if wire is not push.wire:
            push.landed_bytes.clear()
        push.wire = wire
        self._record_ticket(push)
        push.renewed_s = shared.now_s
        push.digest_of_slave.clear()
        for slave in shared.ready_slaves():
            self.open_staging(push, slave)
        return self._ticket_for(push)

    def _ticket_for(self, push: Push) -> messages.Ticket:
        shared = self._shared
        order = pacing.transfer_order(shared, push.cluster, push.slot, Way.PUSH)
        return messages.Ticket(push.attempt, shared.placement_spec(), order, push.wire)

    def open_staging(self, push: Push, slave: Slave) -> None:
        """Tells a slave to expect the push's chunks; also after the slave's restart."""
        request = push.request
        push.digest_of_slave.pop(slave.id, None)
        opened = messages.OpenStaging(
            push.id, push.attempt, push.slot, request.base, request.fence, request.tokens, request.ranges, push.wire
        )
        self._shared.command(slave, opened, request.caller.cause_id)

    # ---- staging and FinishPush ----

    def staged(self, slave: Slave, body: messages.Staged) -> None:
        push = self.find(body.push)
        if push is None or push.attempt != body.attempt or push.phase.now is not PushPhase.TICKETED:
            return  # from an attempt that is over: it must not change the state
        push.digest_of_slave[slave.id] = body.digest
        push.renewed_s = self._shared.now_s
        # Measures the link, in first attempts only: a later one sends only what is missing.
        shared, layout, placement = self._shared, self._shared.ledger.layout, self._shared.ledger.placement
        if push.attempt == 1 and layout is not None and placement is not None:
            part_bytes = shared.link_rates.part_bytes(slave.id, layout, placement, push.wire)
            shared.link_rates.staged(push.cluster, slave.id, part_bytes, shared.now_s - push.began_s, shared.now_s)
        if len(push.digest_of_slave) == len(self._shared.slaves_expected()):
            push.phase.move("all slaves staged it", PushPhase.STAGED, self._shared.now_s, push.request.caller.cause_id)
            self._shared.schedule.end(push.cluster)
            if push.finish_token is not None:
                self._admit(push)

    def progress(self, slave: Slave, beat: messages.SlaveBeat) -> None:
        """Extends a ticket as long as bytes arrive; the schedule uses their rate."""
        landed_bytes = 0
        for item in beat.progress:
            push = self.find(item.push)
            if push is None or item.attempt != push.attempt:
                continue
            if item.landed_bytes > push.landed_bytes.get(slave.id, 0):
                landed_bytes += item.landed_bytes - push.landed_bytes.get(slave.id, 0)
                push.landed_bytes[slave.id] = item.landed_bytes
                push.renewed_s = self._shared.now_s
        self._shared.schedule.beat(slave.id, landed_bytes, beat.served_bytes, self._shared.now_s)

    def finish(self, token: int, request: messages.FinishPushRequest) -> None:
        shared = self._shared
        member = shared.member_of(request.caller)
        push_id = PushId(member.cluster, member.incarnation, request.seq)  # type: ignore[arg-type]
        push = member.push
        if push is None or push.id != push_id:
            shared.reply(token, messages.FinishPushReply(self.verdict_of(push_id)))
        elif push.phase.now in (PushPhase.ADMITTED, PushPhase.SEALED):
            shared.reply(token, messages.FinishPushReply(self._admitted(push)))
        elif push.attempt != request.attempt:
            raise Refused(
                RefusalCode.UNKNOWN_PUSH,
                f"attempt {request.attempt} of push {push_id} is over, attempt {push.attempt} is open",
            )
        else:
            self._release(
                push, messages.FinishPushReply(messages.Busy(0.2, f"FinishPush of push {push_id} was called again"))
            )
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
            verdict = self.abort(push, Reason(VerdictCode.OTHER, sentence))
            shared.reply(token, messages.FinishPushReply(verdict))
            return
        wrong = sorted(s for s, digest in push.digest_of_slave.items() if push.claimed.get(s) != digest)
        if wrong:
            sentence = f"what slave {wrong[0]} holds of push {push.id} is not what was sent (digests differ)"
            self.abort(push, Reason(VerdictCode.DIGEST, sentence))
            shared.refuse(token, Refused(RefusalCode.DIGEST, f"{sentence}: the push is aborted, push again"))
            return
        if (reason := recheck(shared, push)) is not None:
            verdict = self.abort(push, reason)
            shared.reply(token, messages.FinishPushReply(verdict))
            return
        push.phase.move("finish push", PushPhase.ADMITTED, shared.now_s, push.request.caller.cause_id)
        pacing.arrived(shared)
        self._measure_pace(push)
        cause, tokens = push.request.caller.cause_id, push.request.tokens
        shared.record(tape.PushAdmitted(cause, push=push.id, attempt=push.attempt, tokens=tokens))
        shared.reply(token, messages.FinishPushReply(self._admitted(push)))

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

    def _admitted(self, push: Push) -> messages.Admitted:
        """The answer with the round that it is in, or the one that opens next."""
        shared, state = self._shared, self._shared.round
        if state.id is not None and (push.sealed or state.phase.now is RoundPhase.WINDOW):
            return messages.Admitted(state.id, pacing.window_left_s(shared))
        left_s = max(pacing.grace_s(shared), shared.config.round_deadline_s or 0.0)
        return messages.Admitted(RoundId(shared.epoch, shared.ledger.round_n + 1), left_s)

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

    # ---- verdicts ----

    def await_verdict(self, token: int, request: messages.AwaitVerdictRequest) -> None:
        shared = self._shared
        shared.member_of(request.caller)
        if request.push.cluster != request.caller.name:
            raise Refused(RefusalCode.UNKNOWN_PUSH, f"push {request.push} is not of cluster {request.caller.name!r}")
        push = self.find(request.push)
        if push is None:
            shared.reply(token, messages.AwaitVerdictReply(self.verdict_of(request.push)))
            return
        wait_s = request.wait_s if request.wait_s > 0 else 0.0  # also for NaN, which no comparison could end
        until_s = shared.now_s + min(wait_s, shared.config.settings.round_timeout_s)
        shared.waiters.setdefault(push.id, []).append((token, until_s))

    def decide(self, push: Push, verdict: messages.Verdict) -> messages.Verdict:
        """Decides the push and sends the verdict to waiting callers and to the slaves, whose staging is then free."""
        shared = self._shared
        kind, reason = verdict.kind, verdict.reason
        name = _INPUTS[kind]
        push.phase.move(name, PushPhase.DECIDED, shared.now_s, push.request.caller.cause_id, reason)
        self._remember(push, verdict)
        member = shared.members.get(push.cluster)
        if member is not None and member.push is push:
            member.push = None
            if kind in (messages.VerdictKind.APPLIED, messages.VerdictKind.EXCLUDED):
                pacing.push_counted(shared, member, push)
        if kind is messages.VerdictKind.ABORTED:
            # Leaves the ranges of an aborted push with its cluster, unless a new incarnation does not hold them.
            shared.aborted_of[push.cluster] = shared.aborted_of.get(push.cluster, 0) + 1
            if shared.ledger.leases is not None and member is not None and member.incarnation != push.id.incarnation:
                shared.ledger.leases.free(push.cluster, push.request.ranges, member.held_at_join)
        elif not push.is_seed:
            shared.counted_since_s[push.cluster] = push.began_s
        shared.record(
            tape.PushDecided(
                push.request.caller.cause_id,
                push=push.id,
                verdict=kind.name,
                version=verdict.version,
                round=verdict.round,
                code=push.code,
                reason=reason,
            )
        )
        shared.command_all(messages.CloseStaging(push.id), push.request.caller.cause_id)
        self._tell(push, verdict)
        return verdict

    def _remember(self, push: Push, verdict: messages.Verdict) -> None:
        """Stores the verdict. That of a donation does not replace the verdict of the cluster's last push."""
        shared = self._shared
        entry = shared.ledger.entry(push.cluster)
        if not push.is_donation:
            entry.last_verdict = verdict
            return
        entry.last_donation = verdict
        if verdict.kind is messages.VerdictKind.ABORTED:
            shared.recovery.tried.add((push.cluster, push.id.incarnation))

    def abort(self, push: Push, reason: Reason) -> messages.Verdict:
        """Decides ABORTED, which is presumed for whatever is not committed, so no journal entry is needed."""
        push.code = reason.code
        return self.decide(push, messages.Verdict(push.id, messages.VerdictKind.ABORTED, None, reason.sentence))

    def _tell(self, push: Push, verdict: messages.Verdict) -> None:
        shared = self._shared
        for token, _ in shared.waiters.pop(push.id, ()):
            shared.reply(token, messages.AwaitVerdictReply(verdict))
        if push.finish_token is not None:
            shared.reply(push.finish_token, messages.FinishPushReply(verdict))
            push.finish_token = None
        member = shared.members.get(push.cluster)
        if member is not None and member.leave_token is not None:
            shared.leave_ready.append(member.cluster)

    def decided(self, push_id: PushId) -> messages.Verdict | None:
        """The verdict of this push, if it is the cluster's last push or last donation."""
        entry = self._shared.ledger.entry(push_id.cluster)
        known = [v for v in (entry.last_verdict, entry.last_donation) if v is not None and v.push == push_id]
        return known[0] if known else None

    def verdict_of(self, push_id: PushId) -> messages.Verdict:
        """The verdict of a push that is not open: the last one's, or ABORTED, which is presumed for an unknown push.

        Raises Refused(UNKNOWN_PUSH) for a push before the last one: its verdict was sent and is not kept. A push that
        is called ABORTED here can no longer begin.
        """
        if (known := self.decided(push_id)) is not None:
            return known
        last = self._shared.ledger.entry(push_id.cluster).last_verdict
        if last is not None and _order(push_id) < _order(last.push):
            raise Refused(
                RefusalCode.UNKNOWN_PUSH,
                f"push {push_id} comes before push {last.push}, the last one decided: its verdict was sent before",
            )
        member = self._shared.members.get(push_id.cluster)
        if member is not None and member.incarnation == push_id.incarnation:
            member.last_seq = max(member.last_seq, push_id.seq)
        return messages.Verdict(
            push_id, messages.VerdictKind.ABORTED, None, "the master knows no such push: it was given up", False, None
        )

    def find(self, push_id: PushId) -> Push | None:
        sealed = next((push for push in self._shared.round.participants if push.id == push_id), None)
        return sealed or next((push for push in self._shared.pushes() if push.id == push_id), None)

    # ---- time ----

    def tick(self) -> None:
        shared = self._shared
        for push in list(shared.pushes()):
            if push.finish_token is not None and shared.now_s >= push.finish_until_s:
                self._not_staged(push)
            stale_ticket = shared.now_s - push.renewed_s > shared.config.settings.ticket_ttl_s
            if stale_ticket and push.phase.now in (PushPhase.TICKETED, PushPhase.STAGED):
                sentence = f"nothing arrived for {shared.config.settings.ticket_ttl_s:g} s, the ticket ran out"
                self.abort(push, Reason(VerdictCode.TICKET, sentence))
        for push_id, waiting in list(shared.waiters.items()):
            keep = [item for item in waiting if item[1] > shared.now_s]
            for token, until_s in waiting:
                if until_s <= shared.now_s:
                    shared.reply(
                        token,
                        messages.AwaitVerdictReply(
                            messages.Busy(0.0, waiting_for(shared).sentence or "the round goes on")
                        ),
                    )
            if keep:
                shared.waiters[push_id] = keep
            else:
                shared.waiters.pop(push_id, None)

    def rearm(self, gap_s: float) -> None:
        """Extends all deadlines of tickets and held calls by gap_s, a pause of the master itself."""
        for push in self._shared.pushes():
            push.renewed_s += gap_s
            push.finish_until_s += gap_s
        waiters = self._shared.waiters
        for push_id, waiting in waiters.items():
            waiters[push_id] = [(token, until_s + gap_s) for token, until_s in waiting]

    def deadlines(self) -> Sequence[float]:
        holds = [push.finish_until_s for push in self._shared.pushes() if push.finish_token is not None]
        waits = [until_s for waiting in self._shared.waiters.values() for _, until_s in waiting]
        return [*waits, *holds]

    def gone(self, token: int) -> None:
        """Forgets a call whose caller hung up."""
        for push in self._shared.pushes():
            if push.finish_token == token:
                push.finish_token = None
        for push_id, waiting in list(self._shared.waiters.items()):
            self._shared.waiters[push_id] = [item for item in waiting if item[0] != token]

    def _not_staged(self, push: Push) -> None:
        missing = sorted(s for s in self._shared.slaves_expected() if s not in push.digest_of_slave)
        sentence = f"slave {', '.join(missing)} has not all of push {push.id} yet: send what is missing"
        self._release(push, messages.FinishPushReply(messages.Busy(0.2, sentence)))

    def _release(self, push: Push, answer: messages.FinishPushReply | Refused) -> None:
        """Answers a held FinishPush, if there is one."""
        token, push.finish_token = push.finish_token, None
        if token is not None and isinstance(answer, Refused):
            self._shared.refuse(token, answer)
        elif token is not None and isinstance(answer, messages.FinishPushReply):
            self._shared.reply(token, answer)


def _smooth(old: float, new: float) -> float:
    """Exponential average with weight 0.3 for the new value; the first value is taken as it is."""
    return new if old <= 0 else 0.7 * old + 0.3 * new


def _order(push_id: PushId) -> tuple[Incarnation, int]:
    """The pushes of one cluster, in the order of time."""
    return push_id.incarnation, push_id.seq
