"""Copies a torch model's parameters to one flat float32 vector, and back.

Takes the parameters that require gradients, tied ones once. Buffers (running statistics) stay each cluster's own, or
follow behind the parameters where the run averages them (docs/decisions/0030-averaged-buffers.md). The inner
optimizer's state is never read and never sent. Shapes: see core/layout.py.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, combinations, groupby, pairwise
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from dips.core.allocator import zeros
from dips.core.errors import ConfigError
from dips.core.layout import AVERAGED_LAYER, DEFAULT_BLOCK_ELEMS, Layout, Parameter, layer_of
from dips.core.messages import TensorDigest
from dips.core.model_description import MAX_TOLD, OF_PEFT, Adapter, Lacking, ModelDescription, Untrained
from dips.core.net.payloads import SnapshotReady, hashing_copy
from dips.worker.parameters import ChunkSums

# ---- wrapped ---------------------------------------------------------------------------------------------------------
#
# Unwraps the model and the optimizer from the wrappers of trainers.
#
# Names of parameters must be the same on every cluster, whether it runs one process or eight, compiles its model or
# not, as a whole or block by block; and a step must be noticed where it is made. So wrappers are removed, and what they
# put into names is left out; those that cut a model or its optimizer state into shards are refused. A wrapper is known
# by its type, as a user's own submodule may have any name. Imports no wrapper: a program does not use one that it has
# not imported.


_TRAINERS = frozenset({"accelerate", "lightning", "pytorch_lightning"})
_SHARDED_MODELS = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine"})
_SHARDED_OPTIMIZERS = frozenset({"ZeroRedundancyOptimizer", "DeepSpeedOptimizerWrapper"})
_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
    ("lightning_fabric.wrappers", "_FabricModule", "_forward_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
"""Where a wrapper is defined, its class, and the attribute in which it holds a module."""


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model without wrappers around it, such as DistributedDataParallel and torch.compile."""
    return list(_with_wrappers(model))[-1]


def called_module(model: torch.nn.Module) -> torch.nn.Module:
    """Whose hooks hear of the model's calls: a compiled wrapper's, as those of what it wraps are traced; else the plain
    model's.
    """
    for each in _with_wrappers(model):
        if (inner := _wrapped(each)) is not None and inner[0] == "_orig_mod":
            return each
    return plain_model(model)


def replica_ranks(model: torch.nn.Module) -> Sequence[int]:
    """The ranks of torch.distributed's world to which DistributedDataParallel gave the same parameters; none where it
    does not wrap the model.
    """
    for each in _with_wrappers(model):
        if isinstance(each, DistributedDataParallel):
            return dist.get_process_group_ranks(each.process_group)
    return ()


