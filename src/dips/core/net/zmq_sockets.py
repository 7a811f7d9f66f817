"""ZeroMQ below its messages: CURVE keys of a socket, frames sent without a copy, and reasons for failed handshakes."""

from __future__ import annotations

import errno
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import zmq
import zmq.utils.monitor
import zmq.utils.z85

from dips.core.errors import ConfigError
from dips.core.net.security import Identity, Security
from dips.core.protocol import CURVE_KEY_BYTES

# ---- keys ----
#
# A pair exists as long as its process and is in no file; who owns which public key is sent over the control flow
# (docs/security.md). Once a pair is at hand nothing here ever opens a socket without it.

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


# ---- frames ----
#
# libzmq sends these from the caller's memory, without a copy.


NOW = int(zmq.NOBLOCK)
NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Each operation on an enum of flags takes microseconds, and each chunk needs several."""

MOST_FRAMES, MOST_BYTES = 64, 16 << 20
"""That are kept. Bytes too: a payload may be memory of its own, which is kept with its frame."""


class Outgoing:
    """Makes such frames, and keeps them until there are most_frames or most_bytes, or until clear().

    When such a frame is given up, pyzmq's collector is notified: a thread wakes, takes the interpreter lock, and has
    driven the sender's code out of the caches when it sleeps again. Many that are given up at once wake it once.
    """

    def __init__(self, most_frames: int = MOST_FRAMES, most_bytes: int = MOST_BYTES) -> None:
        self._most_frames = most_frames
        self._most_bytes = most_bytes
        self._kept: list[zmq.Frame] = []
        self._kept_bytes = 0

    def frame(self, payload: memoryview) -> zmq.Frame:
        """To be sent with copy=False. The payload's bytes must stay as they are until the frame has left."""
        if len(self._kept) >= self._most_frames or self._kept_bytes + payload.nbytes > self._most_bytes:
            self.clear()
        frame = zmq.Frame(payload, copy=False, track=False)
        self._kept.append(frame)
        self._kept_bytes += payload.nbytes
        return frame

    def clear(self) -> None:
        """Give up those that are kept; libzmq keeps what has not left yet."""
        self._kept.clear()
        self._kept_bytes = 0


# ---- handshakes ----


_numbers = itertools.count(1)

_WRONG: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "what the peer sent was not encrypted for the key of this port",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "the peer speaks no ZeroMQ with the same security (CURVE, or none)",
}

_HUNG_UP = "the peer hung up, or was silent, before they were connected: it may want other security (CURVE, or none)"


class Failure(Enum):
    """Why a handshake failed.

    KEY: the other side does not accept this key. OTHER: it hung up, was silent, or does not speak the protocol. GONE: a
    connection that was made has ended, or no process listens there.
    """

    KEY = 1
    OTHER = 2
    GONE = 3


@dataclass(frozen=True)
class HandshakeFailed:
    """One connection that was not made, and why, as this side sees it."""

    failure: Failure
    sentence: str


SETTLED_S = 6.0
"""A peer that came so long ago and did not shake hands never will: HANDSHAKE_IVL of our sockets is 5 s."""

SILENT_S = 4.0
"""A peer that came so long ago may be the one that a failed handshake is about: libzmq drops silent ones after 5 s."""

HUNG_UP = (errno.ECONNRESET, errno.EPIPE)
"""What libzmq says of a connection that the peer closed; of one that it dropped for its silence it says another."""

FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
MADE = zmq.EVENT_HANDSHAKE_SUCCEEDED


