"""A run with keys on both planes: what is seen on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from support.fault_proxy import FaultProxy, Proxies
from support.ports import own_port
from support.whole_run import LAYOUT, NumpyCluster, WholeRun

from dips.core.layout import PublishedModel
from dips.core.net.addresses import parse_address
from dips.local.authority import ensure_keys
from dips.worker.reader import fetch_version

A = "cluster-alpha"


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


def test_a_run_with_keys_hides_everything(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "keys", [A], ["s0"])
    run = TappedRun(tmp_path, n_slaves=1, keys=tmp_path / "keys")
    with run, run.tapped():
        cluster = run.cluster(A, 1, step_s=0.01)
        run.wait_for_version(4)
        stop(cluster)
        vectors = [fetched(run).flat, *cluster.model.pushed, *cluster.model.installed]
        needles = [*control_words(), *(piece for flat in vectors for piece in windows(flat))]
        taps = [run.control, *run.data]
        assert all(sum(map(len, tap.seen)) > 4 * LAYOUT.n_bytes for tap in taps), "all of it went through them"
        assert found_in(taps, needles) == []


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
