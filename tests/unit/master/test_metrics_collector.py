"""The master's collector: every metric of the list from a state under a hand-turned clock, and bounded labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.master_bench import LEASED, OWN, Bench
from support.metric_samples import Samples, samples
from support.reshard_bench import ReshardBench

from dips.core.errors import RefusalCode
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.messages import ClusterStatus, Hello, Measure
from dips.core.observe.metrics_server import NotNow
from dips.core.protocol import RANKS
from dips.master.metrics import METRICS, PREFIX, Counts, Metrics, Rising, clusters_shown
from dips.master.state import tape
from dips.master.state.status import status


class Scraped:
    """A bench whose records are counted, and scrapes of it."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.metrics = Metrics(bench.config.max_clusters)
        self.metrics.shared = bench.state.shared
        self.counts = self.metrics.counts
        self._folder = folder
        self._told = 0

    def scrape(self, late_s: float = 0.0) -> Samples:
        for record in self.bench.records[self._told :]:
            self.counts.note(record, self.bench.now_s)
        self._told = len(self.bench.records)
        now = self.metrics.snapshot(self.bench.now_s + late_s)
        return samples(self.metrics.families(now, self._folder), PREFIX, METRICS)


@pytest.fixture
def run(tmp_path: Path) -> Scraped:
    return Scraped(Bench(plan=LEASED).running("a", "b"), tmp_path)


def test_before_its_epoch_a_master_has_no_snapshot() -> None:
    with pytest.raises(NotNow, match="has not begun its epoch"):
        Metrics().snapshot(0.0)


def test_status_and_metrics_say_how_many_ranks_a_cluster_has(tmp_path: Path) -> None:
    bench = Bench()
    for slave in bench.slaves:
        slave.hello = Hello(1, 1, (RANKS,))
    run = Scraped(bench.running("a"), tmp_path)
    bench.join("b", pushers=3)
    assert [cluster.ranks for cluster in status(bench.state.shared).clusters] == [1, 3]
    found = run.scrape()
    assert (found["cluster_ranks", "a"], found["cluster_ranks", "b"]) == (1, 3)
    assert found["cluster_late_ranks", "b"] == 0
    bench.beat("b", late_ranks=(2, 1, 2, 3, 5000))  # more than once, no rank of this cluster, and of none
    assert run.scrape()["cluster_late_ranks", "b"] == 2
    assert status(bench.state.shared).clusters[1].late_ranks == (1, 2)
    bench.leave("b")
    assert ("cluster_ranks", "b") not in run.scrape()
    assert ("cluster_late_ranks", "b") not in run.scrape()
    assert status(bench.state.shared).clusters[1].late_ranks == ()
    assert [cluster.ranks for cluster in status(bench.state.shared).clusters] == [1, 0]


def test_members_versions_and_tokens(run: Scraped) -> None:
    bench = run.bench
    found = run.scrape(late_s=0.25)
    assert found["clusters", "live"] == 2
    assert found["slaves", "ready"] == found["slaves_expected",] == 2
    assert found["version",] == 0
    assert found["timeline",] == found["epoch",] == 1
    assert found["cluster_up", "a"] == found["slave_up", "s1"] == 1
    assert found["cluster_beat_age_seconds", "a"] == pytest.approx(0.25)
    assert found["round_phase", "idle"] == found["waiting", "none"] == 1
    ranges = bench.lease("a", 100)
    bench.push("a", sum(item.tokens for item in ranges), ranges)
    assert run.scrape()["round_phase", "window"] == 1
    bench.advance(3.0)
    found = run.scrape()
    assert found["version",] == 1
    assert found["tokens",] == found["tokens_applied_total",] == found["cluster_tokens_applied_total", "a"] == 100
    assert found["data_tokens", "applied"] == 100
    assert found["rounds_total", "commit"] == 1  # the seed's is none
    assert found["verdicts_total", "a", "applied", "merged"] == 1 + 1
    assert found["round_phase_seconds", "window"] == found["round_seconds",] == 2
    assert found["participation",] < 1.0
    assert found["cluster_norm", "a"] > 0
    assert found["push_attempts_total", "a", "first"] == 2
    assert found["pulls_total", "cluster"] == 2


