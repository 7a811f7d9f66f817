"""Recovers committed state that slaves or the master lost: gathers what all slaves hold, then resumes, adopts their
state, rolls back, or takes the parameters from a cluster (docs/protocol.md, recovery).

It decides only once every slave has attached and reported what its disk holds, because a ROLLBACK cannot be undone. It
never changes anything silently: what is given up is journaled first, and an alarm names it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from dips.core.ids import RoundId, SlaveId, Version
from dips.core.messages import Alarm, CommitRecord, LeaveReply, SendCommitRecord, SnapshotInfo, VerdictKind
from dips.master.state import tape
from dips.master.state.ledger import UNREADABLE, CommitInfo, Ledger, commit_from_record, ledger_of, pair, same_as
from dips.master.state.pushes import Pushes
from dips.master.state.reasons import AlarmKind, Reason, VerdictCode
from dips.master.state.records import Donor, HeldVersion, RecoveryPhase, RoundPhase, Slave, SlavePhase
from dips.master.state.rollback import adopted, roll_back
from dips.master.state.rounds import Rounds
from dips.master.state.shared import SharedState
from dips.master.state.slave_links import SlaveLinks

# ---- snapshots -------------------------------------------------------------------------------------------------------
#
# Compares what slaves' disks hold, according to their hellos, with what the run has committed. Decides nothing.


Broken = set[tuple[SlaveId, Version, RoundId]]


def committed(shared: SharedState, slave: Slave) -> list[SnapshotInfo]:
    """The slave's committed snapshots of versions that are still part of the run's history."""
    return [s for s in slave.snapshots if s.committed and not shared.ledger.is_given_up(s.version)]


def holds(slave: Slave, ledger: Ledger, broken: Broken) -> bool:
    """Whether the slave can load the ledger's commit, by its name or by that of the rollback's origin."""
    commit = ledger.commit
    digest = dict(commit.digest_of_slave).get(slave.id) if commit else None
    if commit is None or digest is None:
        return False
    for info in slave.snapshots:
        if (slave.id, info.version, info.round) in broken or info.digest != digest or not _fits(info, ledger):
            continue
        if (info.version, info.round) == (commit.version, commit.round):
            if not info.committed or info.commit_hash == commit.commit_hash:
                return True
        elif (info.version, info.round) == ledger.origin and info.committed:
            return True
    return False


def holds_committed(slave: Slave, ledger: Ledger, broken: Broken) -> bool:
    """Whether the slave can go back to the ledger's commit: it is on its disk with this name."""
    commit = ledger.commit
    digest = dict(commit.digest_of_slave).get(slave.id) if commit else None
    return commit is not None and any(
        info.committed
        and info.digest == digest
        and _fits(info, ledger)
        and snapshot_of(info) == (commit.version, commit.round, commit.commit_hash)
        and (slave.id, info.version, info.round) not in broken
        for info in slave.snapshots
    )


def restored(slave: Slave, snapshot: HeldVersion) -> bool:
    """Whether the slave has this snapshot from an object store: then it may have lost newer ones."""
    return any(snapshot_of(info) == snapshot and info.restored_timeline > 0 for info in slave.snapshots)


def _fits(info: SnapshotInfo, ledger: Ledger) -> bool:
    """Whether its blocks are those that the slave is to hold."""
    layout, placement = ledger.layout, ledger.placement
    return (
        layout is not None
        and placement is not None
        and (info.layout_hash, info.placement_hash) == (layout.layout_hash, placement.placement_hash)
    )


def snapshot_of(info: SnapshotInfo) -> HeldVersion:
    return (info.version, info.round, info.commit_hash)


def why_not(shared: SharedState, slave: Slave) -> str:
    """A sentence when the slave's disk does not hold what this run has committed; empty when it does."""
    commit = shared.ledger.commit
    newest = max((each.version for each in committed(shared, slave)), default=None)
    if commit is None:
        return (
            f"its directory holds version {newest}, but this master knows none: start it with `dips master --rebuild` "
            "to take the run's state from the slaves, or give the slave an empty directory to begin again"
            if newest is not None
            else ""
        )
    if newest is not None and newest > commit.version:
        return (
            f"its directory holds version {newest}, newer than the master's {commit.version}: the master's directory "
            "is an old copy"
        )
    if holds(slave, shared.ledger, shared.recovery.broken):
        return ""
    here = [s for s in slave.snapshots if s.version == commit.version and s.committed]
    if any(s.commit_hash != commit.commit_hash for s in here):
        return (
            f"its directory holds version {commit.version} of another history than the master's: one of the two was "
            "restored from a copy"
        )
    held = ", ".join(sorted(str(s.version) for s in slave.snapshots)) or "none"
    return f"its directory lacks version {commit.version} (it holds: {held})"


