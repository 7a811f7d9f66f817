"""The objects of a deployment: what every pod must never be allowed, and how the parts find each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_files import BASE, EXAMPLE, ONE_CLUSTER, example, with_keys, written
from support.documents import table
from support.repository import ROOT

from dips.core.units import parse_bytes
from dips.deploy import rollout
from dips.deploy.deploy_file import OUR_PREFIX, OUR_VARIABLES, STATE, Deployment, read_deploy_file
from dips.deploy.move import carrier, volumes
from dips.deploy.render import folders, script
from dips.deploy.servers import master_settings, slave_settings
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.worker.torchrun import FIRST_SIGNAL

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


def templates(deployment: Deployment) -> Iterator[tuple[str, Object]]:
    """Name and pod template of every workload."""
    for one in objects(deployment):
        spec = one.get("spec", {})
        if one["kind"] == "JobSet":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        if one["kind"] in rollout.WORKLOADS:
            yield one["metadata"]["name"], spec["template"]


def pods(deployment: Deployment) -> Iterator[tuple[str, Object]]:
    return ((name, template["spec"]) for name, template in templates(deployment))


def named(deployment: Deployment, kind: str, name: str) -> Object:
    (found,) = [one for one in objects(deployment) if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


AGAIN, AGAIN_AT_ONCE = "requeue Incomplete 7", "requeue 7"
"""Only a job that runs; and also one that is being ended."""

STAND_INS = {
    # As Slurm's: a TERM to it kills its tasks.
    "srun": """while [ "$1" != bash ]; do shift; done; "$@" & trap 'kill -KILL $!; exit 137' TERM; wait $!""",
    "scancel": 'kill -TERM "$(cat task)"',
    "scontrol": 'case "$1 $2" in "show job") cat facts ;; "show "*) echo n1 ;; *) echo "$@" ;; esac',
    # The task: torchrun with a trainer.
    "python": """echo $$ > task; trap 'sleep 0.3; echo pushed; exit 143' TERM; echo ready
        until [ -e code ]; do sleep 0.05; done; exit "$(cat code)" """,
}


@pytest.fixture
def slurm_job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The script of a cluster of two nodes, as it runs on the first of them, with its task at work in tmp_path."""
    deployment = DEPLOYMENTS["three-sites"]
    _, text = script(deployment, next(one for one in deployment.clusters if one.starts == "slurm"))
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "facts").write_text("JobState=RUNNING Reason=None PreemptTime=None")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    environment["SLURMD_NODENAME"] = "n1"
    with subprocess.Popen(
        ["bash", "-c", text], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, start_new_session=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        yield job
        said_by(job)


def said_by(job: subprocess.Popen[str]) -> list[str]:
    """What it has said when it ends; nothing of it runs on."""
    job.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    assert job.stdout is not None
    return job.stdout.read().splitlines()


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        ("USR1", "", ["pushed", AGAIN]),  # before the time limit
        ("TERM", "", ["pushed"]),  # cancelled
        ("TERM", "JobState=COMPLETING Reason=TimeLimit", [AGAIN_AT_ONCE, "pushed"]),
        ("TERM", "PreemptEligibleTime=2026-11-29T22:58:56 PreemptTime=2026-11-29T22:58:57", [AGAIN_AT_ONCE, "pushed"]),
        ("TERM", "PreemptEligibleTime=2026-11-29T22:58:56 PreemptTime=None", ["pushed"]),
    ],
)
def test_after_a_signal_the_job_of_slurm_pushes_and_is_queued_again_unless_it_was_cancelled(
    slurm_job: subprocess.Popen[str], tmp_path: Path, name: str, facts: str, says: list[str]
) -> None:
    (tmp_path / "facts").write_text(facts)
    slurm_job.send_signal(signal.Signals[f"SIG{name}"])
    assert said_by(slurm_job) == says
    assert slurm_job.returncode == 143


