"""`dips status`, `dips page`, and requests to a run: pause, resume, stop, extend, evict, drain, reshard."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dips.cli.run_options import Insecure, Keys, RequiredRun, Run, asked_security
from dips.core.errors import ConfigError, RetryLater
from dips.core.messages import StatusReply
from dips.core.units import parse_count
from dips.local.operator_client import NamedRun, OperatorClient
from dips.local.view import cluster_table, status_json, status_view, where

RunId = Annotated[str, typer.Option("--run-id", metavar="TEXT", help="Refuse to talk to the master of any other run.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; the log and the tape have it.")]
ClusterArgument = Annotated[str, typer.Argument(metavar="CLUSTER", help="The cluster's name.")]


def status(
    run: Run = None,
    run_id: RunId = "",
    keys: Keys = None,
    insecure: Insecure = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the status again and again, until the run has ended.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between two updates with --watch.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output; one line for each update.")] = False,
) -> int:
    """Show what a run does now: why it waits, its version and tokens, its clusters, slaves and last rounds.

    With --json the keys are those of the status message, ids in their text form, unknown numbers null. Of a run that
    has ended, and whose directory is named, it says why, from the master's journal.
    """
    named = NamedRun.of(run)
    try:
        with _operator(run, run_id, keys, insecure) as operator:
            if not watch:
                _print_once(operator.status(), as_json)
            else:
                print(_ended(_watch(operator, interval_s, as_json)), file=sys.stderr)
    except RetryLater as error:
        if named.directory is None:
            hint = "of a run that has ended, `dips status DIRECTORY` shows the end, with the run's directory"
            raise RetryLater(f"{error}; {hint}") from error
        left = named.at_rest()
        if left is None or not left.stopped:
            raise
        if as_json:
            unknown = {"settings": None, "tk_max_tokens": left.tk_max_tokens or None}
            print(json.dumps({**status_json(left), **unknown}, allow_nan=False))
        else:
            print(f"{_ended(left)} ({left.waiting_for.partition(': ')[2]})")
            Console().print(cluster_table(left.clusters))
    return 0


def _ended(last: StatusReply) -> str:
    return f"run {last.run_id} has ended {where(last)}"


def _watch(operator: OperatorClient, interval_s: float, as_json: bool) -> StatusReply:
    """Shows the status until the run has ended, or its master is gone while it was ending; returns the last one."""
    on_screen = not as_json and sys.stdout.isatty()
    last: StatusReply | None = None
    with Live(auto_refresh=False, screen=True) if on_screen else contextlib.nullcontext() as live:
        while last is None or not last.stopped:
            try:
                last = operator.status()
                if live is None:
                    _print_once(last, as_json)
                else:
                    live.update(status_view(last), refresh=True)
            except RetryLater as error:
                if last is not None and last.stopping:
                    break
                if live is None:
                    raise
                live.update(Text(str(error), style="bold red"), refresh=True)  # the master may come back
            time.sleep(interval_s)
    return last


def _request(name: str, sentence: str) -> Callable[..., int]:
    """The command that makes the request of this name, and says what the master did."""

    def command(
        run: Run = None, run_id: RunId = "", keys: Keys = None, insecure: Insecure = False, reason: Reason = "asked to"
    ) -> int:
        with _operator(run, run_id, keys, insecure) as operator:
            print(getattr(operator, name)(reason))
        return 0

    command.__doc__ = sentence
    return command


pause = _request("pause", "Begin no new round until resumed. Pushes stay admitted, and clusters train on.")
resume = _request("resume", "End a pause: rounds begin again.")
stop = _request(
    "stop", "End a run in good order: the open round finishes, every cluster pulls the last version and leaves."
)


def extend(
    run: Run = None,
    tokens: Annotated[
        str,
        typer.Option("--tokens", metavar="N", help="The run's new limit (tk_max), such as 2G; else it stays as it is."),
    ] = "",
    no_limit: Annotated[bool, typer.Option("--no-limit", help="The run ends by `dips stop` alone.")] = False,
    run_id: RunId = "",
    keys: Keys = None,
    insecure: Insecure = False,
    reason: Reason = "asked to",
) -> int:
    """Take back the end of a run, or move the tokens at which it ends.

    While the master still answers, which it does for linger_s after all have left. Once it has ended, start the run
    again: after its limit with a larger tk_max in its file, after `dips stop` with `dips up FILE.toml --extend`. A
    master of your own, started again, waits for this command for linger_s.
    """
    limit = parse_count(tokens) if tokens else 0
    if tokens and not limit:
        raise ConfigError("--tokens 0 is no limit: give --no-limit if the run should not end by itself")
    with _operator(run, run_id, keys, insecure) as operator:
        print(operator.extend(limit, no_limit, reason))
    return 0


def _request_about_cluster(name: str, sentence: str) -> Callable[..., int]:
    """As _request(), about one cluster."""

    def command(
        run: RequiredRun,
        cluster: ClusterArgument,
        run_id: RunId = "",
        keys: Keys = None,
        insecure: Insecure = False,
        reason: Reason = "asked to",
    ) -> int:
        with _operator(run, run_id, keys, insecure) as operator:
            print(getattr(operator, name)(cluster, reason))
        return 0

    command.__doc__ = sentence
    return command


evict = _request_about_cluster("evict", "End a cluster's incarnation at once. It may join again as a new one.")
drain = _request_about_cluster("drain", "Let a cluster push its last steps and leave.")


def reshard(
    run: Run = None,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="SLAVE", help="A slave that should hold blocks too; again for more."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="SLAVE", help="A slave that should no longer hold any; again for more."),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the reshard that is not done yet.")] = False,
    run_id: RunId = "",
    keys: Keys = None,
    insecure: Insecure = False,
    reason: Reason = "asked to",
) -> int:
    """Let other slaves hold the model, while the run goes on.

    A slave that is added is started with `dips slave` once this has answered; one that is removed ends by itself.
    Rounds rest while blocks move, and clusters train on; `dips status` says how far it is.
    """
    if cancel == bool(add or remove):
        raise ConfigError("nothing is to change: give --add SLAVE and --remove SLAVE, or --cancel alone")
    with _operator(run, run_id, keys, insecure) as operator:
        print(operator.take_back_reshard() if cancel else operator.reshard(add or (), remove or (), reason))
    return 0


def _operator(run: str | None, run_id: str, keys: Path | None, insecure: bool) -> OperatorClient:
    named = NamedRun.of(run)
    address = named.master()  # before the keys, as it comes first on the command line
    return OperatorClient(address, run_id, security=asked_security(keys, insecure, named.directory))


def _print_once(status: StatusReply, as_json: bool) -> None:
    if as_json:
        print(json.dumps(status_json(status), allow_nan=False), flush=True)
    else:
        Console().print(status_view(status))


def page(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run on this machine.")],
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> int:
    """Print the address of a run's status page. Whoever has the address may look at the page while the run lives.

    A page in TLS has the certificate of the run's own authority, which a browser does not know: it asks once.
    """
    from dips.master.page.access import read_page_url  # not for the other commands

    named = NamedRun.of(run)
    named.check_alive()
    url = read_page_url(named.masters)
    if url is None:
        raise ConfigError(f"the master in {run} serves no page: start it with --page-listen 127.0.0.1:0")
    print(url)
    if open_it and not webbrowser.open(url):
        raise ConfigError("no browser can be started here: open the address above in one on your own machine")
    return 0
