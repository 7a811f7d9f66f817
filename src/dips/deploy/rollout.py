"""Carries a plan out: tries everything first, then makes it stage by stage and waits for each to be healthy.

Mistakes of the file are found by the dry run, in which the API servers check every object and keep nothing, before
the first one is made. Whatever was made stays when a later stage does not come up; the same command goes on from
there. It must never delete a volume.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from dips.core.errors import ConfigError, DipsError, RetryLater
from dips.core.units import format_bytes
from dips.deploy import identities
from dips.deploy.clusters import cluster_objects
from dips.deploy.compare import ObjectAction, Step, diff_lines, remembered, replicas_of, step_for
from dips.deploy.deploy_file import Deployment, bytes_of, processors_of
from dips.deploy.health import Health, ObjectState, state_of
from dips.deploy.objects import API_VERSIONS, EXTENSIONS, MONITORS, PLURALS, Object, made
from dips.deploy.servers import server_objects, standby_objects

# ---- plan ------------------------------------------------------------------------------------------------------------
#
# The plan of a deployment: all objects of all contexts in the order of the rollout, and what changes. Pure.


WORKLOADS = ("StatefulSet", "Deployment", "Job", "JobSet")

Key = tuple[str, str, str]
"""Context, kind, name."""

Find = Callable[[str, Object], Object | None]
"""What is there of an object in a context; None when it is not there."""


class RolloutPart(StrEnum):
    SETTINGS = "keys and settings"
    MASTER = "master"
    STANDBY = "standby"
    SLAVES = "slaves"
    SUPERVISOR = "supervisor and metrics"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class RolloutStage:
    """A part of the rollout that is whole before the next begins."""

    context: str
    part: RolloutPart
    objects: tuple[Object, ...]
    cluster: str = ""  # whose part it is

    @property
    def title(self) -> str:
        """For a person."""
        return f"{self.part} {self.cluster}".rstrip()


def stages(deployment: Deployment) -> list[RolloutStage]:
    """Secrets and settings, master, standby, slaves, what belongs to them, then each cluster on Kubernetes."""
    context = deployment.server_site.context
    servers = server_objects(deployment)
    first = [one for one in servers if one["kind"] not in (*WORKLOADS, *MONITORS)]
    rest = [one for one in servers if one["kind"] in ("Deployment", *MONITORS)]
    sets = {one["metadata"]["name"]: one for one in servers if one["kind"] == "StatefulSet"}
    # Secrets come right after the namespace, which is the first object of each list.
    at, *after = first
    found = [
        RolloutStage(context, RolloutPart.SETTINGS, (at, *identities.server_secrets(deployment), *after)),
        RolloutStage(context, RolloutPart.MASTER, (sets[f"{deployment.name}-master"],)),
    ]
    for place in deployment.masters[1:]:
        at, *after = standby_objects(deployment, place)
        objects = (at, *identities.master_secrets(deployment, place), *after)
        found.append(RolloutStage(place.site.context, RolloutPart.STANDBY, objects))
    found += [
        RolloutStage(context, RolloutPart.SLAVES, (sets[f"{deployment.name}-slave"],)),
        RolloutStage(context, RolloutPart.SUPERVISOR, tuple(rest)),
    ]
    for cluster in (one for one in deployment.clusters if one.on_kubernetes):
        at, *after = cluster_objects(deployment, cluster)
        objects = (at, identities.cluster_secret(deployment, cluster.id), *after)
        found.append(RolloutStage(deployment.site(cluster.site).context, RolloutPart.CLUSTER, objects, cluster.id))
    return found


def contexts(deployment: Deployment) -> list[str]:
    """All contexts of the file, the servers' first: one that has no object now may still hold some of earlier."""
    sites = (site.context for site in deployment.sites if site.context)
    return list(dict.fromkeys([deployment.server_site.context, *sites]))


def remembered_contexts(deployment: Deployment, apis: Mapping[str, Api]) -> set[str]:
    """Those that the run's Secrets in the contexts of the file name; none where there is no Secret."""
    here = [apis[context].list("Secret", of_run(deployment.name)) for context in contexts(deployment)]
    return {context for secrets in here for one in secrets for context in remembered(one)}


