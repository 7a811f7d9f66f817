"""Reads identities and certificates, and finds what is wrong with them before a connection is made.

An identity directory holds ca.crt (the certificate authorities that are trusted, one or several), tls.crt and tls.key.
`dips keys` makes it. Must never accept a key that others can read, nor a certificate that does not say in one URI
(dips://ROLE/NAME) who its holder is. Certificates are read with `cryptography`, which the simulator does not import.
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509 import ObjectIdentifier
from cryptography.x509.oid import ExtendedKeyUsageOID

from dips.core.errors import ConfigError, option
from dips.core.files import replace_file
from dips.core.ids import check_name
from dips.core.net.security import (
    INSECURE,
    INSECURE_VARIABLE,
    KEYS_VARIABLE,
    Identity,
    ProcessKnobs,
    Role,
    Security,
)

CA_FILE, CERT_FILE, KEY_FILE, REVOKED_FILE = "ca.crt", "tls.crt", "tls.key", "revoked.json"

_logger = logging.getLogger("dips.keys")

SCHEME = "dips"
MASTER_DNS_NAME = "dips-master"
"""The name in every master's certificate; clients ask for it, so that addresses need not be in certificates."""


def dns_name(role: Role) -> str:
    """The name in every certificate of a role, such as "dips-slave": what a scraper of its metrics asks for."""
    return f"dips-{role.value}"


MAX_FILE_BYTES = 4 << 20
"""Of a key, certificate or revocation file; a list of 20,000 revoked certificates fits."""

