"""Checks a push: at BeginPush, and again at FinishPush and when the window is sealed.

A function here decides nothing and changes nothing: it refuses, answers STALE, or accepts.
"""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import Version
from dips.core.messages import BeginPushRequest, DataMode, Stale, StaleKind
from dips.master.state import token_counts
from dips.master.state.records import Member, Push
from dips.master.state.shared import SharedState

MAX_TOKENS = 1 << 50
"""More tokens than any cluster could train on between two pushes; a larger number is a mistake."""

MAX_STEPS = 1 << 32
"""The same limit for steps; sums of them must stay within 64 bits."""

OWN_DATA_SLACK = 2.0
"""A cluster with its own data may count at most its declared rate x the elapsed time x this."""

OWN_DATA_START_S = 60.0
"""Elapsed time granted to a first push, whose clock starts at Join and not at its first step."""


def stale(shared: SharedState, request: BeginPushRequest) -> Stale | None:
    """Whether the base can no longer be pushed against; None for a seed."""
    version, base = shared.ledger.version, request.base
    if base is None or version is None:
        return None
    if base.timeline != version.timeline:
        return Stale(StaleKind.TIMELINE, f"base {base} is on another timeline than version {version}: pull")
    fence = shared.ledger.entry(request.caller.name).fence
    if request.fence != fence:
        return Stale(StaleKind.FENCE, f"base {base} carries fence {request.fence}, the fence is {fence}: pull")
    if version.v - base.v > shared.s_max():
        return Stale(
            StaleKind.VERSIONS,
            f"base {base} is more than {shared.s_max()} versions behind {version}: pull",
        )
    return None


def check(shared: SharedState, member: Member, request: BeginPushRequest) -> None:
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
        _check_donation(shared, member, request)
    elif request.base is None:
        _check_seed(shared, member, request)
    else:
        _check_counts(shared, member, request)


def _check_seed(shared: SharedState, member: Member, request: BeginPushRequest) -> None:
    _check_may_seed(shared, member.cluster)
    if request.tokens or request.ranges:
        raise Refused(RefusalCode.TOKENS, "a seed carries no training: send 0 tokens and no ranges")


def _check_donation(shared: SharedState, member: Member, request: BeginPushRequest) -> None:
    if request.base is not None or request.tokens or request.ranges:
        raise Refused(RefusalCode.MALFORMED, "a donation carries no training: send no base, 0 tokens and no ranges")
    _check_may_donate(shared, member.cluster, request.donates)


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


def _check_counts(shared: SharedState, member: Member, request: BeginPushRequest) -> None:
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
    if plan.mode is DataMode.OWN:
        _check_own(shared, member, request)
    else:
        _check_leased(shared, member, request)


def _check_own(shared: SharedState, member: Member, request: BeginPushRequest) -> None:
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
    token_counts.check(shared, member.cluster, request)


def _check_leased(shared: SharedState, member: Member, request: BeginPushRequest) -> None:
    leases = shared.ledger.leases
    assert leases is not None, "a leased data plan has a lease table"
    leases.check(member.cluster, request.ranges)
    total = sum(item.tokens for item in request.ranges)
    if total != request.tokens:
        raise Refused(
            RefusalCode.TOKENS,
            f"{request.tokens} tokens are counted, but the ranges hold {total}: they must agree",
        )


def recheck(shared: SharedState, push: Push) -> str | None:
    """Repeats the checks of BeginPush against the present state; a sentence when one fails."""
    too_old = stale(shared, push.request)
    if too_old is not None:
        return too_old.sentence
    try:
        if push.is_donation:
            _check_may_donate(shared, push.cluster, push.request.donates)
        elif push.is_seed:
            _check_may_seed(shared, push.cluster)
        elif shared.ledger.leases is not None:
            shared.ledger.leases.check(push.cluster, push.request.ranges)
        else:
            token_counts.check(shared, push.cluster, push.request)  # the counts of other clusters may be known by now
    except Refused as refused:
        return refused.sentence
    return None
