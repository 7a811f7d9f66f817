"""`dips deploy move` between two stand-ins of API servers, whose volumes are folders: the copy is made by the real tar
through the real client; masters are played.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.api_stand_in import StandIn, rights_of
from support.deploy_files import with_keys, written
from support.deploy_site import APPLY, Master, contexts, deploy, opened

from dips.core.errors import ConfigError, RetryLater
from dips.deploy.deploy_file import Deployment, read_deploy_file
from dips.deploy.kubernetes_api import KubernetesApi
from dips.deploy.move import Move
from dips.deploy.operate import LiveDeployment
from dips.deploy.rollout import role

THERE = '\n[[sites]]\nname = "there"\ncontext = "there"\naddress = "192.0.2.8"\n\n[[clusters]]'
OF_PYTHON_3_11_0 = """
import tarfile
del tarfile.tar_filter
extract = tarfile.TarFile.extractall
tarfile.TarFile.extractall = lambda self, path=".", members=None, *, numeric_owner=False: extract(
    self, path, members, numeric_owner=numeric_owner
)
"""
"""What came later, taken away: 3.11.4 brought filters."""

STATE_OF = {"state-small-master-0": "master", "state-small-slave-0": "slave", "state-small-slave-1": "slave"}


@dataclass
class Sites:
    """The context `here`, where the run is, the context `there`, and the file."""

    here: StandIn
    there: StandIn
    file: Path

    def place(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert f'placement = "{old}"' in text
        self.file.write_text(text.replace(f'placement = "{old}"', f'placement = "{new}"'))

    def place_of(self, stand_in: StandIn, claim: str) -> Path:
        """The folder of a volume that holds everything."""
        assert stand_in.volumes is not None
        folder = stand_in.volumes / claim / STATE_OF[claim]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def files(self, stand_in: StandIn) -> dict[str, bytes]:
        assert stand_in.volumes is not None
        found = (path for path in sorted(stand_in.volumes.rglob("*")) if path.is_file())
        return {str(path.relative_to(stand_in.volumes)): path.read_bytes() for path in found}


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    file = written(tmp_path, changes={"\n[[clusters]]": THERE}, keys=True)
    with contexts(tmp_path, monkeypatch, "here", "there") as (here, there):
        here.volumes, there.volumes = tmp_path / "volumes" / "here", tmp_path / "volumes" / "there"
        found = Sites(here, there, file)
        assert deploy("apply", file, *APPLY) == 0
        for index, claim in enumerate(STATE_OF):
            folder = found.place_of(here, claim)
            (folder / "ring").mkdir()
            (folder / "journal").write_bytes(b"records" * index)
            (folder / "ring" / "a file").write_bytes(bytes(range(256)) * (4000 + index))
        yield found


def move_of(sites: Sites, master: Master) -> Move:
    deployment = read_deploy_file(sites.file)
    apis, rollout = opened(deployment)

    def live_at(old: Deployment) -> LiveDeployment:
        return LiveDeployment(old, apis, rollout, lambda: contextlib.nullcontext(master), lambda host, port: None)

    return Move(deployment, apis, rollout, live_at)


def ended(sites: Sites) -> Master:
    """A master whose cluster's job ends as soon as it is asked to."""
    sites.here.one("Job", "small-cluster-a")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    return Master(["s0", "s1"], ["a"])


def test_servers_move_with_their_volumes_and_exactly_these_rights_after_every_cluster_has_left(sites: Sites) -> None:
    sites.there.objects[("", "Namespace", "dips")] = sites.here.objects[("", "Namespace", "dips")]
    sites.here.rights = sites.there.rights = list(rights_of(role(read_deploy_file(sites.file), move=True)))
    sites.here.used.clear()
    sites.place("here", "there")
    (sites.place_of(sites.there, "state-small-master-0") / "journal-wal").write_text("of an earlier copy")
    master = ended(sites)
    move_of(sites, master).carry_out()
    assert master.asked == ["drain a"]
    ours = {("create", "Pod"), ("get", "pods/exec"), ("create", "pods/exec"), ("get", "Pod"), ("delete", "Pod")}
    assert ours <= sites.here.used & sites.there.used
    assert sites.files(sites.there) == sites.files(sites.here)
    assert len(sites.files(sites.there)) == 6
    assert not sites.here.of_kind("StatefulSet")
    assert sites.here.of_kind("PersistentVolumeClaim") == sites.there.of_kind("PersistentVolumeClaim")
    assert not sites.here.of_kind("Pod") + sites.there.of_kind("Pod")
    assert deploy("apply", sites.file, *APPLY) == 0
    assert sites.there.of_kind("StatefulSet") == ["small-master", "small-slave"]
    assert "192.0.2.8:30400" in str(sites.here.one("Job", "small-cluster-a"))
    assert sites.here.of_kind("Secret") == ["small-keys-a"]


