"""Takes the servers of a run, with their volumes, from the site where they are to the one that the file names.

Clusters are drained and the old servers stopped before the first byte is copied, so that nothing changes meanwhile; the
copy is compared file by file, and only then the old StatefulSets go. Old volumes stay, as a last backup. Until the old
StatefulSets are gone the run can go back: with the old placement, `dips deploy apply` starts them again as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from dips.core.errors import ConfigError, FatalError
from dips.core.units import format_bytes
from dips.deploy import identities
from dips.deploy import rollout as plan
from dips.deploy.compare import STOPPED_WITH
from dips.deploy.deploy_file import STATE, DeployKnobs, Deployment
from dips.deploy.health import Health, ObjectState
from dips.deploy.objects import STATE_MOUNT, Object, container, made, pod_spec, resources, selector
from dips.deploy.operate import LiveDeployment
from dips.deploy.rollout import Api, Rollout

REASON = "the servers move to another site"
SUMS = "cd {folder} && find {part} -type f -print0 | sort -z | xargs -0r sha256sum"
UNPACK = """import sys, tarfile
archive = tarfile.open(fileobj=sys.stdin.buffer, mode='r|')
archive.extraction_filter = getattr(tarfile, 'tar_filter', None)
archive.extractall(sys.argv[1])"""
"""It ends with the archive; the program tar would read on to the end of a stream that no one can close. The Python of
the image runs it, and before 3.11.4 that has no filters: the attribute then has no effect.
"""

SUM_WAIT_S = 3600.0
"""To read a whole volume."""

SAID_EVERY_BYTES = 1 << 30


@dataclass(frozen=True)
class Volume:
    """A server's volume: the claim of a pod of a StatefulSet."""

    component: str
    folder: str  # of the volume, which holds everything
    claim: str
    carrier: str  # the pod that carries it
    spec: Object


def volumes(deployment: Deployment) -> Iterator[Volume]:
    for stage in plan.stages(deployment):
        for one in stage.objects:
            if one["kind"] == "StatefulSet":
                (template,) = one["spec"]["volumeClaimTemplates"]
                name, component = one["metadata"]["name"], one["metadata"]["labels"]["app.kubernetes.io/component"]
                for index in range(one["spec"]["replicas"]):
                    claim = f"{template['metadata']['name']}-{name}-{index}"
                    folder = deployment.masters[0].directory if component == "master" else f"{STATE}/{component}"
                    folder = folder.removeprefix(f"{STATE}/")
                    yield Volume(component, folder, claim, f"{name}-carrier-{index}", template["spec"])


