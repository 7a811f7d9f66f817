"""Keeps a run's processes alive: starts them, restarts those that end too early, ends all, and reports what happened.

Single-threaded: the owner calls poll() a few times a second from the main thread (which the kernel's tie
between parent and child needs). It never reads a child's output: that goes straight to the child's log
file. Exit code 0 says that a child's work is done; whatever else ends it, a signal that others sent
included, it is started again. It never decides about the run itself: what a death means there, the master decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from io import FileIO
from pathlib import Path

from dips.core.clock import Clock
from dips.core.errors import (
    DISK_ERRORS,
    INTERRUPTED,
    KEYS_REFUSED_EXIT,
    NAME_TAKEN_EXIT,
    TERMINATED,
    ConfigError,
    FatalError,
    RefusalCode,
    Refused,
)
from dips.core.files import closed, make_folder
from dips.core.observe.logs import LogFormat, LogLine, parse, rendered
from dips.core.units import format_seconds
from dips.local.child import wrapped

_logger = logging.getLogger("dips.launch")

# ---- restart ---------------------------------------------------------------------------------------------------------
#
# Decides when to start an ended process again, and when to stop trying. It has no clock and no process.
#
# A failure of a process that ran for long is forgiven: only failures that follow each other quickly count towards
# giving up.


@dataclass(frozen=True)
class RestartPolicy:
    """Delays double from first_delay_s to max_delay_s over failures that each came within quick_s of the
    start. After a run that lasted longer there is none.

    quick_failures_max of them in a row mean that a process cannot run, so it is given up; but not one that has lasted
    before: a disk that is full for a minute must not end a run of a month. For that one delays double to later_delay_s.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    quick_s: float = 20.0
    quick_failures_max: int = 5
    later_delay_s: float = 60.0

    def longest_s(self) -> float:
        """An upper bound of the time that a process which never lasted is tried for."""
        return self.quick_failures_max * (self.quick_s + self.max_delay_s)


class FailureCount:
    """The failures of one process in a row."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._has_lasted = False
        self.quick = 0

    def failed(self, ran_s: float) -> float | None:
        """Count a failure of a process that ran for `ran_s`; the delay in seconds before the next start, None to
        give up."""
        lasted = ran_s >= self._policy.quick_s
        self.quick = 1 if lasted else self.quick + 1
        self._has_lasted |= lasted
        if self.quick >= self._policy.quick_failures_max and not self._has_lasted:
            return None
        if lasted:
            return 0.0
        delay_s = self._policy.first_delay_s * 2.0 ** min(self.quick - 1, 30)
        return min(delay_s, self._policy.later_delay_s if self._has_lasted else self._policy.max_delay_s)


# ---- supervisor ------------------------------------------------------------------------------------------------------


POLL_S = 0.1
"""How often poll() is meant to be called; also the resolution of stop()."""

TELL_EVERY_S = 10.0
"""Between two sentences about one thing that is waited for."""

_LAST_WORD = re.compile(r"dips(?: \w+ [^\s:]+)?: (.+)\Z")

_STOP_TERMINATE_S = 15.0
_STOP_KILL_S = 5.0
_LOG_TAIL_LINES = 12
_LOG_TAIL_BYTES = 8192


class StopStage(Enum):
    """When a process is ended on stop(): what uses others ends before what it uses."""

    FIRST = 1
    SECOND = 2
    LAST = 3


@dataclass(frozen=True)
class ChildSpec:
    """One process to keep alive. `environment` is the whole environment of the process; `niceness` as in nice(1)."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stage: StopStage = StopStage.FIRST
    restart: bool = True
    niceness: int = 0
    stop_s: float = _STOP_TERMINATE_S  # how long it may take to end upon SIGTERM before it is killed
    needed: bool = True  # without it the run cannot go on; another one is only started again, however it ends


@dataclass(frozen=True)
class ChildEvent:
    """Something that happened to a child."""

    name: str
    kind: str  # started, ended, failed, killed or stopped
    start: int  # its number
    pid: int
    exit_code: int | None
    sentence: str


@dataclass
class _Child:
    spec: ChildSpec
    failures: FailureCount
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    started_s: float = 0.0
    start_again_s: float | None = None
    kill_expected: bool = False
    restart_delay_s: float = 0.0
    restart: bool = True
    last_exit: tuple[int, int] = (0, 0)  # pid and exit code of the process that ended last
    exit_code: int | None = None


