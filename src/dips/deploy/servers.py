"""The objects of the site where master, slaves and supervisor run. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dips.deploy.deploy_file import (
    CONFIG,
    CONTROL_PORT,
    DATA_PORT,
    HOST_ANNOTATION,
    KEYS,
    METRICS_PORT,
    PAGE_PORT,
    STATE,
    SUPERVISOR_BYTES,
    Deployment,
    pairs,
    processors,
    quantity,
)
from dips.deploy.objects import (
    CONFIG_HASH,
    CONFIG_MOUNT,
    KEYS_MOUNT,
    METRICS,
    POD_NAME,
    STATE_MOUNT,
    Object,
    claim_template,
    config_hash,
    config_volume,
    container,
    labels,
    listening,
    made,
    monitor,
    namespace,
    own_keys_mounts,
    placed,
    pod_spec,
    resources,
    scraped,
    secret_volume,
    selector,
    server_policies,
    service_account,
    service_ports,
    settings_map,
    tcp_probe,
    toml,
)

START_PROBES, LIFE_PROBES, PROBE_S = 360, 6, 10
"""A slave reads its snapshots back before it opens its port: an hour is given. Later a minute of silence ends it."""

ENDPOINT_LABEL = "dips-door"
"""Distinguishes the services that metrics are read from, inside, from those that lead in from outside."""

END_S = 60
"""Time for a process to end in good order before it is killed; what it holds is on its disk anyway."""

POD_INDEX = {
    "name": "POD_INDEX",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
}


def server_objects(deployment: Deployment) -> list[Object]:
    """Everything of the server site but the secrets, in the order in which it is made."""
    master_files, slave_files = master_settings(deployment), slave_settings(deployment)
    name = deployment.name
    return [
        namespace(deployment, deployment.server_site.context),
        service_account(deployment, f"{name}-server", "server"),
        service_account(deployment, f"{name}-supervisor", "supervisor"),
        settings_map(deployment, f"{name}-master", "master", master_files),
        settings_map(deployment, f"{name}-slave", "slave", slave_files),
        *_services(deployment),
        *server_policies(deployment),
        # One slave at a time may be moved: rounds rest while one is away.
        made(
            deployment,
            "PodDisruptionBudget",
            f"{name}-slave",
            "slave",
            spec={"maxUnavailable": 1, "selector": {"matchLabels": selector(deployment, "slave")}},
        ),
        _master(deployment, config_hash(master_files)),
        _slaves(deployment, slave_files),
        *_supervisor(deployment),
        *(
            _service_monitor(deployment, of)
            for of in ("master", "slave")
            if deployment.monitored(deployment.server_site)
        ),
    ]


# ---- settings ----


def master_settings(deployment: Deployment) -> dict[str, str]:
    ours = {
        "run_id": deployment.name,
        "directory": f"{STATE}/master",
        "listen": listening(deployment, CONTROL_PORT),
        "slaves": deployment.run.slaves,
        "keys": KEYS,
        "metrics_listen": listening(deployment, METRICS_PORT),
        # Of this pod alone: `kubectl port-forward` comes in there, and nothing else does.
        "page_listen": f"127.0.0.1:{PAGE_PORT}",
    }
    return {"master.toml": toml("master", {**deployment.tables["master"], **ours})}


def slave_settings(deployment: Deployment) -> dict[str, str]:
    """A file for each slave: the address at which others reach it cannot be given by one template."""
    files = {}
    for index, slave in enumerate(deployment.slave_ids):
        ours = {
            "run_id": deployment.name,
            "slave_id": slave,
            "directory": f"{STATE}/slave",
            "master": deployment.master_inside,
            "keys": KEYS,
            "data_host": deployment.run.every_address.strip("[]"),
            "data_port": DATA_PORT,
            "advertise": deployment.slave_address(index),
            "memory_bytes": deployment.sizes.slave_memory_bytes,
            "metrics_listen": listening(deployment, METRICS_PORT),
        }
        files[f"{slave}.toml"] = toml("slave", {**deployment.tables["slave"], **ours})
    return files


# ---- services ----


def _services(deployment: Deployment) -> list[Object]:
    name = deployment.name
    inside = [
        _service(deployment, f"{name}-master", "master", {"control": CONTROL_PORT, **METRICS}),
        _service(
            deployment,
            f"{name}-slave",
            "slave",
            {"data": DATA_PORT, **METRICS},
            clusterIP="None",
            # A slave finds the others while it is not ready yet.
            publishNotReadyAddresses=True,
        ),
    ]
    if deployment.run.expose == "inside":
        return inside
    return [
        *inside,
        _endpoint(deployment, "master", 0),
        *(_endpoint(deployment, "slave", index) for index in range(deployment.run.slaves)),
    ]


def _service(deployment: Deployment, name: str, component: str, ports: Mapping[str, int], **spec: object) -> Object:
    ours = {"selector": selector(deployment, component), "ports": service_ports(ports), **spec}
    found = made(deployment, "Service", name, component, spec=ours)
    found["metadata"]["labels"][ENDPOINT_LABEL] = "inside"
    return found


def _endpoint(deployment: Deployment, component: str, index: int) -> Object:
    """The service for connections from other places: one for the master, one for each slave."""
    name = "master-outside" if component == "master" else f"slave-{index}"
    address = deployment.master_address if component == "master" else deployment.slave_address(index)
    host, _, port = address.rpartition(":")
    target = "control" if component == "master" else "data"
    pod = {"statefulset.kubernetes.io/pod-name": f"{deployment.name}-{component}-{index}"}
    spec: Object = {"selector": {**selector(deployment, component), **pod}}
    endpoint = {"name": target, "port": int(port), "targetPort": target, "protocol": "TCP"}
    if deployment.run.expose == "node-port":
        spec |= {"type": "NodePort", "ports": [{**endpoint, "nodePort": int(port)}]}
        return made(deployment, "Service", f"{deployment.name}-{name}", component, spec=spec)
    # Local: the network policy sees from which network a connection comes.
    spec |= {"type": "LoadBalancer", "ports": [endpoint], "externalTrafficPolicy": "Local"}
    found = made(deployment, "Service", f"{deployment.name}-{name}", component, spec=spec)
    found["metadata"]["annotations"] = {HOST_ANNOTATION: host, **pairs(deployment.run.load_balancer_annotations)}
    return found


# ---- workloads ----


def _master(deployment: Deployment, hashed: str) -> Object:
    name, sizes = f"{deployment.name}-master", deployment.sizes
    one = container(
        "master",
        deployment.run.image("master"),
        ["dips", "master", "--config", f"{CONFIG}/master.toml"],
        resources(processors(deployment.run.master_cpus), quantity(sizes.master_process_bytes)),
        [STATE_MOUNT, KEYS_MOUNT, CONFIG_MOUNT],
        {"control": CONTROL_PORT, **METRICS},
        startupProbe=tcp_probe("control", PROBE_S, START_PROBES),
        readinessProbe=tcp_probe("metrics", PROBE_S, 3),
        livenessProbe=tcp_probe("metrics", PROBE_S, LIFE_PROBES),
    )
    volumes = [secret_volume(f"{deployment.name}-keys-master"), config_volume(name)]
    pod = _server_pod(deployment, f"{deployment.name}-server", one, volumes, terminationGracePeriodSeconds=END_S)
    # A StatefulSet never has two pods of one name: the journal has one writer, also when a node is lost.
    spec = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": selector(deployment, "master")},
        "template": _template(deployment, "master", hashed, pod),
        "volumeClaimTemplates": [claim_template(deployment, quantity(sizes.master_volume_bytes))],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    }
    return made(deployment, "StatefulSet", name, "master", spec=spec)


def _slaves(deployment: Deployment, files: Mapping[str, str]) -> Object:
    name, sizes = f"{deployment.name}-slave", deployment.sizes
    one = container(
        "slave",
        deployment.run.image("slave"),
        ["dips", "slave", "--config", f"{CONFIG}/s$(POD_INDEX).toml"],
        resources(processors(deployment.run.slave_cpus), quantity(sizes.slave_process_bytes)),
        [STATE_MOUNT, *own_keys_mounts("s$(POD_INDEX)"), CONFIG_MOUNT],
        {"data": DATA_PORT, **METRICS},
        [POD_INDEX],
        # Metrics open when the data port serves, which is bound long before.
        startupProbe=tcp_probe("metrics", PROBE_S, START_PROBES),
        readinessProbe=tcp_probe("metrics", PROBE_S, 3),
        livenessProbe=tcp_probe("metrics", PROBE_S, LIFE_PROBES),
    )
    # No two slaves on one node, and about as many in one zone as in another: one failure takes one slave.
    found = {"matchLabels": selector(deployment, "slave")}
    on_node = {"labelSelector": found, "topologyKey": "kubernetes.io/hostname"}
    required = deployment.run.spread == "required"
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": [on_node]}
    soft = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": on_node}]}
    across = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": found,
    }
    pod = _server_pod(
        deployment,
        f"{deployment.name}-server",
        one,
        [secret_volume(f"{deployment.name}-keys-slave"), config_volume(name)],
        terminationGracePeriodSeconds=END_S,
        affinity={"podAntiAffinity": hard if required else soft},
        topologySpreadConstraints=[across],
    )
    # The settings that all slaves share: one slave more must not make the others start again.
    lines = [set(text.splitlines()) for text in files.values()]
    spec = {
        "serviceName": name,
        "replicas": deployment.run.slaves,
        "podManagementPolicy": "Parallel",
        "minReadySeconds": PROBE_S,
        "selector": {"matchLabels": selector(deployment, "slave")},
        "template": _template(
            deployment, "slave", config_hash({"common": "\n".join(sorted(set.intersection(*lines)))}), pod
        ),
        "volumeClaimTemplates": [claim_template(deployment, quantity(sizes.slave_volume_bytes))],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    }
    return made(deployment, "StatefulSet", name, "slave", spec=spec)


def _server_pod(deployment: Deployment, account: str, one: Object, volumes: list[Object], **more: object) -> Object:
    """A pod of the server site, where the file wants these."""
    run = deployment.run
    where = placed(run.server_node_selector, run.server_tolerate, run.server_priority_class)
    return pod_spec(deployment, account, [one], volumes, **where, **more)


def _template(deployment: Deployment, component: str, hashed: str, pod: Object) -> Object:
    found = {**labels(deployment, component), "app.kubernetes.io/version": deployment.run.tag}
    hashes = {"annotations": {CONFIG_HASH: hashed}} if hashed else {}
    return {"metadata": {"labels": found, **hashes}, "spec": pod}


# ---- the supervisor of the slaves ----


def _supervisor(deployment: Deployment) -> list[Object]:
    """Its rights are to see and to end the slaves' pods, by name; nothing else."""
    name = f"{deployment.name}-supervisor"
    pods = [f"{deployment.name}-slave-{index}" for index in range(deployment.run.slaves)]
    rule = {"apiGroups": [""], "resources": ["pods"], "resourceNames": pods, "verbs": ["get", "delete"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": deployment.run.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    command = ["dips", "deploy", "supervise", "--master", deployment.master_inside, "--keys", KEYS]
    command += ["--run-id", deployment.name, "--namespace", deployment.run.namespace]
    command += ["--slaves", str(deployment.run.slaves)]
    one = container(
        "supervisor",
        deployment.run.image("master"),
        command,
        resources("50m", quantity(SUPERVISOR_BYTES)),
        [KEYS_MOUNT, {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True}],
    )
    # The account's token, for this container alone and for an hour at a time.
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    projected = {"defaultMode": 0o440, "sources": [token, authority]}
    volumes = [secret_volume(f"{deployment.name}-keys-supervisor"), {"name": "token", "projected": projected}]
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector(deployment, "supervisor")},
        "template": _template(deployment, "supervisor", "", _server_pod(deployment, name, one, volumes)),
    }
    return [
        made(deployment, "Role", name, "supervisor", rules=[rule]),
        made(deployment, "RoleBinding", name, "supervisor", subjects=[subject], roleRef=role),
        made(deployment, "Deployment", name, "supervisor", spec=spec),
    ]


TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where the client of Kubernetes looks for it."""


def _service_monitor(deployment: Deployment, component: str) -> Object:
    name: Object = {"replacement": component}
    if component == "slave":
        name = {"sourceLabels": [POD_NAME], "regex": f"{re.escape(deployment.name)}-slave-(\\d+)", "replacement": "s$1"}
    found = {"matchLabels": {**selector(deployment, component), ENDPOINT_LABEL: "inside"}}
    endpoint = scraped(deployment, component, name, f"{deployment.name}-keys-prometheus")
    spec = {"selector": found, "endpoints": [endpoint]}
    return monitor(deployment, "ServiceMonitor", f"{deployment.name}-{component}", component, spec=spec)
