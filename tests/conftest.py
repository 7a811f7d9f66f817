"""Options of the whole test run. Must never hold fixtures: those stand beside the tests that use them."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and every child of a process inherits it: no test could send ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
    parser.addoption("--dashboards", action="store_true", help="also watch a real run with Prometheus, for minutes")
    parser.addoption("--kubernetes", action="store_true", help="also deploy to the cluster that KUBECONFIG names")
    parser.addoption("--page", action="store_true", help="also look at the status page of a real run with a browser")
    parser.addoption("--endurance", action="store_true", help="also move gigabytes and play 1,000 rounds, for minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: takes minutes of killing real processes; runs with --faults only")
    config.addinivalue_line("markers", "dashboards: watches a run for minutes; runs with --dashboards only")
    config.addinivalue_line("markers", "kubernetes: deploys to a real cluster; runs with --kubernetes only")
    config.addinivalue_line("markers", "page: looks at a real run with a browser; runs with --page only")
    config.addinivalue_line("markers", "endurance: takes minutes, or gigabytes of memory; runs with --endurance only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "faults": "kills real processes for minutes: run it with --faults, or `make faults`",
        "dashboards": "watches a real run for minutes: run it with --dashboards, or `make dashboards-test`",
        "kubernetes": "needs a cluster of Kubernetes: run it with --kubernetes, or `make e2e-kubernetes`",
        "page": "looks at a real run with a browser: run it with --page, or `make page-test`",
        "endurance": "takes minutes, or gigabytes of memory: run it with --endurance",
    }
    for name, reason in reasons.items():
        if config.getoption(f"--{name}"):
            continue
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--require-passed") or reporter is None:
        return
    if not reporter.stats.get("passed"):
        reporter.write_line("no test passed: this run shows nothing", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.NO_TESTS_COLLECTED
