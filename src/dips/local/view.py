"""Formats a run's status: tables, one plain line, and the same as JSON with stable keys; and shows a run's progress.

It asks nothing: everything here is made of StatusReplies. The sentence `waiting_for` is on top, because "why does
nothing move" is the first question.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from dips.core.clock import Clock
from dips.core.errors import DISK_ERRORS
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.messages import ClusterStatus, RoundSummary, SlaveStatus, StatusReply
from dips.core.units import format_bytes, format_count, format_seconds
from dips.local.report import Fault
from dips.master.page.history import HeldoutPoint, TokenRate
from dips.master.page.snapshot import no_loss_sentence

# ---- tables ----------------------------------------------------------------------------------------------------------
#
# Formats tables that fit a terminal of any width without breaking a word.
#
# Names have up to 63 characters and terminals 80 columns. Where the longest words fit side by side, a table is a table.
# Where not, sentences go below their row; where that is not enough, each row is a name with its other cells below it,
# as `column value` one after the other. Nothing is ever cut.


_BETWEEN = 2
"""Characters between two columns, and before what is below its row."""

_SENTENCE = 16
"""A column of sentences that is narrower is hard to read."""


_WRAPPED = frozenset({"pushes", "accepted", "excluded"})
"""Columns of several words. These and those of sentences may take several lines, the others keep to one."""

_SENTENCES = frozenset({"last verdict", "why"})
"""They wrap, take what is left of a line, and may go below it."""


class FittingTable:
    """A table with a title; the first column says what a row is about."""

    def __init__(
        self, title: str, columns: Sequence[str], right: Collection[str], least: Mapping[str, int] | None = None
    ) -> None:
        """right: columns of numbers. least: characters to keep free, so that the table stays while values change."""
        self._title = title
        self._columns = list(columns)
        self._right, self._free = right, least or {}
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        assert len(cells) == len(self._columns), "a cell for each column"
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        every = list(range(len(self._columns)))
        short = [index for index in every if self._columns[index] not in _SENTENCES]
        yield Text(self._title, style="italic")
        for inline in (every, short):
            if (widths := self._widths(inline, room)) is not None:
                yield from self._as_table(console, inline, widths, room)
                break
        else:
            for row in self._rows:
                yield row[0]
                yield from self._below(row, every[1:], room)
        yield Text("")

    def _widths(self, inline: Sequence[int], room: int) -> list[int] | None:
        """Of these columns; None when their longest words do not fit side by side."""
        least = [self._least(index) for index in inline]
        widths = [max(low, self._natural(index)) for index, low in zip(inline, least, strict=True)]
        room -= _BETWEEN * (len(widths) - 1)
        if sum(least) > room:
            return None
        while sum(widths) > room:
            widest = max(range(len(widths)), key=lambda at: widths[at] - least[at])
            widths[widest] -= 1
        return widths

    def _natural(self, index: int) -> int:
        return max(cell_len(text) for text in (self._columns[index], *self._texts(index)))

    def _least(self, index: int) -> int:
        """Headers wrap at spaces, and so do cells where they may."""
        column = self._columns[index]
        texts = self._texts(index)
        words = [word for text in texts for word in text.split()] if column in _WRAPPED | _SENTENCES else texts
        longest = max(map(cell_len, [*column.split(), *words]), default=0)
        enough = min(_SENTENCE, self._natural(index)) if column in _SENTENCES else 0
        return max(longest, enough, self._free.get(column, 0))

    def _texts(self, index: int) -> list[str]:
        return [row[index].plain for row in self._rows]

    def _as_table(
        self, console: Console, inline: Sequence[int], widths: Sequence[int], room: int
    ) -> Iterator[Text | Padding]:
        headers = [Text(self._columns[index], style="bold") for index in inline]
        rule = Text("─" * (sum(widths) + _BETWEEN * (len(widths) - 1)), style="dim")
        yield from (*self._lines(console, headers, inline, widths), rule)
        for row in self._rows:
            yield from self._lines(console, [row[index] for index in inline], inline, widths)
            yield from self._below(row, [index for index in range(len(row)) if index not in inline], room)

    def _lines(
        self, console: Console, cells: Sequence[Text], inline: Sequence[int], widths: Sequence[int]
    ) -> Iterator[Text]:
        wrapped = [list(cell.wrap(console, width)) for cell, width in zip(cells, widths, strict=True)]
        for at in range(max(map(len, wrapped))):
            line = Text()
            for index, lines, width in zip(inline, wrapped, widths, strict=True):
                part = lines[at] if at < len(lines) else Text()
                part.rstrip()
                free = " " * (width - part.cell_len)
                ends = " " * _BETWEEN if index != inline[-1] else ""
                line.append_text(
                    Text.assemble(free, part, ends) if self._columns[index] in self._right else part + free + ends
                )
            line.rstrip()
            yield line

    def _below(self, row: Sequence[Text], indices: Sequence[int], room: int) -> Iterator[Padding]:
        """Cells as `column value`, as many as fit on a line; what is not known takes no place."""
        line: list[Text] = []
        for index in indices:
            if not row[index].plain or row[index].plain == "-":
                continue
            pair = Text.assemble((f"{self._columns[index]} ", "dim"), row[index])
            if line and _BETWEEN * (len(line) + 1) + sum(one.cell_len for one in [*line, pair]) > room:
                yield _joined(line)
                line = []
            line.append(pair)
        if line:
            yield _joined(line)


def _joined(pairs: Sequence[Text]) -> Padding:
    return Padding(Text(" " * _BETWEEN).join(pairs), (0, 0, 0, _BETWEEN), expand=False)


# ---- view ------------------------------------------------------------------------------------------------------------


RANKS_NAMED = 8
"""Of a cluster with more late ranks the others are counted."""

_VERDICT_STYLES = {"applied": "green", "excluded": "red", "aborted": "yellow", "rolled_back": "magenta"}
_RECENT_ROUNDS = 5


def where(status: StatusReply) -> str:
    """How far a run is, for a sentence: "at version 1:7, 2048 tokens"."""
    return (
        "before its first version"
        if status.published is None
        else f"at version {status.published}, {status.tokens} tokens"
    )


def status_json(value: Any) -> Any:
    """A status as JSON values: ids in their text form, numbers that are not known as null."""
    if isinstance(value, (Version, Incarnation, RoundId, PushId)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: status_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, (tuple, list)):
        return [status_json(item) for item in value]
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    return value


def status_view(status: StatusReply, width_is_narrow: bool = False) -> RenderableType:
    """Everything that `dips status` shows."""
    parts: list[RenderableType] = [headline(status), *(Text(words, style=style) for words, style in _waits(status))]
    if alarm := _direction_alarm(status):
        parts.append(Text(alarm, style="bold red"))
    parts += [Text(f"alarm: {alarm.sentence}", style="bold red") for alarm in status.alarms]
    if refused := _refused_calls(status):
        parts.append(Text(refused, style="red"))
    parts.append(cluster_table(status.clusters))
    if hint := no_loss_sentence(status):
        parts.append(Text(hint, style="dim"))
    if any(math.isfinite(cluster.last_norm) for cluster in status.clusters):
        parts.append(push_table(status.clusters))
    parts.append(slave_table(status.slaves, writes_later=status.settings.durability == "async"))
    if status.recent_rounds and not width_is_narrow:
        parts.append(round_table(status.recent_rounds[-_RECENT_ROUNDS:]))
    return Group(*parts)


def _version(status: StatusReply) -> str:
    """The newest version, also where a master that was started again cannot serve it yet; empty: there is none."""
    not_served = f"{status.decided} (not served yet)" if status.decided is not None else ""
    return str(status.published) if status.published is not None else not_served


def headline(status: StatusReply) -> Text:
    """Run, version, tokens and the round's phase in one line."""
    states = ((status.stopped, "stopped"), (status.stopping, "stopping"), (status.paused, "paused"))
    return Text.assemble(
        (f"run {status.run_id}", "bold"),
        f"  version {_version(status) or 'none yet'}{_on_disk(status)}",
        f"  tokens {format_count(status.tokens)}{_of_goal(status)}",
        *([f"  round {status.round} ", (status.phase, "cyan")] if status.round else ["  no open round"]),
        f"  {_rounds(status)}",
        (f"  {next((word for on, word in states if on), '')}", "bold"),
    )


