"""Reads the file of `dips deploy`: sites, contexts, servers and clusters, checked before any request is sent.

[deploy] says where and as whom, [model] how large, [master], [slave], [worker] and [train] are the settings of the
roles as in the file of `dips up`, each [[sites]] is a place with or without Kubernetes, each [[clusters]] a training
cluster. It must find every mistake that can be found without a request.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dips.core.config import Knobs, load_table, read_tables
from dips.core.errors import ConfigError
from dips.core.net.addresses import parse_address
from dips.deploy.deploy_knobs import (
    DeployedClusterKnobs,
    DeployKnobs,
    ModelKnobs,
    SiteKnobs,
)
from dips.deploy.sizes import PodSizes, sizes_for
from dips.local.processes import leaving_s
from dips.master.config import MasterConfig
from dips.planner.server_site import Sites
from dips.slave.config import SlaveConfig
from dips.worker.config import ClientConfig

TABLES = ("deploy", "model", "sites", "clusters", "master", "slave", "worker", "train")
AUTO = "auto"
CONTROL_PORT, DATA_PORT, METRICS_PORT, PAGE_PORT = 29400, 29500, 9400, 8080
"""Where the containers listen; the metrics and the page as the documents of both have it."""

STATE, KEYS, CONFIG = "/var/lib/dips", "/etc/dips/keys", "/etc/dips/config"
"""Folders in the containers: the volume, the process's own keys, its settings."""

NODE_PORTS = range(30000, 32768)
"""What Kubernetes gives out unless its administrator says otherwise."""

OURS = {
    "master": ("run_id", "directory", "listen", "slaves", "keys", "insecure", "metrics_listen", "page_listen"),
    "slave": (
        *("run_id", "slave_id", "directory", "master", "keys", "insecure", "memory_bytes", "metrics_listen"),
        *("data_host", "data_port", "advertise"),
    ),
    "worker": ("run_id", "cluster_id", "master", "keys", "insecure", "checkpoint_dir", "metrics_listen"),
    "train": (),
}
"""Settings that follow from the file's other tables, by role."""

K = TypeVar("K", bound=Knobs)


@dataclass(frozen=True)
class Deployment:
    """A deployment, from a checked file.

    server_site: where the servers go, and why in a sentence; sizes: of pods and volumes.
    leaving_s: how long a cluster may take to leave.
    """

    file: Path
    run: DeployKnobs
    model: ModelKnobs
    tables: Mapping[str, Mapping[str, Any]]
    sites: tuple[SiteKnobs, ...]
    clusters: tuple[DeployedClusterKnobs, ...]
    server_site: SiteKnobs
    why_there: str
    sizes: PodSizes
    leaving_s: float

    @property
    def name(self) -> str:
        return self.run.run_id

    @property
    def slave_ids(self) -> tuple[str, ...]:
        return tuple(f"s{index}" for index in range(self.run.slaves))

    @property
    def master_address(self) -> str:
        """HOST:PORT at which all outside the servers' pods reach the master."""
        return f"{self._host('master')}:{self.run.outside_master_port}"

    @property
    def master_inside(self) -> str:
        """HOST:PORT at which the slaves and the supervisor reach the master, in its own namespace."""
        return f"{self.name}-master:{CONTROL_PORT}"

    def slave_address(self, index: int) -> str:
        """HOST:PORT at which clusters and other slaves reach the data port of slave `index`."""
        step = index if self.run.expose == "node-port" else 0
        return f"{self._host(f'slave-{index}')}:{self.run.outside_data_port + step}"

    def site(self, name: str) -> SiteKnobs:
        return next(site for site in self.sites if site.name == name)

    def _host(self, name: str) -> str:
        if self.run.expose == "inside":
            middle = "" if name == "master" else f".{self.name}-slave"
            return f"{self.name}-{name}{middle}.{self.run.namespace}.svc"
        return self.server_site.address.replace("{name}", name)


def read_deploy_file(file: Path) -> Deployment:
    """The deployment that a file describes. Raises ConfigError naming file, table, key and remedy."""
    tables = read_tables(file, TABLES)
    run = load_table(DeployKnobs, _table(file, tables, "deploy"), f"{file} [deploy]")
    model = load_table(ModelKnobs, _table(file, tables, "model"), f"{file} [model]")
    sites = _rows(SiteKnobs, file, tables, "sites")
    clusters = _rows(DeployedClusterKnobs, file, tables, "clusters")
    roles = {name: _role_table(file, tables, name) for name in OURS}
    _check_names(file, run, sites, clusters)
    server_site, why = _server_site(file, run, sites, clusters)
    _check_reach(file, run, sites, clusters, server_site)
    _check_clusters(file, sites, clusters)
    master = _master(file, run, roles["master"], len(clusters))
    slave = _slave(file, run, roles["slave"])
    client = _worker(file, roles)
    sizes = sizes_for(run, model, master, slave, len(clusters), f"{file} [deploy]")
    leaves_s = leaving_s(client, master)
    return Deployment(file, run, model, roles, sites, clusters, server_site, why, sizes, leaves_s)


