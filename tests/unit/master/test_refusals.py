"""Refusals on the tape and in the log: few lines however many come, and every one counted."""

from __future__ import annotations

from dips.master.shell import EVERY_S, LOG_LINES, LOG_LINES_PER_S, MAX_CHARACTERS, Refusals
from dips.master.state.tape import RequestRefused


def refusal(method: str = "Join", code: str = "MALFORMED", sentence: str = "no") -> RequestRefused:
    return RequestRefused("-", method=method, code=code, sentence=sentence)


def test_the_first_of_a_kind_is_written_at_once_and_the_next_ones_together() -> None:
    refusals = Refusals()
    first = refusals.note(refusal(), 10.0)
    assert first is not None
    assert "count" not in first.fields
    assert all(refusals.note(refusal(sentence=f"no {n}"), 10.0 + n / 1000) is None for n in range(500))
    assert refusals.due(10.0 + EVERY_S / 2) == []
    (line,) = refusals.due(10.0 + EVERY_S)
    assert line.fields["count"] == 500
    assert line.fields["sentence"] == "no 499"
    assert refusals.due(100.0) == []


def test_no_refusal_is_lost_from_the_count() -> None:
    refusals, written = Refusals(), 0
    for n in range(10_000):
        line = refusals.note(refusal(method=f"m{n % 7}", code=f"c{n % 3}"), n * 0.01)
        written += 0 if line is None else int(str(line.fields.get("count", 1)))
    left = refusals.due(100.0, everything=True)
    assert written + sum(int(str(line.fields["count"])) for line in left) == 10_000
    assert refusals.due(200.0, everything=True) == []


def test_other_methods_and_codes_are_kinds_of_their_own_and_what_a_peer_sent_is_quoted_in_part() -> None:
    refusals = Refusals()
    kinds = [("Join", "MALFORMED"), ("Join", "BUSY"), ("Leave", "BUSY")]
    assert all(refusals.note(refusal(*kind), 1.0) is not None for kind in kinds)
    line = Refusals().note(refusal(sentence="x" * 10**7), 0.0)
    assert line is not None
    assert len(str(line.fields["sentence"])) == MAX_CHARACTERS


def test_the_log_takes_a_few_lines_and_says_how_many_it_left_out() -> None:
    refusals = Refusals()
    assert [refusals.may_log(5.0) for _ in range(LOG_LINES)] == [""] * LOG_LINES
    assert [refusals.may_log(5.0) for _ in range(100)] == [None] * 100
    assert refusals.may_log(5.0 + 1 / LOG_LINES_PER_S) == " (100 more before it were not logged)"
    assert refusals.may_log(5.0 + 1 / LOG_LINES_PER_S) is None
