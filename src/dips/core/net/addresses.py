"""Parses and checks addresses. Without keys only loopback is served and dialled: no one is authenticated there.

Never resolves a name over the network: of loopback only literal addresses and "localhost" are known.
A free port is never guessed: bind port 0 and report what the system gave.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Iterable

from dips.core.errors import ConfigError, option
from dips.core.messages import SlaveAddress

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://", re.ASCII)
MAX_PORT = 65535

MAX_ADDRESSES = 4
"""Of one master. One that never answers takes five seconds (grpc_calls.CONNECT_MS) before the next is tried."""

_logger = logging.getLogger("dips.master_address")


def parse_address(address: str, what: str = "address") -> tuple[str, int]:
    """Split "host:port" or "[v6]:port", with or without a scheme such as "tcp://".

    Raises ConfigError, which names `what`, for anything else. Port 0 is allowed: it means "choose one".
    """
    bare = _SCHEME.sub("", address)
    host, colon, port = bare.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _not_an_address(address, what, "an IPv6 address is written in brackets, as in [::1]:4711")
    if not (colon and host and port.isascii() and port.isdecimal()):
        raise _not_an_address(address, what, "write HOST:PORT, as in 127.0.0.1:4711")
    if int(port) > MAX_PORT:
        raise _not_an_address(address, what, f"a port is at most {MAX_PORT}")
    return host, int(port)


def split_addresses(text: str, what: str = "address") -> tuple[str, ...]:
    """Split "HOST:PORT,HOST:PORT", the addresses of one process. Raises ConfigError as parse_address does, and for one
    that is named twice, or for more than MAX_ADDRESSES.
    """
    addresses = tuple(part.strip() for part in text.split(",")) if "," in text else (text,)
    places = [parse_address(address, what) for address in addresses]
    for i, address in enumerate(addresses):
        if places[i] in places[:i]:
            raise ConfigError(f"{what} {text!r} names {address} twice: leave one out")
    if len(addresses) > MAX_ADDRESSES:
        raise ConfigError(f"{what} {text!r} names {len(addresses)} addresses: give at most {MAX_ADDRESSES}")
    return addresses


def format_address(host: str, port: int) -> str:
    """Inverse of parse_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialable(address: str) -> str:
    """The address at which this machine reaches what is bound to `address`: of a wildcard, the loopback."""
    host, port = parse_address(address)
    return format_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def shown_listening(listen: str, address: str) -> str:
    """Where a process listens, for a person. listen: as it was asked to; address: at which its own machine dials it."""
    bound = format_address(parse_address(listen)[0], parse_address(address)[1])
    return address if dialable(bound) == bound else f"{bound}, all addresses of this machine"


