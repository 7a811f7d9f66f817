"""Reads the file of `dips deploy`: sites, contexts, servers and clusters, checked before any request is sent.

[deploy] says where and as whom, [model] how large, [master], [slave], [worker] and [train] are the settings of the
roles as in the file of `dips up`, each [[sites]] is a place with or without Kubernetes, each [[clusters]] a training
cluster. It must find every mistake that can be found without a request.
"""

from __future__ import annotations

import ipaddress
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dips.core.config import Knobs, SettingsFile, check_unique, load_table
from dips.core.errors import ConfigError
from dips.core.net.addresses import MAX_PORT, parse_address
from dips.core.protocol import MAX_RANKS
from dips.core.server_site import Sites
from dips.core.units import Bytes, Count, format_bytes, format_count
from dips.local.processes import check_servers, leaving_s
from dips.local.sizing import SizeTable, size_of_run
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.trainer.parallelism import Parallelism
from dips.worker.config import ClientConfig

# ---- deploy knobs ----------------------------------------------------------------------------------------------------
#
# The tables of a deployment file, each with a description for every key.


def _matching(pattern: str, sentence: str) -> AfterValidator:
    """Refuses a text that is not of this form, with the sentence after it."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} {sentence}")
        return value

    return AfterValidator(check)


Label = Annotated[
    str,
    _matching(
        "[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?",
        "cannot name objects of Kubernetes: use 1 to 40 of a-z, 0-9 and '-', beginning with a letter",
    ),
]
"""A name that Kubernetes takes for objects, with room for what is added to it."""

Images = Annotated[
    str,
    _matching("[A-Za-z0-9][A-Za-z0-9.:/_-]*", "is not a registry and path, such as registry.example.org/dips"),
    AfterValidator(lambda value: value.rstrip("/")),
]
_LABEL_WORD = "[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelPair = Annotated[
    str,
    _matching(
        f"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_WORD}=(?:{_LABEL_WORD})?",
        "is not a label of Kubernetes with its value: write 'key=value', such as 'release=kube-prometheus-stack'",
    ),
]
Pair = Annotated[str, _matching("[^=\\s]+=.*", "is not 'key=value'")]
"""One entry of a list that Kubernetes has as a table."""


def pairs(entries: Iterable[str]) -> dict[str, str]:
    """A list of 'key=value' as a table."""
    return dict(entry.split("=", 1) for entry in entries)


Digest = Annotated[
    str,
    _matching(
        "(?:master|slave|worker)=sha256:[0-9a-f]{64}", "is not ROLE=sha256:…, with the role master, slave or worker"
    ),
]
Tag = Annotated[str, _matching("[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}", "is not a tag of an image, such as 0.1.0")]


class DeployKnobs(Knobs):
    """The table [deploy]."""

    run_id: Label = Field(description="Name of the run; the names of all objects begin with it")
    namespace: Label = Field("dips", description="Namespace of the objects, in every context")
    images: Images = Field(description="Registry and path of the images dips-master, dips-slave and dips-worker")
    tag: Tag = Field(description="Tag of the images")
    digests: tuple[Digest, ...] = Field(
        (), description="Digests of the images, each as 'ROLE=sha256:…': what is pulled, whatever the tag names later"
    )
    pull_secret: str = Field("", description="Secret of the namespace with which images are pulled; empty: none")
    keys: Path = Field(description="Folder that `dips keys` made; of it each process gets its own identity only")
    placement: str = Field("auto", description="Site of the servers; auto: the one whose links serve the training best")
    standby: str = Field(
        "", description="Site of a standby for the master: the servers' own or another one; empty: no standby"
    )
    take_overs: int = Field(
        0,
        ge=0,
        le=1000,
        description="How often a standby took over; after an odd number the first master is the standby",
    )
    lease_secret: str = Field(
        "", description="Secret with ca.crt, tls.crt and tls.key, by which [master] lease opens etcd; empty: none"
    )
    slaves: int = Field(ge=1, le=64, description="How many slaves; a running run is changed by `dips deploy scale`")
    master_cpus: float = Field(1, gt=0, le=1024, description="Processors that the master asks for")
    slave_cpus: float = Field(4, gt=0, le=1024, description="Processors that a slave asks for")
    small_pod_cpus: float = Field(
        0.05, gt=0, le=1024, description="Processors for the supervisor, and for each pod that `dips deploy move` needs"
    )
    small_pod_memory: Bytes = Field(
        192 << 20, ge=64 << 20, description="Memory of each of these pods; the supervisor takes about 110 MiB"
    )
    expose: Literal["load-balancer", "node-port", "inside"] = Field(
        "load-balancer",
        description="How clusters reach the servers from other places; inside: they are in the same one",
    )
    master_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the master there (29400; node-port: 30400)"
    )
    standby_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the standby at its site (the master's; node-port: 30401)"
    )
    data_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the slaves there (29500); node-port: of the first one (30500)"
    )
    load_balancer_annotations: tuple[Pair, ...] = Field(
        (), description="Annotations of the load balancers' Services, each as 'key=value', as your cloud has them"
    )
    ip_family: Literal["ipv4", "ipv6"] = Field(
        "ipv4", description="Where pods listen: on 0.0.0.0; or on [::], which clusters with IPv6 alone need"
    )
    server_node_selector: tuple[LabelPair, ...] = Field(
        (), description="Labels that nodes of master, slaves and supervisor must have, each as 'key=value'"
    )
    server_tolerate: tuple[str, ...] = Field(
        (), description="Taints of nodes that do not matter to master, slaves and supervisor, by their keys"
    )
    server_priority_class: str = Field(
        "", description="Priority class of master, slaves and supervisor; empty: the context's default"
    )
    storage_class: str = Field("", description="Storage class of all volumes; empty: the context's default")
    master_volume: Bytes = Field(0, description="Size of the master's volume; 0: by the formula")
    slave_volume: Bytes = Field(0, description="Size of each slave's volume; 0: by the formula")
    spread: Literal["required", "preferred"] = Field(
        "required", description="Whether two slaves must not be on one node, or rather should not"
    )
    prometheus_namespace: Label = Field("monitoring", description="Namespace from which metrics may be read")
    service_monitor: bool = Field(
        True,
        description="Make ServiceMonitors of master and slaves, and a PodMonitor of each cluster; needs the Prometheus "
        "operator",
    )
    monitor_labels: tuple[LabelPair, ...] = Field(
        (), description="Labels of these monitors, by which a Prometheus selects them, each as 'key=value'"
    )

    @property
    def outside_master_port(self) -> int:
        return self.master_port or (30400 if self.expose == "node-port" else 29400)

    @property
    def outside_standby_port(self) -> int:
        return self.standby_port or (30401 if self.expose == "node-port" else self.outside_master_port)

    @property
    def outside_data_port(self) -> int:
        return self.data_port or (30500 if self.expose == "node-port" else 29500)

    def image(self, role: str) -> str:
        digest = pairs(self.digests).get(role)
        return f"{self.images}/dips-{role}:{self.tag}" + (f"@{digest}" if digest else "")

    @property
    def every_address(self) -> str:
        """The host on which pods listen, as it is before a port."""
        return "[::]" if self.ip_family == "ipv6" else "0.0.0.0"


class ModelKnobs(Knobs):
    """The table [model]."""

    parameters: Annotated[Count, Field(ge=1)] = Field(description="Parameters of the model, such as '7B'")


class SiteKnobs(Knobs):
    """A table [[sites]]."""

    name: Label = Field(description="Name of the place")
    context: str = Field("", description="Context of the kubeconfig; empty: no Kubernetes here")
    address: str = Field(
        "", description="Host at which servers of this site are reached; {name}: master, slave-0, slave-1, ..."
    )
    cidrs: tuple[str, ...] = Field(
        (), description="Networks from which this site's clusters come, for the servers' network policies"
    )
    bandwidth_gbps: tuple[float, ...] = Field(
        (), description="From servers here to each of the clusters, in their order; for placement = 'auto'"
    )
    service_monitor: bool | None = Field(
        None, description="Whether monitors are made here, of what is at this site; not given: as [deploy] says"
    )


class DeployedClusterKnobs(Knobs):
    """A table [[clusters]]."""

    id: Label = Field(description="Name of the cluster")
    site: str = Field(description="Where it trains: the name of a site")
    tokens_per_s: float = Field(0.0, ge=0, description="How fast it trains; for placement = 'auto'")
    starts: Literal["job", "jobset", "slurm", "command"] = Field(
        "job", description="What starts it: a Job, a JobSet, a script for Slurm, or a command for a shell"
    )
    nodes: int = Field(1, ge=1, le=4096, description="Nodes, one process (or torchrun) on each")
    cpus: float = Field(4, gt=0, description="Processors on each node")
    memory: Bytes = Field(8 << 30, ge=1 << 28, description="Memory on each node")
    gpus: int = Field(0, ge=0, le=64, description="Accelerators on each node")
    gpu_resource: str = Field("nvidia.com/gpu", description="Name of the accelerators as a resource of Kubernetes")
    command: tuple[str, ...] = Field((), description="Your own program and its arguments, instead of `dips train`")
    image: str = Field("", description="Image with your program; empty: dips-worker")
    torchrun: bool = Field(False, description="Start the command by torchrun, `processes` of them on each node")
    processes: int = Field(
        0,
        ge=0,
        le=MAX_RANKS,
        description="With torchrun: processes on each node, the cluster's ranks; 0: one for each accelerator, else one",
    )
    parallel: str = Field(
        "",
        description="How the ranks of `dips train` share the model and its batches, as its --parallel: 'fsdp=2'; "
        "torchrun starts them, divided among the nodes",
    )
    restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="With torchrun: times that a node starts its processes again before it is itself replaced",
    )
    queue: Annotated[str, Field(max_length=63)] = Field("", description="Local queue of Kueue; empty: none")
    data_claim: str = Field("", description="A PersistentVolumeClaim that is there, mounted at /data for reading")
    checkpoint_volume: Bytes = Field(0, description="Size of a volume for checkpoints; 0: none")
    checkpoint_access: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        "ReadWriteOnce", description="How the checkpoints' volume may be mounted; several nodes need ReadWriteMany"
    )
    shm: Bytes | None = Field(
        None,
        description="Size of /dev/shm, a part of memory; not given: an eighth of memory on nodes with accelerators and "
        "in clusters of several ranks, else what the container runtime gives (64 MiB)",
    )
    resources: tuple[Pair, ...] = Field(
        (), description="More resources of each node, each as 'key=value', such as 'rdma/hca=1'"
    )
    host_network: bool = Field(
        False, description="Pods have the network of their node, as some RDMA needs; needs a privileged namespace"
    )
    env: tuple[Pair, ...] = Field((), description="Variables of the environment, each as 'NAME=value'")
    volumes: tuple[str, ...] = Field(
        (), description="PersistentVolumeClaims that are there, each as 'CLAIM=/path', or 'CLAIM=/path:ro' for reading"
    )
    egress: tuple[str, ...] = Field(
        (),
        description="What pods may connect to in addition to the run, each as 'NETWORK:PORT', or 'anywhere:PORT': an "
        "object store, a hub",
    )
    priority_class: str = Field("", description="Priority class of the pods; empty: the context's default")
    node_selector: tuple[LabelPair, ...] = Field((), description="Labels that nodes must have, each as 'key=value'")
    tolerate: tuple[str, ...] = Field((), description="Taints of nodes that do not matter, by their keys")
    partition: str = Field("", description="With slurm: the partition")

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun starts the processes."""
        return self.torchrun or bool(self.parallel)

    @property
    def node_ranks(self) -> int:
        """Processes on each node."""
        if self.parallel:
            return Parallelism.parse(self.parallel).n_ranks // self.nodes
        return (self.processes or self.gpus or 1) if self.torchrun else 1

    @property
    def ranks(self) -> int:
        """Processes of the cluster, each of which pushes and pulls its share of the model."""
        return self.nodes * self.node_ranks

    @property
    def on_kubernetes(self) -> bool:
        return self.starts in ("job", "jobset")

    @property
    def shm_bytes(self) -> int:
        """Of the volume at /dev/shm; 0: none. NCCL and the loaders of PyTorch share data between processes there."""
        if self.shm is not None:
            return self.shm
        return self.memory // SHM_PART if self.gpus or self.ranks > 1 else 0

    @property
    def mounts(self) -> tuple[ClaimMount, ...]:
        """The entries of volumes. Raises ValueError for one of another form."""
        return tuple(ClaimMount.parse(entry) for entry in self.volumes)

    @property
    def destinations(self) -> tuple[tuple[str, int], ...]:
        """The entries of egress: networks, empty for all, and ports. Raises ValueError for one of another form."""
        return tuple(_destination(entry) for entry in self.egress)


