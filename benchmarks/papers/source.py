"""Runs the commands that findings come from, and keeps what they print."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import NamedTuple

import dips
from dips.core.errors import DipsError
from dips.core.release import software_versions
from dips.core.threads import usable_processors
from dips.lab.compare.jobs import write_json
from papers.findings import Finding, Kind, Told

PACKAGE = Path(dips.__file__ or "").parent
BENCHMARKS = Path(__file__).resolve().parents[1]

CANNOT = 2, "cannot run here"
"""Exit code and words of a benchmark that needs what this machine lacks; any other end but success is a failure."""

OUT = "--out"
"""The option that says where results go."""

ROLES = ("core", "master", "protos", "slave", "worker")
_KINDS = {"compare": Kind.SIMULATED, "simulate": Kind.SIMULATED, "plan": Kind.COMPUTED}


@dataclass(frozen=True)
class Picture:
    """A file in the source's folder that its command or draw() makes."""

    place: str
    file: str
    caption: str


@dataclass(frozen=True)
class Source:
    """A command, and how to read what it prints.

    quick, full: its arguments beyond those of the program. files: its options for files; {folder} in them is the
    source's own folder. computes: the packages of this project that its numbers depend on. json: whether it prints
    JSON; else only its pictures are used. draw: draws what the command itself does not, from what it printed.
    only_full: it takes hours, however small. also_ends_with: exit codes with which it prints as much as with 0.
    """

    name: str
    program: tuple[str, ...]
    findings: Callable[[Told], Iterable[Finding]]
    computes: tuple[str, ...]
    quick: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    json: bool = True
    pictures: tuple[Picture, ...] = ()
    draw: Callable[[Told, Path], None] | None = None
    only_full: bool = False
    also_ends_with: tuple[int, ...] = ()

    @property
    def is_benchmark(self) -> bool:
        return self.program[0].startswith("bench_")

    @property
    def wants_the_machine(self) -> bool:
        """Whether something else at the same time would change what it measures, or find no processor free."""
        return self.is_benchmark or self.program[0] == "compare"

    @property
    def kind(self) -> Kind:
        """What its numbers are: benchmarks alone start real processes and measure them."""
        return Kind.MEASURED if self.is_benchmark else _KINDS[self.program[0]]

    def arguments(self, quick: bool) -> list[str]:
        return [*self.program[1:], *(self.quick if quick else self.full)]

    def command(self, quick: bool) -> str:
        """As a reader types it."""
        first = ["python", f"benchmarks/{self.program[0]}"] if self.is_benchmark else ["dips", self.program[0]]
        return shlex.join([*first, *self.arguments(quick)])

    def digest(self, quick: bool) -> str:
        """Equal for runs that would give the same numbers, but for the machine."""
        found = hashlib.blake2b(digest_size=16)
        found.update(json.dumps([software_versions(), self.command(quick)]).encode())
        folders = [PACKAGE / package for package in self.computes]
        if self.is_benchmark:
            folders.append(BENCHMARKS)
        for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES):
            found.update(f"\0{path.name}\0".encode() + path.read_bytes())
        return found.hexdigest()


SOURCES = (".py", ".toml", ".csv")


@dataclass(frozen=True)
class Outcome:
    """told: what the command printed; why_not: why there is nothing, in a sentence. failed: it should have worked."""

    source: Source
    told: Told = None
    why_not: str = ""
    failed: bool = False

    def findings(self) -> list[Finding]:
        return [] if self.why_not else list(self.source.findings(self.told))


