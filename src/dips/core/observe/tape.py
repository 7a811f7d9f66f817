"""Writes and reads a process's tape: its record for machines.

The tape is the append-only record from which a run is explained, checked and drawn; it is written by the
thread that makes the event, one line at a time, and is whole up to the last line even after a kill. Each line ends
with a digest of itself and of the digest before it, so that a line that was changed, taken out or moved is found when
the tape is read; only lines that are missing at its end are not. Never raises because of a value that JSON does not
know, and never samples: what is written is all there was.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Self

import xxhash

from dips.core.clock import Clock, SystemClock
from dips.core.errors import ConfigError, FatalError, of_disk
from dips.core.files import closed, make_folder
from dips.core.units import format_bytes, format_seconds

HEAD = ("wall_s", "monotonic_s", "role", "name", "kind", "cause")
"""The keys that every line of a tape begins with; the event's own fields follow them."""

CHAIN = "chain"
"""The key that every line ends with: 16 hex digits, xxh3-64 of those before it and of the line without this key."""

_CHAIN = re.compile(rb',"chain":"([0-9a-f]{16})"\}\Z')

_STEP_BYTES = 1 << 16


def new_cause() -> str:
    """A fresh cause id: 12 hex digits. For adapters (clients, servers) only; state machines get theirs."""
    return secrets.token_hex(6)


class Tape:
    """An append-only file of JSON lines, one event each, flushed to the system line by line.

    Safe to call from several threads. With path None it writes nothing, for embedding and tests.
    """

    def __init__(
        self, path: Path | None, role: str, name: str, clock: Clock | None = None, *, may_lose: bool = False
    ) -> None:
        """Open for appending, making the folder if needed. Raises ConfigError if it cannot be written.

        may_lose: for who must go on when the disk takes no more: events are lost then, one warning says so, and the
        next event that is written again follows a line of kind "gap" with their number, `lost`.
        """
        self._clock: Clock = clock or SystemClock()
        self._who = {"role": role, "name": name}
        self._lock = threading.Lock()
        self._path = path
        self._may_lose = may_lose
        self._lost = 0
        self._file: FileIO | None = None
        self._chain = b""
        if path is not None:
            self._file, self._chain = _open_to_append(path)

    def write(self, kind: str, cause: str, **fields: object) -> None:
        """Append one event: what happened, because of what, and its own fields.

        Values may be JSON's own, dataclasses, enums, paths, bytes (written as hex) and containers of these;
        NaN and infinities are written as null, because JSON has none. Raises ValueError for a field that is
        named like a head key, FatalError when the disk refuses the line, unless this tape may lose events.
        """
        with self._lock:
            if self._file is None:
                return
            taken = fields.keys() & {*HEAD, CHAIN}
            if taken:
                raise ValueError(f"tape field {sorted(taken)} has the name of a head key")
            lines, chain = b"", self._chain
            if self._lost:
                lines, chain = self._line("gap", "-", {"lost": self._lost}, chain)
            line, chain = self._line(kind, cause, fields, chain)
            try:
                _append(self._file, lines + line)
            except OSError as error:
                self._refused(error)
            else:
                self._lost = 0
                self._chain = chain

    def _line(self, kind: str, cause: str, fields: Mapping[str, object], chain: bytes) -> tuple[bytes, bytes]:
        """The line and its digest, which follows `chain`."""
        times = {"wall_s": self._clock.wall_s(), "monotonic_s": self._clock.monotonic_s()}
        line = {**times, **self._who, "kind": kind, "cause": cause, **fields}
        text = json.dumps(_plain(line), separators=(",", ":"), allow_nan=False).encode()[:-1]
        chain = next_chain(chain, text)
        return b'%b,"chain":"%b"}\n' % (text, chain), chain

    def _refused(self, error: OSError) -> None:
        sentence = f"tape {self._path} cannot be written ({error.strerror}): make room on its disk"
        if not self._may_lose:
            raise FatalError(f"{sentence}, then start again") from error
        if not self._lost:
            logging.getLogger("dips").warning("%s; until then its events are lost, and all else goes on", sentence)
        self._lost += 1

    def close(self) -> None:
        """Close the file; later writes are dropped. May be called twice."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def next_chain(chain: bytes, text: bytes) -> bytes:
    """The digest of a line: `chain` is the one before, or empty; `text` is the line up to its own digest's comma."""
    return xxhash.xxh3_64_hexdigest(chain + text).encode()


