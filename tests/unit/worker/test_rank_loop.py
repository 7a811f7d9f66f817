"""One rank's loop: what the leader makes of a meeting, and how leases reach all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.manual_clock import ManualClock

from dips.core.messages import DataRange, Settings
from dips.worker.commands import Ask, GoOn, Order, Ranges, ShareOut, to_bytes
from dips.worker.parallel.meetings import RankReport
from dips.worker.parallel.rank_loop import RankLoop
from dips.worker.parallel.rank_part import ALIVE_S, LeadingPart
from dips.worker.state.effects import Event, StopWanted

FIRST, SECOND, THIRD = (DataRange(number, 0, number, 0, 8) for number in (1, 2, 3))


class Shell:
    done, released, version, progress, steps_to_push, steps_per_s, exit_reason = False, False, None, 16, 1, 1.0, ""
    local_steps, total_tokens, times_forgotten, resumed = 4, 100, 0, False
    settings = Settings(chunk_bytes=4096)
    held_ranges: tuple[DataRange, ...] = ()

    def __init__(self) -> None:
        self.reported: list[tuple[int, tuple[DataRange, ...], int]] = []

    def step(self, tokens: int, ranges: Sequence[DataRange], loss: float, *, steps: int) -> None:
        self.reported.append((tokens, tuple(ranges), steps))

    def lease(self, tokens: int) -> list[DataRange]:
        return [FIRST, SECOND]

    def __enter__(self) -> None:
        """Join the run."""


class Stopped(Shell):
    """It gets a SIGTERM while it waits in a step."""

    def step(self, tokens: int, ranges: Sequence[DataRange], loss: float, *, steps: int) -> None:
        self.done, self.exit_reason = True, "SIGTERM"


class Others:
    """The ranks, the leader's part and its messages, of a cluster whose other rank made the same step. orders: of the
    leader, to a follower.
    """

    def __init__(self, *orders: Order) -> None:
        self.said: list[Order] = []
        self._orders = list(orders)

    def report(self, numbers: list[float] | None = None) -> Any:
        return RankReport() if numbers is None else [numbers, numbers]

    def hear(self, patience: timedelta) -> bytes:
        return to_bytes(self._orders.pop(0))

    def heard(self, reports: object) -> None: ...

    def forget_found(self) -> None: ...

    def do(self, command: ShareOut) -> None:
        self.said.append(command)

    def say(self, order: Order) -> None:
        self.said.append(order)


def leader(shell: Shell, others: Others) -> RankLoop:
    both = cast(Any, others)
    return RankLoop(both, both, (0, 1), cast(Any, shell), both, loss=lambda is_due: math.nan)


def follower(others: Others) -> RankLoop:
    return RankLoop(cast(Any, others), cast(Any, others), (0, 1), None, None, loss=lambda is_due: math.nan)


def lease(loop: RankLoop) -> list[DataRange]:
    return loop.lease(16)


def test_a_sigterm_that_comes_while_the_leader_waits_in_a_meeting_ends_all_ranks() -> None:
    others = Others()
    loop = leader(Stopped(), others)
    loop.step(8)
    (news,) = others.said
    assert isinstance(news, GoOn)
    assert news.done
    assert news.ends, "every rank ends as after a SIGTERM of its own"
    assert loop.news == news


def test_ranks_that_resume_share_the_model_by_the_masters_chunks_while_the_checkpoint_can_be_read() -> None:
    """Also where nothing is pulled, and the first command would be that of the first push."""
    for resumed in (False, True):
        shell, others = Shell(), Others()
        shell.resumed = resumed
        leader(shell, others).start()
        assert others.said[:-1] == [ShareOut(4096)] * resumed
        assert isinstance(others.said[-1], GoOn)


def test_a_lease_reaches_all_ranks() -> None:
    others = Others()
    loop = leader(Shell(), others)
    assert lease(loop) == [FIRST, SECOND]
    given, news = others.said
    assert given == Ranges((FIRST, SECOND), are_all=False)
    assert lease(follower(Others(given, news))) == [FIRST, SECOND]
    assert lease(loop) == [FIRST, SECOND], "the same ranges are not given twice"


def test_the_session_knows_of_all_steps_before_it_leases_more() -> None:
    shell = Shell()
    shell.steps_to_push, shell.steps_per_s = 9, 9.0
    loop = leader(shell, Others())
    assert lease(loop)
    for part in (FIRST, SECOND):
        loop.step(4, [part])
    assert shell.reported == [], "no meeting was due"
    assert lease(loop)
    assert shell.reported == [(16, (FIRST, SECOND), 2)], "the tokens of both ranks, and the ranges once"


def test_tokens_of_a_step_without_gradients_do_not_count() -> None:
    shell = Shell()
    shell.steps_to_push, shell.steps_per_s = 9, 9.0
    loop = leader(shell, Others())
    assert lease(loop)
    for tokens in (4, 3):
        loop.step(tokens, is_empty=tokens == 3)
    assert lease(loop)
    assert shell.reported == [(8, (), 1)]


def test_all_ranks_learn_that_the_master_took_ranges_back() -> None:
    shell, others = Shell(), Others()
    loop = leader(shell, others)

    def forget(tokens: int) -> list[DataRange]:
        shell.times_forgotten, shell.held_ranges = 1, (THIRD,)
        return [THIRD]

    shell.lease = forget  # type: ignore[method-assign]
    assert lease(loop) == [THIRD]
    orders: list[Order] = others.said
    assert orders[1] == Ranges((THIRD,), are_all=True)
    other = follower(Others(*orders))
    assert lease(other) == [THIRD]
    for rank in (loop, other):
        assert rank.news.times_forgotten == 1
        assert rank.held_ranges == (THIRD,)


def test_nothing_is_leased_after_the_end() -> None:
    others = Others()
    loop = leader(Shell(), others)
    loop.news = GoOn(done=True)
    assert lease(loop) == []
    assert others.said == [], "no rank listens any longer"


def test_a_sigterm_of_any_rank_that_is_heard_while_the_leader_waits_stops_the_session_once() -> None:
    """Also one that no meeting follows: the leader asks the others as long as it waits."""
    clock, stopped, said = ManualClock(), list[Event](), list[bytes]()
    reports = [RankReport(), RankReport()]
    ranks: Any = SimpleNamespace(say=said.append, report=lambda mine: [each.numbers() for each in reports], n_ranks=2)
    part: Any = SimpleNamespace(report=lambda: reports[0], record=lambda tape, links: None)
    leading = LeadingPart(ranks, part, clock)
    leading.begin(stopped.append, cast(Any, None), None)
    leading.look()
    assert stopped == []
    reports[1] = RankReport(wants_to_leave=True)
    for _ in range(3):
        clock.advance(ALIVE_S)
        leading.look()
    assert stopped == [StopWanted("SIGTERM")]
    assert said == [to_bytes(Ask())] * 4


def test_a_stop_that_a_ranks_program_asks_for_is_the_leaders_to_make() -> None:
    asked: list[str] = []
    shell: Any = Shell()
    shell.request_stop = asked.append
    follower(Others()).request_stop("of another rank")
    leader(shell, Others()).request_stop("enough")
    assert asked == ["enough"]
    shell.tape, shell.cause = "its tape", "a/1.1#2"
    told = [(each.tape, each.cause) for each in (leader(shell, Others()), follower(Others()))]
    assert told == [("its tape", "a/1.1#2"), (None, "")], "which writes the records alone"


@pytest.mark.parametrize(("done", "pushes"), [(False, False), (True, False), (True, True)])
def test_a_rank_that_leaves_without_the_others_or_after_the_end_tells_them_nothing(done: bool, pushes: bool) -> None:
    closed: list[object] = []
    shell: Any = Shell()
    shell.close = lambda reason, *, push_pending: closed.append((reason, push_pending))
    others: Any = Others()
    others.close = lambda: closed.append("connections")
    loop = leader(shell, others)
    loop.news = GoOn(done=done)
    loop.step(8)
    del others.said[:]
    loop.close("no", push_pending=pushes)
    assert (others.said, others.alone) == ([], True)
    assert closed == [("no", False), "connections", "connections"], "of the part, and of the ranks"


class Keeper(Shell):
    """It takes checkpoints, of all steps that it knows."""

    def __init__(self, *, ends: bool = False) -> None:
        super().__init__()
        self.ends, self.kept = ends, list[tuple[str, int]]()

    def step(self, tokens: int, ranges: Sequence[DataRange], loss: float, *, steps: int) -> None:
        super().step(tokens, ranges, loss, steps=steps)
        self.done = self.ends

    def checkpoint_now(self, label: str) -> bool:
        self.kept.append((label, len(self.reported)))
        return True

    def checkpoint_if_due(self) -> None:
        self.checkpoint_now("due")


def test_a_checkpoint_is_of_all_steps_and_on_all_ranks() -> None:
    for steps in (0, 1):
        shell, others = Keeper(), Others()
        shell.steps_to_push = 9
        loop, follows = leader(shell, others), follower(Others(*[GoOn(next_meeting_steps=9)] * 2))
        for each in (loop, follows):
            each.news = GoOn(next_meeting_steps=9)
            for _ in range(steps):
                each.step(8, [FIRST])
            assert each.progress == steps * 8
        assert loop.checkpoint_now("mine")
        assert shell.kept == [("mine", steps)], "the session knows of all steps"
        assert len(others.said) == 1 + steps, "the ranks meet for the steps, and once more"
        assert not follows.checkpoint_now("mine")


def test_nothing_is_kept_after_the_end() -> None:
    for ends in (False, True):
        shell, others = Keeper(ends=ends), Others()
        loop = leader(shell, others)
        if ends:
            loop.news = GoOn(next_meeting_steps=9)
            loop.step(8)
        else:
            loop.news = GoOn(done=True, checkpoint_is_due=True)
        assert not loop.checkpoint_now("mine")
        loop.checkpoint_if_due()
        assert shell.kept == []
        assert len(others.said) == ends
