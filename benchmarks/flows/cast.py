"""Slaves and clusters, each in a process of its own, that race through transfers as the master would order them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quiet import processor_s

from dips.master.state.schedule import TransferRequest, TransferScheduler, Way
from flows.peer import Peer
from flows.shaped_ends import ClusterSite, SlaveSite, TcpSite, placement_of
from flows.simulated import TransferMethod


class Net(Protocol):
    """Where processes are, and how to reach them."""

    def address(self, site: str) -> str: ...

    def start(self, site: str, make: Callable[..., object], *args: Any) -> Peer:
        """A process at this site."""
        ...


class Loopback:
    """A Net without links: every site is this machine."""

    def address(self, site: str) -> str:
        return "127.0.0.1"

    def start(self, site: str, make: Callable[..., object], *args: Any) -> Peer:
        return Peer(make, *args)


class Cast:
    """Slaves and clusters at their sites, and the scheduler that the master would ask."""

    def __init__(self, net: Net, clusters: Sequence[str], slaves: Sequence[str], n_bytes: int) -> None:
        self._net = net
        self.clusters = tuple(clusters)
        self._placement = placement_of(slaves)
        n_elems = n_bytes // 4
        self._peers: dict[str, Peer] = {}
        for index, name in enumerate(slaves):
            args = (net.address(name), index, n_elems, len(slaves), len(clusters))
            self._peers[name] = net.start(name, SlaveSite, *args)
        endpoints = tuple((name, self._peers[name].call("endpoint").value) for name in slaves)
        digests = tuple(self._peers[name].call("digest").value for name in slaves)
        for name in clusters:
            self._peers[name] = net.start(name, ClusterSite, name, n_elems, endpoints, digests)
        self._slaves = tuple(slaves)
        self._number = 0

    def race(self, clusters: Sequence[str], way: Way, method: TransferMethod) -> dict[str, float]:
        """All of these at once: seconds that each one's transfer takes."""
        self._number += 1
        scheduler = TransferScheduler()
        for name in clusters:
            slot = self.clusters.index(name)
            order = tuple(range(len(self._slaves)))
            if method is TransferMethod.SCHEDULED:
                order = scheduler.begin(TransferRequest(name, way, slot), self._placement)
            if way is Way.PUSH:
                for slave in self._slaves:
                    self._peers[slave].call("open", name, self._number, slot)
                self._peers[name].begin("push", self._number, order, method.value)
            else:
                self._peers[name].begin("pull", order, method.value)
        return {name: self._peers[name].finish().value for name in clusters}

    def ring(self) -> dict[str, float]:
        """A ring all-reduce of the whole model among all clusters."""
        names, following = self.clusters, (*self.clusters[1:], self.clusters[0])
        for name in names:
            self._peers[name].call("listen", self._net.address(name))
        for name, after in zip(names, following, strict=True):
            self._peers[name].call("connect", self._net.address(after))
        for name in names:
            self._peers[name].call("accept")
        for name in names:
            self._peers[name].begin("ring", len(names))
        found = {name: self._peers[name].finish().value for name in names}
        for name in names:
            self._peers[name].call("hang_up")
        return found

    def tcp(self, cluster: str, slave: str, n_bytes: int) -> float:
        """One TCP stream from a cluster to a slave's site."""
        sink = self._net.start(slave, TcpSite, self._net.address(slave))
        sink.begin("receive")
        seconds: float = self._peers[cluster].call("send_tcp", self._net.address(slave), n_bytes).value
        sink.finish()
        sink.close()
        return seconds

    def cpu_s(self) -> float:
        """Processor seconds so far of all processes."""
        return sum(processor_s(peer.pid) for peer in self._peers.values())

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
