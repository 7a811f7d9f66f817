"""Chooses the cluster that donates its copy of a version that the slaves lost: one at a time, newest version first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dips.core.ids import Version
from dips.master.state.ledger import CommitInfo, same_as
from dips.master.state.records import Donor, Member
from dips.master.state.shared import SharedState


class Donors:
    """Chooses shared.recovery.donor; a copy counts only if every slave's digest of it is the committed one."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def known(self) -> list[CommitInfo]:
        """Commits of the run's history whose digests this master remembers, newest first."""
        shared = self._shared
        kept = [commit for commit in shared.commits if not shared.ledger.is_given_up(commit.version)]
        return sorted(kept, key=lambda commit: commit.version, reverse=True)

    def choose(self) -> bool:
        """Keeps the donor or takes the next one; returns whether there is one."""
        state = self._shared.recovery
        if state.donor is not None and self._may_deliver(state.donor):
            return True
        state.donor = self._next()
        if state.donor is None and state.tried:
            state.tried.clear()  # what made them fail may be repaired
            state.donor = self._next()
        if state.donor is not None:
            donor = state.donor
            self._shared.log(
                "donor",
                f"cluster {donor.cluster} is asked for its copy of version {donor.commit.version}",
            )
        return state.donor is not None

    def tick(self) -> None:
        """Gives up a donor that sends nothing, so that another can be chosen."""
        shared, donor = self._shared, self._shared.recovery.donor
        if donor is None or shared.now_s - donor.since_s <= shared.config.ticket_ttl_s:
            return
        member = shared.members.get(donor.cluster)
        if member is None or member.push is None:
            shared.recovery.tried.add((donor.cluster, donor.incarnation))

    def rearm(self, gap_s: float) -> None:
        donor = self._shared.recovery.donor
        if donor is not None:
            since_s = donor.since_s + gap_s
            self._shared.recovery.donor = replace(donor, since_s=since_s)

    def _next(self) -> Donor | None:
        for commit in self.known():
            for base in (commit.version, *same_as(commit)):
                for member in self._holders_of(base, commit.version):
                    return Donor(member.cluster, member.incarnation, commit, self._shared.now_s, base)
        return None

    def _holders_of(self, base: Version, version: Version) -> Iterable[Member]:
        state = self._shared.recovery
        return (
            member
            for member in self._shared.live()
            if member.beat is not None
            and member.beat.base == base
            and (member.cluster, member.incarnation) not in state.tried
            and (member.cluster, member.incarnation, version) not in state.wrong
        )

    def _may_deliver(self, donor: Donor) -> bool:
        """Whether this donor may still deliver its copy."""
        state, member = self._shared.recovery, self._shared.members.get(donor.cluster)
        if any(push.is_donation for push in self._shared.round.participants):
            return True  # complete on every slave: the cluster itself is no longer needed
        if member is None or member.incarnation != donor.incarnation:
            return False
        key = (donor.cluster, donor.incarnation)
        if key in state.tried or (*key, donor.commit.version) in state.wrong:
            return False
        pushing = member.push is not None and member.push.is_donation
        return pushing or (member.beat is not None and member.beat.base == donor.base)