SHM_PART = 8
"""Of the memory: a loader's batches and NCCL's buffers fit, and it is far from all that the pod has. It is a bound, not
set aside: only pages that are written count as the pod's memory."""


@dataclass(frozen=True)
class ClaimMount:
    """A PersistentVolumeClaim and where it is mounted."""

    claim: str
    path: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> ClaimMount:
        """Reads 'CLAIM=/path[:ro]'. Raises ValueError."""
        claim, equals, place = text.partition("=")
        path, _, mode = place.partition(":")
        if not (equals and re.fullmatch("[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?", claim) and path.startswith("/")):
            raise ValueError(f"{text!r} is not CLAIM=/path")
        if mode not in ("", "ro"):
            raise ValueError(f"{text!r} ends with {mode!r}: write CLAIM=/path:ro, or CLAIM=/path")
        return cls(claim, posixpath.normpath(path), mode == "ro")


def _destination(text: str) -> tuple[str, int]:
    network, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= MAX_PORT):
        raise ValueError(f"{text!r} does not end with a port, as in '192.0.2.0/24:443'")
    if network == ANY_NETWORK:
        return "", int(port)
    try:
        return str(ipaddress.ip_network(network.removeprefix("[").removesuffix("]"))), int(port)
    except ValueError as error:
        raise ValueError(
            f"{text!r} names no network ({error}): write 192.0.2.0/24:443, 2001:db8::/32:443 or {ANY_NETWORK}:443; "
            "policies of Kubernetes know no host names"
        ) from error


