"""Adds up the losses that a user's loop reports, and reads them seldom: reading waits for the device's whole queue.

On a device they are added up there, and read when a push is due (the parameters are read then anyway) or when the
last reading is READ_EVERY_S old, which is often enough for a heartbeat.
"""

from __future__ import annotations

import math

import torch

from dips.core.errors import ConfigError

READ_EVERY_S = 2.0


class Losses:
    """Adds up losses in nats per token, of one optimizer.step() or of several."""

    def __init__(self) -> None:
        self._on_host: list[float] = []
        self._on_device: torch.Tensor | None = None
        self._n_on_device = 0
        self._read_s = -math.inf

    def add(self, loss: float | torch.Tensor) -> None:
        """Add a loss. Raises ConfigError unless it is one number."""
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise ConfigError(f"the loss has {loss.numel()} elements: report their mean, in nats per token")
            value = loss.detach().reshape(())
            if value.device.type != "cpu":
                # The sum has its own memory: under CUDA graphs the next step overwrites the loss in place.
                before = torch.zeros((), device=value.device) if self._on_device is None else self._on_device
                self._on_device, self._n_on_device = before.to(value.device) + value.float(), self._n_on_device + 1
                return
            loss = value.item()
        try:
            self._on_host.append(float(loss))
        except (TypeError, ValueError):
            raise ConfigError(
                f"the loss is a {type(loss).__name__}: report a number, or a tensor of one element, in nats per token"
            ) from None

    def take(self, now_s: float, push_is_due: bool) -> float:
        """Their mean since the last reading; NaN when there are none, or when they stay on their device for now."""
        total, count = math.fsum(self._on_host), len(self._on_host)
        if self._on_device is not None:
            if not push_is_due and now_s - self._read_s < READ_EVERY_S:
                return math.nan
            self._read_s = now_s
            total, count = total + float(self._on_device.item()), count + self._n_on_device
        self._on_host, self._on_device, self._n_on_device = [], None, 0
        return total / count if count else math.nan
