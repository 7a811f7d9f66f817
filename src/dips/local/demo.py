"""Runs `dips demo`, from measuring the machine to the report: a whole run with faults in it.

It shows only what happens: faults are real kills of real processes, and the report's checks decide the exit
code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import string
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dips.core.clock import Clock
from dips.core.config import load
from dips.core.errors import ConfigError, FatalError
from dips.core.files import GROUP_VARIABLE, share_with
from dips.core.messages import StatusReply
from dips.core.net.addresses import format_address
from dips.core.units import format_count, format_seconds
from dips.local.child import wrapped
from dips.local.cut_link import LOOPBACK, CutLink, check_possible
from dips.local.local_run import LocalRun
from dips.local.log_files import HELDOUT_TAPE, heldout_losses, tape_path, training_losses
from dips.local.options import command_line, log_format_asked
from dips.local.processes import (
    RunKnobs,
    RunPlan,
    TrainedCluster,
    checkpoints_path,
    evaluation_options,
    numbered,
    what_is_served,
    with_page,
)
from dips.local.report import (
    CLUSTER,
    LINK,
    SLAVE,
    FaultPlan,
    LocalRunOutcome,
    PlannedFault,
    build_report,
    draw_losses,
    write_report,
)
from dips.local.run_directory import DEMO, Mark, RunDirectory, claim
from dips.local.run_file import NOT_YET_KNOWN, make_slaves
from dips.local.supervisor import POLL_S, TELL_EVERY_S, how_it_ended
from dips.local.view import Progress, progress_for
from dips.master.config import MasterConfig
from dips.trainer.config import TrainConfig
from dips.trainer.parallelism import Parallelism
from dips.worker.config import SECTION as WORKER_SECTION
from dips.worker.config import ClientConfig

# ---- demo plan -------------------------------------------------------------------------------------------------------
#
# Makes the plan of `dips demo`: clusters of unequal speed, how long, and which faults.
#
# The numbers are here with their reasons. Decides only; nothing is started or measured here.


RUN_ID = "demo"
LARGEST_GAP = 0.5
PAPER_GAPS = (0.0, 0.16, 0.33, 0.50)
"""The speed gaps of four clusters, as in the simulations that the defaults were chosen by."""

SYNC_EVERY = 16
"""H: small, so that a run of three minutes has some dozens of rounds."""

LOG_EVERY_STEPS = 4
"""Points of the loss picture: four in each round."""

HEARTBEAT_S = 1.0
"""Half the usual one: a killed cluster is evicted within 5 s, which a short run should show."""

CHECKPOINT_EVERY_S = 5.0
"""A tiny model is written in milliseconds, and the killed cluster should come back with little to do again."""

CLUSTER_KILLED_AT = 0.35
SLAVE_KILLED_AT = 0.60
LINK_CUT_AT = 0.75
"""Shares of the run's tokens: late enough that there is something to lose, early enough to see it come back."""

LINK_CUT_S = 12.0
"""More than twice what it takes to evict a cluster (HEARTBEAT_S): it has to join again."""

FULL_MINUTES = 3.0
LEAST_TOKENS = 1_000_000
"""A run of FULL_MINUTES trains on at least so many tokens, however slow the machine: fewer show too little."""

SPENT_ELSEWHERE = 0.45
"""Share of the machine's time that slaves, master, evaluator, transfers and the two faults take."""

PARALLELISMS = ("", "fsdp=2", "tensor=2", "pipeline=2")
"""How the clusters of a demo of parallelisms are cut, in turn."""

MODEL_SIZE, SIZE_TO_CUT = "tiny", "wide"
"""tiny has three heads, which two tensor-parallel ranks cannot share."""

RANKS_COST = 3.0
"""How much longer the clusters of a demo of parallelisms take for a token: small tensors through gloo, and seven
processes that share the processors.
"""


LIGHT_BOOT = 0.4
"""How long a process without PyTorch takes to start, as a share of one with it."""

END_BOOTS = 1.0
"""How long the end takes, in starts of a trainer: all leave, the last version is evaluated, the records are checked."""

