"""The network policies of a deployment: which pods and networks may connect to which. Pure.

Each policy names both directions, so that what it does not name is closed. Keys are what authenticates; these only
keep unknown peers away from the ports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dips.deploy.deploy_file import CONTROL_PORT, DATA_PORT, METRICS_PORT, Deployment
from dips.deploy.objects import Object, made, selector

ANYWHERE = "0.0.0.0/0"
API_PORTS = (443, 6443)
"""Where API servers listen, inside and behind the service `kubernetes`."""

RENDEZVOUS_PORTS = (1024, 65535)
"""Between a cluster's own nodes: torchrun's and the collectives' ports are not known beforehand."""


def server_policies(deployment: Deployment) -> list[Object]:
    clusters = _clusters(deployment)
    inner = _pods(selector(deployment, "slave"), selector(deployment, "supervisor"))
    to_master = _to(_pods(selector(deployment, "master")), _tcp(CONTROL_PORT))
    slaves = _pods(selector(deployment, "slave"))
    return [
        _policy(
            deployment,
            "master",
            [_from([*inner, *clusters], _tcp(CONTROL_PORT)), _metrics(deployment)],
            [_names()],
        ),
        _policy(
            deployment,
            "slave",
            [_from([*slaves, *clusters], _tcp(DATA_PORT)), _metrics(deployment)],
            # Slaves find each other at the addresses that clusters use, for a RESHARD.
            [_names(), to_master, _to(slaves, _tcp(DATA_PORT)), _to([_block(ANYWHERE)], _data_ports(deployment))],
        ),
        _policy(
            deployment,
            "supervisor",
            [],
            [_names(), to_master, _to([_block(ANYWHERE)], [port for n in API_PORTS for port in _tcp(n)])],
        ),
    ]


def cluster_policy(deployment: Deployment, cluster: str) -> Object:
    """Allows a cluster's pods to connect to master and slaves, and to each other."""
    own = _pods(selector(deployment, "cluster", cluster))
    first, last = RENDEZVOUS_PORTS
    among = [{"protocol": "TCP", "port": first, "endPort": last}]
    _, _, port = deployment.master_address.rpartition(":")
    endpoints = [*_tcp(int(port)), *_tcp(CONTROL_PORT), *_tcp(DATA_PORT), *_data_ports(deployment)]
    return _policy(
        deployment,
        "cluster",
        [_from(own, among), _metrics(deployment)],
        [_names(), _to([_block(ANYWHERE)], _once(endpoints)), _to(own, among)],
        cluster,
    )


def _clusters(deployment: Deployment) -> list[Object]:
    """From where clusters come: their pods in this namespace, and the networks of the sites.

    A site that names no networks may be anywhere; a node port hides where a connection comes from.
    """
    found: list[Object] = _pods({**selector(deployment, "cluster")})
    if deployment.run.expose == "inside":
        return found
    sites = [deployment.site(cluster.site) for cluster in deployment.clusters]
    away = [site for site in sites if site.context != deployment.server_site.context]
    if deployment.run.expose == "node-port" or any(not site.cidrs for site in away):
        return [*found, _block(ANYWHERE)]
    return [*found, *(_block(cidr) for cidr in sorted({cidr for site in sites for cidr in site.cidrs}))]


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


def _names() -> Object:
    """Names are looked up wherever the cluster's DNS is."""
    return {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


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


def _tcp(port: int) -> list[Object]:
    return [{"protocol": "TCP", "port": port}]
