"""dips.DiLoCo in one process, and on two ranks of one cluster, which are threads here, against a run in memory."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.run_for_workers import F32, FlatModel, RefuseCall
from support.run_in_memory import Failure, RunInMemory
from support.trainer_models import LENGTH, Model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dips
from dips.core.errors import TERMINATED, ConfigError, DipsError, RefusalCode
from dips.core.ids import Version
from dips.core.messages import VerdictKind
from dips.core.observe.tape import read_tape
from dips.worker.integrations.trainer_loop import KEPT, CallbackOptions, Joined, TrainerLoop
from dips.worker.loop import Sigterm
from dips.worker.parallel.ranks import Ranks

BASE = FlatModel(7).theta
T = TypeVar("T")


class Together:
    """Two ranks, which are threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, rank_does: Callable[[int], T]) -> list[T | str]:
        here, store = threading.local(), dist.HashStore()  # type: ignore[attr-defined]
        self.monkeypatch.setattr(dist, "get_rank", lambda: here.rank)
        self.monkeypatch.setattr("dips.worker.loop.ranks_here", lambda group, cut: Ranks((0, 1), store))

        def one(rank: int) -> T | str:
            here.rank = rank
            try:
                return rank_does(rank)
            except DipsError as error:
                return f"{type(error).__name__}: {error}"

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, range(2)))


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(monkeypatch)


def flat(model: torch.nn.Module) -> F32:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


class Loop:
    """One rank's model and optimizer; a step adds the same to each parameter."""

    def __init__(self, run: RunInMemory, rank: int, *, replicas: bool = True, **given: Any) -> None:
        self.run, self.rank = run, rank
        self.model = Model(rank)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        arguments: dict[str, Any] = {
            "tokens_per_step": 10 + rank, "master": run.address, "cluster_id": "a", "insecure": True,
            "parallel": dips.Parallel(replicas=replicas),
        }  # fmt: skip
        self.given = {**arguments, **given}
        self.sync = dips.DiLoCo(self.model, self.optimizer, **self.given)

    def steps_by(self, optimizer: torch.optim.Optimizer, given: torch.optim.Optimizer | None = None) -> None:
        """given: what DiLoCo gets, where it is another one."""
        self.optimizer = optimizer
        self.sync = dips.DiLoCo(self.model, given or optimizer, **self.given)

    def gradients(self, value: float | None) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None if value is None else torch.full_like(parameter, value)

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.gradients(-1.0)
            if self.rank == 0:
                self.run.clock.advance(1.0)
            self.sync.report(float(2 + self.rank))
            self.optimizer.step()

    def train(self, n: int, before: Callable[[], object] = lambda: None) -> None:
        """A whole block of n steps; before: what is done in it before these."""
        with self.sync:
            before()
            self.steps(n)

    def train_to_the_end(self, then: Callable[[], None] = lambda: None) -> None:
        """then: what happens while it waits at its end."""
        with self.sync as sync:
            while not sync.done:
                self.steps(1)
            self.run.while_waiting = then

    def is_not_entered(self) -> None:
        with self.sync:
            raise AssertionError("it is entered")


@pytest.fixture
def loop(run: RunInMemory) -> Loop:
    """Of one process."""
    return Loop(run, 0, replicas=False)


def after(n_steps: int, start: F32 = BASE) -> bytes:
    for _ in range(n_steps):
        start = start + np.float32(1.0)
    return start.tobytes()


ROUND = ["push_begun", "push_sent", "admitted", "verdict", "installed"]


class Place:
    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_two_replicas_push_their_shares_and_all_get_the_version(
    run: RunInMemory, together: Together, tmp_path: Path
) -> None:
    """Tokens count once for each rank, losses by their tokens; the last two steps are pushed when both leave."""

    def one(rank: int) -> list[object]:
        loop = Loop(run, rank, tape=tmp_path / "tape" if rank == 0 else None)
        with loop.sync as sync:
            start = flat(loop.model).tobytes()
            loop.steps(8)
            told = [flat(loop.model).tobytes(), sync.version, sync.progress, sync.steps, sync.done]
            loop.steps(2)
        return [start, *told]

    told = [BASE.tobytes(), after(8), Version(1, 2), 168, 8, False]
    assert together(one) == [told, told]
    assert [(push.tokens, push.steps) for push in run.pushes] == [(84, 4), (84, 4), (42, 2)]
    assert [push.mean_loss for push in run.pushes] == pytest.approx([(2 * 10 + 3 * 11) / 21] * 3)
    assert [run.theta_of(push).tobytes() for push in run.verdicts] == [after(4), after(8), after(10)]
    kinds = [record["kind"] for record in read_tape(tmp_path / "tape")]
    assert kinds == ["joined", "installed", *ROUND, *ROUND, *ROUND[:-1], "leaving", "left"]
    assert (run.joins[0].pushers, len(run.leaves)) == (2, 1)


