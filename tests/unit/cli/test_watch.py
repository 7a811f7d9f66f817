"""`dips status --watch` ends when the run does, and only then."""

from __future__ import annotations

import json
from types import TracebackType

import pytest
from support.run_status import run_status

from dips.cli import main, operator
from dips.core.errors import RetryLater
from dips.core.messages import StatusReply

AWAY = RetryLater("the master does not answer")


class Answers:
    """In place of OperatorClient: what the master answers, one look after the other."""

    def __init__(self, *answers: StatusReply | RetryLater) -> None:
        self._answers = list(answers)

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def status(self) -> StatusReply:
        answer = self._answers.pop(0)
        if isinstance(answer, RetryLater):
            raise answer
        return answer


GOES_ON, ENDING, ENDED = run_status(), run_status(stopping=True), run_status(stopping=True, stopped=True)


@pytest.mark.parametrize(
    ("answers", "looks", "code", "said"),
    [
        ((GOES_ON, ENDED), 2, 0, "has ended at version 1:12"),
        ((GOES_ON, ENDING, AWAY), 2, 0, "has ended at version 1:12"),
        ((GOES_ON, AWAY), 1, 4, "the master does not answer"),
        ((AWAY,), 0, 4, "the master does not answer"),
    ],
)
def test_watching_ends_with_the_run(
    answers: tuple[StatusReply | RetryLater, ...],
    looks: int,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator, "_operator", lambda *given: Answers(*answers))
    assert main.run(["status", "127.0.0.1:1", "--watch", "--json", "--interval", "0.1"]) == code
    out, error = capsys.readouterr()
    assert len([json.loads(line) for line in out.splitlines()]) == looks
    assert said in error
