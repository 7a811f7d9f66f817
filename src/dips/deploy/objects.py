"""The parts that all objects share: names, labels, the security of pods, and volumes.

Pure: dictionaries as Kubernetes reads them. Every pod must pass the restricted profile of the Pod Security Standards,
and nothing is written as an empty list or table, which the API drops and a comparison would see as a difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import yaml

from dips.core.net.keys import CA_FILE, CERT_FILE, KEY_FILE
from dips.deploy.deploy_file import (
    CONFIG,
    CONTROL_PORT,
    DATA_PORT,
    KEYS,
    METRICS_PORT,
    STATE,
    DeployedClusterKnobs,
    Deployment,
    MasterPlace,
    pairs,
    processors,
    quantity,
)

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
CONTEXTS = "dips/contexts"
"""Annotation of a Secret: all contexts where the run may have objects, also those that the file names no longer."""

POD_SECURITY = "pod-security.kubernetes.io"
RESTRICTED = {f"{POD_SECURITY}/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}


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
    "Secret": "v1",
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Pod": "v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}
"""The kinds that are made here, in their order."""

MONITORS = ("ServiceMonitor", "PodMonitor")

EXTENSIONS = {
    **dict.fromkeys(
        MONITORS,
        "install the Prometheus operator there, or set service_monitor = false, in [deploy] or in its site's table",
    ),
    "JobSet": "install JobSet there, or set starts = 'job'",
    "Lease": "leave [master] lease out",
}
"""Kinds that not every run has, most of which only an extension knows, and what to do where one is missing."""

PLURALS = {**{kind: f"{kind.lower()}s" for kind in API_VERSIONS}, "NetworkPolicy": "networkpolicies"}
"""The names of kinds in requests and rights."""


def namespace(deployment: Deployment, context: str) -> Object:
    found = made(deployment, "Namespace", deployment.run.namespace, "namespace")
    del found["metadata"]["namespace"]
    # One namespace may hold several runs: it is no run's own, so that `delete` leaves it.
    found["metadata"]["labels"] = {"app.kubernetes.io/part-of": "dips", **RESTRICTED}
    if any(one.host_network and deployment.site(one.site).context == context for one in deployment.clusters):
        # Profiles are of whole namespaces, and this is the only one that permits a node's network.
        found["metadata"]["labels"][f"{POD_SECURITY}/enforce"] = "privileged"
    return found


def service_account(deployment: Deployment, name: str, component: str, cluster: str = "") -> Object:
    return made(deployment, "ServiceAccount", name, component, cluster, automountServiceAccountToken=False)


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


def placed(node_selector: Sequence[str], tolerate: Sequence[str], priority_class: str) -> Object:
    """The fields of a pod that say on which nodes it may be, and before which other pods."""
    found: Object = {}
    if node_selector:
        found["nodeSelector"] = pairs(node_selector)
    if tolerate:
        found["tolerations"] = [{"key": key, "operator": "Exists"} for key in tolerate]
    if priority_class:
        found["priorityClassName"] = priority_class
    return found


def listening(deployment: Deployment, port: int) -> str:
    """HOST:PORT at which a pod listens."""
    return f"{deployment.run.every_address}:{port}"


def resources(cpus: float, n_bytes: int, extra: Mapping[str, str] | None = None) -> Object:
    """A container's resources.

    Memory is asked for and bounded alike, so that a full node ends others first; processors are never bounded.
    """
    fixed = {"memory": quantity(n_bytes), **(extra or {})}
    return {"requests": {"cpu": processors(cpus), **fixed}, "limits": fixed}


STATE_MOUNT = {"name": "state", "mountPath": STATE}
KEYS_MOUNT = {"name": "keys", "mountPath": KEYS, "readOnly": True}
CONFIG_MOUNT = {"name": "config", "mountPath": CONFIG, "readOnly": True}


def secret_volume(secret: str) -> Object:
    """A secret as a volume, readable by the pod's group only: a key that every user could read would be refused."""
    return {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}}


def config_volume(name: str) -> Object:
    return {"name": "config", "configMap": {"name": name, "defaultMode": 0o444}}


def claim_spec(deployment: Deployment, n_bytes: int, access: str) -> Object:
    """Of a PersistentVolumeClaim for a volume of this size."""
    spec: Object = {"accessModes": [access], "resources": {"requests": {"storage": quantity(n_bytes)}}}
    return {**spec, "storageClassName": deployment.run.storage_class} if deployment.run.storage_class else spec


def service_ports(ports: Mapping[str, int]) -> list[Object]:
    return [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()]


METRICS = {"metrics": METRICS_PORT}