def test_a_transfer_of_which_a_part_fails_is_begun_again_by_all(
    run: RunInMemory, together: Together, tmp_path: Path
) -> None:
    def one(rank: int) -> tuple[bytes, Version | None]:
        loop = Loop(run, rank, tape=tmp_path / "tape" if rank == 0 else None)
        with loop.sync as sync:
            loop.steps(5)
            if rank == 0:
                run.failures = [Failure("cut"), Failure(""), Failure(""), Failure(""), Failure("gone")]
            loop.steps(5)
            return flat(loop.model).tobytes(), sync.version

    run.settings = replace(run.settings, sync_every_steps=6)
    assert together(one) == [(after(10), Version(1, 1))] * 2
    assert (next(iter(run.attempts.values())), run.theta_of(next(iter(run.verdicts))).tobytes()) == (2, after(6))
    failed = [(e["kind"], e["reason"][8:]) for e in read_tape(tmp_path / "tape") if "failed" in e["kind"]]
    assert failed == [("push_failed", "cut"), ("pull_failed", "gone")]


def test_an_excluded_push_replaces_the_model_and_resets_the_optimizer_on_all_ranks(
    run: RunInMemory, together: Together
) -> None:
    run.decide = lambda push: VerdictKind.EXCLUDED

    def one(rank: int) -> tuple[bytes, int]:
        loop = Loop(run, rank)
        loop.optimizer.param_groups[0]["momentum"] = 0.5
        with loop.sync:
            loop.steps(3)
            kept = len(loop.optimizer.state)
            loop.steps(1)
            return flat(loop.model).tobytes(), kept - len(loop.optimizer.state)

    assert together(one) == [(BASE.tobytes(), 5)] * 2


def test_ranks_go_on_from_their_checkpoint_to_the_bit(
    run: RunInMemory, monkeypatch: pytest.MonkeyPatch, together: Together, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"

    def looping(rank: int, **given: Any) -> tuple[Loop, Place]:
        place = Place()
        kept: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every_s": 0.0, "resume": True}
        return Loop(run, rank, state={"place": place}, **kept, **given), place

    def one(rank: int) -> tuple[bytes, int, int, bool]:
        loop, place = looping(rank)
        with loop.sync as sync:
            begins, at = flat(loop.model).tobytes(), place.n
            place.n = 7
            loop.steps(3 - sync.steps % 4)
            return begins, at, sync.steps, bool(list(folder.glob("checkpoint-*.json")))

    assert together(one) == [(BASE.tobytes(), 0, 3, True)] * 2
    assert [push.steps for push in run.pushes] == [3]
    run.verdicts.clear()  # the push that was made after the checkpoint came to nothing
    run.fence, run.version = 0, Version(1, 0)
    assert together(one) == [(after(3), 7, 3, True)] * 2
    assert [push.steps for push in run.pushes] == [3, 3]
    run.verdicts.clear()
    run.fence, run.version = 0, Version(1, 0)
    monkeypatch.setattr("dips.worker.loop.ranks_here", lambda group, cut: None)
    alone, place = looping(0, replicas=False)
    with alone.sync as sync:  # one process goes on from what several ranks have written
        assert (flat(alone.model).tobytes(), sync.steps, place.n) == (after(3), 3, 7)
        place.n = 8
        alone.steps(1)
    alone, place = looping(0, replicas=False)
    with alone.sync as sync:  # and from what it has written itself
        assert (sync.steps, place.n) == (4, 8)


def test_a_leader_that_cannot_join_ends_all_ranks_with_its_error(run: RunInMemory, together: Together) -> None:
    def refuse(method: str, request: object) -> None:
        if method == "Join":
            raise RefuseCall(RefusalCode.LAYOUT, "another shape")

    run.hook = refuse
    assert together(lambda rank: Loop(run, rank).is_not_entered()) == ["Refused: another shape"] * 2


def test_a_leader_that_cannot_write_its_record_ends_all_ranks_with_its_error(
    run: RunInMemory, together: Together, tmp_path: Path
) -> None:
    told = together(lambda rank: Loop(run, rank, tape=None if rank else tmp_path).is_not_entered())
    assert (told[0] == told[1], str(tmp_path) in str(told[0]), run.joins) == (True, True, [])


def test_failpoints_that_are_not_enabled_let_no_rank_enter(
    run: RunInMemory, monkeypatch: pytest.MonkeyPatch, together: Together
) -> None:
    monkeypatch.setenv("DIPS_FAILPOINTS", "worker.nothing=off")
    told = together(lambda rank: Loop(run, rank).is_not_entered())
    assert all("failpoints are not enabled" in str(said) for said in told)
    monkeypatch.setattr("dips.worker.loop.ranks_here", lambda group, cut: None)
    with pytest.raises(ConfigError, match="failpoints are not enabled"):
        Loop(run, 0, replicas=False).is_not_entered()


def test_ranks_that_shared_the_model_out_by_other_chunks_must_be_started_again(
    run: RunInMemory, together: Together
) -> None:
    def one(rank: int) -> None:
        loop = Loop(run, rank)
        with loop.sync:
            loop.steps(3)
            if rank == 0:
                run.restart()
                run.settings = replace(run.settings, chunk_bytes=2048)
                run.passes(0.0)
            loop.steps(3)

    told = together(one)
    assert len(set(told)) == 1
    assert str(told[0]).startswith("ConfigError: the master's chunk_bytes was 4096 and is 2048 now")


def test_a_sigterm_of_one_rank_ends_all_after_the_same_step_with_all_their_work(
    run: RunInMemory, together: Together
) -> None:
    def one(rank: int) -> tuple[object, int]:
        loop = Loop(run, rank)

        def caught() -> None:
            loop.steps(1)
            loop.sync._sigterm.caught = rank == 1  # as the handler does, which the main thread alone can have

        with pytest.raises(SystemExit) as ended:
            loop.train(5, caught)
        return ended.value.code, loop.sync.steps

    told = together(one)
    steps = sum(push.steps for push in run.pushes)
    assert told == [(TERMINATED, steps)] * 2
    assert (0 < steps < 6, [leave.reason for leave in run.leaves]) == (True, ["SIGTERM"])


def ends_by(raised: type[BaseException] | None, trains: Callable[[], None]) -> None:
    with pytest.raises(raised) if raised is not None else nullcontext() as ended:
        trains()
    assert ended is None or getattr(ended.value, "code", TERMINATED) == TERMINATED
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("how", "raised", "pushed", "reason"),
    [
        ("ends", None, [2], "the training loop has ended"),
        ("fails", ValueError, [], "ValueError: no"),
        ("ctrl-C between steps", KeyboardInterrupt, [2], "KeyboardInterrupt"),
        ("ctrl-C in a step", KeyboardInterrupt, [], "KeyboardInterrupt"),
        ("ctrl-C after torch has made an optimizer's state", KeyboardInterrupt, [2], "KeyboardInterrupt"),
        ("ctrl-C after a step that GradScaler skips", KeyboardInterrupt, [2], "KeyboardInterrupt"),
        ("SIGTERM, asks done", SystemExit, [2], "SIGTERM"),
        ("SIGTERM, never asks", SystemExit, [3], "SIGTERM"),
        ("SIGTERM, which ends its loader, too", SystemExit, [2], "SIGTERM"),
        ("SIGTERM, and fails in a step", ValueError, [], "SIGTERM"),
    ],
)
def test_how_a_loop_ends_decides_what_becomes_of_its_last_steps(
    run: RunInMemory, how: str, raised: type[BaseException] | None, pushed: list[int], reason: str
) -> None:
    loop = Loop(run, 0, replicas=False, steps=2 if how == "ends" else None)
    loop.steps_by(torch.optim.SGD(loop.model.parameters(), lr=1.0, fused=True))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def fail(*_: object) -> None:
        raise ValueError("no")

    def trains() -> None:
        with loop.sync as sync:
            loop.steps(2)
            match how:
                case "ends":
                    assert sync.done
                case "fails":
                    raise ValueError("no")
                case "ctrl-C between steps":
                    interrupt()
                case "ctrl-C in a step":
                    loop.optimizer.register_step_pre_hook(interrupt)
                    loop.steps(1)
                case "ctrl-C after torch has made an optimizer's state":
                    loop.gradients(None)
                    get_optimizer_state_dict(loop.model, loop.optimizer)
                    interrupt()
                case "ctrl-C after a step that GradScaler skips":
                    loop.optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
                    loop.steps(1)
                    interrupt()
                case _:
                    for _ in range(2):  # as launchers do, to a group and to each process
                        os.kill(os.getpid(), signal.SIGTERM)
                    if how == "SIGTERM, asks done":
                        assert sync.done
                    elif how == "SIGTERM, which ends its loader, too":
                        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
                    elif how == "SIGTERM, and fails in a step":
                        loop.optimizer.register_step_pre_hook(fail)
                        loop.steps(1)
                    else:
                        loop.steps(1)
                        raise AssertionError("it goes on")

    ends_by(raised, trains)
    assert ([push.steps for push in run.pushes], [leave.reason for leave in run.leaves]) == (pushed, [reason])