# ---- donors ----------------------------------------------------------------------------------------------------------
#
# Chooses the cluster that donates its copy of a version that the slaves lost: one at a time, newest version first.


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
        if donor is None or shared.now_s - donor.since_s <= shared.config.settings.ticket_ttl_s:
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
        state = self._shared.recovery
        for commit in self.known():
            for base in (commit.version, *same_as(commit)):
                for member in self._shared.live():
                    who = (member.cluster, member.incarnation)
                    if who in state.tried or (*who, commit.version) in state.wrong:
                        continue
                    if member.beat is not None and member.beat.base == base:
                        return Donor(*who, commit, self._shared.now_s, base)
        return None

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


# ---- recovery --------------------------------------------------------------------------------------------------------


_P = RecoveryPhase


class Recovery:
    """Drives shared.recovery; settle() is called after every event and makes all steps that are possible."""

    def __init__(self, shared: SharedState, pushes: Pushes, rounds: Rounds, links: SlaveLinks) -> None:
        self._shared = shared
        self._pushes = pushes
        self._rounds = rounds
        self._links = links
        self._donors = Donors(shared)

    # ---- events ----

    def start(self) -> None:
        """Starts gathering: a restarted master configures no slave before all slaves reported what they hold."""
        shared = self._shared
        if shared.ledger.placement is not None or shared.config.rebuild:
            if shared.ledger.commit is None and shared.config.rebuild:
                shared.recovery.reason = "the run's state is taken from the slaves (--rebuild)"
                shared.recovery.look_until_s = shared.now_s + shared.config.evict_after_s
            self._move("master started", _P.GATHERING)

    def promised(self, slave: Slave) -> None:
        """Handles a slave that attached and reported what its disk holds."""
        shared, state = self._shared, self._shared.recovery
        state.silent = {item for item in state.silent if item[0] != slave.id}
        if not shared.holds_blocks(slave.id):
            return  # it waits for a RESHARD, or a record named it
        if state.donating:
            # If its snapshots are back, they are used in place of the donation.
            slaves = [shared.slaves[name] for name in shared.slaves_expected() if name in shared.slaves]
            broken = shared.recovery.broken
            common = set.intersection(
                *(
                    {snapshot_of(s) for s in committed(shared, one) if (one.id, s.version, s.round) not in broken}
                    for one in slaves
                )
            )
            if common or all(holds(one, shared.ledger, broken) for one in slaves):
                self._abort_pushes("a slave's snapshots came back")
                self._move("snapshot came back", _P.GATHERING, f"on slave {slave.id}")
                self._gather_again()
            else:
                self._links.configure(slave)
        elif state.phase.now is _P.NONE:
            trouble = why_not(shared, slave)
            if trouble:
                self.begin(slave, trouble)
            elif shared.ledger.placement is not None:
                self._links.configure(slave)

    def cannot_load(self, slave: Slave, sentence: str) -> None:
        """Handles a slave that cannot load a version that its hello named, or that loaded something else."""
        ledger, state = self._shared.ledger, self._shared.recovery
        assert ledger.commit is not None, "nothing else can be loaded"
        state.broken.add((slave.id, ledger.commit.version, ledger.commit.round))
        if ledger.origin is not None:
            state.broken.add((slave.id, *ledger.origin))
        self.begin(slave, sentence)

    def begin(self, slave: Slave, trouble: str) -> None:
        """Starts a recovery: every configured slave attaches again, so that the knowledge of its disk is current."""
        shared, state = self._shared, self._shared.recovery
        slave.trouble = trouble
        state.reason = f"slave {slave.id}: {trouble}"
        shared.log("recovery", f"recovery: {state.reason}", logging.WARNING)
        self._move("slave cannot load", _P.GATHERING, state.reason)
        self._gather_again()

    def gone(self, slave_id: SlaveId) -> None:
        """Forgets what a slave could not load when its stream ends: it may return with another disk."""
        state = self._shared.recovery
        state.broken = {item for item in state.broken if item[0] != slave_id}

    def tick(self) -> None:
        state = self._shared.recovery
        if state.phase.now is _P.ASKING and self._shared.now_s >= state.ask_again_s:
            self._send_ask()
        if state.donating:
            self._donors.tick()

    def rearm(self, gap_s: float) -> None:
        """Extends all deadlines by gap_s, a pause of the master itself."""
        self._shared.recovery.ask_again_s += gap_s
        self._shared.recovery.look_until_s += gap_s
        self._donors.rearm(gap_s)

    def settle(self) -> None:
        """Makes all steps that are possible with what is known."""
        state = self._shared.recovery
        asked = self._shared.slaves.get(state.asked) if state.asked is not None else None
        asked_is_here = asked is not None and asked.phase.now is SlavePhase.PROMISED
        if state.phase.now is _P.ASKING and not asked_is_here:
            self._move("no record", _P.GATHERING, f"slave {state.asked} is away")
        while state.phase.now is _P.GATHERING and self._decide():
            pass
        if state.donating and self._shared.round.phase.now is RoundPhase.COMMIT:
            self._move("donation committed", _P.NONE)  # what follows is an ordinary COMMIT
            self._end()
        if state.donating and not self._donors.choose():
            self._move("no donor is left", _P.GATHERING)
            self._gather_again()

    # ---- attached slaves ----

    def _all_here(self) -> list[Slave] | None:
        """All slaves of the run, freshly attached, and other attached slaves; None while one of the run is missing."""
        shared = self._shared
        expected = shared.slaves_expected()
        if shared.ledger.placement is None and len(expected) < shared.config.n_slaves:
            return None
        fresh = [slave for _, slave in sorted(shared.slaves.items()) if slave.phase.now is SlavePhase.PROMISED]
        return fresh if {*expected} <= {slave.id for slave in fresh} else None

    def _gather_again(self) -> None:
        for slave in list(self._shared.slaves.values()):
            if slave.phase.now in (SlavePhase.CONFIGURING, SlavePhase.READY):
                self._links.send_away(slave, "the run recovers what a slave lost")

    # ---- deciding ----

    def _decide(self) -> bool:
        """Makes one step of a decision; returns whether another may follow at once."""
        shared, state = self._shared, self._shared.recovery
        if shared.ledger.placement is None and not shared.config.rebuild:
            # A master without state guesses nothing: it waits for --rebuild, or for empty slave directories.
            if not any(committed(shared, slave) for slave in shared.slaves.values()):
                self._resume([])
            return False
        slaves = self._all_here()
        # Which slaves are the run's is not known, and one that a RESHARD removed may be here first, with old versions.
        if slaves is None or shared.now_s < state.look_until_s:
            return False
        # Those that the run could continue from, newest first; the ledger's own first among equal versions.
        own = self._own()
        found = {snapshot_of(info) for slave in slaves for info in committed(shared, slave)}
        if own is not None:
            found.add(own)
        snapshots = sorted(found, key=lambda s: (s[0], s == own, s[1], s[2]), reverse=True)
        if not snapshots and shared.ledger.placement is None:
            # Its slaves may be yet to come: a new run under this name would be a second history of one run.
            state.words = (
                "no slave that is here holds a version: start the slaves that hold this run, or, if it had no version "
                "yet, start the master again without --rebuild"
            )
            shared.log("recovery", f"recovery: {state.words}", logging.ERROR)
            return False
        if not snapshots:
            self._resume(slaves)
            return False
        if shared.ledger.commit is None and not shared.config.rebuild:
            state.reason = self._troubles(slaves)
            return False
        return self._take_first(slaves, snapshots)

    def _own(self) -> HeldVersion | None:
        commit = self._shared.ledger.commit
        return (commit.version, commit.round, commit.commit_hash) if commit else None

    def _take_first(self, slaves: Sequence[Slave], snapshots: Sequence[HeldVersion]) -> bool:
        """Continues from the newest snapshot that every slave has. Returns whether to continue the decision at once."""
        newest = snapshots[0][0]
        state = self._shared.recovery
        state.reason = state.reason or self._troubles(slaves)
        newer: list[Ledger] = []
        for snapshot in snapshots:
            # A journal that was lost, or is an old copy, does not contain every ROLLBACK; newer records do.
            given_up = any(ledger.is_given_up(snapshot[0]) for ledger in newer)
            if given_up or not self._worth_asking(slaves, snapshot, newest):
                continue
            ledger = self._ledger_of(snapshot)
            if ledger is None:
                if self._ask(slaves, snapshot):
                    return False
                continue
            newer.append(ledger)
            if self._take(slaves, snapshot, ledger, newest):
                return False
        # No version is on every slave: a cluster is asked for its copy of a known one.
        if not self._donors.choose():
            known = ", ".join(str(c.version) for c in self._donors.known()) or "none"
            also = f"; or start slave {', '.join(sorted(state.named))} again, which older records name"
            state.words = (
                f"no version is on every slave (newest on any: {newest}), and no cluster that is here holds one whose "
                f"digest is known (known: {known}): restore a slave's directory, or let a cluster with a copy join"
                f"{also if state.named else ''}"
            )
            self._shared.log("recovery", f"recovery: {state.words}", logging.ERROR)
            return False
        self._abort_pushes("the slaves lost the model; a cluster donates its copy")
        self._give_up_round()
        state.words = ""
        self._move("no common version", _P.DONATING)
        self._configure([slave for slave in self._all_here() or () if self._shared.holds_blocks(slave.id)])
        return False

    def _troubles(self, slaves: Sequence[Slave]) -> str:
        words = [(slave.id, why_not(self._shared, slave)) for slave in slaves if self._shared.holds_blocks(slave.id)]
        return next((f"slave {slave_id}: {trouble}" for slave_id, trouble in words if trouble), "")

    def _worth_asking(self, slaves: Sequence[Slave], snapshot: HeldVersion, newest: Version) -> bool:
        """Whether all slaves that need this snapshot may have it. For another placement than the newest one's, only the
        record names these slaves."""
        version, round_id, _ = snapshot
        reported = [(slave, info) for slave in slaves for info in slave.snapshots]
        here = [(slave, info) for slave, info in reported if (info.version, info.round) == (version, round_id)]
        placements = {info.placement_hash for _, info in reported if info.version == newest}
        if version == newest or any(info.placement_hash not in placements for _, info in here):
            return True
        holders = {slave.id for slave, _ in here}
        return all(slave.id in holders for slave in slaves if self._shared.holds_blocks(slave.id))

    def _take(self, slaves: Sequence[Slave], snapshot: HeldVersion, ledger: Ledger, newest: Version) -> bool:
        """Resumes from, adopts or rolls back to this snapshot if every slave of its placement has it; returns whether.

        For the newest snapshot it waits until all slaves that its record names are here: what they hold is not known.
        Raises ConfigError where slaves cannot check the snapshot with the settings of this master.
        """
        broken = self._shared.recovery.broken
        if ledger.placement is None:
            return False
        ledger.check_chunks(self._shared.config.settings.chunk_bytes)
        if missing := sorted({*ledger.placement.slaves} - {slave.id for slave in slaves}):
            # The version is from before a RESHARD: its other slaves are accepted from now on.
            state, names = self._shared.recovery, ", ".join(missing)
            state.named.update(missing)
            if snapshot[0] == newest:
                state.words = f"version {newest} is also on slave {names}, which is not here: start it"
                state.reason = state.reason or f"a record names slave {names}, which the master does not know"
                self._shared.log("recovery", f"recovery: {state.words}", logging.ERROR)
            return snapshot[0] == newest
        members = [slave for slave in slaves if slave.id in ledger.placement.slaves]
        if snapshot[0] == newest and all(holds(slave, ledger, broken) for slave in members):
            ledger.behind = ledger.behind or self._may_lack_versions(members, snapshot, ledger)
            if snapshot != self._own():
                self._adopt(slaves, ledger)
            elif ledger.behind and ledger.commit is not None:
                self._roll_back(slaves, ledger.commit)
            else:
                self._resume(slaves)
            return True
        if snapshot[0] < newest and all(holds_committed(slave, ledger, broken) for slave in members):
            assert ledger.commit is not None, "a snapshot's ledger has its commit"
            self._roll_back(slaves, ledger.commit)
            return True
        return False

    def _may_lack_versions(self, members: Sequence[Slave], snapshot: HeldVersion, ledger: Ledger) -> bool:
        """Whether newer versions than the slaves' newest may have been published and lost, and this journal does not
        know them: their names must not come again, so the run goes on on a new timeline.

        So it is where all slaves were restored from an object store; and with durability async, where another journal
        decided before and all that the slaves have is on their disks: newer versions may have been in their memory. A
        version that is only in memory was flipped by that same process, and no version followed it.
        """
        shared, broken = self._shared, self._shared.recovery.broken
        after_another = snapshot != self._own() or (shared.config.takes_over and shared.published is None)
        if after_another and shared.config.settings.durability == "async":
            if all(holds_committed(slave, ledger, broken) for slave in members):
                return True
        return all(restored(slave, snapshot) for slave in members)

    def _ledger_of(self, snapshot: HeldVersion) -> Ledger | None:
        """The ledger of a snapshot; None when its record must be asked for."""
        shared, commit_hash = self._shared, snapshot[2]
        if snapshot == self._own():
            return shared.ledger
        known = next((c for c in shared.commits if c.commit_hash == commit_hash), None)
        if known is not None:
            return ledger_of(known)
        record = shared.recovery.records.get(commit_hash)
        return ledger_of(commit_from_record(record)) if record is not None else None

    # ---- asking for a record ----

    def _ask(self, slaves: Sequence[Slave], snapshot: HeldVersion) -> bool:
        """Asks the first slave that may have the snapshot's record; returns whether there is one."""
        state = self._shared.recovery
        for slave in slaves:
            if (slave.id, snapshot) in state.silent:
                continue
            if any(info.committed and snapshot_of(info) == snapshot for info in slave.snapshots):
                state.asked, state.wanted = slave.id, snapshot
                self._move("record needed", _P.ASKING, f"of version {snapshot[0]}, from slave {slave.id}")
                self._send_ask()
                return True
        return False

    def _send_ask(self) -> None:
        shared, state = self._shared, self._shared.recovery
        assert state.asked is not None, "ASKING has a slave"
        assert state.wanted is not None, "ASKING has a wanted snapshot"
        state.ask_again_s = shared.now_s + shared.config.evict_after_s / 2
        slave = shared.slaves[state.asked]
        shared.command(slave, SendCommitRecord(state.wanted[0], state.wanted[1]), "recovery")

    def record_came(self, slave: Slave, body: CommitRecord) -> None:
        """Handles the answer to SendCommitRecord, or a record that was not asked for."""
        state = self._shared.recovery
        if state.phase.now is not _P.ASKING or slave.id != state.asked or state.wanted is None:
            return
        if (body.version, body.round) != state.wanted[:2]:
            return
        trouble = body.refusal.sentence if body.refusal else self._why_useless(body.record, state.wanted)
        if trouble:
            state.silent.add((slave.id, state.wanted))
            self._shared.log(
                "record", f"slave {slave.id} gives no record of {body.version}: {trouble}", logging.WARNING
            )
            self._move("no record", _P.GATHERING, trouble)
        else:
            state.records[state.wanted[2]] = body.record
            self._move("record came", _P.GATHERING)

    def _why_useless(self, record: bytes, wanted: HeldVersion) -> str:
        """A sentence when the record is not the one of the snapshot's commit, or cannot be read."""
        if hashlib.sha256(record).digest() != wanted[2]:
            return "what it sent is not what its manifest names"
        try:
            commit = commit_from_record(record)
            ledger = ledger_of(commit)
        except UNREADABLE as error:
            return f"the record cannot be read ({type(error).__name__}: {error})"
        if (commit.version, commit.round) != wanted[:2]:
            return f"the record is of version {commit.version}, made in round {commit.round}"
        own_run = ledger.run_id == self._shared.config.run_id
        return "" if own_run and ledger.layout and ledger.placement else "the record is not of this run"

    # ---- decisions ----

    def _resume(self, slaves: Sequence[Slave]) -> None:
        """Resumes: nothing is lost, and every slave loads what the ledger names."""
        self._move("all can load", _P.NONE)
        self._end()
        if self._shared.ledger.placement is not None:
            self._configure(slaves)

    def _adopt(self, slaves: Sequence[Slave], ledger: Ledger) -> None:
        """Takes over the slaves' history."""
        shared, commit = self._shared, ledger.commit
        assert commit is not None, "adopted is a commit"
        before = shared.ledger.version
        reason = f"the master's state is replaced by that of version {commit.version}, which the slaves hold"
        self._abort_pushes(reason)
        self._send_clusters_away(reason)
        placement = shared.ledger.placement
        shared.ledger = adopted(shared.ledger, commit, shared.epoch, shared.changes)
        shared.keep_preset()
        shared.log("master", f"version {commit.version} continues with {shared.outer_step_words()}")
        shared.stopped_s = None
        if shared.take_back_end():
            limit = shared.settings().tk_max_tokens
            shared.log("master", f"version {commit.version} had ended the run; tk_max is {limit} now, so it continues")
        if shared.ledger.placement != placement:
            shared.commits.clear()  # their digests are of other shards
        shared.commits.append(commit)
        shared.published, shared.kept = None, {}
        shared.ledger.behind = ledger.behind
        record: dict[str, object] = {
            "round": pair(commit.round),
            "version": pair(commit.version),
            "from_version": pair(before),
            "digests": {slave: digest.hex() for slave, digest in commit.digest_of_slave},
            "tokens": shared.ledger.tokens,
            "wall_s": shared.now_s + shared.wall_offset_s,
        }
        shared.journal("ADOPT", record)
        self._give_up_round()
        shared.record(
            tape.HistoryAdopted("recovery", version=commit.version, before=before, tokens=shared.ledger.tokens)
        )
        sentence = (
            f"the master took over version {commit.version} ({shared.ledger.tokens} tokens) from the slaves; its "
            f"journal knew {f'version {before}' if before else 'no version'}: every cluster joins again"
        )
        shared.alarm(Alarm(AlarmKind.ADOPTED, (), sentence))
        if shared.ledger.behind:
            self._roll_back(slaves, commit)
            return
        self._move("adopted", _P.NONE, f"version {commit.version}")
        self._end()
        self._configure(slaves)

    def _roll_back(self, slaves: Sequence[Slave], origin: CommitInfo) -> None:
        shared = self._shared
        reason = f"the run goes back to version {origin.version}: {shared.recovery.reason}"
        self._abort_pushes(reason)
        before, behind = shared.ledger.version, shared.ledger.behind
        lost_tokens, n_pushes = roll_back(shared, origin, {"participants": []})
        self._give_up_round()
        if behind:
            shared.tell_new_timeline(origin.version)
        else:
            shared.tell_rollback(before, origin.version, None, lost_tokens, n_pushes)
        self._move("rolled back", _P.NONE, f"to {origin.version}, now {shared.ledger.version}")
        self._end()
        self._configure(slaves)

    def _configure(self, slaves: Sequence[Slave]) -> None:
        """Slaves that hold blocks load them; those that a RESHARD adds wait for it; others are dismissed."""
        shared = self._shared
        wanted = shared.ledger.reshard.add if shared.ledger.reshard else ()
        for slave in slaves:
            if shared.holds_blocks(slave.id):
                self._links.configure(slave)
            elif slave.id not in wanted:
                self._links.dismiss(slave, f"slave {slave.id} holds no blocks of version {shared.ledger.version}")

    def _end(self) -> None:
        """Clears what was gathered."""
        state = self._shared.recovery
        state.look_until_s = 0.0
        state.reason, state.words = "", ""
        state.asked, state.wanted, state.donor = None, None, None
        state.tried, state.wrong, state.named = set(), set(), set()
        state.records, state.silent = {}, set()

    # ---- ending pushes and rounds ----

    def _abort_pushes(self, reason: str) -> None:
        for push in list(self._shared.pushes()):
            if not push.sealed:
                self._pushes.abort(push, Reason(VerdictCode.RECOVERY, reason))

    def _give_up_round(self) -> None:
        """Sends the verdicts of a COMMIT that waited for the slaves, as the ledger now has them."""
        for push in self._rounds.end_committed(self._shared.recovery.reason):
            known = self._pushes.decided(push.id)
            if known is None:
                sentence = "its round is not in the history that the slaves hold"
                self._pushes.abort(push, Reason(VerdictCode.OTHER, sentence))
            else:
                if known.kind is VerdictKind.ROLLED_BACK:
                    push.code = VerdictCode.ROLLBACK  # instead of the code of the COMMIT that is undone
                self._pushes.decide(push, known)

    def _send_clusters_away(self, reason: str) -> None:
        """Makes all clusters join again, because what they know comes from another ledger."""
        shared = self._shared
        for member in shared.live():
            shared.record(tape.ClusterEvicted(str(member.incarnation), cluster=member.cluster, reason=reason))
            if member.leave_token is not None:
                shared.reply(member.leave_token, LeaveReply())
        shared.members.clear()
        shared.pins = {}
        shared.seed_cluster = None

    # ---- donation ----

    def _move(self, input_name: str, to: RecoveryPhase, why: str = "") -> None:
        shared, state = self._shared, self._shared.recovery
        state.since_s = state.since_s if state.active else shared.now_s
        state.phase.move(input_name, to, shared.now_s, "recovery", why)
        shared.record(tape.RecoveryMoved("recovery", phase=to.value, input=input_name, why=why))
