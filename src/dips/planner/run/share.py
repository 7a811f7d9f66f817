"""Lets unequal devices compute one stage together, each on its part of the rows of every microbatch (SpanTrain, section
3.3.2, asymmetric data parallelism, Figure 7b: 1:2).

The rank that the plan gives the stage is its leader; helpers are in no plan. In each operation the leader hands them
their rows, computes its own meanwhile, and takes theirs back, so neighbours see one stage with whole microbatches:

    group = dist.new_group([2, 3])                       # the leader first; every rank calls it
    share = StageShare(group, parts=(2, 1))              # of three rows the leader computes two
    pipeline = PlannedPipeline(cells, modules, loss, device, pipeline_group, shares={2: share})     # on the leader
    helper = StageHelper(module, 2, share, device)                                                  # on the helper

Both call step() once for each iteration. Then all members have the gradients of the whole stage, so that equal
optimizers keep their parameters equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from dips.core.errors import ConfigError
from dips.planner.ir import Kind

LEADER = 0
"""Its rank in the group of a stage's members."""

MOST_DIMENSIONS = 8
ORDER_ELEMS = 4 + MOST_DIMENSIONS
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
NO_OTHER = -1
"""In place of a kind: no other operation comes in this iteration."""


class Order(NamedTuple):
    """What a leader tells its helpers to do next: a few whole numbers, and nothing that could be code."""

    kind: Kind
    microbatch: int
    shape: tuple[int, ...] = ()  # of the rows that follow a forward pass
    dtype: torch.dtype = torch.float32

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """ORDER_ELEMS int64. Raises ConfigError for rows that it cannot describe."""
        if self.dtype not in DTYPES or len(self.shape) > MOST_DIMENSIONS:
            raise ConfigError(
                f"rows of {self.dtype} with {len(self.shape)} dimensions cannot be shared: give one of "
                f"{', '.join(map(str, DTYPES))} with at most {MOST_DIMENSIONS}"
            )
        numbers = [list(Kind).index(self.kind), self.microbatch, DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (ORDER_ELEMS - len(numbers)), dtype=torch.int64, device=device)

    @classmethod
    def of_tensor(cls, said: torch.Tensor) -> Order | None:
        """Inverse of to_tensor(); None for NO_OTHER. Raises ConfigError."""
        kind, microbatch, dtype, n, *sizes = said.tolist()
        if kind == NO_OTHER:
            return None
        known = 0 <= kind < len(Kind) and 0 <= dtype < len(DTYPES) and 0 <= n <= MOST_DIMENSIONS
        if not known or microbatch < 0 or min(sizes) < 0:
            raise ConfigError(f"{said.tolist()} is not what a leader says: run the same dips on all ranks of a stage")
        return cls(list(Kind)[kind], microbatch, tuple(sizes[:n]), DTYPES[dtype])


