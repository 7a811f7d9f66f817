"""The keys of a deployment: which identities it needs, whether they are good, and the secrets that carry them.

A process gets its own identity and no other; the authority's key never leaves its folder. It must never print a key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.net.keys import REVOKED_FILE, load_identity
from dips.core.net.security import Role
from dips.deploy.deploy_file import Deployment, MasterPlace
from dips.deploy.objects import CONTEXTS, IDENTITY_FILES, Object, made
from dips.local.authority import WantedIdentity

SUPERVISOR, PROMETHEUS, OPERATOR = "supervisor", "prometheus", "operator"


def wanted(deployment: Deployment) -> list[WantedIdentity]:
    """All identities of a deployment, the operator's last: it stays with the one who deploys."""
    roles = [(Role.MASTER, "master"), *((Role.SLAVE, name) for name in deployment.slave_ids)]
    # Of a role that may ask for the status and nothing else.
    roles.append((Role.SLAVE, SUPERVISOR))
    if any(deployment.monitored(place.site) for place in deployment.masters):
        roles.append((Role.OPERATOR, PROMETHEUS))
    roles += [(Role.CLUSTER, cluster.id) for cluster in deployment.clusters]
    roles.append((Role.OPERATOR, OPERATOR))
    return [WantedIdentity(deployment.run.keys / name, role, name) for role, name in roles]


def how_to_make(deployment: Deployment, missing: Iterable[WantedIdentity]) -> str:
    """The command that makes what is missing."""
    folder = deployment.run.keys
    begun = (folder / "ca").is_dir()
    names = [f"--{one.role.value} {one.name}" for one in missing if one.role is not Role.MASTER]
    return " ".join(["dips keys", "add" if begun else "init", str(folder), *names])


def missing(deployment: Deployment) -> list[WantedIdentity]:
    """Identities whose folder is not there."""
    return [one for one in wanted(deployment) if not one.directory.is_dir()]


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
        identity = load_identity(one.directory)
        one.check(identity)
        signed_by.setdefault(identity.ca_pem, one.name)
    if len(signed_by) > 1:
        first, second, *_ = signed_by.values()
        raise ConfigError(
            f"{deployment.run.keys}: {first} and {second} trust different authorities: take all folders from one "
            "folder of `dips keys`"
        )


# ---- secrets ----


def server_secrets(deployment: Deployment) -> list[Object]:
    """For the server site. Without the folders the values are empty: a plan shows what there will be."""
    keys, name, (master, *_) = deployment.run.keys, deployment.name, deployment.masters
    slaves = {
        f"{slave}.{file}": _encoded(keys / slave / file) for slave in deployment.slave_ids for file in IDENTITY_FILES
    }
    return [
        *master_secrets(deployment, master),
        _secret(deployment, f"{name}-keys-slave", "slave", slaves),
        _secret(deployment, f"{name}-keys-supervisor", "supervisor", _files(keys / SUPERVISOR)),
    ]


def master_secrets(deployment: Deployment, place: MasterPlace) -> list[Object]:
    """For the site of master or standby, which have the same keys, and of the Prometheus there."""
    keys, name = deployment.run.keys, deployment.name
    found = [_secret(deployment, f"{name}-keys-master", "master", _files(keys / "master"))]
    if deployment.monitored(place.site):
        found.append(_secret(deployment, f"{name}-keys-prometheus", "server", _files(keys / PROMETHEUS)))
    return found


def cluster_secret(deployment: Deployment, cluster: str) -> Object:
    files = _files(deployment.run.keys / cluster)
    return _secret(deployment, f"{deployment.name}-keys-{cluster}", "cluster", files, cluster)


def _secret(deployment: Deployment, name: str, component: str, data: dict[str, str], cluster: str = "") -> Object:
    found = made(deployment, "Secret", name, component, cluster, type="Opaque", data=data)
    found["metadata"]["annotations"] = {CONTEXTS: json.dumps(sorted({one.context for one in deployment.sites} - {""}))}
    return found


def _files(place: Path) -> dict[str, str]:
    """All that a pod mounts as one folder. Slaves mount single files, all of which must be there: they get no list."""
    revoked = [REVOKED_FILE] if (place / REVOKED_FILE).is_file() else []
    return {file: _encoded(place / file) for file in (*IDENTITY_FILES, *revoked)}


def _encoded(file: Path) -> str:
    try:
        return base64.b64encode(file.read_bytes()).decode()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
