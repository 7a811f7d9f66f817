"""Every object for Kubernetes, from the files of deploy/kubernetes and from `dips deploy plan`, against its schema.

The schemas are those that Kubernetes publishes, for three of its versions, strict: a field that does not exist is an
error. Kinds of the Prometheus operator are checked against its own definitions, as a package has them. Of a JobSet,
which no package has, its own fields and the Job inside are checked. Kustomizations are built by kustomize itself, where
kubectl is here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import published_schemas as schemas
from support.dashboards import DASHBOARDS
from support.deploy_files import BASE, EVERY_KNOB, EXAMPLE, ONE_CLUSTER, written
from support.dips_command import dips
from support.repository import ROOT

from dips.deploy.deploy_file import read_deploy_file
from dips.deploy.render import write_folders

Object = dict[str, Any]
VERSIONS = ("1.29", "1.32", "1.35")

FOLDER = ROOT / "deploy" / "kubernetes"
MONITORING = FOLDER / "monitoring"
KUSTOMIZATIONS = sorted(
    path.parent for path in FOLDER.rglob("kustomization.yaml") if "kind: Component" not in path.read_text()
)
COMPONENTS = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml") if "kind: Component" in path.read_text())
OVERLAYS = [folder for folder in KUSTOMIZATIONS if folder.parent.name == "overlays"]
CONFIGMAP_BYTES = 1 << 20
needs_kustomize = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which has kustomize, is not here"
)
needs_operator_models = pytest.mark.skipif(
    not schemas.has_operator_models(),
    reason="the definitions of the Prometheus operator are not here: make installs them",
)


def fits(document: Object, version: str) -> None:
    """Raises Unfit when the object, or what it holds of Kubernetes' own kinds, does not fit its schema."""
    if document["kind"] == "JobSet":
        schemas.check_of_jobset(document, version)
    if is_of_kubernetes(document):
        schemas.check(document, version)


def is_of_kubernetes(document: Object) -> bool:
    return not document["apiVersion"].startswith((schemas.OPERATOR_GROUP, schemas.JOBSET_GROUP))


def built(folder: Path) -> list[Object]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def planned(file: Path) -> list[Object]:
    done = dips("deploy", "plan", file, "--offline", "--json")
    assert done.returncode == 0, done.stderr
    return [step["object"] for step in json.loads(done.stdout)]


def check_all(objects: list[Object]) -> None:
    """Raises Unfit. Secrets are printed as fingerprints, which their schema does not know."""
    for version in VERSIONS:
        for one in objects:
            fits({**one, "data": {}} if one["kind"] == "Secret" else one, version)


@needs_kustomize
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.relative_to(FOLDER).as_posix())
def test_what_kustomize_builds_fits_the_schemas(folder: Path) -> None:
    found = built(folder)
    for version in VERSIONS:
        for one in found:
            fits(one, version)
    without = sum(not is_of_kubernetes(one) for one in found)
    print(f"\n{folder.relative_to(ROOT)}: {len(found)} objects, {without} without a schema, {', '.join(VERSIONS)}")
    groups = {one["apiVersion"] for one in built(folder) if not is_of_kubernetes(one)}
    lines = (line.lstrip() for line in (folder / "kustomization.yaml").read_text().splitlines())
    asks = folder == MONITORING or any("/prometheus-operator" in line for line in lines if not line.startswith("#"))
    assert groups == ({"monitoring.coreos.com/v1"} if asks else set())


@pytest.mark.parametrize("file", [EXAMPLE, BASE, ONE_CLUSTER], ids=lambda file: file.name)
def test_what_a_plan_prints_fits_the_schemas(file: Path) -> None:
    found = planned(file)
    assert len(found) >= 30
    check_all(found)
    without = sum(not is_of_kubernetes(one) for one in found)
    print(f"\ndips deploy plan {file.name}: {len(found)} objects, {without} without a schema, {', '.join(VERSIONS)}")


def test_what_comes_of_every_knob_fits_the_schemas(tmp_path: Path) -> None:
    check_all(planned(written(tmp_path, changes=EVERY_KNOB)))


@needs_kustomize
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_an_overlay_applies_on_a_cluster_without_its_namespace(folder: Path) -> None:
    found = built(folder)
    assert found[0]["kind"] == "Namespace", "kubectl makes objects in this order"
    assert {one["metadata"]["namespace"] for one in found[1:]} == {found[0]["metadata"]["name"]}


