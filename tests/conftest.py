"""Options of the whole test run. Must never hold fixtures: those stand beside the tests that use them."""

from __future__ import annotations

import gc
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

# The same examples in every run, so that a failure is a change's; to look for new ones: DIPS_NEW_EXAMPLES=1.
hypothesis.settings.register_profile("same", derandomize=True)
if not os.environ.get("DIPS_NEW_EXAMPLES"):
    hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-passed",
        action="store_true",
        help="fail when not a single test passed, so that a run that skipped everything is not a success",
    )
    parser.addoption("--faults", action="store_true", help="also kill real processes for minutes (`make faults`)")
    parser.addoption("--endurance", action="store_true", help="also move gigabytes and play 1,000 rounds, for minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: takes minutes of killing real processes; runs with --faults only")
    config.addinivalue_line("markers", "endurance: takes minutes, or gigabytes of memory; runs with --endurance only")


LONGEST_FIRST = Path(__file__).with_name("longest_first.txt")
"""Files of tests that take long, the longest first; those that are not named follow in their own order."""


def longest_first(items: list[pytest.Item]) -> None:
    named = LONGEST_FIRST.read_text().splitlines() if LONGEST_FIRST.exists() else []
    places = {LONGEST_FIRST.parents[1] / name: place for place, name in enumerate(named)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    longest_first(items)
    left_out = [name for name in ("faults", "endurance") if not config.getoption(f"--{name}")]
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests become no garbage: they are looked through once, not again and again in every test
    that makes many objects, as searches and simulations do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*FREED_SELDOM)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--require-passed") or reporter is None:
        return
    if not reporter.stats.get("passed"):
        reporter.write_line("no test passed: this run shows nothing", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.NO_TESTS_COLLECTED
