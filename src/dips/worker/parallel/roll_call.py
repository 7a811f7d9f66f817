"""Which ranks of torch.distributed's world are a cluster; waits until all of them have entered the loop, or left it.

A rank that never enters, as its program asks for DIPS_MASTER before it makes a dips.DiLoCo, would leave the others
waiting in their first collective, without a word. They call the roll in torch.distributed's own store first, where a
rank that is missing has a number, and where each says which ranks it takes for its cluster. Ranks of other clusters,
and ranks that do not train, need not take part. Likewise at the end: where one rank's data ends earlier, the others
wait for it in a collective of the training, and answer nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist

from dips.core.errors import ConfigError, FatalError

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
