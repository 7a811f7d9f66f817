"""Checks whether master and slaves can be reached from this machine where clusters will dial them.

Only that a port answers is asked, without keys. A name that is not known yet (a load balancer that was just made) is
asked again until the time is up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from dips.core.net.addresses import parse_address
from dips.deploy.deploy_file import Deployment
from dips.deploy.health import Health, ObjectState

CONNECT_S = 3.0

Dial = Callable[[str, int], None]
"""Raises OSError when no process answers there."""


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
    host, port = parse_address(address, f"the address of {who}")
    try:
        dial(host, port)
    except OSError as error:
        return ObjectState(Health.WAITING, f"{who} is not reached at {address} from this machine ({_words(error)})")
    return ObjectState(Health.READY, f"{who} answers at {address}")


def _words(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
