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
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from dips.core.config import Knobs, Name, environment_name
from dips.core.errors import ConfigError, Refused
from dips.core.files import GROUP_VARIABLE, FilesGroup
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


class RunKnobs(Knobs):
    """The table [run]."""

    id: Name = Field(description="Name of the run.")
    directory: Path = Field(description="Where the run keeps everything; relative to where `dips up` is started.")
    slaves: Annotated[int, Field(ge=1, le=64)] | Annotated[tuple[Name, ...], Field(min_length=1, max_length=64)] = (
        Field(
            1, description="How many slaves (s0, s1, ...); or a list of their names, such as those that a reshard left."
        )
    )
    advertise: str = Field(
        "",
        description="Host name or address, without a port, under which other machines reach this one; empty: that of "
        "[master] listen.",
    )
    insecure: bool = Field(
        False, description="Make and use no keys: nothing is encrypted, no one is authenticated, loopback only."
    )
    keys_for: tuple[Name, ...] = Field(
        (), description="Clusters that are started elsewhere, for which keys are made in the run's directory."
    )
    page: bool = Field(True, description="Serve the status page: where [master] page_listen says, else at a free port.")
    evaluate: bool = Field(
        False, description="Measure the held-out loss of each published version, with [train]'s text."
    )
    metrics: bool = Field(
        False,
        description="Every process serves Prometheus metrics: where its table says, else at a free loopback port; "
        "metrics/*.json in the run's directory say where.",
    )
    log_format: LogFormat = Field("human", description="Form of all processes' log lines: human, or json for machines.")
    files_group: FilesGroup = ""

    @field_validator("slaves", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        """A number from the environment comes as a list of one text."""
        return int(value[0]) if isinstance(value, list) and len(value) == 1 and str(value[0]).isdecimal() else value

    @property
    def slave_ids(self) -> tuple[str, ...]:
        """The slaves' names."""
        return self.slaves if isinstance(self.slaves, tuple) else numbered(self.slaves)


@dataclass(frozen=True)
class RunPlan:
    """All processes of a run. The evaluator uses `evaluate`'s data, or there is none."""

    run: RunKnobs
    master: MasterConfig
    slaves: tuple[SlaveConfig, ...]
    clusters: tuple[TrainedCluster | OwnCluster, ...] = ()
    evaluate: TrainConfig | None = None
    public_host: str = ""  # under what other machines find this one; empty: the run is for this machine alone
    track: TrackKnobs | None = None  # where the run's curves go
    backup: BackupConfig | None = None  # copies of snapshots go to an object store

    @property
    def cluster_ids(self) -> list[str]:
        return [cluster.cluster_id for cluster in self.clusters]


def numbered(how_many: int) -> tuple[str, ...]:
    """Names of slaves: s0, s1, ..."""
    return tuple(f"s{index}" for index in range(how_many))


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


def _spec(
    plan: RunPlan, directory: RunDirectory, name: str, *words: str, added: Mapping[str, str] | None = None, **more: Any
) -> ChildSpec:
    """The process of this name that runs a command of dips. added: to its environment. more: fields of ChildSpec."""
    return ChildSpec(name, tuple(_dips(*words)), directory.log(name), _environment(plan, added), **more)


def master_spec(plan: RunPlan, directory: RunDirectory) -> ChildSpec:
    """The master; with port 0 it takes the same port again when it is restarted."""
    knobs = [*command_line(plan.master, without=_SECURITY), *metrics_options(plan, directory, MASTER, plan.master)]
    security = security_options(plan, directory, MASTER)
    return _spec(plan, directory, MASTER, "master", *knobs, *security, stage=StopStage.LAST)


def other_specs(plan: RunPlan, directory: RunDirectory, address: str) -> list[ChildSpec]:
    """All other processes, in the order of their start: slaves, clusters, and what only looks at the run."""
    found: list[ChildSpec] = []
    more: dict[str, Any]
    for slave in plan.slaves:
        name = slave.slave_id
        knobs = [*command_line(slave, without={"master", *_SECURITY}), *metrics_options(plan, directory, name, slave)]
        knobs += [option_name("master"), address, *security_options(plan, directory, name)]
        found.append(_spec(plan, directory, name, "slave", *knobs, stage=StopStage.SECOND))
    found += cluster_specs(plan, directory, address)
    where = str(directory.path)
    if plan.evaluate is not None:
        # Measures the held-out loss of each published version.
        knobs = ["--follow", "--tape", str(tape_path(directory.path, HELDOUT_TAPE)), *evaluation_options(plan.evaluate)]
        knobs += [*metrics_options(plan, directory, EVALUATOR), *security_options(plan, directory, EVALUATOR)]
        more = {"added": {"DIPS_RUN": plan.run.id}, "niceness": EVALUATOR_NICENESS}
        found.append(_spec(plan, directory, EVALUATOR, "eval", address, *knobs, **more))
    # No run ends because of the two that follow.
    if plan.track is not None:
        # Writes the run's curves to a tracker. It ends last: the others' last lines are still written.
        more = {"stage": StopStage.LAST, "niceness": EVALUATOR_NICENESS, "needed": False}
        found.append(_spec(plan, directory, TRACKER, "track", where, *command_line(plan.track), **more))
    if plan.backup is not None:
        # Copies snapshots to an object store.
        words = ("backup", where, *command_line(plan.backup))
        found.append(_spec(plan, directory, BACKUP, *words, niceness=BACKUP_NICENESS, needed=False))
    return found


def cluster_specs(plan: RunPlan, directory: RunDirectory, address: str) -> list[ChildSpec]:
    found = []
    for cluster in plan.clusters:
        name, stop_s = cluster.cluster_id, leaving_s(cluster.client, plan.master) + STOP_MARGIN_S
        added = {"DIPS_MASTER": address, "DIPS_RUN": plan.run.id, "DIPS_CLUSTER": name}
        command = cluster.command(address, security_options(plan, directory, name))
        if isinstance(cluster, TrainedCluster):
            command += metrics_options(plan, directory, name, cluster.client)
            if cluster.train.parallel:
                added[ENDING_VARIABLE] = str(math.ceil(stop_s - KILL_MARGIN_S))
        else:
            added |= {environment_name(SECTION, field): text for field, text in as_text(cluster.client, _OF_THE_PLAN)}
            keys = str((directory.keys / name).resolve())
            added |= {INSECURE_VARIABLE: "1"} if plan.run.insecure else {KEYS_VARIABLE: keys}
            added[environment_name(SECTION, "tape")] = str(tape_path(directory.path, name).resolve())
            for field, value in _metrics(plan, directory, name, cluster.client).items():
                added[environment_name(SECTION, field)] = value
        spec = ChildSpec(name, tuple(command), directory.log(name), _environment(plan, added), stop_s=stop_s)
        found.append(spec)
    return found


def evaluation_options(train: TrainConfig) -> list[str]:
    """The options of `dips eval` that make it evaluate on the text that these settings hold out."""
    return command_line(train, without=set(type(train).model_fields) - EVALUATION_KNOBS)


def security_options(plan: RunPlan, directory: RunDirectory, name: str) -> list[str]:
    """The options about keys of the process of this name."""
    return ["--insecure"] if plan.run.insecure else ["--keys", str(directory.keys / name)]


def metrics_options(plan: RunPlan, directory: RunDirectory, name: str, own: ProcessKnobs | None = None) -> list[str]:
    """The options about metrics of the process of this name; own: its settings, which take precedence."""
    return [
        part for field, value in _metrics(plan, directory, name, own).items() for part in (option_name(field), value)
    ]


def _metrics(plan: RunPlan, directory: RunDirectory, name: str, own: ProcessKnobs | None) -> dict[str, str]:
    """Settings that it has not."""
    if not plan.run.metrics:
        return {}
    ours = {"metrics_listen": "127.0.0.1:0", "metrics_file": str((directory.metrics / f"{name}.json").resolve())}
    return {field: value for field, value in ours.items() if own is None or getattr(own, field) is None}


def leaving_s(client: ClientConfig, master: MasterConfig) -> float:
    """How long a cluster may take to leave after SIGTERM, with the push of its last steps."""
    config = master.to_run_config()
    return leaving_takes_s(client, config.settings) + max(config.grace_s or 0.0, config.round_deadline_s or 0.0)


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
    shared = {GROUP_VARIABLE: plan.run.files_group} if plan.run.files_group else {}
    # A log that is read while the process runs must not wait in a buffer.
    return {**kept, **shared, "PYTHONUNBUFFERED": "1", LOG_FORMAT_VARIABLE: plan.run.log_format, **(added or {})}


# ---- page option -----------------------------------------------------------------------------------------------------
#
# The status page of a run on this machine: on unless it is switched off, at a free port of loopback.


LISTEN = "127.0.0.1:0"
WITHOUT = f"no status page: aiohttp is not installed ({how_to_install('master')})"


def with_page(plan: RunPlan) -> RunPlan:
    """The plan with a page that draws the evaluator's losses too, at the address that the settings give, if there is
    one; without a page where the run is to have none."""
    if plan.run.page and importlib.util.find_spec("aiohttp") is None:  # its server is not installed
        return plan  # what_is_served() says so
    page: dict[str, object] = {"page_listen": (plan.master.page_listen or LISTEN) if plan.run.page else None}
    if plan.run.page and plan.evaluate is not None and plan.master.page_heldout is None:
        page["page_heldout"] = tape_path(plan.run.directory, HELDOUT_TAPE)
    return dataclasses.replace(plan, master=plan.master.model_copy(update=page))


def what_is_served(plan: RunPlan, directory: RunDirectory, page_url: str | None) -> list[str]:
    """The launcher's sentences about the page, if one was wanted, and how to configure Prometheus."""
    said = [WITHOUT] if plan.run.page and page_url is None else []
    if page_url is not None:
        asks = " (the browser asks once whether to trust the run's certificate)" if page_url.startswith("https") else ""
        said.append(f"the status page is at {page_url}{asks}")
    if plan.run.metrics:
        said.append(f"metrics: let Prometheus read the addresses from {directory.metrics}/*.json (file_sd_configs)")
    return said
