"""One server that forks processes for all tests with faults, and the counts at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fault_run import TALLY
from support.fork_server import ForkServer

FAULTS = "faults"
"""What a worker hands over, where files of tests run side by side."""

TABLES: list[list[str]] = []


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def pytest_sessionfinish(session: pytest.Session) -> None:
    of_worker: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if of_worker is not None:
        of_worker[FAULTS] = list(TALLY.table()) if TALLY.fired else []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    TABLES.append(getattr(node, "workeroutput", {}).get(FAULTS, []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts of this process, or of each worker."""
    for table in [*TABLES, list(TALLY.table()) if TALLY.fired else []]:
        if table:
            terminalreporter.section("faults")
            for line in table:
                terminalreporter.write_line(line)
