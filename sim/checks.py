"""What is checked while the simulation runs, because only it knows the content: merges, pulls, told verdicts, budgets.

The invariants over facts (journal, tapes, manifests) stand in dips.sim.invariants and are checked here after every fact
too. A violation is a sentence; the run goes on, and its seed fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dips.core.chunks import chunks_of, shard_digest
from dips.core.ids import Incarnation, PushId, Version
from dips.master.state.pulls import MAX_READERS
from dips.sim.content import Key, Vector, checksum_of, key_of, merged
from dips.sim.plan import CHUNK_BYTES, MAX_CLUSTERS

if TYPE_CHECKING:
    from dips.sim.world import World

Content = dict[Key, tuple[int, int]]
"""Each chunk's theta and momentum."""

MAX_VIOLATIONS = 5


@dataclass
class Checks:
    """`content`: what every version must hold, computed from the journal and from what clusters pushed."""

    world: World
    content: dict[Version, Content] = field(default_factory=dict)
    pushes: dict[PushId, Vector] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    published: Version | None = None
    unseen: set[Version] = field(default_factory=set)
    """Committed in a journal that was lost, and not known to have reached anybody by then."""

    ever_published: set[Version] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [key_of(chunk) for chunk in chunks_of(self.world.plan.layout.blocks, CHUNK_BYTES)]

    def violated(self, sentence: str) -> None:
        self.world.kernel.note("check", f"VIOLATED {sentence}")
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(sentence)

    # ---- pushes and merges ----

    def pushing(self, push: PushId, vector: Vector) -> None:
        """The bytes of a push never change."""
        known = self.pushes.setdefault(push, vector)
        if known != vector:
            self.violated(f"push {push} is sent with other bytes than before")

    def journalled(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        """A durable record: a commit must merge exactly the pushes that it names."""
        match record["kind"]:
            case "COMMIT":
                self._committed(record, slave_of_block)
            case "ROLLBACK":
                self._rolled_back(record, slave_of_block)
            case "ADOPT":
                self._adopted(version_of(record["version"]))

    def _committed(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        version = version_of(record["version"])
        assert version is not None, "a COMMIT names its version"
        accepted = [item for item in record["participants"] if item["verdict"] == "APPLIED"]
        vectors = [self.pushes.get(push_of(item["push"])) for item in accepted]
        if any(vector is None for vector in vectors):
            self.violated(f"version {version} merges a push that nobody sent")
            return
        before = self.content.get(Version(version.timeline, version.v - 1))
        judgement = record["judgement"]
        if judgement is not None and before is None:
            self.violated(f"version {version} follows a version that was never committed")
            return
        content = self._merge(before, [v for v in vectors if v is not None], judgement)
        self._check_digests(version, content, record["digests"], slave_of_block)
        if version in self.unseen and version not in self.world.committed_somewhere:
            self.content[version] = content
        known = self.content.setdefault(version, content)
        if known != content:
            self.violated(f"version {version} has two contents (I2)")
        self._note_applied(record)

    def _note_applied(self, record: Mapping[str, Any]) -> None:
        self.applied |= {str(push_of(p["push"])) for p in record["participants"] if p["verdict"] == "APPLIED"}

    def _merge(self, before: Content | None, vectors: Sequence[Vector], judgement: Any) -> Content:
        if judgement is None or before is None:
            return {key: (vectors[0].value(key), 0) for key in self.keys}
        weights = [float(text) for text in judgement["weights"]]
        scale = float(judgement["rho"]) * float(judgement["kappa"])
        decay, lookahead = (float(text) for text in judgement["momentum"])
        rates = (self.world.plan.config.settings.outer_lr, decay, lookahead)
        return {
            key: merged(*before[key], [vector.value(key) for vector in vectors], weights, scale, rates)
            for key in self.keys
        }

    def _rolled_back(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        version, origin = version_of(record["version"]), version_of(record["origin"])
        assert version is not None, "a ROLLBACK names its version"
        known = self.content.get(origin) if origin is not None else None
        if known is None:
            self.violated(f"version {version} goes back to {origin}, which was never committed")
            return
        content = {key: (theta, 0) for key, (theta, _) in known.items()} if record.get("donor") else known
        self._check_digests(version, content, record["digests"], slave_of_block)
        self.content.setdefault(version, content)
        self._note_applied(record)

    def _adopted(self, version: Version | None) -> None:
        """The slaves' history is taken over; what only a lost journal knew, and nobody saw, was never."""
        assert version is not None, "an ADOPT names its version"
        self.unseen |= {known for known in self.content if known > version and known not in self.ever_published}

    def journal_lost(self) -> None:
        """What no slave has committed by now stands in the lost journal only: its name may be given again."""
        self.unseen |= {known for known in self.content if known not in self.ever_published}

    def _check_digests(
        self, version: Version, content: Content, digests: Mapping[str, str], slave_of_block: Mapping[int, str]
    ) -> None:
        for slave, digest in digests.items():
            mine = [checksum_of(content[key][0]) for key in self.keys if slave_of_block.get(key[0]) == slave]
            if shard_digest(mine).hex() != digest:
                self.violated(f"slave {slave} holds something else as version {version} than what was merged")

    # ---- what clusters are told and read ----

    def pulled(self, name: str, version: Version, values: Mapping[Key, int]) -> None:
        """I3: whole, of one version, and of one that was committed."""
        known = self.content.get(version)
        if known is None:
            self.violated(f"{name} pulled version {version}, which was never committed")
        elif any(values.get(key) != known[key][0] for key in self.keys):
            self.violated(f"{name} pulled something else as version {version} than what was merged (I3)")

    def told(self, name: str, fields: Mapping[str, Any]) -> None:
        """A cluster was told a verdict: APPLIED must be durable by then (a ROLLBACK may have overtaken the answer)."""
        kind = fields.get("verdict", fields.get("kind"))
        if kind == "APPLIED" and fields["push"] not in self.applied:
            self.violated(f"{name} is told APPLIED of push {fields['push']}, which no durable COMMIT holds")

    def publish(self, version: Version) -> None:
        """I17: published versions never go back, unless a disk was lost or durability is async."""
        before, self.published = self.published, version
        self.ever_published.add(version)
        if before is None or (version >= before and version.timeline == before.timeline):
            return
        if not self.world.may_roll_back:
            self.violated(f"published went from {before} to {version}, and no disk was lost (I17)")

    # ---- budgets (I16) ----

    def budgets(self) -> None:
        """What the master keeps in memory is bounded by formulas."""
        for master in self.world.masters:
            if master.state is None:
                continue
            world, config = master.state.world, self.world.plan.config
            for name, size, most in (
                ("pins", len(world.pins), MAX_CLUSTERS + MAX_READERS),
                ("members", len(world.members), MAX_CLUSTERS),
                ("recent rounds", len(world.recent), 32),
                ("calls that wait for a verdict", sum(map(len, world.waiters.values())), 40),
                ("kept versions", len(world.kept), config.pinned_versions + 2 + MAX_KEPT_COMMITS),
            ):
                if size > most:
                    self.violated(f"{size} {name}, at most {most} may be (I16)")
            self._leases(world.ledger.leases)

    def _leases(self, leases: Any) -> None:
        if leases is None:
            return
        pieces = sum(1 for _ in leases.holdings())
        plan = self.world.plan
        most = MAX_CLUSTERS * 260 + 40 * plan.data.total_tokens // plan.data.chunk_tokens
        if pieces > most:
            self.violated(f"the lease table has {pieces} pieces, at most {most} may be (I16)")


MAX_KEPT_COMMITS = 8
"""Commits that a master remembers for donations."""


def version_of(raw: Any) -> Version | None:
    """From a pair, or from "timeline:v"."""
    if raw is None:
        return None
    if isinstance(raw, str):
        timeline, v = raw.split(":")
        return Version(int(timeline), int(v))
    return Version(*raw)


def push_of(raw: Any) -> PushId:
    cluster, epoch, n, seq = raw
    return PushId(cluster, Incarnation(epoch, n), seq)
