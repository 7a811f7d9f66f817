"""A child process that runs the methods of one object, one at a time, and says what it returned."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Done:
    """What a call returned; None for what cannot travel."""

    value: Any


class Peer:
    """make: builds the object in the child; called with `args`. Raises RuntimeError with what a call raised."""

    def __init__(self, make: Callable[..., object], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, args), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        there.close()
        self.finish()

    def begin(self, method: str, *args: Any) -> None:
        self._here.send((method, args))

    def finish(self) -> Done:
        """The end of the call that was begun."""
        done = self._here.recv()
        if isinstance(done, str):
            raise RuntimeError(done)
        assert isinstance(done, Done)
        return done

    def call(self, method: str, *args: Any) -> Done:
        self.begin(method, *args)
        return self.finish()

    def close(self) -> None:
        self.begin("close")
        self._process.join()


def _serve(there: Connection, make: Callable[..., object], args: tuple[Any, ...]) -> None:
    target = _tried(there, lambda: make(*args))
    method = ""
    while method != "close":
        method, args = there.recv()
        _tried(there, lambda: getattr(target, method)(*args))  # noqa: B023 (called at once)


def _tried(there: Connection, work: Callable[[], Any]) -> Any:
    try:
        value = work()
        picklable = value if isinstance(value, int | float | str | bytes | tuple | None) else None
        there.send(Done(picklable))
    except Exception:
        there.send(traceback.format_exc())
        raise
    return value