@pytest.mark.parametrize(
    ("code", "told", "ends", "again"),
    [
        (0, 0, 0, False),
        (2, 0, 2, False),
        (8, 0, 8, False),
        (9, 0, 9, False),
        (202, 0, 2, False),
        (208, 0, 8, False),
        (209, 0, 9, False),
        (6, 0, 6, True),
        (137, 0, 137, True),
        (137, 2, 2, False),  # one node was killed, and another had said why it ended
        (137, 9, 9, False),
    ],
)
def test_a_job_of_slurm_is_queued_again_unless_its_cluster_is_done_or_a_person_must_act(
    slurm_job: subprocess.Popen[str], tmp_path: Path, code: int, told: int, ends: int, again: bool
) -> None:
    if told:
        slurm_job.send_signal(FIRST_SIGNAL + told)
    (tmp_path / "code.new").write_text(str(code))
    (tmp_path / "code.new").rename(tmp_path / "code")
    assert said_by(slurm_job) == [AGAIN] * again
    assert slurm_job.returncode == ends


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
        assert pod["automountServiceAccountToken"] is False
        tokens = [volume for volume in pod["volumes"] if "projected" in volume]
        assert bool(tokens) == name.endswith("-supervisor"), "no other pod may ask the API server"
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
            variables = {variable["name"]: variable.get("value") for variable in one["env"]}
            ends_s = int(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 0)
            assert not ends_s or ends_s < pod["terminationGracePeriodSeconds"], "torchrun outlives its pod"


@each_deployment
def test_every_pod_has_a_policy_that_closes_both_directions(deployment: Deployment) -> None:
    policies = [one["spec"] for one in objects(deployment) if one["kind"] == "NetworkPolicy"]
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress", "Egress"]
    closed = [policy["podSelector"]["matchLabels"].items() for policy in policies]
    for name, template in templates(deployment):
        labels = template["metadata"]["labels"].items()
        assert any(wanted <= labels for wanted in closed), name


def test_what_master_and_slaves_are_told_is_what_they_take() -> None:
    deployment = DEPLOYMENTS["three-sites"]
    told = tomllib.loads(master_settings(deployment, deployment.masters[0])["master.toml"])["master"]
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


def with_standby(folder: Path, lease: str = "", more: str = "") -> Deployment:
    changes = {"slaves = 2": f'slaves = 2\nstandby = "here"\n{more}'}
    return read_deploy_file(
        written(folder, changes=changes | ({"[model]": f"[master]\n{lease}\n[model]"} if lease else {}))
    )


def test_after_each_take_over_one_pod_is_as_it_was_and_the_other_follows_it_in_an_empty_directory(
    tmp_path: Path,
) -> None:
    seen = []
    for n in range(4):
        deployment = with_standby(tmp_path, more=f"take_overs = {n}")
        row = []
        for place in deployment.masters:
            told = tomllib.loads(master_settings(deployment, place)["master.toml"])["master"]
            spec = named(deployment, "StatefulSet", f"small-{place.component}")["spec"]["template"]["spec"]
            row.append((told["directory"].removeprefix(STATE), spec["containers"][0]["args"][4:]))
            assert told["journal_replicas"] == 1
        seen.append(row)
    first, second = ["--standby", "small-standby:29400"], ["--standby", "small-master:29400"]
    assert seen == [
        [("/master", []), ("/master", second)],
        [("/master-1", first), ("/master", second)],
        [("/master-1", first), ("/master-2", second)],
        [("/master-3", first), ("/master-2", second)],
    ]


def test_master_and_standby_alone_may_change_their_lease_and_nothing_else(tmp_path: Path) -> None:
    deployment = with_standby(tmp_path, "lease = 'kubernetes:dips/small-master'")
    role = named(deployment, "Role", "small-lease")
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in role["rules"]] == [
        (["leases"], ["small-master"], ["get", "patch"])
    ]
    assert named(deployment, "RoleBinding", "small-lease")["subjects"][0]["name"] == "small-lease"
    assert named(deployment, "Lease", "small-master")["metadata"]["labels"]["app.kubernetes.io/instance"] == "small"
    tokens = {name for name, pod in pods(deployment) if "serviceAccountToken" in str(pod["volumes"])}
    assert tokens == {"small-master", "small-standby", "small-supervisor"}
    assert {pod["serviceAccountName"] for name, pod in pods(deployment) if name[6:] in ("master", "standby")} == {
        "small-lease"
    }


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


def test_a_new_volume_of_a_tiny_model_raises_no_alarm_of_its_disk() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text())["groups"]
    [alarm] = [rule for group in rules for rule in group["rules"] if rule["alert"] == "DipsDiskLow"]
    limit_bytes = max(float(found) for found in re.findall(r"< (\S+)", alarm["expr"]))
    sizes = read_deploy_file(ONE_CLUSTER).sizes
    assert min(sizes.slave_volume_bytes, sizes.master_volume_bytes) > 2 * limit_bytes


