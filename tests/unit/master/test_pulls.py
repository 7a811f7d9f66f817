"""Pulls: what is granted, what must wait, and that a joiner or reader never holds up a round."""

from __future__ import annotations

from typing import Any

import pytest
from support.master_bench import LAYOUT, Bench, refused_with

from dips.core import messages as m
from dips.core.errors import RefusalCode
from dips.core.ids import Version
from dips.core.layout import AVERAGED_LAYER, Layout, Parameter
from dips.core.protocol import CAPABILITIES
from dips.core.wire import Codec, encoded_bytes
from dips.master.state.pulls import MAX_READERS


def reader(name: str = "r") -> m.Caller:
    return m.Caller("", 0, name)


def test_pull_waits_while_no_version_exists_or_a_slave_is_away_and_is_a_members_or_a_readers_of_this_run() -> None:
    bench = Bench().attach_all()
    bench.join("a")
    bench.join("b")
    for word in ("cluster a", "s1"):
        if word == "s1":
            bench.seed("a")
            bench.slaves[1].die()
        answer = bench.ask(m.BeginPullRequest(bench.caller("b"))).answer
        assert isinstance(answer, m.Busy)
        assert (word in answer.sentence, answer.retry_after_s > 0) == (True, True)
    with refused_with(RefusalCode.FENCED):
        bench.ask(m.BeginPullRequest(m.Caller("test", 1, "ghost")))
    with refused_with(RefusalCode.RUN_ID):
        bench.ask(m.BeginPullRequest(m.Caller("other", 0, "r"), True))


def test_pull_of_a_later_version_waits_until_it_is_published_and_any_other_for_no_round() -> None:
    bench = Bench().running("a", "b")
    bench.slaves[0].hold.add(m.Measure)
    request = m.BeginPullRequest(bench.caller("b"), at_least=Version(1, 1))
    bench.push("a")
    bench.advance(2.0)
    assert bench.status().phase == "MEASURE"
    assert isinstance(bench.ask(request).answer, m.Busy)
    bench.join("c")
    assert bench.pull("c").version == Version(1, 0)
    bench.slaves[0].release(m.Measure)
    for at_least in (Version(1, 1), Version(1, 0), None):
        grant = bench.ask(m.BeginPullRequest(bench.caller("b"), at_least=at_least)).answer
        assert isinstance(grant, m.PullGrant)
        assert (grant.version, grant.layout) == (Version(1, 1), None)


def test_reader_gets_the_layout_and_an_exact_version_or_a_refusal(bench: Bench) -> None:
    bench.rounds(1, "a")
    bench.push("a")
    exact = m.BeginPullRequest(reader(), True, Version(1, 1), True)
    grant = bench.ask(exact).answer
    assert grant.version == Version(1, 1), "the version before the newest is still kept"
    assert grant.layout is not None
    with refused_with(RefusalCode.VERSION_GONE, "1:1, 1:2"):
        bench.ask(m.BeginPullRequest(reader(), True, Version(1, 0), True))


KEY = b"k" * 32


def renewed(bench: Bench, grant: m.PullGrant, name: str = "x", key: bytes = b"") -> Any:
    """The answer to a reader that has a pin, and to which bytes still arrive."""
    return bench.ask(m.BeginPullRequest(reader(name), True, grant.version, True, key, pin_id=grant.pin_id)).answer


def readers_keys(bench: Bench) -> list[bytes]:
    return [allowed.curve_key for allowed in bench.state.shared.allowed.keys() if allowed.role is m.KeyRole.READER]


def test_a_reader_that_renews_its_pin_keeps_it_and_its_key_and_a_silent_one_loses_both() -> None:
    bench = Bench(encrypted=True, ticket_ttl_s=10.0).running("a")
    grant = bench.ask(m.BeginPullRequest(reader("x"), True, curve_key=KEY)).answer
    assert grant.pin_s == 10.0
    lists = sum(isinstance(command, m.Allow) for command in bench.slaves[0].commands)
    for _ in range(3):
        bench.rounds(1, "a", wait_s=1.5)
        bench.advance(6.0)
        assert renewed(bench, grant, key=KEY).pin_id == grant.pin_id
    assert grant.version in bench.state.shared.kept, "although three versions were published meanwhile"
    assert readers_keys(bench) == [KEY]
    assert sum(isinstance(command, m.Allow) for command in bench.slaves[0].commands) == lists, "it is the same one"
    assert [line["by"] for line in bench.recorded("pull")].count("reader x") == 1, "it is one pull"
    assert bench.state.shared.schedule.n_under_way == 1
    bench.advance(9.0)
    assert set(bench.state.shared.pins) == {grant.pin_id}
    bench.advance(2.0)
    assert not bench.state.shared.pins
    assert not readers_keys(bench)


