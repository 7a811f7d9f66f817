"""`dips logs`: one story in the order of time, whatever the files hold, and as they grow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dips.cli import main
from dips.cli.logs import LogFilter, following, since_of
from dips.core.observe.logs import LogLine, rendered
from dips.local.log_files import MAX_ENTRY_LINES, MAX_LINE_BYTES, LogEntry, LogFile, find_logs, merged
from dips.local.supervisor import last_word, log_tail

T0 = 1772366400.0


def line(at_s: float, role: str, name: str, sentence: str, cause: str = "", level: str = "INFO") -> str:
    return rendered(LogLine(T0 + at_s, level, role, name, sentence, cause), "human") + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three processes; one of them writes JSON."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "master.log").write_text(line(1, "master", "m", "one") + line(4, "master", "m", "four", "r1.1", "WARNING"))
    (logs / "s0.log").write_text(line(2, "slave", "s0", "two\ncontinued") + line(5, "slave", "s0", "five", "r1.1"))
    written = [
        LogLine(T0 + 3, "ERROR", "worker", "a", "three", "a/1.1#1"),
        LogLine(T0 + 6, "INFO", "worker", "a", "six"),
    ]
    (logs / "a.log").write_text("".join(rendered(one, "json") + "\n" for one in written))
    return tmp_path


def sentences(run_dir: Path) -> list[str]:
    return [entry.line.sentence for entry in merged(find_logs(run_dir), to_the_end=True)]


def test_files_are_merged_in_the_order_of_time(run_dir: Path) -> None:
    assert sentences(run_dir) == ["one", "two\ncontinued", "three", "four", "five", "six"]


@pytest.mark.parametrize(
    ("lines", "order"),
    [
        ([(4.5, "late"), (0, "set back")], ["one", "three", "four", "late", "set back", "six"]),
        ([(2, "two"), (9e8, "2054"), (5, "five")], ["one", "two", "2054", "three", "four", "five", "six"]),
    ],
)
def test_a_wrong_clock_changes_nothing_in_a_file(
    run_dir: Path, lines: list[tuple[float, str]], order: list[str]
) -> None:
    (run_dir / "logs" / "s0.log").write_text("".join(line(at_s, "slave", "s0", word) for at_s, word in lines))
    assert sentences(run_dir) == order


def test_a_torn_last_line_is_told_at_the_end_and_waited_for_before(run_dir: Path) -> None:
    path = run_dir / "logs" / "s0.log"
    path.write_text(line(2, "slave", "s0", "two") + line(5, "slave", "s0", "five")[:-4])
    assert sentences(run_dir)[-2:] == ["f", "six"]
    file = LogFile(path)
    assert [entry.line.sentence for entry in file.entries(to_the_end=False)] == ["two"]
    with path.open("a") as more:
        more.write("ive\n")
    assert [entry.line.sentence for entry in file.entries(to_the_end=False)] == ["five"]
    file.close()


def test_hostile_content_is_shown_and_harmless(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = [
        b"\xff\xfe\x00 no text\n", b"{" * 100_000 + b"\n", b'{"wall_s": 1e999}\n', b"\x1b]0;title\x07 before all\n",
        line(2, "slave", "s0", "two").encode(), b"\x1b[2J cleared?\n", b"2026-13-45T99:99:99.000Z I master m: forged\n",
    ]  # fmt: skip
    (run_dir / "logs" / "s0.log").write_bytes(b"".join(hostile))
    assert main.run(["logs", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "s0: \\xff" in told
    assert "\n  \\x1b[2J cleared?" in told
    assert "\n  2026-13-45" in told
    assert main.run(["logs", str(run_dir), "--json"]) == 0
    for text in capsys.readouterr().out.splitlines():
        assert set(json.loads(text)) >= {"wall_s", "level", "role", "name", "sentence", "source"}


def test_a_line_without_an_end_and_an_entry_of_many_lines_take_bounded_memory(run_dir: Path) -> None:
    path = run_dir / "logs" / "s0.log"
    path.write_text(line(2, "slave", "s0", "x" * (5 * MAX_LINE_BYTES)) + line(5, "slave", "s0", "five"))
    longest, five = LogFile(path).entries(to_the_end=True)
    assert MAX_LINE_BYTES - 100 < len(longest.line.sentence) < MAX_LINE_BYTES + 100
    assert longest.line.sentence.endswith("(cut here: the line is longer)")
    assert five.line.sentence == "five"
    path.write_text(line(2, "slave", "s0", "trace") + "more\n" * (3 * MAX_ENTRY_LINES))
    found = list(LogFile(path).entries(to_the_end=True))
    assert [entry.line.sentence.count("more") for entry in found] == [MAX_ENTRY_LINES - 1, *[MAX_ENTRY_LINES] * 2, 1]
    assert {entry.after_s for entry in found} == {T0 + 2}


def test_a_file_that_was_replaced_is_read_again(run_dir: Path) -> None:
    path = run_dir / "logs" / "s0.log"
    file = LogFile(path)
    assert len(list(file.entries(to_the_end=False))) == 2
    path.write_text(line(1, "slave", "s0", "new run"))
    assert [entry.line.sentence for entry in file.entries(to_the_end=False)] == ["new run"]
    path.unlink()
    assert list(file.entries(to_the_end=False)) == []
    path.write_text(line(1, "slave", "s0", "a third"))
    assert [entry.line.sentence for entry in file.entries(to_the_end=False)] == ["a third"]
    file.close()


def test_following_tells_what_comes_and_takes_in_new_files(run_dir: Path) -> None:
    def append(name: str, text: str) -> None:
        with (run_dir / "logs" / name).open("a") as file:
            file.write(text)

    def append_to_both() -> None:
        append("a.log", "0.000Z I worker a: ten\n")
        append("b.log", line(9.5, "worker", "b", "later"))

    looks: list[Callable[[], None]] = [
        lambda: append("a.log", line(9, "worker", "a", "nine") + "2026-03-01T12:00:1"),
        append_to_both,
        lambda: append("b.log", line(9.6, "worker", "b", "once")),
        lambda: None,
    ]

    def wait(_: float) -> None:
        if not looks:
            raise KeyboardInterrupt
        looks.pop(0)()

    told: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        for entry in following(run_dir, find_logs(run_dir), False, wait):
            told.append(entry.line.sentence)
    assert not looks
    assert told[:6] == ["one", "two\ncontinued", "three", "four", "five", "six"]
    assert told[6:] == ["nine", "later", "ten", "once"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--role", "slave"], ["two", "five"]),
        (["--role", "a", "--role", "master"], ["one", "three", "four", "six"]),
        (["--level", "warning"], ["three", "four"]),
        (["--cause", "r1.1"], ["four", "five"]),
        (["--since", "2026-03-01T12:00:04"], ["four", "five", "six"]),
        (["--since", "2026-03-01T13:00:05+01:00"], ["five", "six"]),
        (["--role", "nobody"], []),
    ],
)
def test_only_what_is_asked_for(
    run_dir: Path, words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["logs", str(run_dir), "--json", *words]) == 0
    found = [json.loads(text)["sentence"].split("\n")[0] for text in capsys.readouterr().out.splitlines()]
    assert found == told


@pytest.mark.parametrize("folder", ["tapes", "slaves/s0"])
def test_a_cause_has_the_events_of_the_tapes_too(
    run_dir: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / folder).mkdir(parents=True)
    event = {"wall_s": T0 + 4.5, "monotonic_s": 1.0, "role": "slave", "name": "s0", "kind": "prepared", "cause": "r1.1",
             "digest": "00ff"}  # fmt: skip
    (run_dir / folder / "s0.tape.jsonl").write_text(json.dumps(event) + '\n{"torn')
    assert main.run(["logs", str(run_dir), "--cause", "r1.1"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("W master m [r1.1]: four")
    assert second.endswith('D slave s0 [r1.1]: prepared digest="00ff"')
    assert third.endswith("I slave s0 [r1.1]: five")
    assert main.run(["logs", str(run_dir)]) == 0
    assert "prepared" not in capsys.readouterr().out


def test_times_are_written_in_two_ways() -> None:
    assert since_of("", 100.0) == 0.0
    assert since_of("1 min 30 s", 100.0) == 10.0
    assert since_of("2026-03-01", 100.0) == T0 - 12 * 3600
    loose = LogEntry(LogLine(0.0, "INFO", "", "s0", "before all"), 0.0, "s0")
    assert LogFilter().takes(loose)
    assert not LogFilter(since_s=1.0).takes(loose)


@pytest.mark.parametrize(
    "words", [["--since", "yesterday"], ["--since", "2026-99-99"], ["--since=-5 min"], ["--level", "loud"]]
)
def test_what_cannot_be_meant(
    run_dir: Path, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["logs", str(run_dir), *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main.run(["logs", str(tmp_path / "nowhere")]) == 2
    assert "has no logs: give the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "settings:\n  a = 1\nE1122 add_port.cc:83] no address\ndips: the port is in use; choose another\n",
            "the port is in use; choose another",
        ),
        ("dips slave s0: the keys are wrong\n", "the keys are wrong"),
        (rendered(LogLine(T0, "CRITICAL", "master", "m", "the disk is full"), "json") + "\n", "the disk is full"),
        ("dips: of an earlier life\n" + line(1, "launch", "s0", "s0, start 2: dips slave"), ""),
        ("", ""),
    ],
)
def test_why_a_process_ended_is_its_last_word(tmp_path: Path, text: str, word: str) -> None:
    log = tmp_path / "s0.log"
    log.write_text(text)
    assert last_word(log) == word
    assert log_tail(log, lines=1) == (f"  {text.splitlines()[-1]}" if text else "")
