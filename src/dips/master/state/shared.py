"""The state shared by the master's machines: the ledger, the attached processes, the open pushes, the outbox.

Only machines of this package write to it, and only within one handle() call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import PushId, SlaveId, Version
from dips.core.machine import MachineHistory, Phase
from dips.core.placement import Placement
from dips.core.protocol import CURVE_KEY_BYTES, MAX_ALLOWED_KEYS
from dips.master.state import records, tape
from dips.master.state.effects import CloseLink, Effect, Halt, Log, Record, Refuse, Reply, ToSlave, WriteJournal
from dips.master.state.ledger import CommitInfo, Ledger, canonical
from dips.master.state.penalty_types import EARLIER_DEFAULT_PRESET, DetectorState, PenaltyConfig
from dips.master.state.reasons import AlarmKind
from dips.master.state.schedule import LinkRates, TransferScheduler

# ---- run config ------------------------------------------------------------------------------------------------------
#
# The settings that the state machines use; master/config.py makes and checks them.


@dataclass(frozen=True)
class RunConfig:
    """One run's settings."""

    run_id: str
    n_slaves: int
    settings: messages.Settings = field(default_factory=messages.Settings)  # sent to all processes
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    max_clusters: int = 8
    min_clusters: int = 1
    # A round with fewer pushes waits for more, for so long after it could go on; None: it does not.
    min_clusters_per_round: int = 1
    round_deadline_s: float | None = None
    grace_s: float | None = None  # None: 10 % of the fastest cluster's round, at least 1 s
    lease_ttl_s: float = 6 * 3600.0
    pinned_versions: int = 2
    linger_s: float = 30.0
    # A version that the slaves hold may be adopted although the journal knows none, and a newer epoch that they
    # promised is replaced by a still newer one.
    rebuild: bool = False
    # A standby begins this epoch: the newest decisions of the master before may be missing.
    takes_over: bool = False
    # Slaves accept only peers whose data key they received from the master, so every process brings one.
    encrypted: bool = False
    token_ratio_max: float = 100.0  # a push that counts this many times the usual tokens for a step is refused
    # The window starts again with each push that is admitted to it, within pacing.longest_window_s().
    grace_sliding: bool = False
    # No round begins while the journal's replica has not all decisions.
    pause_without_replica: bool = False
    # Where the settings name no preset: what each preset makes of the settings that presets decide, and its penalty.
    presets: Mapping[str, tuple[Mapping[str, Any], PenaltyConfig]] = field(default_factory=dict, compare=False)

    def of_run(self, ledger: Ledger) -> RunConfig:
        """The settings for this run: one that has begun keeps its preset unless the settings name one, whatever the
        default is in this release. Raises ConfigError for a preset that this release does not have."""
        name = ledger.preset or (EARLIER_DEFAULT_PRESET if ledger.commit else "")
        if not self.presets or not name:
            return self
        if name not in self.presets:
            raise ConfigError(
                f"run {self.run_id} was begun with preset {name!r}, which this release does not have",
                "use the release that began it, or name a preset",
            )
        decided, penalty = self.presets[name]
        return replace(self, settings=replace(self.settings, **decided), penalty=penalty)

    @property
    def evict_after_s(self) -> float:
        return self.settings.heartbeat_s * self.settings.evict_after_beats


# ---- outbox ----------------------------------------------------------------------------------------------------------
#
# The queue of outgoing effects, with the journal as a barrier.


