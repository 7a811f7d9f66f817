"""The state of a torch process as a checkpoint keeps it, by names or by places, and gives it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dips.worker.checkpoint import InnerState
from dips.worker.checkpoint_files import write_tensors
from dips.worker.parallel.shard_files import SavedShards, ShardFile


def saved(state: InnerState, folder: Path) -> tuple[Any, SavedShards]:
    content, tensors = state.capture()
    path = folder / "x.safetensors"
    stamp = write_tensors(path, tensors)
    content = json.loads(json.dumps(content, allow_nan=False))
    return content, SavedShards(folder, [ShardFile.of_one_process(path, stamp, str)])