def _waits(status: StatusReply) -> Iterator[tuple[str, str]]:
    """Why nothing moves, in the master's words, and how it is shown; nothing when all is well."""
    for words, head, style in (
        (status.recovery, "recovering", "bold magenta"),
        (status.reshard, "reshard", "magenta"),
        (status.waiting_for, "waiting", "bold yellow"),
    ):
        if words:
            yield words if words.startswith(head) else f"{head}: {words}", style
    for cluster in status.clusters:
        if cluster.alive and cluster.late_ranks:
            yield f"cluster {cluster.cluster_id}: {late_sentence(cluster)}", "yellow"


def late_sentence(cluster: ClusterStatus) -> str:
    """Which of a cluster's ranks the others wait for."""
    ranks, more = cluster.late_ranks[:RANKS_NAMED], len(cluster.late_ranks) - RANKS_NAMED
    named = ", ".join(map(str, ranks)) + (f" and {more} more" if more > 0 else "")
    which = f"rank {named} is" if len(cluster.late_ranks) == 1 else f"ranks {named} are"
    if cluster.phase in ("TRAINING", "BEGINNING_PUSH", "FINISHING_PUSH", "AWAITING"):  # it trains on, or all have sent
        return f"{which} late with a step; the others wait"
    return f"{which} late in a transfer; the other {cluster.ranks - len(cluster.late_ranks)} are done"


