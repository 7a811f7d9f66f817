"""Judges whether an object of Kubernetes is healthy, in a word and a sentence. Pure."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from dips.core.net.addresses import parse_address, split_addresses
from dips.deploy.deploy_file import Deployment
from dips.deploy.objects import Object


class Health(Enum):
    """The health of an object.

    READY: as it should be. WAITING: not yet. DONE: ended well. FAILED: a person must act.
    """

    READY = "ready"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class ObjectState:
    health: Health
    sentence: str


def state_of(live: Object | None) -> ObjectState:
    """The state of an object as the API gave it back; None: it is not there."""
    if live is None:
        return ObjectState(Health.WAITING, "not there")
    status = live.get("status", {})
    match live["kind"]:
        case "StatefulSet" | "Deployment" if status.get("observedGeneration", 0) < live["metadata"].get(
            "generation", 0
        ):
            return ObjectState(Health.WAITING, "its change has yet to be seen")
        case "StatefulSet":
            return _of_set(live)
        case "Deployment":
            ready = min(status.get("readyReplicas", 0), status.get("updatedReplicas", 0))
            wanted = live["spec"].get("replicas", 1)
            return ObjectState(Health.READY if ready >= wanted else Health.WAITING, f"{ready} of {wanted} pods ready")
        case "Job":
            return _of_job(live)
        case "JobSet":
            return _of_conditions(live, "Completed", "started")
        case "Service" if live["spec"].get("type") == "LoadBalancer":
            found = status.get("loadBalancer", {}).get("ingress") or []
            where = [one.get("hostname") or one.get("ip", "") for one in found]
            health = Health.READY if where else Health.WAITING
            return ObjectState(health, f"at {where[0]}" if where else "has no address yet")
    return ObjectState(Health.READY, "there")


def _of_set(live: Object) -> ObjectState:
    status, wanted = live.get("status", {}), live["spec"].get("replicas", 1)
    ready, updated = status.get("readyReplicas", 0), status.get("updatedReplicas", 0)
    if ready < wanted:
        return ObjectState(Health.WAITING, f"{ready} of {wanted} pods ready")
    if status.get("currentRevision") != status.get("updateRevision") and updated < wanted:
        return ObjectState(Health.WAITING, f"{updated} of {wanted} pods are the new ones")
    return ObjectState(Health.READY, f"{ready} of {wanted} pods ready")


def _of_job(live: Object) -> ObjectState:
    if live["spec"].get("suspend"):
        return ObjectState(Health.READY, "waits in its queue")
    ended = _of_conditions(live, "Complete", "")
    if ended.health in (Health.DONE, Health.FAILED):
        return ended
    active, ready = live.get("status", {}).get("active", 0), live.get("status", {}).get("ready", 0)
    wanted = live["spec"].get("parallelism", 1)
    if ready >= wanted:
        return ObjectState(Health.READY, f"{ready} of {wanted} pods train")
    return ObjectState(Health.WAITING, f"{ready} of {wanted} pods run, {active} were started")


def _of_conditions(live: Object, complete: str, otherwise: str) -> ObjectState:
    for condition in live.get("status", {}).get("conditions") or []:
        if condition.get("status") != "True":
            continue
        if condition.get("type") == complete:
            return ObjectState(Health.DONE, "ended well")
        if condition.get("type") in ("Failed", "FailureTarget"):
            why = condition.get("message") or condition.get("reason") or "no reason given"
            return ObjectState(Health.FAILED, f"failed: {why}")
    if live["spec"].get("suspend"):
        return ObjectState(Health.READY, "waits in its queue")
    return ObjectState(Health.READY, otherwise)


# ---- reach -----------------------------------------------------------------------------------------------------------
#
# Checks whether master and slaves can be reached from this machine where clusters will dial them.
#
# Only that a port answers is asked, without keys. A name that is not known yet (a load balancer that was just made) is
# asked again until the time is up.


CONNECT_S = 3.0

Dial = Callable[[str, int], None]
"""Raises OSError when no process answers there, UnicodeError for a name that no machine can have."""


def dial(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=CONNECT_S).close()


def endpoints(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """The processes to be reached, each with its HOST:PORT; nothing when only pods of the same place dial them."""
    if deployment.run.expose == "inside":
        return
    yield "the master", deployment.master_address
    for index, slave in enumerate(deployment.slave_ids):
        yield f"slave {slave}", deployment.slave_address(index)


def state_of_endpoint(who: str, address: str, dial: Dial = dial) -> ObjectState:
    why = []
    for one in split_addresses(address, f"the address of {who}"):
        host, port = parse_address(one)
        try:
            dial(host, port)
        except UnicodeError:
            what = f"no machine can have the name {host!r}: a part of it is empty or too long"
            return ObjectState(Health.FAILED, what)
        except OSError as error:
            why.append(_words(error))
            continue
        return ObjectState(Health.READY, f"{who} answers at {one}")
    return ObjectState(Health.WAITING, f"{who} is not reached at {address} from this machine ({', '.join(why)})")


def _words(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