ROUNDS_TO_SPARE = 3
"""One is under way when the run is paused; the next may begin before the launcher sees it."""

LINGER_S = 600.0
"""The master answers until the last version is evaluated, however busy the machine is; then it is told to end."""


@dataclass(frozen=True)
class DemoOptions:
    """The options of `dips demo`."""

    data: tuple[Path, ...] = ()
    clusters: int = 4
    slaves: int = 2
    minutes: float = FULL_MINUTES
    run_dir: Path = Path("runs/demo")
    faults: bool = True
    model_size: str | None = None  # SIZE_TO_CUT with parallel, else MODEL_SIZE
    seed: int = 0
    record_pushes: bool = False
    insecure: bool = False
    page: bool = True
    metrics: bool = False
    parallel: bool = False  # each cluster with a parallelism of its own; pushes are recorded and replayed
    cut_link: bool = False  # cut the link of a cluster, in a network namespace


def cluster_names(how_many: int) -> list[str]:
    """The names of the clusters: a, b, c, ... Raises ConfigError beyond z."""
    if not 1 <= how_many <= len(string.ascii_lowercase):
        raise ConfigError(f"a demo has 1 to {len(string.ascii_lowercase)} clusters, not {how_many}")
    return list(string.ascii_lowercase[:how_many])


def parallelisms(wanted: DemoOptions) -> list[str]:
    """How each cluster's ranks share the model (TrainConfig.parallel)."""
    kinds = PARALLELISMS if wanted.parallel else ("",)
    return [kinds[i % len(kinds)] for i in range(wanted.clusters)]


def speed_gaps(how_many: int) -> list[float]:
    """How much slower than the machine each cluster is made to be: from 0, evenly, to a half."""
    if how_many == len(PAPER_GAPS):
        return list(PAPER_GAPS)
    return [round(LARGEST_GAP * i / max(1, how_many - 1), 3) for i in range(how_many)]


def tokens_to_train(tokens_per_s: float, gaps: Sequence[float], cores: int, minutes: float) -> int:
    """The run's tk_max. tokens_per_s: of one process that has a core to itself.

    A run of FULL_MINUTES has LEAST_TOKENS at least, however long that takes.
    """
    fits = run_tokens_per_s(tokens_per_s, gaps, cores) * minutes * 60.0
    least = LEAST_TOKENS * min(1.0, minutes / FULL_MINUTES)
    return int(max(fits, least))


def run_tokens_per_s(tokens_per_s: float, gaps: Sequence[float], cores: int) -> float:
    """The speed of a whole run. tokens_per_s: of one process that has a core to itself.

    A cluster with gap g computes (1 - g) of the time, so that together they ask for sum(1 - g) cores at most.
    """
    cores_used = min(float(cores), sum(1.0 - gap for gap in gaps))
    return tokens_per_s * cores_used * (1.0 - SPENT_ELSEWHERE)


@dataclass(frozen=True)
class Duration:
    """How long the parts of a demo will take, as far as a measurement before it says."""

    start_s: float  # until all processes work
    training_s: float
    end_s: float  # until the report is there

    def __str__(self) -> str:
        parts = self.start_s, self.training_s, self.end_s
        whole, start, training, end = map(_roughly, (sum(parts), *parts))
        return f"about {whole} from now: {start} until all processes work, {training} of training, {end} for the report"


def expected_duration(wanted: DemoOptions, tk_max: int, tokens_per_s: float, boot_s: float, cores: int) -> Duration:
    """tokens_per_s: of the whole run. boot_s: how long a trainer took to start, on a core of its own."""
    ranks = sum(Parallelism.parse(kind).n_ranks for kind in parallelisms(wanted))
    boots = ranks + 1 + LIGHT_BOOT * (1 + wanted.slaves)  # the evaluator is one more process with PyTorch
    start_s = boot_s * (LIGHT_BOOT + boots / min(float(cores), boots))
    return Duration(start_s, tk_max / tokens_per_s, END_BOOTS * boot_s)


def _roughly(seconds: float) -> str:
    """In steps that do not claim more than is known."""
    step = 1 if seconds < 10 else 5 if seconds < 60 else 10
    return format_seconds(max(1, step * round(seconds / step)))


