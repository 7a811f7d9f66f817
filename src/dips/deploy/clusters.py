"""The objects of a training cluster on Kubernetes: a Job or a JobSet, and what it needs. Pure."""

from __future__ import annotations

import json
import math

from dips.core.config import environment_name
from dips.deploy import deploy_file, objects
from dips.deploy.deploy_file import CONFIG, KEYS, STATE, DeployedClusterKnobs, Deployment
from dips.deploy.objects import Object, made
from dips.worker.config import SECTION
from dips.worker.torchrun import FOR_SRUN

RENDEZVOUS_PORT = 29600
JOIN_S, STORE_S = 3600, 120
"""For all nodes of a cluster to be there, which may have to be made first, and for one answer of the first of them."""

RETRIES = 100_000
"""A cluster whose process dies comes back as a new incarnation, as often as needed; it ends when the run does."""

CONFIG_ERROR = 2
"""Exit code of a setting that a person must change (dips.core.errors.ConfigError): starting again does not help.

NAME_TAKEN_EXIT is not treated so: on Kubernetes the process that has the name is usually an earlier pod of the cluster
which still pushes its last steps, or whose node is unreachable. The Job tries again, with growing pauses, until it is
gone.
"""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
END_S = 120
"""For the push of the last steps and its verdict; more where the settings allow a cluster more."""

END_MARGIN_S = 30
"""For the step under way and for the program's own end."""

TORCHRUN_END_S = 10
"""Left of the time to end when torchrun kills processes that have not ended by themselves."""


def cluster_objects(deployment: Deployment, cluster: DeployedClusterKnobs) -> list[Object]:
    """Everything of one cluster but its secret, in the order in which it is made."""
    files = cluster_settings(deployment, cluster)
    name = object_name(deployment, cluster)
    volume = objects.claim_spec(deployment, cluster.checkpoint_volume, cluster.checkpoint_access)
    claim = made(deployment, "PersistentVolumeClaim", name, "cluster", cluster.id, spec=volume)
    return [
        objects.namespace(deployment, deployment.site(cluster.site).context),
        objects.service_account(deployment, name, "cluster", cluster.id),
        made(deployment, "ConfigMap", name, "cluster", cluster.id, data=files),
        _service(deployment, cluster),
        objects.cluster_policy(deployment, cluster),
        *([claim] if cluster.checkpoint_volume else []),
        workload(deployment, cluster, objects.config_hash(files)),
        *([_pod_monitor(deployment, cluster)] if deployment.monitored(deployment.site(cluster.site)) else []),
    ]


def object_name(deployment: Deployment, cluster: DeployedClusterKnobs) -> str:
    return f"{deployment.name}-cluster-{cluster.id}"


def cluster_settings(deployment: Deployment, cluster: DeployedClusterKnobs, state: str = STATE) -> dict[str, str]:
    """The settings file of one cluster; `dips train` reads it, and so may a program of one's own."""
    tables = deployment.tables
    ours: dict[str, object] = {
        "run_id": deployment.name,
        "cluster_id": cluster.id,
        "master": deployment.master_address,
    }
    if cluster.checkpoint_volume:
        ours |= {"checkpoint_dir": f"{state}/checkpoints", "resume": True}
    text = objects.toml("worker", {**tables["worker"], **ours})
    return {"cluster.toml": text + ("\n" + objects.toml("train", tables["train"]) if tables["train"] else "")}


