"""I6, I9, I10: each push is decided once, merged whole, and not too late."""

from __future__ import annotations

from dips.judge.facts import (
    Decision,
    Fact,
    History,
    PushKey,
    RecordedParticipant,
    Sentences,
    say_push,
    say_version,
    short,
    verdict_of,
)


def one_verdict(history: History, fact: Fact) -> Sentences:
    """A push has at most one verdict, exactly one once decided; ROLLED_BACK may follow only APPLIED, by a journaled
    ROLLBACK; a data range is applied at most once in the history that the current timeline keeps.

    Evidence: participants of the journal's records against each other, against the verdicts on the master's tape, and
    against those that clusters received.
    """
    if fact.source == "journal":
        return _decided_once(history, fact.made)
    said, push = verdict_of(fact), fact.push()
    if fact.source == "master":
        return _same_in_an_incarnation(history, fact, push, said)
    return _against_record(history, fact, push, said) + _against_reported(history, fact, push, said)


def _decided_once(history: History, made: Decision) -> Sentences:
    if not made.participants:
        return None
    wrong = []
    for item in made.participants:
        known = history.decided.get(item.push)
        if known is not None:
            wrong.append(
                f"{made} decides push {say_push(item.push)} {item.verdict}, which was decided {known[0]} before "
                f"(version {say_version(known[1])})"
            )
        if item.verdict == "APPLIED":
            wrong += _applied_before(history, made, item)
    return wrong


def _applied_before(history: History, made: Decision, item: RecordedParticipant) -> list[str]:
    wrong = []
    for pass_index, chunk, begin, end in item.ranges:
        for low, high, version, push in history.applied_ranges.get((pass_index, chunk), ()):
            if begin < high and low < end:
                wrong.append(
                    f"{made} applies tokens {begin}-{end} of chunk {chunk}, pass {pass_index} (push "
                    f"{say_push(item.push)}), which version {say_version(version)} applied (push {say_push(push)})"
                )
    return wrong


def _same_in_an_incarnation(history: History, fact: Fact, push: PushKey, said: str) -> list[str]:
    """Check the verdicts on the master's tape within one incarnation: each push has one, and APPLIED comes only when
    the version is published. The tape is ahead of the journal and of the answers: a verdict that a killed master only
    recorded was never sent."""
    known, decided = history.said.get(push), history.decided.get(push)
    sentence = f"{fact} says that push {say_push(push)} is {said}"
    wrong = []
    if known is not None and known != said and (known, said) != ("APPLIED", "ROLLED_BACK"):
        wrong.append(f"{sentence}, but said {known} before")
    if said == "APPLIED" and decided is not None and decided[0] != said and not history.lossy:
        wrong.append(f"{sentence}, but the journal decided {decided[0]}")
    return wrong


def _against_record(history: History, fact: Fact, push: PushKey, said: str) -> list[str]:
    """Check that a verdict that a cluster received was decided durably before."""
    decided = history.decided.get(push)
    taken_back = push in history.taken_back
    sentence = f"{fact} received that push {say_push(push)} is {said}"
    if said == "ROLLED_BACK":
        if taken_back or history.lossy or not history.whole:
            return []
        return [f"{sentence}, but no ROLLBACK in the journal took back a version that it was APPLIED in"]
    if decided is None:
        missing = said != "ABORTED" and history.whole and not history.lossy
        return [f"{sentence}, but the journal has no decision on it"] if missing else []
    if decided[0] == said or (history.lossy and (taken_back or history.head is None or said == "ABORTED")):
        return []
    return [f"{sentence}, but the journal decided {decided[0]} (version {say_version(decided[1])})"]


def _against_reported(history: History, fact: Fact, push: PushKey, said: str) -> list[str]:
    known = history.reported.get(push)
    if known is None or known == said or (known, said) == ("APPLIED", "ROLLED_BACK"):
        return []
    if history.lossy and (push in history.taken_back or "APPLIED" not in (known, said)):
        return []
    return [f"{fact} received {said} for push {say_push(push)}, but {known} before"]


def complete_or_absent(history: History, fact: Fact) -> Sentences:
    """A push is complete or absent.

    Evidence: every merged push was `staged`, whole and verified, on every slave of the version, with the digest that
    its cluster says it sent.
    """
    if fact.source == "worker":
        return _sent(history, fact)
    made = fact.made
    wrong, judged = [], 0
    for item in made.accepted:
        sent = history.sent.get(item.push)
        for slave in made.digests:
            staged = history.staged.get((item.push, slave))
            if staged is None:
                if history.has_tape("slave", slave):
                    wrong.append(
                        f"{made} merged push {say_push(item.push)}, but slave {slave} never recorded that it had all "
                        "of it"
                    )
                continue
            judged += 1
            if sent is not None and slave in sent and sent[slave] not in staged.values():
                wrong.append(_differs(item.push, slave, staged, sent[slave]))
    return wrong if wrong or judged else None


def _sent(history: History, fact: Fact) -> Sentences:
    """Judge the digests that a cluster says it sent, when its line comes after those of the slaves."""
    push = fact.push()
    digests = fact.fields.get("digest_of_slave") or {}
    decided = history.decided.get(push)
    if decided is None or decided[0] != "APPLIED":
        return None
    wrong = []
    for slave, raw in digests.items():
        digest = raw.hex() if isinstance(raw, bytes) else str(raw)
        staged = history.staged.get((push, slave))
        if staged is not None and digest not in staged.values():
            wrong.append(_differs(push, slave, staged, digest))
    return wrong


def _differs(push: PushKey, slave: str, staged: dict[int, str], sent: str) -> str:
    held = ", ".join(short(digest) for digest in staged.values())
    return f"push {say_push(push)} was merged as {held} on slave {slave}, but its cluster sent {short(sent)}"


def bounded_staleness(history: History, fact: Fact) -> Sentences:
    """Staleness is bounded.

    Evidence: for every participant of a record, the version that the round began from is at most s_max versions newer
    than the push's base, on the same timeline.
    """
    made = fact.made
    before = made.from_version if made.kind == "COMMIT" else (history.head.version if history.head else None)
    if made.kind == "ROLLBACK" or before is None or not made.participants:
        return None
    wrong = []
    for item in made.participants:
        taken = f"{made} takes push {say_push(item.push)}"
        if item.base is None:
            wrong.append(f"{taken}, which has no base version")
        elif item.base[0] != before[0]:
            wrong.append(f"{taken} with base {say_version(item.base)} into timeline {before[0]}")
        elif item.base > before:
            wrong.append(f"{taken} with base {say_version(item.base)}, newer than {say_version(before)}")
        elif made.s_max is not None and before[1] - item.base[1] > made.s_max:
            wrong.append(f"{taken}, {before[1] - item.base[1]} versions old: at most {made.s_max} are allowed")
    return wrong