@pytest.mark.parametrize(
    ("comes", "raised", "says"),
    [
        ("a merge", None, "left the run with version 1:0 (the training loop has ended): since the start 2 steps with"),
        ("SIGTERM", SystemExit, "SIGTERM: this cluster has left the run"),
        ("ctrl-C", KeyboardInterrupt, "interrupted while leaving: 2 steps with 20 tokens may be lost"),
        ("the run's end", None, "without 2 steps with 20 tokens: the run has ended"),
    ],
)
def test_what_ends_the_wait_of_a_loop_that_ended_before_the_runs_first_merge(
    run: RunInMemory, caplog: pytest.LogCaptureFixture, comes: str, raised: type[BaseException] | None, says: str
) -> None:
    caplog.set_level(logging.INFO)
    loop, comes_s = Loop(run, 0, replicas=False, steps=2), run.clock.monotonic_s() + 300.0
    run.decide = lambda push: None

    def happens() -> None:
        if run.clock.monotonic_s() < comes_s:
            return
        run.while_waiting = lambda: None
        match comes:
            case "a merge":
                run.decide = lambda push: VerdictKind.APPLIED
            case "SIGTERM":
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
            case "ctrl-C":
                raise KeyboardInterrupt
            case _:
                run.stop = True
                run.decide = lambda push: VerdictKind.ABORTED

    ends_by(raised, lambda: loop.train_to_the_end(happens))
    assert says in caplog.text
    assert run.clock.monotonic_s() < comes_s + 15.0


