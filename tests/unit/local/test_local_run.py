"""How a launcher judges its run: when it has ended, when it is deserted, and when nothing moves any more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.manual_clock import ManualClock
from support.run_status import cluster_status, run_status, slave_status

from dips.core.errors import TERMINATED, ConfigError, FatalError
from dips.core.messages import StatusReply
from dips.core.observe.tape import Tape
from dips.local.demo import DemoOptions, make_plan, train_settings
from dips.local.local_run import LAUNCH_TAPE, STATUS_EVERY_S, LocalRun
from dips.local.log_files import records, tape_path
from dips.local.processes import EVALUATOR, MASTER
from dips.local.run_directory import DEMO, Mark, claim
from dips.local.supervisor import ChildEvent, ProcessSupervisor


class Watched:
    """A run whose processes and whose master's answers the test makes up."""

    def __init__(self, run: LocalRun, clock: ManualClock, ended: dict[str, int]) -> None:
        self.run = run
        self.clock = clock
        self.ended = ended
        self.answer: StatusReply | None = run_status()
        self.said: list[str] = []

    def later(self, seconds_s: float) -> StatusReply | None:
        self.clock.advance(seconds_s)
        return self.run.tick()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    clock, ended = ManualClock(100.0), dict[str, int]()
    wish = DemoOptions(run_dir=tmp_path / "run", clusters=2)
    with claim(wish.run_dir, Mark("demo", DEMO, "dips demo")) as directory:
        plan = make_plan(wish, train_settings(wish), 1_000_000)
        with LocalRun(plan, directory, clock, lambda sentence: made.said.append(sentence), stall_s=60.0) as run:
            made = Watched(run, clock, ended)
            monkeypatch.setattr(run, "_ask", lambda: made.answer)
            monkeypatch.setattr(ProcessSupervisor, "exit_code", lambda self, name: ended.get(name))
            monkeypatch.setattr(ProcessSupervisor, "ended", lambda self, names: set(names) <= set(ended))
            yield made


def test_the_status_is_asked_for_now_and_then_and_what_was_known_is_kept(watched: Watched) -> None:
    assert watched.run.tick() is not None
    assert watched.later(STATUS_EVERY_S / 2) is None
    assert watched.later(STATUS_EVERY_S / 2) is not None
    gone = (cluster_status("a", tokens_per_s=0.0), cluster_status("b", tokens_per_s=3.0))
    watched.answer = run_status(clusters=gone)
    watched.later(1.0)
    assert watched.run.speeds == {"a": 5200.0, "b": 3.0}, "a has left"
    watched.answer = None
    assert watched.later(1.0) is None
    assert watched.run.status == run_status(clusters=gone)


def test_a_run_that_makes_no_progress_is_given_up(watched: Watched) -> None:
    watched.answer = run_status(waiting_for="slave s1 has yet to attach")
    watched.run.tick()
    watched.later(60.0)
    with pytest.raises(FatalError, match=r"no token for 1 min 1 s \(slave s1 has yet to attach\): see the logs"):
        watched.later(1.0)


def test_a_master_that_never_answers_is_given_up_too(watched: Watched) -> None:
    watched.answer = None
    watched.run.tick()
    with pytest.raises(FatalError, match="the master does not say why"):
        watched.later(61.0)


def test_a_master_that_hangs_is_told_after_seconds_and_when_it_is_over(watched: Watched) -> None:
    watched.run.tick()
    watched.answer = None
    watched.later(2.0)  # it may be starting again
    assert watched.said == []
    for _ in range(50):
        watched.later(1.0)
    assert [sentence.split(":")[0] for sentence in watched.said] == [
        f"the master has not answered for {seconds} s" for seconds in (5, 10, 20, 40)
    ]
    watched.answer = run_status()
    watched.later(1.0)
    assert watched.said[4:] == ["the master answers again, after 53 s"]


def test_a_start_that_takes_long_is_told_and_no_standstill(watched: Watched) -> None:
    tape = watched.run.plan.slaves[0].tape_used
    assert tape is not None
    for n in range(10):
        with Tape(tape, "slave", "s0") as slave:
            slave.write("starting", "", sentence=f"kernels: compiling {n} of 60")
        watched.later(50.0)
    assert watched.said[-2:] == [f"s0: kernels: compiling {n} of 60" for n in (8, 9)]


@pytest.mark.parametrize("changes", [{"paused": True}, {"stopped": True}, {}])
def test_a_pause_the_end_and_progress_are_no_standstill(watched: Watched, changes: dict[str, bool]) -> None:
    for tokens in range(10):
        watched.answer = run_status(tokens=0 if changes else tokens, **changes)
        watched.later(50.0)


@pytest.mark.parametrize(
    ("stopped", "last"),
    [(True, EVALUATOR), (False, MASTER)],  # its last version is still to be evaluated; the master has served its time
)
def test_it_has_finished_when_all_have_ended(watched: Watched, stopped: bool, last: str) -> None:
    watched.answer = run_status(stopped=stopped)
    watched.run.tick()
    for name in ("a", "b", EVALUATOR, MASTER):
        assert not watched.run.finished
        if name != last:
            watched.ended[name] = 0
        else:
            break
    watched.ended[last] = 0
    assert watched.run.finished


