"""Both forms of a log line say the same, can be read back, and let nobody write in another's name; a reason is
said once."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core.errors import ConfigError
from dips.core.observe import logs

LINE = logs.LogLine(1772366400.25, "WARNING", "slave", "s0", "no space", "r1.7", "dips.slave")

WORD = st.from_regex(r"[A-Za-z0-9._%-]{1,12}", fullmatch=True)


@given(
    st.integers(0, 253_402_300_000_000),
    st.sampled_from(logs.LEVELS),
    WORD,
    WORD | st.just(""),
    WORD | st.just(""),
    st.text(),
)
def test_both_forms_can_be_read_back(wall_ms: int, level: str, role: str, name: str, cause: str, sentence: str) -> None:
    line = logs.LogLine(wall_ms / 1000, level, role, name, sentence, cause)
    assert logs.parse(logs.rendered(line, "json")) == line
    first, *rest = logs.human(line).split("\n")
    read = logs.parse(first)
    assert read is not None
    assert (read.level, read.role, read.name, read.cause) == (level, role, name, cause)
    assert read.wall_s == pytest.approx(line.wall_s, abs=0.002)
    assert read.sentence == logs.escaped(sentence).split("\n")[0]
    assert all(text.startswith("  ") for text in rest)


@given(st.text())
def test_no_text_steers_a_terminal_or_passes_for_another_line(text: str) -> None:
    for said in logs.human(logs.LogLine(0.0, "INFO", text, text, text, text)).split("\n"):
        assert said.isprintable() or not said.isascii()
        assert not any(char in said for char in "\x1b\r\x00\x7f\x9b\u202e\u2028\u200f")
    lines = logs.human(logs.LogLine(0.0, "INFO", "slave", "s0", f"{text}\n{logs.human(LINE)}")).split("\n")
    assert [line for line in lines if logs.parse(line) is not None] == lines[:1]


def test_what_is_hidden_is_written_out() -> None:
    assert logs.escaped("a\x1b[2Jb\u202ec\n\udc80ä€") == "a\\x1b[2Jb\\u202ec\n\\udc80ä€"


@pytest.mark.parametrize(
    "text",
    [
        "", "settings:", "Traceback (most recent call last):", "{", "{}", "[1]", "null",
        '{"wall_s": NaN, "level": "INFO", "sentence": "x"}', '{"wall_s": 1e400, "level": "INFO", "sentence": "x"}',
        '{"wall_s": -1, "level": "INFO", "sentence": "x"}', '{"wall_s": true, "level": "INFO", "sentence": "x"}',
        '{"wall_s": 1, "level": ["INFO"], "sentence": "x"}', '{"wall_s": 1, "level": "INFO", "sentence": 7}',
        '{"wall_s":' + "[" * 100_000, "2026-02-30T12:00:00.250Z W slave s0: no such day",
        "2026-03-01T12:00:00.250Z X slave s0: no such level", "2026-03-01T12:00:00.250Z W slave s0 no colon",
    ],
)  # fmt: skip
def test_anything_else_is_no_log_line(text: str) -> None:
    assert logs.parse(text) is None


def test_a_time_beyond_all_bounds_is_still_a_time() -> None:
    assert logs.timestamp(-5.0) == "1970-01-01T00:00:00.000Z"
    assert logs.timestamp(1e300).startswith("9999-12-31")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = root.level
    monkeypatch.setattr(root, "level", before)
    return root


def test_a_cause_stands_in_the_line(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("worker", "a")
    changes = logs.ChangeLogger(logging.getLogger("dips.x"))
    changes.report("push", "it failed", "WARNING", "a/1.1#3")
    changes.report("push", "it failed", "WARNING", "a/1.1#4")
    changes.report("idle", "nothing", "WARNING", "-")
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("Z ")[2] for line in said] == ["W worker a [a/1.1#3]: it failed", "W worker a: nothing"]


def test_a_strangers_cause_is_only_a_word(root: logging.Logger) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "said", (), None)
    record.cause = "]: forged\n\x1b" + "z" * 500
    told = logs.LineFormatter("master", "m", "human").format(record)
    assert "\n" not in told
    assert "[:forged" in told
    assert len(told) < 300


def test_the_last_word_of_a_process_has_its_logs_form(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("slave", "s0")
    logs.say_last("the disk is full\x1b[2J", "dips slave s0")
    assert capsys.readouterr().err == "dips slave s0: the disk is full\\x1b[2J\n"
    logs.configure_logging("slave", "s0", log_format="json")
    logs.say_last("the disk is full", "dips slave s0")
    told = json.loads(capsys.readouterr().err)
    assert (told["level"], told["sentence"]) == ("CRITICAL", "the disk is full")


def test_a_crash_is_one_line_where_lines_are_for_machines(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure_logging("master", "m", log_format="json")
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["sentence"] == "ZeroDivisionError: by zero"
    assert told["exception"].startswith("Traceback")


def test_a_reason_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    changes = logs.ChangeLogger(logging.getLogger("test"))
    caplog.set_level(logging.DEBUG)
    told = [
        changes.report("a", "waits for b"), changes.report("a", "waits for b"), changes.report("c", "waits for b"),
        changes.report("a", "waits for d", logging.WARNING), changes.report("a", "waits for b", "error"),
    ]  # fmt: skip
    assert told == [True, False, True, True, True]
    assert caplog.messages == ["waits for b", "waits for b", "waits for d", "waits for b"]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING", "ERROR"]


def test_a_matter_that_is_settled_is_logged_again_when_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    changes = logs.ChangeLogger(logging.getLogger("test"))
    caplog.set_level(logging.INFO)
    assert [changes.report("a", text) for text in ("", "100 % slow", "", "", "100 % slow")] == [
        False, True, False, False, True,
    ]  # fmt: skip
    assert caplog.messages == ["100 % slow", "100 % slow"]


def test_the_memory_for_reasons_is_bounded() -> None:
    changes = logs.ChangeLogger(logging.getLogger("test"))
    for n in range(logs.CHANGE_KEYS + 1):
        changes.report(f"key-{n}", "x")
    assert not changes.report(f"key-{logs.CHANGE_KEYS}", "x")
    assert changes.report("key-0", "x")


def test_configuring_twice_does_not_say_everything_twice(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure_logging("a", "b")
    logs.configure_logging("c", "d", "WARNING")
    root.info("not this")
    root.warning("%d of %d", 1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("Z W c d: 1 of 2\n")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("level", ["", "LOUD", "info "])
def test_an_unknown_level_is_refused(root: logging.Logger, level: str) -> None:
    before = root.handlers[:]
    with pytest.raises(ConfigError, match="is unknown: choose DEBUG, INFO, WARNING or ERROR"):
        logs.configure_logging("a", "b", level)
    assert root.handlers == before


def test_a_program_that_does_not_configure_logging_sees_our_lines_until_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("dips")
    monkeypatch.setattr(root, "handlers", [])
    for _ in range(2):
        logs.show_where_logging_is_not_configured()
    logging.getLogger("dips.worker").info("joined the run %r", "r")
    assert capsys.readouterr().err == "dips: joined the run 'r'\n"
    theirs = logging.StreamHandler(io.StringIO())
    root.addHandler(theirs)
    ours.warning("once")
    assert (theirs.stream.getvalue(), capsys.readouterr().err) == ("once\n", "")
    assert (ours.handlers, ours.level) == ([], logging.NOTSET)
    logs.show_where_logging_is_not_configured()
    assert ours.handlers == []
