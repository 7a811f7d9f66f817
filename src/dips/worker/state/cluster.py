"""The state machine of one cluster's session with the run: join, push, verdict, pull, leave, and every failure.

handle(event, now_s) returns effects; the driver calls it on the training thread at step boundaries, so that an Install
effect never happens during a step; what only moves an exchange on (may_take_in_step) may also come during one. Training
goes on in every phase unless must_wait() is true. Never reads a clock, never blocks, never touches a parameter.
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
    option,
)
from dips.core.messages import (
    Admitted,
    AwaitVerdictReply,
    BeginPullReply,
    BeginPushReply,
    Caller,
    DataMode,
    DataRange,
    FinishPullReply,
    FinishPushReply,
    JoinReply,
    JoinRequest,
    LeaseDataReply,
    LeaseDataRequest,
    LeaveReply,
    LeaveRequest,
    PullGrant,
    ReturnDataReply,
    Ticket,
    Verdict,
    VerdictKind,
)
from dips.core.protocol import MAX_LEASED_CHUNKS, OWN_HELLO
from dips.worker.state import tape
from dips.worker.state.effects import (
    Beat,
    Delayed,
    Done,
    Effect,
    Event,
    Failed,
    Finished,
    LeaseWanted,
    PushRecord,
    Started,
    Stepped,
    StopWanted,
    Tick,
)
from dips.worker.state.pulling import Pulling
from dips.worker.state.pushing import Pushing
from dips.worker.state.saved import SavedSession, restore, save
from dips.worker.state.shared import Remedy, SessionConfig, SessionPhase, SharedState, remedy_for
from dips.worker.state.waiting import RepeatedCall
from dips.worker.state.work import Work, is_within

_GONE = (SessionPhase.LEAVING, SessionPhase.LEFT)
_ABSENT = (SessionPhase.JOINING, *_GONE)
_PUSHING = (SessionPhase.BEGINNING_PUSH, SessionPhase.TRANSFERRING, SessionPhase.FINISHING_PUSH)
_EXCHANGING = (*_PUSHING, SessionPhase.AWAITING, SessionPhase.PULLING)


FIRST_WORD_S, WORD_MOST_S = 60.0, 3600.0
"""After so long without the run, or at the loop's end without a first merge, the cluster says how many steps are not
pushed; then at twice the time, and at least every hour."""


class _Words:
    """When to say again that something lasts."""

    def __init__(self) -> None:
        self._next_s = FIRST_WORD_S

    def due(self, lasted_s: float) -> bool:
        """Whether to say it now; 0: it has not begun, or is over."""
        if not lasted_s:
            self._next_s = FIRST_WORD_S
        due = lasted_s >= self._next_s
        if due:
            self._next_s = lasted_s + min(lasted_s, WORD_MOST_S)
        return due


@dataclass
class _Ending:
    """Why this cluster leaves, and how long it still waits before that."""

    reason: str = ""
    error: DipsError | None = None
    by_s: float = math.inf
    since_s: float = 0.0
    patient_until_s: float = -math.inf  # the loop ended by itself before the run's first merge: until when it waits
    wanted: bool = False  # the process asked for it (StopWanted), and push_pending is of that request
    push_pending: bool = True
    dropped: Work | None = None  # the work that did not count when leaving began; None: the cluster does not leave


class ClusterMachine:
    """State machine of one cluster. The driver may read `shared`, `pushing` and `pulling`, and never writes them."""

    def __init__(self, config: SessionConfig) -> None:
        self.shared = SharedState(config)
        self.pulling = Pulling(self.shared)
        self.pushing = Pushing(self.shared, self.pulling)
        self._ending = _Ending()
        self._give_up_joining_s = math.inf
        self._gone_by_s = math.inf
        self._lease_tokens = 0
        self._leases_asked = 0
        self._fresh: list[DataRange] = []
        self._resumed = False
        self._refused_names: Refused | None = None
        self._cut_off_words, self._end_words = _Words(), _Words()

    # ---- queries of the driver ----

    @property
    def config(self) -> SessionConfig:
        return self.shared.config

    @property
    def phase(self) -> SessionPhase:
        return self.shared.phase.now

    @property
    def finished(self) -> bool:
        return self.phase is SessionPhase.LEFT

    @property
    def released(self) -> bool:
        """Whether the master lets this cluster leave: the run has ended, or the cluster was drained."""
        return self.shared.terms.stop

    def must_wait(self, now_s: float) -> bool:
        """Whether the training loop must wait: there is nothing to train on yet, steps would be dropped, the bounded
        wait for an exchange lasts, the run has not begun to merge and this cluster is a round ahead of it, or its work
        was not taken for cut_off_limit_s.
        """
        if self.phase in _GONE:
            return self.phase is SessionPhase.LEAVING
        if self._ending.wanted or self.shared.terms.stop:
            return True
        if self.shared.base is None or self.shared.terms.incarnation is None:
            return True
        if self.pulling.plan is not None and self.pulling.plan.drops:
            return True
        idle = self.phase in (SessionPhase.TRAINING, SessionPhase.JOINING)
        if not idle and (now_s < self.shared.patience.until_s or self._is_ahead_of_first_merge):
            return True
        return self._is_cut_off(now_s)

    def _cut_off_s(self, now_s: float) -> float:
        """For how long no one has taken this cluster's work."""
        since_s = self.shared.cut_off_since_s
        return 0.0 if since_s is None else now_s - since_s

    def _is_cut_off(self, now_s: float) -> bool:
        """Whether a whole round's steps, or more, were made, and no one took any for cut_off_limit_s."""
        work = self.shared.work
        has_a_round = work.pending.steps + (work.in_push or Work()).steps >= self.shared.terms.local_steps
        return has_a_round and self._cut_off_s(now_s) >= self.config.cut_off_limit_s

    @property
    def _is_ahead_of_first_merge(self) -> bool:
        """Whether this cluster has made a whole round's steps since its push, and the run has not merged one yet.

        The run's other clusters may come minutes later: a cluster that trained on would make all its steps alone.
        """
        shared = self.shared
        pushes = self.phase in (*_PUSHING, SessionPhase.AWAITING)
        ahead = shared.steps_since_snapshot >= shared.terms.local_steps
        return pushes and ahead and not self._run_has_merged

    @property
    def _run_has_merged(self) -> bool:
        """Whether the run's model has merged pushes, as far as known here: a master that was restarted knows the run's
        tokens at once, and publishes its version again later.
        """
        shared = self.shared
        known = [version.v for version in (shared.base, shared.terms.published) if version is not None]
        return shared.terms.tokens > 0 or max(known, default=0) > 0

    def may_take_in_step(self, event: Event) -> bool:
        """Whether an event may be handled while a step is made: it moves an exchange on as planned, so that its effects
        touch no live parameter and no step is dropped. All else waits for the end of the step.
        """
        shared, push = self.shared, self.pushing.open
        usual = self.phase in _EXCHANGING and shared.donate is None and not (shared.terms.stop or self._ending.wanted)
        if not isinstance(event, Done) or not usual or shared.base is None or shared.work.lost:
            return False
        match event.result:
            case BeginPushReply(Ticket()) | FinishPushReply(Admitted()) | BeginPullReply(PullGrant()):
                return self.shared.lane_of(event.job) is shared.exchange
            case AwaitVerdictReply(Verdict() as verdict):
                own = push is not None and push.donates is None and verdict.push == push.id
                return own and verdict.kind is VerdictKind.APPLIED
            case tuple() | None:
                return push is not None and push.job == event.job
        return False

    def waiting_for(self) -> str:
        """What the session waits for: one sentence for people."""
        if not self.shared.note and self.phase is SessionPhase.TRAINING and self.shared.base is None:
            return "no version is published yet"
        if self.phase is SessionPhase.AWAITING and (self._is_ahead_of_first_merge or self._is_patient):
            why = self.pushing.why_undecided or "the clusters that it begins with (the master's min_clusters)"
            return f"waiting for the run's first merge: {why}"
        if self._is_cut_off(self.shared.now_s):
            hours = f"{self.config.cut_off_limit_s / 3600:g} h"
            why = f": {self.shared.note}" if self.shared.note else ""
            return f"waiting: {self.unshared} are not pushed, and none were for {hours} (cut_off_limit_h){why}"
        return self.shared.note or f"the master's answer ({self.phase.value.lower().replace('_', ' ')})"

    def next_deadline_s(self) -> float:
        """When a Tick is due at the latest; inf: the session waits for an event."""
        wakes_s = [self.shared.wake_s(), self._by_s]
        if self.shared.patience.until_s > self.shared.now_s:
            wakes_s.append(self.shared.patience.until_s)
        return min(wakes_s)

    @property
    def held(self) -> tuple[DataRange, ...]:
        """Leased ranges that were not trained on yet."""
        return self.shared.work.held

    @property
    def push_is_near(self) -> bool:
        """Whether the next step makes a push due."""
        shared = self.shared
        due = not shared.terms.stop and shared.steps_towards_push + 1 >= shared.terms.local_steps
        return self.phase is SessionPhase.TRAINING and due

    @property
    def steps_to_push(self) -> int:
        """Steps until a push is due, at least 1; also 1 where anything is under way, so that every step may matter."""
        shared = self.shared
        if self.phase is not SessionPhase.TRAINING or shared.terms.stop or self._ending.wanted:
            return 1
        return max(1, shared.terms.local_steps - shared.steps_towards_push)

    @property
    def lease_pending(self) -> bool:
        """Whether data was requested, or leased and not handed out yet."""
        return self._lease_tokens > 0 or bool(self._still_lent())

    def take_leased(self) -> list[DataRange]:
        """The ranges leased since the last call; each is handed out once."""
        fresh, self._fresh = self._still_lent(), []
        return fresh

    def _still_lent(self) -> list[DataRange]:
        """The ranges not handed out yet that are still leased: a Join may have taken some back."""
        return [item for item in self._fresh if is_within(item, self.shared.work.held)]

    # ---- saving and resuming ----

    def saved(self) -> SavedSession | None:
        """This session as a value; None while there is nothing that another process could resume from."""
        if self.phase in _GONE:
            return None
        return save(self.shared, self.pushing, self.pulling, self._leases_asked)

    def resume(self, saved: SavedSession, newest: PushRecord | None) -> None:
        """Resume a saved session; call before Started. newest: the last push that was recorded on disk.

        take_leased() hands the held ranges out again. Raises ConfigError when the saved session is of another cluster,
        model or data.
        """
        restore(saved, newest, self.shared, self.pushing, self.pulling)
        self._leases_asked, self._resumed = saved.leases_asked, True

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event; returns the effects. Raises LocalProtocolError for a bug in this program, or for a step on
        data that the cluster does not hold."""
        self.shared.now_s = now_s
        if not self.finished:
            try:
                match event:
                    case Started():
                        self._give_up_joining_s = self.shared.now_s + self.config.connect_wait_s
                        self.shared.ask(self._join_request)
                    case Stepped():
                        self._stepped(event)
                    case Done() | Failed() | Delayed():
                        self._job_ended(event)
                    case Beat():
                        self._beat(event)
                    case LeaseWanted():
                        # No more is leased at once; the training loop asks again when this is used up.
                        self._lease_tokens = min(event.tokens, MAX_LEASED_CHUNKS * self.config.data_plan.chunk_tokens)
                    case StopWanted():
                        self._want_to_leave(event)
                    case Tick():
                        pass
                self._decide()
            except (ConfigError, Refused, RemoteProtocolError) as error:
                self._fail(error)
            shared = self.shared
            if self.phase is SessionPhase.LEAVING and shared.exchange.idle and shared.asides_done():
                # The last call: the small calls on their way are done.
                shared.ask(lambda: LeaveRequest(shared.terms.caller(shared.cause), self._ending.reason))
            shared.send_due()
        return self.shared.take()

    def _stepped(self, event: Stepped) -> None:
        if self.config.data_plan.mode is DataMode.LEASED:
            total = sum(item.tokens for item in event.ranges)
            if total != event.tokens:
                raise LocalProtocolError(f"a step counts {event.tokens} tokens, but its ranges hold {total}")
        self.shared.work.stepped(event.tokens, event.ranges, event.loss, event.steps)
        self.shared.steps += event.steps
        self.shared.steps_since_snapshot += event.steps
        self.shared.steps_towards_push += event.steps
        cut_off_s = self._cut_off_s(self.shared.now_s)
        if self._cut_off_words.due(cut_off_s):
            self.shared.log(
                "cut off", f"{self.unshared} are not pushed yet, for {cut_off_s / 60:.0f} min", logging.WARNING
            )

    def _decide(self) -> None:
        """Begin what is due now without an event that asked for it."""
        shared = self.shared
        if shared.donate is not None and self._may_donate():
            self.pushing.donate(shared.donate)
        if self._ending.wanted and self.phase not in _GONE:
            self._finish_and_leave()
        elif shared.terms.stop and self.phase not in _GONE:
            self._run_stops()
        stays = not (shared.terms.stop or self._ending.wanted)
        due = shared.steps_towards_push >= shared.terms.local_steps and shared.work.pending.tokens > 0
        if self.phase is SessionPhase.TRAINING and stays and due:
            self.pushing.begin("push due")
        if self._lease_tokens and shared.data.idle and self.phase not in _ABSENT:
            self._ask_for_data(shared.now_s)

    def _may_donate(self) -> bool:
        """Whether theta_base is the version that the master asks for, and it can be pushed now."""
        shared = self.shared
        push = self.pushing.open
        free = self.phase in (SessionPhase.TRAINING, SessionPhase.PULLING, SessionPhase.AWAITING)
        free = free and (push is None or push.donates is None)
        return free and shared.base == shared.donate and not shared.terms.stop and shared.now_s >= shared.donate_after_s

    # ---- jobs ----

    def _job_ended(self, event: Done | Failed | Delayed) -> None:
        """Give a job's end to whatever waits for it. What was given up or replaced waits for nothing."""
        lane, push = self.shared.lane_of(event.job), self.pushing.open
        if lane is not None:
            match event:
                case Done(_, Refused() as refused):
                    self._refused(lane, refused)
                case Done(_, reply):
                    lane.answered()
                    self.shared.log("master", "")
                    if self.phase is SessionPhase.TRAINING:
                        self.shared.got_through()
                    if lane is not self.shared.side:
                        self.shared.note = ""
                    self._reply(reply)
                case _:
                    self._unanswered(lane, event.sentence)
        elif push is not None and push.job == event.job:
            match event:
                case Done(_, tuple() as digest_of_slave):
                    self.pushing.sent(digest_of_slave, event.seconds)
                case Done():
                    self.pushing.recorded()
                case Failed() if not push.recorded:
                    self._fail(
                        ConfigError(
                            f"push {push.id} cannot be recorded: {event.sentence}; without its record no push is sent, "
                            "and this cluster ends: give it a checkpoint_dir that exists and can be written"
                        )
                    )
                case Failed():
                    self.pushing.failed(event)
                case Delayed():
                    self.pushing.delayed(event)
        elif self.pulling.job == event.job:
            match event:
                case Done():
                    self._pulled(event)
                case Failed():
                    self.pulling.failed(event)

    def _reply(self, reply: object) -> None:
        match reply:
            case JoinReply():
                self.shared.terms.joined(reply)
                self.pushing.joined(reply)
                if self._resumed:
                    self._resumed, self.shared.terms.previous = False, None
                    self._fresh = list(self.shared.work.held)
            case BeginPushReply():
                self.pushing.begun(reply.answer)
            case FinishPushReply():
                self.pushing.finished(reply.answer)
            case AwaitVerdictReply():
                self.pushing.awaited_answer(reply.answer)
            case BeginPullReply():
                self.pulling.answered(reply.answer)
            case FinishPullReply():
                self.shared.terms.take_steps(reply.local_steps)
            case LeaseDataReply():
                if reply.ranges:
                    self._fresh = [*self._still_lent(), *reply.ranges]
                    self.shared.work.leased(reply.ranges)
                    self._lease_tokens = 0
                else:
                    # All data is leased to other clusters; _decide asks again after a pause.
                    self.shared.note = "all data is leased"
                    self._ask_for_data(self.shared.now_s + 0.5)
            case ReturnDataReply():
                pass
            case LeaveReply():
                self._left()
            case _:
                raise RemoteProtocolError(
                    f"the master sent a {type(reply).__name__}, which answers no call of a cluster"
                )

    def _ask_for_data(self, at_s: float) -> None:
        """Request data. Each request has its own number: repeated after a lost answer, it gets the same ranges."""
        self._leases_asked += 1
        shared, tokens, number = self.shared, self._lease_tokens, self._leases_asked
        shared.data.ask(lambda: LeaseDataRequest(shared.terms.caller(shared.cause), tokens, number), at_s)

    def _unanswered(self, lane: RepeatedCall, sentence: str) -> None:
        shared = self.shared
        lane.failed(shared.now_s)
        shared.train_on()
        if self.phase is SessionPhase.LEAVING:
            shared.log("leave", f"left without the master's answer: {sentence}", logging.WARNING)
            self._left()
            return
        shared.note = f"the master does not answer: {sentence}"
        goes_on = "" if shared.terms.incarnation is None else ", training goes on where it can"
        shared.log("master", f"{shared.note}; trying again{goes_on}", logging.WARNING)
        if shared.terms.incarnation is None and shared.now_s >= self._give_up_joining_s:
            wait_s = self.config.connect_wait_s
            where = f" at {self.config.master}" if self.config.master else ""
            self._fail(
                RetryLater(
                    f"no master could be joined within {wait_s:g} s{where}: start it, or correct its address "
                    f"({option('master', 'HOST:PORT')}, or DIPS_MASTER); the last try: {sentence}"
                )
            )

    def _refused(self, lane: RepeatedCall, refused: Refused) -> None:
        shared = self.shared
        if self.phase is SessionPhase.LEAVING:
            lane.answered()
            if lane is shared.exchange:
                shared.log("leave", f"the master refused Leave: {refused.sentence}")
                self._left()
            return
        joining = self.phase is SessionPhase.JOINING
        pushing = lane is shared.exchange and self.phase in _PUSHING
        if pushing and refused.code is RefusalCode.STOPPING:
            shared.terms.takes_pushes = False
        remedy = remedy_for(refused, joining=joining, pushing=pushing)
        push = self.pushing.open
        if pushing and push is not None and push.donates is not None and refused.code is RefusalCode.VERSION_GONE:
            shared.donate, remedy = None, Remedy.PULL  # the master no longer asks for it
        if joining and shared.terms.previous is not None and refused.code in (RefusalCode.FENCED, RefusalCode.RUN_ID):
            # The checkpoint is of another run, or older than a later incarnation of this cluster that saved none. The
            # second is as if a process without a checkpoint took over the name: join without the old incarnation.
            if refused.code is RefusalCode.RUN_ID:
                raise ConfigError(
                    f"this cluster's checkpoint is of run {self.shared.terms.run_id}, and the master refused it: "
                    f"{refused.sentence}; give another {option('checkpoint_dir')}, remove the checkpoint, or leave out "
                    f"{option('resume')}"
                )
            self.shared.log("join", f"the checkpoint is not of this cluster's last incarnation: {refused.sentence}")
            self.shared.terms.previous = None
            self.shared.ask(self._join_request)
        elif joining and refused.code in (RefusalCode.LAYOUT, RefusalCode.FROZEN) and self.config.former:
            shared.log("join", f"joining with the names of earlier releases: {refused.sentence}")
            shared.config, self._refused_names = self.config.with_former_names(), refused
            shared.ask(self._join_request)
        elif remedy is Remedy.JOIN_AGAIN:
            self._rejoin(refused.sentence)
        elif remedy is Remedy.WAIT:
            shared.note = refused.sentence
            shared.train_on()
            if lane is shared.exchange and self.phase is SessionPhase.PULLING:
                self.pulling.version_gone()
            lane.put_off(shared.now_s, refused.retry_after_s or 1.0)
        elif lane is shared.side:
            lane.answered()
            shared.log("side", f"the master refuses: {refused.sentence}", logging.WARNING)
        elif joining and refused.code is RefusalCode.STOPPING:
            shared.terms.incarnation = None  # the run ended before this cluster joined: no Leave is sent
            shared.terms.stop = True
            shared.log("join", f"this cluster cannot join: {refused.sentence}", logging.WARNING)
            self._leave(refused.sentence)
        elif remedy is Remedy.GIVE_UP:
            first = self._refused_names
            raise first if first is not None and first.code is refused.code else refused
        else:
            lane.answered()
            self.pushing.refused(refused, remedy)

    def _pulled(self, event: Done) -> None:
        self.pulling.install(event)
        shared, terms = self.shared, self.shared.terms
        shared.got_through()
        shared.move("installed", SessionPhase.TRAINING)
        shared.patience.over(shared.now_s)
        shared.patience.train_on(shared.now_s)
        assert shared.base is not None, "a version is installed"
        before, terms.leases_timeline = terms.leases_timeline, shared.base.timeline
        if shared.work.held and before not in (None, shared.base.timeline):
            # A rollback freed all leases: ranges that this cluster holds from before are not its own.
            self._rejoin(f"the run goes on from version {shared.base}: all data leases must be settled again")
            return
        if terms.stop and (terms.published is None or terms.published == self.shared.base):
            self._leave(self._who_ends())

    # ---- heartbeats ----

    def _beat(self, event: Beat) -> None:
        terms, answer = self.shared.terms, event.answer
        if event.incarnation != terms.incarnation or self.phase in _ABSENT:
            return
        if not isinstance(answer, Refused):
            if answer.epoch != terms.epoch:
                self._rejoin(f"the master is in epoch {answer.epoch}: it was restarted")
                return
            terms.beat(answer)
            self.shared.donate = answer.donate
        elif remedy_for(answer, joining=False, pushing=False) is Remedy.JOIN_AGAIN:
            self._rejoin(answer.sentence)
        elif answer.code is RefusalCode.IDENTITY:
            self._fail(answer)  # revoked: steps from now on do not count
        else:
            self.shared.log("heartbeat", f"a heartbeat is refused: {answer.sentence}", logging.WARNING)

    # ---- joining again, stopping, leaving ----

    def _rejoin(self, why: str) -> None:
        shared = self.shared
        shared.record(tape.SessionFenced(shared.cause, incarnation=shared.terms.incarnation, reason=why))
        shared.log("join", f"joining again: {why}", logging.WARNING)
        self.pushing.cancel()
        self.pulling.cancel()
        shared.forget_asides()  # ranges on their way back are not named in Join either, which frees them
        shared.data.cancel()
        shared.move("fenced", SessionPhase.JOINING, why)
        shared.patience.forget()
        shared.note = f"joining again: {why}"
        shared.ask(self._join_request)

    def _join_request(self) -> JoinRequest:
        config, shared = self.config, self.shared
        incarnation = shared.terms.incarnation or shared.terms.previous
        caller = Caller(shared.terms.run_id, 0, config.cluster_id, incarnation, shared.cause)
        return JoinRequest(
            caller,
            OWN_HELLO,
            config.layout,
            config.layout.layout_hash,
            config.data_plan,
            config.declared_tokens_per_s,
            shared.work.all_ranges(),
            config.curve_key,
            config.untrained.frozen,
            config.untrained.buffers,
            config.process_id,
            config.host,
            config.rank_keys,
            config.pushers if config.pushers > 1 else 0,
        )

    def _want_to_leave(self, request: StopWanted) -> None:
        """Leave as soon as all work is pushed and decided; the training loop waits meanwhile."""
        shared, ending = self.shared, self._ending
        if self.phase in _GONE:
            return
        if ending.wanted:
            if not request.push_pending:
                self._leave(request.reason)  # a second request does not wait
            elif self._is_patient and not request.patient:
                # A signal while it waits: what leaving may take otherwise has begun with the wait.
                ending.patient_until_s, ending.reason = -math.inf, request.reason
            return
        ending.wanted, ending.push_pending, ending.reason = True, request.push_pending, request.reason
        self._begin_ending()
        if request.patient and self.config.leave_wait_s is None and not self._run_has_merged:
            ending.patient_until_s = shared.now_s + self.config.cut_off_limit_s
        if self._unfinished().tokens and self.phase is not SessionPhase.JOINING:
            shared.log(
                "leave", f"leaving ({request.reason}) once {self._unfinished()} are pushed and their verdict is known"
            )

    def _begin_ending(self) -> None:
        """Set the bound on leaving, unless it is set: leave_wait_s from now; where that was not set by hand, with twice
        the last push and pull."""
        shared, ending = self.shared, self._ending
        if math.isinf(ending.by_s):
            usual_s = 0.0 if self.config.leave_wait_s is not None else 2 * (shared.push_s + shared.pull_s)
            ending.by_s, ending.since_s = shared.now_s + shared.terms.times.leave_wait_s + usual_s, shared.now_s
            ending.dropped = shared.work.dropped if ending.dropped is None else ending.dropped

    @property
    def _is_patient(self) -> bool:
        return not math.isinf(self._ending.patient_until_s)

    def _unfinished(self) -> Work:
        """The work that leaving waits for."""
        work = self.shared.work
        open_work = work.in_push or Work()
        return open_work + work.pending if self._ending.push_pending and not work.lost else open_work

    def _finish_and_leave(self) -> None:
        """Take the next step towards leaving: the open push is decided, the rest is pushed, then Leave."""
        shared, ending = self.shared, self._ending
        if self._is_patient:
            # The loop has ended by itself, and the run's other clusters may come hours later: say so from time to time.
            # Once the run merges, or ends, leaving takes as long as always.
            if self._run_has_merged or shared.terms.stop:
                ending.patient_until_s, ending.by_s = -math.inf, math.inf
                self._begin_ending()
            elif self._end_words.due(lasted_s := shared.now_s - ending.since_s):
                limit_h = self.config.cut_off_limit_s / 3600
                shared.log(
                    "patient",
                    f"the training loop ended {lasted_s / 60:.0f} min ago, and {self._unfinished()} are not merged "
                    f"yet: {self.waiting_for()}; this cluster leaves without them {limit_h:g} h after the loop's end "
                    "(cut_off_limit_h), or at ctrl-C or SIGTERM",
                    logging.WARNING,
                )
        if not self._unfinished().tokens or shared.now_s >= self._by_s:
            self._leave(ending.reason)
        elif not shared.terms.takes_pushes and self.phase is not SessionPhase.AWAITING:
            self._leave(ending.reason)  # the run has ended: pushes after its last round are refused
        elif self.phase is SessionPhase.TRAINING and shared.now_s >= self.pushing.not_before_s:
            self.pushing.begin("push due")

    @property
    def _by_s(self) -> float:
        """When the cluster leaves at the latest: not before the open window closes, unless a bound was set by hand."""
        if self._is_patient:
            return self._ending.patient_until_s
        by_s = self._ending.by_s
        if math.isinf(by_s) or self.config.leave_wait_s is not None or self.phase is not SessionPhase.AWAITING:
            return by_s
        return max(by_s, self.shared.window_closes_s + self.shared.terms.times.leave_wait_s)

    @property
    def gives_up_s(self) -> float:
        """Until when a caller must wait for the end of leaving."""
        return self._by_s + self.shared.terms.times.call_deadline_s if self.phase not in _GONE else self._gone_by_s

    def _run_stops(self) -> None:
        """The run is over, or this cluster is drained: push the pending work if the master takes it, pull the last
        version, leave.
        """
        shared, ending = self.shared, self._ending
        if math.isinf(ending.by_s):
            self._begin_ending()
            shared.log("stop", f"{self._who_ends()}: pulling the last version, then leaving")
        # What is kept for pulling the last version; after a verdict, too, which comes once the window has closed.
        wait_s = shared.terms.times.leave_wait_s
        kept_s = wait_s / 2
        if self.config.leave_wait_s is None:
            kept_s += 2 * shared.pull_s
            if self.phase is SessionPhase.AWAITING:
                ending.by_s = max(ending.by_s, shared.window_closes_s + wait_s + kept_s)
        pushing = self.phase in (SessionPhase.BEGINNING_PUSH, SessionPhase.TRANSFERRING)
        donates = self.pushing.open is not None and self.pushing.open.donates is not None
        may_push = shared.terms.takes_pushes and not donates and shared.now_s < ending.by_s - kept_s
        if shared.now_s >= ending.by_s:
            reason = f"{self._who_ends()}; the last version could not be pulled in time"
            why = f" ({shared.note})" if shared.note else ""
            shared.log("stop", f"{reason}{why}: the model here is this cluster's own, not the run's", logging.WARNING)
            self._leave(reason)
        elif pushing and not may_push:
            self.pushing.abandon()
            self.pushing.drop("run stops", at_least=shared.terms.published)
        elif self.phase is SessionPhase.TRAINING and may_push and shared.work.pending.tokens and not shared.work.lost:
            if shared.now_s >= self.pushing.not_before_s:
                self.pushing.begin("push due")
        elif self.phase is SessionPhase.TRAINING:
            self.pushing.drop("run stops", at_least=shared.terms.published)

    def _who_ends(self) -> str:
        return "the master ends this cluster's part" if self.shared.terms.takes_pushes else "the run has ended"

    def _leave(self, reason: str, error: DipsError | None = None) -> None:
        """Give up the open push and pull, and send Leave."""
        shared, ending = self.shared, self._ending
        if self.phase in _GONE:
            return
        lost = self.unshared
        shared.record(tape.SessionLeaving(shared.cause, reason=reason, lost_steps=lost.steps, lost_tokens=lost.tokens))
        if lost.steps:
            self._say_what_is_lost(lost, reason, error)
        deadline_s = shared.leave_deadline_s = (
            shared.terms.times.call_deadline_s if ending.wanted else shared.terms.times.leave_wait_s
        )
        self._gone_by_s = shared.now_s + deadline_s + 1.0
        self._ending = _Ending(reason, error, dropped=shared.work.dropped if ending.dropped is None else ending.dropped)
        self.pushing.cancel()
        self.pulling.cancel()
        shared.exchange.cancel()
        shared.data.cancel()
        shared.note = f"leaving: {reason}"
        if shared.terms.incarnation is None:
            shared.move("leave", SessionPhase.LEFT, reason)
            shared.emit(Finished(reason, error))
            return
        shared.move("leave", SessionPhase.LEAVING, reason)  # Leave frees whatever is leased and in no sealed push

    @property
    def unshared(self) -> Work:
        """The work that is lost if this cluster leaves now: since leaving began, or since the last push that counts."""
        work = self.shared.work
        before, now = work.dropped if self._ending.dropped is None else self._ending.dropped, work.uncounted
        return Work((), now.tokens - before.tokens, now.steps - before.steps)

    def _say_what_is_lost(self, lost: Work, reason: str, error: DipsError | None) -> None:
        shared, ending, push = self.shared, self._ending, self.pushing.open
        verdict = self.pushing.last_verdict
        level = logging.WARNING
        if error is not None:
            why = str(error)
        elif not shared.terms.takes_pushes:
            why, level = "the run has ended", logging.INFO
        elif (
            verdict is not None and verdict.kind is not VerdictKind.APPLIED and lost.tokens > self._unfinished().tokens
        ):
            why = f"push {verdict.push} was {verdict.kind.name}: {verdict.reason}"
        elif not ending.push_pending and push is None:
            why = "they were made since the last push, and the parameters may be in the middle of a step"
        elif self.phase is SessionPhase.AWAITING:
            why = f"no verdict of push {self.pushing.awaited} came in time; it may come yet, and "
            why += f"count {self._undecided()}"
        else:
            why = shared.note or "the time to push them was too short"
        shared.log("lost", f"leaving ({reason.partition(':')[0]}) without {lost}: {why}", level)

    def _undecided(self) -> Work:
        """The work of a push that was sent: the run may count it, also when this cluster has left."""
        return (self.shared.work.in_push or Work()) if self.pushing.awaited is not None else Work()

    def _left(self) -> None:
        work, base = self.shared.work, self.shared.base
        reason = self._ending.reason.partition(":")[0]
        version = f"with version {base}" if base is not None else "before it had a version"
        undecided = self._undecided()
        lost = Work((), work.uncounted.tokens - undecided.tokens, work.uncounted.steps - undecided.steps)
        also = f", and {lost} were not" if lost.steps else ""
        also += f"; of {undecided} it is not known" if undecided.steps else ""
        self.shared.log("left", f"left the run {version} ({reason}): since the start {work.counted} were counted{also}")
        self.shared.move("left", SessionPhase.LEFT)
        self.shared.record(tape.SessionLeft(self.shared.cause, reason=self._ending.reason))
        self.shared.emit(Finished(self._ending.reason, self._ending.error))

    def _fail(self, error: DipsError) -> None:
        """The cluster cannot go on: leave, and let the training loop raise the error."""
        self.shared.record(tape.SessionFailed(self.shared.cause, reason=str(error)))
        if self.phase is SessionPhase.LEAVING:
            self._left()
        elif not self.finished:
            self._leave(str(error), error)
