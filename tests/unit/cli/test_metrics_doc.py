"""The page of metrics is that of the roles' lists, and the lists keep to Prometheus' rules for names."""

from __future__ import annotations

import re

import pytest
from support.repository import ROOT

from dips.cli.docs import ROLES, metrics
from dips.core.observe.metrics import Spec

PAGE = ROOT / "docs" / "metrics.md"

LABELS = {
    "attempt", "by", "cluster", "code", "direction", "how", "kind", "method", "part", "phase", "rank", "reason",
    "result", "run", "slave", "state", "use", "verdict", "version", "what",
}  # fmt: skip
"""Each with a bound: names of the run's clusters and slaves, the ranks of one cluster, the run and release themselves,
and fixed words.
"""

ALL = [(prefix + spec.name, spec) for _, prefix, specs in ROLES for spec in specs]


def test_the_page_is_current_and_so_pins_the_lists() -> None:
    assert PAGE.read_text() == metrics(), "run `make docs`"


def test_the_page_has_a_row_for_every_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `(dips_\w+)` \| (\w+) \|", PAGE.read_text(), re.M)
    assert rows == [(prefix + spec.name, spec.kind) for _, prefix, specs in ROLES for spec in specs]


@pytest.mark.parametrize("specs", [specs for _, _, specs in ROLES], ids=[title for title, _, _ in ROLES])
def test_no_name_stands_twice(specs: tuple[Spec, ...]) -> None:
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)


def test_names_say_their_kind_and_unit() -> None:
    ending = {"s": "_seconds", "bytes": "_bytes", "bytes/s": "_bytes_per_second", "tokens/s": "tokens_per_second"}
    for name, spec in ALL:
        base = name.removesuffix("_total")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (spec.kind == "counter"), name
        assert base.endswith(ending.get(spec.unit, "")), name
        assert spec.kind != "histogram" or spec.unit == "s", name
        assert spec.unit == "s" or not base.endswith("_seconds"), name
        assert spec.unit == "bytes" or not base.endswith("_bytes"), name


def test_all_have_a_meaning_a_normal_range_and_bounded_labels() -> None:
    for name, spec in ALL:
        assert spec.meaning, name
        assert spec.normal, name
        assert "|" not in spec.meaning + spec.normal + spec.when, name
        assert set(spec.labels) <= LABELS, name
        assert len(spec.labels) <= 3, name
