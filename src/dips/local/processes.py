"""The processes of a run on this machine: which there are, and the command line of each.

A plan is made from settings that are already checked, so that a mistake is reported before anything starts.
Children get all their settings on the command line; the environment that the launcher read its own
settings from is not theirs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dips.core.config import environment_name
from dips.core.errors import ConfigError, Refused
from dips.core.files import GROUP_VARIABLE
from dips.core.messages import Settings
from dips.core.net.security import INSECURE_VARIABLE, KEYS_VARIABLE, SETTINGS
from dips.core.observe.logs import LOG_FORMAT_VARIABLE, LogFormat
from dips.core.release import how_to_install
from dips.local.child import WHOEVER_STARTS_IT, wrapped
from dips.local.log_files import HELDOUT_TAPE, tape_path
from dips.local.options import as_text, command_line, option_name
from dips.local.run_directory import RunDirectory
from dips.local.supervisor import ChildSpec, StopStage
from dips.slave.state.checks import check_settings
from dips.worker.config import SECTION, ClientConfig, leaving_takes_s

if TYPE_CHECKING:
    from dips.core.net.security import ProcessKnobs
    from dips.local.tracking import TrackKnobs
    from dips.master.config import MasterConfig
    from dips.slave.config import BackupConfig, SlaveConfig
    from dips.trainer.config import TrainConfig

MASTER = "master"
EVALUATOR = "heldout"
TRACKER = "track"
EVALUATOR_NICENESS = 5
"""A third of the weight of the others: it only reads, and must not take the processor from the training. Where clusters
never wait it gets no more than that, and still has to start and to follow."""

EVALUATION_KNOBS = frozenset(
    {"data", "max_bytes", "heldout_fraction", "heldout_max_bytes", "sequence_tokens", "threads"}
)
"""The trainer's settings that decide which text a model is evaluated on, and how fast."""

BACKUP = "backup"
BACKUP_NICENESS = 19
"""It has time until the ring overwrites what it copies."""

_SECTIONS = ("MASTER", "SLAVE", "WORKER", "TRAIN", "BACKUP")
_SECURITY = frozenset(SETTINGS)
"""Settings that the plan gives each process itself: they follow from its name."""

_OF_THE_PLAN = _SECURITY | {"run_id", "cluster_id", "master", "tape"}
"""Settings of a cluster that are not its table's."""


STOP_MARGIN_S = 600.0
"""For what is not known here: the step under way, the time of the last push and pull, and the program's own end. A
cluster ends its leaving itself, so this bound is only for one that hangs."""

KILL_MARGIN_S = 5.0
"""Between torchrun's SIGKILL to its processes and the one to torchrun itself."""

ENDING_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's: how many seconds its processes may take to end, before it kills them."""


@dataclass(frozen=True)
class TrainedCluster:
    """A cluster that runs `dips train`: one process, or the ranks that its settings ask for, started by torchrun."""

    train: TrainConfig
    client: ClientConfig
    prefix: tuple[str, ...] = ()  # a command that runs the words after it, such as in a network namespace

    @property
    def cluster_id(self) -> str:
        return self.client.cluster_id

    def command(self, address: str, security: Sequence[str]) -> list[str]:
        knobs = [*command_line(self.train), *command_line(self.client, without={"master", *_SECURITY})]
        own = _dips("train", *knobs, option_name("master"), address, *security)
        n_ranks = self.train.parallelism.n_ranks
        return [*self.prefix, *(own if n_ranks == 1 else _ranks(n_ranks, own))]


@dataclass(frozen=True)
class OwnCluster:
    """A cluster that runs a person's own command; it finds the run in its environment."""

    cluster_id: str
    own_command: tuple[str, ...]
    client: ClientConfig = field(default_factory=ClientConfig)

    def command(self, address: str, security: Sequence[str]) -> list[str]:
        return list(self.own_command)


@dataclass(frozen=True)
class RunPlan:
    """All processes of a run. The evaluator uses `evaluate`'s data, or there is none."""

    run_id: str
    master: MasterConfig
    slaves: tuple[SlaveConfig, ...]
    clusters: tuple[TrainedCluster | OwnCluster, ...] = ()
    evaluate: TrainConfig | None = None
    insecure: bool = False  # no keys are made and used
    keys_for: tuple[str, ...] = ()  # clusters that are not started here, and get keys all the same
    log_format: LogFormat = "human"  # of all processes
    metrics: bool = False  # every process serves them, at a free loopback port where none is set
    public_host: str = ""  # under what other machines find this one; empty: the run is for this machine alone
    files_group: str = ""  # may read what all processes keep
    track: TrackKnobs | None = None  # where the run's curves go
    backup: BackupConfig | None = None  # copies of snapshots go to an object store

    @property
    def cluster_ids(self) -> list[str]:
        return [cluster.cluster_id for cluster in self.clusters]

    @property
    def slave_ids(self) -> list[str]:
        return [slave.slave_id for slave in self.slaves]