def _direction_alarm(status: StatusReply) -> str:
    """Which clusters of the run push where the others do not go; empty when there is no direction alarm."""
    names = ", ".join(cluster.cluster_id for cluster in status.clusters if cluster.alive and cluster.direction_alarm)
    return f"direction alarm: {names} (its pushes are merged all the same: look at its usual cosine)" if names else ""


def _refused_calls(status: StatusReply) -> str:
    """How many calls the master refused because of whose they were; empty when none."""
    if not status.refused_calls:
        return ""
    calls = f"{status.refused_calls} calls were" if status.refused_calls > 1 else "1 call was"
    return f"{calls} refused because of whose they were, the last: {status.refused_call}"


def _on_disk(status: StatusReply) -> str:
    """What is on every disk, where a version may be published before."""
    return f" (on every disk: {status.durable or 'none yet'})" if status.settings.durability == "async" else ""


def _rounds(status: StatusReply) -> str:
    lost = [f"{n} {word}" for n, word in ((status.rounds_void, "void"), (status.rounds_aborted, "aborted")) if n]
    rounds = "1 round" if status.rounds_committed == 1 else f"{status.rounds_committed} rounds"
    return ", ".join([f"{rounds} published ({status.rounds_merged} with two or more pushes)", *lost])


def _of_goal(status: StatusReply) -> str:
    if not status.tk_max_tokens:
        return ""
    share = min(1.0, status.tokens / status.tk_max_tokens)
    return f"/{format_count(status.tk_max_tokens)} ({share:.0%})"


def _name(name: str, alive: bool) -> Text:
    return Text(name, style="bold" if alive else "dim")


def _phase(phase: str, alive: bool) -> str | Text:
    return phase if alive else Text(phase or "gone", style="dim")


def cluster_table(clusters: Sequence[ClusterStatus]) -> FittingTable:
    columns = ("cluster", "phase", "incarnation", "steps", "steps per s", "tokens", "loss", "pushes", "last verdict")
    table = FittingTable(
        "clusters", columns, {"steps", "steps per s", "tokens", "loss"}, {"phase": len("BEGINNING_PUSH")}
    )
    for cluster in clusters:
        lost = [(cluster.pushes_excluded, "excluded"), (cluster.pushes_aborted, "aborted")]
        verdict = Text(cluster.last_verdict, style=_VERDICT_STYLES.get(cluster.last_verdict.lower(), ""))
        if cluster.last_reason:
            verdict.append(f": {cluster.last_reason}", style="default")
        if cluster.quarantined:
            verdict.append(" (quarantined)", style="bold red")
        name = _name(cluster.cluster_id, cluster.alive)
        if cluster.ranks > 1:
            name.append(f" ({cluster.ranks} ranks)", style="default")
        table.add_row(
            name,
            _phase(cluster.phase, cluster.alive),
            str(cluster.incarnation or "-"),
            format_count(cluster.steps_total),
            number(cluster.steps_per_s, 2),
            format_count(cluster.tokens_applied),
            number(cluster.loss, 3),
            ", ".join([f"{cluster.pushes_applied} applied", *(f"{n} {word}" for n, word in lost if n)]),
            verdict,
        )
    return table


