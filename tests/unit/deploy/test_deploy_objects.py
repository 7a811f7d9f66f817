"""The objects of a deployment: what every pod must never be allowed, and how the parts find each other."""

from __future__ import annotations

import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.deploy_files import BASE, EXAMPLE, ONE_CLUSTER, SMALL, example, with_keys, written
from support.documents import table
from support.repository import ROOT

from dips.core.units import parse_bytes
from dips.deploy import identities, rollout
from dips.deploy.compare import shown
from dips.deploy.deploy_file import OUR_PREFIX, OUR_VARIABLES, Deployment, read_deploy_file
from dips.deploy.objects import IDENTITY_FILES
from dips.deploy.render import folders, script
from dips.deploy.servers import master_settings, server_objects, slave_settings
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig

Object = dict[str, Any]
GUIDE = ROOT / "docs" / "deploy.md"
DEPLOYMENTS = {
    "three-sites": read_deploy_file(EXAMPLE),
    "base": read_deploy_file(BASE),
    "one-cluster": read_deploy_file(ONE_CLUSTER),
}
each_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS.keys())


def objects(deployment: Deployment) -> list[Object]:
    return [one for stage in rollout.stages(deployment) for one in stage.objects]


def pods(deployment: Deployment) -> Iterator[tuple[str, Object]]:
    """Name and pod spec of every workload."""
    for one in objects(deployment):
        spec = one.get("spec", {})
        if one["kind"] == "JobSet":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        if one["kind"] in rollout.WORKLOADS:
            yield one["metadata"]["name"], spec["template"]["spec"]


