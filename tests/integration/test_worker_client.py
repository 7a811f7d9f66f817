"""The worker's driver over real sockets, against a small run that the test controls."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ports import own_port
from support.run_for_workers import LAYOUT, FlatModel, RefuseCall, RunForWorkers, until_version_changes
from support.waiting import NO_LIMIT_S, until

from dips.core.errors import ConfigError, LocalProtocolError, RefusalCode, Refused, RemoteProtocolError, RetryLater
from dips.core.ids import Incarnation, Version
from dips.core.messages import DataMode, DataPlan, DataRange, Refusal, VerdictKind
from dips.core.net import addresses
from dips.core.net.carriers import Common, carry_pull
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.net.security import INSECURE
from dips.core.net.transfer import PullTransfer, TransferSettings
from dips.core.observe.tape import read_tape
from dips.worker import reader
from dips.worker.config import ClientConfig
from dips.worker.reader import PinRenewal, fetch_version
from dips.worker.shell import ClusterShell

OWN = DataPlan(DataMode.OWN)
TOKENS = 100


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    run = RunForWorkers(theta=FlatModel(7).theta)
    yield run
    run.close()


def driver(run: RunForWorkers, model: FlatModel, plan: DataPlan = OWN, **knobs: object) -> ClusterShell:
    given: dict[str, object] = {
        "master": run.address, "cluster_id": "a", "data_silence_s": 0.3, "call_deadline_s": 2.0, "retry_max_s": 0.3,
        "connect_wait_s": 10.0, "leave_wait_s": 5.0,
        "insecure": True,
    }  # fmt: skip
    return ClusterShell(ClientConfig.model_validate(given | knobs), model, model.layout(), plan)


def train(driver: ClusterShell, model: FlatModel, steps: int) -> None:
    """Each step adds 1 to every parameter, so that rebasing can be checked by counting."""
    for _ in range(steps):
        model.theta += 1
        driver.step(TOKENS, loss=2.0)


def test_the_first_version_is_installed_bit_for_bit(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        assert np.array_equal(model.theta, FlatModel(7).theta)
        assert (client.version, client.incarnation) == (Version(1, 0), Incarnation(1, 1))
        assert client.run_id == "run"
        assert client.settings == run.settings
        run.wait_for(lambda: len(run.released) == 1)
    assert [leave.reason for leave in run.leaves] == ["the training loop has ended"]


def test_no_step_is_counted_while_the_exchanges_thread_looks_at_the_last_ones(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it does for a heartbeat, under the lock, while the training thread goes on to its next step."""
    model, alone = FlatModel(1), list[bool]()
    with driver(run, model) as client, ThreadPoolExecutor(1) as exchange:
        counted = client._pace.stepped

        def may_look() -> bool:
            taken = client._lock.acquire(blocking=False)
            if taken:
                client._lock.release()
            return taken

        def stepped(tokens: int, loss: float, now_s: float, steps: int) -> None:
            alone.append(not exchange.submit(may_look).result())
            counted(tokens, loss, now_s, steps)

        monkeypatch.setattr(client._pace, "stepped", stepped)
        train(client, model, 2)
    assert alone == [True, True]


def test_the_first_cluster_seeds_its_own_parameters() -> None:
    run = RunForWorkers()
    try:
        model = FlatModel(3)
        with driver(run, model) as client:
            assert np.array_equal(model.theta, FlatModel(3).theta)
            assert client.version == Version(1, 0)
            assert (run.pushes[0].base, run.pushes[0].tokens) == (None, 0)
        assert np.array_equal(run.theta_of(next(iter(run.verdicts))), FlatModel(3).theta)
    finally:
        run.close()


def test_pushed_bytes_arrive_bit_exact_and_come_back(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        model.theta[:5] = [np.nan, np.inf, -0.0, 1e-45, 3.4e38]
        before = model.theta.copy()
        for _ in range(4):
            before += 1
        train(client, model, 4)
        push = next(iter(run.verdicts))
        assert run.theta_of(push).tobytes() == before.tobytes()
        assert model.theta.tobytes() == before.tobytes()
        assert client.version == Version(1, 1)
        assert client.last_verdict is not None
        assert client.last_verdict.kind is VerdictKind.APPLIED
        assert (client.tokens_global, client.progress) == (400, 400)


def test_steps_made_while_the_verdict_is_out_are_kept(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, verdict_wait_s=0.0)
    released, looked = threading.Event(), threading.Event()
    # The second push waits: it may begin and end within the step in which the first one's version is installed.
    run.decide = lambda push: VerdictKind.APPLIED if (released if push.seq == 1 else looked).is_set() else None
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 4)
        pushed = model.theta.copy()
        train(client, model, 3)
        released.set()
        until_version_changes(client)
        assert np.array_equal(model.theta, pushed + ((pushed + 3) - pushed))
        assert client.progress > client.tokens_global
        looked.set()


