"""Clusters come, go, fall silent and come back; what each of it changes and what it must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.master_bench import LAYOUT, LEASED, OWN, Bench, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Incarnation, Version
from dips.core.layout import Layout, Parameter
from dips.core.net.codec_protobuf import encode
from dips.master.state.effects import Pause, Stop

REVERSED = Layout(LAYOUT.parameters[::-1])


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"caller": m.Caller("other-run", 0, "b")}, RefusalCode.RUN_ID, "other-run"),
        ({"caller": m.Caller("", 0, "Not A Name")}, RefusalCode.MALFORMED, "Not A Name"),
        ({"hello": m.Hello(7, 9)}, RefusalCode.PROTOCOL_VERSION, "7 to 9"),
        ({"layout_hash": b"forged"}, RefusalCode.LAYOUT, "hash"),
        ({"layout": REVERSED, "layout_hash": REVERSED.layout_hash}, RefusalCode.LAYOUT, "another order"),
        ({"data_plan": LEASED}, RefusalCode.DATA_PLAN, "LEASED"),
        ({"declared_tokens_per_s": -1.0}, RefusalCode.TOKENS, "-1"),
        ({"declared_tokens_per_s": math.nan}, RefusalCode.TOKENS, "nan"),
        ({"declared_tokens_per_s": 1e15}, RefusalCode.TOKENS, "tokens/s"),
    ],
)
def test_bad_join_is_refused_and_the_run_goes_on(changes: dict[str, Any], code: RefusalCode, word: str) -> None:
    bench = Bench(plan=OWN).running("a")
    with refused_with(code, word):
        bench.join("b", **changes)
    bench.push("a")
    assert bench.status().published == Version(1, 1)
    assert [c.cluster_id for c in bench.status().clusters] == ["a"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LEASED, m.DataPlan(m.DataMode.LEASED, b"other", 1000, 100)),
        (LEASED, m.DataPlan(m.DataMode.LEASED, b"corpus", 2000, 100)),
        (LEASED, m.DataPlan(m.DataMode.LEASED, b"corpus", 1000, 50)),
        (LEASED, OWN),
        (None, m.DataPlan(m.DataMode.LEASED, b"corpus", 0, 0)),
        (None, m.DataPlan(m.DataMode.LEASED, b"corpus", 100, 101)),
        (None, m.DataPlan(m.DataMode.LEASED, b"corpus", (1 << 60) + 1, 100)),
    ],
)
def test_other_text_or_one_that_cannot_be_leased_is_refused(ours: m.DataPlan | None, theirs: m.DataPlan) -> None:
    bench = Bench(plan=ours or OWN).attach_all()
    if ours is not None:
        bench.running("a")
    with refused_with(RefusalCode.DATA_PLAN):
        bench.join("b", data_plan=theirs)
    assert bench.join("b")


def test_model_too_big_for_the_slaves_is_refused_before_anything_is_placed() -> None:
    bench = Bench().attach_all()
    huge = Layout(tuple(Parameter(f"layers.{i}.w", (1 << 14, 1 << 14), "float32", f"layers.{i}") for i in range(8)))
    with refused_with(RefusalCode.MEMORY, "start more slaves"):
        bench.join("a", layout=huge, layout_hash=huge.layout_hash)
    assert bench.join("a").seed, "a smaller model may still begin the run"


def test_all_slots_taken_is_busy_also_by_a_sealed_push_of_a_cluster_that_is_gone() -> None:
    """In its slot another cluster's bytes would land on those that are being merged."""
    bench = Bench(max_clusters=2, grace_s=0.0).running("a", "b")
    bench.slaves[0].hold.add(m.Measure)
    push = bench.push("a")
    slot = bench.slaves[0].staging[push].slot
    bench.operate(m.EvictRequest("", "a"))
    with refused_with(RefusalCode.BUSY, "max_clusters"):
        bench.join("c")
    bench.join("a")
    assert bench.state.shared.members["a"].slot == slot
    bench.slaves[0].release(m.Measure)
    bench.result(bench.leave("a"))
    assert bench.join("c")


