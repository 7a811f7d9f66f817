"""Plays the master and the slaves for one worker Session, event by event, under a clock that the test holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from dips.core import messages
from dips.core.errors import RefusalCode, Refused
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout, Parameter
from dips.worker.state import effects
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.saved import SavedSession
from dips.worker.state.shared import SessionConfig, SessionPhase

LAYOUT = Layout(tuple(Parameter(f"layers.{i}.w", (8,), "float32", f"layers.{i}") for i in range(4)))
PLACEMENT = messages.PlacementSpec(
    (messages.SlaveAddress("s0", "tcp://127.0.0.1:1"), messages.SlaveAddress("s1", "tcp://127.0.0.1:2")),
    (0, 1, 0, 1),
    b"p",
)
OWN = messages.DataPlan(messages.DataMode.OWN)
LEASED = messages.DataPlan(messages.DataMode.LEASED, b"digest", 1 << 20, 1 << 10)
TICKET = messages.Ticket(1, PLACEMENT, (0, 1, 2, 3))
DIGESTS = (("s0", b"0" * 16), ("s1", b"1" * 16))
TK_MAX = 1_000_000
SETTINGS = messages.Settings(sync_every_steps=4, verdict_wait_s=30.0, tk_max_tokens=TK_MAX)
TOKENS = 100

K = TypeVar("K")
Kept = tuple[messages.DataRange, ...] | None


def session_config(**changes: Any) -> SessionConfig:
    return replace(SessionConfig(ClusterId("a"), LAYOUT, OWN, run_id="run"), **changes)


class ClusterBench:
    """One session, and what a master would remember of it."""

    def __init__(
        self, config: SessionConfig | None = None, settings: messages.Settings = SETTINGS, epoch: int = 1
    ) -> None:
        self.session = ClusterMachine(config or session_config())
        self.settings = settings
        self.now_s = 0.0
        self.epoch = epoch
        self.n = 0
        self.fence = 0
        self.published: Version | None = Version(1, 5)
        self.tokens = 10_000
        self.local_steps = settings.sync_every_steps
        self.effects: list[effects.Effect] = []
        self.every: list[effects.Effect] = []
        self.returned: list[messages.DataRange] = []
        self.transfer_s = 0.2
        """How long the bytes of each push and pull are on their way."""

    def say(self, event: effects.Event) -> list[effects.Effect]:
        """Handle one event; its effects are also kept until they are taken."""
        told = self.session.handle(event, self.now_s)
        self.effects += told
        self.every += told
        return told

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.say(effects.Tick())

    def take(self, kind: type[K]) -> K:
        """The oldest effect of this kind that was not taken; fails when there is none."""
        for effect in self.effects:
            if isinstance(effect, kind):
                self.effects.remove(effect)
                return effect
        raise AssertionError(f"no {kind.__name__} among {self.effects}")

    def has(self, kind: type[effects.Effect]) -> bool:
        return any(isinstance(effect, kind) for effect in self.effects)

    def job(self, kind: type[K]) -> tuple[int, K]:
        """The oldest job with this type of command that has not ended: its number and its command."""
        for effect in self.effects:
            if isinstance(effect, effects.Run) and isinstance(effect.command, kind):
                self.effects.remove(effect)
                return effect.job, effect.command
        raise AssertionError(f"no job {kind.__name__} among {self.effects}")

    def asked(self, kind: type[K]) -> K:
        """The command of the oldest job of this type, which goes on."""
        for effect in self.effects:
            if isinstance(effect, effects.Run) and isinstance(effect.command, kind):
                return effect.command
        raise AssertionError(f"no job {kind.__name__} among {self.effects}")

    def asks(self, kind: type[Any]) -> bool:
        return any(isinstance(effect, effects.Run) and isinstance(effect.command, kind) for effect in self.effects)

    def answer(self, kind: type[Any], reply: Any) -> Any:
        job, request = self.job(kind)
        self.say(effects.Done(job, reply))
        return request

    def fail(self, kind: type[Any]) -> Any:
        job, request = self.job(kind)
        self.say(effects.Failed(job, "connection refused"))
        return request

    def refuse(self, kind: type[Any], code: RefusalCode, retry_after_s: float = 0.0) -> Any:
        job, request = self.job(kind)
        self.say(effects.Done(job, Refused(code, f"refused: {code.name}", retry_after_s)))
        return request

    @property
    def phase(self) -> SessionPhase:
        return self.session.phase

    @property
    def finished(self) -> effects.Finished | None:
        return next((effect for effect in self.every if isinstance(effect, effects.Finished)), None)

    def ended_with(self, kind: type[K]) -> K:
        assert self.finished is not None
        assert isinstance(self.finished.error, kind)
        return self.finished.error

    @property
    def waits(self) -> bool:
        return self.session.must_wait(self.now_s)

    def join_reply(
        self, last_push: messages.Verdict | PushId | None = None, *, seed: bool = False, kept: Kept = None
    ) -> messages.JoinReply:
        self.n += 1
        kept = self.asked(messages.JoinRequest).held_ranges if kept is None else kept
        return messages.JoinReply(
            self.epoch, Incarnation(self.epoch, self.n), messages.Hello(1, 1), self.settings, seed, self.fence,
            last_push, self.published, self.tokens, self.local_steps, "run", kept,
        )  # fmt: skip

    def join(
        self, last_push: messages.Verdict | PushId | None = None, *, seed: bool = False, kept: Kept = None
    ) -> messages.JoinRequest:
        request = self.answer(messages.JoinRequest, self.join_reply(last_push, seed=seed, kept=kept))
        assert isinstance(request, messages.JoinRequest)
        return request

    def granted(self, **changes: Any) -> messages.BeginPullReply:
        assert self.published is not None
        grant = messages.PullGrant(
            self.published, self.fence, 7, PLACEMENT, (0, 1, 2, 3), DIGESTS, self.tokens, self.local_steps, None,
            1 << 20, self.epoch, "run",
        )  # fmt: skip
        return messages.BeginPullReply(replace(grant, **changes))

    def grant(self, **changes: Any) -> messages.BeginPullRequest:
        request = self.answer(messages.BeginPullRequest, self.granted(**changes))
        assert isinstance(request, messages.BeginPullRequest)
        return request

    def pulled(self) -> effects.Install:
        self.grant()
        install = self.pull_ends()
        self.pull_finished()
        return install

    def pull_ends(self) -> effects.Install:
        self.say(effects.Done(self.job(messages.PullGrant)[0], None, self.transfer_s))
        return self.take(effects.Install)

    def beat(self, **changes: Any) -> None:
        incarnation = self.session.shared.terms.incarnation
        assert incarnation is not None
        reply = messages.HeartbeatReply(self.epoch, self.published, self.tokens, self.local_steps, False, "IDLE")
        self.say(effects.Beat(incarnation, replace(reply, **changes)))

    def run_ends(self) -> None:
        """Its last token is counted: no push is taken any more, and the heartbeat says so."""
        self.tokens = TK_MAX
        self.beat(stop=True, no_more_pushes=True)

    def verdict(self, kind: messages.VerdictKind, push: PushId | None = None, **changes: Any) -> messages.Verdict:
        push = push or self.push_id
        if kind is not messages.VerdictKind.ABORTED:
            self.fence += 1
        if kind is messages.VerdictKind.APPLIED:
            assert self.published is not None
            self.published = self.published.next()
        version = None if kind is messages.VerdictKind.ABORTED else self.published
        return messages.Verdict(push, kind, version, **{"reason": f"because {kind.name}", **changes})

    @property
    def push_id(self) -> PushId:
        push = self.session.pushing.open
        assert push is not None, "no push is open"
        return push.id

    def started(self) -> Self:
        self.say(effects.Started())
        return self

    def begin(self) -> None:
        self.say(effects.Started())
        self.join()
        self.pulled()
        assert self.phase is SessionPhase.TRAINING

    def reborn(self, saved: SavedSession | None = None, newest: effects.PushRecord | None = None) -> None:
        """The process is killed; the next one goes on from its checkpoint (or this one), and has sent its Join."""
        before = saved or self.session.saved()
        assert before is not None
        self.session = ClusterMachine(self.session.config)
        self.session.resume(SavedSession.from_json(before.to_json()), newest)
        self.effects.clear()
        self.say(effects.Started())
        assert self.waits, "the settings of the run are not known yet"

    def fenced(self) -> None:
        self.effects.clear()
        incarnation = self.session.shared.terms.incarnation
        assert incarnation is not None
        self.say(effects.Beat(incarnation, Refused(RefusalCode.FENCED, "evicted")))
        assert self.phase is SessionPhase.JOINING
        assert not self.waits, "training goes on while joining again"

    def train(self, steps: int, loss: float = 2.0) -> None:
        for _ in range(steps):
            self.say(effects.Stepped(TOKENS, (), loss))

    def push_begun(self) -> messages.BeginPushRequest:
        """H steps: the push is due and asked for (not answered yet)."""
        self.train(self.local_steps)
        assert self.phase is SessionPhase.BEGINNING_PUSH
        return self.asked(messages.BeginPushRequest)

    def puts_off(self, sentence: str, retry_after_s: float = 0.5) -> None:
        self.judged("begin", messages.Busy(retry_after_s, sentence))

    def ticket(self, attempt: int = 1) -> tuple[int, effects.SendPush]:
        self.answer(messages.BeginPushRequest, messages.BeginPushReply(replace(TICKET, attempt=attempt)))
        return self.job(effects.SendPush)

    def sent(self, sending: tuple[int, effects.SendPush]) -> None:
        self.say(effects.Done(sending[0], DIGESTS, self.transfer_s))

    def admitted(self) -> messages.FinishPushRequest:
        request = self.answer(
            messages.FinishPushRequest, messages.FinishPushReply(messages.Admitted(RoundId(self.epoch, 1), 1.0))
        )
        assert isinstance(request, messages.FinishPushRequest)
        return request

    def awaiting(self) -> None:
        self.push_begun()
        self.sent(self.ticket())
        self.admitted()
        assert self.phase is SessionPhase.AWAITING

    def exchanged(self, kind: messages.VerdictKind = messages.VerdictKind.APPLIED) -> None:
        """H steps, their push, and its verdict."""
        self.awaiting()
        self.decide(kind)

    def whole_round(self) -> None:
        self.exchanged()
        self.pulled()
        assert self.phase is SessionPhase.TRAINING

    def pull_finished(self) -> None:
        self.answer(messages.FinishPullRequest, messages.FinishPullReply(self.local_steps))

    def logged(self, key: str | None = None, level: int | None = None) -> list[str]:
        """What was said of this matter, or at this level."""
        logs = [effect for effect in self.every if isinstance(effect, effects.Log)]
        logs = [log for log in logs if key in (None, log.key) and level in (None, log.level)]
        return [log.sentence for log in logs if log.sentence]

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

    def judged(self, stage: str, answer: Any) -> None:
        """A verdict, or whatever else the master may say to a call of this stage."""
        match stage:
            case "begin":
                self.answer(messages.BeginPushRequest, messages.BeginPushReply(answer))
            case "finish":
                self.answer(messages.FinishPushRequest, messages.FinishPushReply(answer))
            case _:
                self.answer(messages.AwaitVerdictRequest, messages.AwaitVerdictReply(answer))

    def donate(self) -> PushId:
        """The master asks for this cluster's base; the push that answers is open."""
        superseded = (messages.AwaitVerdictRequest, messages.BeginPullRequest)
        self.effects = [
            e for e in self.effects if not (isinstance(e, effects.Run) and isinstance(e.command, superseded))
        ]
        self.beat(donate=self.session.shared.base)
        assert self.phase is SessionPhase.BEGINNING_PUSH
        return self.push_id

    def merged(self, kind: messages.VerdictKind = messages.VerdictKind.APPLIED) -> None:
        self.goes_on("await")
        self.decide(kind)

    def decide(self, kind: messages.VerdictKind, **changes: Any) -> messages.Verdict:
        verdict = self.verdict(kind, **changes)
        self.answer(messages.AwaitVerdictRequest, messages.AwaitVerdictReply(verdict))
        return verdict

    def leaves_at_once(self) -> None:
        """Asked to leave, and asked again by a caller that does not wait for a push."""
        self.say(effects.StopWanted("enough"))
        self.say(effects.StopWanted("enough", push_pending=False))

    def left(self) -> messages.LeaveRequest:
        request = self.answer(messages.LeaveRequest, messages.LeaveReply())
        assert isinstance(request, messages.LeaveRequest)
        return request

    def give_back_answered(self) -> Sequence[messages.DataRange]:
        request = self.answer(messages.ReturnDataRequest, messages.ReturnDataReply())
        assert isinstance(request, messages.ReturnDataRequest)
        self.returned.extend(request.ranges)
        return request.ranges


