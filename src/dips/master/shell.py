"""Runs the master's state machine: passes events to it one by one and carries out its effects in order.

Everything here runs on one event loop, so that the state needs no locks. This module must never decide
anything about the run, never wait while an event is being handled, and never continue after an error of the state
machine: a master whose state is wrong stops, and a new process starts from the journal. A shell serves one
epoch; when the state asks for another, the shell ends and says so in its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from dips.core.clock import Clock
from dips.core.errors import ConfigError, FatalError, LocalProtocolError, RefusalCode, Refused
from dips.core.machine import MachineHistory
from dips.core.messages import ClusterReply, OperatorReply, SlaveCommand, SlaveMessage, StatusReply
from dips.core.net.grpc_calls import to_refused
from dips.core.observe.logs import ChangeLogger
from dips.core.observe.tape import Tape
from dips.master.metrics import Counts
from dips.master.state.effects import (
    BeatsEnded,
    BeginAgain,
    CallGone,
    CloseLink,
    ClusterCall,
    Effect,
    Event,
    Halt,
    JournalWritten,
    Log,
    OperatorCall,
    Record,
    Refuse,
    ReplicaNews,
    Reply,
    Revoked,
    SlaveLinkDown,
    SlaveSaid,
    Tick,
    ToSlave,
    WriteJournal,
)
from dips.master.state.shared import SharedState
from dips.master.state.status import progress
from dips.master.state.tape import CallRefused, RequestRefused, VersionPublished

T = TypeVar("T")

# ---- refusals --------------------------------------------------------------------------------------------------------
#
# Limits how often refusals are written: a caller with a thousand calls a second must not fill the disk.
#
# The first refusal of a kind is written at once, the next ones together, with their number, a second later. Must never
# lose count. Time is an argument.


KIND = "refused"
"""The beginning of the keys of log lines about refusals."""

Refusal = CallRefused | RequestRefused

EVERY_S = 1.0
"""Seconds between two lines of one kind: a method and a code. There are some hundred kinds, which bounds the lines."""

MAX_CHARACTERS = 400
"""The most characters of a field: names and sentences may quote what a peer sent, which may be megabytes."""

LOG_LINES = 20
LOG_LINES_PER_S = 2.0
"""Log lines at once, and per second in the long run, that a person can read; the tape has all refusals, counted."""


@dataclass
class _Kind:
    written_s: float
    n_waiting: int = 0
    last: Refusal | None = None


class Refusals:
    """The refusals of one shell."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._log_lines = float(LOG_LINES)
        self._logged_s = 0.0
        self._unlogged = 0

    def note(self, record: Refusal, now_s: float) -> Refusal | None:
        """The line to write now; None when the refusal waits for others of its kind."""
        if isinstance(record, CallRefused):
            method = record.call
            record = replace(record, peer=record.peer[:MAX_CHARACTERS], sentence=record.sentence[:MAX_CHARACTERS])
        else:
            method = record.method[:MAX_CHARACTERS]
            record = replace(record, method=method, sentence=record.sentence[:MAX_CHARACTERS])
        kind = self._kinds.get((method, record.code))
        if kind is None:
            self._kinds[method, record.code] = _Kind(now_s)
            return record
        kind.n_waiting, kind.last = kind.n_waiting + 1, record
        return self._line(kind, now_s) if now_s - kind.written_s >= EVERY_S else None

    def due(self, now_s: float, everything: bool = False) -> list[Refusal]:
        """The lines that are due; with `everything` all that are left, at the end."""
        waiting = [kind for kind in self._kinds.values() if kind.n_waiting]
        return [self._line(kind, now_s) for kind in waiting if everything or now_s - kind.written_s >= EVERY_S]

    def may_log(self, now_s: float) -> str | None:
        """The text to add to a log line about a refusal; None: leave the line out."""
        self._log_lines = min(float(LOG_LINES), self._log_lines + LOG_LINES_PER_S * max(0.0, now_s - self._logged_s))
        self._logged_s = now_s
        if self._log_lines < 1:
            self._unlogged += 1
            return None
        self._log_lines -= 1
        left_out, self._unlogged = self._unlogged, 0
        return f" ({left_out} more before it were not logged)" if left_out else ""

    def _line(self, kind: _Kind, now_s: float) -> Refusal:
        assert kind.last is not None, "a counted refusal was noted"
        line = replace(kind.last, count=kind.n_waiting)
        kind.written_s, kind.n_waiting = now_s, 0
        return line


# ---- journal writer --------------------------------------------------------------------------------------------------
#
# Writes journal entries durably on a thread of its own: in the given order, with many entries in one flush.
#
# The event loop must never wait for a disk, and JournalWritten must never be sent before the disk has the entry and
# every earlier one. Entries that arrive during a flush are written with the next one, so that a slow disk makes
# batches larger, not the queue of flushes longer. Old records are moved on the same thread, step by step, and only
# while no entry waits.


