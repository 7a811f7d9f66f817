"""Handles LeaseData and ReturnData, the calls of clusters in leased mode."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import LeaseDataReply, LeaseDataRequest, ReturnDataReply, ReturnDataRequest
from dips.core.protocol import MAX_LEASED_CHUNKS
from dips.master.state import penalty_detect
from dips.master.state.callers import check_member
from dips.master.state.leases import LeaseTable, TokenState, overlapping
from dips.master.state.shared import SharedState

# ---- same data -------------------------------------------------------------------------------------------------------
#
# Detects two clusters with the same pushes, which train on the same data in the same order (docs/algorithm.md,
# Direction).
#
# Compares the updates p_j = theta_base - theta_j of pushes that a round accepts together, in pairs. It changes nothing
# that is merged. It detects only pushes from one base with about as many steps, as in rounds of all clusters.
#
# Legend: directions: the Gram matrix of p_1 .. p_k, s_1 .. s_k (penalty_detect.py), NaN where it is not known.


ALIKE_COSINE = 0.99
ALIKE_NORMS = 0.95
"""The smaller norm as a part of the larger one. Norms of clusters with different data are often equal, but their
cosines are far lower: 0.27 to 0.84 in the byte model (docs/algorithm.md, Direction)."""

ALIKE_ROUNDS = 3
"""Rounds in a row with both pushes alike before the alarm begins, and rounds without before it ends."""


def look(
    shared: SharedState, participants: Sequence[str], accepted: Sequence[str], directions: Sequence[Sequence[float]]
) -> None:
    """Compares a judged round's accepted pushes, and reports when an alarm begins."""
    here = [(j, name) for j, name in enumerate(participants) if name in accepted]
    for at, (j, name) in enumerate(here):
        for k, other in here[at + 1 :]:
            _compare(shared, (name, other), directions[j][j], directions[k][k], directions[j][k])
    gone = [pair for pair in shared.alike if not shared.members.keys() >= set(pair)]
    for pair in gone:
        shared.alike.pop(pair)
        shared.same_data.pop(pair, None)


def _compare(shared: SharedState, pair: tuple[str, str], squared: float, other_squared: float, product: float) -> None:
    if not (math.isfinite(product) and squared > 0.0 and other_squared > 0.0):
        return
    norm, other_norm = math.sqrt(squared), math.sqrt(other_squared)
    cosine = penalty_detect.cosine(product, norm, other_norm)
    alike = cosine >= ALIKE_COSINE and min(norm, other_norm) >= ALIKE_NORMS * max(norm, other_norm)
    n_rounds = min(ALIKE_ROUNDS, max(0, shared.alike.get(pair, 0) + (1 if alike else -1)))
    shared.alike[pair] = n_rounds
    if n_rounds == 0:
        del shared.alike[pair]
        shared.same_data.pop(pair, None)
    elif alike and n_rounds == ALIKE_ROUNDS:
        sentence = (
            f"clusters {pair[0]} and {pair[1]} push the same: the cosine of their updates is {cosine:.2f}, the norms "
            f"are {norm:.3g} and {other_norm:.3g}, in {ALIKE_ROUNDS} rounds in a row. They train on the same data in "
            "the same order, so one of them adds nothing: give each its own part of the data, or at least another seed"
        )
        if pair not in shared.same_data:
            shared.alarm(sentence)
        shared.same_data[pair] = sentence


# ---- data ------------------------------------------------------------------------------------------------------------


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
