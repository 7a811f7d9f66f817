"""The plan of a deployment: all objects of all contexts in the order of the rollout, and what changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dips.core.errors import ConfigError
from dips.deploy import identities
from dips.deploy.clusters import cluster_objects
from dips.deploy.compare import ObjectAction, Step, diff_lines, step_for
from dips.deploy.deploy_file import Deployment
from dips.deploy.deploy_knobs import DeployedClusterKnobs
from dips.deploy.objects import Object
from dips.deploy.servers import server_objects

WORKLOADS = ("StatefulSet", "Deployment", "Job", "JobSet")

Key = tuple[str, str, str]
"""Context, kind, name."""

Find = Callable[[str, Object], Object | None]
"""What is there of an object in a context; None when it is not there."""


@dataclass(frozen=True)
class RolloutStage:
    """A part of the rollout that is whole before the next begins. title: for a person."""

    context: str
    title: str
    objects: tuple[Object, ...]


def stages(deployment: Deployment) -> list[RolloutStage]:
    """Secrets and settings, the master, the slaves, what belongs to them, then each cluster on Kubernetes."""
    context = deployment.server_site.context
    servers = server_objects(deployment)
    first = [one for one in servers if one["kind"] not in WORKLOADS and one["kind"] != "ServiceMonitor"]
    rest = [one for one in servers if one["kind"] in ("Deployment", "ServiceMonitor")]
    sets = {one["metadata"]["name"]: one for one in servers if one["kind"] == "StatefulSet"}
    at, after = first[:1], first[1:]
    return [
        RolloutStage(context, "keys and settings", (*at, *identities.server_secrets(deployment), *after)),
        RolloutStage(context, "master", (sets[f"{deployment.name}-master"],)),
        RolloutStage(context, "slaves", (sets[f"{deployment.name}-slave"],)),
        RolloutStage(context, "supervisor and metrics", tuple(rest)),
        *(_of_cluster(deployment, cluster) for cluster in on_kubernetes(deployment)),
    ]


def _of_cluster(deployment: Deployment, cluster: DeployedClusterKnobs) -> RolloutStage:
    at, *rest = cluster_objects(deployment, cluster)
    secret = identities.cluster_secret(deployment, cluster.id)
    context = deployment.site(cluster.site).context
    return RolloutStage(context, f"cluster {cluster.id}", (at, secret, *rest))


def on_kubernetes(deployment: Deployment) -> list[DeployedClusterKnobs]:
    return [cluster for cluster in deployment.clusters if cluster.starts in ("job", "jobset")]


def elsewhere(deployment: Deployment) -> list[DeployedClusterKnobs]:
    """Clusters that a script starts."""
    return [cluster for cluster in deployment.clusters if cluster.starts in ("slurm", "command")]


def contexts(deployment: Deployment) -> list[str]:
    """All contexts with objects, the servers' first."""
    return list(dict.fromkeys(stage.context for stage in stages(deployment)))


def key(context: str, document: Object) -> Key:
    return context, document["kind"], document["metadata"]["name"]


def steps(found: Iterable[RolloutStage], find: Find) -> list[tuple[RolloutStage, list[Step]]]:
    """Each stage with what has to be done about each of its objects; an object that two stages have is done once."""
    done: set[Key] = set()
    result = []
    for stage in found:
        mine = [one for one in stage.objects if key(stage.context, one) not in done]
        done |= {key(stage.context, one) for one in mine}
        result.append((stage, [step_for(stage.context, one, find(stage.context, one)) for one in mine]))
    return result


def left_over(deployment: Deployment, there: Mapping[str, Sequence[Object]]) -> list[Step]:
    """Objects of the run that no stage wants any longer. Volumes are never among them."""
    wanted = {key(stage.context, one) for stage in stages(deployment) for one in stage.objects}
    return [
        Step(context, ObjectAction.DELETE, one, one)
        for context, objects in there.items()
        for one in reversed(objects)
        if one["kind"] not in ("PersistentVolumeClaim", "Namespace") and key(context, one) not in wanted
    ]


def check_slaves(deployment: Deployment, live: Object | None) -> None:
    """Raise ConfigError when the run has another number of slaves than the file says."""
    running = live["spec"].get("replicas", 1) if live else deployment.run.slaves
    if running != deployment.run.slaves:
        raise ConfigError(
            f"{deployment.file} says slaves = {deployment.run.slaves}, and the run has {running}: "
            f"`dips deploy scale {deployment.file}` moves the model first; or set slaves back"
        )


def slave_settings_map(deployment: Deployment) -> Object:
    """The object with the settings of all slaves."""
    name = ("ConfigMap", f"{deployment.name}-slave")
    return next(one for one in server_objects(deployment) if (one["kind"], one["metadata"]["name"]) == name)


def lines(found: Iterable[tuple[RolloutStage, list[Step]]], summary: bool = False) -> Iterator[str]:
    """The plan for a person: each stage, each object, each field that changes."""
    for stage, mine in found:
        yield f"# {stage.title}, context {stage.context}"
        for step in mine:
            text = diff_lines(step)
            yield from [next(text)] if summary else text
        yield ""


def counts(found: Iterable[tuple[RolloutStage, list[Step]]], leaving: Sequence[Step] = ()) -> str:
    """One line: how many objects are made, changed, replaced, deleted and left as they are."""
    every = [step for _, mine in found for step in mine]
    words = {
        ObjectAction.CREATE: "to make",
        ObjectAction.CHANGE: "to change",
        ObjectAction.REPLACE: "to replace",
        ObjectAction.SAME: "as they should be",
    }
    parts = [f"{sum(step.action is action for step in every)} {word}" for action, word in words.items()]
    return ", ".join([*parts, f"{len(leaving)} to delete"])
