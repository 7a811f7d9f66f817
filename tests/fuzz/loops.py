"""Hostile messages to the compiled loops, in processes of their own: an access outside the buffers ends one."""

from __future__ import annotations

import time

from support.carried_twice import answer_hostile
from support.checked_memory import in_child
from support.served_port import send_hostile

EACH = 50_000
"""Messages of one process: about ten seconds."""

TRANSFERS = 5
"""Of each kind, in one process: about as long. A worker's loops run as twins beside the Python loop."""

CHUNK_BYTES = (1024, 65536)
"""Chunks of the latter are measured when they land."""


def feed_for(seconds: float, seed: int) -> list[str]:
    """Returns a sentence for each process that ended badly; it says with which seed."""
    end_s, n, found = time.monotonic() + seconds, 0, list[str]()
    while n == 0 or time.monotonic() < end_s:
        chunk_bytes, turn_seed = CHUNK_BYTES[n % len(CHUNK_BYTES)], seed + n
        trouble = in_child(send_hostile, chunk_bytes, turn_seed, EACH, timeout_s=600.0)
        if trouble:
            found.append(f"send_hostile({chunk_bytes}, {turn_seed}, {EACH}): {trouble}")
        trouble = in_child(answer_hostile, turn_seed, TRANSFERS, timeout_s=600.0)
        if trouble:
            found.append(f"answer_hostile({turn_seed}, {TRANSFERS}): {trouble}")
        n += 1
    told = f"{n * EACH} messages to a slave's, {n * 5 * TRANSFERS} transfers of a worker's"
    print(f"compiled loops: {told}; {len(found)} of {2 * n} processes ended badly", flush=True)
    return found