def is_loopback(host: str) -> bool:
    """Whether `host` is "localhost" or a literal loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(address: str, what: str) -> None:
    """Raise ConfigError unless `address` ("host", "host:port" or "tcp://host:port") is on this machine."""
    host = bare = _SCHEME.sub("", address)
    if bare.count(":") == 1 or bare.startswith("["):
        host = parse_address(bare)[0] if not bare.endswith("]") else bare[1:-1]
    if not is_loopback(host):
        raise ConfigError(
            f"{what} is {address!r}, which is not a loopback address: without keys no one is authenticated, "
            f"so dips serves and dials this machine only; give {option('keys')} instead of {option('insecure')}, or "
            "use 127.0.0.1"
        )


def _not_an_address(address: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{what} {address!r} is not an address: {remedy}")


# ---- addresses of the master -----------------------------------------------------------------------------------------
#
# A standby takes over at another address, so a master may have several. A process keeps to one until no master of its
# run answers there, and then takes the next.


class MasterAddresses:
    """The addresses of a run's master, and which one is in use. Threads that share one go to the same master."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError as split_addresses does."""
        self.all = split_addresses(text, "the master's address")
        self._used = 0
        self._left: dict[str, str] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return ",".join(self.all)

    @property
    def several(self) -> bool:
        return len(self.all) > 1

    @property
    def now(self) -> str:
        """The address in use."""
        return self.all[self._used]

    @property
    def others(self) -> list[str]:
        """The addresses that are not in use."""
        return [address for address in self.all if address != self.now]

    def take(self, address: str, why: str) -> None:
        """Use this address: there is the run's master."""
        with self._lock:
            self._used = self.all.index(address)
        _logger.warning("goes to the master at %s: %s", address, why)

    def leave(self, address: str, why: str = "") -> bool:
        """Take the next address, for whoever found no master of this run at `address`. Returns whether it did: not if
        there is one address only, or another thread has left this one.

        Logs the change, once for each address until a master has answered; nothing without a reason.
        """
        with self._lock:
            if address != self.now or not self.several:
                return False
            self._used = (self._used + 1) % len(self.all)
            if why and address not in self._left:
                self._left[address] = why
                _logger.warning("no master at %s (%s): trying %s", address, why, self.now)
            return True

    def why_none(self, otherwise: str) -> str:
        """Why no master has answered since the last one did, at each address that was left. A sentence that stays the
        same while they are tried in turn, so that it is logged once."""
        with self._lock:
            return "; ".join(f"at {address}: {why}" for address, why in self._left.items()) or otherwise

    def answered(self) -> None:
        """A master of this run has answered: the next change is worth a line again."""
        with self._lock:
            self._left.clear()


# ---- reach -----------------------------------------------------------------------------------------------------------
#
# Checks whether an address is this machine's, and whether a master's slaves can be dialled from here.
#
# A loopback address means another machine to everyone who reads it. A process that trains elsewhere and is sent to
# 127.0.0.1 would try for ever, so it is refused with the remedy. Nothing is sent to find out: the system is asked which
# of its addresses it would use.


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


def addresses_of(endpoint: str) -> list[str]:
    """ "tcp://ADDRESS:port" for each address of the name in "tcp://name:port", those of IPv4 first. The endpoint itself
    for an address, and for a name that is not found.

    For libzmq, which would try the first address alone, and those of one family.
    """
    host, port = parse_address(endpoint)
    try:
        rows = socket.getaddrinfo(host, port or 1, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [endpoint]
    rows.sort(key=lambda row: row[0] == socket.AF_INET6)  # stable: within a family as the system prefers them
    return list(dict.fromkeys(f"tcp://{format_address(str(place[0]), port)}" for *_, place in rows))


def is_loopback_endpoint(endpoint: str) -> bool:
    """Whether "tcp://host:port" is on the loopback of whoever dials it. False for an empty endpoint."""
    return bool(endpoint) and is_loopback(parse_address(endpoint)[0])


def check_slaves_reachable(master: str, slaves: Iterable[SlaveAddress]) -> None:
    """Raise ConfigError when a master of another machine names slaves at loopback addresses."""
    inward = [slave for slave in slaves if is_loopback_endpoint(slave.data_endpoint)]
    if inward and is_elsewhere(master):
        raise ConfigError(": ".join(why_unreachable(master, inward[0].slave_id, inward[0].data_endpoint)))


def why_unreachable(master: str, slave: str, endpoint: str) -> tuple[str, str]:
    """The cause and the remedy, for a process that cannot reach a slave advertised at a loopback address."""
    return (
        f"slave {slave} advertises {endpoint}, which only its own machine reaches, and the master at {master} is "
        "another machine",
        "let the slave listen where this machine reaches it (of `dips up`: [master] listen with that "
        "machine's address, or [run] advertise, and no data_host; of `dips slave`: --data-host and --advertise)",
    )


def _is_own(family: int, place: object) -> bool:
    """Whether the system would send to this address from the very same one: so it does to its own, and to no other."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)  # type: ignore[arg-type]  # as getaddrinfo gave it; of a datagram socket it sends nothing
        except OSError:
            return False
        return bool(probe.getsockname()[0] == probe.getpeername()[0])
