"""A process's log on stderr, for people: its setup, the two forms of a line, and the last sentence of a process.

    2026-03-01T12:00:00.250Z W slave s0 [r1.7]: round r1.7: no space is left on the disk
    {"wall_s":1772366400.25,"level":"WARNING","role":"slave","name":"s0","cause":"r1.7","logger":...,"sentence":...}

Both say when (UTC), how severe, which process, the cause (a cause id: a push, a round; none where there is none) and
one sentence. What a sentence quotes may come from an unknown peer: control characters are written out, and lines after
the first begin with two blanks, so that no text can pass for another process's line or steer a terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
import sysconfig
import traceback
import unicodedata
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, TextIO

from pydantic import AfterValidator

from dips.core.errors import ConfigError, DipsError, LocalProtocolError
from dips.core.units import validating

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
    """One line of a log."""

    wall_s: float  # Unix time
    level: str
    role: str
    name: str
    sentence: str
    cause: str = ""  # empty where there is none
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


# ---- the log of a process ----

CHANGE_KEYS = 1024
"""Keys a ChangeLogger remembers. A key is a cluster, slave or reason: 1024 of 200 bytes are 200 KB."""


class ChangeLogger:
    """Logs a reason when it changes and is silent while it stays, so that waiting does not flood the log."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: OrderedDict[str, str] = OrderedDict()

    def report(self, key: str, sentence: str, level: int | str = logging.INFO, cause: str = "") -> bool:
        """Log `sentence`, with its cause id, unless it was the last one for `key`; returns whether it did.

        An empty sentence means that the matter is settled: nothing is logged, and the next reason will be.
        """
        changed = self._last.get(key, "") != sentence
        self._last[key] = sentence
        self._last.move_to_end(key)
        if len(self._last) > CHANGE_KEYS:
            self._last.popitem(last=False)
        if changed and sentence:
            self._logger.log(_level_number(level), "%s", sentence, extra={"cause": cause})
        return changed and bool(sentence)


def configure_logging(role: str, name: str, level: str = "INFO", log_format: LogFormat = "human") -> None:
    """Send this process's log to stderr, each line naming the process, in one of the two forms.

    Replaces handlers that were there: a process has one log. Raises ConfigError for an unknown level.
    """
    number = _level_number(level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role, name, log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    if log_format == "json":
        sys.excepthook = _log_crash


class _Unconfigured(logging.StreamHandler[TextIO]):
    """Prints our lines for a program that has not configured logging, until it does."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            ours = logging.getLogger("dips")
            ours.removeHandler(self)
            ours.setLevel(logging.NOTSET)
        else:
            super().emit(record)


def show_where_logging_is_not_configured() -> None:
    """Lets a user's program without logging.basicConfig() see what its cluster does; else it sees warnings alone."""
    ours = logging.getLogger("dips")
    if not ours.hasHandlers() and ours.level == logging.NOTSET:
        handler = _Unconfigured(sys.stderr)
        handler.setFormatter(logging.Formatter("dips: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)


def say_last(sentence: str, who: str = "dips") -> None:
    """Report why the process ends: a line of its log where that is for machines, else plain on stderr."""
    root = logging.getLogger()
    forms = [handler.formatter.form for handler in root.handlers if isinstance(handler.formatter, LineFormatter)]
    if "json" in forms:
        root.critical("%s", sentence)
    else:
        with contextlib.suppress(OSError):  # its log may be on a disk that is full
            print(f"{who}: {escaped(sentence)}", file=sys.stderr, flush=True)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook: a bug's trace is one line as well, where lines are for machines."""
    logging.getLogger("dips").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _level_number(level: int | str) -> int:
    number = level if isinstance(level, int) else logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log level {level!r} is unknown: choose DEBUG, INFO, WARNING or ERROR")
    return number


def _known_level(level: str) -> str:
    _level_number(level)
    return level.upper()


LogLevel = Annotated[str, AfterValidator(validating(_known_level))]
"""A setting: the name of a level, also in small letters."""


# ---- errors that a user's own program does not catch ----
#
# Errors stay ordinary exceptions for those who catch them
# (docs/decisions/0033-one-sentence-in-a-users-own-program.md).

_PACKAGE = str(Path(__file__).absolute().parents[2])
"""The folder of all our packages, as frames name it."""


class _Sentence(str):
    """A note of an exception that is said in place of its stack trace."""


def say_instead_of_trace(interrupt: KeyboardInterrupt, sentence: str) -> None:
    """Has end_with_one_sentence() say this of a ctrl-C; the interpreter still ends the process as by SIGINT."""
    interrupt.add_note(_Sentence(sentence))


def end_with_one_sentence() -> None:
    """Ends this process, as our commands do, with one sentence about an error of ours that its program does not catch.

    What is no error of ours, or a bug of ours, goes to the hook that was there; but of a ctrl-C that ended a cluster
    (say_instead_of_trace) its sentence is said.
    """
    former = sys.excepthook
    if getattr(former, "says_one_sentence", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        instead = [note for note in getattr(error, "__notes__", ()) if isinstance(note, _Sentence)]
        if not instead and (not isinstance(error, DipsError) or isinstance(error, LocalProtocolError)):
            former(kind, error, trace)
            return
        logging.getLogger("dips").debug("where it was raised", exc_info=(kind, error, trace))
        say_last((instead[-1] if instead else str(error)) + _place(trace))
        if isinstance(error, DipsError) and not (sys.flags.interactive or hasattr(sys, "ps1")):
            raise SystemExit(error.exit_code)  # the interpreter ends with it, after what atexit has to do

    hook.says_one_sentence = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _place(trace: TracebackType | None) -> str:
    """The line of the person's program: the innermost one that is neither ours nor of an installed package."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(("<", _PACKAGE, *installed)):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
