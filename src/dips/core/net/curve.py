"""CURVE keys of the data flow, and functions that make a ZeroMQ socket use them.

A pair exists as long as its process and is in no file; who owns which public key is sent over the control flow
(docs/security.md). Once a pair is at hand nothing here ever opens a socket without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
import zmq.utils.z85

from dips.core.errors import ConfigError
from dips.core.net.security import Identity, Security
from dips.core.protocol import CURVE_KEY_BYTES

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq asks, within a context, whether a peer's key is authorised (ZeroMQ's RFC 27)."""

ZAP_DOMAIN = b"dips-data"


@dataclass(frozen=True)
class CurvePair:
    """A key pair; public and secret have CURVE_KEY_BYTES each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> CurvePair:
        """A fresh pair, from the system's random numbers. Raises ConfigError where libzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError(
                "this build of libzmq cannot encrypt (no CURVE): install pyzmq from a wheel, which can, or build "
                "libzmq with libsodium"
            )
        public, secret = (zmq.utils.z85.decode(text) for text in zmq.curve_keypair())
        return cls(public, secret)


def pair_for(security: Security) -> CurvePair | None:
    """A pair for a process that has an identity; None for one that runs without keys. Raises as CurvePair.new()."""
    return CurvePair.new() if isinstance(security, Identity) else None


def as_server(socket: zmq.Socket[bytes], pair: CurvePair) -> None:
    """Call before bind: peers must know `pair.public`, and the context's ZAP handler must authorise their keys."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it libzmq accepts every peer while no handler answers


def as_client(socket: zmq.Socket[bytes], pair: CurvePair, server_key: bytes) -> None:
    """Call before connect: speak only to the owner of `server_key`. Raises ConfigError for a key of another length."""
    if len(server_key) != CURVE_KEY_BYTES:
        raise ConfigError(
            f"a data port's CURVE key has {len(server_key)} bytes, it must have {CURVE_KEY_BYTES}: start the slave "
            "with --keys, as this process was"
        )
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
