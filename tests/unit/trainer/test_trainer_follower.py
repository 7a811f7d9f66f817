"""The held-out evaluator: every version if it can, the last one always, and an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.manual_clock import ManualClock

from dips.core.errors import RefusalCode, Refused, RetryLater
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter, PublishedModel
from dips.core.messages import StatusReply
from dips.core.observe.tape import Tape, read_tape
from dips.trainer.evaluate import Follower

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
    def __init__(self, clock: ManualClock, limit: int = 200) -> None:
        self.clock = clock
        self.calls = 0
        self.limit = limit

    def __call__(self, seconds: float) -> bool:
        self.calls += 1
        self.clock.advance(seconds)
        return self.calls > self.limit


def follow(
    run: Run, tape: Path, limit: int = 200, fetch: Callable[[Version | None], PublishedModel] | None = None,
    batches: int = 0, batch_s: float = 1.0,
) -> Waits:  # fmt: skip
    """batches: of each evaluation."""
    clock = ManualClock()

    def evaluate(fetched: PublishedModel, each_batch: Callable[[], None]) -> float:
        for _ in range(batches):
            each_batch()
            clock.advance(batch_s)
        return 10.0 - fetched.version.v

    waits = Waits(clock, limit)
    with Tape(tape, "worker", "heldout", clock) as records:
        Follower(run.status, fetch or run.fetch, evaluate, records, patience_s=20.0, clock=clock).run(waits)
    return waits


def evaluated(tape: Path) -> list[tuple[str, int, float]]:
    return [(r["version"], r["tokens"], r["loss"]) for r in read_tape(tape) if r["kind"] == "heldout"]


def versions(tape: Path) -> list[str]:
    return [version for version, _, _ in evaluated(tape)]


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
def test_every_version_is_evaluated_as_far_as_it_is_kept_and_the_last_one_always(
    tmp_path: Path, script: list[StatusReply | RetryLater], kept: int, seen: list[Version],
    asked: list[Version | None] | None,
) -> None:  # fmt: skip
    run = Run(*script, kept=kept)
    waits = follow(run, tmp_path / "tape")
    assert evaluated(tmp_path / "tape") == [(str(each), 100 * each.v, 10.0 - each.v) for each in seen]
    assert waits.calls < waits.limit
    assert asked is None or run.asked == asked


@pytest.mark.parametrize("before", [[], [replace(status(v(0)), stopping=True)]], ids=["never answered", "stopping"])
def test_a_master_that_never_answers_or_may_have_ended_is_an_error(tmp_path: Path, before: list[StatusReply]) -> None:
    run = Run(*before, RetryLater("no process answers", 1.0))
    with pytest.raises(RetryLater, match=r"could not be read for \d+ s: no process answers"):
        follow(run, tmp_path / "tape")


def test_an_evaluation_gives_way_to_the_last_version_of_a_run_that_ends_meanwhile(tmp_path: Path) -> None:
    run = Run(status(v(0)), status(v(1)), status(v(2)), AWAY, status(v(3)), status(v(4), True), AWAY, kept=9)
    follow(run, tmp_path / "tape", batches=12)
    assert versions(tmp_path / "tape") == ["1:4"]
    assert run.asked == [v(0), v(4)]


@pytest.mark.parametrize(("answers", "asked"), [(status(v(0)), 4), (AWAY, 2)], ids=["a poll apart", "master away"])
def test_during_an_evaluation_the_master_is_asked_now_and_then(
    tmp_path: Path, answers: StatusReply | RetryLater, asked: int
) -> None:
    """Of 21 batches in 2.1 s."""
    run = Run(status(v(0)), *[answers] * 99)
    follow(run, tmp_path / "tape", limit=1, batches=21, batch_s=0.1)
    assert 100 - len(run.script) == asked


def test_a_run_that_ends_with_the_version_in_evaluation_is_not_evaluated_twice(tmp_path: Path) -> None:
    run = Run(status(v(0)), status(v(0), True), AWAY)
    follow(run, tmp_path / "tape", batches=3)
    assert versions(tmp_path / "tape") == ["1:0"]


def test_a_fetch_that_fails_for_now_is_tried_again(tmp_path: Path) -> None:
    run, tape = Run(status(v(0)), status(v(0)), status(v(0), stopped=True)), tmp_path / "tape"
    fails = iter([True, True])

    def fetch(version: Version | None) -> PublishedModel:
        if next(fails, False):
            raise RetryLater("a slave restarts", 0.5)
        return run.fetch(version)

    follow(run, tape, fetch=fetch)
    assert versions(tape) == ["1:0"]


def test_a_refusal_ends_it(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="another run"):
        follow(Run(Refused(RefusalCode.RUN_ID, "this is another run")), tmp_path / "tape")


def test_a_signal_ends_it_between_two_versions(tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    script = [status(v(n)) for n in range(50)]
    follow(Run(*script), tape, limit=3)
    assert versions(tape) == ["1:0", "1:1", "1:2"]


def test_waiting_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    away = RetryLater("no process answers", 1.0)
    with caplog.at_level("WARNING", "dips.trainer"):
        follow(Run(status(v(0)), away, away, away, status(v(0), stopped=True)), tmp_path / "tape")
    assert [r.message for r in caplog.records] == ["waiting for the run: no process answers"]
