"""`dips warm-up`: compiles all kernels of this machine's processes, so that none of them has to at its start."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from dips.core.errors import ConfigError

MODULES = (
    "dips.core.math.outer_numba",
    "dips.core.math.wire_numba",
    "dips.core.math.landing_numba",
    "dips.core.net.carry_numba",
    "dips.slave.serve_numba",
)
"""All modules with kernels that a process calls. Each has a warm_up(); what those compile in needs none."""

OVER_ZMQ = frozenset({"dips.core.net.carry_numba", "dips.slave.serve_numba"})
"""Those that need the C functions of libzmq."""

OF_SLAVES = tuple(name for name in MODULES if name != "dips.core.net.carry_numba")
"""Without those that only clusters call, and only for large transfers."""

TELL_S = 2.0
"""Between two lines about the kernels of one module."""


@dataclass(frozen=True)
class Warmed:
    """A module's kernels are on disk now. compiled: how many were not before; skipped: why none can be used here."""

    module: str
    compiled: int
    seconds: float
    skipped: str = ""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.module}: skipped: {self.skipped}"
        how = f"compiled {self.compiled} kernels" if self.compiled else "all there"
        return f"{self.module}: {how}, {self.seconds:.2f} s"


def warm_up(
    slave: Annotated[bool, typer.Option("--slave", help="Only what slaves run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Compile everything that slaves and workers run as machine code, once for this machine.

    The code is kept on disk, in NUMBA_CACHE_DIR if that is set, so that later starts load it in a few hundredths of a
    second. `make` and the image build do this; do it again after an update, or let the first start do it. While one
    process compiles, others wait for it.
    """
    tell = _tell if not as_json else lambda sentence: None
    done = []
    for one in warmed(tell, OF_SLAVES if slave else MODULES):
        done.append(one)
        tell(str(one))
    from dips.core.math import compiling

    if as_json:
        print(json.dumps({"kept_in": str(compiling.folder()), "modules": [asdict(one) for one in done]}))
    else:
        print(f"kept in {compiling.folder()}")
    return 0


def warmed(tell: Callable[[str], None], modules: Sequence[str] = MODULES) -> Iterator[Warmed]:
    """Compile or load the kernels of each module. tell: gets a line now and then while kernels are compiled.

    Raises ConfigError if compiled code cannot be kept on disk, ModuleNotFoundError without numba.
    """
    from dips.core.math import compiling

    if compiling.folder() is None:
        raise ConfigError("no folder for compiled code can be written, so nothing can be prepared: set NUMBA_CACHE_DIR")
    from dips.core.net import zmq_numba

    for name in modules:
        if name in OVER_ZMQ and not zmq_numba.available():
            yield Warmed(name, 0, 0.0, zmq_numba.why_not())
            continue
        began_s = time.monotonic()
        progress = _Progress(name, tell)
        module = importlib.import_module(name)
        with compiling.watched(progress.begins, module):
            module.warm_up()
        yield Warmed(name, progress.n_compiled, round(time.monotonic() - began_s, 3))


class _Progress:
    def __init__(self, module: str, tell: Callable[[str], None]) -> None:
        self._module = module
        self._tell = tell
        self._told_s = time.monotonic() - TELL_S
        self.n_compiled = 0

    def begins(self, kernel: str, done: int, of: int) -> None:
        self.n_compiled = done
        if time.monotonic() - self._told_s >= TELL_S:
            self._told_s = time.monotonic()
            self._tell(f"{self._module}: compiling {done} of {of} ({kernel})")


def _tell(sentence: str) -> None:
    print(sentence, flush=True)
