"""A cluster of a simulation at scale: it trains at a stated rate and follows the protocol call by call.

Like worker/state/cluster.py it waits for a push and its verdict for at most verdict_wait_s, then continues training
while the transfer goes on, and needs the verdict before the next push; with `overlap` it trains through the push, or
through everything. Training is time times speed; no parameters are held. A process that failed starts again: it joins,
pulls, and work that was not pushed is lost.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout
from dips.core.messages import (
    Admitted,
    AwaitVerdictReply,
    AwaitVerdictRequest,
    BeginPullReply,
    BeginPullRequest,
    BeginPushReply,
    BeginPushRequest,
    Busy,
    Caller,
    DataPlan,
    DataRange,
    FinishPullRequest,
    FinishPushReply,
    FinishPushRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseDataReply,
    LeaseDataRequest,
    LeaveRequest,
    PullGrant,
    Refusal,
    Settings,
    Stale,
    StaleKind,
    Ticket,
    Verdict,
    VerdictKind,
)
from dips.sim.scale import rates, tally
from dips.sim.scale.kernel import Future, GeneratorProcess, Life, VirtualClock, first_of
from dips.sim.scale.links import SharedDirection, SharedTransfer
from dips.sim.scale.scenario import ClusterTable
from dips.sim.scale.servers import BAD_NORM, HELLO, NORM, NORM_SPREAD, Servers, push_digest

LOST = (RefusalCode.FENCED, RefusalCode.STALE_EPOCH)
AWAIT_S = 300.0
RETRY_S = 5.0
"""Seconds until an unreachable master is called again."""


class IncarnationOver(Exception):
    """This incarnation is over: join again."""


class RunEnded(Exception):
    """The run ends: leave."""


@dataclass(frozen=True)
class ScaleOpenPush:
    """The work of an undecided push: its ranges, steps, and seconds of training."""

    id: PushId
    ranges: tuple[DataRange, ...]
    steps: int
    trained_s: float


@dataclass
class Book:
    """Leased ranges that are not trained yet, oldest first, and those behind the steps since the last push."""

    held: list[DataRange] = field(default_factory=list)
    pending: list[DataRange] = field(default_factory=list)

    def take(self, tokens: int) -> None:
        """Train on so many of the leased tokens."""
        while tokens > 0:
            item = self.held.pop(0)
            if item.tokens > tokens:
                cut = item.begin_tokens + tokens
                self.held.insert(0, DataRange(item.lease_id, item.pass_index, item.chunk, cut, item.end_tokens))
                item = DataRange(item.lease_id, item.pass_index, item.chunk, item.begin_tokens, cut)
            self.pending.append(item)
            tokens -= item.tokens

    @property
    def held_tokens(self) -> int:
        return sum(item.tokens for item in self.held)


class LightCluster:
    """A cluster through all its processes."""

    def __init__(
        self,
        table: ClusterTable,
        servers: Servers,
        down: SharedDirection,
        account: tally.ClusterAccount,
        layout: Layout,
        plan: DataPlan,
        rng: random.Random,
    ) -> None:
        self.table, self.account = table, account
        self._servers, self._down, self._layout, self._plan, self._rng = servers, down, layout, plan, rng
        self._clock: VirtualClock = servers.clock
        self._copy_s = rates.copy_s(layout.n_elems, table.copy_rate)
        self._process: GeneratorProcess | None = None
        self._flow: SharedTransfer | None = None
        self.connected = True
        self.generation = 0
        self._in_doubt: ScaleOpenPush | None = None
        self._forget()

    def _forget(self) -> None:
        self.generation += 1
        self._book = Book()
        self._incarnation: Incarnation | None = None
        self._epoch = 0
        self._joined = False
        self._base: Version | None = None
        self._fence = 0
        self._seq = 0
        self._leases = 0
        self._local_steps = 0
        self._steps = 0.0
        self._carried_steps = 0.0
        """Of those, made before the last pull; a dynamic H_j counts from the pull."""
        self._training = False
        self._trained_since_s = 0.0
        self._unpushed_s = 0.0
        self._hold_until_s = 0.0
        self._speed = self._draw_speed()
        self._push_s = self._pull_s = 0.0
        self._stop = self._fenced = False
        self._open: ScaleOpenPush | None = None
        self._wake = Future(self._clock)

    # ---- the process and its failures ----

    def start(self, after_failure: bool) -> None:
        """A process begins now."""
        self._forget()
        self._process = GeneratorProcess(self._clock, self._live(after_failure))

    def kill(self, state: str) -> None:
        """kill -9, or the end of its window: what was not pushed is lost."""
        self._stop_training()
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._break_transfers()
        self.account.lose(self._unpushed_s)
        self._in_doubt, self._open = self._open or self._in_doubt, None
        self.generation += 1
        self._joined = False
        self.account.enter(state, self._clock.now_s)

    def depart(self) -> None:
        """The cluster's window ends: it leaves in order."""
        if self._joined:
            self._servers.call(LeaveRequest(self._caller(), "its window ended"))
        self.kill(tally.AWAY)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive

    def slave_lost(self, slave: str) -> None:
        """A transfer that involves it is broken."""
        if self._flow is not None:
            self._direction_of(self._flow).break_flow(self._flow)

    def _break_transfers(self) -> None:
        if self._flow is not None:
            self._direction_of(self._flow).break_flow(self._flow)
            self._flow = None

    def _direction_of(self, flow: SharedTransfer) -> SharedDirection:
        return self._servers.up if self._servers.up.of(self.table.id) is flow else self._down

    # ---- the main loop ----

    def _live(self, after_failure: bool) -> Life:
        pull_state = tally.REJOIN_PULL if after_failure else tally.JOIN
        while not self._stop:
            try:
                if not self._joined:
                    yield from self._join()
                if self._base is None:
                    yield from self._pull(pull_state)
                    pull_state = tally.PULL
                yield from self._train_until_push()
                yield from self._push()
            except IncarnationOver:
                self._joined = False
            except RunEnded:
                break
        self._stop_training()
        self.account.enter(tally.AWAY, self._clock.now_s)
        if self._joined:
            yield self._servers.call(LeaveRequest(self._caller(), "the run has ended"))
        self._joined = False

    def _caller(self) -> Caller:
        return Caller("simulated", self._epoch, self.table.id, self._incarnation, f"c-{self.table.id}")

    def _join(self) -> Life:
        """A new incarnation; work whose base and fence still hold is kept."""
        self._stop_training()
        self.account.enter(tally.JOIN, self._clock.now_s)
        reply = yield from self._ask_to_join()
        self.account.rejoins += 1
        self._incarnation, self._epoch, self._seq, self._leases = reply.incarnation, reply.epoch, 0, 0
        self._joined, self._fenced, self._wake = True, False, Future(self._clock)
        self._local_steps = reply.local_steps
        self._beat(self.generation, reply.incarnation)
        yield from self._settle_last_push(reply)
        if reply.fence != self._fence or self._base is None:
            self._drop_work()
        if reply.seed:
            yield from self._transfer_push((), 0, 0, 0.0, tally.JOIN)
            self._open, self._base = None, None

    def _ask_to_join(self) -> Life:
        plan, rate = self._plan, self.table.tokens_per_s
        held = tuple(self._book.held + self._book.pending) + (self._open.ranges if self._open else ())
        while True:
            caller = Caller("simulated", 0, self.table.id, self._incarnation, f"join-{self.table.id}")
            request = JoinRequest(caller, HELLO, self._layout, self._layout.layout_hash, plan, rate, held)
            answer = yield from self._ask(request)
            if isinstance(answer, JoinReply):
                return answer
            yield from self._wait(self._clock.lapse(RETRY_S), tally.JOIN)

    def _settle_last_push(self, reply: JoinReply) -> Life:
        """Learn the verdict of the push that was open when the last incarnation ended."""
        ours = self._open or self._in_doubt
        last_id: PushId | None
        kind: VerdictKind | None
        last = reply.last_push
        if isinstance(last, PushId):
            last_id, kind = last, (yield from self._await(last))
        else:
            last_id, kind = (last.push, last.kind) if last else (None, None)
        is_final = isinstance(kind, VerdictKind) and kind is not VerdictKind.ABORTED
        decided = ours is not None and last_id == ours.id and is_final
        if ours is not None and not (decided and kind is VerdictKind.APPLIED):
            if self._open is not None and not decided:
                self._take_back(self._open)
            else:
                self.account.lose(ours.trained_s)
        if decided:
            self._base = None
        self._open = self._in_doubt = None

    def _take_back(self, push: ScaleOpenPush) -> None:
        """After ABORTED: the next push includes this work."""
        self._book.pending = [*push.ranges, *self._book.pending]
        self._steps += push.steps
        self._unpushed_s += push.trained_s

    def _drop_work(self) -> None:
        """The base is gone: the work on it is lost, and its data, which is still leased, is trained again."""
        self._book.held = self._book.pending + self._book.held
        self._book.pending = []
        self.account.lose(self._unpushed_s)
        self._unpushed_s, self._steps, self._carried_steps, self._base = 0.0, 0.0, 0.0, None

    def _beat(self, generation: int, incarnation: Incarnation) -> None:
        """Beats go on until this process or incarnation ends; a cut link loses them."""
        if generation != self.generation or incarnation != self._incarnation or not self._joined:
            return
        if self.connected:
            beat = HeartbeatRequest(
                self._caller(),
                self.account.state,
                tokens_per_s=self.table.tokens_per_s,
                steps_per_s=self._steps_per_s,
                push_s=min(self._push_s, 86_400.0),
                pull_s=min(self._pull_s, 86_400.0),
                base=self._base,
            )
            outcome = self._servers.call(beat)
            outcome.then(lambda: self._replied(outcome.value, incarnation))
        self._clock.after(self._settings.heartbeat_s, lambda: self._beat(generation, incarnation))

    def _replied(self, reply: object, incarnation: Incarnation) -> None:
        if incarnation != self._incarnation:
            return
        if isinstance(reply, HeartbeatReply) and reply.stop:
            self._stop = True
            self._wake.set(None)
        elif isinstance(reply, Refusal) and reply.code in LOST:
            self._fenced = True
            self._wake.set(None)

    # ---- training ----

    def _draw_speed(self) -> float:
        """Tokens a second of the next round."""
        factor = max(0.5, self._rng.gauss(1.0, self.table.jitter)) if self.table.jitter else 1.0
        return self.table.tokens_per_s * factor

    @property
    def _steps_per_s(self) -> float:
        return self._speed / self.table.tokens_per_step

    def _start_training(self) -> None:
        if not self._training:
            self._training = True
            self._trained_since_s = self._clock.now_s
            self.account.enter(tally.TRAIN, self._clock.now_s)

    def _stop_training(self) -> None:
        if self._training:
            self._training = False
            passed_s = self._clock.now_s - self._trained_since_s
            self._steps += passed_s * self._steps_per_s
            self._unpushed_s += passed_s

    def _until_push_s(self) -> float:
        """The training time until the next push."""
        done = self._steps
        if self._training:
            done += (self._clock.now_s - self._trained_since_s) * self._steps_per_s
        return max(0.0, (self._wanted_steps - done) / self._steps_per_s)

    @property
    def _wanted_steps(self) -> float:
        return self._carried_steps + (self._local_steps or self._settings.sync_every_steps)

    def _train_until_push(self) -> Life:
        yield from self._lease()
        while self._until_push_s() > 1e-6:
            self._start_training()
            yield first_of(self._clock, self._wake, self._clock.lapse(self._until_push_s()))
            if self._stop:
                raise RunEnded
            if self._fenced:
                raise IncarnationOver
        self._stop_training()

    def _lease(self) -> Life:
        """Data for the steps until the next push."""
        self._stop_training()
        self._hold_until_s = math.inf
        need = math.ceil(max(self._wanted_steps, self._steps)) * self.table.tokens_per_step
        need -= sum(item.tokens for item in self._book.pending)
        while self._book.held_tokens < need:
            self._leases += 1
            want = min(need - self._book.held_tokens, 256 * self._plan.chunk_tokens)
            request = LeaseDataRequest(self._caller(), want, self._leases)
            reply = yield from self._call(request, tally.PULL)
            assert isinstance(reply, LeaseDataReply), f"a lease was answered with {reply}"
            self._book.held.extend(reply.ranges)
        self._hold_until_s = self._clock.now_s

    # ---- push ----

    def _push(self) -> Life:
        """Push all pending work and act on the verdict."""
        per_step = self.table.tokens_per_step
        steps = max(1, math.floor(self._steps + 1e-6))
        self._book.take(steps * per_step - sum(item.tokens for item in self._book.pending))
        ranges, trained_s = tuple(sorted(self._book.pending)), self._unpushed_s
        self._book.pending, self._unpushed_s, self._steps, self._carried_steps = [], 0.0, 0.0, 0.0
        self._speed = self._draw_speed()
        yield from self._wait(self._clock.lapse(self._copy_s), tally.COPIES, hold=True)
        kind = yield from self._transfer_push(ranges, steps * per_step, steps, trained_s, tally.PUSH)
        push, self._open = self._open, None
        assert push is not None, "it was open until now"
        # By identity: both are IntEnums, and APPLIED equals VERSIONS.
        if kind is VerdictKind.ABORTED or kind is StaleKind.VERSIONS:
            self._take_back(push)
        elif kind is not VerdictKind.APPLIED:
            self.account.lose(trained_s)
            if kind is not VerdictKind.EXCLUDED:
                self._book.held = [*push.ranges, *self._book.held]
            self._drop_work()
        if kind is not VerdictKind.ABORTED:
            yield from self._pull(tally.PULL)

    def _transfer_push(
        self, ranges: tuple[DataRange, ...], tokens: int, steps: int, trained_s: float, state: str
    ) -> Life:
        """From BeginPush to the kind of its verdict; a StaleKind, or None when it was refused."""
        began_s = self._clock.now_s
        self._seq += 1
        assert self._incarnation is not None, "pushes only once joined"
        push_id = PushId(ClusterId(self.table.id), self._incarnation, self._seq)
        self._open = ScaleOpenPush(push_id, ranges, steps, trained_s)
        self._servers.norm_of[self.table.id] = self._draw_norm()
        self._hold(("none",))
        left = dict.fromkeys(self._servers.slaves, 1.0)
        request = BeginPushRequest(self._caller(), self._seq, self._base, self._fence, ranges, tokens, steps)
        while True:
            answer = yield from self._begin(request, state)
            match answer:
                case Ticket():
                    admitted = yield from self._send(push_id, answer, left, state)
                    self._push_s = self._clock.now_s - began_s
                    if admitted:
                        return (yield from self._await(push_id))
                case Verdict():
                    return answer.kind
                case PushId():
                    return (yield from self._await(push_id))
                case Stale(kind):
                    return kind
                case _:
                    return None

    def _draw_norm(self) -> float:
        bad = self._rng.random() < self.table.bad_push
        self._servers.tally.faults["bad push"] += bad
        return NORM * self._rng.lognormvariate(0.0, NORM_SPREAD) * (BAD_NORM if bad else 1.0)

    def _begin(self, request: BeginPushRequest, state: str) -> Life:
        while True:
            reply = yield from self._call(request, state)
            if not isinstance(reply, BeginPushReply):
                return None
            if not isinstance(reply.answer, Busy):
                return reply.answer
            yield from self._wait(self._clock.lapse(max(1.0, reply.answer.retry_after_s)), state)

    def _send(self, push_id: PushId, ticket: Ticket, left: dict[str, float], state: str) -> Life:
        """The bytes that are missing, then FinishPush; False when another attempt is needed."""
        shares = {name: slave.share_bytes for name, slave in self._servers.slaves.items()}
        parts = {name: max(1.0, shares[name] * left[name]) for name in shares}
        flow = self._flow = self._servers.up.start(self.table.id, parts)
        done = yield from self._wait(flow.done, state)
        self._flow = None
        for name, slave in self._servers.slaves.items():
            left[name] = min(1.0, flow.left_of(name) / max(1.0, shares[name])) if slave.alive else 1.0
        if not done:
            return False
        self._servers.staged(push_id)
        digests = tuple((name, push_digest(push_id, name)) for name in sorted(shares))
        request = FinishPushRequest(self._caller(), push_id.seq, ticket.attempt, digests)
        while True:
            reply = yield from self._call(request, state)
            if not isinstance(reply, FinishPushReply):
                left.update(dict.fromkeys(left, 1.0))
                return False
            if not isinstance(reply.answer, Busy):
                return isinstance(reply.answer, Admitted | Verdict)
            yield from self._wait(self._clock.lapse(max(1.0, reply.answer.retry_after_s)), state)
            self._servers.staged(push_id)

    def _await(self, push_id: PushId) -> Life:
        if self._settings.overlap == "push":
            self._hold(("push",))
        while True:
            reply = yield from self._call(AwaitVerdictRequest(self._caller(), push_id, AWAIT_S), tally.VERDICT)
            if not isinstance(reply, AwaitVerdictReply):
                return None
            if isinstance(reply.answer, Verdict):
                return reply.answer.kind

    # ---- pull ----

    def _pull(self, state: str) -> Life:
        began_s = self._clock.now_s
        self._hold(("none", "push"))
        if state != tally.PULL:
            self._hold_until_s = math.inf
        while True:
            reply = yield from self._call(BeginPullRequest(self._caller()), state)
            grant = reply.answer if isinstance(reply, BeginPullReply) else None
            if isinstance(grant, PullGrant):
                shares = {name: max(1.0, slave.share_bytes) for name, slave in self._servers.slaves.items()}
                flow = self._flow = self._down.start(self.table.id, shares)
                done = yield from self._wait(flow.done, state)
                self._flow = None
                if done:
                    break
            else:
                retry_s = grant.retry_after_s if isinstance(grant, Busy) else RETRY_S
                yield from self._wait(self._clock.lapse(max(1.0, retry_s)), state)
        yield from self._call(FinishPullRequest(self._caller(), grant.pin_id), state)
        self._pull_s = self._clock.now_s - began_s
        self._stop_training()
        yield from self._wait(self._clock.lapse(self._copy_s), tally.COPIES, hold=True)
        self._base, self._fence, self._local_steps = grant.version, grant.fence, grant.local_steps
        self._carried_steps = self._steps if self._settings.dynamic_local_steps else 0.0

    # ---- waiting ----

    @property
    def _settings(self) -> Settings:
        return self._servers.scenario.master.settings

    def _hold(self, overlaps: tuple[str, ...]) -> None:
        """Stop the training loop from now on, for a bounded time, if the run's overlap is one of these."""
        waits_s = self._settings.verdict_wait_s if self._settings.overlap in overlaps else 0.0
        self._hold_until_s = self._clock.now_s + waits_s

    def _call(self, request: object, state: str) -> Life:
        """A call that is repeated until the master answers it. Raises Fenced or Ended when that is the answer."""
        while True:
            answer = yield from self._ask(request, state)
            if answer is not None:
                return answer
            yield from self._wait(self._clock.lapse(RETRY_S), state)

    def _ask(self, request: object, state: str = tally.JOIN) -> Life:
        """One call: its reply or Refusal, or None when it was not answered, or refused for now."""
        if not self.connected:
            return None
        answer = yield from self._wait(self._servers.call(request), state)
        if not isinstance(answer, Refusal):
            return answer
        if answer.code is RefusalCode.STOPPING:
            raise RunEnded
        if isinstance(request, JoinRequest) or answer.code is RefusalCode.BUSY:
            return None
        if answer.code in LOST:
            raise IncarnationOver
        return answer

    def _wait(self, outcome: Future, state: str, hold: bool = False) -> Life:
        """Wait; the training loop stops until hold_until_s (with `hold`: all the time), then it trains meanwhile."""
        if hold or self._clock.now_s < self._hold_until_s or state in (tally.JOIN, tally.REJOIN_PULL):
            self._stop_training()
            self.account.enter(state, self._clock.now_s)
        if not hold and state not in (tally.JOIN, tally.REJOIN_PULL, tally.AWAY):
            yield from self._train_meanwhile(outcome, state)
        if not outcome.known:
            yield outcome
        return outcome.value

    def _train_meanwhile(self, outcome: Future, state: str) -> Life:
        while not outcome.known:
            if self._clock.now_s < self._hold_until_s:
                yield first_of(self._clock, outcome, self._clock.lapse(self._hold_until_s - self._clock.now_s))
                continue
            if self._until_push_s() <= 1e-6:
                self._stop_training()
                self.account.enter(state, self._clock.now_s)
                return
            self._start_training()
            yield first_of(self._clock, outcome, self._clock.lapse(self._until_push_s()))
