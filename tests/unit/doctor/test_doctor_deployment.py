"""`dips doctor` of a deployment, against a stand-in of the API server (tests/support/api_stand_in.py), no cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api_stand_in import StandIn, write_kubeconfig
from support.deploy_files import SMALL, with_keys, written
from support.deploy_site import contexts

from dips.cli import main
from dips.deploy.kubernetes_api import KubernetesApi
from dips.deploy.objects import selector
from dips.doctor import deployment as doctored
from dips.doctor import network


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in that is the context `here`; nothing answers at the servers' addresses yet."""
    monkeypatch.setattr(network, "dialled", lambda address: network.Reached(None, False, "no answer"))
    with contexts(tmp_path, monkeypatch, "here") as (stand_in,):
        yield stand_in


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(tmp_path, keys=True)


def findings(file: Path, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, list[tuple[str, str]]]:
    """(grade, sentence and remedy) by check."""
    assert main.run(["doctor", str(file), "--json"]) == code
    found: dict[str, list[tuple[str, str]]] = {}
    for one in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(one["check"], []).append((one["grade"], f"{one['sentence']}: {one['remedy']}"))
    return found


def test_a_good_deployment_would_not_fail(here: StandIn, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(small, capsys, 0)
    ((grade, said),) = found["contexts"]
    assert grade == "OK"
    assert "here: Kubernetes v1.31.0 answers in" in said
    assert "makes the namespace" in said
    assert [grade for grade, _ in found["keys"]] == ["OK"]
    assert {grade for grade, _ in found["reach"]} == {"WARN"}
    assert len(found["sizes"]) == 2
    assert not here.writes


@pytest.mark.parametrize("serves", ["192.0.2.7:30400", "192.0.2.7:30401", ""])
def test_a_standby_that_waits_is_well_where_a_master_answers(
    here: StandIn, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serves: str
) -> None:
    small.write_text(small.read_text().replace("slaves = 2", 'slaves = 2\nstandby = "here"'))
    with_keys(small)
    closed = network.Reached(0.01, False, "nothing listens there")
    monkeypatch.setattr(network, "dialled", lambda at: network.Reached(0.01, True) if at == serves else closed)
    reach = [(grade, said) for grade, said in findings(small, capsys, 0)["reach"] if "slave" not in said]
    assert [grade for grade, _ in reach] == ["OK" if serves else "WARN"] * 2
    assert ("the port is closed while the other one serves" in str(reach)) is bool(serves)


def test_missing_keys_are_told(here: StandIn, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(tmp_path / "keys" / "s1")
    (tmp_path / "keys" / "a" / "tls.key").chmod(0o644)
    keys = findings(small, capsys, 1)["keys"]
    assert ("FAIL", "has no keys of s1") in [
        (grade, said.partition("keys ")[2].partition(":")[0]) for grade, said in keys
    ]
    assert any(grade == "FAIL" and "chmod 600" in said for grade, said in keys)


def test_a_context_that_is_missing_or_does_not_answer_is_told(
    here: StandIn, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", {"there": here.url})
    ((grade, said),) = findings(small, capsys, 1)["contexts"]
    assert grade == "FAIL"
    assert "no context 'here'; it has there" in said
    write_kubeconfig(tmp_path / "kubeconfig", {"here": "http://127.0.0.1:9"})
    ((grade, said),) = findings(small, capsys, 1)["contexts"]
    assert grade == "FAIL"
    assert "does not answer" in said
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    ((grade, said),) = findings(small, capsys, 1)["contexts"]
    assert "set KUBECONFIG" in said


def test_a_clock_that_differs_is_told(
    here: StandIn, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KubernetesApi, "release", lambda api: ("v1", "Thu, 01 Jan 2026 00:00:00 GMT"))
    assert any("its clock differs from this machine's" in said for _, said in findings(small, capsys, 0)["clock"])
    assert doctored.ahead_of_us_s("Thu, 01 Jan 2026 00:00:10 GMT", 1767225600.0) == 10.0
    assert doctored.ahead_of_us_s("yesterday", 0.0) is None


RANKS = 'id = "a"\nnodes = 2\nprocesses = 4\ntorchrun = true\nimage = "mine:1"\ncommand = ["python", "train.py"]'
REACHES = {"findings": [{"check": "slaves", "grade": "OK", "sentence": "the data port answers", "remedy": ""}]}
DOES_NOT = {
    "findings": [
        *REACHES["findings"],
        {"check": "slaves", "grade": "FAIL", "sentence": "slave s1 cannot be reached from here", "remedy": "open it"},
    ]
}


@pytest.fixture
def ranks(tmp_path: Path, here: StandIn) -> Path:
    """A deployment whose cluster has eight ranks in two pods, which run."""
    file = written(tmp_path, SMALL, {'id = "a"': RANKS})
    deployment = with_keys(file)
    for index in range(2):
        name = f"small-cluster-a-{index}-x{index}"
        metadata = {
            "name": name,
            "labels": selector(deployment, "cluster", "a"),
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Running"}}
        here.objects["dips", "Pod", name] = pod
    return file


def test_pods_that_reach_nothing_are_named(here: StandIn, ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def in_pod(pod: str, command: list[str]) -> tuple[bytes, int]:
        asked.append((pod, command))
        said = DOES_NOT if pod.startswith("small-cluster-a-1") else REACHES
        return json.dumps({**said, "padding": "x" * 200_000}).encode(), 1

    here.in_pod = in_pod
    found = findings(ranks, capsys, 1)["ranks"]
    assert [pod for pod, _ in asked] == ["small-cluster-a-0-x0", "small-cluster-a-1-x1"]
    (command,) = {tuple(command) for _, command in asked}
    assert command[3:] == ("doctor", "--master", "192.0.2.7:30400", "--keys", "/etc/dips/keys", "--json")
    assert found == [
        ("FAIL", "cluster a, ranks 4 to 7, pod small-cluster-a-1-x1: slave s1 cannot be reached from here: open it"),
        ("OK", "cluster a: 1 of 2 pods of its 8 ranks reach master and slaves: "),
    ]
    assert not here.writes


def test_pods_that_cannot_be_asked_are_told(here: StandIn, ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = findings(ranks, capsys, 1)["ranks"]
    assert "ranks 0 to 3: its doctor said nothing: install dips" in first[1]
    assert second[0] == "FAIL"
    here.forbidden.add(("EXEC", "Pod"))
    first, _ = findings(ranks, capsys, 1)["ranks"]
    assert "your user may get and create pods/exec" in first[1]
    here.objects = {}
    found = findings(ranks, capsys, 0)["ranks"]
    assert [(grade, said.partition(":")[0]) for grade, said in found] == [
        ("WARN", "cluster a, ranks 0 to 3"),
        ("WARN", "cluster a, ranks 4 to 7"),
    ]
