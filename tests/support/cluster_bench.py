"""Plays the master and the slaves for one worker Session, event by event, under a clock that the test holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import (
    Admitted,
    AwaitVerdictReply,
    AwaitVerdictRequest,
    BeginPullReply,
    BeginPullRequest,
    BeginPushReply,
    BeginPushRequest,
    DataMode,
    DataPlan,
    DataRange,
    FinishPullReply,
    FinishPullRequest,
    FinishPushReply,
    FinishPushRequest,
    HeartbeatReply,
    Hello,
    JoinReply,
    JoinRequest,
    LeaseDataReply,
    LeaseDataRequest,
    LeaveReply,
    LeaveRequest,
    PlacementSpec,
    PullGrant,
    ReturnDataReply,
    ReturnDataRequest,
    Settings,
    SlaveAddress,
    Ticket,
    Verdict,
    VerdictKind,
)
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import (
    Beat,
    Done,
    Effect,
    Event,
    Failed,
    Finished,
    Install,
    LeaseWanted,
    PushRecord,
    Run,
    SendPush,
    Started,
    Stepped,
    StopWanted,
    Tick,
)
from dips.worker.state.saved import SavedSession
from dips.worker.state.shared import SessionConfig, SessionPhase

LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (8,), "float32", f"layers.{i}") for i in range(4)))
PLACEMENT = PlacementSpec(
    (SlaveAddress("s0", "tcp://127.0.0.1:1"), SlaveAddress("s1", "tcp://127.0.0.1:2")), (0, 1, 0, 1), b"p"
)
OWN = DataPlan(DataMode.OWN)
LEASED = DataPlan(DataMode.LEASED, b"digest", 1 << 20, 1 << 10)
TICKET = Ticket(1, PLACEMENT, (0, 1, 2, 3))
DIGESTS = (("s0", b"0" * 16), ("s1", b"1" * 16))
TK_MAX = 1_000_000
SETTINGS = Settings(sync_every_steps=4, verdict_wait_s=30.0, tk_max_tokens=TK_MAX)
TOKENS = 100

K = TypeVar("K")
Kept = tuple[DataRange, ...] | None


def session_config(**changes: Any) -> SessionConfig:
    return replace(SessionConfig(ClusterId("a"), LAYOUT, OWN, run_id="run"), **changes)


class ClusterBench:
    """One session, and what a master would remember of it."""

    def __init__(self, config: SessionConfig | None = None, settings: Settings = SETTINGS, epoch: int = 1) -> None:
        self.session = ClusterMachine(config or session_config())
        self.settings = settings
        self.now_s = 0.0
        self.epoch = epoch
        self.n = 0
        self.fence = 0
        self.published: Version | None = Version(1, 5)
        self.tokens = 10_000
        self.local_steps = settings.sync_every_steps
        self.effects: list[Effect] = []
        self.every: list[Effect] = []
        self.returned: list[DataRange] = []
        self.transfer_s = 0.2
        """How long the bytes of each push and pull are on their way."""

    # ---- raw ----

    def say(self, event: Event) -> list[Effect]:
        """Handle one event; its effects are also kept until they are taken."""
        effects = self.session.handle(event, self.now_s)
        self.effects += effects
        self.every += effects
        return effects

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.say(Tick())

    def take(self, kind: type[K]) -> K:
        """The oldest effect of this kind that was not taken; fails when there is none."""
        for effect in self.effects:
            if isinstance(effect, kind):
                self.effects.remove(effect)
                return effect
        raise AssertionError(f"no {kind.__name__} among {self.effects}")

    def has(self, kind: type[Effect]) -> bool:
        return any(isinstance(effect, kind) for effect in self.effects)

    def job(self, kind: type[K]) -> tuple[int, K]:
        """The oldest job with this type of command that has not ended: its number and its command."""
        for effect in self.effects:
            if isinstance(effect, Run) and isinstance(effect.command, kind):
                self.effects.remove(effect)
                return effect.job, effect.command
        raise AssertionError(f"no job {kind.__name__} among {self.effects}")

    def asked(self, kind: type[K]) -> K:
        """The command of the oldest job of this type, which goes on."""
        for effect in self.effects:
            if isinstance(effect, Run) and isinstance(effect.command, kind):
                return effect.command
        raise AssertionError(f"no job {kind.__name__} among {self.effects}")

    def asks(self, kind: type[Any]) -> bool:
        return any(isinstance(effect, Run) and isinstance(effect.command, kind) for effect in self.effects)

    def answer(self, kind: type[Any], reply: Any) -> Any:
        job, request = self.job(kind)
        self.say(Done(job, reply))
        return request

    def fail(self, kind: type[Any]) -> Any:
        job, request = self.job(kind)
        self.say(Failed(job, "connection refused"))
        return request

    def refuse(self, kind: type[Any], code: RefusalCode, retry_after_s: float = 0.0) -> Any:
        job, request = self.job(kind)
        self.say(Done(job, Refused(code, f"refused: {code.name}", retry_after_s)))
        return request

    @property
    def phase(self) -> SessionPhase:
        return self.session.phase

    @property
    def finished(self) -> Finished | None:
        return next((effect for effect in self.every if isinstance(effect, Finished)), None)

    @property
    def waits(self) -> bool:
        return self.session.must_wait(self.now_s)

    # ---- a master's answers ----

    def join_reply(
        self, last_push: Verdict | PushId | None = None, *, seed: bool = False, kept: Kept = None
    ) -> JoinReply:
        """kept: which of the ranges that Join names are lent still; None: all."""
        self.n += 1
        kept = self.asked(JoinRequest).held_ranges if kept is None else kept
        return JoinReply(
            self.epoch, Incarnation(self.epoch, self.n), Hello(1, 1), self.settings, seed, self.fence, last_push,
            self.published, self.tokens, self.local_steps, "run", kept,
        )  # fmt: skip

    def join(self, last_push: Verdict | PushId | None = None, *, seed: bool = False, kept: Kept = None) -> JoinRequest:
        request = self.answer(JoinRequest, self.join_reply(last_push, seed=seed, kept=kept))
        assert isinstance(request, JoinRequest)
        return request

    def grant(self) -> BeginPullRequest:
        assert self.published is not None
        grant = PullGrant(
            self.published, self.fence, 7, PLACEMENT, (0, 1, 2, 3), DIGESTS, self.tokens, self.local_steps, None,
            1 << 20, self.epoch, "run",
        )  # fmt: skip
        request = self.answer(BeginPullRequest, BeginPullReply(grant))
        assert isinstance(request, BeginPullRequest)
        return request

    def pulled(self) -> Install:
        """Answer BeginPull, finish the transfer; what is installed."""
        self.grant()
        install = self.pull_ends()
        self.answer(FinishPullRequest, FinishPullReply(self.local_steps))
        return install

    def pull_ends(self) -> Install:
        """The granted version is there."""
        self.say(Done(self.job(PullGrant)[0], None, self.transfer_s))
        return self.take(Install)

    def beat(self, **changes: Any) -> None:
        incarnation = self.session.shared.terms.incarnation
        assert incarnation is not None
        reply = HeartbeatReply(self.epoch, self.published, self.tokens, self.local_steps, False, "IDLE")
        self.say(Beat(incarnation, replace(reply, **changes)))

    def run_ends(self) -> None:
        """Its last token is counted: no push is taken any more, and the heartbeat says so."""
        self.tokens = TK_MAX
        self.beat(stop=True, no_more_pushes=True)

    def verdict(self, kind: VerdictKind, push: PushId | None = None, **changes: Any) -> Verdict:
        """The master decides: fence and version follow."""
        push = push or self.push_id
        if kind is not VerdictKind.ABORTED:
            self.fence += 1
        if kind is VerdictKind.APPLIED:
            assert self.published is not None
            self.published = self.published.next()
        version = None if kind is VerdictKind.ABORTED else self.published
        return Verdict(push, kind, version, **{"reason": f"because {kind.name}", **changes})

    @property
    def push_id(self) -> PushId:
        push = self.session.pushing.open
        assert push is not None, "no push is open"
        return push.id

    # ---- longer stretches ----

    def begin(self) -> None:
        """Started, joined, first version installed: TRAINING."""
        self.say(Started())
        self.join()
        self.pulled()
        assert self.phase is SessionPhase.TRAINING

    def reborn(self, saved: SavedSession | None = None, newest: PushRecord | None = None) -> None:
        """The process is killed; the next one goes on from its checkpoint (or this one), and has sent its Join."""
        before = saved or self.session.saved()
        assert before is not None
        self.session = ClusterMachine(self.session.config)
        self.session.resume(SavedSession.from_json(before.to_json()), newest)
        self.effects.clear()
        self.say(Started())
        assert self.waits, "the settings of the run are not known yet"

    def fenced(self) -> None:
        """Its incarnation is over, and it has asked to join again."""
        self.effects.clear()
        incarnation = self.session.shared.terms.incarnation
        assert incarnation is not None
        self.say(Beat(incarnation, Refused(RefusalCode.FENCED, "evicted")))
        assert self.phase is SessionPhase.JOINING
        assert not self.waits, "training goes on while joining again"

    def train(self, steps: int, loss: float = 2.0) -> None:
        for _ in range(steps):
            self.say(Stepped(TOKENS, (), loss))

    def push_begun(self) -> BeginPushRequest:
        """H steps: the push is due and asked for (not answered yet)."""
        self.train(self.local_steps)
        assert self.phase is SessionPhase.BEGINNING_PUSH
        return self.asked(BeginPushRequest)

    def ticket(self, attempt: int = 1) -> tuple[int, SendPush]:
        """BeginPush gets a ticket: the job that sends the push."""
        self.answer(BeginPushRequest, BeginPushReply(replace(TICKET, attempt=attempt)))
        return self.job(SendPush)

    def sent(self, sending: tuple[int, SendPush]) -> None:
        self.say(Done(sending[0], DIGESTS, self.transfer_s))

    def admitted(self) -> FinishPushRequest:
        request = self.answer(FinishPushRequest, FinishPushReply(Admitted(RoundId(self.epoch, 1), 1.0)))
        assert isinstance(request, FinishPushRequest)
        return request

    def awaiting(self) -> None:
        """All the way into the window."""
        self.push_begun()
        self.sent(self.ticket())
        self.admitted()
        assert self.phase is SessionPhase.AWAITING

    def goes_on(self, stage: str) -> None:
        """From the call BeginPush this far: begin, send, finish or await."""
        if stage == "begin":
            return
        sending = self.ticket()
        if stage == "send":
            return
        self.sent(sending)
        if stage != "finish":
            self.admitted()

    def judged(self, stage: str, verdict: Verdict) -> None:
        """The verdict answers BeginPush, FinishPush or AwaitVerdict."""
        match stage:
            case "begin":
                self.answer(BeginPushRequest, BeginPushReply(verdict))
            case "finish":
                self.answer(FinishPushRequest, FinishPushReply(verdict))
            case _:
                self.answer(AwaitVerdictRequest, AwaitVerdictReply(verdict))

    def donate(self) -> PushId:
        """The master asks for this cluster's base; the push that answers is open."""
        superseded = (AwaitVerdictRequest, BeginPullRequest)
        self.effects = [e for e in self.effects if not (isinstance(e, Run) and isinstance(e.command, superseded))]
        self.beat(donate=self.session.shared.base)
        assert self.phase is SessionPhase.BEGINNING_PUSH
        return self.push_id

    def decide(self, kind: VerdictKind, **changes: Any) -> Verdict:
        verdict = self.verdict(kind, **changes)
        self.answer(AwaitVerdictRequest, AwaitVerdictReply(verdict))
        return verdict

    def leaves_at_once(self) -> None:
        """Asked to leave, and asked again by a caller that does not wait for a push."""
        self.say(StopWanted("enough"))
        self.say(StopWanted("enough", push_pending=False))

    def left(self) -> LeaveRequest:
        request = self.answer(LeaveRequest, LeaveReply())
        assert isinstance(request, LeaveRequest)
        return request

    def give_back_answered(self) -> Sequence[DataRange]:
        request = self.answer(ReturnDataRequest, ReturnDataReply())
        assert isinstance(request, ReturnDataRequest)
        self.returned.extend(request.ranges)
        return request.ranges


class LeasedClusterBench(ClusterBench):
    """A cluster that trains on leased data: every step takes TOKENS tokens of its one lease."""

    def __init__(self, config: SessionConfig | None = None) -> None:
        super().__init__(config or session_config(data_plan=LEASED))
        self.used = 0

    def say_lease(self, tokens: int) -> None:
        self.say(LeaseWanted(tokens))

    def begin(self) -> None:
        super().begin()
        self.say_lease(1000)
        self.answer(LeaseDataRequest, LeaseDataReply((DataRange(1, 0, 0, 0, 100_000),)))

    def train(self, steps: int, loss: float = 2.0) -> None:
        for _ in range(steps):
            self.say(Stepped(TOKENS, (self.span(self.used, self.used + TOKENS),), loss))
            self.used += TOKENS

    @staticmethod
    def span(begin: int, end: int) -> DataRange:
        return DataRange(1, 0, 0, begin, end)


def phase_of(generation: ClusterBench) -> SessionPhase:
    """life.phase, in tests that ask twice: mypy takes an attribute for what it was when it was compared last."""
    return generation.phase
