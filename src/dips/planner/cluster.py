"""Reads a planner's TOML file: sites with their devices, directed links between them, how the work is split, and, if
they were measured, the times of a stage or of each layer.

The names of the keys contain the units, and every table of measured numbers names its source. Nothing is guessed: a
number that a plan needs and the file does not give is asked for by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dips.core.config import Knobs, SettingsFile
from dips.core.errors import ConfigError
from dips.planner.model import (
    Amount,
    Duration,
    DurationOrNone,
    Maybe,
    Model,
    Name,
    PositiveCount,
    Sourced,
    model_of,
    read_own_or_shipped,
)
from dips.planner.profile import Instant, LayerTime, ProfileFile, aware, read_profile, times_of_layers

MOST_BLOCKS = 1 << 16
"""The largest stages x microbatches of a pipeline: 64 x 1024 take a few minutes."""

MOST_MESSAGES = 1 << 18
"""The largest stages x microbatches x replicas: their messages take turns on a link."""

TABLES = ("model", "sites", "links", "training", "profile", "options", "asynchronous")


class Site(Sourced):
    """Equal devices in one place. A message between stages inside of a site costs nothing unless its network is
    given."""

    name: Name = Field(description="name of the site")
    devices: PositiveCount = Field(description="number of accelerators")
    memory_gib: Amount | None = Field(default=None, description="memory of one device")
    sustained_tflops: Amount | None = Field(
        default=None, description="10^12 operations a second that one device reaches in practice"
    )
    stages: Maybe = Field(default=0, description="pipeline stages at this site; 0: in proportion to the devices")
    network_gbps: Amount | None = Field(
        default=None, description="bandwidth of one device to others at this site, 10^9 bit/s"
    )
    network_latency_us: DurationOrNone = Field(default=0.0, description="latency between two devices at this site")
    device: Name | None = Field(default=None, description="kind of its devices, as a profile names it")
    since: Instant | None = Field(
        default=None, description="when it was last changed: a profile that was measured before is refused"
    )


class Link(Sourced):
    """A link from one site to another. All replicas share its bandwidth."""

    sender: str = Field(description="site that sends")
    receiver: str = Field(description="site that receives")
    both_ways: bool = Field(default=True, description="whether an equal link goes back")
    bandwidth_gbps: Amount = Field(description="10^9 bit a second, of the link as a whole")
    latency_ms: DurationOrNone = Field(description="time of one bit on its way")
    oversubscription: Annotated[float, Field(ge=1, le=1e4)] = Field(
        default=1.0,
        description="factor by which others share the link: bandwidth / oversubscription is left for this training",
    )
    since: Instant | None = Field(
        default=None, description="when it was last changed: a profile that was measured before is refused"
    )

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gbps * 1e9 / 8 / self.oversubscription


class Training(Sourced):
    """How one iteration is split."""

    pipeline: PositiveCount = Field(description="stages of the pipeline: groups of devices, one after another")
    data: PositiveCount = Field(default=1, description="replicas of the pipeline (data parallel)")
    tensor: PositiveCount = Field(
        default=1, description="devices that share each layer (tensor parallel, with sequences)"
    )
    context: PositiveCount = Field(default=1, description="devices that share each sequence (context parallel)")
    expert: PositiveCount = Field(default=1, description="devices that share the experts of a layer (expert parallel)")
    microbatches: PositiveCount = Field(description="microbatches of an iteration, for each replica")
    microbatch_sequences: PositiveCount = Field(default=1, description="sequences of a microbatch")
    sequence_tokens: PositiveCount = Field(description="tokens of a sequence")
    activation_bytes: Annotated[float, Field(ge=0.5, le=8)] = Field(default=2.0, description="bytes of a number sent")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="what replicas shard: 1 optimizer, 2 gradients, 3 all"
    )
    bucket_mb: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=25.0,
        description="10^6 bytes of weights or gradients that a device exchanges at a time while it computes (DDP: 25); "
        "0: all of its stage at once",
    )
    recompute: Literal["none", "full"] = Field(
        default="none", description="whether backward passes compute layers again"
    )
    flash_attention: bool = Field(default=True, description="whether attention scores are never stored")
    extra_layers: Maybe = Field(
        default=0,
        description="1 or 2: the embedding and the output layer each count as a layer when stages are divided",
    )

    @property
    def devices_of_stage(self) -> int:
        """Devices that share the layers and sequences of one stage: each has a network of its own."""
        return self.tensor * self.context


StageTimes = tuple[float, float, float]
"""Milliseconds of one microbatch: T_F, T_D, T_W."""


class Profile(Sourced):
    """Measured times of one microbatch, in place of those of the cost model: of one stage of a uniform division, or of
    each layer ([[profile.layers]], or a file of `dips profile`); and overheads to add to any of them."""

    forward_ms: Duration | None = Field(default=None, description="T_F of a stage")
    input_gradient_ms: Duration | None = Field(default=None, description="T_D of a stage: the gradient of the input")
    weight_gradient_ms: DurationOrNone | None = Field(
        default=None, description="T_W of a stage: the gradient of the weights"
    )
    layers: tuple[LayerTime, ...] = Field(default=(), description="times of each layer, in place of those of a stage")
    file: str | None = Field(
        default=None, description="what dips profile wrote, from the folder of this file on: layers, links, overheads"
    )
    operation_us: DurationOrNone = Field(default=0.0, description="overhead of each operation, as calibrated")
    send_us: DurationOrNone = Field(default=0.0, description="overhead of each message, as calibrated")
    error: Annotated[float, Field(ge=0, le=10)] | None = Field(
        default=None, description="error of the calibrated prediction, as a fraction: plans say an interval"
    )
    message_mb: Amount | None = Field(default=None, description="10^6 bytes of one message of one replica")
    memory_microbatches: Amount | None = Field(
        default=None, description="microbatches whose activations a stage of a uniform division can hold"
    )

    @model_validator(mode="after")
    def _times_are_given_once(self) -> Self:
        of_stage = (self.forward_ms, self.input_gradient_ms, self.weight_gradient_ms)
        given = (any(time is not None for time in of_stage), bool(self.layers))
        overheads = self.file is not None or self.error is not None  # to add to the times that the cost model has
        if all(given) or not (any(given) or overheads) or (given[0] and None in of_stage):
            raise ValueError(
                "times are given by forward_ms, input_gradient_ms and weight_gradient_ms of a stage, by layers "
                "([[profile.layers]]), or by the file of dips profile: give exactly one of the three"
            )
        return self

    @property
    def times_of_stage_ms(self) -> StageTimes | None:
        """T_F, T_D and T_W of a stage; None where layers have theirs, or the cost model says them."""
        f, d, w = self.forward_ms, self.input_gradient_ms, self.weight_gradient_ms
        return None if f is None or d is None or w is None else (f, d, w)


class PlanOptions(Knobs):
    """What the plan is made for: schedules, solver, stage division."""

    schedules: list[str] = Field(default=[], description="schedules to compare; empty: all")
    replicas: Literal["fair", "coordinated", "best"] = Field(
        default="best", description="how replicas share a link: bandwidth evenly, or one message at a time"
    )
    solver_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=0.0, description="seconds in which a solver looks for the best order; 0: none"
    )
    division: Literal["uniform", "memory-aware", "best"] = Field(default="best", description="how layers become stages")
    overlap: bool = Field(
        default=True, description="whether replicas exchange weights and gradients while the pipeline computes"
    )
    blocking: bool = Field(default=False, description="whether a sender waits for the last message's acknowledgement")


class Asynchronous(Knobs):
    """What is assumed where each site is a cluster of its own under Di-PS, which pushes what it has learned."""

    sync_every: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=64, description="inner steps between two pushes"
    )
    overlap: Literal["none", "push", "full"] = Field(
        default="full", description="what clusters train through, as the master's"
    )
    wire: Literal["float32", "bfloat16", "int8", "int4"] = Field(
        default="float32", description="how pushes are written"
    )
    slaves: Annotated[int, Field(ge=1, le=1024)] = Field(default=8, description="slaves that share the model")
    more_tokens: Annotated[float, Field(ge=1, le=100)] | None = Field(
        default=None,
        description="times as many tokens as synchronous training until the same loss, as measured with your model; "
        "without it: that of a small model",
    )


@dataclass(frozen=True)
class ClusterFile:
    """The content of a whole file."""

    file: str
    model: Model
    sites: tuple[Site, ...]  # in the order of the pipeline
    links: tuple[Link, ...]
    training: Training
    profile: Profile | None
    options: PlanOptions
    asynchronous: Asynchronous

    def link(self, sender: str, receiver: str, needed: str = "which neighbouring stages need") -> Link:
        """The link between two sites. Raises ConfigError when there is none; needed: for what, in its sentence."""
        for link in self.links:
            if (link.sender, link.receiver) == (sender, receiver):
                return link
            if link.both_ways and (link.receiver, link.sender) == (sender, receiver):
                return link
        raise ConfigError(
            f"{self.file}: no link from {sender} to {receiver}, {needed}: add a table "
            "[[links]] with "
            f'sender = "{sender}" and receiver = "{receiver}"'
        )

    @property
    def devices_of_a_stage(self) -> int:
        """Devices of one stage, of all replicas together."""
        training = self.training
        return training.tensor * training.context * training.data


def read_setup(name: str | Path, profiled: bool = True) -> ClusterFile:
    """Read a file, or a shipped one by its name. profiled: with its [profile]; else without, to measure it.

    Raises ConfigError, which names file and key.
    """
    file = read_own_or_shipped(name, "setups", "settings", TABLES)
    tables = {name: table for name, table in file.tables.items() if profiled or name != "profile"}
    return setup_of(replace(file, tables=tables))


def setup_of(file: SettingsFile) -> ClusterFile:
    """Check the tables of a file."""
    for name in ("model", "sites", "training"):
        if name not in file.tables:
            brackets = f"[[{name}]]" if name == "sites" else f"[{name}]"
            raise ConfigError(f"{file}: the table {brackets} is missing: add it (docs/planner.md says what it holds)")
    profile = None
    if "profile" in file.tables:
        rows = SettingsFile(file.where("profile"), file.table("profile")).settings_of_rows(LayerTime, "layers")
        profile = file.settings(Profile, "profile", {"layers": rows} if rows else None)
    setup = ClusterFile(
        file=file.name,
        model=model_of(file),
        sites=file.settings_of_rows(Site, "sites"),
        links=file.settings_of_rows(Link, "links"),
        training=file.settings(Training, "training"),
        profile=profile,
        options=file.settings(PlanOptions, "options"),
        asynchronous=file.settings(Asynchronous, "asynchronous"),
    )
    _check(setup)
    if setup.profile is not None and setup.profile.file is not None:
        setup = with_profile(setup, read_profile(Path(file.name).parent / setup.profile.file))
    if setup.profile is not None and setup.profile.layers:
        for number in range(len(setup.sites)):
            layer_times_ms(setup, number)
    return setup


# ---- what was measured -----------------------------------------------------------------------------------------------


def with_profile(setup: ClusterFile, measured: ProfileFile) -> ClusterFile:
    """The same problem with the times, links and overheads of a file of `dips profile`, as if it gave them itself.

    Raises ConfigError for a file of another model, one that is older than a site or a link, or has not measured a link
    that the problem has, where it measured others.
    """
    assert setup.profile is not None
    _check_profile(setup, measured)
    calibration = measured.calibration
    said = setup.profile.source
    said = said if isinstance(said, str) else "; ".join(f"{key}: {text}" for key, text in said.items())
    source = f"{said}; {measured.file}: {measured.head.source}"
    changes: dict[str, object] = {"file": None, "source": source}
    if measured.layers:
        changes["layers"] = measured.layers
    if calibration is not None:
        changes |= {
            "operation_us": calibration.operation_us, "send_us": calibration.send_us, "error": calibration.error,
        }  # fmt: skip
    profile = setup.profile.model_copy(update=changes)
    return replace(setup, profile=profile, links=_measured_links(setup, measured))


def _check_profile(setup: ClusterFile, measured: ProfileFile) -> None:
    head, training = measured.head, setup.training
    pairs = (
        ("model", head.model, setup.model.name),
        ("layers", head.layers, setup.model.layers),
        ("sequence_tokens", head.sequence_tokens, training.sequence_tokens),
    )
    for key, was, wanted in pairs:
        if was != wanted:
            raise ConfigError(
                f"{measured.file} [measured]: {key} = {was!r}, but {setup.file} has {wanted!r}: it was measured for "
                f"another problem: measure again with dips profile {setup.file}"
            )
    assert setup.profile is not None
    has_times = bool(setup.profile.layers) or setup.profile.times_of_stage_ms is not None
    if not measured.layers and not has_times and measured.calibration is None:
        raise ConfigError(
            f"{measured.file} has no [[layers]], which [profile] of {setup.file} needs: measure a device with dips "
            f"profile device {setup.file}"
        )
    if measured.layers and has_times:
        raise ConfigError(
            f"{measured.file} has [[layers]], and [profile] of {setup.file} has times of its own: remove one of them"
        )
    if measured.layers and training.tensor * training.context > 1:
        raise ConfigError(
            f"{measured.file} has times of whole layers on one device, and {setup.file} [training] has tensor x "
            f"context = {training.tensor * training.context}: give both as 1, or times of a stage in [profile]"
        )
    for number, site in enumerate(setup.sites, 1):
        times = [row.at or head.at for row in measured.layers if row.device in (site.device or row.device, "")]
        if measured.calibration is not None:
            times.append(measured.calibration.at or head.at)
        _check_newer(measured, min(times, key=aware, default=head.at), f"{setup.file} [[sites]] {number}", site.since)
    for number, link in enumerate(setup.links, 1):
        ends = {link.sender, link.receiver}
        times = [rate.at or head.at for rate in measured.links if {rate.sender, rate.receiver} == ends]
        _check_newer(measured, min(times, key=aware, default=head.at), f"{setup.file} [[links]] {number}", link.since)


def _check_newer(measured: ProfileFile, at: datetime, where: str, since: datetime | None) -> None:
    if since is not None and aware(at) < aware(since):
        raise ConfigError(
            f"{measured.file} was measured at {aware(at):%Y-%m-%d %H:%M}, before {where} changed (since = "
            f"{aware(since):%Y-%m-%d %H:%M}): measure it again with dips profile"
        )


def _measured_links(setup: ClusterFile, measured: ProfileFile) -> tuple[Link, ...]:
    """The links with their measured numbers, one for each direction; unchanged where the file has no links."""
    if not measured.links:
        return setup.links
    rates = {(link.sender, link.receiver): link for link in measured.links}
    found = []
    for number, link in enumerate(setup.links, 1):
        for sender, receiver in [(link.sender, link.receiver), (link.receiver, link.sender)][: 1 + link.both_ways]:
            rate = rates.get((sender, receiver))
            if rate is None:
                raise ConfigError(
                    f"{measured.file} has not measured the link from {sender} to {receiver} ({setup.file} [[links]] "
                    f"{number}): measure it with dips profile links, or remove [[links]] from the profile"
                )
            found.append(
                link.model_copy(
                    update={
                        "sender": sender, "receiver": receiver, "both_ways": False, "oversubscription": 1.0,
                        "bandwidth_gbps": rate.bandwidth_gbps, "latency_ms": rate.latency_ms,
                        "source": f"{measured.file}: {measured.head.source}",
                    }
                )
            )  # fmt: skip
    return tuple(found)


def layer_times_ms(setup: ClusterFile, site: int) -> list[StageTimes]:
    """Measured times of one microbatch for each layer at a site, with those of the embedding (extra_layers: as a row of
    its own, else in the first layer) and of the output layer. Raises ConfigError where they were not measured."""
    profile = setup.profile
    assert profile is not None
    where = f"{setup.file} [profile]"
    kind = _kind_at(setup, profile, site)
    rows = [row for row in profile.layers if row.device in (kind, "")]
    found = times_of_layers(rows, setup.model.layers, setup.training.microbatch_sequences, where)
    first, *layers, last = found
    extra = setup.training.extra_layers
    if extra < 1:
        layers[0] = _sum_of(first, layers[0])
    if extra < 2:
        layers[-1] = _sum_of(layers[-1], last)
    return [*[first] * (extra >= 1), *layers, *[last] * (extra >= 2)]


def _sum_of(a: StageTimes, b: StageTimes) -> StageTimes:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _kind_at(setup: ClusterFile, profile: Profile, site: int) -> str:
    """The kind of device whose times hold at a site; empty: those of rows without a kind."""
    known = sorted({row.device for row in profile.layers if row.device})
    kind = setup.sites[site].device
    if kind is None:
        if len(known) > 1:
            raise ConfigError(
                f"{setup.file} [[sites]] {site + 1}: device is not given, and the profile has times of "
                f"{', '.join(known)}: give one of them"
            )
        return known[0] if known else ""
    if kind not in known and (known or not profile.layers) and not any(not row.device for row in profile.layers):
        raise ConfigError(
            f"{setup.file} [[sites]] {site + 1}: device = {kind!r} was not measured, only {', '.join(known)}: run dips "
            f"profile device --device {kind} there, or correct the name"
        )
    return kind


def _check(setup: ClusterFile) -> None:
    names = [site.name for site in setup.sites]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{setup.file}: [[sites]] are {names}: give at least one, each with a name of its own")
    for number, link in enumerate(setup.links, 1):
        for end in (link.sender, link.receiver):
            if end not in names:
                raise ConfigError(
                    f"{setup.file} [[links]] {number}: {end!r} is not a site: choose one of {', '.join(names)}"
                )
        if link.sender == link.receiver:
            raise ConfigError(f"{setup.file} [[links]] {number}: goes from {link.sender} to itself: name two sites")
    _check_links_differ(setup)
    check_parallelism(setup)


def _check_links_differ(setup: ClusterFile) -> None:
    """Refuse two links with the same ends: one of them would be ignored."""
    given: dict[tuple[str, str], int] = {}
    for number, link in enumerate(setup.links, 1):
        ways = [(link.sender, link.receiver), (link.receiver, link.sender)]
        for way in ways if link.both_ways else ways[:1]:
            if way in given:
                raise ConfigError(
                    f"{setup.file} [[links]] {number}: from {way[0]} to {way[1]} goes [[links]] {given[way]} already: "
                    "remove one, or give both both_ways = false if they go in different directions"
                )
            given[way] = number


def check_parallelism(setup: ClusterFile) -> None:
    """Check that model, devices and the way of splitting fit together. Raises ConfigError."""
    training, where = setup.training, f"{setup.file} [training]"
    units = setup.model.layers + training.extra_layers
    if training.extra_layers > 2:
        raise ConfigError(f"{where}: extra_layers = {training.extra_layers}: give 0, 1 or 2")
    if training.pipeline > units:
        raise ConfigError(
            f"{where}: pipeline = {training.pipeline} is more stages than layers ({units}): give at most {units}"
        )
    blocks = training.pipeline * training.microbatches
    if blocks > MOST_BLOCKS:
        raise ConfigError(
            f"{where}: pipeline = {training.pipeline} x microbatches = {training.microbatches} are {blocks}, at most "
            f"{MOST_BLOCKS} can be planned: give fewer microbatches, an iteration grows by the same for each more"
        )
    if blocks * training.data > MOST_MESSAGES:
        raise ConfigError(
            f"{where}: pipeline x microbatches x data = {blocks * training.data}, at most {MOST_MESSAGES} can be "
            "planned: give fewer microbatches or replicas"
        )
    for name, parts in (("tensor", training.tensor), ("context", training.context)):
        whole = setup.model.heads if name == "tensor" else training.sequence_tokens
        if whole % parts:
            what = "attention heads" if name == "tensor" else "tokens of a sequence"
            raise ConfigError(f"{where}: {name} = {parts} does not divide the {whole} {what}: choose a divisor")
    if training.expert > 1 and not setup.model.experts:
        raise ConfigError(f"{where}: expert = {training.expert}, but {setup.model.name} has no experts: remove it")
    if training.expert > 1 and setup.model.experts % training.expert:
        raise ConfigError(
            f"{where}: expert = {training.expert} does not divide {setup.model.experts} experts: choose a divisor"
        )
    if training.expert > 1 and (training.data * training.context) % training.expert:
        raise ConfigError(
            f"{where}: expert = {training.expert} does not divide data x context = "
            f"{training.data * training.context}, whose devices share the experts: choose a divisor"
        )
    stages_of_sites(setup)


def stages_of_sites(setup: ClusterFile) -> list[int]:
    """The number of stages at each site. Raises ConfigError when they do not fit."""
    sites, n = setup.sites, setup.training.pipeline
    given = [site.stages for site in sites]
    if any(given):
        if 0 in given or sum(given) != n:
            raise ConfigError(
                f"{setup.file}: [[sites]] have {given} stages, [training] has pipeline = {n}: give stages for "
                "every site, "
                f"together {n}, or for none"
            )
        found = given
    else:
        found = in_proportion([site.devices for site in sites], n)
    for number, (site, stages) in enumerate(zip(sites, found, strict=True), 1):
        needed = stages * setup.devices_of_a_stage
        if needed > site.devices:
            raise ConfigError(
                f"{setup.file} [[sites]] {number}: {site.name} has devices = {site.devices}, its {stages} stages "
                f"need {needed} "
                f"(tensor x context x data = {setup.devices_of_a_stage} each): give more devices, or split less"
            )
    return found


def divisors(n: int) -> list[int]:
    """Those of n, 1 and n included, in their order."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def in_proportion(weights: Sequence[int], total: int) -> list[int]:
    """Whole numbers that sum to total, as near as possible to the weights' shares (largest remainders)."""
    whole = sum(weights)
    found = [total * weight // whole for weight in weights]
    remainders = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in remainders[: total - sum(found)]:
        found[index] += 1
    return found
