"""Which ranks of torch.distributed's world are a cluster; waits until all of them have entered the loop.

A rank that never enters, as its program asks for DIPS_MASTER before it makes a dips.DiLoCo, would leave the others
waiting in their first collective, without a word. They call the roll in torch.distributed's own store first, where a
rank that is missing has a number, and where each says which ranks it takes for its cluster. Ranks of other clusters,
and ranks that do not train, need not take part.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist

from dips.core.errors import ConfigError

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
        f"rank {rank} of torch.distributed's world is not in its group=: make a dips.DiLoCo only on the ranks of a "
        "cluster, and give each the group that it is part of"
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
            f"{of_high}: give all ranks of a cluster the same group="
        )
    return True


def _ranks(missing: Sequence[int], of_world: Sequence[int]) -> str:
    """By their numbers in the cluster."""
    numbers = [of_world.index(each) for each in missing]
    named = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {named}" if len(numbers) == 1 else f"ranks {named}"