def former_contexts(deployment: Deployment, apis: Mapping[str, Api]) -> list[str] | None:
    """Those that the file names no longer and the run's Secrets still do; None where there is no Secret to ask."""
    found = remembered_contexts(deployment, apis)
    return sorted(found - {*contexts(deployment)}) if found else None


def check_place(deployment: Deployment, there: Mapping[str, Sequence[Object]]) -> None:
    """Raise ConfigError when the run's master is in another context than the file says: new servers would be empty."""
    for place in deployment.masters[: 1 + deployment.run.take_overs % 2]:
        name, key_of = (
            f"{deployment.name}-{place.component}",
            "standby" if place.component == "standby" else "placement",
        )
        for context, objects in there.items():
            if context == place.site.context or ("StatefulSet", name) not in (key(context, one)[1:] for one in objects):
                continue
            sites = " or ".join(repr(site.name) for site in deployment.sites if site.context == context)
            sites = sites or "a site in that context, which the file names no longer"
            raise ConfigError(
                f"{deployment.file}: {name}, with its state, is in context {context!r}, and the file now has it at "
                f"{place.site.name!r}, with empty volumes ({deployment.why_there}): set [deploy] {key_of} to {sites}; "
                "or name the new site as placement, and `dips deploy move` takes the servers with their volumes to it"
            )


def key(context: str, document: Object) -> Key:
    return context, document["kind"], document["metadata"]["name"]


def steps(
    found: Iterable[RolloutStage], find: Find, least: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[RolloutStage, list[Step]]]:
    """Each stage with what has to be done about each of its objects; an object that two stages have is done once.

    least: by a StatefulSet's name, the size that is enough for volumes that are there.
    """
    done: set[Key] = set()
    result = []
    for stage in found:
        mine = [one for one in stage.objects if key(stage.context, one) not in done]
        done |= {key(stage.context, one) for one in mine}
        result.append(
            (
                stage,
                [
                    step_for(stage.context, one, find(stage.context, one), least.get(one["metadata"]["name"], ""))
                    for one in mine
                ],
            )
        )
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
    running = replicas_of(live) if live else deployment.run.slaves
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


def need_lines(found: Sequence[RolloutStage]) -> Iterator[str]:
    """For each context what its nodes must have free: in all, and for each pod, all of which one node must have."""
    for context in dict.fromkeys(stage.context for stage in found):
        all_cpus, all_bytes, each = 0.0, 0, list[str]()
        for one in (one for stage in found if stage.context == context for one in stage.objects):
            jobs = one.get("spec", {}).get("replicatedJobs") or [{"template": one}]
            for part in (job["template"]["spec"] for job in jobs if one["kind"] in WORKLOADS):
                (container,) = part["template"]["spec"]["containers"]
                asked, n = dict(container["resources"]["requests"]), part.get("replicas", part.get("parallelism", 1))
                cpus, n_bytes = processors_of(asked.pop("cpu")), bytes_of(asked.pop("memory"))
                all_cpus, all_bytes = all_cpus + n * cpus, all_bytes + n * n_bytes
                more = "".join(f", {amount} {name}" for name, amount in asked.items())
                words = f"{cpus:g} processors, {format_bytes(n_bytes)}{more}{' each' if n > 1 else ''}"
                each.append(f"  {n} x {one['metadata']['name']}: {words}")
        if each:
            yield f"context {context} must have {all_cpus:g} processors and {format_bytes(all_bytes)} free:"
            yield from each


# ---- rollout ---------------------------------------------------------------------------------------------------------


POLL_S = 2.0
KINDS = tuple(kind for kind in API_VERSIONS if kind not in ("Namespace", "Pod"))
"""What a run may have in a namespace, in the order in which it is made."""

Say = Callable[[str], None]


