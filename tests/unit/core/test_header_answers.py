"""The compiled answers of a data port, number by number: so few that their Python form is quick."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.math.simd_numba import address
from dips.core.net import header_numba
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.wire import Codec

PUSH = PushId(ClusterId("a"), Incarnation(1, 1), 3)


def answered(write: object, request: DataHeader, *rest: object) -> DataHeader:
    """What the kernel answers, read back."""
    assert callable(write)
    frame, run_id = np.frombuffer(request.encode(), np.uint8), header_numba.text_of(request.run_id)
    value, length = (np.zeros(header_numba.N_FIELDS, np.int64) for _ in range(2))
    assert header_numba.parse(address(frame), len(frame), value, length)
    into = np.zeros(1024, np.uint8)
    n_bytes = write(into, run_id, request.epoch, value, length, *rest)
    return DataHeader.decode(into[:n_bytes].tobytes())


@pytest.mark.parametrize("number", [1, 127, 128, 129, 2**14, 2**32 - 1])
def test_every_number_of_an_answer_arrives(number: int) -> None:
    put = DataHeader(
        "run", number, DataOp.PUT_CHUNK, number, PUSH, 2, block=number, offset_bytes=4 * number, length_bytes=8,
        codec=Codec.F32, checksum=7, cause_id="why",
    )  # fmt: skip
    ack = replace(put, op=DataOp.ACK, length_bytes=0, codec=Codec.NONE, checksum=0, complete=True, credit=number)
    assert answered(header_numba.write_ack, put, True, number) == ack
    get = DataHeader(
        "run", number, DataOp.GET_CHUNK, number, version=Version(1, number), block=number, offset_bytes=8,
        length_bytes=number, codec=Codec.INT8, cause_id="why", momentum=True, base=Version(1, number - 1),
    )  # fmt: skip
    checksum = 2**63 + number
    chunk = replace(get, op=DataOp.CHUNK, checksum=checksum, credit=number)
    found = answered(header_numba.write_chunk, get, int(Codec.INT8), np.uint64(checksum), number)
    assert found == chunk
