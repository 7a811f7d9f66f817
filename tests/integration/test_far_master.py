"""A master behind a long way: the first attempt to connect is given the time that a handshake over it takes."""

from __future__ import annotations

from pathlib import Path

from support.fault_proxy import Harm, NetFault, Proxies
from support.whole_run import WholeRun

from dips.core.net.addresses import parse_address
from dips.core.net.security import INSECURE
from dips.local.operator_client import OperatorClient


def test_status_over_a_way_of_300_ms_is_answered_at_the_first_attempt(tmp_path: Path) -> None:
    """An attempt ended after 100 ms, and calls that do not wait failed with it."""
    with WholeRun(tmp_path / "run", n_slaves=1) as run, Proxies() as proxies:
        proxy = proxies.add("master", parse_address(run.address))
        proxies.harm("master", NetFault(Harm.DELAY, delay_s=0.15))
        with OperatorClient(proxy.address, call_s=20.0, security=INSECURE) as client:
            assert client.status().run_id == "test"
