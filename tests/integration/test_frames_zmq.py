"""Frames without a copy are given up in bunches, and their memory with them."""

from __future__ import annotations

import pytest
import zmq
from support.waiting import until

from dips.core.net.zmq_sockets import Outgoing


def given_up(memory: bytearray) -> bool:
    """Whether nothing refers to its bytes now; pyzmq's collector, a thread, releases them last."""

    def is_free() -> bool:
        try:
            memory.append(0)
        except BufferError:
            return False
        return True

    until(is_free, "nothing refers to the bytes")
    return True


@pytest.mark.parametrize("bound", [{"most_frames": 3}, {"most_bytes": 399}])
def test_frames_that_have_left_are_given_up_when_many_are_kept(bound: dict[str, int]) -> None:
    memories = [bytearray(b"%d" % i * 100) for i in range(4)]
    outgoing = Outgoing(**bound)
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://here")
        there.connect("inproc://here")
        for memory in memories:
            here.send(outgoing.frame(memoryview(memory)), copy=False)
        assert [there.recv() for _ in memories] == [b"%d" % i * 100 for i in range(4)]
        assert all(given_up(memory) for memory in memories[:3])
        with pytest.raises(BufferError):
            memories[3].append(0)
        outgoing.clear()
        assert given_up(memories[3])