def test_phases_take_the_time_that_passed_in_them() -> None:
    counts = Counts()
    counts.note(tape.RoundMoved("r1.1", round=None, phase="COMMIT", input="", why=""), 1.0)
    counts.note(tape.EpochBegun("-", epoch=2, version=None, tokens=0, durability="sync"), 5.0)  # begins with no round
    for phase, now_s in (("WINDOW", 10.0), ("SEALED", 11.0), ("MEASURE", 11.0), ("IDLE", 11.5)):  # aborted
        counts.note(tape.RoundMoved("r1.1", round=None, phase=phase, input="", why=""), now_s)
    for phase, now_s in (("WINDOW", 20.0), ("PREPARE", 22.0), ("COMMIT", 22.5), ("PUBLISH", 23.0), ("IDLE", 23.0)):
        counts.note(tape.RoundMoved("r1.2", round=None, phase=phase, input="", why=""), now_s)
    found: dict[str, dict[str, float]] = {}
    for metric in counts.collect().values():
        for sample in metric.samples:
            found.setdefault(sample.name, {})[sample.labels.get("phase", "")] = sample.value
    expected = {"window": 3.0, "sealed": 0.0, "measure": 0.5, "prepare": 0.5, "commit": 0.5, "publish": 0.0}
    assert found[f"{PREFIX}round_phase_seconds_sum"] == expected
    assert found[f"{PREFIX}round_seconds_count"] == {"": 1}
    assert found[f"{PREFIX}round_seconds_sum"] == {"": 3.0}


def test_beats_bring_speed_loss_and_transfer_times(run: Scraped) -> None:
    base = run.bench.state.shared.ledger.version
    run.bench.beat("a", tokens_per_s=500.0, steps_per_s=5.0, loss=2.5, push_s=0.5, pull_s=0.25, base=base)
    found = run.scrape()
    assert found["cluster_loss", "a"] == 2.5
    assert ("cluster_loss", "b") not in found
    assert found["cluster_push_seconds", "a"] == 0.5
    assert found["cluster_pull_seconds", "a"] == 0.25
    assert found["tokens_per_second",] >= 500.0
    assert found["cluster_staleness_versions", "a"] == 0


def test_an_exclusion_shows_with_its_reason(run: Scraped) -> None:
    run.bench.nonfinite["a"] = 3
    for name in ("a", "b"):
        ranges = run.bench.lease(name, 100)
        run.bench.push(name, sum(item.tokens for item in ranges), ranges)
    found = run.scrape()
    assert found["verdicts_total", "a", "excluded", "not_finite"] == 1
    assert found["verdicts_total", "a", "excluded", "score"] == 0  # there before the first one
    assert found["verdicts_total", "b", "applied", "merged"] == 1
    assert found["data_tokens", "excluded"] == 100


def test_who_is_silent_is_evicted_and_stays_visible_as_does_a_lost_slave(run: Scraped) -> None:
    run.bench.silent.add("b")
    run.bench.advance(5.0)
    assert run.scrape()["cluster_beat_age_seconds", "b"] == pytest.approx(5.0)
    run.bench.advance(10.0)
    run.bench.slaves[0].die()
    assert run.scrape()["waiting", "slaves"] == 1
    run.bench.leave("a")
    run.bench.state.shared.ledger.tokens = 0
    found = run.scrape()
    assert found["cluster_up", "b"] == found["cluster_up", "a"] == found["slave_up", "s0"] == 0
    assert (found["clusters", "away"], found["slaves", "away"], found["slave_losses_total", "s0"]) == (2, 1, 1)
    assert found["departures_total", "b", "evict"] == found["departures_total", "a", "leave"] == 1
    assert ("cluster_beat_age_seconds", "b") not in found


def test_counts_of_events_that_only_the_tape_tells(tmp_path: Path) -> None:
    run = Scraped(Bench().running("a"), tmp_path)
    counts = run.counts
    counts.note(tape.RolledBack("recovery", version=None, origin=Version(1, 0), donor=None, lost_tokens=30), 0.0)
    counts.note(tape.AlarmRaised("-", code="rollback", clusters=[], sentence="look"), 0.0)
    counts.note(tape.PullGranted("-", by="reader export", version=Version(1, 0)), 0.0)
    counts.called("Join")
    counts.refused("Join", RefusalCode.IDENTITY.name)
    counts.timed(lambda entries: None)([])
    found = run.scrape()
    assert found["rollbacks_total",] == 1
    assert found["rolled_back_tokens_total",] == 30
    assert found["alarms_total",] == 1
    assert found["pulls_total", "reader"] == 1
    assert found["calls_total", "Join"] == found["refused_calls_total", "Join", "IDENTITY"] == 1
    assert found["journal_append_seconds",] == 1


