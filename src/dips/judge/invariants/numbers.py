"""I11, I12, I13: tokens, data and finite numbers."""

from __future__ import annotations

import math
from typing import Any

from dips.judge.facts import Decision, Fact, Fields, History, Sentences, ledger_of_record, say_version

STATES = ("free", "leased", "applied", "excluded")


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

    Evidence: the lease table of the ledger that a COMMIT record carries covers every token of every pass that was
    begun, once, and its APPLIED tokens are the run's tokens. Not applicable when clusters bring their own data.
    """
    ledger = fact.fields.get("ledger")
    if ledger is None and fact.fields.get("commit_record"):
        ledger = ledger_of_record(fact.fields["commit_record"])
    if ledger is None:
        return None
    table = ledger.get("leases")
    if table is None:
        history.leased = bool(history.leased)
        return None
    history.leased = True
    where = f"the lease table of {say_version(fact.version())} on {fact}"
    wrong = _covers(ledger, table, where)
    applied = sum(end - begin for _, begin, end, state, *_ in table["holdings"] if state == "applied")
    if not wrong and applied != ledger["tokens"]:
        wrong.append(f"{where} has {applied} APPLIED tokens, but the run has {ledger['tokens']}")
    return wrong


def _covers(ledger: Fields, table: Fields, where: str) -> list[str]:
    """Check that the leases cover each pass from its first token to its last, without gap or overlap."""
    plan = ledger.get("data_plan")
    total = int(plan[2]) if plan else 0
    reached = [0] * int(table["passes"])
    for pass_index, begin, end, state, cluster, lease_id in table["holdings"]:
        place = f"tokens {begin}-{end} of pass {pass_index}"
        if not 0 <= pass_index < len(reached):
            return [f"{where} names pass {pass_index}, which was not begun"]
        if begin != reached[pass_index] or end <= begin:
            what = "in two states" if begin < reached[pass_index] else "in no state"
            return [f"{where}: {place} begin where {reached[pass_index]} should, so some tokens are {what}"]
        if state not in STATES or (state == "leased") != bool(cluster and lease_id):
            return [f"{where}: {place} are {state!r} of cluster {cluster!r}"]
        reached[pass_index] = end
    short = [index for index, end in enumerate(reached) if end != total]
    return [f"{where}: pass {short[0]} ends at {reached[short[0]]} of {total} tokens"] if short else []


def all_finite(history: History, fact: Fact) -> Sentences:
    """Every published element is finite.

    Evidence: each slave checked all elements when it prepared the version; the clip factor, the coefficients of the
    outer step and the norms of what was merged are finite; and, on disk, every element of every snapshot is.
    """
    del history
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
    numbers |= judged["outer_step"]
    numbers |= {f"weight {index}": weight for index, weight in enumerate(judged["weights"])}
    numbers |= {f"norm of {cluster}": norm for cluster, norm, *_ in judged["norms"] if cluster in accepted}
    return [f"{made} has {name} = {text}" for name, text in numbers.items() if not math.isfinite(float(text))]
