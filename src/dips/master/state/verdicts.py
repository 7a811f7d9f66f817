"""Decides pushes, sends the verdicts to waiting callers and slaves, and remembers them (I6)."""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Incarnation, PushId
from dips.core.messages import (
    AwaitVerdictReply,
    AwaitVerdictRequest,
    Busy,
    CloseStaging,
    FinishPushReply,
    Verdict,
    VerdictKind,
)
from dips.master.state.callers import check_member
from dips.master.state.reasons import Reason
from dips.master.state.records import Member, Push, PushPhase
from dips.master.state.shared import SharedState
from dips.master.state.waits import waiting_for

_INPUTS = {
    VerdictKind.APPLIED: "applied",
    VerdictKind.EXCLUDED: "excluded",
    VerdictKind.ABORTED: "aborted",
    VerdictKind.ROLLED_BACK: "rolled back",
}


class Verdicts:
    """The verdicts: at most one for each push; ABORTED is presumed for a push that the master does not know."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def await_verdict(self, token: int, request: AwaitVerdictRequest) -> None:
        shared = self._shared
        check_member(shared, request.caller)
        if request.push.cluster != request.caller.name:
            raise Refused(RefusalCode.UNKNOWN_PUSH, f"push {request.push} is not of cluster {request.caller.name!r}")
        push = self.find(request.push)
        if push is None:
            shared.reply(token, AwaitVerdictReply(self.verdict_of(request.push)))
            return
        wait_s = request.wait_s if request.wait_s > 0 else 0.0  # also for NaN, which no comparison could end
        until_s = shared.now_s + min(wait_s, shared.config.round_timeout_s)
        shared.waiters.setdefault(push.id, []).append((token, until_s))

    def decide(self, push: Push, verdict: Verdict) -> Verdict:
        """Decides the push and sends the verdict to waiting callers and to the slaves, whose staging is then free."""
        shared = self._shared
        kind, reason = verdict.kind, verdict.reason
        name = _INPUTS[kind]
        push.phase.move(name, PushPhase.DECIDED, shared.now_s, push.request.caller.cause_id, reason)
        self._remember(push, verdict)
        member = shared.members.get(push.cluster)
        if member is not None and member.push is push:
            member.push = None
        if kind is VerdictKind.ABORTED:
            self._count_nothing(push, member)
        elif not push.is_seed:
            shared.counted_since_s[push.cluster] = push.began_s
        shared.record(
            "verdict",
            push.request.caller.cause_id,
            push=str(push.id),
            verdict=kind.name,
            version=str(verdict.version),
            round=str(verdict.round),
            code=push.code,
            reason=reason,
        )
        shared.command_all(CloseStaging(push.id), push.request.caller.cause_id)
        self._tell(push, verdict)
        return verdict

    def _remember(self, push: Push, verdict: Verdict) -> None:
        """Stores the verdict. That of a donation does not replace the verdict of the cluster's last push."""
        shared = self._shared
        entry = shared.ledger.entry(push.cluster)
        if not push.is_donation:
            entry.last_verdict = verdict
            return
        entry.last_donation = verdict
        if verdict.kind is VerdictKind.ABORTED:
            shared.recovery.tried.add((push.cluster, push.id.incarnation))

    def abort(self, push: Push, reason: Reason) -> Verdict:
        """Decides ABORTED, which is presumed for whatever is not committed, so no journal entry is needed."""
        push.code = reason.code
        return self.decide(push, Verdict(push.id, VerdictKind.ABORTED, None, reason.sentence))

    def _count_nothing(self, push: Push, member: Member | None) -> None:
        """Leaves the ranges of an aborted push with its cluster, unless a new incarnation does not hold them."""
        shared = self._shared
        shared.aborted_of[push.cluster] = shared.aborted_of.get(push.cluster, 0) + 1
        if shared.ledger.leases is not None and member is not None and member.incarnation != push.id.incarnation:
            shared.ledger.leases.free(push.cluster, push.request.ranges, member.held_at_join)

    def _tell(self, push: Push, verdict: Verdict) -> None:
        shared = self._shared
        for token, _ in shared.waiters.pop(push.id, ()):
            shared.reply(token, AwaitVerdictReply(verdict))
        if push.finish_token is not None:
            shared.reply(push.finish_token, FinishPushReply(verdict))
            push.finish_token = None
        member = shared.members.get(push.cluster)
        if member is not None and member.leave_token is not None:
            shared.leave_ready.append(member.cluster)

    def decided(self, push_id: PushId) -> Verdict | None:
        """The verdict of this push, if it is the cluster's last push or last donation."""
        entry = self._shared.ledger.entry(push_id.cluster)
        known = [v for v in (entry.last_verdict, entry.last_donation) if v is not None and v.push == push_id]
        return known[0] if known else None

    def verdict_of(self, push_id: PushId) -> Verdict:
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
        return Verdict(
            push_id, VerdictKind.ABORTED, None, "the master knows no such push: it was given up", False, None
        )

    def _expire_waiters(self, push_id: PushId, waiting: list[tuple[int, float]]) -> None:
        shared = self._shared
        keep = [item for item in waiting if item[1] > shared.now_s]
        for token, until_s in waiting:
            if until_s <= shared.now_s:
                shared.reply(token, AwaitVerdictReply(Busy(0.0, waiting_for(shared).sentence or "the round goes on")))
        if keep:
            shared.waiters[push_id] = keep
        else:
            shared.waiters.pop(push_id, None)

    def find(self, push_id: PushId) -> Push | None:
        sealed = next((push for push in self._shared.round.participants if push.id == push_id), None)
        return sealed or next((push for push in self._shared.pushes() if push.id == push_id), None)

    def tick(self) -> None:
        for push_id, waiting in list(self._shared.waiters.items()):
            self._expire_waiters(push_id, waiting)

    def rearm(self, gap_s: float) -> None:
        waiters = self._shared.waiters
        for push_id, waiting in waiters.items():
            waiters[push_id] = [(token, until_s + gap_s) for token, until_s in waiting]

    def deadlines(self) -> list[float]:
        return [until for waiting in self._shared.waiters.values() for _, until in waiting]

    def gone(self, token: int) -> None:
        """Forgets a call whose caller hung up."""
        for push_id, waiting in list(self._shared.waiters.items()):
            self._shared.waiters[push_id] = [item for item in waiting if item[0] != token]


def _order(push_id: PushId) -> tuple[Incarnation, int]:
    """The pushes of one cluster, in the order of time."""
    return push_id.incarnation, push_id.seq
