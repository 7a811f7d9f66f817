"""What the status page is told: a state of the real master as JSON, sentences, curves, the timeline, and messages."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from support.manual_clock import ManualClock
from support.master_bench import LEASED, Bench

from dips.core.ids import Version
from dips.core.messages import Alarm, ClusterStatus, Settings, SlaveBeat, StagingProgress
from dips.master.page.history import (
    MAX_EVENTS,
    MAX_TEXT,
    BufferedTape,
    Departure,
    Departures,
    EventTimeline,
    HeldoutPoint,
    ProgressHistory,
    TapeEvent,
    TapeTail,
    TokenRate,
    heldout_point,
    sentence_of,
)
from dips.master.page.snapshot import Hub, sentence, snapshot
from dips.master.state.reasons import AlarmKind
from dips.master.state.status import RunView

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[31m" + "y" * 1000


def state_of(bench: Bench, late_s: float = 0.0, departures: Departures | None = None) -> dict[str, Any]:
    state = snapshot(bench.look(late_s), 30.04, 10.0, departures or {})
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    return state


def changed(view: RunView, **fields: Any) -> RunView:
    return dataclasses.replace(view, status=dataclasses.replace(view.status, **fields))


def cluster_of(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(cluster for cluster in state["clusters"] if cluster["id"] == name)


# ---- snapshot ----


def test_every_field_of_a_run_that_trains() -> None:
    """A push of a is merged 6 s after the start, that of b is not finite, and its round is void."""
    bench = Bench(plan=LEASED, settings=Settings(tk_max_tokens=1000)).running("a", "b")
    bench.silent, bench.nonfinite = {"a", "b"}, {"b": 3}
    for name in ("a", "b"):
        bench.now_s += 2.0
        bench.begin_push(name, 100, bench.lease(name, 100))
        bench.now_s += 4.0
        bench.stage(name)
        bench.finish_push(name)
    bench.now_s += 1.0
    bench.pull("a")
    bench.lease("a", 100)
    bench.beat("a", phase="TRAINING", steps=20, tokens_per_s=90.0, steps_per_s=2.0, loss=3.5, note="n", late_ranks=(0,))
    bench.beat("b", phase="PULLING")
    slave = bench.slaves[0]
    slave.say(SlaveBeat(10, served_bytes=7, refused_chunks=2, resident_bytes=1000, refused_connections=1))
    bench.now_s += 1.0
    state = state_of(bench, 0.5)
    common = {"level": "good", "why": "", "alive": True, "incarnation": "1.1", "lives": 1, "beat_age_s": 0.5}
    unmeasured = dict.fromkeys(("away_s", "z", "cosine", "push"))
    of_both = common | unmeasured | {"ranks": 1, "local_steps": 64, "stale": False, "aborted": 0}
    assert state["clusters"] == [
        of_both
        | {"id": "a", "sign": "training", "phase": "training", "late_ranks": [0], "steps_per_s": 2.0, "steps": 20}
        | {"tokens_per_s": 90.0, "loss": 3.5, "base": "1:1", "behind": 0, "tokens": 100, "applied": 1, "excluded": 0}
        | {"verdict": "applied", "reason": "", "norm": 0.5, "leased": 100, "note": "n"},
        of_both
        | {"id": "b", "sign": "pulling", "phase": "pulling", "late_ranks": [], "steps_per_s": 0.0, "steps": 0}
        | {"tokens_per_s": 0.0, "loss": None, "base": "1:0", "behind": 1, "tokens": 0, "applied": 0, "excluded": 1}
        | {"verdict": "excluded", "reason": "3 elements are not finite", "norm": None, "leased": 0, "note": ""},
    ]
    del common["why"]
    assert state["slaves"][0] == common | {
        **{"id": "s0", "sign": "ready", "phase": "ready", "version": "1:1", "durable": "1:1"},
        **{"memory_bytes": 1000, "staging_bytes": 10, "served_bytes": 7, "refused_chunks": 2},
        **{"refused_connections": 1, "endpoint": "tcp://127.0.0.1:5001"},
    }
    link = {"cluster": "a", "slave": "s0", "push": 32.0, "push_age_s": 7.5, "pull": 1280000.0, "pull_age_s": 0.5}
    assert (state["links"][0], len(state["links"])) == (link, 4)
    assert state["recent_rounds"][1:] == [
        {"id": "r1.2", "outcome": "commit", "reason": "", "version": "1:1", "accepted": ["a"], "excluded": []}
        | {"kappa": 1.0, "rho": 0.5, "norm": 0.5, "tokens": 100, "at": 1001008.0},
        {"id": "r1.3", "outcome": "void", "reason": "no push was accepted (b: 3 elements are not finite)"}
        | {"version": None, "accepted": [], "excluded": ["b"], "kappa": None, "rho": None, "norm": None}
        | {"tokens": 100, "at": 1001013.0},
    ]
    assert state["rounds"] == {"committed": 1, "merged": 0, "void": 1, "aborted": 0}
    assert (state["version"], state["since_publish_s"], state["tokens"], state["left_s"]) == ("1:1", 5.5, 100, 90.0)
    assert state["round"] == {"id": None, "phase": "IDLE", "age_s": 0.5, "pushed": 0, "of": 2} | dict.fromkeys(
        ("closes_in_s", "planned_in_s")
    )
    assert (state["say"]["level"], "a version about every 8 s" in state["say"]["text"]) == ("good", True)


def test_a_cluster_that_is_evicted_is_bad_and_one_that_left_no_trouble() -> None:
    bench = Bench().running("a", "b")
    bench.silent.add("b")
    bench.advance(30.0)
    assert not bench.alive("b")
    state = state_of(bench, departures={"b": Departure("evict", "no heartbeat for 10.0 s", 10.0)})
    b = cluster_of(state, "b")
    assert (b["level"], b["sign"], b["why"], b["tokens_per_s"]) == ("bad", "away", "no heartbeat for 10.0 s", None)
    assert state["say"]["level"] == "warn"
    assert state["say"]["text"].endswith("cluster b is away (no heartbeat for 10.0 s).")
    assert (cluster_of(state, "a")["away_s"], cluster_of(state, "b")["away_s"]) == (None, 20.0)
    bench = Bench().running("a", "b")
    bench.leave("b")
    state = state_of(bench, departures={"b": Departure("leave", "done", 1.0)})
    assert (cluster_of(state, "b")["level"], cluster_of(state, "b")["why"]) == ("off", "done")
    assert state["say"]["level"] == "good"


def test_silence_counts_the_time_since_the_last_event(bench: Bench) -> None:
    heartbeat_s = bench.config.settings.heartbeat_s
    assert cluster_of(state_of(bench), "a")["level"] == "good"
    silent = cluster_of(state_of(bench, 3 * heartbeat_s), "a")
    assert (silent["level"], silent["sign"], silent["why"]) == (
        "warn",
        "silent",
        f"no heartbeat for {3 * heartbeat_s:.0f} s",
    )


def test_a_slave_that_is_away_is_bad_and_the_sentence_is_the_state_machines() -> None:
    bench = Bench().running("a", "b")
    bench.slaves[1].reattaches = False
    bench.slaves[1].die()
    state = state_of(bench)
    assert [slave["level"] for slave in state["slaves"]] == ["good", "bad"]
    assert state["say"] == {"level": "bad", "text": "Slave s1 is away.", "more": []}


def test_a_push_that_is_under_way_and_its_verdict_are_shown_with_its_cluster() -> None:
    bench = Bench().running("a", "b")
    bench.begin_push("a")
    push = bench.clusters["a"].push_id
    bench.slaves[0].say(SlaveBeat(progress=(StagingProgress(push, 1, 64),)))  # of 4 layers of 64 bytes
    assert cluster_of(state_of(bench), "a")["push"] == {"phase": "TICKETED", "landed": 0.25}
    bench.stage("a")
    bench.finish_push("a")
    state = state_of(bench)
    assert cluster_of(state, "a")["push"] == {"phase": "ADMITTED", "landed": 1.0}
    assert (state["round"]["phase"], state["round"]["pushed"], state["round"]["of"]) == ("WINDOW", 1, 2)
    assert 0 < state_of(bench, 0.25)["round"]["closes_in_s"] < state["round"]["closes_in_s"]
    bench.push("b")
    state = state_of(bench)
    assert (state["version"], state["rounds"]["merged"]) == ("1:1", 1)


def test_text_of_others_is_cut_and_stays_text() -> None:
    view = Bench().running("a").look()
    one = dataclasses.replace(view.status.clusters[0], note=HOSTILE, phase=HOSTILE, last_reason=HOSTILE)
    one = dataclasses.replace(one, last_verdict="EXCLUDED")
    a = snapshot(changed(view, clusters=(one,)), 0.0, 0.0, {})["clusters"][0]
    assert a["note"].startswith("<img src=x")  # the page makes a text node of it, never markup
    for text in (a["note"], a["phase"], a["reason"]):
        assert len(text) == MAX_TEXT
        assert text.isprintable()


@pytest.mark.parametrize(("goal", "rate", "left"), [(0, 10.0, None), (1000, 10.0, 100.0), (1000, 0.0, None)])
def test_how_long_it_takes_still(goal: int, rate: float, left: float | None) -> None:
    view = changed(Bench().running("a").look(), tk_max_tokens=goal, tokens=0)
    assert snapshot(view, 0.0, rate, {})["left_s"] == left


# ---- the sentence ----


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({"stopped": True, "tokens": 12345}, "off", "12,345 tokens"),
        ({"paused": True, "waiting_for": "the operator paused the run: moving"}, "wait", "moving"),
        ({"recovery": "slave s0 lost version 1:3"}, "bad", "Recovering: slave s0 lost version 1:3."),
        ({"waiting_for": "cluster a is to push the first parameters"}, "wait", "Cluster a is to push"),
        ({"phase": "MEASURE", "phase_age_s": 0.1, "waiting_for": "slave s0 has yet to measure"}, "good", "All is well"),
        ({"phase": "MEASURE", "phase_age_s": 9.0, "waiting_for": "slave s0 has yet to"}, "wait", "Slave s0 has yet to"),
        ({"reshard": "add s2: the open round ends first"}, "wait", "Blocks are about to move: add s2"),
    ],
)
def test_the_most_pressing_reason_is_the_sentence(fields: dict[str, Any], level: str, words: str) -> None:
    told = sentence(changed(Bench().running("a").look(), **fields), {})
    assert told["level"] == level
    assert words in told["text"]


def test_a_run_that_publishes_nothing_for_long_is_said_to_stand_still() -> None:
    view = dataclasses.replace(Bench().running("a").look(), since_publish_s=100.0, publish_interval_s=20.0)
    assert sentence(view, {})["level"] == "wait"
    assert sentence(view, {})["text"].startswith("No version was published for 1 min 40 s, usually one")
    assert sentence(dataclasses.replace(view, since_publish_s=60.0), {})["level"] == "good"


def test_what_stands_beside_the_sentence() -> None:
    view = Bench().running("a").look()
    silent = ClusterStatus("a", alive=True, pushes_applied=1, steps_per_s=2.0)
    more = sentence(changed(view, clusters=(silent,)), {})["more"]
    assert more[-1].startswith("No cluster reports a loss: write sync.report(loss)")
    told = dataclasses.replace(silent, loss=2.0)
    assert not any("loss" in line for line in sentence(changed(view, clusters=(silent, told)), {})["more"])
    view = Bench().running("a", "b").look()
    clusters = tuple(
        dataclasses.replace(c, direction_alarm=c.cluster_id == "a", quarantined=True) for c in view.status.clusters
    )
    more = sentence(changed(view, clusters=clusters), {})["more"]
    assert more[0].startswith("Direction alarm: a pushes")
    assert more[1].endswith("excluded in a row: a, b.")


@pytest.mark.parametrize("field", ["direction_alarm", "quarantined", "alarms"])
def test_all_is_not_well_while_an_alarm_stands(field: str) -> None:
    view = Bench().running("a", "b").look()
    first, second = view.status.clusters
    cases: dict[str, dict[str, Any]] = {
        "direction_alarm": {"clusters": (dataclasses.replace(first, direction_alarm=True), second)},
        "quarantined": {"clusters": (dataclasses.replace(first, quarantined=True), second)},
        "alarms": {"alarms": (Alarm(AlarmKind.SAME_DATA, ("a", "b"), "clusters a and b push the same"),)},
    }
    assert sentence(view, {})["level"] == "good"
    assert sentence(changed(view, **cases[field]), {})["level"] == "warn"


# ---- the timeline ----

PUSH, S0, TURNED_AWAY = {"push": "a/1.1#3"}, {"slave": "s0"}, "refused_connections"


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("join", {"cluster": "a", "incarnation": "1.2"}, ("good", "cluster a", "joined as incarnation 1.2")),
        ("evict", {"cluster": "a", "reason": "no heartbeat"}, ("bad", "cluster a", "evicted: no heartbeat")),
        ("evict", {"sentence": "cluster a is evicted"}, ("info", "operator", "evict: cluster a is evicted")),
        ("slave_lost", {"slave": "s0", "reason": "its stream broke"}, ("bad", "slave s0", "lost: its stream broke")),
        ("slave_ready", {"slave": "s0", "version": "1:4"}, ("good", "slave s0", "ready at version 1:4")),
        ("verdict", {"push": "a/1.1#3", "verdict": "APPLIED"}, None),
        ("verdict", {**PUSH, "verdict": "EXCLUDED", "reason": "z 9"}, ("warn", "cluster a", "push excluded: z 9")),
        ("alarm", {"sentence": "look here"}, ("bad", "run", "look here")),
        ("epoch", {"epoch": 1, "version": "None"}, ("info", "master", "the master began epoch 1, with no version yet")),
        ("epoch", {"epoch": 2, "version": "1:4"}, ("warn", "master", "the master started again: epoch 2, version 1:4")),
        ("refused", {"code": "BUSY", "peer": "a", "sentence": "later"}, None),
        ("refused", {"code": "IDENTITY", "method": "Join", "sentence": "no"}, ("warn", "Join", "refused: no")),
        ("stood_still", {"gap_s": 0.4}, None),
        ("stood_still", {"gap_s": 7.0}, ("warn", "master", "the master itself paused for 7.0 s")),
        ("ticket", {"push": "a/1.1#3"}, None),
        ("stood_still", {"gap_s": "no number"}, None),
        ("master-ended", {"sentence": "SIGTERM"}, ("info", "master", "the master ended: SIGTERM")),
        ("adopted", {"version": "1:4"}, ("warn", "run", "version 1:4 was adopted from the slaves")),
        ("stopped", {"reason": "its limit"}, ("info", "run", "the run has ended: its limit")),
        ("revoked", {"holder": "cluster a"}, ("warn", "cluster a", "its certificate was revoked")),
        ("recovery", {"why": "s1 lost it"}, ("warn", "run", "recovery: s1 lost it")),
        ("recovery", {"why": ""}, None),
        ("resharded", {"blocks": 7}, ("good", "run", "7 blocks have moved to other slaves")),
        ("leave", {"cluster": "a", "reason": "done"}, ("info", "cluster a", "left: done")),
        ("verdict", {**PUSH, "verdict": "ROLLED_BACK"}, ("bad", "cluster a", "push rolled back: no reason given")),
        ("slave_attached", {"slave": "s0", "incarnation": "1.2"}, ("info", "slave s0", "attached as incarnation 1.2")),
        ("slave_ready", {"slave": "s0", "version": "None"}, ("good", "slave s0", "ready, with no version yet")),
        ("slave_dismissed", {"slave": "s0", "reason": "moved"}, ("info", "slave s0", "dismissed: moved")),
        (TURNED_AWAY, {**S0, "count": 1, "last_reason": "x"}, ("warn", "slave s0", "refused a connection: x")),
        (TURNED_AWAY, {**S0, "count": 3, "last_reason": "x"}, ("warn", "slave s0", "refused 3 connections: x")),
        ("what nobody ever wrote", {}, None),
    ],
)
def test_events_become_sentences(kind: str, fields: dict[str, Any], told: tuple[str, str, str] | None) -> None:
    assert sentence_of(kind, fields) == told


def test_the_timeline_is_bounded_and_counts_what_repeats() -> None:
    timeline = EventTimeline()
    for n in range(3 * MAX_EVENTS):
        timeline.note(float(n), "alarm", {"sentence": f"number {n}"})
    assert len(timeline.since(0)) == MAX_EVENTS
    before = timeline.seq
    for at_s in (2000.0, 2001.0, 2002.0):
        timeline.note(at_s, "alarm", {"sentence": "again"})
    [event] = timeline.since(before)
    assert (event.times, event.at) == (3, 2002.0)


def test_the_timeline_knows_how_a_cluster_went_until_it_is_back() -> None:
    timeline = EventTimeline()
    timeline.note(1.0, "evict", {"cluster": "a", "reason": "silent"})
    assert timeline.departures == {"a": ("evict", "silent", 1.0)}
    timeline.note(2.0, "join", {"cluster": "a", "incarnation": "1.2"})
    assert not timeline.departures


def test_the_real_masters_records_are_told() -> None:
    bench = Bench().running("a", "b")
    bench.silent.add("b")
    bench.advance(30.0)
    timeline = EventTimeline()
    for record in bench.records:
        timeline.note(0.0, record.kind, record.fields)
    told = [(event.level, event.who) for event in timeline.since(0)]
    assert [event.presence for event in timeline.since(0) if event.who == "cluster b"] == ["here", "gone"]
    assert ("good", "cluster a") in told
    assert ("good", "slave s0") in told
    assert ("bad", "cluster b") in told
    assert timeline.departures["b"].kind == "evict"


# ---- the curves ----


def sample(history: ProgressHistory, n: int, *losses: float) -> None:
    clusters = [ClusterStatus(f"c{i}", alive=True, loss=loss) for i, loss in enumerate(losses)]
    history.add(float(n), 100 * n, 0.0, clusters)


def test_rows_are_thinned_and_never_more_than_the_bound() -> None:
    history = ProgressHistory(max_rows=8)
    for n in range(100):
        sample(history, n, float(n))
    assert len(history.rows) <= 8
    assert history.generation > 0
    assert history.rows[0].tokens == 0  # the beginning stays
    assert [row.tokens // 100 % history.every for row in history.rows] == [0] * len(history.rows)


def test_only_what_is_new_is_sent() -> None:
    history = ProgressHistory()
    sample(history, 1, 5.0)
    sample(history, 1, float("nan"))
    assert history.full()["loss"] == {"c0": [5.0, None]}
    history = ProgressHistory()
    sample(history, 1, 5.0)
    before = history.seq
    sample(history, 2, 4.0, 3.0)
    new = history.since(before)
    assert (new["at"], new["loss"]) == ([2.0], {"c0": [4.0], "c1": [3.0]})
    assert history.full()["loss"] == {"c0": [5.0, 4.0], "c1": [None, 3.0]}


def test_more_clusters_than_can_be_drawn_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.master.page.history.CHARTED_CLUSTERS", 2)
    history = ProgressHistory()
    sample(history, 1, 1.0, 2.0, 3.0)
    assert history.charted == ["c0", "c1"]


def test_a_version_evaluated_again_counts_once_and_the_newest_stays() -> None:
    history = ProgressHistory(max_heldout=4)
    for n in range(9):
        history.add_heldout(HeldoutPoint(Version(1, n), n, 1.0))
    history.add_heldout(HeldoutPoint(Version(1, 8), 8, 0.5))
    assert len(history.heldout) <= 5
    assert [(str(p.version), p.loss) for _, p in history.heldout][-1] == ("1:8", 0.5)


def test_the_rate_is_that_of_the_last_rounds_and_survives_a_rollback() -> None:
    rate = TokenRate()
    rates = []
    for at_s, tokens in ((0, 0), (10, 1000), (40, 1000), (80, 1000), (120, 1000), (121, 500), (122, 600)):
        rate.add(at_s, tokens)
        rates.append(rate.per_s())
    assert rates[:2] == [0.0, 100.0]
    assert rates[4:] == [0.0, 0.0, 100.0]  # the rollback at 121 s: counted again from there, never negative


# ---- tapes ----


def test_the_ear_hears_what_the_tape_writes_and_a_restart_reads_it_again(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    with BufferedTape(path, "master", "run", ManualClock()) as tape:
        tape.write("join", "-", cluster="a", incarnation="1.1")
    [(_, kind, fields)] = tape.waiting
    assert (kind, fields["cluster"]) == ("join", "a")
    with path.open("ab") as file:
        file.write(b'not json\n{"kind": "no time"}\n{"wall_s": 1, "kind": "torn')
    assert [(kind, fields["cluster"]) for _, kind, fields in TapeTail(path).events()] == [("join", "a")]
    assert list(TapeTail(tmp_path / "none", 9).events()) == []
    lines = [json.dumps({"wall_s": n, "kind": "join", "cluster": f"c{n}"}) for n in range(100)]
    path.write_text("\n".join(lines) + "\n")
    found = [fields["cluster"] for _, _, fields in TapeTail(path, last_bytes=200).events()]
    assert found == ["c96", "c97", "c98", "c99"], "only the end of a long one"


def test_the_evaluators_tape_is_read_along(tmp_path: Path) -> None:
    path = tmp_path / "heldout.tape.jsonl"
    tail = TapeTail(path)

    def news() -> list[tuple[str, float]]:
        points = (heldout_point(*event) for event in tail.events())
        return [(str(point.version), point.loss) for point in points if point is not None]

    assert news() == []

    def write(*events: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write("".join(json.dumps({"wall_s": 1.0, **event}) + "\n" for event in events))

    write({"kind": "heldout", "version": "1:1", "tokens": 10, "loss": 4.0}, {"kind": "other"})
    assert news() == [("1:1", 4.0)]
    with path.open("a") as file:
        file.write('{"wall_s": 1.0, "kind": "heldout", "version": "1:2", "tok')
    assert news() == []
    with path.open("a") as file:
        file.write('ens": 20, "loss": 3.0}\n')
    write({"kind": "heldout", "version": "1:3", "tokens": -1, "loss": 3.0}, {"kind": "heldout", "loss": None})
    assert news() == [("1:2", 3.0)]
    path.write_text("")
    assert news() == []
    write({"kind": "heldout", "version": "2:1", "tokens": 5, "loss": 9.0})
    assert news() == [("2:1", 9.0)]


# ---- messages ----


async def test_a_page_that_keeps_up_gets_what_is_new_and_another_gets_all(tmp_path: Path) -> None:
    bench, events = Bench().running("a", "b"), deque[TapeEvent]()
    hub = Hub(events, None, [(1.0, "alarm", {"sentence": "of an earlier life"})])
    assert hub.number == 0
    events.append((2.0, "join", {"cluster": "a", "incarnation": "1.1"}))
    waiting = asyncio.ensure_future(hub.after(0))
    await asyncio.sleep(0)
    hub.take(bench.look(), 2.0)
    await waiting
    first = json.loads(hub.message_after(0))
    assert first["full"]
    assert [event["text"] for event in first["events"]] == ["of an earlier life", "joined as incarnation 1.1"]
    bench.pushes("a", "b")
    hub.take(bench.look(), 3.0)
    second = json.loads(hub.message_after(1))
    assert (second["full"], second["events"], second["history"]["at"]) == (False, [], [3.0])
    assert [entry["version"] for entry in second["rounds"]] == ["1:1"]
    assert json.loads(hub.message_after(0))["history"]["at"] == [2.0, 3.0]
    assert "\n" not in hub.message_after(1)
    waiting = asyncio.ensure_future(hub.after(hub.number))
    await asyncio.sleep(0)
    assert not waiting.done()
    hub.end("the master has ended")
    await waiting
    assert hub.ended == "the master has ended"
