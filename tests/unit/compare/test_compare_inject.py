"""Bad pushes: when, and what of."""

from __future__ import annotations

import numpy as np
import pytest

from dips.core.errors import ConfigError
from dips.lab.compare.methods import F32, HUGE, NAN_ELEMS, Injection

N = 4096
BAD = 10


def vectors() -> tuple[F32, F32]:
    """(push, base)"""
    rng = np.random.default_rng(1)
    base = rng.standard_normal(N, dtype=np.float32)
    return base + np.float32(0.01) * rng.standard_normal(N, dtype=np.float32), base


def spoilt(kind: str, n_push: int = BAD, seed: int = 1) -> tuple[F32, F32, F32]:
    """(spoilt push, push, base)"""
    push, base = vectors()
    sent = push.copy()
    assert Injection(kind).corrupt(n_push, sent, base, seed)
    return sent, push, base


def test_which_pushes_are_bad_and_good_ones_stay() -> None:
    injection = Injection("nan")
    bad = [n for n in range(1, 35) if injection.is_bad(n)]
    assert bad == [10, 11, 12, 13, 14, 18, 19, 20, 21, 22, 26, 27, 28, 29, 30, 34]
    push, base = vectors()
    sent = push.copy()
    injection = Injection("x30")
    assert [injection.corrupt(n, sent, base, 1) for n in (1, 9, 15, 17, 23)] == [False] * 5
    assert np.array_equal(sent, push)


def test_each_kind_of_bad_push() -> None:
    sent, push, _ = spoilt("nan")
    wrong = np.isnan(sent)
    assert 1 <= wrong.sum() <= NAN_ELEMS
    assert np.array_equal(sent[~wrong], push[~wrong])
    sent, push, base = spoilt("x30")
    np.testing.assert_allclose(sent - base, HUGE * (push - base), rtol=1e-3, atol=1e-5)
    sent, push, base = spoilt("flip")
    np.testing.assert_allclose(sent - base, base - push, atol=1e-6)
    sent, push, base = spoilt("noise")
    way, noise = (np.asarray(v - base, dtype=np.float64) for v in (push, sent))
    assert np.linalg.norm(noise) == pytest.approx(np.linalg.norm(way), rel=1e-3)
    assert abs(way @ noise) < 0.1 * np.linalg.norm(way) * np.linalg.norm(noise)


@pytest.mark.parametrize("kind", ["nan", "noise"])
def test_another_seed_or_push_spoils_otherwise(kind: str) -> None:
    first = spoilt(kind)[0]
    for other in (spoilt(kind, seed=2)[0], spoilt(kind, n_push=BAD + 1)[0]):
        assert not np.array_equal(first, other, equal_nan=True)


def test_what_names_no_push_is_refused() -> None:
    for bad in ({"cluster": -1}, {"first_push": 0}, {"bad_run": 0}, {"good_run": 0}):
        with pytest.raises(ConfigError, match="names no push"):
            Injection("nan", **bad)
