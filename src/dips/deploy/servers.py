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
    MasterPlace,
    pairs,
    processors,
    quantity,
)
from dips.deploy.objects import (
    CONFIG_HASH,
    CONFIG_MOUNT,
    IDENTITY_FILES,
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
    master_policy,
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
    slave_files = slave_settings(deployment)
    name, master = deployment.name, deployment.masters[0]
    return [
        namespace(deployment, deployment.server_site.context),
        service_account(deployment, f"{name}-server", "server"),
        service_account(deployment, f"{name}-supervisor", "supervisor"),
        settings_map(deployment, f"{name}-master", "master", master_settings(deployment, master)),
        settings_map(deployment, f"{name}-slave", "slave", slave_files),
        *_services(deployment),
        *server_policies(deployment),
        *_lease(deployment),
        # One slave at a time may be moved: rounds rest while one is away.
        made(
            deployment,
            "PodDisruptionBudget",
            f"{name}-slave",
            "slave",
            spec={"maxUnavailable": 1, "selector": {"matchLabels": selector(deployment, "slave")}},
        ),
        _master(deployment, master),
        _slaves(deployment, slave_files),
        *_supervisor(deployment),
        *(
            _service_monitor(deployment, of)
            for of in ("master", "slave")
            if deployment.monitored(deployment.server_site)
        ),
    ]


def standby_objects(deployment: Deployment, place: MasterPlace) -> list[Object]:
    """Everything of the standby but the secret, which is the master's, in the order in which it is made."""
    component, name = place.component, f"{deployment.name}-{place.component}"
    return [
        namespace(deployment, place.site.context),
        service_account(deployment, name, component),
        settings_map(deployment, name, component, master_settings(deployment, place)),
        _service(deployment, name, component, {"control": CONTROL_PORT, **METRICS}),
        *([] if deployment.run.expose == "inside" else [_endpoint(deployment, component, 0, place.address)]),
        master_policy(deployment, place),
        _master(deployment, place),
        *([_service_monitor(deployment, component)] if deployment.monitored(place.site) else []),
    ]


# ---- settings ----


def master_settings(deployment: Deployment, place: MasterPlace) -> dict[str, str]:
    # Who wants a standby wants decisions to wait for it.
    given = {**({"journal_replicas": 1} if deployment.standby else {}), **deployment.tables["master"]}
    ours = {
        "run_id": deployment.name,
        "directory": place.directory,
        "listen": listening(deployment, CONTROL_PORT),
        "slaves": deployment.run.slaves,
        "keys": KEYS,
        "metrics_listen": listening(deployment, METRICS_PORT),
        # Of this pod alone: `kubectl port-forward` comes in there, and nothing else does.
        "page_listen": f"127.0.0.1:{PAGE_PORT}",
    }
    return {"master.toml": toml("master", {**given, **ours})}


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
        _endpoint(deployment, "master", 0, deployment.masters[0].address),
        *(_endpoint(deployment, "slave", n, deployment.slave_address(n)) for n in range(deployment.run.slaves)),
    ]


def _service(deployment: Deployment, name: str, component: str, ports: Mapping[str, int], **spec: object) -> Object:
    ours = {"selector": selector(deployment, component), "ports": service_ports(ports), **spec}
    found = made(deployment, "Service", name, component, spec=ours)
    found["metadata"]["labels"][ENDPOINT_LABEL] = "inside"
    return found


def _endpoint(deployment: Deployment, component: str, index: int, address: str) -> Object:
    """The service for connections from other places: one for master and standby, one for each slave."""
    name = f"slave-{index}" if component == "slave" else f"{component}-outside"
    host, _, port = address.rpartition(":")
    target = "data" if component == "slave" else "control"
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


def _master(deployment: Deployment, place: MasterPlace) -> Object:
    """Master or standby. One that was a standby keeps its argument when it has taken over, and serves all the same."""
    name, sizes = f"{deployment.name}-{place.component}", deployment.sizes
    others = [one for one in deployment.masters if one.component != place.component]
    follows = others[0].seen_from(place.site.context) if others and (place.began or place.component != "master") else ""
    account = f"{deployment.name}-server" if place.component == "master" else name
    volumes = [secret_volume(f"{deployment.name}-keys-master"), config_volume(name)]
    mounts: list[Object] = [STATE_MOUNT, KEYS_MOUNT, CONFIG_MOUNT]
    environment: list[Object] = []
    if deployment.lease[0] == "kubernetes":
        account = f"{deployment.name}-lease"
        volumes.append(TOKEN_VOLUME)
        mounts.append(TOKEN_MOUNT)
    if secret := deployment.run.lease_secret:
        volumes.append({**secret_volume(secret), "name": "lease"})
        mounts.append({"name": "lease", "mountPath": LEASE_KEYS, "readOnly": True})
        files = zip(("CACERT", "CERT", "KEY"), IDENTITY_FILES, strict=True)
        environment = [{"name": f"ETCDCTL_{key}", "value": f"{LEASE_KEYS}/{file}"} for key, file in files]
    one = container(
        "master",
        deployment.run.image("master"),
        ["dips", "master", "--config", f"{CONFIG}/master.toml", *(["--standby", follows] if follows else [])],
        resources(processors(deployment.run.master_cpus), quantity(sizes.master_process_bytes)),
        mounts,
        {"control": CONTROL_PORT, **METRICS},
        environment,
        # A standby serves its metrics, and nothing else.
        startupProbe=tcp_probe("metrics", PROBE_S, START_PROBES),
        readinessProbe=tcp_probe("metrics", PROBE_S, 3),
        livenessProbe=tcp_probe("metrics", PROBE_S, LIFE_PROBES),
    )
    apart = {"affinity": _apart(deployment, "master", "standby")} if others else {}
    pod = _server_pod(deployment, account, one, volumes, terminationGracePeriodSeconds=END_S, **apart)
    # A StatefulSet never has two pods of one name: the journal has one writer, also when a node is lost.
    spec = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": selector(deployment, place.component)},
        "template": _template(deployment, place.component, config_hash(master_settings(deployment, place)), pod),
        "volumeClaimTemplates": [claim_template(deployment, quantity(sizes.master_volume_bytes))],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    }
    return made(deployment, "StatefulSet", name, place.component, spec=spec)


