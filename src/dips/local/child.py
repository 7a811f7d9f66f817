"""Starts one command that cannot outlive the process that started it: no run leaves orphans behind.

It runs as `python -m dips.local.child PARENT_PID NICENESS COMMAND...`, asks the kernel to kill this process when
its parent ends, and becomes the command. PARENT_PID 0 is whoever started it. Only Linux has that request
(PR_SET_PDEATHSIG, kept over exec); elsewhere a supervisor that is itself killed leaves its children to be ended by
hand.

The signal is SIGKILL: a hung child could ignore SIGTERM, and every role survives SIGKILL
anyway. It must never import a role: every process is started through it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_EXIT_NOT_STARTED = 127
"""What shells answer for a command that cannot be found."""

WHOEVER_STARTS_IT = 0
"""A parent's pid that no one has: the command line is made before it is known."""


def wrapped(command: Sequence[str], niceness: int = 0, parent_pid: int | None = None) -> list[str]:
    """The command line that runs `command` as a child which dies with its parent.

    niceness: 0 to 19, how far it gives way to processes that want the processor as well. parent_pid: None for this
    process, or WHOEVER_STARTS_IT.

    The kernel ties the child to the thread that started it, so it must be started from the main thread.
    """
    parent = os.getpid() if parent_pid is None else parent_pid
    return [sys.executable, "-m", "dips.local.child", str(parent), str(niceness), *command]


def die_with_parent(parent_pid: int) -> None:
    """End this process with SIGKILL when its parent ends; at once if the parent is gone already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Become the command; returns only when it cannot be started."""
    parent_pid, niceness, command = int(arguments[0]), int(arguments[1]), list(arguments[2:])
    die_with_parent(parent_pid or os.getppid())
    os.nice(niceness)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"dips: {command[0]} cannot be started: {error.strerror}: check the command's path", file=sys.stderr)
    return _EXIT_NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
