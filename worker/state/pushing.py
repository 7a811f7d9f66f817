"""The cluster's open push, from BeginPush to its verdict, and what each verdict means
(docs/protocol.md, the verdict table).

At most one push is undecided. Its bytes, ranges, tokens, base and fence never change while it is: a call whose
outcome is unknown is repeated as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dips.core.errors import Refused, RemoteProtocolError
from dips.core.ids import PushId, Version
from dips.core.messages import (
    Admitted,
    AwaitVerdictRequest,
    BeginPushRequest,
    Busy,
    Caller,
    DataRange,
    FinishPushRequest,
    ReturnDataRequest,
    Stale,
    StaleKind,
    Ticket,
    Verdict,
    VerdictKind,
)
from dips.worker.state.core import Core
from dips.worker.state.effects import CancelTransfer, InstallMode, Snapshot, StartPush
from dips.worker.state.events import PushFailed, PushSent
from dips.worker.state.phases import SessionPhase
from dips.worker.state.pulling import Pulling, PullPlan, check_placement
from dips.worker.state.refusals import Remedy
from dips.worker.state.work import Work

AWAIT_S = 10.0
"""How long one AwaitVerdict is held by the master; then it is asked again."""


@dataclass
class OpenPush:
    """The undecided push. base None: it seeds the run."""

    id: PushId
    base: Version | None
    fence: int
    work: Work
    began_s: float
    ticket: Ticket | None = None
    transfer_id: int | None = None
    finish_after_s: float = 0.0
    failures: int = 0


class Pushing:
    """The open push, if there is one, and the last verdict."""

    def __init__(self, core: Core, pulling: Pulling) -> None:
        self._core = core
        self._pulling = pulling
        self._seq = 0
        self.open: OpenPush | None = None
        self.awaited: PushId | None = None
        self.last_verdict: Verdict | None = None

    # ---- from BeginPush to the window ----

    def begin(self, input_name: str, *, seed: bool = False) -> None:
        """Freeze all pending work and push it; the seed carries none."""
        core = self._core
        assert core.terms.incarnation is not None, "pushes only once joined"
        self._seq += 1
        work = Work() if seed else core.work.freeze()
        push_id = PushId(core.config.cluster_id, core.terms.incarnation, self._seq)
        core.cause = str(push_id)
        base, fence = (None, 0) if seed else (core.base, core.base_fence)
        self.open = OpenPush(push_id, base, fence, work, core.now_s)
        core.steps_since_snapshot = core.steps_towards_push = 0
        core.emit(Snapshot())
        core.move(input_name, SessionPhase.BEGINNING_PUSH)
        core.record("push_begun", push=str(push_id), base=str(base), tokens=work.tokens, steps=work.steps,
                    mean_loss=work.mean_loss)  # fmt: skip
        core.hold()
        core.ask(self._begin_request)

    def begun(self, answer: Ticket | Stale | Busy | PushId | Verdict) -> None:
        """BeginPush is answered."""
        match answer:
            case Ticket():
                self._ticket(answer)
            case Busy():
                self._core.note = answer.sentence
                self._core.ask(self._begin_request, max(answer.retry_after_s, 0.05))
            case Stale():
                self._stale(answer)
            case PushId():
                self._another(answer)
            case Verdict():
                self.act(answer)

    def sent(self, event: PushSent) -> None:
        """All slaves hold it: say what was sent."""
        core, push = self._core, self._must_be_open()
        core.push_s = core.now_s - push.began_s
        core.record("push_sent", push=str(push.id), transfer_s=event.seconds, push_s=core.push_s)
        ticket = push.ticket
        assert ticket is not None, "a transfer begins with a ticket"
        push.transfer_id = None
        core.move("sent", SessionPhase.FINISHING_PUSH)
        core.note = f"all of push {push.id} is sent"
        core.ask(
            lambda: FinishPushRequest(self._caller(), push.id.seq, ticket.attempt, event.digest_of_slave),
            push.finish_after_s,
        )

    def failed(self, event: PushFailed) -> None:
        """A new attempt: slaves keep the chunks that they have verified."""
        core, push = self._core, self._must_be_open()
        push.transfer_id = None
        core.train_on()
        core.record("push_failed", push=str(push.id), reason=event.sentence)
        core.log("push", f"sending push {push.id} failed: {event.sentence}; it is tried again", logging.WARNING)
        core.move("transfer failed", SessionPhase.BEGINNING_PUSH, event.sentence)
        self._try_again()

    def finished(self, answer: Admitted | Busy | Verdict) -> None:
        """FinishPush is answered."""
        core, push = self._core, self._must_be_open()
        match answer:
            case Admitted():
                core.move("admitted", SessionPhase.AWAITING)
                core.record("admitted", push=str(push.id), round=str(answer.round))
                self.await_push(push.id)
            case Busy():
                core.move("incomplete", SessionPhase.TRANSFERRING, answer.sentence)
                push.finish_after_s = answer.retry_after_s
                self._send()
            case Verdict():
                self.act(answer)

    def awaited_answer(self, answer: Verdict | Busy) -> None:
        if isinstance(answer, Busy):
            self._core.note = answer.sentence or f"push {self.awaited} is not decided yet"
            self._core.ask(self._await_request, max(answer.retry_after_s, 0.05))
        else:
            self.act(answer)

    def owns(self, transfer_id: int) -> bool:
        return self.open is not None and self.open.transfer_id == transfer_id

    # ---- what is decided ----

    def act(self, verdict: Verdict, input_name: str = "verdict") -> None:
        """Do what the table says. A verdict on a push that is not ours to act on says only what the fence says."""
        core = self._core
        self.tell(verdict)
        if self.open is None or verdict.push != self.open.id:
            self._foreign(verdict, input_name)
            return
        match verdict.kind:
            case VerdictKind.APPLIED:
                self._close(core.work.decided)
                self._pull(input_name, PullPlan(InstallMode.REBASE_FROM_PUSH, verdict.version))
            case VerdictKind.EXCLUDED:
                core.log("verdict", f"push {verdict.push} was excluded: {verdict.reason}", logging.WARNING)
                self._close(core.work.decided)
                self.drop(input_name, at_least=verdict.version, reset_inner=verdict.reset_inner_optimizer)
            case VerdictKind.ABORTED:
                self._aborted(input_name)
            case VerdictKind.ROLLED_BACK:
                self.drop(input_name, at_least=verdict.version)

    def tell(self, verdict: Verdict) -> None:
        """Remember and record a verdict."""
        self.last_verdict, self.awaited = verdict, None
        self._core.note = ""
        self._core.record("verdict", push=str(verdict.push), verdict=verdict.kind.name, version=str(verdict.version),
                          reason=verdict.reason)  # fmt: skip

    def drop(self, input_name: str, *, at_least: Version | None = None, reset_inner: bool = False) -> None:
        """The steps are worth nothing: their ranges go back FREE, and a version replaces the parameters."""
        self._close(lambda: None)
        self.give_back(self._core.work.drop())
        self._pull(input_name, PullPlan(InstallMode.REPLACE, at_least, reset_inner, drops=True))

    def give_back(self, ranges: tuple[DataRange, ...]) -> None:
        if ranges:
            cause = self._core.cause
            self._core.aside(lambda: ReturnDataRequest(self._core.terms.caller(cause), ranges))

    def refused(self, refused: Refused, remedy: Remedy) -> None:
        """The push is refused in one of the ways that only a push can be."""
        core, push = self._core, self._must_be_open()
        core.log("push", f"push {push.id} is refused: {refused.sentence}", logging.WARNING)
        core.record("push_refused", push=str(push.id), code=refused.code.name, reason=refused.sentence)
        match remedy:
            case Remedy.NEW_ATTEMPT:
                if core.phase.now is not SessionPhase.BEGINNING_PUSH:
                    core.move("push again", SessionPhase.BEGINNING_PUSH, refused.sentence)
                self._try_again()
            case Remedy.NEW_PUSH if push.base is not None:
                self._close(core.work.thaw)
                core.steps_towards_push = core.terms.local_steps
                core.move("push refused", SessionPhase.TRAINING, refused.sentence)
            case _:
                # The master knows these ranges as somebody else's (or as counted): they are not ours to return.
                self._close(core.work.decided)
                self.drop("push refused")

    def abandon(self) -> None:
        """Give the push up without a verdict: Leave or Join aborts it at the master, if it has begun there."""
        self.cancel()
        self._close(self._core.work.thaw)

    def cancel(self) -> None:
        if self.open is not None and self.open.transfer_id is not None:
            self._core.emit(CancelTransfer(self.open.transfer_id))
            self.open.transfer_id = None

    # ---- after a new Join ----

    def await_push(self, push_id: PushId) -> None:
        """Wait for the verdict of a push; the caller has moved the phase to AWAITING."""
        self.awaited = push_id
        self._core.note = f"waiting for the verdict of push {push_id}"
        self._core.ask(self._await_request)

    def _foreign(self, verdict: Verdict, input_name: str) -> None:
        """A push of an earlier life is decided. ABORTED changes nothing; else the fence of our base is past."""
        core = self._core
        if self.open is not None:
            raise RemoteProtocolError(f"the master told the verdict of {verdict.push}, not that of {self.open.id}")
        if core.base is not None and verdict.kind is VerdictKind.ABORTED:
            core.move(input_name, SessionPhase.TRAINING)
        else:
            self.drop(input_name, at_least=verdict.version)

    # ---- parts ----

    def _ticket(self, ticket: Ticket) -> None:
        check_placement(ticket.placement, len(self._core.config.layout.blocks))
        push = self._must_be_open()
        push.ticket = ticket
        self._core.move("ticket", SessionPhase.TRANSFERRING)
        self._send()

    def _send(self) -> None:
        core, push = self._core, self._must_be_open()
        assert push.ticket is not None, "sent only with a ticket"
        push.transfer_id = core.next_id()
        core.note = f"sending push {push.id}"
        core.emit(StartPush(push.transfer_id, push.id, push.ticket, core.terms.epoch, core.cause))

    def _try_again(self) -> None:
        push = self._must_be_open()
        pause_s = min(self._core.config.retry_max_s, 0.2 * 2 ** min(push.failures, 20))
        push.failures += 1
        self._core.ask(self._begin_request, pause_s)

    def _stale(self, stale: Stale) -> None:
        core, push = self._core, self._must_be_open()
        core.record("stale", push=str(push.id), stale_kind=stale.kind.name, reason=stale.sentence)
        core.log("push", f"push {push.id} is stale: {stale.sentence}", logging.WARNING)
        if push.base is not None and stale.kind is StaleKind.VERSIONS:
            self._close(core.work.thaw)
            self._pull("stale", PullPlan(InstallMode.REBASE_FROM_BASE, None))
            core.steps_towards_push = core.terms.local_steps  # its push is due as soon as it stands on a new base
        else:
            self.drop("stale")

    def _another(self, push_id: PushId) -> None:
        """A push must be decided first: ours, admitted by a call whose answer was lost, or one of an earlier life."""
        core = self._core
        if self.open is not None and push_id != self.open.id:
            self._close(core.work.thaw)
            core.steps_towards_push = core.terms.local_steps
        core.move("undecided", SessionPhase.AWAITING)
        self.await_push(push_id)

    def _aborted(self, input_name: str) -> None:
        core, push = self._core, self._must_be_open()
        was_seed = push.base is None
        self._close(core.work.thaw)
        if was_seed:
            self.begin(input_name, seed=True)
        else:
            core.move(input_name, SessionPhase.TRAINING)

    def _pull(self, input_name: str, plan: PullPlan) -> None:
        self._core.move(input_name, SessionPhase.PULLING)
        self._pulling.begin(plan)

    def _close(self, settle: Callable[[], None]) -> None:
        """The push is open no more; `settle` says what becomes of its work."""
        if self.open is not None:
            settle()
        self.open = None

    def _await_request(self) -> AwaitVerdictRequest:
        assert self.awaited is not None, "asked only while a verdict is awaited"
        return AwaitVerdictRequest(self._caller(), self.awaited, AWAIT_S)

    def _begin_request(self) -> BeginPushRequest:
        push = self._must_be_open()
        work = push.work
        return BeginPushRequest(
            self._caller(), push.id.seq, push.base, push.fence, work.ranges, work.tokens, work.steps, work.mean_loss
        )

    def _caller(self) -> Caller:
        return self._core.terms.caller(self._core.cause)

    def _must_be_open(self) -> OpenPush:
        assert self.open is not None, "this answer belongs to an open push"
        return self.open
