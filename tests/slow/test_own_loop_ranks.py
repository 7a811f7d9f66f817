"""A loop of one's own is killed again and again, and goes on with another number of ranks, one first, and another
parallelism: nothing is lost, nothing is counted twice, and the parameters are those of an undisturbed loop, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.own_loop_ranks import LAYERS, TOKENS, Net, optimizer_of, step
from support.rank_script import run_ranks
from support.run_for_workers import CHUNK_BYTES, RunForWorkers

from dips.core.messages import Settings

STEPS = 250
LIVES: list[tuple[str, int, tuple[str, str] | None]] = [
    ("one", 1, ("0", "step")),
    ("fsdp", 2, ("1", "step")),
    ("tensor", 4, ("0", "worker.checkpoint.before_manifest")),
    ("pipeline", 2, ("1", "worker.checkpoint.before_fsync")),
    ("data", 2, ("0", "worker.checkpoint.before_rename")),
    ("fsdp", 1, ("0", "step")),
    ("one", 1, None),
]
"""Kind, number of ranks, and which rank is killed where; the last life ends by itself."""


@pytest.fixture
def run() -> Iterator[RunForWorkers]:
    settings = Settings(
        sync_every_steps=1000, heartbeat_s=0.05, verdict_wait_s=5.0, chunk_bytes=CHUNK_BYTES, window_chunks=4
    )
    run = RunForWorkers(settings)
    yield run
    run.close()


def test_it_goes_on_with_another_number_of_ranks_and_another_parallelism(run: RunForWorkers, tmp_path: Path) -> None:
    for number, (kind, n_ranks, killed) in enumerate(LIVES):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = run_ranks("own_loop_ranks", n_ranks, folder, run.address, kind, str(STEPS), *(killed or ()))
        codes, said = [code for code, _ in ended], "\n".join(line for _, lines in ended for line in lines)
        if killed is None:
            assert codes == [0] * n_ranks, said
        else:
            assert codes[int(killed[0])] == -9, said
            assert all(codes), said
        if number:
            n_before = LIVES[number - 1][1]
            writers = "one process has" if n_before == 1 else f"{n_before} ranks have"
            assert f"kept, which {writers} written: version 1:0 and" in said, said
    assert [push.tokens for push in run.pushes] == [0, STEPS * TOKENS], "the seed, and every step once"
    reference = Net(range(LAYERS))
    optimizer, scheduler = optimizer_of(reference)
    for at in range(STEPS):
        step(reference, optimizer, at)
        scheduler.step()
    folder = tmp_path / str(len(LIVES) - 1)
    for rank in range(LIVES[-1][1]):
        each = torch.load(folder / f"rank-{rank}.pt")
        assert each["steps"] == STEPS
        assert each["rates"] == [group["lr"] for group in optimizer.param_groups]
        for name, parameter in reference.named_parameters():
            assert torch.equal(each["parameters"][name], parameter.detach()), name
        for name, buffer in reference.named_buffers():
            assert torch.equal(each["buffers"][name], buffer), name
