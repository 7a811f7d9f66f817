"""The data flow's sockets: one DEALER to each slave, used by one thread. Knows frames, and nothing of what they say."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import zmq

from dips.core.data_header import MAX_HEADER_BYTES
from dips.core.messages import PlacementSpec
from dips.core.net import require_loopback
from dips.worker.flow import MOST_REQUESTS

_logger = logging.getLogger("dips.worker.data")

HANDSHAKE_MS = 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000

QUEUE_MESSAGES = 2 * MOST_REQUESTS + 2
"""libzmq tells the writing side that messages were taken only once per half of the mark: with a mark of less than twice
what may be unanswered, sending would be refused while the queue is nearly empty."""

Header = bytes
Payload = memoryview


class Links:
    """A DEALER socket for each slave of a placement; to be used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], placement: PlacementSpec, chunk_bytes: int):
        """chunk_bytes: of the longest payload that may arrive."""
        self._context = context
        self._chunk_bytes = chunk_bytes
        self._endpoints = {address.slave_id: address.data_endpoint for address in placement.slaves}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()

    def open(self, slaves: Sequence[str]) -> None:
        """Connect. Raises ConfigError for an endpoint that is not loopback."""
        for slave in slaves:
            if self._endpoints[slave]:
                require_loopback(self._endpoints[slave], f"the data endpoint of slave {slave}")
                self.reconnect(slave)

    def reconnect(self, slave: str) -> None:
        """A fresh socket has a fresh routing id, so that late answers to the old one go nowhere."""
        self._drop(slave)
        if not self._endpoints[slave]:
            return  # the slave is away: the transfer's silence will say so
        dealer = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,  # what is not sent is sent again by the next attempt
            zmq.SNDHWM: QUEUE_MESSAGES,
            zmq.RCVHWM: QUEUE_MESSAGES,
            zmq.MAXMSGSIZE: self._chunk_bytes + MAX_HEADER_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: MAX_RECONNECT_MS,
        }
        for option, value in options.items():
            dealer.setsockopt(option, value)
        dealer.connect(self._endpoints[slave])
        self._sockets[slave] = dealer
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, slave: str, header: Header, payload: Payload | None = None, *, copy: bool = False) -> None:
        """Never blocks: what does not fit counts as lost, and the transfer's silence repairs it.

        copy: the payload's memory may change as soon as this returns; else not before its answer came.
        """
        dealer = self._sockets.get(slave)
        if dealer is None:
            return
        try:
            if payload is None:
                dealer.send(header, zmq.NOBLOCK)
            else:
                dealer.send(header, zmq.NOBLOCK | zmq.SNDMORE)
                dealer.send(payload, zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            _logger.debug("slave %s takes no more messages now", slave)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, Header, Payload | None]]:
        """What has arrived, waiting at most timeout_s for the first message: (slave, header, payload).

        A message of more than two frames is nobody's: it is read and dropped.
        """
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        for slave, dealer in list(self._sockets.items()):
            while dealer in ready and self._sockets.get(slave) is dealer:
                try:
                    header = dealer.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not dealer.getsockopt(zmq.RCVMORE):
                    yield slave, header, None
                    continue
                payload = dealer.recv(copy=False)
                if not payload.more:
                    yield slave, header, payload.buffer
                    continue
                while payload.more:
                    payload = dealer.recv(copy=False)

    def close(self) -> None:
        for slave in list(self._sockets):
            self._drop(slave)

    def _drop(self, slave: str) -> None:
        dealer = self._sockets.pop(slave, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=0)
