"""The training loop against a scripted driver, and the same loop without a master."""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.kept_state import saved

from dips.core.errors import ConfigError, DipsError, FatalError, RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import Layout
from dips.core.messages import DataPlan, DataRange
from dips.core.observe.tape import Tape, read_tape
from dips.trainer import train as module
from dips.trainer.config import TrainConfig
from dips.trainer.corpus import all_ranges
from dips.trainer.progress import StopSignals
from dips.trainer.train import run, schedule_of
from dips.worker.checkpoint import InnerState
from dips.worker.config import ClientConfig
from dips.worker.parameters import ParameterStore
from dips.worker.state.work import joined, without

CHUNK = 64
CLIENT = ClientConfig(master="127.0.0.1:1", cluster_id="a")


class ScriptedDriver:
    last: ScriptedDriver
    end_after: int = 6
    lends_tokens: int | None = None
    at_start: Callable[[ScriptedDriver], None] = staticmethod(lambda driver: None)
    at_step: Callable[[ScriptedDriver], None] = staticmethod(lambda driver: None)

    def __init__(
        self,
        config: ClientConfig,
        parameters: ParameterStore,
        layout: Layout,
        data_plan: DataPlan,
        *,
        inner: InnerState,
    ) -> None:
        type(self).last = self
        assert parameters.layout() == layout
        self.tape = Tape(config.tape_used, "worker", config.cluster_id)
        self.inner = inner
        self.resumed = False
        self.times_forgotten = 0
        self.held_ranges: tuple[DataRange, ...] = ()
        self.boundaries = 0
        self.total_tokens = 10_000
        self.version = Version(1, 4)
        self.cause = "cause"
        self.local_steps = 3
        self.progress = 0
        self.done = False
        self.released = False
        self.steps: list[tuple[int, tuple[DataRange, ...], float]] = []
        self.lent: list[DataRange] = []
        self.wanted: list[int] = []
        self.closed: list[str] = []
        self._source = all_ranges(data_plan)

    def start(self) -> None:
        self.at_start(self)

    def checkpoint_if_due(self) -> None:
        self.boundaries += 1

    def take_unused(self) -> list[DataRange]:
        return list(self.held_ranges)

    def lease(self, tokens: int) -> list[DataRange]:
        self.wanted.append(tokens)
        fresh: list[DataRange] = []
        while sum(part.tokens for part in fresh) < (self.lends_tokens or tokens):
            fresh.append(next(self._source))
        self.lent += fresh
        return fresh

    def step(self, tokens: int, ranges: Sequence[DataRange], loss: float) -> None:
        self.steps.append((tokens, tuple(ranges), loss))
        self.progress += tokens
        self.at_step(self)
        self.done = self.done or len(self.steps) >= self.end_after

    def request_stop(self) -> None:
        self.done = True

    def close(self, reason: str, *, push_pending: bool) -> None:
        assert push_pending == (reason == "finished"), "after an error the parameters may be in the middle of a step"
        self.closed.append(reason)
        self.tape.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, restored_threads: None) -> type[ScriptedDriver]:
    kind = type("OneDriver", (ScriptedDriver,), {})
    monkeypatch.setattr(module, "ClusterShell", kind)
    return kind


@pytest.fixture(autouse=True)
def _keep_pytests_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "configure_logging", lambda *args: None)


@pytest.fixture
def train(text: Path) -> TrainConfig:
    knobs: dict[str, Any] = {"chunk_tokens": CHUNK, "sequence_tokens": 16, "batch_size": 2, "log_every_steps": 2}
    return TrainConfig(data=(text,), heldout_fraction=0.2, device="cpu", **knobs)


def test_one_run_claims_what_it_trained_on_and_its_tape_tells_of_it(
    driver: type[ScriptedDriver], train: TrainConfig, tmp_path: Path
) -> None:
    """In its last step the driver leaves the run, which ends a tape."""

    def leaves(scripted: ScriptedDriver) -> None:
        if len(scripted.steps) == scripted.end_after:
            scripted.tape.write("left", "cause", reason="finished")

    driver.end_after, driver.at_step = 40, staticmethod(leaves)
    assert run(train, CLIENT.model_copy(update={"tape": tmp_path / "tape"})) == 0
    assert (len(driver.last.steps), driver.last.closed) == (40, ["finished"])
    assert driver.last.boundaries == 40 + len(driver.last.wanted), "each may become a checkpoint"
    seen: Counter[tuple[int, int]] = Counter()
    for tokens, ranges, loss in driver.last.steps:
        assert tokens == sum(part.tokens for part in ranges) == train.step_tokens
        assert math.isfinite(loss)
        seen.update((part.chunk, token) for part in ranges for token in range(part.begin_tokens, part.end_tokens))
    lent = {(part.chunk, token) for part in driver.last.lent for token in range(part.begin_tokens, part.end_tokens)}
    assert set(seen.values()) == {1}
    assert set(seen) <= lent
    *records, left = read_tape(tmp_path / "tape")
    assert left["kind"] == "left"
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["tokens"] for record in steps] == [n * train.step_tokens for n in range(2, 41, 2)]
    losses = [loss for _, _, loss in driver.last.steps]
    assert steps[0]["loss"] == pytest.approx((losses[0] + losses[1]) / 2)
    assert (steps[0]["version"], steps[0]["cause"]) == ("1:4", "cause")


