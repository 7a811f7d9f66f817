"""I1, I2, I3, I4, I5, I7, I14: a version has the same content on every slave, is whole where it is pulled, and can
always be completed.
"""

from __future__ import annotations

import hashlib

from dips.judge.facts import (
    Decision,
    Fact,
    History,
    Pair,
    Sentences,
    hex_of,
    names_of,
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
        orphan = before is not None and history.whole and not history.lossy
        return wrong or [f"{made} follows version {say_version(before)}, which no record made"] * orphan
    if head.version != before:
        wrong.append(f"{made} follows version {say_version(before)}, but the newest was {say_version(head.version)}")
    return wrong


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
    said = f"{fact} says that push {say_push(push)} is APPLIED in version {say_version(version)}"
    if decided is None:
        return None if history.lossy or not history.whole else [f"{said}, but no record in the journal merged it"]
    if decided != ("APPLIED", version):
        return [f"{said}, but its record says {decided[0]} in version {say_version(decided[1])}"]
    return []


def same_bits(history: History, fact: Fact) -> Sentences:
    """Same inputs give the same bits.

    Evidence: what a slave prepares, commits or loads again for the same round has the same digest as the first time,
    after any restart. `dips verify --replay` computes every version again from the pushes.
    """
    version, round_id, digest = fact.version(), fact.round(), fact.digest()
    if version is None or round_id is None or not digest:
        return None
    known = history.prepared.get((fact.who, round_id))
    if known is None or known.version() != version:
        return []
    if known.digest() != digest:
        return [
            f"slave {fact.who} made version {say_version(version)} of round {say_round(round_id)} as "
            f"{short(known.digest())}, but {fact.kind} it as {short(digest)}"
        ]
    return []


# ---- publishing ------------------------------------------------------------------------------------------------------
#
# I3, I4, I5: a published version is whole and committed everywhere, and every logged COMMIT can be completed.


def never_torn(history: History, fact: Fact) -> Sentences:
    """A pulled model is never torn.

    Evidence: a cluster installed a version with exactly the digests, one for each slave, of the record that made it.
    """
    version = fact.version()
    said = {name: hex_of(digest) for name, digest in (fact.fields.get("digest_of_slave") or {}).items()}
    if version is None or not said:
        return None
    made = history.commits.get(version)
    if made is None:
        if not history.whole or history.lossy:
            return None
        return [f"{fact} pulled version {say_version(version)}, which no record in the journal made"]
    if said.keys() != made.digests.keys():
        return [
            f"{fact} pulled version {say_version(version)} from slaves {names_of(said)}, but it is on "
            f"{names_of(made.digests)}"
        ]
    return [
        f"{fact} pulled {short(digest)} as version {say_version(version)} from slave {slave}, but {made} says "
        f"{short(made.digests[slave])}: a torn model"
        for slave, digest in said.items()
        if made.digests[slave] != digest
    ]


def committed_everywhere(history: History, fact: Fact) -> Sentences:
    """Published means committed everywhere, and durable in sync mode.

    Evidence: for each `publish` the journal has the record that made the version, and every slave's own tape or
    manifest says that it holds the version; in sync mode, that it was on disk.
    """
    version = fact.version()
    if version is None:
        return None
    made, published = history.commits.get(version), f"version {say_version(version)} was published"
    if made is None:
        return [f"{published}, but no record in the journal made it"] if history.whole else None
    wrong, judged = [], False
    for slave in made.digests:
        on_disk = (slave, version) in history.on_disk
        if (slave, version) not in history.held and (history.live or not on_disk):
            if not history.may_lack(slave, made, "I4", ended=True):
                wrong.append(f"{published}, but no record says that it was committed on slave {slave}")
            continue
        judged = True
        if history.is_sync and not on_disk and not history.held[slave, version]:
            wrong.append(f"{published}, but was only in the memory of slave {slave} (durability is sync)")
    tokens = fact.fields.get("tokens")
    if tokens is not None and made.tokens is not None and int(tokens) != made.tokens:
        wrong.append(f"{published} with {tokens} tokens, but {made} says {made.tokens}")
    return wrong if wrong or judged else None


def completable(history: History, fact: Fact) -> Sentences:
    """A logged COMMIT can always be completed.

    Evidence: when the COMMIT was written, every slave had prepared the version in that round, with the digest that the
    record names and, in sync mode, on disk. A ROLLBACK names the digests of its origin. When a slave's disk was lost,
    with its tape, so that the run went back, earlier records are proven by the versions that this slave holds
    afterwards.
    """
    if fact.source == "end":
        return _left_over(history)
    made = fact.made
    if made.version is None or made.round is None or not made.digests:
        return None
    if made.kind == "ROLLBACK" and made.donor is None:
        return _as_origin(history, made)
    wrong, missing, judged = [], False, False
    for slave, digest in made.digests.items():
        prepared = history.prepared.get((slave, made.round))
        if prepared is None:
            missing = True
            continue
        judged = True
        if prepared.version() != made.version or prepared.digest() != digest:
            wrong.append(
                f"{made} names {short(digest)} on slave {slave}, which prepared {short(prepared.digest())} as version "
                f"{say_version(prepared.version())} in that round"
            )
        if history.is_sync and prepared.fields.get("durable") is False:
            wrong.append(f"{made} was written while slave {slave} had the version only in memory (durability is sync)")
    if missing and history.live:
        names = names_of(s for s in made.digests if (s, made.round) not in history.prepared)
        wrong.append(f"{made} was written before slaves {names} had prepared it")
    elif missing:
        history.unproven.append((made, history.went_back))
    return wrong if wrong or judged else None


def _as_origin(history: History, made: Decision) -> Sentences:
    origin = history.commits.get(made.origin) if made.origin is not None else None
    if origin is None:
        return None
    return [
        f"{made} names {short(digest)} on slave {slave}, its origin {short(origin.digests.get(slave, 'nothing'))}"
        for slave, digest in made.digests.items()
        if origin.digests.get(slave) != digest
    ]


def _left_over(history: History) -> Sentences:
    """Judge records without a `prepared` line on some tape: they are proven when the slave held the version later."""
    wrong = []
    for made, went_back in history.unproven:
        excused = history.lossy or history.went_back > went_back
        version, round_id = made.version, made.round
        assert version is not None, "only decisions with a version are in this list"
        assert round_id is not None, "and with a round"
        wrong += [
            f"{made} was written, but no record says that slave {slave} prepared it (round {say_round(round_id)})"
            for slave in made.digests
            if not _proven(history, slave, version, round_id, excused) and not history.may_lack(slave, made, "I5")
        ]
    return wrong or None


def _proven(history: History, slave: str, version: Pair, round_id: Pair, excused: bool) -> bool:
    if not excused:
        return (slave, round_id) in history.prepared
    is_there = (slave, version) in history.held or (slave, version) in history.on_disk
    return is_there or (slave, round_id) in history.prepared
