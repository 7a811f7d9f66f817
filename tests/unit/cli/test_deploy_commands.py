"""`dips deploy` with the live deployment played: what each command asks for, and in which order; other small ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.deploy_files import with_keys, written
from support.run_status import run_status

from dips.cli import main
from dips.core.errors import ConfigError, RetryLater
from dips.core.messages import StatusReply
from dips.deploy import kubernetes_api
from dips.deploy import rollout as plan
from dips.deploy.compare import ObjectAction, Step
from dips.deploy.deploy_file import Deployment
from dips.deploy.health import Health, ObjectState
from dips.deploy.operate import PendingChanges

THERE = '\n[[sites]]\nname = "there"\ncontext = "there"\naddress = "192.0.2.8"\n\n[[clusters]]'
Asked = list[tuple[Any, ...]]


def step(name: str, action: ObjectAction, kind: str = "Service") -> Step:
    one = {"kind": kind, "metadata": {"name": name}}
    return Step("here", action, one, one)


class Live:
    """In place of LiveDeployment."""

    asked: Asked
    pending: PendingChanges
    going_: list[Step]
    volumes_: list[Step]
    state: Health
    run: StatusReply | None = None

    def __init__(self, deployment: Deployment, apis: dict[str, str], rollout: Any, operator: Any, dial: Any) -> None:
        self.deployment, self.apis, self.operator = deployment, apis, operator

    def check_releases(self) -> None:
        self.asked.append(("check_releases", [*self.apis]))

    def difference(self) -> PendingChanges:
        self.asked.append(("difference", self.deployment.server_site.name))
        return self.pending

    def prepare(self) -> None:
        self.asked.append(("prepare", [*self.apis]))

    def apply(self, difference: PendingChanges, reach: bool) -> int:
        self.asked.append(("apply", difference.changes, reach))
        return 7

    def going(self, cluster: str) -> list[Step]:
        self.asked.append(("going", cluster))
        return self.going_

    def volumes(self, cluster: str) -> list[Step]:
        self.asked.append(("volumes", cluster))
        return self.volumes_

    def delete(self, going: list[Step], volumes: list[Step]) -> None:
        self.asked.append(("delete", len(going), len(volumes)))

    def scale(self) -> tuple[int, int]:
        self.asked.append(("scale",))
        return 2, 3

    def states(self) -> Iterator[tuple[str, dict[str, Any], ObjectState]]:
        yield "here", {"kind": "Service", "metadata": {"name": "x"}}, ObjectState(self.state, "is so")

    def run_status(self) -> Any:
        if self.run is None:
            raise RetryLater("the master does not answer")
        return self.run


class Moved:
    """In place of Move."""

    def __init__(self, deployment: Deployment, apis: dict[str, str], rollout: Any, live_at: Any) -> None:
        there = next(site for site in deployment.sites if site is not deployment.server_site)
        self.old = replace(deployment, server_site=there)
        self.live = live_at(self.old)

    def carry_out(self) -> None:
        Live.asked.append(("move", self.live.deployment.server_site.name))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run whose servers move from here to there."""
    found = written(tmp_path, changes={"\n[[clusters]]": THERE, 'placement = "here"': 'placement = "there"'})
    with_keys(found)
    changes = [step("a", ObjectAction.CREATE), step("b", ObjectAction.SAME)]
    stages = [
        (plan.RolloutStage("here", part, ()), changes) for part in (plan.RolloutPart.MASTER, plan.RolloutPart.CLUSTER)
    ]
    Live.asked, Live.pending = [], PendingChanges(stages, [step("old", ObjectAction.DELETE)])
    Live.going_, Live.volumes_, Live.state = [step("x", ObjectAction.DELETE)], [], Health.READY
    monkeypatch.setattr("dips.cli.deploy.LiveDeployment", Live)
    monkeypatch.setattr("dips.cli.deploy.Move", Moved)
    monkeypatch.setattr(kubernetes_api, "known_contexts", lambda: ["here", "there"])
    monkeypatch.setattr(kubernetes_api, "open_context", lambda *_: SimpleNamespace(list=lambda *_: []))
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    return found


