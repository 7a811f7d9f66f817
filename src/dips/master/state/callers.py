"""Checks the caller of a request: run, epoch and incarnation, before anything else (I8)."""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Caller
from dips.master.state.records import Member
from dips.master.state.shared import SharedState


def check_run(shared: SharedState, run_id: str, who: str) -> None:
    """Raises Refused(RUN_ID) for another run's id; an empty id is a peer that does not know it yet."""
    if run_id and run_id != shared.config.run_id:
        raise Refused(
            RefusalCode.RUN_ID,
            f"{who} asks for run {run_id!r}, but this master serves run {shared.config.run_id!r}: "
            "check the master's address, or give the run's id",
        )


def check_member(shared: SharedState, caller: Caller) -> Member:
    """The member that calls. Raises Refused: RUN_ID, STALE_EPOCH or FENCED (for the last two: join again)."""
    check_run(shared, caller.run_id, f"cluster {caller.name!r}")
    if caller.epoch != shared.epoch:
        entry = shared.ledger.clusters.get(caller.name)
        if entry is not None and caller.incarnation == entry.incarnation:
            shared.called_of_old_s[caller.name] = shared.now_s
        restarted = "the master was restarted; join again, nothing is lost"
        newer = "a newer master serves this run, or this one's directory is an old copy; if two run, stop this one"
        raise Refused(
            RefusalCode.STALE_EPOCH,
            f"cluster {caller.name!r} names the master's epoch {caller.epoch}, this is epoch {shared.epoch}: "
            + (restarted if caller.epoch < shared.epoch else newer),
        )
    member = shared.members.get(caller.name)
    if member is None or caller.incarnation != member.incarnation:
        now = f"incarnation {member.incarnation} is live" if member else "it was evicted or has left"
        raise Refused(
            RefusalCode.FENCED,
            f"incarnation {caller.incarnation} of cluster {caller.name!r} is no longer valid ({now}): join again",
        )
    shared.ledger.entry(caller.name).spoke = member.incarnation
    return member
