"""Objects under a URL: s3://BUCKET/PREFIX, gs://..., az://..., or file:///DIRECTORY, by the library obstore.

The library is an extra, and is imported when a store is opened. It finds credentials itself (environment, instance
metadata, application default credentials; profiles of AWS by boto3 where that is installed). None may stand in a URL,
and no sentence of ours repeats what a server answered beyond its error code: such texts hold names of keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from dips.core.errors import ConfigError, RetryLater
from dips.core.release import how_to_install

SCHEMES = ("s3", "gs", "az", "file")
CALL_S = 300.0
"""Most time of one request, which has at most a part of a file: enough for 16 MiB over half a Mbit/s."""

PART_BYTES, MOST_PARTS = 16 << 20, 9000
"""Of a file that is sent as one object; S3 takes 10,000 parts."""

RETRY_S = 20.0
"""How long the library itself tries a request again; who calls decides about more."""

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
"""Variables with the server's address where it is not the cloud's own; http:// in one means: not encrypted."""

_CODE = re.compile(r"<Code>(\w{1,64})</Code>")

_STATUS = re.compile(r"status code: (\d{3})")


class Objects(Protocol):
    """Objects with names, each whole or not there. Methods raise ConfigError where a person must act, RetryLater where
    the server does not answer, KeyError for an object that is not there."""

    url: str

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object, or replace it; data: its bytes, or a file with them."""

    def get(self, name: str, n_bytes: int) -> bytes:
        """Read an object of this size, as a listing has it; one of another size is not read, and is not there."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name -> bytes of all objects below a prefix of whole names between slashes."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in this order; one that is not there is no error."""


def is_url(text: str) -> bool:
    """Whether a person means an object store by it, and not a path."""
    return "://" in text


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises ConfigError for one that names no store, or holds a secret."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{parts.scheme or 'a path'} is no scheme of an object store that is known: give {known}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"the URL of the {parts.scheme} store holds more than a place: credentials belong into the environment "
            "or a profile, never into a URL; write SCHEME://BUCKET/PREFIX"
        )
    if parts.scheme == "file" and (host or not parts.path.startswith("/")):
        raise ConfigError(f"{url} names no directory: write file:///DIRECTORY, with three slashes")
    if parts.scheme != "file" and not host:
        raise ConfigError(f"{url} names no bucket: write {parts.scheme}://BUCKET/PREFIX")
    return url.rstrip("/")


def open_store(url: str) -> Objects:
    """The store at a URL; nothing is asked of it yet. Raises ConfigError as check_url does, and where the library is
    missing or takes the URL for wrong."""
    url = check_url(url)
    if find_spec("obstore") is None:
        raise ConfigError(f"{url} needs obstore: {how_to_install('store')}")
    return _Store(url)


class _Store:
    def __init__(self, url: str) -> None:
        import obstore.exceptions
        from obstore.store import from_url

        self.url = url
        self._library, self._errors = obstore, obstore.exceptions
        scheme = urlsplit(url).scheme
        more: dict[str, Any] = {}
        if scheme == "file":
            more = {"mkdir": True}
        else:
            plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
            limits = {"timeout": timedelta(seconds=CALL_S), "connect_timeout": timedelta(seconds=5)}
            more["client_options"] = {**limits, "allow_http": plain}
            more["retry_config"] = {"max_retries": 4, "retry_timeout": timedelta(seconds=RETRY_S)}
        if scheme == "s3" and os.environ.get("AWS_PROFILE"):
            more["credential_provider"] = _aws_profile(url)
        try:
            self._store = from_url(url, **more)
        except (self._errors.BaseError, ValueError, OSError) as error:
            lacks = "set AZURE_STORAGE_ACCOUNT_NAME" if "Account must" in str(error) else "see its name"
            raise ConfigError(f"{url} cannot be used as an object store{_code(error)}: {lacks}") from None

    def put(self, name: str, data: bytes | Path) -> None:
        more: dict[str, Any] = {"use_multipart": False}
        if isinstance(data, Path):
            more = {"use_multipart": True, "chunk_size": max(PART_BYTES, data.stat().st_size // MOST_PARTS + 1)}
        try:
            self._library.put(self._store, name, data, **more)
        except Exception as error:  # the library's own, and what it passes on of credential providers
            raise self._said(error, "write") from None

    def get(self, name: str, n_bytes: int) -> bytes:
        try:
            found = self._library.get(self._store, name)
            if found.meta["size"] == n_bytes:
                return bytes(found.bytes())
        except (self._errors.NotFoundError, FileNotFoundError):
            raise KeyError(name) from None
        except Exception as error:
            raise self._said(error, "read") from None
        raise KeyError(name)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        try:
            batches = self._library.list(self._store, prefix or None, chunk_size=1000)
            return {str(one["path"]): int(one["size"]) for batch in batches for one in batch}
        except Exception as error:
            raise self._said(error, "list") from None

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._library.delete(self._store, name)
            except (self._errors.NotFoundError, FileNotFoundError):
                continue
            except Exception as error:
                raise self._said(error, "delete from") from None

    def _said(self, error: Exception, what: str) -> ConfigError | RetryLater:
        """One sentence without the server's words, which may name keys."""
        text, status = str(error), _STATUS.search(str(error))
        cannot = f"cannot {what} the object store {self.url}{_code(error)}"
        is_local = self.url.startswith("file:")
        if not is_local and (isinstance(error, self._errors.NotFoundError) or (status and status[1] == "404")):
            return ConfigError(f"{cannot}: there is no such bucket; make it, or give another URL")
        if isinstance(error, PermissionError) or (status and status[1] in ("401", "403")):
            return ConfigError(
                f"{cannot}: it refuses the credentials; give others, or the right to list, read, write and delete there"
            )
        if "redential" in text or "metadata" in text.lower():
            return ConfigError(
                f"{cannot}: no credentials are found; set the variables of its command-line tool, such as "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where the machine has a role"
            )
        if is_local:
            return RetryLater(f"{cannot}: {getattr(error, 'strerror', None) or 'its directory fails'}; see its disk")
        return RetryLater(f"{cannot}: the server does not answer as it should ({type(error).__name__})")


def _code(error: Exception) -> str:
    found = _CODE.search(str(error))
    return f" ({found[1]})" if found else ""


def _aws_profile(url: str) -> Any:
    """What gives the credentials of the profile AWS_PROFILE, as the command-line tools read it."""
    if find_spec("boto3") is None:
        raise ConfigError(f"AWS_PROFILE is set, and only boto3 reads a profile for {url}: install boto3, or unset it")
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except Exception as error:  # botocore's own, whose texts name files and profiles
        raise ConfigError(
            f"the profile that AWS_PROFILE names gives no credentials for {url} ({type(error).__name__}): "
            "see `aws configure list`"
        ) from None
