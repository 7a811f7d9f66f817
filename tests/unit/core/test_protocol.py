"""Two peers speak what both know, or nothing."""

from __future__ import annotations

import pytest

from dips.core.errors import RefusalCode, Refused
from dips.core.protocol import CAPABILITIES, PROTOCOL_MIN, PROTOCOL_VERSION, agree


def test_the_newest_common_version_and_common_capabilities_are_taken() -> None:
    assert agree(PROTOCOL_MIN, PROTOCOL_VERSION, CAPABILITIES, "slave s-0").version == PROTOCOL_VERSION
    assert agree(PROTOCOL_MIN, PROTOCOL_VERSION + 5, CAPABILITIES, "slave s-0").version == PROTOCOL_VERSION
    offered = {"resume-chunks", "telepathy"}
    assert agree(PROTOCOL_MIN, PROTOCOL_VERSION, offered, "x").capabilities == {"resume-chunks"}
    assert agree(PROTOCOL_MIN, PROTOCOL_VERSION, (), "x").capabilities == frozenset()


@pytest.mark.parametrize(
    ("oldest", "newest"), [(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 3), (0, PROTOCOL_MIN - 1), (5, 2)]
)
def test_no_common_version_is_refused_with_both_ranges(oldest: int, newest: int) -> None:
    with pytest.raises(Refused, match=f"cluster a speaks protocol versions {oldest} to {newest}") as caught:
        agree(oldest, newest, CAPABILITIES, "cluster a")
    assert caught.value.code is RefusalCode.PROTOCOL_VERSION
    assert "install the same release of dips on both" in caught.value.sentence
