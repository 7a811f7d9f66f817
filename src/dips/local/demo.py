"""Runs `dips demo`, from measuring the machine to the report: a whole run with faults in it.

It shows only what happens: faults are real kills of real processes, and the report's checks decide the exit
code.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from dips.core.clock import Clock
from dips.core.errors import FatalError
from dips.core.messages import StatusReply
from dips.core.units import format_count
from dips.judge.verify import verify_or_say
from dips.local.calibration import measure_tokens_per_s
from dips.local.demo_faults import CLUSTER, Fault, FaultPlan, PlannedFault
from dips.local.demo_plan import (
    RUN_ID,
    DemoOptions,
    make_plan,
    planned_faults,
    speed_gaps,
    tokens_to_train,
    train_settings,
)
from dips.local.local_run import LocalRun
from dips.local.metrics_option import metrics_sentence
from dips.local.options import command_line
from dips.local.page_option import page_sentence, with_page
from dips.local.picture import draw_losses
from dips.local.processes import evaluation_options
from dips.local.progress import Progress, progress_for
from dips.local.report import LocalRunOutcome, build_report, write_report
from dips.local.run_directory import DEMO, Mark, RunDirectory, claim
from dips.local.supervisor import POLL_S
from dips.local.tapes import HELDOUT_TAPE, heldout_losses, tape_path, training_losses

CALIBRATION_S = 3.0
STALL_S = 180.0
"""A run on one machine that applies no token for so long will not do so again."""

RESTART_DELAY_S = {CLUSTER: 2.0, "slave": 1.0}
"""How long a killed process stays away before its supervisor starts it again: long enough to be seen."""


@dataclass
class DemoResult:
    """The result of a demo.

    evaluation_options: the options with which `dips eval` uses the same held-out text. page_url: where the status page
    was.
    """

    report: dict[str, Any]
    directory: RunDirectory
    evaluation_options: list[str]
    page_url: str | None = None


def run_demo(wanted: DemoOptions, console: Console, clock: Clock) -> DemoResult:
    """Run the demo to its end. Raises ConfigError and FatalError; every process is gone when this returns or
    raises."""
    command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    train = train_settings(wanted)
    with claim(wanted.run_dir, Mark(RUN_ID, DEMO, command)) as directory, progress_for(console, clock) as progress:
        if directory.replaced:
            progress.say(f"replacing what an earlier demo left in {directory.path}")
        tk_max = _choose_length(wanted, command_line(train), progress)
        plan = make_plan(wanted, train, tk_max)
        plan = with_page(plan, directory.path) if wanted.page else plan
        faults = FaultPlan(planned_faults(wanted))
        begin_s = clock.monotonic_s()
        with LocalRun(plan, directory, clock, progress.say, STALL_S) as local:
            local.start()
            if sentence := page_sentence(local.page_url, wanted.page):
                progress.say(sentence)
            if sentence := metrics_sentence(plan, directory):
                progress.say(sentence)
            _watch(local, faults, progress, clock, begin_s)
        return _finish(local, faults, directory, command, clock.monotonic_s() - begin_s)


def _choose_length(wanted: DemoOptions, options: list[str], progress: Progress) -> int:
    cores = os.cpu_count() or 1
    at_once = min(cores, wanted.clusters)
    progress.say(f"measuring how fast this machine trains ({cores} cores)")
    speed = measure_tokens_per_s(options, CALIBRATION_S, at_once)
    tk_max = tokens_to_train(speed, speed_gaps(wanted.clusters), cores, wanted.minutes)
    progress.say(f"{speed:.0f} tokens/s for one process: training on {format_count(tk_max)} tokens")
    return tk_max


def _watch(local: LocalRun, faults: FaultPlan, progress: Progress, clock: Clock, begin_s: float) -> None:
    heldout_tape = tape_path(local.directory.path, HELDOUT_TAPE)
    while not local.finished:
        status = local.tick()
        if status is not None:
            now_s = clock.monotonic_s() - begin_s
            for due in faults.due(status):
                _make_fault(due, local, faults, status, now_s, progress)
            for back in faults.observe(status, now_s):
                _say_back(back, local, progress)
            progress.show(status, heldout_losses(heldout_tape), faults.happened)
        time.sleep(POLL_S)
    local.finish()


def _make_fault(
    due: PlannedFault, local: LocalRun, faults: FaultPlan, status: StatusReply, now_s: float, progress: Progress
) -> None:
    pid = local.supervisor.kill(due.target, RESTART_DELAY_S[due.kind])
    if pid is None:
        return  # it ended by itself a moment ago; the fault stays due until it is back
    fault = faults.was_done(due, pid, status, now_s)
    progress.say(f"FAULT: {fault.what} (pid {pid}) at {format_count(status.tokens)} tokens")
    local.record("fault", what=fault.what, target=due.target, pid=pid, tokens=status.tokens, seconds=now_s)


def _say_back(back: Fault, local: LocalRun, progress: Progress) -> None:
    assert back.back is not None, "observe() returns faults whose victim is back"
    away_s = back.back.seconds - back.when.seconds
    progress.say(f"{back.planned.kind} {back.planned.target} is back as {back.back_as} after {away_s:.1f} s")
    local.record("back", target=back.planned.target, tokens=back.back.tokens, seconds=back.back.seconds)


def _finish(local: LocalRun, faults: FaultPlan, directory: RunDirectory, command: str, seconds: float) -> DemoResult:
    if local.status is None:
        raise FatalError(f"the master never reported its status: see {directory.log('master')}")
    heldout = heldout_losses(tape_path(directory.path, HELDOUT_TAPE))
    outcome = LocalRunOutcome(
        status=local.status,
        seconds=seconds,
        command=command,
        speeds=local.speeds,
        gaps=dict(zip(local.plan.cluster_ids, speed_gaps(len(local.plan.clusters)), strict=True)),
        faults=faults.happened,
        faults_never_made=faults.never_happened,
        exit_codes=local.exit_codes(),
        heldout=heldout,
        **verify_or_say(directory.path),
    )
    report = build_report(outcome)
    write_report(report, directory.report)
    names = local.plan.cluster_ids
    training = {name: training_losses(tape_path(directory.path, name)) for name in names}
    draw_losses(directory.picture, training, heldout, faults.happened, _title(report))
    options = evaluation_options(local.plan.evaluate) if local.plan.evaluate else []
    return DemoResult(report, directory, options, local.page_url)


def _title(report: dict[str, Any]) -> str:
    return (
        f"{len(report['clusters'])} clusters, {format_count(report['tokens'])} tokens, {report['rounds']} rounds "
        f"({report['merged_rounds']} merged), {report['seconds']:.0f} s"
    )
