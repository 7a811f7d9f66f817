"""The flat vectors: how many there are, which may be overwritten when, and that no bit is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.cluster_bench import ClusterBench
from support.vectors_held import vectors_held

from dips.core.errors import LocalProtocolError
from dips.core.ids import Version
from dips.core.layout import Layout, Parameter
from dips.core.net.payloads import SnapshotReady
from dips.worker.parameters import ChunkSums
from dips.worker.state.effects import InstallMode
from dips.worker.vectors import Live, VectorCopies, Vectors

F32 = NDArray[np.float32]
N = 6


class Flat:
    def __init__(self, theta: F32) -> None:
        self.theta = theta.copy()

    def layout(self) -> Layout:
        return Layout((Parameter("w", (self.theta.size,), "float32", "w"),))

    def snapshot(self, into: F32) -> None:
        into[:] = self.theta

    def install(self, flat: F32) -> None:
        self.theta = flat.copy()

    def reset_inner_optimizer(self) -> None:
        raise AssertionError("not asked for")


class Streaming(Flat):
    """Its snapshots are copied only when a reader waits for them, and then as far as asked."""

    def __init__(self, theta: F32) -> None:
        super().__init__(theta)
        self.made = 0

    def empty(self, n_elems: int) -> F32:
        self.made += 1
        return np.full(n_elems, np.nan, np.float32)

    def begin_snapshot(self, into: F32, sums: ChunkSums | None = None) -> SnapshotReady | None:
        into.fill(np.nan)
        return Late(self.theta.copy(), into)

    def live(self) -> Sequence[F32] | None:
        return None


class Plain(Streaming):
    def begin_snapshot(self, into: F32, sums: ChunkSums | None = None) -> None:
        into[:] = self.theta

    def install(self, flat: F32) -> None:
        self.theta[:] = flat

    def live(self) -> Sequence[F32]:
        return [self.theta[:4], self.theta[4:]]


class Late:
    def __init__(self, theta: F32, into: F32) -> None:
        self._theta = theta
        self._into = into

    def wait(self, start_elem: int, stop_elem: int) -> None:
        self._into[start_elem:stop_elem] = self._theta[start_elem:stop_elem]


def at_base(theta: float = 1.0, n_trained: int = N) -> tuple[Flat, Vectors]:
    store, vectors = Flat(np.zeros(N, np.float32)), Vectors(N, n_trained=n_trained)
    vectors.landing()[:] = theta
    vectors.install(store, InstallMode.REPLACE)
    return store, vectors


@pytest.mark.parametrize(("share", "kept"), [(1.0, 2.0), (0.5, 1.0), (0.0, 0.0)])
def test_a_rebase_keeps_its_share_of_the_steps_since_the_push(share: float, kept: float) -> None:
    store, vectors = at_base()
    store.theta += 4.0
    vectors.snapshot(store)
    vectors.landing()[:] = 100.0
    store.theta += 2.0
    vectors.install(store, InstallMode.REBASE_FROM_PUSH, share)
    assert store.theta.tolist() == [100.0 + kept] * N
    assert vectors.base.tolist() == [100.0] * N


def test_a_pull_that_is_asked_for_again_lands_where_it_did_and_one_that_came_to_nothing_leaves_its_vector() -> None:
    store, vectors = at_base()
    vectors.snapshot(store)
    first = vectors.landing(push_is_live=True)
    vectors.keep_push(store)
    assert vectors.landing() is first
    assert vectors.pull is first
    assert vectors.push is not first
    store, vectors = at_base()
    vectors.landing()[:] = -1.0
    store.theta += 1.0
    vectors.snapshot(store)
    assert vectors_held(vectors) == 2
    assert vectors.push.tolist() == [2.0] * N


def test_a_donation_sends_the_base_which_stays_as_it_is() -> None:
    store, vectors = at_base(3.0)
    store.theta += 1.0
    vectors.snapshot(store)
    vectors.copy_base()
    sent, ready = vectors.sending()
    assert ready is None
    assert sent is vectors.base
    assert vectors.push.tolist() == [3.0] * N
    vectors.landing(push_is_live=True)[:] = 50.0
    assert sent.tolist() == [3.0] * N, "what lands does not touch what is given back"
    vectors.keep_push(store)
    vectors.install(store, InstallMode.REPLACE)
    assert store.theta.tolist() == vectors.base.tolist() == [50.0] * N


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
def test_rounds_of_any_kind_agree_with_plain_copies(rounds: list[tuple[int, int, bool]]) -> None:
    """Steps before the landing and while it lasts; whether the push was dropped. Never more than three vectors."""
    store, vectors = at_base()
    base, version = 1.0, 1.0
    for before, during, dropped in rounds:
        store.theta += 1.0
        pushed = float(store.theta[0])
        vectors.snapshot(store)
        sent, _ = vectors.sending()
        assert isinstance(sent, np.ndarray)
        assert sent.tolist() == [pushed] * N
        store.theta += before
        landing = vectors.landing(push_is_live=before == 0, push_is_needed=not dropped)
        vectors.keep_push(store)
        store.theta += during
        version += 16.0
        landing[:] = version
        rebase = (before or during) and not dropped
        vectors.install(store, InstallMode.REBASE_FROM_PUSH if rebase else InstallMode.REPLACE)
        base = version
        assert vectors_held(vectors) <= 3
        assert vectors.base.tolist() == [base] * N
        assert store.theta.tolist() == [version + (before + during if rebase else 0)] * N


def test_a_snapshot_under_way_is_waited_for_by_whoever_reads_all_of_it_or_lands_in_its_place() -> None:
    store = Streaming(np.arange(N, dtype=np.float32))
    vectors = Vectors(N, store)
    vectors.snapshot(store)
    flat, ready = vectors.sending()
    assert ready is not None
    assert isinstance(flat, np.ndarray)
    ready.wait(0, 2)
    assert flat[:2].tolist() == [0.0, 1.0]
    assert np.isnan(flat[2:]).all(), "the rest is not there yet"
    store.theta += 10.0
    assert vectors.push.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert store.made == 1, "memory comes from the store"
    vectors.landing(push_is_live=True)[:] = 7.0
    vectors.install(store, InstallMode.REPLACE)
    assert store.theta.tolist() == [7.0] * N


class Rounding(Streaming):
    """What rounding made of each installed value is a half more."""

    rounds = True

    def add_rounded_off(self, flat: F32, installed: F32, start_elem: int, stop_elem: int) -> None:
        flat[start_elem:stop_elem] -= 0.5


def test_a_snapshots_rounding_is_removed_once_from_each_piece_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dips.worker.vectors.PIECE_ELEMS", 2)
    store = Rounding(np.arange(N, dtype=np.float32))
    vectors = Vectors(N, store)
    vectors.restore(np.ones(N, np.float32), None)
    vectors.snapshot(store)
    flat, ready = vectors.sending()
    assert isinstance(flat, np.ndarray)
    assert ready is not None
    for _ in range(2):
        ready.wait(1, 3)
        assert flat[:4].tolist() == [-0.5, 0.5, 1.5, 2.5]
        assert np.isnan(flat[4:]).all()
    assert vectors.push.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]


def test_a_checkpoint_has_every_vector_that_is_needed_as_it_is_now() -> None:
    store, life = Rounding(np.full(N, 5.0, np.float32)), ClusterBench()
    vectors = Vectors(N, store)
    vectors.restore(*(np.full(N, value, np.float32) for value in (1.0, 2.0, 4.0, 3.0)))
    life.begin()
    life.train(4)
    saved = life.session.saved()
    assert saved is not None
    assert saved.push is not None
    copies = VectorCopies(vectors)

    def taken(**changes: object) -> dict[str, list[float]]:
        raws = copies.take(store, replace(saved, **changes))  # type: ignore[arg-type]
        assert {(raw.dtype, raw.shape) for raw in raws.values()} == {("F32", (N,))}
        return {name: np.unique(raw.data.view(np.float32)).tolist() for name, raw in raws.items()}

    kept = {"theta": [5.0], "theta_base": [1.0], "theta_installed": [3.0]}
    assert taken(push=None) == kept
    assert taken(residual=True) == kept | {"theta_at_push": [2.0], "residual": [4.0]}
    vectors.clear_residual()
    store.theta[:] = 6.0
    assert taken(residual=True) == kept | {"theta": [6.0], "theta_at_push": [2.0]}
    vectors.landing()[:] = 7.0
    vectors.install(store, InstallMode.REPLACE)
    assert taken(push=None, base=Version(1, 1)) == {"theta": [7.0], "theta_base": [7.0]}


def plain() -> tuple[Plain, Vectors]:
    store = Plain(np.arange(N, dtype=np.float32))
    vectors = Vectors(N, store)
    vectors.landing()[:] = 0.0
    vectors.install(store, InstallMode.REPLACE)
    store.theta[:] = np.arange(N)
    return store, vectors


def read(source: F32 | Live, start_elem: int = 0, stop_elem: int = N) -> list[float]:
    assert isinstance(source, Live)
    with source.lock:
        read: list[float] = np.frombuffer(source.bytes_at(slice(4 * start_elem, 4 * stop_elem)), np.float32).tolist()
        return read


def test_a_push_is_sent_from_the_parameters_while_training_waits() -> None:
    store, vectors = plain()
    vectors.snapshot(store, may_stay_live=True)
    source, ready = vectors.sending()
    assert ready is None
    assert vectors_held(vectors) == 1, "theta_base alone"
    assert read(source) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "where parts meet"
    assert read(source, 1, 3) == [1.0, 2.0]
    assert read(source, 4, 6) == [4.0, 5.0]
    vectors.landing(push_is_live=True)[:] = 9.0
    assert vectors_held(vectors) == 2
    vectors.install(store, InstallMode.REPLACE)
    assert store.theta.tolist() == vectors.base.tolist() == [9.0] * N


def test_a_copy_takes_the_place_of_the_parameters_before_they_change() -> None:
    store, vectors = plain()
    vectors.snapshot(store, may_stay_live=True)
    source, _ = vectors.sending()
    vectors.keep_push(store)
    store.theta += 100.0
    assert read(source) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert vectors.sending()[0] is vectors.push
    vectors.landing()[:] = 1000.0
    vectors.install(store, InstallMode.REBASE_FROM_PUSH)
    assert store.theta.tolist() == [1100.0] * N


def test_nothing_is_read_from_parameters_that_change_without_a_copy() -> None:
    """Else a transfer that was given up could send bytes half changed, with a checksum that fits them."""
    for change in ("forget", "snapshot", "donate", "install"):
        store, vectors = plain()
        vectors.snapshot(store, may_stay_live=True)
        source, _ = vectors.sending()
        match change:
            case "forget":
                vectors.forget_push()
            case "snapshot":
                vectors.snapshot(store)
            case "donate":
                vectors.copy_base()
            case "install":
                vectors.landing(push_is_needed=False)[:] = 1.0
                vectors.install(store, InstallMode.REPLACE)
        with pytest.raises(LocalProtocolError, match="given up"):
            read(source)


def test_averaged_buffers_are_the_pulled_ones_after_a_rebase() -> None:
    """A variance that fell since the push must not fall below zero where it is lower."""
    store, vectors = at_base(n_trained=N - 2)
    for mode in (InstallMode.REBASE_FROM_PUSH, InstallMode.REBASE_FROM_BASE):
        before = store.theta[0]
        vectors.snapshot(store)
        store.theta -= 0.75
        vectors.landing()[:] = 0.5
        vectors.install(store, mode)
        assert store.theta[-2:].tolist() == [0.5, 0.5]
        assert store.theta[: N - 2].tolist() == [0.5 - 0.75 + (0.0 if before == 1.0 else before - 0.5)] * (N - 2)


@pytest.mark.parametrize("kind", [Flat, Streaming, Plain])
def test_a_push_of_zeros_is_seen_wherever_it_is_kept_and_averaged_elements_hide_it_not(kind: type[Flat]) -> None:
    store, vectors = kind(np.zeros(N, np.float32)), Vectors(N, n_trained=N - 1)
    for at, is_zero in ((N - 1, True), (N - 2, False)):
        store.theta[at] = 1.0
        vectors.snapshot(store, may_stay_live=True)
        assert vectors.push_is_zero() is is_zero
        assert vectors.push_is_live is (kind is Plain)


@pytest.mark.parametrize("kind", [Flat, Streaming, Plain])
def test_a_push_that_training_did_not_change_is_seen_wherever_it_is_kept(kind: type[Flat]) -> None:
    store, vectors = kind(np.ones(N, np.float32)), Vectors(N, n_trained=N - 1)
    vectors.snapshot(store, may_stay_live=True)
    assert not vectors.push_is_base(), "there is none yet"
    vectors.landing()[:] = 2.0
    vectors.install(store, InstallMode.REPLACE)
    for at, is_base in ((N - 1, True), (N - 2, False)):
        store.theta[at] = 3.0
        vectors.snapshot(store, may_stay_live=True)
        assert vectors.push_is_base() is is_base
