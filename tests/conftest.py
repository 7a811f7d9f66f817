"""Options of the whole test run. Must never hold fixtures: those stand beside the tests that use them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-passed",
        action="store_true",
        help="fail when not a single test passed, so that a run that skipped everything is not a success",
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--require-passed") or reporter is None:
        return
    if not reporter.stats.get("passed"):
        reporter.write_line("no test passed: this run shows nothing", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.NO_TESTS_COLLECTED
