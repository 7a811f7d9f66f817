"""One cluster's shell between a training loop and a run, all in memory: who waits when, what is sent and installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import Metric
from support.run_for_workers import FlatModel, RefuseCall, part_of
from support.run_in_memory import Failure, RunInMemory
from support.vectors_held import vectors_held

from dips.core.errors import (
    ConfigError,
    DipsError,
    LocalProtocolError,
    RefusalCode,
    Refused,
    RemoteProtocolError,
    RetryLater,
)
from dips.core.ids import Incarnation, PushId, Version
from dips.core.messages import DataMode, DataPlan, DataRange, VerdictKind
from dips.core.observe.tape import read_tape
from dips.core.release import VERSION
from dips.core.wire import Codec
from dips.worker.config import ClientConfig
from dips.worker.shell import ClusterShell
from dips.worker.state.effects import Delayed, Finished
from dips.worker.state.effects import Done as EndOfJob
from dips.worker.state.work import Work

OWN = DataPlan(DataMode.OWN)
LEASED = DataPlan(DataMode.LEASED, b"d", 100_000, 1000)
TOKENS, STEP_S = 100, 0.5
BASE = FlatModel(7).theta


@pytest.fixture
def model() -> FlatModel:
    return FlatModel(1)


@pytest.fixture
def kept(run: RunInMemory, tmp_path: Path) -> dict[str, Any]:
    return {"checkpoint_dir": tmp_path / "kept", "checkpoint_every_s": 10.0, "resume": True, "tape": tmp_path / "tape"}


def shell_of(run: RunInMemory, model: FlatModel, plan: DataPlan = OWN, **knobs: object) -> ClusterShell:
    given: dict[str, Any] = {"master": run.address, "cluster_id": "a", "insecure": True}
    return ClusterShell(ClientConfig.model_validate(given | knobs), model, model.layout(), plan)


def train(run: RunInMemory, shell: ClusterShell, model: FlatModel, steps: int) -> None:
    for _ in range(steps):
        run.clock.advance(STEP_S)
        model.theta += 1
        shell.step(TOKENS, loss=2.0)


def first(run: RunInMemory) -> PushId:
    return next(iter(run.verdicts))


def kinds(path: Path) -> list[str]:
    return [record["kind"] for record in read_tape(path)]


ROUND = ["push_begun", "push_sent", "admitted", "verdict", "installed"]
PUSHES = [("BeginPush", 6.0), ("FinishPush", 6.0), ("AwaitVerdict", 16.0), ("BeginPull", 6.0), ("FinishPull", 6.0)]


def test_rounds_of_pushes_that_are_applied(run: RunInMemory, model: FlatModel, tmp_path: Path) -> None:
    with shell_of(run, model, tape=tmp_path / "tape") as shell:
        assert model.theta.tobytes() == BASE.tobytes()
        assert (shell.version, shell.incarnation, shell.phase, shell.done) == (
            Version(1, 0), Incarnation(1, 1), "TRAINING", False,
        )  # fmt: skip
        assert (shell.push_is_near, shell.steps_to_push) == (False, 4)
        train(run, shell, model, 3)
        assert (shell.push_is_near, shell.steps_to_push, shell.local_steps) == (True, 1, 4)
        assert (shell.tokens_global, shell.progress, shell.unshared) == (0, 300, Work((), 300, 3))
        (beats,) = run.heartbeats
        assert beats.facts is not None
        facts = beats.facts
        assert (facts.phase, facts.steps, facts.base) == ("TRAINING", 3, Version(1, 0))
        assert (facts.tokens_per_s, facts.steps_per_s, facts.loss) == (200.0, 2.0, 2.0)
        assert facts.caller.incarnation == Incarnation(1, 1)
        before = model.theta + 1
        train(run, shell, model, 1)
        assert run.theta_of(first(run)).tobytes() == before.tobytes()
        assert model.theta.tobytes() == before.tobytes()
        assert (facts.push_s, beats.facts.push_s, beats.facts.pull_s) == (0.0, 0.25, 0.25)
        train(run, shell, model, 4)
        assert (shell.version, shell.tokens_global, shell.progress, shell.steps) == (Version(1, 2), 800, 800, 8)
        assert shell.last_verdict is not None
        assert shell.last_verdict.kind is VerdictKind.APPLIED
        assert (shell.run_id, shell.cluster_id, shell.cause, shell.released) == ("run", "a", "a/1.1#2", False)
        assert vectors_held(part_of(shell).vectors) == 2
    assert kinds(tmp_path / "tape") == ["joined", "installed", *ROUND, *ROUND, "leaving", "left"]
    assert run.deadlines == [("Join", 10.0), *PUSHES[-2:], *PUSHES, *PUSHES, ("Leave", 6.0)]
    assert [(push.seq, push.steps, push.tokens, push.base, push.fence) for push in run.pushes] == [
        (1, 4, 400, Version(1, 0), 0), (2, 4, 400, Version(1, 1), 1),
    ]  # fmt: skip
    assert [request.pin_id for request in run.released] == [1, 2, 3]
    assert not shell.checkpoint_now("mine"), "it keeps none"
    assert (shell.done, shell.exit_reason) == (True, "the training loop has ended")
    assert [leave.reason for leave in run.leaves] == [shell.exit_reason]
    assert run.closed == [run.address]
    shell.step(TOKENS)
    assert shell.steps == 8, "nothing counts after the end"


@pytest.mark.parametrize("wait_s", [5.0, 0.0])
def test_training_waits_for_an_exchange_so_long_and_then_goes_on(
    run: RunInMemory, model: FlatModel, wait_s: float
) -> None:
    run.settings = replace(run.settings, verdict_wait_s=wait_s)
    with shell_of(run, model) as shell:
        train(run, shell, model, 3)
        began_s, pushed = run.clock.monotonic_s() + STEP_S, model.theta + 1
        run.holds_transfers = True
        train(run, shell, model, 1)
        assert run.clock.monotonic_s() - began_s == pytest.approx(wait_s)
        assert shell.phase == "TRANSFERRING"
        model.theta += 3
        shell.step(TOKENS)
        run.holds_transfers = False
        run.go_on()
        shell.step(TOKENS)
        assert run.theta_of(first(run)).tobytes() == pushed.tobytes()
        assert shell.version == Version(1, 1)
        assert np.array_equal(model.theta, pushed + 3)


@pytest.mark.parametrize("needed", [True, False])
def test_a_version_that_lands_while_training_goes_on_keeps_the_steps_or_drops_them(
    run: RunInMemory, model: FlatModel, needed: bool
) -> None:
    run.settings = replace(run.settings, verdict_wait_s=1.0)
    run.decide = lambda push: VerdictKind.APPLIED if needed else VerdictKind.EXCLUDED
    with shell_of(run, model) as shell:
        train(run, shell, model, 3)

        def hold(method: str, request: object) -> None:
            run.holds_transfers = run.holds_transfers or method == "BeginPull"

        run.hook = hold
        pushed = model.theta + 1
        if needed:
            train(run, shell, model, 1)
            assert shell.phase == "PULLING"
            model.theta += 3
            shell.step(TOKENS)
            run.go_on()
            shell.step(TOKENS)
            assert model.theta.tobytes() == (pushed + ((pushed + 3) - pushed)).tobytes()
            assert model.resets == 0
        else:
            run.while_waiting = run.go_on  # steps would be dropped: the loop waits however long it takes
            train(run, shell, model, 1)
            assert (model.theta.tobytes(), model.resets) == (BASE.tobytes(), 1)


def test_an_exchange_goes_on_during_a_step_and_installs_after_it(run: RunInMemory, model: FlatModel) -> None:
    run.settings = replace(run.settings, overlap="full")
    with shell_of(run, model) as shell:
        assert shell._session.config.answers_in_steps
        run.holds_transfers = True
        train(run, shell, model, 4)
        assert (shell.phase, run.verdicts) == ("TRANSFERRING", {})
        installs = model.installs
        run.go_on()  # in the middle of a step
        run.settled(shell._wakes)  # type: ignore[arg-type]
        assert (shell.phase, len(run.verdicts)) == ("PULLING", 1)
        assert getattr(run.heartbeats[0].facts, "phase", "") == "PULLING"
        run.go_on()
        run.settled(shell._wakes)  # type: ignore[arg-type]
        assert (shell.phase, model.installs) == ("PULLING", installs)
        shell.step(TOKENS)
        assert (shell.phase, model.installs, shell.version) == ("TRAINING", installs + 1, Version(1, 1))


def test_a_master_that_was_restarted_is_joined_again_with_all_work(run: RunInMemory, model: FlatModel) -> None:
    with shell_of(run, model) as shell:
        train(run, shell, model, 2)
        run.restart()
        run.passes(0.0)
        train(run, shell, model, 1)
        assert (shell.incarnation, len(run.joins)) == (Incarnation(2, 2), 2)
        assert run.joins[1].caller.incarnation == Incarnation(1, 1)
        assert run.heartbeats[-1].facts is not None
        assert run.heartbeats[-1].facts.steps == 3, "of the process, not of the incarnation"
        train(run, shell, model, 1)
        assert (run.pushes[0].steps, run.pushes[0].caller.epoch) == (4, 2)


def test_a_push_whose_base_is_gone_is_sent_again_as_parameters(run: RunInMemory, model: FlatModel) -> None:
    with shell_of(run, model, wire_dtype="int8") as shell:
        run.failures = [Failure("that version is not here", base_gone=True)]
        train(run, shell, model, 4)
        for _ in range(3):
            run.clock.advance(1.0)
            shell.step(TOKENS)
        push = first(run)
        assert (run.pushes[0].wire, run.attempts[push]) == (Codec.INT8, 2)
        assert {slave.codecs[push] for slave in run.slaves} == {Codec.F32}


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no number"), RetryLater("not now")])
def test_a_transfer_that_raises_is_begun_again(
    run: RunInMemory, model: FlatModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    errors = [error]

    def carries(*given: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return run.carry_push(*given, **named)

    monkeypatch.setattr("dips.worker.data.carry_push", carries)
    with shell_of(run, model, tape=tmp_path / "tape") as shell:
        train(run, shell, model, 6)
        assert (shell.version, run.attempts[first(run)]) == (Version(1, 1), 2)
    (failed,) = (record for record in read_tape(tmp_path / "tape") if record["kind"] == "push_failed")
    assert str(error) in failed["reason"]


def test_differences_to_its_base_are_asked_for_where_the_run_publishes_them(run: RunInMemory, model: FlatModel) -> None:
    bases: list[Version | None] = []
    run.settings = replace(run.settings, pull_wire="int8")
    run.hook = lambda method, request: bases.append(request.base) if method == "BeginPull" else None
    with shell_of(run, model) as shell:
        train(run, shell, model, 8)
    assert bases == [None, Version(1, 0), Version(1, 1)]


def test_wrong_bytes_again_and_again_end_the_cluster(run: RunInMemory) -> None:
    run.failures = [Failure("bad digest", corrupt=True)] * 3
    with pytest.raises(RemoteProtocolError, match="bad digest"), shell_of(run, FlatModel(1)):
        pass
    assert len(run.leaves) == 1


def test_a_lost_version_is_given_back_to_the_bit(run: RunInMemory, model: FlatModel) -> None:
    with shell_of(run, model) as shell:
        train(run, shell, model, 2)
        run.donate = Version(1, 0)
        run.passes(0.0)
        run.donate = None
        train(run, shell, model, 1)
        (donated,) = run.verdicts
        assert run.theta_of(donated).tobytes() == BASE.tobytes()
        assert run.pushes[0].donates == Version(1, 0)
        shell.step(TOKENS)
        assert model.theta.tobytes() == BASE.tobytes(), "its own steps are dropped"


def test_leaving_is_given_up_when_nothing_answers(run: RunInMemory, model: FlatModel) -> None:
    shell = shell_of(run, model, leave_wait_s=3.0)
    shell.start()
    train(run, shell, model, 1)
    run.down()
    began_s = run.clock.monotonic_s()
    shell.close()
    assert run.clock.monotonic_s() - began_s == pytest.approx(3.0, abs=0.5)
    assert shell.done
    assert run.leaves == []


def test_an_install_that_fails_ends_with_good_bye_and_its_own_error(
    run: RunInMemory, model: FlatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the session asks beside the install, which frees the version's memory, is answered before Leave is sent."""

    def fails(*_: object) -> None:
        raise OSError("the accelerator is lost")

    shell = shell_of(run, model)

    def loop() -> None:
        with shell:
            train(run, shell, model, 3)
            monkeypatch.setattr(model, "install", fails)
            train(run, shell, model, 1)

    with pytest.raises(OSError, match="the accelerator is lost"):
        loop()
    assert [leave.reason for leave in run.leaves] == ["OSError: the accelerator is lost"]
    assert [request.pin_id for request in run.released] == [1, 2]


