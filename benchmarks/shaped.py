"""Links with a rate and a delay on one machine: network namespaces around one bridge.

Each site is a namespace with one address. Its cable to the bridge is a pair of virtual Ethernet devices or, with a
delay, a pair of TAP devices that this module joins in user space (kernels often lack netem): frames wait in a queue
for the delay, so a link has latency without losing rate. tc's token bucket gives each direction of each cable its rate.

Addresses are 127.77.0.N, moved from the loopback device to the cable: so programs that insist on loopback run
unchanged. Needs root and the programs ip and tc; everything is gone again at the end.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import json
import multiprocessing
import os
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from flows.peer import Peer

HUB = "hub"
NET = "127.77.0"
LAN, LAN_NET = "lan0", "10.77.0"
CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
LARGEST_FRAME_BYTES = 70_000
SOCKET_BUFFER_BYTES = 64 << 20
"""Above rate x round trip of any link here: 2 Gbit/s over 100 ms are 25 MB."""

QUEUE_MS = 100
"""What a link may hold before it drops: two round trips over the sea."""


class NotPossible(Exception):
    """This machine cannot make namespaces; says why."""


@dataclass(frozen=True)
class Cable:
    """Of one site, seen from it. Rates in bit/s; delay one way."""

    up_bits_per_s: float
    down_bits_per_s: float
    delay_ms: float = 0.0


def require_root() -> None:
    """Raise NotPossible unless namespaces can be made here."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root: run it as root")
    if missing:
        raise NotPossible(f"the program {missing[0]} is missing: install iproute2")
    if not os.path.exists("/dev/net/tun"):
        raise NotPossible("/dev/net/tun is missing: this kernel has no TAP devices")


class ShapedNet:
    """A context in which the sites exist.

    prefix: of the namespaces' names. congestion: TCP's algorithm in them; empty: the system's own. cluster: sites that
    are joined by a second network, the device LAN in each, without limits.
    """

    def __init__(
        self, cables: Mapping[str, Cable], prefix: str, congestion: str = "", cluster: Sequence[str] = ()
    ) -> None:
        self._cables = dict(cables)
        self._prefix = prefix
        self._congestion = congestion
        self._cluster = tuple(cluster)
        self._numbers = {name: number for number, name in enumerate(cables, start=1)}
        self._relay: multiprocessing.process.BaseProcess | None = None
        self._lifeline: Connection | None = None

    def namespace(self, site: str) -> str:
        return f"{self._prefix}-{site}"

    def address(self, site: str) -> str:
        return f"{NET}.{self._numbers[site]}"

    def lan_address(self, site: str) -> str:
        """Of a site of the cluster, in its second network."""
        return f"{LAN_NET}.{self._numbers[site]}"

    def __enter__(self) -> Self:
        require_root()
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def start(self, site: str, make: Callable[..., object], *args: Any) -> Peer:
        """A process at this site."""
        return Peer(made_in, self.namespace(site), make, *args)

    def set_rate(self, site: str, cable: Cable) -> None:
        """Give a cable other rates; its delay stays."""
        self._cables[site] = cable
        self._shape(site, "change")

    def cut(self, site: str) -> None:
        """Unplug a cable: nothing gets through, and no connection is closed."""
        _run(f"ip -n {self.namespace(HUB)} link set {self._port(site)} down")

    def carried(self) -> dict[str, tuple[int, int]]:
        """Bytes that each site has sent and received so far, with the frames' heads."""
        told = _run(f"ip -n {self.namespace(HUB)} -s -j link show")
        stats = {link["ifname"]: link["stats64"] for link in json.loads(told)}
        ports = {site: stats[self._port(site)] for site in self._cables}
        return {site: (port["rx"]["bytes"], port["tx"]["bytes"]) for site, port in ports.items()}

    # ---- parts ----

    def _build(self) -> None:
        hub = self.namespace(HUB)
        _run(f"ip netns add {hub}")
        _run(f"ip -n {hub} link add bridge0 type bridge")
        _run(f"ip -n {hub} link set bridge0 up")
        for site in self._cables:
            _run(f"ip netns add {self.namespace(site)}")
        for site, cable in self._cables.items():
            if not cable.delay_ms:
                _run(f"ip -n {hub} link add {self._port(site)} type veth peer name wan0 netns {self.namespace(site)}")
        delayed = [
            (self.namespace(site), hub, self._port(site), cable.delay_ms / 1e3)
            for site, cable in self._cables.items()
            if cable.delay_ms
        ]
        if delayed:
            self._start_relay(delayed)
        for site in self._cables:
            self._configure(site)
        self._join_cluster(hub)

    def _join_cluster(self, hub: str) -> None:
        if not self._cluster:
            return
        _run(f"ip -n {hub} link add bridge1 type bridge")
        _run(f"ip -n {hub} link set bridge1 up")
        for site in self._cluster:
            port, space = f"lan{self._numbers[site]}", self.namespace(site)
            _run(f"ip -n {hub} link add {port} type veth peer name {LAN} netns {space}")
            _run(f"ip -n {hub} link set {port} master bridge1")
            _run(f"ip -n {hub} link set {port} up")
            _run(f"ip -n {space} addr add {self.lan_address(site)}/24 dev {LAN}")
            _run(f"ip -n {space} link set {LAN} up")

    def _start_relay(self, delayed: Sequence[tuple[str, str, str, float]]) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._relay = context.Process(target=relay, args=(there, delayed), daemon=True)
        self._relay.start()
        there.close()
        here.recv()
        self._lifeline = here

    def _configure(self, site: str) -> None:
        space, hub, port, address = self.namespace(site), self.namespace(HUB), self._port(site), self.address(site)
        _run(f"ip -n {hub} link set {port} master bridge0")
        _run(f"ip -n {hub} link set {port} up")
        _run(f"ip -n {space} link set lo up")
        for key in ("all", "default", "wan0"):
            _run(f"ip netns exec {space} sysctl -qw net.ipv4.conf.{key}.route_localnet=1")
        _run(f"ip -n {space} addr del 127.0.0.1/8 dev lo")
        _run(f"ip -n {space} addr add 127.0.0.1/32 dev lo")
        _run(f"ip -n {space} addr add {address}/24 dev wan0")
        _run(f"ip -n {space} link set wan0 up")
        buffers = f"4096 131072 {SOCKET_BUFFER_BYTES}"
        settings = [f"tcp_wmem={buffers}", f"tcp_rmem={buffers}"]
        settings += [f"tcp_congestion_control={self._congestion}"] if self._congestion else []
        for setting in settings:
            _run(["ip", "netns", "exec", space, "sysctl", "-qw", f"net.ipv4.{setting}"])
        self._shape(site, "add")

    def _shape(self, site: str, verb: str) -> None:
        cable = self._cables[site]
        _run(_bucket(self.namespace(site), "wan0", verb, cable.up_bits_per_s))
        _run(_bucket(self.namespace(HUB), self._port(site), verb, cable.down_bits_per_s))

    def _port(self, site: str) -> str:
        return f"port{self._numbers[site]}"

    def _tear_down(self) -> None:
        if self._relay is not None and self._relay.is_alive():
            self._relay.kill()
            self._relay.join()
        for site in (*self._cables, HUB):
            subprocess.run(["ip", "netns", "del", self.namespace(site)], capture_output=True, check=False)


