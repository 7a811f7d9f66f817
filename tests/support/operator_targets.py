"""The targets that a Prometheus would have of a deployment's monitors, rebuilt by hand from what the Prometheus
operator, Kubernetes and Prometheus document: no cluster and no operator is needed.

`discovered` has the meta labels that Prometheus' service discovery gives to each port of each pod; `scrape_config` is
what the operator makes of a monitor; `relabelled` is what Prometheus makes of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Labels = dict[str, str]
META = "__meta_kubernetes"


@dataclass(frozen=True)
class Pod:
    name: str
    namespace: str
    labels: Mapping[str, str]
    containers: Mapping[str, Mapping[str, int]]


def pods(objects: Iterable[Object]) -> Iterator[Pod]:
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        match one["kind"]:
            case "StatefulSet":
                for index in range(spec["replicas"]):
                    yield _pod(one, spec, f"{name}-{index}", {"apps.kubernetes.io/pod-index": str(index)})
            case "Deployment":
                yield _pod(one, spec, f"{name}-7d4b9c6f5-x2x7p", {"pod-template-hash": "7d4b9c6f5"})
            case "Job":
                yield from _of_job(one, spec, name)
            case "JobSet":
                for job in spec["replicatedJobs"]:
                    for index in range(job["replicas"]):
                        yield from _of_job(one, job["template"]["spec"], f"{name}-{job['name']}-{index}")


def _of_job(one: Object, spec: Object, name: str) -> Iterator[Pod]:
    for index in range(spec["completions"]):
        yield _pod(one, spec, f"{name}-{index}-k9d2w", {"batch.kubernetes.io/job-completion-index": str(index)})


def _pod(one: Object, spec: Object, name: str, more: Labels) -> Pod:
    template = spec["template"]
    containers = {
        container["name"]: {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for container in template["spec"]["containers"]
    }
    return Pod(name, one["metadata"]["namespace"], {**template["metadata"]["labels"], **more}, containers)


def discovered(kind: str, objects: Sequence[Object]) -> list[Labels]:
    """The targets before any relabelling: ports of Services for a ServiceMonitor, ports of pods for a PodMonitor."""
    running = list(pods(objects))
    if kind == "PodMonitor":
        return [_of_port(pod, container, port) for pod in running for container, port in _ports(pod)]
    found = []
    for service in (one for one in objects if one["kind"] == "Service"):
        wanted = service["spec"]["selector"].items()
        ports = {port["targetPort"]: port["name"] for port in service["spec"]["ports"]}
        for pod in (pod for pod in running if wanted <= pod.labels.items()):
            for container, port in _ports(pod):
                if port in ports:
                    found.append(
                        {
                            **_of_port(pod, container, port),
                            f"{META}_service_name": service["metadata"]["name"],
                            f"{META}_endpoint_port_name": ports[port],
                            f"{META}_endpoint_address_target_kind": "Pod",
                            f"{META}_endpoint_address_target_name": pod.name,
                            **_label_labels("service", service["metadata"]["labels"]),
                        }
                    )
    return found


def _ports(pod: Pod) -> Iterator[tuple[str, str]]:
    return ((container, port) for container, ports in pod.containers.items() for port in ports)


def _of_port(pod: Pod, container: str, port: str) -> Labels:
    return {
        "__address__": f"10.0.0.1:{pod.containers[container][port]}",
        f"{META}_namespace": pod.namespace,
        f"{META}_pod_name": pod.name,
        f"{META}_pod_phase": "Running",
        f"{META}_pod_container_name": container,
        f"{META}_pod_container_port_name": port,
        **_label_labels("pod", pod.labels),
    }


def _label_labels(of: str, labels: Mapping[str, str]) -> Labels:
    names = {re.sub(r"[^A-Za-z0-9_]", "_", key): value for key, value in labels.items()}
    present = {f"{META}_{of}_labelpresent_{name}": "true" for name in names}
    return {**{f"{META}_{of}_label_{name}": value for name, value in names.items()}, **present}


def scrape_config(monitor: Object) -> Object:
    """What the operator makes of a monitor with one endpoint, but for service discovery and TLS."""
    kind, spec, metadata = monitor["kind"], monitor["spec"], monitor["metadata"]
    (endpoint,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
    of, port = ("service", "endpoint_port_name") if kind == "ServiceMonitor" else ("pod", "pod_container_port_name")
    configs: list[Object] = [{"source_labels": ["job"], "target_label": "__tmp_prometheus_job_name"}]
    configs.append(_kept("pod_phase", "Running|Pending|Unknown"))
    configs += [
        _kept(f"{of}_label_{re.sub(r'[^A-Za-z0-9_]', '_', key)}", re.escape(value))
        for key, value in spec["selector"]["matchLabels"].items()
    ]
    configs.append(_kept(port, endpoint["port"]))
    configs.append(_copied("namespace", "namespace"))
    if kind == "ServiceMonitor":
        configs += [_copied("service_name", "service"), _copied("service_name", "job")]
    else:
        configs.append({"target_label": "job", "replacement": f"{metadata['namespace']}/{metadata['name']}"})
    configs += [_copied("pod_name", "pod"), _copied("pod_container_name", "container")]
    configs.append({"target_label": "endpoint", "replacement": endpoint["port"]})
    configs += [_of_prometheus(one) for one in endpoint["relabelings"]]
    return {
        "job_name": f"{kind[0].lower()}{kind[1:]}/{metadata['namespace']}/{metadata['name']}/0",
        "scheme": endpoint["scheme"],
        "scrape_interval": endpoint["interval"],
        "relabel_configs": configs,
    }


def _kept(source: str, regex: str) -> Object:
    return {"source_labels": [f"{META}_{source}"], "regex": regex, "action": "keep"}


def _copied(source: str, target: str) -> Object:
    return {"source_labels": [f"{META}_{source}"], "target_label": target}


def _of_prometheus(relabeling: Object) -> Object:
    """A relabelling as Prometheus spells it."""
    return {re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", key): value for key, value in relabeling.items()}


def relabelled(labels: Labels, scrape_config: Object) -> Labels | None:
    """The labels of a target after Prometheus' relabelling; None: it is dropped."""
    found = {"job": scrape_config["job_name"], **labels}
    for config in scrape_config["relabel_configs"]:
        text = ";".join(found.get(name, "") for name in config.get("source_labels", []))
        match = re.fullmatch(config.get("regex", "(.*)"), text, re.DOTALL)
        match config.get("action", "replace"):
            case "keep":
                if not match:
                    return None
            case "replace":
                if match:
                    value = match.expand(re.sub(r"\$(\d+)", r"\\g<\1>", config.get("replacement", "$1")))
                    found[config["target_label"]] = value
            case other:
                raise NotImplementedError(f"the action {other} is not rebuilt here")
    found.setdefault("instance", found["__address__"])
    return {name: value for name, value in found.items() if not name.startswith("__") and value}


def live_job(objects: Sequence[Object], kind: str, name: str, address: str, in_clear: bool = False) -> Object:
    """A job that scrapes a real process at `address` as if it were the pod that serves the metrics of `name`."""
    for monitor in (one for one in objects if one["kind"] == kind):
        config = scrape_config(monitor)
        for labels in discovered(kind, objects):
            if (relabelled(labels, config) or {}).get("name") == name:
                tls = {"ca_file": "keys/ca.crt", "cert_file": "keys/tls.crt", "key_file": "keys/tls.key"}
                (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
                tls["server_name"] = endpoint["tlsConfig"]["serverName"]
                del labels["__address__"]
                static = {"static_configs": [{"targets": [address], "labels": labels}]}
                return {**config, **static, **({"scheme": "http"} if in_clear else {"tls_config": tls})}
    raise AssertionError(f"no {kind} has a target of the name {name}")


def targets(monitor: Object, objects: Sequence[Object]) -> list[Labels]:
    config = scrape_config(monitor)
    found = (relabelled(one, config) for one in discovered(monitor["kind"], objects))
    return [one for one in found if one is not None]
