"""Reads a published version of a run whose processes are gone, from the slaves' snapshots.

A version counts only if every slave of its placement has a committed snapshot of it whose bytes are what
was written; the newest such version is taken unless one is named. It must never mix versions, and never
write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dips.core.errors import ConfigError, Refused
from dips.core.ids import SlaveId, Version
from dips.core.layout import Layout, layout_from_json
from dips.core.placement import Placement
from dips.slave import manifest as manifests
from dips.slave.snapshot_file import SnapshotError, SnapshotStamp, read_snapshot


@dataclass(frozen=True)
class StoredModel:
    """A version as it was published. flat: (layout.n_elems,) float32."""

    run_id: str
    version: Version
    tokens: int
    layout: Layout
    flat: NDArray[np.float32]


@dataclass(frozen=True)
class _Committed:
    """A manifest: one slave's part of one version."""

    version: Version
    slave_id: str
    file: Path
    stamp: SnapshotStamp
    digest: str
    record: Mapping[str, Any]


def load_stored(run_dir: Path, version: Version | None = None) -> StoredModel:
    """The newest version that all slaves have, or the one that is named.

    Raises ConfigError when there is none, naming what is missing or damaged.
    """
    by_version = _manifests(run_dir)
    if version is not None and version not in by_version:
        have = ", ".join(str(v) for v in sorted(by_version))
        raise ConfigError(f"{run_dir} has no snapshot of version {version}, only of {have}: name one of these")
    candidates = [version] if version is not None else sorted(by_version, reverse=True)
    problems: list[str] = []
    for candidate in candidates:
        try:
            return _merge(by_version[candidate])
        except (SnapshotError, OSError) as error:
            problems.append(f"version {candidate}: {error}")
    raise ConfigError(f"no version in {run_dir} is complete on all slaves; " + "; ".join(problems))


def _manifests(run_dir: Path) -> dict[Version, list[_Committed]]:
    found: dict[Version, list[_Committed]] = {}
    for path in sorted((run_dir / "slaves").glob("*/manifest-*.json")):
        committed = _read_manifest(path)
        found.setdefault(committed.version, []).append(committed)
    if not found:
        raise ConfigError(
            f"{run_dir} has no snapshots of slaves: give the --run-dir of a run of `dips demo` or `dips up`"
        )
    return found


def _read_manifest(path: Path) -> _Committed:
    try:
        found = manifests.decode(path.read_bytes(), str(path))
        record = json.loads(found.record)
        file, digest = path.with_name(found.file), found.info.digest.hex()
        return _Committed(found.info.version, found.slave_id, file, found.stamp, digest, record)
    except (OSError, ValueError, SnapshotError) as error:
        raise ConfigError(f"{path} is not a manifest of a slave ({error}): remove it, or restore it") from error


def _merge(parts: list[_Committed]) -> StoredModel:
    """Raises SnapshotError when a slave's part is missing or damaged."""
    run_id, tokens, layout, placement = _read_record(parts[0])
    of_slave = {part.slave_id: part for part in parts}
    flat = np.empty(layout.n_elems, np.float32)
    for slave in placement.slaves:
        if slave not in of_slave:
            raise SnapshotError(f"slave {slave} has no committed snapshot of it")
        _place(of_slave[slave], slave, layout, placement, flat)
    return StoredModel(run_id, parts[0].version, tokens, layout, flat)


def _read_record(part: _Committed) -> tuple[str, int, Layout, Placement]:
    """Run, tokens, layout and placement as the COMMIT record has them; nothing else of it matters here."""
    try:
        ledger = part.record["ledger"]
        slaves = tuple(sorted(SlaveId(name) for name in ledger["slaves"]))
        placement = Placement(slaves, tuple(int(slave) for slave in ledger["placement"]))
        return str(ledger["run_id"]), int(ledger["tokens"]), layout_from_json(ledger["layout"]), placement
    except (KeyError, TypeError, ValueError, Refused) as error:
        raise SnapshotError(f"the COMMIT record next to {part.file} cannot be read ({error!r})") from error


def _place(part: _Committed, slave: SlaveId, layout: Layout, placement: Placement, flat: NDArray[np.float32]) -> None:
    """Copy a slave's blocks, which follow each other in its file, to where they belong."""
    blocks = placement.blocks_of(slave, layout)
    n_elems = sum(block.n_elems for block in blocks)
    theta, momentum = np.empty(n_elems, np.float32), np.empty(n_elems, np.float32)
    with part.file.open("rb") as file:
        head = read_snapshot(file, str(part.file), theta, momentum)
    if head.stamp != part.stamp:
        raise SnapshotError(f"{part.file} is not the file that its manifest names")
    if part.record["digests"].get(slave) != part.digest:
        raise SnapshotError(f"{part.file} does not hold what the COMMIT record of {part.version} says")
    start = 0
    for block in blocks:
        flat[block.start_elem : block.stop_elem] = theta[start : start + block.n_elems]
        start += block.n_elems
