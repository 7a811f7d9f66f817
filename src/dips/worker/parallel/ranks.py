"""The ranks of a cluster, and their messages: several processes of torch.distributed that are one cluster of a run.

They are all of torch.distributed's world or a part of it, and are numbered from 0 in the cluster. The leader (rank 0)
talks to the master. The others, its followers, do what it says, and all call the same methods in the same order.
Messages go over gloo groups of their own, so that no device is waited for and no collective of the training is
disturbed; they stay usable when the user destroys the training's groups first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from dips.core.errors import ConfigError, FatalError
from dips.worker.parallel.roll_call import Attendance, call_the_roll

LEADER = 0
PATIENCE = timedelta(days=30)
"""How long a rank waits for the leader, which may wait for other clusters to join. A rank that died is noticed at once,
by its connection."""

SILENCE = timedelta(minutes=30)
"""How long a follower waits for the next order of a meeting, in which the leader says something twice a second while it
waits; longer than one rank reads its part of a checkpoint after the others. Else a leader whose host lost its power or
its network would be waited for: a connection on which nothing is sent stays open."""

SHORT_BYTES = 1024
"""An order of at most so many bytes, less its length, is one message."""

_LENGTH_BYTES = 8
_ROOM_BYTES = SHORT_BYTES - _LENGTH_BYTES


class Ranks:
    """The ranks of this process's cluster, and its own place among them."""

    def __init__(self, of_world: Sequence[int], store: dist.distributed_c10d.Store) -> None:
        """Call on all ranks together. of_world: the number of each in torch.distributed's world. store: of these ranks
        alone.
        """
        self.of_world = tuple(of_world)
        self.rank = self.of_world.index(dist.get_rank())
        self.n_ranks = len(of_world)
        self._group: dist.ProcessGroup | None = self._new_group(store, "messages")
        self.exchange: dist.ProcessGroup | None = self._new_group(store, "exchange")
        """The group in which parameters are exchanged, on the training thread."""
        self._attendance = Attendance(store, self.rank, self.n_ranks)
        self._short = torch.zeros(SHORT_BYTES, dtype=torch.uint8)
        self._short_bytes = self._short.numpy().data

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def gather(self, mine: bytes) -> list[bytes]:
        """The bytes of each rank, in the order of ranks, on every rank."""
        size = torch.tensor([len(mine)], dtype=torch.int64)
        sizes = [torch.empty_like(size) for _ in range(self.n_ranks)]
        with self._others() as group:
            group.allgather([sizes], [size]).wait()
            padded = _padded(mine, max(int(each) for each in sizes))
            rooms = [torch.empty_like(padded) for _ in range(self.n_ranks)]
            group.allgather([rooms], [padded]).wait()
        return [_bytes(room)[: int(n)] for room, n in zip(rooms, sizes, strict=True)]

    def say(self, order: bytes) -> None:
        """Send an order to all followers."""
        n_bytes = len(order)
        first, rest = order[:_ROOM_BYTES], order[_ROOM_BYTES:]
        self._short_bytes[:_LENGTH_BYTES] = n_bytes.to_bytes(_LENGTH_BYTES, "little")
        self._short_bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first
        self._broadcast(self._short)
        if rest:
            self._broadcast(_padded(rest, len(rest)))

    def hear(self, patience: timedelta) -> bytes:
        """The leader's next order. Raises FatalError where none comes in this time, or another rank has ended."""
        self._broadcast(self._short, patience)
        self._attendance.over()
        n_bytes = int.from_bytes(self._short_bytes[:_LENGTH_BYTES], "little")
        order = bytes(self._short_bytes[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes])
        if n_bytes > _ROOM_BYTES:
            rest = torch.empty(n_bytes - _ROOM_BYTES, dtype=torch.uint8)
            self._broadcast(rest, SILENCE)
            order += _bytes(rest)
        return order

    def report(self, numbers: Sequence[float]) -> list[list[float]]:
        """Send some numbers, as many on each rank, to the leader; returns all ranks' there, and nothing elsewhere."""
        self._attendance.begin()
        rows: list[list[float]] = self._to_leader(torch.tensor(numbers, dtype=torch.float64)).tolist()
        if self.is_leader:
            self._attendance.over()  # a follower waits for the leader's word
        return rows

    def leave(self, limit_s: float) -> None:
        """Before the last report: wait for the other ranks as Attendance.leave()."""
        with self._others():
            self._attendance.leave(limit_s)

    def tell_late(self, late: Callable[[Sequence[int]], object]) -> None:
        """Have a thread call `late` when the ranks that others wait for between two steps change."""
        self._attendance.late = late

    def report_bytes(self, mine: bytes, n_bytes: int) -> list[bytes]:
        """Likewise with bytes, padded with zeros to n_bytes, which is the same on each rank."""
        return [_bytes(row) for row in self._to_leader(_padded(mine, n_bytes))]

    def copy(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """Overwrite the tensor of all these ranks with the first one's; they have one shape and type. Called on these
        ranks alone.
        """
        host = tensor.detach().to("cpu", copy=True).contiguous()
        flat = host.reshape(-1).view(torch.uint8)
        with self._others() as group:
            if self.rank == ranks[0]:
                for other in ranks[1:]:
                    group.send([flat], other, 0).wait()
                return
            group.recv([flat], ranks[0], 0).wait()
        with torch.no_grad():
            tensor.copy_(host)

    def close(self) -> None:
        """Close the groups without waiting for other ranks, which notice it: a group is closed once no one refers to
        it. One left open may abort the process at its end. May be called twice, and after the user has destroyed all
        groups.
        """
        self._attendance.end()
        self._group = self.exchange = None

    def _new_group(self, store: dist.distributed_c10d.Store, name: str) -> dist.ProcessGroup:
        """A group of these ranks alone. torch.distributed.new_group() is called on all ranks of the world, or names the
        group by how many a rank has already, which need not be equal.
        """
        store = dist.distributed_c10d.PrefixStore(name, store)
        gloo = dist.distributed_c10d.ProcessGroupGloo(store, self.rank, self.n_ranks, timeout=PATIENCE)
        return cast(dist.ProcessGroup, gloo)  # it has the same collectives, which torch's stubs do not know

    def _to_leader(self, mine: torch.Tensor) -> torch.Tensor:
        """On the leader, a row from each rank; elsewhere, no rows."""
        rows = mine.new_empty(self.n_ranks if self.is_leader else 0, mine.numel())
        options = dist.GatherOptions()
        options.rootRank = LEADER
        with self._others() as group:
            group.gather([list(rows)] if self.is_leader else [], [mine], options).wait()
        return rows

    def _broadcast(self, tensor: torch.Tensor, patience: timedelta = PATIENCE) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = LEADER, patience
        with self._others() as group:
            group.broadcast([tensor], options).wait()

    @contextlib.contextmanager
    def _others(self) -> Iterator[dist.ProcessGroup]:
        """The group. Its methods are called directly: torch.distributed's functions do not take a group any longer
        once the user has destroyed all of them.
        """
        if self._group is None:
            raise FatalError(f"rank {self.rank} of this cluster has closed its connections to the other ranks")
        try:
            yield self._group
        except RuntimeError as error:
            raise FatalError(
                f"rank {self.rank} of this cluster has lost another rank, which ended, left its loop or cannot be "
                "reached: its own error says why, or its host"
            ) from error


def _padded(data: bytes, n_bytes: int) -> torch.Tensor:
    """As a tensor of n_bytes at least."""
    padded = torch.zeros(max(len(data), n_bytes), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return padded


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.numpy().tobytes()
    return data


def ranks_here(group: Any = None, *, cut: bool = False) -> Ranks | None:
    """The ranks of this process's cluster, once all of them are here; None when it is alone. group: a process group or
    DeviceMesh of them, if they are not all of torch.distributed's world. cut: its model has a form that only ranks
    take, as FSDP2 gives it on one device too: then one alone is a cluster of one rank. Raises as call_the_roll(), and
    FatalError where another rank is gone.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ConfigError(
                "dips.Parallel(group=...) is given, and torch.distributed has no groups yet: call "
                "torch.distributed.init_process_group() before the loop is entered"
            )
        return None
    if group is None and dist.get_world_size() == 1 and not cut:
        return None
    try:
        of_world, store = call_the_roll(group)
        return Ranks(of_world, store) if len(of_world) > 1 or cut else None
    except RuntimeError as error:
        raise FatalError(
            f"rank {dist.get_rank()} of torch.distributed's world has lost another rank before all had entered the "
            f"loop ({error}): its own error says why"
        ) from error
