"""A cluster's sending side as a process without a master: python -m support.push_process BULK ENDPOINT WINDOW.

It pushes all of it to the data port there, and says the digest of what the slave holds then. DIPS_FAILPOINTS may kill
it on the way; whoever starts it again has it go on from where the slave stands.
"""

from __future__ import annotations

import sys
import threading

import zmq
from support.bulk import EPOCH, PUSH, RUN, Bulk

from dips.core import allocator
from dips.core.clock import SystemClock
from dips.core.failpoints import install
from dips.core.messages import Ticket
from dips.worker.transfer_zmq import Common, carry_push


def main(bulk: Bulk, endpoint: str, window_chunks: int) -> int:
    install("worker")
    flat = allocator.zeros(bulk.n_elems)
    bulk.fill(flat)
    blocks = tuple(block.block_id for block in bulk.layout.blocks)
    ticket = Ticket(1, bulk.placement(endpoint), blocks)
    common = Common(RUN, EPOCH, "bulk", bulk.layout, bulk.settings(window_chunks))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    transfer, digests = carry_push(context, common, flat, PUSH, ticket, SystemClock(), threading.Event())
    context.destroy(linger=0)
    if not transfer.done:
        print(transfer.failure, file=sys.stderr)
        return 1
    print(dict(digests)["s0"].hex())
    return 0


if __name__ == "__main__":
    sys.exit(main(Bulk.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