class Outbox:
    """Outgoing effects. An effect that may depend on a journal entry is released only once the entry is durable."""

    def __init__(self) -> None:
        self._ready: list[Effect] = []
        self._held: deque[tuple[int, list[Effect]]] = deque()
        self._next_entry = 1

    def put(self, effect: Effect) -> None:
        urgent = isinstance(effect, Log | Record) or (isinstance(effect, Halt) and effect.exit_code != 0)
        if self._held and not urgent:
            self._held[-1][1].append(effect)
        else:
            self._ready.append(effect)

    def journal(self, kind: str, record_json: str, snapshot_json: str) -> None:
        entry = self._next_entry
        self._next_entry += 1
        self._ready.append(WriteJournal(entry, kind, record_json, snapshot_json))
        self._held.append((entry, []))

    def written(self, entry_id: int) -> None:
        while self._held and self._held[0][0] <= entry_id:
            self._ready.extend(self._held.popleft()[1])

    @property
    def waiting(self) -> bool:
        """Whether an entry is not durable yet."""
        return bool(self._held)

    def take(self) -> list[Effect]:
        ready, self._ready = self._ready, []
        return ready


# ---- allow list ------------------------------------------------------------------------------------------------------
#
# The data keys that the slaves accept: one for each attached reader, slave and rank of a cluster. Pure.
#
# Every slave receives the whole list after Welcome and whenever it changes, so a key that is removed is refused from
# then on. In memory only: a key lasts as long as its process, and after a restart of the master every process sends
# its key again. One key never belongs to two owners, so a message's key identifies its sender.


KEPT_FOR_SLAVES = 256
"""Places that ranks and readers leave free: without its slaves no round can end."""


class AllowList:
    """The list of accepted data keys.

    encrypted: whether this run's data flow uses keys. If not, a process that brings a key is refused and no list is
    sent.
    """

    def __init__(self, encrypted: bool) -> None:
        self.encrypted = encrypted
        self._keys: dict[tuple[messages.KeyRole, str], tuple[bytes, ...]] = {}
        self._told: tuple[messages.AllowedKey, ...] = ()
        self._touched = False

    def check(self, role: messages.KeyRole, owner: str, key: bytes, rank_keys: Sequence[bytes] = ()) -> None:
        """Checks the key of an owner's process, and those of its other ranks; changes nothing.

        Raises Refused: KEY for keys that cannot be this owner's, BUSY where the list has no room for them.
        """
        who = f"{role.name.lower()} {owner!r}"
        if not self.encrypted and (key or rank_keys):
            raise Refused(
                RefusalCode.KEY,
                f"{who} brings a data key, and this run's data flow is not encrypted: start the master with --keys, or "
                "all other processes with --insecure",
            )
        keys = (key, *rank_keys)
        odd = next((len(one) for one in keys if len(one) != CURVE_KEY_BYTES), None)
        if self.encrypted and odd is not None:
            raise Refused(
                RefusalCode.KEY,
                f"{who} brings a data key of {odd} bytes, {CURVE_KEY_BYTES} are needed: this run's data flow is "
                "encrypted; start every process with --keys",
            )
        if len(set(keys)) != len(keys):
            raise Refused(RefusalCode.KEY, f"{who} brings one data key for two ranks: every process makes its own")
        others = {name: held for name, held in self._keys.items() if name != (role, owner)}
        holder = next((name for name, held in others.items() if not set(held).isdisjoint(keys)), None)
        if holder is not None:
            raise Refused(
                RefusalCode.KEY,
                f"{who} brings the data key of {holder[0].name.lower()} {holder[1]!r}: every process makes its own",
            )
        n_keys = sum(map(len, others.values())) + len(keys)
        room = MAX_ALLOWED_KEYS if role is messages.KeyRole.SLAVE else MAX_ALLOWED_KEYS - KEPT_FOR_SLAVES
        if n_keys > room:
            raise Refused(
                RefusalCode.BUSY,
                f"with {who} the slaves would admit {n_keys} data keys, at most {room} can be: wait for a "
                "cluster to leave, or give this one fewer ranks",
                retry_after_s=5.0,
            )

    def put(self, role: messages.KeyRole, owner: str, key: bytes, rank_keys: Sequence[bytes] = ()) -> None:
        """Makes these keys the owner's only accepted keys. Raises Refused as check() does."""
        self.check(role, owner, key, rank_keys)
        if self.encrypted:
            self._keys[role, owner] = (key, *sorted(rank_keys))
            self._touched = True

    def remove(self, role: messages.KeyRole, owner: str) -> None:
        """Removes the owner, which is gone; does nothing when it is not on the list."""
        self._touched |= self._keys.pop((role, owner), None) is not None

    def keep(self, role: messages.KeyRole, owners: Collection[str]) -> None:
        """Removes all other owners of this role."""
        for name in [name for name in self._keys if name[0] is role and name[1] not in owners]:
            self.remove(*name)

    def keys(self) -> tuple[messages.AllowedKey, ...]:
        """The whole list, in an order that does not depend on the order of arrival."""
        return tuple(
            messages.AllowedKey(role, owner, key) for (role, owner), keys in sorted(self._keys.items()) for key in keys
        )

    def news(self) -> tuple[messages.AllowedKey, ...] | None:
        """The list if it differs from the one returned last, else None. It then counts as sent."""
        if not self._touched:
            return None
        self._touched, before, self._told = False, self._told, self.keys()
        return self._told if self._told != before else None


