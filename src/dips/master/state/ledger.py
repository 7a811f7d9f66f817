"""The ledger: the durable part of the master's state, written whole with every journal entry.

Replaying the journal is loading the newest snapshot; a slave's manifest carries the same snapshot with the COMMIT
that it belongs to. Nothing here depends on the clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dips.core.errors import ConfigError, FatalError, Refused
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, SlaveId, Version
from dips.core.layout import Layout, layout_from_json
from dips.core.messages import DataMode, DataPlan, Verdict, VerdictKind
from dips.core.model_description import Untrained
from dips.core.placement import Placement
from dips.master.state.leases import LeaseTable
from dips.master.state.penalty_types import DetectorState

APPLIED_KEPT = 16
"""Versions whose pushes the ledger still names; more than slaves keep, so that a ROLLBACK names what it takes back."""

MAX_WHOLE = 1 << 63
"""The largest whole number that fits into every message and into SQLite."""


@dataclass(frozen=True)
class CommitInfo:
    """The COMMIT, or ROLLBACK, that made a version. Its record holds the ledger as it was then."""

    round: RoundId
    version: Version
    digest_of_slave: tuple[tuple[str, bytes], ...]
    record: bytes

    @property
    def commit_hash(self) -> bytes:
        return hashlib.sha256(self.record).digest()


@dataclass(frozen=True)
class PendingReshard:
    """A RESHARD that was asked for: slaves that shall hold blocks, and slaves that shall no longer hold any."""

    add: tuple[SlaveId, ...]
    remove: tuple[SlaveId, ...]
    reason: str = ""

    def slaves_of(self, before: Iterable[SlaveId]) -> tuple[SlaveId, ...]:
        """The slaves that hold blocks after it."""
        return tuple(sorted({*before, *self.add} - {*self.remove}))


def same_as(commit: CommitInfo) -> tuple[Version, ...]:
    """The versions with the same parameters as this one, if it was made by a RESHARD; none for any other commit."""
    raw = json.loads(commit.record)
    return tuple(map(_version, raw.get("same_as", ())))


@dataclass
class ClusterEntry:
    """The durable record of a cluster id, whether the cluster is here or not."""

    fence: int = 0  # counts applied and excluded pushes, and rollbacks: a push with an older one is stale
    incarnation: Incarnation | None = None
    spoke: Incarnation | None = None  # the newest one that ever called: the answer to its Join was not lost
    incarnations: int = 0
    member: bool = False
    declared_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0  # measured between admissions
    push_interval_s: float = 0.0  # likewise
    local_steps: int = 0  # no longer used; kept because older releases read it
    pushes_applied: int = 0
    pushes_excluded: int = 0
    tokens_applied: int = 0
    steps_applied: int = 0
    steps_before: int = 0  # of its earlier processes
    steps_heard: int = 0  # of the process that holds the name now, as its beats say
    last_verdict: Verdict | None = None
    last_donation: Verdict | None = None  # apart, so that a donation does not hide the verdict of the last push
    process_id: bytes = b""  # the random identity of the process that joined last

    @property
    def rate_tokens_per_s(self) -> float:
        """Tokens per second: measured, declared until measured, 0 when neither is known."""
        return self.tokens_per_s or self.declared_tokens_per_s


@dataclass
class Ledger:
    """One run's durable state."""

    run_id: str
    layout: Layout | None = None
    data_plan: DataPlan | None = None
    slaves: dict[SlaveId, int] = field(default_factory=dict)  # stated memory, bytes
    directories: dict[SlaveId, bytes] = field(default_factory=dict)  # the random identity of each slave's directory
    placement: Placement | None = None
    commit: CommitInfo | None = None
    tokens: int = 0
    round_n: int = 0
    detector: DetectorState = field(default_factory=DetectorState.empty)
    clusters: dict[str, ClusterEntry] = field(default_factory=dict)
    leases: LeaseTable | None = None
    rounds_committed: int = 0
    rounds_merged: int = 0
    rounds_void: int = 0
    stopping: str = ""  # why the run ends, once no round is open
    stop_asked: str = ""  # the operator's reason, from the moment of asking
    paused: str = ""
    draining: dict[str, str] = field(default_factory=dict)  # cluster -> the operator's reason
    # The snapshot that becomes `commit` under its new name, after a ROLLBACK and until the next COMMIT.
    origin: tuple[Version, RoundId] | None = None
    # (origin, new version) of each ROLLBACK: the versions between are no longer part of the run.
    given_up: list[tuple[Version, Version]] = field(default_factory=list)
    applied_in: list[tuple[Version, tuple[PushId, ...]]] = field(default_factory=list)  # of the newest versions
    reshard: PendingReshard | None = None  # what slaves the operator wants, until blocks are placed so
    # What the first cluster holds and the run does not train, as Untrained.to_text(); None: not known yet.
    untrained: str | None = None
    # (the run's token limit, 0 for none; tk_max of the settings when the operator set it). It holds as long as the
    # settings still have that tk_max: a later change of the settings replaces it.
    extended: tuple[int, int] | None = None
    # Taken over from slaves that may have lost newer versions: the run continues only on a new timeline.
    behind: bool = False
    preset: str = ""  # the run's; empty: an older release wrote the ledger, or the run has not begun
    chunk_bytes: int = 0  # the digests of versions are over chunks of this size; 0: an older release wrote the ledger

    @property
    def version(self) -> Version | None:
        return self.commit.version if self.commit else None

    def check_chunks(self, chunk_bytes: int) -> None:
        """Raises ConfigError when slaves would check this run's versions by chunks of another size than they have."""
        if self.commit is not None and self.chunk_bytes not in (0, chunk_bytes):
            raise ConfigError(
                f"chunk_bytes is {chunk_bytes}, and run {self.run_id} made its versions with {self.chunk_bytes}, by "
                "which slaves check and store them",
                f"start the master with chunk_bytes = {self.chunk_bytes}, or begin another run",
            )

    def is_given_up(self, version: Version) -> bool:
        """Whether a ROLLBACK took the version out of the run's history."""
        return any(origin < version < new for origin, new in self.given_up)

    def remember_applied(self, version: Version, pushes: Iterable[PushId]) -> None:
        self.applied_in = [*self.applied_in, (version, tuple(pushes))][-APPLIED_KEPT:]

    def token_limit(self, tk_max: int) -> int:
        """The number of tokens at which the run ends, 0 for never; tk_max: the value of the settings."""
        extended = self.extended
        return extended[0] if extended is not None and extended[1] == tk_max else tk_max

    def entry(self, cluster: str) -> ClusterEntry:
        return self.clusters.setdefault(cluster, ClusterEntry())

    def to_json(self, with_commit: bool = True) -> str:
        """Canonical text; a COMMIT record holds it without the commit that it is part of."""
        plan = self.data_plan
        raw: dict[str, Any] = {
            "run_id": self.run_id,
            "layout": self.layout.to_json() if self.layout else None,
            "data_plan": plan and [plan.mode.name, plan.corpus_digest.hex(), plan.total_tokens, plan.chunk_tokens],
            "slaves": dict(self.slaves),
            "directories": {name: drawn.hex() for name, drawn in self.directories.items()},
            "placement": list(self.placement.slave_of_block) if self.placement else None,
            "tokens": self.tokens,
            "round_n": self.round_n,
            "detector": self.detector.to_json(),
            "clusters": {name: _entry_to_json(entry) for name, entry in sorted(self.clusters.items())},
            "leases": self.leases.to_json() if self.leases else None,
            "rounds": [self.rounds_committed, self.rounds_merged, self.rounds_void],
            "stopping": self.stopping,
            "stop_asked": self.stop_asked,
            "paused": self.paused,
            "draining": dict(sorted(self.draining.items())),
            "origin": [pair(item) for item in self.origin] if self.origin else None,
            "given_up": [[pair(origin), pair(new)] for origin, new in self.given_up],
            "applied_in": [[pair(version), [push_to_json(p) for p in pushes]] for version, pushes in self.applied_in],
        }
        if self.behind:
            raw["behind"] = True
        if self.reshard is not None:
            raw["reshard"] = [list(self.reshard.add), list(self.reshard.remove), self.reshard.reason]
        if self.untrained is not None:
            raw["untrained"] = self.untrained
        if self.extended is not None:
            raw["extended"] = list(self.extended)
        if self.preset:
            raw["preset"] = self.preset
        if self.chunk_bytes:
            raw["chunk_bytes"] = self.chunk_bytes
        if with_commit:
            raw["commit"] = _commit_to_json(self.commit)
        return canonical(raw)

    @staticmethod
    def from_json(text: str) -> Ledger:
        """Raises one of UNREADABLE. Fields that an older release did not write have their defaults."""
        raw = json.loads(text)
        plan = None
        if (planned := raw["data_plan"]) is not None:
            mode, corpus_digest, total_tokens, chunk_tokens = planned
            plan = DataPlan(DataMode[mode], bytes.fromhex(corpus_digest), int(total_tokens), int(chunk_tokens))
        reshard = None
        if (pending := raw.get("reshard")) is not None:
            add, remove, reason = pending
            reshard = PendingReshard(_slave_ids(add), _slave_ids(remove), _text(reason))
        if (untrained := raw.get("untrained")) is not None:
            Untrained.from_text(_text(untrained))  # checked now, so that an error does not wait for the next Join
        origin, extended = raw.get("origin"), raw.get("extended")
        slaves = {SlaveId(name): _whole(size) for name, size in raw["slaves"].items()}
        placed = raw["placement"]
        ledger = Ledger(
            run_id=_text(raw["run_id"]),
            layout=layout_from_json(raw["layout"]) if raw["layout"] else None,
            data_plan=plan,
            slaves=slaves,
            directories={SlaveId(name): bytes.fromhex(drawn) for name, drawn in raw.get("directories", {}).items()},
            placement=Placement(tuple(sorted(slaves)), tuple(placed)) if placed is not None else None,
            commit=_commit_from_json(raw.get("commit")),
            tokens=_whole(raw["tokens"]),
            round_n=_whole(raw["round_n"]),
            detector=DetectorState.from_json(raw["detector"]),
            clusters={name: _entry_from_json(entry) for name, entry in raw["clusters"].items()},
            stopping=_text(raw["stopping"]),
            stop_asked=_text(raw.get("stop_asked", "")),
            paused=_text(raw.get("paused", "")),
            draining={name: _text(why) for name, why in raw.get("draining", {}).items()},
            origin=(_version(origin[0]), _round(origin[1])) if origin else None,
            given_up=[(_version(old), _version(new)) for old, new in raw.get("given_up", [])],
            applied_in=[(_version(v), tuple(map(push_from_json, pushes))) for v, pushes in raw.get("applied_in", [])],
            behind=raw.get("behind") is True,
            preset=_text(raw.get("preset", "")),
            chunk_bytes=_whole(raw.get("chunk_bytes", 0)),
            reshard=reshard,
            untrained=untrained,
            extended=(_whole(extended[0]), _whole(extended[1])) if extended is not None else None,
        )
        if plan is not None and raw["leases"] is not None:
            ledger.leases = LeaseTable.from_json(plan, raw["leases"])
        ledger.rounds_committed, ledger.rounds_merged, ledger.rounds_void = map(_whole, raw["rounds"])
        return ledger


UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    *(Refused, ConfigError),
)
"""The exceptions raised when a ledger or a record that is read was not written by a master."""


def ledger_from_journal(text: str) -> Ledger:
    """The newest ledger of this master's own journal. Raises FatalError when it cannot be read."""
    try:
        return Ledger.from_json(text)
    except UNREADABLE as error:
        raise FatalError(
            f"the ledger in the journal cannot be read ({type(error).__name__}: {error}): it was changed, or written "
            "by a newer release; use that release, restore the master's directory from a copy, or begin again with "
            "--rebuild in an empty one if the slaves still hold a version"
        ) from error


def canonical(raw: Mapping[str, Any]) -> str:
    """Canonical JSON: the same bytes for the same content, because records are hashed."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"))


def verdict_to_json(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "push": push_to_json(verdict.push),
        "kind": verdict.kind.name,
        "version": pair(verdict.version),
        "reason": verdict.reason,
        "reset": verdict.reset_inner_optimizer,
        "round": pair(verdict.round),
    }


def push_to_json(push: PushId) -> list[Any]:
    return [push.cluster, push.incarnation.epoch, push.incarnation.n, push.seq]


def push_from_json(raw: Sequence[Any]) -> PushId:
    cluster, epoch, n, seq = raw
    return PushId(ClusterId(_text(cluster)), Incarnation(_whole(epoch), _whole(n)), _whole(seq))


def commit_from_record(record: bytes) -> CommitInfo:
    """Reads the commit from its COMMIT or ROLLBACK record. Raises ValueError, KeyError or TypeError when it is none."""
    raw = json.loads(record.decode())  # json.loads(bytes) would guess the encoding; records are UTF-8
    digests = tuple((name, bytes.fromhex(digest)) for name, digest in sorted(raw["digests"].items()))
    return CommitInfo(_round(raw["round"]), _version(raw["version"]), digests, record)


def ledger_of(commit: CommitInfo) -> Ledger:
    """The ledger as the commit's record left it. Raises ValueError, KeyError or TypeError when there is none in it."""
    ledger = Ledger.from_json(canonical(json.loads(commit.record)["ledger"]))
    ledger.commit = commit
    return ledger


