"""How long decisions wait for a standby."""

from __future__ import annotations

import pytest

from dips.core.errors import Refused
from dips.master.state.replication import Replication


def in_step(wanted: bool = True) -> Replication:
    standby = Replication(5, wanted=wanted, limit_s=8.0)
    standby.follows(5)
    assert standby.trouble == ""
    return standby


def test_a_decision_waits_until_it_is_acknowledged() -> None:
    standby = in_step()
    until_s = standby.wrote(6, 100.0)
    assert standby.left_s(6, until_s, 101.0) == 7.0
    standby.heard(5)
    assert standby.left_s(6, until_s, 104.0) == 4.0
    standby.heard(6)
    assert standby.left_s(6, until_s, 104.0) == 0.0


def test_each_time_out_in_a_row_halves_the_wait_and_none_waits_before_the_standby_has_all_again() -> None:
    standby = in_step()
    for number, limit_s in ((6, 8.0), (7, 4.0), (8, 2.0)):
        until_s = standby.wrote(number, 0.0)
        assert standby.left_s(number, until_s, 0.0) == limit_s
        assert standby.left_s(number, until_s, limit_s) == 0.0
        assert standby.trouble == "the standby has not all decisions yet: the newest are in this master's journal alone"
        assert standby.left_s(number, until_s, 0.0) == 0.0
        standby.sent(number, is_whole=True)
        standby.heard(number - 1)
        assert standby.trouble
        standby.heard(number)
        assert not standby.trouble
    until_s = standby.wrote(9, 0.0)
    standby.heard(9)
    assert standby.left_s(9, until_s, 0.0) == 0.0
    assert standby.left_s(10, standby.wrote(10, 0.0), 0.0) == 8.0


def test_nothing_waits_for_a_standby_that_is_away_or_only_follows() -> None:
    standby = in_step()
    standby.lost()
    assert standby.trouble == "no standby follows: decisions are in this master's journal alone"
    assert standby.left_s(6, standby.wrote(6, 0.0), 0.0) == 0.0
    standby.follows(4)
    standby.sent(6, is_whole=False)
    standby.heard(5)
    assert standby.trouble, "it lacks what was written while it was away"
    standby.heard(6)
    assert not standby.trouble
    only_follows = in_step(wanted=False)
    assert only_follows.left_s(6, only_follows.wrote(6, 0.0), 0.0) == 0.0


def test_a_record_that_was_not_written_cannot_be_acknowledged() -> None:
    standby = in_step()
    with pytest.raises(Refused):
        standby.heard(6)
    standby.sent(6, is_whole=True)
    standby.heard(6)
