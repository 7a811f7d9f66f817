"""Checks whether an address is this machine's, and whether a master's slaves can be dialled from here.

A loopback address means another machine to everyone who reads it. A process that trains elsewhere and is sent to
127.0.0.1 would try for ever, so it is refused with the remedy. Nothing is sent to find out: the system is asked which
of its addresses it would use.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from dips.core.errors import ConfigError
from dips.core.messages import SlaveAddress
from dips.core.net.addresses import is_loopback, parse_address


def is_elsewhere(address: str) -> bool:
    """Whether HOST:PORT is another machine's. False as well where the name is not found: then no one knows."""
    host, port = parse_address(address)
    if is_loopback(host):
        return False
    try:
        rows = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return bool(rows) and not any(_is_own(family, place) for family, _, _, _, place in rows)


def is_loopback_endpoint(endpoint: str) -> bool:
    """Whether "tcp://host:port" is on the loopback of whoever dials it. False for an empty endpoint."""
    return bool(endpoint) and is_loopback(parse_address(endpoint)[0])


def check_slaves_reachable(master: str, slaves: Iterable[SlaveAddress]) -> None:
    """Raise ConfigError when a master of another machine names slaves at loopback addresses."""
    inward = [slave for slave in slaves if is_loopback_endpoint(slave.data_endpoint)]
    if inward and is_elsewhere(master):
        raise ConfigError(unreachable_sentence(master, inward[0].slave_id, inward[0].data_endpoint))


def unreachable_sentence(master: str, slave: str, endpoint: str) -> str:
    """The cause and the remedy, for a process that cannot reach a slave advertised at a loopback address."""
    return (
        f"slave {slave} advertises {endpoint}, which only its own machine reaches, and the master at {master} is "
        "another machine: let the slave listen where this machine reaches it (of `dips up`: [master] listen with that "
        "machine's address, or [run] advertise, and no data_host; of `dips slave`: --data-host and --advertise)"
    )


def _is_own(family: int, place: object) -> bool:
    """Whether the system would send to this address from the very same one: so it does to its own, and to no other."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)  # type: ignore[arg-type]  # as getaddrinfo gave it; of a datagram socket it sends nothing
        except OSError:
            return False
        return bool(probe.getsockname()[0] == probe.getpeername()[0])
