"""Monitors for the Prometheus operator: what they come to is what dashboards and alarms ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.dashboards import DASHBOARDS, panel_expressions, rules, selectors
from support.deploy_files import BASE, EXAMPLE, example
from support.operator_targets import Labels, Object, discovered, scrape_config, targets

from dips.deploy import identities, rollout
from dips.deploy.deploy_file import Deployment, read_deploy_file
from dips.deploy.objects import MONITORS
from dips.master import metrics as of_master
from dips.slave import metrics as of_slave
from dips.worker import metrics as of_worker

ROLES = {"dips_master": "master", "dips_slave": "slave", "dips_worker": "cluster"}
"""Which process serves a metric, by the beginning of its name."""

MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def by_context(deployment: Deployment) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for stage in rollout.stages(deployment):
        found.setdefault(stage.context, []).extend(stage.objects)
    return found


def monitors(deployment: Deployment) -> list[tuple[str, Object]]:
    """Each with its context."""
    return [(at, one) for at, objects in by_context(deployment).items() for one in objects if one["kind"] in MONITORS]


def all_targets(deployment: Deployment) -> list[Labels]:
    objects = by_context(deployment)
    return [target for at, monitor in monitors(deployment) for target in targets(monitor, objects[at])]


THREE_SITES = read_deploy_file(EXAMPLE)
TARGETS = all_targets(THREE_SITES)


def test_each_process_is_one_target_with_the_labels_of_deploy_prometheus() -> None:
    of_process = [tuple(target[key] for key in ("job", "run", "role", "name")) for target in TARGETS]
    assert sorted(of_process) == [
        ("dips", "three-sites", "cluster", "a"),  # four nodes, of which the first one serves metrics
        ("dips", "three-sites", "cluster", "b"),
        ("dips", "three-sites", "master", "master"),
        ("dips", "three-sites", "slave", "s0"),
        ("dips", "three-sites", "slave", "s1"),
        ("dips", "three-sites", "slave", "s2"),
    ]


def test_labels_go_on_and_differ() -> None:
    """Prometheus would rename the metric's. Of the run both say the same."""
    instances = {target["name"]: target["instance"] for target in TARGETS}
    assert instances["master"] == "three-sites-master-0"
    assert instances["s2"] == "three-sites-slave-2"
    specs = (*of_master.METRICS, *of_slave.METRICS, *of_worker.METRICS, *of_worker.HELDOUT)
    of_metrics = {label for spec in specs for label in spec.labels}
    assert {"cluster", "slave"} <= of_metrics
    assert of_metrics & {label for target in TARGETS for label in target} == {"run"}


def fits(target: Labels, selector: str) -> bool:
    """Whether a target has the labels that a selector asks of targets, and serves its metric."""
    asked = selector
    for name, value in {"$run": "three-sites", "$cluster": "a|b", "$slave": "s0|s1|s2"}.items():
        asked = asked.replace(name, value)
    metric = asked.partition("{")[0]
    if any(metric.startswith(begin) and target["role"] != role for begin, role in ROLES.items()):
        return False
    for label, operator, value in MATCHER.findall(asked):
        if label in ("job", "run", "role", "name", "instance", "namespace"):
            same = re.fullmatch(value if "~" in operator else re.escape(value), target[label]) is not None
            if same == operator.startswith("!"):
                return False
    return True


