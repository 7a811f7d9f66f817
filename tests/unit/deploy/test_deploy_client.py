"""`dips deploy` against a stand-in of the API server: real HTTP, the real client of Kubernetes, and no cluster behind.

The stand-in checks every object against the published schemas and plays no pods; what a real cluster does with the
objects is for `make e2e-kubernetes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_stand_in import StandIn, write_kubeconfig
from support.deploy_files import EVERY_KNOB, SMALL, example, with_keys, written
from support.deploy_site import APPLY, Master, contexts, deploy

from dips.core.errors import ConfigError
from dips.deploy.kubernetes_api import open_context
from dips.deploy.objects import MONITORS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in that is the context `here`."""
    with contexts(tmp_path, monkeypatch, "here") as (stand_in,):
        yield stand_in


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(tmp_path, keys=True)


# ---- plan and apply ----


def test_three_sites_are_made_in_order_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = example(tmp_path)
    with_keys(file)
    with StandIn("1.29") as frankfurt, StandIn("1.34") as amsterdam:
        urls = {"frankfurt-admin": frankfurt.url, "amsterdam-admin": amsterdam.url}
        write_kubeconfig(tmp_path / "kubeconfig", urls)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        amsterdam.unknown_kinds.update(MONITORS)
        told = refused(capsys, "apply", file, *APPLY)
        assert "context 'amsterdam-admin' has no place for PodMonitor three-sites-cluster-a" in told
        assert told.endswith("set service_monitor = false, in [deploy] or in its site's table")
        assert not frankfurt.objects
        off = 'service_monitor = false\ncontext = "amsterdam-admin" '
        file.write_text(file.read_text().replace('context = "amsterdam-admin" ', off))
        frankfurt.writes.clear()
        assert deploy("apply", file, *APPLY) == 0
        assert frankfurt.of_kind("PodMonitor") == ["three-sites-cluster-b"]
        assert frankfurt.of_kind("ServiceMonitor") == ["three-sites-master", "three-sites-slave"]
        assert frankfurt.of_kind("StatefulSet") == ["three-sites-master", "three-sites-slave"]
        assert amsterdam.of_kind("Job") == ["three-sites-cluster-a"]
        assert not amsterdam.of_kind("StatefulSet")
        made = [name for _, kind, name in frankfurt.writes if kind in ("Secret", "StatefulSet", "JobSet")]
        assert made.index("three-sites-keys-slave") < made.index("three-sites-master")
        assert made.index("three-sites-master") < made.index("three-sites-slave") < made.index("three-sites-cluster-b")
        before = [len(one.writes) for one in (frankfurt, amsterdam)]
        assert deploy("apply", file, *APPLY) == 0
        assert [len(one.writes) for one in (frankfurt, amsterdam)] == before
    assert "0 objects were changed" in capsys.readouterr().out


def test_a_file_is_made_once_and_nothing_changes_afterwards(here: StandIn, tmp_path: Path) -> None:
    file = written(tmp_path, SMALL, EVERY_KNOB, keys=True)
    assert deploy("apply", file, *APPLY) == 0
    before = len(here.writes)
    assert before >= 25
    assert deploy("apply", file, *APPLY) == 0
    assert len(here.writes) == before


