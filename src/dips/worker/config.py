"""The settings of one training cluster.

Settings that all clusters of a run must share (H, outer learning rate, chunk size) are the master's; where they
appear here they only say what this cluster expects, and it ends where the master has others. Never holds a secret.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from dips.core.assumptions import violations
from dips.core.errors import ConfigError, option
from dips.core.ids import check_name
from dips.core.messages import Settings
from dips.core.net.addresses import require_loopback, split_addresses
from dips.core.net.security import ProcessKnobs
from dips.core.observe.logs import LogFormat, LogLevel
from dips.core.units import Seconds
from dips.core.wire import WIRE_DTYPES
from dips.worker.state.waiting import GivenTimes, times_of

SECTION = "worker"
"""The TOML table, and the middle of the environment names DIPS_WORKER_<FIELD>."""

PositiveSeconds = Annotated[Seconds, Field(gt=0)]
AutoSeconds = Literal["auto"] | PositiveSeconds
"""auto: derived from the master's heartbeat_s and round_timeout_s (worker/state/waiting.py)."""


class ClientConfig(ProcessKnobs):
    """One cluster's settings; the precedence is core.config's."""

    GROUPS: ClassVar = {
        "run_id": "The cluster in its run",
        "sync_every": "What is expected of the run",
        "connect_wait_s": "Times",
        "checkpoint_dir": "Checkpoints",
        "log_level": "Log",
    }

    run_id: str = Field("", description="The run to take part in; empty: whichever the master serves.")
    cluster_id: str = Field("", description="This cluster's name; the same after a restart.")
    master: str = Field("", description="The master's HOST:PORT; several, with commas between them, are tried in turn.")
    tape: Path | Literal["none"] | None = Field(
        None,
        description="File to which this process appends its event record; empty: a cluster in a run writes "
        "NAME.tape.jsonl in its checkpoint_dir, with cluster_id for NAME; else, and for none, no record.",
    )
    declared_tokens_per_s: float = Field(
        0.0, ge=0, description="Speed at which this cluster claims to train until it is measured; 0: unknown."
    )
    check_tokens: bool = Field(
        True,
        description="Refuse a count of tokens that the model's inputs cannot hold; set no if it fetches its own data.",
    )
    wire_dtype: str = Field(
        "float32",
        description="Format of this cluster's pushes: float32 parameters, or bfloat16, int8 or int4 differences "
        "to the version that it pulled, with the rounding error added to the next push.",
    )
    sync_every: int | None = Field(
        None, ge=1, description="Inner steps between two pushes that this cluster expects; empty: the master's value."
    )
    outer_lr: float | None = Field(
        None, gt=0, description="Outer learning rate that this cluster expects; empty: the master's value."
    )
    outer_momentum: float | None = Field(
        None, ge=0, lt=1, description="Outer momentum that this cluster expects; empty: the master's value."
    )
    connect_wait_s: PositiveSeconds = Field(
        120.0, description="How long the first join waits for a master that cannot be reached, before it gives up."
    )
    cut_off_limit_h: float = Field(
        24.0,
        gt=0,
        description="Hours for which training goes on while the master or slaves are away, then it waits for them; and "
        "for which a loop that ended before the run's first merge waits for that.",
    )
    ranks_wait_s: PositiveSeconds = Field(
        600.0,
        description="How long a rank that has left the loop waits for ranks that make no step, then the cluster ends; "
        "longer where there was a longer pause between two steps.",
    )
    call_deadline_s: AutoSeconds = Field(
        "auto",
        description="How long one control call may take; auto: as long as the master waits for beats (10 s), "
        "at least 6 s.",
    )
    retry_max_s: AutoSeconds = Field(
        "auto",
        description="Longest pause between two tries of a call that failed; it begins at 0.2 s and doubles; "
        "auto: half a heartbeat (1 s).",
    )
    leave_wait_s: AutoSeconds = Field(
        "auto",
        description="How long leaving may take, with the push of the last steps and its verdict, before it is given "
        "up; auto: the master's round_timeout_s (30 s), or the time until an eviction if that is longer, and "
        "twice the last push and pull, and as long as the push's window is open.",
    )
    # A chunk of 1 MiB takes 0.8 s at 10 Mbit/s; the timer adapts upwards from here to the gaps that it measures.
    data_silence_s: AutoSeconds = Field(
        "auto",
        description="A slave that sends no answer for so long is asked again over a new connection; "
        "auto: a heartbeat (2 s).",
    )
    data_stall_s: AutoSeconds = Field(
        "auto",
        description="A transfer without any progress for so long is given up and begun again; "
        "auto: the master's round_timeout_s (30 s), or the time until an eviction if that is longer.",
    )
    checkpoint_dir: Path | None = Field(
        None, description="Directory for this cluster's checkpoints only; empty: none are made."
    )
    checkpoint_every_s: Seconds = Field(
        60.0, ge=0, description="Time between two checkpoints; 0: as fast as they can be written."
    )
    checkpoints_kept: int = Field(2, ge=1, description="Checkpoints to keep; for a damaged one the one before is used.")
    resume: bool = Field(False, description="Resume from the newest checkpoint, if there is one.")
    resume_required: bool = Field(False, description="Resume from the newest checkpoint, and fail if there is none.")
    log_level: LogLevel = Field(
        "INFO",
        description="DEBUG, INFO, WARNING or ERROR (`dips train`; a loop of your own logs as Python's logging is set "
        "up in it, logger `dips`).",
    )
    log_format: LogFormat = Field(
        "human", description="Form of log lines: human, or json for machines (`dips train` only, as log_level)."
    )

    @property
    def tape_given(self) -> Path | None:
        """The file that was named for the event record; None: none was."""
        return None if self.tape == "none" else self.tape

    @property
    def tape_used(self) -> Path | None:
        """The file of a cluster's event record, for the one process that has checkpoint_dir for itself; None: none."""
        if self.tape is None and self.checkpoint_dir is not None and self.cluster_id:
            return self.checkpoint_dir / f"{self.cluster_id}.tape.jsonl"
        return self.tape_given

    @field_validator("wire_dtype")
    @classmethod
    def _check_wire_dtype(cls, value: str) -> str:
        if value not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype {value!r} is none of {', '.join(WIRE_DTYPES)}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := violations("worker", dict(iter(self))):
            raise ValueError("; ".join(wrong))
        return self