class Handshakes:
    """Listens to `socket`, which must belong to `context`, from before it binds or connects until close()."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        *,
        endings: bool = False,
        arrivals: Callable[[int], bool] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """endings: report connections that are GONE as well, for who connects and waits for answers. arrivals: for who
        binds with CURVE, which must not ask for FAILED_PROTOCOL: whether the connection with this file number has sent
        a byte so far; False if it is closed.

        libzmq 4.3.5 reports a message that does not decrypt by that event too, and in reporting it loses the error
        (errno) upon which it would have closed the connection, which then hangs. So those who came and did not
        shake hands are counted by what is missing.

        With arrivals, a peer that hangs up without a byte is no failure: the probes of a kubelet or a load balancer
        connect and close, every few seconds.
        """
        self._watched = socket
        self._clock_s = clock_s
        self._has_spoken = arrivals
        self._silent: deque[tuple[float, int]] = deque()
        self._spoken: deque[tuple[float, int]] = deque()
        """When a peer came whose handshake is still open, and its number: of those who had sent no byte, and of the
        others. Strangers come by the thousand: nothing here looks through all of them."""
        self._n_came = itertools.count()
        protocol = zmq.EVENT_ACCEPTED | MADE if arrivals is not None else zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        endpoint = f"inproc://dips-handshakes-{next(_numbers)}"
        socket.monitor(endpoint, FAILED | protocol | (ENDED if endings else 0))
        self.socket = context.socket(zmq.PAIR)
        """Readable when there is news."""
        # libzmq's own thread writes here and would wait for room, and everything else with it.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    @property
    def unsettled(self) -> bool:
        """Whether a peer may have to be counted though there will be no news."""
        return bool(self._silent or self._spoken)

    def failures(self) -> Iterator[HandshakeFailed]:
        """Those since the last call; never waits."""
        news = list(self._news())
        taken = {value: index for index, (event, value, _) in enumerate(news) if event == zmq.EVENT_ACCEPTED}
        for index, (event, value, spoke) in enumerate(news):
            if event == zmq.EVENT_ACCEPTED:
                # Of two connections that had one file number, the later was asked: the other had ended by then.
                came = self._spoken if spoke and taken[value] == index else self._silent
                came.append((self._clock_s(), next(self._n_came)))
            elif not self._settle(event, value) and event & ~(MADE | zmq.EVENT_MONITOR_STOPPED):
                yield _failure(event, value)
        for came in (self._silent, self._spoken):
            while came and self._clock_s() - came[0][0] >= SETTLED_S:
                came.popleft()
                yield HandshakeFailed(Failure.OTHER, "the peer has not this port's key, or speaks no ZeroMQ with CURVE")

    def _news(self) -> Iterator[tuple[int, int, bool]]:
        """Events with their numbers, and of who came whether it has spoken."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = zmq.utils.monitor.parse_monitor_message(frames)
            event, value = message["event"], message["value"]
            asked = self._has_spoken if event == zmq.EVENT_ACCEPTED else None
            yield event, value, asked is not None and asked(value)

    def _settle(self, event: int, value: int) -> bool:
        """Whoever came last is the most likely to have shaken hands now; only the number of the others counts. Returns
        whether it was a probe."""
        if not self.unsettled or not event & (FAILED | MADE):
            return False
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value in HUNG_UP:
            # In doubt none: for one that libzmq drops for its silence the event has errno, which may be an old one.
            if self._silent and self._clock_s() - self._silent[-1][0] < SILENT_S:
                self._silent.pop()
                return True
        max((came for came in (self._silent, self._spoken) if came), key=lambda came: came[-1][1]).pop()
        return False

    def close(self) -> None:
        """Before the watched socket is closed."""
        self._watched.monitor(None, 0)
        self.socket.close(linger=0)


def _failure(event: int, value: int) -> HandshakeFailed:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return HandshakeFailed(Failure.KEY, "the key is not accepted")
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return HandshakeFailed(Failure.OTHER, _WRONG.get(value, "the peer does not keep to the protocol of ZeroMQ"))
    if event & ENDED:
        return HandshakeFailed(Failure.GONE, "the peer is gone")
    # Two sides that want different security race to say so: the loser sees only that the other hung up.
    return HandshakeFailed(Failure.OTHER, _HUNG_UP)