ANY_NETWORK = "anywhere"


# ---- sizes -----------------------------------------------------------------------------------------------------------
#
# Computes the sizes of pods and volumes by the formulas of `dips size`, and writes them as Kubernetes does.
#
# Pure. A volume that was asked for and is too small is refused here, before anything is made: a slave would refuse the
# model only when a cluster joins.


MIB = 1 << 20
TAPE_ROOM_BYTES = 2 << 30
"""In addition to the journal or the snapshots, for the process's tape: some KB for each round and push
(docs/capacity.md). More than DipsDiskLow asks for: a new volume of a size that was computed raises no alarm.
"""

_IRRELEVANT_LINK = "1gbps"
"""No size of memory or disk depends on the link; `dips size` shows times."""


@dataclass(frozen=True)
class PodSizes:
    """Sizes of pods and volumes in bytes.

    slave_memory is the setting memory_bytes; *_process what a pod asks for; *_volume of its volume; slave_least: enough
    for a volume that is there already.
    """

    slave_memory_bytes: int
    slave_process_bytes: int
    slave_volume_bytes: int
    slave_least_bytes: int
    master_process_bytes: int
    master_volume_bytes: int
    node_bytes: Mapping[str, int]  # of a node of each cluster, by its id: what Di-PS takes in addition to the training

    def explain(self) -> list[str]:
        """For a person, one line each."""
        setting, pod, volume = self.slave_memory_bytes, self.slave_process_bytes, self.slave_volume_bytes
        return [
            f"slave: memory_bytes {format_bytes(setting)}, pod {format_bytes(pod)}, volume {format_bytes(volume)}",
            f"master: pod {format_bytes(self.master_process_bytes)}, volume {format_bytes(self.master_volume_bytes)}",
        ]