def test_excluded_drops_steps_and_resets_the_inner_optimizer(run: RunForWorkers) -> None:
    run.decide = lambda push: VerdictKind.EXCLUDED
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 4)
        assert np.array_equal(model.theta, FlatModel(7).theta)
        assert model.resets == 1
        assert client.progress == 0


def test_aborted_keeps_parameters_and_the_work_is_pushed_again_at_once(run: RunForWorkers) -> None:
    kinds = iter([VerdictKind.ABORTED, VerdictKind.APPLIED])
    decided: dict[object, VerdictKind] = {}
    run.decide = lambda push: decided.setdefault(push, next(kinds)) if push not in decided else decided[push]
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 4)
        assert np.array_equal(model.theta, FlatModel(7).theta + 1 + 1 + 1 + 1)
        train(client, model, 4)
        assert [(push.seq, push.tokens, push.steps) for push in run.pushes] == [
            (1, 400, 4),
            (2, 400, 4),
            (3, 400, 4),
        ]


# ---- the data flow fails ----


def test_a_push_survives_a_data_socket_that_is_cut_in_the_middle(run: RunForWorkers) -> None:
    slave = run.slaves[1]
    cut = threading.Event()

    def hook(header: DataHeader) -> None:
        if header.op is DataOp.PUT_CHUNK and len(slave.heard) > 6 and not cut.is_set():
            slave.mute = True
            cut.set()

    slave.hook = hook

    def reconnect() -> None:
        cut.wait()
        slave.hang_up()
        slave.mute = False
        slave.listen()

    helper = threading.Thread(target=reconnect)
    helper.start()
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 4)
        push = next(iter(run.verdicts))
        assert client.version == Version(1, 1)
    helper.join()
    assert np.array_equal(run.theta_of(push), model.theta)
    puts = [(h.block, h.offset_bytes) for h in slave.heard if h.op is DataOp.PUT_CHUNK]
    assert len(puts) - len(set(puts)) <= run.settings.window_chunks, "only what was in flight is sent again"


def test_a_slave_that_comes_back_on_another_port_is_found_through_the_master(run: RunForWorkers) -> None:
    slave = run.slaves[0]
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 3)
        slave.hang_up()
        old = slave.endpoint
        slave._port = own_port()

        def come_back() -> None:
            run.wait_for(lambda: max(run.attempts.values(), default=0) >= 1)
            slave.listen()

        helper = threading.Thread(target=come_back)
        helper.start()
        train(client, model, 1)
        until_version_changes(client)
        helper.join()
        assert slave.endpoint != old


def test_damaged_chunks_are_asked_for_again(run: RunForWorkers) -> None:
    slave = run.slaves[0]
    genuine = slave._chunk
    damaged: list[DataHeader] = []

    def chunk(header: DataHeader) -> list[bytes]:
        answer = genuine(header)
        if len(damaged) < 3:
            damaged.append(header)
            answer[1] = bytes(len(answer[1]))
        return answer

    slave._chunk = chunk  # type: ignore[method-assign]
    model = FlatModel(1)
    with driver(run, model):
        assert np.array_equal(model.theta, FlatModel(7).theta)
    assert len(damaged) == 3


def test_a_version_whose_bytes_contradict_its_digest_is_never_installed(run: RunForWorkers) -> None:
    run.false_digests = True
    first = FlatModel(1)
    client = driver(run, first)
    with pytest.raises(RemoteProtocolError, match="digest"):
        client.start()
    client.close()
    assert np.array_equal(first.theta, FlatModel(1).theta)
    assert first.installs == 0


def test_a_cluster_that_is_sent_to_its_own_loopback_ends_and_leaves(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "is_elsewhere", lambda address: address == run.address)
    first = FlatModel(1)
    with pytest.raises(ConfigError, match="which only its own machine reaches"), driver(run, first):
        pass
    assert len(run.leaves) == 1
    with pytest.raises(ConfigError, match="which only its own machine reaches"):
        fetch_version(run.address, None, "reader", INSECURE, deadline_s=NO_LIMIT_S)


