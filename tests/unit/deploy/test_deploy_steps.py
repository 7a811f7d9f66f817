"""Rollout, scale, drain, delete and move against API servers in memory: what is asked of them, and in which order."""

from __future__ import annotations

import contextlib
import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from support.api_stand_in import write_kubeconfig
from support.deploy_files import SMALL, with_keys, written
from support.deploy_site import Master

from dips.core.errors import ConfigError, FatalError, RetryLater
from dips.deploy.compare import ObjectAction, step_for
from dips.deploy.deploy_file import Deployment, quantity, read_deploy_file
from dips.deploy.health import Health, ObjectState
from dips.deploy.kubernetes_api import open_context
from dips.deploy.move import Move, volumes
from dips.deploy.operate import LiveDeployment
from dips.deploy.rollout import WORKLOADS, Rollout, everything, lines, stages

Object = dict[str, Any]
Log = list[tuple[str, ...]]


def merged(old: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(patch, Mapping):
        return patch
    found = dict(old) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        found.pop(key, None) if value is None else found.update({key: merged(found.get(key), value)})
    return found


@dataclass
class Api:
    """One context. log: what was changed, of all contexts, with what was said between. lasting: how many looks an
    object stays after its deletion."""

    context: str
    log: Log
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    refuses: set[tuple[str, str]] = field(default_factory=set)
    lasting: dict[tuple[str, str], int] = field(default_factory=dict)
    looks: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    cleared: str = "cleared\n"
    released: int = 0

    def check_release(self) -> None:
        self.released += 1

    def get(self, kind: str, name: str) -> Object | None:
        if (kind, name) in self.lasting:
            self.looks += 1
            self.lasting[kind, name] -= 1
            if self.lasting[kind, name] <= 0:
                del self.lasting[kind, name]
                self.objects.pop((kind, name), None)
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, labels: Mapping[str, str]) -> list[Object]:
        named = sorted((one["metadata"]["name"], one) for (of, _), one in self.objects.items() if of == kind)
        return [one for _, one in named if labels.items() <= one["metadata"].get("labels", {}).items()]

    def _note(self, what: str, document: Object, dry_run: bool) -> None:
        kind, name = document["kind"], document["metadata"]["name"]
        self.log.append((f"{what}{' dry' * dry_run}", self.context, kind, name))
        if (what, kind) in self.refuses:
            raise ConfigError(f"{kind} {name} is refused")

    def create(self, document: Object, dry_run: bool = False) -> Object | None:
        self._note("create", document, dry_run)
        if not dry_run:
            made = copy.deepcopy(document)
            n = made.get("spec", {}).get("replicas", 1)
            made["status"] = {"readyReplicas": n, "updatedReplicas": n, "availableReplicas": n, "phase": "Running"}
            made["status"] |= {"active": 1, "ready": 1}
            self.objects[document["kind"], document["metadata"]["name"]] = made
        return None

    def patch(self, document: Object, patch: Object, dry_run: bool = False) -> Object | None:
        self._note("patch", document, dry_run)
        if not dry_run:
            key = document["kind"], document["metadata"]["name"]
            self.objects[key] = merged(self.objects[key], patch)
            n = self.objects[key].get("spec", {}).get("replicas", 1)
            self.objects[key].setdefault("status", {}).update(readyReplicas=n, updatedReplicas=n)
        return None

    def delete(self, kind: str, name: str, uid: str = "") -> bool:
        self.log.append(("delete", self.context, kind, name))
        there = (kind, name) in self.objects
        if kind not in (*WORKLOADS, "Pod"):
            self.objects.pop((kind, name), None)
        elif there:
            self.lasting.setdefault((kind, name), 3)
        return there

    # ---- of a move ----

    def output_of(self, pod: str, command: Sequence[str], wait_s: float) -> str:
        assert ("Pod", pod) in self.objects
        self.log.append(("run", self.context, pod, command[-1].split()[0]))
        return self.cleared if "rm -rf" in command[-1] else self.files.get(pod, b"").decode()

    def printed(self, pod: str, command: Sequence[str]) -> Iterator[bytes]:
        yield from (b"a", b"bc", b"d")

    def feed(self, pod: str, command: Sequence[str], chunks: Iterable[bytes]) -> None:
        self.log.append(("feed", self.context, pod, b"".join(chunks).decode()))


