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
from dataclasses import dataclass
from pathlib import Path

import dips
from dips.compare.jobs import write_json
from dips.core.release import software_versions
from dips.papers.findings import Finding, Kind, Told

PACKAGE = Path(dips.__file__ or "").parent
BENCHMARKS = PACKAGE.parent.parent / "benchmarks"
"""Beside the package in a clone of the repository; an installed package has none."""

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
    def kind(self) -> Kind:
        """What its numbers are: benchmarks alone start real processes and measure them."""
        return Kind.MEASURED if self.is_benchmark else _KINDS[self.program[0]]

    def arguments(self, quick: bool) -> list[str]:
        return [*self.program[1:], *(self.quick if quick else self.full)]

    def command(self, quick: bool) -> str:
        """As a reader types it in a clone."""
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
        """Where its pictures are."""
        return self.folder / source.name

    def run(self, sources: Sequence[Source]) -> list[Outcome]:
        """In their order. Raises DipsError where a result cannot be written; KeyboardInterrupt leaves what is done."""
        outcomes = []
        for number, source in enumerate(sources, 1):
            command = source.command(self.quick)
            say = f"{number} of {len(sources)}: {command}"
            left_out = next((word for word in self.without if word in command), None)
            outcome = self._kept(source)
            if left_out is not None:
                self.say(say)
                outcome = Outcome(source, why_not=f"left out (--without {shlex.quote(left_out)})")
            elif outcome is None:
                self.say(say)
                outcome = self._run(source)
            else:
                self.say(f"{say} (kept from before)")
            if outcome.why_not:
                self.say(f"  {outcome.why_not}")
            outcomes.append(outcome)
        return outcomes

    def _path(self, source: Source) -> Path:
        return self.files(source) / ("quick.json" if self.quick else "full.json")

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

    def _run(self, source: Source) -> Outcome:
        folder, digest = self.files(source), source.digest(self.quick)
        folder.mkdir(parents=True, exist_ok=True)
        if source.is_benchmark and not (BENCHMARKS / source.program[0]).exists():
            return Outcome(source, why_not="the benchmarks are in the repository: type this in a clone of it")
        first = [str(BENCHMARKS / source.program[0])] if source.is_benchmark else ["-m", "dips.cli", source.program[0]]
        more = [option.format(folder=folder) for option in source.files]
        command = [sys.executable, *first, *source.arguments(self.quick), *more, *(["--json"] if source.json else [])]
        log = folder / "log.txt"
        code, printed, complaint = _output(command, log)
        if code == CANNOT[0] and CANNOT[1] in complaint:
            return Outcome(source, why_not=f"not possible on this machine: {complaint}")
        if code not in (0, *source.also_ends_with) or not printed:
            return Outcome(source, why_not=f"the command failed with exit code {code}: {complaint}", failed=True)
        told = json.loads(printed) if source.json else None
        if source.draw is not None:
            source.draw(told, folder)
        undrawn = [picture.file for picture in source.pictures if not (folder / picture.file).exists()]
        if undrawn:
            return Outcome(source, why_not=f"the command drew no {', '.join(undrawn)}: see {log}", failed=True)
        write_json(self._path(source), {"digest": digest, "told": told}, OUT)
        return Outcome(source, told)


def _output(command: Sequence[str], log: Path) -> tuple[int, str, str]:
    """Exit code, what it printed, and the last line of its complaints, which all go to the log. An interrupt ends the
    command, too, and waits for it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            printed, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return process.returncode, printed, lines[-1].strip() if lines else "it said nothing"
