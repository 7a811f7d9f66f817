"""Handles LeaseData and ReturnData, the calls of clusters in leased mode."""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import LeaseDataReply, LeaseDataRequest, ReturnDataReply, ReturnDataRequest
from dips.core.protocol import MAX_LEASED_CHUNKS
from dips.master.state.callers import check_member
from dips.master.state.leases import LeaseTable, TokenState, overlapping
from dips.master.state.shared import SharedState


class Data:
    """Grants leases on token ranges and takes them back."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def lease(self, token: int, request: LeaseDataRequest) -> None:
        shared = self._shared
        member = check_member(shared, request.caller)
        leases, plan = self._leases(member.cluster), shared.ledger.data_plan
        assert plan is not None, "a lease table has a plan"
        most = MAX_LEASED_CHUNKS * plan.chunk_tokens
        if not 0 < request.want_tokens <= most:
            raise Refused(
                RefusalCode.TOKENS,
                f"{request.want_tokens} tokens are asked for: ask for 1 to {most} at a time",
            )
        number, ranges = member.last_lease
        if request.request and request.request == number:
            shared.reply(token, LeaseDataReply(ranges))  # the first answer was lost on the way
            return
        if 0 < request.request < number:
            raise Refused(RefusalCode.SEQ, f"request {request.request} is older than request {number}: ask again")
        ranges = leases.lease(member.cluster, request.want_tokens)
        member.last_lease = (request.request, ranges)
        shared.journal("LEASE", {"cluster": member.cluster, "leases": [r.lease_id for r in ranges]})
        shared.record(
            "lease",
            request.caller.cause_id,
            cluster=member.cluster,
            tokens=sum(item.tokens for item in ranges),
        )
        shared.reply(token, LeaseDataReply(ranges))

    def give_back(self, token: int, request: ReturnDataRequest) -> None:
        shared = self._shared
        member = check_member(shared, request.caller)
        leases = self._leases(member.cluster)
        leases.check(member.cluster, request.ranges)
        in_push = member.push.request.ranges if member.push else ()
        if taken := overlapping(request.ranges, in_push):
            raise Refused(RefusalCode.RANGES, f"{len(taken)} of the ranges are in an undecided push: await its verdict")
        leases.settle(request.ranges, TokenState.FREE)
        shared.journal("RETURN", {"cluster": member.cluster, "tokens": sum(item.tokens for item in request.ranges)})
        shared.reply(token, ReturnDataReply())

    def _leases(self, cluster: str) -> LeaseTable:
        leases = self._shared.ledger.leases
        if leases is None:
            raise Refused(
                RefusalCode.DATA_PLAN,
                f"this run's clusters bring their own data: cluster {cluster!r} needs no lease",
            )
        return leases
