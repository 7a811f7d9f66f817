"""Authorises viewers of the page: those of the service Operator, and persons to whom an operator gives the link.

With keys: a client certificate of role operator, checked by the same Access as every call, or the random token that the
master writes into its own directory, readable by its owner only. Without keys there is no authentication, so that only
loopback is served. In both cases the request must name a host of this master: a foreign name that resolves to this
address (DNS rebinding) would let another site's scripts read the page. It must never fail open.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.files import secret
from dips.core.net.keys import MASTER_DNS_NAME
from dips.master.access import Access

PAGE_METHOD = "/dips.v1.Operator/Page"
"""The method for which a viewer is authorised: not one that every role may call, so only operators may."""

LINK_PARAMETER = "link"
SECRET_NAME = "page.secret.json"
ADDRESS_NAME = "page.json"

_TOKEN_BYTES = 32
_TOKEN_CHARACTERS = 43


@dataclass(frozen=True)
class Secret:
    """Kept over restarts, so that links and open pages stay valid."""

    token: str
    port: int = 0  # of the last start; 0: none yet


@dataclass(frozen=True)
class Visitor:
    """A viewer, in words."""

    who: str
    by_link: bool = False  # the answer sets the cookie, so that the token leaves the address line


class PageAccess:
    """Authorises every request. Make and call it on one thread."""

    def __init__(self, access: Access, token: str, port: int, hosts: Iterable[str] = ()) -> None:
        """hosts: further host names of this page."""
        self._access, self.token = access, token
        self._hosts = frozenset(host.lower() for host in hosts)
        self.cookie = f"{'__Host-' if access.checks else ''}dips-page-{port}"
        """The port is in the name, since cookies of one host are shared by all its ports."""

    @property
    def checks(self) -> bool:
        """Whether there are keys, and therefore a token."""
        return self._access.checks

    def host_is_ours(self, host: str | None) -> bool:
        """Whether the Host header names this master. Addresses always do: only names can be resolved wrongly."""
        name = host_name(host)
        if name is None:
            return False
        own = {"localhost", *self._hosts} | ({MASTER_DNS_NAME} if self.checks else set())
        return name in own or is_address(name, loopback_only=not self.checks)

    def admit(self, certificate: bytes | None, link: str | None, cookies: Mapping[str, str]) -> Visitor:
        """The authorised viewer. Raises Refused(IDENTITY), with the certificate's fault if there is one."""
        if not self.checks:
            return Visitor("this machine")
        if link is not None and self._is_token(link):
            return Visitor("the link", by_link=True)
        if self._is_token(cookies.get(self.cookie, "")):
            return Visitor("the link")
        return Visitor(str(self._access.admit(PAGE_METHOD, certificate)))

    def look(self) -> None:
        """Reads changed lists of revoked certificates and authorities."""
        self._access.look()

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def host_name(host: str | None) -> str | None:
    """The name of a Host header, in lower case, without port and brackets; None when it is not one."""
    if not host or len(host) > 300 or any(c in host for c in "/@\\ \t?#,"):
        return None
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        well = bool(bracket) and (not rest or _is_port(rest))
        return name.lower() if well and is_address(name) else None
    name, colon, port = host.partition(":")
    if ":" in port or (colon and not _is_port(f":{port}")):
        return None
    return name.lower().rstrip(".") or None


def is_address(name: str, loopback_only: bool = False) -> bool:
    """Whether it is an IP address."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not loopback_only


def _is_port(text: str) -> bool:
    number = text.removeprefix(":")
    return text.startswith(":") and number.isascii() and number.isdecimal()


# ---- files ----


def load_secret(directory: Path) -> Secret:
    """The token of the last start, or a new one when there is none. Raises ConfigError when others could read it."""
    path = directory / SECRET_NAME
    try:
        raw = json.loads(path.read_text(encoding="ascii"))
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(
                f"{path} can be read by other users of this machine, and gives its readers access to the page: remove "
                "it, and the master makes a new one"
            )
        token, port = str(raw["token"]), int(raw["port"])
        if len(token) == _TOKEN_CHARACTERS and 0 <= port <= 65535:
            return Secret(token, port)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # none yet, or incomplete after a crash: a new one is used
    return Secret(secrets.token_urlsafe(_TOKEN_BYTES))


def save_secret(directory: Path, secret: Secret) -> None:
    _write_private(directory / SECRET_NAME, {"token": secret.token, "port": secret.port})


def write_page_address(directory: Path, url: str, pid: int) -> None:
    """Writes the page's address with the token, for this user and this user's commands."""
    _write_private(directory / ADDRESS_NAME, {"url": url, "pid": pid})


def read_page_url(directory: Path) -> str | None:
    """The address that the master of this directory wrote; None when it serves no page."""
    try:
        return str(json.loads((directory / ADDRESS_NAME).read_text(encoding="ascii"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_private(path: Path, content: Mapping[str, object]) -> None:
    """Writes a file that others can never read. After a crash it may be incomplete: readers then ignore it."""
    number = secret(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(number, "w", encoding="ascii") as file:
        file.write(json.dumps(content) + "\n")
