"""Ranges and tokens: nothing is lost, nothing is counted twice (I12), however events fall."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_bench import LEASED, TICKET, TOKENS, ClusterBench, session_config

from dips.core import messages
from dips.core.errors import LocalProtocolError, RefusalCode
from dips.core.ids import Version
from dips.worker.state.effects import Done, Failed, LeaseWanted, Run, SendPush, Started, Stepped
from dips.worker.state.work import Work, WorkBook, joined


def piece(begin: int, end: int, lease: int = 1) -> messages.DataRange:
    return messages.DataRange(lease, 0, lease, begin, end)


def tokens_of(ranges: Iterable[messages.DataRange]) -> list[tuple[int, int]]:
    """Every single token, as (lease, position)."""
    return sorted((r.lease_id, at) for r in ranges for at in range(r.begin_tokens, r.end_tokens))


def test_steps_split_what_is_held_and_neighbours_join() -> None:
    book = WorkBook()
    book.leased([piece(0, 100)])
    book.stepped(10, [piece(40, 50)], 3.0)
    book.stepped(10, [piece(50, 60)], float("nan"))
    assert book.held == (piece(0, 40), piece(60, 100))
    assert book.pending == Work((piece(40, 60),), 20, 2, 3.0, 1)
    assert book.pending.mean_loss == 3.0


def test_a_range_cannot_be_trained_twice() -> None:
    book = WorkBook()
    book.leased([piece(0, 10)])
    book.stepped(5, [piece(0, 5)], 1.0)
    with pytest.raises(LocalProtocolError, match="counted before"):
        book.stepped(5, [piece(4, 9)], 1.0)
    assert book.held == (piece(5, 10),)
    assert book.tokens == 5


def test_freeze_thaw_decide_and_drop() -> None:
    book = WorkBook()
    book.leased([piece(0, 30)])
    book.stepped(10, [piece(0, 10)], 1.0)
    assert book.freeze().tokens == 10
    with pytest.raises(LocalProtocolError, match="open already"):
        book.freeze()
    book.stepped(10, [piece(10, 20)], 2.0)
    assert book.tokens == 20
    book.thaw()
    assert book.pending == Work((piece(0, 20),), 20, 2, 3.0, 2)
    book.freeze()
    book.stepped(10, [piece(20, 30)], 2.0)
    assert book.drop() == (piece(0, 30),)
    assert book.tokens == 0
    assert book.all_ranges() == ()


def test_work_without_losses_has_no_mean() -> None:
    assert Work().mean_loss != Work().mean_loss


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(1, 5)), max_size=12))
def test_joined_keeps_every_token(items: list[tuple[int, int, int]]) -> None:
    ranges = [piece(begin, begin + n, lease) for lease, begin, n in items]
    once = [r for i, r in enumerate(ranges) if not set(tokens_of([r])) & set(tokens_of(ranges[:i]))]
    result = joined(once)
    assert tokens_of(result) == tokens_of(once)
    assert len(result) <= len(once)


class RandomLife(ClusterBench):
    """A leased cluster whose every token's fate is followed: lent, and then exactly one of the places below."""

    def __init__(self) -> None:
        super().__init__(session_config(data_plan=LEASED))
        self.lent: list[messages.DataRange] = []
        self.unused: list[messages.DataRange] = []
        self.settled: list[messages.DataRange] = []
        self.said_push: tuple[messages.DataRange, ...] = ()

    def lease(self) -> None:
        self.say(LeaseWanted(5 * TOKENS))
        if self.asks(messages.LeaseDataRequest):
            lease = len(self.lent) + 1
            new = messages.DataRange(lease, 0, lease, 0, 5 * TOKENS)
            self.answer(messages.LeaseDataRequest, messages.LeaseDataReply((new,)))
            self.lent.append(new)
            self.unused += self.session.take_leased()

    def step(self) -> None:
        if not self.unused or self.waits:
            return
        first = self.unused.pop(0)
        used = messages.DataRange(first.lease_id, 0, first.chunk, first.begin_tokens, first.begin_tokens + TOKENS)
        if used.end_tokens < first.end_tokens:
            self.unused.insert(0, messages.DataRange(first.lease_id, 0, first.chunk, used.end_tokens, first.end_tokens))
        self.say(Stepped(TOKENS, (used,), 1.0))

    def act(self, what: int) -> None:
        kinds = [
            messages.VerdictKind.APPLIED,
            messages.VerdictKind.EXCLUDED,
            messages.VerdictKind.ABORTED,
            messages.VerdictKind.ROLLED_BACK,
        ]
        self.note_push()
        match what % 12:
            case 0 | 1 | 2:
                self.step()
            case 3:
                self.lease()
            case 4 | 5:
                self.progress(kinds[what // 12 % 4])
            case 6:
                self.restart(what // 12)
            case 7:
                self.stale(list(messages.StaleKind)[what // 12 % 3])
            case 8:
                self.fail_something(what // 12)
            case 9:
                self.pass_s(0.5 + what // 12)
            case 10 if self.session.shared.base is not None and not self.asks(messages.JoinRequest):
                self.beat(local_steps=1 + what // 12 % 6)
            case 11 if self.asks(messages.PullGrant):
                self.say(Failed(self.job(messages.PullGrant)[0], "lost"))
            case _:
                pass
        self.collect_returns()
        self.check()

    def note_push(self) -> None:
        push = self.session.pushing.open
        self.said_push = push.work.ranges if push else ()

    def progress(self, kind: messages.VerdictKind) -> None:
        """The exchange goes one step on, in the best case."""
        if self.asks(messages.JoinRequest):
            self.join()
        elif self.asks(messages.BeginPushRequest):
            self.answer(messages.BeginPushRequest, messages.BeginPushReply(TICKET))
        elif self.asks(SendPush):
            self.sent(self.job(SendPush))
        elif self.asks(messages.FinishPushRequest):
            self.admitted()
        elif self.asks(messages.AwaitVerdictRequest):
            ranges = self.said_push
            self.answer(messages.AwaitVerdictRequest, messages.AwaitVerdictReply(self.verdict(kind)))
            if kind in (messages.VerdictKind.APPLIED, messages.VerdictKind.EXCLUDED):
                self.settled += ranges
        elif self.asks(messages.BeginPullRequest):
            self.grant()
        elif self.asks(messages.PullGrant):
            self.say(Done(self.job(messages.PullGrant)[0], None, 0.1))
            if self.asks(messages.FinishPullRequest):
                self.answer(messages.FinishPullRequest, messages.FinishPullReply(self.local_steps))

    def restart(self, what: int) -> None:
        """The master restarts; the open push turns out APPLIED, EXCLUDED, undecided, or unknown."""
        if self.asks(messages.JoinRequest) or self.session.shared.terms.incarnation is None:
            return
        self.epoch += 1
        if what % 5 == 4:
            self.published = Version(self.epoch, 0)
        self.returned += self.on_the_way()  # Join frees what it does not name
        self.beat(epoch=self.epoch)
        self.effects = [
            e for e in self.effects if not (isinstance(e, Run) and isinstance(e.command, SendPush | messages.PullGrant))
        ]
        self.effects = [e for e in self.effects if not self.is_given_up(e)]
        if not self.asks(messages.JoinRequest):
            return
        push, ranges = self.session.pushing.open, self.said_push
        if push is None or what % 5 in (3, 4):
            self.join(self.session.pushing.last_verdict)
        elif what % 5 == 2:
            self.join(push.id)
        else:
            kind = (messages.VerdictKind.APPLIED, messages.VerdictKind.EXCLUDED)[what % 5]
            self.join(self.verdict(kind))
            self.settled += ranges

    def is_given_up(self, effect: object) -> bool:
        push = self.session.pushing.open
        awaited = (push.job if push else None, self.session.pulling.job)
        if not isinstance(effect, Run) or effect.job in awaited:
            return False
        return self.session.shared.lane_of(effect.job) is None

    def stale(self, kind: messages.StaleKind) -> None:
        if self.asks(messages.BeginPushRequest) and self.session.pushing.open is not None:
            self.answer(messages.BeginPushRequest, messages.BeginPushReply(messages.Stale(kind, "stale")))

    def fail_something(self, what: int) -> None:
        if self.asks(SendPush) and what % 2:
            self.say(Failed(self.job(SendPush)[0], "lost"))
            return
        for kind in (
            messages.BeginPushRequest,
            messages.FinishPushRequest,
            messages.AwaitVerdictRequest,
            messages.BeginPullRequest,
            messages.JoinRequest,
        ):
            if self.asks(kind):
                if what % 3 == 0 and kind is messages.FinishPushRequest:
                    self.refuse(kind, RefusalCode.UNKNOWN_PUSH)
                else:
                    self.fail(kind)
                return

    def collect_returns(self) -> None:
        while self.asks(messages.ReturnDataRequest):
            request = self.answer(messages.ReturnDataRequest, messages.ReturnDataReply())
            self.returned += request.ranges
        self.effects = [e for e in self.effects if not self.is_given_up(e)]

    def check(self) -> None:
        work = self.session.shared.work
        in_push = work.in_push.ranges if work.in_push else ()
        on_the_way = self.on_the_way()
        places = [work.held, work.pending.ranges, in_push, self.settled, self.returned, on_the_way]
        everywhere = sorted(token for place in places for token in tokens_of(place))
        assert everywhere == tokens_of(self.lent), "every token is in exactly one place"
        assert work.pending.tokens == sum(r.tokens for r in work.pending.ranges)
        assert tokens_of(self.unused) == tokens_of(work.held)

    def on_the_way(self) -> list[messages.DataRange]:
        """Ranges in a ReturnData that waits behind another small call."""
        waiting = [build() for build in self.session.shared._side_queue]
        return [r for request in waiting if isinstance(request, messages.ReturnDataRequest) for r in request.ranges]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 59), min_size=20, max_size=120))
def test_no_order_of_events_loses_a_range(script: list[int]) -> None:
    life = RandomLife()
    life.say(Started())
    life.join()
    life.grant()
    life.say(Done(life.job(messages.PullGrant)[0], None, 0.1))
    for what in script:
        life.act(what)
