"""I1, I2, I7, I14: a version has the same content on every slave, always."""

from __future__ import annotations

import hashlib

from dips.judge.facts import (
    Decision,
    Fact,
    History,
    Pair,
    Sentences,
    hex_of,
    say_push,
    say_round,
    say_version,
    short,
    verdict_of,
)


def same_round(history: History, fact: Fact) -> Sentences:
    """All shards of a published version come from the same round record.

    Evidence: the round and the commit hash that each slave's tape and manifests give for a version, against those of
    the other slaves and of the journal's record; a manifest's record has the hash that the manifest says.
    """
    version, round_id = fact.version(), fact.round()
    if version is None or round_id is None:
        return None
    wrong: list[str] = []
    known_round = history.rounds.get(version)
    if known_round is not None and known_round[0] != round_id:
        wrong.append(
            f"version {say_version(version)} comes from round {say_round(round_id)} on {fact}, but from round "
            f"{say_round(known_round[0])} on {known_round[1]}"
        )
    commit_hash = fact.fields.get("commit_hash")
    known_hash = history.hashes.get(version)
    if commit_hash and known_hash is not None and known_hash[0] != (said := hex_of(commit_hash)):
        wrong.append(
            f"version {say_version(version)} has the COMMIT record {short(said)} on {fact}, but {short(known_hash[0])} "
            f"on {known_hash[1]}"
        )
    record = fact.fields.get("commit_record")
    if record is not None and commit_hash and hashlib.sha256(record.encode()).hexdigest() != hex_of(commit_hash):
        wrong.append(f"the COMMIT record in the manifest of version {say_version(version)} on {fact} was altered")
    return wrong


def same_content(history: History, fact: Fact) -> Sentences:
    """On a timeline a version's content never changes.

    Evidence: the digest of a version's shard on one slave is the same in the journal, on the slave's tape after every
    start, in its manifests, and in what clusters pulled.
    """
    version = fact.version()
    if version is None:
        return None
    said = _digests(fact)
    if not said:
        return None
    wrong = []
    for slave, digest in said.items():
        known = history.digests.get((version, slave))
        if known is not None and known[0] != digest:
            wrong.append(
                f"version {say_version(version)} on slave {slave} is {short(digest)} for {fact} ({fact.kind}), but was "
                f"{short(known[0])} for {known[1]}"
            )
    return wrong


def _digests(fact: Fact) -> dict[str, str]:
    if fact.decision is not None:
        return dict(fact.decision.digests)
    if fact.source == "worker":
        return {name: hex_of(digest) for name, digest in (fact.fields.get("digest_of_slave") or {}).items()}
    digest = fact.digest()
    return {fact.who: digest} if digest else {}


def one_line(history: History, fact: Fact) -> Sentences:
    """An APPLIED push is in the version that its verdict names and in every later version of the timeline.

    Evidence: each COMMIT and RESHARD makes the version after that of the record before it, so none is left out; a
    ROLLBACK keeps the number of its origin on a timeline that was never used; and a reported APPLIED(v) names a version
    whose record merged that push.
    """
    if fact.source != "journal":
        return _applied_is_in(history, fact)
    made, head = fact.made, history.head
    match made.kind:
        case "COMMIT" | "RESHARD":
            return _follows(made, head, history)
        case "ROLLBACK":
            return _new_timeline(made, head)
    return None


def _follows(made: Decision, head: Decision | None, history: History) -> Sentences:
    wrong = []
    before, version = made.from_version, made.version
    assert version is not None, "it names its version"
    if before is None and version[1] != 0:
        wrong.append(f"{made} follows no version, so its number must be 0")
    if before is not None and version != (before[0], before[1] + 1):
        wrong.append(f"{made} follows version {say_version(before)}: a number is left out, or the timeline changed")
    if head is None:
        return wrong or ([] if before is None or not history.whole or history.lossy else [_orphan(made)])
    if head.version != before:
        wrong.append(f"{made} follows version {say_version(before)}, but the newest was {say_version(head.version)}")
    return wrong


def _orphan(made: Decision) -> str:
    return f"{made} follows version {say_version(made.from_version)}, which no record made"


def _new_timeline(made: Decision, head: Decision | None) -> Sentences:
    wrong = []
    version, origin = made.version, made.origin
    assert version is not None, "a ROLLBACK names its version"
    if origin is not None and origin[1] != version[1]:
        wrong.append(f"{made} goes back to {say_version(origin)}: the number must stay")
    newest = max((v[0] for v in (origin, head.version if head else None) if v is not None), default=-1)
    if version[0] <= newest:
        wrong.append(f"{made} is on timeline {version[0]}, but timeline {newest} was used before")
    return wrong


def _applied_is_in(history: History, fact: Fact) -> Sentences:
    version = fact.version()
    if verdict_of(fact) != "APPLIED" or version is None:
        return None
    push = fact.push()
    decided = history.decided.get(push)
    if decided is None:
        return None if history.lossy or not history.whole else [_told_nothing(fact, version)]
    if decided != ("APPLIED", version):
        return [
            f"{fact} says that push {say_push(push)} is APPLIED in version {say_version(version)}, but its record says "
            f"{decided[0]} in version {say_version(decided[1])}"
        ]
    return []


def _told_nothing(fact: Fact, version: Pair) -> str:
    return (
        f"{fact} says that push {say_push(fact.push())} is APPLIED in version {say_version(version)}, but no record in "
        "the journal merged it"
    )


def same_bits(history: History, fact: Fact) -> Sentences:
    """Same inputs give the same bits.

    Evidence: what a slave prepares, commits or loads again for the same round has the same digest as the first time,
    after any restart. `dips verify --replay` computes every version again from the pushes.
    """
    version, round_id, digest = fact.version(), fact.round(), fact.digest()
    if version is None or round_id is None or not digest:
        return None
    known = history.prepared.get((fact.who, round_id))
    if known is None or known.version != version:
        return []
    if known.digest != digest:
        return [
            f"slave {fact.who} made version {say_version(version)} of round {say_round(round_id)} as "
            f"{short(known.digest)}, but {fact.kind} it as {short(digest)}"
        ]
    return []