def push_table(clusters: Sequence[ClusterStatus]) -> FittingTable:
    """What the last judged push of each cluster measured, and the median of its last cosines with the others' way."""
    columns = ("cluster", "norm", "z-score", "cosine", "usual cosine", "of", "direction")
    table = FittingTable("last judged pushes", columns, right=set(columns[1:6]))
    for cluster in clusters:
        table.add_row(
            _name(cluster.cluster_id, cluster.alive),
            number(cluster.last_norm, 3),
            number(cluster.last_z, 2),
            number(cluster.last_cosine, 2),
            number(cluster.cosine_usual, 2),
            f"{cluster.cosine_rounds} pushes",
            Text("ALARM", style="bold red") if cluster.direction_alarm else "-",
        )
    return table


def slave_table(slaves: Sequence[SlaveStatus], writes_later: bool = False) -> FittingTable:
    """The slaves; with `writes_later` also the newest version on each one's disk."""
    counts = ("memory", "staging", "served", "refused", "turned away")
    columns = ("slave", "phase", "incarnation", "version", *(("on disk",) if writes_later else ()), *counts)
    table = FittingTable("slaves", columns, right=set(counts))
    for slave in slaves:
        table.add_row(
            _name(slave.slave_id, slave.alive),
            _phase(slave.phase, slave.alive),
            str(slave.incarnation or "-"),
            str(slave.version or "-"),
            *([str(slave.durable or "-")] if writes_later else []),
            format_bytes(slave.resident_bytes),
            format_bytes(slave.staging_bytes),
            format_bytes(slave.served_bytes),
            str(slave.refused_chunks),
            str(slave.refused_connections),
        )
    return table


def round_table(rounds: Sequence[RoundSummary]) -> FittingTable:
    columns = ("round", "outcome", "version", "accepted", "excluded", "clip", "share", "tokens", "why")
    table = FittingTable("last rounds", columns, right={"clip", "share", "tokens"})
    for entry in rounds:
        table.add_row(
            str(entry.round),
            entry.outcome,
            str(entry.version or "-"),
            " ".join(entry.accepted) or "-",
            " ".join(entry.excluded) or "-",
            number(entry.kappa, 3),
            number(entry.rho, 3),
            format_count(entry.tokens),
            entry.reason,
        )
    return table


def plain_line(status: StatusReply) -> str:
    """One line for a log: what a person wants to see every few seconds without a terminal. Alarms by kind alone."""
    clusters = " ".join(
        f"{one.cluster_id}:{one.phase} loss {number(one.loss, 3)}"
        if one.alive
        else f"{one.cluster_id}:{one.phase or 'gone'}"
        for one in status.clusters
    )
    run = (
        f"version {_version(status) or '-'}{_on_disk(status)} tokens {format_count(status.tokens)}{_of_goal(status)} "
        f"{_rounds(status)}, {f'round {status.round} {status.phase}' if status.round else 'no open round'}"
    )
    why = (
        _direction_alarm(status),
        *(f"alarm {alarm.kind}: {' '.join(alarm.clusters) or 'the run'}" for alarm in status.alarms),
        *(words for words, _ in _waits(status)),
        _refused_calls(status),
    )
    return " | ".join(part for part in (run, clusters, *why) if part)