def named(deployment: Deployment, kind: str, name: str) -> Object:
    (found,) = [one for one in objects(deployment) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def test_a_cluster_that_is_evicted_has_the_time_to_push_its_last_steps(tmp_path: Path) -> None:
    text = SMALL + "[worker]\nleave_wait_s = 200.5\n[master]\ngrace_s = 9\n"
    for said, seconds in ((SMALL, 120), (text, 211 + 9 + 30)):  # 200.5 s, 10 s for the answer to Leave
        job = named(read_deploy_file(written(tmp_path, said)), "Job", "small-cluster-a")
        assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


def test_the_script_for_slurm_waits_for_its_cluster_after_a_signal() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    _, text = script(deployment, next(one for one in deployment.clusters if one.starts == "slurm"))
    body = text[text.index("srun ") :].replace("scontrol", "echo").splitlines()
    body[0] = "bash -c 'trap \"sleep 0.3; echo pushed; exit 143\" TERM; echo ready; while :; do sleep 0.1; done' &"
    # A signal that comes before either of the two shells has its trap ends that one at once.
    body.insert(next(number for number, line in enumerate(body) if line.startswith("trap ")) + 1, "echo ready")
    ended = subprocess.Popen(["bash", "-c", "\n".join(body)], stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    assert [ended.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
    ended.send_signal(signal.SIGTERM)
    assert ended.communicate(timeout=20)[0].split()[0] == "pushed", "and only then is it queued again"


@each_deployment
def test_every_pod_passes_the_restricted_profile(deployment: Deployment) -> None:
    found = list(pods(deployment))
    assert len(found) >= 5
    for name, pod in found:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] != 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert all(
            set(volume) & {"secret", "configMap", "emptyDir", "persistentVolumeClaim", "projected"}
            for volume in pod["volumes"]
        )
        for one in pod["containers"]:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert one["resources"]["requests"]["memory"] == one["resources"]["limits"]["memory"], name
            assert not any("hostPort" in port for port in one.get("ports", [])), name


@each_deployment
def test_no_pod_but_the_supervisors_has_a_token(deployment: Deployment) -> None:
    for name, pod in pods(deployment):
        assert pod["automountServiceAccountToken"] is False
        tokens = [volume for volume in pod["volumes"] if "projected" in volume]
        assert bool(tokens) == name.endswith("-supervisor"), name


@each_deployment
def test_every_pod_has_a_policy_that_closes_both_directions(deployment: Deployment) -> None:
    policies = [one["spec"] for one in objects(deployment) if one["kind"] == "NetworkPolicy"]
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress", "Egress"]
    closed = [policy["podSelector"]["matchLabels"].items() for policy in policies]
    for one in objects(deployment):
        spec = one.get("spec", {})
        if one["kind"] == "JobSet":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        if one["kind"] in rollout.WORKLOADS:
            labels = spec["template"]["metadata"]["labels"].items()
            assert any(wanted <= labels for wanted in closed), one["metadata"]["name"]


@each_deployment
def test_names_and_places_are_whole(deployment: Deployment) -> None:
    """Whatever a pod mounts or runs as is made as well, and nothing is empty that the API would drop."""
    keys = {(one["kind"], one["metadata"]["name"]) for one in objects(deployment)}
    for name, pod in pods(deployment):
        assert ("ServiceAccount", pod["serviceAccountName"]) in keys, name
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in keys, name
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in keys, name
        mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
        claims = {"state"} if ("StatefulSet", name) in keys else set()
        assert mounted <= {volume["name"] for volume in pod["volumes"]} | claims, name
    for one in objects(deployment):
        assert not list(nothings(one)), one["metadata"]["name"]
        assert len(one["metadata"]["name"]) <= 63


def nothings(value: Any, path: str = "") -> Iterator[str]:
    if value in ({}, [], None):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nothings(item, f"{path}.{key}")


@each_deployment
def test_a_selector_finds_its_own_pods_and_no_others(deployment: Deployment) -> None:
    everything = objects(deployment)
    templates = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"].items()
        for one in everything
        if one["kind"] in ("StatefulSet", "Deployment", "Job")
    }
    for one in everything:
        if one["kind"] in ("StatefulSet", "Deployment"):
            wanted = one["spec"]["selector"]["matchLabels"].items()
            assert [name for name, labels in templates.items() if wanted <= labels] == [one["metadata"]["name"]]


def test_what_master_and_slaves_are_told_is_what_they_take() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    told = tomllib.loads(master_settings(deployment)["master.toml"])["master"]
    master = MasterConfig.model_validate(told)
    assert (master.run_id, master.slaves, master.sync_every) == ("three-sites", 3, 64)
    files = slave_settings(deployment)
    assert sorted(files) == ["s0.toml", "s1.toml", "s2.toml"]
    for index, name in enumerate(sorted(files)):
        slave = SlaveConfig.model_validate(tomllib.loads(files[name])["slave"])
        assert slave.slave_id == f"s{index}"
        assert slave.advertise == f"slave-{index}.fra.example.org:29500"
        assert slave.memory_bytes == deployment.sizes.slave_memory_bytes
        assert slave.snapshots_kept == 2


def test_a_slave_gets_its_own_identity_and_no_other() -> None:
    pod = dict(pods(DEPLOYMENTS["three-sites"]))["three-sites-slave"]
    (one,) = pod["containers"]
    mounts = [mount for mount in one["volumeMounts"] if mount["name"] == "keys"]
    assert [mount["subPathExpr"] for mount in mounts] == [f"s$(POD_INDEX).{file}" for file in IDENTITY_FILES]
    assert all(mount["readOnly"] for mount in mounts)


def test_slaves_are_apart_and_leave_one_at_a_time() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    pod = dict(pods(deployment))["three-sites-slave"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "topology.kubernetes.io/zone"
    assert named(deployment, "PodDisruptionBudget", "three-sites-slave")["spec"]["maxUnavailable"] == 1


def test_volumes_outlive_everything() -> None:
    for one in server_objects(DEPLOYMENTS["three-sites"]):
        if one["kind"] == "StatefulSet":
            kept = {"whenDeleted": "Retain", "whenScaled": "Retain"}
            assert one["spec"]["persistentVolumeClaimRetentionPolicy"] == kept


def test_the_supervisor_may_end_the_slaves_pods_and_nothing_else() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    (rule,) = named(deployment, "Role", "three-sites-supervisor")["rules"]
    assert rule == {
        "apiGroups": [""],
        "resources": ["pods"],
        "resourceNames": ["three-sites-slave-0", "three-sites-slave-1", "three-sites-slave-2"],
        "verbs": ["get", "delete"],
    }
    assert [one["kind"] for one in objects(deployment) if one["kind"].endswith("RoleBinding")] == ["RoleBinding"]


def test_doors_are_open_to_the_sites_networks_only(tmp_path: Path) -> None:
    def blocks(deployment: Deployment) -> set[str]:
        policy = named(deployment, "NetworkPolicy", "three-sites-master")
        return {
            peer["ipBlock"]["cidr"] for rule in policy["spec"]["ingress"] for peer in rule["from"] if "ipBlock" in peer
        }

    assert blocks(DEPLOYMENTS["three-sites"]) == {"192.0.2.0/26", "192.0.2.64/26", "192.0.2.128/26"}
    unknown = read_deploy_file(example(tmp_path, {'cidrs = ["192.0.2.128/26"]': ""}))
    assert blocks(unknown) == {"0.0.0.0/0", "::/0"}


def test_one_slave_more_does_not_start_the_others_anew(tmp_path: Path) -> None:
    """Other addresses are nothing to them; only memory, which follows from the number, is."""
    few, many = (read_deploy_file(example(tmp_path, {"slaves = 3": f"slaves = {n}"})) for n in (3, 4))
    texts = [slave_settings(one)["s0.toml"] for one in (few, many)]
    changed = set(texts[0].splitlines()) ^ set(texts[1].splitlines())
    assert {line.split()[0] for line in changed} == {"memory_bytes"}


def test_keys_are_never_printed(tmp_path: Path) -> None:
    deployment = with_keys(written(tmp_path))
    for secret in identities.server_secrets(deployment):
        text = str(shown(secret))
        assert "sha256" in text
        assert not [value for value in secret["data"].values() if value in text]


def test_the_first_run_fits_on_a_small_machine() -> None:
    """4 processors and 8 GiB, of which Kubernetes itself has a processor and half of the memory."""
    requests = [
        (pod["containers"][0]["resources"]["requests"], one["spec"].get("replicas", one["spec"].get("completions")))
        for one in objects(DEPLOYMENTS["one-cluster"])
        if one["kind"] in rollout.WORKLOADS
        for pod in [one["spec"]["template"]["spec"]]
    ]
    assert len(requests) == 5
    cpus = sum(n * (int(one["cpu"][:-1]) / 1000 if "m" in one["cpu"] else int(one["cpu"])) for one, n in requests)
    memory = sum(n * int(parse_bytes(f"{one['memory']}B")) for one, n in requests)
    assert 2 < cpus <= 2.6
    assert 2 << 30 < memory <= 4 << 30
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in str(objects(DEPLOYMENTS["one-cluster"]))


def test_the_table_of_secrets_is_what_the_pods_mount(tmp_path: Path) -> None:
    deployment = with_keys(example(tmp_path))
    for place in (tmp_path / "keys").iterdir():
        (place / "revoked.json").write_text("[]")
    made = {
        one["metadata"]["name"]: (one["type"], set(one["data"]))
        for one in objects(deployment)
        if one["kind"] == "Secret"
    }
    told: dict[str, tuple[str, set[str]]] = {}
    for name, keys, _ in table(GUIDE, "GitOps"):
        secret = name.strip("`").replace("RUN", deployment.name)
        names = {secret.replace("CLUSTER", one.id) for one in rollout.on_kubernetes(deployment)}
        of_one = set(re.findall(r"`([\w.]+\.(?:crt|key|json))`", keys))
        of_all = {key.replace("s0", slave) for key in of_one for slave in deployment.slave_ids}
        told |= {each: ("Opaque", of_all) for each in names}
    assert told == made


def test_files_hold_no_secret() -> None:
    kinds = {
        one["kind"] for deployment in DEPLOYMENTS.values() for found in folders(deployment).values() for one in found
    }
    assert "StatefulSet" in kinds
    assert "Secret" not in kinds


def test_servers_are_placed_where_the_file_says(tmp_path: Path) -> None:
    more = """slaves = 3
digests = ["slave=sha256:DIGEST"]
server_node_selector = ["pool=servers"]
server_tolerate = ["dedicated"]
server_priority_class = "high"
load_balancer_annotations = ["service.beta.kubernetes.io/aws-load-balancer-type=nlb"]"""
    deployment = read_deploy_file(example(tmp_path, {"slaves = 3": more.replace("DIGEST", "0123456789abcdef" * 4)}))
    for name, pod in pods(deployment):
        ours = "-cluster-" not in name
        assert (pod.get("nodeSelector") == {"pool": "servers"}) is ours, name
        assert (pod.get("tolerations") == [{"key": "dedicated", "operator": "Exists"}]) is ours, name
        assert (pod.get("priorityClassName") == "high") is ours, name
    one = named(deployment, "Service", "three-sites-slave-0")
    assert one["metadata"]["annotations"] == {
        "external-dns.alpha.kubernetes.io/hostname": "slave-0.fra.example.org",
        "service.beta.kubernetes.io/aws-load-balancer-type": "nlb",
    }
    assert "annotations" not in named(deployment, "Service", "three-sites-slave")["metadata"]
    images = {name: pod["containers"][0]["image"] for name, pod in pods(deployment)}
    assert images["three-sites-slave"] == "registry.example.org/dips/dips-slave:0.1.0@sha256:" + "0123456789abcdef" * 4
    assert images["three-sites-master"] == "registry.example.org/dips/dips-master:0.1.0"


def test_an_ipv6_cluster_has_pods_that_listen_there(tmp_path: Path) -> None:
    deployment = read_deploy_file(written(tmp_path, changes={"slaves = 2": 'slaves = 2\nip_family = "ipv6"'}))
    master = MasterConfig.model_validate(tomllib.loads(master_settings(deployment)["master.toml"])["master"])
    assert (master.listen, master.metrics_listen) == ("[::]:29400", "[::]:9400")
    slave = SlaveConfig.model_validate(tomllib.loads(slave_settings(deployment)["s0.toml"])["slave"])
    assert (slave.data_host, slave.data_port, slave.metrics_listen) == ("::", 29500, "[::]:9400")
    assert variables(deployment, "small-cluster-a")["DIPS_WORKER_METRICS_LISTEN"] == "[::]:9400"
    for one in objects(deployment):
        assert "0.0.0.0:" not in str(one), one["metadata"]["name"]


# ---- clusters ----


def variables(deployment: Deployment, name: str) -> dict[str, str]:
    (one,) = dict(pods(deployment))[name]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in one["env"]}


def with_knobs(folder: Path, *lines: str) -> Deployment:
    """The small deployment, its cluster with these lines."""
    return read_deploy_file(written(folder, changes={'id = "a"': "\n".join(['id = "a"', *lines])}))


def shared_memory(deployment: Deployment) -> tuple[str, str]:
    """Size and path of the memory that the processes of a cluster's pod share; empty texts: it has no such volume."""
    pod = dict(pods(deployment))["small-cluster-a"]
    of_memory = [volume for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
    if not of_memory:
        return "", ""
    (volume,), (one,) = of_memory, pod["containers"]
    (path,) = [mount["mountPath"] for mount in one["volumeMounts"] if mount["name"] == volume["name"]]
    return volume["emptyDir"]["sizeLimit"], path


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        ((), ""),
        (("gpus = 1",), "1Gi"),
        (('parallel = "fsdp=2"', 'memory = "4 GiB"'), "512Mi"),
        (("gpus = 1", 'shm = "3 GiB"'), "3Gi"),
        (('shm = "256 MiB"',), "256Mi"),
        (("gpus = 8", "shm = 0"), ""),
    ],
)
def test_pods_with_accelerators_or_several_ranks_have_shared_memory(
    tmp_path: Path, lines: tuple[str, ...], size: str
) -> None:
    assert shared_memory(with_knobs(tmp_path, *lines)) == (size, "/dev/shm" if size else "")


