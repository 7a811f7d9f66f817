"""Options of the whole test run. Must never hold fixtures: those stand beside the tests that use them."""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path

import hypothesis
import pytest
from support import seen_notes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and every child of a process inherits it: no test could send ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With DIPS_SEEN_LOG, as in .ci/run: which transitions and refusals any test sees (tests/seen.py), also in the processes
# that tests start (tests/sitecustomize.py).
seen_notes.note()
if os.environ.get(seen_notes.LOG_VARIABLE):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))

FREED_SELDOM = (20_000, 20, 20)
"""Objects before garbage is looked for, and how often in older ones (gc.set_threshold)."""

# The same examples in every run, so that a failure is a change's; for new ones: DIPS_NEW_EXAMPLES=1. No limit
# of time for one example, and none for making it: a machine that does other things as well must change no result.
hypothesis.settings.register_profile(
    "tests",
    derandomize=not os.environ.get("DIPS_NEW_EXAMPLES"),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-passed",
        action="store_true",
        help="fail when not a single test passed, so that a run that skipped everything is not a success",
    )
    parser.addoption("--long", action="store_true", help="also what has the mark `long` (`make test-long`)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes, or gigabytes of memory; runs with --long only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if config.getoption("--long") else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests become no garbage: they are looked through once, not again and again in every test
    that makes many objects, as searches and simulations do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*FREED_SELDOM)
    _let_pass_on_records()


def _let_pass_on_records() -> None:
    """pytest adds its handlers to each logger that passes nothing on, six times a test; torch alone has 50 of these.
    Where they pass records on, its handlers at the root see the same."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and not name.startswith("dips"):
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--require-passed") or reporter is None:
        return
    if not reporter.stats.get("passed"):
        reporter.write_line("no test passed: this run shows nothing", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.NO_TESTS_COLLECTED
