"""The `dips` command: finds the sub-command, runs it, and turns every error into a sentence and an exit code.

A sub-command's module is imported only when it is the one that runs, so that a slave's host needs no torch
and `dips --help` is quick. It must never show a stack trace for a person's mistake; a bug of ours keeps
its trace.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import typer
import typer.main
from rich.markup import escape
from typer.completion import shell_complete

from dips.core.errors import DISK_ERRORS, INTERRUPTED, TERMINATED, ConfigError, DipsError, FatalError
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
}


@dataclass(frozen=True)
class Command:
    """A sub-command: `module`.`function`, one line about it, and examples for its --help."""

    name: str
    module: str
    function: str
    summary: str
    panel: str
    examples: tuple[str, ...] = ()


_RUN, _ROLES, _ASK, _MODEL = "Run here", "One process of a run", "Watch and operate a run", "Models"

COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "demo",
        "demo",
        "Train a small model on this machine, with faults during the run.",
        _RUN,
        ("dips demo", "dips demo --data ~/notes --clusters 3 --minutes 2 --no-faults"),
    ),
    Command(
        "up",
        "up",
        "up",
        "Run master, slaves and clusters from a file; restart what dies.",
        _RUN,
        ("dips up examples/local.toml",),
    ),
    Command(
        "doctor",
        "doctor",
        "doctor",
        "Check before a run: ports, keys, memory, disks, clocks, packages.",
        _RUN,
        (
            "dips doctor examples/local.toml",
            "dips doctor my-run.toml --params 7B --link 1gbps --json",
            "dips doctor --master 10.0.0.1:29400 --keys keys-b",
        ),
    ),
    Command(
        "keys",
        "keys",
        "app",
        "Make, show, renew and revoke the keys of a run's processes.",
        _ROLES,
        (
            "dips keys init ~/keys --cluster a --cluster b --slave s0 --operator me",
            "dips keys revoke ~/keys b --reason 'stolen laptop'",
        ),
    ),
    Command(
        "master",
        "master",
        "master",
        "The master of a run.",
        _ROLES,
        ("dips master --run-id mine --directory runs/mine/master --slaves 1 --listen 127.0.0.1:29400",),
    ),
    Command(
        "slave",
        "slave",
        "slave",
        "A slave: holds blocks of the model and merges pushes.",
        _ROLES,
        ("dips slave --run-id mine --slave-id s0 --directory runs/mine/slaves/s0 --master 127.0.0.1:29400",),
    ),
    Command(
        "train",
        "train",
        "train",
        "A cluster that trains a byte-level language model.",
        _ROLES,
        (
            "dips train --cluster-id a --master 127.0.0.1:29400 --data ~/notes",
            "dips train --steps 200  (no master: ordinary training)",
        ),
    ),
    Command(
        "deploy",
        "deploy",
        "app",
        "A run on Kubernetes clusters in several places, from one file.",
        _ROLES,
        (
            "dips deploy plan examples/three-sites.toml",
            "dips deploy apply run.toml",
            "dips deploy drain run.toml a --reason 'other work'",
        ),
    ),
    Command(
        "status",
        "operator",
        "status",
        "What a run does now.",
        _ASK,
        ("dips status runs/demo --watch", "dips status 127.0.0.1:29400 --keys keys/me --json"),
    ),
    Command(
        "page",
        "page",
        "page",
        "The address of a run's status page.",
        _ASK,
        ("dips page runs/demo", "dips page runs/demo --open"),
    ),
    Command(
        "pause",
        "operator",
        "pause",
        "Begin no new round until resumed; clusters train on.",
        _ASK,
        ("dips pause runs/mine --reason 'moving a slave'",),
    ),
    Command("resume", "operator", "resume", "End a pause.", _ASK, ("dips resume runs/mine",)),
    Command(
        "stop",
        "operator",
        "stop",
        "End a run: finish the open round, all pull it and leave.",
        _ASK,
        ("dips stop runs/mine",),
    ),
    Command(
        "extend",
        "operator",
        "extend",
        "Take back a run's end, or move its token limit.",
        _ASK,
        ("dips extend runs/mine --tokens 2G", "dips extend runs/mine  (after a `dips stop`)"),
    ),
    Command(
        "evict",
        "operator",
        "evict",
        "End a cluster's incarnation; it may join again.",
        _ASK,
        ("dips evict runs/mine b --reason 'it hangs'",),
    ),
    Command(
        "drain",
        "operator",
        "drain",
        "Let a cluster push its last steps and leave.",
        _ASK,
        ("dips drain runs/mine b",),
    ),
    Command(
        "reshard",
        "operator",
        "reshard",
        "Let other slaves hold the model, while the run goes on.",
        _ASK,
        (
            "dips reshard runs/mine --add s2",
            "dips reshard runs/mine --add s3 --remove s0 --reason 'a new host'",
            "dips reshard runs/mine --cancel",
        ),
    ),
    Command(
        "verify",
        "verify",
        "verify",
        "Check what a run recorded against every promise about its state.",
        _ASK,
        ("dips verify runs/demo", "dips verify runs/mine --replay --json"),
    ),
    Command(
        "story",
        "verify",
        "story",
        "What all processes recorded of one round, version, push, cluster or slave.",
        _ASK,
        ("dips story runs/demo 1:6", "dips story runs/demo a/1.1#3"),
    ),
    Command(
        "logs",
        "logs",
        "logs",
        "The logs of all processes of a local run, in the order of time.",
        _ASK,
        (
            "dips logs runs/demo --follow",
            "dips logs runs/demo --role s0 --level warning --since '10 min'",
            "dips logs runs/demo --cause a/1.1#3 --json",
        ),
    ),
    Command(
        "simulate",
        "simulate",
        "simulate",
        "A run at full size under a virtual clock: goodput, downtime, bytes.",
        _MODEL,
        ("dips simulate paper-33-days --picture resources.png", "dips simulate two-sites --hours 24 --json"),
    ),
    Command(
        "compare",
        "compare",
        "compare",
        "Methods side by side: loss at equal tokens, virtual time, bad clusters.",
        _MODEL,
        (
            "dips compare --seeds 1,2,3",
            "dips compare --methods diloco-clip,dips --data ~/texts --gaps 0,50,100 --tokens 300k",
            "dips compare --methods dips,dynamic --inject nan",
            "dips compare --figure 2b --setup larger --run-dir runs/larger",
            "dips compare --list",
        ),
    ),
    Command(
        "papers",
        "papers",
        "papers",
        "Every figure and table of five papers next to what this project does, in one report.",
        _MODEL,
        ("dips papers", "dips papers --paper jeeves --out runs/papers", "dips papers --full --out runs/papers"),
    ),
    Command(
        "warm-up",
        "warm_up",
        "warm_up",
        "Compile what slaves and workers run as machine code, once for a machine.",
        _ROLES,
        ("dips warm-up", "dips warm-up --json"),
    ),
    Command(
        "export",
        "model",
        "export",
        "Write a published version: one safetensors file, a Hugging Face folder, or a checkpoint for any parallelism.",
        _MODEL,
        (
            "dips export 127.0.0.1:29400 --to model.safetensors",
            "dips export runs/demo --to model.safetensors  (also after the run has ended)",
            "dips export runs/demo --to model  (a folder for from_pretrained)",
            "dips export runs/demo --to checkpoint --format dcp  (for torch.distributed.checkpoint.load)",
            "dips export 127.0.0.1:29400 --to model --version 1:7 --keys runs/own-loop/keys/operator",
        ),
    ),
    Command(
        "eval",
        "model",
        "evaluate",
        "The held-out loss of a model, in nats per byte.",
        _MODEL,
        ("dips eval model.safetensors", "dips eval runs/demo --json"),
    ),
    Command(
        "plan",
        "plan",
        "app",
        "Plan a pipeline over slow links: sites, links and a model in, a schedule out.",
        _MODEL,
        (
            "dips plan examples/04-plan-a-schedule/sites.toml",
            "dips plan validate",
            "dips plan sweep --stages 4 --microbatches 8 --latency 0,0.5,1 --optimal",
            "dips plan sweep --latency 0,0.5,1,2 --bandwidth 0,0.5,1,2 --map --out runs/map",
            "dips plan show schedule.csv",
            "dips plan run zb_v --ranks 4",
            "dips plan calibrate runs/plan/plan.json runs/run/measured.json --out profile.toml",
        ),
    ),
    Command(
        "profile",
        "profile",
        "app",
        "Measure devices and links for the planner: times of each layer, bandwidths, latencies.",
        _MODEL,
        (
            "dips profile device sites.toml --device h100 --on cuda --dtype bfloat16 --out profile.toml",
            "dips profile serve --listen 0.0.0.0:29500",
            "dips profile links sites.toml --from amsterdam --to stockholm=10.0.2.1:29500",
        ),
    ),
    Command(
        "size",
        "size",
        "size",
        "Memory, disk and time that a run needs, each with its formula.",
        _MODEL,
        (
            "dips size --params 100e9 --clusters 9 --slaves 16 --link 10gbps",
            "dips size --params 1B --clusters 4 --slaves 2 --link 1gbps --wire bf16 --tokens-per-s 40000 --json",
        ),
    ),
    Command(
        "place",
        "place",
        "place",
        "Choose the site of the servers from bandwidths and speeds.",
        _MODEL,
        ("dips place examples/sites.toml",),
    ),
)


def main() -> NoReturn:
    """The entry point of the `dips` command."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # where it is ASCII, as in some containers
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. Errors end as one sentence on standard error."""
    if list(arguments[:1]) == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        typed = arguments if COMPLETE not in os.environ else _line_to_complete()
        app = build_app(next((word for word in typed if not word.startswith("-")), ""))
        command = typer.main.get_command(app)
        _show_no_types_of_flags(command)
        if len(arguments) == 2 and arguments[0] == "--show-completion":
            return shell_complete(command, {}, "dips", COMPLETE, f"source_{arguments[1]}")  # of the shell that is named
        result = command.main(args=list(arguments) or ["--help"], prog_name="dips", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except DipsError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        return _missing_package(error)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return _fail(f"{error.filename or 'a file'} cannot be written: {error.strerror}", FatalError.exit_code)
    except Exception as error:
        if not isinstance(error, _USAGE_ERROR):
            raise
        return _fail(_usage_sentence(error, arguments), ConfigError.exit_code)


def _show_no_types_of_flags(command: Any) -> None:
    """Leave out <bool> behind each flag in the help of a command and of those below it: a flag takes no value."""
    for option in command.get_params(typer.Context(command, help_option_names=_HELP)):
        if getattr(option, "is_bool_flag", False):
            option.metavar = ""
    for one in getattr(command, "commands", {}).values():
        _show_no_types_of_flags(one)


def _line_to_complete() -> list[str]:
    """The words after `dips` on the line for which a shell asks what may follow."""
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()[1:]


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
    for command in COMMANDS:
        function = _load(command) if command.name == chosen else _named(command)
        if isinstance(function, typer.Typer):
            _add_group(app, command, function)
            continue
        app.command(
            command.name,
            help=escape(_paragraphs(function.__doc__ or "")),
            short_help=command.summary,
            epilog=escape("\n\n".join(("Examples:", *command.examples))),
            rich_help_panel=command.panel,
        )(function)
    return app


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


def _load(command: Command) -> Callable[..., int | None] | typer.Typer:
    """The function of a command, or a group of further commands."""
    module = importlib.import_module(f"dips.cli.{command.module}")
    function: Callable[..., int | None] | typer.Typer = getattr(module, command.function)
    return function


def _add_group(app: typer.Typer, command: Command, group: typer.Typer) -> None:
    for one in group.registered_commands:
        one.help = escape(_paragraphs((one.callback and one.callback.__doc__) or ""))
    app.add_typer(
        group,
        name=command.name,
        help=command.summary,
        epilog=escape("\n\n".join(("Examples:", *command.examples))),
        rich_help_panel=command.panel,
    )


def _named(command: Command) -> Callable[..., int | None]:
    def not_loaded() -> None:
        raise AssertionError(f"{command.name} was not loaded")

    not_loaded.__doc__ = command.summary
    return not_loaded


def _fail(sentence: str, exit_code: int) -> int:
    say_last(sentence)
    return exit_code


def _usage_sentence(error: Exception, arguments: Sequence[str]) -> str:
    message = getattr(error, "format_message", error.__str__)()
    names = [command.name for command in COMMANDS if command.name in arguments[:1]]
    return f"{message} `{' '.join(['dips', *names, '--help'])}` shows the options."


def _missing_package(error: ModuleNotFoundError) -> int:
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF_PACKAGE.get(package)
    if extra is None:
        raise error
    return _fail(f"this command needs {package}: {how_to_install(extra)}", ConfigError.exit_code)


def _terminated(signal_number: int, frame: FrameType | None) -> None:
    """Unwind like ctrl-C does, so that a launcher ends its children; roles install their own handlers."""
    raise SystemExit(TERMINATED)