def test_a_pin_is_renewed_also_while_no_pull_could_begin() -> None:
    bench = Bench(ticket_ttl_s=10.0).running("a")
    grant = bench.ask(m.BeginPullRequest(reader("x"), True)).answer
    bench.slaves[1].die()
    bench.advance(6.0)
    assert isinstance(renewed(bench, grant), m.Busy), "a slave is away"
    bench.advance(6.0)
    assert set(bench.state.shared.pins) == {grant.pin_id}


def test_a_pin_that_is_gone_or_is_another_reader_s_is_not_renewed() -> None:
    bench = Bench(ticket_ttl_s=10.0).running("a")
    first = bench.ask(m.BeginPullRequest(reader("x"), True)).answer
    bench.advance(6.0)
    other = renewed(bench, first, "y")
    assert other.pin_id != first.pin_id
    bench.advance(6.0)
    assert set(bench.state.shared.pins) == {other.pin_id}
    again = renewed(bench, first)
    assert again.version == first.version
    assert set(bench.state.shared.pins) == {other.pin_id, again.pin_id}, "a new one, while the version is kept"


def test_readers_that_never_finish_leave_nothing_behind() -> None:
    """A reader's name is its own choice: what the schedule knows of its pull goes with the pin."""
    bench = Bench(ticket_ttl_s=10.0).running("a")
    before = bench.state.shared.schedule.n_under_way
    for n in range(5):
        assert isinstance(bench.ask(m.BeginPullRequest(reader(f"r{n}"), True)).answer, m.PullGrant)
        assert bench.state.shared.schedule.n_under_way == before + 1
        bench.advance(11.0)
    assert bench.state.shared.schedule.n_under_way == before


def test_number_of_pulls_is_bounded_and_readers_take_none_away_from_a_cluster() -> None:
    bench = Bench(max_clusters=1).running("a")
    for n in range(MAX_READERS):
        assert isinstance(bench.ask(m.BeginPullRequest(reader(f"r{n}"), True)).answer, m.PullGrant)
    assert isinstance(bench.ask(m.BeginPullRequest(reader("r9"), True)).answer, m.Busy)
    assert isinstance(bench.ask(m.BeginPullRequest(reader("r1"), True)).answer, m.PullGrant), "instead of its own"
    assert bench.pull("a").version == Version(1, 0)


def test_nobody_finishes_another_one_s_pull() -> None:
    bench = Bench().running("a", "b")
    grant = bench.ask(m.BeginPullRequest(bench.caller("a"))).answer
    bench.ask(m.FinishPullRequest(bench.caller("b"), grant.pin_id))
    bench.ask(m.FinishPullRequest(reader(), grant.pin_id, True))
    assert set(bench.state.shared.pins) == {grant.pin_id}


def test_slow_pull_of_a_live_cluster_keeps_its_pin_until_it_ends() -> None:
    bench = Bench(ticket_ttl_s=10.0).running("a", "b")
    grant = bench.ask(m.BeginPullRequest(bench.caller("b"))).answer
    bench.advance(60.0)
    assert set(bench.state.shared.pins) == {grant.pin_id}
    bench.begin_push("b")
    assert not bench.state.shared.pins, "who pushes reads no longer"
    bench.ask(m.BeginPullRequest(bench.caller("a")))
    bench.silent.add("a")
    bench.advance(11.0)
    assert not bench.state.shared.pins


