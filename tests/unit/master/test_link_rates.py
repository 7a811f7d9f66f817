"""Rates of links: measured over whole transfers. Those of a run: test_page_snapshot.py."""

from __future__ import annotations

import pytest
from support.master_bench import LAYOUT

from dips.core.ids import SlaveId
from dips.core.placement import Placement
from dips.core.wire import Codec, encoded_bytes
from dips.master.state.schedule import LinkRates

PLACEMENT = Placement((SlaveId("s0"), SlaveId("s1")), (0, 1, 0, 0))
ELEMS = 16
"""Of each of LAYOUT's four blocks."""


def test_a_push_and_a_pull_count_the_blocks_of_a_slave() -> None:
    rates = LinkRates()
    part = rates.part_bytes("s0", LAYOUT, PLACEMENT, Codec.F32)
    assert part == 3 * ELEMS * 4
    rates.staged("a", "s0", part, 2.0, 10.0)
    first, second = rates.links(["a"], LAYOUT, PLACEMENT, 13.0)
    assert (first.slave, first.push_bytes_per_s, first.push_age_s) == ("s0", part / 2.0, 3.0)
    assert (second.slave, second.push_bytes_per_s, second.pull_bytes_per_s) == ("s1", None, None)
    rates = LinkRates()
    rates.pull_ended("a", 1.0)  # it is not known since when
    rates.pull_began("a", Codec.F32, 1, 1.0)
    rates.pull_ended("a", 5.0)
    links = rates.links(["a"], LAYOUT, PLACEMENT, 5.0)
    assert [link.pull_bytes_per_s for link in links] == [3 * ELEMS * 4 / 4.0, ELEMS * 4 / 4.0]
    assert [link.pull_age_s for link in links] == [0.0, 0.0]
    rates = LinkRates()
    assert rates.part_bytes("s0", LAYOUT, PLACEMENT, Codec.BF16) == 3 * ELEMS * 2
    rates.pull_began("a", Codec.INT8, 2, 1.0)
    rates.pull_ended("a", 5.0)
    links = rates.links(["a"], LAYOUT, PLACEMENT, 5.0)
    sent = [2 * encoded_bytes(Codec.INT8, 3 * ELEMS), 2 * encoded_bytes(Codec.INT8, ELEMS)]
    assert [link.pull_bytes_per_s for link in links] == [n_bytes / 4.0 for n_bytes in sent]


def test_who_is_gone_has_no_links_and_its_next_life_none_yet() -> None:
    rates = LinkRates()
    rates.staged("a", "s0", 100, 1.0, 1.0)
    rates.pull_began("a", Codec.F32, 1, 1.0)
    rates.gone("a")
    rates.pull_ended("a", 2.0)
    assert {(link.push_bytes_per_s, link.pull_bytes_per_s) for link in rates.links(["a"], LAYOUT, PLACEMENT, 2.0)} == {
        (None, None)
    }


@pytest.mark.parametrize(("layout", "placement"), [(None, PLACEMENT), (LAYOUT, None)])
def test_before_the_model_is_placed_there_are_no_links(layout: object, placement: object) -> None:
    assert LinkRates().links(["a"], layout, placement, 0.0) == ()  # type: ignore[arg-type]
