"""Addresses: what is understood, and that nothing but this machine is served."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.core.errors import ConfigError
from dips.core.net import addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("tcp://127.0.0.1:80", ("127.0.0.1", 80)),
        ("master.local:4711", ("master.local", 4711)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert addresses.parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "4711",
        "127.0.0.1",
        "127.0.0.1:",
        ":4711",
        "a:b",
        "a:-1",
        "a:65536",
        "::1:80",
        "a:1:2",
        "a:1 ",
        "a:\u0661",
    ],
)
def test_anything_else_is_refused_with_its_name_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--master .* is not an address: ") as caught:
        addresses.parse_address(text, "--master")
    assert repr(text) in str(caught.value)


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        host, port = addresses.parse_address(text)
    except ConfigError:
        return
    assert addresses.parse_address(addresses.format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("bound", "here"),
    [("0.0.0.0:5", "127.0.0.1:5"), ("[::]:5", "[::1]:5"), ("10.0.0.1:5", "10.0.0.1:5"), ("localhost:5", "localhost:5")],
)
def test_a_wildcard_is_reached_by_the_loopback(bound: str, here: str) -> None:
    assert addresses.dialable(bound) == here


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "127.0.0.1", "localhost:80", "[::1]:80", "[::1]", "::1", "tcp://127.0.0.1:5"]
)
def test_this_machine_is_served(address: str) -> None:
    addresses.require_loopback(address, "listen")


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "0.0.0.0", "192.168.1.5:80", "tcp://*:80", "[::]:80", "::", "tcp://10.0.0.1:1", ""]
)
def test_another_machine_is_refused_with_the_reason(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen is .* not a loopback address: .*, or use 127\.0\.0\.1$"):
        addresses.require_loopback(address, "listen")


@pytest.mark.parametrize(
    ("listen", "dialled", "text"),
    [
        ("127.0.0.1:0", "127.0.0.1:4711", "127.0.0.1:4711"),
        ("0.0.0.0:4711", "127.0.0.1:4711", "0.0.0.0:4711, all addresses of this machine"),
        ("[::]:0", "[::1]:4711", "[::]:4711, all addresses of this machine"),
    ],
)
def test_a_process_that_listens_on_all_addresses_says_so(listen: str, dialled: str, text: str) -> None:
    assert addresses.shown_listening(listen, dialled) == text


@pytest.mark.parametrize(
    ("families", "wanted"),
    [
        ([socket.AF_INET], False),
        ([socket.AF_INET6, socket.AF_INET], False),
        ([socket.AF_INET6], True),
        ([], False),
    ],
)
def test_a_name_is_dialled_over_ipv6_where_it_has_nothing_else(
    monkeypatch: pytest.MonkeyPatch, families: list[socket.AddressFamily], wanted: bool
) -> None:
    def answered(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        if not families:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(family, socket.SOCK_STREAM, 6, "", ()) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    assert addresses.needs_ipv6("tcp://slave-0.example.org:29500") is wanted
    assert addresses.needs_ipv6("tcp://[2001:db8::7]:29500")
    assert not addresses.needs_ipv6("tcp://192.0.2.7:29500")
