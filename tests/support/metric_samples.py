"""What a collector's families say, in a form that tests compare."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from dips.core.observe.metrics import Spec

Samples = dict[tuple[str, ...], float]
"""(name without prefix, label values in the order of the list) -> value; of histograms their counts."""


def samples(families: Iterable[Metric], prefix: str, specs: Iterable[Spec]) -> Samples:
    labels = {prefix + spec.name: spec.labels for spec in specs}
    found = {}
    for family in families:
        for sample in family.samples:
            name = sample.name.removesuffix("_count") if family.type == "histogram" else sample.name
            if name in labels and "le" not in sample.labels:
                found[name.removeprefix(prefix), *(sample.labels[label] for label in labels[name])] = sample.value
    return found