# ---- shared ----------------------------------------------------------------------------------------------------------


RECENT_ROUNDS = 32

COMMITS_KEPT = 8
"""Versions whose digests are kept, to check a cluster's copy when the slaves lost them; the oldest live base is
rarely older. A record has the size of the ledger."""


class SharedState:
    """Shared state of one master process."""

    def __init__(self, config: RunConfig, epoch: int, ledger: Ledger, wall_offset_s: float) -> None:
        self.epoch = epoch
        self.ledger = ledger
        self.config = config
        self.keep_preset()
        self.wall_offset_s = wall_offset_s
        self.now_s = 0.0
        self.story = MachineHistory()
        self.out = Outbox()

        # Clusters, slaves and readers
        self.members: dict[str, records.Member] = {}
        self.slaves: dict[SlaveId, records.Slave] = {}
        self.pins: dict[int, records.Pin] = {}
        self.schedule = TransferScheduler()
        self.link_rates = LinkRates()
        self.allowed = AllowList(config.encrypted)
        self.seed_cluster: str | None = None
        self.leave_ready: list[str] = []  # clusters that wait to leave, and whose push is decided
        # The last call of each member from before the master's restart, with its old incarnation.
        self.called_of_old_s: dict[str, float] = {}
        # Since when a cluster with its own data counts the tokens of its next push; unknown after the master's restart.
        self.counted_since_s: dict[str, float] = {}
        self.aborted_of: dict[str, int] = {}
        self.changes = records.OperatorChanges()
        self._were_enough = ledger.tokens > 0

        # Rounds and versions
        self.round = records.RoundState(Phase(records.ROUND_TABLE, self.story))
        self.recovery = records.RecoveryState(Phase(records.RECOVERY_TABLE, self.story))
        self.reshard = records.ReshardState(Phase(records.RESHARD_TABLE, self.story))
        self.waiters: dict[PushId, list[tuple[int, float]]] = {}  # calls that wait for a verdict: (token, until)
        self.published: records.Kept | None = None
        self.kept: dict[Version, records.Kept] = {}  # versions that slaves can still serve
        self.commits: deque[CommitInfo] = deque([ledger.commit] if ledger.commit else [], maxlen=COMMITS_KEPT)
        # The state that follows from this process's records; any other state is written with the next judgement.
        self.recorded_detector: DetectorState | None = None
        self.recent: deque[messages.RoundSummary] = deque(maxlen=RECENT_ROUNDS)
        self.rounds_aborted = 0
        self.stopped_s: float | None = None

        # Pacing (pacing.py)
        self.window_opened_s: float | None = None
        self.planned_window_s: float | None = None  # the target of dynamic local steps: one time for all clusters
        self.publish_interval_s = 0.0
        self.published_s: float | None = None

        # Alarms (alarms.py)
        self.alike: dict[tuple[str, str], int] = {}  # by pair: rounds in which both pushed the same
        self.same_data: dict[tuple[str, str], messages.Alarm] = {}  # by pair, while it lasts
        self.told_by_beats: dict[
            tuple[str, tuple[str, ...]], messages.Alarm
        ] = {}  # by kind and clusters, while it lasts
        self.replica_trouble = self.lease_trouble = ""
        self.token_doubts: dict[str, tuple[messages.Alarm, float]] = {}  # by cluster, and since when

    def keep_preset(self) -> None:
        """Continues with the ledger's preset where the settings name none. Raises ConfigError."""
        self.config = self.config.of_run(self.ledger)
        self.ledger.preset = self.config.settings.preset

    def outer_step_words(self) -> str:
        settings = self.config.settings
        return f"preset {settings.preset}, outer rate {settings.outer_lr:g} and momentum {settings.outer_momentum:g}"

    # ---- clusters and slaves ----

    def check_run(self, run_id: str, who: str) -> None:
        """Raises Refused(RUN_ID) for another run's id; an empty id is a peer that does not know it yet."""
        if run_id and run_id != self.config.run_id:
            raise Refused(
                RefusalCode.RUN_ID,
                f"{who} asks for run {run_id!r}, but this master serves run {self.config.run_id!r}: "
                "check the master's address, or give the run's id",
            )

    def member_of(self, caller: messages.Caller) -> records.Member:
        """The member that calls. Raises Refused: RUN_ID, STALE_EPOCH or FENCED (for the last two: join again)."""
        self.check_run(caller.run_id, f"cluster {caller.name!r}")
        if caller.epoch != self.epoch:
            entry = self.ledger.clusters.get(caller.name)
            if entry is not None and caller.incarnation == entry.incarnation:
                self.called_of_old_s[caller.name] = self.now_s
            restarted = "the master was restarted; join again, nothing is lost"
            newer = "a newer master serves this run, or this one's directory is an old copy; if two run, stop this one"
            raise Refused(
                RefusalCode.STALE_EPOCH,
                f"cluster {caller.name!r} names the master's epoch {caller.epoch}, this is epoch {self.epoch}: "
                + (restarted if caller.epoch < self.epoch else newer),
            )
        member = self.members.get(caller.name)
        if member is None or caller.incarnation != member.incarnation:
            now = f"incarnation {member.incarnation} is live" if member else "it was evicted or has left"
            raise Refused(
                RefusalCode.FENCED,
                f"incarnation {caller.incarnation} of cluster {caller.name!r} is no longer valid ({now}): join again",
            )
        self.ledger.entry(caller.name).spoke = member.incarnation
        return member

    def live(self) -> list[records.Member]:
        """Members in cluster-id order."""
        return [self.members[name] for name in sorted(self.members)]

    def ready_slaves(self) -> list[records.Slave]:
        return [slave for _, slave in sorted(self.slaves.items()) if slave.ready]

    def slaves_expected(self) -> list[SlaveId]:
        return list(self.ledger.placement.slaves) if self.ledger.placement else sorted(self.slaves)

    def holds_blocks(self, slave: SlaveId) -> bool:
        """Whether blocks are placed on it, or none are placed yet."""
        placement = self.ledger.placement
        return placement is None or slave in placement.slaves

    def all_slaves_ready(self) -> bool:
        """Whether all slaves are ready. Once blocks are placed, only those that hold blocks count, not the settings."""
        placement = self.ledger.placement
        return placement is not None and len(self.ready_slaves()) == len(placement.slaves)

    def seeder(self) -> str | None:
        """The cluster that is to push the first parameters; not a drained one, which may begin no push."""
        name, draining = self.seed_cluster, self.ledger.draining
        if name in draining and name in self.members and self.members[name].push is None:
            self.seed_cluster = min((other for other in self.members if other not in draining), default=None)
        return self.seed_cluster

    def enough_clusters(self) -> bool:
        """Whether min_clusters were ever here at once: only the first round waits for them."""
        self._were_enough = self._were_enough or len(self.members) >= self.config.min_clusters
        return self._were_enough

    @property
    def everything_out(self) -> bool:
        """Whether the last committed version, if there is one, is published and held by the slaves."""
        published = self.published.version if self.published else None
        return published == self.ledger.version and not self.recovery.active

    @property
    def waits_for_replica(self) -> bool:
        return self.config.pause_without_replica and bool(self.replica_trouble)

    @property
    def durable(self) -> Version | None:
        """The newest version that is on every slave's disk; None while that is not known."""
        if self.config.settings.durability != "async":
            return self.published.version if self.published else None
        known = [self.slaves[name].durable if name in self.slaves else None for name in self.slaves_expected()]
        there = [version for version in known if version is not None]
        return min(there) if there and len(there) == len(known) else None

    def newest_timeline(self) -> int:
        """The newest timeline of any version on any slave, also a given up one, or in the store that one was restored
        from; 0 when there is none."""
        found = (s for slave in self.slaves.values() for s in slave.snapshots)
        return max((max(s.version.timeline, s.restored_timeline) for s in found if s.committed), default=0)

    def replace_ledger(self, ledger: Ledger, commit: CommitInfo) -> None:
        """Continues the run from another state, on a new timeline; members stay, their leases do not."""
        if ledger.placement != self.ledger.placement:
            self.commits.clear()  # their digests are of other shards
        self.ledger = ledger
        ledger.directories |= {name: self.slaves[name].directory_id for name in ledger.slaves if name in self.slaves}
        for member in self.members.values():
            ledger.entry(member.cluster).process_id = member.process_id
        self.set_commit(commit)
        self.take_back_end()
        self.published, self.kept, self.pins = None, {}, {}
        self.stopped_s = None
        for member in self.members.values():
            member.held_at_join = ()
            member.last_lease = (member.last_lease[0] - 1, ())
            member.last_admitted_s = None

    def tell_rollback(
        self, lost: Version | None, origin: Version, donor: str | None, lost_tokens: int, n_pushes: int
    ) -> None:
        """Reports a ROLLBACK on the tape, in the log and as an alarm."""
        now = self.ledger.version
        self.record(tape.RolledBack("recovery", version=now, origin=origin, donor=donor, lost_tokens=lost_tokens))
        how = f"its parameters come from cluster {donor}, momentum is zero" if donor else "from the slaves' snapshots"
        sentence = (
            f"ROLLBACK to version {origin}, now {now} ({how}): the slaves lost version {lost}; {lost_tokens} tokens of "
            f"{n_pushes} pushes are undone and their data is trained again"
        )
        self.alarm(messages.Alarm(AlarmKind.ROLLBACK, (), sentence))

    def tell_new_timeline(self, origin: Version) -> None:
        """Reports a new timeline that undoes no known version."""
        now = self.ledger.version
        self.record(tape.RolledBack("recovery", version=now, origin=origin, donor=None, lost_tokens=0))
        sentence = (
            f"the run goes on from version {origin} on a new timeline, as {now}: newer versions may have been "
            "published and lost, with durability async or before a restore from an object store"
        )
        self.alarm(messages.Alarm(AlarmKind.NEW_TIMELINE, (), sentence))

    def set_commit(self, commit: CommitInfo) -> None:
        """Makes this commit's version the ledger's newest."""
        self.ledger.commit = commit
        self.commits.append(commit)

    def s_max(self) -> int:
        return self.config.settings.max_staleness_versions or max(8, 4 * len(self.members))

    def settings(self) -> messages.Settings:
        """The settings that are sent to all processes, with the token limit that an operator may have moved."""
        settings = self.config.settings
        limit = self.ledger.token_limit(settings.tk_max_tokens)
        return settings if limit == settings.tk_max_tokens else replace(settings, tk_max_tokens=limit)

    def take_back_end(self) -> bool:
        """Continues a run that ended at its token limit, if the limit was moved or fewer tokens are applied now.

        Returns whether it continues. An operator's stop is not taken back.
        """
        ledger, limit = self.ledger, self.settings().tk_max_tokens
        if not ledger.stopping or ledger.stop_asked or 0 < limit <= ledger.tokens:
            return False
        ledger.stopping, self.stopped_s = "", None
        return True

    def pushes(self) -> Iterator[records.Push]:
        for member in self.live():
            if member.push is not None:
                yield member.push

    def admitted(self) -> list[records.Push]:
        """The pushes in the open window, or in the one that opens next."""
        return [push for push in self.pushes() if push.phase.now is records.PushPhase.ADMITTED]

    def end_pulls(self, owner: str) -> None:
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin.owner != owner}

    def placement_spec(self) -> messages.PlacementSpec:
        placement = self.ledger.placement
        assert placement is not None, "asked for only once blocks are placed"
        return self.spec_of(placement)

    def spec_of(self, placement: Placement) -> messages.PlacementSpec:
        """The placement with the present addresses of its slaves."""
        return messages.PlacementSpec(
            tuple(self._address(slave) for slave in placement.slaves),
            placement.slave_of_block,
            placement.placement_hash,
        )

    def _address(self, name: SlaveId) -> messages.SlaveAddress:
        slave = self.slaves.get(name)
        return (
            messages.SlaveAddress(name, slave.endpoint, slave.curve_key)
            if slave is not None
            else messages.SlaveAddress(name, "")
        )

    # ---- effects ----

    def reply(self, token: int, body: messages.ClusterReply | messages.StatusReply | messages.OperatorReply) -> None:
        self.out.put(Reply(token, body))

    def refuse(self, token: int, refused: Refused) -> None:
        self.out.put(Refuse(token, messages.Refusal(refused.code, refused.sentence, refused.retry_after_s)))

    def command(self, slave: records.Slave, body: messages.CommandBody, cause: str) -> None:
        if slave.link is not None:
            self.out.put(
                ToSlave(
                    slave.link, messages.SlaveCommand(self.config.run_id, self.epoch, slave.incarnation, cause, body)
                )
            )

    def command_all(self, body: messages.CommandBody, cause: str) -> None:
        for slave in self.ready_slaves():
            self.command(slave, body, cause)

    def tell_allowed(self) -> None:
        """Sends a changed list of data keys to every attached slave."""
        keys = self.allowed.news()
        if keys is not None:
            for _, slave in sorted(self.slaves.items()):
                self.command(slave, messages.Allow(keys), "keys")

    def close(self, link: int, refused: Refused) -> None:
        self.out.put(CloseLink(link, messages.Refusal(refused.code, refused.sentence, refused.retry_after_s)))

    def journal(self, kind: str, record: dict[str, object]) -> None:
        """Makes the present ledger durable, together with the record of what changed it."""
        self.out.journal(kind, canonical({"kind": kind, "epoch": self.epoch} | record), self.ledger.to_json())

    def record(self, record: Record) -> None:
        self.story.add(self.now_s, record.kind, record.cause, str(record.fields))
        self.out.put(record)

    def log(self, key: str, sentence: str, level: int = logging.INFO, cause: str = "") -> None:
        self.out.put(Log(level, key, sentence, cause))

    def alarm(self, alarm: messages.Alarm) -> None:
        """Reports something that a person should check."""
        about = list(alarm.clusters)
        self.record(tape.AlarmRaised("-", code=str(alarm.kind), clusters=about, sentence=alarm.sentence))
        self.log(f"alarm {alarm.kind} {about}", alarm.sentence, logging.WARNING)

    def halt(self, exit_code: int, sentence: str) -> None:
        self.out.put(Halt(exit_code, sentence))
