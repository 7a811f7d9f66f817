"""A run whose one cluster stands on its first version, where many tests of the master begin."""

from __future__ import annotations

import pytest
from support.master_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench().running("a")