@dataclass
class Runner:
    """Runs sources that have no kept result. say: one line of progress at a time. without: words; a command that has
    one of them is left out.
    """

    folder: Path
    quick: bool
    say: Callable[[str], None]
    without: tuple[str, ...] = ()

    def files(self, source: Source) -> Path:
        """Where its pictures and its result are. Quick and full ones have folders of their own: one does not overwrite
        the other's pictures, nor its kept runs."""
        return self.folder / ("quick" if self.quick else "full") / source.name

    def run(self, sources: Sequence[Source]) -> list[Outcome]:
        """In their order; those that do not want the machine run last, side by side. Raises DipsError where a result
        cannot be written; KeyboardInterrupt leaves what is done."""
        outcomes: dict[str, Outcome] = {}
        commands = {
            source.name: f"{number} of {len(sources)}: {source.command(self.quick)}"
            for number, source in enumerate(sources, 1)
        }

        def keep(outcome: Outcome) -> None:
            outcomes[outcome.source.name] = outcome
            if outcome.why_not:
                self.say(f"  {outcome.source.command(self.quick)}: {outcome.why_not}")

        def printed(source: Source) -> tuple[str, Printed]:
            self.say(commands[source.name])
            digest = source.digest(self.quick)  # of the program that begins: it may change before the end
            return digest, running.run(self._words(source), self.files(source))

        for source in sources:
            outcome = self._without_running(source)
            if outcome is not None:
                self.say(commands[source.name] + ("" if outcome.why_not else " (kept from before)"))
                keep(outcome)
        missing = [source for source in sources if source.name not in outcomes]
        with ThreadPoolExecutor(usable_processors()) as pool, Commands() as running:
            for source in missing:
                if source.wants_the_machine:
                    keep(self._outcome(source, *pool.submit(printed, source).result()))
            others = {pool.submit(printed, source): source for source in missing if not source.wants_the_machine}
            for future in as_completed(others):
                keep(self._outcome(others[future], *future.result()))
        return [outcomes[source.name] for source in sources]

    def _without_running(self, source: Source) -> Outcome | None:
        """What is kept from before, or why the command is not run."""
        command = source.command(self.quick)
        for word in self.without:
            if word in command:
                return Outcome(source, why_not=f"left out (--without {shlex.quote(word)})")
        return self._kept(source)

    def _path(self, source: Source) -> Path:
        return self.files(source) / "result.json"

    def _kept(self, source: Source) -> Outcome | None:
        try:
            kept = json.loads(self._path(source).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(kept, dict) or kept.get("digest") != source.digest(self.quick):
            return None
        if not all((self.files(source) / picture.file).exists() for picture in source.pictures):
            return None
        return Outcome(source, kept["told"])

    def _words(self, source: Source) -> list[str]:
        first = [str(BENCHMARKS / source.program[0])] if source.is_benchmark else ["-m", "dips.cli", source.program[0]]
        more = [option.format(folder=self.files(source)) for option in source.files]
        return [sys.executable, *first, *source.arguments(self.quick), *more, *(["--json"] if source.json else [])]

    def _outcome(self, source: Source, digest: str, printed: Printed) -> Outcome:
        """Of a command that has ended: draws what it did not, and keeps the result."""
        folder = self.files(source)
        if printed.code == CANNOT[0] and CANNOT[1] in printed.complaint:
            return Outcome(source, why_not=f"not possible on this machine: {printed.complaint}")
        if printed.code not in (0, *source.also_ends_with) or not printed.text:
            why = f"the command failed with exit code {printed.code}: {printed.complaint}"
            return Outcome(source, why_not=why, failed=True)
        told = json.loads(printed.text) if source.json else None
        if source.draw is not None:
            source.draw(told, folder)
        undrawn = [picture.file for picture in source.pictures if not (folder / picture.file).exists()]
        if undrawn:
            why = f"the command drew no {', '.join(undrawn)}: see {folder / LOG}"
            return Outcome(source, why_not=why, failed=True)
        write_json(self._path(source), {"digest": digest, "told": told}, OUT)
        return Outcome(source, told)


LOG = "log.txt"


class Printed(NamedTuple):
    """Exit code, standard output, and the last line of standard error, which all goes to the log."""

    code: int
    text: str
    complaint: str


class Commands(AbstractContextManager["Commands"]):
    """Runs commands from any thread. An exception that leaves the block interrupts those that run, and none begins."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(self, command: Sequence[str], folder: Path) -> Printed:
        """Waits for its end. Raises DipsError once the block was left."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
        folder.mkdir(parents=True, exist_ok=True)
        log, output = folder / LOG, folder / "printed.txt"
        with log.open("wb") as errors, output.open("wb") as printed:
            with self._lock:
                if self._ended:
                    raise DipsError("interrupted")
                process = subprocess.Popen(command, stdout=printed, stderr=errors, env=environment)
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return Printed(code, output.read_text(), lines[-1].strip() if lines else "it said nothing")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
            for process in self._running:
                process.send_signal(signal.SIGINT)
