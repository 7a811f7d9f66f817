"""`dips size`: computes the memory, disk and time that a planned run needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import typer

from dips.core.config import load
from dips.core.units import format_bits_per_s, format_bytes, format_seconds
from dips.local.options import option_name, overrides_for, with_knobs
from dips.local.sizing import Quantity, SizeKnobs, SizeTable

SECTION = "size"

RATES = (
    "tokens_per_s",
    "tokens_per_step",
    "link_share",
    "crypto_rate",
    "slave_rate",
    "memory_rate",
    "disk_rate",
    "copy_rate",
)
"""Knobs that only a measurement knows."""

_HEADINGS = {
    "shard_params": "Slave, each of {slaves}",
    "slots_held": "What a slave's host of {slave_ram} holds",
    "measure_bytes": "Master",
    "share_params": "Rank, each of {ranks} of a cluster",
    "cluster_memory_bytes": "Cluster, each of {clusters}",
    "push_bytes": "Transfers",
    "update_s": "Update",
    "step_s": "A round of a cluster",
}
"""The quantity that a heading precedes."""

_DECIDES = (
    *("cluster_memory_bytes", "rank_memory_bytes", "slave_process_bytes", "slave_volume_bytes"),
    *("push_together_s", "pull_together_s", "overhead_together"),
)


@with_knobs(SizeKnobs)
def size(as_json: bool = typer.Option(False, "--json", help="JSON on standard output."), **given: Any) -> int:
    """Print how much memory and disk each process needs, how long transfers and updates take, and what part of the time
    that is.

    Each number is printed with its formula and the numbers that were put in. Rates are a machine's: the defaults were
    measured or fitted as their help says; give your own. Counts may be written as 100e9 or 100B, amounts with a unit.
    """
    sizes = SizeTable(load(SizeKnobs, SECTION, overrides=overrides_for(SizeKnobs, given)).value)
    if as_json:
        print(json.dumps(to_json(sizes)))
        return 0
    for line in told(sizes):
        print(line)
    return 0


def to_json(sizes: SizeTable) -> dict[str, object]:
    """The table as a JSON object with stable keys: quantities by key, in base units."""
    rows = {
        row.key: {
            "value": row.value,
            "unit": row.unit,
            "what": row.what,
            "formula": row.formula,
            "numbers": dict(row.numbers),
        }
        for row in sizes.rows.values()
    }
    return {"given": sizes.knobs.model_dump(), "quantities": rows, "remarks": list(sizes.remarks)}


def told(sizes: SizeTable) -> Iterator[str]:
    """The table, line by line."""
    counts = {
        "slaves": sizes.knobs.slaves,
        "ranks": sizes.knobs.ranks,
        "clusters": sizes.knobs.clusters,
        "slave_ram": format_bytes(sizes.knobs.slave_ram or 0),
    }
    yield "What decides (how each number is computed stands below)"
    for key in _DECIDES:
        if (row := sizes.rows.get(key)) is not None:
            yield f"  {row.what}: {shown(row.value, row.unit)}"
    for row in sizes.rows.values():
        if row.key in _HEADINGS:
            yield f"\n{_HEADINGS[row.key].format(**counts)}"
        yield f"  {row.what}: {shown(row.value, row.unit)}"
        yield f"      {row.key} = {row.formula}"
        numbers = (f"{name} {_plain(value, sizes.rows.get(name))}" for name, value in row.numbers.items())
        yield f"      with {', '.join(numbers)}"
        if row.note:
            yield f"      {row.note}"
    assumed = [name for name in RATES if name not in sizes.knobs.model_fields_set]
    if assumed:
        yield "\nNot given, so taken from elsewhere; give your own where it matters"
        fields = SizeKnobs.model_fields
        yield from (f"  {option_name(name)} {sizes.input(name):.6g}: {fields[name].description}" for name in assumed)
    if sizes.remarks:
        yield "\nMind"
        yield from (f"  {remark}" for remark in sizes.remarks)


def shown(value: float, unit: str) -> str:
    """An amount as people read it."""
    match unit:
        case "bytes":
            return format_bytes(round(value))
        case "s":
            return format_seconds(value)
        case "bits/s":
            return format_bits_per_s(value)
        case "share":
            return f"{100 * value:.1f} %"
        case _:
            return f"{value:,.0f}"


def _plain(value: float, row: Quantity | None) -> str:
    """A number that can be put into the formula; one that is shown above with a unit has it in brackets."""
    text = f"{value:.0f}" if value == round(value) and value < 1e8 else f"{value:.6g}"
    return f"{text} ({shown(value, row.unit)})" if row is not None and row.unit else text
