"""Takes stock of a slave's disk at start: reads every file back in full and verifies it.

A file that is torn, altered, missing or of another slave gives one sentence and is free space. Nothing here writes,
and only a failing disk makes it raise, never a file's content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import BinaryIO

from dips.core.messages import SnapshotInfo
from dips.slave import manifest as manifests
from dips.slave.durable import Disk
from dips.slave.manifest import Manifest
from dips.slave.snapshot_file import FileHead, SnapshotError, read_head, read_tensors

_SLOT = re.compile(r"(?:ring-(\d{1,4})\.safetensors|manifest-(\d{1,4})\.json)\Z")


@dataclass(frozen=True)
class SlotContent:
    """A verified snapshot in a slot. info: as committed by its manifest, else a shadow as its header says."""

    info: SnapshotInfo
    head: FileHead


def ring_name(slot: int) -> str:
    return f"ring-{slot}.safetensors"


def manifest_name(slot: int) -> str:
    return f"manifest-{slot}.json"


def take_stock(disk: Disk, run_id: str, slave_id: str) -> tuple[dict[int, SlotContent | None], list[str]]:
    """The existing slots (None: nothing usable), and a sentence for each file that cannot be used."""
    names = disk.names()
    found = {int(match[1] or match[2]) for match in map(_SLOT.match, names) if match}
    slots: dict[int, SlotContent | None] = {}
    problems: list[str] = []
    for slot in sorted(found):
        slots[slot] = _stock(disk, slot, names, (run_id, slave_id), problems)
    _drop_doubles(slots, problems, disk)
    return slots, problems


def _stock(disk: Disk, slot: int, names: list[str], owner: tuple[str, str], problems: list[str]) -> SlotContent | None:
    name, named_by = ring_name(slot), manifest_name(slot)
    where = disk.where(name)
    try:
        if name not in names:
            raise SnapshotError(f"{disk.where(named_by)} names a file that is not there")
        with disk.open(name) as file:
            head = _verify(file, where, owner)
        if head is None and named_by in names:
            raise SnapshotError(f"{where} is empty, and {disk.where(named_by)} names it")
    except (SnapshotError, OSError) as error:
        problems.append(f"snapshot skipped: {error}")
        return None
    if head is None:
        return None
    shadow = SlotContent(head.info, head)
    if named_by not in names:
        return shadow
    try:
        return replace(shadow, info=read_manifest(disk, slot, head).info)
    except (SnapshotError, OSError) as error:
        problems.append(f"not a committed snapshot, its manifest cannot be used: {error}")
        return shadow


def _verify(file: BinaryIO, where: str, owner: tuple[str, str]) -> FileHead | None:
    head = read_head(file, where)
    if head is None:
        return None
    if (head.run_id, head.slave_id) != owner:
        raise SnapshotError(f"{where} belongs to slave {head.slave_id!r} of run {head.run_id!r}")
    read_tensors(file, where, head)
    return head


def read_manifest(disk: Disk, slot: int, head: FileHead) -> Manifest:
    """The manifest of a slot whose file has this head. Raises SnapshotError unless it names that very file."""
    where = disk.where(manifest_name(slot))
    with disk.open(manifest_name(slot)) as file:
        found = manifests.decode(file.read(), where)
    if not found.fits(head) or found.file != ring_name(slot):
        raise SnapshotError(f"{where} names another file than the one of its slot")
    return found


def _drop_doubles(slots: dict[int, SlotContent | None], problems: list[str], disk: Disk) -> None:
    """Of two files of the same version and round keep the committed one; a copy made by hand is no second snapshot."""
    kept: dict[object, int] = {}
    for slot, content in sorted(slots.items(), key=lambda item: not (item[1] and item[1].info.committed)):
        if content is None:
            continue
        key = (content.info.version, content.info.round)
        if key in kept:
            slots[slot] = None
            other = disk.where(ring_name(kept[key]))
            problems.append(f"snapshot skipped: {disk.where(ring_name(slot))} holds the same version as {other}")
        else:
            kept[key] = slot
