"""I6, I8 to I13: each push is decided once, merged whole and not too late; nothing old counts; tokens and data add
up."""

from __future__ import annotations

import math
from typing import Any

from dips.judge.facts import (
    Decision,
    Fact,
    Fields,
    History,
    PushKey,
    RecordedParticipant,
    Sentences,
    hex_of,
    ledger_of_record,
    pair,
    say_push,
    say_round,
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
    its cluster says it sent. Unproven where a slave's tape has a gap.
    """
    if fact.source == "worker":
        return _sent(history, fact)
    made = fact.made
    wrong, judged = [], False
    for item in made.accepted:
        sent = history.sent.get(item.push)
        for slave in made.digests:
            staged = history.staged.get((item.push, slave))
            if staged is None:
                if not history.may_lack(slave, made, "I9"):
                    wrong.append(
                        f"{made} merged push {say_push(item.push)}, but slave {slave} never recorded that it had all "
                        "of it"
                    )
                continue
            judged = True
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
    known = [(slave, staged) for slave in digests if (staged := history.staged.get((push, slave))) is not None]
    sent = {slave: hex_of(digest) for slave, digest in digests.items()}
    wrong = [_differs(push, slave, held, sent[slave]) for slave, held in known if sent[slave] not in held.values()]
    return wrong if known else None


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


# ---- fencing ---------------------------------------------------------------------------------------------------------
#
# I8: nothing from an older epoch, incarnation, attempt or timeline changes state.


def nothing_old(history: History, fact: Fact) -> Sentences:
    """Nothing from an older epoch, incarnation, attempt or timeline changes state.

    Evidence: epochs and rounds rise through the journal; each cluster's decided pushes have rising incarnations,
    numbers and fences; a slave's promises never fall, and it begins to measure or prepare nothing for an epoch older
    than its promise; tickets go to no older incarnation than a ticket before.
    """
    match fact.source:
        case "journal":
            return _journal(history, fact)
        case "slave":
            return _slave(history, fact)
    return _ticket(history, fact)


def _journal(history: History, fact: Fact) -> Sentences:
    wrong = []
    epoch = int(fact.fields.get("epoch", 0))
    if epoch < history.epoch or (fact.kind == "EPOCH" and epoch == history.epoch):
        wrong.append(f"the journal's {fact.kind} has epoch {epoch}, but was written after one of epoch {history.epoch}")
    if fact.kind == "JOIN":
        cluster, incarnation = str(fact.fields["cluster"]), pair(fact.fields.get("incarnation"))
        known = history.joined.get(cluster)
        if incarnation is not None and known is not None and incarnation <= known:
            wrong.append(f"cluster {cluster} joined as incarnation {incarnation}, but was incarnation {known} before")
    if fact.decision is not None:
        wrong += _decision(history, fact.decision)
    return wrong


def _decision(history: History, made: Decision) -> list[str]:
    wrong = []
    if made.kind != "ADOPT" and made.round is not None and history.newest_round is not None:
        if made.round <= history.newest_round:
            wrong.append(f"{made} comes after round {say_round(history.newest_round)}")
    for item in made.participants:
        known = history.last_decided.get(item.push[0])
        if known is None:
            continue
        push, fence, _ = known
        if item.push <= push:
            wrong.append(f"{made} decides push {say_push(item.push)} after push {say_push(push)} of the same cluster")
        if item.base is not None and item.fence <= fence and made.kind != "ROLLBACK":
            wrong.append(
                f"{made} takes push {say_push(item.push)} with fence {item.fence}, but push {say_push(push)} of the "
                f"same cluster was decided with fence {fence}: it is based on an older state"
            )
    return wrong


def _slave(history: History, fact: Fact) -> Sentences:
    promised = history.promised[fact.who]
    if fact.kind == "promised":
        epoch = int(fact.fields["epoch"])
        return [f"slave {fact.who} promised epoch {epoch} after epoch {promised}"] if epoch < promised else []
    round_id = fact.round()
    if round_id is None:
        return None
    if round_id[0] < promised and not _begun_before(history, fact):
        return [f"slave {fact.who} {fact.kind} round {say_round(round_id)}, but had promised epoch {promised}"]
    return []


def _begun_before(history: History, fact: Fact) -> bool:
    """Whether the job was running when the slave promised a newer epoch: it ends later, and its result is dropped."""
    took_s = fact.fields.get("took_s")
    return took_s is not None and fact.at_s - float(took_s) <= history.promised_at_s[fact.who]


def _ticket(history: History, fact: Fact) -> Sentences:
    push = fact.push()
    cluster, *numbers = push
    known = history.ticketed.get(cluster)
    if known is not None and tuple(numbers) < known:
        newest = say_push((cluster, *known))
        return [f"the master gave a ticket to push {say_push(push)} after one to push {newest}"]
    return []


# ---- numbers ---------------------------------------------------------------------------------------------------------
#
# I11, I12, I13: tokens, data and finite numbers.


STATES = ("free", "leased", "settled", "applied", "excluded")
"""Of a row of a lease table. Settled is applied or excluded, which are only counted; older releases wrote which."""


def tokens_add_up(history: History, fact: Fact) -> Sentences:
    """tokens(v+1) = tokens(v) + accepted tokens.

    Evidence: every COMMIT's sum against the record before it and its accepted pushes; a ROLLBACK has the sum of its
    origin, and says how many tokens are lost.
    """
    made = fact.made
    if made.tokens is None:
        return None
    if made.kind == "ROLLBACK":
        return _back(history, made)
    before = 0 if made.from_version is None else history.tokens_at.get(made.from_version)
    if before is None:
        return None
    added = sum(item.tokens for item in made.accepted)
    if made.tokens != before + added:
        return [f"{made} says {made.tokens} tokens, but there were {before}, and it applied {added}"]
    return []


def _back(history: History, made: Decision) -> Sentences:
    wrong = []
    at_origin = history.tokens_at.get(made.origin) if made.origin is not None else None
    if at_origin is not None and made.tokens != at_origin:
        wrong.append(f"{made} says {made.tokens} tokens, but its origin has {at_origin}")
    head = history.head
    if head is not None and head.tokens is not None and made.tokens is not None:
        lost = max(0, head.tokens - made.tokens)
        if made.lost_tokens != lost:
            wrong.append(f"{made} says that {made.lost_tokens} tokens are lost, but it is {lost}")
    return wrong


def one_state_for_each_token(history: History, fact: Fact) -> Sentences:
    """Every sample is in exactly one of FREE, LEASED, APPLIED, EXCLUDED.

    Evidence: the lease table of the ledger that a COMMIT record carries covers every token of every pass that is not
    over, once, counts all tokens that are settled, and its APPLIED tokens are the run's tokens. Not applicable when
    clusters bring their own data.
    """
    ledger = fact.fields.get("ledger")
    if ledger is None and fact.fields.get("commit_record"):
        ledger = ledger_of_record(fact.fields["commit_record"])
    if ledger is None:
        return None
    table = ledger.get("leases")
    if table is None:
        return None
    where = f"the lease table of {say_version(fact.version())} on {fact}"
    wrong = _covers(ledger, table, where)
    applied = sum(end - begin for _, begin, end, state, *_ in table["holdings"] if state == "applied")
    applied += _counts(table).get("applied", 0)
    if not wrong and applied != ledger["tokens"]:
        wrong.append(f"{where} has {applied} APPLIED tokens, but the run has {ledger['tokens']}")
    return wrong


def _covers(ledger: Fields, table: Fields, where: str) -> list[str]:
    """Check that the table covers each pass from its first token to its last, without gap or overlap.

    A pass without a row is over: all its tokens are settled. Every settled token must be counted, so none are missed.
    """
    total = int(ledger["data_plan"][2])
    n_passes = int(table["begun"] if "begun" in table else table["passes"])
    reached: dict[int, int] = {}
    settled = 0
    for pass_index, begin, end, state, cluster, lease_id in table["holdings"]:
        place, expected = f"tokens {begin}-{end} of pass {pass_index}", reached.get(pass_index, 0)
        if not 0 <= pass_index < n_passes:
            return [f"{where} names pass {pass_index}, which was not begun"]
        if begin != expected or end <= begin:
            what = "in two states" if begin < expected else "in no state"
            return [f"{where}: {place} begin where {expected} should, so some tokens are {what}"]
        if state not in STATES or (state == "leased") != bool(cluster and lease_id):
            return [f"{where}: {place} are {state!r} of cluster {cluster!r}"]
        reached[pass_index] = end
        settled += end - begin if state == "settled" else 0
    short = [(index, end) for index, end in sorted(reached.items()) if end != total]
    if short:
        return [f"{where}: pass {short[0][0]} ends at {short[0][1]} of {total} tokens"]
    settled += (n_passes - len(reached)) * total
    counts = _counts(table)
    if min(counts.values(), default=0) < 0 or settled != sum(counts.values()):
        return [f"{where} has {settled} settled tokens, but counts {counts} of them"]
    return []


def _counts(table: Fields) -> dict[str, int]:
    """The settled tokens by state; empty in a table of an older release, which has rows for them."""
    return {state: int(tokens) for state, tokens in table.get("settled", {}).items()}


def all_finite(_: History, fact: Fact) -> Sentences:
    """Every published element is finite.

    Evidence: each slave checked all elements when it prepared the version; the clip factor, the coefficients of the
    outer step and the norms of what was merged are finite; and, on disk, every element of every snapshot is.
    """
    match fact.source:
        case "journal":
            return _judgement(fact.made)
        case "file":
            n = int(fact.fields["non_finite"])
            return [f"{n} elements of {fact.fields['what']} in {fact.fields['file']} are not finite"] if n else []
    finite = fact.fields.get("finite")
    if finite is None:
        return [f"slave {fact.who} does not say whether version {say_version(fact.version())}, as prepared, is finite"]
    return [] if finite is True else [f"slave {fact.who} prepared version {say_version(fact.version())}, not finite"]


def _judgement(made: Decision) -> Sentences:
    judged = made.judgement
    if judged is None or made.kind != "COMMIT":
        return None
    accepted = {item.push[0] for item in made.accepted}
    numbers: dict[str, Any] = {name: judged[name] for name in ("kappa", "rho", "merged_norm")}
    numbers |= judged["outer_step"] or {}  # none: I18 says so
    numbers |= {f"weight {index}": weight for index, weight in enumerate(judged["weights"])}
    numbers |= {f"norm of {cluster}": norm for cluster, norm, *_ in judged["norms"] if cluster in accepted}
    return [f"{made} has {name} = {text}" for name, text in numbers.items() if not math.isfinite(float(text))]