def test_a_cluster_has_the_resources_variables_and_volumes_of_its_table(tmp_path: Path) -> None:
    deployment = with_knobs(
        tmp_path,
        "gpus = 8",
        'resources = ["rdma/hca=1", "ephemeral-storage=2048Mi"]',
        'env = ["NCCL_DEBUG=INFO", "EMPTY=", "QUERY=a=b"]',
        'volumes = ["models=/models:ro", "scratch=/scratch", "models=/cache"]',
        'priority_class = "training"',
        'data_claim = "corpus"',
    )
    pod = dict(pods(deployment))["small-cluster-a"]
    (one,) = pod["containers"]
    more = {"nvidia.com/gpu": "8", "rdma/hca": "1", "ephemeral-storage": "2Gi"}
    for kind in ("requests", "limits"):
        assert more.items() <= one["resources"][kind].items()
    found = variables(deployment, "small-cluster-a")
    assert {"NCCL_DEBUG": "INFO", "EMPTY": "", "QUERY": "a=b"}.items() <= found.items()
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = {
        mount["mountPath"]: (claims[mount["name"]], mount.get("readOnly", False))
        for mount in one["volumeMounts"]
        if mount["name"] in claims
    }
    assert mounts == {
        "/data": ("corpus", True),
        "/models": ("models", True),
        "/scratch": ("scratch", False),
        "/cache": ("models", False),
    }
    assert len(claims) == 3, "a claim is one volume of the pod, wherever it is mounted"
    assert pod["priorityClassName"] == "training"


