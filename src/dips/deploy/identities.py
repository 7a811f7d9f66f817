"""The keys of a deployment: which identities it needs, whether they are good, and the secrets that carry them.

A process gets its own identity and no other; the authority's key never leaves its folder. It must never print a key.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.net.keys import REVOKED_FILE, load_identity
from dips.core.net.security import Identity, Role
from dips.deploy.deploy_file import Deployment
from dips.deploy.objects import IDENTITY_FILES, Object, made

SUPERVISOR, PROMETHEUS, OPERATOR = "supervisor", "prometheus", "operator"


@dataclass(frozen=True)
class Wanted:
    """An identity that must be there. name: of its folder in the folder of keys, and in its certificate."""

    role: Role
    name: str


def wanted(deployment: Deployment) -> list[Wanted]:
    """All identities of a deployment, the operator's last: it stays with the one who deploys."""
    found = [Wanted(Role.MASTER, "master")]
    found += [Wanted(Role.SLAVE, name) for name in deployment.slave_ids]
    # Of a role that may ask for the status and nothing else.
    found.append(Wanted(Role.SLAVE, SUPERVISOR))
    if deployment.run.service_monitor:
        found.append(Wanted(Role.OPERATOR, PROMETHEUS))
    found += [Wanted(Role.CLUSTER, cluster.id) for cluster in deployment.clusters]
    return [*found, Wanted(Role.OPERATOR, OPERATOR)]


def how_to_make(deployment: Deployment, missing: Iterable[Wanted]) -> str:
    """The command that makes what is missing."""
    folder = deployment.run.keys
    begun = (folder / "ca").is_dir()
    names = [f"--{one.role.value} {one.name}" for one in missing if one.role is not Role.MASTER]
    return " ".join(["dips keys", "add" if begun else "init", str(folder), *names])


def missing(deployment: Deployment) -> list[Wanted]:
    """Identities whose folder is not there."""
    return [one for one in wanted(deployment) if not (deployment.run.keys / one.name).is_dir()]


def check(deployment: Deployment) -> None:
    """Raise ConfigError for the first identity that is missing, broken, lapsed, or another process's."""
    absent = missing(deployment)
    if absent:
        raise ConfigError(
            f"{deployment.run.keys} has no keys of {', '.join(one.name for one in absent)}: make them with "
            f"`{how_to_make(deployment, absent)}`"
        )
    signed_by: dict[bytes, str] = {}
    for one in wanted(deployment):
        identity = _checked(deployment.run.keys / one.name, one)
        signed_by.setdefault(identity.ca_pem, one.name)
    if len(signed_by) > 1:
        first, second, *_ = signed_by.values()
        raise ConfigError(
            f"{deployment.run.keys}: {first} and {second} trust different authorities: take all folders from one "
            "folder of `dips keys`"
        )


def _checked(place: Path, one: Wanted) -> Identity:
    identity = load_identity(place)
    if (identity.role, identity.name) != (one.role, one.name):
        raise ConfigError(
            f"{place} holds keys of {identity}, not of {one.role.value} {one.name}: take the folder that `dips keys` "
            "made for it"
        )
    return identity


# ---- secrets ----


def server_secrets(deployment: Deployment) -> list[Object]:
    """For the server site. Without the folders the values are empty: a plan shows what there will be."""
    keys, name = deployment.run.keys, deployment.name
    slaves = {
        f"{slave}.{file}": value for slave in deployment.slave_ids for file, value in _files(keys / slave).items()
    }
    found = [
        _secret(deployment, f"{name}-keys-master", "master", _files(keys / "master", REVOKED_FILE)),
        _secret(deployment, f"{name}-keys-slave", "slave", slaves),
        _secret(deployment, f"{name}-keys-supervisor", "supervisor", _files(keys / SUPERVISOR)),
    ]
    if deployment.run.service_monitor:
        found.append(_secret(deployment, f"{name}-keys-prometheus", "server", _files(keys / PROMETHEUS)))
    return found


def cluster_secret(deployment: Deployment, cluster: str) -> Object:
    files = _files(deployment.run.keys / cluster)
    return _secret(deployment, f"{deployment.name}-keys-{cluster}", "cluster", files, cluster)


def _secret(deployment: Deployment, name: str, component: str, data: dict[str, str], cluster: str = "") -> Object:
    return made(deployment, "Secret", name, component, cluster, type="Opaque", data=data)


def _files(place: Path, *optional: str) -> dict[str, str]:
    found = {file: _encoded(place / file) for file in IDENTITY_FILES}
    return {**found, **{file: _encoded(place / file) for file in optional if (place / file).is_file()}}


def _encoded(file: Path) -> str:
    try:
        return base64.b64encode(file.read_bytes()).decode()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
