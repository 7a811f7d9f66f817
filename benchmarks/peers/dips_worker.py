"""One cluster of Di-PS: the loop of the README around a model. DIPS_MASTER says where the master is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from turns import Exchange, Model, arguments, serve

import dips

OPTIONS = arguments(__doc__, "--wire-dtype", "--tape")


@contextlib.contextmanager
def connect(model: Model) -> Iterator[Exchange]:
    more = {"wire_dtype": OPTIONS.wire_dtype} if OPTIONS.wire_dtype else {}
    cluster_id = f"c{OPTIONS.cluster}"
    with dips.DiLoCo(
        model, model.inner, tokens_per_step=1, cluster_id=cluster_id, tape=OPTIONS.tape or None, **more
    ) as loop:
        # A step without any gradient is not counted; with one of zeros it is the exchange alone.
        smallest = min(model.parameters(), key=torch.Tensor.numel)
        smallest.grad = torch.zeros_like(smallest)

        def sync() -> None:
            before = loop.version
            model.inner.step()
            if loop.version == before:
                raise RuntimeError(f"the step ended without a new version: {loop.last_verdict}")

        yield Exchange(sync)


if __name__ == "__main__":
    serve(OPTIONS, connect)