def refuses(method: str, code: RefusalCode) -> Callable[[str, Any], None]:
    def hook(asked: str, request: Any) -> None:
        if asked == method:
            raise RefuseCall(code, f"no {method}")

    return hook


@pytest.mark.parametrize(
    ("knobs", "change", "error", "said", "leaves"),
    [
        ({}, {"hook": refuses("Join", RefusalCode.LAYOUT)}, Refused, "no Join", 0),
        ({"outer_lr": 0.123}, {}, ConfigError, "outer_lr = 0.123, the run's is 0.7", 1),
        ({"connect_wait_s": 3.0}, {"is_up": False}, RetryLater, "3 s", 0),
    ],
)
def test_a_cluster_that_cannot_take_part_is_told_why_and_closed(
    run: RunInMemory, knobs: dict[str, Any], change: dict[str, Any], error: type[DipsError], said: str, leaves: int
) -> None:
    for name, value in change.items():
        setattr(run, name, value)
    shell = shell_of(run, FlatModel(1), **knobs)
    began_s = run.clock.monotonic_s()
    with pytest.raises(error, match=said):
        shell.__enter__()
    assert (shell.done, len(run.leaves)) == (True, leaves)
    if error is RetryLater:
        assert 3.0 <= run.clock.monotonic_s() - began_s < 5.0
    assert run.heartbeats[0].facts is None