def sizes_for(
    run: DeployKnobs,
    model: ModelKnobs,
    master: MasterConfig,
    slave: SlaveConfig,
    client: ClientConfig,
    clusters: Sequence[DeployedClusterKnobs],
    where: str,
) -> PodSizes:
    """The sizes of a deployment. Raises ConfigError, which begins with `where`, for a volume below its formula."""

    def of_ranks(ranks: int) -> SizeTable:
        return size_of_run(
            master,
            slave,
            params=model.parameters,
            clusters=len(clusters),
            slaves=run.slaves,
            ranks=ranks,
            link=_IRRELEVANT_LINK,
            wire=client.wire_dtype,
            overlap=master.overlap,
            max_clusters=master.max_clusters,
        )

    table = of_ranks(max(cluster.ranks for cluster in clusters))
    of_slave = _rounded(table.whole("slave_volume_bytes"))
    of_master = _rounded(table.whole("master_disk_bytes") + TAPE_ROOM_BYTES)
    for of, given, needed in (("slave", run.slave_volume, of_slave), ("master", run.master_volume, of_master)):
        if given and given < needed:
            raise ConfigError(
                f"{where}: {of}_volume = {format_bytes(given)} is too small: {format_count(model.parameters)} "
                f"parameters on {run.slaves} slaves need {quantity(needed)}: give that, or leave it out; `dips size` "
                "has the formula"
            )
    return PodSizes(
        _rounded(table.whole("slave_memory_bytes")),
        _rounded(table.whole("slave_process_bytes")),
        run.slave_volume or of_slave + TAPE_ROOM_BYTES,
        run.slave_volume or of_slave,
        _rounded(table.whole("master_memory_bytes")),
        run.master_volume or of_master,
        {
            # Each rank has its own share; one process alone has all of the model.
            cluster.id: cluster.node_ranks
            * of_ranks(cluster.ranks).whole("rank_memory_most_bytes" if cluster.ranks > 1 else "cluster_memory_bytes")
            for cluster in clusters
        },
    )


