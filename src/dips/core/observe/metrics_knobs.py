"""The settings of every role: its metrics, which core/observe/metrics_server.py serves, and who may read its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from dips.core.files import FilesGroup
from dips.core.net.security import Address, SecurityKnobs

METRICS_FILE = "metrics.json"
"""In the directory of a role that has one."""


class MetricsKnobs(SecurityKnobs):
    """The settings of a process whose metrics can be scraped, and which keeps files."""

    GROUPS: ClassVar = {"metrics_listen": "Metrics", "files_group": "Files"}

    metrics_listen: Annotated[Address | None, BeforeValidator(lambda value: value or None)] = Field(
        None,
        description="HOST:PORT to serve Prometheus metrics at, under /metrics; port 0: a free one. Beyond loopback in "
        "TLS with this process's keys, for holders of keys of the run",
    )
    metrics_file: Path | None = Field(
        None,
        description="File that says where metrics are served, as Prometheus' file_sd_configs reads it; "
        "else metrics.json in the directory of a master or slave",
    )
    files_group: FilesGroup = ""
