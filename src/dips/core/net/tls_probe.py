"""Finds out why a master does not accept this process's keys, by a TLS handshake of its own.

gRPC says of every failed handshake that the socket was closed. The operator needs to know which of
the keys is wrong. Never decides anything: it only makes a sentence, and none when the master is not there.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from datetime import UTC, datetime

from dips.core.errors import ConfigError, RefusalCode, Refused, option
from dips.core.net.addresses import parse_address
from dips.core.net.keys import CA_FILE, CERT_FILE, KEY_FILE, MASTER_DNS_NAME, parse_certificate, reloaded
from dips.core.net.security import Identity, Role, Security

TRIES, PAUSE_S = 3, 0.1

_OUT_OF_TIME = {9: "does not hold yet", 10: "has expired"}
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

PROBE_S = 1.0
"""Time for the connection, and again for the handshake and the master's first bytes."""


def check_let_in(address: str, security: Security) -> None:
    """Raise Refused(IDENTITY) when a master is there and will not take these keys; without keys, do nothing."""
    why = why_not_let_in(address, security) if isinstance(security, Identity) else ""
    if why:
        raise Refused(RefusalCode.IDENTITY, why)


def why_not_let_in(address: str, security: Security) -> str:
    """A sentence about the keys; empty when they are good, or when no master is there.

    It ends processes, so it takes TRIES failed handshakes in a row: a master that dies, or a link that breaks, at
    the wrong moment looks the same once.
    """
    words = _asked(address, security)
    for _ in range(TRIES - 1):
        if not words:
            break
        time.sleep(PAUSE_S)
        words = _asked(address, security)
    return words


def _asked(address: str, security: Security) -> str:
    """One handshake."""
    host, port = parse_address(address, "the master's address")
    try:
        with socket.create_connection((host, port), PROBE_S) as connection:
            connection.settimeout(PROBE_S)
            if isinstance(security, Identity):
                return _with_keys(connection, address, reloaded(security))
            return _without_keys(connection, address)
    except (OSError, UnicodeError):  # the latter for a name that no machine can have
        return ""


def _with_keys(connection: socket.socket, address: str, identity: Identity) -> str:
    context = ssl.create_default_context(cadata=identity.ca_pem.decode("ascii", "replace"))
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(identity.directory / CERT_FILE, identity.directory / KEY_FILE)
        with context.wrap_socket(connection, server_hostname=MASTER_DNS_NAME) as secure:
            return "" if _speaks(secure) else _turned_away(address, identity)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_TIME:
            return (
                f"the certificate of the master at {address} {_OUT_OF_TIME[error.verify_code]} by the clock of this "
                f"machine, which says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: set it if it is wrong; else renew the "
                "master's keys (`dips keys renew KEYS master`)"
            )
        return (
            f"whoever listens at {address} shows a certificate that the authorities in {identity.directory / CA_FILE} "
            f"do not vouch for ({error.verify_message}): these keys belong to another run, or this is not the master"
        )
    except ssl.SSLError as error:
        if "WRONG_VERSION_NUMBER" in str(error):
            return f"the master at {address} uses no keys: it was started with --insecure, and so must this be"
        return ""
    except OSError:
        return ""


def _speaks(secure: ssl.SSLSocket) -> bool:
    """Whether the master goes on after the handshake: it speaks first, with its HTTP/2 settings, and hangs up on a
    certificate that it does not accept. A reset says nothing of keys: a port with too many strangers does that."""
    try:
        socket.socket.recv(secure, 1, socket.MSG_PEEK)  # raises for a reset; Python's TLS may take it for an end
        return bool(secure.recv(1))
    except (TimeoutError, ConnectionResetError):
        return True
    except OSError:
        return False


def _turned_away(address: str, identity: Identity) -> str:
    with contextlib.suppress(ConfigError):
        certificate = parse_certificate(identity.cert_pem, str(identity.directory / CERT_FILE))
        lapse = (
            certificate.lapse(datetime.now(UTC)) or "its authority is not in the master's ca.crt, or a clock is wrong"
        )
        if identity.role is Role.MASTER:
            lapse = "it is good for a master only"
        return (
            f"the master at {address} does not accept the certificate of {certificate} in {identity.directory}: "
            f"{lapse}; ask the operator of the run for keys"
        )
    return f"the master at {address} does not accept the certificate in {identity.directory}: ask for new keys"


def _without_keys(connection: socket.socket, address: str) -> str:
    """A server that answers a TLS greeting with TLS wants keys."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent to this peer, and nothing it sends is trusted
    try:
        with context.wrap_socket(connection, server_hostname=MASTER_DNS_NAME):
            return f"the master at {address} wants keys: give {option('keys', 'DIR')} instead of {option('insecure')}"
    except OSError:
        return ""