def test_sizes_of_the_durable_state(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "0000000001-0000000002.jsonl").write_bytes(b"x" * 50)
    found = Scraped(Bench().running("a"), tmp_path).scrape()
    assert found["journal_bytes", "archive"] == 50
    assert found["disk_free_bytes",] > 0
    assert ("disk_free_bytes",) not in Scraped(Bench().running("a"), tmp_path / "gone").scrape()


def test_there_are_never_more_clusters_than_may_take_part() -> None:
    away = [ClusterStatus(f"c{i}", Incarnation(1, i), alive=False) for i in range(50)]
    live = ClusterStatus("z", Incarnation(1, 1), alive=True)
    shown = clusters_shown([*away, live], 4)
    assert [cluster.cluster_id for cluster in shown] == ["c47", "c48", "c49", "z"]


def test_counts_of_clusters_that_come_and_go_are_bounded(tmp_path: Path) -> None:
    counts = Counts(most_clusters=2)
    for i in range(1000):
        push = PushId(ClusterId(f"c{i}"), Incarnation(1, 1), 1)
        decided = tape.PushDecided(
            "-", push=push, verdict="APPLIED", version=None, round=None, code="merged", reason="merged"
        )
        ticket = tape.TicketIssued("-", push=push, base=None, fence=0, tokens=1, attempt=1, donates=None, wire="F32")
        for line in (decided, ticket, tape.ClusterLeft("-", cluster=push.cluster, reason="done")):
            counts.note(line, 0.0)
    counted = counts.moment(Bench().look())
    assert len(counted.verdicts) == 64
    assert len(counted.attempts) == len(counted.departures) == 4


def test_a_counter_of_a_number_that_falls_never_falls_and_a_key_that_is_gone_is_forgotten() -> None:
    rising, tokens = Rising(), ("tokens", "")
    for number, total in ((100, 100), (150, 150), (120, 150), (170, 200)):  # 120: a ROLLBACK
        assert rising.look({tokens: number}) == {tokens: total}
    rising.look({("here", ""): 2})
    assert rising.look({tokens: 3, ("here", ""): 2}) == {tokens: 3, ("here", ""): 2}


def test_a_slave_without_blocks_is_up_while_it_waits_and_not_shown_when_it_is_gone(tmp_path: Path) -> None:
    bench = ReshardBench()
    run = Scraped(bench, tmp_path)
    bench.slaves[0].attach()
    assert run.scrape()["waiting", "slaves"] == 1, "one of two is here"
    bench.slaves[1].attach()
    found = run.scrape()
    assert found["slave_up", "s0"] == found["slave_up", "s1"] == found["waiting", "no_clusters"] == 1
    bench.running("a", "b")
    bench.slave("s0").hold.add(Measure)
    bench.push("a")
    bench.push("b")  # their round stays open, and the RESHARD waits for its end
    bench.reshard(add=("s2",))
    added = bench.new_slave("s2")
    assert run.scrape()["slave_up", "s2"] == 1
    added.die()
    assert ("slave_up", "s2") not in run.scrape()


def test_only_the_slave_that_is_away_is_down_after_the_masters_restart(bench: Bench, tmp_path: Path) -> None:
    bench.push("a")
    bench.slaves[1].die()
    bench.silent.add("a")
    bench.start_master()
    bench.slaves[0].attach()
    run = Scraped(bench, tmp_path)
    bench.advance(75.0)
    found = run.scrape()
    assert (found["slave_up", "s0"], found["slave_up", "s1"]) == (1, 0)
    assert bench.status().recovery == (
        "the master was started again 75 s ago, and goes on from version 1:1 once slave s1 is here"
    )
    bench.slaves[1].attach()
    assert run.scrape()["slave_up", "s1"] == 1
    assert (bench.status().recovery, bench.status().published) == ("", Version(1, 1))


def test_leased_tokens_are_shown_where_the_run_lends_data(run: Scraped, tmp_path: Path) -> None:
    own = Scraped(Bench(plan=OWN).running("a"), tmp_path / "own")
    assert [("cluster_leased_tokens", "a") in one.scrape() for one in (run, own)] == [True, False]
