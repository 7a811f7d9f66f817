"""The state of a torch process as a checkpoint keeps it, by names or by places, and gives it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dips.worker.checkpoint import InnerState
from dips.worker.checkpoint_files import read_tensors, write_tensors
from dips.worker.parallel.shard_files import SavedShards, ShardFile


def saved(state: InnerState, folder: Path) -> tuple[Any, Any]:
    content, tensors = state.capture()
    path = folder / "x.safetensors"
    stamp = write_tensors(path, tensors)
    content = json.loads(json.dumps(content, allow_nan=False))
    if "parts" not in content:
        return content, read_tensors(path, stamp)
    return content, SavedShards(folder, [ShardFile.of_one_process(path, stamp, str)])


def put_back(state: InnerState, content: Any, tensors: Any) -> None:
    (state.restore_by_names if "parts" in content else state.restore)(content, tensors)
