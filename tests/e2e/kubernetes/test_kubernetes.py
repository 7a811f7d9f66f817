"""A deployment on the cluster that KUBECONFIG names: `make e2e-kubernetes`.

The first test needs an API server with StatefulSet, policy/v1 and batch/v1 and shows that it takes the objects, gives
them back so that nothing is left to change, and keeps volumes. The second needs a cluster that runs pods, and images:
DIPS_IMAGES=registry/path and DIPS_TAG; it trains, loses a slave, gets one more, and ends. Each has a namespace of its
own and deletes it.
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
from support.deploy_files import with_keys
from support.dips_command import dips
from support.waiting import until

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


def deploy(*words: object, code: int = 0) -> str:
    done = dips("deploy", *words, KUBECONFIG=os.environ["KUBECONFIG"])
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
        words = ("deploy", "status", file, "--json", "--master", address)
        done = dips(*words, KUBECONFIG=os.environ["KUBECONFIG"])
    assert done.returncode in (0, 4), done.stderr  # 4 while something waits
    published = (json.loads(done.stdout)["run"] or {}).get("published")
    return int(published.split(":")[1]) if published else -1


@pytest.mark.skipif(not os.environ.get("DIPS_IMAGES"), reason="DIPS_IMAGES names no images that the cluster can pull")
def test_a_run_trains_and_survives_the_loss_of_a_slave_and_gets_one_more(file: Path) -> None:
    deploy("apply", file, "--yes", "--no-reach")
    until(lambda: version(file) >= 1, "the first version")
    server = api(namespace_of(file))
    server.delete("Pod", "e2e-slave-1")
    before = version(file)
    until(lambda: version(file) > before + 1, "versions after the loss of a slave")
    file.write_text(file.read_text().replace("slaves = 2", "slaves = 3"))
    with_keys(file)
    with master_of(file) as address:
        deploy("scale", file, "--yes", "--master", address)
    before = version(file)
    until(lambda: version(file) > before + 1, "versions on three slaves")
    with master_of(file) as address:
        deploy("drain", file, "b", "--master", address)
    until(lambda: server.get("Job", "e2e-cluster-b")["status"].get("succeeded") == 1, "the drained cluster's Job")
    deploy("delete", file, "--yes", "--delete-volumes")
