"""One replica of torchft's DiLoCo, over gloo. TORCHFT_LIGHTHOUSE says where the lighthouse is.

All replicas begin with the same parameters, so that nothing is copied at the start (init_sync=False).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is not in their __all__
from torchft.local_sgd import DiLoCo
from turns import Exchange, Model, arguments, serve
from work import OUTER_LR, OUTER_MOMENTUM

OPTIONS = arguments(__doc__, "--bucket-mb")
TIMEOUT = timedelta(seconds=120)


@contextlib.contextmanager
def connect(model: Model) -> Iterator[Exchange]:
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict()}, min_replica_size=OPTIONS.clusters, use_async_quorum=False,
        timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        replica_id=f"c{OPTIONS.cluster}", hostname="127.0.0.1", init_sync=False,
    )  # fmt: skip
    bucket = {"use_bucketization": True, "bucket_cap_mb": int(OPTIONS.bucket_mb)} if OPTIONS.bucket_mb else {}
    try:
        with DiLoCo(manager, [model], model.inner, outer, sync_every=1, **bucket):

            def sync() -> None:
                before = manager.current_step()
                model.inner.step()
                if manager.current_step() == before:
                    raise RuntimeError("torchft discarded the step")

            yield Exchange(sync)
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    serve(OPTIONS, connect)