def test_no_variable_that_pods_have_from_here_can_be_set_by_a_file() -> None:
    for deployment in DEPLOYMENTS.values():
        for name, _ in pods(deployment):
            if "-cluster-" in name:
                for variable in variables(deployment, name):
                    assert variable in OUR_VARIABLES or variable.startswith(OUR_PREFIX), variable


def test_a_cluster_reaches_what_its_table_says_and_nothing_more(tmp_path: Path) -> None:
    def reached(deployment: Deployment) -> list[tuple[list[str], list[int]]]:
        rules = named(deployment, "NetworkPolicy", "small-cluster-a")["spec"]["egress"]
        return [
            ([peer["ipBlock"]["cidr"] for peer in rule["to"]], [port["port"] for port in rule["ports"]])
            for rule in rules
            if all("ipBlock" in peer for peer in rule.get("to", [{}]))
        ]

    run = [(["0.0.0.0/0", "::/0"], [30400, 29400, 29500, 30500])]
    assert reached(with_knobs(tmp_path)) == run
    more = with_knobs(tmp_path, 'egress = ["192.0.2.0/24:9000", "2001:db8::/32:443", "anywhere:443"]')
    assert reached(more) == [
        *run,
        (["192.0.2.0/24"], [9000]),
        (["2001:db8::/32"], [443]),
        (["0.0.0.0/0", "::/0"], [443]),
    ]