def test_it_leases_enough_to_mix_chunks_and_for_the_steps_to_come(
    driver: type[ScriptedDriver], train: TrainConfig
) -> None:
    run(train, CLIENT)
    assert driver.last.wanted[0] == 2 * train.batch_size * CHUNK
    driver.at_start = staticmethod(lambda scripted: setattr(scripted, "local_steps", 20))
    run(train, CLIENT)
    assert driver.last.wanted[0] == 20 * train.step_tokens


def test_a_master_that_lends_little_is_asked_again(driver: type[ScriptedDriver], train: TrainConfig) -> None:
    driver.lends_tokens = 1
    driver.end_after = 9
    assert run(train, CLIENT) == 0
    assert len(driver.last.wanted) == 5
    assert len(driver.last.steps) == 9


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_new_join_took_away_during_a_lease_is_not_trained_on_and_what_was_just_leased_is(
    driver: type[ScriptedDriver], train: TrainConfig, kept: bool
) -> None:
    """The master was restarted while this cluster waited for data: what it held may be another cluster's now.

    Not kept: several ranks meet before they lease; what the leader's session held then lacks the new ranges.
    """

    def joins_again(scripted: ScriptedDriver) -> None:
        lend = scripted.lease

        def lease(tokens: int) -> list[DataRange]:
            fresh = lend(tokens)
            if len(scripted.wanted) == 2:
                scripted.times_forgotten, scripted.held_ranges = 1, tuple(fresh) if kept else ()
            return fresh

        scripted.lease = lease  # type: ignore[method-assign]

    driver.at_start = staticmethod(joins_again)
    driver.lends_tokens = train.step_tokens // 2 if kept else train.step_tokens
    driver.end_after = 6 if kept else 3
    assert run(train.model_copy(update={"chunk_tokens": driver.lends_tokens + kept}), CLIENT) == 0
    claimed = {part.chunk for _, ranges, _ in driver.last.steps for part in ranges}
    lent = [part.chunk for part in driver.last.lent]
    assert claimed
    assert lent[0] not in claimed if kept else claimed == {*lent}


def test_a_run_that_is_over_at_the_start_or_ends_while_it_lends_is_left(
    driver: type[ScriptedDriver], train: TrainConfig
) -> None:
    def ends(scripted: ScriptedDriver) -> None:
        def lease(tokens: int) -> list[DataRange]:
            scripted.done = True
            return []

        scripted.lease = lease  # type: ignore[method-assign]

    for at_start in (ends, ScriptedDriver.request_stop):
        driver.at_start = staticmethod(at_start)
        assert run(train, CLIENT) == 0
        assert (driver.last.steps, driver.last.wanted) == ([], [])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("released", [False, True])
def test_a_signal_makes_it_leave_and_shows_in_the_exit_code_unless_the_run_let_it_go(
    driver: type[ScriptedDriver], train: TrainConfig, number: signal.Signals, code: int, released: bool
) -> None:
    def kill(scripted: ScriptedDriver) -> None:
        if len(scripted.steps) == 3:
            scripted.released = released
            os.kill(os.getpid(), number)

    driver.at_step = staticmethod(kill)
    assert run(train, CLIENT) == (0 if released else code)
    assert len(driver.last.steps) == 3
    assert driver.last.closed == ["finished"]


def test_a_signal_while_it_waits_to_join_is_heard(driver: type[ScriptedDriver], train: TrainConfig) -> None:
    driver.at_start = staticmethod(lambda scripted: os.kill(os.getpid(), signal.SIGTERM))
    assert run(train, CLIENT) == 143
    assert driver.last.steps == []


def test_an_error_is_the_reason_it_leaves_with(driver: type[ScriptedDriver], train: TrainConfig) -> None:
    def fail(scripted: ScriptedDriver) -> None:
        raise Refused(RefusalCode.DATA_PLAN, "another text")

    driver.at_start = staticmethod(fail)
    with pytest.raises(Refused, match="another text"):
        run(train, CLIENT)
    assert driver.last.closed == ["Refused: another text"]


