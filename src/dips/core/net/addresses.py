"""Parses and checks addresses. Without keys only loopback is served and dialled: no one is authenticated there.

Never resolves a name over the network: of loopback only literal addresses and "localhost" are known.
A free port is never guessed: bind port 0 and report what the system gave.
"""

from __future__ import annotations

import ipaddress
import re

from dips.core.errors import ConfigError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)
MAX_PORT = 65535


def parse_address(address: str, what: str = "address") -> tuple[str, int]:
    """Split "host:port" or "[v6]:port", with or without a scheme such as "tcp://".

    Raises ConfigError, which names `what`, for anything else. Port 0 is allowed: it means "choose one".
    """
    bare = _SCHEME.sub("", address, count=1)
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


def format_address(host: str, port: int) -> str:
    """Inverse of parse_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialable(address: str) -> str:
    """The address at which this machine reaches what is bound to `address`: of a wildcard, the loopback."""
    host, port = parse_address(address)
    return format_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


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
    host = _host_of(address)
    if not is_loopback(host):
        raise ConfigError(
            f"{what} is {address!r}, which is not a loopback address: without keys no one is authenticated, "
            "so dips serves and dials this machine only; give --keys instead of --insecure, or use 127.0.0.1"
        )


def _host_of(address: str) -> str:
    bare = _SCHEME.sub("", address, count=1)
    if bare.count(":") == 1 or bare.startswith("["):
        return parse_address(bare)[0] if not bare.endswith("]") else bare[1:-1]
    return bare


def _not_an_address(address: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{what} {address!r} is not an address: {remedy}")
