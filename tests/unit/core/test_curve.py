"""Pairs of the data flow's keys, and what a socket refuses to do without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from dips.core.errors import ConfigError
from dips.core.net.security import INSECURE, Identity, Role
from dips.core.net.zmq_sockets import CurvePair, as_client, pair_for
from dips.core.protocol import CURVE_KEY_BYTES


def test_each_pair_is_fresh_and_hides_its_secret() -> None:
    one, other = CurvePair.new(), CurvePair.new()
    assert len({one.public, one.secret, other.public, other.secret}) == 4
    assert {len(key) for key in (one.public, one.secret)} == {CURVE_KEY_BYTES}
    assert repr(one.secret) not in repr(one)
    assert "secret" not in repr(one)


def test_only_a_process_with_an_identity_has_one() -> None:
    identity = Identity(Role.CLUSTER, "a", Path("keys"), b"", b"", b"")
    assert pair_for(INSECURE) is None
    assert isinstance(pair_for(identity), CurvePair)


@pytest.mark.parametrize("key", [b"", b"k" * 31, b"k" * 33])
def test_a_server_key_of_another_length_is_refused(key: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        with pytest.raises(ConfigError, match=f"{len(key)} bytes"):
            as_client(dealer, CurvePair.new(), key)


def test_a_build_without_curve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: False)
    with pytest.raises(ConfigError, match="cannot encrypt"):
        CurvePair.new()
