"""Additional checks when chunks are symbols: each version is what its COMMIT record says.

A symbol encodes how a chunk was made, so every version is computed a second time from the journal alone and from what
clusters pushed, and compared with what slaves and clusters hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dips.core.chunks import Chunk, shard_digest
from dips.core.ids import PushId, Version
from dips.core.wire import Codec
from dips.sim.arithmetic import Key, ModelVector
from dips.sim.checks import Checks, push_of, version_of
from dips.sim.content import Written, averaged, key_of, merged, rates_of

ContentByKey = dict[Key, tuple[int, int]]
"""Each chunk's theta and momentum."""


@dataclass
class ContentChecks(Checks):
    """The checks of one run. content: what every version must hold. pushes: what slaves hold of each push, as sent
    last."""

    content: dict[Version, ContentByKey] = field(default_factory=dict)
    pushes: dict[PushId, ModelVector] = field(default_factory=dict)
    first: dict[tuple[PushId, Codec], ModelVector] = field(default_factory=dict)
    unseen: set[Version] = field(default_factory=set)
    """Versions that were committed in a lost journal and had not reached any other process by then."""

    def pushing(self, push: PushId, wire: Codec, vector: ModelVector) -> None:
        known = self.first.setdefault((push, wire), vector)
        if known != vector:
            self.violated(f"push {push} is sent with other bytes than before")
        self.pushes[push] = vector.rounded if isinstance(vector, Written) else vector

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
                self._adopted(version_of(record["version"]))

    def _committed(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        version = version_of(record["version"])
        assert version is not None, "a COMMIT names its version"
        accepted = [item for item in record["participants"] if item["verdict"] == "APPLIED"]
        vectors = [self.pushes.get(push_of(item["push"])) for item in accepted]
        if any(vector is None for vector in vectors):
            self.violated(f"version {version} merges a push that no cluster sent")
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
        self.note_applied(record)

    def _merge(self, before: ContentByKey | None, vectors: Sequence[ModelVector], judgement: Any) -> ContentByKey:
        if judgement is None or before is None:
            return {key_of(chunk): (vectors[0].value(chunk), 0) for chunk in self.chunks}
        weights = [float(text) for text in judgement["weights"]]
        step = {name: float(text) for name, text in judgement["outer_step"].items()}
        names = ("outer_lr", "momentum_decay", "momentum_lookahead", "gradient_weight")
        rates = rates_of(*(step[name] for name in names))
        blocks = self.world.plan.layout.blocks

        def after(chunk: Chunk) -> tuple[int, int]:
            theta, momentum = before[key_of(chunk)]
            pushed = [vector.value(chunk) for vector in vectors]
            if blocks[chunk.block_id].averaged:
                return averaged(theta, pushed, weights, float(judgement["rho"]))
            return merged(theta, momentum, pushed, weights, step["scale"], rates)

        return {key_of(chunk): after(chunk) for chunk in self.chunks}

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
        self.note_applied(record)

    def _resharded(self, record: Mapping[str, Any], slave_of_block: Mapping[int, str]) -> None:
        """A RESHARD: the same parameters and momentum on other slaves."""
        version, before = version_of(record["version"]), version_of(record["from_version"])
        assert version is not None, "a RESHARD names its version"
        known = self.content.get(before) if before is not None else None
        if known is None:
            self.violated(f"version {version} moves {before}, which was never committed")
            return
        self._check_digests(version, known, record["digests"], slave_of_block)
        if version in self.unseen and version not in self.world.committed_somewhere:
            self.content[version] = known
        if self.content.setdefault(version, known) != known:
            self.violated(f"version {version} has two contents (I2)")

    def _adopted(self, version: Version | None) -> None:
        """An ADOPT: the slaves' history is taken over; versions that only a lost journal had are forgotten."""
        assert version is not None, "an ADOPT names its version"
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
                self.violated(f"slave {slave} holds something else as version {version} than what was merged")

    def pulled(self, name: str, version: Version, values: Mapping[Key, int]) -> None:
        """I3: check that a pulled version is whole and was committed."""
        known = self.content.get(version)
        if known is None:
            self.violated(f"{name} pulled version {version}, which was never committed")
        elif any(values.get(key) != known[key][0] for key in map(key_of, self.chunks)):
            self.violated(f"{name} pulled something else as version {version} than what was merged (I3)")
