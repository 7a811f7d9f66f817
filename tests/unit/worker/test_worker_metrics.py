"""The cluster's collector: every metric of the list from a session's events, and links as transfers tell them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.cluster_bench import ClusterBench
from support.metric_samples import Samples, samples

from dips.core.errors import RefusalCode, Refused
from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Layout, Parameter
from dips.core.messages import Caller, DataMode, DataPlan, LeaveReply, LeaveRequest, PlacementSpec, PullGrant, Ticket
from dips.core.net.security import INSECURE
from dips.core.net.transfer import SlaveProgress
from dips.core.wire import Codec
from dips.worker import metrics
from dips.worker.config import ClientConfig
from dips.worker.data import LinkCounts, TransferDirection, wire_of_pull
from dips.worker.pace import StepTimer
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import Cancel, Done, Failed, Run, SendPush
from dips.worker.state.shared import SessionConfig
from dips.worker.state.tape import BaseStale

LAYOUT = Layout((Parameter("w", (4, 4), "float32", "w"),))


def session() -> ClusterMachine:
    return ClusterMachine(SessionConfig(ClusterId("a"), LAYOUT, DataPlan(DataMode.OWN), run_id="test"))


@pytest.fixture
def counts() -> metrics.Counts:
    return metrics.Counts()


def scraped(
    view: metrics.View,
    counts: metrics.Counts,
    links: LinkCounts | None = None,
    checkpoint_s: float = math.nan,
    answered_s: float | None = None,
    now_s: float = 100.0,
) -> Samples:
    config = ClientConfig(cluster_id="a", master="127.0.0.1:1", insecure=True)
    families = metrics.cluster_families(
        config, INSECURE, view, counts, links or LinkCounts(), checkpoint_s, answered_s, now_s
    )
    return samples(families, metrics.PREFIX, metrics.METRICS)


PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 1)
TICKET = Ticket(2, PlacementSpec((), (), b""), (), Codec.F32)


def test_calls_and_transfers_are_counted(counts: metrics.Counts) -> None:
    call, push = LeaveRequest(Caller("test", 1, "a"), "done"), SendPush(PUSH, TICKET)
    for job in range(3):
        counts.gave(Run(job, call, ""))
    for job in range(3, 5):
        counts.gave(Run(job, push, ""))
    for event in (
        Failed(0, "no one answered"),
        Done(1, Refused(RefusalCode.BUSY, "not now")),
        Done(2, LeaveReply()),
        Done(3, (), 0.5),
        Failed(4, "no progress"),
        Failed(4, "once more"),
    ):
        counts.took(event)
    counts.gave(Run(5, call, ""))
    counts.gave(Cancel(5))
    counts.took(Failed(5, "it is not wanted any longer"))
    found = scraped(counts.view(session(), StepTimer()), counts)
    assert [found["calls_total", result] for result in ("done", "refused", "failed")] == [1, 1, 1]
    assert [found["refused_calls_total", code] for code in ("BUSY", "FENCED", "STALE_EPOCH")] == [1, 0, 0]
    assert (found["transfers_total", "push", "done"], found["transfers_total", "push", "failed"]) == (1, 1)
    assert found["transfer_seconds", "push"] == 1
    assert found["phase", "joining"] == 1
    assert ("staleness_versions",) not in found


def test_stale_pushes_and_retries_are_counted_from_effects(counts: metrics.Counts) -> None:
    counts.gave(Run(1, SendPush(PUSH, TICKET), ""))
    counts.gave(BaseStale("", push=PUSH, stale_kind="FENCE", reason=""))
    found = scraped(counts.view(session(), StepTimer()), counts)
    assert found["stale_pushes_total", "fence"] == 1
    assert found["push_retries_total",] == 1


def test_waits_count_while_they_last_and_once(counts: metrics.Counts) -> None:
    counts.waits(metrics.EXCHANGE, 10.0)
    counts.waits(metrics.EXCHANGE, 12.0)
    found = scraped(counts.view(session(), StepTimer()), counts, now_s=15.0)
    assert found["waited_seconds_total", metrics.EXCHANGE] == 5.0
    counts.goes_on(16.0)
    counts.goes_on(17.0)
    counts.waits(metrics.DATA, 20.0)
    counts.goes_on(21.0)
    found = scraped(counts.view(session(), StepTimer()), counts, now_s=30.0)
    assert (found["waited_seconds_total", metrics.EXCHANGE], found["waited_seconds_total", metrics.DATA]) == (6.0, 1.0)


def test_staleness_is_known_on_the_published_timeline_alone(counts: metrics.Counts) -> None:
    view = counts.view(session(), StepTimer())
    behind = replace(view, base=Version(1, 3), published=Version(1, 5))
    found = scraped(behind, counts)
    assert found["staleness_versions",] == 2
    assert ("staleness_versions",) not in scraped(replace(behind, published=Version(2, 5)), counts)


def test_beats_and_checkpoints_have_ages_once_there_were_any(counts: metrics.Counts) -> None:
    view = counts.view(session(), StepTimer())
    none = scraped(view, counts)
    assert ("beat_age_seconds",) not in none
    assert ("checkpoint_age_seconds",) not in none
    counts.checkpoints.observe(0.5)
    found = scraped(view, counts, checkpoint_s=90.0, answered_s=99.5)
    assert (found["beat_age_seconds",], found["checkpoint_age_seconds",]) == (0.5, 10.0)
    assert found["checkpoint_seconds",] == 1


def test_links_add_up_over_transfers_and_forget_slaves_of_an_earlier_placement(counts: metrics.Counts) -> None:
    links = LinkCounts()
    push = links.begin(TransferDirection.PUSH, Codec.F32, ["s0", "s1"], 0.0)
    push.tell({"s0": SlaveProgress(400, 0, 0, {}, None), "s1": SlaveProgress(0, 0, 1, {"BUSY": 2}, None)}, 1.0)
    push.tell({"s0": SlaveProgress(800, 100, 0, {}, 0.25), "s1": SlaveProgress(800, 0, 1, {"BUSY": 3}, 0.5)}, 2.0)
    again = links.begin(TransferDirection.PUSH, Codec.F32, ["s0", "s1"], 10.0)
    again.tell({"s0": SlaveProgress(200, 0, 0, {}, 0.1), "s1": SlaveProgress(0, 0, 1, {"BUSY": 1}, None)}, 11.0)
    found = scraped(counts.view(session(), StepTimer()), counts, links)
    assert found["link_bytes_total", "s0", "push"] == 1000
    assert found["link_bytes_total", "s0", "pull"] == 0
    assert found["link_resumed_bytes_total", "s0"] == 100
    assert found["link_bytes_per_second", "s0", "push"] == 200.0
    assert found["link_bytes_per_second", "s1", "push"] == 400.0  # of the transfer before: nothing moved since
    assert found["link_round_trip_seconds", "s0"] == 0.1
    assert found["link_reconnects_total", "s1"] == 2
    assert found["link_refusals_total", "s1", "BUSY"] == 4
    assert found["link_refusals_total", "s1", "CHUNK"] == 0, "there before the first one, else its rise is not seen"
    links.begin(TransferDirection.PULL, Codec.F32, ["s1"], 20.0).tell({"s1": SlaveProgress(50, 0, 0, {}, None)}, 21.0)
    assert set(links.view) == {"s1"}


def test_a_pull_of_differences_moves_one_payload_for_each_version_between() -> None:
    life = ClusterBench()
    grant = life.granted(wire=Codec.INT8, base=Version(3, 1), version=Version(3, 4)).answer
    assert isinstance(grant, PullGrant)
    assert wire_of_pull(grant) == (Codec.INT8, 3)
    for whole in (replace(grant, base=None), replace(grant, wire=Codec.NONE), replace(grant, wire=Codec.F32)):
        assert wire_of_pull(whole) == (Codec.F32, 1)


def test_an_evaluator_says_what_it_found() -> None:
    def values(evaluated: metrics.Evaluated | None) -> dict[str, float]:
        families = metrics.heldout_families(evaluated, INSECURE, 30.0)
        return {
            sample.name.removeprefix(metrics.PREFIX): sample.value for family in families for sample in family.samples
        }

    assert values(None) == {}
    found = values(metrics.Evaluated(Version(1, 7), 1000, 2.25, 25.0))
    assert found == {"heldout_loss": 2.25, "heldout_version": 7, "heldout_tokens": 1000, "heldout_age_seconds": 5.0}
    assert set(found) < {spec.name for spec in metrics.HELDOUT}