def _table(file: Path, tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name!r} is not a table: write its settings below a line [{name}]")
    return table


def _rows(kind: type[K], file: Path, tables: Mapping[str, Any], name: str) -> tuple[K, ...]:
    rows = tables.get(name, [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{file}: there is no table [[{name}]]: write one for each of the {name}")
    return tuple(load_table(kind, row, f"{file} [[{name}]] {n}") for n, row in enumerate(rows, 1))


def _role_table(file: Path, tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = _table(file, tables, name)
    wrong = [key for key in table if key in OURS[name]]
    if wrong:
        raise ConfigError(
            f"{file} [{name}]: {wrong[0]!r} does not belong here: it follows from [deploy] and [[sites]]; leave it out"
        )
    return table


# ---- names ----


def _check_names(
    file: Path, run: DeployKnobs, sites: tuple[SiteKnobs, ...], clusters: tuple[DeployedClusterKnobs, ...]
) -> None:
    _check_once(file, "[[sites]]", "name", [site.name for site in sites])
    _check_once(file, "[[clusters]]", "id", [cluster.id for cluster in clusters])
    taken = {"master", "supervisor", "operator", *(f"s{index}" for index in range(run.slaves))}
    for cluster in clusters:
        if cluster.id in taken:
            raise ConfigError(f"{file}: the cluster id {cluster.id!r} is the name of another process: choose another")
        if cluster.site not in {site.name for site in sites}:
            known = ", ".join(site.name for site in sites)
            raise ConfigError(f"{file} [[clusters]] {cluster.id}: site {cluster.site!r} is none of {known}")


def _check_once(file: Path, table: str, key: str, names: list[str]) -> None:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ConfigError(f"{file} {table}: two have the {key} {doubles[0]!r}: give each its own")


# ---- where the servers are ----


def _server_site(
    file: Path, run: DeployKnobs, sites: tuple[SiteKnobs, ...], clusters: tuple[DeployedClusterKnobs, ...]
) -> tuple[SiteKnobs, str]:
    if run.placement != AUTO:
        named = [site for site in sites if site.name == run.placement]
        if not named:
            known = ", ".join((AUTO, *(site.name for site in sites)))
            raise ConfigError(f"{file} [deploy]: placement = {run.placement!r} is none of {known}")
        _require_context(file, named[0])
        return named[0], f"the file says so (placement = {run.placement!r})"
    return _best_site(file, sites, clusters)


def _best_site(
    file: Path, sites: tuple[SiteKnobs, ...], clusters: tuple[DeployedClusterKnobs, ...]
) -> tuple[SiteKnobs, str]:
    """argmax_i B_i^T p over the sites that have a context and list their links."""
    able = [site for site in sites if site.context and site.bandwidth_gbps]
    if not able:
        raise ConfigError(
            f"{file} [deploy]: placement = {AUTO!r} needs a site with a context and bandwidth_gbps: add them to "
            "[[sites]], or name the site of the servers"
        )
    for site in able:
        if len(site.bandwidth_gbps) != len(clusters):
            raise ConfigError(
                f"{file} [[sites]] {site.name}: bandwidth_gbps has {len(site.bandwidth_gbps)} numbers for "
                f"{len(clusters)} clusters: give one for each of [[clusters]], in their order"
            )
    silent = [cluster.id for cluster in clusters if not cluster.tokens_per_s]
    if silent:
        raise ConfigError(
            f"{file} [[clusters]] {silent[0]}: placement = {AUTO!r} needs tokens_per_s, how fast it trains: add it, or "
            "name the site of the servers"
        )
    table = Sites(
        tuple(site.name for site in able),
        tuple(cluster.id for cluster in clusters),
        tuple(site.bandwidth_gbps for site in able),
        tuple(cluster.tokens_per_s for cluster in clusters),
    )
    return able[table.choice().index], table.explain().splitlines()[-1]


def _require_context(file: Path, site: SiteKnobs) -> None:
    if not site.context:
        raise ConfigError(f"{file} [[sites]] {site.name}: the servers need Kubernetes: give its context")


# ---- how the servers are reached ----


def _check_reach(
    file: Path,
    run: DeployKnobs,
    sites: tuple[SiteKnobs, ...],
    clusters: tuple[DeployedClusterKnobs, ...],
    server_site: SiteKnobs,
) -> None:
    if run.expose == "inside":
        away = [c.id for c in clusters if _site_of(sites, c).context != server_site.context]
        if away:
            raise ConfigError(
                f"{file} [deploy]: expose = 'inside' reaches the context {server_site.context!r} alone, and cluster "
                f"{away[0]!r} is elsewhere: choose 'load-balancer' or 'node-port'"
            )
        return
    where = f"{file} [[sites]] {server_site.name}"
    if not server_site.address:
        raise ConfigError(f"{where}: the servers go here: give address, the host at which clusters reach them")
    parse_address(f"{server_site.address.replace('{name}', 'master')}:1", f"{where} address")
    if run.expose == "load-balancer" and "{name}" not in server_site.address:
        raise ConfigError(
            f"{where}: address = {server_site.address!r}: every load balancer has an address of its own: write "
            "'{name}', as in '{name}.dips.example.org'"
        )
    if run.expose == "node-port":
        _check_node_ports(file, run)


def _check_node_ports(file: Path, run: DeployKnobs) -> None:
    ports = [run.outside_master_port, *(run.outside_data_port + index for index in range(run.slaves))]
    wrong = [port for port in ports if port not in NODE_PORTS]
    if wrong:
        raise ConfigError(
            f"{file} [deploy]: port {wrong[0]} cannot be a node port: choose master_port and data_port so that all of "
            f"{len(ports)} are within {NODE_PORTS.start} to {NODE_PORTS.stop - 1}"
        )
    if len(set(ports)) < len(ports):
        raise ConfigError(
            f"{file} [deploy]: master_port {run.outside_master_port} is taken by a slave, whose ports are "
            f"{ports[1]} to {ports[-1]}: choose another"
        )


def _site_of(sites: Iterable[SiteKnobs], cluster: DeployedClusterKnobs) -> SiteKnobs:
    return next(site for site in sites if site.name == cluster.site)


# ---- clusters and roles ----


def _check_clusters(file: Path, sites: tuple[SiteKnobs, ...], clusters: tuple[DeployedClusterKnobs, ...]) -> None:
    for site in sites:
        for cidr in site.cidrs:
            _check_cidr(f"{file} [[sites]] {site.name}", cidr)
        if any(not math.isfinite(number) or number < 0 for number in site.bandwidth_gbps):
            raise ConfigError(f"{file} [[sites]] {site.name}: bandwidth_gbps has a number that is not a rate")
    for cluster in clusters:
        where, site = f"{file} [[clusters]] {cluster.id}", _site_of(sites, cluster)
        if cluster.starts in ("job", "jobset") and not site.context:
            raise ConfigError(
                f"{where}: site {site.name!r} has no context: set starts = 'slurm' or 'command', or give the site one"
            )
        if cluster.nodes > 1 and not cluster.command:
            raise ConfigError(f"{where}: `dips train` uses one node: give your own command, or nodes = 1")
        if cluster.torchrun and not cluster.command:
            raise ConfigError(f"{where}: torchrun needs a command of yours: give the script and its arguments")


def _check_cidr(where: str, cidr: str) -> None:
    try:
        ipaddress.ip_network(cidr)
    except ValueError as error:
        raise ConfigError(f"{where}: cidrs has {cidr!r}, which is no network ({error}): write 192.0.2.0/24") from error


def _master(file: Path, run: DeployKnobs, table: Mapping[str, Any], n_clusters: int) -> MasterConfig:
    ours = {"run_id": run.run_id, "directory": STATE, "slaves": run.slaves, "keys": KEYS}
    master = load_table(MasterConfig, {**table, **ours}, f"{file} [master]")
    if n_clusters > master.max_clusters:
        raise ConfigError(
            f"{file} lists {n_clusters} clusters, but [master] max_clusters is {master.max_clusters}: raise it"
        )
    return master


def _slave(file: Path, run: DeployKnobs, table: Mapping[str, Any]) -> SlaveConfig:
    ours = {"run_id": run.run_id, "slave_id": "s0", "directory": STATE, "keys": KEYS}
    return load_table(SlaveConfig, {**table, **ours}, f"{file} [slave]")


def _worker(file: Path, roles: Mapping[str, Mapping[str, Any]]) -> ClientConfig:
    client = load_table(ClientConfig, {**roles["worker"]}, f"{file} [worker]")
    if roles["train"]:
        from dips.trainer.config import TrainConfig

        load_table(TrainConfig, {**roles["train"]}, f"{file} [train]")
    return client
