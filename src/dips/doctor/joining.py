"""Checks whether a cluster can join from this machine, with the keys of that cluster.

The master and every slave's data port are dialled as the cluster will dial them. Nothing of the run is changed; where a
version is published a read of it is begun, as the evaluator begins one, since the slaves then accept this process's
data key and the whole way is proven.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import zmq
import zmq.utils.monitor

from dips.core.errors import ConfigError, RetryLater
from dips.core.messages import (
    BeginPullReply,
    BeginPullRequest,
    Caller,
    FinishPullRequest,
    PullGrant,
    SlaveStatus,
    StatusReply,
)
from dips.core.net.addresses import (
    MasterAddresses,
    addresses_of,
    is_elsewhere,
    is_loopback_endpoint,
    split_addresses,
    why_unreachable,
)
from dips.core.net.security import Identity, Role, Security
from dips.core.net.tls_probe import why_not_let_in
from dips.core.net.zmq_sockets import CurvePair, as_client, pair_for
from dips.core.observe.tape import new_cause
from dips.core.units import format_seconds
from dips.doctor import host, network
from dips.doctor.findings import Check, Finding, Findings, Grade, fail, ok, warn
from dips.doctor.host import HostFacts
from dips.doctor.network import Reached, check_identities
from dips.local.authority import WantedIdentity
from dips.local.operator_client import OperatorClient
from dips.worker.control import MasterStubs

CALL_S = 10.0
HANDSHAKE_S = 6.0
"""Time for a data port to accept this process's key; the master names the key to the slaves while the read begins."""

_WATCHED = (
    *(zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    *(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED),
)
_SAID: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not accept this process's data key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it speaks no ZeroMQ with the same security, or has another key",
}


def checks(master: str, security: Security, link_bits_per_s: float | None, facts: HostFacts) -> list[Check]:
    """All checks, each after those that it depends on. master: HOST:PORT, or several with commas between them.
    link_bits_per_s: of this machine's link to the slaves; None: not given.

    Raises ConfigError for an address that is none.
    """
    split_addresses(master, "--master")
    return [
        Check("keys", partial(_keys, security)),
        Check("reach", partial(_reach, master)),
        Check("master", partial(_master, master, security)),
        Check("slaves", partial(_slaves, master, security, link_bits_per_s, facts)),
        Check("clock", lambda: [host.judge_clock(facts)]),
    ]


def _keys(security: Security) -> Findings:
    if not isinstance(security, Identity):
        yield warn("keys", "the run has no keys: it can be joined from its own machine only", "use keys")
        return
    yield from check_identities([WantedIdentity(security.directory, security.role, security.name)])
    if security.role is not Role.CLUSTER:
        sentence = f"{security.directory} holds the keys of {security}, which may look but not train"
        yield warn("keys", sentence, "to join, take the directory of a cluster (`dips keys add KEYS --cluster NAME`)")


def _reach(master: str) -> Findings:
    """Of several addresses one has to answer. Where its host says that nothing listens, a standby may be waiting."""
    reached = {address: network.dialled(address) for address in split_addresses(master)}
    one_listens = any(each.listens for each in reached.values())
    for address, each in reached.items():
        finding = network.judge_reached("the master", address, each, not one_listens)
        if one_listens and finding.grade is Grade.FAIL:
            finding = replace(finding, grade=Grade.WARN, remedy=f"right while that host is away; else {finding.remedy}")
        yield finding


def _master(master: str, security: Security) -> Findings:
    refused = [words for address in split_addresses(master) if (words := why_not_let_in(address, security))]
    yield from (Finding("master", Grade.FAIL, words) for words in refused)
    if refused:
        return
    status, at = _status(master, security)
    version = f"version {status.published}" if status.published is not None else "no version yet"
    where = "" if at == master else f", at {at}"
    yield ok("master", f"run {status.run_id} accepts these keys{where}: {version}, {len(status.slaves)} slaves")
    if status.stopping or status.stopped:
        yield fail("master", f"run {status.run_id} has ended", "join another run, or start one")


def _slaves(master: str, security: Security, link_bits_per_s: float | None, facts: HostFacts) -> Findings:
    """Each is dialled at the address that the master gives to clusters. Kernel buffers are judged by the longest round
    trip that is measured so: to slaves on other machines, or to any where the rate of a link was given.
    """
    status, master = _status(master, security)
    if not status.slaves:
        yield warn("slaves", "no slave has attached to the master yet", "start them, then ask again")
        return
    elsewhere = is_elsewhere(master)
    curve = pair_for(security)
    trips_s = []
    with _reading(master, security, curve, status) as grant:
        keys = {} if grant is None else {one.slave_id: one.curve_key for one in grant.placement.slaves}
        for slave in status.slaves:
            if not slave.data_endpoint or not slave.alive:
                yield warn("slaves", f"slave {slave.slave_id} is away", "see its log; then ask again")
            elif elsewhere and is_loopback_endpoint(slave.data_endpoint):
                yield fail("slaves", *why_unreachable(master, slave.slave_id, slave.data_endpoint))
            else:
                places = {place: network.dialled(place) for place in addresses_of(slave.data_endpoint)}
                place, reached = next((one for one in places.items() if one[1].listens), next(iter(places.items())))
                if reached.round_trip_s is not None and (link_bits_per_s or is_elsewhere(slave.data_endpoint)):
                    trips_s.append(reached.round_trip_s)
                yield _judge_slave(slave, place, reached, curve, keys.get(slave.slave_id))
                if reached.listens:
                    yield from _judge_other_addresses(slave, places)
    if trips_s:
        found = host.judge_buffers(facts, link_bits_per_s or host.ORDINARY_LINK_BITS_PER_S, max(trips_s))
        if link_bits_per_s is None and found.remedy:
            found = replace(found, remedy=f"give --link where the link has another rate; else {found.remedy}")
        yield found


