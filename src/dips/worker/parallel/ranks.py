"""Makes several processes one cluster: replicas of one model under torch.distributed (DistributedDataParallel).

Only rank 0 communicates with the master and moves parameters; after each step it sends news to the others, and when the
parameters were replaced, they get them from it. Those would destroy the parameters of a rank that holds another part of
the model (a shard), so all ranks compare theirs first: all parameters when they enter and before the first push, a
sample before each push after that. All ranks call the same methods in the same order. Never used when there is one
rank, and knows nothing of rounds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from dips.core.errors import ConfigError, FatalError
from dips.worker.torch_model import GROUP_ELEMS, TorchParameters

_logger = logging.getLogger("dips")

FIRST = 0
PATIENCE = timedelta(days=30)
"""How long a rank waits for the first one, which may wait for other clusters to join. A rank that died is noticed at
once, by its connection."""

SAMPLE_STRIDE = 64
"""A sample takes every 64th element of each tensor, with another offset at each push: any 64 adjacent elements (a row
of an embedding, say) are sampled at every push, and each element within 64 pushes."""

WHOLE_ELEMS = 1 << 12
"""Tensors up to this size are compared completely: norms and biases cost nothing."""

DIGEST_BYTES = 16

_REPLICAS_ONLY = (
    "all ranks of a cluster must hold the whole model (DistributedDataParallel), as this release does not gather shards"
)


@dataclass(frozen=True)
class StepNews:
    """Rank 0's news after a step."""

    # installs, resets: how often parameters and optimizer were replaced so far
    installs: int = 0
    resets: int = 0
    done: bool = False
    # timeline, version: the base, both 0 when there is none
    timeline: int = 0
    version: int = 0
    progress: int = 0  # tokens of the run
    failed: bool = False


