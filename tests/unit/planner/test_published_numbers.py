"""What `dips plan validate` computes of each paper, where that takes seconds: as docs/papers/ shows it, to the last
digit there. tests/slow/unit/test_validation.py has all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace

import pytest
from support.papers import not_on_the_page

from dips.core.errors import ConfigError
from dips.planner.commands.plan import all_checks
from dips.planner.scaleacross.topology import read_topology
from dips.planner.validation import PaperCheck, holds, ordering, within
from dips.planner.validation.scaleacross import large_scale
from dips.planner.validation.spantrain import (
    Setting,
    figure_5,
    figure_6,
    figure_7,
    regions,
    section_4,
    section_4_4,
    under_traces,
)


def first(paper: str, count: int) -> Callable[[], Iterator[PaperCheck]]:
    return lambda: islice(all_checks(paper), count)


@pytest.mark.parametrize(
    ("paper", "made", "count"),
    [
        ("crosspipe", first("crosspipe", 999), 95),
        ("jeeves", first("jeeves", 16), 16),
        ("scaleacross", first("scaleacross", 71), 71),
        ("scaleacross", lambda: large_scale(read_topology("scaleacross-100k-dense"), False), 4),
        ("scaleacross", lambda: large_scale(read_topology("scaleacross-100k-dense"), True), 4),
        ("spantrain", figure_5, 7),
        ("spantrain", regions, 10),
        ("spantrain", figure_6, 6),
        ("spantrain", figure_7, 2),
        ("spantrain", section_4, 17),
        ("spantrain", section_4_4, 8),
    ],
)
def test_numbers_are_those_of_the_page(paper: str, made: Callable[[], Iterator[PaperCheck]], count: int) -> None:
    found = list(made())
    assert list(not_on_the_page(paper, found)) == []
    assert len(found) == count
    assert not any(check.missed for check in found)


def test_what_is_said_of_the_adapter_under_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of two traces, late in one: faster but for the last, slow setting, by 1 % for each ms of overhead. The
    cost is 3 % where messages are late, else 2 %."""
    found: list[tuple[Setting, str]] = []

    def compared(setting: Setting, trace: str) -> SimpleNamespace:
        late, worst = trace == "b", setting.operation_ms == 25 and setting.transfers_ms == (150.0,) * 3
        found.append((setting, trace))
        return SimpleNamespace(
            late=late, slower_ns=0 if not late else 5 if worst else -5, cost_ns=30 if late else 20,
            speedup=1 + setting.operation_ms / 100 + setting.transfers_ms[0] / 1000,
            without=SimpleNamespace(span_ns=1000), adapted=SimpleNamespace(changes=harm if not late else 1),
        )  # fmt: skip

    monkeypatch.setattr(Setting, "compared", compared)
    monkeypatch.setattr("dips.planner.validation.spantrain.shipped", lambda folder: ["a", "b"])
    harm = 0
    rows = list(under_traces())
    assert len(set(found)) == 24
    assert [row.ours for row in rows[:6]] == [1, 1, 1, 4, 0.02, 0.03]
    faster = [(row.ours, row.what) for row in rows[6:] if "pieces" not in row.what]
    assert [ours for ours, _ in faster] == pytest.approx([1.03, 1.16, 1.03, 1.16, 1.27, 1.40, 1.27, 1.40])
    fixed = [row.ours for row in rows if "pieces of 8 always" in row.what]
    assert fixed[0] > 1 > fixed[2], "with 25 ms for each operation smaller pieces cost more than they save"
    assert not [row.what for row in rows if row.missed]
    harm = 1
    assert [number for number, row in enumerate(under_traces()) if row.missed] == [2]


def test_a_miss_is_a_miss() -> None:
    assert not within("a", "b", 100.0, 115.9, 0.16).missed
    assert within("a", "b", 100.0, 116.1, 0.16).missed
    assert within("a", "b", 100.0, 83.9, 0.16).missed
    assert holds("a", "b", False).missed
    assert not holds("a", "b", True).missed
    assert not PaperCheck("a", "b", 3.0, 2.0, 1.0).missed
    assert PaperCheck("a", "b", 3.0, 2.0).error == pytest.approx(-1 / 3)
    check = PaperCheck("a", "b", 0.367, 0.303, 0.29, 0.37, percent=True)
    assert check.cells() == ("b", "36.7%", "30.3%", "-6.4 points", "29.0% to 37.0%", "ok")
    assert PaperCheck("a", "b", None, 0.1, percent=True).cells() == ("b", "", "10.0%", "", "", "")
    other_way = ordering("a", "b", False)
    assert (other_way.what, other_way.ours, other_way.missed) == ("b: DOES NOT HOLD", 0.0, False)
    with pytest.raises(ConfigError, match="'dapple' is unknown"):
        next(all_checks("dapple"))