def test_the_first_run_fits_on_a_small_machine() -> None:
    """4 processors and 8 GiB, of which Kubernetes and other pods have two processors and half of the memory."""
    requests = [
        (pod["containers"][0]["resources"]["requests"], one["spec"].get("replicas", one["spec"].get("completions")))
        for one in objects(DEPLOYMENTS["one-cluster"])
        if one["kind"] in rollout.WORKLOADS
        for pod in [one["spec"]["template"]["spec"]]
    ]
    assert len(requests) == 5
    cpus = sum(n * (int(one["cpu"][:-1]) / 1000 if "m" in one["cpu"] else int(one["cpu"])) for one, n in requests)
    memory = sum(n * int(parse_bytes(f"{one['memory']}B")) for one, n in requests)
    assert 1.5 < cpus <= 2
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
        names = {secret.replace("CLUSTER", one.id) for one in deployment.clusters if one.on_kubernetes}
        of_one = set(re.findall(r"`([\w.]+\.(?:crt|key|json))`", keys))
        of_all = {key.replace("s0", slave) for key in of_one for slave in deployment.slave_ids}
        told |= {each: ("Opaque", of_all) for each in names}
    assert told == made


def variables(deployment: Deployment, name: str) -> dict[str, str]:
    (one,) = dict(pods(deployment))[name]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in one["env"]}


def with_knobs(folder: Path, *lines: str) -> Deployment:
    """The small deployment, its cluster with these lines."""
    return read_deploy_file(written(folder, changes={'id = "a"': "\n".join(['id = "a"', *lines])}))


def test_small_pods_ask_for_what_the_file_says(tmp_path: Path) -> None:
    small = 'slaves = 2\nsmall_pod_cpus = 0.2\nsmall_pod_memory = "256 MiB"'
    deployment = read_deploy_file(written(tmp_path, changes={"slaves = 2": small}))
    for pod in (dict(pods(deployment))["small-supervisor"], carrier(deployment, next(volumes(deployment)))["spec"]):
        assert pod["containers"][0]["resources"]["requests"] == {"cpu": "200m", "memory": "256Mi"}


@pytest.mark.parametrize(
    ("lines", "size_bytes"),
    [
        ((), 0),
        (("gpus = 1",), 1 << 30),
        (('parallel = "fsdp=2"', 'memory = "4 GiB"'), 512 << 20),
        (("gpus = 1", 'shm = "3 GiB"'), 3 << 30),
        (('shm = "256 MiB"',), 256 << 20),
        (("gpus = 8", "shm = 0"), 0),
    ],
)
def test_accelerators_and_several_ranks_have_shared_memory(
    tmp_path: Path, lines: tuple[str, ...], size_bytes: int
) -> None:
    deployment = with_knobs(tmp_path, *lines)
    assert deployment.clusters[0].shm_bytes == size_bytes
    mounts = dict(pods(deployment))["small-cluster-a"]["containers"][0]["volumeMounts"]
    assert ("/dev/shm" in [mount["mountPath"] for mount in mounts]) is (size_bytes > 0)


def test_no_variable_that_pods_have_from_here_can_be_set_by_a_file() -> None:
    for deployment in DEPLOYMENTS.values():
        for name, _ in pods(deployment):
            if "-cluster-" in name:
                for variable in variables(deployment, name):
                    assert variable in OUR_VARIABLES or variable.startswith(OUR_PREFIX), variable


def test_pods_in_their_nodes_network_reach_the_servers(tmp_path: Path) -> None:
    """By the addresses of their nodes: they have no labels of pods."""
    for more, anyone in (("", False), ("\nhost_network = true", True)):
        deployment = read_deploy_file(
            written(tmp_path, changes={'"node-port"': '"inside"', 'id = "a"': f'id = "a"{more}'})
        )
        policy = named(deployment, "NetworkPolicy", "small-master")["spec"]["ingress"]
        (rule,) = [rule for rule in policy if rule["ports"][0]["port"] == 29400]
        assert ({"cidr": "0.0.0.0/0"} in [peer.get("ipBlock") for peer in rule["from"]]) is anyone


def test_a_node_port_is_the_one_that_is_dialled(tmp_path: Path) -> None:
    deployment = read_deploy_file(written(tmp_path))
    for name, address in (("master-outside", deployment.master_address), ("slave-1", deployment.slave_address(1))):
        spec = named(deployment, "Service", f"small-{name}")["spec"]
        assert (spec["type"], [port["nodePort"] for port in spec["ports"]]) == ("NodePort", [int(address[-5:])])


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
