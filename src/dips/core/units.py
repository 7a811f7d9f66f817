"""Parses and formats amounts that people write with a unit: sizes, durations, rates and counts.

Inside the program every amount is in its base unit (bytes, seconds, bits per second, one), and the name
of the variable says which. A text with a unit is used only in settings and on the screen. Never guesses a
unit: a text without one is in the base unit, and an unknown one is refused.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation, Overflow
from typing import Annotated, ParamSpec, TypeVar

from pydantic import BeforeValidator, Field

from dips.core.errors import ConfigError

_NUMBER = r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_AMOUNT = re.compile(rf"\s*({_NUMBER})\s*([^\s\d.+-]*)\s*", re.ASCII)

# Units as they are looked up: in small letters.
_BYTES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_SECONDS: Mapping[str, Decimal] = {
    "": Decimal(1),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_COUNT: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
# Bits are written "bps" or "bit/s". "GBps" could mean either, so a unit with a capital B is one of those spelled out.
_BITS_PER_S: Mapping[str, int] = {
    "": 1,
    **{f"{prefix}bps": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}bit/s": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    "B/s": 8,
    **{f"{prefix}B/s": 8 * 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{f"{prefix}iB/s": 8 * 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}

LARGEST = Decimal(2) ** 63
"""Beyond this an amount is a typing error, and does not fit the wire's integers."""


def parse_bytes(value: object) -> int:
    """Bytes from 4096, "4096", "64 MB" (10**6) or "1 MiB" (2**20). Raises ConfigError."""
    return _whole(_parse_one(value, "a size", _BYTES, '"64 MB" or "1 MiB"'), value, "bytes")


def parse_seconds(value: object) -> float:
    """Seconds from 2, "2", "250 ms", "1 min" or "1 h 30 min". Raises ConfigError."""
    example = '"2 s", "250 ms" or "1 h 30 min"'
    if not isinstance(value, str):
        return float(_number(value, "a duration", example))
    terms = list(_AMOUNT.finditer(value))
    whole_text = "".join(term.group() for term in terms) == value
    if not terms or not whole_text or (len(terms) > 1 and any(not term[2] for term in terms)):
        raise _nonsense(value, "a duration", example)
    if len(terms) > 1 and any(term[1].startswith(("-", "+")) for term in terms):
        raise _nonsense(value, "a duration", example)
    return float(sum(_parse_one(term.group(), "a duration", _SECONDS, example) for term in terms))


def parse_count(value: object) -> int:
    """A whole number from 1500000, "1.5M", "20k" or "2e9". Raises ConfigError."""
    return _whole(_parse_one(value, "a count", _COUNT, '"1.5M" or "20k"'), value, "of them")


def parse_bits_per_s(value: object) -> float:
    """Bits per second from 1e10, "10gbps", "10 Gbit/s" or "1.25 GB/s" (bytes). Raises ConfigError."""
    return float(_parse_one(value, "a rate", _BITS_PER_S, '"10 Gbit/s", "10gbps" or "1.25 GB/s"'))