def pair(item: Version | RoundId | Incarnation | None) -> list[int] | None:
    """Any of the ids that are two numbers, as a list."""
    match item:
        case None:
            return None
        case Version(timeline, v):
            return [timeline, v]
        case RoundId(epoch, n) | Incarnation(epoch, n):
            return [epoch, n]


def _verdict_from_json(raw: Mapping[str, Any] | None) -> Verdict | None:
    if raw is None:
        return None
    return Verdict(
        push_from_json(raw["push"]),
        VerdictKind[raw["kind"]],
        _version(raw["version"]) if raw["version"] else None,
        _text(raw["reason"]),
        bool(raw["reset"]),
        _round(raw["round"]) if raw["round"] else None,
    )


_PLAIN = (
    "fence",
    "incarnations",
    "member",
    "declared_tokens_per_s",
    "tokens_per_s",
    "push_interval_s",
    "local_steps",
    "pushes_applied",
    "pushes_excluded",
    "tokens_applied",
    "steps_applied",
    "steps_before",
)
_NEW_ENTRY = ClusterEntry()


def _entry_to_json(entry: ClusterEntry) -> dict[str, Any]:
    raw = {name: getattr(entry, name) for name in _PLAIN}
    return raw | {
        "incarnation": pair(entry.incarnation),
        "spoke": pair(entry.spoke),
        "last_verdict": verdict_to_json(entry.last_verdict),
        "last_donation": verdict_to_json(entry.last_donation),
        "process_id": entry.process_id.hex(),
        "steps_heard": entry.steps_heard,
    }


