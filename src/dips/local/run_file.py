"""Reads the file of `dips up` and makes a plan of it.

[run] says what there is, [master], [slave], [worker], [train] and [backup] are the settings of the roles (the same
tables that `dips master --config` and its siblings read, with the same precedence), and each [[clusters]]
is one cluster, which may set any setting of [worker] and [train] for itself; [track] says where the run's curves go.
It must find every mistake before anything starts.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from dips.core.config import (
    Knobs,
    Loaded,
    Name,
    SettingsFile,
    check_known,
    check_unique,
    environment_name,
    load,
    load_table,
)
from dips.core.errors import ConfigError
from dips.core.files import GROUP_VARIABLE
from dips.core.net.addresses import MAX_PORT, format_address, is_loopback, parse_address
from dips.core.net.security import SETTINGS
from dips.local.log_files import tape_path
from dips.local.processes import (
    BACKUP,
    EVALUATOR,
    MASTER,
    TRACKER,
    OwnCluster,
    RunKnobs,
    RunPlan,
    TrainedCluster,
    check_servers,
    checkpoints_path,
)
from dips.local.tracking import TrackKnobs, check_tracker
from dips.master.config import MasterConfig
from dips.slave.config import ALL_ADDRESSES, BackupConfig, SlaveConfig
from dips.trainer.config import SECTION as TRAIN_SECTION
from dips.trainer.config import TrainConfig
from dips.worker.config import SECTION as WORKER_SECTION
from dips.worker.config import ClientConfig

TABLES = ("run", "master", "slave", "worker", "train", "backup", "clusters", "track")
NOT_YET_KNOWN = "127.0.0.1:0"
"""In place of the master's address until the master has written it."""

K = TypeVar("K", bound=Knobs)


class ClusterKnobs(Knobs):
    """The settings that only a table [[clusters]] has."""

    id: Name = Field(description="Name of the cluster.")
    gap: float = Field(0.0, ge=0, le=0.95, description="How much slower than this machine it is made to be, 0 to 0.95.")
    command: tuple[str, ...] = Field((), description="A command of your own instead of `dips train`.")


def read_run_file(file: Path, **asked: object) -> RunPlan:
    """The plan that a file describes. Raises ConfigError naming file, table, key and remedy.

    asked: settings of [run] that go before those of the file; None: as the file says.
    """
    tables = SettingsFile.read(file, TABLES)
    _refuse_security(tables)
    run = load(RunKnobs, "run", file=tables, variables={"files_group": GROUP_VARIABLE}, overrides=asked).value
    check_unique(run.slave_ids, "name", f"{file} [run] slaves")
    train = load(TrainConfig, TRAIN_SECTION, file=tables)
    client = load(ClientConfig, WORKER_SECTION, file=tables)
    master = _master(tables, run, len(tables.rows("clusters")))
    plan = RunPlan(
        run,
        master,
        _reachable_slaves(tables, run, master),
        _clusters(tables, run, train, client),
        train.value if run.evaluate else None,
        public_host(run, master),
        _track(tables),
        load(BackupConfig, "backup", file=tables).value if tables.table("backup") else None,
    )
    check_servers(master, plan.slaves[0], str(file))
    # Settings of a table are those of several processes, which cannot share a port
    for table, those in (("slave", plan.slaves), ("worker", [cluster.client for cluster in plan.clusters])):
        given = [knobs.metrics_listen for knobs in those if knobs.metrics_listen is not None]
        fixed = [address for address in given if parse_address(address)[1] and given.count(address) > 1]
        if fixed:
            raise ConfigError(
                f"{file} [{table}] metrics_listen {fixed[0]} is the address of {given.count(fixed[0])} processes: give "
                "port 0, or leave it out and set metrics = true in [run]"
            )
    return plan if asked.get("log_format") is None else _all_logging(plan)


def _track(file: SettingsFile) -> TrackKnobs | None:
    """The table [track], if there is one. Raises ConfigError also when what it needs is not installed."""
    if "track" not in file.tables:
        return None
    track = load(TrackKnobs, "track", file=file).value
    check_tracker(track)
    return track


