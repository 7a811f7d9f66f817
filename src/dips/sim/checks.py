"""Checks every simulation while it runs: bytes of pushes, whole pulls, reported verdicts, order of versions.

The invariants over facts (journal, tapes, manifests) are in dips.judge.invariants and are checked here after every
fact too; checks that need symbols are in dips.sim.content_checks. A violation is a sentence; the run goes on, and
its seed fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dips.core.chunks import chunks_of, shard_digest
from dips.core.ids import Incarnation, PushId, Version
from dips.core.wire import Codec
from dips.sim.arithmetic import Key, ModelVector, Value
from dips.sim.content import key_of

if TYPE_CHECKING:
    from dips.sim.world import World

MAX_VIOLATIONS = 5

KEPT_VERSIONS = 64
"""Versions whose digests are kept; more than any process may still pull."""


@dataclass
class Checks:
    """The checks of one run. `sent`: each cluster's last push, how it was written, and the digest of its bytes.
    `digests`: what each slave holds of a version."""

    world: World
    sent: dict[str, tuple[PushId, Codec, bytes]] = field(default_factory=dict)
    digests: dict[Version, Mapping[str, str]] = field(default_factory=dict)
    placed: dict[Version, Mapping[int, str]] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    published: Version | None = None
    ever_published: set[Version] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.world.plan
        self.chunks = chunks_of(plan.layout.blocks, plan.config.settings.chunk_bytes)
        self.checksum = plan.arithmetic.checksum

    def violated(self, sentence: str) -> None:
        self.world.kernel.note("check", f"VIOLATED {sentence}")
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(sentence)

    # ---- pushes and versions ----

    def pushing(self, push: PushId, wire: Codec, vector: ModelVector) -> None:
        """Check that the bytes of a push never change, as long as it is written in the same form."""
        digest = shard_digest([self.checksum(vector.value(chunk)) for chunk in self.chunks])
        *before, known = self.sent.get(push.cluster, (push, wire, digest))
        if before == [push, wire] and known != digest:
            self.violated(f"push {push} is sent with other bytes than before")
        self.sent[push.cluster] = (push, wire, digest)

    def journalled(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        """Take a durable record of the journal."""
        if record["kind"] in ("COMMIT", "ROLLBACK", "RESHARD"):
            version = version_of(record["version"])
            assert version is not None, "it names its version"
            self.digests[version], self.placed[version] = dict(record["digests"]), slave_of_block
            if len(self.digests) > KEPT_VERSIONS:
                oldest = min(self.digests)
                del self.digests[oldest], self.placed[oldest]
            self.note_applied(record)

    def note_applied(self, record: Mapping[str, Any]) -> None:
        self.applied |= {str(push_of(p["push"])) for p in record["participants"] if p["verdict"] == "APPLIED"}

    def journal_lost(self) -> None:
        """The master's disk is lost, or restored from a copy."""

    # ---- what clusters receive and read ----

    def pulled(self, name: str, version: Version, values: Mapping[Key, Value]) -> None:
        """I3: check that a pulled version is whole and was committed."""
        known = self.digests.get(version)
        slave_of_block = self.placed.get(version, {})
        if known is None:
            self.violated(f"{name} pulled version {version}, which was never committed")
            return
        for slave, digest in known.items():
            keys = [key_of(chunk) for chunk in self.chunks if slave_of_block.get(chunk.block_id) == slave]
            if shard_digest([self.checksum(values[key]) for key in keys]).hex() != digest:
                self.violated(f"{name} pulled something else of {slave} as version {version} than was merged (I3)")

    def told(self, name: str, fields: Mapping[str, Any]) -> None:
        """A cluster received a verdict: APPLIED must be durable by then (a ROLLBACK may have overtaken the answer)."""
        kind = fields.get("verdict", fields.get("kind"))
        if kind == "APPLIED" and fields["push"] not in self.applied:
            self.violated(f"{name} received APPLIED for push {fields['push']}, which no durable COMMIT holds")

    def publish(self, version: Version) -> None:
        """I17: check that published versions never go back, unless a disk was lost or durability is async."""
        before, self.published = self.published, version
        self.ever_published.add(version)
        if before is None or (version >= before and version.timeline == before.timeline):
            return
        if not self.world.may_roll_back:
            self.violated(f"published went from {before} to {version}, and no disk was lost (I17)")


def version_of(raw: Any) -> Version | None:
    """Parse a version from a pair or from "timeline:v"."""
    if raw is None:
        return None
    if isinstance(raw, str):
        timeline, v = raw.split(":")
        return Version(int(timeline), int(v))
    return Version(*raw)


def push_of(raw: Any) -> PushId:
    cluster, epoch, n, seq = raw
    return PushId(cluster, Incarnation(epoch, n), seq)
