"""Drives the round: IDLE -> WINDOW -> SEALED -> MEASURE -> JUDGE -> PREPARE -> COMMIT -> PUBLISH -> IDLE
(docs/protocol.md, one round).

Two rounds never overlap. Before the COMMIT record is durable an abort is presumed; after it the round must finish.
The phases of pushes say which take part: ADMITTED waits for the next window, SEALED is in the round.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from dips.core import messages
from dips.core.errors import RefusalCode
from dips.core.ids import RoundId, Version
from dips.core.units import format_seconds
from dips.master.state import pacing, records, tape
from dips.master.state import pushes as bases
from dips.master.state.alarms import compare_pushes, round_was_fruitless
from dips.master.state.leases import TokenState
from dips.master.state.ledger import CommitInfo, canonical, pair, push_to_json
from dips.master.state.penalty import judge, round_tokens
from dips.master.state.penalty_detect import GramError, add_blocks, add_directions, zero_everywhere
from dips.master.state.penalty_types import JudgeInputs, Judgement, Participant
from dips.master.state.pushes import Pushes, recheck
from dips.master.state.reasons import Reason, VerdictCode
from dips.master.state.rollback import next_version, roll_back
from dips.master.state.shared import SharedState
from dips.master.state.status import few_pushes, lagging, named, too_few_clusters

MAX_TIMEOUT_FACTOR = 8.0
RETRY_PAUSE_S = 1.0

NAMED_REJECTIONS = 4
"""The most clusters whose reasons are quoted in the reason of a VOID round."""


class Rounds:
    """The round's state machine; settle() is called after every event and makes all steps that are possible."""

    def __init__(self, shared: SharedState, pushes: Pushes) -> None:
        self._shared = shared
        self._pushes = pushes

    def settle(self) -> None:
        """Opens, closes or empties the window, according to the admitted pushes and the time."""
        shared, state = self._shared, self._shared.round
        ending = shared.ledger.stopping or shared.ledger.stop_asked
        donation = self._donation()
        may_begin = donation or not (ending or lagging(shared) or shared.reshard.moving)
        if state.phase.now is records.RoundPhase.IDLE and may_begin and self._shared.admitted():
            state.id = RoundId(shared.epoch, shared.ledger.round_n + 1)
            shared.ledger.round_n += 1
            pacing.open_window(shared)
            self._move("push admitted", records.RoundPhase.WINDOW)
            if words := too_few_clusters(shared):
                shared.log("first round", words)
        if state.phase.now is records.RoundPhase.WINDOW:
            if ending and not self._may_go_on():
                self._abort_pushes(ending)
            if not self._shared.admitted():
                self._move("no push is left", records.RoundPhase.IDLE)
            elif why := self._may_close():
                self._seal(why)
        if state.phase.now is records.RoundPhase.IDLE and shared.ledger.stopping and not shared.recovery.donating:
            self._abort_pushes(shared.ledger.stopping)

    def _abort_pushes(self, why: str) -> None:
        for push in list(self._shared.pushes()):
            self._pushes.abort(push, Reason(VerdictCode.RUN_END, f"the run ends: {why}"))

    def tick(self) -> None:
        state = self._shared.round
        if state.resend_s is not None and self._shared.now_s >= state.resend_s:
            self._send_commit(again=True)
        if state.deadline_s is not None and self._shared.now_s >= state.deadline_s:
            self.abort(Reason(VerdictCode.TIMEOUT, f"the {state.phase.now.value} phase ran out of time"))

    def deadlines(self) -> list[float]:
        state = self._shared.round
        if state.phase.now is records.RoundPhase.WINDOW:
            # Everything else that the window waits for comes as an event.
            closes_s = state.few_until_s if state.awaited else state.window_closes_s
            return [max(closes_s, state.not_before_s)] if self._may_go_on() else []
        return [due_s for due_s in (state.deadline_s, state.resend_s) if due_s is not None]

    def rearm(self, gap_s: float) -> None:
        """Extends all deadlines by gap_s, a pause of the master itself."""
        state = self._shared.round
        state.window_closes_s += gap_s
        state.window_ends_s += gap_s
        state.few_until_s += gap_s
        state.not_before_s += gap_s
        if state.deadline_s is not None:
            state.deadline_s += gap_s
        if state.resend_s is not None:
            state.resend_s += gap_s

    # ---- window ----

    def _donation(self) -> bool:
        """Whether a donated copy of a lost version waits to be committed; no pause or end of the run stops it."""
        return self._shared.recovery.donating and any(push.is_donation for push in self._shared.admitted())

    def _may_go_on(self) -> bool:
        shared = self._shared
        if self._donation():
            return shared.all_slaves_ready()
        begun = shared.ledger.version is None or shared.enough_clusters()
        still = shared.ledger.paused or shared.reshard.moving or shared.waits_for_replica
        return begun and not still and shared.all_slaves_ready()

    def _may_close(self) -> str:
        """Why the window closes now; empty while it stays open."""
        shared, state = self._shared, self._shared.round
        before, state.awaited = state.awaited, ()
        if not self._may_go_on() or shared.now_s < state.not_before_s:
            state.few_until_s = math.inf
            return ""
        state.few_until_s = min(state.few_until_s, shared.now_s + (shared.config.round_deadline_s or math.inf))
        if shared.ledger.version is None or self._donation():
            return "nothing is merged with it"
        missing = [
            member
            for member in shared.live()
            if (member.push is None or member.push.phase.now is not records.PushPhase.ADMITTED)
            and member.cluster not in shared.ledger.draining
        ]
        left_s = state.window_closes_s - shared.now_s
        if left_s > 0 and any(pacing.may_arrive(shared, member, state.window_closes_s) for member in missing):
            return ""
        if awaited := pacing.awaited(shared):
            state.awaited = awaited
            if not before:
                in_s = state.few_until_s - shared.now_s
                words = f"{few_pushes(shared)}, for at most {format_seconds(round(in_s, 1))}"
                self._say_too_small(shared.admitted(), awaited, in_s, words)
            return ""
        if not missing:
            return "every cluster is in"
        if left_s <= 0:
            return "its time is over"
        return f"{', '.join(member.cluster for member in missing)} cannot push in the {left_s:.1f} s that are left"

    def _say_too_small(
        self, pushes: Sequence[records.Push], clusters: Sequence[str], left_s: float, sentence: str
    ) -> None:
        shared, state = self._shared, self._shared.round
        n, minimum = pacing.n_mergeable(shared, pushes), shared.config.min_clusters_per_round
        shared.record(
            tape.RoundTooSmall(
                state.cause,
                round=state.id,
                pushes=n,
                minimum=minimum,
                clusters=list(clusters),
                left_s=left_s,
                sentence=sentence,
            )
        )
        shared.log("few pushes", sentence, cause=state.cause)

    def _seal(self, why: str) -> None:
        shared, state = self._shared, self._shared.round
        wanted = pacing.wanted(shared)
        late = list(pacing.can_come(shared)) if wanted else []
        self._move("window closed", records.RoundPhase.SEALED, why)
        for push in self._shared.admitted():
            if (reason := recheck(shared, push)) is not None:
                self._pushes.abort(push, reason)
                late.append(push.cluster)
                continue
            push.phase.move("window sealed", records.PushPhase.SEALED, shared.now_s, state.cause)
            state.participants.append(push)
        if not state.participants:
            self._move("no push is left", records.RoundPhase.IDLE)
        elif state.participants[0].is_seed:
            donation = state.participants[0].is_donation
            self._move("it is a donation" if donation else "it is the seed", records.RoundPhase.PREPARE)
            self._prepare((1.0,), records.seed_step(shared.config.settings.outer_lr))
        else:
            n = pacing.n_mergeable(shared, state.participants)
            if n < wanted:
                without = f"without {named(late)}" if late else "no other cluster can come in time"
                state.few = f"went on with {n} of {wanted} pushes (min_clusters_per_round), {without}"
                self._say_too_small(state.participants, late, 0.0, f"the round {state.few}")
            version = shared.ledger.version
            assert state.id is not None, "a sealed round has an id"
            assert version is not None, "only the seed has no version"
            self._move(
                "checks passed", records.RoundPhase.MEASURE, "with " + ", ".join(p.cluster for p in state.participants)
            )
            self._arm()
            shared.command_all(messages.Measure(state.id, version, _staged(state.participants)), state.cause)

    # ---- measure and judge ----

    def measured(self, slave: records.Slave, body: messages.Measured) -> None:
        shared, state = self._shared, self._shared.round
        if state.phase.now is not records.RoundPhase.MEASURE or body.round != state.id:
            return
        state.measured[slave.id], state.directions[slave.id] = body.blocks, body.directions
        state.all_zero[slave.id] = body.all_zero
        if len(state.measured) < len(shared.slaves_expected()):
            return
        try:
            placement, k = shared.ledger.placement, len(state.participants)
            assert placement is not None, "a round has a placement"
            gram, nonfinite = add_blocks(state.measured, placement, k)
            directions = add_directions(state.directions, k)
            zero = zero_everywhere(state.all_zero, k)
        except GramError as error:
            self.abort(Reason(VerdictCode.REFUSED, str(error)))
            return
        self._move("all measured", records.RoundPhase.JUDGE)
        facts = zip(state.participants, nonfinite, zero, strict=True)
        self._judge(gram, [_judged_push(shared, *each) for each in facts], directions)

    def _judge(
        self, gram: list[list[float]], participants: list[Participant], directions: list[list[float]] | None
    ) -> None:
        shared, state = self._shared, self._shared.round
        detector, config = shared.ledger.detector, shared.config.penalty
        live = frozenset(shared.members) - frozenset(shared.ledger.draining)
        rates, intervals_s = pacing.rates_and_intervals(shared)
        t_round = round_tokens(rates, intervals_s)
        judgement = judge(detector, config, participants, gram, live - detector.quarantined, t_round, directions)
        state.judgement = judgement
        state.judged_from = JudgeInputs(
            config,
            shared.config.settings.outer_lr,
            tuple(participants),
            tuple(map(tuple, gram)),
            tuple(sorted(live)),
            tuple(sorted(rates.items())),
            tuple(sorted(intervals_s.items())),
            t_round,
            None if detector == shared.recorded_detector else detector,
        )
        self._record_judgement(judgement)
        if directions is not None:
            compare_pushes(shared, [p.cluster for p in participants], judgement.accepted, directions)
        if not judgement.accepted:
            named = list(judgement.rejected.items())[:NAMED_REJECTIONS]
            why = ", ".join(f"{cluster}: {reason.sentence}" for cluster, reason in named)
            self._void(f"no push was accepted ({why}{', ...' if len(named) < len(judgement.rejected) else ''})")
            return
        self._move("accepted", records.RoundPhase.PREPARE)
        before, outer_lr = shared.ledger.version, shared.config.settings.outer_lr
        assert before is not None, "what is judged starts from a version"
        step = records.outer_step_of(shared.config.penalty, outer_lr, judgement.scale, judgement.rho, before)
        self._prepare(judgement.weights, step, judgement.rho)

    def _record_judgement(self, judgement: Judgement) -> None:
        shared, state = self._shared, self._shared.round
        shared.record(
            tape.RoundJudged(
                state.cause,
                round=state.id,
                accepted=list(judgement.accepted),
                rejected={cluster: reason.sentence for cluster, reason in judgement.rejected.items()},
                norms={m.cluster: m.norm for m in judgement.measures},
                scores={m.cluster: m.score for m in judgement.measures},
                cosines={m.cluster: m.cosine for m in judgement.measures},
                kappa=judgement.kappa,
                rho=judgement.rho,
                merged_norm=judgement.merged_norm,
            )
        )

    # ---- prepare, commit, publish ----

    def _prepare(self, weights: tuple[float, ...], step: records.OuterStep, rho: float = 1.0) -> None:
        """Sends PREPARE. rho: the share of a full round, by which averaged buffers move."""
        shared, state = self._shared, self._shared.round
        version = shared.ledger.version
        assert state.id is not None, "a sealed round has an id"
        to_version = version.next() if version is not None else Version(shared.epoch, 0)
        if (donor := self._donor()) is not None:
            version = None  # the donated copy is taken as it is, and gets its new name
            to_version = next_version(shared.ledger, donor.commit.version, shared.epoch, shared.newest_timeline())
        accepted = _staged(self._accepted())
        state.step = step
        self._arm()
        shared.command_all(
            messages.Prepare(
                state.id, version, to_version, accepted, weights, **dataclasses.asdict(step), averaged_share=rho
            ),
            state.cause,
        )

    def _donor(self) -> records.Donor | None:
        """The donor whose copy this round commits; None in every other round."""
        state = self._shared.round
        donation = bool(state.participants) and state.participants[0].is_donation
        return self._shared.recovery.donor if donation else None

    def prepared(self, slave: records.Slave, body: messages.Prepared) -> None:
        shared, state = self._shared, self._shared.round
        if state.phase.now is not records.RoundPhase.PREPARE or body.round != state.id:
            return
        donor = self._donor()
        if donor is not None and body.digest != dict(donor.commit.digest_of_slave).get(slave.id):
            shared.recovery.wrong.add((donor.cluster, donor.incarnation, donor.commit.version))
            sentence = f"what slave {slave.id} prepared from the donated copy is not version {donor.commit.version}"
            self._give_up(Reason(VerdictCode.DIGEST, sentence))
            return
        state.digest_of_slave[slave.id] = body.digest
        if len(state.digest_of_slave) == len(shared.slaves_expected()):
            self._commit()

    def _commit(self) -> None:
        shared, state = self._shared, self._shared.round
        donor = self._donor()
        commit = self._decide_commit() if donor is None else self._decide_donation(donor)
        self._move("all prepared", records.RoundPhase.COMMIT, f"version {commit.version}")
        state.deadline_s = None
        state.timeout_factor, state.last_abort = 1.0, ""
        # Versions older than the two newest stay readable. When there are too many, those without a reader or an open
        # push are dropped first, and then the oldest.
        current = shared.published.version if shared.published else commit.version
        used = ({pin.version for pin in shared.pins.values()} | bases.in_use(shared)) - {commit.version, current}
        spare = bases.trained_on(shared) - {commit.version, current} - used
        old = sorted(used, reverse=True) + sorted(spare, reverse=True)
        kept = set(old[: shared.config.pinned_versions])
        for pin_id in [p.pin_id for p in shared.pins.values() if p.version in set(old) - kept]:
            del shared.pins[pin_id]
        for version in set(shared.kept) - kept - {current}:
            del shared.kept[version]
        shared.command_all(messages.Retain(tuple(sorted(kept))), state.cause)
        self._send_commit()

    def _send_commit(self, again: bool = False) -> None:
        """Sends COMMIT to every slave that has not flipped, repeatedly, because a committed round must finish."""
        shared, state, commit = self._shared, self._shared.round, self._shared.ledger.commit
        assert commit is not None, "what is sent is committed"
        state.resend_s = shared.now_s + shared.config.evict_after_s / 2
        if again and shared.out.waiting:
            return  # the first COMMIT is still held back: the journal's disk is slow
        body = messages.Commit(commit.round, commit.version, commit.commit_hash, commit.record)
        for slave in shared.ready_slaves():
            if slave.id not in state.flipped:
                shared.command(slave, body, state.cause)

    def flipped(self, slave_id: str, version: Version) -> None:
        shared, state = self._shared, self._shared.round
        commit = shared.ledger.commit
        if state.phase.now is not records.RoundPhase.COMMIT or commit is None or version != commit.version:
            return
        state.flipped.add(slave_id)
        if len(state.flipped) == len(shared.slaves_expected()):
            self._publish()

    def _publish(self) -> None:
        shared, state = self._shared, self._shared.round
        commit = shared.ledger.commit
        assert commit is not None, "published is what was committed"
        self._move("all flipped", records.RoundPhase.PUBLISH)
        shared.published = shared.kept[commit.version] = records.Kept(commit, shared.ledger.tokens)
        pacing.published(shared)
        pacing.warn_of_momentum(shared)
        for slave in shared.ready_slaves():
            slave.version = commit.version
        shared.record(tape.VersionPublished(state.cause, version=commit.version, tokens=shared.ledger.tokens))
        self._summarise("commit", state.few)
        self._tell_all()
        self._end("verdicts sent")

    # ---- what the record says ----

    def _accepted(self) -> list[records.Push]:
        """The participants that are merged, in cluster-id order; a seed is merged without a judgement."""
        state = self._shared.round
        if state.judgement is None:
            return list(state.participants)
        return [push for push in state.participants if push.cluster in state.judgement.accepted]

    def _decide_commit(self) -> CommitInfo:
        """Writes everything that the new version changes as one journal record: the commit point."""
        shared, state, ledger = self._shared, self._shared.round, self._shared.ledger
        accepted = self._accepted()
        assert state.id is not None, "a round that commits has an id"
        before, s_max = ledger.version, shared.s_max()
        version = before.next() if before else Version(shared.epoch, 0)
        self._settle(accepted, TokenState.APPLIED)
        merged = {push.cluster for push in accepted}
        self._settle([push for push in state.participants if push.cluster not in merged], TokenState.EXCLUDED)
        if state.judgement is not None:
            ledger.detector = shared.recorded_detector = state.judgement.next_state_if_committed
            for alarm in state.judgement.alarms:
                shared.alarm(alarm)
        ledger.tokens += sum(push.request.tokens for push in accepted)
        ledger.rounds_committed += 1
        ledger.rounds_merged += len(accepted) >= 2
        tk_max = shared.settings().tk_max_tokens
        if tk_max and ledger.tokens >= tk_max and not ledger.stopping:
            ledger.stopping = f"{ledger.tokens} tokens are applied, tk_max is {tk_max}"
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
        shared.record(tape.RoundCommitted(state.cause, round=state.id, version=version, s_max=s_max))
        shared.journal("COMMIT", {**record, "ledger": "in the snapshot"})
        names = ", ".join(push.cluster for push in accepted)
        shared.log("version", f"version {version}: {names} merged, {ledger.tokens} tokens", cause=state.cause)
        return commit

    def _decide_donation(self, donor: records.Donor) -> CommitInfo:
        """Writes a ROLLBACK to a version whose parameters a cluster donated."""
        shared, lost = self._shared, self._shared.ledger.version
        (push,) = shared.round.participants
        about = self._record("ROLLBACK", [push])
        lost_tokens, n_pushes = roll_back(shared, donor.commit, about, push)
        shared.tell_rollback(lost, donor.commit.version, push.cluster, lost_tokens, n_pushes)
        assert shared.ledger.commit is not None, "a ROLLBACK has a commit"
        return shared.ledger.commit

    def _remember(self, version: Version | None, why_void: str = "") -> None:
        """Puts every participant's verdict into the ledger before the record that decides it is written."""
        shared, state = self._shared, self._shared.round
        accepted = {push.cluster for push in self._accepted()} if not why_void else set()
        rejected = state.judgement.rejected if state.judgement else {}
        for push in state.participants:
            kind, reason, reset, push.code = messages.VerdictKind.APPLIED, "merged", False, VerdictCode.MERGED
            if push.cluster not in accepted:
                rejection = rejected.get(push.cluster)
                push.code = rejection.code if rejection else VerdictCode.VOID
                kind, reason = messages.VerdictKind.EXCLUDED, rejection.sentence if rejection else why_void
                # Not rejected, but the update was not finite: the cluster's inner optimizer state may be wrong too.
                reset = rejection is None or rejection.code is VerdictCode.NOT_FINITE
                reset = reset or push.cluster in shared.ledger.detector.quarantined
            shared.ledger.entry(push.cluster).last_verdict = messages.Verdict(
                push.id, kind, version, reason, reset, state.id
            )

    def _tell_all(self) -> None:
        for push in list(self._shared.round.participants):
            entry = self._shared.ledger.entry(push.cluster)
            verdict = entry.last_donation if push.is_donation else entry.last_verdict
            assert verdict is not None, "remembered before the record was written"
            self._pushes.decide(push, verdict)

    def _summarise(self, outcome: str, reason: str) -> None:
        shared, state = self._shared, self._shared.round
        judgement, accepted = state.judgement, self._accepted() if outcome == "commit" else []
        names = {push.cluster for push in accepted}
        nan = float("nan")
        assert state.id is not None, "a round that ends has an id"
        shared.recent.append(
            messages.RoundSummary(
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

    def _settle(self, pushes: Sequence[records.Push], to: TokenState) -> None:
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

    def _record(self, kind: str, accepted: Sequence[records.Push]) -> dict[str, object]:
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

    # ---- void and abort ----

    def _void(self, reason: str) -> None:
        """Ends the round VOID: version and momentum do not change, and every participant is EXCLUDED, durably. A seed
        has no judgement: it is aborted."""
        shared, state = self._shared, self._shared.round
        if state.judgement is None:
            self._give_up(Reason(VerdictCode.REFUSED, reason))
            return
        if state.phase.now is records.RoundPhase.PREPARE:
            assert state.id is not None, "a round that prepares has an id"
            shared.command_all(messages.AbortRound(state.id, reason), state.cause)
        ledger = shared.ledger
        assert state.judgement is not None, "only a judged round is void; a seed that is not finite is refused earlier"
        self._settle(state.participants, TokenState.EXCLUDED)
        ledger.detector = shared.recorded_detector = state.judgement.next_state_if_void
        for alarm in state.judgement.alarms_if_void:
            shared.alarm(alarm)
        ledger.rounds_void += 1
        self._remember(ledger.version, reason)
        shared.journal("VOID", self._record("VOID", []) | {"reason": reason})
        self._summarise("void", reason)
        round_was_fruitless(shared)
        self._tell_all()
        self._end("void")

    def abort(self, reason: Reason) -> None:
        """Aborts the round: complete stagings wait for the next window, the other pushes are decided ABORTED."""
        shared, state, why = self._shared, self._shared.round, reason.sentence
        assert state.id is not None, "only a round that began is aborted"
        shared.command_all(messages.AbortRound(state.id, why), state.cause)
        for push in state.participants:
            push.phase.move("round aborted", records.PushPhase.ADMITTED, shared.now_s, state.cause, why)
        self._summarise("abort", why)
        round_was_fruitless(shared)
        shared.rounds_aborted += 1
        state.last_abort = why
        shared.log(
            "round", f"round {state.id} is aborted: {why}; complete pushes enter the next one", cause=state.cause
        )
        state.timeout_factor = min(MAX_TIMEOUT_FACTOR, state.timeout_factor * 2)
        state.not_before_s = shared.now_s + RETRY_PAUSE_S * state.timeout_factor / 2
        given_up = [push for push in state.participants if self._no_one_waits_for(push)]
        self._end("abort")
        for push in given_up:
            self._pushes.abort(push, reason)

    def _give_up(self, reason: Reason) -> None:
        """Aborts the round and its pushes: they would fail the next round for the same reason. No training is lost."""
        pushes = list(self._shared.round.participants)
        self.abort(reason)
        for push in pushes:
            if push.phase.allows("aborted"):
                self._pushes.abort(push, reason)

    def _no_one_waits_for(self, push: records.Push) -> bool:
        """Whether the push's cluster is gone, or only waits for this push before it leaves."""
        member = self._shared.members.get(push.cluster)
        return member is None or member.push is not push or member.leave_token is not None

    def refused(self, slave: records.Slave, body: messages.RoundRefused) -> None:
        state = self._shared.round
        if body.round != state.id or state.phase.now not in (records.RoundPhase.MEASURE, records.RoundPhase.PREPARE):
            return
        sentence = f"slave {slave.id} cannot {body.command}: {body.refusal.sentence}"
        if body.refusal.code is RefusalCode.NONFINITE and state.phase.now is records.RoundPhase.PREPARE:
            self._void(sentence)
        elif body.refusal.code is RefusalCode.UNKNOWN_PUSH:
            self._give_up(Reason(VerdictCode.REFUSED, sentence))
        else:
            self.abort(Reason(VerdictCode.REFUSED, sentence))

    def slave_lost(self, slave: records.Slave, sentence: str) -> None:
        """Handles the loss of a slave's stagings: aborts an open round, and every push that the slave held completely.

        The slave returns with the newest version only, so older ones are no longer readable.
        """
        shared = self._shared
        reason = Reason(VerdictCode.SLAVE_LOST, sentence)
        shared.kept = {v: kept for v, kept in shared.kept.items() if kept is shared.published}
        if self._shared.round.phase.now in (records.RoundPhase.MEASURE, records.RoundPhase.PREPARE):
            self.abort(reason)
        for push in list(self._shared.pushes()):
            push.forget(slave.id)
            if push.phase.now in (records.PushPhase.STAGED, records.PushPhase.ADMITTED):
                self._pushes.abort(push, reason)

    def slave_back(self) -> None:
        """Ends the wait after a failed round, because its cause may be repaired."""
        state = self._shared.round
        state.timeout_factor = 1.0
        state.not_before_s = min(state.not_before_s, self._shared.now_s)

    def end_committed(self, reason: str) -> list[records.Push]:
        """Ends a COMMIT that waits for its slaves, because a recovery replaces it; returns the pushes of the round."""
        state = self._shared.round
        if state.phase.now is not records.RoundPhase.COMMIT:
            return []
        pushes = list(state.participants)
        self._summarise("given up", reason)
        self._end("recovery")
        return pushes

    def _end(self, input_name: str) -> None:
        state = self._shared.round
        self._move(input_name, records.RoundPhase.IDLE)
        state.id = None
        state.deadline_s, state.resend_s = None, None
        state.judgement, state.judged_from, state.step = None, None, None
        state.participants.clear()
        state.measured.clear()
        state.directions.clear()
        state.all_zero.clear()
        state.digest_of_slave.clear()
        state.flipped.clear()

    def _arm(self) -> None:
        shared, state = self._shared, self._shared.round
        state.deadline_s = shared.now_s + shared.config.settings.round_timeout_s * state.timeout_factor

    def _move(self, input_name: str, to: records.RoundPhase, why: str = "") -> None:
        shared, state = self._shared, self._shared.round
        state.phase.move(input_name, to, shared.now_s, state.cause, why)
        shared.record(tape.RoundMoved(state.cause, round=state.id, phase=to.value, input=input_name, why=why))


def _judged_push(shared: SharedState, push: records.Push, nonfinite_elems: int, all_zero: bool) -> Participant:
    request = push.request
    # H_j: a cluster that trained during an outage has more steps than it was asked to make, and is not an outlier
    # because of that.
    member = shared.members.get(push.cluster)
    asked = member.local_steps if member is not None else 0
    steps = min(push.request.steps, asked) if asked else push.request.steps
    return Participant(push.cluster, float(request.tokens), nonfinite_elems, steps, request.steps, all_zero)


def _staged(pushes: list[records.Push]) -> tuple[messages.StagedPush, ...]:
    return tuple(messages.StagedPush(push.id, push.attempt) for push in pushes)


def _participant(push: records.Push, accepted: bool) -> dict[str, object]:
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
    judgement: Judgement | None, step: records.OuterStep | None, inputs: JudgeInputs | None
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