def must_wait(status: StatusReply, faults: FaultPlan) -> bool:
    """Whether the run could end before a fault is made and overcome, whose time has come: then it has to wait for that.

    On a machine that does much else, a killed process takes its time to come back.
    """
    rounds = max(1, status.rounds_committed)
    left = status.tk_max_tokens - status.tokens
    return left <= ROUNDS_TO_SPARE * status.tokens / rounds and faults.unfinished(status)


def train_settings(wanted: DemoOptions) -> TrainConfig:
    """The trainer's settings that all clusters of the demo share, and the evaluator."""
    ours: dict[str, object] = {
        "data": wanted.data,
        "model_size": wanted.model_size or (SIZE_TO_CUT if wanted.parallel else MODEL_SIZE),
        "seed": wanted.seed,
        "data_seed": wanted.seed,
        "threads": 1,
        "device": "cpu",
        "log_every_steps": LOG_EVERY_STEPS,
    }
    return load(TrainConfig, "train", overrides=ours).value


def make_plan(wanted: DemoOptions, train: TrainConfig, tk_max: int, link: CutLink | None = None) -> RunPlan:
    """The plan with all processes of the demo. link: that of a cluster that is to be cut."""
    names, gaps = cluster_names(wanted.clusters), speed_gaps(wanted.clusters)
    master: dict[str, object] = {
        "run_id": RUN_ID,
        "directory": wanted.run_dir / "master",
        "slaves": wanted.slaves,
        "max_clusters": wanted.clusters,
        "min_clusters": wanted.clusters,
        "sync_every": SYNC_EVERY,
        "heartbeat_s": HEARTBEAT_S,
        "linger_s": LINGER_S,
        "tk_max": tk_max,
    }
    kinds = parallelisms(wanted)
    clusters = [_cluster(wanted.run_dir, train, *each) for each in zip(names, gaps, kinds, strict=True)]
    slaves = make_slaves(
        wanted.run_dir, RUN_ID, numbered(wanted.slaves), record_pushes=wanted.record_pushes or wanted.parallel or None
    )
    if link is not None:
        first, *rest = link.ports
        master["listen"] = format_address(LOOPBACK, first)
        slaves = tuple(one.model_copy(update={"data_port": port}) for one, port in zip(slaves, rest, strict=True))
        cut = names.index(behind_the_link(wanted))
        clusters[cut] = dataclasses.replace(clusters[cut], prefix=link.prefix)
    run = RunKnobs(
        id=RUN_ID,
        directory=wanted.run_dir,
        slaves=wanted.slaves,
        insecure=wanted.insecure,
        log_format=log_format_asked(None) or "human",
        metrics=wanted.metrics,
        page=wanted.page,
    )
    return RunPlan(
        run,
        load(MasterConfig, "master", overrides=master).value,
        slaves,
        tuple(clusters),
        train,
    )


def planned_faults(wanted: DemoOptions) -> list[PlannedFault]:
    """Faults for one cluster that is neither the fastest nor the slowest, if there is one, and for the last slave; if
    asked for, one for a link.
    """
    planned = []
    if wanted.faults:
        planned.append(PlannedFault(CLUSTER, _killed(wanted), CLUSTER_KILLED_AT))
        planned.append(PlannedFault(SLAVE, f"s{wanted.slaves - 1}", SLAVE_KILLED_AT))
    if wanted.cut_link:
        planned.append(PlannedFault(LINK, behind_the_link(wanted), LINK_CUT_AT, LINK_CUT_S))
    return planned


def _killed(wanted: DemoOptions) -> str:
    names = cluster_names(wanted.clusters)
    return names[min(1, len(names) - 1)]


def behind_the_link(wanted: DemoOptions) -> str:
    """The last cluster of one process, another one than is killed if there is one. The ranks of a cluster speak over
    the same device as with the servers, so a cut would part them too.
    """
    kinds = dict(zip(cluster_names(wanted.clusters), parallelisms(wanted), strict=True))
    whole = [name for name, kind in kinds.items() if not kind]
    others = [name for name in whole if name != _killed(wanted)]
    return (others or whole)[-1]


