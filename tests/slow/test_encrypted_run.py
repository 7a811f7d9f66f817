"""A run with keys on both planes: what is seen on the way, and what becomes of keys that are revoked or foreign."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zmq
from support.fault_proxy import FaultProxy, Proxies
from support.ports import own_port
from support.run_for_workers import part_of
from support.waiting import until
from support.whole_run import LAYOUT, NumpyCluster, WholeRun

from dips.core.errors import DipsError
from dips.core.layout import PublishedModel
from dips.core.messages import BeginPullReply, BeginPullRequest, Caller, PullGrant, SlaveAddress
from dips.core.net.addresses import parse_address
from dips.core.net.zmq_sockets import CurvePair, Failure, Handshakes, as_client
from dips.local.authority import Authority, ensure_keys
from dips.worker.control import MasterStubs, channel_to
from dips.worker.reader import fetch_version

A, B = "cluster-alpha", "cluster-beta"


class TappedRun(WholeRun):
    """A relay before the master and before each slave's data port keeps all that passes. Ended by tapped()."""

    def start_master(self) -> None:
        super().start_master()
        self.taps = Proxies()
        self.taps.__enter__()
        self.control = self.tapping("control", self.address)
        self.data: list[FaultProxy] = []
        self.address = self.control.address

    def start_slave(self, name: str, **more: object) -> None:
        port = own_port()
        self.data.append(self.tapping(name, f"127.0.0.1:{port}"))
        super().start_slave(name, data_port=port, advertise=self.data[-1].address, **more)

    def tapping(self, name: str, address: str) -> FaultProxy:
        relay = self.taps.add(name, parse_address(address))
        relay.keeps = True
        return relay

    @contextmanager
    def tapped(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.taps.__exit__()


def wait_for_versions(run: WholeRun, n: int) -> None:
    run.wait_for_version(run.version() + n)


def stop(cluster: NumpyCluster) -> None:
    cluster.driver.request_stop()
    cluster.join()


def fetched(run: WholeRun) -> PublishedModel:
    return fetch_version(run.address, None, "reader-gamma", run.security("operator"))


def windows(flat: np.ndarray) -> list[bytes]:
    """Pieces of 16 bytes, as they would stand in a chunk."""
    return [flat[i : i + 4].tobytes() for i in range(0, flat.size - 4, 16)]


def control_words() -> list[bytes]:
    return [b"/dips.v1.Clusters/Join", b"/dips.v1.Slaves/Attach", A.encode(), b"reader-gamma", b"layers.5.w"]


def found_in(taps: Iterable[FaultProxy], needles: list[bytes]) -> list[bytes]:
    seen = [bytes(piece) for tap in taps for piece in tap.seen]
    return [needle for needle in needles if any(needle in piece for piece in seen)]


def answer_to(pair: CurvePair, address: SlaveAddress) -> Failure | None:
    """How a data port turns a process with this key away; None: not soon, so that it was let in."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        as_client(dealer, pair, address.curve_key)
        handshakes = Handshakes(context, dealer)
        dealer.connect(address.data_endpoint)
        handshakes.socket.poll(500)
        failed = next(handshakes.failures(), None)
        handshakes.close()
        return failed.failure if failed is not None else None
    finally:
        context.destroy(linger=0)


def addresses(run: WholeRun) -> tuple[SlaveAddress, ...]:
    """Where the slaves are, and their keys, as the master tells a reader."""
    request = BeginPullRequest(Caller("", 0, "check"), True, curve_key=CurvePair.new().public)
    with channel_to(run.address, run.security("operator")) as channel:
        reply = MasterStubs(channel).call(request, 10.0)
    assert isinstance(reply, BeginPullReply)
    assert isinstance(reply.answer, PullGrant)
    return reply.answer.placement.slaves


def test_a_run_with_keys_hides_everything_and_turns_away_foreign_and_revoked_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    ensure_keys(keys, [A, B], ["s0"])
    run = TappedRun(tmp_path, n_slaves=1, keys=keys)
    with run, run.tapped():
        good, bad = run.cluster(A, 1, step_s=0.01), run.cluster(B, 2, step_s=0.01)
        run.wait_for_version(2)
        a_foreign_key_is_turned_away(run)
        the_revoked_one_is_refused_on_both_planes(run, bad, Authority(keys))
        wait_for_versions(run, 2)
        stop(good)
        vectors = [fetched(run).flat, *good.model.pushed, *good.model.installed, *bad.model.pushed]
        needles = [*control_words(), *(piece for flat in vectors for piece in windows(flat))]
        taps = [run.control, *run.data]
        assert all(sum(map(len, tap.seen)) > 4 * LAYOUT.n_bytes for tap in taps), "all of it went through them"
        assert found_in(taps, needles) == []


def a_foreign_key_is_turned_away(run: WholeRun) -> None:
    """Its owner would first have to learn the slave's key, which the master tells only to clusters that have joined."""
    (slave,), stranger = addresses(run), CurvePair.new()
    until(lambda: answer_to(stranger, slave) is Failure.KEY, "it was let in")
    words = f"data key {stranger.public.hex()[:8]}, which is not on the master's list"
    until(lambda: words in run.log("master"), "the master's log has nothing")
    assert words in run.log("s0")


def the_revoked_one_is_refused_on_both_planes(run: WholeRun, bad: NumpyCluster, authority: Authority) -> None:
    (slave,), pair = addresses(run), part_of(bad.driver)._transfers._curve
    assert pair is not None
    with authority.locked():
        authority.revoke(B, "its machine was stolen")
    until(lambda: not bad._thread.is_alive(), "it trains on")
    assert isinstance(bad.error, DipsError)
    assert "revoked (its machine was stolen)" in str(bad.error)
    until(lambda: answer_to(pair, slave) is Failure.KEY, "its data key is let in")
    until(lambda: f"data key {pair.public.hex()[:8]}" in run.log("master"), "the master's log has nothing")
    assert "its machine was stolen" in run.log("master")


def test_the_same_taps_see_everything_of_a_run_without_keys(tmp_path: Path) -> None:
    """The positive control: what the test above looks for is there to be found."""
    run = TappedRun(tmp_path, n_slaves=1)
    with run, run.tapped():
        cluster = run.cluster(A, 1, step_s=0.01)
        run.wait_for_version(2)
        stop(cluster)
        pieces = windows(fetched(run).flat)
        assert found_in([run.control], control_words()) == control_words()
        assert len(found_in(run.data, pieces)) > 0.8 * len(pieces), "but for those that two blocks share"
        assert found_in(run.data, [A.encode()]) == [A.encode()]
