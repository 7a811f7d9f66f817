"""dips.Follow: what it changes in a module, and what a module looks like when something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.waiting import until

import dips
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter, PublishedModel

LAYOUT = Layout(tuple(Parameter(name, (2, 3), "float32", "one") for name in ("a", "b")))


def version_of(v: int) -> PublishedModel:
    return PublishedModel("mine", Version(1, v), 10 * v, LAYOUT, np.full(LAYOUT.n_elems, v, np.float32))


class Model(torch.nn.Module):
    b: torch.Tensor

    def __init__(self, b: torch.Tensor | None = None) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        self.register_buffer("b", torch.zeros(2, 3) if b is None else b)
        self.own = torch.nn.Parameter(torch.zeros(1))

    def values(self) -> set[float]:
        return {*self.a.flatten().tolist(), *self.b.flatten().tolist()}


class Run:
    """What Follow reads, on the thread that fetches."""

    def __init__(self) -> None:
        self.use: Callable[[PublishedModel, Callable[[], None]], None] | None = None
        self.error: Exception | None = None

    def follow_run(self, master: str, run_id: str, name: str, security: object, use: Any, wait: Any, **_: Any) -> None:
        use(version_of(1), lambda: None)
        self.use = use
        while not wait(0.001):
            if self.error is not None:
                raise self.error

    def publish(self, v: int) -> None:
        assert self.use is not None
        self.use(version_of(v), lambda: None)


@contextmanager
def followed(run: Run, model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[dips.Follow]:
    monkeypatch.setattr("dips.worker.followed_model.follow_run", run.follow_run)
    with dips.Follow(model, master="127.0.0.1:1", insecure=True) as follow:
        until(lambda: run.use is not None, "the thread")
        yield follow
    assert not follow._thread.is_alive(), "it ends with the block"


def test_an_update_takes_the_newest_and_after_an_interrupt_the_next_one_makes_it_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also into a buffer that took the place of another, as when a module is moved."""
    run, model = Run(), Model()
    with followed(run, model, monkeypatch) as follow:
        assert (follow.version, follow.tokens, model.values()) == (Version(1, 1), 10, {1.0})
        run.publish(2)
        run.publish(3)
        assert model.values() == {1.0}, "nothing changes in between"
        model.b = torch.zeros(2, 3)
        copy, calls = torch.Tensor.copy_, list[object]()

        def interrupted(tensor: torch.Tensor, *given: Any) -> torch.Tensor:
            calls.append(tensor)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return copy(tensor, *given)

        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "copy_", interrupted)
            with pytest.raises(KeyboardInterrupt):
                follow.update()
        assert (follow.version, follow.ended) == (Version(1, 1), False)
        assert follow.update()
        assert (follow.version, follow.tokens, model.values()) == (Version(1, 3), 30, {3.0})
        assert not follow.update()


def test_what_ends_the_following_comes_after_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = Run(), Model()
    with followed(run, model, monkeypatch) as follow:
        run.publish(2)
        run.error = Refused(RefusalCode.RUN_ID, "another run is here now")
        until(lambda: not follow._thread.is_alive(), "the thread ends")
        assert not follow.ended
        assert (follow.update(), model.values()) == (True, {2.0})
        for ask in (follow.update, lambda: follow.ended):
            with pytest.raises(Refused, match="another run"):
                ask()


@pytest.mark.parametrize(
    "other",
    [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2, 3, device="meta")],
    ids=["shape", "integers", "no memory"],
)
def test_a_module_that_is_another_model_is_refused_and_left_as_it_is(
    other: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(other)
    with pytest.raises(ConfigError, match="the run's model has 'b'"), followed(Run(), model, monkeypatch):
        pass
    assert not model.a.any()


def test_what_it_cannot_read_with_is_refused_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPS_MASTER", raising=False)
    where: dict[str, Any] = {"master": "127.0.0.1:1"}
    for given, says in (
        ({"insecure": True}, "DIPS_MASTER"), (where, "keys"), ({**where, "insecure": True, "keys": tmp_path}, "keys"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            dips.Follow(Model(), **given)
