"""The master's settings: their options, defaults, and the checks for contradictions.

Settings of the whole run are here and nowhere else: the master sends them to all processes, so that no cluster can
have other ones. Of the times only heartbeat_s and round_timeout_s must be chosen: "auto" times follow from these two
and from measurements during the run. The conditions between them are in core/assumptions.py (docs/assumptions.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dips.core.assumptions import violations
from dips.core.config import Name
from dips.core.errors import ConfigError
from dips.core.messages import Settings
from dips.core.net.security import Address, ProcessKnobs
from dips.core.observe.logs import LogFormat, LogLevel
from dips.core.protocol import MAX_WINDOW_CHUNKS
from dips.core.units import Bytes, Count, Seconds, format_seconds
from dips.master.state.pacing import SLIDES
from dips.master.state.penalty_types import (
    DEFAULT_PRESET,
    PRESET_NAMES,
    PenaltyConfig,
    dynamic_local_steps_of,
    outer_lr_of,
)
from dips.master.state.shared import RunConfig


class MasterConfig(ProcessKnobs):
    """One master's settings; to_run_config() makes the part for its state machines."""

    GROUPS: ClassVar = {
        "run_id": "The run",
        "page_listen": "Status page",
        "slaves": "Who takes part",
        "sync_every": "Training and rounds",
        "heartbeat_s": "Times",
        "chunk_bytes": "Transfers and memory",
        "preset": "How pushes are judged and merged",
        "durability": "What is kept on disk",
        "log_level": "Log",
    }

    run_id: Name = Field(description="Name of the run; clusters and slaves of another run are refused")
    directory: Path = Field(
        description="Folder for the journal, the tape and master.json (the address of the running master)"
    )
    listen: Address = Field(
        "127.0.0.1:0",
        description="HOST:PORT to serve; port 0: a free one, and the same after a restart",
    )
    revoked: Path | None = Field(
        None, description="List of revoked certificates, as `dips keys revoke` writes it; else revoked.json of the keys"
    )
    page_listen: Address | None = Field(
        None, description="HOST:PORT of the status page for browsers; port 0: a free one; none: no page"
    )
    page_heldout: Path | None = Field(
        None, description="Tape of the evaluator (`dips eval --follow --tape FILE`) whose losses the status page draws"
    )
    page_hosts: tuple[str, ...] = Field(
        (), description="Further host names under which browsers may open the status page"
    )
    page_steer: bool = Field(
        False, description="Let viewers of the status page pause and resume rounds there; otherwise it is read-only"
    )
    slaves: int = Field(2, ge=1, le=1024, description="Slaves that must be attached before the run begins")
    max_clusters: int = Field(8, ge=1, le=1024, description="Clusters that may take part at the same time")
    min_clusters: int = Field(1, ge=0, description="Clusters that must have joined before the first round")
    min_clusters_per_round: int = Field(
        1,
        ge=1,
        description="A round with fewer pushes than this waits past its grace for clusters that can still come, until "
        "round_deadline_s; 1: it does not",
    )
    frozen: Literal["same", "parameters", "any"] = Field(
        "same",
        description="What must be equal on all clusters although it is not trained; same: frozen parameters and "
        "constant buffers; parameters: frozen parameters; any: nothing is compared",
    )
    token_ratio_max: float = Field(
        100.0,
        gt=1,
        allow_inf_nan=True,
        description="Where clusters bring their own data: a push is refused if its tokens per step are more than this "
        "many times what the cluster itself and the others usually count; inf: never",
    )

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
    overlap: Literal["none", "push", "full"] = Field(
        "full",
        description="When clusters train instead of waiting: none: never; push: during a push; "
        "full: until a pulled version can be installed",
    )
    overlap_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="How much of the parameters' change by steps made during an exchange is kept when the pulled "
        "version is installed; their tokens count in full",
    )

    heartbeat_s: Seconds = Field(2.0, description="Time between two beats of a cluster or slave")
    evict_after_beats: int = Field(5, le=1000, description="Missed beats after which a peer is evicted")
    grace_s: Literal["auto"] | Seconds = Field(
        "auto",
        description="How long a round waits for further clusters after the first; "
        "auto: 10 % of the fastest cluster's round, at least 1 s",
    )
    grace: Literal["fixed", "sliding"] = Field(
        "fixed",
        description="A round's window ends grace_s after the first push; sliding: after the last one, as the paper's "
        "Algorithm 1 prints it, at most three times grace_s after the first",
    )
    round_deadline_s: Seconds | None = Field(
        None,
        gt=0,
        description="How long a round waits for min_clusters_per_round after its first push; then it goes on with "
        "what it has",
    )
    round_timeout_s: Seconds = Field(
        30.0,
        description="Time for slaves to answer a step of a round; doubles with each aborted round, up to eight times, "
        "until one commits",
    )
    verdict_wait_s: Literal["auto"] | Seconds = Field(
        "auto",
        description="A cluster waits this long for a verdict, then trains on; auto: as long as its last exchanges, "
        "at most round_timeout_s",
    )
    lease_ttl_s: Seconds = Field(6 * 3600.0, description="Time for which data stays leased to a cluster that is gone")
    ticket_ttl_s: Literal["auto"] | Seconds = Field(
        "auto",
        description="An upload, or a reader's pull, without progress for this long is given up; auto: twice "
        "round_timeout_s, or the time until an eviction if that is longer",
    )
    linger_s: Literal["auto"] | Seconds = Field(
        "auto",
        description="How long the master still answers after the run has ended and all clusters have left; "
        "auto: three times the time until an eviction",
    )

    chunk_bytes: Bytes = Field(
        1 << 20, description="Size of one data message; it cannot change once the run has a version"
    )
    window_chunks: int = Field(
        64,
        ge=1,
        le=MAX_WINDOW_CHUNKS,
        description="Most chunks in flight between a cluster and a slave; fewer where the link needs fewer",
    )
    pinned_versions: int = Field(
        2,
        ge=0,
        le=1024,
        description="Older versions that slaves keep for readers; 4 bytes a parameter each, with "
        "pull_wire also those of its differences",
    )
    memory_files: Literal["none", "stagings", "versions"] = Field(
        "none",
        description="What slaves keep in files on their disk, mapped, in place of memory of their own; stagings: the "
        "pushes, 4 bytes a parameter and cluster; versions: these and the parameters of all versions",
    )
    pull_wire: Literal["float32", "bfloat16", "int8", "int4"] = Field(
        "float32",
        description="What published versions are rounded to, so that clusters pull fewer bytes: differences to the "
        "version before; slaves keep what rounding loses, for the next version",
    )
    max_message_bytes: Bytes = Field(64 << 20, description="Largest control message that is accepted")

    preset: str | None = Field(
        None,
        description="How pushes are judged and merged: steady, dynamic, safe, paper, paper-literal or edit (steady; a "
        "run that has begun: the one that it has)",
    )
    outer_optimizer: str = Field(
        "nesterov", description="How merges move the model: nesterov, heavy-ball, delayed-nesterov or averaging"
    )
    delay_rounds: int | None = Field(
        None, description="With delayed-nesterov: rounds between two steps of the momentum (4)"
    )
    outer_lr: float | None = Field(
        None,
        gt=0,
        le=10,
        description="Learning rate of the outer step (0.9; presets other than steady: 0.7; averaging: 1)",
    )
    outer_momentum: float | None = Field(
        None, description="Momentum of the outer step (0.6; presets other than steady: 0.8; averaging: 0)"
    )
    clip_norm: float | None = Field(
        None,
        allow_inf_nan=True,
        description="Bound of the merged update's norm, with clip scope global unless that is given; inf: none (1.0, "
        "with clip scope auto until there is a median; edit: 10)",
    )
    clip_scope: str | None = Field(
        None,
        description="global, or auto: the median of recent norms (auto; presets other than steady and dynamic: global)",
    )
    participation_scaling: bool | None = Field(
        None,
        description="Scale a partial round by its share of tokens (yes; paper presets, edit and delayed-nesterov: no)",
    )
    momentum_scaling: str | None = Field(
        None, description="off, or tokens: the momentum decays with a round's share of tokens (off)"
    )
    detector: str | None = Field(
        None,
        description="Detector of bad pushes: score, literal, edit, or off: only pushes that cannot be merged "
        "(default: as the preset says)",
    )
    beta: float | None = Field(None, description="Threshold factor of the penalty (3)")
    alpha: float | None = Field(None, description="Smallest factor of the penalty's averages (0.02)")
    warm_up_pushes: int | None = Field(
        None, description="Accepted pushes before a cluster is scored (8; paper-literal: 1)"
    )
    window_pushes: int | None = Field(None, description="Accepted norms that are remembered (64)")
    hard_gate: float | None = Field(
        None,
        allow_inf_nan=True,
        description="Norms above this many medians are rejected; inf: none (10; paper-literal: inf)",
    )
    quarantine_after_flags: int | None = Field(
        None, description="Rejections in a row that quarantine a cluster; 0: never (3; paper-literal: 0)"
    )

    durability: Literal["sync", "async"] = Field(
        "sync",
        description="sync: a version is on every slave's disk before it is published; async: it is written "
        "afterwards, and a crash of a slave may undo the newest versions",
    )
    async_lag_versions: int = Field(
        2,
        le=1000,
        description="With async: no round begins while a disk is more versions behind; slaves must keep one snapshot "
        "more than this",
    )
    journal_records: int = Field(
        20_000, le=10_000_000, description="Decisions that stay in the journal; older ones move to the archive"
    )
    archive_bytes: Bytes = Field(
        1 << 30, description="Size limit of the archive of old decisions; above it the oldest are deleted"
    )
    standby: Address | None = Field(
        None,
        description="HOST:PORT of the run's master: this process keeps a replica of that one's journal in its own "
        "directory, serves nothing, and becomes the run's master when `dips master --take-over` asks it to",
    )
    take_over: bool = Field(
        False,
        description="Become the run's master with the replica in this directory, or let the standby that keeps it "
        "become it; the other master ends as soon as it is reached",
    )
    journal_replicas: int = Field(
        0,
        le=1,
        description="1: a decision counts only once a standby has it on its disk too; one that is away, or late for "
        "the time of an eviction, is an alarm and is waited for no longer. 0: a standby is not waited for",
    )
    without_replica: Literal["go-on", "pause"] = Field(
        "go-on",
        description="With journal_replicas 1, while no standby has all decisions; pause: no round begins",
    )
    lease: str | None = Field(
        None,
        description="Where a lease is kept by which a standby takes over without a person, the same for both: "
        "etcd:https://HOST:PORT (several endpoints with commas between them) or kubernetes:NAMESPACE/NAME",
    )
    lease_s: Seconds = Field(
        15.0, ge=1, le=3600, description="A standby takes over once the lease was not renewed for so long"
    )
    rebuild: bool = Field(
        False,
        description="After the loss of this master's disk: adopt the newest version that the slaves hold, "
        "instead of refusing to guess",
    )

    log_level: LogLevel = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: LogFormat = Field("human", description="Form of log lines: human, or json for machines")

    @model_validator(mode="after")
    def _check(self) -> Self:
        values = self._values()
        wrong = [*violations("master", values), *_long_window(self, values["verdict_wait_s"]), *_minimum(self)]
        if self.chunk_bytes % 4:
            wrong.append(
                f"chunk_bytes is {self.chunk_bytes}: use a multiple of 4, the size of a parameter, such as 1 MiB"
            )
        try:
            self._penalty(self.preset or DEFAULT_PRESET)
        except ConfigError as error:
            wrong.append(str(error))
        if self.rebuild and (self.standby is not None or self.take_over):
            wrong.append(
                "rebuild is for a lost journal, and standby and take_over are for one that has a replica: leave "
                "rebuild out, or the other two"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _values(self) -> dict[str, Any]:
        """All settings, with seconds for times that are "auto", without grace_s, which follows the clusters' speed."""
        evict_after_s = self.evict_after_beats * self.heartbeat_s
        derived = {
            "verdict_wait_s": self.round_timeout_s,
            "ticket_ttl_s": max(2 * self.round_timeout_s, evict_after_s),
            "linger_s": 3 * evict_after_s,
        }
        return {name: derived[name] if name in derived and value == "auto" else value for name, value in self}

    def to_run_config(self) -> RunConfig:
        """The settings for the state machines."""
        preset = self.preset or DEFAULT_PRESET
        ours = {
            **self._values(),
            "grace_s": None if self.grace_s == "auto" else self.grace_s,
            "n_slaves": self.slaves,
            "settings": self._settings(preset),
            "penalty": self._penalty(preset),
            "pause_without_replica": self.journal_replicas > 0 and self.without_replica == "pause",
            "encrypted": self.keys is not None,
            "grace_sliding": self.grace == "sliding",
            "presets": self._presets() if self.preset is None else {},
        }
        return RunConfig(**_of(RunConfig, ours))

    def _presets(self) -> dict[str, tuple[dict[str, Any], PenaltyConfig]]:
        """What each preset makes of the settings that presets decide, and of the penalty."""
        made = {name: self._settings(name) for name in PRESET_NAMES}
        decided = [f.name for f in fields(Settings) if len({getattr(each, f.name) for each in made.values()}) > 1]
        return {
            name: ({field: getattr(settings, field) for field in decided}, self._penalty(name))
            for name, settings in made.items()
        }

    def _settings(self, preset: str) -> Settings:
        ours = {
            **self._values(),
            "preset": preset,
            "outer_lr": outer_lr_of(preset, self.outer_optimizer) if self.outer_lr is None else self.outer_lr,
            "outer_momentum": self._penalty(preset).outer_momentum,
            "sync_every_steps": self.sync_every,
            "dynamic_local_steps": dynamic_local_steps_of(preset) if self.dynamic is None else self.dynamic,
            "verdict_wait_measured": self.verdict_wait_s == "auto",
            "max_staleness_versions": self.s_max,
            "tk_max_tokens": self.tk_max,
        }
        return Settings(**_of(Settings, ours))

    def _penalty(self, preset: str) -> PenaltyConfig:
        given = {name: value for name, value in _of(PenaltyConfig, dict(iter(self))).items() if value is not None}
        return PenaltyConfig.of(**{**given, "preset": preset})


def _of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are fields of this kind."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _long_window(config: MasterConfig, verdict_wait_s: float) -> Iterator[str]:
    """Checks for the longest window what core/assumptions.py demands of grace_s."""
    if config.grace != "sliding" or config.grace_s == "auto" or config.grace_s >= config.round_timeout_s:
        return
    longest_s = SLIDES * config.grace_s
    for name, limit_s in (("round_timeout_s", config.round_timeout_s), ("verdict_wait_s", verdict_wait_s)):
        if longest_s >= limit_s:
            yield (
                f"grace is 'sliding', so that a window may last {longest_s:g} s, {SLIDES:g} times grace_s, and {name} "
                f"is {limit_s:g} s: lower grace_s below {limit_s / SLIDES:g} s, or raise {name}"
            )


def _minimum(config: MasterConfig) -> Iterator[str]:
    """Checks that a minimum for each round and its deadline come together."""
    minimum, deadline_s = config.min_clusters_per_round, config.round_deadline_s
    if minimum > 1 and deadline_s is None:
        yield (
            f"min_clusters_per_round is {minimum}, and nothing says how long a round waits for so many: set "
            "round_deadline_s, such as '10 min', or leave min_clusters_per_round out"
        )
    if minimum == 1 and deadline_s is not None:
        yield (
            f"round_deadline_s is {format_seconds(deadline_s)}, and no round waits for further clusters: set "
            "min_clusters_per_round to 2 or more, or leave round_deadline_s out"
        )
