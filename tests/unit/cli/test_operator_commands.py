"""`dips status` and the operator's requests: what the master is asked, and what a person and a script read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.run_status import run_status

from dips.cli import main, operator
from dips.core.errors import RetryLater
from dips.core.messages import StatusReply
from dips.core.net.security import INSECURE
from dips.local.authority import ensure_keys
from dips.master.directory import MasterAddress, write_address

AWAY = RetryLater("the master does not answer")
GOES_ON, ENDING, ENDED = run_status(), run_status(stopping=True), run_status(stopping=True, stopped=True)


class Master:
    """In place of OperatorClient: notes what it is asked; answers each look with the next status."""

    answers: list[StatusReply | RetryLater]
    asked: list[Any]

    def __init__(self, address: str, run_id: str = "", *, security: object) -> None:
        self.asked.append((address, run_id, getattr(security, "name", security)))

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *error: Any) -> None:
        self.asked.append("closed")

    def status(self) -> StatusReply:
        answer = self.answers.pop(0)
        if isinstance(answer, RetryLater):
            raise answer
        return answer

    def __getattr__(self, name: str) -> Any:
        def ask(*given: object) -> str:
            self.asked.append((name, *given))
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["extend", *AT, "--tokens", "0"], "give --no-limit"),
        (["reshard", *AT], "nothing is to change"),
        (["reshard", *AT, "--cancel", "--add", "s2"], "nothing is to change"),
    ],
)
def test_a_request_that_says_nothing_is_not_sent(
    words: list[str], said: str, master: type[Master], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(words) == 2
    assert said in capsys.readouterr().err
    assert not master.asked


def test_a_runs_directory_names_its_master_and_has_the_operators_keys(
    tmp_path: Path, master: type[Master], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["status", str(tmp_path)]) == 2
    assert "no master runs in" in capsys.readouterr().err
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