def test_every_matcher_of_rules_and_dashboards_fits_a_target() -> None:
    asked = {one for rule in rules() for one in selectors(rule.expr)}
    asked |= {
        one for file in DASHBOARDS for expression in panel_expressions(file) for one in selectors(expression.expr)
    }
    assert not [one for one in asked if not any(fits(target, one) for target in TARGETS)]
    # What would make this test empty: nothing that asks for a label of targets.
    labels = {label for one in asked for label, _, _ in MATCHER.findall(one)}
    assert {"job", "run", "role", "name"} <= labels
    assert not any(fits({**target, "job": "three-sites-master"}, 'up{job="dips", role="master"}') for target in TARGETS)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian, Ubuntu: apt-get install prometheus)"
)
def test_prometheus_itself_makes_the_same_of_them(tmp_path: Path) -> None:
    objects, configs, wanted = by_context(THREE_SITES), [], {}
    # One of each kind, those with the most to relabel: promtool waits a second for each.
    chosen = [(at, one) for at, one in monitors(THREE_SITES) if one["metadata"]["name"].endswith(("-slave", "-a"))]
    for number, (at, monitor) in enumerate(chosen):
        config = scrape_config(monitor)
        groups = [
            {"targets": [labels.pop("__address__")], "labels": labels}
            for labels in discovered(monitor["kind"], objects[at])
        ]
        (tmp_path / f"{number}.json").write_text(json.dumps(groups))
        config["file_sd_configs"] = [{"files": [f"{number}.json"]}]
        configs.append(config)
        wanted[config["job_name"]] = targets(monitor, objects[at])
    assert [len(found) for found in wanted.values()] == [3, 1]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": configs}))
    for job, expected in wanted.items():
        command = ["promtool", "check", "service-discovery", "--timeout=1s", str(file), job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [one["labels"] for one in json.loads(done.stdout) if one.get("labels")]
        found = [{name: value for name, value in one.items() if not name.startswith("__")} for one in found]
        assert sorted(found, key=lambda one: one["pod"]) == sorted(expected, key=lambda one: one["pod"])


def test_a_monitor_finds_its_keys_in_its_own_context(tmp_path: Path) -> None:
    for deployment in (THREE_SITES, read_deploy_file(BASE)):
        for objects in by_context(deployment).values():
            secrets = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "Secret"}
            for monitor in (one for one in objects if one["kind"] in MONITORS):
                spec = monitor["spec"]
                (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
                tls = endpoint["tlsConfig"]
                for key in (tls["ca"]["secret"], tls["cert"]["secret"], tls["keySecret"]):
                    assert key["key"] in secrets[key["name"]], monitor["metadata"]["name"]


def test_no_training_site_gets_keys_that_can_control_the_run() -> None:
    secrets = [one for one in by_context(THREE_SITES)["amsterdam-admin"] if one["kind"] == "Secret"]
    assert [one["metadata"]["name"] for one in secrets] == ["three-sites-keys-a"], "Prometheus' are an operator's"


AT_SERVERS = ["ServiceMonitor master", "ServiceMonitor slave", "PodMonitor cluster-b"]


@pytest.mark.parametrize(
    ("default", "at_frankfurt", "at_amsterdam", "wanted"),
    [
        ("true", "", "", [*AT_SERVERS, "PodMonitor cluster-a"]),
        ("true", "", "false", AT_SERVERS),
        ("false", "", "", []),
        ("false", "", "true", ["PodMonitor cluster-a"]),
        ("false", "true", "", AT_SERVERS),
    ],
)  # fmt: skip
def test_where_processes_are_watched(
    tmp_path: Path, default: str, at_frankfurt: str, at_amsterdam: str, wanted: list[str]
) -> None:
    changes = {"slaves = 3": f"slaves = 3\nservice_monitor = {default}"}
    for context, said in (
        ('context = "frankfurt-admin"', at_frankfurt),
        ('context = "amsterdam-admin" ', at_amsterdam),
    ):
        if said:
            changes[context] = f"service_monitor = {said}\n{context}"
    deployment = read_deploy_file(example(tmp_path, changes))
    assert [f"{one['kind']} {one['metadata']['name'][12:]}" for _, one in monitors(deployment)] == wanted
    assert [at for at, _ in monitors(deployment)] == [
        "amsterdam-admin" if name.endswith("cluster-a") else "frankfurt-admin" for name in wanted
    ]
    has_keys = "prometheus" in [one.name for one in identities.wanted(deployment)]
    assert has_keys is any(name.startswith("ServiceMonitor") for name in wanted)
