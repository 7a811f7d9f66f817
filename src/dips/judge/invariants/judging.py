"""I18: the judgement is recomputed."""

from __future__ import annotations

from dips.judge.facts import Fact, History, Sentences, ledger_of_record


def recomputed(history: History, fact: Fact) -> Sentences:
    """Every judgement follows by the rules from the pushes, the tokens and the state before.

    Evidence: accepted set, scores, weights, merged norm, kappa, T_round, rho and the step's coefficients of each COMMIT
    and VOID, computed again (dips.judge.judgement) from the inputs in the record and from what the detector remembers
    by the records before; the Gram matrix against what the slaves say they measured; the detector's state in every
    ledger; with --replay, the norms of the recorded pushes.
    """
    judging = history.judging
    match fact.source:
        case "journal" if fact.kind == "snapshot":
            detector = fact.fields["ledger"].get("detector")
            return None if detector is None else judging.ledger(detector)
        case "journal":
            before = history.head
            slaves = sorted(before.digests) if before is not None and not history.lossy else None
            try:
                wrong = judging.judge(fact.fields, slaves)
            except (LookupError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
                wrong = [f"the inputs of its judgement cannot be read ({error!r})"]
            return None if wrong is None else [f"{fact.made}: {sentence}" for sentence in wrong]
    version, round_id = fact.version(), fact.round()
    ledger = ledger_of_record(fact.fields["commit_record"]) if fact.fields.get("commit_record") else None
    if ledger is None or version is None or round_id is None or ledger.get("detector") is None:
        return None
    return judging.ledger(ledger["detector"], (version, round_id))
