"""Payloads of a push: what is sent for each chunk, and what rounding loses, against the reference in numpy."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

import dips.core
from dips.core.errors import ConfigError
from dips.core.layout import Layout, Parameter, chunks_of
from dips.core.math import wire_numpy
from dips.core.net.payloads import Difference, Differences, Parameters, Places, SharedLock, kernels
from dips.core.wire import Codec, encoded_bytes
from dips.worker.vectors import Vectors, chunk_spans

F32 = NDArray[np.float32]
CHUNK_BYTES = 1024
LAYOUT = Layout(tuple(Parameter(f"l.{i}.w", (size,), "float32", f"l.{i}") for i, size in enumerate((700, 1, 513))), 600)
N = LAYOUT.n_elems
CODECS = (Codec.BF16, Codec.INT8, Codec.INT4)


def vectors_of(seed: int, count: int) -> list[F32]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=N).astype(np.float32) for _ in range(count)]


def test_parameters_are_the_vector_s_own_memory() -> None:
    theta = vectors_of(1, 1)[0]
    payloads = Parameters(theta, Places(LAYOUT))
    whole = b"".join(bytes(payloads.of(chunk)) for chunk in chunks_of(LAYOUT.blocks, CHUNK_BYTES))
    assert whole == theta.tobytes()
    first = payloads.of(chunks_of(LAYOUT.blocks, CHUNK_BYTES)[0])
    theta[0] = 7.0
    assert bytes(first[:4]) == np.float32(7.0).tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_differences_are_those_of_the_reference_each_time(codec: Codec, with_residual: bool) -> None:
    theta, base, lost = vectors_of(2, 3)
    residual = lost * np.float32(0.01) if with_residual else None
    difference = Difference(base, residual)
    sent = []
    for _ in range(2):  # a chunk that is sent again is the same to the bit
        payloads = Differences(codec, theta, difference, Places(LAYOUT), CHUNK_BYTES)
        assert not payloads.lasting
        sent.append([bytes(payloads.of(chunk)) for chunk in chunks_of(LAYOUT.blocks, CHUNK_BYTES)])
    assert sent[0] == sent[1]
    for (start, stop), payload in zip(chunk_spans(LAYOUT, CHUNK_BYTES), sent[0], strict=True):
        expected = np.empty(encoded_bytes(codec, stop - start), np.uint8)
        part = None if residual is None else residual[start:stop]
        wire_numpy.encode(codec, theta[start:stop], base[start:stop], part, expected)
        assert payload == expected.tobytes()


def test_a_residual_that_was_cleared_begins_with_nothing_again() -> None:
    base, theta = vectors_of(4, 2)
    vectors, spans = Vectors(N), chunk_spans(LAYOUT, CHUNK_BYTES)
    vectors.restore(base, theta, np.full(N, 100.0, np.float32))
    vectors.clear_residual()
    assert vectors.residual is None
    vectors.keep_residual(Codec.INT8, spans)
    fresh = Vectors(N)
    fresh.restore(base, theta)
    fresh.keep_residual(Codec.INT8, spans)
    assert vectors.residual is not None
    assert fresh.residual is not None
    assert vectors.residual.tobytes() == fresh.residual.tobytes()
    assert vectors.residual_changes == 2


def test_without_numba_differences_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wire_numba", "simd_numba"):
        monkeypatch.delitem(sys.modules, f"dips.core.math.{name}", raising=False)
        monkeypatch.delattr(dips.core.math, name, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match=r"need numba.*pip install '\.\[worker\]'"):
        kernels()


def test_a_lock_that_is_kept_for_long_goes_to_whoever_wants_it() -> None:
    """Its holder takes it again and again, and lets go when it is wanted: as a loop that sends from live parameters."""
    lock, ended = SharedLock(), threading.Event()
    turns = 0

    def hold() -> None:
        nonlocal turns
        while not ended.is_set():
            with lock:
                turns += 1
                while not lock.wanted[0] and not ended.is_set():
                    pass

    holder = threading.Thread(target=hold)
    holder.start()
    for _ in range(20):
        with lock.now():
            seen = turns
            assert not lock.wanted[0]
        assert turns >= seen
    ended.set()
    holder.join()
    assert turns > 0
