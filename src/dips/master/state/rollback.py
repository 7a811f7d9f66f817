"""Makes the ledger after a ROLLBACK to an older version, or after taking over a newer one.

Numbers that must never decrease keep their highest value: fences, incarnations, round numbers, lease numbers. The
result is in the journal before anything of it is sent (docs/protocol.md, recovery).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

from dips.core.ids import PushId, RoundId, Version
from dips.core.messages import Verdict, VerdictKind
from dips.master.state.ledger import (
    ClusterEntry,
    CommitInfo,
    Ledger,
    PendingReshard,
    canonical,
    ledger_of,
    pair,
    push_to_json,
)
from dips.master.state.reasons import VerdictCode
from dips.master.state.records import OperatorChanges, Push
from dips.master.state.shared import SharedState

GIVEN_UP_KEPT = 64
"""Rollbacks that the ledger remembers; snapshots of versions given up before these are overwritten by then."""

LEASE_NUMBERS_OF_AN_EPOCH = 1 << 32
"""More leases than one epoch can grant: from (epoch x this) on, no lease number was ever given out."""


def next_version(current: Ledger, origin: Version, epoch: int, on_disks: int) -> Version:
    """The new name of `origin` after a ROLLBACK: the same number on a timeline that was never used.

    on_disks: the newest timeline of any slave's snapshot; a lost journal or an old copy may not contain it.
    """
    newest = max(on_disks, *(v.timeline for v in (current.version, origin) if v is not None))
    return Version(max(epoch, newest + 1), origin.v)


def roll_back(
    shared: SharedState, origin: CommitInfo, about: Mapping[str, object], donation: Push | None = None
) -> tuple[int, int]:
    """Replaces the ledger by the state at `origin`, on a new timeline: the journal's record is the commit point.

    All leases are free, every fence is one higher than it ever was, and pushes that newer versions merged are
    ROLLED_BACK. Clusters that joined since keep identity and fence. The record carries the ledger as a COMMIT's does.
    donation: the push that brought the parameters, in the open round; without it the slaves have them. about: further
    fields of the record. Returns how many tokens and how many pushes are undone.
    """
    current, epoch = shared.ledger, shared.epoch
    version = next_version(current, origin.version, epoch, shared.newest_timeline())
    ledger = _merged(current, origin, epoch, frozenset(shared.members), shared.changes)
    if ledger.leases is not None:
        ledger.leases.free_all()
    for entry in ledger.clusters.values():
        entry.fence += 1
        entry.last_verdict = _taken_back(entry.last_verdict, origin.version, version)
    ledger.given_up = [*ledger.given_up, (origin.version, version)][-GIVEN_UP_KEPT:]
    ledger.origin = (origin.version, origin.round)
    ledger.reshard = _pending(current, ledger)
    ledger.round_n += 1
    ledger.commit = None
    round_id, digests = RoundId(epoch, ledger.round_n), origin.digest_of_slave
    if donation is not None:
        assert shared.round.id is not None, "a donation is committed by a round"
        round_id, digests = shared.round.id, tuple(sorted(shared.round.digest_of_slave.items()))
        ledger.origin = None  # no snapshot of it is left, and its momentum is not the origin's
        reason = "the donated copy is a version again"
        verdict = Verdict(donation.id, VerdictKind.APPLIED, version, reason, False, round_id)
        ledger.entry(donation.cluster).last_donation, donation.code = verdict, VerdictCode.MERGED
    undone, lost_tokens = _taken_pushes(current, origin.version), max(0, current.tokens - ledger.tokens)
    record = {
        **about,
        "kind": "ROLLBACK",
        "epoch": epoch,
        "round": pair(round_id),
        "version": pair(version),
        "from_version": pair(current.version),
        "origin": pair(origin.version),
        "origin_round": pair(origin.round),
        "digests": {slave: digest.hex() for slave, digest in digests},
        "tokens": ledger.tokens,
        "lost_tokens": lost_tokens,
        "rolled_back": [push_to_json(push) for push in undone],
        "donor": donation.cluster if donation is not None else None,
        "s_max": shared.s_max(),
        "wall_s": shared.now_s + shared.wall_offset_s,
    }
    full = record | {"ledger": json.loads(ledger.to_json(with_commit=False))}
    shared.replace_ledger(ledger, CommitInfo(round_id, version, digests, canonical(full).encode()))
    shared.journal("ROLLBACK", record | {"ledger": "in the snapshot"})
    return lost_tokens, len(undone)


def _pending(current: Ledger, restored: Ledger) -> PendingReshard | None:
    """The requested RESHARD after a rollback: a request stays, and a RESHARD that was rolled back is done again."""
    if current.placement is None or restored.placement is None:
        return current.reshard
    pending = current.reshard or PendingReshard((), (), "the run went back over a RESHARD")
    wanted, held = {*pending.slaves_of(current.placement.slaves)}, {*restored.placement.slaves}
    if wanted == held:
        return None
    return PendingReshard(tuple(sorted(wanted - held)), tuple(sorted(held - wanted)), pending.reason)


def adopted(current: Ledger, commit: CommitInfo, epoch: int, changes: OperatorChanges) -> Ledger:
    """The state from a slave's commit that is newer than the journal's; no cluster is a member until it joins again.

    changes: what the operator changed in `current` since this process began.
    """
    ledger = _merged(current, commit, epoch, (), changes)
    fork = current.commit
    if fork is not None and fork.version == commit.version and fork.commit_hash != commit.commit_hash:
        # The journal decided these pushes in a round that the slaves did not make: they are in no version.
        for entry in ledger.clusters.values():
            entry.fence += 1
            verdict = entry.last_verdict
            if verdict is not None and verdict.round == fork.round:
                entry.last_verdict = replace(verdict, kind=VerdictKind.ROLLED_BACK, reason="another history won")
    return ledger


def _merged(
    current: Ledger, commit: CommitInfo, epoch: int, members: Collection[str], changes: OperatorChanges
) -> Ledger:
    """The record's ledger, with what must never be forgotten or decrease."""
    ledger = ledger_of(commit)
    names = sorted({*current.clusters, *ledger.clusters})
    ledger.clusters = {
        name: _entry(current.clusters.get(name), ledger.clusters.get(name), name in members) for name in names
    }
    ledger.chunk_bytes = current.chunk_bytes  # an older release's record does not have it
    ledger.round_n = max(current.round_n, ledger.round_n)
    ledger.given_up = sorted({*current.given_up, *ledger.given_up})
    ledger.rounds_committed = max(current.rounds_committed, ledger.rounds_committed)
    ledger.rounds_merged = max(current.rounds_merged, ledger.rounds_merged)
    ledger.rounds_void = max(current.rounds_void, ledger.rounds_void)
    if current.version is not None and current.version >= commit.version:
        ledger.paused, ledger.draining, ledger.stop_asked = current.paused, current.draining, current.stop_asked
        ledger.extended = current.extended or ledger.extended
        ledger.preset = current.preset
    else:
        # What the operator asked of this process is carried over. What an old copy has from before is older than the
        # record: the record lacks a pause, for example, because it was taken back.
        if changes.paused:
            ledger.paused = current.paused
        if changes.end:
            ledger.stopping, ledger.stop_asked = current.stopping, current.stop_asked
        if changes.token_limit:
            ledger.extended = current.extended
        ledger.draining = {name: why for name, why in ledger.draining.items() if name not in changes.drains}
        ledger.draining |= {name: why for name, why in current.draining.items() if name in changes.drains}
    if ledger.leases is not None:
        known = current.leases.next_lease_id if current.leases is not None else 0
        ledger.leases.number_from(max(known, epoch * LEASE_NUMBERS_OF_AN_EPOCH))
    return ledger


