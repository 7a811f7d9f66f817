"""A deployment whose API servers a test stands in for, and whose master is played."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.api_stand_in import StandIn, write_kubeconfig

from dips.cli.main import run
from dips.core.messages import ClusterStatus, SlaveStatus, StatusReply
from dips.deploy import rollout as plan
from dips.deploy.deploy_file import Deployment, read_deploy_file
from dips.deploy.kubernetes_api import KubernetesApi, open_context
from dips.deploy.operate import LiveDeployment
from dips.deploy.rollout import Rollout

APPLY = ("--yes", "--no-reach")


def deploy(*words: object) -> int:
    return run(["deploy", *map(str, words)])


@contextlib.contextmanager
def contexts(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[list[StandIn]]:
    """Stand-ins of API servers that are these contexts, in a kubeconfig of the folder that the environment names."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(StandIn()) for _ in names]
        write_kubeconfig(folder / "kubeconfig", {name: one.url for name, one in zip(names, found, strict=True)})
        monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
        yield found


@dataclass
class Master:
    slaves: list[str]
    clusters: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    moving: int = 0
    watch: Callable[[], object] = lambda: None
    address: str = ""

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def status(self) -> StatusReply:
        self.moving = max(0, self.moving - 1)
        slaves = tuple(SlaveStatus(name, alive=True) for name in self.slaves)
        clusters = tuple(ClusterStatus(name, alive=True) for name in self.clusters)
        words = "slave s0 has yet to list the shard" if self.moving else ""
        empty = StatusReply("small", 1, None, 0, 0, "IDLE", None, 0.0, 0.0, "")
        return replace(empty, slaves=slaves, clusters=clusters, reshard=words)

    def reshard(self, add: Sequence[str], remove: Sequence[str], reason: str) -> str:
        self.asked.append(f"add {','.join(add)} remove {','.join(remove)} with {self.watch()} pods")
        self.slaves = [name for name in [*self.slaves, *add] if name not in remove]
        self.moving = 3
        return "it is begun"

    def drain(self, cluster_id: str, reason: str) -> str:
        self.asked.append(f"drain {cluster_id}")
        self.clusters.remove(cluster_id)
        return "it may finish its push"


def opened(deployment: Deployment) -> tuple[dict[str, KubernetesApi], Rollout]:
    apis = {name: open_context(name, deployment.run.namespace) for name in plan.contexts(deployment)}
    seconds = iter(range(10**6))
    return apis, Rollout(apis, lambda words: None, 60.0, True, lambda pause_s: None, lambda: float(next(seconds)))


def site_of(file: Path, master: Master, dial: Callable[[str, int], None] = lambda host, port: None) -> LiveDeployment:
    deployment = read_deploy_file(file)
    apis, rollout = opened(deployment)
    return LiveDeployment(deployment, apis, rollout, lambda: contextlib.nullcontext(master), dial)
