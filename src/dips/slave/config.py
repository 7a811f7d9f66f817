"""A slave's own settings. Those that the whole group shares are not here: the master sends them in Welcome."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from dips.core.assumptions import violations
from dips.core.config import Knobs, Name
from dips.core.errors import ConfigError
from dips.core.net.addresses import require_loopback
from dips.core.net.object_store import check_url
from dips.core.net.security import Addresses, AddressOrEmpty, ProcessKnobs
from dips.core.observe.logs import LogFormat, LogLevel
from dips.core.threads import usable_processor_numbers, usable_processors
from dips.core.units import BitsPerSecond, Bytes, validating

GIB = 1 << 30

ALL_ADDRESSES = ("0.0.0.0", "::")

SHARED, OWN = "shared", "own"
"""Values of data_cpu that are no processor's number."""


class SlaveConfig(ProcessKnobs):
    """Settings of one slave; the table [slave] of a settings file, DIPS_SLAVE_<FIELD>, or the command line."""

    GROUPS: ClassVar = {
        "run_id": "The slave",
        "data_host": "Data port",
        "memory_bytes": "Memory, processors and disk",
        "log_level": "Log",
    }

    run_id: Name = Field(description="the run that this slave serves")
    slave_id: Name = Field(description="this slave's name in the run; it never changes")
    master: Addresses = Field(
        default="127.0.0.1:29400",
        description="where the master listens, HOST:PORT; several, with commas between them, are tried in turn",
    )
    directory: Path = Field(description="where snapshots and the promised epoch are kept; for this slave only")
    data_host: str = Field(default="127.0.0.1", description="address that the data port binds")
    data_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0, description="the data port; 0 lets the system choose"
    )
    advertise: AddressOrEmpty = Field(
        default="",
        description="address of the data port as clusters reach it, HOST:PORT; port 0: the port that it has; empty: "
        "where it is bound",
    )
    max_chunk_bytes: Bytes = Field(
        default=2 << 20,
        description="largest data frame that the data port takes; the run's chunk_bytes must not be above it",
    )
    data_threads: Annotated[int, Field(ge=0, le=16)] = Field(
        default=0,
        description="threads that check and land chunks; 0: one for every four processors, at most 4",
    )
    data_cpu: str = Field(
        default=SHARED,
        description="processor of the data port's threads: shared (any), own (the last one; for a slave that has its "
        "machine to itself), or a number",
    )
    memory_bytes: Bytes = Field(default=GIB, description="most memory for parameters, staging and pins included")
    compute_threads: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, description="threads of the outer step; 0: one for each processor, at most 8"
    )
    snapshots_kept: Annotated[int, Field(le=1000)] = Field(
        default=3,
        description="committed snapshots kept on disk; one file more is made, 8 bytes a parameter each, about 9 with "
        "pull_wire",
    )
    record_pushes: bool = Field(
        default=False,
        description="keep every accepted push on disk, so that `dips verify DIR --replay` can recompute",
    )
    tape: Path | Literal["none"] | None = Field(
        default=None,
        description="file of this slave's event record, which `dips verify` reads; empty: NAME.tape.jsonl in "
        "directory, with slave_id for NAME; none: no record",
    )
    log_level: LogLevel = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: LogFormat = Field(default="human", description="form of log lines: human, or json for machines")

    @property
    def tape_used(self) -> Path | None:
        """The file of the event record; None: there is none."""
        return None if self.tape == "none" else self.tape or self.directory / f"{self.slave_id}.tape.jsonl"

    @property
    def data_threads_used(self) -> int:
        """The number of data threads. On few processors one keeps up with the network, and a second does not help; nor
        does it on the one processor of data_cpu.
        """
        if self.data_cpu != SHARED:
            return 1
        return self.data_threads or min(4, max(1, usable_processors() // 4))

    @property
    def data_cpu_used(self) -> int | None:
        """The processor of the data port's threads; None: the system chooses, from moment to moment.

        Raises ConfigError for one on which this process may not run, and where the system places no threads.
        """
        if self.data_cpu == SHARED:
            return None
        usable = usable_processor_numbers()
        if not usable:
            raise ConfigError(
                f"data_cpu is {self.data_cpu}, and this system does not let a process place its threads: leave it out"
            )
        if self.data_cpu == OWN:
            return usable[-1]
        if int(self.data_cpu) not in usable:
            parts = []  # as the system writes them: "0-3,8"
            for _, run in itertools.groupby(enumerate(usable), lambda item: item[1] - item[0]):
                first, *rest = [number for _, number in run]
                parts.append(f"{first}-{rest[-1]}" if rest else str(first))
            raise ConfigError(
                f"data_cpu is {self.data_cpu}, and this process may run on {','.join(parts)} only: give one of these, "
                f"or {OWN} for the last of them, or {SHARED}"
            )
        return int(self.data_cpu)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data_host in ALL_ADDRESSES and not self.advertise:
            raise ValueError(
                f"data_host {self.data_host} means every address of this machine, and clusters need one: give "
                "advertise HOST:PORT, with port 0 or that of data_port"
            )
        if wrong := violations("slave", dict(iter(self))):
            raise ValueError("; ".join(wrong))
        return self

    @field_validator("data_cpu")
    @classmethod
    def _check_data_cpu(cls, value: str, info: ValidationInfo) -> str:
        if value not in (SHARED, OWN) and not (value.isascii() and value.isdecimal()):
            raise ValueError(f"{value!r} is no processor: give {SHARED}, {OWN}, or a processor's number")
        if value != SHARED and info.data.get("data_threads", 0) > 1:
            raise ValueError(
                f"data_threads is {info.data['data_threads']}, and data_cpu {value} places one thread: leave "
                f"data_threads out, or set data_cpu to {SHARED}"
            )
        return value

    @field_validator("data_host")
    @classmethod
    @validating
    def _check_data_host(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("insecure"):
            require_loopback(value, "data_host")
        return value


class BackupConfig(Knobs):
    """Settings of `dips backup`; the table [backup] of a file, DIPS_BACKUP_<FIELD>, or the command line."""

    to: Annotated[str, AfterValidator(validating(check_url))] = Field(
        description="the object store: s3://BUCKET/PREFIX, gs://..., az://..., or file:///DIRECTORY; credentials come "
        "from the environment or the machine"
    )
    every: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=10, description="copy each version whose number is a multiple of this; the same for all slaves"
    )
    kept: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="complete versions that stay in the store; older ones are removed"
    )
    rate: Annotated[BitsPerSecond, Field(ge=8000)] = Field(
        default=200e6, description="most bits a second that are sent, all slaves of the process together"
    )