def check_servers(master: MasterConfig, slave: SlaveConfig, where: str) -> None:
    """Raise ConfigError, which begins with `where`, for settings that a slave of this run would refuse when its first
    cluster joins."""
    try:
        check_settings(master.to_run_config().settings, slave.max_chunk_bytes, slave.snapshots_kept)
    except Refused as refused:
        raise ConfigError(f"{where} [master] and [slave]: {refused.sentence}") from None


def checkpoints_path(run_dir: Path, cluster_id: str) -> Path:
    """Where a cluster that the launcher starts keeps its checkpoints."""
    return run_dir / "checkpoints" / cluster_id


def master_spec(plan: RunPlan, directory: RunDirectory) -> ChildSpec:
    """The master; with port 0 it takes the same port again when it is restarted."""
    knobs = [*command_line(plan.master, without=_SECURITY), *metrics_options(plan, directory, MASTER, plan.master)]
    command = _dips("master", *knobs, *security_options(plan, directory, MASTER))
    return ChildSpec(MASTER, tuple(command), directory.log(MASTER), _environment(plan), StopStage.LAST)


def slave_specs(plan: RunPlan, directory: RunDirectory, address: str) -> list[ChildSpec]:
    found = []
    for slave in plan.slaves:
        name = slave.slave_id
        knobs = [*command_line(slave, without={"master", *_SECURITY}), *metrics_options(plan, directory, name, slave)]
        command = _dips("slave", *knobs, option_name("master"), address, *security_options(plan, directory, name))
        spec = ChildSpec(name, tuple(command), directory.log(name), _environment(plan), StopStage.SECOND)
        found.append(spec)
    return found


def cluster_specs(plan: RunPlan, directory: RunDirectory, address: str) -> list[ChildSpec]:
    found = []
    for cluster in plan.clusters:
        name, stop_s = cluster.cluster_id, leaving_s(cluster.client, plan.master) + STOP_MARGIN_S
        added = {"DIPS_MASTER": address, "DIPS_RUN": plan.run_id, "DIPS_CLUSTER": name}
        command = cluster.command(address, security_options(plan, directory, name))
        if isinstance(cluster, TrainedCluster):
            command += metrics_options(plan, directory, name, cluster.client)
            if cluster.train.parallel:
                added[ENDING_VARIABLE] = str(math.ceil(stop_s - KILL_MARGIN_S))
        else:
            added |= {environment_name(SECTION, field): text for field, text in as_text(cluster.client, _OF_THE_PLAN)}
            keys = str((directory.keys / name).resolve())
            added |= {INSECURE_VARIABLE: "1"} if plan.insecure else {KEYS_VARIABLE: keys}
            added[environment_name(SECTION, "tape")] = str(tape_path(directory.path, name).resolve())
            for field, value in _metrics(plan, directory, name, cluster.client).items():
                added[environment_name(SECTION, field)] = value
        spec = ChildSpec(name, tuple(command), directory.log(name), _environment(plan, added), stop_s=stop_s)
        found.append(spec)
    return found


def evaluator_spec(plan: RunPlan, directory: RunDirectory, address: str) -> ChildSpec | None:
    """The process that measures the held-out loss of each published version; None when there is no text
    for it."""
    if plan.evaluate is None:
        return None
    tape = tape_path(directory.path, HELDOUT_TAPE)
    knobs = [*evaluation_options(plan.evaluate), *metrics_options(plan, directory, EVALUATOR)]
    security = security_options(plan, directory, EVALUATOR)
    command = _dips("eval", address, "--follow", "--tape", str(tape), *knobs, *security)
    log, environment = directory.log(EVALUATOR), _environment(plan, {"DIPS_RUN": plan.run_id})
    return ChildSpec(EVALUATOR, tuple(command), log, environment, niceness=EVALUATOR_NICENESS)


def tracker_spec(plan: RunPlan, directory: RunDirectory) -> ChildSpec | None:
    """The process that writes the run's curves to a tracker; None when none is asked for. It ends last: the others'
    last lines are still written. No run ends because of it."""
    if plan.track is None:
        return None
    command = _dips("track", str(directory.path), *command_line(plan.track))
    log, environment = directory.log(TRACKER), _environment(plan)
    return ChildSpec(
        TRACKER, tuple(command), log, environment, StopStage.LAST, niceness=EVALUATOR_NICENESS, needed=False
    )


def backup_spec(plan: RunPlan, directory: RunDirectory) -> ChildSpec | None:
    """The process that copies snapshots to an object store; None when none is asked for. No run ends because of it."""
    if plan.backup is None:
        return None
    command = _dips("backup", str(directory.path), *command_line(plan.backup))
    log, environment = directory.log(BACKUP), _environment(plan)
    return ChildSpec(BACKUP, tuple(command), log, environment, niceness=BACKUP_NICENESS, needed=False)


