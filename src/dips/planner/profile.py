"""The profile file: what `dips profile` measured of devices and links, and `dips plan calibrate` of whole iterations.

TOML, so that a person can read and correct it: [measured] says of what, where and when; [[layers]] has the times of
each layer on each kind of device, for one or several sizes of a microbatch; [[links]] bandwidth and latency of each
direction; [calibration] the overhead of an operation and of a message. [profile] of a problem names it as `file`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dips.core.config import Knobs, SettingsFile
from dips.core.errors import ConfigError
from dips.planner.model import MOST_LAYERS, Amount, DurationOrNone, Maybe, Name, PositiveCount

Instant = Annotated[datetime, Field()]
"""A date or a date with a time; without a zone it is of UTC."""

Fraction = Annotated[float, Field(ge=0, le=10)]

TABLES = ("measured", "layers", "links", "calibration")

Times = tuple[float, float, float]
"""Milliseconds of one microbatch: forward, gradient of the input, gradient of the weights."""


class LayerTime(Knobs):
    """Times of one microbatch in one layer, or in each of several equal ones, on one device."""

    part: Literal["embedding", "layer", "output"] = Field(default="layer", description="part of the model")
    layer: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = Field(default=0, description="the first such layer, from 0 on")
    count: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = Field(default=1, description="equal layers from there on")
    device: Annotated[str, Field(max_length=200)] = Field(
        default="", description="kind of device, as [[sites]] name it; empty: every kind"
    )
    microbatch_sequences: Maybe = Field(default=0, description="sequences of the microbatch; 0: any number")
    forward_ms: DurationOrNone = Field(description="forward pass")
    input_gradient_ms: DurationOrNone = Field(description="gradient of the input")
    weight_gradient_ms: DurationOrNone = Field(description="gradient of the weights")
    spread: Fraction = Field(default=0.0, description="of the measurements: middle half / median of the whole time")
    at: Instant | None = Field(default=None, description="when it was measured; else as [measured] says")

    @property
    def times_ms(self) -> Times:
        return self.forward_ms, self.input_gradient_ms, self.weight_gradient_ms


class LinkRate(Knobs):
    """One direction of a link, as measured: time(bytes) = latency + bytes / bandwidth."""

    sender: Name = Field(description="site that sends")
    receiver: Name = Field(description="site that receives")
    bandwidth_gbps: Amount = Field(description="10^9 bit a second")
    latency_ms: DurationOrNone = Field(description="half of a small message's round trip")
    spread: Fraction = Field(default=0.0, description="of the rounds: middle half / median of the large message's time")
    rounds: PositiveCount = Field(default=1, description="rounds after the warm-up")
    at: Instant | None = Field(default=None, description="when it was measured; else as [measured] says")


class Calibration(Knobs):
    """What iterations take beyond the times of layers and links, fitted from one measured run."""

    source: str = Field(min_length=1, description="the run")
    operation_us: DurationOrNone = Field(description="of each operation")
    send_us: DurationOrNone = Field(description="of each message")
    error: Fraction = Field(description="of the fitted prediction: nine of ten iterations are as near, as a fraction")
    at: Instant | None = Field(default=None, description="when it was fitted; else as [measured] says")


class ProfileHead(Knobs):
    """The table [measured]: of what, by whom and when."""

    source: str = Field(min_length=1, description="device, programs and method")
    at: Instant = Field(description="when the first of its numbers was measured")
    model: Name = Field(description="name of the model")
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = Field(description="its layers")
    sequence_tokens: PositiveCount = Field(description="tokens of a sequence")


@dataclass(frozen=True)
class ProfileFile:
    """The content of a whole file."""

    file: str
    head: ProfileHead
    layers: tuple[LayerTime, ...] = ()
    links: tuple[LinkRate, ...] = ()
    calibration: Calibration | None = None


def aware(at: datetime) -> datetime:
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


# ---- file ------------------------------------------------------------------------------------------------------------


def read_profile(file: Path) -> ProfileFile:
    """Read the file. Raises ConfigError, which name file and key."""
    if not file.is_file():
        raise ConfigError(f"{file} is not a file: make it with dips profile device FILE --out {file}")
    tables = SettingsFile.read(file, TABLES)
    if "measured" not in tables.tables:
        raise ConfigError(f"{file}: the table [measured] is missing: make the file again with dips profile")
    found = ProfileFile(
        str(file),
        tables.settings(ProfileHead, "measured"),
        tables.settings_of_rows(LayerTime, "layers"),
        tables.settings_of_rows(LinkRate, "links"),
        tables.settings(Calibration, "calibration") if "calibration" in tables.tables else None,
    )
    if not found.layers and not found.links and found.calibration is None:
        raise ConfigError(f"{file} has no [[layers]], [[links]] or [calibration]: measure them with dips profile")
    ends = [(link.sender, link.receiver) for link in found.links]
    for number, pair in enumerate(ends, 1):
        if pair[0] == pair[1] or pair in ends[: number - 1]:
            why = "goes to itself" if pair[0] == pair[1] else "was given before"
            raise ConfigError(f"{found.file} [[links]] {number}: from {pair[0]} to {pair[1]} {why}: remove it")
    return found


def write_profile(found: ProfileFile, file: Path) -> None:
    """Write the file whole or not at all. Raises ConfigError when it cannot be written."""
    lines = ["# Written by dips profile; times are of one microbatch on one device.", *_table("[measured]", found.head)]
    for layer in found.layers:
        lines += _table("[[layers]]", layer)
    for link in found.links:
        lines += _table("[[links]]", link)
    if found.calibration is not None:
        lines += _table("[calibration]", found.calibration)
    written = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text("\n".join(lines) + "\n")
        written.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}: choose another --out") from error


def _table(name: str, row: Knobs) -> list[str]:
    given = row.model_dump(exclude_defaults=True, exclude_none=True)
    return ["", name, *(f"{key} = {_toml(value)}" for key, value in given.items())]


def _toml(value: Any) -> str:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    return json.dumps(value, ensure_ascii=False)


def merged(files: Sequence[ProfileFile], name: str) -> ProfileFile:
    """One profile of all devices and links of several files of one model, each with its own date.

    A later file's times of a device, its rates of a link, and its calibration replace those of earlier ones. Raises
    ConfigError for files of different models.
    """
    first = files[0]
    for other in files[1:]:
        for key in ("model", "layers", "sequence_tokens"):
            was, wanted = getattr(other.head, key), getattr(first.head, key)
            if was != wanted:
                raise ConfigError(
                    f"{other.file} [measured]: {key} = {was!r}, {first.file} has {wanted!r}: merge files of one model"
                )
    layers: dict[str, tuple[LayerTime, ...]] = {}
    links: dict[tuple[str, str], LinkRate] = {}
    for one in files:
        dated = [row.model_copy(update={"at": row.at or one.head.at}) for row in one.layers]
        for device in dict.fromkeys(row.device for row in dated):
            layers[device] = tuple(row for row in dated if row.device == device)
        links |= {(x.sender, x.receiver): x.model_copy(update={"at": x.at or one.head.at}) for x in one.links}
    sources = list(dict.fromkeys(one.head.source for one in files))
    oldest = min((one.head.at for one in files), key=aware)
    head = first.head.model_copy(update={"source": "; ".join(sources), "at": oldest})
    calibrations = [
        one.calibration.model_copy(update={"at": one.calibration.at or one.head.at})
        for one in files
        if one.calibration is not None
    ]
    return replace(
        first, file=name, head=head, layers=tuple(row for rows in layers.values() for row in rows),
        links=tuple(links.values()), calibration=calibrations[-1] if calibrations else None,
    )  # fmt: skip


# ---- times of each layer ---------------------------------------------------------------------------------------------


def times_of_layers(rows: Iterable[LayerTime], n_layers: int, sequences: int, where: str) -> list[Times]:
    """Embedding, each layer, output layer: the times of a microbatch of so many sequences, which are interpolated
    between two sizes that were measured. where: the table, for errors.

    Raises ConfigError for a layer that has no time or that the model does not have, and for a size outside of those
    that were measured.
    """
    parts: dict[tuple[str, int], dict[int, Times]] = {}
    for row in rows:
        if row.part == "layer" and row.layer + row.count > n_layers:
            raise ConfigError(
                f"{where}: layers has times of layer {row.layer + row.count - 1}, the model has {n_layers} layers, "
                "from 0 on: remove them, or name another model"
            )
        for number in range(row.layer, row.layer + row.count) if row.part == "layer" else (0,):
            sizes = parts.setdefault((row.part, number), {})
            if row.microbatch_sequences in sizes:
                raise ConfigError(
                    f"{where}: layers has the times of {row.part} {number} with microbatch_sequences = "
                    f"{row.microbatch_sequences} twice: remove one, or give each a device"
                )
            sizes[row.microbatch_sequences] = row.times_ms
    missing = [number for number in range(n_layers) if ("layer", number) not in parts]
    if missing:
        raise ConfigError(
            f"{where}: layers has no times of layer {missing[0]} of {n_layers}: give those of every layer"
        )
    none = {0: (0.0, 0.0, 0.0)}
    keys = (("embedding", 0), *(("layer", number) for number in range(n_layers)), ("output", 0))
    found = [_at_size(parts.get(key, none), sequences, f"{where}: layers: {key[0]} {key[1]}") for key in keys]
    for number, (forward, input_gradient, _) in enumerate(found[1:-1]):
        if not forward or not input_gradient:
            raise ConfigError(f"{where}: layers: layer {number} takes no time: give forward_ms and input_gradient_ms")
    return found


def _at_size(sizes: dict[int, Times], sequences: int, where: str) -> Times:
    if 0 in sizes or sequences in sizes:
        return sizes.get(sequences, sizes.get(0, (0.0, 0.0, 0.0)))
    below = max((size for size in sizes if size < sequences), default=None)
    above = min((size for size in sizes if size > sequences), default=None)
    if below is None or above is None:
        known = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"{where} was measured with {known} sequences in a microbatch, [training] has microbatch_sequences = "
            f"{sequences}: measure it too with dips profile device --microbatch {sequences}"
        )
    share = (sequences - below) / (above - below)
    f, d, w = (low + share * (high - low) for low, high in zip(sizes[below], sizes[above], strict=True))
    return f, d, w
