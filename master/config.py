"""The master's knobs: what an operator may set, and which settings contradict each other.

Group-wide settings stand here and nowhere else: the master advertises them, so that no cluster can diverge by
its own. Only heartbeat and grace need thought; the other times have defaults that fit them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dips.core.config import Knobs
from dips.core.errors import ConfigError
from dips.core.ids import check_name
from dips.core.messages import Settings
from dips.core.net import parse_address, require_loopback
from dips.core.units import Bytes, Count, Seconds, format_bytes, format_seconds
from dips.master.state.penalty_config import PenaltyConfig, dynamic_local_steps_of
from dips.master.state.run_config import RunConfig

MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 64 << 20
"""Below 4 KiB headers outweigh the data; above 64 MiB one frame blocks a link for seconds."""

MAX_WINDOW_BYTES = 1 << 30
"""Chunks in flight stand in memory on both sides: window_chunks x chunk_bytes for each cluster and slave."""

MIN_MESSAGE_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 30
"""A Join carries the layout, about 100 bytes for each parameter tensor: 1 MiB is ten thousand tensors."""

MIN_BEATS = 3
"""One beat may be lost and one late without an eviction."""

PENALTY_KNOBS = (
    "outer_momentum",
    "clip_norm",
    "clip_scope",
    "participation_scaling",
    "momentum_scaling",
    "beta",
    "alpha",
    "warm_up_pushes",
    "window_pushes",
    "hard_gate",
    "quarantine_after_flags",
)
"""Fields that, when given, replace the preset's value of the same name in PenaltyConfig."""


def _name(run_id: str) -> str:
    try:
        return check_name(run_id, "the run id")
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _loopback(address: str) -> str:
    try:
        parse_address(address, "the master's listen address")
        require_loopback(address, "the master's listen address")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return address