class ProcessSupervisor:
    """Starts and restarts processes. Use as a context manager: leaving it ends every process that still runs."""

    def __init__(
        self,
        clock: Clock,
        report: Callable[[ChildEvent], None],
        policy: RestartPolicy | None = None,
        log_format: LogFormat = "human",
    ) -> None:
        """log_format: of the line with which each start begins in a child's log."""
        self._log_format = log_format
        self._clock = clock
        self._report = report
        self._policy = policy or RestartPolicy()
        self._children: dict[str, _Child] = {}

    def __enter__(self) -> ProcessSupervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ---- what runs ----

    def start(self, spec: ChildSpec) -> int:
        """Start a process and keep it alive; returns its pid. Raises ConfigError when it cannot be started."""
        child = _Child(spec, FailureCount(self._policy), restart=spec.restart)
        self._children[spec.name] = child
        return self._spawn(child)

    def pid(self, name: str) -> int | None:
        """The process id; None between two starts and after the end."""
        process = self._children[name].process
        return process.pid if process else None

    def starts(self, name: str) -> int:
        """How often the process was started."""
        return self._children[name].starts

    def exit_code(self, name: str) -> int | None:
        """The exit code of a process that ended for good; None while it is kept alive."""
        return self._children[name].exit_code

    def ended(self, names: Iterable[str]) -> bool:
        """Whether all of these processes ended for good."""
        return all(self._children[name].exit_code is not None for name in names)

    # ---- what happens ----

    def poll(self) -> None:
        """Notice deaths, and start again what is due.

        Raises ConfigError when a process found its own configuration wrong, Refused when another one has its name,
        and FatalError when one failed too often in a row; each shows the end of its log.
        """
        for child in list(self._children.values()):
            if child.process is not None and child.process.poll() is not None:
                self._handle_end(child, child.process)
            elif child.start_again_s is not None and self._clock.monotonic_s() >= child.start_again_s:
                try:
                    self._spawn(child)
                except ConfigError:
                    if child.spec.needed:
                        raise
                    child.start_again_s = self._clock.monotonic_s() + self._policy.later_delay_s

    def kill(self, name: str, restart_delay_s: float = 0.5) -> int | None:
        """Kill a process with SIGKILL on purpose; it is started again after the delay.

        Returns its pid, or None when it does not run just now.
        """
        child = self._children[name]
        if child.process is None or child.process.poll() is not None:
            return None
        child.kill_expected = True
        child.restart_delay_s = restart_delay_s
        child.process.send_signal(signal.SIGKILL)
        return child.process.pid

    def terminate(self, name: str) -> None:
        """Ask a process to end, with SIGTERM; nothing is done where it does not run. It is started again as after any
        end."""
        child = self._children.get(name)
        if child is not None and child.process is not None and child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)

    def restart_no_more(self) -> None:
        """From now on start no process again, however it ends. One that waits for its restart has ended for good."""
        for child in self._children.values():
            child.restart = False
            if child.start_again_s is not None:
                child.start_again_s = None
                pid, child.exit_code = child.last_exit
                self._tell(child, "ended", pid, child.exit_code, "is not started again: the run is over")

    def stop(self, tell: Callable[[str], None] | None = None) -> None:
        """End everything: stage by stage, with SIGTERM first, then with SIGKILL. Bounded, and safe to repeat.

        tell: gets a sentence now and then while it waits for processes that end slowly.
        """
        for stage in StopStage:
            children = [child for child in self._children.values() if child.spec.stage is stage]
            self._end(children, signal.SIGTERM, max((child.spec.stop_s for child in children), default=0.0), tell)
            self._end(children, signal.SIGKILL, _STOP_KILL_S)

    # ---- how ----

    def _spawn(self, child: _Child) -> int:
        spec = child.spec
        with self._log_of(child) as log:
            try:
                child.process = subprocess.Popen(
                    wrapped(spec.command, spec.niceness),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(spec.environment),
                    # Its own process group: ctrl-C reaches the supervisor only, which ends the others in order.
                    process_group=0,
                )
            except OSError as error:
                raise ConfigError(f"{spec.name} cannot be started: {error}") from error
        child.starts += 1
        child.started_s = self._clock.monotonic_s()
        child.start_again_s = None
        self._tell(child, "started", child.process.pid, None, f"start {child.starts}, pid {child.process.pid}")
        return child.process.pid

    def _log_of(self, child: _Child) -> FileIO:
        """The child's log, with a line for this start. No disk keeps a process from being started: where it takes no
        line there is none, and where it takes no file the process has no log until its next start.
        """
        spec = child.spec
        begins = f"{spec.name}, start {child.starts + 1}: {' '.join(spec.command)}"
        line = LogLine(self._clock.wall_s(), "INFO", "launch", spec.name, begins, logger="dips.launch")
        try:
            make_folder(spec.log_path.parent)
            log = open(spec.log_path, "ab", buffering=0, opener=closed)
        except OSError as error:
            if child.starts == 0 and error.errno not in DISK_ERRORS:
                raise ConfigError(f"{spec.log_path} cannot be written: {error.strerror}") from error
            _logger.warning("%s cannot be opened (%s): %s runs without a log", spec.log_path, error.strerror, spec.name)
            return Path(os.devnull).open("ab", buffering=0)
        with contextlib.suppress(OSError):
            log.write(f"{rendered(line, self._log_format)}\n".encode())
        return log

    def _handle_end(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        code = process.returncode
        child.process, child.last_exit = None, (process.pid, code)
        now_s = self._clock.monotonic_s()
        if code == 0 or not child.restart:
            child.exit_code = code
            self._tell(child, "ended", process.pid, code, f"ended with exit code {code}")
        elif child.kill_expected:
            child.kill_expected = False
            child.start_again_s = now_s + child.restart_delay_s
            self._tell(child, "killed", process.pid, code, "killed with SIGKILL on purpose, is started again")
        else:
            self._failed(child, process.pid, code, now_s)

    def _failed(self, child: _Child, pid: int, code: int, now_s: float) -> None:
        name, log_path, how = child.spec.name, child.spec.log_path, how_it_ended(code)
        if not child.spec.needed:
            delay_s = child.failures.failed(now_s - child.started_s)
            child.start_again_s = now_s + (self._policy.later_delay_s if delay_s is None else delay_s)
            self._tell(child, "failed", pid, code, f"{how} ({log_path} says why), is started again; the run goes on")
            return
        the_end = f"the end of {log_path}:\n"
        says_why = code in (ConfigError.exit_code, NAME_TAKEN_EXIT, KEYS_REFUSED_EXIT)
        sentence = last_word(log_path) if says_why else ""
        if code == ConfigError.exit_code:
            # Its own sentence says what is wrong and what to do; without one, the end of its log has to.
            child.exit_code = code
            why = f": {sentence} (its log is {log_path})" if sentence else f"; {the_end}{log_tail(log_path)}"
            raise ConfigError(f"{name} refused its configuration{why}")
        if code == NAME_TAKEN_EXIT and sentence:
            # Two supervisors that start processes of the same names: the one that came later ends.
            child.exit_code = code
            raise Refused(RefusalCode.NAME_TAKEN, f"{name}: {sentence} (its log is {log_path})")
        if code == KEYS_REFUSED_EXIT and sentence:
            # It may have been revoked on purpose: the others train on.
            child.exit_code = code
            self._tell(child, "ended", pid, code, f"is not started again: {sentence} (its log is {log_path})")
            return
        delay_s = child.failures.failed(now_s - child.started_s)
        if delay_s is None:
            child.exit_code = code
            raise FatalError(f"{name} {how}, {child.failures.quick} times in a row; {the_end}{log_tail(log_path)}")
        child.start_again_s = now_s + delay_s
        self._tell(child, "failed", pid, code, f"{how}, is started again in {delay_s:g} s")

    def _end(
        self,
        children: Sequence[_Child],
        how: signal.Signals,
        wait_s: float,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        running = [child for child in children if child.process is not None]
        for child in children:
            child.start_again_s = None
        for child in running:
            assert child.process is not None
            child.process.send_signal(how)
        begin_s = self._clock.monotonic_s()
        deadline_s, tell_s = begin_s + wait_s, begin_s + TELL_EVERY_S
        while running and (now_s := self._clock.monotonic_s()) < deadline_s:
            if tell is not None and now_s >= tell_s:
                tell_s = now_s + TELL_EVERY_S
                names = ", ".join(child.spec.name for child in running)
                waited, most = format_seconds(round(now_s - begin_s)), format_seconds(round(wait_s))
                tell(f"still waiting for the end of {names} ({waited}, {most} at most; a second ctrl-C ends all now)")
            for child in running:
                process = child.process
                if process is not None and process.poll() is not None:
                    child.process, child.exit_code = None, process.returncode
                    self._tell(child, "stopped", process.pid, process.returncode, how_it_ended(process.returncode))
            running = [child for child in running if child.process is not None]
            if running:
                time.sleep(POLL_S / 2)

    def _tell(self, child: _Child, kind: str, pid: int, exit_code: int | None, sentence: str) -> None:
        self._report(ChildEvent(child.spec.name, kind, child.starts, pid, exit_code, sentence))


def how_it_ended(exit_code: int) -> str:
    """A few words for a process's return code; negative ones are signals, and so are 143 and 130 (core/errors.py)."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    if exit_code in (INTERRUPTED, TERMINATED):
        return f"was ended by {signal.Signals(exit_code - 128).name} (exit code {exit_code})"
    return f"ended with exit code {exit_code}"


def last_word(path: Path) -> str:
    """Why a process of dips ended, as the last line of its log says (core/observe/logs.py: say_last); empty: it
    does not."""
    for text in reversed(log_tail(path, lines=_LOG_TAIL_BYTES).splitlines()):
        line = parse(text.strip())
        if line is not None:
            return line.sentence if line.level == "CRITICAL" else ""
        if match := _LAST_WORD.match(text.strip()):
            return match[1]
    return ""


def log_tail(path: Path, lines: int = _LOG_TAIL_LINES) -> str:
    """The last lines of a log file, indented; says so when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"  (no log: {error.strerror})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
