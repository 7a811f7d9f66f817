"""Deployment files for tests: the example of three sites, and a small one, with keys and changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.repository import ROOT

from dips.core.net.security import Role
from dips.deploy.deploy_file import Deployment, read_deploy_file
from dips.deploy.identities import wanted
from dips.local.authority import ensure_keys

EXAMPLE = ROOT / "examples" / "three-sites.toml"
ONE_CLUSTER = ROOT / "examples" / "one-cluster.toml"
BASE = ROOT / "deploy" / "kubernetes" / "base.toml"

SMALL = """
[deploy]
run_id = "small"
images = "registry.example.org/dips"
tag = "1"
keys = "KEYS"
placement = "here"
slaves = 2
expose = "node-port"

[model]
parameters = "10M"

[[sites]]
name = "here"
context = "here"
address = "192.0.2.7"

[[clusters]]
id = "a"
site = "here"
"""

_OF_THE_CLUSTER = """
gpus = 8
shm = "2 GiB"
resources = ["rdma/hca=1", "ephemeral-storage=10Gi"]
host_network = true
env = ["NCCL_DEBUG=INFO"]
volumes = ["models=/models:ro", "models=/cache", "scratch=/scratch"]
egress = ["192.0.2.0/24:9000", "2001:db8::/32:443", "anywhere:443"]
priority_class = "training"
node_selector = ["pool=training"]
tolerate = ["nvidia.com/gpu"]"""
_OF_THE_SERVERS = """
ip_family = "ipv6"
server_node_selector = ["pool=servers"]
server_tolerate = ["dedicated"]
server_priority_class = "servers"
load_balancer_annotations = ["example.org/kind=fast"]"""
EVERY_KNOB = {
    'id = "a"': f'id = "a"{_OF_THE_CLUSTER}',
    "slaves = 2": f"slaves = 2{_OF_THE_SERVERS}",
    '"node-port"': '"load-balancer"',
    '"192.0.2.7"': '"{name}.example.org"',
}
"""Changes of SMALL, by which pods and Services have all that a file can give them."""


def written(
    folder: Path, text: str = SMALL, changes: Mapping[str, str] | None = None, *, keys: bool = False
) -> Path:  # fmt: skip
    """A file in the folder, and its keys if asked for. Each change must hit, or the test tests nothing."""
    for old, new in {"KEYS": str(folder / "keys"), **(changes or {})}.items():
        assert old in text, old
        text = text.replace(old, new)
    file = folder / "run.toml"
    file.write_text(text)
    if keys:
        with_keys(file)
    return file


def example(folder: Path, changes: Mapping[str, str] | None = None) -> Path:
    text = EXAMPLE.read_text().replace("runs/three-sites/keys", "KEYS")
    return written(folder, text, changes)


def with_keys(file: Path) -> Deployment:
    deployment = read_deploy_file(file)
    names = {role: [one.name for one in wanted(deployment) if one.role is role] for role in Role}
    ensure_keys(deployment.run.keys, names[Role.CLUSTER], names[Role.SLAVE], names[Role.OPERATOR])
    return deployment