@contextmanager
def handles_sigterm(then: Callable[[], None]) -> Iterator[None]:
    """A program's own handler, which is there again after all loops."""

    def handler(number: int, frame: object) -> None:
        assert number == signal.SIGTERM
        then()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_program_that_waits_in_its_own_handler_of_sigterm_has_ended_the_wait_before() -> None:
    heard: list[str] = []
    with handles_sigterm(lambda: heard.append("theirs")):
        ours = Sigterm(lambda: heard.append("ours"))
        ours.accompany()
        os.kill(os.getpid(), signal.SIGTERM)
        ours.give_back()
    assert heard == ["ours", "theirs"]


def test_ranks_whose_trainer_left_their_loops_open_push_their_complete_steps_and_do_not_wait(
    run: RunInMemory, together: Together
) -> None:
    run.decide = lambda push: None
    given = {"master": run.address, "cluster_id": "a", "insecure": True, "parallel": dips.Parallel(replicas=True)}

    def one(rank: int) -> None:
        model, joined = Model(rank), Joined()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        joined.begin(lambda: TrainerLoop(model, optimizer, CallbackOptions(10, None, given), None, None))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        joined.leave_open()

    began_s = run.clock.monotonic_s()
    assert together(one) == [None] * 2
    assert ([push.steps for push in run.pushes], run.clock.monotonic_s() < began_s + 300.0) == ([1], True)


def test_a_sigterm_that_comes_to_one_rank_ends_the_wait_of_all_at_their_end(
    run: RunInMemory, together: Together
) -> None:
    run.decide = lambda push: None
    comes_s = run.clock.monotonic_s() + 300.0
    loops = [Loop(run, rank, steps=2) for rank in range(2)]

    def happens() -> None:
        loops[1].sync._sigterm.caught = run.clock.monotonic_s() >= comes_s

    def one(rank: int) -> object:
        with pytest.raises(SystemExit) as ended:
            loops[rank].train_to_the_end(happens)
        return ended.value.code

    assert together(one) == [TERMINATED] * 2
    assert ([leave.reason for leave in run.leaves], run.clock.monotonic_s() < comes_s + 15.0) == (["SIGTERM"], True)