def command(deployment: Deployment, cluster: DeployedClusterKnobs, settings: str, first: str, own: str) -> list[str]:
    """The command that one node runs. first, own: names of the cluster's first node and of this one, by which the nodes
    find each other.
    """
    words = list(cluster.command) or ["dips", "train", "--config", settings]
    if cluster.parallel:
        words = ["-m", "dips.cli", *words[1:], "--parallel", cluster.parallel]
    if not cluster.by_torchrun:
        return words
    ways = [f"--nproc-per-node={cluster.node_ranks}", f"--max-restarts={cluster.restarts}"]
    if cluster.nodes == 1:
        ways.append("--standalone")
    else:
        # c10d, not the default: nodes that lost one wait for its successor and begin again with it. A new node of the
        # default's would join the old attempt, which waits for ever.
        ways += [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{RENDEZVOUS_PORT}"]
        ways += [f"--rdzv-id={object_name(deployment, cluster)}", f"--local-addr={own}"]
        ways.append(f"--rdzv-conf=join_timeout={JOIN_S},read_timeout={STORE_S}")
    if cluster.starts == "slurm" and cluster.nodes > 1:
        ways.insert(0, FOR_SRUN)
    # torchrun brings the interpreter itself.
    return ["python", "-m", "dips.worker.torchrun", *ways, *(words[1:] if words[0] in ("python", "python3") else words)]


def node_name(deployment: Deployment, cluster: DeployedClusterKnobs, index: str) -> str:
    """The name at which a pod of the cluster is found by the others. index: of the pod, or a variable's name."""
    name = object_name(deployment, cluster)
    return f"{name}-{index}.{name}" if cluster.starts == "job" else f"{name}-node-0-{index}.{name}-nodes"


def workload(deployment: Deployment, cluster: DeployedClusterKnobs, hashed: str) -> Object:
    name = object_name(deployment, cluster)
    spec = _job_spec(deployment, cluster, hashed)
    if cluster.starts == "job":
        found = made(deployment, "Job", name, "cluster", cluster.id, spec=spec)
    else:
        del spec["suspend"]
        jobs = [{"name": "node", "replicas": 1, "template": {"spec": spec}}]
        # The JobSet makes a service of that name itself.
        network = {"enableDNSHostnames": True, "subdomain": f"{name}-nodes"}
        # A Job that failed by its own policy failed for a wrong setting: the set fails with it.
        ends = [{"name": "wrong_setting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
        policy = {"maxRestarts": RETRIES, "rules": ends}
        of_set = {"network": network, "failurePolicy": policy, "replicatedJobs": jobs}
        suspended = {**of_set, "suspend": bool(cluster.queue)}
        found = made(deployment, "JobSet", name, "cluster", cluster.id, spec=suspended)
    if cluster.queue:
        found["metadata"]["labels"][QUEUE_LABEL] = cluster.queue
    return found


def _job_spec(deployment: Deployment, cluster: DeployedClusterKnobs, hashed: str) -> Object:
    # A program with an image of its own does not change with our images, and another label would start it again.
    version = {} if cluster.image else {"app.kubernetes.io/version": deployment.run.tag}
    found = {**objects.labels(deployment, "cluster", cluster.id), **version}
    wrong_setting = {"containerName": "cluster", "operator": "In", "values": [CONFIG_ERROR]}
    moved = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        # Kueue starts it when there is room; until then nothing runs.
        "suspend": bool(cluster.queue),
        "completionMode": "Indexed",
        "completions": cluster.nodes,
        "parallelism": cluster.nodes,
        "backoffLimit": RETRIES,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": wrong_setting},
                {"action": "Ignore", "onPodConditions": moved},
            ]
        },
        "template": {
            "metadata": {"labels": found, "annotations": {objects.CONFIG_HASH: hashed}},
            "spec": _pod(deployment, cluster),
        },
    }


def _pod(deployment: Deployment, cluster: DeployedClusterKnobs) -> Object:
    name = object_name(deployment, cluster)
    first, own = (node_name(deployment, cluster, index) for index in ("0", "$(JOB_COMPLETION_INDEX)"))
    volumes, mounts = _volumes(deployment, cluster)
    extra = {cluster.gpu_resource: str(cluster.gpus)} if cluster.gpus else {}
    extra |= {name: deploy_file.canonical(amount) for name, amount in deploy_file.pairs(cluster.resources).items()}
    one = objects.container(
        "cluster",
        cluster.image or deployment.run.image("worker"),
        command(deployment, cluster, f"{CONFIG}/cluster.toml", first, own),
        objects.resources(cluster.cpus, cluster.memory, extra),
        mounts,
        objects.METRICS,
        _environment(deployment, cluster),
    )
    if cluster.image:  # whatever its entry point does
        one["command"] = one.pop("args")
    more: Object = {"restartPolicy": "Never", "terminationGracePeriodSeconds": end_s(deployment)}
    if cluster.starts == "job":
        more["subdomain"] = name
    if cluster.host_network:
        # Names are looked up as in other pods: those of the master and of the cluster's other pods are needed.
        more |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    more |= objects.placed(cluster.node_selector, cluster.tolerate, cluster.priority_class)
    return objects.pod_spec(deployment, name, [one], volumes, **more)