def quantity(n_bytes: int) -> str:
    """A size as Kubernetes itself writes it, so that what it gives back compares equal; rounded up to whole MiB."""
    amount, unit = -(-n_bytes // MIB), 0
    while amount % 1024 == 0 and unit < 3:
        amount, unit = amount // 1024, unit + 1
    return f"{amount}{('Mi', 'Gi', 'Ti', 'Pi')[unit]}"


def bytes_of(quantity: str) -> int:
    """What quantity() was given, in whole MiB."""
    return int(quantity[:-2]) * MIB << 10 * ("Mi", "Gi", "Ti", "Pi").index(quantity[-2:])


def processors_of(cpus: str) -> float:
    """What processors() was given."""
    return int(cpus[:-1]) / 1000 if cpus.endswith("m") else int(cpus)


def canonical(amount: str) -> str:
    """An amount of `resources` as Kubernetes itself writes it."""
    units = {"Mi": 20, "Gi": 30, "Ti": 40}
    return quantity(int(amount[:-2]) << units[amount[-2:]]) if amount[-2:] in units else amount


def processors(cpus: float) -> str:
    """Processors as Kubernetes itself writes them: whole ones, or thousandths."""
    thousandths = round(cpus * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // MIB) * MIB


# ---- deploy file -----------------------------------------------------------------------------------------------------


TABLES = ("deploy", "model", "sites", "clusters", "master", "slave", "worker", "train")
AUTO = "auto"
CONTROL_PORT, DATA_PORT, METRICS_PORT, PAGE_PORT = 29400, 29500, 9400, 8080
"""Where the containers listen; the metrics and the page as the documents of both have it."""

STATE, KEYS, CONFIG = "/var/lib/dips", "/etc/dips/keys", "/etc/dips/config"
"""Folders in the containers: the volume, the process's own keys, its settings."""

FOUND_BY = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "dips-cluster")
"""Labels by which `dips deploy` finds what it made."""

NODE_PORTS = range(30000, 32768)
"""What Kubernetes gives out unless its administrator says otherwise."""

OURS = {
    "master": (
        *("run_id", "directory", "listen", "slaves", "keys", "insecure", "metrics_listen", "page_listen"),
        *("standby", "take_over"),
    ),
    "slave": (
        *("run_id", "slave_id", "directory", "master", "keys", "insecure", "memory_bytes", "metrics_listen"),
        *("data_host", "data_port", "advertise"),
    ),
    "worker": ("run_id", "cluster_id", "master", "keys", "insecure", "checkpoint_dir", "metrics_listen"),
    "train": ("parallel",),
}
"""Settings that follow from the file's other tables, by role."""


@dataclass(frozen=True)
class MasterPlace:
    """One of the two processes that can serve the run, whichever of them does."""

    component: str  # "master", which began the run, or "standby"
    site: SiteKnobs
    address: str  # HOST:PORT at which all outside its namespace reach it
    inside: str  # in its namespace
    began: int  # the take-over after which it was made the standby of the other one; 0: as the run began

    @property
    def directory(self) -> str:
        """An empty one for each time that it becomes a standby: what it held as a master is kept."""
        return f"{STATE}/master" + (f"-{self.began}" if self.began else "")

    def seen_from(self, context: str) -> str:
        return self.inside if context == self.site.context else self.address


@dataclass(frozen=True)
class Deployment:
    """A deployment, from a checked file."""

    file: Path
    run: DeployKnobs
    model: ModelKnobs
    tables: Mapping[str, Mapping[str, Any]]
    sites: tuple[SiteKnobs, ...]
    clusters: tuple[DeployedClusterKnobs, ...]
    server_site: SiteKnobs  # where the servers go, and why in a sentence
    why_there: str
    sizes: PodSizes  # of pods and volumes
    leaving_s: float  # how long a cluster may take to leave

    @property
    def name(self) -> str:
        return self.run.run_id

    @property
    def slave_ids(self) -> tuple[str, ...]:
        return tuple(f"s{index}" for index in range(self.run.slaves))

    @property
    def masters(self) -> tuple[MasterPlace, ...]:
        """The first master and, if there is one, the standby, whichever of them serves."""
        run, n = self.run, self.run.take_overs
        places = [("master", self.server_site, run.outside_master_port, n - (n % 2 == 0))]
        if run.standby:
            places.append(("standby", self.site(run.standby), run.outside_standby_port, n - n % 2))
        return tuple(
            MasterPlace(
                name, site, f"{self._host(name, site)}:{port}", f"{self.name}-{name}:{CONTROL_PORT}", max(0, began)
            )
            for name, site, port, began in places
        )

    @property
    def standby(self) -> MasterPlace | None:
        """The one that follows the other now, as the file has it."""
        return self.masters[self.run.take_overs % 2 == 0] if self.run.standby else None

    @property
    def master_address(self) -> str:
        """HOST:PORT at which all outside the servers' pods reach the master, and with a comma that of its standby."""
        return ",".join(place.address for place in self.masters)

    @property
    def master_inside(self) -> str:
        """The same for the slaves and the supervisor, in their own namespace."""
        return ",".join(place.seen_from(self.server_site.context) for place in self.masters)

    @property
    def lease(self) -> tuple[str, str]:
        """Of [master] lease: the kind, and where it is. Empty: none."""
        kind, _, where = str(self.tables["master"].get("lease", "")).partition(":")
        return kind, where

    def slave_address(self, index: int) -> str:
        """HOST:PORT at which clusters and other slaves reach the data port of slave `index`."""
        step = index if self.run.expose == "node-port" else 0
        return f"{self._host(f'slave-{index}', self.server_site)}:{self.run.outside_data_port + step}"

    def monitored(self, site: SiteKnobs) -> bool:
        """Whether the Prometheus operator of this site is told what to scrape."""
        return self.run.service_monitor if site.service_monitor is None else site.service_monitor

    def site(self, name: str) -> SiteKnobs:
        return next(site for site in self.sites if site.name == name)

    def _host(self, name: str, site: SiteKnobs) -> str:
        if self.run.expose == "inside":
            middle = f".{self.name}-slave" if name.startswith("slave") else ""
            return f"{self.name}-{name}{middle}.{self.run.namespace}.svc"
        return site.address.replace("{name}", name)


def read_deploy_file(file: Path) -> Deployment:
    """The deployment that a file describes. Raises ConfigError naming file, table, key and remedy."""
    tables = SettingsFile.read(file, TABLES)
    run = tables.settings(DeployKnobs, "deploy")
    model = tables.settings(ModelKnobs, "model")
    sites = tables.settings_of_rows(SiteKnobs, "sites", required=True)
    clusters = tables.settings_of_rows(DeployedClusterKnobs, "clusters", required=True)
    roles = {name: tables.table(name) for name in OURS}
    for name, table in roles.items():
        if wrong := [key for key in table if key in OURS[name]]:
            raise ConfigError(
                f"{tables.where(name)}: {wrong[0]!r} does not belong here: it follows from [deploy], [[sites]] and "
                "[[clusters]]; leave it out"
            )
    _check_names(file, run, sites, clusters)
    if run.placement == AUTO:
        server_site, why = _best_site(file, sites, clusters)
    else:
        server_site = _named(file, "placement", run.placement, sites, (AUTO,))
        why = f"the file says so (placement = {run.placement!r})"
    server_sites = _server_sites(file, run, sites, server_site)
    for site in server_sites:
        _check_reach(file, run, sites, clusters, site)
    _check_lists(tables.where("deploy"), run)
    _check_clusters(file, sites, clusters)
    ours = {"run_id": run.run_id, "directory": STATE, "keys": KEYS}
    master = tables.settings(MasterConfig, "master", {**ours, "slaves": run.slaves})
    if len(clusters) > master.max_clusters:
        raise ConfigError(
            f"{file} lists {len(clusters)} clusters, but [master] max_clusters is {master.max_clusters}: raise it"
        )
    _check_lease(file, run, master, len({site.context for site in server_sites}))
    slave = tables.settings(SlaveConfig, "slave", {**ours, "slave_id": "s0"})
    check_servers(master, slave, str(file))
    client = tables.settings(ClientConfig, "worker")
    # [train] is that of every cluster that runs `dips train`; each has its own way to share the model.
    ways = {cluster.parallel for cluster in clusters if not cluster.command}
    if tables.table("train") or any(ways):
        from dips.trainer.config import TrainConfig

        for way in sorted(ways | {""}):
            tables.settings(TrainConfig, "train", {"parallel": way} if way else {})
    sizes = sizes_for(run, model, master, slave, client, clusters, tables.where("deploy"))
    leaves_s = leaving_s(client, master)
    return Deployment(file, run, model, roles, sites, clusters, server_site, why, sizes, leaves_s)


# ---- names ----


def _check_names(
    file: Path, run: DeployKnobs, sites: tuple[SiteKnobs, ...], clusters: tuple[DeployedClusterKnobs, ...]
) -> None:
    check_unique((site.name for site in sites), "name", f"{file} [[sites]]")
    check_unique((cluster.id for cluster in clusters), "id", f"{file} [[clusters]]")
    keys = [pair.partition("=")[0] for pair in run.monitor_labels]
    check_unique(keys, "key", f"{file} [deploy] monitor_labels")
    if ours := [key for key in keys if key in FOUND_BY]:
        raise ConfigError(
            f"{file} [deploy]: monitor_labels has {ours[0]!r}, by which `dips deploy` finds its own objects: leave it "
            "out, and let Prometheus select by another label"
        )
    taken = {"master", "supervisor", "prometheus", "operator", *(f"s{index}" for index in range(run.slaves))}
    for cluster in clusters:
        if cluster.id in taken:
            raise ConfigError(f"{file}: the cluster id {cluster.id!r} is the name of another process: choose another")
        if cluster.site not in {site.name for site in sites}:
            known = ", ".join(site.name for site in sites)
            raise ConfigError(f"{file} [[clusters]] {cluster.id}: site {cluster.site!r} is none of {known}")


# ---- where the servers are ----


def _named(file: Path, key: str, name: str, sites: tuple[SiteKnobs, ...], others: tuple[str, ...] = ()) -> SiteKnobs:
    """The site that a key of [deploy] names, where master or standby are to run."""
    found = next((site for site in sites if site.name == name), None)
    if found is None:
        known = ", ".join((*others, *(site.name for site in sites)))
        raise ConfigError(f"{file} [deploy]: {key} = {name!r} is none of {known}")
    if not found.context:
        raise ConfigError(f"{file} [[sites]] {name}: the servers need Kubernetes: give its context")
    return found


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
    table = load_table(
        Sites,
        {
            "names": [site.name for site in able],
            "clusters": [cluster.id for cluster in clusters],
            "bandwidth_gbps": [site.bandwidth_gbps for site in able],
            "tokens_per_s": [cluster.tokens_per_s for cluster in clusters],
        },
        f"{file} [[sites]]",
    )
    return able[table.choice().index], table.explain().splitlines()[-1]


# ---- how the servers are reached ----


def _server_sites(
    file: Path, run: DeployKnobs, sites: tuple[SiteKnobs, ...], server_site: SiteKnobs
) -> list[SiteKnobs]:
    """The servers' site, and that of the standby."""
    where = f"{file} [deploy]"
    if not run.standby:
        given = {"take_overs": run.take_overs % 2, "standby_port": run.standby_port, "lease_secret": run.lease_secret}
        for key in (key for key, value in given.items() if value):
            raise ConfigError(f"{where}: {key} needs a standby: name its site as standby, or leave {key} out")
        return [server_site]
    site = _named(file, "standby", run.standby, sites)
    if run.expose == "inside" and site.context != server_site.context:
        raise ConfigError(
            f"{where}: expose = 'inside' reaches the context {server_site.context!r} alone, and the standby is "
            "elsewhere: choose 'load-balancer' or 'node-port'"
        )
    return [server_site] if site is server_site else [server_site, site]


def _check_lease(file: Path, run: DeployKnobs, master: MasterConfig, contexts: int) -> None:
    """Settings of [master] that are of a standby."""
    kind, _, where = (master.lease or "").partition(":")
    if not run.standby and (kind or master.without_replica == "pause" or master.journal_replicas):
        raise ConfigError(
            f"{file} [master]: lease, journal_replicas and without_replica are for a master with a standby: name its "
            "site as [deploy] standby, or leave them out"
        )
    if (
        master.without_replica == "pause"
        and "journal_replicas" in master.model_fields_set
        and not master.journal_replicas
    ):
        raise ConfigError(
            f"{file} [master]: without_replica = 'pause' needs journal_replicas = 1: leave one of the two out"
        )
    if kind == "kubernetes" and not re.fullmatch(f"{re.escape(run.namespace)}/[a-z0-9]([a-z0-9.-]*[a-z0-9])?", where):
        raise ConfigError(
            f"{file} [master]: lease = {master.lease!r} is no Lease of the namespace {run.namespace!r}: give "
            f"kubernetes:{run.namespace}/{run.run_id}-master"
        )
    if kind == "kubernetes" and contexts > 1:
        raise ConfigError(
            f"{file} [master]: lease is in one Kubernetes cluster, and standby {run.standby!r} is in another one: give "
            "etcd:https://HOST:PORT, or leave lease out"
        )
    if run.lease_secret and kind != "etcd":
        raise ConfigError(f"{file} [deploy]: lease_secret is for a lease in etcd: leave it out")


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
        ports = [run.outside_master_port, *(run.outside_data_port + index for index in range(run.slaves))]
        if run.standby:
            ports.insert(1, run.outside_standby_port)
        wrong = [port for port in ports if port not in NODE_PORTS]
        if wrong:
            raise ConfigError(
                f"{file} [deploy]: port {wrong[0]} cannot be a node port: choose master_port and data_port so that all "
                f"of {len(ports)} are within {NODE_PORTS.start} to {NODE_PORTS.stop - 1}"
            )
        if len(set(ports)) < len(ports):
            raise ConfigError(
                f"{file} [deploy]: master_port {run.outside_master_port} is taken by a slave, whose ports are "
                f"{run.outside_data_port} to {ports[-1]}, or by the standby: choose another"
            )


HOST_ANNOTATION = "external-dns.alpha.kubernetes.io/hostname"


def _check_lists(where: str, run: DeployKnobs) -> None:
    """The lists of pairs: what would be twice, or is not used."""
    for name in ("digests", "load_balancer_annotations", "server_node_selector"):
        keys = [pair.partition("=")[0] for pair in getattr(run, name)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"{where}: {name} has {twice[0]} twice: leave one out")
    if run.load_balancer_annotations and run.expose != "load-balancer":
        raise ConfigError(
            f"{where}: load_balancer_annotations need expose = 'load-balancer', not {run.expose!r}: leave them out"
        )
    if any(pair.startswith(f"{HOST_ANNOTATION}=") for pair in run.load_balancer_annotations):
        raise ConfigError(f"{where}: {HOST_ANNOTATION} follows from the site's address: leave it out")


def _site_of(sites: Iterable[SiteKnobs], cluster: DeployedClusterKnobs) -> SiteKnobs:
    return next(site for site in sites if site.name == cluster.site)


# ---- clusters and roles ----


def _check_clusters(file: Path, sites: tuple[SiteKnobs, ...], clusters: tuple[DeployedClusterKnobs, ...]) -> None:
    for site in sites:
        for cidr in site.cidrs:
            try:
                ipaddress.ip_network(cidr)
            except ValueError as error:
                raise ConfigError(
                    f"{file} [[sites]] {site.name}: cidrs has {cidr!r}, which is no network ({error}): write "
                    "192.0.2.0/24"
                ) from error
        if any(not math.isfinite(number) or number < 0 for number in site.bandwidth_gbps):
            raise ConfigError(f"{file} [[sites]] {site.name}: bandwidth_gbps has a number that is not a rate")
    for cluster in clusters:
        where, site = f"{file} [[clusters]] {cluster.id}", _site_of(sites, cluster)
        if cluster.on_kubernetes and not site.context:
            raise ConfigError(
                f"{where}: site {site.name!r} has no context: set starts = 'slurm' or 'command', or give the site one"
            )
        if cluster.parallel:
            _check_parallel(cluster, where)
        elif cluster.nodes > 1 and not cluster.command:
            raise ConfigError(
                f"{where}: `dips train` uses one node unless its ranks share the model: give parallel, as in 'fsdp=2', "
                "your own command, or nodes = 1"
            )
        if cluster.processes and not cluster.torchrun:
            raise ConfigError(f"{where}: processes = {cluster.processes} needs torchrun = true, which starts them")
        if cluster.ranks > MAX_RANKS:
            raise ConfigError(
                f"{where}: {cluster.nodes} nodes of {cluster.node_ranks} processes are {cluster.ranks} ranks, and a "
                f"cluster has at most {MAX_RANKS}: make several clusters of it"
            )
        if cluster.torchrun and not cluster.command and not cluster.parallel:
            raise ConfigError(f"{where}: torchrun needs a command of yours: give the script and its arguments")
        _check_pods(cluster, where)


PODS_ONLY = ("shm", "resources", "host_network", "volumes", "egress", "priority_class")
OUR_VARIABLES = ("HOME", "NUMBA_CACHE_DIR", "JOB_COMPLETION_INDEX", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
OUR_PREFIX = "DIPS_"
"""Variables that pods have from here; those with the prefix are settings, which are in other tables of the file."""


def _check_pods(cluster: DeployedClusterKnobs, where: str) -> None:
    """What only pods have, and what would be twice in one."""
    given = [key for key in PODS_ONLY if key in cluster.model_fields_set]
    if given and not cluster.on_kubernetes:
        raise ConfigError(
            f"{where}: {given[0]} is for pods, and starts = {cluster.starts!r} has none: leave it out, and let the "
            "script's system do it"
        )
    try:
        mounts, _ = cluster.mounts, cluster.destinations
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if cluster.shm_bytes >= cluster.memory:
        raise ConfigError(
            f"{where}: shm = {format_bytes(cluster.shm_bytes)} is a part of memory, which is "
            f"{format_bytes(cluster.memory)}, and leaves nothing for the processes: give less, or more memory"
        )
    for name in (pair.partition("=")[0] for pair in cluster.env):
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{where}: env has {name!r}, which is no name of a variable: use letters, digits and '_'")
        if name in OUR_VARIABLES or name.startswith(OUR_PREFIX):
            remedy = "set it in [worker] or [train]" if name.startswith(OUR_PREFIX) else "leave it out"
            raise ConfigError(f"{where}: env has {name}, which `dips deploy` sets itself: {remedy}")
    ours = {"cpu": "cpus", "memory": "memory", **({cluster.gpu_resource: "gpus"} if cluster.gpus else {})}
    for name, _, amount in (pair.partition("=") for pair in cluster.resources):
        if name in ours:
            raise ConfigError(f"{where}: resources has {name!r}, which {ours[name]} gives: leave it out there")
        if not re.fullmatch("[1-9][0-9]*(?:[MGT]i)?", amount):
            raise ConfigError(
                f"{where}: resources has {name}={amount}, and an amount is a whole number, or one of Mi, Gi or Ti: "
                f"write {name}=1 or {name}=1Gi"
            )
    for what, names in (
        ("env", [pair.partition("=")[0] for pair in cluster.env]),
        ("resources", [pair.partition("=")[0] for pair in cluster.resources]),
        ("volumes", [mount.path for mount in mounts]),
    ):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{where}: {what} has {twice[0]} twice: leave one out")
    taken = [KEYS, CONFIG, "/tmp", "/dev/shm", *([STATE] if cluster.checkpoint_volume else [])]
    taken += ["/data"] if cluster.data_claim else []
    for mount in mounts:
        for path in taken:
            if posixpath.commonpath([mount.path, path]) in (mount.path, path):
                raise ConfigError(
                    f"{where}: volumes mounts {mount.claim} at {mount.path}, and {path} is taken in the pod: "
                    "choose another"
                )


def _check_parallel(cluster: DeployedClusterKnobs, where: str) -> None:
    try:
        n_ranks = Parallelism.parse(cluster.parallel).n_ranks
    except ConfigError as error:
        raise ConfigError(f"{where}: parallel: {error}") from error
    if cluster.command:
        raise ConfigError(f"{where}: parallel is for `dips train`: your own command decides by itself: leave it out")
    if cluster.processes or n_ranks % cluster.nodes:
        raise ConfigError(
            f"{where}: parallel = {cluster.parallel!r} is {n_ranks} processes on {cluster.nodes} nodes, as many on "
            "each: leave processes out, and give a number of nodes that divides them"
        )