def _cluster(run_dir: Path, train: TrainConfig, name: str, gap: float, parallel: str) -> TrainedCluster:
    ours: dict[str, object] = {
        "run_id": RUN_ID,
        "cluster_id": name,
        "master": NOT_YET_KNOWN,
        "tape": tape_path(run_dir, name),
        "checkpoint_dir": checkpoints_path(run_dir, name),
        "checkpoint_every_s": CHECKPOINT_EVERY_S,
        "resume": True,
    }
    client = load(ClientConfig, WORKER_SECTION, overrides=ours).value
    own = {**train.model_dump(), "emulate_gap": gap, "parallel": parallel}
    return TrainedCluster(load(TrainConfig, "train", overrides=own).value, client)


# ---- calibration -----------------------------------------------------------------------------------------------------
#
# Measures how fast this machine trains, by running the trainer itself in processes of its own.


_ENDS_WITHIN_S = 300.0


class NotMeasured(FatalError):
    """The machine does so much else that its speed says nothing."""


def measure_tokens_per_s(
    options: Sequence[str], seconds: float, at_once: int, tell: Callable[[str], None] = lambda sentence: None
) -> float:
    """The mean speed of `at_once` trainers that run side by side for some seconds, in tokens a second of
    each.

    `options` are those of `dips train`. Raises ConfigError with the trainer's own sentence when it refuses
    its settings (a data path that does not exist, for one), NotMeasured when it takes too long, and FatalError when a
    trainer ends otherwise. `tell` gets a sentence now and then.
    """
    command = [sys.executable, "-m", "dips.trainer.calibrate", "--json", "--seconds", str(seconds), *options]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    trainers = [subprocess.Popen(wrapped(command), text=True, **pipes) for _ in range(at_once)]
    try:
        speeds = [_speed(trainer, tell) for trainer in trainers]
    finally:
        for trainer in trainers:
            if trainer.poll() is None:
                trainer.kill()
                trainer.communicate()
    return sum(speeds) / len(speeds)


def _speed(trainer: subprocess.Popen[str], tell: Callable[[str], None]) -> float:
    try:
        out, errors = _output(trainer, "the measurement", tell, _ENDS_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"the speed of this machine could not be measured in {_ENDS_WITHIN_S:g} s") from error
    if trainer.returncode == ConfigError.exit_code:
        raise ConfigError(_last_line(errors).removeprefix("dips: "))
    if trainer.returncode != 0:
        raise FatalError(f"the trainer {how_it_ended(trainer.returncode)} while its speed was measured: {errors}")
    return float(json.loads(_last_line(out))["tokens_per_s"])


def _output(
    process: subprocess.Popen[str], what: str, tell: Callable[[str], None], limit_s: float = math.inf
) -> tuple[str, str]:
    """What the process wrote, once it has ended. Raises TimeoutExpired after limit_s."""
    begin_s = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=min(TELL_EVERY_S, limit_s))
        except subprocess.TimeoutExpired:
            waited_s = time.monotonic() - begin_s
            if waited_s >= limit_s:
                raise
            tell(f"still waiting for {what} ({format_seconds(round(waited_s))})")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "(no output)"


# ---- demo ------------------------------------------------------------------------------------------------------------


CALIBRATION_S = 3.0
STALL_S = 900.0
"""A run on one machine that applies no token for so long will not do so again, whatever else the machine does."""

HOLD_S = 600.0
"""How long a run that could end waits for what was killed."""

RESTART_DELAY_S = {CLUSTER: 2.0, "slave": 1.0}
"""How long a killed process stays away before its supervisor starts it again: long enough to be seen."""


@dataclass
class DemoResult:
    """The result of a demo."""

    report: dict[str, Any]
    directory: RunDirectory
    evaluation_options: list[str]  # the options with which `dips eval` uses the same held-out text
    page_url: str | None = None  # where the status page was