def test_counts_below_one_are_refused_and_own_data_is_not_leased(run: RunInMemory) -> None:
    with shell_of(run, FlatModel(1)) as shell:
        with pytest.raises(ConfigError, match="at least 1"):
            shell.step(0)
        with pytest.raises(LocalProtocolError, match="leased"):
            shell.lease(10)
        assert shell.steps == 0


def test_leased_data_is_lent_counted_and_pushed_by_name(run: RunInMemory, model: FlatModel) -> None:
    with shell_of(run, model, LEASED) as shell:
        waited_from_s = run.clock.monotonic_s()

        def later(method: str, request: Any) -> None:
            if method == "LeaseData" and run.clock.monotonic_s() - waited_from_s < 2.0:
                raise RefuseCall(RefusalCode.BUSY, "not now", 0.5)

        run.hook = later
        (lent,) = shell.lease(400)
        assert 2.0 <= run.clock.monotonic_s() - waited_from_s <= 2.5
        assert (lent, shell.held_ranges) == (DataRange(1, 0, 0, 0, 400), (lent,))
        for begin in range(0, 400, 100):
            run.clock.advance(STEP_S)
            shell.step(100, [replace(lent, begin_tokens=begin, end_tokens=begin + 100)])
        assert (run.pushes[0].ranges, run.pushes[0].tokens, shell.held_ranges) == ((lent,), 400, ())
        assert shell.steps_per_s == pytest.approx(1 / STEP_S), "waits for data are left out"
        assert shell.times_forgotten == 0


