"""The difference codecs: the compiled twin equals the reference to the bit, and what is lost is what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checked_memory import Interpreted
from support.numerics import F32, Shard, assert_same_bits

from dips.core.math import wire_numba, wire_numpy
from dips.core.wire import RESIDUAL_CODEC, Codec, encoded_bytes, n_scales

CODECS = [codec for codec in Codec if codec.is_difference]
SIZES = [1, 2, 63, 64, 65, 127, 128, 1000, 4099]
U8 = np.ndarray


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    wire_numba.warm_up()


def vectors(seed: int, n_elems: int, special: bool = False) -> tuple[F32, F32, F32]:
    """(now, base, residual): parameters a small step apart."""
    shard = Shard.random(seed, n_elems, slots=1, special=special)
    base, step = shard.theta, np.float32(0.01) * shard.staging[0]
    with np.errstate(all="ignore"):
        return base + step, base, np.float32(0.1) * shard.momentum


def payload_of(codec: Codec, n_elems: int, ahead: int = 0) -> U8:
    return np.full(encoded_bytes(codec, n_elems) + ahead, 0xAB, np.uint8)[ahead:]


def both(codec: Codec, now: F32, base: F32, residual: F32, twin: Any = wire_numba) -> None:
    for given_residual in (None, residual):
        expected, found = payload_of(codec, len(now)), payload_of(codec, len(now), ahead=1)
        wire_numpy.encode(codec, now, base, given_residual, expected)
        twin.encode(codec, now, base, given_residual, found)
        assert_nan_scales_aside(codec, len(now), found, expected)
        found.flags.writeable = False
        wanted, out = np.zeros_like(now), np.zeros_like(now)
        wire_numpy.decode(codec, base, expected, wanted)
        twin.decode(codec, base, found, out)
        assert_same_bits(out, wanted)
    kept, kept_twin = residual.copy(), residual.copy()
    wire_numpy.keep_residual(codec, now, base, kept)
    twin.keep_residual(codec, now, base, kept_twin)
    assert_same_bits(kept_twin, kept)


def assert_nan_scales_aside(codec: Codec, n_elems: int, found: U8, expected: U8) -> None:
    """Equal bytes; any NaN is as good as any other as a scale."""
    scales = 4 * n_scales(codec, n_elems)
    assert_same_bits(found[:scales].copy().view(np.float32), expected[:scales].copy().view(np.float32))
    assert found[scales:].tolist() == expected[scales:].tolist()


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("n_elems", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_the_compiled_twin_equals_the_reference(codec: Codec, n_elems: int, special: bool) -> None:
    both(codec, *vectors(n_elems, n_elems, special))


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("codec", CODECS)
def test_its_source_in_the_interpreter_equals_the_reference_and_reads_and_writes_nothing_else(
    codec: Codec, special: bool
) -> None:
    twin: Any = Interpreted(wire_numba)
    for n_elems in (1, 63, 64, 131):
        now, base, residual = vectors(n_elems, n_elems, special)
        both(codec, now, base, residual, twin)
        lost = np.zeros(encoded_bytes(RESIDUAL_CODEC, n_elems), np.uint8)
        version, _, lost, _ = published_twice(codec, now, base, lost, twin)
        published_twice(codec, version + now, base, lost, twin)


@settings(max_examples=150)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=150),
    seed=st.integers(0, 2**20),
    codec=st.sampled_from(CODECS),
)
def test_any_float32_values(values: list[float], seed: int, codec: Codec) -> None:
    rng = np.random.default_rng(seed)
    pool = np.array(values, np.float32)
    both(codec, rng.permutation(pool), rng.permutation(pool), rng.permutation(pool))


@pytest.mark.parametrize(("codec", "share"), [(Codec.BF16, 0.004), (Codec.INT8, 0.02), (Codec.INT4, 0.25)])
def test_what_is_lost_is_small_and_kept_to_the_last_bit_that_float32_has(codec: Codec, share: float) -> None:
    now, base, residual = vectors(3, 6400)
    before, payload = residual.copy(), payload_of(codec, 6400)
    wire_numba.encode(codec, now, base, residual, payload)
    wire_numba.keep_residual(codec, now, base, residual)
    sent = np.zeros_like(now)
    wire_numba.decode(codec, np.zeros_like(base), payload, sent)
    wanted = (now - base) + before
    np.testing.assert_array_equal(residual, wanted - sent)
    assert np.linalg.norm(residual) < share * np.linalg.norm(wanted)


def published_twice(codec: Codec, now: F32, base: F32, residual: U8, twin: Any = wire_numba) -> tuple[F32, U8, U8, int]:
    """What both twins publish, once they agree: the version, its difference, the next residual, elements not finite."""
    results = []
    for module, ahead in ((wire_numpy, 0), (twin, 1)):
        version, payload = now.copy(), payload_of(codec, len(now), ahead)
        lost = payload_of(RESIDUAL_CODEC, len(now), ahead)
        bad = module.publish(codec, version, base, residual, payload, lost)
        results.append((version, payload, lost, bad))
    (version, payload, lost, bad), (other, other_payload, other_lost, other_bad) = results
    assert_same_bits(other, version)
    assert_nan_scales_aside(codec, len(now), other_payload, payload)
    assert_nan_scales_aside(RESIDUAL_CODEC, len(now), other_lost, lost)
    assert other_bad == bad == np.count_nonzero(~np.isfinite(version))
    return version, payload, lost, bad


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("n_elems", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_both_twins_publish_what_readers_decode(codec: Codec, n_elems: int, special: bool) -> None:
    residual = np.zeros(encoded_bytes(RESIDUAL_CODEC, n_elems), np.uint8)
    _, base, _ = vectors(n_elems, n_elems)
    for seed in range(4):
        now = base + np.float32(0.01) * vectors(seed, n_elems, special)[0]
        version, payload, residual, bad = published_twice(codec, now, base, residual)
        read = np.zeros_like(base)
        wire_numpy.decode(codec, base, payload, read)
        assert_same_bits(read, version)
        if bad:
            return  # such a version is refused
        base = version


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_published_follows_the_exact_model(codec: Codec) -> None:
    """Error feedback: what readers hold differs from the exact model by one rounding, not by the sum of all."""
    n = 64 * 20
    rng, exact = np.random.default_rng(1), np.zeros(64 * 20)
    theta, residual = np.zeros(n, np.float32), np.zeros(encoded_bytes(RESIDUAL_CODEC, n), np.uint8)
    for _ in range(200):
        step = rng.standard_normal(n).astype(np.float32)
        exact += step
        theta, _, residual, _ = published_twice(codec, theta + step, theta, residual)
    error = np.abs(theta - exact).max()
    assert error < {Codec.BF16: 0.05, Codec.INT8: 0.1, Codec.INT4: 0.6}[codec]
    kept = np.zeros_like(theta)
    wire_numpy.decode(RESIDUAL_CODEC, theta, residual, kept)
    assert np.abs(kept - exact).max() < error / 5 + 1e-3, "with the residual it is nearer by far"


X, LONG, INT8, INT4, LOST = (
    np.zeros(64, np.float32), np.zeros(65, np.float32),
    payload_of(Codec.INT8, 64), payload_of(Codec.INT4, 64), payload_of(RESIDUAL_CODEC, 64),
)  # fmt: skip
READ_ONLY = np.frombuffer(INT8.tobytes(), np.uint8)


@pytest.mark.parametrize("module", [wire_numpy, wire_numba], ids=["reference", "compiled"])
@pytest.mark.parametrize(("name", "arguments"), [
    ("encode", (Codec.F32, X, X, None, np.zeros(256, np.uint8))), ("encode", (Codec.INT8, X, X[:63], None, INT8)),
    ("encode", (Codec.INT8, X, X, np.zeros(64), INT8)), ("encode", (Codec.INT4, X, X, None, INT8)),
    ("encode", (Codec.INT8, X, X, None, READ_ONLY)), ("decode", (Codec.INT8, X, INT8[1:], X.copy())),
    ("decode", (Codec.INT8, X, INT8, LONG)), ("keep_residual", (Codec.INT8, X, X, LONG)),
    ("publish", (Codec.F32, X.copy(), X, LOST, INT4, LOST.copy())),
    ("publish", (Codec.INT4, X.copy(), X[:63], LOST, INT4, LOST.copy())),
    ("publish", (Codec.INT4, X.copy(), X, LOST[1:], INT4, LOST.copy())),
    ("publish", (Codec.INT4, X.copy(), X, LOST, INT4[1:], LOST.copy())),
    ("publish", (Codec.INT4, X.copy(), X, LOST, INT4, LOST[1:])),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(module: object, name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r" is |no differences|read-only|writes"):
        getattr(module, name)(*arguments)
