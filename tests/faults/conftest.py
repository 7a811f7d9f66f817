"""One server that forks processes for all tests with faults, and the counts at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.fault_run import TALLY
from support.fork_server import ForkServer

WHOLE_MATRIX_FAULTS = 300
"""So many faults are the whole matrix: some fell in every phase of the round, or something is wrong with it."""


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


REPORT = "faults"
"""Under this name a process that runs some of the files, beside others, hands its report over."""

_reports: list[tuple[list[str], list[str]]] = []
"""The lines of a table of faults, and phases of the round in which none of them fell."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Such a process has ended."""
    if REPORT in (output := getattr(node, "workeroutput", {})):
        _reports.append(output[REPORT])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if TALLY.fired:
        missing = TALLY.missing_phases() if TALLY.fired >= WHOLE_MATRIX_FAULTS else []
        _reports.append((list(TALLY.table()), missing))
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output |= {REPORT: _reports[0]} if _reports else {}
    elif any(missing for _, missing in _reports):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for lines, missing in _reports:
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.write_line(line)
        if missing:
            terminalreporter.write_line(f"no fault fell in {', '.join(missing)}: the matrix no longer covers the round")