def test_heartbeats_say_for_how_long_a_push_could_not_be_recorded(
    run: RunInMemory, model: FlatModel, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[int] = []
    monkeypatch.setattr("support.run_in_memory.Recorder.record", lambda self, job, record: jobs.append(job))
    run.settings = replace(run.settings, verdict_wait_s=0.0)
    with shell_of(run, model, **kept) as shell:
        train(run, shell, model, 4)
        shell._arrived(Delayed(jobs[0], "no space left"))
        train(run, shell, model, 3)
        facts = run.heartbeats[0].facts
        assert facts is not None
        assert (facts.unrecorded_s, run.pushes) == (2 * STEP_S, [])
        shell._arrived(EndOfJob(jobs[0]))
        train(run, shell, model, 2)
        assert run.heartbeats[0].facts is not None
        assert (run.heartbeats[0].facts.unrecorded_s, [push.steps for push in run.pushes]) == (0.0, [4])


def test_the_time_of_checkpoints_is_not_computing(
    run: RunInMemory, model: FlatModel, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = model.snapshot

    def slowly(into: Any) -> None:
        run.clock.advance(3.0)
        copied(into)

    with shell_of(run, model, **kept | {"checkpoint_every_s": 0.0}) as shell:
        monkeypatch.setattr(model, "snapshot", slowly)
        train(run, shell, model, 1)
        for take in (shell.checkpoint_if_due, lambda: shell.checkpoint_now("mine")):
            take()
            train(run, shell, model, 1)
        assert shell.steps_per_s == pytest.approx(1 / STEP_S)


def test_an_error_of_the_exchange_in_a_step_ends_the_loop_at_its_end(
    run: RunInMemory, model: FlatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no thread can be started")

    run.settings = replace(run.settings, overlap="full")
    shell = shell_of(run, model)
    shell.start()
    run.holds_transfers = True
    train(run, shell, model, 4)
    with monkeypatch.context() as patch:
        patch.setattr(shell._client, "start", fails)
        run.go_on()
        assert shell._between is not None
        shell._between.join()
    with pytest.raises(OSError, match="no thread can be started"):
        shell.step(TOKENS)
    shell.close("it failed", push_pending=False)
    assert [leave.reason for leave in run.leaves] == ["it failed"]


def die(shell: ClusterShell) -> None:
    """As after SIGKILL: no message says that it ends, threads and locks are gone."""
    shell._finished = Finished("killed")
    shell.close()


def test_the_next_life_has_the_parameters_to_the_bit_and_its_work(
    run: RunInMemory, model: FlatModel, kept: dict[str, Any], tmp_path: Path
) -> None:
    shell = shell_of(run, model, **kept)
    shell.start()
    assert not shell.resumed
    train(run, shell, model, 3)
    shell.checkpoint_if_due()
    assert "checkpoint" not in kinds(tmp_path / "tape"), "it is not time"
    run.clock.advance(10.0)
    shell.checkpoint_if_due()
    shell.checkpoint_if_due()
    assert kinds(tmp_path / "tape").count("checkpoint") == 1
    saved = model.theta.copy()
    train(run, shell, model, 1)
    assert run.verdicts
    die(shell)
    assert run.leaves == []
    run.verdicts.clear()  # the push that was made after the checkpoint came to nothing
    run.fence, run.version = 0, Version(1, 0)
    again = FlatModel(2)
    with shell_of(run, again, **kept) as shell:
        assert shell.resumed
        assert again.theta.tobytes() == saved.tobytes()
        assert run.joins[-1].caller.incarnation == Incarnation(1, 1)
        assert shell.progress == shell.tokens_global + 300
        train(run, shell, again, 1)
        assert (run.pushes[-1].steps, run.pushes[-1].tokens, run.pushes[-1].seq) == (4, 400, 2)
        assert run.theta_of(next(reversed(run.verdicts))).tobytes() == (saved + 1).tobytes()
    (resumed,) = (e for e in read_tape(tmp_path / "tape") if e["kind"] == "resumed")
    assert {"base": "1:0", "seq": 0, "incarnation": "1.1", "pending_tokens": 300}.items() <= resumed.items()


def test_an_undecided_push_is_rebased_from_its_saved_parameters(
    run: RunInMemory, model: FlatModel, kept: dict[str, Any]
) -> None:
    run.settings = replace(run.settings, verdict_wait_s=0.0)
    run.decide = lambda push: None
    shell = shell_of(run, model, **kept)
    shell.start()
    train(run, shell, model, 4)
    pushed = model.theta.copy()
    model.theta += 0.125
    train(run, shell, model, 2)
    later = model.theta.copy()
    assert shell.checkpoint_now("mine")
    push = shell._session.pushing.open
    assert push is not None
    die(shell)
    run._apply(push.id, VerdictKind.APPLIED)
    other = FlatModel(9).theta
    run.publish(other)
    again = FlatModel(2)
    with shell_of(run, again, **kept) as shell:
        shell.step(TOKENS)
        assert again.theta.tobytes() == (other + (later - pushed)).tobytes()


@pytest.fixture
def scrapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], Iterable[Metric]]]]:
    """What a server of metrics that is asked for would call."""
    scrapes: list[Callable[[], Iterable[Metric]]] = []
    stopped: list[bool] = []

    def serve(config: ClientConfig, security: object, collect: Callable[[], Any], **names: str) -> Any:
        assert names == {"role": "cluster", "name": "a", "run": ""}
        scrapes.append(collect)
        return SimpleNamespace(stop=lambda: stopped.append(True))

    monkeypatch.setattr("dips.worker.metrics.serve_metrics", serve)
    yield scrapes
    assert stopped == [True]


