"""`dips demo --cut-link`: which cluster is behind the link, how it is started, and where no link can be cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.run_status import cluster_status, run_status

from dips.cli import main
from dips.core.errors import ConfigError
from dips.core.ids import Incarnation
from dips.local import cut_link
from dips.local.cut_link import CutLink, check_possible
from dips.local.demo import LINK_CUT_S, DemoOptions, behind_the_link, make_plan, planned_faults, train_settings
from dips.local.processes import TrainedCluster
from dips.local.report import LINK, FaultPlan, PlannedFault


@pytest.mark.parametrize(
    ("clusters", "parallel", "name"),
    [(4, False, "d"), (3, False, "c"), (2, False, "a"), (1, False, "a"), (4, True, "a"), (5, True, "e")],
)
def test_the_link_is_that_of_one_process_which_is_not_killed(clusters: int, parallel: bool, name: str) -> None:
    assert behind_the_link(DemoOptions(clusters=clusters, parallel=parallel)) == name


def test_the_cut_is_planned_when_asked_for() -> None:
    cut = PlannedFault(LINK, "d", 0.75, LINK_CUT_S)
    assert planned_faults(DemoOptions(cut_link=True))[2:] == [cut]
    assert planned_faults(DemoOptions(cut_link=True, faults=False)) == [cut]
    assert LINK not in {fault.kind for fault in planned_faults(DemoOptions())}


def test_the_cluster_runs_in_the_namespace_and_servers_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_link, "free_ports", lambda how_many: tuple(range(5000, 5000 + how_many)))
    wanted = DemoOptions(run_dir=tmp_path, cut_link=True, slaves=2)
    plan = make_plan(wanted, train_settings(wanted), 1_000, CutLink(3))
    assert plan.master.listen == "127.0.0.1:5000"
    assert [slave.data_port for slave in plan.slaves] == [5001, 5002]
    commands = {
        cluster.cluster_id: cluster.command("127.0.0.1:5000", [])
        for cluster in plan.clusters
        if isinstance(cluster, TrainedCluster)
    }
    assert commands["d"][:3] == ["ip", "netns", "exec"]
    assert commands["d"][4:8] == commands["a"][:4]


def test_a_cluster_is_back_when_it_has_joined_again_over_its_link() -> None:
    plan = FaultPlan([PlannedFault(LINK, "b", 0.35, 12.0)])
    [due] = plan.due(run_status())
    fault = plan.was_done(due, 71, run_status(), 40.0)
    assert fault.what == "link of cluster b cut for 12 s"
    assert plan.observe(run_status(), 53.0) == []
    again = run_status(clusters=(cluster_status("b", incarnation=Incarnation(1, 5)),))
    assert plan.observe(again, 55.0) == [fault]


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("dips.local.cut_link.os.geteuid", lambda: 1000)
    assert main.run(["demo", "--cut-link"]) == 2
    sentence = "a link is cut in a network namespace, which only root may make: run it as root, or leave out --cut-link"
    assert capsys.readouterr().err == f"dips: {sentence}\n"


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [("shutil.which", lambda name: None, "apt-get install iproute2"), ("sys.platform", "darwin", "use Linux")],
)
def test_no_namespaces_are_told(monkeypatch: pytest.MonkeyPatch, what: str, value: object, words: str) -> None:
    monkeypatch.setattr("dips.local.cut_link.os.geteuid", lambda: 0)
    monkeypatch.setattr(f"dips.local.cut_link.{what}", value)
    with pytest.raises(ConfigError, match=words):
        check_possible()


def test_namespaces_that_are_not_allowed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'mount --make-shared /run/netns failed: Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError, match=r"ip netns add dips-demo-\d+ failed \(mount .* not permitted\): network"):
        with CutLink(1):
            pass
