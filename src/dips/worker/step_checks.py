"""What a training loop reports at each step: token counts, which are checked, and losses, which are read seldom."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
import xxhash
from torch.utils.hooks import RemovableHandle

from dips.core.errors import ConfigError
from dips.worker.torch_model import called_module, is_parents_step, local, plain_model, refuse_stranger

# ---- hooks -----------------------------------------------------------------------------------------------------------

H = TypeVar("H", bound=Callable[..., None])


def not_compiled(hook: H) -> H:
    """Traced into a compiled step, a hook would copy the tracer's tensors, which hold nothing."""
    uncompiled: H = torch.compiler.disable(hook)
    return uncompiled


class HookHere:
    """A hook of a module that its copies, the files that it is saved to, and what torch traces of it, have no part in.
    call: None: it does nothing, as in a copy.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling() and not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self._call(*given)

    @property
    def __name__(self) -> str:  # torch.jit.script asks for it, and no one else
        raise AttributeError(
            "torch.jit.script cannot compile a module with a hook, as a dips.DiLoCo block puts on its model: script it "
            "before or after the block, or in it another module that has the model's state_dict()"
        )

    def __deepcopy__(self, memo: object) -> HookHere:
        return HookHere()

    def __reduce__(self) -> tuple[Any, ...]:
        return HookHere, ()


# ---- token check -----------------------------------------------------------------------------------------------------
#
# Checks a step's token count against the model's inputs, so that a mistake is reported before the first push.
#
# A hook counts the elements of the tensors that the model is called with. A step cannot have been trained on more
# tokens than these, whatever a token is: an id, a sample's row of an image, a frame. (Not so where a model fetches
# its own data, say by row numbers: check_tokens = false is for those.) Inputs that cannot be counted are not checked:
# other objects among them, or a model whose compiled wrapper was not given, as its own hooks must not do anything. A
# step before which the model was not called, after others before which it was, is told: it is usually the second
# optimizer.step() of one batch.


REFUSED_RATIO = 100
"""Below this ratio there is only a warning: ids that a model's forward repeats, or packs, may be no mistake."""

_logger = logging.getLogger("dips")


class TokenCheck:
    """Counts inputs of models from begin() to end()."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._elems = 0
        self._unknown = self._told = self._told_twice = False
        self._trained = self._trains = False  # whether the model was called in training mode: since the last step, ever

    def begin(self, model: torch.nn.Module) -> None:
        """Count this model's inputs; of several, all together."""
        if not isinstance(model, torch.jit.ScriptModule):
            self._hooks.append(model.register_forward_pre_hook(HookHere(self._called), with_kwargs=True))

    def end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def stepped(self, tokens: int) -> None:
        """Check a step against the model's inputs since the last one.

        Raises ConfigError when it counts REFUSED_RATIO times the tokens that they can hold.
        """
        elems, unknown, trained = self._elems, self._unknown, self._trained
        self._elems, self._unknown, self._trained = 0, False, False
        if self._trains and not (trained or elems or unknown or self._told_twice):
            self._told_twice = True
            _logger.warning(
                "optimizer.step() was called again without a call of the model since the step before: its %d tokens "
                "count twice, and the same gradients are applied again; call it once for each batch (nothing to do if "
                "the model is called in another way)",
                tokens,
            )
        self._trains = self._trains or trained
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
        self._trained = self._trained or module.training  # evaluation may call a model that training calls by parts
        elems = _elems_in([args, kwargs])
        if elems is None:
            self._unknown = True
        else:
            self._elems += elems


def _elems_in(inputs: Any) -> int | None:
    """Elements of all tensors; None when other objects may hold data, too."""
    total = 0
    for leaf in _leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            if torch._C._functorch.is_batchedtensor(leaf):
                return None  # one sample of vmap's
            total += leaf.numel()
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            return None
    return total


def _leaves(inputs: Any) -> Iterator[Any]:
    """What mappings, lists and tuples hold, however deep."""
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        for item in inputs:
            yield from _leaves(item)
    else:
        yield inputs


