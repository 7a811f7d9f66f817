"""Reports which kernel numba is compiling; those that it loads from its cache are not reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from numba.core import event
from numba.core.dispatcher import Dispatcher

_COMPILES = "numba:compile"

TellKernel = Callable[[str, int, int], None]
"""(name of the kernel that is compiled now, kernels begun, kernels that there are)."""


@contextlib.contextmanager
def watched(tell: TellKernel, *modules: ModuleType) -> Iterator[None]:
    """While this lasts, call `tell` for each kernel of these modules when its compilation begins, on that thread."""
    kernels = {
        found.py_func
        for module in modules
        for found in vars(module).values()
        if isinstance(found, Dispatcher) and found.py_func.__module__ == module.__name__
    }
    listener = _Listener(tell, kernels)
    event.register(_COMPILES, listener)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        event.unregister(_COMPILES, listener)  # type: ignore[no-untyped-call]


class _Listener(event.Listener):
    def __init__(self, tell: TellKernel, kernels: set[Any]) -> None:
        self._tell = tell
        self._kernels = kernels
        self._begun: set[Any] = set()

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function in self._kernels and function not in self._begun:  # one may be compiled for several types
            self._begun.add(function)
            self._tell(function.__name__.lstrip("_"), len(self._begun), len(self._kernels))

    def on_end(self, event: Any) -> None:
        """Does nothing: the next kernel that begins is the report."""