class Api(Protocol):
    """The requests of the rollout to an API server; kubernetes_api.KubernetesApi implements it."""

    @property
    def context(self) -> str: ...
    def check_release(self) -> None: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def list(self, kind: str, labels: Mapping[str, str]) -> list[Object]: ...
    def create(self, document: Object, dry_run: bool = False) -> Object | None: ...
    def patch(self, document: Object, patch: Object, dry_run: bool = False) -> Object | None: ...
    def delete(self, kind: str, name: str, uid: str = "") -> bool: ...
    def output_of(self, pod: str, command: Sequence[str], wait_s: float) -> str: ...
    def printed(self, pod: str, command: Sequence[str]) -> Iterator[bytes]: ...
    def feed(self, pod: str, command: Sequence[str], chunks: Iterable[bytes]) -> None: ...


INSTANCE = "app.kubernetes.io/instance"


def of_run(run: str) -> dict[str, str]:
    """The labels of all that this program makes for a run."""
    return {INSTANCE: run, "app.kubernetes.io/managed-by": "dips-deploy"}


def everything(api: Api, run: str) -> list[Object]:
    """All objects of a run in one context, in the order in which they are made."""
    return [one for kind in KINDS for one in api.list(kind, of_run(run))]


class Rollout:
    """Carries the stages out.

    waits: whether for workloads at all. sleep and now_s are the clock's; say prints a sentence.
    """

    def __init__(
        self,
        apis: Mapping[str, Api],
        say: Say,
        wait_s: float,
        waits: bool = True,
        sleep: Callable[[float], None] = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._apis = apis
        self.say = say
        self._wait_s = wait_s
        self._waits = waits
        self._sleep = sleep
        self._now_s = now_s
        self._made: set[Key] = set()

    @contextlib.contextmanager
    def rehearsed(self, found: Iterable[tuple[RolloutStage, list[Step]]]) -> Iterator[None]:
        """Let the API servers check every step, and keep nothing. Raises DipsError for the first that is refused.

        A namespace and a role that are missing are made, since nothing else in the namespace, and no binding of the
        role, can be checked without them. They give nobody anything, and are unmade after a refusal.
        """
        made: list[Step] = []
        try:
            for _, steps in found:
                for step in steps:
                    first = step.action is ObjectAction.CREATE and step.wanted["kind"] in ("Namespace", "Role")
                    _carry_out(self._apis[step.context], step, dry_run=not first)
                    if first:
                        made.append(step)
        except DipsError:
            for step in reversed(made):
                self._apis[step.context].delete(step.wanted["kind"], step.wanted["metadata"]["name"])
            raise
        self._made |= {key(step.context, step.wanted) for step in made}
        yield

    def carry_out(self, steps: Sequence[Step]) -> int:
        """Do what the steps say, in their order; how many of them changed something."""
        changed = 0
        for step in steps:
            if step.action is ObjectAction.REPLACE:
                # Delete an object that cannot be changed, before it is made again.
                kind, name = step.wanted["kind"], step.wanted["metadata"]["name"]
                self._apis[step.context].delete(kind, name)
                self.until_gone(step.context, kind, name)
            if key(step.context, step.wanted) in self._made or _carry_out(self._apis[step.context], step):
                self._made.discard(key(step.context, step.wanted))
                self.say(f"{step.action.value} {step.name}")
                changed += 1
        return changed

    def wait(self, stage: RolloutStage) -> None:
        """Wait until every workload of a stage is healthy. Raises RetryLater when it takes too long, or one failed."""
        for one in stage.objects:
            if self._waits and one["kind"] in WORKLOADS:
                kind, name = one["kind"], one["metadata"]["name"]
                self.until(f"{kind} {name}", functools.partial(self._state, stage.context, kind, name))

    def wait_for_namespaces(self, name: str, contexts: Iterable[str]) -> None:
        """Wait until none of these contexts has a namespace that is being terminated: it takes nothing new, and then is
        gone."""

        def look(api: Api) -> ObjectState:
            live = api.get("Namespace", name) or {}
            ends = live.get("status", {}).get("phase") == "Terminating"
            return ObjectState(Health.WAITING, "is being terminated") if ends else ObjectState(Health.READY, "is gone")

        for context, api in ((context, self._apis[context]) for context in contexts):
            if look(api).health is Health.WAITING:
                self.until(f"namespace {name} of context {context}", functools.partial(look, api))

    def _state(self, context: str, kind: str, name: str) -> ObjectState:
        return state_of(self._apis[context].get(kind, name))

    def until(self, what: str, look: Callable[[], ObjectState]) -> None:
        """Ask again and again until something is READY or DONE; say what it waits for whenever that changes."""
        deadline_s, reported = self._now_s() + self._wait_s, ""
        while True:
            state = look()
            if state.health in (Health.READY, Health.DONE):
                self.say(f"{what}: {state.sentence}")
                return
            if state.health is Health.FAILED:
                raise RetryLater(f"{what}: {state.sentence}; see `kubectl describe` and its logs, then apply again")
            if state.sentence != reported:
                reported = state.sentence
                self.say(f"{what}: {reported}")
            if self._now_s() >= deadline_s:
                raise RetryLater(
                    f"{what} is not healthy after {self._wait_s:g} s ({reported}): see `kubectl describe` and its "
                    "logs; what was made stays, and the same command goes on from here"
                )
            self._sleep(POLL_S)

    def until_gone(self, context: str, kind: str, name: str) -> None:
        """Wait until an object that was deleted is not there any more."""

        def look() -> ObjectState:
            there = self._apis[context].get(kind, name) is not None
            return ObjectState(Health.WAITING, "ends") if there else ObjectState(Health.READY, "is gone")

        self.until(f"{kind} {name}", look)


def _carry_out(api: Api, step: Step, dry_run: bool = False) -> bool:
    """One step; whether there was anything to do. A replaced object is rehearsed under another name."""
    match step.action:
        case ObjectAction.CREATE:
            api.create(step.wanted, dry_run)
        case ObjectAction.CHANGE if step.patch is not None:
            api.patch(step.wanted, step.patch, dry_run)
        case ObjectAction.REPLACE:
            name = step.wanted["metadata"]["name"] + ("-rehearsal" if dry_run else "")
            api.create({**step.wanted, "metadata": {**step.wanted["metadata"], "name": name}}, dry_run)
        case ObjectAction.DELETE if not dry_run:
            api.delete(step.wanted["kind"], step.wanted["metadata"]["name"])
        case ObjectAction.SAME:
            return False
    return True


ROLE = "dips-deploy"
VERBS = ("get", "list", "create", "patch", "delete")
OF_PODS = ("get", "delete")


def role(deployment: Deployment, move: bool = False) -> Object:
    """The rights that whoever runs `dips deploy` needs in each context, as a Role of the namespace: of all kinds that a
    run can have; of kinds of extensions only those that the file needs. move: also what `dips deploy move` needs, which
    makes pods of its own and runs commands in them, as `dips deploy take-over` does in the standby's.

    None of them is of the cluster: a namespace that is there need not be seen. Who gives rights must have them:
    therefore the supervisor's, to get and to delete pods.
    """
    used = {one["kind"] for stage in stages(deployment) for one in stage.objects}
    plurals: dict[str, list[str]] = {}
    for kind in KINDS:
        if kind in used or kind not in EXTENSIONS:
            plurals.setdefault(API_VERSIONS[kind].rpartition("/")[0], []).append(PLURALS[kind])
    rights: list[tuple[str, list[str], Sequence[str]]] = [(group, names, VERBS) for group, names in plurals.items()]
    rights.append(("", ["pods"], OF_PODS))
    if move:
        rights.append(("", ["pods"], ["create"]))
    if move or deployment.standby:
        # The client opens a WebSocket with a GET, for which RBAC wants get; from Kubernetes 1.35 on also create.
        rights.append(("", ["pods/exec"], ["get", "create"]))
    rules = [{"apiGroups": [group], "resources": names, "verbs": list(verbs)} for group, names, verbs in rights]
    found = made(deployment, "Role", ROLE, "deploy", rules=rules)
    # Of no run: `dips deploy delete` must not delete what permits it.
    found["metadata"]["labels"] = {"app.kubernetes.io/part-of": "dips"}
    return found