def _apart(deployment: Deployment, *components: str) -> Object:
    """No two pods of these on one node, or rather not, as the file says."""
    among = {"key": "app.kubernetes.io/component", "operator": "In", "values": list(components)}
    found: Object = {"matchLabels": selector(deployment, components[0])}
    if len(components) > 1:
        found = {"matchLabels": {"app.kubernetes.io/instance": deployment.name}, "matchExpressions": [among]}
    on_node = {"labelSelector": found, "topologyKey": "kubernetes.io/hostname"}
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": [on_node]}
    soft = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": on_node}]}
    return {"podAntiAffinity": hard if deployment.run.spread == "required" else soft}


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
    across = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(deployment, "slave")},
    }
    pod = _server_pod(
        deployment,
        f"{deployment.name}-server",
        one,
        [secret_volume(f"{deployment.name}-keys-slave"), config_volume(name)],
        terminationGracePeriodSeconds=END_S,
        affinity=_apart(deployment, "slave"),
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
    command = ["dips", "deploy", "supervise", "--master", deployment.master_inside, "--keys", KEYS]
    command += ["--run-id", deployment.name, "--namespace", deployment.run.namespace]
    command += ["--slaves", str(deployment.run.slaves)]
    one = container(
        "supervisor",
        deployment.run.image("master"),
        command,
        resources("50m", quantity(SUPERVISOR_BYTES)),
        [KEYS_MOUNT, TOKEN_MOUNT],
    )
    volumes = [secret_volume(f"{deployment.name}-keys-supervisor"), TOKEN_VOLUME]
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector(deployment, "supervisor")},
        "template": _template(deployment, "supervisor", "", _server_pod(deployment, name, one, volumes)),
    }
    return [*_rights(deployment, "supervisor", rule), made(deployment, "Deployment", name, "supervisor", spec=spec)]


def _rights(deployment: Deployment, component: str, rule: Object) -> list[Object]:
    """What permits this to the component's account, and to no other one."""
    name = f"{deployment.name}-{component}"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": deployment.run.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return [
        made(deployment, "Role", name, component, rules=[rule]),
        made(deployment, "RoleBinding", name, component, subjects=[subject], roleRef=role),
    ]


def _lease(deployment: Deployment) -> list[Object]:
    """The Lease of master and standby, and their right to that one object; nothing where they have none here."""
    kind, where = deployment.lease
    if kind != "kubernetes":
        return []
    lease = where.rpartition("/")[2]
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [lease]}
    return [
        service_account(deployment, f"{deployment.name}-lease", "lease"),
        made(deployment, "Lease", lease, "lease"),
        *_rights(deployment, "lease", {**rule, "verbs": ["get", "patch"]}),
    ]


TOKEN_VOLUME: Object = {
    "name": "token",
    "projected": {
        "defaultMode": 0o440,
        "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        ],
    },
}
"""The account's token, for containers that mount it alone and for an hour at a time."""

TOKEN_MOUNT = {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
"""Where the client of Kubernetes looks for it."""

LEASE_KEYS = "/etc/dips/lease"


def _service_monitor(deployment: Deployment, component: str) -> Object:
    name: Object = {"replacement": component}
    if component == "slave":
        name = {"sourceLabels": [POD_NAME], "regex": f"{re.escape(deployment.name)}-slave-(\\d+)", "replacement": "s$1"}
    found = {"matchLabels": {**selector(deployment, component), ENDPOINT_LABEL: "inside"}}
    role = "master" if component == "standby" else component
    endpoint = scraped(deployment, role, name, f"{deployment.name}-keys-prometheus")
    spec = {"selector": found, "endpoints": [endpoint]}
    return monitor(deployment, "ServiceMonitor", f"{deployment.name}-{component}", component, spec=spec)
