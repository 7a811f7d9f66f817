"""Writes the end of a round into the ledger: COMMIT or VOID, with every participant's verdict, in one record."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dips.core.ids import Version
from dips.core.messages import RoundSummary, Verdict, VerdictKind
from dips.master.state import status
from dips.master.state.leases import TokenState
from dips.master.state.ledger import CommitInfo, canonical, pair, push_to_json
from dips.master.state.penalty_types import JudgeInputs, Judgement
from dips.master.state.reasons import VerdictCode
from dips.master.state.records import Donor, OuterStep, Push
from dips.master.state.rollback import next_version, rollback_commit, rolled_back
from dips.master.state.shared import SharedState
from dips.master.state.snapshots import newest_timeline
from dips.master.state.verdicts import Verdicts


class Decisions:
    """Turns a judged round into durable state, and sends its verdicts once it is published."""

    def __init__(self, shared: SharedState, verdicts: Verdicts) -> None:
        self._shared = shared
        self._verdicts = verdicts

    def accepted(self) -> list[Push]:
        """The participants that are merged, in cluster-id order; a seed is merged without a judgement."""
        state = self._shared.round
        if state.judgement is None:
            return list(state.participants)
        return [push for push in state.participants if push.cluster in state.judgement.accepted]

    def commit(self) -> CommitInfo:
        """Writes everything that the new version changes as one journal record: the commit point."""
        shared, state, ledger = self._shared, self._shared.round, self._shared.ledger
        accepted = self.accepted()
        assert state.id is not None, "a round that commits has an id"
        before, s_max = ledger.version, shared.s_max()
        version = before.next() if before else Version(shared.epoch, 0)
        self._settle(accepted, TokenState.APPLIED)
        self._settle(self._excluded(), TokenState.EXCLUDED)
        if state.judgement is not None:
            ledger.detector = shared.recorded_detector = state.judgement.next_state_if_committed
            self._alarms(state.judgement.alarms)
        ledger.tokens += sum(push.request.tokens for push in accepted)
        ledger.rounds_committed += 1
        ledger.rounds_merged += len(accepted) >= 2
        self._maybe_stop()
        self._remember(version)
        ledger.remember_applied(version, [push.id for push in accepted])
        ledger.origin = None
        digests = tuple(sorted(state.digest_of_slave.items()))
        record = self._record("COMMIT", accepted) | {
            "version": pair(version),
            "from_version": pair(before),
            "tokens": ledger.tokens,
            "s_max": s_max,
            "digests": {slave: digest.hex() for slave, digest in digests},
            "ledger": json.loads(ledger.to_json(with_commit=False)),
        }
        commit = CommitInfo(state.id, version, digests, canonical(record).encode())
        shared.set_commit(commit)
        shared.record("commit", state.cause, round=str(state.id), version=str(version), s_max=s_max)
        shared.journal("COMMIT", {**record, "ledger": "in the snapshot"})
        sentence = f"version {version}: {_names(accepted)} merged, {ledger.tokens} tokens"
        shared.log("version", sentence, cause=state.cause)
        return commit

    def donation(self, donor: Donor) -> CommitInfo:
        """Writes a ROLLBACK to a version whose parameters a cluster donated: its record is the commit point."""
        shared, state, current = self._shared, self._shared.round, self._shared.ledger
        assert state.id is not None, "a round that commits has an id"
        (push,) = state.participants
        origin = donor.commit
        version = next_version(current, origin.version, shared.epoch, newest_timeline(shared))
        restored = rolled_back(current, origin, version, shared.epoch, frozenset(shared.members))
        restored.ledger.origin = None  # no snapshot of it is left, and its momentum is not the origin's
        verdict = Verdict(push.id, VerdictKind.APPLIED, version, "the donated copy is a version again", False, state.id)
        restored.ledger.entry(push.cluster).last_donation = verdict
        push.code = VerdictCode.MERGED
        about = self._record("ROLLBACK", [push]) | {"donor": push.cluster, "s_max": shared.s_max()}
        digests = tuple(sorted(state.digest_of_slave.items()))
        decided = rollback_commit(restored, current, origin, version, state.id, digests, about)
        shared.replace_ledger(restored.ledger, decided.commit)
        shared.journal("ROLLBACK", decided.record)
        lost_tokens, n_pushes = restored.lost_tokens, len(restored.rolled_back)
        shared.tell_rollback(current.version, origin.version, push.cluster, lost_tokens, n_pushes)
        return decided.commit

    def void(self, reason: str) -> None:
        shared, state, ledger = self._shared, self._shared.round, self._shared.ledger
        assert state.judgement is not None, "only a judged round is void; a seed that is not finite is refused earlier"
        self._settle(state.participants, TokenState.EXCLUDED)
        ledger.detector = shared.recorded_detector = state.judgement.next_state_if_void
        self._alarms(state.judgement.alarms_if_void)
        ledger.rounds_void += 1
        self._remember(ledger.version, reason)
        shared.journal("VOID", self._record("VOID", []) | {"reason": reason})
        self.summary("void", reason)
        status.round_was_fruitless(shared)
        self._tell_all()

    def tell(self) -> None:
        """Sends the verdicts of a published round."""
        self.summary("commit", "")
        self._tell_all()

    def _remember(self, version: Version | None, why_void: str = "") -> None:
        """Puts every participant's verdict into the ledger before the record that decides it is written."""
        shared, state = self._shared, self._shared.round
        accepted = {push.cluster for push in self.accepted()} if not why_void else set()
        rejected = state.judgement.rejected if state.judgement else {}
        for push in state.participants:
            kind, reason, reset, push.code = VerdictKind.APPLIED, "merged", False, VerdictCode.MERGED
            if push.cluster not in accepted:
                rejection = rejected.get(push.cluster)
                push.code = rejection.code if rejection else VerdictCode.VOID
                kind, reason = VerdictKind.EXCLUDED, rejection.sentence if rejection else why_void
                # Not rejected, but the update was not finite: the cluster's inner optimizer state may be wrong too.
                reset = rejection is None or rejection.code is VerdictCode.NOT_FINITE
                reset = reset or push.cluster in shared.ledger.detector.quarantined
            shared.ledger.entry(push.cluster).last_verdict = Verdict(push.id, kind, version, reason, reset, state.id)

    def _tell_all(self) -> None:
        for push in list(self._shared.round.participants):
            entry = self._shared.ledger.entry(push.cluster)
            verdict = entry.last_donation if push.is_donation else entry.last_verdict
            assert verdict is not None, "remembered before the record was written"
            self._verdicts.decide(push, verdict)

    def summary(self, outcome: str, reason: str) -> None:
        shared, state = self._shared, self._shared.round
        judgement, accepted = state.judgement, self.accepted() if outcome == "commit" else []
        names = {push.cluster for push in accepted}
        nan = float("nan")
        assert state.id is not None, "a round that ends has an id"
        shared.recent.append(
            RoundSummary(
                state.id,
                outcome,
                reason,
                shared.ledger.version if outcome == "commit" else None,
                tuple(sorted(names)),
                tuple(push.cluster for push in state.participants if push.cluster not in names),
                judgement.kappa if judgement else nan,
                judgement.rho if judgement else nan,
                judgement.merged_norm if judgement else nan,
                shared.ledger.tokens,
                shared.now_s + shared.wall_offset_s,
            )
        )

    def _settle(self, pushes: Sequence[Push], to: TokenState) -> None:
        """Updates ranges, fences and counters of decided pushes."""
        ledger = self._shared.ledger
        for push in pushes:
            entry = ledger.entry(push.cluster)
            entry.fence += 1
            if ledger.leases is not None:
                ledger.leases.settle(push.request.ranges, to)
            if to is TokenState.EXCLUDED:
                entry.pushes_excluded += 1
            elif not push.is_seed:
                entry.pushes_applied += 1
                entry.tokens_applied += push.request.tokens
                entry.steps_applied += push.request.steps

    def _excluded(self) -> list[Push]:
        accepted = {push.cluster for push in self.accepted()}
        return [push for push in self._shared.round.participants if push.cluster not in accepted]

    def _maybe_stop(self) -> None:
        ledger, tk_max = self._shared.ledger, self._shared.settings().tk_max_tokens
        if tk_max and ledger.tokens >= tk_max and not ledger.stopping:
            ledger.stopping = f"{ledger.tokens} tokens are applied, tk_max is {tk_max}"

    def _alarms(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self._shared.alarm(sentence)

    def _record(self, kind: str, accepted: Sequence[Push]) -> dict[str, object]:
        state = self._shared.round
        judgement = state.judgement
        names = {push.cluster for push in accepted}
        return {
            "kind": kind,
            "round": pair(state.id),
            "epoch": self._shared.epoch,
            "participants": [_participant(push, push.cluster in names) for push in state.participants],
            "judgement": judgement_to_json(judgement, state.step, state.judged_from),
            "wall_s": self._shared.now_s + self._shared.wall_offset_s,
        }


def _participant(push: Push, accepted: bool) -> dict[str, object]:
    request = push.request
    return {
        "push": push_to_json(push.id),
        "attempt": push.attempt,
        "verdict": "APPLIED" if accepted else "EXCLUDED",
        "base": pair(request.base),
        "fence": request.fence,
        "tokens": request.tokens,
        "steps": request.steps,
        "ranges": [[r.lease_id, r.pass_index, r.chunk, r.begin_tokens, r.end_tokens] for r in request.ranges],
    }


def judgement_to_json(
    judgement: Judgement | None, step: OuterStep | None, inputs: JudgeInputs | None
) -> dict[str, object] | None:
    """A judgement as JSON; floats are repr text, because JSON has no NaN. The step is null in a VOID before PREPARE."""
    if judgement is None or inputs is None:
        return None
    return {
        "accepted": list(judgement.accepted),
        "rejected": [[cluster, reason.sentence] for cluster, reason in judgement.rejected.items()],
        "weights": [repr(w) for w in judgement.weights],
        "kappa": repr(judgement.kappa),
        "rho": repr(judgement.rho),
        "merged_norm": repr(judgement.merged_norm),
        "clip_norm": repr(judgement.clip_norm),
        "threshold": repr(judgement.threshold),
        "norms": [[m.cluster, repr(m.norm), repr(m.score), repr(m.cosine)] for m in judgement.measures],
        "outer_step": step.to_json() if step is not None else None,
        "inputs": inputs.to_json(),
    }


def _names(pushes: Sequence[Push]) -> str:
    return ", ".join(push.cluster for push in pushes)
