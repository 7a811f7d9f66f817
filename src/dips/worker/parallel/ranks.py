"""The ranks of a cluster, and their messages: several processes of torch.distributed that are one cluster of a run.

They are all of torch.distributed's world or a part of it, and are numbered from 0 in the cluster. The leader (rank 0)
talks to the master. The others, its followers, do what it says, and all call the same methods in the same order.
Messages go over gloo groups of their own, so that no device is waited for and no collective of the training is
disturbed; they stay usable when the user destroys the training's groups first.

A rank that never enters the loop, as its program asks for DIPS_MASTER before it makes a dips.DiLoCo, would leave the
others waiting in their first collective, without a word. They call the roll in torch.distributed's own store first,
where a rank that is missing has a number, and where each says which ranks it takes for its cluster. Ranks of other
clusters, and ranks that do not train, need not take part. Likewise at the end: where one rank's data ends earlier, the
others wait for it in a collective of the training, and answer nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from dips.core.errors import ConfigError, FatalError

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


ROLL_CALL_S = 600.0
"""Loading a model takes some ranks longer than others; torch gives a collective on accelerators as long."""

WORD_S = 30.0
"""After so long a rank says whom it waits for."""

PAUSE_S, SHORT_PAUSE_S = 0.25, 0.005
"""Between two questions, and at first."""

_CANNOT = "!"
"""Before the sentence of a rank that cannot enter."""

_logger = logging.getLogger("dips")

_numbers = count()
"""Of the loops of this process: all ranks of a cluster have entered as many before."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...


def call_the_roll(group: Any = None) -> tuple[tuple[int, ...], dist.distributed_c10d.Store]:
    """Return when all ranks of the cluster have called this as often as this one has. group: a process group or a
    DeviceMesh of these ranks; None: all of torch.distributed's world.

    Returns the number in the world of each rank of the cluster, and a store that they alone use, for this loop.

    Raises ConfigError on every rank when this one is not in the group, or others are given other ranks; and, with
    their numbers in the cluster, when some have not called after ROLL_CALL_S seconds.
    """
    of_all = dist.distributed_c10d.PrefixStore(f"dips/{next(_numbers)}", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    try:
        of_world = members(group, rank)
    except ConfigError as error:
        of_all.set(str(rank), f"{_CANNOT}{error}")
        raise
    wait_for_ranks(of_all, rank, of_world)
    return of_world, dist.distributed_c10d.PrefixStore(f"cluster/{of_world[0]}", of_all)


def members(group: Any, rank: int) -> tuple[int, ...]:
    """The ranks of the world in a group, in its order. rank: this one's.

    Raises ConfigError for what is no group, and for one that this rank is not in.
    """
    if group is None:
        return tuple(range(dist.get_world_size()))
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    if hasattr(group, "get_coordinate"):
        of_world = tuple(map(int, group.mesh.flatten().tolist()))
        if rank in of_world:
            return of_world
    elif group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"group is a {type(group).__name__}: give a process group or a DeviceMesh")
    raise ConfigError(
        f"rank {rank} of torch.distributed's world is not in its dips.Parallel(group=...): make a dips.DiLoCo only on "
        "the ranks of a cluster, and give each the group that it is part of"
    )