# ---- first batches ---------------------------------------------------------------------------------------------------
#
# Two clusters with one seed and one data set read the same batches, and one of them adds nothing. Each says the digest
# of its first batches in its heartbeats, and the master compares them; the ranks of a cluster tell their leader theirs.
# What torch.compile runs calls no hook: the batches of a model are seen that is given as torch.compile(model) wraps it,
# and not those of model.compile(), of a compiled training step, or of a wrapper around the plain model that was given.


N_BATCHES = 8
"""Calls of the model in training mode."""

BATCH_ELEMS = 4096
"""About so many elements of each input are read, from all over it: its beginning may be a margin that all samples have,
and the whole of a large batch would be copied from its device."""


class FirstBatches:
    """Digests the inputs of a model's first calls in training mode, or the first batches that a trainer gives."""

    def __init__(self, model: torch.nn.Module, known: Callable[[bytes], None]) -> None:
        """known: gets the digest."""
        self._digest = xxhash.xxh3_128()
        self._n_left = N_BATCHES
        self._known = known
        self._hook: RemovableHandle | None = None
        called = called_module(model)
        if not isinstance(called, torch.jit.ScriptModule):
            self._hook = called.register_forward_pre_hook(HookHere(self._called), with_kwargs=True)

    def end(self) -> None:
        self._n_left = 0
        self._unhook()

    def add(self, batch: Any) -> None:
        """A batch of a trainer, which may train without a call of the model: its calls are no longer looked at."""
        self._unhook()
        self._note(batch)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:
            self._note([args, kwargs])

    def _note(self, inputs: Any) -> None:
        if self._n_left == 0:
            return
        try:
            tensors = [leaf for leaf in _leaves(inputs) if isinstance(leaf, torch.Tensor)]
            if not tensors:  # batches in other objects: the digests of all such clusters would be equal
                self.end()
                return
            for tensor in tensors:
                if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return  # a graph is made; nothing may be copied to the host
                flat = local(tensor).reshape(-1)
                some = flat[:: max(1, len(flat) // BATCH_ELEMS)].cpu()
                self._digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
                self._digest.update(some.contiguous().view(torch.uint8).numpy().data)
        except Exception as error:
            # Tensors of vmap, or without content: no alarm is worth an error in a user's forward.
            _logger.debug("the first batches are not compared with other clusters': %s", error)
            self.end()
            return
        self._n_left -= 1
        if self._n_left == 0:
            self.end()
            self._known(self._digest.digest())


# ---- steps that no one counts ----------------------------------------------------------------------------------------
#
# Finds loops whose optimizer is not the one that was given, or whose model is a copy; and steps that train nothing.


LOOKS_AFTER = 32
"""Readings of `done` in a row without a counted step, until the model is looked at; then at twice as many."""

N_LOOKS = 3
"""Looks that all differ: training goes on. Weights that an evaluation puts in place and back have two values."""

OTHER_STEPS = 64
"""Steps of other optimizers without a counted one, until they are told of."""

LOOKED_AT = 32
"""Parameters of which one element each is read."""


class StepWatch:
    """Watches, from the beginning of a block on, what optimizers do and whether the model's parameters change."""

    def __init__(self, models: Sequence[torch.nn.Module], known: Set[torch.optim.Optimizer], trained: Set[int]) -> None:
        """known: the loop's own optimizers, and those inside of them. trained: what they step (ids)."""
        parameters = (p for model in models for p in plain_model(model).parameters() if p.requires_grad)
        self._some = [p for p in parameters if local(p).numel()][:LOOKED_AT]
        self._known, self._trained = known, trained
        self._n_known = 0  # steps of those
        self._begun: dict[int, int] = {}  # the others in their step(): n_known as it began
        self._begin = self._elements()
        self._looks: list[list[str]] = []
        self._look_at = LOOKS_AFTER
        self._asked = self._n_others = 0
        self._has_gradient = self._told = self._told_empty = False

    def _elements(self) -> list[str]:
        return [repr(float(local(p).reshape(-1)[-1])) for p in self._some]  # NaN is equal to itself

    def counted(self) -> None:
        self._asked = self._n_others = 0
        self._looks, self._look_at = [], LOOKS_AFTER

    def asked(self) -> None:
        """`done` was read: often, where a loop waits for data or evaluates, which changes no parameter for good."""
        self._asked += 1
        if self._asked == self._look_at and not self._told:
            self._look_at *= 2
            self._looks = [*self._looks[1 - N_LOOKS :], self._elements()]
            if len({tuple(look) for look in self._looks}) == N_LOOKS:
                self._tell(f"`done` was read {self._asked} times, and the model's parameters change")

    def any_begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer of this process is about to step. Returns whether it is one of the loop's."""
        is_known = optimizer in self._known
        if is_known:
            self._has_gradient = self._has_gradient or _has_gradient(optimizer)
        elif not is_parents_step(optimizer):
            self._begun[id(optimizer)] = self._n_known
        return is_known

    def any_stepped(self, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
        """An optimizer of this process has stepped. Raises ConfigError for one that stepped the model, unless it did so
        by one of the loop's: its moments would be lost.
        """
        if optimizer in self._known:
            self._n_known += 1
            return
        if is_parents_step(optimizer):
            return
        if self._begun.pop(id(optimizer), self._n_known) == self._n_known:
            refuse_stranger(optimizer, self._known, self._trained, given)
        if not self._told:
            self._n_others += 1
            if self._n_others == OTHER_STEPS:
                name = type(optimizer).__name__
                self._tell(f"{OTHER_STEPS} steps were made by other optimizers ({name}), which may train another model")

    def _tell(self, what: str) -> None:
        self._told = True
        _logger.warning("since the last counted step %s: %s", what, _NOT_COUNTED)

    def trains(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """All of them have stepped: whether there was a gradient, also one of a closure, or of an optimizer inside that
        stepped during backward(), or one of them may need none.
        """
        had = self._has_gradient or any(map(_has_gradient, optimizers))
        # Torch's own change nothing without a gradient; others may search, or step during backward().
        had = had or not all(type(one).__module__.startswith("torch.optim.") for one in optimizers)
        self._has_gradient = False
        return had

    def tell_empty(self, tokens: int) -> None:
        """Tell once of a step that trained nothing."""
        if not self._told_empty:
            self._told_empty = True
            _logger.warning(
                "optimizer.step() changed nothing, as no parameter of the optimizer has a gradient: its %d tokens are "
                "not counted, and such a step is none; call loss.backward() before it, and zero_grad() after it",
                tokens,
            )

    def refuse_uncounted(self) -> None:
        """Raises ConfigError at the end of a block in which no step was counted, and parameters changed."""
        if self._elements() != self._begin:
            raise ConfigError(f"no step of this loop was counted, and the model's parameters changed: {_NOT_COUNTED}")


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


_NOT_COUNTED = (
    "a step is counted when the optimizers that the loop was given have stepped; give dips.DiLoCo the model that is "
    "trained and the optimizers that step it, and make them before it is entered"
)


# ---- losses ----------------------------------------------------------------------------------------------------------


READ_EVERY_S = 2.0


class Losses:
    """Adds up losses in nats per token, of one optimizer.step() or of several."""

    def __init__(self) -> None:
        self._on_host: list[float] = []
        self._on_device: torch.Tensor | None = None
        self._n_on_device = 0
        self._read_s = -math.inf
        self._told = False

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
        if not math.isfinite(total) and not self._told:
            self._told = True
            _logger.warning(
                "sync.report() or count() got a loss that is %s: if the parameters are no longer finite, either, this "
                "cluster's push will be excluded; look at its data, its learning rate and overflows of 16-bit numbers",
                total,
            )
        return total / count if count else math.nan
