"""docker-compose.yml and what it mounts: every service is confined, and every setting is one that the roles know."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml
from support.repository import ROOT

from dips.cli.commands import COMMANDS
from dips.core.config import load
from dips.core.net.addresses import parse_address
from dips.master.config import MasterConfig
from dips.slave.config import SlaveConfig
from dips.trainer.config import TrainConfig
from dips.worker.config import SECTION as WORKER_SECTION
from dips.worker.config import ClientConfig, check

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
RANKS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose" / "ranks.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RUN_FILE = ROOT / "deploy" / "compose" / "run.toml"
SLAVES = ["slave-0", "slave-1"]
CLUSTERS = ["cluster-a", "cluster-b", "cluster-c"]
LINKS = ["link-a", "link-b", "link-c"]
EVALUATOR = "heldout"
METRICS_PORT = 9400

each_service = pytest.mark.parametrize("name", SERVICES)


def words(service: dict[str, Any]) -> list[str]:
    command = service.get("command", [])
    return shlex.split(command) if isinstance(command, str) else list(command)


def options(name: str) -> dict[str, str]:
    """--slave-id slave-0 of a service's command, as {"slave_id": "slave-0"}."""
    command = words(SERVICES[name])
    pairs = itertools.pairwise(command)
    return {word[2:].replace("-", "_"): value for word, value in pairs if word.startswith("--") and word != "--config"}


def bind_mounts() -> list[tuple[str, str]]:
    found = []
    for name, service in SERVICES.items():
        found += [(name, volume.split(":")[0]) for volume in service.get("volumes", []) if volume.startswith(".")]
    return found


@each_service
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert service["healthcheck"]
    assert service["init"] is True
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    if name in LINKS:
        assert (service["user"], service["cap_add"]) == ("0:0", ["NET_ADMIN"])
        assert not service.get("volumes")
    else:
        assert int(service["user"].split(":")[0]) > 0
        assert "cap_add" not in service


def test_who_reaches_whom_and_who_stops_when() -> None:
    """`stop` ends a service before what it depends on, and `run` starts what it depends on."""
    networks = [SERVICES[name]["networks"] for name in CLUSTERS]
    assert sorted(networks) == [["site-a"], ["site-b"], ["site-c"]]
    assert all(COMPOSE["networks"][network]["internal"] is True for [network] in networks)
    assert len({SERVICES[name]["environment"]["LINK_RATE"] for name in LINKS}) == len(LINKS)
    servers = {"master", *SLAVES}
    for name in CLUSTERS:
        assert servers <= set(SERVICES[name]["depends_on"])
    for name in ("operator", *servers):
        assert not servers & set(SERVICES[name]["depends_on"])


def test_a_link_is_made_again_with_the_container_whose_network_it_joins() -> None:
    """A changed image makes every container of it again, those that they depend on first; another image would not."""
    for link, cluster in zip(LINKS, CLUSTERS, strict=True):
        assert SERVICES[link]["network_mode"] == f"service:{cluster}"
        assert SERVICES[link]["image"] == SERVICES[cluster]["image"]
    builds = [
        one["build"] for one in SERVICES.values() if one.get("image") == SERVICES[LINKS[0]]["image"] and "build" in one
    ]
    assert [build["target"] for build in builds] == ["linked-worker"]


