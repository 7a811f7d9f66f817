"""Writes and reads the two forms of a log line: one for people, one for machines.

    2026-03-01T12:00:00.250Z W slave s0 [r1.7]: round r1.7: no space is left on the disk
    {"wall_s":1772366400.25,"level":"WARNING","role":"slave","name":"s0","cause":"r1.7","logger":...,"sentence":...}

Both say when (UTC), how severe, which process, the cause (a cause id: a push, a round; none where there is none) and
one sentence. What a sentence quotes may come from an unknown peer: control characters are written out, and lines after
the first begin with two blanks, so that no text can pass for another process's line or steer a terminal.
"""

from __future__ import annotations

import json
import logging
import math
import re
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["human", "json"]
LOG_FORMAT_VARIABLE = "DIPS_LOG_FORMAT"
LOG_LEVEL_VARIABLE = "DIPS_LOG_LEVEL"

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LEVEL_OF_LETTER = {level[0]: level for level in LEVELS}

LATEST_WALL_S = 253_402_300_799.0
"""The last second of the year 9999; a time beyond it, or before 1970, is none."""

_HUMAN = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[DIWEC]) (?P<role>[^\s:\[\]]+)"
    r"(?: (?P<name>[^\s\[\]]+))?(?: \[(?P<cause>[^\s\]]+)\])?: (?P<sentence>.*)\Z",
    re.ASCII,
)
_HIDDEN_KINDS = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that are not shown as themselves: controls, directions, halves of pairs, unassigned, line ends."""


@dataclass(frozen=True)
class LogLine:
    """One line of a log. wall_s: Unix time. cause: empty where there is none."""

    wall_s: float
    level: str
    role: str
    name: str
    sentence: str
    cause: str = ""
    logger: str = ""
    exception: str = ""

    def to_json(self) -> dict[str, object]:
        """Stable keys; those without a value are left out, but for name and sentence."""
        line: dict[str, object] = {"wall_s": self.wall_s, "level": self.level, "role": self.role, "name": self.name}
        optional = {"cause": self.cause, "logger": self.logger}
        line |= {key: value for key, value in optional.items() if value}
        line["sentence"] = self.sentence
        if self.exception:
            line["exception"] = self.exception
        return line


def escaped(text: str) -> str:
    """The text with every character that a terminal would act upon, or hide, written out; newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    shown = []
    for char in text:
        if char == "\n" or unicodedata.category(char) not in _HIDDEN_KINDS:
            shown.append(char)
        elif "\ud800" <= char <= "\udfff":  # half of a pair, which no codec writes
            shown.append(f"\\u{ord(char):04x}")
        else:
            shown.append(char.encode("unicode_escape").decode())
    return "".join(shown)


def human(line: LogLine) -> str:
    """The line for people, without its newline at the end."""
    speaker = f"{line.role} {line.name}" if line.name else line.role
    because = f" [{line.cause}]" if line.cause else ""
    text = f"{line.sentence}\n{line.exception}" if line.exception else line.sentence
    head = escaped(f"{line.level[:1]} {speaker}{because}: ").replace("\n", "\\n")
    return f"{timestamp(line.wall_s)} {head}" + escaped(text).replace("\n", "\n  ")


def as_json(line: LogLine) -> str:
    """The line for machines, without its newline at the end."""
    return json.dumps(line.to_json(), separators=(",", ":"))


def rendered(line: LogLine, form: LogFormat) -> str:
    return as_json(line) if form == "json" else human(line)


def parse(text: str) -> LogLine | None:
    """Inverse of both forms, for one line of text; None for anything else."""
    if text.startswith("{"):
        return _from_json(text)
    match = _HUMAN.match(text)
    if match is None:
        return None
    try:
        wall_s = datetime.strptime(match["time"], "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()
    except ValueError:
        return None
    level = _LEVEL_OF_LETTER[match["level"]]
    return LogLine(wall_s, level, match["role"], match["name"] or "", match["sentence"], match["cause"] or "")


def timestamp(wall_s: float) -> str:
    """2026-03-01T12:00:00.250Z."""
    inside = min(max(wall_s, 0.0), LATEST_WALL_S)
    return datetime.fromtimestamp(inside, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LineFormatter(logging.Formatter):
    """Makes one of the two forms of a record. A record's `cause` (extra={"cause": ...}) is its cause id."""

    def __init__(self, role: str, name: str, form: LogFormat) -> None:
        super().__init__()
        self.form = form
        self._role, self._name = role, name

    def format(self, record: logging.LogRecord) -> str:
        return rendered(
            LogLine(
                record.created,
                record.levelname,
                self._role,
                self._name,
                record.getMessage(),
                _cause(getattr(record, "cause", "")),
                record.name,
                self.formatException(record.exc_info) if record.exc_info else "",
            ),
            self.form,
        )


def _cause(value: object) -> str:
    """A tape says "-" where there is none."""
    text = "" if value in ("", "-", None) else str(value)
    return "".join(char for char in text if char.isprintable() and char not in " ]")[:200]


def _from_json(text: str) -> LogLine | None:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    wall_s = _time(raw.get("wall_s"))
    if wall_s is None or not isinstance(raw.get("sentence"), str) or raw.get("level") not in LEVELS:
        return None
    return LogLine(
        wall_s,
        raw["level"],
        _text(raw, "role"),
        _text(raw, "name"),
        raw["sentence"],
        _text(raw, "cause"),
        _text(raw, "logger"),
        _text(raw, "exception"),
    )


def _time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST_WALL_S:
        return None
    return float(value) if math.isfinite(value) else None


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key, "")
    return value if isinstance(value, str) else ""