def test_a_sigterm_that_comes_while_a_loop_begins_ends_its_wait_for_the_run(
    run: RunInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it can hear of it: kernels may compile for minutes."""

    def compiles(*given: object) -> tuple[str, ...]:
        os.kill(os.getpid(), signal.SIGTERM)
        return ()

    monkeypatch.setattr("dips.worker.loop.running_statistics", compiles)
    run.down()
    began_s = run.clock.monotonic_s()

    def trains() -> None:
        with Loop(run, 0, replicas=False).sync as sync:
            assert sync.done

    with pytest.raises(SystemExit):
        trains()
    assert run.clock.monotonic_s() < began_s + 15.0


def test_a_users_own_handler_of_sigterm_stays(run: RunInMemory) -> None:
    heard: list[int] = []
    loop = Loop(run, 0, replicas=False, steps=2)
    with handles_sigterm(lambda: heard.append(1)), loop.sync as sync:
        while not sync.done:
            loop.steps(1)
            os.kill(os.getpid(), signal.SIGTERM)
    assert (len(heard), sync.steps, run.tokens) == (2, 2, 20)


def test_a_process_forked_in_the_loop_has_no_part_in_it(loop: Loop, run: RunInMemory) -> None:
    """Such as a loader's: SIGTERM ends it, its steps are its own, and it leaves the block without a word to the run."""
    with loop.sync as sync:
        loop.steps(2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                loop.optimizer.step()
                sync.__exit__(None, None, None)
                if (signal.getsignal(signal.SIGTERM), sync.done, sync.steps) == (signal.SIG_DFL, True, 2):
                    os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        loop.steps(2)
    assert ([push.steps for push in run.pushes], len(run.leaves)) == ([4], 1)


def test_a_sigterm_that_comes_before_a_forked_process_has_run_a_line_ends_it(loop: Loop) -> None:
    """As multiprocessing's terminate() right after start(): the handler swallowed it, and join() waited for ever."""
    ends = []
    with loop.sync:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(1)
            os.kill(child, signal.SIGTERM)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert ends == [-signal.SIGTERM] * 20


def test_paths_stay_where_they_were_when_the_program_changes_its_directory(
    run: RunInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    loop = Loop(run, 0, replicas=False, checkpoint_dir="kept", checkpoint_every_s=0.0, tape="tape")
    monkeypatch.chdir("elsewhere")
    with loop.sync as sync:
        monkeypatch.chdir("/")
        loop.steps(4)
        assert not sync.done
    assert [push.steps for push in run.pushes] == [4]
    assert [record["kind"] for record in read_tape(tmp_path / "tape")][-1] == "left"
    assert {"push.json"} < {file.name for file in (tmp_path / "kept").iterdir()}


def test_what_would_count_a_step_twice_or_one_that_is_none(loop: Loop) -> None:
    """torch makes an optimizer's state by a step of its own."""
    loop.steps_by(torch.optim.AdamW(loop.model.parameters(), lr=1.0))
    with loop.sync as sync:
        assert get_optimizer_state_dict(loop.model, loop.optimizer)["state"]
        assert sync.steps == 0
        loop.steps(2)
        assert sync.steps == 2


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_model_that_is_converted_in_the_block_is_refused_before_its_push(
    run: RunInMemory, together: Together, n_ranks: int
) -> None:
    def one(rank: int) -> None:
        loop = Loop(run, rank, replicas=n_ranks > 1)
        loop.train(4, lambda: loop.model.to(torch.bfloat16))

    says = "is bfloat16, and was float32 when the loop was entered"
    if n_ranks == 1:
        with pytest.raises(ConfigError, match=says):
            one(0)
    else:
        assert all(says in str(each) for each in together(one))
    assert not run.verdicts


@pytest.mark.parametrize(("trains", "reads", "each", "told"), [
    ("a copy's", 200, 1, "64 steps were made by other optimizers (SGD)"),
    ("by hand", 200, 1, "`done` was read 128 times, and the model's parameters change"),
    ("not, and waits for data", 1100, 1, ""), ("not, and evaluates averaged weights", 1100, 1, ""),
    ("the given one", 300, 120, ""), ("the given one", 300, 1, ""),
])  # fmt: skip
def test_a_loop_whose_steps_are_not_counted_is_told_so(
    loop: Loop, caplog: pytest.LogCaptureFixture, trains: str, reads: int, each: int, told: str
) -> None:
    """each: batches accumulated for a step."""
    model = copy.deepcopy(loop.model) if trains == "a copy's" else loop.model
    with loop.sync as sync:
        loop.steps(1)
        if trains == "a copy's":
            loop.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for i in range(reads):
            assert not sync.done
            with torch.no_grad():
                for parameter in model.parameters():
                    match trains:
                        case "by hand":
                            parameter.add_(1.0)
                        case "not, and evaluates averaged weights":
                            parameter.add_((1.0, -1.0)[i // 70 % 2] if i % 70 == 0 else 0.0)
            if i % each == each - 1 and trains in ("a copy's", "the given one"):
                loop.steps(1)
    messages = [record.message for record in caplog.records if "since the last counted step" in record.message]
    assert len(messages) == bool(told)
    assert told in "".join(messages)


def test_a_step_without_any_gradient_is_none_and_told_once(run: RunInMemory, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(run, 0, replicas=False)
    with loop.sync as sync:
        loop.steps(1)
        for _ in range(3):
            sync.count(7)
            loop.optimizer.zero_grad()
            loop.optimizer.step()
        assert sync.steps == 1
        loop.steps(3)
    assert [(push.steps, push.tokens) for push in run.pushes] == [(4, 40)]
    assert sum("no parameter of the optimizer has a gradient" in record.message for record in caplog.records) == 1


def test_a_step_that_counts_far_more_tokens_than_the_model_was_given_is_refused(loop: Loop) -> None:
    batch = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    with loop.sync as sync:
        loop.model(**batch)
        loop.steps(1)
        sync.count(10**9)
        loop.model(**batch)
        with pytest.raises(ConfigError, match=f"counts 1000000000 tokens, .* the {2 * LENGTH} elements"):
            loop.optimizer.step()
        assert sync.steps == 1


class Searching(torch.optim.SGD):
    """Needs no gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data + 1.0


class Unseen(torch.optim.Optimizer):
    """Steps in hooks of backward(), without an optimizer for each, and lets the gradients go: step() does nothing."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_steps_made_in_backward_and_those_that_need_no_gradients_are_counted(run: RunInMemory) -> None:
    """Also where no element that is looked at changes, as in 16 bits."""
    model = Model(0)
    searching = Searching(model.parameters(), lr=1.0)
    for optimizer in (searching, Unseen(list(model.parameters()))):
        with dips.DiLoCo(
            model, optimizer, tokens_per_step=10, master=run.address, cluster_id="a", insecure=True
        ) as sync:
            for _ in range(2):
                optimizer.step()
        assert sync.steps == 2
    loop = Loop(run, 0, replicas=False)
    loop.optimizer.inside = torch.optim.SGD(loop.model.parameters(), lr=0.0)  # type: ignore[attr-defined]
    loop.steps_by(loop.optimizer)
    with loop.sync as sync:
        for n_steps in (1, 2, 2):
            loop.gradients(1.0 if sync.steps < 2 else None)
            loop.optimizer.inside.step()  # type: ignore[attr-defined]
            loop.optimizer.zero_grad()
            loop.optimizer.step()
            assert sync.steps == n_steps


def test_ranks_count_a_step_alike_if_one_of_them_has_gradients_and_else_not(
    run: RunInMemory, together: Together, caplog: pytest.LogCaptureFixture
) -> None:
    """As where one of them keeps the optimizer's state of what is frozen alone; or a loss was not finite."""

    def one(rank: int) -> int:
        loop = Loop(run, rank)
        with loop.sync as sync:
            loop.steps(1)
            for has_gradients in (rank == 0, False, False):
                loop.gradients(0.0 if has_gradients else None)
                loop.optimizer.step()
            loop.steps(2)
        return sync.steps

    assert together(one) == [6, 6]
    assert [(push.steps, push.tokens) for push in run.pushes] == [(4, 84)]
    assert sum("no rank's optimizer had a gradient" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_are_given_the_same_batches_are_told_so_once(
    run: RunInMemory, together: Together, caplog: pytest.LogCaptureFixture, same: bool
) -> None:
    def one(rank: int) -> None:
        loop = Loop(run, rank)
        with loop.sync:
            for n in range(12):
                loop.model.eval()
                loop.model(torch.zeros(1))  # equal in an evaluation
                loop.model.train()
                loop.model(torch.full((1,), float(n if same or n == 0 else 2 * n + rank)))  # the first one by accident
                loop.steps(1)

    together(one)
    messages = [record.message for record in caplog.records if "began with the same batches" in record.message]
    assert len(messages) == same
    assert all(message.startswith("ranks 0, 1 of this cluster") for message in messages)
    assert [push.steps for push in run.pushes] == [4, 4, 4]


def test_weights_that_an_evaluation_puts_in_place_and_back_have_no_effect(
    loop: Loop, run: RunInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(loop.model)
    with loop.sync as sync:
        for _ in range(10):
            loop.steps(1)
            averaged.update_parameters(loop.model)
            own = copy.deepcopy(loop.model.state_dict())
            loop.model.load_state_dict(averaged.module.state_dict())
            assert not sync.done
            loop.model.load_state_dict(own)
    assert flat(loop.model).tobytes() == after(10)
    assert [push.steps for push in run.pushes] == [4, 4, 2]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_steps_after_the_runs_end_are_told_of_at_the_first_and_counted_at_the_blocks_end(
    run: RunInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """Also to a loop that reads `done` and goes on."""
    for reads in (False, True):
        run.stop = False
        loop = Loop(run, 0, replicas=False)
        caplog.clear()
        with loop.sync as sync:
            loop.steps(4)
            run.stop = True
            run.passes(0.0)
            loop.steps(1)
            assert "not counted" not in caplog.text, "it may read `done` now"
            for _ in range(3):
                assert not reads or sync.done
                loop.steps(1)
            assert sum("this step and later ones are not counted" in r.message for r in caplog.records) == 1
        assert "3 steps with 30 tokens after the run's end are not counted" in caplog.text


@pytest.mark.parametrize("tape", [None, "none", "other"])
def test_a_cluster_with_a_checkpoint_directory_writes_its_tape_there(
    run: RunInMemory, tmp_path: Path, tape: str | None
) -> None:
    given = str(tmp_path / "other") if tape == "other" else tape
    for checkpoint_dir in (None, tmp_path / "kept"):
        Loop(run, 0, replicas=False, checkpoint_dir=checkpoint_dir, tape=given).train(4)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    tapes = [name for name in written if "checkpoint-" not in name and ("tape" in name or name == "other")]
    assert tapes == {None: ["kept/a.tape.jsonl"], "none": [], "other": ["other"]}[tape]
    for name in tapes:
        assert [record["kind"] for record in read_tape(tmp_path / name)][-1] == "left"


def test_a_cluster_that_cannot_have_its_folder_to_itself_writes_no_tape_there(run: RunInMemory, tmp_path: Path) -> None:
    """Another process of this name may write one."""
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="checkpoints cannot be kept in"):
        Loop(run, 0, replicas=False, checkpoint_dir=tmp_path).is_not_entered()
    assert not (tmp_path / "a.tape.jsonl").exists()


def test_of_several_ranks_one_writes_the_tape(run: RunInMemory, together: Together, tmp_path: Path) -> None:
    assert together(lambda rank: Loop(run, rank, checkpoint_dir=tmp_path).train(4)) == [None, None]
    assert [record["kind"] for record in read_tape(tmp_path / "a.tape.jsonl")].count("joined") == 1


def test_a_program_without_logging_sees_what_its_cluster_does(
    run: RunInMemory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    Loop(run, 0, replicas=False).train(1)
    ours = logging.getLogger("dips")
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)
    assert "dips: joined" in capsys.readouterr().err


def test_a_block_that_trained_and_counted_no_step_is_an_error(loop: Loop, run: RunInMemory) -> None:

    def trains_and_evaluates() -> None:
        with loop.sync as sync, torch.no_grad():
            next(loop.model.parameters()).add_(1.0)
            assert not any(sync.done for _ in range(100))

    with pytest.raises(ConfigError, match="no step of this loop was counted, and the model's parameters changed"):
        trains_and_evaluates()
    assert len(run.leaves) == 1
    with Loop(run, 0, replicas=False).sync as sync:
        assert not sync.done, "to look at the model alone is no mistake"


class Container(torch.optim.Optimizer):
    """As torchtitan's: it has all parameters, and the optimizers that it contains have their moments."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for each in optimizers for p in each.param_groups[0]["params"]], {})
        self.held: Any = optimizers
        self.each: Callable[[], list[torch.optim.Optimizer]] = lambda: optimizers  # hidden

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.each():
            each.step()


def contained(loop: Loop) -> Container:
    parameters = list(loop.model.parameters())
    return Container([torch.optim.SGD(half, lr=1.0, momentum=0.5) for half in (parameters[:2], parameters[2:])])


def by_kind(optimizers: list[torch.optim.Optimizer]) -> object:
    """Each among others in dictionaries and lists, one of which holds itself, and with a way back to its container."""
    kept: dict[str, Any] = {"first": [optimizers[:1]], "rest": {"b": (optimizers[1],)}}
    kept["all"] = kept
    return kept


@pytest.mark.parametrize("hold", [list, by_kind])
def test_a_container_of_optimizers_steps_once_and_its_moments_are_reset_with_the_model(
    loop: Loop, run: RunInMemory, hold: Callable[[list[torch.optim.Optimizer]], object]
) -> None:
    run.decide = lambda push: VerdictKind.EXCLUDED
    optimizer = contained(loop)
    optimizer.held = hold(optimizer.each())
    for each in optimizer.each():
        each.container = optimizer  # type: ignore[attr-defined]
    loop.steps_by(optimizer)
    with loop.sync as sync:
        loop.steps(3)
        assert ([len(each.state) for each in optimizer.each()], sync.steps) == ([2, 3], 3)
        loop.steps(1)
        assert [len(each.state) for each in optimizer.each()] == [0, 0]


class Hides(torch.optim.SGD):
    """Its moments are where only its own state_dict() finds them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.moments = [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}


def test_an_optimizer_whose_moments_cannot_be_found_is_refused(loop: Loop) -> None:
    part = contained(loop)
    part.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="Container contains SGD, which does not step 1 of its parameters"):
        dips.DiLoCo(loop.model, part, tokens_per_step=10)
    loop.steps_by(Hides(loop.model.parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="Hides keeps what it knows of earlier steps neither"):
        loop.train(1)
    with pytest.raises(ConfigError, match="optimizer is a Linear: give a torch"):
        dips.DiLoCo(loop.model, cast(Any, torch.nn.Linear(1, 1)), tokens_per_step=10)


class Helper:
    """Keeps an optimizer where no search of attributes finds it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Delegates(torch.optim.SGD):
    """Steps by the optimizer of a helper, or as SGD does once that is gone."""

    helper: Helper | None = None

    def step(self, closure: Any = None) -> Any:
        return super().step() if self.helper is None else self.helper.optimizer.step()


@pytest.mark.parametrize("where", ["a helper of the given one", "the program", "the program, from the sixth step on"])
def test_an_optimizer_of_the_model_that_the_loop_does_not_know_is_refused_before_its_push(
    loop: Loop, run: RunInMemory, where: str
) -> None:
    """Nothing that it has stepped is pushed."""
    parameters = list(loop.model.parameters())
    other = torch.optim.SGD(parameters[:1], lr=1.0, momentum=0.5)
    loop.steps_by(Delegates(parameters, lr=1.0))
    n_before = 5 if "sixth" in where else 0

    def train() -> None:
        with loop.sync:
            loop.steps(n_before)
            if "helper" in where:
                cast(Delegates, loop.optimizer).helper = Helper(other)
            for _ in range(9):
                loop.gradients(-1.0)
                if "helper" not in where:
                    other.step()
                loop.steps(1)

    with pytest.raises(ConfigError, match="SGD steps 1 of the model's parameters, and is none of the optimizers"):
        train()
    assert [push.steps for push in run.pushes] == [4] * (n_before // 4)
    other.step()  # after the block it is no one's matter


class Around(torch.optim.SGD):
    """Steps by the optimizer of a helper, as a wrapper that keeps it in an object of its own."""

    def __init__(self, inner: torch.optim.Optimizer, state: Any = None) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=1.0)
        self.helper = Helper(inner)
        self.state = {} if state is None else state

    def step(self, closure: Any = None) -> Any:
        return self.helper.optimizer.step()


@pytest.mark.parametrize("given", ["the inner one", "the outer one, which shares its state", "the outer one"])
def test_an_optimizer_around_a_given_one_may_be_stepped_and_one_inside_that_keeps_no_moments_of_its_own(
    loop: Loop, run: RunInMemory, given: str
) -> None:
    inner = torch.optim.SGD(loop.model.parameters(), lr=1.0, momentum=0.5 if "state" in given else 0.0)
    outer = Around(inner, inner.state if "state" in given else None)
    loop.steps_by(outer, inner if "inner" in given else outer)
    loop.train(8)
    assert [push.steps for push in run.pushes] == [4, 4]


class Halves(torch.optim.SGD):
    """Changes the parameters after the step of its parent, whose hooks torch calls too where there is a plain SGD."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


def test_a_step_that_calls_its_parents_is_one_and_is_pushed_as_it_ends(loop: Loop, run: RunInMemory) -> None:
    loop.steps_by(Halves(loop.model.parameters(), lr=1.0))
    loop.train(4)
    assert [(push.steps, push.tokens) for push in run.pushes] == [(4, 40)]
    trained = BASE
    for _ in range(4):
        trained = (trained + np.float32(1.0)) * np.float32(0.5)
    assert run.theta_of(max(run.verdicts)).tobytes() == trained.tobytes()


class Lookahead(torch.optim.Optimizer):
    """Begins as timm's does, so that torch calls no hooks of its step()."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base, self.defaults, self.param_groups, self.state = base, base.defaults, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


def test_steps_of_an_optimizer_whose_hooks_torch_does_not_call_are_counted(loop: Loop) -> None:
    loop.steps_by(Lookahead(torch.optim.SGD(loop.model.parameters(), lr=1.0)))
    loop.train(4)
    assert loop.sync.steps == 4


class Broken(torch.optim.SGD):
    def register_step_post_hook(self, hook: Any) -> Any:
        raise RuntimeError("no hook")


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_loop_that_fails_after_it_has_joined_leaves_the_run_and_no_hook(
    run: RunInMemory, together: Together, n_ranks: int
) -> None:
    def one(rank: int) -> bool:
        loop = Loop(run, rank, replicas=n_ranks > 1)
        loop.steps_by(Broken(loop.model.parameters(), lr=1.0))
        with pytest.raises(RuntimeError, match="no hook"):
            loop.is_not_entered()
        return bool(loop.model._forward_pre_hooks or loop.optimizer._optimizer_step_pre_hooks)

    assert (together(one) if n_ranks > 1 else [one(0)]) == [False] * n_ranks
    assert [leave.reason for leave in run.leaves] == ["RuntimeError: no hook"]


def test_optimizers_of_other_models_are_left_alone(
    loop: Loop, run: RunInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    other = Model(1)
    theirs = torch.optim.AdamW(other.parameters(), lr=1.0)
    with loop.sync as sync:
        for _ in range(8):
            for parameter in other.parameters():
                parameter.grad = torch.ones_like(parameter)
            theirs.step()
            loop.steps(1)
        assert sync.steps == 8
    assert [push.steps for push in run.pushes] == [4, 4]
    assert len(theirs.state) == 5
    assert "other optimizers" not in caplog.text, "of so few steps"


def test_a_model_and_an_optimizer_are_in_one_open_block_only(loop: Loop) -> None:
    given = loop.given
    inner = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    with dips.DiLoCo(loop.model, Container([inner]), **given):
        for optimizer in (inner, Container([inner]), torch.optim.SGD(loop.model.parameters(), lr=1.0)):
            with pytest.raises(ConfigError, match="counted by another"):
                dips.DiLoCo(loop.model, optimizer, **given)
    assert dips.DiLoCo(loop.model, inner, **given)


def test_steps_that_change_nothing_are_told_of_once_until_they_do(
    run: RunInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """The run may merge such a push: on another base than the newest version, or with what rounding lost before."""
    loop, told = Loop(run, 0, replicas=False), list[int]()
    with loop.sync:
        for rate in (1.0, 0.0, 1.0, 0.0):
            loop.optimizer.param_groups[0]["lr"] = rate
            for _ in range(24):
                loop.gradients(1.0)
                run.clock.advance(1.0)
                loop.optimizer.step()
            told.append(sum("changed no parameter" in message for message in caplog.messages))
    assert told == [0, 1, 1, 2]


def test_a_model_of_which_a_step_leaves_only_zeros_is_not_pushed(run: RunInMemory, tmp_path: Path) -> None:
    loop = Loop(run, 0, replicas=False, tape=tmp_path / "tape")

    def train() -> None:
        with loop.sync:
            for _ in range(9):
                for parameter in loop.model.parameters():
                    parameter.grad = parameter.detach().clone()
                run.clock.advance(1.0)
                loop.optimizer.step()

    with pytest.raises(ConfigError, match="every parameter of the copy that this cluster would push is 0"):
        train()
    kinds = [record["kind"] for record in read_tape(tmp_path / "tape")]
    assert "push_begun" in kinds
    assert "push_sent" not in kinds


# torch's own, of its first compilation.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_pushes_what_was_trained(loop: Loop, run: RunInMemory, whole: bool) -> None:
    """Its hooks are not traced, where they would copy tensors that hold nothing."""
    of_optimizer = torch.compile(loop.optimizer.step, backend="eager")

    def step() -> None:
        loop.gradients(-1.0)
        if whole:
            loop.optimizer.step()
        else:
            of_optimizer()

    trains = torch.compile(step, backend="eager") if whole else step
    with loop.sync as sync:
        for _ in range(8):
            run.clock.advance(1.0)
            trains()
        assert (sync.steps, sync.progress) == (8, 80)
    assert [push.steps for push in run.pushes] == [4, 4]
    assert run.theta_of(max(run.verdicts)).tobytes() == after(8)


@pytest.mark.parametrize(
    ("variable", "given", "kept"),
    [("", {}, KEPT), ("5", {}, 5), ("5", {"checkpoints_kept": 1}, 1), ("", {"checkpoints_kept": 1}, 1)],
)
def test_the_variable_says_how_many_checkpoints_are_kept_unless_the_callback_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loop: Loop, variable: str, given: dict[str, Any], kept: int
) -> None:
    monkeypatch.setenv("DIPS_WORKER_CHECKPOINTS_KEPT", variable)
    where = {"master": loop.run.address, "cluster_id": "a", "insecure": True, **given}
    config = TrainerLoop(loop.model, loop.optimizer, CallbackOptions(8, None, where), tmp_path, None)._config
    assert config is not None
    assert (config.checkpoints_kept, config.resume) == (kept, False), "it has no checkpoint to go on from"


def test_paths_of_a_callback_stay_where_they_were_when_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    options = CallbackOptions(8, Path("kept"), {"tape": "tape", "master": "h:1"})
    monkeypatch.chdir("else")
    assert (options.checkpoint_dir, options.loop["tape"]) == (tmp_path / "kept", tmp_path / "tape")
