"""One server that forks processes for all tests with faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server