def test_cluster_ids_are_remembered_for_ever_and_so_only_so_many_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joined under one fresh name after the other made every journal entry longer, without an end."""
    monkeypatch.setattr("dips.master.state.membership.MAX_CLUSTER_IDS", 2)
    bench = Bench(max_clusters=1).running("a")
    for name in ("b", "c"):
        bench.result(bench.leave("a" if name == "b" else "b"))
        bench.join(name)
    bench.result(bench.leave("c"))
    with refused_with(RefusalCode.CONFIG, "give a cluster that comes back the id that it had"):
        bench.join("d")
    assert bench.join("a")


def test_leases_of_a_restarted_process_are_free_again_except_those_it_still_holds() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    first, second = (*bench.lease("a", 100), *bench.lease("a", 100))
    foreign = bench.lease("b", 100)
    assert bench.join("a", held=(second, *foreign)).kept_ranges == (second,)
    assert bench.status().leased_tokens == 200
    assert bench.lease("a", 100)[0].chunk == first.chunk


def test_a_sealed_push_outlives_its_cluster_with_its_ranges_and_the_next_incarnation_waits_for_it() -> None:
    bench = Bench(plan=LEASED).running("a")
    ranges = bench.lease("a", 100)
    bench.slaves[0].hold.add(m.Measure)
    push = bench.push("a", 100, ranges)
    assert bench.join("a").last_push == push, "undecided"
    assert bench.status().leased_tokens == 100
    with pytest.raises(AssertionError, match="undecided"):
        bench.pull("a")
    token = bench.await_verdict("a", push)
    assert bench.is_open(token)
    bench.slaves[0].release(m.Measure)
    assert bench.result(token).answer.kind is m.VerdictKind.APPLIED
    assert (bench.status().tokens, bench.status().leased_tokens, bench.pull("a").fence) == (100, 0, 2)
    assert bench.lease("a", 100)[0].chunk != ranges[0].chunk


def test_leases_last_their_time_and_re_attach_when_the_cluster_returns() -> None:
    bench = Bench(plan=LEASED, lease_ttl_s=60.0).running("a", "b")
    held = bench.lease("a", 100)
    bench.silent.add("a")
    bench.advance(50.0)
    assert bench.status().leased_tokens == 100
    bench.join("a", previous=bench.clusters["a"].join.incarnation, held=held)
    assert bench.status().leased_tokens == 100
    bench.advance(90.0)
    assert bench.status().leased_tokens == 0


def test_leases_of_a_sealed_push_stay_leased_when_their_time_is_over_in_mid_round() -> None:
    """Freed, another cluster would train on them, and the same text would be applied twice (I6, I12)."""
    bench = Bench(plan=LEASED, lease_ttl_s=5.0, grace_s=0.0).running("a", "b")
    bench.slaves[0].hold.add(m.Measure)
    ranges = bench.lease("a", 100)
    bench.push("a", 100, ranges)
    unused = bench.lease("a", 100)
    bench.operate(m.EvictRequest("", "a"))
    bench.advance(6.0)
    assert (bench.status().phase, bench.status().leased_tokens) == ("MEASURE", 100)
    (back,) = bench.entries("RETURN")
    assert (back["cluster"], back["tokens"]) == ("a", 100), "what it leased after its push is free"
    taken = bench.lease("b", 900)
    assert {r.chunk for r in taken} == set(range(10)) - {ranges[0].chunk}
    assert unused[0].chunk in {r.chunk for r in taken}
    bench.slaves[0].release(m.Measure)
    assert (bench.status().tokens, bench.status().leased_tokens) == (100, 900)


def test_second_process_with_the_same_cluster_id_takes_over_and_the_first_must_stop(bench: Bench) -> None:
    first = bench.clusters["a"].join.incarnation
    bench.join("a")
    bench.beat("a")
    with refused_with(RefusalCode.FENCED, "another process"):
        bench.join("a", previous=first)
    assert bench.alive("a")


def test_leave_aborts_an_open_push_and_frees_leases() -> None:
    bench = Bench(plan=LEASED).running("a", "b")
    bench.begin_push("a", 100, bench.lease("a", 100))
    bench.result(bench.leave("a"))
    assert bench.status().leased_tokens == 0
    assert not bench.slaves[0].staging


def test_operator_evicts_drains_and_is_told_of_wrong_names() -> None:
    bench = Bench().running("a", "b")
    for request in (m.EvictRequest("", "z"), m.DrainRequest("", "z")):
        with refused_with(RefusalCode.UNKNOWN_NAME, "a, b"):
            bench.operate(request)
    with refused_with(RefusalCode.RUN_ID):
        bench.operate(m.EvictRequest("other", "a"))
    bench.operate(m.EvictRequest("", "a", "bad link"))
    assert not bench.alive("a")
    bench.operate(m.DrainRequest("", "b", "maintenance"))
    assert bench.beat("b").stop
    bench.push("b")
    assert bench.status().tokens > 0, "its last steps count"


@pytest.mark.parametrize("after_restart", [False, True])
def test_cluster_whose_join_was_answered_in_vain_may_join_again(bench: Bench, after_restart: bool) -> None:
    bench.silent.add("a")
    bench.advance(11.0)
    known = bench.clusters["a"].join.incarnation
    bench.join("a", previous=known)  # its answer is lost
    if after_restart:
        bench.start_master()
        bench.attach_all()
    assert bench.join("a", previous=known).incarnation > known
    assert bench.beat("a")


@pytest.mark.parametrize(
    "numbers",
    [
        {"steps_per_s": math.nan, "push_s": math.nan, "pull_s": math.nan, "tokens_per_s": math.nan},
        {"steps_per_s": math.inf, "push_s": math.inf, "pull_s": math.inf, "tokens_per_s": math.inf},
        {"steps_per_s": 100.0, "push_s": math.nan},
        {"steps_per_s": 100.0, "pull_s": math.inf},
        {"steps_per_s": 5e-324},
        {"steps_per_s": 1e308, "push_s": -1e308},
        {"steps_per_s": -1.0, "push_s": -1.0, "tokens_per_s": -1.0},
        {"steps": (1 << 64) - 1, "note": "x" * 100_000},
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_absurd_numbers_in_a_beat_stop_nobody(numbers: dict[str, float], dynamic: bool) -> None:
    bench = Bench(settings=m.Settings(dynamic_local_steps=dynamic)).running("a", "b")
    bench.silent.add("a")  # beats by hand only
    for n in range(3):
        bench.ask(m.HeartbeatRequest(bench.caller("a"), **numbers))  # type: ignore[arg-type]
        bench.push("b")
        bench.advance(2.0)
        assert bench.status().published == Version(1, n + 1)
        bench.pulls("a", "b")
    bench.ask(m.HeartbeatRequest(bench.caller("a"), **numbers))  # type: ignore[arg-type]
    bench.join("a")
    encode(bench.status())


@pytest.mark.parametrize("end", ["evict", "join"])
def test_leave_that_waits_is_answered_when_the_cluster_is_gone_otherwise(bench: Bench, end: str) -> None:
    bench.slaves[0].hold.add(m.Measure)
    bench.push("a")
    token = bench.leave("a")
    if end == "evict":
        bench.operate(m.EvictRequest("", "a"))
    else:
        bench.join("a")
    assert bench.result(token)


def test_leave_waits_for_the_verdict_of_a_sealed_push_and_answers_a_first_call_when_it_is_repeated() -> None:
    bench = Bench().running("a")
    bench.slaves[0].hold.add(m.Measure)
    bench.push("a")
    first = bench.leave("a")
    assert bench.is_open(first)
    second = bench.call(m.LeaveRequest(bench.caller("a"), "again"))
    with refused_with(RefusalCode.BUSY):
        bench.result(first)
    bench.slaves[0].release(m.Measure)
    assert bench.result(second)
    assert not bench.alive("a")
    assert bench.status().tokens == 100


def test_leave_does_not_wait_for_another_round_after_an_abort(bench: Bench) -> None:
    bench.slaves[0].hold.add(m.Measure)
    push = bench.push("a")
    token = bench.leave("a")
    round_id = bench.status().round
    assert round_id is not None
    bench.slaves[0].say(m.RoundRefused(round_id, "measure", m.Refusal(RefusalCode.DISK, "the disk is full")))
    assert bench.result(token)
    assert not bench.alive("a")
    reply = bench.join("a")
    assert isinstance(reply.last_push, m.Verdict)
    assert (reply.last_push.push, reply.last_push.kind) == (push, m.VerdictKind.ABORTED)


def test_stop_takes_effect_although_clusters_push_without_a_pause_or_every_round_aborts() -> None:
    bench = Bench(grace_s=0.0).running("a", "b")
    bench.slaves[0].hold.add(m.Measure)
    bench.pushes("a", "b")
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    assert not bench.status().stopping
    bench.slaves[0].release(m.Measure)
    assert bench.verdict("a").kind is m.VerdictKind.APPLIED
    assert bench.verdict("b").kind is m.VerdictKind.ABORTED
    assert (bench.status().stopping, bench.status().published) == (True, Version(1, 1))
    with refused_with(RefusalCode.STOPPING):
        bench.join("c")
    bench = Bench().running("a")
    bench.slaves[0].refuse["prepare"] = m.Refusal(RefusalCode.DISK, "the disk is full")
    bench.push("a")
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    bench.advance(20.0)
    assert bench.status().stopping
    assert bench.verdict("a").kind is m.VerdictKind.ABORTED


@pytest.mark.parametrize("why", ["paused", "too few clusters"])
def test_stop_does_not_wait_for_a_window_that_cannot_close(why: str) -> None:
    bench = Bench(min_clusters=1 if why == "paused" else 2).running("a")
    if why == "paused":
        bench.operate(Pause(m.OperatorRequest("", "a break")))
    bench.push("a")
    assert bench.status().phase == "WINDOW"
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    assert bench.status().stopping
    assert bench.verdict("a").kind is m.VerdictKind.ABORTED


def test_paused_master_gives_up_no_ticket_no_pin_and_no_lease() -> None:
    bench = Bench(plan=LEASED, ticket_ttl_s=10.0, lease_ttl_s=60.0).running("a", "b")
    held = bench.lease("b", 100)
    bench.silent.add("b")
    bench.advance(20.0)
    assert not bench.alive("b")
    bench.begin_push("a", 100, bench.lease("a", 100))
    bench.ask(m.BeginPullRequest(m.Caller("", 0, "export"), reader=True))
    held_calls = (bench.finish_push("a"), bench.await_verdict("a", wait_s=20.0))
    bench.jump(3600.0)
    bench.advance(4.0)
    for token in held_calls:
        assert bench.is_open(token)
    assert bench.state.shared.members["a"].push is not None
    assert bench.state.shared.pins
    bench.join("b", previous=bench.clusters["b"].join.incarnation, held=held)
    leases = bench.state.shared.ledger.leases
    assert leases is not None
    leases.check("b", held)


def both_push(bench: Bench) -> None:
    bench.pushes("a", "b")


def hold(kind: type) -> Callable[[Bench], None]:
    def begin(bench: Bench) -> None:
        bench.slaves[0].hold.add(kind)
        both_push(bench)

    return begin


def refuse_prepare(bench: Bench) -> None:
    bench.slaves[0].refuse["prepare"] = m.Refusal(RefusalCode.DISK, "no space left")
    both_push(bench)


def wait_for_a_record(bench: Bench) -> None:
    old = bench.snapshot
    both_push(bench)
    bench.slaves[0].hold.add(m.SendCommitRecord)
    bench.restart(old)


def remove_a_slave_in_vain(bench: Bench) -> None:
    bench.operate(m.ReshardRequest("", remove=("s1",)))
    (asked,) = [command for command in bench.slaves[0].commands if isinstance(command, m.ListShard)]
    bench.slaves[0].say(m.RoundRefused(asked.round, "listshard", m.Refusal(RefusalCode.DISK, "no space left")))


@pytest.mark.parametrize(
    "begin",
    [
        lambda bench: bench.push("a"),
        hold(m.Measure),
        hold(m.Prepare),
        hold(m.Commit),
        refuse_prepare,
        wait_for_a_record,
        remove_a_slave_in_vain,
    ],
    ids=["window", "measure", "prepare", "commit", "next try of a round", "record of a slave", "next try of a RESHARD"],
)
def test_no_wait_of_a_round_runs_out_while_the_master_itself_stands_still(begin: Callable[[Bench], None]) -> None:
    bench = Bench(grace_s=3.0, round_timeout_s=20.0).running("a", "b")
    begin(bench)

    def seen() -> tuple[object, ...]:
        commands = sum(len(slave.commands) for slave in bench.slaves)
        return commands, bench.status().phase, bench.status().rounds_aborted

    before = seen()
    bench.jump(1000.0)
    assert seen() == before
    bench.advance(25.0)
    assert seen() != before, "its time goes on afterwards"


def test_run_that_ends_publishes_its_last_version_first() -> None:
    bench = Bench(settings=m.Settings(tk_max_tokens=100), linger_s=1.0).running("a")
    bench.all_hold(m.Commit)
    bench.push("a")
    for slave in bench.slaves:
        slave.alive = False
        slave.hold.clear()
    bench.start_master()
    bench.advance(60.0)
    assert bench.status().stopping
    assert not bench.status().stopped
    bench.attach_all()
    assert bench.status().published == Version(1, 1)
    assert bench.status().stopped
    bench.advance(1.0)
    assert bench.halted is not None
    assert bench.halted.exit_code == 0
    assert all(isinstance(slave.commands[-1], m.StopSlave) for slave in bench.slaves)


def test_join_that_names_too_many_ranges_is_refused() -> None:
    bench = Bench(plan=LEASED).running("a")
    with refused_with(RefusalCode.RANGES):
        bench.join("b", held=(m.DataRange(1, 0, 0, 0, 1),) * 65_537)


@pytest.mark.parametrize("kind", [m.Measure, m.Prepare, m.Commit])
@pytest.mark.parametrize("then", ["evict", "join", "leave", "drain", "pause", "stop", "newcomer"])
def test_whatever_happens_in_a_round_its_pushes_are_counted_once(kind: type, then: str) -> None:
    bench = Bench(linger_s=5.0).running("a", "b")
    bench.slaves[0].hold.add(kind)
    bench.push("a")
    push = bench.push("b")
    match then:
        case "evict":
            bench.operate(m.EvictRequest("", "b"))
        case "join":
            assert bench.join("b").last_push == push
        case "leave":
            bench.leave("b")
        case "drain":
            bench.operate(m.DrainRequest("", "b"))
        case "pause":
            bench.operate(Pause(m.OperatorRequest("")))
        case "stop":
            bench.operate(Stop(m.OperatorRequest("")))
        case "newcomer":
            assert not bench.join("c").seed
    bench.slaves[0].release(kind)
    status = bench.status()
    assert (status.published, status.tokens) == (Version(1, 1), 200)
    assert [c.pushes_applied for c in status.clusters][:2] == [1, 1]
    assert {bench.state.shared.ledger.detector.of(name).steps for name in "ab"} == {16}, "as many as each made"
    assert bench.alive("b") == (then not in ("evict", "leave"))


# ---- what is not trained ----

BASE = (m.TensorDigest("base.weight", 7), m.TensorDigest("base.bias", 8))
TABLES = (m.TensorDigest("angles", 1),)


def other(*listed: m.TensorDigest) -> tuple[m.TensorDigest, ...]:
    return tuple(m.TensorDigest(item.name, item.digest + 1) for item in listed)


def over_base(config: m.Settings | None = None, **untrained: Any) -> Bench:
    """A run whose first cluster is over these weights and buffers."""
    bench = Bench(plan=OWN, settings=config or m.Settings()).attach_all()
    bench.join("a", **(untrained or {"frozen": BASE, "buffers": TABLES}))
    return bench


def test_a_cluster_over_other_frozen_weights_is_refused_by_name_and_changes_nothing() -> None:
    bench = over_base()
    bench.push("a", 0)
    with refused_with(RefusalCode.FROZEN, "frozen parameters 'base.bias' differ"):
        bench.join("b", frozen=(BASE[0], *other(BASE[1])), buffers=TABLES)
    with refused_with(RefusalCode.FROZEN, "it lacks frozen parameters 'base.weight', 'base.bias'"):
        bench.join("b", buffers=TABLES)  # nothing is frozen there
    assert [c.cluster_id for c in bench.status().clusters] == ["a"]
    bench.join("b", frozen=tuple(reversed(BASE)), buffers=TABLES)


def test_clusters_may_differ_where_the_run_says_so() -> None:
    bench = over_base(m.Settings(frozen="any"))
    assert bench.join("b", frozen=other(*BASE), buffers=other(*TABLES)).settings.frozen == "any"
    bench = over_base(m.Settings(frozen="parameters"))
    bench.join("b", frozen=BASE, buffers=other(*TABLES))
    with refused_with(RefusalCode.FROZEN):
        bench.join("c", frozen=other(*BASE), buffers=TABLES)


def test_other_constant_buffers_are_refused_at_the_first_join_and_said_later() -> None:
    """A cluster that comes back may hold what its own training made of a buffer."""
    bench = over_base(buffers=TABLES)
    with refused_with(RefusalCode.FROZEN, "buffers 'angles' differ"):
        bench.join("b", buffers=other(*TABLES))
    bench.join("b", buffers=TABLES)
    bench.join("b", buffers=other(*TABLES))
    assert "cluster b came back with other buffers: buffers 'angles' differ" in [log.sentence for log in bench.logs]


def test_a_refused_cluster_leaves_no_list_behind_and_the_first_ones_list_outlives_the_master() -> None:
    bench = over_base(m.Settings(frozen="any"), frozen=BASE)
    bench.config = replace(bench.config, settings=m.Settings())
    bench.restart()
    with refused_with(RefusalCode.DATA_PLAN):
        bench.join("b", frozen=other(*BASE), data_plan=LEASED)
    with refused_with(RefusalCode.MALFORMED):
        bench.join("a", frozen=(BASE[0], BASE[0]))
    bench.join("a", frozen=BASE)
    bench.restart()
    with refused_with(RefusalCode.FROZEN):
        bench.join("b", frozen=other(*BASE))
    bench.join("b", frozen=BASE)


def ended(**config: Any) -> Bench:
    """A run of a and b that has ended with version 1:1, which b has not pulled yet."""
    bench = Bench(settings=m.Settings(tk_max_tokens=100), grace_s=1.0, **config).running("a", "b")
    bench.push("a")
    bench.advance(2.0)
    assert (bench.status().published, bench.status().stopping) == (Version(1, 1), True)
    return bench


def test_member_pulls_the_last_version_also_from_a_master_that_was_restarted() -> None:
    bench = ended()
    before = {name: cluster.join.incarnation for name, cluster in bench.clusters.items()}
    bench.restart()
    bench.join("b", previous=before["b"])
    assert bench.pull("b").version == Version(1, 1)
    assert bench.beat("b").stop
    bench.result(bench.leave("b"))
    assert not bench.status().stopped, "a is on its way"
    bench.join("a", previous=before["a"])
    bench.result(bench.leave("a"))
    assert bench.status().stopped


def test_run_that_ends_is_open_for_no_one_else_after_a_restart() -> None:
    bench = ended()
    before = bench.clusters["b"].join.incarnation
    assert before is not None
    bench.restart()
    for name, previous in (("c", None), ("b", None), ("b", Incarnation(1, before.n - 1))):
        with refused_with(RefusalCode.STOPPING):
            bench.join(name, previous=previous)


def test_members_that_do_not_come_back_keep_no_master_and_one_that_comes_late_is_not_cut_off_in_its_pull() -> None:
    bench = ended(linger_s=5.0)
    before = bench.clusters["b"].join.incarnation
    bench.restart()
    bench.advance(bench.config.evict_after_s)
    assert not bench.status().stopped
    bench.advance(1.0)
    assert bench.status().stopped
    bench.advance(3.0)
    bench.join("b", previous=before)
    bench.advance(8.0)
    assert (bench.status().stopped, bench.halted) == (False, None)
    bench.silent.add("b")
    bench.advance(bench.config.evict_after_s + 0.5)
    assert (bench.status().stopped, bench.halted) == (True, None), "it fell silent, and was evicted"
    bench.advance(5.0)
    assert bench.halted is not None
    assert bench.halted.exit_code == 0


def test_process_that_was_evicted_while_the_run_ended_pulls_the_last_version_too() -> None:
    bench = Bench(settings=m.Settings(tk_max_tokens=100)).running("a")
    bench.join("b", process_id=b"b's")
    bench.push("a")
    bench.operate(m.EvictRequest("", "b"))
    assert bench.status().stopping
    with refused_with(RefusalCode.STOPPING):
        bench.join("b", previous=bench.clusters["b"].join.incarnation, process_id=b"another")
    bench.join("b", previous=bench.clusters["b"].join.incarnation, process_id=b"b's")
    assert bench.pull("b").version == Version(1, 1)
    assert bench.beat("b").stop


# ---- members that do not come back after the master's restart ----


def test_a_member_that_does_not_come_back_to_a_restarted_master_is_evicted_and_may_join_later() -> None:
    bench = Bench().running("a", "b")
    before = {name: cluster.join.incarnation for name, cluster in bench.clusters.items()}
    bench.restart()
    bench.join("a", previous=before["a"])
    bench.advance(bench.config.evict_after_s)
    assert not bench.recorded("evict")
    bench.advance(2.0)
    assert [line["cluster"] for line in bench.recorded("evict")] == ["b"]
    assert bench.entries("EVICT")[-1]["cluster"] == "b"
    bench.advance(60.0)
    assert len(bench.recorded("evict")) == 1
    assert bench.join("b", previous=before["b"]).incarnation is not None
    assert bench.alive("b")


def test_a_member_that_still_calls_with_its_old_incarnation_is_not_evicted() -> None:
    """Its training loop joins again once its step is done."""
    bench = Bench().running("a", "b")
    before = {name: bench.caller(name) for name in ("a", "b")}
    bench.restart()
    bench.join("a", previous=before["a"].incarnation)
    for _ in range(10):
        bench.advance(bench.config.evict_after_s / 2)
        with refused_with(RefusalCode.STALE_EPOCH):
            bench.ask(m.HeartbeatRequest(before["b"]))
    assert not bench.recorded("evict")
    bench.advance(bench.config.evict_after_s + 2.0)
    assert [line["cluster"] for line in bench.recorded("evict")] == ["b"]


# ---- readers at the end ----


@pytest.mark.parametrize("goes", [False, True])
def test_the_master_of_an_ended_run_waits_for_readers_whose_pull_has_begun(goes: bool) -> None:
    bench = Bench(linger_s=5.0, ticket_ttl_s=4.0).running("a")
    bench.operate(Stop(m.OperatorRequest("", "enough")))
    bench.result(bench.leave("a"))
    assert bench.status().stopped
    assert bench.state.next_deadline_s() == bench.now_s + 5.0
    bench.advance(4.0)
    reader = m.Caller("", 0, "export")
    grant = bench.ask(m.BeginPullRequest(reader, True)).answer
    for _ in range(0 if goes else 4):
        bench.advance(3.0)
        bench.ask(m.BeginPullRequest(reader, True, grant.version, True, pin_id=grant.pin_id))  # renews its pin
    bench.advance(3.0)
    assert bench.halted is None
    if not goes:
        bench.ask(m.BeginPullRequest(m.Caller("", 0, "late"), True))
        bench.ask(m.FinishPullRequest(reader, grant.pin_id, True))
        assert bench.halted is not None, "the late one began after linger_s"
    bench.advance(2.0)
    assert bench.halted is not None