def test_refusals_on_the_data_port_are_waited_out(run: RunForWorkers) -> None:
    refusal, asked = Refusal(RefusalCode.UNKNOWN_PUSH, "no staging is open", 0.2), itertools.count()
    model = FlatModel(1)
    with driver(run, model) as client:
        run.slaves[0].hook = lambda header: refusal if next(asked) < 3 else None
        train(client, model, 4)
        assert next(asked) > 3
        assert client.version == Version(1, 1)


# ---- the control flow fails ----


def test_training_goes_on_while_the_master_is_down(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, verdict_wait_s=NO_LIMIT_S)  # a step that waited for it would not end
    model = FlatModel(1)
    with driver(run, model) as client:
        run.down()
        train(client, model, 40)
        assert client.version == Version(1, 0)
        run.up()
        until_version_changes(client)
        assert run.pushes[0].steps == 4, "the push is the one that was frozen"


def rejoined(client: ClusterShell, model: FlatModel) -> None:
    """Train until the cluster has become another incarnation."""
    before = client.incarnation

    def is_another() -> bool:
        train(client, model, 1)
        return client.incarnation != before

    until(is_another, "it joins again", lambda: client.phase)


def test_a_restarted_master_is_joined_again_and_nothing_is_lost(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, sync_every_steps=100_000)
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 2)
        run.restart()
        rejoined(client, model)
        assert client.incarnation == Incarnation(2, 2)
        assert run.joins[1].caller.incarnation == Incarnation(1, 1)
        assert client.progress == client.steps * TOKENS
        assert np.allclose(model.theta, FlatModel(7).theta + client.steps, atol=1e-2)
        assert model.installs == 1


def test_an_evicted_cluster_joins_again_and_beats_under_its_new_name(run: RunForWorkers) -> None:
    run.settings = replace(run.settings, sync_every_steps=100_000)
    model = FlatModel(1)
    with driver(run, model) as client:
        run.n += 1  # only the heartbeat can notice: there is nothing to push
        rejoined(client, model)
        assert client.incarnation == Incarnation(1, 3)
        run.wait_for(lambda: any(beat.caller.incarnation == Incarnation(1, 3) for beat in run.beats[-1:]))
        assert len(run.joins) == 2


def test_heartbeats_flow_while_the_training_thread_is_busy(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 5)
        before = len(run.beats)
        # The training thread is here, and not in the driver.
        run.wait_for(lambda: len(run.beats) - before >= 5)
        train(client, model, 1)
        run.wait_for(lambda: any(beat.steps == 6 for beat in run.beats[-1:]))
        beat = run.beats[-1]
        assert (beat.base, beat.phase, beat.loss) == (Version(1, 1), "TRAINING", 2.0)
        assert beat.tokens_per_s > 0
        assert beat.push_s > 0
        assert beat.pull_s > 0


def test_a_master_that_hangs_is_hung_up_on_and_beaten_again(run: RunForWorkers) -> None:
    hung, release = threading.Event(), threading.Event()

    def hook(method: str, request: object) -> None:
        if method == "Heartbeat" and not hung.is_set():
            hung.set()
            release.wait(NO_LIMIT_S)

    with driver(run, FlatModel(1)):
        run.hook = hook
        run.wait_for(hung.is_set)
        beats = len(run.beats)
        run.wait_for(lambda: len(run.beats) > beats)
        assert not release.is_set(), "the new stream did not wait for the old one"
        release.set()


def test_the_measured_speed_is_of_computing_alone(run: RunForWorkers) -> None:
    model = FlatModel(1)

    def hook(method: str, request: object) -> None:
        if method == "AwaitVerdict":
            time.sleep(1.0)

    run.hook = hook
    with driver(run, model) as client:
        began_s = time.monotonic()
        for _ in range(8):
            time.sleep(0.02)
            train(client, model, 1)
        took_s = time.monotonic() - began_s
        assert took_s > 8 * 0.02 + 1.8, "two verdicts were waited for"
        assert client.steps_per_s > 1.05 * 8 / took_s, "the waits do not count"


