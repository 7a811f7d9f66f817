"""python -m mutants --sample 240 --seed 1: small faults, one at a time, and whether a unit test fails for each.

The last line is `N of M killed, P %`. A fault that nothing in the process can meet (its function does not live, it runs
at import alone, or its code is the same) does not count, and another one is drawn. What takes ten times as long as
before, or rests, counts as killed. Survivors are no failure of the command.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from run_all import UNLISTED_S, read_seconds
from support.repository import ROOT, SOURCE, TESTS, modules

from dips.core.threads import usable_processors
from mutants import draw, record
from mutants.faults import Fault, changed_text, faults_of
from mutants.warm import End, Test, Warm, pytest_main

AREAS = ("master", "slave", "worker", "core", "planner", "judge", "deploy", "cli")
OTHERS = ("lab", "local", "trainer", "doctor")

TEST_S = 60.0
"""Of tests for one fault, at most."""

NO_TEST = "no test executes it"
INTERRUPTED = 2
EQUIVALENT = TESTS / "mutants_equivalent.txt"
MOST_EXCLUDED = 8 / 240
"""The largest part of a sample that may be excluded as equivalent: more means that real survivors are in the list."""


RECORD_SHARE = 0.6
"""Of the time that --minutes gives, for planning."""

RECORDED, FAULT_S = 1.5, 2.0
"""Expected: how many times as long tests take while they are recorded; the processor time of one fault."""


@dataclass
class Outcome:
    """What became of a fault: killed, survived, excluded or not reachable."""

    fault: Fault
    change: str
    outcome: str
    why: str
    by: str = ""

    @property
    def key(self) -> str:
        return f"{self.fault.path} {self.fault.function} {self.fault.operator}: {self.change}"


def _refuse(message: str) -> NoReturn:
    print(f"make mutants: {message}", file=sys.stderr)
    sys.exit(2)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--sample", type=int, help="how many faults, the same number in each area")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--area", action="append", choices=AREAS + OTHERS, help="a package; the first eight otherwise")
    parser.add_argument("--changed", metavar="BASE", help="faults on the lines that differ from this commit")
    parser.add_argument("--minutes", type=float, help="how long, recording included; then the rest is left out")
    parser.add_argument("--one", metavar="PLACE", help="this fault alone, and why a test fails for it")
    parser.add_argument("--list", action="store_true", help="every place of the areas")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes there")
    asked = parser.parse_args(given)
    if sum(way is not None for way in (asked.sample, asked.changed, asked.one, asked.list or None)) != 1:
        _refuse("give one of --sample N, --changed BASE, --one PLACE and --list")
    if asked.sample is not None and asked.sample < len(asked.area or AREAS):
        _refuse("--sample must have one fault for each area at least")
    if asked.one is not None and not re.fullmatch(r"src/dips/\S+\.py:\d+:\d+:[a-z-]+(:\d+)?", asked.one):
        _refuse(f"--one {asked.one}: a place is like src/dips/core/ids.py:12:4:comparison")
    return asked


# ---- which faults ----


def _of_files(paths: Iterable[Path]) -> Iterator[Fault]:
    for path in paths:
        yield from faults_of(str(path.relative_to(ROOT)), path.read_text())


def _of_area(area: str) -> list[Fault]:
    return list(_of_files(path for path in modules() if path.is_relative_to(SOURCE / area)))


def _changed_lines(base: str) -> dict[str, set[int]]:
    command = ["git", "diff", "-U0", "--find-renames", base, "--", "src/dips"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        _refuse(f"--changed {base}: {done.stderr.strip().splitlines()[0]}")
    found: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            found[path] |= set(range(first, first + count))
    return found


def _drawn_of_a_change(
    base: str, seed: int, seconds: float, kept: record.Record
) -> tuple[list[Fault], list[str]]:  # fmt: skip
    """Faults for which the time is expected to be enough, evenly over the changed functions, and the files of tests
    that may execute them. All, where it is enough for all."""
    lines = _changed_lines(base)
    paths = [path for path in modules() if str(path.relative_to(ROOT)) in lines]
    near = [fault for fault in _of_files(paths) if lines[fault.path] & set(range(fault.first, fault.last + 1))]
    faults = [fault for fault in near if fault.operator != "default" or fault.line in lines[fault.path]]
    known, processor_s = read_seconds(), seconds * usable_processors()

    def seconds_of(file: str) -> float:
        return 0.0 if kept.has(file, False) else RECORDED * known.get(file, UNLISTED_S)

    def files_of(fault: Fault) -> list[str]:
        return [file for file in draw.files_of(fault) if not record.is_slow(file)]

    most, room_s = (1 - RECORD_SHARE) * processor_s / FAULT_S, RECORD_SHARE * processor_s
    drawn, files = draw.that_fit(draw.evenly(faults, seed), most, room_s, seconds_of, files_of)
    functions, all_functions = ({(fault.path, fault.function) for fault in some} for some in (drawn, faults))
    _say(
        f"make mutants: {len(drawn)} of {len(faults)} faults on the lines that differ from {base} are drawn, in "
        f"{len(functions)} of {len(all_functions)} functions; {len(files)} files of tests may execute them"
    )
    return drawn, files


def _at(place: str) -> Fault:
    path = ROOT / place.partition(":")[0]
    found = [fault for fault in _of_files([path]) if fault.place == place] if path.exists() else []
    if not found:
        _refuse(f"--one {place}: nothing to change there")
    return found[0]


def _change_of(fault: Fault) -> str:
    return changed_text((ROOT / fault.path).read_text(), fault)


# ---- one run ----


class Run:
    """Faults in their order, until as many count as are wanted in each area."""

    def __init__(
        self, wanted: dict[str, int], queues: dict[str, list[Fault]], until_s: float, kept: record.Record
    ) -> None:  # fmt: skip
        self._wanted, self._until_s = wanted, until_s
        # The order in which they are tried depends on what is recorded; which ones are tried does not.
        self._queues = {area: queue[: wanted[area]] for area, queue in queues.items()}
        self._spare = {area: queue[wanted[area] :] for area, queue in queues.items()}
        self._kept = kept
        self._sound: set[str] = set()
        self._unsound: set[str] = set()
        self._excluded = _equivalents()
        self.outcomes: list[Outcome] = []
        self.interrupted = False

    def collect_and_go(self, files: Sequence[str]) -> None:
        cover = record.coverage_of()
        cover.start()

        def work(warm: Warm) -> None:
            cover.stop()
            self._kept.at_import = record.lines_of(cover).get("", {})
            for name in warm.broken_files:
                print(f"not collected: {name}")
            try:
                self._work(warm, files)
            except KeyboardInterrupt:
                self.interrupted = True

        self.interrupted = pytest_main(files, Warm(work, usable_processors())) == INTERRUPTED or self.interrupted

    def _work(self, warm: Warm, files: Sequence[str]) -> None:
        faults = [fault for queue in self._queues.values() for fault in queue]
        warm.look_at_functions(fault.path for fault in faults)
        collected = frozenset(files)
        there = {(file, as_python) for file in files for as_python in (False, True) if self._kept.has(file, as_python)}
        self._recordings = draw.Recordings(there, lambda fault: [f for f in draw.files_of(fault) if f in collected])
        n_there = len({file for file, _ in there})
        _say(f"{n_there} of {len(files)} files of tests are recorded; others are recorded when a fault needs them")
        turns = (area for n in range(max(self._wanted.values())) for area, most in self._wanted.items() if n < most)

        def start_another() -> bool:
            area = next(turns, None)
            if area is not None:
                self._next(warm, area)
            return area is not None

        warm.run(self._until_s, start_another)

    def _next(self, warm: Warm, area: str) -> None:
        if not self._queues[area] or time.monotonic() > self._until_s:
            return
        fault = self._recordings.pop(self._queues[area])
        if self._recordings.is_ready(fault):
            return self._start(warm, fault)
        for recording in self._recordings.wait_for(fault):
            self._kept.record(warm, *recording, _say, functools.partial(self._recorded, warm, recording))

    def _recorded(self, warm: Warm, recording: draw.Recording) -> None:
        for fault in self._recordings.done(recording):
            self._start(warm, fault)

    def _start(self, warm: Warm, fault: Fault) -> None:
        change = _change_of(fault)
        outcome = Outcome(fault, change, "excluded", "")
        if outcome.key in self._excluded:
            outcome.why = self._excluded[outcome.key]
            return self._end(warm, outcome)
        every = [test for test in self._kept.tests_of(fault, warm.items) if test.name not in self._unsound]
        tests, left_out = _within(every)
        if not tests:
            unmet = "runs at import alone" if self._kept.runs_at_import(fault) else ""
            outcome.outcome, outcome.why = ("not reachable", unmet) if unmet else ("survived", NO_TEST)
            return self._end(warm, outcome)

        def then(end: End) -> None:
            told = end.result.get("outcome", "")
            if end.how == "done" and told in ("passed", "not reachable"):
                outcome.outcome = "survived" if told == "passed" else told
                outcome.why = f"{len(tests)} tests pass" + (
                    f", {left_out} left out after {TEST_S:.0f} s" if left_out else ""
                )
                return self._end(warm, outcome)
            outcome.outcome, outcome.by = "killed", end.running
            how = {"cpu": "takes too long", "rest": "rests", "died": "the process died", "done": ""}[end.how]
            outcome.why = how or end.result.get("why", "")
            self._check(warm, outcome, next(test for test in tests if test.name == end.running))

        warm.submit(warm.try_tests(tests, fault, fault.compiled), then)

    def _check(self, warm: Warm, outcome: Outcome, test: Test) -> None:
        """A test that fails without the fault as well, when it runs alone, kills nothing."""
        if test.name in self._sound:
            return self._end(warm, outcome)

        def then(end: End) -> None:
            if end.how == "done" and end.result.get("outcome") == "passed":
                self._sound.add(test.name)
                self._end(warm, outcome)
            else:
                _say(f"does not pass alone, and is not used: {test.name}")
                self._unsound.add(test.name)
                self._start(warm, outcome.fault)

        warm.submit(warm.try_tests([test], None, outcome.fault.compiled), then)

    def _end(self, warm: Warm, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        _say(_line(outcome))
        if outcome.outcome == "not reachable":
            area = outcome.fault.area if outcome.fault.area in self._queues else ""
            self._queues[area] += self._spare[area][:1]
            del self._spare[area][:1]
            self._next(warm, area)


def _within(tests: Sequence[Test]) -> tuple[list[Test], int]:
    chosen: list[Test] = []
    spent_s = 0.0
    for test in tests:
        spent_s += test.cpu_s + test.rest_s
        if chosen and spent_s > TEST_S:
            break
        chosen.append(test)
    return chosen, len(tests) - len(chosen)


def _equivalents() -> dict[str, str]:
    """`PATH FUNCTION OPERATOR: CHANGE  # REASON` on each line; lines that begin with # are for readers."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = (line.rpartition("  # ") for line in lines if line.strip() and not line.startswith("#"))
    return {key.strip(): reason for key, _, reason in pairs}


