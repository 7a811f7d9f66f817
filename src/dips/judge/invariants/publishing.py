"""I3, I4, I5: a published version is whole and committed everywhere, and every logged COMMIT can be completed."""

from __future__ import annotations

from dips.judge.facts import Decision, Fact, History, Pair, Sentences, hex_of, names_of, say_round, say_version, short


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
    wrong, judged = [], 0
    for slave in made.digests:
        on_disk = (slave, version) in history.on_disk
        if (slave, version) not in history.held and (history.live or not on_disk):
            if history.has_tape("slave", slave):
                wrong.append(f"{published}, but no record says that it was committed on slave {slave}")
            continue
        judged += 1
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
    wrong, missing, judged = [], False, 0
    for slave, digest in made.digests.items():
        prepared = history.prepared.get((slave, made.round))
        if prepared is None:
            missing = missing or history.has_tape("slave", slave)
            continue
        judged += 1
        if prepared.version != made.version or prepared.digest != digest:
            wrong.append(
                f"{made} names {short(digest)} on slave {slave}, which prepared {short(prepared.digest)} as version "
                f"{say_version(prepared.version)} in that round"
            )
        if history.is_sync and prepared.durable is False:
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
            if not _proven(history, slave, version, round_id, excused) and history.has_tape("slave", slave)
        ]
    history.unproven.clear()
    return wrong or None


def _proven(history: History, slave: str, version: Pair, round_id: Pair, excused: bool) -> bool:
    if not excused:
        return (slave, round_id) in history.prepared
    is_there = (slave, version) in history.held or (slave, version) in history.on_disk
    return is_there or (slave, round_id) in history.prepared