@dataclass(frozen=True)
class StageShare:
    """Who computes a stage. group: of its members, the leader first. parts[i]: the rows of member i, in proportion: any
    whole numbers, so that members with these speeds end together."""

    group: dist.ProcessGroup
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        size = dist.get_world_size(self.group)
        if size != len(self.parts) or min(self.parts) < 1:
            raise ConfigError(
                f"a stage is shared {':'.join(map(str, self.parts))} by a group of {size} ranks: give each rank a "
                "whole number of at least 1"
            )

    @property
    def helpers(self) -> range:
        return range(1, len(self.parts))

    def rows(self, n_rows: int) -> list[int]:
        """The rows of each member. Raises ConfigError where they do not divide."""
        whole = sum(self.parts)
        if n_rows % whole:
            parts = ":".join(map(str, self.parts))
            raise ConfigError(f"{n_rows} rows of a microbatch do not divide {parts}: give a multiple of {whole}")
        return [n_rows * part // whole for part in self.parts]

    def sum_gradients(self, module: nn.Module, before: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Add up what the members have found in this iteration, and what each had before it."""
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.group)
                if parameter in before:
                    parameter.grad += before[parameter]


def gradients_put_away(module: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """The gradients from before an iteration, which the members have summed already; the module has none then."""
    found = {p: p.grad for p in module.parameters() if p.grad is not None}
    for parameter in found:
        parameter.grad = None
    return found


# ---- leader ----------------------------------------------------------------------------------------------------------


class SharedStage(PipelineStage):
    """A stage of torch's pipeline whose operations its helpers take part in."""

    def __init__(
        self,
        share: StageShare,
        module: nn.Module,
        stage: int,
        n_stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.share, self.module = share, module
        self._rows = _SplitRows(module, share, device, is_first=stage == 0)
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        super().__init__(self._rows, stage, n_stages, device, group=group)

    def begin_step(self) -> None:
        self._before = gradients_put_away(self.module)

    def end_step(self) -> None:
        """Dismiss the helpers until the next iteration, and add up the gradients."""
        self._rows.announce(None)
        self.share.sum_gradients(self.module, self._before)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._rows.at(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        # torch leaves the first stage's gradient of the input away, and does all in that of the weights.
        if full_backward or not self.is_first:
            self._rows.announce(Order(Kind.B if full_backward else Kind.D, bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._rows.announce(Order(Kind.B if self.is_first else Kind.W, bwd_chunk_id))
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class _SplitRows(nn.Module):
    """The leader's module: its own rows, and those of the helpers. When torch only wants to know shapes, all rows are
    its own."""

    def __init__(self, module: nn.Module, share: StageShare, device: torch.device, is_first: bool) -> None:
        super().__init__()
        self.module = module
        self._share, self._device, self._is_first = share, device, is_first
        self._microbatch: int | None = None
        # The first stage's input needs no gradient; the helpers' part of the graph has one by this.
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    @contextmanager
    def at(self, microbatch: int) -> Iterator[None]:
        """Forward passes in here are of this microbatch."""
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    def announce(self, order: Order | None) -> None:
        """Say to all helpers which operation comes; None: no other one in this iteration."""
        if order is None:
            said = torch.full((ORDER_ELEMS,), NO_OTHER, dtype=torch.int64, device=self._device)
        else:
            said = order.to_tensor(self._device)
        for member in self._share.helpers:
            dist.send(said, group=self._share.group, group_dst=member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._microbatch is None:
            return self.module(x)  # type: ignore[no-any-return]
        own, *others = x.split(self._share.rows(len(x)))
        for member, rows in zip(self._share.helpers, others, strict=True):
            said = Order(Kind.F, self._microbatch, tuple(rows.shape), rows.dtype).to_tensor(self._device)
            dist.send(said, group=self._share.group, group_dst=member)
        handed = [
            _Hand.apply(rows, self._anchor, self._share.group, member, self._is_first)  # type: ignore[no-untyped-call]
            for member, rows in zip(self._share.helpers, others, strict=True)
        ]
        out = self.module(own)
        taken = [
            _Take.apply(rows, out, self._share.group, member)  # type: ignore[no-untyped-call]
            for member, rows in zip(self._share.helpers, handed, strict=True)
        ]
        return torch.cat([out, *taken])


# Handing over and taking back are two nodes of the graph: the one was made before the leader's own part and the other
# after it, so autograd, which goes the other way, also sends gradients first, computes its own, and then waits.


class _Hand(torch.autograd.Function):
    """Rows to a helper; in the backward pass, their gradient from it."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, anchor: torch.Tensor, group: dist.ProcessGroup, member: int, is_first: bool
    ) -> torch.Tensor:
        ctx.at, ctx.is_first = (group, member), is_first
        dist.send(rows.detach().contiguous(), group=group, group_dst=member)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.is_first:
            return None, None, None, None, None
        group, member = ctx.at
        found = torch.empty_like(unused, memory_format=torch.contiguous_format)
        dist.recv(found, group=group, group_src=member)
        return found, None, None, None, None


class _Take(torch.autograd.Function):
    """What a helper made of its rows; in the backward pass, the gradient of that to it."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, like: torch.Tensor, group: dist.ProcessGroup, member: int
    ) -> torch.Tensor:
        ctx.at, ctx.rows = (group, member), (rows.shape, rows.dtype)
        out = torch.empty((len(rows), *like.shape[1:]), dtype=like.dtype, device=like.device)
        dist.recv(out, group=group, group_src=member)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, member = ctx.at
        dist.send(gradient.contiguous(), group=group, group_dst=member)
        shape, dtype = ctx.rows
        return torch.empty(shape, dtype=dtype, device=gradient.device), None, None, None


def shared_of(stages: Iterable[PipelineStage]) -> list[SharedStage]:
    return [stage for stage in stages if isinstance(stage, SharedStage)]


# ---- helper ----------------------------------------------------------------------------------------------------------


class StageHelper:
    """A rank that computes its part of the rows of one stage, whenever the leader says so."""

    def __init__(self, module: nn.Module, stage: int, share: StageShare, device: torch.device) -> None:
        """module: equal to the leader's, parameters too, on `device`. Of as many rows as it is given it returns as
        many, each of which depends on its own row alone."""
        self._module, self._is_first, self._share, self._device = module, stage == 0, share, device
        self._passed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._left: dict[int, list[dict[str, Any]]] = {}

    def step(self) -> None:
        """One iteration: the gradients of the whole stage are added to the module's parameters."""
        before = gradients_put_away(self._module)
        while (order := self._next()) is not None:
            if order.kind is Kind.F:
                rows = torch.empty(order.shape, dtype=order.dtype, device=self._device)
                dist.recv(rows, group=self._share.group, group_src=LEADER)
                rows.requires_grad_(not self._is_first)
                out = self._module(rows)
                self._passed[order.microbatch] = rows, out
                dist.send(out.detach().contiguous(), group=self._share.group, group_dst=LEADER)
            elif order.kind is Kind.W:
                self._weights(order.microbatch)
            else:
                self._backward(order.microbatch, whole=order.kind is Kind.B)
        self._share.sum_gradients(self._module, before)

    def _next(self) -> Order | None:
        said = torch.empty(ORDER_ELEMS, dtype=torch.int64, device=self._device)
        dist.recv(said, group=self._share.group, group_src=LEADER)
        return Order.of_tensor(said)

    def _backward(self, microbatch: int, whole: bool) -> None:
        from torch.distributed.pipelining._backward import stage_backward, stage_backward_input

        rows, out = self._passed.pop(microbatch)
        gradient = torch.empty_like(out, memory_format=torch.contiguous_format)
        dist.recv(gradient, group=self._share.group, group_src=LEADER)
        if whole:
            (found,) = stage_backward(out, gradient, [rows])
        else:
            (found,), left = stage_backward_input([out], [gradient], [rows], self._module.parameters())
            self._left[microbatch] = left
        if not self._is_first:
            assert found is not None  # a module without a gradient for its input is none of a pipeline
            dist.send(found.contiguous(), group=self._share.group, group_dst=LEADER)

    def _weights(self, microbatch: int) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self._module.parameters(), self._left.pop(microbatch))
