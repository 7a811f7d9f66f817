"""Master and standby from a deployment file, in two contexts: objects by `dips deploy apply`, real processes as pods.

The API servers are stand-ins; `dips deploy take-over` runs its command in the standby's pod. Slaves and clusters are
those of other tests, with both addresses.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api_stand_in import StandIn
from support.deploy_files import SMALL, written
from support.deploy_site import APPLY, contexts, deploy
from support.pods import PodPlayer
from support.ports import own_port
from support.standby_run import WithStandby
from support.waiting import until

from dips.core.errors import Refused
from dips.core.net.keys import REVOKED_FILE
from dips.deploy.deploy_file import KEYS, NODE_PORTS, read_deploy_file
from dips.local.authority import Authority
from dips.local.operator_client import OperatorClient
from dips.master.journal import replica_of

THERE = '[[sites]]\nname = "there"\ncontext = "there"\naddress = "127.0.0.1"\n\n[[clusters]]'
QUICK = 'preset = "safe"\noverlap = "none"\nsync_every = 4\nheartbeat_s = 0.5\ngrace_s = 0.5\nlinger_s = 20.0\n'


class Deployed(WithStandby):
    """A run whose master and standby are pods."""

    def __init__(self, directory: Path, file: Path, apis: dict[str, StandIn]) -> None:
        super().__init__(directory, keys=file.parent / "keys")
        self.file, self.apis = file, apis
        self.stack = contextlib.ExitStack()
        self.players: dict[str, PodPlayer] = {}
        self.listen_at = dict(zip(apis, read_deploy_file(file).master_address.split(","), strict=True))

    def start_master(self) -> None:
        for name in ("slaves", "tapes"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self.play("master")
        self.address = ",".join(self.listen_at.values())

    def play(self, component: str) -> None:
        """The only pod of the StatefulSet, as it is now."""
        own = {"0.0.0.0:29400": self.listen_at[component], ":9400": ":0", ":8080": ":0"}
        player = PodPlayer(self.apis[component], f"test-{component}", self.file.parent, {}, "StatefulSet", own)
        self.players[component] = self.stack.enter_context(player)
        self.processes[component] = player.pods[0].process

    def state(self, component: str) -> Path:
        return self.file.parent / f"test-{component}-state"

    def log(self, name: str) -> str:
        return self.players[name].logs() if name in self.players else super().log(name)

    def revoke(self, name: str) -> None:
        """In the master's secret alone; the standby has it by the stream of the journal."""
        deploy_keys = Authority(self.file.parent / "keys")
        deploy_keys.revoke(name, "lost")
        places = [Path(self.players[one].pods[0].places[KEYS]) for one in ("master", "standby")]
        shutil.copy(deploy_keys.identity("master") / REVOKED_FILE, places[0])
        until(lambda: (places[1] / REVOKED_FILE).exists(), "the list at the standby", lambda: self.log("standby"))

    def take_over(self) -> None:
        standby = self.players["standby"]

        def in_pod(pod: str, command: list[str]) -> tuple[bytes, int]:
            assert pod == "test-standby-0"
            done = standby.run(command)
            return done.stdout + done.stderr, done.returncode

        self.apis["standby"].in_pod = in_pod
        self.apis["standby"].objects["dips", "Pod", "test-standby-0"] = {"metadata": {"name": "test-standby-0"}}
        assert deploy("take-over", self.file, "--yes") == 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    ports = [own_port(NODE_PORTS) for _ in range(2)]
    changes = {
        '"small"': '"test"',
        "192.0.2.7": "127.0.0.1",
        "slaves = 2": f'slaves = 2\nstandby = "there"\nmaster_port = {ports[0]}\nstandby_port = {ports[1]}',
        "[[clusters]]": THERE,
        "[model]": f"[master]\n{QUICK}\n[model]",
    }
    file = written(tmp_path, SMALL, changes, keys=True)
    with contexts(tmp_path, monkeypatch, "here", "there") as (here, there):
        assert deploy("apply", file, *APPLY) == 0
        found = Deployed(tmp_path / "run", file, {"master": here, "standby": there})
        with found.stack, found:
            yield found


def test_the_deployed_standby_takes_over_and_the_first_masters_pod_is_its_standby_then(run: Deployed) -> None:
    run.play("standby")
    cluster = run.cluster("a", seed=1, step_s=0.02)
    run.until_followed()
    run.wait_for_version(run.version() + 2)
    run.revoke("prometheus")
    run.kill("master")
    run.take_over()
    with OperatorClient(run.address, security=run.security("prometheus")) as client, pytest.raises(Refused):
        client.status()
    known = run.version()
    run.wait_for_version(known + 2)
    # The pod comes back with its volume, and is not served again.
    master = run.players["master"]
    master.tick()
    assert master.pods[-1].process.wait() in (2, 6), master.logs()
    run.file.write_text(run.file.read_text().replace("standby = ", "take_overs = 1\nstandby = "))
    assert deploy("apply", run.file, *APPLY) == 0
    run.play("master")
    until(run.is_followed, "a standby of the one that took over", lambda: run.log("master"))
    assert replica_of(run.state("master") / "master-1") == run.listen_at["standby"]
    run.stop(cluster)
    run.processes["standby"].wait()
    for component, place in (("standby", "master"), ("master", "standby")):
        shutil.copytree(run.state(component) / "master", run.directory / place)
    run.judge()