def _all_logging(plan: RunPlan) -> RunPlan:
    """The plan with the run's form of log lines, whatever the roles' tables say of it."""
    update = {"log_format": plan.run.log_format}
    clusters = [
        replace(cluster, client=cluster.client.model_copy(update=update))
        if isinstance(cluster, TrainedCluster)
        else cluster
        for cluster in plan.clusters
    ]
    return replace(
        plan,
        master=plan.master.model_copy(update=update),
        slaves=tuple(slave.model_copy(update=update) for slave in plan.slaves),
        clusters=tuple(clusters),
    )


def make_slaves(
    directory: Path, run_id: str, names: Iterable[str], file: SettingsFile | None = None, **more: object
) -> tuple[SlaveConfig, ...]:
    """Slaves of these names with their directories and tapes inside the run's.

    more: settings that go before those of the file; None: as the file says.
    """
    slaves = []
    for name in names:
        ours: dict[str, object] = {
            **more,
            "run_id": run_id,
            "slave_id": name,
            "master": NOT_YET_KNOWN,
            "directory": directory / "slaves" / name,
            "tape": tape_path(directory, name),
        }
        slaves.append(load(SlaveConfig, "slave", file=file, overrides=ours).value)
    return tuple(slaves)


def public_host(run: RunKnobs, master: MasterConfig) -> str:
    """The host under which other machines find this one; empty where the master serves this machine alone.

    Raises ConfigError when the settings contradict each other.
    """
    host, _ = parse_address(master.listen, "listen")
    if is_loopback(host):
        if run.advertise:
            raise ConfigError(
                f"[run] advertise is {run.advertise!r}, and [master] listen is {master.listen}, where only this "
                "machine finds it: let it listen at an address of this machine, or at 0.0.0.0"
            )
        return ""
    if not run.advertise and host in ALL_ADDRESSES:
        raise ConfigError(
            f"[master] listen {master.listen} means every address of this machine, and slaves have to give "
            "clusters one: set [run] advertise to that at which other machines reach this one"
        )
    found = run.advertise or host
    if is_loopback(found) or found in ALL_ADDRESSES:
        raise ConfigError(
            f"[run] advertise is {found!r}, where no other machine finds this one: give the address they use"
        )
    if not (_is_literal(found) or re.fullmatch(r"[A-Za-z0-9_.-]+", found)):
        raise ConfigError(f"[run] advertise is {found!r}: give a host name or an address alone, without a port")
    return found


def _reachable_slaves(file: SettingsFile, run: RunKnobs, master: MasterConfig) -> tuple[SlaveConfig, ...]:
    """The slaves; where the master serves other machines, so that these reach the slaves too.

    Of a fixed data_port each slave after the first takes the next one.
    """
    public, table = public_host(run, master), file.table("slave")
    given = {
        name for name in ("data_host", "advertise") if name in table or environment_name("slave", name) in os.environ
    }
    ours: dict[str, object] = {}
    if public:
        host, _ = parse_address(master.listen, "listen")
        if "data_host" not in given:
            ours["data_host"] = host if _is_literal(host) else "0.0.0.0"
        if "advertise" not in given:
            ours["advertise"] = format_address(public, 0)
    slaves = []
    made = make_slaves(run.directory, run.id, run.slave_ids, file, insecure=run.insecure or None, **ours)
    for index, slave in enumerate(made):
        if public and is_loopback(slave.data_host) and "advertise" not in given:
            raise ConfigError(
                f"{file} [slave] data_host is {slave.data_host}, which only this machine reaches, and [master] listen "
                f"{master.listen} serves others: leave out data_host, or let the master listen at 127.0.0.1"
            )
        if public and is_loopback(parse_address(slave.advertise)[0]):
            raise ConfigError(
                f"{file} [slave] advertise is {slave.advertise}, which leads other machines to themselves, and "
                f"[master] listen {master.listen} serves them: leave out advertise, or give the address that they use"
            )
        slaves.append(_at_port(slave, index))
    return tuple(slaves)


def _at_port(slave: SlaveConfig, index: int) -> SlaveConfig:
    """The slave at its own port: settings of [slave] are those of all slaves, which cannot share one."""
    if index == 0 or slave.data_port == 0:
        return slave
    if slave.data_port + index > MAX_PORT:
        raise ConfigError(f"[slave] data_port {slave.data_port} leaves no port for slave {slave.slave_id}: give less")
    host, port = parse_address(slave.advertise, "advertise") if slave.advertise else ("", 0)
    advertise = format_address(host, port + index) if port else slave.advertise
    return slave.model_copy(update={"data_port": slave.data_port + index, "advertise": advertise})


