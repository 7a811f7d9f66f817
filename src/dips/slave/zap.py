"""Authorises clients of the data port: libzmq asks here (ZAP, ZeroMQ's RFC 27) before a peer's first message is read.

By then the peer has shown that it owns the secret half of its key, and that it knew this port's public key, which only
the master gives out. Answered on the data port's own thread, so that the list never changes in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from dips.core.net.curve import ZAP_ENDPOINT
from dips.slave.state.admission import Admission

ZAP_FRAMES = 7
"""Frames of a request: version, request, domain, address, routing id, mechanism, and for CURVE the key."""

Socket = zmq.Socket[bytes]


class ZapHandler:
    """Answers the requests of all sockets of `context`. refused: called with a sentence for each refused key."""

    def __init__(
        self, context: zmq.Context[Socket], admission: Admission, refused: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._admission = admission
        self._refused = refused
        self.socket = context.socket(zmq.REP)
        """The socket of the requests; readable when there is one."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer_all(self) -> None:
        """Answer all waiting requests; never waits."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(question), zmq.NOBLOCK)

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        version, request = question[0], question[1]
        user = self._user(question)
        if user is not None:
            return [version, request, b"200", b"OK", user.encode(), b""]
        # Not 300, "try later": libzmq then leaves both ends waiting until the time for the handshake is over.
        return [version, request, b"400", b"this key is not on the master's list", b"", b""]

    def _user(self, question: Sequence[bytes]) -> str | None:
        if len(question) != ZAP_FRAMES or question[5] != b"CURVE":
            self._refused("a peer without a CURVE key")
            return None
        address, key = question[3].decode("ascii", "replace"), question[6]
        user = self._admission.user_of(key)
        if user is None:
            self._refused(
                f"a process at {address} with data key {key.hex()[:8]}, which is not on the master's list: it has not "
                "joined, or it was evicted or revoked"
            )
        return user