def end_s(deployment: Deployment) -> int:
    """Seconds from SIGTERM to SIGKILL: no cluster is killed while it still waits for its last push."""
    return max(END_S, math.ceil(deployment.leaving_s) + END_MARGIN_S)


def _environment(deployment: Deployment, cluster: DeployedClusterKnobs) -> list[Object]:
    """What a program of one's own reads, and where the metrics are; the index is the Job's."""
    variables = [{"name": key, "value": value} for key, value in environment(deployment, cluster, KEYS).items()]
    # Of several ranks the leader alone listens.
    variables.append(
        {"name": "DIPS_WORKER_METRICS_LISTEN", "value": objects.listening(deployment, deploy_file.METRICS_PORT)}
    )
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    return [*variables, {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": index}}]


def environment(deployment: Deployment, cluster: DeployedClusterKnobs, keys: str) -> dict[str, str]:
    """The variables that make a program a cluster of the run; for one's own also what [worker] says, which `dips train`
    reads from its settings file."""
    found = {
        "DIPS_MASTER": deployment.master_address,
        "DIPS_CLUSTER": cluster.id,
        "DIPS_RUN": deployment.name,
        "DIPS_KEYS": keys,
    }
    if cluster.command:
        given = deployment.tables["worker"].items()
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given}
        found |= {environment_name(SECTION, key): text for key, text in texts.items()}
    if cluster.by_torchrun:  # it would kill its processes after 30 s
        found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(end_s(deployment) - TORCHRUN_END_S)
    return found | deploy_file.pairs(cluster.env)


def _volumes(deployment: Deployment, cluster: DeployedClusterKnobs) -> tuple[list[Object], list[Object]]:
    name = object_name(deployment, cluster)
    volumes = [objects.secret_volume(f"{deployment.name}-keys-{cluster.id}"), objects.config_volume(name)]
    mounts = [objects.KEYS_MOUNT, objects.CONFIG_MOUNT]
    if cluster.checkpoint_volume:
        volumes.append({"name": "state", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": "state", "mountPath": STATE})
    if cluster.data_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": cluster.data_claim, "readOnly": True}})
        mounts.append({"name": "data", "mountPath": "/data", "readOnly": True})
    for number, claim in enumerate(dict.fromkeys(mount.claim for mount in cluster.mounts)):
        of_claim = [mount for mount in cluster.mounts if mount.claim == claim]
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        for mount in of_claim:
            read_only = {"readOnly": True} if mount.read_only else {}
            mounts.append({"name": f"claim-{number}", "mountPath": mount.path, **read_only})
    if cluster.shm_bytes:
        # The runtime's is too small for NCCL and for loaders. Pages that are written count as the pod's memory.
        in_memory = {"medium": "Memory", "sizeLimit": deploy_file.quantity(cluster.shm_bytes)}
        volumes.append({"name": "shm", "emptyDir": in_memory})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return volumes, mounts


def _service(deployment: Deployment, cluster: DeployedClusterKnobs) -> Object:
    """Names for the nodes, so that they find the first of them; and the metrics, for a Prometheus without operator."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": objects.selector(deployment, "cluster", cluster.id),
        "ports": objects.service_ports(objects.METRICS),
    }
    return made(deployment, "Service", object_name(deployment, cluster), "cluster", cluster.id, spec=spec)


def _pod_monitor(deployment: Deployment, cluster: DeployedClusterKnobs) -> Object:
    """For the leader's pod alone, which is the first one: no other pod of the cluster serves metrics.

    They are read with the cluster's own keys: Prometheus' keys are an operator's, which no training site should have.
    """
    leader = {**objects.selector(deployment, "cluster", cluster.id), INDEX_LABEL: "0"}
    secret = f"{deployment.name}-keys-{cluster.id}"
    endpoint = objects.scraped(deployment, "cluster", {"replacement": cluster.id}, secret)
    spec = {"selector": {"matchLabels": leader}, "podMetricsEndpoints": [endpoint]}
    return objects.monitor(deployment, "PodMonitor", object_name(deployment, cluster), "cluster", cluster.id, spec=spec)
