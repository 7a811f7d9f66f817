"""What the user of `dips deploy` must be permitted, against a stand-in of the API server that knows rights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.api_stand_in import Right, StandIn, rights_of
from support.deploy_files import with_keys, written
from support.deploy_site import APPLY, Master, contexts, deploy, site_of
from support.repository import ROOT

from dips.cli.main import run
from dips.deploy.deploy_file import read_deploy_file
from dips.deploy.objects import MONITORS, PLURALS
from dips.deploy.rollout import role


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The context `here`: its administrator has made the namespace and may do everything."""
    with contexts(tmp_path, monkeypatch, "here") as (stand_in,):
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "dips", "uid": "n"}}
        stand_in.objects[("", "Namespace", "dips")] = namespace
        yield stand_in


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(tmp_path, changes={'site = "here"\n': 'site = "here"\ncheckpoint_volume = "1 GiB"\n'}, keys=True)


def granted(file: Path) -> list[Right]:
    return list(rights_of(role(read_deploy_file(file))))


def life(here: StandIn, file: Path) -> Iterator[int]:
    """Exit codes of all that an operator does with a run, one after the other."""
    yield deploy("plan", file)
    yield deploy("apply", file, *APPLY)
    for one in here.objects.values():  # somebody changed every object
        one["metadata"].get("labels", {}).pop("app.kubernetes.io/part-of", None)
    yield deploy("apply", file, *APPLY)
    file.write_text(file.read_text().replace("slaves = 2", "slaves = 3"))
    with_keys(file)
    site_of(file, Master(["s0", "s1"])).scale()
    yield run(["keys", "renew", str(file.parent / "keys"), "a"])
    here.one("Job", "small-cluster-a")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    site_of(file, Master(["s0", "s1", "s2"], ["a"])).drain("a", "keys were renewed")
    yield deploy("apply", file, *APPLY)
    yield deploy("delete", file, "--yes", "--delete-volumes")


@pytest.mark.parametrize("lease", [False, True])
def test_exactly_these_rights_are_needed(here: StandIn, small: Path, lease: bool) -> None:
    if lease:
        text = small.read_text().replace("slaves = 2", 'standby = "here"\nslaves = 2')
        small.write_text(text.replace("[model]", '[master]\nlease = "kubernetes:dips/small-master"\n[model]'))
    here.in_pod = lambda pod, command: (
        b"",
        pod != "small-standby-0" or command[:3] != ["dips", "master", "--take-over"],
    )
    here.rights = granted(small)
    codes = life(here, small)
    assert [next(codes), next(codes)] == [0, 0]
    if lease:
        here.objects["dips", "Pod", "small-standby-0"] = {"metadata": {"name": "small-standby-0"}}
        assert deploy("take-over", small, "--yes") == 0
        del here.objects["dips", "Pod", "small-standby-0"]
    assert list(codes) == [0] * 4
    unused = {(right.verb, right.kind) for right in here.rights} - here.used
    assert not unused
    assert set(here.objects) == {("", "Namespace", "dips")}


@pytest.mark.parametrize(
    ("verb", "kind"), [("list", "NetworkPolicy"), ("create", "StatefulSet"), ("delete", "PersistentVolumeClaim")]
)
def test_a_right_that_is_missing_is_named(
    verb: str, kind: str, here: StandIn, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here.rights = [right for right in granted(small) if (right.verb, right.kind) != (verb, kind)]
    codes = iter(life(here, small))
    assert next(code for code in codes if code) == 2
    *_, sentence = capsys.readouterr().err.strip().splitlines()
    assert f'cannot {verb} resource "{PLURALS[kind]}"' in sentence
    assert "what `dips deploy rights` prints, and what `dips doctor` needs more" in sentence


def test_rights_on_pods_are_needed_to_give_them(here: StandIn, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(here.objects)
    here.rights = [right for right in granted(small) if right.kind != "Pod"]
    assert deploy("apply", small, *APPLY) == 2
    assert "attempting to grant RBAC permissions not currently held" in capsys.readouterr().err
    assert set(here.objects) == before


def test_what_is_left_of_kinds_that_are_not_used_needs_no_right(here: StandIn, small: Path) -> None:
    """JobSet and monitors: whoever may not list them is refused with 403, also where they are not installed."""
    small.write_text(small.read_text().replace("slaves = 2", "slaves = 2\nservice_monitor = false"))
    here.unknown_kinds = {"JobSet", *MONITORS}
    here.rights = granted(small)
    assert not {"JobSet", *MONITORS} & {right.kind for right in here.rights}
    assert deploy("apply", small, *APPLY) == 0


def test_the_role_that_ships_is_that_of_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy("rights", ROOT / "deploy" / "kubernetes" / "base.toml") == 0
    printed = capsys.readouterr().out
    assert (ROOT / "deploy" / "kubernetes" / "rights.yaml").read_text() == printed
    assert yaml.safe_load(printed)["metadata"]["namespace"] == "dips"
