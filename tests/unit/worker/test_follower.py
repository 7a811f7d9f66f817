"""A follower of a run: every version if it can, or the newest alone, the last one always, and an end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.manual_clock import ManualClock

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter, PublishedModel
from dips.core.messages import Settings, StatusReply
from dips.core.net.security import INSECURE
from dips.worker import reader
from dips.worker.reader import Follower

LAYOUT = Layout((Parameter("w", (2,), "float32", "w"),))


def v(number: int, timeline: int = 1) -> Version:
    return Version(timeline, number)


def published(version: Version) -> PublishedModel:
    return PublishedModel("run", version, 100 * version.v, LAYOUT, np.zeros(2, np.float32))


def status(published: Version | None, stopped: bool = False) -> StatusReply:
    return StatusReply("run", 1, published, 0, 0, "IDLE", None, 0.0, 0.0, "", stopped=stopped)


class Run:
    def __init__(self, *script: StatusReply | RetryLater | Refused, kept: int = 2) -> None:
        self.script = list(script)
        self.kept = kept
        self.newest: Version | None = None
        self.asked: list[Version | None] = []

    def status(self) -> StatusReply:
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(entry, Exception):
            raise entry
        self.newest = entry.published
        return entry

    def fetch(self, version: Version | None) -> PublishedModel:
        assert self.newest is not None
        self.asked.append(version)
        if version is None:
            return published(self.newest)
        if version.timeline != self.newest.timeline or version.v <= self.newest.v - self.kept:
            raise Refused(RefusalCode.VERSION_GONE, f"version {version} is gone")
        return published(version)


class Waits:
    def __init__(self, clock: ManualClock, limit: int) -> None:
        self.clock = clock
        self.calls = 0
        self.limit = limit

    def __call__(self, seconds: float) -> bool:
        self.calls += 1
        self.clock.advance(seconds)
        return self.calls > self.limit


@dataclass
class Follow:
    """A follower that has ended: what it used, and how often it waited."""

    used: list[Version]
    waits: Waits


def follow(
    run: Run, limit: int = 400, fetch: Callable[[Version | None], PublishedModel] | None = None, steps: int = 0,
    step_s: float = 1.0, **given: Any,
) -> Follow:  # fmt: skip
    """steps: of each use, between which it asks now and then."""
    clock = ManualClock()

    def use(fetched: PublishedModel, now_and_then: Callable[[], None]) -> None:
        for _ in range(steps):
            now_and_then()
            clock.advance(step_s)
        done.used.append(fetched.version)

    done = Follow([], Waits(clock, limit))
    Follower(run.status, fetch or run.fetch, use, patience_s=20.0, clock=clock, **given).run(done.waits)
    return done


AWAY = RetryLater("no process answers", 1.0)


@pytest.mark.parametrize(
    ("script", "kept", "seen", "asked"),
    [
        ([status(None), status(v(0)), status(v(1)), status(v(1)), status(v(2), True)], 2, [v(0), v(1), v(2)], None),
        ([status(v(0)), status(v(3)), status(v(3)), status(v(3), True)], 5, [v(0), v(1), v(2), v(3)], None),
        # The servers of a run that has ended soon go: the last one is next, and it is the end.
        ([status(v(0)), status(v(9), True), AWAY], 5, [v(0), v(9)], None),
        # Versions that are gone are left out, the last one never.
        ([status(v(0)), status(v(7)), status(v(8), True)], 2, [v(0), v(7), v(8)], [v(0), v(1), None, v(8)]),
        ([status(v(0)), status(v(5), True)], 2, [v(0), v(5)], None),
        ([status(None, True)], 2, [], []),
        ([status(v(5)), status(v(4, 2)), status(v(5, 2), True)], 2, [v(5), v(4, 2), v(5, 2)], None),  # a rollback
        # In its run a master that goes away is waited for without limit.
        ([status(v(0)), *[AWAY] * 100, status(v(1)), status(v(2), True)], 2, [v(0), v(1), v(2)], None),
    ],
)
def test_every_version_is_used_as_far_as_it_is_kept_and_the_last_one_always(
    script: list[StatusReply | RetryLater], kept: int, seen: list[Version], asked: list[Version | None] | None
) -> None:
    run = Run(*script, kept=kept)
    done = follow(run)
    assert done.used == seen
    assert done.waits.calls < done.waits.limit
    assert asked is None or run.asked == asked


@pytest.mark.parametrize("before", [[], [replace(status(v(0)), stopping=True)]], ids=["never answered", "stopping"])
def test_a_master_that_never_answers_or_may_have_ended_is_an_error(before: list[StatusReply]) -> None:
    run = Run(*before, RetryLater("no process answers", 1.0))
    with pytest.raises(RetryLater, match=r"could not be read for \d+ s: no process answers"):
        follow(run)


def test_a_use_gives_way_to_the_last_version_of_a_run_that_ends_meanwhile() -> None:
    run = Run(status(v(0)), status(v(1)), status(v(2)), AWAY, status(v(3)), status(v(4), True), AWAY, kept=9)
    assert follow(run, steps=12).used == [v(4)]
    assert run.asked == [v(0), v(4)]


@pytest.mark.parametrize(("answers", "asked"), [(status(v(0)), 4), (AWAY, 2)], ids=["a poll apart", "master away"])
def test_during_a_use_the_master_is_asked_now_and_then(answers: StatusReply | RetryLater, asked: int) -> None:
    """Of 21 steps in 2.1 s."""
    run = Run(status(v(0)), *[answers] * 99)
    follow(run, limit=1, steps=21, step_s=0.1)
    assert 100 - len(run.script) == asked


def test_a_run_that_ends_with_the_version_in_use_does_not_use_it_twice() -> None:
    assert follow(Run(status(v(0)), status(v(0), True), AWAY), steps=3).used == [v(0)]


def test_the_newest_alone_is_used_from_what_was_there_before_and_a_rollback_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An evaluator wants every version; a folder that serves a model the newest one."""
    run = Run(status(v(4)), status(v(7)), status(v(6, 2)), status(v(7, 2), True), kept=9)
    assert follow(run, last=v(4), newest_only=True).used == [v(7), v(6, 2), v(7, 2)]
    assert run.asked == [None] * 3
    assert [r.message for r in caplog.records] == ["the run was rolled back: version 2:6 comes after 1:7"]


