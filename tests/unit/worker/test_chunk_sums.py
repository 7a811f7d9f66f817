"""Checksums that are taken while a model is copied out: of the bytes in the vector, whatever the layout."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import dips.core.math
from dips.core.layout import Chunk, Layout, Parameter, checksum, chunks_of
from dips.core.math.landing_numba import copy_chunk
from dips.core.net import payloads
from dips.core.net.payloads import hashing_copy
from dips.worker.parameters import ChunkSums
from dips.worker.torch_model import TorchParameters, _groups
from dips.worker.vectors import Vectors

F32 = NDArray[np.float32]


def checksums_of(layout: Layout, chunk_bytes: int, flat: F32) -> dict[Chunk, int]:
    start_elem = [block.start_elem for block in layout.blocks]
    found = {}
    for chunk in chunks_of(layout.blocks, chunk_bytes):
        begin = 4 * start_elem[chunk.block_id] + chunk.offset_bytes
        found[chunk] = checksum(flat.view(np.uint8)[begin : begin + chunk.length_bytes])
    return found


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    others=st.sets(st.integers(0, 11)),
    per_layer=st.integers(1, 4),
    block_elems=st.sampled_from([1, 64, 300, 5000]),
    chunk_bytes=st.sampled_from([256, 1024, 1540, 1 << 16]),
)
@settings(max_examples=60)
def test_chunks_of_arrays_and_of_what_was_copied_otherwise_have_the_vectors_checksums(
    sizes: list[int], others: set[int], per_layer: int, block_elems: int, chunk_bytes: int
) -> None:
    parameters = (Parameter(f"p{i}", (n,), "float32", f"layer {i // per_layer}") for i, n in enumerate(sizes))
    layout = Layout(tuple(parameters), block_elems)
    theta = np.random.default_rng(1).standard_normal(layout.n_elems, np.float32)
    wanted, into = theta.copy(), np.full(layout.n_elems, np.nan, np.float32)
    sums = ChunkSums(layout, chunk_bytes, into, copy_chunk)
    for i, span in enumerate(layout.spans):
        here = slice(span.start_elem, span.stop_elem)
        if i in others:
            into[here] = theta[here]
            sums.copied(span.start_elem, span.stop_elem)
        else:
            sums.copy(theta[here], span.start_elem)
    assert into.tobytes() == wanted.tobytes()
    assert sums.by_chunk() == checksums_of(layout, chunk_bytes, wanted)


class Odd(torch.nn.Module):
    """Large and tiny tensors, some not in logical order, in other types, and running statistics."""

    def __init__(self, narrow: torch.dtype | None) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(70, 33))
        self.one = torch.nn.Parameter(torch.randn(1))
        self.turned = torch.nn.Parameter(torch.randn(40, 90).t())
        self.halves = torch.nn.Parameter(torch.randn(50, 20).to(narrow or torch.float32))
        self.b = torch.nn.Parameter(torch.randn(5000))
        self.tiny = torch.nn.ParameterList(torch.randn(3) for _ in range(40))
        self.norm = torch.nn.BatchNorm1d(700)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.worker.torch_model.LARGE_ELEMS", 600)
    monkeypatch.setattr("dips.worker.torch_model.GROUP_ELEMS", 4000)
    monkeypatch.setattr("dips.core.net.payloads.WORTH_COMPILING_BYTES", 0)


def odd(narrow: torch.dtype | None) -> TorchParameters:
    model = Odd(narrow)
    return TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1), block_elems=3000, buffers="average")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("narrow", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_bytes", [256, 1024, 5000, 1 << 20])
def test_a_torch_models_checksums_are_those_of_the_vector(narrow: torch.dtype | None, chunk_bytes: int) -> None:
    store = odd(narrow)
    layout = store.layout()
    into, again = store.empty(layout.n_elems), store.empty(layout.n_elems)
    sums = ChunkSums(layout, chunk_bytes, into, copy_chunk)
    assert store.begin_snapshot(into, sums) is None
    store.snapshot(again)
    assert into.tobytes() == again.tobytes()
    assert sums.by_chunk() == checksums_of(layout, chunk_bytes, again)


@pytest.mark.usefixtures("small")
def test_what_a_device_copies_later_is_left_to_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self, side: object) -> None:
            """Nothing is recorded on the host."""

    store = odd(None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Side())
    device, groups = torch.device("cuda", 0), _groups(store._spans)
    assert len(groups) >= 3
    store._groups = [groups[0], replace(groups[1], device=device), *groups[2:]]
    monkeypatch.setattr(store, "_sides", {device: Side()})
    layout, into = store.layout(), np.empty(store.layout().n_elems, np.float32)
    sums = ChunkSums(layout, 1024, into, copy_chunk)
    store.begin_snapshot(into, sums)
    start_elem = [block.start_elem for block in layout.blocks]
    wanted = {}
    for chunk, found in checksums_of(layout, 1024, into).items():
        start = start_elem[chunk.block_id] + chunk.offset_bytes // 4
        if start + chunk.length_bytes // 4 <= groups[0].stop_elem or start >= groups[1].stop_elem:
            wanted[chunk] = found
    assert sums.by_chunk() == wanted
    assert wanted


class Side:
    def wait_stream(self, other: object) -> None:
        """There is no stream."""


def vectors_of(store: TorchParameters) -> Vectors:
    layout = store.layout()
    vectors = Vectors(layout.n_elems, store, n_trained=layout.n_trained)
    vectors.base[:] = 0.0
    return vectors


@pytest.mark.usefixtures("small")
def test_a_push_has_the_checksums_of_its_own_copy_and_no_other() -> None:
    store = odd(None)
    layout, vectors = store.layout(), vectors_of(store)
    assert vectors.checksums() == {}
    vectors.snapshot(store, chunk_bytes=1024)
    assert vectors.checksums() == checksums_of(layout, 1024, vectors.push)
    vectors.snapshot(store, chunk_bytes=512)
    assert vectors.checksums() == checksums_of(layout, 512, vectors.push)
    vectors.snapshot(store)
    assert vectors.checksums() == {}, "differences will be sent"
    vectors.snapshot(store, chunk_bytes=512)
    vectors.copy_base()
    assert vectors.checksums() == {}, "theta_base is another vector"
    vectors.snapshot(store, chunk_bytes=512)
    vectors.restore(vectors.base.copy(), vectors.base.copy())
    assert vectors.checksums() == {}, "another push was restored"


@pytest.mark.usefixtures("small")
def test_a_copy_from_which_rounding_is_still_to_be_removed_has_no_checksums() -> None:
    store = odd(torch.bfloat16)
    vectors = vectors_of(store)
    vectors.snapshot(store, chunk_bytes=1024)
    assert vectors.checksums() == {}


@pytest.mark.usefixtures("small")
def test_a_push_that_is_sent_from_the_parameters_has_none_before_it_is_sent() -> None:
    model = torch.nn.Linear(50, 60)
    store = TorchParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    vectors = vectors_of(store)
    vectors.snapshot(store, may_stay_live=True, chunk_bytes=1024)
    assert vectors.checksums() == {}
    vectors.keep_push(store)
    assert vectors.checksums() == {}


def test_small_models_are_copied_without_numba() -> None:
    assert hashing_copy(32 << 20) is copy_chunk
    assert hashing_copy((32 << 20) - 1) is None


def test_where_numba_is_not_installed_a_model_is_copied_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads._hashing_copy.cache_clear()
    for name in ("landing_numba", "compiling"):
        monkeypatch.delitem(sys.modules, f"dips.core.math.{name}", raising=False)
        monkeypatch.delattr(dips.core.math, name, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        assert hashing_copy(1 << 40) is None
    finally:
        payloads._hashing_copy.cache_clear()


@pytest.mark.usefixtures("small")
def test_a_model_that_is_installed_past_the_caches_has_the_vectors_bits() -> None:
    store = odd(None)
    flat = np.random.default_rng(3).standard_normal(store.layout().n_elems, np.float32)
    store.install(flat)
    again = np.empty_like(flat)
    store.snapshot(again)
    assert again.tobytes() == flat.tobytes()
