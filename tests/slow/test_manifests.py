"""Every object for Kubernetes, from the files of deploy/kubernetes and from `dips deploy plan`, against its schema.

The schemas are those that Kubernetes publishes, for three of its versions, strict: a field that does not exist is an
error. Two kinds are of other projects, and no schema of theirs comes along: their pods and jobs are checked as
Kubernetes' own, the rest by their place. Kustomizations are built by kustomize itself, where kubectl is here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_files import BASE, EVERY_KNOB, EXAMPLE, ONE_CLUSTER, written
from support.dips_command import dips
from support.published_schemas import Unfit, check
from support.repository import ROOT

from dips.deploy.deploy_file import read_deploy_file
from dips.deploy.render import write_folders

Object = dict[str, Any]
VERSIONS = ("1.29", "1.32", "1.35")
WITHOUT_SCHEMA = ("ServiceMonitor", "JobSet")
COMMITTED = ("servers", "cluster-job", "cluster-torchrun")
"""Folders of the base that overlays build on; `dips deploy render` writes the others when somebody needs them."""

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml"))
needs_kustomize = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which has kustomize, is not here"
)


def fits(document: Object, version: str) -> None:
    """Raises Unfit when the object, or what it holds of Kubernetes' own kinds, does not fit its schema."""
    if document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
            check(inner, version)
    if document["kind"] not in WITHOUT_SCHEMA:
        check(document, version)


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


def test_there_is_something_to_check() -> None:
    names = [folder.relative_to(FOLDER).as_posix() for folder in KUSTOMIZATIONS]
    assert {"base/servers", "base/cluster-job", "overlays/server-site", "overlays/training-site"} <= set(names)


@needs_kustomize
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.relative_to(FOLDER).as_posix())
def test_what_kustomize_builds_fits_the_schemas(folder: Path) -> None:
    found = built(folder)
    for version in VERSIONS:
        for one in found:
            fits(one, version)
    without = sum(one["kind"] in WITHOUT_SCHEMA for one in found)
    print(f"\n{folder.relative_to(ROOT)}: {len(found)} objects, {without} without a schema, {', '.join(VERSIONS)}")


@pytest.mark.parametrize("file", [EXAMPLE, BASE, ONE_CLUSTER], ids=lambda file: file.name)
def test_what_a_plan_prints_fits_the_schemas(file: Path) -> None:
    found = planned(file)
    assert len(found) >= 30
    check_all(found)
    without = sum(one["kind"] in WITHOUT_SCHEMA for one in found)
    print(f"\ndips deploy plan {file.name}: {len(found)} objects, {without} without a schema, {', '.join(VERSIONS)}")


def test_what_comes_of_every_knob_fits_the_schemas(tmp_path: Path) -> None:
    check_all(planned(written(tmp_path, changes=EVERY_KNOB)))


def test_a_field_that_does_not_exist_is_an_error() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"port": 1}}
    with pytest.raises(Unfit, match="'port' was unexpected"):
        fits(service, VERSIONS[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_command_for_it_agrees(version: str) -> None:
    files = [str(path) for path in sorted((FOLDER / "base").rglob("*.yaml")) if path.name != "kustomization.yaml"]
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "ERROR" not in done.stdout
    assert f"statefulset/dips-slave against version {version}" in done.stdout


def test_the_base_is_what_is_rendered_now(tmp_path: Path) -> None:
    deployment = read_deploy_file(BASE)
    written = {path.relative_to(tmp_path): path.read_text() for path in write_folders(deployment, tmp_path)}
    for name, text in written.items():
        there = FOLDER / "base" / name
        if name.parts[0] in COMMITTED:
            now = text.replace(str(BASE), str(BASE.relative_to(ROOT)))
            assert there.read_text() == now, f"{there.relative_to(ROOT)} is old: make manifests"
    committed = {path.relative_to(FOLDER / "base") for path in (FOLDER / "base").rglob("*") if path.is_file()}
    assert committed == {name for name in written if name.parts[0] in COMMITTED}


@needs_kustomize
def test_an_overlay_is_stronger_than_the_base() -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in built(FOLDER / "overlays" / "server-site")}
    slaves = objects["StatefulSet", "dips-slave"]["spec"]
    names = [one["name"] for one in slaves["template"]["spec"]["containers"][0]["env"]]
    assert names.index("POD_INDEX") < names.index("DIPS_SLAVE_ADVERTISE")
    assert slaves["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast-local"


# ---- scripts for sites without Kubernetes ----


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rendered")
    list(write_folders(read_deploy_file(BASE), folder))
    return folder / "scripts"


@pytest.mark.parametrize("name", ["dips-shell.sh", "dips-slurm.sbatch"])
def test_a_script_is_one_that_a_shell_reads(scripts: Path, name: str) -> None:
    command = ["bash", "-n", str(scripts / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def fake_command(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


def run_script(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    environment["SLURMD_NODENAME"] = "n2"
    return subprocess.run(
        ["bash", str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_plain_script_goes_on_after_a_death_and_ends_where_a_person_must_act(scripts: Path, tmp_path: Path) -> None:
    fake_command(tmp_path, "sleep", "exit 0")
    told = 'echo "$DIPS_CLUSTER $DIPS_MASTER $DIPS_KEYS $*" >> told; [ "$(wc -l < told)" = 3 ] && exit CODE; exit 9'
    for code in (0, 2, 8):
        (tmp_path / "told").unlink(missing_ok=True)
        fake_command(tmp_path, "dips", told.replace("CODE", str(code)))
        assert run_script(scripts / "dips-shell.sh", tmp_path).returncode == code
        line = f"shell master.dips.example.org:29400 {tmp_path}/keys/shell train --config dips-shell.toml"
        assert (tmp_path / "told").read_text().splitlines() == [line] * 3
    assert 'cluster_id = "shell"' in (tmp_path / "dips-shell.toml").read_text()


def test_the_slurm_script_names_the_nodes_and_comes_back_after_a_death(scripts: Path, tmp_path: Path) -> None:
    fake_command(tmp_path, "scontrol", 'if [ "$1" = show ]; then echo n1; echo n2; else echo "$*" >> requeued; fi')
    fake_command(tmp_path, "srun", 'shift; exec "$@"')
    fake_command(tmp_path, "python", 'echo "$*" >> told; exit "$(cat code)"')
    for code, requeued in ((137, True), (2, False)):
        (tmp_path / "code").write_text(str(code))
        (tmp_path / "requeued").unlink(missing_ok=True)
        assert run_script(scripts / "dips-slurm.sbatch", tmp_path).returncode == (0 if requeued else code)
        assert (tmp_path / "requeued").exists() == requeued
    assert (tmp_path / "told").read_text().splitlines()[0] == (
        "-m dips.worker.torchrun --nproc-per-node=8 --max-restarts=3 --nnodes=2 --rdzv-backend=c10d "
        "--rdzv-endpoint=n1:29600 --rdzv-id=dips-cluster-slurm --local-addr=n2 "
        "--rdzv-conf=join_timeout=3600,read_timeout=120 train.py"
    )