def _with_wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The given model, the model inside its wrapper, and so on; the plain model is the last."""
    while True:
        yield model
        inner = _wrapped(model)
        if inner is None:
            return
        model = inner[1]


def _wrapped(module: torch.nn.Module | None) -> tuple[str, torch.nn.Module] | None:
    """The attribute in which a wrapper holds a module, and that module; None: it is no wrapper."""
    for source, kind, key in _WRAPPERS:
        wrapper = getattr(sys.modules.get(source), kind, None)
        if wrapper is not None and isinstance(module, wrapper):
            inner = module._modules[key]
            assert inner is not None, "a wrapper holds a module"
            return key, inner
    return None


def plain_name(model: torch.nn.Module, name: str) -> str:
    """A dotted name in the model without the parts that wrappers of its modules put into it. (torch leaves some of
    them out of a state_dict's names itself.)
    """
    parts: list[str] = []
    module: torch.nn.Module | None = model
    for part in name.split("."):
        inner = _wrapped(module)
        while inner is not None and inner[0] != part:
            inner = _wrapped(module := inner[1])
        if inner is not None:
            module = inner[1]
        else:
            parts.append(part)
            module = None if module is None else module._modules.get(part)
    return ".".join(parts)


def plain_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Each name -> the name without the parts that wrappers put into it. Raises ConfigError where two become one."""
    if not any(map(_wrapped, model.modules())):
        return {name: name for name in names}
    plain: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in names:
        plain[name] = plain_name(model, name)
        other = first.setdefault(plain[name], name)
        if other != name:
            raise ConfigError(
                f"{other!r} and {name!r} are both called {plain[name]!r} without what the wrapper around a module puts "
                "into names: give one of the two another name"
            )
    return plain


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """As the model's own, with plain names."""
    named = list(model.named_parameters())
    plain = plain_names(model, (name for name, _ in named))
    return [(plain[name], parameter) for name, parameter in named]


def named_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """As the model's own, with plain names."""
    named = list(model.named_buffers())
    plain = plain_names(model, (name for name, _ in named))
    return [(plain[name], buffer) for name, buffer in named]


def saved_buffers(model: torch.nn.Module) -> list[str]:
    """Plain names of the buffers that a state_dict has."""
    lasting = [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    ]
    return list(plain_names(model, lasting).values())


def former_names(model: torch.nn.Module) -> dict[str, str]:
    """Plain name -> the name with the wrappers' parts, as earlier releases used it; only those that differ."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {plain: name for name, plain in plain_names(model, names).items() if plain != name}


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose step() changes parameters, without the wrappers of Accelerate and Lightning.

    Other wrappers stay: they may change parameters after the inner optimizer has.
    """
    while type(optimizer).__module__.split(".")[0] in _TRAINERS:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def _contained(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizers among an optimizer's attributes, alone or in lists and dictionaries, however deep."""
    seen: set[int] = {id(optimizer)}

    def found(held: object) -> Iterator[torch.optim.Optimizer]:
        if id(held) in seen or not isinstance(held, torch.optim.Optimizer | Mapping | list | tuple | Set):
            return
        seen.add(id(held))
        if isinstance(held, torch.optim.Optimizer):
            yield held
        else:
            yield from chain.from_iterable(map(found, held.values() if isinstance(held, Mapping) else held))

    return found(vars(optimizer))


def with_contained(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers and those inside of them, each once."""
    found: dict[int, torch.optim.Optimizer] = {}
    left = list(optimizers)
    while left:
        each = left.pop()
        if id(each) not in found:
            found[id(each)] = each
            left += _contained(each)
    return list(found.values())


def innermost(
    optimizers: Iterable[torch.optim.Optimizer], outside: frozenset[torch.optim.Optimizer] = frozenset()
) -> list[torch.optim.Optimizer]:
    """The optimizers that keep the moments: those inside of containers, such as torchtitan's, and of other wrappers.
    outside: those that contain these, to which one of them may point back.

    Raises ConfigError where those inside of one do not step all of its parameters: who keeps the others' moments is
    then unknown.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    for outer in optimizers:
        around = outside | {outer}
        inner = innermost((each for each in _contained(outer) if each not in around), around)
        lacks = len(stepped_by([outer]) - stepped_by(inner))
        if inner and lacks:
            raise ConfigError(
                f"{type(outer).__name__} contains {type(inner[0]).__name__}, which does not step {lacks} of its "
                "parameters: their moments cannot be found; give the optimizers themselves, as a list"
            )
        found |= {id(each): each for each in inner or [outer]}
    return list(found.values())


def refuse_stranger(
    optimizer: torch.optim.Optimizer, known: Set[torch.optim.Optimizer], trained: Set[int], given: Mapping[str, Any]
) -> None:
    """Raises ConfigError for an optimizer that is not known and has stepped one of the tensors `trained` (ids), except
    for one without moments of its own that a known one calls.

    given: to its step(), in whose hook this is called. One by which torch makes an optimizer's state is no step.
    """
    optimizer = plain_optimizer(optimizer)
    if optimizer in known:
        return
    ours = stepped_by([optimizer]) & trained
    keeps_none = not _has_tensors(optimizer.state) or any(optimizer.state is each.state for each in known)
    is_part = keeps_none and any(each in known for each in _open_steps())
    if ours and not is_part and not makes_state_only(optimizer, given):
        raise ConfigError(
            f"{type(optimizer).__name__} steps {len(ours)} of the model's parameters, and is none of the optimizers "
            "that the loop knows, so that its moments would be neither reset nor saved: give dips.DiLoCo all that step "
            "the model as a list, made before it is entered; for an evaluation step copy.deepcopy(model); after an "
            "error in a trainer, call the close() of its callback first (docs/integrations.md)"
        )


def skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer's step changed nothing, since GradScaler found an overflow: of those it calls step(),
    and says so to the optimizer until the step is over. Waits for the device, as GradScaler does for the others."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(local(found).item())


_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""By which torch calls the hooks of a step()."""


def is_parents_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that asks is that of a step() within another of the same optimizer: a subclass's step() calls
    its parent's, for which torch calls the hooks too once there is an optimizer of the parent's class.
    """
    return sum(each is optimizer for each in _open_steps()) > 1


def _open_steps() -> Iterator[object]:
    """The optimizers in whose step() the caller is. A count by hooks would stay after a step() that raised."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            yield frame.f_locals.get("self")
        frame = frame.f_back


def makes_state_only(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> bool:
    """Whether a step was torch's own, by which get_optimizer_state_dict() makes an optimizer's state: of a rate and
    gradients of zero, and called with `closure=None`. (Gradients alone would not be the same on all ranks.)
    """
    if given != {"closure": None}:
        return False
    for group in optimizer.param_groups:
        rate: Any = group.get("lr")
        on_host = isinstance(rate, float | int) or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")
        if not on_host or float(rate) != 0.0:
            return False
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return not any(bool(local(gradient).any()) for gradient in gradients)


def refuse_hidden_moments(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises ConfigError for an optimizer that has stepped and keeps its moments where only its state_dict() finds
    them: a reset, or a checkpoint of ranks, would miss them.
    """
    for optimizer in optimizers:
        own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
        if own and not any(each.state for each in innermost([optimizer])) and _has_tensors(optimizer.state_dict()):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps what it knows of earlier steps neither in `state` nor in optimizers "
                "that it contains, so that it can be neither reset nor saved: give the loop the optimizers inside of it"
            )


def _has_tensors(state: object) -> bool:
    if isinstance(state, Mapping):
        return any(map(_has_tensors, state.values()))
    return any(map(_has_tensors, state)) if isinstance(state, list | tuple) else isinstance(state, torch.Tensor)


def clear_moments(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Forget what optimizers, and those inside of them, know of earlier steps."""
    for optimizer in with_contained(optimizers):
        optimizer.state.clear()


def as_list(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, as a list."""
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def stepped_by(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    """id() of each tensor that one of them steps."""
    return frozenset(
        id(tensor) for optimizer in optimizers for group in optimizer.param_groups for tensor in group["params"]
    )


def refuse_shards(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for shards of the model or of the optimizer's state that are no DTensors."""
    kinds = {type(module).__name__ for module in model.modules()} & _SHARDED_MODELS
    kinds |= {type(optimizer).__name__} & _SHARDED_OPTIMIZERS
    if type(optimizer).__module__.split(".")[0] == "deepspeed":
        kinds.add("DeepSpeed")
    if kinds:
        raise ConfigError(
            f"{sorted(kinds)[0]} cuts the model or its optimizer state into shards in a form of its own: use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), whose shards a cluster pushes and pulls, or DistributedDataParallel"
        )


# ---- untrained -------------------------------------------------------------------------------------------------------
#
# Computes digests of a torch model's untrained tensors, for the master to compare (docs/decisions/0029).
#
# Reads each tensor once, at the start, at the speed of memory or of a GPU's link to the host. Never keeps a copy.


PIECE_ELEMS = 1 << 24
"""Size of one copy to the host, for a tensor on a device."""

_logger = logging.getLogger("dips")

_MOVING = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.utils.parametrizations._SpectralNorm,
)
"""Modules whose buffers are running statistics: they differ between clusters from the first step on."""


class UntrainedTensor(NamedTuple):
    """A frozen parameter or a buffer. has_contents: it counts with its values, which training does not move."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    has_contents: bool


def untrained_tensors(model: torch.nn.Module, trained: Set[int]) -> list[UntrainedTensor]:
    """Every parameter and buffer of the model that is not among `trained` (ids of tensors), tied ones once."""
    moving = moving_buffers(model)
    frozen = [UntrainedTensor(name, p, False, True) for name, p in named_parameters(model) if id(p) not in trained]
    named = [(name, b) for name, b in named_buffers(model) if id(b) not in trained]
    return frozen + [UntrainedTensor(name, b, True, id(b) not in moving) for name, b in named]


def untrained_of(model: torch.nn.Module, trained: Set[int]) -> Untrained:
    """Digests of every parameter and buffer of the model that is not among `trained` (ids of tensors), tied ones once.

    Contents of running statistics are left out, and so are those that cannot be read (on the meta device, say), which
    is logged.
    """
    listed = untrained_tensors(model, trained)
    return Untrained(
        tuple(TensorDigest(each.name, digest_of(each.name, each)) for each in listed if not each.is_buffer),
        tuple(TensorDigest(each.name, digest_of(each.name, each)) for each in listed if each.is_buffer),
    )


def running_statistics(model: torch.nn.Module, trained: Set[int]) -> list[str]:
    """Names of floating-point buffers that training moves, and that are not among `trained` (ids of tensors)."""
    moving = moving_buffers(model) - trained
    return [name for name, buffer in named_buffers(model) if id(buffer) in moving and buffer.is_floating_point()]


def moving_buffers(model: torch.nn.Module) -> set[int]:
    """ids of the buffers that training moves by itself, in modules known to do so."""
    return {id(b) for m in model.modules() if isinstance(m, _MOVING) for b in m.buffers(recurse=False)}


def digest_of(name: str, untrained: UntrainedTensor) -> int:
    """name: for the log."""
    tensor = local(untrained.tensor)
    digest = begun_digest(tensor.dtype, tensor.shape)
    if untrained.has_contents:
        try:
            _add(digest, tensor)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            _logger.warning(
                "the values of %r cannot be read and are not compared with other clusters': %s", name, error
            )
            return xxhash.xxh3_64_intdigest(f"{tensor.dtype} {list(tensor.shape)} unread".encode())
    return int(digest.intdigest())


def begun_digest(dtype: torch.dtype, shape: Sequence[int]) -> xxhash.xxh3_64:
    """The digest of a tensor before the bytes of its elements, in logical order."""
    return xxhash.xxh3_64(f"{dtype} {list(shape)}".encode())


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


# ---- model description -----------------------------------------------------------------------------------------------
#
# Describes a model for exports: its tensors that the run does not train, and the configurations of a transformers model
# and of peft's adapter in it (core/model_description.py).
#
# Never imports transformers or peft: a program that trains one of their models has done so.


def description_of(model: torch.nn.Module, held: Set[int] | None = None, untrained: Untrained | None = None) -> str:
    """JSON for the layout; empty for a model that is trained completely and is neither of transformers nor of peft.

    held: ids of the tensors that versions hold; None: those that require gradients. untrained: digests of the others.
    A transformers model may be inside of another module (a LightningModule, say), which gives its names a prefix.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    held = trained if held is None else held
    adapter = _adapter_of(model, held)
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    for name, module in model.named_modules():
        if kind is not None and isinstance(module, kind) and trained <= {id(p) for p in module.parameters()}:
            config = json.loads(module.config.to_json_string())
            config["architectures"] = [type(module).__name__]
            prefix = f"{plain_name(model, name)}." if name else ""
            described = _descriptions(module, held, untrained or Untrained(), prefix, config)
            return replace(described, adapter=adapter).to_json()
    described = _descriptions(model, held, untrained or Untrained(), "", {})
    return replace(described, adapter=adapter).to_json() if described.n_absent or adapter is not None else ""


def _adapter_of(model: torch.nn.Module, held: Set[int]) -> Adapter | None:
    """The adapter of peft that the run trains; None: the model has none, or trains another part of itself."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return None
    layout_names = {id(p): name for name, p in (*named_parameters(model), *named_buffers(model)) if id(p) in held}
    for path, module in model.named_modules():
        injected = getattr(module, "_hf_peft_config_loaded", False)  # by transformers' own add_adapter()
        if not injected and not isinstance(module, getattr(peft, "PeftModel", ())):
            continue
        named: list[tuple[str, torch.Tensor]] = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        # Names in place of tensors: peft says what is called how in the folder, and nothing is copied or gathered.
        state = {name: layout_names.get(id(tensor), "") for name, tensor in named}
        folder_prefix = "base_model.model." if injected else ""
        prefix = f"{plain_name(model, path)}." if path else ""
        found = []
        for adapter, config in module.peft_config.items():
            if config.is_prompt_learning:
                found.append(Adapter(adapter, why_not="it is made of prompts, which peft computes as it saves them"))
                continue
            try:
                with warnings.catch_warnings(action="ignore"):
                    files = peft.get_peft_model_state_dict(
                        module, state_dict=state, adapter_name=adapter, save_embedding_layers=False
                    )
                if any(isinstance(name, str) and name for name in files.values()):
                    files = {folder_prefix + plain_name(module, file): name for file, name in files.items()}
                    found.append(
                        _described_adapter(module, adapter, config, prefix, folder_prefix, files, layout_names)
                    )
            except Exception as error:  # a library's own
                found.append(Adapter(adapter, why_not=f"peft cannot say what is in it ({error!r:.200})"))
        if len(found) > 1:
            return Adapter(why_not=f"it trains {len(found)} adapters, such as {found[0].name!r} and {found[1].name!r}")
        return found[0] if found else None
    return None


def _described_adapter(
    module: Any, adapter: str, config: Any, prefix: str, folder_prefix: str, files: Mapping[str, object],
    layout_names: Mapping[int, str],
) -> Adapter:  # fmt: skip
    """files: name in the folder -> name in the layout, empty where versions do not hold it."""
    absent = [file for file, name in files.items() if not isinstance(name, str) or not name]
    if absent:
        return Adapter(adapter, why_not=f"the run does not train {len(absent)} of its tensors, such as {absent[0]!r}")
    raw = {**config.to_dict(), "inference_mode": True}
    if raw.get("task_type") is None:
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        raw["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in raw.items()}
    described = Adapter(adapter, json.loads(json.dumps(plain)), prefix, folder_prefix)
    in_folder = dict.fromkeys(layout_names.values(), "") | {str(name): file for file, name in files.items()}
    names = {name: file for name, file in in_folder.items() if described.in_folder(name) != file}
    scaling = _scaling_of(module, adapter, config, folder_prefix)
    return replace(described, names=names, scaling=scaling)


def _scaling_of(module: torch.nn.Module, adapter: str, config: Any, folder_prefix: str) -> dict[str, float]:
    """As Adapter.scaling. Only where an adapted module is a matrix, what it adds is known without peft."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    trained_as_a_whole = getattr(sys.modules.get("peft.utils"), "ModulesToSaveWrapper", ())
    factors: dict[str, float] = {}
    for path, layer in module.named_modules():
        parent, _, last = path.rpartition(".")
        if last in OF_PEFT and not hasattr(module.get_submodule(parent), "adapter_layer_names"):
            return {}  # the model's own module has such a name
        if not hasattr(layer, "adapter_layer_names") or isinstance(layer, trained_as_a_whole):
            continue
        linear, embedding = getattr(lora, "Linear", None), getattr(lora, "Embedding", None)
        turned = type(layer) is linear and layer.fan_in_fan_out is not bool(config.fan_in_fan_out)
        if type(layer) not in (linear, embedding) or adapter not in layer.scaling or turned or layer.merged_adapters:
            return {}
        if any(getattr(layer, option, {}).get(adapter) for option in ("lora_variant", "use_dora", "lora_bias")):
            return {}
        factors[folder_prefix + plain_name(module, path)] = float(layer.scaling[adapter])
    ((usual, _),) = Counter(factors.values()).most_common(1) or [(1.0, 0)]
    return {"": usual, **{name: factor for name, factor in factors.items() if factor != usual}}


def _descriptions(
    module: torch.nn.Module, held: Set[int], untrained: Untrained, prefix: str, config: dict[str, object]
) -> ModelDescription:
    """The tensors to describe. Tied tensors are one object under several names, of which the first counts. A batch
    norm's counter is left out where it has no effect: no file needs it.
    """
    idle = {
        id(norm.num_batches_tracked)
        for norm in module.modules()
        if isinstance(norm, torch.nn.modules.batchnorm._NormBase) and norm.momentum is not None
    }
    moving = moving_buffers(module)
    digests = {item.name: item.digest for item in (*untrained.frozen, *untrained.buffers)}
    seen, lacks = set(held) | idle, []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not isinstance(tensor, torch.Tensor):
            continue
        seen.add(id(tensor))
        name = plain_name(module, name)
        digest = None if id(tensor) in moving else digests.get(prefix + name)
        lacks.append(Lacking(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest))
    return ModelDescription(config, prefix, tuple(one.name for one in lacks[:MAX_TOLD]), len(lacks), tuple(lacks))


# ---- torch model -----------------------------------------------------------------------------------------------------


F32 = NDArray[np.float32]


GROUP_ELEMS = 1 << 22
"""Elements of one copy: 16 MiB take about a millisecond to the host, so that sending begins soon."""

LARGE_ELEMS = 1 << 15
"""Smaller tensors are copied many at a time."""

ONE_THREAD_ELEMS = 1 << 15
"""Torch computes on so many elements without waking other threads, which would spin while they wait."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Those of the layout's, by name."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One that steps the model, or several that step different parameters of it, as Muon and AdamW do."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchParameters:
    """The ParameterStore of a module and its inner optimizer, or several, on CPU or on CUDA devices."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        *,
        block_elems: int = DEFAULT_BLOCK_ELEMS,
        description: str = "",
        buffers: str = "own",
    ) -> None:
        """Check the model. description: for the layout. buffers: "average" makes the saved floating-point ones part of
        it.

        Raises ConfigError, with the tensor's name, for a parameter or buffer that cannot be copied to and from a flat
        vector (of an unsupported dtype, sharded, without values, sparse, over memory that it shares with itself or
        partly with another one), and for another model's optimizer; Refused(LAYOUT) for a model without trainable
        parameters.
        """
        named = {name: p for name, p in named_parameters(model) if p.requires_grad}
        self._model = model
        self._optimizers = as_list(optimizer)
        self._buffers = averaged_buffers(model) if buffers == "average" else {}
        held = {name: module.get_buffer(key) for name, (module, key) in self._buffers.items()}
        for name, p in named.items():
            if _is_shard(p):
                raise ConfigError(
                    f"parameter {name!r} is sharded over devices, and this cluster is one process: start all ranks "
                    "with DIPS_MASTER, or use one device"
                )
        rows = [described(name, p) for name, p in named.items()]
        rows += [as_averaged(name, buffer) for name, buffer in held.items()]
        layout = Layout(tuple(rows), block_elems)
        refuse_shared_memory(named)
        self._layout = replace(layout, description=description)
        tensors: dict[str, torch.Tensor] = {**named, **held}
        self._spans = [(tensors[s.parameter.name], s.start_elem, s.stop_elem) for s in self._layout.spans]
        self._parameters: list[torch.Tensor] = [tensor for tensor, _, _ in self._spans]
        if self.ids.isdisjoint(stepped_by(self._optimizers)):
            raise ConfigError(
                "the optimizer holds none of the model's parameters: make it of model.parameters(), after the model "
                "was moved to its device"
            )
        self._groups = _groups(self._spans)
        trained = self._spans[: len(named)]  # a statistic is pushed unchanged
        self._narrow = narrow_runs((tensor.dtype, start, stop) for tensor, start, stop in trained)
        self._devices = {group.device for group in self._groups if group.device.type == "cuda"}
        self._sides = {device: torch.cuda.Stream(device) for device in self._devices}

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The parameters themselves, in layout order."""
        return self._parameters

    @property
    def ids(self) -> frozenset[int]:
        """id() of each tensor of the layout: the model's other tensors are not part of the run."""
        return frozenset(map(id, self._parameters))

    def layout(self) -> Layout:
        return self._layout

    def describe(self, description: str) -> None:
        """Set the description that goes with the layout, for exports."""
        self._layout = replace(self._layout, description=description)

    def empty(self, n_elems: int) -> F32:
        """A vector; for a model on CUDA devices in pinned memory, since other memory is copied much more slowly."""
        if not self._devices:
            return zeros(n_elems)
        with torch.cuda.device(next(iter(self._devices))):  # a thread begins with the first one, to use or not
            pinned: F32 = torch.empty(n_elems, dtype=torch.float32, pin_memory=True).numpy()
        return pinned

    def begin_snapshot(self, into: F32, sums: ChunkSums | None = None) -> SnapshotReady | None:
        """Begin a snapshot. On CUDA devices the copies run in parallel with the host; the next kernel that changes a
        parameter waits for them on the device, the host never does. Their checksums are left to the sender, which is
        the first on the host to read them.
        """
        self._check_still_trained()
        self._find_buffers()
        places = self._places(into)
        events: list[torch.cuda.Event | None] = []
        for device, side in self._sides.items():
            side.wait_stream(torch.cuda.current_stream(device))
        for group in self._groups:
            if sums is not None and group.device.type == "cpu":
                self._copy_hashed(group, places[group.first : group.last], sums)
                events.append(None)
            else:
                events.append(self._copy_out(group, places[group.first : group.last]))
        for device, side in self._sides.items():
            torch.cuda.current_stream(device).wait_stream(side)
        return _Copied([group.stop_elem for group in self._groups], events) if self._devices else None

    def snapshot(self, into: F32) -> None:
        ready = self.begin_snapshot(into)
        if ready is not None:
            ready.wait(0, self._layout.n_elems)

    def install(self, flat: F32) -> None:
        self._find_buffers()
        # Past the caches where that pays: nothing of a large model is still in them when training reads it.
        copy = hashing_copy(flat.nbytes) or np.copyto
        _copy(self._parameters, self._places(flat), beside_host=bool(self._devices), copy=copy)
        wait_for(self._devices)  # the vector may be written again as soon as this returns

    @property
    def rounds(self) -> bool:
        return bool(self._narrow)

    def add_rounded_off(self, flat: F32, installed: F32, start_elem: int, stop_elem: int) -> None:
        add_rounded_off(self._narrow, flat, installed, start_elem, stop_elem)

    def live(self) -> Sequence[F32] | None:
        self._check_still_trained()
        self._find_buffers()
        if self._layout.n_elems < len(self._parameters) * LARGE_ELEMS or not all(map(_is_plain, self._parameters)):
            return None  # many tiny ones are copied faster than they are listed
        return [_plain(parameter) for parameter in self._parameters]

    def _copy_out(self, group: _Group, places: list[torch.Tensor]) -> torch.cuda.Event | None:
        side = self._sides.get(group.device)
        with torch.cuda.stream(side):
            _copy(places, self._parameters[group.first : group.last], beside_host=side is not None)
            if side is None:
                return None
            event = torch.cuda.Event()
            event.record(side)
            return event

    def _copy_hashed(self, group: _Group, places: list[torch.Tensor], sums: ChunkSums) -> None:
        """Copy a group on the host, in order: large plain parameters with their checksums, others many at a time."""
        numbers = range(group.first, group.last)
        for hashed, run in groupby(numbers, lambda i: _is_large(self._parameters[i])):
            if hashed:
                for i in run:
                    sums.copy(_plain(self._parameters[i]), self._spans[i][1])
            else:
                several = list(run)
                own = [self._parameters[i] for i in several]
                _copy([places[i - group.first] for i in several], own, beside_host=False)
                sums.copied(self._spans[several[0]][1], self._spans[several[-1]][2])

    def _places(self, flat: F32) -> list[torch.Tensor]:
        """Each parameter's place in a flat vector, in the parameter's shape; made together, since there may be many."""
        views: list[torch.Tensor] = torch._utils._unflatten_dense_tensors(torch.from_numpy(flat), self._parameters)
        return views

    def reset_inner_optimizer(self) -> None:
        clear_moments(self._optimizers)

    def _check_still_trained(self) -> None:
        """Check the model before a push. Raises ConfigError when it trains a parameter that the layout lacks, or in
        another dtype.
        """
        ours = self.ids
        for known, now in zip(self._layout.parameters, self._parameters, strict=True):
            refuse_another_dtype(known, now)
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad or id(parameter) in ours:
                continue
            name = plain_name(self._model, name)
            if any(name == p.name for p in self._layout.parameters):
                raise ConfigError(
                    f"parameter {name!r} is another tensor than when the loop was entered, so that no push holds it "
                    "and no version reaches it: enter the loop once the model is complete and on its device"
                )
            raise ConfigError(
                f"parameter {name!r} requires gradients and did not when the loop was entered, so that this cluster "
                "alone would train it: set requires_grad=False, or unfreeze it before the loop is entered, on all "
                "clusters and in a new run"
            )

    def _find_buffers(self) -> None:
        """Find the buffers again: a module may replace a buffer's tensor (`self.mean = 0.9 * self.mean + ...`). Raises
        ConfigError for one that does not fit.
        """
        first = len(self._parameters) - len(self._buffers)
        for at, (name, (module, key)) in enumerate(self._buffers.items(), first):
            known, now = self._parameters[at], module._buffers.get(key)
            if now is known:
                continue
            if now is None or (now.shape, now.dtype, now.device) != (known.shape, known.dtype, known.device):
                raise ConfigError(
                    f"buffer {name!r} has another shape, type or device than when the loop was entered: enter the loop "
                    "once the model is complete and on its device"
                )
            self._parameters[at] = now


@dataclass(frozen=True)
class _Group:
    """Parameters [first, last), adjacent in the flat vector and on one device, with one event for all."""

    device: torch.device
    first: int
    last: int
    stop_elem: int


def averaged_buffers(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Name -> (module, attribute) of the floating-point buffers in a state_dict, tied ones once.

    Those that hold infinities (a mask) are constants, which have no mean: each cluster keeps its own.
    """
    found: dict[str, tuple[torch.nn.Module, str]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{key}" if prefix else key
            if not buffer.is_floating_point() or not buffer.numel():
                continue
            if buffer.is_meta or _shares_with_itself(buffer):
                why = "is on the meta device and has no values" if buffer.is_meta else "is expanded, without own memory"
                raise ConfigError(
                    f"buffer {name!r} {why}: load or clone it before the loop is entered, or register it with "
                    "persistent=False"
                )
            if not local(buffer).isfinite().all():
                _logger.info("buffer %r holds infinities or NaN, so that it is not averaged", name)
                continue
            found[name] = (module, key)
    plain = plain_names(model, found)
    return {plain[name]: place for name, place in found.items()}


def as_averaged(name: str, buffer: torch.Tensor) -> Parameter:
    """The row of an averaged buffer in the layout. Raises ConfigError for a dtype that has no mean."""
    dtype = _DTYPE_NAMES.get(buffer.dtype)
    if dtype is None:
        raise ConfigError(
            f"buffer {name!r} is {str(buffer.dtype).removeprefix('torch.')}: float32, bfloat16 and float16 are "
            "averaged; convert it, or register it with persistent=False"
        )
    return Parameter(name, tuple(buffer.shape), dtype, AVERAGED_LAYER, averaged=True)


def _groups(spans: Sequence[tuple[torch.Tensor, int, int]]) -> list[_Group]:
    """Groups of whole parameters, each just large enough for GROUP_ELEMS."""
    groups: list[_Group] = []
    for i, (parameter, start, stop) in enumerate(spans):
        last = groups[-1] if groups else None
        if last is not None and last.device == parameter.device and start - spans[last.first][1] < GROUP_ELEMS:
            groups[-1] = _Group(last.device, last.first, i + 1, stop)
        else:
            groups.append(_Group(parameter.device, i, i + 1, stop))
    return groups


@dataclass(frozen=True)
class Narrow:
    """Adjacent elements of a flat vector whose parameters have this dtype of 16 bits."""

    dtype: torch.dtype
    start_elem: int
    stop_elem: int


def narrow_runs(runs: Iterable[tuple[torch.dtype, int, int]]) -> list[Narrow]:
    """Those of 16 bits, of runs (dtype, start, stop) in flat order; none for a model in float32."""
    narrow: list[Narrow] = []
    for dtype, start, stop in runs:
        if dtype is torch.float32:
            continue
        if narrow and (narrow[-1].dtype, narrow[-1].stop_elem) == (dtype, start):
            start = narrow.pop().start_elem
        narrow.append(Narrow(dtype, start, stop))
    return narrow


def add_rounded_off(narrow: Sequence[Narrow], flat: F32, installed: F32, start_elem: int, stop_elem: int) -> None:
    """As RoundingStore's. bfloat16 and float16 are rounded to nearest even, as the copies of install() do."""
    first_run = bisect_right(narrow, start_elem, key=lambda run: run.stop_elem)
    for run in narrow[first_run:]:
        stop = min(run.stop_elem, stop_elem)
        for start in range(max(run.start_elem, start_elem), stop, ONE_THREAD_ELEMS):
            here = slice(start, min(start + ONE_THREAD_ELEMS, stop))
            now, was = torch.from_numpy(flat[here]), torch.from_numpy(installed[here])
            now.sub_(was.to(run.dtype)).add_(was)
        if run.stop_elem >= stop_elem:
            break


class _Copied:
    """A snapshot under way. stops: of the groups, in flat order; events: when each is copied, None: already."""

    def __init__(self, stops: Sequence[int], events: Sequence[torch.cuda.Event | None]) -> None:
        self._stops = stops
        self._events = events

    def wait(self, start_elem: int, stop_elem: int) -> None:
        for i in range(bisect_right(self._stops, start_elem), len(self._stops)):
            event = self._events[i]
            if event is not None:
                event.synchronize()
            if self._stops[i] >= stop_elem:
                break


def _copy(
    into: Sequence[torch.Tensor],
    source: Sequence[torch.Tensor],
    *,
    beside_host: bool,
    copy: Callable[[F32, F32], object] = np.copyto,
) -> None:
    """Copy each source. Large ones on the host by `copy`: torch would wake threads that spin while they wait."""
    rest: list[tuple[torch.Tensor, torch.Tensor]] = []
    for pair in zip(into, source, strict=True):
        if _is_large(pair[0]) and _is_plain(pair[1]):
            copy(_plain(pair[0]), _plain(pair[1]))
        else:
            rest.append(pair)
    if rest:
        with torch.no_grad():
            torch._foreach_copy_([one for one, _ in rest], [other for _, other in rest], non_blocking=beside_host)


def _is_large(tensor: torch.Tensor) -> bool:
    """Whether it is copied on its own, from or to its memory."""
    return tensor.numel() >= LARGE_ELEMS and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is float32 in logical order on the host."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32 and tensor.is_contiguous()


def _plain(tensor: torch.Tensor) -> F32:
    """The memory of a plain tensor."""
    flat: F32 = tensor.detach().reshape(-1).numpy()
    return flat


def wait_for(devices: Iterable[torch.device]) -> None:
    """Return when copies on all these CUDA devices are done; without a device torch waits only for the current one."""
    for device in devices:
        torch.cuda.synchronize(device)


def refuse_another_dtype(known: Parameter, now: torch.Tensor) -> None:
    """Raises ConfigError for a parameter that was converted inside of the block."""
    if _DTYPE_NAMES.get(now.dtype) != known.dtype:
        raise ConfigError(
            f"parameter {known.name!r} is {str(now.dtype).removeprefix('torch.')}, and was {known.dtype} when the loop "
            "was entered: convert the model before that, on all clusters and in a new run"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds; any other tensor as it is. Shares its memory, needs no message."""
    if not hasattr(tensor, "device_mesh"):
        return tensor.detach()
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def has_shards(model: torch.nn.Module) -> bool:
    """Whether a parameter is a DTensor: cut, or with a place on a mesh of devices."""
    return any(map(_is_shard, model.parameters()))


def _is_shard(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")


def described(name: str, parameter: torch.Tensor) -> Parameter:
    """The row of a trained tensor in the layout; of a shard with its global shape. Raises ConfigError for a tensor that
    cannot be copied to and from a flat vector.
    """
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(
            f"parameter {name!r} has no shape yet, as its module is lazy: pass a batch through the model, then make "
            "the optimizer, then enter"
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(
            f"parameter {name!r} is stored as {str(parameter.layout).removeprefix('torch.')}, which is not supported: "
            "make it dense with to_dense(), or set requires_grad=False if it is not trained"
        )
    if parameter.is_meta:
        raise ConfigError(
            f"parameter {name!r} is on the meta device and has no values: load or initialize the model on the device "
            "that trains it, then enter"
        )
    dtype = _DTYPE_NAMES.get(parameter.dtype)
    if dtype is None:
        raise ConfigError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: float32, bfloat16 and float16 are "
            "supported; convert it, or set requires_grad=False if it is not trained"
        )
    return Parameter(name, tuple(parameter.shape), dtype, layer_of(name))


def refuse_shared_memory(named: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError for memory with two places in the flat vector, which may hold different values for it.

    Two parameters over exactly the same memory are tied, and get equal updates.
    """
    storages: dict[tuple[torch.device, int], dict[object, tuple[str, torch.Tensor]]] = {}
    for name, parameter in named.items():
        if hasattr(parameter, "__tensor_flatten__"):
            continue  # a tensor that consists of others, without own memory
        if _shares_with_itself(parameter):
            raise ConfigError(
                f"parameter {name!r} is expanded: several of its elements are one in memory; give each its own, with "
                "torch.nn.Parameter(tensor.detach().contiguous()), before the optimizer is made"
            )
        first, past = _bytes_of(parameter)
        is_dense = past - first == parameter.nbytes
        place = (first, past) if is_dense else (first, parameter.shape, parameter.stride())
        storage = (parameter.device, parameter.untyped_storage().data_ptr())
        storages.setdefault(storage, {}).setdefault(place, (name, parameter))
    for views in storages.values():
        ranges = sorted(_bytes_of(tensor) for _, tensor in views.values())
        if all(past <= first for (_, past), (first, _) in pairwise(ranges)):
            continue
        for (one, a), (other, b) in combinations(views.values(), 2):
            if _bytes_held(a, b) < a.nbytes + b.nbytes:
                raise ConfigError(
                    f"parameters {one!r} and {other!r} share a part of their memory: give each its own, with "
                    "torch.nn.Parameter(tensor.detach().clone()), before the optimizer is made"
                )


def _shares_with_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor are one in memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return stride == 0 or _bytes_held(tensor) < tensor.nbytes
        reach += stride * (size - 1)
    return False


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The tensor's first and last-plus-one byte in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + reach + 1) * tensor.itemsize


def _bytes_held(*tensors: torch.Tensor) -> int:
    """Bytes of their storage that the tensors use, each counted once. Columns of one matrix share none."""
    ranges = [_bytes_of(tensor) for tensor in tensors]
    begin = min(first for first, _ in ranges)
    marks = np.zeros(max(past for _, past in ranges) - begin, np.bool_)
    for (first, _), tensor in zip(ranges, tensors, strict=True):
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        shape = [*tensor.shape, tensor.itemsize]
        np.lib.stride_tricks.as_strided(marks[first - begin :], shape, [*strides, 1])[...] = True
    return int(np.count_nonzero(marks))
