"""Keeps a live module at the newest version of a run: for samplers of reinforcement learning, and evaluation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from dips.core.config import load
from dips.core.errors import ConfigError, options_are_keywords
from dips.core.ids import Version
from dips.core.layout import Layout, PublishedModel
from dips.core.model_description import description_from_json
from dips.core.net.keys import security_of
from dips.core.net.security import VARIABLES
from dips.core.observe.logs import end_with_one_sentence, show_where_logging_is_not_configured
from dips.worker.config import SECTION, ClientConfig
from dips.worker.reader import follow_run, name_of
from dips.worker.torch_model import named_buffers, named_parameters, plain_model

_LOOK_S = 0.2
"""How often a wait looks at signals."""

_logger = logging.getLogger("dips")


class Follow:
    """Keeps a module at the newest version of a run, without training it.

    Entering waits for a first version and installs it. A thread fetches the versions that come, as differences to the
    one before where the run publishes them, into memory of the host (8 bytes a parameter, 12 during an update());
    update() copies the newest one into the module, between two of your forward passes. What the run does not train
    stays as it is. A loop is in docs/integrations.md.

    Args:
        model: A module with the names and shapes of the model that is trained, of any floating-point type, on any
            device; each parameter whole. One that lacks a parameter, or has it in another shape, cut into shards,
            without memory or as integers: ConfigError.
        master: HOST:PORT of the master, or several with commas between them; else DIPS_MASTER. Neither: ConfigError.
        run_id: The run's name; else DIPS_RUN. Another run at this address: Refused (RUN_ID).
        keys: The directory of an operator's or a cluster's identity (docs/security.md); else DIPS_KEYS. Several
            followers with the keys of one cluster disturb each other.
        insecure: Use no keys, with a master on this machine only. Neither keys nor insecure, or both: ConfigError.
        connect_wait_s: How long to wait for a master that has not answered yet (120 s): RetryLater. One that goes away
            later is waited for.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        master: str | None = None,
        run_id: str | None = None,
        keys: Path | str | None = None,
        insecure: bool | None = None,
        connect_wait_s: float | None = None,
    ) -> None:
        end_with_one_sentence()
        given = {
            "master": master or None, "run_id": run_id or None, "keys": keys or None, "insecure": insecure,
            "connect_wait_s": connect_wait_s,
        }  # fmt: skip
        with options_are_keywords():
            self._config = load(
                ClientConfig, SECTION, given_to="dips.Follow", variables=VARIABLES, overrides=given
            ).value
            if not self._config.master:
                raise ConfigError("the master's address is missing: set DIPS_MASTER, or give master=HOST:PORT")
            self._security = security_of(self._config, "dips.Follow")
        self._model = plain_model(model)
        self._changed = threading.Condition()
        self._arrived: PublishedModel | None = None
        self._error: BaseException | None = None
        self._over = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dips-follow", daemon=True)
        self._installed: tuple[Version, int] | None = None  # and its tokens

    def __enter__(self) -> Follow:
        show_where_logging_is_not_configured()
        self._thread.start()
        try:
            with self._changed:
                while not (self._arrived or self._over):
                    self._changed.wait(_LOOK_S)
            self.update()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def version(self) -> Version | None:
        """The version that the module has; None before the first."""
        return self._installed[0] if self._installed is not None else None

    @property
    def tokens(self) -> int:
        """Tokens that the run had trained on, up to this version."""
        return self._installed[1] if self._installed is not None else 0

    @property
    def ended(self) -> bool:
        """Whether the run has ended, and the module has its last version. Raises what ended the following."""
        with self._changed:
            if self._error is not None and self._arrived is None:
                raise self._error
            return self._over and self._arrived is None

    def update(self) -> bool:
        """Copy the newest version that has arrived into the module; call it where no forward pass is under way.

        Returns whether there was a new one, without waiting for one. Raises what ended the following, such as Refused,
        once the last version that arrived is installed. Where it is interrupted, the module may have parts of two
        versions until the next update(), which copies all of one.
        """
        if self.ended or (arrived := self._arrived) is None:
            return False
        with torch.no_grad():
            for tensor, here in self._find(arrived.layout):  # anew: a module that was moved has other buffers
                tensor.copy_(torch.from_numpy(arrived.flat[here]).view(tensor.shape))
        self._installed = arrived.version, arrived.tokens
        with self._changed:
            if self._arrived is arrived:  # else there is a newer one
                self._arrived = None
        return True

    def close(self) -> None:
        """End the following; the module keeps its version. May be called twice."""
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()

    def _find(self, layout: Layout) -> list[tuple[torch.Tensor, slice]]:
        """Where each parameter of the layout goes. Raises ConfigError, naming the first one that has no place."""
        described = description_from_json(layout.description)
        prefix = described.prefix if described is not None else ""
        held: dict[str, torch.Tensor] = {**dict(named_buffers(self._model)), **dict(named_parameters(self._model))}
        found = []
        for span in layout.spans:
            name, shape = span.parameter.name, span.parameter.shape
            tensor = held.get(name, held.get(name.removeprefix(prefix)))
            fits = tensor is not None and tuple(tensor.shape) == shape and tensor.is_floating_point()
            if tensor is None or not fits or tensor.is_meta or isinstance(tensor, DTensor):
                here = "none of this name"
                if tensor is not None:
                    here = f"{type(tensor).__name__} of {list(tensor.shape)}, {tensor.dtype} on {tensor.device}"
                raise ConfigError(
                    f"the run's model has {name!r} of shape {list(shape)}, this module has {here}: give the same "
                    "model as in training, of floating-point type, in memory, not cut into shards; for a program with "
                    "a model of its own use `dips follow`"
                )
            found.append((tensor, slice(span.start_elem, span.stop_elem)))
        return found

    def _follow(self) -> None:
        config = self._config
        error: BaseException | None = None
        try:
            follow_run(
                config.master, config.run_id, name_of(self._security), self._security, self._take, self._leaving.wait,
                patience_s=config.connect_wait_s, newest_only=True, cancelled=self._leaving,
            )  # fmt: skip
        except BaseException as raised:  # for the thread that asks
            error = raised
        with self._changed:
            self._error, self._over = error, True
            self._changed.notify_all()

    def _take(self, fetched: PublishedModel, now_and_then: Callable[[], None]) -> None:
        with self._changed:
            self._arrived = fetched
            self._changed.notify_all()
