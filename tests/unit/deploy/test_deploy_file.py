"""Deployment files: what they come to, and every mistake as one sentence with the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.deploy_files import EXAMPLE, example, with_keys, written

from dips.core.errors import ConfigError
from dips.core.net.keys import KEY_FILE
from dips.deploy import identities
from dips.deploy.deploy_file import HOST_ANNOTATION, canonical, processors, quantity, read_deploy_file
from dips.deploy.health import endpoints
from dips.local.sizing import SizeKnobs, SizeTable


def test_the_example_puts_the_servers_where_the_papers_rule_says(tmp_path: Path) -> None:
    deployment = read_deploy_file(EXAMPLE)
    # B^T p: amsterdam 10 x 40 + 2 x 55 + 1 x 20 = 530 thousand, frankfurt 2 x 40 + 10 x 55 + 4 x 20 = 710 thousand.
    assert deployment.server_site.name == "frankfurt"
    assert "= 710000" in deployment.why_there
    named = read_deploy_file(example(tmp_path, {'"auto"': '"amsterdam"'}))
    assert named.server_site.name == "amsterdam"
    assert "the file says so" in named.why_there


@pytest.mark.parametrize(
    ("expose", "ports", "addresses"),
    [
        ("node-port", "", ["192.0.2.7:30400", "192.0.2.7:30500", "192.0.2.7:30501"]),
        ("node-port", "master_port = 30001\ndata_port = 30002", [f"192.0.2.7:{n}" for n in (30001, 30002, 30003)]),
        ("load-balancer", "", ["master.x:29400", "slave-0.x:29500", "slave-1.x:29500"]),
        (
            "inside",
            "",
            ["small-master.dips.svc:29400", *(f"small-slave-{n}.small-slave.dips.svc:29500" for n in (0, 1))],
        ),
    ],
)
def test_where_master_and_slaves_are_dialled(tmp_path: Path, expose: str, ports: str, addresses: list[str]) -> None:
    changes = {'"node-port"': f'"{expose}"\n{ports}'}
    if expose == "load-balancer":
        changes['"192.0.2.7"'] = '"{name}.x"'
    found = read_deploy_file(written(tmp_path, changes=changes))
    assert [found.master_address, found.slave_address(0), found.slave_address(1)] == addresses
    assert [address for _, address in endpoints(found)] == ([] if expose == "inside" else addresses)


CLUSTER = '[[clusters]]\nid = "{}"\nsite = "{}"'
MISTAKES = {
    "unknown key": ({"slaves = 2": "slave = 2"}, "[deploy]: 'slave' is not a setting; did you mean 'slaves'?"),
    "no amount": ({'"10M"': '"10 Mparams"'}, "'10 Mparams' is not a count"),
    "a name that Kubernetes refuses": ({'"small"': '"Small_run"'}, "cannot name objects of Kubernetes"),
    "no such placement": ({'"here"\nslaves': '"there"\nslaves'}, "placement = 'there' is none of auto, here"),
    "auto without links": ({'placement = "here"': ""}, "needs a site with a context and bandwidth_gbps"),
    "auto with a link too many": (
        {
            'placement = "here"': "",
            "[[clusters]]": 'bandwidth_gbps = [1]\n[[sites]]\nname = "there"\ncontext = "x"\nbandwidth_gbps = [1, 2]\n'
            "[[clusters]]",
        },
        "there: bandwidth_gbps has 2 numbers for 1 clusters",
    ),
    "auto without speeds": (
        {'placement = "here"': "", 'address = "192.0.2.7"': 'address = "192.0.2.7"\nbandwidth_gbps = [1]'},
        "needs tokens_per_s",
    ),
    "no such site": ({'id = "a"\nsite = "here"': 'id = "a"\nsite = "moon"'}, "site 'moon' is none of here"),
    "the id of a slave": ({'id = "a"': 'id = "s1"'}, "name of another process"),
    "servers without Kubernetes": ({'context = "here"': ""}, "the servers need Kubernetes: give its context"),
    "servers without an address": ({'address = "192.0.2.7"': ""}, "give address, the host at which clusters reach"),
    "one address for all balancers": ({'"node-port"': '"load-balancer"'}, "write '{name}'"),
    "no node port": ({"slaves = 2": "slaves = 2\nmaster_port = 29400"}, "port 29400 cannot be a node port"),
    "ports that meet": ({"slaves = 2": "slaves = 2\nmaster_port = 30501"}, "master_port 30501 is taken by a slave"),
    "a standby nowhere": ({"slaves = 2": 'slaves = 2\nstandby = "moon"'}, "standby = 'moon' is none of here"),
    "a take-over by nothing": ({"slaves = 2": "slaves = 2\ntake_overs = 1"}, "take_overs needs a standby"),
    "a port of no standby": ({"slaves = 2": "slaves = 2\nstandby_port = 30402"}, "standby_port needs a standby"),
    "a standby at a slave's port": (
        {"slaves = 2": 'slaves = 2\nstandby = "here"\nstandby_port = 30501'},
        "is taken by a slave, whose ports are 30500 to",
    ),
    "a pause for no standby": (
        {"[model]": "[master]\nwithout_replica = 'pause'\n[model]"},
        "name its site as [deploy] standby",
    ),
    "a pause that never comes": (
        {
            "slaves = 2": 'slaves = 2\nstandby = "here"',
            "[model]": "[master]\nwithout_replica = 'pause'\njournal_replicas = 0\n[model]",
        },
        "needs journal_replicas = 1",
    ),
    "a lease of another namespace": (
        {"slaves = 2": 'slaves = 2\nstandby = "here"', "[model]": "[master]\nlease = 'kubernetes:x/y'\n[model]"},
        "give kubernetes:dips/small-master",
    ),
    "a lease in one of two": (
        {
            "slaves = 2": 'slaves = 2\nstandby = "there"',
            "[[clusters]]": '[[sites]]\nname = "there"\ncontext = "there"\naddress = "x"\n[[clusters]]',
            "[model]": "[master]\nlease = 'kubernetes:dips/y'\n[model]",
        },
        "standby 'there' is in another one: give etcd:",
    ),
    "a secret for no etcd": (
        {"slaves = 2": 'slaves = 2\nstandby = "here"\nlease_secret = "etcd"'},
        "lease_secret is for a lease in etcd",
    ),
    "chunks that a slave refuses": ({"[model]": '[master]\nchunk_bytes = "8 MiB"\n[model]'}, "max_chunk_bytes"),
    "too small a volume": (
        {"slaves = 2": 'slaves = 2\nslave_volume = "300 MiB"'},
        "slave_volume = 300 MiB is too small: 10M parameters on 2 slaves need",
    ),
    "said twice": ({"[model]": '[master]\nlisten = "0.0.0.0:1"\n[model]'}, "[master]: 'listen' does not belong here"),
    "a wrong setting of a role": ({"[model]": "[master]\nsync_evry = 1\n[model]"}, "did you mean 'sync_every'"),
    "a wrong setting of a cluster": ({"[model]": "[worker]\nwire_dtype = 'int3'\n[model]"}, "'int3' is none of"),
    "no network": ({'address = "192.0.2.7"': 'address = "192.0.2.7"\ncidrs = ["192.0.2.7/24"]'}, "is no network"),
    "nodes of `dips train`": ({'id = "a"': 'id = "a"\nnodes = 2'}, "`dips train` uses one node"),
    "torchrun of nothing, in the second cluster": (
        {'[[clusters]]\nid = "a"': f'{CLUSTER.format("b", "here")}\n[[clusters]]\nid = "a"\ntorchrun = true'},
        "a: torchrun needs a command of yours",
    ),
    "two masters of one program": (
        {'id = "a"': 'id = "a"\nparallel = "fsdp=2"\ncommand = ["x.py"]'},
        "parallel is for `dips train`: your own command decides by itself",
    ),
    "no way to share a model": ({'id = "a"': 'id = "a"\nparallel = "zero=2"'}, "'zero' is no way to share a model"),
    "nodes that do not divide": (
        {'id = "a"': 'id = "a"\nparallel = "fsdp=2,tensor=2"\nnodes = 3'},
        "parallel = 'fsdp=2,tensor=2' is 4 processes on 3 nodes, as many on each",
    ),
    "a batch that cannot be dealt": ({'id = "a"': 'id = "a"\nparallel = "data=7"'}, "[train]"),
    "a parallelism of all": ({"[model]": '[train]\nparallel = "fsdp=2"\n[model]'}, "'parallel' does not belong here"),
    "processes of nothing": ({'id = "a"': 'id = "a"\nprocesses = 4'}, "processes = 4 needs torchrun = true"),
    "too many ranks": (
        {'id = "a"': 'id = "a"\nnodes = 300\ngpus = 8\ntorchrun = true\ncommand = ["x.py"]'},
        "300 nodes of 8 processes are 2400 ranks, and a cluster has at most 1024",
    ),
    "two values of one label": (
        {"slaves = 2": 'slaves = 2\nmonitor_labels = ["release=a", "release=b"]'},
        "monitor_labels: two have the key 'release'",
    ),
    "another run's objects": (
        {"slaves = 2": 'slaves = 2\nmonitor_labels = ["app.kubernetes.io/instance=x"]'},
        "by which `dips deploy` finds its own objects: leave it out",
    ),
    "nodes without a value": ({'id = "a"': 'id = "a"\nnode_selector = ["fast"]'}, "write 'key=value'"),
    "the id of Prometheus": ({'id = "a"': 'id = "prometheus"'}, "name of another process"),
    "all memory is shared": ({'id = "a"': 'id = "a"\nshm = "8 GiB"'}, "leaves nothing for the processes"),
    "a volume without a path": ({'id = "a"': 'id = "a"\nvolumes = ["models"]'}, "'models' is not CLAIM=/path"),
    "a volume of another mode": (
        {'id = "a"': 'id = "a"\nvolumes = ["models=/models:rw"]'},
        "ends with 'rw': write CLAIM=/path:ro, or CLAIM=/path",
    ),
    "a volume over the keys": (
        {'id = "a"': 'id = "a"\nvolumes = ["models=/etc/../etc/dips"]'},
        "mounts models at /etc/dips, and /etc/dips/keys is taken",
    ),
    "two volumes at one place": (
        {'id = "a"': 'id = "a"\nvolumes = ["one=/models", "two=/models/"]'},
        "volumes has /models twice",
    ),
    "a variable of ours": ({'id = "a"': 'id = "a"\nenv = ["HOME=/root"]'}, "env has HOME, which `dips deploy` sets"),
    "a setting as a variable": (
        {'id = "a"': 'id = "a"\nenv = ["DIPS_WORKER_WIRE_DTYPE=int8"]'},
        "env has DIPS_WORKER_WIRE_DTYPE, which `dips deploy` sets itself: set it in [worker] or [train]",
    ),
    "no name of a variable": ({'id = "a"': 'id = "a"\nenv = ["a-b=1"]'}, "'a-b', which is no name of a variable"),
    "processors twice": ({'id = "a"': 'id = "a"\nresources = ["cpu=4"]'}, "resources has 'cpu', which cpus gives"),
    "no amount of a resource": (
        {'id = "a"': 'id = "a"\nresources = ["rdma/hca=one"]'},
        "resources has rdma/hca=one, and an amount is a whole number",
    ),
    "a name in a policy": (
        {'id = "a"': 'id = "a"\negress = ["hub.example.org:443"]'},
        "policies of Kubernetes know no host names",
    ),
    "a network without a port": ({'id = "a"': 'id = "a"\negress = ["192.0.2.0/24"]'}, "does not end with a port"),
    "a pod's setting for a script": (
        {'context = "here"\n': 'context = "here"\n', 'id = "a"': 'id = "a"\nstarts = "slurm"\nhost_network = true'},
        "host_network is for pods, and starts = 'slurm' has none",
    ),
    "annotations of nothing": (
        {"slaves = 2": 'slaves = 2\nload_balancer_annotations = ["a=b"]'},
        "load_balancer_annotations need expose = 'load-balancer', not 'node-port'",
    ),
    "two digests of one image": (
        {"slaves = 2": f'slaves = 2\ndigests = ["slave=sha256:{"0" * 64}", "slave=sha256:{"1" * 64}"]'},
        "digests has slave twice",
    ),
    "an annotation of ours": (
        {
            "192.0.2.7": "{name}.x.org",
            '"node-port"': f'"load-balancer"\nload_balancer_annotations = ["{HOST_ANNOTATION}=x"]',
        },
        f"{HOST_ANNOTATION} follows from the site's address",
    ),
    "two clusters of one name": (
        {"[[clusters]]": f"{CLUSTER.format('a', 'here')}\n[[clusters]]"},
        "two have the id 'a'",
    ),
    "a cluster elsewhere is not reached from inside": (
        {
            '"node-port"': '"inside"',
            "[[clusters]]": f'[[sites]]\nname = "x"\ncontext = "x"\n{CLUSTER.format("b", "x")}\n[[clusters]]',
        },
        "expose = 'inside' reaches the context 'here' alone",
    ),
    "no digest": ({"slaves = 2": 'slaves = 2\ndigests = ["sha256:00"]'}, "is not ROLE=sha256:…"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_with_its_place_and_the_remedy(name: str, tmp_path: Path) -> None:
    changes, words = MISTAKES[name]
    file = written(tmp_path, changes=changes)
    with pytest.raises(ConfigError) as refused:
        read_deploy_file(file)
    assert words in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_keys_are_told_with_the_command_that_makes_them(tmp_path: Path) -> None:
    deployment = read_deploy_file(written(tmp_path))
    with pytest.raises(ConfigError) as refused:
        identities.check(deployment)
    assert f"dips keys init {tmp_path / 'keys'} --slave s0 --slave s1 --slave supervisor" in str(refused.value)
    with_keys(tmp_path / "run.toml")
    identities.check(deployment)
    for file in (tmp_path / "keys" / "a").iterdir():
        file.unlink()
    (tmp_path / "keys" / "a").rmdir()
    with pytest.raises(ConfigError, match=r"dips keys add .* --cluster a`"):
        identities.check(deployment)


@pytest.mark.parametrize(
    ("files", "words"),
    [(KEY_FILE, "does not belong to"), ("*", "holds the keys of slave s1, not of slave s0")],
)
def test_a_wrong_key_is_found_before_anything_is_made(tmp_path: Path, files: str, words: str) -> None:
    deployment = with_keys(written(tmp_path))
    for file in (tmp_path / "keys" / "s1").glob(files):
        (tmp_path / "keys" / "s0" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=words):
        identities.check(deployment)


def test_sizes_and_processors_are_written_as_the_api_gives_them_back() -> None:
    sizes = {1: "1Mi", (1 << 20) + 1: "2Mi", 1 << 30: "1Gi", 1536 << 20: "1536Mi", 5 << 40: "5Ti", 3 << 60: "3072Pi"}
    assert {n_bytes: quantity(n_bytes) for n_bytes in sizes} == sizes
    assert [canonical(amount) for amount in ("1", "2048Mi", "3Gi", "1024Ti")] == ["1", "2Gi", "3Gi", "1Pi"]
    assert [processors(cpus) for cpus in (1, 0.05, 2.5)] == ["1", "50m", "2500m"]


def test_memory_follows_from_the_ranks(tmp_path: Path) -> None:
    """What Di-PS takes on a node: all of the model in one process, or the shares of its ranks."""
    four = 'id = "a"\ntorchrun = true\nprocesses = 2\nnodes = 2\ncommand = ["train.py"]'
    one, ranks = (
        read_deploy_file(written(tmp_path, changes={"10M": "1B", 'id = "a"': text})) for text in ('id = "a"', four)
    )
    table = SizeTable(SizeKnobs(params=1_000_000_000, clusters=1, slaves=2, ranks=4, link="1gbps"))
    assert ranks.sizes.node_bytes == {"a": 2 * table.whole("rank_memory_most_bytes")}
    assert ranks.sizes.node_bytes["a"] < 0.4 * one.sizes.node_bytes["a"]
    many = four.replace("processes = 2", "processes = 64")
    slave = read_deploy_file(written(tmp_path, changes={"10M": "1B", 'id = "a"': many})).sizes.slave_process_bytes
    assert slave > ranks.sizes.slave_process_bytes == one.sizes.slave_process_bytes, "a chunk of each rank at least"
