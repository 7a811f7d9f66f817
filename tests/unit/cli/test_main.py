"""The command line: help that teaches, one sentence for an error, and exit codes that scripts can use."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deploy_files import EXAMPLE

from dips.cli import main
from dips.cli.commands import Command
from dips.core.errors import TERMINATED, FatalError, RefusalCode, Refused, RetryLater
from dips.local import operator_client


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(arguments)
    out, error = capsys.readouterr()
    return code, out, error


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], []])
def test_help_lists_every_command_and_imports_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, *arguments)
    assert code == 0
    for command in main.commands_for(""):
        assert f" {command.name} " in out


def test_help_can_be_read_where_the_terminal_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["dips", "master", "--help"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert b"--directory" in written.getvalue()


def test_a_path_that_file_names_here_cannot_have_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\nid = "mine"\ndirectory = "gr\u00f6\u00dfe/run"\n', encoding="utf-8")
    names_are_ascii = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = (sys.executable, "-m", "dips.cli", "up", str(file))
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=names_are_ascii)
    assert told.returncode == 2
    assert "Traceback" not in told.stderr
    assert "set PYTHONUTF8=1" in told.stderr


@pytest.mark.parametrize("command", main.commands_for(""), ids=lambda command: command.name)
def test_every_command_has_help_with_examples_of_its_own(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = told(capsys, "help", command.name)
    assert (code, "Examples:" in out) == (0, True)
    assert command.examples
    assert "<bool>" not in out
    assert all(example in out and example.startswith(f"dips {command.name}") for example in command.examples)


@pytest.mark.parametrize(
    ("line", "expected"),
    [("dips st", {"status", "stop", "story"}), ("dips status --wa", {"--watch"}), ("dips plan calibr", {"calibrate"})],
)
def test_a_shell_completes_commands_and_their_options(
    line: str, expected: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(main.COMPLETE, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit):
        main.run([])
    assert set(capsys.readouterr().out.split()) == expected


@pytest.mark.parametrize(("shell", "code", "said"), [("bash", 0, "complete -o default"), ("nonsense", 1, "")])
def test_the_script_of_a_named_shell_is_printed(
    shell: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, _ = told(capsys, "--show-completion", shell)
    assert (found, said in out) == (code, True)


def test_the_process_ends_with_the_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Callable[[int, None], None]] = {}
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    for words, code in ((["--version"], 0), (["nonsense"], 2)):
        monkeypatch.setattr(sys, "argv", ["dips", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == code
    assert capsys.readouterr().out.startswith("dips 0.")
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(main, "run", lambda words: os.write(writer, b"to a trainer that has ended"))
    with pytest.raises(BrokenPipeError):
        main.main()
    with pytest.raises(SystemExit) as ended:
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert ended.value.code == TERMINATED


@pytest.mark.parametrize("arguments", ["--version", "help plan", f"deploy plan {EXAMPLE} --offline"])
def test_a_pager_that_has_seen_enough_gets_no_stack_trace(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = (sys.executable, "-m", "dips.cli", *arguments.split())
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["status", "--nonsense"], "No such option: --nonsense"),
        (["up"], "Missing argument 'FILE.toml'"),
        (["demo", "--clusters", "none"], "Invalid value for '--clusters'"),
        (["status", "one", "two"], "Got unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("dips: ")
    assert sentence in error
    assert f"`dips {'' if arguments == ['nonsense'] else arguments[0] + ' '}--help` shows" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["status"], "no run is named: give its directory"),
        (["status", "10.0.0.1:29400", "--insecure"], "not a loopback address"),
        (["status", "127.0.0.1:1", "--keys", "/nowhere"], "/nowhere/ca.crt cannot be read"),
        (["status", "localhost"], "write HOST:PORT"),
        (["status", "/nowhere"], "/nowhere is neither a directory nor a master's address"),
        (["up", "/nowhere.toml"], "settings file /nowhere.toml cannot be read"),
        (["master", "--run-id", "x", "--directory", "/tmp/x", "--grace-s", "1 min"], "lower grace_s"),
        (["slave", "--run-id", "x"], "slave_id is not given"),
        (["place", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["export", "tests", "--to", "m.safetensors", "--version", "7"], "'7' is not a version"),
        (["eval", "/nowhere.safetensors"], "no model file /nowhere.safetensors"),
        (["eval", "m.safetensors", "--version", "1:7"], "one model"),
        (["eval", "m.safetensors", "--follow"], "one model"),
        (["train", "--steps", "1", "--data", "/nowhere"], "/nowhere"),
        (["train", "--steps", "1", "--model-size", "huge"], "choose one of tiny, small"),
        (["train"], "neither a master nor a number of steps"),
    ],
)
def test_a_persons_mistake_is_a_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER", "DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    code, _, error = told(capsys, *arguments)
    assert code == 2
    assert sentence in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (Refused(RefusalCode.RUN_ID, "another run is served here"), 3, "dips: another run is served here\n"),
        (RetryLater("the master is away"), 4, "dips: the master is away\n"),
        (FatalError("the disk is gone"), 6, "dips: the disk is gone\n"),
        (
            PermissionError(13, "Permission denied", "/runs/theirs/master"),
            2,
            "dips: /runs/theirs/master is closed to this user: ask the user whose it is, who can let a group read a "
            "run's files (files_group)\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch.nn"),
            2,
            "dips: this command needs torch: pip install '.[worker]' in the checkout of Di-PS\n",
        ),
        # Our own bugs keep their trace.
        (KeyError("bug"), None, ""),
        (ModuleNotFoundError("No module named 'dips.gone'", name="dips.gone"), None, ""),
    ],
)
def test_exit_codes_of_errors(
    raised: BaseException,
    code: int | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise raised

    monkeypatch.setattr(operator_client.NamedRun, "master", fails)
    with contextlib.nullcontext() if code is not None else pytest.raises(type(raised)):
        assert main.run(["pause", "127.0.0.1:1"]) == code
    assert capsys.readouterr().err == said


_MISTAKES = (
    "train",
    "train --model-size huge --steps 3",
    "train --steps 3 --data nothing.txt",
    "train --steps 3 --config nothing.toml",
    "train --steps 3 --parallel fsdp=2",
    "train --master 127.0.0.1:9 --keys keys",
    "train --master 127.0.0.1:9 --cluster-id a --keys nothing",
    "eval",
    "eval nothing",
    "eval empty",
    "eval nothing.safetensors",
    "eval damaged.safetensors",
    "eval empty --data nothing.txt",
    "eval 127.0.0.1:9 --keys nothing",
    "export empty",
    "export nothing --to model",
    "export empty --to model.safetensors",
    "export empty --to checkpoint --format dcp",
    "export empty --to .",
    "compare --methods nothing",
    "profile device nothing.toml --device a",
    "plan run nothing",
)


def test_mistakes_are_answered_before_what_takes_long_is_imported(tmp_path: Path) -> None:
    """Help, and what a command's module imports: tests/repository/test_layers.py."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.safetensors").write_bytes(b"damaged")
    code = f"""
import sys
from dips.cli.main import run
for line, code in [("demo --help", 0), *((line, 2) for line in {_MISTAKES!r})]:
    assert run(line.split()) == code, line
    assert "torch" not in sys.modules, line
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DIPS_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_the_command_is_imported_is_no_trace() -> None:
    """An import hook in place of a person who is quick."""
    program = (
        "import sys\n"
        "class Quick:\n"
        "    def find_spec(self, name, *of):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Quick())\n"
        "from dips.cli.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (130, "")