# ---- what is said ----


def _say(text: str) -> None:
    print(text, flush=True)


def _line(outcome: Outcome) -> str:
    why = outcome.by or outcome.why
    change = outcome.change if len(outcome.change) < 240 else outcome.change[:240] + " ..."
    text = f"{outcome.outcome:9} {outcome.fault.place}  in {outcome.fault.function}: {change}  ({why})"
    if outcome.outcome == "survived":
        text += f'\n          make mutants ARGS="--one {outcome.fault.place}"'
    return text


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"{'area':10}{'killed':>8}{'survived':>10}{'no test':>9}{'excluded':>10}{'not reachable':>15}{'killed %':>10}"
    for area in AREAS + OTHERS:
        here = [outcome for outcome in outcomes if outcome.fault.area == area]
        counts = {name: sum(outcome.outcome == name for outcome in here) for name in ("killed", "survived", "excluded")}
        unmet = sum(outcome.outcome == "not reachable" for outcome in here)
        unrun = sum(outcome.why == NO_TEST for outcome in here)
        if here:
            killed, survived, excluded = counts.values()
            share = f"{100 * killed / (killed + survived):.0f}" if killed + survived else "-"
            yield f"{area:10}{killed:8}{survived:10}{unrun:9}{excluded:10}{unmet:15}{share:>10}"


