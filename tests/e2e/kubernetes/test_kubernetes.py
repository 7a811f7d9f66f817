"""A deployment on the clusters that KUBECONFIG names: `make e2e-kubernetes`.

Without images, on any API server: it takes the objects and gives them back so that nothing is left to change, keeps
volumes, and all of it works with the printed rights alone. With images that the cluster can pull (DIPS_IMAGES,
DIPS_TAG) a run trains, loses each of its pods, gets other settings and one slave more, and ends. With DIPS_POLICIES=1
ports that a policy closes must be closed; with DIPS_OTHER_CONTEXT, a context of another cluster that pulls the same
images, and where its pods reach node ports of both, the servers move there. Each test has a namespace of its own and
deletes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_files import with_keys
from support.dips_command import dips
from support.waiting import until

WITH_IMAGES = pytest.mark.skipif(
    not os.environ.get("DIPS_IMAGES"), reason="DIPS_IMAGES names no images that the cluster can pull"
)

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster"),
]

FILE = """
[deploy]
run_id = "e2e"
namespace = "NAMESPACE"
images = "IMAGES"
tag = "TAG"
keys = "KEYS"
placement = "here"
slaves = 2
slave_cpus = 0.2
expose = "inside"
spread = "preferred"
service_monitor = false

[model]
parameters = "1M"

[master]
sync_every = 16
archive_bytes = "16 MiB"

[[sites]]
name = "here"
context = "CONTEXT"

[[clusters]]
id = "a"
site = "here"
cpus = 0.5
memory = "2 GiB"
checkpoint_volume = "1 GiB"