class Move:
    """A move of a deployment to its server_site; apis by context. live_at: the run as it is at its old site."""

    def __init__(
        self,
        deployment: Deployment,
        apis: Mapping[str, Api],
        rollout: Rollout,
        live_at: Callable[[Deployment], LiveDeployment],
    ) -> None:
        self._wanted = deployment
        self._apis = apis
        self._rollout = rollout
        self._to = apis[deployment.server_site.context]
        if deployment.standby:
            raise ConfigError(
                f"{deployment.file} [deploy]: the servers move without a standby: leave standby out, apply, move, and "
                "name it again"
            )
        # The same run at the site where its master is. Raises ConfigError when there is nothing to move.
        master, here = f"{self._wanted.name}-master", self._to.context
        found = [context for context, api in self._apis.items() if api.get("StatefulSet", master) is not None]
        if len(found) > 1:
            raise ConfigError(
                f"run {self._wanted.name} has a master in {' and '.join(found)}: delete the one that nobody needs with "
                "`kubectl delete statefulset` (its volume stays)"
            )
        if not found:
            raise ConfigError(f"run {self._wanted.name} has no servers yet: `dips deploy apply` makes them")
        if found == [here]:
            raise ConfigError(
                f"the servers of run {self._wanted.name} are in context {here!r} already: set placement to the site to "
                "which they are to move"
            )
        site = next(site for site in self._wanted.sites if site.context == found[0])
        self.old = replace(self._wanted, server_site=site, run=self._reached_as_now(self._apis[found[0]]))
        """The deployment as it is now."""
        self._from = apis[self.old.server_site.context]
        self._live_at = live_at
        self._live = live_at(self.old)

    def _reached_as_now(self, api: Api) -> DeployKnobs:
        """How the master is reached where it is: the file already says how it is to be, perhaps at another port."""
        service = api.get("Service", f"{self._wanted.name}-master-outside")
        if service is None:
            return self._wanted.run.model_copy(update={"expose": "inside"})
        expose = "node-port" if service["spec"]["type"] == "NodePort" else "load-balancer"
        port = service["spec"]["ports"][0]["port"]
        return self._wanted.run.model_copy(update={"expose": expose, "master_port": port})

    def carry_out(self) -> None:
        """Drain, stop, copy, and compare. Afterwards an apply starts everything at the new site. Raises DipsError.

        After an error the same command goes on.
        """
        identities.check(self._wanted)
        self._live.check_slaves()
        # New servers would be refused for the same reasons after everything was stopped.
        planned = self._live_at(self._wanted).planned()
        new = [(stage, steps) for stage, steps in planned if stage.part is not plan.RolloutPart.CLUSTER]
        with self._rollout.rehearsed(new):
            self._drain()
            self._stop()
            for stage, steps in new:
                if stage.part is plan.RolloutPart.SETTINGS:
                    self._rollout.carry_out(steps)
            for volume in volumes(self._wanted):
                self._copy(volume)
        # The master's last: where it is, a command that is given again looks for the run.
        for name in (f"{self._wanted.name}-slave", f"{self._wanted.name}-master"):
            self._from.delete("StatefulSet", name)
            self._rollout.until_gone(self._from.context, "StatefulSet", name)

    # ---- drain and stop ----

    def _drain(self) -> None:
        """Every cluster pushes its last steps and leaves. Nothing to do where the servers are stopped already."""
        if self._replicas("master"):
            for cluster in self._live.run_status().clusters:
                if cluster.alive:
                    self._live.drain(cluster.cluster_id, REASON)

    def _stop(self) -> None:
        # It would make pods again that are to go.
        self._from.delete("Deployment", f"{self._wanted.name}-supervisor")
        for component in ("master", "slave"):
            replicas, name = self._replicas(component), f"{self._wanted.name}-{component}"
            live = self._from.get("StatefulSet", name)
            if live is not None and replicas:
                stopped = {"annotations": {STOPPED_WITH: str(replicas)}}
                self._from.patch(live, {"metadata": stopped, "spec": {"replicas": 0}})
                self._rollout.say(f"StatefulSet {name}: 0 pods")
            for index in range(self._wanted.run.slaves if component == "slave" else 1):
                self._rollout.until_gone(self._from.context, "Pod", f"{name}-{index}")

    def _replicas(self, component: str) -> int:
        live = self._from.get("StatefulSet", f"{self._wanted.name}-{component}") or {"spec": {"replicas": 0}}
        found: int = live["spec"].get("replicas", 1)
        return found

    # ---- copy ----

    def _copy(self, volume: Volume) -> None:
        """Replace what the new volume holds by what the old one holds."""
        if self._to.get("PersistentVolumeClaim", volume.claim) is None:
            # As its StatefulSet would make it.
            claim = made(self._wanted, "PersistentVolumeClaim", volume.claim, volume.component, spec=volume.spec)
            claim["metadata"]["labels"] = selector(self._wanted, volume.component)
            self._to.create(claim)
        carriers = [(self._from, carrier(self.old, volume)), (self._to, carrier(self._wanted, volume))]
        try:
            for api, pod in carriers:
                if api.get("Pod", volume.carrier) is None:
                    api.create(pod)
                self._rollout.until(f"pod {volume.carrier}", functools.partial(self._runs, api, volume.carrier))
            part = volume.folder
            clear = ["sh", "-c", f"rm -rf {STATE}/{part} && echo cleared"]
            if self._to.output_of(volume.carrier, clear, SUM_WAIT_S).strip() != "cleared":
                raise FatalError(f"{self._at(volume)}: what an earlier copy left cannot be removed: delete the claim")
            chunks = self._from.printed(volume.carrier, ["tar", "-C", STATE, "-cf", "-", part])
            self._to.feed(volume.carrier, ["python", "-c", UNPACK, STATE], self._told(volume, chunks))
            sums = ["sh", "-c", SUMS.format(folder=STATE, part=part)]
            before, after = (api.output_of(volume.carrier, sums, SUM_WAIT_S) for api, _ in carriers)
            if before != after or not before:
                raise FatalError(
                    f"{self._at(volume)} does not hold what the old one holds: run the command again; if it stays so, "
                    "see the volume's events"
                )
            files = len(before.splitlines())
            self._rollout.say(f"volume {volume.claim}: {files} files are there, compared by SHA-256")
        finally:
            for api, _ in carriers:
                api.delete("Pod", volume.carrier)
        for api, _ in carriers:
            self._rollout.until_gone(api.context, "Pod", volume.carrier)

    def _told(self, volume: Volume, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same, and how far it is."""
        n_bytes, said_bytes = 0, 0
        for chunk in chunks:
            yield chunk
            n_bytes += len(chunk)
            if n_bytes >= said_bytes + SAID_EVERY_BYTES:
                said_bytes = n_bytes
                self._rollout.say(f"volume {volume.claim}: {format_bytes(n_bytes)} are copied")

    def _at(self, volume: Volume) -> str:
        return f"volume {volume.claim} of context {self._to.context!r}"

    def _runs(self, api: Api, name: str) -> ObjectState:
        live = api.get("Pod", name)
        phase = (live or {}).get("status", {}).get("phase", "not there")
        return ObjectState(Health.READY if phase == "Running" else Health.WAITING, f"is {phase}")


def carrier(deployment: Deployment, volume: Volume) -> Object:
    """A pod that does nothing but hold a volume."""
    small = resources(deployment.run.small_pod_cpus, deployment.run.small_pod_memory)
    image = deployment.run.image(volume.component)
    one = container("carrier", image, ["sleep", "infinity"], small, [STATE_MOUNT])
    claim = {"name": "state", "persistentVolumeClaim": {"claimName": volume.claim}}
    ends: Object = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    spec = pod_spec(deployment, f"{deployment.name}-server", [one], [claim], **ends)
    return made(deployment, "Pod", volume.carrier, "carrier", spec=spec)
