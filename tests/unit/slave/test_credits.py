"""How many requests each sender may have unanswered: which goes first, which is held back, and that none starves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.slave.state import admission

MOST = 64
MIB = 1 << 20


def credits_of(**remaining_mib: float) -> admission.Credits[str]:
    pace = admission.Credits[str](MOST)
    for key, mib in remaining_mib.items():
        pace.note_open(key, mib * MIB, 0.0)
    return pace


def held(pace: admission.Credits[str], keys: str, now_s: float) -> str:
    return "".join(key for key in keys if pace.credit(key, now_s) == admission.HELD)


def run(
    pace: admission.Credits[str], keys: str, rates_mib: Callable[[Mapping[str, bool]], Mapping[str, float]],
    seconds: float, from_s: float = 0.0,
) -> float:  # fmt: skip
    """Let the streams land for so long; rates (MiB/s) follow from who is held back. Returns the time then."""
    step_s, now_s = 0.01, from_s
    for step in range(1, round(seconds / step_s) + 1):
        now_s = from_s + step * step_s
        rates = rates_mib({key: pace.credit(key, now_s) == admission.HELD for key in keys})
        for key, mib_per_s in rates.items():
            if mib_per_s:
                pace.note_landed(key, round(mib_per_s * MIB * step_s), now_s)
    return now_s


def own_links(**mib_per_s: float) -> Callable[[Mapping[str, bool]], Mapping[str, float]]:
    """Senders' links are the narrow place, with a long way: who is held back sends an eighth."""
    return lambda is_held: {key: rate / 8 if is_held[key] else rate for key, rate in mib_per_s.items()}


def one_link(mib_per_s: float) -> Callable[[Mapping[str, bool]], Mapping[str, float]]:
    """The slave's link is the narrow place, shared by how much each has in flight."""

    def rates(is_held: Mapping[str, bool]) -> Mapping[str, float]:
        parts = {key: admission.HELD if held_back else 16 for key, held_back in is_held.items()}
        return {key: mib_per_s * part / sum(parts.values()) for key, part in parts.items()}

    return rates


def test_the_streams_that_need_least_go_first() -> None:
    pace = credits_of(a=900, b=100, c=300, d=200)
    assert admission.FIRST_STREAMS == 2
    assert held(pace, "abcd", 0.0) == "ac"


def test_where_senders_links_are_the_narrow_place_all_run_at_full_rate() -> None:
    pace = credits_of(a=9e3, b=9e3, c=9e3, d=9e3)
    now_s = run(pace, "abcd", own_links(a=25, b=25, c=25, d=25), 4.0)
    assert pace._cap.streams == 4
    assert held(pace, "abcd", now_s) == ""


def test_where_the_slaves_own_link_is_the_narrow_place_one_goes_first() -> None:
    pace = credits_of(a=9e3, b=8e3, c=7e3)
    now_s = run(pace, "abc", one_link(100), 4.0)
    assert pace._cap.streams == 1
    assert held(pace, "abc", now_s) == "ab"


def test_when_the_first_is_done_the_next_is_let_go() -> None:
    pace = credits_of(a=9e3, b=8e3, c=7e3)
    now_s = run(pace, "abc", one_link(100), 4.0)
    pace.note_closed("c", now_s)
    assert pace.credit("b", now_s) == MOST


def test_a_stream_that_is_slow_by_itself_takes_no_place() -> None:
    """Nearly done as it is, the slow one would be first; the two fast ones run at full rate all the same."""
    pace = credits_of(slow=1, a=9e3, b=9e3)
    now_s = run(pace, ("slow", "a", "b"), own_links(slow=2, a=50, b=50), 4.0)  # type: ignore[arg-type]
    assert [pace.credit(key, now_s) for key in ("slow", "a", "b")] == [MOST] * 3
    assert pace._cap.streams == 2


