"""Handles the cluster's open push from BeginPush to its verdict, and acts on each row of the verdict table
(docs/protocol.md): on each kind of verdict, and on the answer to a new Join.

At most one push is undecided. Its bytes, ranges, tokens, base and fence never change while it is: a call whose
outcome is unknown is repeated as it was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dips.core.errors import ConfigError, Refused, RemoteProtocolError, option
from dips.core.ids import PushId, Version
from dips.core.messages import (
    Admitted,
    AwaitVerdictRequest,
    BeginPushRequest,
    Busy,
    Caller,
    DataMode,
    FinishPushRequest,
    JoinReply,
    Stale,
    StaleKind,
    Ticket,
    Verdict,
    VerdictKind,
)
from dips.core.wire import Codec
from dips.worker.state import tape
from dips.worker.state.effects import (
    Cancel,
    CopyBase,
    CopyParameters,
    Delayed,
    DigestOfSlave,
    Failed,
    InstallMode,
    PushRecord,
    SendPush,
)
from dips.worker.state.pulling import Pulling, PullPlan, check_placement
from dips.worker.state.shared import Remedy, SessionPhase, SharedState
from dips.worker.state.waiting import ExchangeStage
from dips.worker.state.work import Work

DONATE_AGAIN_S = 5.0
"""Wait after a failed donation before the next one is tried, if the master still asks for it."""

AWAIT_S = 10.0
"""How long the master holds one AwaitVerdict; then it is sent again."""


@dataclass
class OpenPush:
    """The undecided push. base None: it seeds the run, or gives back the version that it `donates`."""

    id: PushId
    base: Version | None
    fence: int
    work: Work
    began_s: float
    ticket: Ticket | None = None
    # of its record, until that is durable and its number may be used (recorded); later of its transfer
    job: int | None = None
    finish_after_s: float = 0.0
    failures: int = 0
    donates: Version | None = None
    recorded: bool = True
    in_place_of_pull: bool = False  # a pull was given up for it, which must be made after all
    wanted_wire: Codec = Codec.F32  # the codec that is asked for
    wire: Codec | None = None  # the codec of its last ticket, None where that is not known

    @property
    def record(self) -> PushRecord:
        return PushRecord(self.id, self.base, self.fence, self.work, self.donates)


class Pushing:
    """Keeps the open push, if there is one, and the last verdict."""

    def __init__(self, shared: SharedState, pulling: Pulling) -> None:
        self._shared = shared
        self._pulling = pulling
        self.seq = 0
        """The newest number that was used."""
        self.open: OpenPush | None = None
        self._aside: tuple[PushId, OpenPush | None] | None = None
        """The awaited push and the open push that a donation set aside."""
        self.awaited: PushId | None = None
        self.why_undecided = ""
        """What the run waits for before it decides the awaited push, in the master's words."""
        self.last_verdict: Verdict | None = None
        self.not_before_s = -math.inf
        """When a push that was aborted again may be followed by one that is not due."""
        self._aborts = 0
        """Aborts in a row. Only after the first one the work is pushed again at once: a second failure may repeat for
        ever."""
        self.newest: PushRecord | None = None
        """The last push that an earlier incarnation recorded, when this one resumes from a checkpoint."""

    # ---- from BeginPush to the window ----

    def begin(self, input_name: str, *, seed: bool = False) -> None:
        """Freeze all pending work and push it; the seed carries none."""
        shared = self._shared
        work = Work() if seed else shared.work.freeze()
        base, fence = (None, 0) if seed else (shared.base, shared.base_fence)
        push = self.open = OpenPush(self._next_id(), base, fence, work, shared.now_s)
        push.wanted_wire = Codec.F32 if seed else shared.config.wire
        shared.steps_since_snapshot = shared.steps_towards_push = 0
        shared.emit(CopyParameters())
        shared.move(input_name, SessionPhase.BEGINNING_PUSH)
        shared.record(
            tape.PushBegun(
                shared.cause, push=push.id, base=base, tokens=work.tokens, steps=work.steps, mean_loss=work.mean_loss
            )
        )
        shared.patience.round_begins(shared.now_s)
        shared.hold(ExchangeStage.BEGIN)
        self._ask_to_begin(push)

    def donate(self, version: Version) -> None:
        """Push back to the slaves the version that they lost: a copy of theta_base, without work of this cluster.

        The caller has checked that it is the base. An open pull, of a version that is lost too, is given up; a push
        that is sealed in a round which cannot be completed is set aside, and its theta_at_push overwritten. Training
        goes on.
        """
        shared = self._shared
        in_place_of_pull = self._pulling.plan is not None
        self._pulling.give_up()
        if self.awaited is not None:
            self._aside, self.awaited = (self.awaited, self.open), None
            shared.work.lost = shared.work.lost or self.open is not None
        push = self.open = OpenPush(self._next_id(), None, 0, Work(), shared.now_s, donates=version)
        push.in_place_of_pull = in_place_of_pull
        shared.emit(CopyBase())
        shared.move("donate", SessionPhase.BEGINNING_PUSH)
        shared.record(tape.VersionDonated(shared.cause, version=version, push=push.id))
        shared.log("donate", f"the run has lost version {version}: this cluster gives it back")
        self._ask_to_begin(push)

    def recorded(self) -> None:
        """The push's number is on disk: it may be used."""
        push = self._must_be_open()
        push.job, push.recorded, self._shared.unrecorded_since_s = None, True, None
        if self._shared.phase.now is SessionPhase.BEGINNING_PUSH:
            self._shared.log("push record", "")
            self._shared.ask(self._begin_request)

    def delayed(self, event: Delayed) -> None:
        """The push's number is not on disk yet: the push waits, training goes on."""
        push, shared = self._must_be_open(), self._shared
        shared.train_on()
        if shared.unrecorded_since_s is None:
            shared.unrecorded_since_s = shared.now_s
        shared.note = f"push {push.id} cannot be recorded: {event.sentence}"
        shared.log("push record", f"{shared.note}; trying again", logging.WARNING)

    def begun(self, answer: Ticket | Stale | Busy | PushId | Verdict) -> None:
        """Take the answer to BeginPush."""
        match answer:
            case Ticket() as ticket:
                check_placement(ticket.placement, len(self._shared.config.layout.blocks))
                push = self._must_be_open()
                if not ticket.wire.is_difference:
                    ticket = replace(ticket, wire=Codec.F32)  # a master of an earlier release says nothing
                elif ticket.wire is not push.wanted_wire:
                    raise RemoteProtocolError(
                        f"the master asks for push {push.id} in {ticket.wire.name}, not as it was offered"
                    )
                push.ticket, push.wire = ticket, ticket.wire
                # A later attempt finds its chunks there only if it is written in the same way.
                push.wanted_wire = ticket.wire
                self._shared.move("ticket", SessionPhase.TRANSFERRING)
                self._send()
            case Busy():
                self._shared.note = answer.sentence
                self._shared.not_taken()
                self._shared.ask(self._begin_request, max(answer.retry_after_s, 0.05))
            case Stale():
                shared, push = self._shared, self._must_be_open()
                shared.record(
                    tape.BaseStale(shared.cause, push=push.id, stale_kind=answer.kind.name, reason=answer.sentence)
                )
                shared.log("push", f"push {push.id} is stale: {answer.sentence}", logging.WARNING)
                if push.base is not None and answer.kind is StaleKind.VERSIONS:
                    self._close(shared.work.thaw)
                    self._pull("stale", PullPlan(InstallMode.REBASE_FROM_BASE, None))
                    shared.steps_towards_push = shared.terms.local_steps  # its push is due as soon as it has a new base
                else:
                    self.drop("stale")
            case PushId():
                self._another(answer)
            case Verdict():
                self.act(answer)

    def sent(self, digest_of_slave: DigestOfSlave, transfer_s: float) -> None:
        """All slaves hold the push: send FinishPush with its digests."""
        shared, push = self._shared, self._must_be_open()
        shared.got_through()
        shared.push_s = shared.now_s - push.began_s
        shared.patience.transferred(ExchangeStage.SEND, transfer_s)
        ticket = push.ticket
        assert ticket is not None, "a transfer begins with a ticket"
        shared.record(
            tape.PushSent(
                shared.cause,
                push=push.id,
                attempt=ticket.attempt,
                base=push.base,
                fence=push.fence,
                tokens=push.work.tokens,
                ranges=push.work.ranges,
                digest_of_slave=dict(digest_of_slave),
                donates=push.donates,
                transfer_s=transfer_s,
                push_s=shared.push_s,
                wire=ticket.wire.name,
            )
        )
        push.job = None
        shared.move("sent", SessionPhase.FINISHING_PUSH)
        shared.hold(ExchangeStage.FINISH)
        shared.note = f"all of push {push.id} is sent"
        shared.ask(
            lambda: FinishPushRequest(self._caller(), push.id.seq, ticket.attempt, digest_of_slave),
            push.finish_after_s,
        )

    def failed(self, event: Failed) -> None:
        """Begin a new attempt: slaves keep the chunks that they have verified."""
        shared, push = self._shared, self._must_be_open()
        push.job = None
        shared.train_on()
        if event.base_gone:
            push.wanted_wire = Codec.F32
        shared.record(tape.PushFailed(shared.cause, push=push.id, reason=event.sentence))
        shared.log("push", f"sending push {push.id} failed: {event.sentence}; trying again", logging.WARNING)
        shared.move("transfer failed", SessionPhase.BEGINNING_PUSH, event.sentence)
        self._try_again()

    def finished(self, answer: Admitted | Busy | Verdict) -> None:
        """Take the answer to FinishPush."""
        shared, push = self._shared, self._must_be_open()
        match answer:
            case Admitted():
                shared.window_closes_s = shared.now_s + answer.window_closes_in_s
                shared.move("admitted", SessionPhase.AWAITING)
                if push.donates is None:
                    shared.hold(ExchangeStage.VERDICT)
                shared.record(tape.PushInWindow(shared.cause, push=push.id, round=answer.round))
                self._await(push.id)
            case Busy():
                shared.move("incomplete", SessionPhase.TRANSFERRING, answer.sentence)
                push.finish_after_s = answer.retry_after_s
                self._send()
            case Verdict():
                self.act(answer)

    def awaited_answer(self, answer: Verdict | Busy) -> None:
        if isinstance(answer, Busy):
            self.why_undecided = answer.sentence
            self._shared.note = answer.sentence or f"push {self.awaited} is not decided yet"
            self._shared.ask(self._await_request, max(answer.retry_after_s, 0.05))
        else:
            self.act(answer)

    # ---- verdicts ----

    def act(self, verdict: Verdict, input_name: str = "verdict") -> None:
        """Act on a verdict as the table says. A verdict on another push only raises the fence."""
        shared = self._shared
        if self.open is not None and self.open.donates is not None:
            self._donation_decided(verdict, input_name)
            return
        self.tell(verdict)
        if self.open is None or verdict.push != self.open.id:
            self._foreign(verdict, input_name)
            return
        if shared.work.lost:
            # Steps on data that another cluster holds, or whose theta_at_push is gone, cannot count.
            if verdict.kind in (VerdictKind.APPLIED, VerdictKind.EXCLUDED):
                self._close(lambda: shared.work.decided(counts=verdict.kind is VerdictKind.APPLIED))
            self.drop(input_name, at_least=verdict.version, reset_inner=verdict.reset_inner_optimizer)
            return
        match verdict.kind:
            case VerdictKind.APPLIED:
                shared.applied_as(self.open.wire)
                self._close(lambda: shared.work.decided(counts=True))
                self._pull(input_name, PullPlan(InstallMode.REBASE_FROM_PUSH, verdict.version))
            case VerdictKind.EXCLUDED:
                shared.log(
                    "verdict",
                    f"push {verdict.push} was excluded: {verdict.reason}; its steps are dropped, and training goes on "
                    "from the run's newest version: look at this cluster's loss, gradients and learning rate",
                    logging.WARNING,
                )
                self._close(lambda: shared.work.decided(counts=False))
                self.drop(input_name, at_least=verdict.version, reset_inner=verdict.reset_inner_optimizer)
            case VerdictKind.ABORTED:
                self._aborted(input_name)
            case VerdictKind.ROLLED_BACK:
                self.drop(input_name, at_least=verdict.version)

    def tell(self, verdict: Verdict) -> None:
        """Remember and record a verdict."""
        self._shared.got_through()
        self.last_verdict, self.awaited = verdict, None
        if verdict.kind is not VerdictKind.ABORTED:
            self._aborts = 0
        self._shared.note = ""
        self._shared.record(
            tape.VerdictReceived(
                self._shared.cause,
                push=verdict.push,
                verdict=verdict.kind.name,
                version=verdict.version,
                reason=verdict.reason,
            )
        )

    def drop(self, input_name: str, *, at_least: Version | None = None, reset_inner: bool = False) -> None:
        """Drop the steps: their ranges go back FREE, and a version replaces the parameters."""
        self._close(lambda: None)
        self._shared.clear_residual()
        self._shared.aside_ranges(self._shared.work.drop())
        self._pull(input_name, PullPlan(InstallMode.REPLACE, at_least, reset_inner, drops=True))

    def refused(self, refused: Refused, remedy: Remedy) -> None:
        """Handle a refusal that only a push can get."""
        shared, push = self._shared, self._must_be_open()
        shared.log("push", f"push {push.id} is refused: {refused.sentence}", logging.WARNING)
        shared.record(tape.PushRefused(shared.cause, push=push.id, code=refused.code.name, reason=refused.sentence))
        if push.donates is not None and remedy is not Remedy.NEW_ATTEMPT:
            self._not_donated(refused.sentence)
            return
        match remedy:
            case Remedy.NEW_ATTEMPT:
                if shared.phase.now is not SessionPhase.BEGINNING_PUSH:
                    shared.move("push again", SessionPhase.BEGINNING_PUSH, refused.sentence)
                self._try_again()
            case Remedy.NEW_PUSH if push.base is not None:
                self._close(shared.work.thaw)
                shared.steps_towards_push = shared.terms.local_steps
                shared.move("push refused", SessionPhase.TRAINING, refused.sentence)
            case _:
                # At the master these ranges are another cluster's (or counted): this cluster must not return them.
                self._close(lambda: shared.work.decided(counts=False))
                self.drop("push refused")

    def abandon(self) -> None:
        """Give the push up without a verdict: Leave or Join aborts it at the master, if it has begun there."""
        self.cancel()
        if self.open is not None and self.open.work.tokens:
            self._due_again()
        self._close(self._shared.work.thaw)

    def cancel(self) -> None:
        """Stop the transfer; a record is still written."""
        if self.open is not None and self.open.job is not None and self.open.recorded:
            self._shared.emit(Cancel(self.open.job))
            self.open.job = None

    # ---- after a new Join ----

    def joined(self, reply: JoinReply) -> None:
        """Act on the answer to a new Join: reconcile the open push, the open pull and the base with it."""
        shared, last_push = self._shared, reply.last_push
        shared.note = ""
        shared.donate = None
        # Donations end with their incarnation, and the push that one had set aside is open again.
        if self.open is not None and self.open.donates is not None:
            self.open = self._aside[1] if self._aside is not None else None
        self._aside = None
        self._keep(reply)
        if isinstance(last_push, Verdict):
            last = f"{last_push.push} {last_push.kind.name}"
        else:
            last = "none" if last_push is None else f"{last_push} undecided"
        shared.record(
            tape.SessionJoined(
                shared.cause,
                incarnation=reply.incarnation,
                epoch=reply.epoch,
                seed=reply.seed,
                fence=reply.fence,
                last_push=last,
                published=reply.published,
                run_id=reply.run_id,
                kept_tokens=sum(item.tokens for item in reply.kept_ranges),
            )
        )
        shared.log("join", f"joined run {reply.run_id} as incarnation {reply.incarnation}")
        match last_push:
            case PushId() as push_id:
                # Its verdict is awaited, then acted on as its row of the table says.
                if self.open is not None and self.open.id != push_id:
                    self.abandon()
                shared.move("joined", SessionPhase.AWAITING)
                self._await(push_id)
            case Verdict() as verdict:
                self._decided(reply, verdict)
            case None:
                self._unknown(reply)
        newest = reply.published or shared.base
        shared.terms.leases_timeline = newest.timeline if newest else None

    def _decided(self, reply: JoinReply, verdict: Verdict) -> None:
        shared, last = self._shared, self.last_verdict
        ours = self.open is not None and verdict.push == self.open.id
        acted_on = last is not None and last.push == verdict.push and last.kind is verdict.kind
        if verdict.kind is VerdictKind.ROLLED_BACK and shared.base is not None and not acted_on:
            self.tell(verdict)
            self.abandon()
            self._keep(reply)
            self.drop("joined", at_least=verdict.version)
        elif ours and verdict.kind is not VerdictKind.ABORTED:
            self.act(verdict, "joined")
        elif ours:
            self.tell(verdict)
            self._unknown(reply)
        elif acted_on:
            self.abandon()
            if self._pulling.plan is not None and not shared.work.lost:
                # Its pull is still open, and relies on the fence that the verdict raised.
                shared.move("joined", SessionPhase.PULLING)
                self._pulling.ask_again()
            else:
                self._settle(reply)
        else:
            self._unknown(reply)

    def _unknown(self, reply: JoinReply) -> None:
        """ABORTED, or the master knows no push of this cluster: keep all work, if the base is still valid."""
        self.abandon()
        plan = self._pulling.plan
        if plan is not None and plan.mode is InstallMode.REBASE_FROM_PUSH:
            # The master no longer knows the verdict that asked for this pull: its fence decides.
            self._pulling.forget()
        self._settle(reply)

    def _settle(self, reply: JoinReply) -> None:
        shared, pulling = self._shared, self._pulling
        self._keep(reply)  # once more: the open push may have become pending work
        if reply.seed:
            if shared.terms.previous is not None and shared.base is not None:
                raise ConfigError(
                    f"this cluster's checkpoint was made on version {shared.base}, but the master of run "
                    f"{reply.run_id} knows no version: if the run's state is lost, recover it (`dips master "
                    "--rebuild`); if this is a new run of the same name, remove the checkpoint or give another "
                    f"{option('checkpoint_dir')}"
                )
            shared.base = None
            pulling.forget()
            shared.aside_ranges(shared.work.drop())
            shared.clear_residual()
            self.begin("joined", seed=True)
        elif not self._base_stands(reply) or shared.work.lost:
            reset = pulling.plan is not None and pulling.plan.reset_inner
            self.drop("joined", reset_inner=reset)
        elif pulling.plan is not None:
            shared.move("joined", SessionPhase.PULLING)
            pulling.ask_again()
        else:
            shared.move("joined", SessionPhase.TRAINING)

    def _keep(self, reply: JoinReply) -> None:
        if self._shared.config.data_plan.mode is DataMode.LEASED:
            self._shared.work.keep(reply.kept_ranges)

    def _base_stands(self, reply: JoinReply) -> bool:
        """Whether the work since the base still counts. Every rollback raises the fence, so the fence alone decides
        when a master that has just started knows the run's tokens and has not published its version again yet.
        """
        base, published = self._shared.base, reply.published
        if base is None or self._shared.base_fence != reply.fence:
            return False
        return reply.tokens > 0 if published is None else base.timeline == published.timeline

    # ---- parts ----

    def _await(self, push_id: PushId) -> None:
        """Wait for the verdict of a push; the caller has moved the phase to AWAITING."""
        self.awaited, self.why_undecided = push_id, ""
        self._shared.note = f"waiting for the verdict of push {push_id}"
        self._shared.ask(self._await_request)

    def _foreign(self, verdict: Verdict, input_name: str) -> None:
        """A push of an earlier incarnation is decided. ABORTED changes nothing; else the base's fence is outdated."""
        shared = self._shared
        if self.open is not None:
            raise RemoteProtocolError(f"the master sent the verdict of {verdict.push}, not of {self.open.id}")
        if shared.base is not None and verdict.kind is VerdictKind.ABORTED and not shared.work.lost:
            shared.move(input_name, SessionPhase.TRAINING)
        else:
            newest = self.newest
            counted = verdict.kind in (VerdictKind.APPLIED, VerdictKind.EXCLUDED)
            if counted and newest is not None and newest.id == verdict.push:
                shared.aside_ranges(shared.work.decided_elsewhere(newest.work.ranges))
            self.drop(input_name, at_least=verdict.version)

    def _next_id(self) -> PushId:
        shared = self._shared
        assert shared.terms.incarnation is not None, "pushes only once joined"
        self.seq += 1
        push_id = PushId(shared.config.cluster_id, shared.terms.incarnation, self.seq)
        shared.cause = str(push_id)
        return push_id

    def _ask_to_begin(self, push: OpenPush) -> None:
        """Send BeginPush; where a checkpoint is kept, only once the push's record is on disk."""
        shared = self._shared
        if shared.config.durable_pushes:
            push.recorded = False
            shared.exchange.cancel()
            shared.note = f"recording push {push.id} on disk"
            push.job = shared.run(push.record)
        else:
            shared.ask(self._begin_request)

    def _donation_decided(self, verdict: Verdict, input_name: str) -> None:
        """Act on a donation's verdict. Taken: the run goes on from that version on a new timeline, where this cluster's
        steps do not count.

        Ranges are not returned: the rollback freed all leases. Join never names a donation as the last push, so its
        verdict is not remembered as one.
        """
        shared, push = self._shared, self._must_be_open()
        if verdict.push != push.id:
            raise RemoteProtocolError(f"the master sent the verdict of {verdict.push}, not of {push.id}")
        shared.record(
            tape.VerdictReceived(
                shared.cause, push=push.id, verdict=verdict.kind.name, version=verdict.version, reason=verdict.reason
            )
        )
        self.awaited = None
        if verdict.kind is VerdictKind.ABORTED:
            self._not_donated(verdict.reason or "its push was aborted")
            return
        shared.donate = None
        shared.work.drop()
        shared.clear_residual()
        self._close(lambda: None)
        self._pull(input_name, PullPlan(InstallMode.REPLACE, verdict.version, drops=True))

    def _not_donated(self, why: str) -> None:
        """The donation failed: go on with what was under way before it."""
        shared, push, aside = self._shared, self._must_be_open(), self._aside
        shared.record(tape.DonationRefused(shared.cause, push=push.id, reason=why))
        shared.donate_after_s = shared.now_s + DONATE_AGAIN_S
        self._close(lambda: None)
        if aside is not None:
            self.open = aside[1]
            shared.move("not donated", SessionPhase.AWAITING, why)
            self._await(aside[0])
        elif push.in_place_of_pull:
            self.drop("not donated")  # theta_at_push, which that pull needed, is overwritten
        else:
            shared.move("not donated", SessionPhase.TRAINING, why)

    def _send(self) -> None:
        shared, push = self._shared, self._must_be_open()
        assert push.ticket is not None, "sent only with a ticket"
        shared.note = f"sending push {push.id}"
        shared.hold(ExchangeStage.SEND)
        push.job = shared.run(SendPush(push.id, push.ticket))

    def _try_again(self) -> None:
        push = self._must_be_open()
        pause_s = min(self._shared.terms.times.retry_max_s, 0.2 * 2 ** min(push.failures, 20))
        push.failures += 1
        self._shared.ask(self._begin_request, pause_s)

    def _another(self, push_id: PushId) -> None:
        """Another push must be decided first: one whose admission was not answered, or an earlier incarnation's."""
        shared, push = self._shared, self.open
        if push is not None and push.donates is not None and push_id != push.id:
            self._not_donated(f"push {push_id} must be decided first")
            return
        if push is not None and push_id != push.id:
            self._close(shared.work.thaw)
            shared.steps_towards_push = shared.terms.local_steps
        shared.move("undecided", SessionPhase.AWAITING)
        shared.hold(ExchangeStage.VERDICT)
        self._await(push_id)

    def _aborted(self, input_name: str) -> None:
        shared, push = self._shared, self._must_be_open()
        was_seed = push.base is None
        shared.patience.forget()
        self._close(shared.work.thaw)
        self._aborts += 1
        if was_seed:
            self.begin(input_name, seed=True)
            return
        if self._aborts == 1:
            self._due_again()
        else:
            self.not_before_s = shared.now_s + shared.terms.times.retry_max_s
        shared.move(input_name, SessionPhase.TRAINING)

    def _due_again(self) -> None:
        """The work of a push that did not count must not wait for another H steps."""
        shared = self._shared
        shared.steps_towards_push = max(shared.steps_towards_push, shared.terms.local_steps)

    def _pull(self, input_name: str, plan: PullPlan) -> None:
        self._shared.move(input_name, SessionPhase.PULLING)
        self._pulling.begin(plan)

    def _close(self, settle: Callable[[], None]) -> None:
        """Close the push; `settle` decides about its work."""
        if self.open is not None:
            settle()
        self.open = self._aside = self._shared.unrecorded_since_s = None

    def _await_request(self) -> AwaitVerdictRequest:
        assert self.awaited is not None, "asked only while a verdict is awaited"
        return AwaitVerdictRequest(self._caller(), self.awaited, AWAIT_S)

    def _begin_request(self) -> BeginPushRequest:
        push = self._must_be_open()
        work = push.work
        return BeginPushRequest(
            self._caller(), push.id.seq, push.base, push.fence, work.ranges, work.tokens, work.steps, work.mean_loss,
            push.donates, push.wanted_wire,
        )  # fmt: skip

    def _caller(self) -> Caller:
        return self._shared.terms.caller(self._shared.cause)

    def _must_be_open(self) -> OpenPush:
        assert self.open is not None, "this answer belongs to an open push"
        return self.open
