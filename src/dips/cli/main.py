"""The `dips` command: finds the sub-command, runs it, and turns every error into a sentence and an exit code.

A sub-command's module is imported only when it is the one that runs, so that a slave's host needs no torch
and `dips --help` is quick. It must never show a stack trace for a person's mistake; a bug of ours keeps
its trace.
"""

from __future__ import annotations

import codecs
import importlib
import inspect
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from types import FrameType
from typing import Any, NoReturn

import typer
import typer.main
from rich.markup import escape
from typer.completion import shell_complete

from dips.cli.commands import COMMANDS, Command
from dips.core.errors import DISK_ERRORS, INTERRUPTED, NOT_READ, TERMINATED, ConfigError, DipsError, FatalError
from dips.core.observe.logs import say_last
from dips.core.release import VERSION, how_to_install

_HELP = ["-h", "--help"]
COMPLETE = "_DIPS_COMPLETE"
"""The variable by which the scripts of --show-completion ask what may follow on a line."""

_USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_EXTRA_OF_PACKAGE = {
    "aiohttp": "master",
    "kubernetes": "deploy",
    "yaml": "deploy",
    "torch": "worker",
    "numba": "slave",
    "matplotlib": "demo",
    "ortools": "planner",
    "obstore": "store",
}


def main() -> NoReturn:
    """The entry point of the `dips` command."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # where it is ASCII, as in some containers
    printed = None if sys.stdout is None else os.fstat(1)
    try:
        code = run(sys.argv[1:])
    except (BrokenPipeError, SystemExit) as error:
        # A pager or `head` has seen enough. Typer and rich make exit code 1 of it, which of `dips verify` means more.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if not isinstance(cause, BrokenPipeError):
            raise
        if not _reader_has_ended(printed):  # another pipe is broken, and Typer's exit code 1 does not say so
            raise (cause if getattr(error, "code", 1) == 1 else error) from None
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing may be flushed into it at the end
        code = NOT_READ
    sys.exit(code)


def _reader_has_ended(printed: os.stat_result | None) -> bool:
    """Whether what this process prints is read no longer; else it is another pipe or socket that is broken. printed:
    what standard output was."""
    if sys.platform == "win32" or (printed is not None and not os.path.samestat(os.fstat(1), printed)):
        return True  # rich has put another file in its place
    streams = select.poll()
    for number in (1, 2):
        streams.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in streams.poll(0))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. Errors end as one sentence on standard error."""
    if list(arguments[:1]) == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        # Where a shell asks what may follow, the words after `dips` on its line.
        line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
        typed = arguments if COMPLETE not in os.environ else line.split()[1:]
        app = build_app(next((word for word in typed if not word.startswith("-")), ""))
        command = typer.main.get_command(app)
        _show_no_types_of_flags(command)
        if len(arguments) == 2 and arguments[0] == "--show-completion":
            return shell_complete(command, {}, "dips", COMPLETE, f"source_{arguments[1]}")  # of the shell that is named
        result = command.main(args=list(arguments) or ["--help"], prog_name="dips", standalone_mode=False)
        print(end="", flush=True)  # here a reader that has gone, or a full disk, is still an error of the command
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except DipsError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF_PACKAGE.get(package)
        if extra is None:
            raise error
        return _fail(f"this command needs {package}: {how_to_install(extra)}", ConfigError.exit_code)
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            whose = "ask the user whose it is, who can let a group read a run's files (files_group)"
            return _fail(f"{error.filename} is closed to this user: {whose}", ConfigError.exit_code)
        if error.errno not in DISK_ERRORS:
            raise
        return _fail(f"{error.filename or 'a file'} cannot be written: {error.strerror}", FatalError.exit_code)
    except UnicodeEncodeError as error:
        files = sys.getfilesystemencoding()
        if codecs.lookup(error.encoding).name != codecs.lookup(files).name:
            raise
        remedy = "set PYTHONUTF8=1, or a locale such as C.UTF-8"
        return _fail(
            f"{error.object} cannot be a file's name here, as names are {files}: {remedy}", ConfigError.exit_code
        )
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        message = getattr(error, "format_message", error.__str__)()
        first = "".join(arguments[:1])
        names = [command.name for command in commands_for(first) if command.name == first]
        return _fail(f"{message} `{' '.join(['dips', *names, '--help'])}` shows the options.", ConfigError.exit_code)


def _show_no_types_of_flags(command: Any) -> None:
    """Leave out <bool> behind each flag in the help of a command and of those below it: a flag takes no value."""
    for option in command.get_params(typer.Context(command, help_option_names=_HELP)):
        if getattr(option, "is_bool_flag", False):
            option.metavar = ""
    for one in getattr(command, "commands", {}).values():
        _show_no_types_of_flags(one)


def build_app(chosen: str) -> typer.Typer:
    """The command with all its sub-commands; only the chosen one is imported, the others are names for
    --help."""
    app = typer.Typer(
        help="Train one language model on several clusters in different places: an asynchronous parameter server.",
        epilog="Begin with:  dips demo\n\nOne command:  dips help COMMAND",
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": _HELP},
    )
    app.callback()(_no_command)
    for command in commands_for(chosen):
        function: Callable[..., int | None] | typer.Typer = _named(command)
        if command.name == chosen:
            function = getattr(importlib.import_module(command.module), command.function or command.name)
        more: Any = {"epilog": escape("\n\n".join(("Examples:", *command.examples))), "rich_help_panel": command.panel}
        if isinstance(function, typer.Typer):
            for one in function.registered_commands:
                one.help = escape(_paragraphs((one.callback and one.callback.__doc__) or ""))
            app.add_typer(function, name=command.name, help=command.summary, **more)
        else:
            text = escape(_paragraphs(function.__doc__ or ""))
            app.command(command.name, help=text, short_help=command.summary, **more)(function)
    return app


def commands_for(chosen: str) -> list[Command]:
    """Those of the runtime; also those of the planner and the laboratory, unless the chosen one is the runtime's."""
    if any(command.name == chosen for command in COMMANDS):
        return list(COMMANDS)
    found = sorted(entry_points(group="dips.commands"), key=lambda point: point.name)
    return [*COMMANDS, *(command for point in found for command in point.load())]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dips {VERSION}")
        raise typer.Exit


def _no_command(
    version: bool = typer.Option(
        False, "--version", help="Print the version and end.", is_eager=True, callback=_version
    ),
) -> None:
    """Nothing to do before a sub-command; --version ends the process before this is called."""


def _paragraphs(docstring: str) -> str:
    """Each paragraph in one line, so that a terminal of any width wraps it well."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n"))


def _named(command: Command) -> Callable[..., int | None]:
    def not_loaded() -> None:
        raise AssertionError(f"{command.name} was not loaded")

    not_loaded.__doc__ = command.summary
    return not_loaded


def _fail(sentence: str, exit_code: int) -> int:
    say_last(sentence)
    return exit_code


def _terminated(signal_number: int, frame: FrameType | None) -> None:
    """Unwind like ctrl-C does, so that a launcher ends its children; roles install their own handlers."""
    raise SystemExit(TERMINATED)