def run_demo(wanted: DemoOptions, console: Console, clock: Clock) -> DemoResult:
    """Run the demo to its end. Raises ConfigError and FatalError; every process is gone when this returns or
    raises."""
    command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    train = train_settings(wanted)
    if wanted.cut_link:
        check_possible()
    share_with(os.environ.get(GROUP_VARIABLE, ""))
    with (
        claim(wanted.run_dir, Mark(RUN_ID, DEMO, command)) as directory,
        progress_for(console, clock) as progress,
        contextlib.ExitStack() as spaces,
    ):
        if directory.replaced:
            progress.say(f"replacing what an earlier demo left in {directory.path}")
        progress.say(
            f"one master, {wanted.slaves} slaves and {wanted.clusters} clusters will train for about "
            f"{format_seconds(round(wanted.minutes * 60))}; first a look at this machine ({os.cpu_count()} cores)"
        )
        link = spaces.enter_context(CutLink(1 + wanted.slaves)) if wanted.cut_link else None
        _compile(progress)
        tk_max = _choose_length(wanted, command_line(train), progress)
        plan = with_page(make_plan(wanted, train, tk_max, link))
        faults = FaultPlan(planned_faults(wanted))
        begin_s = clock.monotonic_s()
        with LocalRun(plan, directory, clock, progress.say, STALL_S) as local:
            local.start()
            for sentence in what_is_served(plan, directory, local.page_url):
                progress.say(sentence)
            _watch(local, faults, progress, clock, begin_s, link)
        progress.say("all processes have ended: checking their records, and drawing the losses")
        return _finish(local, faults, directory, command, clock.monotonic_s() - begin_s)


