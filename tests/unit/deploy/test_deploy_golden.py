"""Everything that is rendered of a file, word by word: of the base that is committed, and of one that says all it can.

`DIPS_REWRITE_GOLDEN=1 pytest tests/unit/deploy/test_deploy_golden.py` writes the second one again; then read the
difference. What must hold for every deployment is in test_deploy_objects.py.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from support.deploy_files import BASE, example
from support.repository import ROOT

from dips.deploy.deploy_file import read_deploy_file
from dips.deploy.render import write_folders

FOLDER = ROOT / "deploy" / "kubernetes" / "base"
GOLDEN = ROOT / "tests" / "golden" / "deploy" / "everything.txt"
COMMITTED = ("namespace", "servers", "cluster-job", "cluster-torchrun")
"""Folders of the base that overlays build on; `dips deploy render` writes the others when they are needed."""

SERVERS = f"""slaves = 3
standby = "amsterdam"
take_overs = 1
lease_secret = "etcd"
digests = ["slave=sha256:{"0123456789abcdef" * 4}"]
pull_secret = "registry"
ip_family = "ipv6"
spread = "preferred"
storage_class = "fast"
server_node_selector = ["pool=servers"]
server_tolerate = ["dedicated"]
server_priority_class = "servers"
monitor_labels = ["release=prometheus"]
load_balancer_annotations = ["example.org/kind=fast"]"""
CLUSTER = """
shm = "2 GiB"
resources = ["rdma/hca=1", "ephemeral-storage=10240Mi"]
host_network = true
env = ["NCCL_DEBUG=INFO", "QUERY=a=b"]
volumes = ["models=/models:ro", "models=/cache", "scratch=/scratch"]
egress = ["192.0.2.0/24:9000", "2001:db8::/32:443", "anywhere:443"]
priority_class = "training"
restarts = 5
data_claim"""
TRAINED = """
[worker]
wire_dtype = "int8"
leave_wait_s = 200.5
[train]
batch_size = 16
[[clusters]]
id = "d"
site = "amsterdam"
tokens_per_s = 1.0
nodes = 2
parallel = "fsdp=2,data=2"
node_selector = ["pool=training"]
[[clusters]]
id = "e"
site = "stockholm"
tokens_per_s = 1.0
starts = "command"
"""


def rendered(file: Path, folder: Path) -> dict[str, str]:
    """The text of each file, by its name."""
    made = write_folders(read_deploy_file(file), folder)
    return {str(path.relative_to(folder)): path.read_text().replace(str(file), "FILE") for path in made}


def test_the_base_is_what_is_rendered_now(tmp_path: Path) -> None:
    texts = rendered(BASE, tmp_path)
    now = {name: text for name, text in texts.items() if name.partition("/")[0] in COMMITTED}
    there = FOLDER.rglob("*")
    committed = {str(path.relative_to(FOLDER)): path.read_text() for path in there if path.is_file()}
    assert {name: text.replace(str(BASE.relative_to(ROOT)), "FILE") for name, text in committed.items()} == now, (
        "deploy/kubernetes/base is old: make manifests"
    )
    assert (tmp_path / "scripts" / "dips-shell.sh").stat().st_mode & 0o777 == 0o755


def test_a_file_that_says_everything_is_rendered_as_the_golden_one(tmp_path: Path) -> None:
    links = {f"{old}]": f"{old}, 1.0, 1.0]" for old in ("10.0, 2.0, 1.0", "2.0, 10.0, 4.0")}
    changes = {
        "slaves = 3": SERVERS,
        "\ndata_claim": CLUSTER,
        "max_clusters = 4": 'max_clusters = 6\nlease = "etcd:https://etcd.example.org:2379"',
        **links,
    }
    file = example(tmp_path, changes)
    file.write_text(file.read_text() + TRAINED)
    text = "".join(f"==== {name}\n{one}" for name, one in sorted(rendered(file, tmp_path / "out").items()))
    if os.environ.get("DIPS_REWRITE_GOLDEN"):
        GOLDEN.write_text(text)
    golden = GOLDEN.read_text()
    difference = difflib.unified_diff(golden.splitlines(), text.splitlines(), GOLDEN.name, "now", lineterm="")
    assert text == golden, "\n".join(["what is rendered changed:", *difference])