def number(value: float, digits: int) -> str:
    """A number with so many decimals; '-' when it is not known."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


# ---- progress --------------------------------------------------------------------------------------------------------
#
# Shows a run while it goes: a table that renews itself on a terminal, a line every few seconds elsewhere.
#
# It must never delay the run, and never write to standard output, which belongs to the result.


PLAIN_EVERY_S = 5.0
SEEN_ENOUGH_S = 15.0
"""The first rounds of a run say little about the next ones: for so long an expectation says more."""

_NARROW_LINES = 45


class Progress(ABC):
    """Shows a run's progress. Use as a context manager."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._begin_s = clock.monotonic_s()
        self._rate = TokenRate()
        self._expected_per_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    @abstractmethod
    def say(self, sentence: str) -> None:
        """Something happened; it stays on the screen."""

    @abstractmethod
    def show(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, faults: Sequence[Fault]) -> None:
        """The present state; it replaces the one before. heldout: None when no process measures it."""

    def expect(self, tokens_per_s: float) -> None:
        """What was measured before the run; it counts until the run itself has been seen for long enough."""
        self._expected_per_s = tokens_per_s

    def _remember(self, status: StatusReply) -> None:
        """Before the first version the processes only start, which says nothing about their speed."""
        if status.published is not None:
            self._rate.add(self._clock.monotonic_s(), status.tokens)

    def _words(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, rate: str = "") -> list[str]:
        """What a status alone does not say, as far as it is known."""
        parts = [loss_sentence(heldout), rate, left_sentence(status, self._rate, self._expected_per_s)]
        return [part for part in parts if part]

    def _stamped(self, sentence: str) -> str:
        return f"{self._clock.monotonic_s() - self._begin_s:6.1f} s  {sentence}"


def loss_sentence(heldout: Sequence[HeldoutPoint] | None) -> str:
    """Empty when no process measures it."""
    if heldout is None:
        return ""
    if not heldout:
        return "held-out loss: not yet"
    last = heldout[-1]
    return f"held-out loss {last.loss:.3f} at version {last.version}"


def left_sentence(status: StatusReply, rate: TokenRate, expected_per_s: float = 0.0) -> str:
    """How long it will still take, in words; empty when the run has no end or nothing is known."""
    left = status.tk_max_tokens - status.tokens
    if left <= 0 or status.published is None or status.paused:
        return ""
    left_s = rate.left_s(left)
    if expected_per_s > 0 and rate.seen_s() < SEEN_ENOUGH_S:
        left_s = left / expected_per_s
    return f"about {format_seconds(round(left_s))} left" if left_s is not None else ""


def fault_sentence(fault: Fault) -> str:
    back = f"back at {fault.back.seconds:.0f} s as {fault.back_as}" if fault.back else "not back yet"
    return f"{fault.what} at {fault.when.seconds:.0f} s, {back}"


class PlainProgress(Progress):
    """Shows progress as lines, for a log."""

    def __init__(self, console: Console, clock: Clock, every_s: float = PLAIN_EVERY_S) -> None:
        super().__init__(console, clock)
        self._every_s = every_s
        self._next_s = self._begin_s
        self._alarms: set[tuple[str, tuple[str, ...]]] = set()
        """Kind and clusters of those whose sentences were printed; the numbers in a sentence change all the time."""

    def say(self, sentence: str) -> None:
        try:
            self._console.print(self._stamped(sentence), markup=False, highlight=False, soft_wrap=True)
        except OSError as error:  # it may go to a file
            if error.errno not in DISK_ERRORS:
                raise

    def show(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, faults: Sequence[Fault]) -> None:
        now_s = self._clock.monotonic_s()
        self._remember(status)
        for alarm in status.alarms:
            if (alarm.kind, alarm.clusters) not in self._alarms:
                self.say(f"alarm: {alarm.sentence}")
        self._alarms = {(alarm.kind, alarm.clusters) for alarm in status.alarms}
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        self.say(" | ".join([plain_line(status), *self._words(status, heldout)]))


class LiveProgress(Progress):
    """Shows progress as a table that renews itself, with what happened above it."""

    def __init__(self, console: Console, clock: Clock) -> None:
        super().__init__(console, clock)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        self._live.console.print(Text(self._stamped(sentence), style="dim"))

    def show(self, status: StatusReply, heldout: Sequence[HeldoutPoint] | None, faults: Sequence[Fault]) -> None:
        self._remember(status)
        words = self._words(status, heldout, f"{self._rate.per_s():.0f} tokens/s")
        view: list[RenderableType] = [
            status_view(status, width_is_narrow=self._console.height < _NARROW_LINES),
            Text("  ".join(words), style="bold"),
            *(Text(fault_sentence(fault), style="red" if fault.back is None else "green") for fault in faults),
        ]
        self._live.update(Group(*view), refresh=True)


def progress_for(console: Console, clock: Clock) -> Progress:
    """A live table when the console is a terminal, lines otherwise."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, clock)
    return PlainProgress(console, clock)
