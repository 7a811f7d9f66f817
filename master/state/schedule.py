"""In which order a cluster's blocks travel (paper 3.1, Figure 5): staggered, so that at any moment different clusters
talk to different slaves.
"""

from __future__ import annotations

from dips.core.placement import Placement


def block_order(placement: Placement, cluster_index: int) -> tuple[int, ...]:
    """Block ids, one from each slave in turn; cluster i begins with slave i mod n and with another block there."""
    queues: list[list[int]] = [[] for _ in placement.slaves]
    for block_id, slave in enumerate(placement.slave_of_block):
        queues[slave].append(block_id)
    n = len(queues)
    turned = [queues[(cluster_index + i) % n] for i in range(n)]
    rotated = [_rotate(queue, cluster_index // n) for queue in turned]
    longest = max(map(len, rotated), default=0)
    return tuple(queue[step] for step in range(longest) for queue in rotated if step < len(queue))


def _rotate(queue: list[int], by: int) -> list[int]:
    if not queue:
        return queue
    by %= len(queue)
    return queue[by:] + queue[:by]
