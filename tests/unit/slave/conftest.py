"""A slave's state where most tests begin."""

from __future__ import annotations

import pytest
from support.slave_bench import SlaveBench
from support.slave_values import SHADOW


@pytest.fixture
def bench() -> SlaveBench:
    """At version 0, with push A staged in slot 0."""
    return SlaveBench().at_v0()


@pytest.fixture
def prepared_bench(bench: SlaveBench) -> SlaveBench:
    """With the shadow of version 1 in memory and on disk."""
    bench.prepare()
    bench.prepared(SHADOW)
    return bench
