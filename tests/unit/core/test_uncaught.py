"""What an error that is not caught leaves behind: one sentence for ours, a stack trace for all else."""

from __future__ import annotations

import sys
from types import TracebackType

import pytest

from dips.core.errors import ConfigError, LocalProtocolError, RefusalCode, Refused, RetryLater
from dips.core.observe.logs import end_with_one_sentence, say_instead_of_trace
from dips.worker.config import ClientConfig, check

Hooked = tuple[type[BaseException], BaseException, TracebackType | None]


@pytest.fixture
def former(monkeypatch: pytest.MonkeyPatch) -> list[Hooked]:
    seen: list[Hooked] = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: seen.append(what))
    end_with_one_sentence()
    return seen


def leave_uncaught(error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("the key lies open: chmod 600"),
        Refused(RefusalCode.LAYOUT, "another model"),
        RetryLater("no master answers"),
    ],
)
def test_an_error_of_ours_is_its_sentence_its_place_and_its_code(
    error: ConfigError, former: list[Hooked], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        leave_uncaught(error)
    assert ended.value.code == error.exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"dips: {error} (test_uncaught.py, line ")
    assert said.count("\n") == 1
    assert former == []


def test_the_place_is_a_line_of_the_persons_program_and_none_of_any_package_of_ours(
    former: list[Hooked], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        check(ClientConfig(master=""))
    with pytest.raises(SystemExit):
        sys.excepthook(raised.type, raised.value, raised.tb)
    assert "--master HOST:PORT (test_uncaught.py, line " in capsys.readouterr().err
    assert former == []


@pytest.mark.parametrize("error", [ValueError("theirs"), LocalProtocolError("a bug of ours"), KeyboardInterrupt()])
def test_all_else_goes_to_the_hook_that_was_there(
    error: BaseException, former: list[Hooked], capsys: pytest.CaptureFixture[str]
) -> None:
    leave_uncaught(error)
    assert [seen[1] for seen in former] == [error]
    assert capsys.readouterr().err == ""


def test_a_ctrl_c_that_ended_a_cluster_is_a_sentence_and_still_ends_the_process_as_by_sigint(
    former: list[Hooked], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = KeyboardInterrupt()
    interrupt.add_note("theirs")
    say_instead_of_trace(interrupt, "cluster a has left")
    leave_uncaught(interrupt)  # no SystemExit: the interpreter sends itself the signal
    assert capsys.readouterr().err.startswith("dips: cluster a has left (test_uncaught.py, line ")
    assert former == []


def test_who_works_at_a_prompt_goes_on(
    former: list[Hooked], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    leave_uncaught(ConfigError("no master"))
    assert "dips: no master" in capsys.readouterr().err
