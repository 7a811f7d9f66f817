"""Families of metrics hold what a role lists and nothing else; counters have bounds and never fall."""

from __future__ import annotations

import math

import pytest
from prometheus_client.core import Metric

from dips.core.errors import LocalProtocolError
from dips.core.observe.metrics import Families, Instruments, Recent, Spec

SPECS = (
    Spec("level", "gauge", "a level", "any"),
    Spec("things_total", "counter", "things", "rises", ("kind",)),
    Spec("work_seconds", "histogram", "work", "short", ("kind",), "s"),
    Spec("state", "gauge", "a state", "any", ("name", "state")),
)


def families_of(counted: Instruments | None = None) -> Families:
    return Families("x_", {spec.name: spec for spec in SPECS}, counted.collect() if counted else {})


def made(families: Families) -> dict[str, Metric]:
    return {family.name: family for family in families}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_every_listed_family_is_there_with_its_type_and_meaning_also_without_a_value() -> None:
    families = made(families_of())
    assert list(families) == ["x_level", "x_things", "x_work_seconds", "x_state"]
    assert [family.type for family in families.values()] == ["gauge", "counter", "histogram", "gauge"]
    assert families["x_level"].documentation == "a level"
    assert not any(family.samples for family in families.values())


def test_what_is_not_known_has_no_sample_and_of_several_states_one_holds() -> None:
    families = families_of()
    families.set("level", None)
    families.set("level", math.nan)
    assert not made(families)["x_level"].samples
    families.set("level", 0)
    assert values(made(families)["x_level"]) == {(): 0.0}
    families = families_of()
    families.one_of("state", "on", ("on", "off"), "lamp")
    assert values(made(families)["x_state"]) == {("lamp", "on"): 1.0, ("lamp", "off"): 0.0}


@pytest.mark.parametrize(("name", "labels"), [("unheard_of", ()), ("level", ("label",)), ("things_total", ())])
def test_what_is_not_on_the_list_cannot_be_exported(name: str, labels: tuple[str, ...]) -> None:
    with pytest.raises(LocalProtocolError, match="not on its role's list"):
        families_of().set(name, 1.0, *labels)


def test_what_is_counted_is_shown_without_the_times_of_creation() -> None:
    counted = Instruments("x_", SPECS)
    things, work = counted.counter("things_total", "old"), counted.histogram("work_seconds", "idle")
    things.labels("new").inc(2)
    for seconds in (0.0005, 0.001, 0.02, 5.0, 5000.0):
        work.labels("all").observe(seconds)
    families = made(families_of(counted))
    assert list(families) == ["x_level", "x_things", "x_work_seconds", "x_state"]
    assert values(families["x_things"]) == {("old",): 0.0, ("new",): 2.0}
    found = families["x_work_seconds"].samples
    assert {s.labels["kind"]: s.value for s in found if s.name.endswith("_count")} == {"idle": 0.0, "all": 5.0}
    samples = {(s.name, s.labels.get("le")): s.value for s in found if s.labels["kind"] == "all"}
    assert samples["x_work_seconds_bucket", "0.001"] == 2
    assert samples["x_work_seconds_bucket", "0.03"] == 3
    assert samples["x_work_seconds_bucket", "1000.0"] == 4
    assert samples["x_work_seconds_bucket", "+Inf"] == samples["x_work_seconds_count", None] == 5
    assert samples["x_work_seconds_sum", None] == pytest.approx(5005.0215)
    assert not any(name.endswith("_created") for name, _ in samples)


def test_only_the_keys_that_were_counted_last_stay() -> None:
    recent: Recent[str] = Recent(2)
    for key in ("a", "b", "a", "c"):
        recent.add(key)
    assert recent.counted() == {"a": 2, "c": 1}
    recent.keep(1)
    assert recent.counted() == {"c": 1}
