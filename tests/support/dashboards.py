"""The dashboards, rules and alarms of deploy/, as tests look at them: files, panels, expressions, names of metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.repository import ROOT

DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))

_NAME = re.compile(r"\b(?:dips[_:][a-z0-9_:]*[a-z0-9]|process_[a-z_]+[a-z]|up(?=[{ )]|$)|ALERTS)\b")
_SELECTOR = re.compile(rf"({_NAME.pattern})(\{{[^}}]*\}})?")
_HISTOGRAM_PART = re.compile(r"_(?:bucket|sum|count)$")


@dataclass(frozen=True)
class Expression:
    where: str
    expr: str

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True)
class Rule:
    record: str
    alert: str
    expr: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    def __str__(self) -> str:
        return self.record or self.alert


def dashboard(file: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(file.read_text())
    return told


def panels(file: Path) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(file)["panels"] if panel["type"] != "row"]


def panel_expressions(file: Path) -> Iterator[Expression]:
    for panel in panels(file):
        for target in panel["targets"]:
            yield Expression(f"{file.stem} / {panel['title']} / {target['refId']}", target["expr"])


def rules() -> list[Rule]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [
        Rule(
            rule.get("record", ""),
            rule.get("alert", ""),
            rule["expr"],
            rule.get("labels", {}),
            rule.get("annotations", {}),
        )
        for group in groups
        for rule in group["rules"]
    ]


def metric_names(expr: str) -> set[str]:
    return {_HISTOGRAM_PART.sub("", name) for name in _NAME.findall(_without_strings(expr))}


def selectors(expr: str) -> set[str]:
    """Every selector as it stands: a name with or without matchers."""
    return {match[1] + (match[2] or "") for match in _SELECTOR.finditer(expr)}


def _without_strings(expr: str) -> str:
    return re.sub(r'"[^"]*"', '""', expr)


def filled(expr: str, run: str, interval: str) -> str:
    """A panel's expression as Grafana sends it when all clusters and slaves are chosen."""
    values = {"$run": run, "$cluster": ".*", "$slave": ".*", "$__rate_interval": interval}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable that is not filled: {expr}"
    return expr
