"""A torch model's parameters as one flat float32 vector, and back.

Takes the parameters that require gradients, tied ones once; buffers (running statistics) stay each cluster's own.
The inner optimizer's state is never read and never sent. Shapes: see core/layout.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from dips.core.errors import ConfigError
from dips.core.layout import DEFAULT_BLOCK_ELEMS, Layout, Parameter, layer_of

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class TorchParameters:
    """A ParameterStore over a module and its inner optimizer, on CPU or on CUDA devices."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        block_elems: int = DEFAULT_BLOCK_ELEMS,
    ) -> None:
        """Raises ConfigError for a dtype that is not served, sharded parameters, or another model's optimizer,
        Refused(LAYOUT) for a model without trainable parameters.
        """
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = optimizer
        self._layout = Layout(tuple(_described(name, p) for name, p in named.items()), block_elems)
        self._spans = [(named[s.parameter.name], s.start_elem, s.stop_elem) for s in self._layout.spans]
        self._check_optimizer()
        self._devices = {p.device for p, _, _ in self._spans if p.is_cuda}
        # Copies between a GPU and pageable memory go through a bounce buffer at a fraction of the link's speed.
        self._pinned = torch.empty(self._layout.n_elems, pin_memory=True) if self._devices else None

    def layout(self) -> Layout:
        return self._layout

    def snapshot(self, into: NDArray[np.float32]) -> None:
        host = torch.from_numpy(into) if self._pinned is None else self._pinned
        with torch.no_grad():
            for parameter, start, stop in self._spans:
                host[start:stop].copy_(parameter.detach().reshape(-1), non_blocking=self._pinned is not None)
        if self._pinned is not None:
            wait_for(self._devices)
            into[:] = self._pinned.numpy()

    def install(self, flat: NDArray[np.float32]) -> None:
        if self._pinned is not None:
            self._pinned.numpy()[:] = flat
        host = torch.from_numpy(flat) if self._pinned is None else self._pinned
        with torch.no_grad():
            for parameter, start, stop in self._spans:
                values = host[start:stop].view(parameter.shape)
                parameter.copy_(values, non_blocking=self._pinned is not None)
        if self._pinned is not None:
            wait_for(self._devices)  # the pinned buffer is written again by the next snapshot

    def reset_inner_optimizer(self) -> None:
        self._optimizer.state.clear()

    def _check_optimizer(self) -> None:
        ours = {id(parameter) for parameter, _, _ in self._spans}
        theirs = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if not ours & theirs:
            raise ConfigError(
                "the optimizer holds none of the model's parameters: make it of model.parameters(), after the model "
                "was moved to its device"
            )


def wait_for(devices: Iterable[torch.device]) -> None:
    """Return when copies on all these CUDA devices are done; without a device torch waits for the current one alone."""
    for device in devices:
        torch.cuda.synchronize(device)


def _described(name: str, parameter: torch.nn.Parameter) -> Parameter:
    if hasattr(parameter, "device_mesh"):
        raise ConfigError(
            f"parameter {name!r} is sharded over devices, which this release does not gather: use one device, or "
            "replicas whose parameters are whole (DistributedDataParallel)"
        )
    dtype = _DTYPE_NAMES.get(parameter.dtype)
    if dtype is None:
        raise ConfigError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: float32, bfloat16 and float16 are "
            "served; convert it, or set requires_grad=False if it is not trained"
        )
    return Parameter(name, tuple(parameter.shape), dtype, layer_of(name))