def test_a_plan_changes_nothing_and_tells_what_apply_would(
    here: StandIn, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy("plan", small) == 0
    assert not here.writes
    assert "+ StatefulSet small-slave" in capsys.readouterr().out
    assert deploy("apply", small, *APPLY) == 0
    small.write_text(small.read_text().replace("[model]", "[master]\nsync_every = 8\n[model]"))
    capsys.readouterr()
    assert deploy("plan", small) == 0
    told = capsys.readouterr().out
    assert "+ sync_every = 8" in told
    assert "0 to make, 2 to change, 0 to replace" in told
    assert deploy("apply", small, *APPLY) == 0
    assert "sync_every = 8" in here.one("ConfigMap", "small-master")["data"]["master.toml"]
    assert deploy("plan", small, "--json") == 0
    steps = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {step["action"] for step in steps} == {"same"}


# ---- what goes wrong changes nothing ----


def test_a_context_or_a_server_that_is_not_there_is_told(
    here: StandIn, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = Path(small.parent / "kubeconfig"), small.read_text()
    small.write_text(text.replace('context = "here"', 'context = "there"'))
    for command in (("plan",), ("apply", *APPLY), ("status",)):
        said = refused(capsys, command[0], small, *command[1:])
        assert "the kubeconfig has no context 'there'; it has here" in said
    small.write_text(text)
    file.write_text(file.read_text().replace("a-token", "an-old-token"))
    assert "context 'here' does not know who you are" in refused(capsys, "plan", small)
    write_kubeconfig(file, {"here": "http://127.0.0.1:1"})
    told = refused(capsys, "apply", small, *APPLY, code=4)
    assert "the API server of context 'here' at http://127.0.0.1:1 does not answer" in told
    file.write_text("apiVersion: v1\n")
    assert str(file) in refused(capsys, "apply", small, *APPLY)
    monkeypatch.setenv("KUBECONFIG", str(file.with_name("nowhere")))
    assert "there is no kubeconfig" in refused(capsys, "apply", small, *APPLY)
    assert deploy("plan", small, "--summary") == 0
    assert "compared with nothing: no cluster was asked" in capsys.readouterr().out
    assert not here.calls


def test_an_old_release_is_refused_in_a_sentence(
    here: StandIn, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.told_version = "1.27"
    for command in (("plan",), ("apply", *APPLY)):
        told = refused(capsys, command[0], small, *command[1:])
        assert "context 'here' is Kubernetes v1.27.0, and 1.28 or newer is needed" in told
    assert not here.writes
    monkeypatch.setenv("DIPS_OLD_KUBERNETES", "1")
    assert deploy("plan", small) == deploy("apply", small, *APPLY) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """The one sentence with which a command ends."""
    assert deploy(*words) == code
    *_, sentence = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in sentence
    return sentence


# ---- with a master ----


def test_the_supervisor_asks_by_name_and_ends_the_very_pod(here: StandIn) -> None:
    api = open_context("here", "dips")
    here.objects[("dips", "Pod", "small-slave-1")] = {"kind": "Pod", "metadata": {"name": "small-slave-1", "uid": "u"}}
    assert api.get("Pod", "small-slave-0") is None
    with pytest.raises(ConfigError, match="UID in the precondition"):
        api.delete("Pod", "small-slave-1", "another")
    assert api.delete("Pod", "small-slave-1", "u")
    assert not api.delete("Pod", "small-slave-1", "u")


def test_supervise_ends_the_pod_of_a_slave_that_the_master_misses(
    here: StandIn, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    for name in ("small-slave-0", "small-slave-1"):
        pod = {"kind": "Pod", "metadata": {"name": name, "uid": f"uid-{name}"}, "status": {"conditions": [ready]}}
        here.objects["dips", "Pod", name] = pod
    master, asked, pauses_s, looks = Master(["s0", "s1"]), list[object](), list[float](), list[object]()
    status = master.status

    def client(*given: object, **_: object) -> Master:
        asked.append(given)
        return master

    def look() -> object:
        looks.append(status())
        return looks[-1]

    monkeypatch.setattr(master, "status", look)

    monkeypatch.setattr("dips.cli.deploy.OperatorClient", client)
    monkeypatch.setattr("dips.cli.deploy.time.sleep", pauses_s.append)
    watch = ["--master", "h:1", "--keys", small.parent / "keys" / "supervisor", "--run-id", "small", "--slaves", 2]
    watch += ["--namespace", "dips", "--context", "here", "--gone", "0.001 ms", "--every", "7 s", "--looks", 3]
    assert deploy("supervise", *watch) == 0
    assert here.of_kind("Pod") == ["small-slave-0", "small-slave-1"], "the master has both"
    master.slaves.remove("s1")
    assert deploy("supervise", *watch) == 0
    assert here.of_kind("Pod") == ["small-slave-0"]
    assert {call for call in here.calls if call[0] != "GET"} == {("DELETE", "Pod")}
    assert asked == [("h:1", "small")] * 2
    assert (pauses_s, len(looks)) == ([7.0] * 4, 6)
    assert "slave s1: pod small-slave-1 is ended" in capsys.readouterr().err


def test_the_commands_of_an_operator(
    here: StandIn, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master, asked = Master(["s0", "s1"], ["a"]), list[tuple[Any, ...]]()

    def client(*given: object, security: object) -> Master:
        asked.append((*given, str(security)))
        return master

    def told(*words: object, code: int = 0) -> list[str]:
        assert deploy(*words) == code
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr("dips.cli.deploy.OperatorClient", client)
    monkeypatch.setattr("dips.deploy.rollout.POLL_S", 0.0)
    applied = told("apply", small, *APPLY)
    assert applied[0] == "run small: master and 2 slaves at here (context here)"
    assert applied[-1] == f"run small: {len(here.writes)} objects were changed"
    small.write_text(small.read_text().replace("slaves = 2", "slaves = 3"))
    assert told("plan", small, "--offline")[-1].startswith("keys are missing (s2): dips keys add")
    with_keys(small)
    assert told("scale", small, "--yes")[-1] == (
        f"run small: 2 slaves were, 3 are; `dips deploy apply {small}` does the rest"
    )
    here.one("Job", "small-cluster-a")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert told("drain", small, "a", "--reason", "x", "--master", "h:1") == []
    assert master.asked == ["add s2 remove  with None pods", "drain a"]
    assert {one[:2] for one in asked} == {("192.0.2.7:30400", "small"), ("h:1", "small")}
    assert all("operator" in one[2] for one in asked)
    here.broken = lambda one: one.get("status", {}).update(readyReplicas=1) if one["kind"] == "StatefulSet" else None
    here.broken(here.one("StatefulSet", "small-slave"))
    assert "StatefulSet small-slave waiting 1 of 3 pods ready" in [
        " ".join(line.split()[1:]) for line in told("status", small, code=4)
    ]
    rendered = told("render", small, "--output", tmp_path / "out")
    assert set(rendered) == {str(path) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for more in ([], ["--move"]):
        assert ("pods/exec" in "".join(told("rights", small, *more))) is bool(more)
    assert told("delete", small, "--yes", "--delete-volumes")[0].startswith("- ")
    assert told("delete", small, "--yes") == ["nothing of it is there"]


# ---- what a plan says in addition ----


def test_a_plan_says_what_a_site_must_have(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(small.read_text() + "nodes = 3\ncpus = 2.5\nmemory = '4 GiB'\ngpus = 1\ncommand = ['train']\n")
    assert deploy("plan", small, "--offline", "--summary") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match("  1 x small-master: 1 processors, [0-9]+ MiB$", line) for line in lines)
    assert "  3 x small-cluster-a: 2.5 processors, 4 GiB, 1 nvidia.com/gpu each" in lines
    [total] = [line for line in lines if line.startswith("context here must have")]
    assert total.startswith(f"context here must have {1 + 2 * 4 + 0.05 + 3 * 2.5:g} processors and ")


def test_what_a_site_leaves_that_is_taken_out_of_the_file_is_said_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = small.read_text()
    with contexts(tmp_path, monkeypatch, "here", "gone") as (here, gone):
        assert deploy("plan", small, "--summary") == 0
        assert "no site of the file names them): contexts gone; what the run may have there" in capsys.readouterr().out
        there = '[[sites]]\nname = "gone"\ncontext = "gone"\n[[clusters]]\nid = "b"\nsite = "gone"\n'
        small.write_text(f"{kept}{there}checkpoint_volume = '1 GiB'\n")
        with_keys(small)
        assert deploy("apply", small, *APPLY) == 0
        small.write_text(kept.replace('context = "here"', 'context = "gone"'))
        assert "small-master, with its state, is in context 'here'" in refused(capsys, "plan", small)
        small.write_text(kept)
        write_kubeconfig(tmp_path / "kubeconfig", {"here": here.url})
        del here.objects["dips", "Secret", "small-keys-a"]
        capsys.readouterr()
        for command in (("plan",), ("apply", *APPLY)):
            assert deploy(command[0], small, *command[1:]) == 0
            told = capsys.readouterr().out
            assert "not asked (an earlier file named them: the kubeconfig has no context 'gone'" in told
            assert "`kubectl --context gone --namespace dips get all,secrets,pvc --selector" in told
        assert "gone" in str(here.one("Secret", "small-keys-a")["metadata"]), "a new one remembers as well"
        write_kubeconfig(tmp_path / "kubeconfig", {"here": here.url, "gone": gone.url})
        gone.forbidden.add(("GET", "Secret"))
        assert deploy("apply", small, *APPLY) == 0
        assert "does not permit it: secrets is forbidden" in capsys.readouterr().out
        gone.forbidden.clear()
        renamed = there.replace('context = "gone"', 'context = "new"')
        small.write_text(f"{kept}{renamed}checkpoint_volume = '1 GiB'\n")
        write_kubeconfig(tmp_path / "kubeconfig", {"here": here.url, "gone": gone.url, "new": gone.url})
        assert deploy("apply", small, *APPLY) == 0
        assert gone.of_kind("Job") == ["small-cluster-b"], "a context that was renamed is not an earlier one"
        assert "volumes stay" not in capsys.readouterr().out
        small.write_text(kept)
        write_kubeconfig(tmp_path / "kubeconfig", {"here": here.url, "gone": gone.url})
        gone.one("Namespace", "dips")["status"] = {"phase": "Terminating"}
        here.one("Secret", "small-keys-a")["metadata"]["annotations"]["dips/contexts"] = "['gone'"
        here.one("Secret", "small-keys-slave")["metadata"]["annotations"]["dips/contexts"] = '["gone", 3]'
        for left in (["small-cluster-b"], []):
            assert gone.of_kind("Job") == left
            assert deploy("plan", small) == 0
            assert ("- Job small-cluster-b (context gone)" in (told := capsys.readouterr().out)) is bool(left)
            assert "volumes stay in context gone, which the file names no longer: small-cluster-b" in told
            assert deploy("apply", small, *APPLY) == 0
        gone.objects.clear()
        assert deploy("apply", small, *APPLY) == 0
        assert "gone" not in str(here.objects)
