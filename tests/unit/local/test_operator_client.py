"""The operator's requests as the master gets them, and what a person reads when they fail."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.failed_call import FailedCall
from support.run_status import run_status

from dips.core import messages as m
from dips.core.errors import ConfigError, RefusalCode, Refused, RetryLater
from dips.core.net import codec_protobuf
from dips.core.net.addresses import MasterAddresses
from dips.core.net.security import INSECURE
from dips.local import operator_client
from dips.local.operator_client import NamedRun, OperatorClient


class Channel:
    """In place of a channel of gRPC: notes each call as (method, request, limit)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object, float]] = []
        self.closed = False
        self.fails: grpc.StatusCode | None = None
        self.later = False

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        method = path.rpartition("/")[2]

        def call(message: Any, timeout: float) -> Any:
            self.calls.append((method, message, timeout))
            if self.fails is not None:
                raise FailedCall(self.fails)
            return codec_protobuf.to_message(run_status() if method == "Status" else m.OperatorReply(f"{method}: yes"))

        return call

    def unary_stream(self, path: str, **_: object) -> None:
        """Nothing here watches."""

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    channel = Channel()
    monkeypatch.setattr(operator_client, "open_channel", lambda address, security: channel)
    monkeypatch.setattr(operator_client, "why_not_let_in", lambda address, security: "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [host])
    return channel


def test_each_request_is_sent_as_it_was_meant(channel: Channel) -> None:
    with OperatorClient("h:1", "mine", 7.0, security=INSECURE) as operator:
        assert str(operator.status()) == str(run_status()), "NaN is no equal of itself"
        said = [
            operator.pause("p"),
            operator.resume("r"),
            operator.stop("s"),
            operator.evict("b", "e"),
            operator.drain("b", "d"),
            operator.reshard(["s2"], ["s0"], "m"),
            operator.take_back_reshard(),
            operator.extend(5, True, "x"),
        ]
        assert not channel.closed
    assert channel.closed
    names = ["Pause", "Resume", "Stop", "Evict", "Drain", "Reshard", "Reshard", "Extend"]
    assert said == [f"{name}: yes" for name in names]
    wanted = [
        m.StatusRequest("mine"),
        *(m.OperatorRequest("mine", reason) for reason in "prs"),
        m.EvictRequest("mine", "b", "e"),
        m.DrainRequest("mine", "b", "d"),
        m.ReshardRequest("mine", ("s2",), ("s0",), False, "m"),
        m.ReshardRequest("mine", cancel=True),
        m.ExtendRequest("mine", 5, True, "x"),
    ]
    assert channel.calls == [
        (name, codec_protobuf.to_message(one), 7.0) for name, one in zip(["Status", *names], wanted, strict=True)
    ]


def test_a_master_that_cannot_be_asked_is_told(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OperatorClient("h:1", security=INSECURE)
    channel.fails = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(RetryLater, match="the master at h:1 does not answer: start it"):
        operator.status()

    def unknown(host: str, port: int) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(RetryLater, match="no address is known for the name 'h' of h:1: the run has ended") as told:
            operator.status()
    assert "service not known" not in str(told.value)
    monkeypatch.setattr(operator_client, "why_not_let_in", lambda address, security: "it is another authority")
    with pytest.raises(Refused, match="it is another authority") as refused:
        operator.stop("")
    assert refused.value.code is RefusalCode.IDENTITY
    channel.fails = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(Refused, match="PERMISSION_DENIED"):
        operator.status()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Channel]:
    """Channels by address; one that is taken out is of a port where nothing listens. `later` is the newest master's."""
    channels = {"h:1": Channel(), "h:2": Channel()}

    def dial(place: tuple[str, int], timeout: float) -> Channel:
        if (channel := channels.get(f"{place[0]}:{place[1]}")) is None:
            raise ConnectionRefusedError(111, "Connection refused")
        return channel

    def look(masters: MasterAddresses, security: object, caller: m.Caller) -> bool:
        assert (security, caller.run_id, caller.epoch) == (INSECURE, "mine", run_status().epoch)
        found = next((address for address in masters.others if address in channels and channels[address].later), "")
        if found:
            masters.take(found, "it has taken over")
        return bool(found)

    monkeypatch.setattr(operator_client, "newer_master", look)
    monkeypatch.setattr(operator_client, "open_channel", lambda address, security: channels.get(address) or Channel())
    monkeypatch.setattr(operator_client, "why_not_let_in", lambda address, security: "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [host])
    monkeypatch.setattr(socket, "create_connection", dial)
    return channels


def test_the_first_address_that_answers_is_used(two: dict[str, Channel]) -> None:
    two["h:1"].fails = grpc.StatusCode.UNAVAILABLE  # as a standby answers
    with OperatorClient("h:1,h:2", "mine", security=INSECURE) as operator:
        assert operator.pause("p") == "Pause: yes"
        assert operator.address == "h:2"
        assert (len(two["h:1"].calls), two["h:1"].closed) == (1, True)
        operator.resume("r")
        assert len(two["h:1"].calls) == 1, "it keeps to the one that answered"
        two["h:2"].fails, two["h:1"].fails = grpc.StatusCode.UNAVAILABLE, None
        assert operator.stop("s") == "Stop: yes"
        assert operator.address == "h:1"


def test_a_port_where_nothing_listens_is_passed_over(two: dict[str, Channel]) -> None:
    del two["h:1"]
    with OperatorClient("h:1,h:2", "mine", security=INSECURE) as operator:
        operator.status()
        assert operator.address == "h:2"
    del two["h:2"]
    with (
        OperatorClient("h:1,h:2", "mine", security=INSECURE) as operator,
        pytest.raises(RetryLater, match=r"at h:1 does not answer.*; the master at h:2 does not answer"),
    ):
        operator.status()


def test_a_call_that_may_have_been_carried_out_is_not_sent_to_another_address(two: dict[str, Channel]) -> None:
    with OperatorClient("h:1,h:2", "mine", security=INSECURE) as operator:
        operator.status()
        two["h:1"].fails = grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(RetryLater, match="h:1"):
            operator.evict("a", "e")
    assert two["h:2"].calls == []
    with OperatorClient("h:1,h:2", "mine", security=INSECURE) as operator:
        assert operator.pause("p") == "Pause: yes", "a master that stands still was asked for its status only"
    assert [method for method, *_ in two["h:1"].calls] == ["Status", "Status", "Evict", "Status"]


def test_a_request_goes_to_the_newest_master_also_where_an_older_one_answers_first(two: dict[str, Channel]) -> None:
    two["h:2"].later = True
    with OperatorClient("h:1,h:2", "mine", security=INSECURE) as operator:
        assert operator.pause("p") == "Pause: yes"
        assert operator.address == "h:2"
    assert [[method for method, *_ in two[address].calls] for address in two] == [["Status"], ["Status", "Pause"]]
    assert two["h:1"].closed


def test_a_run_may_be_named_by_several_addresses() -> None:
    assert NamedRun.of("h:1,h:2").master() == "h:1,h:2"
    with pytest.raises(ConfigError, match="'h'"):
        NamedRun.of("h:1,h")