def test_waits_for_data_and_for_an_exchange_are_told_apart(
    run: RunInMemory, model: FlatModel, scrapes: list[Callable[[], Iterable[Metric]]]
) -> None:
    def waited_s() -> list[float]:
        (found,) = (family for family in scrapes[0]() if "waited_seconds" in family.name)
        return [sample.value for sample in found.samples if sample.name.endswith("_total")][::-1]

    def busy(method: str, request: Any) -> None:
        if method == "LeaseData" and run.clock.monotonic_s() < until_s:
            raise RefuseCall(RefusalCode.BUSY, "not now", 0.5)

    run.hook, until_s = busy, run.clock.monotonic_s() + 2.0
    run.settings, run.decide = replace(run.settings, verdict_wait_s=3.0), lambda push: None
    with shell_of(run, model, LEASED, metrics_listen="127.0.0.1:0") as shell:
        (lent,) = shell.lease(400)
        data_s, _ = waited_s()
        assert 1.5 <= data_s <= 2.5
        run.clock.advance(9.0)
        for begin in range(0, 400, 100):
            shell.step(100, [replace(lent, begin_tokens=begin, end_tokens=begin + 100)])
        run.clock.advance(9.0)
        again_s, exchange_s = waited_s()
        assert again_s == data_s
        assert 2.5 <= exchange_s <= 3.0
        run.decide = lambda push: VerdictKind.APPLIED