def _compile(progress: Progress) -> None:
    """In a process of its own, before the measurement: else slaves would wait for it, and nothing would say why."""
    progress.say("waiting for the slaves' compiled code (seconds; a minute or two the first time on a machine)")
    command = [sys.executable, "-m", "dips.cli", "warm-up", "--slave"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(wrapped(command), text=True, **pipes)
    try:
        _, errors = _output(process, "the slaves' compiled code", progress.say)
    finally:
        process.kill()
    if process.returncode:
        progress.say(f"it could not be prepared ({_last_line(errors).removeprefix('dips: ')}): slaves start slowly")


def _choose_length(wanted: DemoOptions, options: list[str], progress: Progress) -> int:
    cores = os.cpu_count() or 1
    at_once, gaps = min(cores, wanted.clusters), speed_gaps(wanted.clusters)
    progress.say(
        f"waiting for a measurement of how fast this machine trains: {at_once} trainers start, and train for "
        f"{CALIBRATION_S:g} s"
    )
    begin_s = time.monotonic()
    try:
        speed = measure_tokens_per_s(options, CALIBRATION_S, at_once, progress.say)
    except NotMeasured as error:
        tk_max = tokens_to_train(0.0, gaps, cores, wanted.minutes)
        progress.say(f"{error}: training on {format_count(tk_max)} tokens, however long that takes")
        return tk_max
    boot_s = max(0.0, time.monotonic() - begin_s - CALIBRATION_S)
    speed_in_run = speed / RANKS_COST if wanted.parallel else speed
    tk_max = tokens_to_train(speed_in_run, gaps, cores, wanted.minutes)
    expected_per_s = run_tokens_per_s(speed_in_run, gaps, cores)
    progress.expect(expected_per_s)
    progress.say(f"{speed:.0f} tokens/s for one process: training on {format_count(tk_max)} tokens")
    progress.say(str(expected_duration(wanted, tk_max, expected_per_s, boot_s, cores)))
    return tk_max


def _watch(
    local: LocalRun, faults: FaultPlan, progress: Progress, clock: Clock, begin_s: float, link: CutLink | None
) -> None:
    heldout_tape = tape_path(local.directory.path, HELDOUT_TAPE)
    hold = Hold(local, faults, progress)
    while not local.finished:
        status = local.tick()
        now_s = clock.monotonic_s() - begin_s
        if link is not None and link.look(now_s):
            progress.say("the link that was cut is there again")
        if status is not None:
            for due in faults.due(status):
                _make_fault(due, local, faults, status, now_s, progress, link)
            for back in faults.observe(status, now_s):
                assert back.back is not None, "observe() returns faults whose victim is back"
                target, away_s = back.planned.target, back.back.seconds - back.when.seconds
                progress.say(f"{back.planned.victim} is back as {back.back_as} after {away_s:.1f} s")
                local.record("back", target=target, tokens=back.back.tokens, seconds=back.back.seconds)
            hold.look(status, now_s)
            progress.show(status, heldout_losses(heldout_tape), faults.happened)
        time.sleep(POLL_S)
    local.finish()


class Hold:
    """Pauses a run that could end before its faults are made and overcome, until they are, or for HOLD_S."""

    def __init__(self, local: LocalRun, faults: FaultPlan, progress: Progress) -> None:
        self._local = local
        self._faults = faults
        self._progress = progress
        self._since_s: float | None = None
        self._given_up = False

    def look(self, status: StatusReply, now_s: float) -> None:
        if self._since_s is None:
            wait = must_wait(status, self._faults) and not self._given_up
            if wait and self._local.answer(lambda master: master.pause(_HOLD)) is not None:
                self._since_s = now_s
                self._progress.say(f"the run is almost at its end: paused {_HOLD}")
            return
        self._given_up = now_s >= self._since_s + HOLD_S
        go_on = self._given_up or not self._faults.unfinished(status)
        if go_on and self._local.answer(lambda master: master.resume(_HOLD)) is not None:
            self._since_s = None
            why = f"waited {format_seconds(HOLD_S)} in vain" if self._given_up else "everything is back"
            self._progress.say(f"{why}: the run goes on")


_HOLD = "until what was killed or cut off is back"


def _make_fault(
    due: PlannedFault,
    local: LocalRun,
    faults: FaultPlan,
    status: StatusReply,
    now_s: float,
    progress: Progress,
    link: CutLink | None,
) -> None:
    if due.kind == LINK:
        assert link is not None, "planned only where there is one"
        pid = local.supervisor.pid(due.target)
        if pid is not None:
            link.cut(now_s + due.lasts_s)
    else:
        pid = local.supervisor.kill(due.target, RESTART_DELAY_S[due.kind])
    if pid is None:
        return  # it ended by itself a moment ago; the fault stays due until it is back
    fault = faults.was_done(due, pid, status, now_s)
    progress.say(f"FAULT: {fault.what} (pid {pid}) at {format_count(status.tokens)} tokens")
    local.record("fault", what=fault.what, target=due.target, pid=pid, tokens=status.tokens, seconds=now_s)


def _finish(local: LocalRun, faults: FaultPlan, directory: RunDirectory, command: str, seconds: float) -> DemoResult:
    if local.status is None:
        raise FatalError(f"the master never reported its status: see {directory.log('master')}")
    from dips.judge.verify import verify_or_say  # not while a person waits for the first line

    heldout = heldout_losses(tape_path(directory.path, HELDOUT_TAPE))
    recorded = all(slave.record_pushes for slave in local.plan.slaves)
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
        parallelisms={c.cluster_id: c.train.parallel for c in local.plan.clusters if isinstance(c, TrainedCluster)},
        **verify_or_say(directory.path, replay=recorded),
    )
    report = build_report(outcome)
    write_report(report, directory.report)
    names = local.plan.cluster_ids
    training = {_label(name, outcome): training_losses(tape_path(directory.path, name)) for name in names}
    title = (
        f"{len(report['clusters'])} clusters, {format_count(report['tokens'])} tokens, {report['rounds']} rounds "
        f"({report['merged_rounds']} with two or more pushes), {report['seconds']:.0f} s"
    )
    draw_losses(directory.picture, training, heldout, faults.happened, title)
    options = evaluation_options(local.plan.evaluate) if local.plan.evaluate else []
    return DemoResult(report, directory, options, local.page_url)


def _label(cluster_id: str, outcome: LocalRunOutcome) -> str:
    """Of a cluster in the picture."""
    if not any(outcome.parallelisms.values()):
        return cluster_id
    return f"{cluster_id} ({outcome.parallelisms[cluster_id] or 'one process'})"
