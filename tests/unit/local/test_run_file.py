"""The file of `dips up`: what it makes, and that every mistake is told before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dips.core.errors import ConfigError
from dips.local.log_files import tape_path
from dips.local.processes import OwnCluster, TrainedCluster
from dips.local.run_file import read_run_file

EXAMPLES = Path(__file__).parents[3] / "examples"
PUBLIC = '[master]\nlisten = "10.0.0.1:29400"\n'
HEAD = '[run]\nid = "mine"\ndirectory = "runs/mine"\n'


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIPS_MASTER", "DIPS_RUN", "DIPS_CLUSTER", "DIPS_KEYS", "DIPS_INSECURE"):
        monkeypatch.delenv(name, raising=False)


def test_a_whole_run(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[run]\nid = "mine"\ndirectory = "runs/mine"\nslaves = 2\nevaluate = true\n'
        '[master]\nsync_every = 8\ntk_max = "1.5M"\n[slave]\nmemory_bytes = "64 MiB"\n'
        "[worker]\ncall_deadline_s = 7\n[train]\nlr = 0.002\nbatch_size = 8\n"
        '[[clusters]]\nid = "a"\n'
        '[[clusters]]\nid = "b"\ngap = 0.5\nlr = 0.001\ncall_deadline_s = "9 s"\n',
    )
    plan = read_run_file(file)
    assert (plan.run.id, plan.run.slave_ids, plan.cluster_ids) == ("mine", ("s0", "s1"), ["a", "b"])
    assert (plan.master.sync_every, plan.master.tk_max, plan.master.slaves) == (8, 1_500_000, 2)
    assert plan.master.directory == Path("runs/mine/master").absolute()
    assert plan.slaves[1].directory == Path("runs/mine/slaves/s1").absolute()
    assert {slave.memory_bytes for slave in plan.slaves} == {64 << 20}
    first, second = plan.clusters
    assert isinstance(first, TrainedCluster)
    assert isinstance(second, TrainedCluster)
    assert (first.train.lr, first.train.emulate_gap, first.client.call_deadline_s) == (0.002, 0.0, 7.0)
    assert (second.train.lr, second.train.emulate_gap, second.client.call_deadline_s) == (0.001, 0.5, 9.0)
    assert (second.train.batch_size, second.client.run_id) == (8, "mine")
    assert second.client.tape == tape_path(Path("runs/mine").absolute(), "b")
    assert second.client.checkpoint_dir == Path("runs/mine/checkpoints/b").absolute()
    assert second.client.resume, "whatever dies is started again, and goes on"
    assert plan.evaluate is not None
    assert plan.evaluate.lr == 0.002


def test_a_group_for_the_files_of_all_is_in_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIPS_FILES_GROUP", raising=False)
    assert read_run_file(write(tmp_path, HEAD)).run.files_group == ""
    plan = read_run_file(write(tmp_path, f'{HEAD}files_group = "team"\n'))
    assert plan.run.files_group == "team"
    monkeypatch.setenv("DIPS_FILES_GROUP", "others")
    assert read_run_file(write(tmp_path, f'{HEAD}files_group = "team"\n')).run.files_group == "others"


def test_metrics_and_log_lines_are_those_of_all(tmp_path: Path) -> None:
    assert not read_run_file(write(tmp_path, HEAD)).run.metrics
    text = HEAD + 'metrics = true\n[slave]\nmetrics_listen = "127.0.0.1:9400"\n'
    plan = read_run_file(write(tmp_path, text))
    assert plan.run.metrics
    assert plan.slaves[0].metrics_listen == "127.0.0.1:9400"
    clusters = '[[clusters]]\nid = "a"\n[[clusters]]\nid = "b"\ncommand = ["x"]\n'
    file = write(tmp_path, HEAD + '[master]\nlog_format = "human"\n' + clusters)
    plan = read_run_file(file, log_format="json")
    assert {plan.master.log_format, plan.slaves[0].log_format, plan.clusters[0].client.log_format} == {"json"}
    assert plan.run.log_format == "json"
    assert plan.clusters[1] == OwnCluster("b", ("x",))


def test_what_clusters_a_file_may_name(tmp_path: Path) -> None:
    plan = read_run_file(write(tmp_path, HEAD))
    assert (plan.clusters, plan.evaluate, plan.run.slave_ids) == ((), None, ("s0",))
    text = HEAD + '[[clusters]]\nid = "a"\ncommand = ["python", "my_loop.py"]\n'
    plan = read_run_file(write(tmp_path, text))
    assert plan.clusters == (OwnCluster("a", ("python", "my_loop.py")),)
    text = (
        HEAD + '[worker]\nwire_dtype = "int8"\nleave_wait_s = 40\n[[clusters]]\nid = "a"\ncommand = ["x"]\n'
        '[[clusters]]\nid = "b"\ncommand = ["y"]\nwire_dtype = "int4"\n'
    )
    first, second = read_run_file(write(tmp_path, text)).clusters
    assert (first.client.wire_dtype, first.client.leave_wait_s) == ("int8", 40.0)
    assert (second.client.wire_dtype, second.client.leave_wait_s) == ("int4", 40.0)


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPS_MASTER_SYNC_EVERY", "5")
    monkeypatch.setenv("DIPS_TRAIN_LR", "0.5")
    text = HEAD + '[master]\nsync_every = 8\n[train]\nlr = 0.1\n[[clusters]]\nid = "a"\n'
    plan = read_run_file(write(tmp_path, text))
    assert plan.master.sync_every == 5
    assert isinstance(plan.clusters[0], TrainedCluster)
    assert plan.clusters[0].train.lr == 0.5


@pytest.mark.parametrize(
    ("line", "variable", "names"),
    [("slaves = 2\n", "", ["s0", "s1"]), ('slaves = ["s1", "s2"]\n', "", ["s1", "s2"]), ("", "3", ["s0", "s1", "s2"]),
     ("", "s1,s2", ["s1", "s2"])],
)  # fmt: skip
def test_slaves_are_a_number_or_the_names_that_a_reshard_left(
    tmp_path: Path, line: str, variable: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPS_RUN_SLAVES", variable)
    plan = read_run_file(write(tmp_path, HEAD + line))
    assert (plan.run.slave_ids, plan.master.slaves) == (tuple(names), len(names))
    assert plan.slaves[-1].directory == (plan.run.directory / "slaves" / names[-1]).absolute()


@pytest.mark.parametrize("name", ["local.toml", "server.toml"])
def test_the_examples_are_good(name: str) -> None:
    plan = read_run_file(EXAMPLES / name)
    assert plan.run.id == plan.master.run_id
    assert plan.master.tk_max > 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[run]\nid = "mine"\n', "directory is not given"),
        ('[run]\nid = "Not A Name"\ndirectory = "x"\n', "is not a name"),
        (HEAD + "slave = 3\n", "did you mean 'slaves'"),
        (HEAD + 'slaves = ["s1", "s1"]\n', "two have the name 's1'"),
        (HEAD + "slaves = []\n", "slaves = []"),
        (HEAD + '[master]\ngrace_s = "1 min"\n', "lower grace_s"),
        (HEAD + '[worker]\nwire_dtyp = "int8"\n', "[worker]: 'wire_dtyp' is not a setting; did you mean 'wire_dtype'"),
        (HEAD + '[master]\nlog_level = "loud"\n', "log level 'loud' is unknown: choose DEBUG"),
        (HEAD + '[master]\nchunk_bytes = "8 MiB"\n', "raise the slave's max_chunk_bytes"),
        (HEAD + '[master]\ndurability = "async"\n[slave]\nsnapshots_kept = 2\n', "raise its snapshots_kept to 3"),
        (HEAD + '[[clusters]]\nid = "a"\ncommand = ["x"]\ngap = 0.1\n', "gap = 0.1 slows `dips train` only"),
        (HEAD + '[[clusters]]\nid = "a"\ngapp = 0.1\n', "[[clusters]] 1: 'gapp' is not a setting; did you mean 'gap'"),
        (HEAD + '[[clusters]]\nid = "a"\n[[clusters]]\nid = "b"\nlr = "fast"\n', "[[clusters]] 2: lr = 'fast'"),
        (HEAD + "[[clusters]]\ngap = 0.1\n", "[[clusters]] 1: id is not given"),
        (HEAD + '[[clusters]]\nid = "a"\n[[clusters]]\nid = "a"\n', "two have the id 'a'"),
        (HEAD + '[[clusters]]\nid = "s0"\n', "'s0' is the name of another process"),
        (HEAD + '[clusters]\nid = "a"\n', "'clusters' is not a list of tables: write each below a line [[clusters]]"),
        (HEAD + '[[clusters]]\nid = "a"\ncommand = ["x"]\nlr = 0.1\n', "'lr' is not a setting"),
        (
            HEAD + '[master]\nmax_clusters = 1\n[[clusters]]\nid = "a"\n[[clusters]]\nid = "b"\n',
            "max_clusters is 1: raise it",
        ),
        (
            HEAD + 'slaves = 2\n[slave]\nmetrics_listen = "127.0.0.1:9400"\n',
            "[slave] metrics_listen 127.0.0.1:9400 is the address of 2 processes: give port 0",
        ),
        (HEAD + '[track]\nto = "visdom"\n', "[track]: to = 'visdom'"),
        (HEAD + '[[clusters]]\nid = "track"\n', "'track' is the name of another process"),
        (HEAD + 'keys_for = ["../x"]\n', "[run]: keys_for = "),
        (HEAD + '[master]\nkeys = "k"\n', "[master]: 'keys' does not belong here"),
        (HEAD + '[worker]\nkeys = "k"\n', "set `insecure = true` in [run]"),
        (HEAD + '[[clusters]]\nid = "a"\ninsecure = true\n', "[[clusters]] 1: 'insecure' does not belong here"),
        (HEAD + '[master]\nlisten = "0.0.0.0:29400"\n', "set [run] advertise"),
        (HEAD + PUBLIC + '[slave]\ndata_host = "127.0.0.1"\n', "leave out data_host"),
        (HEAD + PUBLIC + '[slave]\nadvertise = "localhost:29500"\n', "leads other machines to themselves"),
        (HEAD + 'advertise = "10.0.0.1"\n', "where only this machine finds it"),
        (HEAD + 'advertise = "localhost"\n' + PUBLIC, "where no other machine finds this one"),
        (HEAD + 'advertise = "10.0.0.1:29400"\n' + PUBLIC, "without a port"),
        (HEAD + "slaves = 3\n" + PUBLIC + "[slave]\ndata_port = 65534\n", "leaves no port for slave s2"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_remedy(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        read_run_file(write(tmp_path, text))
    assert sentence in str(told.value)


def test_keys_and_insecure_runs(tmp_path: Path) -> None:
    plan = read_run_file(write(tmp_path, HEAD + 'keys_for = ["x"]\n'))
    assert (plan.run.insecure, plan.run.keys_for) == (False, ("x",))
    for text, flag in ((HEAD + "insecure = true\n", False), (HEAD, True)):
        plan = read_run_file(write(tmp_path, text), insecure=flag or None)
        assert plan.run.insecure
        assert plan.master.insecure
        assert all(slave.insecure for slave in plan.slaves)
    listen = '[master]\nlisten = "0.0.0.0:29400"\n'
    with pytest.raises(ConfigError, match="not a loopback address"):
        read_run_file(write(tmp_path, HEAD + "insecure = true\n" + listen))
    plan = read_run_file(write(tmp_path, HEAD + 'advertise = "10.0.0.1"\n' + listen))
    assert plan.master.listen == "0.0.0.0:29400"


def test_slaves_listen_and_are_told_where_the_master_does(tmp_path: Path) -> None:
    """A router's, or a name: then every address is bound."""
    plan = read_run_file(write(tmp_path, HEAD + "slaves = 2\n" + PUBLIC + "[slave]\ndata_port = 29500\n"))
    assert plan.public_host == "10.0.0.1"
    assert [(s.data_host, s.data_port, s.advertise) for s in plan.slaves] == [
        ("10.0.0.1", 29500, "10.0.0.1:0"),
        ("10.0.0.1", 29501, "10.0.0.1:0"),
    ]
    alone = read_run_file(write(tmp_path, HEAD))
    assert (alone.public_host, alone.slaves[0].data_host, alone.slaves[0].advertise) == ("", "127.0.0.1", "")
    text = HEAD + 'slaves = 2\nadvertise = "train.example"\n[master]\nlisten = "0.0.0.0:29400"\n'
    own = text + '[slave]\nadvertise = "10.0.0.9:30000"\ndata_port = 29500\n'
    name = HEAD + 'slaves = 2\n[master]\nlisten = "train.example:29400"\n'
    found = [read_run_file(write(tmp_path, one)) for one in (text, name, own)]
    assert {plan.public_host for plan in found} == {"train.example"}
    told = [[(slave.data_host, slave.data_port, slave.advertise) for slave in plan.slaves] for plan in found]
    assert told[:2] == [[("0.0.0.0", 0, "train.example:0")] * 2] * 2
    assert told[2] == [("0.0.0.0", 29500, "10.0.0.9:30000"), ("0.0.0.0", 29501, "10.0.0.9:30001")]