@contextlib.contextmanager
def _reading(
    master: str, security: Security, curve: CurvePair | None, status: StatusReply
) -> Iterator[PullGrant | None]:
    """A read of the published version, begun and given up; None while there is none or the master is busy."""
    if status.published is None:
        yield None
        return
    name = security.name if isinstance(security, Identity) else "doctor"
    caller = Caller(status.run_id, 0, name, None, new_cause())
    with contextlib.closing(MasterStubs(MasterAddresses(master), security)) as stubs:
        request = BeginPullRequest(caller, True, None, False, b"" if curve is None else curve.public)
        reply = stubs.call(request, CALL_S)
        assert isinstance(reply, BeginPullReply), "the stub's type"
        grant = reply.answer if isinstance(reply.answer, PullGrant) else None
        try:
            yield grant
        finally:
            if grant is not None:
                with contextlib.suppress(RetryLater):  # the pin runs out by itself
                    stubs.call(FinishPullRequest(caller, grant.pin_id, True), CALL_S)


def _judge_other_addresses(slave: SlaveStatus, places: Mapping[str, Reached]) -> Findings:
    """Those of the same name: transfers try them in turn, and lose time at one that does not answer."""
    for place, reached in places.items():
        if not reached.listens:
            yield warn(
                "slaves",
                f"the data port of slave {slave.slave_id} has several addresses, and {place} cannot be reached from "
                f"here: {reached.why or 'nothing listens there'}",
                f"take that address out of the name in {slave.data_endpoint} (DNS, /etc/hosts), or open the way to it",
            )


def _judge_slave(
    slave: SlaveStatus, place: str, reached: Reached, curve: CurvePair | None, key: bytes | None
) -> Finding:
    """place: its address that was reached. key: the slave's, as the master names it; None while nothing can be read
    yet.
    """
    who, endpoint = f"the data port of slave {slave.slave_id}", slave.data_endpoint
    if reached.round_trip_s is None or not reached.listens:
        why = reached.why or "nothing listens there"
        remedy = "open the way to that port (firewall, security group, route), or correct the slave's advertise"
        return fail("slaves", f"{who} at {endpoint} cannot be reached from here: {why}", remedy)
    trip = f"round trip {format_seconds(reached.round_trip_s)}"
    if key is None:
        sentence = f"{who} at {endpoint} answers, {trip}; its keys are tried once a version is published"
        return ok("slaves", sentence)
    if why := _why_no_handshake(place, curve, key):
        remedy = "see that nothing else listens at that address and port, and ask again; else see the slave's log"
        return fail("slaves", f"{who} at {endpoint} answers, {trip}, but {why}", remedy)
    return ok("slaves", f"{who} at {endpoint} accepts these keys, {trip}")


def _why_no_handshake(endpoint: str, curve: CurvePair | None, key: bytes) -> str:
    """Empty once a connection is made; else why the last one did not."""
    why, until_s = "it does not answer", time.monotonic() + HANDSHAKE_S
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            event = _first_event(context, endpoint, curve, key, left_s)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return ""
            if event:
                why = _SAID.get(event, "it ends the connection")
            time.sleep(0.1)  # the slave may not know this key yet
    finally:
        context.destroy(linger=0)
    return why


def _first_event(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurvePair | None, key: bytes, wait_s: float
) -> int:
    """The first event of one connection; 0 when there was none."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
    if curve is not None:
        as_client(dealer, curve, key)
    monitor = dealer.get_monitor_socket(sum(_WATCHED))
    try:
        dealer.connect(endpoint)
        if not monitor.poll(round(1000 * wait_s)):
            return 0
        return int(zmq.utils.monitor.recv_monitor_message(monitor)["event"])
    finally:
        dealer.disable_monitor()
        dealer.close(linger=0)


def _status(master: str, security: Security) -> tuple[StatusReply, str]:
    """And the address at which the master gave it."""
    with OperatorClient(master, call_s=CALL_S, security=security) as client:
        try:
            return client.status(), client.address
        except RetryLater as error:
            raise ConfigError(str(error)) from error
