"""What the operator asked for outlives the master; a COMMIT is sent until it is answered; disks lag within bounds."""

from __future__ import annotations

import pytest
from support.master_bench import Bench, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.master.state.effects import Stop

V0, V1 = Version(1, 0), Version(1, 1)


@pytest.mark.parametrize("how", ["leaves", "is evicted"])
def test_drain_survives_a_restart_until_the_cluster_is_gone(how: str) -> None:
    bench = Bench().running("a", "b")
    bench.operate(m.DrainRequest("", "a", "disk swap"))
    assert bench.entries("DRAIN")[0]["cluster"] == "a"
    bench.restart()
    bench.back("a")
    assert bench.beat("a").stop
    assert bench.status().clusters[0].note == "draining: disk swap"
    if how == "leaves":
        bench.result(bench.leave("a"))
    else:
        bench.operate(m.EvictRequest("", "a"))
    bench.back("a")
    assert not bench.beat("a").stop
    bench.push("a")
    assert bench.status().clusters[0].note == ""


def test_stop_survives_a_restart_in_mid_round() -> None:
    bench = Bench(linger_s=0.0).running("a")
    bench.slaves[0].hold.add(m.Commit)
    bench.push("a")
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    assert not bench.status().stopping
    bench.slaves[0].hold.clear()
    bench.restart()
    status = bench.status()
    assert status.stopping
    assert status.published == status.durable == V1, "the round that was open is finished"
    assert [slave.durable for slave in status.slaves] == [V1, V1]
    with refused_with(RefusalCode.STOPPING):
        bench.join("b")
    assert bench.entries("STOP")[0]["reason"] == "enough"


def test_a_second_stop_waits_for_clusters_that_still_pull_the_last_version() -> None:
    bench = Bench(linger_s=60.0).running("a")
    bench.push("a")
    for _ in range(2):
        reply = bench.operate(Stop(m.OperatorRequest("", "enough")))
        assert "every cluster pulls the last version and leaves" in reply.sentence
        assert (bench.status().stopping, bench.halted) == (True, None)
    assert bench.pull("a").version == V1
    bench.result(bench.leave("a"))
    assert bench.halted is None, "evaluators may still come"
    bench.operate(Stop(m.OperatorRequest("", "now")))
    assert bench.halted is not None


def test_a_second_stop_right_after_a_restart_waits_for_those_who_were_here() -> None:
    bench = Bench(linger_s=60.0).running("a")
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    assert bench.status().stopping
    bench.begin_anew()
    bench.slaves[0].attach()
    reply = bench.operate(Stop(m.OperatorRequest("", "did you hear me?")))
    assert "waits for a, s1" in reply.sentence
    assert bench.halted is None, "a would dial for ever, and never hear that the run has ended"
    with refused_with(RefusalCode.STOPPING):
        bench.join("a")
    bench.advance(bench.config.evict_after_s)
    assert "waits for a, s1" in bench.operate(Stop(m.OperatorRequest("", "now"))).sentence
    bench.advance(0.5)
    bench.operate(Stop(m.OperatorRequest("", "now")))
    assert bench.halted is not None
    assert bench.halted.exit_code == 0


def commits(bench: Bench, slave: int) -> int:
    return sum(isinstance(command, m.Commit) for command in bench.slaves[slave].commands)


def test_commit_is_sent_again_until_every_slave_flipped(bench: Bench) -> None:
    bench.slaves[0].hold.add(m.Commit)
    bench.push("a")
    before = (commits(bench, 0), commits(bench, 1))
    bench.advance(5.0)
    assert (commits(bench, 0), commits(bench, 1)) == (before[0] + 1, before[1]), "only who has not flipped is asked"
    bench.advance(60.0)
    assert commits(bench, 0) == before[0] + 13
    assert bench.status().phase == "COMMIT"
    bench.slaves[0].release(m.Commit)
    assert bench.status().published == V1
    assert bench.state.next_deadline_s() is None


def test_commit_is_not_sent_again_before_it_is_durable(bench: Bench) -> None:
    bench.hold_journal = True
    bench.push("a")
    before = commits(bench, 0)
    bench.silent.add("a")
    bench.advance(9.0)
    bench.hold_journal = False
    for entry in list(bench.journal):
        bench.write_journal(entry)
    assert commits(bench, 0) == before + 1


def asynchronous(**config: object) -> Bench:
    settings = m.Settings(durability="async")
    bench = Bench(settings=settings, **config).running("a")  # type: ignore[arg-type]
    assert bench.status().durable is None, "not known before a slave says so"
    wrote(bench, V0, V0)
    return bench


def wrote(bench: Bench, *versions: Version | None) -> None:
    for slave, version in zip(bench.slaves, versions, strict=True):
        slave.say(m.SlaveBeat(durable=version))


def test_durable_is_what_stands_on_every_disk() -> None:
    bench = asynchronous()
    assert bench.status().durable == V0
    bench.push("a")
    assert (bench.status().published, bench.status().durable) == (V1, V0)
    wrote(bench, V1, None)
    assert bench.status().durable == V0
    assert [slave.durable for slave in bench.status().slaves] == [V1, V0]
    wrote(bench, V1, V1)
    assert bench.status().durable == V1


def test_no_round_begins_while_disks_lag_too_far() -> None:
    bench = asynchronous(async_lag_versions=2)
    for _ in range(3):
        bench.pull("a")
        bench.push("a")
    assert bench.status().published == Version(1, 3)
    bench.pull("a")
    bench.push("a")
    assert bench.status().published == Version(1, 3)
    assert "only 1:0 is on every slave's disk" in bench.status().waiting_for
    wrote(bench, V1, Version(1, 3))
    assert bench.status().published == Version(1, 4)
    wrote(bench, Version(1, 2), Version(1, 3))
    assert bench.status().waiting_for == ""


def test_crash_of_all_loses_what_no_disk_had() -> None:
    bench = asynchronous()
    bench.rounds(2, "a")
    wrote(bench, V1, V1)
    for slave in bench.slaves:
        slave.die()
        slave.lose(Version(1, 2))
    bench.attach_all()
    assert (bench.status().published, bench.status().durable) == (Version(2, 1), Version(2, 1))


def test_a_cluster_that_is_drained_before_it_seeded_the_run_passes_that_on() -> None:
    """It may begin no push, and was asked repeatedly to join and seed: no other cluster ever did."""
    bench = Bench().attach_all()
    assert bench.join("a").seed
    bench.join("c")
    bench.join("b")
    bench.operate(m.DrainRequest("", "a", "maintenance"))
    assert isinstance(bench.ask(m.BeginPullRequest(bench.caller("a"))).answer, m.Busy), (
        "it waits, and leaves in the end"
    )
    with refused_with(RefusalCode.FENCED):
        bench.ask(m.BeginPullRequest(bench.caller("b")))
    assert bench.join("b", previous=bench.clusters["b"].join.incarnation).seed
    bench.seed("b")
    assert bench.status().published is not None


def test_a_drained_cluster_whose_seed_is_on_its_way_finishes_it() -> None:
    bench = Bench().attach_all()
    bench.join("a")
    bench.join("b")
    bench.begin_push("a", 0, base=None)
    bench.operate(m.DrainRequest("", "a", "maintenance"))
    bench.stage("a")
    bench.finish_push("a")
    assert bench.status().published is not None


def test_without_anybody_to_seed_the_status_says_so() -> None:
    bench = Bench().attach_all()
    bench.join("a")
    bench.operate(m.DrainRequest("", "a", "maintenance"))
    assert bench.status().waiting_for == "no cluster can seed the run"
    assert bench.join("b").seed
