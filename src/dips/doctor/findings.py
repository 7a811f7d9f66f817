"""The findings of checks: OK, WARN or FAIL, a sentence, and a remedy unless all is well.

A check is a generator of findings; one that cannot be made is a finding, too, and never hides the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from dips.core.errors import DipsError
from dips.core.observe.logs import escaped


class Grade(Enum):
    """The grade of a finding.

    WARN: the run would go on, but worse than it could, or it cannot be checked from here. FAIL: it would not.
    """

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    check: str  # a short name that stays the same, for scripts
    grade: Grade
    sentence: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"check": self.check, "grade": self.grade.value, "sentence": self.sentence, "remedy": self.remedy}

    def __str__(self) -> str:
        remedy = f": {self.remedy}" if self.remedy else ""
        return escaped(f"{self.grade.value:<4}  {self.check}: {self.sentence}{remedy}")


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str  # of the finding, where the check itself cannot be made
    look: Callable[[], Iterable[Finding]]


def ok(check: str, sentence: str) -> Finding:
    return Finding(check, Grade.OK, sentence)


def warn(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check, Grade.WARN, sentence, remedy)


def fail(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check, Grade.FAIL, sentence, remedy)


def examined(checks: Iterable[Check]) -> Findings:
    """All findings, as they come. What a check raises about the machine or the settings is a FAIL of its own."""
    for check in checks:
        try:
            yield from check.look()
        except DipsError as error:
            yield Finding(check.name, Grade.FAIL, str(error))
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            yield fail(check.name, f"{place}{error.strerror or error}", "this could not be checked; correct that first")