def _entry(now: ClusterEntry | None, then: ClusterEntry | None, member: bool) -> ClusterEntry:
    """One cluster's entry: counters of that time, identity and fence of now."""
    if now is None or then is None:
        only = now or then
        assert only is not None, "each name is of one of both"
        if now is None:
            return replace(only, member=member)
        # The restored version does not know this cluster: what it counted since is undone.
        return replace(only, member=member, pushes_applied=0, pushes_excluded=0, tokens_applied=0, steps_applied=0)
    counts = [(one.steps_before, one.steps_heard) for one in (now, then)]
    steps_before, steps_heard = max(counts, key=sum)
    return replace(
        then,
        fence=max(now.fence, then.fence),
        incarnation=max((i for i in (now.incarnation, then.incarnation) if i is not None), default=None),
        spoke=max((i for i in (now.spoke, then.spoke) if i is not None), default=None),
        incarnations=max(now.incarnations, then.incarnations),
        member=member,
        declared_tokens_per_s=now.declared_tokens_per_s,
        steps_before=steps_before,
        steps_heard=steps_heard,
        last_verdict=_later(now.last_verdict, then.last_verdict),
        last_donation=_later(now.last_donation, then.last_donation),
    )


def _later(one: Verdict | None, other: Verdict | None) -> Verdict | None:
    known = [verdict for verdict in (one, other) if verdict is not None]
    return max(known, key=lambda v: (v.push.incarnation, v.push.seq), default=None)


def _taken_back(verdict: Verdict | None, origin: Version, version: Version) -> Verdict | None:
    if verdict is None or verdict.kind is not VerdictKind.APPLIED:
        return verdict
    if verdict.version is None or verdict.version <= origin:
        return verdict
    reason = f"version {verdict.version} was lost: the run went back to {origin}, now {version}"
    return replace(verdict, kind=VerdictKind.ROLLED_BACK, version=version, reason=reason)


def _taken_pushes(current: Ledger, origin: Version) -> tuple[PushId, ...]:
    """The pushes that versions newer than the origin merged, as far as the ledger still names them."""
    lost = [push for version, pushes in current.applied_in if version > origin for push in pushes]
    last = [
        entry.last_verdict.push
        for entry in current.clusters.values()
        if entry.last_verdict is not None and _taken_back(entry.last_verdict, origin, origin) != entry.last_verdict
    ]
    return tuple(sorted({*lost, *last}))
