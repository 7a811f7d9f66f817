"""A cluster for random walks: it follows the protocol one call at a time, or dies, or comes back as another process.

Its calls are sent by the walk, whose answers come back whenever they come; an answer to an earlier life is not heard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from support.master_bench import HELLO, LAYOUT

from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, PushId, Version
from dips.core.messages import (
    AwaitVerdictRequest,
    BeginPullRequest,
    BeginPushRequest,
    Caller,
    DataPlan,
    DataRange,
    FinishPullRequest,
    FinishPushRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseDataRequest,
    LeaveRequest,
    PullGrant,
    Refusal,
    ReturnDataRequest,
    Stale,
    Ticket,
    Verdict,
    VerdictKind,
)

Send = Callable[["WalkCluster", Any], None]


class Wire(Protocol):
    """Where the bytes of pushes go."""

    def copied(self, push: PushId, version: Version) -> None:
        """The push is a copy of the version."""

    def digests(self, push: PushId) -> tuple[tuple[str, bytes], ...]:
        """Of what each slave gets."""


LOST = (RefusalCode.FENCED, RefusalCode.STALE_EPOCH)


@dataclass(frozen=True)
class Open:
    """The push that is open here. attempt 0: no ticket yet."""

    id: PushId
    base: Version | None
    fence: int
    ranges: tuple[DataRange, ...]
    attempt: int = 0
    admitted: bool = False
    donates: Version | None = None


class WalkCluster:
    """send: hands a request to the master, now or later. wire: knows what its pushes are made of."""

    def __init__(self, name: str, run_id: str, plan: DataPlan, send: Send, wire: Wire) -> None:
        self.name, self.run_id, self.plan, self._send, self._wire = name, run_id, plan, send, wire
        self.life = 0
        self.leases_asked = 0
        self.forget()

    def forget(self) -> None:
        """A new process: nothing is known."""
        self.life += 1
        self.incarnation: Incarnation | None = None
        self.epoch = 0
        self.alive, self.joined, self.must_seed = True, False, False
        self.base: Version | None = None
        self.fence, self.seq = 0, 0
        self.pending: tuple[DataRange, ...] = ()
        self.push: Open | None = None
        self.awaited: PushId | None = None
        self.must_pull = True
        self.pin: int | None = None

    def caller(self) -> Caller:
        return Caller(self.run_id, self.epoch, self.name, self.incarnation, f"c-{self.name}")

    # ---- what it does ----

    def ask_join(self) -> None:
        held = self.pending + (self.push.ranges if self.push else ())
        caller = Caller(self.run_id, 0, self.name, self.incarnation, f"join-{self.name}")
        request = JoinRequest(caller, HELLO, LAYOUT, LAYOUT.layout_hash, self.plan, 0.0, held)
        self._send(self, request)

    def beat(self) -> None:
        self._send(self, HeartbeatRequest(self.caller(), steps=3, steps_per_s=50.0, base=self.base))

    def work(self) -> None:
        """The next call that the protocol asks for."""
        if not self.joined:
            self.ask_join()
        elif self.awaited is not None:
            self._send(self, AwaitVerdictRequest(self.caller(), self.awaited, 5.0))
        elif self.push is not None:
            self._go_on(self.push)
        elif self.pin is not None:
            self._send(self, FinishPullRequest(self.caller(), self.pin))
            self.pin, self.must_pull = None, False
        elif self.must_seed:
            self._begin(None, 0, ())
        elif self.must_pull or self.base is None:
            self._send(self, BeginPullRequest(self.caller()))
        elif not self.pending:
            self.leases_asked += 1
            self._send(self, LeaseDataRequest(self.caller(), 10, self.leases_asked))
        else:
            self._begin(self.base, self.fence, self.pending)

    def give_back(self) -> None:
        if self.joined and self.pending and self.push is None:
            self._send(self, ReturnDataRequest(self.caller(), self.pending[:1]))
            self.pending = self.pending[1:]

    def leave(self) -> None:
        if self.joined:
            self._send(self, LeaveRequest(self.caller(), "done"))
            self.forget()

    def _begin(self, base: Version | None, fence: int, ranges: tuple[DataRange, ...]) -> None:
        assert self.incarnation is not None
        self.seq += 1
        self.pending = ()
        push_id = PushId(self.name, self.incarnation, self.seq)  # type: ignore[arg-type]
        self.push = Open(push_id, base, fence, ranges)
        self._go_on(self.push)

    def _go_on(self, push: Open) -> None:
        if push.admitted:
            self._send(self, AwaitVerdictRequest(self.caller(), push.id, 5.0))
        elif not push.attempt:
            tokens = sum(item.tokens for item in push.ranges)
            request = BeginPushRequest(self.caller(), push.id.seq, push.base, push.fence, push.ranges, tokens, 3)
            request = replace(request, donates=push.donates)
            self._send(self, request)
        else:
            self._send(self, FinishPushRequest(self.caller(), push.id.seq, push.attempt, self._wire.digests(push.id)))

    def donate(self, version: Version) -> None:
        """The slaves lost this version, and it is the one that this cluster stands on."""
        if not self.joined or self.push is not None or self.awaited is not None or version != self.base:
            return
        assert self.incarnation is not None
        self.seq += 1
        push_id = PushId(self.name, self.incarnation, self.seq)  # type: ignore[arg-type]
        self._wire.copied(push_id, version)
        self.push = Open(push_id, None, 0, (), donates=version)
        self._go_on(self.push)

    def again(self) -> None:
        """A new attempt of the open push."""
        if self.push is not None and not self.push.admitted:
            self.push = replace(self.push, attempt=0)

    # ---- what it hears ----

    def hear(self, answer: Any) -> None:
        match answer:
            case JoinReply():
                self._joined(answer)
            case Refusal(code) if code in LOST:
                self.joined = False
            case Refusal(code):
                self._refused(code)
            case Verdict():
                self._decided(answer)
            case PushId():
                self._another(answer)
            case PullGrant():
                if self.base is not None and self.base.timeline != answer.version.timeline:
                    self.pending = ()
                self.base, self.fence, self.pin = answer.version, answer.fence, answer.pin_id
                self.must_seed = False
            case Ticket(attempt) if self.push is not None:
                self.push = replace(self.push, attempt=attempt)
            case Stale():
                self._drop()
            case HeartbeatReply(stop=True):
                self.leave()
            case HeartbeatReply(donate=Version() as version):
                self.donate(version)
            case _ if type(answer).__name__ == "Admitted" and self.push is not None:
                self.push = replace(self.push, admitted=True)
            case _ if type(answer).__name__ == "LeaseDataReply":
                self.pending += answer.ranges

    def _joined(self, reply: JoinReply) -> None:
        self.joined, self.incarnation, self.epoch = True, reply.incarnation, reply.epoch
        self.must_seed, self.awaited = reply.seed, None
        self.leases_asked = 0
        last, push = reply.last_push, self.push
        self.seq = 0
        if isinstance(last, PushId):
            self.awaited = last
        elif last is not None and push is not None and last.push == push.id:
            self._decided(last)
        else:
            self._keep()
        if self.base is None or reply.fence != self.fence:
            self.pending, self.must_pull = (), True

    def _keep(self) -> None:
        """What was pushed is pending again."""
        if self.push is not None:
            self.pending = self.push.ranges + self.pending
        self.push = None

    def _decided(self, verdict: Verdict) -> None:
        ours = self.push is not None and self.push.id == verdict.push
        if not ours and self.awaited != verdict.push:
            return
        self.awaited = None
        if ours and self.push is not None and self.push.donates is not None:
            self.push = None
            return
        if verdict.kind is VerdictKind.ABORTED:
            self._keep()
            return
        self.push, self.must_pull, self.must_seed = None, True, False

    def _another(self, push_id: PushId) -> None:
        if self.push is not None and push_id == self.push.id:
            self.push = replace(self.push, admitted=True)
        else:
            self._keep()
            self.awaited = push_id

    def _refused(self, code: RefusalCode) -> None:
        if code is RefusalCode.STOPPING:
            self.leave()
        elif code is RefusalCode.UNKNOWN_PUSH:
            self.again()
        elif code is RefusalCode.VERSION_GONE and self.push is not None and self.push.donates is not None:
            self.push = None
        elif code is RefusalCode.SEQ:
            self._keep()
        elif code in (RefusalCode.RANGES, RefusalCode.SEED_EXISTS, RefusalCode.DIGEST):
            self._drop()

    def _drop(self) -> None:
        self.push, self.pending, self.must_pull, self.must_seed = None, (), True, False