class MasterConfig(Knobs):
    """One master's settings; to_run_config() is what its state machines see of them."""

    run_id: Annotated[str, AfterValidator(_name)] = Field(
        description="Name of the run; clusters and slaves of another run are refused"
    )
    directory: Path = Field(
        description="Folder for the journal, the tape and master.json (the address of the running master)"
    )
    listen: Annotated[str, AfterValidator(_loopback)] = Field(
        "127.0.0.1:0",
        description="HOST:PORT to serve, on loopback; port 0: a free one, and the same after a restart",
    )
    slaves: int = Field(2, ge=1, le=1024, description="Slaves that must be there before the run begins")
    max_clusters: int = Field(8, ge=1, le=1024, description="Clusters that may take part at the same time")
    min_clusters: int = Field(1, ge=0, description="Clusters that must have joined before the first round")

    sync_every: int = Field(64, ge=1, le=1_000_000, description="H: inner steps between two pushes")
    dynamic: bool | None = Field(
        None,
        description="Fit each cluster's steps to its speed, so that pushes arrive together "
        "(default: as the preset says)",
    )
    tk_max: Count = Field(0, description="Tokens at which the run ends; 0: never")
    s_max: Count = Field(
        0, description="Versions that a push's base may be behind; 0: 8, or 4 for each live cluster if more"
    )

    heartbeat_s: Seconds = Field(2.0, description="Time between two beats of a cluster or slave")
    evict_after_beats: int = Field(5, le=1000, description="Missed beats after which a peer is evicted")
    grace_s: Literal["auto"] | Seconds = Field(
        "auto",
        description="How long a round waits for further clusters after the first; "
        "auto: 10 % of the fastest cluster's round, at least 1 s",
    )
    round_timeout_s: Seconds = Field(30.0, description="Time for slaves to answer a step of a round")
    verdict_wait_s: Seconds = Field(30.0, description="A cluster waits so long for a verdict, then trains on")
    lease_ttl_s: Seconds = Field(6 * 3600.0, description="Data stays lent so long to a cluster that is gone")
    ticket_ttl_s: Seconds = Field(60.0, description="An upload that stands still so long is given up")
    linger_s: Seconds = Field(
        30.0, description="How long the master still answers after the run has ended and everyone has left"
    )

    chunk_bytes: Bytes = Field(1 << 20, description="Size of one data message")
    window_chunks: int = Field(16, ge=1, description="Chunks in flight between a cluster and a slave")
    pinned_versions: int = Field(
        2, ge=0, le=1024, description="Older versions that slaves keep for readers; 4 bytes a parameter each"
    )
    max_message_bytes: Bytes = Field(64 << 20, description="Largest control message that is accepted")

    preset: str = Field(
        "safe", description="How pushes are judged and merged: safe, dynamic, paper, paper-literal or edit"
    )
    outer_lr: float = Field(0.7, gt=0, le=10, description="Learning rate of the outer step")
    outer_momentum: float | None = Field(None, description="Nesterov momentum of the outer step (0.8)")
    clip_norm: float | None = Field(
        None, allow_inf_nan=True, description="Bound of the merged update's norm; inf: none (1.0; edit: 10)"
    )
    clip_scope: str | None = Field(None, description="global, or auto: the median of recent norms")
    participation_scaling: bool | None = Field(
        None,
        description="Scale a partial round by its share of tokens (yes; paper presets, edit: no)",
    )
    momentum_scaling: str | None = Field(
        None, description="off, or tokens: the momentum decays with a round's share of tokens (off)"
    )
    beta: float | None = Field(None, description="Threshold factor of the penalty (3)")
    alpha: float | None = Field(None, description="Smallest factor of the penalty's averages (0.02)")
    warm_up_pushes: int | None = Field(None, description="Accepted pushes before a cluster is scored (8)")
    window_pushes: int | None = Field(None, description="Accepted norms that are remembered (64)")
    hard_gate: float | None = Field(
        None, allow_inf_nan=True, description="Norms above so many medians are refused; inf: none (10)"
    )
    quarantine_after_flags: int | None = Field(
        None, description="Rejections in a row that quarantine a cluster; 0: never (3)"
    )

    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    json_logs: bool = Field(False, description="Log JSON lines instead of text")

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = [*_contradicting_times(self), *_impossible_sizes(self), *_wrong_penalty(self)]
        if self.min_clusters > self.max_clusters:
            wrong.append(
                f"min_clusters is {self.min_clusters} and max_clusters {self.max_clusters}: no round would "
                "ever begin; raise max_clusters"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def to_run_config(self) -> RunConfig:
        """What the state machines need of these settings."""
        return RunConfig(
            run_id=self.run_id,
            n_slaves=self.slaves,
            settings=self._settings(),
            penalty=self._penalty(),
            max_clusters=self.max_clusters,
            min_clusters=self.min_clusters,
            grace_s=None if self.grace_s == "auto" else self.grace_s,
            round_timeout_s=self.round_timeout_s,
            lease_ttl_s=self.lease_ttl_s,
            ticket_ttl_s=self.ticket_ttl_s,
            pinned_versions=self.pinned_versions,
            linger_s=self.linger_s,
        )

    def _settings(self) -> Settings:
        penalty = self._penalty()
        dynamic = dynamic_local_steps_of(self.preset) if self.dynamic is None else self.dynamic
        return Settings(
            sync_every_steps=self.sync_every,
            dynamic_local_steps=dynamic,
            heartbeat_s=self.heartbeat_s,
            evict_after_beats=self.evict_after_beats,
            verdict_wait_s=self.verdict_wait_s,
            chunk_bytes=self.chunk_bytes,
            window_chunks=self.window_chunks,
            max_staleness_versions=self.s_max,
            tk_max_tokens=self.tk_max,
            outer_lr=self.outer_lr,
            outer_momentum=penalty.outer_momentum,
            preset=self.preset,
            max_message_bytes=self.max_message_bytes,
        )

    def _penalty(self) -> PenaltyConfig:
        given = {name: getattr(self, name) for name in PENALTY_KNOBS if getattr(self, name) is not None}
        return PenaltyConfig.of(self.preset, **given)


def _contradicting_times(config: MasterConfig) -> Iterator[str]:
    """A sentence for each pair of times of which one makes the other pointless."""
    beat_s, round_s = config.heartbeat_s, config.round_timeout_s
    ticket_s, lease_s = config.ticket_ttl_s, config.lease_ttl_s
    evict_s = beat_s * config.evict_after_beats
    if beat_s <= 0:
        yield "heartbeat_s is 0: peers must beat; the default is 2 s"
    if config.evict_after_beats < MIN_BEATS:
        yield (
            f"evict_after_beats is {config.evict_after_beats}: one late beat would evict a healthy cluster; "
            f"use at least {MIN_BEATS}"
        )
    beats = "two beats (heartbeat_s)"
    if round_s < 2 * beat_s:
        yield _too_short("round_timeout_s", round_s, beats, 2 * beat_s, "every round would abort")
    if ticket_s < 2 * beat_s:
        yield _too_short("ticket_ttl_s", ticket_s, beats, 2 * beat_s, "uploads would be given up")
    if lease_s <= evict_s:
        yield _too_short("lease_ttl_s", lease_s, "the time to evict", evict_s, "data would be lent twice")
    if config.grace_s != "auto":
        yield from _contradicting_grace(config, config.grace_s)


def _contradicting_grace(config: MasterConfig, grace_s: float) -> Iterator[str]:
    round_s, verdict_s = config.round_timeout_s, config.verdict_wait_s
    if grace_s >= round_s:
        yield (
            f"grace_s is {format_seconds(grace_s)} and round_timeout_s {format_seconds(round_s)}: the wait "
            "for further clusters must be shorter than the time for a step of the round; lower grace_s"
        )
    if grace_s >= verdict_s:
        yield _too_short(
            "verdict_wait_s", verdict_s, "grace_s", grace_s, "the first cluster would never see its verdict"
        )


def _too_short(name: str, value_s: float, what: str, floor_s: float, harm: str) -> str:
    return (
        f"{name} is {format_seconds(value_s)}, too short beside {what}, {format_seconds(floor_s)}: {harm}; "
        f"raise {name}"
    )


def _impossible_sizes(config: MasterConfig) -> Iterator[str]:
    chunk_bytes = config.chunk_bytes
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % 4:
        yield (
            f"chunk_bytes is {chunk_bytes}: use a multiple of 4 between {format_bytes(MIN_CHUNK_BYTES)} and "
            f"{format_bytes(MAX_CHUNK_BYTES)}, such as 1 MiB"
        )
    if chunk_bytes * config.window_chunks > MAX_WINDOW_BYTES:
        yield (
            f"window_chunks x chunk_bytes is {format_bytes(chunk_bytes * config.window_chunks)} in flight "
            f"for each cluster and slave: keep it within {format_bytes(MAX_WINDOW_BYTES)} by lowering "
            "window_chunks"
        )
    if not MIN_MESSAGE_BYTES <= config.max_message_bytes <= MAX_MESSAGE_BYTES:
        yield (
            f"max_message_bytes is {config.max_message_bytes}: use {format_bytes(MIN_MESSAGE_BYTES)} to "
            f"{format_bytes(MAX_MESSAGE_BYTES)}; a Join carries the names and shapes of all parameters"
        )


def _wrong_penalty(config: MasterConfig) -> Iterator[str]:
    try:
        config._penalty()
    except ConfigError as error:
        yield str(error)
