"""Checks ports and addresses: free where a process will listen, found and reached where one will be dialled."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dips.core.errors import ConfigError
from dips.core.net.addresses import format_address, is_elsewhere, is_loopback, parse_address
from dips.core.net.keys import KEY_FILE, load_identity, parse_certificate
from dips.core.units import format_seconds
from dips.doctor.findings import Finding, Findings, fail, ok, warn
from dips.local.authority import WantedIdentity

REACH_S = 3.0
"""Time for one connection; a far site answers within a tenth of it."""

TRIES = 3


@dataclass(frozen=True)
class ListenAddress:
    """An address at which a process will listen."""

    who: str
    address: str
    setting: str  # what changes it


@dataclass(frozen=True)
class Reached:
    """The result of dialling an address."""

    round_trip_s: float | None  # None when nothing came back
    listens: bool
    why: str = ""


def check_addresses(addresses: Iterable[ListenAddress]) -> Findings:
    """Check that each port that is not 0 is wanted once, and free."""
    taken: dict[str, ListenAddress] = {}
    for wanted in addresses:
        host, port = parse_address(wanted.address, wanted.setting)
        other = taken.setdefault(format_address(host, port), wanted) if port else wanted
        if other is not wanted:
            yield fail(
                "ports",
                f"{wanted.who} and {other.who} are both to listen at {wanted.address}",
                f"give each its own {wanted.setting}, or port 0",
            )
        elif port:
            yield check_free(wanted)


def check_free(wanted: ListenAddress) -> Finding:
    """Check that a port is free, by binding it for a moment."""
    host, port = parse_address(wanted.address, wanted.setting)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        return fail("addresses", f"{wanted.who}: {host} is not found ({_why(error)})", f"correct {wanted.setting}")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
            probe.listen(1)
        except OSError as error:
            remedy = f"end what listens there (ss -ltnp 'sport = :{port}'), or choose another {wanted.setting}"
            return fail("ports", f"{wanted.who} cannot listen at {wanted.address}: {error.strerror}", remedy)
    return ok("ports", f"{wanted.who} can listen at {wanted.address}")


def check_name_found(who: str, address: str, setting: str) -> Finding:
    host, port = parse_address(address, setting)
    try:
        found = sorted({str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except (socket.gaierror, UnicodeError) as error:
        return fail(
            "addresses",
            f"{who}: {host} is not found from here ({_why(error)})",
            f"make the name known in DNS or /etc/hosts, or correct {setting}",
        )
    return ok("addresses", f"{who}: {address} is {', '.join(found[:4])}")


def dialled(address: str) -> Reached:
    """Dial an address several times; the shortest round trip counts.

    A host that refuses is there, too: it answers. Nothing is sent on the connection.
    """
    host, port = parse_address(address)
    best: float | None = None
    listens, why = False, ""
    for _ in range(TRIES):
        began_s = time.monotonic()
        try:
            with socket.create_connection((host, port), REACH_S):
                listens = True
        except ConnectionRefusedError:
            why = "nothing listens there"
        except TimeoutError:
            return Reached(best, listens, f"no answer within {format_seconds(REACH_S)}")
        except (OSError, UnicodeError) as error:
            return Reached(best, listens, _why(error))
        took_s = time.monotonic() - began_s
        best = took_s if best is None else min(best, took_s)
    return Reached(best, listens, why)


def _why(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "no machine can have this name: a part of it is empty or too long"
    return error.strerror or str(error)


def judge_reached(who: str, address: str, reached: Reached, must_listen: bool) -> Finding:
    if reached.round_trip_s is None:
        remedy = "open the way (firewall, security group, route), or correct the address"
        return fail("reach", f"{who} at {address} cannot be reached: {reached.why}", remedy)
    trip = f"round trip {format_seconds(reached.round_trip_s)}"
    if reached.listens:
        return ok("reach", f"{who} at {address} answers, {trip}")
    if must_listen:
        return fail("reach", f"{who} at {address}: {reached.why}", "start it, or correct the address")
    return ok("reach", f"{who} at {address}: its host answers, {trip}; nothing listens there yet")


def check_advertised(who: str, address: str, setting: str) -> Findings:
    """Check an address under which others will find a process of this machine."""
    found = check_name_found(who, address, setting)
    yield found
    if found.remedy:
        return
    host, _ = parse_address(address, setting)
    if is_loopback(host):
        yield warn(
            "addresses",
            f"{who} is advertised as {address}, where only this machine finds it",
            f"give {setting} the address that clusters elsewhere reach",
        )
    elif is_elsewhere(address):
        yield warn(
            "addresses",
            f"{who} is advertised as {address}, which is no address of this machine",
            "right where a router or firewall forwards it to this machine; else give the address of this machine",
        )


# ---- identities ------------------------------------------------------------------------------------------------------
#
# Checks keys: there, readable by their owner alone, not lapsed, of the right role and name.


SOON = timedelta(days=30)
"""A certificate that lapses within it is a warning: a run lasts weeks."""


def check_identities(wanted: Iterable[WantedIdentity], now: datetime | None = None) -> Findings:
    """One finding for each that is not good, and one for all that are; all must trust the same authorities."""
    now = now or datetime.now(UTC)
    good: list[str] = []
    trusts: dict[bytes, str] = {}
    for one in wanted:
        found, ca_pem = check_identity(one, now)
        if found is not None:
            yield found
        else:
            good.append(one.name)
        if ca_pem:
            trusts.setdefault(ca_pem, one.name)
    if good:
        yield ok("keys", f"those of {', '.join(good)} are good")
    if len(trusts) > 1:
        first, second, *_ = trusts.values()
        remedy = "take all directories from one folder of `dips keys`"
        yield fail("keys", f"{first} and {second} trust different authorities", remedy)


def check_identity(wanted: WantedIdentity, now: datetime) -> tuple[Finding | None, bytes]:
    """What is wrong, or None; and the authorities that it trusts, if it could be read."""
    place, ca_pem = wanted.directory, b""
    try:
        identity = load_identity(place, now)
        ca_pem = identity.ca_pem
        wanted.check(identity)
    except ConfigError as error:
        return fail("keys", error.sentence, error.remedy), ca_pem
    key = place / KEY_FILE
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        return warn("keys", f"{key} can be read by others of its group", f"chmod 600 {key}"), ca_pem
    left = parse_certificate(identity.cert_pem, str(place)).not_after - now
    if left < SOON:
        remedy = f"`dips keys renew {place.parent} {wanted.name}`"
        return warn("keys", f"the certificate in {place} lapses in {left.days} days", remedy), ca_pem
    return None, ca_pem