def read_tape(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a tape, oldest first. A torn last line (its writer was killed, or writes) is left out.

    Raises ConfigError when the file cannot be read, or a line is not an event or not the one that was written.
    """
    for event, _ in read_chained(path):
        yield event


def read_chained(path: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """As read_tape, and with each event whether a digest vouches for it: older releases wrote none."""
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"tape {path} cannot be read: {error.strerror}") from error
    chain = b""
    for number, line in enumerate(lines, 1):
        if not line and not chain:
            continue
        match = _CHAIN.search(line)
        if match is not None:
            if match[1] != next_chain(chain, line[: match.start()]):
                raise ConfigError(
                    f"line {number} of tape {path}, or one before it, is not what was written (its digest differs): "
                    "the file was changed or damaged; restore it from a copy"
                )
            chain = match[1]
        elif chain:
            raise ConfigError(_no_event(path, number))
        yield _event(line, path, number), match is not None
    # What is after the last newline is empty or torn. A whole line and one byte more had a newline there.
    if _CHAIN.search(torn[:-1]):
        raise ConfigError(_no_event(path, len(lines) + 1))


def _no_event(path: Path, number: int) -> str:
    return f"line {number} of tape {path} is not an event: the file was changed or damaged; restore it from a copy"


def _open_to_append(path: Path) -> tuple[FileIO, bytes]:
    """The file, whole up to its last line, and that line's digest."""
    try:
        make_folder(path.parent)
        with open(path, "ab+", opener=closed) as file:
            _cut_torn_line(file)
            # The digest at the end of the last line; empty where an older release wrote it, and in a new file
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 64))
            match = _CHAIN.search(file.read().removesuffix(b"\n"))
            chain = match[1] if match else b""
        return open(path, "ab", buffering=0, opener=closed), chain
    except OSError as error:
        raise of_disk(error, f"tape {path} cannot be written: {error.strerror}; choose another path") from error


def _append(file: FileIO, lines: bytes) -> None:
    """All or nothing: what a full disk took of the lines is cut off again. Raises OSError."""
    written = file.write(lines)
    if written != len(lines):
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _cut_torn_line(file: BinaryIO) -> None:
    """A writer that was killed may have left half a line: cut it off, so that the next event has its own."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _STEP_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            file.truncate(start + newline + 1)
            return
        end = start
    file.truncate(0)


def _event(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise ConfigError(_no_event(path, number))
    event.pop(CHAIN, None)
    return event


def _plain(value: object) -> object:
    """A value in JSON's own types. An object of an unknown kind is written as its text."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item())  # a numpy scalar, without importing numpy here
    return str(value)


STARTING = "starting"
"""Of the tape's records; each has `what`, `done`, `of` and the `sentence`."""

EVERY_S = 5.0
"""Between two lines about one thing."""

QUIET_S = 1.0
"""What takes no longer is not worth a line."""


class Starting:
    """One thing that takes long, and how far it is; made when it begins. To be used by one thread at a time."""

    def __init__(self, what: str, logger: logging.Logger, tape: Tape, clock: Clock, quiet_s: float = QUIET_S) -> None:
        """what: a word or two for people, such as "memory". quiet_s: before the first line."""
        self._what = what
        self._logger = logger
        self._tape = tape
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._due_s = self._began_s + quiet_s
        self._said = False

    def compiles(self, name: str, done: int, of: int, kept: str = "") -> None:
        """A kernel of this name is compiled now; `done` are begun, this one included. kept: where the code is kept, or
        why it is not; for the first line."""
        more = f"; {kept}" if kept and not self._said else ""
        self._at(done, of, f"{self._what}: compiling {done} of {of} ({name}){more}")

    def touched(self, done_bytes: int, of_bytes: int) -> None:
        """So much memory is really there by now."""
        self._at(done_bytes, of_bytes, f"{self._what}: {format_bytes(done_bytes)} of {format_bytes(of_bytes)} are made")

    def end(self) -> None:
        """It is over; reports so if progress was reported."""
        if self._said:
            took = format_seconds(round(self._clock.monotonic_s() - self._began_s, 1))
            self._say(1, 1, f"{self._what}: ready after {took}")

    def _at(self, done: int, of: int, sentence: str) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            self._said = True
            self._say(done, of, sentence)

    def _say(self, done: int, of: int, sentence: str) -> None:
        self._logger.info("%s", sentence)
        self._tape.write(STARTING, "", what=self._what, done=done, of=of, sentence=sentence)