def test_a_scrape_finds_what_the_loop_did(
    run: RunInMemory, model: FlatModel, kept: dict[str, Any], scrapes: list[Callable[[], Iterable[Metric]]]
) -> None:
    with shell_of(run, model, metrics_listen="127.0.0.1:0", **kept) as shell:
        train(run, shell, model, 4)
        run.clock.advance(10.0)
        shell.checkpoint_if_due()
        train(run, shell, model, 2)
        run.clock.advance(1.5)
        samples = [sample for family in scrapes[0]() for sample in family.samples]
    found = {
        " ".join((each.name.removeprefix("dips_worker_"), *dict(sorted(each.labels.items())).values())): each.value
        for each in samples
        if each.value and "le" not in each.labels and not each.name.endswith("_created")
    }
    del found[f"info a run {VERSION}"]
    assert found == {
        "phase training": 1, "calls_total done": 8, "steps_per_second": 0.4, "pending_tokens": 200,
        "transfers_total push done": 1, "transfers_total pull done": 2, "transfer_seconds_count push": 1,
        "transfer_seconds_sum push": 0.25, "transfer_seconds_count pull": 2, "transfer_seconds_sum pull": 0.5,
        "link_bytes_total push s0": 64_000, "link_bytes_total pull s0": 128_000, "link_bytes_total push s1": 56_000,
        "link_bytes_total pull s1": 112_000, "link_bytes_per_second push s0": 256_000,
        "link_bytes_per_second pull s0": 256_000, "link_bytes_per_second push s1": 224_000,
        "link_bytes_per_second pull s1": 224_000, "link_round_trip_seconds s0": 0.01,
        "link_round_trip_seconds s1": 0.01, "checkpoint_age_seconds": 2.5, "checkpoint_seconds_count": 1,
    }  # fmt: skip