@pytest.mark.parametrize(("last", "seen"), [(None, [v(1)]), (v(0), [v(1)]), (v(1), [])])
def test_once_is_one_version_however_fast_they_come(last: Version | None, seen: list[Version]) -> None:
    run = Run(*[status(v(n)) for n in range(1, 50)], kept=9)
    assert follow(run, last=last, newest_only=True, once=True).used == seen


def test_a_fetch_that_fails_for_now_is_tried_again() -> None:
    run = Run(status(v(0)), status(v(0)), status(v(0), stopped=True))
    fails = iter([True, True])

    def fetch(version: Version | None) -> PublishedModel:
        if next(fails, False):
            raise RetryLater("a slave restarts", 0.5)
        return run.fetch(version)

    assert follow(run, fetch=fetch).used == [v(0)]


def test_a_refusal_ends_it() -> None:
    with pytest.raises(Refused, match="another run"):
        follow(Run(Refused(RefusalCode.RUN_ID, "this is another run")))


def test_a_signal_ends_it_between_two_versions() -> None:
    assert follow(Run(*[status(v(n)) for n in range(50)]), limit=3).used == [v(0), v(1), v(2)]


def test_waiting_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    away = RetryLater("no process answers", 1.0)
    with caplog.at_level("WARNING", "dips.worker.reader"):
        follow(Run(status(v(0)), away, away, away, status(v(0), stopped=True)))
    assert [r.message for r in caplog.records] == ["waiting for the run: no process answers"]


@pytest.mark.parametrize(
    ("pull_wire", "held", "bases"),
    [
        ("int8", None, [None, v(0), v(1)]),
        ("int8", v(0), [v(0), v(1)]),
        ("float32", None, [None, None, None]),  # whole ones: what is held only takes memory
    ],
)
def test_each_version_is_fetched_over_the_one_before_where_the_run_publishes_differences(
    monkeypatch: pytest.MonkeyPatch, pull_wire: str, held: Version | None, bases: list[Version | None]
) -> None:
    run, fetched_over, used = Run(status(v(0)), status(v(1)), status(v(2), True)), [], []

    class Watch(contextlib.nullcontext["Watch"]):
        def __init__(self, *given: object) -> None:
            super().__init__(self)
            assert (str(given[0]), *given[1:]) == ("m:1", "run", reader.CALL_DEADLINE_S, INSECURE)

        def status(self) -> StatusReply:
            return replace(run.status(), settings=Settings(pull_wire=pull_wire))

    def fetch(*given: object, version: Version | None, base: PublishedModel | None, **_: object) -> PublishedModel:
        assert (str(given[0]), *given[1:]) == ("m:1", "run", "me", INSECURE)
        fetched_over.append(None if base is None else base.version)
        return run.fetch(version)

    monkeypatch.setattr(reader, "RunWatch", Watch)
    monkeypatch.setattr(reader, "fetch_version", fetch)
    reader.follow_run(
        "m:1", "run", "me", INSECURE, lambda fetched, again: used.append(fetched.version), lambda seconds: False,
        patience_s=20.0, held=None if held is None else published(held),
    )  # fmt: skip
    assert fetched_over == bases
    assert used == ([v(0)] if held is None else []) + [v(1), v(2)]