def test_pods_in_their_nodes_network_are_permitted_and_reach_the_servers(tmp_path: Path) -> None:
    deployment = read_deploy_file(
        written(tmp_path, changes={'"node-port"': '"inside"', 'id = "a"': 'id = "a"\nhost_network = true'})
    )
    pod = dict(pods(deployment))["small-cluster-a"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    profile = "pod-security.kubernetes.io/enforce"
    names = {one["metadata"]["labels"][profile] for one in objects(deployment) if one["kind"] == "Namespace"}
    assert names == {"privileged"}
    (rule,) = [
        rule
        for rule in named(deployment, "NetworkPolicy", "small-master")["spec"]["ingress"]
        if rule["ports"][0]["port"] == 29400
    ]
    assert {"cidr": "0.0.0.0/0"} in [peer.get("ipBlock") for peer in rule["from"]], (
        "its nodes' addresses, not its labels"
    )
    plain = read_deploy_file(written(tmp_path, changes={'"node-port"': '"inside"'}))
    names = {one["metadata"]["labels"][profile] for one in objects(plain) if one["kind"] == "Namespace"}
    assert names == {"restricted"}


def test_torchrun_gets_its_nodes_and_the_names_by_which_they_find_each_other() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    pod = dict(pods(deployment))["three-sites-cluster-a"]
    (one,) = pod["containers"]
    assert one["command"][:3] == ["python", "-m", "dips.worker.torchrun"]
    assert {"--nnodes=4", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-backend=c10d"} <= set(one["command"])
    assert "--rdzv-endpoint=three-sites-cluster-a-0.three-sites-cluster-a:29600" in one["command"]
    assert "--local-addr=three-sites-cluster-a-$(JOB_COMPLETION_INDEX).three-sites-cluster-a" in one["command"]
    assert one["command"][-3:] == ["/app/train.py", "--data", "/data"]
    environment = {variable["name"]: variable.get("value") for variable in one["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    service = named(deployment, "Service", "three-sites-cluster-a")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True, "a pod is found by its name before it is ready"
    (jobset,) = dict(pods(deployment))["three-sites-cluster-b"]["containers"]
    of_set = "three-sites-cluster-b-node-0-{}.three-sites-cluster-b-nodes"
    assert f"--rdzv-endpoint={of_set.format(0)}:29600" in jobset["command"]
    assert f"--local-addr={of_set.format('$(JOB_COMPLETION_INDEX)')}" in jobset["command"]


def test_a_cluster_has_the_processes_that_its_table_says(tmp_path: Path) -> None:
    more = 'id = "a"\ntorchrun = true\nnodes = 2\nprocesses = 3\nrestarts = 0\ncommand = ["python", "-m", "mine"]'
    deployment = read_deploy_file(written(tmp_path, changes={'id = "a"': more}))
    (one,) = dict(pods(deployment))["small-cluster-a"]["containers"]
    assert {"--nproc-per-node=3", "--max-restarts=0", "--nnodes=2"} <= set(one["args"])
    assert one["args"][-2:] == ["-m", "mine"]
    assert deployment.clusters[0].ranks == 6
    alone = read_deploy_file(written(tmp_path, changes={'id = "a"': more.replace("nodes = 2\n", "")}))
    (one,) = dict(pods(alone))["small-cluster-a"]["containers"]
    assert "--standalone" in one["args"]


def test_a_program_of_ones_own_gets_the_settings_of_the_table_worker(tmp_path: Path) -> None:
    own = 'id = "a"\ncommand = ["python", "mine.py"]\nenv = ["MINE=1"]'
    table = '[worker]\nwire_dtype = "int8"\nresume_required = true\n\n[[clusters]]'
    found = {}
    for name, one in (("own", own), ("trained", 'id = "a"')):
        file = written(tmp_path, changes={'id = "a"': one, "[[clusters]]": table})
        (container,) = dict(pods(read_deploy_file(file)))["small-cluster-a"]["containers"]
        found[name] = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert found["own"]["DIPS_WORKER_WIRE_DTYPE"] == "int8"
    assert found["own"]["DIPS_WORKER_RESUME_REQUIRED"] == "true"
    assert found["own"]["MINE"] == "1"
    assert "DIPS_WORKER_WIRE_DTYPE" not in found["trained"], "dips train reads its file"


def test_ranks_of_dips_train_are_divided_among_the_nodes(tmp_path: Path) -> None:
    deployment = read_deploy_file(
        written(tmp_path, changes={'id = "a"': 'id = "a"\nnodes = 2\nparallel = "fsdp=2,data=2"'})
    )
    (one,) = dict(pods(deployment))["small-cluster-a"]["containers"]
    assert {"--nproc-per-node=2", "--nnodes=2"} <= set(one["args"])
    program = one["args"][one["args"].index("-m", 3) :]
    settings = "/etc/dips/config/cluster.toml"
    assert program == ["-m", "dips.cli", "train", "--config", settings, "--parallel", "fsdp=2,data=2"]
    assert deployment.clusters[0].ranks == 4


def test_the_pods_of_one_cluster_may_talk_to_each_other_and_to_no_other_clusters() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    for one in (named(deployment, "NetworkPolicy", f"three-sites-cluster-{name}") for name in "ab"):
        own = [{"podSelector": {"matchLabels": one["spec"]["podSelector"]["matchLabels"]}}]
        assert own[0]["podSelector"]["matchLabels"]["dips-cluster"] in ("a", "b")
        among = [rule for rule in one["spec"]["ingress"] if rule["from"] == own]
        among += [rule for rule in one["spec"]["egress"] if rule.get("to") == own]
        assert len(among) == 2
        for rule in among:  # torchrun's port, and those that gloo and NCCL choose
            (ports,) = rule["ports"]
            assert ports["port"] <= 29600 <= ports["endPort"] == 65535
        pods_in = [peer for rule in one["spec"]["ingress"] for peer in rule["from"] if "podSelector" in peer]
        assert pods_in == own


def test_a_cluster_in_a_queue_waits_for_kueue() -> None:
    job = named(DEPLOYMENTS["three-sites"], "Job", "three-sites-cluster-a")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["suspend"] is True
    alone = named(DEPLOYMENTS["base"], "Job", "dips-cluster-job")
    assert alone["spec"]["suspend"] is False
    assert "kueue.x-k8s.io/queue-name" not in alone["metadata"]["labels"]


def test_a_wrong_setting_ends_a_job_and_a_kill_does_not() -> None:
    rules = named(DEPLOYMENTS["base"], "Job", "dips-cluster-job")["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "cluster", "operator": "In", "values": [2]},
    }
    assert named(DEPLOYMENTS["base"], "Job", "dips-cluster-job")["spec"]["backoffLimit"] > 1000
    (rule,) = named(DEPLOYMENTS["base"], "JobSet", "dips-cluster-jobset")["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_a_name_can_never_be_read_as_a_command(tmp_path: Path) -> None:
    changes = {'"--data", "/scratch/corpus"]': '"$(id)", "; rm x", "`id`"]'}
    deployment = read_deploy_file(example(tmp_path, changes))
    _, text = script(deployment, deployment.clusters[2])
    assert """'"'"'$(id)'"'"' '"'"'; rm x'"'"' '"'"'`id`'"'"'""" in text


def test_the_rendered_namespace_permits_what_any_context_needs(tmp_path: Path) -> None:
    claim = 'data_claim = "corpus"'  # of cluster a, whose context is not the last
    for more, profile in (("", "restricted"), ("\nhost_network = true", "privileged")):
        (namespace,) = folders(read_deploy_file(example(tmp_path, {claim: claim + more})))["namespace"]
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == profile
