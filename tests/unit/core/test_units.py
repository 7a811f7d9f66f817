"""Amounts with units: read exactly, printed shortly, and refused rather than guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from dips.core import units
from dips.core.errors import ConfigError


@pytest.mark.parametrize(
    ("parse", "amounts"),
    [
        (units.parse_bytes, {
            4096: (4096, 4096.0, "4096"), 0: ("0",), 1 << 20: ("1 MiB", "1mib"), 64_000_000: ("64MB", "64 mb"),
            3 << 29: ("1.5 GiB",), 2 << 40: (" 2 TiB ",), 10**6: ("1_000 kB",), 7: ("7 B",), 1000: ("0.001 MB",),
        }),
        (units.parse_seconds, {
            2.0: (2, "2", "2s"), 0.25: (0.25, "250 ms"), 60.0: ("1 min", "1m"), 5400.0: ("1 h 30 min", "1h30m"),
            21600.0: ("6 h",), 172800.0: ("2 d",), 5e-5: ("50us",), 1000.0: ("1e3 s",),
        }),
        (units.parse_count, {
            7: (7, "7"), 1_500_000: ("1.5M",), 20_000: ("20k",), 2 * 10**9: ("2e9",), 10**9: ("1 B",),
        }),
        (units.parse_bits_per_s, {
            1e10: (1e10, "10gbps", "10 Gbps", "10 Gbit/s", "1.25 GB/s"), 1e8: ("100 mbit/s",),
            8 * 2**20: ("1 MiB/s",), 0.0: ("0",),
        }),
    ],
)  # fmt: skip
def test_amounts_are_read_exactly(
    parse: Callable[[object], float], amounts: Mapping[float, tuple[object, ...]]
) -> None:
    for amount, written in amounts.items():
        assert [parse(each) for each in written] == [amount] * len(written)


NONSENSE: list[object] = [
    *("", " ", "lots", "1 2", "1..2", "MiB", "1 MiB/s2", "--1", "1e", "0x10", "1,5", True, None, [], "\u0661"),
    *("1" * 50, "1e99999999", "9e999999999999999999"),
]


@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_seconds, units.parse_count, units.parse_bits_per_s])
@pytest.mark.parametrize("value", [*NONSENSE, float("nan"), float("inf"), 1e30, 10**400], ids=lambda v: str(v)[:10])
def test_nonsense_is_refused(parse: Callable[[object], float], value: object) -> None:
    with pytest.raises(ConfigError, match=r"is not a|larger than anything"):
        parse(value)


@pytest.mark.parametrize(("parse", "value"), [
    (units.parse_bytes, "1 Mbit"), (units.parse_bytes, "1 s"), (units.parse_seconds, "1 MB"),
    (units.parse_seconds, "1 h 30"), (units.parse_seconds, "30 1 h"), (units.parse_seconds, "1 h -30 min"),
    (units.parse_bits_per_s, "10 GBps"), (units.parse_bits_per_s, "10 MB"), (units.parse_count, "3 ms"),
])  # fmt: skip
def test_a_unit_of_another_kind_is_refused_with_an_example(parse: Callable[[object], float], value: str) -> None:
    with pytest.raises(ConfigError, match='write a number in the base unit, or a text such as "'):
        parse(value)


@pytest.mark.parametrize(("text", "wanted"), [
    (units.format_bytes(1023), "1023 B"), (units.format_bytes(1 << 20), "1 MiB"),
    (units.format_bytes(3 << 29), "1.5 GiB"), (units.format_bytes(123_456_789), "117.7 MiB"),
    (units.format_seconds(0), "0 s"), (units.format_seconds(0.25), "250 ms"),
    (units.format_seconds(0.0000125), "12.5 us"), (units.format_seconds(0.000999), "999 us"),
    (units.format_seconds(-0.25), "-250 ms"), (units.format_seconds(59.5), "59.5 s"),
    (units.format_seconds(90), "1 min 30 s"), (units.format_seconds(93780), "1 d 2 h"),
    (units.format_seconds(float("inf")), "inf"), (units.format_count(999), "999"),
    (units.format_count(1_500_000), "1.5M"), (units.format_count(363_648), "363.6k"),
    (units.format_bits_per_s(1e10), "10 Gbit/s"), (units.format_bits_per_s(12.5), "12.5 bit/s"),
])  # fmt: skip
def test_amounts_are_printed_shortly(text: str, wanted: str) -> None:
    assert text == wanted


@given(st.integers(0, 2**60))
def test_a_printed_amount_reads_back_within_its_digits(n_bytes: int) -> None:
    shown = units.format_bytes(n_bytes)
    number, unit = shown.split()
    scale = units.parse_bytes(f"1 {unit}")
    assert float(number) * scale == pytest.approx(n_bytes, rel=1e-3)


@given(st.floats(1e-3, 1e7))
def test_a_printed_duration_reads_back_within_its_digits(seconds_s: float) -> None:
    assert units.parse_seconds(units.format_seconds(seconds_s)) == pytest.approx(seconds_s, rel=0.05)


@given(st.text(max_size=20))
def test_no_text_breaks_a_parser(text: str) -> None:
    for parse in (units.parse_bytes, units.parse_seconds, units.parse_count, units.parse_bits_per_s):
        try:
            assert isinstance(parse(text), int | float)
        except ConfigError as error:
            assert str(error)  # noqa: PT017


class Amounts(BaseModel):
    size: units.Bytes = 0
    wait: units.Seconds = 0.0
    tokens: units.Count = 0
    link: units.BitsPerSecond = 0.0


def test_fields_of_settings_take_numbers_and_texts() -> None:
    amounts = Amounts.model_validate({"size": "1 KiB", "wait": "1 min", "tokens": "2k", "link": "1 kbps"})
    assert amounts == Amounts(size=1024, wait=60.0, tokens=2000, link=1000.0)
    assert type(amounts.size) is int
    assert type(amounts.wait) is float


@pytest.mark.parametrize("field", ["size", "wait", "tokens", "link"])
@pytest.mark.parametrize(("value", "why"), [(-1, "-1 is negative"), ("-1", "'-1' is negative"), ("x", "is not a")])
def test_fields_of_settings_refuse_with_the_sentence(field: str, value: object, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Amounts.model_validate({field: value})
