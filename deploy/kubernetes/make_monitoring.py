"""Writes deploy/kubernetes/monitoring: python deploy/kubernetes/make_monitoring.py, or --check to see whether it is
current. `make manifests` runs it.

It holds what one Prometheus and one Grafana need for all runs, as kube-prometheus-stack reads it: the alarms and
records of deploy/prometheus/rules as PrometheusRules, and the dashboards of deploy/grafana as ConfigMaps. Kustomize
reads no files outside of its folder, so both are written out.

RUNBOOKS in the environment is the address at which the people who get alarms open docs/operations.md: a link in a
message leads nowhere without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent
FOLDER = DEPLOY / "kubernetes" / "monitoring"
RULES = DEPLOY / "prometheus" / "rules"
DASHBOARDS = DEPLOY / "grafana" / "dashboards"

MARK = "# Written by `make manifests` from {source}: change that.\n"
RUNBOOKS = "docs/operations.md"
"""In the rules, where no address of this repository is known."""

NAMESPACE = "monitoring"
RELEASE = {"release": "kube-prometheus-stack"}
"""kube-prometheus-stack selects rules by the name under which it was installed."""

OF_DASHBOARDS = {"grafana_dashboard": "1"}
"""Its sidecar takes ConfigMaps with this label, of all namespaces, into Grafana."""

Object = dict[str, Any]


def metadata(name: str, **labels: str) -> Object:
    return {"name": name, "labels": {"app.kubernetes.io/name": "dips", "app.kubernetes.io/part-of": "dips", **labels}}


def rule(file: Path) -> Object:
    """The groups of one file. Each file has an object of its own, since both have groups of the same names."""
    text = file.read_text(encoding="utf-8").replace(f"{RUNBOOKS}#", f"{os.environ.get('RUNBOOKS') or RUNBOOKS}#")
    groups = yaml.safe_load(text)["groups"]
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    return {**head, "metadata": metadata(f"dips-{file.stem}"), "spec": {"groups": groups}}


def dashboard(file: Path) -> Object:
    """One dashboard. The sidecar writes all files of all ConfigMaps into one folder: names must differ."""
    name = f"dips-{file.stem}"
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(f"{name}-dashboard", **OF_DASHBOARDS)}
    return {**head, "data": {f"{name}.json": file.read_text(encoding="utf-8")}}


def files() -> Iterator[tuple[Path, str]]:
    """Each file and its text."""
    written = []
    for source, made in [
        *((file, rule(file)) for file in sorted(RULES.glob("*.yml"))),
        *((file, dashboard(file)) for file in sorted(DASHBOARDS.glob("*.json"))),
    ]:
        name = f"{made['kind'].lower()}-{source.stem}.yaml"
        written.append(name)
        yield FOLDER / name, MARK.format(source=source.relative_to(DEPLOY.parent).as_posix()) + _text(made)
    top = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "labels": [{"pairs": RELEASE}],
        "resources": written,
    }
    yield FOLDER / "kustomization.yaml", MARK.format(source="deploy/prometheus and deploy/grafana") + _text(top)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it is: a changed panel is one changed line."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def _text(document: Object) -> str:
    found: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=float("inf"), allow_unicode=True)
    return found


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("python deploy/kubernetes/make_monitoring.py [--check]", file=sys.stderr)
        return 2
    wanted = dict(files())
    there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
    old = sorted(path for path in wanted.keys() | there.keys() if wanted.get(path) != there.get(path))
    if arguments:
        for path in old:
            print(f"{path} is not what make_monitoring.py makes: run `make manifests`", file=sys.stderr)
        return 1 if old else 0
    FOLDER.mkdir(exist_ok=True)
    for path in there.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(wanted)} files, {len(old)} of them new, changed or removed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