def told(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> list[str]:
    assert main.run(["deploy", *map(str, words)]) == code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("agrees", [True, False])
def test_what_changes_is_asked_for_at_a_terminal(
    agrees: bool, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions: list[str] = []

    def confirm(question: str) -> bool:
        questions.append(question)
        return agrees

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", confirm)
    Live.volumes_ = [step("v", ObjectAction.DELETE)] * 2
    code = 0 if agrees else 1
    for command, done in (("apply", "apply"), ("scale", "scale"), ("delete", "delete"), ("move", "move")):
        Live.asked.clear()
        told(capsys, command, file, code=code)
        assert any(one[0] == done for one in Live.asked) is agrees
    told(capsys, "delete", file, "--delete-volumes", code=code)
    assert ["apply" in questions[0], "3 slaves" in questions[1], "delete 1 " in questions[2]] == [True, False, True]
    assert "2 slaves" in questions[1]
    assert "volumes" in questions[3]
    assert "delete 3 " in questions[4]
    assert len(questions) == 5


def test_without_a_terminal_nothing_is_done_without_yes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("apply", "scale", "delete", "move"):
        told(capsys, command, file, code=ConfigError.exit_code)
    assert not [one for one in Live.asked if one[0] in ("apply", "scale", "delete", "move")]
    Live.pending = PendingChanges([], [])
    told(capsys, "apply", file)
    assert ("apply", 0, True) in Live.asked, "nothing is asked where nothing changes"


@pytest.mark.parametrize(
    ("more", "changes", "reach"),
    [([], 3, True), (["--no-reach"], 3, False), (["--no-wait"], 3, False), (["--only", "servers"], 2, True)],
)
def test_apply_prepares_first_and_applies_the_difference(
    more: list[str], changes: int, reach: bool, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(capsys, "apply", file, "--yes", *more)
    assert Live.asked == [("prepare", ["there", "here"]), ("difference", "there"), ("apply", changes, reach)]
    assert lines[-1] == "run small: 7 objects were changed"
    assert "+ Service a" in lines
    assert any("192.0.2.8" in line for line in lines)


def test_a_wrong_key_is_found_before_anyone_is_asked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = file.parent / "keys"
    (keys / "a" / "tls.crt").write_bytes((keys / "s0" / "tls.crt").read_bytes())
    told(capsys, "apply", file, "--yes", code=ConfigError.exit_code)
    assert Live.asked == []


def test_a_plan_shows_what_leaves_and_notes_as_text_and_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "plan", file)
    assert "compared with what is there" in lines
    assert "- Service old (context here)" in lines
    assert [line for line in lines if "1 to delete" in line]
    offline = told(capsys, "plan", file, "--offline", "--summary")
    assert "- Service old (context here)" not in offline
    assert Live.asked == [("check_releases", ["there", "here"]), ("difference", "there")]
    (whole,) = told(capsys, "plan", file, "--json")
    assert whole.count('"action": "delete"') == 1
    assert whole.count('"action": "create"') == 2


def test_servers_move_and_start_at_the_new_site(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "move", file, "--yes", "--no-reach")
    assert Live.asked == [
        ("move", "here"), ("prepare", ["there", "here"]), ("difference", "there"), ("apply", 3, False),
    ]  # fmt: skip
    assert "from here (context here) to there (context there)" in lines[0]
    claims = [line.partition(":")[0] for line in lines[1:4]]
    assert claims == ["state-small-master-0", "state-small-slave-0", "state-small-slave-1"]
    assert "run small is at there: 7 objects were changed" in lines[4]
    links = {'"192.0.2.8"': '"192.0.2.8"\nbandwidth_gbps = [1.0]', 'id = "a"': 'id = "a"\ntokens_per_s = 1'}
    links |= {'"192.0.2.7"': '"192.0.2.7"\nbandwidth_gbps = [1.0]', 'placement = "there"': 'placement = "auto"'}
    for old, new in links.items():
        file.write_text(file.read_text().replace(old, new))
    assert main.run(["deploy", "move", str(file), "--yes"]) == ConfigError.exit_code
    assert "name the site to which the servers move as placement" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "volumes", "deleted", "last"),
    [
        ([], 2, (1, 0), "2 volumes stay (v, v): --delete-volumes deletes them"),
        (["--delete-volumes"], 2, (1, 2), "- Service v (context here)"),
        (["--cluster", "a"], 0, (1, 0), "- Service x (context here)"),
    ],
)
def test_volumes_are_deleted_only_when_asked_for(
    more: list[str], volumes: int, deleted: tuple[int, int], last: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Live.volumes_ = [step("v", ObjectAction.DELETE)] * volumes
    assert told(capsys, "delete", file, "--yes", *more)[-1] == last
    cluster = "a" if "a" in more else ""
    assert Live.asked == [("going", cluster), ("volumes", cluster), ("delete", *deleted)]
    Live.going_ = []
    nothing = "nothing of it is there" in told(capsys, "delete", file, "--yes", *more)
    assert nothing is ("--delete-volumes" not in more)


@pytest.mark.parametrize("state", Health)
def test_status_ends_with_4_while_something_waits_or_failed(
    state: Health, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Live.state = state
    code = 4 if state in (Health.WAITING, Health.FAILED) else 0
    lines = told(capsys, "status", file, code=code)
    assert [line.split()[:3] for line in lines if "Service" in line] == [["here", "Service", "x"]]
    assert any("the master does not answer" in line for line in lines)
    (whole,) = told(capsys, "status", file, "--json", code=code)
    assert f'"health": "{state.value}"' in whole
    assert '"run": null, "trouble": "the master does not answer"' in whole


def test_status_shows_of_the_run_what_it_waits_for_and_every_member(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = run_status(waiting_for="slave s1 is away", recovery="slave s1 lost version 3:7; going back to 3:5")
    monkeypatch.setattr(Live, "run", waits)
    file.write_text(file.read_text().replace("slaves = 2", 'slaves = 2\nstandby = "here"'))
    shown = "\n".join(told(capsys, "status", file))
    for words in (
        "recovering: slave s1 lost version 3:7",
        "waiting: slave s1 is away",
        "APPLIED",
        "small-standby: follows",
    ):
        assert words in shown
    (whole,) = told(capsys, "status", file, "--json")
    assert '"waiting_for": "slave s1 is away"' in whole
