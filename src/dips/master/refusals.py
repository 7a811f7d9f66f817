"""Limits how often refusals are written: a caller with a thousand calls a second must not fill the disk.

The first refusal of a kind is written at once, the next ones together, with their number, a second later. Must never
lose count. Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dips.master.state.effects import Record

KIND = "refused"

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
    last: Record | None = None


class Refusals:
    """The refusals of one shell."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._log_lines = float(LOG_LINES)
        self._logged_s = 0.0
        self._unlogged = 0

    def note(self, record: Record, now_s: float) -> Record | None:
        """The line to write now; None when the refusal waits for others of its kind."""
        record = replace(record, fields={name: _short(value) for name, value in record.fields.items()})
        fields = record.fields
        key = (str(fields.get("method") or fields.get("call")), str(fields.get("code")))
        kind = self._kinds.get(key)
        if kind is None:
            self._kinds[key] = _Kind(now_s)
            return record
        kind.n_waiting, kind.last = kind.n_waiting + 1, record
        return self._line(kind, now_s) if now_s - kind.written_s >= EVERY_S else None

    def due(self, now_s: float, everything: bool = False) -> list[Record]:
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

    def _line(self, kind: _Kind, now_s: float) -> Record:
        assert kind.last is not None, "a counted refusal was noted"
        line = replace(kind.last, fields={**kind.last.fields, "count": kind.n_waiting})
        kind.written_s, kind.n_waiting = now_s, 0
        return line


def _short(value: object) -> object:
    return value[:MAX_CHARACTERS] if isinstance(value, str) else value
