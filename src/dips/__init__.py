"""Di-PS: an asynchronous master-slave parameter server for training one model on several clusters.

`dips.DiLoCo` is the way into a training loop. It is imported when it is first asked for, because `import dips` must
not import torch: a slave, the master and the command line do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dips.worker.loop import DiLoCo as DiLoCo

__all__ = ["DiLoCo"]


def __getattr__(name: str) -> Any:
    if name == "DiLoCo":
        from dips.worker.loop import DiLoCo

        return DiLoCo
    raise AttributeError(f"module 'dips' has no attribute {name!r}")
