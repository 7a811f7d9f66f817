"""Names and records as roles write them, in the form in which they are compared."""

from __future__ import annotations

import pytest

from dips.core.ids import ClusterId, Incarnation, PushId, RoundId, Version
from dips.judge.facts import hex_of, pair, push_of, say_push, say_round, say_version
from dips.master.state.ledger import pair as listed
from dips.master.state.ledger import push_to_json

PUSH = PushId(ClusterId("eu/west-1"), Incarnation(3, 12), 7)


@pytest.mark.parametrize("item", [Version(2, 17), RoundId(2, 17), Incarnation(2, 17)])
def test_pairs_are_read_from_texts_and_lists(item: Version | RoundId | Incarnation) -> None:
    assert pair(str(item)) == pair(listed(item)) == (2, 17)


def test_names_pushes_and_digests_are_read_from_both_forms() -> None:
    assert pair(None) is pair("None") is None
    assert push_of(str(PUSH)) == push_of(push_to_json(PUSH)) == ("eu/west-1", 3, 12, 7)
    assert say_push(push_of(str(PUSH))) == str(PUSH)
    assert say_version((2, 17)) == str(Version(2, 17))
    assert say_round((2, 17)) == str(RoundId(2, 17))
    assert say_version(None) == say_round(None) == "none"
    assert hex_of(b"\x01\xff") == hex_of("01ff") == "01ff"