# ---- monitors --------------------------------------------------------------------------------------------------------
#
# What the Prometheus operator is told: which pods serve metrics, with which keys they are read, and their labels. Pure.


JOB = "dips"
"""The label `job` of all targets, as in deploy/prometheus: alarms ask for it. The operator would take another one."""

POD_NAME = "__meta_kubernetes_pod_name"


def monitor(deployment: Deployment, kind: str, name: str, component: str, cluster: str = "", **fields: Any) -> Object:
    """A monitor with the labels by which the Prometheus of its site selects it."""
    found = made(deployment, kind, name, component, cluster, **fields)
    found["metadata"]["labels"] |= pairs(deployment.run.monitor_labels)
    return found


def scraped(deployment: Deployment, component: str, name: Mapping[str, object], secret: str) -> Object:
    """How the metrics of a component are read, and the labels that dashboards and alarms need of each target.

    name: the relabelling that gives a target the name of its process. secret: in the monitor's own namespace, with keys
    of the run; all of them may read metrics.
    """
    return {
        "port": "metrics",
        "scheme": "https",
        "interval": "15s",
        # Metrics are served to holders of a certificate of the run, under a certificate for the role.
        "tlsConfig": {
            "ca": {"secret": {"name": secret, "key": CA_FILE}},
            "cert": {"secret": {"name": secret, "key": CERT_FILE}},
            "keySecret": {"name": secret, "key": KEY_FILE},
            "serverName": f"dips-{component}",
        },
        "relabelings": [
            {"targetLabel": "job", "replacement": JOB},
            {"targetLabel": "role", "replacement": component},
            {"targetLabel": "run", "replacement": deployment.name},
            {"targetLabel": "name", **name},
            # Otherwise the pod's address, which is another one after each move: its series would begin again, and an
            # alarm that counts starts would never see two of them in one.
            {"sourceLabels": [POD_NAME], "targetLabel": "instance"},
        ],
    }


class _WholeDumper(yaml.SafeDumper):
    """Writes everything out, without aliases such as `*id001`, and files as blocks: both are read by people."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_WholeDumper.add_representer(str, _WholeDumper.represent_str)


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


# ---- network policies ------------------------------------------------------------------------------------------------
#
# The network policies of a deployment: which pods and networks may connect to which. Pure.
#
# Each policy names both directions, so that what it does not name is closed. Keys are what authenticates; these only
# keep unknown peers away from the ports.


EVERY_NETWORK = ("0.0.0.0/0", "::/0")
"""A block has addresses of one family only."""

API_PORTS = (443, 6443, 8443, 16443)
"""Where API servers listen, inside and behind the service `kubernetes`: 8443 in minikube, 16443 in MicroK8s."""

TO_API: Object = {
    "to": [{"ipBlock": {"cidr": cidr}} for cidr in EVERY_NETWORK],
    "ports": [{"protocol": "TCP", "port": port} for port in API_PORTS],
}

NAMES: Object = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
"""Names are looked up wherever the cluster's DNS is."""

RENDEZVOUS_PORTS = (1024, 65535)
"""Between a cluster's own nodes: torchrun's and the collectives' ports are not known beforehand."""


def server_policies(deployment: Deployment) -> list[Object]:
    slaves, to_masters = _pods(selector(deployment, "slave")), _to_masters(deployment, deployment.masters[0])
    return [
        master_policy(deployment, deployment.masters[0]),
        _policy(
            deployment,
            "slave",
            [_from([*slaves, *_clusters(deployment, deployment.masters[0])], _tcp(DATA_PORT)), _metrics(deployment)],
            # Slaves find each other at the addresses that clusters use, for a RESHARD.
            [NAMES, *to_masters, _to(slaves, _tcp(DATA_PORT)), _to(_anywhere(), _data_ports(deployment))],
        ),
        _policy(deployment, "supervisor", [], [NAMES, *to_masters, TO_API]),
    ]


def master_policy(deployment: Deployment, place: MasterPlace) -> Object:
    """Master and standby dial each other and their lease, and nothing else."""
    others = [one for one in deployment.masters if one.component != place.component]
    inner = [*(one.component for one in others), "slave", "supervisor"]
    found = _pods(*(selector(deployment, component) for component in inner))
    kind, where = deployment.lease
    ends = [int(port) for port in re.findall(r":(\d+)", where)] if kind == "etcd" else []
    to_lease = [TO_API] if kind == "kubernetes" else [_to(_anywhere(), [_tcp(n)[0] for n in ends])] if ends else []
    return _policy(
        deployment,
        place.component,
        [_from([*found, *_clusters(deployment, place)], _tcp(CONTROL_PORT)), _metrics(deployment)],
        [NAMES, *(_to_masters(deployment, place) if others else []), *to_lease],
    )


