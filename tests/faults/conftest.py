"""One server that forks processes for all tests with faults, and the counts at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fault_run import TALLY
from support.fork_server import ForkServer

WHOLE_MATRIX_FAULTS = 300
"""So many faults are the whole matrix: some fell in every phase of the round, or something is wrong with it."""


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not TALLY.fired:
        return
    terminalreporter.section("faults")
    for line in TALLY.table():
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    missing = TALLY.missing_phases()
    if TALLY.fired >= WHOLE_MATRIX_FAULTS and missing:
        print(f"\nno fault fell in {', '.join(missing)}: the matrix no longer covers the round")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
