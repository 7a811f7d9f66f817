"""The tables of a deployment file, each with a description for every key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dips.core.config import Knobs
from dips.core.units import Bytes, Count

_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?\Z")
_IMAGES = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:/_-]*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}\Z")


def _label(value: str) -> str:
    """A name that Kubernetes takes for objects, with room for what is added to it."""
    if not _LABEL.match(value):
        raise ValueError(
            f"{value!r} cannot name objects of Kubernetes: use 1 to 40 of a-z, 0-9 and '-', beginning with a letter"
        )
    return value


def _images(value: str) -> str:
    if not _IMAGES.match(value):
        raise ValueError(f"{value!r} is not a registry and path, such as registry.example.org/dips")
    return value.rstrip("/")


def _tag(value: str) -> str:
    if not _TAG.match(value):
        raise ValueError(f"{value!r} is not a tag of an image, such as 0.1.0")
    return value


Label = Annotated[str, AfterValidator(_label)]


class DeployKnobs(Knobs):
    """The table [deploy]."""

    run_id: Label = Field(description="Name of the run; the names of all objects begin with it")
    namespace: Label = Field("dips", description="Namespace of the objects, in every context")
    images: Annotated[str, AfterValidator(_images)] = Field(
        description="Registry and path of the images dips-master, dips-slave and dips-worker"
    )
    tag: Annotated[str, AfterValidator(_tag)] = Field(description="Tag of the images")
    pull_secret: str = Field("", description="Secret of the namespace with which images are pulled; empty: none")
    keys: Path = Field(description="Folder that `dips keys` made; of it each process gets its own identity only")
    placement: str = Field("auto", description="Site of the servers; auto: the one whose links serve the training best")
    slaves: int = Field(ge=1, le=64, description="How many slaves; a running run is changed by `dips deploy scale`")
    slave_cpus: float = Field(4, gt=0, le=1024, description="Processors that a slave asks for")
    expose: Literal["load-balancer", "node-port", "inside"] = Field(
        "load-balancer",
        description="How clusters reach the servers from other places; inside: they are in the same one",
    )
    master_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the master there (29400; node-port: 30400)"
    )
    data_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the slaves there (29500); node-port: of the first one (30500)"
    )
    storage_class: str = Field("", description="Storage class of all volumes; empty: the context's default")
    master_volume: Bytes = Field(0, description="Size of the master's volume; 0: by the formula")
    slave_volume: Bytes = Field(0, description="Size of each slave's volume; 0: by the formula")
    spread: Literal["required", "preferred"] = Field(
        "required", description="Whether two slaves must not be on one node, or rather should not"
    )
    prometheus_namespace: Label = Field("monitoring", description="Namespace from which metrics may be read")
    service_monitor: bool = Field(True, description="Make a ServiceMonitor; needs the Prometheus operator")

    @property
    def outside_master_port(self) -> int:
        return self.master_port or (30400 if self.expose == "node-port" else 29400)

    @property
    def outside_data_port(self) -> int:
        return self.data_port or (30500 if self.expose == "node-port" else 29500)

    def image(self, role: str) -> str:
        return f"{self.images}/dips-{role}:{self.tag}"


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
    torchrun: bool = Field(False, description="Start the command by torchrun, one process for each accelerator")
    queue: Annotated[str, Field(max_length=63)] = Field("", description="Local queue of Kueue; empty: none")
    data_claim: str = Field("", description="A PersistentVolumeClaim that is there, mounted at /data for reading")
    checkpoint_volume: Bytes = Field(0, description="Size of a volume for checkpoints; 0: none")
    checkpoint_access: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        "ReadWriteOnce", description="How the checkpoints' volume may be mounted; several nodes need ReadWriteMany"
    )
    node_selector: tuple[str, ...] = Field((), description="Labels that nodes must have, each as 'key=value'")
    tolerate: tuple[str, ...] = Field((), description="Taints of nodes that do not matter, by their keys")
    partition: str = Field("", description="With slurm: the partition")
