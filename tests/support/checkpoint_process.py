"""One rank that writes and reads checkpoints: `python -m support.checkpoint_process RANK N_RANKS FOLDER TASK...`.

A task is `save:KIND` or `load:KIND:FROM`, of kinds of support.parallel_models; checkpoints are in FOLDER/../kept/KIND,
so that ranks of another number find them. Every number that is saved follows from its place in the full model. For
each load it prints a line: what is not as it was, to the bit. `share:KIND:FROM` is a load whose shares are cut anew by
another chunk size.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.exchange_process import part as share_part
from support.held_process import Group
from support.parallel_models import Part, group_of_ranks, local, part_of, rule
from support.shard_process import agreed_of

from dips.core.ids import ClusterId, Incarnation, PushId, Version
from dips.core.layout import Share
from dips.worker.checkpoint_files import INNER, CheckpointStore
from dips.worker.model_part import ModelPart
from dips.worker.parallel.agreement import Agreed, Gathering
from dips.worker.parallel.exchange import ShardParameters
from dips.worker.parallel.ownership import shares_of_ranks
from dips.worker.parallel.rank_checkpoints import RankCheckpoints
from dips.worker.parallel.rank_state import RankState, merged
from dips.worker.parallel.shard_files import ShardFile, write_metadata
from dips.worker.state.effects import PushRecord
from dips.worker.state.saved import SavedSession
from dips.worker.state.work import Work
from dips.worker.vectors import VectorCopies, Vectors

F32 = NDArray[np.float32]
UNIT_BYTES, OTHER_UNIT_BYTES = 64, 160

THETA, BASE, AT_PUSH, RESIDUAL, FIRST_MOMENT, SECOND_MOMENT = range(11, 17)
"""What the rule makes each vector of."""

SESSION = SavedSession(
    "run", "a", b"layout", b"data", Incarnation(2, 3), 5, Version(1, 4), 4,
    push=PushRecord(PushId(ClusterId("a"), Incarnation(2, 3), 5), Version(1, 4), 4, Work()), residual=True,
)  # fmt: skip


class Loader:
    """State of the user's: equal on all ranks, and with tensors, one of them empty."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seen": torch.arange(self.place), "none": np.zeros(0), "rates": (0.5, None)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert torch.equal(state["seen"], torch.arange(state["place"]))
        assert state["none"].size == 0
        assert state["rates"] == (0.5, None)
        self.place = state["place"]


class OneShare:
    """A rank's part as checkpoints use it (worker/model_part.py)."""

    def __init__(self, agreed: Agreed, group: Any, unit_bytes: int) -> None:
        shares = shares_of_ranks(agreed.layout, agreed.held, unit_bytes)
        self.share: Share = shares[agreed.rank]
        self.parameters = ShardParameters(agreed, shares, group, lambda: None)
        self.vectors = Vectors(self.share.n_elems, self.parameters)

    @property
    def owned(self) -> tuple[ModelPart, Share, int]:
        return cast(ModelPart, self), self.share, self.parameters.layout().n_elems