[[clusters]]
id = "b"
site = "here"
cpus = 0.5
memory = "2 GiB"
"""


def kubectl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, check=False)


def api(namespace: str) -> Any:
    from dips.deploy.kubernetes_api import open_context

    return open_context(context(), namespace)


def context() -> str:
    from kubernetes import config

    _, current = config.list_kube_config_contexts(os.environ["KUBECONFIG"])
    return str(current["name"])


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    namespace = f"dips-e2e-{uuid.uuid4().hex[:8]}"
    images, tag = os.environ.get("DIPS_IMAGES", "registry.example.org/dips"), os.environ.get("DIPS_TAG", "0.1.0")
    found = {"NAMESPACE": namespace, "IMAGES": images, "TAG": tag, "KEYS": str(tmp_path / "keys"), "CONTEXT": context()}
    text = FILE
    for old, new in found.items():
        text = text.replace(old, new)
    path = tmp_path / "run.toml"
    path.write_text(text)
    with_keys(path)
    try:
        yield path
    finally:
        api(namespace).delete("Namespace", namespace)


def deploy(*words: object, code: int = 0, kubeconfig: str = "") -> str:
    done = dips("deploy", *words, KUBECONFIG=kubeconfig or os.environ["KUBECONFIG"])
    assert done.returncode == code, done.stderr
    return done.stdout


def changes(file: Path) -> dict[str, int]:
    """How many steps of each kind a plan has."""
    actions = [step["action"] for step in json.loads(deploy("plan", file, "--json").splitlines()[-1])]
    return {action: actions.count(action) for action in set(actions)}


def namespace_of(file: Path) -> str:
    line = next(line for line in file.read_text().splitlines() if line.startswith("namespace"))
    return line.split('"')[1]


def test_the_api_server_takes_everything_and_nothing_is_left_to_change(file: Path) -> None:
    assert set(changes(file)) == {"create"}
    deploy("apply", file, "--yes", "--no-wait")
    found = changes(file)
    assert set(found) == {"same"}, f"the server changed what was sent: {found}"
    assert "0 objects were changed" in deploy("apply", file, "--yes", "--no-wait")
    file.write_text(file.read_text().replace("sync_every = 16", "sync_every = 8"))
    assert changes(file)["change"] == 2
    deploy("apply", file, "--yes", "--no-wait")
    assert set(changes(file)) == {"same"}
    deploy("delete", file, "--yes")
    server = api(namespace_of(file))
    assert server.get("StatefulSet", "e2e-slave") is None
    assert server.get("PersistentVolumeClaim", "e2e-cluster-a") is not None
    deploy("delete", file, "--yes", "--delete-volumes")
    until(lambda: server.get("PersistentVolumeClaim", "e2e-cluster-a") is None, "the volume's end")


@contextlib.contextmanager
def master_of(file: Path) -> Iterator[str]:
    """The master's address through a port-forward."""
    words = ["kubectl", "--namespace", namespace_of(file), "port-forward", "service/e2e-master", ":29400"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None
            line = forward.stdout.readline()  # Forwarding from 127.0.0.1:41234 -> 29400
            yield line.split()[2]
        finally:
            forward.terminate()


def version(file: Path) -> int:
    with master_of(file) as address:
        return published(file, "--master", address)


def published(file: Path, *words: str) -> int:
    """The number of the newest version; -1 before the first, or while no master answers."""
    done = dips("deploy", "status", file, "--json", *words, KUBECONFIG=os.environ["KUBECONFIG"])
    assert done.returncode in (0, 4), done.stderr  # 4 while something waits
    found = (json.loads(done.stdout)["run"] or {}).get("published")
    return int(found.split(":")[1]) if found else -1


def goes_on(file: Path, after: str) -> None:
    """Wait for two more versions than there are."""
    before = version(file)
    until(lambda: version(file) > before + 1, f"versions after {after}")


def pods_of(file: Path) -> list[str]:
    """The names of the run's pods."""
    words = ("get", "pods", "--selector", "app.kubernetes.io/instance=e2e", "--output", "name")
    return kubectl("--namespace", namespace_of(file), *words).stdout.split()


@WITH_IMAGES
def test_a_run_trains_and_survives_the_loss_of_each_pod_gets_other_settings_and_one_slave_more(file: Path) -> None:
    deploy("apply", file, "--yes", "--no-reach")
    until(lambda: version(file) >= 1, "the first version")
    server = api(namespace_of(file))
    pods = pods_of(file)
    assert len(pods) == 6, "a master, two slaves, the supervisor and two clusters"
    for pod in pods:
        done = kubectl("--namespace", namespace_of(file), "delete", pod, "--grace-period", "1")
        assert done.returncode == 0, done.stderr
        goes_on(file, f"the loss of {pod}")
    file.write_text(file.read_text().replace("[[sites]]", "[slave]\nsnapshots_kept = 4\n\n[[sites]]", 1))
    deploy("apply", file, "--yes", "--no-reach")  # a new release does the same: one slave after the other
    goes_on(file, "another setting of the slaves")
    if os.environ.get("DIPS_POLICIES") == "1":
        assert not reaches(file, "e2e-slave-0.e2e-slave", 9400), "a cluster reads a slave's metrics"
        assert reaches(file, "e2e-slave-0.e2e-slave", 29500), "a cluster does not reach a slave"
    file.write_text(file.read_text().replace("slaves = 2", "slaves = 3"))
    with_keys(file)
    with master_of(file) as address:
        deploy("scale", file, "--yes", "--master", address)
    goes_on(file, "a third slave")
    with master_of(file) as address:
        deploy("drain", file, "b", "--master", address)
    until(lambda: server.get("Job", "e2e-cluster-b")["status"].get("succeeded") == 1, "the drained cluster's Job")
    deploy("delete", file, "--yes", "--delete-volumes")


def reaches(file: Path, host: str, port: int) -> bool:
    """Whether the pod of cluster a can connect to this port."""
    dial = f"import socket; socket.create_connection(({host!r}, {port}), 5)"
    words = ("exec", "job/e2e-cluster-a", "--", "python", "-c", dial)
    return kubectl("--namespace", namespace_of(file), *words).returncode == 0


# ---- with the printed rights alone ----


def test_everything_is_made_and_deleted_with_the_printed_rights_alone(file: Path, tmp_path: Path) -> None:
    """An administrator makes the namespace and gives a service account the Role that `dips deploy rights` prints."""
    namespace, role = namespace_of(file), tmp_path / "role.yaml"
    role.write_text(deploy("rights", file))
    name = yaml.safe_load(role.read_text())["metadata"]["name"]
    who = f"{namespace}:deployer"
    for words in (
        ("create", "namespace", namespace),
        ("apply", "--filename", str(role)),
        ("--namespace", namespace, "create", "serviceaccount", "deployer"),
        ("--namespace", namespace, "create", "rolebinding", "deployer", f"--role={name}", f"--serviceaccount={who}"),
    ):
        done = kubectl(*words)
        assert done.returncode == 0, done.stderr
    token = kubectl("--namespace", namespace, "create", "token", "deployer", "--duration", "1h").stdout.strip()
    theirs = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "--output", "json").stdout)
    theirs["users"] = [{"name": "deployer", "user": {"token": token}}]
    theirs["contexts"][0]["context"]["user"] = "deployer"
    (tmp_path / "kubeconfig").write_text(json.dumps(theirs))
    limited = str(tmp_path / "kubeconfig")
    deploy("apply", file, "--yes", "--no-wait", kubeconfig=limited)
    assert "0 objects were changed" in deploy("apply", file, "--yes", "--no-wait", kubeconfig=limited)
    deploy("delete", file, "--yes", "--delete-volumes", kubeconfig=limited)


# ---- two clusters ----


@WITH_IMAGES
@pytest.mark.skipif(not os.environ.get("DIPS_OTHER_CONTEXT"), reason="DIPS_OTHER_CONTEXT names no second cluster")
def test_the_servers_move_to_another_cluster_with_all_that_they_hold(file: Path) -> None:
    """Node ports: DIPS_ADDRESS and DIPS_OTHER_ADDRESS are hosts at which both clusters and this machine reach them."""
    other = os.environ["DIPS_OTHER_CONTEXT"]
    here, there = (f'address = "{os.environ[name]}"\n' for name in ("DIPS_ADDRESS", "DIPS_OTHER_ADDRESS"))
    site = f'\n[[sites]]\nname = "there"\ncontext = "{other}"\n{there}\n[[clusters]]'
    text = file.read_text().replace('expose = "inside"', 'expose = "node-port"').replace("\n[[clusters]]", site, 1)
    file.write_text(text.replace('name = "here"\n', f'name = "here"\n{here}', 1))
    deploy("apply", file, "--yes")
    until(lambda: published(file) >= 1, "the first version")
    before = published(file)
    file.write_text(file.read_text().replace('placement = "here"', 'placement = "there"\nmaster_port = 30411'))
    deploy("move", file, "--yes")
    assert published(file) >= before
    until(lambda: published(file) > before + 1, "versions after the move")
    deploy("delete", file, "--yes", "--delete-volumes")