def test_a_failed_copy_keeps_the_old_servers_and_goes_on_or_back(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    sites.place("here", "there")
    sites.there.forbidden.add(("EXEC", "Pod"))
    with pytest.raises(ConfigError, match="context 'there', pod small-master-carrier-0: no command can be run there"):
        move_of(sites, ended(sites)).carry_out()
    assert sites.here.one("StatefulSet", "small-slave")["spec"]["replicas"] == 0
    assert not sites.there.of_kind("StatefulSet")
    # Back: as they were, and no other number of them.
    with_three = sites.file.read_text().replace("slaves = 2", "slaves = 3").replace('"there"\nslaves', '"here"\nslaves')
    sites.file.with_name("three.toml").write_text(with_three)
    with_keys(sites.file.with_name("three.toml"))
    assert deploy("apply", sites.file.with_name("three.toml"), *APPLY) == 2
    assert "says slaves = 3, and the run has 2" in capsys.readouterr().err
    sites.place("there", "here")
    assert deploy("apply", sites.file, *APPLY) == 0
    assert sites.here.one("StatefulSet", "small-slave")["spec"]["replicas"] == 2
    assert sites.here.one("StatefulSet", "small-master")["spec"]["replicas"] == 1
    assert sites.here.of_kind("Deployment") == ["small-supervisor"]
    # And on, once it is permitted.
    sites.there.forbidden.clear()
    sites.place("here", "there")
    move_of(sites, ended(sites)).carry_out()
    assert sites.files(sites.there) == sites.files(sites.here)


def test_a_move_that_is_cut_off_at_its_end_goes_on(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    sites.place("here", "there")
    delete, sets = KubernetesApi.delete, []

    def cut_off(api: KubernetesApi, kind: str, name: str, uid: str = "") -> bool:
        if kind == "StatefulSet":
            sets.append(name)
            if len(sets) == 2:
                raise RetryLater("the API server does not answer")
        return delete(api, kind, name, uid)

    monkeypatch.setattr(KubernetesApi, "delete", cut_off)
    with pytest.raises(RetryLater):
        move_of(sites, ended(sites)).carry_out()
    assert len(sites.here.of_kind("StatefulSet")) == 1
    move_of(sites, ended(sites)).carry_out()
    assert not sites.here.of_kind("StatefulSet")
    assert sites.files(sites.there) == sites.files(sites.here)


def test_what_the_receiving_command_says_when_it_ends_is_said_while_bytes_are_still_to_be_sent(sites: Sites) -> None:
    with (sites.place_of(sites.here, "state-small-master-0") / "large").open("wb") as file:
        file.truncate(48 << 20)  # more than the buffers on the way hold
    sites.place("here", "there")
    sites.there.python_begins_with = "raise ImportError('it lacks tarfile')"
    with pytest.raises(ConfigError, match=r"small-master-carrier-0: .* ImportError: it lacks"):
        move_of(sites, ended(sites)).carry_out()
    assert not sites.there.of_kind("Pod")


def test_volumes_are_unpacked_by_the_oldest_python(sites: Sites) -> None:
    sites.place("here", "there")
    sites.there.python_begins_with = OF_PYTHON_3_11_0
    move_of(sites, ended(sites)).carry_out()
    assert sites.files(sites.there) == sites.files(sites.here)


@pytest.mark.parametrize("now", ["node-port", "load-balancer"])
def test_the_old_servers_are_asked_at_their_old_port_whatever_the_file_says_of_the_new_ones(
    sites: Sites, now: str
) -> None:
    old = sites.here.one("Service", "small-master-outside")["spec"]
    if now == "load-balancer":
        old |= {"type": "LoadBalancer", "ports": [{"port": 29400, "targetPort": "control"}]}
    sites.place("here", "there")
    sites.file.write_text(sites.file.read_text().replace("slaves = 2", "slaves = 2\nmaster_port = 30411"))
    move = move_of(sites, ended(sites))
    assert move.old.master_address == f"192.0.2.7:{30400 if now == 'node-port' else 29400}"
    move.carry_out()
    assert deploy("apply", sites.file, *APPLY) == 0
    assert "192.0.2.8:30411" in str(sites.here.one("Job", "small-cluster-a"))