@dataclass
class Run:
    """A run of two slaves on its API servers, and its master. said: by the rollout. closed: ports that refuse."""

    file: Path
    log: Log = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    waits: bool = True
    wait_s: float = 60.0
    closed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        contexts = [site.context for site in read_deploy_file(self.file).sites]
        self.apis = {context: Api(context, self.log) for context in contexts}
        self.master = Master(["s0", "s1"], ["a"])
        self.seconds = 0.0
        self.pauses_s: list[float] = []

    @property
    def deployment(self) -> Deployment:
        return read_deploy_file(self.file)

    def passes(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.seconds += pause_s

    def rollout(self) -> Rollout:
        return Rollout(self.apis, self.said.append, self.wait_s, self.waits, self.passes, lambda: self.seconds)

    def live(self, deployment: Deployment | None = None) -> LiveDeployment:
        def dial(host: str, port: int) -> None:
            self.log.append(("dial", host, str(port)))
            if port in self.closed:
                raise ConnectionRefusedError(111, "Connection refused")

        found = deployment or self.deployment
        return LiveDeployment(found, self.apis, self.rollout(), lambda: contextlib.nullcontext(self.master), dial)

    def apply(self) -> int:
        site = self.live()
        return site.apply(site.difference())

    def changed(self, *words: str) -> list[tuple[str, ...]]:
        """What was really changed, of these actions, since it was last asked."""
        found = [one for one in self.log if one[0] in (words or ("create", "patch", "delete"))]
        self.log.clear()
        self.said.clear()
        return found


@pytest.fixture
def unmade(tmp_path: Path) -> Run:
    """Nothing of it is there yet."""
    return Run(written(tmp_path, keys=True))


@pytest.fixture
def run(unmade: Run) -> Run:
    unmade.apply()
    unmade.changed()
    return unmade


def edited(run: Run, old: str, new: str) -> None:
    text = run.file.read_text()
    assert old in text
    run.file.write_text(text.replace(old, new))
    with_keys(run.file)


# ---- apply ----


def test_everything_is_tried_before_the_first_object_is_made(unmade: Run) -> None:
    run = unmade
    run.apis["here"].refuses.add(("create", "Job"))
    with pytest.raises(ConfigError, match="no slaves yet"):
        run.live().scale()
    with pytest.raises(ConfigError, match="Job small-cluster-a is refused"):
        run.apply()
    first = [one for one in run.log if one[0] == "create"]
    assert {one[2] for one in first} == {"Namespace", "Role"}, "nothing else can be tried without them"
    assert [one[2] for one in run.log if one[0] == "delete"] == [one[2] for one in reversed(first)], "and they go again"
    run.apis["here"].refuses.clear()
    run.apis["here"].lasting.clear()
    run.apis["here"].objects.clear()
    run.changed()
    made = run.apply()
    tried = [one[2:] for one in run.log if one[0] == "create dry"]
    kept = [one[2:] for one in run.log if one[0] == "create"]
    assert len(kept) == len(set(kept)) == made
    assert set(tried) == {one for one in kept if one[0] not in ("Namespace", "Role")}
    assert {one[0] for one in run.log[: len(kept)]} == {"create", "create dry"}
    assert run.log.index(("dial", "192.0.2.7", "30400")) > run.log.index(
        ("create", "here", "StatefulSet", "small-slave")
    )
    assert run.log.index(("dial", "192.0.2.7", "30501")) < run.log.index(("create", "here", "Job", "small-cluster-a"))
    assert sum(said.startswith("+ ") for said in run.said) == made
    assert run.apply() == 0


def test_the_clusters_wait_for_the_masters_slaves(unmade: Run) -> None:
    run = unmade
    run.master.slaves = ["s0"]
    with pytest.raises(RetryLater, match="1 of 2 slaves"):
        run.apply()
    assert set(run.pauses_s) == {2.0}
    assert run.seconds == 60.0
    assert run.said.count("the run: 1 of 2 slaves are with the master") == 1, "said once, not at every look"
    assert not run.apis["here"].list("Job", {})
    silent = LiveDeployment(run.deployment, run.apis, run.rollout(), away, lambda host, port: None)
    with pytest.raises(RetryLater, match="does not answer"):
        silent.apply(silent.difference())
    run.waits = False
    assert run.live().apply(run.live().difference(), reach=False) > 0
    assert run.apis["here"].list("Job", {})


def away() -> Any:
    raise RetryLater("the master does not answer")


def test_what_must_hold_before_is_asked_of_every_context(run: Run) -> None:
    edited(run, "[[clusters]]", '[[sites]]\nname = "there"\ncontext = "there"\naddress = "192.0.2.8"\n\n[[clusters]]')
    there = Api("there", run.log)
    run.apis["there"] = there
    there.objects["Namespace", "dips"] = {"status": {"phase": "Terminating"}}
    there.lasting["Namespace", "dips"] = 4
    run.live().prepare()
    assert (run.apis["here"].released, there.released) == (1, 1)
    assert [said for said in run.said if "there" in said] == [
        "namespace dips of context there: is being terminated", "namespace dips of context there: is gone",
    ]  # fmt: skip
    assert there.looks == 4
    edited(run, "slaves = 2", "slaves = 3")
    with pytest.raises(ConfigError, match="slaves = 3, and the run has 2"):
        run.live().prepare()


def test_an_object_that_cannot_be_changed_is_deleted_and_is_gone_before_it_is_made_again(run: Run) -> None:
    edited(run, 'tag = "1"', 'tag = "2"')
    api = run.apis["here"]
    site = run.live()
    difference = site.difference()
    assert site.apply(difference) == difference.changes
    job = ("here", "Job", "small-cluster-a")
    changes = [one for one in run.log if one[1:] == job]
    assert [one[0] for one in changes] == ["delete", "create"]
    assert ("create dry", "here", "Job", "small-cluster-a-rehearsal") in run.log
    assert api.looks >= 3
    assert "Job small-cluster-a: is gone" in run.said
    assert {one[2] for one in run.log if one[0] == "patch"} == {"StatefulSet", "Deployment"}
    assert {one[2] for one in run.log if one[0] == "patch dry"} == {"StatefulSet", "Deployment"}


def test_only_a_cluster_whose_own_image_changed_is_made_again_and_a_volume_outlives_its_cluster(run: Run) -> None:
    own = 'image = "registry.example.org/mine:7"\ncommand = ["python", "train.py"]\ncheckpoint_volume = "10 GiB"\n'
    more = f'\n[[clusters]]\nid = "b"\nsite = "here"\n{own}'
    run.file.write_text(run.file.read_text() + more)
    with_keys(run.file)
    run.apply()
    run.changed()
    edited(run, 'tag = "1"', 'tag = "2"')
    run.apply()
    jobs = [one for one in run.changed() if one[2] == "Job"]
    assert jobs == [(what, "here", "Job", "small-cluster-a") for what in ("delete", "create")], "b's image is its own"
    edited(run, more, "")
    run.apply()
    gone = {one[2:] for one in run.changed("delete")}
    assert {("Job", "small-cluster-b"), ("PodMonitor", "small-cluster-b")} <= gone
    assert ("PersistentVolumeClaim", "small-cluster-b") in run.apis["here"].objects
    run.live().delete(run.live().going("a"), [])
    kept = {name for _, name in run.apis["here"].objects}
    assert {"small-master", "small-slave", "small-keys-prometheus"} <= kept, "master and slaves are still watched"
    assert not run.apis["here"].list("PodMonitor", {})


def test_volumes_of_an_earlier_release_that_are_enough_stay(run: Run) -> None:
    sizes, there = run.deployment.sizes, run.apis["here"].objects["StatefulSet", "small-slave"]
    asked = there["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]
    asked["storage"] = quantity(sizes.slave_least_bytes)
    assert run.apply() == 0
    told = [line for line in lines(run.live().planned(), summary=True) if asked["storage"] in line]
    assert told == [f"= StatefulSet small-slave: its volumes stay at {asked['storage']}, "
                    f"those of a new run would have {quantity(sizes.slave_volume_bytes)}"]  # fmt: skip
    edited(run, "slaves = 2", f"slaves = 2\nslave_volume = {sizes.slave_volume_bytes}")
    with pytest.raises(ConfigError, match=f"needs {quantity(sizes.slave_volume_bytes)}: "):
        run.apply()


def test_a_bandwidth_moves_no_server_and_a_cluster_that_left_a_site_alone_leaves_no_key_there(tmp_path: Path) -> None:
    here, there = ('address = "192.0.2.{}"\nbandwidth_gbps = [{}, {}]'.format(*row) for row in ((7, 4, 4), (8, 2, 2)))
    sites = f'[[sites]]\nname = "there"\ncontext = "there"\n{there}\n\n[[clusters]]\ntokens_per_s = 1000'
    more = '\n[[clusters]]\nid = "b"\nsite = "there"\ntokens_per_s = 10\n'
    changes = {'placement = "here"': 'placement = "auto"', 'address = "192.0.2.7"': here, "[[clusters]]": sites}
    run = Run(written(tmp_path, SMALL + more.replace("[[clusters]]", "[[ clusters ]]"), changes, keys=True))
    assert run.apply() > 0
    keys = [name for kind, name in run.apis["there"].objects if kind == "Secret"]
    assert keys == ["small-keys-b"]
    before = dict(run.apis["there"].objects)
    edited(run, "[2, 2]", "[8, 8]")
    with pytest.raises(ConfigError, match=r"is in context 'here'.*set \[deploy\] placement to 'here'"):
        run.live().difference()
    assert run.apis["there"].objects == before
    edited(run, 'placement = "auto"', 'placement = "here"')
    edited(run, more.replace("[[clusters]]", "[[ clusters ]]"), "")
    for old, new in (("[8, 8]", "[8]"), ("[4, 4]", "[4]")):
        run.file.write_text(run.file.read_text().replace(old, new))
    run.apply()
    assert {kind for kind, _ in run.apis["there"].objects} - {"Job"} == {"Namespace"}
    assert run.apis["here"].list("Job", {})


def test_what_no_longer_belongs_goes_at_the_end_and_only_servers_keep_the_clusters(run: Run) -> None:
    more = '\n[[clusters]]\nid = "b"\nsite = "here"\n'
    run.file.write_text(run.file.read_text() + more)
    with_keys(run.file)
    assert run.apply() > 0
    run.changed()
    run.file.write_text(run.file.read_text().replace(more, "").replace('tag = "1"', 'tag = "2"'))
    difference = run.live().difference()
    servers = difference.of_servers()
    assert difference.changes > servers.changes
    assert not [step for step in servers.leaving if step.name == "Job small-cluster-b"]
    assert run.live().apply(servers) == servers.changes
    assert not [one for one in run.changed() if one[2] == "Job"]
    left = run.live().difference()
    assert run.live().apply(left) == left.changes == len(left.leaving) + 1
    gone = [one for one in run.changed() if one[0] == "delete"]
    assert ("delete", "here", "Job", "small-cluster-b") in gone
    left = run.live().difference()
    assert left.changes == len(left.leaving)
    assert {step.name for step in left.leaving} == {"Job small-cluster-b"}, "its pods may need a while"


@pytest.mark.parametrize(
    ("states", "error", "said"),
    [
        (["WAITING x", "WAITING x", "WAITING y", "READY z"], "", ["it: x", "it: y", "it: z"]),
        (["DONE z"], "", ["it: z"]),
        (["WAITING x", "FAILED z"], "it: z", ["it: x"]),
        (["WAITING x"] * 99, "not healthy after 60 s", ["it: x"]),
    ],
)
def test_a_wait_ends_and_says_each_reason_once(run: Run, states: list[str], error: str, said: list[str]) -> None:
    looks = iter([ObjectState(Health[health], word) for health, word in map(str.split, states)])
    with pytest.raises(RetryLater, match=error) if error else contextlib.nullcontext():
        run.rollout().until("it", lambda: next(looks))
    assert run.said == said


def test_a_door_that_is_closed_or_pods_that_do_not_come_up_keep_the_clusters_from_starting(unmade: Run) -> None:
    run = unmade
    run.closed.add(30501)
    with pytest.raises(RetryLater, match=r"slave s1 is not reached at 192\.0\.2\.7:30501 from this machine"):
        run.apply()
    api = run.apis["here"]
    assert [len(api.list(kind, {})) for kind in ("StatefulSet", "Job")] == [2, 0]
    run.closed.clear()
    api.objects["StatefulSet", "small-slave"]["status"]["readyReplicas"] = 1
    with pytest.raises(RetryLater, match=r"StatefulSet small-slave is not healthy after 60 s \(1 of 2 pods ready\)"):
        run.apply()
    assert not api.list("Job", {})
    api.objects["StatefulSet", "small-slave"]["status"]["readyReplicas"] = 2
    assert run.apply() > 0
    assert api.list("Job", {})


# ---- scale ----


def pods(run: Run) -> int:
    found: int = run.apis["here"].objects["StatefulSet", "small-slave"]["spec"]["replicas"]
    return found


def settings(run: Run) -> dict[str, str]:
    found: dict[str, str] = run.apis["here"].objects["ConfigMap", "small-slave"]["data"]
    return dict(found)


def memory_bytes(run: Run) -> int:
    """Of slave s0."""
    told: int = tomllib.loads(settings(run)["s0.toml"])["slave"]["memory_bytes"]
    return told


def test_slaves_are_added_and_waited_for(run: Run) -> None:
    edited(run, "slaves = 2", "slaves = 3")
    objects = run.apis["here"].objects
    set_, before = objects["StatefulSet", "small-slave"], settings(run)["s0.toml"]
    run.master.watch = lambda: (pods(run), settings(run)["s0.toml"] == before)
    assert run.live().scale() == (2, 3)
    # Who runs keeps its settings: started again in the middle, it must find room for all that it holds.
    assert run.master.asked == ["add s2 remove  with (2, True) pods"]
    assert 'slave_id = "s2"' in settings(run)["s2.toml"]
    assert "s2.tls.key" in objects["Secret", "small-keys-slave"]["data"]
    assert "small-slave-2" in objects["Role", "small-supervisor"]["rules"][0]["resourceNames"]
    set_ = objects["StatefulSet", "small-slave"]
    assert set_["spec"]["replicas"] == 3
    assert run.said[-4:-1] == ["StatefulSet small-slave: 3 pods", "RESHARD: slave s0 has yet to list the shard",
                               "RESHARD: the blocks are where they belong"]  # fmt: skip
    assert run.said[-1].startswith("StatefulSet small-slave: "), "the new pods are waited for"
    kinds = {one[2] for one in run.changed() if one[0] in ("create", "patch")}
    assert kinds == {"Service", "Secret", "Role", "ConfigMap", "StatefulSet", "NetworkPolicy"}
    assert run.live().scale() == (3, 3)
    assert run.changed() == []
    set_["spec"]["replicas"] = 2  # cut off: the master knows s2 already
    assert run.live().scale() == (2, 3)
    assert len(run.master.asked) == 1


def test_blocks_are_moved_before_a_slaves_pod_goes(run: Run) -> None:
    edited(run, "slaves = 2", "slaves = 3\nslave_volume = '1 GiB'")
    run.apis["here"].objects.clear()
    run.master.slaves = ["s0", "s1", "s2"]
    run.apply()
    run.changed()
    edited(run, "slaves = 3", "slaves = 1")
    before = memory_bytes(run)
    run.master.watch = lambda: (pods(run), sorted(settings(run)), memory_bytes(run) > before)
    assert run.live().scale() == (3, 1)
    # Who stays has room before the blocks come, and who goes may start again until they are away.
    assert run.master.asked == ["add  remove s1,s2 with (3, ['s0.toml', 's1.toml', 's2.toml'], True) pods"]
    assert run.said[-1].startswith("StatefulSet small-slave: ")
    assert run.said[-2] == "StatefulSet small-slave: 1 pods"
    changes = run.changed()
    assert next(one[2:] for one in changes if one[0] == "patch") == ("ConfigMap", "small-slave")
    assert [one[2:] for one in changes if one[0] == "patch"][-1] == ("StatefulSet", "small-slave")


def test_blocks_that_do_not_move_keep_the_pods(run: Run) -> None:
    edited(run, "slaves = 2", "slaves = 2\nslave_volume = '1 GiB'")
    run.apis["here"].objects.clear()
    run.apply()
    edited(run, "slaves = 2", "slaves = 1")
    run.master.status = lambda: replace(Master.status(run.master), reshard="slave s1 is away")  # type: ignore[method-assign]
    with pytest.raises(RetryLater, match="slave s1 is away"):
        run.live().scale()
    assert pods(run) == 2


# ---- status, drain and delete ----


def test_every_object_has_its_state_once(run: Run) -> None:
    run.apis["here"].objects["StatefulSet", "small-slave"]["status"]["readyReplicas"] = 1
    del run.apis["here"].objects["Job", "small-cluster-a"]
    states = {(one["kind"], one["metadata"]["name"]): state.health for _, one, state in run.live().states()}
    assert len(states) == len(list(run.live().states()))
    assert states["StatefulSet", "small-slave"] is Health.WAITING
    assert states["StatefulSet", "small-master"] is Health.READY
    assert states["Job", "small-cluster-a"] not in (Health.READY, Health.DONE)


def test_a_context_that_does_not_answer_is_asked_once_for_all_of_its_objects(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def away(kind: str, name: str) -> None:
        asked.append(name)
        raise RetryLater("it is away")

    monkeypatch.setattr(run.apis["here"], "get", away)
    states = {state for context, _, state in run.live().states() if context == "here"}
    assert states == {ObjectState(Health.WAITING, "it is away")}
    assert len(asked) == 1


@pytest.mark.parametrize("ends", ["its job ends", "its job is gone"])
def test_a_cluster_is_drained_when_it_has_left_and_its_job_has_ended(run: Run, ends: str) -> None:
    master, job = run.master, run.apis["here"].objects["Job", "small-cluster-a"]
    job["status"] = {"active": 1, "ready": 1}
    still = [2]

    def leaving(cluster_id: str, reason: str) -> str:
        master.asked.append(f"{cluster_id} {reason}")
        return "it may finish its push"

    def status() -> Any:
        still[0] -= 1
        if still[0] < 0:
            master.clusters.clear()
        if still[0] < -2:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        return Master.status(master)

    def passing(pause_s: float) -> None:
        run.seconds += pause_s
        if master.clusters == []:
            status()
            if ends == "its job is gone" and still[0] < -2:
                run.apis["here"].objects.pop(("Job", "small-cluster-a"), None)

    master.drain, master.status = leaving, status  # type: ignore[method-assign]
    run.passes = passing  # type: ignore[method-assign]
    run.live().drain("a", "x")
    assert master.asked == ["a x"]
    assert run.said[0] == "it may finish its push"
    assert run.said[1].startswith("cluster a: is ")
    assert "cluster a: has left the run" in run.said
    assert "cluster a: its job has yet to end" in run.said
    assert ("cluster a: its job is gone" == run.said[-1]) is (ends == "its job is gone")
    with pytest.raises(ConfigError, match="no cluster 'z'; it has a"):
        run.live().drain("z", "x")


def test_what_is_deleted_goes_backwards_and_volumes_only_when_they_are_asked_for(run: Run) -> None:
    api = run.apis["here"]
    for name, cluster in (("state-small-master-0", None), ("small-cluster-a", "a"), ("strange", None)):
        labels = {"app.kubernetes.io/instance": "other" if name == "strange" else "small"}
        labels |= {"dips/cluster": cluster} if cluster else {}
        api.objects["PersistentVolumeClaim", name] = {
            "kind": "PersistentVolumeClaim", "metadata": {"name": name, "labels": labels},
        }  # fmt: skip
    site = run.live()
    there = [(one["kind"], one["metadata"]["name"]) for one in everything(api, "small")]
    going = site.going()
    assert [(step.wanted["kind"], step.wanted["metadata"]["name"]) for step in going] == there[::-1]
    assert {step.action for step in going} == {ObjectAction.DELETE}
    mine = {step.name for step in site.going("a")}
    assert "Job small-cluster-a" in mine
    assert all("cluster-a" in name or "keys-a" in name or name.endswith(" small-cluster-a") for name in mine)
    assert [step.wanted["metadata"]["name"] for step in site.volumes()] == ["small-cluster-a", "state-small-master-0"]
    with pytest.raises(ConfigError, match="no cluster 'z'"):
        site.going("z")
    gone = [*going]
    site.delete(gone, site.volumes("a") if any(site.volumes("a")) else [])
    deleted = [one[2:] for one in run.changed("delete")]
    assert deleted[: len(gone)] == there[::-1]
    assert {key for key in api.objects if key[0] in ("StatefulSet", "Deployment", "Job")} == set(), (
        "they are waited for"
    )


# ---- move ----


@pytest.fixture
def moving(run: Run) -> Run:
    edited(run, "[[clusters]]", '[[sites]]\nname = "there"\ncontext = "there"\naddress = "192.0.2.8"\n\n[[clusters]]')
    edited(run, 'placement = "here"', 'placement = "there"')
    run.apis["there"] = Api("there", run.log)
    for api in run.apis.values():
        api.files = {volume.carrier: f"{volume.carrier} f1\nsums f2".encode() for volume in volumes(run.deployment)}
    run.master.clusters.clear()
    return run


def move(run: Run) -> Move:
    return Move(run.deployment, run.apis, run.rollout(), lambda old: run.live(old))


def test_servers_are_stopped_before_the_first_byte_is_copied_and_deleted_after_the_last(moving: Run) -> None:
    moved = move(moving)
    assert (moved.old.server_site.context, moving.deployment.server_site.context) == ("here", "there")
    moved.carry_out()
    log, here = moving.log, moving.apis["here"]
    stops = [log.index(("patch", "here", "StatefulSet", f"small-{name}")) for name in ("master", "slave")]
    assert stops == sorted(stops)
    assert log.index(("delete", "here", "Deployment", "small-supervisor")) < stops[0]
    feeds = [(index, one) for index, one in enumerate(log) if one[0] == "feed"]
    assert [one[1:] for _, one in feeds] == [
        ("there", f"small-{name}", "abcd") for name in ("master-carrier-0", "slave-carrier-0", "slave-carrier-1")
    ]
    assert stops[-1] < feeds[0][0]
    last = [log.index(("delete", "here", "StatefulSet", f"small-{name}")) for name in ("slave", "master")]
    assert feeds[-1][0] < last[0] < last[1]
    assert not here.list("StatefulSet", {}), "they are gone when it ends"
    carriers = [one for one in log if one[0] in ("create", "delete") and one[2] == "Pod"]
    assert len(carriers) == 2 * 2 * 3
    assert not [key for api in moving.apis.values() for key in api.objects if key[0] == "Pod"]
    there = moving.apis["there"].objects
    claims = {name: one["spec"] for (kind, name), one in there.items() if kind == "PersistentVolumeClaim"}
    assert claims == {volume.claim: volume.spec for volume in volumes(moving.deployment)}
    assert ("StatefulSet", "small-master") not in there
    assert ("Secret", "small-keys-slave") in there, "the settings are there already"
    assert sum("2 files are there" in said for said in moving.said) == 3
    assert {said for said in moving.said if said.endswith(": 0 pods")} == {
        "StatefulSet small-master: 0 pods", "StatefulSet small-slave: 0 pods",
    }  # fmt: skip


@pytest.mark.parametrize("what", ["differs", "is empty", "is not cleared"])
def test_a_copy_that_is_not_whole_ends_the_move_and_keeps_the_old_servers(moving: Run, what: str) -> None:
    there, here = moving.apis["there"], moving.apis["here"]
    if what == "differs":
        there.files["small-slave-carrier-1"] = b"other"
    elif what == "is empty":
        here.files["small-slave-carrier-1"] = there.files["small-slave-carrier-1"] = b""
    else:
        there.cleared = ""
    with pytest.raises(FatalError, match="delete the claim" if what == "is not cleared" else "does not hold"):
        move(moving).carry_out()
    assert len(here.list("StatefulSet", {})) == 2
    pods = {one[1] for one in moving.log if one[0] == "delete" and one[2] == "Pod"}
    assert pods == {"here", "there"}


def test_a_standby_that_serves_stays_where_it_is_and_servers_move_without_one(moving: Run) -> None:
    edited(moving, "slaves = 2", 'slaves = 2\nstandby = "there"\ntake_overs = 1')
    with pytest.raises(ConfigError, match="the servers move without a standby"):
        move(moving)
    edited(moving, 'placement = "there"', 'placement = "here"')
    here = moving.apis["here"].objects
    standby = copy.deepcopy(here["StatefulSet", "small-master"])
    standby["metadata"]["name"] = "small-standby"
    here["StatefulSet", "small-standby"] = standby
    with pytest.raises(ConfigError, match=r"small-standby.* in context 'here'.*set \[deploy\] standby to 'here'"):
        moving.live().difference()
    edited(moving, 'standby = "there"\ntake_overs = 1', "take_overs = 2")
    assert [volume.folder for volume in volumes(moving.deployment)] == ["master-1", "slave", "slave"]


LEASE = "[master]\nlease = 'kubernetes:dips/small-master'\n\n[model]"


@pytest.mark.parametrize(
    ("lease", "serves", "take_overs", "words"),
    [
        (True, "standby", "", "set [deploy] take_overs = 1 in "),
        (True, "standby", "take_overs = 1", ""),
        (True, "standby", "take_overs = 2", "set [deploy] take_overs = 1$"),
        (False, "master", "take_overs = 1", "set [deploy] take_overs = 0$"),
        (False, "", "take_overs = 3", "1 where small-standby serves the run$"),
        (False, "", "take_overs = 1", "see that standby and take_overs = 1 are right: which pod serves the run is not"),
        (False, "", "", ""),
    ],
)
def test_who_serves_the_run_is_not_made_the_others_standby(
    unmade: Run, lease: bool, serves: str, take_overs: str, words: str
) -> None:
    run, before = unmade, "slaves = 2\nstandby = 'here'\n"
    edited(run, "slaves = 2\n", before)
    edited(run, "[model]", LEASE if lease else "[model]")
    run.apply()
    if lease:
        run.apis["here"].objects["Lease", "small-master"]["spec"] = {"holderIdentity": f"small-{serves}-0 [::]:29400 x"}
    run.master.address = {"master": "192.0.2.7:30400", "standby": "192.0.2.7:30401"}.get(serves, "127.0.0.1:1")
    edited(run, before, f"{before}{take_overs}\n")
    if not words.endswith("$"):
        said = run.live().difference().serving
        assert words in said if words else not said
        return
    with pytest.raises(ConfigError, match=re.escape(words[:-1]) + "$"):
        run.live().difference()
    if lease:
        edited(run, LEASE, "[model]")
        edited(run, f"standby = 'here'\n{take_overs}", "")
        with pytest.raises(ConfigError, match=r"serves the run, and .* would end it"):
            run.live().difference()
        run.apis["here"].objects["ConfigMap", "small-standby"]["data"] = {"master.toml": "[master"}
        with pytest.raises(ConfigError, match="ConfigMap small-standby holds no settings of a master"):
            run.live().difference()


def test_a_run_moves_from_one_other_site(moving: Run) -> None:
    here = moving.apis["here"].objects.copy()
    moving.apis["here"].objects.clear()
    with pytest.raises(ConfigError, match="has no servers yet: `dips deploy apply` makes them"):
        move(moving)
    moving.apis["there"].objects = here
    with pytest.raises(ConfigError, match="are in context 'there' already"):
        move(moving)
    moving.apis["here"].objects = here
    with pytest.raises(ConfigError, match=r"has a master in .* and "):
        move(moving)


# ---- what an API server answers ----


@pytest.mark.parametrize(
    ("status", "reason", "body", "kind", "words"),
    [
        (0, "no\n certificate", None, ConfigError, "cannot be trusted: no certificate"),
        (401, "", "", ConfigError, "renew its credentials"),
        (403, "", '{"message": "it is being terminated"}', RetryLater, "it is being terminated; try again"),
        (403, "Forbidden", "no JSON", ConfigError, "does not permit it: Forbidden"),
        (422, "", '{"message": "port is already allocated"}', ConfigError, "is taken by another service"),
        *((code, "", '{"message": "x"}', ConfigError, "refuses .*: x; correct the file") for code in (409, 400, 422)),
        *((code, "", '{"message": "x"}', RetryLater, "is busy: x") for code in (429, 500, 502, 503, 504)),
        (418, "", '{"other": "x"}', FatalError, "answers 418"),
    ],
)
def test_an_answer_that_is_none_is_a_sentence(
    status: int,
    reason: str,
    body: str | None,
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", {"here": "http://127.0.0.1:1"})
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    def refuse(*_: object, **__: object) -> None:
        error = ApiException(status, reason)
        error.body = body
        raise error

    monkeypatch.setattr("kubernetes.dynamic.DynamicClient.request", refuse)
    with pytest.raises(kind, match=words):
        open_context("here", "dips").create({"kind": "Secret", "metadata": {"name": "x"}})


def test_what_a_server_added_to_an_entry_of_a_list_is_no_difference_and_what_it_lacks_is_one() -> None:
    def of(*ports: dict[str, Any]) -> Object:
        return {"kind": "Service", "metadata": {"name": "x"}, "spec": {"ports": [*ports]}}

    made = merged(step_for("here", of({"port": 1}), None).wanted, {})
    made["spec"] = {"ports": [{"port": 1, "nodePort": 30501}]}
    assert step_for("here", of({"port": 1}), made).action is ObjectAction.SAME
    for other in (of({"port": 1, "name": "data"}), of({"port": 1}, {"port": 2}), of({"port": 2, "nodePort": 30501})):
        changed = step_for("here", other, made)
        assert changed.action is ObjectAction.CHANGE
        assert changed.patch is not None
        assert changed.patch["spec"] == other["spec"]


@pytest.mark.parametrize("slaves", [1, 2, 3])
def test_a_cluster_may_dial_the_port_of_every_slave_and_none_beyond(slaves: int, tmp_path: Path) -> None:
    deployment = with_keys(written(tmp_path, changes={"slaves = 2": f"slaves = {slaves}"}))
    objects = [one for stage in stages(deployment) if stage.cluster for one in stage.objects]
    (policy,) = (one for one in objects if one["kind"] == "NetworkPolicy")
    outside = [rule for rule in policy["spec"]["egress"] if "ipBlock" in str(rule.get("to"))]
    ports = [port for rule in outside for port in rule["ports"]]
    reached = {n for one in ports for n in range(one["port"], one.get("endPort", one["port"]) + 1)}
    addresses = [int(deployment.slave_address(index).rpartition(":")[2]) for index in range(slaves)]
    assert [number in reached for number in (*addresses, addresses[-1] + 1)] == [True] * slaves + [False]