def test_a_process_sees_its_own_keys_and_no_others() -> None:
    for name in ("master", *SLAVES, *CLUSTERS, EVALUATOR, "operator", "prometheus"):
        keys = [volume for volume in SERVICES[name]["volumes"] if volume.startswith("keys-")]
        assert [volume.split(":")[0] for volume in keys] == [f"keys-{name}"]
        assert keys[0].endswith(":ro")
    handed_out = words(SERVICES["keys"])
    for name in (*SLAVES, *CLUSTERS, EVALUATOR, "operator", "prometheus"):
        assert name in handed_out
        assert f"keys-{name}:/keys/{name}" in SERVICES["keys"]["volumes"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    identities = dockerfile.partition('ARG IDENTITIES="')[2].partition('"')[0].split()
    volumes = [*SERVICES["keys"]["volumes"], *RANKS["services"]["keys"]["volumes"]]
    assert {volume.split(":")[1] for volume in volumes} == {f"/keys/{name}" for name in identities}


@pytest.mark.parametrize(("name", "source"), bind_mounts())
def test_what_is_mounted_exists(name: str, source: str) -> None:
    assert (ROOT / source).exists(), f"{name} mounts {source}"


def test_the_masters_settings_are_settings() -> None:
    master = load(MasterConfig, "master", file=RUN_FILE, environment={}, overrides=options("master")).value
    assert (master.slaves, master.min_clusters) == (len(SLAVES), len(CLUSTERS))
    assert master.run_id == "compose"
    assert parse_address(master.listen)[1] == 29400
    assert parse_address(master.metrics_listen or "")[1] == METRICS_PORT
    assert SERVICES["master"]["ports"][0].endswith(f":{parse_address(master.page_listen or '')[1]}")


@pytest.mark.parametrize("name", SLAVES)
def test_a_slaves_settings_are_settings(name: str) -> None:
    given = {"master": SERVICES[name]["environment"]["DIPS_MASTER"], **options(name)}
    slave = load(SlaveConfig, "slave", file=RUN_FILE, environment={}, overrides=given).value
    assert (slave.slave_id, slave.run_id, slave.master) == (name, "compose", "master:29400")
    assert slave.advertise == f"{name}:{slave.data_port}"
    assert parse_address(slave.metrics_listen or "")[1] == METRICS_PORT


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_clusters_settings_are_settings(name: str) -> None:
    environment = SERVICES[name]["environment"]
    train = load(TrainConfig, "train", file=RUN_FILE, environment={}, overrides=options(name)).value
    given = {"master": environment["DIPS_MASTER"], "cluster_id": environment["DIPS_CLUSTER"]}
    client = check(load(ClientConfig, WORKER_SECTION, file=RUN_FILE, environment={}, overrides=given).value)
    assert (client.cluster_id, client.run_id, client.resume) == (name, "compose", True)
    assert parse_address(client.metrics_listen or "")[1] == METRICS_PORT
    assert not train.data  # the text of Python's own standard library


def test_the_evaluator_measures_what_was_never_trained_on_and_the_page_draws_it() -> None:
    """The text is cut by settings of [train], which it shares with the clusters; the page reads its tape."""
    service, given = SERVICES[EVALUATOR], options(EVALUATOR)
    tape = PurePosixPath(given["tape"])
    master = load(MasterConfig, "master", file=RUN_FILE, environment={}, overrides=options("master")).value
    assert master.page_heldout is not None
    writes = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    reads = {volume.split(":")[1]: volume.split(":", 1)[0] for volume in SERVICES["master"]["volumes"]}
    assert master.page_heldout.name == tape.name
    assert writes[str(tape.parent)] == reads[str(master.page_heldout.parent)] == "heldout-data"
    assert parse_address(given["metrics_listen"])[1] == METRICS_PORT
    assert words(service)[:3] == ["dips", "eval", "--follow"]
    assert set(given) <= {"tape", "metrics_listen", "follow"}

    # Docker gives a new volume the owner of the folder that it is mounted at, or root's where there is none.
    [made] = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if "install -d -o 10001" in line][:1]
    assert str(master.page_heldout.parent) in made.split()


def test_roles_that_die_are_started_again_and_those_that_ended_are_not() -> None:
    for name in ("master", *SLAVES, *CLUSTERS, EVALUATOR):
        assert SERVICES[name]["restart"] == "on-failure"
        command = words(SERVICES[name])
        assert command[0] == "dips"
        assert command[1] in {known.name for known in COMMANDS}
        assert command[command.index("--config") + 1] == "/etc/dips/run.toml"


def test_prometheus_scrapes_every_process() -> None:
    targets = json.loads((ROOT / "deploy" / "compose" / "targets" / "compose.json").read_text())
    roles = {"master": "master", **dict.fromkeys(SLAVES, "slave"), **dict.fromkeys(CLUSTERS, "cluster")}
    roles[EVALUATOR] = "evaluator"
    told = {entry["labels"]["name"]: entry for entry in targets}
    assert set(told) == set(roles)
    for name, role in roles.items():
        assert told[name]["targets"] == [f"{name}:{METRICS_PORT}"]
        assert told[name]["labels"] == {"run": "compose", "role": role, "name": name}
        shared = {*SERVICES[name]["networks"]} & {*SERVICES["prometheus"]["networks"]}
        assert shared, f"Prometheus does not reach {name}"