def test_the_masters_stop_ends_the_loop_with_the_last_version(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        train(client, model, 2)
        last = FlatModel(11).theta
        run.publish(last)
        run.stop = True

        def ends() -> bool:
            train(client, model, 1)
            return client.done

        until(ends, "the loop's end", lambda: client.phase)
        assert np.array_equal(model.theta, last)
        assert client.version == Version(1, 1)
        assert client.exit_reason == "the run has ended"
        client.step(TOKENS)
        assert np.array_equal(model.theta, last)
    assert len(run.leaves) == 1


def test_a_stop_from_a_signal_handler_leaves_at_the_next_step(run: RunForWorkers) -> None:
    model = FlatModel(1)
    with driver(run, model) as client:
        client.request_stop("SIGTERM")
        train(client, model, 1)
        assert client.done
        assert client.exit_reason == "SIGTERM"
    assert [leave.reason for leave in run.leaves] == ["SIGTERM"]


def test_an_exception_in_the_loop_is_the_reason_for_leaving(run: RunForWorkers) -> None:
    with pytest.raises(ZeroDivisionError), driver(run, FlatModel(1)):
        raise ZeroDivisionError("oops")
    assert [leave.reason for leave in run.leaves] == ["ZeroDivisionError: oops"]


def test_when_an_install_fails_the_cluster_still_says_good_bye(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the session asks beside the install, which frees the version's memory, is answered before Leave is sent."""

    def fails(*_: object) -> None:
        raise OSError("the accelerator is lost")

    def train_until_it_fails(client: ClusterShell) -> None:
        monkeypatch.setattr(model, "install", fails)
        train(client, model, 1000)

    model = FlatModel(1)
    client = driver(run, model)
    with pytest.raises(OSError, match="the accelerator is lost"), client:
        train_until_it_fails(client)
    assert [leave.reason for leave in run.leaves] == ["OSError: the accelerator is lost"]


def test_close_without_a_master_is_quick(run: RunForWorkers) -> None:
    client = driver(run, FlatModel(1), leave_wait_s=NO_LIMIT_S)
    client.start()
    run.down()
    client.close()  # the first call that fails is the last
    client.close()


# ---- refusals ----


def test_a_refused_join_raises_the_masters_sentence(run: RunForWorkers) -> None:
    def hook(method: str, request: object) -> None:
        if method == "Join":
            raise RefuseCall(RefusalCode.LAYOUT, "parameter 'x' has another shape")

    run.hook = hook
    before = set(threading.enumerate())
    with pytest.raises(Refused, match="another shape") as caught:
        driver(run, FlatModel(1)).__enter__()
    assert caught.value.code is RefusalCode.LAYOUT
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("dips-")]
    assert not left, "a start that fails leaves no thread behind"


def test_no_master_at_all_is_said_after_a_bounded_wait() -> None:
    run = RunForWorkers()
    run.close()
    client = driver(run, FlatModel(1), connect_wait_s=0.5)
    with pytest.raises(RetryLater, match=r"0\.5 s"):
        client.start()
    client.close()


def test_an_expectation_that_the_run_does_not_meet_is_a_config_error(run: RunForWorkers) -> None:
    client = driver(run, FlatModel(1), outer_lr=0.123)
    with pytest.raises(ConfigError, match="outer_lr"):
        client.start()
    client.close()
    assert len(run.leaves) == 1, "it joined, so it leaves"


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"master": ""}, "DIPS_MASTER"),
        ({"master": "10.1.2.3:5"}, "loopback"),
        ({"master": "nonsense"}, "HOST:PORT"),
        ({"cluster_id": ""}, "DIPS_CLUSTER"),
        ({"cluster_id": "Ä!"}, "not a name"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    run: RunForWorkers, knobs: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        driver(run, FlatModel(1), OWN, **knobs)


def test_counts_below_one_are_refused(run: RunForWorkers) -> None:
    with driver(run, FlatModel(1)) as client, pytest.raises(ConfigError, match="at least 1"):
        client.step(0)


# ---- data, tape, reader ----


def test_leased_data_is_lent_counted_and_pushed_by_name(run: RunForWorkers) -> None:
    model = FlatModel(1)
    plan = DataPlan(DataMode.LEASED, b"d", 1000, 1000)
    with driver(run, model, plan) as client:
        (lent,) = client.lease(400)
        for i in range(4):
            piece = DataRange(lent.lease_id, lent.pass_index, lent.chunk, 100 * i, 100 * (i + 1))
            model.theta += 1
            client.step(100, [piece])
        assert run.pushes[0].ranges == (lent,)
        assert run.pushes[0].tokens == 400


def test_lease_needs_a_leased_plan(run: RunForWorkers) -> None:
    with driver(run, FlatModel(1)) as client, pytest.raises(LocalProtocolError, match="leased"):
        client.lease(10)


def test_the_tape_tells_the_story_of_a_round(run: RunForWorkers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    model = FlatModel(1)
    with driver(run, model, tape=path) as client:
        train(client, model, 4)
    kinds = [event["kind"] for event in read_tape(path)]
    assert kinds == [
        "joined", "installed", "push_begun", "push_sent", "admitted", "verdict", "installed", "leaving", "left",
    ]  # fmt: skip
    assert {event["name"] for event in read_tape(path)} == {"a"}


def test_a_reader_fetches_the_newest_or_a_named_version(run: RunForWorkers) -> None:
    run.publish(FlatModel(8).theta)
    newest = fetch_version(run.address, "run", "eval", INSECURE, deadline_s=NO_LIMIT_S)
    assert newest.version == Version(1, 1)
    assert newest.layout == LAYOUT
    assert newest.flat.tobytes() == FlatModel(8).theta.tobytes()
    named = fetch_version(run.address, None, "eval", INSECURE, version=Version(1, 0), deadline_s=NO_LIMIT_S)
    assert named.flat.tobytes() == FlatModel(7).theta.tobytes()
    run.wait_for(lambda: len(run.released) == 2)
    assert all(request.reader for request in run.released)


def test_a_reader_renews_its_pin_while_bytes_arrive_and_releases_the_one_that_it_was_given_last(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older master, which takes each request for a new pull."""
    monkeypatch.setattr(PinRenewal, "due", lambda renewal, carried_bytes, now_s: carried_bytes > 0)
    renewed = threading.Event()

    def note(method: str, request: Any) -> None:
        if method == "BeginPull" and request.pin_id:
            renewed.set()

    def wait(header: DataHeader) -> None:
        if len(run.slaves[0].heard) > 4:
            assert renewed.wait(NO_LIMIT_S)

    run.hook, run.slaves[0].hook = note, wait
    fetched = fetch_version(run.address, "run", "eval", INSECURE, deadline_s=NO_LIMIT_S)
    assert np.array_equal(fetched.flat, FlatModel(7).theta)
    first, *again = run.pulls
    assert (first.exact, first.pin_id) == (False, 0)
    assert {(request.exact, request.at_least, request.curve_key) for request in again} == {(True, fetched.version, b"")}
    assert [request.pin_id for request in again] == list(range(1, len(run.pulls)))
    assert [request.pin_id for request in run.released] == [len(run.pulls)]


@pytest.mark.parametrize(("deadline_s", "stall_s"), [(0.0, 3.0), (600.0, 30.0)])
def test_a_reader_near_its_deadline_still_waits_for_a_chunk_over_a_slow_link(
    run: RunForWorkers, monkeypatch: pytest.MonkeyPatch, deadline_s: float, stall_s: float
) -> None:
    settings: list[TransferSettings] = []

    def noted(context: Any, common: Common, *rest: Any) -> PullTransfer:
        settings.append(common.settings)
        return carry_pull(context, common, *rest)

    monkeypatch.setattr(reader, "carry_pull", noted)
    assert fetch_version(run.address, "run", "eval", INSECURE, deadline_s=deadline_s).version == Version(1, 0)
    assert [used.stall_s for used in settings] == [stall_s]


def test_a_reader_waits_for_a_version_and_says_what_it_waited_for(run: RunForWorkers) -> None:
    with pytest.raises(RetryLater, match="no such version is published yet"):
        fetch_version(run.address, "run", "eval", INSECURE, at_least=Version(1, 5), deadline_s=0.4)
    publisher = threading.Timer(0.3, lambda: run.publish(FlatModel(9).theta))
    publisher.start()
    fetched = fetch_version(run.address, "run", "eval", INSECURE, at_least=Version(1, 1), deadline_s=NO_LIMIT_S)
    assert np.array_equal(fetched.flat, FlatModel(9).theta)
    publisher.join()


def test_a_reader_is_told_when_a_version_is_gone(run: RunForWorkers) -> None:
    run.publish(FlatModel(8).theta)
    del run.slaves[0].versions[Version(1, 0)]
    with pytest.raises(Refused, match="not kept"):
        fetch_version(run.address, "run", "eval", INSECURE, version=Version(1, 0), deadline_s=NO_LIMIT_S)


def test_a_reader_without_a_master_says_so() -> None:
    run = RunForWorkers()
    run.close()
    with pytest.raises(RetryLater, match="does not answer"):
        fetch_version(run.address, "run", "eval", INSECURE, deadline_s=0.3)
