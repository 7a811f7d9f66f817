"""Checks every simulation while it runs: bytes of pushes, whole pulls, reported verdicts, order of versions.

The invariants over facts (journal, tapes, manifests) are in dips.judge.invariants, which the run asks after every fact.
A violation is a sentence; the run goes on, and its seed fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dips.core.ids import PushId, Version
from dips.core.layout import Chunk, chunks_of, shard_digest
from dips.core.machine import HISTORY_LENGTH
from dips.core.messages import ClusterRequest, HeartbeatRequest, VerdictKind
from dips.core.protocol import MAX_LEASED_CHUNKS
from dips.core.wire import WIRE_DTYPES, Codec
from dips.lab.sim.arithmetic import Key, ModelVector, Value
from dips.lab.sim.content import Written, averaged, key_of, merged, published, rates_of
from dips.lab.sim.counts import BYSTANDER_S, BYSTANDER_SHARE
from dips.lab.sim.faults.world import FaultWorld
from dips.lab.sim.hosts.cluster import ClusterHost
from dips.lab.sim.hosts.master import MasterHost
from dips.lab.sim.hosts.slave import SlaveHost
from dips.lab.sim.kernel import SimulatedProcess
from dips.master.state import pacing
from dips.master.state.leases import MAX_RANGES_IN_A_MESSAGE
from dips.master.state.ledger import APPLIED_KEPT, push_from_json
from dips.master.state.pulls import MAX_READERS
from dips.master.state.shared import COMMITS_KEPT, RECENT_ROUNDS
from dips.master.state.slave_links import DIALS_AGAIN_BEATS
from dips.slave.ring import SPARE_FILES
from dips.slave.state.slave import MAX_WAITING
from dips.worker.state import effects, tape
from dips.worker.state.cluster import ClusterMachine

KEPT_VERSIONS = 64
"""Versions whose digests are kept; more than any process may still pull."""


@dataclass
class Checks:
    """The checks of one run. `sent`: each cluster's last push, how it was written, and the digest of its bytes.
    `digests`: what each slave holds of a version."""

    world: FaultWorld
    sent: dict[str, tuple[PushId, Codec, bytes]] = field(default_factory=dict)
    digests: dict[Version, Mapping[str, str]] = field(default_factory=dict)
    placed: dict[Version, Mapping[int, str]] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    published: Version | None = None
    ever_published: set[Version] = field(default_factory=set)
    owners: dict[tuple[str, int], dict[Chunk, int]] = field(default_factory=dict)
    """Of a cluster of several ranks, in one life: which of them sends each chunk."""

    def __post_init__(self) -> None:
        plan = self.world.plan
        self.chunks = chunks_of(plan.layout.blocks, plan.config.settings.chunk_bytes)
        self.checksum = plan.arithmetic.checksum

    # ---- pushes and versions ----

    def pushing(self, push: PushId, wire: Codec, vector: ModelVector) -> None:
        """Check that the bytes of a push never change, as long as it is written in the same form."""
        digest = shard_digest([self.checksum(vector.value(chunk)) for chunk in self.chunks])
        *before, known = self.sent.get(push.cluster, (push, wire, digest))
        if before == [push, wire] and known != digest:
            self.world.violated(f"push {push} is sent with other bytes than before")
        self.sent[push.cluster] = (push, wire, digest)

    def part_sent(self, push: PushId, life: int, rank: int, chunks: Sequence[Chunk]) -> None:
        """Check that one rank of a cluster owns each chunk of its pushes."""
        owners = self.owners.setdefault((push.cluster, life), {})
        for chunk in chunks:
            if (owner := owners.setdefault(chunk, rank)) != rank:
                self.world.violated(f"ranks {owner} and {rank} of {push.cluster} both own {chunk} of push {push}")
                return

    def staged(self, slave: str, push: PushId, wire: Codec, values: Mapping[Key, Value | None]) -> None:
        """A slave says that it has all of a push."""
        for key, value in values.items():
            if value is None:
                self.world.violated(f"slave {slave} has staged push {push}, whose chunk {key} has not landed")
                return

    def journalled(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        """Take a durable record of the journal."""
        if record["kind"] in ("COMMIT", "ROLLBACK", "RESHARD"):
            version = Version(*record["version"])
            self.digests[version], self.placed[version] = dict(record["digests"]), slave_of_block
            if len(self.digests) > KEPT_VERSIONS:
                oldest = min(self.digests)
                del self.digests[oldest], self.placed[oldest]
            self.note_applied(record)

    def note_applied(self, record: Mapping[str, Any]) -> None:
        self.applied |= {str(push_from_json(p["push"])) for p in record["participants"] if p["verdict"] == "APPLIED"}

    def journal_lost(self) -> None:
        """The master's disk is lost, or restored from a copy."""

    # ---- what clusters receive and read ----

    def pulled(self, name: str, version: Version, values: Mapping[Key, Value]) -> None:
        """I3: check that a pulled version is whole and was committed."""
        known = self.digests.get(version)
        slave_of_block = self.placed.get(version, {})
        if known is None:
            self.world.violated(f"{name} pulled version {version}, which was never committed")
            return
        for slave, digest in known.items():
            keys = [key_of(chunk) for chunk in self.chunks if slave_of_block.get(chunk.block_id) == slave]
            if shard_digest([self.checksum(values[key]) for key in keys]).hex() != digest:
                self.world.violated(
                    f"{name} pulled something else of {slave} as version {version} than was merged (I3)"
                )

    def told(self, name: str, fields: Mapping[str, Any]) -> None:
        """A cluster received a verdict: APPLIED must be durable by then (a ROLLBACK may have overtaken the answer)."""
        kind = fields.get("verdict", fields.get("kind"))
        if kind == "APPLIED" and fields["push"] not in self.applied:
            self.world.violated(f"{name} received APPLIED for push {fields['push']}, which no durable COMMIT holds")

    def publish(self, version: Version) -> None:
        """I17: check that published versions never go back, unless a disk was lost or durability is async."""
        before, self.published = self.published, version
        self.ever_published.add(version)
        if before is None or (version >= before and version.timeline == before.timeline):
            return
        if not self.world.may_roll_back:
            self.world.violated(f"published went from {before} to {version}, and no disk was lost (I17)")