def _bucket(space: str, device: str, verb: str, bits_per_s: float) -> str:
    """A bucket of 4 ms, since the kernel fills it that often, but of some largest frames at least."""
    burst_bytes = max(4 * LARGEST_FRAME_BYTES, int(bits_per_s / 8 * 0.004))
    return (
        f"tc -n {space} qdisc {verb} dev {device} root tbf rate {int(bits_per_s)}bit burst {burst_bytes} "
        f"latency {QUEUE_MS}ms"
    )


def _run(command: str | Sequence[str]) -> str:
    """What a command prints."""
    words = command.split() if isinstance(command, str) else list(command)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossible(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# ---- in other processes ----


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(target, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    finally:
        os.close(target)


def made_in(namespace: str, make: Callable[..., Any], *args: Any) -> Any:
    """make(*args), inside."""
    enter(namespace)
    return make(*args)


def _open_tap(namespace: str, device: str) -> int:
    """Create `device` in `namespace`; returns its non-blocking file descriptor."""
    enter(namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return tap


def relay(told: Any, delayed: Sequence[tuple[str, str, str, float]]) -> None:
    """Join (namespace, hub, port, delay_s) by cables with a delay, until killed or left alone.

    Says so once all devices exist.
    """
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    other: dict[int, int] = {}
    delay_s: dict[int, float] = {}
    for namespace, hub, port, seconds in delayed:
        near, far = _open_tap(namespace, "wan0"), _open_tap(hub, port)
        other[near], other[far] = far, near
        delay_s[near] = delay_s[far] = seconds
    ctypes.CDLL(None).setns(home, CLONE_NEWNET)
    poll = select.poll()
    for tap in other:
        poll.register(tap, select.POLLIN)
    poll.register(told.fileno(), select.POLLIN)
    told.send("up")
    waiting: dict[int, collections.deque[tuple[float, bytes]]] = {tap: collections.deque() for tap in other}
    while True:
        now_s = time.monotonic()
        due_s = min((queue[0][0] for queue in waiting.values() if queue), default=now_s + 0.02)
        for tap, _ in poll.poll(max(0.0, due_s - now_s) * 1e3):
            if tap not in other:
                return  # nothing is ever said to the relay: whoever started it is gone
            _take(tap, waiting[other[tap]], delay_s[tap])
        now_s = time.monotonic()
        for tap, queue in waiting.items():
            while queue and queue[0][0] <= now_s:
                _give(tap, queue.popleft()[1])


def _take(tap: int, queue: collections.deque[tuple[float, bytes]], delay_s: float) -> None:
    for _ in range(32):
        try:
            frame = os.read(tap, LARGEST_FRAME_BYTES)
        except (BlockingIOError, OSError):
            return
        queue.append((time.monotonic() + delay_s, frame))


def _give(tap: int, frame: bytes) -> None:
    """A device that is full or down drops the frame, as a real one does."""
    try:
        os.write(tap, frame)
    except (BlockingIOError, OSError):
        return
