"""kill -9 of one rank of a cluster: the others end by themselves with a sentence, and the run goes on to its end.

The smoke form runs always: one kill of each kind of parallelism. The long tier (`pytest --long`)
kills each rank of each kind at each phase of a push and of a pull.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.parallel_kills import LEADERS_PHASES, PHASES, RankKillRun
from support.parallel_models import ranks_of

Phase = tuple[str, str]

SMOKE: tuple[tuple[str, int, Phase], ...] = (
    ("ddp2", 1, PHASES[2]),
    ("fsdp2", 0, PHASES[1]),
    ("fsdp4", 3, PHASES[0]),
    ("hsdp4", 2, PHASES[5]),
    ("tp2", 1, PHASES[3]),
    ("fsdp-tp4", 0, PHASES[6]),
    ("pp2", 1, PHASES[4]),
    ("pp-dp4", 0, LEADERS_PHASES[2]),
    ("ep2", 1, PHASES[1]),
    ("fsdp-ep4", 3, PHASES[6]),
)
"""One rank of each kind, and at which phase it dies: leaders and followers, of pushes and of pulls."""

KINDS = tuple(kind for kind, _, _ in SMOKE)


@pytest.fixture(scope="module")
def ranks_server() -> Iterator[ForkServer]:
    with ForkServer(torch=True) as server:
        yield server


def play(directory: Path, server: ForkServer, kind: str, kills: Sequence[tuple[int, Phase]]) -> None:
    with RankKillRun(directory, server, kind) as run:
        for rank, (phase, failpoint) in kills:
            run.kill_at(rank, phase, failpoint)
        run.stop()
        run.judge()


@pytest.mark.parametrize(("kind", "rank", "phase"), SMOKE, ids=KINDS)
def test_smoke_a_rank_is_killed(kind: str, rank: int, phase: Phase, ranks_server: ForkServer, tmp_path: Path) -> None:
    play(tmp_path / "run", ranks_server, kind, [(rank, phase)])


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_is_killed_at_each_phase(kind: str, ranks_server: ForkServer, tmp_path: Path) -> None:
    kills = [(rank, phase) for phase in PHASES for rank in range(ranks_of(kind))]
    kills += [(0, phase) for phase in LEADERS_PHASES]
    play(tmp_path / "run", ranks_server, kind, kills)
