"""A master that is started again at another of its addresses: its slaves and clusters find it without a restart."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from support.ports import own_port, release
from support.waiting import until
from support.whole_run import WholeRun

from dips.core.net.security import INSECURE
from dips.local.operator_client import OperatorClient


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address at which the system drops what comes to connect, as that of a host that is gone: the queue of
    connections that no one accepts is full."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        probe = opened.enter_context(socket.socket())
        probe.settimeout(0.2)
        try:
            probe.connect(listener.getsockname())
            raise AssertionError("the system took one more connection")
        except TimeoutError:
            pass
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_slave_and_a_cluster_follow_their_master_to_its_other_address(tmp_path: Path) -> None:
    ports = own_port(), own_port()
    first, second = (f"127.0.0.1:{port}" for port in ports)
    try:
        with black_hole() as gone:
            masters = f"{first},{gone},{second}"
            run = WholeRun(tmp_path, 1, listen=second)
            run.slave = run.client = {"master": masters}
            with run:
                cluster = run.cluster("a", 1, step_s=0.01)
                run.wait_for_version(2)
                assert run.address == second
                before, slave = run.status(), run.processes["s0"]
                assert before.published is not None
                run.kill("master")
                run.change_master(listen=first)
                run.start_master()
                assert run.address == first
                run.wait_for_version(before.published.v + 2)
                with OperatorClient(f"{second},{gone},{first}", security=INSECURE) as client:
                    status = client.status()
                    assert client.address == first
                assert status.epoch == before.epoch + 1
                assert run.processes["s0"] is slave
                assert slave.poll() is None
                until(lambda: run.log("s0").count("no master at") >= 2, "the slave says where it found none")
                run.stop(cluster)
            assert run.log("s0").count(f"no master at {second}") == 1
    finally:
        for port in ports:
            release(port)