def _as_json(outcome: Outcome) -> dict[str, Any]:
    names = {"place": outcome.fault.place, "area": outcome.fault.area, "key": outcome.key}
    return {**names, **{name: value for name, value in asdict(outcome).items() if name != "fault"}}


def main(given: Sequence[str] | None = None) -> int:
    asked = _arguments(given)
    until_s = time.monotonic() + 60 * (asked.minutes or math.inf)
    areas = tuple(asked.area or AREAS)
    kept = record.Record()
    if asked.list:
        for area in areas:
            for fault in _of_area(area):
                print(fault.place, fault.function)
        return 0
    if asked.sample is not None:
        each = asked.sample // len(areas)
        queues = {area: draw.one_of_each_line(_of_area(area), f"{asked.seed} {area}")[: 3 * each] for area in areas}
        wanted = dict.fromkeys(areas, each)
        print(f"make mutants: {each} faults in each of {', '.join(areas)}, seed {asked.seed}", flush=True)
        files = draw.files_for(fault for queue in queues.values() for fault in queue[: 4 * each // 3])
    else:
        if asked.changed is not None:
            faults, files = _drawn_of_a_change(asked.changed, asked.seed, 60 * (asked.minutes or math.inf), kept)
        else:
            faults = [_at(asked.one)]
            files = draw.files_for(faults)
        queues = {"": list(faults)}
        wanted = {"": len(faults)}
    run = Run(wanted, queues, until_s, kept)
    if files:
        run.collect_and_go(files)
    tried = len(run.outcomes)
    if asked.sample is None and tried < len(faults):
        _say(f"{tried} of {len(faults)} faults were tried in the time that there is")
    return _tell(run, asked)


def _tell(run: Run, asked: argparse.Namespace) -> int:
    outcomes = run.outcomes
    if asked.json:
        Path(asked.json).write_text(
            json.dumps({"seed": asked.seed, "outcomes": [_as_json(one) for one in outcomes]}, indent=1)
        )
    if asked.one is not None:
        print("\n".join(f"{outcome.by}\n{outcome.why}" for outcome in outcomes))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(one.ru_utime + one.ru_stime for one in used) / 60
    print(f"{minutes:.1f} minutes of a processor\n")
    print(*_table(outcomes), sep="\n")
    counted = [outcome for outcome in outcomes if outcome.outcome in ("killed", "survived")]
    killed = sum(outcome.outcome == "killed" for outcome in counted)
    print(f"{killed} of {len(counted)} killed, {100 * killed / max(1, len(counted)):.0f} %")
    excluded = sum(outcome.outcome == "excluded" for outcome in outcomes)
    if asked.sample is not None and excluded > math.ceil(MOST_EXCLUDED * asked.sample):
        print(f"{excluded} of {asked.sample} are excluded in {EQUIVALENT.name}: too many", file=sys.stderr)
        return 1
    return 130 if run.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
