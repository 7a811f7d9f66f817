"""`dips up`: runs a master, slaves and clusters on this machine, as a file describes them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dips.cli.run_options import insecure_asked
from dips.core.clock import SystemClock
from dips.core.errors import KEYS_REFUSED_EXIT, RefusalCode, Refused
from dips.core.files import share_with
from dips.core.net.addresses import format_address, parse_address
from dips.core.net.security import INSECURE_VARIABLE, KEYS_VARIABLE
from dips.core.observe.logs import say_last
from dips.doctor.local import check_backup, refuse_failed, refuse_what_cannot_start
from dips.local.local_run import LocalRun
from dips.local.log_files import HELDOUT_TAPE, heldout_losses, tape_path
from dips.local.options import LogFormatOption, MetricsOption, log_format_asked
from dips.local.processes import RunPlan, what_is_served, with_page
from dips.local.run_directory import UP, Mark, RunDirectory, claim
from dips.local.run_file import read_run_file
from dips.local.supervisor import POLL_S
from dips.local.view import Progress, progress_for, where


def up(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="What to run; see examples/local.toml.")],
    check: Annotated[bool, typer.Option("--check", help="Only check the file, and end.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Make and use no keys: nothing is encrypted, loopback only.")
    ] = False,
    page: Annotated[
        bool | None, typer.Option("--page/--no-page", help="The status page for browsers; else as the file says (yes).")
    ] = None,
    metrics: MetricsOption = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Continue a run that was stopped, as `dips extend` does while it answers.")
    ] = False,
    log_format: LogFormatOption = None,
) -> int:
    """Run the master, slaves and clusters that a file describes, on this machine, and restart what dies.

    It ends when the run has reached its tk_max or was stopped (`dips stop`), when all of the file's clusters have
    ended and no other one trains, and upon ctrl-C. Started again with the same file it goes on from what was published
    last: after `dips stop` only with --extend, and at its token limit only with a larger tk_max.
    """
    form = log_format_asked(log_format)
    asked = {"insecure": insecure_asked(insecure) or None, "log_format": form, "metrics": metrics or None, "page": page}
    plan = read_run_file(file, **asked)
    run = plan.run
    if check:
        refuse_failed(check_backup(plan))
        print(f"{file}: {len(plan.slaves)} slaves, {len(plan.clusters)} clusters, all settings are good")
        return 0
    plan = with_page(plan)
    refuse_what_cannot_start(plan)
    share_with(run.files_group)
    clock = SystemClock()
    console = Console(stderr=True)
    with claim(run.directory, Mark(plan.run.id, UP, " ".join(sys.argv))) as directory:
        local: LocalRun | None = None
        try:
            with progress_for(console, clock) as progress, LocalRun(plan, directory, clock, progress.say) as local:
                ended = _serve(local, progress, directory, extend)
        except (KeyboardInterrupt, SystemExit) as signal:
            how = "ctrl-C" if isinstance(signal, KeyboardInterrupt) else "SIGTERM"
            last = local.status if local is not None else None
            at = f" {where(last)}" if last is not None else ""
            more = f"its files are in {directory.path}, and `dips up {file}` continues it"
            say_last(f"{how}: the processes of run {plan.run.id} were ended{at}; {more}")
            raise
        if (last := local.status) is not None:
            more = "" if ended else f"; `dips up {file}` continues it"
            how = "ended" if ended else "is"
            print(f"run {local.plan.run.id} {how} {where(last)}{more}")
        print(f"its files are in {directory.path}; next: dips export {directory.path} --to model.safetensors")
    return 0


def _serve(local: LocalRun, progress: Progress, directory: RunDirectory, extend: bool) -> bool:
    """Watch the run to its end, or until no cluster is left; returns whether it has ended."""
    address = local.start(extend)
    progress.say(f"the run's master listens on {address}")
    served = what_is_served(local.plan, directory, local.page_url)
    for line in (*served, *how_to_join(local.plan, address, directory)):
        progress.say(line)
    while not local.finished:
        status = local.tick()
        if status is not None:
            evaluated = local.plan.evaluate is not None
            progress.show(status, heldout_losses(tape_path(directory.path, HELDOUT_TAPE)) if evaluated else None, ())
        if status is not None and local.deserted:
            # Drained, or their own commands are done: no one said that the run is over, so it must not be.
            progress.say("all clusters have ended, and the run has not: its other processes end now")
            if refused := [name for name, code in local.exit_codes().items() if code == KEYS_REFUSED_EXIT]:
                raise Refused(
                    RefusalCode.IDENTITY,
                    f"the keys of {', '.join(refused)} are refused: give new ones (`dips keys renew`), then start the "
                    "run again",
                )
            return False
        time.sleep(POLL_S)
    local.finish()
    return True


def how_to_join(plan: RunPlan, address: str, directory: RunDirectory) -> list[str]:
    """The commands that start further clusters, when the file starts none or more are expected."""
    if plan.clusters:
        return _from_elsewhere(plan, address, directory)
    sentence = "no clusters are in the file: start your own training loops, each in a terminal of its own, such as"
    lines = [
        f"  DIPS_MASTER={address} DIPS_CLUSTER={name} "
        f"{f'{INSECURE_VARIABLE}=1' if plan.run.insecure else f'{KEYS_VARIABLE}={directory.keys / name}'} "
        "python examples/own_loop.py"
        for name in plan.run.keys_for or ("a", "b")
    ]
    more = [] if plan.run.insecure else [f"keys for another one:  dips keys add {directory.keys} --cluster NAME"]
    return [
        sentence,
        *lines,
        *_from_elsewhere(plan, address, directory),
        *more,
        f"end the run with:  dips stop {directory.path}",
    ]


def _from_elsewhere(plan: RunPlan, address: str, directory: RunDirectory) -> list[str]:
    """What a person types on another machine, for the first of the clusters that have keys and are not started here."""
    if not (plan.public_host and plan.run.keys_for):
        return []
    name, (_, port) = plan.run.keys_for[-1], parse_address(address)
    there = f"{plan.public_host}:{(directory.keys / name).resolve()}"
    return [
        "from another machine (docs/start.md):",
        f"  scp -rp {there} keys-{name}",
        f"  dips doctor --master {format_address(plan.public_host, port)} --keys keys-{name}",
    ]
