"""TLS of the metrics server: the process's own keys on this side, a certificate of the same run on the other."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.net.keys import CERT_FILE, KEY_FILE, REVOKED_FILE, parse_certificate, read_revoked, reloaded, stamp_of
from dips.core.net.security import Identity

_logger = logging.getLogger("dips.metrics")


class MetricsTls:
    """Mutual TLS with the role's own keys: whoever shows a certificate of this run's authorities may read.

    Renewed keys and a changed list of revoked certificates count from the next connection on.
    """

    def __init__(self, identity: Identity, revoked: Path | None) -> None:
        """Raises ConfigError for a certificate that may not serve, as those of slaves and clusters once were made."""
        _check_may_serve(identity)
        self._identity = identity
        self._revoked = revoked or identity.directory / REVOKED_FILE
        self._lock = threading.Lock()
        self._stamp = stamp_of(identity.directory)
        self._context = _context(identity)

    def wrapped(self, connection: socket.socket) -> ssl.SSLSocket:
        """The connection, before its handshake."""
        with self._lock:
            self._renew()
            return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self, connection: ssl.SSLSocket) -> None:
        """Raises OSError or ConfigError unless the peer has a certificate of this run that still holds."""
        connection.do_handshake()
        der = connection.getpeercert(binary_form=True)
        peer = parse_certificate(der or b"", "the scraper's certificate")
        if self._revoked.exists() and peer.serial in read_revoked(self._revoked):
            raise ConfigError(f"the certificate of {peer} was revoked")

    def _renew(self) -> None:
        stamp = stamp_of(self._identity.directory)
        if stamp == self._stamp:
            return
        self._stamp, found = stamp, reloaded(self._identity)
        try:
            self._identity, self._context = found, _context(found)
        except (OSError, ConfigError) as error:
            _logger.warning("the renewed keys cannot serve metrics, the old ones stay: %s", error)


def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca_pem.decode("ascii"))
    context.load_cert_chain(identity.directory / CERT_FILE, identity.directory / KEY_FILE)
    return context


def _check_may_serve(identity: Identity) -> None:
    certificate = parse_certificate(identity.cert_pem, str(identity.directory / CERT_FILE))
    if not certificate.serves:
        raise ConfigError(
            f"{identity.directory / CERT_FILE} is for clients only, and metrics beyond loopback need one that serves: "
            f"renew it (`dips keys renew KEYS {certificate.name}`), or give metrics_listen a loopback address"
        )
