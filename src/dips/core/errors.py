"""The exception classes: an error's class says who must act, and one table maps it to an exit code.

ConfigError: the operator. Refused: the peer that sent the request (it gets the code and the sentence).
LocalProtocolError: a bug of ours. RemoteProtocolError: the peer broke the protocol. RetryLater: no one, wait.
FatalError: the process cannot go on; a supervisor may restart it.
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dips.protos.enums import RefusalCode as RefusalCode

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
NOT_READ = 128 + 13  # SIGPIPE, which Windows lacks
"""Exit codes, as shells have them, of a process that a signal ended before its work was done. 0 would say that the work
is done, and no supervisor starts such a process again."""

NAME_TAKEN_EXIT, KEYS_REFUSED_EXIT = 8, 9
"""Exit codes of a process that has another one's name, and of one whose keys are refused: started again it would only
find the same."""


_as_keywords = ContextVar("as_keywords", default=False)


def option(name: str, value: str = "") -> str:
    """A setting in a sentence, as whoever reads it gives it: `--checkpoint-dir DIR`, or `checkpoint_dir=`."""
    if _as_keywords.get():
        return f"{name}="
    return f"--{name.replace('_', '-')}{value and ' '}{value}"


@contextmanager
def options_are_keywords() -> Iterator[None]:
    """Sentences that this thread makes in the block name keywords: a person's own program has no command line."""
    before = _as_keywords.set(True)
    try:
        yield
    finally:
        _as_keywords.reset(before)


class DipsError(Exception):
    """Base of all errors that this project raises on purpose; str() is one sentence for a person."""

    exit_code = 1


class ConfigError(DipsError):
    """A setting, a path or a command line is wrong. The operator must act.

    remedy: what to do, where the sentence does not say it; str() says both.
    """

    exit_code = 2

    def __init__(self, sentence: str, remedy: str = "") -> None:
        super().__init__(f"{sentence}: {remedy}" if remedy else sentence)
        self.sentence = sentence
        self.remedy = remedy


class Refused(DipsError):
    """A request is refused; it changed nothing.

    retry_after_s > 0 invites the same request again; 0 means that it will not be accepted unchanged. NAME_TAKEN and
    IDENTITY have exit codes of their own.
    """

    exit_code = 3

    def __init__(self, code: RefusalCode, sentence: str, retry_after_s: float = 0.0) -> None:
        super().__init__(sentence)
        self.exit_code = _EXITS.get(code, self.exit_code)
        self.code = code
        self.sentence = sentence
        self.retry_after_s = retry_after_s
        for watcher in tuple(watchers):
            watcher(code, str(sys._getframe(1).f_globals.get("__name__", "")))


_EXITS = {RefusalCode.NAME_TAKEN: NAME_TAKEN_EXIT, RefusalCode.IDENTITY: KEYS_REFUSED_EXIT}

Watcher = Callable[[RefusalCode, str], None]
"""Gets the code of a refusal that is made, and the name of the module that makes it."""

watchers: list[Watcher] = []
"""Called for every Refused that this process makes."""


class RetryLater(DipsError):
    """The peer cannot be reached or is not ready; the same call may succeed later."""

    exit_code = 4

    def __init__(self, sentence: str, retry_after_s: float = 1.0) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class RemoteProtocolError(DipsError):
    """A peer sent something that the protocol does not allow."""

    exit_code = 5


class LocalProtocolError(DipsError):
    """This program was about to break the protocol: a bug. The message carries the machine's history."""

    exit_code = 70


class FatalError(DipsError):
    """The process cannot go on (a lost disk, a newer master); restarting it elsewhere may help."""

    exit_code = 6


DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Of a disk that is full or fails: it may be well again later, without another setting."""


def of_disk(error: OSError, sentence: str) -> DipsError:
    """What to raise where a file cannot be used: FatalError, upon which a supervisor tries again later, for a disk that
    is full or fails; else ConfigError.
    """
    return FatalError(sentence) if error.errno in DISK_ERRORS else ConfigError(sentence)
