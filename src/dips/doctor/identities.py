"""Checks keys: there, readable by their owner alone, not lapsed, of the right role and name."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.net.keys import KEY_FILE, load_identity, parse_certificate
from dips.core.net.security import Role
from dips.doctor.findings import Finding, Findings, fail, ok, warn

SOON = timedelta(days=30)
"""A certificate that lapses within it is a warning: a run lasts weeks."""


@dataclass(frozen=True)
class WantedIdentity:
    """A directory with the keys of a process, and the role and name that they must have."""

    directory: Path
    role: Role
    name: str


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
    place = wanted.directory
    try:
        identity = load_identity(place, now)
    except ConfigError as error:
        sentence, _, remedy = str(error).rpartition(": ")
        return fail("keys", sentence or str(error), remedy), b""
    if (identity.role, identity.name) != (wanted.role, wanted.name):
        return (
            fail(
                "keys",
                f"{place} holds the keys of {identity}, not of {wanted.role.value} {wanted.name}",
                "take the directory that `dips keys` made for it",
            ),
            identity.ca_pem,
        )
    return _warning(place, identity.cert_pem, wanted, now), identity.ca_pem


def _warning(place: Path, cert_pem: bytes, wanted: WantedIdentity, now: datetime) -> Finding | None:
    key = place / KEY_FILE
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        return warn("keys", f"{key} can be read by others of its group", f"chmod 600 {key}")
    left = parse_certificate(cert_pem, str(place)).not_after - now
    if left < SOON:
        remedy = f"`dips keys renew {place.parent} {wanted.name}`"
        return warn("keys", f"the certificate in {place} lapses in {left.days} days", remedy)
    return None