def wait_for_ranks(
    store: Store,
    rank: int,
    of_world: Sequence[int],
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """As call_the_roll(), in a store that is used for nothing else; rank, of_world: numbers in the world. Asks again
    and again: a store's own wait() keeps other threads from using its connection.
    """
    store.set(str(rank), json.dumps(of_world))
    began_s, has_said = now_s(), False
    missing = list(of_world)
    while missing := [other for other in missing if not _is_here(store, rank, of_world, other)]:
        waited_s = now_s() - began_s
        if waited_s >= ROLL_CALL_S:
            raise ConfigError(
                f"{_ranks(missing, of_world)} of this cluster did not enter the loop within {ROLL_CALL_S:.0f} s: make "
                "the same dips.DiLoCo on every rank, with DIPS_MASTER set on all of them"
            )
        if waited_s >= WORD_S and not has_said:
            has_said = True
            _logger.warning("waiting for %s of this cluster to enter the loop", _ranks(missing, of_world))
        sleep(min(PAUSE_S, waited_s + SHORT_PAUSE_S))


def _is_here(store: Store, rank: int, of_world: Sequence[int], other: int) -> bool:
    """Whether another rank has called. Raises ConfigError when it cannot enter, or says that its cluster has other
    ranks.
    """
    if not store.check([str(other)]):
        return False
    said = store.get(str(other)).decode()
    if said.startswith(_CANNOT):
        raise ConfigError(f"rank {of_world.index(other)} of this cluster cannot take part: {said[len(_CANNOT) :]}")
    if said != json.dumps(of_world):
        (low, of_low), (high, of_high) = sorted([(rank, json.dumps(of_world)), (other, said)])
        raise ConfigError(
            f"rank {low} of torch.distributed's world enters a cluster of ranks {of_low}, and rank {high} one of ranks "
            f"{of_high}: give all ranks of a cluster the same dips.Parallel(group=...)"
        )
    return True


MEETS_AFTER_S = 1.0
"""A rank that waits longer in a meeting says so in the store: usually the others are there within milliseconds."""


ALIVE_S, DEAD_S = 5.0, 60.0
"""A rank says so often that it is alive, for those that have left; one that does not for so long is taken for dead."""


class Attendance:
    """Which ranks of a cluster are alive, which wait in a meeting, and which have left their loops.

    A thread says it in the store, and after WORD_S in the log for whom this rank waits: the training thread cannot, in
    a collective. All ranks count their meetings alike.
    """

    def __init__(self, store: Store, rank: int, n_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._n_ranks = n_ranks
        self._n_met = 0
        self._waits: tuple[int, float] | None = None  # in which meeting, since when
        self._left_s: float | None = None  # since when a rank has left
        self.late: Callable[[Sequence[int]], object] | None = None
        """Called by the thread when the ranks that others wait for change; none while no one waits for long."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dips-ranks", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A meeting begins here."""
        self._n_met += 1
        self._waits = (self._n_met, time.monotonic())

    def over(self) -> None:
        """The others are in the meeting, too."""
        self._waits = None

    def end(self) -> None:
        """This rank's connections are closed: others that wait for it notice."""
        if not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(RuntimeError):  # the store's process has ended before
                self._store.set(f"gone/{self._rank}", "")

    def leave(
        self,
        limit_s: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Return when all ranks have left their loops, or when the next meeting, which this one then attends, will say
        what is wrong: another rank waits in it, or has closed its connections.

        Raises FatalError, with the numbers of those that are missing, when neither is so after limit_s, and for one
        that does not say any longer that it is alive.
        """
        self._store.set(f"left/{self._rank}", "")
        self._store.set("left", "")
        began_s, has_said, meeting = now_s(), False, self._n_met + 1
        signs: dict[int, tuple[int, float]] = {}
        while missing := [rank for rank in range(self._n_ranks) if not self._store.check([f"left/{rank}"])]:
            for rank in missing:
                if self._store.check([f"meets/{meeting}/{rank}"]) or self._store.check([f"gone/{rank}"]):
                    return
                sign = self._store.add(f"alive/{rank}", 0)
                if signs.get(rank, (-1, 0.0))[0] != sign:
                    signs[rank] = (sign, now_s())
                elif now_s() - signs[rank][1] >= DEAD_S:
                    raise FatalError(
                        f"rank {rank} of this cluster says nothing any longer, while rank {self._rank} waits for it to "
                        "leave the loop: its own log says why, or its host"
                    )
            waited_s, named = now_s() - began_s, _named(missing)
            if waited_s >= limit_s:
                raise FatalError(
                    f"{named} of this cluster did not leave the loop with rank {self._rank}, and made no step for "
                    f"{waited_s:.0f} s: all ranks must make the same number of steps, so give all loaders as many "
                    "batches (ranks_wait_s in [worker] lets a longer evaluation end)"
                )
            if waited_s >= WORD_S and not has_said:
                has_said = True
                _logger.warning("rank %d has left the loop, and waits for %s of this cluster", self._rank, named)
            sleep(min(PAUSE_S, waited_s + SHORT_PAUSE_S))

    def late_ranks(self, now_s: float) -> list[int]:
        """The ranks that have not come to a meeting in which this one waits, or that have not left the loop while
        others have; none before WORD_S.
        """
        if self._waits is not None:
            meeting, since_s = self._waits
            return self._missing(f"meets/{meeting}") if now_s - since_s >= WORD_S else []
        if not self._store.check(["left"]):
            return []
        if self._left_s is None:
            self._left_s = now_s
        return self._missing("left") if now_s - self._left_s >= WORD_S else []

    def _missing(self, name: str) -> list[int]:
        """The ranks that have set neither this key nor the one that says that they have left."""
        keys = {rank: {f"{name}/{rank}", f"left/{rank}"} for rank in range(self._n_ranks)}
        return [rank for rank, names in keys.items() if not any(self._store.check([name]) for name in names)]

    def look(self, said: int, now_s: float) -> int:
        """Say what there is to say of a wait. said: the meeting that the log has named; returns the one that it now
        has."""
        if self._waits is None or now_s - self._waits[1] < MEETS_AFTER_S:
            return said
        meeting, since_s = self._waits
        self._store.set(f"meets/{meeting}/{self._rank}", "")
        if now_s - since_s < WORD_S or said == meeting:
            return said
        missing = self._missing(f"meets/{meeting}")
        if missing and self._waits == (meeting, since_s):
            _logger.warning("rank %d waits for %s of this cluster to make a step", self._rank, _named(missing))
        return meeting

    def _watch(self) -> None:
        said, alive_s, named = 0, -math.inf, list[int]()
        with contextlib.suppress(RuntimeError):  # the store's process has ended: the training thread notices
            while not self._ended.wait(MEETS_AFTER_S):
                now_s = time.monotonic()
                said = self.look(said, now_s)
                if self.late is not None and (late := self.late_ranks(now_s)) != named:
                    named = late
                    self.late(named)
                if now_s - alive_s >= ALIVE_S:
                    alive_s = now_s
                    self._store.add(f"alive/{self._rank}", 1)


def _named(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {named}" if len(numbers) == 1 else f"ranks {named}"


def _ranks(missing: Sequence[int], of_world: Sequence[int]) -> str:
    """By their numbers in the cluster."""
    return _named([of_world.index(each) for each in missing])
