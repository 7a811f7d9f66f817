"""Di-PS: an asynchronous master-slave parameter server for training one model on several clusters.

`dips.DiLoCo` is the way into a training loop, `dips.HuggingFaceCallback` and `dips.LightningCallback` into trainers
that people have, `dips.Follow` into a program that samples from the model; `dips.Parallel` and `dips.ShardOf` say what
a rank holds of it. Each is imported when it is first asked for, because `import dips` must not import torch: a slave,
the master and the command line do without it.
From that first use on, an error of ours that is not caught ends the program with one sentence (core/observe/logs.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dips.core.release import VERSION as __version__

if TYPE_CHECKING:
    from dips.worker.followed_model import Follow as Follow
    from dips.worker.integrations.hugging_face import HuggingFaceCallback as HuggingFaceCallback
    from dips.worker.integrations.lightning import LightningCallback as LightningCallback
    from dips.worker.loop import DiLoCo as DiLoCo
    from dips.worker.parallel.held import Parallel as Parallel
    from dips.worker.parallel.held import ShardOf as ShardOf

_HOMES = {
    "DiLoCo": "dips.worker.loop",
    "Follow": "dips.worker.followed_model",
    "HuggingFaceCallback": "dips.worker.integrations.hugging_face",
    "LightningCallback": "dips.worker.integrations.lightning",
    "Parallel": "dips.worker.parallel.held",
    "ShardOf": "dips.worker.parallel.held",
}

__all__ = ["DiLoCo", "Follow", "HuggingFaceCallback", "LightningCallback", "Parallel", "ShardOf", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        importlib.import_module("dips.core.observe.logs").end_with_one_sentence()
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dips' has no attribute {name!r}")
