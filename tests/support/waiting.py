"""Waiting for a fact. A wait has no limit of its own: the ten minutes that pytest gives a test end it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.02
LOG_END = 3000

NO_LIMIT_S = 7200.0
"""For a call that wants a number: longer than any test lasts, so that it decides nothing."""

given_up = threading.Event()
"""Set by a test that ends while threads of it wait: they end too."""


def until(happened: Callable[[], object], what: str, state: Callable[[], str] | Path | None = None) -> None:
    """Look until it is so. Ends with the test, and then prints `what` and where things stand.

    state: says that, or is a log whose end is printed.
    """
    parent = os.getppid()
    try:
        while not happened():
            if given_up.is_set() or os.getppid() != parent:
                raise AssertionError(f"the test ended before: {what}")
            time.sleep(LOOK_S)  # between two looks: nothing depends on how long
    except BaseException:
        print(f"waited for: {what}\n{_said(state)}", file=sys.stderr, flush=True)
        raise


def _said(state: Callable[[], str] | Path | None) -> str:
    if isinstance(state, Path):
        return state.read_text(errors="replace")[-LOG_END:] if state.exists() else f"there is no {state.name}"
    return state() if state is not None else ""
