"""One rank that copies its share of the parameters, and installs another model: `python -m support.shard_process RANK
N_RANKS FOLDER KIND...`.

For each kind of support.parallel_models, and `narrow`, it prints a line: what is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.exchange_process import part as share_part
from support.held_process import Group
from support.parallel_models import DEVICE, Part, group_of_ranks, local, part_of, rule
from support.vectors_held import vectors_held
from torch.distributed.fsdp import fully_shard

from dips.core.layout import Share
from dips.worker.parallel.agreement import Agreed, agree
from dips.worker.parallel.exchange import ShardParameters
from dips.worker.parallel.held import ShardOf, held_here
from dips.worker.parallel.ownership import shares_of_ranks
from dips.worker.state.effects import InstallMode
from dips.worker.vectors import Vectors

F32 = NDArray[np.float32]
UNIT_BYTES = 64


def store_of(agreed: Agreed, group: dist.ProcessGroup) -> tuple[ShardParameters, Share]:
    shares = shares_of_ranks(agreed.layout, agreed.held, UNIT_BYTES)
    resets: list[None] = []
    store = ShardParameters(agreed, shares, group, lambda: resets.append(None))
    store.reset_inner_optimizer()
    assert len(resets) == 1
    assert store.layout() is agreed.layout
    return store, shares[agreed.rank]


def agreed_of(part: Part, optimizers: Sequence[torch.optim.Optimizer]) -> Agreed:
    shards = {name: ShardOf(name, shape, starts) for name, (shape, starts) in part.boxes.items()}
    given = {name: value for name, value in part.arguments.items() if name != "shards"}
    here = held_here(part.wrapped, optimizers, shards=shards or None, **given)
    agreed = agree(Group(), here, {})
    assert agreed is not None
    return agreed


def shared_out(kind: str, group: dist.ProcessGroup) -> list[str]:
    """Copies and installs as a round does, with parameters that an evaluation has left gathered, if the kind has."""
    part = part_of(kind)
    agreed = agreed_of(part, part.optimizers(0))
    store, share = store_of(agreed, group)
    wrong = []
    before = np.arange(agreed.layout.n_elems, dtype=np.float32)
    part.evaluate()
    flat = store.empty(share.n_elems)
    store.snapshot(flat)
    if flat.tobytes() != share_part(before, share).tobytes():
        wrong.append("snapshot")
    after = rule(torch.arange(agreed.layout.n_elems), 1, 1).numpy()
    part.evaluate()
    store.install(share_part(after, share))
    for span in agreed.layout.spans:
        whole = part.full_tensors().get(span.parameter.name)
        expected = torch.from_numpy(after[span.start_elem : span.stop_elem]).view(span.parameter.shape)
        if whole is not None and not torch.equal(whole[~whole.isnan()], expected[~whole.isnan()]):
            wrong.append(span.parameter.name)
    part.forward_and_backward()
    store.snapshot(flat)
    if flat.tobytes() != share_part(after, share).tobytes():
        wrong.append("snapshot after a step")
    vectors = Vectors(share.n_elems, store)
    vectors.landing()
    vectors.install(store, InstallMode.REPLACE)
    vectors.snapshot(store, may_stay_live=True)
    pushed = vectors.push.tobytes()
    vectors.landing(push_is_live=True).fill(7)
    if share.n_elems and vectors_held(vectors) != 2:
        wrong.append("a pull lands where the push was, as long as the parameters equal it")
    part.evaluate()
    vectors.keep_push(store)
    if vectors.push.tobytes() != pushed or not np.all(vectors.pull == 7):
        wrong.append("the push when training goes on")
    if store.rounds or store.live() is not None:
        wrong.append("float32 shards")
    return wrong


def narrow(group: dist.ProcessGroup) -> list[str]:
    """bfloat16 parameters under FSDP2: two versions are installed with a step in between, and no rounding is pushed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 11), torch.nn.Linear(11, 5)).to(torch.bfloat16)
    model.append(torch.nn.Linear(5, 3)).to(DEVICE)  # in float32
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agreed = agree(Group(), held_here([model], [optimizer]), {})
    assert agreed is not None
    store, share = store_of(agreed, group)
    vectors = Vectors(share.n_elems, store)
    version = np.random.default_rng(0).standard_normal(agreed.layout.n_elems).astype(np.float32)
    np.copyto(vectors.landing(), share_part(version, share))
    vectors.install(store, InstallMode.REPLACE)
    n_wrong = []
    for name, parameter in model.named_parameters():
        span = next(span for span in agreed.layout.spans if span.parameter.name == name)
        expected = torch.from_numpy(version[span.start_elem : span.stop_elem]).view(span.parameter.shape)
        if not torch.equal(parameter.detach().full_tensor().cpu(), expected.to(parameter.dtype)):  # type: ignore[attr-defined]
            n_wrong.append(name)
    vectors.snapshot(store)
    if vectors.push.tobytes() != share_part(version, share).tobytes():
        n_wrong.append("a push without a step")
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).mul_(2)
    vectors.snapshot(store)
    rounded = version.copy()
    for span in agreed.layout.spans:
        here = slice(span.start_elem, span.stop_elem)
        dtype = torch.bfloat16 if span.parameter.dtype == "bfloat16" else torch.float32
        once = torch.from_numpy(version[here]).to(dtype).float().numpy()
        rounded[here] = (2 * once - once) + version[here] if dtype is torch.bfloat16 else 2 * version[here]
    if vectors.push.tobytes() != share_part(rounded, share).tobytes():
        n_wrong.append("a push after a step")
    return n_wrong if store.rounds else ["does not round"]


def main(rank: int, n_ranks: int, folder: str, *kinds: str) -> None:
    with group_of_ranks(rank, n_ranks, folder) as group:
        for kind in kinds:
            wrong = narrow(group) if kind == "narrow" else shared_out(kind, group)
            print(json.dumps({kind: wrong}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
