"""Reads a planner's TOML file: sites with their devices, directed links between them, how the work is split, and, if
they were measured, the times of a stage.

The names of the keys contain the units, and every table of numbers names its source. Nothing is guessed: a number that
a plan needs and the file does not give is asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dips.core.config import Knobs, SettingsFile
from dips.planner.errors import PlanError
from dips.planner.model import Maybe, Model, Name, PositiveCount, Sourced, model_of, shipped

Amount = Annotated[float, Field(ge=1e-6, le=1e9)]
"""A rate or a size, in the unit of its key: a value outside of these limits is a mistake in the number or the unit."""

Duration = Annotated[float, Field(gt=0, le=1e8)]
DurationOrNone = Annotated[float, Field(ge=0, le=1e8)]
"""A time in milliseconds, up to a day; nanoseconds of all operations together stay whole numbers that a solver can
hold."""

MOST_BLOCKS = 1 << 16
"""The largest stages x microbatches of a pipeline: 64 x 1024 take a few minutes."""

MOST_MESSAGES = 1 << 18
"""The largest stages x microbatches x replicas: their messages take turns on a link."""

TABLES = ("model", "sites", "links", "training", "profile", "options")


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
        default=None, description="bandwidth between two stages at this site, 10^9 bit/s"
    )
    network_latency_us: DurationOrNone = Field(default=0.0, description="latency between two stages at this site")


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
    recompute: Literal["none", "full"] = Field(
        default="none", description="whether backward passes compute layers again"
    )
    flash_attention: bool = Field(default=True, description="whether attention scores are never stored")
    extra_layers: Maybe = Field(
        default=0,
        description="1 or 2: the embedding and the output layer each count as a layer when stages are divided",
    )


class Profile(Sourced):
    """Measured times of one microbatch on one stage of a uniform division. They replace those of the cost model."""

    forward_ms: Duration = Field(description="T_F")
    input_gradient_ms: Duration = Field(description="T_D: the gradient of the input")
    weight_gradient_ms: DurationOrNone = Field(description="T_W: the gradient of the weights")
    message_mb: Amount | None = Field(default=None, description="10^6 bytes of one message of one replica")
    memory_microbatches: Amount | None = Field(
        default=None, description="microbatches whose activations a stage of a uniform division can hold"
    )


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

    def link(self, sender: str, receiver: str) -> Link:
        """The link between two sites. Raises PlanError when there is none."""
        for link in self.links:
            if (link.sender, link.receiver) == (sender, receiver):
                return link
            if link.both_ways and (link.receiver, link.sender) == (sender, receiver):
                return link
        raise PlanError(
            f"{self.file}: no link from {sender} to {receiver}, which neighbouring stages need: add a table "
            "[[links]] with "
            f'sender = "{sender}" and receiver = "{receiver}"'
        )

    @property
    def devices_of_a_stage(self) -> int:
        """Devices of one stage, of all replicas together."""
        training = self.training
        return training.tensor * training.context * training.data


def shipped_setups() -> list[str]:
    """Names of the published settings that come with the planner."""
    return shipped("setups")


def read_setup(name: str | Path) -> ClusterFile:
    """Read a file, or a shipped one by its name. Raises PlanError or ConfigError, which name file and key."""
    if isinstance(name, str) and name in shipped_setups():
        with resources.as_file(resources.files("dips.planner") / "setups" / f"{name}.toml") as file:
            return setup_of(SettingsFile.read(file, TABLES))
    file = Path(name)
    if not file.is_file():
        known = ", ".join(shipped_setups())
        raise PlanError(
            f"{name} is not a file that can be read, and none of the shipped settings ({known}): give one of these"
        )
    return setup_of(SettingsFile.read(file, TABLES))


def setup_of(file: SettingsFile) -> ClusterFile:
    """Check the tables of a file."""
    for name in ("model", "sites", "training"):
        if name not in file.tables:
            brackets = f"[[{name}]]" if name == "sites" else f"[{name}]"
            raise PlanError(f"{file}: the table {brackets} is missing: add it (docs/planner.md says what it holds)")
    setup = ClusterFile(
        file=file.name,
        model=model_of(file),
        sites=file.settings_of_rows(Site, "sites"),
        links=file.settings_of_rows(Link, "links"),
        training=file.settings(Training, "training"),
        profile=file.settings(Profile, "profile") if "profile" in file.tables else None,
        options=file.settings(PlanOptions, "options"),
    )
    _check(setup)
    return setup


def _check(setup: ClusterFile) -> None:
    names = [site.name for site in setup.sites]
    if not names or len(set(names)) < len(names):
        raise PlanError(f"{setup.file}: [[sites]] are {names}: give at least one, each with a name of its own")
    for number, link in enumerate(setup.links, 1):
        for end in (link.sender, link.receiver):
            if end not in names:
                raise PlanError(
                    f"{setup.file} [[links]] {number}: {end!r} is not a site: choose one of {', '.join(names)}"
                )
        if link.sender == link.receiver:
            raise PlanError(f"{setup.file} [[links]] {number}: goes from {link.sender} to itself: name two sites")
    _check_links_differ(setup)
    check_parallelism(setup)


def _check_links_differ(setup: ClusterFile) -> None:
    """Refuse two links with the same ends: one of them would be ignored."""
    given: dict[tuple[str, str], int] = {}
    for number, link in enumerate(setup.links, 1):
        ways = [(link.sender, link.receiver), (link.receiver, link.sender)]
        for way in ways if link.both_ways else ways[:1]:
            if way in given:
                raise PlanError(
                    f"{setup.file} [[links]] {number}: from {way[0]} to {way[1]} goes [[links]] {given[way]} already: "
                    "remove one, or give both both_ways = false if they go in different directions"
                )
            given[way] = number


def check_parallelism(setup: ClusterFile) -> None:
    """Check that model, devices and the way of splitting fit together. Raises PlanError."""
    training, where = setup.training, f"{setup.file} [training]"
    units = setup.model.layers + training.extra_layers
    if training.extra_layers > 2:
        raise PlanError(f"{where}: extra_layers = {training.extra_layers}: give 0, 1 or 2")
    if training.pipeline > units:
        raise PlanError(
            f"{where}: pipeline = {training.pipeline} is more stages than layers ({units}): give at most {units}"
        )
    blocks = training.pipeline * training.microbatches
    if blocks > MOST_BLOCKS:
        raise PlanError(
            f"{where}: pipeline = {training.pipeline} x microbatches = {training.microbatches} are {blocks}, at most "
            f"{MOST_BLOCKS} can be planned: give fewer microbatches, an iteration grows by the same for each more"
        )
    if blocks * training.data > MOST_MESSAGES:
        raise PlanError(
            f"{where}: pipeline x microbatches x data = {blocks * training.data}, at most {MOST_MESSAGES} can be "
            "planned: give fewer microbatches or replicas"
        )
    for name, parts in (("tensor", training.tensor), ("context", training.context)):
        whole = setup.model.heads if name == "tensor" else training.sequence_tokens
        if whole % parts:
            what = "attention heads" if name == "tensor" else "tokens of a sequence"
            raise PlanError(f"{where}: {name} = {parts} does not divide the {whole} {what}: choose a divisor")
    if training.expert > 1 and not setup.model.experts:
        raise PlanError(f"{where}: expert = {training.expert}, but {setup.model.name} has no experts: remove it")
    if training.expert > 1 and setup.model.experts % training.expert:
        raise PlanError(
            f"{where}: expert = {training.expert} does not divide {setup.model.experts} experts: choose a divisor"
        )
    if training.expert > 1 and (training.data * training.context) % training.expert:
        raise PlanError(
            f"{where}: expert = {training.expert} does not divide data x context = "
            f"{training.data * training.context}, whose devices share the experts: choose a divisor"
        )
    stages_of_sites(setup)


def stages_of_sites(setup: ClusterFile) -> list[int]:
    """The number of stages at each site. Raises PlanError when they do not fit."""
    sites, n = setup.sites, setup.training.pipeline
    given = [site.stages for site in sites]
    if any(given):
        if 0 in given or sum(given) != n:
            raise PlanError(
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
            raise PlanError(
                f"{setup.file} [[sites]] {number}: {site.name} has devices = {site.devices}, its {stages} stages "
                f"need {needed} "
                f"(tensor x context x data = {setup.devices_of_a_stage} each): give more devices, or split less"
            )
    return found


def in_proportion(weights: Sequence[int], total: int) -> list[int]:
    """Whole numbers that sum to total, as near as possible to the weights' shares (largest remainders)."""
    whole = sum(weights)
    found = [total * weight // whole for weight in weights]
    remainders = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in remainders[: total - sum(found)]:
        found[index] += 1
    return found
