"""The files of a checkpoint of several ranks: what is written as some boxes is read as others, and damage is found."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dips.worker.checkpoint_files import CheckpointError
from dips.worker.parallel import shard_files
from dips.worker.parallel.held import Box, part_of, pieces_of
from dips.worker.parallel.rank_state import dealt
from dips.worker.parallel.shard_files import SavedShards, Shard, ShardFile, whole, write_shards

SHAPE = (6, 5)
FULL = torch.arange(30, dtype=torch.float32).view(SHAPE)
WHOLE = Box((0, 0), SHAPE)
CUTS: Mapping[str, Sequence[Box]] = {
    "rows": [Box((0, 0), (4, 5)), Box((4, 0), (2, 5))],
    "columns": [Box((0, 0), (6, 2)), Box((0, 2), (6, 3))],
    "tiles": [Box((a, b), (3, n)) for a in (0, 3) for b, n in ((0, 4), (4, 1))],
    "whole": [WHOLE],
}


def shard(box: Box) -> Shard:
    return Shard("layers.0.w", SHAPE, box, part_of(FULL, WHOLE, box))


def written(folder: Path, boxes: Sequence[Box]) -> SavedShards:
    """Each box by a rank of its own, as the manifest tells of them."""
    files = [write_shards(folder, rank, [shard(box)]).to_json() for rank, box in enumerate(boxes)]
    return SavedShards(folder, [ShardFile.from_json(json.loads(json.dumps(raw))) for raw in files])


@pytest.mark.parametrize(("before", "after"), list(itertools.product(CUTS, CUTS)))
@pytest.mark.parametrize("piece_bytes", [1, 24, 1 << 20])
def test_what_is_cut_in_one_way_is_read_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(shard_files, "PIECE_BYTES", piece_bytes)
    saved = written(tmp_path, CUTS[before])
    saved.check()
    room = [Shard("layers.0.w", SHAPE, box, torch.zeros(box.sizes)) for box in CUTS[after]]
    saved.read(room)
    for each in room:
        assert torch.equal(each.tensor, part_of(FULL, WHOLE, each.box))


@pytest.mark.parametrize("sizes", [(), (0, 3), (1,), (7,), (2, 3, 4), (7, 1, 5), (1, 9, 2)])
@pytest.mark.parametrize("max_elems", [1, 3, 10, 1000])
def test_a_box_is_cut_into_pieces_in_logical_order(sizes: tuple[int, ...], max_elems: int) -> None:
    box = Box(tuple(10 + dim for dim in range(len(sizes))), sizes)
    tensor = torch.arange(box.n_elems).view(sizes)
    parts = [part_of(tensor, box, piece).reshape(-1) for piece in pieces_of(box, max_elems)]
    assert all(part.numel() <= max_elems for part in parts)
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(7.0), torch.tensor(True), torch.arange(5).to(torch.bfloat16), torch.arange(4, dtype=torch.uint8)],
)
def test_numbers_and_other_types_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    saved = SavedShards(tmp_path, [write_shards(tmp_path, 0, [whole("step", tensor)])])
    again = saved.read_whole("step")
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)


def test_a_view_is_written_without_the_memory_around_it(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    write_shards(tmp_path, 0, [whole("part", large[:4]), whole("column", large.view(1000, 1000)[:4, 0])])
    assert (tmp_path / "__0_0.distcp").stat().st_size < 10_000


def test_what_was_not_written_is_said(tmp_path: Path) -> None:
    saved = written(tmp_path, CUTS["rows"][:1])
    with pytest.raises(CheckpointError, match=r"does not hold all elements of 'layers.0.w'"):
        saved.read([Shard("layers.0.w", SHAPE, WHOLE, torch.zeros(SHAPE))])
    with pytest.raises(CheckpointError, match=r"does not hold 'other'"):
        saved.read_whole("other")
    with pytest.raises(CheckpointError, match=r"of shape \[6, 5\], and here it is \[5, 6\]"):
        saved.read([Shard("layers.0.w", (5, 6), Box((0, 0), (1, 1)), torch.zeros(1, 1))])


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [(_cut_off, "it is torn"), (_flip, "not those that were written"), (Path.unlink, "cannot be read: No such file")],
)
def test_damage_is_found_by_the_rank_that_checks_the_file(
    tmp_path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    saved = written(tmp_path, CUTS["tiles"])
    damage(tmp_path / "__3_0.distcp")
    saved.check(0, 2)
    with pytest.raises(CheckpointError, match=f"__3_0.distcp.*{sentence}"):
        saved.check(1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../secret"}, {"file": "__0_0.distcp/.."}, {"n_bytes": "many"}, {"boxes": [["w", "float32"]]},
        {"boxes": [["w", "float32", [2], [1], [2], 0, 8, 0]]},
        {"boxes": [["w", "float32", [2], [0], [2], 10**9, 8, 10**9]]},
        {"boxes": [["w", "nn", [2], [0], [2], 0, 8, 0]]}, {"boxes": [["w", "float32", [2], [0], [0], 0, 8, 0]]},
        {"boxes": [["w", "float32", [2], [-1], [2], 0, 8, 0]]},
    ],
)  # fmt: skip
def test_a_manifest_that_describes_no_file_of_a_rank_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    raw = write_shards(tmp_path, 0, [shard(WHOLE)]).to_json() | change
    with pytest.raises(CheckpointError, match="its manifest"):
        ShardFile.from_json(raw)


def test_every_element_is_written_once_and_by_those_that_have_least_to_write() -> None:
    rows, columns = CUTS["rows"], CUTS["columns"]
    held = [
        [("a", WHOLE), ("b", rows[0]), ("c", columns[0])],
        [("a", WHOLE), ("b", rows[1]), ("c", WHOLE)],
        [("a", WHOLE), ("b", rows[0])],
    ]
    counts = {name: torch.zeros(SHAPE) for name in "abc"}
    loads = []
    for rank, each in enumerate(dealt(held)):
        loads.append(sum(box.n_elems for _, box in each))
        for name, box in each:
            assert any(name == other and _has(mine, box) for other, mine in held[rank])
            part_of(counts[name], WHOLE, box).add_(1)
    assert all(torch.equal(count, torch.ones(SHAPE)) for count in counts.values())
    assert max(loads) <= 40


def _has(box: Box, part: Box) -> bool:
    mine = torch.zeros(SHAPE)
    part_of(mine, WHOLE, box).fill_(1)
    return bool(part_of(mine, WHOLE, part).all())
