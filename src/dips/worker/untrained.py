"""Computes digests of a torch model's untrained tensors, for the master to compare (docs/decisions/0029).

Reads each tensor once, at the start, at the speed of memory or of a GPU's link to the host. Never keeps a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Set

import torch
import xxhash

from dips.core.untrained import TensorDigest, Untrained

PIECE_ELEMS = 1 << 24
"""Size of one copy to the host, for a tensor on a device."""

_logger = logging.getLogger("dips")

_MOVING = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.utils.parametrizations._SpectralNorm,
)
"""Modules whose buffers are running statistics: they differ between clusters from the first step on."""


def untrained_of(model: torch.nn.Module, trained: Set[int]) -> Untrained:
    """Every parameter and buffer of the model that is not among `trained` (ids of tensors), tied ones once.

    Contents of running statistics are left out, and so are those that cannot be read (on the meta device, say), which
    is logged.
    """
    moving = moving_buffers(model)
    frozen = [(name, p) for name, p in model.named_parameters() if id(p) not in trained]
    buffers = [(name, b) for name, b in model.named_buffers() if id(b) not in trained]
    return Untrained(
        tuple(TensorDigest(name, _digest(name, p, contents=True)) for name, p in frozen),
        tuple(TensorDigest(name, _digest(name, b, contents=id(b) not in moving)) for name, b in buffers),
    )


def running_statistics(model: torch.nn.Module, trained: Set[int]) -> list[str]:
    """Names of floating-point buffers that training moves, and that are not among `trained` (ids of tensors)."""
    moving = moving_buffers(model) - trained
    return [name for name, buffer in model.named_buffers() if id(buffer) in moving and buffer.is_floating_point()]


def moving_buffers(model: torch.nn.Module) -> set[int]:
    """ids of the buffers that training moves by itself, in modules known to do so."""
    return {id(b) for m in model.modules() if isinstance(m, _MOVING) for b in m.buffers(recurse=False)}


def _digest(name: str, tensor: torch.Tensor, *, contents: bool) -> int:
    digest = xxhash.xxh3_64(f"{tensor.dtype} {list(tensor.shape)}".encode())
    if contents:
        try:
            _add(digest, tensor.detach())
        except (RuntimeError, TypeError, NotImplementedError) as error:
            _logger.warning(
                "the values of %r cannot be read and are not compared with other clusters': %s", name, error
            )
            return xxhash.xxh3_64_intdigest(f"{tensor.dtype} {list(tensor.shape)} unread".encode())
    return int(digest.intdigest())


def _add(digest: xxhash.xxh3_64, tensor: torch.Tensor) -> None:
    """Add the bytes of all elements to the digest, in logical order."""
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight, say: several plain tensors under one name
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            _add(digest, getattr(tensor, name))
        return
    for piece in tensor.reshape(-1).split(PIECE_ELEMS):
        if piece.numel():
            digest.update(piece.cpu().contiguous().view(torch.uint8).numpy())