def _is_literal(host: str) -> bool:
    """Whether a socket can be bound to it as it is; a name may be that of a router in front."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _explicit(loaded: Loaded[K]) -> dict[str, object]:
    """The settings that were given, without the defaults."""
    return {name: getattr(loaded.value, name) for name, where in loaded.provenance.items() if where != "default"}


def _master(file: SettingsFile, run: RunKnobs, n_clusters: int) -> MasterConfig:
    ours: dict[str, object] = {"run_id": run.id, "directory": run.directory / "master"}
    ours["slaves"] = len(run.slave_ids)
    ours["insecure"] = run.insecure or None
    loaded = load(MasterConfig, "master", file=file, overrides=ours)
    if n_clusters > loaded.value.max_clusters:
        raise ConfigError(
            f"{file} lists {n_clusters} clusters, but [master] max_clusters is {loaded.value.max_clusters}: raise it"
        )
    return loaded.value


def _clusters(
    file: SettingsFile, run: RunKnobs, train: Loaded[TrainConfig], client: Loaded[ClientConfig]
) -> tuple[TrainedCluster | OwnCluster, ...]:
    found = [_cluster(file, run, number, train, client) for number in range(1, len(file.rows("clusters")) + 1)]
    names = [cluster.cluster_id for cluster in found]
    check_unique(names, "id", f"{file} [[clusters]]")
    reserved = {MASTER, EVALUATOR, TRACKER, BACKUP, *run.slave_ids}.intersection(names)
    if reserved:
        raise ConfigError(
            f"{file}: the cluster id {sorted(reserved)[0]!r} is the name of another process: choose another"
        )
    return tuple(found)


def _cluster(
    file: SettingsFile, run: RunKnobs, number: int, train: Loaded[TrainConfig], client: Loaded[ClientConfig]
) -> TrainedCluster | OwnCluster:
    """A cluster from the table [[clusters]] of this number; train, client: the tables [train] and [worker]."""
    table, where = file.rows("clusters")[number - 1], file.where("clusters", number)
    kinds: tuple[type[Knobs], ...] = (ClusterKnobs, ClientConfig)
    if not table.get("command"):
        kinds = (*kinds, TrainConfig)
    check_known(table, {name for kind in kinds for name in kind.model_fields}, where)

    def of(kind: type[Knobs]) -> dict[str, object]:
        return {key: value for key, value in table.items() if key in kind.model_fields}

    own = load_table(ClusterKnobs, of(ClusterKnobs), where)
    given = {**_explicit(client), **of(ClientConfig)}
    if own.command:
        if own.gap:
            raise ConfigError(f"{where}: gap = {own.gap:g} slows `dips train` only, and not a command of your own")
        return OwnCluster(own.id, own.command, load_table(ClientConfig, {**given, "insecure": run.insecure}, where))
    gap = {"emulate_gap": own.gap} if own.gap else {}
    ours: dict[str, object] = {
        "run_id": run.id,
        "cluster_id": own.id,
        "master": NOT_YET_KNOWN,
        "tape": tape_path(run.directory, own.id),
        "insecure": run.insecure,
    }
    # A process that ends is started again, and then goes on from here; the file may say otherwise.
    resumed: dict[str, object] = {"checkpoint_dir": checkpoints_path(run.directory, own.id), "resume": True}
    return TrainedCluster(
        load_table(TrainConfig, {**_explicit(train), **gap, **of(TrainConfig)}, where),
        load_table(ClientConfig, {**resumed, **given, **ours}, where),
    )


def _refuse_security(file: SettingsFile) -> None:
    """Raise ConfigError for a role's table that says what the whole run has to: half a run cannot be insecure."""
    of_roles = {file.where(name): file.table(name) for name in ("master", "slave", "worker")}
    of_clusters = {file.where("clusters", n): table for n, table in enumerate(file.rows("clusters"), 1)}
    for where, table in {**of_roles, **of_clusters}.items():
        if wrong := [key for key in SETTINGS if key in table]:
            raise ConfigError(
                f"{where}: {wrong[0]!r} does not belong here: `dips up` makes the keys of its processes; without keys "
                "set `insecure = true` in [run]"
            )
