"""Ends a user's own program with one sentence, as our commands do, when it does not catch an error of ours.

Errors stay ordinary exceptions for who catches them. docs/decisions/0033-one-sentence-in-a-users-own-program.md has the
reasons.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from dips.core.errors import DipsError, LocalProtocolError
from dips.core.observe.telemetry import say_last

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).absolute().parents[2])
"""The folder of all our packages, as frames name it."""


def install() -> None:
    """Install the hook in this process. What is no error of ours, or a bug of ours, goes to the hook that was there."""
    former = sys.excepthook
    if getattr(former, "says_one_sentence", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DipsError) or isinstance(error, LocalProtocolError):
            former(kind, error, trace)
            return
        logging.getLogger("dips").debug("where it was raised", exc_info=(kind, error, trace))
        say_last(str(error) + _place(trace))
        if not (sys.flags.interactive or hasattr(sys, "ps1")):
            raise SystemExit(error.exit_code)  # the interpreter ends with it, after what atexit has to do

    hook.says_one_sentence = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _place(trace: TracebackType | None) -> str:
    """The line of the person's program: the innermost one that is neither ours nor of an installed package."""
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(("<", _PACKAGE, *_INSTALLED)):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
