"""Authorises callers: the one place where certificates are checked, at each call and while streams are open.

TLS has already proven that the caller holds the key of a certificate that a trusted authority signed. Here every call
is checked again: whether the certificate is still valid (authorities are retired, certificates expire and are revoked
while connections stay open), and whether its role and name may make this call. Without keys everything is permitted,
since only this machine can call. It must never fail open: what cannot be checked is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509

from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.net.keys import (
    CA_FILE,
    REVOKED_FILE,
    Certificate,
    UsedKeys,
    is_signed_by,
    parse_authorities,
    parse_certificate,
    read_key_file,
    revoked_of,
    stamp_of_file,
)
from dips.core.net.security import Identity, Role, Security
from dips.master.state.effects import Revoked

LOOK_S = 0.25
"""The period of checking the list of revoked certificates; a revocation takes effect within this and a call."""

KNOWN_CERTIFICATES = 4096
"""The most parsed certificates, and last serials of each name, that are remembered: 10 MB at most."""

READER_METHODS = frozenset({"BeginPull", "FinishPull"})
"""Methods of the service Clusters that readers of a version call, and that an operator may call too."""

LOOKING_METHODS = frozenset({"Status", "Watch"})
"""Methods of the service Operator that change nothing, and that every valid certificate may call."""

K = TypeVar("K")
V = TypeVar("V")

_logger = logging.getLogger(__name__)
_caller: ContextVar[Certificate | None] = ContextVar("dips_caller", default=None)


@dataclass(eq=False)
class OpenCall:
    """A call that is being served. `ended` gets the refusal when its certificate becomes invalid during the call."""

    certificate: Certificate
    ended: asyncio.Future[Refused] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Access:
    """Authorises every call of one master. Make it where the event loop runs; call it from there only."""

    def __init__(
        self, security: Security, revoked_file: Path | None = None, now: Callable[[], datetime] | None = None
    ) -> None:
        """revoked_file: the list of revoked certificates; None: revoked.json in the folder of the keys, if it is there.

        Raises ConfigError when a given list cannot be read.
        """
        self._identity = security if isinstance(security, Identity) else None
        self._now = now or (lambda: datetime.now(UTC))
        self._known: OrderedDict[bytes, Certificate] = OrderedDict()
        self._trusted: set[x509.Certificate] = set()
        self._last_serial: OrderedDict[tuple[Role, str], int] = OrderedDict()
        self._open: set[OpenCall] = set()
        self.refused: Counter[str] = Counter()
        """The number of refused calls by method."""
        self.last_refused = ""
        """Method and sentence of the last refused call."""
        self.revoked_list = b""
        """The file that revokes certificates, as it was last understood."""
        if self._identity is None:
            return
        directory = self._identity.directory
        self._authorities = parse_authorities(self._identity.ca_pem, str(directory / CA_FILE))
        self._keys = UsedKeys(self._identity)
        self._named = revoked_file is not None
        self._revoked_file = revoked_file or directory / REVOKED_FILE
        self._revoked: Mapping[int, str] = {}
        self._revoked_stamp = stamp_of_file(self._revoked_file)
        if self._named or self._revoked_file.exists():
            self._revoked = self._listed()

    @property
    def checks(self) -> bool:
        """Whether there are keys, so that certificates are checked."""
        return self._identity is not None

    def admit(self, method: str, certificate_pem: bytes | None) -> Certificate:
        """The certificate of a caller that may call /dips.v1.Service/Method. Raises Refused(IDENTITY)."""
        try:
            if not certificate_pem:
                raise Refused(RefusalCode.IDENTITY, "this call came without a certificate: give the process --keys")
            certificate = self._known.get(certificate_pem)
            if certificate is None:
                try:
                    certificate = parse_certificate(certificate_pem, "the caller's certificate")
                except ConfigError as error:
                    raise Refused(RefusalCode.IDENTITY, str(error)) from error
            _remember(self._known, certificate_pem, certificate)
            self._check_holds(certificate)
            _check_role(certificate, *_service_and_method(method))
        except Refused as refused:
            self.refused[method] += 1
            self.last_refused = f"{_service_and_method(method)[1]}: {refused.sentence}"
            raise
        key = (certificate.role, certificate.name)
        _remember(self._last_serial, key, certificate.serial)
        return certificate

    @contextlib.contextmanager
    def serving(self, certificate: Certificate) -> Iterator[OpenCall]:
        """A context in which requests must name this caller as their sender, and a revocation ends the call."""
        call = OpenCall(certificate)
        token = _caller.set(certificate)
        self._open.add(call)
        try:
            yield call
        finally:
            self._open.discard(call)
            _caller.reset(token)

    def look(self) -> list[Revoked]:
        """Reads changed lists, ends calls that are no longer valid, and returns the revoked certificates of callers."""
        if self._identity is None:
            return []
        self._read_authorities()
        fresh = self._read_revoked()
        for call in self._open:
            try:
                self._check_holds(call.certificate)
            except Refused as refused:
                if not call.ended.done():
                    call.ended.set_result(refused)
        names = {serial: key for key, serial in self._last_serial.items()}
        held = [(*names[serial], self._revoked[serial]) for serial in fresh if serial in names]
        return [Revoked(role.value, name, why) for role, name, why in held]

    # ---- checks ----

    def _check_holds(self, certificate: Certificate) -> None:
        """Raises Refused for a certificate that expired, was revoked, or whose authority is no longer trusted."""
        now = self._now()
        if lapse := certificate.lapse(now, "the master"):
            raise _refusal(certificate, lapse, certificate.remedy(now))
        if certificate.serial in self._revoked:
            why = self._revoked[certificate.serial]
            raise _refusal(certificate, f"was revoked{f' ({why})' if why else ''}", "ask the operator for new keys")
        if not self._is_trusted(certificate.x509):
            raise _refusal(certificate, "was signed by an authority that this run does not trust", "renew it")

    def _is_trusted(self, certificate: x509.Certificate) -> bool:
        """Whether a trusted authority signed it. Each signature is verified once: that takes 0.1 ms."""
        if certificate not in self._trusted:
            if not is_signed_by(certificate, self._authorities):
                # A new authority may have signed it since the last look().
                self._read_authorities()
                if not is_signed_by(certificate, self._authorities):
                    return False
            if len(self._trusted) >= KNOWN_CERTIFICATES:
                self._trusted.clear()
            self._trusted.add(certificate)
        return True

    # ---- files ----

    def _read_authorities(self) -> None:
        """Does nothing while the files are as they were."""
        assert self._identity is not None, "there are certificates only with keys"
        directory = self._identity.directory
        if not self._keys.renewed:
            return
        self._keys = UsedKeys(self._identity)
        try:
            self._trusted.clear()
            self._authorities = parse_authorities((directory / CA_FILE).read_bytes(), str(directory / CA_FILE))
            _logger.info("the master's keys in %s have changed and are used from now on", directory)
        except (ConfigError, OSError) as error:
            _logger.error("the changed authorities cannot be used, the old ones stay: %s", error)

    def _listed(self) -> Mapping[int, str]:
        raw = read_key_file(self._revoked_file)
        found = revoked_of(raw, str(self._revoked_file))
        self.revoked_list = raw
        return found

    def _read_revoked(self) -> set[int]:
        """Reads the list of revoked certificates; returns the serials that are new on it."""
        stamp = stamp_of_file(self._revoked_file)
        if stamp == self._revoked_stamp:
            return set()
        self._revoked_stamp = stamp
        try:
            found = self._listed()
        except ConfigError as error:
            _logger.error("the list of revoked certificates cannot be used, the old one stays: %s", error)
            return set()
        fresh = set(found) - set(self._revoked)
        self._revoked = found
        _logger.info("%s: %d certificates are revoked, %d of them new", self._revoked_file, len(found), len(fresh))
        return fresh


def check_is_own(name: str, what: str) -> None:
    """Raises Refused unless `name`, which a request gives as its sender, is that of the caller's certificate.

    Operators read versions under names of their choice.
    """
    certificate = _caller.get()
    if certificate is None or certificate.role is Role.OPERATOR or certificate.name == name:
        return
    raise Refused(
        RefusalCode.IDENTITY,
        f"{what} says it comes from {name!r}, but the certificate is that of {certificate}: use the keys of {name!r}",
    )


def _check_role(certificate: Certificate, service: str, method: str) -> None:
    allowed = _roles_for(service, method)
    if certificate.role in allowed:
        return
    roles = " or ".join(sorted(role.value for role in allowed))
    raise _refusal(certificate, f"may not call {service}.{method}", f"use keys of role {roles}")


def _roles_for(service: str, method: str) -> frozenset[Role]:
    match service:
        case "Clusters" if method in READER_METHODS:
            return frozenset({Role.CLUSTER, Role.OPERATOR})
        case "Clusters":
            return frozenset({Role.CLUSTER})
        case "Slaves":
            return frozenset({Role.SLAVE})
        case "Replicas":
            return frozenset({Role.MASTER})
        case "Operator" if method in LOOKING_METHODS:
            return frozenset(Role)
    return frozenset({Role.OPERATOR})


def _service_and_method(path: str) -> tuple[str, str]:
    """("Clusters", "Join") of "/dips.v1.Clusters/Join"."""
    service, _, method = path.rpartition("/")
    return service.rpartition(".")[2], method


def _refusal(certificate: Certificate, what: str, remedy: str) -> Refused:
    return Refused(RefusalCode.IDENTITY, f"the certificate of {certificate} {what}: {remedy}")


def _remember(store: OrderedDict[K, V], key: K, value: V) -> None:
    store[key] = value
    store.move_to_end(key)
    if len(store) > KNOWN_CERTIFICATES:
        store.popitem(last=False)
