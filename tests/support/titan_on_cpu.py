"""torchtitan 0.2.2 with what it lacks on a machine without an accelerator; import this before torchtitan.

torchtitan asks torch for the accelerator's name and module when it is imported, and takes CUDA if there is none. Here
it gets `cpu`, with which torch.distributed takes gloo, and the module below. gloo cannot scale while it adds up, which
FSDP2 asks of NCCL: it is told to do both one after the other. Nothing else is changed.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.compile_fx  # before the stand-in: torch shall find no triton
from support.stand_ins import stand_ins
from torch import _utils
from torch.distributed.fsdp import FSDPModule


class _Cpu:
    """torch.cpu, with what torchtitan calls of torch.cuda: names and sizes to print, and no memory statistics."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return "processor"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


asked: Any = _utils
_of_torch = asked._get_available_device_type, asked._get_device_module
asked._get_available_device_type, asked._get_device_module = lambda: "cpu", lambda name: _Cpu()
try:
    with stand_ins("triton"):  # for kernels of experts, which a Llama has none of
        llama3: Any = importlib.import_module("torchtitan.models.llama3")
        train: Any = importlib.import_module("torchtitan.train")
finally:
    asked._get_available_device_type, asked._get_device_module = _of_torch


_cut = llama3.parallelize_llama


def _cut_for_gloo(*given: Any, **named: Any) -> torch.nn.Module:
    model: torch.nn.Module = _cut(*given, **named)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


llama3.parallelize_llama = _cut_for_gloo
