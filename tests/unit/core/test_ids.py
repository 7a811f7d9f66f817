"""Names and their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core.errors import ConfigError
from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version, check_name, parse_version


@pytest.mark.parametrize("name", ["a", "a-1", "eu.west_2", "0", "x" * 63])
def test_a_name_that_fits_a_path_and_a_label_is_taken(name: str) -> None:
    assert check_name(name, "cluster id") == name


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "a-", ".", "..", "a/b", "../x", "a b", "a\n", "ä", "x" * 64, "a\x00b", "%s"]
)
def test_any_other_name_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster id .* is not a name: use 1 to 63 of a-z"):
        check_name(name, "cluster id")


def test_text_forms() -> None:
    push = PushId(ClusterId("a"), Incarnation(2, 5), 7)
    assert (str(Incarnation(2, 5)), str(Version(3, 17)), str(RoundId(1, 4))) == ("2.5", "3:17", "r1.4")
    assert str(push) == "a/2.5#7"


def test_order_is_by_time_and_the_next_version_stays_on_its_timeline() -> None:
    assert Version(1, 9) < Version(2, 0) < Version(2, 1)
    assert Incarnation(1, 9) < Incarnation(2, 0)
    assert RoundId(1, 2) < RoundId(1, 10) < RoundId(2, 0)
    assert Version(3, 17).next() == Version(3, 18)


@given(timeline=st.integers(0, 2**64), v=st.integers(0, 2**64))
def test_a_version_can_be_read_back(timeline: int, v: int) -> None:
    assert parse_version(str(Version(timeline, v))) == Version(timeline, v)


@pytest.mark.parametrize("text", ["", "3", ":", "3:", ":3", "a:b", "-1:2", "1:2:3", " 1:2", "1.5:2"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write TIMELINE:NUMBER"):
        parse_version(text)