SENSELESS = (
    *(ValueError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What `cryptography` raises for certificates that make no sense."""


@dataclass(frozen=True)
class Certificate:
    """The fields of a certificate that this project reads. Times in UTC."""

    role: Role
    name: str
    serial: int
    not_before: datetime
    not_after: datetime
    x509: x509.Certificate

    def __str__(self) -> str:
        return f"{self.role.value} {self.name} (serial {self.serial_hex[:12]})"

    @property
    def serves(self) -> bool:
        """Whether its holder may be the server of a TLS connection."""
        return self._is_for(ExtendedKeyUsageOID.SERVER_AUTH)

    @property
    def dials(self) -> bool:
        """Whether its holder may be the client of a TLS connection."""
        return self._is_for(ExtendedKeyUsageOID.CLIENT_AUTH)

    def _is_for(self, use: ObjectIdentifier) -> bool:
        try:
            return use in self.x509.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except x509.ExtensionNotFound:
            return True

    @property
    def serial_hex(self) -> str:
        return f"{self.serial:x}"

    def lapse(self, now: datetime, whose: str = "this machine") -> str:
        """Why it does not hold at this moment, by whose clock; empty when it does."""
        if now >= self.not_after:
            return f"expired on {_day(self.not_after)}"
        if now < self.not_before:
            return f"does not hold before {_day(self.not_before)}, and {whose}'s clock says {_day(now)}"
        return ""

    def remedy(self, now: datetime) -> str:
        """What to do about lapse()."""
        if now < self.not_before:
            return "set the clock that is wrong, this one or that of the machine that made the keys"
        return f"renew it (`dips keys renew KEYS {self.name}`) and bring it here"


def security_of(knobs: ProcessKnobs, what: str) -> Security:
    """The security that the settings name, read and checked. `what` names the process in errors, such as "the master".

    Raises ConfigError when neither keys nor insecure is given, and what load_identity raises.
    """
    return security_from(knobs.keys, knobs.insecure, what)


def security_from(keys: Path | None, insecure: bool, what: str) -> Security:
    """security_of, for callers with the two settings and no knobs."""
    if keys is not None:
        return load_identity(keys)
    if insecure:
        return INSECURE
    raise ConfigError(
        f"{what} has no keys: give {option('keys', 'DIR')} (or {KEYS_VARIABLE}=DIR) with an identity made by "
        f"`dips keys`, or say {option('insecure')} (or {INSECURE_VARIABLE}=1) to run without encryption on this "
        "machine only"
    )


def load_identity(directory: Path, now: datetime | None = None) -> Identity:
    """Read and check the identity in a directory.

    Raises ConfigError, naming the file and the remedy, when a file is missing or cannot be read, others may read the
    key, key and certificate do not belong together, no CA of ca.crt signed the certificate, or it does not hold now.
    """
    ca_pem, cert_pem, key_pem = (read_key_file(directory / name) for name in (CA_FILE, CERT_FILE, KEY_FILE))
    key_file, cert_file = directory / KEY_FILE, directory / CERT_FILE
    if stat.S_IMODE(key_file.stat().st_mode) & 0o007:
        raise ConfigError(f"{key_file} can be read or changed by every user of this machine", f"chmod 600 {key_file}")
    certificate = parse_certificate(cert_pem, str(cert_file))
    shown, held = certificate.x509.public_key(), load_private_key(key_pem, str(key_file)).public_key()
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if shown.public_bytes(*form) != held.public_bytes(*form):
        raise ConfigError(f"{key_file} does not belong to {cert_file}", "take both from the same directory")
    authorities = parse_authorities(ca_pem, str(directory / CA_FILE))
    if not is_signed_by(certificate.x509, authorities):
        raise ConfigError(
            f"{cert_file} was signed by none of the authorities in {directory / CA_FILE}",
            "it belongs to another set of keys; take the whole directory as `dips keys` made it",
        )
    now = now or datetime.now(UTC)
    if lapse := certificate.lapse(now):
        raise ConfigError(f"{cert_file} {lapse}", certificate.remedy(now))
    return Identity(certificate.role, certificate.name, directory, ca_pem, cert_pem, key_pem)


def reloaded(identity: Identity) -> Identity:
    """The identity as it is in its directory now, or this one while what is there cannot be used."""
    try:
        found = load_identity(identity.directory)
    except ConfigError as error:
        _logger.warning("the renewed keys cannot be used, going on with the old ones: %s", error)
        return identity
    if (found.role, found.name) != (identity.role, identity.name):
        _logger.warning("%s holds keys of %s now, going on with those of %s", identity.directory, found, identity)
        return identity
    return found


def certificate_left_s(security: Security, now: datetime | None = None) -> float | None:
    """Seconds until the own certificate lapses, as it is in its directory now, at least 0; None without keys."""
    if not isinstance(security, Identity):
        return None
    found = parse_certificate(reloaded(security).cert_pem, str(security.directory / CERT_FILE))
    return max(0.0, (found.not_after - (now or datetime.now(UTC))).total_seconds())


class UsedKeys:
    """The keys that are in use, remembered to see whether those in their directory were replaced since."""

    def __init__(self, security: Security) -> None:
        self._identity = security if isinstance(security, Identity) else None
        self._stamp = self._now()

    @property
    def renewed(self) -> bool:
        """Whether a new connection would use other keys; a refusal of the old ones then means nothing."""
        return self._stamp != self._now()

    def news(self) -> Identity | None:
        """The identity as it is in its directory now, if that was changed since the last call; from then on it is the
        one in use. Keys that cannot be used leave the old ones."""
        before, self._stamp = self._stamp, self._now()
        if self._identity is None or before == self._stamp:
            return None
        self._identity = reloaded(self._identity)
        return self._identity

    def _now(self) -> tuple[int, ...]:
        return stamp_of(self._identity.directory) if self._identity is not None else ()


def stamp_of(directory: Path) -> tuple[int, ...]:
    """A stamp that changes when certificate, key or authorities of a directory were replaced; cheap to call."""
    return tuple(number for name in (CA_FILE, CERT_FILE, KEY_FILE) for number in stamp_of_file(directory / name))


def parse_certificate(data: bytes, where: str) -> Certificate:
    """Read one certificate, PEM or DER. Raises ConfigError, which names `where`, for anything that is not ours."""
    try:
        pem = data.lstrip().startswith(b"-----")
        found = x509.load_pem_x509_certificate(data) if pem else x509.load_der_x509_certificate(data)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1:
            raise ValueError(f"it has {len(uris)} URIs, not one")
        parts = urlsplit(uris[0])
        name = parts.path.removeprefix("/")
        if parts.scheme != SCHEME or parts.query or parts.fragment:
            raise ValueError(f"its URI is {uris[0]!r}, not {SCHEME}://ROLE/NAME")
        role, name = Role(parts.netloc), check_name(name, "the name in the certificate")
        begin, end = found.not_valid_before_utc, found.not_valid_after_utc
        found.public_key()  # it is parsed only upon this call: a damaged key is reported here
        return Certificate(role, name, found.serial_number, begin, end, found)
    except (*SENSELESS, x509.ExtensionNotFound, ConfigError) as error:
        why = f"{where} is not a certificate of a process of dips ({error})"
        raise ConfigError(why, "make it with `dips keys`") from error


def parse_authorities(pem: bytes, where: str) -> list[x509.Certificate]:
    """The CA certificates of a ca.crt. Raises ConfigError when there is none, or one was changed since it was made."""
    try:
        found = x509.load_pem_x509_certificates(pem)
        damaged = any(not is_signed_by(item, found) for item in found)
    except SENSELESS as error:
        raise ConfigError(f"{where} holds no CA certificate ({error})", "take the one that `dips keys` made") from error
    if damaged:  # TLS takes an authority as it is, and never looks at what it signed of itself
        raise ConfigError(f"{where} is not what was signed, so it was changed", "take the one that `dips keys` made")
    return found


def is_signed_by(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bool:
    """Whether one of these authorities signed it."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, TypeError, *SENSELESS):
            continue
        return True
    return False


def load_private_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """Read a private key. Raises ConfigError, which names `where`."""
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = f"{where} is not a private key without a password ({error})"
        raise ConfigError(why, "make it with `dips keys`") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{where} is not a key on an elliptic curve", "make it with `dips keys`")
    return key


def holder_uri(role: Role, name: str) -> str:
    """dips://ROLE/NAME, as it is in the certificate."""
    return f"{SCHEME}://{role.value}/{name}"


def read_revoked(file: Path) -> Mapping[int, str]:
    """Serial number -> why, of every certificate that this file revokes. Raises ConfigError if it cannot be read."""
    return revoked_of(read_key_file(file), str(file))


def revoked_of(raw: bytes, where: str) -> Mapping[int, str]:
    """The same of a file's content. Raises ConfigError, which names `where`."""
    return {serial: str(row.get("reason", ""))[:200] for serial, row in _rows(raw, where).items()}


def add_revoked(file: Path, more: bytes, now: datetime) -> bool:
    """Adds to this list what the other one has more, and returns whether it has: a revocation is never taken back, but
    what has lapsed may go. Raises ConfigError for what is no list, OSError when the file cannot be written."""
    ours = _rows(read_key_file(file), str(file)) if file.exists() else {}
    theirs = _rows(more, "what was sent")
    if theirs.keys() <= ours.keys():
        return False
    held = {serial: row for serial, row in ours.items() if str(row.get("not_after", "9")) > now.isoformat()}
    merged = json.dumps({"revoked": [*{**held, **theirs}.values()]}, indent=1).encode()
    if len(merged) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} would be longer than {MAX_FILE_BYTES} bytes", "copy it from the authority")
    replace_file(file, [merged])
    return True


def _rows(raw: bytes, where: str) -> dict[int, dict[str, Any]]:
    """The rows of a list of revoked certificates, by serial number."""
    try:
        return {int(row["serial"], 16): dict(row) for row in json.loads(raw)["revoked"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{where} is not a list of revoked certificates ({error!r})"
        raise ConfigError(why, "copy it from the authority again") from error


def stamp_of_file(file: Path) -> tuple[int, int]:
    """stamp_of, for one file; zeros while it is not there."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def read_key_file(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; `dips keys` makes identities") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is longer than {MAX_FILE_BYTES} bytes", "it is not what `dips keys` made")
    return data


def _day(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC")