class Ranks:
    """The ranks of this process's cluster, and its own place among them."""

    def __init__(self) -> None:
        """Call on all ranks together. Messages go over gloo, so that no device is waited for."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.n_ranks = dist.get_world_size()
        self._compared = 0

    @property
    def is_first(self) -> bool:
        return self.rank == FIRST

    def agree(self, parameters: TorchParameters | Exception, *, replicas: bool) -> None:
        """Make sure that all ranks can enter, with the same parameters; before anything is pulled, spread or pushed.

        parameters: this rank's, or why it has none that can be shared. replicas: replace different values on the other
        ranks by rank 0's. Raises ConfigError on every rank for one that cannot enter (on that one, its own
        error), for another layout, and for other values.
        """
        rows: list[list[Any]] = []
        digests: list[bytes] = []
        mine: dict[str, Any] = {"error": None, "layout": "", "values": "", "replicas": replicas}
        if isinstance(parameters, Exception):
            mine["error"] = str(parameters)
        else:
            rows, digests = _rows(parameters), _digests(parameters.trained)
            mine["layout"] = xxhash.xxh3_128_hexdigest(parameters.layout().layout_hash + json.dumps(rows).encode())
            mine["values"] = xxhash.xxh3_128_hexdigest(b"".join(digests))
        said = [json.loads(text) for text in self.gather(json.dumps(mine).encode())]
        if isinstance(parameters, Exception):
            raise parameters
        for rank, facts in enumerate(said):
            if facts["error"] is not None:
                raise ConfigError(f"rank {rank} of this cluster cannot take part: {facts['error']}")
        if len({facts["layout"] for facts in said}) > 1:
            raise ConfigError(_other_layout([json.loads(text) for text in self.gather(json.dumps(rows).encode())]))
        if len({facts["values"] for facts in said}) > 1:
            name, rank = self._first_other(rows, digests)
            where = f"parameter {name!r} has other values on rank {rank} than on rank {FIRST}"
            if not all(facts["replicas"] for facts in said):
                raise ConfigError(
                    f"{where}: {_REPLICAS_ONLY}; for replicas that are not equal yet give DiLoCo(..., replicas=True), "
                    f"which gives rank {FIRST}'s to all"
                )
            _logger.warning("%s: these ranks are replicas, and get rank %d's parameters", where, FIRST)

    def compare(self, parameters: TorchParameters) -> None:
        """Check that the ranks are still equal, which must be so before each push: all parameters the first time, then
        a sample. Shards that were drawn from one seed differ from the first step on.

        Raises ConfigError on every rank, with the first tensor that differs.
        """
        turn, self._compared = self._compared, self._compared + 1
        sample = (turn % SAMPLE_STRIDE, SAMPLE_STRIDE) if turn else (0, 1)
        digests = _digests(parameters.trained, *sample)
        if len(set(self.gather(xxhash.xxh3_128_digest(b"".join(digests))))) > 1:
            name, rank = self._first_other(_rows(parameters), digests)
            raise ConfigError(
                f"parameter {name!r} of rank {rank} is no longer equal to rank {FIRST}'s, and is not pushed: "
                f"{_REPLICAS_ONLY}, and make equal steps with gradients that are averaged over all of them"
            )

    def gather(self, mine: bytes) -> list[bytes]:
        """The bytes of each rank, in the order of ranks."""
        size = torch.tensor([len(mine)], dtype=torch.int64)
        sizes = [torch.empty_like(size) for _ in range(self.n_ranks)]
        dist.all_gather(sizes, size, group=self._group)
        padded = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rooms = [torch.empty_like(padded) for _ in range(self.n_ranks)]
        dist.all_gather(rooms, padded, group=self._group)
        return [room[: int(n)].numpy().tobytes() for room, n in zip(rooms, sizes, strict=True)]

    def meet(
        self, tokens: int, may_push: bool, *, leaves: bool = False, wants_to_leave: bool = False
    ) -> tuple[int, bool, bool]:
        """Synchronise the ranks: all are at the same step, or leave the loop together.

        Returns the sum of all ranks' tokens, whether any rank (only the first can) may begin a push now, and whether
        any rank asks to leave. Raises ConfigError on every rank when some leave and others make a step.
        """
        summed = torch.tensor([tokens, may_push, leaves, wants_to_leave], dtype=torch.int64)
        dist.all_reduce(summed, group=self._group)
        total, pushing, leaving, wanting = summed.tolist()
        if leaving not in (0, self.n_ranks):
            raise ConfigError(
                f"{leaving} of the {self.n_ranks} ranks of this cluster left the training loop while the others make a "
                "step: all ranks must make the same number of steps"
            )
        return int(total), bool(pushing), bool(wanting)

    def tell(self, news: StepNews | None) -> StepNews:
        """Send rank 0's news to all; `news` is used on rank 0 only. Raises FatalError on the others if it failed."""
        said = news or StepNews()
        numbers = torch.tensor([int(value) for value in vars(said).values()], dtype=torch.int64)
        dist.broadcast(numbers, FIRST, group=self._group)
        installs, resets, done, timeline, version, progress, failed = (int(n) for n in numbers.tolist())
        if failed and not self.is_first:
            raise FatalError("rank 0 of this cluster has failed: its own error says why")
        return StepNews(installs, resets, bool(done), timeline, version, progress, bool(failed))

    def spread(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give every rank the parameters of rank 0, which are on the host or on one device for each rank."""
        with torch.no_grad():
            for parameter in parameters:
                group = self._group if parameter.device.type == "cpu" else None
                dist.broadcast(parameter.detach(), FIRST, group=group)

    def close(self) -> None:
        """Close the group without waiting for other ranks. A group left open may abort the process at its end."""
        dist.destroy_process_group(self._group)

    def _first_other(self, rows: Sequence[list[Any]], digests: Sequence[bytes]) -> tuple[str, int]:
        """The first tensor that differs from rank 0's, and the first rank where it does."""
        said = self.gather(b"".join(digests))
        for i, (name, *_) in enumerate(rows):
            here = slice(i * DIGEST_BYTES, (i + 1) * DIGEST_BYTES)
            for rank, theirs in enumerate(said):
                if theirs[here] != said[FIRST][here]:
                    return str(name), rank
        raise AssertionError("digests differ as a whole, so one of them does")


def ranks_here() -> Ranks | None:
    """This process's ranks; None when it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks()


def _rows(parameters: TorchParameters) -> list[list[Any]]:
    """Name, shape, dtype and kind of device of each tensor, in layout order, in values that JSON knows."""
    spans = zip(parameters.layout().spans, parameters.tensors, strict=True)
    return [[s.parameter.name, list(s.parameter.shape), s.parameter.dtype, t.device.type] for s, t in spans]


def _digests(tensors: Iterable[torch.Tensor], start: int = 0, stride: int = 1) -> list[bytes]:
    """A digest of each tensor's bits; of a large one, of every stride-th element from `start` on."""
    digests: list[bytes] = []
    for tensor in tensors:
        flat, digest = tensor.detach().reshape(-1), xxhash.xxh3_128()
        flat = flat if flat.numel() <= WHOLE_ELEMS else flat[start::stride]
        for piece in flat.split(GROUP_ELEMS):  # so that the host never holds a whole tensor of a device
            digest.update(piece.cpu().contiguous().view(torch.uint8).numpy())
        digests.append(digest.digest())
    return digests


def _other_layout(rows: Sequence[list[list[Any]]]) -> str:
    """Why the ranks' layouts differ, in one sentence."""
    first, (rank, theirs) = rows[FIRST], next((i, row) for i, row in enumerate(rows) if row != rows[FIRST])
    for ours, other in zip(first, theirs, strict=False):
        if ours != other:
            break
    else:
        i, longer = min(len(first), len(theirs)), FIRST if len(first) > len(theirs) else rank
        name = max(first, theirs, key=len)[i][0]
        return f"only rank {longer} has parameter {name!r}: {_REPLICAS_ONLY}"
    name, *what = other
    if name != ours[0]:
        return f"rank {rank} has parameter {name!r} where rank {FIRST} has {ours[0]!r}: {_REPLICAS_ONLY}"
    is_here, is_first = (f"{dtype} of shape {shape} on {device}" for shape, dtype, device in (what, ours[1:]))
    return f"parameter {name!r} is {is_here} on rank {rank}, and {is_first} on rank {FIRST}: {_REPLICAS_ONLY}"