THREAD_NAME = "dips-journal"


class JournalWriter:
    """Passes entries to `append` and calls `written` with each entry's number once it is durable.

    After an error `failed` is called once, and nothing more is written: an entry must not follow a lost one.
    The number of waiting entries is bounded by the calls and rounds in flight, because each entry answers one of them.
    `tidy` does one short step of moving old records and returns whether there is another.
    """

    def __init__(
        self,
        append: Callable[[Sequence[WriteJournal]], None],
        written: Callable[[int], None],
        failed: Callable[[Exception], None],
        tidy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._append = append
        self._written = written
        self._failed = failed
        self._tidy = tidy
        self._closing = False
        self._waiting: list[WriteJournal] = []
        self._flush: asyncio.Task[None] | None = None
        self._broken = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def put(self, entry: WriteJournal) -> None:
        """Queues one entry; returns at once."""
        self._waiting.append(entry)
        if self._flush is None and not self._broken:
            self._flush = asyncio.create_task(self._run(), name="master-journal")

    async def close(self) -> None:
        """Writes the waiting entries, then ends the thread; old records are moved further at the next start."""
        self._closing = True
        if self._flush is not None:
            await self._flush
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        untidy = True
        try:
            while self._waiting or (untidy and not self._closing):
                if self._waiting:
                    await self._write()
                    untidy = True
                else:
                    untidy = await self._on_thread(self._tidy)
        except Exception as error:
            self._broken = True
            self._failed(error)
        self._flush = None

    async def _write(self) -> None:
        batch, self._waiting = self._waiting, []
        await self._on_thread(lambda: self._append(batch))
        for entry in batch:
            self._written(entry.entry_id)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


# ---- slave link ------------------------------------------------------------------------------------------------------
#
# The master's end of a slave's stream: the queue of commands, and the end of the stream.
#
# A slave that does not read must never make the master hold more than LINK_COMMANDS commands for it.


LINK_COMMANDS = 4096
"""The most waiting commands for one slave. A round and a push each need about four, so this is many seconds of
work of a hundred clusters; a slave that is so far behind no longer reads its connection."""


class SlaveLink:
    """One stream. `number` identifies it in events and effects and is never used again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._commands: deque[SlaveCommand] = deque()
        self._more = asyncio.Event()
        self._closing = asyncio.Event()
        self._end: Refused | None = None

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def offer(self, command: SlaveCommand) -> bool:
        """Queues a command. False: the link is closing or its queue is full, and the command is dropped."""
        if self.closing or len(self._commands) >= LINK_COMMANDS:
            return False
        self._commands.append(command)
        self._more.set()
        return True

    def close(self, refused: Refused | None) -> None:
        """Ends the stream after the waiting commands: with a refusal, or without one when the slave hung up.

        A second call changes nothing.
        """
        if not self.closing:
            self._end = refused
            self._closing.set()
            self._more.set()

    async def next_command(self) -> SlaveCommand | None:
        """The oldest waiting command; None once the link is closed and none is left."""
        while not self._commands and not self.closing:
            self._more.clear()
            await self._more.wait()
        return self._commands.popleft() if self._commands else None

    async def closed(self) -> Refused | None:
        """Waits until the link is closed, and returns the refusal, if there is one."""
        await self._closing.wait()
        return self._end


# ---- shell -----------------------------------------------------------------------------------------------------------


ReplyBody = ClusterReply | StatusReply | OperatorReply

MIN_TIMER_S = 0.001
"""The wait before a deadline that is already over is handled, so that a wrong one cannot occupy the loop."""

BUG_EXIT_CODE = LocalProtocolError.exit_code

_logger = logging.getLogger(__name__)


class StateMachine(Protocol):
    """The interface that the process uses of dips.master.state.master.MasterMachine."""

    shared: SharedState

    def start(self, now_s: float) -> Sequence[Effect]: ...

    def handle(self, event: Event, now_s: float) -> Sequence[Effect]: ...

    def next_deadline_s(self) -> float | None: ...


class MasterShell:
    """Owns the state machine and everything that its effects use. Make it inside a running event loop."""

    def __init__(
        self,
        machine: StateMachine,
        append: Callable[[Sequence[WriteJournal]], None],
        tape: Tape,
        clock: Clock,
        tick_s: float,
        tidy: Callable[[], bool] = lambda: False,
        counts: Counts | None = None,
    ) -> None:
        """append: makes journal entries durable (it blocks, on its own thread). tick_s: the longest time between two
        Ticks; from a late Tick the state learns that this process was paused. tidy: one step of the journal's
        cleaning. counts: counts what is carried out, for metrics."""
        self._machine = machine
        self._tape = tape
        self._clock = clock
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._journal = JournalWriter(append, lambda entry_id: self.dispatch(JournalWritten(entry_id)), self.fail, tidy)
        self.counts = counts or Counts()
        self._changes = ChangeLogger(_logger)
        self._refusals = Refusals()
        self._events_seen = MachineHistory()
        self._events: deque[Event] = deque()
        self._handling = False
        self._calls: dict[int, asyncio.Future[ReplyBody]] = {}
        self._links: dict[int, SlaveLink] = {}
        self._numbers = itertools.count(1)
        self._last_tick_s = clock.monotonic_s()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self.outcome: asyncio.Future[Halt | BeginAgain] = self._loop.create_future()
        """Done when the master must end, or begin a later epoch; the server waits for it."""

    @property
    def machine(self) -> StateMachine:
        """The state machine, to be read between two events, on this loop; only the shell passes events to it."""
        return self._machine

    def start(self) -> None:
        """Carries out the state's first effects and starts the ticks."""
        now_s = self._clock.monotonic_s()
        self._last_tick_s = now_s
        try:
            self._perform_all(self._machine.start(now_s))
            self._arm_timer()
        except Exception as error:
            self.fail(error)

    def dispatch(self, event: Event) -> None:
        """Passes an event to the state after the waiting ones; ignored once the master is ending."""
        if self.outcome.done():
            return
        self._events.append(event)
        if not self._handling:
            self._drain()

    def stop(self, outcome: Halt | BeginAgain) -> None:
        """Ends the master; the first outcome is kept. Waiting calls and links are refused and asked to try again."""
        if self.outcome.done():
            return
        self.outcome.set_result(outcome)
        if self._timer is not None:
            self._timer.cancel()
        self._events.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(_ending())
        for link in self._links.values():
            link.close(_ending())

    async def close(self) -> None:
        """Writes to the disk what was decided before the end. Call it once, after stop()."""
        try:
            await self._journal.close()
        finally:
            with contextlib.suppress(FatalError):  # a failed disk has ended the master already
                self._write_refusals(everything=True)

    async def call(self, event_of: Callable[[int], ClusterCall | OperatorCall]) -> ReplyBody:
        """Dispatches a call under a new token and waits for its reply.

        Raises Refused when the state refuses it or the master ends. If the caller hangs up before that (this
        coroutine is cancelled), the state gets CallGone.
        """
        if self.outcome.done():
            raise _ending()
        token = next(self._numbers)
        future: asyncio.Future[ReplyBody] = self._loop.create_future()
        self._calls[token] = future
        self.dispatch(event_of(token))
        try:
            return await future
        finally:
            if self._calls.pop(token, None) is not None:
                self.dispatch(CallGone(token))

    def open_link(self) -> SlaveLink:
        """Registers a slave's new stream."""
        link = SlaveLink(next(self._numbers))
        self._links[link.number] = link
        if self.outcome.done():
            link.close(_ending())
        return link

    def slave_said(self, link: SlaveLink, message: SlaveMessage) -> None:
        """Dispatches a slave's message, unless its link is closed already."""
        if link.number in self._links and not link.closing:
            self.dispatch(SlaveSaid(link.number, message))

    def link_down(self, link: SlaveLink) -> None:
        """Reports the end of a stream to the state, once for each link, whichever side ended it."""
        link.close(None)
        if self._links.pop(link.number, None) is not None:
            self.dispatch(SlaveLinkDown(link.number))

    def note_refusal(self, method: str, refused: Refused) -> None:
        """Logs a request that did not reach the state because its bytes cannot be decoded."""
        self._log(f"{KIND} {method}", f"refused a {method}: {refused.sentence}", logging.WARNING)
        try:
            self._write_tape(RequestRefused("-", method=method, code=refused.code.name, sentence=refused.sentence))
        except FatalError as error:
            self.fail(error)

    def turned_away(self, method: str, refused: Refused) -> None:
        """Records a call that was refused because of its caller, before its request was decoded."""
        self.counts.refused(method, refused.code.name)
        self.note_refusal(method, refused)

    # ---- events ----

    def _drain(self) -> None:
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                now_s = self._clock.monotonic_s()
                # After a pause of the process, sockets may be served before the timer. The state must notice the gap
                # before it checks any deadline, or it would evict peers that seemed silent only because of the pause.
                if isinstance(event, Tick) or now_s - self._last_tick_s > 2 * self._tick_s:
                    self._last_tick_s = now_s
                    self._perform_all(self._machine.handle(Tick(), now_s))
                if not isinstance(event, Tick) and not self.outcome.done():
                    self._events_seen.add(now_s, "event", *_event_text(event))
                    self._perform_all(self._machine.handle(event, now_s))
            self._arm_timer()
        except Exception as error:
            self.fail(error)
        finally:
            self._handling = False

    def fail(self, error: Exception) -> None:
        """Ends the master because of an error: a sentence for errors of operator or disk, the last events for a bug."""
        if isinstance(error, ConfigError | FatalError):
            outcome = Halt(error.exit_code, str(error))
            _logger.critical("%s", error)
        else:
            outcome = Halt(BUG_EXIT_CODE, f"a bug in the master: {type(error).__name__}: {error}")
            last_events = self._events_seen.newest()
            _logger.critical("%s; the last events were:\n  %s", outcome.sentence, last_events, exc_info=error)
        self.stop(outcome)

    # ---- time ----

    def _arm_timer(self) -> None:
        if self.outcome.done():
            return
        due_s = self._last_tick_s + self._tick_s
        deadline_s = self._machine.next_deadline_s()
        if deadline_s is not None:
            due_s = min(due_s, deadline_s)
        if self._timer is not None and due_s == self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_s = due_s
        delay_s = max(MIN_TIMER_S, due_s - self._clock.monotonic_s())
        self._timer = self._loop.call_later(delay_s, self._timer_rang)

    def _timer_rang(self) -> None:
        self._timer = None
        try:
            self._write_refusals()
        except FatalError as error:
            self.fail(error)
        self.dispatch(Tick())

    # ---- effects ----

    def _perform_all(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(token, body):
                    self._answer(token, body)
                case Refuse(token, refusal):
                    self._answer(token, to_refused(refusal))
                case ToSlave(link, command):
                    self._send(link, command)
                case CloseLink(link, refusal):
                    if link in self._links:
                        self._links[link].close(to_refused(refusal))
                case WriteJournal():
                    self._journal.put(effect)
                case Record():
                    self._write_tape(effect)
                case Log(level, key, sentence, cause):
                    self._log(key, sentence, level, cause)
        for effect in effects:
            match effect:  # after the replies and commands of the same batch
                case Halt():
                    _logger.log(logging.CRITICAL if effect.exit_code else logging.INFO, "%s", effect.sentence)
                    self.stop(effect)
                case BeginAgain():
                    _logger.warning("%s", effect.sentence)
                    self.stop(effect)

    def _answer(self, token: int, answer: ReplyBody | Refused) -> None:
        future = self._calls.pop(token, None)
        if future is None or future.done():
            return  # the caller hung up; the state learns it from CallGone
        if isinstance(answer, Refused):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _send(self, number: int, command: SlaveCommand) -> None:
        link = self._links.get(number)
        if link is None or link.closing:
            return  # the state learns it from SlaveLinkDown
        if not link.offer(command):
            link.close(
                Refused(
                    RefusalCode.BUSY,
                    f"{LINK_COMMANDS} commands wait because this slave does not read them: connect again",
                    retry_after_s=1.0,
                )
            )

    def _write_tape(self, record: Record) -> None:
        self.counts.note(record, self._clock.monotonic_s())
        line: Record | None = record
        if isinstance(record, Refusal):
            line = self._refusals.note(record, self._clock.monotonic_s())
        if isinstance(record, VersionPublished):
            seen = progress(self._machine.shared)
            self._tape.write("progress", record.cause, version=record.fields["version"], **seen)
        if line is not None:
            self._tape.write(line.kind, line.cause, **line.fields)

    def _write_refusals(self, everything: bool = False) -> None:
        for line in self._refusals.due(self._clock.monotonic_s(), everything):
            self._tape.write(line.kind, line.cause, **line.fields)

    def _log(self, key: str, sentence: str, level: int, cause: str = "") -> None:
        if key.startswith(KIND):
            more = self._refusals.may_log(self._clock.monotonic_s())
            if more is None:
                return
            sentence += more
        self._changes.report(key, sentence, level, cause)


def _ending() -> Refused:
    return Refused(
        RefusalCode.BUSY,
        "the master is ending: connect again; if it does not come back, its operator stopped it",
        retry_after_s=1.0,
    )


def _event_text(event: Event) -> tuple[str, str]:
    """(cause, text) of an event for the list of last events, without its content."""
    match event:
        case ClusterCall(token, request):
            kind = type(request).__name__
            return request.caller.cause_id or "-", f"{kind} of {request.caller.name}, call {token}"
        case SlaveSaid(link, message):
            kind = type(message.body).__name__
            return message.caller.cause_id or "-", f"{kind} of {message.caller.name}, link {link}"
        case OperatorCall(token, action):
            return "-", f"{type(action).__name__}, call {token}"
        case BeatsEnded(cluster, incarnation):
            return str(incarnation), f"the beats of {cluster} ended"
        case Revoked(role, name, _):
            return "-", f"Revoked {role} {name}"
        case ReplicaNews(trouble, _):
            return "-", f"ReplicaNews {trouble}"
        case CallGone(number) | SlaveLinkDown(number) | JournalWritten(number):
            return "-", f"{type(event).__name__} {number}"
        case Tick():
            return "-", "Tick"
