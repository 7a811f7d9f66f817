"""The parts that all objects share: names, labels, the security of pods, and volumes.

Pure: dictionaries as Kubernetes reads them. Every pod must pass the restricted profile of the Pod Security Standards,
and nothing is written as an empty list or table, which the API drops and a comparison would see as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import yaml

from dips.core.net.keys import CA_FILE, CERT_FILE, KEY_FILE
from dips.deploy.deploy_file import CONFIG, KEYS, METRICS_PORT, STATE, Deployment

Object = dict[str, Any]

IDENTITY_FILES = (CA_FILE, CERT_FILE, KEY_FILE)

COMMON_ENVIRONMENT = {"HOME": "/tmp", "NUMBA_CACHE_DIR": "/tmp/numba", "DIPS_LOG_FORMAT": "json"}
"""Nothing but the volumes can be written; logs go to standard error, for a log collector."""

USER = 10001
"""The user and group of the images (Dockerfile)."""

MANAGER = "dips-deploy"
CLUSTER_LABEL = "dips-cluster"
CONFIG_HASH = "dips/config"
"""Annotation of a pod's template: other settings make other pods."""

RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}


def labels(deployment: Deployment, component: str, cluster: str = "") -> dict[str, str]:
    found = {
        "app.kubernetes.io/name": "dips",
        "app.kubernetes.io/instance": deployment.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "dips",
        "app.kubernetes.io/managed-by": MANAGER,
    }
    return {**found, CLUSTER_LABEL: cluster} if cluster else found


def selector(deployment: Deployment, component: str, cluster: str = "") -> dict[str, str]:
    """The labels that find a component's pods; they never change, whereas others may."""
    found = {"app.kubernetes.io/instance": deployment.name, "app.kubernetes.io/component": component}
    return {**found, CLUSTER_LABEL: cluster} if cluster else found


def made(deployment: Deployment, kind: str, name: str, component: str, cluster: str = "", **fields: Any) -> Object:
    """An object of the run's namespace."""
    return {
        "apiVersion": API_VERSIONS[kind],
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": deployment.run.namespace,
            "labels": labels(deployment, component, cluster),
        },
        **fields,
    }


API_VERSIONS = {
    "Namespace": "v1",
    "ServiceAccount": "v1",
    "Secret": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}


def namespace(deployment: Deployment) -> Object:
    found = made(deployment, "Namespace", deployment.run.namespace, "namespace")
    del found["metadata"]["namespace"]
    # One namespace may hold several runs: it is no run's own, so that `delete` leaves it.
    found["metadata"]["labels"] = {"app.kubernetes.io/part-of": "dips", **RESTRICTED}
    return found


def service_account(deployment: Deployment, name: str, component: str, cluster: str = "") -> Object:
    return made(deployment, "ServiceAccount", name, component, cluster, automountServiceAccountToken=False)


def settings_map(
    deployment: Deployment, name: str, component: str, files: Mapping[str, str], cluster: str = ""
) -> Object:
    return made(deployment, "ConfigMap", name, component, cluster, data=dict(files))


def config_hash(files: Mapping[str, str]) -> str:
    return sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()[:16]


def pod_spec(
    deployment: Deployment,
    account: str,
    containers: Sequence[Object],
    volumes: Iterable[Object],
    **more: Any,
) -> Object:
    """A pod that runs as an ordinary user with nothing but its volumes; /tmp is memory of its own."""
    pull = {"imagePullSecrets": [{"name": deployment.run.pull_secret}]} if deployment.run.pull_secret else {}
    return {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
        **pull,
        **more,
    }


def container(
    name: str,
    image: str,
    command: Sequence[str],
    resources: Object,
    mounts: Iterable[Object],
    ports: Mapping[str, int] | None = None,
    environment: Iterable[Object] = (),
    **more: Any,
) -> Object:
    found: Object = {
        "name": name,
        "image": image,
        # The images have an entry point of their own, which gets these words.
        "args": list(command),
        "env": [*environment, *({"name": key, "value": value} for key, value in COMMON_ENVIRONMENT.items())],
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
        **more,
    }
    if ports:
        found["ports"] = [{"name": key, "containerPort": port, "protocol": "TCP"} for key, port in ports.items()]
    return found


def resources(cpus: str, memory: str, extra: Mapping[str, str] | None = None) -> Object:
    """A container's resources.

    Memory is asked for and bounded alike, so that a full node ends others first; processors are never bounded.
    """
    fixed = {"memory": memory, **(extra or {})}
    return {"requests": {"cpu": cpus, **fixed}, "limits": fixed}


def tcp_probe(port: str, period_s: int, failures: int) -> Object:
    return {"tcpSocket": {"port": port}, "periodSeconds": period_s, "failureThreshold": failures, "timeoutSeconds": 5}


def state_mount() -> Object:
    return {"name": "state", "mountPath": STATE}


def keys_mount() -> Object:
    return {"name": "keys", "mountPath": KEYS, "readOnly": True}


def own_keys_mounts(name: str) -> list[Object]:
    """Mounts the files of one identity from a secret with many: `name` may hold variables of the container."""
    return [
        {"name": "keys", "mountPath": f"{KEYS}/{file}", "subPathExpr": f"{name}.{file}", "readOnly": True}
        for file in IDENTITY_FILES
    ]


def config_mount() -> Object:
    return {"name": "config", "mountPath": CONFIG, "readOnly": True}


def secret_volume(secret: str) -> Object:
    """A secret as a volume, readable by the pod's group only: a key that every user could read would be refused."""
    return {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}}


def config_volume(name: str) -> Object:
    return {"name": "config", "configMap": {"name": name, "defaultMode": 0o444}}


def claim_template(deployment: Deployment, storage: str) -> Object:
    spec: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}}
    if deployment.run.storage_class:
        spec["storageClassName"] = deployment.run.storage_class
    return {"metadata": {"name": "state"}, "spec": spec}


def service_ports(ports: Mapping[str, int]) -> list[Object]:
    return [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()]


METRICS = {"metrics": METRICS_PORT}


class _WholeDumper(yaml.SafeDumper):
    """Writes everything out, without aliases such as `*id001`, which are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_yaml(*documents: Object) -> str:
    return yaml.dump_all(documents, Dumper=_WholeDumper, sort_keys=False, width=110)


def toml(table: str, settings: Mapping[str, object]) -> str:
    """One table of a settings file. Text is written as JSON, which TOML reads alike."""
    return "\n".join([f"[{table}]", *(f"{key} = {_value(settings[key])}" for key in sorted(settings)), ""])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
