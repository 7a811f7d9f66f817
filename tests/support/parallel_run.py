"""Starts clusters of several ranks (support.parallel_process) from a fork server, and reads what they recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support.fork_server import ForkedProcess, ForkServer
from support.parallel_models import full_model, merged, ranks_of
from support.waiting import until
from support.whole_run import option_words

F32 = NDArray[np.float32]


@dataclass
class RankedCluster:
    kind: str
    folder: Path
    ranks: list[ForkedProcess] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        server: ForkServer,
        kind: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        **options: object,
    ) -> RankedCluster:
        """options: of support.parallel_process."""
        folder.mkdir(parents=True)
        cluster = cls(kind, folder)
        for rank in range(ranks_of(kind)):
            words = ["rank", kind, str(rank), str(folder), *option_words(options)]
            given = {"OMP_NUM_THREADS": "1", **(environment or {})}
            cluster.ranks.append(server.start(folder.name, words, cluster.log_path(rank), given))
        return cluster

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def log(self, rank: int) -> str:
        return self.log_path(rank).read_text() if self.log_path(rank).exists() else ""

    def logs(self) -> str:
        return "\n".join(f"rank {rank}: {self.log(rank)[-3000:]}" for rank in range(len(self.ranks)))

    def is_settled(self) -> bool:
        entered = all((self.folder / f"entered-{rank}").exists() for rank in range(len(self.ranks)))
        return entered or any(rank.poll() is not None for rank in self.ranks)

    def codes(self) -> list[int | None]:
        until(lambda: all(rank.poll() is not None for rank in self.ranks), f"the ranks of {self.kind} end", self.logs)
        return [rank.returncode for rank in self.ranks]

    def records(self) -> list[dict[str, Any]]:
        codes = self.codes()
        assert codes == [0] * len(self.ranks), f"{self.kind}: {codes}\n{self.logs()}"
        return [torch.load(self.folder / f"rank-{rank}.pt") for rank in range(len(self.ranks))]

    def flats(self, what: str) -> list[F32]:
        """The flat vector of the full model at each entry of `trained`, `synced` or `last`; all ranks must agree."""
        records = self.records()
        entries = [len(record[what]) for record in records]
        assert len(set(entries)) == 1, f"ranks made other numbers of steps: {entries}"
        return [flat_of(merged([r[what][i] for r in records]), tied="tied" in self.kind) for i in range(entries[0])]


def flat_of(full: Mapping[str, torch.Tensor], *, tied: bool = False) -> F32:
    names = [name for name, p in full_model(tied=tied).named_parameters() if p.requires_grad]
    assert sorted(names) == sorted(full)
    flat: F32 = torch.cat([full[name].reshape(-1) for name in names]).numpy()
    return flat