def test_pull_waits_for_the_version_that_a_restarted_slave_holds_already() -> None:
    bench = Bench().running("a", "b")
    bench.all_hold(m.Commit)
    bench.push("a")
    bench.advance(1.5)
    bench.slaves[0].die()
    bench.slaves[0].attach()
    assert bench.status().published == Version(1, 0)
    answer = bench.ask(m.BeginPullRequest(bench.caller("b"))).answer
    assert isinstance(answer, m.Busy)
    assert "1:1" in answer.sentence
    bench.slaves[1].release(m.Commit)
    assert bench.pull("b").version == Version(1, 1)


@pytest.mark.parametrize("finished", [1, 999])
def test_finish_pull_of_any_pin_answers_with_the_steps_to_make(bench: Bench, finished: int) -> None:
    assert bench.ask(m.FinishPullRequest(bench.caller("a"), finished)).local_steps == 64


def rounding(pull_wire: str = "int8", **config: Any) -> Bench:
    """A run of two clusters whose versions are rounded, on slaves that serve differences."""
    bench = Bench(settings=m.Settings(pull_wire=pull_wire), **config)
    for slave in bench.slaves:
        slave.hello = m.Hello(1, 1, tuple(sorted(CAPABILITIES)))
    return bench.running("a", "b")


def granted(bench: Bench, name: str, base: Version | None) -> m.PullGrant:
    answer = bench.ask(m.BeginPullRequest(bench.caller(name), base=base)).answer
    assert isinstance(answer, m.PullGrant)
    return answer


@pytest.mark.parametrize(("pull_wire", "base", "wire"), [
    ("float32", Version(1, 2), Codec.F32), ("int8", Version(1, 2), Codec.INT8), ("int8", Version(1, 1), Codec.INT8),
    ("int8", Version(1, 0), Codec.F32), ("int8", Version(1, 3), Codec.F32), ("int8", Version(1, 9), Codec.F32),
    ("int8", Version(2, 2), Codec.F32), ("int8", None, Codec.F32), ("bfloat16", Version(1, 2), Codec.BF16),
    ("bfloat16", Version(1, 1), Codec.F32), ("int4", Version(1, 1), Codec.INT4),
])  # fmt: skip
def test_who_is_a_little_behind_gets_differences(pull_wire: str, base: Version | None, wire: Codec) -> None:
    bench = rounding(pull_wire)
    bench.rounds(3, "a", wait_s=1.5)
    grant = granted(bench, "b", base)
    assert (grant.wire, grant.base) == (wire, None if wire is Codec.F32 else base)


def test_a_slave_of_an_older_release_makes_it_parameters() -> None:
    bench = Bench(settings=m.Settings(pull_wire="int8"))
    bench.slaves[0].hello = m.Hello(1, 1, tuple(sorted(CAPABILITIES)))
    bench.running("a", "b")
    bench.rounds(1, "a", wait_s=1.5)
    assert granted(bench, "b", Version(1, 0)).wire is Codec.F32


@pytest.mark.parametrize("behind", [1, 2])
def test_the_rate_of_a_link_counts_the_differences_that_were_granted(behind: int) -> None:
    """And not the float32 parameters that they stand for."""
    rates = []
    for base in (Version(1, 3 - behind), None):
        bench = rounding("int4")
        bench.rounds(3, "a", wait_s=1.5)
        grant = granted(bench, "b", base)
        bench.advance(2.0)
        bench.ask(m.FinishPullRequest(bench.caller("b"), grant.pin_id))
        links = [link for link in bench.look().links if link.cluster == "b"]
        rates.append(sum(link.pull_bytes_per_s or 0.0 for link in links))
    held = LAYOUT.n_elems // 2  # of each slave
    share = behind * encoded_bytes(Codec.INT4, held) / encoded_bytes(Codec.F32, held)
    assert rates[0] == pytest.approx(share * rates[1])


def test_averaged_buffers_are_refused_where_versions_are_rounded() -> None:
    buffers = (*LAYOUT.parameters, Parameter("mean", (8,), "float32", AVERAGED_LAYER, averaged=True))
    bench = Bench(settings=m.Settings(pull_wire="int8")).attach_all()
    layout = Layout(buffers)
    with refused_with(RefusalCode.CONFIG):
        bench.join("a", layout=layout, layout_hash=layout.layout_hash)