def _entry_from_json(raw: Mapping[str, Any]) -> ClusterEntry:
    entry = ClusterEntry(**{name: _like(getattr(_NEW_ENTRY, name), raw[name]) for name in _PLAIN})
    entry.incarnation = _incarnation(raw["incarnation"])
    entry.spoke = _incarnation(raw["spoke"])
    entry.last_verdict = _verdict_from_json(raw["last_verdict"])
    entry.last_donation = _verdict_from_json(raw.get("last_donation"))
    entry.process_id = bytes.fromhex(raw.get("process_id", ""))
    entry.steps_heard = _whole(raw.get("steps_heard", 0))
    return entry


def _commit_to_json(commit: CommitInfo | None) -> dict[str, Any] | None:
    if commit is None:
        return None
    digests = {name: digest.hex() for name, digest in commit.digest_of_slave}
    return {
        "round": pair(commit.round),
        "version": pair(commit.version),
        "digests": digests,
        "record": commit.record.decode(),
    }


def _commit_from_json(raw: Mapping[str, Any] | None) -> CommitInfo | None:
    if raw is None:
        return None
    digests = tuple((name, bytes.fromhex(digest)) for name, digest in sorted(raw["digests"].items()))
    return CommitInfo(_round(raw["round"]), _version(raw["version"]), digests, raw["record"].encode())


def _slave_ids(raw: Iterable[Any]) -> tuple[SlaveId, ...]:
    return tuple(SlaveId(_text(name)) for name in raw)


# ---- values: a record may come from a slave's disk, and its values are compared, added and sent later ----


def _whole(value: Any) -> int:
    """Checks a count or a number of an id. Raises TypeError, or ValueError for one that no message can carry."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    if not 0 <= value < MAX_WHOLE:
        raise ValueError(f"{value!r:.40} is not from 0 to {MAX_WHOLE}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _like(example: object, value: Any) -> Any:
    """Checks that the value is of the example's type and returns it."""
    if isinstance(example, bool):
        return bool(value)
    return float(value) if isinstance(example, float) else _whole(value)


def _version(raw: Sequence[Any]) -> Version:
    timeline, v = map(_whole, raw)
    return Version(timeline, v)


def _round(raw: Sequence[Any]) -> RoundId:
    epoch, n = map(_whole, raw)
    return RoundId(epoch, n)


def _incarnation(raw: Sequence[Any] | None) -> Incarnation | None:
    if raw is None:
        return None
    epoch, n = map(_whole, raw)
    return Incarnation(epoch, n)
