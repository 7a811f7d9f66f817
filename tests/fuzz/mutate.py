"""Strategies: bytes and JSON that are nearly right, since what is wholly wrong is refused by the first check."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers where lengths, counts and offsets turn over."""

MOST_EDITS = 4

TEXTS = ("", "x", "\0", "\ud800", "é" * 40, "a" * 5000, "1", "-1", "nan", "1e999", "../../x", "tcp://", "[" * 2000)

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *TEXTS,
    *([], [[]], {}, {"": {}}, [None] * 3, [0] * 1000),
)


@st.composite
def mutated(draw: st.DrawFn, seeds: Callable[[], list[bytes]]) -> bytes:
    """One of the seeds with some bits, bytes or pieces changed."""
    data = bytearray(draw(st.sampled_from(seeds())))
    for _ in range(draw(st.integers(0, MOST_EDITS))):
        _edit(draw, data)
    return bytes(data)


def _edit(draw: st.DrawFn, data: bytearray) -> None:
    at = draw(st.integers(0, len(data)))
    to = min(len(data), at + draw(st.sampled_from((1, 2, 4, 8, 64, 1 << 20))))
    match draw(st.sampled_from(("bit", "edge", "cut", "end", "insert", "repeat", "swap"))):
        case "bit" if at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        case "edge":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(st.sampled_from(EDGES)) % (1 << 8 * width)
            data[at : at + width] = number.to_bytes(width, draw(st.sampled_from(("little", "big"))))
        case "cut":
            del data[at:to]
        case "end":
            del data[at:]
        case "insert":
            data[at:at] = draw(st.binary(max_size=40))
        case "repeat":
            data[at:at] = data[at:to] * draw(st.sampled_from((1, 3, 100)))
        case "swap":
            data[at:to] = data[at:to][::-1]
        case _:
            data += b"\0"
    del data[1 << 20 :]


@st.composite
def nearly(draw: st.DrawFn, value: Any) -> Any:
    """The same JSON value with up to three of its parts replaced, dropped or doubled."""
    changed = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        changed = _changed(draw, changed)
    return changed


def _changed(draw: st.DrawFn, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return copy.deepcopy(draw(st.sampled_from(ODD)))  # which the next change may change again
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    what = draw(st.integers(0, 9))
    if what == 0:
        del value[key]
    elif what == 1 and isinstance(value, list):
        value.append(value[key])
    else:
        value[key] = _changed(draw, value[key])
    return value


def as_json(value: Any) -> bytes:
    """UTF-8, where that is possible."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


NESTED = (b"[" * 100_000, b'{"a":' * 100_000, b'{"body":' * 5000 + b"1" + b"}" * 5000)
"""Deeper than Python's own stack."""


def shaken(rng: random.Random, corpus: list[bytes]) -> bytes:
    """One of the corpus with a few random changes, spliced with another one now and then: a hundred times as fast as a
    strategy."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, MOST_EDITS)):
        at, width = rng.randint(0, len(data)), rng.choice((1, 2, 4, 8))
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + width] = (rng.choice(EDGES) % (1 << 8 * width)).to_bytes(width, "little")
            case 2:
                del data[at : at + rng.choice((1, 4, 16, len(data)))]
            case 3:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
            case 4:
                data[at:at] = data[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 2, 50))
            case 5:
                other = rng.choice(corpus)
                data[at:] = other[rng.randint(0, len(other)) :]
            case _:
                data[at : at + width] = rng.randbytes(width)
    return bytes(data[: 1 << 20])