def given(seconds: float | str) -> float | None:
    """A time that was set; None for "auto"."""
    return None if isinstance(seconds, str) else seconds


def leaving_takes_s(config: ClientConfig, settings: Settings) -> float:
    """The longest that a cluster takes to leave under these settings, with its last push, if that and its window do not
    take longer than a round's time-out.
    """
    times = times_of(given_times(config), settings)
    return times.leave_wait_s + times.call_deadline_s


def given_times(config: ClientConfig) -> GivenTimes:
    """The times of a ClientConfig; None for "auto"."""
    return GivenTimes(**{name: given(getattr(config, name)) for name in GivenTimes.__dataclass_fields__})


def check(config: ClientConfig) -> ClientConfig:
    """Return the settings if a cluster can run with them. Raises ConfigError naming the setting and the remedy."""
    if not config.master:
        raise ConfigError(f"the master's address is missing: set DIPS_MASTER, or give {option('master', 'HOST:PORT')}")
    for address in split_addresses(config.master, "master"):
        if config.insecure:
            require_loopback(address, "master")
    if not config.cluster_id:
        raise ConfigError(f"the cluster's name is missing: set DIPS_CLUSTER, or give {option('cluster_id', 'NAME')}")
    check_name(config.cluster_id, "cluster_id")
    if config.run_id:
        check_name(config.run_id, "run_id")
    if (config.resume or config.resume_required) and config.checkpoint_dir is None:
        raise ConfigError(
            f"resuming needs checkpoints: give {option('checkpoint_dir', 'DIR')}, or leave out {option('resume')}"
        )
    return config
