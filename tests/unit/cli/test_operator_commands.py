"""`dips status` and the operator's requests: what the master is asked, and what a person and a script read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.journals import append
from support.run_status import run_status

from dips.cli import main, operator
from dips.core.errors import KEYS_REFUSED_EXIT, DipsError, RefusalCode, Refused, RetryLater
from dips.core.ids import RoundId, Version
from dips.core.messages import StatusReply
from dips.core.net.security import INSECURE
from dips.local.authority import ensure_keys
from dips.master.directory import MasterAddress, write_address
from dips.master.journal import Journal
from dips.master.state.ledger import ClusterEntry, CommitInfo, Ledger

AWAY = RetryLater("the master does not answer")
GOES_ON, ENDING, ENDED = run_status(), run_status(stopping=True), run_status(stopping=True, stopped=True)


class Master:
    """In place of OperatorClient: notes what it is asked; answers each look with the next status."""

    answers: list[StatusReply | DipsError]
    asked: list[Any]

    def __init__(self, address: str, run_id: str = "", *, security: object) -> None:
        self.asked.append((address, run_id, getattr(security, "name", security)))

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *error: Any) -> None:
        self.asked.append("closed")

    def status(self) -> StatusReply:
        answer = self.answers.pop(0)
        if isinstance(answer, DipsError):
            raise answer
        return answer

    def __getattr__(self, name: str) -> Any:
        def ask(*given: object) -> str:
            self.asked.append((name, *given))
            if self.answers:
                self.status()
            return f"{name}: done"

        return ask


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> type[Master]:
    monkeypatch.setattr(operator, "OperatorClient", Master)
    for name in ("DIPS_MASTER", "DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    Master.answers, Master.asked = [], []
    return Master


AT = ["127.0.0.1:1", "--insecure"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["pause", *AT], ("pause", "asked to")),
        (["pause", *AT, "--reason", "moving"], ("pause", "moving")),
        (["resume", *AT], ("resume", "asked to")),
        (["stop", *AT], ("stop", "asked to")),
        (["extend", *AT], ("extend", 0, False, "asked to")),
        (["extend", *AT, "--tokens", "2G"], ("extend", 2 * 10**9, False, "asked to")),
        (["extend", *AT, "--no-limit"], ("extend", 0, True, "asked to")),
        (["evict", AT[0], "b", "--insecure"], ("evict", "b", "asked to")),
        (["drain", AT[0], "b", "--insecure", "--reason", "x"], ("drain", "b", "x")),
        (["reshard", *AT, "--add", "2", "--add", "3", "--remove", "0"], ("reshard", ["2", "3"], ["0"], "asked to")),
        (["reshard", *AT, "--remove", "s0"], ("reshard", (), ["s0"], "asked to")),
        (["reshard", *AT, "--cancel"], ("take_back_reshard",)),
    ],
)  # fmt: skip
def test_the_master_is_asked_and_its_sentence_is_printed(
    words: list[str], asked: tuple[Any, ...], master: type[Master], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*words, "--run-id", "mine"]) == 0
    assert master.asked == [("127.0.0.1:1", "mine", INSECURE), asked, "closed"]
    assert capsys.readouterr().out == f"{asked[0]}: done\n"


def test_a_runs_directory_names_its_master_and_has_the_operators_keys(
    tmp_path: Path, master: type[Master], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    ensure_keys(tmp_path / "keys", operators=["operator"])
    (tmp_path / "master").mkdir()
    write_address(tmp_path / "master", MasterAddress("127.0.0.1:7", "mine", 1, 1))
    master.answers.append(GOES_ON)
    assert main.run(["status", str(tmp_path)]) == 0
    assert master.asked == [("127.0.0.1:7", "", "operator"), "closed"]
    assert "version 1:12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "looks", "code", "said"),
    [
        ((GOES_ON, ENDED), 2, 0, "has ended at version 1:12, 400000 tokens"),
        ((GOES_ON, ENDING, AWAY), 2, 0, "has ended at version 1:12, 400000 tokens"),
        ((GOES_ON, AWAY), 1, 4, "the master does not answer"),
        ((AWAY,), 0, 4, "the master does not answer"),
    ],
)
def test_watching_ends_with_the_run(
    answers: tuple[StatusReply | RetryLater, ...],
    looks: int,
    code: int,
    said: str,
    master: type[Master],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr("dips.cli.operator.time.sleep", pauses_s.append)
    master.answers.extend(answers)
    assert main.run(["status", *AT, "--watch", "--json", "--interval", "0.1"]) == code
    out, error = capsys.readouterr()
    assert [json.loads(line)["run_id"] for line in out.splitlines()] == ["demo"] * looks
    assert said in error
    assert pauses_s == [0.1] * len(pauses_s)
    assert bool(pauses_s) == (looks > 0)


def test_on_a_terminal_the_run_is_drawn_until_it_has_ended(
    master: type[Master], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    class Screen(contextlib.nullcontext["Screen"]):
        def __init__(self, *, screen: bool, **_: object) -> None:
            super().__init__(self)
            assert screen

        def __exit__(self, *error: object) -> None:
            drawn.append("closed")

        def update(self, shown: object, *, refresh: bool) -> None:
            drawn.append(str(shown) if "does not answer" in str(shown) else f"{type(shown).__name__} {refresh}")

    master.answers.extend([AWAY, GOES_ON, ENDED])
    monkeypatch.setattr(operator, "Live", Screen)
    monkeypatch.setattr("dips.cli.operator.time.sleep", lambda seconds: None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main.run(["status", *AT, "--watch"]) == 0
    away, first, second, end = drawn
    assert (away, first.endswith(" True"), first == second, end) == (str(AWAY), True, True, "closed")


def left_behind(run_dir: Path, stopping: str) -> None:
    """What a master leaves in its directory when it ends in good order."""
    commit = CommitInfo(RoundId(1, 7), Version(1, 6), (), b"{}")
    ledger = Ledger(
        "mine", commit=commit, tokens=400, stopping=stopping, clusters={"a": ClusterEntry(pushes_applied=3)}
    )
    journal = Journal.open(run_dir / "master", "mine")
    append(journal, journal.begin_epoch(), 1, "COMMIT", "{}", ledger.to_json())
    journal.close()


@pytest.mark.parametrize("killed", [False, True])
def test_the_directory_of_a_run_that_has_ended_says_how_it_ended(
    killed: bool, tmp_path: Path, master: type[Master], capsys: pytest.CaptureFixture[str]
) -> None:
    left_behind(tmp_path, "400 tokens are applied, tk_max is 400")
    if killed:
        write_address(tmp_path / "master", MasterAddress("127.0.0.1:7", "mine", 1, 1))
        master.answers += [AWAY, AWAY]
    assert main.run(["status", str(tmp_path), "--insecure"]) == 0
    out = capsys.readouterr().out
    assert "run mine has ended at version 1:6, 400 tokens (400 tokens are applied, tk_max is 400)" in out
    assert "3 applied" in out
    assert main.run(["status", str(tmp_path), "--json", "--insecure"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["stopped"], found["published"], found["tokens"], found["settings"]) == (True, "1:6", 400, None)


OPERATOR = ("status", "pause", "resume", "stop", "extend", "evict", "drain", "reshard")
NEEDS = {"evict": ["b"], "drain": ["b"], "reshard": ["--add", "s2"]}


@pytest.mark.parametrize("command", OPERATOR)
def test_one_cause_has_one_exit_code_in_all_commands(
    command: str, tmp_path: Path, master: type[Master], capsys: pytest.CaptureFixture[str]
) -> None:
    def code(run: Path, *answers: DipsError) -> int:
        master.answers[:] = answers
        return main.run([command, str(run), *NEEDS.get(command, []), "--insecure"])

    no_run, unfinished = tmp_path / "none", tmp_path / "mine"
    no_run.mkdir()
    left_behind(unfinished, "")
    assert code(no_run) == 2
    assert code(unfinished) == 4
    assert "no master runs in" in capsys.readouterr().err
    write_address(unfinished / "master", MasterAddress("127.0.0.1:7", "mine", 1, 1))
    assert code(unfinished, AWAY) == 4
    assert code(unfinished, Refused(RefusalCode.IDENTITY, "of another authority")) == KEYS_REFUSED_EXIT


ASKING = [[command, AT[0], *NEEDS.get(command, [])] for command in OPERATOR]
READING = [[command, AT[0], "--to", "written"] for command in ("export", "follow")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((words, "has no keys") for words in (*ASKING, *READING, ["doctor", "--master", AT[0]])),
        (["extend", *AT, "--tokens", "0"], "give --no-limit"),
        (["reshard", *AT], "nothing is to change"),
        (["reshard", *AT, "--cancel", "--add", "s2"], "nothing is to change"),
    ],
)
def test_nothing_is_asked_unencrypted_unless_it_is_said_nor_what_says_nothing(
    words: list[str],
    said: str,
    tmp_path: Path,
    master: type[Master],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(words) == 2
    assert said in capsys.readouterr().err
    assert not master.asked
