"""I8: nothing from an older epoch, incarnation, attempt or timeline changes state."""

from __future__ import annotations

from dips.judge.facts import Decision, Fact, History, Sentences, pair, say_push, say_round


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
    promised = history.promised.get(fact.who, 0)
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
    return took_s is not None and fact.at_s - float(took_s) <= history.promised_at_s.get(fact.who, 0.0)


def _ticket(history: History, fact: Fact) -> Sentences:
    push = fact.push()
    cluster, *numbers = push
    known = history.ticketed.get(cluster)
    if known is not None and tuple(numbers) < known:
        newest = say_push((cluster, *known))
        return [f"the master gave a ticket to push {say_push(push)} after one to push {newest}"]
    return []
