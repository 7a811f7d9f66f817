"""Checks a step's token count against the model's inputs, so that a mistake is reported before the first push.

A hook counts the elements of the tensors that the model is called with. A step cannot have been trained on more tokens
than these, whatever a token is: an id, a sample's row of an image, a frame. (Not so where a model fetches its own data,
say by row numbers: check_tokens = false is for those.) Inputs that cannot be counted are not checked: none seen, other
objects among them, or a compiled model, whose hooks must not do anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dips.core.errors import ConfigError

REFUSED_RATIO = 100
"""Below this ratio there is only a warning: ids that a model's forward repeats, or packs, may be no mistake."""

_logger = logging.getLogger("dips")


class TokenCheck:
    """Counts a model's inputs from begin() to end()."""

    def __init__(self) -> None:
        self._hook: RemovableHandle | None = None
        self._elems = 0
        self._unknown = self._told = False

    def begin(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.jit.ScriptModule):
            self._hook = model.register_forward_pre_hook(self._called, with_kwargs=True)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def stepped(self, tokens: int) -> None:
        """Check a step against the model's inputs since the last one.

        Raises ConfigError when it counts REFUSED_RATIO times the tokens that they can hold.
        """
        elems, unknown = self._elems, self._unknown
        self._elems, self._unknown = 0, False
        if unknown or elems == 0 or tokens <= elems:
            return
        sentence = (
            f"a step counts {tokens} tokens, {tokens / elems:.3g} times the {elems} elements of all the inputs that "
            "the model was called with since the step before: tokens_per_step and count() take the tokens of one "
            "optimizer.step() of this process, not of all ranks, of several steps or of the whole run"
        )
        if tokens > REFUSED_RATIO * elems:
            raise ConfigError(f"{sentence}; set DIPS_WORKER_CHECK_TOKENS=0 if the model fetches its own data")
        if not self._told:
            self._told = True
            _logger.warning("%s; nothing to do if the model fetches its own data", sentence)

    def _called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        elems = _elems_in([args, kwargs])
        if elems is None:
            self._unknown = True
        else:
            self._elems += elems


def _elems_in(inputs: Any) -> int | None:
    """Elements of all tensors; None when other objects may hold data, too."""
    if isinstance(inputs, torch.Tensor):
        return inputs.numel()
    if inputs is None or isinstance(inputs, (bool, int, float, str)):
        return 0
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if not isinstance(inputs, (list, tuple)):
        return None
    total = 0
    for item in inputs:
        elems = _elems_in(item)
        if elems is None:
            return None
        total += elems
    return total