class Rank:
    def __init__(self, kind: str, of: str, folder: Path, group: dist.ProcessGroup, place: int) -> None:
        """kind: of this rank; of: of the ranks that write the checkpoint."""
        self.part: Part = part_of(kind)
        self.loader = Loader(place)
        decayed = [p for name, p in self.part.parameters if name.endswith("weight")]
        others = [p for name, p in self.part.parameters if not name.endswith("weight")]
        decays = 0.25 if place == 4 else 0.5, 0.0 if place == 4 else 1.0
        groups = [
            {"params": each, "weight_decay": decay} for each, decay in zip((decayed, others), decays, strict=True)
        ]
        self.optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=0.125 * place)
        self.ranks: Gathering = Group()
        self.agreed = agreed_of(self.part, [self.optimizer])
        self.group = group
        self.one = OneShare(self.agreed, group, UNIT_BYTES)
        kept = folder.parent / "kept" / of
        self.store = CheckpointStore(kept, 2) if self.ranks.rank == 0 else None
        dist.barrier()
        self.state = RankState(self.ranks, self.agreed, [self.optimizer], {"loader": self.loader})
        self.checkpoints = RankCheckpoints(kept, self.ranks, self.state)

    def flat(self, what: int) -> F32:
        return rule(torch.arange(self.agreed.layout.n_elems), what, 1).numpy()

    def save(self) -> None:
        self.set(1)
        vectors = self.one.vectors
        vectors.restore(*(share_part(self.flat(what), self.one.share) for what in (BASE, AT_PUSH, RESIDUAL)))
        if self.ranks.n_ranks == 1 and self.store is not None:  # as worker/checkpoint.py does
            state, inner = self.state.capture_whole()
            tensors = VectorCopies(vectors).take(self.one.parameters, SESSION)
            tensors.update({INNER + name: tensor for name, tensor in inner.items()})
            self.store.write({"session": SESSION.to_json(), "state": state, "label": None}, tensors)
            self.close()
            return
        number = self.store.begin_folder() if self.store is not None else 0
        number = int(self.ranks.gather(str(number).encode())[0])
        self.checkpoints.begin(*self.one.owned, number, json.dumps(SESSION.to_json()))
        self.set(2)  # training goes on
        written = self.checkpoints.commit()
        if self.store is not None:
            files = [each.file for each in written]
            assert all(each.error == "" for each in written), written
            content = {"session": SESSION.to_json(), "state": merged([each.state or {} for each in written])}
            folder = self.checkpoints.directory / f"checkpoint-{number:08d}.ranks"
            write_metadata(folder, [ShardFile.from_json(each) for each in files])
            self.store.commit_folder(number, content, files)
        self.close()

    def set(self, factor: int) -> None:
        with torch.no_grad():
            for (_, parameter), places in zip(self.part.parameters, self.part.places, strict=True):
                local(parameter).copy_(factor * rule(places, THETA, 1))
                moments = [torch.zeros_like(parameter) for _ in range(2)]
                for moment, what in zip(moments, (FIRST_MOMENT, SECOND_MOMENT), strict=True):
                    local(moment).copy_(factor * rule(places, what, 1))
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(7.0 * factor), "exp_avg": moments[0], "exp_avg_sq": moments[1]
                }  # fmt: skip
            self.part.after_step()
        random.seed(100 * factor + dist.get_rank())
        torch.manual_seed(100 * factor + dist.get_rank())

    def load(self, *, shares_again: bool) -> list[str]:
        said = self.checkpoints.find(1)
        if any(said):
            return said
        self.checkpoints.put_back(*self.one.owned, with_residual=True)
        if shares_again:
            self.one = OneShare(self.agreed, self.group, OTHER_UNIT_BYTES)
            self.checkpoints.put_back(*self.one.owned, with_residual=True, again=True)
        wrong = []
        vectors, share = self.one.vectors, self.one.share
        theta = np.zeros(share.n_elems, np.float32)
        self.one.parameters.snapshot(theta)
        held = {THETA: theta, BASE: vectors.base, AT_PUSH: vectors.push, RESIDUAL: vectors.residual}
        for what, vector in held.items():
            if vector is None or vector.tobytes() != share_part(self.flat(what), share).tobytes():
                wrong.append(f"vector {what}")
        for (name, parameter), places in zip(self.part.parameters, self.part.places, strict=True):
            state = self.optimizer.state[parameter]
            rows = {THETA: parameter, FIRST_MOMENT: state["exp_avg"], SECOND_MOMENT: state["exp_avg_sq"]}
            for what, tensor in rows.items():
                if not torch.equal(local(tensor), rule(places, what, 1).to(tensor.device)) or type(
                    tensor.data
                ) is not type(parameter.data):
                    wrong.append(f"{name}: {what}")
            if state["step"].item() != 7.0 or state["step"].dim():
                wrong.append(f"{name}: step")
        self.part.full_tensors()  # compares working copies with their masters
        for group in self.optimizer.param_groups:
            is_decayed = any(group["params"][0] is p for n, p in self.part.parameters if n.endswith("weight"))
            if group["lr"] != 0.5 or group["weight_decay"] != 0.25 * is_decayed:
                wrong.append(f"options of a group: {group['lr']}, {group['weight_decay']}")
        if self.loader.place != 4:
            wrong.append("loader")
        here = random.random(), torch.rand(1).item()
        random.seed(100 + dist.get_rank())
        torch.manual_seed(100 + dist.get_rank())
        same = here == (random.random(), torch.rand(1).item())
        assert self.checkpoints.found is not None
        n_saved = len(self.checkpoints.found.manifest.content["state"]["parts"]["random"])
        if same is not (n_saved == self.ranks.n_ranks):
            wrong.append("random numbers")
        self.close()
        return wrong

    def close(self) -> None:
        self.checkpoints.close()
        if self.store is not None:
            self.store.close()


def main(rank: int, n_ranks: int, folder: str, *tasks: str) -> None:
    with group_of_ranks(rank, n_ranks, folder) as group:
        for task in tasks:
            what, kind, *of = task.split(":")
            if what == "save":
                Rank(kind, kind, Path(folder), group, place=4).save()
            else:
                wrong = Rank(kind, of[0], Path(folder), group, place=1).load(shares_again=what == "share")
                print(json.dumps({task: wrong}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
