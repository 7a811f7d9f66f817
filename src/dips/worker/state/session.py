"""One cluster's session with the run: join, push, verdict, pull, leave, and what to do when any of it fails.

handle(event, now_s) returns effects; the driver calls it on the training thread at step boundaries only, so that an
Install effect never meets a step. Training goes on in every phase unless must_wait() says otherwise. Never reads a
clock, never blocks, never touches a parameter.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from dips.core.errors import (
    ConfigError,
    DipsError,
    LocalProtocolError,
    RefusalCode,
    Refused,
    RemoteProtocolError,
    RetryLater,
)
from dips.core.messages import (
    AwaitVerdictReply,
    BeginPullReply,
    BeginPushReply,
    Caller,
    ClusterReply,
    DataMode,
    DataRange,
    FinishPullReply,
    FinishPushReply,
    Hello,
    JoinReply,
    JoinRequest,
    LeaseDataReply,
    LeaseDataRequest,
    LeaveReply,
    LeaveRequest,
    ReturnDataReply,
    VerdictKind,
)
from dips.core.protocol import CAPABILITIES, MAX_LEASED_CHUNKS, PROTOCOL_MIN, PROTOCOL_VERSION
from dips.core.release import VERSION
from dips.worker.state.core import Core
from dips.worker.state.effects import Effect, Finished
from dips.worker.state.events import (
    Beat,
    BeatRefused,
    CallDone,
    CallFailed,
    CallRefused,
    Event,
    LeaseWanted,
    Pulled,
    PullFailed,
    PushFailed,
    PushNotRecorded,
    PushRecorded,
    PushSent,
    Started,
    Stepped,
    StopWanted,
    Tick,
)
from dips.worker.state.lane import Lane
from dips.worker.state.phases import SessionPhase
from dips.worker.state.pulling import Pulling
from dips.worker.state.push_record import PushRecord
from dips.worker.state.pushing import Pushing
from dips.worker.state.refusals import Remedy, remedy_for
from dips.worker.state.rejoining import Rejoining
from dips.worker.state.resuming import restore, save
from dips.worker.state.saved import SavedSession
from dips.worker.state.terms import SessionConfig
from dips.worker.state.work import Work, is_within

_GONE = (SessionPhase.LEAVING, SessionPhase.LEFT)
_ABSENT = (SessionPhase.JOINING, *_GONE)
_PUSHING = (SessionPhase.BEGINNING_PUSH, SessionPhase.TRANSFERRING, SessionPhase.FINISHING_PUSH)


@dataclass
class _Ending:
    """Why this cluster leaves, and by when it gives up what it still waits for.

    wanted: it leaves by its own wish (StopWanted), and push_pending is that wish's. dropped: what did not count before;
    None: it stays.
    """

    reason: str = ""
    error: DipsError | None = None
    by_s: float = math.inf
    wanted: bool = False
    push_pending: bool = True
    dropped: Work | None = None


class Session:
    """The decisions of one cluster; `core`, `pushing` and `pulling` may be read by the driver, never written."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.core = Core(config)
        self.pulling = Pulling(self.core)
        self.pushing = Pushing(self.core, self.pulling)
        self._rejoining = Rejoining(self.core, self.pushing, self.pulling)
        self._ending = _Ending()
        self._give_up_joining_s = math.inf
        self._gone_by_s = math.inf
        self._lease_tokens = 0
        self._leases_asked = 0
        self._fresh: list[DataRange] = []
        self._resumed = False
        self._may_push = True

    # ---- what the driver asks ----

    @property
    def phase(self) -> SessionPhase:
        return self.core.phase.now

    @property
    def finished(self) -> bool:
        return self.phase is SessionPhase.LEFT

    @property
    def released(self) -> bool:
        """Whether the master said that this cluster may go: the run has ended, or the cluster was drained."""
        return self.core.terms.stop

    def must_wait(self, now_s: float) -> bool:
        """Whether the training loop is to hold: nothing to train on yet, steps that would be dropped, or the bounded
        wait for an exchange.
        """
        if self.phase in _GONE:
            return self.phase is SessionPhase.LEAVING
        if self._ending.wanted or self.core.terms.stop:
            return not self._needs_a_step
        if self.core.base is None or self.core.terms.incarnation is None:
            return True
        if self.pulling.plan is not None and self.pulling.plan.drops:
            return True
        idle = self.phase in (SessionPhase.TRAINING, SessionPhase.JOINING)
        return not idle and now_s < self.core.patience.until_s

    def waiting_for(self) -> str:
        """One sentence for people."""
        return self.core.note or self.phase.value.lower().replace("_", " ")

    def next_deadline_s(self) -> float:
        """When a Tick is due at the latest; inf: only an event moves the session."""
        wakes_s = [self.core.wake_s(), self._by_s]
        if self.core.patience.until_s > self.core.now_s:
            wakes_s.append(self.core.patience.until_s)
        return min(wakes_s)

    @property
    def held(self) -> tuple[DataRange, ...]:
        """Lent, and not trained on yet."""
        return self.core.work.held

    @property
    def push_is_near(self) -> bool:
        """Whether the next step makes a push due."""
        core = self.core
        due = not core.terms.stop and core.steps_towards_push + 1 >= core.terms.local_steps
        return self.phase is SessionPhase.TRAINING and (due or self._needs_a_step)

    @property
    def _needs_a_step(self) -> bool:
        """Whether a drained cluster has steps to push, and a push may begin only after the next one."""
        core = self.core
        drained = core.terms.stop and core.terms.takes_pushes and not self._ending.wanted
        return drained and self.phase is SessionPhase.TRAINING and core.work.pending.tokens > 0 and not self._may_push

    @property
    def lease_pending(self) -> bool:
        """Whether data is asked for, or lent and not handed out yet."""
        return self._lease_tokens > 0 or bool(self._still_lent())

    def take_leased(self) -> list[DataRange]:
        """Ranges lent since the last call; each is handed out once."""
        fresh, self._fresh = self._still_lent(), []
        return fresh

    def _still_lent(self) -> list[DataRange]:
        """Of what was not handed out yet: a Join may have taken some back."""
        return [item for item in self._fresh if is_within(item, self.core.work.held)]

    # ---- what outlives the process ----

    def saved(self) -> SavedSession | None:
        """This session as a value; None while there is nothing that another process could go on from."""
        if self.phase in _GONE:
            return None
        return save(self.core, self.pushing, self.pulling, self._leases_asked)

    def resume(self, saved: SavedSession, newest: PushRecord | None) -> None:
        """Go on from a saved session; before Started. newest: the last push that was written down.

        What is held is handed out again by take_leased(). Raises ConfigError when what was saved is not of this
        cluster, this model or this data.
        """
        restore(saved, newest, self.core, self.pushing, self.pulling)
        self._leases_asked, self._resumed = saved.leases_asked, True

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Decide. Raises LocalProtocolError for a bug of ours or a step that claims data it does not hold."""
        self.core.now_s = now_s
        if not self.finished:
            try:
                self._dispatch(event)
                self._decide()
            except (ConfigError, Refused, RemoteProtocolError) as error:
                self._fail(error)
            self._say_goodbye()
            self.core.send_due()
        return self.core.take()

    def _dispatch(self, event: Event) -> None:
        match event:
            case Started():
                self._give_up_joining_s = self.core.now_s + self.config.connect_wait_s
                self.core.ask(self._join_request)
            case Stepped():
                self._stepped(event)
            case CallDone() | CallFailed() | CallRefused():
                self._call_ended(event)
            case PushRecorded():
                self.pushing.recorded(event)
            case PushNotRecorded():
                self.pushing.not_recorded(event)
            case PushSent() | PushFailed() | Pulled() | PullFailed():
                self._transfer_ended(event)
            case Beat():
                self._beat(event)
            case BeatRefused():
                self._beat_refused(event)
            case LeaseWanted():
                # More is not lent at once; the training loop asks again when this is used up.
                self._lease_tokens = min(event.tokens, MAX_LEASED_CHUNKS * self.config.data_plan.chunk_tokens)
            case StopWanted():
                self._want_to_leave(event)
            case Tick():
                pass

    def _stepped(self, event: Stepped) -> None:
        if self.config.data_plan.mode is DataMode.LEASED:
            total = sum(item.tokens for item in event.ranges)
            if total != event.tokens:
                raise LocalProtocolError(f"a step counts {event.tokens} tokens, but its ranges hold {total}")
        self.core.work.stepped(event.tokens, event.ranges, event.loss)
        self._may_push = event.may_push
        self.core.steps += 1
        self.core.steps_since_snapshot += 1
        self.core.steps_towards_push += 1

    def _decide(self) -> None:
        """What is due now that no event asked for."""
        core = self.core
        if core.donate is not None and self._may_donate():
            self.pushing.donate(core.donate)
        if self._ending.wanted and self.phase not in _GONE:
            self._finish_and_leave()
        elif core.terms.stop and self.phase not in _GONE:
            self._run_stops()
        ending = core.terms.stop or self._ending.wanted
        if self.phase is SessionPhase.TRAINING and not ending and self._push_is_due():
            self.pushing.begin("push due")
        if self._lease_tokens and core.data.idle and self.phase not in _ABSENT:
            self._ask_for_data(core.now_s)

    def _say_goodbye(self) -> None:
        """Leave is the last call: small ones on their way come first."""
        core = self.core
        if self.phase is SessionPhase.LEAVING and core.exchange.idle and core.asides_done():
            core.ask(lambda: LeaveRequest(core.terms.caller(core.cause), self._ending.reason))

    def _may_donate(self) -> bool:
        """Whether theta_base is what the master asks for, and nothing stands in the way of pushing it."""
        core = self.core
        push = self.pushing.open
        free = self.phase in (SessionPhase.TRAINING, SessionPhase.PULLING, SessionPhase.AWAITING)
        free = free and (push is None or push.donates is None)
        return free and core.base == core.donate and not core.terms.stop and core.now_s >= core.donate_after_s

    def _push_is_due(self) -> bool:
        core = self.core
        due = core.steps_towards_push >= core.terms.local_steps and core.work.pending.tokens > 0
        return due and self._may_push

    # ---- calls ----

    def _call_ended(self, event: CallDone | CallFailed | CallRefused) -> None:
        lane = self.core.lane_of(event.call_id)
        if lane is None:
            return
        match event:
            case CallDone():
                lane.answered()
                self.core.log("master", "")
                if lane is not self.core.side:
                    self.core.note = ""
                self._reply(event.reply)
            case CallFailed():
                self._unanswered(lane, event.sentence)
            case CallRefused():
                self._refused(lane, event.refused)

    def _reply(self, reply: ClusterReply) -> None:
        match reply:
            case JoinReply():
                self.core.terms.joined(reply)
                self._rejoining.joined(reply)
                if self._resumed:
                    self._resumed, self.core.terms.previous = False, None
                    self._fresh = list(self.core.work.held)
            case BeginPushReply():
                self.pushing.begun(reply.answer)
            case FinishPushReply():
                self.pushing.finished(reply.answer)
            case AwaitVerdictReply():
                self.pushing.awaited_answer(reply.answer)
            case BeginPullReply():
                self.pulling.answered(reply.answer)
            case FinishPullReply():
                self.core.terms.take_steps(reply.local_steps)
            case LeaseDataReply():
                self._leased(reply)
            case ReturnDataReply():
                pass
            case LeaveReply():
                self._left()
            case _:
                raise RemoteProtocolError(f"a {type(reply).__name__} answers none of this cluster's calls")

    def _leased(self, reply: LeaseDataReply) -> None:
        if reply.ranges:
            self._fresh = [*self._still_lent(), *reply.ranges]
            self.core.work.leased(reply.ranges)
            self._lease_tokens = 0
        else:
            # Everything is lent out; asked again by _decide after a pause.
            self.core.note = "all data is lent out"
            self._ask_for_data(self.core.now_s + 0.5)

    def _ask_for_data(self, at_s: float) -> None:
        """A number of its own for each request: repeated after a lost answer, it gets the same ranges."""
        self._leases_asked += 1
        core, tokens, number = self.core, self._lease_tokens, self._leases_asked
        core.data.ask(lambda: LeaseDataRequest(core.terms.caller(core.cause), tokens, number), at_s)

    def _unanswered(self, lane: Lane, sentence: str) -> None:
        core = self.core
        lane.failed(core.now_s)
        core.train_on()
        if self.phase is SessionPhase.LEAVING:
            core.log("leave", f"left without the master's answer: {sentence}", logging.WARNING)
            self._left()
            return
        core.note = f"the master does not answer: {sentence}"
        core.log("master", f"{core.note}; tried again, training goes on where it can", logging.WARNING)
        if core.terms.incarnation is None and core.now_s >= self._give_up_joining_s:
            wait_s = self.config.connect_wait_s
            self._fail(RetryLater(f"no master could be joined within {wait_s:g} s: {sentence}"))

    def _refused(self, lane: Lane, refused: Refused) -> None:
        core = self.core
        if self.phase is SessionPhase.LEAVING:
            lane.answered()
            if lane is core.exchange:
                core.log("leave", f"the master says, of leaving: {refused.sentence}")
                self._left()
            return
        joining = self.phase is SessionPhase.JOINING
        pushing = lane is core.exchange and self.phase in _PUSHING
        core.terms.no_more_pushes |= pushing and refused.code is RefusalCode.STOPPING
        remedy = remedy_for(refused, joining=joining, pushing=pushing)
        push = self.pushing.open
        if pushing and push is not None and push.donates is not None and refused.code is RefusalCode.VERSION_GONE:
            core.donate, remedy = None, Remedy.PULL  # it is not wanted any more
        if joining and core.terms.previous is not None and refused.code in (RefusalCode.FENCED, RefusalCode.RUN_ID):
            self._resume_refused(refused)
        elif remedy is Remedy.JOIN_AGAIN:
            self._rejoin(refused.sentence)
        elif remedy is Remedy.WAIT:
            self._put_off(lane, refused)
        elif lane is core.side:
            lane.answered()
            core.log("side", f"the master refuses: {refused.sentence}", logging.WARNING)
        elif joining and refused.code is RefusalCode.STOPPING:
            core.terms.incarnation = None  # the run ended without us: nobody is left to say good-bye to
            core.terms.stop = True
            self._leave(refused.sentence)
        elif remedy is Remedy.GIVE_UP:
            raise refused
        else:
            lane.answered()
            self.pushing.refused(refused, remedy)

    def _resume_refused(self, refused: Refused) -> None:
        """The checkpoint is of another run, or older than a later life of this cluster that left none.

        The second is as if a process without memory took over the name: join without the old life's number.
        """
        if refused.code is RefusalCode.RUN_ID:
            raise ConfigError(
                f"this cluster's checkpoint is of run {self.core.terms.run_id}, and the master says: "
                f"{refused.sentence}; give another --checkpoint-dir, remove the checkpoint, or leave out --resume"
            )
        self.core.log("join", f"the checkpoint is not of this cluster's last life: {refused.sentence}")
        self.core.terms.previous = None
        self.core.ask(self._join_request)

    def _put_off(self, lane: Lane, refused: Refused) -> None:
        core = self.core
        core.note = refused.sentence
        core.train_on()
        if lane is core.exchange and self.phase is SessionPhase.PULLING:
            self.pulling.version_gone()
        lane.put_off(core.now_s, refused.retry_after_s or 1.0)

    # ---- transfers ----

    def _transfer_ended(self, event: PushSent | PushFailed | Pulled | PullFailed) -> None:
        match event:
            case PushSent() if self.pushing.owns(event.transfer_id):
                self.pushing.sent(event)
            case PushFailed() if self.pushing.owns(event.transfer_id):
                self.pushing.failed(event)
            case Pulled() if self.pulling.owns(event.transfer_id):
                self._pulled(event)
            case PullFailed() if self.pulling.owns(event.transfer_id):
                self.pulling.failed(event)
            case _:
                pass  # of a transfer that was given up

    def _pulled(self, event: Pulled) -> None:
        self.pulling.install(event)
        core, terms = self.core, self.core.terms
        core.move("installed", SessionPhase.TRAINING)
        core.patience.over(core.now_s)
        core.patience.train_on(core.now_s)
        if self._leases_are_doubtful():
            self._rejoin(f"the run goes on from version {core.base}: which data is lent to whom must be settled anew")
            return
        if terms.stop and (terms.published is None or terms.published == self.core.base):
            self._leave("the master ends this cluster's part" if terms.takes_pushes else "the run has ended")

    def _leases_are_doubtful(self) -> bool:
        """A rollback freed all leases: what this cluster holds from before is not its own."""
        core, terms = self.core, self.core.terms
        assert core.base is not None, "asked once a version is installed"
        before, terms.leases_timeline = terms.leases_timeline, core.base.timeline
        return bool(core.work.held) and before not in (None, core.base.timeline)

    # ---- heartbeats ----

    def _beat(self, event: Beat) -> None:
        if event.incarnation != self.core.terms.incarnation or self.phase in _ABSENT:
            return
        if event.reply.epoch != self.core.terms.epoch:
            self._rejoin(f"the master is in epoch {event.reply.epoch}: it was restarted")
            return
        self.core.terms.beat(event.reply)
        self.core.donate = event.reply.donate

    def _beat_refused(self, event: BeatRefused) -> None:
        if event.incarnation != self.core.terms.incarnation or self.phase in _ABSENT:
            return
        if remedy_for(event.refused, joining=False, pushing=False) is Remedy.JOIN_AGAIN:
            self._rejoin(event.refused.sentence)
        elif event.refused.code is RefusalCode.IDENTITY:
            self._fail(event.refused)  # revoked: what is trained from now on counts for nothing
        else:
            self.core.log("heartbeat", f"a heartbeat is refused: {event.refused.sentence}", logging.WARNING)

    # ---- joining again, stopping, leaving ----

    def _rejoin(self, why: str) -> None:
        core = self.core
        core.record("fenced", incarnation=str(core.terms.incarnation), reason=why)
        core.log("join", f"joining again: {why}", logging.WARNING)
        self.pushing.cancel()
        self.pulling.cancel()
        core.forget_asides()  # ranges on their way back are not named in Join either, which frees them
        core.data.cancel()
        core.move("fenced", SessionPhase.JOINING, why)
        core.patience.forget()
        core.note = f"joining again: {why}"
        core.ask(self._join_request)

    def _join_request(self) -> JoinRequest:
        config, core = self.config, self.core
        incarnation = core.terms.incarnation or core.terms.previous
        caller = Caller(core.terms.run_id, 0, config.cluster_id, incarnation, core.cause)
        hello = Hello(PROTOCOL_MIN, PROTOCOL_VERSION, tuple(sorted(CAPABILITIES)), f"dips {VERSION}")
        return JoinRequest(
            caller,
            hello,
            config.layout,
            config.layout.layout_hash,
            config.data_plan,
            config.declared_tokens_per_s,
            core.work.all_ranges(),
            config.curve_key,
            config.untrained.frozen,
            config.untrained.buffers,
            config.process_id,
            config.host,
        )

    def _want_to_leave(self, wish: StopWanted) -> None:
        """As soon as what was trained is pushed and decided; the training loop is held meanwhile."""
        core, ending = self.core, self._ending
        if self.phase in _GONE:
            return
        if ending.wanted:
            if not wish.push_pending:
                self._leave(wish.reason)  # whoever asks again does not wait
            return
        ending.wanted, ending.push_pending, ending.reason = True, wish.push_pending, wish.reason
        if math.isinf(ending.by_s):
            usual_s = 0.0 if self.config.leave_wait_s is not None else 2 * (core.push_s + core.pull_s)
            ending.by_s, ending.dropped = core.now_s + core.terms.times.leave_wait_s + usual_s, core.work.dropped
        if self._unfinished().tokens and self.phase is not SessionPhase.JOINING:
            core.log(
                "leave", f"leaving ({wish.reason}) once {self._unfinished()} are pushed and their verdict is known"
            )

    def _unfinished(self) -> Work:
        """What leaving waits for."""
        work = self.core.work
        open_work = work.in_push or Work()
        return open_work + work.pending if self._ending.push_pending and not work.lost else open_work

    def _finish_and_leave(self) -> None:
        """One step of the way: the open push is decided, the rest is pushed, then Leave."""
        core, ending = self.core, self._ending
        if not self._unfinished().tokens or core.now_s >= self._by_s:
            self._leave(ending.reason)
        elif not core.terms.takes_pushes and self.phase is not SessionPhase.AWAITING:
            self._leave(ending.reason)  # the run has ended: what is not in its last round is not taken any more
        elif self.phase is SessionPhase.TRAINING and core.now_s >= self.pushing.not_before_s:
            self.pushing.begin("push due")

    @property
    def _by_s(self) -> float:
        """When leaving waits no longer. The master's word on an open window counts, unless a bound was set by hand."""
        by_s = self._ending.by_s
        if math.isinf(by_s) or self.config.leave_wait_s is not None or self.phase is not SessionPhase.AWAITING:
            return by_s
        return max(by_s, self.core.window_closes_s + self.core.terms.times.leave_wait_s)

    @property
    def gives_up_s(self) -> float:
        """When whoever waits for the end of leaving may stop to."""
        return self._by_s + self.core.terms.times.call_deadline_s if self.phase not in _GONE else self._gone_by_s

    def _run_stops(self) -> None:
        """The run is over, or this cluster is drained: what is pending is pushed if that is welcome; then the last
        version; leave.
        """
        core, ending, wait_s = self.core, self._ending, self.core.terms.times.leave_wait_s
        if math.isinf(ending.by_s):
            ending.by_s, ending.dropped = core.now_s + wait_s, core.work.dropped
            core.log("stop", "the master ends this cluster's part: pulling the last version, then leaving")
        pushing = self.phase in (SessionPhase.BEGINNING_PUSH, SessionPhase.TRANSFERRING)
        donates = self.pushing.open is not None and self.pushing.open.donates is not None
        # Half of the time is for the last version.
        may_push = core.terms.takes_pushes and not donates and core.now_s < ending.by_s - wait_s / 2
        if core.now_s >= ending.by_s:
            self._leave("the run has ended; its last version could not be pulled in time")
        elif pushing and not may_push:
            self.pushing.abandon()
            self.pushing.drop("run stops", at_least=core.terms.published)
        elif self.phase is SessionPhase.TRAINING and may_push and core.work.pending.tokens and not core.work.lost:
            if core.now_s >= self.pushing.not_before_s and not self._needs_a_step:
                self.pushing.begin("push due")
        elif self.phase is SessionPhase.TRAINING:
            self.pushing.drop("run stops", at_least=core.terms.published)

    def _leave(self, reason: str, error: DipsError | None = None) -> None:
        """Give up what is open, and say good-bye."""
        core, ending = self.core, self._ending
        if self.phase in _GONE:
            return
        lost = self.unshared
        core.record("leaving", reason=reason, lost_steps=lost.steps, lost_tokens=lost.tokens)
        if lost.steps:
            self._say_what_is_lost(lost, reason, error)
        deadline_s = core.leave_deadline_s = (
            core.terms.times.call_deadline_s if ending.wanted else core.terms.times.leave_wait_s
        )
        self._gone_by_s = core.now_s + deadline_s + 1.0
        self._ending = _Ending(reason, error, dropped=core.work.dropped if ending.dropped is None else ending.dropped)
        self.pushing.cancel()
        self.pulling.cancel()
        core.exchange.cancel()
        core.data.cancel()
        core.note = f"leaving: {reason}"
        if core.terms.incarnation is None:
            core.move("leave", SessionPhase.LEFT, reason)
            core.emit(Finished(reason, error))
            return
        core.move("leave", SessionPhase.LEAVING, reason)  # Leave frees whatever is leased and in no sealed push

    @property
    def unshared(self) -> Work:
        """What was trained here and counts for nothing if this cluster leaves now: since the wish, or since the last
        push that counts.
        """
        work = self.core.work
        before = work.dropped if self._ending.dropped is None else self._ending.dropped
        now = work.dropped + (work.in_push or Work()) + work.pending
        return Work((), now.tokens - before.tokens, now.steps - before.steps)

    def _say_what_is_lost(self, lost: Work, reason: str, error: DipsError | None) -> None:
        core, ending, push = self.core, self._ending, self.pushing.open
        verdict = self.pushing.last_verdict
        level = logging.WARNING
        if error is not None:
            why = str(error)
        elif not core.terms.takes_pushes:
            why, level = "the run has ended", logging.INFO
        elif (
            verdict is not None and verdict.kind is not VerdictKind.APPLIED and lost.tokens > self._unfinished().tokens
        ):
            why = f"push {verdict.push} was {verdict.kind.name}: {verdict.reason}"
        elif not ending.push_pending and push is None:
            why = "they were made since the last push, and the parameters may be half-way"
        elif self.phase is SessionPhase.AWAITING:
            why = f"no verdict of push {self.pushing.awaited} came in time; it may come yet, and count them"
        else:
            why = core.note or "the time to push them was too short"
        core.log("lost", f"leaving ({reason.partition(':')[0]}) without {lost}: {why}", level)

    def _left(self) -> None:
        self.core.move("left", SessionPhase.LEFT)
        self.core.record("left", reason=self._ending.reason)
        self.core.emit(Finished(self._ending.reason, self._ending.error))

    def _fail(self, error: DipsError) -> None:
        """This cluster cannot go on: leave in good order, and let the training loop raise."""
        self.core.record("failed", reason=str(error))
        if self.phase is SessionPhase.LEAVING:
            self._left()
        elif not self.finished:
            self._leave(str(error), error)