def test_the_end_does_not_wait_for_slaves_that_a_reshard_brought(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ended(self: ProcessSupervisor, names: Iterable[str]) -> bool:
        asked.extend(names)  # the supervisor has no process of another name
        return len(asked) > 3

    monkeypatch.setattr(ProcessSupervisor, "ended", ended)
    monkeypatch.setattr("dips.local.local_run.time.sleep", lambda seconds: None)
    watched.run.status = run_status(slaves=(slave_status("s0"), slave_status("s9")))
    watched.run.finish()
    assert set(asked) == {MASTER, *watched.run.plan.run.slave_ids}


def test_once_the_master_has_ended_nothing_is_started_again_and_the_evaluator_is_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ended = list[float](), list[str]()
    monkeypatch.setattr(ProcessSupervisor, "terminate", lambda self, name: ended.append(name))
    monkeypatch.setattr(ProcessSupervisor, "restart_no_more", lambda self: asked.append(watched.clock.monotonic_s()))
    watched.run.tick()
    for event in (
        ChildEvent(MASTER, "failed", 1, 7, 6, "failed"),
        ChildEvent(MASTER, "stopped", 1, 7, 0, "stopped"),
        ChildEvent("a", "ended", 1, 8, 0, "ended"),
    ):
        watched.run._child_event(event)
    watched.later(1.0)
    assert (asked, ended) == ([], [])
    watched.run._child_event(ChildEvent(MASTER, "ended", 2, 9, 0, "ended"))
    watched.later(1.0)
    assert (asked, ended) == ([102.0], [EVALUATOR])


def test_a_run_is_deserted_when_all_clusters_ended_before_its_end_and_no_other_one_is_there(watched: Watched) -> None:
    away = (cluster_status("a", alive=False), cluster_status("b", alive=False))
    watched.answer = run_status(clusters=away)
    watched.run.tick()
    watched.ended["a"] = 0
    assert not watched.run.deserted
    watched.ended["b"] = 0
    assert watched.run.deserted
    watched.answer = run_status(clusters=(*away, cluster_status("from-elsewhere")))
    watched.later(1.0)
    assert not watched.run.deserted
    watched.answer = run_status(stopping=True)
    watched.later(1.0)
    assert not watched.run.deserted


@pytest.mark.parametrize("extend", [False, True])
def test_a_run_that_has_ended_at_its_limit_needs_a_larger_one(watched: Watched, extend: bool) -> None:
    with pytest.raises(ConfigError, match=r"has ended after 1000000 tokens: raise tk_max \(1000000\) above that"):
        watched.run._refuse_ended_run(run_status(stopping=True, tokens=1_000_000), extend)


def test_the_end_of_a_process_is_told_unless_it_was_asked_to_end(watched: Watched) -> None:
    for kind, code in (("stopped", 0), ("stopped", TERMINATED), ("stopped", 1), ("ended", 0), ("failed", 1)):
        watched.run._child_event(ChildEvent("a", kind, 2, 7, code, f"{kind} {code}"))
    kept = [record for record in records(tape_path(watched.run.directory.path, LAUNCH_TAPE)) if "child" in record]
    assert watched.said == ["a: stopped 1", "a: ended 0", "a: failed 1"]
    assert [(one["kind"], one["child"], one["life"], one["pid"], one["code"]) for one in kept][1:3] == [
        ("child_stopped", "a", 2, 7, TERMINATED),
        ("child_stopped", "a", 2, 7, 1),
    ]


@pytest.mark.parametrize(
    ("extend", "ended"),
    [(False, {}), (True, {"stopping": True}), (False, {"stopping": True}), (False, {"stopped": True})],
)
def test_the_others_are_started_once_the_master_says_that_the_run_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, extend: bool, ended: dict[str, bool]
) -> None:
    started, answers = list[str](), [run_status(), run_status(**ended)]
    monkeypatch.setattr(ProcessSupervisor, "start", lambda self, spec: started.append(spec.name))
    monkeypatch.setattr(watched.run, "_masters_address", lambda: "127.0.0.1:5")
    monkeypatch.setattr(watched.run, "_ask", lambda: answers.pop(0))
    monkeypatch.setattr(watched.run, "answer", lambda request: "it goes on")
    refused = bool(ended) and not extend
    with pytest.raises(ConfigError, match="has ended") if refused else contextlib.nullcontext():
        assert watched.run.start(extend) == watched.run.address == "127.0.0.1:5"
    assert started == [MASTER, *([] if refused else ["s0", "s1", "a", "b", EVALUATOR])]
    assert ("it goes on" in watched.said) is extend
    keys = {path.name for path in watched.run.directory.keys.iterdir()}
    assert keys == {"ca", MASTER, "s0", "s1", "a", "b", EVALUATOR, "operator"}
