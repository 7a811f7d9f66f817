"""deploy/compose/ranks.yml: a cluster of two containers beside those of docker-compose.yml, with all that it needs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_files import written
from support.repository import ROOT

from dips.core.config import load
from dips.deploy.clusters import command, environment
from dips.deploy.deploy_file import Deployment, read_deploy_file
from dips.trainer.config import TrainConfig
from dips.worker.config import SECTION as WORKER_SECTION
from dips.worker.config import ClientConfig, check

BASE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
RANKS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose" / "ranks.yml").read_text())
RUN_FILE = ROOT / "deploy" / "compose" / "run.toml"
TARGETS = "/etc/prometheus/targets-tls"
CLUSTER, NODES, NETWORK = "cluster-d", ["cluster-d-0", "cluster-d-1"], "site-d"

each_node = pytest.mark.parametrize("name", NODES)


def words(service: dict[str, Any]) -> list[str]:
    return shlex.split(service["command"])


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """What `dips deploy` would make of the same cluster: two nodes with a rank each."""
    cluster = 'id = "d"\nnodes = 2\nparallel = "fsdp=2"'  # its objects are named compose-cluster-d
    return read_deploy_file(written(tmp_path, changes={'"small"': '"compose"', 'id = "a"': cluster}))


@each_node
def test_a_node_is_confined_and_runs_what_a_deployment_runs(name: str, deployment: Deployment) -> None:
    node, other = RANKS["services"][name], BASE["services"]["cluster-a"]
    own = {"command", "environment", "volumes", "networks", "healthcheck", "hostname", "build"}
    assert {key: node[key] for key in node if key not in own} == {key: other[key] for key in other if key not in own}
    assert node["hostname"] == name
    [cluster] = deployment.clusters
    assert words(RANKS["services"][name]) == command(deployment, cluster, "/etc/dips/run.toml", NODES[0], name)
    node = RANKS["services"][name]
    assert int(node["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) + 10 <= int(node["stop_grace_period"][:-1])


@each_node
def test_a_nodes_settings_are_settings(name: str, deployment: Deployment) -> None:
    variables = RANKS["services"][name]["environment"]
    given = {"master": variables["DIPS_MASTER"], "cluster_id": variables["DIPS_CLUSTER"]}
    client = check(load(ClientConfig, WORKER_SECTION, file=RUN_FILE, environment={}, overrides=given).value)
    assert (client.cluster_id, client.run_id, client.resume) == (CLUSTER, "compose", True)
    parallel = words(RANKS["services"][name])[-1]
    train = load(TrainConfig, "train", file=RUN_FILE, environment={}, overrides={"parallel": parallel}).value
    assert train.parallelism.n_ranks == len(NODES)
    [cluster] = deployment.clusters
    assert set(environment(deployment, cluster, "/etc/dips/keys")) - set(variables) == {"DIPS_RUN"}  # run.toml says it


def test_both_see_the_keys_of_their_cluster_and_one_folder_of_checkpoints() -> None:
    for name in NODES:
        volumes = [volume for volume in RANKS["services"][name]["volumes"] if not volume.startswith(".")]
        assert volumes == [f"keys-{CLUSTER}:/etc/dips/keys:ro", f"{CLUSTER}-data:/var/lib/dips"]
    assert set(RANKS["volumes"]) == {f"keys-{CLUSTER}", f"{CLUSTER}-data"}
    base, keys = BASE["services"]["keys"], RANKS["services"]["keys"]
    with_ranks = base["command"].replace("--cluster cluster-c", f"--cluster cluster-c --cluster {CLUSTER}")
    assert words(keys) == shlex.split(with_ranks)
    assert keys["volumes"] == [f"keys-{CLUSTER}:/keys/{CLUSTER}"]
    assert RANKS["services"]["operator"]["volumes"] == [f"{CLUSTER}-data:/run-of-compose/clusters/{CLUSTER}:ro"]


def test_the_two_reach_each_other_and_the_servers_and_nobody_else() -> None:
    assert RANKS["networks"] == {NETWORK: {"internal": True}}
    reached = {name for name, service in RANKS["services"].items() if service.get("networks") == [NETWORK]}
    assert reached == {*NODES, "master", "slave-0", "slave-1", "prometheus"}


def test_prometheus_scrapes_the_leader_beside_all_others() -> None:
    folders = []
    for file in (BASE, RANKS):
        volumes = [volume.split(":") for volume in file["services"]["prometheus"]["volumes"]]
        folders += [source for source, target, *_ in volumes if target == TARGETS]
    before, after = (json.loads((ROOT / folder / "compose.json").read_text()) for folder in folders)
    labels = {"run": "compose", "role": "cluster", "name": CLUSTER}
    assert [entry for entry in after if entry not in before] == [{"targets": [f"{NODES[0]}:9400"], "labels": labels}]
    assert [entry for entry in before if entry not in after] == []
