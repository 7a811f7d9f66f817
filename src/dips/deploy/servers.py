"""The objects of the site where master, slaves and supervisor run. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dips.deploy import deploy_file, objects
from dips.deploy.deploy_file import CONFIG, KEYS, STATE, Deployment, MasterPlace
from dips.deploy.objects import Object, made

START_PROBES, LIFE_PROBES, PROBE_S = 360, 6, 10
"""A slave reads its snapshots back before it opens its port: an hour is given. Later a minute of silence ends it."""

PROBES = {
    name: {"tcpSocket": {"port": "metrics"}, "periodSeconds": PROBE_S, "failureThreshold": n, "timeoutSeconds": 5}
    for name, n in (("startupProbe", START_PROBES), ("readinessProbe", 3), ("livenessProbe", LIFE_PROBES))
}

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
        objects.namespace(deployment, deployment.server_site.context),
        objects.service_account(deployment, f"{name}-server", "server"),
        objects.service_account(deployment, f"{name}-supervisor", "supervisor"),
        made(deployment, "ConfigMap", f"{name}-master", "master", data=master_settings(deployment, master)),
        made(deployment, "ConfigMap", f"{name}-slave", "slave", data=slave_files),
        *_services(deployment),
        *objects.server_policies(deployment),
        *_lease(deployment),
        # One slave at a time may be moved: rounds rest while one is away.
        made(
            deployment,
            "PodDisruptionBudget",
            f"{name}-slave",
            "slave",
            spec={"maxUnavailable": 1, "selector": {"matchLabels": objects.selector(deployment, "slave")}},
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
        objects.namespace(deployment, place.site.context),
        objects.service_account(deployment, name, component),
        made(deployment, "ConfigMap", name, component, data=master_settings(deployment, place)),
        _service(deployment, name, component, {"control": deploy_file.CONTROL_PORT, **objects.METRICS}),
        *([] if deployment.run.expose == "inside" else [_endpoint(deployment, component, 0, place.address)]),
        objects.master_policy(deployment, place),
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
        "listen": objects.listening(deployment, deploy_file.CONTROL_PORT),
        "slaves": deployment.run.slaves,
        "keys": KEYS,
        "metrics_listen": objects.listening(deployment, deploy_file.METRICS_PORT),
        # Of this pod alone: `kubectl port-forward` comes in there, and nothing else does.
        "page_listen": f"127.0.0.1:{deploy_file.PAGE_PORT}",
    }
    return {"master.toml": objects.toml("master", {**given, **ours})}


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
            "data_port": deploy_file.DATA_PORT,
            "advertise": deployment.slave_address(index),
            "memory_bytes": deployment.sizes.slave_memory_bytes,
            "metrics_listen": objects.listening(deployment, deploy_file.METRICS_PORT),
        }
        files[f"{slave}.toml"] = objects.toml("slave", {**deployment.tables["slave"], **ours})
    return files


# ---- services ----


def _services(deployment: Deployment) -> list[Object]:
    name = deployment.name
    inside = [
        _service(deployment, f"{name}-master", "master", {"control": deploy_file.CONTROL_PORT, **objects.METRICS}),
        _service(
            deployment,
            f"{name}-slave",
            "slave",
            {"data": deploy_file.DATA_PORT, **objects.METRICS},
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
    ours = {"selector": objects.selector(deployment, component), "ports": objects.service_ports(ports), **spec}
    found = made(deployment, "Service", name, component, spec=ours)
    found["metadata"]["labels"][ENDPOINT_LABEL] = "inside"
    return found


def _endpoint(deployment: Deployment, component: str, index: int, address: str) -> Object:
    """The service for connections from other places: one for master and standby, one for each slave."""
    name = f"slave-{index}" if component == "slave" else f"{component}-outside"
    host, _, port = address.rpartition(":")
    target = "data" if component == "slave" else "control"
    pod = {"statefulset.kubernetes.io/pod-name": f"{deployment.name}-{component}-{index}"}
    spec: Object = {"selector": {**objects.selector(deployment, component), **pod}}
    endpoint = {"name": target, "port": int(port), "targetPort": target, "protocol": "TCP"}
    if deployment.run.expose == "node-port":
        spec |= {"type": "NodePort", "ports": [{**endpoint, "nodePort": int(port)}]}
        return made(deployment, "Service", f"{deployment.name}-{name}", component, spec=spec)
    # Local: the network policy sees from which network a connection comes.
    spec |= {"type": "LoadBalancer", "ports": [endpoint], "externalTrafficPolicy": "Local"}
    found = made(deployment, "Service", f"{deployment.name}-{name}", component, spec=spec)
    found["metadata"]["annotations"] = {
        deploy_file.HOST_ANNOTATION: host,
        **deploy_file.pairs(deployment.run.load_balancer_annotations),
    }
    return found


# ---- workloads ----


def _master(deployment: Deployment, place: MasterPlace) -> Object:
    """Master or standby. One that was a standby keeps its argument when it has taken over, and serves all the same."""
    name, sizes = f"{deployment.name}-{place.component}", deployment.sizes
    others = [one for one in deployment.masters if one.component != place.component]
    follows = others[0].seen_from(place.site.context) if others and (place.began or place.component != "master") else ""
    account = f"{deployment.name}-server" if place.component == "master" else name
    volumes = [objects.secret_volume(f"{deployment.name}-keys-master"), objects.config_volume(name)]
    mounts: list[Object] = [objects.STATE_MOUNT, objects.KEYS_MOUNT, objects.CONFIG_MOUNT]
    environment: list[Object] = []
    if deployment.lease[0] == "kubernetes":
        account = f"{deployment.name}-lease"
        volumes.append(TOKEN_VOLUME)
        mounts.append(TOKEN_MOUNT)
    if secret := deployment.run.lease_secret:
        volumes.append({**objects.secret_volume(secret), "name": "lease"})
        mounts.append({"name": "lease", "mountPath": LEASE_KEYS, "readOnly": True})
        files = zip(("CACERT", "CERT", "KEY"), objects.IDENTITY_FILES, strict=True)
        environment = [{"name": f"ETCDCTL_{key}", "value": f"{LEASE_KEYS}/{file}"} for key, file in files]
    one = objects.container(
        "master",
        deployment.run.image("master"),
        ["dips", "master", "--config", f"{CONFIG}/master.toml", *(["--standby", follows] if follows else [])],
        objects.resources(deployment.run.master_cpus, sizes.master_process_bytes),
        mounts,
        {"control": deploy_file.CONTROL_PORT, **objects.METRICS},
        environment,
        # A standby serves its metrics, and nothing else.
        **PROBES,
    )
    apart = {"affinity": _apart(deployment, "master", "standby")} if others else {}
    pod = _server_pod(deployment, account, one, volumes, terminationGracePeriodSeconds=END_S, **apart)
    # A StatefulSet never has two pods of one name: the journal has one writer, also when a node is lost.
    settings = master_settings(deployment, place)
    return _stateful_set(deployment, place.component, settings, pod, sizes.master_volume_bytes, {"replicas": 1})


def _stateful_set(
    deployment: Deployment, component: str, files: Mapping[str, str], pod: Object, volume_bytes: int, of_set: Object
) -> Object:
    """Pods with a volume each, which stays when they go; other files make other pods."""
    name = f"{deployment.name}-{component}"
    claim = objects.claim_spec(deployment, volume_bytes, "ReadWriteOnce")
    spec = {
        "serviceName": name,
        **of_set,
        "selector": {"matchLabels": objects.selector(deployment, component)},
        "template": _template(deployment, component, objects.config_hash(files), pod),
        "volumeClaimTemplates": [{"metadata": {"name": "state"}, "spec": claim}],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    }
    return made(deployment, "StatefulSet", name, component, spec=spec)


def _apart(deployment: Deployment, *components: str) -> Object:
    """No two pods of these on one node, or rather not, as the file says."""
    among = {"key": "app.kubernetes.io/component", "operator": "In", "values": list(components)}
    found: Object = {"matchLabels": objects.selector(deployment, components[0])}
    if len(components) > 1:
        found = {"matchLabels": {"app.kubernetes.io/instance": deployment.name}, "matchExpressions": [among]}
    on_node = {"labelSelector": found, "topologyKey": "kubernetes.io/hostname"}
    hard = {"requiredDuringSchedulingIgnoredDuringExecution": [on_node]}
    soft = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": on_node}]}
    return {"podAntiAffinity": hard if deployment.run.spread == "required" else soft}


def _slaves(deployment: Deployment, files: Mapping[str, str]) -> Object:
    name, sizes = f"{deployment.name}-slave", deployment.sizes
    # Of a secret with the files of many the slave's own alone.
    own_keys = (
        {"name": "keys", "mountPath": f"{KEYS}/{file}", "subPathExpr": f"s$(POD_INDEX).{file}", "readOnly": True}
        for file in objects.IDENTITY_FILES
    )
    one = objects.container(
        "slave",
        deployment.run.image("slave"),
        ["dips", "slave", "--config", f"{CONFIG}/s$(POD_INDEX).toml"],
        objects.resources(deployment.run.slave_cpus, sizes.slave_process_bytes),
        [objects.STATE_MOUNT, *own_keys, objects.CONFIG_MOUNT],
        {"data": deploy_file.DATA_PORT, **objects.METRICS},
        [POD_INDEX],
        # Metrics open when the data port serves, which is bound long before.
        **PROBES,
    )
    # No two slaves on one node, and about as many in one zone as in another: one failure takes one slave.
    across = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": objects.selector(deployment, "slave")},
    }
    pod = _server_pod(
        deployment,
        f"{deployment.name}-server",
        one,
        [objects.secret_volume(f"{deployment.name}-keys-slave"), objects.config_volume(name)],
        terminationGracePeriodSeconds=END_S,
        affinity=_apart(deployment, "slave"),
        topologySpreadConstraints=[across],
    )
    # The settings that all slaves share: one slave more must not make the others start again.
    lines = [set(text.splitlines()) for text in files.values()]
    common = {"common": "\n".join(sorted(set.intersection(*lines)))}
    of_set = {"replicas": deployment.run.slaves, "podManagementPolicy": "Parallel", "minReadySeconds": PROBE_S}
    return _stateful_set(deployment, "slave", common, pod, sizes.slave_volume_bytes, of_set)


def _server_pod(deployment: Deployment, account: str, one: Object, volumes: list[Object], **more: object) -> Object:
    """A pod of the server site, where the file wants these."""
    run = deployment.run
    where = objects.placed(run.server_node_selector, run.server_tolerate, run.server_priority_class)
    return objects.pod_spec(deployment, account, [one], volumes, **where, **more)


def _template(deployment: Deployment, component: str, hashed: str, pod: Object) -> Object:
    found = {**objects.labels(deployment, component), "app.kubernetes.io/version": deployment.run.tag}
    hashes = {"annotations": {objects.CONFIG_HASH: hashed}} if hashed else {}
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
    one = objects.container(
        "supervisor",
        deployment.run.image("master"),
        command,
        objects.resources(deployment.run.small_pod_cpus, deployment.run.small_pod_memory),
        [objects.KEYS_MOUNT, TOKEN_MOUNT],
    )
    volumes = [objects.secret_volume(f"{deployment.name}-keys-supervisor"), TOKEN_VOLUME]
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": objects.selector(deployment, "supervisor")},
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
        objects.service_account(deployment, f"{deployment.name}-lease", "lease"),
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
        name = {
            "sourceLabels": [objects.POD_NAME],
            "regex": f"{re.escape(deployment.name)}-slave-(\\d+)",
            "replacement": "s$1",
        }
    found = {"matchLabels": {**objects.selector(deployment, component), ENDPOINT_LABEL: "inside"}}
    role = "master" if component == "standby" else component
    endpoint = objects.scraped(deployment, role, name, f"{deployment.name}-keys-prometheus")
    spec = {"selector": found, "endpoints": [endpoint]}
    return objects.monitor(deployment, "ServiceMonitor", f"{deployment.name}-{component}", component, spec=spec)