def evaluation_options(train: TrainConfig) -> list[str]:
    """The options of `dips eval` that make it evaluate on the text that these settings hold out."""
    return command_line(train, without=set(type(train).model_fields) - EVALUATION_KNOBS)


def security_options(plan: RunPlan, directory: RunDirectory, name: str) -> list[str]:
    """The options about keys of the process of this name."""
    return ["--insecure"] if plan.insecure else ["--keys", str(directory.keys / name)]


def metrics_options(plan: RunPlan, directory: RunDirectory, name: str, own: ProcessKnobs | None = None) -> list[str]:
    """The options about metrics of the process of this name; own: its settings, which take precedence."""
    return [
        part for field, value in _metrics(plan, directory, name, own).items() for part in (option_name(field), value)
    ]


def _metrics(plan: RunPlan, directory: RunDirectory, name: str, own: ProcessKnobs | None) -> dict[str, str]:
    """Settings that it has not."""
    if not plan.metrics:
        return {}
    ours = {"metrics_listen": "127.0.0.1:0", "metrics_file": str((directory.metrics / f"{name}.json").resolve())}
    return {field: value for field, value in ours.items() if own is None or getattr(own, field) is None}


def leaving_s(client: ClientConfig, master: MasterConfig) -> float:
    """How long a cluster may take to leave after SIGTERM, with the push of its last steps."""
    settings = Settings(
        heartbeat_s=master.heartbeat_s,
        evict_after_beats=master.evict_after_beats,
        round_timeout_s=master.round_timeout_s,
    )
    grace_s = 0.0 if isinstance(master.grace_s, str) else master.grace_s
    return leaving_takes_s(client, settings) + max(grace_s, master.round_deadline_s or 0.0)


def _dips(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dips.cli", *arguments]


def _ranks(n_ranks: int, command: Sequence[str]) -> list[str]:
    """The command as n_ranks processes of this machine, which die with what starts them."""
    starts = [sys.executable, "-m", "dips.worker.torchrun", "--standalone", f"--nproc-per-node={n_ranks}"]
    return [*starts, "--no-python", "--", *wrapped(command, parent_pid=WHOEVER_STARTS_IT)]


def _environment(plan: RunPlan, added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of the roles, and with what is added."""
    prefixes = tuple(f"DIPS_{section}_" for section in _SECTIONS)
    ours = {"DIPS_MASTER", KEYS_VARIABLE, INSECURE_VARIABLE}
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith(prefixes)}
    shared = {GROUP_VARIABLE: plan.files_group} if plan.files_group else {}
    # A log that is read while the process runs must not wait in a buffer.
    return {**kept, **shared, "PYTHONUNBUFFERED": "1", LOG_FORMAT_VARIABLE: plan.log_format, **(added or {})}


# ---- metrics option --------------------------------------------------------------------------------------------------
#
# The option --metrics of commands that start whole runs: all processes serve metrics.


MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Every process serves Prometheus metrics; metrics/*.json say where.")
]


# ---- page option -----------------------------------------------------------------------------------------------------
#
# The status page of a run on this machine: on unless it is switched off, at a free port of loopback.


LISTEN = "127.0.0.1:0"
WITHOUT = f"no status page: aiohttp is not installed ({how_to_install('master')})"


def with_page(plan: RunPlan, run_dir: Path) -> RunPlan:
    """The plan with a page that draws the evaluator's losses too; an address that the settings give is kept."""
    if importlib.util.find_spec("aiohttp") is None:  # its server is not installed
        return plan  # what_is_served() says so
    page: dict[str, object] = {"page_listen": plan.master.page_listen or LISTEN}
    if plan.evaluate is not None and plan.master.page_heldout is None:
        page["page_heldout"] = tape_path(run_dir, HELDOUT_TAPE)
    return dataclasses.replace(plan, master=plan.master.model_copy(update=page))


def without_page(plan: RunPlan) -> RunPlan:
    """The plan without one, whatever the settings say."""
    return dataclasses.replace(plan, master=plan.master.model_copy(update={"page_listen": None}))


def what_is_served(plan: RunPlan, directory: RunDirectory, page_url: str | None, page: bool) -> list[str]:
    """The launcher's sentences about the page, if one was wanted, and how to configure Prometheus."""
    said = [WITHOUT] if page and page_url is None else []
    if page_url is not None:
        asks = " (the browser asks once whether to trust the run's certificate)" if page_url.startswith("https") else ""
        said.append(f"the status page is at {page_url}{asks}")
    if plan.metrics:
        said.append(f"metrics: let Prometheus read the addresses from {directory.metrics}/*.json (file_sd_configs)")
    return said