@needs_kustomize
@pytest.mark.parametrize("component", COMPONENTS, ids=lambda folder: folder.parent.name)
def test_a_component_adds_the_monitors_of_its_folder(component: Path, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "base", tmp_path / "base")
    name = component.parent.name
    overlay = {"resources": [f"base/{name}"], "components": [f"base/{name}/prometheus-operator"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kinds = [one["kind"] for one in built(tmp_path) if not is_of_kubernetes(one)]
    assert kinds == (["ServiceMonitor"] * 2 if name == "servers" else ["PodMonitor"])


def of_the_operator() -> list[Object]:
    """Every object of ours for the operator, and those that the documents show."""
    written = [path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml"]
    found = [one for path in written for one in yaml.safe_load_all(path.read_text())]
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    found += [one for text in shown for one in yaml.safe_load_all(text)]
    found += [one for file in (EXAMPLE, BASE) for one in planned(file)]
    return [one for one in found if one.get("apiVersion", "").startswith(schemas.OPERATOR_GROUP)]


@needs_operator_models
def test_what_the_prometheus_operator_reads_fits_its_definitions() -> None:
    found = of_the_operator()
    assert {one["kind"] for one in found} == {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScrapeConfig"}
    for one in found:
        schemas.check_of_operator(one)
    print(f"\n{len(found)} objects of {schemas.OPERATOR_GROUP.rstrip('/')} fit the operator's definitions")


def test_monitoring_is_what_is_generated_now() -> None:
    command = [sys.executable, str(FOLDER / "make_monitoring.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_kustomize
def test_grafanas_sidecar_and_prometheus_find_all_of_it() -> None:
    files: dict[str, str] = {}
    for one in built(MONITORING):
        assert one["metadata"]["labels"]["release"] == "kube-prometheus-stack"
        assert one["metadata"]["namespace"] == "monitoring"
        if one["kind"] == "ConfigMap":
            assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert not files.keys() & one["data"].keys(), "the sidecar writes all files into one folder"
            assert len(json.dumps(one).encode()) < CONFIGMAP_BYTES / 4, "kubectl writes a second copy"
            files |= one["data"]
    assert files == {f"dips-{file.stem}.json": file.read_text() for file in DASHBOARDS}


@needs_kustomize
def test_an_overlay_is_stronger_than_the_base() -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in built(FOLDER / "overlays" / "server-site")}
    slaves = objects["StatefulSet", "dips-slave"]["spec"]
    names = [one["name"] for one in slaves["template"]["spec"]["containers"][0]["env"]]
    assert names.index("POD_INDEX") < names.index("DIPS_SLAVE_ADVERTISE")
    assert slaves["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast-local"


@needs_kustomize
def test_a_training_sites_pods_are_as_many_as_torchrun_waits_for_and_know_the_server_site() -> None:
    servers = {(one["kind"], one["metadata"]["name"]): one for one in built(FOLDER / "overlays" / "server-site")}
    found = built(FOLDER / "overlays" / "training-site")
    [job] = [one["spec"] for one in found if one["kind"] == "Job"]
    [base] = [one["spec"] for one in built(FOLDER / "base" / "cluster-torchrun") if one["kind"] == "Job"]
    container, wanted = (one["template"]["spec"]["containers"][0] for one in (job, base))
    nodes = job["completions"]
    assert (nodes, job["parallelism"]) == (4, 4)
    assert container["command"] == [f"--nnodes={nodes}" if "--nnodes=" in word else word for word in wanted["command"]]
    outside = servers["Service", "dips-master-outside"]["metadata"]["annotations"]
    name = outside["external-dns.alpha.kubernetes.io/hostname"]
    assert {one["name"]: one.get("value") for one in container["env"]}["DIPS_MASTER"] == f"{name}:29400"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rendered")
    list(write_folders(read_deploy_file(BASE), folder))
    return folder / "scripts"


def fake_command(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


def run_script(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_plain_script_goes_on_after_a_death_and_ends_where_a_person_must_act(scripts: Path, tmp_path: Path) -> None:
    fake_command(tmp_path, "sleep", "exit 0")
    told = 'echo "$DIPS_CLUSTER $DIPS_MASTER $DIPS_KEYS $*" >> told; [ "$(wc -l < told)" = 3 ] && exit CODE; exit 7'
    for code in (0, 2, 8, 9):
        (tmp_path / "told").unlink(missing_ok=True)
        fake_command(tmp_path, "dips", told.replace("CODE", str(code)))
        assert run_script(scripts / "dips-shell.sh", tmp_path).returncode == code
        line = f"shell master.dips.example.org:29400 {tmp_path}/keys/shell train --config dips-shell.toml"
        assert (tmp_path / "told").read_text().splitlines() == [line] * 3
    assert 'cluster_id = "shell"' in (tmp_path / "dips-shell.toml").read_text()
