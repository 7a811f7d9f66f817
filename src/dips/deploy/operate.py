"""Carries out `dips deploy` for a checked file: apply, status, scale, drain and delete, over all contexts.

It decides nothing by itself: plan.py and compare.py say what changes, rollout.py makes it and waits, and the master is
asked by the operator's own service. It must never delete a volume unless that was asked for.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dips.core.errors import ConfigError, DipsError, RetryLater
from dips.core.messages import StatusReply
from dips.deploy import identities
from dips.deploy import rollout as plan
from dips.deploy.compare import ObjectAction, Step, remembered
from dips.deploy.deploy_file import CONFIG, DeployedClusterKnobs, Deployment, MasterPlace, quantity
from dips.deploy.health import Dial, Health, ObjectState, endpoints, state_of, state_of_endpoint
from dips.deploy.objects import CLUSTER_LABEL, CONTEXTS, Object
from dips.deploy.rollout import Api, Rollout, everything

Planned = list[tuple[plan.RolloutStage, list[Step]]]

_AROUND = ("Secret", "Service", "NetworkPolicy", "Role", "RoleBinding")
"""What a new slave needs in addition to its settings and its pod."""


class Operator(Protocol):
    """The requests to the master; operator_client.OperatorClient implements it."""

    @property
    def address(self) -> str: ...
    def status(self) -> StatusReply: ...
    def drain(self, cluster_id: str, reason: str) -> str: ...
    def reshard(self, add: Sequence[str], remove: Sequence[str], reason: str) -> str: ...


Dialled = Callable[[], AbstractContextManager[Operator]]
"""Opens a connection to the master."""


@dataclass(frozen=True)
class PendingChanges:
    """What apply would do: steps by stage, and objects of the run that are no longer wanted. serving: what the file has
    to say of master and standby, in a sentence."""

    planned: Planned
    leaving: list[Step]
    serving: str = ""

    def of_servers(self) -> PendingChanges:
        """Without what belongs to clusters: they train on as they are."""
        planned = [pair for pair in self.planned if pair[0].part is not plan.RolloutPart.CLUSTER]
        leaving = [step for step in self.leaving if CLUSTER_LABEL not in step.wanted["metadata"].get("labels", {})]
        return PendingChanges(planned, leaving, self.serving)

    @property
    def changes(self) -> int:
        return sum(step.action is not ObjectAction.SAME for _, steps in self.planned for step in steps) + len(
            self.leaving
        )


class LiveDeployment:
    """A deployment, its API servers by context, and its master."""

    def __init__(
        self, deployment: Deployment, apis: Mapping[str, Api], rollout: Rollout, operator: Dialled, dial: Dial
    ) -> None:
        self.deployment = deployment
        self._apis = apis
        self._rollout = rollout
        self._operator = operator
        self._dial = dial

    # ---- plan and apply ----

    def difference(self) -> PendingChanges:
        """Raises ConfigError for a difference that only a person can settle."""
        there = {context: everything(api, self.deployment.name) for context, api in self._apis.items()}
        plan.check_place(self.deployment, there)
        serving = self._check_serving([one for objects in there.values() for one in objects])
        return PendingChanges(self.planned(), plan.left_over(self.deployment, there), serving)

    def _check_serving(self, there: Sequence[Object]) -> str:
        """What the file should say of who serves the run, in a sentence; empty where it does. Raises ConfigError where
        the one that serves would end, or be the standby of the other, in an empty directory."""
        run, names = self.deployment, {f"{self.deployment.name}-{one}": one for one in ("master", "standby")}
        have: dict[str, str] = {}
        for one in (one for one in there if one["kind"] == "ConfigMap" and one["metadata"]["name"] in names):
            name = one["metadata"]["name"]
            try:
                have[names[name]] = str(tomllib.loads(one["data"]["master.toml"])["master"]["directory"])
            except (KeyError, TypeError, ValueError) as error:  # edited by hand
                remedy = "delete it, and `dips deploy apply` makes it again"
                raise ConfigError(f"ConfigMap {name} holds no settings of a master ({error}): {remedy}") from error
        wanted = {place.component: place.directory for place in run.masters}
        if "master" not in have:
            return ""

        def after(serving: str) -> int:
            """The take-overs after which it serves the run with its directory."""
            began = int(have[serving].partition("/master-")[2] or 0)
            return began + (serving == "standby" or began > 0)

        try:
            serves = self._serves(there) if "standby" in have else "master"
        except DipsError as error:
            kept = [one for one, directory in have.items() if wanted.get(one) == directory]
            if not kept:
                either = ", or ".join(f"{after(one)} where {run.name}-{one} serves the run" for one in have)
                all_empty = f"{run.file} would begin {' and '.join(have)} in empty directories"
                raise ConfigError(f"{all_empty}: set [deploy] take_overs = {either}") from error
            right = f"see that standby and take_overs = {run.run.take_overs} are right"
            return "" if len(kept) == len(have) else f"{right}: which pod serves the run is not known ({error})"
        n = after(serves)
        words, remedy = f"{run.name}-{serves} serves the run", f"set [deploy] take_overs = {n}"
        if wanted.get(serves) != have[serves]:
            remedy += "" if serves in wanted else ", and name the standby's site as standby"
            raise ConfigError(f"{words}, and {run.file} would end it, or make it an empty standby: {remedy}")
        remedy += f" in {run.file}, and apply: the other pod follows it then"
        return "" if n == run.run.take_overs else f"{words} since a take-over: {remedy}"

    def _serves(self, there: Sequence[Object]) -> str:
        """Whether master or standby serves the run, by their Lease, else by who answers. Raises DipsError."""
        for holder in (one.get("spec", {}).get("holderIdentity") or "" for one in there if one["kind"] == "Lease"):
            for component in ("master", "standby"):
                if holder.partition(" ")[0] == f"{self.deployment.name}-{component}-0":
                    return component
        with self._operator() as operator:
            operator.status()
            for place in self.deployment.masters:
                if operator.address == place.address:
                    return place.component
        raise RetryLater(f"{operator.address} may be either's")

    def planned(self) -> Planned:
        """Each stage with what has to be done about its objects. Raises ConfigError as difference() does."""

        def find(context: str, document: Object) -> Object | None:
            return self._apis[context].get(document["kind"], document["metadata"]["name"])

        # A volume that is there is not asked to have all the room that a new one gets for its slave's tape.
        least = {f"{self.deployment.name}-slave": quantity(self.deployment.sizes.slave_least_bytes)}
        found, known = plan.stages(self.deployment), plan.remembered_contexts(self.deployment, self._apis)
        for one in (one for stage in found for one in stage.objects if one["kind"] == "Secret"):
            # Also of a new one: those that remember may leave with their own context.
            one["metadata"]["annotations"][CONTEXTS] = json.dumps(sorted(known | remembered(one)))
        return plan.steps(found, find, least)

    def prepare(self) -> None:
        """What must hold before a difference is taken that is to be applied. Raises DipsError.

        What a namespace that is being terminated still holds is not to be compared with: it is waited for.
        """
        self.check_releases()
        self._rollout.wait_for_namespaces(self.deployment.run.namespace, plan.contexts(self.deployment))
        self.check_slaves()

    def check_releases(self) -> None:
        """Raise ConfigError when an API server is too old."""
        for api in self._apis.values():
            api.check_release()

    def check_slaves(self) -> None:
        plan.check_slaves(self.deployment, self._live_slaves())

    def apply(self, difference: PendingChanges, reach: bool = True) -> int:
        """Try everything, then make it in order; how many objects changed. Raises DipsError."""
        identities.check(self.deployment)
        self.check_slaves()
        changed = 0
        with self._rollout.rehearsed(difference.planned):
            for stage, steps in difference.planned:
                changed += self._rollout.carry_out(steps)
                self._rollout.wait(stage)
                if stage.part is plan.RolloutPart.SUPERVISOR and reach:
                    for who, address in endpoints(self.deployment):
                        self._rollout.until(who, functools.partial(state_of_endpoint, who, address, self._dial))
                    self._rollout.until("the run", self._attached)
        changed += self._rollout.carry_out(difference.leaving)
        self._forget_what_is_gone()
        return changed

    def _forget_what_is_gone(self) -> None:
        """Contexts that the file names no longer and where nothing of the run is. One that was not asked is kept."""
        run, named = self.deployment.name, {*plan.contexts(self.deployment)}
        there = {context for context, api in self._apis.items() if everything(api, run)}
        gone = {*self._apis} - named - there - {one.context for one in self.volumes()}
        for api in (self._apis[context] for context in named if gone):
            for one in api.list("Secret", plan.of_run(run)):
                if (known := remembered(one)) & gone:
                    api.patch(one, {"metadata": {"annotations": {CONTEXTS: json.dumps(sorted(known - gone))}}})

    def _attached(self) -> ObjectState:
        """Whether the master has all of its slaves."""
        try:
            with self._operator() as operator:
                status = operator.status()
        except DipsError as error:
            return ObjectState(Health.WAITING, str(error))
        here = sum(slave.alive for slave in status.slaves)
        words = f"{here} of {self.deployment.run.slaves} slaves are with the master"
        return ObjectState(Health.READY if here >= self.deployment.run.slaves else Health.WAITING, words)

    # ---- status ----

    def states(self) -> Iterator[tuple[str, Object, ObjectState]]:
        """Every object that is wanted, with its context and how it is. A context that does not answer is asked once:
        its machines may be lost, and a standby elsewhere serve the run."""
        seen, away = set(), dict[str, str]()
        for stage in plan.stages(self.deployment):
            for one in stage.objects:
                key = plan.key(stage.context, one)
                if key not in seen:
                    seen.add(key)
                    try:
                        if stage.context not in away:
                            state = state_of(self._apis[stage.context].get(one["kind"], one["metadata"]["name"]))
                    except RetryLater as error:
                        away[stage.context] = str(error)
                    trouble = away.get(stage.context)
                    yield stage.context, one, state if trouble is None else ObjectState(Health.WAITING, trouble)

    def run_status(self) -> StatusReply:
        with self._operator() as operator:
            return operator.status()

    # ---- take over ----

    def take_over(self) -> MasterPlace:
        """Let the standby serve the run from now on; which one that is. Raises DipsError, also when it does not."""
        place = self.deployment.standby
        if place is None:
            raise ConfigError(f"{self.deployment.file} [deploy] names no standby that could take over")
        command = ["dips", "master", "--take-over", "--config", f"{CONFIG}/master.toml"]
        for _ in self._apis[place.site.context].printed(f"{self.deployment.name}-{place.component}-0", command):
            pass  # it says on standard error what it does, which is told when it fails
        return place

    # ---- scale ----

    def scale(self) -> tuple[int, int]:
        """Bring the run to as many slaves as the file says; (before, after). Raises DipsError."""
        live, wanted = self._live_slaves(), self.deployment.run.slaves
        if live is None:
            raise ConfigError(f"run {self.deployment.name} has no slaves yet: `dips deploy apply` makes them")
        running = live["spec"].get("replicas", 1)
        if wanted > running:
            self._add(live, running)
        elif wanted < running:
            # Room first, since fewer slaves hold more each; then the blocks move, and at last the pods go.
            around = self._around_slaves()
            with self._rollout.rehearsed(around):
                # Those that go keep their settings: they may be started again until their blocks are elsewhere.
                self._write_settings(self.deployment.slave_ids)
                for stage, steps in around:
                    self._rollout.carry_out([step for step in steps if step.wanted["kind"] == "StatefulSet"])
                    self._rollout.wait(stage)
            self._ask_reshard([], [f"s{index}" for index in range(self.deployment.run.slaves, running)])
            self._until_moved()
            self._set_replicas(live, self.deployment.run.slaves)
            self._wait_for_slaves()
        return running, wanted

    def _add(self, live: Object, running: int) -> None:
        """Keys, settings and services first; then the request, then the pods, which would be refused before it."""
        identities.check(self.deployment)
        names = list(self.deployment.slave_ids[running:])
        around = self._around_slaves()
        with self._rollout.rehearsed(around):
            for _, steps in around:
                self._rollout.carry_out([step for step in steps if step.wanted["kind"] in _AROUND])
        # Those that run keep their settings: started again, they must still find room for all that they hold.
        self._write_settings(names)
        self._ask_reshard(names, [])
        self._set_replicas(live, self.deployment.run.slaves)
        self._until_moved()
        self._wait_for_slaves()

    def _write_settings(self, slaves: Sequence[str]) -> None:
        """Write the settings of these slaves, and leave those of the others as they are."""
        wanted = plan.slave_settings_map(self.deployment)
        texts = {name: wanted["data"][name] for name in (f"{slave}.toml" for slave in slaves)}
        self._apis[self.deployment.server_site.context].patch(wanted, {"data": texts})

    def _around_slaves(self) -> Planned:
        """The server site's stages up to the slaves."""
        return [
            pair
            for pair in self.difference().planned
            if pair[0].part in (plan.RolloutPart.SETTINGS, plan.RolloutPart.SLAVES)
        ]

    def _ask_reshard(self, add: Sequence[str], remove: Sequence[str]) -> None:
        with self._operator() as operator:
            known = {slave.slave_id for slave in operator.status().slaves}
            add = [name for name in add if name not in known]
            remove = [name for name in remove if name in known]
            if add or remove:
                self._rollout.say(operator.reshard(add, remove, "dips deploy scale"))

    def _until_moved(self) -> None:
        def look() -> ObjectState:
            words = self.run_status().reshard
            return (
                ObjectState(Health.WAITING, words)
                if words
                else ObjectState(Health.READY, "the blocks are where they belong")
            )

        self._rollout.until("RESHARD", look)

    def _wait_for_slaves(self) -> None:
        stage = next(stage for stage in plan.stages(self.deployment) if stage.part is plan.RolloutPart.SLAVES)
        self._rollout.wait(stage)

    def _set_replicas(self, live: Object, replicas: int) -> None:
        api = self._apis[self.deployment.server_site.context]
        api.patch(live, {"spec": {"replicas": replicas}})
        self._rollout.say(f"StatefulSet {live['metadata']['name']}: {replicas} pods")

    def _live_slaves(self) -> Object | None:
        return self._apis[self.deployment.server_site.context].get("StatefulSet", f"{self.deployment.name}-slave")

    # ---- drain and delete ----

    def drain(self, cluster: str, reason: str) -> None:
        """Let a cluster push its last steps and leave; its Job then ends well by itself. Raises DipsError."""
        found = self._cluster(cluster)
        with self._operator() as operator:
            self._rollout.say(operator.drain(cluster, reason))
        self._rollout.until(f"cluster {cluster}", lambda: self._left(cluster))
        if found.on_kubernetes:
            self._rollout.until(f"cluster {cluster}", lambda: self._ended(cluster))

    def _left(self, cluster: str) -> ObjectState:
        for one in self.run_status().clusters:
            if one.cluster_id == cluster and one.alive:
                return ObjectState(Health.WAITING, f"is {one.phase}")
        return ObjectState(Health.READY, "has left the run")

    def _ended(self, cluster: str) -> ObjectState:
        found = self._cluster(cluster)
        kind = "JobSet" if found.starts == "jobset" else "Job"
        api = self._apis[self.deployment.site(found.site).context]
        live = api.get(kind, f"{self.deployment.name}-cluster-{cluster}")
        state = state_of(live)
        if live is None or state.health is not Health.READY:
            return ObjectState(Health.DONE, "its job is gone") if live is None else state
        return ObjectState(Health.WAITING, "its job has yet to end")

    def going(self, cluster: str = "") -> list[Step]:
        """All objects of the run (or of one cluster) in the order in which they are deleted; no volumes."""
        if cluster:
            self._cluster(cluster)
        found = []
        for context, api in reversed(list(self._apis.items())):
            for one in reversed(everything(api, self.deployment.name)):
                mine = not cluster or one["metadata"]["labels"].get(CLUSTER_LABEL) == cluster
                if mine and one["kind"] != "PersistentVolumeClaim":
                    found.append(Step(context, ObjectAction.DELETE, one, one))
        return found

    def volumes(self, cluster: str = "") -> list[Step]:
        """The volumes of the run, those of StatefulSets too, which carry fewer labels."""
        labels = {plan.INSTANCE: self.deployment.name}
        return [
            Step(context, ObjectAction.DELETE, one, one)
            for context, api in self._apis.items()
            for one in api.list("PersistentVolumeClaim", labels)
            if not cluster or one["metadata"]["labels"].get(CLUSTER_LABEL) == cluster
        ]

    def delete(self, going: Sequence[Step], volumes: Sequence[Step]) -> None:
        self._rollout.carry_out(going)
        for step in going:
            if step.wanted["kind"] in plan.WORKLOADS:
                self._rollout.until_gone(step.context, step.wanted["kind"], step.wanted["metadata"]["name"])
        self._rollout.carry_out(volumes)

    def _cluster(self, cluster: str) -> DeployedClusterKnobs:
        for one in self.deployment.clusters:
            if one.id == cluster:
                return one
        known = ", ".join(one.id for one in self.deployment.clusters)
        raise ConfigError(f"{self.deployment.file} has no cluster {cluster!r}; it has {known}")