def test_a_stream_that_slows_down_makes_room() -> None:
    """One place for full rate, held by the one that needs least; once its link slows down, the next one gets it."""
    pace = credits_of(a=9e3, b=8e3)
    now_s = run(pace, "ab", one_link(100), 4.0)
    assert held(pace, "ab", now_s) == "a"

    def slowed(is_held: Mapping[str, bool]) -> Mapping[str, float]:
        return {"b": 3.0, "a": 12.0 if is_held["a"] else 97.0}

    now_s = run(pace, "ab", slowed, 3.0, now_s)
    assert held(pace, "ab", now_s) == ""


def test_unknown_streams_are_served_in_the_order_of_their_coming_and_forgotten() -> None:
    pace = admission.Credits[str](MOST)
    for key in "abcd":
        pace.note_landed(key, MIB, 0.0)
    assert held(pace, "abcd", 0.0) == "cd"
    pace.note_landed("e", MIB, admission.IDLE_S + 1.0)
    pace.note_landed("e", MIB, admission.IDLE_S + 1.0 + admission.INTERVAL_S)
    assert pace.credit("d", admission.IDLE_S + 2.0) == MOST


def test_a_push_that_is_never_closed_is_forgotten_in_the_end() -> None:
    """Its slot was given to another one. Two later ones run at full rate, and it takes no room in the table."""
    pace = credits_of(lost=1, a=9e3, b=9e3)
    run(pace, "ab", own_links(a=50, b=50), 1.0, admission.OPENED_IDLE_S)
    assert len(pace._streams) == 2


def test_no_more_streams_are_told_apart_than_there_is_room_for() -> None:
    pace = admission.Credits[int](MOST)
    for key in range(admission.MAX_STREAMS + 10):
        pace.note_landed(key, MIB, 0.0)
    assert pace.credit(admission.MAX_STREAMS + 5, 0.0) == admission.HELD
    pace.note_closed(3, 0.0)
    pace.note_closed(3, 0.0)
    assert pace.credit(admission.MAX_STREAMS + 5, 0.0) == MOST


def test_a_small_window_is_never_exceeded() -> None:
    pace = admission.Credits[str](1)
    for key in "abcd":
        pace.note_open(key, 100 * MIB, 0.0)
    assert [pace.credit(key, 0.0) for key in "abcd"] == [1] * 4


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["open", "land", "close", "wait"])), max_size=200))
def test_whatever_happens_everybody_has_some_credit_and_somebody_all(steps: list[tuple[str, str]]) -> None:
    pace, now_s = admission.Credits[str](MOST), 0.0
    for (key, step), n in zip(steps, itertools.count(1), strict=False):
        if step == "open":
            pace.note_open(key, n * MIB, now_s)
        elif step == "land":
            pace.note_landed(key, 3 * MIB, now_s)
        elif step == "close":
            pace.note_closed(key, now_s)
        else:
            now_s += 0.3 * (n % 7)
        found = [pace.credit(k, now_s) for k in "abcde"]
        assert set(found) <= {admission.HELD, MOST}
        assert MOST in found


def found_streams(
    total: Callable[[int], float], n_streams: int, intervals: int = 2 * admission.REST_INTERVALS
) -> list[int]:
    cap = admission.StreamCap()
    seen = []
    for _ in range(intervals):
        seen.append(cap.streams)
        cap.measured(total(cap.streams), n_streams)
    return seen


@pytest.mark.parametrize("n_streams", [2, 3, 4, 8])
def test_the_smallest_number_that_fills_the_link_is_found(n_streams: int) -> None:
    """A stream sends 30, a held one 2, the link takes 100."""
    seen = found_streams(lambda full: min(100.0, 30.0 * full + 2.0 * (n_streams - full)), n_streams)
    assert seen[12] == {2: 2, 3: 3, 4: 4, 8: 3}[n_streams]


def test_where_more_streams_are_in_each_others_way_fewer_are_found() -> None:
    assert found_streams(lambda full: 100.0 - 10 * full, 8)[12] == 1


def test_it_looks_again_after_a_rest() -> None:
    """The link grows later: after the rest it is seen."""
    cap = admission.StreamCap()
    for _ in range(12):
        cap.measured(100.0, 6)
    assert cap.streams == 1
    for _ in range(3 * admission.REST_INTERVALS):
        cap.measured(30.0 * cap.streams, 6)
    assert cap.streams == 6
