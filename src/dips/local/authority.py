"""The certificate authority of a run: makes, renews and revokes the keys of its processes.

A folder KEYS holds `ca` (the authority: ca.key, ca.crt, issued.json, revoked.json) and one directory for each identity,
which is all that a process needs. Every certificate is on the list of issued ones before it leaves, so that it can be
revoked by name. Files are replaced whole and private ones are never readable by others, not even for a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dips.core.errors import ConfigError
from dips.core.files import FolderLock, make_folder, replace_file, secret
from dips.core.ids import check_name
from dips.core.net.keys import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    REVOKED_FILE,
    Certificate,
    dns_name,
    holder_uri,
    load_private_key,
    parse_authorities,
    parse_certificate,
)
from dips.core.net.security import Identity, Role

CA, CA_KEY_FILE, ISSUED_FILE, LOCK_FILE = "ca", "ca.key", "issued.json", "lock"
MASTER, OPERATOR = "master", "operator"

AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 397
"""A run lasts weeks. Thirteen months are what browsers take at most, and so what people are used to renew by."""

CLOCKS_DIFFER = timedelta(hours=1)
"""A certificate holds from so long ago, for machines whose clock is behind."""


@dataclass(frozen=True)
class Issued:
    """A line of issued.json. serial in hex; not_after in ISO 8601, UTC."""

    serial: str
    role: str
    name: str
    not_after: str


@dataclass(frozen=True)
class WantedIdentity:
    """A directory with the keys of a process, and the role and name that they must have."""

    directory: Path
    role: Role
    name: str

    def check(self, found: Identity) -> None:
        """Raise ConfigError for keys of another process."""
        if (found.role, found.name) != (self.role, self.name):
            raise ConfigError(
                f"{self.directory} holds the keys of {found}, not of {self.role.value} {self.name}",
                "take the directory that `dips keys` made for it",
            )


class Authority:
    """The keys in one folder; locked() keeps other `dips keys` commands out."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        """Raises ConfigError when there is no authority in this folder."""
        self.directory = directory
        self._ca = directory / CA
        self._now = (now or datetime.now(UTC)).replace(microsecond=0)
        if not (self._ca / CA_FILE).is_file():
            raise ConfigError(f"{directory} holds no keys: make them with `dips keys init {directory}`")

    @classmethod
    def create(cls, directory: Path, now: datetime | None = None) -> Authority:
        """A new authority in a folder that has none. Raises ConfigError when it has one or cannot be written."""
        ca = directory / CA
        if (ca / CA_FILE).exists():
            raise ConfigError(f"{directory} holds keys already: add to them with `dips keys add {directory}`")
        _make_private(ca)
        begin = (now or datetime.now(UTC)).replace(microsecond=0)
        _write_authority(ca, b"", begin)
        return cls(directory, now)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Authority]:
        """Alone with the folder; a second command waits."""
        unusable = f"{self._ca / LOCK_FILE} cannot be written: {{why}}"
        with FolderLock(self._ca, LOCK_FILE, unusable=unusable, held="", waits=True, opener=secret):
            try:
                yield self
            except OSError as error:
                place = error.filename or self.directory
                raise ConfigError(f"{place} cannot be read or written: {error.strerror}") from error

    # ---- identities ----

    def identity(self, name: str) -> Path:
        """Where the identity of this name is or would be."""
        return self.directory / name

    def names(self) -> list[str]:
        """The names of all identities here, in order."""
        return sorted(path.parent.name for path in self.directory.glob(f"*/{CERT_FILE}") if path.parent.name != CA)

    def certificate(self, name: str) -> Certificate:
        """Raises ConfigError when there is no identity of this name."""
        file = self.identity(name) / CERT_FILE
        if name == CA or not file.is_file():
            raise ConfigError(f"{self.directory} has no keys of {name!r}; it has {', '.join(self.names()) or 'none'}")
        return parse_certificate(file.read_bytes(), str(file))

    def add(self, role: Role, name: str) -> Path:
        """A new identity; its directory. Raises ConfigError for a name that is taken or cannot be one."""
        check_name(name, f"the name of a {role.value}")
        if name == CA:
            raise ConfigError(f"{CA!r} is the authority's own folder: choose another name")
        place = self.identity(name)
        if place.exists():
            raise ConfigError(f"{place} is there already: renew it with `dips keys renew`, or choose another name")
        making = self.directory / f".{name}.new"
        _make_private(making)
        key = _new_key()
        self._fill(making, role, name, key)
        os.replace(making, place)
        return place

    def renew(self, name: str, new_key: bool = False) -> Path:
        """A certificate that begins to hold now, over the same key unless a new one is asked for."""
        old, place = self.certificate(name), self.identity(name)
        key = _new_key() if new_key else load_private_key((place / KEY_FILE).read_bytes(), str(place / KEY_FILE))
        self._fill(place, old.role, name, key)
        return place

    def revoke(self, name: str, reason: str) -> list[Issued]:
        """Revoke every certificate that was issued to this name; returns those that were not revoked before.

        Raises ConfigError for a name that has none, and for the master's: whoever dials it does not read the list.
        """
        rows = [row for row in self.issued() if row.name == name]
        if not rows:
            names = sorted({row.name for row in self.issued()})
            raise ConfigError(f"{self.directory} issued no certificate to {name!r}; it did to {', '.join(names)}")
        if any(row.role == Role.MASTER.value for row in rows):
            raise ConfigError(
                "the master's certificate cannot be revoked, since those who dial it read no list: replace the "
                "authority (`dips keys renew --new-ca`, --all, --retire-old-ca)"
            )
        known = self.revoked()
        fresh = [row for row in rows if row.serial not in {old["serial"] for old in known}]
        when = self._now.isoformat()
        known += [{**asdict(row), "reason": reason[:200], "revoked_at": when} for row in fresh]
        self._spread(REVOKED_FILE, _as_json({"revoked": known}))
        return fresh

    # ---- the authority itself ----

    def new_authority(self) -> None:
        """A new authority signs from now on; every identity here trusts it and the old one."""
        _write_authority(self._ca, self._bundle(), self._now)
        self._spread(CA_FILE, self._bundle())

    def retire_old(self) -> int:
        """Trust the newest authority alone; how many were dropped. Raises ConfigError while it did not sign all."""
        newest, *old = parse_authorities(self._bundle(), str(self._ca / CA_FILE))
        left = [name for name in self.names() if self.certificate(name).x509.issuer != newest.subject]
        if left:
            raise ConfigError(f"{', '.join(left)}: signed by an older authority; first `dips keys renew --all`")
        self._spread(CA_FILE, newest.public_bytes(Encoding.PEM))
        return len(old)

    def authorities(self) -> list[x509.Certificate]:
        """Those that are trusted, the one that signs first."""
        return parse_authorities(self._bundle(), str(self._ca / CA_FILE))

    # ---- lists ----

    def issued(self) -> list[Issued]:
        """Every certificate that has not lapsed."""
        rows = [Issued(**row) for row in _rows(self._ca / ISSUED_FILE, "issued")]
        return [row for row in rows if datetime.fromisoformat(row.not_after) > self._now]

    def revoked(self) -> list[dict[str, Any]]:
        """The list of revoked certificates, without those that have lapsed meanwhile."""
        rows = _rows(self._ca / REVOKED_FILE, "revoked")
        return [row for row in rows if datetime.fromisoformat(row["not_after"]) > self._now]

    # ---- how ----

    def _fill(self, place: Path, role: Role, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        """Write an identity's files. The key goes first: a reader that sees it with the old certificate waits."""
        file = self._ca / CA_KEY_FILE
        if not file.is_file():
            raise ConfigError(f"{file} is not here: new certificates are made where the authority's key is kept")
        signer = load_private_key(file.read_bytes(), str(file))
        authority = self.authorities()[0]
        names = [x509.UniformResourceIdentifier(holder_uri(role, name)), x509.DNSName(dns_name(role))]
        # Everyone serves metrics, under its role's name. A standby has the master's keys and dials the master.
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        public = key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_named(f"{role.value} {name}"))
            .issuer_name(authority.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - CLOCKS_DIFFER)
            .not_valid_after(min(self._now + timedelta(days=IDENTITY_DAYS), authority.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            .sign(signer, hashes.SHA256())
        )
        row = Issued(f"{certificate.serial_number:x}", role.value, name, certificate.not_valid_after_utc.isoformat())
        rows = [asdict(item) for item in (*self.issued(), row)]
        _write(self._ca / ISSUED_FILE, _as_json({"issued": rows}))
        _write(place / KEY_FILE, _key_pem(key))
        _write(place / CERT_FILE, certificate.public_bytes(Encoding.PEM))
        _write(place / CA_FILE, self._bundle())
        if (self._ca / REVOKED_FILE).exists():
            _write(place / REVOKED_FILE, (self._ca / REVOKED_FILE).read_bytes())

    def _spread(self, file: str, content: bytes) -> None:
        """Write a file of the authority's, and its copies in the identities here."""
        _write(self._ca / file, content)
        for name in self.names():
            _write(self.identity(name) / file, content)

    def _bundle(self) -> bytes:
        return (self._ca / CA_FILE).read_bytes()


def ensure_keys(
    directory: Path, clusters: Iterable[str] = (), slaves: Iterable[str] = (), operators: Iterable[str] = (OPERATOR,)
) -> Authority:
    """Keys for a master and these processes in a folder, made as far as they are missing; raises ConfigError."""
    fresh = not (directory / CA / CA_FILE).exists()
    with (Authority.create(directory) if fresh else Authority(directory)).locked() as authority:
        wanted = [(Role.MASTER, MASTER)]
        wanted += [(Role.SLAVE, name) for name in slaves]
        wanted += [(Role.CLUSTER, name) for name in clusters]
        wanted += [(Role.OPERATOR, name) for name in operators]
        for role, name in wanted:
            if not (authority.identity(name) / CERT_FILE).exists():
                authority.add(role, name)
            elif (found := authority.certificate(name)).role is not role:
                place = authority.identity(name)
                raise ConfigError(f"{place} holds keys of {found}, not of a {role.value}: rename one of the two")
        return authority


def _write_authority(ca: Path, older: bytes, now: datetime) -> None:
    """A new key and self-signed certificate, before those that were trusted already."""
    key = _new_key()
    serial = x509.random_serial_number()
    # The serial makes each authority's name its own, so that a certificate says which of several signed it.
    name = _named(f"dips authority {serial:x}"[:64])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(ca / CA_KEY_FILE, _key_pem(key))
    _write(ca / CA_FILE, certificate.public_bytes(Encoding.PEM) + older)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _rows(file: Path, key: str) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))[key]
        for row in rows:
            datetime.fromisoformat(row["not_after"])
        return rows
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error!r}): bring it back from a copy") from error


def _as_json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _make_private(directory: Path) -> None:
    try:
        make_folder(directory, private=True)
        directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}; choose another folder") from error


def _write(file: Path, content: bytes) -> None:
    """Replace a file whole, durably; its owner alone can read it, from its first byte on. Raises ConfigError."""
    try:
        replace_file(file, [content], opener=secret)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