def test_the_wait_of_a_slower_cluster_comes_before_the_driver_hears_of_the_step(
    driver: type[ScriptedDriver], train: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[int, float]] = []

    def wait(signals: StopSignals, timeout_s: float) -> bool:
        waits.append((len(driver.last.steps), timeout_s))
        return False

    monkeypatch.setattr(StopSignals, "wait", wait)
    run(train.model_copy(update={"emulate_gap": 0.5}), CLIENT)
    assert [steps for steps, _ in waits] == list(range(driver.end_after))
    assert all(timeout_s > 0 for _, timeout_s in waits)


def test_the_learning_rate_goes_by_the_runs_tokens(
    driver: type[ScriptedDriver], train: TrainConfig, tmp_path: Path
) -> None:
    driver.at_start = staticmethod(lambda scripted: setattr(scripted, "progress", 9_900))
    slow = train.model_copy(update={"warmup_tokens": 100})
    run(slow, CLIENT.model_copy(update={"tape": tmp_path / "tape"}))
    rates = [record["lr"] for record in read_tape(tmp_path / "tape") if record["kind"] == "step"]
    assert rates[-1] == pytest.approx(train.lr * train.min_lr_fraction, rel=0.01)
    assert schedule_of(slow, 10_000).at(9_900) == pytest.approx(rates[0], rel=0.01)


@pytest.mark.parametrize(
    ("raised", "expected", "sentence"),
    [
        (ValueError("no MASTER_ADDR"), ConfigError, "rank 1 is not told where the other processes of its cluster are"),
        (
            RuntimeError("connection refused"),
            FatalError,
            "rank 1 cannot reach the other processes .* or they have ended",
        ),
    ],
)
def test_a_rank_that_is_alone_says_whether_a_person_must_act(
    train: TrainConfig, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[DipsError], sentence: str
) -> None:
    def init_process_group(backend: str) -> None:
        raise raised

    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(expected, match=sentence):
        run(train.model_copy(update={"parallel": "data=2", "steps": 1}), ClientConfig())


def test_without_a_master_it_trains_for_so_many_steps(train: TrainConfig, tmp_path: Path) -> None:
    """And again to the bit."""
    tapes = [tmp_path / name for name in ("one", "two")]
    for tape in tapes:
        assert run(train.model_copy(update={"steps": 10, "warmup_tokens": 0}), ClientConfig(tape=tape)) == 0
    records, again = ([*read_tape(tape)] for tape in tapes)
    assert [record["loss"] for record in records] == [record["loss"] for record in again]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["steps"] for record in steps] == [2, 4, 6, 8, 10]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert records[-1]["kind"] == "heldout"
    assert records[-1]["tokens"] == 10 * train.step_tokens
    assert records[-1]["loss"] < math.log(256)


def test_training_without_a_master_leaves_the_tape_of_a_clusters_folder_to_the_cluster(
    train: TrainConfig, tmp_path: Path
) -> None:
    """A cluster of the same settings may be running."""
    client = ClientConfig(cluster_id="a", checkpoint_dir=tmp_path / "kept")
    assert run(train.model_copy(update={"steps": 1, "warmup_tokens": 0}), client) == 0
    assert not (tmp_path / "kept").exists()


def test_a_resumed_loop_makes_the_batches_that_were_to_come(
    driver: type[ScriptedDriver], train: TrainConfig, tmp_path: Path
) -> None:
    run(train, CLIENT)
    first = driver.last
    whole = [ranges for _, ranges, _ in first.steps]

    kept: list[tuple[Any, list[DataRange]]] = []

    def save_after_two(scripted: ScriptedDriver) -> None:
        if len(scripted.steps) == 2:
            used = [part for _, ranges, _ in scripted.steps for part in ranges]
            kept.append((saved(scripted.inner, tmp_path), list(without(joined(scripted.lent), used))))
            scripted.done = True

    driver.at_step = staticmethod(save_after_two)
    run(train, CLIENT)
    ((state, unused),) = kept

    def resume(scripted: ScriptedDriver) -> None:
        scripted.inner.restore(*state)
        scripted.resumed, scripted.held_ranges = True, tuple(unused)

    driver.at_step = staticmethod(lambda scripted: None)
    driver.at_start = staticmethod(resume)
    run(train, CLIENT)
    again = [ranges for _, ranges, _ in driver.last.steps]
    assert again[: len(whole) - 2] == whole[2:]