class LeasedClusterBench(ClusterBench):
    """A cluster that trains on leased data: every step takes TOKENS tokens of its one lease."""

    def __init__(self, config: SessionConfig | None = None) -> None:
        super().__init__(config or session_config(data_plan=LEASED))
        self.used = 0

    def say_lease(self, tokens: int) -> None:
        self.say(effects.LeaseWanted(tokens))

    def begin(self) -> None:
        super().begin()
        self.say_lease(1000)
        self.answer(messages.LeaseDataRequest, messages.LeaseDataReply((messages.DataRange(1, 0, 0, 0, 100_000),)))

    def train(self, steps: int, loss: float = 2.0) -> None:
        for _ in range(steps):
            self.say(effects.Stepped(TOKENS, (self.span(self.used, self.used + TOKENS),), loss))
            self.used += TOKENS

    @staticmethod
    def span(begin: int, end: int) -> messages.DataRange:
        return messages.DataRange(1, 0, 0, begin, end)


def leased(**settings: Any) -> LeasedClusterBench:
    """In training, of a run with these settings."""
    life = LeasedClusterBench()
    life.settings = replace(SETTINGS, **settings)
    life.begin()
    return life


def phase_of(generation: ClusterBench) -> SessionPhase:
    """life.phase, in tests that ask twice: mypy takes an attribute for what it was when it was compared last."""
    return generation.phase
