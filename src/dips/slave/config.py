"""A slave's own settings. Those that the whole group shares are not here: the master sends them in Welcome."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dips.core.assumptions import require
from dips.core.config import Name
from dips.core.net.addresses import require_loopback
from dips.core.net.security import Address, AddressOrEmpty
from dips.core.observe.logs import LogFormat
from dips.core.observe.metrics_knobs import MetricsKnobs
from dips.core.threads import usable_processors
from dips.core.units import Bytes, validating

GIB = 1 << 30

ALL_ADDRESSES = ("0.0.0.0", "::")


class SlaveConfig(MetricsKnobs):
    """Settings of one slave; the table [slave] of a settings file, DIPS_SLAVE_<FIELD>, or the command line."""

    run_id: Name = Field(description="the run that this slave serves")
    slave_id: Name = Field(description="this slave's name in the run; it never changes")
    master: Address = Field(default="127.0.0.1:29400", description="where the master listens, HOST:PORT")
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
    memory_bytes: Bytes = Field(default=GIB, description="most memory for parameters, staging and pins included")
    max_chunk_bytes: Bytes = Field(
        default=2 << 20,
        description="largest data frame that the data port takes; the run's chunk_bytes must not be above it",
    )
    data_threads: Annotated[int, Field(ge=0, le=16)] = Field(
        default=0,
        description="threads that check and land chunks; 0: one for every four processors, at most 4",
    )
    compute_threads: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, description="threads of the outer step; 0: one for each processor, at most 8"
    )
    snapshots_kept: Annotated[int, Field(le=1000)] = Field(
        default=3,
        description="committed snapshots kept on disk; one file more is made, 8 bytes a parameter each",
    )
    record_pushes: bool = Field(
        default=False,
        description="keep every accepted push on disk, so that `dips verify DIR --replay` can recompute",
    )
    tape: Path | None = Field(default=None, description="file of this slave's event record; empty: none")
    log_level: str = Field(default="INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: LogFormat = Field(default="human", description="form of log lines: human, or json for machines")

    @property
    def data_threads_used(self) -> int:
        """The number of data threads. On few processors one keeps up with the network, and a second does not help."""
        return self.data_threads or min(4, max(1, usable_processors() // 4))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data_host in ALL_ADDRESSES and not self.advertise:
            raise ValueError(
                f"data_host {self.data_host} means every address of this machine, and clusters need one: give "
                "advertise HOST:PORT, with port 0 or that of data_port"
            )
        validating(require)("slave", dict(iter(self)))
        return self

    @field_validator("data_host")
    @classmethod
    @validating
    def _check_data_host(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("insecure"):
            require_loopback(value, "data_host")
        return value