def _to_masters(deployment: Deployment, place: MasterPlace) -> list[Object]:
    """What pods at the site of this one need to dial master and standby."""
    here = [one for one in deployment.masters if one.site.context == place.site.context]
    away = [one for one in deployment.masters if one not in here]
    found = [_to(_pods(*(selector(deployment, one.component) for one in here)), _tcp(CONTROL_PORT))]
    return [*found, *([_to(_anywhere(), _control_ports(away))] if away else [])]


def _control_ports(places: Iterable[MasterPlace]) -> list[Object]:
    """As they are reached from other contexts, and as their pods have it, where policies see what it was changed to."""
    ports = [int(place.address.rpartition(":")[2]) for place in places]
    return _once([port for n in (*ports, CONTROL_PORT) for port in _tcp(n)])


def cluster_policy(deployment: Deployment, cluster: DeployedClusterKnobs) -> Object:
    """Allows a cluster's pods to connect to master and slaves, to each other, and to what its table says."""
    own = _pods(selector(deployment, "cluster", cluster.id))
    first, last = RENDEZVOUS_PORTS
    among = [{"protocol": "TCP", "port": first, "endPort": last}]
    endpoints = [*_control_ports(deployment.masters), *_tcp(DATA_PORT), *_data_ports(deployment)]
    return _policy(
        deployment,
        "cluster",
        [_from(own, among), _metrics(deployment)],
        [
            NAMES,
            _to(_anywhere(), _once(endpoints)),
            _to(own, among),
            *(_to([_block(at)] if at else _anywhere(), _tcp(port)) for at, port in cluster.destinations),
        ],
        cluster.id,
    )


def _clusters(deployment: Deployment, place: MasterPlace) -> list[Object]:
    """From where clusters come, and to a standby the servers of another site: their pods in this namespace, and the
    networks of the sites.

    A site that names no networks may be anywhere; a node port hides where a connection comes from. Pods in the network
    of their node have its address, and no policy knows them by their labels.
    """
    found: list[Object] = _pods({**selector(deployment, "cluster")})
    sites = [(deployment.site(cluster.site), cluster.host_network) for cluster in deployment.clusters]
    sites += [(one.site, False) for one in deployment.masters if len(deployment.masters) > 1]
    away = [site for site, in_its_nodes in sites if in_its_nodes or site.context != place.site.context]
    if deployment.run.expose == "inside" and not away:
        return found
    if deployment.run.expose == "node-port" or any(not site.cidrs for site in away):
        return [*found, *_anywhere()]
    return [*found, *(_block(cidr) for cidr in sorted({cidr for site, _ in sites for cidr in site.cidrs}))]


def _policy(
    deployment: Deployment, component: str, inward: Sequence[Object], outward: Sequence[Object], cluster: str = ""
) -> Object:
    name = f"{deployment.name}-cluster-{cluster}" if cluster else f"{deployment.name}-{component}"
    spec: Object = {
        "podSelector": {"matchLabels": selector(deployment, component, cluster)},
        "policyTypes": ["Ingress", "Egress"],
        "egress": list(outward),
    }
    if inward:
        spec["ingress"] = list(inward)
    return made(deployment, "NetworkPolicy", name, component, cluster, spec=spec)


def _metrics(deployment: Deployment) -> Object:
    whose = {"matchLabels": {"kubernetes.io/metadata.name": deployment.run.prometheus_namespace}}
    return _from([{"namespaceSelector": whose}], _tcp(METRICS_PORT))


def _data_ports(deployment: Deployment) -> list[Object]:
    """The slaves' ports as they are reached from outside; one of each where every slave has its own host."""
    last = deployment.run.outside_data_port
    if deployment.run.expose == "node-port" and deployment.run.slaves > 1:
        return [{"protocol": "TCP", "port": last, "endPort": last + deployment.run.slaves - 1}]
    return _tcp(last)


def _from(peers: Sequence[Object], ports: Sequence[Object]) -> Object:
    return {"from": list(peers), "ports": list(ports)}


def _to(peers: Sequence[Object], ports: Sequence[Object]) -> Object:
    return {"to": list(peers), "ports": _once(ports)}


def _once(ports: Sequence[Object]) -> list[Object]:
    return [port for index, port in enumerate(ports) if port not in ports[:index]]


def _pods(*found: Mapping[str, str]) -> list[Object]:
    return [{"podSelector": {"matchLabels": dict(one)}} for one in found]


def _block(cidr: str) -> Object:
    return {"ipBlock": {"cidr": cidr}}


def _anywhere() -> list[Object]:
    return [_block(cidr) for cidr in EVERY_NETWORK]


def _tcp(port: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port}]
