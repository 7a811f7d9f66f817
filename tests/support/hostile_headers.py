"""Headers of the data flow: any that a correct peer may send, and changed ones."""

from __future__ import annotations

import random

from fuzz.mutate import EDGES, shaken
from fuzz.wire import sealed

from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.net import header_numba
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import PROTOCOL_VERSION
from dips.core.wire import Codec


def some_header(rng: random.Random) -> DataHeader:
    """Any plain header: numbers near the edges of their widths too."""

    def number(n_bits: int) -> int:
        most = 2**n_bits - 1
        return rng.choice((0, 1, most, min(most, rng.choice(EDGES)), rng.randrange(1 << rng.randint(1, n_bits))))

    def text(most: int) -> str:
        return "".join(chr(rng.randrange(128)) for _ in range(rng.choice((0, 1, rng.randrange(most)))))

    op = rng.choice([op for op in DataOp if op is not DataOp.REFUSED])
    with_push = op in (DataOp.PUT_CHUNK, DataOp.QUERY_MISSING) or rng.random() < 0.5
    with_version = op in (DataOp.GET_CHUNK, DataOp.CHUNK) or rng.random() < 0.2
    push = PushId(ClusterId(text(40)), Incarnation(number(64), number(64)), number(64))
    return DataHeader(
        text(60), number(62), op, number(62), push if with_push else None, number(62),
        Version(number(64), number(64)) if with_version else None, number(32), number(62), number(62),
        rng.choice(list(Codec)), number(64), text(60), None, (), rng.random() < 0.5, number(32),
        rng.choice((PROTOCOL_VERSION, number(32))), rng.random() < 0.2,
        Version(number(64), number(64)) if rng.random() < 0.3 else None,
    )  # fmt: skip


def changed_headers(seed: int, n: int) -> list[bytes]:
    rng = random.Random(seed)
    frames = []
    for number in range(n):
        body = some_header(rng).encode()[: -header_numba.TRAILER_BYTES]
        if number % 4:
            body = shaken(rng, [body])
        frames.append(sealed(body)[:1000] if number % 8 else (body + bytes(10))[:1000])
    return frames
