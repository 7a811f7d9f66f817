"""The data flow's sockets: one DEALER to each slave, used by one thread. Sends and receives frames.

With keys it connects only to the owner of the key that the master named for a slave, and always encrypts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq

from dips.core.errors import ConfigError
from dips.core.messages import PlacementSpec, SlaveAddress
from dips.core.net.addresses import addresses_of, require_loopback
from dips.core.net.data_header import MAX_HEADER_BYTES
from dips.core.net.flow import MOST_REQUESTS
from dips.core.net.zmq_sockets import NOW, NOW_MORE, CurvePair, Failure, Handshakes, Outgoing, as_client

_logger = logging.getLogger("dips.data")

HANDSHAKE_MS = 5_000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1_000

QUEUE_MESSAGES = 2 * MOST_REQUESTS + 2
"""libzmq reports to the writing side that messages were taken only once per half of the mark: with a mark of less than
twice the unanswered messages, sending would be refused while the queue is nearly empty."""

_last_good: dict[str, str] = {}
"""By a slave's endpoint the address at which this process reached it last: each transfer has sockets of its own, and
begins there."""

Header = bytes
Payload = memoryview


class SlaveSockets:
    """The DEALER sockets of a placement's slaves; for use by one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        placement: PlacementSpec,
        chunk_bytes: int,
        curve: CurvePair | None = None,
    ):
        """chunk_bytes: of the longest payload that may arrive. curve: this process's keys; None: no encryption."""
        self._context = context
        self._chunk_bytes = chunk_bytes
        self._curve = curve
        self._addresses = {address.slave_id: address for address in placement.slaves}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._handshakes: dict[str, Handshakes] = {}
        self._places: dict[str, tuple[str, int]] = {}
        """The address to which a slave's socket connects, and how many were tried before it."""
        self._away: set[str] = set()
        self._news: list[str] = []
        self._poller = zmq.Poller()
        self._outgoing = Outgoing()
        self.changes = 0
        """How often a socket was opened or closed, for the owner of what dealer() and monitors() said."""

    def open(self, slaves: Sequence[str]) -> None:
        """Connect to those to which there is no connection. Raises ConfigError for keys on one side only, and without
        keys for an endpoint not on loopback."""
        for slave in slaves:
            is_open = slave in self._sockets and slave not in self._away
            if self._addresses[slave].data_endpoint and not is_open:
                _check_keys(self._addresses[slave], self._curve)
                self.reconnect(slave)

    def reconnect(self, slave: str) -> None:
        """Open a new socket, with a new routing id, so that late answers to the old one are lost; of a name with
        several addresses to the next one.
        """
        self._drop(slave)
        address = self._addresses[slave]
        if not address.data_endpoint:
            return  # the slave is away: the transfer will notice its silence
        good = _last_good.get(address.data_endpoint)
        places = sorted(addresses_of(address.data_endpoint), key=lambda place: place != good)
        _, tried = self._places.get(slave, ("", 0))
        place = places[tried % len(places)]
        self._places[slave] = place, tried + 1
        dealer = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,  # what is not sent is sent again by the next attempt
            zmq.SNDHWM: QUEUE_MESSAGES,
            zmq.RCVHWM: QUEUE_MESSAGES,
            zmq.MAXMSGSIZE: self._chunk_bytes + MAX_HEADER_BYTES,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: MAX_RECONNECT_MS,
            zmq.IPV6: int("[" in place),
        }
        for option, value in options.items():
            dealer.setsockopt(option, value)
        if self._curve is not None:
            as_client(dealer, self._curve, address.curve_key)
        self._handshakes[slave] = Handshakes(self._context, dealer, endings=True)
        self._poller.register(self._handshakes[slave].socket, zmq.POLLIN)
        dealer.connect(place)
        self._sockets[slave] = dealer
        self.changes += 1
        self._poller.register(dealer, zmq.POLLIN)

    def all_answered(self) -> None:
        """Each slave's socket has carried what it should: the next ones begin at the same addresses."""
        for slave, (place, _) in self._places.items():
            _last_good[self._addresses[slave].data_endpoint] = place

    def send(self, slave: str, header: Header, payload: Payload | None = None, *, copy: bool = False) -> None:
        """Send without blocking: a message that does not fit counts as lost, and is sent again after a silence.

        copy: the payload's memory may change as soon as this returns; else only after its answer came.
        """
        dealer = self._sockets.get(slave)
        if dealer is None:
            return
        try:
            if payload is None:
                dealer.send(header, NOW)
            else:
                dealer.send(header, NOW_MORE)
                dealer.send(payload if copy else self._outgoing.frame(payload), NOW, copy=copy)
        except zmq.Again:
            _logger.debug("slave %s takes no more messages now", slave)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, Header, Payload | None]]:
        """Arrived messages, waiting at most timeout_s for the first: (slave, header, payload).

        A message of more than two frames is invalid: it is read and dropped.
        """
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        self._note_news(ready)
        for slave, dealer in list(self._sockets.items()):
            while dealer in ready and self._sockets.get(slave) is dealer:
                try:
                    header = dealer.recv(NOW, copy=False)
                except zmq.Again:
                    break
                if not header.more:
                    yield slave, header.bytes, None
                    continue
                payload = dealer.recv(copy=False)
                if not payload.more:
                    yield slave, header.bytes, payload.buffer
                    continue
                while payload.more:
                    payload = dealer.recv(copy=False)

    def dealer(self, slave: str) -> zmq.Socket[bytes] | None:
        """The slave's socket, to be used in parallel with this object until the next change; None: there is none."""
        return self._sockets.get(slave)

    def monitors(self) -> list[zmq.Socket[bytes]]:
        """Sockets that are readable when there is news for look()."""
        return [handshakes.socket for handshakes in self._handshakes.values()]

    def look(self) -> None:
        """What receive() does besides receiving, for who receives without this object."""
        self._note_news({monitor: zmq.POLLIN for monitor in self.monitors() if monitor.poll(0)})

    def turned_away(self) -> Iterator[tuple[str, str]]:
        """(slave, why) for each socket whose connection failed by the last receive() or look(): reconnect() it.

        Once for each socket: later reports of libzmq follow from the first.
        """
        news, self._news = self._news, []
        for slave in news:
            failed = list(self._handshakes[slave].failures()) if slave in self._handshakes else []
            if failed and slave not in self._away:
                self._away.add(slave)
                yield slave, _why(self._addresses[slave], failed[0].failure)

    def close(self) -> None:
        for slave in list(self._sockets):
            self._drop(slave)
        self._outgoing.clear()

    def _note_news(self, ready: Mapping[Any, int]) -> None:
        self._news = [slave for slave, handshakes in self._handshakes.items() if handshakes.socket in ready]

    def _drop(self, slave: str) -> None:
        self.changes += 1
        self._away.discard(slave)
        dealer, handshakes = self._sockets.pop(slave, None), self._handshakes.pop(slave, None)
        if handshakes is not None:
            self._poller.unregister(handshakes.socket)
            handshakes.close()
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=0)


def _check_keys(address: SlaveAddress, curve: CurvePair | None) -> None:
    """Raises ConfigError unless both sides encrypt, or neither does and the slave is on this machine."""
    slave = address.slave_id
    if curve is None and address.curve_key:
        raise ConfigError(f"slave {slave} encrypts the data flow, and this process has no keys: start it with --keys")
    if curve is None:
        require_loopback(address.data_endpoint, f"the data endpoint of slave {slave}")
    elif not address.curve_key:
        raise ConfigError(f"slave {slave} has no data key, and nothing is sent to it unencrypted: start it with --keys")


def _why(address: SlaveAddress, failure: Failure) -> str:
    where = f"slave {address.slave_id} at {address.data_endpoint}"
    if failure is Failure.GONE:
        return (
            f"the connection to {where} has ended: the slave is gone, or the network between; check that it runs, and "
            "that the address that it advertises can be reached from here"
        )
    if failure is Failure.KEY:
        return (
            f"{where} refuses this process's data key: the master has not listed it there, because this process "
            "has not joined, or was evicted or revoked"
        )
    return f"the encrypted connection to {where} fails: another process listens there, or the slave was restarted"
