"""A push whose sender is killed again and again: each successor sends what has not arrived, and nothing else."""

from __future__ import annotations

import os
import random
import subprocess

import pytest
from support.bulk import Bulk
from support.data_port_process import BulkPort, push_command
from support.repository import TESTS
from support.waiting import until

from dips.core.observe.failpoints import ENABLED_VARIABLE, SPEC_VARIABLE

BULK = Bulk(3, 700_000, block_elems=300_000, chunk_bytes=16 << 10)
WINDOW_CHUNKS = 8
KILLS = 10


LOOKS = 50
"""So often the same count: the slave answers each look, and reads its sockets between them."""


def push(endpoint: str, spec: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
    return subprocess.run(
        push_command(BULK, endpoint, WINDOW_CHUNKS),
        env={**environment, "PYTHONPATH": str(TESTS), SPEC_VARIABLE: spec, ENABLED_VARIABLE: "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def settled(slave: BulkPort) -> int:
    """How many chunks have arrived, once what a dead sender left in the sockets has been read."""
    counts: list[int] = []

    def stands_still() -> bool:
        counts.append(slave.ask("count")["received"])
        return len(counts) > LOOKS and len(set(counts[-LOOKS:])) == 1

    until(stands_still, "all that was sent has been read")
    return counts[-1]


@pytest.mark.parametrize("kills", [2, pytest.param(KILLS, marks=pytest.mark.long)])
def test_what_has_arrived_is_never_sent_again(kills: int) -> None:
    rng = random.Random(kills)
    arrived: list[int] = []
    with BulkPort(BULK) as slave:
        for _ in range(kills):
            chunks_before_death = rng.randrange(WINDOW_CHUNKS, BULK.n_chunks // kills)
            died = push(slave.endpoint, f"worker.push.before_chunk={chunks_before_death}*off->1*kill")
            assert died.returncode == -9, died.stderr
            arrived.append(settled(slave))
        last = push(slave.endpoint)
        assert last.returncode == 0, last.stderr
        count = slave.ask("count")
    assert arrived == sorted(arrived)
    assert 0 < arrived[0]
    assert arrived[-1] < BULK.n_chunks, "the last kill came before the end"
    assert count["received"] == BULK.n_chunks, "every chunk, once"
    assert count["staged"] == last.stdout.strip()