# ---- content checks --------------------------------------------------------------------------------------------------
#
# Additional checks when chunks are symbols: each version is what its COMMIT record says.
#
# A symbol encodes how a chunk was made, so every version is computed a second time from the journal alone and from what
# clusters pushed, and compared with what slaves and clusters hold.


ContentByKey = dict[Key, tuple[int, int, int]]
"""Each chunk's theta, as readers hold it, its momentum, and its residual."""


@dataclass
class ContentChecks(Checks):
    """The checks of one run."""

    content: dict[Version, ContentByKey] = field(default_factory=dict)  # what every version must hold
    pushes: dict[PushId, ModelVector] = field(default_factory=dict)  # what slaves hold of each push, as sent last
    first: dict[tuple[PushId, Codec], ModelVector] = field(default_factory=dict)
    unseen: set[Version] = field(default_factory=set)
    """Versions that were committed in a lost journal and had not reached any other process by then."""

    def pushing(self, push: PushId, wire: Codec, vector: ModelVector) -> None:
        known = self.first.setdefault((push, wire), vector)
        if known != vector:
            self.world.violated(f"push {push} is sent with other bytes than before")
        self.pushes[push] = vector.rounded if isinstance(vector, Written) else vector

    def staged(self, slave: str, push: PushId, wire: Codec, values: Mapping[Key, Value | None]) -> None:
        """Check that a slave that has all of a push has what was sent, whoever sent it."""
        super().staged(slave, push, wire, values)
        vector = self.first.get((push, wire))
        if vector is None:
            self.world.violated(f"slave {slave} has staged push {push} as {wire.name}, which no cluster sent")
            return
        sent = vector.rounded if isinstance(vector, Written) else vector
        for chunk in self.chunks:
            value = values.get(key_of(chunk))
            if value is not None and value != sent.value(chunk):
                self.world.violated(f"slave {slave} has staged push {push} with another content of {chunk}")
                return

    def journalled(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        """Check a durable record: a COMMIT must merge exactly the pushes that it names."""
        match record["kind"]:
            case "COMMIT":
                self._committed(record, slave_of_block)
            case "ROLLBACK":
                self._rolled_back(record, slave_of_block)
            case "RESHARD":
                self._resharded(record, slave_of_block)
            case "ADOPT":
                self._adopted(Version(*record["version"]))

    def _committed(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        version = Version(*record["version"])
        accepted = [item for item in record["participants"] if item["verdict"] == "APPLIED"]
        vectors = [self.pushes.get(push_from_json(item["push"])) for item in accepted]
        if any(vector is None for vector in vectors):
            self.world.violated(f"version {version} merges a push that no cluster sent")
            return
        before = self.content.get(Version(version.timeline, version.v - 1))
        judgement = record["judgement"]
        if judgement is not None and before is None:
            self.world.violated(f"version {version} follows a version that was never committed")
            return
        content = self._merge(before, [v for v in vectors if v is not None], judgement)
        self._check_digests(version, content, record["digests"], slave_of_block)
        if version in self.unseen and version not in self.world.committed_somewhere:
            self.content[version] = content
        known = self.content.setdefault(version, content)
        if known != content:
            self.world.violated(f"version {version} has two contents (I2)")
        self.note_applied(record)

    def _merge(self, before: ContentByKey | None, vectors: Sequence[ModelVector], judgement: Any) -> ContentByKey:
        if judgement is None or before is None:
            return {key_of(chunk): (vectors[0].value(chunk), 0, 0) for chunk in self.chunks}
        weights = [float(text) for text in judgement["weights"]]
        step = {name: float(text) for name, text in judgement["outer_step"].items()}
        names = ("outer_lr", "momentum_decay", "momentum_lookahead", "gradient_weight")
        rates = rates_of(*(step[name] for name in names))
        blocks = self.world.plan.layout.blocks

        codec = WIRE_DTYPES[self.world.plan.config.settings.pull_wire]

        def after(chunk: Chunk) -> tuple[int, int, int]:
            theta, momentum, residual = before[key_of(chunk)]
            pushed = [vector.value(chunk) for vector in vectors]
            if blocks[chunk.block_id].averaged:
                stepped, moved = averaged(theta, pushed, weights, float(judgement["rho"]))
            else:
                stepped, moved = merged(theta, momentum, pushed, weights, step["scale"], rates)
            now, residual = published(codec, stepped, theta, residual)
            return now, moved, residual

        return {key_of(chunk): after(chunk) for chunk in self.chunks}

    def _rolled_back(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        version, origin = Version(*record["version"]), record["origin"]
        known = self.content.get(Version(*origin)) if origin is not None else None
        if known is None:
            self.world.violated(
                f"version {version} goes back to {origin and Version(*origin)}, which was never committed"
            )
            return
        content = {key: (theta, 0, 0) for key, (theta, _, _) in known.items()} if record.get("donor") else known
        self._check_digests(version, content, record["digests"], slave_of_block)
        self.content.setdefault(version, content)
        self.note_applied(record)

    def _resharded(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        """A RESHARD: the same parameters and momentum on other slaves, and no residual."""
        version, before = Version(*record["version"]), Version(*record["from_version"])
        known = self.content.get(before)
        if known is None:
            self.world.violated(f"version {version} moves {before}, which was never committed")
            return
        known = {key: (theta, momentum, 0) for key, (theta, momentum, _) in known.items()}
        self._check_digests(version, known, record["digests"], slave_of_block)
        if version in self.unseen and version not in self.world.committed_somewhere:
            self.content[version] = known
        if self.content.setdefault(version, known) != known:
            self.world.violated(f"version {version} has two contents (I2)")

    def _adopted(self, version: Version) -> None:
        """An ADOPT: the slaves' history is taken over; versions that only a lost journal had are forgotten."""
        self.unseen |= {known for known in self.content if known > version and known not in self.ever_published}

    def journal_lost(self) -> None:
        """The master lost its journal: versions that no slave has committed by now were only in it, and may be named
        again."""
        self.unseen |= {known for known in self.content if known not in self.ever_published}

    def _check_digests(
        self, version: Version, content: ContentByKey, digests: Mapping[str, str], slave_of_block: Mapping[int, str]
    ) -> None:
        for slave, digest in digests.items():
            keys = [key_of(chunk) for chunk in self.chunks if slave_of_block.get(chunk.block_id) == slave]
            mine = [self.checksum(content[key][0]) for key in keys]
            if shard_digest(mine).hex() != digest:
                self.world.violated(f"slave {slave} holds something else as version {version} than what was merged")

    def pulled(self, name: str, version: Version, values: Mapping[Key, int]) -> None:
        """I3: check that a pulled version is whole and was committed."""
        known = self.content.get(version)
        if known is None:
            self.world.violated(f"{name} pulled version {version}, which was never committed")
        elif any(values.get(key) != known[key][0] for key in map(key_of, self.chunks)):
            self.world.violated(f"{name} pulled something else as version {version} than what was merged (I3)")


# ---- name checks -----------------------------------------------------------------------------------------------------
#
# Checks who owns each name: a process that sends beats is never displaced by another one under its name.
#
# A slave is known by its directory, a cluster by its process, as the master's tape names them. The
# simulator knows what no master does: whether the previous process was alive and could reach the master.


@dataclass
class _Owner:
    """The owner of a name. heard_s: time of its last beat at the master; of a slave, when its stream was last open."""

    drawn: str
    incarnation: str
    last_seen_s: float
    here: bool = False
    """Whether it is a slave with a stream."""


class NameChecks:
    """Takes from the world: starts of processes, beats that reach a master, and the master's tape."""

    def __init__(self, world: FaultWorld) -> None:
        self._world = world
        self._processes: dict[str, tuple[SimulatedProcess, int]] = {}
        self._owners: dict[tuple[str, str], _Owner] = {}

    def began(self, process: SimulatedProcess, drawn: bytes) -> None:
        """Note the identity of this incarnation of a process."""
        self._processes[drawn.hex()] = (process, process.generation)

    def called(self, request: ClusterRequest) -> None:
        owner = self._owners.get(("cluster", request.caller.name))
        if isinstance(request, HeartbeatRequest) and owner is not None:
            if owner.incarnation == str(request.caller.incarnation):
                owner.last_seen_s = self._world.kernel.now_s

    def said(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Check a line of a master's tape."""
        if len(self._world.masters) > 1 or self._world.state_lost:
            self._owners.clear()  # each of two masters knows only its own clients; one that lost its journal knows none
        match kind:
            case "join":
                self._takes(("cluster", fields["cluster"]), fields["process"], fields["incarnation"])
            case "slave_attached":
                self._takes(("slave", fields["slave"]), fields["directory"], fields["incarnation"])
            case "leave" | "evict" if "cluster" in fields:
                self._owners.pop(("cluster", fields["cluster"]), None)
            case "slave_lost":
                if owner := self._owners.get(("slave", fields["slave"])):
                    owner.last_seen_s, owner.here = self._world.kernel.now_s, False
            case "slave_dismissed":
                self._owners.pop(("slave", fields["slave"]), None)
            case "epoch" if fields["version"] == "None":
                self._owners.clear()

    def _takes(self, whose: tuple[str, str], drawn: str, incarnation: str) -> None:
        world, owner = self._world, self._owners.get(whose)
        if owner is not None and owner.drawn != drawn and self._is_alive(owner):
            world.violated(
                f"{whose[0]} {whose[1]} was taken over, as incarnation {incarnation}, from a process that sends beats"
            )
        self._owners[whose] = _Owner(drawn, incarnation, world.kernel.now_s, whose[0] == "slave")

    def _is_alive(self, owner: _Owner) -> bool:
        """Whether the owner is alive, and can reach the master."""
        world = self._world
        process, generation = self._processes[owner.drawn]
        cut_off = world.net.is_cut(process.name, world.masters[0].at)
        if not process.running or process.generation != generation or cut_off:
            return False
        dials_s = DIALS_AGAIN_BEATS * world.plan.config.settings.heartbeat_s
        return owner.here or world.kernel.now_s - owner.last_seen_s < dials_s


# ---- budgets ---------------------------------------------------------------------------------------------------------
#
# I16: checks what master, slaves and clusters keep in memory and on disk against the formulas that bound it.
#
# Checked at every publish and after every so many events. The largest use of each budget is counted, which shows bounds
# that are never approached.


Used = Iterator[tuple[str, int, int]]
"""Names of budgets, with the used amount and the limit."""

CALLS_OF_A_CLUSTER = 4
"""Calls of a cluster that may wait for a verdict at once: its own, and abandoned ones that are not yet noticed."""

FOREIGN_CALLS = 16
"""Repeated, late and hostile calls."""

PIECES_OF_A_CHUNK = 4
"""Pieces into which steps, pushes and returns cut a leased chunk of data."""


class Budgets:
    """The budgets of one run."""

    def __init__(self, world: FaultWorld) -> None:
        self._world = world

    def check(self) -> None:
        """Check all live processes now."""
        world = self._world
        for master in world.masters:
            self._compare("master", self._of_master(master))
        for slave in world.slaves.values():
            self._compare(slave.name, self._of_slave(slave))
        for cluster in world.clusters.values():
            self._compare(cluster.name, self._of_cluster(cluster))

    def _compare(self, who: str, used: Used) -> None:
        for what, size, most in used:
            self._world.counts.filled(what, size, most)
            if size > most:
                self._world.violated(f"{who}: {size} {what}, at most {most} may be (I16)")

    def _of_master(self, master: MasterHost) -> Used:
        if master.state is None:
            return
        run, config = master.state.shared, self._world.plan.config
        n = config.max_clusters
        yield "members", len(run.members), n
        yield "pins", len(run.pins), n + MAX_READERS
        yield "transfers that the schedule knows", run.schedule.n_under_way, n + MAX_READERS
        waiting = sum(map(len, run.waiters.values()))
        yield "calls that wait for a verdict", waiting, CALLS_OF_A_CLUSTER * n + FOREIGN_CALLS
        yield "versions that can be pulled", len(run.kept), config.pinned_versions + 2 + COMMITS_KEPT
        yield "COMMIT records in memory", len(run.commits), COMMITS_KEPT
        yield "rounds that status tells of", len(run.recent), RECENT_ROUNDS
        yield "lines of the master's story", len(run.story.lines), HISTORY_LENGTH
        yield "versions whose pushes are known", len(run.ledger.applied_in), APPLIED_KEPT
        yield "clusters in the ledger", len(run.ledger.clusters), len(self._world.clusters)
        if run.ledger.leases is not None:
            pieces = sum(1 for _ in run.ledger.leases.holdings())
            yield "pieces of the lease table", pieces, self._most_pieces(n)

    def _most_pieces(self, n_clusters: int) -> int:
        """What clusters hold, and one pass: passes that are over take no place, however many they are."""
        plan = self._world.plan
        held = n_clusters * (MAX_LEASED_CHUNKS + PIECES_OF_A_CHUNK)
        return held + PIECES_OF_A_CHUNK * plan.data.total_tokens // plan.data.chunk_tokens

    def _of_slave(self, slave: SlaveHost) -> Used:
        config, kept = self._world.plan.config, self._world.plan.snapshots_kept
        if slave.state is None:
            return
        yield "files of snapshots", sum(name.startswith("ring-") for name in slave.disk.names()), kept + SPARE_FILES
        yield "commands that wait for a job", slave.state.n_waiting, MAX_WAITING
        memory = slave.port.memory
        if memory is not None:
            yield "stagings of a slave", len(memory.table.stagings()), config.max_clusters
            yield "versions in a slave's memory", len(memory.readable) + (memory.shadow is not None), memory.n_buffers

    def _of_cluster(self, cluster: ClusterHost) -> Used:
        session, plan = cluster.session, self._world.plan
        if session is None or cluster.ranks is None:
            return
        yield "transfers of a cluster", cluster.ranks.n_jobs, 2
        if plan.data.chunk_tokens:
            ranges = len(session.shared.work.all_ranges())
            yield "ranges that a cluster holds", ranges, MAX_RANGES_IN_A_MESSAGE


# ---- waits -----------------------------------------------------------------------------------------------------------
#
# I15 with a bad cluster: checks how long the others wait for the verdicts of their pushes.
#
# Judged only in runs whose faults are all of one cluster: slow, dead, cut off or hostile. No other cluster may wait
# longer for it than the longest window (grace, or round_deadline_s) and one round time-out, in addition to two ordinary
# rounds: the one under way, and their own.


ROUNDS = 2

SLOWEST = 3.0
"""A job, a flush or a message takes up to so many times its mean; longer ones are rarer than one in a thousand."""


class VerdictWaits:
    """The waits of one run."""

    def __init__(self, world: FaultWorld) -> None:
        self._world = world
        self.judging = False
        self._since_s: dict[str, float] = {}
        self.judged = 0

    def said(self, cluster: str, kind: str) -> None:
        """Check a line of a cluster's tape."""
        if not self.judging or cluster == self._world.plan.sabotaged:
            return
        if kind == "admitted":
            self._since_s.setdefault(cluster, self._world.kernel.now_s)
        elif kind == "verdict" and (since_s := self._since_s.pop(cluster, None)) is not None:
            self._judge(cluster, self._world.kernel.now_s - since_s)
        elif kind in ("left", "failed", "fenced"):
            self._since_s.pop(cluster, None)

    def _judge(self, cluster: str, waited_s: float) -> None:
        world, most_s = self._world, self.most_s()
        if most_s is None or world.healed:
            return
        self.judged += 1
        world.counts.took(BYSTANDER_S, waited_s)
        world.counts.took(BYSTANDER_SHARE, waited_s / most_s)
        if waited_s > most_s:
            world.violated(
                f"{cluster} waited {waited_s:.1f} s for its verdict, at most {most_s:.1f} s because of "
                f"{world.plan.sabotaged} (I15)"
            )

    def most_s(self) -> float | None:
        """Two ordinary rounds, the longest window and one round time-out; None while no version is published."""
        plan, master = self._world.plan, self._world.newest_master()
        if master is None or master.state is None or master.state.shared.published is None:
            return None
        round_s = SLOWEST * (3 * plan.work_s + 4 * plan.flush_s + 12 * plan.delay_s)
        return ROUNDS * round_s + pacing.longest_window_s(master.state.shared) + plan.config.settings.round_timeout_s


# ---- residuals -------------------------------------------------------------------------------------------------------
#
# Checks what happens to a cluster's residual, by the last column of the table of verdicts (docs/protocol.md).
#
# Judged from outside the session: from its tape lines of one step, how it sent the push, and what it waits for.


def residual_fault(
    before: int, after: int, outputs: Sequence[effects.Effect], sent_as: Mapping[str, Codec], session: ClusterMachine
) -> str:
    """A sentence when one step of a session did something else to the residual than the table says; "" when not.

    before, after: ClusterModel.residual_mark. outputs: the effects of the step. sent_as: how each push of this
    incarnation was sent last.
    """
    if session.shared.residual != (after != 0):
        return f"the session {'knows' if session.shared.residual else 'denies'} a residual, the parameters have {after}"
    plan = session.pulling.plan
    replaced = plan is not None and plan.drops
    if replaced:
        return f"residual {after} outlives the steps that it comes from" if after else ""
    # Pushes whose APPLIED was received now
    verdicts = [item for item in outputs if isinstance(item, tape.VerdictReceived)]
    for push in [str(item.push) for item in verdicts if item.verdict == VerdictKind.APPLIED.name]:
        if push not in sent_as:
            return f"residual {after} outlives push {push}, and the form of that push is not known" if after else ""
        if sent_as[push].is_difference:
            kept = after not in (0, before)
            return "" if kept else f"push {push} was applied as differences, and residual {before} did not advance"
    moved = before != after and not (after == 0 and (_reinstalled(outputs) or _dropped_and_donating(outputs)))
    return f"residual {before} became {after}, which the table does not allow" if moved else ""


def _dropped_and_donating(outputs: Sequence[effects.Effect]) -> bool:
    """Whether the steps were dropped and, in the same step, their pull was replaced by donating a lost version."""
    drops = (VerdictKind.EXCLUDED.name, VerdictKind.ROLLED_BACK.name)
    dropped = any(
        isinstance(item, tape.BaseStale) or (isinstance(item, tape.VerdictReceived) and item.verdict in drops)
        for item in outputs
    )
    return dropped and any(isinstance(item, tape.VersionDonated) for item in outputs)


def _reinstalled(outputs: Sequence[effects.Effect]) -> bool:
    """Whether a version was installed for which steps were dropped, or this incarnation seeds the run."""
    return any(
        isinstance(item, effects.Install) or (isinstance(item, tape.PushBegun) and item.base is None)
        for item in outputs
    )
