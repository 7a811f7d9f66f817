"""Whether an address is this machine's, and what happens to whoever is sent to its own loopback."""

from __future__ import annotations

import pytest

from dips.core.errors import ConfigError
from dips.core.messages import SlaveAddress
from dips.core.net import addresses
from dips.core.net.addresses import check_slaves_reachable, is_elsewhere, is_loopback_endpoint

INWARD = SlaveAddress("s0", "tcp://127.0.0.1:29500", b"")
OUTWARD = SlaveAddress("s1", "tcp://192.0.2.7:29500", b"")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:0", "[::1]:5", "0.0.0.0:1", "no-such-host.invalid:1"])
def test_what_is_here_or_not_found_is_not_elsewhere(address: str) -> None:
    assert not is_elsewhere(address)


def test_addresses_that_are_elsewhere_and_those_that_lead_every_machine_to_itself() -> None:
    assert is_elsewhere("192.0.2.7:29400")  # for documentation, by RFC 5737: no machine has it
    assert is_loopback_endpoint(INWARD.data_endpoint)
    assert not is_loopback_endpoint(OUTWARD.data_endpoint)
    assert not is_loopback_endpoint("")  # a slave that is away


def test_a_master_elsewhere_must_not_send_clusters_to_themselves() -> None:
    with pytest.raises(ConfigError, match=r"slave s0 advertises tcp://127\.0\.0\.1:29500"):
        check_slaves_reachable("192.0.2.1:29400", [OUTWARD, INWARD])
    check_slaves_reachable("192.0.2.1:29400", [OUTWARD])


def test_loopback_is_right_where_the_master_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    check_slaves_reachable("127.0.0.1:29400", [INWARD])
    monkeypatch.setattr(addresses, "is_elsewhere", lambda address: False)  # it dials this machine's own public address
    check_slaves_reachable("192.0.2.1:29400", [INWARD])