def format_bytes(n_bytes: int) -> str:
    """1048576 -> "1 MiB"; at most four digits."""
    return _scaled(n_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_seconds(seconds_s: float) -> str:
    """0.25 -> "250 ms", 90 -> "1 min 30 s", 7200 -> "2 h"."""
    if not math.isfinite(seconds_s):
        return str(seconds_s)
    if abs(seconds_s) < 1 and seconds_s != 0:
        small_ms = seconds_s * 1e3
        return f"{_short(small_ms)} ms" if abs(small_ms) >= 1 else f"{_short(small_ms * 1e3)} us"
    if seconds_s < 60:
        return f"{_short(seconds_s)} s"
    rest, parts = round(seconds_s), []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, rest = divmod(rest, length)
        if amount:
            parts.append(f"{amount} {unit}")
    return " ".join(parts[:2])


def format_count(n: int) -> str:
    """1500000 -> "1.5M"; at most four digits."""
    return _scaled(n, 1000, ("", "k", "M", "G", "T"))


def format_bits_per_s(bits_per_s: float) -> str:
    """1e10 -> "10 Gbit/s"."""
    return _scaled(bits_per_s, 1000, (" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"))


N = TypeVar("N", int, float)
P = ParamSpec("P")
T = TypeVar("T")


def validating(check: Callable[P, T]) -> Callable[P, T]:
    """A check or parser as a validator of settings: pydantic wants ValueError, and adds the field's name itself."""

    @functools.wraps(check)
    def validate(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return check(*args, **kwargs)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return validate


def _amount(parse: Callable[[object], N]) -> BeforeValidator:
    """Reads a field that may be written with a unit, and is not negative."""

    def parse_amount(value: object) -> N:
        amount = parse(value)
        if amount < 0:
            raise ConfigError(f"{value!r} is negative")
        return amount

    return BeforeValidator(validating(parse_amount), json_schema_input_type=int | float | str)


def _bytes_per_second(value: object) -> float:
    """Parse bytes a second from "3 GB/s" or a number."""
    if isinstance(value, str):
        if not value.strip().endswith("/s"):
            raise ValueError(f'{value!r} is not a rate: write it like "3 GB/s"')
        value = value.strip().removesuffix("/s")
    return float(parse_bytes(value))


Bytes = Annotated[int, _amount(parse_bytes)]
"""A setting in bytes, not negative; may be written with a unit."""

Seconds = Annotated[float, _amount(parse_seconds)]
"""A setting in seconds, not negative; may be written with a unit."""

Count = Annotated[int, _amount(parse_count)]
"""A setting that counts things, not negative; may be written as "1.5M"."""

BitsPerSecond = Annotated[float, _amount(parse_bits_per_s)]
"""A setting in bits per second, not negative; may be written with a unit."""
BytesPerSecond = Annotated[float, BeforeValidator(validating(_bytes_per_second)), Field(gt=0)]


def _parse_one(value: object, what: str, factors: Mapping[str, int] | Mapping[str, Decimal], example: str) -> Decimal:
    if not isinstance(value, str):
        return _number(value, what, example)
    match = _AMOUNT.fullmatch(value)
    if match is None:
        raise _nonsense(value, what, example)
    unit = match[2]
    factor = factors.get(unit if factors is _BITS_PER_S and "B" in unit else unit.lower())
    if factor is None:
        raise _nonsense(value, what, example)
    try:
        amount = Decimal(match[1].replace("_", "")) * factor
    except (InvalidOperation, Overflow) as error:
        raise _nonsense(value, what, example) from error
    return _bounded(amount, value)


def _number(value: object, what: str, example: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _nonsense(value, what, example)
    amount = Decimal(value)
    if not amount.is_finite():
        raise _nonsense(value, what, example)
    return _bounded(amount, value)


def _bounded(amount: Decimal, value: object) -> Decimal:
    if abs(amount) >= LARGEST:
        raise ConfigError(f"{value!r} is larger than anything that can be meant (2**63)")
    return amount


def _whole(amount: Decimal, value: object, what: str) -> int:
    if amount != amount.to_integral_value():
        raise ConfigError(f"{value!r} is {amount} {what}, which is not a whole number")
    return int(amount)


def _nonsense(value: object, what: str, example: str) -> ConfigError:
    remedy = f"write a number in the base unit, or a text such as {example}"
    return ConfigError(f"{value!r} is not {what}: {remedy}")


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    """In the largest unit of which there is at least one; each unit is `step` times the one before."""
    power = next((power for power in range(len(units) - 1, 0, -1) if abs(number) >= step**power), 0)
    return _short(number / step**power) + units[power]


def _short(number: float) -> str:
    """At most four digits, without trailing zeros and without an exponent."""
    digits_before = len(str(int(abs(number))))
    text = f"{number:.{max(0, 4 - digits_before)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
