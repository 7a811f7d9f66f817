"""Types and settings for how a process proves its identity: by the keys in a directory, or, if so asked, not at all.

Every process and command has the two settings. Reading and checking key files is core/net/keys.py's;
this module imports no cryptography, since the simulator imports it. It must never guess: whoever gives neither keys nor
--insecure gets an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from dips.core.config import Knobs
from dips.core.errors import option
from dips.core.files import GROUP_VARIABLE, FilesGroup
from dips.core.net.addresses import parse_address, require_loopback, split_addresses
from dips.core.units import validating

KEYS_VARIABLE = "DIPS_KEYS"
INSECURE_VARIABLE = "DIPS_INSECURE"

METRICS_FILE = "metrics.json"
"""In the directory of a role that has one."""


class Role(Enum):
    """The role that a certificate gives its holder; the value is in the certificate's URI dips://ROLE/NAME."""

    MASTER = "master"
    SLAVE = "slave"
    CLUSTER = "cluster"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Identity:
    """A process's own certificate and key, read and checked by dips.core.net.keys.load_identity."""

    role: Role
    name: str
    directory: Path  # where they came from; they are read again from there when they were renewed
    ca_pem: bytes = field(repr=False)
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}"


@dataclass(frozen=True)
class Insecure:
    """No keys: nothing is encrypted and no one is authenticated, on this machine's loopback only."""


INSECURE = Insecure()

Security = Identity | Insecure

SETTINGS = ("keys", "insecure")
"""The names of the two settings that say which."""

VARIABLES = {
    "master": "DIPS_MASTER",
    "cluster_id": "DIPS_CLUSTER",
    "run_id": "DIPS_RUN",
    "keys": KEYS_VARIABLE,
    "insecure": INSECURE_VARIABLE,
    "files_group": GROUP_VARIABLE,
}
"""Variables that say where and who a process is, and whose its files are, by the names of the settings."""


def _check_address(value: str, info: ValidationInfo) -> str:
    what = info.field_name or "address"
    parse_address(value, what)
    if info.data.get("insecure"):
        require_loopback(value, what)
    return value


Address = Annotated[str, AfterValidator(validating(_check_address))]
"""A setting of the form HOST:PORT: well formed, on loopback when insecure."""


def _check_addresses(value: str, info: ValidationInfo) -> str:
    for address in split_addresses(value, info.field_name or "address"):
        _check_address(address, info)
    return value


Addresses = Annotated[str, AfterValidator(validating(_check_addresses))]
"""HOST:PORT, or several with commas between them; each as an Address."""

AddressOrEmpty = Annotated[
    str, AfterValidator(validating(lambda value, info: _check_address(value, info) if value else value))
]


class ProcessKnobs(Knobs):
    """The settings of every role: its keys, its metrics, who may read its files. They come first, so that addresses are
    checked by them.

    Paths are made absolute when they are read: a user's own program may change its working directory later.
    """

    GROUPS: ClassVar = {"keys": "Keys", "metrics_listen": "Metrics", "files_group": "Files"}

    keys: Path | None = Field(
        None,
        description="Directory of this process's identity (ca.crt, tls.crt, tls.key), made by `dips keys`",
    )
    insecure: bool = Field(
        False, description="Use no keys: nothing is encrypted, no one is authenticated, loopback only"
    )

    failpoints: bool = Field(
        False, description="For tests: let DIPS_FAILPOINTS make this process fail on purpose; else it refuses to start"
    )

    metrics_listen: Annotated[Address | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description="HOST:PORT to serve Prometheus metrics at, under /metrics; port 0: a free one. Beyond loopback in "
        "TLS with this process's keys, for holders of keys of the run",
    )
    metrics_file: Path | None = Field(
        None,
        description="File that says where metrics are served, as Prometheus' file_sd_configs reads it; "
        "else metrics.json in the directory of a master or slave",
    )
    files_group: FilesGroup = ""

    @field_validator("*", mode="after")
    @classmethod
    def _make_absolute(cls, value: Any) -> Any:
        return value.absolute() if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if self.keys is not None and self.insecure:
            raise ValueError(both_given())
        return self


def both_given() -> str:
    return (
        f"keys and insecure are both given: leave out one of {option('keys')} (or {KEYS_VARIABLE}) and "
        f"{option('insecure')} (or {INSECURE_VARIABLE})"
    )


def check_reach(address: str, what: str, security: Security) -> None:
    """Raise ConfigError for an address of another machine when no one could be authenticated there."""
    if isinstance(security, Insecure):
        require_loopback(address, what)
