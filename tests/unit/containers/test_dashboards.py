"""Dashboards, rules and alarms fit what is exported and what the documents say, and pass Prometheus' own checks."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.dashboards import (
    DASHBOARDS,
    PROMETHEUS,
    RULE_TESTS,
    RULES,
    dashboard,
    metric_names,
    panel_expressions,
    panels,
    rules,
    selectors,
)
from support.documents import anchors
from support.repository import ROOT

from dips.core.observe.metrics import Spec
from dips.local.authority import ensure_keys
from dips.master import metrics as of_master
from dips.slave import metrics as of_slave
from dips.worker import metrics as of_worker

OPERATIONS = ROOT / "docs" / "operations.md"
ALERTS = [rule for rule in rules() if rule.alert]
RECORDS = {rule.record for rule in rules() if rule.record}
EXPRESSIONS = [one for file in DASHBOARDS for one in panel_expressions(file)]
OF_PROMETHEUS = {"up", "ALERTS"}
OF_PROCESSES = {
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
    "process_start_time_seconds",
}

each_dashboard = pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian, Ubuntu: apt-get install prometheus)"
)


def exported() -> set[str]:
    lists: list[tuple[str, tuple[Spec, ...]]] = [
        (of_master.PREFIX, of_master.METRICS),
        (of_slave.PREFIX, of_slave.METRICS),
        (of_worker.PREFIX, (*of_worker.METRICS, *of_worker.HELDOUT)),
    ]
    return {f"{prefix}{spec.name}" for prefix, specs in lists for spec in specs}


KNOWN = exported() | RECORDS | OF_PROMETHEUS | OF_PROCESSES


def test_the_dashboards_are_what_make_makes_of_them() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "grafana" / "make.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@each_dashboard
def test_panels_ask_for_metrics_that_exist_and_of_the_chosen_run(file: Path) -> None:
    told = dashboard(file)
    variables = {variable["name"]: variable for variable in told["templating"]["list"]}
    asked = panel_expressions(file)
    assert set(re.findall(r"\$(\w+)", " ".join(one.expr for one in asked))) - {"__rate_interval"} <= set(variables)
    for variable in variables.values():
        if variable["type"] == "query":
            assert metric_names(variable["definition"]) <= exported(), variable["name"]
    for one in asked:
        assert metric_names(one.expr), one
        assert metric_names(one.expr) <= KNOWN, one
        assert all('run="$run"' in selector for selector in selectors(one.expr)), f"{one} shows other runs' data"
    for panel in panels(file):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert {target["datasource"]["uid"] for target in (panel, *panel["targets"])} == {"${datasource}"}


def test_rules_and_records() -> None:
    for rule in rules():
        assert metric_names(rule.expr), rule
        assert metric_names(rule.expr) <= KNOWN, rule
    asked = {name for one in EXPRESSIONS for name in metric_names(one.expr)}
    asked |= {name for rule in rules() for name in metric_names(rule.expr)}
    for record in RECORDS:
        assert re.fullmatch(r"dips:[a-z_]+:[a-z0-9_]+", record)
    assert asked >= RECORDS


def test_an_alarm_says_for_whom_it_is_and_where_to_read_on() -> None:
    sections = anchors(OPERATIONS)
    for rule in ALERTS:
        assert rule.labels["severity"] in ("critical", "warning"), rule
        assert set(rule.annotations) == {"summary", "description", "runbook_url"}, rule
        assert "$labels.run" in rule.annotations["summary"], rule
        assert rule.annotations["runbook_url"] == f"docs/operations.md#{rule.alert.lower()}"
        assert rule.alert.lower() in sections, rule
    headings = re.findall(r"^#### (\w+)$", OPERATIONS.read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(rule.alert for rule in ALERTS)


def promtool(*arguments: object) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False, cwd=PROMETHEUS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_reads_the_configurations_and_the_rules(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "config", PROMETHEUS / "prometheus.yml"), "as it is here, without keys"
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", *RULES)
    folder = shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    with pytest.raises(AssertionError, match=r"keys/tls\.crt: no such file"):
        promtool("check", "config", folder / "prometheus-tls.yml")
    ensure_keys(tmp_path / "keys", operators=["prometheus"])
    shutil.copytree(tmp_path / "keys" / "prometheus", folder / "keys")
    assert "SUCCESS" in promtool("check", "config", folder / "prometheus-tls.yml")


def test_the_configuration_for_several_machines_is_the_other_one_and_a_job_for_each_role() -> None:
    alone, tls = (yaml.safe_load((PROMETHEUS / f"{name}.yml").read_text()) for name in ("prometheus", "prometheus-tls"))
    plain, *of_roles = tls.pop("scrape_configs")
    assert alone == {**tls, "scrape_configs": [plain]}
    assert [job["job_name"] for job in of_roles] == ["dips-master", "dips-slave", "dips-cluster", "dips-evaluator"]


@needs_promtool
def test_every_alarm_rings_when_it_should_and_not_otherwise() -> None:
    promtool("test", "rules", *RULE_TESTS)


def test_alarms_on_kubernetes_link_to_the_page_where_its_address_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("monitoring", ROOT / "deploy" / "kubernetes" / "make_monitoring.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("RUNBOOKS", "https://docs.example.org/operations")
    groups = module.rule(module.RULES / "alerts.yml")["spec"]["groups"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]}
    assert links["DipsMasterDown"] == "https://docs.example.org/operations#dipsmasterdown"
    assert all(link.startswith("https://docs.example.org/operations#") for link in links.values())
